"""Stacks of lazy layers in a local layout, and a slow, obvious way to merge them: what fast ones are compared with."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from weenv.environment.compose import StackedLayer
from weenv.environment.mutate.view import Inode, Path, TreeView
from weenv.layer.encode import EncodedLayer
from weenv.layer.toc import CHAR, DIRECTORY, FILE, SYMLINK
from weenv.layer.verify import MEDIA_TYPE
from weenv.registry.groupref.model import LayerRef
from weenv_testkit.layers import encode


class Seen(NamedTuple):
    """A path of a merged tree, as a user sees it: ``content`` is a file's data or a symlink's target."""

    kind: int
    mode: int
    uid: int
    gid: int
    mtime: int
    content: bytes


Tree = dict[Path, Seen]


class Stack:
    """Layers made from tars, stored in an OCI layout at ``directory``."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.layers: list[StackedLayer] = []
        self.encoded: list[EncodedLayer] = []
        self.tars: list[bytes] = []
        os.makedirs(os.path.join(directory, "blobs", "sha256"), exist_ok=True)

    def add(self, tar: bytes, **options: Any) -> StackedLayer:
        """One more layer on top."""
        blob, layer = encode(tar, **options)
        with open(os.path.join(self.directory, "blobs", "sha256", layer.blob_digest[7:]), "wb") as file:
            file.write(blob)
        ref = LayerRef(layer.blob_digest, layer.blob_size, MEDIA_TYPE, layer.diff_id, layer.annotations())
        stacked = StackedLayer(ref, f"oci:{self.directory}", True)
        self.layers.append(stacked)
        self.encoded.append(layer)
        self.tars.append(tar)
        return stacked

    def view(self) -> TreeView:
        """The merged tree."""
        return TreeView([layer.toc for layer in self.encoded])


async def seen(view: TreeView, read: Callable[[Inode], Awaitable[bytes]]) -> Tree:
    """Everything in a view but the root, walked with its own functions."""
    tree: Tree = {}

    async def walk(path: Path, directory: Inode) -> None:
        for name, inode in view.names(directory).items():
            content = view.target(inode)
            if inode.kind == FILE:
                content = await read(inode)
            tree[(*path, name)] = Seen(inode.kind, inode.mode, inode.uid, inode.gid, inode.mtime, content)
            if inode.kind == DIRECTORY:
                await walk((*path, name), inode)

    await walk((), view.root)
    return tree


def merged(tars: list[bytes]) -> Tree:
    """The tree that tars give, one after the other, by the rules of image-spec layer.md. No hard links to replaced files."""
    tree: Tree = {}
    for data in tars:
        own: Tree = {}
        implied: set[Path] = set()
        gone: list[Path] = []
        with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as tar:
            for member in tar:
                path = tuple(
                    part for part in member.name.encode("utf-8", "surrogateescape").split(b"/") if part not in (b"", b".")
                )
                for depth in range(1, len(path)):
                    if own.get(path[:depth]) is None:
                        own[path[:depth]] = Seen(DIRECTORY, 0o755, 0, 0, 0, b"")
                        implied.add(path[:depth])
                if path[-1] == b".wh..wh..opq":
                    gone.extend(known for known in tree if len(known) >= len(path) and known[: len(path) - 1] == path[:-1])
                    continue
                if path[-1].startswith(b".wh."):
                    target = (*path[:-1], path[-1][4:])
                    gone.extend(known for known in tree if known[: len(target)] == target)
                    continue
                own[path] = _seen(member, tar, own)
                implied.discard(path)
        for path in gone:
            tree.pop(path, None)
        for path in sorted(own):
            node = own[path]
            below = tree.get(path)
            if node.kind == DIRECTORY and below is not None and below.kind == DIRECTORY:
                tree[path] = below if path in implied else node
                continue
            for known in [known for known in tree if known[: len(path)] == path]:
                del tree[known]
            tree[path] = node
    return tree


def _seen(member: tarfile.TarInfo, tar: tarfile.TarFile, own: Tree) -> Seen:
    if member.islnk():
        return own[tuple(member.linkname.encode("utf-8", "surrogateescape").split(b"/"))]
    kind = DIRECTORY if member.isdir() else SYMLINK if member.issym() else CHAR if member.ischr() else FILE
    content = member.linkname.encode() if member.issym() else b""
    if kind == FILE:
        file = tar.extractfile(member)
        content = file.read() if file is not None else b""
    mode = 0o777 if kind == SYMLINK else member.mode & 0o7777
    return Seen(kind, mode, member.uid, member.gid, int(member.mtime), content)
