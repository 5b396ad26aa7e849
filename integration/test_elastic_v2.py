"""Live quotas where cgroup v2 alone is mounted: the brake, reclaim before a limit goes down, what the kernel refuses there.

Run by :mod:`test_elastic_guests` in kernels that have it, beside test_elastic.py; and on any machine that has it itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from weenv.plugin.nri.config import MIB
from weenv_testkit.elastic import V2, Elastic, plan_with, start
from weenv_testkit.procs import run, wait_until
from weenv_testkit.running import Bench

pytestmark = pytest.mark.skipif(not V2, reason="needs a machine with cgroup v2 alone: see test_elastic_guests")

LONG = 90
"""Seconds that anything may take on a machine that is busy."""


@pytest.fixture
def elastic(module_elastic: Elastic, bench: Bench) -> Iterator[Elastic]:
    yield module_elastic
    bench.call("rm", "--all", "--force")
    wait_until("all environments to be forgotten", lambda: not module_elastic.top()["environments"])


def kills(elastic: Elastic, name: str) -> dict[str, int]:
    """The kernel's own count: ``memory.events``."""
    with open(os.path.join(elastic.group("memory", name), "memory.events")) as file:
        return {key: int(value) for key, value in map(str.split, file)}


def test_who_grows_faster_than_anybody_looks_is_slowed_and_not_killed(elastic: Elastic, bench: Bench) -> None:
    script = "while [ ! -e /tmp/go ]; do sleep 0.2; done; dd if=/dev/zero of=/dev/shm/x bs=4M count=15; sleep 1000"
    name = start(bench, plan_with(bench.plan, "{cpu: {start: 1}, memory: {start: 32Mi, max: 256Mi}}"), script)
    wait_until("the brake", lambda: 0 < elastic.number("memory", name, "memory.high") < 32 * MIB, LONG)
    bench.ok("exec", name, "--", "touch", "/tmp/go")
    wait_until("all to be written", lambda: elastic.usage(name) > 60_000_000, LONG)
    assert kills(elastic, name)["oom_kill"] == 0 and kills(elastic, name)["high"] > 0
    assert elastic.limit(name) > 60_000_000

    def braked() -> bool:
        """The brake goes with the limit, and is shown."""
        row, high = elastic.row(name), elastic.number("memory", name, "memory.high")
        return row is not None and row["high"] == high and 0.8 * row["quota"][1] < high < row["quota"][1] == elastic.limit(name)

    wait_until("the brake below the new limit", braked, LONG)


def test_a_limit_goes_down_once_the_kernel_has_dropped_the_cache_above_it(elastic: Elastic, bench: Bench) -> None:
    script = "head -c 60000000 /dev/zero > /dev/shm/x; rm /dev/shm/x; head -c 60000000 /dev/zero > /root/y; sync; sleep 1000"
    name = start(bench, plan_with(bench.plan, "{cpu: {start: 1}, memory: {start: 48Mi, max: 256Mi}}"), script)
    wait_until("a raise", lambda: elastic.limit(name) > 48 * MIB, LONG)
    wait_until("the start again", lambda: elastic.limit(name) == 48 * MIB, LONG)
    assert elastic.usage(name) <= 48 * MIB and kills(elastic, name)["oom_kill"] == 0
    sums = bench.ok("exec", name, "--", "sh", "-c", "md5sum < /root/y; head -c 60000000 /dev/zero | md5sum").splitlines()
    assert sums[0] == sums[1]
    moves = [(event["before"][1], event["quota"][1]) for event in elastic.events("quota", name)]
    assert sum(after < before for before, after in moves) >= 2, "in steps"


def test_an_update_that_is_refused_is_told_and_made_up_for(elastic: Elastic, bench: Bench) -> None:
    name = start(
        bench,
        plan_with(bench.plan, "{cpu: {start: 50m, max: 2}, memory: {start: 64Mi, max: 256Mi}}"),
        "sleep 1; while :; do :; done",
    )
    file = os.path.join(elastic.group("cpu", name), "cpu.max")
    # What stands in for the kernel's file cannot be written to.
    run("mount", "--bind", "-o", "ro", "/proc/version", file)
    try:
        wait_until("the refusal", lambda: elastic.events("refused", name), LONG)
    finally:
        run("umount", file)
    wait_until("a raise nevertheless", lambda: elastic.cores(name) >= 0.1, LONG)
    refusal = elastic.events("refused", name)[0]
    assert "cpu" in refusal["message"] and refusal["asked"][0] >= 0.1
    elastic.new_complaints()
