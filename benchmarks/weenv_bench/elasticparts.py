"""Live quotas on this machine: what watching costs, how soon a burst has its quota, what a task loses by starting small.

The containers are real (containerd 2.1, runc, busybox) and so is the daemon, ``weenv elastic serve``. A burst is a process of
ours that is put into a container's control groups and spins there, so that its beginning is known to the microsecond.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from weenv.plugin.nri.config import ElasticConfig
from weenv_bench.image import say
from weenv_bench.report import Row, at_most, known, quantile
from weenv_testkit import tools
from weenv_testkit.containerd import Containerd
from weenv_testkit.procs import Process, connects, wait_until
from weenv_testkit.registry import Registry, free_port
from weenv_testkit.store import Store

ROOT = "/sys/fs/cgroup"
START = 0.25
SMALL = ("--cpu-quota", "25000", "--cpu-period", "100000", "--memory-limit", "67108864")
ELASTIC = (*SMALL, "--label", "dev.weenv.ceiling=2,0")
"""As weenv run starts an environment whose plan lets it grow to two cores."""
IDLE = ElasticConfig().idle_interval
_CONFIG = """
[elastic]
interval = {interval}
start_cpu = {start}
start_memory = 67108864
ceiling_cpu = 2
[elastic.cpu]
calm_after = 0.6
hold = 0.6
step_every = 0.2
[elastic.admission]
cpu = {cores}
memory = 1099511627776
[elastic.serve]
address = "{socket}"
root = "{root}"
socket = "{root}/e.sock"
metrics_address = "127.0.0.1:{port}"
[nri]
enabled = false
"""


class Stand:
    """A containerd with busybox, and the daemon."""

    def __init__(self) -> None:
        self.home = tempfile.mkdtemp(prefix="we.", dir="/var/tmp")
        self._exits = contextlib.ExitStack()
        self._exits.callback(shutil.rmtree, self.home, ignore_errors=True)
        try:
            place = os.path.join(self.home, "registry")
            os.mkdir(place)
            registry = self._exits.enter_context(Registry(place))
            self.store = Store(os.path.join(self.home, "store"), registry)
            self.store.pause()
            self.containerd = self._exits.enter_context(Containerd("2.1", os.path.join(self.home, "c"), registry=registry.host))
            self.image = self.store.plain("small")
            self.containerd.pull(self.image, snapshotter="overlayfs")
        except BaseException:
            self._exits.close()
            raise
        self.port = free_port()
        self.daemon: Process | None = None

    def serve(self, cores: float, interval: float = 0.2) -> None:
        """Start the daemon anew, with so many cores to promise and so many seconds between two looks."""
        if self.daemon is not None:
            self.daemon.stop()
        root = os.path.join(self.home, "el")
        os.makedirs(root, exist_ok=True)
        path = os.path.join(self.home, "elastic.toml")
        with open(path, "w") as file:
            file.write(
                _CONFIG.format(
                    interval=interval, start=START, cores=cores, socket=self.containerd.socket, root=root, port=self.port
                )
            )
        argv = [*tools.weenv(), "elastic", "serve", "--config", path]
        self.daemon = Process("weenv elastic", argv, os.path.join(self.home, "elastic.log"), dict(os.environ))
        self.daemon.wait_ready(lambda: connects(os.path.join(root, "e.sock")) and self._measures())

    def close(self) -> None:
        """End everything."""
        if self.daemon is not None:
            self.daemon.stop()
        self._exits.close()

    def start(self, *command: str, flags: tuple[str, ...]) -> str:
        """A container in the background."""
        return self.containerd.run_detached(self.image, *command, snapshotter="overlayfs", flags=flags)

    def group(self, controller: str, name: str) -> str:
        """The control group of a container."""
        return os.path.join(ROOT, controller, self.containerd.cgroup, name)

    def cores(self, name: str) -> float:
        """Its quota."""
        with open(os.path.join(self.group("cpu", name), "cpu.cfs_quota_us")) as file:
            return int(file.read()) / 100_000

    def _measures(self) -> bool:
        """Its metrics are there, which come last."""
        try:
            return self.metric("weenv_elastic_environments") >= 0
        except OSError:
            return False

    def metric(self, name: str) -> float:
        """Sum of the samples of a metric of the daemon."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)

    def cpu(self) -> float:
        """CPU seconds of the daemon so far (proc(5))."""
        assert self.daemon is not None
        with open(f"/proc/{self.daemon.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def stand() -> Iterator[Stand]:
    """For the length of the block."""
    made = Stand()
    try:
        yield made
    finally:
        made.close()


def _spin(groups: list[str], begun: int) -> None:
    """A child's life: into the groups, tell when, and burn."""
    for group in groups:
        with open(os.path.join(group, "cgroup.procs"), "w") as file:
            file.write("0")
    os.write(begun, repr(time.monotonic()).encode())
    while True:
        pass


def burst(where: Stand, name: str, timeout: float = 5.0) -> float:
    """Seconds from the first instruction of a burst in a container to a higher quota in its cgroup, at most ``timeout``."""
    groups = [where.group(controller, name) for controller in ("cpu", "cpuacct", "unified")]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _spin(groups, writing)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        begin = float(os.read(reading, 100))
        while time.monotonic() - begin < timeout:
            if where.cores(name) > START:
                return time.monotonic() - begin
            time.sleep(0.001)
        say(f"the quota of {name} was not raised within {timeout:.0f} s: others have the CPU")
        return timeout
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)


def _watched(where: Stand, count: int, seconds: float) -> tuple[float, float, float]:
    """Looks, CPU seconds of the daemon and seconds of a while in which nothing happens."""
    wait_until("all to be managed", lambda: where.metric("weenv_elastic_environments") == count, 120)
    time.sleep(5)
    looks, cpu, begin = where.metric("weenv_elastic_samples_total"), where.cpu(), time.monotonic()
    time.sleep(seconds)
    used, wall = where.cpu() - cpu, time.monotonic() - begin
    looked = where.metric("weenv_elastic_samples_total") - looks
    say(f"{looked:.0f} looks in {wall:.1f} s, {used:.2f} s of CPU")
    return looked, used, wall


def elastic(quick: bool) -> list[Row]:
    """Many environments and one daemon."""
    count, bursts = (40, 20) if quick else (400, 100)
    with stand() as where:
        say(f"starting {count} containers")
        with ThreadPoolExecutor(4) as pool:
            names = list(pool.map(lambda _: where.start("sleep", "100000", flags=ELASTIC), range(count)))
        where.serve(cores=count + 10.0)
        looked, used, wall = _watched(where, count, 20)
        took = []
        for number in range(bursts):
            name = names[number % len(names)]
            wait_until("its start quota", partial(_has, where, name, START), 30)
            took.append(burst(where, name))
        # Where the kernel tells of all that an idle environment could need, it is looked at as seldom as this; the pressure
        # triggers among that need a right that not every machine gives.
        where.serve(cores=count + 10.0, interval=IDLE)
        seldom, idle_used, idle_wall = _watched(where, count, 60)
        detail: dict[str, Any] = {
            "idle": {"looks": seldom, "cpu_s": idle_used, "wall_s": idle_wall},
            "environments": count, "looks": looked, "cpu_s": used, "wall_s": wall, "burst_ms": [value * 1e3 for value in took],
        }  # fmt: skip
        return [
            at_most("elastic", f"watching {count} environments every 200 ms: CPU per environment and look",
                    used / looked * 1e6, 20, " us", detail),
            at_most("elastic", "  of one core", used / wall * 100, 5, " %"),
            at_most("elastic", f"  every {IDLE:g} s, as idle ones are where the kernel wakes us",
                    idle_used / idle_wall * 100, 0.5, " %"),
            at_most("elastic", f"  burst to raised quota with {count} environments watched, p99",
                    quantile(took, 0.99) * 1e3, 300, " ms", spread=[value * 1e3 for value in took]),
            known("elastic", "  the same, median", f"{statistics.median(took) * 1e3:.0f} ms"),
        ]  # fmt: skip


def task(quick: bool) -> list[Row]:
    """One CPU-bound task on an idle node: without limit, elastic from 0.25 core, at a fixed 0.25 core."""
    loops = 1_500_000 if quick else 15_000_000
    script = f"i=0; while [ $i -lt {loops} ]; do i=$((i+1)); done"
    times: dict[str, list[float]] = {"no limit": [], "elastic": [], "fixed": []}
    with stand() as where:
        where.serve(cores=float(len(os.sched_getaffinity(0))))
        for number in range(1 if quick else 3):
            order = list(times) if number % 2 == 0 else list(times)[::-1]
            for way in order:
                part = loops // 8 if way == "fixed" else loops  # it takes four times as long, without surprises
                flags = {"no limit": (), "fixed": SMALL, "elastic": ELASTIC}[way]
                name = where.start("sh", "-c", script.replace(str(loops), str(part)), flags=flags)
                pids = os.path.join(where.group("cpu", name), "cgroup.procs")
                begin = time.monotonic()
                wait_until("its end", partial(_ended, pids), 600, 0.01)
                times[way].append((time.monotonic() - begin) * (8 if way == "fixed" else 1))
                where.containerd.remove_container(name)
    found = {way: statistics.median(values) for way, values in times.items()}
    say(f"task: {found}")
    return [
        at_most("elastic-task", "CPU-bound task from 0.25 core, elastic / no limit", found["elastic"] / found["no limit"],
                1.1, "", {"s": times}),
        known("elastic-task", "  at a fixed 0.25 core / no limit", f"{found['fixed'] / found['no limit']:.2f}"),
    ]  # fmt: skip


def _has(where: Stand, name: str, cores: float) -> bool:
    return where.cores(name) == cores


def _ended(path: str) -> bool:
    try:
        with open(path) as file:
            return not file.read()
    except OSError:
        return True
