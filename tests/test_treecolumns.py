"""layer/treecolumns.py: a tree by hand -> columns."""

from __future__ import annotations

import numpy as np
import pytest

from weenv.core.errors import LimitError
from weenv.layer.limits import DEFAULT_LIMITS, Limits
from weenv.layer.resolve import Directory, Inode, pack, unpack
from weenv.layer.tarscan import Member
from weenv.layer.toc import BLOCK, CHAR, DIRECTORY, FILE, FLAG_IMPLIED, FLAG_OPAQUE, FLAG_SPARSE, HARDLINK, NO_DATA, SYMLINK
from weenv.layer.treecolumns import rows_of, tree_columns


def member(kind: int = FILE, **fields: object) -> Member:
    return Member(b"n", kind, 0o644, 1, 2, 3, 4, 5, b"", 0, None, 512, None)._replace(**fields)  # type: ignore[arg-type]


def root() -> Directory:
    directory = Directory(None, b"", 255, 0)
    directory.implied = False
    return directory


@pytest.mark.parametrize("kind", [FILE, CHAR, BLOCK])
def test_packing_keeps_all_numbers(kind: int) -> None:
    numbers = {"mode": 0o7777, "uid": 2**32 - 1, "gid": 2**32 - 2, "mtime": 2**33, "mtime_ns": 999_999_999, "name": b""}
    where = {"offset": 2**63, "size": 2**62} if kind == FILE else {"rdev": 4095 << 32 | 2**20 - 1, "offset": NO_DATA}
    whole = member(kind, **numbers, **where)
    assert unpack(pack(whole)) == whole


def test_a_tree_by_hand() -> None:
    top = root()
    sub = Directory(top, b"sub", 255, 4)
    sub.opaque = True
    sub.xattrs = {b"user.b": b"2", b"user.a": b"1"}
    inode = Inode(member(FILE, xattrs={b"user.a": b"1", b"user.b": b"2"}))
    top.children = {
        b"z": inode,
        b"sub": sub,
        b"l": member(SYMLINK, link=b"target", size=0),
        b"c": pack(member(CHAR, rdev=1 << 32 | 3)),
    }
    sub.children = {b"y": inode, b"s": member(FILE, sparse=((0, 1024, 512), (1024, 1536, 512)), size=2048, offset=NO_DATA)}
    columns = tree_columns(rows_of(top), DEFAULT_LIMITS)
    e, pool = columns.entries, columns.pool
    assert pool.startswith(b"clsubzsytarget")
    assert e.parent.tolist() == [0, 0, 0, 0, 0, 3, 3]
    assert e.kind.tolist() == [DIRECTORY, CHAR, SYMLINK, DIRECTORY, FILE, FILE, HARDLINK]
    assert e.aux.tolist() == [0, 1 << 32 | 3, 8, 0, 512, 0, 4]
    assert e.size.tolist() == [0, 5, 6, 0, 5, 2048, 0]
    assert e.flags.tolist() == [0, 0, 0, FLAG_OPAQUE | FLAG_IMPLIED, 0, FLAG_SPARSE, 0]
    assert e.xattr_set.tolist() == [0, 0, 0, 1, 1, 0, 0], "equal sets are one, sorted by name"
    assert columns.xattrs.first.tolist() == [0, 2]
    x = columns.xattrs
    pairs = list(zip(x.name_off.tolist(), x.name_len.tolist(), x.value_off.tolist(), x.value_len.tolist(), strict=True))
    assert [(pool[a : a + b], pool[c : c + d]) for a, b, c, d in pairs] == [(b"user.a", b"1"), (b"user.b", b"2")]
    rows = columns.sparse
    assert [rows.entry.tolist(), rows.logical.tolist(), rows.stream.tolist()] == [[5, 5], [0, 1024], [1024, 1536]]


def test_an_empty_tree() -> None:
    columns = tree_columns(rows_of(root()), DEFAULT_LIMITS)
    assert (len(columns.entries), len(columns.xattrs), len(columns.sparse), columns.pool) == (1, 0, 0, b"")
    assert columns.entries.mode.tolist() == [0o755]


def test_breadth_first_whatever_the_shape() -> None:
    top = root()
    at = top
    for depth in range(50):
        for name in (b"b", b"a"):
            at.children[name] = Directory(at, name, 255, depth)
        below = at.children[b"b"]
        assert isinstance(below, Directory)
        at = below
    columns = tree_columns(rows_of(top), DEFAULT_LIMITS)
    assert len(columns.entries) == 101
    assert np.all(np.diff(columns.entries.parent.astype(np.int64)) >= 0)
    assert columns.pool == b"ab" * 50


def test_sparse_pieces_have_a_limit() -> None:
    top = root()
    top.children[b"s"] = member(FILE, sparse=((0, 0, 512), (1024, 512, 512)), size=2048)
    with pytest.raises(LimitError, match="n: more than 1 pieces"):
        tree_columns(rows_of(top), Limits(max_sparse_chunks=1))
