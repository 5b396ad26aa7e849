"""cache/prune.py: complete layers are taken from the kernel first, and why one stays is known.

What the kernel's mount does to ``data`` here a file that is held open does; integration/test_cache.py has real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weenv.core.digest import sha256
from weenv.core.errors import UnavailableError
from weenv.plugin.containerd.types import Kind
from weenv.plugin.snapshotter.blobfs import control
from weenv.plugin.snapshotter.blobfs.ask import ask
from weenv.plugin.snapshotter.blobfs.config import CacheConfig, PrefetchConfig
from weenv.plugin.snapshotter.blobfs.control import LINE_MAX
from weenv.plugin.snapshotter.blobfs.daemon import read_tail
from weenv.plugin.snapshotter.blobfs.evictor import Evictor
from weenv.plugin.snapshotter.blobfs.layers import LayerTable
from weenv.plugin.snapshotter.blobfs.profiles import Profiles
from weenv.plugin.snapshotter.blobfs.server import Server
from weenv.plugin.snapshotter.cache import evict
from weenv.plugin.snapshotter.cache import prune as module
from weenv.plugin.snapshotter.cache.keeper import ALL, Entry, Keeper, Which
from weenv.plugin.snapshotter.cache.present import GOOD, is_complete
from weenv.plugin.snapshotter.cache.prune import Prune, prune_unserved
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher
from weenv.plugin.snapshotter.fetch.prefetch import Prefetcher
from weenv.plugin.snapshotter.layerdir import EVICT, LayerDirs
from weenv.plugin.snapshotter.metastore import Metastore
from weenv_testkit.synthetic import SyntheticLayer, make_layer, payload

LAYERS = [make_layer([("f", payload(300 << 10, number))], target=64 << 10) for number in range(3)]


class Node:
    """Complete layers that images have, each held by what stands for the kernel's mount."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.table = LayerTable(LayerDirs(root), read_tail, lambda *_: [])
        self.keeper = Keeper(root, CacheConfig(disk_high=1.0), self.table.open_layers)
        self.store = Metastore(f"{root}/metastore.db")
        self.held: dict[str, int] = {}
        for number, made in enumerate(LAYERS):
            made.install(root)
            node = self.table.lookup(made.name.encode())
            assert node is not None and node.layer is not None
            node.layer.store.write(0, made.stream)
            for frame in range(len(node.layer.presence)):
                node.layer.presence.mark(frame)
            node.layer.presence.judge(GOOD, solid=True)
            node.layer = None
            os.utime(f"{self.path(made)}/data", (1000 + number, 1000 + number))
            row = self.store.layer(made.digest, "")
            self.store.set_layer_mode(row.id, "complete", 0)
            self.store.add(Kind.COMMITTED, f"s{number}", None, {}, layer_id=row.id)
            self.held[made.digest] = os.open(f"{self.path(made)}/data", os.O_RDONLY)

    def path(self, made: SyntheticLayer) -> str:
        """Its directory."""
        return self.table.dirs.path(made.digest)

    def asked(self) -> list[bool]:
        """For which layers the snapshotter is asked."""
        return [os.path.exists(f"{self.path(made)}/{EVICT}") for made in LAYERS]

    def mount_anew(self, made: SyntheticLayer, *, used: bool = False) -> None:
        """What the snapshotter does; ``used``: a container has the old mount still."""
        self.store.set_layer_mode(self.store.layer(made.digest, "").id, "lazy", 5)
        if not used:
            os.close(self.held.pop(made.digest))

    def prune(self, which: Which = ALL, to: int | None = None, *, dry: bool = False) -> Prune:
        """A prune where blobfs runs."""
        return Prune(self.keeper, which, to, dry=dry, served=True)

    def close(self) -> None:
        """Nothing is left open."""
        for fd in self.held.values():
            os.close(fd)
        self.store.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(str(tmp_path))
    yield made
    made.close()


def answered(work: Prune) -> dict[str, Any]:
    """What the command is told."""
    return work.answer(work._keeper.size().data)


def whys(work: Prune) -> dict[str, tuple[str, bool]]:
    """Why each layer stays, and whether anything of it went."""
    return {row["digest"]: (row["why"], row["frames"] > 0) for row in answered(work)["layers"]}


def test_each_goes_once_the_snapshotter_has_it_back(node: Node) -> None:
    work = node.prune()
    assert work.begin() and node.asked() == [True] * 3
    assert work.again(), "it has not answered"
    node.mount_anew(LAYERS[0])
    assert work.again()
    assert [is_complete(node.path(made)) for made in LAYERS] == [False, True, True]
    assert node.asked() == [False, True, True], "what is not complete needs no mark"
    node.mount_anew(LAYERS[1])
    node.mount_anew(LAYERS[2])
    assert not work.again()
    work.end()
    answer = answered(work)
    assert (answer["data_after"], answer["bytes"]) == (0, sum(len(made.stream) for made in LAYERS))
    assert set(whys(work).values()) == {("", True)} and node.asked() == [False] * 3


def test_what_a_container_has_stays_and_is_the_kernels_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LET_GO", 0.0)
    work = node.prune()
    assert work.begin()
    node.mount_anew(LAYERS[0], used=True)
    node.mount_anew(LAYERS[1])
    node.mount_anew(LAYERS[2])
    while work.again():
        pass
    assert node.asked() == [True, False, False]
    work.end()
    assert whys(work) == {
        LAYERS[0].digest: ("container", False), LAYERS[1].digest: ("", True), LAYERS[2].digest: ("", True),
    }  # fmt: skip
    assert node.asked() == [False] * 3 and is_complete(node.path(LAYERS[0]))


def test_no_more_is_asked_for_than_is_needed(node: Node) -> None:
    size = node.keeper.size().data
    work = node.prune(to=size - 100_000)
    assert work.begin() and node.asked() == [True, False, False], "the one not used for longest"
    node.mount_anew(LAYERS[0])
    assert not work.again()
    work.end()
    assert whys(work) == {LAYERS[0].digest: ("", True)}
    assert 0 < answered(work)["data_before"] - answered(work)["data_after"] < 200_000


def test_two_at_once_evict_no_more_than_one(node: Node) -> None:
    size = node.keeper.size().data
    to = size - 100_000
    works = node.prune(to=to), node.prune(to=to)
    assert all(work.begin() for work in works)
    for made in LAYERS:
        node.mount_anew(made)
    assert not any(work.again() for work in works)
    for work in works:
        work.end()
    assert to - (64 << 10) <= node.keeper.size().data <= to, "to less than a frame"
    again, once_more = node.prune(to=to - 100_000), node.prune(to=to - 100_000)
    assert not again.begin() and not once_more.begin()
    assert answered(again)["frames"] and not answered(once_more)["frames"]


def test_the_next_one_is_asked_for_where_one_does_not_go(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LET_GO", 0.0)
    work = node.prune(to=node.keeper.size().data - 100_000)
    assert work.begin()
    node.mount_anew(LAYERS[0], used=True)
    while node.asked() != [True, True, False]:
        assert work.again()
    node.mount_anew(LAYERS[1])
    assert not work.again()
    work.end()
    assert whys(work) == {LAYERS[0].digest: ("container", False), LAYERS[1].digest: ("", True)}


@pytest.mark.parametrize("running", [True, False])
def test_a_snapshotter_that_does_not_answer(node: Node, running: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = os.open(f"{node.root}/lock", os.O_RDWR | os.O_CREAT)
    if running:
        fcntl.flock(lock, fcntl.LOCK_EX)
    monkeypatch.setattr(module, "_ANSWER" if running else "_LET_GO", 0.0)
    monkeypatch.setattr(module, "_LET_GO" if running else "_ANSWER", 1000.0)
    work = node.prune()
    more = work.begin()
    while more:
        more = work.again()
    work.end()
    os.close(lock)
    assert set(whys(work).values()) == {("unanswered", False)} and node.asked() == [False] * 3


def test_marks_that_are_withdrawn_meanwhile_are_made_again_and_nothing_else_goes(node: Node) -> None:
    work = node.prune(Which((LAYERS[1].name,)))
    assert work.begin() and node.asked() == [False, True, False]
    node.mount_anew(LAYERS[0])
    assert node.keeper.withdraw() == 1
    assert work.again() and node.asked() == [False, True, False]
    assert is_complete(node.path(LAYERS[0])), "which was not asked for"
    work.end()


def test_what_was_asked_for_by_others_stays_asked_for(node: Node) -> None:
    Path(node.path(LAYERS[1]), EVICT).touch()
    work = node.prune()
    assert work.begin()
    work.end()
    assert node.asked() == [False, True, False]


def test_where_no_blobfs_runs_nothing_is_asked_for(node: Node) -> None:
    answer = prune_unserved(node.keeper, ALL, None, dry=False)
    assert {row["why"] for row in answer["layers"]} == {"alone"} and node.asked() == [False] * 3


def test_by_age_the_kernels_layers_stay(node: Node) -> None:
    work = node.prune(Which(before=2000.0))
    assert not work.begin()
    assert set(whys(work).values()) == {("age", False)}


def test_a_dry_run_counts_what_would_be_asked_for(node: Node) -> None:
    some = node.prune(to=node.keeper.size().data - 100_000, dry=True)
    assert not some.begin()
    assert list(whys(some)) == [LAYERS[0].digest]
    opened = node.table.lookup(LAYERS[2].name.encode())
    assert opened is not None and opened.layer is not None
    opened.layer.ages[:3] = b"\5\5\5"  # frames of different ages are looked at one after the other
    work = node.prune(dry=True)
    assert not work.begin()
    assert set(whys(work).values()) == {("mounted", True)} and node.asked() == [False] * 3
    assert answered(work)["bytes"] == sum(len(made.stream) for made in LAYERS)


def test_what_no_snapshotter_mounted_is_left_alone(node: Node) -> None:
    node.store.close()
    os.unlink(f"{node.root}/metastore.db")
    work = node.prune()
    assert not work.begin() and node.asked() == [False] * 3
    assert set(whys(work).values()) == {("mounted", False)}


def test_a_round_looks_at_the_layers_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Which] = []
    entries = Keeper.entries

    def count(keeper: Keeper, which: Which = ALL) -> list[Entry]:
        looks.append(which)
        return entries(keeper, which)

    monkeypatch.setattr(Keeper, "entries", count)
    for to in (None, 0):
        looks.clear()
        work = node.prune(Which((LAYERS[0].name,)), to)
        assert work.begin() and looks == [ALL]
        assert work.again() and work.again()
        assert looks[1:] == ([ALL] * 2 if to is not None else [Which((LAYERS[0].name,))] * 2)
        work.end()


def test_where_all_of_many_layers_are_the_kernels_they_are_not_chosen_one_by_one(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100):
        shutil.copytree(node.path(LAYERS[0]), LayerDirs(node.root).path(sha256(b"%d" % number)))
    with contextlib.ExitStack() as stack:
        for digest in LayerDirs(node.root).known():
            stack.enter_context(open(f"{LayerDirs(node.root).path(digest)}/data", "rb"))
        chosen = []
        choose = evict.choose
        monkeypatch.setattr(evict, "choose", lambda *args, **more: chosen.append(1) or choose(*args, **more))
        done = node.keeper.evict(100_000, "size")
        assert len(done.layers) == 103 and {each.why for each in done.layers.values()} == {"mounted"}
        assert len(chosen) < 12
    gone = node.keeper.evict(100_000, "size").layers.values()
    assert sum(each.frames > 0 for each in gone) == 1, "and no more than is needed"


async def test_a_prune_gives_signs_of_life_and_one_without_is_not_waited_for(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "SIGN", 0.02)
    path = str(tmp_path / "s")
    fetcher = Fetcher(lambda *_: b"")
    evictor = Evictor(
        CacheConfig(disk_high=1.0), node.root, node.table, Server(-1, node.table, fetcher, root=node.root), fetcher
    )
    prefetcher = Prefetcher(PrefetchConfig(), fetcher, lambda: True, node.table.holds)
    profiles = Profiles(node.table.dirs, node.table, prefetcher)
    async with await asyncio.start_unix_server(control.Control(evictor, dict, profiles).converse, path, limit=LINE_MAX):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b'{"op":"prune"}\n')
        assert await reader.readexactly(3) == b"   "
        for made in LAYERS:
            node.mount_anew(made)
        assert json.loads(await reader.read())["data_after"] == 0
        writer.close()
        await writer.wait_closed()
    await fetcher.close()
    os.unlink(path)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(path)
        mute.listen()
        with pytest.raises(UnavailableError, match="does not answer"):
            ask(path, {"op": "prune"}, patience=0.05)


async def test_one_that_is_cancelled_takes_its_marks_back(node: Node) -> None:
    fetcher = Fetcher(lambda *_: b"")
    server = Server(-1, node.table, fetcher, root=node.root)
    evictor = Evictor(CacheConfig(disk_high=1.0), node.root, node.table, server, fetcher)
    asking = asyncio.create_task(evictor.prune(ALL, None, dry=False))
    while node.asked() != [True] * 3:
        assert not asking.done()
        await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert node.asked() == [False] * 3
    await fetcher.close()
