"""Fetches again what the disk has lost of a layer's tail, while the requests that need it wait.

The tail (``toc``) is the only file of a layer directory that blobfs cannot do without and cannot begin anew: it holds the
digests of everything else. It is checked against its own digest whenever a layer is opened. One that fails is kept as
``toc.damaged`` for whoever wants to look at it.

A tail that was made of another format's TOC is made again, by a process of its own (builder.py): that TOC is a stranger's, and
nothing of it is looked at here. It has to come out as it was: the mounted metadata points into the stream that it describes.
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
from weenv.core.errors import UnavailableError, UnsupportedError, WeenvError
from weenv.layer.foreign.formats import ForeignLayer
from weenv.layer.verify import verify_tail_bytes
from weenv.plugin.snapshotter.blobfs.layers import DamagedTail
from weenv.plugin.snapshotter.builder import translate_alone
from weenv.plugin.snapshotter.foreign import made_tail
from weenv.plugin.snapshotter.layerdir import LayerDirs, LayerSource, Origin
from weenv.registry.source import BlobSource, read_checked

log = logging.getLogger(__name__)

_PAUSE: Final = 5.0
"""Seconds after a failure during which nothing is tried again for the same layer."""
_HOPELESS: Final = 300.0
"""... where it takes another version of this program."""


class TailRepair:
    """One attempt at a time for each layer, however many requests wait for it; all tails one after the other.

    ``resume`` is called in a thread with each request's ``unique`` once its layer has been dealt with, for better or
    worse. To be used in one event loop.
    """

    def __init__(
        self,
        dirs: LayerDirs,
        open_sources: Callable[[LayerSource, Sequence[Origin]], list[BlobSource]],
        resume: Callable[[int], None],
        deadline: float,
    ) -> None:
        self.mended = 0
        self.failed = 0
        self._dirs = dirs
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
                await self._fetch(damage.source, damage.path)
        except (WeenvError, OSError, TimeoutError) as error:
            self.failed += 1
            if len(self._failed_until) > 1000:
                self._failed_until.clear()
            hopeless = isinstance(error, UnsupportedError)
            self._failed_until[damage.path] = time.monotonic() + (_HOPELESS if hopeless else _PAUSE)
            hint = "readers get EIO until a source in source.json has it; or remove the image and pull it again"
            if hopeless and isinstance(error, WeenvError):
                hint = error.hint or hint
            reason = str(error) or f"no answer in {self._deadline:g} s"
            log.error("a damaged tail cannot be replaced", extra={**fields, "error": reason, "hint": hint})
            return
        self.mended += 1
        log.warning("a damaged tail has been replaced", extra={"layer": damage.source.digest})

    async def _fetch(self, source: LayerSource, path: str) -> None:
        descriptor = source.descriptor()
        failure: WeenvError = UnavailableError("source.json names no place that can be read")
        sources = self._open_sources(source, source.origins)
        try:
            for one in sources:
                try:
                    if source.foreign is not None:
                        await self._make(one, source.foreign, source, path)
                        return
                    tail = await read_checked(
                        one, source.toc_offset, source.toc_length, lambda tail: verify_tail_bytes(tail, descriptor),
                        deadline=self._deadline,
                    )  # fmt: skip
                    await asyncio.to_thread(_replace, path, tail)
                    return
                except UnsupportedError:
                    raise  # whichever source it is from
                except WeenvError as error:
                    failure = error
        finally:
            for one in sources:
                await one.close()
        raise failure

    async def _make(self, one: BlobSource, layer: ForeignLayer, known: LayerSource, path: str) -> None:
        """A tail that was made of another format's TOC, made again."""
        async with made_tail(one, layer, [], self._dirs, translate_alone, deadline=self._deadline) as (made, directory):
            if (made.toc_offset, made.toc_digest) != (known.toc_offset, known.toc_digest):
                raise UnsupportedError(
                    "the tail was made by another version of weenv or of its compression library, and this one makes another",
                    hint="remove the image and pull it again",
                )
            await asyncio.to_thread(_put_aside, path)
            await asyncio.to_thread(os.rename, os.path.join(directory, "toc"), os.path.join(path, "toc"))


def _replace(path: str, tail: bytes) -> None:
    _put_aside(path)
    write_atomic(os.path.join(path, "toc"), tail)


def _put_aside(path: str) -> None:
    toc, damaged = os.path.join(path, "toc"), os.path.join(path, "toc.damaged")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(damaged)
    with contextlib.suppress(OSError):  # a copy for whoever wants to look at it; the mending goes on
        os.link(toc, damaged)  # no moment without a ``toc``
