"""The merged tree of a stack of layers, by overlayfs's rules over their TOCs, and the bytes of its files, read lazily.

The topmost layer that has a name decides: a file or a whiteout ends the search, a directory goes on downwards unless it is
opaque. A directory that no member of its layer's tar names (FLAG_IMPLIED) takes its attributes from below, as containerd's
unpack does. Nothing is mounted; one look-up costs microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weenv.core.errors import FormatError
from weenv.layer.tarscan import show
from weenv.layer.toc import (
    DIRECTORY,
    FILE,
    FLAG_IMPLIED,
    FLAG_OPAQUE,
    FLAG_SPARSE,
    FLAG_WHITEOUT,
    HARDLINK,
    NO_DATA,
    SYMLINK,
    Toc,
)

MAX_LINKS = 40
"""Symlinks in one path that Linux follows (include/linux/namei.h, MAXSYMLINKS)."""
MAX_PATH = 4096

LATEST = 4_102_444_800
"""A time stamp from 2100 on is a mistake, and no measure for others (seconds since 1970)."""

Path = tuple[bytes, ...]
"""Components from the root; the root is ``()``."""


class PathError(FormatError):
    """A path of a mutation cannot be used in this tree; ``member`` is the path."""


def text(path: Path) -> str:
    """A path for messages."""
    return show(b"/" + b"/".join(path))


@dataclass(frozen=True, slots=True)
class Inode:
    """What the merged tree has at a path. ``kind`` is one of :mod:`weenv.layer.toc`, never HARDLINK.

    ``layer`` and ``entry`` say where its data are (of a directory: its attributes); ``parts`` of a directory lists what is
    merged in it, topmost first.
    """

    kind: int
    mode: int
    uid: int
    gid: int
    mtime: int
    mtime_ns: int
    size: int
    layer: int
    entry: int
    parts: tuple[tuple[int, int], ...] = ()


class TreeView:
    """The tree of ``tocs``, bottom first."""

    def __init__(self, tocs: Sequence[Toc]) -> None:
        self.tocs = tuple(tocs)
        top = tuple((number, 0) for number in range(len(self.tocs) - 1, -1, -1))
        self.root = self._directory(top)
        self._known: dict[tuple[tuple[tuple[int, int], ...], bytes], Inode | None] = {}

    def child(self, directory: Inode, name: bytes) -> Inode | None:
        """What a directory has under a name, or None."""
        key = (directory.parts, name)
        if key not in self._known:
            if len(self._known) > 100_000:
                self._known.clear()
            self._known[key] = self._child(directory, name)
        return self._known[key]

    def _child(self, directory: Inode, name: bytes) -> Inode | None:
        merged: list[tuple[int, int]] = []
        for layer, parent in directory.parts:
            toc = self.tocs[layer]
            entry = toc.child(parent, name)
            if entry is None:
                continue
            if int(toc.entries.kind[entry]) != DIRECTORY:
                if merged or int(toc.entries.flags[entry]) & FLAG_WHITEOUT:
                    break
                return self._inode(layer, entry)
            merged.append((layer, entry))
            if int(toc.entries.flags[entry]) & FLAG_OPAQUE:
                break
        return self._directory(tuple(merged)) if merged else None

    def _directory(self, parts: tuple[tuple[int, int], ...]) -> Inode:
        named = (part for part in parts if not int(self.tocs[part[0]].entries.flags[part[1]]) & FLAG_IMPLIED)
        return self._inode(*next(named, parts[0]), parts)

    def _inode(self, layer: int, entry: int, parts: tuple[tuple[int, int], ...] = ()) -> Inode:
        e = self.tocs[layer].entries
        if int(e.kind[entry]) == HARDLINK:
            entry = int(e.aux[entry])
        return Inode(
            int(e.kind[entry]), int(e.mode[entry]), int(e.uid[entry]), int(e.gid[entry]), int(e.mtime[entry]),
            int(e.mtime_ns[entry]), int(e.size[entry]), layer, entry, parts,
        )  # fmt: skip

    def names(self, directory: Inode) -> dict[bytes, Inode]:
        """Everything in a directory, by name in order."""
        found: set[bytes] = set()
        for layer, entry in directory.parts:
            toc = self.tocs[layer]
            found.update(toc.name(n) for n in range(int(toc.first_child[entry]), int(toc.first_child[entry + 1])))
        children = ((name, self.child(directory, name)) for name in sorted(found))
        return {name: inode for name, inode in children if inode is not None}

    def at(self, path: Path) -> Inode | None:
        """What is at a path; symlinks are not followed."""
        inode: Inode | None = self.root
        for name in path:
            if inode is None or inode.kind != DIRECTORY:
                return None
            inode = self.child(inode, name)
        return inode

    def target(self, inode: Inode) -> bytes:
        """Where a symlink points to."""
        return self.tocs[inode.layer].target(inode.entry) if inode.kind == SYMLINK else b""

    def device(self, inode: Inode) -> int:
        """A device's major << 32 | minor."""
        return int(self.tocs[inode.layer].entries.aux[inode.entry])

    def xattrs(self, inode: Inode) -> dict[bytes, bytes]:
        """Its extended attributes."""
        return dict(self.tocs[inode.layer].xattr_items(inode.entry))

    def pieces(self, inode: Inode, offset: int, length: int) -> list[tuple[int, int, int]]:
        """Where ``[offset, offset + length)`` of a FILE lies: (offset in the file, in the layer's tar stream, length).

        What no piece covers reads as zeros. The range is clipped to the file.
        """
        if inode.kind != FILE:
            return []
        toc = self.tocs[inode.layer]
        aux, end = int(toc.entries.aux[inode.entry]), min(offset + length, inode.size)
        if int(toc.entries.flags[inode.entry]) & FLAG_SPARSE:
            rows = toc.sparse_rows(inode.entry)
        else:
            rows = [] if aux == NO_DATA else [(0, aux, inode.size)]
        found = []
        for logical, stream, size in rows:
            low, high = max(logical, offset), min(logical + size, end)
            if low < high:
                found.append((low, stream + low - logical, high - low))
        return found

    def newest(self) -> int:
        """The latest time stamp in the stack, mistakes aside (seconds since 1970)."""
        latest = 0
        for toc in self.tocs:
            times = toc.entries.mtime[toc.entries.mtime < LATEST]
            latest = max(latest, int(times.max()) if len(times) else 0)
        return latest


def components(path: bytes) -> list[bytes]:
    """The components of an absolute or relative path as it is written, ``.`` left out. Raises PathError."""
    if b"\0" in path or len(path) > MAX_PATH:
        raise PathError("too long, or holds a zero byte", member=show(path))
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if any(len(part) > 255 for part in parts):
        raise PathError("a name of more than 255 bytes", member=show(path))
    return parts
