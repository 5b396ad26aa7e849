"""Files that somebody else may have put there: only regular ones are opened, without a wait, and none is read half."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

from weenv.core.errors import ConfigError

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def regular(path: str, flags: int) -> int:
    """An opener for :func:`open`, reading only. Raises OSError for anything but a regular file.

    Opening a FIFO would wait for somebody who writes into it, for ever where nobody does.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        if kind != stat.S_IFREG:
            raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, not a file", path)
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_whole(file: BinaryIO, limit: int) -> bytes:
    """What is left of a named file, at most ``limit`` bytes. Raises ConfigError where it is more: half of it would say
    something else than the whole, and nobody would know. Raises OSError."""
    data = file.read(limit + 1)
    if len(data) > limit:
        raise ConfigError(f"{os.fsdecode(file.name)} is larger than {limit} bytes")
    return data
