"""Reading an environment's cgroup, v1, v2 or both, through files that are opened once.

Where the files are: ``/proc/<pid>/cgroup`` (cgroups(7)) says which group a process is in, per hierarchy, and
``/proc/self/mountinfo`` (proc(5)) where each hierarchy is mounted. A controller is on v1 where a v1 hierarchy has it, else on
v2; pressure files are only ever in the v2 hierarchy, which hybrid machines mount beside the others. What is in the files is
in Documentation of Linux 6.12: admin-guide/cgroup-v2.rst, cgroup-v1/{memory,cpuacct}.rst, scheduler/sched-bwc.rst,
accounting/psi.rst.

A look costs a few microseconds, so that one process can watch hundreds: :meth:`Reader.peek` reads two files,
:meth:`Reader.sample` all but ``memory.stat``, which costs as much as the others together and is read when it is due, when
memory has moved, or when the limit is near.
"""

from __future__ import annotations

import errno
import math
import os
from dataclasses import dataclass

from weenv.core import procfs
from weenv.core.errors import WeenvError
from weenv.plugin.nri.model import UNLIMITED_MEMORY, CpuSample, MemorySample, Quota, Sample

_BIG = 1 << 61
"""A limit this large is none: v1 writes the largest multiple of a page (page_counter.h, PAGE_COUNTER_MAX)."""
_READ = 8192
"""Bytes asked for at once; the largest file read, v2's memory.stat, has some 1 800."""
_GONE = frozenset({errno.ENODEV, errno.ENOENT, errno.ESRCH})
"""A group that was removed answers its open files with ENODEV (kernfs)."""

STAT_EVERY = 2.0
"""Seconds after which ``memory.stat`` is read though nothing calls for it."""
_STAT_MOVED = 16
"""It is also read where memory has moved by more than one part in so many of the limit, or is within one of it."""
_PEEK_NEAR = 8
"""Memory is near its limit when less than one part in so many is left."""


class CgroupGone(WeenvError):
    """The group was removed: its environment has ended."""


class CgroupUnreadable(WeenvError):
    """A file of a group is missing, cannot be read or is not what the kernel documents."""


@dataclass(frozen=True, slots=True)
class Paths:
    """The directories of one environment's group; empty where the machine has no such hierarchy."""

    cpu: str
    cpuacct: str
    memory: str
    unified: str
    cpu_v1: bool
    memory_v1: bool
    pids: str = ""


def hierarchies(mountinfo: str) -> tuple[dict[str, tuple[str, str]], tuple[str, str] | None]:
    """Mounted hierarchies from ``/proc/self/mountinfo``: v1 controller -> (mount point, root), and the v2 one or None."""
    old: dict[str, tuple[str, str]] = {}
    unified: tuple[str, str] | None = None
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        place = (_unescape(fields[4]), _unescape(fields[3]))
        if kind[0] == "cgroup2" and (unified is None or place[1] == "/"):
            unified = place
        elif kind[0] == "cgroup":
            for controller in kind[2].split(","):
                if controller not in old or place[1] == "/":
                    old[controller] = place
    return old, unified


def _unescape(text: str) -> str:
    """Octal escapes of mountinfo, as ``\\040`` for a space."""
    return text.encode("latin-1", "replace").decode("unicode_escape") if "\\" in text else text


def locate(mountinfo: str, membership: str, *, inside: str = "") -> Paths:
    """Where the group of a process is; ``membership`` is its ``/proc/<pid>/cgroup``.

    ``inside``: the group that its container was given (OCI ``linux.cgroupsPath``); a first process that moved to a group
    of its own below that one is watched by the upper one. Raises CgroupUnreadable.
    """
    old, unified = hierarchies(mountinfo)
    of: dict[str, str] = {}
    own = ""
    for line in membership.splitlines():
        number, _, rest = line.partition(":")
        names, colon, path = rest.partition(":")
        if not colon:
            continue
        path = _upper(path, inside)
        if number == "0":
            own = path
        for name in names.split(","):
            of[name] = path

    def directory(controller: str) -> tuple[str, bool]:
        if controller in old and controller in of:
            return _below(*old[controller], of[controller]), True
        return (_below(*unified, own) if unified is not None and own else ""), False

    cpu, cpu_v1 = directory("cpu")
    memory, memory_v1 = directory("memory")
    account, account_v1 = directory("cpuacct")
    pressure = _below(*unified, own) if unified is not None and own else ""
    if not cpu or not memory or (cpu_v1 and not (account_v1 and account)):
        raise CgroupUnreadable(
            "the cgroups for CPU and memory of a process cannot be seen from here",
            hint="run the daemon in the host's cgroup namespace, with /sys/fs/cgroup mounted",
        )
    return Paths(cpu, account if cpu_v1 else "", memory, pressure, cpu_v1, memory_v1, directory("pids")[0])


def _upper(path: str, inside: str) -> str:
    return inside if inside.startswith("/") and len(inside) > 1 and (path + "/").startswith(inside + "/") else path


def _below(mount: str, root: str, path: str) -> str:
    """The directory of a group, empty where it is the hierarchy's root (nobody's environment) or not within the mount."""
    if root != "/":
        if not (path + "/").startswith(root + "/"):
            return ""
        path = path[len(root) :]
    if path in ("", "/") or ".." in path.split("/"):
        return ""
    return mount.rstrip("/") + path


def find(pid: int, *, inside: str = "") -> Paths:
    """Where the group of process ``pid`` is. Raises CgroupGone where it has ended, CgroupUnreadable."""
    try:
        with open(f"/proc/{pid}/cgroup") as file:
            membership = file.read()
        with open("/proc/self/mountinfo") as file:
            mountinfo = file.read()
    except OSError as error:
        if error.errno in _GONE:
            raise CgroupGone(f"process {pid} has ended") from error
        raise CgroupUnreadable(f"cannot read the groups of process {pid}: {error.strerror}") from error
    try:
        return locate(mountinfo, membership, inside=inside)
    except CgroupUnreadable:
        if _has_ended(pid):  # what has ended and was not waited for is in the root of every hierarchy
            raise CgroupGone(f"process {pid} has ended") from None
        raise


def _has_ended(pid: int) -> bool:
    try:
        return procfs.stat(pid).ending
    except OSError:
        return True


class _Fields:
    """Numbers of a file of ``name value`` lines. Their places are found once: a kernel has the same lines while it runs."""

    def __init__(self, *names: str) -> None:
        self._names = [name.encode() for name in names]
        self._length = -1
        self._places: list[int] = []

    def pick(self, data: bytes) -> list[int]:
        """The numbers in the order of the names; 0 for one that the file has not. Raises CgroupUnreadable."""
        words = data.split()
        if len(words) != self._length:
            index = {word: number for number, word in enumerate(words)}
            words.append(b"0")
            self._places = [index[name] + 1 if name in index else -1 for name in self._names]
            self._length = len(words) - 1
        else:
            words.append(b"0")
        try:
            return [int(words[place]) for place in self._places]
        except (ValueError, IndexError) as error:
            self._length = -1
            raise CgroupUnreadable(f"a cgroup file is not what it should be: {data[:60]!r}") from error


def pressure(data: bytes) -> tuple[int, int | None]:
    """(some, full) totals of a pressure file, microseconds; full is None where the kernel has none. Raises CgroupUnreadable."""
    words = data.split()
    try:
        if words[0] != b"some":
            raise ValueError
        return int(words[4][6:]), int(words[9][6:]) if len(words) > 9 else None  # total=N
    except (ValueError, IndexError) as error:
        raise CgroupUnreadable(f"a pressure file is not what it should be: {data[:60]!r}") from error


def _limit(data: bytes) -> int:
    """A limit of memory; ``max`` and what stands for it become UNLIMITED_MEMORY. Raises CgroupUnreadable."""
    text = data.strip()
    if text == b"max":
        return UNLIMITED_MEMORY
    number = _number(text)
    return number if number < _BIG else UNLIMITED_MEMORY


def _number(data: bytes) -> int:
    try:
        return int(data)
    except ValueError as error:
        raise CgroupUnreadable(f"a cgroup file is not what it should be: {data[:60]!r}") from error


class Reader:
    """The open files of one environment's group. All methods raise CgroupGone and CgroupUnreadable; close it in the end."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self._fds: list[int] = []
        self._quota = Quota(math.inf, UNLIMITED_MEMORY)
        self._high = UNLIMITED_MEMORY
        self._split: tuple[float, int, list[int]] = (-math.inf, 0, [0] * 6)
        """When ``memory.stat`` was read, what was charged then, and the parts: see _SPLIT."""
        self._seen = 0
        self._hits, self._kills = -1, 0
        try:
            if paths.cpu_v1:
                self._account = self._open(paths.cpuacct, "cpuacct.usage")
                self._cpu_stat = self._open(paths.cpu, "cpu.stat")
                self._cpu_quota = self._open(paths.cpu, "cpu.cfs_quota_us")
                self._cpu_period = self._open(paths.cpu, "cpu.cfs_period_us")
                self._cpu_fields = _Fields("nr_periods", "nr_throttled", "throttled_time")
            else:
                self._account = self._cpu_stat = self._open(paths.cpu, "cpu.stat")
                self._cpu_quota = self._open(paths.cpu, "cpu.max")
                self._cpu_fields = _Fields("nr_periods", "nr_throttled", "throttled_usec", "usage_usec")
            if paths.memory_v1:
                self._current = self._open(paths.memory, "memory.usage_in_bytes")
                self._memory_max = self._open(paths.memory, "memory.limit_in_bytes")
                self._events = self._open(paths.memory, "memory.oom_control")
                self._failcnt = self._open(paths.memory, "memory.failcnt")
                self._event_fields = _Fields("oom_kill")
                self._stat_fields = _Fields(*(f"total_{name}" if name else "" for name in _SPLIT_V1))
            else:
                self._current = self._open(paths.memory, "memory.current")
                self._memory_max = self._open(paths.memory, "memory.max")
                self._memory_high = self._open(paths.memory, "memory.high")
                self._events = self._open(paths.memory, "memory.events")
                self._event_fields = _Fields("oom", "oom_kill", "max")
                self._stat_fields = _Fields(*_SPLIT)
            self._memory_stat = self._open(paths.memory, "memory.stat")
            self._cpu_pressure = self._open_pressure("cpu")
            self._memory_pressure = self._open_pressure("memory")
            self.limits()
        except BaseException:
            self.close()
            raise

    def _open(self, directory: str, name: str) -> int:
        try:
            fd = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _GONE and not os.path.isdir(directory):
                raise CgroupGone(f"{directory} is gone") from error
            hint = "raise the limit of open files" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
            raise CgroupUnreadable(f"cannot open {directory}/{name}: {error.strerror}", hint=hint) from error
        self._fds.append(fd)
        return fd

    def _open_pressure(self, name: str) -> int:
        """-1 where the kernel has no pressure files, or has them switched off (EOPNOTSUPP)."""
        if not self.paths.unified:
            return -1
        try:
            fd = os.open(os.path.join(self.paths.unified, f"{name}.pressure"), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return -1
        self._fds.append(fd)
        try:
            pressure(os.pread(fd, _READ, 0))
        except (OSError, CgroupUnreadable):
            return -1
        return fd

    def _read(self, fd: int) -> bytes:
        if not self._fds:  # closed meanwhile: its numbers may be others' by now
            raise CgroupGone(f"{self.paths.cpu} is no longer watched")
        try:
            return os.pread(fd, _READ, 0)
        except OSError as error:
            if error.errno in _GONE:
                raise CgroupGone(f"{self.paths.cpu} is gone") from error
            raise CgroupUnreadable(f"cannot read a file of {self.paths.cpu}: {error.strerror}") from error

    def close(self) -> None:
        """Close the files."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)

    def moved(self) -> bool:
        """Whether memory has moved since the last sample, so much that what was seen then no longer holds."""
        return self._moved(_number(self._read(self._current)), self._seen)

    def peek(self) -> tuple[float, int] | None:
        """(CPU seconds, throttled periods) so far; None where memory has moved since the last sample, or is near its limit."""
        current = _number(self._read(self._current))
        if self._moved(current, self._seen) or current * _PEEK_NEAR > min(self._quota.memory, self._high) * (_PEEK_NEAR - 1):
            return None
        _, throttled, _, *used = self._cpu_fields.pick(self._read(self._cpu_stat))
        return (used[0] / 1e6 if used else _number(self._read(self._account)) / 1e9), throttled

    def sample(self, now: float, *, whole: bool = False) -> Sample:
        """One look; ``now`` is the monotonic clock. ``whole``: ``memory.stat`` is read in any case."""
        periods, throttled, stalled, *used = self._cpu_fields.pick(self._read(self._cpu_stat))
        if self.paths.cpu_v1:
            usage_s, throttled_s = _number(self._read(self._account)) / 1e9, stalled / 1e9
        else:
            usage_s, throttled_s = used[0] / 1e6, stalled / 1e6
        some = pressure(self._read(self._cpu_pressure))[0] if self._cpu_pressure >= 0 else None
        return Sample(now, CpuSample(usage_s, periods, throttled, throttled_s, some), self._memory(now, whole))

    def _moved(self, current: int, then: int) -> bool:
        return abs(current - then) * _STAT_MOVED > min(self._quota.memory, then + (16 << 20))

    def _memory(self, now: float, whole: bool) -> MemorySample:
        current = _number(self._read(self._current))
        limit = self._quota.memory
        when, then, parts = self._split
        if (
            whole
            or now - when >= STAT_EVERY
            or current + limit // _STAT_MOVED > limit
            or self._moved(current, then)
        ):  # fmt: skip
            parts = self._stat_fields.pick(self._read(self._memory_stat))
            self._split = (now, current, parts)
            then = current
            self._hits = -1  # a machine that is out of memory kills without a limit being hit
        anon, active, inactive, reclaimable, dirty, writeback = parts
        # What came since memory.stat was read is taken for the worst, which is anon.
        fixed = max(anon, then - active - inactive - reclaimable + dirty + writeback) + max(0, current - then)
        hits, oom, kills = self._memory_events()
        some: int | None = None
        full: int | None = None
        # Waiting for memory says something of a limit only where that is near.
        if self._memory_pressure >= 0 and current * 2 > min(limit, self._high):
            some, full = pressure(self._read(self._memory_pressure))
        self._seen = current
        return MemorySample(
            current, anon, active, inactive, min(fixed, current), self._high, limit, hits, oom, kills, some, full
        )  # fmt: skip

    def _memory_events(self) -> tuple[int, int, int]:
        """(limit hit, reclaim did not help, processes killed), counted since the group was made."""
        if not self.paths.memory_v1:
            oom, kills, hits = self._event_fields.pick(self._read(self._events))
            return hits, oom, kills
        hits = _number(self._read(self._failcnt))
        if hits != self._hits:
            self._hits, self._kills = hits, self._event_fields.pick(self._read(self._events))[0]
        return hits, self._kills, self._kills  # v1 does not count reclaim in vain

    def limits(self) -> Quota:
        """The limits in force, read now: ``inf`` cores and UNLIMITED_MEMORY where there is none."""
        if self.paths.cpu_v1:
            quota, period = _number(self._read(self._cpu_quota)), _number(self._read(self._cpu_period))
            cores = quota / period if quota > 0 and period > 0 else math.inf
        else:
            words = self._read(self._cpu_quota).split()
            if len(words) != 2:
                raise CgroupUnreadable(f"cpu.max is not what it should be: {words!r}")
            cores = math.inf if words[0] == b"max" else _number(words[0]) / max(1, _number(words[1]))
        memory = _limit(self._read(self._memory_max))
        if not self.paths.memory_v1:
            self._high = _limit(self._read(self._memory_high))
        self._quota = Quota(cores, memory)
        return self._quota

    def swap_limit(self) -> int:
        """v1's limit of memory and swap together, read now; UNLIMITED_MEMORY where there is none, and on v2."""
        if not self.paths.memory_v1:
            return UNLIMITED_MEMORY
        try:
            with open(os.path.join(self.paths.memory, "memory.memsw.limit_in_bytes"), "rb") as file:
                return _limit(file.read())
        except OSError:
            return UNLIMITED_MEMORY

    def set_high(self, value: int) -> bool:
        """Set v2's ``memory.high``, UNLIMITED_MEMORY for none; False where the kernel has none or refuses."""
        if self.paths.memory_v1:
            return False
        text = b"max" if value >= UNLIMITED_MEMORY else str(value).encode()
        if not self._write(self.paths.memory, "memory.high", text):
            return False
        self._high = value
        return True

    def set_burst(self, cores: float) -> float:
        """Let quota that is not used be saved up to so many cores of one period (``cpu.max.burst``, v1 ``cpu.cfs_burst_us``).

        What is in force then, read back: 0 where there is no quota, the kernel has no such file (Linux 5.14) or refuses.
        """
        name = "cpu.cfs_burst_us" if self.paths.cpu_v1 else "cpu.max.burst"
        period = self._period()
        if not math.isfinite(self.limits().cpu) or not self._write(self.paths.cpu, name, b"%d" % round(cores * period)):
            return 0.0
        try:
            with open(os.path.join(self.paths.cpu, name), "rb") as file:
                return _number(file.read()) / period
        except OSError:
            return 0.0

    def _period(self) -> int:
        """Microseconds of a quota period."""
        if self.paths.cpu_v1:
            return max(1, _number(self._read(self._cpu_period)))
        return max(1, _number(self._read(self._cpu_quota).split()[-1]))

    @staticmethod
    def _write(directory: str, name: str, data: bytes) -> bool:
        try:
            fd = os.open(os.path.join(directory, name), os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return os.write(fd, data) == len(data)
        except OSError:
            return False
        finally:
            os.close(fd)

    def reclaim(self, amount: int) -> bool:
        """Have the kernel free so many bytes of this group (v2 ``memory.reclaim``, Linux 5.19); False where it cannot, or not
        all of them. Blocking: it may have to write pages first."""
        return (
            not self.paths.memory_v1 and amount > 0 and self._write(self.paths.memory, "memory.reclaim", str(amount).encode())
        )

    def trigger(self, kind: str, stall_us: int, window_us: int) -> int | None:
        """A descriptor that has POLLPRI when somebody waited ``stall_us`` within ``window_us`` for ``cpu`` or ``memory``.

        None where the kernel has no such trigger or refuses it: without CAP_SYS_RESOURCE only windows of whole multiples
        of 2 s are given (psi.rst). Raises CgroupGone, and CgroupUnreadable where this process has no room for it: neither
        says what the kernel has. The caller closes it.
        """
        directory = self.paths.unified
        if not directory:
            return None
        fd = -1
        try:
            fd = os.open(os.path.join(directory, f"{kind}.pressure"), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            os.write(fd, f"some {stall_us} {window_us}\0".encode())
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if error.errno in _GONE and not os.path.isdir(directory):
                raise CgroupGone(f"{directory} is gone") from error
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise CgroupUnreadable(f"cannot wait for pressure on {kind} in {directory}: {error.strerror}") from error
            return None
        return fd

    def notices(self, kind: str) -> int | None:
        """A descriptor that has POLLPRI from the next time on that a limit of ``memory`` or of ``pids`` is met.

        That is a change of ``memory.events`` (v2 alone) or ``pids.events`` (v1 has it, but Linux 6.18 tells nobody of it);
        reading the descriptor makes it wait for the next (fs/kernfs/file.c, kernfs_generic_poll). None where there is no such
        file. The caller closes it.
        """
        directory = self.paths.pids if kind == "pids" else self.paths.memory
        if not directory:
            return None
        try:
            fd = os.open(os.path.join(directory, f"{kind}.events"), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            os.pread(fd, _READ, 0)
        except OSError:
            os.close(fd)
            return None
        return fd


_SPLIT = ("anon", "active_file", "inactive_file", "slab_reclaimable", "file_dirty", "file_writeback")
"""Lines of v2's ``memory.stat``."""
_SPLIT_V1 = ("rss", "active_file", "inactive_file", "", "dirty", "writeback")
"""The same of v1, which counts the whole hierarchy as ``total_*`` and does not tell reclaimable slabs."""
