"""The TOC as bytes."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from weenv.core.errors import FormatError, LimitError, UnsupportedError
from weenv.layer import codec, columns, tail, verify
from weenv.layer.decode import describe, verify_blob
from weenv.layer.limits import Limits
from weenv.layer.toc import Entries, Frames, SparseRows, Toc, XattrSets
from weenv.layer.tree import scan_tar
from weenv_testkit.layers import encode, make_tar, sample_tar, tars

GOLDEN = Path(__file__).parent / "golden"


def with_fixed_frames(tar: bytes) -> Toc:
    """A TOC whose frames do not depend on any zstd library."""
    scan = scan_tar(io.BytesIO(tar))
    sizes = [min(16_384, len(tar) - at) for at in range(0, len(tar), 16_384)]
    frames = Frames(
        np.array([size // 3 + 20 for size in sizes], dtype=np.uint32),
        np.array(sizes, dtype=np.uint32),
        np.frombuffer(b"".join(hashlib.sha256(b"%d" % i).digest() for i in range(len(sizes))), dtype=np.uint8).reshape(-1, 32),
    )
    c = scan.columns
    diff_id = "sha256:" + hashlib.sha256(tar).hexdigest()
    return Toc(diff_id, len(tar), 16_384, 3, frames, c.entries, c.xattrs, c.sparse, c.pool)


def rows(toc: Toc) -> dict[bytes, tuple[Any, ...]]:
    """What a TOC says, by path, independent of how the pool is laid out."""
    e = toc.entries
    result = {}
    for i in range(len(e)):
        values = [int(getattr(e, c)[i]) for c in ("parent", "kind", "flags", "mode", "uid", "gid", "mtime", "mtime_ns", "size")]
        aux = toc.target(i) if e.kind[i] == 2 else int(e.aux[i])
        result[toc.path(i)] = (i, aux, toc.xattr_items(i), toc.sparse_rows(i), *values)
    return result


@given(tars())
def test_round_trip(tar: bytes) -> None:
    toc = with_fixed_frames(tar)
    decoded = codec.decode_toc(codec.encode_toc(toc))
    assert rows(decoded) == rows(toc)
    assert (decoded.diff_id, decoded.stream_size, decoded.frame_target, decoded.level) == (toc.diff_id, len(tar), 16_384, 3)
    assert decoded.frames.digests.tobytes() == toc.frames.digests.tobytes()
    assert codec.encode_content(decoded) == codec.encode_content(toc)
    frames, size, diff_id = codec.decode_frames(codec.encode_toc(toc))
    assert (size, diff_id) == (len(tar), toc.diff_id)
    assert frames.content_sizes.tolist() == toc.frames.content_sizes.tolist()
    assert frames.compressed_sizes.tolist() == toc.frames.compressed_sizes.tolist()


def test_round_trip_of_everything() -> None:
    toc = with_fixed_frames(sample_tar())
    decoded = codec.decode_toc(codec.encode_toc(toc))
    assert rows(decoded) == rows(toc)
    for name in Entries.__slots__:
        assert getattr(decoded.entries, name).dtype == getattr(toc.entries, name).dtype, name
        assert not getattr(decoded.entries, name).dtype.isnative or len(getattr(decoded.entries, name)) == len(toc.entries)


def test_sparse_files_round_trip() -> None:
    # Two sparse files as GNU tar's PAX format 1.0 stores them would scan to these rows.
    toc = with_fixed_frames(make_tar([{"name": "a", "data": b"x" * 2048}, {"name": "b", "data": b"y" * 1536}]))
    e = toc.entries
    a, b = toc.lookup(b"a"), toc.lookup(b"b")
    flags, aux, size = e.flags.copy(), e.aux.copy(), e.size.copy()
    sparse = SparseRows(
        np.array([a, a, b], dtype=np.uint32),
        np.array([512, 1 << 30, 0], dtype=np.uint64),
        np.array([int(aux[a]), int(aux[a]) + 1024, int(aux[b])], dtype=np.uint64),
        np.array([1024, 1000, 1536], dtype=np.uint64),
    )
    flags[[a, b]], aux[[a, b]], size[[a, b]] = 8, [0, 2], [(1 << 30) + 1000, 1 << 20]
    entries = Entries(**{n: {"flags": flags, "aux": aux, "size": size}.get(n, getattr(e, n)) for n in Entries.__slots__})
    toc = Toc(toc.diff_id, toc.stream_size, toc.frame_target, toc.level, toc.frames, entries, toc.xattrs, sparse, toc.pool)
    decoded = codec.decode_toc(codec.encode_toc(toc))
    assert rows(decoded) == rows(toc)
    assert decoded.sparse_rows(int(a or 0)) == [
        (512, int(toc.sparse.stream[0]), 1024),
        (1 << 30, int(toc.sparse.stream[1]), 1000),
    ]


def test_equal_tocs_have_equal_bytes_whatever_their_pools() -> None:
    toc = with_fixed_frames(sample_tar())
    e, x = toc.entries, toc.xattrs
    moved = {"name_off": e.name_off + np.uint32(3), "aux": np.where(e.kind == 2, e.aux + np.uint64(3), e.aux)}
    entries = Entries(**{n: moved.get(n, getattr(e, n)) for n in Entries.__slots__})
    xattrs = XattrSets(x.first, x.name_off + np.uint32(3), x.name_len, x.value_off + np.uint32(3), x.value_len)
    other = Toc(toc.diff_id, toc.stream_size, 16_384, 3, toc.frames, entries, xattrs, toc.sparse, b"???" + toc.pool + b"?")
    assert codec.encode_content(other) == codec.encode_content(toc)


# -- golden files: blobs written once are read for ever, and equal TOCs stay equal bytes


def golden_blob() -> bytes:
    return (GOLDEN / "layer-v1.blob").read_bytes()


def test_golden_blob() -> None:
    blob = golden_blob()
    read_at: Callable[[int, int], bytes] = lambda offset, length: blob[offset : offset + length]  # noqa: E731
    digest = "sha256:7ec469a5b59058b89b99ab996d232d6e9db714f07e8c5c820c4b03058ad2fa31"
    verified = verify_blob(read_at, len(blob), descriptor=describe(read_at, len(blob), digest))
    toc = verified.toc
    assert toc.diff_id == "sha256:5ffd12a63d2803da33e83d77aa2d085a79946ce417b35872aab7d47fbd951aed"
    assert rows(toc)[b"bin/link"][4:] == (1, 0, 0, 0o644, 0, 0, 0, 0, 600)


def test_golden_content() -> None:
    tar = zstandard.ZstdDecompressor().stream_reader(golden_blob(), read_across_frames=True).read()
    head, tree = codec.encode_content(with_fixed_frames(tar))
    assert head + tree == zstandard.ZstdDecompressor().decompress((GOLDEN / "toc-v1.content.zst").read_bytes())


# -- hostile content


def repack(head: bytes, tree: bytes) -> bytes:
    compress = zstandard.ZstdCompressor().compress
    return codec.MAGIC + compress(head) + compress(tree)


def edited(change: Callable[[dict[str, Any]], None]) -> bytes:
    """A TOC payload whose header was changed, its length kept."""
    head, tree = codec.encode_content(with_fixed_frames(sample_tar()))
    length = int.from_bytes(head[:4], "little")
    header = json.loads(head[4 : 4 + length])
    change(header)
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    assert len(text) <= length + 60_000
    padded = text.ljust(length) if len(text) <= length else text.ljust(-(-(len(text) + 4) // 8) * 8 - 4)
    return repack(len(padded).to_bytes(4, "little") + padded + head[4 + length :], tree)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda h: h.update(version=2), UnsupportedError),
        (lambda h: h.update(version="1"), UnsupportedError),
        (lambda h: h.pop("level"), FormatError),
        (lambda h: h.update(extra=1), FormatError),
        (lambda h: h.update(diffId="sha256:xyz"), FormatError),
        (lambda h: h.update(streamSize=-1), FormatError),
        (lambda h: h.update(streamSize=1 << 62), LimitError),
        (lambda h: h.update(streamSize=True), FormatError),
        (lambda h: h.update(streamSize=1), FormatError),
        (lambda h: h.update(level=[]), FormatError),
        (lambda h: h.update(counts=[]), FormatError),
        (lambda h: h["counts"].pop("pool"), FormatError),
        (lambda h: h["counts"].update(entries=1 << 40), LimitError),
        (lambda h: h["counts"].update(entries=h["counts"]["entries"] + 1), FormatError),
        (lambda h: h["counts"].update(frames=1 << 31), LimitError),
        (lambda h: h["counts"].update(frames=0), FormatError),
        (lambda h: h["counts"].update(pool=(1 << 31) + 1), LimitError),
        (lambda h: h.update(treeOffset=8), FormatError),
        (lambda h: h.update(columns=[]), FormatError),
        (lambda h: h["columns"].pop(), FormatError),
        (lambda h: h["columns"][3].__setitem__(0, "parents"), FormatError),
        (lambda h: h["columns"][3].__setitem__(1, ">u4"), FormatError),
        (lambda h: h["columns"][3].__setitem__(2, "pickle"), FormatError),
        (lambda h: h["columns"][3].__setitem__(3, 0), FormatError),
        (lambda h: h["columns"][3].__setitem__(4, 1 << 40), FormatError),
        (lambda h: h["columns"].__setitem__(3, None), FormatError),
    ],
)
def test_changed_headers_are_refused(change: Callable[[dict[str, Any]], None], error: type[Exception]) -> None:
    with pytest.raises(error):
        codec.decode_toc(edited(change))


def test_the_unchanged_header_is_accepted() -> None:
    codec.decode_toc(edited(lambda h: None))


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\x05\0\0\0",
        b"\xff\xff\xff\xff{}",
        b"\x04\0\0\0[1 ]",
        b"\x04\0\0\0nope",
        b"\x0c\0\0\0" + b"[" * 12,
        b"\x04\0\0\0\xff\xff\xff\xff",
    ],
)
def test_bad_headers(head: bytes) -> None:
    with pytest.raises(FormatError):
        codec.decode_toc(repack(head, b""))


def test_deep_json_is_refused() -> None:
    text = (b"[" * 200_000).ljust(200_004)
    with pytest.raises(FormatError):
        codec.decode_toc(repack(len(text).to_bytes(4, "little") + text, b""))


def test_a_bomb_in_the_tree_is_refused_before_it_is_unpacked() -> None:
    head, _ = codec.encode_content(with_fixed_frames(sample_tar()))
    with pytest.raises(FormatError, match="holds 104857600 bytes, expected"):
        codec.decode_toc(repack(head, bytes(100 << 20)))
    with pytest.raises(LimitError):
        codec.decode_toc(repack(bytes(100 << 20), b""), Limits(max_frames=1000))


def test_limits_are_the_readers() -> None:
    payload = codec.encode_toc(with_fixed_frames(sample_tar()))
    for limits in (
        Limits(max_entries=20), Limits(max_frames=3), Limits(max_toc_compressed=100), Limits(max_toc_content=1000),
        Limits(max_toc_header=100), Limits(max_stream=1000), Limits(max_frame_content=1000), Limits(max_path=10),
        Limits(max_symlink=5), Limits(max_depth=2), Limits(max_xattr_value=5), Limits(max_xattrs_per_entry=1),
    ):  # fmt: skip
        with pytest.raises(FormatError):
            codec.decode_toc(payload, limits)


@settings(max_examples=400)
@given(st.data())
def test_any_change_of_the_content_is_refused_or_gives_a_sound_toc(data: st.DataObject) -> None:
    head, tree = CONTENT
    part = bytearray(data.draw(st.sampled_from([head, tree])))
    for _ in range(data.draw(st.integers(1, 3))):
        part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    payload = repack(bytes(part), tree) if len(part) == len(head) else repack(head, bytes(part))
    try:
        toc = codec.decode_toc(payload)
    except FormatError:
        return
    rows(toc)  # every path, target and xattr can be had
    codec.decode_toc(codec.encode_toc(toc))


CONTENT = codec.encode_content(with_fixed_frames(sample_tar()))


@given(st.binary(max_size=100))
def test_garbage_is_refused(data: bytes) -> None:
    for payload in (data, codec.MAGIC + data):
        with pytest.raises(FormatError):
            codec.decode_toc(payload)
        with pytest.raises(FormatError):
            codec.decode_frames(payload)


# -- columns


@given(st.sampled_from(["<u4", "<u8", "<i8", "<u2", "|u1"]), st.sampled_from(["raw", "planes", "delta-planes"]), st.data())
def test_codings_are_undone(dtype: str, coding: str, data: st.DataObject) -> None:
    info = np.iinfo(dtype)
    values = np.array(data.draw(st.lists(st.integers(int(info.min), int(info.max)), max_size=20)), dtype=dtype)
    column = columns.Column("c", dtype, coding, "n")
    stored = columns.encode(column, values, coding)
    assert len(stored) == columns.stored_length(column, coding, len(values))
    back = columns.decode(column, b"pad" + stored, 3, coding, len(values))
    assert back.dtype == np.dtype(dtype)
    assert back.tolist() == values.tolist()


@given(st.binary(min_size=1, max_size=50), st.data())
def test_gather(pool: bytes, data: st.DataObject) -> None:
    ranges = data.draw(
        st.lists(st.integers(0, len(pool)).flatmap(lambda o: st.tuples(st.just(o), st.integers(0, len(pool) - o))))
    )
    offsets, lengths = np.array([r[0] for r in ranges], dtype=np.uint32), np.array([r[1] for r in ranges], dtype=np.uint16)
    got = columns.gather(np.frombuffer(pool, dtype=np.uint8), offsets, lengths).tobytes()
    assert got == b"".join(pool[o : o + n] for o, n in ranges)


def test_the_blob_says_what_the_encoder_returned() -> None:
    blob, layer = encode(sample_tar())
    toc = verify.verify_tail(blob[layer.toc_offset :], layer.descriptor())
    assert rows(toc) == rows(layer.toc)
    assert tail.build_tail(toc) == blob[layer.toc_offset :]
