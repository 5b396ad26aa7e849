"""Annotations, footers, and getting the JSON out of a blob."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile

import pytest
import zstandard

from weenv.core.errors import BadReference, FormatError, LimitError, UnsupportedError, VerificationError
from weenv.layer.foreign import formats
from weenv.layer.foreign.formats import (
    ESTARGZ,
    FOOTER,
    MAX_TOC,
    TOC_DIGEST,
    ZSTD_CHUNKED,
    ForeignLayer,
    parse_footer,
    parse_foreign,
    read_toc,
)
from weenv_testkit import rawcorpus
from weenv_testkit.foreign import PREFIX, estargz, zstd_chunked

DIGEST = "sha256:" + "a" * 64
STREAM = rawcorpus.file(b"f", b"x" * 3000) + rawcorpus.END


def test_annotations() -> None:
    assert parse_foreign({}, DIGEST, 100, "zstd") is None
    assert parse_foreign({TOC_DIGEST: DIGEST}, DIGEST, 100, "none") is None
    assert parse_foreign({TOC_DIGEST: DIGEST}, DIGEST, 100, "zstd") is None, "eStargz is gzip"
    assert parse_foreign({TOC_DIGEST: DIGEST}, DIGEST, 100, "gzip") == ForeignLayer(ESTARGZ, DIGEST, 100, DIGEST)
    for prefix in (PREFIX, "io.containers.zstd-chunked."):  # what skopeo wrote until 2022
        said = {prefix + "manifest-checksum": DIGEST, prefix + "manifest-position": "20:30:400:1"}
        assert parse_foreign(said, DIGEST, 100, "zstd") == ForeignLayer(ZSTD_CHUNKED, DIGEST, 100, DIGEST, 20, 30, 400)
        assert parse_foreign(said, DIGEST, 100, "gzip") is None


@pytest.mark.parametrize(
    ("checksum", "position", "error"),
    [
        (DIGEST, None, FormatError),
        (DIGEST, "", FormatError),
        (DIGEST, "20:30:400", FormatError),
        (DIGEST, "20:30:400:1\n", FormatError),
        (DIGEST, "-20:30:400:1", FormatError),
        (DIGEST, "٢٠:30:400:1", FormatError),
        (DIGEST, "20:81:400:1", FormatError),
        (DIGEST, "20:0:400:1", FormatError),
        (DIGEST, "20:30:0:1", FormatError),
        (DIGEST, "3:30:400:1", FormatError),
        (DIGEST, "20:30:400:2", UnsupportedError),
        (DIGEST, f"20:30:{MAX_TOC + 1}:1", LimitError),
        ("sha512:00", "20:30:400:1", FormatError),
    ],
)
def test_annotations_that_are_refused(checksum: str, position: str | None, error: type[FormatError]) -> None:
    said = {PREFIX + "manifest-checksum": checksum}
    if position is not None:
        said[PREFIX + "manifest-position"] = position
    with pytest.raises(error):
        parse_foreign(said, DIGEST, 100, "zstd")


def test_footers() -> None:
    data = estargz(STREAM).data
    assert data[parse_footer(data[-FOOTER:], len(data)) :][:2] == b"\x1f\x8b"
    good = data[-FOOTER:]
    for wrong in (b"", good[1:], bytes(FOOTER), good.replace(b"STARGZ", b"STARGX"), good[:16] + b"-" + good[17:]):
        with pytest.raises(FormatError, match="does not end with an eStargz footer"):
            parse_footer(wrong, len(data))
    for offset in (len(data) - FOOTER, len(data), (1 << 64) - 1):
        with pytest.raises(FormatError, match="a TOC at"):
            parse_footer(good[:16] + b"%016x" % offset + good[32:], len(data))
    with pytest.raises(LimitError):
        parse_footer(good[:16] + b"%016x" % 0 + good[32:], MAX_TOC + 1000)


@pytest.mark.parametrize("blob", [estargz(STREAM), zstd_chunked(STREAM)], ids=["estargz", "zstd:chunked"])
def test_the_json_is_verified(blob: object) -> None:
    assert isinstance(blob, type(estargz(STREAM)))
    _, data = blob.toc_bytes()
    assert read_toc(blob.layer, data).startswith(b'{"version": 1')
    other = ForeignLayer(blob.layer.format, DIGEST, 100, DIGEST, 20, 30, 400)
    with pytest.raises(VerificationError):
        read_toc(other, data)
    for damaged in (b"", data[:-9], data[:20], b"\0" * 50):
        with pytest.raises(FormatError):
            read_toc(blob.layer, damaged)


def zstd_layer(text: bytes, packed: bytes, content: int) -> ForeignLayer:
    digest = "sha256:" + hashlib.sha256(packed).hexdigest()
    return ForeignLayer(ZSTD_CHUNKED, DIGEST, 1000, digest, 20, len(packed), content)


def test_a_toc_that_is_longer_or_shorter_than_said() -> None:
    packed = zstandard.compress(b"x" * 500)
    assert read_toc(zstd_layer(b"", packed, 500), packed) == b"x" * 500
    for content in (499, 501):
        with pytest.raises(FormatError, match="bytes long"):
            read_toc(zstd_layer(b"", packed, content), packed)


def tar_of(*names: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 2
            archive.addfile(info, io.BytesIO(b"{}"))
    return out.getvalue()


def test_tars_that_hold_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = ForeignLayer(ESTARGZ, DIGEST, 1000, "sha256:" + hashlib.sha256(b"{}").hexdigest())
    assert read_toc(layer, gzip.compress(tar_of("stargz.index.json"))) == b"{}"
    for names in ((), ("other",), ("stargz.index.json", "more")):
        with pytest.raises(FormatError, match="does not hold"):
            read_toc(layer, gzip.compress(tar_of(*names)))
    monkeypatch.setattr(formats, "MAX_TOC", 1000)
    with pytest.raises(LimitError, match="more than 1000"):
        read_toc(layer, gzip.compress(bytes(1 << 20)))


def test_a_stored_description_is_checked() -> None:
    estargz(STREAM).layer.check()
    for wrong in (
        ForeignLayer("gzip", DIGEST, 1, DIGEST),
        ForeignLayer(ESTARGZ, "x", 1, DIGEST),
        ForeignLayer(ESTARGZ, DIGEST, 1, "x"),
        ForeignLayer(ESTARGZ, DIGEST, -1, DIGEST),
        ForeignLayer(ESTARGZ, DIGEST, True, DIGEST),
    ):
        with pytest.raises((ValueError, BadReference)):
            wrong.check()
