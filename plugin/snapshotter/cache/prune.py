"""What ``weenv cache prune`` does: evict what is asked for, complete layers that the kernel reads by itself included.

Those cannot be punched as they are mounted (ADR 0008). The snapshotter is asked to mount them over blobfs again
(:meth:`Keeper.ask`), and each goes as soon as nobody reads it without us. One that does not go, because a container that was
started before has the plain file still, is the kernel's again when the prune is over.

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
from typing import Any, Final

from weenv.core import digest as digests
from weenv.core.process import holder_of
from weenv.plugin.snapshotter.cache.keeper import Evicted, Keeper, Which
from weenv.plugin.snapshotter.cache.present import is_complete
from weenv.plugin.snapshotter.layerdir import EVICT
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
        self._before = keeper.size().data
        self._to = to or 0
        self._wanted = max(0, self._before - to) if to is not None else _ALL
        self._patience = 0.0
        self._held: list[str] = []
        self._asked_at: dict[str, float] = {}
        self._moved_at: dict[str, float] = {}
        self._ours: set[str] = set()

    def begin(self) -> bool:
        """Evict what can go at once. True: :meth:`again` is to be called, for complete layers are still to be had."""
        keeper, which = self._keeper, self._which
        self.done = keeper.evict(self._wanted, "prune", which, to=self._to, dry=self._dry)
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
                if self.done.size < self._wanted:
                    self.done.add(digest, self.done.refused[digest])
            return False
        self._patience = _ANSWER if holder_of(keeper.root)[0] else _LET_GO  # servers of the FUSE plane need no snapshotter
        return self._ask()

    def _look(self) -> None:
        """Have no more wanted than is too much by now: another prune, or the bounds, may have evicted meanwhile."""
        if self._wanted < _ALL:
            self._wanted = min(self._wanted, self.done.size + max(0, self._keeper.size().data - self._to))

    def _ask(self) -> bool:
        """Whether there is anything to wait for; asks for what is to be mounted anew."""
        self._look()
        if self.done.size >= self._wanted:
            return False
        held = Evicted({digest: self.done.layers[digest] for digest in self._held})
        self._ours.update(self._keeper.ask(held, self._wanted - self.done.size))
        return bool(self._waiting())

    def _waiting(self) -> list[str]:
        path = self._keeper.dirs.file
        return [d for d in self._held if self.done.layers[d].why == "mounted" and os.path.exists(path(d, EVICT))]

    def again(self) -> bool:
        """Evict of those asked for what can go by now; True: not all have answered. To be called a few times a second."""
        waiting = self._waiting()
        if not waiting:  # the bounds have withdrawn the marks
            return self._ask()
        which = Which(tuple(map(digests.hex_of, waiting)))
        self.done.add_later(self._keeper.evict(self._wanted - self.done.size, "prune", which, to=self._to))
        now, modes = time.monotonic(), self._keeper.modes()
        for digest in waiting:
            each = self.done.layers[digest]
            if each.why != "mounted":
                continue
            moved = COMPLETE not in modes.get(digest, ())
            if moved and now - self._moved_at.setdefault(digest, now) > _LET_GO:
                each.why = "container"
            elif not moved and now - self._asked_at.setdefault(digest, now) > self._patience:
                each.why = "unanswered"
        return self._ask()

    def end(self) -> None:
        """What has not gone may be read by the kernel itself again."""
        for digest in self._ours:
            with contextlib.suppress(OSError):
                os.unlink(self._keeper.dirs.file(digest, EVICT))

    def answer(self) -> dict[str, Any]:
        """What was done, for the command: bytes and frames, and a row for each layer that was looked at."""
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
            "data_after": self._before if self._dry else self._keeper.size().data,
            "layers": rows,
        }


def prune_unserved(keeper: Keeper, which: Which, to: int | None, *, dry: bool) -> dict[str, Any]:
    """A prune where no blobfs runs; its answer."""
    work = Prune(keeper, which, to, dry=dry, served=False)
    try:
        work.begin()
        return work.answer()
    finally:
        work.end()
