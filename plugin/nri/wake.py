"""What the kernel tells of all environments, behind one descriptor, so that it wakes us instead of us asking it.

**Pressure.** ``some <stall us> <window us>`` written to a pressure file makes its descriptor have POLLPRI as soon as anybody in
the group has waited for so long within the window (Documentation/accounting/psi.rst). Windows below 2 s need CAP_SYS_RESOURCE;
without it, a trigger comes later than the next sample would, and is of no use here.

**Limits that are met.** ``memory.events`` of cgroup v2 has POLLPRI when ``memory.high`` or ``memory.max`` was met or a process
killed, ``pids.events`` when a fork was refused: at once, at most every 10 ms (kernel/cgroup/cgroup.c, cgroup_file_notify), to
anybody who may read it. That goes on without end where page cache fills a limit, so each descriptor tells once, and again after
it was armed anew.

A thread waits for both. The event loop's own selector cannot: it knows no POLLPRI, and an epoll within it sees nothing, since
asking a pressure file whether it has an event takes the event (kernel/sched/psi.c, psi_trigger_poll), and the outer one asks
first. A group that is removed has POLLERR for ever; edge-triggered, each of its descriptors says so once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
from collections.abc import Callable

from weenv.plugin.nri.cgroups import CgroupGone, CgroupUnreadable, Reader
from weenv.plugin.nri.managed import Env

WINDOW = 500_000
"""Microseconds, the least that the kernel takes; it looks at the stall ten times within it."""
STALLS = {"cpu": 25_000, "memory": 10_000}
"""Microseconds of waiting that wake us: one throttled period of 100 ms at a quarter of a core waits for 75 ms; a page read
again takes less than one."""
_PRESSURE = select.EPOLLPRI | select.EPOLLET
_LIMIT = select.EPOLLPRI | select.EPOLLONESHOT


class Triggers:
    """Calls ``told(env, met)`` from the event loop: it waits for something (at most once per window and kind), or, ``met``, a
    limit of it was met (once until :meth:`arm`)."""

    def __init__(self, told: Callable[[Env, bool], None]) -> None:
        self._told = told
        self._waiter: _Waiter | None = None
        self._envs: dict[int, tuple[Env, bool]] = {}
        self._possible: bool | None = None

    def possible(self, reader: Reader) -> bool:
        """Whether this machine gives triggers that are faster than sampling; found out with the first environment that
        shows it.

        One whose group is gone, or for which there is no descriptor left, shows nothing, and has none.
        """
        if self._possible is None:
            try:
                fd = reader.trigger("cpu", STALLS["cpu"], WINDOW)
            except (CgroupGone, CgroupUnreadable):
                return False
            if fd is None:
                self._possible = False
                return False
            if self._register(fd, _PRESSURE):
                self._possible = True
            self._give_up(fd)
        return self._possible is True

    def _pressure(self, reader: Reader, kind: str) -> int | None:
        try:
            return reader.trigger(kind, STALLS[kind], WINDOW)
        except (CgroupGone, CgroupUnreadable):
            return None

    def _register(self, fd: int, events: int) -> bool:
        try:
            if self._waiter is None:
                self._waiter = _Waiter(asyncio.get_running_loop(), self._ready)
            self._waiter.epoll.register(fd, events)
        except OSError:  # EPERM: no file that can be waited for; or as many are as may be
            return False
        return True

    def add(self, env: Env) -> bool:
        """Have the kernel tell of an environment, as far as it does; whether that is all that the one at rest could need.

        All is pressure on CPU and on memory, and limits that are met: of memory where it is on cgroup v2 (v1 tells of none), of
        processes where those are followed.
        """
        reader, possible = env.reader, self.possible(env.reader)
        waits = [self._take(env, self._pressure(reader, kind), met=False) for kind in STALLS if possible]
        hit = self._take(env, reader.notices("memory"), met=True) or reader.paths.memory_v1
        self.count(env)
        return possible and all(waits) and hit

    def count(self, env: Env) -> None:
        """Have the kernel tell of refused forks of an environment, where its processes are followed and it does not yet; or no
        longer, where they are not."""
        followed = env.state.bounds.pids is not None
        if followed and env.forks is None:
            fd = env.reader.notices("pids")
            env.forks = fd if self._take(env, fd, met=True) else None
        elif not followed and env.forks is not None:
            self._give_up(env.forks)
            env.triggers.remove(env.forks)
            env.spent = [fd for fd in env.spent if fd != env.forks]
            env.forks = None

    def _take(self, env: Env, fd: int | None, *, met: bool) -> bool:
        if fd is None:
            return False
        self._envs[fd] = (env, met)
        if self._register(fd, _LIMIT if met else _PRESSURE):
            env.triggers.append(fd)
            return True
        self._give_up(fd)
        return False

    def arm(self, env: Env) -> None:
        """Be told again of limits that are met; those met until now are no news."""
        fds, env.spent = env.spent, []
        for fd in fds:
            with contextlib.suppress(OSError):  # ENODEV: the group is gone, its end is told by others
                os.pread(fd, 1, 0)
                if self._waiter is not None:
                    self._waiter.epoll.modify(fd, _LIMIT)

    def remove(self, env: Env) -> None:
        """No longer be told of an environment."""
        fds, env.triggers = env.triggers, []
        env.spent, env.forks = [], None
        for fd in fds:
            self._give_up(fd)

    def _give_up(self, fd: int) -> None:
        self._envs.pop(fd, None)
        if self._waiter is not None:
            self._waiter.forget(fd)
        os.close(fd)

    def _ready(self, fds: list[int]) -> None:
        for fd in fds:
            env, met = self._envs.get(fd, (None, False))
            if env is not None:  # one that came meanwhile in the place of another is looked at once too often
                if met and fd not in env.spent:
                    env.spent.append(fd)
                self._told(env, met)

    def close(self) -> None:
        """End the thread; descriptors of environments are closed by :meth:`remove`."""
        if self._waiter is not None:
            self._waiter.close()
            self._waiter = None


class _Waiter:
    """The thread. ``ready`` is called in the loop with the descriptors that have something to say."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ready: Callable[[list[int]], None]) -> None:
        self.epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._loop = loop
        self._ready = ready
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.epoll.register(self._stop, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="pressure", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            found = [fd for fd, _ in self.epoll.poll(maxevents=256)]
            if self._stop in found:
                return
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._ready, found)

    def forget(self, fd: int) -> None:
        """No longer wait for a descriptor; one that is not waited for is no error."""
        with contextlib.suppress(OSError, ValueError):
            self.epoll.unregister(fd)

    def close(self) -> None:
        """End the thread."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self.epoll.close()
        os.close(self._stop)
