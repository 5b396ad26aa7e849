"""The files of a system: of this machine, or of another one below a directory, whose symlinks lead nowhere else."""

from __future__ import annotations

import contextlib
import glob
import os
import stat

from weenv.core.atomic import write_atomic
from weenv.core.errors import ConfigError

_LINKS = 40
"""Symlinks followed in one path, as in the kernel (MAXSYMLINKS)."""


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


class Tree:
    """Paths are absolute, as the system itself sees them. ``root`` is where it lies."""

    def __init__(self, root: str = "/") -> None:
        self.root = os.path.realpath(root)

    @property
    def live(self) -> bool:
        """This machine itself."""
        return self.root == "/"

    def resolve(self, path: str, *, last: bool = True) -> str:
        """``path`` with its symlinks followed as in a chroot; ``last``: that of the last component, too. Need not exist.

        Raises ConfigError where they go in circles.
        """
        todo, done, links = _parts(path)[::-1], list[str](), 0
        while todo:
            part = todo.pop()
            if part == "..":
                done = done[:-1]
                continue
            target = None
            if todo or last:
                with contextlib.suppress(OSError):  # no symlink, or nothing
                    target = os.readlink(os.path.join(self.root, *done, part))
            if target is None:
                done.append(part)
                continue
            links += 1
            if links > _LINKS:
                raise ConfigError(f"symlinks go in circles: {path}")
            if target.startswith("/"):
                done = []
            todo += _parts(target)[::-1]
        return "/" + "/".join(done)

    def host(self, path: str, *, last: bool = True) -> str:
        """Where ``path`` is for this process."""
        return os.path.join(self.root, self.resolve(path, last=last)[1:])

    def read(self, path: str, limit: int = 4 << 20) -> bytes | None:
        """The whole of a regular file; None where there is none. Raises ConfigError for other kinds, OSError."""
        try:
            fd = os.open(self.host(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # open() would name a directory by its descriptor
            os.close(fd)
            raise ConfigError(f"{path} is no regular file", hint="move it away, or name another")
        with open(fd, "rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise ConfigError(f"{path} is larger than {limit} bytes")
        return data

    def write(self, path: str, data: bytes, *, like: str = "") -> None:
        """Write a file, durably and at once, and make its directory.

        It has mode and owner of the file ``like``, keeps its own, or gets 0644.
        """
        os.makedirs(self.host(os.path.dirname(path)), 0o755, exist_ok=True)
        place = self.host(path)
        try:
            try:
                old = os.stat(self.host(like) if like else place)
            except FileNotFoundError:
                write_atomic(place, data, mode=0o644)
                os.chmod(place, 0o644)
                return
            write_atomic(place, data)
            os.chown(place, old.st_uid, old.st_gid)
            os.chmod(place, stat.S_IMODE(old.st_mode))
        except OSError as error:  # which names a temporary file of ours
            raise OSError(error.errno, error.strerror, path) from error

    def missing(self, path: str) -> list[str]:
        """The directories above ``path`` that are not there yet, the topmost first."""
        above = [""]
        for part in _parts(path)[:-1]:
            above.append(f"{above[-1]}/{part}")
        return [place for place in above[1:] if not os.path.isdir(self.host(place))]

    def remove(self, path: str) -> bool:
        """Remove a file or a symlink; False where there is none."""
        try:
            os.unlink(self.host(path, last=False))
        except FileNotFoundError:
            return False
        return True

    def remove_directory(self, path: str) -> bool:
        """Remove an empty directory; False where it is not empty, or not there."""
        try:
            os.rmdir(self.host(path, last=False))
        except OSError:
            return False
        return True

    def link(self, path: str) -> str | None:
        """Where a symlink leads to; None where there is none."""
        try:
            return os.readlink(self.host(path, last=False))
        except OSError:
            return None

    def make_link(self, path: str, target: str) -> None:
        """Make a symlink, in place of another, and its directory."""
        os.makedirs(self.host(os.path.dirname(path)), 0o755, exist_ok=True)
        self.remove(path)
        os.symlink(target, self.host(path, last=False))

    def matches(self, pattern: str) -> list[str]:
        """Files that a shell pattern names, sorted; only the last component may have wildcards."""
        folder, name = os.path.split(pattern)
        if glob.has_magic(folder):
            raise ConfigError(f"wildcards in a directory's name are not understood: {pattern}")
        found = glob.glob(name, root_dir=self.host(folder), include_hidden=True)  # as Go does
        return sorted(os.path.join(folder, item) for item in found)
