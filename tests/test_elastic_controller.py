"""The controller over simulated cgroups and a simulated runtime, in real time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulator.elasticnode import BOUNDS, CONFIG, Node, until

from weenv.plugin.nri import controller as controller_module
from weenv.plugin.nri import door
from weenv.plugin.nri.actuate import Refused
from weenv.plugin.nri.admission import NotAdmitted, Request
from weenv.plugin.nri.cgroups import CgroupGone, Reader
from weenv.plugin.nri.config import MIB, AdmissionRules, CpuRules, ElasticConfig
from weenv.plugin.nri.journal import DECISIONS, read
from weenv.plugin.nri.model import Bounds, EnvKey, Quota, Role
from weenv.plugin.nri.watch import Found


@pytest.fixture(params=[1, 2])
async def node(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(tmp_path / "root", version=request.param)
    async with made.running():
        yield made


async def test_a_burst_raises_the_quota_step_by_step_and_calm_brings_it_back(node: Node) -> None:
    group = node.add("a")
    burn = lambda: group.burn(0.02, 3.0)  # noqa: E731
    await until(lambda: group.cpu >= 3.0, meanwhile=burn)
    assert node.row("a")["quota"][0] == group.cpu and node.row("a")["tier"] >= 3
    changes = [event["quota"][0] for event in node.events("quota")]
    assert changes == sorted(changes) and changes[-1] == group.cpu
    await until(lambda: group.cpu == 0.25, meanwhile=lambda: group.burn(0.02, 0.001))
    down = [event["quota"][0] for event in node.events("quota")][len(changes) :]
    assert down == sorted(down, reverse=True) and len(down) >= 3, "in steps"
    assert node.ledger.promised.cpu == pytest.approx(0.25)


async def test_memory_is_followed_up_and_down(node: Node) -> None:
    group = node.add("a")
    group.anon = 210 * MIB
    group.write()
    await until(lambda: group.limit > 256 * MIB)
    group.anon = group.limit * 3 // 4
    group.write()
    top = group.limit
    await until(lambda: group.limit > top)
    group.anon = 10 * MIB
    group.write()
    await until(lambda: group.limit == 256 * MIB, meanwhile=group.reclaimed if node.version == 2 else lambda: None)
    assert group.oom_kill == 0 and not node.events("oom-kill")


async def test_the_brake_goes_with_the_limit_on_v2(tmp_path: Path) -> None:
    node = Node(tmp_path / "root", version=2)
    async with node.running():
        group = node.add("a")

        def high() -> str:
            return Path(group.directory, "memory.high").read_text().strip()

        await until(lambda: high() not in ("max", ""))
        assert int(high()) == int(256 * MIB * CONFIG.memory.brake) // 4096 * 4096


async def test_nothing_left_to_give_ends_it_with_its_cause(node: Node) -> None:
    small = Bounds(BOUNDS.start, Quota(4.0, 256 * MIB), BOUNDS.floor)
    group = node.add("a", bounds=small)

    def grow() -> None:
        group.anon = min(group.anon + MIB, 255 * MIB)
        group.max_events += 1
        group.write()

    group.anon = 250 * MIB
    group.write()
    await until(lambda: node.runtime.killed, meanwhile=grow)
    assert node.runtime.killed == [EnvKey("default", "a")]
    (event,) = node.events("oom-emergency")
    assert event["env"] == "default/a" and event["limit"] == 256 * MIB
    node.end("a", 137)
    (event,) = node.events("ended")
    assert (event["cause"], event["status"]) == ("oom-emergency", 137)
    assert node.metric("weenv_elastic_oom_total", by="emergency") == 1
    assert node.metric("weenv_elastic_ended_total", cause="oom-emergency") == 1


async def test_kills_by_the_kernel_are_counted_once_and_are_the_cause(node: Node) -> None:
    group = node.add("a")
    await until(lambda: node.row("a")["memory"])
    group.oom_kill = 2
    group.write()
    node.controller.killed_for_memory(EnvKey("default", "a"))  # containerd's event, and the counter that is read
    await until(lambda: node.events("oom-kill"))
    await asyncio.sleep(0.2)
    (event,) = node.events("oom-kill")
    assert event["kills"] == 2 and event["managed"]
    node.end("a", 1)
    assert node.events("ended")[0]["cause"] == "oom-kernel"
    node.controller.killed_for_memory(EnvKey("default", "of-others"))
    assert node.events("oom-kill")[-1] | {"t": 0} == {
        "t": 0, "kind": "oom-kill", "env": "default/of-others", "kills": 1, "managed": False,
    }  # fmt: skip


async def test_a_kill_that_is_told_after_the_end_is_its_cause_all_the_same(node: Node) -> None:
    node.add("a")
    node.end("a", 137)
    assert node.events("ended")[0]["cause"] == "failed"
    for _ in range(2):
        node.controller.killed_for_memory(EnvKey("default", "a"))
    (event,) = node.events("oom-kill")
    assert event["late"] and event["env"] == "default/a"
    group = node.add("b")
    group.oom_kill = 1  # seen by nobody before its end
    group.max_events = 1
    group.write()
    node.end("b", 137)
    node.controller.killed_for_memory(EnvKey("default", "b"))
    assert node.events("ended")[1]["cause"] == "oom-kernel" and len(node.events("oom-kill")) == 2


async def test_a_full_node_is_told_from_a_failure(tmp_path: Path) -> None:
    node = Node(tmp_path / "root", config=ElasticConfig(interval=0.04, admission=AdmissionRules(cpu=1, memory=8 << 30)))
    async with node.running():
        group = node.add("a", bounds=Bounds(Quota(0.9, 256 * MIB), Quota(4.0, 2048 * MIB), Quota(0.9, 256 * MIB)))
        await until(lambda: node.row("a")["starved_s"] > 2, meanwhile=lambda: group.burn(0.02, 3.0))
        assert len(node.events("starved")) == 1 and group.cpu == 0.9
        node.end("a", 1)
        assert node.events("ended")[0]["cause"] == "starved"


async def test_an_environment_that_vanishes_while_it_is_changed(node: Node) -> None:
    group = node.add("a")
    entered, go = asyncio.Event(), asyncio.Event()
    apply = node.runtime.apply

    async def slow(*arguments: Any) -> None:
        entered.set()
        await go.wait()
        await apply(*arguments)

    node.runtime.apply = slow  # type: ignore[method-assign]
    await until(entered.is_set, meanwhile=lambda: group.burn(0.02, 3.0))
    node.end("a")
    other = node.add("b")  # its files get the numbers of those just closed
    go.set()
    await asyncio.sleep(0.1)
    assert (other.cpu, other.limit) == (0.25, 256 * MIB) and node.ledger.promised == Quota(0.25, 256 * MIB)
    assert [row["id"] for row in node.controller.rows()] == ["b"]


async def test_whom_the_kernel_calls_pressed_is_looked_at_again_after_a_period(node: Node) -> None:
    group = node.add("a")
    env = node.controller._envs[EnvKey("default", "a")]
    env.state = replace(env.state, triggers=True)
    await until(lambda: env.pause > 1)  # it is idle: nobody comes for seconds
    looks: list[float] = []
    sample = env.reader.sample
    env.reader.sample = lambda now, **more: (looks.append(now), sample(now, **more))[1]  # type: ignore[method-assign]
    node.controller._told(env, False)
    assert len(looks) == 1
    group.burn(0.1, 3.0)  # what it was pressed for is counted only now
    await until(lambda: group.cpu > 0.25)
    assert len(looks) > 1


async def test_whom_the_kernel_says_to_have_met_a_limit_is_looked_at_at_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = node.add("a")
    env = node.controller._envs[EnvKey("default", "a")]
    await until(lambda: env.state.last)
    looks: list[float] = []
    sample = env.reader.sample
    env.reader.sample = lambda now, **more: (looks.append(now), sample(now, **more))[1]  # type: ignore[method-assign]
    now = env.sampled + 60.0  # nobody else comes in the time of this clock
    monkeypatch.setattr(node.controller, "_clock", lambda: now)
    node.controller._told(env, True)
    assert looks == [now]
    assert env.slot * controller_module.GRAIN == pytest.approx(now + node.config.interval, abs=controller_module.GRAIN)
    now += 0.01
    node.controller._told(env, True)
    assert len(looks) == 1, "nothing has moved within so short a time"
    group.anon += 64 * MIB
    group.write()
    node.controller._told(env, True)
    assert looks[1:] == [now]


async def test_what_an_idle_one_used_since_the_look_before_is_shown(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    group = node.add("a")
    env = node.controller._envs[EnvKey("default", "a")]
    await until(lambda: env.rested)
    now = env.sampled + 1.0
    monkeypatch.setattr(node.controller, "_clock", lambda: now)
    node.controller._turn(env, now)
    group.usage_s += 0.005
    group.write()
    now += 0.5
    node.controller._turn(env, now)
    assert env.rested == (now, group.usage_s) and node.row("a")["cpu"] == 0.01


async def test_idle_ones_are_looked_at_together_in_time_and_mostly_peeked_at(tmp_path: Path) -> None:
    now = 1000.0
    node = Node(tmp_path / "root", version=2, config=ElasticConfig())
    node.controller._clock = lambda: now
    for number in range(40):
        node.add(f"e{number}")
    envs = list(node.controller._envs.values())
    looks: dict[str, list[float]] = {env.key.container_id: [] for env in envs}
    sampled: dict[str, list[float]] = {env.key.container_id: [] for env in envs}
    for env in envs:
        env.state = replace(env.state, triggers=True)
    slots, grain = node.controller._slots, controller_module.GRAIN
    while now < 1123:
        slot = min(slots)
        now = slot * grain + 0.001
        for env in slots.pop(slot):
            if env.slot == slot:
                node.controller._turn(env, slot * grain)
                looks[env.key.container_id].append(slot * grain)
                if env.sampled == now:
                    sampled[env.key.container_id].append(slot * grain)
    await node.controller.close()
    await node.record.close()
    times = set()
    for name, seen in looks.items():
        rest = [when for when in seen if when > 1003]
        assert all(after - before <= 10.001 for before, after in itertools.pairwise(rest)), "never late"
        assert 11 <= len(rest) <= 13
        assert 3 <= len([when for when in sampled[name] if when > 1003]) <= 5
        times |= {round(when, 3) for when in rest}
    assert [when for when in times if when != round(when)] == [], "together"
    assert len(times) > 12, "and not all at once"


async def test_a_group_that_is_gone_waits_for_its_end_to_be_told(node: Node) -> None:
    node.add("a")
    env = node.controller._envs[EnvKey("default", "a")]

    def gone(*_: Any, **__: Any) -> Any:
        raise CgroupGone("gone")

    env.reader.sample = gone  # type: ignore[method-assign]
    env.reader.peek = gone  # type: ignore[method-assign]
    await until(lambda: env.blind)
    node.end("a", 0)
    assert node.events("ended")[0]["cause"] == "completed"


@pytest.mark.parametrize(("status", "why"), [(0, "completed"), (3, "failed"), (None, "unknown")])
async def test_the_end_of_one_that_was_over_before_it_was_looked_at_is_told(
    node: Node, status: int | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_found: Found) -> Reader:
        raise CgroupGone("gone")

    monkeypatch.setattr(node.controller, "_open", gone)
    key = EnvKey("default", "short")
    node.controller.started(Found(key, 4711, BOUNDS))
    node.controller.ended(key, status)
    (event,) = node.events("ended")
    assert (event["env"], event["status"], event["cause"]) == ("default/short", status, why)
    node.controller.ended(key, status)
    node.controller.ended(EnvKey("default", "nobody's"), 1)
    assert len(node.events("ended")) == 1 and node.metric("weenv_elastic_ended_total", cause=why) == 1


async def test_a_refused_change_is_shown_and_counted(node: Node) -> None:
    group = node.add("a")
    node.runtime.refusals = [Refused("no")]
    await until(lambda: group.cpu > 0.25, meanwhile=lambda: group.burn(0.02, 3.0))
    assert node.events("refused")[0]["message"] == "no"
    assert node.metric("weenv_elastic_changes_total", direction="up", result="refused") == 1
    assert node.ledger.promised.cpu == group.cpu


async def test_limits_found_at_a_start_are_where_it_goes_on_from(node: Node) -> None:
    boosted = node.add("boosted", cpu=2.0, memory=1024 * MIB)
    low = node.add("low", cpu=0.1)
    free = node.add("free", cpu=16.0)
    await until(lambda: low.cpu == 0.25 and free.cpu == 0.25)
    assert node.row("boosted")["quota"] == [2.0, 1024 * MIB] and boosted.cpu == 2.0
    assert node.ledger.promised.cpu == pytest.approx(2.5)


async def test_anothers_update_is_noticed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "CHECK_LIMITS", 0.05)
    monkeypatch.setattr(controller_module, "STAT_EVERY", 0.05)
    group = node.add("a")
    await until(lambda: node.row("a")["memory"])
    group.cpu = 1.0
    group.write()
    await until(lambda: node.events("drift"))
    assert node.ledger.promised.cpu == 1.0
    group.cpu = 64.0
    group.write()
    await until(lambda: group.cpu <= 1.0)


async def test_an_idle_environment_is_only_peeked_at(node: Node) -> None:
    node.add("a")
    await until(lambda: node.metric("weenv_elastic_samples_total", how="peek") > 20)
    assert node.metric("weenv_elastic_samples_total", how="whole") < 5


async def test_whoever_fails_to_be_looked_at_does_not_stop_the_others(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.add("bad")
    env = node.controller._envs[EnvKey("default", "bad")]

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a fault of ours")

    env.reader.sample = fail  # type: ignore[method-assign]
    group = node.add("good")
    # Which of the two is looked at first is their keys' hashes' to say.
    both = lambda: group.cpu > 1 and "a fault of ours" in caplog.text  # noqa: E731
    await until(both, meanwhile=lambda: group.burn(0.02, 3.0))


async def test_the_decision_log_has_bounds_first_and_every_change(node: Node) -> None:
    group = node.add("a")
    await until(lambda: group.cpu >= 2.0, meanwhile=lambda: group.burn(0.02, 3.0))
    await asyncio.sleep(0.05)
    lines = list(read(str(node.root / DECISIONS)))
    assert lines[0]["bounds"] == [[0.25, 256 * MIB], [4.0, 2048 * MIB]] and lines[0]["role"] == "task"
    asked = [line["asked"][0] for line in lines if "asked" in line]
    assert asked == sorted(asked) and asked[-1] >= 2.0


# -- admission --------------------------------------------------------------------------------------------------------


async def test_room_is_kept_for_who_was_admitted_until_he_starts_or_does_not(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "CLAIM", 0.3)
    big = Bounds(Quota(5.0, 256 * MIB), Quota(5.0, 256 * MIB), Quota(5.0, 256 * MIB))
    first, second = EnvKey("default", "a"), EnvKey("default", "b")
    assert await node.controller.door.admit(Request(first, big), 5) == pytest.approx(0, abs=0.05)
    with pytest.raises(NotAdmitted):
        await node.controller.door.admit(Request(second, big), 0)
    waited = await node.controller.door.admit(Request(second, big), 5)  # the first never starts
    assert 0.2 < waited < 4
    node.add("b", bounds=big)
    await asyncio.sleep(0.5)
    assert second in node.ledger and first not in node.ledger


async def test_deadlines_are_kept(node: Node) -> None:
    big = Bounds(Quota(5.0, 256 * MIB), Quota(5.0, 256 * MIB), Quota(5.0, 256 * MIB))
    node.add("a", bounds=big)
    with pytest.raises(NotAdmitted, match="deadline"):
        await node.controller.door.admit(Request(EnvKey("default", "b"), big), 0.2)
    assert node.events("denied") and node.ledger.waiting == 0
    never = Bounds(Quota(9.0, 256 * MIB), Quota(9.0, 256 * MIB), Quota(9.0, 256 * MIB))
    with pytest.raises(NotAdmitted, match="never"):
        await node.controller.door.admit(Request(EnvKey("default", "c"), never), 100)


async def test_an_evaluation_gets_what_others_have_beyond_their_start(tmp_path: Path) -> None:
    node = Node(tmp_path / "root", config=replace(CONFIG, cpu=CpuRules()))
    async with node.running():
        first, second = node.add("a", cpu=4.0), node.add("b", cpu=3.5)
        await until(lambda: node.row("a")["memory"] and node.row("b")["memory"])
        start = Quota(2.0, 256 * MIB)
        await node.controller.door.admit(Request(EnvKey("default", "e"), Bounds(start, start, start), Role.EVALUATION), 5)
        assert node.ledger.promised.cpu <= 8.0
        (taken,) = [event for event in node.events("quota") if event["reason"] == "taken-back"]
        assert taken["quota"][0] == 0.25 and sorted([first.cpu, second.cpu]) in ([0.25, 3.5], [0.25, 4.0])


async def test_who_is_cancelled_while_waiting_is_out_of_the_line(node: Node) -> None:
    big = Bounds(Quota(5.0, 256 * MIB), Quota(5.0, 256 * MIB), Quota(5.0, 256 * MIB))
    node.add("a", bounds=big)
    task = asyncio.ensure_future(node.controller.door.admit(Request(EnvKey("default", "b"), big), 60))
    await until(lambda: node.ledger.waiting == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert node.ledger.waiting == 0
