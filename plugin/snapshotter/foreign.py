"""The tail of a layer in another format: its own TOC, fetched, and made into one of ours.

One ranged read of the blob's end for eStargz (a second one where the TOC is longer than was guessed), one of the TOC for
zstd:chunked. The JSON is read by a child of the builder's, within its memory; nothing of it is looked at here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from weenv.core.atomic import write_atomic
from weenv.core.errors import FormatError, VerificationError
from weenv.layer.foreign.formats import ESTARGZ, FOOTER, ForeignLayer, parse_footer
from weenv.plugin.snapshotter.builder import Place
from weenv.plugin.snapshotter.layerdir import LayerDirs, LayerSource, Origin
from weenv.registry.source import BlobSource

_GUESS_LEAST, _GUESS_MOST = 64 << 10, 4 << 20
"""Bytes read from the end of an eStargz blob in the hope that they hold the TOC: a part of its size between these."""
_GUESS_PART = 50
"""TOCs of real images were a hundredth to a fortieth of their blobs."""
_RATIO = 20
"""About how many times as long as compressed the JSON of an eStargz TOC is."""

Translate = Callable[[str, ForeignLayer, int, int], Awaitable[Place]]
"""``Builder.translate``: directory, layer, offset of the TOC in the blob, its length decompressed."""


async def _admit(_length: int) -> None:
    return


async def fetch_toc(
    source: BlobSource, layer: ForeignLayer, *, deadline: float | None = None, admit: Callable[[int], Awaitable[None]] = _admit
) -> tuple[int, bytes]:
    """Where the compressed TOC is, and its bytes, which nobody has checked yet. Raises SourceError, FormatError.

    ``admit`` is awaited with the length of a TOC that is not read along with the footer, before it is read.
    """
    if layer.format != ESTARGZ:
        await admit(layer.toc_length)
        return layer.toc_offset, await source.read(layer.toc_offset, layer.toc_length, deadline=deadline)
    if layer.size <= FOOTER:
        raise FormatError("the blob is too short to be eStargz", member=layer.digest)
    begin = _guess(layer)
    while True:
        end = await source.read(begin, layer.size - begin, deadline=deadline)
        try:
            offset = parse_footer(end[-FOOTER:], layer.size)
            break
        except FormatError:
            if not source.suspect(layer.size - FOOTER, FOOTER):
                raise
    if offset < begin:
        await admit(layer.size - offset)
        end = await source.read(offset, begin - offset, deadline=deadline) + end
        begin = offset
    return offset, end[offset - begin : -FOOTER]


def _guess(layer: ForeignLayer) -> int:
    """Where the end of an eStargz blob begins that is read in the hope that the TOC is in it."""
    return layer.size - min(layer.size, max(_GUESS_LEAST, min(layer.size // _GUESS_PART, _GUESS_MOST)))


def _suspect(source: BlobSource, layer: ForeignLayer, offset: int, length: int) -> bool:
    """The TOC that was read at ``offset`` is wrong. True where reading it once more may help.

    Of eStargz the footer may be what is wrong, and says where to read: so how often is counted there, whatever it says.
    """
    if layer.format != ESTARGZ:
        return source.suspect(offset, length)
    again = source.suspect(layer.size - FOOTER, FOOTER)
    if offset < (begin := _guess(layer)):
        source.suspect(offset, begin - offset)
    return again


@contextlib.asynccontextmanager
async def made_tail(
    source: BlobSource, layer: ForeignLayer, origins: list[Origin], dirs: LayerDirs, translate: Translate, *,
    deadline: float | None = None, admit: Callable[[int], Awaitable[None]] = _admit,
) -> AsyncIterator[tuple[LayerSource, str]]:  # fmt: skip
    """What goes into ``source.json``, and a directory of ``dirs.beginning`` with the tail that stands for the layer's TOC.

    A TOC that is not the promised one is read again as long as the source may have another. Raises SourceError, FormatError
    (VerificationError for a TOC that is not the promised one), LimitError, OSError.
    """
    with dirs.beginning(layer.digest) as directory:
        while True:
            offset, data = await fetch_toc(source, layer, deadline=deadline, admit=admit)
            length = len(data)
            await asyncio.to_thread(write_atomic, os.path.join(directory, "foreign"), data, durable=False)
            del data
            try:
                place = await translate(directory, layer, offset, layer.toc_content or min(length * _RATIO, 64 << 20))
                break
            except VerificationError:
                if not _suspect(source, layer, offset, length):
                    raise
        found = replace(layer, toc_offset=offset, toc_length=length)
        yield LayerSource(layer.digest, layer.size, *place, origins, found), directory
