"""Whole images: every layer of every platform to our format, everything else as it was.

::

    root (index or manifest)
      └─ manifest ─┬─ config          copied, byte for byte
                   └─ layers          already ours: copied, "skipped"
                                      else: fetch, verify, decompress, encode, compare diffID, put: "converted"
                                      cannot be represented: copied, "copied", with the reason

The name is published last, so an interrupted run leaves unreferenced blobs at most, and what it converted is found
by the next one (remember.py).

Shared state, all on the event loop: ``_layers`` and ``_copies`` hold one task for each digest, whoever asks for it and
however often; they are cancelled and awaited before anything temporary is removed. Threads only touch files of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from weenv.converter.options import (
    CONVERTED,
    COPIED,
    SKIPPED,
    ConvertOptions,
    ConvertResult,
    Event,
    LayerResult,
    ManifestResult,
)
from weenv.converter.pipeline import encode_file
from weenv.converter.remember import Memory, Remembered
from weenv.core import digest as digests
from weenv.core.aio import gather_all
from weenv.core.errors import FormatError, SourceError, UnsupportedError, VerificationError
from weenv.layer.encode import EncodedLayer
from weenv.layer.verify import MEDIA_TYPE, LayerDescriptor, parse_annotations, verify_tail
from weenv.registry.client import RegistryClient
from weenv.registry.endpoints import Destination, Source, open_ends
from weenv.registry.manifest import (
    MAX_CONFIG,
    MAX_MANIFEST,
    OCI_INDEX,
    OCI_MANIFEST,
    TO_OCI,
    Descriptor,
    Index,
    Manifest,
    parse_config,
    parse_manifest,
)
from weenv.registry.reference import Reference, parse_location
from weenv.registry.threads import in_thread

T = TypeVar("T")

MAX_INDEX_DEPTH = 4
REFERENCE_DIGEST = "vnd.docker.reference.digest"
"""BuildKit's annotation that ties an attestation manifest to the image manifest beside it in the index."""

# Annotations that describe the old blob's bytes: eStargz, zstd:chunked, nydus, overlaybd, and our own.
_STALE = (
    "containerd.io/snapshot/weenv.", "containerd.io/snapshot/stargz/", "io.containers.estargz.",
    "io.github.containers.zstd-chunked.", "io.containers.zstd-chunked.", "containerd.io/snapshot/nydus-",
    "containerd.io/snapshot/overlaybd",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one layer's blob."""

    status: str
    reason: str
    layer: LayerDescriptor | None = None
    diff_id: str = ""
    stream_size: int = 0
    seconds: float = 0.0


async def convert_image(src: str, dst: str, *, options: ConvertOptions | None = None) -> ConvertResult:
    """Convert the image at ``src`` and publish it at ``dst``; either is ``oci:DIR[:TAG]`` or a registry reference.

    Raises WeenvError. Cancelling it (Ctrl-C) leaves no partial tag and no temporary file.
    """
    options = options or ConvertOptions()
    source_location, destination_location = parse_location(src), parse_location(dst)
    async with contextlib.AsyncExitStack() as stack:
        client = options.client
        if client is None:
            client = await stack.enter_async_context(RegistryClient(options.registry))
        source, destination = open_ends(
            client, source_location, destination_location,
            scratch_root=options.scratch_root(), chunk_size=options.chunk_size,
        )  # fmt: skip
        stack.push_async_callback(destination.close)
        hint = None
        if options.source_hint and isinstance(destination_location, Reference):
            hint = (destination_location.host, destination_location.repository)
        return await convert_between(source, destination, options, src=src, dst=dst, hint=hint)


async def convert_between(
    source: Source, destination: Destination, options: ConvertOptions, *, src: str, dst: str,
    hint: tuple[str, str] | None = None, work: Conversion | None = None,
) -> ConvertResult:  # fmt: skip
    """:func:`convert_image` between two ends that the caller made and closes; ``src`` and ``dst`` are for the result.

    ``work`` is what is done with the image, where that is not a conversion; it is closed at the end.
    """
    began = time.monotonic()
    work = work or Conversion(source, destination, options, hint)
    try:
        data, descriptor = await source.root()
        await asyncio.to_thread(destination.open)
        new, root = await work.document(data, descriptor, 0)
        await destination.publish(root, new)
    finally:
        await work.close()
    return ConvertResult(src, dst, new, tuple(work.manifests), tuple(work.layers), time.monotonic() - began)


class _Once(Generic[T]):
    """One task for each key; unlike a single flight, its result is kept, and nobody's cancellation ends it but close."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[T]] = {}

    async def do(self, key: str, start: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, bool]:
        """The result of ``start()`` for that key, and whether this call began it."""
        task = self._tasks.get(key)
        first = task is None
        if task is None:
            task = self._tasks[key] = asyncio.get_running_loop().create_task(start())
        return await asyncio.shield(task), first

    async def close(self) -> None:
        """Cancel what still runs and wait for it."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


class Conversion:
    """One conversion between two ends. Who does something else with an image's layers overrides :meth:`manifest`
    and :meth:`convert_layer`."""

    def __init__(self, source: Source, destination: Destination, options: ConvertOptions, hint: tuple[str, str] | None) -> None:
        self._source = source
        self._destination = destination
        self._options = options
        self._hint = hint
        self._memory = Memory(options.cache_dir, options.target, options.level)
        self._layers: _Once[Outcome] = _Once()
        self._copies: _Once[None] = _Once()
        self._children: _Once[Descriptor] = _Once()
        self._encoding = asyncio.Semaphore(options.jobs)
        # Spooled layers take disk: fetch at most one ahead of the encoders.
        self._spooled = asyncio.Semaphore(options.jobs + 1)
        self.manifests: list[ManifestResult] = []
        self.layers: list[LayerResult] = []

    async def close(self) -> None:
        """End what is under way."""
        await self._children.close()
        await self._layers.close()
        await self._copies.close()

    # -- documents ----------------------------------------------------------------------------------------------

    async def document(self, data: bytes, descriptor: Descriptor, depth: int, platform: str = "") -> tuple[Descriptor, bytes]:
        """Convert a manifest or index; its blobs and children are at the destination then, itself not yet."""
        parsed = parse_manifest(data, descriptor.media_type, descriptor.digest)
        if isinstance(parsed, Index):
            return await self._index(parsed, descriptor, depth)
        return await self.manifest(parsed, descriptor, platform)

    async def _index(self, index: Index, old: Descriptor, depth: int) -> tuple[Descriptor, bytes]:
        if depth >= MAX_INDEX_DEPTH:
            raise FormatError(f"indexes nested more than {MAX_INDEX_DEPTH} deep", member=old.digest)

        async def convert(descriptor: Descriptor) -> Descriptor:
            data = await self._source.manifest(descriptor)
            new, body = await self.document(data, descriptor, depth + 1, descriptor.platform_name)
            await self._destination.put_manifest(body, new)
            return new

        async def child(descriptor: Descriptor) -> Descriptor:
            # Once each: indexes that list one another many times are exponential work otherwise.
            key = f"{descriptor.digest} {descriptor.platform_name}"
            return (await self._children.do(key, lambda: convert(descriptor)))[0]

        children = await gather_all(*(child(descriptor) for descriptor in index.manifests))
        changed = {
            number: replace(was, media_type=new.media_type, digest=new.digest, size=new.size)
            for number, (was, new) in enumerate(zip(index.manifests, children, strict=True))
            if was.digest != new.digest
        }
        if not changed:
            return replace(old, media_type=index.media_type), index.data
        renamed = {index.manifests[number].digest: new.digest for number, new in changed.items()}
        for number, was in enumerate(index.manifests):
            about = renamed.get(was.annotations.get(REFERENCE_DIGEST, ""))
            if about is not None:
                now = changed.get(number, was)
                changed[number] = replace(now, annotations=now.annotations | {REFERENCE_DIGEST: about})
        data = index.with_manifests(changed)
        return _described(data, OCI_INDEX), data

    async def manifest(self, manifest: Manifest, old: Descriptor, platform: str) -> tuple[Descriptor, bytes]:
        """Convert one manifest."""
        if not manifest.is_image:
            return await self._as_it_is(manifest, old, platform, "not a container image")
        if self._options.platforms and platform and platform not in self._options.platforms:
            return await self._as_it_is(manifest, old, platform, "platform not asked for")
        config_data = await self._source.small(manifest.config, MAX_CONFIG)
        try:
            config = parse_config(config_data, f"config of {old.digest}")
        except FormatError:
            if manifest.artifact_type:  # an artifact that borrows the media types of images
                return await self._as_it_is(manifest, old, platform, "not a container image")
            raise
        platform = platform or "/".join(part for part in (config.os, config.architecture) if part)
        if config.os not in ("", "linux"):
            return await self._as_it_is(manifest, old, platform, f"an image for {config.os}")
        if len(config.diff_ids) != len(manifest.layers):
            raise FormatError(
                f"its config lists {len(config.diff_ids)} diffIDs for {len(manifest.layers)} layers", member=old.digest
            )
        if not await self._destination.has(manifest.config):
            await self._destination.put_bytes(config_data, manifest.config)
        outcomes = await gather_all(
            *(self._layer(layer, diff_id) for layer, diff_id in zip(manifest.layers, config.diff_ids, strict=True))
        )
        replaced: dict[int, Descriptor] = {}
        results: list[LayerResult] = []
        for number, (layer, outcome) in enumerate(zip(manifest.layers, outcomes, strict=True)):
            new = layer
            if outcome.layer is not None:
                new = self._new_descriptor(layer, outcome.layer)
                if new != layer:
                    replaced[number] = new
            results.append(
                LayerResult(platform, number, layer, new, outcome.status, outcome.reason, outcome.seconds,
                            outcome.stream_size, outcome.diff_id)
            )  # fmt: skip
        data = manifest.with_layers(replaced) if replaced else manifest.data
        new_manifest = _described(data, OCI_MANIFEST) if replaced else replace(old, media_type=manifest.media_type)
        if len(data) > MAX_MANIFEST:
            raise FormatError("the new manifest would be too large", member=old.digest)
        if replaced:
            results = [
                replace(r, new=replace(r.new, media_type=TO_OCI.get(r.new.media_type, r.new.media_type))) for r in results
            ]
        self.layers += results
        self.manifests.append(ManifestResult(platform, old, new_manifest))
        return new_manifest, data

    async def _as_it_is(self, manifest: Manifest, old: Descriptor, platform: str, reason: str) -> tuple[Descriptor, bytes]:
        await gather_all(self.copy(manifest.config), *(self.copy(layer) for layer in manifest.layers))
        self.manifests.append(ManifestResult(platform, old, old, reason))
        return replace(old, media_type=manifest.media_type), manifest.data

    def _new_descriptor(self, old: Descriptor, layer: LayerDescriptor) -> Descriptor:
        kept = {key: value for key, value in old.annotations.items() if not key.startswith(_STALE)}
        hint = self._hint if self._hint is not None else layer.source
        annotations = kept | replace(layer, source=hint).annotations()
        return Descriptor(MEDIA_TYPE, layer.digest, layer.size, annotations)

    # -- layers -------------------------------------------------------------------------------------------------

    async def _layer(self, layer: Descriptor, diff_id: str) -> Outcome:
        outcome, first = await self._layers.do(layer.digest, lambda: self._work(layer, diff_id))
        if not first:
            outcome = replace(outcome, seconds=0.0)
        if outcome.layer is not None and outcome.diff_id != diff_id:
            # Two images list one layer under two diffIDs: one of them is wrong, and it is not to be made worse.
            await self.copy(layer)
            return Outcome(COPIED, f"its content has diffID {outcome.diff_id}, the config says {diff_id}")
        return outcome

    async def _work(self, layer: Descriptor, diff_id: str) -> Outcome:
        began = time.monotonic()
        try:
            outcome = await self.convert_layer(layer, diff_id)
        except VerificationError:
            raise  # the source's bytes are not what its manifest promises
        except FormatError as error:
            await self.copy(layer)
            outcome = Outcome(COPIED, str(error))
        self._report("done", layer.digest, layer.size, layer.size, outcome.status)
        return replace(outcome, seconds=time.monotonic() - began)

    async def convert_layer(self, layer: Descriptor, diff_id: str) -> Outcome:
        """Have a layer's blob, converted or not, at the destination; its diffID is to be ``diff_id``."""
        if not layer.compression:
            return await self.copied_as_it_is(layer, f"not a tar layer: {layer.media_type[:100]}")
        if layer.foreign:
            return await self.copied_as_it_is(layer, "a layer that is not to be redistributed")
        ours = await self.already_ours(layer, diff_id)
        if ours is not None:
            await self.copy(layer)
            return ours
        known = None if self._options.force else self._memory.find(layer.digest)
        if known is not None and known.diff_id == diff_id:
            blob = Descriptor(MEDIA_TYPE, known.layer.digest, known.layer.size)
            if await self._destination.has(blob, mount=False, places=known.places):
                self._memory.store(layer.digest, known.also(self._destination.place))
                return Outcome(SKIPPED, "converted before", known.layer, known.diff_id, known.stream_size)
        async with self._spooled:
            spool = os.path.join(self._destination.scratch, "in-" + secrets.token_hex(8))
            out = os.path.join(self._destination.scratch, "out-" + secrets.token_hex(8))
            try:
                path = await self._source.fetch(layer, spool, self._moved("fetch", layer))
                async with self._encoding:
                    try:
                        encoded = await self._encode(layer, path, out)
                    except UnsupportedError:
                        raise
                    except FormatError as error:
                        # The bytes are those that the manifest promises: they are malformed, not tampered with.
                        raise UnsupportedError(error.message, member="") from error
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(spool)
                if encoded.diff_id != diff_id:
                    reason = f"its content has diffID {encoded.diff_id}, the config says {diff_id}"
                    return await self.copied_as_it_is(layer, reason)
                blob = Descriptor(MEDIA_TYPE, encoded.blob_digest, encoded.blob_size)
                if not await self._destination.has(blob, mount=False):
                    await self._destination.put(
                        blob, out, owned=True, progress=self._moved("push", replace(layer, size=blob.size))
                    )
            finally:
                for temporary in (spool, out):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(temporary)
        before = known.places if known is not None and known.layer == encoded.descriptor() else ()
        result = Remembered(encoded.descriptor(), encoded.diff_id, encoded.stream_size, before).also(self._destination.place)
        self._memory.store(layer.digest, result)
        return Outcome(CONVERTED, "", result.layer, result.diff_id, result.stream_size)

    async def already_ours(self, layer: Descriptor, diff_id: str) -> Outcome | None:
        """The outcome for a layer that is in our format, checked as far as its tail; None for any other."""
        try:
            claimed = parse_annotations(layer.annotations, self._options.limits)
            if (
                claimed is None
                or layer.media_type != MEDIA_TYPE
                or (claimed.digest, claimed.size) != (layer.digest, layer.size)
            ):
                return None
            source = self._source.blob(layer)
            try:
                tail = await source.read(claimed.toc_offset, claimed.toc_length)
            finally:
                await source.close()
            toc = await asyncio.to_thread(verify_tail, tail, claimed, self._options.limits)
        except FormatError:
            return None  # its content is still a tar stream: converted anew
        if toc.diff_id != diff_id:
            return None
        return Outcome(SKIPPED, "already in the format", claimed, toc.diff_id, toc.stream_size)

    async def _encode(self, layer: Descriptor, path: str, out: str) -> EncodedLayer:
        taken = None
        if self._options.progress is not None:
            taken = lambda done: self._report("convert", layer.digest, done, layer.size)  # noqa: E731
        return await in_thread(None, lambda cancel: encode_file(path, out, self._options, cancel, taken))

    async def copied_as_it_is(self, layer: Descriptor, reason: str) -> Outcome:
        """The same, with the outcome that says why."""
        await self.copy(layer)
        return Outcome(COPIED, reason)

    async def copy(self, blob: Descriptor) -> None:
        """Have a blob at the destination as it is."""
        await self._copies.do(blob.digest, lambda: self._copy_now(blob))

    async def _copy_now(self, blob: Descriptor) -> None:
        if await self._destination.has(blob):
            return
        spool = os.path.join(self._destination.scratch, "copy-" + secrets.token_hex(8))
        try:
            try:
                path = await self._source.fetch(blob, spool, self._moved("fetch", blob))
            except SourceError:
                if blob.foreign:  # its bytes are elsewhere (urls), as before
                    return
                raise
            await self._destination.put(blob, path, owned=path == spool, progress=self._moved("push", blob))
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(spool)

    # -- progress -----------------------------------------------------------------------------------------------

    def _report(self, stage: str, digest: str, done: int, total: int, text: str = "") -> None:
        if self._options.progress is not None:
            self._options.progress(Event(stage, digest, done, total, text))

    def _moved(self, stage: str, blob: Descriptor) -> Callable[[int], None] | None:
        if self._options.progress is None:
            return None
        moved = 0

        def step(count: int) -> None:
            nonlocal moved
            moved += count
            self._report(stage, blob.digest, moved, blob.size)

        return step


def _described(data: bytes, media_type: str) -> Descriptor:
    return Descriptor(media_type, digests.sha256(data), len(data))
