"""The kernel's own word on pressure reaches the event loop: real triggers, with the window that needs no privilege."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from weenv.plugin.nri import wake
from weenv.plugin.nri.cgroups import Paths, Reader

UNIFIED = next((path for path in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified") if os.path.exists(f"{path}/cgroup.procs")), "")


class Group(Reader):
    """Only the triggers of a group that is in the unified hierarchy, whoever has the controllers."""

    def __init__(self, path: str) -> None:
        self.paths = Paths("", "", "", path, False, False)


async def test_who_waits_for_a_cpu_is_told_within_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{UNIFIED}/weenv-wake-{os.getpid()}"
    if not UNIFIED or not os.path.exists("/proc/pressure/cpu"):
        pytest.skip("this kernel has no pressure files")
    monkeypatch.setattr(wake, "WINDOW", 2_000_000)
    monkeypatch.setattr(wake, "STALLS", {"cpu": 50_000})
    threads = threading.active_count()
    os.mkdir(path)
    told = asyncio.Event()
    triggers = wake.Triggers(lambda _env: told.set())
    # More than there are CPUs, so that somebody waits whatever else goes on.
    argv = ["sh", "-c", f"echo $$ > {path}/cgroup.procs; read go; while :; do :; done"]
    burning = [subprocess.Popen(argv, stdin=subprocess.PIPE) for _ in range((os.cpu_count() or 1) + 2)]
    env: Any = SimpleNamespace(reader=Group(path), triggers=[])
    try:
        assert triggers.possible(env.reader)
        env.triggers = triggers.add(env)
        assert len(env.triggers) == 1
        for process in burning:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        for _ in range(2):  # and again, as long as it goes on
            await asyncio.wait_for(told.wait(), 60)
            told.clear()
        triggers.remove(env)
        assert env.triggers == []
    finally:
        for process in burning:
            process.kill()
            process.communicate()
        triggers.close()
        os.rmdir(path)
    assert threading.active_count() == threads
