"""The merged view of a stack: overlayfs's rules, by a slow reference; look-ups within the root; bytes from few frames."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import tarfile
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weenv.core.digest import hex_of
from weenv.core.errors import VerificationError
from weenv.environment.mutate.changes import Changes
from weenv.environment.mutate.mutator import Mutator
from weenv.environment.mutate.view import PathError
from weenv.layer.toc import DIRECTORY, FILE
from weenv.plugin.snapshotter.cache.present import Presence
from weenv.plugin.snapshotter.layerdir import LayerDirs, LayerSource
from weenv.registry.client import RegistryClient
from weenv_testkit.layers import make_tar
from weenv_testkit.stacks import Stack, Tree, merged, seen


@st.composite
def layers(draw: st.DrawFn) -> list[bytes]:
    """Up to four layers over few names, so that they meet: files, directories, links, whiteouts, opaque directories."""
    tars = []
    for number in range(draw(st.integers(1, 4))):
        members: list[dict[str, Any]] = []
        taken: dict[str, str] = {}
        for _ in range(draw(st.integers(0, 8))):
            parents = [""] + [name + "/" for name, kind in taken.items() if kind == "d"] + ["a/", "a/b/"]
            parent = draw(st.sampled_from(parents))
            name = parent + draw(st.sampled_from("abc"))
            up = ["/".join(name.split("/")[:n]) for n in range(1, name.count("/") + 1)]
            if name in taken or any(taken.get(step, "d") != "d" for step in up):
                continue
            kind = draw(st.sampled_from("ffddslwo"))
            if any(other.startswith(name + "/") for other in taken):
                kind = "d"
            common = {"mode": draw(st.integers(0, 0o777)), "uid": number, "gid": draw(st.integers(0, 3)), "mtime": number + 1}
            files = [other for other, what in taken.items() if what == "f"]
            if kind == "l" and not files:
                kind = "f"
            if kind == "w" and not number:
                continue
            taken[name] = "d" if kind == "o" else kind
            for step in up:
                taken.setdefault(step, "d")
            if kind == "f":
                members.append({"name": name, "data": draw(st.binary(max_size=9)) * draw(st.sampled_from([1, 900])), **common})
            elif kind in "do":
                members.append({"name": name, "type": tarfile.DIRTYPE, **common})
                if kind == "o" and number:
                    members.append({"name": f"{name}/.wh..wh..opq"})
            elif kind == "s":
                members.append({"name": name, "type": tarfile.SYMTYPE, "linkname": "a/b", **common})
            elif kind == "l":
                first = next(member for member in members if member["name"] == files[0])
                attributes = {key: value for key, value in first.items() if key not in ("name", "data")}
                members.append({"name": name, "type": tarfile.LNKTYPE, "linkname": files[0], **attributes})
            else:
                members.append({"name": f"{parent}.wh.{name.rpartition('/')[2]}"})
        tars.append(make_tar(members))
    return tars


async def everything(stack: Stack, root: str = "") -> Tree:
    async with RegistryClient() as client:
        mutator = Mutator(client, root or stack.directory)
        view = await mutator.view(stack.layers)
        return await seen(view, lambda inode: mutator.read(view, stack.layers, inode))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(layers())
def test_a_stack_is_seen_as_its_tars_say(tars: list[bytes]) -> None:
    directory = tempfile.mkdtemp()
    try:
        stack = Stack(directory)
        for tar in tars:
            stack.add(tar, target=512, threads=1)
        assert asyncio.run(everything(stack)) == merged(tars)
    finally:
        shutil.rmtree(directory)


LINKS: list[dict[str, Any]] = [
    {"name": "usr/bin/python", "data": b"#!", "mode": 0o755},
    {"name": "bin", "type": tarfile.SYMTYPE, "linkname": "usr/bin"},
    {"name": "abs", "type": tarfile.SYMTYPE, "linkname": "/usr/bin/"},
    {"name": "usr/up", "type": tarfile.SYMTYPE, "linkname": ".."},
    {"name": "usr/out", "type": tarfile.SYMTYPE, "linkname": "../../etc"},
    {"name": "loop", "type": tarfile.SYMTYPE, "linkname": "loop"},
    {"name": "ping", "type": tarfile.SYMTYPE, "linkname": "pong"},
    {"name": "pong", "type": tarfile.SYMTYPE, "linkname": "./ping"},
    {"name": "bomb", "type": tarfile.SYMTYPE, "linkname": "x/../" * 800 + "bomb"},
    {"name": "x", "type": tarfile.DIRTYPE},
    {"name": "dangling", "type": tarfile.SYMTYPE, "linkname": "no/where"},
]


@pytest.fixture
def links(tmp_path: Path) -> Changes:
    stack = Stack(str(tmp_path))
    stack.add(make_tar(LINKS))
    return Changes(stack.view())


@pytest.mark.parametrize("path", ["/bin/python", "/abs/python", "usr/up/bin/python", "/./usr//up/abs/python"])
def test_symlinks_are_followed_within_the_root(links: Changes, path: str) -> None:
    where, node = links.resolve(path)
    assert where == (b"usr", b"bin", b"python")
    assert node is not None
    assert (node.kind, node.mode) == (FILE, 0o755)


def test_what_is_missing_and_the_link_itself(links: Changes) -> None:
    assert links.resolve("/bin/new/file") == ((b"usr", b"bin", b"new", b"file"), None)
    assert links.resolve("/dangling") == ((b"no", b"where"), None)
    where, node = links.resolve("/bin", follow=False)
    assert where == (b"bin",) and node is not None and node.link == b"usr/bin"
    where, node = links.resolve("/")
    assert where == () and node is not None and node.kind == DIRECTORY


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/usr/../etc", "'..'"), ("/usr/out/passwd", "above the root"), ("/loop/x", "circles"), ("/ping", "circles"),
        ("/bomb/x", "circles"), ("/usr/bin/python/x", "file is used as a directory"), ("/" + "n" * 256, "255"),
        ("/" + "n/" * 3000, "too long"), ("/a\0b", "zero byte"),
    ],
)  # fmt: skip
def test_paths_that_are_refused(links: Changes, path: str, text: str) -> None:
    with pytest.raises(PathError) as caught:
        links.resolve(path)
    assert text in str(caught.value)


def big(tmp_path: Path) -> tuple[Stack, bytes]:
    content = random.Random(1).randbytes(300_000)
    stack = Stack(str(tmp_path / "layout"))
    filler = [{"name": f"pad/{n}", "data": random.Random(n).randbytes(40_000)} for n in range(20)]
    stack.add(make_tar([*filler, {"name": "file", "data": content}, *({**m, "name": m["name"] + "z"} for m in filler)]))
    return stack, content


async def test_only_the_frames_of_a_range_are_fetched(tmp_path: Path) -> None:
    stack, content = big(tmp_path)
    async with RegistryClient() as client:
        mutator = Mutator(client, str(tmp_path / "root"))
        view = await mutator.view(stack.layers)
        inode = view.at((b"file",))
        assert inode is not None
        assert await mutator.read(view, stack.layers, inode, 100_000, 50) == content[100_000:100_050]
        assert mutator.frames.fetched[0] == 1
        assert await mutator.read(view, stack.layers, inode) == content
        whole = mutator.frames.fetched[0]
        assert whole == len(view.tocs[0].frames.covering(int(view.tocs[0].entries.aux[inode.entry]), len(content)))
        assert await mutator.read(view, stack.layers, inode, 299_990, 100) == content[-10:]
        assert mutator.frames.fetched[0] == whole, "kept in memory"


@pytest.mark.parametrize("rounds", range(8))
async def test_a_frame_is_fetched_once_whoever_asks_for_it_and_with_whatever_neighbours(tmp_path: Path, rounds: int) -> None:
    """And whenever one of them goes away again: after so many rounds of the event loop."""
    stack, content = big(tmp_path)
    async with RegistryClient() as client:
        mutator = Mutator(client, "")
        view = await mutator.view(stack.layers)
        inode = view.at((b"file",))
        assert inode is not None
        offset = int(view.tocs[0].entries.aux[inode.entry])
        read = partial(mutator.read, view, stack.layers, inode)
        whole = len(view.tocs[0].frames.covering(offset, len(content)))
        wanted = [(0, 300_000), (100_000, 50), (50_000, 200_000), (0, 10), (290_000, 10_000), (0, 300_000)]
        stopped = asyncio.ensure_future(read(0, 300_000))
        others = [asyncio.ensure_future(read(*piece)) for piece in wanted]
        for _ in range(rounds):
            await asyncio.sleep(0)
        stopped.cancel()
        assert await asyncio.gather(*others) == [content[begin : begin + size] for begin, size in wanted]
        assert whole > 3
        assert mutator.frames.fetched[0] == whole
        assert await read(0, 300_000) == content
        assert mutator.frames.fetched[0] == whole, "it is in memory"


async def test_frames_that_the_node_has_are_not_fetched_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    stack, content = big(tmp_path)
    root = str(tmp_path / "root")
    ref, encoded = stack.layers[0].ref, stack.encoded[0]
    blob = Path(stack.directory, "blobs", "sha256", hex_of(ref.digest))
    data = blob.read_bytes()
    LayerDirs(root).create(
        LayerSource(ref.digest, ref.size, encoded.toc_offset, encoded.toc_length, encoded.toc_digest, []),
        data[encoded.toc_offset :],
    )
    directory = LayerDirs(root).path(ref.digest)
    frames = encoded.toc.frames
    Path(directory, "data").write_bytes(stack.tars[0])
    presence = Presence.open(directory, frames.content_sizes, encoded.stream_size)
    entry = encoded.toc.lookup(b"file")
    assert entry is not None
    covering = frames.covering(int(encoded.toc.entries.aux[entry]), len(content))
    for number in covering[:-1]:
        presence.mark(number)
    presence.close()
    async with RegistryClient() as client:
        mutator = Mutator(client, root)
        view = await mutator.view(stack.layers)
        inode = view.at((b"file",))
        assert inode is not None
        assert await mutator.read(view, stack.layers, inode) == content
        assert mutator.frames.fetched == [1, int(frames.compressed_sizes[covering[-1]])]
        first = view.at((b"pad", b"0"))
        assert first is not None
        number = frames.covering(int(encoded.toc.entries.aux[first.entry]), 1)[0]
        damaged = bytearray(data)
        damaged[int(frames.compressed_offsets[number]) + 9] ^= 1
        blob.write_bytes(damaged)
        with pytest.raises(VerificationError, match=f"frame {number}"):
            await mutator.read(view, stack.layers, first)
        os.unlink(blob)
