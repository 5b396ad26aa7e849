"""The present file: marks, reboots, damage, full disks; and the data file beside it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weenv.core.errors import StorageError
from weenv.plugin.snapshotter.cache import present
from weenv.plugin.snapshotter.cache.present import DURABLE, MISSING, VOLATILE, Presence, is_complete, progress
from weenv.plugin.snapshotter.cache.store import DataStore, is_full

SIZES = np.array([100, 200, 300, 50], "<u4")
TOTAL = 650


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    """A layer directory with an empty data file."""
    DataStore.open(str(tmp_path / "data"), TOTAL).close()
    return tmp_path


def reboot(layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the machine another boot id."""
    monkeypatch.setattr(present, "boot_id", lambda: b"another boot id!")


def test_nothing_is_there_at_first(layer: Path) -> None:
    assert (is_complete(str(layer)), progress(str(layer))) == (False, (0, 0))
    presence = Presence.open(str(layer), SIZES, TOTAL)
    assert presence.states == bytes(4)
    assert presence.missing == 4
    assert (is_complete(str(layer)), progress(str(layer))) == (False, (0, TOTAL))
    presence.close()


def test_a_missing_directory_is_no_error(tmp_path: Path) -> None:
    assert not is_complete(str(tmp_path / "none"))
    assert progress(str(tmp_path / "none")) == (0, 0)


def test_marks_are_seen_by_others_at_once_and_survive_the_process(layer: Path) -> None:
    presence = Presence.open(str(layer), SIZES, TOTAL)
    presence.mark(1)
    presence.mark(1)
    assert (presence.missing, presence.volatile) == (3, 1)
    assert progress(str(layer)) == (200, TOTAL)
    for frame in (0, 2, 3):
        presence.mark(frame)
    assert is_complete(str(layer))
    again = Presence.open(str(layer), SIZES, TOTAL)  # the first was killed: never closed
    assert again.states == bytes([VOLATILE]) * 4
    assert (again.missing, again.volatile) == (0, 4)
    presence.close()
    again.close()


def test_after_another_boot_only_durable_marks_hold(layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    presence = Presence.open(str(layer), SIZES, TOTAL)
    for frame in (0, 1, 2):
        presence.mark(frame)
    presence.make_durable([0, 2])
    assert presence.states == bytes([DURABLE, VOLATILE, DURABLE, MISSING])
    assert presence.volatile_frames() == [1]
    presence.mark(3)
    presence.close()
    assert is_complete(str(layer))
    reboot(layer, monkeypatch)
    assert not is_complete(str(layer))
    assert progress(str(layer)) == (400, TOTAL)
    after = Presence.open(str(layer), SIZES, TOTAL)
    assert after.states == bytes([DURABLE, MISSING, DURABLE, MISSING])
    assert (after.missing, after.volatile) == (2, 0)
    after.mark(1)
    after.mark(3)
    assert is_complete(str(layer))  # complete for this boot
    after.close()
    monkeypatch.setattr(present, "boot_id", lambda: b"a third boot id!")
    assert progress(str(layer)) == (400, TOTAL)


def test_marks_without_their_data_are_void(layer: Path) -> None:
    presence = Presence.open(str(layer), SIZES, TOTAL)
    presence.mark(0)
    presence.close()
    os.unlink(layer / "data")
    assert progress(str(layer)) == (0, 0)
    again = Presence.open(str(layer), SIZES, TOTAL)
    DataStore.open(str(layer / "data"), TOTAL).close()
    assert again.states == bytes(4)
    assert progress(str(layer)) == (0, TOTAL)
    again.close()


@pytest.mark.parametrize("sizes", [[100, 200, 300], [100, 200, 299, 51]])
def test_another_frame_table_starts_anew(layer: Path, sizes: list[int]) -> None:
    presence = Presence.open(str(layer), SIZES, TOTAL)
    presence.mark(0)
    presence.close()
    again = Presence.open(str(layer), np.array(sizes, "<u4"), TOTAL)
    assert again.states == bytes(len(sizes))
    again.close()


def test_a_layer_without_frames_is_complete(tmp_path: Path) -> None:
    none = np.zeros(0, "<u4")
    presence = Presence.open(str(tmp_path), none, 0)
    DataStore.open(str(tmp_path / "data"), 0).close()
    assert is_complete(str(tmp_path))
    presence.close()


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_file_never_shows_more_than_was_marked(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    layer = tmp_path_factory.mktemp("layer")
    DataStore.open(str(layer / "data"), TOTAL).close()
    presence = Presence.open(str(layer), SIZES, TOTAL)
    presence.mark(2)
    presence.close()
    content = bytearray((layer / "present").read_bytes())
    # Damage of the header, and truncation; a state byte itself carries no check: a page of a file is zeros or as written.
    if data.draw(st.booleans()):
        content[data.draw(st.integers(0, 63))] ^= data.draw(st.integers(1, 255))
    else:
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    (layer / "present").write_bytes(content)
    assert not is_complete(str(layer))
    assert progress(str(layer)) in ((0, 0), (300, TOTAL))
    again = Presence.open(str(layer), SIZES, TOTAL)
    assert again.states in (bytes(4), bytes([0, 0, VOLATILE, 0]))
    again.close()


def test_without_room_for_the_file_marks_live_in_memory(layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(present, "write_atomic", full)
        presence = Presence.open(str(layer), SIZES, TOTAL)
        assert not presence.persistent
        presence.mark(3)
        assert presence.states[3] == VOLATILE
        assert not presence.persist()
    assert presence.persist()
    assert progress(str(layer)) == (50, TOTAL)
    presence.close()


def test_the_store_reads_back_what_it_was_given_and_is_sparse(tmp_path: Path) -> None:
    store = DataStore.open(str(tmp_path / "data"), 1 << 30)
    store.write(1 << 29, b"x" * 4096)
    store.sync()
    assert os.pread(store.fd, 4098, (1 << 29) - 1) == b"\0" + b"x" * 4096 + b"\0"
    assert store.allocated() <= 1 << 20
    store.close()


def test_a_store_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        DataStore.open(str(tmp_path / "missing" / "data"), 10)
    assert caught.value.errno == errno.ENOENT
    assert not is_full(caught.value)
    assert is_full(OSError(errno.EDQUOT, ""))
