"""A directory of this machine as a tree (:mod:`weenv.converter.tree`). Blocking.

Nothing is followed out of the directory: it is walked by file descriptor, symlinks are read, and a file's content is
opened without following and must still be the inode that was listed, with the size that was listed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from weenv.converter.tree import CHUNK, WHITEOUT, Content, Directory, Inode, Node, plain_directory
from weenv.core.errors import LimitError, NotFoundInSource, SourceError, UnsupportedError
from weenv.layer.limits import DEFAULT_LIMITS, Limits
from weenv.layer.tarscan import Member, show
from weenv.layer.toc import BLOCK, CHAR, DIRECTORY, FIFO, FILE, NO_DATA, SYMLINK

_OPAQUE_XATTRS = (b"trusted.overlay.opaque", b"user.overlay.opaque")
_NOT_PORTABLE = (b"security.selinux", b"security.ima", b"security.evm", b"security.SMACK64")
"""Labels of the machine that the tree was made on; they mean nothing elsewhere."""
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class _Scanner:
    def __init__(self, root: bytes, limits: Limits) -> None:
        self.root = root
        self.limits = limits
        self.count = 0
        self.skipped: list[str] = []
        self.inodes: dict[tuple[int, int], Inode] = {}

    def tree(self) -> Directory:
        root, todo = None, [(b"", 0, plain_directory())]
        while todo:
            path, depth, made = todo.pop()
            if depth > self.limits.max_depth:
                raise LimitError(f"more than {self.limits.max_depth} directories deep", member=show(path))
            root = root or made
            self.directory(path, made)
            todo += [
                (path + b"/" + name if path else name, depth + 1, node)
                for name, node in made.children.items()
                if isinstance(node, Directory)
            ]
        assert root is not None
        return root

    def directory(self, path: bytes, made: Directory) -> None:
        """Fill in a directory; those in it are left empty."""
        fd = self.open(path, os.O_DIRECTORY)
        try:
            xattrs = self.xattrs(fd, path)
            made.opaque = any(xattrs.pop(name, b"") == b"y" for name in _OPAQUE_XATTRS)
            xattrs = {name: value for name, value in xattrs.items() if not name.startswith((b"trusted.", b"user.overlay."))}
            made.member, made.implied = _member(os.fstat(fd), DIRECTORY, xattrs), False
            with os.scandir(fd) as found:
                names = sorted(os.fsencode(item.name) for item in found)
            for name in names:
                self.count += 1
                if self.count > self.limits.max_entries:
                    raise LimitError(f"more than {self.limits.max_entries} entries", member=show(path))
                node = self.node(fd, name, path + b"/" + name if path else name)
                if node is not None:
                    made.children[name] = node
        finally:
            os.close(fd)

    def open(self, path: bytes, flags: int) -> int:
        """Open a path below the root, no component of which is a symlink."""
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        parts = path.split(b"/") if path else []
        try:
            for number, part in enumerate(parts):
                last = number == len(parts) - 1
                inner = os.open(part, _FLAGS | (flags if last else os.O_DIRECTORY), dir_fd=fd)
                os.close(fd)
                fd = inner
        except BaseException:
            os.close(fd)
            raise
        return fd

    def node(self, fd: int, name: bytes, path: bytes) -> Node | None:
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        mode = status.st_mode
        if name.startswith(b".wh."):
            raise UnsupportedError("layers use names that begin with .wh. for deletions", member=show(path))
        if stat.S_ISDIR(mode):
            return plain_directory()  # filled in once its parent is closed
        if stat.S_ISSOCK(mode):
            self.skipped.append(show(path))
            return None
        if stat.S_ISCHR(mode) and status.st_rdev == 0:
            return WHITEOUT  # as in the upper directory of an overlay
        key = (status.st_dev, status.st_ino)
        if status.st_nlink > 1 and key in self.inodes:
            return self.inodes[key]
        xattrs = self.xattrs_at(fd, name, path)
        if stat.S_ISREG(mode):
            inode = Inode(_member(status, FILE, xattrs), self.content(path, status))
        elif stat.S_ISLNK(mode):
            inode = Inode(_member(status, SYMLINK, xattrs)._replace(link=os.readlink(name, dir_fd=fd)))
        elif stat.S_ISFIFO(mode):
            inode = Inode(_member(status, FIFO, xattrs))
        else:
            kind = CHAR if stat.S_ISCHR(mode) else BLOCK
            rdev = os.major(status.st_rdev) << 32 | os.minor(status.st_rdev)
            inode = Inode(_member(status, kind, xattrs)._replace(rdev=rdev))
        if status.st_nlink > 1:
            self.inodes[key] = inode
        return inode

    def xattrs_at(self, fd: int, name: bytes, path: bytes) -> dict[bytes, bytes]:
        # There is no lgetxattrat before Linux 6.13: by way of the directory's descriptor nothing else is followed.
        return self.xattrs(b"/proc/self/fd/%d/%s" % (fd, name), path)

    def xattrs(self, where: bytes | int, path: bytes) -> dict[bytes, bytes]:
        kept: dict[bytes, bytes] = {}
        follow = isinstance(where, int)
        try:
            names = os.listxattr(where, follow_symlinks=follow)
            for text in names:
                name = os.fsencode(text)
                if name.startswith(b"system.posix_acl_"):
                    raise UnsupportedError("has a POSIX ACL", member=show(path), hint="layers cannot hold it; setfacl -b")
                if name.startswith(b"trusted.") and name not in _OPAQUE_XATTRS:
                    continue
                if name.startswith((b"user.", b"security.", b"trusted.")) and name not in _NOT_PORTABLE:
                    kept[name] = os.getxattr(where, text, follow_symlinks=follow)
        except OSError as error:
            if error.errno in (95, 61):  # ENOTSUP; ENODATA: gone meanwhile
                return kept
            raise
        return kept

    def content(self, path: bytes, listed: os.stat_result) -> Content:
        def read() -> Iterator[bytes]:
            try:
                fd = self.open(path, os.O_NONBLOCK)
            except OSError as error:
                raise SourceError(f"cannot read {show(path)}: {error.strerror}") from error
            try:
                now = os.fstat(fd)
                if (now.st_dev, now.st_ino, now.st_size) != (listed.st_dev, listed.st_ino, listed.st_size):
                    raise SourceError(f"{show(path)} was changed while it was read", hint="try again when nothing writes there")
                left = listed.st_size
                while left:
                    piece = os.read(fd, min(CHUNK, left))
                    if not piece:
                        raise SourceError(f"{show(path)} was cut short while it was read")
                    left -= len(piece)
                    yield piece
            except OSError as error:
                raise SourceError(f"cannot read {show(path)}: {error.strerror}") from error
            finally:
                os.close(fd)

        return read


def _member(status: os.stat_result, kind: int, xattrs: dict[bytes, bytes]) -> Member:
    seconds, nanoseconds = divmod(status.st_mtime_ns, 1_000_000_000)
    if seconds < 0:
        seconds = nanoseconds = 0
    return Member(
        b"", kind, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, seconds, nanoseconds,
        status.st_size if kind == FILE else 0, b"", 0, xattrs or None, NO_DATA, None,
    )  # fmt: skip


def scan_directory(path: str, limits: Limits = DEFAULT_LIMITS) -> tuple[Directory, list[str]]:
    """The tree below ``path``, and what was left out (sockets). Contents are read later, when they are asked for.

    Raises SourceError, LimitError, and UnsupportedError for what layers cannot hold.
    """
    scanner = _Scanner(os.fsencode(os.path.abspath(path)), limits)
    try:
        return scanner.tree(), scanner.skipped
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundInSource(f"no such directory: {path}" if not error.filename else f"{path}: {error.strerror}") from error
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error
