"""The background fill: fetches the rest of every layer in use while nobody needs the machine.

It yields: to bandwidth (one ranged read at a time, none while a reader waits, and that one stops reading its socket when a
reader begins to wait), to CPU (see :class:`Gate`), to the disk (a token bucket bounds what it writes). It runs in the
server's own threads at normal priority on purpose: a thread of idle priority that holds the interpreter's lock would keep
the readers' threads waiting for as long as other processes keep it off the CPU. So the decision is made before each piece
of work, which takes a few milliseconds, and not by the scheduler.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from weenv.plugin.snapshotter.blobfs.config import FillConfig
from weenv.plugin.snapshotter.blobfs.layers import Layer
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher
from weenv.plugin.snapshotter.fetch.flight import FILL, FutureWaiter

log = logging.getLogger(__name__)

_PIECE: Final = 512 << 10
"""Compressed bytes asked for at a time."""
_POLL: Final = 0.25
"""Seconds between looks at the node while it may not run."""
_RETRY: Final = 30.0
"""Seconds before a layer whose sources failed is tried again."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The node's CPU use so far, in seconds: of all CPUs together, of them idle, of this process; and pressure stall."""

    when: float
    total: float
    idle: float
    own: float
    stalled: float


def sample() -> Usage:
    """Read ``/proc/stat``, ``/proc/pressure/cpu`` (0 where the kernel has none) and this process's own use."""
    with open("/proc/stat", "rb") as file:
        ticks = [int(value) for value in file.readline().split()[1:9]]  # user nice system idle iowait irq softirq steal
    stalled = 0.0
    try:
        with open("/proc/pressure/cpu", "rb") as file:
            stalled = int(file.readline().rpartition(b"total=")[2]) / 1e6
    except (OSError, ValueError):
        pass  # a kernel without pressure information
    hertz = os.sysconf("SC_CLK_TCK")
    return Usage(time.monotonic(), sum(ticks) / hertz, (ticks[3] + ticks[4]) / hertz, time.process_time(), stalled)


class Gate:
    """Whether the node is idle enough, from two :class:`Usage` samples. Pure."""

    def __init__(self, config: FillConfig) -> None:
        self.config = config

    def open(self, before: Usage, now: Usage) -> bool:
        """True where others used less than ``cpu_busy`` of the CPUs and waited less than ``cpu_pressure`` of the time."""
        elapsed, total = now.when - before.when, now.total - before.total
        if elapsed <= 0 or total <= 0:
            return False
        own = now.own - before.own
        busy = max(0.0, total - (now.idle - before.idle) - own)
        # This process can cause pressure itself, so its own share of the time is taken off.
        pressure = max(0.0, (now.stalled - before.stalled) / elapsed - own / elapsed)
        # 1 turns a bound off: a machine can be busy with others to the last percent.
        idle = self.config.cpu_busy >= 1 or busy / total < self.config.cpu_busy
        return idle and (self.config.cpu_pressure >= 1 or pressure < self.config.cpu_pressure)


class Bucket:
    """A token bucket of ``rate`` bytes a second, one second deep. Pure: the caller tells the time."""

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._ready = 0.0

    def delay(self, size: int, now: float) -> float:
        """Take ``size`` bytes; returns how many seconds to wait before the next are taken."""
        if self.rate <= 0:
            return 0.0
        self._ready = max(self._ready, now - 1.0) + size / self.rate
        return max(0.0, self._ready - now)


def next_piece(states: bytearray, starts: Sequence[int], position: int, planned: Callable[[int], bool]) -> list[int]:
    """The next missing frames at or after ``position`` that lie side by side, up to 512 KiB; empty at the end."""
    first = states.find(0, position)
    while first >= 0 and planned(first):
        first = states.find(0, first + 1)
    if first < 0:
        return []
    end = first + 1
    while end < len(states) and not states[end] and not planned(end) and starts[end + 1] - starts[first] <= _PIECE:
        end += 1
    return list(range(first, end))


class Filler:
    """Runs the fill over ``layers()``, those first used first, while the cache has ``room()``.

    ``filled_bytes`` counts what it fetched (compressed).
    """

    def __init__(
        self, config: FillConfig, fetcher: Fetcher, layers: Callable[[], list[Layer]], room: Callable[[], bool] = lambda: True
    ) -> None:
        self.config = config
        self.filled_bytes = 0
        self.state = "idle"
        self._fetcher = fetcher
        self._layers = layers
        self._room = room
        self._gate = Gate(config)
        self._bucket = Bucket(config.rate)
        self._pause: dict[int, float] = {}

    def _next(self) -> tuple[Layer, list[int]] | None:
        now = time.monotonic()
        self._pause = {key: until for key, until in self._pause.items() if until > now}
        used = [layer for layer in self._layers() if layer.first_used and layer.presence.missing]
        waiting = [layer for layer in used if id(layer) not in self._pause]
        for layer in sorted(waiting, key=lambda layer: layer.first_used):
            if not layer.presence.persistent:
                continue  # the disk is full: filling would only fetch for nothing
            piece = next_piece(layer.presence.states, layer.starts, 0, layer.flights.__contains__)
            if piece:
                return layer, piece
        return None

    def _quiet(self) -> bool:
        fetcher = self._fetcher
        return not fetcher.demanded and not fetcher.running and time.monotonic() - fetcher.last_demand >= self.config.quiet

    async def run(self) -> None:
        """Fill until cancelled."""
        before = sample()
        while True:
            await asyncio.sleep(_POLL)
            while self._next() is None:
                self.state = "idle"
                await asyncio.sleep(_POLL * 4)
                before = sample()
            if not self._room():
                self.state = "full"
                before = sample()
                continue
            if not self._quiet():
                self.state = "readers"
                before = sample()
                continue
            now = sample()
            if not self._gate.open(before, now):
                self.state = "cpu"
                before = now
                continue
            before = now
            self.state = "idle"
            until = now.when + _POLL  # look at the node again after so much work
            while self._quiet() and self._room() and time.monotonic() < until and (chosen := self._next()) is not None:
                self.state = "filling"
                await self._fill(*chosen)

    async def _fill(self, layer: Layer, frames: list[int]) -> None:
        used, begun = time.process_time(), time.monotonic()
        waiter = FutureWaiter()
        self._fetcher.want(layer, frames, FILL, waiter)
        size = layer.starts[frames[-1] + 1] - layer.starts[frames[0]]
        try:
            await waiter.future
            self.filled_bytes += size
        except OSError as error:
            self._pause[id(layer)] = time.monotonic() + _RETRY
            log.info("the background fill pauses", extra={"layer": layer.name, "error": str(error), "seconds": _RETRY})
            return
        now = time.monotonic()
        rest = (time.process_time() - used) / self.config.cpu_share - (now - begun) if self.config.cpu_share > 0 else 0.0
        await asyncio.sleep(max(rest, self._bucket.delay(size, now), 0.0))
