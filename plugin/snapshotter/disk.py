"""Walks over directory trees: how much they take, and deleting them. Blocking; called in threads."""

from __future__ import annotations

import os
import subprocess

from weenv.plugin.containerd.types import Usage

_BATCH = 64


def usage(path: str) -> Usage:
    """Blocks and inodes of a tree with its root, each hard-linked inode once; what vanishes meanwhile is not counted.

    The figures are containerd's own (continuity's DiskUsage): 512 bytes per block, every inode.
    """
    size = inodes = 0
    linked: set[tuple[int, int]] = set()
    try:
        size, inodes = os.lstat(path).st_blocks * 512, 1
    except FileNotFoundError:
        return Usage()
    pending = [path]
    while pending:
        try:
            entries = os.scandir(pending.pop())
        except (FileNotFoundError, NotADirectoryError):
            continue
        with entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif status.st_nlink > 1:
                    identity = (status.st_dev, status.st_ino)
                    if identity in linked:
                        continue
                    linked.add(identity)
                size += status.st_blocks * 512
                inodes += 1
    return Usage(size, inodes)


def delete_trees(paths: list[str]) -> None:
    """Delete trees, never crossing into another filesystem; what is missing is no error.

    ``rm`` does the work: a tree of 50 000 files takes a second, which in a thread of this process would be taken from
    everybody else's share of the interpreter. Raises OSError where something is left.
    """
    existing = [path for path in paths if os.path.lexists(path)]
    for start in range(0, len(existing), _BATCH):
        batch = existing[start : start + _BATCH]
        command = ["rm", "-rf", "--one-file-system", "--", *batch]
        subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    left = [path for path in existing if os.path.lexists(path)]
    if left:
        raise OSError(f"cannot delete {left[0]}" + (f" and {len(left) - 1} more" if len(left) > 1 else ""))
