"""Finding layer blobs by what a user types: a file, ``oci:DIR[:TAG]``, or an image or blob in a registry."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from weenv.core.errors import BadReference, FormatError, NotFoundInSource, SourceError
from weenv.layer.decode import ReadAt
from weenv.layer.foreign.formats import ForeignLayer, parse_foreign
from weenv.layer.verify import LayerDescriptor, is_annotated, parse_annotations
from weenv.plugin.snapshotter.layerdir import Origin
from weenv.registry.client import RegistryClient
from weenv.registry.groupref.resolve import choose, this_platform
from weenv.registry.layout import Layout
from weenv.registry.manifest import Descriptor, Index, Manifest, parse_manifest
from weenv.registry.reference import LayoutLocation, Reference, parse_location
from weenv.registry.source import BlobSource, open_source

_PATHS = ("/", "./", "../", "~/")
_BARE = re.compile(r"[A-Za-z0-9._-]+\Z")
_FILES = (".tar", ".zst", ".tzst", ".gz", ".tgz", ".xz", ".bz2", ".layer", ".blob", ".bin")
"""What no image's name ends with, and files' names do."""


@dataclass(slots=True)
class FoundLayer:
    """A layer blob: how to call it, where its bytes are, and what a manifest promises of it (None: nothing does)."""

    name: str
    digest: str
    source: BlobSource
    origin: Origin
    promised: LayerDescriptor | None
    foreign: ForeignLayer | None = None
    """What a manifest promises of a layer in another format."""


async def find_layers(client: RegistryClient, text: str, platform: str = "") -> list[FoundLayer]:
    """The layers that ``text`` means, bottom first; one for a file or a blob's digest.

    Raises BadReference, SourceError, FormatError.
    """
    _check_file(text)
    if os.path.exists(text) and not os.path.isdir(text):
        origin = Origin("file", path=os.path.abspath(text))
        return [FoundLayer(text, "", open_source(client, origin, "", os.path.getsize(text)), origin, None)]
    try:
        location = parse_location(text)
    except BadReference as error:
        raise BadReference(f"{text!r} is neither a file nor a reference: {error.message}", hint=error.hint) from error
    if isinstance(location, LayoutLocation):
        return _from_layout(client, location, platform, text)
    return await _from_registry(client, location, platform, text)


def _check_file(text: str) -> None:
    """Raises where ``text`` is a file's name by its looks, and there is no such file; or a directory's without ``oci:``."""
    first, _, rest = text.partition("/")
    host = bool(rest) and first not in (".", "..") and ("." in first or ":" in first or first == "localhost")
    if os.path.isdir(text) and not host:
        hint = f"for an OCI image layout write oci:{text.rstrip('/') or '/'}; for an image of that name say its registry too"
        raise BadReference(f"{text} is a directory", hint=hint)
    if not os.path.lexists(text) and (text.startswith(_PATHS) or (text.endswith(_FILES) and not host)):
        raise NotFoundInSource(f"no such file: {text}", hint="name a layer file, oci:DIR[:TAG], or an image in a registry")
    if not os.path.lexists(text) and _BARE.match(text):  # of Docker Hub's; who means that says so
        hint = f"name a layer file, oci:DIR[:TAG], or an image in a registry, such as docker.io/library/{text}"
        raise NotFoundInSource(f"no such file: {text}", hint=hint)


def _from_layout(client: RegistryClient, location: LayoutLocation, platform: str, text: str) -> list[FoundLayer]:
    layout = Layout(location.path)
    layout.check()
    origin = Origin("layout", path=os.path.abspath(location.path))
    if location.digest:
        images = list(_images(layout))
        for _, manifest in images:
            for layer in manifest.layers:
                if layer.digest == location.digest:
                    return [_found(client, layer, origin, text)]
        if all(descriptor.digest != location.digest for descriptor, _ in images):
            path = layout.blob_path(location.digest)
            if not os.path.exists(path):
                raise NotFoundInSource(f"{text}: no such blob in the layout")
            source = open_source(client, origin, location.digest, os.path.getsize(path))
            return [FoundLayer(text, location.digest, source, origin, None)]
    descriptor = layout.resolve(location.tag, location.digest)
    parsed = parse_manifest(layout.read_blob(descriptor), descriptor.media_type)
    if isinstance(parsed, Index):
        descriptor = choose(parsed, platform or this_platform(), text)
        parsed = parse_manifest(layout.read_blob(descriptor), descriptor.media_type)
    return [_found(client, layer, origin, text) for layer in _image(parsed, text).layers]


def _images(layout: Layout) -> Iterator[tuple[Descriptor, Manifest]]:
    """Every image manifest that a layout's index leads to."""
    todo = list(layout.index().manifests)
    seen: set[str] = set()
    while todo:
        descriptor = todo.pop()
        if descriptor.digest in seen:
            continue
        seen.add(descriptor.digest)
        try:
            parsed = parse_manifest(layout.read_blob(descriptor), descriptor.media_type)
        except (FormatError, NotFoundInSource):
            continue
        if isinstance(parsed, Index):
            todo.extend(parsed.manifests)
        else:
            yield descriptor, parsed


async def _from_registry(client: RegistryClient, reference: Reference, platform: str, text: str) -> list[FoundLayer]:
    origin = Origin("registry", host=reference.api_host, repository=reference.repository)
    try:
        data, descriptor = await client.get_manifest(reference)
    except SourceError:
        # Asked for a blob as if it were a manifest, registries answer 404, and some 500.
        size = await client.has_blob(origin.host, origin.repository, reference.digest) if reference.digest else None
        if size is None:
            raise
        return [FoundLayer(text, reference.digest, open_source(client, origin, reference.digest, size), origin, None)]
    parsed = parse_manifest(data, descriptor.media_type)
    if isinstance(parsed, Index):
        chosen = choose(parsed, platform or this_platform(), text)
        data, descriptor = await client.get_manifest(reference.with_digest(chosen.digest))
        parsed = parse_manifest(data, descriptor.media_type)
    return [_found(client, layer, origin, text) for layer in _image(parsed, text).layers]


def _image(parsed: Manifest | Index, text: str) -> Manifest:
    if isinstance(parsed, Index):
        raise FormatError(f"{text} is an index within an index", hint="name a manifest by its digest")
    return parsed


def _found(client: RegistryClient, layer: Descriptor, origin: Origin, text: str) -> FoundLayer:
    promised = parse_annotations(layer.annotations) if is_annotated(layer.annotations) else None
    name = f"{text.partition('@')[0]}@{layer.digest}"
    source = open_source(client, origin, layer.digest, layer.size)
    foreign = None
    if promised is None:
        foreign = parse_foreign(layer.annotations, layer.digest, layer.size, layer.compression)
    return FoundLayer(name, layer.digest, source, origin, promised, foreign)


def reader(source: BlobSource, loop: asyncio.AbstractEventLoop) -> ReadAt:
    """``read_at`` of a source for use in another thread than the loop's; short where the blob ends."""

    def read_at(offset: int, length: int) -> bytes:
        length = min(length, source.size - offset)
        return asyncio.run_coroutine_threadsafe(source.read(offset, length), loop).result() if length > 0 else b""

    return read_at
