"""Who an environment belongs to, so that one whose owner died is known for what it is.

The mark names a process so that it cannot be mistaken for a later one: pid and start time (proc(5), stat field 22)
within one pid namespace of one boot.
"""

from __future__ import annotations

import os

_BOOT = "/proc/sys/kernel/random/boot_id"


def _start(pid: int) -> str:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[19].decode()


def _place() -> str:
    with open(_BOOT) as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"


def mark(pid: int | None = None) -> str:
    """The mark of a process, this one by default."""
    number = os.getpid() if pid is None else pid
    return f"{number} {_start(number)} {_place()}"


def is_gone(text: str) -> bool:
    """True where the process of a mark has certainly ended; a mark of another pid namespace says nothing: False."""
    parts = text.split()
    if len(parts) != 4 or not parts[0].isdigit():
        return True
    here = _place().split()
    if parts[2] != here[0]:
        return True
    if parts[3] != here[1]:
        return False
    try:
        return _start(int(parts[0])) != parts[1]
    except (OSError, IndexError):
        return True
