"""containerd as a snapshotter sees it: the metadata layer, the unpacker and the garbage collector, without containerd.

Modelled on what containerd v2.1.9 does (core/metadata/snapshot.go, core/unpack/unpacker.go): keys reach the backend as
``<namespace>/<sequence>/<key>``, parents as backend names; ALREADY_EXISTS with a target makes it List for a committed
snapshot with that label and exactly that parent, which it adopts; the collector removes every backend snapshot that no
namespace knows, then calls Cleanup. Prepare holds a read lock that collection excludes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weenv.core.digest import chain_id
from weenv.plugin.containerd.client import ContainerdError
from weenv.plugin.containerd.types import LABEL_PREFIX, LABEL_SNAPSHOT_REF, Kind, Mount, SnapshotInfo


class Backend(Protocol):
    """The part of the client that containerd's metadata layer uses."""

    async def prepare(self, key: str, parent: str = "", labels: Mapping[str, str] | None = None) -> list[Mount]: ...
    async def view(self, key: str, parent: str = "", labels: Mapping[str, str] | None = None) -> list[Mount]: ...
    async def mounts(self, key: str) -> list[Mount]: ...
    async def commit(self, name: str, key: str, labels: Mapping[str, str] | None = None) -> None: ...
    async def remove(self, key: str) -> None: ...
    async def stat(self, key: str) -> SnapshotInfo: ...
    async def list(self, *filters: str) -> list[SnapshotInfo]: ...
    async def cleanup(self) -> None: ...


@dataclass(frozen=True)
class Layer:
    """A layer of an image: its descriptor's digest and annotations, and its diffID."""

    digest: str
    diff_id: str
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PulledImage:
    """What a client pulls; ``send_cri_labels`` as the transfer service with exports, CRI and dockerd do."""

    ref: str
    manifest_digest: str
    layers: Sequence[Layer]
    send_cri_labels: bool = True

    def chain(self) -> list[str]:
        """The chainIDs, bottom first."""
        diff_ids = [layer.diff_id for layer in self.layers]
        return [chain_id(diff_ids[: end + 1]) for end in range(len(diff_ids))]


def _inherited(labels: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in labels.items() if key == LABEL_SNAPSHOT_REF or key.startswith(LABEL_PREFIX)}


class _ReadWriteLock:
    """Many readers or one writer, as containerd's snapshotter lock."""

    def __init__(self) -> None:
        self._condition = asyncio.Condition()
        self._readers = 0
        self._writing = False

    async def acquire_read(self) -> None:
        async with self._condition:
            await self._condition.wait_for(lambda: not self._writing)
            self._readers += 1

    async def release_read(self) -> None:
        async with self._condition:
            self._readers -= 1
            self._condition.notify_all()

    async def acquire_write(self) -> None:
        async with self._condition:
            await self._condition.wait_for(lambda: not self._writing and not self._readers)
            self._writing = True

    async def release_write(self) -> None:
        async with self._condition:
            self._writing = False
            self._condition.notify_all()


class Containerd:
    """One containerd over one backend; ``namespace(name)`` gives what a client of a namespace sees."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.lock = _ReadWriteLock()
        self.names: dict[str, dict[str, str]] = {}
        self.sequence = itertools.count(1)

    def namespace(self, name: str) -> Namespace:
        """A view of one namespace."""
        self.names.setdefault(name, {})
        return Namespace(self, name)

    async def collect(self) -> set[str]:
        """Garbage collection: backend snapshots that no namespace knows go, children first. What was removed."""
        await self.lock.acquire_write()
        removed: set[str] = set()
        try:
            known = {backend for names in self.names.values() for backend in names.values()}
            infos = {info.name: info for info in await self.backend.list()}
            while True:
                parents = {info.parent for name, info in infos.items() if name not in removed}
                doomed = [name for name in infos if name not in known | removed and name not in parents]
                if not doomed:
                    break
                for name in doomed:
                    await self.backend.remove(name)
                    removed.add(name)
        finally:
            await self.lock.release_write()
        await self.backend.cleanup()
        return removed


class Namespace:
    """Snapshots of one namespace, by the names that clients use."""

    def __init__(self, containerd: Containerd, name: str) -> None:
        self.containerd = containerd
        self.name = name
        self._extracts = itertools.count(1)

    @property
    def names(self) -> dict[str, str]:
        """Client's name -> backend's name."""
        return self.containerd.names[self.name]

    def _backend_name(self, key: str) -> str:
        if key not in self.names:
            raise ContainerdError(f"snapshot {key} does not exist", "NOT_FOUND")
        return self.names[key]

    async def prepare(self, key: str, parent: str = "", labels: Mapping[str, str] | None = None) -> list[Mount]:
        """Prepare; ALREADY_EXISTS where the target is there or the backend made it."""
        await self.containerd.lock.acquire_read()
        try:
            return await self._prepare(key, parent, dict(labels or {}))
        finally:
            await self.containerd.lock.release_read()

    async def _prepare(self, key: str, parent: str, labels: dict[str, str]) -> list[Mount]:
        target = labels.get(LABEL_SNAPSHOT_REF, "")
        if target in self.names or key in self.names:
            raise ContainerdError(f"snapshot {target or key} exists", "ALREADY_EXISTS")
        backend_parent = self._backend_name(parent) if parent else ""
        backend_key = f"{self.name}/{next(self.containerd.sequence)}/{key}"
        backend = self.containerd.backend
        try:
            described = await backend.prepare(backend_key, backend_parent, _inherited(labels))
        except ContainerdError as error:
            if error.code != "ALREADY_EXISTS":
                raise
            if not target:
                raise ContainerdError(f"unexpected: {error}", "UNKNOWN") from error
            listed = await backend.list(f'labels."{LABEL_SNAPSHOT_REF}"=={target},parent=="{backend_parent}"')
            for info in listed:
                matches = info.labels.get(LABEL_SNAPSHOT_REF) == target and info.parent == backend_parent
                if info.kind is Kind.COMMITTED and matches:
                    self.names[target] = info.name
                    raise
            raise ContainerdError(f"target snapshot {target} in backend", "NOT_FOUND") from error
        self.names[key] = backend_key
        return described

    async def run(self, key: str, parent: str) -> list[Mount]:
        """What starting a container asks for: Stat of the image's top snapshot, Prepare, Mounts."""
        backend = self.containerd.backend
        await backend.stat(self._backend_name(parent))
        await self.prepare(key, parent)
        return await backend.mounts(self._backend_name(key))

    async def commit(self, name: str, key: str, labels: Mapping[str, str] | None = None) -> None:
        """Commit under a name of the client's."""
        backend_name = f"{self.name}/{next(self.containerd.sequence)}/{name}"
        await self.containerd.backend.commit(backend_name, self._backend_name(key), _inherited(labels or {}))
        del self.names[key]
        self.names[name] = backend_name

    def remove(self, key: str) -> None:
        """Forget a snapshot; the backend's goes with the next collection."""
        self._backend_name(key)
        del self.names[key]

    async def pull(self, image: PulledImage, apply: Callable[[Layer, list[Mount]], Awaitable[None]] | None = None) -> list[str]:
        """Unpack an image layer by layer; the digests of the layers that containerd had to fetch.

        From the first layer that the snapshotter does not answer lazily, *all* are fetched. ``apply`` fills the mounts
        of an ordinary layer.
        """
        fetched: list[str] = []
        fetching = False
        parent = ""
        for number, (layer, target) in enumerate(zip(image.layers, image.chain(), strict=True)):
            labels = {LABEL_SNAPSHOT_REF: target, **_inherited(layer.annotations)}
            if image.send_cri_labels:
                labels |= {
                    "containerd.io/snapshot/cri.image-ref": image.ref,
                    "containerd.io/snapshot/cri.manifest-digest": image.manifest_digest,
                    "containerd.io/snapshot/cri.layer-digest": layer.digest,
                    "containerd.io/snapshot/cri.image-layers": ",".join(item.digest for item in image.layers[number:][:56]),
                }
            key = f"extract-{next(self._extracts)}-abcd {target}"
            for _ in range(3):
                try:
                    described = await self.prepare(key, parent, labels)
                except ContainerdError as error:
                    if error.code == "NOT_FOUND" and "target snapshot" in str(error):
                        continue
                    if error.code != "ALREADY_EXISTS":
                        raise
                    if target not in self.names:
                        continue
                    break
                if not fetching:
                    fetching = True
                    fetched += [item.digest for item in image.layers[number:]]
                if apply is not None:
                    await apply(layer, described)
                await self.commit(target, key, labels)
                break
            else:
                raise ContainerdError("unable to prepare extraction snapshot", "UNKNOWN")
            parent = target
        return fetched
