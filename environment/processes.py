"""Ending all that one command started in an environment, whatever it did to hide: sessions, daemons, emptied variables.

The parent of an added command is a reaper of its descendants (weenv.environment.waiter), so all that came from it can be
reached from it by parentage; where it is not (an environment that others made, a reaper that was killed), a variable and
the session tell. They are killed by pidfd, over and over until none is left; what is born faster than it is killed is
frozen meanwhile with the rest of its container. Files: cgroup-v1/freezer-subsystem.rst, cgroup-v2.rst, proc(5).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from weenv.core import procfs

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
        with contextlib.suppress(OSError), open(os.path.join(folder, "cgroup.procs")) as file:  # the group has gone meanwhile
            found.update(int(line) for line in file)
    return found


def _living(pid: int) -> procfs.Stat | None:
    """What is known of a process, or None where it has ended."""
    try:
        found = procfs.stat(pid)
    except OSError:
        return None
    return None if found.dead else found


def _marked(pid: int, marker: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marker in file.read(1 << 20).split(b"\0")
    except OSError:
        return False


def family(leader: int, everyone: set[int], marker: str) -> set[int]:
    """Those of ``everyone`` that came from ``leader``; the dead are left out."""
    known = {pid: found for pid in everyone | {leader} if (found := _living(pid)) is not None}
    text = f"{MARKER}={marker}".encode()
    chosen = {pid for pid in known if pid == leader or known[pid].session == leader or _marked(pid, text)}
    grown = True
    while grown:
        more = {pid for pid, found in known.items() if found.parent in chosen} - chosen
        chosen |= more
        grown = bool(more)
    return chosen


def kill(pid: int) -> None:
    """SIGKILL a process, if it is there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        handle = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


class _Freezer:
    """Stops all of a container for moments, unless somebody else has stopped it already."""

    def __init__(self, group: str) -> None:
        old = os.path.join(group, "freezer.state")
        self._path, self._on, self._off = (
            (old, "FROZEN", "THAWED") if os.path.exists(old) else (os.path.join(group, "cgroup.freeze"), "1", "0")
        )
        try:
            with open(self._path) as file:
                self._usable = bool(group) and file.read().strip() == self._off
        except OSError:
            self._usable = False

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """For the length of the block."""
        if not self._usable:
            yield
            return
        try:
            with contextlib.suppress(OSError):  # then nothing is held, as on a kernel without it
                _write(self._path, self._on)
            yield
        finally:
            _write(self._path, self._off)


def send_to_command(reaper: int, number: int, *, timeout: float = 2.0) -> None:
    """Signal the command that runs under ``reaper`` (weenv.environment.waiter), not those it has adopted. Blocking.

    Its own child is the eldest; before it has forked, there is none. Raises OSError where all has ended.
    """
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        with open(f"/proc/{reaper}/task/{reaper}/children") as file:
            children = file.read().split()
        if children:
            handle = os.pidfd_open(int(children[0]))
            try:
                signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)
            return
        time.sleep(0.002)


def holds_pipe(leader: int, first: int, marker: str) -> bool:
    """True where something that came from ``leader``, which has ended, lives and has a pipe open. Blocking."""
    try:
        group = group_of(first)
    except OSError:
        return False
    for pid in family(leader, members(group) if group else _all(), marker) - {first}:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for name in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith("pipe:"):
                    return True
    return False


PATIENCE = 5
"""Rounds of killing before the container is frozen for the next ones."""


def end_family(leader: int, first: int, marker: str, *, timeout: float = 10.0) -> bool:
    """Kill what came from ``leader``; ``first`` (the container's first process) is never hit. True: none is left.

    Blocking. The leader goes last, or those it would have reaped would be lost from its family.
    """
    try:
        group = group_of(first)
    except OSError:
        return True  # the first process has ended, and with it all others (pid_namespaces(7))
    freezer = _Freezer(group)
    end = time.monotonic() + timeout
    rounds = 0
    while time.monotonic() < end:
        with freezer.hold() if rounds >= PATIENCE else contextlib.nullcontext():
            victims = family(leader, members(group) if group else _all(), marker) - {first}
            for pid in victims - {leader} or victims:
                kill(pid)
        if not victims:
            return True
        rounds += 1
        time.sleep(0.002)
    return False


def _all() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}
