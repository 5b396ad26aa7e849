"""The table of pieces: stored and read back, checked, and refused in a tail that nobody vouches for."""

from __future__ import annotations

import gzip
import hashlib
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard

from weenv.core.errors import FormatError, LimitError, VerificationError
from weenv.layer import pieces
from weenv.layer.check import check_frames
from weenv.layer.limits import Limits
from weenv.layer.pieces import MAX_GAP, Pieces
from weenv.layer.tail import build_tail, content_size, decode_frames, parse_tail
from weenv.layer.toc import Frames, Toc
from weenv.layer.zframe import SKIPPABLE_HEADER
from weenv_testkit import corpus, rawcorpus
from weenv_testkit.foreign import estargz, zstd_chunked

FILES = {
    b"a": b"a" * 3000, b"b": corpus.noise(700_000), b"c": b"c" * 9000, b"d": b"d",
    b"e": b"e" * 5000 + bytes(3000) + b"e" + bytes(70_000) + b"e" * 2000 + bytes(1500),
}  # fmt: skip
STREAM = b"".join(rawcorpus.file(name, data) for name, data in FILES.items()) + rawcorpus.END


def made() -> tuple[Toc, bytes, int]:
    """TOC, tail and where the tail would begin."""
    toc = estargz(STREAM, chunk=40_000, share=70_000).toc()
    return toc, build_tail(toc), int(toc.frames.compressed_offsets[-1])


def table(frames: Frames) -> Pieces:
    assert frames.pieces is not None
    return frames.pieces


def test_a_tail_brings_its_pieces_back() -> None:
    toc, tail, end = made()
    for found in (
        parse_tail(tail, layer_size=end + len(tail), toc_offset=end, foreign=True).frames,
        decode_frames(tail, layer_size=end + len(tail), toc_offset=end, foreign=True).frames,
    ):
        before, after = table(toc.frames), table(found)
        assert before.codec == after.codec
        for name in ("first", "unit", "skip", "size", "place", "digests"):
            assert np.array_equal(getattr(before, name), getattr(after, name)), name
    assert content_size(tail) > content_size(build_tail(replace(toc, frames=replace(toc.frames, pieces=None))))


def test_a_blob_does_not_decide_how_it_is_verified() -> None:
    """A tail of our own format that brings a table, and one of another format that brings none, are refused."""
    _, tail, end = made()
    for call in (parse_tail, decode_frames):
        with pytest.raises(FormatError, match="does not begin with a TOC frame"):
            call(tail, layer_size=end + len(tail), toc_offset=end)
    own = tail[SKIPPABLE_HEADER + int.from_bytes(tail[4:8], "little") :]
    with pytest.raises(FormatError, match="no table of pieces"):
        parse_tail(own, layer_size=end + len(own), toc_offset=end, foreign=True)


def changed(toc: Toc, **values: Any) -> Frames:
    return replace(toc.frames, pieces=replace(table(toc.frames), **values))


def test_tables_that_make_no_sense() -> None:
    toc, _, _ = made()
    good = table(toc.frames)
    check_frames(toc.frames, toc.stream_size)
    assert len(good) > len(toc.frames) > 1
    huge = np.full_like(good.size, 1 << 31)
    cases: dict[str, tuple[dict[str, Any], type[FormatError]]] = {
        "unknown codec": ({"codec": 3}, FormatError),
        "differ in length": ({"skip": good.skip[:-1]}, FormatError),
        "no pieces": ({"first": good.first[:-1]}, FormatError),
        "a frame has no pieces": ({"first": np.zeros_like(good.first)}, FormatError),
        "piece is empty": ({"size": np.zeros_like(good.size)}, FormatError),
        "units are not in order": ({"unit": good.unit[::-1].copy()}, FormatError),
        "overlap in their unit": ({"skip": np.zeros_like(good.skip)}, FormatError),
        "overlap in their frame": ({"place": np.zeros_like(good.place)}, FormatError),
        "beyond its frame": ({"place": good.place + np.uint32(toc.stream_size)}, FormatError),
        "too far into": ({"skip": good.skip + np.uint32(3 << 30)}, LimitError),
        "a unit lies beyond": ({"unit": good.unit + toc.frames.compressed_sizes.max()}, FormatError),
    }
    for text, (values, error) in cases.items():
        with pytest.raises(error, match=text):
            check_frames(changed(toc, **values), toc.stream_size)
    with pytest.raises(FormatError):
        check_frames(changed(toc, size=huge), toc.stream_size)
    with pytest.raises(LimitError, match="range is too long"):
        sizes = np.full_like(toc.frames.compressed_sizes, (64 << 20) + MAX_GAP + 1)
        check_frames(replace(toc.frames, compressed_sizes=sizes), toc.stream_size)
    with pytest.raises(LimitError, match="pieces"):
        check_frames(toc.frames, toc.stream_size, Limits(max_frames=len(toc.frames)))


def test_stored_tables_that_are_damaged() -> None:
    """Whatever the bytes, an error of ours or a table that the check has the last word on."""
    toc, _, _ = made()
    payload = pieces.encode(table(toc.frames))[SKIPPABLE_HEADER:]
    content = zstandard.ZstdDecompressor().decompress(payload[8:])
    rng = random.Random(3)
    accepted = 0
    for _ in range(400):
        damaged = bytearray(content[: rng.choice((len(content), rng.randrange(len(content))))])
        for _ in range(rng.randrange(3)):
            if damaged:
                damaged[rng.randrange(min(len(damaged), 64))] ^= 1 << rng.randrange(8)
        try:
            found = pieces.decode(payload[:8] + zstandard.ZstdCompressor().compress(bytes(damaged)))
            check_frames(replace(toc.frames, pieces=found), toc.stream_size)
            accepted += 1
        except FormatError:
            continue
    assert 0 < accepted < 250
    def packed(head: tuple[int, int, int, int], rest: bytes) -> bytes:
        return payload[:8] + zstandard.ZstdCompressor().compress(pieces._HEAD.pack(*head) + rest)

    head, rest = pieces._HEAD.unpack_from(content), content[pieces._HEAD.size :]
    assert len(pieces.decode(packed(head, rest))) == head[3]
    for data, text in (
        (payload[:8] + zstandard.ZstdCompressor().compress(content[: pieces._HEAD.size - 1]), "truncated"),
        (packed((head[0] + 1, *head[1:]), rest), "unknown version"),
        (packed(head, rest[:-1]), "does not follow from its counts"),
        (packed(head, (2).to_bytes(4, "little") * head[2] + rest[4 * head[2] :]), "counts do not add up"),
    ):
        with pytest.raises(FormatError, match=text):
            pieces.decode(data)
    for wrong in (b"", b"weenvFGN", b"weenvTOC" + payload[8:], payload[:-3]):
        with pytest.raises(FormatError):
            pieces.decode(wrong)
    with pytest.raises(LimitError):
        pieces.decode(payload, Limits(max_frames=2))


@pytest.mark.parametrize("blob", [estargz(STREAM, chunk=40_000, share=70_000), zstd_chunked(STREAM)], ids=["gzip", "zstd"])
def test_content_from_a_disk_is_checked_again(blob: Any) -> None:
    toc = blob.toc()
    frames, stream, bounds = toc.frames, blob.content(toc), toc.frames.content_offsets.tolist()
    for number in range(len(frames)):
        content = stream[bounds[number] : bounds[number + 1]]
        pieces.verify_content(frames, table(frames), number, content)
        at = int(table(frames).place[int(table(frames).first[number])])
        with pytest.raises(VerificationError):
            pieces.verify_content(frames, table(frames), number, content[:at] + b"!" + content[at + 1 :])
        with pytest.raises(VerificationError, match="bytes, expected"):
            pieces.verify_content(frames, table(frames), number, content[:-1])


def test_every_byte_on_a_disk_is_a_pieces_or_zero() -> None:
    """A file's short runs of zeros and what is between files have no digest, and are read from the disk all the same."""
    blob = zstd_chunked(STREAM)
    toc = blob.toc()
    frames, stream, bounds = toc.frames, blob.content(toc), toc.frames.content_offsets.tolist()
    found = table(frames)
    gaps = 0
    for number in range(len(frames)):
        content = stream[bounds[number] : bounds[number + 1]]
        covered = np.zeros(len(content), bool)
        for piece in range(int(found.first[number]), int(found.first[number + 1])):
            covered[int(found.place[piece]) : int(found.place[piece]) + int(found.size[piece])] = True
        edges = np.flatnonzero(np.diff(covered, prepend=True, append=True))
        for begin, end in edges.reshape(-1, 2).tolist():
            assert content[begin:end] == bytes(end - begin)
            gaps += 1
            for at in {begin, (begin + end) // 2, end - 1}:
                with pytest.raises(VerificationError, match="not zero where there is nothing"):
                    pieces.verify_content(frames, found, number, content[:at] + b"!" + content[at + 1 :])
    assert gaps > 8


def test_a_frame_of_endless_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take memory for as long as the frame is put together, not only in the table."""
    toc, _, _ = made()
    most = int(np.diff(table(toc.frames).first.astype(np.int64)).max())
    monkeypatch.setattr(pieces, "MAX_PIECES", most)
    check_frames(toc.frames, toc.stream_size)
    monkeypatch.setattr(pieces, "MAX_PIECES", most - 1)
    with pytest.raises(LimitError, match="pieces in a frame"):
        check_frames(toc.frames, toc.stream_size)


def test_units_that_hold_too_little_or_nothing_that_can_be_read() -> None:
    digest = np.frombuffer(hashlib.sha256(bytes(100)).digest(), np.uint8).reshape(1, 32)
    one = np.array([0], np.uint32)
    shown = {pieces.GZIP: gzip.compress(b"short"), pieces.ZSTD: zstandard.compress(b"short")}
    for codec, short in shown.items():
        for unit, text in (
            (b"x" * 40, "cannot be decompressed|not a zstd frame"), (b"", "has 0 bytes, expected 1"),
            (short, "a unit holds 5 bytes, at least 100"), (b"\x1f\x8b\x08\x00", "a unit holds 0 bytes|not a zstd frame"),
            # A skippable frame before it: libzstd would pass over it.
            (b"\x50\x2a\x4d\x18" + bytes(4) + zstandard.compress(bytes(100)), "cannot be decompressed|not a zstd frame"),
        ):
            frames = Frames(
                np.array([max(1, len(unit))], np.uint32), np.array([100], np.uint32), np.zeros((1, 32), np.uint8),
                Pieces(codec, np.array([0, 1], np.uint32), one, one, np.array([100], np.uint32), one, digest),
            )  # fmt: skip
            with pytest.raises(FormatError, match=text):
                pieces.verify_frame(frames, table(frames), 0, unit)
