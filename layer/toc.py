"""The in-memory TOC: what a layer holds, as columns.

Entries are numbered breadth-first: entry 0 is the root, the children of a directory are contiguous, siblings are sorted
by name bytes (EROFS's own directory order), and directories appear in the order of their entry numbers. So
``parent`` is non-decreasing, and the EROFS metadata comes out of array operations.

Names, symlink targets, xattr names and values are bytes; they live in one ``pool``.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from weenv.layer.pieces import Pieces

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

# Entry kinds (column ``kind``).
FILE = 0
DIRECTORY = 1
SYMLINK = 2
HARDLINK = 3
CHAR = 4
BLOCK = 5
FIFO = 6

# Entry flags (column ``flags``).
FLAG_OPAQUE = 1
"""A directory that hides what lower layers have under its path."""
FLAG_WHITEOUT = 2
"""A whiteout: ``kind`` is CHAR and the device 0:0, which is how overlayfs writes one."""
FLAG_IMPLIED = 4
"""A directory that no member of the tar names: 0755, 0:0 unless a lower layer has the path (as containerd's unpack does)."""
FLAG_SPARSE = 8
"""A file whose payload is described by rows of the sparse table; ``aux`` is the index of the first."""

NO_DATA = (1 << 64) - 1
"""``aux`` of a regular file without payload (size 0, or a hole from end to end)."""


@dataclass(frozen=True, slots=True, eq=False)
class Frames:
    """The frame table: frame ``i`` of the blob holds a contiguous range of the tar stream.

    ``compressed_sizes`` and ``content_sizes`` are u32[n], bytes; ``digests`` is u8[n, 32], sha256 of the compressed
    bytes. Frames follow each other without gaps, from offset 0 of the blob and of the stream.

    ``pieces`` is None but for blobs in somebody else's format (:mod:`weenv.layer.pieces`), whose frames have the digests there,
    and zeros here.
    """

    compressed_sizes: U32
    content_sizes: U32
    digests: U8
    pieces: Pieces | None = None
    compressed_offsets: U64 = field(init=False)
    content_offsets: U64 = field(init=False)

    def __post_init__(self) -> None:
        for name, sizes in (("compressed_offsets", self.compressed_sizes), ("content_offsets", self.content_sizes)):
            offsets = np.zeros(len(sizes) + 1, dtype=np.uint64)
            np.cumsum(sizes, dtype=np.uint64, out=offsets[1:])
            object.__setattr__(self, name, offsets)

    def __len__(self) -> int:
        return len(self.compressed_sizes)

    def covering(self, offset: int, length: int) -> range:
        """The numbers of the frames that hold ``[offset, offset + length)`` of the stream, clipped to its end."""
        if length <= 0 or not len(self) or offset >= int(self.content_offsets[-1]):
            return range(0)
        first = int(np.searchsorted(self.content_offsets, offset, side="right")) - 1
        last = int(np.searchsorted(self.content_offsets, offset + length, side="left"))
        return range(first, min(last, len(self)))


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """One row per entry, all columns of equal length n >= 1.

    =============  ====  ======================================================================================
    parent         u32   entry number of the directory that holds it (the root's is 0)
    name_off       u32   offset of the name in the pool (the root's name is empty)
    name_len       u16   its length in bytes
    kind           u8    FILE ... FIFO
    flags          u8    FLAG_*
    mode           u16   permission bits with suid, sgid, sticky (07777); no file type
    uid, gid       u32
    mtime          i64   seconds since 1970
    mtime_ns       u32   0 ... 999 999 999
    size           u64   FILE: bytes; SYMLINK: target length; else 0
    aux            u64   FILE: stream offset of the payload, or NO_DATA, or first sparse row (FLAG_SPARSE);
                         SYMLINK: pool offset of the target; HARDLINK: entry number of the FILE (or other
                         non-directory) whose inode it shares; CHAR, BLOCK: major << 32 | minor; else 0
    xattr_set      u32   0: none, else 1 + index of a row in :class:`XattrSets`
    =============  ====  ======================================================================================

    A HARDLINK row's own mode, owner, times, size and xattrs are zero: they are the target's. The target of a HARDLINK
    is never itself a HARDLINK.
    """

    parent: U32
    name_off: U32
    name_len: U16
    kind: U8
    flags: U8
    mode: U16
    uid: U32
    gid: U32
    mtime: I64
    mtime_ns: U32
    size: U64
    aux: U64
    xattr_set: U32

    def __len__(self) -> int:
        return len(self.parent)


@dataclass(frozen=True, slots=True, eq=False)
class XattrSets:
    """Distinct sets of extended attributes: set ``s`` is rows ``first[s] ... first[s + 1]`` of the four columns.

    ``first`` is u32[sets + 1]; the others u32[rows]: offsets and lengths in the pool. Names are full
    (``security.capability``), sorted by name within a set, without duplicates.
    """

    first: U32
    name_off: U32
    name_len: U32
    value_off: U32
    value_len: U32

    def __len__(self) -> int:
        return max(0, len(self.first) - 1)


@dataclass(frozen=True, slots=True, eq=False)
class SparseRows:
    """Payload pieces of sparse files, sorted by (entry, logical); what no row covers reads as zeros.

    ``entry`` u32, ``logical`` u64 (offset in the file), ``stream`` u64 (offset in the tar stream), ``length`` u64.
    ``logical`` and ``stream`` are multiples of 512; ``length`` is too, except where the piece ends the file.
    """

    entry: U32
    logical: U64
    stream: U64
    length: U64

    def __len__(self) -> int:
        return len(self.entry)


@dataclass(frozen=True, eq=False)
class Toc:
    """All that is known of a layer: enough to mount it, and to fetch and verify every byte of it.

    ``diff_id`` is the digest of the tar stream, ``stream_size`` its length in bytes, ``frame_target`` and ``level`` what
    the encoder was told (bytes; zstd level).
    """

    diff_id: str
    stream_size: int
    frame_target: int
    level: int
    frames: Frames
    entries: Entries
    xattrs: XattrSets
    sparse: SparseRows
    pool: bytes

    def name(self, entry: int) -> bytes:
        """The name of an entry, without its directory."""
        off = int(self.entries.name_off[entry])
        return self.pool[off : off + int(self.entries.name_len[entry])]

    def path(self, entry: int) -> bytes:
        """The path of an entry from the root, without a leading slash; the root's is empty."""
        parts: list[bytes] = []
        while entry:
            parts.append(self.name(entry))
            entry = int(self.entries.parent[entry])
        return b"/".join(reversed(parts))

    def target(self, entry: int) -> bytes:
        """The target of a SYMLINK."""
        off = int(self.entries.aux[entry])
        return self.pool[off : off + int(self.entries.size[entry])]

    def xattr_items(self, entry: int) -> list[tuple[bytes, bytes]]:
        """The extended attributes of an entry, sorted by name."""
        number = int(self.entries.xattr_set[entry])
        if not number:
            return []
        x = self.xattrs
        return [
            (
                self.pool[int(x.name_off[row]) : int(x.name_off[row]) + int(x.name_len[row])],
                self.pool[int(x.value_off[row]) : int(x.value_off[row]) + int(x.value_len[row])],
            )
            for row in range(int(x.first[number - 1]), int(x.first[number]))
        ]

    def sparse_rows(self, entry: int) -> list[tuple[int, int, int]]:
        """The (logical, stream, length) pieces of a sparse file."""
        rows = self.sparse
        low = int(np.searchsorted(rows.entry, entry, side="left"))
        high = int(np.searchsorted(rows.entry, entry, side="right"))
        return [(int(rows.logical[r]), int(rows.stream[r]), int(rows.length[r])) for r in range(low, high)]

    @cached_property
    def first_child(self) -> U32:
        """u32[n + 1]: the children of directory ``d`` are entries ``first_child[d] ... first_child[d + 1]``."""
        n = len(self.entries)
        first = np.searchsorted(self.entries.parent[1:], np.arange(n + 1, dtype=np.uint32), side="left") + 1
        return np.asarray(first, dtype=np.uint32)

    def child(self, directory: int, name: bytes) -> int | None:
        """The entry of a name in the directory ``directory``, or None."""
        low, high = int(self.first_child[directory]), int(self.first_child[directory + 1])
        found = bisect_left(range(high), name, low, high, key=self.name)
        return found if found < high and self.name(found) == name else None

    def lookup(self, path: bytes) -> int | None:
        """The entry at ``path`` (no leading slash, ``b""`` is the root), or None. Does not follow symlinks."""
        entry = 0
        for part in path.split(b"/") if path else ():
            found = self.child(entry, part)
            if found is None:
                return None
            entry = found
        return entry
