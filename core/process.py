"""What every daemon does: be the only one, have children, wait for its end, keep out of the garbage collector's way."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from weenv.core.errors import ConfigError

if TYPE_CHECKING:
    import asyncio

_ASKED: Final = 0.2
"""Seconds for which a lock is tried for in any case: whoever asks for its holder (:func:`holder_of`) has it for a moment."""
_AGAIN: Final = 0.02
"""Seconds between attempts."""


@contextlib.contextmanager
def only_instance(root: str, what: str, name: str = "lock", *, patience: float = 0.0) -> Iterator[None]:
    """Hold ``<root>/<name>``. Raises :class:`ConfigError` where another process does; ``what`` is what it is called then.

    ``patience`` is how many seconds it is waited for: a process that is ending may hold it for a moment longer.
    """
    end = time.monotonic() + max(patience, _ASKED)
    os.makedirs(root, mode=0o711, exist_ok=True)
    fd = os.open(os.path.join(root, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() < end:
                    time.sleep(_AGAIN)
                    continue
                holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                raise ConfigError(
                    f"another {what} (pid {holder or 'unknown'}) serves {root}", hint="stop it, or choose another root"
                ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def try_lock(path: str) -> int | None:
    """A descriptor that holds the lock file ``path``, or None where another has it; only its holder may remove the file.

    Raises OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return None


def holder_of(root: str, name: str = "lock") -> tuple[bool, int]:
    """Whether a process holds ``<root>/<name>``, and its process id, 0 where that cannot be told. Raises OSError."""
    try:
        fd = os.open(os.path.join(root, name), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False, 0
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(fd, 32, 0).strip()
            return True, int(text) if text.isdigit() else 0
        return False, 0
    finally:
        os.close(fd)


def fork() -> tuple[int, int]:
    """fork(2): the child's id and a descriptor of it (pidfd_open(2)); twice 0 in the child. For a process with one thread.

    Raises OSError, where there is no child then.
    """
    spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)  # whose place the child's takes: there may be no other
    try:
        pid = os.fork()
    finally:
        os.close(spare)
    if pid == 0:
        return 0, 0
    try:
        return pid, os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def oom_score(wanted: str) -> str:
    """Set how readily the kernel ends this process when memory runs out (proc_pid_oom_score_adj(5)); what it was before."""
    try:
        with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
            before = file.read().strip()
            file.seek(0)
            file.write(wanted)
    except OSError:  # not root
        return wanted
    return before


def outlive() -> None:
    """For a process that keeps mounts: it ends with these, not with a terminal or a unit, and last where memory runs out."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    oom_score("-900")


def settle() -> None:
    """Take modules and tables out of garbage collection, which stops everybody each time it goes through them.

    For a process that does nothing but serve; called when it is ready.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """Within the block SIGTERM and SIGINT set the event. To be entered before anybody can know that this daemon is there:
    who is told to end while it begins ends as it should, too. The second signal ends the process as signals do."""
    import asyncio  # which the small process of weenv serve does without

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    installed: list[int] = []

    def uninstall() -> None:
        while installed:
            loop.remove_signal_handler(installed.pop())

    def stopped() -> None:
        stop.set()
        uninstall()

    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread: tests cancel instead
            loop.add_signal_handler(number, stopped)
            installed.append(number)
    try:
        yield stop
    finally:
        uninstall()
