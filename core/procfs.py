"""What the kernel says of a process in ``/proc/PID/stat`` (proc_pid_stat(5)), and which boot this is."""

from __future__ import annotations

from typing import NamedTuple

_EXITING = 0x4
"""Flag of a process that is ending (include/linux/sched.h, PF_EXITING): it leaves its groups before it is a zombie."""


class Stat(NamedTuple):
    """Some fields of a process, in brackets the numbers that proc_pid_stat(5) gives them."""

    state: str
    """One letter (3)."""
    parent: int
    """Process id of the parent (4)."""
    session: int
    """Its session (6)."""
    flags: int
    """PF_ bits of include/linux/sched.h (9)."""
    start: int
    """When it began, in ticks since boot (22); with the process id it names a process for good."""

    @property
    def dead(self) -> bool:
        """It has ended, and is only waited for (states Z and X)."""
        return self.state in ("Z", "X")

    @property
    def ending(self) -> bool:
        """It has ended, or does now."""
        return self.dead or bool(self.flags & _EXITING)


def stat(pid: int) -> Stat:
    """The fields of a process. Raises OSError where there is none, or it is hidden (proc(5), hidepid)."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()  # the name before may have spaces and brackets in it
    if len(fields) < 20:
        raise ProcessLookupError(f"/proc/{pid}/stat is cut short")
    return Stat(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[6]), int(fields[19]))


def boot_id() -> str:
    """The name of the running boot, a UUID."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
