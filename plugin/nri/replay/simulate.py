"""A node in steps of one quota period: environments get CPU and memory as cgroups give them, and the time that costs.

Each tick of 100 ms, for all environments of a node at once (numpy arrays, one element per running environment):

- CPU: what is wanted, at most the quota (kernel/sched/fair.c: bandwidth is per period); where all together want more than
  the node has, nobody gets more than a level at which it is enough (equal weights). What is not given stretches the phase.
- Memory grows in a straight line with the progress of its phase. At the limit there is nothing to reclaim (demand is of
  pages that cannot be dropped), so the kernel kills: the environment is gone. Above ``memory.high`` it is slowed instead, by
  the kernel's rule: a sleep of 64 * overage^2 seconds for every 64 pages, nothing below 10 ms, at most 2 s
  (mm/memcontrol.c, calculate_high_delay).
- A limit that is changed holds from the next tick on.

Simplifications that matter: page cache is not modelled; a quota is spent evenly within its period; a runtime takes less than
one tick for a change and never refuses one.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from weenv.plugin.nri.admission import Ledger, NotAdmitted, Request
from weenv.plugin.nri.config import AdmissionRules
from weenv.plugin.nri.model import UNLIMITED_MEMORY, Bounds, CpuSample, MemorySample, Quota, Resources, Role, Sample
from weenv.plugin.nri.replay.traces import Trace

TICK = 0.1
"""Seconds: one quota period."""
MOST_SECONDS = 30 * 86400.0
"""Simulated time after which a replay ends, whatever still runs."""
PAGES = 64 * 4096
"""Bytes that are charged between two sleeps above memory.high (MEMCG_CHARGE_BATCH pages)."""
DELAY = 64.0
"""Seconds of sleep at an overage of 1, by which square it is multiplied: 2**20 squared, shifted by 20 + 14."""
LEAST_OVERAGE = 0.0125
"""Below, the sleep would be shorter than 10 ms, and there is none."""
MOST_DELAY = 2.0

Floats = NDArray[np.float64]


class End(StrEnum):
    """How an environment came to its end."""

    DONE = "done"
    OOM = "oom"
    """Killed by the kernel at its limit."""
    ENDED = "ended"
    """Ended by the policy, cause recorded."""
    REFUSED = "refused"
    """Never admitted: no room within its deadline, or never enough."""
    UNFINISHED = "unfinished"
    """Still running, or waiting, when the simulation was over."""


@dataclass(slots=True)
class Result:
    """What came of one environment. Times in seconds."""

    trace: Trace
    arrived: float
    admitted: float | None = None
    ended: float | None = None
    end: End = End.UNFINISHED
    lost_quota: float = 0.0
    """Time lost because the CPU quota was too small."""
    lost_node: float = 0.0
    """Time lost because the node had no more CPU."""
    lost_memory: float = 0.0
    """Time lost above memory.high."""
    changes: int = 0
    """Times its limits were changed."""

    @property
    def wait(self) -> float:
        """Seconds until it was admitted."""
        return 0.0 if self.admitted is None else self.admitted - self.arrived

    @property
    def took(self) -> float:
        """Seconds from admission to the end."""
        return 0.0 if self.admitted is None or self.ended is None else self.ended - self.admitted


@dataclass(slots=True)
class Use:
    """A node over time: one element a second."""

    when: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)
    """Cores in use."""
    promised: list[float] = field(default_factory=list)
    """Cores promised."""
    memory: list[float] = field(default_factory=list)
    """Bytes in use."""
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)


class Strategy(Protocol):
    """A way to set quotas."""

    rules: AdmissionRules

    def bounds(self, trace: Trace, now: float) -> Bounds:
        """Where an environment would start and how far it may go."""

    def begin(self, node: Node, slot: int, now: float) -> None:
        """An environment was admitted; its limits are those of its start."""

    def tick(self, node: Node, now: float) -> list[int]:
        """A period has passed: look, decide, set limits through :meth:`Node.set`. Returns the slots that are to be ended."""

    def taken(self, node: Node, slot: int, quota: Quota, now: float) -> None:
        """Admission took quota back; it is in force."""


class Node:
    """One node, its ledger, and arrays with one element per running environment (slots are used again)."""

    def __init__(self, capacity: Resources, strategy: Strategy) -> None:
        self.capacity = capacity
        self.strategy = strategy
        self.ledger = Ledger(capacity, strategy.rules)
        self.results: list[Result] = []
        self.use = Use()
        self.ticks = 0
        self._size = 0
        self._free: list[int] = []
        self._of: dict[int, int] = {}  # number of the result -> slot
        self.result_of: list[int] = []
        self._phase: list[int] = []
        self.alive: NDArray[np.bool_] = np.zeros(0, bool)
        self.demand = self.length = self.progress = self.memory = self.memory_from = self.memory_to = np.zeros(0)
        self.cpu_quota = self.memory_quota = self.high = np.zeros(0)
        self.usage = self.throttled_s = self.pressure = self.stalled = np.zeros(0)
        self.periods = self.throttled = np.zeros(0)
        self.lost_quota = self.lost_node = self.lost_memory = np.zeros(0)
        self.squeezed: NDArray[np.bool_] = np.zeros(0, bool)
        """Under pressure in the last tick: what a pressure trigger of the kernel would tell."""

    # --- environments ------------------------------------------------------------------------------------------------

    _ARRAYS = (
        "demand", "length", "progress", "memory", "memory_from", "memory_to", "cpu_quota", "memory_quota", "high",
        "usage", "throttled_s", "pressure", "stalled", "periods", "throttled", "lost_quota", "lost_node", "lost_memory",
    )  # fmt: skip

    def _slot(self) -> int:
        if not self._free:
            grown = max(64, self._size * 2)
            for name in self._ARRAYS:
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros(grown - self._size)]))
            for name in ("alive", "squeezed"):
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros(grown - self._size, bool)]))
            self._free = list(range(grown - 1, self._size - 1, -1))
            self.result_of += [-1] * (grown - self._size)
            self._phase += [0] * (grown - self._size)
            self._size = grown
        return self._free.pop()

    def start(self, number: int, bounds: Bounds, now: float) -> None:
        """An admitted environment begins to run."""
        result, slot = self.results[number], self._slot()
        result.admitted = now
        for name in self._ARRAYS:
            getattr(self, name)[slot] = 0.0
        self.alive[slot], self.squeezed[slot] = True, False
        self.result_of[slot], self._of[number] = number, slot
        self._phase[slot] = -1
        self._next_phase(slot, 0.0)
        self.cpu_quota[slot], self.memory_quota[slot] = bounds.start.cpu, bounds.start.memory
        self.high[slot] = UNLIMITED_MEMORY
        self.strategy.begin(self, slot, now)

    def _next_phase(self, slot: int, over: float) -> bool:
        """Go on to the phase in which an environment is, ``over`` seconds into it; False: there is none."""
        phases = self.results[self.result_of[slot]].trace.phases
        number = self._phase[slot] + 1
        begin = self.memory[slot]
        while number < len(phases) and over >= phases[number].seconds:
            over -= phases[number].seconds
            begin = phases[number].memory
            number += 1
        if number >= len(phases):
            return False
        phase = phases[number]
        self._phase[slot] = number
        self.demand[slot], self.length[slot], self.progress[slot] = phase.cpu, phase.seconds, over
        self.memory_from[slot], self.memory_to[slot] = begin, phase.memory
        return True

    def end(self, slot: int, how: End, now: float) -> None:
        """An environment is over."""
        number = self.result_of[slot]
        result = self.results[number]
        result.ended, result.end = now, how
        result.lost_quota, result.lost_node = float(self.lost_quota[slot]), float(self.lost_node[slot])
        result.lost_memory = float(self.lost_memory[slot])
        self.alive[slot] = False
        for name in ("demand", "memory", "memory_to", "memory_from", "progress"):
            getattr(self, name)[slot] = 0.0
        self._free.append(slot)
        del self._of[number]
        self.ledger.remove(number)

    def sample(self, slot: int, now: float) -> Sample:
        """What the cgroup of an environment would say."""
        memory = int(self.memory[slot])
        stalled = int(self.stalled[slot] * 1e6)
        return Sample(
            now,
            CpuSample(
                float(self.usage[slot]), int(self.periods[slot]), int(self.throttled[slot]), float(self.throttled_s[slot]),
                int(self.pressure[slot] * 1e6),
            ),
            MemorySample(
                memory, memory, 0, 0, memory, int(self.high[slot]), int(self.memory_quota[slot]), 0, 0, 0, stalled, stalled
            ),
        )  # fmt: skip

    def set(self, slot: int, quota: Quota, high: int | None = None) -> None:
        """Limits that hold from the next tick on, told to the ledger. Raises must have been promised before."""
        self.cpu_quota[slot], self.memory_quota[slot] = quota.cpu, quota.memory
        self.high[slot] = UNLIMITED_MEMORY if high is None else high
        number = self.result_of[slot]
        self.results[number].changes += 1
        self.ledger.settle(number, quota)

    # --- time --------------------------------------------------------------------------------------------------------

    def run(self, traces: list[Trace], until: float = MOST_SECONDS) -> list[Result]:
        """Everything from the first arrival to the last end, at most ``until``. Returns one result for each trace, in order."""
        arrivals: list[tuple[float, int]] = []
        followers: dict[str, list[int]] = {}
        for number, trace in enumerate(traces):
            self.results.append(Result(trace, trace.arrive))
            if trace.after:
                followers.setdefault(trace.after, []).append(number)
            else:
                arrivals.append((trace.arrive, number))
        heapq.heapify(arrivals)
        bounds: dict[int, Bounds] = {}
        tick = 0
        while tick * TICK < until:
            now = tick * TICK
            if not self._of and not self.ledger.waiting:
                if not arrivals:
                    break
                if arrivals[0][0] > now:
                    tick = -int(-arrivals[0][0] // TICK)
                    now = tick * TICK
            while arrivals and arrivals[0][0] <= now + 1e-9:
                _, number = heapq.heappop(arrivals)
                trace = traces[number]
                bounds[number] = self.strategy.bounds(trace, now)
                self.results[number].arrived = now
                try:
                    if self.ledger.ask(Request(number, bounds[number], trace.role), now):
                        self.start(number, bounds[number], now)
                except NotAdmitted:
                    self._refuse(number, now, followers, arrivals)
            if self.ledger.waiting and tick % 2 == 0:
                self._admit(bounds, now, followers, arrivals)
            tick += 1
            for slot in self.tick(tick * TICK):
                self._follow(self.result_of[slot], tick * TICK, followers, arrivals)
            for slot in self.strategy.tick(self, tick * TICK):
                self.end(slot, End.ENDED, tick * TICK)
                self._follow(self.result_of[slot], tick * TICK, followers, arrivals)
            if tick % 10 == 0:
                self._note(tick * TICK)
        self.ticks = tick
        return self.results

    def _admit(
        self, bounds: dict[int, Bounds], now: float, followers: dict[str, list[int]], arrivals: list[tuple[float, int]]
    ) -> None:
        events = self.ledger.step(now)
        for key in events.expired:
            assert isinstance(key, int)
            self._refuse(key, now, followers, arrivals)
        for key in events.admitted:
            assert isinstance(key, int)
            self.start(key, bounds[key], now)
        for back in events.take_back:
            assert isinstance(back.key, int)
            slot = self._of[back.key]
            self.set(slot, back.quota)
            self.strategy.taken(self, slot, back.quota, now)

    def _refuse(self, number: int, now: float, followers: dict[str, list[int]], arrivals: list[tuple[float, int]]) -> None:
        self.results[number].ended, self.results[number].end = now, End.REFUSED
        self._follow(number, now, followers, arrivals)

    def _follow(self, number: int, now: float, followers: dict[str, list[int]], arrivals: list[tuple[float, int]]) -> None:
        """What comes after an environment arrives now; what comes after one that is not done never does."""
        result = self.results[number]
        for follower in followers.pop(result.trace.name, []):
            if result.end is End.DONE:
                heapq.heappush(arrivals, (now + self.results[follower].trace.arrive, follower))
            else:
                self.results[follower].arrived = now
                self._refuse(follower, now, followers, arrivals)

    def _note(self, now: float) -> None:
        """One element of the curves."""
        use = self.use
        use.when.append(float(round(now)))
        use.used.append(float(self._used))
        use.promised.append(self.ledger.promised.cpu)
        use.memory.append(float(self.memory.sum()))
        use.running.append(len(self._of))
        use.waiting.append(self.ledger.waiting)

    _used = 0.0

    def tick(self, now: float) -> list[int]:
        """One period. Returns the slots whose environments are over."""
        want = self.demand
        allowed = np.minimum(want, self.cpu_quota)
        active = want > 0
        by_quota = np.divide(allowed, want, out=np.ones_like(want), where=active)
        given = _fair(allowed, self.capacity.cpu) if float(allowed.sum()) > self.capacity.cpu else allowed
        rate = np.divide(given, want, out=np.ones_like(want), where=active)

        ahead = np.minimum(self.length, self.progress + TICK * rate)
        line = np.divide(ahead, self.length, out=np.ones_like(ahead), where=self.length > 0)
        next_memory = self.memory_from + (self.memory_to - self.memory_from) * line
        braked = (next_memory > self.high * (1 + LEAST_OVERAGE)) & (next_memory > self.memory)
        slowed = rate
        if braked.any():
            base = np.maximum(self.memory, self.high * (1 + LEAST_OVERAGE))
            over = np.maximum(base / np.maximum(self.high, 1.0) - 1, LEAST_OVERAGE)
            most = base + TICK * PAGES / np.minimum(DELAY * over**2, MOST_DELAY)
            held = np.minimum(next_memory, most)
            part = np.divide(held - self.memory, next_memory - self.memory, out=np.ones_like(held), where=braked).clip(0.0, 1.0)
            slowed = np.where(braked, rate * part, rate)
            next_memory = np.where(braked, held, next_memory)
            self.lost_memory += TICK * (rate - slowed)
            self.stalled += np.where(braked, TICK * (1 - part), 0.0)

        got = np.where(active, want * slowed, 0.0)
        self._used = float(got.sum())
        self.usage += got * TICK
        self.periods += active
        short = active & (want > self.cpu_quota + 1e-9)
        self.throttled += short
        self.throttled_s += np.where(short, np.minimum(want, self.capacity.cpu) - allowed, 0.0).clip(0.0) * TICK
        self.pressure += TICK * (1 - rate)
        self.lost_quota += TICK * (1 - by_quota) * self.alive
        self.lost_node += TICK * (by_quota - rate).clip(0.0) * active
        self.squeezed = short | braked
        self.progress += TICK * slowed * self.alive
        self.memory = np.where(self.alive, next_memory, 0.0)

        over_slots: list[int] = []
        for slot in np.flatnonzero(self.alive & (self.memory > self.memory_quota)).tolist():
            over_slots.append(slot)
            self.end(slot, End.OOM, now)
        while float(self.memory.sum()) > self.capacity.memory:  # all together: the kernel takes the largest
            slot = int(self.memory.argmax())
            over_slots.append(slot)
            self.end(slot, End.OOM, now)
        for slot in np.flatnonzero(self.alive & (self.progress >= self.length - 1e-9)).tolist():
            if not self._next_phase(slot, max(0.0, float(self.progress[slot] - self.length[slot]))):
                over_slots.append(slot)
                self.end(slot, End.DONE, now)
        return over_slots


def _fair(wanted: Floats, cores: float) -> Floats:
    """At most ``cores`` together: everybody gets what they want up to one level (max-min fairness of equal weights)."""
    ordered = np.sort(wanted)
    left = cores - np.concatenate([[0.0], np.cumsum(ordered)[:-1]])
    level = left / np.arange(len(ordered), 0, -1)
    at = int(np.argmax(ordered >= level))  # the first that gets less than it wants
    return np.minimum(wanted, float(level[at]))


def fleet(traces: list[Trace], nodes: int, capacity: Resources, strategies: list[Strategy]) -> tuple[list[Result], list[Node]]:
    """Several nodes, each with a strategy of its own; environments go to them in turn, followers to the node of their task."""
    place: dict[str, int] = {}
    parts: list[list[Trace]] = [[] for _ in range(nodes)]
    turn = 0
    for trace in sorted(traces, key=lambda item: (bool(item.after), item.arrive, item.name)):
        if trace.after and trace.after in place:
            where = place[trace.after]
        else:
            where, turn = turn % nodes, turn + 1
        place[trace.name] = where
        parts[where].append(trace)
    made = [Node(capacity, strategies[number]) for number in range(nodes)]
    results: list[Result] = []
    for node, part in zip(made, parts, strict=True):
        results += node.run(part)
    return results, made


def is_task(result: Result) -> bool:
    """A task or service, not an evaluation."""
    return result.trace.role is not Role.EVALUATION
