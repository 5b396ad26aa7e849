"""What a directory tree is, down to the last attribute, so that two of them can be compared.

Compared are names, types, modes, owners, times (nanoseconds), sizes, device numbers, link targets, contents, all xattrs
(trusted ones too, so overlayfs' whiteouts and opaque marks count), link counts, and which names are one inode. Not
compared: the size of directories, which is the file system's own business, and inode numbers as such.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection
from dataclasses import asdict, dataclass

IGNORED_XATTRS = (b"security.selinux", b"system.")
"""Put there by the machine, not by a layer."""


@dataclass(frozen=True)
class Entry:
    """One name. ``first`` is the first name of the same inode, in byte order; ``content`` sha256, target or nothing."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int
    rdev: int
    nlink: int
    first: bytes
    content: bytes
    xattrs: tuple[tuple[bytes, bytes], ...]


def _xattrs(path: bytes) -> tuple[tuple[bytes, bytes], ...]:
    names = sorted(os.fsencode(name) for name in os.listxattr(path, follow_symlinks=False))
    wanted = [name for name in names if not name.startswith(IGNORED_XATTRS)]
    return tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in wanted)


def contents(*roots: str) -> dict[str, str]:
    """Every name below ``roots``: path to a file's digest, a symlink's target, or the word directory."""
    found = {}
    for root in roots:
        for folder, names, others in os.walk(root):
            for path in (os.path.join(folder, name) for name in [*names, *others]):
                if os.path.islink(path):
                    found[path] = os.readlink(path)
                elif os.path.isdir(path):
                    found[path] = "directory"
                elif os.path.isfile(path):
                    with open(path, "rb") as file:
                        found[path] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def read_tree(root: str, *, contents: bool = True) -> dict[bytes, Entry]:
    """Every name below ``root``, relative to it; ``b"."`` is the root itself."""
    base = os.fsencode(root)
    found: dict[bytes, Entry] = {}
    inodes: dict[tuple[int, int], bytes] = {}
    paths = [b"."]
    for folder, folders, files in os.walk(base):
        relative = os.path.relpath(folder, base)
        for name in folders + files:
            paths.append(name if relative == b"." else os.path.join(relative, name))
    for path in sorted(paths):
        full = os.path.join(base, path)
        status = os.lstat(full)
        content = b""
        if stat.S_ISLNK(status.st_mode):
            content = os.readlink(full)
        elif stat.S_ISREG(status.st_mode) and contents:
            with open(full, "rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        directory = stat.S_ISDIR(status.st_mode)
        found[path] = Entry(
            mode=status.st_mode,
            uid=status.st_uid,
            gid=status.st_gid,
            mtime_ns=status.st_mtime_ns,
            size=0 if directory else status.st_size,
            rdev=status.st_rdev if status.st_mode & stat.S_IFCHR and not directory else 0,
            nlink=status.st_nlink,
            first=inodes.setdefault((status.st_dev, status.st_ino), path) if not directory else path,
            content=content,
            xattrs=_xattrs(full),
        )
    return found


def differences(
    expected: dict[bytes, Entry],
    actual: dict[bytes, Entry],
    *,
    times_free: Collection[bytes] = (),
    ignore: Collection[str] = (),
) -> list[str]:
    """One line per difference, none where the trees are equal.

    ``times_free`` are directories whose mtime is the time of the unpack, because no member of the layer is them;
    ``ignore`` names fields of :class:`Entry` to leave out for all.
    """
    lines = [f"missing: {path!r}" for path in sorted(expected.keys() - actual.keys())]
    lines += [f"not expected: {path!r}" for path in sorted(actual.keys() - expected.keys())]
    for path in sorted(expected.keys() & actual.keys()):
        want, have = asdict(expected[path]), asdict(actual[path])
        for field in want:
            if field in ignore or (field == "mtime_ns" and path in times_free):
                continue
            if want[field] != have[field]:
                shown = (oct(want[field]), oct(have[field])) if field == "mode" else (want[field], have[field])
                lines.append(f"{path!r}: {field} is {shown[1]!r}, expected {shown[0]!r}")
    return lines
