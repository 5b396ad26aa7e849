"""Keeps the cache within its bounds while blobfs serves: looks, and has cache/keeper.py evict when there is too much."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Any, Final

from weenv.core.errors import WeenvError
from weenv.plugin.snapshotter.blobfs.config import CacheConfig
from weenv.plugin.snapshotter.blobfs.layers import Layer, LayerTable
from weenv.plugin.snapshotter.blobfs.server import Server
from weenv.plugin.snapshotter.cache.evict import Guard
from weenv.plugin.snapshotter.cache.keeper import Evicted, Keeper, Size, Which
from weenv.plugin.snapshotter.cache.prune import Prune
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher

log = logging.getLogger(__name__)

_MEASURE: Final = 5.0
"""Seconds between measurements while nothing is fetched: others use the disk, too."""
_PAUSE: Final = 2.0
"""Seconds before it is tried again where nothing could be evicted."""
_TELL: Final = 10.0
"""Seconds between log lines about evictions, which say what was evicted since the last one."""
_COMPLAIN: Final = 300.0
"""Seconds between log lines that say that the cache cannot be brought within its bounds."""
_AGAIN: Final = 0.2
"""Seconds between attempts at layers that the snapshotter is to mount anew for a prune."""


class Evictor:
    """See the module's text. ``keeper`` does the work; one eviction at a time, in a worker thread."""

    def __init__(self, config: CacheConfig, root: str, table: LayerTable, server: Server, fetcher: Fetcher) -> None:
        self.config = config
        self.keeper = Keeper(root, config, table.open_layers, self._guard)
        self.size: Size | None = None
        """As measured last; None before that."""
        self.stuck = 0.0
        """Since when (``time.monotonic()``) the cache is over its bounds and nothing can be evicted; 0 where it is not."""
        self._server = server
        self._fetcher = fetcher
        self._measured = 0.0
        self._stored = 0
        self._marked = True
        self._inherited = True
        """A former server, or a prune of its that was not ended, may have asked for mounts."""
        self._next_try = 0.0
        self._told = 0.0
        self._complained = 0.0
        self._untold = [0, 0]

    def _guard(self, layer: Layer) -> Guard:
        server = self._server
        return Guard(layer.writing, partial(server.in_use, layer), partial(server.quiet, layer))

    @property
    def estimate(self) -> int:
        """Bytes of data on disk by now: as measured, and what was stored since."""
        return (self.size.data if self.size is not None else 0) + self._fetcher.stats.stored_bytes - self._stored

    def room(self) -> bool:
        """False where what nobody asked for is not to be fetched: it would have to be evicted soon."""
        return self.size is None or self.estimate < self.size.bounds.low

    async def run(self) -> None:
        """Keep watch until cancelled."""
        while True:
            await asyncio.sleep(self.config.interval)
            try:
                await self.look()
            except (OSError, WeenvError) as error:
                log.error("the cache's size cannot be looked at", extra={"error": str(error)})
                await asyncio.sleep(60.0)

    async def look(self) -> None:
        """Measure where that is due, and evict where there is too much. Raises OSError."""
        now = time.monotonic()
        if self.size is None or now - self._measured > _MEASURE or self.estimate > self.size.bounds.high:
            await asyncio.to_thread(self._measure)
        await asyncio.to_thread(self.keeper.tick, self._fetcher.stats.stored_bytes, self.estimate)
        assert self.size is not None
        if self.size.over and now >= self._next_try:
            await asyncio.to_thread(self._evict, self.size)
        elif self._marked and (self.size.room or self._inherited):
            await asyncio.to_thread(self.keeper.withdraw)
            self._marked = False
        self._inherited = False
        self._tell()

    def _measure(self) -> None:
        self._stored = self._fetcher.stats.stored_bytes
        self._measured = time.monotonic()
        self.size = self.keeper.size()

    def _evict(self, size: Size) -> None:
        wanted = size.data - size.bounds.low
        done = self.keeper.evict(wanted, "disk" if size.bounds.disk else "size", to=size.bounds.low)
        self._untold[0] += done.frames
        self._untold[1] += done.size
        self._measure()
        assert self.size is not None
        if not self.size.over:
            self.stuck = 0.0
            return
        asked = self.keeper.ask(done, self.size.data - self.size.bounds.low, done.entries)
        self._marked = self._marked or bool(asked)
        for digest in asked:
            log.info("a complete layer is to be served by blobfs again, so that it can be evicted", extra={"layer": digest})
        if not done.frames:
            self._next_try = time.monotonic() + _PAUSE
            self.stuck = self.stuck or time.monotonic()
            self._complain(done)

    def _complain(self, done: Evicted) -> None:
        now = time.monotonic()
        if now - self.stuck < 2 * _PAUSE or (self._complained and now - self._complained < _COMPLAIN):
            return
        self._complained = now
        assert self.size is not None
        reasons = sorted({each.why for each in done.layers.values() if each.why})
        hint = {
            "unsupported": "put the root on a file system that punches holes, such as ext4 or xfs",
            "mounted": "it goes when the containers end that use its layers, which are complete; or raise [blobfs.cache] high",
            "disk": "look at the disk",
        }.get(reasons[0] if reasons else "", "raise [blobfs.cache] high")
        fields = {"bytes": self.size.data, "high": self.size.bounds.high, "reasons": ",".join(reasons) or "nothing left"}
        log.warning("the cache is larger than it may be and nothing can be evicted", extra={**fields, "hint": hint})

    def _tell(self) -> None:
        frames, size = self._untold
        if not frames or time.monotonic() - self._told < _TELL:
            return
        self._told = time.monotonic()
        self._untold = [0, 0]
        assert self.size is not None
        bounds = self.size.bounds
        fields = {"frames": frames, "bytes": size, "data": self.size.data, "high": bounds.high, "low": bounds.low}
        log.info("frames were evicted", extra={**fields, "reason": "disk" if bounds.disk else "size"})

    async def prune(self, which: Which, to: int | None, *, dry: bool) -> dict[str, Any]:
        """``weenv cache prune``, which may take some seconds more than the punching."""
        work = await asyncio.to_thread(Prune, self.keeper, which, to, dry=dry, served=True)
        try:
            more = await asyncio.to_thread(work.begin)
            while more:
                await asyncio.sleep(_AGAIN)
                more = await asyncio.to_thread(work.again)
        finally:
            work.end()
        await asyncio.to_thread(self._measure)
        assert self.size is not None
        done = work.answer(self.size.data)
        if not dry:
            fields = {"frames": done["frames"], "bytes": done["bytes"], "layers": len(done["layers"])}
            log.info("the cache was pruned", extra=fields)
        return done

    def status(self) -> dict[str, Any]:
        """For ``weenv status`` and ``weenv cache ls``: sizes in bytes."""
        bounds = self.size.bounds if self.size is not None and self.size.bounds.bounded else None
        return {
            "data": self.estimate,
            "high": bounds.high if bounds is not None else None,
            "low": bounds.low if bounds is not None else None,
            "bound_by": None if bounds is None else "disk" if bounds.disk else "size",
            "evicted_frames": dict(self.keeper.evicted_frames),
            "evicted_bytes": dict(self.keeper.evicted_bytes),
            "stuck": bool(self.stuck),
        }
