"""Replay: traces in and out, demand from seeds, a node in periods, and what the strategies make of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from weenv.core.errors import FormatError
from weenv.plugin.nri.config import GIB, MIB, AdmissionRules, ElasticConfig, without_brake
from weenv.plugin.nri.model import Quota, Resources, Role
from weenv.plugin.nri.replay import generate, report, simulate, traces
from weenv.plugin.nri.replay import strategies as ways
from weenv.plugin.nri.replay.simulate import TICK, End, Node
from weenv.plugin.nri.replay.traces import Phase, Trace

CONFIG = ElasticConfig()
LARGE = Resources(128.0, 1024 * GIB)
SMALL = Resources(2.0, 4 * GIB)


def steady(name: str = "a", *, seconds: float = 10.0, cpu: float = 1.0, memory: int = 100 * MIB, **more: Any) -> Trace:
    return Trace(name, more.pop("arrive", 0.0), (Phase(seconds, cpu, memory),), **more)


def fixed(cpu: float, memory: int = 8 * GIB) -> ways.Fixed:
    return ways.Fixed(Quota(cpu, memory))


def run(strategy: simulate.Strategy, *given_: Trace, capacity: Resources = LARGE) -> tuple[list[simulate.Result], Node]:
    node = Node(capacity, strategy)
    return node.run(list(given_)), node


# --- files ----------------------------------------------------------------------------------------------------------------


def test_a_trace_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = [
        replace(steady("a", arrive=1.5), start=Quota(0.25, 64 * MIB), ceiling=Quota(4.0, GIB)),
        Trace("b", 0.0, (Phase(1.0, 0.5, MIB), Phase(2.5, 16.0, GIB)), Role.EVALUATION, "a"),
    ]
    path = str(tmp_path / "traces")
    traces.write(path, made)
    assert traces.read(path) == made


LINE = {"name": "a", "phases": [[1.0, 1.0, 1]]}


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([], "no environment"),
        (["nonsense"], ":1"),
        ([json.dumps(LINE), "[]"], ":2"),
        ([json.dumps({**LINE, "phases": []})], "at least one phase"),
        ([json.dumps({**LINE, "phases": [[1, 2]]})], "[seconds, cores, bytes]"),
        ([json.dumps({**LINE, "phases": [[-1, 2, 3]]})], "seconds"),
        ([json.dumps({**LINE, "phases": [[1, float("nan"), 3]]})], "cores"),
        ([json.dumps({**LINE, "phases": [[1, True, 3]]})], "cores"),
        ([json.dumps({**LINE, "phases": [[1, 1, 1 << 60]]})], "bytes"),
        ([json.dumps({**LINE, "role": "king"})], "king"),
        ([json.dumps({**LINE, "start": [0, 0]})], "start"),
        ([json.dumps({**LINE, "name": "x" * 300})], "256"),
        ([json.dumps({"phases": [[1, 1, 1]]})], "name"),
        ([json.dumps(LINE)] * 2, "one name"),
        ([json.dumps({**LINE, "after": "z"})], "comes after z"),
        (["[" * 100_000], ":1"),
    ],
)
def test_nonsense_is_named_with_its_line(tmp_path: Path, lines: list[str], named: str) -> None:
    path = tmp_path / "traces"
    path.write_text("\n".join(lines))
    with pytest.raises(FormatError) as error:
        traces.read(str(path))
    assert named in str(error.value)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "traces"
    path.write_bytes(data)
    with pytest.raises(FormatError):
        traces.read(str(path))


def look(at: float, usage: float, lost: float, memory: int, **more: Any) -> dict[str, Any]:
    """A line of a decision log, as weenv.plugin.nri.journal describes it."""
    return {
        "t": 1e9 + at, "env": "default/a", "m": 50 + at, "usage_s": usage, "nr_periods": 1, "nr_throttled": 0,
        "throttled_s": lost,
        "memory": 2 * memory, "anon": memory, "active_file": MIB, "unreclaimable": memory, "oom_kill": 0, "quota": [1.0, GIB],
        "reason": "steady", "tier": 0, **more,
    }  # fmt: skip


def test_a_decision_log_becomes_what_was_wanted(tmp_path: Path) -> None:
    lines = [
        look(0, 5.0, 1.0, 10 * MIB, bounds=[[0.5, 256 * MIB], [8.0, GIB]], role="evaluation"),
        look(1, 5.5, 1.0, 20 * MIB),  # half a core, nothing withheld
        look(2, 6.5, 4.0, 30 * MIB),  # one core used, three more withheld: four were wanted, for a quarter of a second
        look(3, 6.5, 4.0, 30 * MIB),  # idle
        look(4, 1.0, 0.0, 30 * MIB),  # another cgroup
        look(5, 2.0, 3.0, 30 * MIB),
        look(6, 2.5, 1.0, 30 * MIB),  # and another one
        {"t": 1e9 + 5, "env": "default/a", "m": "?"},
        look(2.5, 1.0, 0.0, MIB, env="default/once"),
    ]
    path = tmp_path / "decisions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (trace,) = traces.read(str(path))
    assert (trace.name, trace.role, trace.start, trace.ceiling) == (
        "default/a", Role.EVALUATION, Quota(0.5, 256 * MIB), Quota(8.0, GIB)
    )  # fmt: skip
    assert [(phase.seconds, phase.cpu, phase.memory) for phase in trace.phases] == [
        (0.0, 0.0, 11 * MIB), (1.0, 0.5, 21 * MIB), (0.25, 4.0, 31 * MIB), (1.0, 0.0, 31 * MIB),
        (0.25, 4.0, 31 * MIB),
    ]  # fmt: skip
    assert trace.work == pytest.approx(2.5)


def test_a_decision_log_without_two_looks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text(json.dumps(look(0, 1, 0, MIB)) + "\n")
    with pytest.raises(FormatError, match="looked at twice"):
        traces.read(str(path))


# --- generated demand -------------------------------------------------------------------------------------------------------


def test_the_published_quantiles_come_out() -> None:
    tasks = generate.published(1, 2000, evaluations=False)
    cpu = np.array([trace.peak.cpu for trace in tasks])
    memory = np.array([trace.peak.memory for trace in tasks]) / GIB
    assert np.quantile(cpu, 0.5) == pytest.approx(1.0, rel=0.03)
    assert np.quantile(cpu, 0.99) == pytest.approx(68.3, rel=0.05)
    assert np.quantile(memory, 0.5) == pytest.approx(0.15, rel=0.1)
    assert np.quantile(memory, 0.99) == pytest.approx(7.0, rel=0.3)


def test_a_burst_rises_47_times_within_a_second() -> None:
    for trace in generate.burst_only(3, 20):
        top = max(range(len(trace.phases)), key=lambda number: trace.phases[number].cpu)
        first = next(number for number in range(top, -1, -1) if trace.phases[number].cpu <= trace.peak.cpu / 46.9)
        assert trace.phases[top].cpu / trace.phases[first].cpu == pytest.approx(47)
        assert sum(phase.seconds for phase in trace.phases[first + 1 : top + 1]) <= 1.0 + 1e-9


def test_sets_are_what_they_were() -> None:
    """A set is named in reports and in docs/elastic.md: the same seed must make the same demand everywhere."""
    found = {}
    for name in ("mixed", "bursts", "published-small"):
        lines = "\n".join(
            f"{trace.name} {trace.arrive:.2f} "
            + " ".join(f"{phase.seconds:.2f} {phase.cpu:.3f} {phase.memory >> 20}" for phase in trace.phases)
            for trace in generate.SETS[name].make()
        )  # fmt: skip
        found[name] = hashlib.sha256(lines.encode()).hexdigest()[:12]
    assert found == {"mixed": "7c6ab650cdd7", "bursts": "f18604413dd9", "published-small": "8896a55285cf"}


# --- a node -----------------------------------------------------------------------------------------------------------------


@given(stn.arrays(float, st.integers(1, 40), elements=st.floats(0, 64)), st.floats(0.5, 64))
def test_shares_are_fair(wanted: np.ndarray[Any, np.dtype[np.float64]], cores: float) -> None:
    if wanted.sum() <= cores:
        return
    got = simulate._fair(wanted, cores)
    assert got.sum() == pytest.approx(cores)
    assert (got <= wanted + 1e-9).all()
    level = got.max()
    assert (got[wanted > got + 1e-9] >= level - 1e-6).all()  # who is short has as much as anybody


def test_nothing_holds_back_what_has_its_quota() -> None:
    ((result,), _) = run(fixed(1.0), steady(seconds=10, cpu=1.0))
    assert (result.end, result.took, result.lost_quota) == (End.DONE, pytest.approx(10, abs=TICK), 0)


def test_half_the_quota_takes_twice_as_long() -> None:
    ((result,), node) = run(fixed(2.0), steady(seconds=10, cpu=4.0))
    assert result.took == pytest.approx(20, abs=2 * TICK)
    assert result.lost_quota == pytest.approx(10, abs=2 * TICK)
    assert sum(node.use.used) == pytest.approx(40, rel=0.05)


def test_waiting_is_not_slowed_by_a_quota() -> None:
    ((result,), _) = run(fixed(0.5), steady(seconds=10, cpu=0.0))
    assert result.took == pytest.approx(10, abs=TICK)


def test_a_full_node_stretches_and_says_that_it_was_the_node() -> None:
    rules = AdmissionRules(cpu=8, reserve_cpu=0, starts_share=1, evaluation_share=0)
    strategy = fixed(2.0, GIB // 2)
    strategy.rules = rules
    results, _ = run(strategy, *(steady(str(number), cpu=2.0) for number in range(4)), capacity=SMALL)
    for result in results:
        assert result.took == pytest.approx(40, rel=0.02)
        assert result.lost_quota == 0
        assert result.lost_node == pytest.approx(30, rel=0.02)


def test_memory_beyond_the_limit_kills() -> None:
    ((result,), _) = run(fixed(1.0, GIB), steady(memory=2 * GIB, seconds=10))
    assert result.end is End.OOM
    assert result.took == pytest.approx(5, abs=2 * TICK)  # half way up a straight line


def test_the_brake_slows_instead_of_killing() -> None:
    """Growth much faster than a sample: killed on v1, slowed and then raised on v2."""
    trace = Trace("a", 0.0, (Phase(5.0, 0.4, 64 * MIB), Phase(0.5, 1.0, 3 * GIB), Phase(5.0, 0.4, 3 * GIB)))
    ((braked,), _) = run(ways.Elastic(CONFIG), trace)
    ((unbraked,), _) = run(ways.Elastic(without_brake(CONFIG)), trace)
    assert braked.end is End.DONE
    assert braked.lost_memory > 0
    assert unbraked.end is End.OOM


def test_a_leak_is_ended_at_its_ceiling_with_the_cause() -> None:
    trace = replace(steady(memory=4 * GIB, seconds=30), ceiling=Quota(4.0, GIB))
    ((result,), _) = run(ways.Elastic(CONFIG), trace)
    assert result.end is End.ENDED


def test_arrivals_wait_for_room_and_give_up() -> None:
    rules = replace(ways.PLAIN, deadline=15)
    strategy = fixed(2.0, GIB)
    strategy.rules = rules
    results, _ = run(strategy, *(steady(name, cpu=2.0) for name in "abc"), capacity=SMALL)
    assert [result.end for result in results] == [End.DONE, End.DONE, End.REFUSED]
    assert results[1].wait == pytest.approx(10, abs=0.3)


def test_an_evaluation_comes_after_its_task_and_never_after_a_failed_one() -> None:
    follow = replace(steady("e", seconds=5), role=Role.EVALUATION, after="a")
    results, _ = run(fixed(1.0), steady("a"), follow)
    assert results[1].arrived == pytest.approx(10, abs=2 * TICK)
    assert results[1].end is End.DONE
    results, _ = run(fixed(1.0, GIB), steady("a", memory=2 * GIB), follow)
    assert [result.end for result in results] == [End.OOM, End.REFUSED]


def test_quota_is_taken_back_for_an_evaluation() -> None:
    capacity = Resources(8.0, 64 * GIB)
    burst = Trace("a", 0.0, (Phase(20.0, 7.0, 64 * MIB), Phase(60.0, 0.1, 64 * MIB)))
    clean = Trace("e", 25.0, (Phase(5.0, 1.0, 64 * MIB),), Role.EVALUATION, start=Quota(4.0, GIB))
    results, _ = run(ways.Elastic(CONFIG), burst, clean, capacity=capacity)
    assert results[1].end is End.DONE
    assert results[1].wait <= 0.3


def test_slots_are_used_again() -> None:
    results, node = run(fixed(1.0), *(steady(str(number), arrive=number * 20.0, seconds=5) for number in range(100)))
    assert all(result.end is End.DONE for result in results)
    assert len(node.alive) == 64


def test_idle_time_between_arrivals_costs_nothing() -> None:
    results, node = run(fixed(1.0), steady("a"), steady("b", arrive=1e6))
    assert [result.took for result in results] == [pytest.approx(10, abs=0.2)] * 2
    assert len(node.use.when) < 30


def test_an_end_is_made_of_what_never_ends() -> None:
    node = Node(SMALL, fixed(2.0, 3 * GIB))
    results = node.run([steady("a", seconds=1e8), steady("b")], until=20.0)
    assert [result.end for result in results] == [End.UNFINISHED, End.UNFINISHED]
    assert report.summarise("fixed", results, [node]).unfinished == 2


def test_a_fleet_keeps_a_task_and_its_evaluation_on_one_node() -> None:
    made = generate.published(5, 12, spread=10.0)
    results, nodes = simulate.fleet(made, 3, LARGE, [ways.Elastic(CONFIG) for _ in range(3)])
    assert len(results) == 24
    for node in nodes:
        names = {result.trace.name[1:] for result in node.results}
        assert len(names) * 2 == len(node.results)


# --- strategies ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed() -> dict[str, tuple[report.Summary, report.Curves]]:
    found = {}
    for name, make in ways.named(CONFIG, 128.0).items():
        results, nodes = simulate.fleet(generate.SETS["mixed"].make(), 1, LARGE, [make()])
        found[name] = report.summarise(name, results, nodes), report.curves(results, nodes)
    return found


def test_mixed_tasks_reach_what_the_issue_asks_for(mixed: dict[str, tuple[report.Summary, report.Curves]]) -> None:
    before, after = mixed["fixed-median"][0], mixed["elastic"][0]
    assert before.done == after.done == 100
    assert before.total / after.total >= 1.5
    assert before.slowest / after.slowest >= 4


def test_the_oracle_is_not_beaten(mixed: dict[str, tuple[report.Summary, report.Curves]]) -> None:
    best = mixed["oracle"][0]
    for summary, _ in mixed.values():
        if summary.done == 100:
            assert summary.total >= best.total - 1
    assert best.stretch == pytest.approx(1.0, abs=0.02)


def test_limits_never_promise_more_than_the_node(mixed: dict[str, tuple[report.Summary, report.Curves]]) -> None:
    assert max(mixed["elastic"][1].promised) <= 128
    assert max(mixed["elastic"][1].used) <= 128
    assert 128 < max(mixed["elastic-x2"][1].promised) <= 256


def test_a_quota_for_the_largest_lets_most_wait(mixed: dict[str, tuple[report.Summary, report.Curves]]) -> None:
    most = mixed["fixed-p99"][0]
    assert most.refused > 50
    assert most.wait_p99 > 100


def test_sums_of_a_report_agree(mixed: dict[str, tuple[report.Summary, report.Curves]]) -> None:
    for summary, curve in mixed.values():
        assert summary.done + summary.oom_kills + summary.ended + summary.refused == summary.environments
        assert summary.unfinished == 0
        assert len(curve.took) == summary.done
        assert curve.took == sorted(curve.took)
        assert sum(curve.took) == pytest.approx(summary.total)
        assert 0 <= summary.cpu_used <= 1
        assert len(curve.when) == len(curve.used) == len(curve.promised)


def test_memory_of_bursts_is_followed() -> None:
    """47 times within a second, memory too."""
    made = generate.burst_only(47, 40)
    braked, _ = run(ways.Elastic(CONFIG), *made)
    assert {result.end for result in braked} == {End.DONE}
