"""Which attributes are shared, how they are encoded, and what EROFS has no way to hold."""

from __future__ import annotations

import numpy as np
import pytest

from weenv.core.errors import LimitError, UnsupportedError
from weenv.layer.erofs import build, xattrs
from weenv.layer.erofs.xattrs import compute_xattrs, encode_entry
from weenv.layer.toc import FLAG_OPAQUE, HARDLINK, Toc
from weenv_testkit.erofs_reader import Image
from weenv_testkit.tocs import Node, directory, make_toc


def plan(toc: Toc) -> xattrs.XattrPlan:
    return compute_xattrs(toc, toc.entries.kind != HARDLINK, {})


def parsed(toc: Toc) -> dict[bytes, dict[bytes, bytes]]:
    return {path: inode.xattrs for path, inode in Image(bytes(build(toc))).walk().items()}


def test_entry_bytes() -> None:
    assert encode_entry(b"user.ab", b"xyz") == b"\x02\x01\x03\x00abxyz\0\0\0"
    assert encode_entry(b"security.capability", b"") == b"\x0a\x06\x00\x00capability\0\0"
    assert encode_entry(b"trusted.x", b"123") == b"\x01\x04\x03\x00x123"
    assert encode_entry(b"system.posix_acl_access", b"abcd") == b"\x00\x02\x04\x00abcd"
    assert encode_entry(b"system.posix_acl_default", b"abcd") == b"\x00\x03\x04\x00abcd"


def test_what_two_inodes_carry_is_written_once() -> None:
    label, own = b"system_u:object_r:usr_t:s0\0", b"only here"
    tree = {b"f%03d" % n: Node(xattrs={b"security.selinux": label}) for n in range(500)}
    tree[b"f001"] = Node(xattrs={b"security.selinux": label, b"user.own": own})
    toc = make_toc(tree)
    image = bytes(build(toc))
    assert image.count(label) == 1
    assert image.count(own) == 1
    assert parsed(toc) == {b"": {}} | {path: dict(node.xattrs) for path, node in tree.items()}


def test_sets_that_only_a_hard_link_names_are_not_written() -> None:
    toc = make_toc({b"a": Node(), b"b": Node(kind=HARDLINK, target=b"a", xattrs={b"user.x": b"unseen"})})
    assert b"unseen" not in build(toc)


def test_every_inode_has_attributes() -> None:
    one = Node(xattrs={b"user.a": b"1"})
    tree = {b"": directory(xattrs={b"user.r": b"0"}), b"a": one, b"b": one}
    assert parsed(make_toc(tree)) == {path: dict(node.xattrs) for path, node in tree.items()}


def test_opaque_mark_joins_the_directory_s_own() -> None:
    mark = {b"trusted.overlay.opaque": b"y"}
    tree = {
        b"plain": directory(flags=FLAG_OPAQUE),
        b"with": directory(flags=FLAG_OPAQUE, xattrs={b"user.k": b"v"}),
        b"same": directory(xattrs={b"user.k": b"v"}),
        b"twice": directory(flags=FLAG_OPAQUE, xattrs={b"trusted.overlay.opaque": b"n", b"user.k": b"v"}),
    }
    want = {b"": {}, b"plain": mark, b"with": {b"user.k": b"v", **mark}, b"same": {b"user.k": b"v"}}
    assert parsed(make_toc(tree)) == {**want, b"twice": {b"user.k": b"v", **mark}}


def test_more_shared_attributes_than_an_inode_can_refer_to() -> None:
    pairs = {b"user.%03d" % number: b"v%d" % number for number in range(300)}
    toc = make_toc({b"a": Node(xattrs=pairs), b"b": Node(xattrs=pairs)})
    body = plan(toc).bodies[0]
    assert body[4] == 255
    assert parsed(toc)[b"b"] == pairs


def test_largest_name_and_value() -> None:
    pairs = {b"user." + b"n" * 255: b"v" * 0xFFFF}
    other = {b"user.o": b"w" * 0xFFFF}
    found = parsed(make_toc({b"a": Node(xattrs=pairs), b"b": Node(xattrs=pairs), b"c": Node(xattrs=other)}))
    assert (found[b"a"], found[b"b"], found[b"c"]) == (pairs, pairs, other)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (b"com.apple.quarantine", b"", "d/f: .*in no namespace"),
        (b"system.nfs4_acl", b"", "d/f: .*in no namespace"),
        (b"system.posix_acl_accessx", b"", "in no namespace"),
        (b"user.", b"", "in no namespace"),
        (b"user", b"", "in no namespace"),
        (b"user." + b"n" * 256, b"", "d/f: .*name of 261 bytes"),
        (b"user.a\0b", b"", "NUL"),
        (b"user.big", b"x" * 65536, "d/f: .*65536 bytes"),
    ],
)
def test_what_erofs_has_no_way_to_hold(name: bytes, value: bytes, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        build(make_toc({b"d/f": Node(xattrs={name: value}), b"d/g": Node()}))


def test_body_of_one_inode_is_bounded() -> None:
    pairs = {b"user.%d" % number: b"%d" % number * 13_000 for number in range(1, 6)}
    with pytest.raises(UnsupportedError, match="d/f: extended attributes of 3"):
        build(make_toc({b"d/f": Node(xattrs={name: value.ljust(65_000) for name, value in pairs.items()})}))


def test_overlapping_rows_cannot_ask_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few bytes each may all point at the same pool: what they name together is bounded."""
    monkeypatch.setattr(xattrs, "MAX_XATTR_BYTES", 1 << 20)
    many, big = {b"user.%d" % number: b"v" for number in range(100)}, {b"user.b": b"x" * 60_000}
    toc = make_toc({b"f": Node(xattrs=many), b"big": Node(xattrs=big)})
    x = toc.xattrs
    start = toc.pool.index(b"x" * 60_000)
    rows = np.flatnonzero(x.value_len == 1)
    x.value_off[rows], x.value_len[rows] = start + np.arange(len(rows)), 59_000
    with pytest.raises(LimitError, match="extended attributes of more than"):
        build(toc)
