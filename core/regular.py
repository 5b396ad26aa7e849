"""Files that somebody else may have put there: only regular ones are opened, without a wait, and none is read half.

What a configuration names is opened by :func:`regular`. What a command line names, by :func:`given`, which also takes what
the process has been given open: ``/dev/stdin``, and ``/dev/fd/63`` as a shell makes it of ``<(command)``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import BinaryIO

from weenv.core.errors import ConfigError

Opener = Callable[[str, int], int]
"""What :func:`open` takes as its ``opener``."""

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
    return _opened(path, flags, lambda _: False)


def given(path: str, flags: int) -> int:
    """The same, but what this process holds open already may be a pipe or a terminal: there is somebody at its other end,
    who is to be waited for."""
    return _opened(path, flags, _is_held)


def _opened(path: str, flags: int, may_be: Callable[[os.stat_result], bool]) -> int:
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        about = os.fstat(fd)
        kind = stat.S_IFMT(about.st_mode)
        if kind != stat.S_IFREG and (kind == stat.S_IFDIR or not may_be(about)):
            raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, not a file", path)
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_held(about: os.stat_result) -> bool:
    """Whether a second descriptor of this process is of that file."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own is closed
            found += os.path.samestat(os.fstat(int(name)), about)
    return found > 1


def read_whole(file: BinaryIO, limit: int) -> bytes:
    """What is left of a named file, at most ``limit`` bytes. Raises ConfigError where it is more: half of it would say
    something else than the whole, and nobody would know. Raises OSError."""
    data = file.read(limit + 1)
    if len(data) > limit:
        raise ConfigError(f"{os.fsdecode(file.name)} is larger than {limit} bytes")
    return data


def read_file(path: str, limit: int, opener: Opener = regular) -> bytes:
    """The whole of a file, as :func:`read_whole` has it. Raises ConfigError where it is larger, OSError."""
    with open(path, "rb", opener=opener) as file:
        return read_whole(file, limit)


@contextlib.contextmanager
def held(path: str, limit: int) -> Iterator[str]:
    """A name for a regular file, good within the block, for libraries that open by name: it leads to what was looked at.

    Raises ConfigError where the file is larger than ``limit`` bytes, OSError.
    """
    with open(path, "rb", opener=regular) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise ConfigError(f"{path} is larger than {limit} bytes")
        yield f"/proc/self/fd/{file.fileno()}"
