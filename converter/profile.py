"""Read profiles into an image's manifest: its layers' annotations, and nothing else of it.

What a node recorded comes as a function, so that this knows nothing of nodes. A manifest none of whose layers was read stays as
it is, and so does a layer without a record: it keeps the profile that it has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from weenv.converter.image import Conversion, Outcome, convert_between
from weenv.converter.options import SKIPPED, ConvertOptions, ConvertResult
from weenv.core.errors import FormatError, InvalidRequest
from weenv.layer.profile import Encoded, encode, timeline
from weenv.registry.client import RegistryClient
from weenv.registry.endpoints import Destination, Source, open_ends
from weenv.registry.manifest import Descriptor, Index, Manifest, parse_manifest
from weenv.registry.reference import parse_location

Records = Callable[[Sequence[str]], Mapping[str, Sequence[tuple[int, int]]]]
"""What was read of the layers with these digests, by digest: (time in units of profile.py by one clock, frame)."""

_IMAGES_MAX = 64
"""Manifests of an index that are looked at."""


@dataclass(frozen=True, slots=True)
class Published:
    """The image at its destination, and the profiles in it by the digest of their layer."""

    result: ConvertResult
    profiles: Mapping[str, Encoded]


class _Profiling(Conversion):
    def __init__(
        self, source: Source, destination: Destination, options: ConvertOptions,
        records: Mapping[str, Sequence[tuple[int, int]]],
    ) -> None:  # fmt: skip
        super().__init__(source, destination, options, None)
        self._records = records
        self.profiles: dict[str, Encoded] = {}

    async def manifest(self, manifest: Manifest, old: Descriptor, platform: str) -> tuple[Descriptor, bytes]:
        layers = dict.fromkeys(layer.digest for layer in manifest.layers) if manifest.is_image else {}
        found = {digest: self._records[digest] for digest in layers if digest in self._records}
        if not any(found.values()):
            return await self._as_it_is(manifest, old, platform, "nothing of it was recorded")
        for digest, needed in timeline(found).items():
            self.profiles.setdefault(digest, encode(needed))
        return await super().manifest(manifest, old, platform)

    async def convert_layer(self, layer: Descriptor, diff_id: str) -> Outcome:
        ours = await self.already_ours(layer, diff_id)
        if ours is None or ours.layer is None:
            return await self.copied_as_it_is(layer, "not in the lazy format")
        await self.copy(layer)
        profile = self.profiles.get(layer.digest)
        if profile is None or not profile.value:
            return replace(ours, reason="nothing of it was recorded")
        return Outcome(SKIPPED, "", replace(ours.layer, prefetch=profile.value), ours.diff_id, ours.stream_size)


async def publish_profile(src: str, dst: str, records: Records, *, options: ConvertOptions) -> Published:
    """Publish the image at ``src`` as ``dst`` with what ``records`` says. Blobs that are at ``dst`` are not moved.

    Raises InvalidRequest where nothing was recorded of any layer; WeenvError.
    """
    async with contextlib.AsyncExitStack() as stack:
        client = options.client
        if client is None:
            client = await stack.enter_async_context(RegistryClient(options.registry))
        source, destination = open_ends(
            client, parse_location(src), parse_location(dst), scratch_root=options.scratch_root(), chunk_size=0
        )
        stack.push_async_callback(destination.close)
        digests = [layer.digest for _, manifest in await images(source) for layer in manifest.layers]
        recorded = records(digests)
        if not any(recorded.values()):
            raise InvalidRequest(
                f"nothing of {src} was recorded on this node",
                hint="run a container of it here first; a layer that was complete before anything was read is not seen: "
                "remove the image and its containers, or weenv cache prune it, and start again",
            )
        work = _Profiling(source, destination, options, recorded)
        result = await convert_between(source, destination, options, src=src, dst=dst, work=work)
        return Published(result, work.profiles)


async def images(source: Source) -> list[tuple[str, Manifest]]:
    """The container images at ``source`` with their platforms; one, where it names no index. Raises WeenvError."""
    data, descriptor = await source.root()
    found: list[tuple[str, Manifest]] = []
    parsed = parse_manifest(data, descriptor.media_type, descriptor.digest)
    if isinstance(parsed, Manifest):
        return [("", parsed)] if parsed.is_image else []
    pending = list(parsed.manifests)
    if len(pending) > _IMAGES_MAX:
        hint = f"name one of them: at most {_IMAGES_MAX} are looked at"
        raise FormatError(f"an index of {len(pending)} manifests", hint=hint)
    for child in pending:
        one = parse_manifest(await source.manifest(child), child.media_type, child.digest)
        if isinstance(one, Manifest) and one.is_image:
            found.append((child.platform_name, one))
        elif isinstance(one, Index):
            raise FormatError("an index within an index", member=child.digest, hint="name one of its images")
    return found
