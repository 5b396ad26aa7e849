"""Fetches again what the disk has lost of a layer's tail, while the requests that need it wait.

The tail (``toc``) is the only file of a layer directory that blobfs cannot do without and cannot begin anew: it holds the
digests of everything else. It is checked against its own digest whenever a layer is opened. One that fails is kept as
``toc.damaged`` for whoever wants to look at it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Final

from weenv.core.atomic import write_atomic
from weenv.core.errors import UnavailableError, WeenvError
from weenv.layer.foreign.formats import ForeignLayer
from weenv.layer.foreign.tail import make_tail
from weenv.layer.verify import LayerDescriptor, verify_tail_bytes
from weenv.plugin.snapshotter.blobfs.layers import DamagedTail
from weenv.plugin.snapshotter.foreign import fetch_toc
from weenv.plugin.snapshotter.layerdir import LayerSource, Origin
from weenv.registry.source import BlobSource, read_checked

log = logging.getLogger(__name__)

_PAUSE: Final = 5.0
"""Seconds after a failure during which nothing is tried again for the same layer."""


class TailRepair:
    """One attempt at a time for each layer, however many requests wait for it; all tails one after the other.

    ``resume`` is called in a thread with each request's ``unique`` once its layer has been dealt with, for better or
    worse. To be used in one event loop.
    """

    def __init__(
        self,
        open_sources: Callable[[LayerSource, Sequence[Origin]], list[BlobSource]],
        resume: Callable[[int], None],
        deadline: float,
    ) -> None:
        self.mended = 0
        self.failed = 0
        self._open_sources = open_sources
        self._resume = resume
        self._deadline = deadline
        self._waiting: dict[str, list[int]] = {}
        self._failed_until: dict[str, float] = {}
        self._one = asyncio.Semaphore(1)  # a tail may have half a gigabyte

    def submit(self, damage: DamagedTail, unique: int) -> bool:
        """Request ``unique`` needs the tail of this layer. True: call :meth:`run` for it; False: somebody is at it."""
        waiting = self._waiting.get(damage.path)
        if waiting is not None:
            waiting.append(unique)
            return False
        self._waiting[damage.path] = [unique]
        return True

    async def run(self, damage: DamagedTail) -> None:
        """Fetch, check and store one layer's tail, then let the requests go on."""
        try:
            if time.monotonic() >= self._failed_until.get(damage.path, 0.0):
                await self._mend(damage)
        finally:
            for unique in self._waiting.pop(damage.path):
                await asyncio.to_thread(self._resume, unique)

    async def _mend(self, damage: DamagedTail) -> None:
        fields = {"layer": damage.source.digest, "error": str(damage)}
        log.error("a stored tail is damaged: fetching it again", extra={**fields, "hint": "look at the disk"})
        try:
            async with asyncio.timeout(self._deadline), self._one:
                tail = await self._fetch(damage.source)
                await asyncio.to_thread(_replace, damage.path, tail)
        except (WeenvError, OSError, TimeoutError) as error:
            self.failed += 1
            if len(self._failed_until) > 1000:
                self._failed_until.clear()
            self._failed_until[damage.path] = time.monotonic() + _PAUSE
            hint = "readers get EIO until a source in source.json has it; or remove the image and pull it again"
            reason = str(error) or f"no answer in {self._deadline:g} s"
            log.error("a damaged tail cannot be replaced", extra={**fields, "error": reason, "hint": hint})
            return
        self.mended += 1
        log.warning("a damaged tail has been replaced", extra={"layer": damage.source.digest})

    async def _fetch(self, source: LayerSource) -> bytes:
        descriptor = source.descriptor()
        failure: WeenvError = UnavailableError("source.json names no place that can be read")
        sources = self._open_sources(source, source.origins)
        try:
            for one in sources:
                try:
                    if source.foreign is not None:
                        return await self._make(one, source.foreign, descriptor)
                    return await read_checked(
                        one, source.toc_offset, source.toc_length, lambda tail: verify_tail_bytes(tail, descriptor),
                        deadline=self._deadline,
                    )  # fmt: skip
                except WeenvError as error:
                    failure = error
        finally:
            for one in sources:
                await one.close()
        raise failure

    async def _make(self, one: BlobSource, layer: ForeignLayer, descriptor: LayerDescriptor) -> bytes:
        """A tail that was made of another format's TOC, made again; it is the same unless another version made it."""
        offset, toc = await fetch_toc(one, layer, deadline=self._deadline)
        _, _, tail = await asyncio.to_thread(make_tail, layer, toc, offset)
        verify_tail_bytes(tail, descriptor)
        return tail


def _replace(path: str, tail: bytes) -> None:
    toc, damaged = os.path.join(path, "toc"), os.path.join(path, "toc.damaged")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(damaged)
    with contextlib.suppress(OSError):
        os.link(toc, damaged)  # no moment without a ``toc``
    write_atomic(toc, tail)
