"""Single zstd frames, bounded: nothing is decompressed whose size is not known and agreed to beforehand.

The frame format is RFC 8878 (section 3.1.1: magic, frame header, blocks; section 3.1.2: skippable frames).
"""

from __future__ import annotations

import struct
import threading

import zstandard

from weenv.core.errors import FormatError, LimitError, UnsupportedError

Buffer = bytes | bytearray | memoryview

MAGIC = b"\x28\xb5\x2f\xfd"
SKIPPABLE_FIRST, SKIPPABLE_LAST = 0x184D2A50, 0x184D2A5F
SKIPPABLE_HEADER = 8
"""Bytes before a skippable frame's payload: magic and payload length, u32 little-endian each."""

MAX_WINDOW = 128 << 20
"""The largest window a frame may ask for: 2^27, what ``zstd -d`` takes by default (``ZSTD_WINDOWLOG_LIMIT_DEFAULT``)."""

_U32x2 = struct.Struct("<II")
_local = threading.local()


def _decompressor() -> zstandard.ZstdDecompressor:
    """This thread's decompressor: it holds 100 KiB of tables and must not be used by two threads at once."""
    found = getattr(_local, "decompressor", None)
    if found is None:
        found = _local.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    return found


def content_size(frame: Buffer, what: str = "zstd frame") -> int:
    """The content size that a frame's header states, in bytes.

    Raises :class:`FormatError` where ``frame`` does not begin with a zstd frame that states one,
    :class:`UnsupportedError` where it needs a dictionary or a window beyond :data:`MAX_WINDOW`.
    """
    if frame[:4] != MAGIC:
        raise FormatError("not a zstd frame", member=what)
    try:
        parameters = zstandard.get_frame_parameters(frame[:18])  # the longest header (RFC 8878, 3.1.1.1)
    except zstandard.ZstdError as error:
        raise FormatError(f"malformed zstd frame header: {error}", member=what) from None
    if parameters.content_size in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
        raise FormatError("the zstd frame does not state its content size", member=what)
    if parameters.dict_id:
        raise UnsupportedError("the zstd frame needs a dictionary", member=what)
    if parameters.window_size > MAX_WINDOW and parameters.window_size > parameters.content_size:
        raise UnsupportedError(f"the zstd frame needs a window of {parameters.window_size} bytes", member=what)
    return int(parameters.content_size)


def decompress(frame: Buffer, size: int, what: str = "zstd frame") -> bytes:
    """The content of ``frame``, which must be exactly one frame whose content is exactly ``size`` bytes.

    ``size`` is what the caller has agreed to allocate. Raises :class:`FormatError`.
    """
    stated = content_size(frame, what)
    if stated != size:
        raise FormatError(f"the zstd frame holds {stated} bytes, expected {size}", member=what)
    try:
        content = _decompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"the zstd frame cannot be decompressed: {error}", member=what) from None
    if len(content) != size:
        raise FormatError(f"the zstd frame held {len(content)} bytes, expected {size}", member=what)
    return content


def length(data: Buffer, what: str = "zstd frame") -> int:
    """The length in bytes of the frame that ``data`` begins with, found by its block headers (RFC 8878, 3.1.1.2).

    Raises :class:`FormatError` where the frame is malformed or ``data`` ends before it does.
    """
    if data[:4] != MAGIC:
        raise FormatError("not a zstd frame", member=what)
    try:
        position = int(zstandard.frame_header_size(data[:18]))
    except zstandard.ZstdError as error:
        raise FormatError(f"malformed zstd frame header: {error}", member=what) from None
    last = 0
    while not last:
        header = data[position : position + 3]
        if len(header) < 3:
            raise FormatError("the zstd frame is truncated", member=what)
        block = header[0] | header[1] << 8 | header[2] << 16
        last, kind = block & 1, block >> 1 & 3
        if kind == 3:
            raise FormatError("the zstd frame has a reserved block type", member=what)
        position += 3 + (1 if kind == 1 else block >> 3)  # an RLE block stores one byte
    if data[4] & 4:  # Content_Checksum_flag
        position += 4
    if position > len(data):
        raise FormatError("the zstd frame is truncated", member=what)
    return position


def skippable(magic: int, payload: Buffer) -> bytes:
    """A skippable frame around ``payload``. Raises :class:`LimitError` for a payload that its length field cannot state."""
    if len(payload) >= 1 << 32:
        raise LimitError(f"{len(payload)} bytes do not fit into a skippable frame")
    return b"".join((_U32x2.pack(magic, len(payload)), payload))


def skippable_header(data: Buffer, what: str) -> tuple[int, int]:
    """The (magic, payload length) of the skippable frame that ``data`` begins with; the payload may lie beyond it.

    Raises :class:`FormatError`.
    """
    if len(data) < SKIPPABLE_HEADER:
        raise FormatError("truncated", member=what)
    magic, size = _U32x2.unpack_from(data)
    if not SKIPPABLE_FIRST <= magic <= SKIPPABLE_LAST:
        raise FormatError("not a skippable frame", member=what)
    return magic, size
