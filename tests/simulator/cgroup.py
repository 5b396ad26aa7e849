"""An environment's cgroup as files in a directory, v1 or v2, in the form the kernel writes; a runtime that sets limits in it.

Texts of v1 were recorded from Linux 6.18; those of v2 are as admin-guide/cgroup-v2.rst has them. As the kernel does, v1 refuses
a memory limit below use that cannot be freed; v2 takes it and kills.
"""

from __future__ import annotations

import os

from weenv.plugin.nri.actuate import EnvGone, Refused
from weenv.plugin.nri.cgroups import Paths
from weenv.plugin.nri.model import EnvKey

NO_LIMIT = 9223372036854771712
_STAT_V1 = """cache {cache}
rss {anon}
rss_huge 0
shmem 0
mapped_file 0
dirty 0
writeback 0
workingset_refault_anon 0
workingset_refault_file 3264
swap 0
swapcached 0
pgpgin 16428699
pgpgout 16428699
pgfault 12571563
pgmajfault 85979
inactive_anon 0
active_anon {anon}
inactive_file {inactive_file}
active_file {active_file}
unevictable 0
hierarchical_memory_limit {limit}
hierarchical_memsw_limit 9223372036854771712
total_cache {cache}
total_rss {anon}
total_rss_huge 0
total_shmem 0
total_mapped_file 0
total_dirty 0
total_writeback 0
total_workingset_refault_anon 0
total_workingset_refault_file 3264
total_swap 0
total_swapcached 0
total_pgpgin 16428699
total_pgpgout 16428699
total_pgfault 12571563
total_pgmajfault 85979
total_inactive_anon 0
total_active_anon {anon}
total_inactive_file {inactive_file}
total_active_file {active_file}
total_unevictable 0
"""
_STAT_V2 = """anon {anon}
file {cache}
kernel {kernel}
kernel_stack 16384
pagetables 40960
sec_pagetables 0
percpu 0
sock 0
vmalloc 0
shmem 0
zswap 0
zswapped 0
file_mapped 0
file_dirty 0
file_writeback 0
swapcached 0
anon_thp 0
file_thp 0
shmem_thp 0
inactive_anon 0
active_anon {anon}
inactive_file {inactive_file}
active_file {active_file}
unevictable 0
slab_reclaimable 0
slab_unreclaimable 4096
slab 4096
workingset_refault_anon 0
workingset_refault_file 0
pgfault 1186
pgmajfault 2
"""
_PRESSURE = "some avg10=0.00 avg60=0.00 avg300=0.00 total={some}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total={full}\n"


class Cgroup:
    """Set the attributes, then :meth:`write`. Times in seconds, sizes in bytes."""

    def __init__(self, directory: str, version: int, *, cpu: float = 0.25, memory: int = 256 << 20, psi: bool = True) -> None:
        self.directory = directory
        self.version = version
        self.psi = psi
        self.cpu = cpu
        self.limit = memory
        self.high: int | None = None
        self.usage_s = 0.0
        self.periods = self.throttled = 0
        self.throttled_s = 0.0
        self.anon, self.active_file, self.inactive_file, self.kernel = 10 << 20, 2 << 20, 3 << 20, 1 << 20
        self.max_events = self.oom_kill = 0
        self.cpu_some = self.memory_some = self.memory_full = 0
        os.makedirs(directory)
        self.write()

    @property
    def current(self) -> int:
        """All that is charged."""
        return self.anon + self.active_file + self.inactive_file + self.kernel

    @property
    def paths(self) -> Paths:
        """For a Reader."""
        old = self.version == 1
        unified = self.directory if self.psi else ""
        return Paths(self.directory, self.directory if old else "", self.directory, unified, old, old, self.directory)

    def _put(self, name: str, text: str) -> None:
        # In place: the Reader's descriptors stay on the same file, as on kernfs.
        fd = os.open(os.path.join(self.directory, name), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, 0)
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    def write(self) -> None:
        """Write all files."""
        parts = {
            "anon": self.anon, "active_file": self.active_file, "inactive_file": self.inactive_file, "kernel": self.kernel,
            "cache": self.active_file + self.inactive_file, "limit": self.limit,
        }  # fmt: skip
        if self.psi:
            self._put("cpu.pressure", _PRESSURE.format(some=self.cpu_some, full=0))
            self._put("memory.pressure", _PRESSURE.format(some=self.memory_some, full=self.memory_full))
        if self.version == 1:
            self._put("cpuacct.usage", f"{round(self.usage_s * 1e9)}\n")
            self._put(
                "cpu.stat", f"nr_periods {self.periods}\nnr_throttled {self.throttled}\n"
                f"throttled_time {round(self.throttled_s * 1e9)}\nnr_bursts 0\nburst_time 0\n",
            )  # fmt: skip
            self._put("cpu.cfs_quota_us", f"{round(self.cpu * 100_000)}\n")
            self._put("cpu.cfs_period_us", "100000\n")
            self._put("memory.usage_in_bytes", f"{self.current}\n")
            self._put("memory.limit_in_bytes", f"{self.limit or NO_LIMIT}\n")
            self._put("memory.memsw.limit_in_bytes", f"{self.limit or NO_LIMIT}\n")
            self._put("memory.failcnt", f"{self.max_events}\n")
            self._put("memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {self.oom_kill}\n")
            self._put("memory.stat", _STAT_V1.format(**parts))
            return
        self._put(
            "cpu.stat", f"usage_usec {round(self.usage_s * 1e6)}\nuser_usec {round(self.usage_s * 1e6)}\nsystem_usec 0\n"
            f"nice_usec 0\ncore_sched.force_idle_usec 0\nnr_periods {self.periods}\nnr_throttled {self.throttled}\n"
            f"throttled_usec {round(self.throttled_s * 1e6)}\nnr_bursts 0\nburst_usec 0\n",
        )  # fmt: skip
        self._put("cpu.max", f"{round(self.cpu * 100_000) or 'max'} 100000\n")
        self._put("memory.current", f"{self.current}\n")
        self._put("memory.max", f"{self.limit or 'max'}\n")
        self._put("memory.high", f"{self.high if self.high is not None else 'max'}\n")
        self._put("memory.reclaim", "")
        self._put(
            "memory.events",
            f"low 0\nhigh 0\nmax {self.max_events}\noom {self.oom_kill}\noom_kill {self.oom_kill}\noom_group_kill 0\n",
        )
        self._put("memory.stat", _STAT_V2.format(**parts))

    def burn(self, seconds: float, cores: float) -> None:
        """So long wanted ``cores``, under the quota in force."""
        used = min(cores, self.cpu)
        self.usage_s += used * seconds
        periods = max(1, round(seconds / 0.1))
        self.periods += periods
        if cores > self.cpu:
            self.throttled += periods
            self.throttled_s += (cores - used) * seconds
            self.cpu_some += round(seconds * 1e6 * 0.9)
        self.write()

    def reclaimed(self) -> int | None:
        """What was written to ``memory.reclaim``; done on the way."""
        with open(os.path.join(self.directory, "memory.reclaim")) as file:
            text = file.read()
        if not text:
            return None
        taken = min(int(text), self.inactive_file + self.active_file)
        from_inactive = min(taken, self.inactive_file)
        self.inactive_file -= from_inactive
        self.active_file -= taken - from_inactive
        self.write()
        return int(text)


class Runtime:
    """An actuator that sets limits of :class:`Cgroup` groups, as containerd and runc do."""

    name = "simulated"

    def __init__(self) -> None:
        self.groups: dict[EnvKey, Cgroup] = {}
        self.calls: list[tuple[EnvKey, float | None, int | None, int | None]] = []
        self.refusals: list[Refused] = []
        """Answers to the next calls, before any is carried out."""
        self.killed: list[EnvKey] = []

    async def apply(self, key: EnvKey, cpu: float | None, memory: int | None, swap: int | None) -> None:
        """Set what is not None."""
        self.calls.append((key, cpu, memory, swap))
        if self.refusals:
            raise self.refusals.pop(0)
        group = self.groups.get(key)
        if group is None:
            raise EnvGone(f"{key} has ended")
        if memory is not None and group.version == 1:
            assert swap is None or swap >= memory, "the kernel refuses that (EINVAL)"
            if memory < group.anon + group.kernel:
                raise Refused(f"{key}: unable to set memory limit to {memory} (current usage: {group.current})")
            over = max(0, group.current - memory)
            group.inactive_file -= min(over, group.inactive_file)
        if memory is not None and group.version == 2 and memory < group.current:
            group.oom_kill += 1
        if cpu is not None:
            group.cpu = cpu
        if memory is not None:
            group.limit = memory
        group.write()

    async def end(self, key: EnvKey) -> None:
        """Kill it."""
        self.killed.append(key)
