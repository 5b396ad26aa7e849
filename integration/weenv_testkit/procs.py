"""Processes and mounts that a session made, and that it takes away again: by pid, by path, never by name."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


class Failed(Exception):
    """A program of the kit failed; the text holds the end of its log."""


def wait_until(what: str, check: Callable[[], T | None], timeout: float = 60, interval: float = 0.02) -> T:
    """Call ``check`` until it returns something true; that value. Raises Failed after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > end:
            raise Failed(f"waited {timeout:.0f} s for {what}")
        time.sleep(interval)


def text_of(log: str, errors: str = "replace") -> str:
    """What a log holds so far; empty before there is one. ``errors`` is what becomes of bytes that are no UTF-8."""
    try:
        with open(log, errors=errors) as file:
            return file.read()
    except FileNotFoundError:
        return ""


def connects(path: str) -> bool:
    """True where something listens on the unix socket ``path``."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def clean_environment() -> dict[str, str]:
    """This process's variables, without those that are the tests' own."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("WEENV_", "PYTEST_"))}


class Process:
    """A child with its output in a log file. It gets SIGTERM should this process die before :meth:`stop`.

    ``log`` is the path of the log; several processes in a row may append to the same one.
    """

    def __init__(self, name: str, argv: list[str], log: str, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        with open(log, "ab") as sink:
            # setpriv, not prctl in a preexec function: forking a process that has threads must go straight to exec.
            self._child = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", "--", *argv],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=dict(env) if env is not None else None,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def alive(self) -> bool:
        """True while it runs."""
        return self._child.poll() is None

    def log_text(self) -> str:
        """What it has written so far."""
        return text_of(self.log)

    def wait_ready(self, check: Callable[[], object], timeout: float = 60) -> None:
        """Wait for ``check``. Raises Failed with the end of the log where the process dies or the time is up."""

        def done() -> bool:
            if check():
                return True
            if not self.alive():
                raise Failed(f"{self.name} ended with {self._child.returncode}:\n{self.log_text()[-3000:]}")
            return False

        try:
            wait_until(f"{self.name} to be ready", done, timeout)
        except Failed as error:
            raise Failed(f"{error}\n{self.log_text()[-3000:]}") from None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; for SIGKILL also wait for the end."""
        with contextlib.suppress(ProcessLookupError):
            self._child.send_signal(number)
        if number == signal.SIGKILL:
            self._child.wait()

    def stop(self, timeout: float = 60) -> int:
        """SIGTERM, then SIGKILL after ``timeout`` seconds. Returns the exit status; never raises."""
        if self.alive():
            self.kill(signal.SIGTERM)
            try:
                self._child.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
        return self._child.returncode


def run(
    *argv: str,
    check: bool = True,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
    cwd: str | None = None,
) -> str:
    """Run a program to its end; its standard output as text. Raises Failed with its standard error."""
    done = subprocess.run(
        argv,
        input=stdin if stdin is not None else b"",
        capture_output=True,
        timeout=timeout,
        env=dict(env) if env is not None else None,
        cwd=cwd,
        check=False,
    )
    if check and done.returncode:
        text = (done.stderr.strip() or done.stdout.strip()).decode(errors="replace")
        raise Failed(f"{' '.join(argv)} ended with {done.returncode}: {text[-3000:]}")
    return done.stdout.decode(errors="surrogateescape")


def _cmdline(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def pids() -> list[int]:
    """All processes of this pid namespace."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def processes_of(path: str) -> dict[int, str]:
    """Processes whose command line names ``path`` (a directory made by the kit, so unique), but this one."""
    found = {pid: _cmdline(pid) for pid in pids() if pid != os.getpid()}
    return {pid: line for pid, line in found.items() if path in line}


def children_of(parents: Iterable[int]) -> set[int]:
    """All descendants of the given processes."""
    parent_of: dict[int, int] = {}
    for pid in pids():
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                parent_of[pid] = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
    found = set(parents)
    grown = True
    while grown:
        more = {pid for pid, parent in parent_of.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return found - set(parents)


def thread_states(pid: int) -> list[str]:
    """The state letters of a process's threads; none where it is gone."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{name}/stat", "rb") as file:
                found.append(file.read().rpartition(b")")[2].split()[0].decode())
    return found


def signalled(child: subprocess.Popen[bytes], number: int) -> None:
    """Send a child a signal and wait until it has taken it: of the same one sent twice it may else get one."""
    child.send_signal(number)

    def taken() -> bool:
        try:
            with open(f"/proc/{child.pid}/status") as file:
                fields = dict(line.split(":", 1) for line in file)
        except (FileNotFoundError, ProcessLookupError):
            return True
        return not int(fields["ShdPnd"], 16) >> number - 1 & 1  # pending for the whole process; proc_pid_status(5)

    wait_until("the signal to be taken", taken, interval=0.001)


def end_processes(victims: Iterable[int], timeout: float = 60) -> None:
    """SIGKILL processes of ours and wait until they are gone. Uses pidfds, so a reused pid is never hit."""
    handles = []
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    end = time.monotonic() + timeout
    for handle in handles:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    for handle in handles:
        select.select([handle], [], [], max(0.0, end - time.monotonic()))
        os.close(handle)


def mounts_under(path: str) -> list[str]:
    """Mount points at or below ``path``, the newest first."""
    found = []
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            point = line.split(b" ")[4].decode("unicode_escape").encode("latin-1").decode(errors="surrogateescape")
            if point == path or point.startswith(path.rstrip("/") + "/"):
                found.append(point)
    return found[::-1]


_libc = ctypes.CDLL(None, use_errno=True)
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8  # linux/fs.h


def unmount_under(path: str) -> list[str]:
    """Unmount everything at or below ``path``; what was there, for a report.

    The system call itself, because umount(8) looks at the mount first, which hangs on a FUSE mount without server.
    """
    found = mounts_under(path)
    for point in found:
        name = os.fsencode(point)
        if _libc.umount2(name, _UMOUNT_NOFOLLOW) != 0:
            _libc.umount2(name, _UMOUNT_NOFOLLOW | _MNT_DETACH)
    return found


class Trash:
    """Where directories go that nobody needs any more: removed by a process beside the tests, which would else wait for it.

    A node has a thousand directories, and removing them takes a second or two. ``path`` is a directory on the same disk.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._count = itertools.count()
        self._running: list[subprocess.Popen[bytes]] = []

    def take(self, directory: str) -> None:
        """Remove a directory in which nothing is mounted; its name is free at once."""
        name = str(next(self._count))
        os.rename(directory, os.path.join(self._path, name))
        # No path of the session in its command line, so it is not taken for something that a test has left.
        argv = ["nice", "rm", "-rf", "--one-file-system", "--", name]
        self._running = [child for child in self._running if child.poll() is None]
        self._running.append(subprocess.Popen(argv, cwd=self._path, stdin=subprocess.DEVNULL))

    def wait(self) -> None:
        """Until all of it is gone."""
        while self._running:
            self._running.pop().wait()


trash: Trash | None = None
"""That of this session, where it has one."""


def discard(directory: str) -> None:
    """Remove a directory, or have it removed; one that is not there is no error."""
    if trash is None or not os.path.lexists(directory):
        shutil.rmtree(directory, ignore_errors=True)
    else:
        trash.take(directory)


def open_fds(pid: int) -> dict[str, str]:
    """Descriptor number -> what it is open on, of another process; empty where it is gone."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found[name] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found
