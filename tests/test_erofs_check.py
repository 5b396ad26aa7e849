"""Tables that must never become an image: each is refused with the right error, naming the member."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weenv.core.errors import FormatError, LimitError, UnsupportedError
from weenv.layer.erofs import build
from weenv.layer.limits import Limits
from weenv.layer.toc import CHAR, DIRECTORY, HARDLINK, NO_DATA, SYMLINK, Toc, XattrSets
from weenv_testkit.erofs_reader import Corrupt, Image
from weenv_testkit.tocs import Node, directory, make_toc

TREE = {
    b"": directory(),
    b"etc": directory(xattrs={b"user.a": b"1"}),
    b"etc/file": Node(size=700, offset=1024, xattrs={b"user.a": b"1", b"user.b": b"2"}),
    b"etc/link": Node(kind=SYMLINK, target=b"file"),
    b"etc/other": Node(kind=HARDLINK, target=b"etc/file"),
    b"etc/tty": Node(kind=CHAR, device=(5, 1)),
    b"etc/wide": Node(size=8192, sparse=((1024, 2048, 512), (4096, 2560, 4096))),
}
STREAM = 8192


def table() -> Toc:
    return make_toc(TREE, stream_size=STREAM)


def entry(toc: Toc, path: bytes) -> int:
    number = toc.lookup(path)
    assert number is not None
    return number


def with_column(toc: Toc, path: bytes, **values: int) -> Toc:
    """The table with some columns of one entry changed."""
    columns = {}
    for name, value in values.items():
        column = getattr(toc.entries, name).copy()
        column[entry(toc, path)] = value
        columns[name] = column
    return replace(toc, entries=replace(toc.entries, **columns))


def with_sparse(toc: Toc, **columns: list[int]) -> Toc:
    fields = {"entry": np.uint32, "logical": np.uint64, "stream": np.uint64, "length": np.uint64}
    changed = {name: np.array(values, dtype=fields[name]) for name, values in columns.items()}
    return replace(toc, sparse=replace(toc.sparse, **changed))


def test_the_table_itself_is_good() -> None:
    Image(bytes(build(table()))).walk()


@pytest.mark.parametrize(
    ("path", "values", "message"),
    [
        (b"", {"kind": 0}, "entry 0 is not the root"),
        (b"", {"parent": 1}, "entry 0 is not the root"),
        (b"etc/file", {"kind": 7}, "etc/file: unknown kind"),
        (b"etc/file", {"parent": 6}, "breadth-first"),
        (b"etc/file", {"parent": 2}, "breadth-first"),
        (b"etc/tty", {"parent": 0}, "tty: entries are not in breadth-first"),
        (b"etc/wide", {"parent": 2}, "wide: lies within something that is not a directory"),
        (b"etc/file", {"name_len": 0}, "a name of 0"),
        (b"etc/file", {"name_len": 256}, "a name of 0 or more than 255"),
        (b"etc/file", {"name_off": 0xFFFFFFFF}, "outside the pool"),
        (b"etc/file", {"mode": 0o10644}, "etc/file: mode"),
        (b"etc/file", {"mtime_ns": 10**9}, "etc/file: mtime"),
        (b"etc/file", {"xattr_set": 3}, "etc/file: .*does not exist"),
        (b"etc/file", {"aux": 1025}, "etc/file: the payload does not begin"),
        (b"etc/file", {"aux": STREAM}, "etc/file: the payload lies outside"),
        (b"etc/file", {"aux": NO_DATA - 511}, "etc/file: the payload lies outside"),
        (b"etc/file", {"size": STREAM - 1023}, "etc/file: the payload lies outside"),
        (b"etc/file", {"size": (1 << 63) - 1}, "etc/file: the payload lies outside"),
        (b"etc/link", {"size": 0}, "etc/link: a symlink target of 0"),
        (b"etc/link", {"size": 4096}, "etc/link: a symlink target of 0 or more than 4095"),
        (b"etc/link", {"size": 4000}, "etc/link: .*outside the pool"),
        (b"etc/link", {"aux": NO_DATA}, "etc/link: .*outside the pool"),
        (b"etc/link", {"aux": 1 << 20}, "etc/link: .*outside the pool"),
        (b"etc/other", {"aux": 7}, "etc/other: a hard link to nothing"),
        (b"etc/other", {"aux": NO_DATA}, "etc/other: a hard link to nothing"),
        (b"etc/other", {"aux": 1}, "etc/other: a hard link to a directory"),
        (b"etc/other", {"aux": 4}, "etc/other: a hard link to a directory or to another"),
        (b"etc/wide", {"flags": 0, "aux": 0}, "etc/wide: has sparse rows"),
    ],
)  # fmt: skip
def test_malformed_entries(path: bytes, values: dict[str, int], message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        build(with_column(table(), path, **values))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "values", "message"),
    [
        (b"etc/file", {"size": 1 << 63}, "etc/file: larger than a file can be"),
        (b"etc/tty", {"aux": 0x1000 << 32}, "etc/tty: a device number"),
        (b"etc/tty", {"aux": 0x100000}, "etc/tty: a device number"),
    ],
)
def test_what_erofs_cannot_hold(path: bytes, values: dict[str, int], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        build(with_column(table(), path, **values))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"entry": [6, 99]}, "entry that does not exist"),
        ({"entry": [2, 6]}, "etc/file: has sparse rows"),
        ({"length": [0, 4096]}, "etc/wide: a sparse piece is empty"),
        ({"length": [512, 1 << 63]}, "etc/wide: a sparse piece is empty or larger"),
        ({"logical": [1024, 4608]}, "etc/wide: a sparse piece lies outside"),
        ({"logical": [1024, (1 << 64) - 512]}, "etc/wide: a sparse piece lies outside"),
        ({"stream": [2048, 4608]}, "etc/wide: a sparse piece lies outside"),
        ({"logical": [1000, 4096]}, "etc/wide: a sparse piece is not made of blocks"),
        ({"stream": [2049, 2560]}, "etc/wide: a sparse piece is not made of blocks"),
        ({"length": [500, 4096]}, "etc/wide: a sparse piece is not made of blocks"),
        ({"logical": [4096, 1024], "length": [4096, 512]}, "etc/wide: sparse pieces overlap"),
        ({"logical": [4096, 4096]}, "etc/wide: sparse pieces overlap"),
        ({"logical": [1024]}, "differ in length"),
    ],
)
def test_malformed_sparse_rows(columns: dict[str, list[int]], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        build(with_sparse(table(), **columns))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: replace(x, first=np.array([0, 2, 1, 3], dtype=np.uint32)), "not in order"),
        (lambda x: replace(x, first=np.array([0, 1, 9], dtype=np.uint32)), "not in order"),
        (lambda x: replace(x, name_off=x.name_off[:-1]), "differ in length"),
        (lambda x: replace(x, value_off=x.value_off + np.uint32(1 << 30)), "outside the pool"),
        (lambda x: replace(x, name_len=x.name_len + np.uint32(0xFFFFFF00)), "outside the pool"),
    ],
)
def test_malformed_xattr_table(change: Callable[[XattrSets], XattrSets], message: str) -> None:
    toc = table()
    with pytest.raises(FormatError, match=message):
        build(replace(toc, xattrs=change(toc.xattrs)))


def test_limits() -> None:
    toc = table()
    with pytest.raises(LimitError, match="7 entries, the limit is 6"):
        build(toc, limits=Limits(max_entries=6))
    with pytest.raises(LimitError, match="tar stream"):
        build(toc, limits=Limits(max_stream=8191))
    with pytest.raises(LimitError, match="tar stream"):
        build(replace(toc, stream_size=(1 << 40) + 1), limits=Limits(max_stream=1 << 50))
    with pytest.raises(FormatError, match="symlink target"):
        build(toc, limits=Limits(max_symlink=3))


def test_columns_of_different_lengths() -> None:
    toc = table()
    with pytest.raises(FormatError, match="columns differ"):
        build(replace(toc, entries=replace(toc.entries, uid=toc.entries.uid[:-1])))


def test_reserved_names() -> None:
    for name in (b".", b".."):
        with pytest.raises(FormatError, match=r"name '\.' or '\.\.'"):
            build(make_toc({b"a/" + name: Node(kind=DIRECTORY, mode=0o755)}))


def test_deep_nesting_is_refused_by_name_without_walking_it_all() -> None:
    """A chain of 20 000 directories: the message shows the last components only."""
    count = 20_000
    toc = table()
    e = toc.entries
    zeros = {name: np.zeros(count, dtype=getattr(e, name).dtype) for name in e.__slots__}
    zeros["parent"] = np.maximum(np.arange(count) - 1, 0).astype(np.uint32)
    zeros["name_len"] = np.ones(count, dtype=np.uint16)
    zeros["kind"] = np.full(count, DIRECTORY, dtype=np.uint8)
    zeros["mode"][-1] = 0o20000
    with pytest.raises(FormatError, match="mode") as caught:
        build(replace(toc, entries=type(e)(**zeros)))
    assert len(str(caught.value)) < 400


COLUMNS = ["parent", "name_off", "name_len", "kind", "flags", "mode", "mtime_ns", "size", "aux", "xattr_set"]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(TREE)), st.sampled_from(COLUMNS),
            st.one_of(st.integers(0, 9), st.integers(0, 2**64 - 1), st.sampled_from([NO_DATA, 512, 1024, 4096, 2**32 - 1])),
        ),
        min_size=1, max_size=4,
    ),
    st.lists(
        st.tuples(st.sampled_from(["entry", "logical", "stream", "length"]), st.integers(0, 1), st.integers(0, 2**64 - 1)),
        max_size=2,
    ),
)  # fmt: skip
def test_any_change_is_refused_or_gives_a_readable_image(
    changes: list[tuple[bytes, str, int]], pieces: list[tuple[str, int, int]]
) -> None:
    """Whatever a table says: a FormatError, or an image in which nothing points out of bounds."""
    toc = table()
    for path, column, value in changes:
        dtype = getattr(toc.entries, column).dtype
        changed = getattr(toc.entries, column).copy()
        changed[entry(table(), path)] = value & np.iinfo(dtype).max
        toc = replace(toc, entries=replace(toc.entries, **{column: changed}))
    for column, row, value in pieces:
        changed = getattr(toc.sparse, column).copy()
        changed[row] = value & np.iinfo(changed.dtype).max
        toc = replace(toc, sparse=replace(toc.sparse, **{column: changed}))
    try:
        image = build(toc, limits=Limits(max_sparse_chunks=10_000))
    except FormatError:
        return
    try:
        Image(bytes(image)).walk()
    except Corrupt as error:  # order and distinctness of names are the tail parser's to check; they are harmless here
        assert "order of names" in str(error) or "name" in str(error)
