"""The tables of contents of a stack's layers: one ranged read each, verified, side by side."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from weenv.core.aio import gather_all
from weenv.environment.compose import NotLazyError, StackedLayer
from weenv.layer.toc import Toc
from weenv.layer.verify import LayerDescriptor, parse_annotations, verify_tail
from weenv.plugin.snapshotter.layerdir import LayerDirs, Origin
from weenv.registry.client import RegistryClient
from weenv.registry.source import open_source


def descriptor_of(layer: StackedLayer) -> LayerDescriptor:
    """What its annotations, or those of what the node converted it to, promise. Raises NotLazyError."""
    descriptor = parse_annotations(layer.blob.annotations) if layer.lazy or layer.served is not None else None
    if descriptor is None:
        raise NotLazyError(layer.ref, layer.group)
    return descriptor


def origin_of(descriptor: LayerDescriptor, layer: StackedLayer) -> Origin:
    """Where the blob can be had: the registry that its annotation names, or the layout its group came from."""
    if layer.served is not None:
        return Origin("layout", path=layer.served.path)
    if descriptor.source is not None:
        return Origin("registry", host=descriptor.source[0], repository=descriptor.source[1])
    return Origin("layout", path=layer.repository or layer.group.removeprefix("oci:").partition("@")[0])


class TocReader:
    """Reads TOCs through ``client``; those of layers that the node at ``root`` knows come from its layer directories."""

    def __init__(self, client: RegistryClient, root: str = "") -> None:
        self.client = client
        self.dirs = LayerDirs(root) if root else None

    async def read(self, layer: StackedLayer) -> Toc:
        """The verified TOC of one layer. Raises NotLazyError, SourceError, FormatError."""
        descriptor = descriptor_of(layer)
        tail = self._local(descriptor)
        if tail is None:
            source = open_source(self.client, origin_of(descriptor, layer), descriptor.digest, descriptor.size)
            try:
                tail = await source.read(descriptor.toc_offset, descriptor.toc_length)
            finally:
                await source.close()
        return await asyncio.to_thread(verify_tail, tail, descriptor)

    async def read_all(self, layers: Sequence[StackedLayer]) -> list[Toc]:
        """Those of a whole stack, in its order."""
        return await gather_all(*(self.read(layer) for layer in layers))

    def _local(self, descriptor: LayerDescriptor) -> bytes | None:
        if self.dirs is None:
            return None
        path = self.dirs.file(descriptor.digest, "toc")
        try:
            if os.path.getsize(path) != descriptor.toc_length:
                return None
            with open(path, "rb") as file:
                return file.read()
        except OSError:
            return None
