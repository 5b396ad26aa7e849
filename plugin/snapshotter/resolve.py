"""From the labels of a Prepare to a layer that is mounted, or to the reason why not.

The labels are the layer descriptor's annotations (the layer's digest, where its tail is, what the tail hashes to) and,
where the client sends them, the image's name and the manifest's digest. The first Prepare of an image reads its manifest
and starts on *all* of its layers side by side, because containerd asks for them one after the other. Tails are read with
one ranged request each, checked, stored; the metadata is built and mounted.

A layer in the format of somebody else, eStargz or zstd:chunked, has annotations of which a client forwards some or none: it is
recognised by the manifest (foreign.py has the rest).

One lazy decision per image: layers from the bottom up to the first that is not in the format (or cannot be had) are
lazy, the rest is unpacked by containerd, which fetches everything above the first ordinary layer anyway. Every image
that is not served lazily is one log line and one count with a reason of :data:`REASONS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weenv.core import digest as digests
from weenv.core.aio import Background, SingleFlight
from weenv.core.errors import (
    BadReference,
    FormatError,
    LimitError,
    MountError,
    NotFoundInSource,
    SourceError,
    StorageError,
    UnauthorizedError,
    UnsupportedError,
    VerificationError,
    WeenvError,
)
from weenv.layer.foreign.formats import ForeignLayer, parse_foreign
from weenv.layer.verify import LAYER_ANNOTATION, LayerDescriptor, parse_annotations, verify_tail_bytes
from weenv.plugin.containerd.types import LABEL_SNAPSHOT_REF
from weenv.plugin.snapshotter.config import SnapshotterConfig
from weenv.plugin.snapshotter.foreign import Translate, made_tail
from weenv.plugin.snapshotter.implied import attributes_below
from weenv.plugin.snapshotter.layerdir import CONVERTED, MUTATIONS, LayerSource, Origin
from weenv.plugin.snapshotter.layers import Layers
from weenv.plugin.snapshotter.metrics import Metrics
from weenv.plugin.snapshotter.planes.base import LayerFacts, Variant, variant_of
from weenv.registry.auth import scope_of
from weenv.registry.client import RegistryClient
from weenv.registry.internal import is_internal
from weenv.registry.manifest import ACCEPT, MAX_MANIFEST, Descriptor, Manifest, parse_manifest
from weenv.registry.reference import Reference, parse_reference
from weenv.registry.source import BlobSource, open_source, read_checked
from weenv.registry.trusted import TrustedHosts

log = logging.getLogger(__name__)

LABEL_IMAGE = "containerd.io/snapshot/cri.image-ref"
LABEL_MANIFEST = "containerd.io/snapshot/cri.manifest-digest"
LABEL_LAYER = "containerd.io/snapshot/cri.layer-digest"
"""Labels of containerd's own (pkg/snapshotters/annotations.go, v2.1.9)."""

REASONS = {
    "no-labels": "the client unpacks by itself and sends no labels",
    "not-converted": "the layer is not in the lazy format",
    "below-not-lazy": "a layer below is not lazy",
    "bad-labels": "the layer's annotations are malformed",
    "no-origin": "neither labels nor annotation name a registry",
    "source-refused": "its annotation names a host that an image must not make this node contact",
    "not-found": "the registry does not hold the layer",
    "unauthorized": "the registry refuses the node's credentials",
    "unavailable": "the registry does not answer",
    "bad-tail": "the layer's tail is not what its digest promises",
    "bad-toc": "the layer's table of contents is malformed",
    "unsupported": "the layer holds what this version cannot represent",
    "too-large": "the layer is beyond a limit",
    "wrong-layer": "the layer is not the one that the image's config names",
    "mount": "the kernel or blobfs refused the mount",
    "disk": "the node's disk is full or broken",
    "timeout": "it took too long",
    "internal": "an unexpected error",
}
"""Values of the label ``reason`` of metric ``weenv_snapshotter_fallbacks``, and what they mean."""

_REMEDIES = {
    "no-labels": "a layer that docker built or loaded has to be; pull with docker, CRI or the transfer service (weenv doctor)",
    "not-converted": "weenv convert makes an image of the format out of it; "
    "of eStargz and zstd:chunked, [snapshotter] foreign reads what there is",
    "below-not-lazy": "convert the whole image",
    "bad-labels": "convert the image again",
    "disk": "free some space",
    "timeout": "is the registry slow? see [snapshotter] resolve_timeout",
}
"""What to do where the error itself does not say."""
_BESIDES = {
    "unauthorized": "a client's own login or pull secret does not reach the snapshotter, see [registry] docker_config",
}
"""... and what to know besides what the error says."""
_PLANS = 256
_PLAN_TTL = 600.0
"""Images remembered, and for how many seconds: long enough for one pull."""
_LOOK = 10.0
"""Seconds for which an image's manifest is waited for only to see whether its layers are in another format."""
_TOLD = 60.0
_TOLD_UNNAMED = 5.0
"""Seconds for which further layers of an image that is not lazy are its consequence, and no news."""
_HASH_INLINE = 256 << 10
_LARGE_TAIL = 16 << 20
"""Bytes of a tail (some 900 000 files) from which on only one is held in memory at a time, however many layers claim one."""


class _WrongLayer(VerificationError):
    """The TOC's diffID does not give the chainID that containerd asks for."""


class _NoOrigin(NotFoundInSource):
    """Nothing says where the layer is."""


class _Refused(_NoOrigin):
    """Only a host that the node must not be sent to."""


_BY_ERROR: tuple[tuple[type[BaseException], str], ...] = (
    (_WrongLayer, "wrong-layer"),
    (_Refused, "source-refused"),
    (_NoOrigin, "no-origin"),
    (VerificationError, "bad-tail"),
    (UnsupportedError, "unsupported"),
    (LimitError, "too-large"),
    (FormatError, "bad-toc"),
    (NotFoundInSource, "not-found"),
    (UnauthorizedError, "unauthorized"),
    (SourceError, "unavailable"),
    (BadReference, "bad-labels"),
    (MountError, "mount"),
    (StorageError, "disk"),
    (TimeoutError, "timeout"),
    (OSError, "disk"),
)


def reason_of(error: BaseException) -> str:
    """The fallback reason of an error."""
    return next((reason for kind, reason in _BY_ERROR if isinstance(error, kind)), "internal")


@dataclass(slots=True)
class Plan:
    """The lazy decision of one image. Layers at positions below ``limit`` are lazy; ``reason`` says why not the next."""

    image: str
    positions: dict[str, int] = field(default_factory=dict)
    foreign: dict[str, ForeignLayer | str] = field(default_factory=dict)
    """Layers in other formats by digest; or what is wrong with their annotations."""
    limit: int = 0
    reason: str = ""
    made: float = 0.0

    def allows(self, digest: str) -> bool:
        """True where the layer may be lazy. One that the manifest does not list is judged by itself."""
        return self.positions.get(digest, -1) < self.limit

    def end_at(self, digest: str, reason: str) -> None:
        """The layer cannot be served lazily: neither can those above it."""
        position = self.positions.get(digest)
        if position is not None and position < self.limit:
            self.limit, self.reason = position, reason


class Resolver:
    """See the module's text. Belongs to one event loop."""

    def __init__(
        self,
        config: SnapshotterConfig,
        layers: Layers,
        client: RegistryClient,
        metrics: Metrics,
        background: Background,
        translate: Translate | None = None,
    ) -> None:
        self.layers = layers
        self.client = client
        self._config = config
        self._metrics = metrics
        self._background = background
        self._translate = translate if config.foreign else None
        self._unreadable: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._plans: OrderedDict[tuple[str, str], Plan] = OrderedDict()
        self._told: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._planning: SingleFlight[tuple[str, str], Plan | None] = SingleFlight()
        self._making: SingleFlight[tuple[LayerDescriptor | ForeignLayer, tuple[Origin, ...]], LayerFacts] = SingleFlight()
        self._large = asyncio.Semaphore(1)
        self._trusted = TrustedHosts(config.root)
        self._hosts: OrderedDict[str, tuple[float, bool]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def resolve(
        self, labels: Mapping[str, str], key: str, parent_ref: str, lowers: Sequence[str]
    ) -> AsyncIterator[int | str | None]:
        """Id of the mounted layer that ``labels`` describe, pinned within the block; or why there is none.

        The latter is what LABEL_NOT_LAZY holds, or None where no lazy layer was asked for.
        """
        why: str | None = None
        descriptor: LayerDescriptor | ForeignLayer | None
        try:
            descriptor = parse_annotations(labels) or await self._foreign(labels)
        except FormatError as error:
            why, descriptor = self._fall_back(labels, key, "bad-labels", error.message), None
        else:
            if descriptor is None:
                self._fall_back(labels, key, "not-converted" if LABEL_SNAPSHOT_REF in labels else "no-labels")
        if descriptor is None:
            yield why
            return
        with self.layers.pin(descriptor.digest):
            layer_id = await self._decide(descriptor, labels, key, parent_ref, lowers)
            try:
                yield layer_id
            finally:  # with a snapshot that refers to it, or an error: it is not kept for its own sake any more
                if isinstance(layer_id, int):
                    self.layers.adopted(descriptor.digest)

    async def _foreign(self, labels: Mapping[str, str]) -> ForeignLayer | None:
        """The layer that ``labels`` name, if its image's manifest says that it is in another format that can be read."""
        image, layer, digest = _image(labels), labels.get(LABEL_LAYER, ""), labels.get(LABEL_MANIFEST, "")
        if self._translate is None or image is None or not digests.is_digest(layer) or not digests.is_digest(digest):
            return None
        key, now = (image.name, digest), time.monotonic()
        if self._unreadable.get(key, 0.0) > now:
            return None
        plan = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_LOOK, self._config.resolve_timeout)):
                plan = await self._plan(image, labels, lazy=False)
        if plan is None:  # an ordinary image, most likely: its other layers must not wait for the same
            self._unreadable[key] = now + _TOLD
            while len(self._unreadable) > _PLANS:
                self._unreadable.popitem(last=False)
            return None
        found = plan.foreign.get(layer)
        if isinstance(found, str):
            raise FormatError(found)
        return found

    async def _decide(
        self, descriptor: LayerDescriptor | ForeignLayer, labels: Mapping[str, str], key: str, parent_ref: str,
        lowers: Sequence[str],
    ) -> int | str:  # fmt: skip
        image = _image(labels)
        plan: Plan | None = None
        try:
            async with asyncio.timeout(self._config.resolve_timeout):
                making = asyncio.ensure_future(self._make(descriptor, image))
                try:
                    plan = await self._plan(image, labels) if image is not None else None
                    if plan is not None and not plan.allows(descriptor.digest):
                        return self._fall_back(labels, key, "below-not-lazy", plan.reason)
                    facts = await making
                finally:
                    making.cancel()
                    await asyncio.gather(making, return_exceptions=True)
                if isinstance(descriptor, LayerDescriptor):  # of the others nobody knows the diffID
                    _check_chain(facts.diff_id, labels.get(LABEL_SNAPSHOT_REF, ""), parent_ref, bool(lowers))
                variant = await self._variant(facts, lowers)
                layer_id = await self.layers.attach(descriptor.digest, variant)
        except (WeenvError, OSError) as error:  # TimeoutError is an OSError
            reason = reason_of(error)
            if plan is not None:
                plan.end_at(descriptor.digest, reason)
            text = str(error) or f"not ready within {self._config.resolve_timeout:g} s"
            return self._fall_back(labels, key, reason, text, error.hint if isinstance(error, WeenvError) else "")
        self._metrics.resolved.inc()
        return layer_id

    async def _variant(self, facts: LayerFacts, lowers: Sequence[str]) -> Variant:
        if not facts.implied or not lowers:
            return Variant()
        return variant_of(await asyncio.to_thread(attributes_below, facts.implied, lowers))

    # one layer

    async def _make(self, descriptor: LayerDescriptor | ForeignLayer, image: Reference | None) -> LayerFacts:
        """Tail, layer directory, metadata: once per layer whoever asks.

        Who describes the same blob in another way, or knows it from elsewhere, gets no answer that was meant for another.
        """
        with self.layers.pin(descriptor.digest):
            origins = await self._origins(descriptor, image)
            said = replace(descriptor, source=None, prefetch="") if isinstance(descriptor, LayerDescriptor) else descriptor
            facts = await self._making.do((said, tuple(origins)), lambda: self._make_now(descriptor, origins))
            self.layers.keep_awhile(descriptor.digest)
            if isinstance(descriptor, LayerDescriptor):
                with contextlib.suppress(OSError):  # a full disk: without its profile the layer is as right
                    self.layers.dirs.set_prefetch(descriptor.digest, descriptor.prefetch)
            return facts

    async def _make_now(self, descriptor: LayerDescriptor | ForeignLayer, origins: list[Origin]) -> LayerFacts:
        dirs = self.layers.dirs
        begin = time.perf_counter()
        if not dirs.exists(descriptor.digest):
            large = isinstance(descriptor, LayerDescriptor) and descriptor.toc_length > _LARGE_TAIL
            async with self._large if large else contextlib.nullcontext():
                await self._store(descriptor, origins)
            if isinstance(descriptor, ForeignLayer):
                log.info("layer is in another format", extra={"layer": descriptor.digest, "format": descriptor.format})
            if origins and os.path.basename(origins[0].path) == CONVERTED:
                log.info("layer was converted on this node, its image is not lazy", extra={"layer": descriptor.digest})
            self._metrics.resolve_seconds.labels(stage="tail").observe(time.perf_counter() - begin)
        # Even where it was made here: others may have been first.
        known = dirs.source(descriptor.digest)
        its_toc = known.foreign.toc_digest if known.foreign is not None else known.toc_digest
        its_format = known.foreign.format if known.foreign is not None else ""
        wanted_format = descriptor.format if isinstance(descriptor, ForeignLayer) else ""
        if (its_format, its_toc, known.size) != (wanted_format, descriptor.toc_digest, descriptor.size):
            # A digest of the whole blob is not checked while it is read piecemeal: whoever came first with this
            # digest has fixed what its tail is, and somebody else's manifest cannot change it.
            raise VerificationError(
                f"layer {descriptor.digest} is known with another tail",
                hint="one of two images that name this layer is forged or was converted wrongly",
            )
        dirs.add_origins(descriptor.digest, origins)
        begin = time.perf_counter()
        facts = await self.layers.plane.prepare(descriptor.digest, Variant())
        self._metrics.resolve_seconds.labels(stage="build").observe(time.perf_counter() - begin)
        return facts

    async def _store(self, descriptor: LayerDescriptor | ForeignLayer, origins: list[Origin]) -> None:
        """Make the layer's directory with the checked tail, from the first origin that has it.

        Raises SourceError or FormatError of the last; OSError.
        """
        failure: WeenvError = _NoOrigin(
            f"no registry is known for layer {descriptor.digest}",
            hint="let the client send cri labels, or convert with a source annotation",
        )
        hint = descriptor.source if isinstance(descriptor, LayerDescriptor) else None
        if not origins and hint is not None and self._config.use_source_annotation:
            host = hint[0]
            failure = _Refused(
                f"its source annotation names {host}, which is this node or its link",
                hint=f'if that registry is meant, set [registry] allow_sources = ["{host}"], and start the snapshotter again',
            )
        for origin in origins:
            try:
                source = open_source(self.client, origin, descriptor.digest, descriptor.size)
                try:
                    if isinstance(descriptor, ForeignLayer):
                        await self._store_foreign(source, descriptor, origins)
                    else:
                        await self._store_own(source, descriptor, origins)
                finally:
                    await source.close()
                return
            except (SourceError, FormatError) as error:
                failure = error
                log.warning("origin does not give the tail: %s", error, extra={"layer": descriptor.digest})
        raise failure

    async def _store_own(self, source: BlobSource, descriptor: LayerDescriptor, origins: list[Origin]) -> None:
        tail = await read_checked(
            source, descriptor.toc_offset, descriptor.toc_length, lambda tail: verify_tail_bytes(tail, descriptor),
            deadline=self._config.resolve_timeout, inline=_HASH_INLINE,
        )  # fmt: skip
        self._metrics.tail_bytes.inc(len(tail))
        made = LayerSource(
            descriptor.digest, descriptor.size, descriptor.toc_offset, descriptor.toc_length, descriptor.toc_digest, origins
        )
        await asyncio.to_thread(self.layers.dirs.create, made, tail)

    async def _store_foreign(self, source: BlobSource, layer: ForeignLayer, origins: list[Origin]) -> None:
        assert self._translate is not None
        async with contextlib.AsyncExitStack() as stack:
            held = False

            async def admit(length: int) -> None:
                nonlocal held
                if length > _LARGE_TAIL and not held:
                    held = True
                    await stack.enter_async_context(self._large)

            made, directory = await stack.enter_async_context(
                made_tail(
                    source, layer, origins, self.layers.dirs, self._translate,
                    deadline=self._config.resolve_timeout, admit=admit,
                )
            )  # fmt: skip
            assert made.foreign is not None
            self._metrics.tail_bytes.inc(made.foreign.toc_length)
            self.layers.dirs.adopt(made, directory)  # at once: who is cancelled amid it would remove half of it

    async def _origins(self, descriptor: LayerDescriptor | ForeignLayer, image: Reference | None) -> list[Origin]:
        """Where the layer may be had: on the node, where its image is from, what its annotation names."""
        places: list[tuple[str, str]] = []
        if image is not None:
            places.append((image.host, image.repository))
        hint = descriptor.source if isinstance(descriptor, LayerDescriptor) else None
        if hint is not None and self._config.use_source_annotation and hint not in places:
            host = hint[0]
            if (image is not None and image.host == host) or await self._may_ask(host):
                places.append(hint)
        name = digests.hex_of(descriptor.digest)
        own = [os.path.join(self._config.root, layout) for layout in (MUTATIONS, CONVERTED)]
        local = [Origin("layout", path=path) for path in own if os.path.exists(f"{path}/blobs/sha256/{name}")]
        return local + [Origin("registry", host, repository) for host, repository in places]

    async def _may_ask(self, host: str) -> bool:
        """Whether an annotation may send this node to ``host``; see :mod:`weenv.registry.internal`."""
        if self._config.registry.is_configured(host) or host in self._trusted:
            return True
        known = self._hosts.get(host)
        if known is None or known[0] < time.monotonic():
            internal = await is_internal(host)
            if internal:
                log.warning("a source annotation names %s, which is this node or its link: not asked", host)
            known = self._hosts[host] = (time.monotonic() + _TOLD, not internal)
            while len(self._hosts) > _PLANS:
                self._hosts.popitem(last=False)
        return known[1]

    # one image

    async def _plan(self, image: Reference, labels: Mapping[str, str], *, lazy: bool = True) -> Plan | None:
        """The plan of the image that ``labels`` name; None where its manifest cannot be had: then layers decide alone.

        ``lazy``: the image is known to have layers of the format, so that it is worth a warning.
        """
        digest = labels.get(LABEL_MANIFEST, "")
        if not digests.is_digest(digest):
            return None
        key = (image.name, digest)
        plan = self._plans.get(key)
        if plan is not None and time.monotonic() - plan.made < _PLAN_TTL:
            return plan
        return await self._planning.do(key, lambda: self._make_plan(key, image, digest, lazy))

    async def _make_plan(self, key: tuple[str, str], image: Reference, digest: str, lazy: bool) -> Plan | None:
        try:
            manifest = await self._manifest(image, digest)
        except WeenvError as error:
            if lazy:
                log.warning("manifest cannot be read, layers are resolved one by one: %s", error, extra={"image": str(image)})
            else:
                log.info("manifest cannot be read, whatever formats it names: %s", error, extra={"image": str(image)})
            return None
        plan = Plan(str(image), made=time.monotonic())
        wanted: list[LayerDescriptor | ForeignLayer] = []
        for layer in manifest.layers:
            plan.positions.setdefault(layer.digest, len(plan.positions))
            if plan.reason:
                continue
            try:
                descriptor = parse_annotations(layer.annotations) or self._in_another_format(layer)
            except FormatError as error:
                plan.reason = "bad-labels"
                plan.foreign[layer.digest] = error.message
                continue
            if descriptor is None:
                plan.reason = "not-converted"
                continue
            if isinstance(descriptor, ForeignLayer):
                plan.foreign[layer.digest] = descriptor
            plan.limit = len(plan.positions)
            wanted.append(descriptor)
        self._plans[key] = plan
        self._plans.move_to_end(key)
        while len(self._plans) > _PLANS:
            self._plans.popitem(last=False)
        for descriptor in wanted:
            self._background.spawn(self._ahead(descriptor, image), "resolve ahead")
        return plan

    def _in_another_format(self, layer: Descriptor) -> ForeignLayer | None:
        if self._translate is None:
            return None
        return parse_foreign(layer.annotations, layer.digest, layer.size, layer.compression)

    async def _manifest(self, image: Reference, digest: str) -> Manifest:
        what = f"manifest {image.with_digest(digest)}"
        _, headers, body = await self.client.request(
            "GET", image.host, f"/v2/{image.repository}/manifests/{digest}", what=what, scope=scope_of(image.repository),
            headers={"Accept": ACCEPT}, limit=MAX_MANIFEST,
        )  # fmt: skip
        digests.verify(body, digest, what)
        manifest = parse_manifest(body, headers.get("content-type", "").partition(";")[0], what)
        if not isinstance(manifest, Manifest):
            raise FormatError("an index where a manifest was expected", member=what)
        return manifest

    async def _ahead(self, descriptor: LayerDescriptor | ForeignLayer, image: Reference) -> None:
        """Make a layer ready before it is asked for. Whoever asks gets the error, if there is one; here it is nobody's."""
        with contextlib.suppress(WeenvError, OSError):
            facts = await self._make(descriptor, image)
            if not facts.implied:
                with self.layers.pin(descriptor.digest):
                    await self.layers.attach(descriptor.digest, Variant())

    # telling

    def _fall_back(self, labels: Mapping[str, str], key: str, reason: str, detail: str = "", hint: str = "") -> str:
        """Count the layer; log and count the image, once: what its other layers say are consequences.

        Returns the reason and, in a second line, the remedy.
        """
        self._metrics.ordinary_layers.labels(reason=reason).inc()
        layer = labels.get(LABEL_LAYER, "") or labels.get(LAYER_ANNOTATION, "").partition(",")[0]
        extra = {
            "reason": reason,
            "image": labels.get(LABEL_IMAGE, ""),
            "layer": layer,
            "chain": "" if layer else key.rpartition(" ")[2],
            "detail": " ".join(detail.split())[:500],
            "hint": " ".join("; ".join(filter(None, (hint or _REMEDIES.get(reason, ""), _BESIDES.get(reason)))).split())[:500],
        }
        why = f"{extra['detail'] or REASONS[reason]}\n{extra['hint']}".encode("utf-8", "replace").decode()
        extra = {name: value for name, value in extra.items() if value}
        image, now = (labels.get(LABEL_IMAGE, ""), labels.get(LABEL_MANIFEST, "")), time.monotonic()
        while self._told and next(iter(self._told.values())) < now:
            self._told.popitem(last=False)
        if image in self._told:
            log.debug("layer is not served lazily: %s", REASONS[reason], extra=extra)
            return why
        self._told[image] = now + (_TOLD if any(image) else _TOLD_UNNAMED)
        self._metrics.fallbacks.labels(reason=reason).inc()
        log.warning("image is not served lazily: %s", REASONS[reason], extra=extra)
        return why


def _image(labels: Mapping[str, str]) -> Reference | None:
    """The image's name, where the client sent one that can be parsed."""
    try:
        return parse_reference(labels[LABEL_IMAGE])
    except (KeyError, BadReference):
        return None


def _check_chain(diff_id: str, target: str, parent_ref: str, has_parent: bool) -> None:
    """The layer has to be the one whose chainID containerd asks for, as far as the parent's chainID is known.

    Chains are shared between images and namespaces, so a manifest that pairs another image's config with layers of its
    own must not get to define them.
    """
    if has_parent and not parent_ref:
        return
    if not digests.is_digest(target) or (parent_ref and not digests.is_digest(parent_ref)):
        return
    have = digests.sha256(f"{parent_ref} {diff_id}".encode()) if parent_ref else diff_id
    if have != target:
        raise _WrongLayer(f"the layer's diffID {diff_id} does not give the chainID {target}")
