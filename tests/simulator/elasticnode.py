"""A controller over simulated cgroups and a simulated runtime, in real time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulator.cgroup import Cgroup, Runtime

from weenv.plugin.nri.admission import Ledger
from weenv.plugin.nri.cgroups import Reader
from weenv.plugin.nri.config import MIB, AdmissionRules, CpuRules, ElasticConfig, MemoryRules
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


async def until(check: Callable[[], Any], *, meanwhile: Callable[[], object] = lambda: None, timeout: float = 10) -> None:
    """Wait for ``check``, doing ``meanwhile`` every 20 ms."""
    async with asyncio.timeout(timeout):
        while not check():
            meanwhile()
            await asyncio.sleep(0.02)
