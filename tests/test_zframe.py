"""Single zstd frames, bounded."""

from __future__ import annotations

import contextlib
import random
import subprocess

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from weenv.core.errors import FormatError, UnsupportedError
from weenv.layer import zframe

NOISE = random.Random(3).randbytes(400_000)


@pytest.mark.parametrize("level", [1, 3, 12, 19])
@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize(
    "data", [b"", b"a", bytes(500_000), NOISE, NOISE[:1000] * 300], ids=["empty", "one", "zeros", "noise", "mixed"]
)
def test_length_is_where_the_next_frame_begins(level: int, checksum: bool, data: bytes) -> None:
    frame = zstandard.ZstdCompressor(level=level, write_checksum=checksum).compress(data)
    assert zframe.length(frame + frame) == len(frame)
    assert zframe.decompress(frame, len(data)) == data
    for cut in range(0, len(frame), max(1, len(frame) // 50)):
        with pytest.raises(FormatError):
            zframe.length(frame[:cut])


def test_frames_of_the_zstd_tool_are_read() -> None:
    frame = subprocess.run(
        ["zstd", "-q", "-c", "--no-check", "--stream-size=400000"], input=NOISE, capture_output=True, check=True
    ).stdout
    assert zframe.decompress(frame, len(NOISE)) == NOISE
    assert zframe.length(frame) == len(frame)


def test_a_frame_without_content_size_is_refused() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(NOISE)
    with pytest.raises(FormatError, match="does not state its content size"):
        zframe.decompress(frame, len(NOISE))


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    assert len(bomb) < 10_000
    with pytest.raises(FormatError, match="holds 67108864 bytes, expected 4096"):
        zframe.decompress(bomb, 4096)


def test_a_header_that_understates_the_content_is_refused() -> None:
    frame = bytearray(zstandard.ZstdCompressor().compress(NOISE[:60_000]))
    assert int.from_bytes(frame[5:7], "little") + 256 == 60_000  # RFC 8878: a two-byte content size is stored less 256
    frame[5:7] = (50_000 - 256).to_bytes(2, "little")
    with pytest.raises(FormatError):
        zframe.decompress(bytes(frame), 50_000)
    frame[5:7] = (65_000 - 256).to_bytes(2, "little")
    with pytest.raises(FormatError):
        zframe.decompress(bytes(frame), 65_000)


def test_more_than_one_frame_is_refused() -> None:
    frame = zstandard.ZstdCompressor().compress(b"once")
    for extra in (frame, b"x", zframe.skippable(0x184D2A50, b"")):
        with pytest.raises(FormatError):
            zframe.decompress(frame + extra, 4)


def test_a_dictionary_is_refused() -> None:
    samples = [b"sample %d of many %d" % (i, i * i) for i in range(2000)]
    dictionary = zstandard.train_dictionary(4096, samples)
    frame = zstandard.ZstdCompressor(dict_data=dictionary).compress(samples[0])
    with pytest.raises(UnsupportedError, match="dictionary"):
        zframe.decompress(frame, len(samples[0]))


def test_a_huge_window_is_refused() -> None:
    # RFC 8878, 3.1.1.1.2: Window_Descriptor 0xFF asks for 2^41 bytes and more; content size 4096 in 2 bytes.
    frame = zframe.MAGIC + bytes([0x40, 0xFF]) + (4096 - 256).to_bytes(2, "little") + b"\x01\x00\x00"
    with pytest.raises(FormatError):
        zframe.decompress(frame, 4096)


@given(st.binary(max_size=60))
def test_no_input_does_more_than_raise(data: bytes) -> None:
    for attempt in (data, zframe.MAGIC + data):
        for call in (lambda d: zframe.decompress(d, 100), zframe.length):
            with contextlib.suppress(FormatError):
                call(attempt)


def test_skippable_frames() -> None:
    frame = zframe.skippable(0x184D2A57, b"payload")
    assert frame == b"\x57\x2a\x4d\x18\x07\x00\x00\x00payload"
    assert zframe.skippable_header(frame, "x") == (0x184D2A57, 7)
    assert subprocess.run(["zstd", "-dcq"], input=frame, capture_output=True, check=True).stdout == b""
    for bad in (frame[:7], zframe.MAGIC + bytes(8)):
        with pytest.raises(FormatError):
            zframe.skippable_header(bad, "x")
