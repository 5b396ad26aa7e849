"""The chain of trust, link by link."""

from __future__ import annotations

import dataclasses

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from weenv.core.errors import FormatError, LimitError, VerificationError
from weenv.layer import verify
from weenv.layer.limits import Limits
from weenv.layer.toc import Frames
from weenv.layer.verify import LAYER_ANNOTATION, SOURCE_ANNOTATION, TOC_ANNOTATION, LayerDescriptor, parse_annotations
from weenv_testkit.layers import encode, sample_tar

TAR = sample_tar()
BLOB, LAYER = encode(TAR)
D1, D2 = "sha256:" + "1" * 64, "sha256:" + "2" * 64


def frame(number: int) -> bytes:
    offsets = LAYER.toc.frames.compressed_offsets
    return BLOB[int(offsets[number]) : int(offsets[number + 1])]


def test_annotations_round_trip() -> None:
    assert parse_annotations(LAYER.annotations()) == LAYER.descriptor()
    named = dataclasses.replace(LAYER.descriptor(), source=("registry.example:5000", "team/image"))
    assert parse_annotations(named.annotations()) == named
    assert set(LAYER.annotations()) == {LAYER_ANNOTATION, TOC_ANNOTATION}
    for key, value in named.annotations().items():
        assert key.startswith("containerd.io/snapshot/")
        assert len(key) + len(value) <= 4096


def test_other_labels_are_none_of_ours() -> None:
    assert parse_annotations({}) is None
    assert parse_annotations({"containerd.io/snapshot.ref": "x", SOURCE_ANNOTATION: "???"}) is None


def labels(layer: str = f"{D1},1000", toc: str = f"900,100,{D2}", **more: str) -> dict[str, str]:
    return {LAYER_ANNOTATION: layer, TOC_ANNOTATION: toc, "other": "x", **more}


def test_the_usual_annotations() -> None:
    assert parse_annotations(labels()) == LayerDescriptor(D1, 1000, 900, 100, D2, None)


@pytest.mark.parametrize(
    "bad",
    [
        {LAYER_ANNOTATION: f"{D1},1000"},
        {TOC_ANNOTATION: f"900,100,{D2}"},
        labels(layer=""),
        labels(layer=D1),
        labels(layer=f"{D1},1000,"),
        labels(layer=f"{D1},1000,5"),
        labels(layer=f"{D1}, 1000"),
        labels(layer=f"{D1},+1000"),
        labels(layer=f"{D1},01000"),
        labels(layer=f"{D1},1_000"),
        labels(layer=f"{D1},1e3"),
        labels(layer=f"{D1},\u0661000"),
        labels(layer=f"{D1},1000\n"),
        labels(layer=f"{D1}\n,1000"),
        labels(layer=f"{D1.upper()},1000"),
        labels(layer=f"sha512:{'1' * 128},1000"),
        labels(layer=f"{D1},{'9' * 5000}"),
        labels(layer=f"{D1},9999999999999999999", toc=f"9999999999999999899,100,{D2}"),
        labels(toc=f"900,100,{D2},1"),
        labels(toc=f"-1,1001,{D2}"),
        labels(toc=f"900,101,{D2}"),
        labels(toc=f"899,100,{D2}"),
        labels(toc=f"1000,0,{D2}"),
        labels(toc="900,100,sha256:"),
        labels(**{SOURCE_ANNOTATION: ""}),
        labels(**{SOURCE_ANNOTATION: "host"}),
        labels(**{SOURCE_ANNOTATION: "https://host/repo"}),
        labels(**{SOURCE_ANNOTATION: "user@host/repo"}),
        labels(**{SOURCE_ANNOTATION: "host/../etc"}),
        labels(**{SOURCE_ANNOTATION: "host/Repo"}),
        labels(**{SOURCE_ANNOTATION: "host/repo?x=y"}),
        labels(**{SOURCE_ANNOTATION: "host:123456/repo"}),
        labels(**{SOURCE_ANNOTATION: "host/repo\n"}),
        labels(**{SOURCE_ANNOTATION: "host/" + "a" * 600}),
    ],
)
def test_malformed_annotations_are_refused(bad: dict[str, str]) -> None:
    with pytest.raises(FormatError):
        parse_annotations(bad)


@pytest.mark.parametrize(
    "source", ["localhost:5000/a", "10.0.0.1:5000/a/b-c/d_e__f.g", "[::1]:5000/x", "registry-1.example.org/lib/x"]
)
def test_sources(source: str) -> None:
    descriptor = parse_annotations(labels(**{SOURCE_ANNOTATION: source}))
    assert descriptor is not None and descriptor.source is not None
    assert "/".join(descriptor.source) == source


def test_a_tail_beyond_the_limit_is_refused_before_it_is_fetched() -> None:
    with pytest.raises(LimitError):
        parse_annotations(labels(), Limits(max_toc_compressed=99))


@given(st.text(max_size=100), st.text(max_size=100), st.text(max_size=100))
def test_no_annotation_does_more_than_raise(layer: str, toc: str, source: str) -> None:
    with pytest.raises(FormatError):
        parse_annotations({LAYER_ANNOTATION: layer, TOC_ANNOTATION: toc, SOURCE_ANNOTATION: source})


def test_every_frame_verifies() -> None:
    frames = LAYER.toc.frames
    assert b"".join(verify.verify_frame(frames, i, frame(i)) for i in range(len(frames))) == TAR
    assert verify.verify_frame(frames, 0, memoryview(frame(0))) == verify.verify_frame(frames, 0, bytearray(frame(0)))


@given(st.data())
def test_a_wrong_frame_is_refused(data: st.DataObject) -> None:
    frames = LAYER.toc.frames
    number = data.draw(st.integers(0, len(frames) - 1))
    wrong = bytearray(frame(number))
    bit = data.draw(st.integers(0, len(wrong) * 8 - 1))
    wrong[bit // 8] ^= 1 << bit % 8
    for bad in (bytes(wrong), frame(number)[:-1], frame(number) + b"\0", frame((number + 5) % len(frames)), b""):
        if bad == frame(number):
            continue  # frames of zeros are alike
        with pytest.raises(VerificationError, match=f"frame {number}"):
            verify.verify_frame(frames, number, bad)


def signed(compressed: bytes, content: int) -> Frames:
    """A frame table that vouches for these bytes, whatever they are."""
    import hashlib

    import numpy as np

    return Frames(
        np.array([len(compressed)], dtype=np.uint32),
        np.array([content], dtype=np.uint32),
        np.frombuffer(hashlib.sha256(compressed).digest(), dtype=np.uint8).reshape(1, 32),
    )


def test_right_digest_of_wrong_bytes_is_still_bounded() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(32 << 20))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 100)
    two = zstandard.ZstdCompressor().compress(b"x" * 50) * 2
    for compressed, content in (
        (bomb, 100),
        (unsized, 100),
        (two, 100),
        (two, 50),
        (b"junk", 4),
        (b"\x50\x2a\x4d\x18\0\0\0\0", 1),
    ):
        with pytest.raises(FormatError, match="frame 0"):
            verify.verify_frame(signed(compressed, content), 0, compressed)


def test_the_digest_is_checked_before_anything_else() -> None:
    bad = dataclasses.replace(LAYER.descriptor(), toc_digest=D1)
    for call in (verify.verify_tail, verify.verify_frames):
        with pytest.raises(VerificationError, match="digest"):
            call(b"x" * LAYER.toc_length, LAYER.descriptor())
        with pytest.raises(VerificationError, match="digest"):
            call(BLOB[LAYER.toc_offset :], bad)
        with pytest.raises(VerificationError, match="bytes, expected"):
            call(BLOB[LAYER.toc_offset : -1], LAYER.descriptor())
