"""Reads for other processes of this node, over a socket instead of ``/dev/fuse``: what the FUSE plane asks blobfs.

The protocol is FUSE's own (wire.py), one message a packet of a SOCK_SEQPACKET socket: LOOKUP of a layer's 64 hex digits in
the root gives a node id, READ of a node gives up to :data:`MAX_PIECE` bytes. There is no INIT, and a node id is good for
one connection. So requests are carried out by the same code, fetched by the same fetcher, and kept in the same files.

It is not the kernel's FUSE mount because Linux before 6.9 cannot resend what a server that was killed had read and not
answered: its readers would wait for ever. Here a connection ends with the server, and the peer asks the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import socket
import struct
import threading
from typing import Final

from weenv.core.accepting import Entrance
from weenv.core.unixsocket import accept_trusted, bind_private
from weenv.plugin.snapshotter.blobfs import wire
from weenv.plugin.snapshotter.blobfs.server import Server, ServeStats

log = logging.getLogger(__name__)

MAX_PIECE: Final = 64 << 10
"""Bytes of one READ: a packet that the kernel can allocate without a large contiguous piece of memory."""
_REQUEST_MAX: Final = 512
_BUFFER: Final = 8 << 20
"""Bytes of answers that may wait in a socket: more than a peer asks for at a time."""
_PATIENCE: Final = 1000
"""Milliseconds for which an answer waits for room there; a peer that takes longer is not reading, and is dropped."""
_HEAD: Final = wire.OUT_HEADER
_ALLOWED: Final = frozenset((wire.LOOKUP, wire.GETATTR, wire.READ))
_OPCODE_AT: Final = 4
"""struct ucred: pid, uid, gid."""
_SO_SNDBUFFORCE: Final = 32
"""include/uapi/asm-generic/socket.h"""
_UNIQUE: Final = struct.Struct("=Q")
_UNIQUE_AT: Final = 8


def peers_path(mountpoint: str) -> str:
    """Where the blobfs that is mounted at ``mountpoint`` listens."""
    return mountpoint.rstrip("/") + ".sock"


def open_peers(beside: Server, mountpoint: str) -> PeerServer | None:
    """A server for peers; None, which is logged, where its socket cannot be made: the FUSE plane does without blobfs then."""
    try:
        return PeerServer(beside, peers_path(mountpoint))
    except OSError as error:
        log.warning("the FUSE plane cannot be served: %s", error, extra={"path": peers_path(mountpoint)})
        return None


class PeerServer(Server):
    """Serves peers from ``beside``'s layers, with its fetcher and its way of mending tails, and counts in its statistics.

    A request's ``unique`` carries the number of its connection in the upper half while it is here. Raises OSError.
    """

    def __init__(self, beside: Server, path: str) -> None:
        super().__init__(
            -1, beside.table, beside.fetcher, root=beside.root, on_miss=beside.on_miss, on_damage=beside.on_damage
        )
        beside.stats.append(self._waits)
        self.stats = beside.stats
        self.waiting = beside.waiting  # what eviction must not touch
        self.path = path
        self._peers: dict[int, socket.socket] = {}
        self._by_fd: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self._poll = select.epoll()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = bind_private(path, socket.SOCK_SEQPACKET)
        self._listener.listen(64)
        self._entrance = Entrance(self._listener)
        self._entrance.open(self._poll)
        self._accepting = threading.Lock()

    def close(self) -> None:
        """Take no more peers; the threads end with the process, as those that read from ``/dev/fuse``."""
        with contextlib.suppress(OSError):  # the next server clears the path
            os.unlink(self.path)
        with self._accepting:
            self._entrance.shut()

    def run(self, stats: ServeStats) -> None:
        """Take and carry out requests, for ever."""
        buffer = bytearray(_REQUEST_MAX)
        while True:
            with self._accepting:
                self._entrance.tend()
                milliseconds = self._entrance.timeout()
            for fd, _ in self._poll.poll(None if milliseconds is None else milliseconds / 1000):
                if fd == self._listener.fileno():
                    self._accept()
                elif number := self._by_fd.get(fd):
                    try:
                        self._receive(number, buffer, stats)
                    except Exception:
                        log.exception("a peer's request failed")
                        self._drop(number)

    def _accept(self) -> None:
        with self._accepting:
            peer = accept_trusted(self._entrance)
        if peer is None:  # another thread had it
            return
        peer.setblocking(False)
        with contextlib.suppress(OSError):  # without the right to it: answers wait for room more often
            peer.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _BUFFER)
        number = next(self._numbers) & 0x7FFFFFFF
        self._peers[number] = peer
        self._by_fd[peer.fileno()] = number
        self._poll.register(peer.fileno(), select.EPOLLIN)

    def _receive(self, number: int, buffer: bytearray, stats: ServeStats) -> None:
        peer = self._peers.get(number)
        if peer is None:
            return
        try:
            size = peer.recv_into(buffer)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        message = memoryview(buffer)[:size]
        if size < wire.IN_HEADER.size or buffer[_OPCODE_AT] not in _ALLOWED:
            self._drop(number)
            return
        (unique,) = _UNIQUE.unpack_from(buffer, _UNIQUE_AT)
        _UNIQUE.pack_into(buffer, _UNIQUE_AT, number << 32 | unique & 0xFFFFFFFF)
        stats.requests += 1
        self.carry_out(message, stats, most=MAX_PIECE)

    def send(self, parts: list[bytes | memoryview]) -> None:
        """Write one answer to the peer that asked. One that is gone, or does not read, is no error."""
        head = parts[0]
        length, code, unique = _HEAD.unpack_from(head)
        number = unique >> 32
        peer = self._peers.get(number)
        if peer is None:
            return
        packet = [_HEAD.pack(length, code, unique & 0xFFFFFFFF), head[_HEAD.size :], *parts[1:]]
        for attempt in range(2):
            try:
                peer.sendmsg(packet)
                return
            except BlockingIOError:
                if attempt == 0:
                    room = select.poll()
                    room.register(peer.fileno(), select.POLLOUT)
                    room.poll(_PATIENCE)
            except OSError:
                break
        self._drop(number)

    def _drop(self, number: int) -> None:
        """End a connection: its peer asks again on another one."""
        peer = self._peers.pop(number, None)
        if peer is not None:
            self._by_fd.pop(peer.fileno(), None)
            with contextlib.suppress(OSError):  # one that failed may not be waited for any more
                self._poll.unregister(peer.fileno())
            peer.close()
