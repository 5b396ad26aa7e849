"""What ``weenv status`` shows: read from the root directory, the metastore and mountinfo, with or without the daemon.

Nothing here writes, and a metastore that is being written by the daemon is read as of its last commit.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weenv.core.errors import FormatError, StorageError
from weenv.core.process import holder_of
from weenv.plugin.containerd.types import Kind
from weenv.plugin.snapshotter import mounts
from weenv.plugin.snapshotter.builder import META
from weenv.plugin.snapshotter.cache.present import is_bad, progress
from weenv.plugin.snapshotter.layerdir import CONVERTED, LayerDirs
from weenv.plugin.snapshotter.metastore import Layer, Metastore


@dataclass(frozen=True, slots=True)
class LayerStatus:
    """One lazy layer. Sizes are in bytes."""

    digest: str
    mode: str
    """``lazy``, ``complete``, or ``unmounted``."""
    mount_point: str
    compressed_size: int
    """Size of the blob in the registry."""
    stream_size: int
    """Size of the tar stream; 0 where blobfs has not touched the layer yet."""
    local_bytes: int
    """How much of the tar stream is on this node."""
    disk_bytes: int
    """What the layer's files take on disk, metadata included."""
    snapshots: int
    """Images' snapshots that are this layer."""
    users: int
    """Containers (active snapshots and views) that have it somewhere below them."""
    used_by: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Their names, by containerd's namespace."""
    origins: tuple[str, ...] = ()
    converted: bool = False
    """Converted on this node: its image is not in the lazy format."""
    format: str = "weenv"
    """``weenv``, ``estargz`` or ``zstd:chunked``: of those of others nobody can check the diffID (docs/foreign.md)."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """All of it. ``running`` is whether a snapshotter holds the root's lock, ``pid`` its process id or 0."""

    root: str
    running: bool
    pid: int
    layers: tuple[LayerStatus, ...] = ()
    active: int = 0
    views: int = 0
    committed_lazy: int = 0
    committed_ordinary: int = 0
    ordinary_bytes: int = 0
    """What the ordinary committed snapshots take."""
    converted_blobs: int = 0
    """Layers that this node converted and keeps, in use or not."""
    converted_bytes: int = 0
    problems: tuple[str, ...] = field(default=())
    containers: dict[str, int] = field(default_factory=dict)
    """Active snapshots by containerd's namespace."""


def collect(root: str) -> NodeStatus:
    """The status of the node whose snapshotter has ``root``. Raises :class:`StorageError` for a broken metastore."""
    running, pid = _lock_holder(root)
    path = os.path.join(root, "metastore.db")
    if not os.path.exists(path):
        return NodeStatus(root, running, pid)
    store = Metastore(path, readonly=True)
    try:
        return _read(root, store, running, pid)
    finally:
        store.close()


def _lock_holder(root: str) -> tuple[bool, int]:
    try:
        return holder_of(root)
    except OSError as error:
        raise StorageError(f"cannot read {root}: {error.strerror}", errno=error.errno or 0, hint="run it as root") from error


def _read(root: str, store: Metastore, running: bool, pid: int) -> NodeStatus:
    dirs = LayerDirs(root)
    mounted = mounts.mounts_below(os.path.join(root, "m"))
    users = store.layer_users()
    counts = dict.fromkeys(Kind, 0)
    lazy = ordinary_bytes = 0
    per_layer: dict[int, int] = {}
    problems: list[str] = []
    containers: Counter[str] = Counter()
    for page in store.walk():
        for snapshot in page:
            counts[snapshot.kind] += 1
            if snapshot.kind is Kind.ACTIVE:
                containers.update(by_namespace([snapshot.name]).keys())
            if snapshot.layer_id is not None:
                lazy += 1
                per_layer[snapshot.layer_id] = per_layer.get(snapshot.layer_id, 0) + 1
            else:
                ordinary_bytes += snapshot.size
    layers: list[LayerStatus] = []
    for layer in store.layers():
        point = os.path.join(root, "m", str(layer.id))
        mode = layer.mode if layer.mode and point in mounted else "unmounted"
        if mode == "unmounted":
            problems.append(f"layer {layer.digest} is not mounted")
        if is_bad(dirs.path(layer.digest)):
            problems.append(f"layer {layer.digest} is not what it should be and is not served: remove the image")
        layers.append(_layer(dirs, layer, mode, point, per_layer.get(layer.id, 0), users.get(layer.id, [])))
    kept = _converted(root)
    return NodeStatus(
        root,
        running,
        pid,
        tuple(layers),
        counts[Kind.ACTIVE],
        counts[Kind.VIEW],
        lazy,
        counts[Kind.COMMITTED] - lazy,
        ordinary_bytes,
        len(kept),
        sum(kept),
        tuple(problems),
        dict(sorted(containers.items())),
    )


def _converted(root: str) -> list[int]:
    """Sizes of the blobs of <root>/converted."""
    sizes = []
    with contextlib.suppress(FileNotFoundError), os.scandir(os.path.join(root, CONVERTED, "blobs", "sha256")) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                sizes.append(entry.stat().st_size)
    return sizes


def by_namespace(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Snapshots' names, which containerd makes of namespace, a number and its client's key, by namespace."""
    found: dict[str, list[str]] = {}
    for name in names:
        namespace, _, rest = name.partition("/")
        key = rest.partition("/")[2]
        found.setdefault(namespace if key else "", []).append(key or name)
    return {namespace: tuple(keys) for namespace, keys in sorted(found.items())}


def _layer(dirs: LayerDirs, layer: Layer, mode: str, point: str, snapshots: int, users: Sequence[str]) -> LayerStatus:
    directory = dirs.path(layer.digest)
    try:
        source = dirs.source(layer.digest)
        size = source.size
        layer_format = "weenv" if source.foreign is None else source.foreign.format
        origins = tuple(f"{o.host}/{o.repository}" if o.kind == "registry" else f"{o.kind}:{o.path}" for o in source.origins)
    except (OSError, FormatError):
        size, origins, layer_format = 0, (), "weenv"
    local, stream = progress(directory)
    disk = 0
    for name in ("toc", "source.json", META, "data", "present"):
        try:
            disk += os.stat(f"{directory}/{name}").st_blocks * 512
        except OSError:
            continue  # it is not there (yet)
    here = f"layout:{os.path.join(os.path.dirname(dirs.root), CONVERTED)}" in origins
    return LayerStatus(
        layer.digest, mode, point, size, stream, local, disk, snapshots, len(users), by_namespace(users), origins, here,
        layer_format,
    )  # fmt: skip
