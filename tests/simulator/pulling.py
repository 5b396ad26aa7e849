"""A snapshotter without kernel and gRPC, and images in a simulated registry for it to resolve."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from conformance.snapshots import Direct
from simulator.containerd import Containerd, Layer, PulledImage
from simulator.plane import TreePlane
from simulator.registry import SimulatedRegistry

from weenv.core import digest as digests
from weenv.core.aio import Background
from weenv.layer.encode import encode_layer
from weenv.plugin.snapshotter.config import SnapshotterConfig
from weenv.plugin.snapshotter.layerdir import LayerDirs
from weenv.plugin.snapshotter.layers import Layers
from weenv.plugin.snapshotter.lazy import Lazy
from weenv.plugin.snapshotter.metastore import Metastore
from weenv.plugin.snapshotter.metrics import Metrics
from weenv.plugin.snapshotter.resolve import Resolver
from weenv.plugin.snapshotter.service import Snapshotter
from weenv.plugin.snapshotter.starts import Starts
from weenv.registry.client import RegistryClient
from weenv.registry.config import RegistryConfig
from weenv_testkit.foreign import Blob, translate
from weenv_testkit.images import Member, write_tar

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+zstd"
REPOSITORY = "team/image"


@dataclass
class Node:
    """Everything of a snapshotter but kernel and gRPC."""

    root: str
    registry: SimulatedRegistry
    store: Metastore
    dirs: LayerDirs
    plane: TreePlane
    layers: Layers
    resolver: Resolver
    core: Snapshotter
    containerd: Containerd
    metrics: Metrics

    def fallbacks(self) -> dict[str, float]:
        """Fallbacks by reason."""
        (family,) = self.metrics.fallbacks.collect()
        return {s.labels["reason"]: s.value for s in family.samples if s.name.endswith("_total")}


@contextlib.asynccontextmanager
async def node(
    root: str, registry: SimulatedRegistry, *, allow: Sequence[str] = (), **settings: Any
) -> AsyncIterator[Node]:
    reach = RegistryConfig(attempts=1, retry_delay=0.01, allow_sources=frozenset(allow))
    config = SnapshotterConfig(root=root, registry=reach, **{"foreign": True, **settings})
    metrics, background = Metrics(), Background()
    os.makedirs(root, exist_ok=True)
    store, dirs = Metastore(f"{root}/metastore.db"), LayerDirs(root)
    async with RegistryClient(config.registry) as client:
        plane = TreePlane(dirs)
        layers = Layers(root, store, dirs, plane, metrics, grace=config.layer_grace)
        layers.recover()
        resolver = Resolver(config, layers, client, metrics, background, translate)
        core = Snapshotter(root, store, Lazy(layers, resolver, Starts(store, dirs, f"{root}/blobfs.sock", background)))
        core.recover()
        containerd = Containerd(Direct(core))
        try:
            yield Node(root, registry, store, dirs, plane, layers, resolver, core, containerd, metrics)
        finally:
            await background.close()
            core.close()
            layers.close()
            store.close()


class Images:
    """Images in a simulated registry, their layers made by hand and encoded."""

    def __init__(self, registry: SimulatedRegistry, scratch: str) -> None:
        self.registry = registry
        self.scratch = scratch
        self.blobs: dict[str, bytes] = {}
        self.types: dict[str, str] = {}

    def layer(self, *members: Member, plain: bool = False) -> Layer:
        """One layer; ``plain`` ones are not in the format."""
        path = os.path.join(self.scratch, f"l{len(self.blobs)}.tar")
        write_tar(path, members)
        with open(path, "rb") as source, open(path + ".blob", "wb") as out:
            encoded = encode_layer(source, out)
        with open(path + ".blob", "rb") as file:
            data = file.read()
        if plain:
            data += b"\x50\x2a\x4d\x18\x00\x00\x00\x00"  # another blob: an empty skippable frame behind the seek table
        digest = self.registry.add_blob(data)
        self.blobs[digest] = data
        return Layer(digest, encoded.diff_id, {} if plain else encoded.descriptor().annotations())

    def foreign(self, make: Callable[[bytes], Blob], *members: Member) -> Layer:
        """One layer in the format of others, whose annotations clients do not forward, or not all."""
        path = os.path.join(self.scratch, f"l{len(self.blobs)}.tar")
        write_tar(path, members)
        with open(path, "rb") as source:
            blob = make(source.read())
        digest = self.registry.add_blob(blob.data)
        self.blobs[digest] = blob.data
        self.types[digest] = f"application/vnd.oci.image.layer.v1.tar+{blob.compression}"
        return Layer(digest, blob.diff_id, blob.annotations)

    def image(self, layers: Sequence[Layer], *, cri: bool = True, name: str = REPOSITORY) -> PulledImage:
        """The image of these layers."""
        config = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digests.sha256(b"{}"), "size": 2}
        rows = [
            {
                "mediaType": self.types.get(layer.digest, LAYER),
                "digest": layer.digest,
                "size": len(self.blobs[layer.digest]),
                "annotations": dict(layer.annotations),
            }
            for layer in layers
        ]
        manifest = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": rows}).encode()
        digest = self.registry.add_manifest(manifest, MANIFEST)
        return PulledImage(f"{self.registry.host}/{name}:latest", digest, list(layers), cri)

    def file(self, name: str, **more: Any) -> Layer:
        """A layer of one file."""
        return self.layer(Member(name, name.encode() * 100), **more)


# Fixtures, for a module to take as its own.


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where a node is."""
    return str(tmp_path_factory.mktemp("r"))


@pytest.fixture
async def registry() -> AsyncIterator[SimulatedRegistry]:
    """A registry with nothing in it."""
    async with SimulatedRegistry() as running:
        yield running


@pytest.fixture
def images(registry: SimulatedRegistry, tmp_path_factory: pytest.TempPathFactory) -> Images:
    """For images in it."""
    return Images(registry, str(tmp_path_factory.mktemp("layers")))
