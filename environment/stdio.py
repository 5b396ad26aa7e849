"""The ends of a process's streams: FIFOs between the shim and this process.

A shim opens each output FIFO for writing and (to hold it) for reading, copies what the process writes, and closes both
once every process that inherited the stream has closed it (containerd v2.1.9, cmd/containerd-shim-runc-v2/process/io.go).
It opens the input FIFO for reading without waiting, and holds a writing end until CloseIO (process/exec.go). So readers
here are opened before the task is made and see nothing until the shim has come; the input's end is opened for reading
and writing, so that it neither waits nor breaks.

Everything runs in one event loop's thread; descriptors are closed exactly once, by whoever sees the end first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from weenv.plugin.containerd.runtime import Stdio

CHUNK = 1 << 16
"""Bytes read at a time: what a pipe holds (pipe(7))."""

Sink = Callable[[bytes], None]


class Collected:
    """A sink that keeps the first ``limit`` bytes and counts the rest: what a process writes never fills the memory."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.dropped = 0
        self._data = bytearray()

    def __call__(self, data: bytes) -> None:
        room = self.limit - len(self._data)
        if room >= len(data):
            self._data += data
            return
        self._data += data[: max(0, room)]
        self.dropped += len(data) - max(0, room)

    def bytes(self) -> bytes:
        """What was kept."""
        return bytes(self._data)


class Reader:
    """Reads a FIFO into a sink until its end. An error of the sink ends nothing: later data is dropped, see ``error``."""

    def __init__(self, path: str, sink: Sink, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._sink: Sink | None = sink
        self.error: Exception | None = None
        self.read = 0
        self.ended = loop.create_future()
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        loop.add_reader(self._fd, self._ready)

    def _ready(self) -> None:
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self.read += len(data)
        if self._sink is not None:
            try:
                self._sink(data)
            except Exception as error:  # noqa: BLE001 - given to whoever waits; the process must not block meanwhile
                self.error, self._sink = error, None

    def close(self) -> None:
        """Stop reading."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
            if not self.ended.done():
                self.ended.set_result(None)


class Writer:
    """Feeds a FIFO. The shim must have opened its end before :meth:`close`, or what was written is lost."""

    def __init__(self, path: str, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    async def write(self, data: bytes | memoryview) -> None:
        """Write all of it, waiting for room."""
        view = memoryview(data)
        while view and self._fd >= 0:
            try:
                view = view[os.write(self._fd, view[:CHUNK]) :]
            except BlockingIOError:
                room = asyncio.Event()
                self._loop.add_writer(self._fd, room.set)
                try:
                    await room.wait()
                finally:
                    if self._fd >= 0:
                        self._loop.remove_writer(self._fd)

    def close(self) -> None:
        """Close this end."""
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1


class Streams:
    """The three streams of one process, in a directory of their own.

    ``stdout`` and ``stderr`` are sinks; a terminal has one stream, its output. ``stdin``: whether there is to be one.
    ``keep``: the directory is the environment's own, so only the FIFOs go at the end.
    """

    def __init__(
        self, directory: str, *, stdout: Sink, stderr: Sink, stdin: bool = False, terminal: bool = False, keep: bool = False
    ) -> None:
        self.directory = directory
        self._keep = keep
        loop = asyncio.get_running_loop()
        self.readers: list[Reader] = []
        self.writer: Writer | None = None
        os.makedirs(directory, mode=0o700, exist_ok=True)
        try:
            self.stdio = Stdio(self._fifo("0") if stdin else "", self._fifo("1"), "" if terminal else self._fifo("2"), terminal)
            self.readers.append(Reader(self.stdio.stdout, stdout, loop))
            if not terminal:
                self.readers.append(Reader(self.stdio.stderr, stderr, loop))
            if stdin:
                self.writer = Writer(self.stdio.stdin, loop)
        except BaseException:
            self.close()
            raise

    def _fifo(self, name: str) -> str:
        path = os.path.join(self.directory, name)
        os.mkfifo(path, 0o600)
        return path

    async def drain(self, *, quiet: float = 0.25, at_most: float = 5.0) -> bool:
        """After the process has ended: read what is left. True where all was read.

        A child of it may hold the streams open for as long as it lives: once nothing came for ``quiet`` seconds, or after
        ``at_most`` seconds, the rest is not waited for.
        """
        end = asyncio.get_running_loop().time() + at_most
        while pending := [reader.ended for reader in self.readers if not reader.ended.done()]:
            before = sum(reader.read for reader in self.readers)
            await asyncio.wait(pending, timeout=quiet)
            left = end - asyncio.get_running_loop().time()
            if left <= 0 or sum(reader.read for reader in self.readers) == before:
                break
        return all(reader.ended.done() for reader in self.readers)

    def close(self) -> None:
        """Close all ends and remove the directory."""
        for reader in self.readers:
            reader.close()
        if self.writer is not None:
            self.writer.close()
        for name in ("0", "1", "2"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.directory, name))
        if not self._keep:
            with contextlib.suppress(OSError):
                os.rmdir(self.directory)
