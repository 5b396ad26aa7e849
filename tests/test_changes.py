"""Any sequence of changes on any small stack: the layer that comes out shows on top of it what a plain model says."""

from __future__ import annotations

import asyncio
import shutil
import tarfile
import tempfile
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weenv.environment.mutate.changes import MAX_DEPTH, Changes
from weenv.environment.mutate.mutation import encode, tar_of
from weenv.environment.mutate.view import Inode, Path, PathError, TreeView
from weenv.layer.toc import DIRECTORY, FILE, SYMLINK
from weenv_testkit.layers import make_tar
from weenv_testkit.stacks import Stack, Tree, seen

Model = dict[Path, tuple[int, bytes]]
"""Path -> kind, and a file's data or a symlink's target."""

NAMES = st.sampled_from([b"a", b"b", b"c"])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map(tuple)
STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "write", "remove", "remove", "link", "make", "chmod"]), PATHS, st.binary(max_size=4)),
    max_size=12,
)  # fmt: skip


def read(stack: Stack, view: TreeView, inode: Inode) -> bytes:
    data = bytearray(inode.size)
    for logical, stream, size in view.pieces(inode, 0, inode.size):
        data[logical : logical + size] = stack.tars[inode.layer][stream : stream + size]
    return bytes(data)


def tree(stack: Stack) -> Tree:
    view = stack.view()

    async def content(inode: Inode) -> bytes:
        return read(stack, view, inode)

    return asyncio.run(seen(view, content))


def model_of(everything: Tree) -> Model:
    return {path: (node.kind, node.content) for path, node in everything.items()}


def parents_are_directories(model: Model, path: Path) -> bool:
    return all(model.get(path[:n], (DIRECTORY,))[0] == DIRECTORY for n in range(1, len(path)))


def step(model: Model, what: str, path: Path, data: bytes) -> bool:
    """The same on the model; False where it is to be refused."""
    there = model.get(path)
    if what == "remove":
        if there is None:
            return False
        for known in [known for known in model if known[: len(path)] == path]:
            del model[known]
        return True
    if what == "chmod":
        return there is not None
    if not parents_are_directories(model, path):
        return False
    if what == "make":
        if there is not None and there[0] != DIRECTORY:
            return False
    elif there is not None and there[0] == DIRECTORY:
        return False
    for depth in range(1, len(path)):
        model.setdefault(path[:depth], (DIRECTORY, b""))
    model[path] = {"make": (DIRECTORY, b""), "write": (FILE, data), "link": (SYMLINK, b"x" + data.replace(b"\0", b"0"))}[what]
    return True


def do(changes: Changes, what: str, path: Path, data: bytes) -> None:
    if what == "write":
        changes.write(path, data)
    elif what == "remove":
        changes.remove(path)
    elif what == "link":
        changes.link(path, b"x" + data.replace(b"\0", b"0"))
    elif what == "make":
        changes.make_directories(path)
    else:
        changes.chmod(path, 0o700)


@st.composite
def base(draw: st.DrawFn) -> list[bytes]:
    tars = []
    for number in range(draw(st.integers(1, 3))):
        members = []
        taken: set[Path] = set()
        for path in draw(st.lists(PATHS, max_size=5)):
            if any(path[:n] in taken for n in range(1, len(path) + 1)) or any(known[: len(path)] == path for known in taken):
                continue
            taken.add(path)
            name = b"/".join(path).decode()
            kind = draw(st.sampled_from("ffdw" if number else "ffd"))
            if kind == "f":
                members.append({"name": name, "data": b"%d " % number + name.encode()})
            elif kind == "d":
                members.append({"name": name, "type": tarfile.DIRTYPE, "mode": 0o755})
                if draw(st.booleans()) and number:
                    members.append({"name": f"{name}/.wh..wh..opq"})
            else:
                members.append({"name": "/".join([*name.split("/")[:-1], ".wh." + name.split("/")[-1]])})
        tars.append(make_tar(members))
    return tars


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(base(), STEPS)
def test_changes_show_what_a_plain_model_says(tars: list[bytes], steps: list[tuple[str, Path, bytes]]) -> None:
    directory = tempfile.mkdtemp()
    try:
        stack = Stack(directory)
        for tar in tars:
            stack.add(tar, threads=1)
        before = tree(stack)
        model = model_of(before)
        changes = Changes(stack.view())
        for what, path, data in steps:
            trial = dict(model)
            try:
                do(changes, what, path, data)
            except PathError:
                assert not step(trial, what, path, data), (what, path)
                continue
            assert step(model, what, path, data), (what, path)
            node = changes.at(path)
            assert (node is None) == (path not in model)
            for known in {path[:-1], path} - {()}:
                if model.get(known, (FILE,))[0] == DIRECTORY:
                    assert set(changes.names(known)) == {p[-1] for p in model if p[:-1] == known}
        for path, node in list(changes.files()):
            assert node.source is not None
            changes.load(path, read(stack, changes.view, node.source))
        members = changes.members()
        if members:
            tar = tar_of(members)
            assert encode(tar)[1].diff_id == encode(tar)[1].diff_id
            stack.add(tar, threads=1)
        after = tree(stack)
        assert model_of(after) == model
        touched = {path[:n] for _, path, _ in steps for n in range(1, len(path) + 1)}
        for path, entry in before.items():
            if not any(path[: len(other)] == other for other in touched):
                assert after[path] == entry
    finally:
        shutil.rmtree(directory)


def test_deep_paths_cost_by_their_depth_and_end_where_a_layer_ends() -> None:
    """A plan of 4 MiB holds two thousand paths of 4 KiB."""
    directory = tempfile.mkdtemp()
    try:
        stack = Stack(directory)
        stack.add(make_tar([]), threads=1)
        changes = Changes(stack.view())
        took = time.process_time()
        for number in range(200):
            path, there = changes.resolve("/" + "a/" * 1000 + f"f{number}")
            assert there is None
            changes.write(path, b"x")
        assert len(changes.members()) == 1200
        assert time.process_time() - took < 30, "milliseconds each, and not seconds"
        with pytest.raises(PathError, match=f"more than {MAX_DEPTH} directories deep"):
            changes.resolve("/" + "a/" * (MAX_DEPTH + 1))
    finally:
        shutil.rmtree(directory)
