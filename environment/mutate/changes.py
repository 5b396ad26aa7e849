"""A writable tree over a :class:`~weenv.environment.mutate.view.TreeView`: what overlayfs's upper directory would hold.

Operations follow symlinks within the root only: an absolute target begins at the root of the tree, and one whose ``..``
leads above the root is refused, as is any that goes in circles. What is changed is copied up by itself: a file with several
names gets a copy under the one name that was changed, as overlayfs does it.

Times: a file with new content gets the time ``stamp``, one second later than anything below, so that whatever compares times
(make, Python's compiled files) sees that it changed, and the same layer comes out wherever and whenever it is made. Other
attributes, and directories' times, stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from weenv.environment.mutate.view import MAX_LINKS, MAX_PATH, Inode, Path, PathError, TreeView, components, text
from weenv.layer.tarscan import Member
from weenv.layer.toc import BLOCK, CHAR, DIRECTORY, FILE, NO_DATA, SYMLINK

_CAPABILITY = b"security.capability"


@dataclass(frozen=True, slots=True)
class Node:
    """Something that the changes have put in place. ``data`` None: those of ``source``, not yet read.

    ``opaque``: a directory in the place of a deleted one, which hides what that had. ``link`` is a symlink's target.
    """

    kind: int
    mode: int
    uid: int
    gid: int
    mtime: int
    mtime_ns: int = 0
    link: bytes = b""
    rdev: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    data: bytes | None = None
    source: Inode | None = None
    opaque: bool = False


class Changes:
    """What has changed on top of ``view``. ``stamp`` is the time of what is new (seconds since 1970)."""

    def __init__(self, view: TreeView) -> None:
        self.view = view
        self.stamp = view.newest() + 1
        self._nodes: dict[Path, Node | None] = {}
        """Path -> what is there now, None: nothing. Below what is no merged directory, only what was put there since."""
        self._below_of: dict[Path, set[bytes]] = {}
        """Directory -> names in it that are in ``_nodes`` or on the way to such."""

    # -- looking

    def at(self, path: Path) -> Node | None:
        """What is at a path now; symlinks are not followed."""
        below: Inode | None = self.view.root
        node: Node | None = None
        for depth, name in enumerate(path, 1):
            below = self.view.child(below, name) if below is not None and below.kind == DIRECTORY else None
            prefix = path[:depth]
            if prefix in self._nodes:
                node = self._nodes[prefix]
                if node is None or node.kind != DIRECTORY:
                    if depth < len(path):
                        return None
                    return node
                if node.opaque or below is None or below.kind != DIRECTORY:
                    below = None
            elif below is None:
                return None
            else:
                node = None
        if not path or node is None:
            return None if below is None else self._lifted(below)
        return node

    def _lifted(self, inode: Inode) -> Node:
        """A lower inode in the form of a node."""
        view = self.view
        return Node(
            inode.kind, inode.mode, inode.uid, inode.gid, inode.mtime, inode.mtime_ns, view.target(inode),
            view.device(inode) if inode.kind in (CHAR, BLOCK) else 0, view.xattrs(inode), None, inode,
        )  # fmt: skip

    def resolve(self, path: str | bytes, *, follow: bool = True, base: Path = ()) -> tuple[Path, Node | None]:
        """(the path that ``path`` leads to, what is there). Only its last component may be missing, or all behind it.

        ``follow``: also a symlink at the very end. ``base`` is where a relative path begins. Raises PathError.
        """
        raw = path.encode("utf-8", "surrogateescape") if isinstance(path, str) else path
        todo = components(raw)[::-1]
        if b".." in todo:
            raise PathError("holds '..'", member=text(tuple(reversed(todo))))
        here: Path = base if not raw.startswith(b"/") else ()
        links = 0
        size = sum(map(len, here))
        missing = False
        while todo:
            name = todo.pop()
            if name == b"..":
                if not here:
                    raise PathError("a symlink in it leads above the root", member=text(tuple(components(raw))))
                here = here[:-1]
                continue
            if missing:
                here = (*here, name)
                continue
            node = self.at((*here, name))
            if node is not None and node.kind == SYMLINK and (todo or follow):
                links += 1
                size += len(node.link)
                if links > MAX_LINKS or size > 64 * MAX_PATH:
                    raise PathError("too many symlinks in it, or they go in circles", member=text(tuple(components(raw))))
                if node.link.startswith(b"/"):
                    here = ()
                todo.extend(reversed(components(node.link)))
                continue
            if node is not None and node.kind != DIRECTORY and todo:
                raise PathError("a file is used as a directory in it", member=text((*here, name)))
            missing = node is None
            if missing and b".." in todo:
                raise PathError("does not exist", member=text((*here, name)))
            here = (*here, name)
        if sum(map(len, here)) + len(here) > MAX_PATH:
            raise PathError("too long", member=text(here))
        return here, None if missing else self.at(here)

    def names(self, path: Path) -> dict[bytes, Node]:
        """Everything in a directory now, by name in order."""
        node = self.at(path)
        if node is None or node.kind != DIRECTORY:
            raise PathError("is no directory", member=text(path))
        found: set[bytes] = set()
        below = self._below(path)
        if below is not None:
            found.update(self.view.names(below))
        found.update(self._below_of.get(path, ()))
        children = ((name, self.at((*path, name))) for name in sorted(found))
        return {name: child for name, child in children if child is not None}

    def _below(self, path: Path) -> Inode | None:
        """The lower directory that shows through at a path, or None."""
        below: Inode | None = self.view.root
        for depth in range(1, len(path) + 1):
            below = self.view.child(below, path[depth - 1]) if below is not None and below.kind == DIRECTORY else None
            if path[:depth] in self._nodes:
                node = self._nodes[path[:depth]]
                if node is None or node.kind != DIRECTORY or node.opaque:
                    below = None
        return below if below is not None and below.kind == DIRECTORY else None

    # -- changing

    def put(self, path: Path, node: Node) -> None:
        """Put a file, symlink or device in place of whatever is no directory there; its parents exist. Raises PathError."""
        self._writable(path)
        there = self.at(path)
        if there is not None and there.kind == DIRECTORY:
            raise PathError("is a directory", member=text(path))
        self._set(path, node)

    def _set(self, path: Path, node: Node | None) -> None:
        self._nodes[path] = node
        for depth in range(len(path) - 1, -1, -1):
            names = self._below_of.setdefault(path[:depth], set())
            if path[depth] in names:
                return
            names.add(path[depth])

    def write(self, path: Path, data: bytes, *, mode: int | None = None, owner: tuple[int, int] | None = None) -> None:
        """A regular file's content. An existing one keeps owner, mode and attributes but for those given here.

        A symlink or device at the path is replaced; missing parents are made. Raises PathError.
        """
        there = self.at(path)
        if there is not None and there.kind == FILE:
            xattrs = {name: value for name, value in there.xattrs.items() if name != _CAPABILITY}  # as write(2) does it
            node = replace(there, mtime=self._after(there), mtime_ns=0, data=data, source=None, xattrs=xattrs)
        else:
            parent = self.make_directories(path[:-1], owner=owner)
            node = Node(FILE, 0o644, parent.uid, parent.gid, self.stamp, data=data)
        if mode is not None:
            node = replace(node, mode=mode & 0o7777)
        if owner is not None:
            node = replace(node, uid=owner[0], gid=owner[1])
        self.put(path, node)

    def link(self, path: Path, target: bytes, *, owner: tuple[int, int] | None = None) -> None:
        """A symlink, in place of whatever is no directory there. Raises PathError."""
        if not target or len(target) >= MAX_PATH or b"\0" in target:
            raise PathError("a symlink's target is empty or too long", member=text(path))
        parent = self.make_directories(path[:-1], owner=owner)
        uid, gid = owner or (parent.uid, parent.gid)
        self.put(path, Node(SYMLINK, 0o777, uid, gid, self.stamp, link=target))

    def chmod(self, path: Path, mode: int) -> None:
        """Another mode (07777) of what is there. Raises PathError."""
        node = self.at(path)
        if node is None:
            raise PathError("does not exist", member=text(path))
        if not path:
            raise PathError("the root's mode cannot be changed", member="/")
        if node.mode != mode:
            self._set(path, replace(node, mode=mode & 0o7777))

    def make_directories(self, path: Path, *, owner: tuple[int, int] | None = None) -> Node:
        """The directory at a path, made with its missing parents (0755, owned as the one they are in). Raises PathError."""
        for depth in range(len(path) + 1):
            node = self.at(path[:depth])
            if node is None:
                parent = self.at(path[: depth - 1])
                assert parent is not None
                self._writable(path[:depth])
                uid, gid = owner or (parent.uid, parent.gid)
                # What a directory that was there had must not show through.
                opaque = path[:depth] in self._nodes
                node = Node(DIRECTORY, 0o755, uid, gid, self.stamp, opaque=opaque)
                self._set(path[:depth], node)
            elif node.kind != DIRECTORY:
                raise PathError("is no directory", member=text(path[:depth]))
        assert node is not None
        return node

    def remove(self, path: Path) -> None:
        """Remove what is there, with all below it. Raises PathError where there is nothing."""
        if not path:
            raise PathError("the root cannot be deleted", member="/")
        if self.at(path) is None:
            raise PathError("does not exist", member=text(path))
        todo = [path]
        while todo:
            directory = todo.pop()
            for name in self._below_of.pop(directory, ()):
                todo.append((*directory, name))
                self._nodes.pop((*directory, name), None)
        self._set(path, None)

    def _writable(self, path: Path) -> None:
        if not path:
            raise PathError("is the root", member="/")
        if path[-1].startswith(b".wh."):
            raise PathError("names that begin with '.wh.' mean something else in a layer", member=text(path))

    def _after(self, node: Node) -> int:
        return self.stamp if node.mtime != self.stamp else self.stamp + 1

    # -- the layer

    def files(self) -> Iterator[tuple[Path, Node]]:
        """Files whose data are still below: they have to be read before :meth:`members`."""
        for path, node in self._nodes.items():
            if node is not None and node.kind == FILE and node.data is None:
                yield path, node

    def load(self, path: Path, data: bytes) -> None:
        """Give the data of one of :meth:`files`."""
        node = self._nodes[path]
        assert node is not None
        self._nodes[path] = replace(node, data=data)

    def members(self) -> list[tuple[Member, bytes]]:
        """The layer's tar members with their data: parents before children, sorted by name, parents as they are below.

        Empty where nothing has changed.
        """
        wanted: dict[Path, Node | None] = {}
        for path, node in self._nodes.items():
            if node is None and not self._hides(path):
                continue
            wanted[path] = node
            for depth in range(1, len(path)):
                if path[:depth] not in wanted:
                    wanted[path[:depth]] = self.at(path[:depth])
        found: list[tuple[Member, bytes]] = []
        for path in sorted(wanted):
            node = wanted[path]
            name = b"/".join(path)
            if node is None:
                found.append((_marker(b"/".join((*path[:-1], b".wh." + path[-1]))), b""))
                continue
            data = (node.data or b"") if node.kind == FILE else b""
            found.append(
                (
                    Member(
                        name, node.kind, node.mode, node.uid, node.gid, node.mtime, node.mtime_ns, len(data), node.link,
                        node.rdev, node.xattrs or None, NO_DATA, None,
                    ),
                    data,
                )
            )  # fmt: skip
            if node.opaque and self._hides(path):
                found.append((_marker(name + b"/.wh..wh..opq"), b""))
        return found

    def _hides(self, path: Path) -> bool:
        """True where something below would show at a path, were nothing there now."""
        below = self._below(path[:-1])
        return below is not None and self.view.child(below, path[-1]) is not None


def _marker(name: bytes) -> Member:
    """A whiteout or the mark of an opaque directory (image-spec layer.md)."""
    return Member(name, FILE, 0, 0, 0, 0, 0, 0, b"", 0, None, NO_DATA, None)
