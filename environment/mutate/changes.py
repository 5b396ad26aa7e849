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
from typing import NamedTuple

from weenv.core.errors import LimitError
from weenv.environment.mutate.view import MAX_LINKS, MAX_PATH, Inode, Path, PathError, TreeView, components, text
from weenv.layer.limits import DEFAULT_LIMITS
from weenv.layer.tarscan import Member
from weenv.layer.toc import BLOCK, CHAR, DIRECTORY, FILE, NO_DATA, SYMLINK

MAX_DEPTH = DEFAULT_LIMITS.max_depth
"""Directories in a path: what a layer may have."""
MAX_DATA = 1 << 30
"""Bytes of all changed files together, which are held in memory."""
MAX_NAMES = 64 << 20
"""Bytes of the paths of all directories that are made: a plan of a few MiB can spell gigabytes of them."""
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


def _size(node: Node | None) -> int:
    return len(node.data) if node is not None and node.data is not None else 0


class _Branch:
    """A name that something was done to, or to something below it."""

    __slots__ = ("names", "node", "touched")

    def __init__(self) -> None:
        self.names: dict[bytes, _Branch] = {}
        self.touched = False
        self.node: Node | None = None
        """What was put there; None where ``touched``: nothing is there any more."""


class _Place(NamedTuple):
    """Something that is there now. ``below`` is what of the view shows, ``node`` what was put in its place."""

    below: Inode | None
    branch: _Branch | None
    node: Node | None

    @property
    def kind(self) -> int:
        if self.node is not None:
            return self.node.kind
        assert self.below is not None
        return self.below.kind


class Changes:
    """What has changed on top of ``view``. ``stamp`` is the time of what is new (seconds since 1970).

    A look-up costs by the depth of its path, once: paths come from plans that anybody wrote.
    """

    def __init__(self, view: TreeView) -> None:
        self.view = view
        self.stamp = view.newest() + 1
        self._top = _Branch()
        self._held = self._spelt = 0

    # -- looking

    def _step(self, place: _Place, name: bytes) -> _Place | None:
        """What a place has under a name, or None. Below what is no merged directory, only what was put there since."""
        if place.kind != DIRECTORY:
            return None
        below = self.view.child(place.below, name) if place.below is not None else None
        branch = place.branch.names.get(name) if place.branch is not None else None
        if branch is None or not branch.touched:
            return None if below is None else _Place(below, branch, None)
        node = branch.node
        if node is None:
            return None
        hidden = node.kind != DIRECTORY or node.opaque or below is None or below.kind != DIRECTORY
        return _Place(None if hidden else below, branch, node)

    def _place(self, path: Path) -> _Place | None:
        place: _Place | None = _Place(self.view.root, self._top, None)
        for name in path:
            if place is None:
                return None
            place = self._step(place, name)
        return place

    def at(self, path: Path) -> Node | None:
        """What is at a path now; symlinks are not followed."""
        place = self._place(path)
        return None if place is None else self._node(place)

    def _node(self, place: _Place) -> Node:
        if place.node is not None:
            return place.node
        assert place.below is not None
        return self._lifted(place.below)

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
        here: list[bytes] = list(base) if not raw.startswith(b"/") else []
        places: list[_Place | None] = [_Place(self.view.root, self._top, None)]
        for name in here:
            places.append(self._step(places[-1], name) if places[-1] is not None else None)
        links = 0
        size = sum(map(len, here))
        while todo:
            name = todo.pop()
            if name == b"..":
                if not here:
                    raise PathError("a symlink in it leads above the root", member=text(tuple(components(raw))))
                here.pop()
                places.pop()
                continue
            above = places[-1]
            place = self._step(above, name) if above is not None else None
            if place is not None and place.kind == SYMLINK and (todo or follow):
                target = self._node(place).link
                links += 1
                size += len(target)
                if links > MAX_LINKS or size > 64 * MAX_PATH:
                    raise PathError("too many symlinks in it, or they go in circles", member=text(tuple(components(raw))))
                if target.startswith(b"/"):
                    here = []
                    del places[1:]
                todo.extend(reversed(components(target)))
                continue
            if place is not None and place.kind != DIRECTORY and todo:
                raise PathError("a file is used as a directory in it", member=text((*here, name)))
            if place is None and above is not None and b".." in todo:
                raise PathError("does not exist", member=text((*here, name)))
            here.append(name)
            places.append(place)
        found = tuple(here)
        if sum(map(len, found)) + len(found) > MAX_PATH:
            raise PathError("too long", member=text(found))
        if len(found) > MAX_DEPTH:
            raise PathError(f"more than {MAX_DEPTH} directories deep", member=text(found))
        last = places[-1]
        return found, None if last is None else self._node(last)

    def names(self, path: Path) -> dict[bytes, Node]:
        """Everything in a directory now, by name in order."""
        place = self._place(path)
        if place is None or place.kind != DIRECTORY:
            raise PathError("is no directory", member=text(path))
        found: set[bytes] = set()
        if place.below is not None:
            found.update(self.view.names(place.below))
        if place.branch is not None:
            found.update(place.branch.names)
        children = ((name, self._step(place, name)) for name in sorted(found))
        return {name: self._node(child) for name, child in children if child is not None}

    # -- changing

    def put(self, path: Path, node: Node) -> None:
        """Put a file, symlink or device in place of whatever is no directory there; its parents exist. Raises PathError."""
        self._writable(path)
        there = self.at(path)
        if there is not None and there.kind == DIRECTORY:
            raise PathError("is a directory", member=text(path))
        self._set(path, node)

    def _set(self, path: Path, node: Node | None) -> _Branch:
        """Raises LimitError where that is more data than a layer of changes may have."""
        branch = self._top
        for name in path:
            branch = branch.names.setdefault(name, _Branch())
        self._held += _size(node) - _size(branch.node)
        if self._held > MAX_DATA:
            raise LimitError(
                f"more than {MAX_DATA} bytes of files are changed", member=text(path), hint="publish them as a group"
            )
        branch.node, branch.touched = node, True
        return branch

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
        place = _Place(self.view.root, self._top, None)
        branch = self._top
        spelt = 0
        for depth, name in enumerate(path, 1):
            there = self._step(place, name)
            branch = branch.names.setdefault(name, _Branch())
            spelt += len(name) + 1
            if there is None:
                made = path[:depth]
                self._writable(made)
                self._spelt += spelt
                if self._spelt > MAX_NAMES:
                    raise LimitError(f"the directories that are made have more than {MAX_NAMES} bytes of names",
                                     member=text(made)[:200], hint="publish them as a group")  # fmt: skip
                parent = self._node(place)
                uid, gid = owner or (parent.uid, parent.gid)
                # What a directory that was there had must not show through.
                node = Node(DIRECTORY, 0o755, uid, gid, self.stamp, opaque=branch.touched)
                branch.node, branch.touched = node, True
                there = _Place(None, branch, node)
            if there.kind != DIRECTORY:
                raise PathError("is no directory", member=text(path[:depth]))
            place = there
        return self._node(place)

    def remove(self, path: Path) -> None:
        """Remove what is there, with all below it. Raises PathError where there is nothing."""
        if not path:
            raise PathError("the root cannot be deleted", member="/")
        if self.at(path) is None:
            raise PathError("does not exist", member=text(path))
        branch = self._set(path, None)
        todo = list(branch.names.values())
        branch.names.clear()
        while todo:
            gone = todo.pop()
            self._held -= _size(gone.node)
            todo.extend(gone.names.values())

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
        for path, branch in self._walk():
            node = branch.node
            if node is not None and node.kind == FILE and node.data is None:
                yield path, node

    def _walk(self) -> Iterator[tuple[Path, _Branch]]:
        """All branches, each before what is below it, sorted by name."""
        todo: list[tuple[Path, _Branch]] = [((), self._top)]
        while todo:
            path, branch = todo.pop()
            if path:
                yield path, branch
            todo.extend(((*path, name), branch.names[name]) for name in sorted(branch.names, reverse=True))

    def load(self, path: Path, data: bytes) -> None:
        """Give the data of one of :meth:`files`."""
        branch = self._top
        for name in path:
            branch = branch.names[name]
        assert branch.node is not None
        branch.node = replace(branch.node, data=data)

    def members(self) -> list[tuple[Member, bytes]]:
        """The layer's tar members with their data: parents before children, sorted by name, parents as they are below.

        Empty where nothing has changed.
        """
        found: list[tuple[Member, bytes]] = []
        parents: list[Path] = []
        """Directories on the way that nothing was done to: they are members where something below them is one."""
        for path, branch in self._walk():
            while parents and parents[-1] != path[: len(parents[-1])]:
                parents.pop()
            if not branch.touched:
                parents.append(path)
                continue
            if branch.node is None and not self._hides(path):
                continue
            for parent in parents:
                there = self.at(parent)
                assert there is not None
                self._add(found, parent, there)
            parents.clear()
            self._add(found, path, branch.node)
        return found

    def _add(self, found: list[tuple[Member, bytes]], path: Path, node: Node | None) -> None:
        name = b"/".join(path)
        if node is None:
            found.append((_marker(b"/".join((*path[:-1], b".wh." + path[-1]))), b""))
            return
        data = (node.data or b"") if node.kind == FILE else b""
        row = Member(
            name, node.kind, node.mode, node.uid, node.gid, node.mtime, node.mtime_ns, len(data), node.link, node.rdev,
            node.xattrs or None, NO_DATA, None,
        )  # fmt: skip
        found.append((row, data))
        if node.opaque and self._hides(path):
            found.append((_marker(name + b"/.wh..wh..opq"), b""))

    def _hides(self, path: Path) -> bool:
        """True where something below would show at a path, were nothing there now."""
        place = self._place(path[:-1])
        return place is not None and place.below is not None and self.view.child(place.below, path[-1]) is not None


def _marker(name: bytes) -> Member:
    """A whiteout or the mark of an opaque directory (image-spec layer.md)."""
    return Member(name, FILE, 0, 0, 0, 0, 0, 0, b"", 0, None, NO_DATA, None)
