"""Layer blobs made by hand, for tests of what reads them: frames of chosen content, with a TOC that says so.

Nothing here uses the encoder: what it writes is read by the code under test, and by ``zstd -d``.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
from dataclasses import dataclass

import numpy as np
import zstandard

from weenv.core import digest as digests
from weenv.layer.tail import build_tail
from weenv.layer.toc import DIRECTORY, FILE, NO_DATA, Entries, Frames, SparseRows, Toc, XattrSets
from weenv.plugin.snapshotter.layerdir import LayerDirs, LayerSource, Origin


@dataclass(frozen=True)
class SyntheticLayer:
    """A blob, the stream it holds, its frame table and its tail."""

    blob: bytes
    stream: bytes
    frames: Frames
    tail: bytes
    toc: Toc

    @property
    def digest(self) -> str:
        """The blob's digest."""
        return digests.sha256(self.blob)

    @property
    def name(self) -> str:
        """The file's name in blobfs."""
        return digests.hex_of(self.digest)

    def source(self, *origins: Origin) -> LayerSource:
        """The content of source.json."""
        offset = len(self.blob) - len(self.tail)
        return LayerSource(self.digest, len(self.blob), offset, len(self.tail), digests.sha256(self.tail), list(origins))

    def install(self, root: str, *origins: Origin) -> str:
        """Make the layer's directory under ``root``; returns its path."""
        return LayerDirs(root).create(self.source(*origins), self.tail)

    def corrupted(self, frame: int) -> bytes:
        """The blob with a bit of ``frame`` turned."""
        blob = bytearray(self.blob)
        blob[int(self.frames.compressed_offsets[frame]) + 20] ^= 1
        return bytes(blob)


def payload(size: int, seed: int = 1) -> bytes:
    """``size`` bytes that compress to about half, different in every 4 KiB."""
    generator = random.Random(seed)
    half = generator.randbytes((size + 1) // 2)
    text = (b"%016d" % seed) * 128
    out = bytearray()
    for start in range(0, len(half), 2048):
        out += half[start : start + 2048]
        out += text
    return bytes(out[:size])


def make_layer(files: list[tuple[str, bytes]], *, target: int = 128 << 10, level: int = 1) -> SyntheticLayer:
    """A layer whose stream is 512-byte headers (zeros) and the files' data, cut as docs/design of the format says.

    A file of at least ``target`` bytes starts a frame of its own and is cut at ``target``; smaller ones share frames.
    """
    stream, cuts, begins = bytearray(), [0], []
    for _name, data in files:
        stream += bytes(512)
        if len(data) >= target:
            cuts.append(len(stream))
        begins.append(len(stream))
        if len(data) >= target:
            cuts += [len(stream) + step for step in range(target, len(data), target)]
        stream += data + bytes(-len(data) % 512)
        if len(data) >= target or len(stream) - cuts[-1] >= target:
            cuts.append(len(stream))
    stream += bytes(1024)
    cuts.append(len(stream))
    cuts = sorted(set(cuts))
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True)
    content = bytes(stream)
    parts = [compressor.compress(content[low:high]) for low, high in itertools.pairwise(cuts)]
    frames = Frames(
        np.array([len(part) for part in parts], "<u4"),
        np.array(np.diff(cuts), "<u4"),
        np.frombuffer(b"".join(hashlib.sha256(part).digest() for part in parts), np.uint8).reshape(-1, 32),
    )
    toc = _toc(content, files, begins, frames, target, level)
    tail = build_tail(toc)
    return SyntheticLayer(b"".join(parts) + tail, content, frames, tail, toc)


def _toc(stream: bytes, files: list[tuple[str, bytes]], begins: list[int], frames: Frames, target: int, level: int) -> Toc:
    order = sorted(range(len(files)), key=lambda index: os.fsencode(files[index][0]))
    names = [b"", *(os.fsencode(files[index][0]) for index in order)]
    lengths = np.array([len(name) for name in names], "<u2")
    count = len(names)

    def column(dtype: str, value: int = 0) -> np.ndarray:
        return np.full(count, value, dtype)

    kind, mode, size, aux = column("u1", FILE), column("<u2", 0o644), column("<u8"), column("<u8")
    kind[0], mode[0] = DIRECTORY, 0o755
    for row, index in enumerate(order, 1):
        data = files[index][1]
        size[row] = len(data)
        aux[row] = begins[index] if data else NO_DATA
    offsets = np.zeros(count, "<u4")
    np.cumsum(lengths[:-1], out=offsets[1:])
    entries = Entries(
        column("<u4"), offsets, lengths, kind, column("u1"), mode, column("<u4"), column("<u4"), column("<i8"), column("<u4"),
        size, aux, column("<u4"),
    )  # fmt: skip
    none = np.zeros(0, "<u4")
    wide = np.zeros(0, "<u8")
    return Toc(
        digests.sha256(stream), len(stream), target, level, frames, entries,
        XattrSets(np.zeros(1, "<u4"), none, none.astype("<u2"), none, none),
        SparseRows(none, wide, wide, wide), b"".join(names),
    )  # fmt: skip
