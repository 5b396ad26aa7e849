"""Ways to set quotas that replay compares: ours, fixed ones, an oracle, one like the Vertical Pod Autoscaler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from weenv.plugin.nri import policy
from weenv.plugin.nri.admission import Request
from weenv.plugin.nri.config import MIB, AdmissionRules, ElasticConfig
from weenv.plugin.nri.model import UNLIMITED_MEMORY, Bounds, EnvState, Quota
from weenv.plugin.nri.replay import generate
from weenv.plugin.nri.replay.simulate import TICK, Node, Strategy
from weenv.plugin.nri.replay.traces import Trace

PLAIN = AdmissionRules(reserve_cpu=0.0, reserve_memory=0.0, evaluation_share=0.0, starts_share=1.0)
"""Admission for quotas that never grow: whatever fits."""


def _bounds(config: ElasticConfig, trace: Trace) -> Bounds:
    """Where a trace says that it starts and ends, within the settings."""
    start, ceiling = trace.start, trace.ceiling
    return config.bounds(
        start.cpu if start else 0.0, start.memory if start else 0, ceiling.cpu if ceiling else 0.0,
        ceiling.memory if ceiling else 0,
    )  # fmt: skip


class Elastic:
    """Policy and admission as ``weenv elastic serve`` runs them, with triggers: idle environments are looked at less often."""

    def __init__(self, config: ElasticConfig, *, triggers: bool = True) -> None:
        self.config = config
        self.rules = config.admission
        self.looks = 0
        self._triggers = triggers
        self._states: dict[int, EnvState] = {}
        self._due = np.zeros(0)
        self._resting: np.ndarray[tuple[int], np.dtype[np.bool_]] = np.zeros(0, bool)

    def bounds(self, trace: Trace, now: float) -> Bounds:
        """From the trace and the settings."""
        return _bounds(self.config, trace)

    def begin(self, node: Node, slot: int, now: float) -> None:
        """Looked at for the first time one interval from now."""
        if slot >= len(self._due):
            more = len(node.alive) - len(self._due)
            self._due = np.concatenate([self._due, np.full(more, np.inf)])
            self._resting = np.concatenate([self._resting, np.zeros(more, bool)])
        result = node.results[node.result_of[slot]]
        bounds = self.bounds(result.trace, now)
        self._states[slot] = policy.begin(bounds, result.trace.role, triggers=self._triggers)
        high = policy.brake(bounds.start, self._states[slot], self.config)
        if high is not None:
            node.high[slot] = high
        # The daemon spreads its looks; so that a set stays reproducible, by the number of the slot.
        self._due[slot] = now + self.config.interval * (1 + slot % 4 / 4)
        self._resting[slot] = False

    def tick(self, node: Node, now: float) -> list[int]:
        """Look at who is due, and at who rested and came under pressure."""
        woken = node.alive & ((self._due <= now + 1e-9) | (self._resting & node.squeezed))
        over: list[int] = []
        for slot in np.flatnonzero(woken).tolist():
            self.looks += 1
            number = node.result_of[slot]
            before = self._states[slot]
            state, decision = policy.decide(before, node.sample(slot, now), node.ledger.view(), self.config)
            if decision.emergency:
                over.append(slot)
                continue
            quota = decision.quota
            if quota is not None:
                raised = quota.cpu > before.quota.cpu or quota.memory > before.quota.memory
                if raised and not node.ledger.promise(number, quota):
                    state = policy.applied(state, before.quota)
                else:
                    node.set(slot, quota, decision.high)
            else:
                node.high[slot] = decision.high or UNLIMITED_MEMORY
            if node.ledger.waiting:
                node.ledger.observe(number, policy.lowest(state, self.config), state.pressed_at)
            self._states[slot] = state
            self._due[slot] = now + decision.wake_after
            self._resting[slot] = decision.wake_after > self.config.interval
        return over

    def taken(self, node: Node, slot: int, quota: Quota, now: float) -> None:
        """Admission took quota back."""
        self._states[slot] = policy.taken_back(self._states[slot], quota, now)


class Fixed:
    """One quota for everybody, for life."""

    def __init__(self, quota: Quota) -> None:
        self.rules = PLAIN
        self.quota = quota

    def bounds(self, trace: Trace, now: float) -> Bounds:
        """The same for all, but for a ceiling that the trace names."""
        quota = self.quota
        if trace.ceiling is not None:
            quota = Quota(min(quota.cpu, trace.ceiling.cpu), min(quota.memory, trace.ceiling.memory))
        return Bounds(quota, quota, quota)

    def begin(self, node: Node, slot: int, now: float) -> None:
        """Nothing to do."""

    def tick(self, node: Node, now: float) -> list[int]:
        """Nothing to do."""
        return []

    def taken(self, node: Node, slot: int, quota: Quota, now: float) -> None:
        """Never: nothing is above its start."""


class Oracle:
    """Every environment has what it wants at every moment, up to its ceiling and the node; admission is ours."""

    def __init__(self, config: ElasticConfig) -> None:
        self.config = config
        self.rules = config.admission

    def bounds(self, trace: Trace, now: float) -> Bounds:
        """From the trace and the settings."""
        return _bounds(self.config, trace)

    def begin(self, node: Node, slot: int, now: float) -> None:
        """The ceiling from the first moment: CPU that is not used costs nobody anything here."""
        ceiling = self.bounds(node.results[node.result_of[slot]].trace, now).ceiling
        node.cpu_quota[slot], node.memory_quota[slot] = ceiling.cpu, ceiling.memory

    def tick(self, node: Node, now: float) -> list[int]:
        """Nothing to do."""
        return []

    def taken(self, node: Node, slot: int, quota: Quota, now: float) -> None:
        """Never: the ledger only knows the starts."""


class VpaLike:
    """Recommendations from the history of all environments, as Kubernetes' Vertical Pod Autoscaler makes them.

    Its documented defaults: the 90th percentile of CPU use and of peak memory, 15 % above that, a recommendation a minute.
    Unlike the real one, changes happen in place and at once, and memory is never put below use; and its history
    begins with the set, not days before it.
    """

    PERCENTILE, MARGIN, EVERY = 0.9, 1.15, 60.0
    LEAST = Quota(0.025, 250 * MIB)
    """Its documented minima: 25 millicores, 250 MiB."""

    def __init__(self, config: ElasticConfig) -> None:
        self.config = config
        self.rules = PLAIN
        self._cpu: list[float] = []
        self._memory: list[float] = []
        self._next = self.EVERY
        self._usage = self._peak = np.zeros(0)
        self._since = np.zeros(0)
        self._advice: Quota | None = None

    def bounds(self, trace: Trace, now: float) -> Bounds:
        """What is recommended now; before there is any history the same start as ours."""
        bounds = _bounds(self.config, trace)
        start = self._within(self._advice or bounds.start, bounds)
        return Bounds(start, start, start)

    def _within(self, quota: Quota, bounds: Bounds) -> Quota:
        return Quota(min(quota.cpu, bounds.ceiling.cpu), min(quota.memory, bounds.ceiling.memory))

    def begin(self, node: Node, slot: int, now: float) -> None:
        """Its history begins."""
        if slot >= len(self._usage):
            more = np.zeros(len(node.alive) - len(self._usage))
            self._usage, self._peak, self._since = (
                np.concatenate([old, more]) for old in (self._usage, self._peak, self._since)
            )
        self._usage[slot], self._peak[slot], self._since[slot] = 0.0, 0.0, now

    def tick(self, node: Node, now: float) -> list[int]:
        """Once a minute, a recommendation for all."""
        size = len(self._peak)
        np.maximum(self._peak, node.memory[:size], out=self._peak)
        if now < self._next - TICK / 2:
            return []
        self._next = now + self.EVERY
        slots = np.flatnonzero(node.alive)
        for slot in slots.tolist():
            if now > self._since[slot]:
                self._cpu.append(float(node.usage[slot] - self._usage[slot]) / (now - float(self._since[slot])))
                self._memory.append(float(self._peak[slot]))
            self._usage[slot], self._peak[slot], self._since[slot] = node.usage[slot], node.memory[slot], now
        if not self._cpu:
            return []
        cpu = float(np.quantile(self._cpu, self.PERCENTILE)) * self.MARGIN
        memory = int(np.quantile(self._memory, self.PERCENTILE) * self.MARGIN)
        self._advice = Quota(max(cpu, self.LEAST.cpu), max(memory, self.LEAST.memory))
        for slot in slots.tolist():
            result = node.results[node.result_of[slot]]
            quota = self._within(self._advice, _bounds(self.config, result.trace))
            quota = replace(quota, memory=max(quota.memory, int(node.memory[slot] * self.MARGIN)))
            number = node.result_of[slot]
            if node.ledger.promise(number, quota):
                node.ledger.adopt(Request(number, Bounds(quota, quota, quota), result.trace.role), quota)
                node.set(slot, quota)
        return []

    def taken(self, node: Node, slot: int, quota: Quota, now: float) -> None:
        """Never: nothing is above its start."""


def named(config: ElasticConfig, cores: float) -> dict[str, Callable[[], Strategy]]:
    """All strategies of the report, by name, in its order, for nodes of so many cores."""
    rules = config.admission
    median = Quota(generate.MEDIAN_CPU, int(generate.P99_MEMORY))
    most = Quota(min(generate.P99_CPU, config.ceiling_cpu), int(generate.P99_MEMORY))
    return {
        "fixed-median": lambda: Fixed(median),
        "fixed-p99": lambda: Fixed(most),
        "vpa-like": lambda: VpaLike(config),
        "elastic": lambda: Elastic(config),
        "elastic-x2": lambda: Elastic(replace(config, admission=replace(rules, cpu=2 * (rules.cpu or cores)))),
        "oracle": lambda: Oracle(config),
    }
