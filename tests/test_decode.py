"""Reading blobs at random, and checking whole ones."""

from __future__ import annotations

import dataclasses
import io
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weenv.core.digest import sha256
from weenv.core.errors import FormatError, VerificationError
from weenv.layer.decode import LayerReader, ReadAt, describe, file_reader, find_tail, open_blob, verify_blob
from weenv.layer.tail import build_tail
from weenv.layer.toc import Entries, Toc
from weenv_testkit.layers import encode, sample_tar, tars

TAR = sample_tar()
BLOB, LAYER = encode(TAR)


def reader(blob: bytes) -> ReadAt:
    return lambda offset, length: blob[offset : offset + length]


@settings(deadline=None)
@given(st.integers(0, len(TAR) + 10), st.integers(0, 100_000))
def test_reads_are_slices(offset: int, length: int) -> None:
    assert READER.read(offset, length) == TAR[offset : offset + length]


READER = LayerReader(reader(BLOB), LAYER.toc.frames)


@settings(deadline=None)
@given(tars(), st.sampled_from([512, 4096, 1 << 20]))
def test_whole_streams(tar: bytes, target: int) -> None:
    blob, layer = encode(tar, target=target)
    toc, stream = open_blob(reader(blob), layer.descriptor())
    assert b"".join(stream.stream()) == tar
    assert stream.size == len(tar)
    for entry in np.flatnonzero(toc.entries.kind == 0):
        if toc.entries.size[entry]:
            assert len(stream.read(int(toc.entries.aux[entry]), int(toc.entries.size[entry]))) == int(toc.entries.size[entry])
    assert verify_blob(reader(blob), len(blob), descriptor=layer.descriptor()).toc.diff_id == layer.diff_id


def test_few_frames_are_kept() -> None:
    asked: list[int] = []

    def counting(offset: int, length: int) -> bytes:
        asked.append(offset)
        return BLOB[offset : offset + length]

    stream = LayerReader(counting, LAYER.toc.frames, keep=2)
    for offset in (0, 10, 20_000, 5):
        stream.read(offset, 10)
    assert len(asked) == 2
    for _ in stream.stream():
        assert len(stream._recent) <= 2


def test_file_reader() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(BLOB)
        file.flush()
        read_at = file_reader(file)
        assert find_tail(read_at, len(BLOB)) == (LAYER.toc_offset, BLOB[LAYER.toc_offset :])
        assert describe(read_at, len(BLOB), LAYER.blob_digest) == LAYER.descriptor()
        assert read_at(len(BLOB) - 3, 10) == BLOB[-3:]


def test_tails_longer_than_the_first_read_are_found() -> None:
    blob, layer = encode(bytes(512) * 2 + TAR + bytes(20_000_000), target=512)
    assert len(layer.toc.frames) * 8 > 65_536
    assert find_tail(reader(blob), len(blob))[0] == layer.toc_offset


# -- whole blobs


def test_a_sound_blob() -> None:
    calls: list[tuple[int, int | None]] = []
    verified = verify_blob(reader(BLOB), len(BLOB), descriptor=LAYER.descriptor(), progress=lambda *c: calls.append(c))
    assert verified.descriptor == LAYER.descriptor()
    assert calls[-1] == (len(BLOB), len(BLOB))
    assert verify_blob(reader(BLOB), len(BLOB), threads=1).descriptor == LAYER.descriptor()


def test_every_link_of_the_chain_matters() -> None:
    sound = LAYER.descriptor()
    for change in (
        {"digest": sha256(b"")},
        {"size": len(BLOB) + 1},
        {"toc_digest": sha256(b"")},
        {"toc_offset": sound.toc_offset + 1, "toc_length": sound.toc_length - 1},
    ):
        with pytest.raises(FormatError):
            verify_blob(reader(BLOB), len(BLOB), descriptor=dataclasses.replace(sound, **change))


@settings(deadline=None)
@given(st.integers(0, len(BLOB) * 8 - 1), st.booleans())
def test_any_flipped_bit_is_found(bit: int, described: bool) -> None:
    blob = bytearray(BLOB)
    blob[bit // 8] ^= 1 << bit % 8
    try:
        verified = verify_blob(reader(bytes(blob)), len(blob), descriptor=LAYER.descriptor() if described else None)
    except FormatError:
        return
    # Without a descriptor nothing vouches for the tail: how it is written may change, but not what it says.
    assert not described
    assert verified.toc.diff_id == LAYER.diff_id
    assert bit >= LAYER.toc_offset * 8


def test_truncated_blobs_are_found() -> None:
    for size in (0, 5, 100, LAYER.toc_offset, len(BLOB) - 1):
        with pytest.raises(FormatError):
            verify_blob(reader(BLOB[:size]), size)
        with pytest.raises(FormatError):
            verify_blob(reader(BLOB[:size]), len(BLOB))


def resigned(toc: Toc) -> bytes:
    return BLOB[: LAYER.toc_offset] + build_tail(toc)


@pytest.mark.parametrize(("column", "value"), [("mode", 0o4755), ("uid", 5), ("mtime", 9), ("size", 10), ("flags", 0)])
def test_a_toc_that_does_not_say_what_the_tar_says_is_found(column: str, value: int) -> None:
    toc = LAYER.toc
    entry = toc.lookup(b"opt" if column == "flags" else b"etc/passwd")
    changed = getattr(toc.entries, column).copy()
    changed[entry] = value
    entries = Entries(**{n: changed if n == column else getattr(toc.entries, n) for n in Entries.__slots__})
    blob = resigned(dataclasses.replace(toc, entries=entries))
    with pytest.raises(VerificationError, match=r"TOC entry /(opt|etc/passwd): it is not what the tar stream says"):
        verify_blob(reader(blob), len(blob))


def test_a_wrong_diff_id_is_found() -> None:
    blob = resigned(dataclasses.replace(LAYER.toc, diff_id=sha256(b"")))
    with pytest.raises(VerificationError, match="the tar stream has digest"):
        verify_blob(reader(blob), len(blob))


def test_a_plain_zstd_file_is_refused_with_advice() -> None:
    import zstandard

    blob = zstandard.ZstdCompressor().compress(TAR)
    with pytest.raises(FormatError, match=r"^not in the lazy format \(no seek table at its end\)$"):
        verify_blob(reader(blob), len(blob))
    assert io.BytesIO(blob).read(4) == b"\x28\xb5\x2f\xfd"
