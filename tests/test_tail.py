"""The tail of a blob: what a registry may answer."""

from __future__ import annotations

import contextlib
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weenv.core.digest import sha256
from weenv.core.errors import FormatError, VerificationError
from weenv.layer import codec, seekable
from weenv.layer.limits import Limits
from weenv.layer.tail import TOC_FRAME_MAGIC, TailRange, build_tail, decode_frames, locate_tail, parse_tail
from weenv.layer.toc import Toc
from weenv.layer.verify import LayerDescriptor, verify_frames, verify_tail
from weenv.layer.zframe import skippable
from weenv_testkit.layers import encode, sample_tar

BLOB, LAYER = encode(sample_tar())
OFFSET, SIZE = LAYER.toc_offset, len(BLOB)
TAIL = BLOB[OFFSET:]


def parse(tail: bytes) -> Toc:
    return parse_tail(tail, layer_size=OFFSET + len(tail), toc_offset=OFFSET)


def test_parse() -> None:
    toc = parse(TAIL)
    assert toc.diff_id == LAYER.diff_id
    index = decode_frames(TAIL, layer_size=SIZE, toc_offset=OFFSET)
    assert index.stream_size == toc.stream_size
    assert index.frames.digests.tobytes() == toc.frames.digests.tobytes()
    assert parse_tail(memoryview(TAIL), layer_size=SIZE, toc_offset=OFFSET).diff_id == LAYER.diff_id
    assert parse_tail(bytearray(TAIL), layer_size=SIZE, toc_offset=OFFSET).diff_id == LAYER.diff_id


@settings(max_examples=400)
@given(st.integers(0, len(TAIL) * 8 - 1))
def test_a_flipped_bit_is_found_by_the_digest_and_harmless_without(bit: int) -> None:
    flipped = bytearray(TAIL)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(VerificationError):
        verify_tail(bytes(flipped), LAYER.descriptor())
    with pytest.raises(VerificationError):
        verify_frames(bytes(flipped), LAYER.descriptor())
    # With a digest that matches, that is from whoever signs the manifest: refused, or a sound TOC of these frames.
    lying = LayerDescriptor(LAYER.blob_digest, SIZE, OFFSET, len(TAIL), sha256(flipped))
    for check in (verify_tail, verify_frames):
        try:
            check(bytes(flipped), lying)
        except FormatError:
            continue


@settings(max_examples=300)
@given(st.integers(0, len(TAIL) - 1), st.integers(0, len(TAIL)))
def test_a_truncated_tail_is_refused(begin: int, end: int) -> None:
    part = TAIL[:end] if begin % 2 else TAIL[begin:end]
    if part == TAIL:
        return
    for call in (parse_tail, decode_frames):
        with pytest.raises(FormatError):
            call(part, layer_size=OFFSET + len(part), toc_offset=OFFSET)
    with pytest.raises(VerificationError):
        verify_tail(part, LAYER.descriptor())


@given(st.binary(max_size=200), st.integers(-10, 10_000))
def test_garbage_is_refused(data: bytes, offset: int) -> None:
    for tail in (data, skippable(TOC_FRAME_MAGIC, data), skippable(TOC_FRAME_MAGIC, codec.MAGIC + data) + TAIL[-100:]):
        for call in (parse_tail, decode_frames):
            with pytest.raises(FormatError):
                call(tail, layer_size=offset + len(tail), toc_offset=offset)


@pytest.mark.parametrize("shift", [-1, 1, 512, -OFFSET - 1, 1 << 62])
def test_a_tail_in_the_wrong_place_is_refused(shift: int) -> None:
    for call in (parse_tail, decode_frames):
        with pytest.raises(FormatError):
            call(TAIL, layer_size=SIZE + shift, toc_offset=OFFSET + shift)
        with pytest.raises(FormatError):
            call(TAIL, layer_size=SIZE + shift, toc_offset=OFFSET)


def with_table(change: str) -> bytes:
    payload = codec.encode_toc(LAYER.toc)
    frame = skippable(TOC_FRAME_MAGIC, payload)
    compressed = np.append(LAYER.toc.frames.compressed_sizes, np.uint32(len(frame)))
    content = np.append(LAYER.toc.frames.content_sizes, np.uint32(0))
    if change == "compressed":
        compressed[1] += 1
    elif change == "content":
        content[1] += 1
    elif change == "toc":
        compressed[-1] += 1
    elif change == "toc content":
        content[-1] = 1
    elif change == "short":
        compressed, content = compressed[1:], content[1:]
    elif change == "long":
        compressed, content = np.append(compressed, compressed[-1:]), np.append(content, content[-1:])
    return frame + seekable.build(compressed, content)


def test_the_seek_table_must_agree_with_the_toc() -> None:
    parse(with_table("nothing"))
    for change in ("compressed", "content", "toc", "toc content", "short", "long"):
        with pytest.raises(FormatError, match="seek table"):
            parse(with_table(change))


def test_limits() -> None:
    with pytest.raises(FormatError):
        parse_tail(TAIL, layer_size=SIZE, toc_offset=OFFSET, limits=Limits(max_toc_compressed=len(TAIL) - 1))
    with pytest.raises(FormatError):
        build_tail(LAYER.toc, Limits(max_toc_compressed=len(TAIL) - 1))


def test_a_lying_count_allocates_nothing() -> None:
    frames = b"\x5e\x2a\x4d\x18" + (2**32 - 1).to_bytes(4, "little") + bytes(64) + b"\xff\xff\xff\x07\x00\xb1\xea\x92\x8f"
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            locate_tail(frames, 1 << 40)
        with pytest.raises(FormatError):
            parse(TAIL[: -len(frames)] + frames)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


# -- blobs without annotation


def test_locate() -> None:
    assert locate_tail(BLOB[-9:], SIZE) == 8 + 8 * (len(LAYER.toc.frames) + 1) + 9
    assert locate_tail(b"", SIZE) == 9
    for given_bytes in (BLOB, BLOB[-5000:], TAIL):
        assert locate_tail(given_bytes, SIZE) == TailRange(OFFSET, len(TAIL))


@pytest.mark.parametrize("data", [b"", b"x" * 8, b"x" * 1000, b"\x28\xb5\x2f\xfd" + bytes(100), BLOB[:-1], BLOB[:OFFSET]])
def test_locate_refuses_other_blobs(data: bytes) -> None:
    with pytest.raises(FormatError):
        locate_tail(data, len(data))


def test_locate_refuses_a_table_that_does_not_add_up() -> None:
    for size in (SIZE + 1, SIZE - 1, len(TAIL), 1 << 60):
        with pytest.raises(FormatError):
            locate_tail(BLOB[-5000:], size)


@given(st.binary(max_size=80), st.integers(0, 1 << 40))
def test_locate_raises_nothing_else(data: bytes, size: int) -> None:
    for last in (data, data + b"\xb1\xea\x92\x8f", data + b"\x01\0\0\0\0\xb1\xea\x92\x8f"):
        with contextlib.suppress(FormatError):
            locate_tail(last, max(size, len(last)))


def test_noise_in_place_of_a_tail() -> None:
    noise = random.Random(5)
    for _ in range(200):
        tail = bytearray(TAIL)
        begin = noise.randrange(len(tail))
        tail[begin : begin + noise.randrange(40)] = noise.randbytes(noise.randrange(40))
        try:
            parse(bytes(tail))
        except FormatError:
            continue
