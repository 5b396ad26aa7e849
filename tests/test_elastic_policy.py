"""The policy: what must hold at every decision, whatever the samples, and the rules one by one."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weenv.plugin.nri import policy
from weenv.plugin.nri.config import GIB, MIB, ElasticConfig
from weenv.plugin.nri.model import (
    Bounds,
    CpuSample,
    Decision,
    MemorySample,
    NodeView,
    Quota,
    Reason,
    Role,
    Sample,
)

CONFIG = ElasticConfig()
BOUNDS = CONFIG.bounds()
NODE = NodeView(128.0, 1024 * GIB)
PERIOD = 0.1


class Machine:
    """An environment as the kernel would count it under its quota: demand in, samples out. One sample each 200 ms."""

    def __init__(self, bounds: Bounds = BOUNDS, config: ElasticConfig = CONFIG, role: Role = Role.TASK) -> None:
        self.config = config
        self.state = policy.begin(bounds, role)
        self.when = 1000.0
        self.cpu = CpuSample(0.0, pressure_some_us=0)
        self.memory = MemorySample(0, pressure_some_us=0, pressure_full_us=0)
        self.node = NODE

    def step(self, cores: float = 0.0, memory: int = 50 * MIB, *, full: float = 0.0, seconds: float = 0.2) -> Decision:
        """So much is wanted for so long, of memory what no reclaim frees; then one sample and one decision."""
        quota = self.state.quota
        periods = round(seconds / PERIOD)
        got = min(cores, quota.cpu)
        stopped = cores > quota.cpu + 1e-9
        old = self.cpu
        self.cpu = CpuSample(
            old.usage_s + got * seconds,
            old.nr_periods + (periods if cores else 0),
            old.nr_throttled + (periods if stopped else 0),
            old.throttled_s + (cores - got) * seconds,
            (old.pressure_some_us or 0) + (int((1 - got / cores) * seconds * 1e6) if stopped else 0),
        )
        held = min(memory, quota.memory)
        self.memory = replace(
            self.memory, current=held, anon=held, unreclaimable=held, max=quota.memory,
            max_events=self.memory.max_events + (memory > quota.memory),
            pressure_full_us=(self.memory.pressure_full_us or 0) + int(full * seconds * 1e6),
        )  # fmt: skip
        self.when += seconds
        return self.decide()

    def decide(self) -> Decision:
        self.state, decision = policy.decide(self.state, Sample(self.when, self.cpu, self.memory), self.node, self.config)
        return decision

    def run(self, seconds: float, cores: float = 0.0, memory: int = 50 * MIB) -> list[Decision]:
        return [self.step(cores, memory) for _ in range(round(seconds / 0.2))]


# --- what holds whatever is seen ----------------------------------------------------------------------------------------

amounts = st.integers(0, 40 * GIB)
shares = st.floats(0, 1)


@st.composite
def some_bounds(draw: st.DrawFn) -> Bounds:
    """Bounds in order, in both resources; not always in whole grains."""
    cpu = sorted(draw(st.lists(st.floats(0.01, 200), min_size=3, max_size=3)))
    memory = sorted(draw(st.lists(st.integers(4 * MIB, 64 * GIB), min_size=3, max_size=3)))
    return Bounds(Quota(cpu[1], memory[1]), Quota(cpu[2], memory[2]), Quota(cpu[0], memory[0]))


@st.composite
def some_node(draw: st.DrawFn) -> NodeView:
    """A node, roomy, full or over-promised."""
    cpu, memory = draw(st.floats(0.1, 512)), draw(st.integers(64 * MIB, 4096 * GIB))
    taken, kept = draw(st.floats(0, 1.2)), draw(shares)
    return NodeView(cpu, memory, Quota(cpu * taken, int(memory * taken)), Quota(cpu * kept, int(memory * kept)))


@dataclasses.dataclass(frozen=True)
class Move:
    """What happens between two samples; mostly forwards."""

    seconds: float
    use: float
    throttled: float
    lost: float
    pressure: float
    memory: int
    active: int
    cache: int
    events: int
    kills: int
    full: float


moves = st.builds(
    Move,
    seconds=st.one_of(st.just(0.2), st.floats(0.05, 40), st.floats(-5, 0)),
    use=st.floats(0, 200), throttled=shares, lost=st.floats(0, 300), pressure=shares,
    memory=amounts, active=amounts, cache=amounts,
    events=st.integers(0, 3), kills=st.integers(0, 1), full=shares,
)  # fmt: skip


def after(old: Sample, move: Move) -> Sample:
    """The sample that follows."""
    seconds = max(0.0, move.seconds)
    periods = max(1, round(seconds / PERIOD))
    cpu = CpuSample(
        old.cpu.usage_s + move.use * seconds,
        old.cpu.nr_periods + periods,
        old.cpu.nr_throttled + round(periods * move.throttled),
        old.cpu.throttled_s + move.lost * seconds,
        (old.cpu.pressure_some_us or 0) + int(move.pressure * seconds * 1e6),
    )
    memory = MemorySample(
        move.memory + move.active + move.cache, anon=move.memory, active_file=move.active, inactive_file=move.cache,
        unreclaimable=move.memory, max_events=old.memory.max_events + move.events, oom_kill=old.memory.oom_kill + move.kills,
        pressure_some_us=(old.memory.pressure_some_us or 0) + int(move.full * seconds * 1e6),
        pressure_full_us=(old.memory.pressure_full_us or 0) + int(move.full * seconds * 1e6),
    )  # fmt: skip
    return Sample(old.when + move.seconds, cpu, memory)


@settings(max_examples=150, deadline=None)
@given(some_bounds(), st.lists(st.tuples(moves, some_node()), min_size=1, max_size=30), st.sampled_from(Role), st.booleans())
def test_invariants_of_every_decision(bounds: Bounds, story: list[tuple[Move, NodeView]], role: Role, triggers: bool) -> None:
    state = policy.begin(bounds, role, triggers=triggers)
    sample = Sample(100.0, CpuSample(0.0, pressure_some_us=0), MemorySample(0, pressure_some_us=0, pressure_full_us=0))
    lowered: dict[str, float] = {}
    raised: dict[str, float] = {}
    for move, node in story:
        forwards = move.seconds > 0
        sample = after(sample, move)
        before = state.quota
        state, decision = policy.decide(state, sample, node, CONFIG)
        if not forwards:
            lowered, raised = {}, {}  # times of another clock
        assert CONFIG.interval <= decision.wake_after <= (CONFIG.idle_interval if triggers else CONFIG.interval)
        assert decision.tier >= 0
        assert state.quota == (decision.quota or before)
        assert decision.quota != before
        if decision.emergency:
            assert decision.quota is None
            assert role is not Role.SERVICE
            assert sample.memory.unreclaimable >= CONFIG.memory.severe_use * before.memory
            room = min(bounds.ceiling.memory - before.memory, node.free_memory)
            assert room < before.memory * (policy.WORTH - 1) + policy.GRAIN_MEMORY
        now = state.quota
        # never above a ceiling, never more than the node has beside its reserve
        assert bounds.floor.cpu <= now.cpu <= bounds.ceiling.cpu
        assert bounds.floor.memory <= now.memory <= bounds.ceiling.memory
        assert now.cpu - before.cpu <= node.free_cpu + 1e-6
        assert now.memory - before.memory <= node.free_memory
        # a brake below the limit; none before which a service would stand for ever
        assert decision.high < now.memory if decision.high is not None else role is Role.SERVICE
        for name in ("cpu", "memory"):
            old, new = getattr(before, name), getattr(now, name)
            rules = getattr(CONFIG, name)
            if new < old:
                # steps, not falls; not within the hold time; not without a comparison
                assert new >= old * rules.step - 1e-9 or new == getattr(bounds.floor, name)
                assert forwards
                tight = name == "cpu" and node.free_cpu < CONFIG.cpu.tight_free * node.cpu
                times = CONFIG.cpu.tight if tight else 1.0
                assert sample.when - raised.get(name, -math.inf) >= rules.hold * times
                assert sample.when - lowered.get(name, -math.inf) >= rules.step_every * times
                lowered[name] = sample.when
            elif new > old:
                assert new <= old * 4 + 1e-6
                raised[name] = sample.when
        if now.memory < before.memory:
            rules_ = CONFIG.memory
            assert now.memory >= sample.memory.unreclaimable * (1 + rules_.margin) + rules_.margin_bytes
            assert now.memory >= policy.working_set(sample.memory) * rules_.headroom


@given(some_bounds(), st.floats(0.3, 1e4), st.floats(0.2, 5))
def test_one_severe_sample_quadruples_the_cpu(bounds: Bounds, lost: float, seconds: float) -> None:
    free = NodeView(1e9, 1 << 60)
    state, _ = policy.decide(policy.begin(bounds), Sample(1.0, CpuSample(0.0), MemorySample(0)), free, CONFIG)
    periods = math.ceil(seconds / PERIOD)
    use = bounds.start.cpu * seconds
    cpu = CpuSample(use, periods, periods, max(use * lost, use * 1.01))
    state, decision = policy.decide(state, Sample(1.0 + seconds, cpu, MemorySample(0)), free, CONFIG)
    assert state.quota.cpu >= min(bounds.start.cpu * 4, bounds.ceiling.cpu) - policy.GRAIN_CPU
    if bounds.start.cpu * policy.WORTH < bounds.ceiling.cpu:
        assert decision.reason in (Reason.CPU_SEVERE, Reason.CUT_SHORT)


@given(some_bounds())
def test_one_severe_sample_quadruples_the_memory(bounds: Bounds) -> None:
    free = NodeView(1e9, 1 << 60)
    full = bounds.start.memory
    state, _ = policy.decide(
        policy.begin(bounds), Sample(1.0, CpuSample(0.0), MemorySample(full, anon=full, unreclaimable=full)), free, CONFIG
    )
    assert state.quota.memory >= min(full * 4, bounds.ceiling.memory) - policy.GRAIN_MEMORY


@given(st.lists(st.floats(0, 0.3), min_size=150, max_size=400), st.floats(1, 64), st.integers(1, 32))
@settings(max_examples=30, deadline=None)
def test_calm_shrinks_monotonically_to_the_floor(use: list[float], cores: float, gib: int) -> None:
    machine = Machine()
    machine.state = policy.begin(BOUNDS, quota=Quota(cores, gib * GIB))
    quotas = [machine.state.quota]
    for share in use * 2:
        machine.step(cores=share * BOUNDS.start.cpu)
        quotas.append(machine.state.quota)
    for one, next_ in itertools.pairwise(quotas):
        assert next_.cpu <= one.cpu
        assert next_.memory <= one.memory
    assert quotas[-1].cpu <= max(BOUNDS.floor.cpu, cores * CONFIG.cpu.step)


# --- rules ----------------------------------------------------------------------------------------------------------------


def test_the_first_sample_changes_nothing_and_says_so() -> None:
    decision = Machine().step()
    assert (decision.quota, decision.reason, decision.tier) == (None, Reason.FIRST, 0)


def test_ordinary_pressure_doubles() -> None:
    machine = Machine()
    machine.step()
    decision = machine.step(cores=0.7)
    assert decision.quota == Quota(1.0, BOUNDS.start.memory)
    assert decision.reason is Reason.CPU_PRESSURE
    assert decision.tier == 1


def test_severe_pressure_quadruples() -> None:
    machine = Machine()
    machine.step()
    decision = machine.step(cores=8)
    assert decision.quota is not None
    assert decision.quota.cpu == 2.0
    assert decision.reason is Reason.CPU_SEVERE


def test_a_burst_of_47_times_is_followed_within_a_second() -> None:
    machine = Machine()
    machine.run(10, cores=0.4)
    quotas = [(machine.step(cores=0.4 * 47), machine.state.quota.cpu)[1] for _ in range(5)]
    assert quotas[2] >= 0.4 * 47


def test_a_burst_that_ends_returns_in_steps() -> None:
    machine = Machine()
    machine.run(4, cores=64)
    assert machine.state.quota.cpu == 64
    seen = []
    for decision in machine.run(60, cores=0.1):
        if decision.quota is not None:
            assert decision.reason is Reason.CALM
            seen.append(decision.quota.cpu)
    assert seen == [32, 16, 8, 4, 2, 1, 0.5]


def test_a_shrink_waits_for_calm_and_hold() -> None:
    machine = Machine()
    machine.run(2, cores=3)
    high = machine.state.quota.cpu
    for decision in machine.run(min(CONFIG.cpu.calm_after, CONFIG.cpu.hold) - 0.4, cores=0.1):
        assert decision.quota is None
    assert machine.state.quota.cpu == high
    machine.step(cores=high * 0.5)  # not low: the calm begins again
    for decision in machine.run(CONFIG.cpu.calm_after - 0.4, cores=0.1):
        assert decision.quota is None


def test_on_a_tight_node_unused_quota_goes_back_sooner() -> None:
    machine = Machine()
    machine.run(3, cores=30)
    high = machine.state.quota.cpu
    machine.node = replace(NODE, promised=Quota(120.0, GIB))
    machine.run(CONFIG.cpu.calm_after * CONFIG.cpu.tight + 0.6, cores=0.1)
    assert machine.state.quota.cpu == high * CONFIG.cpu.step


def test_the_hold_time_is_told() -> None:
    config = replace(CONFIG, cpu=replace(CONFIG.cpu, calm_after=1.0, hold=20.0))
    machine = Machine(config=config)
    machine.run(2, cores=3)
    decisions = machine.run(15, cores=0.1)
    assert Reason.HELD in {decision.reason for decision in decisions}
    assert all(decision.quota is None for decision in decisions)
    assert any(decision.quota is not None for decision in machine.run(8, cores=0.1))


def test_a_steady_load_does_not_flap() -> None:
    machine = Machine()
    machine.run(5, cores=1.5)
    quota = machine.state.quota
    assert all(decision.quota is None for decision in machine.run(120, cores=1.5))
    assert machine.state.quota == quota


def test_memory_is_followed_up_and_down() -> None:
    machine = Machine()
    machine.run(1)
    assert machine.step(memory=450 * MIB).quota == Quota(0.5, 2048 * MIB)
    machine.run(2, memory=1900 * MIB)
    assert machine.state.quota.memory >= 4 * GIB
    machine.run(300, memory=100 * MIB)
    assert machine.state.quota.memory == BOUNDS.start.memory


def test_memory_stays_above_what_cannot_be_freed_and_its_margin() -> None:
    machine = Machine(CONFIG.bounds(start_memory=8 * MIB))
    machine.state = policy.begin(machine.state.bounds, quota=Quota(0.5, 256 * MIB))
    machine.run(300, memory=16 * MIB)
    rules = CONFIG.memory
    assert machine.state.quota.memory == pytest.approx(16 * MIB * (1 + rules.margin) + rules.margin_bytes, abs=4096)


def test_fast_growth_is_severe_long_before_the_limit() -> None:
    machine = Machine()
    machine.run(1, memory=20 * MIB)
    decision = machine.step(memory=250 * MIB)  # more than 1 GB/s
    assert decision.reason is Reason.MEMORY_SEVERE


def test_page_cache_is_no_reason_to_grow() -> None:
    machine = Machine()
    machine.run(1)
    limit = machine.state.quota.memory
    for _ in range(10):
        machine.when += 0.2
        machine.memory = replace(
            machine.memory, current=limit, anon=20 * MIB, unreclaimable=20 * MIB, inactive_file=limit - 20 * MIB,
            max_events=machine.memory.max_events + 5,
        )  # fmt: skip
        assert machine.decide().quota is None


def test_cpu_and_memory_at_once_have_a_reason_of_their_own() -> None:
    machine = Machine()
    machine.run(1)
    assert machine.step(cores=0.7, memory=420 * MIB).reason is Reason.BOTH


def test_what_the_node_has_left_is_given_and_then_told() -> None:
    machine = Machine()
    machine.run(1)
    machine.node = NodeView(10, 64 * GIB, Quota(8.7, GIB), Quota(1, GIB))
    decision = machine.step(cores=8)
    assert decision.reason is Reason.CUT_SHORT
    assert machine.state.quota.cpu == pytest.approx(0.8)
    machine.node = replace(machine.node, promised=Quota(9.0, GIB))
    decision = machine.step(cores=8)
    assert (decision.quota, decision.reason) == (None, Reason.NODE_FULL)


def test_the_ceiling_is_told() -> None:
    machine = Machine(CONFIG.bounds(ceiling_cpu=0.5))
    machine.run(1)
    assert machine.step(cores=8).reason is Reason.CEILING


def grow(machine: Machine, limit: int) -> list[Decision]:
    """Memory up to the limit and on."""
    return [machine.step(memory=limit + number * MIB) for number in range(8)]


def test_emergency_at_the_ceiling_after_two_samples() -> None:
    machine = Machine(CONFIG.bounds(ceiling_memory=512 * MIB))
    machine.run(1)
    decisions = grow(machine, 512 * MIB)
    first = next(number for number, decision in enumerate(decisions) if decision.emergency)
    assert 1 < first <= 3
    assert decisions[first].reason is Reason.OOM_EMERGENCY
    assert not any(decision.emergency for decision in decisions[:first])


def test_a_service_is_never_ended() -> None:
    machine = Machine(CONFIG.bounds(ceiling_memory=512 * MIB), role=Role.SERVICE)
    machine.run(1)
    assert not any(decision.emergency for decision in grow(machine, 512 * MIB))


def test_no_emergency_without_growth() -> None:
    machine = Machine(CONFIG.bounds(ceiling_memory=512 * MIB))
    assert not any(decision.emergency for decision in machine.run(5, memory=512 * MIB))


def test_a_kernel_kill_is_told_and_answered() -> None:
    machine = Machine()
    machine.run(1)
    machine.when += 0.2
    machine.memory = replace(machine.memory, oom=1, oom_kill=1)
    decision = machine.decide()
    assert decision.reason is Reason.KERNEL_OOM
    assert decision.quota == Quota(0.5, 2048 * MIB)
    assert not decision.emergency


@pytest.mark.parametrize(("role", "last"), [(Role.TASK, 0.97), (Role.EVALUATION, 0.97), (Role.SERVICE, None)])
def test_the_last_brake_is_nearer_and_not_for_services(role: Role, last: float | None) -> None:
    machine = Machine(role=role)
    assert machine.step().high == pytest.approx(0.85 * BOUNDS.start.memory, abs=4096)
    machine.node = NodeView(1, GIB, Quota(1, GIB))
    high = machine.step(memory=480 * MIB).high
    assert high == (None if last is None else pytest.approx(last * BOUNDS.start.memory, abs=4096))
    high = policy.brake(BOUNDS.ceiling, machine.state, CONFIG)
    assert high == (None if last is None else pytest.approx(last * BOUNDS.ceiling.memory, abs=4096))


def test_without_a_brake_there_is_no_last_one() -> None:
    config = replace(CONFIG, memory=replace(CONFIG.memory, brake=0.0))
    assert policy.brake(BOUNDS.ceiling, policy.begin(BOUNDS), config) is None


def test_emergency_before_the_kernel_where_growth_foretells_it() -> None:
    machine = Machine(CONFIG.bounds(ceiling_memory=512 * MIB))
    ends = [machine.step(memory=(400 + 10 * number) * MIB).emergency for number in range(12)]
    assert 400 + 10 * ends.index(True) < 512


def test_slow_growth_may_fill_its_limit() -> None:
    """A program that is nearly done, and nearly full, is not ended for what it might want."""
    machine = Machine(CONFIG.bounds(ceiling_memory=512 * MIB))
    assert not any(machine.step(memory=(480 * 1024 + 400 * number) * 1024).emergency for number in range(40))


def test_an_environment_that_stands_before_the_brake_is_ended() -> None:
    machine = Machine(CONFIG.bounds(ceiling_memory=512 * MIB))
    machine.run(1)
    machine.memory = replace(machine.memory, high=497 * MIB)
    decisions = [machine.step(memory=499 * MIB, full=0.9) for _ in range(5)]
    assert any(decision.emergency for decision in decisions)


def test_a_clock_that_went_back_begins_anew() -> None:
    machine = Machine()
    machine.run(3, cores=5)
    quota = machine.state.quota
    machine.when -= 500
    assert machine.decide().reason is Reason.CLOCK
    assert machine.state.quota == quota
    for decision in machine.run(CONFIG.cpu.calm_after - 0.4):
        assert decision.quota is None
    assert any(decision.quota is not None for decision in machine.run(2))  # times of the old clock hold nothing up


@pytest.mark.parametrize("name", ["usage_s", "nr_periods", "nr_throttled", "throttled_s"])
def test_one_counter_that_went_back_is_enough(name: str) -> None:
    machine = Machine()
    machine.run(3, cores=5)
    machine.cpu = replace(machine.cpu, **{name: getattr(machine.cpu, name) // 2})
    machine.when += 0.2
    assert machine.decide().reason is Reason.CLOCK


def test_counters_that_went_back_begin_anew() -> None:
    machine = Machine()
    machine.run(3, cores=5)
    machine.cpu = CpuSample(0.0)
    machine.when += 0.2
    assert machine.decide().reason is Reason.CLOCK


def test_a_gap_without_samples_is_no_calm() -> None:
    machine = Machine()
    machine.run(3, cores=5)
    machine.run(2, cores=0.1)
    quota = machine.state.quota
    assert machine.step(seconds=3600.0).quota is None
    assert machine.state.quota == quota


def test_only_a_watched_idle_environment_is_left_alone_longer() -> None:
    machine = Machine()
    assert {decision.wake_after for decision in machine.run(2)} == {CONFIG.interval}
    machine.state = replace(machine.state, triggers=True)
    machine.memory = replace(machine.memory, high=int(BOUNDS.floor.memory * 0.85))
    assert machine.step().wake_after == CONFIG.idle_interval
    assert machine.step(cores=0.3).wake_after == CONFIG.interval


def test_one_that_could_run_out_of_memory_untold_is_not_left_alone_as_long() -> None:
    machine = Machine()
    machine.state = replace(machine.state, triggers=True)
    machine.step()
    assert machine.step().wake_after == policy.UNSETTLED, "no brake"
    service = Machine(replace(BOUNDS, ceiling=BOUNDS.floor), role=Role.SERVICE)
    service.state = replace(service.state, triggers=True)
    service.step()
    assert service.step().wake_after == CONFIG.idle_interval, "nothing could be done about it"
    for seconds, expected in ((5.0, 5.0), (0.2, 0.2)):
        machine.config = replace(CONFIG, interval=min(seconds, 5.0), idle_interval=max(seconds, 0.2))
        assert machine.step().wake_after == expected, "never more often than an active one, nor less often than is set"


def test_an_idle_one_goes_down_as_fast_as_one_that_is_looked_at_all_the_time() -> None:
    machine = Machine()
    machine.state = replace(machine.state, triggers=True)
    machine.memory = replace(machine.memory, high=int(BOUNDS.floor.memory * 0.85))
    machine.run(3, cores=8)
    assert machine.state.quota.cpu >= 8
    begin, pause = machine.when, CONFIG.interval
    while machine.state.quota.cpu > BOUNDS.floor.cpu:
        pause = machine.step(seconds=pause).wake_after
    steps = math.ceil(math.log2(16 / BOUNDS.floor.cpu))
    longest = CONFIG.cpu.calm_after + steps * (CONFIG.cpu.step_every + policy.UNSETTLED)
    assert machine.when - begin <= longest
    assert pause == CONFIG.idle_interval, "and then rests"


def test_a_look_right_after_another_says_nothing_about_use_or_growth() -> None:
    machine = Machine()
    machine.run(1, cores=0.1)
    machine.when += 0.005
    machine.cpu = replace(machine.cpu, usage_s=machine.cpu.usage_s + 0.005)  # one core, for these 5 ms
    held = machine.memory.anon + 8 * MIB  # 1.6 GiB a second
    machine.memory = replace(machine.memory, current=held, anon=held, unreclaimable=held)
    assert machine.decide().quota is None


def test_a_look_right_after_another_says_nothing_about_waiting() -> None:
    machine = Machine()
    limit = BOUNDS.start.memory
    cache = replace(machine.memory, current=limit, anon=MIB, unreclaimable=MIB, inactive_file=limit - MIB, max=limit)
    machine.memory = cache
    machine.decide()
    machine.when += 0.01
    machine.memory = replace(cache, pressure_some_us=4_000, pressure_full_us=4_000)  # 40 % of it, 4 ms of reclaim
    assert machine.decide().quota is None
    machine.when += 0.2
    machine.memory = replace(cache, pressure_some_us=90_000, pressure_full_us=90_000)
    assert machine.decide().reason is Reason.MEMORY_SEVERE


def test_throttling_seen_right_after_another_look_counts() -> None:
    machine = Machine()
    machine.run(1, cores=0.1)
    machine.when += 0.02
    machine.cpu = replace(
        machine.cpu, usage_s=machine.cpu.usage_s + 0.02, nr_periods=machine.cpu.nr_periods + 1,
        nr_throttled=machine.cpu.nr_throttled + 1, throttled_s=machine.cpu.throttled_s + 0.03,
    )  # fmt: skip
    assert machine.decide().reason is Reason.CPU_SEVERE


def test_what_was_refused_is_asked_for_again() -> None:
    machine = Machine()
    machine.run(1)
    old = machine.state.quota
    first = machine.step(cores=8)
    machine.state = policy.applied(machine.state, old)
    assert machine.step(cores=8).quota == first.quota


def test_a_quota_below_its_floor_is_mended_on_a_full_node() -> None:
    state = policy.begin(BOUNDS, quota=Quota(0.1, 64 * MIB))
    full = NodeView(1, GIB, Quota(1, GIB))
    _, decision = policy.decide(state, Sample(1.0, CpuSample(0.0), MemorySample(0)), full, CONFIG)
    assert decision.quota == BOUNDS.floor


def test_taken_back_counts_as_a_step_down() -> None:
    machine = Machine()
    machine.run(3, cores=5)
    low = policy.lowest(machine.state, CONFIG)
    assert low == BOUNDS.start
    machine.state = policy.taken_back(machine.state, low, machine.when)
    assert machine.state.quota == low
    assert machine.state.cpu.lowered_at == machine.when


def test_memory_never_looked_at_is_not_taken() -> None:
    state = policy.begin(BOUNDS, quota=Quota(8, 8 * GIB))
    assert policy.lowest(state, CONFIG) == Quota(BOUNDS.start.cpu, 8 * GIB)
