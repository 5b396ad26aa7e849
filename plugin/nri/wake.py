"""Pressure triggers of all environments behind one descriptor, so that the kernel wakes us instead of us asking it.

``some <stall us> <window us>`` written to a pressure file makes its descriptor have POLLPRI as soon as anybody in the group
has waited for so long within the window (Documentation/accounting/psi.rst). Windows below 2 s need CAP_SYS_RESOURCE; without
it, a trigger comes later than the next sample would, and is of no use here.

A thread waits for them. The event loop's own selector cannot: it knows no POLLPRI, and an epoll within it sees nothing, since
asking a pressure file whether it has an event takes the event (kernel/sched/psi.c, psi_trigger_poll), and the outer one asks
first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
from collections.abc import Callable

from weenv.plugin.nri.cgroups import Reader
from weenv.plugin.nri.managed import Env

WINDOW = 500_000
"""Microseconds, the least that the kernel takes; it looks at the stall ten times within it."""
STALLS = {"cpu": 25_000, "memory": 10_000}
"""Microseconds of waiting that wake us: one throttled period of 100 ms at a quarter of a core waits for 75 ms; a page read
again takes less than one."""


class Triggers:
    """Calls ``pressed(env)`` from the event loop; at most once per window, kind and environment."""

    def __init__(self, pressed: Callable[[Env], None]) -> None:
        self._pressed = pressed
        self._waiter: _Waiter | None = None
        self._envs: dict[int, Env] = {}
        self._possible: bool | None = None

    def possible(self, reader: Reader) -> bool:
        """Whether this machine gives triggers that are faster than sampling; found out with the first environment."""
        if self._possible is None:
            fd = reader.trigger("cpu", STALLS["cpu"], WINDOW)
            self._possible = fd is not None and self._register(fd)
            if fd is not None:
                self._drop(fd)
                os.close(fd)
        return self._possible

    def _register(self, fd: int) -> bool:
        if self._waiter is None:
            self._waiter = _Waiter(asyncio.get_running_loop(), self._ready)
        try:
            self._waiter.epoll.register(fd, select.EPOLLPRI)
        except OSError:  # EPERM: no file that can be waited for
            return False
        return True

    def add(self, env: Env) -> list[int]:
        """Set the triggers of an environment; its descriptors, for :meth:`remove`."""
        fds = []
        for kind, stall in STALLS.items():
            fd = env.reader.trigger(kind, stall, WINDOW)
            if fd is None:
                continue
            self._envs[fd] = env
            if self._register(fd):
                fds.append(fd)
            else:
                self._drop(fd)
                os.close(fd)
        return fds

    def remove(self, env: Env) -> None:
        """Take the triggers of an environment away."""
        fds, env.triggers = env.triggers, []
        for fd in fds:
            self._drop(fd)
            os.close(fd)

    def _drop(self, fd: int) -> None:
        self._envs.pop(fd, None)
        if self._waiter is not None:
            self._waiter.forget(fd)

    def _ready(self, fds: list[int]) -> None:
        for fd in fds:
            env = self._envs.get(fd)  # one that came meanwhile in the place of another is looked at once too often
            if env is not None:
                self._pressed(env)

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
            found = []
            for fd, events in self.epoll.poll(maxevents=256):
                if fd == self._stop:
                    return
                if events & select.EPOLLERR:  # the group is gone: it would be told for ever
                    self.forget(fd)
                found.append(fd)
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
