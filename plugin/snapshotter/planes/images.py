"""What every plane makes of a layer directory: the metadata image that it mounts or reads, and the plain file's mark.

The image is the one place where a table of contents is refused that no plane may act on: the builder's process checks it
against every bound before it writes one. Planes read images only, so what is refused for one is refused for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import Executor

from weenv.core.aio import SingleFlight
from weenv.core.atomic import write_atomic
from weenv.core.errors import FormatError
from weenv.layer.erofs import DirAttributes, restamp
from weenv.plugin.snapshotter.builder import FACTS, META, Builder, meta_name
from weenv.plugin.snapshotter.cache.present import is_whole
from weenv.plugin.snapshotter.layerdir import LayerDirs
from weenv.plugin.snapshotter.planes.base import LayerFacts, Variant, decode_attributes


def plain_file(directory: str) -> str:
    """The path of a complete layer's ``data``; empty where frames are missing, or are about to be evicted. Blocking.

    Ask, and open or mount the file, within :func:`~weenv.plugin.snapshotter.cache.store.hold` of it: nothing is punched out
    of a file that somebody has open (docs/concurrency/cache.md).
    """
    return f"{directory}/data" if is_whole(directory) else ""


class Images:
    """The images of the layers in ``dirs``; what blocks is done in ``threads``. Belongs to one event loop."""

    def __init__(self, dirs: LayerDirs, builder: Builder, threads: Executor) -> None:
        self._dirs = dirs
        self._builder = builder
        self._threads = threads
        self._preparing: SingleFlight[tuple[str, str], LayerFacts] = SingleFlight()

    def path(self, digest: str, variant: Variant) -> str:
        """Where the image of a variant is, or will be."""
        return f"{self._dirs.path(digest)}/{meta_name(variant.name)}"

    async def prepare(self, digest: str, variant: Variant) -> LayerFacts:
        """Build what is missing of ``meta.erofs``, ``facts.json`` and the variant's own image.

        Each once, whoever asks: a FUSE server goes on with the very file that it began with. Raises FormatError for a layer
        that cannot be represented, StorageError for a full disk.
        """
        facts = await self._preparing.do((digest, ""), lambda: self._base(digest))
        if variant.name:
            await self._preparing.do((digest, variant.name), lambda: self._variant(digest, variant, facts))
        return facts

    async def _base(self, digest: str) -> LayerFacts:
        directory = self._dirs.path(digest)
        if not (os.path.exists(f"{directory}/{META}") and os.path.exists(f"{directory}/{FACTS}")):
            await self._builder.build(directory, "", "[]")
        return _read_facts(directory)

    async def _variant(self, digest: str, variant: Variant, facts: LayerFacts) -> LayerFacts:
        directory = self._dirs.path(digest)
        if not os.path.exists(f"{directory}/{meta_name(variant.name)}"):
            attributes = decode_attributes(variant.attributes)
            if any(each.xattrs for each in attributes.values()):
                await self._builder.build(directory, variant.name, variant.attributes)
            else:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._threads, _restamp, directory, variant.name, facts, attributes)
        return facts

    async def rebuild(self, digest: str, variant: Variant) -> None:
        """Build images anew that are damaged: a power cut can leave a file with holes, and it is only a cache."""
        for name in {META, meta_name(variant.name)}:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._dirs.path(digest)}/{name}")
        await self.prepare(digest, variant)


def _restamp(directory: str, variant: str, facts: LayerFacts, attributes: dict[int, DirAttributes]) -> None:
    """Make a variant's image from the one of the empty variant: some inodes differ in mode, owner and time."""
    with open(f"{directory}/{META}", "rb") as file:
        image = bytearray(file.read())
    positions = {item.entry: item.position for item in facts.implied}
    try:
        for entry, wanted in attributes.items():
            restamp(image, positions[entry], wanted)
    except (KeyError, ValueError) as error:
        raise FormatError(
            f"stored facts do not fit the metadata image: {error}", hint="remove the layer's directory"
        ) from error
    write_atomic(f"{directory}/{meta_name(variant)}", image, durable=False)


def _read_facts(directory: str) -> LayerFacts:
    with open(f"{directory}/{FACTS}", "rb") as file:
        return LayerFacts.from_json(file.read(64 << 20))
