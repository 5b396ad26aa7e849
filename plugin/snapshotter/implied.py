"""The attributes that implied directories take from the layers below.

When containerd unpacks a layer whose tar names ``a/b/f`` but neither ``a`` nor ``a/b``, it makes these directories, and
where a layer below has the path it copies mode, owner, times and xattrs (but ``trusted.*``) from the topmost one that
does; a path that is there as something else than a directory ends the search (pkg/archive/tar.go mkparent and
tar_unix.go copyDirInfo, copyUpXAttrs, v2.1.9). The path is looked up in each layer by itself, symlinks followed within
it. Here the kernel does the same look-up: openat2(2) with RESOLVE_IN_ROOT.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Sequence

from weenv.layer.erofs import DirAttributes
from weenv.plugin.snapshotter.planes.base import Implied

_SYS_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_IN_ROOT = 0x10
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _OpenHow(ctypes.Structure):
    """``struct open_how`` (include/uapi/linux/openat2.h)."""

    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def open_in_root(root: int, path: bytes) -> int:
    """An O_PATH descriptor of ``path`` as a process chrooted to ``root`` (a descriptor) would find it. Raises OSError."""
    how = _OpenHow(os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    result = int(
        _libc.syscall(
            ctypes.c_long(_SYS_OPENAT2), ctypes.c_long(root), ctypes.c_char_p(path), ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
    )  # fmt: skip
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _attributes(fd: int, status: os.stat_result) -> DirAttributes:
    name = f"/proc/self/fd/{fd}"
    xattrs: list[tuple[bytes, bytes]] = []
    for key in sorted(os.listxattr(name)):
        if key.startswith(("trusted.", "system.")):
            continue
        xattrs.append((os.fsencode(key), os.getxattr(name, key)))
    seconds, nanoseconds = divmod(status.st_mtime_ns, 1_000_000_000)
    return DirAttributes(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, seconds, nanoseconds, tuple(xattrs))


def attributes_below(implied: Sequence[Implied], lowers: Sequence[str]) -> dict[int, DirAttributes]:
    """The attributes of those of ``implied`` that a lower layer has; ``lowers`` are directories, top first.

    Blocking: one look-up per directory and layer, all of metadata that is local. Raises OSError where a lower layer
    cannot be read.
    """
    found: dict[int, DirAttributes] = {}
    pending = list(implied)
    for lower in lowers:
        if not pending:
            break
        root = os.open(lower, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            absent: list[Implied] = []
            for item in pending:
                try:
                    fd = open_in_root(root, item.path)
                except OSError as error:
                    if error.errno not in _ABSENT:
                        raise
                    absent.append(item)
                    continue
                try:
                    status = os.fstat(fd)
                    if stat.S_ISDIR(status.st_mode):
                        found[item.entry] = _attributes(fd, status)
                finally:
                    os.close(fd)
            pending = absent
        finally:
            os.close(root)
    # The kernel gives a directory that is made in a set-gid one its group; chmod(2) then takes the bit itself away again.
    above = {item.path: found[item.entry] for item in implied if item.entry in found}
    for item in implied:
        parent = above.get(item.path.rpartition(b"/")[0])
        if item.entry not in found and parent is not None and parent.mode & stat.S_ISGID:
            found[item.entry] = DirAttributes(0o755, 0, parent.gid, 0, 0)
    return found
