"""Files that are either the old one or the new one, whenever the process or the machine dies."""

from __future__ import annotations

import contextlib
import os
import secrets


def write_atomic(path: str, data: bytes | bytearray | memoryview, *, mode: int = 0o600, durable: bool = True) -> None:
    """Write ``data`` to ``path`` by way of a temporary file beside it and a rename.

    ``durable`` syncs file and directory, so that the new content survives a power cut; without it only a crash of the
    process is covered. Raises OSError; the temporary file is gone then.
    """
    directory = os.path.dirname(path) or "."
    temporary = os.path.join(directory, f".{os.path.basename(path)}.{secrets.token_hex(6)}.tmp")
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
