"""What this node has recorded of layers' reads, for commands: no daemon has to run."""

from __future__ import annotations

import os
from dataclasses import dataclass

from weenv.core.errors import FormatError
from weenv.layer.toc import Frames
from weenv.layer.verify import verify_frames
from weenv.plugin.snapshotter.cache import reads
from weenv.plugin.snapshotter.cache.present import is_complete
from weenv.plugin.snapshotter.layerdir import LayerDirs


@dataclass(frozen=True, slots=True)
class Recorded:
    """One layer on this node. ``needed`` is (time in units of 100 ms since 1970, frame), in the order of first use."""

    frames: Frames
    needed: tuple[tuple[int, int], ...]
    complete: bool
    """All of it is local: what containers that start now read of it is not seen."""


def recorded(root: str, digest: str) -> Recorded | None:
    """What is known of a layer here; None where it is not on this node, or in another format. Raises OSError, FormatError."""
    dirs = LayerDirs(root)
    if not dirs.exists(digest):
        return None
    source = dirs.source(digest)
    if source.foreign is not None:
        return None
    path = dirs.path(digest)
    with open(os.path.join(path, "toc"), "rb") as file:
        index = verify_frames(file.read(source.toc_length + 1), source.descriptor())
    return Recorded(index.frames, tuple(reads.load(path, len(index.frames))), is_complete(path))


def records(root: str, layers: list[str]) -> dict[str, tuple[tuple[int, int], ...]]:
    """The records of those of ``layers`` that have any, by digest. Raises OSError; a damaged layer has none."""
    found: dict[str, tuple[tuple[int, int], ...]] = {}
    for digest in dict.fromkeys(layers):
        try:
            one = recorded(root, digest)
        except (FormatError, FileNotFoundError):
            continue
        if one is not None and one.needed:
            found[digest] = one.needed
    return found
