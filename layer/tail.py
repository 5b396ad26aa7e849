"""The tail of a layer blob: all that follows its last zstd frame, and all that is needed to mount it.

::

    | skippable frame 0x184D2A57: the TOC (see codec) | skippable frame 0x184D2A5E: the seek table (see seekable) |

The TOC's frame table and the seek table say the same; a tail in which they differ is refused, because generic readers
go by the one and this project by the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weenv.core.errors import FormatError, LimitError
from weenv.layer import codec, pieces, seekable
from weenv.layer.limits import DEFAULT_LIMITS, Limits
from weenv.layer.toc import Frames, Toc
from weenv.layer.zframe import SKIPPABLE_HEADER, Buffer, skippable, skippable_header

TOC_FRAME_MAGIC = 0x184D2A57


@dataclass(frozen=True, slots=True)
class TailRange:
    """Where a blob's tail lies: ``offset`` and ``length``, bytes; it ends where the blob ends."""

    offset: int
    length: int


def build_tail(toc: Toc, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """TOC frame and seek table for a blob whose zstd frames are ``toc.frames``; before them the pieces, if it has any.

    Raises :class:`FormatError`.
    """
    frame = skippable(TOC_FRAME_MAGIC, codec.encode_toc(toc, limits))
    frames = toc.frames
    compressed = np.append(frames.compressed_sizes, np.uint32(len(frame)))
    content = np.append(frames.content_sizes, np.uint32(0))
    tail = frame + seekable.build(compressed, content)
    if frames.pieces is not None:
        tail = pieces.encode(frames.pieces) + tail
    if len(tail) > limits.max_toc_compressed:
        raise LimitError(f"a TOC of {len(tail)} bytes, more than any reader takes", member="TOC")
    return tail


def locate_tail(last: Buffer, size: int, limits: Limits = DEFAULT_LIMITS) -> TailRange | int:
    """Find the tail of a blob of ``size`` bytes whose last ``len(last)`` bytes are ``last``; for blobs without annotation.

    Returns the range, or how many of the blob's last bytes must be given instead to find it. Nothing that is found
    this way is verified. Raises :class:`FormatError` where the blob does not end as this format does.
    """
    if size < SKIPPABLE_HEADER + seekable.FOOTER_SIZE:
        raise FormatError("the blob is too short to be a weenv layer", hint="convert it with 'weenv layer convert'")
    if len(last) < seekable.FOOTER_SIZE:
        return seekable.FOOTER_SIZE
    view = memoryview(last)
    length = seekable.table_length(view[-seekable.FOOTER_SIZE :])
    if length > size or length > limits.max_toc_compressed:
        raise FormatError(f"{length} bytes long in a blob of {size}", member="seek table")
    if len(view) < length:
        return length
    table = seekable.parse(view[-length:])
    if not len(table) or int(table.content_sizes[-1]):
        raise FormatError("the frame before the seek table is no TOC", hint="convert it with 'weenv layer convert'")
    toc_length = int(table.compressed_sizes[-1])
    offset = int(table.compressed_sizes[:-1].sum(dtype=np.uint64))
    if offset + toc_length + length != size:
        raise FormatError(f"its frames do not add up to the blob's {size} bytes", member="seek table")
    if toc_length + length > limits.max_toc_compressed:
        raise LimitError(f"a TOC of {toc_length} bytes", member="TOC")
    return TailRange(offset, toc_length + length)


def _split(tail: Buffer, limits: Limits, *, foreign: bool | None = None) -> tuple[memoryview, memoryview, memoryview | None]:
    """The payload of the TOC frame, the seek table frame, and the payload of the table of pieces.

    The last there has to be where ``foreign``, and must not be where it is False: a blob has no say in how it is verified.
    """
    view = memoryview(tail)
    if len(view) > limits.max_toc_compressed:
        raise LimitError(f"a tail of {len(view)} bytes", member="TOC")
    magic, size = skippable_header(view, "TOC")
    table = None
    if magic == pieces.PIECES_FRAME_MAGIC and foreign is not False:
        end = SKIPPABLE_HEADER + size
        table, view = view[SKIPPABLE_HEADER:end], view[end:]
        magic, size = skippable_header(view, "TOC")
    if foreign and table is None:
        raise FormatError("no table of pieces", member="TOC")
    if magic != TOC_FRAME_MAGIC:
        raise FormatError("the tail does not begin with a TOC frame", member="TOC")
    end = SKIPPABLE_HEADER + size
    if end + SKIPPABLE_HEADER + seekable.FOOTER_SIZE > len(view):
        raise FormatError("the tail is truncated", member="TOC")
    return view[SKIPPABLE_HEADER:end], view[end:], table


def _check(frames: Frames, payload: memoryview, table: memoryview, layer_size: int, toc_offset: int, tail_size: int) -> None:
    """Do frames, seek table, and the tail's place in the blob agree?"""
    if toc_offset < 0 or toc_offset + tail_size != layer_size:
        raise FormatError(
            f"a tail of {tail_size} bytes at {toc_offset} does not end a blob of {layer_size} bytes", member="TOC"
        )
    if int(frames.compressed_offsets[-1]) != toc_offset:
        raise FormatError(
            f"its frames end at {int(frames.compressed_offsets[-1])}, the TOC begins at {toc_offset}", member="TOC"
        )
    seek = seekable.parse(table)
    if (
        len(seek) != len(frames) + 1
        or int(seek.compressed_sizes[-1]) != SKIPPABLE_HEADER + len(payload)
        or int(seek.content_sizes[-1])
        or not np.array_equal(seek.compressed_sizes[:-1], frames.compressed_sizes)
        or not np.array_equal(seek.content_sizes[:-1], frames.content_sizes)
    ):
        raise FormatError("the seek table contradicts the TOC", member="seek table")


def parse_tail(
    tail: Buffer, *, layer_size: int, toc_offset: int, limits: Limits = DEFAULT_LIMITS, foreign: bool = False
) -> Toc:
    """The TOC of a tail, checked in every respect that needs no other bytes of the blob.

    ``layer_size`` is the blob's size and ``toc_offset`` where the tail begins in it. The caller has verified the tail's
    digest (:func:`weenv.layer.verify.verify_tail` does both). ``foreign``: the tail was made on this node by
    :func:`build_tail` for a blob in another format. Raises :class:`FormatError`.
    """
    payload, table, extra = _split(tail, limits, foreign=foreign)
    toc = codec.decode_toc(payload, limits, None if extra is None else pieces.decode(extra, limits))
    _check(toc.frames, payload, table, layer_size, toc_offset, len(tail))
    return toc


def content_size(tail: Buffer, limits: Limits = DEFAULT_LIMITS) -> int:
    """How large the TOC in ``tail`` is once decompressed, bytes; nothing is decompressed. Raises :class:`FormatError`."""
    payload, _, extra = _split(tail, limits)
    return codec.content_size(payload, limits) + (0 if extra is None else pieces.content_size(extra))


@dataclass(frozen=True, slots=True, eq=False)
class FrameIndex:
    """What is needed to serve a layer's bytes: its frames, the length of its tar stream, and what that hashes to."""

    frames: Frames
    stream_size: int
    diff_id: str


def decode_frames(
    tail: Buffer, *, layer_size: int, toc_offset: int, limits: Limits = DEFAULT_LIMITS, foreign: bool = False
) -> FrameIndex:
    """The frames of a tail, without looking at its tree: 56 bytes a frame are kept. Raises :class:`FormatError`.

    As for :func:`parse_tail`, the caller has verified the digest.
    """
    payload, table, extra = _split(tail, limits, foreign=foreign)
    found = None if extra is None else pieces.decode(extra, limits)
    frames, stream_size, diff_id = codec.decode_frames(payload, limits, found)
    _check(frames, payload, table, layer_size, toc_offset, len(tail))
    return FrameIndex(frames, stream_size, diff_id)
