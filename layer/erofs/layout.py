"""Where everything goes: the ``compute_*`` passes. They decide on plain arrays and write nothing.

All passes are array operations over entries in table order (breadth-first, so that an inode's siblings are its neighbours
in the image too); the only loops run over directories and symlinks (:func:`compute_inodes`) and over the blocks of long
directories (:func:`compute_directories`).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weenv.core.errors import LimitError
from weenv.layer.erofs import format as fmt
from weenv.layer.erofs.check import check_sparse, member_name, refuse
from weenv.layer.erofs.xattrs import XattrPlan
from weenv.layer.limits import Limits
from weenv.layer.toc import BLOCK, CHAR, DIRECTORY, FIFO, FILE, FLAG_SPARSE, HARDLINK, NO_DATA, SYMLINK, Toc

I64 = NDArray[np.int64]

MAX_IMAGE = 4 << 30
"""Bytes of one image; 8 million entries need about a quarter of it."""
INLINE_TAIL = 384
"""Longest tail that follows its directory's inode. It must not cross a block, so a longer one costs more in padding than
a block of its own costs in slack (expected padding of a tail of t bytes: about t²/1024)."""
INLINE_TARGET = 416
"""Longest symlink target plus xattr body that stands behind the inode, in the inode's own block."""

_DOT = 0x2E
_FT_OF_KIND = np.zeros(8, dtype=np.uint32)
_FT_OF_KIND[[FILE, DIRECTORY, SYMLINK, CHAR, BLOCK, FIFO]] = [
    fmt.FT_REG, fmt.FT_DIR, fmt.FT_SYMLINK, fmt.FT_CHR, fmt.FT_BLK, fmt.FT_FIFO,
]  # fmt: skip


@dataclass(slots=True)
class Directories:
    """Directory contents, as one array of dirents over all directories, cut into blocks.

    Per directory k (``dirs``: its entry): ``size`` bytes, ``tail`` bytes that stand inline (0: none), ``blocks`` whole
    blocks elsewhere. Per block: ``first`` dirent (i64[blocks + 1]), ``of`` its directory k, ``rank`` within it. Per dirent:
    ``entry`` whose inode it names, ``name_off`` in the pool (negative for '.' and '..'), ``name_len``; ``dot`` and
    ``dotdot`` are their positions. ``cost`` i64[dirents + 1] sums 12 + name length.
    """

    dirs: I64
    size: I64
    tail: I64
    blocks: I64
    first: I64
    of: I64
    rank: I64
    entry: I64
    file_type: NDArray[np.uint32]
    name_off: I64
    name_len: I64
    dot: I64
    dotdot: I64
    cost: I64
    subdirectories: I64


@dataclass(slots=True)
class Chunks:
    """Chunk indexes. ``count`` i64[n] per entry, ``shift`` i64[n] log2(chunk / 512).

    ``single`` are the entries whose one chunk is block ``single_block`` of the stream. ``mapped`` (sorted) are the entries
    that may have several: their indexes are ``values`` u32, block addresses, one after the other in that order.
    """

    count: I64
    shift: I64
    single: I64
    single_block: NDArray[np.uint32]
    mapped: I64
    values: NDArray[np.uint32]


@dataclass(slots=True)
class Inodes:
    """``position`` i64[n]: byte offset of each entry's inode (a hard link's: its target's); ``inline`` bool[n]: a directory
    tail or symlink target follows it; ``block`` i64[n]: first block of data elsewhere in the image, 0 where there is none.

    ``shared_start`` and ``total`` are byte offsets: of the shared xattrs, and the image's size.
    """

    position: I64
    inline: NDArray[np.bool_]
    block: I64
    shared_start: int
    total: int


def compute_directories(toc: Toc) -> Directories:
    """Merge '.' and '..' among the sorted names and cut every directory into blocks of 512 bytes."""
    e = toc.entries
    n = len(e)
    is_dir = e.kind == DIRECTORY
    dirs = np.flatnonzero(is_dir)
    ndirs = len(dirs)
    k_of = np.cumsum(is_dir) - 1
    parent = e.parent[1:]
    owner = k_of[parent]
    before_dot, before_dotdot = _before_dots(toc)

    children = np.bincount(owner, minlength=ndirs).astype(np.int64)
    start = np.zeros(ndirs + 1, dtype=np.int64)
    np.cumsum(children + 2, out=start[1:])
    total = n - 1 + 2 * ndirs
    place = np.arange(n - 1, dtype=np.int64) + 2 * owner + ~before_dot + ~before_dotdot
    dot = start[:-1] + np.bincount(owner[before_dot], minlength=ndirs)
    dotdot = start[:-1] + np.bincount(owner[before_dotdot], minlength=ndirs) + 1

    entry = np.empty(total, dtype=np.int64)
    name_len = np.empty(total, dtype=np.int64)
    name_off = np.empty(total, dtype=np.int64)
    numbers = np.arange(1, n, dtype=np.int64)
    hard = np.flatnonzero(e.kind[1:] == HARDLINK)
    numbers[hard] = e.aux[1:][hard].astype(np.int64)
    entry[place], entry[dot], entry[dotdot] = numbers, dirs, e.parent[dirs]
    name_len[place], name_len[dot], name_len[dotdot] = e.name_len[1:], 1, 2
    name_off[place], name_off[dot], name_off[dotdot] = e.name_off[1:], -4, -4

    cost = np.zeros(total + 1, dtype=np.int64)
    np.cumsum(name_len + fmt.DIRENT_SIZE, out=cost[1:])
    used = cost[start[1:]] - cost[start[:-1]]
    first = _block_starts(start, used, cost)
    of = np.searchsorted(start, first[:-1], side="right") - 1
    blocks = np.bincount(of, minlength=ndirs).astype(np.int64)
    first_block = np.cumsum(blocks) - blocks
    rank = np.arange(len(of), dtype=np.int64) - first_block[of]
    last = cost[start[1:]] - cost[first[first_block + blocks - 1]]
    tail = np.where(last <= INLINE_TAIL, last, 0)
    return Directories(
        dirs=dirs, size=(blocks - 1) * fmt.BLOCK + last, tail=tail, blocks=blocks - (tail > 0),
        first=first, of=of, rank=rank, entry=entry, file_type=_FT_OF_KIND[e.kind[entry]],
        name_off=name_off, name_len=name_len, dot=dot, dotdot=dotdot, cost=cost,
        subdirectories=np.bincount(k_of[e.parent[dirs[1:]]], minlength=ndirs).astype(np.int64),
    )  # fmt: skip


def _before_dots(toc: Toc) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which children sort before '.', and which before '..'; refuses children with these names."""
    e = toc.entries
    if len(e) == 1:
        none = np.zeros(0, dtype=np.bool_)
        return none, none
    pool = np.frombuffer(toc.pool, dtype=np.uint8)
    off, length = e.name_off[1:].astype(np.int64), e.name_len[1:]
    one = pool[off]
    two = np.where(length > 1, pool[np.minimum(off + 1, len(pool) - 1)], 0)
    dotted = one == _DOT
    reserved = dotted & ((length == 1) | ((length == 2) & (two == _DOT)))
    refuse(toc, reserved, np.arange(1, len(e)), "the name '.' or '..'")
    before_dot = one < _DOT
    return before_dot, before_dot | (dotted & (two < _DOT))


def _block_starts(start: I64, used: I64, cost: I64) -> I64:
    """First dirent of every block, and the number of dirents at the end: as many as fit, in order."""
    starts: list[int] = []
    for k in np.flatnonzero(used > fmt.BLOCK).tolist():
        low, high = int(start[k]), int(start[k + 1])
        sums = cost[low : high + 1].tolist()
        at, end = 0, high - low
        while True:  # a dirent takes at most 267 bytes, so every turn goes forward
            at = bisect_right(sums, sums[at] + fmt.BLOCK, at + 1) - 1
            if at >= end:
                break
            starts.append(low + at)
    if not starts:
        return start
    return np.sort(np.concatenate((start, np.array(starts, dtype=np.int64))))


def compute_chunks(toc: Toc, limits: Limits) -> Chunks:
    """One chunk for each file with payload; for sparse files, the largest chunks that their pieces' bounds allow.

    Raises LimitError where sparse files need more than ``limits.max_sparse_chunks`` indexes together.
    """
    e = toc.entries
    count = np.zeros(len(e), dtype=np.int64)
    shift = np.zeros(len(e), dtype=np.int64)
    filled = (e.kind == FILE) & (e.size > 0)
    special = (e.flags & FLAG_SPARSE != 0) | (e.aux == NO_DATA)
    single = np.flatnonzero(filled & ~special)
    shift[single] = _cover(e.size[single])
    count[single] = 1
    single_block = (e.aux[single] >> np.uint64(fmt.BLOCK_BITS)).astype(np.uint32)
    mapped = np.flatnonzero(filled & special)
    check_sparse(toc)
    values = np.zeros(0, dtype=np.uint32)
    if len(mapped):
        values = _map_sparse(toc, mapped, count, shift, limits)
    return Chunks(count, shift, single, single_block, mapped, values)


def _cover(size: NDArray[np.uint64]) -> I64:
    """log2 of the smallest power of two of blocks that covers ``size`` bytes, at most what an inode can say."""
    blocks = ((size - np.uint64(1)) >> np.uint64(fmt.BLOCK_BITS)).astype(np.float64)
    bits = np.frexp(blocks)[1]  # exact below 2**53; 0 for 0
    return np.minimum(bits, fmt.MAX_CHUNK_SHIFT).astype(np.int64)


def _map_sparse(toc: Toc, mapped: I64, count: I64, shift: I64, limits: Limits) -> NDArray[np.uint32]:
    """Set ``count`` and ``shift`` of the entries ``mapped``; return their block addresses, NULL_BLOCK for holes."""
    e, rows = toc.entries, toc.sparse
    end, stream_end = rows.logical + rows.length, rows.stream + rows.length
    fresh = np.ones(len(rows), dtype=np.bool_)  # not a continuation of the row before
    fresh[1:] = (rows.entry[1:] != rows.entry[:-1]) | (rows.logical[1:] != end[:-1]) | (rows.stream[1:] != stream_end[:-1])
    heads = np.flatnonzero(fresh)
    tails = np.append(heads[1:], len(rows))[: len(heads)] - 1
    low, high, stream = rows.logical[heads], end[tails], rows.stream[heads]
    file = np.searchsorted(mapped, rows.entry[heads])  # rows of empty files were refused: mapped holds every entry

    size = e.size[mapped]
    bounds = np.zeros(len(mapped), dtype=np.uint64)
    np.bitwise_or.at(bounds, file, low | np.where(high < size[file], high, np.uint64(0)))
    lowest = bounds & (~bounds + np.uint64(1))
    aligned = np.where(bounds == 0, 64, np.frexp(lowest.astype(np.float64))[1] - 1 - fmt.BLOCK_BITS)
    bits = np.minimum(aligned, _cover(size)).astype(np.int64)
    chunk_bits = (bits + fmt.BLOCK_BITS).astype(np.uint64)
    counts = (((size - np.uint64(1)) >> chunk_bits) + np.uint64(1)).astype(np.int64)
    most = limits.max_sparse_chunks
    refuse(toc, counts > most, mapped, f"sparse in a way that takes more than {most} chunks", LimitError)
    if int(counts.sum()) > most:
        raise LimitError(f"sparse files of the layer take {int(counts.sum())} chunks, the limit is {most}")
    shift[mapped], count[mapped] = bits, counts

    values = np.full(int(counts.sum()), fmt.NULL_BLOCK, dtype=np.uint32)
    base = np.cumsum(counts) - counts
    from_chunk = (low >> chunk_bits[file]).astype(np.int64)
    spans = (((high - np.uint64(1)) >> chunk_bits[file]) - (low >> chunk_bits[file]) + np.uint64(1)).astype(np.int64)
    within = np.arange(int(spans.sum()), dtype=np.int64) - np.repeat(np.cumsum(spans) - spans, spans)
    block = (stream >> np.uint64(fmt.BLOCK_BITS)).astype(np.int64)
    values[np.repeat(base[file] + from_chunk, spans) + within] = np.repeat(block, spans) + (
        within << np.repeat(bits[file], spans)
    )
    return values


def compute_inodes(toc: Toc, xattrs: XattrPlan, directories: Directories, chunks: Chunks) -> Inodes:
    """Place inodes with what follows them, then the shared xattrs, then blocks of data. Raises LimitError."""
    e = toc.entries
    n = len(e)
    body = xattrs.sizes[xattrs.set_of] if xattrs.bodies else np.zeros(n, dtype=np.int64)
    extra = np.zeros(n, dtype=np.int64)
    blocks = np.zeros(n, dtype=np.int64)
    inline = np.zeros(n, dtype=np.bool_)

    extra[directories.dirs] = directories.tail
    blocks[directories.dirs] = directories.blocks
    inline[directories.dirs] = directories.tail > 0
    links = np.flatnonzero(e.kind == SYMLINK)
    length = e.size[links].astype(np.int64)
    fits = body[links] + length <= INLINE_TARGET
    inline[links] = fits
    extra[links] = np.where(fits, length, 0)
    blocks[links] = np.where(fits, 0, (length + fmt.BLOCK - 1) >> fmt.BLOCK_BITS)

    size = fmt.INODE_SIZE + body + extra
    files = np.flatnonzero(chunks.count)
    size[files] = ((size[files] + 7) & ~7) + 8 * chunks.count[files]
    size = (size + 31) & ~31
    size[e.kind == HARDLINK] = 0
    position = fmt.META_START + np.cumsum(size) - size

    # An inline tail must lie within one block; for a symlink the kernel's fast path wants the end of the inode there too.
    tailed = np.flatnonzero(inline)
    link = e.kind[tailed] == SYMLINK
    region = position[tailed] + np.where(link, fmt.INODE_SIZE // 2, fmt.INODE_SIZE + body[tailed])
    span = np.where(link, fmt.INODE_SIZE // 2 + body[tailed] + extra[tailed], extra[tailed])
    gaps = np.zeros(n, dtype=np.int64)
    gaps[tailed] = _gaps(region.tolist(), span.tolist())
    position += np.cumsum(gaps)

    end = int(position[-1] + size[-1])
    shared_start = -(-end // fmt.BLOCK) * fmt.BLOCK
    data_start = -(-(shared_start + len(xattrs.shared)) // fmt.BLOCK) * fmt.BLOCK
    total = data_start + int(blocks.sum()) * fmt.BLOCK
    if total > MAX_IMAGE:
        raise LimitError(f"EROFS metadata of {total} bytes, the limit is {MAX_IMAGE}")
    block = np.where(blocks > 0, (data_start >> fmt.BLOCK_BITS) + np.cumsum(blocks) - blocks, 0)
    hard = np.flatnonzero(e.kind == HARDLINK)
    position[hard] = position[e.aux[hard].astype(np.int64)]
    if int(position[0]) >> fmt.SLOT_BITS > fmt.MAX_ROOT_NID:
        raise LimitError("the root inode lies too far into the image", member=member_name(toc, 0))
    return Inodes(position, inline, block, shared_start, total)


def _gaps(regions: list[int], spans: list[int]) -> list[int]:
    """Padding before each of ``regions`` (offsets without padding), in 32s, so that no span crosses a block."""
    shift = 0
    gaps = []
    for region, span in zip(regions, spans, strict=True):
        room = region + shift & fmt.BLOCK - 1
        if room + span > fmt.BLOCK:
            gap = fmt.BLOCK - room + 31 & ~31
            shift += gap
            gaps.append(gap)
        else:
            gaps.append(0)
    return gaps
