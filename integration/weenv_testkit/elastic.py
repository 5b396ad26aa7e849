"""``weenv elastic serve`` under test: the daemon, its journals, and the limits that the kernel has for an environment."""

from __future__ import annotations

import json
import os
from typing import Any

from weenv.plugin.nri.journal import EVENTS, read
from weenv_testkit.node import Daemon
from weenv_testkit.procs import connects
from weenv_testkit.registry import free_port
from weenv_testkit.running import NAMESPACE, Bench

ROOT = "/sys/fs/cgroup"
V2 = os.path.exists(f"{ROOT}/cgroup.controllers")
"""This machine has cgroup v2 alone."""

SETTINGS = """
[elastic]
start_cpu = 0.05
start_memory = 67108864
[elastic.cpu]
calm_after = 1.0
hold = 1.0
step_every = 0.5
burst = 0.5
[elastic.memory]
calm_after = 1.0
hold = 1.0
step_every = 0.5
[elastic.serve]
root = "{root}"
socket = "{root}/e.sock"
metrics_address = "127.0.0.1:{port}"
list_every = 1.0
[elastic.admission]
cpu = {cpus}
[nri]
enabled = false
"""
"""As delivered, but for a patience that tests can wait for, CPU burst, and two cores to be promised where there is one."""


class Elastic(Daemon):
    """The daemon of a bench's node, with the bench's own configuration file. A context manager."""

    def __init__(self, bench: Bench, *, settings: str = SETTINGS) -> None:
        self.bench = bench
        self.root = os.path.join(bench.node.home, "el")
        os.makedirs(self.root, exist_ok=True)
        port = free_port()
        with open(bench.config, "a") as file:
            file.write(settings.format(root=self.root, port=port, cpus=max(2, len(os.sched_getaffinity(0)))))
        super().__init__("elastic", bench.config, os.path.join(bench.node.home, "elastic.log"), port)

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.spawn().wait_ready(self._up)

    def _up(self) -> bool:
        """It answers on its socket, and (which comes last) with its metrics."""
        try:
            return connects(f"{self.root}/e.sock") and bool(self.metrics())
        except OSError:
            return False

    def __enter__(self) -> Elastic:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def top(self) -> dict[str, Any]:
        """What ``weenv top --json`` says."""
        found: dict[str, Any] = json.loads(self.bench.ok("top", "--json"))
        return found

    def row(self, name: str) -> dict[str, Any] | None:
        """One environment's row, or None where it is not managed."""
        return next((row for row in self.top()["environments"] if row["id"] == name), None)

    def events(self, kind: str = "", name: str = "") -> list[dict[str, Any]]:
        """Events so far, of a kind and an environment."""
        return [
            event
            for event in read(os.path.join(self.root, EVENTS))
            if kind in ("", event["kind"]) and (not name or event.get("env", "").endswith("/" + name))
        ]

    def group(self, controller: str, name: str) -> str:
        """The directory of an environment's cgroup; a controller has a hierarchy of its own on v1."""
        return os.path.join(ROOT, "" if V2 else controller, self.bench.cgroup, name)

    def cores(self, name: str) -> float:
        """The CPU quota that the kernel has; 0: the group is gone."""
        return self.number("cpu", name, "cpu.max" if V2 else "cpu.cfs_quota_us") / 100_000

    def limit(self, name: str) -> int:
        """The memory limit that the kernel has; 0: the group is gone."""
        return self.number("memory", name, "memory.max" if V2 else "memory.limit_in_bytes")

    def usage(self, name: str) -> int:
        """The memory that is used, page cache included; 0: the group is gone."""
        return self.number("memory", name, "memory.current" if V2 else "memory.usage_in_bytes")

    def number(self, controller: str, name: str, file: str) -> int:
        """The first number of a cgroup file, -1 for none at all; 0 where it is gone."""
        try:
            with open(os.path.join(self.group(controller, name), file)) as source:
                first = source.read().split()[0]
        except (OSError, IndexError):
            return 0
        return -1 if first == "max" else int(first)


def plan_with(plan: str, resources: str) -> str:
    """A plan beside another, the same but for its resources (YAML in braces); its path."""
    with open(plan) as file:
        lines = [line for line in file.read().splitlines() if not line.startswith("resources:")]
    path = f"{plan.removesuffix('.yaml')}-{abs(hash(resources)) % 10**8}.yaml"
    with open(path, "w") as file:
        file.write("\n".join([*lines, f"resources: {resources}"]) + "\n")
    return path


def start(bench: Bench, plan: str, script: str, *options: str) -> str:
    """Start a shell script detached; its environment's name."""
    return bench.ok("run", "-d", *options, plan, "--", "sh", "-c", script).strip()


__all__ = ["NAMESPACE", "SETTINGS", "Elastic", "plan_with", "start"]
