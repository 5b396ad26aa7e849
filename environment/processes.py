"""Ending all that one command started in an environment, whatever it did to hide: sessions, daemons, emptied variables.

A command is put into a control group of its own below its container's, right after it started; what it forks later is
born there. What it forked before that is known by parentage and by a variable in its environment. All of them are killed
by pidfd, over and over until none is left; where a control group can be frozen (v1) or killed as a whole (v2,
cgroup.kill), it is, so that a fork bomb cannot outrun it. Files: cgroup-v1/freezer-subsystem.rst, cgroup-v2.rst, proc(5).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

ROOT = "/sys/fs/cgroup"
MARKER = "WEENV_EXEC"
"""Variable that every added process gets, with its id as the value."""


def unified_only(root: str = ROOT) -> bool:
    """True where the machine has cgroup v2 and nothing else."""
    return os.path.exists(os.path.join(root, "cgroup.controllers"))


def accounts_swap(root: str = ROOT) -> bool:
    """Whether a limit of memory may name swap too (on v2 runtimes make of it what the kernel takes)."""
    return unified_only(root) or os.path.exists(os.path.join(root, "memory", "memory.memsw.limit_in_bytes"))


def group_of(pid: int, root: str = ROOT) -> str:
    """The directory of the control group to use for a process: the freezer's on v1; empty where there is none.

    Raises OSError where the process is gone.
    """
    with open(f"/proc/{pid}/cgroup") as file:
        rows = [line.rstrip("\n").split(":", 2) for line in file]
    for _, names, path in rows:
        if "freezer" in names.split(","):
            return _below(os.path.join(root, "freezer"), path)
    for number, _, path in rows:
        if number == "0" and unified_only(root):
            return _below(root, path)
    return ""


def _below(root: str, path: str) -> str:
    """A directory in ``root``; the root itself and what cannot be seen from here is none of ours."""
    if path == "/" or ".." in path.split("/"):
        return ""
    found = root + path
    return found if os.path.isdir(found) else ""


def enclose(pid: int, group: str, name: str) -> str:
    """Move a process into a new group below ``group``; its directory, or empty where that does not work.

    Blocking: up to some 20 ms, an RCU grace period of the kernel.
    """
    made = os.path.join(group, name)
    try:
        os.mkdir(made)
        _write(os.path.join(made, "cgroup.procs"), str(pid))
    except OSError:
        release(made)
        return ""
    return made


def release(group: str) -> None:
    """Remove a group, where nothing lives in it any more."""
    with contextlib.suppress(OSError):
        os.rmdir(group)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def members(group: str) -> set[int]:
    """All processes in a group and those below it."""
    found: set[int] = set()
    for folder, _, _ in os.walk(group):
        with contextlib.suppress(OSError), open(os.path.join(folder, "cgroup.procs")) as file:
            found.update(int(line) for line in file)
    return found


def _stat(pid: int) -> tuple[str, int, int] | None:
    """(state, parent, session) of a process, or None where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[1]), int(fields[3])
    except (OSError, ValueError, IndexError):
        return None


def _marked(pid: int, marker: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marker in file.read(1 << 20).split(b"\0")
    except OSError:
        return False


def family(leader: int, everyone: set[int], marker: str, enclosed: set[int]) -> set[int]:
    """Those of ``everyone`` that came from ``leader``; the dead are left out."""
    known = {pid: found for pid in everyone | enclosed | {leader} if (found := _stat(pid)) is not None and found[0] not in "ZX"}
    text = f"{MARKER}={marker}".encode()
    chosen = {pid for pid in known if pid == leader or pid in enclosed or known[pid][2] == leader or _marked(pid, text)}
    grown = True
    while grown:
        more = {pid for pid, (_, parent, _) in known.items() if parent in chosen} - chosen
        chosen |= more
        grown = bool(more)
    return chosen


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        handle = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def end_family(leader: int, first: int, marker: str, group: str, enclosure: str, *, timeout: float = 10.0) -> bool:
    """Kill what came from ``leader``; ``first`` (the container's first process) is never hit. True: none is left.

    ``group`` is the container's control group (see :func:`group_of`), ``enclosure`` the command's own or empty. Blocking.
    """
    freezer = enclosure and os.path.join(enclosure, "freezer.state")
    end = time.monotonic() + timeout
    calm = 0
    while time.monotonic() < end:
        if freezer:
            with contextlib.suppress(OSError):
                _write(freezer, "FROZEN")
        if enclosure and not freezer_exists(enclosure):
            with contextlib.suppress(OSError):
                _write(os.path.join(enclosure, "cgroup.kill"), "1")
        victims = family(leader, members(group) if group else set(), marker, members(enclosure) if enclosure else set())
        victims.discard(first)
        for pid in victims:
            _kill(pid)
        if freezer:
            with contextlib.suppress(OSError):
                _write(freezer, "THAWED")
        # Twice nothing: what was born between the looks of one round shows in the next.
        calm = 0 if victims else calm + 1
        if calm == 2:
            return True
        time.sleep(0.005 if calm else 0.01)
    return False


def freezer_exists(group: str) -> bool:
    """Whether a group is one of v1's freezer."""
    return os.path.exists(os.path.join(group, "freezer.state"))
