"""Eviction: which frames go, what is punched, and that no reader sees a hole whatever happens in between."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from weenv.plugin.snapshotter.cache import evict, present, store
from weenv.plugin.snapshotter.cache.evict import OLDEST, Guard, Held, choose, drop, holes
from weenv.plugin.snapshotter.cache.present import DURABLE, GOOD, MISSING, VOLATILE, Presence, is_complete, is_whole
from weenv.plugin.snapshotter.cache.store import DataStore, hold
from weenv.plugin.snapshotter.layerdir import EVICT

# -- which ------------------------------------------------------------------------------------------------------------


def held(sizes: Sequence[int], ages: Sequence[int], *, unused: bool = False, used_at: float = 0.0, there: str = "") -> Held:
    """A layer with these frames, all of them there, or those where ``there`` has an ``x``."""
    states = [DURABLE if not there or there[n] == "x" else MISSING for n in range(len(sizes))]
    return Held(np.array(sizes, "<u4"), np.array(states, "u1"), np.array(ages, "u1"), unused, used_at)


def plain(victims: list[tuple[int, NDArray[np.int64]]]) -> list[tuple[int, list[int]]]:
    """Victims as lists."""
    return [(index, frames.tolist()) for index, frames in victims]


def test_the_oldest_go_first_and_no_more_than_needed() -> None:
    layers = [held([10, 10, 10], [0, 9, 3]), held([10, 10], [9, 4])]
    assert plain(choose(layers, 5)) == [(0, [1])]
    assert plain(choose(layers, 20)) == [(0, [1]), (1, [0])]
    assert plain(choose(layers, 21)) == [(0, [1]), (1, [0]), (1, [1])]
    assert plain(choose(layers, 1000)) == [(0, [1, 2]), (1, [0, 1]), (0, [0])]


def test_what_no_snapshot_has_goes_first_and_whole() -> None:
    new = held([10] * 3, [0] * 3, unused=True, used_at=5)
    layers = [held([10] * 3, [255] * 3), new, held([10], [0], unused=True, used_at=4)]
    assert plain(choose(layers, 1)) == [(2, [0])]
    assert plain(choose(layers, 11)) == [(2, [0]), (1, [0, 1, 2])]
    assert plain(choose(layers, 41)) == [(2, [0]), (1, [0, 1, 2]), (0, [0])]


def test_of_equals_the_layer_used_longest_ago_goes() -> None:
    layers = [held([10] * 2, [7] * 2, used_at=9), held([10] * 2, [7] * 2, used_at=3)]
    assert plain(choose(layers, 15)) == [(1, [0, 1])]


def test_what_is_missing_young_or_spared_stays() -> None:
    layers = [held([10] * 4, [0, 3, 9, 9], there="xx.x"), held([10], [255])]
    assert plain(choose(layers, 1000, youngest=3, spare={1})) == [(0, [3]), (0, [1])] or plain(
        choose(layers, 1000, youngest=3, spare={1})
    ) == [(0, [1, 3])]
    assert choose([], 10) == []
    assert choose([held([], [])], 10) == []


LAYER = st.integers(0, 40).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 1 << 20), min_size=n, max_size=n),
        st.lists(st.sampled_from((0, 1, 2, 254, 255)), min_size=n, max_size=n),
        st.lists(st.sampled_from((MISSING, VOLATILE, DURABLE)), min_size=n, max_size=n),
        st.booleans(),
        st.floats(0, 10),
    )
)


@given(st.lists(LAYER, max_size=6), st.integers(0, 1 << 24))
@settings(max_examples=200, deadline=None)
def test_choices_are_enough_minimal_and_in_order(
    raw: list[tuple[list[int], list[int], list[int], bool, float]], wanted: int
) -> None:
    layers = [
        Held(np.array(sizes, "<u4"), np.array(states, "u1"), np.array(ages, "u1"), unused, at)
        for sizes, ages, states, unused, at in raw
    ]
    victims = choose(layers, wanted)
    chosen = [(index, frame) for index, frames in victims for frame in frames.tolist()]
    assert len(chosen) == len(set(chosen))
    assert all(layers[index].states[frame] for index, frame in chosen)
    total = sum(int(layers[index].sizes[frame]) for index, frame in chosen)
    there = [(i, f) for i, layer in enumerate(layers) for f in range(len(layer.sizes)) if layer.states[f]]
    assert total >= min(wanted, sum(int(layers[i].sizes[f]) for i, f in there))
    used = [(i, f) for i, f in chosen if not layers[i].unused]
    if used:
        assert all((i, f) in chosen for i, f in there if layers[i].unused), "a used layer before an unused one"
        youngest = min(int(layers[i].ages[f]) for i, f in used)
        older = [(i, f) for i, f in there if not layers[i].unused and layers[i].ages[f] > youngest]
        assert set(older) <= set(chosen)
        last = next(f for i, f in reversed(chosen) if layers[i].ages[f] == youngest)
        index = next(i for i, f in reversed(chosen) if f == last and layers[i].ages[f] == youngest)
        assert total - int(layers[index].sizes[last]) < wanted, "one frame less would have been enough"


def test_ages_grow_by_a_period_and_a_read_makes_young() -> None:
    ages, touched = np.array([0, 5, 255, 9, 9], "u1"), np.array([0, 1, 0, 0, 1], "u1")
    evict.age(ages, touched, np.array([DURABLE, DURABLE, DURABLE, MISSING, VOLATILE], "u1"))
    assert ages.tolist() == [1, 0, OLDEST, 0, 0]
    assert not touched.any()


# -- what is punched --------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 20_000), min_size=1, max_size=30).flatmap(
        lambda sizes: st.tuples(
            st.just(sizes), *[st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)) for _ in range(3)]
        )
    ),
    st.sampled_from((512, 4096)),
)
@settings(max_examples=300, deadline=None)
def test_only_whole_blocks_of_missing_frames_are_punched(
    case: tuple[list[int], list[bool], list[bool], list[bool]], block: int
) -> None:
    sizes, is_gone, is_missing, is_busy = case
    contents = [0, *np.cumsum(sizes).tolist()]
    gone = [n for n in range(len(sizes)) if is_gone[n] and not is_busy[n]]
    states = bytes(MISSING if is_missing[n] or n in gone else VOLATILE for n in range(len(sizes)))
    busy = {n for n in range(len(sizes)) if is_busy[n]}
    found = holes(states, contents, gone, busy, block)
    assert [frame for _, _, run in found for frame in run] == gone
    punched = bytearray(contents[-1] + block)
    for begin, end, _ in found:
        if begin < end:
            assert begin % block == 0
            assert end % block == 0 or end >= contents[-1]
            punched[begin:end] = b"\1" * (end - begin)
    for n in range(len(sizes)):
        span = punched[contents[n] : contents[n + 1]]
        if states[n] != MISSING or n in busy:
            assert not any(span), f"a byte of frame {n} would be lost"
        elif n in gone:
            low, high = -(-contents[n] // block) * block, contents[n + 1] // block * block
            assert all(punched[low:high]), f"frame {n} keeps a whole block"


def test_blocks_that_two_frames_share_go_when_both_are_gone() -> None:
    contents = [0, 6000, 12_000, 20_480]
    one = bytes((VOLATILE, MISSING, VOLATILE))
    assert holes(one, contents, [1], (), 4096) == [(8192, 8192, range(1, 2))]
    both = bytes((MISSING, MISSING, VOLATILE))
    assert holes(both, contents, [0], (), 4096) == [(0, 8192, range(1))]
    assert holes(bytes(3), contents, [2], (), 4096) == [(8192, 20_480, range(2, 3))]
    assert holes(bytes(3), contents, [2], {1}, 4096) == [(12_288, 20_480, range(2, 3))]


# -- how: a layer on a real disk --------------------------------------------------------------------------------------

SIZES = np.array([10_000, 4096, 20_000, 3000, 3000, 50_000, 1, 12_345], "<u4")
CONTENTS = [0, *np.cumsum(SIZES, dtype=np.int64).tolist()]
TOTAL = CONTENTS[-1]
BYTES = random.Random(1).randbytes(TOTAL).replace(b"\0", b"\1")


class Disk:
    """A layer directory on disk, and what blobfs has open of it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.writing = threading.Lock()
        self.open()

    def open(self) -> None:
        """As :meth:`LayerTable._open_at` does it."""
        with hold(f"{self.path}/data"):
            self.presence = Presence.open(self.path, SIZES, TOTAL)
            self.store = DataStore.open(f"{self.path}/data", TOTAL)

    def close(self) -> None:
        """As if the process had been killed."""
        self.presence.close()
        self.store.close()

    def fetch(self, frame: int) -> None:
        """As :meth:`Fetcher._save` does it."""
        with self.writing:
            self.store.write(CONTENTS[frame], BYTES[CONTENTS[frame] : CONTENTS[frame + 1]])
            self.presence.mark(frame)

    def read(self, frame: int) -> bytes:
        """What is on disk where the frame is."""
        return os.pread(self.store.fd, int(SIZES[frame]), CONTENTS[frame])

    def right(self, frame: int) -> bool:
        """Whether that is the frame."""
        return self.read(frame) == BYTES[CONTENTS[frame] : CONTENTS[frame + 1]]

    def sync(self) -> None:
        """As :meth:`Layer.sync`."""
        frames = self.presence.volatile_frames()
        self.store.sync()
        self.presence.make_durable(frames)

    def drop(self, frames: Sequence[int], **guard: object) -> evict.Dropped:
        """Evict."""
        made = Guard(self.writing, **guard)  # type: ignore[arg-type]
        return drop(self.store, self.presence, CONTENTS, np.array(frames, np.int64), made)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(str(tmp_path))
    for frame in range(len(SIZES)):
        made.fetch(frame)
    yield made
    made.close()


def test_the_frames_are_missing_and_their_blocks_are_free(disk: Disk) -> None:
    disk.sync()
    before = disk.store.allocated()
    done = disk.drop([2, 5])
    assert (done.frames, done.size, done.why) == (2, 70_000, "")
    assert disk.presence.states == bytes(MISSING if n in (2, 5) else DURABLE for n in range(8))
    assert before - disk.store.allocated() >= 70_000 - 4 * 4096
    assert not disk.right(5)
    assert all(map(disk.right, (0, 1, 3, 4, 6, 7)))
    assert os.path.getsize(f"{disk.path}/data") == TOTAL
    disk.fetch(5)
    assert disk.right(5)
    disk.drop(range(8))
    assert disk.store.allocated() == 0
    assert disk.presence.missing == 8


def test_the_file_says_so_before_the_blocks_go(disk: Disk) -> None:
    """A process killed at the moment of punching leaves no mark without its frame."""
    disk.sync()
    seen: list[bytes] = []
    punch = disk.store.punch

    def note(begin: int, end: int) -> None:
        states = present.frame_states(disk.path + "/../copy", SIZES, TOTAL)
        assert states is not None
        seen.append(bytes(states))
        punch(begin, end)

    os.makedirs(disk.path + "/../copy", exist_ok=True)
    os.truncate(os.open(disk.path + "/../copy/data", os.O_CREAT | os.O_RDWR), TOTAL)
    with contextlib.suppress(FileExistsError):
        os.symlink(f"{disk.path}/present", disk.path + "/../copy/present")
    disk.store.punch = note  # type: ignore[method-assign]
    assert disk.drop([0, 2, 5]).frames == 3
    assert seen and all(states == bytes(MISSING if n in (0, 2, 5) else DURABLE for n in range(8)) for states in seen)


def test_who_has_the_file_open_keeps_every_frame(disk: Disk) -> None:
    with open(f"{disk.path}/data", "rb"):
        assert disk.drop(range(8)).why == "mounted"
    other = Disk(disk.path)
    assert disk.drop(range(8)).why == "mounted"
    other.close()
    assert disk.presence.missing == 0
    assert disk.drop(range(8)).why == "disk", "its file of marks has been replaced"
    disk.close()
    disk.open()
    assert disk.drop(range(8)).frames == 8


def test_who_opens_the_file_meanwhile_waits_and_sees_the_marks(disk: Disk) -> None:
    order: list[str] = []
    threads: list[threading.Thread] = []

    def late() -> None:
        other = Disk(disk.path)
        order.append(f"open with {other.presence.missing} missing")
        other.close()

    def quiet() -> bool:
        thread = threading.Thread(target=late)
        thread.start()
        threads.append(thread)
        thread.join(0.3)
        assert thread.is_alive(), "it must not get the file before the frames are gone"
        order.append("quiet")
        return True

    assert disk.drop([1, 2], quiet=quiet).frames == 2
    threads[0].join(60)
    assert order == ["quiet", "open with 2 missing"]


def test_nothing_is_punched_once_the_lease_may_be_gone(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped, or a disk that hangs, for longer than who opens the file waits: it has it open then."""
    now = store.time.monotonic

    def stopped() -> bool:
        fcntl.fcntl(disk.store.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)  # as the kernel does it
        monkeypatch.setattr(store.time, "monotonic", lambda: now() + 3600)
        return True

    done = disk.drop([1, 2], quiet=stopped)
    assert (done.frames, done.why) == (0, "mounted")
    assert all(map(disk.right, range(8)))
    assert all(disk.presence.states)
    disk.presence.lose([1])
    assert evict.tidy(disk.store, disk.presence, CONTENTS, Guard(disk.writing, quiet=stopped)) == 0
    assert disk.right(1)


def test_another_thread_that_asks_does_not_give_back_the_lease(disk: Disk) -> None:
    """``weenv cache ls`` looks whether a layer can be evicted while it is."""
    threads: list[threading.Thread] = []

    def look() -> None:
        with disk.store.alone():
            pass

    def quiet() -> bool:
        threads.append(threading.Thread(target=look))
        threads[0].start()
        threads[0].join(0.2)
        with pytest.raises(BlockingIOError):
            os.close(os.open(f"{disk.path}/data", os.O_RDONLY | os.O_NONBLOCK))
        return True

    assert disk.drop([1, 2], quiet=quiet).frames == 2
    threads[0].join(60)


def test_a_slow_eviction_that_nobody_waits_for_goes_on(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    now = store.time.monotonic

    def slow() -> bool:
        monkeypatch.setattr(store.time, "monotonic", lambda: now() + 3600)
        return True

    assert disk.drop([1, 2], quiet=slow).frames == 2


def test_frames_that_a_reader_waits_with_stay(disk: Disk) -> None:
    """Before, and where it comes only while eviction is under way."""
    assert disk.drop([1, 2], in_use=lambda: {1}).frames == 1
    calls = iter([set(), {5}])
    assert disk.drop([5, 7], in_use=lambda: next(calls)).frames == 1
    assert disk.right(5)
    assert disk.presence.states[5] == VOLATILE
    assert disk.presence.states[7] == MISSING
    reopened = Presence.open(disk.path, SIZES, TOTAL)
    assert reopened.states == disk.presence.states
    reopened.close()


def test_a_read_that_does_not_end_keeps_everything(disk: Disk) -> None:
    done = disk.drop([1, 2], quiet=lambda: False)
    assert (done.frames, done.why) == (0, "busy")
    assert all(disk.presence.states)
    assert all(map(disk.right, range(8)))


def test_a_frame_that_was_fetched_again_meanwhile_stays(disk: Disk) -> None:
    def quiet() -> bool:
        disk.fetch(2)
        return True

    assert disk.drop([1, 2], quiet=quiet).frames == 1
    assert disk.presence.states[2] == VOLATILE
    assert disk.right(2)


def test_a_complete_layer_is_complete_no_more(disk: Disk) -> None:
    disk.sync()
    disk.presence.judge(GOOD, solid=True)
    assert is_complete(disk.path) and is_whole(disk.path)
    Path(disk.path, EVICT).touch()
    assert is_complete(disk.path) and not is_whole(disk.path)
    losses = disk.presence.losses
    disk.drop([3])
    assert not is_complete(disk.path)
    assert disk.presence.losses > losses, "who hashed it meanwhile must know"


def test_marks_that_cannot_be_written_keep_every_frame(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.sync()

    def fail(_fd: int) -> None:
        raise OSError(5, "broken")

    monkeypatch.setattr(os, "fdatasync", fail)
    done = disk.drop([1, 2])
    monkeypatch.undo()
    assert (done.frames, done.why) == (0, "disk")
    assert all(disk.presence.states)
    assert all(map(disk.right, range(8)))


def test_what_lies_there_without_a_mark_is_given_back(disk: Disk) -> None:
    """A process was killed between a frame's bytes and its mark; what a reader waits for and what is marked stays."""
    disk.presence.lose([1, 2, 5])
    with disk.writing:
        disk.store.write(CONTENTS[5], BYTES[CONTENTS[5] : CONTENTS[6]])
    before = disk.store.allocated()
    kept = evict.tidy(disk.store, disk.presence, CONTENTS, Guard(disk.writing, in_use=lambda: {5}))
    assert 16_384 <= kept < 40_000
    assert disk.right(5)
    assert evict.tidy(disk.store, disk.presence, CONTENTS, Guard(disk.writing)) >= 40_000
    assert before - disk.store.allocated() >= 60_000
    assert all(disk.right(frame) for frame in range(8) if disk.presence.states[frame])
    assert evict.tidy(disk.store, disk.presence, CONTENTS, Guard(disk.writing)) == 0


def test_a_file_system_that_punches_no_holes_keeps_every_frame(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    from weenv.core.errors import StorageError

    def refuse(_begin: int, _end: int) -> None:
        raise StorageError("no", errno=95)

    monkeypatch.setattr(disk.store, "punch", refuse)
    done = disk.drop([1, 2])
    assert (done.frames, done.why) == (0, "unsupported")
    assert all(disk.presence.states)


def test_a_punch_that_failed_half_way_leaves_no_mark(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    from weenv.core.errors import StorageError

    def fail(_begin: int, _end: int) -> None:
        raise StorageError("broken", errno=5)

    monkeypatch.setattr(disk.store, "punch", fail)
    done = disk.drop([2, 5])
    assert (done.frames, done.why) == (0, "disk")
    assert [disk.presence.states[n] for n in (2, 5)] == [MISSING, MISSING]


# -- how: any order of events -----------------------------------------------------------------------------------------

FRAMES = st.lists(st.integers(0, len(SIZES) - 1), min_size=1, max_size=6, unique=True)


class Cache(RuleBasedStateMachine):
    """Fetches, reads, syncs, evictions, kills and power cuts in any order, with others between the steps of an eviction.

    The model: a frame that is marked reads right, and a reader that was told that a frame is in ``data`` finds it there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.disk = Disk(self.directory.name)
        self.pending: list[tuple[int, set[int]]] = []  # readers: id, the frames that they were told are in data
        self.number = 0

    @initialize(frames=FRAMES)
    def begin(self, frames: list[int]) -> None:
        """Some frames are there."""
        for frame in frames:
            self.disk.fetch(frame)

    @rule(frame=st.integers(0, len(SIZES) - 1))
    def fetch(self, frame: int) -> None:
        """A frame that is missing arrives."""
        if not self.disk.presence.states[frame]:
            self.disk.fetch(frame)

    @rule(frames=FRAMES)
    def wait(self, frames: list[int]) -> None:
        """A reader looks at the marks, and waits for what is missing; what is there it will read from data."""
        self.number += 1
        self.pending.append((self.number, {frame for frame in frames if self.disk.presence.states[frame]}))

    @precondition(lambda self: self.pending)
    @rule(which=st.integers(0, 100))
    def answer(self, which: int) -> None:
        """A reader has all that it waited for."""
        _, frames = self.pending.pop(which % len(self.pending))
        assert all(map(self.disk.right, frames)), "a reader got a hole"

    @rule()
    def sync(self) -> None:
        """The half-minute sync."""
        self.disk.sync()

    @rule(frames=FRAMES, during=st.lists(st.tuples(st.sampled_from(("fetch", "wait", "answer", "sync")), FRAMES), max_size=4))
    def evict(self, frames: list[int], during: list[tuple[str, list[int]]]) -> None:
        """Frames are evicted, while others do something between the marks and the holes."""

        def quiet() -> bool:
            for what, which in during:
                if what == "fetch":
                    self.fetch(which[0])
                elif what == "wait":
                    self.wait(which)
                elif what == "sync":
                    self.sync()
                elif self.pending:
                    self.answer(which[0])
            return True

        def in_use() -> set[int]:
            return {frame for _, waiting in self.pending for frame in waiting}

        busy = in_use()
        before = bytes(self.disk.presence.states)
        done = self.disk.drop(sorted(frames), quiet=quiet, in_use=in_use)
        assert done.frames <= sum(1 for frame in frames if before[frame] and frame not in busy)

    @rule(sure=st.booleans())
    def die(self, sure: bool) -> None:
        """The process is killed, or the machine loses power (then what was not synced is void); readers ask again."""
        self.disk.close()
        self.pending = []
        if sure:
            original = present.boot_id
            self.number += 1
            name = b"%016d" % self.number
            present.boot_id = lambda: name
            try:
                self.disk.open()
            finally:
                present.boot_id = original
            self.disk.close()
        self.disk.open()

    @invariant()
    def marked_frames_are_right(self) -> None:
        """The promise of a mark."""
        states = self.disk.presence.states
        assert all(self.disk.right(frame) for frame in range(len(SIZES)) if states[frame])
        on_disk = present.frame_states(self.disk.path, SIZES, TOTAL)
        assert on_disk == states

    def teardown(self) -> None:
        """Nothing stays."""
        self.disk.close()
        self.directory.cleanup()


TestCache = Cache.TestCase
TestCache.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
