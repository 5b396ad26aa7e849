"""A program for a machine with cgroup v2: ``python -m weenv_testkit.pressure [PART...]`` prints JSON, an object for each part.

The controller, real groups and real processes; limits are written to the groups' files, without a runtime. No pytest, nor
anything else that takes an emulated CPU a minute to import. :mod:`test_elastic_guests` runs it and judges. The parts are
``bursts``, which needs pressure triggers, and ``growth``.

=============  =====================================================================================================
``looks``      at ``BURSTS`` environments at rest within four seconds, though the controller would look every 200 ms
``rest_cpu``   CPU of this process within that time, as a share of one
``raised``     seconds from the start of a burst to the changed ``cpu.max``, a burst after another, sorted
``told``       seconds from the start of a burst to the kernel's word on a trigger beside the controller's, sorted
``grown``      ``memory.max``, ``memory.current`` and ``oom_kill`` of each that grew at once to a quarter more than its limit
``met``        seconds from the kernel's word that memory is at the brake to the first changed ``memory.max``, sorted; of those
               that got that far (pressure may have brought the controller before)
=============  =====================================================================================================
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from weenv.plugin.nri.admission import Ledger
from weenv.plugin.nri.cgroups import Reader, find
from weenv.plugin.nri.config import MIB, ElasticConfig
from weenv.plugin.nri.controller import Controller
from weenv.plugin.nri.journal import DECISIONS, EVENTS, Journal
from weenv.plugin.nri.metrics import Metrics
from weenv.plugin.nri.model import Bounds, EnvKey, Quota, Resources
from weenv.plugin.nri.record import Record
from weenv.plugin.nri.wake import STALLS, WINDOW
from weenv.plugin.nri.watch import Found

GROUPS = f"/sys/fs/cgroup/weenv-pressure-{os.getpid()}"
START = 0.1
BOUNDS = Bounds(Quota(START, 32 * MIB), Quota(1.0, 256 * MIB), Quota(START, 32 * MIB))
NEVER = 600.0
"""Seconds between two looks at an idle environment: only the kernel brings one earlier."""
BURSTS = 8
GROWN = 5
BURN = "echo $$ > cgroup.procs; echo ready; read go; while :; do :; done"
GROW = "echo $$ > cgroup.procs; echo ready; read go; dd if=/dev/zero of=/dev/shm/{} bs=4M count=10; exec sleep 1000"


class Files:
    """An actuator that writes to a group's files, and remembers when it first did."""

    name = "files"

    def __init__(self) -> None:
        self.done: dict[str, float] = {}

    async def apply(self, key: EnvKey, cpu: float | None, memory: int | None, swap: int | None) -> None:
        """See :class:`weenv.plugin.nri.actuate.Actuator`."""
        if cpu is not None:
            write(key.container_id, "cpu.max", f"{round(cpu * 100_000)} 100000")
        if memory is not None:
            write(key.container_id, "memory.max", str(memory))
        self.done.setdefault(key.container_id, time.monotonic())

    async def end(self, key: EnvKey) -> None:
        """Kill it."""
        write(key.container_id, "cgroup.kill", "1")


def write(name: str, file: str, text: str) -> None:
    """Write a file of a group."""
    with open(f"{GROUPS}/{name}/{file}", "w") as target:
        target.write(text)


def number(name: str, file: str) -> int:
    """The first number of a file of a group, -1 for none at all."""
    with open(f"{GROUPS}/{name}/{file}") as source:
        first = source.read().split()[0]
    return -1 if first == "max" else int(first)


def _between(name: str, file: str, low: float, high: float = math.inf) -> bool:
    return low < number(name, file) < high


class Node:
    """A controller and the environments that it manages."""

    def __init__(self, directory: str) -> None:
        self.files = Files()
        self.metrics = Metrics()
        journals = [Journal(os.path.join(directory, name), 1 << 20) for name in (EVENTS, DECISIONS)]
        # Without triggers nobody is idle, and all are looked at as seldom as can be set.
        self.config = config = ElasticConfig(idle_interval=NEVER, interval=0.2 if os.path.exists("/proc/pressure") else 60.0)
        ledger = Ledger(Resources(64.0, 64 << 30), config.admission)
        record = Record(journals[0], journals[1], self.metrics, None)
        self.controller = Controller(config, ledger, self.files, record, self.metrics, end=self.files.end)
        self.children: dict[str, subprocess.Popen[bytes]] = {}

    def add(self, name: str, script: str, cpu: float = START) -> None:
        """Start a process in a group of its own; it waits for :meth:`go`."""
        os.mkdir(f"{GROUPS}/{name}")
        bounds = replace(BOUNDS, start=replace(BOUNDS.start, cpu=cpu), floor=replace(BOUNDS.floor, cpu=cpu))
        write(name, "cpu.max", f"{round(cpu * 100_000)} 100000")
        write(name, "memory.max", str(bounds.start.memory))
        argv = ["sh", "-c", script]
        child = subprocess.Popen(argv, cwd=f"{GROUPS}/{name}", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.children[name] = child
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        self.controller.started(Found(EnvKey("test", name), child.pid, bounds))

    def go(self, name: str) -> float:
        """Let it begin; when that was."""
        stdin = self.children[name].stdin
        assert stdin is not None
        begin = time.monotonic()
        stdin.write(b"go\n")
        stdin.flush()
        return begin

    def end(self, name: str) -> None:
        """End its process and forget it."""
        child = self.children.pop(name)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        self.controller.ended(EnvKey("test", name), 137)

    def looks(self) -> float:
        """Looks at environments so far, as the metrics count them once a second."""
        return float(sum(self.metrics.samples.labels(kind)._value.get() for kind in ("peek", "whole")))

    async def rest(self) -> None:
        """Wait until all environments are idle, so that nobody looks at them of his own accord."""
        seen = -1.0
        while seen != self.looks() and self.config.interval < 1:
            seen = self.looks()
            await asyncio.sleep(2.5)


async def until(what: str, check: Callable[[], object]) -> None:
    """Wait for ``check`` to be true, letting the controller run."""
    end = time.monotonic() + 300
    while not check():
        if time.monotonic() > end:
            raise SystemExit(f"waited five minutes for {what}")
        await asyncio.sleep(0.01)


def word(fd: int, over: threading.Event) -> float | None:
    """When the kernel had a word to say on a descriptor; None: not until ``over``."""
    poll = select.poll()
    poll.register(fd, select.POLLPRI)
    while not poll.poll(100):
        if over.is_set() and not poll.poll(0):
            return None
    return time.monotonic()


async def bursts(node: Node) -> dict[str, Any]:
    """Environments at rest, then a burst of each."""
    names = [f"burst-{number}" for number in range(BURSTS)]
    for name in names:
        node.add(name, BURN)
    await node.rest()
    looks, cpu = node.looks(), time.process_time()
    await asyncio.sleep(4)
    found: dict[str, Any] = {"looks": node.looks() - looks, "rest_cpu": (time.process_time() - cpu) / 4}
    raised, told = [], []
    for name in names:
        reader = Reader(find(node.children[name].pid))
        trigger = reader.trigger("cpu", STALLS["cpu"], WINDOW)
        if trigger is None:
            raise SystemExit("this kernel gives no triggers")
        waiting = asyncio.get_running_loop().run_in_executor(None, word, trigger, over := threading.Event())
        begin = node.go(name)
        await until(f"a raise of {name}", partial(_between, name, "cpu.max", START * 100_000))
        raised.append(node.files.done[name] - begin)
        over.set()
        if (when := await waiting) is not None:
            told.append(when - begin)
        node.end(name)
        os.close(trigger)
        reader.close()
    return found | {"raised": sorted(raised), "told": sorted(told)}


async def growth(node: Node) -> dict[str, Any]:
    """Some that rest, and then take more memory at once than they have."""
    grown, met = [], []
    for number_ in range(GROWN):
        name = f"grow-{number_}"
        node.add(name, GROW.format(name), 1.0)
        await until("the brake", partial(_between, name, "memory.high", 0, 32 * MIB))
        await node.rest()
        reader = Reader(find(node.children[name].pid))
        notices = reader.notices("memory")
        if notices is None:
            raise SystemExit("this kernel has no memory.events")
        waiting = asyncio.get_running_loop().run_in_executor(None, word, notices, over := threading.Event())
        node.go(name)
        await until("all to be written", partial(_between, name, "memory.current", 40 * MIB))
        over.set()
        if (when := await waiting) is not None:
            met.append(node.files.done[name] - when)
        with open(f"{GROUPS}/{name}/memory.events") as file:
            events = dict(line.split() for line in file)
        grown.append([number(name, "memory.max"), number(name, "memory.current"), int(events["oom_kill"])])
        node.end(name)
        os.close(notices)
        reader.close()
        os.remove(f"/dev/shm/{name}")
    return {"grown": grown, "met": sorted(met)}


PARTS = {"bursts": bursts, "growth": growth}


async def main(names: list[str]) -> int:
    """Print an object for each part, one a line."""
    os.mkdir(GROUPS)
    with open(f"{GROUPS}/cgroup.subtree_control", "w") as file:
        file.write("+cpu +memory")
    with tempfile.TemporaryDirectory() as directory:
        node = Node(directory)
        running = asyncio.ensure_future(node.controller.run())
        for name in names or PARTS:
            print(json.dumps(await PARTS[name](node)), flush=True)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await node.controller.close()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
