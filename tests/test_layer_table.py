"""The layers that blobfs has open: found, opened, closed for room, and what is not to be opened. No mount."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from array import array
from pathlib import Path

import pytest

from weenv.core.errors import StorageError, WeenvError
from weenv.plugin.snapshotter.blobfs import layers
from weenv.plugin.snapshotter.blobfs.daemon import read_tail
from weenv.plugin.snapshotter.blobfs.layers import BadLayer, DamagedTail, Layer, LayerTable
from weenv.plugin.snapshotter.cache.present import BAD
from weenv.plugin.snapshotter.fetch.flight import DEMAND, Flight
from weenv.plugin.snapshotter.fetch.planner import Extents
from weenv.plugin.snapshotter.fetch.siblings import Siblings
from weenv.plugin.snapshotter.layerdir import LayerDirs
from weenv_testkit.synthetic import SyntheticLayer, make_layer, payload

LAYERS = [make_layer([("f", payload(40_000, number))], target=4096) for number in range(6)]


class Over:
    """Counts how often a table asked for help."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def table(tmp_path: Path, memory_max: int = 1 << 30, over: Over | None = None) -> LayerTable:
    for layer in LAYERS:
        layer.install(str(tmp_path))
    return LayerTable(
        LayerDirs(str(tmp_path)), read_tail, lambda _source, _origins: [], memory_max=memory_max, over=over or Over()
    )


def opened(found: LayerTable, layer: SyntheticLayer) -> Layer:
    node = found.lookup(layer.name.encode())
    assert node is not None
    assert node.layer is not None
    return node.layer


def is_open(found: LayerTable) -> list[bool]:
    names = {layer.source.digest for layer in found.open_layers()}
    return [layer.digest in names for layer in LAYERS]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_least_recently_read_layers_are_closed_for_room(tmp_path: Path) -> None:
    over = Over()
    found = table(tmp_path, over=over)
    before = descriptors()
    one = opened(found, LAYERS[0]).memory
    assert found.memory() == one
    found.memory_max = one * 7 // 2
    for number, layer in enumerate(LAYERS):
        opened(found, layer).last_used = time.monotonic() + number
        if number == 2:
            opened(found, LAYERS[0]).last_used = time.monotonic() + 2.5  # read again
    assert is_open(found) == [False, False, False, True, True, True]
    assert descriptors() <= before + 2 * 3
    node = found.nodes[2]
    assert node.attributes  # GETATTR is answered all the same
    again = found.reopen(node, fresh=False)
    assert again is not None
    assert is_open(found) == [True, False, False, False, True, True]
    assert over.count == 0


def test_busy_layers_stay_open_and_somebody_is_told(tmp_path: Path) -> None:
    over = Over()
    found = table(tmp_path, over=over)
    first, second = opened(found, LAYERS[0]), opened(found, LAYERS[1])
    first.flights[0] = Flight(first, 0, DEMAND)
    second.store.write(0, LAYERS[1].stream)
    second.presence.mark(0)
    found.memory_max = first.memory + second.memory
    third = opened(found, LAYERS[2])
    assert is_open(found)[:3] == [True, True, True]
    assert over.count == 1
    found.memory_max = 1
    assert second.sync() == 1
    first.flights.clear()
    assert found.trim(keep=third) == 2
    assert is_open(found)[:3] == [False, False, True]


def test_no_further_layer_is_opened_while_all_are_busy_and_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = table(tmp_path)
    first = opened(found, LAYERS[0])
    first.flights[0] = Flight(first, 0, DEMAND)
    found.memory_max = first.memory // 3
    monkeypatch.setattr(layers, "_ROOM", 0.1)
    with pytest.raises(StorageError, match="is not opened: those that are open take") as caught:
        opened(found, LAYERS[1])
    assert caught.value.errno == errno.ENOMEM and "layers_memory" in caught.value.hint
    monkeypatch.setattr(layers, "_ROOM", 20.0)
    results: list[Layer] = []
    waiting = threading.Thread(target=lambda: results.append(opened(found, LAYERS[1])))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and not results
    first.flights.clear()
    waiting.join(60)
    assert len(results) == 1
    assert is_open(found)[:2] == [False, True]


def test_tables_of_read_ahead_that_are_too_large_are_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A TOC of millions of files: one layer may have them, twenty may not."""
    found = table(tmp_path, memory_max=20 << 20)
    many = array("Q", bytes(8 << 20))
    kept = []
    for made in LAYERS[:3]:
        layer = opened(found, made)
        layer.flights[0] = Flight(layer, 0, DEMAND)  # it must stay open
        layer.read_ahead.extents = Extents(many, many, bytearray(1 << 20), Siblings.none())
        kept.append(found.fit(layer))
        assert found.memory() <= 20 << 20
    assert kept == [True, False, False]
    assert [record.getMessage() for record in caplog.records].count(
        "no read-ahead for a layer: the tables of open layers take all the memory that they may"
    ) == 2


@pytest.mark.parametrize("how", ["bit", "short", "gone"])
def test_a_damaged_tail_says_what_to_fetch(tmp_path: Path, how: str) -> None:
    found = table(tmp_path)
    toc = Path(found.dirs.file(LAYERS[0].digest, "toc"))
    content = bytearray(toc.read_bytes())
    content[7] ^= 4
    if how == "gone":
        toc.unlink()
    else:
        toc.write_bytes(content if how == "bit" else content[:-1])
    with pytest.raises(DamagedTail) as caught:
        found.lookup(LAYERS[0].name.encode())
    assert caught.value.source.digest == LAYERS[0].digest
    assert caught.value.errno == errno.EIO
    toc.write_bytes(LAYERS[0].tail)
    assert opened(found, LAYERS[0]).size == len(LAYERS[0].stream)


def test_a_layer_whose_directory_is_gone_is_no_damage(tmp_path: Path) -> None:
    found = table(tmp_path)
    assert found.dirs.discard(LAYERS[0].digest)
    assert found.lookup(LAYERS[0].name.encode()) is None


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"version": 1}', '{"version": 2}', "x" * 100, '{"version":1,"digest":5,"origins":[]}']
)
def test_a_damaged_source_file_is_an_error_of_one_line(tmp_path: Path, text: str) -> None:
    found = table(tmp_path)
    Path(found.dirs.file(LAYERS[0].digest, "source.json")).write_text(text)
    with pytest.raises(WeenvError, match=r"source\.json") as caught:
        found.lookup(LAYERS[0].name.encode())
    assert "\n" not in str(caught.value)


def test_a_bad_layer_is_not_opened_until_it_is_another_directory(tmp_path: Path) -> None:
    found = table(tmp_path)
    layer = opened(found, LAYERS[0])
    assert layer.presence.judge(BAD)
    found.refuse(layer, "because")
    assert found.bad == {LAYERS[0].digest: "because"}
    assert is_open(found) == [False] * 6
    for _ in range(2):
        with pytest.raises(BadLayer, match=LAYERS[0].toc.diff_id) as caught:
            found.lookup(LAYERS[0].name.encode())
        assert caught.value.hint
    found.dirs.discard(LAYERS[0].digest)
    LAYERS[0].install(str(tmp_path))
    opened(found, LAYERS[0])
    assert found.bad == {}


def test_what_a_cut_file_has_lost_is_taken_back_before_it_reads_as_zeros(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = table(tmp_path)
    layer = opened(found, LAYERS[0])
    layer.store.write(0, LAYERS[0].stream)
    for frame in range(len(layer.presence)):
        layer.presence.mark(frame)
    os.truncate(os.path.join(layer.path, "data"), 8192)
    with caplog.at_level(logging.ERROR):
        layer.take_back([2], "data is short")
        layer.take_back([2], "data is short")
    assert len(caplog.records) == 1
    assert os.path.getsize(os.path.join(layer.path, "data")) == layer.size
    kept = [frame for frame, state in enumerate(layer.presence.states) if state]
    assert kept
    assert all(layer.contents[frame + 1] <= 8192 for frame in kept)
    assert layer.tally.errors == {"damage": 2}
    os.truncate(os.path.join(layer.path, "data"), 0)
    layer.sync()
    assert layer.presence.missing == len(layer.presence)
