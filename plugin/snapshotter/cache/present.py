"""Which frames of a layer are in its ``data`` file: the ``present`` file of the layer directory.

::

    offset  size  field
    0       8     magic ``WEENVPRS``
    8       4     version, 2
    12      4     CRC-32 of the header, with this field zero, and the content sizes
    16      8     n, the number of frames
    24      8     size of the tar stream, bytes
    32      16    boot id: of the boot during which the VOLATILE marks below were made
    48      1     whether the stream has its diffID: 0 UNCHECKED, 1 GOOD, 2 BAD, 3 AGAIN (docs/adr/0006)
    49      1     1: ``data`` had no hole when it was found GOOD, so it must have none
    50      14    zero
    64      4 n   content size of each frame, bytes
    64+4n   n     state of each frame: 0 missing, 0x35 VOLATILE, 0xCA DURABLE

The states differ from each other in at least four bits: a turned bit is no state, and a file that has one holds nothing.
Little-endian. Only blobfs writes the file; anyone may read it at any time.

What a mark promises
    *VOLATILE*: the frame was verified and ``pwrite`` of all of it returned, during the boot named in the header. The
    page cache has it, so it is true until the machine stops, whatever processes die. After any reboot, clean or not,
    the mark is void: the header names another boot.
    *DURABLE*: ``fdatasync`` of ``data`` returned after the frame was written and before the mark was. It is true
    across power cuts, as far as the disk keeps what it acknowledged.
    :func:`is_complete` is therefore safe for a mount that lives no longer than this boot, which every mount does.
    A mark says nothing of a disk that loses what it has acknowledged. What can be seen of that for nothing is looked at:
    a marked frame that lies in a hole of ``data``, or behind its end, is missing (:meth:`Presence.open`).

A mark is one ``pwrite`` of one byte: no lock between processes, nothing to tear, and a full disk is an OSError, where a
shared mapping would be a SIGBUS. A missing or malformed file means that no frame is there.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from weenv.core import procfs
from weenv.core.atomic import write_atomic
from weenv.core.errors import FormatError
from weenv.layer.limits import DEFAULT_LIMITS
from weenv.plugin.snapshotter.layerdir import EVICT

MAGIC: Final = b"WEENVPRS"
VERSION: Final = 2
MISSING: Final = 0
VOLATILE: Final = 0x35
DURABLE: Final = 0xCA

UNCHECKED: Final = 0
"""Nobody has hashed the whole stream yet."""
GOOD: Final = 1
"""The stream has the diffID that the TOC promises."""
BAD: Final = 2
"""It has not, though it was fetched twice: the TOC lies."""
AGAIN: Final = 3
"""It had not, so everything is being fetched a second time: the disk may have been wrong."""

_HEADER: Final = struct.Struct("<8sIIQQ16sBB14x")
_NAME: Final = "present"
_DATA: Final = "data"


def boot_id() -> bytes:
    """16 bytes that name the running boot."""
    return bytes.fromhex(procfs.boot_id().replace("-", ""))


def _header(sizes: bytes, stream_size: int, boot: bytes, verdict: int, solid: bool) -> bytes:
    """The header for frames of these content sizes (as they are in the file)."""
    fields = len(sizes) // 4, stream_size, boot, verdict, solid
    crc = zlib.crc32(sizes, zlib.crc32(_HEADER.pack(MAGIC, VERSION, 0, *fields)))
    return _HEADER.pack(MAGIC, VERSION, crc, *fields)


@dataclass(slots=True)
class _Found:
    """A ``present`` file as valid for the running boot. ``stale``: its marks or verdict are those of an earlier boot."""

    stream_size: int
    sizes: NDArray[np.uint32]
    states: bytearray
    verdict: int
    solid: bool
    stale: bool = False


def _parse(content: bytes) -> tuple[_Found, bytes]:
    """What a ``present`` file says, and the boot id in it. Raises :class:`FormatError`."""
    if len(content) < _HEADER.size:
        raise FormatError("the present file is shorter than its header")
    magic, version, _crc, frames, stream_size, boot, verdict, solid = _HEADER.unpack_from(content)
    if magic != MAGIC or version != VERSION:
        raise FormatError("the present file has another magic or version")
    if len(content) != _HEADER.size + 5 * frames:
        raise FormatError("the present file has the wrong length")
    if _header(content[_HEADER.size :][: 4 * frames], stream_size, boot, verdict, solid) != content[: _HEADER.size]:
        raise FormatError("the present file is damaged")
    sizes = np.frombuffer(content, "<u4", frames, _HEADER.size)
    states = bytearray(content[_HEADER.size + 4 * frames :])
    if states.translate(None, bytes((MISSING, VOLATILE, DURABLE))):
        raise FormatError("the present file has a frame in an unknown state")
    return _Found(stream_size, sizes, states, verdict, bool(solid)), boot


def _load(layer_dir: str) -> _Found:
    """Read and parse ``present``; marks that another boot made void are gone. Raises OSError, :class:`FormatError`."""
    with open(os.path.join(layer_dir, _NAME), "rb") as file:
        content = file.read(_HEADER.size + 5 * DEFAULT_LIMITS.max_frames + 1)
    found, boot = _parse(content)
    if boot != boot_id():
        found.states = found.states.translate(_AFTER_REBOOT)
        found.stale = True
    if found.verdict == GOOD and MISSING in found.states:
        found.verdict = UNCHECKED
    return found


def _read(layer_dir: str) -> _Found | None:
    """What holds for the running boot; None where there is nothing usable."""
    try:
        found = _load(layer_dir)
        if os.stat(os.path.join(layer_dir, _DATA)).st_size != found.stream_size:
            return None
    except (OSError, FormatError):
        return None
    return found


_AFTER_REBOOT: Final = bytes(state if state == DURABLE else MISSING for state in range(256))


def is_complete(layer_dir: str) -> bool:
    """True where every frame of the layer is in ``data``, will be for as long as this boot lasts, and all has its diffID.

    False where there is no layer, no file, or a damaged one; never raises.
    """
    found = _read(layer_dir)
    if found is None or found.verdict != GOOD or MISSING in found.states:
        return False
    return not found.solid or not _has_hole(os.path.join(layer_dir, _DATA), found.stream_size)


def is_whole(layer_dir: str) -> bool:
    """True where the layer is complete and may be read without blobfs; it stays complete while somebody has ``data`` open.

    So who mounts or reads ``data`` by itself must have it open (:func:`~weenv.plugin.snapshotter.cache.store.hold`) before
    this is asked. False, too, where the layer is about to be evicted (``evict`` in the layer directory).
    """
    return is_complete(layer_dir) and not os.path.exists(os.path.join(layer_dir, EVICT))


def is_bad(layer_dir: str) -> bool:
    """True where the whole stream was found not to have its diffID (:data:`BAD`); never raises."""
    try:
        return _load(layer_dir).verdict == BAD
    except (OSError, FormatError):
        return False


def _has_hole(path: str, size: int) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        return first_hole(fd, 0, size) < size
    finally:
        os.close(fd)


def first_hole(fd: int, begin: int, end: int) -> int:
    """The offset of the first hole of a file in ``[begin, end)``, its end being one; ``end`` where there is none."""
    if begin >= end:
        return end
    try:
        return min(os.lseek(fd, begin, os.SEEK_HOLE), end)
    except OSError:  # ENXIO: behind the file's end
        return begin


def lost_frames(fd: int, sizes: NDArray[np.uint32], states: bytearray) -> list[int]:
    """The frames that ``states`` has as present and ``data`` has not: they lie in a hole, or behind the file's end.

    Two system calls for each run of present frames, and more only where something is lost.
    """
    there = np.frombuffer(bytes(states), np.uint8) != MISSING
    edges = np.flatnonzero(np.diff(there, prepend=False, append=False))
    ends = np.cumsum(sizes, dtype=np.int64)
    lost: list[int] = []
    for first, last in edges.reshape(-1, 2).tolist():
        position, stop = int(ends[first]) - int(sizes[first]), int(ends[last - 1])
        while (hole := first_hole(fd, position, stop)) < stop:
            try:
                position = min(os.lseek(fd, hole, os.SEEK_DATA), stop)
            except OSError:
                position = stop
            low = int(np.searchsorted(ends, hole, side="right"))
            high = int(np.searchsorted(ends, position, side="left")) + 1
            lost += range(max(low, first), min(high, last))
    return sorted(set(lost))


def table(layer_dir: str) -> tuple[NDArray[np.uint32], int] | None:
    """The frames' content sizes and the size of the stream, from ``present`` alone; None where it says nothing usable."""
    found = _read(layer_dir)
    return None if found is None else (found.sizes, found.stream_size)


def progress(layer_dir: str) -> tuple[int, int]:
    """Bytes of the tar stream that ``data`` holds, and the size of the whole; ``(0, 0)`` where nothing is known."""
    found = _read(layer_dir)
    if found is None:
        return 0, 0
    there = np.frombuffer(bytes(found.states), np.uint8) != MISSING
    return int(found.sizes[there].sum(dtype=np.uint64)), found.stream_size


def frame_states(layer_dir: str, sizes: NDArray[np.uint32], stream_size: int) -> bytearray | None:
    """The state of each frame as valid for the running boot; None where the file is not one of these frames."""
    found = _read(layer_dir)
    if found is None or found.stream_size != stream_size or not np.array_equal(found.sizes, sizes):
        return None
    return found.states


class Presence:
    """The frame states of one layer, in memory and in its ``present`` file.

    ``states`` is one byte per frame, readable from any thread without a lock: a frame found non-zero there has been
    written to ``data``. With ``path`` None, or once the file cannot be written, marks live in memory only; then
    ``persistent`` is False.
    """

    def __init__(self, sizes: NDArray[np.uint32], stream_size: int, path: str | None) -> None:
        self.states = bytearray(len(sizes))
        self.persistent = False
        self.verdict = UNCHECKED
        """UNCHECKED, GOOD, BAD or AGAIN: whether the whole stream has its diffID."""
        self.damage = ""
        """Why marks that the file had were not believed; empty where all is well."""
        self._solid = False
        self._sizes = sizes.astype("<u4", copy=False)
        self._stream_size = stream_size
        self._path = path
        self._fd = -1
        self._lock = threading.Lock()
        self._missing = len(sizes)
        self._volatile = 0
        self.losses = 0
        """How often frames were taken back: who looked at all of ``data`` meanwhile has not seen one state of it."""
        self._taken_back: set[int] = set()

    @classmethod
    def open(cls, layer_dir: str, sizes: NDArray[np.uint32], stream_size: int, *, look: bool = True) -> Presence:
        """Load what holds for this boot from ``layer_dir``, and begin a new file where there is none that fits.

        ``sizes`` are the frames' content sizes. A file that cannot be written (full disk) is no error. Marks of frames that
        ``data`` has not are taken back, and ``damage`` says so; not with ``look`` false, for who is alone with ``data``
        (:meth:`DataStore.alone`) and would wait for itself.
        """
        presence = cls(sizes, stream_size, os.path.join(layer_dir, _NAME))
        try:
            found = _load(layer_dir)
            if found.stream_size != stream_size or not np.array_equal(found.sizes, sizes):
                raise FormatError("the present file is about other frames")
            presence._take(found, os.path.join(layer_dir, _DATA) if look else "")
        except FileNotFoundError:
            pass
        except (OSError, FormatError) as error:
            presence.damage = str(error)
        presence.persist()
        return presence

    def _take(self, found: _Found, data: str) -> None:
        """Believe what ``found`` says as far as ``data`` (a path, or empty) bears it out. Raises OSError, FormatError."""
        self.verdict, self._solid = found.verdict, found.solid
        states = found.states
        if data and states.count(MISSING) < len(states):
            try:
                fd = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise FormatError("data is gone") from None
            try:
                size = os.fstat(fd).st_size
                # Found good with holes: this file system makes holes of zeros, so they say nothing.
                porous = found.verdict == GOOD and not found.solid
                lost = lost_frames(fd, self._sizes, states) if size < self._stream_size or not porous else []
            finally:
                os.close(fd)
            if size > self._stream_size:
                raise FormatError(f"data has {size} bytes instead of {self._stream_size}")
            for frame in lost:
                states[frame] = MISSING
            if lost:
                self.damage = f"data has lost {len(lost)} frames"
                self.verdict = AGAIN if found.verdict == AGAIN else BAD if found.verdict == BAD else UNCHECKED
        self.states[:] = states
        self._missing = states.count(MISSING)
        self._volatile = states.count(VOLATILE)

    def persist(self) -> bool:
        """Make the file agree with memory where it does not exist yet or belongs to an earlier boot; False: disk full."""
        with self._lock:
            if self.persistent or self._path is None:
                return self.persistent
            try:
                content = b"".join((self._header(), self._sizes.tobytes(), self.states))
                write_atomic(self._path, content, durable=False)
                fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                return False
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = fd
            self.persistent = True
            return True

    def _header(self) -> bytes:
        return _header(self._sizes.tobytes(), self._stream_size, boot_id(), self.verdict, self._solid)

    def __len__(self) -> int:
        return len(self.states)

    @property
    def missing(self) -> int:
        """The number of frames that are not in ``data``."""
        return self._missing

    @property
    def volatile(self) -> int:
        """The number of frames that a power cut would lose."""
        return self._volatile

    def mark(self, frame: int) -> None:
        """Record that ``frame`` has been written to ``data``. Never raises for the disk's sake."""
        with self._lock:
            if self.states[frame]:
                return
            self._store(frame, VOLATILE)
            self._missing -= 1
            self._volatile += 1

    def lose(self, frames: Iterable[int]) -> int:
        """Record that ``data`` does not hold ``frames`` after all; returns how many were thought to be there."""
        count = 0
        with self._lock:
            self.losses += 1
            if self.verdict == GOOD:
                self._judge(UNCHECKED, solid=False)
            for frame in frames:
                state = self.states[frame]
                if state == MISSING:
                    continue
                self._store(frame, MISSING)
                self._taken_back.add(frame)
                self._missing += 1
                self._volatile -= state == VOLATILE
                count += 1
        return count

    def sync(self) -> bool:
        """Have the marks on disk as they are in memory; False where the file does not say the same, or the disk fails."""
        with self._lock:
            if not self.persistent:
                return False
            fd = os.dup(self._fd)
        try:
            os.fdatasync(fd)
        except OSError:
            return False
        finally:
            os.close(fd)
        return self.persistent

    def reload(self) -> bool:
        """Take over what the file says, which another object of the same layer may have changed; False without a file."""
        with self._lock:
            if not self.persistent or self._path is None:
                return False
            try:
                found, boot = _parse(os.pread(self._fd, _HEADER.size + 5 * len(self.states), 0))
                same = os.stat(self._path).st_ino == os.fstat(self._fd).st_ino
            except FileNotFoundError:
                same = True  # the directory is in the trash, and nobody else has it
            except (OSError, FormatError):
                return False
            if not same or boot != boot_id() or not np.array_equal(found.sizes, self._sizes):
                return False
            self.states[:] = found.states
            self.verdict, self._solid = found.verdict, found.solid
            self._missing = found.states.count(MISSING)
            self._volatile = found.states.count(VOLATILE)
            return True

    def judge(self, verdict: int, *, solid: bool = False) -> bool:
        """Record what hashing the stream has shown; False where a frame has been lost meanwhile, which voids GOOD."""
        with self._lock:
            if verdict == GOOD and self._missing:
                return False
            self._judge(verdict, solid=solid)
            return True

    def _judge(self, verdict: int, *, solid: bool) -> None:
        self.verdict, self._solid = verdict, solid
        if self.persistent:
            try:
                os.pwrite(self._fd, self._header(), 0)
            except OSError:
                self.persistent = False

    def volatile_frames(self) -> list[int]:
        """The frames to pass to :meth:`make_durable` after an ``fdatasync`` of ``data`` that begins now."""
        with self._lock:
            self._taken_back.clear()
            states = np.frombuffer(bytes(self.states), np.uint8)
        return [int(frame) for frame in np.flatnonzero(states == VOLATILE)]

    def make_durable(self, frames: list[int]) -> None:
        """Record that ``frames`` survive a power cut; ``data`` has been synced since they were written."""
        with self._lock:
            for frame in frames:
                if self.states[frame] == VOLATILE and frame not in self._taken_back:  # else written anew since then
                    self._store(frame, DURABLE)
                    self._volatile -= 1
            fd = os.dup(self._fd) if self.persistent else -1
        if fd >= 0:
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)

    def _store(self, frame: int, state: int) -> None:
        self.states[frame] = state
        if self.persistent:
            try:
                os.pwrite(self._fd, bytes((state,)), _HEADER.size + 4 * len(self.states) + frame)
            except OSError:
                self.persistent = False  # memory is right; persist() writes the whole file again later

    def close(self) -> None:
        """Close the file; marks from now on stay in memory."""
        with self._lock:
            self.persistent = False
            self._path = None
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
