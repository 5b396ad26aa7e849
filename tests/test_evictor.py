"""blobfs/evictor.py: when it looks, what it says, and that nothing is filled which would have to go again."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from weenv.layer.verify import verify_frame
from weenv.plugin.snapshotter.blobfs import evictor as module
from weenv.plugin.snapshotter.blobfs.config import CacheConfig
from weenv.plugin.snapshotter.blobfs.daemon import read_tail
from weenv.plugin.snapshotter.blobfs.evictor import Evictor
from weenv.plugin.snapshotter.blobfs.layers import Layer, LayerTable
from weenv.plugin.snapshotter.blobfs.server import Server
from weenv.plugin.snapshotter.cache.keeper import ALL
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher
from weenv.plugin.snapshotter.layerdir import EVICT, LayerDirs
from weenv_testkit.synthetic import make_layer, payload

KIB = 1 << 10
LAYER = make_layer([("f", payload(1000 * KIB, 1))], target=64 * KIB)


class Node:
    """An evictor, and a layer of which everything is there."""

    def __init__(self, root: str) -> None:
        LAYER.install(root)
        self.table = LayerTable(LayerDirs(root), read_tail, lambda *_: [])
        self.fetcher = Fetcher(verify_frame)
        server = Server(-1, self.table, self.fetcher, root=root)
        config = CacheConfig(high=500 * KIB, low=400 * KIB, disk_high=1.0)
        self.evictor = Evictor(config, root, self.table, server, self.fetcher)
        self.layer = self.open()

    def open(self) -> Layer:
        """The layer, full."""
        node = self.table.lookup(LAYER.name.encode())
        assert node is not None and node.layer is not None
        node.layer.store.write(0, LAYER.stream)
        for frame in range(len(node.layer.presence)):
            node.layer.presence.mark(frame)
        return node.layer


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """A node; nothing of it is left open."""
    made = Node(str(tmp_path))
    yield made
    await made.fetcher.close()


async def test_it_goes_down_to_the_lower_bound_and_says_so(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    assert node.evictor.room(), "nobody knows yet"
    with caplog.at_level(logging.INFO):
        await node.evictor.look()
    assert node.layer.store.allocated() <= 400 * KIB
    (record,) = [record for record in caplog.records if record.getMessage() == "frames were evicted"]
    fields = record.__dict__
    assert fields["bytes"] >= 600 * KIB and fields["reason"] == "size" and fields["low"] == 400 * KIB
    status = node.evictor.status()
    assert (status["high"], status["bound_by"], status["stuck"]) == (500 * KIB, "size", False)
    assert status["evicted_bytes"]["size"] == fields["bytes"]


async def test_a_flood_of_evictions_is_few_lines(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            node.open()
            node.evictor._measured = 0.0
            await node.evictor.look()
        assert sum(record.getMessage() == "frames were evicted" for record in caplog.records) == 1
        monkeypatch.setattr(module, "_TELL", 0.0)
        await node.evictor.look()
    told = [record.__dict__["bytes"] for record in caplog.records if record.getMessage() == "frames were evicted"]
    assert len(told) == 2
    assert sum(told) == node.evictor.keeper.evicted_bytes["size"], "nothing is left unsaid"


async def test_what_was_stored_since_is_counted_in(node: Node) -> None:
    await node.evictor.look()
    before = node.evictor.estimate
    node.fetcher.stats.stored_bytes += 50 * KIB
    assert node.evictor.estimate == before + 50 * KIB
    assert node.evictor.room() is (before + 50 * KIB < 400 * KIB)
    node.fetcher.stats.stored_bytes += 400 * KIB
    assert not node.evictor.room()


async def test_what_cannot_go_is_complained_of_seldom(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSE", 0.0)
    with open(f"{node.layer.path}/data", "rb"):
        for _ in range(4):
            node.evictor._measured = 0.0
            await node.evictor.look()
        lines = [record for record in caplog.records if "nothing can be evicted" in record.getMessage()]
        assert len(lines) == 1
        assert lines[0].__dict__["reasons"] == "mounted" and "containers end" in lines[0].__dict__["hint"]
        assert node.evictor.status()["stuck"]
    await node.evictor.look()
    assert not node.evictor.status()["stuck"]


async def test_what_a_server_that_was_killed_had_asked_for_is_taken_back_at_the_start(node: Node, tmp_path: Path) -> None:
    data = node.evictor.keeper.size().data
    config = CacheConfig(high=data + KIB, low=data - KIB, disk_high=1.0)
    server = Server(-1, node.table, node.fetcher, root=str(tmp_path))
    evictor = Evictor(config, str(tmp_path), node.table, server, node.fetcher)
    mark = Path(node.layer.path, EVICT)
    mark.touch()
    await evictor.look()
    assert evictor.size is not None and not evictor.size.over and not evictor.size.room
    assert not mark.exists()
    mark.touch()
    evictor._marked = True
    await evictor.look()
    assert mark.exists(), "the bounds have asked for it, and there is no room yet"


async def test_pruning_is_one_line(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    await node.evictor.look()
    with caplog.at_level(logging.INFO):
        done = await node.evictor.prune(ALL, None, dry=False)
        await node.evictor.prune(ALL, None, dry=True)
    assert done["data_after"] == 0
    assert [record.getMessage() for record in caplog.records].count("the cache was pruned") == 1
    assert node.evictor.estimate == 0


async def test_a_root_that_is_not_there_yet_is_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = str(tmp_path / "not" / "yet")
    table = LayerTable(LayerDirs(root), read_tail, lambda *_: [])
    fetcher = Fetcher(verify_frame)
    evictor = Evictor(CacheConfig(high=500 * KIB, low=400 * KIB), root, table, Server(-1, table, fetcher, root=root), fetcher)
    await evictor.look()
    assert evictor.room() and evictor.status()["data"] == 0 and not caplog.records
    LAYER.install(root)
    evictor._measured = 0.0
    await evictor.look()
    assert evictor.size is not None and not evictor.size.over
    await fetcher.close()
