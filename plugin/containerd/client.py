"""A thin asynchronous client of containerd: snapshots, images, content, leases, namespaces, introspection, version.

One :class:`Client` is one gRPC channel; ``client.namespace("k8s.io")`` gives a cheap view of it that sends the namespace
(and, where set, the lease) with every call. Errors are :class:`ContainerdError`, whose ``code`` is gRPC's status name.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from weenv.core.errors import ForkedError, WeenvError
from weenv.core.rights import remedy
from weenv.core.unixsocket import listens
from weenv.plugin.containerd.schema import EMPTY, SCHEMA, SNAPSHOTS_METHODS, SNAPSHOTS_SERVICE
from weenv.plugin.containerd.types import (
    LEASE_HEADER,
    NAMESPACE_HEADER,
    ContentInfo,
    Descriptor,
    Image,
    Lease,
    Mount,
    SnapshotInfo,
    Usage,
)

DEFAULT_ADDRESS = "/run/containerd/containerd.sock"
MAX_MESSAGE = 16 << 20
"""containerd's own limit for a message, bytes (defaults/defaults.go, DefaultMaxRecvMsgSize, v2.1.9)."""
_WRITE_CHUNK = 1 << 20

_IMAGES = "containerd.services.images.v1.Images"
_CONTENT = "containerd.services.content.v1.Content"
_DIFF = "containerd.services.diff.v1.Diff"
_LEASES = "containerd.services.leases.v1.Leases"
_NAMESPACES = "containerd.services.namespaces.v1.Namespaces"
_INTROSPECTION = "containerd.services.introspection.v1.Introspection"
_VERSION = "containerd.services.version.v1.Version"
_EMPTY = ".google.protobuf.Empty"


class ContainerdError(WeenvError):
    """containerd answered with an error. ``code`` is the status name, such as ``NOT_FOUND``."""

    def __init__(self, message: str, code: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code


_NOT_LOADED = re.compile(r"snapshotter not loaded: ([^ :]+)")
"""containerd's words (plugins/services/snapshots/service.go, v2.1.9; services/snapshots, v1.7)."""
_UNCONNECTED = "failed to connect to all addresses"
"""gRPC's own words where there never was a connection; what the other end answers is told as it is."""
_DIAL = re.compile(r"dial unix(?:://| )(/[^:]+): ")
"""The words of containerd (pkg/dialer, v2.1.9: ``unix:///run/...: timeout``) and Go where a plugin's socket is not reached."""


def _translate(error: grpc.aio.AioRpcError, method: str, address: str) -> ContainerdError:
    code: str = error.code().name
    detail = (error.details() or "").splitlines()[0] if error.details() else "no detail"
    if (absent := _NOT_LOADED.search(detail)) is not None:
        return ContainerdError(
            f"containerd at {address} has no snapshotter {absent[1]!r}", code,
            hint=f"weenv install declares it ([proxy_plugins.{absent[1]}], see weenv doctor); then start containerd again",
        )  # fmt: skip
    hint = ""
    if code == "UNAVAILABLE":
        if (unheard := _DIAL.search(detail)) is not None:
            hint = "start it: systemctl start weenv.target, or weenv serve (see weenv doctor)"
            return ContainerdError(f"containerd does not reach its plugin at {unheard[1]}", code, hint=hint)
        try:
            if _UNCONNECTED in detail and not listens(address):
                hint = "start containerd, or name its socket: [run] address, or --containerd where a command has it"
                return ContainerdError(f"nothing listens at {address}", code, hint=hint)
        except PermissionError as denied:
            return ContainerdError(f"cannot connect to {address}: {denied.strerror}", code, hint=remedy(denied))
        except OSError:
            pass  # nobody can tell
        hint = "is containerd running, and is this its socket?"
    return ContainerdError(f"containerd {method.rsplit('/', 1)[-1]}: {detail}", code, hint=hint)


class Client:
    """A connection to one containerd. Use as ``async with Client(address) as client``.

    Raises ForkedError in a process that was forked from one that had made any.
    """

    _process = 0
    """The process that uses gRPC: its threads, and locks that they hold, make it hang or crash in a forked child."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        if Client._process not in (0, os.getpid()):
            raise ForkedError(
                "this process was forked from one that had used containerd",
                hint="use multiprocessing's 'spawn' or 'forkserver', or fork before the first environment is started",
            )
        Client._process = os.getpid()
        self.address = address
        self._channel = grpc.aio.insecure_channel(
            "unix:" + address,
            options=[
                ("grpc.max_send_message_length", MAX_MESSAGE),
                ("grpc.max_receive_message_length", MAX_MESSAGE),
                ("grpc.default_authority", "localhost"),
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )
        self._methods: dict[tuple[str, str], Any] = {}

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    def namespace(self, name: str, *, lease: str = "") -> Namespaced:
        """A view of this connection that works in namespace ``name``, under ``lease`` where one is given."""
        return Namespaced(self, name, lease)

    async def version(self, *, deadline: float = 10.0) -> tuple[str, str]:
        """The (version, revision) of the daemon."""
        answer = await self.call(f"/{_VERSION}/Version", EMPTY(), "VersionResponse", deadline=deadline)
        return answer.version, answer.revision

    async def namespaces(self) -> list[str]:
        """The names of all namespaces."""
        answer = await self.call(f"/{_NAMESPACES}/List", SCHEMA["ListNamespacesRequest"](), "ListNamespacesResponse")
        return [item.name for item in answer.namespaces]

    async def plugins(self, *filters: str) -> list[Any]:
        """``Plugin`` messages of the introspection service."""
        request = SCHEMA["PluginsRequest"](filters=filters)
        return list((await self.call(f"/{_INTROSPECTION}/Plugins", request, "PluginsResponse")).plugins)

    def _method(self, kind: str, path: str, answer: str) -> Any:
        key = (kind, path)
        if key not in self._methods:
            make = getattr(self._channel, kind)
            self._methods[key] = make(
                path,
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=SCHEMA[answer].FromString,
            )
        return self._methods[key]

    async def call(
        self, path: str, request: Any, answer: str, *, headers: Sequence[tuple[str, str]] = (), deadline: float | None = None
    ) -> Any:
        """One unary call, bounded by ``deadline`` seconds; ``answer`` is the SCHEMA key of the response.

        Raises :class:`ContainerdError`.
        """
        try:
            return await self._method("unary_unary", path, answer)(request, metadata=tuple(headers), timeout=deadline)
        except grpc.aio.AioRpcError as error:
            raise _translate(error, path, self.address) from error

    async def stream(
        self, path: str, request: Any, answer: str, *, headers: Sequence[tuple[str, str]] = ()
    ) -> AsyncIterator[Any]:
        """One call that is answered with a stream."""
        call = self._method("unary_stream", path, answer)(request, metadata=tuple(headers))
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise _translate(error, path, self.address) from error
        finally:
            call.cancel()

    async def converse(
        self, path: str, requests: AsyncIterator[Any], answer: str, *, headers: Sequence[tuple[str, str]] = ()
    ) -> list[Any]:
        """A bidirectional call: send everything, return all answers."""
        call = self._method("stream_stream", path, answer)(requests, metadata=tuple(headers))
        try:
            return [message async for message in call]
        except grpc.aio.AioRpcError as error:
            raise _translate(error, path, self.address) from error
        finally:
            call.cancel()

    def open(self, path: str, answer: str, *, headers: Sequence[tuple[str, str]] = ()) -> Any:
        """A bidirectional call of grpc's, to be written to and read from."""
        return self._method("stream_stream", path, answer)(metadata=tuple(headers))


async def _ask(call: Any, message: Any) -> None:
    """Send a message of a bidirectional call and wait for its answer. Raises AioRpcError."""
    with contextlib.suppress(asyncio.InvalidStateError):  # the call has ended: reading says how
        await call.write(message)
    if await call.read() is grpc.aio.EOF:
        raise ContainerdError("containerd ended the call early", "UNKNOWN")


class Namespaced:
    """containerd's services within one namespace."""

    def __init__(self, client: Client, namespace: str, lease: str = "") -> None:
        self.client = client
        self.name = namespace
        self.lease = lease
        self.headers: tuple[tuple[str, str], ...] = ((NAMESPACE_HEADER, namespace),)
        if lease:
            self.headers += ((LEASE_HEADER, lease),)

    def snapshots(self, snapshotter: str) -> Snapshots:
        """The snapshots of one snapshotter."""
        return Snapshots(self, snapshotter)

    async def call(self, path: str, request: Any, answer: str, *, deadline: float | None = None) -> Any:
        """One unary call in this namespace."""
        return await self.client.call(path, request, answer, headers=self.headers, deadline=deadline)

    # images

    async def get_image(self, name: str) -> Image:
        """The image record called ``name`` (a full reference)."""
        answer = await self.call(f"/{_IMAGES}/Get", SCHEMA["GetImageRequest"](name=name), "GetImageResponse")
        return Image.from_proto(answer.image)

    async def list_images(self, *filters: str) -> list[Image]:
        """Image records that match any of ``filters``, or all."""
        answer = await self.call(f"/{_IMAGES}/List", SCHEMA["ListImagesRequest"](filters=filters), "ListImagesResponse")
        return [Image.from_proto(image) for image in answer.images]

    async def create_image(self, image: Image) -> Image:
        """Add an image record."""
        request = SCHEMA["CreateImageRequest"](image=image.to_proto())
        return Image.from_proto((await self.call(f"/{_IMAGES}/Create", request, "CreateImageResponse")).image)

    async def update_image(self, image: Image, *fields: str) -> Image:
        """Change an image record; ``fields`` are field-mask paths (``target``, ``labels``), none means all."""
        request = SCHEMA["UpdateImageRequest"](image=image.to_proto())
        request.update_mask.paths.extend(fields)
        return Image.from_proto((await self.call(f"/{_IMAGES}/Update", request, "UpdateImageResponse")).image)

    async def put_image(self, image: Image) -> Image:
        """Create the record, or point an existing one to the new target and labels."""
        try:
            return await self.create_image(image)
        except ContainerdError as error:
            if error.code != "ALREADY_EXISTS":
                raise
            return await self.update_image(image, "target", "labels")

    async def delete_image(self, name: str, *, sync: bool = False) -> None:
        """Remove an image record; ``sync`` waits for the garbage collection."""
        await self.call(f"/{_IMAGES}/Delete", SCHEMA["DeleteImageRequest"](name=name, sync=sync), _EMPTY)

    # content

    async def content_info(self, digest: str) -> ContentInfo:
        """Size and labels of a blob."""
        request = SCHEMA["ContentInfoRequest"](digest=digest)
        return ContentInfo.from_proto((await self.call(f"/{_CONTENT}/Info", request, "ContentInfoResponse")).info)

    async def read_content(self, digest: str, *, limit: int = 64 << 20) -> bytes:
        """A whole blob of at most ``limit`` bytes. Raises :class:`ContainerdError` where it is larger or missing."""
        request = SCHEMA["ReadContentRequest"](digest=digest)
        data = bytearray()
        async for part in self.client.stream(f"/{_CONTENT}/Read", request, "ReadContentResponse", headers=self.headers):
            data += part.data
            if len(data) > limit:
                raise ContainerdError(f"content {digest} is larger than {limit} bytes", "OUT_OF_RANGE")
        return bytes(data)

    async def write_content(self, ref: str, data: bytes, digest: str, *, labels: Mapping[str, str] | None = None) -> None:
        """Store a blob; one that is there already gets ``labels`` merged into its own."""
        await self._write(ref, io.BytesIO(data), len(data), digest, labels)

    async def write_content_file(
        self, ref: str, path: str, size: int, digest: str, *, labels: Mapping[str, str] | None = None
    ) -> None:
        """The same with the ``size`` bytes of a file. Raises OSError, too."""
        with open(path, "rb", buffering=0) as file:  # noqa: ASYNC230 - read in threads
            await self._write(ref, file, size, digest, labels)

    async def _write(self, ref: str, source: Any, size: int, digest: str, labels: Mapping[str, str] | None) -> None:
        async def parts() -> AsyncIterator[Any]:
            write = SCHEMA["WriteContentRequest"]
            last = max(0, (size - 1) // _WRITE_CHUNK) * _WRITE_CHUNK
            for offset in range(0, last, _WRITE_CHUNK):
                piece = await asyncio.to_thread(source.read, _WRITE_CHUNK)
                yield write(action=1, ref=ref, total=size, expected=digest, offset=offset, data=piece)
            piece = source.read(_WRITE_CHUNK)
            yield write(action=2, ref=ref, total=size, expected=digest, offset=last, data=piece, labels=labels or {})

        try:
            await self.client.converse(f"/{_CONTENT}/Write", parts(), "WriteContentResponse", headers=self.headers)
        except ContainerdError as error:
            if error.code != "ALREADY_EXISTS":
                raise
            if labels:
                await self.label_content(digest, labels)

    async def write_content_stream(
        self, ref: str, chunks: AsyncIterator[bytes], size: int, digest: str, *, labels: Mapping[str, str] | None = None
    ) -> None:
        """The same with bytes as they come, ``size`` of them. Raises also what ``chunks`` raises.

        containerd looks at the digest in the end: FAILED_PRECONDITION where it is another. What was begun goes with its lease.
        """
        call = self.client.open(f"/{_CONTENT}/Write", "WriteContentResponse", headers=self.headers)
        write, offset, held = SCHEMA["WriteContentRequest"], 0, bytearray()
        try:
            async for chunk in chunks:
                held += chunk
                if len(held) >= _WRITE_CHUNK:
                    await _ask(call, write(action=1, ref=ref, total=size, expected=digest, offset=offset, data=bytes(held)))
                    offset += len(held)
                    held.clear()
            last = write(action=2, ref=ref, total=size, expected=digest, offset=offset, data=bytes(held), labels=labels or {})
            await _ask(call, last)
            await call.done_writing()
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.ALREADY_EXISTS:
                raise _translate(error, "Write", self.client.address) from error
            if labels:
                await self.label_content(digest, labels)
        finally:
            call.cancel()

    async def apply(self, layer: Descriptor, mounts: Sequence[Mount]) -> str:
        """Have containerd unpack a layer of its content store into a mounted snapshot; the diffID of what it unpacked."""
        request = SCHEMA["ApplyRequest"](diff=layer.to_proto(), mounts=[mount.to_proto() for mount in mounts])
        return str((await self.call(f"/{_DIFF}/Apply", request, "ApplyResponse")).applied.digest)

    async def label_content(self, digest: str, labels: Mapping[str, str]) -> ContentInfo:
        """Set the given labels of a blob; its others stay."""
        request = SCHEMA["ContentUpdateRequest"](info=SCHEMA["ContentInfo"](digest=digest, labels=dict(labels)))
        request.update_mask.paths.extend("labels." + name for name in labels)
        return ContentInfo.from_proto((await self.call(f"/{_CONTENT}/Update", request, "ContentUpdateResponse")).info)

    # leases

    async def create_lease(self, lease: str, labels: Mapping[str, str] | None = None) -> Lease:
        """Make a lease called ``lease``; label ``containerd.io/gc.expire`` (RFC 3339) bounds its life."""
        request = SCHEMA["CreateLeaseRequest"](id=lease, labels=dict(labels or {}))
        return Lease.from_proto((await self.call(f"/{_LEASES}/Create", request, "CreateLeaseResponse")).lease)

    async def list_leases(self, *filters: str) -> list[Lease]:
        """All leases that match any of ``filters``."""
        request = SCHEMA["ListLeasesRequest"](filters=filters)
        return [Lease.from_proto(m) for m in (await self.call(f"/{_LEASES}/List", request, "ListLeasesResponse")).leases]

    async def delete_lease(self, lease: str, *, sync: bool = False) -> None:
        """End a lease; ``sync`` waits for the garbage collection."""
        await self.call(f"/{_LEASES}/Delete", SCHEMA["DeleteLeaseRequest"](id=lease, sync=sync), _EMPTY)

    async def list_lease_resources(self, lease: str) -> list[str]:
        """The names of what a lease keeps, of whatever type."""
        answer = await self.call(f"/{_LEASES}/ListResources", SCHEMA["ListResourcesRequest"](id=lease), "ListResourcesResponse")
        return [str(item.id) for item in answer.resources]

    async def add_lease_resource(self, lease: str, resource: str, kind: str) -> None:
        """Keep ``resource`` of type ``kind`` (``content``, ``snapshots/<snapshotter>``) as long as the lease lives."""
        request = SCHEMA["AddResourceRequest"](id=lease, resource=SCHEMA["LeaseResource"](id=resource, type=kind))
        await self.call(f"/{_LEASES}/AddResource", request, _EMPTY)


class Snapshots:
    """The snapshots.v1 service of one snapshotter; works against containerd and against a proxy plugin's own socket."""

    def __init__(self, namespace: Namespaced, snapshotter: str) -> None:
        self._namespace = namespace
        self.snapshotter = snapshotter

    async def _call(self, method: str, **fields: Any) -> Any:
        request, answer = SNAPSHOTS_METHODS[method]
        message = SCHEMA[request](snapshotter=self.snapshotter, **fields)
        return await self._namespace.call(f"/{SNAPSHOTS_SERVICE}/{method}", message, answer)

    async def prepare(self, key: str, parent: str = "", labels: Mapping[str, str] | None = None) -> list[Mount]:
        """Make a writable snapshot on top of ``parent``."""
        answer = await self._call("Prepare", key=key, parent=parent, labels=dict(labels or {}))
        return [Mount.from_proto(mount) for mount in answer.mounts]

    async def view(self, key: str, parent: str = "", labels: Mapping[str, str] | None = None) -> list[Mount]:
        """Make a read-only snapshot of ``parent``."""
        answer = await self._call("View", key=key, parent=parent, labels=dict(labels or {}))
        return [Mount.from_proto(mount) for mount in answer.mounts]

    async def mounts(self, key: str) -> list[Mount]:
        """How to mount an active snapshot or view."""
        return [Mount.from_proto(mount) for mount in (await self._call("Mounts", key=key)).mounts]

    async def commit(self, name: str, key: str, labels: Mapping[str, str] | None = None) -> None:
        """Turn the active snapshot ``key`` into the committed snapshot ``name``."""
        await self._call("Commit", name=name, key=key, labels=dict(labels or {}))

    async def remove(self, key: str) -> None:
        """Remove a snapshot."""
        await self._call("Remove", key=key)

    async def stat(self, key: str) -> SnapshotInfo:
        """What is known of a snapshot."""
        return SnapshotInfo.from_proto((await self._call("Stat", key=key)).info)

    async def update(self, info: SnapshotInfo, *fields: str) -> SnapshotInfo:
        """Change labels: ``fields`` are field-mask paths (``labels``, ``labels.<name>``), none means all labels."""
        request, answer = SNAPSHOTS_METHODS["Update"]
        message = SCHEMA[request](snapshotter=self.snapshotter, info=info.to_proto())
        message.update_mask.paths.extend(fields)
        reply = await self._namespace.call(f"/{SNAPSHOTS_SERVICE}/Update", message, answer)
        return SnapshotInfo.from_proto(reply.info)

    async def list(self, *filters: str) -> list[SnapshotInfo]:
        """All snapshots that match any of ``filters``."""
        request, answer = SNAPSHOTS_METHODS["List"]
        message = SCHEMA[request](snapshotter=self.snapshotter, filters=filters)
        found: list[SnapshotInfo] = []
        path = f"/{SNAPSHOTS_SERVICE}/List"
        async for block in self._namespace.client.stream(path, message, answer, headers=self._namespace.headers):
            found.extend(SnapshotInfo.from_proto(info) for info in block.info)
        return found

    async def usage(self, key: str) -> Usage:
        """Disk used by a snapshot."""
        answer = await self._call("Usage", key=key)
        return Usage(answer.size, answer.inodes)

    async def cleanup(self) -> None:
        """Free what removed snapshots left behind."""
        await self._call("Cleanup")


__all__ = [
    "DEFAULT_ADDRESS",
    "Client",
    "ContainerdError",
    "Descriptor",
    "Image",
    "Namespaced",
    "Snapshots",
]
