"""Fetching what profiles say, against a source that holds its answers until it is told: order, bounds, and who goes first."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weenv.core.errors import UnavailableError
from weenv.layer.profile import Run
from weenv.layer.tail import FrameIndex
from weenv.layer.verify import verify_frame
from weenv.plugin.snapshotter.blobfs.config import PrefetchConfig
from weenv.plugin.snapshotter.blobfs.layers import Layer
from weenv.plugin.snapshotter.cache.present import Presence
from weenv.plugin.snapshotter.cache.store import DataStore
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher
from weenv.plugin.snapshotter.fetch.flight import AHEAD, FILL, PREFETCH, FetchSettings, FutureWaiter
from weenv.plugin.snapshotter.fetch.prefetch import Piece, Prefetcher, merge, pieces
from weenv_testkit.synthetic import make_layer, payload

MADE = make_layer([("big", payload(6 << 20, 1))], target=64 << 10)
COUNT = len(MADE.frames)
STARTS = [int(offset) for offset in MADE.frames.compressed_offsets]
MIB = 1 << 20


# -- the order ---------------------------------------------------------------------------------------------------------


def test_layers_are_merged_by_time_and_each_in_its_own_order() -> None:
    low, high = [Run(0, 5, 1), Run(0, 2, 1), Run(7, 0, 1)], [Run(0, 9, 1), Run(3, 1, 1)]
    assert merge([low, high]) == [(0, low[0]), (0, low[1]), (1, high[0]), (1, high[1]), (0, low[2])]
    assert merge([]) == []


def test_neighbours_within_a_few_mebibytes_become_one_range_and_the_first_needed_comes_first() -> None:
    starts = [frame * (100 << 10) for frame in range(101)]
    wanted = [(0, Run(0, 50, 2)), (1, Run(0, 7, 1)), (0, Run(1, 10, 1)), (0, Run(2, 52, 1)), (0, Run(3, 11, 1))]
    assert list(pieces(wanted, [starts, starts])) == [Piece(0, 50, 3), Piece(1, 7, 1), Piece(0, 10, 2)]
    far = [(0, Run(0, 0, 45)), (0, Run(1, 46, 1)), (0, Run(2, 45, 1))]
    found = list(pieces(far, [starts]))
    assert all(piece.count * (100 << 10) <= MIB for piece in found)
    assert [piece.first for piece in found] == sorted(piece.first for piece in found), "46 and 45 are of one window"


runs = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(0, 39), st.integers(1, 5)), max_size=20)


@settings(max_examples=30)
@given(runs, st.lists(st.integers(1, 3 * MIB), min_size=44, max_size=44), st.integers(0, 40 * MIB))
def test_every_frame_is_in_one_piece_and_the_bound_holds(
    wanted: list[tuple[int, int, int, int]], sizes: list[int], most: int
) -> None:
    starts = list(itertools.accumulate(sizes, initial=0))
    taken: set[tuple[int, int]] = set()
    merged = []
    for time, place, first, count in sorted(wanted):
        frames = {(place, frame) for frame in range(first, first + count)}
        if not frames & taken:
            taken |= frames
            merged.append((place, Run(time, first, count)))
    found = [(p.place, frame) for p in pieces(merged, [starts] * 3, most) for frame in range(p.first, p.first + p.count)]
    assert len(found) == len(set(found))
    assert set(found) <= taken
    size = sum(sizes[frame] for _, frame in found)
    assert size <= most if most else set(found) == taken
    for piece in pieces(merged, [starts] * 3, most):
        assert piece.count == 1 or starts[piece.first + piece.count] - starts[piece.first] <= MIB


# -- the fetching ------------------------------------------------------------------------------------------------------


class Held:
    """A source whose answers wait for :meth:`release`; ``asked`` are the frames of each range, in the order begun."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.broken = False
        self.open = asyncio.Event()
        self.changed = asyncio.Condition()

    @property
    def size(self) -> int:
        return len(MADE.blob)

    async def read(self, offset: int, length: int, *, deadline: float | None = None) -> bytes:
        return MADE.blob[offset : offset + length]

    async def stream(self, offset: int, length: int, *, deadline: float | None = None) -> AsyncGenerator[bytes, None]:
        first = STARTS.index(offset)
        async with self.changed:
            self.asked.append(list(range(first, STARTS.index(offset + length))))
            self.changed.notify_all()
        if self.broken:
            raise UnavailableError("broken")
        await self.open.wait()
        yield MADE.blob[offset : offset + length]

    async def begun(self, count: int) -> None:
        """Wait until so many ranges have been asked for."""
        async with self.changed, asyncio.timeout(30):
            await self.changed.wait_for(lambda: len(self.asked) >= count)

    def suspect(self, offset: int, length: int) -> bool:
        return False

    async def close(self) -> None:
        return

    @property
    def frames(self) -> list[int]:
        """All frames asked for, with repeats."""
        return [frame for asked in self.asked for frame in asked]


class Bench:
    """A layer with a source that holds, and a prefetcher."""

    def __init__(self, path: Path, config: PrefetchConfig) -> None:
        self.source = Held()
        size = len(MADE.stream)
        self.layer = Layer(
            MADE.source(), str(path), FrameIndex(MADE.frames, size, MADE.toc.diff_id),
            Presence.open(str(path), MADE.frames.content_sizes, size), DataStore.open(str(path / "data"), size), [self.source],
            (0, 0),
        )  # fmt: skip
        self.fetcher = Fetcher(verify_frame, FetchSettings(prefetches=config.ranges, parallelism=4, backoff=0.01))
        self.room = True
        self.held = True
        self.prefetcher = Prefetcher(config, self.fetcher, lambda: self.room, lambda _: self.held)

    async def done(self) -> None:
        """Until no start is under way and nothing is on its way."""
        async with asyncio.timeout(30):
            while self.prefetcher.running or self.layer.flights:
                await asyncio.sleep(0.001)

    def content(self, frame: int) -> bytes:
        """What the disk has of a frame."""
        begin, end = self.layer.contents[frame], self.layer.contents[frame + 1]
        with open(f"{self.layer.path}/data", "rb") as file:
            file.seek(begin)
            return file.read(end - begin)


@asynccontextmanager
async def bench(path: Path, **config: int) -> AsyncIterator[Bench]:
    made = Bench(path, PrefetchConfig(**config))  # type: ignore[arg-type]
    try:
        yield made
    finally:
        await made.prefetcher.close()
        await made.fetcher.close()


def singles(frames: Sequence[int]) -> list[Run]:
    """A profile that needs these frames, each at a time of its own."""
    return [Run(time, frame, 1) for time, frame in enumerate(frames)]


async def test_frames_come_without_any_read_once_each_and_right(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        b.source.open.set()
        wanted = [40, 41, 3, 4, 5, 60]
        b.prefetcher.begin([(b.layer, singles(wanted))])
        assert b.layer.profiled
        await b.done()
        assert sorted(b.source.frames) == sorted(wanted)
        assert b.source.frames[0] == 40
        assert b.fetcher.stats.frames == [0, 0, 6, 0]
        for frame in wanted:
            assert b.content(frame) == MADE.stream[b.layer.contents[frame] : b.layer.contents[frame + 1]]
        b.prefetcher.begin([(b.layer, singles(wanted))])
        await b.done()
        assert len(b.source.frames) == 6, "what is there is not fetched again"


async def test_a_few_ranges_are_under_way_and_a_reader_goes_before_the_rest(tmp_path: Path) -> None:
    async with bench(tmp_path, ranges=2) as b:
        wanted = list(range(0, 80, 2))
        b.prefetcher.begin([(b.layer, singles(wanted))])
        await b.source.begun(2)
        waiter = FutureWaiter()
        b.fetcher.request(b.layer, [71], waiter)
        await b.source.begun(3)
        assert b.source.asked[2] == [71], "demand is begun while two answers are held; the third of the profile is not"
        late = FutureWaiter()
        b.fetcher.request(b.layer, [wanted[-1]], late)
        await b.source.begun(4)
        assert b.source.asked[3] == [wanted[-1]]
        b.source.open.set()
        await asyncio.gather(waiter.future, late.future)
        await b.done()
        assert sorted(b.source.frames) == sorted([*wanted, 71]), "nothing was fetched twice"
        assert b.fetcher.stats.frames == [2, 0, len(wanted) - 1, 0]


async def test_a_reader_of_a_frame_on_its_way_waits_for_that_one(tmp_path: Path) -> None:
    async with bench(tmp_path, ranges=1) as b:
        b.prefetcher.begin([(b.layer, singles([9, 20]))])
        await b.source.begun(1)
        waiter = FutureWaiter()
        b.fetcher.request(b.layer, [9], waiter)
        b.source.open.set()
        assert (await waiter.future)[9] == MADE.stream[b.layer.contents[9] : b.layer.contents[10]]
        await b.done()
        assert b.source.frames == [9, 20]


async def test_guesses_go_before_it_and_the_fill_after_it(tmp_path: Path) -> None:
    async with bench(tmp_path, ranges=1) as b:
        blocker = FutureWaiter()
        b.fetcher.request(b.layer, [0, 10, 20, 30], blocker)  # takes all there is
        await b.source.begun(4)
        b.fetcher.want(b.layer, [44], FILL)
        b.prefetcher.begin([(b.layer, singles([50]))])
        while 50 not in b.layer.flights:
            await asyncio.sleep(0.001)
        b.fetcher.want(b.layer, [60], AHEAD)
        b.source.open.set()
        await blocker.future
        await b.done()
        assert b.source.frames[4:] == [60, 50, 44]


@pytest.mark.parametrize("what", ["room", "held"])
async def test_it_ends_where_the_cache_is_full_or_the_layer_is_gone(tmp_path: Path, what: str) -> None:
    async with bench(tmp_path, ranges=1) as b:
        b.prefetcher.begin([(b.layer, singles(range(0, 60, 2)))])
        await b.source.begun(1)
        setattr(b, what, False)
        b.source.open.set()
        await b.done()
        assert len(b.source.frames) <= 2, "the one under way, and one that was decided on"


async def test_it_ends_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weenv.core.errors import StorageError

    def full(*_: object) -> None:
        raise StorageError("full", errno=28)

    async with bench(tmp_path, ranges=1) as b:
        monkeypatch.setattr(b.layer.store, "write", full)
        b.source.open.set()
        b.prefetcher.begin([(b.layer, singles(range(0, 90, 2)))])
        await b.done()
        assert 1 <= len(b.source.frames) < 45
        assert b.fetcher.shelf.full


async def test_a_layer_whose_source_fails_is_given_up(tmp_path: Path) -> None:
    async with bench(tmp_path, ranges=1) as b:
        b.source.broken = True
        b.prefetcher.begin([(b.layer, singles(range(0, 60, 2)))])
        await b.done()
        assert len(b.source.asked) <= 4
        b.source.broken = False
        b.source.open.set()
        waiter = FutureWaiter()
        b.fetcher.request(b.layer, [0], waiter)
        await waiter.future


async def test_no_more_than_the_bound_is_fetched_for_a_start(tmp_path: Path) -> None:
    most = STARTS[7]
    async with bench(tmp_path, image_max=most) as b:
        b.source.open.set()
        b.prefetcher.begin([(b.layer, [Run(0, 0, COUNT)])])
        await b.done()
        assert b.source.frames == list(range(7))


async def test_it_keeps_to_its_rate(tmp_path: Path) -> None:
    async with bench(tmp_path, rate=1) as b:
        b.source.open.set()
        b.prefetcher.begin([(b.layer, singles(range(0, 60, 2)))])
        async with asyncio.timeout(30):
            while not b.fetcher.stats.frames[PREFETCH] or b.layer.flights:
                await asyncio.sleep(0.001)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(b.source.asked) == 1, "the next is hours away"


async def test_turned_off_or_without_runs_it_does_nothing(tmp_path: Path) -> None:
    async with bench(tmp_path, enabled=False) as b:
        b.prefetcher.begin([(b.layer, singles([1]))])
        assert not b.prefetcher.running and not b.layer.profiled
    async with bench(tmp_path) as b:
        b.prefetcher.begin([(b.layer, [])])
        b.prefetcher.begin([])
        assert not b.prefetcher.running and not b.prefetcher.begun


async def test_what_is_read_of_it_is_counted_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        b.source.open.set()
        b.prefetcher.begin([(b.layer, singles([1, 2, 3]))])
        await b.done()
        assert b.layer.prefetched == {1, 2, 3}
        b.fetcher.used(b.layer, b.layer.reads.note(2, 5))
        b.fetcher.used(b.layer, b.layer.reads.note(2, 5))
        assert b.fetcher.stats.prefetch_used == 2
        b.layer.evicted([1])
        assert not b.layer.prefetched
