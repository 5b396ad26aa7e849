"""The directories of an image's layers as a snapshotter has them, to be compared with another's."""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Iterable

from weenv_testkit import trees
from weenv_testkit.containerd import Containerd


def chain_of(diff_ids: Iterable[str]) -> str:
    """Name of the topmost snapshot of layers with these diffIDs, the lowest first."""
    chain = ""
    for diff_id in diff_ids:
        chain = "sha256:" + hashlib.sha256(f"{chain} {diff_id}".encode()).hexdigest() if chain else diff_id
    return chain


def view(containerd: Containerd, snapshotter: str, chain: str, namespace: str) -> tuple[str, list[str]]:
    """A view of an image: the mount command that ctr prints, and the layers' directories, the lowest first."""
    key = containerd.new_id("view")
    # In one call: containerd's collection takes a view that nothing refers to away again, whenever it comes by.
    arguments = ("--snapshotter", snapshotter, "view", "--target", "/mnt", key, chain)
    command = containerd.ctr("snapshots", *arguments, namespace=namespace)
    found = re.search(r"lowerdir=([^\s,]+)", command)
    assert found is not None, command
    return command, found[1].split(":")[::-1]


def unpack_times(tree: dict[bytes, trees.Entry], explicit: set[bytes]) -> set[bytes]:
    """Names whose mtime is the time of the unpack: directories that no member is, and overlayfs' whiteouts."""

    def made_up(path: bytes, entry: trees.Entry) -> bool:
        if stat.S_ISDIR(entry.mode):
            return path not in explicit
        return stat.S_ISCHR(entry.mode) and entry.rdev == 0

    return {path for path, entry in tree.items() if made_up(path, entry)}
