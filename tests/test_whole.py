"""Layers of registries that ignore Range: read once from the beginning, and every frame that passes by is stored."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator import registry as simulated
from simulator.credentials import StaticCredentials
from simulator.registry import SimulatedRegistry

from weenv.layer.verify import verify_frame
from weenv.plugin.snapshotter.cache.present import Presence
from weenv.plugin.snapshotter.cache.store import DataStore
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher
from weenv.plugin.snapshotter.fetch.flight import AHEAD, FILL, FetchLayer, FetchSettings, FutureWaiter
from weenv.plugin.snapshotter.fetch.whole import Cutter
from weenv.registry.client import RegistryClient
from weenv.registry.config import RegistryConfig
from weenv.registry.source import RegistrySource
from weenv_testkit.synthetic import make_layer, payload

LAYER = make_layer([("big", payload(4 << 20, 1)), ("small", payload(50_000, 2))], target=64 << 10)
COUNT = len(LAYER.frames)
QUICK = RegistryConfig(retry_delay=0.01, max_retry_delay=0.1, stall_timeout=1.0, slow_after=0.5, read_buffer=64 << 10)


@dataclass
class Bench:
    sim: SimulatedRegistry
    fetcher: Fetcher
    layer: FetchLayer

    async def get(self, *frames: int) -> None:
        """Have these frames, and check them."""
        waiter = FutureWaiter()
        self.fetcher.request(self.layer, frames, waiter)
        pieces = await waiter.future
        for frame in frames:
            low, high = self.layer.contents[frame], self.layer.contents[frame + 1]
            content = pieces[frame]
            if content is None:
                content = self.stored()[low:high]
            assert content == LAYER.stream[low:high]

    def stored(self) -> bytes:
        """What is in ``data``."""
        return os.pread(self.layer.store.fd, len(LAYER.stream), 0)

    async def complete(self) -> None:
        """Wait until every frame is stored."""
        async with asyncio.timeout(60):
            while self.layer.presence.missing or self.layer.flights:
                await asyncio.sleep(0.01)
        assert self.stored() == LAYER.stream


@asynccontextmanager
async def bench(path: Path, blob: bytes = LAYER.blob, **settings: float) -> AsyncIterator[Bench]:
    async with SimulatedRegistry(ignore_range=True) as sim, RegistryClient(QUICK, StaticCredentials({})) as client:
        sim.blobs[LAYER.digest] = blob
        size = len(LAYER.stream)
        source = RegistrySource(client, sim.host, "a", LAYER.digest, len(LAYER.blob), paced=True)
        presence = Presence.open(str(path), LAYER.frames.content_sizes, size)
        layer = FetchLayer("layer", LAYER.frames, presence, DataStore.open(str(path / "data"), size), [source])
        values = {"backoff": 0.01, "backoff_max": 0.05, "deadline": 10.0, **settings}
        fetcher = Fetcher(verify_frame, FetchSettings(**values))  # type: ignore[arg-type]
        try:
            yield Bench(sim, fetcher, layer)
        finally:
            await fetcher.close()
            await source.close()
            presence.close()
            layer.store.close()


async def test_one_request_brings_all_of_a_layer(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        order = random.Random(4).sample(range(COUNT), COUNT)
        await asyncio.gather(*(b.get(frame) for frame in order[:20]), b.get(COUNT - 1), b.get(0, 5, 9))
        b.fetcher.want(b.layer, range(10, 20), AHEAD)
        b.fetcher.want(b.layer, range(30, 40), FILL)
        await b.complete()
        assert len(b.sim.seen) == 1
        assert sum(b.fetcher.stats.frames) == COUNT, "each frame was decoded once"
        assert b.fetcher.demanded == 0 and b.fetcher.stats.errors == {}
        assert b.fetcher.stats.fetched_bytes <= len(LAYER.blob)


async def test_a_stream_that_breaks_is_begun_anew_and_gone_on_with(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        whole = len(LAYER.blob)

        def cut(after: int) -> simulated.Fault:
            async def fault(
                sim: SimulatedRegistry, request: simulated.web.Request, blob: bytes, start: int, end: int
            ) -> simulated.web.StreamResponse:
                answer = simulated.web.StreamResponse()
                answer.content_length = whole
                await answer.prepare(request)
                await answer.write(blob[:after])
                assert request.transport is not None
                request.transport.close()
                return answer

            return fault

        b.sim.script.extend([cut(whole // 3), cut(2 * whole // 3)])
        await b.get(COUNT - 2)
        await b.complete()
        assert len(b.sim.seen) == 3
        assert sum(b.fetcher.stats.frames) == COUNT


async def test_wrong_bytes_that_pass_by_are_nobodys_until_they_are_read(tmp_path: Path) -> None:
    async with bench(tmp_path, LAYER.corrupted(7), deadline=2.0) as b:
        await b.get(3, 12)
        async with asyncio.timeout(60):
            while b.layer.presence.missing > 1 or b.layer.flights:
                await asyncio.sleep(0.01)
        assert b.layer.presence.states[7] == 0
        with pytest.raises(OSError):
            await b.get(7)
        b.sim.blobs[LAYER.digest] = LAYER.blob
        async with asyncio.timeout(60):
            while True:
                try:
                    await b.get(7)
                    break
                except OSError:
                    await asyncio.sleep(0.1)
        await b.complete()


async def test_who_waits_for_a_stream_that_stands_still_gets_an_error_and_others_go_on(tmp_path: Path) -> None:
    async with bench(tmp_path, deadline=0.5) as b:
        b.sim.script.extend([simulated.stall(60.0)] * 100)
        with pytest.raises(OSError) as caught:  # what wait_for raises is an OSError as well
            await asyncio.wait_for(b.get(5), 30)
        assert caught.value.errno == errno.EIO
        assert b.fetcher.demanded == 0
        b.sim.script.clear()
        async with asyncio.timeout(60):
            while True:
                try:
                    await b.get(5)
                    break
                except OSError:
                    await asyncio.sleep(0.1)
        await b.complete()


async def test_closing_in_the_middle_leaves_nothing_running(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        b.fetcher._verify = lambda *_: asyncio.run(asyncio.sleep(0.02)) or b""  # type: ignore[assignment, func-returns-value]
        waiter = FutureWaiter()
        b.fetcher.request(b.layer, [COUNT - 1], waiter)
        async with asyncio.timeout(60):
            while not b.fetcher._whole._streams:
                await asyncio.sleep(0.001)
        await b.fetcher.close()
        assert not b.fetcher._whole._streams and not b.fetcher._whole._tasks
        assert not waiter.future.done() or waiter.future.exception()
        waiter.future.cancel()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.data())
def test_frames_are_cut_where_they_end_however_the_bytes_come(sizes: list[int], data: st.DataObject) -> None:
    starts = [0, *itertools.accumulate(sizes)]
    stream = random.Random(sum(sizes)).randbytes(starts[-1])
    first = data.draw(st.integers(0, len(sizes) - 1))
    end = data.draw(st.integers(first + 1, len(sizes)))
    cutter, position, found = Cutter(starts, first, end), starts[first], []
    while position < len(stream):
        size = data.draw(st.integers(1, 80))
        found += cutter.feed(stream[position : position + size])
        position += size
    assert cutter.done and cutter.need == 0
    assert found == [(frame, stream[starts[frame] : starts[frame + 1]]) for frame in range(first, end)]


def test_a_cutter_tells_what_is_missing() -> None:
    cutter = Cutter([0, 10, 30], 0, 2)
    assert [number for number, _ in cutter.feed(bytes(15))] == [0]
    assert (cutter.done, cutter.frame, cutter.have, cutter.need) == (False, 1, 5, 20)
