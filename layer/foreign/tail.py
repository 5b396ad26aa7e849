"""The tail that stands for a foreign TOC in a layer directory: an ordinary one, with a table of pieces before it."""

from __future__ import annotations

import hashlib

from weenv.core import digest as digests
from weenv.core.errors import VerificationError
from weenv.layer.decode import ReadAt, exactly
from weenv.layer.foreign.entries import make_toc
from weenv.layer.foreign.formats import ForeignLayer
from weenv.layer.limits import DEFAULT_LIMITS, Limits
from weenv.layer.tail import build_tail
from weenv.layer.toc import Toc
from weenv.layer.verify import LayerDescriptor, verify_frame
from weenv.layer.zframe import Buffer

_PIECE = 4 << 20


def make_tail(
    layer: ForeignLayer, data: Buffer, offset: int, limits: Limits = DEFAULT_LIMITS
) -> tuple[Toc, LayerDescriptor, bytes]:
    """The TOC, the tail and what the tail is verified with; arguments and errors as of ``make_toc``.

    Equal input gives an equal tail. The tail would begin where the range of the last frame ends.
    """
    toc = make_toc(layer, data, offset, limits)
    tail = build_tail(toc, limits)
    end = int(toc.frames.compressed_offsets[-1])
    return toc, LayerDescriptor(layer.digest, end + len(tail), end, len(tail), digests.sha256(tail), foreign=True), tail


def verify_foreign(read_at: ReadAt, layer: ForeignLayer, data: Buffer, offset: int, limits: Limits = DEFAULT_LIMITS) -> Toc:
    """Check a whole blob against what its manifest promises: its digest, its TOC (``data``, at ``offset``), and every chunk.

    Not checked is whether the TOC says what the tar stream does. Raises :class:`FormatError` at the first link that fails.
    """
    toc, descriptor, _ = make_tail(layer, data, offset, limits)
    blob = hashlib.sha256()
    bounds = toc.frames.compressed_offsets.tolist()
    for number in range(len(toc.frames)):
        part = exactly(read_at, bounds[number], bounds[number + 1] - bounds[number])
        blob.update(part)
        verify_frame(toc.frames, number, part)
    position = descriptor.toc_offset
    while position < layer.size:
        rest = exactly(read_at, position, min(_PIECE, layer.size - position))
        blob.update(rest)
        position += len(rest)
    if "sha256:" + blob.hexdigest() != layer.digest:
        raise VerificationError(f"the blob has digest sha256:{blob.hexdigest()}, expected {layer.digest}")
    return toc

