"""The seek table of the zstd seekable format 0.1.0 (zstd's contrib/seekable_format/zstd_seekable_compression_format.md).

A skippable frame at the very end of a file::

    u32 0x184D2A5E | u32 payload length | entries | footer
    entry   u32 compressed size | u32 content size | u32 checksum, where the descriptor's bit 7 says so
    footer  u32 number of entries | u8 descriptor | u32 0x8F92EAB1

All little-endian. There is one entry for every frame of the file but the table itself; skippable frames have one too,
with content size 0.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from weenv.core.errors import FormatError, LimitError, UnsupportedError
from weenv.layer.toc import U32
from weenv.layer.zframe import SKIPPABLE_HEADER, Buffer, skippable, skippable_header

SEEK_TABLE_MAGIC = 0x184D2A5E
SEEKABLE_MAGIC = 0x8F92EAB1
FOOTER_SIZE = 9
MAX_FRAMES = 0x8000000
"""``ZSTD_SEEKABLE_MAXFRAMES`` of the reference implementation."""

_FOOTER = struct.Struct("<IBI")
_CHECKSUMS = 0x80
_RESERVED = 0x7C


@dataclass(frozen=True, slots=True, eq=False)
class SeekTable:
    """Compressed and content sizes of a file's frames in order, u32[n] each, bytes."""

    compressed_sizes: U32
    content_sizes: U32

    def __len__(self) -> int:
        return len(self.compressed_sizes)


def table_length(footer: Buffer) -> int:
    """The length of the whole seek table frame, from a file's last :data:`FOOTER_SIZE` bytes. Raises :class:`FormatError`."""
    if len(footer) != FOOTER_SIZE:
        raise FormatError("truncated", member="seek table")
    frames, descriptor, magic = _FOOTER.unpack(footer)
    if magic != SEEKABLE_MAGIC:
        hint = "convert it with 'weenv layer convert'"
        raise FormatError("not in the lazy format (no seek table at its end)", hint=hint)
    if descriptor & _RESERVED:
        raise UnsupportedError(f"unknown descriptor {descriptor:#x}", member="seek table")
    if frames > MAX_FRAMES:
        raise LimitError(f"{frames} frames", member="seek table")
    return int(SKIPPABLE_HEADER + frames * (12 if descriptor & _CHECKSUMS else 8) + FOOTER_SIZE)


def parse(table: Buffer) -> SeekTable:
    """Parse a whole seek table frame, which must fill ``table`` exactly. Raises :class:`FormatError`."""
    expected = table_length(table[-FOOTER_SIZE:])
    if expected != len(table):
        raise FormatError(f"{len(table)} bytes long, its footer says {expected}", member="seek table")
    magic, size = skippable_header(table, "seek table")
    if magic != SEEK_TABLE_MAGIC or size != len(table) - SKIPPABLE_HEADER:
        raise FormatError("its frame header contradicts its footer", member="seek table")
    words = np.frombuffer(table, dtype="<u4", offset=SKIPPABLE_HEADER, count=(expected - SKIPPABLE_HEADER - FOOTER_SIZE) // 4)
    rows = words.reshape(-1, 3 if table[-5] & _CHECKSUMS else 2)
    return SeekTable(rows[:, 0], rows[:, 1])


def build(compressed_sizes: U32, content_sizes: U32) -> bytes:
    """The seek table frame for frames of these sizes, without checksums (every frame has a sha256 in the TOC)."""
    if len(compressed_sizes) > MAX_FRAMES:
        raise LimitError(f"{len(compressed_sizes)} frames", member="seek table")
    rows = np.empty((len(compressed_sizes), 2), dtype="<u4")
    rows[:, 0] = compressed_sizes
    rows[:, 1] = content_sizes
    return skippable(SEEK_TABLE_MAGIC, rows.tobytes() + _FOOTER.pack(len(rows), 0, SEEKABLE_MAGIC))
