"""A plan into an image that is a manifest and a config: no layer is downloaded, copied, unpacked or run.

:func:`compose_image` is pure: groups in, documents out, the same bytes on every node. They name the layers as the groups
do, in the lazy format or not: what a node makes of the latter is its own affair (docs/adr/0004-not-lazy.md), and only the
snapshotter is told (:meth:`StackedLayer.labels`).

:func:`register` makes containerd know the result: under a lease each layer is offered to the snapshotter with
``snapshot.ref`` (as containerd's own unpacker does), then config and manifest are stored with the labels that its collector
follows, then the image is named. Layers that are not lazy are converted before (nodelayers.py), or unpacked in their turn
(unpack.py); those above and below are lazy all the same, for the snapshotter stacks both kinds on each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weenv.core.digest import chain_id, sha256
from weenv.core.errors import FormatError, LimitError, WeenvError
from weenv.environment import owner
from weenv.environment.merge import EPOCH, encode, merge_configs, platform_of
from weenv.environment.model import Plan
from weenv.environment.notlazy import LABEL, NotLazyGroup, from_label, to_label
from weenv.environment.used import HOST as HOST
from weenv.layer.verify import PREFETCH_ANNOTATION, SOURCE_ANNOTATION, TOC_ANNOTATION, parse_annotations
from weenv.plugin.containerd.client import ContainerdError, Namespaced
from weenv.plugin.containerd.types import LABEL_NOT_LAZY, LABEL_PREFIX, LABEL_SNAPSHOT_REF, Descriptor, Image
from weenv.registry.groupref.model import MAX_STACK, LayerRef, ResolvedGroup
from weenv.registry.groupref.resolve import this_platform
from weenv.registry.manifest import OCI_CONFIG, OCI_MANIFEST

if TYPE_CHECKING:  # it brings the converter
    from weenv.environment.nodelayers import NodeLayers

PLAN_LABEL = "dev.weenv.plan"
"""Label of a composed image in containerd: the plan's name."""
ORIGIN_LABEL = "dev.weenv.origin."
"""Label of a composed image's manifest, a layer's number after it: ``host/repository`` of one that is not lazy."""

_LEASE_LIFE = 3600


class NotLazyError(WeenvError):
    """A layer that is not served lazily where it has to be."""

    def __init__(
        self, layer: LayerRef, reference: str, what: str = "is not in the lazy format", hint: str = "convert it: weenv convert"
    ) -> None:
        super().__init__(f"layer {layer.digest} of {reference} {what}", hint=hint)
        self.layer = layer
        self.reference = reference


@dataclass(frozen=True, slots=True)
class LocalLayer:
    """What this node converted a layer to: the new blob, in the layout at ``path``."""

    ref: LayerRef
    path: str


@dataclass(frozen=True, slots=True)
class StackedLayer:
    """A layer of the stack, the group it came with, and whether it is in the lazy format.

    ``host`` and ``repository`` say where the group's blobs are (ResolvedGroup). What a node makes of a layer that is not
    lazy, ``served`` or the ``reason`` why it cannot be converted, is no part of the image: that is the same on every node.
    """

    ref: LayerRef
    group: str
    lazy: bool
    host: str = ""
    repository: str = ""
    served: LocalLayer | None = None
    reason: str = ""

    @property
    def blob(self) -> LayerRef:
        """The blob that its bytes are read from."""
        return self.ref if self.served is None else self.served.ref

    def labels(self, chain: str) -> dict[str, str]:
        """What the snapshotter is told of it."""
        told = self.blob.annotations if self.lazy or self.served is not None else {}
        return {key: value for key, value in told.items() if key.startswith(LABEL_PREFIX) and key != LABEL_NOT_LAZY} | {
            LABEL_SNAPSHOT_REF: chain
        }


@dataclass(frozen=True, slots=True)
class Composed:
    """The image of a plan. ``name`` is a full reference; ``chain`` the top layer's chainID."""

    name: str
    digest: str
    manifest: bytes
    config_digest: str
    config: bytes
    layers: tuple[StackedLayer, ...]
    chain: str
    plan: str

    @property
    def lazy(self) -> bool:
        """True where every layer is in the lazy format."""
        return all(layer.lazy for layer in self.layers)

    @property
    def chains(self) -> list[str]:
        """The chainID of every layer, bottom first."""
        found: list[str] = []
        for layer in self.layers:
            found.append(chain_id([found[-1], layer.ref.diff_id]) if found else layer.ref.diff_id)
        return found


def stack(groups: Sequence[ResolvedGroup], top: Sequence[LayerRef] = ()) -> tuple[StackedLayer, ...]:
    """The groups' layers, bottom first, then ``top`` (mutations). Raises LimitError beyond what overlayfs takes."""
    layers: list[StackedLayer] = []
    for group in groups:
        for layer in group.layers:
            try:
                promised = parse_annotations(layer.annotations)
            except FormatError:
                promised = None
            annotations = dict(layer.annotations)
            if promised is None or not promised.prefetch:  # one that no label can hold would keep the layer from being used
                annotations.pop(PREFETCH_ANNOTATION, None)
            if promised is not None and promised.source is None and group.host:
                # A composed image is in no registry, so each layer says which one holds it.
                annotations[SOURCE_ANNOTATION] = f"{group.host}/{group.repository}"
            ref = LayerRef(layer.digest, layer.size, layer.media_type, layer.diff_id, annotations)
            lazy = promised is not None and promised.digest == layer.digest
            layers.append(StackedLayer(ref, group.reference, lazy, group.host, group.repository))
    layers.extend(StackedLayer(layer, "mutations", True) for layer in top)
    if not layers:
        raise FormatError("the groups have no layers", hint="name a base image in the plan")
    if len(layers) > MAX_STACK:
        raise LimitError(f"{len(layers)} layers, more than the {MAX_STACK} that overlayfs stacks", hint="squash a group")
    return tuple(layers)


def compose_image(plan: Plan, groups: Sequence[ResolvedGroup], top: Sequence[LayerRef] = (), *, platform: str = "") -> Composed:
    """The image of a plan whose groups are resolved; ``top`` are the layers of its mutations.

    Depends on nothing but its arguments. Raises FormatError (ConflictError, LimitError among them).
    """
    if not groups:
        raise FormatError("the plan has no groups")
    system, architecture, variant = platform_of(plan, groups, platform or this_platform())
    layers = stack(groups, top)
    config = {
        "architecture": architecture,
        "os": system,
        "created": EPOCH,
        "config": merge_configs(plan, groups),
        "rootfs": {"type": "layers", "diff_ids": [layer.ref.diff_id for layer in layers]},
        "history": [{"created": EPOCH, "created_by": f"weenv: {layer.group}"} for layer in layers],
    }
    if variant:
        config["variant"] = variant
    config_data = encode(config)
    manifest = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": {"mediaType": OCI_CONFIG, "digest": sha256(config_data), "size": len(config_data)},
        "layers": [
            {
                "mediaType": layer.ref.media_type,
                "digest": layer.ref.digest,
                "size": layer.ref.size,
                **({"annotations": layer.ref.annotations} if layer.ref.annotations else {}),
            }
            for layer in layers
        ],
    }
    manifest_data = encode(manifest)
    digest = sha256(manifest_data)
    return Composed(
        f"{HOST}/plan/{plan.name}:{digest[7:23]}",
        digest,
        manifest_data,
        sha256(config_data),
        config_data,
        layers,
        chain_id([layer.ref.diff_id for layer in layers]),
        plan.name,
    )


@dataclass(frozen=True, slots=True)
class Registered:
    """What :func:`register` did: whether containerd did not know the image before, and the groups that are not lazy."""

    new: bool
    not_lazy: tuple[NotLazyGroup, ...] = ()

    def __bool__(self) -> bool:
        return self.new


async def _registered(image: Composed, namespace: Namespaced, snapshotter: str) -> Image | None:
    try:
        found = await namespace.get_image(image.name)
        if found.target.digest != image.digest:
            return None
        await namespace.snapshots(snapshotter).stat(image.chain)
    except ContainerdError as error:
        if error.code == "NOT_FOUND":
            return None
        raise
    return found


async def is_registered(image: Composed, namespace: Namespaced, snapshotter: str) -> bool:
    """True where containerd has the image and its top snapshot: composing again would change nothing."""
    return await _registered(image, namespace, snapshotter) is not None


async def register(
    image: Composed, namespace: Namespaced, *, snapshotter: str = "weenv", local: NodeLayers | None = None
) -> Registered:
    """Make containerd know the image in one of its namespaces. Without ``local`` every layer has to be lazy.

    Raises NotLazyError for a layer that has to be lazy and is not served so, ContainerdError, and what ``local`` raises.
    Whatever fails, nothing is left but what containerd's collector takes: all of it hangs on a lease that ends here, or, where
    this process is killed, by the next command's sweep.
    """
    if local is not None:
        local.refuse(image.layers)
    known = await _registered(image, namespace, snapshotter)
    if known is not None:
        return Registered(False, tuple(from_label(known.labels.get(LABEL, ""))))
    layers = await _served(image, namespace, snapshotter, local)
    async with under_lease(namespace) as leased:
        stacking = _Stacking(leased, snapshotter, local)
        labels = {"containerd.io/gc.ref.content.config": image.config_digest}
        labels |= {f"containerd.io/gc.ref.content.l.{n}": layer.ref.digest for n, layer in enumerate(image.layers)}
        ordinary = [(n, layer) for n, layer in enumerate(image.layers) if not layer.lazy and layer.host]
        labels |= {f"{ORIGIN_LABEL}{n}": f"{layer.host}/{layer.repository}" for n, layer in ordinary}
        snapshot = {f"containerd.io/gc.ref.snapshot.{snapshotter}": image.chain}
        # Side by side: each of these waits for the disk, and none for another. What was begun is ended whatever the others
        # do: a write broken off is an ingest that stays.
        done = await asyncio.gather(
            stacking.stack(layers, image.chains),
            leased.write_content(f"{leased.lease}-config", image.config, image.config_digest, labels=snapshot),
            leased.write_content(f"{leased.lease}-manifest", image.manifest, image.digest, labels=labels),
            return_exceptions=True,
        )
        for failure in done:
            if isinstance(failure, BaseException):
                raise failure
        groups = stacking.groups()
        about = {PLAN_LABEL: image.plan, **({LABEL: to_label(groups)} if groups else {})}
        await leased.put_image(Image(image.name, Descriptor(OCI_MANIFEST, image.digest, len(image.manifest)), about))
    return Registered(True, groups)


@contextlib.asynccontextmanager
async def under_lease(namespace: Namespaced, *, life: int = _LEASE_LIFE, sync: bool = False) -> AsyncIterator[Namespaced]:
    """The namespace with a lease of ours, which keeps what is made within the block until its end, or ``life`` seconds.

    ``sync``: where the block fails, what it made has been collected when the error is raised.
    """
    lease = f"{owner.LEASE_PREFIX}{secrets.token_hex(8)}"
    expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + life))
    await namespace.create_lease(lease, {"containerd.io/gc.expire": expires, owner.LEASE_LABEL: owner.lease_mark()})
    whole = False
    try:
        yield namespace.client.namespace(namespace.name, lease=lease)
        whole = True
    finally:
        await namespace.delete_lease(lease, sync=sync and not whole)


async def _served(
    image: Composed, namespace: Namespaced, snapshotter: str, local: NodeLayers | None
) -> tuple[StackedLayer, ...]:
    """The layers, those that are not lazy converted unless containerd has them already."""
    wanting = [(number, layer) for number, layer in enumerate(image.layers) if not layer.lazy]
    if not wanting:
        return image.layers
    if local is None:
        raise NotLazyError(wanting[0][1].ref, wanting[0][1].group)
    snapshots, chains, layers = namespace.snapshots(snapshotter), image.chains, list(image.layers)
    missing: list[int] = []
    for number, _ in wanting:
        try:
            await snapshots.stat(chains[number])
        except ContainerdError as error:
            if error.code != "NOT_FOUND":
                raise
            missing.append(number)
        else:
            layers[number] = local.known(layers[number])
    for number, layer in zip(missing, await local.serve([layers[number] for number in missing]), strict=True):
        layers[number] = layer
    return tuple(layers)


class _Stacking:
    """Layers to snapshots, bottom first, and what became of those that are not lazy."""

    def __init__(self, leased: Namespaced, snapshotter: str, local: NodeLayers | None) -> None:
        self._leased = leased
        self._snapshots = leased.snapshots(snapshotter)
        self._local = local
        self._groups: dict[str, NotLazyGroup] = {}

    def groups(self) -> tuple[NotLazyGroup, ...]:
        """The groups that are not lazy, bottom first."""
        return tuple(self._groups.values())

    async def stack(self, layers: Sequence[StackedLayer], chains: Sequence[str]) -> None:
        """Offer the layers to the snapshotter; each is to answer that it exists already, or is unpacked.

        Where a snapshot is there, all below it are, too: an earlier environment's, or another plan's of the same groups.
        """
        known = await self._known(layers, chains)
        try:
            await self._stack(layers, chains, known)
        except ContainerdError as error:
            if error.code != "NOT_FOUND" or not known:
                raise
            await self._stack(layers, chains, 0)  # collected in the meantime

    async def _known(self, layers: Sequence[StackedLayer], chains: Sequence[str]) -> int:
        """The number of the highest snapshot that is there; 0 where none is, or where something is to be said of some."""
        if not all(layer.lazy for layer in layers):
            return 0
        for number in range(len(chains) - 1, 0, -1):
            try:
                await self._snapshots.stat(chains[number])
            except ContainerdError as error:
                if error.code != "NOT_FOUND":
                    raise
            else:
                return number
        return 0

    async def _stack(self, layers: Sequence[StackedLayer], chains: Sequence[str], first: int) -> None:
        parent = chains[first - 1] if first else ""
        for layer, chain in zip(layers[first:], chains[first:], strict=True):
            if layer.lazy or layer.served is not None:
                refused = await self._offer(layer, chain, parent)
                if refused is not None and layer.lazy:
                    why, _, hint = refused.partition("\n")
                    what = f"is not served lazily on this node: {why or 'its snapshotter does not say why'}"
                    raise NotLazyError(layer.ref, layer.group, what, hint or "see its log, and weenv doctor")
                if refused is not None:
                    layer = replace(layer, served=None, reason="the snapshotter does not serve the converted layer")
            if not layer.lazy:
                await self._not_lazy(layer, chain, parent)
            parent = chain

    async def _offer(self, layer: StackedLayer, chain: str, parent: str) -> str | None:
        """None where the snapshot exists afterwards, else what LABEL_NOT_LAZY says."""
        key = temporary_key(chain)
        try:
            await self._snapshots.prepare(key, parent, layer.labels(chain))
        except ContainerdError as error:
            if error.code != "ALREADY_EXISTS":
                raise
            return None
        try:
            return (await self._snapshots.stat(key)).labels.get(LABEL_NOT_LAZY, "")
        finally:
            await self._snapshots.remove(key)

    async def _not_lazy(self, layer: StackedLayer, chain: str, parent: str) -> None:
        from weenv.environment.unpack import unpack

        assert self._local is not None
        begin = time.monotonic()
        fresh = layer.served is None and await unpack(layer, chain, parent, self._leased, self._snapshots, self._local)
        took = time.monotonic() - begin if fresh else self._local.converted.pop(layer.ref.digest, 0.0)
        converted = layer.served is not None
        if not converted and not fresh:  # somebody else made it: the snapshot says how
            converted = TOC_ANNOTATION in (await self._snapshots.stat(chain)).labels
        local = self._local.known(layer).served if converted else None
        if converted and local is None:
            return  # an image that was published lazily has the very same layer on this node
        before = self._groups.get(layer.group, NotLazyGroup(layer.group))
        self._groups[layer.group] = replace(
            before,
            converted=before.converted + converted,
            unpacked=before.unpacked + (not converted),
            size=before.size + layer.ref.size,
            local=before.local + (local.ref.size if local is not None else 0),
            seconds=before.seconds + took,
            reason=before.reason or ("" if converted else layer.reason),
        )


def temporary_key(chain: str) -> str:
    """The key of a snapshot that is to become the committed one of a chain, as containerd's unpacker names it."""
    return f"extract-{secrets.token_hex(8)} {chain}"
