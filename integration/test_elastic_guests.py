"""Elastic provisioning in kernels that this machine has not: its tests run again in guests of :mod:`weenv_testkit.kernels`.

User-mode Linux has cgroup v2 alone and is fast enough for containerd, runc and our daemons; QEMU has pressure files and the
privilege to set fast triggers on them, and is slow, so that only the controller runs there.
"""

from __future__ import annotations

import json
import os
import sys

import pytest

from weenv_testkit import kernels
from weenv_testkit.kernels import LINUX_6_12, UML, run_tests
from weenv_testkit.pressure import GROWN

pytestmark = pytest.mark.skipif(not kernels.supported(), reason="these kernels are for x86-64")

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SOME = "2.1 and (memory_is_followed or nothing_left_is_ended or faster_than_anybody_looks)"
PRESSURE = f"PYTHONPATH=integration {sys.executable} -m weenv_testkit.pressure"


@pytest.mark.timeout(500)
def test_limits_and_reclaim_on_cgroup_v2() -> None:
    """Memory up, braked, down, and ended for: the part in which v2 differs most."""
    run_tests(UML, ["test_elastic.py", "test_elastic_v2.py"], SOME, timeout=450, memory=3000, disk=3000)


@pytest.mark.timeout(300)
def test_memory_at_its_brake_wakes_the_controller() -> None:
    """Nobody looks within half a minute, and User-mode Linux has no pressure files: the brake is all it tells of."""
    text = run_tests(UML, ["test_elastic_wake.py"], "fork or brake", first=f"{PRESSURE} growth", timeout=250, memory=1000)
    assert len(grown(text)) == GROWN


def grown(text: str) -> list[float]:
    """Judge the part of that name; seconds from the kernel's word to more memory."""
    seen = json.loads(next(line for line in text.splitlines() if line.startswith('{"grown"')))
    print(f"the kernel's word on memory to memory.max changed: {[round(1000 * value) for value in seen['met']]} ms")
    assert max(seen["met"], default=0) < 20, "the next look of our own would have come after half a minute"
    for limit, used, killed in seen["grown"]:
        assert limit > used > 40 << 20 and killed == 0
    met: list[float] = seen["met"]
    return met


@pytest.mark.soak
@pytest.mark.timeout(1300)
def test_everything_on_cgroup_v2() -> None:
    run_tests(UML, ["test_elastic.py", "test_elastic_v2.py"], "1.7 or 2.1", timeout=1200, memory=4000, disk=4000)


@pytest.mark.soak
@pytest.mark.timeout(1300)
def test_pressure_of_idle_environments_wakes_the_controller() -> None:
    """In an emulator on a machine with other things to do, times say little; that anybody came within seconds says all."""
    text = kernels.run(LINUX_6_12, f"cd {ROOT} && {PRESSURE}", timeout=1200).ok()
    seen = json.loads(next(line for line in text.splitlines() if line.startswith('{"looks"')))
    raised, told = ([round(1000 * value) for value in seen[name]] for name in ("raised", "told"))
    print(f"burst to cpu.max changed: {raised} ms; to the kernel's word: {told} ms; at rest {seen['rest_cpu']:.2%} of a CPU")
    assert seen["looks"] == 0, "nobody looks at what rests"
    assert max(seen["raised"]) < 20, "the next look of our own would have come after ten minutes"
    grown(text)
