"""The ``data`` file of a layer directory: its tar stream, with holes where frames have not been fetched."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Final

from weenv.core.errors import StorageError

_RETRY: Final = 1.0
"""Seconds between attempts to create a file that the disk had no room for."""

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h
_libc = ctypes.CDLL(None, use_errno=True)


class DataStore:
    """The sparse file at ``path``, ``size`` bytes long. Reads and writes may come from any thread.

    ``fd`` is -1 while the file cannot be created, and open for reading only on a disk that takes no writes; :meth:`write`
    then tries again about once a second.
    """

    def __init__(self, path: str, size: int) -> None:
        self.fd = -1
        self._path = path
        self._size = size
        self._lock = threading.Lock()
        self._next_try = 0.0
        self._writable = False
        self._leasing = threading.Lock()
        self._alone_since = 0.0

    @classmethod
    def open(cls, path: str, size: int) -> DataStore:
        """Open or create the file. A full or read-only disk is no error here; others raise :class:`StorageError`."""
        store = cls(path, size)
        try:
            store._create()
        except OSError as error:
            if not is_full(error):
                raise StorageError(f"cannot open {path}: {error.strerror}", errno=error.errno or 0) from error
            with contextlib.suppress(OSError):  # without it there is nothing to read either
                store.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return store

    def _create(self) -> None:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size != self._size:
                os.ftruncate(fd, self._size)
            if self.fd >= 0:
                os.dup2(fd, self.fd, inheritable=False)  # in one step: others may be reading
        except BaseException:
            os.close(fd)
            raise
        if self.fd >= 0:
            os.close(fd)
        else:
            self.fd = fd
        self._writable = True

    def short(self) -> bool:
        """True where something has cut the file."""
        return self.fd >= 0 and os.fstat(self.fd).st_size < self._size

    def mend(self) -> None:
        """Give the file its length again, where something has cut it. Never raises: a write will say what is wrong."""
        with contextlib.suppress(OSError):
            if self._writable and self.short():
                os.ftruncate(self.fd, self._size)

    def write(self, offset: int, content: bytes | memoryview) -> None:
        """Write all of ``content`` at ``offset``. Raises :class:`StorageError`; its errno is ENOSPC where space ran out."""
        try:
            if not self._writable:
                with self._lock:
                    if not self._writable:
                        now = time.monotonic()
                        if now < self._next_try:
                            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                        self._next_try = now + _RETRY
                        self._create()
            written = os.pwrite(self.fd, content, offset)
            if written == len(content):
                return
            view = memoryview(content)
            while written < len(view):
                written += os.pwrite(self.fd, view[written:], offset + written)
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror}", errno=error.errno or 0) from error

    def sync(self) -> None:
        """fdatasync. Raises :class:`StorageError`."""
        if self.fd < 0:
            return
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            raise StorageError(f"cannot sync {self._path}: {error.strerror}", errno=error.errno or 0) from error

    def allocated(self) -> int:
        """Bytes of disk that the file takes."""
        return os.fstat(self.fd).st_blocks * 512 if self.fd >= 0 else 0

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Within the block nobody but this object has the file open, or comes to open it; False where somebody has.

        A write lease (fcntl(2), F_SETLEASE) on a descriptor that is open for writing is given only where it is the one
        open file of the inode: no EROFS mount has it as its device then, in whatever namespace and below whatever overlay,
        and no other process of ours. Who opens the file meanwhile waits in open(2) until the block ends, so it must be short.
        False, too, on a file system that gives no leases. Who is that long about it all the same, because the process was
        stopped or the disk hung, is told by :meth:`undisturbed`.
        """
        with self._leasing:  # a lease is the open file's: a second thread would give back the first one's
            leased = self._lease()
            try:
                yield leased
            finally:
                if leased:
                    with contextlib.suppress(OSError):  # the kernel has taken it away
                        fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    def _lease(self) -> bool:
        if self.fd < 0 or not self._writable:
            return False
        self._alone_since = time.monotonic()
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETSIG, signal.SIGURG)  # ignored by default; a lease's own SIGIO ends the process
            fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError:
            return False
        return True

    def undisturbed(self) -> bool:
        """Within :meth:`alone`: True where it is certain that nobody has come to open the file so far.

        The kernel lets who waits in open(2) for longer than ``/proc/sys/fs/lease-break-time`` pass, lease or not.
        """
        if fcntl.fcntl(self.fd, fcntl.F_GETLEASE) == fcntl.F_WRLCK:
            return True  # nobody has asked
        return time.monotonic() - self._alone_since < _lease_break_time() / 2

    def punch(self, begin: int, end: int) -> None:
        """Give the disk blocks of ``[begin, end)`` back; it reads as zeros then. Raises :class:`StorageError`.

        The file keeps its length. Blocks that lie in the range in part are kept, their part of it becomes zeros.
        """
        length = ctypes.c_int64(end - begin)
        if _libc.fallocate(self.fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(begin), length) < 0:
            code = ctypes.get_errno()
            raise StorageError(f"cannot punch a hole into {self._path}: {os.strerror(code)}", errno=code)

    def has_data(self, begin: int, end: int) -> bool:
        """Whether anything of ``[begin, end)`` takes disk blocks, or may."""
        try:
            return os.lseek(self.fd, begin, os.SEEK_DATA) < end
        except OSError:  # ENXIO: nothing is behind ``begin``
            return False

    def block_size(self) -> int:
        """Bytes of a disk block, as far as the file system says."""
        return max(512, os.fstat(self.fd).st_blksize)

    def close(self) -> None:
        """Close the file. No read or write may be under way."""
        self._writable = False
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _lease_break_time() -> float:
    """Seconds that who opens a file with a lease waits, at most."""
    try:
        with open("/proc/sys/fs/lease-break-time", encoding="ascii") as file:
            return float(file.read()) or math.inf
    except (OSError, ValueError):
        return 0.0


@contextlib.contextmanager
def hold(path: str) -> Iterator[None]:
    """Within the block nobody is, or comes to be, alone with the file (:meth:`DataStore.alone`); no file is no error."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        fd = -1
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def is_full(error: OSError | StorageError) -> bool:
    """True where ``error`` says that the disk has no room or is read-only now (as opposed to a broken disk)."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
