"""Tocs for tests: built from a description in Python, or from a tar with the standard library's ``tarfile``.

This is a second, slow way from a tar to a Toc. It knows nothing of whiteouts, overrides or implied directories; tests that
want containerd's semantics use the real scanner.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from weenv.layer.toc import (
    BLOCK,
    CHAR,
    DIRECTORY,
    FIFO,
    FILE,
    FLAG_OPAQUE,
    FLAG_SPARSE,
    FLAG_WHITEOUT,
    HARDLINK,
    NO_DATA,
    SYMLINK,
    Entries,
    Frames,
    SparseRows,
    Toc,
    XattrSets,
)


@dataclass(frozen=True, slots=True)
class Node:
    """One entry as a test describes it; ``target`` of a HARDLINK is the path of the first name."""

    kind: int = FILE
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    mtime_ns: int = 0
    size: int = 0
    offset: int = NO_DATA
    target: bytes = b""
    device: tuple[int, int] = (0, 0)
    xattrs: Mapping[bytes, bytes] = field(default_factory=dict)
    sparse: tuple[tuple[int, int, int], ...] | None = None
    flags: int = 0


def directory(**fields: object) -> Node:
    """A directory, 0755 unless told otherwise."""
    return replace(Node(kind=DIRECTORY, mode=0o755), **fields)  # type: ignore[arg-type]


def golden_tree() -> dict[bytes, Node]:
    """A small tree with one entry of each sort, for a stream of 4096 bytes."""
    return {
        b"": directory(mode=0o755, mtime=1),
        b"bin": directory(mtime=2, mtime_ns=3),
        b"bin/sh": Node(mode=0o4755, size=1000, offset=512, mtime=5),
        b"bin/bash": Node(kind=HARDLINK, target=b"bin/sh"),
        b"lib": Node(kind=SYMLINK, target=b"usr/lib", mode=0o777),
        b"null": Node(kind=CHAR, device=(1, 3), mode=0o666),
        b"gone": Node(kind=CHAR, flags=FLAG_WHITEOUT, mode=0),
        b"new": directory(flags=FLAG_OPAQUE, xattrs={b"user.a": b"b"}),
        b"empty": Node(uid=1, gid=2),
        b"hole": Node(size=10000),
        b"sparse": Node(size=3000, sparse=((1024, 2048, 1024),)),
        b"pipe": Node(kind=FIFO, mode=0o600),
        b"disk": Node(kind=BLOCK, device=(259, 70000), mode=0o660),
    }


def make_toc(nodes: Mapping[bytes, Node], *, stream_size: int = 0, diff_id: str = "") -> Toc:
    """A Toc of ``nodes`` by path (no leading slash; ``b""`` is the root). Missing parents are made, 0755."""
    tree = dict(nodes)
    for path in list(tree):
        while path:
            path = path.rpartition(b"/")[0]
            tree.setdefault(path, directory())
    tree.setdefault(b"", directory())

    def order(path: bytes) -> tuple[int, list[bytes]]:
        return (path.count(b"/") + 1 if path else 0, path.split(b"/"))

    paths = sorted(tree, key=order)
    number = {path: index for index, path in enumerate(paths)}
    pool = bytearray()
    sets: dict[tuple[tuple[bytes, bytes], ...], int] = {}
    columns: dict[str, list[int]] = {name: [] for name in Entries.__slots__}
    rows: list[tuple[int, int, int, int]] = []
    for index, path in enumerate(paths):
        node = tree[path]
        name = path.rpartition(b"/")[2]
        aux = size = flags = 0
        if node.kind == FILE:
            size, aux = node.size, node.offset
            if node.sparse is not None:
                aux, flags = len(rows), FLAG_SPARSE
                rows.extend((index, *piece) for piece in node.sparse)
        elif node.kind == HARDLINK:
            aux = number[node.target]
        elif node.kind in (CHAR, BLOCK):
            aux = node.device[0] << 32 | node.device[1]
        xattr_set = 0
        if node.xattrs:
            xattr_set = sets.setdefault(tuple(sorted(node.xattrs.items())), len(sets) + 1)
        row = {
            "parent": number[path.rpartition(b"/")[0]] if path else 0, "name_off": len(pool), "name_len": len(name),
            "kind": node.kind, "flags": flags | node.flags, "mode": node.mode, "uid": node.uid, "gid": node.gid,
            "mtime": node.mtime, "mtime_ns": node.mtime_ns, "size": size, "aux": aux, "xattr_set": xattr_set,
        }  # fmt: skip
        pool += name
        for column, value in row.items():
            columns[column].append(value)
    for index, path in enumerate(paths):
        if tree[path].kind == SYMLINK:
            columns["aux"][index], columns["size"][index] = len(pool), len(tree[path].target)
            pool += tree[path].target
    first, cells = [0], []
    for pairs in sets:
        for key, text in pairs:
            cells.append((len(pool), len(key), len(pool) + len(key), len(text)))
            pool += key + text
        first.append(len(cells))
    dtypes = {
        "parent": np.uint32, "name_off": np.uint32, "name_len": np.uint16, "kind": np.uint8, "flags": np.uint8,
        "mode": np.uint16, "uid": np.uint32, "gid": np.uint32, "mtime": np.int64, "mtime_ns": np.uint32, "size": np.uint64,
        "aux": np.uint64, "xattr_set": np.uint32,
    }  # fmt: skip
    table = np.array(cells, dtype=np.uint32).reshape(-1, 4)
    sparse = np.array(rows, dtype=np.uint64).reshape(-1, 4)
    return Toc(
        diff_id=diff_id or "sha256:" + hashlib.sha256(bytes(pool)).hexdigest(),
        stream_size=stream_size,
        frame_target=1 << 16,
        level=3,
        frames=Frames(np.zeros(0, np.uint32), np.zeros(0, np.uint32), np.zeros((0, 32), np.uint8)),
        entries=Entries(**{name: np.array(values, dtype=dtypes[name]) for name, values in columns.items()}),
        xattrs=XattrSets(np.array(first, dtype=np.uint32), *(table[:, column].copy() for column in range(4))),
        sparse=SparseRows(sparse[:, 0].astype(np.uint32), sparse[:, 1].copy(), sparse[:, 2].copy(), sparse[:, 3].copy()),
        pool=bytes(pool),
    )


def _times(member: tarfile.TarInfo) -> tuple[int, int]:
    text = member.pax_headers.get("mtime")
    if text is None:
        return int(member.mtime), 0
    sign = -1 if text.startswith("-") else 1
    whole, _, part = text.lstrip("-").partition(".")
    nanoseconds = sign * (int(whole) * 10**9 + int((part + "0" * 9)[:9]))
    return nanoseconds // 10**9, nanoseconds % 10**9


def toc_from_tar(path: str) -> Toc:
    """The Toc of an uncompressed tar whose members have distinct names and parents of their own."""
    kinds = {
        tarfile.DIRTYPE: DIRECTORY, tarfile.SYMTYPE: SYMLINK, tarfile.LNKTYPE: HARDLINK, tarfile.CHRTYPE: CHAR,
        tarfile.BLKTYPE: BLOCK, tarfile.FIFOTYPE: FIFO,
    }  # fmt: skip
    nodes: dict[bytes, Node] = {}
    with tarfile.open(path, "r:", encoding="utf-8", errors="surrogateescape") as archive:
        for member in archive:
            name = _clean(member.name)
            seconds, nanoseconds = _times(member)
            kind = kinds.get(member.type, FILE)
            node = Node(
                kind=kind, mode=member.mode & 0o7777, uid=member.uid, gid=member.gid, mtime=seconds, mtime_ns=nanoseconds,
                xattrs=dict(_xattrs(member)),
            )  # fmt: skip
            if kind == FILE:
                node = replace(node, size=member.size, offset=member.offset_data if member.size else NO_DATA)
                if member.sparse is not None:
                    node = replace(node, sparse=tuple(_pieces(member)))
            elif kind == SYMLINK:
                node = replace(node, target=_raw(member.linkname))
            elif kind == HARDLINK:
                node = Node(kind=HARDLINK, mode=0, target=_clean(member.linkname))
            elif kind in (CHAR, BLOCK):
                node = replace(node, device=(member.devmajor, member.devminor))
            nodes[name] = node
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = file.seek(0, 2)
    return make_toc(nodes, stream_size=size, diff_id="sha256:" + digest)


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _clean(name: str) -> bytes:
    return b"/".join(part for part in _raw(name).split(b"/") if part not in (b"", b"."))


def _xattrs(member: tarfile.TarInfo) -> Iterable[tuple[bytes, bytes]]:
    for key, value in member.pax_headers.items():
        if key.startswith("SCHILY.xattr."):
            yield _raw(key.removeprefix("SCHILY.xattr.")), _raw(value)


def _pieces(member: tarfile.TarInfo) -> Iterable[tuple[int, int, int]]:
    stream = member.offset_data
    pieces: Iterable[tuple[int, int]] = member.sparse or ()  # type: ignore[assignment]  # typeshed says bytes
    for logical, length in pieces:
        if length:
            yield logical, stream, length
        stream += length
