"""Tells blobfs that an image's first container begins, so that it fetches what the image's profile says.

A pull stays metadata only; a container's writable snapshot is the first sign that data will be needed. Once for each lazy
layer as long as this process lives: what is fetched stays. Nobody waits for it, and a blobfs that does not answer is told at
the next start.
"""

from __future__ import annotations

import asyncio
import logging

from weenv.core.aio import Background
from weenv.core.errors import WeenvError
from weenv.plugin.snapshotter.blobfs.ask import ask
from weenv.plugin.snapshotter.layerdir import LayerDirs
from weenv.plugin.snapshotter.metastore import Metastore

log = logging.getLogger(__name__)


class Starts:
    """See the module's text. ``socket`` is blobfs's control socket. Belongs to one event loop."""

    def __init__(self, store: Metastore, dirs: LayerDirs, socket: str, background: Background) -> None:
        self._store = store
        self._dirs = dirs
        self._socket = socket
        self._background = background
        self._told: set[int] = set()
        self._one = asyncio.Semaphore(1)  # a blobfs that takes its time has one of our threads, and not all of them

    def begin(self, layer_ids: frozenset[int]) -> None:
        """A container begins on these layers (ids of table ``layers``). Does not block."""
        if layer_ids <= self._told:
            return
        fresh = sorted(layer_ids - self._told)
        self._told.update(fresh)
        self._background.spawn(self._tell(fresh), "prefetch")

    async def _tell(self, layer_ids: list[int]) -> None:
        layers = [layer for number in layer_ids if (layer := self._store.layer_by_id(number)) is not None]
        try:
            async with self._one:
                if await asyncio.to_thread(self._ask, list(dict.fromkeys(layer.digest for layer in layers))):
                    return
        except WeenvError as error:
            log.info("blobfs was not told that a container begins: %s", error)
        self._told.difference_update(layer_ids)

    def _ask(self, layers: list[str]) -> bool:
        """Tell blobfs of those that have a profile; False where none runs. Raises WeenvError."""
        profiled = [digest for digest in layers if self._dirs.prefetch(digest)]
        return not profiled or ask(self._socket, {"op": "start", "layers": profiled}) is not None
