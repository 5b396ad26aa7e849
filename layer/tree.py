"""Members of a layer -> the tree that containerd's overlayfs unpack would leave on disk, as TOC columns.

The reference is containerd's ``archive.Apply`` with the overlay whiteout conversion (core/diff/apply/apply_linux.go,
pkg/archive/tar.go, tar_unix.go, tar_opts_linux.go) into an empty upper directory on a usual filesystem; what it refuses
is refused here too. What is worth knowing of it:

- A path is cleaned lexically first (``a/../b`` is ``b``; ``..`` above the root is the root), then its *parent* is resolved
  within the root, through symlinks that the layer has made so far (:class:`weenv.layer.resolve.Resolver`). Members
  that are the root itself are ignored.
- Missing parents are made 0755. Where a *lower* layer has the path as a directory, containerd copies owner, mode, times
  and xattrs (but ``trusted.*``) from the topmost lower layer that has it; what the lower layers have is not known
  here, so such directories carry FLAG_IMPLIED and stand-in attributes: 0755, uid 0, time 0, and gid 0 or, as the
  kernel does it in a set-gid directory, the parent's. On disk the time of an implied directory is that of the unpack.
- Whatever is at a member's path is removed first, with all below it, unless both are directories: then attributes are
  replaced, extended attributes added and the children kept.
- ``.wh.x`` makes a 0:0 character device x with the member's owner, mode 0 and the time of the unpack (0 here); it is an
  error where the layer has made x already. ``.wh..wh..opq`` marks its directory opaque. Nothing else is special: the
  AUFS names ``.wh..wh.*`` are whiteouts of ``.wh.*``. A later member replaces a whiteout; a directory in its place is
  not opaque.
- A hard link shares the inode that its target has at that moment, and its header's owner, mode, times and xattrs
  are applied to it. chown(2) drops ``security.capability`` from anything but a directory.
- An id of -1 leaves the id as the kernel made it. A time before 1970 or after 2262 is 0.
- Extended attributes: ``trusted.*`` and unknown namespaces are ignored, ``user.*`` is on anything but files
  and directories; ``security.*`` is kept everywhere.
- Times of directories are applied once more at the very end, to whatever their names lead to then.

Not represented, so refused: POSIX ACLs (``system.posix_acl_*``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from weenv.core.errors import FormatError, LimitError, UnsupportedError
from weenv.layer.limits import DEFAULT_LIMITS, Limits
from weenv.layer.resolve import ROW, Directory, Inode, Node, Resolver, clean, cleaned, pack, symlink_target, unpack
from weenv.layer.tarscan import GLOBAL, UNCHANGED_ID, Member, TarScanner, show
from weenv.layer.toc import CHAR, DIRECTORY, FILE, HARDLINK, NO_DATA, SYMLINK
from weenv.layer.treecolumns import TreeColumns, rows_of, tree_columns

_CAPABILITY = b"security.capability"
_CAPABILITY_SHAPES = ((20, 0x0200_0000), (24, 0x0300_0000))
_NAME_MAX = 255


class TreeBuilder:
    """Applies members in order (:meth:`add`), then gives the columns (:meth:`finish`, once).

    Both raise :class:`FormatError` naming the member that containerd's unpack would fail on, :class:`UnsupportedError`
    for what a TOC does not represent, :class:`LimitError`. The builder is of no use after an error.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._root = Directory(None, b"", min(_NAME_MAX, limits.max_name), 0)
        self._resolver = Resolver(self._root, limits.max_path)
        # A parent directory as members spell it -> the directory. Emptied when a directory or symlink goes away.
        self._parents: dict[bytes, Directory] = {b"": self._root}
        self._count = 1
        self._irregular = False  # a directory or a symlink was replaced
        self._directory_times: list[tuple[bytes, int, int]] = []

    # -- one member

    def add(self, member: Member) -> None:
        """Apply one member."""
        name = member[0]
        if name[-1:] == b"/":
            name = name.rstrip(b"/")
        prefix, _, base = name.rpartition(b"/")
        if base == b"" or base == b"." or base == b"..":
            parts = clean(name)
            if not parts:
                return
            base = parts.pop()
            prefix = cleaned(name).rpartition(b"/")[0]
        directory = self._parents.get(prefix)
        if directory is None:
            directory = self._parent(prefix, member)
        if base[:4] == b".wh.":
            self._whiteout(directory, base, member)
            return
        children = directory.children
        kind = member[1]
        if len(base) > directory.room:
            if kind == GLOBAL:
                return
            raise LimitError("a name or path too long for a filesystem", member=show(member.name))
        old = children.get(base)
        if kind == DIRECTORY:
            self._directory(directory, base, old, name, member)
            return
        if old is not None:
            self._remove(directory, base, old)
        if kind == HARDLINK:
            self._hard_link(directory, base, member)
            return
        if kind == GLOBAL:
            return
        if member[3] == UNCHANGED_ID or member[4] == UNCHANGED_ID:
            member = _with_ids(member, 0, directory)
        if member[10] is not None:
            member = member._replace(xattrs=_settable(member, kind))
        self._added(member)
        if kind == SYMLINK:
            if not 0 < len(member.link) <= self._limits.max_symlink:
                raise FormatError("a symlink's target is empty or too long", member=show(member.name))
            children[base] = member._replace(mode=0o777)  # chmod(2) never reaches a symlink
        elif member[10] is None and member[12] is None:
            children[base] = ROW.pack(*member[1:8], member[11] if kind == FILE else member[9])
        else:
            children[base] = member

    def _added(self, member: Member) -> None:
        self._count += 1
        if self._count > self._limits.max_entries:
            raise LimitError(f"more than {self._limits.max_entries} entries", member=show(member.name))

    def _parent(self, prefix: bytes, member: Member) -> Directory:
        """The directory that ``prefix`` leads to, made where it is missing."""
        parts = clean(prefix)
        directory = self._descend(parts, member)
        if directory is None:
            resolved = self._resolver.root_path(cleaned(prefix), member)
            directory = self._descend(resolved, member)
            if directory is None:
                raise FormatError("its parent directory is a symlink that leads nowhere", member=show(member.name))
        self._parents[prefix] = directory
        return directory

    def _descend(self, parts: list[bytes], member: Member) -> Directory | None:
        """Walk down ``parts``, making what is missing; None where a symlink is in the way."""
        # Nothing may be made before it is clear that no symlink follows; below something missing there is none.
        directory = self._root
        for part in parts:
            child = directory.children.get(part)
            if child is None:
                child = self._new_directory(directory, part, member)
                child.gid = directory.gid if directory.mode & 0o2000 else 0
            if type(child) is Directory:
                directory = child
            elif symlink_target(child) is not None:
                return None
            else:
                raise FormatError("its parent is not a directory", member=show(member.name))
        return directory

    def _new_directory(self, directory: Directory, base: bytes, member: Member) -> Directory:
        if len(base) > directory.room:
            raise LimitError("a name or path too long for a filesystem", member=show(member.name))
        if directory.depth >= self._limits.max_depth:
            raise LimitError(f"more than {self._limits.max_depth} directories deep", member=show(member.name))
        path_length = directory.path_length + len(base) + 1
        room = min(self._limits.max_name, _NAME_MAX, self._limits.max_path - path_length - 1)
        new = Directory(directory, base, room, path_length)
        self._added(member)
        directory.children[base] = new
        return new

    def _remove(self, directory: Directory, base: bytes, old: Node) -> None:
        """What is at a member's path goes away, with all below it."""
        if type(old) is Directory or symlink_target(old) is not None:
            self._irregular = True
            self._parents = {b"": self._root}
        del directory.children[base]

    def _directory(self, parent: Directory, base: bytes, old: Node | None, name: bytes, member: Member) -> None:
        if type(old) is Directory:
            directory = old
            uid, gid = directory.uid, directory.gid
        else:
            if old is not None:
                self._remove(parent, base, old)
            directory = self._new_directory(parent, base, member)
            uid, gid = 0, parent.gid if parent.mode & 0o2000 else 0
        directory.implied = False
        directory.mode = member.mode
        directory.uid = uid if member.uid == UNCHANGED_ID else member.uid
        directory.gid = gid if member.gid == UNCHANGED_ID else member.gid
        directory.mtime, directory.mtime_ns = member.mtime, member.mtime_ns
        if member.xattrs is not None:
            directory.xattrs = {**(directory.xattrs or {}), **(_settable(member, DIRECTORY) or {})} or None
        self._directory_times.append((member.name, member.mtime, member.mtime_ns))
        self._parents[name] = directory

    def _whiteout(self, directory: Directory, base: bytes, member: Member) -> None:
        if base == b".wh..wh..opq":
            directory.opaque = True
            return
        hidden = base[4:]
        if hidden in (b"", b".", b".."):
            raise FormatError("a whiteout of nothing", member=show(member.name))
        if len(hidden) > directory.room:
            raise LimitError("a name or path too long for a filesystem", member=show(member.name))
        if hidden in directory.children:
            raise FormatError("a whiteout of something that the same layer has made", member=show(member.name))
        self._added(member)
        whiteout = Member(member.name, CHAR, 0, member.uid, member.gid, 0, 0, 0, b"", 0, None, NO_DATA, None)
        directory.children[hidden] = pack(_with_ids(whiteout, 0, directory))

    def _hard_link(self, directory: Directory, base: bytes, member: Member) -> None:
        holder, target_base = self._resolver.link_target(member)
        target = holder.children.get(target_base) if holder is not None else None
        if target is None or holder is None:
            raise FormatError(
                f"a hard link to {show(member.link)}, which this layer does not hold",
                member=show(member.name),
                hint="container runtimes cannot unpack this layer either",
            )
        if type(target) is Directory:
            raise FormatError("a hard link to a directory", member=show(member.name))
        if isinstance(target, bytes):
            target = unpack(target)
        if type(target) is Member:
            target = Inode(target)
            holder.children[target_base] = target
        assert type(target) is Inode
        old = target.member
        # The header's attributes are applied as for a new file, to the inode that all its names share.
        xattrs = dict(old.xattrs or {})
        xattrs.pop(_CAPABILITY, None)
        if member.xattrs is not None:
            xattrs.update(_settable(member, old.kind) or {})
        target.member = old._replace(
            mode=old.mode if old.kind == SYMLINK else member.mode,
            uid=old.uid if member.uid == UNCHANGED_ID else member.uid,
            gid=old.gid if member.gid == UNCHANGED_ID else member.gid,
            mtime=member.mtime,
            mtime_ns=member.mtime_ns,
            xattrs=xattrs or None,
        )
        self._added(member)
        directory.children[base] = target

    # -- the end

    def _apply_directory_times(self) -> None:
        """containerd sets the times of directories last, by name: only told apart where something was replaced."""
        for name, mtime, mtime_ns in self._directory_times:
            member = Member(name, DIRECTORY, 0, 0, 0, mtime, mtime_ns, 0, b"", 0, None, NO_DATA, None)
            parts = self._resolver.root_path(cleaned(name), member)
            node: Node | None = self._root
            holder = self._root
            for part in parts:
                if type(node) is not Directory:
                    node = None
                    break
                holder = node
                node = node.children.get(part)
            if node is None:
                raise FormatError("a directory that is gone by the end of the layer", member=show(name))
            if type(node) is Directory:
                node.mtime, node.mtime_ns = mtime, mtime_ns
            elif type(node) is Inode:
                node.member = node.member._replace(mtime=mtime, mtime_ns=mtime_ns)
            elif type(node) is Member:
                holder.children[parts[-1]] = node._replace(mtime=mtime, mtime_ns=mtime_ns)
            elif isinstance(node, bytes):
                holder.children[parts[-1]] = pack(unpack(node)._replace(mtime=mtime, mtime_ns=mtime_ns))

    def finish(self) -> TreeColumns:
        """The columns of the finished tree."""
        if self._irregular:
            self._apply_directory_times()
        # containerd's upper directory: 0755 0:0 whatever the archive and the lower layers say.
        self._root.implied = False
        return tree_columns(rows_of(self._root), self._limits)


def _with_ids(member: Member, uid: int, directory: Directory) -> Member:
    """Replace ids that chown(2) would leave: a new inode has root's, or the group of a set-gid directory."""
    gid = directory.gid if directory.mode & 0o2000 else 0
    return member._replace(
        uid=uid if member.uid == UNCHANGED_ID else member.uid, gid=gid if member.gid == UNCHANGED_ID else member.gid
    )


def _settable(member: Member, kind: int) -> dict[bytes, bytes] | None:
    """Those of a member's xattrs that setxattr(2) would accept on an inode of ``kind``; None where none are left.

    Raises :class:`FormatError` where it would fail in a way that containerd does not ignore.
    """
    kept: dict[bytes, bytes] = {}
    for name, value in (member.xattrs or {}).items():
        if name.startswith(b"trusted."):
            continue
        namespace, _, rest = name.partition(b".")
        if not 0 < len(name) <= _NAME_MAX:
            raise FormatError(f"an extended attribute with a name of {len(name)} bytes", member=show(member.name))
        if len(value) > 65_536:
            raise FormatError(f"extended attribute {show(name)} has {len(value)} bytes", member=show(member.name))
        if namespace == b"user" and kind not in (FILE, DIRECTORY):
            continue
        if name.startswith(b"system.posix_acl_"):
            raise UnsupportedError(f"a POSIX ACL ({show(name)})", member=show(member.name))
        if namespace not in (b"user", b"security") or b"." not in name:
            continue
        if not rest:
            raise FormatError(f"an extended attribute named {show(name)}", member=show(member.name))
        # linux/capability.h: revision 2 has 20 bytes, revision 3 has 24; bit 0 of the first word says "effective".
        shape = (len(value), int.from_bytes(value[:4], "little") & ~1)
        if name == _CAPABILITY and value and shape not in _CAPABILITY_SHAPES:
            raise FormatError("a malformed security.capability", member=show(member.name))
        kept[name] = value
    return kept or None


@dataclass(frozen=True, eq=False)
class Scan:
    """What :func:`scan_tar` found: the tree, the length of the stream and where its payloads lie."""

    columns: TreeColumns
    stream_size: int
    payloads: list[tuple[int, int]]


def scan_tar(source: BinaryIO | Callable[[int], bytes], limits: Limits = DEFAULT_LIMITS, chunk: int = 1 << 20) -> Scan:
    """Read a whole tar stream, ``chunk`` bytes at a time, from a file or a read function. Raises :class:`FormatError`."""
    read = source if callable(source) else source.read
    tree = TreeBuilder(limits)
    scanner = TarScanner(tree.add, limits)
    while data := read(chunk):
        scanner.feed(data)
    scanner.close()
    return Scan(tree.finish(), scanner.offset, scanner.payloads)
