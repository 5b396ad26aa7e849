"""What is different between two groups: layers by digest, and files by what the layers' tables of contents say.

Tables of contents hold no digest of a file, so two files count as the same where kind, rights, owner, size, time, target
and extended attributes are; layers that both groups share cannot differ at all. Directories' times are not looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weenv.core.aio import gather_all
from weenv.core.errors import UnsupportedError
from weenv.layer.toc import DIRECTORY, FLAG_IMPLIED, FLAG_OPAQUE, FLAG_WHITEOUT, HARDLINK, SYMLINK, Toc
from weenv.layer.verify import parse_annotations, verify_tail
from weenv.registry.client import RegistryClient
from weenv.registry.groupref.model import LayerRef, ResolvedGroup
from weenv.registry.source import BlobSource, LayoutSource, RegistrySource

File = tuple[object, ...]
"""What is compared of a file; the first is its kind, the second its size in bytes."""


@dataclass(frozen=True, slots=True)
class LayerDiff:
    """Layers by digest: in the first group only, the second only, in both (in the second's order)."""

    removed: tuple[LayerRef, ...]
    added: tuple[LayerRef, ...]
    shared: tuple[LayerRef, ...]


@dataclass(frozen=True, slots=True)
class FileDiff:
    """Paths, sorted: only in the second, only in the first, in both but different."""

    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    changed: tuple[bytes, ...]


def diff_layers(old: ResolvedGroup, new: ResolvedGroup) -> LayerDiff:
    """Compare the layers."""
    before, after = {layer.digest for layer in old.layers}, {layer.digest for layer in new.layers}
    return LayerDiff(
        tuple(layer for layer in old.layers if layer.digest not in after),
        tuple(layer for layer in new.layers if layer.digest not in before),
        tuple(layer for layer in new.layers if layer.digest in before),
    )


async def diff_files(client: RegistryClient, old: ResolvedGroup, new: ResolvedGroup) -> FileDiff:
    """Compare the files that a container would see. Only tables of contents are fetched.

    Raises UnsupportedError where a layer is not in the lazy format, SourceError, FormatError.
    """
    tocs: dict[str, Toc] = {}
    wanted = {layer.digest: (group, layer) for group in (old, new) for layer in group.layers}
    found = await gather_all(*(fetch_toc(client, group, layer) for group, layer in wanted.values()))
    tocs = dict(zip(wanted, found, strict=True))
    before, after = await asyncio.to_thread(
        lambda: (view([tocs[layer.digest] for layer in old.layers]), view([tocs[layer.digest] for layer in new.layers]))
    )
    return compare(before, after)


async def fetch_toc(client: RegistryClient, group: ResolvedGroup, layer: LayerRef) -> Toc:
    """A layer's verified table of contents. Raises UnsupportedError where it has none."""
    promised = parse_annotations(layer.annotations)
    if promised is None or (promised.digest, promised.size) != (layer.digest, layer.size):
        raise UnsupportedError(
            f"layer {layer.digest} is not in the lazy format", member=group.reference, hint="convert it: weenv convert"
        )
    source: BlobSource
    if group.host:
        source = RegistrySource(client, group.host, group.repository, layer.digest, layer.size)
    else:
        source = LayoutSource(group.repository, layer.digest, layer.size)
    try:
        tail = await source.read(promised.toc_offset, promised.toc_length)
    finally:
        await source.close()
    return await asyncio.to_thread(verify_tail, tail, promised)


def compare(before: Mapping[bytes, File], after: Mapping[bytes, File]) -> FileDiff:
    """Compare two views."""
    return FileDiff(
        tuple(sorted(after.keys() - before.keys())),
        tuple(sorted(before.keys() - after.keys())),
        tuple(sorted(path for path in after.keys() & before.keys() if before[path] != after[path])),
    )


def view(tocs: Sequence[Toc]) -> dict[bytes, File]:
    """What overlayfs shows of layers, bottom first: path to what is compared. The root is not in it."""
    shown: dict[bytes, File] = {}
    for toc in tocs:
        _lay(shown, toc)
    return shown


def _lay(shown: dict[bytes, File], toc: Toc) -> None:
    entries = toc.entries
    paths = [b""] * len(entries)
    hidden: set[bytes] = set()  # itself and all below it
    emptied: set[bytes] = set()  # all below it
    new: dict[bytes, File] = {}
    parents, kinds, flags = entries.parent.tolist(), entries.kind.tolist(), entries.flags.tolist()
    for number in range(1, len(entries)):
        parent = paths[parents[number]]
        path = paths[number] = parent + b"/" + toc.name(number) if parent else toc.name(number)
        if flags[number] & FLAG_WHITEOUT:
            hidden.add(path)
            continue
        old = shown.get(path)
        if kinds[number] == DIRECTORY:
            if flags[number] & FLAG_OPAQUE:
                emptied.add(path)
            if flags[number] & FLAG_IMPLIED and old is not None and old[0] == DIRECTORY:
                continue
        elif old is not None and old[0] == DIRECTORY:
            hidden.add(path)
        new[path] = _file(toc, number)
    if hidden or emptied:
        for path in [path for path in shown if path in hidden or _under(path, hidden) or _under(path, emptied)]:
            del shown[path]
    shown.update(new)


def _under(path: bytes, roots: set[bytes]) -> bool:
    end = path.rfind(b"/")
    while end > 0:
        if path[:end] in roots:
            return True
        end = path.rfind(b"/", 0, end)
    return False


def _file(toc: Toc, number: int) -> File:
    e = toc.entries
    if int(e.kind[number]) == HARDLINK:
        number = int(e.aux[number])
    kind = int(e.kind[number])
    target: object = toc.target(number) if kind == SYMLINK else int(e.aux[number]) if kind > HARDLINK else b""
    when = (0, 0) if kind == DIRECTORY else (int(e.mtime[number]), int(e.mtime_ns[number]))
    return (
        kind, int(e.size[number]), int(e.mode[number]), int(e.uid[number]), int(e.gid[number]), when, target,
        tuple(toc.xattr_items(number)),
    )  # fmt: skip
