"""Pressure triggers of all environments behind one descriptor, so that the kernel wakes us instead of us asking it.

``some <stall us> <window us>`` written to a pressure file makes its descriptor have POLLPRI as soon as anybody in the group
has waited for so long within the window (Documentation/accounting/psi.rst). Windows below 2 s need CAP_SYS_RESOURCE; without
it, a trigger comes later than the next sample would, and is of no use here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
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
        self._epoll: select.epoll | None = None
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
        if self._epoll is None:
            self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
            asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._ready)
        try:
            self._epoll.register(fd, select.EPOLLPRI)
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
            if self._register(fd):
                self._envs[fd] = env
                fds.append(fd)
            else:
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
        if self._epoll is not None:
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(fd)

    def _ready(self) -> None:
        assert self._epoll is not None
        for fd, events in self._epoll.poll(0, 256):
            env = self._envs.get(fd)
            if env is None:
                continue
            if events & select.EPOLLERR:  # the group is gone: it would be reported for ever
                self._drop(fd)
            self._pressed(env)

    def close(self) -> None:
        """Close the descriptor behind which all are; their own are closed by :meth:`remove`."""
        if self._epoll is not None:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
