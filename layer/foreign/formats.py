"""What a manifest says of an eStargz or zstd:chunked layer, and how its TOC is got out of the blob. No I/O.

Both formats end a blob with a TOC in JSON, and put its digest into the annotations of the layer's descriptor:

eStargz (stargz-snapshotter docs/estargz.md, estargz/types.go)
    ``containerd.io/snapshot/stargz/toc.digest``: sha256 of the JSON. Where it lies is told by the blob's last 51 bytes, an
    empty gzip member whose extra field holds the offset of the gzip member in which a tar holds ``stargz.index.json``.
zstd:chunked (containers/storage pkg/chunked/internal/minimal/compression.go)
    ``io.github.containers.zstd-chunked.manifest-checksum``: sha256 of the *compressed* JSON;
    ``...manifest-position``: its ``offset:length:length decompressed:1``. It is the payload of a skippable frame. Until 2022
    the keys began with ``io.containers.zstd-chunked`` (skopeo 1.9.3, of Debian 12, still writes those).

A digest is checked before anything interprets what it covers; what eStargz wants decompressed first is bounded.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import zstandard

from weenv.core import digest as digests
from weenv.core.errors import FormatError, LimitError, UnsupportedError, VerificationError
from weenv.layer import zframe
from weenv.layer.tarscan import Member, TarScanner
from weenv.layer.toc import FILE
from weenv.layer.zframe import SKIPPABLE_HEADER, Buffer

ESTARGZ = "estargz"
ZSTD_CHUNKED = "zstd:chunked"

TOC_DIGEST = "containerd.io/snapshot/stargz/toc.digest"
MANIFEST_CHECKSUM = "zstd-chunked.manifest-checksum"
MANIFEST_POSITION = "zstd-chunked.manifest-position"
_PREFIXES = ("io.github.containers.", "io.containers.")

FOOTER = 51
"""Bytes of eStargz's footer."""
TOC_NAME = b"stargz.index.json"
MAX_TOC = 256 << 20
"""Bytes of JSON, compressed or not: a million files. containers/storage takes 150 MiB."""
_AROUND = 64 << 10
"""Bytes of the tar around the JSON: headers, padding, end."""

_POSITION = re.compile(r"([0-9]{1,18}):([0-9]{1,18}):([0-9]{1,18}):([0-9]{1,18})\Z", re.ASCII)
_GZIP_EXTRA = b"\x1a\x00SG\x16\x00"
_OFFSET = re.compile(rb"([0-9a-f]{16})STARGZ\Z")
_WHAT = "TOC"


@dataclass(frozen=True, slots=True)
class ForeignLayer:
    """What the manifest promises of a layer in another format.

    ``format`` is ESTARGZ or ZSTD_CHUNKED; ``digest`` and ``size`` are the blob's; ``toc_digest`` covers the JSON (eStargz) or
    its compressed form (zstd:chunked). Of the latter ``toc_offset``, ``toc_length`` and ``toc_content`` say where that is, and
    how long decompressed; for eStargz they are 0. All in bytes.
    """

    format: str
    digest: str
    size: int
    toc_digest: str
    toc_offset: int = 0
    toc_length: int = 0
    toc_content: int = 0

    def check(self) -> None:
        """Raise ValueError, TypeError or BadReference for values that :func:`parse_foreign` would not have made."""
        sizes = self.size, self.toc_offset, self.toc_length, self.toc_content
        if self.format not in (ESTARGZ, ZSTD_CHUNKED):
            raise ValueError("an unknown format")
        digests.check_digest(self.digest)
        digests.check_digest(self.toc_digest)
        if any(type(size) is not int or not 0 <= size < 1 << 63 for size in sizes):
            raise ValueError("sizes that are none")


def parse_foreign(annotations: Mapping[str, str], digest: str, size: int, compression: str) -> ForeignLayer | None:
    """What a layer's descriptor says; None where it speaks of neither format.

    ``compression`` is the media type's: ``gzip`` or ``zstd``. Raises :class:`FormatError` for malformed annotations.
    """
    if compression == "gzip" and TOC_DIGEST in annotations:
        return ForeignLayer(ESTARGZ, digest, size, _digest(annotations[TOC_DIGEST], TOC_DIGEST))
    prefix = next((prefix for prefix in _PREFIXES if prefix + MANIFEST_CHECKSUM in annotations), None)
    if compression == "zstd" and prefix is not None:
        toc_digest = _digest(annotations[prefix + MANIFEST_CHECKSUM], MANIFEST_CHECKSUM)
        match = _POSITION.match(annotations.get(prefix + MANIFEST_POSITION, ""))
        if match is None:
            raise FormatError("not offset:length:size:type", member=MANIFEST_POSITION)
        offset, length, content, kind = map(int, match.groups())
        if kind != 1:
            raise UnsupportedError(f"a TOC of type {kind}", member=MANIFEST_POSITION)
        if length > MAX_TOC or content > MAX_TOC:
            raise LimitError(f"a TOC of {content} bytes", member=MANIFEST_POSITION)
        if not length or not content or offset < SKIPPABLE_HEADER or offset + length > size:
            raise FormatError("the TOC lies outside the blob", member=MANIFEST_POSITION)
        return ForeignLayer(ZSTD_CHUNKED, digest, size, toc_digest, offset, length, content)
    return None


def _digest(text: str, key: str) -> str:
    if not digests.is_digest(text):
        raise FormatError(f"not a sha256 digest: {text[:80]!r}", member=key)
    return text


def parse_footer(footer: Buffer, size: int) -> int:
    """Where the TOC's gzip member begins in an eStargz blob of ``size`` bytes, from its last :data:`FOOTER` bytes.

    Nothing vouches for it: the TOC found there has a digest. Raises :class:`FormatError`.
    """
    data = bytes(footer)
    match = _OFFSET.match(data[16:38])
    if len(data) != FOOTER or data[:4] != b"\x1f\x8b\x08\x04" or data[10:16] != _GZIP_EXTRA or match is None:
        raise FormatError("the blob does not end with an eStargz footer", member="footer")
    offset = int(match[1], 16)
    if not offset < size - FOOTER:
        raise FormatError(f"a TOC at {offset} in a blob of {size} bytes", member="footer")
    if size - FOOTER - offset > MAX_TOC:
        raise LimitError(f"a TOC of {size - FOOTER - offset} bytes", member="footer")
    return offset


def read_toc(layer: ForeignLayer, data: Buffer) -> bytes:
    """The JSON, verified. ``data`` is the compressed TOC: of eStargz all between where the footer points and the footer.

    Raises :class:`VerificationError` where the bytes are not the promised ones, as far as can be told: of eStargz, whose digest
    is that of the JSON, they are not either where they hold none. :class:`FormatError` for what the publisher has done.
    """
    if layer.format == ZSTD_CHUNKED:
        return _read_zstd(layer, data)
    return _read_gzip(layer, data)


def _read_zstd(layer: ForeignLayer, data: Buffer) -> bytes:
    digests.verify(data, layer.toc_digest, f"the TOC of {layer.digest}")
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=zframe.MAX_WINDOW).stream_reader(data, read_across_frames=True)
        with reader:
            content = reader.read(layer.toc_content + 1)
    except zstandard.ZstdError as error:
        raise FormatError(f"it cannot be decompressed: {error}", member=_WHAT) from None
    if len(content) != layer.toc_content:
        raise FormatError(f"it is not the {layer.toc_content} bytes long that {MANIFEST_POSITION} says", member=_WHAT)
    return content


def _read_gzip(layer: ForeignLayer, data: Buffer) -> bytes:
    inflater = zlib.decompressobj(wbits=31)
    try:
        content = inflater.decompress(data, MAX_TOC + _AROUND)
    except zlib.error as error:
        raise VerificationError(f"it cannot be decompressed: {error}", member=_WHAT) from None
    if not inflater.eof:
        if len(content) == MAX_TOC + _AROUND:
            raise LimitError(f"more than {MAX_TOC} bytes", member=_WHAT)
        raise VerificationError("its gzip member is truncated", member=_WHAT)
    found: list[Member] = []
    scanner = TarScanner(found.append)
    try:
        scanner.feed(content)
        scanner.close()
    except FormatError as error:
        raise VerificationError(f"it is no tar: {error}", member=_WHAT) from None
    if len(found) != 1 or found[0].name != TOC_NAME or found[0].kind != FILE or found[0].sparse is not None:
        raise VerificationError(f"its tar does not hold {TOC_NAME.decode()}", member=_WHAT)
    begin, size = found[0].offset, found[0].size
    text = content[begin : begin + size] if size else b""
    have = digests.sha256(text)
    if have != layer.toc_digest:
        raise VerificationError(f"the TOC of {layer.digest} has digest {have}, expected {layer.toc_digest}")
    return text
