"""Who an environment belongs to, so that one whose owner died is known for what it is.

The mark names a process so that it cannot be mistaken for a later one: pid and start time (proc(5), stat field 22)
within one pid namespace of one boot. Environments have it in a label of theirs (record.py), the leases of composing in
LEASE_LABEL, there with the user's number before it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from weenv.core import procfs

LEASE_PREFIX = "weenv-compose-"
"""What the names of our leases begin with."""
LEASE_LABEL = "dev.weenv.owner"
"""Label of a lease: who it is for, as :func:`lease_mark` gives it."""

_MAX_PID = 1 << 31


def _place() -> str:
    return f"{procfs.boot_id()} {os.stat('/proc/self/ns/pid').st_ino}"


def mark(pid: int | None = None) -> str:
    """The mark of a process, this one by default."""
    number = os.getpid() if pid is None else pid
    return f"{number} {procfs.stat(number).start} {_place()}"


def is_gone(text: str) -> bool:
    """True where the process of a mark has certainly ended; a mark of another pid namespace says nothing: False."""
    parts = text.split()
    if len(parts) != 4 or not parts[0].isdecimal():
        return True
    here = _place().split()
    if parts[2] != here[0]:
        return True
    if parts[3] != here[1]:
        return False
    return _has_ended(int(parts[0]), parts[1])


def _has_ended(pid: int, start: str) -> bool:
    """Whether a process has; one that is only waited for by nobody (state Z or X) has, too."""
    if not 0 < pid < _MAX_PID:
        return True
    try:
        found = procfs.stat(pid)
        return str(found.start) != start or found.dead
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it is another user's, and hidden (proc(5), hidepid)
    return False


def lease_mark(pid: int | None = None) -> str:
    """What LEASE_LABEL says of a process, this one by default."""
    return f"{os.geteuid()} {mark(pid)}"


def is_orphan(lease: str, labels: Mapping[str, str]) -> bool:
    """True for a lease of ours, by this user on this machine, since it was started, whose owner has certainly ended.

    All others end by their own time.
    """
    user, _, text = labels.get(LEASE_LABEL, "").partition(" ")
    parts = text.split()
    if not lease.startswith(LEASE_PREFIX) or user != str(os.geteuid()) or len(parts) != 4 or not parts[0].isdecimal():
        return False
    return parts[2:] == _place().split() and is_gone(text)
