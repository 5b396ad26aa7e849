"""Is a TOC one that may be acted on? Every bound and every promise of :mod:`weenv.layer.toc`, by whole-array operations.

This stands between bytes from a registry and everything that trusts a :class:`~weenv.layer.toc.Toc`: the EROFS writer,
blobfs, the planes. It runs on the critical path of a container's start, so there is no Python loop over entries; loops
are over directory levels, columns, and the words of names that siblings have in common.
"""

from __future__ import annotations

import numpy as np

from weenv.core.digest import is_digest
from weenv.core.errors import FormatError, LimitError
from weenv.layer.columns import AnyColumn
from weenv.layer.limits import DEFAULT_LIMITS, Limits
from weenv.layer.pieces import check_pieces
from weenv.layer.toc import (
    BLOCK,
    CHAR,
    DIRECTORY,
    FIFO,
    FILE,
    FLAG_IMPLIED,
    FLAG_OPAQUE,
    FLAG_SPARSE,
    FLAG_WHITEOUT,
    HARDLINK,
    NO_DATA,
    SYMLINK,
    Frames,
    Toc,
)

_WHAT = "TOC"
_BLOCK = 512
_FLAGS = FLAG_OPAQUE | FLAG_WHITEOUT | FLAG_IMPLIED | FLAG_SPARSE
_MAX_FILE = (1 << 63) - 1
_MAX_MAJOR, _MAX_MINOR = 1 << 12, 1 << 20
"""Device numbers as Linux encodes them (include/linux/kdev_t.h, ``new_encode_dev``)."""


def _overhead(content: AnyColumn) -> AnyColumn:
    """The most that zstd makes of ``content`` bytes (zstd.h, ``ZSTD_COMPRESSBOUND``), and a bit."""
    most: AnyColumn = content + (content >> np.uint64(8)) + np.uint64(1024)
    return most


def check_frames(frames: Frames, stream_size: int, limits: Limits = DEFAULT_LIMITS) -> None:
    """Do the frames add up to the stream, each within bounds? Raises :class:`FormatError`."""
    n = len(frames)
    if n > limits.max_frames:
        raise LimitError(f"{n} frames", member=_WHAT)
    if len(frames.content_sizes) != n or frames.digests.shape != (n, 32):
        raise FormatError("the frame table's columns differ in length", member=_WHAT)
    if stream_size > limits.max_stream:
        raise LimitError(f"a stream of {stream_size} bytes", member=_WHAT)
    if n:
        if int(frames.content_sizes.min()) == 0 or int(frames.compressed_sizes.min()) == 0:
            raise FormatError("a frame is empty", member=_WHAT)
        if int(frames.content_sizes.max()) > limits.max_frame_content:
            raise LimitError(f"a frame of {int(frames.content_sizes.max())} bytes", member=_WHAT)
        if frames.pieces is not None:
            check_pieces(frames, frames.pieces, limits)
        elif (frames.compressed_sizes > _overhead(frames.content_sizes.astype(np.uint64))).any():
            raise FormatError("a frame is larger compressed than zstd makes any", member=_WHAT)
    if int(frames.content_offsets[-1]) != stream_size:
        raise FormatError(
            f"its frames hold {int(frames.content_offsets[-1])} bytes, the stream has {stream_size}", member=_WHAT
        )


def check_toc(toc: Toc, limits: Limits = DEFAULT_LIMITS) -> None:
    """Raise :class:`FormatError` (or :class:`LimitError`) naming the first entry at fault, if there is one."""
    if not is_digest(toc.diff_id):
        raise FormatError("its diffId is not a digest", member=_WHAT)
    check_frames(toc.frames, toc.stream_size, limits)
    _check_shapes(toc, limits)
    _check_tree(toc, limits)
    _check_names(toc)
    _check_kinds(toc, limits)
    _check_xattrs(toc, limits)
    _check_extents(toc, *_check_sparse(toc, limits))


def _fail(toc: Toc, wrong: AnyColumn, problem: str, rows: AnyColumn | None = None) -> None:
    """Raise where ``wrong`` (a mask over entries, or over ``rows`` of entries) is true anywhere."""
    if wrong.any():
        at = int(np.argmax(wrong))
        raise FormatError(problem, member=_show(toc, int(at if rows is None else rows[at])))


def _show(toc: Toc, entry: int) -> str:
    """A path for a message, from entries that may be inconsistent: bounded, printable."""
    parts: list[bytes] = []
    for _ in range(16):
        if not 0 < entry < len(toc.entries):
            break
        parts.append(toc.name(entry)[:60])
        above = int(toc.entries.parent[entry])
        entry = above if above < entry else 0
    else:
        parts.append(b"...")
    text = b"/".join(reversed(parts)).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)[:300] or "/"


def _check_shapes(toc: Toc, limits: Limits) -> None:
    e, x, s = toc.entries, toc.xattrs, toc.sparse
    n, pool = len(e), len(toc.pool)
    if not n:
        raise FormatError("it has no root", member=_WHAT)
    if n > limits.max_entries:
        raise LimitError(f"{n} entries", member=_WHAT)
    lengths = {
        len(getattr(e, column))
        for column in (
            "parent", "name_off", "name_len", "kind", "flags", "mode", "uid", "gid",
            "mtime", "mtime_ns", "size", "aux", "xattr_set",
        )
    }  # fmt: skip
    rows = {len(x.name_off), len(x.name_len), len(x.value_off), len(x.value_len)}
    pieces = {len(s.entry), len(s.logical), len(s.stream), len(s.length)}
    if len(lengths) != 1 or len(rows) != 1 or len(pieces) != 1:
        raise FormatError("columns of one table differ in length", member=_WHAT)
    if len(s) > limits.max_sparse_chunks:
        raise LimitError(f"{len(s)} pieces of sparse files", member=_WHAT)
    if pool >= 1 << 32:
        raise LimitError("a pool of 4 GiB and more", member=_WHAT)
    if (e.name_off.astype(np.uint64) + e.name_len > pool).any():
        raise FormatError("a name lies outside the pool", member=_WHAT)
    if (x.name_off.astype(np.uint64) + x.name_len > pool).any() or (x.value_off.astype(np.uint64) + x.value_len > pool).any():
        raise FormatError("an extended attribute lies outside the pool", member=_WHAT)


def _check_tree(toc: Toc, limits: Limits) -> None:
    """Entry 0 is the root; parents come before children, in order, and are directories; depth and paths are bounded."""
    e = toc.entries
    n = len(e)
    if int(e.parent[0]) or int(e.name_len[0]) or int(e.kind[0]) != DIRECTORY:
        raise FormatError("entry 0 is not a root directory", member=_WHAT)
    parent = e.parent
    if n == 1:
        return
    _fail(toc, parent[1:] >= np.arange(1, n, dtype=np.uint32), "comes before its directory", np.arange(1, n))
    _fail(toc, parent[2:] < parent[1:-1], "is not in breadth-first order", np.arange(2, n))
    _fail(toc, e.kind[parent] != DIRECTORY, "lies in something that is not a directory")
    # Level by level: the children of entries [low, high) are the entries [high, end).
    steps = e.name_len[1:].astype(np.uint32) + np.uint32(1)
    path = np.zeros(n, dtype=np.uint32)
    low, high, depth = 0, 1, 0
    while high < n:
        depth += 1
        if depth > limits.max_depth:
            raise LimitError(f"more than {limits.max_depth} directories deep", member=_show(toc, high))
        end = int(np.searchsorted(parent[1:], high, side="left")) + 1
        path[high:end] = path[parent[high:end]] + steps[high - 1 : end - 1]
        low, high = high, end
        if low == high:  # cannot be: parent < entry
            raise FormatError("is not reachable from the root", member=_show(toc, high))
    if int(path.max()) > limits.max_path:
        raise LimitError(f"a path longer than {limits.max_path} bytes", member=_show(toc, int(path.argmax())))


def _check_names(toc: Toc) -> None:
    """Names are file names, and siblings are in strictly ascending order of bytes (so no name is there twice)."""
    e = toc.entries
    n = len(e)
    if n == 1:
        return
    lengths = e.name_len
    _fail(toc, (lengths[1:] == 0) | (lengths[1:] > 255), "a name is empty or longer than 255 bytes", np.arange(1, n))
    offsets = e.name_off.astype(np.int64)
    end = offsets[1:] + lengths[1:]
    low, high = int(offsets[1:].min()), int(end.max())
    pool = toc.pool
    if pool.find(b"/", low, high) >= 0 or pool.find(b"\0", low, high) >= 0:
        # Names need not be the only thing in that range: look closer.
        data = np.frombuffer(pool, dtype=np.uint8)
        bad = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum((data == 0) | (data == 0x2F), dtype=np.int64)))
        _fail(toc, bad[end] != bad[offsets[1:]], "a name holds a slash or a NUL", np.arange(1, n))
    words = _Words(pool)
    short = np.flatnonzero(lengths[1:] <= 2) + 1
    first = words.at(offsets[short], lengths[short].astype(np.int64))
    _fail(toc, (first == 0x2E << 56) | (first == 0x2E2E << 48), "a name is . or ..", short)
    siblings = np.flatnonzero(e.parent[1:-1] == e.parent[2:]) + 1
    wrong = words.not_ascending(offsets, lengths.astype(np.int64), siblings)
    if wrong is not None:
        raise FormatError("is not after the sibling before it by name", member=_show(toc, wrong + 1))


class _Words:
    """Eight bytes at any offset of the pool, as a big-endian number, cut to a length and padded with zeros."""

    def __init__(self, pool: bytes) -> None:
        padded = np.frombuffer(pool + bytes(8), dtype=np.uint8)
        self._windows = np.lib.stride_tricks.sliding_window_view(padded, 8)
        self._last = len(pool)

    def at(self, offsets: AnyColumn, lengths: AnyColumn) -> AnyColumn:
        """u64 of each; a length of zero or less gives 0, one of more than 8 is 8."""
        words = self._windows[np.minimum(offsets, self._last)].view(">u8").reshape(-1).astype(np.uint64)
        cut = np.clip(8 - lengths, 0, 8).astype(np.uint64) * np.uint64(8)
        # A shift by 64 is undefined: shift twice.
        half = cut // np.uint64(2)
        kept: AnyColumn = words >> half >> (cut - half) << half << (cut - half)
        return kept

    def not_ascending(self, offsets: AnyColumn, lengths: AnyColumn, pairs: AnyColumn) -> int | None:
        """The first ``i`` of ``pairs`` whose piece is not strictly before piece ``i + 1`` in byte order, or None.

        Pieces hold no zero bytes: padded with zeros they compare, eight bytes at a time, as big-endian numbers; only
        the pairs that are equal so far go on to the next eight.
        """
        wrong: list[int] = []
        position = 0
        while len(pairs):
            left, right = lengths[pairs] - position, lengths[pairs + 1] - position
            a = self.at(offsets[pairs] + position, left)
            b = self.at(offsets[pairs + 1] + position, right)
            undecided = a == b
            bad = (a > b) | (undecided & (left <= 8) & (right <= 8))
            if bad.any():
                wrong.append(int(pairs[np.argmax(bad)]))
            pairs = pairs[undecided & ~bad]
            position += 8
        return min(wrong, default=None)


def _check_kinds(toc: Toc, limits: Limits) -> None:
    """Each kind has the values that it may have."""
    e = toc.entries
    kind, flags, aux, size = e.kind, e.flags, e.aux, e.size
    n = len(e)
    _fail(toc, kind > FIFO, "is of an unknown kind")
    _fail(toc, e.mode > 0o7777, "has a mode beyond 07777")
    _fail(toc, e.mtime_ns > 999_999_999, "has a time of more than 999999999 nanoseconds")
    if int(flags.max()):
        _fail(toc, (flags & ~np.uint8(_FLAGS)) != 0, "has unknown flags")
        _fail(toc, ((flags & (FLAG_OPAQUE | FLAG_IMPLIED)) != 0) & (kind != DIRECTORY), "has flags of a directory")
        whiteout = (flags & FLAG_WHITEOUT) != 0
        _fail(toc, whiteout & ~(((kind == CHAR) & (aux == 0)) | (kind == HARDLINK)), "is a whiteout but no 0:0 device")
        _fail(toc, ((flags & FLAG_SPARSE) != 0) & (kind != FILE), "is sparse but no file")
    directories_etc = (kind == DIRECTORY) | (kind == FIFO)
    _fail(toc, directories_etc & (aux != 0), "has data, being no file")
    _fail(toc, (size != 0) & (kind != FILE) & (kind != SYMLINK), "has a size, being no file")

    rows = np.flatnonzero(kind == SYMLINK)
    if len(rows):
        lengths, targets = size[rows], aux[rows]
        _fail(toc, (lengths == 0) | (lengths > limits.max_symlink), "has an empty target, or one too long", rows)
        _fail(toc, (targets > len(toc.pool)) | (targets + lengths > len(toc.pool)), "has a target outside the pool", rows)
        low, high = int(targets.min()), int((targets + lengths).max())
        if toc.pool.find(b"\0", low, high) >= 0:
            zeros = np.cumsum(np.frombuffer(b"\0" + toc.pool, dtype=np.uint8) == 0, dtype=np.int64)
            wrong = zeros[(targets + lengths).astype(np.int64)] != zeros[targets.astype(np.int64)]
            _fail(toc, wrong, "has a target that holds a NUL", rows)

    rows = np.flatnonzero(kind == HARDLINK)
    if len(rows):
        targets = aux[rows]
        _fail(toc, targets >= n, "is a hard link to nothing", rows)
        to = targets.astype(np.int64)
        _fail(toc, (kind[to] == HARDLINK) | (kind[to] == DIRECTORY), "is a hard link to a directory or a hard link", rows)
        _fail(toc, (flags[rows] & FLAG_WHITEOUT) != (flags[to] & FLAG_WHITEOUT), "is a whiteout, or its target is", rows)
        for column in (e.mode, e.uid, e.gid, e.mtime, e.mtime_ns, e.xattr_set):
            _fail(toc, column[rows] != 0, "is a hard link with attributes of its own", rows)

    rows = np.flatnonzero((kind == CHAR) | (kind == BLOCK))
    if len(rows):
        wrong = (aux[rows] >> np.uint64(32) >= _MAX_MAJOR) | (aux[rows] & np.uint64(0xFFFFFFFF) >= _MAX_MINOR)
        _fail(toc, wrong, "has a device number that Linux cannot represent", rows)


def _check_xattrs(toc: Toc, limits: Limits) -> None:
    """Sets are made of rows in order; names are sorted and legal; values are within bounds."""
    x = toc.xattrs
    rows, sets = len(x.name_off), len(x)
    if not len(x.first) or int(x.first[0]) or int(x.first[-1]) != rows:
        raise FormatError("its xattr sets do not add up", member=_WHAT)
    _fail(toc, toc.entries.xattr_set > sets, "has extended attributes that are not there")
    if not rows:
        if sets:
            raise FormatError("an xattr set is empty", member=_WHAT)
        return
    counts = np.diff(x.first.astype(np.int64))
    if (counts <= 0).any():
        raise FormatError("an xattr set is empty", member=_WHAT)
    if int(counts.max()) > limits.max_xattrs_per_entry:
        raise LimitError(f"more than {limits.max_xattrs_per_entry} extended attributes of one entry", member=_WHAT)
    if int(x.name_len.min()) == 0 or int(x.name_len.max()) > 255:
        raise FormatError("an extended attribute's name is empty or longer than 255 bytes", member=_WHAT)
    if int(x.value_len.max()) > limits.max_xattr_value:
        raise LimitError(f"an extended attribute of more than {limits.max_xattr_value} bytes", member=_WHAT)
    # Names lie anywhere in the pool; a running count of zeros tells which hold one.
    offsets, lengths = x.name_off.astype(np.int64), x.name_len.astype(np.int64)
    low, high = int(offsets.min()), int((offsets + lengths).max())
    zeros = np.zeros(high - low + 1, dtype=np.int64)
    np.cumsum(np.frombuffer(toc.pool, dtype=np.uint8)[low:high] == 0, out=zeros[1:])
    if (zeros[offsets + lengths - low] != zeros[offsets - low]).any():
        raise FormatError("an extended attribute's name holds a NUL", member=_WHAT)
    within = np.ones(rows, dtype=bool)
    within[x.first[1:].astype(np.int64) - 1] = False  # the last row of a set has no successor in it
    if _Words(toc.pool).not_ascending(offsets, lengths, np.flatnonzero(within)) is not None:
        raise FormatError("the names of an xattr set are not sorted", member=_WHAT)


def _check_sparse(toc: Toc, limits: Limits) -> tuple[AnyColumn, AnyColumn]:
    """Pieces belong to sparse files, in order, aligned, within the file. Returns their stream ranges, joined per file."""
    e, s = toc.entries, toc.sparse
    owners = np.flatnonzero((e.flags & FLAG_SPARSE) != 0)
    none = np.zeros(0, dtype=np.uint64)
    if not len(s):
        _fail(toc, (e.flags & FLAG_SPARSE) != 0, "is sparse without pieces")
        return none, none
    if (s.entry[1:] < s.entry[:-1]).any() or int(s.entry[-1]) >= len(e):
        raise FormatError("its sparse table is not in order of entries", member=_WHAT)
    firsts = np.flatnonzero(np.concatenate(([True], s.entry[1:] != s.entry[:-1])))
    if not np.array_equal(s.entry[firsts], owners):
        raise FormatError("its sparse table is not of its sparse files", member=_WHAT)
    _fail(toc, e.aux[owners] != firsts, "begins at the wrong row of the sparse table", owners)
    rows = s.entry
    limit = np.uint64(_MAX_FILE)
    _fail(toc, e.size[owners] > limit, "is larger than a file can be", owners)
    wrong = (s.length == 0) | (s.length > limits.max_stream) | (s.logical > limit) | (s.logical % _BLOCK != 0)
    _fail(toc, wrong | (s.stream > limits.max_stream) | (s.stream % _BLOCK != 0), "has a piece out of bounds", rows)
    ends = s.logical + s.length
    sizes = e.size[rows]
    _fail(toc, ends > sizes, "has a piece beyond its end", rows)
    _fail(toc, (s.length % _BLOCK != 0) & (ends != sizes), "has a piece that does not fill its blocks", rows)
    same = s.entry[1:] == s.entry[:-1]
    _fail(toc, same & (s.logical[1:] < ends[:-1]), "has pieces that overlap", rows[1:])
    # Pieces of one file lie in its payload one after the other.
    _fail(toc, same & (s.stream[1:] != s.stream[:-1] + s.length[:-1]), "has pieces with gaps in the stream", rows[1:])
    lasts = np.concatenate((firsts[1:] - 1, [len(s) - 1]))
    return s.stream[firsts], s.stream[lasts] + s.length[lasts]


def _check_extents(toc: Toc, sparse_begin: AnyColumn, sparse_end: AnyColumn) -> None:
    """Payloads are within the stream, aligned, and leave room for each other's headers."""
    e = toc.entries
    files = e.kind == FILE
    sparse = (e.flags & FLAG_SPARSE) != 0
    no_data = e.aux == np.uint64(NO_DATA)
    _fail(toc, files & ~sparse & (e.size == 0) & ~no_data, "is empty but has data")
    _fail(toc, files & (e.size > np.uint64(_MAX_FILE)), "is larger than a file can be")
    rows = np.flatnonzero(files & ~sparse & ~no_data)
    begin, size = e.aux[rows], e.size[rows]
    stream = np.uint64(toc.stream_size)
    _fail(toc, (begin > stream) | (size > stream) | (begin + size > stream), "has data beyond the end of the stream", rows)
    _fail(toc, (begin % _BLOCK) != 0, "has data that does not begin at a block", rows)
    _fail(toc, sparse_end > stream, "has data beyond the end of the stream", np.flatnonzero(sparse))
    if len(sparse_begin):
        rows = np.concatenate((rows, np.flatnonzero(sparse)))
        begin, end = np.concatenate((begin, sparse_begin)), np.concatenate((begin + size, sparse_end))
        order = np.argsort(begin, kind="stable")
        rows, begin, end = rows[order], begin[order], end[order]
    else:
        order = np.argsort(begin, kind="stable")
        rows, begin = rows[order], begin[order]
        end = begin + size[order]
    if not len(rows):
        return
    if int(begin[0]) < _BLOCK:
        raise FormatError("has data where its header must be", member=_show(toc, int(rows[0])))
    gap = begin[1:] < (end[:-1] + np.uint64(_BLOCK - 1)) // np.uint64(_BLOCK) * np.uint64(_BLOCK) + np.uint64(_BLOCK)
    _fail(toc, gap, "has data that overlaps another file's data or header", rows[1:])
