"""What to fetch: decisions over plain data, without I/O, clock or threads.

Two questions are answered here. :func:`span` says which neighbours go into one ranged read with a frame.
:class:`ReadAhead` says which frames to fetch before anybody asks for them.

Read-ahead knows where large files begin and end (:class:`Extents`), so it never runs past the file that is read:

* *Streams*: a reader that goes forward through a file gets a window of frames ahead of it. The window doubles with every
  step that finds its frames already there or on their way, up to a limit, and collapses when the reader jumps.
* *Density*: page faults of a large program come in any order. Around a missing frame, the largest aligned block of
  4, 8, ... frames of the same file in which at least half have been asked for is completed. So at most as much is
  fetched on a guess as was asked for, and a random reader of a few frames causes nothing.
* *Whole files*: a file of a few frames is fetched whole when it is first read; a shared library is read in jumps, and
  each would cost a round trip.
* *Programs*: an executable or a shared library is mapped, and its pages are touched in any order until most of it has been
  read. Demands for its frames fetch the aligned block of 4, 16, 64, ... frames around them, so a few misses bring all of
  it; a program of which only the header is looked at costs four frames.
* *Siblings*: files of one name in neighbouring directories, see siblings.py.
* *Neighbours*: small files share frames, and files that are read together lie together in the tar. Of the frames that a
  series of real commands asked for, four in five were followed in the tar by another that was asked for sooner or later.
  So with a frame the next two are fetched, and more where frames are demanded in sequence, on a :class:`Budget`.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from weenv.layer.toc import FILE, FLAG_SPARSE, NO_DATA, Toc
from weenv.plugin.snapshotter.fetch.siblings import SMALL, Siblings, packed

_PAGE: Final = 4096
_MAX_STREAMS: Final = 32
"""Streams remembered per layer; the least recently used one goes."""
_RUN_MIN: Final = 2
"""Frames fetched after one that small files share."""
_RUN_MAX: Final = 16
"""The same where frames are demanded in sequence."""
_PROGRAM_BLOCK: Final = 4
"""Frames fetched around the first miss in a program, and how many times as many around each further one."""
_PROGRAM_NAME: Final = re.compile(rb"\.(so|so\.[0-9.]+|node|dll)$")
"""Shared libraries that carry no execute permission; everything else that is mapped has it."""


def offsets(sizes: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> array[int]:
    """A u64 offset table as an ``array``, which bisects three times faster than numpy for single values."""
    return packed("Q", sizes)


@dataclass(frozen=True, slots=True)
class Extents:
    """Where a layer's files lie, as far as read-ahead wants to know.

    Files that have frames of their own: file ``i`` owns frames ``first[i] ... end[i]``; sorted, disjoint; ``program[i]`` is 1
    where it is an executable or a shared library. And the small ones that are read in a row.
    """

    first: array[int]
    end: array[int]
    program: bytearray
    siblings: Siblings

    @classmethod
    def none(cls) -> Extents:
        """No file is known to be large."""
        return cls(array("Q"), array("Q"), bytearray(), Siblings.none())

    @property
    def memory(self) -> int:
        """Bytes that the tables take."""
        return 17 * len(self.first) + self.siblings.memory

    @classmethod
    def of(cls, toc: Toc) -> Extents:
        """The files of a layer that reach into at least two frames, each from its first frame to its last."""
        entries = toc.entries
        plain = (entries.kind == FILE) & (entries.aux != NO_DATA) & ((entries.flags & FLAG_SPARSE) == 0) & (entries.size > 0)
        (number,) = np.nonzero(plain)
        begin = entries.aux[plain]
        finish = begin + entries.size[plain]
        if len(toc.sparse):
            begin = np.concatenate([begin, toc.sparse.stream])
            finish = np.concatenate([finish, toc.sparse.stream + toc.sparse.length])
            number = np.concatenate([number, np.zeros(len(toc.sparse), dtype=number.dtype)])  # the root: not a program
        content = toc.frames.content_offsets
        first = np.searchsorted(content, begin, side="right") - 1
        end = np.searchsorted(content, finish, side="left")
        large = end - first >= 2
        order = np.argsort(first[large], kind="stable")
        first, end, number = first[large][order], end[large][order], number[large][order]
        # Two large files may meet within one frame; the later one owns it.
        if len(first) > 1:
            end[:-1] = np.minimum(end[:-1], first[1:])
        keep = end > first
        program = bytearray(
            bool(entry and (entries.mode[entry] & 0o111 or _PROGRAM_NAME.search(toc.name(entry))))
            for entry in number[keep].tolist()
        )
        return cls(offsets(first[keep].astype(np.uint64)), offsets(end[keep].astype(np.uint64)), program, Siblings.of(toc))

    def file_of(self, frame: int) -> tuple[int, int]:
        """``(first, end)`` of the large file that owns ``frame``, or ``(0, 0)``."""
        index = bisect_right(self.first, frame) - 1
        if index >= 0 and frame < self.end[index]:
            return self.first[index], self.end[index]
        return 0, 0

    def is_program(self, first: int) -> bool:
        """Whether the large file that begins with frame ``first`` is an executable or a shared library."""
        index = bisect_right(self.first, first) - 1
        return index >= 0 and bool(self.program[index])


def span(
    frame: int, starts: Sequence[int], wanted: Callable[[int], bool], urgent: Callable[[int], bool], limit: int
) -> tuple[int, int]:
    """``(first, end)`` of one ranged read: ``frame`` and its neighbours that are ``wanted``, at most ``limit`` bytes.

    ``starts`` are the compressed offsets (n + 1 of them). What comes before ``frame`` delays it, so only ``urgent`` frames
    are taken there, and only after it has grown forwards. Always holds ``frame`` itself, however large it is.
    """
    first, end, last = frame, frame + 1, len(starts) - 1
    while end < last and starts[end + 1] - starts[first] <= limit and wanted(end):
        end += 1
    while first > 0 and starts[end] - starts[first - 1] <= limit and urgent(first - 1):
        first -= 1
    return first, end


@dataclass(slots=True)
class Budget:
    """Bounds guesses, all layers together: those nobody has used yet may amount to ``waste`` of the bytes demanded.

    So bytes fetched stay below (1 + waste) times those needed, and ``floor``. Bytes are compressed ones.
    """

    waste: float = 0.25
    floor: int = 1 << 20
    demanded: int = 0
    """Bytes of the frames that readers have asked for."""
    guessed: int = 0
    """Bytes of neighbours fetched on a guess that nobody has asked for yet."""
    returned: deque[int] = field(default_factory=deque)
    """The same of layers that were closed, to be taken off; appended to in any thread, whatever locks it holds."""

    def left(self) -> int:
        """Bytes that may be guessed now."""
        while self.returned:
            self.guessed -= self.returned.popleft()
        return self.floor + int(self.waste * self.demanded) - self.guessed


@dataclass(slots=True)
class _Stream:
    """A reader going forward through ``[first, end)``: it asks for ``position`` next; frames below ``ahead`` were planned."""

    first: int
    end: int
    position: int
    ahead: int
    window: int = 0


class ReadAhead:
    """Read-ahead decisions for one layer. Not thread-safe: whoever shares a ``budget`` shares a lock.

    ``states`` are the frame states of cache/present.py (0: missing); ``planned`` answers whether a frame is on its way.
    ``contents`` are the frames' offsets in the tar stream (n + 1 of them); without them siblings are not found.
    """

    def __init__(
        self,
        starts: Sequence[int],
        states: bytearray,
        planned: Callable[[int], bool],
        *,
        contents: Sequence[int] | None = None,
        window_min: int = 256 << 10,
        window_max: int = 8 << 20,
        block_max: int = 64,
        whole_max: int = 1 << 20,
        budget: Budget | None = None,
        rows: Budget | None = None,
    ) -> None:
        self.extents = Extents.none()
        self.budget = budget or Budget()
        self.rows = rows or Budget(waste=0.1, floor=4 << 20)
        """The budget of siblings: they are guessed with more reason, so they need not wait for the neighbours' luck."""
        self._starts = starts
        self._states = states
        self._planned = planned
        self._asked = bytearray(len(states))  # 1: a reader has asked for the frame
        self._guessed: dict[int, Budget] = {}
        self._streams: dict[int, _Stream] = {}
        self._touched: dict[int, int] = {}  # programs: first frame to how often a new frame was asked for
        self._contents = contents
        self._window_min = window_min
        self._window_max = window_max
        self._block_max = block_max
        self._whole_max = whole_max
        self._run_end = -1  # small files: where the last demand ended
        self._run_window = _RUN_MIN

    def observe(self, first: int, end: int, offset: int = 0, length: int = 0) -> list[int]:
        """A reader asks for frames ``[first, end)``: which others to fetch as well, in the order to fetch them.

        ``offset`` and ``length`` are what it reads of the tar stream, in bytes.
        """
        planned = self._observe(first, end)
        if 0 < length <= SMALL and len(self.extents.siblings.begin):
            planned += self._siblings(offset, length, {*planned, *range(first, end)})
        return planned

    def evicted(self, frames: Iterable[int]) -> None:
        """These frames are missing again: who asks for them asks for the first time. Any thread."""
        for frame in frames:
            self._asked[frame] = 0

    def forget(self) -> None:
        """The layer is closed: what was guessed for it burdens the budgets no longer. Any thread, once."""
        for frame, budget in self._guessed.items():
            budget.returned.append(self._starts[frame + 1] - self._starts[frame])

    def _observe(self, first: int, end: int) -> list[int]:
        asked = self._asked
        fresh = asked.find(0, first, end) >= 0
        starts = self._starts
        if fresh:
            for frame in range(first, end):
                if not asked[frame]:
                    asked[frame] = 1
                    size = starts[frame + 1] - starts[frame]
                    self.budget.demanded += size
                    self.rows.demanded += size
                    if (budget := self._guessed.pop(frame, None)) is not None:
                        budget.guessed -= size
        # A read begins with a page and ends with its file, so where it touches two files it is the later one's.
        low, high = self.extents.file_of(end - 1)
        if high and starts[high] - starts[low] > self._whole_max:
            planned = self._file(low, high, first, end, fresh)
        elif not fresh:
            return []
        elif high:
            planned = self._wanted(low, high) + self._neighbours(first, max(end, high))
        else:
            return self._neighbours(first, end)
        return [frame for frame in planned if not first <= frame < end]

    def _siblings(self, offset: int, length: int, already: set[int]) -> list[int]:
        contents, found = self._contents, self.extents.siblings.observe(offset, length)
        if not found or contents is None:
            return []
        frames: dict[int, None] = {}  # in the order of the files
        for begin, size in found:
            first = bisect_right(contents, begin - begin % _PAGE) - 1  # it is read by pages
            end = bisect_left(contents, begin + size + -(begin + size) % _PAGE)
            frames.update(dict.fromkeys(range(first, min(end, len(self._states)))))
        states, planned, left = self._states, self._planned, self.rows.left()
        wanted: list[int] = []
        for frame in frames:
            if states[frame] or planned(frame) or frame in already:
                continue
            size = self._starts[frame + 1] - self._starts[frame]
            if size > left:
                break
            left -= size
            self._guess(frame, size, self.rows)
            wanted.append(frame)
        return wanted

    def _guess(self, frame: int, size: int, budget: Budget) -> None:
        if frame not in self._guessed and not self._asked[frame]:
            self._guessed[frame] = budget
            budget.guessed += size

    def _wanted(self, low: int, high: int) -> list[int]:
        states, planned = self._states, self._planned
        return [frame for frame in range(low, high) if not states[frame] and not planned(frame)]

    def _file(self, low: int, high: int, first: int, end: int, fresh: bool) -> list[int]:
        stream = self._match(low, first, end)
        if stream is None:
            stream = _Stream(low, high, end, end)
            self._streams[id(stream)] = stream
            if len(self._streams) > _MAX_STREAMS:
                del self._streams[next(iter(self._streams))]
            if not fresh:
                return []
            return self._program(low, high, end - 1) if self.extents.is_program(low) else self._block(low, high, first)
        if end <= stream.position:
            return []
        stream.position = end
        stream.ahead = max(stream.ahead, end)
        stream.window = min(max(self._window_min, stream.window * 2), self._window_max)
        starts = self._starts
        reach = starts[end] + stream.window
        if starts[stream.ahead] - starts[end] > stream.window // 2:
            return []  # more than half of the window is still to be read: ask for more in one piece later
        target = min(max(bisect_right(starts, reach) - 1, end + 1), high)
        wanted = self._wanted(stream.ahead, target)
        stream.ahead = max(stream.ahead, target)
        return wanted

    def _match(self, low: int, first: int, end: int) -> _Stream | None:
        """The stream that a read at ``first`` continues: at its position, within its window, or just behind it."""
        for key, stream in reversed(self._streams.items()):
            if stream.first == low and stream.position - 1 <= first <= stream.ahead:
                del self._streams[key]
                self._streams[key] = stream  # most recently used last
                return stream
        return None

    def _block(self, low: int, high: int, frame: int) -> list[int]:
        """Frames that complete the largest block around ``frame`` of which half has been asked for."""
        size, best = 2, (0, 0)
        asked = self._asked
        while size <= self._block_max:
            block = low + (frame - low) // size * size
            block_end = min(block + size, high)
            if 2 * asked.count(1, block, block_end) < block_end - block:
                break
            best = (block, block_end)
            if block == low and block_end == high:
                break
            size *= 2
        # A pair is completed by one demand alone, which would double every random read: four frames are the least.
        return self._wanted(*best) if best[1] - best[0] >= 4 else []

    def _program(self, low: int, high: int, frame: int) -> list[int]:
        """The block around ``frame``, four times as large with every new frame asked for; what follows it first."""
        touched = self._touched[low] = self._touched.get(low, 0) + 1
        size = min(_PROGRAM_BLOCK ** min(touched, 12), self._block_max)
        block = low + (frame - low) // size * size
        return self._wanted(frame, min(block + size, high)) + self._wanted(block, frame)

    def _neighbours(self, first: int, end: int) -> list[int]:
        """Frames after ``[first, end)`` that small files share, as far as the budget goes."""
        if self._run_end - 1 <= first <= self._run_end + self._run_window:
            self._run_end = max(self._run_end, end)
            self._run_window = min(self._run_window * 2, _RUN_MAX)
        else:
            self._run_end, self._run_window = end, _RUN_MIN
        left = self.budget.left()
        wanted: list[int] = []
        starts = self._starts
        for frame in self._wanted(self._run_end, min(self._run_end + self._run_window, len(self._states))):
            low, high = self.extents.file_of(frame)
            size = starts[frame + 1] - starts[frame]
            if size > left or (high and starts[high] - starts[low] > self._whole_max):
                break
            left -= size
            self._guess(frame, size, self.budget)
            wanted.append(frame)
        return wanted
