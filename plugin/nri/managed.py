"""One managed environment as the controller holds it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from weenv.plugin.nri.cgroups import Reader
from weenv.plugin.nri.model import UNLIMITED_MEMORY, EnvKey, EnvState, Pids, Quota, Reason, Sample
from weenv.plugin.nri.watch import Found


class Env:
    """All that is known of an environment; plain state of the controller's event loop. Times are monotonic."""

    __slots__ = (
        "began", "blind", "burst", "changed_at", "changing", "checked", "complained", "emergency", "forks", "found", "gone",
        "high", "key", "noted", "oom_kills", "pause", "peak", "pids", "pids_due", "previous", "reader", "rested", "resting",
        "sampled", "slot", "spent", "starved_s", "starving", "state", "tier", "triggers", "usage", "use", "why", "why_at",
    )  # fmt: skip

    def __init__(self, found: Found, reader: Reader, state: EnvState, now: float) -> None:
        self.found = found
        self.key: EnvKey = found.key
        self.reader = reader
        self.state = state
        self.began = now
        self.slot = -1
        """When it is looked at next (weenv.plugin.nri.controller); -1: not planned."""
        self.sampled = -math.inf
        self.resting = False
        """At its floor, and nothing was going on when it was sampled last."""
        self.rested: tuple[float, float] | None = None
        """(when, CPU seconds) of the last look that saw it rest; None: not since the last sample."""
        self.usage = 0.0
        """CPU seconds at the last look."""
        self.use = 0.0
        """Cores used between the last two looks, where the last only saw it rest."""
        self.pause = 0.2
        self.previous: Sample | None = None
        """The sample before ``state.last``."""
        self.changing: Quota | None = None
        """Limits that are being put into force now."""
        self.high: int | None = None
        """The brake (``memory.high``) that is in force."""
        self.checked = now
        self.changed_at: float | None = None
        self.tier = 0
        self.why = Reason.FIRST
        self.why_at = now
        self.starving = -math.inf
        """When it last wanted more than the node could give."""
        self.starved_s = 0.0
        self.oom_kills = 0
        self.peak = 0
        self.emergency = False
        self.complained = False
        self.blind = False
        """Its cgroup is gone, its end has not been told yet."""
        self.gone = False
        self.noted = -math.inf
        self.triggers: list[int] = []
        """Descriptors by which the kernel tells of it (weenv.plugin.nri.wake)."""
        self.forks: int | None = None
        """That of them which tells of refused forks."""
        self.spent: list[int] = []
        """Those of them that have told, and say no more until they are armed again."""
        self.burst: float | None = None
        """Cores of CPU burst in force; None: not set yet."""
        self.pids: Pids | None = None
        """Its processes at the last look, where they are looked at."""
        self.pids_due = 0.0

    def alive(self) -> bool:
        """Whether it is still managed; to be asked again after every await."""
        return not self.gone

    def close(self) -> None:
        """Close its files."""
        self.reader.close()

    def state_at_rest(self) -> EnvState:
        """The state as if the last look, which only saw that nothing happened, had been a sample."""
        last = self.state.last
        if self.rested is None or last is None:
            return self.state
        when, usage = self.rested
        return replace(self.state, last=replace(last, when=when, cpu=replace(last.cpu, usage_s=usage)))

    def row(self, now: float) -> dict[str, Any]:
        """What ``weenv top`` shows, for JSON."""
        state, last, old = self.state, self.state.last, self.previous
        cpu, throttled, cpu_pressure, memory_pressure = self.use if self.rested is not None else 0.0, 0.0, 0.0, 0.0
        if self.rested is None and last is not None and old is not None and last.when > old.when:
            elapsed = last.when - old.when
            cpu = max(0.0, last.cpu.usage_s - old.cpu.usage_s) / elapsed
            periods = last.cpu.nr_periods - old.cpu.nr_periods
            throttled = (last.cpu.nr_throttled - old.cpu.nr_throttled) / periods if periods > 0 else 0.0
            cpu_pressure = _share(old.cpu.pressure_some_us, last.cpu.pressure_some_us, elapsed)
            memory_pressure = _share(old.memory.pressure_some_us, last.memory.pressure_some_us, elapsed)
        bounds = state.bounds
        return {
            "namespace": self.key.namespace,
            "id": self.key.container_id,
            "name": self.found.name,
            "role": state.role.value,
            "pid": self.found.pid,
            "age": round(now - self.began, 1),
            "quota": [state.quota.cpu, state.quota.memory],
            "start": [bounds.start.cpu, bounds.start.memory],
            "ceiling": [bounds.ceiling.cpu, bounds.ceiling.memory],
            "cpu": round(cpu, 3),
            "throttled": round(throttled, 3),
            "memory": last.memory.current if last is not None else 0,
            "unreclaimable": last.memory.unreclaimable if last is not None else 0,
            "high": last.memory.high if last is not None and last.memory.high < UNLIMITED_MEMORY else None,
            "cpu_pressure": round(cpu_pressure, 3),
            "memory_pressure": round(memory_pressure, 3),
            "tier": self.tier,
            "why": self.why.value,
            "why_age": round(now - self.why_at, 1),
            "changing": self.changing is not None,
            "starved_s": round(self.starved_s, 1),
            "oom_kills": self.oom_kills,
            "burst": self.burst or 0.0,
            "pids": [self.pids.current, self.pids.limit or None] if self.pids is not None else None,
        }


def _share(old: int | None, new: int | None, elapsed: float) -> float:
    return 0.0 if old is None or new is None else min(1.0, max(0.0, (new - old) / 1e6 / elapsed))
