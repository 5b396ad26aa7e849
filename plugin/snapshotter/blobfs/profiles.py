"""Profiles as the control socket has them: a container begins, fetch ahead; forget what was recorded.

A layer's profile is what its image's manifest says (layer/profile.py), which the snapshotter has put into the layer directory
as it came. Here it is looked at for the first time, against the layer's own frames. One that is no profile of these is told
of once and is as none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

from weenv.core import digest as digests
from weenv.core.errors import FormatError, InvalidRequest, WeenvError
from weenv.layer.profile import Run, decode
from weenv.plugin.snapshotter.blobfs.layers import Layer, LayerTable
from weenv.plugin.snapshotter.cache.reads import forget
from weenv.plugin.snapshotter.fetch.prefetch import Prefetcher
from weenv.plugin.snapshotter.layerdir import LayerDirs

log = logging.getLogger(__name__)

_LAYERS_MAX: Final = 1024
_TOLD_MAX: Final = 1024


class Profiles:
    """See the module's text."""

    def __init__(self, dirs: LayerDirs, table: LayerTable, prefetcher: Prefetcher) -> None:
        self._dirs = dirs
        self._table = table
        self._prefetcher = prefetcher
        self._told: set[tuple[str, str]] = set()

    async def begin(self, layers: object) -> dict[str, Any]:
        """A container of an image with these layers begins. Raises InvalidRequest."""
        names = _digests(layers)
        if not self._prefetcher.config.enabled:
            return {"layers": 0, "frames": 0}
        found = await asyncio.to_thread(lambda: [each for name in names if (each := self._profile(name)) is not None])
        self._prefetcher.begin(found)
        return {"layers": len(found), "frames": sum(run.count for _, runs in found for run in runs)}

    async def forget(self, layers: object) -> dict[str, Any]:
        """Drop what was recorded of these layers. Raises InvalidRequest, OSError."""
        names = _digests(layers)
        return {"frames": await asyncio.to_thread(lambda: sum(map(self._forget, names)))}

    def _profile(self, digest: str) -> tuple[Layer, Sequence[Run]] | None:
        """The layer and what to fetch of it; None where it has no profile, or none that can be used."""
        value = self._dirs.prefetch(digest)
        if not value or self._table.memory() > self._table.memory_max:  # to open another would have readers wait
            return None
        try:
            node = self._table.lookup(digests.hex_of(digest).encode())
            layer = node.layer if node is not None else None
        except (WeenvError, OSError) as error:
            log.info("a layer with a profile cannot be opened", extra={"layer": digest, "error": str(error)})
            return None
        try:
            return None if layer is None else (layer, decode(value, len(layer.presence)))
        except FormatError as error:
            if (digest, value) not in self._told and len(self._told) < _TOLD_MAX:
                self._told.add((digest, value))
                fields = {"layer": digest, "error": str(error), "hint": "whoever published the image must make it anew"}
                log.warning("a layer's profile is not used", extra=fields)
        return None

    def _forget(self, digest: str) -> int:
        for layer in self._table.open_layers():
            if layer.digest == digest:
                count = layer.reads.forget()
                return count if layer.reads.recording else max(count, forget(self._dirs.path(digest)))
        return forget(self._dirs.path(digest))


def _digests(raw: object) -> list[str]:
    if not isinstance(raw, list) or len(raw) > _LAYERS_MAX or not all(isinstance(each, str) for each in raw):
        raise InvalidRequest("layers must be a list of digests")
    if wrong := next((each for each in raw if not digests.is_digest(each)), None):
        raise InvalidRequest(f"not a digest: {wrong[:80]!r}")
    return list(dict.fromkeys(raw))
