"""What the parts of elastic provisioning hand to each other: samples in, decisions out. Plain data, no behaviour to speak of.

Units everywhere: CPU in cores (1.0 is one CPU used all the time), memory in bytes, times in seconds of one monotonic clock,
pressure totals in microseconds as the kernel writes them. A counter (``usage_s``, ``throttled_s``, ``oom_kill``, the pressure
totals) only grows while an environment lives; one that shrank means that its cgroup was made anew.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

UNLIMITED_MEMORY = 1 << 62
"""Stands for "no limit" in :attr:`MemorySample.max` and ``high``; v1 writes 2**63 rounded down to a page, v2 ``max``."""


class Role(enum.StrEnum):
    """What an environment is for; the value of the annotation ``weenv.dev/role``."""

    TASK = "task"
    """An agent works in it. The default."""
    EVALUATION = "evaluation"
    """A clean environment that scores a task: short, and somebody waits; boosted quotas are taken back for it."""
    SERVICE = "service"
    """Serves others (a database, a proxy): as a task, and never ended by us for memory."""


@dataclass(frozen=True, slots=True)
class Resources:
    """An amount of both: what a node has, or what is used. CPU in cores, memory in bytes."""

    cpu: float
    memory: int


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one environment: CPU in cores (CFS quota divided by period), memory in bytes (``memory.max``)."""

    cpu: float
    memory: int


@dataclass(frozen=True, slots=True)
class Pids:
    """A look at processes. ``limit`` 0: none. ``refused``: forks refused for it since the group was made."""

    current: int
    limit: int
    refused: int


@dataclass(frozen=True, slots=True)
class PidsBounds:
    """A limit of processes: where it starts and how far it may be raised; ``0 < start <= ceiling``."""

    start: int
    ceiling: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where an environment's quota starts and how far it may move: ``0 < floor <= start <= ceiling`` in both."""

    start: Quota
    ceiling: Quota
    floor: Quota
    pids: PidsBounds | None = None
    """None: its limit of processes is nobody's business here."""


@dataclass(frozen=True, slots=True)
class EnvKey:
    """A container of one of containerd's namespaces."""

    namespace: str
    container_id: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.container_id}"


@dataclass(frozen=True, slots=True)
class CpuSample:
    """CPU as the cgroup counts it since it was made."""

    usage_s: float
    """CPU seconds used."""
    nr_periods: int = 0
    """Quota periods in which something ran."""
    nr_throttled: int = 0
    """Of these, how many ended with the quota used up."""
    throttled_s: float = 0.0
    """Seconds for which something was kept from running by the quota (summed over CPUs)."""
    pressure_some_us: int | None = None
    """``cpu.pressure`` some total; None where the kernel has none."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory as the cgroup counts it, in bytes; event counters since it was made."""

    current: int
    """All that is charged: ``memory.current`` (v1: usage_in_bytes)."""
    anon: int = 0
    active_file: int = 0
    inactive_file: int = 0
    """File pages that can be dropped without anybody noticing much."""
    unreclaimable: int = 0
    """What no reclaim can free: anon and shmem without swap, kernel memory, unevictable, dirty and writeback pages."""
    high: int = UNLIMITED_MEMORY
    """``memory.high`` in force."""
    max: int = UNLIMITED_MEMORY
    """``memory.max`` in force."""
    max_events: int = 0
    """How often the limit was hit and reclaim was needed (v2 ``memory.events`` max, v1 ``memory.failcnt``)."""
    oom: int = 0
    """How often the limit was hit and reclaim did not help."""
    oom_kill: int = 0
    """Processes that the kernel killed for it."""
    pressure_some_us: int | None = None
    pressure_full_us: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at an environment."""

    when: float
    """Monotonic clock."""
    cpu: CpuSample
    memory: MemorySample


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as a decision sees it: what there is, what all quotas promise together, what boosts must leave free."""

    cpu: float
    memory: int
    promised: Quota = field(default_factory=lambda: Quota(0.0, 0))
    """Sum of the quotas of all admitted environments, the one that is decided on included."""
    reserve: Quota = field(default_factory=lambda: Quota(0.0, 0))
    """What a raise has to leave free for environments still to be admitted."""

    @property
    def free_cpu(self) -> float:
        """Cores that raises may still take; never negative."""
        return max(0.0, self.cpu - self.reserve.cpu - self.promised.cpu)

    @property
    def free_memory(self) -> int:
        """Bytes that raises may still take; never negative."""
        return max(0, self.memory - self.reserve.memory - self.promised.memory)


class Reason(enum.StrEnum):
    """Why a decision is what it is; stable names, for logs, metrics and ``weenv top``."""

    FIRST = "first"
    """The first sample: nothing to compare with yet."""
    STEADY = "steady"
    """Nothing calls for a change."""
    CPU_PRESSURE = "cpu-pressure"
    CPU_SEVERE = "cpu-severe"
    MEMORY_PRESSURE = "memory-pressure"
    MEMORY_SEVERE = "memory-severe"
    BOTH = "cpu-and-memory"
    """CPU and memory both raised by one sample."""
    CALM = "calm"
    """Shrunk a step after sustained low use."""
    HELD = "held"
    """A shrink is due but the hold time after the last change is not over."""
    CEILING = "ceiling"
    """Pressed, and its own ceiling is reached."""
    NODE_FULL = "node-full"
    """Pressed, and the node has nothing left beside the reserve."""
    CUT_SHORT = "cut-short"
    """Raised by less than the rule says: the ceiling or the node did not give more."""
    OOM_EMERGENCY = "oom-emergency"
    """Memory is at its limit, nothing is left to give, and it still grows: to be ended, cause recorded."""
    KERNEL_OOM = "kernel-oom"
    """The kernel killed a process of it for memory since the last sample."""
    CLOCK = "clock"
    """The sample is not newer than the last one, or its counters went back: taken as a first one."""
    TAKEN_BACK = "taken-back"
    """Lowered to its start quota to admit an evaluation environment (decided by admission, not by the policy)."""


@dataclass(frozen=True, slots=True)
class Track:
    """What the policy remembers of one resource of one environment; times None: never."""

    raised_at: float | None = None
    lowered_at: float | None = None
    pressed_at: float | None = None
    """Last sample that showed pressure, whether or not a raise was possible."""
    calm_since: float | None = None
    """First sample of the present run of low use."""
    peak: float = 0.0
    """Highest use within the present run of low use (cores or bytes)."""


@dataclass(frozen=True, slots=True)
class EnvState:
    """The policy's own state of one environment. Made by ``policy.begin``, replaced by ``policy.decide``."""

    bounds: Bounds
    quota: Quota
    """The quota believed to be in force: what the last decision asked for, or what the actuator reported back."""
    role: Role = Role.TASK
    last: Sample | None = None
    cpu: Track = field(default_factory=Track)
    memory: Track = field(default_factory=Track)
    full_since: float | None = None
    """First sample of the present run of "memory at its limit and nothing left to give"."""
    triggers: bool = False
    """The kernel wakes us on its pressure, so that it need not be looked at often while idle."""

    @property
    def pressed_at(self) -> float | None:
        """When either resource was last under pressure."""
        times = [at for at in (self.cpu.pressed_at, self.memory.pressed_at) if at is not None]
        return max(times, default=None)


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done about one environment after one sample."""

    quota: Quota | None
    """The limits to set; None: leave them."""
    tier: int
    """Doublings above the start quota, of whichever of CPU and memory is further up; 0 at or below the start."""
    reason: Reason
    emergency: bool = False
    """End the environment: see :attr:`Reason.OOM_EMERGENCY`."""
    wake_after: float = 0.2
    """Seconds until the next sample is due; pressure triggers may come first."""
    high: int | None = None
    """``memory.high`` to have in force on cgroup v2, a brake below the limit; None: none."""
