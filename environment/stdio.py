"""The ends of a process's streams: FIFOs between the shim and this process.

A shim opens each output FIFO for writing and (to hold it) for reading, copies what the process writes, and closes both
once every process that inherited the stream has closed it (containerd v2.1.9, cmd/containerd-shim-runc-v2/process/io.go).
It opens the input FIFO for reading, and holds a writing end until CloseIO (process/exec.go), both in the background
(containerd/fifo, OpenFifo). So readers here are opened before the task is made and see nothing until the shim has come;
the input's end is opened once the shim's is.

Everything runs in one event loop's thread; descriptors are closed exactly once, by whoever sees the end first.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from weenv.environment.outlet import AT_MOST, HURRY, LAST, QUIET, Outlet
from weenv.plugin.containerd.runtime import Stdio

T = TypeVar("T")

CHUNK = 1 << 16
"""Bytes read at a time: what a pipe holds (pipe(7))."""

Sink = Callable[[bytes], "asyncio.Future[None] | None"]
"""Takes data; gives None, or a future that is done when more can be taken."""


class Written:
    """A sink that writes to a descriptor of this process, waiting for its reader without keeping the loop from its work."""

    def __init__(self, fd: int) -> None:
        self._outlet = Outlet(fd)
        self._room: asyncio.Future[None] | None = None

    def __call__(self, data: bytes) -> asyncio.Future[None] | None:
        if self._outlet.write(data):
            return None
        loop = asyncio.get_running_loop()
        self._room = loop.create_future()
        loop.add_writer(self._outlet.fd, self._more)
        return self._room

    def _more(self) -> None:
        assert self._room is not None
        error: OSError | None = None
        try:
            if not self._outlet.flush():
                return
        except OSError as caught:
            error = caught
        self.close()
        if self._room.done():
            return
        if error is None:
            self._room.set_result(None)
        else:
            self._room.set_exception(error)

    def close(self) -> None:
        """Write no more."""
        asyncio.get_running_loop().remove_writer(self._outlet.fd)


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
    """Reads a FIFO into a sink until its end, as fast as that takes it.

    An error of the sink ends nothing: later data is dropped; see ``error``, and ``failed`` is told.
    """

    def __init__(
        self, path: str, sink: Sink, loop: asyncio.AbstractEventLoop, failed: Callable[[], object] = lambda: None
    ) -> None:
        self._loop = loop
        self._sink: Sink | None = sink
        self._failed = failed
        self.error: Exception | None = None
        self.read = 0
        self.blocked: asyncio.Future[None] | None = None
        """What is waited for where the sink takes nothing."""
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
                self.blocked = self._sink(data)
            except Exception as error:  # noqa: BLE001 - given to whoever waits; the process must not block meanwhile
                self._fail(error)
            if self.blocked is not None:
                self._loop.remove_reader(self._fd)
                self.blocked.add_done_callback(self._resume)

    def _resume(self, room: asyncio.Future[None]) -> None:
        self.blocked = None
        if room.cancelled():
            return
        error = room.exception()
        if isinstance(error, Exception):
            self._fail(error)
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._ready)

    def _fail(self, error: Exception) -> None:
        self.error, self._sink = error, None
        self._failed()

    def close(self) -> None:
        """Stop reading."""
        if self.blocked is not None:
            self.blocked.cancel()
            if isinstance(self._sink, Written):
                self._sink.close()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
            if not self.ended.done():
                self.ended.set_result(None)


class Writer:
    """Feeds a FIFO, from when the shim has opened its end: a shim does that some time after it has said that the process
    runs, and what was written and closed before would be lost, and the process wait for its input for ever."""

    def __init__(self, path: str, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._path = path
        self._fd = -1
        self._closed = False

    async def write(self, data: bytes | memoryview) -> None:
        """Write all of it, waiting for room; what nobody reads any more is dropped."""
        await self._open()
        view = memoryview(data)
        while view and self._fd >= 0:
            try:
                view = view[os.write(self._fd, view[:CHUNK]) :]
            except BrokenPipeError:
                self.close()
            except BlockingIOError:
                room = asyncio.Event()
                self._loop.add_writer(self._fd, room.set)
                try:
                    await room.wait()
                finally:
                    if self._fd >= 0:
                        self._loop.remove_writer(self._fd)

    async def end(self) -> None:
        """All has been written; the shim may now be told so."""
        await self._open()
        self.close()

    async def _open(self) -> None:
        """Wait for a reader: without one the kernel does not open a FIFO so (fifo(7), ENXIO)."""
        pause = 0.001
        while self._fd < 0 and not self._closed:
            try:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                self._closed = True  # the environment has been removed meanwhile: nobody reads any more
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                await asyncio.sleep(pause)
                pause = min(0.05, pause * 2)

    def close(self) -> None:
        """Close this end."""
        self._closed = True
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
        self.failed = asyncio.Event()
        """Set where a sink takes nothing any more: what the process writes goes nowhere."""
        os.makedirs(directory, mode=0o700, exist_ok=True)
        try:
            self.stdio = Stdio(self._fifo("0") if stdin else "", self._fifo("1"), "" if terminal else self._fifo("2"), terminal)
            self.readers.append(Reader(self.stdio.stdout, stdout, loop, self.failed.set))
            if not terminal:
                self.readers.append(Reader(self.stdio.stderr, stderr, loop, self.failed.set))
            if stdin:
                self.writer = Writer(self.stdio.stdin, loop)
        except BaseException:
            self.close()
            raise

    def _fifo(self, name: str) -> str:
        path = os.path.join(self.directory, name)
        os.mkfifo(path, 0o600)
        return path

    async def drain(
        self,
        *,
        held: Callable[[], Awaitable[bool]] | None = None,
        quiet: float = QUIET,
        at_most: float = AT_MOST,
        patient: Callable[[], bool] = lambda: True,
    ) -> bool:
        """After the process has ended: read what is left. True where all was read.

        The shim may be slow to pass on the last of it, so silence alone says nothing. A child of the process may hold the
        streams open for as long as it lives: where ``held()`` says so when nothing came for ``quiet`` seconds, and after
        ``at_most`` seconds or LAST bytes, the rest is not waited for. A sink that takes nothing is, while ``patient()``,
        else for HURRY seconds.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + at_most
        begin = self._read()
        while pending := [reader.ended for reader in self.readers if not reader.ended.done()]:
            before, now = self._read(), loop.time()
            blocked = [reader.blocked for reader in self.readers if reader.blocked is not None]
            await asyncio.wait([*(blocked or pending)], timeout=quiet, return_when=asyncio.FIRST_COMPLETED)
            if blocked and patient():
                end += loop.time() - now
                continue
            if blocked:
                end = min(end, now + HURRY)
            if loop.time() >= end:
                break
            if not blocked and self._read() - begin > LAST:
                break
            if not blocked and self._read() == before and held is not None and await held():
                break
        return all(reader.ended.done() for reader in self.readers)

    def _read(self) -> int:
        return sum(reader.read for reader in self.readers)

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result; None where a sink fails first, as when nobody reads our output any more."""
        tasks = asyncio.ensure_future(work), asyncio.ensure_future(self.failed.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def raise_error(self) -> None:
        """Raise what a sink failed with, if one did."""
        for reader in self.readers:
            if reader.error is not None:
                raise reader.error

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
            with contextlib.suppress(OSError):  # others have files in it
                os.rmdir(self.directory)


@contextlib.contextmanager
def drained(directory: str) -> Iterator[None]:
    """For the length of the block, what comes out of the FIFOs of an environment's directory is read and dropped."""
    readers = []
    try:
        for name in ("1", "2"):
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError):  # there is none: nothing comes out
                if stat.S_ISFIFO(os.lstat(path).st_mode):
                    readers.append(Reader(path, lambda _: None, asyncio.get_running_loop()))
        yield
    finally:
        for reader in readers:
            reader.close()
