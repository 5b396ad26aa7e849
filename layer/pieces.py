"""How the frames of a blob in somebody else's format become content: a table beside the frame table.

Our own frames are zstd frames whose content is the tar stream. Those of eStargz and zstd:chunked blobs hold pieces of
files, and the digests that their TOCs promise are those of the pieces, not of the compressed bytes. So a frame of such a
blob is a range of the blob that holds compressed units (gzip members or zstd frames; what is between them means nothing),
and its content is made of pieces of what each of them decompresses to, with zeros between them::

    range      | ? | unit          | ? | unit                  | ? |     compressed_sizes[frame] bytes
    unit       | skipped | piece | skipped | piece | ...
    content    | zeros | piece | zeros | piece | zeros | piece | zeros | content_sizes[frame] bytes

A piece is at most as large as its frame's content, so decompression is bounded by what the table says, before anything is
known to be right; the digest of each piece is checked right after it.

Stored as a skippable frame before an ordinary tail (see :mod:`weenv.layer.tail`)::

    skippable frame 0x184D2A58: b"weenvFGN" | zstd frame of: u16 version 1, u16 codec, u32 frames, u32 pieces,
        u32 pieces of each frame, u32 unit, u32 skip, u32 size, u32 place of each piece, 32 bytes of digest of each piece

No registry gives us such a table: it is made on this node from a TOC that has been verified. A tail of our own format that
begins with one is refused.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import zstandard

from weenv.core.errors import FormatError, LimitError, VerificationError
from weenv.layer import zframe
from weenv.layer.limits import DEFAULT_LIMITS, Limits
from weenv.layer.toc import U8, U32, Frames
from weenv.layer.zframe import Buffer

MAGIC = b"weenvFGN"
PIECES_FRAME_MAGIC = 0x184D2A58
VERSION = 1

GZIP = 1
ZSTD = 2
"""What the units of a blob are compressed with (column ``codec``)."""

MAX_GAP = 64 << 20
"""Bytes of a range that may be something else than its unit: headers of members without data, mostly."""
UNKNOWN_DIFF_ID = "sha256:" + "0" * 64
"""Stands in a :class:`~weenv.layer.toc.Toc` for the digest of a tar stream that nobody has."""

MAX_PIECES = 1 << 16
"""Pieces of one frame: its files' if they are small, each with a header's room. More are nobody's but a hostile TOC's, and
take some 250 bytes of memory each while a frame is put together."""

_WHAT = "piece table"
_HEAD = struct.Struct("<HHII")
_ZEROS = bytes(64 << 10)
_MAX_WINDOW = 64 << 20
"""The largest window that a unit may ask for. Its decompressor allocates it before there is a digest to check."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Frame ``i`` holds pieces ``first[i] ... first[i + 1]``; see the module's text.

    ``codec`` GZIP or ZSTD. ``first`` is u32[frames + 1]; per piece ``unit`` (where its unit begins in the frame's range),
    ``skip`` (offset in what the unit decompresses to), ``size`` and ``place`` (offset in the frame's content), u32 bytes, and
    ``digests`` u8[pieces, 32], sha256 of the piece.
    """

    codec: int
    first: U32
    unit: U32
    skip: U32
    size: U32
    place: U32
    digests: U8

    def __len__(self) -> int:
        return len(self.size)


def check_pieces(frames: Frames, pieces: Pieces, limits: Limits = DEFAULT_LIMITS) -> None:
    """Does every frame have pieces, in order, within its content? Raises :class:`FormatError`."""
    count = len(pieces)
    if count > limits.max_frames:
        raise LimitError(f"{count} pieces", member=_WHAT)
    if pieces.codec not in (GZIP, ZSTD):
        raise FormatError(f"unknown codec {pieces.codec}", member=_WHAT)
    lengths = {len(pieces.unit), len(pieces.skip), len(pieces.place), len(pieces.digests)}
    if lengths != {count} or pieces.digests.shape != (count, 32):
        raise FormatError("its columns differ in length", member=_WHAT)
    first = pieces.first.astype(np.int64)
    if len(first) != len(frames) + 1 or int(first[0]) or int(first[-1]) != count or (np.diff(first) <= 0).any():
        raise FormatError("a frame has no pieces", member=_WHAT)
    if not count:
        return
    if int(np.diff(first).max()) > MAX_PIECES:
        raise LimitError(f"more than {MAX_PIECES} pieces in a frame", member=_WHAT)
    columns = (pieces.size, pieces.skip, pieces.place, pieces.unit)
    size, skip, place, unit = (column.astype(np.int64) for column in columns)
    if int(size.min()) == 0:
        raise FormatError("a piece is empty", member=_WHAT)
    same = np.ones(count - 1, dtype=bool)
    same[first[1:-1] - 1] = False  # the last piece of a frame has no successor in it
    if (same & (unit[1:] < unit[:-1])).any():
        raise FormatError("units are not in order", member=_WHAT)
    if (same & (unit[1:] == unit[:-1]) & (skip[1:] < skip[:-1] + size[:-1])).any():
        raise FormatError("pieces overlap in their unit", member=_WHAT)
    if (same & (place[1:] < place[:-1] + size[:-1])).any():
        raise FormatError("pieces overlap in their frame", member=_WHAT)
    last = first[1:] - 1
    if (unit[last] >= frames.compressed_sizes).any():
        raise FormatError("a unit lies beyond its range", member=_WHAT)
    if (place[last] + size[last] > frames.content_sizes).any():
        raise FormatError("a piece lies beyond its frame", member=_WHAT)
    if int((skip + size).max()) > limits.max_frame_content + MAX_GAP:
        raise LimitError("a piece lies too far into what its unit holds", member=_WHAT)
    if int(frames.compressed_sizes.max()) > limits.max_frame_content + MAX_GAP:
        raise LimitError("a range is too long", member=_WHAT)


def verify_frame(frames: Frames, pieces: Pieces, number: int, compressed: Buffer) -> bytes:
    """The content of frame ``number`` from the bytes of its range: decompressed no further than needed, pieces verified.

    Both tables have been checked. Safe to call from several threads. Raises :class:`VerificationError`, or
    :class:`FormatError` where the bytes cannot be decompressed.
    """
    expected, what = int(frames.compressed_sizes[number]), f"frame {number}"
    if len(compressed) != expected:
        raise VerificationError(f"has {len(compressed)} bytes, expected {expected}", member=what)
    low, high = int(pieces.first[number]), int(pieces.first[number + 1])
    units, skips, sizes, places = (
        column[low:high].tolist() for column in (pieces.unit, pieces.skip, pieces.size, pieces.place)
    )
    view = memoryview(compressed)
    parts: list[Buffer] = []
    position = 0
    plain, open_unit = view[:0], -1
    for piece, (unit, skip, size, place) in enumerate(zip(units, skips, sizes, places, strict=True)):
        if unit != open_unit:
            end = piece + 1  # of the pieces in this unit
            while end < len(units) and units[end] == unit:
                end += 1
            needed = skips[end - 1] + sizes[end - 1]
            data = view[unit : units[end] if end < len(units) else expected]
            plain = memoryview(_inflate(data, needed, what) if pieces.codec == GZIP else _decompress(data, needed, what))
            open_unit = unit
            if len(plain) != needed:
                raise FormatError(f"a unit holds {len(plain)} bytes, at least {needed} were expected", member=what)
        content = plain[skip : skip + size]
        if hashlib.sha256(content).digest() != pieces.digests[low + piece].tobytes():
            raise VerificationError("its content does not have the digest in the TOC", member=what)
        parts += (bytes(place - position), content)
        position = place + size
    parts.append(bytes(int(frames.content_sizes[number]) - position))
    return b"".join(parts)


def verify_content(frames: Frames, pieces: Pieces, number: int, content: bytes) -> None:
    """Raise :class:`VerificationError` unless ``content``, from a disk, is what frame ``number`` is to hold.

    Between its pieces, where files have short runs of zeros, and are padded, it has to be zero.
    """
    view, what = memoryview(content), f"frame {number}"
    if len(view) != int(frames.content_sizes[number]):
        raise VerificationError(f"has {len(view)} bytes, expected {int(frames.content_sizes[number])}", member=what)
    low, high = int(pieces.first[number]), int(pieces.first[number + 1])
    sizes, places = pieces.size[low:high].tolist(), pieces.place[low:high].tolist()
    position = 0
    for piece, (place, size) in enumerate(zip(places, sizes, strict=True), low):
        _check_zeros(content, position, place, what)
        position = place + size
        if hashlib.sha256(view[place:position]).digest() != pieces.digests[piece].tobytes():
            raise VerificationError("its content does not have the digest in the TOC", member=what)
    _check_zeros(content, position, len(content), what)


def _check_zeros(content: bytes, begin: int, end: int, what: str) -> None:
    while begin < end:
        upto = min(end, begin + len(_ZEROS))
        if content[begin:upto] != _ZEROS[: upto - begin]:
            raise VerificationError("it is not zero where there is nothing", member=what)
        begin = upto


def _inflate(unit: memoryview, needed: int, what: str) -> bytes:
    """The first ``needed`` bytes of a gzip member (RFC 1952), fewer where it holds less."""
    try:
        return zlib.decompressobj(wbits=31).decompress(unit, needed)
    except zlib.error as error:
        raise FormatError(f"the gzip member cannot be decompressed: {error}", member=what) from None


def _decompress(unit: memoryview, needed: int, what: str) -> bytes:
    """The first ``needed`` bytes of a zstd frame, fewer where it holds less."""
    if unit[:4] != zframe.MAGIC:
        raise FormatError("not a zstd frame", member=what)
    parts: list[bytes] = []
    try:  # a new one each time: what a large window took is not kept
        with zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(unit, read_across_frames=False) as reader:
            while needed and (part := reader.read(needed)):
                parts.append(part)
                needed -= len(part)
    except zstandard.ZstdError as error:
        raise FormatError(f"the zstd frame cannot be decompressed: {error}", member=what) from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


# -- stored


def encode(pieces: Pieces) -> bytes:
    """The skippable frame that holds the table."""
    counts = np.diff(pieces.first.astype(np.int64))
    columns = b"".join(
        np.ascontiguousarray(column, dtype="<u4").tobytes()
        for column in (counts, pieces.unit, pieces.skip, pieces.size, pieces.place)
    )
    head = _HEAD.pack(VERSION, pieces.codec, len(counts), len(pieces))
    content = b"".join((head, columns, np.ascontiguousarray(pieces.digests).tobytes()))
    packed = zstandard.ZstdCompressor(level=3, write_checksum=False, write_content_size=True).compress(content)
    return zframe.skippable(PIECES_FRAME_MAGIC, MAGIC + packed)


def content_size(payload: Buffer) -> int:
    """What the payload of the table's frame takes decompressed, bytes, as it states it. Raises :class:`FormatError`."""
    if payload[:8] != MAGIC:
        raise FormatError("not a table of pieces", member=_WHAT)
    return zframe.content_size(memoryview(payload)[8:], _WHAT)


def decode(payload: Buffer, limits: Limits = DEFAULT_LIMITS) -> Pieces:
    """The table from the payload of its skippable frame; :func:`check_pieces` is the caller's. Raises :class:`FormatError`."""
    size = content_size(payload)
    if size > _HEAD.size + 52 * limits.max_frames:
        raise LimitError(f"{size} bytes", member=_WHAT)
    content = zframe.decompress(memoryview(payload)[8:], size, _WHAT)
    if size < _HEAD.size:
        raise FormatError("truncated", member=_WHAT)
    version, codec, frames, count = _HEAD.unpack_from(content)
    if version != VERSION:
        raise FormatError(f"unknown version {version}", member=_WHAT)
    if size != _HEAD.size + 4 * frames + 48 * count:
        raise FormatError("its length does not follow from its counts", member=_WHAT)
    words = np.frombuffer(content, "<u4", frames + 4 * count, _HEAD.size)
    counts, rest = words[:frames], words[frames:].reshape(4, count)
    if int(counts.sum(dtype=np.uint64)) != count:
        raise FormatError("its counts do not add up", member=_WHAT)
    first = np.zeros(frames + 1, dtype=np.uint32)
    np.cumsum(counts, dtype=np.uint32, out=first[1:])
    digests = np.frombuffer(content, np.uint8, 32 * count, size - 32 * count).reshape(count, 32)
    return Pieces(codec, first, rest[0], rest[1], rest[2], rest[3], digests)
