"""Settings of elastic provisioning: the ``[elastic]`` table of ``/etc/weenv/config.toml``, each threshold with its reason.

::

    [elastic]
    start_cpu = 0.5
    [elastic.cpu]
    calm_after = 20
    [elastic.admission]
    reserve_cpu = 0.15
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from weenv.core import settings
from weenv.core.errors import ConfigError
from weenv.core.units import size
from weenv.plugin.nri.model import Bounds, Quota
from weenv.plugin.nri.serveconfig import ServeConfig

MIB = 1 << 20
GIB = 1 << 30


def _within(table: str, values: object, lowest: float, highest: float, *names: str) -> None:
    """Raise :class:`ConfigError` where a setting is no number between two bounds, both allowed."""
    for name in names:
        value = getattr(values, name)
        if not lowest <= value <= highest:  # also true of NaN
            raise ConfigError(f"{table}.{name} must be between {lowest:g} and {highest:g}, not {value:g}")


@dataclass(frozen=True, slots=True)
class CpuRules:
    """The ``[elastic.cpu]`` table. Shares are of the quota in force or of the quota periods since the last sample."""

    pressed_throttled: float = 0.25
    """Ordinary pressure (x2): at least this share of the quota periods was throttled. A sample of 200 ms has two periods of
    100 ms, so one throttled period counts and a stray one in a longer sample does not."""
    pressed_use: float = 0.9
    """Ordinary pressure too: this share of the quota is used. The next step of the load would be throttled, and waiting for
    that costs a period."""
    severe_throttled: float = 0.9
    """Severe pressure (x4) needs throttling in nearly every period, and one of the two below."""
    severe_lost: float = 1.0
    """Severe: what throttling withheld (CPU seconds, summed over CPUs as the kernel counts it) is as much as was used: it
    wants at least twice its quota, so one doubling would be throttled again."""
    severe_pressure: float = 0.6
    """Severe: something waited for a CPU in this share of the time (`cpu.pressure` some)."""
    calm_use: float = 0.35
    """Low use: below this share of the quota. Half of the quota then has 30 % to spare, below `pressed_use`, so that no
    step down is followed by a step up of the same load."""
    calm_after: float = 10.0
    """Seconds of uninterrupted low use before the first step down: an agent's thinking between two commands is mostly
    shorter, and a quota that is not used costs only when others need it."""
    hold: float = 10.0
    """No step down within this time after a step up: a burst that pauses finds its quota still there."""
    step_every: float = 5.0
    """Seconds between two steps down: from 64 cores to 2 takes five steps and some 25 s, in which a returning load is met."""
    tight_free: float = 0.1
    """The node is tight where less than this share of its cores is left for raises. A quota that is not used then costs
    others, and the three times above are multiplied by `tight`."""
    tight: float = 0.15
    """The shortest calm is then 1.5 s, seven samples: a pause within one command rarely lasts as long."""
    step: float = 0.5
    """A step down leaves this share of the quota."""
    headroom: float = 1.25
    """A step down leaves this many times the highest use of the calm time."""
    burst: float = 0.0
    """CPU burst (`cpu.max.burst`, Linux 5.14): of its start quota, the share that an environment may save up while it does
    not use it, and use besides its quota in one period: a short command after some thinking is then not throttled. 0: left
    as it is. Not the default, since the kernel refuses limits below it, also to a container's owner when no daemon runs."""

    def __post_init__(self) -> None:
        _within("elastic.cpu", self, 0.01, 1.0, "pressed_throttled", "pressed_use", "severe_throttled", "severe_pressure")
        _within("elastic.cpu", self, 0.0, 100.0, "severe_lost")
        _within("elastic.cpu", self, 0.0, 86400.0, "calm_after", "hold", "step_every")
        _within("elastic.cpu", self, 0.1, 0.95, "step")
        _within("elastic.cpu", self, 0.0, 1.0, "tight_free", "tight")
        _within("elastic.cpu", self, 1.0, 10.0, "headroom")
        _within("elastic.cpu", self, 0.0, 1.0, "burst")
        _within("elastic.cpu", self, 0.0, self.step * self.pressed_use, "calm_use")
        if self.severe_throttled < self.pressed_throttled:
            raise ConfigError("elastic.cpu.severe_throttled must not be below pressed_throttled")


@dataclass(frozen=True, slots=True)
class MemoryRules:
    """The ``[elastic.memory]`` table. What is looked at is the working set: anon, active file and all else that no reclaim
    frees; page cache that nobody uses is no reason to grow."""

    pressed_use: float = 0.75
    """Ordinary pressure (x2): the working set is this share of the limit. Lower than for CPU, since memory that is too small
    ends in a kill and CPU that is too small only in waiting."""
    severe_use: float = 0.92
    """Severe pressure (x4): this share of the limit is in use that cannot be dropped."""
    horizon: float = 0.4
    """Severe too: at the rate of the last sample the limit would be reached within this many seconds, two samples: one to
    see it and one for the runtime to act."""
    pressed_pressure: float = 0.05
    """Ordinary pressure too: something waited for memory in this share of the time (`memory.pressure` some): pages that are
    in use are dropped and read again."""
    severe_pressure: float = 0.2
    """Severe too: everything waited for memory in this share of the time (`memory.pressure` full)."""
    calm_use: float = 0.3
    """Low use: below this share of the limit; a step down then leaves the working set below `pressed_use`."""
    calm_after: float = 30.0
    """Seconds of low use before the first step down. Longer than for CPU: a wrong step down is dearer."""
    hold: float = 30.0
    """No step down within this time after a step up."""
    step_every: float = 10.0
    """Seconds between two steps down: the kernel needs time to write out and drop what is above the new limit."""
    step: float = 0.6
    """A step down leaves this share of the limit: smaller steps than for CPU, each one reclaims."""
    headroom: float = 1.5
    """A step down leaves this many times the largest working set of the calm time."""
    margin: float = 0.15
    """A limit is never put below what cannot be reclaimed plus this share of it ..."""
    margin_bytes: int = 32 * MIB
    """... plus these bytes: the kernel charges memory to CPUs in batches, so a limit too near to use kills by rounding."""
    brake: float = 0.85
    """On cgroup v2, `memory.high` is put at this share of the limit while the limit is below the ceiling: an environment that
    grows faster than it is sampled is slowed there instead of killed at the limit, and its pressure wakes us. 0: no brake."""
    last_brake: float = 0.97
    """The same where nothing is left to give, so that it is ended with its cause told before the kernel kills it. Not for
    services, which are never ended: they would only hang there."""
    emergency_after: float = 0.4
    """Seconds for which memory must be at its limit, with nothing left to give and growing, before the environment is ended:
    two samples, so that a momentary peak is survived where the kernel allows it."""
    emergency_horizon: float = 2.0
    """At its limit: nine tenths of it (`severe_use`) cannot be freed, and it is full, or will be within this many seconds at
    the rate of the last sample."""

    def __post_init__(self) -> None:
        _within("elastic.memory", self, 0.01, 1.0, "pressed_use", "severe_use", "pressed_pressure", "severe_pressure")
        _within(
            "elastic.memory",
            self,
            0.0,
            86400.0,
            "horizon",
            "calm_after",
            "hold",
            "step_every",
            "emergency_after",
            "emergency_horizon",
        )
        _within("elastic.memory", self, 0.1, 0.95, "step")
        _within("elastic.memory", self, 1.0, 10.0, "headroom")
        _within("elastic.memory", self, 0.0, 10.0, "margin")
        _within("elastic.memory", self, 0, GIB, "margin_bytes")
        _within("elastic.memory", self, 0.0, 0.99, "brake", "last_brake")
        _within("elastic.memory", self, 0.0, self.step * self.pressed_use, "calm_use")
        if self.severe_use < self.pressed_use:
            raise ConfigError("elastic.memory.severe_use must not be below pressed_use")


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """The ``[elastic.admission]`` table. Shares are of the node."""

    cpu: float = 0.0
    """Cores that may be promised; 0: the node's CPUs. More than it has over-commits it: quotas then no longer guarantee."""
    memory: int = 0
    """Bytes that may be promised; 0: the node's memory less 5 %, which kernel and daemons need."""
    reserve_cpu: float = 0.1
    """Share of the cores that no raise may take: environments still to be admitted start from it."""
    reserve_memory: float = 0.1
    """The same of memory."""
    evaluation_share: float = 0.5
    """Of the reserve, the share that only evaluation environments may start from: tasks that wait for their evaluation while
    they hold the node would otherwise wait for each other for ever."""
    starts_share: float = 0.7
    """Start quotas of tasks and services together take at most this share of the node: the rest is what raises live on."""
    deadline: float = 300.0
    """Seconds after which a waiting environment is told that there is no room, unless it names its own."""
    waiting: int = 10_000
    """Environments that may wait; more are refused at once."""

    def __post_init__(self) -> None:
        _within("elastic.admission", self, 0.0, 1e6, "cpu")
        _within("elastic.admission", self, 0, 1 << 60, "memory")
        _within("elastic.admission", self, 0.0, 0.9, "reserve_cpu", "reserve_memory")
        _within("elastic.admission", self, 0.0, 1.0, "evaluation_share")
        _within("elastic.admission", self, 0.01, 1.0, "starts_share")
        _within("elastic.admission", self, 0.0, 86400.0, "deadline")
        _within("elastic.admission", self, 0, 1_000_000, "waiting")


@dataclass(frozen=True, slots=True)
class ElasticConfig:
    """The ``[elastic]`` table, with its defaults. CPU in cores, memory in bytes, times in seconds."""

    interval: float = 0.2
    """Between two samples of an environment that is doing something: two quota periods, and short against what people and
    trainers notice. A read costs tens of microseconds."""
    idle_interval: float = 10.0
    """Between two looks at one that is idle and has no more than its start, where the kernel tells of all that it could need
    (pressure on CPU and memory, memory at the brake, a fork refused); otherwise `interval` holds, or 2 s where it tells of
    pressure alone. Nothing waits for such a look: it finds use that comes near the quota, and others' changes of limits. 400
    environments take 1.2 % of a core when each is looked at every 2 s, and a fifth of a percent every 10 s."""
    idle_use: float = 0.02
    """Idle: it uses less than this many cores, and less than half of its memory."""
    start_cpu: float = 0.5
    """Quota that an environment starts with where neither plan nor annotation names one. Half of such environments never
    use more than one core at their peak, and most of the time far less."""
    start_memory: int = 512 * MIB
    """The same of memory: three times the median peak (0.15 GiB), since growth within a sample cannot be answered."""
    ceiling_cpu: float = 64.0
    """Most cores that an environment gets; its own spec's limit is a ceiling too."""
    ceiling_memory: int = 32 * GIB
    """Most memory that an environment gets; its own spec's limit is a ceiling too."""
    pids_use: float = 0.75
    """A limit of processes that may grow (`weenv.dev/pids.max`) is doubled when this share of it is in use, or a fork was
    refused. Looked at once a second; a quarter is what a build's next step may start meanwhile."""
    cpu: CpuRules = field(default_factory=CpuRules)
    memory: MemoryRules = field(default_factory=MemoryRules)
    admission: AdmissionRules = field(default_factory=AdmissionRules)
    serve: ServeConfig = field(default_factory=ServeConfig)

    def __post_init__(self) -> None:
        _within("elastic", self, 0.01, 60.0, "interval")
        _within("elastic", self, self.interval, 600.0, "idle_interval")
        _within("elastic", self, 0.0, 1000.0, "idle_use")
        _within("elastic", self, 0.01, 1.0, "pids_use")
        _within("elastic", self, 0.01, 1e5, "start_cpu", "ceiling_cpu")
        _within("elastic", self, 4 * MIB, 1 << 60, "start_memory", "ceiling_memory")
        if self.ceiling_cpu < self.start_cpu:
            raise ConfigError("elastic.ceiling_cpu must not be below start_cpu")
        if self.ceiling_memory < self.start_memory:
            raise ConfigError("elastic.ceiling_memory must not be below start_memory")

    def above(self, start_cpu: float, start_memory: int) -> str:
        """What of a start is above the ceilings, which :meth:`bounds` would cut it to; empty for nothing."""
        parts = []
        if start_cpu > self.ceiling_cpu:
            parts.append(f"{start_cpu:g} cores is above elastic.ceiling_cpu ({self.ceiling_cpu:g})")
        if start_memory > self.ceiling_memory:
            parts.append(f"{size(start_memory)} is above elastic.ceiling_memory ({size(self.ceiling_memory)})")
        return ", ".join(parts)

    def bounds(
        self, start_cpu: float = 0.0, start_memory: int = 0, ceiling_cpu: float = 0.0, ceiling_memory: int = 0
    ) -> Bounds:
        """Bounds of one environment from what its plan, annotations and own limits say; 0: nothing said, the default.

        A ceiling above the configured one is cut to it; a start above its ceiling is cut to that. The floor is the start:
        admission promises it, so that taking it away would free nothing for others.
        """
        top_cpu = min(ceiling_cpu or self.ceiling_cpu, self.ceiling_cpu)
        top_memory = min(ceiling_memory or self.ceiling_memory, self.ceiling_memory)
        start = Quota(min(start_cpu or self.start_cpu, top_cpu), min(start_memory or self.start_memory, top_memory))
        return Bounds(start, Quota(top_cpu, top_memory), start)


def from_tables(tables: dict[str, Any], **overrides: Any) -> ElasticConfig:
    """The ``[elastic]`` table of a configuration file; overrides that are not None win. Raises :class:`ConfigError`.

    ``[elastic.serve]`` within it is weenv.plugin.nri.serveconfig's.
    """
    raw = tables.get("elastic", {})
    if isinstance(raw, dict):
        raw = {name: value for name, value in raw.items() if name != "serve"}
    return settings.build(ElasticConfig, raw, "elastic", **overrides)


def without_brake(config: ElasticConfig) -> ElasticConfig:
    """The same for a kernel that has no ``memory.high`` (cgroup v1)."""
    return dataclasses.replace(config, memory=dataclasses.replace(config.memory, brake=0.0))
