"""Files of an environment, from outside, without ever being led out of it.

Every path is looked up by openat2(2) with RESOLVE_IN_ROOT, so symbolic links and ``..`` mean what they mean to a process
in the environment; /proc's magic links are refused. A snapshot that nobody runs in yet is mounted in a mount namespace
of its own that ends with the descriptor, so nothing is left behind whatever happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import posixpath
import stat
import threading
from collections.abc import Iterator, Sequence

from weenv.core.errors import LimitError, WeenvError
from weenv.plugin.containerd.types import Mount

_SYS_OPENAT2 = 437  # include/uapi/asm-generic/unistd.h, the same number on all architectures
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_IN_ROOT = 0x10
_CLONE_NEWNS = 0x00020000
_MS_RDONLY, _MS_REC, _MS_PRIVATE = 1, 0x4000, 1 << 18
_KERNEL_FILE_SYSTEMS = frozenset({0x9FA0, 0x62656572, 0x27E0EB, 0x63677270, 0x64626720, 0x74726163, 0x73636673})
"""statfs(2) f_type of proc, sysfs, cgroup v1 and v2, debugfs, tracefs, securityfs."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class FileError(WeenvError):
    """A file of an environment cannot be read or written; ``errno`` is the kernel's answer."""

    def __init__(self, message: str, *, errno: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.errno = errno


class _OpenHow(ctypes.Structure):
    """``struct open_how`` (include/uapi/linux/openat2.h)."""

    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def _check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def open_in_root(root: int, path: str, flags: int, mode: int = 0) -> int:
    """A descriptor of ``path`` as a process chrooted to ``root`` (a descriptor) would find it. Raises OSError."""
    name = os.fsencode(path)
    if b"\0" in name:
        raise OSError(errno.EINVAL, "a zero byte in a path")
    how = _OpenHow(flags | os.O_CLOEXEC, mode, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    return _check(
        int(
            _libc.syscall(
                ctypes.c_long(_SYS_OPENAT2), ctypes.c_long(root), ctypes.c_char_p(name), ctypes.byref(how),
                ctypes.c_size_t(ctypes.sizeof(how)),
            )
        )
    )  # fmt: skip


@contextlib.contextmanager
def process_root(pid: int) -> Iterator[int]:
    """The root of a running process, open within the block. Raises FileError where it is gone."""
    try:
        root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise FileError("the environment does not run", errno=error.errno or 0, hint="start it first") from error
    try:
        yield root
    finally:
        os.close(root)


class _StatFs(ctypes.Structure):
    """``struct statfs`` (statfs(2)); only ``f_type`` is used."""

    _fields_ = [("f_type", ctypes.c_long), ("rest", ctypes.c_char * 512)]


def _file_system(fd: int) -> int:
    found = _StatFs()
    _check(_libc.fstatfs(ctypes.c_int(fd), ctypes.byref(found)))
    return int(found.f_type) & 0xFFFFFFFF


def in_kernel(fd: int) -> bool:
    """Whether a file is one that the kernel makes up. Raises OSError."""
    return _file_system(fd) in _KERNEL_FILE_SYSTEMS


def _fail(path: str, what: str, error: OSError) -> FileError:
    return FileError(f"{path[:300]} cannot be {what}: {error.strerror}", errno=error.errno or 0)


def read_file(root: int, path: str, *, limit: int) -> bytes:
    """The bytes of a regular file. Raises FileError, LimitError beyond ``limit`` bytes."""
    try:
        found = open_in_root(root, path, os.O_PATH)
        try:
            if not stat.S_ISREG(os.fstat(found).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            # A pipe or a device would have been opened for good by now; what is checked is what is opened. Regular files
            # of proc may wait for the kernel to say something (/proc/kmsg): not with O_NONBLOCK.
            fd = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                data = _read_at_most(fd, limit + 1)
            finally:
                os.close(fd)
        finally:
            os.close(found)
    except OSError as error:
        raise _fail(path, "read", error) from error
    if len(data) > limit:
        raise LimitError(f"{path[:300]} has more than {limit} bytes", hint="read it with a larger limit")
    return data


def _read_at_most(fd: int, count: int) -> bytes:
    data = bytearray()
    while len(data) < count and (piece := os.read(fd, min(count - len(data), 1 << 20))):
        data += piece
    return bytes(data)


def write_file(root: int, path: str, data: bytes, *, mode: int | None, owner: tuple[int, int], parents: bool = True) -> None:
    """Make or replace a regular file. A new one has ``mode`` (or 0644) and ``owner``; one that is there keeps its owner.

    Raises FileError.
    """
    try:
        if parents:
            make_parents(root, path, owner)
        try:
            found = open_in_root(root, path, os.O_PATH)
        except FileNotFoundError:
            fd = open_in_root(root, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.fchown(fd, *owner)
            mode = 0o644 if mode is None else mode
        else:
            try:
                if not stat.S_ISREG(os.fstat(found).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file")
                if in_kernel(found):
                    raise OSError(errno.EROFS, "belongs to the kernel")
                fd = os.open(f"/proc/self/fd/{found}", os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
            finally:
                os.close(found)
        with open(fd, "wb", buffering=0) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
    except OSError as error:
        raise _fail(path, "written", error) from error


def make_parents(root: int, path: str, owner: tuple[int, int]) -> None:
    """Make the directories above ``path`` that are not there; those belong to ``owner``. Raises OSError."""
    parent = posixpath.dirname(path)
    missing: list[str] = []
    while parent.strip("/"):
        try:
            os.close(open_in_root(root, parent, os.O_PATH | os.O_DIRECTORY))
            break
        except FileNotFoundError:
            parent, _, name = parent.rstrip("/").rpartition("/")
            missing.append(name)
    for name in reversed(missing):
        above = open_in_root(root, parent or "/", os.O_PATH | os.O_DIRECTORY)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=above)
                os.chown(name, *owner, dir_fd=above, follow_symlinks=False)
        finally:
            os.close(above)
        parent = f"{parent}/{name}"


def find_program(root: int, name: str, path: str) -> str:
    """The first regular file called ``name`` in the absolute directories of ``path`` that anybody may execute, or empty."""
    for folder in path.split(":"):
        if not folder.startswith("/"):
            continue
        candidate = posixpath.join(folder, name)
        with contextlib.suppress(OSError):  # not there: the next directory may have it
            found = open_in_root(root, candidate, os.O_PATH)
            try:
                status = os.fstat(found)
            finally:
                os.close(found)
            if stat.S_ISREG(status.st_mode) and status.st_mode & 0o111:
                return candidate
    return ""


def read_account_files(root: int) -> tuple[bytes, bytes]:
    """/etc/passwd and /etc/group, empty where there is none that can be read."""
    from weenv.environment.users import MAX_FILE

    found = []
    for path in ("/etc/passwd", "/etc/group"):
        try:
            found.append(read_file(root, path, limit=MAX_FILE))
        except WeenvError:
            found.append(b"")
    return found[0], found[1]


def open_snapshot(mounts: Sequence[Mount]) -> int:
    """The root of a snapshot, read-only, mounted for nobody but the holder of the descriptor. Raises FileError.

    Blocking: about a millisecond. An overlay's upper directory is read as one more lower one: it may be in use.
    """
    if len(mounts) != 1:
        raise FileError("the snapshot is not one mount")
    mount = mounts[0]
    if mount.type in ("bind", "rbind"):
        return os.open(mount.source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    fields = dict(option.partition("=")[::2] for option in mount.options)
    lowers = [part for part in (fields.get("upperdir", ""), *fields.get("lowerdir", "").split(":")) if part]
    if mount.type != "overlay" or not lowers:
        raise FileError(f"a snapshot of type {mount.type!r} cannot be looked into")
    if len(lowers) == 1:
        return os.open(lowers[0], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    result: list[int | BaseException] = []
    thread = threading.Thread(target=_mount_aside, args=(lowers, result), name="weenv-look")
    thread.start()
    thread.join()
    if isinstance(result[0], OSError):
        raise FileError(f"the snapshot cannot be looked into: {result[0].strerror}", errno=result[0].errno or 0)
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def _mount_aside(lowers: list[str], result: list[int | BaseException]) -> None:
    """Body of a thread that leaves the process's mount namespace, and with it (unshare(2)) its working directory."""
    try:
        _check(_libc.unshare(ctypes.c_int(_CLONE_NEWNS)))
        _check(_libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
        # Relative names, because the options must fit into a page (mount(2)).
        common = os.path.commonpath(lowers)
        os.chdir(common)
        data = "lowerdir=" + ":".join(os.path.relpath(lower, common) for lower in lowers)
        if len(data) > 4000:
            raise OSError(errno.E2BIG, "too many layers")
        _check(_libc.mount(b"overlay", b"/proc", b"overlay", ctypes.c_ulong(_MS_RDONLY), os.fsencode(data)))
        result.append(os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    except BaseException as error:  # noqa: BLE001 - handed to the caller
        result.append(error)
