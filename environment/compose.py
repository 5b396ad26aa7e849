"""A plan into an image that is a manifest and a config: no layer is downloaded, copied, unpacked or run.

:func:`compose_image` is pure: groups in, documents out, the same bytes on every node. :func:`register` makes containerd
know the result: under a lease each layer is offered to the snapshotter with ``snapshot.ref`` (as containerd's own
unpacker does), then config and manifest are stored with the labels that its collector follows, then the image is named.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from weenv.core.digest import chain_id, sha256
from weenv.core.errors import FormatError, LimitError, WeenvError
from weenv.environment.merge import EPOCH, encode, merge_configs, platform_of
from weenv.environment.model import Plan
from weenv.layer.verify import LAYER_ANNOTATION, SOURCE_ANNOTATION, TOC_ANNOTATION, parse_annotations
from weenv.plugin.containerd.client import ContainerdError, Namespaced
from weenv.plugin.containerd.types import LABEL_PREFIX, LABEL_SNAPSHOT_REF, Descriptor, Image
from weenv.registry.groupref.model import MAX_STACK, LayerRef, ResolvedGroup
from weenv.registry.groupref.resolve import this_platform
from weenv.registry.manifest import OCI_CONFIG, OCI_MANIFEST

HOST = "weenv.local"
"""Registry host in the names of composed images: no such registry exists, so nobody can be asked for one by mistake."""

PLAN_LABEL = "dev.weenv.plan"
"""Label of a composed image in containerd: the plan's name."""

_LEASE_LIFE = 3600
_SOURCE_KEYS = (LAYER_ANNOTATION, TOC_ANNOTATION)


class NotLazyError(WeenvError):
    """A layer that the snapshotter does not serve lazily: it has to be fetched, or converted, first."""

    def __init__(self, layer: LayerRef, reference: str) -> None:
        super().__init__(f"layer {layer.digest} of {reference} is not in the lazy format", hint="convert it: weenv convert")
        self.layer = layer
        self.reference = reference


@dataclass(frozen=True, slots=True)
class StackedLayer:
    """A layer of the stack, the group it came with, and whether it is in the lazy format."""

    ref: LayerRef
    group: str
    lazy: bool


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
        """True where every layer is served lazily."""
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
            if promised is not None and promised.source is None and group.host:
                # A composed image is in no registry, so each layer says which one holds it.
                annotations[SOURCE_ANNOTATION] = f"{group.host}/{group.repository}"
            ref = LayerRef(layer.digest, layer.size, layer.media_type, layer.diff_id, annotations)
            layers.append(StackedLayer(ref, group.reference, promised is not None and promised.digest == layer.digest))
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


async def is_registered(image: Composed, namespace: Namespaced, snapshotter: str) -> bool:
    """True where containerd has the image and its top snapshot: composing again would change nothing."""
    try:
        found = await namespace.get_image(image.name)
        if found.target.digest != image.digest:
            return False
        await namespace.snapshots(snapshotter).stat(image.chain)
    except ContainerdError as error:
        if error.code == "NOT_FOUND":
            return False
        raise
    return True


async def register(image: Composed, namespace: Namespaced, *, snapshotter: str = "weenv") -> bool:
    """Make containerd know the image in one of its namespaces; False where it knew it already.

    Raises NotLazyError for the first layer that is not served lazily, ContainerdError. Whatever fails, nothing is left
    but what containerd's collector takes: all of it hangs on a lease that ends here.
    """
    if await is_registered(image, namespace, snapshotter):
        return False
    lease = f"weenv-compose-{secrets.token_hex(8)}"
    expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + _LEASE_LIFE))
    await namespace.create_lease(lease, {"containerd.io/gc.expire": expires})
    leased = namespace.client.namespace(namespace.name, lease=lease)
    try:
        await _snapshots(image, leased, snapshotter)
        await leased.write_content(
            f"weenv-config-{image.config_digest}", image.config, image.config_digest,
            labels={f"containerd.io/gc.ref.snapshot.{snapshotter}": image.chain},
        )  # fmt: skip
        labels = {"containerd.io/gc.ref.content.config": image.config_digest}
        labels |= {f"containerd.io/gc.ref.content.l.{n}": layer.ref.digest for n, layer in enumerate(image.layers)}
        await leased.write_content(f"weenv-manifest-{image.digest}", image.manifest, image.digest, labels=labels)
        target = Descriptor(OCI_MANIFEST, image.digest, len(image.manifest))
        await leased.put_image(Image(image.name, target, {PLAN_LABEL: image.plan}))
    finally:
        await namespace.delete_lease(lease)
    return True


async def _snapshots(image: Composed, leased: Namespaced, snapshotter: str) -> None:
    """Offer the layers to the snapshotter, bottom first; each is to answer that it exists already."""
    snapshots = leased.snapshots(snapshotter)
    chains = image.chains
    # Where the top is there already, all below it are: a second namespace's or an earlier environment's.
    parent = ""
    for layer, chain in zip(image.layers, chains, strict=True):
        labels = {key: value for key, value in layer.ref.annotations.items() if key.startswith(LABEL_PREFIX)}
        labels[LABEL_SNAPSHOT_REF] = chain
        key = f"extract-{secrets.token_hex(8)} {chain}"
        try:
            await snapshots.prepare(key, parent, labels)
        except ContainerdError as error:
            if error.code != "ALREADY_EXISTS":
                raise
            parent = chain
            continue
        await snapshots.remove(key)
        raise NotLazyError(layer.ref, layer.group)
