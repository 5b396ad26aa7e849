"""Trees of files into and out of an environment, as tar archives, without ever being led out of it.

Paths are looked up as in rootfs.py: symbolic links mean what they mean in the environment. An archive's own names stay below
the directory that it is unpacked to unless a link leads elsewhere in the environment; ``..`` is refused, and so is what is
neither a file, a directory nor a link. Formats: POSIX.1-2008 pax, ustar and GNU, as Python's tarfile reads them.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import stat
import tarfile
from typing import IO

from weenv.core.errors import FormatError, LimitError
from weenv.environment.rootfs import FileError, in_kernel, make_parents, open_in_root

_PIECE = 1 << 20


def unpack(root: int, path: str, source: IO[bytes], *, owner: tuple[int, int] | None, parents: tuple[int, int]) -> None:
    """Unpack an uncompressed tar below the directory ``path``, which is made (belonging to ``parents``) where there is none.

    Files belong to whom the archive says, by number, or to ``owner``; one that is there already is replaced. What came before
    an error stays. Raises FileError, FormatError.
    """
    directories: list[tuple[str, float]] = []
    name = path
    try:
        make_parents(root, f"{path}/x", parents)
        with tarfile.open(fileobj=source, mode="r|") as archive:
            for member in archive:
                name = posixpath.join(path, _inside(member.name))
                _unpack_one(root, archive, member, name, owner or (member.uid, member.gid), parents, path)
                if member.isdir():
                    directories.append((name, member.mtime))
        for name, when in reversed(directories):
            fd = open_in_root(root, name, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.utime(fd, (when, when))
            finally:
                os.close(fd)
    except OSError as error:
        raise FileError(f"{name[:300]} cannot be written: {error.strerror or error}", errno=error.errno or 0) from error
    except (tarfile.TarError, ValueError, EOFError, OverflowError) as error:
        hint = "give it uncompressed" if isinstance(error, tarfile.ReadError) else ""
        raise FormatError(f"the archive is no tar, or damaged: {error}", hint=hint) from error


def _inside(name: str) -> str:
    """A member's name below the directory. Raises FormatError."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise FormatError(f"the archive has a name with '..': {name[:200]!r}")
    return "/".join(parts)


def _unpack_one(
    root: int, archive: tarfile.TarFile, member: tarfile.TarInfo, name: str, owner: tuple[int, int],
    parents: tuple[int, int], path: str,
) -> None:  # fmt: skip
    make_parents(root, name, parents)
    mode = member.mode & 0o7777
    if member.isdir():
        make_parents(root, f"{name}/x", owner)
        fd = open_in_root(root, name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if posixpath.normpath(name) != posixpath.normpath(path):  # the directory that was there before stays as it is
                os.fchown(fd, *owner)
                os.fchmod(fd, mode)
        finally:
            os.close(fd)
        return
    above = open_in_root(root, posixpath.dirname(name) or "/", os.O_PATH | os.O_DIRECTORY)
    base = posixpath.basename(name)
    try:
        if not base or in_kernel(above):
            raise OSError(1, "it belongs to the kernel" if base else "it has no name")
        if member.islnk():
            target = open_in_root(root, posixpath.join(path, _inside(member.linkname)), os.O_PATH | os.O_NOFOLLOW)
            try:
                _clear(base, above)
                os.link(f"/proc/self/fd/{target}", base, dst_dir_fd=above, follow_symlinks=True)
            finally:
                os.close(target)
        elif member.issym():
            _clear(base, above)
            os.symlink(member.linkname, base, dir_fd=above)
            os.chown(base, *owner, dir_fd=above, follow_symlinks=False)
        elif member.isreg() and not member.issparse():
            _clear(base, above)
            _write(archive, member, base, above, mode, owner)
        else:
            raise FormatError(f"{name[:300]} is neither a file, a directory nor a link")
    finally:
        os.close(above)


def _clear(base: str, above: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(base, dir_fd=above)


def _write(
    archive: tarfile.TarFile, member: tarfile.TarInfo, base: str, above: int, mode: int, owner: tuple[int, int]
) -> None:  # fmt: skip
    data = archive.extractfile(member)
    assert data is not None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(base, flags, 0o600, dir_fd=above), "wb", buffering=0) as file:
        left = member.size
        while left:
            piece = data.read(min(left, _PIECE))
            if not piece:
                raise tarfile.ReadError("unexpected end of data")
            view = memoryview(piece)
            while view:
                view = view[file.write(view) :]
            left -= len(piece)
        os.fchown(file.fileno(), *owner)
        os.fchmod(file.fileno(), mode)  # after the owner: that takes set-user-id away (chown(2))
        os.utime(file.fileno(), (member.mtime, member.mtime))


def pack(root: int, path: str, *, limit: int) -> bytes:
    """A file, link or directory with all below it as a pax archive, whose names begin with the last part of ``path``.

    Pipes, sockets, devices and what the kernel makes up (/proc) are left out. Raises FileError, and LimitError beyond ``limit``
    bytes.
    """
    out = _Bounded(limit, path)
    name = posixpath.normpath(path)
    try:
        with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            waiting = [(name, posixpath.basename(name) or ".", os.O_PATH)]
            while waiting:
                name, shown, flags = waiting.pop()
                try:
                    found = open_in_root(root, name, flags)
                except FileNotFoundError:
                    if flags == os.O_PATH:
                        raise
                    continue  # it has been removed meanwhile
                try:
                    below = _pack_one(archive, found, shown)
                finally:
                    os.close(found)
                children = [(posixpath.join(name, base), f"{shown}/{base}", os.O_PATH | os.O_NOFOLLOW) for base in below]
                waiting.extend(reversed(children))
    except OSError as error:
        raise FileError(f"{name[:300]} cannot be read: {error.strerror or error}", errno=error.errno or 0) from error
    return out.data.getvalue()


def _pack_one(archive: tarfile.TarFile, found: int, shown: str) -> list[str]:
    """Add what an O_PATH descriptor leads to; the names below it."""
    status = os.fstat(found)
    member = tarfile.TarInfo(shown)
    member.mode, member.uid, member.gid = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
    member.mtime = status.st_mtime
    opened = f"/proc/self/fd/{found}"
    if stat.S_ISLNK(status.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink("", dir_fd=found)
        archive.addfile(member)
    elif stat.S_ISDIR(status.st_mode) and not in_kernel(found):
        member.type = tarfile.DIRTYPE
        archive.addfile(member)
        return sorted(os.listdir(opened))
    elif stat.S_ISREG(status.st_mode) and not in_kernel(found):
        with open(os.open(opened, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            member.size = status.st_size
            archive.addfile(member, _Padded(file))
    return []


class _Padded(io.RawIOBase):
    """A file that ends no sooner than the archive was told: one that is cut meanwhile ends in zeros."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        return data + bytes(max(0, size - len(data)))


class _Bounded(io.RawIOBase):
    """Memory for the archive; more than ``limit`` bytes are an error."""

    def __init__(self, limit: int, path: str) -> None:
        self.data = io.BytesIO()
        self._limit = limit
        self._path = path

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.data.tell() + len(data) > self._limit:
            what = f"{self._path[:300]} makes an archive of more than {self._limit} bytes"
            raise LimitError(what, hint="give a larger limit")
        return self.data.write(data)
