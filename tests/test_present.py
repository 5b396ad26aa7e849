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
from weenv.plugin.snapshotter.cache.present import (
    AGAIN,
    BAD,
    DURABLE,
    GOOD,
    MISSING,
    UNCHECKED,
    VOLATILE,
    Presence,
    first_hole,
    is_bad,
    is_complete,
    lost_frames,
    progress,
)
from weenv.plugin.snapshotter.cache.store import DataStore, is_full

SIZES = np.array([100, 200, 300, 50], "<u4")
TOTAL = 650


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    """A layer directory with a data file that has all its bytes."""
    (tmp_path / "data").write_bytes(b"d" * TOTAL)
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
    assert not is_complete(str(layer))  # nobody has looked whether it has its diffID
    assert presence.judge(GOOD)
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
    assert presence.judge(GOOD)
    presence.close()
    assert is_complete(str(layer))
    reboot(layer, monkeypatch)
    assert not is_complete(str(layer))
    assert progress(str(layer)) == (400, TOTAL)
    after = Presence.open(str(layer), SIZES, TOTAL)
    assert after.states == bytes([DURABLE, MISSING, DURABLE, MISSING])
    assert (after.missing, after.volatile) == (2, 0)
    assert after.verdict == UNCHECKED
    after.mark(1)
    after.mark(3)
    assert after.judge(GOOD)
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
    assert presence.judge(GOOD)
    assert is_complete(str(tmp_path))
    presence.close()


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_file_never_shows_more_than_was_marked(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    layer = tmp_path_factory.mktemp("layer")
    (layer / "data").write_bytes(b"d" * TOTAL)
    presence = Presence.open(str(layer), SIZES, TOTAL)
    presence.mark(2)
    presence.close()
    content = bytearray((layer / "present").read_bytes())
    match data.draw(st.integers(0, 2)):
        case 0:
            content[data.draw(st.integers(0, 63))] ^= data.draw(st.integers(1, 255))
        case 1:
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case _:  # up to three bits of the rest turn: a frame never appears for it
            for bit in data.draw(st.lists(st.integers(64 * 8, len(content) * 8 - 1), min_size=1, max_size=3, unique=True)):
                content[bit // 8] ^= 1 << bit % 8
    (layer / "present").write_bytes(content)
    assert not is_complete(str(layer))
    assert progress(str(layer)) in ((0, 0), (300, TOTAL))
    again = Presence.open(str(layer), SIZES, TOTAL)
    assert again.states in (bytes(4), bytes([0, 0, VOLATILE, 0]))
    again.close()


HOLES = np.array([4096 * 3, 100, 4096 * 4, 8192], "<u4")
"""Frames that are not aligned to blocks, as real ones are not."""
SPARSE = int(HOLES.sum())


def test_frames_in_holes_are_missing_whatever_the_file_says(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(b"d" * SPARSE)
    presence = Presence.open(str(tmp_path), HOLES, SPARSE)
    for frame in range(4):
        presence.mark(frame)
    assert presence.judge(GOOD, solid=True)
    presence.close()
    assert is_complete(str(tmp_path))
    with data.open("r+b") as file:  # what is behind the second block of the last frame is cut off, and grown again as a hole
        file.truncate(SPARSE - 6000)
        file.truncate(SPARSE)
    assert not is_complete(str(tmp_path))
    again = Presence.open(str(tmp_path), HOLES, SPARSE)
    assert again.states == bytes([VOLATILE, VOLATILE, VOLATILE, MISSING])
    assert (again.missing, again.volatile, again.verdict) == (1, 3, UNCHECKED)
    assert "lost 1 frames" in again.damage
    again.close()
    with data.open("r+b") as file:
        file.truncate(0)
    assert Presence.open(str(tmp_path), HOLES, SPARSE).missing == 4


def test_a_shorter_data_file_loses_only_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"d" * SPARSE)
    presence = Presence.open(str(tmp_path), HOLES, SPARSE)
    for frame in range(4):
        presence.mark(frame)
    presence.close()
    os.truncate(tmp_path / "data", 4096 * 3 + 50)
    again = Presence.open(str(tmp_path), HOLES, SPARSE)
    assert again.states == bytes([VOLATILE, MISSING, MISSING, MISSING])
    again.close()


def test_a_file_system_that_makes_holes_of_zeros_is_believed_once_the_stream_was_good(tmp_path: Path) -> None:
    DataStore.open(str(tmp_path / "data"), SPARSE).close()  # all zeros, all hole
    presence = Presence.open(str(tmp_path), HOLES, SPARSE)
    for frame in range(4):
        presence.mark(frame)
    assert presence.judge(GOOD, solid=False)
    presence.close()
    assert is_complete(str(tmp_path))
    again = Presence.open(str(tmp_path), HOLES, SPARSE)
    assert (again.missing, again.damage) == (0, "")
    again.close()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_lost_frames_are_those_that_meet_a_hole(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    sizes = np.array(data.draw(st.lists(st.integers(1, 20_000), min_size=1, max_size=20)), "<u4")
    total = int(sizes.sum())
    path = tmp_path_factory.mktemp("holes") / "data"
    blocks = -(-total // 4096)
    written = data.draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks))
    with path.open("wb") as file:
        for number, there in enumerate(written):
            if there:
                os.pwrite(file.fileno(), b"x" * min(4096, total - number * 4096), number * 4096)
        file.truncate(total)
    states = bytearray(data.draw(st.lists(st.sampled_from([MISSING, DURABLE]), min_size=len(sizes), max_size=len(sizes))))
    ends = np.cumsum(sizes).tolist()
    fd = os.open(path, os.O_RDONLY)
    expected = [
        frame
        for frame, state in enumerate(states)
        if state and not all(written[(ends[frame] - int(sizes[frame])) // 4096 : (ends[frame] - 1) // 4096 + 1])
    ]
    assert lost_frames(fd, sizes, states) == expected
    assert first_hole(fd, 0, total) == min((number * 4096 for number, there in enumerate(written) if not there), default=total)
    os.close(fd)


def test_frames_that_were_lost_are_fetched_and_made_durable_anew(layer: Path) -> None:
    presence = Presence.open(str(layer), SIZES, TOTAL)
    for frame in range(4):
        presence.mark(frame)
    assert presence.judge(GOOD)
    frames = presence.volatile_frames()  # a sync begins ...
    assert presence.lose([1, 1]) == 1
    assert (presence.missing, presence.volatile, presence.verdict) == (1, 3, UNCHECKED)
    assert not presence.judge(GOOD)
    presence.mark(1)
    presence.make_durable(frames)  # ... and ends after frame 1 was written again, which it did not cover
    assert presence.states == bytes([DURABLE, VOLATILE, DURABLE, DURABLE])
    presence.make_durable(presence.volatile_frames())
    assert presence.states == bytes([DURABLE]) * 4
    presence.close()


def test_a_verdict_stays(layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    presence = Presence.open(str(layer), SIZES, TOTAL)
    for verdict in (AGAIN, BAD):
        presence.judge(verdict)
        presence.close()
        reboot(layer, monkeypatch)
        presence = Presence.open(str(layer), SIZES, TOTAL)
        assert presence.verdict == verdict
        assert is_bad(str(layer)) is (verdict == BAD)
        presence.mark(0)
        presence.lose([0])
        assert presence.verdict == verdict
    presence.close()


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
    assert is_full(OSError(errno.EROFS, ""))


def test_a_store_whose_length_was_cut_gets_it_back(tmp_path: Path) -> None:
    store = DataStore.open(str(tmp_path / "data"), 10_000)
    store.write(0, b"x" * 10_000)
    assert not store.short()
    os.truncate(tmp_path / "data", 100)
    assert store.short()
    store.mend()
    assert (tmp_path / "data").read_bytes() == b"x" * 100 + bytes(9_900)
    store.close()
    store.mend()


def test_a_read_only_store_reads_and_becomes_writable_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_bytes(b"x" * 10)
    real = os.open

    def readonly(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, "read-only")
        return real(path, flags, mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", readonly)
        store = DataStore.open(str(tmp_path / "data"), 10)
        assert os.pread(store.fd, 20, 0) == b"x" * 10
        with pytest.raises(StorageError) as caught:
            store.write(0, b"y")
        assert is_full(caught.value)
    fd, store._next_try = store.fd, 0.0
    store.write(3, b"y")
    assert (store.fd, os.pread(fd, 20, 0)) == (fd, b"xxxyxxxxxx")
    store.close()
