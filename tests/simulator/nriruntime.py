"""A runtime's end of NRI, as containerd's is: written against api.proto and the reader of ttrpc, not against our own code.

It reads as Go's does: through a buffer of 4096 bytes for what is smaller, and with an error (ENOMEM, after which the
connection is of no use) where a frame is larger than what is read into. Messages are built by protobuf itself.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

from weenv.core.proto import Schema
from weenv.plugin.nri.wire.messages import TABLES
from weenv.plugin.nri.wire.ttrpc import TABLES as TTRPC

SCHEMA = Schema("nri.test", {**TABLES, **TTRPC})
PLUGIN = "nri.pkg.api.v1alpha1.Plugin"


class FrameTooLarge(Exception):
    """The runtime would have given up on the connection."""


class GoReader:
    """bufio.Reader over one multiplexed connection."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self._buffer = b""

    async def _read(self, size: int) -> bytes:
        if not self._buffer:
            frame = await self.frames.get()
            room = size if size >= 4096 else 4096
            if len(frame) > room:
                raise FrameTooLarge(f"a frame of {len(frame)} bytes where {room} are read")
            if size >= 4096:
                return frame
            self._buffer = frame
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    async def exactly(self, size: int) -> bytes:
        """``size`` bytes."""
        data = b""
        while len(data) < size:
            data += await self._read(size - len(data))
        return data


class Peer:
    """One plugin's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.streams = {1: GoReader(), 2: GoReader()}
        self.registered: Any = None
        self.events = 0
        self.requests: asyncio.Queue[tuple[int, str, bytes]] = asyncio.Queue()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._stream = -1
        self._tasks = [asyncio.ensure_future(work) for work in (self._trunk(), self._replies(), self._requests())]

    async def _trunk(self) -> None:
        try:
            while True:
                connection, length = struct.unpack(">II", await self.reader.readexactly(8))
                self.streams[connection].frames.put_nowait(await self.reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            self.close()

    async def _message(self, connection: int) -> tuple[int, int, bytes]:
        length, stream, kind, flags = struct.unpack(">IIBB", await self.streams[connection].exactly(10))
        assert flags == 0
        return stream, kind, await self.streams[connection].exactly(length)

    async def _replies(self) -> None:
        try:
            while True:
                stream, kind, data = await self._message(1)
                assert kind == 2
                self._waiting.pop(stream).set_result(SCHEMA["Response"].FromString(data))
        except FrameTooLarge:
            self.close()
            raise

    async def _requests(self) -> None:
        try:
            while True:
                stream, kind, data = await self._message(2)
                request = SCHEMA["Request"].FromString(data)
                assert kind == 1 and stream % 2 == 1 and request.service == "nri.pkg.api.v1alpha1.Runtime"
                self.requests.put_nowait((stream, request.method, request.payload))
        except FrameTooLarge:
            self.close()
            raise

    def send(self, connection: int, stream: int, kind: int, data: bytes, chunk: int = 1 << 22) -> None:
        """A message, in frames of at most ``chunk`` bytes."""
        whole = struct.pack(">IIBB", len(data), stream, kind, 0) + data
        for at in range(0, len(whole), chunk):
            part = whole[at : at + chunk]
            self.writer.write(struct.pack(">II", connection, len(part)) + part)

    async def call(self, method: str, request: Any = None, *, service: str = PLUGIN, chunk: int = 1 << 22) -> Any:
        """Ask the plugin; the Response message. Raises ConnectionError where the connection ends meanwhile."""
        self._stream += 2
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[self._stream] = future
        payload = request if isinstance(request, bytes) else request.SerializeToString() if request is not None else b""
        data = SCHEMA["Request"](service=service, method=method, payload=payload, timeout_nano=2 * 10**9)
        self.send(1, self._stream, 1, data.SerializeToString(), chunk)
        return await future

    async def ask(self, method: str, request: Any, answer: str) -> Any:
        """The same; the answer's message. An error fails the test."""
        response = await self.call(method, request)
        assert response.status.code == 0, response.status.message
        return SCHEMA[answer].FromString(response.payload)

    async def take(self) -> tuple[int, str, bytes]:
        """The plugin's next request: stream, method, payload."""
        async with asyncio.timeout(60):
            return await self.requests.get()

    def reply(self, stream: int, message: Any = None, *, code: int = 0, text: str = "") -> None:
        """Answer a request of the plugin."""
        response = SCHEMA["Response"](payload=message.SerializeToString() if message is not None else b"")
        if code:
            response.status.code, response.status.message = code, text
        self.send(2, stream, 2, response.SerializeToString())

    async def start(
        self,
        *containers: Any,
        name: str = "containerd",
        version: str = "2.1.9",
        nri: str = "",
        early: bool = False,
        config: str = "",
    ) -> Any:
        """Registration, Configure (``early``: before the reply to the registration) and Synchronize; what it answered."""
        stream, method, payload = await self.take()
        assert method == "RegisterPlugin"
        self.registered = SCHEMA["RegisterPluginRequest"].FromString(payload)
        if not early:
            self.reply(stream)
        configure = SCHEMA["ConfigureRequest"](runtime_name=name, runtime_version=version, NRI_version=nri)
        configure.request_timeout, configure.config = 2000, config
        self.events = (await self.ask("Configure", configure, "ConfigureResponse")).events
        if early:
            self.reply(stream)
        pods = {item.pod_sandbox_id: SCHEMA["PodSandbox"](id=item.pod_sandbox_id, namespace="default") for item in containers}
        request = SCHEMA["SynchronizeRequest"](pods=pods.values(), containers=containers)
        return await self.ask("Synchronize", request, "SynchronizeResponse")

    def close(self) -> None:
        """End the connection; calls that wait fail."""
        self.writer.transport.abort()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError("the plugin is gone"))
        self._waiting.clear()

    async def finish(self) -> None:
        """Close and wait for what runs."""
        self.close()
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result


class NriRuntime:
    """Listens; each plugin that connects is a :class:`Peer`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.peers: list[Peer] = []
        self._new: asyncio.Queue[Peer] = asyncio.Queue()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> NriRuntime:
        await self.listen()
        return self

    async def listen(self) -> None:
        """Begin to accept plugins."""
        self._server = await asyncio.start_unix_server(self._accept, self.path)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        self.peers.append(peer)
        self._new.put_nowait(peer)

    async def peer(self) -> Peer:
        """The next plugin that connects."""
        async with asyncio.timeout(60):
            return await self._new.get()

    async def __aexit__(self, *_exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for peer in self.peers:
            await peer.finish()
        await self._server.wait_closed()


def container(identity: str = "c1", *, cpu: float = 0.0, memory: int = 0, swap: int = 0, **annotations: str) -> Any:
    """A Container of pod ``p1``; annotations by our names with ``_`` for ``.`` (``cpu_start``)."""
    made = SCHEMA["Container"](id=identity, pod_sandbox_id="p1", name="main", state=3, pid=77)
    for name, value in annotations.items():
        made.annotations["weenv.dev/" + name.replace("_", ".")] = value
    resources = made.linux.resources
    if cpu:
        resources.cpu.quota.value, resources.cpu.period.value = round(cpu * 100_000), 100_000
    if memory:
        resources.memory.limit.value = memory
    if swap:
        resources.memory.swap.value = swap
    return made
