"""layer/tree.py: what containerd's overlayfs unpack leaves on disk, case by case.

Every expectation here was seen from containerd's own unpack; integration/test_apply_reference.py asks it again.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weenv.core.errors import FormatError, LimitError, UnsupportedError
from weenv.layer.limits import DEFAULT_LIMITS, Limits
from weenv.layer.toc import (
    BLOCK,
    CHAR,
    DIRECTORY,
    FIFO,
    FILE,
    FLAG_IMPLIED,
    FLAG_OPAQUE,
    FLAG_SPARSE,
    FLAG_WHITEOUT,
    HARDLINK,
    NO_DATA,
    SYMLINK,
    Toc,
)
from weenv.layer.tree import scan_tar
from weenv_testkit import rawtar
from weenv_testkit.fuzzing import load
from weenv_testkit.rawtar import END, directory, file, header, pax
from weenv_testkit.toctree import content, toc_of

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")


class Tree:
    """The tree of a tar stream, looked at by path."""

    def __init__(self, *members: bytes, limits: Limits = DEFAULT_LIMITS) -> None:
        self.stream = b"".join(members) + END
        scan = scan_tar(io.BytesIO(self.stream), limits)
        self.toc: Toc = toc_of(scan.columns, scan.stream_size)

    def paths(self) -> list[bytes]:
        return [self.toc.path(entry) for entry in range(len(self.toc.entries))][1:]

    def __getitem__(self, path: bytes) -> int:
        entry = self.toc.lookup(path)
        assert entry is not None, f"{path!r} is not there"
        return entry

    def get(self, path: bytes, column: str) -> int:
        return int(getattr(self.toc.entries, column)[self[path]])

    def data(self, path: bytes) -> bytes:
        return content(self.toc, self.stream, self.inode(path))

    def inode(self, path: bytes) -> int:
        entry = self[path]
        return int(self.toc.entries.aux[entry]) if self.toc.entries.kind[entry] == HARDLINK else entry

    def attributes(self, path: bytes) -> tuple[int, int, int, int]:
        """mode, uid, gid, mtime of the inode."""
        e, entry = self.toc.entries, self.inode(path)
        return int(e.mode[entry]), int(e.uid[entry]), int(e.gid[entry]), int(e.mtime[entry])

    def xattrs(self, path: bytes) -> dict[bytes, bytes]:
        return dict(self.toc.xattr_items(self.inode(path)))


def refused(*members: bytes, match: str, error: type[FormatError] = FormatError) -> None:
    """The archive is refused with an error that names a member."""
    with pytest.raises(error, match=match) as caught:
        Tree(*members)
    assert caught.value.member


def xattr(name: bytes, value: bytes = b"v") -> bytes:
    """A PAX header with one extended attribute."""
    return pax({b"SCHILY.xattr." + name: value})


# -- names (stargz#217, containers/storage#2191, crfs#43)


def test_dot_slash_and_nothing_are_the_same_name() -> None:
    tree = Tree(file(b"./a/x", b"1"), file(b"/a/y", b"2"), file(b"a//z", b"3"), file(b"./b/../a/./w", b"4"), directory(b"./a/"))
    assert tree.paths() == [b"a", b"a/w", b"a/x", b"a/y", b"a/z"]
    assert tree.get(b"a", "flags") == 0, "named by a member in the end"


def test_kind_ko_images_absolute_names_without_directory_entries() -> None:
    tree = Tree(file(b"/a/b/f", b"x"))
    for path in (b"a", b"a/b"):
        assert tree.get(path, "kind") == DIRECTORY
        assert tree.attributes(path) == (0o755, 0, 0, 0)
        assert tree.get(path, "flags") == FLAG_IMPLIED


def test_kind_root_entry_its_attributes_are_ignored() -> None:
    for name in (b"./", b"/", b".", b"a/..", b"../..", b"..", b"./."):
        tree = Tree(directory(name, 0o700, uid=9, mtime=5), file(b"f"))
        assert tree.paths() == [b"f"]
        assert tree.attributes(b"") == (0o755, 0, 0, 0)
        assert tree.get(b"", "flags") == 0
    assert Tree(header(b"./", b"1", link=b"nothing")).paths() == [], "whatever its type"


def test_kind_empty_layer_has_a_root() -> None:
    for stream in (b"", END):
        columns = scan_tar(io.BytesIO(stream)).columns
        assert columns.entries.kind.tolist() == [DIRECTORY]
        assert columns.pool == b""


def test_kind_names_that_are_not_utf_8() -> None:
    tree = Tree(file(b"\xff", b"1"), file(b"\xaa", b"2"), file("ü".encode(), b"3"))
    assert tree.paths() == [b"\xaa", "ü".encode(), b"\xff"]
    assert tree.data(b"\xff") == b"1"


def test_dot_dot_is_lexical_and_ends_at_the_root() -> None:
    tree = Tree(file(b"../../x/../y", b"1"), header(b"l", b"2", link=b"d/e"), file(b"l/../z", b"2"))
    assert tree.paths() == [b"l", b"y", b"z"]


def test_long_names_and_paths() -> None:
    assert Tree(pax({b"path": b"n" * 255}), header(b"x")).paths() == [b"n" * 255]
    refused(pax({b"path": b"n" * 256}), header(b"x"), match="too long", error=LimitError)
    deep = b"/".join([b"d" * 200] * 20) + b"/"
    assert len(Tree(pax({b"path": deep + b"f" * 70}), header(b"x")).paths()) == 21
    refused(pax({b"path": deep + b"f" * 80}), header(b"x"), match="too long", error=LimitError)
    last = b"e" * 80
    for name in (b"n" * 256 + b"/", b"n" * 256 + b"/x", b".wh." + b"n" * 256, deep + last + b"/", deep + b".wh." + last):
        kind = b"5" if name.endswith(b"/") else b"0"
        refused(pax({b"path": name}), header(b"x", kind), match="a name or path too long", error=LimitError)
    with pytest.raises(LimitError, match="directories deep"):
        Tree(file(b"a/b/c/d"), limits=Limits(max_depth=2))
    with pytest.raises(LimitError, match="more than 3 entries"):
        Tree(file(b"a/b/c"), limits=Limits(max_entries=3))


# -- order


def test_entries_are_breadth_first_and_sorted_by_bytes() -> None:
    tree = Tree(*(file(name) for name in (b"b/z", b"b/a", b"a/\xff", b"a-", b"a/b/c", b"a0", b"B")))
    assert tree.paths() == [b"B", b"a", b"a-", b"a0", b"b", b"a/b", b"a/\xff", b"b/a", b"b/z", b"a/b/c"]
    assert tree.toc.entries.parent.tolist() == [0, 0, 0, 0, 0, 0, 2, 2, 5, 5, 6]


# -- replacing (stargz PR#219, containers/storage#1951)


def test_kind_duplicate_entries_the_last_wins() -> None:
    tree = Tree(file(b"f", b"first", mode=0o600), file(b"f", b"second", mode=0o644, uid=3))
    assert (tree.data(b"f"), tree.attributes(b"f")) == (b"second", (0o644, 3, 0, 0))


def test_kind_duplicate_entries_a_type_change() -> None:
    tree = Tree(directory(b"d"), file(b"d/x"), file(b"d/y/z"), file(b"d", b"now"))
    assert (tree.paths(), tree.data(b"d")) == ([b"d"], b"now")
    tree = Tree(file(b"d", b"f"), directory(b"d"), file(b"d/x"))
    assert tree.paths() == [b"d", b"d/x"]
    tree = Tree(header(b"l", b"2", link=b"d"), directory(b"d"), directory(b"l"), file(b"l/x"))
    assert tree.paths() == [b"d", b"l", b"l/x"], "a directory replaces a symlink, it does not follow it"
    assert Tree(file(b"x"), header(b"x", b"2", link=b"y"), header(b"x", b"6")).get(b"x", "kind") == FIFO


def test_a_directory_over_a_directory_keeps_children_and_adds_xattrs() -> None:
    first, second = (
        xattr(b"user.a", b"1") + directory(b"d", 0o700, mtime=1),
        xattr(b"user.b", b"2") + directory(b"d", 0o750, uid=3, mtime=9),
    )
    tree = Tree(first, file(b"d/x"), second)
    assert tree.paths() == [b"d", b"d/x"]
    assert tree.attributes(b"d") == (0o750, 3, 0, 9)
    assert tree.xattrs(b"d") == {b"user.a": b"1", b"user.b": b"2"}


def test_times_of_replaced_directories_go_to_what_is_there_in_the_end() -> None:
    tree = Tree(directory(b"d", mtime=7), file(b"d", b"x", mtime=3))
    assert tree.attributes(b"d")[3] == 7, "containerd sets directory times last, by name"
    tree = Tree(directory(b"e", mtime=1), directory(b"d", mtime=7), header(b"d", b"2", link=b"e"))
    assert tree.attributes(b"e")[3] == 7
    tree = Tree(directory(b"d", mtime=7), file(b"d", mtime=3), header(b"h", b"1", link=b"d", mtime=5))
    assert tree.attributes(b"h")[3] == 7
    refused(directory(b"d"), directory(b"d/e"), file(b"d"), match="d/e: .*")
    refused(directory(b"d/e"), file(b"d"), directory(b"d"), match="d/e: a directory that is gone by the end")


def test_a_file_is_no_parent() -> None:
    refused(file(b"f"), file(b"f/x"), match="f/x: its parent is not a directory")
    refused(file(b"f"), file(b"f/y/x"), match="f/y/x: its parent is not a directory")
    refused(header(b"a", b"6"), header(b"b", b"1", link=b"a"), file(b"b/x"), match="b/x: ")


# -- implied directories and ids


def test_an_explicit_entry_ends_being_implied() -> None:
    tree = Tree(file(b"a/b/f"), directory(b"a", 0o711, uid=4, mtime=8))
    assert tree.attributes(b"a") == (0o711, 4, 0, 8)
    assert (tree.get(b"a", "flags"), tree.get(b"a/b", "flags")) == (0, FLAG_IMPLIED)


def test_implied_directories_take_the_group_of_a_set_gid_parent() -> None:
    tree = Tree(directory(b"s", 0o2775, gid=50), file(b"s/new/deep/f"))
    assert tree.attributes(b"s/new") == (0o755, 0, 50, 0)
    assert tree.attributes(b"s/new/deep") == (0o755, 0, 0, 0), "chmod(2) has cleared the bit on the first one"
    assert tree.attributes(b"s/new/deep/f") == (0o644, 0, 0, 0)


def test_an_id_of_minus_one_is_left_alone() -> None:
    both = {"uid": -1, "gid": -1}
    tree = Tree(directory(b"s", 0o2775, gid=50), file(b"s/f", **both), directory(b"s/d", **both), file(b"g", **both))
    assert tree.attributes(b"s/f")[1:3] == (0, 50)
    assert tree.attributes(b"s/d")[1:3] == (0, 50)
    assert tree.attributes(b"g")[1:3] == (0, 0)
    tree = Tree(directory(b"d", uid=4, gid=5), directory(b"d", **both))
    assert tree.attributes(b"d")[1:3] == (4, 5)
    tree = Tree(file(b"f", uid=4, gid=5), header(b"l", b"1", link=b"f", **both))
    assert tree.attributes(b"f")[1:3] == (4, 5)


def test_kind_attributes_are_exact() -> None:
    """nydus a295c542, buildkit#2703, stargz PR#68, #286, PR#2045."""
    tree = Tree(
        pax({b"uid": b"3000000", b"mtime": b"1700000001.987654321"}), file(b"big"), file(b"suid", b"x", mode=0o4755),
        file(b"zero"), header(b"l", b"2", link=b"abc", mode=0o644), file(b"all", mode=0o7777), file(b"odd", mode=0o100644),
    )  # fmt: skip
    assert tree.get(b"big", "uid") == 3_000_000
    assert (tree.get(b"big", "mtime"), tree.get(b"big", "mtime_ns")) == (1_700_000_001, 987_654_321)
    assert [tree.get(path, "mode") for path in (b"suid", b"all", b"odd")] == [0o4755, 0o7777, 0o644]
    assert (tree.get(b"zero", "size"), tree.get(b"zero", "aux")) == (0, NO_DATA)
    assert (tree.get(b"l", "size"), tree.toc.target(tree[b"l"]), tree.get(b"l", "mode")) == (3, b"abc", 0o777)


def test_devices() -> None:
    tree = Tree(header(b"c", b"3", device=(300, 70000)), header(b"b", b"4", device=(8, 1)), header(b"p", b"6", device=(8, 1)))
    assert [tree.get(path, "kind") for path in (b"c", b"b", b"p")] == [CHAR, BLOCK, FIFO]
    assert [tree.get(path, "aux") for path in (b"c", b"b", b"p")] == [300 << 32 | 70000, 8 << 32 | 1, 0]


def test_symlink_targets() -> None:
    refused(header(b"l", b"2"), match="l: a symlink's target is empty")
    refused(pax({b"linkpath": b"t" * 4096}), header(b"l", b"2"), match="l: a symlink's target")
    assert Tree(pax({b"linkpath": b"t" * 4095}), header(b"l", b"2")).get(b"l", "size") == 4095


# -- whiteouts


def test_whiteouts_are_character_devices_0_0() -> None:
    tree = Tree(file(b"a/.wh.gone", uid=5, gid=6, mode=0o644, mtime=9))
    assert tree.paths() == [b"a", b"a/gone"]
    assert (tree.get(b"a/gone", "kind"), tree.get(b"a/gone", "aux"), tree.get(b"a/gone", "flags")) == (CHAR, 0, FLAG_WHITEOUT)
    assert tree.attributes(b"a/gone") == (0, 5, 6, 0)
    assert Tree(header(b".wh.x", b"2", link=b"y")).get(b"x", "kind") == CHAR, "whatever type the marker has"
    assert Tree(header(b"dev", b"3", mode=0o600)).get(b"dev", "flags") == FLAG_WHITEOUT, "overlayfs sees no difference"


def test_opaque_directories() -> None:
    tree = Tree(directory(b"d", 0o700), file(b"d/.wh..wh..opq"), file(b"d/x"), file(b"e/.wh..wh..opq"), file(b".wh..wh..opq"))
    assert tree.paths() == [b"d", b"e", b"d/x"]
    assert [tree.get(path, "flags") for path in (b"", b"d", b"e")] == [FLAG_OPAQUE, FLAG_OPAQUE, FLAG_OPAQUE | FLAG_IMPLIED]
    tree = Tree(file(b"d/.wh..wh..opq"), directory(b"d", 0o711))
    assert tree.get(b"d", "flags") == FLAG_OPAQUE, "attributes that come later leave the mark"
    tree = Tree(file(b"d/.wh..wh..opq"), file(b"d"), directory(b"d"))
    assert tree.get(b"d", "flags") == 0, "a new directory"


def test_whiteout_and_entry_of_the_same_name() -> None:
    assert Tree(file(b".wh.f"), file(b"f", b"x")).data(b"f") == b"x", "whiteout first: replaced"
    tree = Tree(file(b".wh.d"), directory(b"d"), file(b"d/x"))
    assert (tree.get(b"d", "kind"), tree.get(b"d", "flags")) == (DIRECTORY, 0)
    refused(file(b"f", b"x"), file(b".wh.f"), match=".wh.f: a whiteout of something that the same layer has made")
    refused(file(b".wh.f"), file(b".wh.f"), match="a whiteout of something")
    refused(file(b".wh.d"), file(b"d/x"), match="d/x: its parent is not a directory")


def test_malformed_whiteouts() -> None:
    for name in (b".wh.", b"a/.wh.", b"a/.wh..", b"a/.wh..."):
        refused(file(name), match="a whiteout of nothing")


def test_other_aufs_names_are_whiteouts_of_what_follows() -> None:
    assert Tree(directory(b".wh..wh.plnk"), file(b".wh..wh.aufs"), file(b".wh..wh..tmp")).paths() == [
        b".wh..tmp",
        b".wh.aufs",
        b".wh.plnk",
    ]


def test_a_path_below_a_whiteout_name_is_a_path() -> None:
    assert Tree(file(b".wh.d/x")).paths() == [b".wh.d", b".wh.d/x"]


# -- hard links (nydus#552, PR#413, apple/container#1797, cvmfs PR#4286)


def test_kind_hard_links_share_one_inode() -> None:
    link = {"mode": 0o644, "mtime": 0}
    tree = Tree(file(b"d/a", b"data"), header(b"b", b"1", link=b"d/a", **link), header(b"e/c", b"1", link=b"./b", **link))
    assert tree.inode(b"d/a") == tree.inode(b"b") == tree.inode(b"e/c")
    assert [tree.get(path, "kind") for path in (b"b", b"d/a", b"e/c")] == [FILE, HARDLINK, HARDLINK], (
        "the first entry is the file"
    )
    assert tree.data(b"e/c") == b"data"
    e = tree.toc.entries
    for column in (e.mode, e.uid, e.gid, e.mtime, e.size, e.xattr_set, e.flags):
        assert column[tree[b"e/c"]] == 0


def test_kind_hard_link_with_missing_parents() -> None:
    tree = Tree(file(b"f", b"x"), header(b"new/dir/l", b"1", link=b"f"))
    assert tree.data(b"new/dir/l") == b"x"
    assert tree.get(b"new/dir", "flags") == FLAG_IMPLIED


def test_kind_hard_link_to_a_lower_layer_is_refused() -> None:
    refused(header(b"l", b"1", link=b"lower/file"), match="l: a hard link to lower/file, which this layer does not hold")
    refused(directory(b"d"), header(b"l", b"1", link=b"d"), match="l: a hard link to a directory")
    for root in (b"", b"/", b".", b"d/..", b"../"):
        refused(directory(b"d"), header(b"l", b"1", link=root), match="l: a hard link to a directory")
    refused(file(b"f"), header(b"f", b"1", link=b"f"), match="f: a hard link to f, which")


def test_a_link_header_changes_the_shared_inode() -> None:
    records = {b"SCHILY.xattr.user.b": b"2"}
    tree = Tree(
        xattr(b"user.a", b"1"), file(b"f", b"x", mode=0o4755, uid=1), pax(records),
        header(b"l", b"1", link=b"f", mode=0o600, uid=7, gid=8, mtime=9),
    )  # fmt: skip
    assert tree.attributes(b"f") == (0o600, 7, 8, 9)
    assert tree.xattrs(b"f") == {b"user.a": b"1", b"user.b": b"2"}


def test_chown_drops_capabilities() -> None:
    tree = Tree(xattr(b"security.capability", CAPABILITY), file(b"f"), header(b"l", b"1", link=b"f"))
    assert tree.xattrs(b"f") == {}
    both = xattr(b"security.capability", CAPABILITY)
    assert Tree(both, file(b"f"), both, header(b"l", b"1", link=b"f")).xattrs(b"f") == {b"security.capability": CAPABILITY}
    first = xattr(b"security.capability", CAPABILITY)
    assert Tree(first, directory(b"d"), directory(b"d")).xattrs(b"d") == {b"security.capability": CAPABILITY}, (
        "but not from directories"
    )


def test_links_to_symlinks_and_devices() -> None:
    tree = Tree(header(b"s", b"2", link=b"t"), header(b"l", b"1", link=b"s", mode=0o600, uid=4))
    assert tree.get(b"l", "kind") == SYMLINK
    assert tree.get(b"s", "kind") == HARDLINK
    assert tree.attributes(b"s") == (0o777, 4, 0, 0)
    tree = Tree(header(b"z", b"3", device=(1, 3)), header(b"a", b"1", link=b"z", mode=0o666))
    assert (tree.get(b"a", "kind"), tree.get(b"a", "aux")) == (CHAR, 1 << 32 | 3)
    tree = Tree(file(b".wh.w"), header(b"v", b"1", link=b"w"))
    assert [tree.get(path, "flags") for path in (b"v", b"w")] == [FLAG_WHITEOUT, FLAG_WHITEOUT]


def test_a_link_survives_what_it_was_linked_to() -> None:
    tree = Tree(file(b"f", b"old"), header(b"l", b"1", link=b"f"), file(b"f", b"new"))
    assert (tree.data(b"l"), tree.data(b"f")) == (b"old", b"new")
    assert (tree.get(b"l", "kind"), tree.get(b"f", "kind")) == (FILE, FILE)
    tree = Tree(file(b"d/f", b"old"), header(b"l", b"1", link=b"d/f"), file(b"d", b"x"))
    assert tree.data(b"l") == b"old"


def test_link_targets_go_through_symlinked_parents_but_are_not_followed() -> None:
    tree = Tree(file(b"usr/bin/x", b"1"), header(b"bin", b"2", link=b"usr/bin"), header(b"l", b"1", link=b"bin/x"))
    assert tree.inode(b"l") == tree.inode(b"usr/bin/x")


# -- symlinked parents


def test_parents_are_resolved_through_symlinks_of_the_layer() -> None:
    tree = Tree(header(b"lib", b"2", link=b"usr/lib"), file(b"lib/x", b"1"), directory(b"usr/lib", 0o711), file(b"lib/d/y"))
    assert tree.paths() == [b"lib", b"usr", b"usr/lib", b"usr/lib/d", b"usr/lib/x", b"usr/lib/d/y"]
    tree = Tree(header(b"a", b"2", link=b"/b"), header(b"b", b"2", link=b"../../c"), file(b"a/x"))
    assert tree.paths() == [b"a", b"b", b"c", b"c/x"], "bounded by the root"
    tree = Tree(directory(b"d"), header(b"d/l", b"2", link=b"../e"), file(b"d/l/x"))
    assert b"e/x" in tree.paths()


def test_a_replaced_symlink_leads_nowhere_any_more() -> None:
    tree = Tree(
        header(b"l", b"2", link=b"a"), file(b"l/x"), header(b"l", b"2", link=b"b"), file(b"l/y"), directory(b"l"), file(b"l/z")
    )
    assert tree.paths() == [b"a", b"b", b"l", b"a/x", b"b/y", b"l/z"]


def test_symlinks_in_circles() -> None:
    refused(header(b"a", b"2", link=b"b"), header(b"b", b"2", link=b"a"), file(b"a/x"), match="a/x: too many symlinks")
    refused(header(b"a", b"2", link=b"a"), file(b"a/x"), match="a/x: too many symlinks")
    refused(file(b"f"), header(b"l", b"2", link=b"f"), file(b"l/x"), match="l/x: its parent is not a directory")


def test_a_global_header_is_unpacked_as_containerd_unpacks_it() -> None:
    tree = Tree(
        file(b"a/f"), file(b"g"), pax({b"comment": b"x"}, b"g", name=b"tmp/GlobalHead.1"), pax({b"c": b"x"}, b"g", name=b"g")
    )
    assert tree.paths() == [b"a", b"tmp", b"a/f"]
    assert Tree(pax({b"path": b"n" * 300}, b"g")).paths() == []


# -- extended attributes


def test_which_xattrs_are_kept() -> None:
    records = {
        b"SCHILY.xattr.user.a": b"1", b"SCHILY.xattr.security.foo": b"\0\xff", b"SCHILY.xattr.trusted.t": b"3",
        b"SCHILY.xattr.trusted.overlay.opaque": b"y", b"SCHILY.xattr.other.x": b"4", b"SCHILY.xattr.noname": b"5",
        b"SCHILY.xattr.system.foo": b"6", b"SCHILY.xattr.user.empty": b"",
    }  # fmt: skip
    tree = Tree(
        pax(records),
        file(b"f"),
        pax(records),
        directory(b"d"),
        pax(records),
        header(b"l", b"2", link=b"t"),
        pax(records),
        header(b"p", b"6"),
    )
    usual = {b"user.a": b"1", b"security.foo": b"\0\xff", b"user.empty": b""}
    assert tree.xattrs(b"f") == tree.xattrs(b"d") == usual
    assert tree.xattrs(b"l") == tree.xattrs(b"p") == {b"security.foo": b"\0\xff"}, "user.* is for files and directories"
    assert len(tree.toc.xattrs) == 2, "equal sets are one"
    assert tree.get(b"d", "flags") == 0, "trusted.* from an archive is ignored"


def test_xattrs_that_setxattr_would_refuse() -> None:
    refused(xattr(b"security.capability", b"bad"), file(b"f"), match="f: a malformed security.capability")
    refused(xattr(b"user."), file(b"f"), match="f: an extended attribute named user.")
    refused(xattr(b""), file(b"f"), match="f: an extended attribute with a name of 0 bytes")
    refused(xattr(b"user." + b"n" * 251), file(b"f"), match="f: an extended attribute with a name of 256 bytes")
    refused(xattr(b"user.v", bytes(65_537)), file(b"f"), match="f: extended attribute user.v has 65537 bytes")
    refused(xattr(b"system.posix_acl_access"), file(b"f"), match="f: a POSIX ACL", error=UnsupportedError)
    assert Tree(xattr(b"security.capability", CAPABILITY), file(b"f")).xattrs(b"f") == {b"security.capability": CAPABILITY}
    assert Tree(xattr(b"user." + b"n" * 250), file(b"f")).xattrs(b"f") == {b"user." + b"n" * 250: b"v"}


# -- sparse files


def test_sparse_files() -> None:
    records = {b"GNU.sparse.major": b"0", b"GNU.sparse.minor": b"1", b"GNU.sparse.numblocks": b"2", b"GNU.sparse.size": b"5000"}
    records[b"GNU.sparse.map"] = b"512,512,4096,512"
    tree = Tree(file(b"a", b"x"), pax(records), file(b"s", b"a" * 512 + b"b" * 512), header(b"z", b"1", link=b"s"))
    assert tree.get(b"s", "flags") == FLAG_SPARSE
    assert tree.data(b"z") == bytes(512) + b"a" * 512 + bytes(3072) + b"b" * 512 + bytes(392)
    assert tree.toc.sparse.entry.tolist() == [tree[b"s"]] * 2
    with pytest.raises(LimitError, match="pieces of sparse files"):
        Tree(*(pax(records) + file(b"%d" % n, bytes(1024)) for n in range(3)), limits=Limits(max_sparse_chunks=5))


# -- against a model

NAMES = st.sampled_from([b"a", b"b", b"a/a", b"a/b", b"b/a", b"a/b/c", b"b/b/a"])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(NAMES, st.sampled_from("0556"), st.integers(0, 7)), max_size=20))
def test_a_model_of_replacing(steps: list[tuple[bytes, str, int]]) -> None:
    model: dict[bytes, tuple[str, int]] = {}
    members = []
    for name, typeflag, mode in steps:
        members.append(header(name, typeflag.encode(), mode=mode))
        ancestors = [name[:at] for at in range(len(name)) if name[at : at + 1] == b"/"]
        if any(model.get(path, ("5", 0))[0] != "5" for path in ancestors):
            refused(*members, match="parent is not a directory")
            return
        for path in ancestors:
            model.setdefault(path, ("5", 0o755))
        if typeflag != "5" or model.get(name, ("", 0))[0] != "5":
            model = {path: value for path, value in model.items() if path != name and not path.startswith(name + b"/")}
        model[name] = (typeflag, mode)
    named = [name for name, typeflag, _ in steps if typeflag == "5"]
    if any(name not in model for name in named):
        with pytest.raises(FormatError):
            Tree(*members)
        return
    tree = Tree(*members)
    assert set(tree.paths()) == set(model)
    kinds = {"0": FILE, "5": DIRECTORY, "6": FIFO}
    for path, (typeflag, mode) in model.items():
        assert (tree.get(path, "kind"), tree.get(path, "mode")) == (kinds[typeflag], mode)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(
            st.binary(min_size=1, max_size=6).filter(lambda n: not {0, 47} & {*n} and n not in (b".", b"..")),
            min_size=1,
            max_size=4,
        )
    )
)
def test_columns_are_what_the_toc_promises(paths: list[list[bytes]]) -> None:
    names = [b"/".join(path) for path in paths if not any(part.startswith(b".wh.") for part in path)]
    tree = Tree(*(pax({b"path": name}) + directory(b"d") for name in names if name))
    e = tree.toc.entries
    assert np.all(np.diff(e.parent.astype(np.int64)) >= 0)
    assert all(e.kind[parent] == DIRECTORY for parent in e.parent)
    keys = [(int(e.parent[entry]), tree.toc.name(entry)) for entry in range(1, len(e))]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)
    assert {tree.toc.path(entry) for entry in range(1, len(e))} >= set(names)
    assert b"".join(tree.toc.name(entry) for entry in range(len(e))) == tree.toc.pool


def test_scan_tar_takes_files_and_functions() -> None:
    stream = file(b"a", b"x" * 3000) + END
    by_file, by_function = scan_tar(io.BytesIO(stream)), scan_tar(io.BytesIO(stream).read, chunk=100)
    assert by_file.stream_size == by_function.stream_size == len(stream)
    assert by_file.payloads == by_function.payloads == [(512, 3000)]
    assert by_file.columns.pool == by_function.columns.pool


def test_columns_have_the_documented_types() -> None:
    columns = scan_tar(io.BytesIO(xattr(b"user.a") + file(b"f") + END)).columns
    expected = {
        "parent": "u4", "name_off": "u4", "name_len": "u2", "kind": "u1", "flags": "u1", "mode": "u2", "uid": "u4", "gid": "u4",
        "mtime": "i8", "mtime_ns": "u4", "size": "u8", "aux": "u8", "xattr_set": "u4",
    }  # fmt: skip
    for name, dtype in expected.items():
        assert getattr(columns.entries, name).dtype == np.dtype(dtype), name
    for name in ("first", "name_off", "name_len", "value_off", "value_len"):
        assert getattr(columns.xattrs, name).dtype == np.dtype("u4"), name
    for name, dtype in (("entry", "u4"), ("logical", "u8"), ("stream", "u8"), ("length", "u8")):
        assert getattr(columns.sparse, name).dtype == np.dtype(dtype), name
    assert bytes(1024) == rawtar.END


def test_a_short_pass_of_the_fuzz_target() -> None:
    load("fuzz_tarscan").run(3000, seed=7)
