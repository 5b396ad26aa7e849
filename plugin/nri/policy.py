"""When limits move: a pure function of an environment's state, one sample, the node and the settings. No clock, no I/O.

::

               pressed x2, severe x4 (one sample)
        +-------------------------------------------+
        v                                           |
    [quota] -- use between calm and pressed: stays -+
        |                                           |
        +-- low use for calm_after, hold over ------+
               one step down every step_every, to the floor

CPU and memory go through this each by itself. What holds at every decision (tests/test_elastic_policy.py):

- a quota asked for is at most the ceiling, and what it adds is at most what the node has free beside the reserve;
- it is at least the floor, and memory at least what no reclaim can free plus a margin;
- a severe sample asks for four times the quota, an ordinary one for twice, or for all there is;
- no step down within the hold time of a step up, nor within ``step_every`` of another, nor by more than one step;
- an environment is ended only where memory is at its limit, still grows, and there is nothing to give.

:func:`decide` answers what is to be done. The caller does it and says what came of it: :func:`applied` with the limits that
are now in force, whatever they are. Until then the state holds what was asked for.
"""

from __future__ import annotations

import math
from dataclasses import replace

from weenv.plugin.nri.config import ElasticConfig, MemoryRules
from weenv.plugin.nri.model import (
    Bounds,
    CpuSample,
    Decision,
    EnvState,
    MemorySample,
    NodeView,
    Quota,
    Reason,
    Role,
    Sample,
    Track,
)

GRAIN_CPU = 0.01
"""Quotas are whole hundredths of a core: 1 ms of a 100 ms period, the least that CFS takes (kernel/sched/core.c)."""
GRAIN_MEMORY = 4096
"""Memory limits are whole pages; the kernel rounds to them."""
WORTH = 1.05
"""A change of less than this factor is not worth a call to the runtime."""
LONG_AGO = 30.0
"""Seconds without a sample after which the calm before is no longer believed: whoever slept (we, the machine) saw nothing."""

UNSETTLED = 2.0
"""Seconds between two samples of an idle one that has steps down before it, which come every few seconds, or that could run out
of memory before the kernel had told of it: no brake (``memory.high``) is in force."""

LEAST_SPAN = 0.1
"""Seconds, one quota period: a shorter look after a pressure trigger may fall into the busy part of a period, and says
nothing about use or growth over time."""

NONE, PRESSED, SEVERE = 0, 1, 2
FACTOR = (1, 2, 4)
_CPU_REASONS = (Reason.STEADY, Reason.CPU_PRESSURE, Reason.CPU_SEVERE)
_MEMORY_REASONS = (Reason.STEADY, Reason.MEMORY_PRESSURE, Reason.MEMORY_SEVERE)


def begin(bounds: Bounds, role: Role = Role.TASK, quota: Quota | None = None, *, triggers: bool = False) -> EnvState:
    """The state of an environment that was not looked at yet; ``quota`` where its limits are not those of the start."""
    return EnvState(bounds, quota or bounds.start, role, triggers=triggers)


def applied(state: EnvState, quota: Quota) -> EnvState:
    """The state once limits were read back: ``quota`` is in force, whether or not it is what was asked for."""
    return state if quota == state.quota else replace(state, quota=quota)


def taken_back(state: EnvState, quota: Quota, when: float) -> EnvState:
    """The state after admission took quota away: counts as a step down, so that none of ours follows at once."""
    cpu = replace(state.cpu, lowered_at=when) if quota.cpu < state.quota.cpu else state.cpu
    memory = replace(state.memory, lowered_at=when) if quota.memory < state.quota.memory else state.memory
    return replace(state, quota=quota, cpu=cpu, memory=memory)


def unreclaimable(memory: MemorySample) -> int:
    """Bytes that no reclaim frees."""
    return max(memory.unreclaimable, memory.anon)


def working_set(memory: MemorySample) -> int:
    """Bytes that are in use: what cannot be freed, and file pages that are used again and again.

    All that is charged where a kernel tells no more than that.
    """
    return unreclaimable(memory) + memory.active_file or memory.current


def least_memory(fixed: int, rules: MemoryRules) -> int:
    """The lowest limit, in whole pages, that so many bytes which cannot be freed fit under with the margin of the rules."""
    return _pages_up(fixed * (1 + rules.margin) + rules.margin_bytes)


def lowest(state: EnvState, config: ElasticConfig) -> Quota:
    """What admission may take an environment back to: its start quota, or the lowest memory limit that is safe now.

    Memory that was never looked at is not taken.
    """
    start = state.bounds.start
    if state.last is None:
        return Quota(start.cpu, max(start.memory, state.quota.memory))
    return Quota(start.cpu, max(start.memory, least_memory(unreclaimable(state.last.memory), config.memory)))


def tier(quota: Quota, bounds: Bounds) -> int:
    """Doublings above the start, of whichever resource is further up; 0 at or below the start."""
    ratio = max(quota.cpu / bounds.start.cpu, quota.memory / bounds.start.memory)
    return math.ceil(math.log2(ratio) - 1e-6) if ratio > 1 else 0


def decide(state: EnvState, sample: Sample, node: NodeView, config: ElasticConfig) -> tuple[EnvState, Decision]:
    """What one sample calls for. Returns the next state, which holds the quota that is asked for, and the decision."""
    last, when = state.last, sample.when
    restarted = last is not None and _went_back(last, sample)
    if restarted:
        state, last = _forget_times(state, when), None
    elapsed = when - last.when if last is not None else 0.0
    cpu_level, cpu_use = _look_cpu(last, sample.cpu, elapsed, state, config)
    memory_level, killed, growing = _look_memory(last, sample, elapsed, state, config)
    quota, bounds = state.quota, state.bounds

    cpu, cpu_track, cpu_held = _move_cpu(state, cpu_level, cpu_use, elapsed, when, node, config)
    in_use = working_set(sample.memory)
    memory, memory_track, memory_held = _move_memory(state, memory_level, sample, elapsed, node.free_memory, config)
    stuck = memory_level > NONE and memory == quota.memory
    full_since, emergency = None, False
    if stuck and memory_level == SEVERE and _at_limit(last, sample, elapsed, quota.memory, config):
        full_since = when if state.full_since is None else state.full_since
        emergency = growing and state.role is not Role.SERVICE and when - full_since >= config.memory.emergency_after

    asked = Quota(cpu, memory)
    if emergency:
        reason = Reason.OOM_EMERGENCY
    elif killed:
        reason = Reason.KERNEL_OOM
    elif cpu > quota.cpu or memory > quota.memory:
        reason = _why_raised(cpu_level, memory_level, asked, quota)
    elif cpu_level or memory_level:
        short_cpu = cpu_level and quota.cpu * WORTH < bounds.ceiling.cpu
        short_memory = memory_level and quota.memory * WORTH < bounds.ceiling.memory
        reason = Reason.NODE_FULL if short_cpu or short_memory else Reason.CEILING
    elif asked != quota:
        reason = Reason.CALM
    elif last is None:
        reason = Reason.CLOCK if restarted else Reason.FIRST
    else:
        reason = Reason.HELD if cpu_held or memory_held else Reason.STEADY
    change = asked != quota and not emergency
    idle = (
        state.triggers and last is not None and not cpu_level and not memory_level
        and cpu_use < config.idle_use and in_use * 2 < memory
    )  # fmt: skip
    now = asked if change else quota
    after = EnvState(bounds, now, state.role, sample, cpu_track, memory_track, full_since, state.triggers)
    return after, Decision(
        now if change else None,
        tier(now, bounds),
        reason,
        emergency,
        _idle_pause(state, now, sample.memory, config) if idle else config.interval,
        brake(now, state, config, last=stuck),
    )


def _idle_pause(state: EnvState, quota: Quota, memory: MemorySample, config: ElasticConfig) -> float:
    """Seconds until an idle one is looked at again."""
    told = memory.high < quota.memory or (state.role is Role.SERVICE and quota.memory >= state.bounds.ceiling.memory)
    if told and quota == state.bounds.floor:
        return config.idle_interval
    return max(config.interval, min(config.idle_interval, UNSETTLED))


def brake(quota: Quota, state: EnvState, config: ElasticConfig, *, last: bool = False) -> int | None:
    """``memory.high`` that goes with a quota of an environment; ``last``: there is nothing more to give than that quota.

    None: no brake; a service, which nobody ends, would stand before the last one for ever.
    """
    rules = config.memory
    last = last or quota.memory >= state.bounds.ceiling.memory
    share = rules.last_brake if last else rules.brake
    if not rules.brake or not share or (last and state.role is Role.SERVICE):
        return None
    return int(quota.memory * share) // GRAIN_MEMORY * GRAIN_MEMORY


# --- looking ------------------------------------------------------------------------------------------------------------


def _went_back(last: Sample, now: Sample) -> bool:
    """The clock did not advance, or counters shrank: this is not the cgroup, or not the clock, of the last sample."""
    old, new = last.cpu, now.cpu
    return (
        not now.when > last.when
        or new.usage_s < old.usage_s
        or new.nr_periods < old.nr_periods
        or new.nr_throttled < old.nr_throttled
        or new.throttled_s < old.throttled_s
        or now.memory.oom_kill < last.memory.oom_kill
    )


def _forget_times(state: EnvState, when: float) -> EnvState:
    """Times of a clock that is no longer ours are cut to now: every hold time begins again, none ends early."""

    def cut(at: float | None) -> float | None:
        return None if at is None else when

    def track(old: Track) -> Track:
        return Track(cut(old.raised_at), cut(old.lowered_at), cut(old.pressed_at), None, 0.0)

    return replace(state, last=None, cpu=track(state.cpu), memory=track(state.memory), full_since=None)


def _rate(old: int | None, new: int | None, elapsed: float) -> float:
    """Growth of a pressure total in microseconds as a share of the time; 0 where there is none."""
    return 0.0 if old is None or new is None else min(1.0, max(0.0, (new - old) / 1e6 / elapsed))


def _look_cpu(last: Sample | None, now: CpuSample, elapsed: float, state: EnvState, config: ElasticConfig) -> tuple[int, float]:
    """Pressure on CPU since the last sample, and cores used."""
    if last is None:
        return NONE, 0.0
    rules, old = config.cpu, last.cpu
    use = (now.usage_s - old.usage_s) / elapsed
    periods, stopped = now.nr_periods - old.nr_periods, now.nr_throttled - old.nr_throttled
    share = min(1.0, stopped / periods) if periods > 0 else 0.0
    if share >= rules.severe_throttled and (
        (now.throttled_s - old.throttled_s) / elapsed >= rules.severe_lost * max(use, GRAIN_CPU)
        or _rate(old.pressure_some_us, now.pressure_some_us, elapsed) >= rules.severe_pressure
    ):
        return SEVERE, use
    pressed = share >= rules.pressed_throttled or (elapsed >= LEAST_SPAN * 0.9 and use >= rules.pressed_use * state.quota.cpu)
    return (PRESSED if pressed else NONE), use


def _look_memory(
    last: Sample | None, sample: Sample, elapsed: float, state: EnvState, config: ElasticConfig
) -> tuple[int, bool, bool]:
    """Pressure on memory, whether the kernel killed for it since the last sample, whether it grows or asks for more."""
    rules, now, limit = config.memory, sample.memory, state.quota.memory
    in_use, fixed = working_set(now), unreclaimable(now)
    killed, growing, some, full, growth = False, False, 0.0, 0.0, 0.0
    if last is not None:
        old = last.memory
        span = max(elapsed, LEAST_SPAN)
        growth = (in_use - working_set(old)) / span
        some = _rate(old.pressure_some_us, now.pressure_some_us, span)
        full = _rate(old.pressure_full_us, now.pressure_full_us, span)
        killed = now.oom_kill > old.oom_kill
        growing = growth > 0 or now.max_events > old.max_events or full >= rules.severe_pressure
        if killed or now.oom > old.oom:
            return SEVERE, killed, True
    at_limit = now.current >= 0.98 * min(limit, now.high)
    if (
        fixed >= rules.severe_use * limit
        or (growth > 0 and in_use + growth * rules.horizon >= limit)
        or (at_limit and full >= rules.severe_pressure)
    ):
        return SEVERE, killed, growing
    pressed = in_use >= rules.pressed_use * limit or (at_limit and some >= rules.pressed_pressure)
    return (PRESSED if pressed else NONE), killed, growing


def _at_limit(last: Sample | None, sample: Sample, elapsed: float, limit: int, config: ElasticConfig) -> bool:
    """Use that cannot be freed fills the limit (or the brake below it), or is about to."""
    rules, now = config.memory, sample.memory
    line = min(limit, now.high)
    fixed = unreclaimable(now)
    if fixed < rules.severe_use * line:
        return False
    growth = (fixed - unreclaimable(last.memory)) / max(elapsed, LEAST_SPAN) if last is not None else 0.0
    return now.current >= 0.98 * line or fixed + growth * rules.emergency_horizon >= line


# --- moving -------------------------------------------------------------------------------------------------------------


def _move_cpu(
    state: EnvState, level: int, use: float, elapsed: float, when: float, node: NodeView, config: ElasticConfig
) -> tuple[float, Track, bool]:
    """The CPU quota to ask for, what is remembered, and whether a step down is only held back by the time since a change."""
    rules, quota, floor = config.cpu, state.quota.cpu, state.bounds.floor.cpu
    track = _calm(state.cpu, level, use, quota * rules.calm_use, when, elapsed)
    up = _raised(quota, FACTOR[level], floor, state.bounds.ceiling.cpu, node.free_cpu)
    if up > quota:
        exact = up in (floor, state.bounds.ceiling.cpu)
        up = up if exact else max(quota, floor, math.floor(up / GRAIN_CPU + 1e-6) / round(1 / GRAIN_CPU))
        return up, Track(when, track.lowered_at, track.pressed_at, None, 0.0), False
    if level or elapsed <= 0 or quota <= floor:
        return quota, track, False
    times = rules.tight if node.free_cpu < rules.tight_free * node.cpu else 1.0
    due, held = _due(track, when, rules.calm_after * times, rules.hold * times, rules.step_every * times)
    low = max(quota * rules.step, track.peak * rules.headroom)
    low = max(floor, math.ceil(low / GRAIN_CPU - 1e-6) / round(1 / GRAIN_CPU))
    if not due or low > state.bounds.ceiling.cpu or (low * WORTH > quota and low != floor):
        return quota, track, held
    return low, Track(track.raised_at, when, track.pressed_at, track.calm_since, use), False


def _move_memory(
    state: EnvState, level: int, sample: Sample, elapsed: float, free: int, config: ElasticConfig
) -> tuple[int, Track, bool]:
    """The same for memory; a step down stays above what cannot be reclaimed."""
    rules, quota, floor, when = config.memory, state.quota.memory, state.bounds.floor.memory, sample.when
    in_use = working_set(sample.memory)
    track = _calm(state.memory, level, in_use, quota * rules.calm_use, when, elapsed)
    raised = _raised(quota, FACTOR[level], floor, state.bounds.ceiling.memory, free)
    if raised > quota:
        exact = raised in (floor, state.bounds.ceiling.memory)
        up = int(raised) if exact else max(quota, floor, int(raised) // GRAIN_MEMORY * GRAIN_MEMORY)
        return up, Track(when, track.lowered_at, track.pressed_at, None, 0.0), False
    if level or elapsed <= 0 or quota <= floor:
        return quota, track, False
    due, held = _due(track, when, rules.calm_after, rules.hold, rules.step_every)
    low = max(
        floor,
        _pages_up(max(quota * rules.step, track.peak * rules.headroom)),
        least_memory(unreclaimable(sample.memory), rules),
    )
    if not due or low >= quota or low > state.bounds.ceiling.memory or (low * WORTH > quota and low != floor):
        return quota, track, held
    return low, Track(track.raised_at, when, track.pressed_at, track.calm_since, float(in_use)), False


def _raised(quota: float, factor: int, floor: float, ceiling: float, free: float) -> float:
    """The quota after a step up: as much as rule, ceiling and node allow; unchanged where that is not worth a call.

    A quota below its floor is mended first: the floor is promised already, and takes nothing of what is free.
    """
    quota_now = max(quota, floor)
    if factor == 1 or quota_now >= ceiling:
        return quota_now
    want = min(quota_now * factor, ceiling)
    got = min(want, quota_now + free)
    return got if got == want or got >= quota_now * WORTH else quota_now


def _why_raised(cpu_level: int, memory_level: int, asked: Quota, quota: Quota) -> Reason:
    """The name of a step up."""
    cpu, memory = asked.cpu > quota.cpu, asked.memory > quota.memory
    if (cpu and asked.cpu < quota.cpu * FACTOR[cpu_level] - GRAIN_CPU) or (
        memory and asked.memory < quota.memory * FACTOR[memory_level] - GRAIN_MEMORY
    ):
        return Reason.CUT_SHORT
    if cpu and memory:
        return Reason.BOTH
    return _CPU_REASONS[cpu_level] if cpu else _MEMORY_REASONS[memory_level]


def _calm(track: Track, level: int, use: float, below: float, when: float, elapsed: float) -> Track:
    """What is remembered after one more sample; the same object where nothing new is."""
    if level:
        return Track(track.raised_at, track.lowered_at, when, None, 0.0)
    if use >= below:
        return track if track.calm_since is None else Track(track.raised_at, track.lowered_at, track.pressed_at, None, 0.0)
    if track.calm_since is None or elapsed > LONG_AGO:
        return Track(track.raised_at, track.lowered_at, track.pressed_at, when, use)
    if use > track.peak:
        return Track(track.raised_at, track.lowered_at, track.pressed_at, track.calm_since, use)
    return track


def _due(track: Track, when: float, calm_after: float, hold: float, step_every: float) -> tuple[bool, bool]:
    """Whether a step down is due, and whether only the time since the last change holds it."""
    if track.calm_since is None or when - track.calm_since < calm_after:
        return False, False
    held = (track.raised_at is not None and when - track.raised_at < hold) or (
        track.lowered_at is not None and when - track.lowered_at < step_every
    )
    return not held, held


def _pages_up(count: float) -> int:
    """Bytes rounded up to whole pages."""
    return math.ceil(count / GRAIN_MEMORY) * GRAIN_MEMORY
