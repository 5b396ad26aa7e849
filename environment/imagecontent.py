"""The layer blobs of lazy images, for what needs them whole: ``docker save``, ``docker push`` to elsewhere, ``ctr export``.

A lazily pulled image has its manifest and config in containerd's content store, and none of its layers. What copies an
image out of the store finds holes there: some tools say so, docker 28's ``save`` writes an archive without layers and
succeeds. :func:`fetch` puts the blobs into the store, byte for byte as the registry has them, and ties them to the
manifest with containerd's collector labels, so that they live as long as the image. It changes nothing else: the image
is served as lazily as before.

A blob is had from where this node reads the layer (the layer directory's origins), from where composing said that it is
(ORIGIN_LABEL), from where containerd's ``distribution.source`` labels say, and from the repository that the
image is named after. containerd checks its digest.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from weenv.core import digest as digests
from weenv.core.aio import gather_all
from weenv.core.errors import BadReference, FormatError, NotFoundInSource, SourceError, VerificationError
from weenv.environment.compose import HOST, ORIGIN_LABEL, under_lease
from weenv.plugin.containerd.client import ContainerdError, Namespaced
from weenv.plugin.containerd.types import Image
from weenv.plugin.snapshotter.layerdir import LayerDirs, Origin
from weenv.registry.client import RegistryClient
from weenv.registry.manifest import MAX_MANIFEST, Descriptor, Index, Manifest, parse_manifest
from weenv.registry.reference import check_host, check_repository, parse_reference
from weenv.registry.source import open_source

_SOURCE_LABEL = "containerd.io/distribution.source."
"""containerd's label, a host (without port) after it: repositories of that host that have the blob, by commas."""
_REF_LABEL = "containerd.io/gc.ref.content"
"""containerd's label of a blob that keeps another: anything may follow after a dot (docs/garbage-collection.md)."""

_DANGLING = "moby-dangling@"
"""How docker's names of images without a name begin (daemon/containerd/image.go, v28.5.2)."""

_JOBS = 4
_DEADLINE = 86_400.0
"""Seconds for a blob as a whole; one that stands still is given up by registry.stall_timeout."""
_LEASE_LIFE = 86_400
_ID = re.compile(r"(?:sha256:)?([0-9a-f]{4,64})\Z")
_NAMES = 8
"""Names of images told in an error."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob of an image and where it stands: ``manifest`` is the digest of the document that lists it."""

    descriptor: Descriptor
    manifest: str
    number: int
    present: bool


@dataclass(frozen=True, slots=True)
class ImageContent:
    """What containerd's content store has of an image. ``left_out``: manifests of platforms that were not pulled."""

    name: str
    digest: str
    blobs: tuple[Blob, ...] = ()
    left_out: tuple[str, ...] = ()
    labels: dict[str, dict[str, str]] = field(default_factory=dict)
    """Labels of the manifests, by digest."""

    @property
    def missing(self) -> tuple[Blob, ...]:
        """Blobs that the store does not have."""
        return tuple(blob for blob in self.blobs if not blob.present)

    @property
    def missing_bytes(self) -> int:
        """Their size together."""
        return sum(blob.descriptor.size for blob in self.missing)


async def find(namespace: Namespaced, text: str) -> Image:
    """The image that ``text`` means to containerd or docker: a full name, a short one, or (the beginning of) a digest.

    Raises NotFoundInSource, BadReference, ContainerdError.
    """
    names = [text]
    with contextlib.suppress(BadReference):  # it may be a digest, or a name that containerd took as it was
        names.append(str(parse_reference(text)))
    for name in dict.fromkeys(names):
        try:
            return await namespace.get_image(name)
        except ContainerdError as error:
            if error.code not in ("NOT_FOUND", "INVALID_ARGUMENT"):
                raise
    match = _ID.match(text)
    everything = await namespace.list_images()
    if match is not None:
        found = {image.target.digest: image for image in everything if digests.hex_of(image.target.digest).startswith(match[1])}
        if len(found) == 1:
            return next(iter(found.values()))
        if found:
            raise BadReference(f"{text} is the beginning of {len(found)} images' digests", hint="write more of it")
    some = ", ".join(sorted(image.name for image in everything)[:_NAMES])
    hint = f"it has {some}" if some else "it has no image at all: is it the right one (--namespace)? docker's is moby"
    raise NotFoundInSource(f"containerd's namespace {namespace.name} has no image {text}", hint=hint)


async def look(namespace: Namespaced, image: Image) -> ImageContent:
    """What of the image is there. Manifests of other platforms that were not pulled are left out, as docker does.

    Raises FormatError, NotFoundInSource (where it has no manifest at all), ContainerdError.
    """
    documents: dict[str, Manifest] = {}
    left_out: list[str] = []
    seen: set[str] = set()  # indexes may name each other many times over
    todo = [(image.target.digest, image.target.media_type)]
    root = todo[0][0]
    while todo:
        digest, media_type = todo.pop()
        if digest in seen or not digests.is_digest(digest):
            continue
        seen.add(digest)
        try:
            data = await namespace.read_content(digest, limit=MAX_MANIFEST)
        except ContainerdError as error:
            if error.code != "NOT_FOUND":
                raise
            left_out.append(digest)
            continue
        digests.verify(data, digest, "what containerd holds")
        parsed = parse_manifest(data, media_type, image.name)
        if isinstance(parsed, Index):
            todo.extend((item.digest, item.media_type) for item in parsed.manifests)
        else:
            documents[digest] = parsed
    if not documents:
        raise NotFoundInSource(f"containerd has no manifest of {image.name}, only its name", hint="pull it again")
    labels = {digest: dict((await namespace.content_info(digest)).labels) for digest in documents}
    blobs: dict[str, Blob] = {}
    for digest, document in documents.items():
        for number, descriptor in enumerate((document.config, *document.layers), start=-1):
            if descriptor.digest not in blobs and not descriptor.foreign:
                there = await _has(namespace, descriptor.digest)
                blobs[descriptor.digest] = Blob(descriptor, digest, number, there)
    return ImageContent(image.name, root, tuple(blobs.values()), tuple(left_out), labels)


async def _has(namespace: Namespaced, digest: str) -> bool:
    try:
        await namespace.content_info(digest)
    except ContainerdError as error:
        if error.code != "NOT_FOUND":
            raise
        return False
    return True


class Fetcher:
    """Brings missing blobs into a namespace. ``root`` is the snapshotter's; ``report`` is told bytes as they come."""

    def __init__(
        self, namespace: Namespaced, client: RegistryClient, root: str, report: Callable[[int], None] = lambda _: None
    ) -> None:
        self._namespace = namespace
        self._client = client
        self._dirs = LayerDirs(root)
        self._report = report

    async def fetch(self, content: ImageContent) -> int:
        """Have every blob of the image in the store, kept as long as its manifest is; how many bytes came.

        Raises SourceError, VerificationError, ContainerdError; blobs that came whole stay then, too.
        """
        missing = content.missing
        async with under_lease(self._namespace, life=_LEASE_LIFE, sync=True) as leased:
            slots = asyncio.Semaphore(_JOBS)

            async def one(blob: Blob) -> None:
                async with slots:
                    await self._one(leased, content, blob)

            await gather_all(*(one(blob) for blob in missing))
            for digest, labels in content.labels.items():
                kept = {value for key, value in labels.items() if key.startswith(_REF_LABEL)}
                new = {
                    f"{_REF_LABEL}.weenv.{blob.number}": blob.descriptor.digest
                    for blob in content.blobs
                    if blob.manifest == digest and blob.descriptor.digest not in kept
                }
                if new:
                    await leased.label_content(digest, new)
        return sum(blob.descriptor.size for blob in missing)

    async def _one(self, leased: Namespaced, content: ImageContent, blob: Blob) -> None:
        descriptor = blob.descriptor
        places = self.origins(content, blob)
        ref = f"weenv-fetch-{descriptor.digest}-{secrets.token_hex(4)}"
        labels: dict[str, str] = {}
        for place in places:
            if place.kind == "registry":
                labels.setdefault(_SOURCE_LABEL + _without_port(place.host), place.repository)
        try:
            async with aclosing(self._bytes(content.name, descriptor, places)) as chunks:
                await leased.write_content_stream(ref, chunks, descriptor.size, descriptor.digest, labels=labels)
        except ContainerdError as error:
            if error.code != "FAILED_PRECONDITION":
                raise
            what = f"layer {descriptor.digest} of {content.name}: what came is something else"
            raise VerificationError(what, hint="the registry's copy is damaged: push the image again") from error

    def origins(self, content: ImageContent, blob: Blob) -> list[Origin]:
        """Where to try to get a blob, in this order."""
        found: list[Origin] = []
        with contextlib.suppress(OSError, FormatError):  # not lazy, or nothing uses it any more
            found += self._dirs.source(blob.descriptor.digest).origins
        labels = content.labels.get(blob.manifest, {})
        found += _registries([labels.get(f"{ORIGIN_LABEL}{blob.number}", "")])
        with contextlib.suppress(BadReference):
            named = parse_reference(content.name)
            if named.host != HOST and not content.name.startswith(_DANGLING):
                found.append(Origin("registry", named.api_host, named.repository))
        for key, value in labels.items():
            if key.startswith(_SOURCE_LABEL):
                host = key.removeprefix(_SOURCE_LABEL)
                found += _registries(f"{host}/{repository}" for repository in value.split(","))
        return list(dict.fromkeys(found))

    async def _bytes(self, name: str, descriptor: Descriptor, places: Sequence[Origin]) -> AsyncGenerator[bytes, None]:
        """A blob's bytes; where one place fails, the next goes on."""
        position = 0
        failures: list[SourceError | BadReference] = []
        for place in places:
            try:
                source = open_source(self._client, place, descriptor.digest, descriptor.size)
                try:
                    async with aclosing(source.stream(position, descriptor.size - position, deadline=_DEADLINE)) as chunks:
                        async for chunk in chunks:
                            position += len(chunk)
                            self._report(len(chunk))
                            yield chunk
                finally:
                    await source.close()
                return
            except (SourceError, BadReference) as error:
                failures.append(error)
        if not failures:
            what = f"nothing says where {descriptor.digest} of {name} is"
            raise NotFoundInSource(what, hint="pull the image by the name that its registry has for it, and fetch that")
        also = f" (and {len(failures) - 1} other places failed)" if len(failures) > 1 else ""
        first = failures[0]
        raise type(first)(f"{descriptor.digest} of {name} cannot be had: {first.message}{also}", hint=first.hint)


def _registries(texts: Iterable[str]) -> list[Origin]:
    """``host/repository`` each; what is none is left out: labels may have been set by anybody."""
    found = []
    for text in texts:
        host, _, repository = text.partition("/")
        try:
            found.append(Origin("registry", check_host(host), check_repository(repository)))
        except BadReference:
            continue
    return found


def _without_port(host: str) -> str:
    """As containerd writes a host into its labels (core/remotes/docker/handler.go, v2.1.9)."""
    return host.rpartition(":")[0] if re.search(r":[0-9]+\Z", host) else host
