"""The asyncio shell around :class:`~weenv.plugin.snapshotter.http2.connection.Connection`: a gRPC server on a unix socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping

from weenv.plugin.snapshotter.http2.connection import Broken, Cancelled, Connection, Request

log = logging.getLogger(__name__)

Handler = Callable[[bytes, Mapping[str, str]], AsyncIterator[bytes]]
"""(message, headers) -> the messages of the answer. Refuses by raising :class:`Refused`."""

_TOGETHER = 8
"""Answers sent with one system call at most."""
UNIMPLEMENTED = 12
INTERNAL = 13


class Refused(Exception):
    """An answer that is an error: gRPC's status number and a text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class _Protocol(asyncio.Protocol):
    def __init__(self, server: Http2Server) -> None:
        self.server = server
        self.connection = Connection()
        self.transport: asyncio.Transport | None = None
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._flushing = False
        self._answers = 0
        self._room = asyncio.Event()
        self._room.set()
        self._moved = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.server.protocols.add(self)
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.server.protocols.discard(self)
        self._room.set()
        for task in self.tasks.values():
            task.cancel()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def data_received(self, data: bytes) -> None:
        try:
            events = self.connection.feed(data)
        except Broken as error:
            log.warning("a client broke the protocol: %s", error)
            self.flush()
            if self.transport is not None:
                self.transport.close()
            return
        self._moved.set()
        loop = asyncio.get_running_loop()
        for event in events:
            if isinstance(event, Cancelled):
                task = self.tasks.get(event.stream)
                if task is not None:
                    task.cancel()
            else:
                self.tasks[event.stream] = loop.create_task(self._answer(event), name=event.path)
        self.flush_soon()

    async def _answer(self, request: Request) -> None:
        stream, connection = request.stream, self.connection
        try:
            handler = self.server.handlers.get(request.path)
            if handler is None:
                connection.finish(stream, UNIMPLEMENTED, f"unknown method {request.path[:200]}")
                return
            async for message in handler(request.message, request.headers):
                connection.send(stream, message)
                self.flush_soon()
                await self._writable(stream)
            connection.finish(stream)
        except Refused as refusal:
            connection.finish(stream, refusal.code, refusal.text)
        except asyncio.CancelledError:
            connection.finish(stream, 1, "cancelled")
            raise
        except Exception as error:
            log.error("a handler failed: %s", error, exc_info=error)
            connection.finish(stream, INTERNAL, f"internal error: {type(error).__name__}")
        finally:
            self.tasks.pop(stream, None)
            self._answers += 1
            if self._answers >= _TOGETHER:  # the first of many who asked at once need not wait for the last
                self.flush()
            else:
                self.flush_soon()

    async def _writable(self, stream: int) -> None:
        """Until the socket and the client's windows take more: a slow reader costs one message of memory."""
        await self._room.wait()
        while self.connection.waiting(stream):
            self._moved.clear()
            await self._moved.wait()

    def flush_soon(self) -> None:
        """Send once for everything that this round of the loop produces."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        self._flushing = False
        self._answers = 0
        data = self.connection.take()
        if data and self.transport is not None:
            self.transport.write(data)


class Http2Server:
    """Serves ``handlers`` (by path, ``/package.Service/Method``) on unix sockets."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self.handlers = dict(handlers)
        self.protocols: set[_Protocol] = set()
        self._server: asyncio.Server | None = None

    async def start(self, path: str) -> None:
        """Listen at ``path``, which does not exist yet. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Protocol(self), path, backlog=128)

    async def stop(self, grace: float | None = None) -> None:
        """Take no more requests, give those that run ``grace`` seconds, then cancel them and close."""
        if self._server is not None:
            self._server.close()
        for protocol in list(self.protocols):
            protocol.connection.close()
            protocol.flush()
        running = [task for protocol in self.protocols for task in protocol.tasks.values()]
        if running:
            await asyncio.wait(running, timeout=grace or 0)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for protocol in list(self.protocols):
            protocol.flush()
            if protocol.transport is not None:
                protocol.transport.close()
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None
