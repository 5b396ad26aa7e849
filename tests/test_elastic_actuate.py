"""Putting quotas into force: verified, retried with a bound, memory shrunk by the safe rule only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from simulator.cgroup import Cgroup, Runtime

from weenv.plugin.nri import actuate
from weenv.plugin.nri.actuate import EnvGone, Refused, change, least_memory, resources
from weenv.plugin.nri.cgroups import CgroupGone, Reader
from weenv.plugin.nri.config import MIB, MemoryRules
from weenv.plugin.nri.model import EnvKey, Quota

KEY = EnvKey("default", "c1")
RULES = MemoryRules()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actuate, "PAUSES", (0.0, 0.0))


@pytest.fixture(params=[1, 2])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Cgroup:
    return Cgroup(str(tmp_path / "group"), request.param, cpu=0.25, memory=256 * MIB)


@pytest.fixture
def reader(group: Cgroup) -> Iterator[Reader]:
    reader = Reader(group.paths)
    yield reader
    reader.close()


@pytest.fixture
def runtime(group: Cgroup) -> Runtime:
    runtime = Runtime()
    runtime.groups[KEY] = group
    return runtime


async def test_both_go_up_in_one_call(group: Cgroup, reader: Reader, runtime: Runtime) -> None:
    outcome = await change(runtime, reader, KEY, Quota(1.0, 512 * MIB), 1.0, RULES)
    assert outcome == actuate.Outcome(Quota(1.0, 512 * MIB), 1)
    # v1's limit of memory and swap together must not be below that of memory.
    assert runtime.calls == [(KEY, 1.0, 512 * MIB, 512 * MIB if group.version == 1 else None)]


async def test_what_is_in_force_already_is_not_asked_for(reader: Reader, runtime: Runtime) -> None:
    assert (await change(runtime, reader, KEY, Quota(0.25, 256 * MIB), 1.0, RULES)).attempts == 0
    await change(runtime, reader, KEY, Quota(0.5, 256 * MIB), 1.0, RULES)
    assert runtime.calls == [(KEY, 0.5, None, None)]


async def test_a_hundredth_of_a_core_is_a_change(group: Cgroup, reader: Reader, runtime: Runtime) -> None:
    # In binary, 0.06 - 0.05 is less than 0.01: taken for no change, it would be asked for again and again.
    for cores in (0.06, 0.05, 0.06):
        outcome = await change(runtime, reader, KEY, Quota(cores, 256 * MIB), 1.0, RULES)
        assert outcome.quota.cpu == group.cpu == cores and not outcome.refused


async def test_memory_goes_down_apart_from_cpu_going_up(reader: Reader, runtime: Runtime) -> None:
    outcome = await change(runtime, reader, KEY, Quota(2.0, 128 * MIB), 1.0, RULES)
    assert outcome.quota == Quota(2.0, 128 * MIB) and not outcome.refused
    assert [call[1:3] for call in runtime.calls] == [(2.0, None), (None, 128 * MIB)]


async def test_memory_never_goes_below_what_cannot_be_freed_and_a_margin(
    group: Cgroup, reader: Reader, runtime: Runtime
) -> None:
    reader.sample(0.9)  # so that the details are not read again by themselves
    group.anon = 100 * MIB
    group.write()
    outcome = await change(runtime, reader, KEY, Quota(0.25, 64 * MIB), 1.0, RULES)
    assert outcome.quota.memory >= least_memory(101 * MIB, RULES) - 4096
    assert group.oom_kill == 0
    group.anon = 220 * MIB
    group.limit = 256 * MIB
    group.write()
    outcome = await change(runtime, reader, KEY, Quota(0.25, 64 * MIB), 1.0, RULES)
    assert outcome.quota.memory == 256 * MIB and "does not fit" in outcome.refused


async def test_v2_frees_what_is_above_before_the_limit_goes_down(tmp_path: Path) -> None:
    group = Cgroup(str(tmp_path / "group"), 2, memory=512 * MIB)
    group.inactive_file = 400 * MIB  # droppable, and charged
    group.write()
    runtime = Runtime()
    runtime.groups[KEY] = group
    reader = Reader(group.paths)
    try:
        outcome = await change(runtime, reader, KEY, Quota(0.25, 256 * MIB), 1.0, RULES)
        assert (outcome.quota.memory, group.oom_kill) == (512 * MIB, 0), "the simulated kernel frees nothing by itself"
        assert "could not free" in outcome.refused
        assert group.reclaimed() is not None and group.current < 256 * MIB
        outcome = await change(runtime, reader, KEY, Quota(0.25, 256 * MIB), 1.0, RULES)
        assert (outcome.quota.memory, group.oom_kill) == (256 * MIB, 0)
    finally:
        reader.close()


async def test_a_refusal_is_told_and_what_is_in_force_stays(reader: Reader, runtime: Runtime) -> None:
    runtime.refusals = [Refused("unable to set memory limit to 1 (current usage: 2)")]
    outcome = await change(runtime, reader, KEY, Quota(0.25, 64 * MIB), 1.0, RULES)
    assert outcome == actuate.Outcome(Quota(0.25, 256 * MIB), 1, "unable to set memory limit to 1 (current usage: 2)")


async def test_a_runtime_that_is_away_is_asked_again_a_few_times(reader: Reader, runtime: Runtime) -> None:
    runtime.refusals = [Refused("connection refused", again=True)] * 2
    outcome = await change(runtime, reader, KEY, Quota(1.0, 256 * MIB), 1.0, RULES)
    assert (outcome.quota.cpu, outcome.attempts, outcome.refused) == (1.0, 3, "")
    runtime.refusals = [Refused("connection refused", again=True)] * 9
    outcome = await change(runtime, reader, KEY, Quota(2.0, 256 * MIB), 1.0, RULES)
    assert (outcome.quota.cpu, outcome.attempts, outcome.refused) == (1.0, 3, "connection refused")


async def test_a_runtime_that_says_yes_and_does_nothing_is_found_out(reader: Reader, runtime: Runtime, tmp_path: Path) -> None:
    runtime.groups[KEY] = Cgroup(str(tmp_path / "another"), 1)
    outcome = await change(runtime, reader, KEY, Quota(1.0, 256 * MIB), 1.0, RULES)
    assert outcome.quota.cpu == 0.25 and outcome.refused == "default/c1: the cgroup has 0.25 cores instead of 1"


async def test_an_environment_that_ends_meanwhile(reader: Reader, runtime: Runtime) -> None:
    del runtime.groups[KEY]
    with pytest.raises(EnvGone):
        await change(runtime, reader, KEY, Quota(1.0, 256 * MIB), 1.0, RULES)
    reader.close()
    with pytest.raises(CgroupGone):
        await change(runtime, reader, KEY, Quota(1.0, 256 * MIB), 1.0, RULES)


def test_what_the_runtime_is_asked_for() -> None:
    assert resources(0.25, None, None) == {"cpu": {"quota": 25_000, "period": 100_000}}
    assert resources(0.001, 5, 6) == {"cpu": {"quota": 1000, "period": 100_000}, "memory": {"limit": 5, "swap": 6}}
    assert resources(None, 5, None) == {"memory": {"limit": 5}}
