"""Which frames of a layer are in its ``data`` file: the ``present`` file of the layer directory.

::

    offset  size  field
    0       8     magic ``WEENVPRS``
    8       4     version, 1
    12      4     CRC-32 of the header with this field zero
    16      8     n, the number of frames
    24      8     size of the tar stream, bytes
    32      16    boot id: of the boot during which the VOLATILE marks below were made
    48      16    zero
    64      4 n   content size of each frame, bytes
    64+4n   n     state of each frame: 0 missing, 1 VOLATILE, 3 DURABLE

Little-endian. Only blobfs writes the file; anyone may read it at any time.

What a mark promises
    *VOLATILE*: the frame was verified and ``pwrite`` of all of it returned, during the boot named in the header. The
    page cache has it, so it is true until the machine stops, whatever processes die. After any reboot, clean or not,
    the mark is void: the header names another boot.
    *DURABLE*: ``fdatasync`` of ``data`` returned after the frame was written and before the mark was. It is true
    across power cuts, as far as the disk keeps what it acknowledged.
    :func:`is_complete` is therefore safe for a mount that lives no longer than this boot, which every mount does.

A mark is one ``pwrite`` of one byte: no lock between processes, nothing to tear, and a full disk is an OSError, where a
shared mapping would be a SIGBUS. A missing or malformed file means that no frame is there.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from weenv.core.atomic import write_atomic
from weenv.core.errors import FormatError
from weenv.layer.limits import DEFAULT_LIMITS

MAGIC: Final = b"WEENVPRS"
VERSION: Final = 1
MISSING: Final = 0
VOLATILE: Final = 1
DURABLE: Final = 3

_HEADER: Final = struct.Struct("<8sIIQQ16s16x")
_NAME: Final = "present"
_DATA: Final = "data"


def boot_id() -> bytes:
    """16 bytes that name the running boot (``/proc/sys/kernel/random/boot_id``)."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return bytes.fromhex(file.read().strip().replace("-", ""))


def _header(frames: int, stream_size: int, boot: bytes) -> bytes:
    bare = _HEADER.pack(MAGIC, VERSION, 0, frames, stream_size, boot)
    return _HEADER.pack(MAGIC, VERSION, zlib.crc32(bare), frames, stream_size, boot)


def _parse(content: bytes) -> tuple[int, bytes, NDArray[np.uint32], bytearray]:
    """Stream size, boot id, content sizes and states of a ``present`` file. Raises :class:`FormatError`."""
    if len(content) < _HEADER.size:
        raise FormatError("the present file is shorter than its header")
    magic, version, crc, frames, stream_size, boot = _HEADER.unpack_from(content)
    if magic != MAGIC or version != VERSION:
        raise FormatError("the present file has another magic or version")
    if zlib.crc32(_HEADER.pack(MAGIC, VERSION, 0, frames, stream_size, boot)) != crc:
        raise FormatError("the present file's header is damaged")
    if len(content) != _HEADER.size + 5 * frames:
        raise FormatError("the present file has the wrong length")
    sizes = np.frombuffer(content, "<u4", frames, _HEADER.size)
    states = bytearray(content[_HEADER.size + 4 * frames :])
    if states.translate(None, b"\x00\x01\x03"):
        raise FormatError("the present file has a frame in an unknown state")
    return stream_size, boot, sizes, states


def _read(layer_dir: str) -> tuple[int, NDArray[np.uint32], bytearray] | None:
    """Stream size, content sizes and states as valid for the running boot; None where there is nothing usable."""
    try:
        with open(os.path.join(layer_dir, _NAME), "rb") as file:
            content = file.read(_HEADER.size + 5 * DEFAULT_LIMITS.max_frames + 1)
        stream_size, boot, sizes, states = _parse(content)
        if os.stat(os.path.join(layer_dir, _DATA)).st_size != stream_size:
            return None
    except (OSError, FormatError):
        return None
    if boot != boot_id():
        states = states.translate(_AFTER_REBOOT)
    return stream_size, sizes, states


_AFTER_REBOOT: Final = bytes(state if state == DURABLE else MISSING for state in range(256))


def is_complete(layer_dir: str) -> bool:
    """True where every frame of the layer is in ``data`` and will be for as long as this boot lasts.

    False where there is no layer, no file, or a damaged one; never raises.
    """
    found = _read(layer_dir)
    return found is not None and MISSING not in found[2]


def progress(layer_dir: str) -> tuple[int, int]:
    """Bytes of the tar stream that ``data`` holds, and the size of the whole; ``(0, 0)`` where nothing is known."""
    found = _read(layer_dir)
    if found is None:
        return 0, 0
    stream_size, sizes, states = found
    return int(sizes[np.frombuffer(states, np.uint8) != MISSING].sum(dtype=np.uint64)), stream_size


def frame_states(layer_dir: str, sizes: NDArray[np.uint32], stream_size: int) -> bytearray | None:
    """The state of each frame as valid for the running boot; None where the file is not one of these frames."""
    found = _read(layer_dir)
    if found is None or found[0] != stream_size or not np.array_equal(found[1], sizes):
        return None
    return found[2]


class Presence:
    """The frame states of one layer, in memory and in its ``present`` file.

    ``states`` is one byte per frame, readable from any thread without a lock: a frame found non-zero there has been
    written to ``data``. With ``path`` None, or once the file cannot be written, marks live in memory only; then
    ``persistent`` is False.
    """

    def __init__(self, sizes: NDArray[np.uint32], stream_size: int, path: str | None) -> None:
        self.states = bytearray(len(sizes))
        self.persistent = False
        self._sizes = sizes.astype("<u4", copy=False)
        self._stream_size = stream_size
        self._path = path
        self._fd = -1
        self._lock = threading.Lock()
        self._missing = len(sizes)
        self._volatile = 0

    @classmethod
    def open(cls, layer_dir: str, sizes: NDArray[np.uint32], stream_size: int) -> Presence:
        """Load what holds for this boot from ``layer_dir``, and begin a new file where there is none that fits.

        ``sizes`` are the frames' content sizes. A file that cannot be written (full disk) is no error.
        """
        presence = cls(sizes, stream_size, os.path.join(layer_dir, _NAME))
        found = _read(layer_dir)
        if found is not None and found[0] == stream_size and np.array_equal(found[1], sizes):
            presence.states[:] = found[2]
            presence._missing = presence.states.count(MISSING)
            presence._volatile = presence.states.count(VOLATILE)
        presence.persist()
        return presence

    def persist(self) -> bool:
        """Make the file agree with memory where it does not exist yet or belongs to an earlier boot; False: disk full."""
        with self._lock:
            if self.persistent or self._path is None:
                return self.persistent
            try:
                content = _header(len(self._sizes), self._stream_size, boot_id()) + self._sizes.tobytes() + self.states
                write_atomic(self._path, content, durable=False)
                fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                return False
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = fd
            self.persistent = True
            return True

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

    def volatile_frames(self) -> list[int]:
        """The frames to pass to :meth:`make_durable` after an ``fdatasync`` of ``data`` that begins now."""
        with self._lock:
            states = np.frombuffer(bytes(self.states), np.uint8)
        return [int(frame) for frame in np.flatnonzero(states == VOLATILE)]

    def make_durable(self, frames: list[int]) -> None:
        """Record that ``frames`` survive a power cut; ``data`` has been synced since they were written."""
        with self._lock:
            for frame in frames:
                if self.states[frame] == VOLATILE:
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
