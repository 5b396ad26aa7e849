"""Layer groups out of directories, tars and images: every layer in the lazy format, the documents by groupref.build.

::

    DIR, TAR ...  -> tree each -> [prefix] -> [squash: one] -> [split: several] -> tar -> encode -> layer blobs
    image A..B    -> cut manifest -> the converter (lazy layers byte for byte, others encoded)
    image squash  -> layers' tars -> tree -> as above

Scratch files lie beside the destination, as a conversion's do, and are gone whatever happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import json
import os
import secrets
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from weenv.converter import tree as trees
from weenv.converter.decompress import TarStream
from weenv.converter.image import convert_between
from weenv.converter.options import ConvertOptions
from weenv.converter.pipeline import Output, create_file
from weenv.converter.scandir import scan_directory
from weenv.converter.tree import Directory, Override
from weenv.core.aio import gather_all
from weenv.core.errors import BadReference, FormatError, NotFoundInSource, SourceError, named
from weenv.layer.encode import EncodedLayer, encode_layer
from weenv.layer.limits import Limits
from weenv.layer.toc import Frames, Toc
from weenv.layer.tree import Scan, scan_tar
from weenv.layer.verify import MEDIA_TYPE
from weenv.registry.client import RegistryClient
from weenv.registry.endpoints import Destination, LayoutEnd, RegistryEnd, Source, open_end
from weenv.registry.groupref.build import Documents, GroupSpec, cut_group, new_group, parse_layers
from weenv.registry.groupref.resolve import choose
from weenv.registry.manifest import MAX_CONFIG, Descriptor, Manifest, parse_config, parse_manifest
from weenv.registry.orasreg import Progress
from weenv.registry.reference import LayoutLocation, Reference, parse_location
from weenv.registry.source import BlobSource
from weenv.registry.threads import Cancelled, in_thread

_DEPTH = 4


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """How trees become layers. ``prefix`` is where sources are put; ``split`` holds rules of
    :func:`weenv.converter.tree.split`."""

    prefix: str = ""
    split: tuple[str, ...] = ()
    squash: bool = False
    override: Override = field(default_factory=Override)


@dataclass(frozen=True, slots=True)
class BuiltLayer:
    """A layer of a group. ``reused``: the destination had the blob. ``reason``: why it is not in the lazy format, or empty."""

    descriptor: Descriptor
    diff_id: str
    stream_size: int
    entries: int
    reused: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BuiltGroup:
    """``descriptor`` is the manifest's; ``skipped`` names what no layer can hold (sockets)."""

    reference: str
    descriptor: Descriptor
    layers: tuple[BuiltLayer, ...]
    kind: str
    version: str
    skipped: tuple[str, ...] = ()

    @property
    def lazy(self) -> bool:
        """True where every layer is in the lazy format."""
        return all(not layer.reason for layer in self.layers)


async def build_group(
    reference: str, sources: Sequence[str], spec: GroupSpec, how: TreeOptions, options: ConvertOptions | None = None
) -> BuiltGroup:
    """A group out of directories and tars (plain, gzip, zstd; ``-`` is standard input), the first at the bottom.

    Published as ``reference``. Raises WeenvError; nothing is published then.
    """
    options = options or ConvertOptions()
    async with _destination(reference, options) as destination, contextlib.AsyncExitStack() as files:
        for source in sources:
            if source != "-" and not os.path.exists(source):
                raise NotFoundInSource(f"no such file or directory: {source}")
        await asyncio.to_thread(destination.open)
        roots, skipped = [], []
        for source in sources:
            work = functools.partial(_source_tree, source, destination.scratch, options.limits, files)
            root, left_out = await in_thread(None, work)
            roots.append(root)
            skipped += left_out
        return await _publish(destination, reference, roots, spec, how, options, bottom=False, skipped=tuple(skipped))


async def group_from_image(
    reference: str, image: str, layers: str, spec: GroupSpec, how: TreeOptions, options: ConvertOptions | None = None, *,
    keep_config: bool = True,
) -> BuiltGroup:  # fmt: skip
    """Some layers of an image (``A..B``; empty: all) as a group. Lazy layers stay byte for byte, the others are converted.

    With ``how.squash``, ``how.split`` or ``how.prefix`` their content becomes new layers. Raises WeenvError.
    """
    options = options or ConvertOptions()
    async with _destination(reference, options, parse_location(image)) as destination:
        client = destination.client if isinstance(destination, RegistryEnd) else None
        async with _client(options, client) as usable:
            source = open_end(usable, parse_location(image))
            manifest = await _image(source, spec.platform, image)
            config = await source.small(manifest.config, MAX_CONFIG)
            chosen = parse_layers(layers, len(manifest.layers)) if layers else range(len(manifest.layers))
            if not manifest.is_image:
                raise FormatError("is not a container image", member=image)
            cut = cut_group(spec, manifest, config, chosen, keep_config=keep_config)
            if how.squash or how.split or how.prefix:
                return await _from_layers(destination, reference, source, cut, spec, how, options, bottom=chosen.start == 0)
            result = await convert_between(_Cut(source, cut), destination, options, src=image, dst=reference)
            made = [
                BuiltLayer(row.new, diff_id, row.stream_size, 0, row.status == "skipped", "" if row.lazy else row.reason)
                for row, diff_id in zip(result.layers, parse_config(cut.config).diff_ids, strict=True)
            ]
            return BuiltGroup(reference, result.descriptor, tuple(made), spec.kind, spec.version)


# -- ends ---------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _client(options: ConvertOptions, known: RegistryClient | None = None) -> AsyncIterator[RegistryClient]:
    if options.client is not None or known is not None:
        usable = options.client or known
        assert usable is not None
        yield usable
        return
    async with RegistryClient(options.registry) as client:
        yield client


@contextlib.asynccontextmanager
async def _destination(
    reference: str, options: ConvertOptions, source: object = None
) -> AsyncIterator[LayoutEnd | RegistryEnd]:
    """The place to publish at, closed at the end; whoever knows what to put there opens it."""
    location = parse_location(reference)
    if location.digest:
        raise BadReference(f"{reference} cannot be written to", hint="name a tag: HOST/NAME:TAG or oci:DIR:TAG")
    async with _client(options) as client:
        destination: LayoutEnd | RegistryEnd
        if isinstance(location, LayoutLocation):
            destination = LayoutEnd(location)
        else:
            same = isinstance(source, Reference) and source.host == location.host
            mount = source.repository if same and isinstance(source, Reference) else ""
            destination = RegistryEnd(
                client, location, mount_from=mount, scratch_root=options.scratch_root(), chunk_size=options.chunk_size
            )
        try:
            yield destination
        finally:
            await destination.close()


async def _image(source: LayoutEnd | RegistryEnd, platform: str, what: str) -> Manifest:
    data, descriptor = await source.root()
    for _ in range(_DEPTH):
        parsed = parse_manifest(data, descriptor.media_type, what)
        if isinstance(parsed, Manifest):
            return parsed
        descriptor = choose(parsed, platform, what)
        data = await source.manifest(descriptor)
    raise FormatError("indexes within indexes within indexes", member=what)


class _Cut:
    """A source whose root is the cut manifest; blobs are the image's."""

    def __init__(self, source: LayoutEnd | RegistryEnd, cut: Documents) -> None:
        self._source = source
        self._cut = cut

    async def root(self) -> tuple[bytes, Descriptor]:
        """The cut manifest."""
        return self._cut.manifest, self._cut.descriptor

    async def manifest(self, descriptor: Descriptor) -> bytes:
        """None is listed by a manifest."""
        raise NotFoundInSource(f"no manifest {descriptor.digest}")

    async def small(self, descriptor: Descriptor, limit: int) -> bytes:
        """The cut config, or a blob of the image."""
        if descriptor.digest == self._cut.config_descriptor.digest:
            return self._cut.config
        return await self._source.small(descriptor, limit)

    async def fetch(self, descriptor: Descriptor, path: str, progress: Progress | None) -> str:
        """See :class:`~weenv.registry.endpoints.Source`."""
        return await self._source.fetch(descriptor, path, progress)

    def blob(self, descriptor: Descriptor) -> BlobSource:
        """See :class:`~weenv.registry.endpoints.Source`."""
        return self._source.blob(descriptor)


# -- sources to trees -----------------------------------------------------------------------------------------------------


def _source_tree(
    source: str, scratch: str, limits: Limits, files: contextlib.AsyncExitStack, cancel: threading.Event
) -> tuple[Directory, list[str]]:
    if source != "-" and os.path.isdir(source):
        return scan_directory(source, limits)
    try:
        file = sys.stdin.buffer if source == "-" else open(source, "rb")  # noqa: SIM115 - closed below, or not ours
    except FileNotFoundError as error:
        raise NotFoundInSource(f"no such file or directory: {source}") from error
    except OSError as error:
        raise SourceError(f"cannot read {source}: {error.strerror}") from error
    try:
        with named("standard input" if source == "-" else source):
            return _tar_tree(file, os.path.join(scratch, "tar-" + secrets.token_hex(8)), limits, files, cancel), []
    finally:
        if source != "-":
            file.close()


def _tar_tree(file: Any, spool: str, limits: Limits, files: contextlib.AsyncExitStack, cancel: threading.Event) -> Directory:
    """The tree of a tar stream, whose plain form is kept in the file ``spool`` until ``files`` is closed."""
    stream = TarStream(file)
    files.callback(_unlink, spool)
    with create_file(spool) as out:
        output = Output(out, spool)

        def read(size: int) -> bytes:
            if cancel.is_set():
                raise Cancelled
            data = stream.read(size)
            output.write(data)
            return data

        found = scan_tar(read, limits)
    fd = os.open(spool, os.O_RDONLY | os.O_CLOEXEC)
    files.callback(os.close, fd)

    def read_at(offset: int, length: int) -> bytes:
        data = os.pread(fd, length, offset)
        if len(data) != length:
            raise SourceError(f"{spool} was cut short while it was read")
        return data

    return trees.from_toc(_toc(found), read_at)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _toc(found: Scan) -> Toc:
    """A scan as a TOC without frames."""
    none = np.zeros(0, dtype=np.uint32)
    frames = Frames(none, none, np.zeros((0, 32), dtype=np.uint8))
    columns = found.columns
    return Toc("", found.stream_size, 0, 0, frames, columns.entries, columns.xattrs, columns.sparse, columns.pool)


async def _from_layers(
    destination: LayoutEnd | RegistryEnd, reference: str, source: Source, cut: Documents, spec: GroupSpec, how: TreeOptions,
    options: ConvertOptions, *, bottom: bool,
) -> BuiltGroup:  # fmt: skip
    manifest = parse_manifest(cut.manifest)
    assert isinstance(manifest, Manifest)
    await asyncio.to_thread(destination.open)
    async with contextlib.AsyncExitStack() as files:

        async def one(layer: Descriptor) -> Directory:
            spool = os.path.join(destination.scratch, "in-" + secrets.token_hex(8))
            try:
                path = await source.fetch(layer, spool, None)

                def work(cancel: threading.Event) -> Directory:
                    with open(path, "rb") as file:
                        return _tar_tree(file, spool + ".tar", options.limits, files, cancel)

                return await in_thread(None, work)
            finally:
                _unlink(spool)

        roots = await gather_all(*(one(layer) for layer in manifest.layers))
        config = json.loads(cut.config)
        created = spec.created if spec.created is not None else _seconds(config)
        spec = replace(spec, created=created, config=config["config"])
        return await _publish(destination, reference, list(roots), spec, how, options, bottom=bottom)


def _seconds(config: dict[str, Any]) -> int | None:
    """When an image says that it was made; None where that cannot be read."""
    try:
        return max(0, int(datetime.datetime.fromisoformat(config["created"]).timestamp()))
    except ValueError:
        return None


# -- trees to layers ------------------------------------------------------------------------------------------------------


async def _publish(
    destination: LayoutEnd | RegistryEnd, reference: str, roots: list[Directory], spec: GroupSpec, how: TreeOptions,
    options: ConvertOptions, *, bottom: bool, skipped: tuple[str, ...] = (),
) -> BuiltGroup:  # fmt: skip
    """Shape the trees, encode and put each, then publish. ``bottom``: nothing is ever below them."""
    roots = [trees.below(root, how.prefix) for root in roots]
    if how.squash:
        whole = trees.plain_directory()
        for root in roots:
            trees.merge(whole, root, keep_whiteouts=not bottom)
        roots = [whole]
    if how.split:
        if len(roots) > 1:
            raise BadReference("cannot split several sources at once", hint="add --squash")
        roots = trees.split(roots[0], how.split)
    if bottom and how.squash:
        for root in roots:
            trees.drop_whiteouts(root)
    made = [await _layer(destination, root, how.override, options) for root in roots]
    newest = max((when for _, when in made), default=0)
    documents = new_group(spec, [(layer.descriptor, layer.diff_id) for layer, _ in made], newest)
    if not await destination.has(documents.config_descriptor, mount=False):
        await destination.put_bytes(documents.config, documents.config_descriptor)
    await destination.publish(documents.manifest, documents.descriptor)
    layers = tuple(layer for layer, _ in made)
    return BuiltGroup(reference, documents.descriptor, layers, spec.kind, spec.version, skipped)


async def _layer(
    destination: Destination, root: Directory, override: Override, options: ConvertOptions
) -> tuple[BuiltLayer, int]:
    out = os.path.join(destination.scratch, "out-" + secrets.token_hex(8))
    pieces, summary = trees.tar_stream(root, override, options.limits)

    def work(cancel: threading.Event) -> EncodedLayer:
        read = trees.reader(pieces)

        def checked(size: int) -> bytes:
            if cancel.is_set():
                raise Cancelled
            return read(size)

        with create_file(out) as file:
            output: Any = Output(file, out)  # only its write is used
            return encode_layer(
                checked, output, target=options.target, level=options.level, threads=options.threads, limits=options.limits
            )

    try:
        encoded = await in_thread(None, work)
        blob = Descriptor(MEDIA_TYPE, encoded.blob_digest, encoded.blob_size, encoded.annotations())
        reused = await destination.has(blob)
        if not reused:
            await destination.put(blob, out, owned=True, progress=None)
    finally:
        _unlink(out)
    return BuiltLayer(blob, encoded.diff_id, encoded.stream_size, summary.entries, reused), summary.newest
