"""The controller over simulated cgroups and a simulated runtime, in real time; its socket, and who asks there."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from simulator.cgroup import Cgroup, Runtime

from weenv.core.errors import ConfigError
from weenv.plugin.nri import control as control_module
from weenv.plugin.nri import controller as controller_module
from weenv.plugin.nri.actuate import Refused
from weenv.plugin.nri.admission import Ledger, NotAdmitted, Request
from weenv.plugin.nri.ask import Asker, Denied, NoDaemon
from weenv.plugin.nri.cgroups import CgroupGone, Reader
from weenv.plugin.nri.config import MIB, AdmissionRules, CpuRules, ElasticConfig, MemoryRules
from weenv.plugin.nri.control import Control
from weenv.plugin.nri.controller import Controller
from weenv.plugin.nri.journal import DECISIONS, EVENTS, Journal, read
from weenv.plugin.nri.metrics import Metrics
from weenv.plugin.nri.model import Bounds, EnvKey, Quota, Resources, Role
from weenv.plugin.nri.record import Record
from weenv.plugin.nri.watch import Found

CONFIG = ElasticConfig(
    interval=0.04,
    cpu=CpuRules(calm_after=0.2, hold=0.2, step_every=0.1),
    memory=MemoryRules(calm_after=0.2, hold=0.2, step_every=0.1, emergency_after=0.1),
    admission=AdmissionRules(cpu=8, memory=8 << 30, reserve_cpu=0.1, reserve_memory=0.1),
)
BOUNDS = Bounds(Quota(0.25, 256 * MIB), Quota(4.0, 2048 * MIB), Quota(0.25, 256 * MIB))


@dataclass
class Node:
    """A controller with its simulated surroundings."""

    root: Path
    config: ElasticConfig = CONFIG
    version: int = 1
    runtime: Runtime = field(default_factory=Runtime)

    def __post_init__(self) -> None:
        self.root.mkdir(exist_ok=True)
        self.metrics = Metrics()
        self.ledger = Ledger(Resources(8, 8 << 30), self.config.admission)
        journals = [Journal(str(self.root / name), 1 << 20) for name in (EVENTS, DECISIONS)]
        self.record = Record(journals[0], journals[1], self.metrics, None)
        self.controller = Controller(
            self.config, self.ledger, self.runtime, self.record, self.metrics, end=self.runtime.end, opened=self._open
        )
        self.pids = 1000

    def _open(self, found: Found) -> Reader:
        return Reader(self.runtime.groups[found.key].paths)

    def add(self, name: str, *, bounds: Bounds = BOUNDS, role: Role = Role.TASK, **limits: Any) -> Cgroup:
        key = EnvKey("default", name)
        self.pids += 1
        where = str(self.root / f"{name}-{self.pids}")
        self.runtime.groups[key] = Cgroup(
            where, self.version, **{"cpu": bounds.start.cpu, "memory": bounds.start.memory} | limits
        )
        self.controller.started(Found(key, self.pids, bounds, role, name=name))
        return self.runtime.groups[key]

    def end(self, name: str, status: int | None = 0) -> None:
        key = EnvKey("default", name)
        self.runtime.groups.pop(key)
        self.controller.ended(key, status)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in read(str(self.root / EVENTS)) if record["kind"] == kind]

    def row(self, name: str) -> dict[str, Any]:
        (row,) = [row for row in self.controller.rows() if row["id"] == name]
        return row

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.ensure_future(self.controller.run())
        try:
            yield
            assert not task.done(), task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.controller.close()
            await self.record.close()


@pytest.fixture(params=[1, 2])
async def node(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(tmp_path / "root", version=request.param)
    async with made.running():
        yield made


async def until(check: Callable[[], Any], *, meanwhile: Callable[[], object] = lambda: None, timeout: float = 10) -> None:
    """Wait for ``check``, doing ``meanwhile`` every 20 ms."""
    async with asyncio.timeout(timeout):
        while not check():
            meanwhile()
            await asyncio.sleep(0.02)


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
    monkeypatch.setattr(controller_module, "CLAIM", 0.3)
    big = Bounds(Quota(5.0, 256 * MIB), Quota(5.0, 256 * MIB), Quota(5.0, 256 * MIB))
    first, second = EnvKey("default", "a"), EnvKey("default", "b")
    assert await node.controller.admit(Request(first, big), 5) == pytest.approx(0, abs=0.05)
    with pytest.raises(NotAdmitted):
        await node.controller.admit(Request(second, big), 0)
    waited = await node.controller.admit(Request(second, big), 5)  # the first never starts
    assert 0.2 < waited < 4
    node.add("b", bounds=big)
    await asyncio.sleep(0.5)
    assert second in node.ledger and first not in node.ledger


async def test_deadlines_are_kept(node: Node) -> None:
    big = Bounds(Quota(5.0, 256 * MIB), Quota(5.0, 256 * MIB), Quota(5.0, 256 * MIB))
    node.add("a", bounds=big)
    with pytest.raises(NotAdmitted, match="deadline"):
        await node.controller.admit(Request(EnvKey("default", "b"), big), 0.2)
    assert node.events("denied") and node.ledger.waiting == 0
    never = Bounds(Quota(9.0, 256 * MIB), Quota(9.0, 256 * MIB), Quota(9.0, 256 * MIB))
    with pytest.raises(NotAdmitted, match="never"):
        await node.controller.admit(Request(EnvKey("default", "c"), never), 100)


async def test_an_evaluation_gets_what_others_have_beyond_their_start(tmp_path: Path) -> None:
    node = Node(tmp_path / "root", config=replace(CONFIG, cpu=CpuRules()))
    async with node.running():
        first, second = node.add("a", cpu=4.0), node.add("b", cpu=3.5)
        await until(lambda: node.row("a")["memory"] and node.row("b")["memory"])
        start = Quota(2.0, 256 * MIB)
        await node.controller.admit(Request(EnvKey("default", "e"), Bounds(start, start, start), Role.EVALUATION), 5)
        assert node.ledger.promised.cpu <= 8.0
        (taken,) = [event for event in node.events("quota") if event["reason"] == "taken-back"]
        assert taken["quota"][0] == 0.25 and sorted([first.cpu, second.cpu]) in ([0.25, 3.5], [0.25, 4.0])


async def test_who_is_cancelled_while_waiting_is_out_of_the_line(node: Node) -> None:
    big = Bounds(Quota(5.0, 256 * MIB), Quota(5.0, 256 * MIB), Quota(5.0, 256 * MIB))
    node.add("a", bounds=big)
    task = asyncio.ensure_future(node.controller.admit(Request(EnvKey("default", "b"), big), 60))
    await until(lambda: node.ledger.waiting == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert node.ledger.waiting == 0


# -- the socket -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def served(node: Node) -> AsyncIterator[str]:
    control = Control(node.controller)
    path = str(node.root / "s.sock")
    await control.start(path)
    yield path
    await control.close()
    assert not os.path.exists(path)


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def asked(path: str, work: Callable[[Asker], Any]) -> Any:
    def run() -> Any:
        with Asker(path) as asker:
            return work(asker)

    return await asyncio.to_thread(run)


async def test_the_socket_shows_environments_and_is_roots_alone(node: Node, served: str) -> None:
    node.add("a")
    assert stat.S_IMODE(os.stat(served).st_mode) == 0o600
    answer = await asked(served, lambda asker: asker.ask("node"))
    assert answer["node"]["environments"] == 1 and answer["environments"][0]["id"] == "a"
    json.dumps(answer, allow_nan=False)


async def test_a_second_daemon_does_not_take_the_socket(node: Node, served: str) -> None:
    with pytest.raises(ConfigError, match="another daemon answers"):
        await Control(node.controller).start(served)
    plain = node.root / "file"
    plain.write_text("")
    with pytest.raises(ConfigError, match="is no socket"):
        await Control(node.controller).start(str(plain))


async def test_room_is_asked_for_waited_for_and_given_back(node: Node, served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "_PATIENCE", 0.05)
    wanted: dict[str, Any] = {"namespace": "default", "cpu": 4.0, "memory": 256 * MIB, "cpu_max": 5.0}
    told: list[int] = []
    inside = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold(asker: Asker) -> Any:
        answer = asker.ask("admit", id="a", hold=True, **wanted)
        loop.call_soon_threadsafe(inside.set)
        while not told:
            asker.ask("node")
        return answer

    holder = asyncio.ensure_future(asked(served, hold))
    await inside.wait()
    with pytest.raises(Denied, match="no room"):
        await asked(served, lambda asker: asker.ask("admit", id="b", deadline=0, **wanted))
    answer = await asked(
        served, lambda asker: asker.ask("admit", id="b", deadline=20, waiting=lambda: told.append(1), **wanted)
    )
    assert told == [1] and answer["start"] == [4.0, 256 * MIB], "the holder has left, and his room is free"
    assert (await holder)["waited"] == pytest.approx(0, abs=0.1)
    await asked(served, lambda asker: asker.ask("release", namespace="default", id="b"))
    assert node.ledger.promised == Quota(0.0, 0)


async def test_a_start_above_the_ceiling_is_named(node: Node, served: str) -> None:
    wanted: dict[str, Any] = {"namespace": "default", "id": "a", "deadline": 0}
    above = r"100 cores is above elastic\.ceiling_cpu \(64\)"
    with pytest.raises(Denied, match=f"^{above}$"):
        await asked(served, lambda asker: asker.ask("admit", cpu=100, exact=True, **wanted))
    with pytest.raises(Denied, match=r"^64 GiB is above elastic\.ceiling_memory \(32 GiB\)$"):
        await asked(served, lambda asker: asker.ask("admit", memory=64 << 30, exact=True, **wanted))
    with pytest.raises(Denied, match=rf"never start an environment of 64 cores.* \({above}, and was cut to it\)$"):
        await asked(served, lambda asker: asker.ask("admit", cpu=100, **wanted))
    with pytest.raises(Denied, match=r"for task environments$"):
        await asked(served, lambda asker: asker.ask("admit", cpu=64, exact=True, **wanted))


async def test_who_leaves_while_waiting_is_forgotten(node: Node, served: str) -> None:
    node.add("a", bounds=Bounds(Quota(5.0, 256 * MIB), Quota(5.0, 256 * MIB), Quota(5.0, 256 * MIB)))
    reader, writer = await asyncio.open_unix_connection(served)
    writer.write(b'{"op":"admit","namespace":"default","id":"b","cpu":5,"deadline":100}\n')
    await until(lambda: node.ledger.waiting == 1)
    await closed(writer)
    await until(lambda: node.ledger.waiting == 0)
    del reader


BAD = [
    b"\n", b"nonsense\n", b"[]\n", b"{}\n", b'{"op":"burn"}\n', b"[" * 50_000 + b"\n", b"\xff\xfe\n",
    b'{"op":"admit","namespace":"a","id":"b","cpu":' + b"9" * 400 + b"}\n",
    b'{"op":"admit"}\n', b'{"op":"admit","namespace":"a/b","id":"c"}\n', b'{"op":"admit","namespace":"a","id":"../c"}\n',
    b'{"op":"admit","namespace":"a","id":"c","cpu":NaN}\n', b'{"op":"admit","namespace":"a","id":"c","cpu":-1}\n',
    b'{"op":"admit","namespace":"a","id":"c","cpu":true}\n', b'{"op":"admit","namespace":"a","id":"c","memory":1e300}\n',
    b'{"op":"admit","namespace":"a","id":"c","role":"king"}\n', b'{"op":"admit","namespace":"a","id":"c","deadline":"x"}\n',
    b'{"op":"release","namespace":1,"id":"c"}\n',
]  # fmt: skip


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:40].decode("latin-1"))
async def test_bad_requests_are_answered_with_an_error(node: Node, served: str, line: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(served)
    writer.write(line + b'{"op":"node"}\n')
    answers = [json.loads(await reader.readline()) for _ in range(2)]
    assert answers[0]["error"] and "environments" in answers[1]
    await closed(writer)


async def test_a_line_without_end_is_cut_off(node: Node, served: str) -> None:
    reader, writer = await asyncio.open_unix_connection(served)
    with contextlib.suppress(ConnectionError):
        writer.write(b"x" * (1 << 20))
        await writer.drain()
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    await closed(writer)
    assert (await asked(served, lambda asker: asker.ask("node")))["environments"] == []


def _answering(path: str, answer: bytes) -> Awaitable[None]:
    def serve() -> None:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
            server.settimeout(10)
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

    return asyncio.to_thread(serve)


@pytest.mark.parametrize("answer", [b"nonsense\n", b"[]\n", b"", b"{", b'"x"\n'])
async def test_who_asks_believes_no_stranger(tmp_path: Path, answer: bytes) -> None:
    path = str(tmp_path / "s.sock")
    serving = asyncio.ensure_future(_answering(path, answer))
    while not os.path.exists(path):
        await asyncio.sleep(0.01)
    with pytest.raises(NoDaemon):
        await asked(path, lambda asker: asker.ask("node"))
    await serving
    with pytest.raises(NoDaemon, match="nobody serves"):
        await asked(str(tmp_path / "none"), lambda asker: asker.ask("node"))
