"""What must hold of a :class:`~weenv.layer.toc.Toc` before an image is laid out from it.

``layer/tail.py`` has refused hostile tables long before; these checks stand on their own all the same, so that no table,
wherever it came from, makes the writer read or write out of bounds, loop, or allocate without measure. They are array
operations: well under 0.1 us per entry.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weenv.core.errors import FormatError, LimitError, UnsupportedError
from weenv.layer.erofs import format as fmt
from weenv.layer.limits import Limits
from weenv.layer.toc import BLOCK, CHAR, DIRECTORY, FIFO, FILE, FLAG_SPARSE, HARDLINK, NO_DATA, SYMLINK, Toc

Mask = NDArray[np.bool_]

_SHOWN_DEPTH = 64
"""Components of a path that a message shows; a hostile table may nest without end."""


def member_name(toc: Toc, entry: int) -> str:
    """The path of an entry for an error message; bounded, and safe before the table has been checked."""
    parts: list[bytes] = []
    while entry > 0 and len(parts) < _SHOWN_DEPTH:
        parts.append(toc.name(entry))
        parent = int(toc.entries.parent[entry])
        if parent >= entry:
            break
        entry = parent
    return b"/".join(reversed(parts)).decode("utf-8", "backslashreplace") or "/"


def refuse(
    toc: Toc, bad: Mask, numbers: NDArray[np.int64] | None, message: str, error: type[FormatError] = FormatError
) -> None:
    """Raise ``error`` for the first entry where ``bad``; ``numbers`` maps positions of the mask to entry numbers."""
    if bad.any():
        position = int(bad.argmax())
        raise error(message, member=member_name(toc, position if numbers is None else int(numbers[position])))


def check_toc(toc: Toc, limits: Limits) -> None:
    """Raise FormatError, LimitError or UnsupportedError unless ``toc`` can be written as an image."""
    e = toc.entries
    n = len(e)
    columns = (e.name_off, e.name_len, e.kind, e.flags, e.mode, e.uid, e.gid, e.mtime, e.mtime_ns, e.size, e.aux, e.xattr_set)
    if n == 0 or any(len(column) != n for column in columns):
        raise FormatError("the entry table is empty or its columns differ in length")
    if n > limits.max_entries:
        raise LimitError(f"{n} entries, the limit is {limits.max_entries}")
    if not 0 <= toc.stream_size <= min(limits.max_stream, 1 << 40):
        raise LimitError(f"the tar stream has {toc.stream_size} bytes, the limit is {min(limits.max_stream, 1 << 40)}")
    if e.kind[0] != DIRECTORY or e.parent[0] != 0:
        raise FormatError("entry 0 is not the root directory")
    refuse(toc, e.kind > FIFO, None, "unknown kind of entry")
    _check_tree(toc)
    _check_attributes(toc)
    _check_payloads(toc)
    _check_links(toc, limits)


def _check_tree(toc: Toc) -> None:
    e = toc.entries
    parent = e.parent[1:].astype(np.int64)
    numbers = np.arange(1, len(e), dtype=np.int64)
    bad = parent >= numbers
    if len(parent) > 1:
        bad[1:] |= parent[1:] < parent[:-1]
    refuse(toc, bad, numbers, "entries are not in breadth-first order")
    refuse(toc, e.kind[parent] != DIRECTORY, numbers, "lies within something that is not a directory")
    length = e.name_len[1:].astype(np.int64)
    refuse(toc, (length == 0) | (length > fmt.NAME_MAX), numbers, f"a name of 0 or more than {fmt.NAME_MAX} bytes")
    refuse(toc, e.name_off[1:] + length > len(toc.pool), numbers, "the name lies outside the pool")


def _check_attributes(toc: Toc) -> None:
    e = toc.entries
    refuse(toc, e.mode > 0o7777, None, "mode has bits beyond 07777")
    refuse(toc, e.mtime_ns >= 1_000_000_000, None, "mtime has more than 999999999 nanoseconds")
    refuse(toc, e.xattr_set > len(toc.xattrs), None, "refers to a set of extended attributes that does not exist")


def _check_payloads(toc: Toc) -> None:
    e = toc.entries
    refuse(toc, (e.kind == FILE) & (e.size > fmt.MAX_FILE_SIZE), None, "larger than a file can be", UnsupportedError)
    placed = np.flatnonzero((e.kind == FILE) & (e.size > 0) & (e.flags & FLAG_SPARSE == 0) & (e.aux != NO_DATA))
    offset, size = e.aux[placed], e.size[placed]
    stream = np.uint64(toc.stream_size)
    outside = size > stream
    outside |= offset > stream - np.minimum(size, stream)
    refuse(toc, outside, placed, "the payload lies outside the tar stream")
    refuse(toc, offset % fmt.BLOCK != 0, placed, f"the payload does not begin at a multiple of {fmt.BLOCK}")


def _check_links(toc: Toc, limits: Limits) -> None:
    e = toc.entries
    links = np.flatnonzero(e.kind == SYMLINK)
    offset, size = e.aux[links], e.size[links]
    longest = min(limits.max_symlink, fmt.SYMLINK_MAX)
    refuse(toc, (size == 0) | (size > longest), links, f"a symlink target of 0 or more than {longest} bytes")
    refuse(toc, (offset > len(toc.pool)) | (offset + size > len(toc.pool)), links, "the symlink target lies outside the pool")

    hard = np.flatnonzero(e.kind == HARDLINK)
    aim = e.aux[hard]
    refuse(toc, aim >= len(e), hard, "a hard link to nothing")
    aimed = e.kind[aim.astype(np.int64)]
    refuse(toc, (aimed == DIRECTORY) | (aimed == HARDLINK), hard, "a hard link to a directory or to another hard link")

    devices = np.flatnonzero((e.kind == CHAR) | (e.kind == BLOCK))
    number = e.aux[devices]
    too_big = (number >> np.uint64(32) > 0xFFF) | (number & np.uint64(0xFFFFFFFF) > 0xFFFFF)
    refuse(toc, too_big, devices, "a device number beyond 12 bits major, 20 bits minor", UnsupportedError)


def check_sparse(toc: Toc) -> None:
    """Raise FormatError unless the sparse rows lie within their files and the stream, in order and without overlap."""
    rows, e = toc.sparse, toc.entries
    count = len(rows)
    if not len(rows.logical) == len(rows.stream) == len(rows.length) == count:
        raise FormatError("the columns of the sparse table differ in length")
    if not count:
        return
    entry = rows.entry.astype(np.int64)
    if entry.max() >= len(e):
        raise FormatError("the sparse table names an entry that does not exist")
    bad = (e.kind[entry] != FILE) | (e.flags[entry] & FLAG_SPARSE == 0)
    refuse(toc, bad, entry, "has sparse rows but is not a sparse file")
    size, stream = e.size[entry], np.uint64(toc.stream_size)
    bad = (rows.length == 0) | (rows.length > size) | (rows.length > stream)
    refuse(toc, bad, entry, "a sparse piece is empty or larger than its file")
    bad = (rows.logical > size - rows.length) | (rows.stream > stream - rows.length)
    refuse(toc, bad, entry, "a sparse piece lies outside its file or the tar stream")
    end = rows.logical + rows.length
    bad = (rows.logical % fmt.BLOCK != 0) | (rows.stream % fmt.BLOCK != 0) | ((end % fmt.BLOCK != 0) & (end != size))
    refuse(toc, bad, entry, f"a sparse piece is not made of blocks of {fmt.BLOCK} bytes")
    bad = np.zeros(count, dtype=np.bool_)
    bad[1:] = (entry[1:] < entry[:-1]) | ((entry[1:] == entry[:-1]) & (rows.logical[1:] < end[:-1]))
    refuse(toc, bad, entry, "sparse pieces overlap or are out of order")


def check_xattr_rows(toc: Toc) -> None:
    """Raise FormatError unless every row of the xattr table lies within the pool."""
    x = toc.xattrs
    rows = len(x.name_off)
    if not len(x.name_len) == len(x.value_off) == len(x.value_len) == rows:
        raise FormatError("the columns of the xattr table differ in length")
    first = x.first.astype(np.int64)
    if len(first) and (first[0] != 0 or first[-1] != rows or (first[1:] < first[:-1]).any()):
        raise FormatError("the sets of the xattr table are not in order")
    size = len(toc.pool)
    if (x.name_off.astype(np.int64) + x.name_len > size).any() or (x.value_off.astype(np.int64) + x.value_len > size).any():
        raise FormatError("an extended attribute lies outside the pool")
