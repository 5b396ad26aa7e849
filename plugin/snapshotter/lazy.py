"""Puts the lazy side together: plane, builder, registry client, layers, resolver."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Collection, Mapping, Sequence

from weenv.core.aio import Background
from weenv.core.errors import MountError
from weenv.plugin.containerd.types import Usage
from weenv.plugin.snapshotter.builder import Builder
from weenv.plugin.snapshotter.config import SnapshotterConfig
from weenv.plugin.snapshotter.layerdir import LayerDirs
from weenv.plugin.snapshotter.layers import Layers
from weenv.plugin.snapshotter.lazylayers import LazyLayers, NoLazyLayers
from weenv.plugin.snapshotter.metastore import Metastore
from weenv.plugin.snapshotter.metrics import Metrics
from weenv.plugin.snapshotter.planes.base import Plane
from weenv.plugin.snapshotter.planes.choose import FUSE, choose
from weenv.plugin.snapshotter.planes.erofs import ErofsPlane
from weenv.plugin.snapshotter.planes.fuse import FusePlane
from weenv.plugin.snapshotter.resolve import Resolver
from weenv.plugin.snapshotter.starts import Starts
from weenv.registry.client import RegistryClient

log = logging.getLogger(__name__)


class Lazy:
    """:class:`~weenv.plugin.snapshotter.lazylayers.LazyLayers` out of layers and resolver."""

    def __init__(self, layers: Layers, resolver: Resolver, starts: Starts) -> None:
        self._layers = layers
        self._resolver = resolver
        self._starts = starts

    def attached(self, layer_ids: Collection[int]) -> bool:
        """See Layers."""
        return self._layers.attached(layer_ids)

    async def ensure(self, layer_ids: Collection[int]) -> None:
        """See Layers."""
        await self._layers.ensure(layer_ids)

    def path(self, layer_id: int) -> str:
        """See Layers."""
        return self._layers.path(layer_id)

    def begins(self, layer_ids: frozenset[int]) -> None:
        """See Starts."""
        self._starts.begin(layer_ids)

    def usage(self, layer_id: int) -> Usage:
        """See Layers."""
        return self._layers.usage(layer_id)

    def resolve(
        self, labels: Mapping[str, str], key: str, parent_ref: str, lowers: Sequence[str]
    ) -> contextlib.AbstractAsyncContextManager[int | str | None]:
        """See Resolver."""
        return self._resolver.resolve(labels, key, parent_ref, lowers)

    async def sweep(self) -> None:
        """See Layers."""
        await self._layers.sweep()


async def _open_plane(
    config: SnapshotterConfig, dirs: LayerDirs, builder: Builder, stack: contextlib.AsyncExitStack
) -> Plane:
    """The plane that this node uses, closed with ``stack``. Raises MountError where there is none."""
    choice = await asyncio.to_thread(choose, config.plane, config.root)
    if choice.error is not None:
        raise choice.error
    plane: Plane
    if choice.name == FUSE:
        plane = FusePlane(dirs, config.blobs, f"{os.path.dirname(config.socket)}/layers.sock", builder)
    else:
        plane = ErofsPlane(dirs, config.blobs, builder)
    stack.callback(plane.close)
    await plane.probe()
    log.info("layers are mounted by plane %s", plane.name, extra={"why": choice.why})
    return plane


@contextlib.asynccontextmanager
async def open_layers(
    config: SnapshotterConfig, store: Metastore, metrics: Metrics, background: Background
) -> AsyncIterator[LazyLayers]:
    """Lazy layers for the length of the block; plain ones, loudly, where the kernel has no plane for them."""
    dirs = LayerDirs(config.root)
    async with contextlib.AsyncExitStack() as stack:
        builder = await stack.enter_async_context(Builder(config.builders, config.builder_memory))
        try:
            plane = await _open_plane(config, dirs, builder, stack)
        except MountError as error:
            metrics.fallbacks.labels(reason="mount").inc()
            log.error("no image will be lazy on this node: %s", error, extra={"reason": "mount", "hint": error.hint})
            yield NoLazyLayers()
            return
        client = await stack.enter_async_context(RegistryClient(config.registry))
        metrics.registries.read = client.counters.rows
        assert not client.session.closed  # made now: reading the system's certificates takes longer than resolving a layer
        layers = Layers(config.root, store, dirs, plane, metrics, grace=config.layer_grace)
        stack.callback(layers.close)
        layers.recover()
        background.spawn(layers.tend(config.complete_check), "tend layers")
        stack.push_async_callback(background.close)  # before what its tasks use is closed
        resolver = Resolver(config, layers, client, metrics, background, builder.translate)
        yield Lazy(layers, resolver, Starts(store, dirs, config.blobfs_socket, background))
