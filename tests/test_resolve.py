"""layer/resolve.py: paths within the tree, followed as continuity's fs.RootPath follows them on disk."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weenv.core.errors import FormatError, LimitError
from weenv.layer.resolve import Directory, Inode, Resolver, clean, cleaned, symlink_target
from weenv.layer.tarscan import Member
from weenv.layer.toc import FILE, HARDLINK, NO_DATA, SYMLINK


def member(name: bytes = b"m", kind: int = FILE, link: bytes = b"") -> Member:
    return Member(name, kind, 0o644, 0, 0, 0, 0, 0, link, 0, None, NO_DATA, None)


def tree(**entries: bytes | None) -> Resolver:
    """Directories and symlinks by path, ``__`` for a slash; None is a directory."""
    root = Directory(None, b"", 255, 0)
    for key, target in entries.items():
        *parents, base = (part.encode() for part in key.split("__"))
        at = root
        for part in parents:
            child = at.children.setdefault(part, Directory(at, part, 255, 0))
            assert isinstance(child, Directory)
            at = child
        at.children[base] = Directory(at, base, 255, 0) if target is None else member(base, SYMLINK, target)
    return Resolver(root)


def path(resolver: Resolver, text: bytes) -> bytes:
    return b"/".join(resolver.root_path(text, member()))


@pytest.mark.parametrize(
    ("text", "parts"),
    [(b"", b""), (b"/", b""), (b"./a//b/.", b"a b"), (b"a/../b", b"b"), (b"../../a/..", b""), (b"/../a", b"a")],
)
def test_clean(text: bytes, parts: bytes) -> None:
    assert clean(text) == parts.split()


@pytest.mark.parametrize(
    ("text", "result"), [(b"./a", b"a"), (b"/a/.", b"/a"), (b"../a", b"/a"), (b"a/../../b", b"/b"), (b"a/../b", b"b")]
)
def test_cleaned(text: bytes, result: bytes) -> None:
    assert cleaned(text) == result


def test_missing_components_are_taken_as_they_are() -> None:
    assert path(tree(a=None), b"/a/b/../c") == b"a/c"
    assert path(tree(), b"/../x") == b"x"


def test_relative_and_absolute_targets_stay_in_the_root() -> None:
    resolver = tree(a__up=b"../../../b", a__abs=b"/c/d", a__in=b"e", e=b"f")
    assert path(resolver, b"/a/up/x") == b"b/x"
    assert path(resolver, b"/a/abs") == b"c/d"
    assert path(resolver, b"/a/in/x") == b"a/e/x"
    assert path(resolver, b"e/x") == b"f/x"


def test_a_leading_symlink_of_a_relative_path_is_not_cleaned() -> None:
    """q -> d/l/../r with d/l -> ../e: ".." after the link where the path is relative, before it where it is absolute."""
    resolver = tree(q=b"d/l/../r", d__l=b"../e/f")
    assert path(resolver, b"q") == b"e/r"
    assert path(resolver, b"/q") == b"d/r"


def test_circles_and_long_chains() -> None:
    with pytest.raises(FormatError, match="m: too many symlinks"):
        path(tree(a=b"b", b=b"a"), b"/a/x")
    chain = {f"l{number}": b"l%d" % (number + 1) for number in range(200)}
    assert path(tree(**chain), b"/l0") == b"l200"
    chain = {f"l{number}": b"l%d" % (number + 1) for number in range(300)}
    with pytest.raises(FormatError, match="m: too many symlinks"):
        path(tree(**chain), b"/l0")


def test_a_file_is_no_directory() -> None:
    resolver = tree(a=None)
    root = resolver._root
    root.children[b"f"] = Inode(member(b"f"))
    with pytest.raises(FormatError, match="m: a file is used as a directory"):
        path(resolver, b"/f/x/y")
    assert path(resolver, b"/f") == b"f"


def test_link_targets() -> None:
    resolver = tree(usr__bin=None, bin=b"usr/bin")
    for text in (b"bin/x", b"./bin/x", b"/bin/x", b"usr/../bin/x", b"bin//x"):
        directory, base = resolver.link_target(member(kind=HARDLINK, link=text))
        assert directory is not None
        assert (directory.base, base) == (b"bin", b"x")
    assert resolver.link_target(member(kind=HARDLINK, link=b"missing/x")) == (None, b"x")
    assert resolver.link_target(member(kind=HARDLINK, link=b"bin"))[1] == b"bin", "the target itself is not followed"


def test_symlinks_cannot_make_it_slow() -> None:
    resolver = tree(a=b"b", b__l=b"../a/./././.")
    resolver._steps //= 100
    with pytest.raises(LimitError, match="m: its path is too long"):
        for _ in range(20_000):
            path(resolver, b"a/l/" * 1000)
    with pytest.raises(LimitError, match="m: its path is too long"):
        path(tree(a=b"b" * 200), b"a/" + b"x/" * 3000)
    long = b"a/" * 1_000_000
    with pytest.raises(LimitError, match="m: its path is too long"):
        tree().link_target(member(kind=HARDLINK, link=long + b"x"))


def test_symlink_target() -> None:
    link = member(kind=SYMLINK, link=b"t")
    assert symlink_target(link) == symlink_target(Inode(link)) == b"t"
    assert symlink_target(member()) is symlink_target(None) is None


NAMES = st.sampled_from(["a", "b", "c"])
TARGETS = st.lists(st.sampled_from([b"a", b"b", b"c", b"..", b".", b""]), min_size=1, max_size=4).map(b"/".join).filter(bool)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(NAMES | st.tuples(NAMES, NAMES).map("__".join), TARGETS), TARGETS)
def test_every_answer_is_a_path_without_symlinks(links: dict[str, bytes], text: bytes) -> None:
    nested = {key: target for key, target in links.items() if "__" in key}
    flat = {
        key: target
        for key, target in links.items()
        if "__" not in key and not any(other.startswith(key + "_") for other in nested)
    }
    resolver = tree(**flat, **nested)
    try:
        parts = resolver.root_path(text, member())
    except FormatError as error:
        assert "too many symlinks" in str(error)
        return
    assert not {b"", b".", b".."} & {*parts}
    node: object = resolver._root
    for part in parts:
        node = node.children.get(part) if isinstance(node, Directory) else None
        assert not isinstance(node, Member), "a symlink is left in the path"
