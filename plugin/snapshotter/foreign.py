"""The tail of a layer in another format: its own TOC, fetched, and made into one of ours.

One ranged read of the blob's end for eStargz (a second one where the TOC is longer than was guessed), one of the TOC for
zstd:chunked. The JSON is read by a child of the builder's, within its memory; nothing of it is looked at here.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace

from weenv.core import digest as digests
from weenv.core.atomic import write_atomic
from weenv.core.errors import FormatError
from weenv.layer.foreign.formats import ESTARGZ, FOOTER, ForeignLayer, parse_footer
from weenv.plugin.snapshotter.layerdir import LayerSource, Origin
from weenv.registry.source import BlobSource

_GUESS_LEAST, _GUESS_MOST = 64 << 10, 4 << 20
"""Bytes read from the end of an eStargz blob in the hope that they hold the TOC: a part of its size between these."""
_GUESS_PART = 50
"""TOCs of real images were a hundredth to a fortieth of their blobs."""
_RATIO = 20
"""About how many times as long as compressed the JSON of an eStargz TOC is."""

Translate = Callable[[str, ForeignLayer, int, int], Awaitable[float]]
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
    guess = min(layer.size, max(_GUESS_LEAST, min(layer.size // _GUESS_PART, _GUESS_MOST)))
    end = await source.read(layer.size - guess, guess, deadline=deadline)
    offset = parse_footer(end[-FOOTER:], layer.size)
    missing = layer.size - guess - offset
    if missing > 0:
        await admit(layer.size - offset)
        end = await source.read(offset, missing, deadline=deadline) + end
        missing = 0
    return offset, end[-missing:-FOOTER]


async def make_tail(
    layer: ForeignLayer, offset: int, data: bytes, origins: list[Origin], folder: str, translate: Translate
) -> tuple[LayerSource, bytes]:
    """The tail that stands for the TOC ``data``, and what goes into ``source.json`` with it.

    ``folder`` is where a directory may be made for the time being. Raises FormatError (VerificationError for a TOC that is
    not the promised one), LimitError, OSError.
    """
    directory = os.path.join(folder, f".new-{digests.hex_of(layer.digest)[:12]}-{secrets.token_hex(4)}")
    try:
        await asyncio.to_thread(_put, directory, data)
        await translate(directory, layer, offset, layer.toc_content or min(len(data) * _RATIO, 64 << 20))
        end, tail, digest = await asyncio.to_thread(_take, directory)
    finally:
        await asyncio.to_thread(shutil.rmtree, directory, True)
    found = replace(layer, toc_offset=offset, toc_length=len(data))
    return LayerSource(layer.digest, layer.size, end, len(tail), digest, origins, found), tail


def _put(directory: str, data: bytes) -> None:
    os.makedirs(directory, mode=0o700)
    write_atomic(os.path.join(directory, "foreign"), data, durable=False)


def _take(directory: str) -> tuple[int, bytes, str]:
    with open(os.path.join(directory, "toc"), "rb") as file:
        tail = file.read()
    with open(os.path.join(directory, "where"), "rb") as file:
        return int(file.read(20)), tail, digests.sha256(tail)
