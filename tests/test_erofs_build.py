"""Images parsed back by an independent reader: examples, edge cases, and trees that hypothesis makes up."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weenv.core.errors import FormatError, LimitError
from weenv.layer.erofs import DirAttributes, build
from weenv.layer.limits import Limits
from weenv.layer.toc import (
    BLOCK,
    CHAR,
    DIRECTORY,
    FIFO,
    FILE,
    FLAG_IMPLIED,
    FLAG_OPAQUE,
    HARDLINK,
    NO_DATA,
    SYMLINK,
    Toc,
)
from weenv_testkit.erofs_reader import Image, Inode, coalesce
from weenv_testkit.tocs import Node, directory, golden_tree, make_toc

TYPES = {
    FILE: stat.S_IFREG, DIRECTORY: stat.S_IFDIR, SYMLINK: stat.S_IFLNK, CHAR: stat.S_IFCHR, BLOCK: stat.S_IFBLK,
    FIFO: stat.S_IFIFO,
}  # fmt: skip
Tree = Mapping[bytes, Node]


def parse(toc: Toc, **options: object) -> dict[bytes, Inode]:
    return Image(bytes(build(toc, **options))).walk()  # type: ignore[arg-type]


def expected_extents(node: Node) -> list[tuple[int, int | None, int]]:
    if not node.size:
        return []
    if node.sparse is None:
        return [(0, None if node.offset == NO_DATA else node.offset // 512, node.size)]
    extents: list[tuple[int, int | None, int]] = []
    at = 0
    for logical, stream, length in node.sparse:
        if logical > at:
            extents.append((at, None, logical - at))
        extents.append((logical, stream // 512, length))
        at = logical + length
    if at < node.size:
        extents.append((at, None, node.size - at))
    return coalesce(extents)


def check(tree: Tree, parsed: dict[bytes, Inode]) -> None:
    """Assert that the image holds exactly ``tree`` (whose parents are all there)."""
    assert set(parsed) == set(tree) | {b""}
    for path, named in tree.items():
        inode, node = parsed[path], named
        if named.kind == HARDLINK:
            assert inode is parsed[named.target]
            node = tree[named.target]
        assert inode.mode == TYPES[node.kind] | node.mode
        assert (inode.uid, inode.gid, inode.mtime, inode.mtime_ns) == (node.uid, node.gid, node.mtime, node.mtime_ns)
        marked = {b"trusted.overlay.opaque": b"y"} if node.flags & FLAG_OPAQUE else {}
        assert inode.xattrs == {**node.xattrs, **marked}
        if node.kind == FILE:
            assert inode.size == node.size
            assert coalesce(inode.extents) == expected_extents(node)
        elif node.kind == SYMLINK:
            assert inode.data == node.target
        elif node.kind in (CHAR, BLOCK):
            assert inode.rdev == node.device[0] << 32 | node.device[1]


def test_golden_image() -> None:
    """integration/test_erofs_kernel.py mounts the same tree and shows it to fsck.erofs; a change must be meant."""
    tree = golden_tree()
    image = build(make_toc(tree, stream_size=4096, diff_id="sha256:" + "ab" * 32))
    assert hashlib.sha256(image).hexdigest() == "ea4790536d4c6edfa7cb40979cb9f37a7b56883380e06f31d0aecfa12e487743"
    check(tree, Image(bytes(image)).walk())


def test_the_same_table_gives_the_same_bytes() -> None:
    tree = {b"d/%d" % number: Node(xattrs={b"user.n": b"%d" % (number % 7)}) for number in range(200)}
    assert build(make_toc(tree)) == build(make_toc(tree))
    assert build(make_toc(tree)) != build(make_toc({**tree, b"d/0": Node(mode=0o600)}))


def test_empty_layer_is_a_root_and_nothing_else() -> None:
    parsed = parse(make_toc({}, stream_size=1024))
    assert list(parsed) == [b""]
    assert parsed[b""].nlink == 2
    assert parsed[b""].mode == stat.S_IFDIR | 0o755


def test_names_around_the_dots() -> None:
    """'.' and '..' stand where they sort: "!" and "-" before both, ".#lock" between them, "..." behind."""
    names = [b"!", b"-", b"+x", b".#lock", b".-", b"...", b"..a", b".a", b"/"[:0] + b"0", b"\x01", b".\x01", b"..\x01", b"\xff"]
    check({name: Node() for name in names}, parse(make_toc({name: Node() for name in names})))


def test_long_directory_spans_blocks() -> None:
    tree = {b"%s%05d" % (b"n" * (number % 200), number): Node() for number in range(3000)}
    parsed = parse(make_toc(tree))
    check(tree, parsed)
    assert parsed[b""].size > 300_000


@pytest.mark.parametrize("count", range(24, 46))
def test_directories_about_one_block_long(count: int) -> None:
    """Tails of every length around the limits for standing inline and for a whole block."""
    tree: dict[bytes, Node] = {}
    for number in range(40):
        for child in range(count - 1):
            tree[b"d%02d/%d" % (number, child)] = Node()
        tree[b"d%02d/%s" % (number, b"z" * (number + 1))] = Node()
    parsed = parse(make_toc(tree))
    assert set(tree) < set(parsed)


def test_names_of_255_bytes_take_two_dirents_a_block() -> None:
    tree = {bytes([65 + number]) * 255: Node() for number in range(20)}
    check(tree, parse(make_toc(tree)))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 383, 384, 415, 416, 417, 448, 511, 512, 513, 1024, 4095])
def test_symlink_targets_of_many_lengths(length: int) -> None:
    tree = {b"l%02d" % number: Node(kind=SYMLINK, target=b"t" * length, mode=0o777) for number in range(20)}
    tree |= {b"l%02d" % number: replace(tree[b"l%02d" % number], xattrs={b"trusted.x": b"v" * number}) for number in range(9)}
    check(tree, parse(make_toc(tree)))


def test_hard_links_share_one_inode_and_count() -> None:
    tree = {
        b"a": directory(),
        b"a/first": Node(size=5, offset=1024),
        b"a/second": Node(kind=HARDLINK, target=b"a/first"),
        b"third": Node(kind=HARDLINK, target=b"a/first"),
        b"pipe": Node(kind=FIFO),
        b"pipe2": Node(kind=HARDLINK, target=b"pipe"),
    }
    parsed = parse(make_toc(tree, stream_size=2048))
    check(tree, parsed)
    assert parsed[b"third"].nlink == 3
    assert parsed[b"pipe2"].nlink == 2


def test_sizes_times_and_owners_at_their_ends() -> None:
    tree = {
        b"big": Node(size=(1 << 40) - 512, offset=512, mtime=-1, mtime_ns=999_999_999),
        b"five": Node(size=5 << 30, offset=1 << 39, uid=0xFFFFFFFE, gid=0xFFFFFFFF),
        b"old": Node(mtime=-(1 << 40)),
        b"late": Node(mtime=1 << 40),
        b"last": Node(size=1, offset=(1 << 40) - 512),
        b"device": Node(kind=BLOCK, device=(0xFFF, 0xFFFFF)),
        b"hole": Node(size=(1 << 40) + 5),
        b"zero": Node(size=0, offset=NO_DATA),
    }
    check(tree, parse(make_toc(tree, stream_size=1 << 40)))


def test_stream_that_ends_within_a_block() -> None:
    tree = {b"cut": Node(size=100, offset=512)}
    check(tree, parse(make_toc(tree, stream_size=612)))


def test_sparse_chunks_are_as_large_as_the_pieces_allow() -> None:
    size = 1 << 24
    coarse = Node(size=size, sparse=((1 << 20, 512, 1 << 20), (1 << 23, 512 + (1 << 20), 1 << 20)))
    fine = Node(size=size, sparse=((1536, 512, 512),))
    tail = Node(size=5 * 4096 + 7, sparse=((4 * 4096, 512, 4096 + 7),))
    joined = Node(size=8192, sparse=((0, 512, 512), (512, 1024, 7680)))
    tree = {b"coarse": coarse, b"fine": fine, b"tail": tail, b"joined": joined, b"nothing": Node(size=size, sparse=())}
    parsed = parse(make_toc(tree, stream_size=4 << 20))
    check(tree, parsed)
    assert {name: len(parsed[name].extents) for name in tree} == {
        b"coarse": 16, b"fine": size // 512, b"tail": 2, b"joined": 1, b"nothing": 1,
    }  # fmt: skip


def test_sparse_files_are_bounded() -> None:
    one = Node(size=1 << 60, sparse=((512, 512, 512),))
    with pytest.raises(LimitError, match=r"^lastlog: sparse"):
        build(make_toc({b"lastlog": one}, stream_size=4096))
    many = {b"%d" % number: Node(size=512 * 100, sparse=((512, 512, 512),)) for number in range(20)}
    with pytest.raises(LimitError, match="2000 chunks"):
        build(make_toc(many, stream_size=4096), limits=Limits(max_sparse_chunks=1999))
    build(make_toc(many, stream_size=4096), limits=Limits(max_sparse_chunks=2000))


def test_implied_directories_take_the_lower_layer_s_attributes() -> None:
    tree = {b"usr": directory(flags=FLAG_IMPLIED), b"usr/lib": directory(flags=FLAG_IMPLIED | FLAG_OPAQUE), b"usr/f": Node()}
    toc = make_toc(tree)
    usr, lib = toc.lookup(b"usr"), toc.lookup(b"usr/lib")
    assert usr is not None
    assert lib is not None
    new = DirAttributes(0o1777, 7, 8, 9, 10, ((b"user.k", b"v"),))
    parsed = parse(toc, implied={usr: new, lib: new})
    want = directory(mode=0o1777, uid=7, gid=8, mtime=9, mtime_ns=10, xattrs={b"user.k": b"v"})
    check({**tree, b"usr": want, b"usr/lib": replace(want, flags=FLAG_OPAQUE)}, parsed)
    assert build(toc, implied={usr: new}) != build(toc, implied={usr: replace(new, gid=9)})
    assert Image(bytes(build(toc, implied={usr: new}))).uuid != Image(bytes(build(toc))).uuid

    file = toc.lookup(b"usr/f")
    assert file is not None
    for entry in (0, file, 99, -1):
        with pytest.raises(ValueError, match="not an implied directory"):
            build(toc, implied={entry: new})
    with pytest.raises(ValueError, match="out of range"):
        build(toc, implied={usr: replace(new, mode=0o40755)})


def test_names_need_not_be_contiguous_in_the_pool() -> None:
    tree = {b"d%d/f%03d" % (number % 5, number): Node() for number in range(300)}
    toc = make_toc(tree)
    e = toc.entries
    order = np.random.default_rng(1).permutation(len(e))
    pool, offsets = bytearray(), np.zeros(len(e), dtype=np.uint32)
    for entry in order.tolist():
        offsets[entry] = len(pool)
        pool += toc.name(entry)
    shuffled = replace(toc, entries=replace(e, name_off=offsets), pool=bytes(pool))
    assert build(shuffled)[2048:] == build(toc)[2048:]


@pytest.mark.parametrize("name", [b"a\0b", b"a\0", b"\0"])
def test_names_that_no_directory_can_hold(name: bytes) -> None:
    with pytest.raises(FormatError, match="slash or a NUL"):
        build(make_toc({b"d/x" + name: Node(), b"d/y": Node()}))


NAME = st.one_of(
    st.binary(min_size=1, max_size=12),
    st.text("!#-.0az", min_size=1, max_size=4).map(str.encode),
    st.binary(min_size=200, max_size=255),
).map(lambda raw: raw.replace(b"/", b"_").replace(b"\0", b"~")).filter(lambda name: name not in (b".", b".."))  # fmt: skip
XATTRS = st.dictionaries(
    st.sampled_from(
        [b"user.a", b"user.bb", b"trusted.overlay.x", b"security.capability", b"system.posix_acl_access",
         b"system.posix_acl_default", b"user." + b"n" * 255],
    ),
    st.one_of(st.sampled_from([b"", b"v", b"w" * 40]), st.binary(max_size=30), st.just(b"z" * 700)),
    max_size=4,
)  # fmt: skip
STREAM = 1 << 22


@st.composite
def attributes(draw: st.DrawFn) -> dict[str, object]:
    return {
        "mode": draw(st.integers(0, 0o7777)), "uid": draw(st.integers(0, 2**32 - 1)), "gid": draw(st.integers(0, 2**32 - 1)),
        "mtime": draw(st.integers(-(2**63), 2**63 - 1)), "mtime_ns": draw(st.integers(0, 10**9 - 1)), "xattrs": draw(XATTRS),
    }  # fmt: skip


@st.composite
def sparse_files(draw: st.DrawFn) -> Node:
    unit = 512 << draw(st.integers(0, 6))
    cuts = sorted(draw(st.sets(st.integers(0, 60), max_size=8)))
    pieces, stream = [], 512
    for low, high in zip(cuts[::2], cuts[1::2], strict=False):
        pieces.append((low * unit, stream, (high - low) * unit))
        stream += (high - low) * unit
    size = (cuts[-1] if cuts else 0) * unit + draw(st.integers(0, 5000))
    if pieces and draw(st.booleans()):  # the last piece ends the file, within a block
        logical, at, length = pieces[-1]
        pieces[-1] = (logical, at, length - draw(st.integers(0, 511)))
        size = logical + pieces[-1][2]
    return Node(size=size, sparse=tuple(pieces))


@st.composite
def leaves(draw: st.DrawFn) -> Node:
    kind = draw(st.sampled_from([FILE, FILE, FILE, SYMLINK, CHAR, BLOCK, FIFO]))
    node = Node(kind=kind)
    if kind == FILE:
        if draw(st.integers(0, 3)) == 0:
            node = draw(sparse_files())
        else:
            offset = draw(st.integers(0, STREAM // 512)) * 512
            size = draw(st.integers(0, STREAM - offset))
            node = Node(size=size, offset=draw(st.sampled_from([offset, offset, NO_DATA])))
    elif kind == SYMLINK:
        node = Node(kind=kind, target=draw(st.binary(min_size=1, max_size=600)).replace(b"\0", b"/"))
    elif kind in (CHAR, BLOCK):
        node = Node(kind=kind, device=(draw(st.integers(0, 0xFFF)), draw(st.integers(0, 0xFFFFF))))
    return replace(node, **draw(attributes()))


@st.composite
def trees(draw: st.DrawFn) -> dict[bytes, Node]:
    tree: dict[bytes, Node] = {b"": directory(**draw(attributes()))}
    directories, others = [b""], []
    for name in draw(st.lists(NAME, max_size=40)):
        parent = draw(st.sampled_from(directories))
        path = parent + b"/" + name if parent else name
        if path in tree:
            continue
        what = draw(st.integers(0, 9))
        if what < 2:
            flags = draw(st.sampled_from([0, 0, FLAG_OPAQUE]))
            tree[path] = directory(flags=flags, **draw(attributes()))
            directories.append(path)
        elif what == 2 and others:
            tree[path] = Node(kind=HARDLINK, mode=0, target=draw(st.sampled_from(others)))
        else:
            tree[path] = draw(leaves())
            others.append(path)
    return tree


@settings(max_examples=120, deadline=None)
@given(trees())
def test_any_tree_comes_back_equal(tree: dict[bytes, Node]) -> None:
    check(tree, parse(make_toc(tree, stream_size=STREAM)))
