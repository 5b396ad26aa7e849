"""The FUSE session: threads that read requests from ``/dev/fuse`` and answer them.

A READ whose frames are all present is answered by the thread that read it: one table look-up, one ``preadv``, one
``write``. Anything missing goes to the fetcher, whose decoder threads answer when the last frame is there.

``kill -9`` at any line here loses nothing: a request that was read and not answered is queued again by the kernel when the
next server writes NOTIFY_RESEND (resend.py), and every operation may be carried out twice.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from weenv.core.errors import FormatError, StorageError, WeenvError
from weenv.plugin.snapshotter.blobfs import wire
from weenv.plugin.snapshotter.blobfs.layers import BadLayer, DamagedTail, Layer, LayerTable, Node
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher
from weenv.plugin.snapshotter.fetch.flight import AHEAD, Waiter

log = logging.getLogger(__name__)

MAX_PAGES: Final = 256
"""One READ is at most 1 MiB (the kernel's own limit, /proc/sys/fs/fuse/max_pages_limit, is 256 by default)."""
MAX_READ: Final = MAX_PAGES * 4096
MAX_BACKGROUND: Final = 64
"""Read-ahead requests that the kernel keeps in flight; its default of 12 is too few to cover a round trip."""
MAX_READAHEAD: Final = 16 << 20
"""An upper bound only: the backing device's read_ahead_kb decides."""

_HEAD: Final = wire.OUT_HEADER.size
_READ_MAX: Final = 5.0
"""Seconds that eviction waits for a thread which reads from the disk."""
LATENCY_BOUNDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the histogram of how long readers waited for missing data, in seconds."""


@dataclass
class ServeStats:
    """One thread's counters since the process began; summed by whoever reports them."""

    requests: int = 0
    reads: int = 0
    hits: int = 0
    """READs whose data was present."""
    served_bytes: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    waits: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))
    wait_seconds: float = 0.0
    number: int = field(default_factory=itertools.count().__next__)
    """Unlike any other's."""
    layer: Layer | None = None
    """The layer whose marks this thread is relying on, between looking at them and having read ``data``."""

    def error(self, kind: str) -> None:
        """Count an error."""
        self.errors[kind] = self.errors.get(kind, 0) + 1


class PendingRead(Waiter):
    """A READ that waits for frames."""

    __slots__ = ("again", "end", "first", "layer", "length", "offset", "pid", "server", "since", "unique")

    def __init__(
        self, server: Server, layer: Layer, unique: int, pid: int, offset: int, length: int, first: int, end: int
    ) -> None:
        super().__init__()
        self.server = server
        self.layer = layer
        self.unique = unique
        self.pid = pid
        self.offset = offset
        self.length = length
        self.first = first
        self.end = end
        self.again = True  # whether to fetch what turns out not to be readable in ``data``
        self.since = time.monotonic()

    def complete(self) -> None:
        """Answer from the frames in memory, and from ``data`` where others were there already."""
        layer, position, stop = self.layer, self.offset, self.offset + self.length
        parts: list[bytes | memoryview] = [wire.OUT_HEADER.pack(_HEAD + self.length, 0, self.unique)]
        contents = layer.contents
        for frame in range(self.first, self.end):
            content, begin = self.pieces[frame], contents[frame]
            upto = min(stop, contents[frame + 1])
            if content is None:
                try:
                    piece: bytes | memoryview = os.pread(layer.store.fd, upto - position, position)
                    if len(piece) != upto - position:
                        raise OSError(errno.EIO, f"data is short: {len(piece)} of {upto - position} bytes at {position}")
                except OSError as error:
                    layer.take_back([number for number, held in self.pieces.items() if held is None], error)
                    self._once_more()
                    return
            else:
                piece = memoryview(content)[position - begin : upto - begin]
            parts.append(piece)
            position = upto
        self.server.answered(self)
        self.server.send(parts)

    def _once_more(self) -> None:
        """Ask for the frames again; those that were in ``data`` are missing now."""
        if not self.again:
            self.fail(errno.EIO)
            return
        self.again = False
        self.left = 0
        self.pieces = {}
        self.server.fetcher.request(self.layer, range(self.first, self.end), self)

    def fail(self, code: int) -> None:
        """Answer with an error."""
        self.server.answered(self, code)
        self.server.send([wire.reply_error(self.unique, code)])


class Server:
    """Serves the connection behind ``fuse`` from ``table`` until :meth:`run` threads find it gone.

    ``on_init`` is called with what INIT agreed on; ``on_miss`` with a layer the first time that data of it is missing;
    ``on_damage`` with a layer whose tail must be fetched again, and the ``unique`` of a request that waits in ``parked``
    until :meth:`resume` is called for it. All are called in FUSE threads.
    """

    def __init__(
        self, fuse: int, table: LayerTable, fetcher: Fetcher, *, root: str,
        on_init: Callable[[wire.InitOut], None] = lambda _: None,
        on_miss: Callable[[Layer], None] = lambda _: None,
        on_end: Callable[[], None] = lambda: None,
        on_damage: Callable[[DamagedTail, int], None] | None = None,
    ) -> None:  # fmt: skip
        self.fuse = fuse
        self.table = table
        self.fetcher = fetcher
        self.root = root
        self.stats: list[ServeStats] = []
        self.waiting: dict[int, PendingRead] = {}
        """READs that wait for data, by ``unique``."""
        self.parked: dict[int, tuple[int, bytes]] = {}
        """Requests, with their thread ids, that wait for a layer's tail, by ``unique``; whoever takes one out answers it."""
        self.on_damage = on_damage
        self._quiet: dict[str, float] = {}  # when a layer that cannot be opened may be complained of again
        self._on_init = on_init
        self.on_miss = on_miss
        self._on_end = on_end
        self._waits = ServeStats()
        self._waits_lock = threading.Lock()
        self._ahead_lock = threading.Lock()  # guards every layer's read_ahead
        self.stats.append(self._waits)
        self._root_attributes = wire.attributes(wire.ROOT_ID, wire.S_IFDIR | 0o500, 0)
        self._threads: list[threading.Thread] = []
        self._handlers: dict[int, Callable[[wire.Request], bytes | None]] = {
            wire.INIT: self._init,
            wire.LOOKUP: self._lookup,
            wire.GETATTR: self._getattr,
            wire.OPEN: self._open,
            wire.RELEASE: lambda request: wire.reply(request.unique),
            wire.RELEASEDIR: lambda request: wire.reply(request.unique),
            wire.STATFS: self._statfs,
            wire.READDIR: self._readdir,
            wire.INTERRUPT: self._interrupt,
            wire.DESTROY: lambda request: wire.reply(request.unique),
        }

    def start(self, threads: int) -> None:
        """Start ``threads`` reader threads. They are daemon threads: they end with the mount or the process."""
        for number in range(threads):
            stats = ServeStats()
            self.stats.append(stats)
            thread = threading.Thread(target=self.run, args=(stats,), name=f"fuse-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def join(self) -> None:
        """Wait for the reader threads to end."""
        for thread in self._threads:
            thread.join()

    def run(self, stats: ServeStats) -> None:
        """Read and answer requests until the connection is gone."""
        buffer = bytearray(max(wire.MIN_READ_BUFFER, 64 << 10))
        view = memoryview(buffer)
        answer = memoryview(bytearray(_HEAD + MAX_READ))
        data = answer[_HEAD:]
        fuse, nodes = self.fuse, self.table.nodes
        readv, preadv, write, monotonic = os.readv, os.preadv, os.write, time.monotonic
        unpack, pack_into = wire.READ_REQUEST.unpack_from, wire.OUT_HEADER.pack_into
        minimum = wire.READ_REQUEST.size
        ahead_lock = self._ahead_lock
        while True:
            stats.layer = None
            try:
                size = readv(fuse, [buffer])
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue  # ENOENT: the request was given up before it could be read
                if error.errno not in (errno.ENODEV, errno.EBADF):
                    log.error("cannot read from /dev/fuse", extra={"error": str(error)})
                self._on_end()
                return
            stats.requests += 1
            if size < minimum or buffer[4] != wire.READ:
                if not size:  # a socket in the place of /dev/fuse, whose other end is gone
                    self._on_end()
                    return
                self._other(view[:size], stats)
                continue
            _, opcode, unique, nodeid, _, _, pid, _, _, _, offset, length = unpack(buffer)
            node = nodes.get(nodeid)
            if opcode != wire.READ or node is None:
                self._other(view[:size], stats)
                continue
            layer = node.layer
            if layer is None:
                layer = self._reopened(node, unique, pid, stats, view[:size])
                if layer is None:
                    continue
            stats.reads += 1
            length = min(length, layer.size - offset, MAX_READ)
            if length <= 0:
                self.send([wire.reply(unique)])
                continue
            contents = layer.contents
            first = bisect_right(contents, offset) - 1
            end = bisect_left(contents, offset + length, first)
            layer.last_used = monotonic()
            if end - first == 1:
                layer.touched[first] = 1
            else:
                layer.touched[first:end] = b"\1" * (end - first)
            if layer.reads.seen.find(0, first, end) >= 0:
                self._first_read(layer, first, end)
            presence = layer.presence
            stats.layer = layer  # from here on nothing is punched out that is marked now
            if presence.missing:
                absent = presence.states.find(0, first, end) >= 0
                ahead = []
                if not layer.foresees(first, absent=absent):
                    with ahead_lock:
                        ahead = layer.read_ahead.observe(first, end, offset, length)
                if absent:
                    self._miss(layer, unique, pid, offset, length, first, end, ahead)
                    continue
                if ahead:
                    self.fetcher.want(layer, ahead, AHEAD)
            try:
                got = preadv(layer.store.fd, [data[:length]], offset)
                if got != length:
                    raise OSError(errno.EIO, f"data is short: {got} of {length} bytes at {offset}")
            except OSError as error:
                stats.error("data")
                layer.take_back(range(first, end), error)
                self._miss(layer, unique, pid, offset, length, first, end, [])
                continue
            stats.hits += 1
            stats.served_bytes += length
            layer.tally.hit(stats.number, length)
            pack_into(answer, 0, _HEAD + length, 0, unique)
            try:
                write(fuse, answer[: _HEAD + length])
            except OSError as error:
                self._unsent(error)

    def send(self, parts: list[bytes | memoryview]) -> None:
        """Write one answer. A request that is gone meanwhile, or a mount that is, is no error."""
        try:
            os.writev(self.fuse, parts)
        except OSError as error:
            self._unsent(error)

    def _unsent(self, error: OSError) -> None:
        if error.errno not in (errno.ENOENT, errno.ENODEV, errno.EBADF):
            log.error("cannot answer a FUSE request", extra={"error": str(error)})

    # -- data that is about to be evicted ---------------------------------------------------------------------------------

    def in_use(self, layer: Layer) -> set[int]:
        """The frames of ``layer`` that readers wait with or for, and those that are on their way. Any thread."""
        found = set(layer.flights)
        for pending in list(self.waiting.values()):
            if pending.layer is layer:
                found.update(range(pending.first, pending.end))
        return found

    def quiet(self, layer: Layer) -> bool:
        """Wait until no thread reads ``data`` of ``layer`` on the strength of marks from before the call. Any other thread.

        False where one does not come to an end: its disk hangs.
        """
        end = time.monotonic() + _READ_MAX
        for stats in self.stats:
            number = stats.requests
            while stats.layer is layer and stats.requests == number:
                if time.monotonic() > end:
                    return False
                time.sleep(0.0002)
        return True

    def _first_read(self, layer: Layer, first: int, end: int) -> None:
        """Some of these frames have not been read before: note it for who makes a profile."""
        fresh = layer.reads.note(first, end)
        if layer.prefetched:
            self.fetcher.used(layer, fresh)

    # -- data that is missing -----------------------------------------------------------------------------------------

    def _miss(
        self, layer: Layer, unique: int, pid: int, offset: int, length: int, first: int, end: int, ahead: list[int]
    ) -> None:
        pending = PendingRead(self, layer, unique, pid, offset, length, first, end)
        self.waiting[unique] = pending
        if not layer.extents_asked:
            layer.extents_asked = True
            layer.first_used = pending.since
            self.on_miss(layer)
        self.fetcher.request(layer, range(first, end), pending, ahead)

    def answered(self, pending: PendingRead, code: int = 0) -> None:
        """A waiting READ is about to be answered."""
        self.waiting.pop(pending.unique, None)
        waited = time.monotonic() - pending.since
        stats = self._waits
        with self._waits_lock:
            stats.wait_seconds += waited
            stats.waits[bisect_left(LATENCY_BOUNDS, waited)] += 1
            tally = pending.layer.tally
            tally.waits += 1
            if code:
                stats.error("eio")
            else:
                stats.served_bytes += pending.length
                tally.waited += pending.length

    def _reopened(
        self, node: Node, unique: int, pid: int, stats: ServeStats, message: memoryview | None = None
    ) -> Layer | None:
        """The layer of a node that is not open; where there is none, the request is answered, or parked for later."""
        code = errno.EIO
        try:
            layer = self.table.reopen(node, fresh=False)
            if layer is not None:
                return layer
            log.error("a layer in use has lost its directory", extra={"layer": node.name})
        except DamagedTail as error:
            if message is not None and self._park(error, unique, pid, message):
                return None
            code = self._broken(node.name, error)
        except WeenvError as error:
            code = self._broken(node.name, error)
        stats.error("layer")
        self.send([wire.reply_error(unique, code)])
        return None

    def _broken(self, name: str, error: WeenvError) -> int:
        now = time.monotonic()
        if now >= self._quiet.get(name, 0.0):
            if len(self._quiet) > 1000:
                self._quiet.clear()
            self._quiet[name] = now + 10.0
            log.error("a layer cannot be opened", extra={"layer": name, "error": str(error), "hint": error.hint})
        return (error.errno or errno.EIO) if isinstance(error, StorageError) else errno.EIO

    def _park(self, damage: DamagedTail, unique: int, pid: int, message: memoryview) -> bool:
        """Keep a request until its layer's tail has been fetched again; False where nobody would do that."""
        if self.on_damage is None:
            return False
        self.parked[unique] = (pid, bytes(message))
        self.on_damage(damage, unique)
        return True

    def resume(self, unique: int) -> None:
        """Carry out a parked request; a tail that is still damaged is an error now. Blocks on the disk; any thread."""
        parked = self.parked.pop(unique, None)
        if parked is None:
            return  # its reader was killed meanwhile
        self.carry_out(memoryview(parked[1]), self._waits, again=True)

    def carry_out(self, message: memoryview, stats: ServeStats, *, again: bool = False, most: int = MAX_READ) -> None:
        """Carry out one request, wherever it comes from. Blocks on the disk; any thread that has ``stats`` of its own.

        ``again``: it has waited for a tail, so one that is damaged is an error now; ``stats`` may be anybody's then. READs
        give ``most`` bytes.
        """
        if len(message) < wire.READ_REQUEST.size or message[4] != wire.READ:
            self._other(message, stats, park=not again)
            return
        _, _, unique, nodeid, _, _, pid, _, _, _, offset, length = wire.READ_REQUEST.unpack_from(message)
        node = self.table.nodes.get(nodeid)
        if node is None:
            self.send([wire.reply_error(unique, errno.ESTALE)])
            return
        layer = node.layer or self._reopened(node, unique, pid, stats, None if again else message)
        if layer is None:
            return
        length = min(length, layer.size - offset, most)
        if length <= 0:
            self.send([wire.reply(unique)])
            return
        first = bisect_right(layer.contents, offset) - 1
        end = bisect_left(layer.contents, offset + length, first)
        layer.last_used = time.monotonic()
        layer.touched[first:end] = b"\1" * (end - first)
        ahead: list[int] = []
        if not again:
            if layer.reads.seen.find(0, first, end) >= 0:
                self._first_read(layer, first, end)
            stats.reads += 1
            stats.layer = layer  # from here on nothing is punched out that is marked now
            try:
                absent = layer.presence.states.find(0, first, end) >= 0
                if layer.presence.missing and not layer.foresees(first, absent=absent):
                    with self._ahead_lock:
                        ahead = layer.read_ahead.observe(first, end, offset, length)
                if not absent and self._present(layer, unique, offset, length, stats):
                    if ahead:
                        self.fetcher.want(layer, ahead, AHEAD)
                    return
            finally:
                stats.layer = None
        self._miss(layer, unique, pid, offset, length, first, end, ahead)

    def _present(self, layer: Layer, unique: int, offset: int, length: int, stats: ServeStats) -> bool:
        """Answer from ``data``; False, and the frames are missing, where it cannot be read."""
        try:
            content = os.pread(layer.store.fd, length, offset)
            if len(content) != length:
                raise OSError(errno.EIO, f"data is short: {len(content)} of {length} bytes at {offset}")
        except OSError as error:
            stats.error("data")
            first = bisect_right(layer.contents, offset) - 1
            layer.take_back(range(first, bisect_left(layer.contents, offset + length, first)), error)
            return False
        stats.hits += 1
        stats.served_bytes += length
        layer.tally.hit(stats.number, length)
        self.send([wire.reply(unique, content)])
        return True

    def release_killed(self) -> int:
        """Let go of requests whose readers are being killed; returns how many. To be called every second or so.

        INTERRUPT comes once for a request, perhaps for an ordinary signal before the SIGKILL, perhaps before the request
        itself has been looked at; a killed process must not hang until a source's deadline all the same.
        """
        count = 0
        for pending in list(self.waiting.values()):
            count += bool(pending.pid) and _is_killed(pending.pid) and self._release(pending)
        for unique, (pid, _) in list(self.parked.items()):
            if pid and _is_killed(pid) and self.parked.pop(unique, None) is not None:
                self.send([wire.reply_error(unique, errno.EINTR)])
                count += 1
        return count

    def _release(self, pending: PendingRead) -> bool:
        if not self.fetcher.abandon(pending):
            return False
        self.answered(pending, errno.EINTR)
        self.send([wire.reply_error(pending.unique, errno.EINTR)])
        return True

    # -- everything else ----------------------------------------------------------------------------------------------

    def _other(self, message: memoryview, stats: ServeStats, *, park: bool = True) -> None:
        unique, opcode, pid = 0, 0, 0
        try:
            request = wire.parse(message)
            unique, opcode, pid = request.unique, request.opcode, request.pid
            handler = self._handlers.get(opcode)
            if handler is not None:
                answer = handler(request)
            elif opcode in wire.NO_REPLY:
                answer = None
            elif opcode == wire.READ:
                answer = wire.reply_error(unique, errno.ESTALE)
            else:
                answer = wire.reply_error(unique, errno.ENOSYS)
        except DamagedTail as error:
            if park and self._park(error, unique, pid, message):
                return
            stats.error("layer")
            answer = wire.reply_error(unique, self._broken(os.path.basename(error.path), error))
        except BadLayer as error:
            stats.error("layer")
            answer = wire.reply_error(unique, self._broken(error.member, error))
        except FormatError as error:
            stats.error("protocol")
            log.error("a FUSE request cannot be understood", extra={"opcode": opcode, "error": str(error)})
            answer = wire.reply_error(unique, errno.EIO) if unique else None
        except Exception:
            stats.error("internal")
            log.exception("a FUSE request failed", extra={"opcode": opcode})
            answer = wire.reply_error(unique, errno.EIO)
        if answer is not None:
            self.send([answer])

    def _init(self, request: wire.Request) -> bytes:
        agreed = wire.negotiate(
            wire.parse_init(request.body), max_readahead=MAX_READAHEAD, max_pages=MAX_PAGES, max_background=MAX_BACKGROUND
        )
        self._on_init(agreed)
        return wire.reply_init(request.unique, agreed)

    def _lookup(self, request: wire.Request) -> bytes:
        name = wire.parse_name(request.body)
        try:
            node = self.table.lookup(name) if request.nodeid == wire.ROOT_ID else None
        except (DamagedTail, BadLayer):
            raise
        except WeenvError as error:
            return wire.reply_error(request.unique, self._broken(name.decode("ascii", "replace"), error))
        if node is None:
            return wire.reply_error(request.unique, errno.ENOENT)
        return wire.reply(request.unique, wire.entry_out(node.nodeid, node.attributes))

    def _getattr(self, request: wire.Request) -> bytes:
        if request.nodeid == wire.ROOT_ID:
            return wire.reply(request.unique, wire.attr_out(self._root_attributes))
        answer = self._opened(request, fresh=False)
        return answer if isinstance(answer, bytes) else wire.reply(request.unique, wire.attr_out(answer.attributes))

    def _open(self, request: wire.Request) -> bytes:
        answer = self._opened(request, fresh=True)
        return (
            answer
            if isinstance(answer, bytes)
            else wire.reply(request.unique, wire.open_out(wire.FOPEN_KEEP_CACHE | wire.FOPEN_NOFLUSH))
        )

    def _opened(self, request: wire.Request, *, fresh: bool) -> Node | bytes:
        """The node of a request with its layer open, or the answer that says why not."""
        node = self.table.nodes.get(request.nodeid)
        if node is None:
            return wire.reply_error(request.unique, errno.ESTALE)
        if not fresh and node.attributes:
            return node
        try:
            if self.table.reopen(node, fresh=fresh) is None:
                return wire.reply_error(request.unique, errno.ENOENT)
        except (DamagedTail, BadLayer):
            raise
        except WeenvError as error:
            return wire.reply_error(request.unique, self._broken(node.name, error))
        return node

    def _statfs(self, request: wire.Request) -> bytes:
        disk = os.statvfs(self.root)
        body = wire.statfs_out(
            blocks=disk.f_blocks,
            free=disk.f_bfree,
            available=disk.f_bavail,
            files=len(self.table.nodes),
            block_size=disk.f_frsize,
        )
        return wire.reply(request.unique, body)

    def _readdir(self, request: wire.Request) -> bytes:
        offset, size = wire.parse_read(request.body)
        names = [(number + wire.UNIQUE_RESEND, digest[7:].encode()) for number, digest in enumerate(self.table.dirs.known())]
        return wire.reply(request.unique, wire.directory(names, offset, min(size, MAX_READ)))

    def _interrupt(self, request: wire.Request) -> None:
        """A signal for a process that waits. Only one that is being killed is let go without its data.

        A page whose READ fails is an I/O error for whoever maps or reads it, so an ordinary signal (a timer, a child that
        ended) must not fail one; disk file systems do not either.
        """
        target = wire.parse_unique(request.body)
        pending = self.waiting.get(target) or self.waiting.get(target | wire.UNIQUE_RESEND)
        if pending is not None and _is_killed(pending.pid):
            self._release(pending)


def _is_killed(pid: int) -> bool:
    """True where thread ``pid`` has SIGKILL pending (``SigPnd``, ``ShdPnd`` of proc_pid_status(5)) or is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith((b"SigPnd:", b"ShdPnd:")) and int(line.split()[1], 16) & 1 << 8:
                    return True
    except FileNotFoundError:
        return pid != 0
    except (OSError, ValueError):
        return False
    return False
