"""snapshots.v1 over gRPC: messages in, messages out, errors translated once.

Two transports carry the same handlers: grpcio's asynchronous server, and a small one of our own
(:mod:`weenv.plugin.snapshotter.http2` says why).

The handlers are generic ones over the schema of ``weenv.plugin.containerd.schema``. Errors become statuses by
:data:`STATUS`, the nearest class in the error tree decides; containerd acts on ALREADY_EXISTS, NOT_FOUND and
FAILED_PRECONDITION (its pkg/errgrpc), the rest is for people.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from weenv.core import errors
from weenv.core.unixsocket import clear_path
from weenv.plugin.containerd.schema import EMPTY, SCHEMA, SNAPSHOTS_METHODS, SNAPSHOTS_SERVICE
from weenv.plugin.containerd.types import NAMESPACE_HEADER, Mount, SnapshotInfo
from weenv.plugin.snapshotter.http2.server import Http2Server, Refused
from weenv.plugin.snapshotter.metrics import Metrics
from weenv.plugin.snapshotter.service import Snapshotter

log = logging.getLogger(__name__)

MAX_MESSAGE = 16 << 20
"""Largest message taken, bytes: containerd's own limit."""

STATUS: dict[type[Exception], grpc.StatusCode] = {
    errors.SnapshotNotFound: grpc.StatusCode.NOT_FOUND,
    errors.SnapshotExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.SnapshotInUse: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.BadReference: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnauthorizedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.SourceError: grpc.StatusCode.UNAVAILABLE,
    errors.VerificationError: grpc.StatusCode.DATA_LOSS,
    errors.FormatError: grpc.StatusCode.DATA_LOSS,
    errors.MountError: grpc.StatusCode.UNAVAILABLE,
    errors.StorageError: grpc.StatusCode.INTERNAL,
    errors.WeenvError: grpc.StatusCode.INTERNAL,
    sqlite3.Error: grpc.StatusCode.INTERNAL,
    OSError: grpc.StatusCode.INTERNAL,
}
_FULL = (errno.ENOSPC, errno.EDQUOT)


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Status and one-line text of an error."""
    text = error.message if isinstance(error, errors.WeenvError) else str(error)
    if isinstance(error, errors.WeenvError) and error.hint:
        text += f" ({error.hint})"
    text = " ".join(text.split())
    number = getattr(error, "errno", None)
    if number in _FULL or (isinstance(error, sqlite3.OperationalError) and "full" in str(error)):
        return grpc.StatusCode.RESOURCE_EXHAUSTED, text
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind], text
    return grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}: {text}"


_EXPECTED = (errors.SnapshotError,)
_MOUNT: Any = SCHEMA["Mount"]


def _mounts(answer: Any, mounts: list[Mount]) -> Any:
    return answer(mounts=[_MOUNT(type=m.type, source=m.source, target=m.target, options=m.options) for m in mounts])


class Handlers:
    """One method per request; each takes a message and gives a message."""

    def __init__(self, core: Snapshotter) -> None:
        self.core = core

    async def prepare(self, request: Any) -> Any:
        """Prepare."""
        mounts = await self.core.prepare(request.key, request.parent, dict(request.labels))
        return _mounts(SCHEMA["PrepareSnapshotResponse"], mounts)

    async def view(self, request: Any) -> Any:
        """View."""
        mounts = await self.core.view(request.key, request.parent, dict(request.labels))
        return _mounts(SCHEMA["ViewSnapshotResponse"], mounts)

    async def mounts(self, request: Any) -> Any:
        """Mounts."""
        return _mounts(SCHEMA["MountsResponse"], await self.core.mounts(request.key))

    async def commit(self, request: Any) -> Any:
        """Commit."""
        await self.core.commit(request.name, request.key, dict(request.labels))
        return EMPTY()

    async def remove(self, request: Any) -> Any:
        """Remove."""
        await self.core.remove(request.key)
        return EMPTY()

    async def stat(self, request: Any) -> Any:
        """Stat."""
        return SCHEMA["StatSnapshotResponse"](info=(await self.core.stat(request.key)).to_proto())

    async def update(self, request: Any) -> Any:
        """Update."""
        wanted = SnapshotInfo.from_proto(request.info)
        info = await self.core.update(wanted.name, wanted.labels, list(request.update_mask.paths))
        return SCHEMA["UpdateSnapshotResponse"](info=info.to_proto())

    async def usage(self, request: Any) -> Any:
        """Usage."""
        usage = await self.core.usage(request.key)
        return SCHEMA["UsageResponse"](size=usage.size, inodes=usage.inodes)

    async def cleanup(self, _request: Any) -> Any:
        """Cleanup."""
        await self.core.cleanup()
        return EMPTY()

    async def list(self, request: Any) -> AsyncIterator[Any]:
        """List: messages of at most 100 snapshots."""
        async for block in self.core.list(list(request.filters)):
            yield SCHEMA["ListSnapshotsResponse"](info=[info.to_proto() for info in block])


def _namespace(metadata: Iterable[tuple[str, Any]]) -> str:
    for key, value in metadata:
        if key == NAMESPACE_HEADER:
            return value if isinstance(value, str) else value.decode("utf-8", "replace")
    return ""


def _report(
    method: str, error: Exception, metadata: Iterable[tuple[str, Any]], request: Any, metrics: Metrics
) -> tuple[grpc.StatusCode, str]:
    """Status and text of a failed request; it is counted, and logged where it is more than a refusal."""
    code, text = status_of(error)
    metrics.request_errors.labels(method=method, code=code.name).inc()
    if not isinstance(error, _EXPECTED):
        extra = {"method": method, "code": code.name, "namespace": _namespace(metadata), "key": getattr(request, "key", "")}
        unexpected = not isinstance(error, (errors.WeenvError, OSError, sqlite3.Error))
        log.error("request failed: %s", text, extra=extra, exc_info=error if unexpected else None)
    return code, text


def _decoder(name: str, core: Snapshotter) -> Callable[[bytes], Any]:
    """Parses a request, once it is sure that the root is still there.

    Not given to gRPC as a deserializer: what one raises there is logged with a traceback and answered as UNKNOWN, while
    this is the client's fault and one line.
    """
    message = SCHEMA[name]

    def decode(data: bytes) -> Any:
        core.check_root()
        try:
            return message.FromString(data)
        except DecodeError as error:
            raise errors.InvalidRequest(f"the request is no {name}: {error}") from error

    return decode


def _unary(
    method: str, decode: Callable[[bytes], Any], work: Callable[[Any], Awaitable[Any]], metrics: Metrics
) -> Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]:
    seconds = metrics.request_seconds.labels(method=method)

    async def handle(data: bytes, context: grpc.aio.ServicerContext) -> Any:
        begin = time.perf_counter()
        request = None
        try:
            request = decode(data)
            return await work(request)
        except Exception as error:  # noqa: BLE001 (the seam: whatever it is becomes a status)
            code, text = _report(method, error, context.invocation_metadata() or (), request, metrics)
        finally:
            seconds.observe(time.perf_counter() - begin)
        return await context.abort(code, text)

    return handle


def _streaming(
    method: str, decode: Callable[[bytes], Any], work: Callable[[Any], AsyncIterator[Any]], metrics: Metrics
) -> Callable[[Any, grpc.aio.ServicerContext], AsyncIterator[Any]]:
    async def handle(data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        request = None
        try:
            request = decode(data)
            async for message in work(request):
                yield message
            return
        except Exception as error:  # noqa: BLE001 (the seam: whatever it is becomes a status)
            code, text = _report(method, error, context.invocation_metadata() or (), request, metrics)
        await context.abort(code, text)

    return handle


def _builtin(
    method: str, decode: Callable[[bytes], Any], work: Callable[[Any], Any], metrics: Metrics
) -> Callable[[bytes, Mapping[str, str]], AsyncIterator[bytes]]:
    """A request as the built-in transport wants it served."""
    seconds = metrics.request_seconds.labels(method=method)
    streams = method == "List"

    async def handle(data: bytes, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        begin = time.perf_counter()
        request = None
        try:
            request = decode(data)
            if streams:
                async for message in work(request):
                    yield message.SerializeToString()
            else:
                answer = await work(request)
                seconds.observe(time.perf_counter() - begin)
                yield answer.SerializeToString()
        except Exception as error:
            seconds.observe(time.perf_counter() - begin)
            code, text = _report(method, error, headers.items(), request, metrics)
            raise Refused(code.value[0], text) from error

    return handle


def _quick_prepare(
    core: Snapshotter, decode: Callable[[bytes], Any], metrics: Metrics
) -> Callable[[Sequence[bytes]], list[bytes | None]]:
    """Prepares that arrived together, in one transaction; see :meth:`Snapshotter.prepare_now`."""
    observe = metrics.request_seconds.labels(method="Prepare").observe
    answer = SCHEMA["PrepareSnapshotResponse"]

    def handle(batch: Sequence[bytes]) -> list[bytes | None]:
        begin = time.perf_counter()
        asked: list[tuple[str, str, Mapping[str, str]]] = []
        for data in batch:
            try:
                request = decode(data)
            except errors.WeenvError:
                asked.append(("", "", {}))  # goes the long way, where it is refused
            else:
                asked.append((request.key, request.parent, dict(request.labels)))
        found = core.prepare_now(asked)
        seconds = time.perf_counter() - begin
        answers: list[bytes | None] = []
        for mounts in found:
            if mounts is None:
                answers.append(None)
            else:
                observe(seconds)
                answers.append(_mounts(answer, mounts).SerializeToString())
        return answers

    return handle


class Server(Protocol):
    """What serves; both transports."""

    async def start(self) -> None:
        """Answer requests from now on."""

    async def stop(self, grace: float | None) -> None:
        """Take no more requests, give those that run ``grace`` seconds."""


class BuiltinServer:
    """The service over :mod:`weenv.plugin.snapshotter.http2`."""

    def __init__(self, core: Snapshotter, metrics: Metrics) -> None:
        handlers = Handlers(core)
        table = {}
        for method, (request, _) in SNAPSHOTS_METHODS.items():
            work = getattr(handlers, method.lower())
            table[f"/{SNAPSHOTS_SERVICE}/{method}"] = _builtin(method, _decoder(request, core), work, metrics)
        prepare = SNAPSHOTS_METHODS["Prepare"][0]
        quick = {f"/{SNAPSHOTS_SERVICE}/Prepare": _quick_prepare(core, _decoder(prepare, core), metrics)}
        self._http = Http2Server(table, quick)
        self.path = ""
        self.inherited: socket.socket | None = None
        self.waiting: int | None = None

    async def start(self) -> None:
        """Listen at ``path``, or on what another process listened on before."""
        try:
            await self._http.start(self.path, self.inherited)
        except OSError as error:
            raise errors.ConfigError(f"cannot listen on {self.path}: {error.strerror}") from error
        if self.waiting is not None:
            self._http.adopt(socket.socket(fileno=self.waiting))

    async def stop(self, grace: float | None) -> None:
        """See Http2Server."""
        await self._http.stop(grace)


def make_server(core: Snapshotter, metrics: Metrics, transport: str = "builtin") -> Server:
    """A server with the service, over ``grpcio`` or ``builtin``; nothing is listening yet."""
    if transport == "builtin":
        return BuiltinServer(core, metrics)
    handlers = Handlers(core)
    methods: dict[str, grpc.RpcMethodHandler] = {}
    for method, (request, answer) in SNAPSHOTS_METHODS.items():
        work = getattr(handlers, method.lower())
        decode = _decoder(request, core)
        if method == "List":
            methods[method] = grpc.unary_stream_rpc_method_handler(_streaming(method, decode, work, metrics), None, _serialise)
        else:
            methods[method] = grpc.unary_unary_rpc_method_handler(_unary(method, decode, work, metrics), None, _serialise)
        assert SCHEMA[answer] is not None
    server = grpc.aio.server(
        options=[
            ("grpc.max_send_message_length", MAX_MESSAGE),
            ("grpc.max_receive_message_length", MAX_MESSAGE),
            ("grpc.so_reuseport", 0),
        ]
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SNAPSHOTS_SERVICE, methods),))
    result: Server = server
    return result


def _serialise(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def listen(server: Server, path: str, inherited: socket.socket | None = None, waiting: int | None = None) -> None:
    """Have the server listen on the ``inherited`` socket, or bind one of mode 0600 to ``path``, replacing a dead one there.

    ``waiting`` is a descriptor over which more connections may come (:meth:`Http2Server.adopt`).
    The caller holds the lock that makes it the only instance. Raises :class:`~weenv.core.errors.ConfigError`.
    """
    if inherited is not None:
        if not isinstance(server, BuiltinServer):
            raise errors.ConfigError(
                "grpcio cannot take over a socket that another process listens on",
                hint='set [snapshotter] transport = "builtin"; or start the daemon without a socket unit',
            )
        server.inherited, server.waiting = inherited, waiting
        return
    clear_path(path)
    if isinstance(server, BuiltinServer):
        server.path = path
        return
    assert isinstance(server, grpc.aio.Server)
    before = os.umask(0o177)  # grpc binds by itself
    try:
        if server.add_insecure_port("unix:" + path) == 0:
            raise errors.ConfigError(f"cannot listen on {path}")
    except RuntimeError as error:
        raise errors.ConfigError(f"cannot listen on {path}: {error}") from error
    finally:
        os.umask(before)
    os.chmod(path, 0o600)
