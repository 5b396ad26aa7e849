"""File trees between their sources (directories, tars, image layers) and deterministic tar streams.

A tree is :class:`Directory` objects with children by name; what is no directory is an :class:`Inode` (shared by its hard
links) or :data:`WHITEOUT`. Trees of one image are merged as overlayfs would show them, cut apart by directory, moved below
a prefix, and written out sorted by name, so that the same tree gives the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from weenv.core.errors import BadReference, LimitError, NotFoundInSource
from weenv.layer.limits import DEFAULT_LIMITS, Limits
from weenv.layer.tarscan import Member, show
from weenv.layer.tarwrite import END, header, padding
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

CHUNK = 1 << 20
WHITEOUT_PREFIX = b".wh."
OPAQUE = b".wh..wh..opq"
"""image-spec layer.md, "Whiteouts"."""

Content = Callable[[], Iterator[bytes]]
"""Reads a file's content, exactly as many bytes as its member's size."""
ReadAt = Callable[[int, int], bytes]


class Inode:
    """What is no directory: a member (its name means nothing) and, for a FILE, its content."""

    __slots__ = ("content", "member")

    def __init__(self, member: Member, content: Content | None = None) -> None:
        self.member = member
        self.content = content


class _Whiteout:
    __slots__ = ()


WHITEOUT = _Whiteout()
"""A name that lower layers may have and this one takes away."""


@dataclass(eq=False, slots=True)
class Directory:
    """A directory. ``implied``: nothing is known of it, it is written out only where something else makes it real."""

    member: Member
    implied: bool = False
    opaque: bool = False
    children: dict[bytes, Node] = field(default_factory=dict)


Node = Directory | Inode | _Whiteout


def plain_directory(*, implied: bool = True) -> Directory:
    """A directory of root's with usual rights, time 0."""
    return Directory(Member(b"", DIRECTORY, 0o755, 0, 0, 0, 0, 0, b"", 0, None, NO_DATA, None), implied)


# -- from a layer -----------------------------------------------------------------------------------------------------


def from_toc(toc: Toc, read_at: ReadAt) -> Directory:
    """The tree of a layer; ``read_at(offset, length)`` reads its tar stream, whose payloads files refer to."""
    entries = toc.entries
    nodes: list[Node] = []
    links: list[tuple[int, int]] = []
    root = plain_directory()
    for number, (kind, flags, mode, uid, gid, mtime, mtime_ns, size, aux) in enumerate(
        zip(
            entries.kind.tolist(), entries.flags.tolist(), entries.mode.tolist(), entries.uid.tolist(),
            entries.gid.tolist(), entries.mtime.tolist(), entries.mtime_ns.tolist(), entries.size.tolist(),
            entries.aux.tolist(), strict=True,
        )
    ):  # fmt: skip
        xattrs = dict(toc.xattr_items(number)) or None
        node: Node
        if kind == DIRECTORY:
            member = Member(b"", kind, mode, uid, gid, mtime, mtime_ns, 0, b"", 0, xattrs, NO_DATA, None)
            node = Directory(member, bool(flags & FLAG_IMPLIED) or number == 0, bool(flags & FLAG_OPAQUE))
        elif flags & FLAG_WHITEOUT:
            node = WHITEOUT
        elif kind == HARDLINK:
            links.append((number, aux))
            node = WHITEOUT  # until all are known
        else:
            link = toc.target(number) if kind == SYMLINK else b""
            rdev = aux if kind not in (FILE, SYMLINK) else 0
            member = Member(
                b"", kind, mode, uid, gid, mtime, mtime_ns, size if kind == FILE else 0, link, rdev, xattrs, NO_DATA, None
            )
            content = None
            if kind == FILE:
                whole = [] if aux == NO_DATA else [(0, aux, size)]
                pieces = toc.sparse_rows(number) if flags & FLAG_SPARSE else whole
                content = _pieces(read_at, pieces, size)
            node = Inode(member, content)
        nodes.append(node)
    for number, target in links:
        nodes[number] = nodes[target]
    root = nodes[0]  # type: ignore[assignment]  # entry 0 is the root
    for number, parent in enumerate(entries.parent.tolist()[1:], 1):
        directory = nodes[parent]
        assert isinstance(directory, Directory)
        directory.children[toc.name(number)] = nodes[number]
    return root


def _pieces(read_at: ReadAt, pieces: list[tuple[int, int, int]], size: int) -> Content:
    def read() -> Iterator[bytes]:
        position = 0
        for logical, stream, length in pieces:
            yield from _zeros(logical - position)
            for offset in range(0, length, CHUNK):
                yield read_at(stream + offset, min(CHUNK, length - offset))
            position = logical + length
        yield from _zeros(size - position)

    return read


def _zeros(length: int) -> Iterator[bytes]:
    while length > 0:
        yield bytes(min(CHUNK, length))
        length -= CHUNK


# -- from trees to trees -----------------------------------------------------------------------------------------------


def merge(lower: Directory, upper: Directory, *, keep_whiteouts: bool) -> None:
    """Lay ``upper`` over ``lower``, which becomes what overlayfs shows of both.

    ``keep_whiteouts``: there are further layers below, which whiteouts and opaque directories go on to hide.
    """
    todo = [(lower, upper)]
    while todo:
        below, above = todo.pop()
        if above.opaque:
            below.children = {}
            below.opaque = keep_whiteouts
        if not above.implied:
            below.member, below.implied = above.member, False
        for name, node in above.children.items():
            old = below.children.get(name)
            if node is WHITEOUT:
                if keep_whiteouts:
                    below.children[name] = WHITEOUT
                else:
                    below.children.pop(name, None)
            elif isinstance(node, Directory):
                if not isinstance(old, Directory):
                    hides = old is not None and keep_whiteouts  # a directory in the place of something else shows nothing below
                    old = below.children[name] = Directory(node.member, node.implied, hides)
                todo.append((old, node))
            else:
                below.children[name] = node


def drop_whiteouts(root: Directory) -> None:
    """Take whiteouts and opaque marks out: there is nothing below for them to hide."""
    for directory in _directories(root):
        directory.opaque = False
        directory.children = {name: node for name, node in directory.children.items() if node is not WHITEOUT}


def _directories(root: Directory) -> Iterator[Directory]:
    todo = [root]
    while todo:
        directory = todo.pop()
        yield directory
        todo += [node for node in directory.children.values() if isinstance(node, Directory)]


def parts_of(path: str) -> list[bytes]:
    """The components of an absolute path within an image. Raises BadReference where it is none."""
    parts = [part for part in os.fsencode(path).split(b"/") if part]
    if any(part in (b".", b"..") or b"\0" in part or len(part) > DEFAULT_LIMITS.max_name for part in parts):
        raise BadReference(f"not a path within an image: {path[:200]!r}")
    return parts


def below(root: Directory, prefix: str) -> Directory:
    """The tree moved to ``prefix``; its root becomes that directory, and what is above is implied."""
    parts = parts_of(prefix)
    if not parts:
        return root
    top = root
    for part in reversed(parts):
        holder = plain_directory()
        holder.children[part] = top
        top = holder
    return top


def split(root: Directory, rules: Iterable[str]) -> list[Directory]:
    """Cut directories out into trees of their own: what no rule names first, then one for each rule, in order.

    A rule is a directory, or ``DIR/*`` for each of the directories in it. A tree repeats the directories above what it
    holds. Raises NotFoundInSource for a rule that names no directory.
    """
    cuts: list[Directory] = []
    for rule in rules:
        each = rule.endswith("/*")
        parts = parts_of(rule.removesuffix("/*"))
        chain: list[Directory] = [root]
        for part in parts:
            child = chain[-1].children.get(part)
            if not isinstance(child, Directory):
                raise NotFoundInSource(f"nothing to split off: no directory {rule!r}", hint="name a directory as in the image")
            chain.append(child)
        if not each and not parts:
            raise BadReference("cannot split off the root", hint="write /* for each directory in it")
        if each:
            names = sorted(name for name, node in chain[-1].children.items() if isinstance(node, Directory))
            cuts += [_cut(chain, [*parts, name]) for name in names]
        else:
            cuts.append(_cut(chain[:-1], parts))
    return [root, *cuts] if _holds_anything(root) or not cuts else cuts


def _cut(chain: list[Directory], parts: list[bytes]) -> Directory:
    node = chain[-1].children.pop(parts[-1])
    for directory, name in zip(reversed(chain), reversed(parts), strict=True):
        holder = Directory(directory.member, directory.implied)
        holder.children[name] = node
        node = holder
    assert isinstance(node, Directory)
    return node


def _holds_anything(root: Directory) -> bool:
    return any(not isinstance(node, Directory) or not node.children for d in _directories(root) for node in d.children.values())


@dataclass(frozen=True, slots=True)
class Override:
    """What is set on every member: numeric owner, and a latest time in seconds (mtimes above it become it)."""

    uid: int | None = None
    gid: int | None = None
    mtime_max: int | None = None

    def apply(self, member: Member) -> Member:
        """The member with it."""
        if self.uid is not None:
            member = member._replace(uid=self.uid)
        if self.gid is not None:
            member = member._replace(gid=self.gid)
        if self.mtime_max is not None and (member.mtime, member.mtime_ns) > (self.mtime_max, 0):
            member = member._replace(mtime=self.mtime_max, mtime_ns=0)
        return member


# -- to a tar ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Summary:
    """What a tar held: counts, bytes of files, and the newest time in seconds."""

    entries: int = 0
    file_bytes: int = 0
    newest: int = 0


def tar_stream(
    root: Directory, override: Override | None = None, limits: Limits = DEFAULT_LIMITS
) -> tuple[Iterator[bytes], Summary]:
    """The tree as a tar, in pieces of any size, and a summary that is complete at its end. The root is not in it.

    Raises LimitError, FormatError, and what contents raise, while it is read.
    """
    summary = Summary()
    return _tar(root, override or Override(), limits, summary), summary


def _tar(root: Directory, override: Override, limits: Limits, summary: Summary) -> Iterator[bytes]:
    written: dict[int, bytes] = {}  # id of an inode -> its first name
    todo: list[tuple[bytes, Node]] = _below(b"", root)
    while todo:
        path, node = todo.pop()
        summary.entries += 1
        if summary.entries > limits.max_entries:
            raise LimitError(f"more than {limits.max_entries} entries", member=show(path))
        if len(path) > limits.max_path:
            raise LimitError("a path too long for a filesystem", member=show(path))
        if isinstance(node, _Whiteout):
            parent, slash, name = path.rpartition(b"/")
            yield header(_marker(parent + slash + WHITEOUT_PREFIX + name))
            continue
        if isinstance(node, Directory):
            if not node.implied:
                member = override.apply(node.member)
                summary.newest = max(summary.newest, member.mtime)
                yield header(member._replace(name=path))
            if node.opaque:
                yield header(_marker(path + b"/" + OPAQUE))
            todo += _below(path + b"/", node)
            continue
        member = override.apply(node.member)._replace(name=path)
        if (first := written.get(id(node))) is not None:
            yield header(member._replace(kind=HARDLINK, link=first, size=0, rdev=0))
            continue
        written[id(node)] = path
        summary.newest = max(summary.newest, member.mtime)
        yield header(member)
        if node.content is not None:
            summary.file_bytes += member.size
            yield from node.content()
            yield padding(member.size)
    yield END


def _below(prefix: bytes, directory: Directory) -> list[tuple[bytes, Node]]:
    """The children, last name first: for a stack."""
    return [(prefix + name, directory.children[name]) for name in sorted(directory.children, reverse=True)]


def _marker(path: bytes) -> Member:
    return Member(path, FILE, 0, 0, 0, 0, 0, 0, b"", 0, None, NO_DATA, None)


def reader(pieces: Iterator[bytes]) -> Callable[[int], bytes]:
    """A read function over pieces: about as much as asked for at a time, empty at the end."""

    def read(size: int) -> bytes:
        parts: list[bytes] = []
        total = 0
        while total < size and (piece := next(pieces, None)) is not None:
            parts.append(piece)
            total += len(piece)
        return b"".join(parts)

    return read


__all__ = [
    "CHUNK", "WHITEOUT", "Content", "Directory", "Inode", "Node", "Override", "Summary", "below", "drop_whiteouts", "from_toc",
    "merge", "parts_of", "plain_directory", "reader", "split", "tar_stream",
]  # fmt: skip
