"""Mutations as layers: what the stack shows with one on top is what the same change makes of the tree on a disk."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weenv.core.errors import FormatError, SourceError, StorageError
from weenv.environment.compose import StackedLayer
from weenv.environment.model import Mutation
from weenv.environment.mutate.cache import MutationStore
from weenv.environment.mutate.mutation import MutationError, canonical, layered, runs
from weenv.environment.mutate.mutator import Mutator
from weenv.layer.toc import CHAR, DIRECTORY, FILE, SYMLINK
from weenv.plugin.snapshotter.layerdir import LayerDirs
from weenv.registry.client import RegistryClient
from weenv.registry.groupref.model import LayerRef
from weenv_testkit.layers import make_tar
from weenv_testkit.stacks import Seen, Stack, Tree, merged, seen

LOWER: list[dict[str, Any]] = [
    {"name": "bin", "type": tarfile.SYMTYPE, "linkname": "usr/bin"},
    {"name": "usr/bin", "type": tarfile.DIRTYPE, "mode": 0o755, "mtime": 5},
    {"name": "usr/bin/tool", "data": b"#!/bin/sh\n", "mode": 0o4755, "mtime": 50},
    {"name": "testbed", "type": tarfile.DIRTYPE, "mode": 0o2775, "uid": 7, "gid": 8, "mtime": 60},
    {"name": "testbed/a.py", "data": b"one\ntwo\nthree\n", "mode": 0o664, "uid": 7, "gid": 8, "mtime": 100,
     "pax_headers": {"SCHILY.xattr.user.k": "v"}},
    {"name": "testbed/hard", "type": tarfile.LNKTYPE, "linkname": "testbed/a.py", "mode": 0o664,
     "uid": 7, "gid": 8, "mtime": 100},
    {"name": "testbed/link", "type": tarfile.SYMTYPE, "linkname": "a.py", "mtime": 1},
    {"name": "testbed/away", "type": tarfile.SYMTYPE, "linkname": "/usr/bin"},
    {"name": "testbed/pkg/mod.py", "data": b"x = 1\n" * 2000, "mtime": 200},
    {"name": "testbed/pkg/only/one.py", "data": b"1\n", "mtime": 200},
    {"name": "dev/null", "type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3, "mode": 0o666},
]  # fmt: skip
UPPER: list[dict[str, Any]] = [
    {"name": "testbed/pkg/up.py", "data": b"up\n", "mtime": 300},
    {"name": "usr/bin/.wh.nothing"},
]


class Made:
    """A stack with one mutation's layer on top."""

    def __init__(self, stack: Stack, mutator: Mutator, refs: tuple[LayerRef, ...], before: Tree, after: Tree) -> None:
        self.stack, self.mutator, self.refs, self.before, self.after = stack, mutator, refs, before, after

    @property
    def changed(self) -> dict[str, Seen | None]:
        paths = {*self.before, *self.after}
        return {
            "/" + b"/".join(path).decode(): self.after.get(path)
            for path in sorted(paths) if self.before.get(path) != self.after.get(path)
        }  # fmt: skip

    def members(self) -> list[str]:
        from weenv.layer.decode import file_reader, open_blob
        from weenv.layer.verify import parse_annotations

        descriptor = parse_annotations(self.refs[0].annotations)
        assert descriptor is not None
        with open(self.mutator.store.blob(self.refs[0].digest), "rb") as file:
            toc, reader = open_blob(file_reader(file), descriptor)
            data = b"".join(reader.stream())
            assert toc.diff_id == self.refs[0].diff_id
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            return tar.getnames()


async def mutate(directory: str, *mutations: Mutation, tars: tuple[Any, ...] = (LOWER, UPPER)) -> Made:
    stack = Stack(directory)
    for members in tars:
        stack.add(make_tar(members), target=1024, threads=1)
    root = os.path.join(directory, "root")
    async with RegistryClient() as client:
        mutator = Mutator(client, root)
        below = await mutator.view(stack.layers)
        before = await seen(below, lambda inode: mutator.read(below, stack.layers, inode))
        refs = await mutator.mutate(mutations, stack.layers)
        layers = [*stack.layers, *(StackedLayer(ref, f"oci:{root}/mutations", True) for ref in refs)]
        view = await mutator.view(layers)
        after = await seen(view, lambda inode: mutator.read(view, layers, inode))
    return Made(stack, mutator, refs, before, after)


PATCH = """--- a/a.py
+++ b/a.py
@@ -1,3 +1,3 @@
 one
-two
+TWO
 three
"""


async def test_a_patch_keeps_owner_mode_and_attributes_and_touches_nothing_else(tmp_path: Path) -> None:
    made = await mutate(str(tmp_path), Mutation(patch=PATCH, directory="/testbed"))
    assert made.changed == {"/testbed/a.py": Seen(FILE, 0o664, 7, 8, 301, b"one\nTWO\nthree\n")}
    assert made.members() == ["testbed", "testbed/a.py"], "parents with their attributes, no more"
    view = await made.mutator.view([*made.stack.layers, StackedLayer(made.refs[0], "mutations", True)])
    inode = view.at((b"testbed", b"a.py"))
    assert inode is not None and view.xattrs(inode) == {b"user.k": b"v"}
    assert made.after[b"testbed", b"hard"].content == b"one\ntwo\nthree\n", "its other name is another file now"
    assert made.refs[0].size < 2000


async def test_it_is_newer_than_all_below_for_make_and_python(tmp_path: Path) -> None:
    made = await mutate(str(tmp_path), Mutation(files={"/testbed/a.py": b"one\nTWO\nthree\n"}))
    assert made.after[b"testbed", b"a.py"].mtime > max(item.mtime for item in made.before.values())


async def test_files_are_made_and_replaced(tmp_path: Path) -> None:
    made = await mutate(
        str(tmp_path),
        Mutation(
            files={"/testbed/new/deep/f": b"1", "/bin/more": b"2", "/testbed/link": b"3", "/usr/bin/tool": b"4"}, mode=0o640
        ),
        Mutation(files={"/opt/x": b"5"}, owner=(1000, 1001)),
        Mutation(files={"/testbed/a.py": b"6"}),
    )
    assert made.changed == {
        "/testbed/new": Seen(DIRECTORY, 0o755, 7, 8, 301, b""),
        "/testbed/new/deep": Seen(DIRECTORY, 0o755, 7, 8, 301, b""),
        "/testbed/new/deep/f": Seen(FILE, 0o640, 7, 8, 301, b"1"),
        "/usr/bin/more": Seen(FILE, 0o640, 0, 0, 301, b"2"),
        "/testbed/link": Seen(FILE, 0o640, 7, 8, 301, b"3"),
        "/usr/bin/tool": Seen(FILE, 0o640, 0, 0, 301, b"4"),
        "/opt": Seen(DIRECTORY, 0o755, 1000, 1001, 303, b""),
        "/opt/x": Seen(FILE, 0o644, 1000, 1001, 303, b"5"),
        "/testbed/a.py": Seen(FILE, 0o664, 7, 8, 305, b"6"),
    }


async def test_deletions_are_whiteouts_and_what_comes_back_shows_nothing_of_before(tmp_path: Path) -> None:
    made = await mutate(
        str(tmp_path),
        Mutation(delete=("/testbed/pkg", "/testbed/link", "/bin")),
        Mutation(files={"/testbed/pkg/fresh.py": b"new"}),
        Mutation(files={"/tmp/x": b""}),
        Mutation(delete=("/tmp/x",)),
    )
    gone = {name for name, node in made.changed.items() if node is None}
    assert gone == {
        "/bin", "/testbed/link", "/testbed/pkg/mod.py", "/testbed/pkg/only", "/testbed/pkg/only/one.py", "/testbed/pkg/up.py"
    }  # fmt: skip
    assert {path for path in made.after if path[:2] == (b"testbed", b"pkg")} == {
        (b"testbed", b"pkg"), (b"testbed", b"pkg", b"fresh.py")
    }  # fmt: skip
    assert made.members() == [
        ".wh.bin", "testbed", "testbed/.wh.link", "testbed/pkg", "testbed/pkg/.wh..wh..opq", "testbed/pkg/fresh.py", "tmp"
    ]  # fmt: skip


async def test_a_directory_becomes_a_file_and_a_file_a_directory(tmp_path: Path) -> None:
    made = await mutate(
        str(tmp_path),
        Mutation(delete=("/testbed/pkg", "/testbed/a.py")),
        Mutation(files={"/testbed/pkg": b"file", "/testbed/a.py/inner": b"x"}),
    )
    assert made.after[b"testbed", b"pkg"].content == b"file"
    assert made.after[b"testbed", b"a.py", b"inner"].content == b"x"
    assert not any(path[:3] == (b"testbed", b"pkg", b"only") for path in made.after)


async def test_modes_and_symlinks(tmp_path: Path) -> None:
    made = await mutate(
        str(tmp_path),
        Mutation(chmod={"/testbed/link": 0o600, "/testbed/pkg": 0o700, "/bin/tool": 0o4755, "/dev/null": 0o600}),
        Mutation(symlink={"/testbed/away": "pkg", "/testbed/pkg/l": "../../../.."}),
    )
    assert made.changed == {
        "/testbed/a.py": Seen(FILE, 0o600, 7, 8, 100, b"one\ntwo\nthree\n"),
        "/testbed/pkg": Seen(DIRECTORY, 0o700, 0, 0, 0, b""),
        "/dev/null": Seen(CHAR, 0o600, 0, 0, 0, b""),
        "/testbed/away": Seen(SYMLINK, 0o777, 7, 8, 303, b"pkg"),
        "/testbed/pkg/l": Seen(SYMLINK, 0o777, 0, 0, 303, b"../../../.."),
    }, "the tool has that mode already"


MOVES = """diff --git a/a.py b/sub/b.py
old mode 100644
new mode 100755
similarity index 80%
rename from a.py
rename to sub/b.py
--- a/a.py
+++ b/sub/b.py
@@ -1,3 +1,3 @@
 one
-two
+2
 three
diff --git a/pkg/only/one.py b/pkg/only/one.py
deleted file mode 100644
--- a/pkg/only/one.py
+++ /dev/null
@@ -1 +0,0 @@
-1
diff --git a/link b/link
deleted file mode 120000
--- a/link
+++ /dev/null
@@ -1 +0,0 @@
-a.py
\\ No newline at end of file
diff --git a/link b/link
new file mode 100755
--- /dev/null
+++ b/link
@@ -0,0 +1 @@
+now a file
"""


async def test_a_git_diff_moves_retypes_and_empties(tmp_path: Path) -> None:
    patch = MOVES
    made = await mutate(str(tmp_path), Mutation(patch=patch, directory="/testbed"))
    assert made.changed == {
        "/testbed/a.py": None,
        "/testbed/sub": Seen(DIRECTORY, 0o755, 7, 8, 301, b""),
        "/testbed/sub/b.py": Seen(FILE, 0o775, 7, 8, 301, b"one\n2\nthree\n"),
        "/testbed/pkg/only": None,
        "/testbed/pkg/only/one.py": None,
        "/testbed/link": Seen(FILE, 0o755, 7, 8, 301, b"now a file\n"),
    }


async def test_nothing_to_do_is_no_layer(tmp_path: Path) -> None:
    assert (await mutate(str(tmp_path / "a"))).refs == ()
    assert (await mutate(str(tmp_path / "b"), Mutation(chmod={"/testbed/a.py": 0o664}))).refs == ()
    assert (await mutate(str(tmp_path / "c"), Mutation(run=("true",)))).refs == ()
    made = await mutate(str(tmp_path / "d"), Mutation(files={"/x": b"1"}), Mutation(delete=("/x",)))
    assert made.refs == ()


@pytest.mark.parametrize(
    ("mutation", "text"),
    [
        (Mutation(patch=PATCH, directory="/usr"), "a.py: does not exist"),
        (Mutation(patch=PATCH.replace("-two", "-2"), directory="/testbed"), "a.py: hunk #1 (line 3 of the patch): does not"),
        (Mutation(patch=PATCH, directory="/nowhere"), "no directory"),
        (Mutation(patch=PATCH.replace("/a.py", "/away/tool"), directory="/testbed"), "beyond a symlink"),
        (Mutation(patch=PATCH.replace("/a.py", "/link"), directory="/testbed"), "is a symlink"),
        (Mutation(patch=PATCH.replace("/a.py", "/null"), directory="/dev"), "no regular file"),
        (Mutation(patch=PATCH.replace("/a.py", "/../usr/x"), directory="/testbed"), "leaves the tree"),
        (Mutation(files={"/testbed": b""}), "is a directory"),
        (Mutation(files={"/": b""}), "root"),
        (Mutation(files={"/testbed/a.py/x": b""}), "file is used as a directory"),
        (Mutation(files={"/testbed/.wh.x": b""}), ".wh."),
        (Mutation(files={"/a/../../x": b""}), "'..'"),
        (Mutation(delete=("/testbed/none",)), "does not exist"),
        (Mutation(delete=("/",)), "root"),
        (Mutation(chmod={"/none": 0o600}), "does not exist"),
        (Mutation(symlink={"/testbed": "x"}), "is a directory"),
        (Mutation(symlink={"/testbed/s": ""}), "empty"),
    ],
)  # fmt: skip
async def test_what_cannot_be_made_says_why_and_leaves_nothing(tmp_path: Path, mutation: Mutation, text: str) -> None:
    with pytest.raises(MutationError) as caught:
        await mutate(str(tmp_path), Mutation(files={"/fine": b""}), dataclasses.replace(mutation, line=12))
    assert text in str(caught.value)
    assert str(caught.value).startswith("mutations[1] (line 12): ")
    assert not os.path.exists(tmp_path / "root" / "mutations")


# -- against a disk: the same patch by git, the same tree

NAMES = ["a.py", "pkg/mod.py", "pkg/sub/x", "new", "bin/run"]
TEXTS = st.sampled_from(["", "1\n", "1\n2\n3\n", "a\nb\nc\nd\ne\nf\ng\nh\n", "last without newline", "\u00fc\n"])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(NAMES), TEXTS, min_size=1), st.dictionaries(st.sampled_from(NAMES), TEXTS))
def test_any_git_diff_as_a_layer(before: dict[str, str], after: dict[str, str]) -> None:
    if before == after:
        return
    with tempfile.TemporaryDirectory() as directory:
        for side, files in (("x", before), ("y", after)):
            for name, text in files.items():
                path = os.path.join(directory, side, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                Path(path).write_text(text)
            os.makedirs(os.path.join(directory, side), exist_ok=True)
        diff = subprocess.run(
            ["git", "diff", "--no-index", "--binary", "x", "y"], cwd=directory, capture_output=True, check=False,
            env={"PATH": os.environ["PATH"], "GIT_CEILING_DIRECTORIES": directory},
        ).stdout.decode()  # fmt: skip
        tar = [{"name": f"testbed/{name}", "data": text.encode()} for name, text in before.items()]
        tar.insert(0, {"name": "testbed", "type": tarfile.DIRTYPE})
        made = asyncio.run(
            mutate(os.path.join(directory, "s"), Mutation(patch=diff, directory="/testbed", strip=2), tars=(tar,))
        )
    files = {b"/".join(path[1:]).decode(): node.content.decode() for path, node in made.after.items() if node.kind == FILE}
    assert files == after
    folders = {b"/".join(path[1:]).decode() for path, node in made.after.items() if node.kind == DIRECTORY} - {""}
    assert folders == {name[:n] for name in after for n in range(len(name)) if name[n] == "/"}, "empty ones are gone, too"


async def test_the_layer_is_what_the_rules_of_layers_say(tmp_path: Path) -> None:
    made = await mutate(str(tmp_path), Mutation(delete=("/testbed/pkg",)), Mutation(files={"/testbed/pkg/x/y": b"1"}))
    from weenv.layer.decode import file_reader, open_blob
    from weenv.layer.verify import parse_annotations

    descriptor = parse_annotations(made.refs[0].annotations)
    assert descriptor is not None
    with open(made.mutator.store.blob(made.refs[0].digest), "rb") as file:
        tar = b"".join(open_blob(file_reader(file), descriptor)[1].stream())
    assert made.after == merged([*made.stack.tars, tar])


# -- the cache


async def test_the_same_is_made_once_and_is_the_same_everywhere(tmp_path: Path) -> None:
    stack = Stack(str(tmp_path / "layout"))
    stack.add(make_tar(LOWER))
    one, other = Mutation(patch=PATCH, directory="/testbed", line=3), Mutation(patch=PATCH, directory="/testbed", line=9)
    async with RegistryClient() as client:
        first = Mutator(client, str(tmp_path / "a"))
        results = await asyncio.gather(*(first.mutate([one if n % 2 else other], stack.layers) for n in range(200)))
        assert len(set(map(str, results))) == 1 and first.made == 1
        again = Mutator(client, str(tmp_path / "a"))
        assert await again.mutate([one], stack.layers) == results[0] and again.made == 0
        assert again.frames.fetched == [0, 0]
        elsewhere = Mutator(client, str(tmp_path / "b"))
        assert await elsewhere.mutate([one], stack.layers) == results[0]
        different = await first.mutate([Mutation(files={"/testbed/a.py": b"one\nTWO\nthree\n"})], stack.layers)
        assert different == results[0], "another way to the same layer"


async def test_thousands_at_a_time_cost_kilobytes_each(tmp_path: Path) -> None:
    stack = Stack(str(tmp_path / "layout"))
    stack.add(make_tar(LOWER))
    async with RegistryClient() as client:
        mutator = Mutator(client, str(tmp_path / "a"))
        wanted = [[Mutation(files={"/testbed/a.py": b"task %d\n" % n})] for n in range(1000)]
        refs = await asyncio.gather(*(mutator.mutate(m, stack.layers) for m in wanted))
    assert len({ref[0].digest for ref in refs}) == 1000
    assert sum(ref[0].size for ref in refs) < 1500 * 1000


@pytest.mark.parametrize("damage", ["gone", "short", "flipped", "key"])
async def test_a_damaged_store_is_as_good_as_an_empty_one(tmp_path: Path, damage: str) -> None:
    stack = Stack(str(tmp_path / "layout"))
    stack.add(make_tar(LOWER))
    mutation = [Mutation(files={"/x": b"1"})]
    async with RegistryClient() as client:
        refs = await Mutator(client, str(tmp_path / "a")).mutate(mutation, stack.layers)
        store = MutationStore(str(tmp_path / "a"))
        blob = Path(store.blob(refs[0].digest))
        data = bytearray(blob.read_bytes())
        if damage == "gone":
            blob.unlink()
        elif damage == "short":
            blob.write_bytes(data[:-1])
        elif damage == "flipped":
            data[20] ^= 1
            blob.write_bytes(data)
        else:
            for path in Path(store.path, "keys").glob("*/*"):
                path.write_bytes(b'{"layer": {"digest": "../../x"}}')
        mutator = Mutator(client, str(tmp_path / "a"))
        assert await mutator.mutate(mutation, stack.layers) == refs
        assert mutator.made == 1
        assert MutationStore(str(tmp_path / "a")).get(_key(stack, mutation)) == refs


def _key(stack: Stack, mutations: list[Mutation]) -> str:
    from weenv.core.digest import chain_id
    from weenv.environment.mutate.mutation import key_of

    return key_of(chain_id([layer.ref.diff_id for layer in stack.layers]), mutations)


def test_the_least_recently_used_go_first_but_none_that_is_in_use(tmp_path: Path) -> None:
    store = MutationStore(str(tmp_path), limit=250)
    refs = []
    for number in range(5):
        blob = bytes([number]) * 100
        from weenv.core.digest import sha256

        ref = LayerRef(sha256(blob), 100, "m", sha256(b"d"), {})
        store.put(f"{number:064x}", ref, blob)
        refs.append(ref)
    assert store.trim() == 0, "all were used just now"
    for number, ref in enumerate(refs):
        os.utime(store.blob(ref.digest), (0, time.time() - 10_000 + number))
    os.makedirs(LayerDirs(str(tmp_path)).path(refs[0].digest))
    assert store.trim() == 300
    assert [store.get(f"{n:064x}") is not None for n in range(5)] == [True, False, False, False, True]
    assert sum(1 for _ in Path(store.path, "keys").glob("*/*")) == 2


async def test_a_disk_that_does_not_take_it(tmp_path: Path) -> None:
    stack = Stack(str(tmp_path / "layout"))
    stack.add(make_tar(LOWER))
    (tmp_path / "root").write_bytes(b"no directory")
    async with RegistryClient() as client:
        with pytest.raises(StorageError, match="cannot write"):
            await Mutator(client, str(tmp_path / "root")).mutate([Mutation(files={"/x": b""})], stack.layers)
        os.unlink(stack.directory + "/blobs/sha256/" + stack.layers[0].ref.digest[7:])
        with pytest.raises(SourceError):
            await Mutator(client, str(tmp_path / "r")).mutate([Mutation(files={"/x": b""})], stack.layers)


def test_commands_come_last() -> None:
    command, change = Mutation(run=("make",)), Mutation(files={"/x": b""})
    assert layered([change, command]) == (change,) and runs([change, command]) == (command,)
    with pytest.raises(FormatError, match=r"mutations\[1\].*run"):
        layered([command, change])


def test_the_canonical_form_holds_every_field_but_the_line() -> None:
    base = Mutation(patch="p")
    other = {
        "patch": "q", "directory": "/d", "strip": 0, "files": {"/a": b"\xff"}, "delete": ("/a",), "chmod": {"/a": 1},
        "symlink": {"/a": "b"}, "git_commit": "ab", "owner": (1, 2), "mode": 0o600,
    }  # fmt: skip
    fields = {field.name for field in dataclasses.fields(Mutation)} - {"line", "run"}
    assert set(other) == fields
    forms = {canonical([dataclasses.replace(base, **{name: value})]) for name, value in other.items()}  # type: ignore[arg-type]
    assert len(forms | {canonical([base])}) == len(fields) + 1
    assert canonical([dataclasses.replace(base, line=5)]) == canonical([base])
