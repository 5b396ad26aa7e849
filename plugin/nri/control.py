"""The daemon's side of its socket; the requests are those of :mod:`weenv.plugin.nri.ask`.

::

    {"op": "node"}                            -> {"node": {...}, "environments": [{...}, ...]}
    {"op": "admit", "namespace": "default", "id": "task-17", "cpu": 0.5, "memory": 536870912, "cpu_max": 8,
     "memory_max": 8589934592, "role": "task", "deadline": 60, "hold": false}   -> {"waited": 0.0, "start": [0.5, 536870912]}
    {"op": "release", "namespace": "default", "id": "task-17"}                  -> {}

With ``"exact": true`` a start above the node's ceilings is refused, instead of cut to them.

Only root can connect (0600), and is believed no more than anybody else: lines are bounded, numbers checked, one request of a
connection is answered at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from typing import Any

from weenv.core.aio import KEEP_NAME
from weenv.core.errors import ConfigError, WeenvError
from weenv.core.unixsocket import bind_private, clear_path, listens
from weenv.plugin.nri.admission import NotAdmitted, Request
from weenv.plugin.nri.controller import Controller
from weenv.plugin.nri.model import EnvKey, Role

log = logging.getLogger(__name__)

_MAX_REQUEST = 1 << 16
_MAX_NAME = 256
_PATIENCE = 1.0
"""Seconds after which who waits for room is told so, by a line ``{"waiting": true}`` before the answer."""
_NAMES = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
"""What containerd takes as an identifier (pkg/identifiers/validate.go, v2.1.9), but for the order of separators."""


class BadRequest(WeenvError):
    """A request makes no sense."""


class Control:
    """The socket. ``await start(path)``, ``await close()``."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._server: asyncio.Server | None = None
        self._path = ""
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, path: str, inherited: socket.socket | None = None) -> None:
        """Listen, on ``inherited`` where a service manager passed that. A socket that a daemon has left behind is replaced.

        Raises ConfigError.
        """
        if inherited is not None:
            self._server = await asyncio.start_unix_server(self._connected, sock=inherited, limit=_MAX_REQUEST, **KEEP_NAME)
            return
        try:
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            if listens(path):
                raise ConfigError(f"another daemon answers at {path}", hint="stop it, or set elastic.serve.socket")
            clear_path(path)
            self._server = await asyncio.start_unix_server(self._connected, sock=bind_private(path), limit=_MAX_REQUEST)
        except OSError as error:
            raise ConfigError(f"cannot listen on {path}: {error.strerror}", hint="set elastic.serve.socket") from error
        self._path = path

    async def close(self) -> None:
        """Stop listening, end all connections; who waits for room is told nothing more."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        held: set[EnvKey] = set()
        try:
            await self._converse(reader, writer, held)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            pass  # it left, or speaks something else
        except asyncio.CancelledError:
            writer.transport.abort()  # we end, whether or not the other side reads
        finally:
            for key in held:
                self._controller.door.let_go(key)
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, held: set[EnvKey]) -> None:
        ahead = b""
        while line := ahead + await reader.readline():
            ahead = b""
            work = asyncio.ensure_future(self._answer(line, held))
            # Who waits for room may leave meanwhile, and its place in the line is free at once: what comes next is the end
            # of the connection, or the first byte of the next request.
            more = asyncio.ensure_future(reader.read(1)) if b'"admit"' in line else None
            try:
                if more is not None:
                    ahead = await self._wait_for_room(work, more, writer)
                    if not work.done() and not ahead:
                        return
                answer = await work
            finally:
                work.cancel()
                if more is not None:
                    more.cancel()
                await asyncio.gather(work, *([more] if more is not None else []), return_exceptions=True)
            if more is not None and not more.cancelled() and not ahead:
                ahead = more.result()
            writer.write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
            await writer.drain()

    @staticmethod
    async def _wait_for_room(
        work: asyncio.Future[dict[str, Any]], more: asyncio.Future[bytes], writer: asyncio.StreamWriter
    ) -> bytes:
        """Until one of both is there; what came of the connection meanwhile."""
        both: list[asyncio.Future[Any]] = [work, more]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED, timeout=_PATIENCE)
        if not work.done() and not more.done():
            writer.write(b'{"waiting":true}\n')
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return more.result() if more.done() else b""

    async def _answer(self, line: bytes, held: set[EnvKey]) -> dict[str, Any]:
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                raise BadRequest("a request is a JSON object")
            op = request.get("op")
            if op == "node":
                return {"node": self._controller.node(), "environments": self._controller.rows()}
            if op == "admit":
                return await self._admit(request, held)
            if op == "release":
                key = _key(request)
                held.discard(key)
                self._controller.door.let_go(key)
                return {}
            raise BadRequest(f"unknown request {str(op)[:40]!r}")
        except WeenvError as error:
            return {"error": error.message, "hint": error.hint}
        except (ValueError, RecursionError):
            return {"error": "a request is one line of JSON", "hint": ""}

    async def _admit(self, request: dict[str, Any], held: set[EnvKey]) -> dict[str, Any]:
        key = _key(request)
        try:
            role = Role(request.get("role", "task"))
        except ValueError as error:
            raise BadRequest(f"role must be {', '.join(Role)}, not {str(request['role'])[:40]!r}") from error
        cpu, memory = _number(request, "cpu", 0, 1e5), int(_number(request, "memory", 0, 1 << 60))
        above = self._controller.config.above(cpu, memory)
        if above and request.get("exact") is True:
            raise BadRequest(above, hint="ask for less, or raise it in the node's configuration")
        bounds = self._controller.config.bounds(
            cpu, memory, _number(request, "cpu_max", 0, 1e5), int(_number(request, "memory_max", 0, 1 << 60)),
        )  # fmt: skip
        deadline = _number(request, "deadline", 0, 1e6) if request.get("deadline") is not None else None
        start = [bounds.start.cpu, bounds.start.memory]
        if self._controller.manages(key):  # there is one of that name already: its maker's affair, not a second place
            return {"waited": 0.0, "start": start}
        try:
            waited = await self._controller.door.admit(Request(key, bounds, role), deadline)
        except NotAdmitted as error:
            if not above:
                raise
            raise NotAdmitted(f"{error.message} ({above}, and was cut to it)", hint=error.hint) from error
        if request.get("hold") is True:
            self._controller.door.hold(key)
            held.add(key)
        return {"waited": round(waited, 3), "start": start}


def _key(request: dict[str, Any]) -> EnvKey:
    names = [request.get("namespace"), request.get("id")]
    for name in names:
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not set(name) <= _NAMES:
            raise BadRequest(f"namespace and id must be names as containerd takes them, not {str(name)[:40]!r}")
    return EnvKey(str(names[0]), str(names[1]))


def _number(request: dict[str, Any], name: str, low: float, high: float) -> float:
    value = request.get(name, 0)
    if type(value) not in (int, float) or not low <= value <= high:  # which no NaN is, nor infinity
        raise BadRequest(f"{name} must be a number from {low:g} to {high:g}, not {str(value)[:40]!r}")
    return value  # type: ignore[no-any-return]
