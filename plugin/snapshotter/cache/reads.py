"""Which frames of a layer have been read, in which order: the file ``reads`` of a layer directory.

::

    magic 8 bytes | u32 number of the layer's frames | u32 0 | u64 begin
    then for each frame, when it is read for the first time:  u32 frame | u32 when

``begin`` and ``when`` are in units of 100 ms, since 1970 and since ``begin``; all numbers are little-endian. Records are
appended, one ``write`` each, so that a process killed at any moment leaves at most half a record, which is cut off before
the next one. Nothing is synced: what a power cut takes is read, and so recorded, again. A frame is recorded once, so the
file is at most 8 bytes a frame long. Whoever finds something else in it begins anew.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from typing import Final

import numpy as np
import numpy.typing as npt

from weenv.layer.profile import UNITS

NAME: Final = "reads"
_MAGIC: Final = b"WEENVRD1"
_HEADER: Final = struct.Struct("<8sIIQ")
_RECORD: Final = struct.Struct("<II")
_WHEN_MAX: Final = (1 << 32) - 1


def parse(data: bytes, frames: int) -> list[tuple[int, int]]:
    """``(units since 1970, frame)`` in the order recorded, each frame once; nothing of a file that is about other frames."""
    begin, rows = _rows(data, frames)
    found: dict[int, int] = {}
    for frame, when in rows.tolist():
        found.setdefault(frame, begin + when)
    return [(when, frame) for frame, when in found.items()]


def _rows(data: bytes, frames: int) -> tuple[int, npt.NDArray[np.uint32]]:
    """``begin``, and the records of frames that there are: an array of (frame, when)."""
    records = max(0, len(data) - _HEADER.size) // _RECORD.size
    begin = _begin(data, frames)
    if begin is None or not records:
        return 0, np.empty((0, 2), "<u4")
    rows = np.frombuffer(data, "<u4", 2 * records, _HEADER.size).reshape(-1, 2)
    return begin, rows[rows[:, 0] < frames]


def _begin(head: bytes, frames: int) -> int | None:
    """``begin`` of a file that starts like that; None where it is none about so many frames."""
    if len(head) < _HEADER.size:
        return None
    magic, count, _, begin = _HEADER.unpack_from(head)
    return int(begin) if (magic, count) == (_MAGIC, frames) else None


def _read(layer_dir: str, frames: int) -> bytes:
    with open(os.path.join(layer_dir, NAME), "rb") as file:
        return file.read(_HEADER.size + _RECORD.size * (frames + 1))


def load(layer_dir: str, frames: int) -> list[tuple[int, int]]:
    """What the layer directory's file says (:func:`parse`); nothing where there is none. Raises OSError."""
    try:
        return parse(_read(layer_dir, frames), frames)
    except FileNotFoundError:
        return []


def forget(layer_dir: str) -> int:
    """Remove the file of a layer that nobody has open; returns how many frames it named. Raises OSError."""
    path = os.path.join(layer_dir, NAME)
    try:
        size = os.stat(path).st_size
        os.unlink(path)
    except FileNotFoundError:
        return 0
    return max(0, size - _HEADER.size) // _RECORD.size


class Reads:
    """The record of an open layer of ``frames`` frames in ``layer_dir``, or in memory only where that is None. Any thread."""

    def __init__(self, layer_dir: str | None, frames: int) -> None:
        self.seen = bytearray(frames)
        """1: the frame is recorded. Whoever reads looks here first, without a lock."""
        self._path = None if layer_dir is None else os.path.join(layer_dir, NAME)
        self._lock = threading.Lock()
        self._fd = -1
        self._begin = 0
        if layer_dir is not None:
            with contextlib.suppress(OSError):  # a record that cannot be read is begun anew
                _, rows = _rows(_read(layer_dir, frames), frames)
                np.frombuffer(self.seen, np.uint8)[rows[:, 0]] = 1  # there may be two million, and whoever opens a layer waits

    @property
    def recording(self) -> bool:
        """Whether what is read goes into the file."""
        return self._path is not None

    def note(self, first: int, end: int) -> list[int]:
        """Frames ``[first, end)`` are read: those of them that were not before. A disk that takes no data is nobody's error."""
        seen = self.seen
        with self._lock:
            fresh = [frame for frame in range(first, end) if not seen[frame]]
            for frame in fresh:
                seen[frame] = 1
            if fresh and self._path is not None:
                try:
                    self._append(fresh)
                except OSError:
                    self._path = None  # full, or gone with its directory: what is recorded so far has to do
                    self._close()
        return fresh

    def _append(self, frames: list[int]) -> None:
        now = int(time.time() * UNITS)
        if self._fd < 0:
            self._open(now)
        when = min(max(now - self._begin, 0), _WHEN_MAX)
        data = b"".join(_RECORD.pack(frame, when) for frame in frames)
        if (done := os.write(self._fd, data)) != len(data):
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - done)
            raise OSError("the disk is full")

    def _open(self, now: int) -> None:
        assert self._path is not None
        self._fd = fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        count, size = len(self.seen), os.fstat(fd).st_size
        begin = _begin(os.pread(fd, _HEADER.size, 0), count)
        if begin is not None and size <= _HEADER.size + 2 * _RECORD.size * count:
            self._begin = begin
            if torn := (size - _HEADER.size) % _RECORD.size:
                os.ftruncate(fd, size - torn)
            return
        os.ftruncate(fd, 0)
        self._begin = now
        os.write(fd, _HEADER.pack(_MAGIC, len(self.seen), 0, now))

    def forget(self) -> int:
        """Begin anew, with no file; returns how many frames were recorded. Raises OSError."""
        with self._lock:
            count = self.seen.count(1)
            self.seen[:] = bytes(len(self.seen))
            self._close()
            if self._path is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
        return count

    def close(self) -> None:
        """Close the file; what is read from now on is in memory only."""
        with self._lock:
            self._path = None
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
