"""The bytes of a layer's tar stream, for a process that is not blobfs: from the plain file, or by asking blobfs.

A layer of which every frame is on disk is read from ``data``, as the EROFS plane lets the kernel do it. Of any other only
blobfs knows what is there, so it is asked over its socket (blobfs/peers.py); while no blobfs answers, reads wait for the next
one, which is asked again for what the last one owed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import socket
import time
from typing import Final

from weenv.plugin.snapshotter.blobfs import wire
from weenv.plugin.snapshotter.blobfs.peers import MAX_PIECE, peers_path
from weenv.plugin.snapshotter.cache.store import hold
from weenv.plugin.snapshotter.layerdir import EVICT
from weenv.plugin.snapshotter.planes.images import plain_file

log = logging.getLogger(__name__)

_AT_ONCE: Final = 64
"""Pieces asked for at a time: 4 MiB in the socket's buffers."""
_LOOK: Final = 2.0
"""Seconds between looks at whether the layer is complete by now."""
_PAUSES: Final = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Seconds between attempts to reach blobfs; the last is repeated."""
_COMPLAIN: Final = 24
"""Attempts, some ten seconds, after which it is no restart of blobfs any more."""


class Lost(Exception):
    """No blobfs answers, or the one that was asked ended before it did."""


class BlobReader:
    """Reads layer ``name`` (64 hex digits) from the blobfs whose mount point is ``blobs``. Belongs to one event loop."""

    def __init__(self, blobs: str, name: str) -> None:
        self._path = peers_path(blobs)
        self._name = name.encode()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._connecting = asyncio.Lock()
        self._socket: socket.socket | None = None
        self._node = 0
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count(1)

    async def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes at ``offset``, which lie within the stream. Raises :class:`Lost`, and OSError as blobfs says."""
        if length <= MAX_PIECE:
            return await self._piece(offset, length)
        end = offset + length
        parts = [self._piece(at, min(MAX_PIECE, end - at)) for at in range(offset, end, MAX_PIECE)]
        return b"".join(await asyncio.gather(*parts))

    async def _piece(self, offset: int, length: int) -> bytes:
        async with self._slots:
            await self._connect()
            answer = await self._ask(wire.READ, self._node, wire.READ_IN.pack(0, offset, length, 0, 0, 0, 0))
        if len(answer) != length:
            raise OSError(errno.EIO, f"blobfs gave {len(answer)} of {length} bytes")
        return answer

    async def _ask(self, opcode: int, node: int, body: bytes) -> bytes:
        connection = self._socket
        if connection is None:
            raise Lost
        number = next(self._numbers) & 0xFFFFFFFF
        head = wire.IN_HEADER.pack(wire.IN_HEADER.size + len(body), opcode, number, node, 0, 0, 0, 0, 0)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            connection.send(head + body)  # at most 64 requests of 100 bytes are under way: there is room
        except OSError:
            self._lose()
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    async def _connect(self) -> None:
        async with self._connecting:
            if self._socket is not None:
                return
            try:
                self._open()
            except OSError as error:
                raise Lost(str(error)) from error
            try:
                entry = await self._ask(wire.LOOKUP, wire.ROOT_ID, self._name + b"\0")
            except OSError:
                self._lose()
                raise
            self._node = wire.ENTRY_HEAD.unpack_from(entry)[0]

    def _open(self) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            made.connect(self._path)
        except BaseException:
            made.close()
            raise
        self._socket = made
        asyncio.get_running_loop().add_reader(made.fileno(), self._receive, made)

    def _receive(self, connection: socket.socket) -> None:
        while True:
            try:
                packet = connection.recv(MAX_PIECE + wire.OUT_HEADER.size)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if len(packet) < wire.OUT_HEADER.size:
                self._lose()
                return
            _, code, number = wire.OUT_HEADER.unpack_from(packet)
            future = self._waiting.get(number)
            if future is None or future.done():
                continue
            if code:
                future.set_exception(OSError(-code, os.strerror(-code)))
            else:
                future.set_result(packet[wire.OUT_HEADER.size :])

    def _lose(self) -> None:
        """The connection is gone: whoever waits for an answer has to ask again."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Lost())


class Stream:
    """The stream of the layer in ``directory``, whose name is ``name``; see the module's text. Belongs to one event loop."""

    def __init__(self, directory: str, blobs: str, name: str) -> None:
        self._directory = directory
        self._blob = BlobReader(blobs, name)
        self._plain = -1
        self._reading = 0
        self._look_at = 0.0

    async def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes at ``offset``; waits for a blobfs that is needed. Raises OSError."""
        attempt = 0
        while True:
            if self._plain < 0 and time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + _LOOK
                self._take(await asyncio.to_thread(_open_plain, self._directory))
            content = await self._from_file(offset, length) if self._plain >= 0 else b""
            if len(content) == length:
                return content
            try:
                return await self._blob.read(offset, length)
            except Lost as error:
                if attempt == _COMPLAIN:
                    log.warning("blobfs does not answer, reads wait: %s", error, extra={"path": self._directory})
                await asyncio.sleep(_PAUSES[min(attempt, len(_PAUSES) - 1)])
                attempt += 1

    async def tend(self) -> None:
        """For ever: let go of a plain file that blobfs wants to evict from."""
        while True:
            await asyncio.sleep(_LOOK)
            if self._plain >= 0 and not self._reading and os.path.exists(f"{self._directory}/{EVICT}"):
                os.close(self._plain)
                self._plain = -1

    def _take(self, fd: int) -> None:
        if fd >= 0 and self._plain >= 0:  # two looked at the same time
            os.close(fd)
        elif fd >= 0:
            self._plain = fd

    async def _from_file(self, offset: int, length: int) -> bytes:
        """From the plain file; fewer bytes where the disk does not give them, which blobfs mends."""
        buffer = bytearray(length)
        with contextlib.suppress(OSError):  # EAGAIN: not in the page cache
            if os.preadv(self._plain, [buffer], offset, os.RWF_NOWAIT) == length:  # in the page cache
                return bytes(buffer)
        self._reading += 1
        try:
            content = await asyncio.to_thread(os.pread, self._plain, length, offset)
        except OSError as error:
            log.error("the data of a complete layer cannot be read; blobfs is asked: %s", error)
            return b""
        finally:
            self._reading -= 1
        return content


def _open_plain(directory: str) -> int:
    """A descriptor of a complete layer's ``data``, from which nothing is punched out while it is open; -1 for any other."""
    path = f"{directory}/data"
    with contextlib.suppress(OSError), hold(path):  # then blobfs is asked
        if plain_file(directory):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return -1
