"""Fields of /proc/PID/stat, against what the kernel says elsewhere."""

from __future__ import annotations

import os
import select
import signal
import time
import uuid

import pytest

from weenv.core import procfs


def test_this_process() -> None:
    found = procfs.stat(os.getpid())
    assert (found.state, found.parent, found.session) == ("R", os.getppid(), os.getsid(0))
    assert not found.dead and not found.ending
    ticks = time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
    assert 0 < found.start <= ticks


def test_a_name_that_looks_like_fields() -> None:
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        with open("/proc/self/comm", "w") as file:
            file.write("a) Z 1 (b")
        os.write(theirs, b"x")
        while True:
            signal.pause()
    try:
        os.read(ours, 1)
        found = procfs.stat(pid)
        assert found.parent == os.getpid() and not found.dead and found.start >= procfs.stat(os.getpid()).start
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ours)
        os.close(theirs)


def test_one_that_has_ended() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    handle = os.pidfd_open(pid)
    try:
        assert select.select([handle], [], [], 20)[0]
        assert procfs.stat(pid).dead and procfs.stat(pid).ending
    finally:
        os.close(handle)
        os.waitpid(pid, 0)
    with pytest.raises(OSError):
        procfs.stat(pid)


def test_the_boot() -> None:
    assert str(uuid.UUID(procfs.boot_id())) == procfs.boot_id()
