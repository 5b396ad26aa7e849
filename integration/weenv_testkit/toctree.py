"""A tree of TOC columns in the form that :mod:`weenv_testkit.trees` reads from a disk, so that the two can be compared."""

from __future__ import annotations

import hashlib
import os
import stat

import numpy as np

from weenv.layer.toc import (
    BLOCK,
    CHAR,
    DIRECTORY,
    FIFO,
    FILE,
    FLAG_IMPLIED,
    FLAG_OPAQUE,
    FLAG_SPARSE,
    HARDLINK,
    NO_DATA,
    SYMLINK,
    Frames,
    Toc,
)
from weenv.layer.treecolumns import TreeColumns
from weenv_testkit.trees import Entry

TYPES = {
    FILE: stat.S_IFREG,
    DIRECTORY: stat.S_IFDIR,
    SYMLINK: stat.S_IFLNK,
    CHAR: stat.S_IFCHR,
    BLOCK: stat.S_IFBLK,
    FIFO: stat.S_IFIFO,
}


def toc_of(columns: TreeColumns, stream_size: int) -> Toc:
    """The columns as a Toc without frames."""
    none = np.zeros(0, np.uint32)
    frames = Frames(none, none, np.zeros((0, 32), np.uint8))
    return Toc("", stream_size, 0, 0, frames, columns.entries, columns.xattrs, columns.sparse, columns.pool)


def content(toc: Toc, stream: bytes, entry: int) -> bytes:
    """The bytes of a FILE."""
    size, aux = int(toc.entries.size[entry]), int(toc.entries.aux[entry])
    if toc.entries.flags[entry] & FLAG_SPARSE:
        data = bytearray(size)
        for logical, start, length in toc.sparse_rows(entry):
            data[logical : logical + length] = stream[start : start + length]
        return bytes(data)
    return bytes(size) if aux == NO_DATA else stream[aux : aux + size]


def _as_root_sees(name: bytes, value: bytes) -> bytes:
    """getxattr(2) shows a capability of revision 3 whose root id is the reader's as revision 2 (security/commoncap.c)."""
    if name == b"security.capability" and len(value) == 24 and value[3] == 3 and not any(value[20:]):
        return value[:3] + b"\2" + value[4:20]
    return value


def toc_tree(toc: Toc, stream: bytes) -> tuple[dict[bytes, Entry], set[bytes]]:
    """(every name, without its leading slash, ``b"."`` for the root; the names whose mtime the unpack decides)."""
    e = toc.entries
    children = np.bincount(e.parent[1:][e.kind[1:] == DIRECTORY], minlength=len(e)) if len(e) > 1 else np.zeros(len(e), int)
    names: dict[int, list[bytes]] = {}
    for entry in range(len(e)):
        inode = int(e.aux[entry]) if e.kind[entry] == HARDLINK else entry
        names.setdefault(inode, []).append(toc.path(entry) or b".")
    tree: dict[bytes, Entry] = {}
    free = {b"."}
    for entry, paths in names.items():
        kind = int(e.kind[entry])
        size = int(e.size[entry])
        xattrs = toc.xattr_items(entry)
        if e.flags[entry] & FLAG_OPAQUE:
            xattrs = sorted([*xattrs, (b"trusted.overlay.opaque", b"y")])
        if e.flags[entry] & FLAG_IMPLIED or (kind == CHAR and not e.aux[entry]):
            free.update(paths)
        xattrs = [(name, _as_root_sees(name, value)) for name, value in xattrs]
        data = b""
        if kind == FILE:
            data = hashlib.sha256(content(toc, stream, entry)).digest()
        elif kind == SYMLINK:
            data = toc.target(entry)
        for path in paths:
            tree[path] = Entry(
                mode=TYPES[kind] | int(e.mode[entry]),
                uid=int(e.uid[entry]),
                gid=int(e.gid[entry]),
                mtime_ns=int(e.mtime[entry]) * 10**9 + int(e.mtime_ns[entry]),
                size=size if kind in (FILE, SYMLINK) else 0,
                rdev=os.makedev(int(e.aux[entry]) >> 32, int(e.aux[entry]) & 0xFFFFFFFF) if kind in (CHAR, BLOCK) else 0,
                nlink=2 + int(children[entry]) if kind == DIRECTORY else len(paths),
                first=min(paths) if kind != DIRECTORY else path,
                content=data,
                xattrs=tuple(xattrs),
            )
    return tree, free
