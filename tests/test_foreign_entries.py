"""eStargz and zstd:chunked TOCs: the same tree and the same bytes as the tar; what is malformed is refused."""

from __future__ import annotations

import hashlib
import io
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weenv.core.errors import FormatError, LimitError, UnsupportedError, VerificationError
from weenv.layer import erofs
from weenv.layer.foreign.stream import TARGET, Chunk, StreamLayout
from weenv.layer.limits import Limits
from weenv.layer.pieces import MAX_GAP, UNKNOWN_DIFF_ID, ZSTD
from weenv.layer.toc import FLAG_SPARSE, NO_DATA
from weenv.layer.tree import scan_tar
from weenv_testkit import rawcorpus
from weenv_testkit.foreign import Blob, estargz, zstd_chunked
from weenv_testkit.toctree import toc_of, toc_tree
from weenv_testkit.trees import differences

MAKERS = {"estargz": estargz, "zstd:chunked": zstd_chunked}


def odd(**more: Any) -> bytes:
    """A tar with files of many sizes, holes, links, devices, whiteouts and attributes."""
    rng = random.Random(7)
    big = rng.randbytes(300_000)
    parts = [
        rawcorpus.directory(b"d", 0o2711, uid=3, gid=4),
        rawcorpus.file(b"d/small", b"small\n"),
        rawcorpus.file(b"d/empty"),
        rawcorpus.file(b"d/big", big),
        rawcorpus.file(b"d/holes", bytes(200_000) + b"x" * 700 + bytes(5_000) + b"y" + bytes(300_000)),
        rawcorpus.file(b"d/zeros", bytes(100_000)),
        rawcorpus.file(b"d/ends", b"z" * 513 + bytes(3000)),
        rawcorpus.file(b"d/after", b"after\n"),
        rawcorpus.symlink(b"d/link", b"small"),
        rawcorpus.file(b".wh.gone"),
        rawcorpus.file(b"o/.wh..wh..opq"),
        rawcorpus.file(b"d/small", b"again\n"),
    ]
    return b"".join(parts) + rawcorpus.END


def same(stream: bytes, blob: Blob, *, seconds: bool = False) -> None:
    """The blob's tree is the tar's, down to every byte; an EROFS image can be made of it."""
    scan = scan_tar(io.BytesIO(stream))
    tree, free = toc_tree(toc_of(scan.columns, scan.stream_size), stream)
    toc = blob.toc()
    erofs.build(toc)
    found, _ = toc_tree(toc, blob.content(toc))
    assert differences(tree, found, times_free=free, ignore=("mtime_ns",) if seconds else ()) == []


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("chunk", [1 << 20, 65_536, 5_000, 777])
def test_the_tree_is_that_of_the_tar(make: Callable[..., Blob], chunk: int) -> None:
    same(odd(), make(odd(), chunk=chunk))


def test_units_that_hold_several_chunks() -> None:
    """eStargz with a least size of chunks: pieces by their offset within what a gzip member holds."""
    for share in (10_000, 200_000):
        blob = estargz(odd(), chunk=50_000, share=share)
        assert any("innerOffset" in entry for entry in blob.entries)
        same(odd(), blob)


def representable() -> dict[str, bytes]:
    """The kit's oddities, but for those that no JSON holds or that these formats have no entry for."""
    left_out = ("not UTF-8", "global headers", "sparse", "trailing data", "half an end", "no end", "empty stream")
    return {kind: stream for kind, stream in rawcorpus.sound().items() if not any(word in kind for word in left_out)}


@pytest.mark.parametrize("kind", representable())
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_every_oddity_of_layers(make: Callable[..., Blob], kind: str) -> None:
    same(representable()[kind], make(representable()[kind]))


def file_entry(entries: list[Any], name: str = "d/big") -> dict[str, Any]:
    found: dict[str, Any] = next(entry for entry in entries if entry["name"] == name)
    return found


def put(**values: Any) -> Callable[[list[Any]], object]:
    """Set values of the entry of d/big; None removes one."""

    def edit(entries: list[Any]) -> None:
        entry = file_entry(entries)
        entry |= values
        for key in [key for key, value in values.items() if value is None]:
            del entry[key]

    return edit


def append(**entry: Any) -> Callable[[list[Any]], object]:
    return lambda entries: entries.append(entry)


HOSTILE: dict[str, tuple[Callable[[list[Any]], object], type[FormatError], str]] = {
    "not an object": (lambda entries: entries.append([1]), FormatError, "not an object"),
    "name is a number": (append(type="reg", name=7), FormatError, "name is not text"),
    "NUL": (append(type="reg", name="a\0b"), FormatError, "name is not text"),
    "lost name": (append(type="reg", name="caf\ufffd"), UnsupportedError, "was not UTF-8"),
    "surrogate": (append(type="reg", name="\ud800"), FormatError, "name is not text"),
    "lost target": (append(type="symlink", name="l", linkName="\ufffd"), UnsupportedError, "was not UTF-8"),
    "unknown type": (append(type="socket", name="s"), UnsupportedError, "type 'socket'"),
    "type is a list": (append(type=[], name="s"), UnsupportedError, "member of type"),
    "long name": (append(type="reg", name="n" * 256), LimitError, "too long"),
    "link to nothing": (append(type="hardlink", name="l", linkName="nothing"), FormatError, "does not hold"),
    "link to itself": (append(type="hardlink", name="l", linkName="l"), FormatError, "does not hold"),
    "link to a directory": (append(type="hardlink", name="l", linkName="d"), FormatError, "to a directory"),
    "file as a parent": (append(type="reg", name="d/big/x"), FormatError, "not a directory"),
    "no target": (append(type="symlink", name="l"), FormatError, "empty or too long"),
    "whiteout of what is there": (append(type="reg", name="d/.wh.big"), FormatError, "whiteout of something"),
    "stray chunk": (lambda entries: entries.insert(0, {"type": "chunk", "name": "x"}), FormatError, "chunk of no file"),
    "mode is text": (put(mode="0644"), FormatError, "mode is not a number"),
    "uid is a fraction": (put(uid=0.5), FormatError, "uid is not a number"),
    "uid is true": (put(uid=True), FormatError, "uid is not a number"),
    "uid beyond all": (put(uid=1 << 70), FormatError, "uid is not a number"),
    "negative size": (put(size=-1), FormatError, "size is negative"),
    "larger than its chunks": (put(size=300_001), FormatError, "do not add up"),
    "smaller than its chunks": (put(size=299_999), FormatError, "do not add up"),
    "huge file": (put(size=(1 << 63) - 1), FormatError, "do not add up"),
    "huge chunk": (put(size=(1 << 62), chunkSize=None), LimitError, "a chunk of"),
    "gap": (put(chunkOffset=1), FormatError, "do not add up"),
    "no digest": (put(chunkDigest=None, digest=None), FormatError, "without a sha256 digest"),
    "digest of the whole for a part": (put(chunkDigest=None), FormatError, "without a sha256 digest"),
    "another digest": (put(chunkDigest="md5:00"), FormatError, "without a sha256 digest"),
    "negative offset": (put(offset=-1), FormatError, "offset is negative"),
    "offset before the last chunk's": (put(offset=1), FormatError, "order of the blob"),
    "offset behind the TOC": (put(offset=1 << 20), FormatError, "order of the blob"),
    "offset far away": (put(offset=1 << 40), LimitError, "too far"),
    "far into the unit": (put(innerOffset=1 << 40), LimitError, "too far into"),
    "unknown kind of chunk": (put(chunkType="sparse"), UnsupportedError, "chunk of type"),
    "no time": (put(modtime="yesterday"), FormatError, "not a time"),
    "time that is none": (put(modtime="2024-13-01T00:00:00Z"), FormatError, "not a time"),
    "time is a number": (put(modtime=5), FormatError, "no text"),
    "xattrs are a list": (put(xattrs=["user.a"]), FormatError, "not an object"),
    "xattr is no base64": (put(xattrs={"user.a": "?"}), FormatError, "not base64"),
    "xattr is a number": (put(xattrs={"user.a": 5}), FormatError, "not base64"),
    "ACL": (put(xattrs={"system.posix_acl_access": ""}), UnsupportedError, "ACL"),
    "device beyond Linux": (append(type="char", name="c", devMajor=-1), FormatError, "devMajor is negative"),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("kind", HOSTILE)
def test_entries_that_are_refused(make: Callable[..., Blob], kind: str) -> None:
    edit, error, text = HOSTILE[kind]
    with pytest.raises(error, match=text):
        make(odd(), chunk=65_536, edit=edit).toc()


def test_the_same_chunk_twice_is_refused() -> None:
    """Two files over the same bytes: a frame has one place in the content."""

    def edit(entries: list[Any]) -> None:
        file_entry(entries, "d/after")["offset"] = file_entry(entries, "d/ends")["offset"]

    with pytest.raises(FormatError, match=r"order of the blob|overlaps"):
        zstd_chunked(odd(), edit=edit).toc()


def test_limits() -> None:
    blob = zstd_chunked(odd())
    for limits, text in (
        (Limits(max_entries=5), "entries"),
        (Limits(max_entries=5, max_frames=0), f"TOC: {len(blob.entries)} entries"),
        (Limits(max_frames=3), "chunks"),
        (Limits(max_frame_content=60_000), "a chunk of"),
        (Limits(max_stream=100_000), "files of more than"),
    ):
        with pytest.raises(LimitError, match=text):
            blob.toc(limits=limits)


def test_chunks_that_lie_where_none_can() -> None:
    """Behind the TOC, too far before it, too far from one another, or too many of them in what one range brings."""
    digest, most = bytes(32), Limits().max_frame_content
    layout = StreamLayout(Limits())
    layout.add(b"f", 10, [Chunk(0, 10, 100, 0, digest)])
    assert len(layout.finish(ZSTD, 101)[0]) == 1
    for end, error, text in (
        (100, FormatError, "a chunk at 100, but the TOC begins at 100"),
        (101 + most + MAX_GAP, LimitError, "more bytes behind the last chunk"),
    ):
        with pytest.raises(error, match=text):
            layout.finish(ZSTD, end)
    with pytest.raises(LimitError, match="f: a chunk of more than 600 bytes"):
        StreamLayout(Limits(max_frame_content=600)).add(b"f", 700, [Chunk(0, 700, 100, 0, digest)])
    shared = StreamLayout(Limits(max_frame_content=2000))
    shared.add(b"a", 100, [Chunk(0, 100, 100, 0, digest)])
    with pytest.raises(LimitError, match=r"b: .*chunks that share one unit"):
        shared.add(b"b", 1000, [Chunk(0, 1000, 100, 1000, digest)])


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"version":1}', b'{"version":1,"entries":{}}', b"\xff", b"[" * 100_000])
def test_documents_that_are_no_toc(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weenv.layer.foreign.entries.read_toc", lambda layer, data: text)
    with pytest.raises(FormatError):
        zstd_chunked(odd()).toc()


@pytest.mark.parametrize("version", [2, "1", None, True])
def test_other_versions(version: object, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"version": version, "entries": []}).encode()
    monkeypatch.setattr("weenv.layer.foreign.entries.read_toc", lambda layer, data: text)
    with pytest.raises(UnsupportedError, match="version"):
        zstd_chunked(odd()).toc()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_nothing_wrong_comes_out_of_a_damaged_blob(make: Callable[..., Blob]) -> None:
    """Every byte of every chunk's range flipped in its turn: an error, or the right content (what is behind the unit)."""
    blob = make(odd(), chunk=65_536)
    toc = blob.toc()
    good = blob.content(toc)
    end = int(toc.frames.compressed_offsets[-1])
    rng = random.Random(5)
    refused = 0
    for at in rng.sample(range(end), 60):
        data = blob.data[:at] + bytes([blob.data[at] ^ 0x10]) + blob.data[at + 1 :]
        damaged = Blob(data, blob.annotations, blob.compression, "")
        try:
            assert damaged.content(toc) == good
        except FormatError:
            refused += 1
    assert refused > 40
    with pytest.raises(VerificationError, match="bytes, expected"):
        Blob(blob.data[:100], blob.annotations, blob.compression, "").content(toc)


def test_what_estargz_adds_is_hidden() -> None:
    """Landmarks and the index, in the root only; others that have the names keep them."""
    names = (b".prefetch.landmark", b".no.prefetch.landmark", b"stargz.index.json")
    members = (rawcorpus.file(name, b"\x0f") + rawcorpus.file(b"d/" + name, b"\x0f") for name in names)
    stream = b"".join(members) + rawcorpus.END
    toc = estargz(stream).toc()
    assert [toc.path(n) for n in range(len(toc.entries))] == [b"", b"d", *sorted(b"d/" + name for name in names)]
    assert len(zstd_chunked(stream).toc().entries) == 8


def test_holes_take_no_room_in_the_content() -> None:
    """A file of zeros has no data; one with a long run of them has pieces; short runs are in the frames."""
    blob = zstd_chunked(odd())
    toc = blob.toc()
    entry = {path: toc.lookup(path) for path in (b"d/zeros", b"d/holes", b"d/ends")}
    assert int(toc.entries.aux[entry[b"d/zeros"]]) == NO_DATA
    rows = toc.sparse_rows(entry[b"d/holes"])
    assert rows and sum(length for _, _, length in rows) < 200_000
    assert not int(toc.entries.flags[entry[b"d/ends"]]) & FLAG_SPARSE
    assert toc.diff_id == UNKNOWN_DIFF_ID


def test_a_chunk_is_read_no_further_than_it_is_long() -> None:
    """A unit that decompresses to far more than its chunk costs what the chunk costs."""
    stream = rawcorpus.file(b"bomb", bytes(20 << 20)) + rawcorpus.END

    def edit(entries: list[Any]) -> None:
        first = entries[0]
        del entries[1:]
        first |= {"size": 1 << 20, "chunkSize": 1 << 20}
        first["chunkDigest"] = first["digest"] = "sha256:" + hashlib.sha256(bytes(1 << 20)).hexdigest()

    blob = estargz(stream, chunk=20 << 20, edit=edit)
    toc = blob.toc()
    assert len(blob.content(toc)) == toc.stream_size < 2 << 20


def test_the_root_has_no_name() -> None:
    """Nothing of it counts, as in a tar; what holds no entry is no entry."""
    for entry in ({"type": "dir", "name": "", "mode": 0}, {"type": "reg"}, {"type": "dir", "name": "./"}):
        toc = zstd_chunked(odd(), edit=lambda entries, entry=entry: entries.append(entry)).toc()  # type: ignore[misc]
        assert len(toc.entries) == len(zstd_chunked(odd()).toc().entries) and int(toc.entries.mode[0]) == 0o755


def test_empty_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in MAKERS.values():
        toc = make(rawcorpus.END).toc()
        assert (len(toc.entries), len(toc.frames), toc.stream_size) == (1, 0, 0)
    monkeypatch.setattr("weenv.layer.foreign.entries.read_toc", lambda layer, data: b'{"version":1,"entries":null}')
    assert len(zstd_chunked(rawcorpus.END).toc().entries) == 1


def test_large_files_share_no_page_with_others() -> None:
    """So that the first page of a small file behind a large one does not need the large one's last chunk."""
    files = {b"a": b"a", b"b": b"b" * TARGET, b"c": b"c", b"d": b"d"}
    stream = b"".join(rawcorpus.file(name, data) for name, data in files.items())
    toc = zstd_chunked(stream + rawcorpus.END, zeros=0).toc()
    begins = toc.entries.aux[1:].astype(np.int64)
    assert list(begins % 4096 == 0) == [False, True, True, False]
    ends = toc.frames.content_offsets.tolist()
    assert begins[1] // 4096 * 4096 >= ends[1] and ends[-2] <= begins[2] // 4096 * 4096, "nor a frame"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(sorted(MAKERS)), st.integers(100, 5000), st.integers(0, 3000))
def test_random_layers(seed: int, kind: str, chunk: int, share: int) -> None:
    """The tree of the tar, or refused like the tar."""
    stream = rawcorpus.random_layer(seed)

    def make() -> Blob:
        if kind == "estargz":
            return estargz(stream, chunk=chunk, share=share)
        return zstd_chunked(stream, chunk=chunk)

    try:
        scan_tar(io.BytesIO(stream))
    except FormatError:
        try:
            blob = make()
        except (FormatError, UnicodeDecodeError, KeyError, AssertionError):
            return
        with pytest.raises(FormatError):
            blob.toc()
        return
    try:
        blob = make()
    except (UnicodeDecodeError, KeyError, AssertionError):  # what these formats do not hold
        return
    same(stream, blob)
