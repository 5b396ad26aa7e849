"""When the background fill may run, and what it fetches next."""

from __future__ import annotations

import asyncio
import time
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.layer.tail import FrameIndex
from weenv.layer.verify import verify_frame
from weenv.plugin.snapshotter.blobfs.config import FillConfig
from weenv.plugin.snapshotter.blobfs.layers import Layer
from weenv.plugin.snapshotter.cache.present import Presence
from weenv.plugin.snapshotter.cache.store import DataStore
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher
from weenv.plugin.snapshotter.fetch.fill import Bucket, Filler, Gate, Usage, next_piece, sample
from weenv.plugin.snapshotter.layerdir import Origin
from weenv.registry.source import FileSource
from weenv_testkit.synthetic import make_layer, payload


def usage(when: float, *, total: float, idle: float, own: float = 0.0, stalled: float = 0.0) -> Usage:
    return Usage(when, total, idle, own, stalled)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (usage(1, total=2, idle=2), True),  # nothing runs
        (usage(1, total=2, idle=1), False),  # one of two CPUs is busy
        (usage(1, total=2, idle=1, own=1), True),  # ... with this process
        (usage(1, total=2, idle=1.8, stalled=0.2), False),  # somebody waits for a CPU
        (usage(1, total=2, idle=1.6, own=0.3, stalled=0.2), True),  # ... because of this process
        (usage(0, total=2, idle=2), False),  # no time has passed
        (usage(1, total=0, idle=0), False),
    ],
)
def test_the_gate_is_open_while_others_leave_the_machine_alone(now: Usage, expected: bool) -> None:
    gate = Gate(FillConfig(cpu_busy=0.4, cpu_pressure=0.05))
    assert gate.open(usage(0, total=0, idle=0), now) is expected


def test_a_bound_of_one_is_none() -> None:
    swamped = usage(1, total=2, idle=0)
    swamped = Usage(swamped.when, swamped.total, swamped.idle, swamped.own, stalled=1.0)
    before = usage(0, total=0, idle=0)
    assert Gate(FillConfig(cpu_busy=1, cpu_pressure=1)).open(before, swamped)
    assert not Gate(FillConfig(cpu_busy=1)).open(before, swamped)
    assert not Gate(FillConfig(cpu_pressure=1)).open(before, swamped)


def test_samples_grow() -> None:
    before = sample()
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        pass
    after = sample()
    assert after.when > before.when
    assert after.own > before.own
    assert after.total >= before.total
    assert after.idle >= before.idle


@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=50), st.integers(1 << 16, 1 << 22))
def test_the_bucket_keeps_the_rate(sizes: list[int], rate: int) -> None:
    bucket, now, taken = Bucket(rate), 100.0, 0
    for size in sizes:
        taken += size
        now += bucket.delay(size, now)
        assert taken <= rate * (now - 100.0 + 1.0) + max(sizes)


def test_without_a_rate_nothing_waits() -> None:
    assert Bucket(0).delay(1 << 40, 0.0) == 0.0


@given(st.binary(min_size=1, max_size=60), st.sets(st.integers(0, 59)))
def test_pieces_are_missing_contiguous_and_bounded(raw: bytes, planned: set[int]) -> None:
    states = bytearray(byte & 1 for byte in raw)
    starts = array("Q", [number * (200 << 10) for number in range(len(states) + 1)])
    piece = next_piece(states, starts, 0, planned.__contains__)
    wanted = [frame for frame in range(len(states)) if not states[frame] and frame not in planned]
    if not wanted:
        assert piece == []
        return
    assert piece == list(range(wanted[0], wanted[0] + len(piece)))
    assert set(piece) <= set(wanted)
    assert len(piece) <= 2


@pytest.mark.parametrize("rate", [0, 400_000])
async def test_a_layer_in_use_is_completed_and_one_that_is_not_is_left_alone(tmp_path: Path, rate: int) -> None:
    layers = []
    for number in range(2):
        made = make_layer([("f", payload(2 << 20, number))], target=64 << 10)
        path = tmp_path / str(number)
        path.mkdir()
        (path / "blob").write_bytes(made.blob)
        size = len(made.stream)
        layer = Layer(
            made.source(Origin("file", path=str(path / "blob"))), str(path), FrameIndex(made.frames, size, made.toc.diff_id),
            Presence.open(str(path), made.frames.content_sizes, size), DataStore.open(str(path / "data"), size),
            [FileSource(str(path / "blob"))], (0, 0),
        )  # fmt: skip
        layers.append((layer, made.stream))
    used, unused = layers[0][0], layers[1][0]
    used.first_used = 1.0
    fetcher = Fetcher(verify_frame)
    config = FillConfig(quiet=0.0, cpu_busy=1.1, cpu_pressure=100.0, cpu_share=1.0, rate=rate)
    filler = Filler(config, fetcher, lambda: [used, unused])
    began = time.monotonic()
    task = asyncio.create_task(filler.run())
    for _ in range(1200):
        await asyncio.sleep(0.05)
        if used.complete:
            break
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await fetcher.close()
    assert used.complete
    if rate:  # all but what the bucket holds, one second's worth, and the last piece, which nothing waits behind
        assert time.monotonic() - began >= (used.starts[-1] - (512 << 10)) / rate - 1.0
    assert (tmp_path / "0" / "data").read_bytes() == layers[0][1]
    assert unused.presence.missing == len(unused.presence)
    assert filler.filled_bytes == used.starts[-1]
    for layer in (used, unused):
        for source in layer.sources:
            await source.close()
