"""The fetcher against a simulated source that is slow, short, wrong, failing or silent."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from weenv.core.errors import NotFoundInSource, SourceError, StorageError, UnavailableError
from weenv.layer.toc import Frames
from weenv.layer.verify import verify_frame
from weenv.plugin.snapshotter.cache.present import Presence
from weenv.plugin.snapshotter.cache.store import DataStore
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher
from weenv.plugin.snapshotter.fetch.flight import AHEAD, FILL, FetchLayer, FetchSettings, Flight, FutureWaiter
from weenv_testkit.synthetic import SyntheticLayer, make_layer, payload

LAYER = make_layer([("big", payload(4 << 20, 1))], target=64 << 10)
COUNT = len(LAYER.frames)
STARTS = [int(offset) for offset in LAYER.frames.compressed_offsets]


@dataclass
class SimulatedSource:
    """A blob source with faults. ``fault`` is asked before each range and may raise, or return how many bytes to send."""

    blob: bytes
    chunk: int = 10_000
    delay: float = 0.0
    pace: float = 0.0
    fault: Callable[[int, int], int] | None = None
    requests: list[tuple[int, int]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    doubts: int = 0
    good_after: int = 0
    """So many times a source may be suspected before it is no use to ask it again."""

    @property
    def size(self) -> int:
        return len(self.blob)

    async def read(self, offset: int, length: int, *, deadline: float | None = None) -> bytes:
        return self.blob[offset : offset + length]

    async def stream(self, offset: int, length: int, *, deadline: float | None = None) -> AsyncGenerator[bytes, None]:
        self.requests.append((offset, length))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.delay)
            if self.fault is not None:
                length = self.fault(offset, length)
            for start in range(offset, offset + length, self.chunk):
                yield self.blob[start : min(start + self.chunk, offset + length)]
                await asyncio.sleep(self.pace)
        finally:
            self.running -= 1

    def suspect(self, offset: int, length: int) -> bool:
        self.doubts += 1
        return self.doubts <= self.good_after

    async def close(self) -> None:
        return

    def frames_asked(self) -> list[int]:
        """Every frame that a range covered, with repeats."""
        return [f for offset, length in self.requests for f in range(COUNT) if offset <= STARTS[f] < offset + length]


class Bench:
    """A fetcher and a layer over simulated sources."""

    def __init__(self, path: Path, sources: list[SimulatedSource], layer: SyntheticLayer = LAYER, **settings: float) -> None:
        frames = layer.frames
        size = len(layer.stream)
        presence = Presence.open(str(path), frames.content_sizes, size)
        self.content = layer.stream
        self.layer = FetchLayer("layer", frames, presence, DataStore.open(str(path / "data"), size), sources)
        values = {"backoff": 0.01, "backoff_max": 0.05, "deadline": 30.0, "refuse": 0.2, **settings}
        self.fetcher = Fetcher(verify_frame, FetchSettings(**values))  # type: ignore[arg-type]

    async def get(self, *frames: int, ahead: tuple[int, ...] = ()) -> bytes:
        """The content of frames, checked against the stream."""
        waiter = FutureWaiter()
        self.fetcher.request(self.layer, frames, waiter, ahead)
        pieces = await waiter.future
        while any(frame in self.layer.flights for frame in frames):
            await asyncio.sleep(0.001)
        out = []
        for frame in frames:
            low, high = self.layer.contents[frame], self.layer.contents[frame + 1]
            content = pieces[frame]
            if content is None:
                content = os.pread(self.layer.store.fd, high - low, low)
            assert content == self.content[low:high]
            out.append(content)
        return b"".join(out)


@asynccontextmanager
async def bench(
    path: Path, *sources: SimulatedSource, layer: SyntheticLayer = LAYER, **settings: float
) -> AsyncIterator[Bench]:
    made = Bench(path, list(sources), layer, **settings)
    try:
        yield made
    finally:
        await made.fetcher.close()
        made.layer.presence.close()
        made.layer.store.close()
        assert all(source.running == 0 for source in sources)


async def test_a_frame_is_fetched_once_whoever_asks(tmp_path: Path) -> None:
    source = SimulatedSource(LAYER.blob, delay=0.02)
    async with bench(tmp_path, source) as b:
        await asyncio.gather(*(b.get(3, 4, 5) for _ in range(20)), *(b.get(4) for _ in range(20)), b.get(*range(8)))
        await b.get(4)
        assert sorted(source.frames_asked()) == list(range(8))
        assert b.fetcher.stats.frames == [8, 0, 0, 0]
        assert b.layer.presence.missing == COUNT - 8
        assert b.fetcher.demanded == 0
        assert not b.layer.flights


async def test_threads_may_ask_too(tmp_path: Path) -> None:
    source = SimulatedSource(LAYER.blob, delay=0.01)
    async with bench(tmp_path, source) as b:
        waiters = [FutureWaiter() for _ in range(30)]
        await asyncio.gather(
            *(asyncio.to_thread(b.fetcher.request, b.layer, range(n % 7, n % 7 + 4), w) for n, w in enumerate(waiters))
        )
        for waiter in waiters:
            assert len(await waiter.future) == 4
        assert sorted(source.frames_asked()) == list(range(10))


async def test_neighbours_share_a_ranged_read_and_ranges_have_a_limit(tmp_path: Path) -> None:
    source = SimulatedSource(LAYER.blob)
    async with bench(tmp_path, source, range_max=300 << 10) as b:
        await b.get(*range(COUNT))
        assert sorted(source.frames_asked()) == list(range(COUNT))
        assert max(length for _, length in source.requests) <= 300 << 10
        assert len(source.requests) <= STARTS[-1] // (200 << 10)


async def test_the_first_frame_is_answered_before_the_range_has_ended(tmp_path: Path) -> None:
    gate = asyncio.Event()

    class Slow(SimulatedSource):
        async def stream(self, offset: int, length: int, *, deadline: float | None = None) -> AsyncGenerator[bytes, None]:
            self.requests.append((offset, length))
            yield self.blob[offset : STARTS[1] + 10]
            await gate.wait()
            yield self.blob[STARTS[1] + 10 : offset + length]

    source = Slow(LAYER.blob)
    async with bench(tmp_path, source) as b:
        await asyncio.wait_for(b.get(0, ahead=(1, 2, 3)), 60)
        assert len(source.requests) == 1
        rest = asyncio.ensure_future(b.get(3))
        await asyncio.sleep(0.05)
        assert not rest.done()
        gate.set()
        await rest
        async with asyncio.timeout(60):
            while sum(b.fetcher.stats.frames) < 4:  # counted when stored, which is after the answer
                await asyncio.sleep(0.01)
        assert b.fetcher.stats.frames == [2, 2, 0, 0]  # frame 3 was promoted while it was on its way


async def test_ranged_reads_in_flight_are_bounded_and_demand_goes_first(tmp_path: Path) -> None:
    source = SimulatedSource(LAYER.blob, delay=0.02)
    async with bench(tmp_path, source, parallelism=4, range_max=1) as b:
        b.fetcher.want(b.layer, range(40, 60), AHEAD)
        b.fetcher.want(b.layer, range(30, 34), FILL)
        await asyncio.sleep(0)
        await asyncio.gather(*(b.get(frame) for frame in range(0, 16, 2)))
        asked = source.frames_asked()
        assert max(asked.index(frame) for frame in range(0, 16, 2)) <= 10  # two slots at most were taken by read-ahead
        assert not set(asked) & set(range(30, 34))
        waiter = FutureWaiter()
        b.fetcher.want(b.layer, range(30, 34), FILL, waiter)
        await waiter.future
        assert source.most <= 4
        assert sorted(set(source.frames_asked())) == sorted([*range(0, 16, 2), *range(30, 34), *range(40, 60)])


@pytest.mark.parametrize("bad", ["wrong", "short", "error", "missing", "silent"])
async def test_the_next_source_is_asked_when_one_fails(tmp_path: Path, bad: str) -> None:
    def fault(_offset: int, length: int) -> int:
        if bad == "short":
            return length // 2
        if bad == "error":
            raise SourceError("broken")
        if bad == "missing":
            raise NotFoundInSource("not here")
        return length

    first = SimulatedSource(LAYER.corrupted(5) if bad == "wrong" else LAYER.blob, fault=fault)
    if bad == "silent":
        first.delay = 30.0
    second = SimulatedSource(LAYER.blob)
    async with bench(tmp_path, first, second, stall=0.1) as b:
        await b.get(4, 5, 6)
        assert first.requests
        assert second.requests
        kinds = {"wrong": "digest", "short": "short", "error": "source", "missing": "notfound", "silent": "stall"}
        assert b.fetcher.stats.errors == {kinds[bad]: 1}
        await b.get(7)
        if bad != "wrong":  # the source that worked is asked first from now on
            assert len(first.requests) == 1


async def test_wrong_bytes_everywhere_fail_that_frame_alone_and_quickly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = SimulatedSource(LAYER.corrupted(5))
    async with bench(tmp_path, source, SimulatedSource(LAYER.corrupted(5))) as b:
        good, bad = await asyncio.gather(b.get(3, 4), b.get(4, 5), return_exceptions=True)
        assert isinstance(good, bytes)
        assert isinstance(bad, OSError)
        assert bad.errno == errno.EIO
        await b.get(6, 7)
        assert b.fetcher.stats.errors == {"digest": 2, "eio": 1}
        assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "ERROR"]
        count = len(source.requests)
        with pytest.raises(OSError):
            await b.get(5)  # refused for a moment without another attempt
        assert len(source.requests) == count
        assert b.layer.presence.states[5] == 0
        await asyncio.sleep(0.25)
        source.blob = LAYER.blob  # repaired
        await b.get(5)


async def test_wrong_bytes_are_fetched_again_where_the_source_may_have_others(tmp_path: Path) -> None:
    """Corrupted on the way: the next try has it right. Never served, and no error for the reader."""
    source = SimulatedSource(LAYER.corrupted(5), good_after=10)

    def heal(_offset: int, length: int) -> int:
        if source.doubts == 2:
            source.blob = LAYER.blob
        return length

    source.fault = heal
    async with bench(tmp_path, source) as b:
        await b.get(4, 5, 6)
        assert b.fetcher.stats.errors == {"digest": 2}
        assert source.frames_asked().count(5) == 3 and source.frames_asked().count(4) == 1


async def test_the_latest_guess_is_fetched_first_whoever_made_it(tmp_path: Path) -> None:
    """Read-ahead of hits (``want``) and of misses (``request``) is one queue with one order."""
    source = SimulatedSource(LAYER.blob, delay=0.03)
    async with bench(tmp_path, source, parallelism=2, range_max=1) as b:
        b.fetcher.want(b.layer, [10], AHEAD)  # takes the only place that read-ahead may have
        await asyncio.sleep(0.01)
        b.fetcher.want(b.layer, [20, 21], AHEAD)
        b.fetcher.want(b.layer, [40, 41], FILL)
        await b.get(0, ahead=(30, 31))
        b.fetcher.want(b.layer, [50, 51], AHEAD)
        async with asyncio.timeout(60):
            while b.layer.flights:
                await asyncio.sleep(0.01)
        asked = [frame for frame in source.frames_asked() if frame not in (0, 10)]
        assert asked.index(50) < asked.index(51) and asked.index(30) < asked.index(31) and asked.index(20) < asked.index(21)
        assert asked.index(51) < asked.index(20) and asked.index(31) < asked.index(20), "the latest before the earlier"
        assert asked[-2:] == [40, 41], "the fill comes last, in turn"


async def test_a_retry_after_is_waited_for_without_a_place_among_the_ranged_reads(tmp_path: Path) -> None:
    """429: the frame waits, other frames do not; it is asked for again when the time is over, and no reader notices."""
    refused: list[float] = []

    def fault(offset: int, length: int) -> int:
        if offset == STARTS[5] and not refused:
            refused.append(time.monotonic())
            raise UnavailableError("status 429", retry_after=0.5)
        return length

    source = SimulatedSource(LAYER.blob, fault=fault)
    async with bench(tmp_path, source, parallelism=1, range_max=1) as b:
        slow = asyncio.ensure_future(b.get(5))
        while not refused:
            await asyncio.sleep(0.001)
        await asyncio.gather(*(b.get(frame) for frame in range(10, 20)))
        assert not slow.done()
        await slow
        assert time.monotonic() - refused[0] >= 0.5
        assert "eio" not in b.fetcher.stats.errors


async def test_the_reason_of_an_error_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fault(_offset: int, _length: int) -> int:
        raise UnavailableError("the registry is down")

    async with bench(tmp_path, SimulatedSource(LAYER.blob, fault=fault), deadline=0.3, refuse=0.01) as b:
        results = await asyncio.gather(*(b.get(frame) for frame in range(0, COUNT, 3)), return_exceptions=True)
        assert all(isinstance(result, OSError) and result.errno == errno.EIO for result in results)
        with pytest.raises(OSError):
            await b.get(1)
        said = [record for record in caplog.records if record.levelname == "ERROR"]
        assert len(said) == 1 and "down" in said[0].__dict__["error"]


class Outage:
    """A fault of a source that has none once ``down`` is false."""

    def __init__(self) -> None:
        self.down = True

    def __call__(self, _offset: int, length: int) -> int:
        if self.down:
            raise UnavailableError("down")
        return length


async def test_failures_are_retried_until_the_source_is_back(tmp_path: Path) -> None:
    outage = Outage()
    source = SimulatedSource(LAYER.blob, fault=outage)
    async with bench(tmp_path, source) as b:
        began = time.monotonic()
        waiting = asyncio.ensure_future(b.get(0, 1))
        while len(source.requests) < 3:
            await asyncio.sleep(0.01)
        assert not waiting.done()
        outage.down = False
        await waiting
        assert len(source.requests) <= 5 + (time.monotonic() - began) / 0.005, "there are pauses, the shortest half of 0.01 s"


async def test_who_waits_for_his_next_try_is_woken_when_the_source_is_back(tmp_path: Path) -> None:
    """After a long outage pauses are long; the first frame that arrives ends them all."""
    outage = Outage()
    source = SimulatedSource(LAYER.blob, fault=outage)
    async with bench(tmp_path, source, backoff=40.0, backoff_max=80.0, deadline=300.0, range_max=1) as b:
        waiting = [asyncio.ensure_future(b.get(frame)) for frame in range(0, 20, 2)]
        async with asyncio.timeout(60):
            while len(b.fetcher._paused) < 10:
                await asyncio.sleep(0.01)
        outage.down = False
        began = time.monotonic()
        await b.get(30)
        await asyncio.gather(*waiting)
        assert time.monotonic() - began < 15, "none has waited for its own twenty to forty seconds"
        assert not b.fetcher._paused


async def test_an_unreachable_source_costs_the_deadline_and_no_more(tmp_path: Path) -> None:
    def fault(_offset: int, _length: int) -> int:
        raise UnavailableError("down")

    async with bench(tmp_path, SimulatedSource(LAYER.blob, fault=fault), deadline=0.4) as b:
        began = time.monotonic()
        with pytest.raises(OSError) as caught:
            await b.get(0)
        assert caught.value.errno == errno.EIO
        assert 0.2 <= time.monotonic() - began < 20
        assert b.fetcher.demanded == 0
        assert not b.layer.flights


async def test_those_who_wait_behind_sources_that_hang_get_the_deadline_as_well(tmp_path: Path) -> None:
    async with bench(tmp_path, SimulatedSource(LAYER.blob, delay=60), parallelism=1, deadline=0.5, range_max=1) as b:
        began = time.monotonic()
        results = await asyncio.gather(*(b.get(frame) for frame in range(1, 20, 2)), b.get(0), return_exceptions=True)
        assert sum(isinstance(result, OSError) for result in results) == 10 or all(isinstance(r, OSError) for r in results)
        assert time.monotonic() - began < 30


async def test_no_source_at_all_fails_at_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        with pytest.raises(OSError) as caught:
            await asyncio.wait_for(b.get(0), 60)
        assert caught.value.errno == errno.EIO, "not that of wait_for"


async def test_read_ahead_that_fails_tells_nobody_and_is_tried_again_on_demand(tmp_path: Path) -> None:
    broken = True

    def fault(_offset: int, length: int) -> int:
        if broken:
            raise SourceError("broken")
        return length

    async with bench(tmp_path, SimulatedSource(LAYER.blob, fault=fault)) as b:
        b.fetcher.want(b.layer, [1, 2], AHEAD)
        await asyncio.sleep(0.1)
        assert not b.layer.flights
        broken = False
        await b.get(1)
        assert "eio" not in b.fetcher.stats.errors


async def test_who_asks_while_a_read_ahead_is_given_up_is_no_victim_of_that(tmp_path: Path) -> None:
    """Between the decision to drop a failed read-ahead and the end of its flight a reader may join it, in another thread."""
    failures = iter([UnavailableError("once")])

    def once(offset: int, length: int) -> int:
        for error in failures:
            raise error
        return length

    async with bench(tmp_path, SimulatedSource(LAYER.blob, fault=once)) as b:
        waiter, end = FutureWaiter(), b.fetcher._fail

        def join_first(flight: Flight, reason: str, again_in: float = float("inf")) -> None:
            b.fetcher.request(b.layer, [flight.frame], waiter)
            end(flight, reason, again_in)

        b.fetcher._fail = join_first  # type: ignore[method-assign]
        b.fetcher.want(b.layer, [3], AHEAD)
        assert (await waiter.future)[3] == LAYER.stream[b.layer.contents[3] : b.layer.contents[4]]
        while 3 in b.layer.flights:
            await asyncio.sleep(0.001)
        assert "eio" not in b.fetcher.stats.errors
        assert b.fetcher.demanded == 0


async def test_a_waiter_that_left_is_never_told_and_its_frame_arrives_all_the_same(tmp_path: Path) -> None:
    async with bench(tmp_path, SimulatedSource(LAYER.blob, delay=0.05)) as b:
        waiter = FutureWaiter()
        b.fetcher.request(b.layer, [0], waiter)
        assert b.fetcher.abandon(waiter)
        assert not b.fetcher.abandon(waiter)
        await b.get(0)
        assert not waiter.future.done()
        waiter.future.cancel()


async def test_a_full_disk_is_served_from_memory_and_left_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_args: object) -> None:
        raise StorageError("full", errno=errno.ENOSPC)

    source = SimulatedSource(LAYER.blob)
    async with bench(tmp_path, source, memory=200_000) as b:
        with monkeypatch.context() as patch:
            patch.setattr(b.layer.store, "write", full)
            await b.get(0, 1)
            await b.get(0, 1)
            assert sorted(source.frames_asked()) == [0, 1]  # the second time from memory
            await b.get(2, 3, 4)
            assert b.layer.presence.missing == COUNT
            assert b.fetcher.stats.errors == {"enospc": 5}
            assert [record.levelname for record in caplog.records] == ["ERROR"]
        await b.get(10)
        assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
        for _ in range(100):  # the three frames that the memory holds are stored as well
            await asyncio.sleep(0.01)
            if not b.fetcher.shelf.kept:
                break
        assert not b.fetcher.shelf.kept
        assert COUNT - 5 <= b.layer.presence.missing <= COUNT - 4
        await b.get(0)  # forgotten by now
        assert b.layer.presence.states[0]


async def test_frames_in_memory_are_stored_when_there_is_room_though_nothing_else_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise StorageError("full", errno=errno.ENOSPC)

    async with bench(tmp_path, SimulatedSource(LAYER.blob)) as b:
        with monkeypatch.context() as patch:
            patch.setattr(b.layer.store, "write", full)
            await b.get(0, 1)
        for _ in range(200):
            await b.get(0, 1)
            if b.layer.presence.missing == COUNT - 2:
                break
            await asyncio.sleep(0.02)
        assert b.layer.presence.missing == COUNT - 2


async def test_ranged_reads_pause_while_decoders_are_behind(tmp_path: Path) -> None:
    behind = 0

    def slow_verify(frames: object, number: int, data: bytes) -> bytes:
        nonlocal behind
        time.sleep(0.002)
        behind = max(behind, b.fetcher._backlog)
        return verify_frame(LAYER.frames, number, data)

    source = SimulatedSource(LAYER.blob)
    async with bench(tmp_path, source, backlog=256 << 10, range_max=256 << 10, parallelism=2) as b:
        b.fetcher._verify = slow_verify
        await b.get(*range(COUNT))
        assert behind <= (256 << 10) * 3  # two ranges run, each stops after the piece that went over


def swollen(length: int, content: int = 512, count: int = 40) -> SyntheticLayer:
    """Frames of ``length`` bytes that hold ``content`` bytes each, as a TOC of another format may promise."""
    frames = Frames(
        np.full(count, length, np.uint32), np.full(count, content, np.uint32), np.zeros((count, 32), np.uint8)
    )  # fmt: skip
    return replace(LAYER, blob=bytes(length * count), stream=bytes(content * count), frames=frames)


async def test_what_waits_for_decoders_is_weighed_as_it_came(tmp_path: Path) -> None:
    """Not by the little that it holds."""
    gate = threading.Event()

    def verify(frames: object, number: int, data: bytes) -> bytes:
        assert gate.wait(60)
        return bytes(512)

    layer = swollen(64 << 10)
    source = SimulatedSource(layer.blob, chunk=64 << 10)
    async with bench(tmp_path, source, layer=layer, backlog=256 << 10, range_max=1, parallelism=2) as b:
        b.fetcher._verify = verify
        getting = asyncio.create_task(b.get(*range(40)))
        async with asyncio.timeout(30):
            while b.fetcher._drained.is_set():
                await asyncio.sleep(0.001)
        assert len(source.requests) <= 8
        gate.set()
        await getting
        assert b.fetcher._backlog == b.fetcher._coming == 0


async def test_ranged_reads_in_flight_have_a_bound_in_bytes(tmp_path: Path) -> None:
    layer = swollen(64 << 10, count=12)
    source = SimulatedSource(layer.blob, delay=0.01)
    async with bench(tmp_path, source, layer=layer, coming=100 << 10, range_max=1, parallelism=8) as b:
        b.fetcher._verify = lambda *_: bytes(512)
        await b.get(*range(12))
        assert (source.most, b.fetcher._coming) == (2, 0)


async def test_decoders_with_nothing_to_do_hold_no_layer(tmp_path: Path) -> None:
    """Its descriptors are closed when the last one drops it."""
    async with bench(tmp_path, SimulatedSource(LAYER.blob)) as b:
        await b.get(0, 1)
        held = FetchLayer("other", LAYER.frames, b.layer.presence, b.layer.store, b.layer.sources)
        other = weakref.ref(held)
        b.layer.presence.lose([5])
        waiter = FutureWaiter()
        b.fetcher.request(held, [5], waiter)
        await waiter.future
        del held
        async with asyncio.timeout(30):
            while other() is not None:
                gc.collect()
                await asyncio.sleep(0.01)


async def test_frames_that_readers_wait_for_are_decoded_before_the_others(tmp_path: Path) -> None:
    order: list[int] = []

    def slow_verify(frames: object, number: int, data: bytes) -> bytes:
        time.sleep(0.005)
        order.append(number)
        return verify_frame(LAYER.frames, number, data)

    async with bench(tmp_path, SimulatedSource(LAYER.blob), decoders=1, parallelism=4) as b:
        b.fetcher._verify = slow_verify
        b.fetcher.want(b.layer, range(30), AHEAD)
        await asyncio.sleep(0.03)
        await b.get(50)
        assert order.index(50) < 20


async def test_a_fill_pauses_while_a_reader_waits(tmp_path: Path) -> None:
    source = SimulatedSource(LAYER.blob, pace=0.003)
    async with bench(tmp_path, source) as b:
        b.fetcher.want(b.layer, range(10), FILL)
        await asyncio.sleep(0.02)
        assert source.running == 1
        await b.get(50)
        done_then = COUNT - 1 - b.layer.presence.missing
        assert done_then < 10
        await b.get(9)  # part of the range that had paused: it goes on
        assert "eio" not in b.fetcher.stats.errors


async def test_closing_in_the_middle_leaves_nothing_running(tmp_path: Path) -> None:
    source = SimulatedSource(LAYER.blob, delay=10)
    async with bench(tmp_path, source) as b:
        waiter = FutureWaiter()
        b.fetcher.request(b.layer, range(20), waiter)
        await asyncio.sleep(0.05)
        assert source.running
        # Who asks while the process ends is not told anything either: an error now would be one for a reader.
        await b.fetcher.close()
        late = FutureWaiter()
        b.fetcher.request(b.layer, range(20), late)
        await asyncio.sleep(0.05)
        assert not late.future.done()
    assert not source.running
    assert not waiter.future.done()
    waiter.future.cancel()
    late.future.cancel()
