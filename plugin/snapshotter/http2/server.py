"""The asyncio shell around :class:`~weenv.plugin.snapshotter.http2.connection.Connection`: a gRPC server on a unix socket."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from weenv.core.aio import KEEP_NAME
from weenv.core.unixsocket import bind_private
from weenv.plugin.snapshotter.http2.connection import Broken, Cancelled, Connection, Request

log = logging.getLogger(__name__)

Handler = Callable[[bytes, Mapping[str, str]], AsyncIterator[bytes]]
"""(message, headers) -> the messages of the answer. Refuses by raising :class:`Refused`."""

Quick = Callable[[Sequence[bytes]], Sequence[bytes | None]]
"""Messages of requests that arrived together -> their answers, made without waiting; None: the handler has to be asked."""

_TOGETHER = 8
"""Answers sent with one system call at most, and requests given to a :data:`Quick` handler together. The first of
many need not wait for the last, and what eight share (a transaction, a system call) is little for each."""
_MOST = 2048
"""Requests of one connection under way, those included that the client has taken back: beyond, it is not read from.
Twice what it may have open: one that resets its streams (CVE-2023-44487) makes work no faster than it is done."""
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
        self.queued = 0
        """Requests that wait for a quick handler."""
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
        self.pace()  # who does not read his answers cannot ask for more of them

    def resume_writing(self) -> None:
        self._room.set()
        self.pace()

    def pace(self) -> None:
        """Read from the client, or not, by what it has us do already."""
        if self.transport is None or self.transport.is_closing():
            return
        if self._room.is_set() and self.queued + len(self.tasks) < _MOST:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

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
        quick = self.server.quick
        for event in events:
            if isinstance(event, Cancelled):
                task = self.tasks.get(event.stream)
                if task is not None:
                    task.cancel()
            elif event.path in quick:
                self.server.submit(self, event)
            else:
                self.begin(event)
        if events:
            self.pace()
        self.flush_soon()

    def begin(self, request: Request) -> None:
        """Answer a request in a task."""
        task = asyncio.get_running_loop().create_task(self._answer(request), name=request.path)
        self.tasks[request.stream] = task
        task.add_done_callback(lambda _: self._ended(request.stream))  # one taken back at once never begins to run

    def _ended(self, stream: int) -> None:
        self.tasks.pop(stream, None)
        self.pace()

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
    """Serves ``handlers`` (by path, ``/package.Service/Method``) on unix sockets.

    Requests of the paths in ``quick`` are offered to that first, a few at a time, without a task for each.
    """

    def __init__(self, handlers: Mapping[str, Handler], quick: Mapping[str, Quick] | None = None) -> None:
        self.handlers = dict(handlers)
        self.quick = dict(quick or {})
        self.protocols: set[_Protocol] = set()
        self._server: asyncio.Server | None = None
        self._channel: socket.socket | None = None
        self._adopting: set[asyncio.Task[None]] = set()
        self._queue: deque[tuple[_Protocol, Request]] = deque()

    def submit(self, protocol: _Protocol, request: Request) -> None:
        """Have a request answered together with others that are arriving just now."""
        if not self._queue:
            asyncio.get_running_loop().call_soon(self._serve)
        self._queue.append((protocol, request))
        protocol.queued += 1

    def _serve(self) -> None:
        """Answer some, and come back after whatever else is to be done."""
        queue = self._queue
        if not queue:
            return
        path = queue[0][1].path
        batch: list[tuple[_Protocol, Request]] = []
        while queue and len(batch) < _TOGETHER and queue[0][1].path == path:
            entry = queue.popleft()
            entry[0].queued -= 1
            if entry[0].transport is not None:  # else nobody waits any more
                batch.append(entry)
        if queue:
            asyncio.get_running_loop().call_soon(self._serve)
        if not batch:
            return
        answers: Sequence[bytes | None]
        try:
            answers = self.quick[path]([request.message for _, request in batch])
        except Exception as error:
            log.error("a quick handler failed: %s", error, exc_info=error)
            answers = [None] * len(batch)
        told = set()
        for (protocol, request), answer in zip(batch, answers, strict=True):
            if answer is None:
                protocol.begin(request)
            else:
                protocol.connection.answer(request.stream, answer)
                told.add(protocol)
        for protocol in told:
            protocol.flush()
            protocol.pace()

    async def start(self, path: str, inherited: socket.socket | None = None) -> None:
        """Listen at ``path``, which does not exist yet; mode 0600. Or on an ``inherited`` socket. Raises OSError."""
        listener, options = (bind_private(path), {}) if inherited is None else (inherited, KEEP_NAME)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Protocol(self), sock=listener, backlog=128, **options)

    def adopt(self, channel: socket.socket) -> None:
        """Serve connections that somebody else has accepted, and sends over ``channel`` (SCM_RIGHTS), as well.

        That server has sent a SETTINGS frame, and has read nothing.
        """
        channel.setblocking(False)
        self._channel = channel
        asyncio.get_running_loop().add_reader(channel, self._adopt)

    def _adopt(self) -> None:
        assert self._channel is not None
        loop = asyncio.get_running_loop()
        try:
            packet, fds, _, _ = socket.recv_fds(self._channel, 16, 4)
        except BlockingIOError:
            return
        except OSError:
            packet, fds = b"", []
        if not packet:
            self._close_channel()
        for fd in fds:
            task = loop.create_task(self._serve_accepted(socket.socket(fileno=fd)), name="adopt a connection")
            self._adopting.add(task)
            task.add_done_callback(self._adopting.discard)

    async def _serve_accepted(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: _Protocol(self), connection)
        except OSError as error:
            log.debug("a connection that waited is gone: %s", error)
            connection.close()

    def _close_channel(self) -> None:
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._channel = None

    async def stop(self, grace: float | None = None) -> None:
        """Take no more requests, give those that run ``grace`` seconds, then cancel them and close."""
        self._close_channel()
        if self._server is not None:
            self._server.close()
        while self._queue:
            self._serve()
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
