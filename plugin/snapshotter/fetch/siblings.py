"""Files of the same name in neighbouring directories, which programs read one after the other.

``importlib.metadata`` reads one small file in each ``*.dist-info`` of a Python installation, package managers one in each
of their packages' directories, and so on. Each lies in another frame, so each costs a round trip, and no distance in the
tar tells that the next will be wanted. What tells is the order: after three such files in a row the following ones are
fetched, in a window that doubles as long as the order is kept.

Pure: decisions over plain data, made from a layer's TOC.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from weenv.layer.toc import FILE, FLAG_SPARSE, NO_DATA, Toc

SMALL: Final = 64 << 10
"""Only files of at most so many bytes take part: a larger one is worth a round trip of its own."""
_NAME_MAX: Final = 24
"""Longer names are not looked at: files that tools look for by name have short ones."""
_MEMBERS_MIN: Final = 5
"""Fewer files of a name are not worth remembering."""
_GROUPS_MAX: Final = 1024
"""Groups followed at a time per layer; the one whose last file was read longest ago goes."""
_ROW_MIN: Final = 3
"""Files in a row that start a window."""
_SKIP: Final = 3
"""A reader may leave out so many files less one and is still in a row: some were in the page cache."""
_WINDOW_MIN: Final = 8
_WINDOW_MAX: Final = 64

_FEW: Final = 48
"""Members of a group that is fetched as a whole once three of it have been read in any order."""
_COMPILED: Final = b"__pycache__"

_MIX: Final = np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True)
class _Row:
    """A reader going through a group: the rank it read last, how many in a row, up to which rank all is planned."""

    rank: int
    length: int = 1
    planned: int = 0
    window: int = 0
    seen: set[int] = field(default_factory=set)
    """Ranks read of a group of few; empty once all of it is planned."""
    whole: bool = False


class Siblings:
    """The groups of one layer, and who is going through them. Not thread-safe.

    ``begin`` are the stream offsets of all member files, ascending; ``group`` and ``rank`` say where each belongs. The
    members of group ``g`` are ``members[first[g]:first[g + 1]]``, stream offsets in ascending order, ``sizes`` beside them.
    """

    def __init__(
        self, begin: array[int], group: array[int], rank: array[int], first: array[int], members: array[int], sizes: array[int]
    ) -> None:
        self.begin = begin
        self.group = group
        self.rank = rank
        self.first = first
        self.members = members
        self.sizes = sizes
        self._rows: dict[int, _Row] = {}

    @classmethod
    def none(cls) -> Siblings:
        """Nothing is known."""
        return cls(array("Q"), array("I"), array("I"), array("I", [0]), array("Q"), array("I"))

    @property
    def memory(self) -> int:
        """Bytes that the tables take."""
        return sum(
            len(each) * each.itemsize for each in (self.begin, self.group, self.rank, self.first, self.members, self.sizes)
        )

    @classmethod
    def of(cls, toc: Toc) -> Siblings:
        """Group a layer's small files by (directory of their directory, name).

        Names are compared by a 64-bit hash. Who makes two collide gets files fetched early that nobody wants, within the
        budget of guesses, and nothing else.
        """
        entries = toc.entries
        plain = (entries.kind == FILE) & (entries.aux != NO_DATA) & ((entries.flags & FLAG_SPARSE) == 0)
        plain &= (entries.size > 0) & (entries.size <= SMALL) & (entries.name_len <= _NAME_MAX)
        (chosen,) = np.nonzero(plain)
        if not len(chosen):
            return cls.none()
        pool = np.frombuffer(memoryview(toc.pool), dtype=np.uint8)
        key = _hashes(pool, entries.name_off[chosen], entries.name_len[chosen])
        parent = entries.parent[chosen]
        own = entries.name_len == len(_COMPILED)  # where Python keeps what it compiled: it stands for the directory above
        own[own] = _hashes(pool, entries.name_off[own], entries.name_len[own]) == _hash(_COMPILED)
        parent = np.where(own[parent], entries.parent[parent], parent)
        above = entries.parent[parent].astype(np.uint64)
        key = (key ^ above) * _MIX
        key ^= key >> np.uint64(29)
        _, group, counts = np.unique(key, return_inverse=True, return_counts=True)
        frequent = counts >= _MEMBERS_MIN
        number = np.cumsum(frequent) - 1
        kept = frequent[group]
        group = number[group[kept]]
        begin = entries.aux[chosen][kept]
        size = entries.size[chosen][kept]
        # Within a group by offset, which is the order of the tar and so that of the directories.
        order = np.lexsort((begin, group))
        group, begin, size = group[order], begin[order], size[order]
        first = np.searchsorted(group, np.arange(int(frequent.sum()) + 1))
        rank = np.arange(len(group)) - first[group]
        by_offset = np.argsort(begin, kind="stable")
        return cls(
            packed("Q", begin[by_offset]), packed("I", group[by_offset]), packed("I", rank[by_offset]), packed("I", first),
            packed("Q", begin), packed("I", size),
        )  # fmt: skip

    def observe(self, offset: int, length: int) -> list[tuple[int, int]]:
        """A read of ``[offset, offset + length)``: the ``(offset, size)`` of the files to fetch, the nearest first."""
        begin = self.begin
        # A small read may begin in the middle of a page that holds several files; any of them may be the one that is read.
        low = max(bisect_right(begin, offset) - 1, 0)
        high = bisect_left(begin, offset + length, low)
        wanted: list[tuple[int, int]] = []
        for index in range(low, min(high, low + 16)):
            wanted += self._step(self.group[index], self.rank[index])
        return wanted

    def _step(self, group: int, rank: int) -> list[tuple[int, int]]:
        row = self._rows.pop(group, None)
        if row is None:
            row = _Row(rank)
            if len(self._rows) >= _GROUPS_MAX:
                del self._rows[next(iter(self._rows))]
        self._rows[group] = row  # most recently used last
        first, end = self.first[group], self.first[group + 1]
        if end - first <= _FEW:
            return self._few(row, rank, first, end)
        if rank == row.rank:
            return []
        if not row.rank < rank <= row.rank + _SKIP:
            row.rank, row.length, row.planned, row.window = rank, 1, 0, 0
            return []
        row.rank = rank
        row.length += 1
        if row.length < _ROW_MIN or row.planned > rank + row.window // 2:
            return []
        row.window = min(max(_WINDOW_MIN, row.window * 2), _WINDOW_MAX)
        start = max(row.planned, rank + 1)
        row.planned = min(rank + 1 + row.window, end - first)
        return [(self.members[first + each], self.sizes[first + each]) for each in range(start, row.planned)]


    def _few(self, row: _Row, rank: int, first: int, end: int) -> list[tuple[int, int]]:
        if row.whole:
            return []
        row.seen.add(rank)
        if len(row.seen) < _ROW_MIN:
            return []
        others = [each for each in range(end - first) if each not in row.seen]
        row.whole = True
        row.seen.clear()
        return [(self.members[first + each], self.sizes[first + each]) for each in others]


def _hash(name: bytes) -> Any:
    return _hashes(np.frombuffer(name, dtype=np.uint8), np.zeros(1, dtype=np.uint64), np.array([len(name)], dtype=np.uint16))[0]


def _hashes(pool: Any, offsets: Any, lengths: Any) -> Any:
    """u64 hashes of names of at most ``_NAME_MAX`` bytes: three words of eight, zero beyond the end, and the length."""
    key = lengths.astype(np.uint64)
    lengths = lengths.astype(np.int64)
    last = len(pool) - 1
    for word in range(0, _NAME_MAX, 8):
        value = np.zeros(len(offsets), dtype=np.uint64)
        for byte in range(word, word + 8):
            at = np.minimum(offsets.astype(np.int64) + byte, last)
            value = (value << np.uint64(8)) | np.where(byte < lengths, pool[at], 0).astype(np.uint64)
        key = (key ^ value) * _MIX
        key ^= key >> np.uint64(32)
    return key


def packed(code: str, values: Any) -> array[int]:
    """A column as an ``array`` of u64 (``Q``) or u32 (``I``)."""
    table = array(code)
    table.frombytes(values.astype("=u8" if code == "Q" else "=u4").tobytes())
    return table
