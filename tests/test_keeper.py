"""cache/keeper.py: the cache over all layers, those that are open and those that are only directories."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weenv.core import digest as digests
from weenv.plugin.containerd.types import Kind
from weenv.plugin.snapshotter.blobfs.config import CacheConfig
from weenv.plugin.snapshotter.blobfs.daemon import read_tail
from weenv.plugin.snapshotter.blobfs.layers import Layer, LayerTable
from weenv.plugin.snapshotter.cache import keeper as module
from weenv.plugin.snapshotter.cache.evict import Held
from weenv.plugin.snapshotter.cache.keeper import ALL, Entry, Keeper, Which, unmatched
from weenv.plugin.snapshotter.cache.present import GOOD, is_complete, progress
from weenv.plugin.snapshotter.cache.prune import prune_unserved
from weenv.plugin.snapshotter.cache.store import DataStore
from weenv.plugin.snapshotter.layerdir import EVICT, LayerDirs
from weenv.plugin.snapshotter.metastore import Metastore
from weenv_testkit.synthetic import SyntheticLayer, make_layer, payload

KIB = 1 << 10
LAYERS = [make_layer([("f", payload(400 * KIB, number))], target=64 * KIB) for number in range(4)]


class Node:
    """A root directory, the layers that are open there, and a keeper over both."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.table = LayerTable(LayerDirs(root), read_tail, lambda *_: [])
        self.keeper = Keeper(root, CacheConfig(disk_high=1.0), self.table.open_layers)

    def add(self, made: SyntheticLayer) -> Layer:
        """A layer of which everything is there, open."""
        made.install(self.root)
        node = self.table.lookup(made.name.encode())
        assert node is not None and node.layer is not None
        node.layer.store.write(0, made.stream)
        for frame in range(len(node.layer.presence)):
            node.layer.presence.mark(frame)
        node.layer.sync()
        node.layer.touched[:] = b"\1" * len(node.layer.touched)
        return node.layer

    def close(self, made: SyntheticLayer) -> None:
        """Close a layer, as after a while."""
        for node in self.table.nodes.values():
            if node.name == made.name:
                node.layer = None

    def path(self, made: SyntheticLayer) -> str:
        """Its directory."""
        return self.table.dirs.path(made.digest)

    def local(self, made: SyntheticLayer) -> int:
        """Bytes of its stream that are there."""
        return progress(self.path(made))[0]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(str(tmp_path))
    yield made
    for each in made.table.nodes.values():
        each.layer = None


def test_what_is_there(node: Node) -> None:
    for made in LAYERS[:2]:
        node.add(made)
    node.close(LAYERS[1])
    rows = {row["digest"]: row for row in node.keeper.rows()}
    assert set(rows) == {LAYERS[0].digest, LAYERS[1].digest}
    first, second = rows[LAYERS[0].digest], rows[LAYERS[1].digest]
    assert (first["open"], second["open"]) == (True, False)
    for row, made in ((first, LAYERS[0]), (second, LAYERS[1])):
        assert row["local_bytes"] == row["stream_size"] == len(made.stream)
        assert row["frames"] == row["frames_local"] == len(made.frames)
        assert row["evictable"] and not row["unused"]
        assert time.time() - 60 < row["used_at"] <= time.time() + 1
    assert node.keeper.size().data == sum(row["disk_bytes"] for row in rows.values()) > 2 * 400 * KIB
    with open(f"{node.path(LAYERS[1])}/data", "rb"):
        assert not next(row for row in node.keeper.rows() if row["digest"] == LAYERS[1].digest)["evictable"]


def test_a_layer_that_is_removed_while_they_are_listed_is_left_out(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for made in LAYERS[:2]:
        node.add(made)
        node.close(made)
    held = Keeper._held

    def remove(self: Keeper, entry: Entry, before: float) -> Held | None:
        found = held(self, entry, before)
        if entry.digest == LAYERS[0].digest:
            node.table.dirs.discard(entry.digest)
        return found

    monkeypatch.setattr(Keeper, "_held", remove)
    assert [row["digest"] for row in node.keeper.rows()] == [LAYERS[1].digest]


@pytest.mark.parametrize("closed", [False, True])
def test_frames_go_until_it_is_enough(node: Node, closed: bool) -> None:
    for made in LAYERS[:2]:
        node.add(made)
        if closed:
            node.close(made)
    before = node.keeper.size().data
    done = node.keeper.evict(100 * KIB, "size")
    assert 100 * KIB <= done.size < 100 * KIB + 65 * KIB
    assert before - node.keeper.size().data >= 64 * KIB
    assert node.keeper.evicted_bytes == {"size": done.size}
    node.keeper.evict(1 << 40, "size")
    assert (node.keeper.size().data, node.local(LAYERS[0]), node.local(LAYERS[1])) == (0, 0, 0)
    assert not node.keeper.evict(1 << 40, "size").layers


def test_a_layer_that_is_opened_again_knows_what_is_gone(node: Node) -> None:
    node.add(LAYERS[0])
    node.close(LAYERS[0])
    node.keeper.evict(200 * KIB, "size")
    again = node.table.lookup(LAYERS[0].name.encode())
    assert again is not None and again.layer is not None
    there = [frame for frame, state in enumerate(again.layer.presence.states) if state]
    assert 0 < len(there) < len(LAYERS[0].frames)
    contents = again.layer.contents
    for frame in there:
        piece = os.pread(again.layer.store.fd, contents[frame + 1] - contents[frame], contents[frame])
        assert piece == LAYERS[0].stream[contents[frame] : contents[frame + 1]]


def test_nothing_goes_between_a_layers_marks_being_read_and_its_data_being_opened(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process that prunes at that moment would leave this one with marks of frames that are gone."""
    node.add(LAYERS[0])
    node.close(LAYERS[0])
    seen: list[str] = []
    opening = DataStore.open

    def late(path: str, size: int) -> DataStore:
        monkeypatch.undo()
        done = Keeper(node.root, CacheConfig()).evict(1 << 30, "prune")
        seen.append(done.layers[LAYERS[0].digest].why)
        return opening(path, size)

    monkeypatch.setattr(DataStore, "open", late)
    found = node.table.lookup(LAYERS[0].name.encode())
    assert seen == ["mounted"]
    assert found is not None and found.layer is not None and all(found.layer.presence.states)
    assert os.pread(found.layer.store.fd, len(LAYERS[0].stream), 0) == LAYERS[0].stream


def test_a_dry_run_changes_nothing(node: Node) -> None:
    node.add(LAYERS[0])
    done = prune_unserved(node.keeper, ALL, 0, dry=True)
    assert done["bytes"] == len(LAYERS[0].stream) and done["dry_run"]
    assert node.local(LAYERS[0]) == len(LAYERS[0].stream)
    assert not node.keeper.evicted_frames


def test_what_no_snapshot_has_goes_first(node: Node) -> None:
    store = Metastore(os.path.join(node.root, "metastore.db"))
    known = store.layer(LAYERS[0].digest, "")
    store.add(Kind.COMMITTED, "s", None, {}, layer_id=known.id)
    store.layer(LAYERS[0].digest, "0123456789ab")  # a variant that nobody has
    store.layer(LAYERS[1].digest, "")
    for made in LAYERS[:3]:
        node.add(made)
    node.close(LAYERS[2])
    assert node.keeper.evict(1, "disk").layers.keys() < {LAYERS[1].digest, LAYERS[2].digest}
    node.keeper.evict(KIB, "disk")
    assert [node.local(made) for made in LAYERS[:3]] == [len(LAYERS[0].stream), 0, 0]
    assert set(node.keeper.evicted_frames) == {"unused"}
    store.close()
    assert node.keeper.unused()(LAYERS[1].digest)


def test_a_discarded_layer_goes_first_though_it_is_open(node: Node) -> None:
    for made in LAYERS[:2]:
        node.add(made)
    trash = node.table.dirs.discard(LAYERS[1].digest)
    assert trash is not None
    assert [entry.discarded for entry in node.keeper.entries()] == [False, True]
    node.keeper.evict(1, "size")
    assert (node.local(LAYERS[0]), progress(trash)[0]) == (len(LAYERS[0].stream), 0)


def test_ages_follow_what_is_fetched(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Periods end with bytes stored; what is read in each stays young, and goes last."""
    monkeypatch.setattr(module, "_PERIOD_BYTES", 1000)
    hot, cold = node.add(LAYERS[0]), node.add(LAYERS[1])
    assert not node.keeper.tick(10, 0)
    for period in range(1, 4):
        assert node.keeper.tick(period * 1000, 1000)
        assert not node.keeper.tick(period * 1000 + 999, 1000)
        hot.touched[:2] = b"\1\1"
    assert (set(cold.ages), hot.ages[0], hot.ages[5]) == ({2}, 0, 2)
    assert not node.keeper.tick(10_000, 16 * 10_000), "a sixteenth of the cache ends a period of a large one"
    node.keeper.evict(len(LAYERS[0].stream) + len(LAYERS[1].stream) - hot.contents[2], "size")
    assert [frame for frame, state in enumerate(hot.presence.states) if state] == [0, 1]
    assert cold.presence.missing == len(cold.presence)


def test_prune_by_age_and_layer(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PERIOD_BYTES", 1)
    for made in LAYERS[:3]:
        node.add(made)
    long_ago = time.time() - 7200
    node.close(LAYERS[1])
    node.keeper._used[LAYERS[1].digest] = long_ago
    before = time.time() - 3600
    done = prune_unserved(node.keeper, Which(before=before), None, dry=False)
    assert [row["digest"] for row in done["layers"]] == [LAYERS[1].digest]
    done = prune_unserved(node.keeper, Which((digests.hex_of(LAYERS[2].digest)[:8],)), None, dry=False)
    assert [row["digest"] for row in done["layers"]] == [LAYERS[2].digest]
    assert node.local(LAYERS[0]) == len(LAYERS[0].stream)
    # Within an open layer, frame by frame.
    layer = node.table.open_layers()[0]
    node.keeper.tick(10, 1)
    middle = time.time()
    time.sleep(0.01)
    layer.touched[0], layer.last_used = 1, time.monotonic()
    node.keeper.tick(20, 1)
    done = prune_unserved(node.keeper, Which(before=middle), None, dry=False)
    assert layer.presence.states[0] and layer.presence.missing == len(layer.presence) - 1


def test_layers_that_are_meant(node: Node) -> None:
    for made in LAYERS[:2]:
        node.add(made)
    known = node.keeper.digests()
    assert unmatched([LAYERS[0].name[:6]], known) == []
    assert unmatched([LAYERS[0].name, "zz"], known) == ["zz"]


def test_complete_layers_that_somebody_reads_are_asked_for_and_it_is_taken_back(node: Node) -> None:
    for made in LAYERS[:2]:
        layer = node.add(made)
        layer.presence.judge(GOOD, solid=True)
        assert is_complete(node.path(made))
    with open(f"{node.path(LAYERS[0])}/data", "rb"):
        done = node.keeper.evict(len(LAYERS[0].stream) * 3, "size")
        assert done.layers[LAYERS[0].digest].why == "mounted"
        assert node.keeper.ask(done, 1) == [LAYERS[0].digest]
        assert node.keeper.ask(done, 1) == [], "once"
        assert os.path.exists(f"{node.path(LAYERS[0])}/{EVICT}")
        assert not os.path.exists(f"{node.path(LAYERS[1])}/{EVICT}")
    node.keeper.evict(1, "size")
    assert not os.path.exists(f"{node.path(LAYERS[0])}/{EVICT}"), "it is complete no more"
    Path(node.path(LAYERS[1]), EVICT).touch()
    assert (node.keeper.withdraw(), node.keeper.withdraw()) == (1, 0)


def test_a_broken_directory_is_left_alone(node: Node) -> None:
    node.add(LAYERS[0])
    node.close(LAYERS[0])
    Path(node.path(LAYERS[0]), "present").write_bytes(b"rubbish")
    assert node.keeper.rows() == []
    assert not node.keeper.evict(1 << 30, "size").layers
    assert node.keeper.size().data > 0


def test_a_root_that_is_not_there_is_empty(tmp_path: Path) -> None:
    keeper = Keeper(str(tmp_path / "none" / "such"), CacheConfig())
    assert keeper.entries() == []
    size = keeper.size()
    assert (size.data, size.over) == (0, False) and size.disk.size > 0, "its disk is the one it would be on"
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        Keeper(str(tmp_path / "file" / "such"), CacheConfig()).size()
