"""mount(2), umount2(2) and the new mount API, through libc; never a loop device.

The new mount API is what lets an EROFS image be mounted from a plain file with a second file as device, and lets a mount
be replaced under the eyes of everybody: the new one goes *beneath* the old one, which is then detached.

Numbers: syscalls from the kernel's ``scripts/syscall.tbl`` (fsopen and its companions have the same numbers on all
architectures), flags from ``include/uapi/linux/mount.h`` of Linux 6.18.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from weenv.core.errors import MountError
from weenv.plugin.containerd.types import Mount

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_NOATIME = 1024
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_FSOPEN = 430
_SYS_FSCONFIG = 431
_SYS_FSMOUNT = 432
_SYS_MOUNT_SETATTR = 442

_FSOPEN_CLOEXEC = 1
_FSMOUNT_CLOEXEC = 1
_FSCONFIG_SET_FLAG = 0
_FSCONFIG_SET_STRING = 1
_FSCONFIG_CMD_CREATE = 6
_MOUNT_ATTR_RDONLY = 1
_MOUNT_ATTR_NOATIME = 0x10
_MOUNT_ATTR_IDMAP = 0x00100000
_OPEN_TREE_CLONE = 1
_AT_EMPTY_PATH = 0x1000
_MOVE_MOUNT_F_EMPTY_PATH = 0x04
_MOVE_MOUNT_BENEATH = 0x200
_AT_FDCWD = -100

_FSCONFIG_STRING_MAX = 255
"""fsconfig(2) copies a string value of at most 256 bytes with its terminator (fs/fsopen.c)."""

_libc = ctypes.CDLL(None, use_errno=True)  # CDLL drops the GIL during a call, so a slow mount blocks one thread only
_libc.syscall.restype = ctypes.c_long


def _syscall(number: int, *args: int | bytes | None) -> int:
    wide = [ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(a) for a in args]
    result = int(_libc.syscall(ctypes.c_long(number), *wide))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def mount(source: str, target: str, fstype: str, flags: int = 0, data: str = "") -> None:
    """mount(2). Raises :class:`MountError`."""
    result = _libc.mount(
        os.fsencode(source), os.fsencode(target), fstype.encode(), ctypes.c_ulong(flags), os.fsencode(data) if data else None
    )
    if result < 0:
        code = ctypes.get_errno()
        raise MountError(f"mount {fstype} on {target}: {os.strerror(code)}", errno=code)


def unmount(target: str, flags: int = UMOUNT_NOFOLLOW) -> None:
    """umount2(2) of the topmost mount at ``target``. Raises :class:`MountError`."""
    if _libc.umount2(os.fsencode(target), ctypes.c_int(flags)) < 0:
        code = ctypes.get_errno()
        raise MountError(f"umount {target}: {os.strerror(code)}", errno=code)


def detach(target: str) -> bool:
    """Take away every mount stacked at ``target``, lazily: whoever uses one keeps it. True where there was one.

    Raises :class:`MountError` for anything but "not mounted" and "no such path".
    """
    found = False
    while True:
        try:
            unmount(target, MNT_DETACH | UMOUNT_NOFOLLOW)
        except MountError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):
                return found
            raise
        found = True


def _messages(fs: int) -> str:
    """The kernel's explanations, from the log of an fsopen(2) context."""
    lines: list[str] = []
    with contextlib.suppress(OSError):  # ENODATA: there is no more
        while len(lines) < 8:
            text = os.read(fs, 1024).decode("utf-8", "replace").strip()
            lines.append(text[2:] if text[1:2] == " " else text)
    return "; ".join(lines)


class DetachedMount:
    """A filesystem that is mounted nowhere yet. Use as a context manager; leaving it unattached unmounts it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __enter__(self) -> DetachedMount:
        return self

    def __exit__(self, *_exc: object) -> None:
        os.close(self.fd)

    def attach(self, target: str, *, beneath: bool = False) -> None:
        """Put it at ``target``, on top of what is there, or ``beneath`` the topmost mount there (Linux 6.5).

        Raises :class:`MountError`.
        """
        flags = _MOVE_MOUNT_F_EMPTY_PATH | (_MOVE_MOUNT_BENEATH if beneath else 0)
        try:
            _syscall(_SYS_MOVE_MOUNT, self.fd, b"", _AT_FDCWD, os.fsencode(target), flags)
        except OSError as error:
            where = "beneath" if beneath else "at"
            raise MountError(f"cannot attach a mount {where} {target}: {error.strerror}", errno=error.errno or 0) from error


def open_erofs(image: str, device: str) -> DetachedMount:
    """Mount the EROFS metadata file ``image``, whose one extra device is the file ``device``, read-only, no atime.

    Both are opened by the kernel here and now, so their names may go away later. Raises :class:`MountError` with the
    kernel's own explanation.
    """
    with contextlib.ExitStack() as files:

        def usable(path: str) -> bytes:
            raw = os.fsencode(path)
            if len(raw) <= _FSCONFIG_STRING_MAX:
                return raw
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            files.callback(os.close, fd)
            return b"/proc/self/fd/%d" % fd

        fs = -1
        try:
            fs = _syscall(_SYS_FSOPEN, b"erofs", _FSOPEN_CLOEXEC)
            _syscall(_SYS_FSCONFIG, fs, _FSCONFIG_SET_FLAG, b"ro", None, 0)
            _syscall(_SYS_FSCONFIG, fs, _FSCONFIG_SET_STRING, b"source", usable(image), 0)
            _syscall(_SYS_FSCONFIG, fs, _FSCONFIG_SET_STRING, b"device", usable(device), 0)
            _syscall(_SYS_FSCONFIG, fs, _FSCONFIG_CMD_CREATE, None, None, 0)
            return DetachedMount(_syscall(_SYS_FSMOUNT, fs, _FSMOUNT_CLOEXEC, _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOATIME))
        except OSError as error:
            why = _messages(fs) if fs >= 0 else ""
            text = f"cannot mount {image} with device {device}: {error.strerror}" + (f" ({why})" if why else "")
            hint = "file-backed EROFS needs Linux 6.12" if error.errno in (errno.ENODEV, errno.ENOTBLK) else ""
            raise MountError(text, errno=error.errno or 0, hint=hint) from error
        finally:
            if fs >= 0:
                os.close(fs)


def open_filesystem(fstype: str) -> DetachedMount:
    """Mount, read-only, a filesystem of the kernel's own that needs nothing to be told, such as ``fusectl``.

    It is mounted nowhere: open files of it with the descriptor as ``dir_fd``. Raises :class:`MountError`.
    """
    fs = -1
    try:
        fs = _syscall(_SYS_FSOPEN, fstype.encode(), _FSOPEN_CLOEXEC)
        _syscall(_SYS_FSCONFIG, fs, _FSCONFIG_CMD_CREATE, None, None, 0)
        return DetachedMount(_syscall(_SYS_FSMOUNT, fs, _FSMOUNT_CLOEXEC, _MOUNT_ATTR_RDONLY))
    except OSError as error:
        raise MountError(f"cannot mount {fstype}: {error.strerror}", errno=error.errno or 0) from error
    finally:
        if fs >= 0:
            os.close(fs)


def open_mapped(path: str, namespace: int) -> DetachedMount:
    """A read-only clone of what is at directory ``path``, with its ids mapped as in a user namespace (a descriptor).

    What is mounted below ``path`` is not in it. Linux 5.12 and a filesystem that can be mapped. Raises :class:`MountError`.
    """
    tree = -1
    try:
        tree = _syscall(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(path), _OPEN_TREE_CLONE | os.O_CLOEXEC)
        # struct mount_attr: attr_set, attr_clr, propagation, userns_fd
        wanted = struct.pack("=QQQQ", _MOUNT_ATTR_IDMAP | _MOUNT_ATTR_RDONLY, 0, MS_PRIVATE, namespace)
        _syscall(_SYS_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, wanted, len(wanted))
    except OSError as error:
        if tree >= 0:
            os.close(tree)
        raise MountError(f"cannot map the ids of {path}: {error.strerror}", errno=error.errno or 0) from error
    return DetachedMount(tree)


@dataclass(frozen=True, slots=True)
class MountEntry:
    """A line of ``/proc/self/mountinfo`` (Documentation/filesystems/proc.rst, section 3.5)."""

    mount_id: int
    device: str
    point: str
    fstype: str
    source: str
    options: str
    super_options: str


_OCTAL = re.compile(rb"\\([0-7]{3})")


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    return os.fsdecode(_OCTAL.sub(lambda match: bytes((int(match[1], 8) & 255,)), os.fsencode(text)))


def parse_mountinfo(text: str) -> list[MountEntry]:
    """Parse the content of a mountinfo file, in its order: of several mounts at one point the last is on top."""
    entries: list[MountEntry] = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        head, tail = left.split(" "), right.split(" ")
        if not separator or len(head) < 6 or len(tail) < 3:
            continue
        entries.append(MountEntry(int(head[0]), head[2], _unescape(head[4]), tail[0], _unescape(tail[1]), head[5], tail[2]))
    return entries


def mounts_below(prefix: str) -> dict[str, MountEntry]:
    """The topmost mount of every mount point under directory ``prefix``, by path."""
    start = prefix.rstrip("/") + "/"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return {entry.point: entry for entry in parse_mountinfo(file.read()) if entry.point.startswith(start)}


def filesystem_at(path: str) -> str:
    """The type of the filesystem that holds ``path``, such as ``ext4``; empty where it cannot be told."""
    real = os.path.realpath(path)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        entries = parse_mountinfo(file.read())
    found = ("", "")
    for entry in entries:  # of several at one point the last is on top
        if (real + "/").startswith(entry.point.rstrip("/") + "/") and len(entry.point) >= len(found[0]):
            found = (entry.point, entry.fstype)
    return found[1]


# How containerd is told to mount a snapshot. What is said and in which order follows containerd's own overlayfs
# snapshotter (plugins/snapshots/overlay/overlay.go, v2.1.9), so that nothing above can tell the two apart.


def bind_mount(path: str, *, writable: bool) -> Mount:
    """The directory itself: a snapshot without parent, or a view of one layer."""
    return Mount("bind", path, ("rw" if writable else "ro", "rbind"))


def overlay_mount(lower: str, extra: Sequence[str] = (), *, upper: str = "", work: str = "") -> Mount:
    """An overlay over ``lower`` (paths joined by colons, top first), writable where ``upper`` and ``work`` are given."""
    own = (f"workdir={work}", f"upperdir={upper}") if upper else ()
    return Mount("overlay", "overlay", (*own, "lowerdir=" + lower, *extra))


def overlay_options() -> tuple[str, ...]:
    """What every overlay mount is given: ``index=off`` where the kernel knows it (else a reused upperdir may fail)."""
    return ("index=off",) if os.path.exists("/sys/module/overlay/parameters/index") else ()
