"""The kernel's own word reaches the event loop: real triggers, with the window that needs no privilege; limits that are met."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import subprocess
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from weenv.plugin.nri import wake
from weenv.plugin.nri.cgroups import Paths, Reader

ROOT = "/sys/fs/cgroup"
UNIFIED = next((path for path in (ROOT, f"{ROOT}/unified") if os.path.exists(f"{path}/cgroup.procs")), "")
V2 = os.path.exists(f"{ROOT}/cgroup.controllers")
WITHIN = 60
"""Seconds that the kernel's word may take on a machine that is busy."""


class Group(Reader):
    """Only what tells of a group in the hierarchy of one controller, or in the unified one, whoever has the controllers."""

    def __init__(self, path: str, *, controller: str = "") -> None:
        memory, pids = (path if controller == name else "" for name in ("memory", "pids"))
        self.paths = Paths("", "", memory, "" if controller else path, False, controller != "memory", pids)


class Told:
    """What the kernel has said; an environment whose processes are followed."""

    def __init__(self, reader: Reader) -> None:
        self.met: list[bool] = []
        self._new = asyncio.Event()
        self.triggers = wake.Triggers(self._told)
        bounds = SimpleNamespace(pids=object() if reader.paths.pids else None)
        self.env: Any = SimpleNamespace(reader=reader, triggers=[], spent=[], forks=None, state=SimpleNamespace(bounds=bounds))

    def _told(self, _env: object, met: bool) -> None:
        self.met.append(met)
        self._new.set()

    async def wait(self) -> None:
        """For the next word."""
        await asyncio.wait_for(self._new.wait(), WITHIN)
        self._new.clear()


def in_group(path: str, then: str) -> subprocess.Popen[bytes]:
    """A shell in a group, which goes on when a line is written to it."""
    script = f"echo $$ > {path}/cgroup.procs; echo there; read go; {then}"
    process = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None and process.stdout.readline() == b"there\n"
    return process


def go(process: subprocess.Popen[bytes]) -> None:
    """Let it go on."""
    assert process.stdin is not None
    process.stdin.write(b"go\n")
    process.stdin.flush()


@pytest.fixture
def threads() -> Iterator[None]:
    """No thread is left behind."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


async def test_who_waits_for_a_cpu_is_told_within_the_window(monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    path = f"{UNIFIED}/weenv-wake-{os.getpid()}"
    if not UNIFIED or not os.path.exists("/proc/pressure/cpu"):
        pytest.skip("this kernel has no pressure files")
    monkeypatch.setattr(wake, "WINDOW", 2_000_000)
    monkeypatch.setattr(wake, "STALLS", {"cpu": 50_000})
    os.mkdir(path)
    told = Told(Group(path))
    # More than there are CPUs, so that somebody waits whatever else goes on.
    burning = [in_group(path, "while :; do :; done") for _ in range((os.cpu_count() or 1) + 2)]
    try:
        assert told.triggers.add(told.env)
        assert len(told.env.triggers) == 1
        for process in burning:
            go(process)
        for _ in range(2):  # and again, as long as it goes on
            await told.wait()
        assert not any(told.met)
    finally:
        for process in burning:
            process.kill()
            process.communicate()
        told._new.clear()
        os.rmdir(path)
        await told.wait()  # that it is gone, which is said once
        waiter = told.triggers._waiter
        async with asyncio.timeout(WITHIN):
            while waiter is not None and waiter.epoll.poll(0):
                await asyncio.sleep(0.01)
        told.triggers.remove(told.env)
        assert told.env.triggers == []
        told.triggers.close()


async def test_one_that_shows_nothing_does_not_decide_for_the_machine(monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    path = f"{UNIFIED}/weenv-first-{os.getpid()}"
    if not UNIFIED or not os.path.exists("/proc/pressure/cpu"):
        pytest.skip("this kernel has no pressure files")
    monkeypatch.setattr(wake, "WINDOW", 2_000_000)
    told = Told(Group(path))
    assert not told.triggers.add(told.env), "its group is gone"
    os.mkdir(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for left in range(4):  # descriptors: of the file, of what waits for it, and of what ends the waiting
            resource.setrlimit(resource.RLIMIT_NOFILE, (_unused(left), hard))
            try:
                assert told.triggers.possible(told.env.reader) == (left == 3)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert told.triggers.possible(told.env.reader)
    finally:
        told.triggers.remove(told.env)
        told.triggers.close()
        os.rmdir(path)


def _unused(count: int) -> int:
    """The limit of open files that leaves so many to be opened."""
    return [number for number in range(1000) if not os.path.exists(f"/proc/self/fd/{number}")][count]


def heard(fd: int) -> None:
    """Wait until the kernel has told all who listen to a file; ``fd`` is a descriptor of it."""
    poll = select.poll()
    poll.register(fd, select.POLLPRI)
    assert poll.poll(WITHIN * 1000)
    os.pread(fd, 1, 0)


class Populated(Group):
    """``cgroup.events``, which the kernel tells of as of the others, and which every machine has that has cgroup v2 at all."""

    def notices(self, kind: str) -> int | None:
        return super().notices("cgroup")


async def test_what_was_told_is_told_again_only_after_it_was_armed(threads: None) -> None:
    if not UNIFIED:
        pytest.skip("this machine has no cgroup v2")
    path = f"{UNIFIED}/weenv-wake-{os.getpid()}"
    os.mkdir(path)
    told = Told(Populated(path, controller="memory"))
    own = told.env.reader.notices("memory")
    assert own is not None
    process = None
    try:
        assert not told.triggers.add(told.env), "no pressure"
        (fd,) = told.env.triggers
        process = in_group(path, ":")
        heard(own)
        await told.wait()
        assert told.met == [True] and told.env.spent == [fd]
        go(process)
        process.communicate()
        heard(own)  # that it is empty, which is not told
        told.triggers.arm(told.env)
        assert told.env.spent == []
        process = in_group(path, ":")
        heard(own)
        await told.wait()
        assert told.met == [True, True]
    finally:
        if process is not None:
            process.communicate()
        told.triggers.remove(told.env)
        assert told.env.triggers == told.env.spent == []
        told.triggers.close()
        os.close(own)
        os.rmdir(path)


async def events_once_told(controller: str, limit: str, value: int, then: str) -> str:
    """What ``CONTROLLER.events`` of a group says when the kernel has told that somebody met its limit."""
    path = f"{ROOT}/weenv-wake-{os.getpid()}"
    os.mkdir(path)
    with open(f"{path}/{limit}", "w") as file:
        file.write(str(value))
    told = Told(Group(path, controller=controller))
    process = in_group(path, then)
    try:
        told.triggers.add(told.env)
        assert len(told.env.triggers) == 1
        go(process)
        await told.wait()
        assert told.met == [True]
        with open(f"{path}/{controller}.events") as file:
            return file.read()
    finally:
        process.kill()
        process.communicate()
        told.triggers.remove(told.env)
        told.triggers.close()
        os.rmdir(path)


@pytest.mark.skipif(not V2, reason="not every kernel tells of refused forks on cgroup v1: see test_elastic_guests")
async def test_a_refused_fork_is_told_at_once(threads: None) -> None:
    assert "max 1\n" in await events_once_told("pids", "pids.max", 1, "(:); :")


@pytest.mark.skipif(not V2, reason="memory.events is cgroup v2's: see test_elastic_guests")
async def test_memory_at_its_brake_is_told_at_once(threads: None) -> None:
    shared = "/dev/shm/weenv-wake"
    try:
        events = await events_once_told("memory", "memory.high", 8 << 20, f"exec head -c 40000000 /dev/zero > {shared}")
    finally:
        os.remove(shared)
    assert "high 0\n" not in events
