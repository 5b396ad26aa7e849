"""Where several layers of a stack have the same path, and which of them is seen. Pure.

The rules are overlayfs's: the topmost layer that has a path wins; a whiteout hides what is below it, an opaque directory
hides all that lower layers have under its path; directories of several layers are merged, so they are no conflict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weenv.layer.toc import DIRECTORY, FLAG_OPAQUE, FLAG_WHITEOUT, Toc

SHOWN = 100_000
"""Conflicts of one stack that are listed at most."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """A path that several layers have: ``layers`` bottom to top (numbers in the stack); the last one is seen.

    ``what`` is ``replaced``, ``deleted`` (the last layer is a whiteout) or ``hidden`` (an opaque directory of it).
    """

    path: bytes
    layers: tuple[int, ...]
    what: str


def paths_of(toc: Toc) -> list[bytes]:
    """The path of every entry, in the TOC's order; the root's is empty."""
    entries, pool = toc.entries, toc.pool
    paths: list[bytes] = [b""]
    rows = zip(entries.parent[1:].tolist(), entries.name_off[1:].tolist(), entries.name_len[1:].tolist(), strict=True)
    for parent, offset, length in rows:
        name = pool[offset : offset + length]
        paths.append(paths[parent] + b"/" + name if parent else name)
    return paths


def find_conflicts(tocs: Sequence[Toc]) -> list[Conflict]:
    """All conflicts of a stack, sorted by path; where a path changes hands several times, the last change tells ``what``."""
    files: dict[bytes, tuple[int, ...]] = {}
    """Non-directories that are seen so far, and the layers that have them."""
    directories: set[bytes] = set()
    found: dict[bytes, Conflict] = {}

    def note(path: bytes, number: int, what: str) -> None:
        if path in found or len(found) < SHOWN:
            found[path] = Conflict(path, (*files[path], number), what)

    for number, toc in enumerate(tocs):
        rows = list(zip(paths_of(toc), toc.entries.kind.tolist(), toc.entries.flags.tolist(), strict=True))
        hiding = tuple(
            path + b"/" if path else b""
            for path, kind, flag in rows
            if flag & FLAG_OPAQUE or (kind != DIRECTORY and path in directories)
        )
        if hiding:
            for path in [path for path in files if path.startswith(hiding)]:
                note(path, number, "hidden")
                del files[path]
            directories = {path for path in directories if not path.startswith(hiding)}
        for path, kind, flag in rows:
            if kind == DIRECTORY:
                if path in files:
                    note(path, number, "replaced")
                    del files[path]
                directories.add(path)
            elif flag & FLAG_WHITEOUT:
                directories.discard(path)
                if path in files:
                    note(path, number, "deleted")
                    del files[path]
            else:
                directories.discard(path)
                if path in files:
                    note(path, number, "replaced")
                files[path] = (*files.get(path, ()), number)
    return sorted(found.values(), key=lambda conflict: conflict.path)
