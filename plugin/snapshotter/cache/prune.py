"""What ``weenv cache prune`` does: evict what is asked for, complete layers that the kernel reads by itself included.

Those cannot be punched as they are mounted (ADR 0008). The snapshotter is asked to mount them over blobfs again
(:meth:`Keeper.ask`), and each goes as soon as nobody reads it without us. One that does not go, because a container that was
started before has the plain file still, is the kernel's again when the prune is over. A layer of the FUSE plane is never
mounted anew: its server sees by itself that it is to let go.

Each round looks once at what layers have on disk: at all of them where the cache is to have a size, else at those in question.

Why a layer, or a part of it, stays (``why`` of its row):

============  ==========================================================================================================
container     it was mounted anew, and something that began before, such as a running container, has the plain file still
unanswered    the snapshotter did not mount it anew
alone         no blobfs runs that it could be mounted over
age           only what is old was asked for, and nobody knows what the kernel has read
mounted       something else has the file open
busy          readers wait for it
disk          its marks cannot be written
unsupported   the file system punches no holes
============  ==========================================================================================================
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any, Final

from weenv.core import digest as digests
from weenv.core.errors import InvalidRequest
from weenv.core.process import holder_of
from weenv.plugin.snapshotter.cache.keeper import ALL, Entry, Evicted, Keeper, Which, unmatched
from weenv.plugin.snapshotter.cache.present import is_complete
from weenv.plugin.snapshotter.layerdir import EVICT
from weenv.plugin.snapshotter.mounts import mounts_below
from weenv.plugin.snapshotter.planes.base import COMPLETE

_LET_GO: Final = 2.5
"""Seconds in which who may read a complete layer through blobfs again lets go of it: the FUSE plane's servers look every 2."""
_ANSWER: Final = 20.0
"""Seconds for the snapshotter to mount a layer anew: it looks every three."""

_ALL: Final = 1 << 62
"""Bytes."""


class Prune:
    """One ``weenv cache prune``. ``to``: stop where the cache is no larger than so many bytes; ``dry``: only say what would go.

    ``served``: blobfs runs, so layers can be mounted over it. Blocking; :meth:`end` has to be called in any case.
    """

    def __init__(self, keeper: Keeper, which: Which, to: int | None, *, dry: bool, served: bool) -> None:
        self.done = Evicted()
        self._keeper = keeper
        self._which = which
        self._dry = dry
        self._served = served
        self._before = 0
        self._to = to
        self._left = _ALL
        """Bytes that are to go still."""
        self._patience = 0.0
        self._held: list[str] = []
        self._by_servers: set[str] = set()
        """Those of them that processes of ours read for the kernel (the FUSE plane)."""
        self._asked_at: dict[str, float] = {}
        self._moved_at: dict[str, float] = {}
        self._ours: set[str] = set()

    def begin(self) -> bool:
        """Evict what can go at once. True: :meth:`again` is to be called, for complete layers are still to be had.

        Raises :class:`InvalidRequest` where no layer is meant.
        """
        keeper, which = self._keeper, self._which
        if unknown := unmatched(which.prefixes, keeper.digests()):
            raise InvalidRequest(f"no layer here begins with {unknown[0]}", hint="see weenv cache ls")
        self.done = keeper.evict(_ALL, "prune", which, to=self._to or 0, dry=self._dry)
        self._before = self.done.data
        self._count(self.done)
        known = keeper.modes()
        self._held = [
            digest
            for digest, each in self.done.layers.items()
            if each.why == "mounted" and digest in known and is_complete(keeper.dirs.path(digest))
        ]
        if which.before or not self._served:
            for digest in self._held:
                self.done.layers[digest].why = "age" if which.before else "alone"
            return False
        if self._dry:
            for digest in self._held:
                if self._left > 0:
                    self.done.add(digest, self.done.refused[digest])
                    self._left -= self.done.refused[digest].size
            return False
        if self._held:
            mounted = mounts_below(os.path.join(keeper.root, "m"))
            for digest in self._held:
                types = {mounted[point].fstype for name in known[digest] if (point := f"{keeper.root}/m/{name}") in mounted}
                if types and "erofs" not in types:
                    self._by_servers.add(digest)
        self._patience = _ANSWER if holder_of(keeper.root)[0] else _LET_GO  # servers of the FUSE plane need no snapshotter
        return self._ask(self.done.entries)

    def _count(self, done: Evicted) -> None:
        """There are so many fewer; others may have evicted meanwhile, too."""
        excess = done.data - self._to if self._to is not None else _ALL
        self._left = max(0, min(self._left, excess) - done.size)

    def _ask(self, entries: Sequence[Entry]) -> bool:
        """Whether there is anything to wait for; asks for what is to be mounted anew."""
        if self._left <= 0:
            return False
        held = Evicted({digest: self.done.layers[digest] for digest in self._held})
        self._ours.update(self._keeper.ask(held, self._left, entries))
        return bool(self._waiting())

    def _waiting(self) -> list[str]:
        path = self._keeper.dirs.file
        return [d for d in self._held if self.done.layers[d].why == "mounted" and os.path.exists(path(d, EVICT))]

    def again(self) -> bool:
        """Evict of those asked for what can go by now; True: not all have answered. To be called a few times a second."""
        waiting = self._waiting()  # the bounds may have withdrawn the marks
        held = [digest for digest in self._held if self.done.layers[digest].why == "mounted"]
        which, look = (Which(tuple(map(digests.hex_of, each))) for each in (waiting, held))
        look = look if self._to is None else ALL
        later = self._keeper.evict(self._left if waiting else 0, "prune", which, to=self._to or 0, look=look)
        self.done.add_later(later)
        self._count(later)
        now, modes = time.monotonic(), self._keeper.modes()
        for digest in waiting:
            each = self.done.layers[digest]
            if each.why != "mounted":
                continue
            if digest in self._by_servers:
                if now - self._asked_at.setdefault(digest, now) > _LET_GO:
                    self._held.remove(digest)  # what has it open is none of ours
                continue
            moved = COMPLETE not in modes.get(digest, {}).values()
            if moved and now - self._moved_at.setdefault(digest, now) > _LET_GO:
                each.why = "container"
            elif not moved and now - self._asked_at.setdefault(digest, now) > self._patience:
                each.why = "unanswered"
        return self._ask(later.entries)

    def end(self) -> None:
        """What has not gone may be read by the kernel itself again."""
        for digest in self._ours:
            with contextlib.suppress(OSError):  # blobfs has taken it back, or the layer is gone
                os.unlink(self._keeper.dirs.file(digest, EVICT))

    def answer(self, data: int) -> dict[str, Any]:
        """What was done, for the command: bytes and frames, and a row for each layer that was looked at. ``data``: the cache's
        bytes by now."""
        rows = [
            {"digest": digest, "frames": each.frames, "bytes": each.size, "why": each.why}
            for digest, each in self.done.layers.items()
            if each.frames or each.why != "mounted" or digest not in self._held  # that many need not go
        ]
        return {
            "dry_run": self._dry,
            "frames": self.done.frames,
            "bytes": self.done.size,
            "data_before": self._before,
            "data_after": self._before if self._dry else data,
            "layers": rows,
        }


def prune_unserved(keeper: Keeper, which: Which, to: int | None, *, dry: bool) -> dict[str, Any]:
    """A prune where no blobfs runs; its answer."""
    work = Prune(keeper, which, to, dry=dry, served=False)
    try:
        work.begin()
        return work.answer(keeper.size().data)
    finally:
        work.end()
