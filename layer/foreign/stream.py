"""A content stream for a blob whose TOC knows no tar stream: where files lie in it, and which frames it is made of.

The stream is laid out like a tar, a header's room (512 zeros) before each file, so that it obeys the same rules. Chunks share
frames up to :data:`TARGET`, as small files do in our own format: each would cost a request of its own. A large file has frames
of its own, and begins at a page, as does what follows it: a page that is read does not need another file's chunks then. Long
runs of zeros are holes of the file and are in no frame.

::

    small files A and B, one chunk each               C, a large one
    |512 zeros| A | to 512 | 512 zeros| B | to 512 | one header's room, to a page | C's first chunks | its next ... |
    |<------------------ frame 0 ------------------>|<----------------- frame 1 ------------------->|<-- frame 2 ...

A frame ends where its file's last block ends, or with its last byte where the file goes on in the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weenv.core.errors import FormatError, LimitError
from weenv.layer.limits import Limits
from weenv.layer.pieces import MAX_GAP, Pieces
from weenv.layer.tarscan import show
from weenv.layer.toc import NO_DATA, Frames

_BLOCK = 512
_PAGE = 4096
TARGET = 512 << 10
"""Bytes of content up to which chunks share a frame, and from which on a file shares none; a chunk may be larger."""
_HOLE = 64 << 10
"""Holes are made of aligned blocks of so many bytes: EROFS wants one chunk index for each of a sparse file's blocks."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """``size`` bytes of a file from ``at`` on: those at ``inner`` of what the unit at ``offset`` of the blob decompresses to.

    ``digest`` is their sha256, 32 bytes; None: they are zeros, and nothing is to be read for them.
    """

    at: int
    size: int
    offset: int = 0
    inner: int = 0
    digest: bytes | None = None


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


class StreamLayout:
    """Takes files in the order in which their chunks lie in the blob (:meth:`add`), then gives the tables (:meth:`finish`)."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._end = 0  # of what was laid out: data, or a file's last block
        self._large = False  # the last file was large
        self._fresh = True  # the next unit begins a frame
        self._unit = -1  # where the last unit begins in the blob
        self._starts: list[int] = []  # per frame: where its range begins in the blob
        self._contents: list[int] = []  # per frame: where its content begins
        self._first: list[int] = []  # per frame: its first piece
        self._rows: list[tuple[int, int, int, int]] = []  # per piece: unit, skip, size, place
        self._digests: list[bytes] = []

    def add(self, name: bytes, size: int, chunks: Sequence[Chunk]) -> tuple[int, tuple[tuple[int, int, int], ...] | None]:
        """Lay out a file of ``size`` > 0 bytes, which ``chunks`` cover without gaps, in order.

        Returns ``offset`` and ``sparse`` of its :class:`~weenv.layer.tarscan.Member`. Raises :class:`FormatError` naming it.
        """
        if all(chunk.digest is None for chunk in chunks):
            return NO_DATA, None
        large = size >= TARGET
        begin = _up(self._end, _BLOCK) + _BLOCK
        if large or self._large:
            begin = _up(begin, _PAGE)
            self._fresh = True
        logical, stream = 0, begin  # the file's bytes from ``logical`` on lie at ``stream``
        pieces: list[tuple[int, int, int]] = []
        for chunk in _joined(chunks):
            if chunk.digest is not None:
                self._piece(name, chunk, stream + chunk.at - logical)
                continue
            end = chunk.at + chunk.size
            low, high = _up(chunk.at, _HOLE), end if end == size else end // _HOLE * _HOLE
            if high > low:
                if low > logical:
                    pieces.append((logical, stream, low - logical))
                    stream += low - logical
                    self._reach(name, stream)
                logical = high
        self._reach(name, stream + size - logical)
        if size > logical:
            pieces.append((logical, stream, size - logical))
        self._end = _up(self._end, _BLOCK)
        self._large = large
        if self._end > self._limits.max_stream:
            raise LimitError(f"files of more than {self._limits.max_stream} bytes", member=show(name))
        return begin, None if pieces == [(0, begin, size)] else tuple(pieces)

    def _reach(self, name: bytes, position: int) -> None:
        self._end = position
        if self._contents and position - self._contents[-1] > self._limits.max_frame_content:
            raise LimitError(
                f"a chunk of more than {self._limits.max_frame_content} bytes, or chunks that share one unit", member=show(name)
            )

    def _piece(self, name: bytes, chunk: Chunk, position: int) -> None:
        assert chunk.digest is not None
        far = self._limits.max_frame_content + MAX_GAP
        if chunk.offset == self._unit:
            _, skip, size, _ = self._rows[-1]
            if chunk.inner < skip + size:
                raise FormatError("a chunk that overlaps the one before it", member=show(name))
        else:
            if chunk.offset < self._unit:
                raise FormatError("a chunk that is not in the order of the blob", member=show(name))
            if chunk.offset - max(self._unit, 0) > far:
                raise LimitError("chunks that lie too far from each other", member=show(name))
            if self._fresh or self._is_full(chunk, position):
                self._starts.append(chunk.offset if self._starts else 0)
                self._contents.append(self._end if self._contents else 0)
                self._first.append(len(self._rows))
                self._fresh = False
            self._unit = chunk.offset
        if chunk.inner + chunk.size > far:
            raise LimitError("a chunk that lies too far into its unit", member=show(name))
        if len(self._rows) >= self._limits.max_frames:
            raise LimitError(f"more than {self._limits.max_frames} chunks", member=show(name))
        place = position - self._contents[-1]
        self._rows.append((chunk.offset - self._starts[-1], chunk.inner, chunk.size, place))
        self._digests.append(chunk.digest)
        self._reach(name, position + chunk.size)

    def _is_full(self, chunk: Chunk, position: int) -> bool:
        """Would the open frame be too large with this chunk?"""
        content = position + chunk.size - self._contents[-1]
        return content > TARGET or chunk.offset - self._starts[-1] > TARGET

    def finish(self, codec: int, end: int) -> tuple[Frames, int]:
        """The frame table and the stream's length. ``end`` is where in the blob the last frame's range ends at the latest."""
        starts = self._starts
        if starts and self._unit >= end:
            raise FormatError(f"a chunk at {self._unit}, but the TOC begins at {end}", member="TOC")
        if starts and end - self._unit > self._limits.max_frame_content + MAX_GAP:
            raise LimitError("more bytes behind the last chunk than any frame may have", member="TOC")
        count = len(self._rows)
        rows = np.array(self._rows, dtype=np.uint32).reshape(count, 4)
        pieces = Pieces(
            codec,
            np.array([*self._first, count], dtype=np.uint32),
            rows[:, 0].copy(), rows[:, 1].copy(), rows[:, 2].copy(), rows[:, 3].copy(),
            np.frombuffer(b"".join(self._digests), dtype=np.uint8).reshape(count, 32),
        )  # fmt: skip
        bounds = np.array([*starts, end] if starts else [0], dtype=np.uint64)
        contents = np.array([*self._contents, self._end] if starts else [0], dtype=np.uint64)
        frames = Frames(
            np.diff(bounds).astype(np.uint32),
            np.diff(contents).astype(np.uint32),
            np.zeros((len(starts), 32), dtype=np.uint8),
            pieces,
        )
        return frames, int(contents[-1])


def _joined(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The same with one chunk for each run of zeros."""
    found: list[Chunk] = []
    for chunk in chunks:
        last = found[-1] if found else None
        if chunk.digest is None and last is not None and last.digest is None:
            found[-1] = Chunk(last.at, last.size + chunk.size)
        else:
            found.append(chunk)
    return found
