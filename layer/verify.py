"""Every decision whether bytes are what they should be. No I/O: bytes and promises in, verified bytes or an error out.

The chain: the manifest's digest covers the layer descriptor's annotations; these hold the digest of the tail; the tail
holds the digest of every frame. Each digest is checked before anything interprets the bytes it covers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from weenv.core import digest as digests
from weenv.core.errors import FormatError, LimitError, VerificationError
from weenv.layer import pieces, zframe
from weenv.layer import tail as tails
from weenv.layer.limits import DEFAULT_LIMITS, Limits
from weenv.layer.toc import Frames, Toc
from weenv.layer.zframe import Buffer

LAYER_ANNOTATION = "containerd.io/snapshot/weenv.layer"
TOC_ANNOTATION = "containerd.io/snapshot/weenv.toc"
SOURCE_ANNOTATION = "containerd.io/snapshot/weenv.source"
PREFETCH_ANNOTATION = "containerd.io/snapshot/weenv.prefetch"
"""Annotations of a layer descriptor; unpacking clients hand those with this prefix to the snapshotter as labels."""

MEDIA_TYPE = "application/vnd.oci.image.layer.v1.tar+zstd"

MAX_LABEL = 4096
"""containerd's limit for a label's key and value together (pkg/labels/validate.go)."""
_MAX_SIZE = (1 << 63) - 1
_NUMBER = re.compile(r"(0|[1-9][0-9]{0,18})\Z", re.ASCII)
# A registry host with optional port (a bracketed address, too), and a repository as the OCI distribution spec 1.1 has it
# ("Pulling manifests", <name>).
_SOURCE = re.compile(
    r"(?P<host>(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,253}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?)/"
    r"(?P<repository>[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*)\Z"
)
_MAX_SOURCE = 512


@dataclass(frozen=True, slots=True)
class LayerDescriptor:
    """What the manifest promises of a layer: the blob's ``digest`` and ``size``, and where its tail is and what it hashes to.

    Sizes and offsets are bytes; the tail ends the blob: ``toc_offset + toc_length == size``. ``source`` is the
    (registry host, repository) of the optional hint where the blob is known to be, or None.
    """

    digest: str
    size: int
    toc_offset: int
    toc_length: int
    toc_digest: str
    source: tuple[str, str] | None = None
    foreign: bool = False
    """True where the tail was made on this node from the TOC of a blob in somebody else's format: then it is in no blob, and
    ``size`` is where it would end behind the blob's last frame."""
    prefetch: str = ""
    """What to fetch ahead (profile.py): a hint, carried along as it came and looked at by nobody but who fetches."""

    def annotations(self) -> dict[str, str]:
        """The annotations that say so; :func:`parse_annotations` is the inverse."""
        result = {
            LAYER_ANNOTATION: f"{self.digest},{self.size}",
            TOC_ANNOTATION: f"{self.toc_offset},{self.toc_length},{self.toc_digest}",
        }
        if self.source is not None:
            result[SOURCE_ANNOTATION] = "/".join(self.source)
        if self.prefetch:
            result[PREFETCH_ANNOTATION] = self.prefetch
        return result


def is_annotated(annotations: Mapping[str, str]) -> bool:
    """True where labels or annotations speak of this format at all; :func:`parse_annotations` says whether rightly."""
    return TOC_ANNOTATION in annotations or LAYER_ANNOTATION in annotations


def parse_annotations(annotations: Mapping[str, str], limits: Limits = DEFAULT_LIMITS) -> LayerDescriptor | None:
    """What a descriptor's annotations (or a snapshot's labels) say of the layer; None where they do not speak of it.

    Raises :class:`FormatError` where they do but are malformed, contradictory or beyond ``limits``.
    """
    if not is_annotated(annotations):
        return None
    layer = _fields(annotations, LAYER_ANNOTATION, 2)
    toc = _fields(annotations, TOC_ANNOTATION, 3)
    source = annotations.get(SOURCE_ANNOTATION)
    prefetch = annotations.get(PREFETCH_ANNOTATION, "")
    descriptor = LayerDescriptor(
        digest=_digest(layer[0], LAYER_ANNOTATION),
        size=_number(layer[1], LAYER_ANNOTATION),
        toc_offset=_number(toc[0], TOC_ANNOTATION),
        toc_length=_number(toc[1], TOC_ANNOTATION),
        toc_digest=_digest(toc[2], TOC_ANNOTATION),
        source=None if source is None else parse_source(source),
        prefetch=prefetch if len(PREFETCH_ANNOTATION) + len(prefetch) <= MAX_LABEL else "",
    )
    if descriptor.toc_length > limits.max_toc_compressed:
        raise LimitError(f"a tail of {descriptor.toc_length} bytes", member=TOC_ANNOTATION)
    if not descriptor.toc_length or descriptor.toc_offset + descriptor.toc_length != descriptor.size:
        raise FormatError("the tail does not end the blob", member=TOC_ANNOTATION)
    return descriptor


def parse_source(text: str) -> tuple[str, str]:
    """``<registry host>/<repository>`` as (host, repository). Raises :class:`FormatError`."""
    match = _SOURCE.match(text) if len(text) <= _MAX_SOURCE else None
    if match is None:
        raise FormatError("not <registry host>/<repository>", member=SOURCE_ANNOTATION)
    return match["host"], match["repository"]


def _fields(annotations: Mapping[str, str], key: str, count: int) -> list[str]:
    value = annotations.get(key)
    if value is None:
        raise FormatError("missing, though its companion is there", member=key)
    fields = value.split(",", count) if len(key) + len(value) <= MAX_LABEL else []
    if len(fields) != count:
        raise FormatError(f"not {count} values with commas between them", member=key)
    return fields


def _number(text: str, key: str) -> int:
    if _NUMBER.match(text) is None or int(text) > _MAX_SIZE:
        raise FormatError(f"not a size: {text[:40]!r}", member=key)
    return int(text)


def _digest(text: str, key: str) -> str:
    if not digests.is_digest(text):
        raise FormatError(f"not a sha256 digest: {text[:80]!r}", member=key)
    return text


def verify_tail_bytes(tail: Buffer, descriptor: LayerDescriptor) -> None:
    """Raise :class:`VerificationError` unless ``tail`` is the tail that ``descriptor`` promises."""
    if len(tail) != descriptor.toc_length:
        raise VerificationError(f"the tail has {len(tail)} bytes, expected {descriptor.toc_length}", member=descriptor.digest)
    digests.verify(tail, descriptor.toc_digest, f"the tail of {descriptor.digest}")


def verify_tail(tail: Buffer, descriptor: LayerDescriptor, limits: Limits = DEFAULT_LIMITS) -> Toc:
    """The TOC of a tail: digest first, then :func:`weenv.layer.tail.parse_tail`. Raises :class:`FormatError`."""
    verify_tail_bytes(tail, descriptor)
    return tails.parse_tail(
        tail, layer_size=descriptor.size, toc_offset=descriptor.toc_offset, limits=limits, foreign=descriptor.foreign
    )


def verify_frames(tail: Buffer, descriptor: LayerDescriptor, limits: Limits = DEFAULT_LIMITS) -> tails.FrameIndex:
    """As :func:`verify_tail`, but the frames only: what serving a layer's bytes needs."""
    verify_tail_bytes(tail, descriptor)
    return tails.decode_frames(
        tail, layer_size=descriptor.size, toc_offset=descriptor.toc_offset, limits=limits, foreign=descriptor.foreign
    )


def verify_frame(frames: Frames, number: int, compressed: Buffer) -> bytes:
    """The content of frame ``number``, from its compressed bytes: digest first, then decompressed to its exact size.

    ``frames`` has been checked, so a frame's size is bounded. Safe to call from several threads, which then run side by
    side. Raises :class:`VerificationError` for wrong bytes, :class:`FormatError` where the right ones are no such frame.
    """
    if frames.pieces is not None:
        return pieces.verify_frame(frames, frames.pieces, number, compressed)
    expected = int(frames.compressed_sizes[number])
    if len(compressed) != expected:
        raise VerificationError(f"has {len(compressed)} bytes, expected {expected}", member=f"frame {number}")
    if hashlib.sha256(compressed).digest() != frames.digests[number].tobytes():
        raise VerificationError("its bytes do not have the digest in the TOC", member=f"frame {number}")
    return zframe.decompress(compressed, int(frames.content_sizes[number]), f"frame {number}")
