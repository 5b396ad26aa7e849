"""Files that are either the old one or the new one, whenever the process or the machine dies."""

from __future__ import annotations

import contextlib
import errno
import os
import stat


def check_replaceable(path: str) -> None:
    """Raise OSError where ``path`` is, or leads to, something else than a regular file.

    A rename onto ``/dev/null`` or ``/dev/stdout`` succeeds for root, and takes the device away from the whole machine.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory", path)
    if not stat.S_ISREG(mode):
        raise FileExistsError(errno.EEXIST, "is no regular file; name a file to write", path)


def write_atomic(path: str, data: bytes | bytearray | memoryview, *, mode: int = 0o600, durable: bool = True) -> None:
    """Write ``data`` to ``path`` by way of a temporary file beside it and a rename.

    ``durable`` syncs file and directory, so that the new content survives a power cut; without it only a crash of the
    process is covered. Only a regular file is replaced. Raises OSError; the temporary file is gone then.
    """
    check_replaceable(path)
    directory = os.path.dirname(path) or "."
    temporary = os.path.join(directory, f".{os.path.basename(path)}.{os.urandom(6).hex()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if durable:
        sync_directory(directory)


def sync_directory(path: str) -> None:
    """Make renames and creations in ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
