"""What is left of a task whose making was given up, as when its caller was killed while containerd waited for the shim.

containerd (v2.1.9, core/runtime/v2/task_manager.go, Create) then wants the shim to delete the task and to end, for 5
seconds (shim.go, cleanupTimeout), and forgets the shim. That may leave

- a shim that runs: killed as it was about to say where it listens, or asked to end in vain, because a container made
  meanwhile has to have its streams read to their end first, for up to 10 s, which they never are (cmd/containerd-shim-
  runc-v2: process/init.go, delete; task/service.go, Shutdown). Its first process waits for ever to be started;
- a first process without a shim: the kernel ends ``runc create`` with that (go-runc sets PR_SET_PDEATHSIG), not what it
  has made, with nothing written down anywhere yet by which the shim's own clean-up would find it;
- what the runtime has written down, by which the next of that name is refused.

Who is killed while containerd deletes a task may leave its shim, too. A first process is in its control group, which
nobody but we use.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from weenv.environment.processes import ROOT, kill, members

RUNTIME_ROOT = "/run/containerd/runc"
"""Where the runc shim keeps its containers, below it one directory for each namespace (process/init.go, RuncRoot)."""

_POLL = 0.005


class _Shim(NamedTuple):
    """A shim of a container, or a runtime called by one."""

    pid: int
    arguments: tuple[bytes, ...]

    @property
    def namespace(self) -> bytes:
        """Its containerd's namespace; empty for a runtime, which does not say."""
        return _value(self.arguments, b"-namespace")

    @property
    def passing(self) -> bool:
        """It ends by itself: a runtime at work, or a shim's program called to clean up."""
        return not self.namespace or self.arguments[-1] == b"delete"

    def serves(self, address: str) -> bool:
        """Whether it belongs to the containerd that listens there."""
        theirs = os.fsdecode(_value(self.arguments, b"-address"))
        try:
            return theirs == address or os.path.samefile(theirs, address)
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL it, and nobody who has got its number since."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            handle = os.pidfd_open(self.pid)
            try:
                if _arguments(self.pid) == self.arguments:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)


def _value(arguments: Sequence[bytes], option: bytes) -> bytes:
    return next((value for name, value in pairwise(arguments) if name == option), b"")


def _arguments(pid: int) -> tuple[bytes, ...]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return tuple(file.read(1 << 16).split(b"\0")[:-1])
    except OSError:
        return ()


def _shims(container: str) -> list[_Shim]:
    """The shims of a container, those of other containerds too, and runtimes at work on it."""
    name = container.encode()
    found = []
    for text in os.listdir("/proc"):
        if not text.isdigit() or name not in (words := _arguments(int(text))):
            continue
        shim = _value(words, b"-id") == name and b"-namespace" in words
        if shim or (words[-1] == name and (b"create" in words or b"delete" in words) and b"--root" in words):
            found.append(_Shim(int(text), words))
    return found


def makers(namespace: str, container: str) -> bool:
    """True while a shim of the container, or a runtime called by one, is at work. Blocking."""
    return any(shim.namespace in (namespace.encode(), b"") for shim in _shims(container))


def _groups(path: str) -> list[str]:
    """The directories of a control group in all hierarchies there are."""
    with os.scandir(ROOT) as entries:
        roots = [ROOT, *(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))]
    return [found for root in roots if os.path.isdir(found := root + path)]


def end(address: str, namespace: str, container: str, group: str, *, timeout: float = 10.0) -> bool:
    """End a container of which the containerd at ``address`` has no task: kill its shim and what is in the control group
    ``group``, remove that, and what the runtime keeps. False where something of it is still there after ``timeout`` seconds
    for each. Blocking.

    Nothing is done while another containerd of this machine, or another namespace, has a container of that name.
    """
    until = time.monotonic() + timeout
    while shims := _shims(container):
        for shim in shims:
            if shim.passing:
                continue
            if shim.namespace != namespace.encode() or not shim.serves(address):
                return True
            shim.kill()
        if time.monotonic() > until:
            return False
        time.sleep(_POLL)
    until = time.monotonic() + timeout
    while victims := set[int]().union(*map(members, _groups(group))):
        for pid in victims:
            kill(pid)
        if time.monotonic() > until:
            return False
        time.sleep(_POLL)
    for found in _groups(group):
        for folder, _, _ in os.walk(found, topdown=False):
            with contextlib.suppress(OSError):  # not empty: it is looked at again below
                os.rmdir(folder)
    shutil.rmtree(os.path.join(RUNTIME_ROOT, namespace, container), ignore_errors=True)
    return not _groups(group)
