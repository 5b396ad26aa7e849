"""Live quotas of real containers, under both containerd lines, on the cgroups that the machine has."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator

import pytest

from weenv.plugin.containerd.client import Client
from weenv.plugin.nri.actuate import Refused, TaskUpdates, change
from weenv.plugin.nri.cgroups import Reader, find
from weenv.plugin.nri.config import MIB, MemoryRules
from weenv.plugin.nri.model import EnvKey, Quota
from weenv_testkit import tools
from weenv_testkit.elastic import NAMESPACE, V2, Elastic, plan_with, start
from weenv_testkit.node import Node
from weenv_testkit.procs import wait_until
from weenv_testkit.running import Bench
from weenv_testkit.store import Store

START = 0.05
"""Cores to start with: so few that a burst is held back by its quota even where the machine is busy with other things."""
SMALL = f"{{cpu: {{start: {START}, max: 2}}, memory: {{start: 64Mi, max: 256Mi}}}}"
BOOST = 4 * START
LONG = 90
"""Seconds that anything may take on a machine that is busy."""
BURN = "while :; do if [ -e /tmp/calm ]; then exec sleep 1000; else i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; fi; done"
"""Uses a core until /tmp/calm is there. Then it makes nothing: a process every 100 ms is pressure where all it has are 5 ms of
CPU."""


@pytest.fixture
def elastic(module_elastic: Elastic, bench: Bench) -> Iterator[Elastic]:
    """Nothing of a test is managed after it, and the log has no complaint that it did not expect."""
    yield module_elastic
    bench.call("rm", "--all", "--force")
    wait_until("all environments to be forgotten", lambda: not module_elastic.top()["environments"])
    complaints = [line for line in module_elastic.new_complaints() if "killed" not in line and "ended for memory" not in line]
    assert not complaints


@pytest.fixture
def plan(bench: Bench) -> str:
    return plan_with(bench.plan, SMALL)


def test_a_burst_is_given_more_cpu_and_calm_takes_it_back(elastic: Elastic, bench: Bench, plan: str) -> None:
    name = start(bench, plan, BURN)
    wait_until("the first raise", lambda: elastic.cores(name) > START, LONG)
    wait_until("a boost", lambda: elastic.cores(name) >= BOOST, LONG)
    raises = wait_until("them to be told", lambda: elastic.events("quota", name))
    assert raises[0]["before"][0] == START and raises[0]["reason"] in ("cpu-pressure", "cpu-severe", "cut-short")
    wait_until("top to show it", lambda: (row := elastic.row(name)) and row["tier"] >= 2, LONG)
    bench.ok("exec", name, "--", "touch", "/tmp/calm")
    wait_until("its start quota again", lambda: elastic.cores(name) == START, LONG)
    moves = lambda: [(event["before"][0], event["quota"][0]) for event in elastic.events("quota", name)]  # noqa: E731
    wait_until("the last step to be told", lambda: moves()[-1][1] == START)
    assert sum(after < before for before, after in moves()) >= 2, "in steps"


def test_memory_is_followed_up_and_down(elastic: Elastic, bench: Bench, plan: str) -> None:
    grow = "for i in 1 2 3 4 5 6 7 8 9 10; do head -c 5242880 /dev/zero >> /dev/shm/x; sleep 0.2; done; sleep 1000"
    name = start(bench, plan, grow)
    assert elastic.limit(name) == 64 * MIB
    wait_until("a raise of memory", lambda: elastic.limit(name) > 64 * MIB, LONG)
    wait_until("all of it to be written", lambda: elastic.usage(name) > 50 * MIB, LONG)
    if not V2:
        assert elastic.number("memory", name, "memory.memsw.limit_in_bytes") >= elastic.limit(name)
    bench.ok("exec", name, "--", "rm", "/dev/shm/x")
    wait_until("the start again", lambda: elastic.limit(name) == 64 * MIB, LONG)
    assert not elastic.events("oom-kill", name)


def test_a_kill_by_the_kernel_is_told_everywhere(elastic: Elastic, bench: Bench) -> None:
    plan = plan_with(bench.plan, "{cpu: {start: 1}, memory: {start: 32Mi, max: 48Mi}}")
    before = elastic.metric("weenv_elastic_oom_total", by="kernel")
    # A service, since we never end it: a task that grows slowly enough (a busy machine, v2's brake) is, before the kernel.
    name = start(bench, plan, "x=$(head -c 200000000 /dev/zero | tr '\\0' x); exit 1", "--role", "service")
    wait_until("its end", lambda: elastic.events("ended", name), LONG)
    (event,) = elastic.events("ended", name)
    assert event["cause"] == "oom-kernel" and event["oom_kills"] >= 1
    assert elastic.events("oom-kill", name)
    wait_until("its label", lambda: json.loads(bench.ok("inspect", name))["labels"].get("weenv.dev/ended"))
    seen = json.loads(bench.ok("inspect", name))
    assert seen["reason"] == "oom-kernel" and seen["oom_kills"] >= 1
    (row,) = [row for row in json.loads(bench.ok("ps", "--all", "--json")) if row["name"] == name]
    assert row["reason"] == "oom-kernel" and "oom-kernel" in bench.ok("ps", "--all")
    assert elastic.metric("weenv_elastic_oom_total", by="kernel") > before


def test_memory_at_its_limit_with_nothing_left_is_ended_with_its_cause(elastic: Elastic, bench: Bench) -> None:
    plan = plan_with(bench.plan, "{cpu: {start: 1}, memory: {start: 32Mi, max: 32Mi}}")
    # So slowly that two looks see it near its limit before the kernel has to kill.
    script = "head -c 29360128 /dev/zero > /dev/shm/x; while :; do head -c 16384 /dev/zero >> /dev/shm/x; sleep 0.02; done"
    name = start(bench, plan, script)
    wait_until("the emergency", lambda: elastic.events("oom-emergency", name), LONG)
    wait_until("its end", lambda: elastic.events("ended", name), LONG)
    assert elastic.events("ended", name)[0]["cause"] == "oom-emergency"
    seen = json.loads(bench.ok("inspect", name))
    assert (seen["reason"], seen["exit_status"]) == ("oom-emergency", 137)


def test_environments_that_end_while_they_are_changed(elastic: Elastic, bench: Bench, plan: str) -> None:
    script = "(while :; do :; done) & sleep 0.$1; exit 0"
    names = [
        bench.ok("run", "-d", plan, "--", "sh", "-c", script, "x", str(number)).strip() for number in (2, 3, 4, 5, 6, 7, 8)
    ]
    for name in names:
        wait_until(f"the end of {name}", lambda name=name: elastic.events("ended", name), LONG)
        assert elastic.events("ended", name)[0]["cause"] == "completed"
    wait_until("nothing to be promised", lambda: elastic.top()["node"]["promised"] == [0.0, 0])


def test_an_update_that_the_kernel_refuses(elastic: Elastic, bench: Bench, plan: str) -> None:
    name = start(bench, plan, "head -c 40000000 /dev/zero > /dev/shm/x; sleep 1000")
    row = wait_until("it to be managed", lambda: elastic.row(name), LONG)
    assert row is not None
    wait_until("its memory", lambda: elastic.usage(name) > 40_000_000, LONG)
    key = EnvKey(NAMESPACE, name)

    async def shrink() -> None:
        reader = Reader(find(row["pid"]))
        async with Client(bench.node.containerd.socket) as client:
            tasks = TaskUpdates(client)
            try:
                if not V2:  # where it would be let through, and kill
                    with pytest.raises(Refused, match="memory"):
                        await tasks.apply(key, None, 8 * MIB, 8 * MIB)
                assert reader.limits().memory >= 40_000_000, "what was in force stays"
                outcome = await change(tasks, reader, key, Quota(reader.limits().cpu, 8 * MIB), 1.0, MemoryRules())
                assert outcome.quota.memory > 40_000_000, "the safe rule does not even ask for it"
            finally:
                reader.close()

    asyncio.run(shrink())


def test_a_killed_daemon_leaves_limits_and_goes_on_from_them(elastic: Elastic, bench: Bench, plan: str) -> None:
    name = start(bench, plan, BURN)
    wait_until("a boost", lambda: elastic.cores(name) >= BOOST, LONG)
    elastic.kill()
    assert elastic.cores(name) >= BOOST
    done = bench.call("top", "--json")
    assert done.returncode == 1 and b"nobody serves" in done.stderr
    plain = bench.ok("run", "--rm", plan, "--", "echo", "started").strip()
    assert plain == "started", "who starts one while no daemon is there does not wait for one"
    elastic.start()
    row = wait_until("it to be managed again", lambda: elastic.row(name), LONG)
    assert row is not None and row["start"] == [START, 64 * MIB]
    assert elastic.events("managed", name)[-1]["quota"][0] >= BOOST
    bench.ok("exec", name, "--", "touch", "/tmp/calm")
    wait_until("its start quota", lambda: elastic.cores(name) == START, LONG)


def test_a_second_daemon_refuses_to_start(elastic: Elastic, bench: Bench) -> None:
    command = [*tools.weenv(), "elastic", "serve", "--config", bench.config]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert b"another daemon of elastic provisioning" in done.stderr and done.stderr.count(b"\n") <= 2


def test_containers_of_others_are_managed_where_they_say_so(elastic: Elastic, bench: Bench, node: Node, store: Store) -> None:
    image = store.plain("small")
    containerd = node.containerd
    containerd.pull(image, snapshotter="overlayfs")
    quiet = containerd.run_detached(image, "sleep", "1000", snapshotter="overlayfs")
    told = containerd.run_detached(
        image, "sh", "-c", "while :; do :; done", snapshotter="overlayfs", flags=["--label", "weenv.dev/elastic=true"]
    )
    nonsense = containerd.run_detached(
        image, "sleep", "1000", snapshotter="overlayfs",
        flags=["--label", "weenv.dev/cpu.start=lots", "--label", "weenv.dev/cpu.max=1", "--label", "weenv.dev/role=king"],
    )  # fmt: skip
    try:
        wait_until("those that say so", lambda: elastic.row(told) and elastic.row(nonsense))
        assert elastic.row(quiet) is None
        row = elastic.row(nonsense)
        assert row is not None and (row["start"][0], row["ceiling"][0], row["role"]) == (START, 1, "task")
        wait_until("the burst to be given more", lambda: elastic.cores(told) >= BOOST, LONG)
        complaints = elastic.new_complaints()
        assert len(complaints) == 2 and "'lots'" in complaints[0] and "'king'" in complaints[1]
    finally:
        for container in (quiet, told, nonsense):
            containerd.remove_container(container)
        containerd.remove_image(image)


def test_a_limit_of_processes_is_raised_before_it_is_reached(elastic: Elastic, node: Node, store: Store) -> None:
    image = store.plain("small")
    node.containerd.pull(image, snapshotter="overlayfs")
    many = "i=0; while [ $i -lt 30 ]; do sleep 1000 & i=$((i+1)); done; wait"
    labels = ("weenv.dev/pids.start=36", "weenv.dev/pids.max=100")
    name = node.containerd.run_detached(
        image, "sh", "-c", many, snapshotter="overlayfs", flags=[part for label in labels for part in ("--label", label)]
    )
    try:
        wait_until("both changes to be told", lambda: len(elastic.events("pids", name)) == 2, LONG)
        told = [(event["before"], event["limit"]) for event in elastic.events("pids", name)]
        assert told == [(None, 36), (36, 72)] and elastic.number("pids", name, "pids.max") == 72
        wait_until("top to show it", lambda: (row := elastic.row(name)) and row["pids"] == [31, 72], LONG)
    finally:
        node.containerd.remove_container(name)
        node.containerd.remove_image(image)


def test_unused_quota_can_be_saved_for_a_burst(elastic: Elastic, bench: Bench, plan: str) -> None:
    name = start(bench, plan, BURN)
    file = "cpu.max.burst" if V2 else "cpu.cfs_burst_us"
    wait_until("the burst", lambda: elastic.number("cpu", name, file) == round(START / 2 * 100_000), LONG)
    row = elastic.row(name)
    assert row is not None and row["burst"] == START / 2
    wait_until("a boost, beside which it stays", lambda: elastic.cores(name) >= BOOST, LONG)
    assert elastic.number("cpu", name, file) == round(START / 2 * 100_000)


def test_what_happened_while_containerd_was_away_is_found_out(elastic: Elastic, bench: Bench, plan: str, node: Node) -> None:
    name = start(bench, plan, "sleep 1000")
    wait_until("it to be managed", lambda: elastic.row(name), LONG)
    node.containerd.stop()
    with open(os.path.join(elastic.group("memory", name), "cgroup.procs")) as file:
        pids = [int(line) for line in file]
    for pid in pids:
        os.kill(pid, 9)
    node.containerd.start()
    wait_until("its end to be found out", lambda: elastic.events("ended", name), LONG)
    assert elastic.events("ended", name)[0]["status"] in (137, None)
    assert all("containerd cannot be watched" in line for line in elastic.new_complaints())


def test_the_commands_show_it(elastic: Elastic, bench: Bench, plan: str) -> None:
    name = start(bench, plan, BURN)
    wait_until("a boost", lambda: elastic.cores(name) >= BOOST, LONG)
    assert name in bench.ok("top", "--once") and "1 environment" in bench.ok("top", "--once")
    lines = bench.ok("events", "--since", "1m", "--env", name).splitlines()
    assert any("managed" in line for line in lines) and any("quota" in line for line in lines)
    for line in bench.ok("events", "--json", "--env", name).splitlines():
        assert json.loads(line)["env"].endswith(name)
    command = [*tools.weenv(), "elastic", "trace", "--config", bench.config, "--json", name]
    trace = lambda: json.loads(subprocess.run(command, capture_output=True, check=True).stdout)  # noqa: E731
    wait_until("a look after the boost", lambda: trace()[-1]["quota_cpu"] >= BOOST, LONG)
    assert trace()[0]["quota_cpu"] == START and max(point["cpu"] for point in trace()) > START / 2
    seen = json.loads(bench.ok("inspect", name))
    assert seen["start"] == [START, 64 * MIB] and seen["ceiling"] == [2.0, 256 * MIB] and seen["elastic"]["id"] == name


# -- admission --------------------------------------------------------------------------------------------------------


def test_who_starts_waits_for_room_or_is_told_there_is_none(elastic: Elastic, bench: Bench) -> None:
    node = elastic.top()["node"]
    never = plan_with(bench.plan, f"{{cpu: {{start: {int(node['cpu']) + 1}}}, memory: {{start: 64Mi}}}}")
    done = bench.call("run", "--rm", never, "--", "true")
    assert done.returncode == 1 and b"can never start" in done.stderr
    large = plan_with(bench.plan, f"{{cpu: {{start: {node['cpu'] * 0.6:g}}}, memory: {{start: 64Mi}}}}")
    first = start(bench, large, "sleep 1000")
    wait_until("it to be managed", lambda: elastic.row(first), LONG)
    second = bench.popen("run", "--rm", large, "--", "echo", "in")
    wait_until("it to wait", lambda: elastic.top()["node"]["waiting"] == 1, LONG)
    bench.ok("rm", "-f", first)
    out, _ = second.communicate(timeout=LONG)
    assert (out, second.returncode) == (b"in\n", 0)
    third = start(bench, large, "sleep 1000")
    fourth = bench.popen("run", "--rm", large, "--", "echo", "in")
    wait_until("it to wait", lambda: elastic.top()["node"]["waiting"] == 1, LONG)
    fourth.send_signal(15)
    fourth.communicate(timeout=60)
    assert fourth.returncode != 0
    wait_until("its place to be given up", lambda: elastic.top()["node"]["waiting"] == 0, LONG)
    bench.ok("rm", "-f", third)


def test_an_evaluation_gets_back_what_others_were_lent(elastic: Elastic, bench: Bench, plan: str) -> None:
    name = start(bench, plan, BURN)
    wait_until("a boost", lambda: elastic.cores(name) >= BOOST, LONG)
    most = elastic.top()["node"]["cpu"] - 2 * START
    evaluation = plan_with(bench.plan, f"{{cpu: {{start: {most:g}}}, memory: {{start: 64Mi}}}}")
    out = bench.ok("run", "--rm", "--role", "evaluation", evaluation, "--", "echo", "judged")
    assert out == "judged\n"
    # On a machine that others use as well, the boosted one may look calm first.
    taken = [event for event in elastic.events("quota", name) if event["reason"] in ("taken-back", "calm")]
    assert taken and taken[0]["quota"][0] < taken[0]["before"][0]
    command = [*bench.argv("admit"), "--cpu", "100m", "--memory", "16Mi", "--", "sh", "-c", "exit 7"]
    assert subprocess.run(command, check=False).returncode == 7


SHRINKS = 1000


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_shrink_of_ours_kills_or_stops_a_task(elastic: Elastic, bench: Bench) -> None:
    """A task that reads all its memory over and over, and writes files besides, under limits that go up and down."""
    free = plan_with(bench.plan, "{pids: 100}")  # no resources: the daemon leaves it alone, and this test has it
    script = (
        "head -c 40000000 /dev/urandom > /dev/shm/x; want=$(md5sum < /dev/shm/x); "
        'while :; do head -c 20000000 /dev/zero > /tmp/y; [ "$(md5sum < /dev/shm/x)" = "$want" ] || exit 3; echo x; done'
    )
    name = start(bench, free, script, "--memory", "512m", "--cpus", "2")
    wait_until("its memory", lambda: elastic.usage(name) > 40_000_000, LONG)
    (row,) = [row for row in json.loads(bench.ok("ps", "--json")) if row["name"] == name]

    async def shrink() -> int:
        done = 0
        reader = Reader(find(row["pid"]))
        async with Client(bench.node.containerd.socket) as client:
            tasks, key = TaskUpdates(client), EnvKey(NAMESPACE, name)
            try:
                for number in range(10 * SHRINKS):
                    await change(tasks, reader, key, Quota(2.0, 512 * MIB), float(number), MemoryRules())
                    outcome = await change(tasks, reader, key, Quota(2.0, 16 * MIB), float(number), MemoryRules())
                    done += outcome.quota.memory < 512 * MIB
                    if done == SHRINKS:
                        break
                assert reader.sample(0.0, whole=True).memory.oom_kill == 0
            finally:
                reader.close()
        return done

    assert asyncio.run(shrink()) == SHRINKS
    before = len(bench.ok("logs", name))
    wait_until("it to go on", lambda: len(bench.ok("logs", name)) > before, LONG)
    assert json.loads(bench.ok("inspect", name))["status"] == "running"
