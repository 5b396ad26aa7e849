"""What this node has recorded of layers' reads, for commands: no daemon has to run."""

from __future__ import annotations

import os
from collections.abc import Mapping
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


def look(root: str, layers: list[str]) -> dict[str, Recorded | FormatError]:
    """Those of ``layers`` that are on this node, by digest; of a damaged one what is wrong with it. Raises OSError."""
    found: dict[str, Recorded | FormatError] = {}
    for digest in dict.fromkeys(layers):
        try:
            one = recorded(root, digest)
        except FileNotFoundError:  # it is just being removed
            continue
        except FormatError as error:
            found[digest] = error
            continue
        if one is not None:
            found[digest] = one
    return found


def needs(looked: Mapping[str, Recorded | FormatError]) -> dict[str, tuple[tuple[int, int], ...]]:
    """The records among :func:`look`'s, of the layers that have any."""
    return {digest: one.needed for digest, one in looked.items() if isinstance(one, Recorded) and one.needed}


def records(root: str, layers: list[str]) -> dict[str, tuple[tuple[int, int], ...]]:
    """The records of those of ``layers`` that have any, by digest. Raises OSError; a damaged layer has none."""
    return needs(look(root, layers))
