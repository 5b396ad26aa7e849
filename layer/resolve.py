"""The tree while it grows, and the resolution of member paths within it.

containerd resolves a member's parent with continuity's ``fs.RootPath`` (containerd/continuity fs/path.go): symlinks are
followed within the root, an absolute target begins at the root, ``..`` ends there, and a missing component is taken as it is.
It works on the path's text, pass by pass, so ``..`` is lexical in places where a kernel's would be physical; that is
reproduced, because it decides where a file ends up.
"""

from __future__ import annotations

import struct

from weenv.core.errors import FormatError, LimitError
from weenv.layer.tarscan import Member, show
from weenv.layer.toc import BLOCK, CHAR, DIRECTORY, FILE, NO_DATA, SYMLINK

_MAX_LINKS = 255
"""Symlinks in one path that continuity follows."""
_KERNEL_LINKS = 40
"""Symlinks in one path that Linux follows (MAXSYMLINKS)."""
_MAX_STEPS = 50_000_000
"""Components that may be looked at because of symlinks, in all of a layer: seconds; a usual layer needs thousands."""


class Directory:
    """A directory of the tree. A new one is implied (0755, 0:0, time 0) until a member names it.

    ``room`` is how long a name in it may be; ``path_length`` that of its own path from the root, with its leading slash;
    ``depth`` how many directories are above it.
    """

    __slots__ = (
        "base", "children", "depth", "gid", "implied", "mode", "mtime", "mtime_ns", "opaque", "parent",
        "path_length", "room", "uid", "xattrs",
    )  # fmt: skip

    def __init__(self, parent: Directory | None, base: bytes, room: int, path_length: int) -> None:
        self.children: dict[bytes, Node] = {}
        self.parent = parent
        self.base = base
        self.room = room
        self.path_length = path_length
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.implied = True
        self.opaque = False
        self.mode = 0o755
        self.uid = self.gid = 0
        self.mtime = self.mtime_ns = 0
        self.xattrs: dict[bytes, bytes] | None = None

    def row(self) -> Member:
        """The directory in the form of a member."""
        return Member(
            b"", DIRECTORY, self.mode, self.uid, self.gid, self.mtime, self.mtime_ns, 0, b"", 0, self.xattrs, NO_DATA, None
        )


class Inode:
    """What several names share, as its last header left it; ``entry`` is the first name's entry number, at the end."""

    __slots__ = ("entry", "member")

    def __init__(self, member: Member) -> None:
        self.member = member
        self.entry: int | None = None


Node = bytes | Member | Directory | Inode
"""What a name leads to. Bytes are a member with nothing but numbers, packed: most of a layer, and a third of the memory."""

# kind, mode, uid, gid, mtime, mtime_ns, size, then FILE: offset; CHAR, BLOCK: rdev.
ROW = struct.Struct("<BHIIqIQQ")
"""A packed member; :mod:`weenv.layer.treecolumns` reads arrays of it."""


def pack(member: Member) -> bytes:
    """The numbers of a member."""
    return ROW.pack(*member[1:8], member[9] if member[1] in (CHAR, BLOCK) else member[11])


def unpack(row: bytes) -> Member:
    """A packed member that had no more than numbers, its name gone."""
    kind, mode, uid, gid, mtime, mtime_ns, size, where = ROW.unpack(row)
    device = where if kind in (CHAR, BLOCK) else 0
    offset = where if kind == FILE else NO_DATA
    return Member(b"", kind, mode, uid, gid, mtime, mtime_ns, size, b"", device, None, offset, None)


def clean(path: bytes) -> list[bytes]:
    """The components of ``path`` below the root, with ``.`` and ``..`` taken out lexically; no ``..`` leaves the root."""
    parts: list[bytes] = []
    for part in path.split(b"/"):
        if part == b"..":
            if parts:
                parts.pop()
        elif part and part != b".":
            parts.append(part)
    return parts


def cleaned(path: bytes) -> bytes:
    """``path`` with ``.`` and ``..`` taken out lexically; absolute or relative as before: :meth:`Resolver.root_path` cares."""
    depth = 0
    above = False
    for part in path.split(b"/"):
        depth += -1 if part == b".." else 1 if part and part != b"." else 0
        above = above or depth < 0
    # What begins with ".." begins at the root.
    return (b"/" if above or path.startswith(b"/") else b"") + b"/".join(clean(path))


def symlink_target(node: Node | None) -> bytes | None:
    """The target where ``node`` is a symlink."""
    member = node.member if type(node) is Inode else node
    return member.link if type(member) is Member and member.kind == SYMLINK else None


class Resolver:
    """Resolves paths in the tree below ``root`` as containerd does on disk."""

    def __init__(self, root: Directory, max_path: int = 4096) -> None:
        self._root = root
        self._max_path = max_path
        self._steps = _MAX_STEPS

    def root_path(self, path: bytes, member: Member) -> list[bytes]:
        """Components of the path that ``path`` leads to, symlinks resolved, the last one too; it need not exist.

        Whether ``path`` is absolute matters: a symlink that begins a relative path is replaced by its target as it is, any
        other by its target joined to what is before it and cleaned.

        Raises :class:`FormatError` naming ``member`` where symlinks go in circles or a file is used as a directory,
        :class:`LimitError` where a path is too long or following them has taken too long altogether.
        """
        if (parts := self._direct(path)) is not None:
            return parts
        links = 0
        while True:
            path, followed = self._pass(path, links, member)
            if not followed:
                return clean(path)
            links += followed

    def _direct(self, path: bytes) -> list[bytes] | None:
        """The components of a path that is nothing but existing directories; None for any other."""
        node: Node | None = self._root
        parts = []
        for part in path.split(b"/"):
            if part and part != b".":
                node = node.children.get(part) if type(node) is Directory else None
                if type(node) is not Directory:
                    return None
                parts.append(part)
        return parts

    def link_target(self, member: Member) -> tuple[Directory | None, bytes]:
        """(directory, name) that a hard link's target names: its parent is resolved, itself it is not.

        The directory is None where the target cannot exist.
        """
        parent, _, base = member.link.rpartition(b"/")
        parts = self.root_path(parent + b"/", member) if parent or member.link[:1] == b"/" else []
        parts = clean(b"/".join([*parts, base]))
        if not parts:
            raise FormatError("a hard link to a directory", member=show(member.name))
        directory: Node | None = self._root
        for part in parts[:-1]:
            directory = directory.children.get(part) if type(directory) is Directory else None
        return (directory if type(directory) is Directory else None), parts[-1]

    def _pass(self, path: bytes, links: int, member: Member) -> tuple[bytes, int]:
        """One pass over the components: (path so far resolved, number of symlinks followed)."""
        so_far = b"/" if path.startswith(b"/") else b""
        followed = 0
        for part in path.split(b"/"):
            if not part:
                continue
            if links + followed > _MAX_LINKS:
                raise FormatError("too many symlinks in its path", member=show(member.name))
            parts = clean(so_far + b"/" + part)
            self._steps -= len(parts) + 1
            if self._steps < 0 or len(so_far) > self._max_path:
                raise LimitError("its path is too long, or symlinks make it so", member=show(member.name))
            target = symlink_target(self._lstat(parts, member)) if parts else None
            if target is None:
                so_far = b"/" + b"/".join(parts)
                continue
            followed += 1
            as_it_is = target.startswith(b"/") or not so_far
            so_far = target if as_it_is else b"/" + b"/".join(clean(so_far + b"/" + target))
        return so_far, followed

    def _lstat(self, parts: list[bytes], member: Member) -> Node | None:
        """What lstat(2) finds: the kernel follows symlinks in all but the last component.

        Where it would leave the root the answer is taken to be "nothing": what the unpacking host has there is not known.
        """
        node: Node = self._root
        todo = parts[::-1]
        budget = _KERNEL_LINKS
        while todo:
            part = todo.pop()
            if type(node) is not Directory:
                raise FormatError("a file is used as a directory in its path", member=show(member.name))
            if part == b".." or part == b".":
                if part == b"..":
                    if node.parent is None:
                        return None
                    node = node.parent
                continue
            child = node.children.get(part)
            if child is None:
                return None
            target = symlink_target(child) if todo else None
            if target is None:
                node = child
                continue
            budget -= 1
            if budget < 0:
                raise FormatError("too many symlinks in its path", member=show(member.name))
            if target.startswith(b"/"):
                return None
            todo.extend(piece for piece in reversed(target.split(b"/")) if piece)
        return node
