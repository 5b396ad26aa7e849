"""What is left of a task whose making was given up, as when its caller was killed while containerd waited for the shim.

containerd (v2.1.9, core/runtime/v2/task_manager.go, Create) then ends the shim; the kernel ends ``runc create`` with it
(go-runc sets PR_SET_PDEATHSIG); but the container's first process may already wait to be started, with nothing written
down anywhere yet by which the shim's own clean-up would find it. It is in its control group, which nobody but we use.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time

from weenv.environment.processes import ROOT, kill, members

RUNTIME_ROOT = "/run/containerd/runc"
"""Where the runc shim keeps its containers, below it one directory for each namespace (process/init.go, RuncRoot)."""


def _arguments(pid: str) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(1 << 16).split(b"\0")[:-1]
    except OSError:
        return []


def _shims(container: str) -> list[bytes]:
    """The namespaces of the shims of a container, those of other containerds too; ``-`` for a runtime at work on it."""
    name = container.encode()
    found = []
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or name not in (words := _arguments(pid)):
            continue
        if words[words.index(name) - 1] == b"-id" and b"-namespace" in words[:-1]:
            found.append(words[words.index(b"-namespace") + 1])
        elif words[-1] == name and (b"create" in words or b"delete" in words) and b"--root" in words:
            found.append(b"-")
    return found


def makers(namespace: str, container: str) -> bool:
    """True while a shim of the container, or a runtime called by one, is at work. Blocking."""
    return bool({namespace.encode(), b"-"} & set(_shims(container)))


def _groups(path: str) -> list[str]:
    """The directories of a control group in all hierarchies there are."""
    with os.scandir(ROOT) as entries:
        roots = [ROOT, *(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))]
    return [found for root in roots if os.path.isdir(found := root + path)]


def end(namespace: str, container: str, group: str, *, timeout: float = 10.0) -> None:
    """Kill what is in the control group ``group`` and remove it, and what the runtime keeps. Blocking.

    Nothing is done while any containerd of this machine has a container of that name.
    """
    if _shims(container):
        return
    until = time.monotonic() + timeout
    while victims := set[int]().union(*map(members, _groups(group))):
        for pid in victims:
            kill(pid)
        if time.monotonic() > until:
            return
        time.sleep(0.002)
    for found in _groups(group):
        for folder, _, _ in os.walk(found, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
    shutil.rmtree(os.path.join(RUNTIME_ROOT, namespace, container), ignore_errors=True)
