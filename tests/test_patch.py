"""Patches: what git and GNU patch make of them is what we make of them; what is malformed or hostile is refused."""

from __future__ import annotations

import base64
import os
import random
import subprocess
import tempfile
import time
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weenv.core.errors import FormatError, LimitError
from weenv.environment.mutate.budget import Budget
from weenv.environment.mutate.delta import apply_delta, decode_line, inflate, object_name
from weenv.environment.mutate.patch import PatchError, _Parser, parse_patch
from weenv.environment.mutate.patchapply import Content, apply_hunks, apply_patches, sources

ENV = {
    "PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C",
    "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b",
}  # fmt: skip


def run(cwd: Path | str, *argv: str, data: bytes = b"", ok: tuple[int, ...] = (0,)) -> bytes:
    done = subprocess.run(argv, cwd=cwd, input=data, capture_output=True, env=ENV)
    assert done.returncode in ok, done.stderr
    return done.stdout


def tree(root: Path | str) -> dict[bytes, Content]:
    """All files below ``root``."""
    found: dict[bytes, Content] = {}
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name != ".git"]
        for name in files:
            path = os.path.join(folder, name)
            relative = os.fsencode(os.path.relpath(path, root))
            if os.path.islink(path):
                found[relative] = Content(os.fsencode(os.readlink(path)), symlink=True)
            else:
                found[relative] = Content(Path(path).read_bytes(), executable=bool(os.stat(path).st_mode & 0o100))
    return found


def write(root: Path | str, files: dict[bytes, Content]) -> None:
    for name, content in files.items():
        path = os.path.join(os.fsencode(root), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if content.symlink:
            os.symlink(content.data, path)
            continue
        with open(path, "wb") as file:
            file.write(content.data)
        os.chmod(path, 0o755 if content.executable else 0o644)


def applied(patch: bytes, before: dict[bytes, Content], strip: int = 1) -> dict[bytes, Content]:
    parsed = parse_patch(patch, strip)
    after = dict(before)
    for name, content in apply_patches(parsed, {name: before.get(name) for name in sources(parsed)}).items():
        if content is None:
            after.pop(name, None)
        else:
            after[name] = content
    return after


# -- against git: whole trees with every kind of change

NAMES = [b"a.py", b"src/b.c", b"src/deep/er/c", b"d with space", b"e\"quote'", "f-\u00fc".encode(), b"g\ttab", b"h\\back", b"z"]
LINES = st.sampled_from(
    [b"\n", b"x\n", b"y\n", b"  indented\n", b"}\n", b"- minus\n", b"+ plus\n", b"cr\r\n", b"lone\rcr\n", b"\\ no\n"]
)
TEXT = st.builds(
    lambda lines, tail: b"".join(lines) + tail, st.lists(LINES, max_size=30), st.sampled_from([b"", b"", b"no newline"])
)
BINARY = st.builds(lambda n, seed: b"\0" + random.Random(seed).randbytes(n), st.integers(1, 3000), st.integers(0, 9))
CONTENT = st.one_of(
    st.builds(Content, TEXT, st.just(False), st.booleans()),
    st.builds(Content, TEXT, st.just(False), st.booleans()),
    st.builds(Content, BINARY),
    st.builds(Content, st.sampled_from([b"a.py", b"../x", b"nowhere"]), st.just(True)),
)


@st.composite
def edits(draw: st.DrawFn) -> tuple[dict[bytes, Content], dict[bytes, Content]]:
    """A tree, and the same with files edited, added, deleted, moved, copied and retyped."""
    before = {name: draw(CONTENT) for name in draw(st.lists(st.sampled_from(NAMES), max_size=5, unique=True))}
    after = dict(before)
    for name in list(before):
        what = draw(st.sampled_from(["keep", "edit", "edit", "delete", "move", "mode", "replace"]))
        content = before[name]
        if what == "edit" and not content.symlink:
            lines = content.data.splitlines(keepends=True)
            for _ in range(draw(st.integers(1, 3))):
                at = draw(st.integers(0, len(lines)))
                lines[at : at + draw(st.integers(0, 2))] = draw(st.lists(LINES, max_size=2))
            after[name] = Content(b"".join(lines), False, content.executable)
        elif what == "delete":
            del after[name]
        elif what == "move":
            free = [other for other in NAMES if other not in after]
            if free:
                after[draw(st.sampled_from(free))] = after.pop(name)
        elif what == "mode" and not content.symlink:
            after[name] = Content(content.data, False, not content.executable)
        elif what == "replace":
            after[name] = draw(CONTENT)
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=2, unique=True)):
        after.setdefault(name, draw(CONTENT))
    return before, after


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(edits(), st.integers(0, 4), st.booleans())
def test_what_git_diff_writes_gives_the_tree_that_it_was_made_from(
    change: tuple[dict[bytes, Content], dict[bytes, Content]], context: int, renames: bool
) -> None:
    before, after = change
    with tempfile.TemporaryDirectory() as root:
        write(root, before)
        run(root, "git", "init", "-q", ".")
        run(root, "git", "add", "-A")
        run(root, "git", "commit", "-q", "--allow-empty", "-m", "before")
        for name in before:
            os.unlink(os.path.join(os.fsencode(root), name))
        write(root, after)
        run(root, "git", "add", "-A")
        flags = ["-M", "-C", "--find-copies-harder"] if renames else ["--no-renames"]
        patch = run(root, "git", "diff", "--cached", "--binary", "--full-index", f"-U{context}", *flags, "HEAD")
    if before == after:
        with pytest.raises(PatchError, match="no diff"):
            parse_patch(patch)
        return
    if context == 0:  # git itself wants --unidiff-zero for these
        try:
            assert applied(patch, before) == after
        except PatchError as error:
            assert "does not apply" in str(error)
    else:
        assert applied(patch, before) == after


def test_without_context_a_hunk_stays_where_it_says() -> None:
    patch = b"--- a/f\n+++ b/f\n@@ -2 +2 @@\n-\n+x\n"
    assert applied(patch, {b"f": Content(b"\n\n\n")}) == {b"f": Content(b"\nx\n\n")}
    patch = b"--- a/f\n+++ b/f\n@@ -2 +1,0 @@\n-a\n"
    assert applied(patch, {b"f": Content(b"b\na\na\nb\na\n")}) == {b"f": Content(b"b\na\nb\na\n")}


# -- against git apply and patch: plain diffs of a file that has moved on


@st.composite
def drifted(draw: st.DrawFn) -> tuple[bytes, bytes, bytes]:
    """(old, new, current): a diff from old to new is to be applied to current, which is old with lines elsewhere changed."""
    old = [
        b"%s %d\n" % (draw(st.sampled_from([b"a", b"b", b"c"])), n // draw(st.sampled_from([1, 3])))
        for n in range(draw(st.integers(0, 40)))
    ]
    new = list(old)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(new)))
        new[at : at + draw(st.integers(0, 2))] = draw(st.lists(st.sampled_from([b"n\n", b"a 0\n", b"\n"]), max_size=3))
    current = list(old)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.sampled_from([0, len(current) // 2, len(current)]))
        current[at : at + draw(st.integers(0, 1))] = draw(st.lists(st.sampled_from([b"m\n", b"a 0\n", b"b 1\n"]), max_size=4))
    tails = [b"".join(lines) + draw(st.sampled_from([b"", b"", b"end"])) for lines in (old, new)]
    return tails[0], tails[1], b"".join(current) + (b"end" if tails[0].endswith(b"end") else b"")


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drifted(), st.integers(1, 4))
def test_offsets_are_found_as_git_apply_finds_them_and_failures_are_its_failures(
    files: tuple[bytes, bytes, bytes], context: int
) -> None:
    old, new, current = files
    if old == new:
        return
    with tempfile.TemporaryDirectory() as root:
        for name, data in (("old", old), ("new", new), ("file", current)):
            Path(root, name).write_bytes(data)
        patch = run(root, "diff", f"-U{context}", "--label", "a/file", "--label", "b/file", "old", "new", ok=(1,))
        done = subprocess.run(
            ["git", "apply", "-p1", "--whitespace=nowarn", "-"], cwd=root, input=patch, capture_output=True,
            env={**ENV, "GIT_CEILING_DIRECTORIES": os.path.dirname(root)},
        )  # fmt: skip
        theirs = Path(root, "file").read_bytes() if done.returncode == 0 else None
    try:
        ours = applied(patch, {b"file": Content(current)})[b"file"].data
    except PatchError as error:
        assert theirs is None, f"{error} {error.hint}"
        failed = int(str(error).partition("hunk #")[2].split()[0])
        assert 1 <= failed <= patch.count(b"\n@@ ")
        return
    assert ours == theirs


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drifted())
def test_what_applies_in_place_is_what_gnu_patch_makes(files: tuple[bytes, bytes, bytes]) -> None:
    old, new, _ = files
    if old == new:
        return
    with tempfile.TemporaryDirectory() as root:
        for name, data in (("old", old), ("new", new), ("file", old)):
            Path(root, name).write_bytes(data)
        patch = run(root, "diff", "-u", "--label", "a/file", "--label", "b/file", "old", "new", ok=(1,))
        run(root, "patch", "-p1", "-F0", "--binary", "-s", data=patch)
        theirs = Path(root, "file").read_bytes()
    assert applied(patch, {b"file": Content(old)})[b"file"].data == theirs == new


def test_names_and_times_as_diff_writes_them(tmp_path: Path) -> None:
    for side, files in (
        ("a", {"same": "1\n", "gone": "x\n", "sp ace": "old\n"}),
        ("b", {"same": "2\n", "made": "y\n", "sp ace": "new\n"}),
    ):
        for name, data in files.items():
            (tmp_path / side).mkdir(exist_ok=True)
            (tmp_path / side / name).write_text(data)
    patch = run(tmp_path, "diff", "-urN", "a", "b", ok=(1,))
    before = tree(tmp_path / "a")
    assert applied(patch, before) == tree(tmp_path / "b")
    run(tmp_path / "a", "patch", "-p1", "-s", data=patch)
    assert tree(tmp_path / "a") == tree(tmp_path / "b"), "GNU patch agrees"


def test_renames_in_a_circle_take_their_sources_as_they_were() -> None:
    patch = (
        b"diff --git a/x b/y\nsimilarity index 100%\nrename from x\nrename to y\n"
        b"diff --git a/y b/x\nsimilarity index 100%\nrename from y\nrename to x\n"
    )
    assert applied(patch, {b"x": Content(b"1"), b"y": Content(b"2")}) == {b"x": Content(b"2"), b"y": Content(b"1")}


def test_a_patch_in_a_mail_with_carriage_returns_in_its_headers_and_its_last_blank_line_lost() -> None:
    patch = b"From: x\n\nSubject\n---\n f | 2 +-\n\n--- a/f\r\n+++ b/f\r\n@@ -1,3 +1,3 @@ def g():\r\n-a\r\n+b\r\n \r\n"
    assert applied(patch + b" c\r\n", {b"f": Content(b"a\r\n\r\nc\r\n")})[b"f"].data == b"b\r\n\r\nc\r\n"
    assert applied(b"--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n-a\n+b\n c", {b"f": Content(b"a\nc\n\n")})[b"f"].data == b"b\nc\n\n"


# -- what is refused

HUNK = b"@@ -1 +1 @@\n-a\n+b\n"


@pytest.mark.parametrize(
    ("patch", "text"),
    [
        (b"", "no diff"),
        (b"nothing here\n", "no diff"),
        (b"@@ -1 +1 @@\n-a\n+b\n", "hunk without a file"),
        (b"--- a/../f\n+++ b/../f\n" + HUNK, "leaves the tree"),
        (b"--- a//etc/passwd\n+++ b//../etc/passwd\n" + HUNK, "leaves the tree"),
        (b"--- f\n+++ f\n" + HUNK, "no 1 components"),
        (b"--- a/.git/config\n+++ b/.git/config\n" + HUNK, ".git directory"),
        (b"--- a/x/.GIT/hooks/h\n+++ b/x/.GIT/hooks/h\n" + HUNK, ".git directory"),
        (b"--- /dev/null\n+++ /dev/null\n" + HUNK, "both names"),
        (b'--- "a/f\n+++ "b/f\n' + HUNK, "not closed"),
        (b"--- a/f\n+++ b/f\n@@ -1,2 +1 @@\n-a\n+b\n", "ends within hunk #1"),
        (b"--- a/f\n+++ b/f\n@@ -1,1 +1,1 @@\n-a\n-c\n+b\n", "more lines"),
        (b"--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n-a\n+b\n*c\n", "no line of a hunk"),
        (b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n a\n", "changes nothing"),
        (b"diff --git a/f b/f\nindex 1111111..2222222 100644\nBinary files a/f and b/f differ\n", "without its data"),
        (b"diff --git a/f b/f\nold mode 100644\nnew mode 160000\n", "submodule"),
        (b"diff --git a/f b/f\nold mode 100644\nnew mode 100600\n", "unknown file mode"),
        (b"diff --git a/f b/g\nrename from f\n", "without both names"),
        (b"diff --git a/f b/f\nrename from ../f\nrename to g\n", "leaves the tree"),
        (b"diff --git a/f b/g\n--- a/f\n+++ b/g\n" + HUNK, "no rename"),
        (b"diff --git a/f b/f\nGIT binary patch\nliteral 99999999999\n", "neither literal"),
        (b"diff --git a/f b/f\nGIT binary patch\nliteral 5\nzzz\n\n", "wrong length"),
    ],
)  # fmt: skip
def test_malformed_or_hostile(patch: bytes, text: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_patch(patch)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("patch", "before", "text"),
    [
        (
            b"--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n-a\n+b\n 1\n@@ -5 +5 @@\n-q\n+r\n",
            b"a\n1\n2\n3\nz\n",
            "f: hunk #2 (line 7 of the patch): does not apply",
        ),
        (b"--- a/g\n+++ b/g\n" + HUNK, b"a\n", "g: does not exist"),
        (b"--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+a\n", b"a\n", "f: exists already"),
        (b"--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n", b"a\nmore\n", "f: hunk #1"),
        (
            b"diff --git a/f b/g\nrename from f\nrename to f2\ndiff --git a/f b/f\n--- a/f\n+++ b/f\n" + HUNK,
            b"x\n",
            "does not",
        ),
    ],
)  # fmt: skip
def test_what_does_not_apply_says_which_hunk_of_which_file(patch: bytes, before: bytes, text: str) -> None:
    with pytest.raises(PatchError) as caught:
        applied(patch, {b"f": Content(before)})
    assert text in str(caught.value)


def test_the_hint_shows_what_stands_there() -> None:
    with pytest.raises(PatchError) as caught:
        applied(b"--- a/f\n+++ b/f\n@@ -2,2 +2,2 @@\n a\n-b\n+c\n", {b"f": Content(b"1\na\nX\n3\n")})
    assert caught.value.hint == "line 3 is 'X', expected 'b'"


def test_a_file_is_not_searched_for_ever() -> None:
    hunks = parse_patch(b"--- a/f\n+++ b/f\n" + b"".join(b"@@ -9,3 +9,3 @@\n q\n-a\n+b\n q\n" for _ in range(3)))[0].hunks
    with pytest.raises(FormatError):
        apply_hunks(b"q\na\nz\n" * 20_000, hunks * 1000, b"f")


def packed(kind: bytes, data: bytes) -> bytes:
    """``data`` as git's binary patches have it."""
    squeezed = zlib.compress(data, 9)
    rows = [squeezed[at : at + 52] for at in range(0, len(squeezed), 52)]
    lines = [bytes([len(x) + (64 if len(x) < 27 else 70)]) + base64.b85encode(x + b"\0" * (-len(x) % 4)) for x in rows]
    return b"GIT binary patch\n%s %d\n" % (kind, len(data)) + b"\n".join(lines) + b"\n\n"


def literal(name: bytes, data: bytes) -> bytes:
    ids = b"%s..%s" % (b"0" * 40, object_name(b"blob", data).encode())
    return b"diff --git a/%s b/%s\nnew file mode 100644\nindex %s\n" % (name, name, ids) + packed(b"literal", data)


def delta() -> tuple[bytes, dict[bytes, Content | None]]:
    """Twelve bytes for 16 MiB less one: copy all that is there."""
    base = b"\0" * 0xFFFFFF
    ids = b"..".join([object_name(b"blob", base).encode()] * 2)
    text = packed(b"delta", b"\xff\xff\xff\x07\xff\xff\xff\x07" + b"\xf0\xff\xff\xff")
    return b"diff --git a/f b/f\nindex %s\n" % ids + text, {b"f": Content(base)}


def far(count: int) -> tuple[bytes, dict[bytes, Content | None]]:
    return b"--- a/f\n+++ b/f\n" + b"@@ -9,3 +9,3 @@\n q\n-a\n+b\n q\n" * count, {b"f": Content(b"q\na\nz\n" * 20_000)}


@pytest.mark.parametrize(
    ("patch", "before"),
    [
        (b"".join(literal(b"f%d" % number, b"\0" * (2 << 20)) for number in range(9)), {}),
        delta(),
        (b"diff --git a/f b/f\nold mode 100644\nnew mode 100755\n" * 9, {b"f": Content(b"x" * (2 << 20))}),
    ],
    ids=["literals", "delta", "one file often"],
)
def test_a_small_patch_does_not_ask_for_much(patch: bytes, before: dict[bytes, Content | None]) -> None:
    """Refused before it is there: the budget here is 16 MiB, that of a real one :data:`MAX_BYTES`."""
    tracemalloc.start()
    try:
        with pytest.raises(LimitError, match="too many bytes"):
            budget = Budget(16 << 20)
            parsed = parse_patch(patch, budget=budget)
            apply_patches(parsed, dict.fromkeys(sources(parsed)) | before, budget)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_searches_and_splices_are_counted_over_all_files() -> None:
    text, before = far(1)
    far_one = parse_patch(text)
    budget = Budget(steps=150_000)
    for _ in range(2):
        with pytest.raises(PatchError, match="does not apply"):
            apply_patches(far_one, before, budget)
    with pytest.raises(LimitError, match="too far"):
        apply_patches(far_one, before, budget)
    many = b"".join(b"@@ -5,0 +5,1 @@\n+x\n" for _ in range(1000))
    with pytest.raises(LimitError, match="too many"):
        apply_patches(parse_patch(b"--- a/f\n+++ b/f\n" + many), {b"f": Content(b"\n" * 100_000)}, Budget(steps=50_000))


@pytest.mark.parametrize("strip", [0, 1, 2, 3])
def test_a_header_of_any_length_is_cut_at_once(strip: int) -> None:
    """One line of a MiB, with as many places where it could be cut, and as many components."""
    for header in (b" " * (1 << 18) + b"/" * (3 << 18), b"/ " * (1 << 19), b"a/b " * (1 << 18)):
        took = time.process_time()
        with pytest.raises(PatchError):
            parse_patch(b"diff --git " + header + b"\nold mode 100644\nnew mode 100755\n", strip)
        assert time.process_time() - took < 20


@given(st.lists(st.sampled_from(["a", "b", " ", "/", "//", "a b"]), max_size=9).map("".join), st.integers(0, 3), st.data())
def test_names_in_a_header_are_found_wherever_they_can_be(name: str, strip: int, data: st.DataObject) -> None:
    """What :meth:`cut` finds by lengths is what trying every space finds."""
    heads = [data.draw(st.lists(st.sampled_from(["a", "bb", ""]), min_size=strip, max_size=strip)) for _ in range(2)]
    header = " ".join("/".join((*head, name)) for head in heads).encode()
    parser = _Parser(b"x", strip, Budget())
    cuts = [at for at, byte in enumerate(header) if byte == 0x20 and parser.same(header[:at], header[at + 1 :])]
    assert [parser.cut(header)] == (cuts or [None])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 3))
def test_any_bytes_are_a_patch_or_an_error(data: bytes, strip: int) -> None:
    prefix = [
        b"",
        b"diff --git a/f b/f\n",
        b"--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n",
        b"diff --git a/f b/f\nGIT binary patch\nliteral 3\n",
    ]
    for start in prefix:
        try:
            parse_patch(start + data, strip)
        except FormatError:
            continue


@pytest.mark.parametrize(
    "delta",
    [b"", b"\x03", b"\x03\x03\x80", b"\x03\x05\x90\x04", b"\x03\x03\x00", b"\x03\x03\x05ab", b"\x03\x01\x02ab", b"\x04\x00"],
)
def test_hostile_deltas(delta: bytes) -> None:
    with pytest.raises(FormatError):
        apply_delta(b"abc", delta, "x")


def test_hostile_inflation_and_lines() -> None:
    import zlib

    with pytest.raises(FormatError):
        inflate(zlib.compress(bytes(10_000_000)), 3, "x")
    with pytest.raises(FormatError):
        inflate(zlib.compress(b"abc") + b"trailing"[:0], 1 << 40, "x")
    for line in (b"", b"Z", b"A\xff\xff\xff\xff\xff", b"1abcde"):
        with pytest.raises(FormatError):
            decode_line(line, "x")
