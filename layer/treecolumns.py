"""Rows of a finished tree -> the columns of :mod:`weenv.layer.toc`, by array operations."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from weenv.core.errors import LimitError
from weenv.layer.limits import Limits
from weenv.layer.resolve import ROW, Directory, Inode, pack
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

_LINK_ROW = pack(Member(b"", HARDLINK, 0, 0, 0, 0, 0, 0, b"", 0, None, NO_DATA, None))
"""What stands in for a second and later name of an inode; its attributes are the first one's."""

_ROW_FIELDS = ("kind", "mode", "uid", "gid", "mtime", "mtime_ns", "size", "where")
_ROW = np.dtype(list(zip(_ROW_FIELDS, ("u1", "<u2", "<u4", "<u4", "<i8", "<u4", "<u8", "<u8"), strict=True)))
assert _ROW.itemsize == ROW.size

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


@dataclass(eq=False)
class Rows:
    """A tree in entry order. ``numbers`` and ``sizes``: entry number and child count of each of the ``directories``.

    The others hold (entry number, what it has): the first name's entry of a further name, a symlink's target, xattrs, and the
    pieces of a sparse file with its name.
    """

    names: list[bytes]
    packed: list[bytes]
    directories: list[Directory]
    numbers: list[int] = field(default_factory=lambda: [0])
    sizes: list[int] = field(default_factory=list)
    links: list[tuple[int, int]] = field(default_factory=list)
    targets: list[tuple[int, bytes]] = field(default_factory=list)
    xattrs: list[tuple[int, dict[bytes, bytes]]] = field(default_factory=list)
    sparse: list[tuple[int, tuple[tuple[int, int, int], ...], bytes]] = field(default_factory=list)

    def member(self, member: Member) -> None:
        """Append an entry with more than numbers."""
        number = len(self.packed)
        if member.kind == SYMLINK:
            self.targets.append((number, member.link))
        if member.xattrs:
            self.xattrs.append((number, member.xattrs))
        if member.sparse is not None:
            self.sparse.append((number, member.sparse, member.name))
        self.packed.append(pack(member))


def rows_of(root: Directory) -> Rows:
    """Walk the tree breadth-first."""
    rows = Rows([b""], [], [root])
    rows.member(root.row())
    names, packed, directories = rows.names, rows.packed, rows.directories
    for directory in directories:
        children = sorted(directory.children.items())  # names differ, so nodes are never compared
        rows.sizes.append(len(children))
        for name, child in children:
            if isinstance(child, bytes):
                packed.append(child)
            elif type(child) is Directory:
                directories.append(child)
                rows.numbers.append(len(packed))
                rows.member(child.row())
            elif type(child) is Member:
                rows.member(child)
            else:
                assert type(child) is Inode
                if child.entry is None:
                    child.entry = len(packed)
                    rows.member(child.member)
                else:
                    rows.links.append((len(packed), child.entry))
                    packed.append(_LINK_ROW)
            names.append(name)
    return rows


def tree_columns(rows: Rows, limits: Limits) -> TreeColumns:
    """Rows -> columns. Raises :class:`LimitError`."""
    names, count = rows.names, len(rows.packed)
    table = np.frombuffer(b"".join(rows.packed), dtype=_ROW)
    kind, size = table["kind"].copy(), table["size"].copy()
    flags = np.zeros(count, dtype=np.uint8)
    parent = np.zeros(count, dtype=np.uint32)
    parent[1:] = np.repeat(np.asarray(rows.numbers, dtype=np.uint32), np.asarray(rows.sizes, dtype=np.int64))
    name_len = np.fromiter(map(len, names), dtype=np.uint16, count=count)
    name_off = np.zeros(count, dtype=np.uint32)
    pool = bytearray(b"".join(names))
    if len(pool) >= _POOL_MAX:
        raise LimitError("the names of this layer do not fit into 4 GiB")
    np.cumsum(name_len[:-1], dtype=np.uint32, out=name_off[1:])

    aux = np.where((kind == FILE) | (kind == CHAR) | (kind == BLOCK), table["where"], np.uint64(0))
    flags[(kind == CHAR) & (aux == 0)] = FLAG_WHITEOUT
    for number, directory in zip(rows.numbers, rows.directories, strict=True):
        flags[number] = (FLAG_IMPLIED if directory.implied else 0) | (FLAG_OPAQUE if directory.opaque else 0)
    for number, target in rows.targets:
        aux[number] = len(pool)
        size[number] = len(target)
        pool += target
    for number, entry in rows.links:
        aux[number] = entry
        flags[number] = flags[entry] & FLAG_WHITEOUT

    sparse: list[tuple[int, int, int, int]] = []
    for number, parts, name in rows.sparse:
        aux[number] = len(sparse)
        flags[number] |= FLAG_SPARSE
        sparse.extend((number, *part) for part in parts)
        if len(sparse) > limits.max_sparse_chunks:
            raise LimitError(f"more than {limits.max_sparse_chunks} pieces of sparse files", member=show(name))
    pieces = np.array(sparse, dtype=np.uint64).reshape(len(sparse), 4)

    xattr_set, xattrs = _xattr_sets(rows.xattrs, count, pool)
    if len(pool) >= _POOL_MAX:
        raise LimitError("names, targets and extended attributes of this layer do not fit into 4 GiB")
    return TreeColumns(
        Entries(
            parent=parent,
            name_off=name_off,
            name_len=name_len,
            kind=kind,
            flags=flags,
            mode=table["mode"].copy(),
            uid=table["uid"].copy(),
            gid=table["gid"].copy(),
            mtime=table["mtime"].copy(),
            mtime_ns=table["mtime_ns"].copy(),
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


def _xattr_sets(sets: list[tuple[int, dict[bytes, bytes]]], count: int, pool: bytearray) -> tuple[U32, XattrSets]:
    """Number the distinct sets of xattrs; names and values go to the pool once each."""
    xattr_set = np.zeros(count, dtype=np.uint32)
    known: dict[tuple[tuple[bytes, bytes], ...], int] = {}
    placed: dict[bytes, int] = {}
    first = [0]
    table: list[tuple[int, int, int, int]] = []
    for number, xattrs in sets:
        items = tuple(sorted(xattrs.items()))
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
