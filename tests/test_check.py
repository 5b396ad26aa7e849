"""What may be acted on: every promise of the TOC model, broken one at a time."""

from __future__ import annotations

import hashlib
import io
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.core.errors import FormatError, LimitError
from weenv.layer.check import _Words, check_frames, check_toc
from weenv.layer.limits import Limits
from weenv.layer.toc import NO_DATA, Entries, Frames, SparseRows, Toc, XattrSets
from weenv_testkit.layers import encode, make_tar, sample_tar

TOC = encode(sample_tar())[1].toc


def changed(toc: Toc, **columns: Any) -> Toc:
    """A TOC with entry columns (by name), ``xattrs``, ``sparse``, ``frames``, ``pool`` or scalars replaced."""
    entries = Entries(**{n: columns.pop(n, getattr(toc.entries, n)) for n in Entries.__slots__})
    fields = {n: columns.pop(n, getattr(toc, n)) for n in ("diff_id", "stream_size", "frame_target", "level", "frames")}
    fields |= {n: columns.pop(n, getattr(toc, n)) for n in ("xattrs", "sparse", "pool")}
    assert not columns
    return Toc(entries=entries, **fields)


def at(path: bytes, toc: Toc = TOC) -> int:
    found = toc.lookup(path)
    assert found is not None, path
    return found


def put(column: str, path: bytes, value: int) -> dict[str, Any]:
    """One value of one column replaced."""
    array = getattr(TOC.entries, column).copy()
    array[at(path) if path else 0] = value
    return {column: array}


def test_what_the_encoder_makes_is_accepted() -> None:
    check_toc(TOC)


LARGE = int(TOC.entries.aux[at(b"bin/large")])
SU = int(TOC.entries.aux[at(b"bin/su")])
LINK = b"bin/su"  # the later name of the inode of bin/link


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("parent", b"", 1), "not a root"),
        (put("kind", b"", 0), "not a root"),
        (put("name_len", b"", 1), "not a root"),
        (put("parent", b"bin", 60), "bin: comes before its directory"),
        (put("parent", b"etc", 2), "not in breadth-first order|lies in something"),
        (put("kind", b"etc", 0), "lies in something that is not a directory"),
        (put("name_len", b"etc/mtab", 0), "a name is empty"),
        (put("name_len", b"etc/mtab", 300), "a name is empty or longer|outside the pool"),
        (put("name_off", b"etc/mtab", len(TOC.pool)), "outside the pool"),
        (put("name_off", b"etc/passwd", int(TOC.entries.name_off[at(b"bin")])), "is not after the sibling before it"),
        (put("kind", b"etc/passwd", 7), "passwd: is of an unknown kind"),
        (put("mode", b"etc/passwd", 0o10000), "passwd: has a mode"),
        (put("mtime_ns", b"etc/passwd", 1_000_000_000), "passwd: has a time"),
        (put("flags", b"etc/passwd", 16), "passwd: has unknown flags"),
        (put("flags", b"etc/passwd", 1), "passwd: has flags of a directory"),
        (put("flags", b"etc/passwd", 4), "passwd: has flags of a directory"),
        (put("flags", b"etc/passwd", 2), "passwd: is a whiteout but"),
        (put("flags", b"dev/null", 2), "null: is a whiteout but"),
        (put("flags", b"etc/mtab", 8), "mtab: is sparse but no file"),
        (put("flags", b"etc/passwd", 8), "passwd: is sparse without pieces"),
        (put("aux", b"opt", 1), "opt: has data, being no file"),
        (put("aux", b"run/fifo", 1), "fifo: has data, being no file"),
        (put("size", b"run/fifo", 1), "fifo: has a size, being no file"),
        (put("size", b"etc/mtab", 0), "mtab: has an empty target"),
        (put("size", b"etc/mtab", 5000), "mtab: has an empty target, or one too long"),
        (put("aux", b"etc/mtab", len(TOC.pool)), "mtab: has a target outside"),
        (put("aux", b"etc/mtab", NO_DATA), "mtab: has a target outside"),
        (put("aux", LINK, len(TOC.entries)), "su: is a hard link to nothing"),
        (put("aux", LINK, at(LINK)), "su: is a hard link to a directory or a hard link"),
        (put("aux", LINK, at(b"etc")), "su: is a hard link to a directory"),
        (put("mode", LINK, 0o644), "su: is a hard link with attributes"),
        (put("uid", LINK, 1), "su: is a hard link with attributes"),
        (put("flags", LINK, 2), "su: is a whiteout, or its target is"),
        (put("aux", b"dev/null", 4096 << 32), "null: has a device number"),
        (put("aux", b"dev/sda", 1 << 20), "sda: has a device number"),
        (put("xattr_set", b"dev/null", 9), "null: has extended attributes that are not there"),
        (put("aux", b"etc/x/y/empty", 512), "empty: is empty but has data"),
        (put("size", b"bin/large", 1 << 62), "large: has data beyond the end"),
        (put("size", b"bin/large", (1 << 64) - 1), "large: is larger than a file can be"),
        (put("aux", b"bin/large", NO_DATA - 511), "large: has data beyond the end"),
        (put("aux", b"bin/large", LARGE + 1), "large: has data that does not begin at a block"),
        (put("aux", b"bin/large", 0), "large: has data where its header must be"),
        (put("aux", b"etc/passwd", LARGE), "overlaps another file's"),
        (put("aux", b"etc/passwd", LARGE + 512), "overlaps another file's"),
        (put("size", b"bin/large", int(TOC.entries.size[at(b"bin/large")]) + 2048), "overlaps another file's"),
        ({"diff_id": "sha256:x"}, "diffId"),
        ({"stream_size": TOC.stream_size + 512}, "its frames hold"),
    ],
)  # fmt: skip
def test_broken_promises(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        check_toc(changed(TOC, **change))


@pytest.mark.parametrize("name", [b".", b"..", b"a/b", b"a\0b", b"/"])
def test_names_that_are_no_names(name: bytes) -> None:
    base = encode(make_tar([{"name": "m" * len(name), "data": b"x"}, {"name": "s", "data": b"x"}]))[1].toc
    pool = base.pool.replace(b"m" * len(name), name)
    with pytest.raises(FormatError, match="a name"):
        check_toc(changed(base, pool=pool))


@pytest.mark.parametrize("name", [b".a", b"...", b"..a", b"\x01", b"\xff\xfe"])
def test_odd_names_that_are_names(name: bytes) -> None:
    base = encode(make_tar([{"name": "m" * len(name), "data": b"x"}]))[1].toc
    check_toc(changed(base, pool=base.pool.replace(b"m" * len(name), name)))


def test_a_target_with_a_nul() -> None:
    pool = TOC.pool.replace(b"../proc/mounts", b"../proc\0mounts")
    with pytest.raises(FormatError, match="mtab: has a target that holds a NUL"):
        check_toc(changed(TOC, pool=pool))


def x(**columns: Any) -> XattrSets:
    return XattrSets(**{n: np.array(columns.get(n, getattr(TOC.xattrs, n)), dtype=np.uint32) for n in XattrSets.__slots__})


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (x(first=[0, 1]), "do not add up"),
        (x(first=[1, 2]), "do not add up"),
        (x(first=[0, 0, 2]), "set is empty"),
        (x(first=[0, 2, 0, 2]), "set is empty"),
        (x(name_len=[0, 6]), "name is empty"),
        (x(name_len=[256, 6]), "name is empty or longer|outside the pool"),
        (x(name_off=[len(TOC.pool), 0]), "outside the pool"),
        (x(value_off=[len(TOC.pool), 0]), "outside the pool"),
        (x(name_off=TOC.xattrs.name_off[::-1].copy(), name_len=TOC.xattrs.name_len[::-1].copy()), "not sorted"),
        (x(name_off=[TOC.xattrs.name_off[0]] * 2, name_len=[TOC.xattrs.name_len[0]] * 2), "not sorted"),
        (x(name_off=[TOC.xattrs.value_off[0]] * 2, name_len=[20, 20]), "holds a NUL"),
        (x(value_len=[20]), "differ in length"),
    ],
)
def test_broken_xattrs(sets: XattrSets, message: str) -> None:
    assert len(TOC.xattrs) == 1 and len(TOC.xattrs.name_off) == 2
    with pytest.raises(FormatError, match=message):
        check_toc(changed(TOC, xattrs=sets))


# -- sparse files


def with_sparse(rows: list[tuple[int, int, int]], size: int) -> Toc:
    """bin/large made sparse with these (logical, stream, length) pieces, offsets in the stream from its payload's."""
    flags, aux, sizes = TOC.entries.flags.copy(), TOC.entries.aux.copy(), TOC.entries.size.copy()
    large = at(b"bin/large")
    flags[large], aux[large], sizes[large] = 8, 0, size
    table = SparseRows(
        np.full(len(rows), large, dtype=np.uint32),
        np.array([row[0] for row in rows], dtype=np.uint64),
        np.array([LARGE + row[1] for row in rows], dtype=np.uint64),
        np.array([row[2] for row in rows], dtype=np.uint64),
    )
    return changed(TOC, flags=flags, aux=aux, size=sizes, sparse=table)


def test_sound_sparse_files() -> None:
    check_toc(with_sparse([(0, 0, 512), (1024, 512, 512)], 1 << 40))
    check_toc(with_sparse([(0, 0, 512), (1024, 512, 100)], 1124))


@pytest.mark.parametrize(
    ("rows", "size", "message"),
    [
        ([(0, 0, 512), (1024, 512, 100)], 2000, "does not fill its blocks"),
        ([(1, 0, 512)], 2000, "out of bounds"),
        ([(0, 1, 512)], 2000, "out of bounds"),
        ([(0, 0, 0)], 2000, "out of bounds"),
        ([(1 << 63, 0, 512)], (1 << 64) - 1, "larger than a file can be"),
        ([(0, 0, 1024), (512, 1024, 512)], 4096, "overlap"),
        ([(1024, 0, 512), (0, 512, 512)], 4096, "overlap"),
        ([(0, 0, 512), (1024, 1024, 512)], 4096, "gaps"),
        ([(0, 0, 4096)], 2048, "beyond its end"),
        ([(0, 0, 1 << 30)], 1 << 30, "beyond the end of the stream"),
        ([(0, 0, 310_272)], 310_272, "overlaps another"),
    ],
)
def test_broken_sparse_files(rows: list[tuple[int, int, int]], size: int, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        check_toc(with_sparse(rows, size))


def test_sparse_rows_of_nothing() -> None:
    toc = with_sparse([(0, 0, 512)], 4096)
    for entry in (0, at(b"etc/passwd"), 10_000):
        table = SparseRows(np.array([entry], dtype=np.uint32), toc.sparse.logical, toc.sparse.stream, toc.sparse.length)
        with pytest.raises(FormatError, match="not of its sparse files" if entry < 10_000 else "not in order of entries"):
            check_toc(changed(toc, sparse=table))
    two = with_sparse([(0, 0, 512), (1024, 512, 512)], 4096)
    rows = two.sparse
    for entries in ([at(b"bin/large"), 0], [2**32 - 1, 2**32 - 1]):
        table = SparseRows(np.array(entries, dtype=np.uint32), rows.logical, rows.stream, rows.length)
        with pytest.raises(FormatError, match="not in order of entries"):
            check_toc(changed(two, sparse=table))
    aux = toc.entries.aux.copy()
    aux[at(b"bin/large")] = 1
    with pytest.raises(FormatError, match="wrong row"):
        check_toc(changed(toc, aux=aux))


# -- frames


def frames(compressed: list[int], content: list[int]) -> Frames:
    n = len(compressed)
    return Frames(np.array(compressed, dtype=np.uint32), np.array(content, dtype=np.uint32), np.zeros((n, 32), dtype=np.uint8))


def test_frames() -> None:
    check_frames(frames([20, 30], [512, 100]), 612)
    check_frames(frames([], []), 0)
    for bad, size, limits in (
        (frames([20, 30], [512, 100]), 613, Limits()),
        (frames([20, 30], [512, 0]), 512, Limits()),
        (frames([20, 0], [512, 100]), 612, Limits()),
        (frames([20, 2000], [512, 100]), 612, Limits()),
        (frames([20, 30], [512, 100]), 612, Limits(max_frames=1)),
        (frames([20, 30], [512, 100]), 612, Limits(max_frame_content=511)),
        (frames([20, 30], [512, 100]), 612, Limits(max_stream=611)),
    ):
        with pytest.raises(FormatError):
            check_frames(bad, size, limits)
    good = frames([20, 30], [512, 100])
    for sizes, digests in ((good.content_sizes[:1], good.digests), (good.content_sizes, good.digests[:1]),
                           (good.content_sizes, good.digests[:, :31])):  # fmt: skip
        with pytest.raises(FormatError, match="columns differ in length"):
            check_frames(Frames(good.compressed_sizes, sizes, digests), 612)


# -- order of names


@given(st.lists(st.binary(min_size=1, max_size=30).map(lambda b: b.replace(b"\0", b"a")), min_size=2, max_size=12))
def test_order_is_that_of_bytes(names: list[bytes]) -> None:
    pool = b"".join(names)
    lengths = np.array([len(name) for name in names], dtype=np.int64)
    offsets = np.cumsum(lengths) - lengths
    found = _Words(pool).not_ascending(offsets, lengths, np.arange(len(names) - 1))
    wrong = [i for i in range(len(names) - 1) if not names[i] < names[i + 1]]
    assert found == (wrong[0] if wrong else None)


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=25).map(str.encode), min_size=1, max_size=30, unique=True))
def test_sorted_names_with_long_common_prefixes_are_accepted(names: list[bytes]) -> None:
    names.sort()
    pool = b"".join(names)
    lengths = np.array([len(name) for name in names], dtype=np.int64)
    assert _Words(pool).not_ascending(np.cumsum(lengths) - lengths, lengths, np.arange(len(names) - 1)) is None


# -- scale


def test_limits_name_the_entry() -> None:
    deep = encode(make_tar([{"name": "/".join("d" * 30), "data": b"x"}]))[1].toc
    with pytest.raises(LimitError, match="more than 5 directories deep"):
        check_toc(deep, Limits(max_depth=5))
    with pytest.raises(LimitError, match="a path longer than 50 bytes"):
        check_toc(deep, Limits(max_path=50))


def wide(count: int) -> Toc:
    """A TOC of ``count`` files in directories of 20, without a tar: for time and memory."""
    directories = count // 20
    names = [b""] + [b"directory-%06d" % i for i in range(directories)] + [b"file-%06d.py" % (i % 20) for i in range(count)]
    lengths = np.array([len(name) for name in names], dtype=np.uint16)
    n = len(names)
    parent = np.zeros(n, dtype=np.uint32)
    parent[1 + directories :] = np.repeat(np.arange(1, 1 + directories, dtype=np.uint32), 20)[:count]
    kind = np.zeros(n, dtype=np.uint8)
    kind[: 1 + directories] = 1
    size = np.where(kind == 0, 700, 0).astype(np.uint64)
    aux = np.where(kind == 0, np.cumsum(kind == 0) * 1536, 0).astype(np.uint64)
    zeros = np.zeros(n, dtype=np.uint32)
    total = int(aux[-1]) + 1024
    contents = [min(1 << 20, total - at) for at in range(0, total, 1 << 20)]
    entries = Entries(
        parent=parent, name_off=(np.cumsum(lengths, dtype=np.uint32) - lengths).astype(np.uint32), name_len=lengths, kind=kind,
        flags=np.zeros(n, dtype=np.uint8), mode=np.full(n, 0o644, dtype=np.uint16), uid=zeros, gid=zeros,
        mtime=np.arange(n, dtype=np.int64), mtime_ns=zeros, size=size, aux=aux, xattr_set=zeros,
    )  # fmt: skip
    none, none64 = np.zeros(0, dtype=np.uint32), np.zeros(0, dtype=np.uint64)
    return Toc(
        "sha256:" + hashlib.sha256().hexdigest(), total, 1 << 20, 3, frames([100] * len(contents), contents), entries,
        XattrSets(np.zeros(1, dtype=np.uint32), none, none, none, none), SparseRows(none, none64, none64, none64),
        b"".join(names),
    )  # fmt: skip


def test_no_python_runs_per_entry() -> None:
    small, large = wide(20_000), wide(200_000)
    times = []
    for toc in (small, large):
        best = 9.0
        for _ in range(5):
            begun = time.process_time()
            check_toc(toc)
            best = min(best, time.process_time() - begun)
        times.append(best)
    # 0.05 us an entry and check is usual; a loop over entries would cost 100 times that. A bound for a busy machine.
    assert times[1] / len(large.entries) < 2e-6


def test_scan_and_check_agree_on_an_empty_layer() -> None:
    blob, layer = encode(b"")
    assert len(layer.toc.entries) == 1
    assert layer.toc_offset == 0
    check_toc(layer.toc)
    assert io.BytesIO(blob).read(4) == b"\x57\x2a\x4d\x18"
