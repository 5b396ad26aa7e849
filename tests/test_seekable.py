"""The zstd seekable format's table."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.core.errors import FormatError, LimitError, UnsupportedError
from weenv.layer import seekable

SIZES = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=20)


def columns(rows: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([r[0] for r in rows], dtype=np.uint32), np.array([r[1] for r in rows], dtype=np.uint32)


@given(SIZES)
def test_round_trip(rows: list[tuple[int, int]]) -> None:
    table = seekable.build(*columns(rows))
    assert seekable.table_length(table[-9:]) == len(table)
    parsed = seekable.parse(table)
    assert list(zip(parsed.compressed_sizes.tolist(), parsed.content_sizes.tolist(), strict=True)) == rows


def test_bytes_are_as_the_specification_says() -> None:
    assert seekable.build(*columns([(7, 9)])) == struct.pack("<IIIIIBI", 0x184D2A5E, 17, 7, 9, 1, 0, 0x8F92EAB1)


def test_a_table_with_checksums_is_read() -> None:
    table = struct.pack("<IIIIIIIIIBI", 0x184D2A5E, 33, 7, 9, 0xAAAA, 8, 10, 0xBBBB, 2, 0x80, 0x8F92EAB1)
    parsed = seekable.parse(table)
    assert parsed.compressed_sizes.tolist() == [7, 8]
    assert parsed.content_sizes.tolist() == [9, 10]


@pytest.mark.parametrize(
    ("footer", "error"),
    [
        (struct.pack("<IBI", 1, 0, 0x8F92EAB0), FormatError),
        (struct.pack("<IBI", 1, 0x40, 0x8F92EAB1), UnsupportedError),
        (struct.pack("<IBI", 0xFFFFFFFF, 0, 0x8F92EAB1), LimitError),
        (b"", FormatError),
    ],
)
def test_bad_footers(footer: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        seekable.table_length(footer)


@given(SIZES, st.data())
def test_a_changed_table_is_refused_or_says_something_else(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    table = bytearray(seekable.build(*columns(rows)))
    at = data.draw(st.integers(0, len(table) * 8 - 1))
    table[at // 8] ^= 1 << at % 8
    try:
        parsed = seekable.parse(bytes(table))
    except FormatError:
        return
    changed = list(zip(parsed.compressed_sizes.tolist(), parsed.content_sizes.tolist(), strict=True)) != rows
    assert changed or at // 8 == len(table) - 5  # the descriptor's unused bits


@given(SIZES, st.integers(1, 12))
def test_a_truncated_table_is_refused(rows: list[tuple[int, int]], cut: int) -> None:
    table = seekable.build(*columns(rows))
    for part in (table[cut:], table[:-cut]):
        with pytest.raises(FormatError):
            seekable.parse(part)


def test_another_implementation_reads_it() -> None:
    pyzstd = pytest.importorskip("pyzstd", reason="pyzstd implements the seekable format, too")
    import io

    from weenv_testkit.layers import encode, sample_tar

    tar = sample_tar()
    blob, layer = encode(tar)
    with pyzstd.SeekableZstdFile(io.BytesIO(blob), "r") as file:
        assert file.seek(0, 2) == len(tar)
        for offset in range(0, len(tar), 40_000):
            file.seek(offset)
            assert file.read(1000) == tar[offset : offset + 1000]
        assert len(layer.toc.frames) + 1 == file.seek_table_info[0]
