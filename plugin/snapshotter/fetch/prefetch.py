"""Fetching what profiles say (layer/profile.py): frames of an image's layers, in the order in which a container needs them.

The profiles of all layers that begin together are merged by time. A few ranged reads are under way at a time, at the class
PREFETCH, and the next is handed to the fetcher when one has come: so nothing piles up that a reader would have to wait
behind, and whatever changes meanwhile (the disk is full, the cache has no room, the layer is gone) ends it at once.

A frame that is there, or on its way for somebody else, is not asked for again; a reader who needs one that is on its way
raises it to demand. What profiles can cost is so each frame of the layer once, and at most ``image_max`` bytes a start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from weenv.core.aio import Background
from weenv.layer.profile import Run
from weenv.plugin.snapshotter.blobfs.config import PrefetchConfig
from weenv.plugin.snapshotter.blobfs.layers import Layer
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher
from weenv.plugin.snapshotter.fetch.fill import Bucket
from weenv.plugin.snapshotter.fetch.flight import PREFETCH, FutureWaiter

log = logging.getLogger(__name__)

_WINDOW: Final = 4 << 20
"""Compressed bytes within which the order of need gives way to the order of the blob, so that ranges become larger."""
_WINDOW_FRAMES: Final = 1024
"""Frames of such a window at most: others wait for the event loop while it is put in order."""
_RANGE: Final = 1 << 20
"""Compressed bytes of a ranged read."""
_FAILURES: Final = 3
"""Ranged reads that fail before a layer's profile is given up."""
_STARTS: Final = 64
"""Starts under way at a time; who comes then does without."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring frames of the layer at ``place`` in the list of a start."""

    place: int
    first: int
    count: int


def merge(profiles: Sequence[Sequence[Run]]) -> list[tuple[int, Run]]:
    """The runs of several layers in the order of need, each with the place of its layer in ``profiles``."""
    runs = [(place, run) for place, profile in enumerate(profiles) for run in profile]
    return sorted(runs, key=lambda item: item[1].time)  # stable: within one moment as the profiles have them


def pieces(merged: Sequence[tuple[int, Run]], starts: Sequence[Sequence[int]], most: int = 0) -> Iterator[Piece]:
    """What to read, in this order: frames of a few MiB at a time, put together where they are neighbours.

    ``starts`` are the layers' compressed offsets. After ``most`` bytes it ends; 0: no bound.
    """
    window: dict[tuple[int, int], int] = {}
    size = total = 0
    for place, run in merged:
        offsets = starts[place]
        for frame in range(run.first, run.end):
            length = offsets[frame + 1] - offsets[frame]
            total += length
            if most and total > most:
                yield from _joined(window, starts)
                return
            window[place, frame] = len(window)
            size += length
            if size >= _WINDOW or len(window) >= _WINDOW_FRAMES:
                yield from _joined(window, starts)
                window, size = {}, 0
    yield from _joined(window, starts)


def _joined(window: dict[tuple[int, int], int], starts: Sequence[Sequence[int]]) -> list[Piece]:
    found: list[tuple[int, Piece]] = []
    for place, frame in sorted(window):
        rank = window[place, frame]
        if found:
            before, last = found[-1]
            joins = last.place == place and last.first + last.count == frame
            if joins and starts[place][frame + 1] - starts[place][last.first] <= _RANGE:
                found[-1] = min(before, rank), Piece(place, last.first, last.count + 1)
                continue
        found.append((rank, Piece(place, frame, 1)))
    return [piece for _, piece in sorted(found, key=lambda item: item[0])]


class Prefetcher:
    """See the module's text. Belongs to the event loop. ``room`` says whether the cache takes more, ``holds`` whether a layer
    is still the one that readers are served from.
    """

    def __init__(
        self, config: PrefetchConfig, fetcher: Fetcher, room: Callable[[], bool], holds: Callable[[Layer], bool]
    ) -> None:
        self.config = config
        self.begun = 0
        """Starts with something to fetch since the process began."""
        self._fetcher = fetcher
        self._room = room
        self._holds = holds
        self._slots = asyncio.Semaphore(config.ranges)
        self._bucket = Bucket(config.rate)
        self._work = Background()
        self._running = 0

    @property
    def running(self) -> int:
        """Starts whose frames are being fetched."""
        return self._running

    def begin(self, profiles: Sequence[tuple[Layer, Sequence[Run]]]) -> None:
        """Fetch in the background what a start needs."""
        if not self.config.enabled or not any(runs for _, runs in profiles) or self._running >= _STARTS:
            return
        for layer, runs in profiles:
            layer.follow(runs)
        self.begun += 1
        self._running += 1
        self._work.spawn(self._run([layer for layer, _ in profiles], [runs for _, runs in profiles]), "prefetch")

    async def close(self) -> None:
        """Stop."""
        await self._work.close()

    async def _run(self, layers: list[Layer], profiles: list[Sequence[Run]]) -> None:
        began = time.monotonic()
        failed: Counter[int] = Counter()
        why, size = "", 0
        try:
            merged = await asyncio.to_thread(merge, profiles)
            async with asyncio.TaskGroup() as group:
                for piece in pieces(merged, [layer.starts for layer in layers], self.config.image_max):
                    if why := self._ends():
                        break
                    await asyncio.sleep(0)  # there may be many that are there already
                    layer = layers[piece.place]
                    states, flights = layer.presence.states, layer.flights
                    frames = [
                        frame
                        for frame in range(piece.first, piece.first + piece.count)
                        if not states[frame] and frame not in flights
                    ]
                    if not frames or failed[piece.place] >= _FAILURES or not self._holds(layer):
                        continue
                    length = sum(layer.starts[frame + 1] - layer.starts[frame] for frame in frames)
                    await self._slots.acquire()
                    layer.last_used = time.monotonic()  # not to be closed between two pieces
                    size += length
                    group.create_task(self._fetch(layer, frames, piece.place, failed))
                    if delay := self._bucket.delay(length, time.monotonic()):
                        await asyncio.sleep(delay)
        finally:
            self._running -= 1
        fields = {"layers": len(layers), "bytes": size, "seconds": round(time.monotonic() - began, 2)}
        log.info("what the image's profile names was fetched", extra={**fields, **({"ended": why} if why else {})})

    def _ends(self) -> str:
        """Why nothing more is to be fetched ahead; empty where it is."""
        if self._fetcher.shelf.full:
            return "the disk is full"
        return "" if self._room() else "the cache is full"

    async def _fetch(self, layer: Layer, frames: list[int], place: int, failed: Counter[int]) -> None:
        waiter = FutureWaiter()
        try:
            self._fetcher.want(layer, frames, PREFETCH, waiter)
            await waiter.future
        except OSError as error:
            failed[place] += 1
            if failed[place] == _FAILURES:
                log.info("a layer's profile is given up", extra={"layer": layer.name, "error": str(error)})
        finally:
            self._slots.release()
