"""Tar streams out of gzip, zstd and plain files: what comes out, what is refused, how much memory it takes."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import threading
import tracemalloc
import zlib

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from weenv.converter import decompress
from weenv.converter.decompress import ReadAhead, TarStream, detect
from weenv.core.errors import FormatError, UnsupportedError
from weenv.registry.threads import Cancelled

CONTENT = (b"some text that repeats itself %d\n" * 5000)[:150_000] + random.Random(1).randbytes(50_000)
SKIPPABLE = b"\x50\x2a\x4d\x18\x05\0\0\0hello"


def read_all(data: bytes, size: int = 1 << 20) -> bytes:
    stream = TarStream(io.BytesIO(data))
    out = b"".join(iter(lambda: stream.read(size), b""))
    assert stream.read(size) == b""
    assert stream.consumed == len(data)
    return out


def zstd_pieces(step: int) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1)
    return b"".join(compressor.compress(CONTENT[n : n + step]) for n in range(0, len(CONTENT), step))


@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
@pytest.mark.parametrize(
    "data",
    [
        CONTENT, gzip.compress(CONTENT), zstandard.compress(CONTENT), b"",
        b"".join(gzip.compress(CONTENT[n : n + 1000], 1) for n in range(0, len(CONTENT), 1000)),  # eStargz, pigz -i
        zstd_pieces(777), SKIPPABLE + zstd_pieces(50_000) + SKIPPABLE, gzip.compress(b"") + gzip.compress(CONTENT),
        zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(CONTENT),
    ],
)  # fmt: skip
def test_content(data: bytes, size: int) -> None:
    if size == 1:
        data = data if len(data) < 1000 else data[:0]
    assert read_all(data, size) in (CONTENT, b"")
    assert read_all(data, size) == b"" or read_all(data, size) == CONTENT


@given(st.binary(max_size=3000), st.integers(1, 400), st.integers(1, 5000))
def test_any_pieces(content: bytes, step: int, size: int) -> None:
    pieces = [content[n : n + step] for n in range(0, len(content), step)]
    assert read_all(b"".join(gzip.compress(piece) for piece in pieces), size) == content
    assert read_all(b"".join(zstandard.compress(piece) for piece in pieces), size) == content


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


GZ, ZST = gzip.compress(CONTENT, mtime=0), zstandard.ZstdCompressor(write_checksum=True).compress(CONTENT)


@pytest.mark.parametrize(
    "data",
    [
        GZ[:-1], GZ[:20], GZ[:3], GZ + b"x", GZ + bytes(512), flip(GZ, len(GZ) - 2), flip(GZ, len(GZ) - 6), flip(GZ, 1000),
        ZST[:-1], ZST[:20], ZST[:5], ZST + b"x", ZST + bytes(512), flip(ZST, len(ZST) - 1), flip(ZST, 4),
        ZST + SKIPPABLE[:-1], GZ + ZST, ZST + GZ,
    ],
)  # fmt: skip
def test_broken(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"truncated|broken"):
        read_all(data)


@given(st.binary(min_size=1, max_size=50), st.integers(0, len(GZ) - 1), st.booleans())
def test_damage_is_an_error_or_the_content(noise: bytes, at: int, zstd: bool) -> None:
    data = ZST if zstd else GZ
    at %= len(data)
    try:
        out = read_all(data[:at] + noise + data[at + len(noise) :])
    except FormatError:
        return
    # gzip's header has fields that nothing checks; all else is covered by a checksum.
    assert out == CONTENT or at < 10 or detect((data[:at] + noise)[:6]) == "none"


def test_other_compressions_are_named() -> None:
    for data, name in ((lzma.compress(CONTENT), "xz"), (bz2.compress(CONTENT), "bzip2")):
        with pytest.raises(UnsupportedError, match=name):
            TarStream(io.BytesIO(data))


@pytest.mark.parametrize("kind", ["zstd", "gzip"])
def test_bombs_take_bounded_memory(kind: str) -> None:
    """256 MB of zeros in 8 KB (zstd) and 1 MB (gzip)."""
    size = 1 << 28
    if kind == "zstd":
        compressor = zstandard.ZstdCompressor().compressobj(size=size)
        zeros = bytes(1 << 24)
        data = b"".join([*(compressor.compress(zeros) for _ in range(16)), compressor.flush()])
    else:
        deflate = zlib.compressobj(1, wbits=31)
        zeros = bytes(1 << 24)
        data = b"".join([*(deflate.compress(zeros) for _ in range(16)), deflate.flush()])
    stream = TarStream(io.BytesIO(data))
    tracemalloc.start()
    try:
        total = 0
        while block := stream.read(1 << 20):
            assert len(block) <= 1 << 20
            total += len(block)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == size
    assert peak < 150 << 20


def test_reading_ahead() -> None:
    source = io.BytesIO(CONTENT)
    with ReadAhead(source.read, threading.Event(), block=1000) as ahead:
        assert b"".join(iter(lambda: ahead.read(5), b"")) == CONTENT
        assert ahead.read(5) == b""


def test_reading_ahead_hands_on_errors_and_stops() -> None:
    before = threading.active_count()

    def broken(size: int) -> bytes:
        raise FormatError("broken")

    with ReadAhead(broken, threading.Event()) as ahead:
        for _ in range(2):
            with pytest.raises(FormatError):
                ahead.read(1)
    cancel = threading.Event()
    with ReadAhead(lambda size: b"x" * size, cancel) as ahead:
        assert ahead.read(1)
        cancel.set()
        with pytest.raises(Cancelled):
            ahead.read(1)
    with ReadAhead(lambda size: b"x" * size, threading.Event()):
        pass  # left at once, with the thread waiting for room
    assert threading.active_count() == before


def test_the_faster_engine_is_in_use() -> None:
    isal = pytest.importorskip("isal.isal_zlib")
    assert decompress._gzip_engine is isal
