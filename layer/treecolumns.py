"""Rows of a finished tree -> the columns of :mod:`weenv.layer.toc`, by array operations."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weenv.core.errors import LimitError
from weenv.layer.limits import Limits
from weenv.layer.resolve import Directory, Inode
from weenv.layer.tarscan import Member, show
from weenv.layer.toc import (
    BLOCK,
    CHAR,
    FILE,
    FLAG_IMPLIED,
    FLAG_OPAQUE,
    FLAG_SPARSE,
    FLAG_WHITEOUT,
    HARDLINK,
    NO_DATA,
    SYMLINK,
    U32,
    Entries,
    SparseRows,
    XattrSets,
)

LINK_ROW = Member(b"", HARDLINK, 0, 0, 0, 0, 0, 0, b"", 0, None, NO_DATA, None)
"""What stands in for a second and later name of an inode; its attributes are the first one's."""

_POOL_MAX = 1 << 32
"""Pool offsets have 32 bits."""


@dataclass(frozen=True, eq=False)
class TreeColumns:
    """A layer's tree as :mod:`weenv.layer.toc` documents it: breadth-first, siblings sorted by name bytes.

    ``pool`` holds the names in entry order, without gaps, then symlink targets, then xattr names and values.
    """

    entries: Entries
    xattrs: XattrSets
    sparse: SparseRows
    pool: bytes


def tree_columns(
    names: list[bytes],
    rows: list[Member],
    directories: list[Directory],
    numbers: list[int],
    sizes: list[int],
    links: list[tuple[int, Inode]],
    limits: Limits,
) -> TreeColumns:
    """Rows in entry order -> columns.

    ``numbers`` and ``sizes`` are entry number and child count of each of the ``directories``; ``links`` the entries that
    are a further name of an inode. Raises :class:`LimitError`.
    """
    count = len(rows)

    def column(index: int, dtype: type[Any]) -> NDArray[Any]:
        return np.fromiter(map(itemgetter(index), rows), dtype=dtype, count=count)

    kind = column(1, np.uint8)
    size = column(7, np.uint64)
    flags = np.zeros(count, dtype=np.uint8)
    parent = np.zeros(count, dtype=np.uint32)
    parent[1:] = np.repeat(np.asarray(numbers, dtype=np.uint32), np.asarray(sizes, dtype=np.int64))
    name_len = np.fromiter(map(len, names), dtype=np.uint16, count=count)
    name_off = np.zeros(count, dtype=np.uint32)
    pool = bytearray(b"".join(names))
    if len(pool) >= _POOL_MAX:
        raise LimitError("the names of this layer do not fit into 4 GiB")
    np.cumsum(name_len[:-1], dtype=np.uint32, out=name_off[1:])

    device = (kind == CHAR) | (kind == BLOCK)
    aux = np.where(kind == FILE, column(11, np.uint64), np.where(device, column(9, np.uint64), np.uint64(0)))
    flags[(kind == CHAR) & (aux == 0)] = FLAG_WHITEOUT
    for number, directory in zip(numbers, directories, strict=True):
        flags[number] = (FLAG_IMPLIED if directory.implied else 0) | (FLAG_OPAQUE if directory.opaque else 0)

    for number in np.flatnonzero(kind == SYMLINK).tolist():
        target = rows[number].link
        aux[number] = len(pool)
        size[number] = len(target)
        pool += target
    for number, inode in links:
        assert inode.entry is not None
        aux[number] = inode.entry

    sparse: list[tuple[int, int, int, int]] = []
    for number in [number for number, row in enumerate(rows) if row[12] is not None]:
        aux[number] = len(sparse)
        flags[number] |= FLAG_SPARSE
        sparse.extend((number, logical, stream, length) for logical, stream, length in rows[number].sparse or ())
        if len(sparse) > limits.max_sparse_chunks:
            raise LimitError(f"more than {limits.max_sparse_chunks} pieces of sparse files", member=show(rows[number].name))
    pieces = np.array(sparse, dtype=np.uint64).reshape(len(sparse), 4)

    xattr_set, xattrs = _xattr_sets(rows, pool)
    if len(pool) >= _POOL_MAX:
        raise LimitError("names, targets and extended attributes of this layer do not fit into 4 GiB")
    return TreeColumns(
        Entries(
            parent=parent,
            name_off=name_off,
            name_len=name_len,
            kind=kind,
            flags=flags,
            mode=column(2, np.uint16),
            uid=column(3, np.uint32),
            gid=column(4, np.uint32),
            mtime=column(5, np.int64),
            mtime_ns=column(6, np.uint32),
            size=size,
            aux=aux,
            xattr_set=xattr_set,
        ),
        xattrs,
        SparseRows(
            entry=pieces[:, 0].astype(np.uint32),
            logical=pieces[:, 1].copy(),
            stream=pieces[:, 2].copy(),
            length=pieces[:, 3].copy(),
        ),
        bytes(pool),
    )


def _xattr_sets(rows: list[Member], pool: bytearray) -> tuple[U32, XattrSets]:
    """Number the distinct sets of xattrs; names and values go to the pool once each."""
    xattr_set = np.zeros(len(rows), dtype=np.uint32)
    known: dict[tuple[tuple[bytes, bytes], ...], int] = {}
    placed: dict[bytes, int] = {}
    first = [0]
    table: list[tuple[int, int, int, int]] = []
    for number in [number for number, row in enumerate(rows) if row[10]]:
        items = tuple(sorted((rows[number].xattrs or {}).items()))
        found = known.get(items)
        if found is None:
            for name, value in items:
                for text in (name, value):
                    if text not in placed:
                        placed[text] = len(pool)
                        pool += text
                table.append((placed[name], len(name), placed[value], len(value)))
            first.append(len(table))
            found = known[items] = len(known) + 1
        xattr_set[number] = found
    columns = np.array(table, dtype=np.uint64).reshape(len(table), 4).astype(np.uint32)
    return xattr_set, XattrSets(
        first=np.array(first, dtype=np.uint32),
        name_off=columns[:, 0].copy(),
        name_len=columns[:, 1].copy(),
        value_off=columns[:, 2].copy(),
        value_len=columns[:, 3].copy(),
    )
