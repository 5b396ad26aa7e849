"""Small asyncio pieces: one flight per key, background tasks that are never lost or silent, room for many."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from weenv.core.accepting import complain, is_short

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

log = logging.getLogger(__name__)

KEEP_NAME: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
"""For asyncio's unix servers: do not remove the socket's name at the end, which became the default with Python 3.13."""


class SingleFlight(Generic[K, T]):
    """Runs one coroutine per key at a time; everyone who asks meanwhile gets the same result or error.

    A caller that is cancelled leaves the flight to the others; the flight itself is cancelled when nobody waits.
    """

    def __init__(self) -> None:
        self._flights: dict[K, tuple[asyncio.Task[T], list[int]]] = {}

    async def do(self, key: K, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Join the flight of ``key``, or begin one with ``start()``."""
        entry = self._flights.get(key)
        if entry is None:
            task = asyncio.ensure_future(start())
            entry = (task, [0])
            self._flights[key] = entry
            task.add_done_callback(lambda done: self._landed(key, done))
        task, waiters = entry
        waiters[0] += 1
        try:
            return await asyncio.shield(task)
        finally:
            waiters[0] -= 1
            if waiters[0] == 0 and not task.done():
                self._flights.pop(key, None)  # whoever comes next starts anew
                task.cancel()

    def _landed(self, key: K, task: asyncio.Task[T]) -> None:
        entry = self._flights.get(key)
        if entry is not None and entry[0] is task:
            del self._flights[key]
        if not task.cancelled():
            task.exception()  # every waiter has it; this marks it as retrieved where none is left

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: K) -> bool:
        return key in self._flights


class Background:
    """Holds background tasks: keeps them referenced, logs what they raise, cancels them on close."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start ``work``; an exception in it becomes one log line."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task %s failed: %s", task.get_name(), error, exc_info=error)

    async def close(self) -> None:
        """Cancel what still runs and wait for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._tasks)


async def gather_all(*work: Awaitable[T]) -> list[T]:
    """Run ``work`` side by side; the first error cancels the rest, waits for them, and is raised itself."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def expect_many() -> None:
    """For a daemon, in its event loop: it may have as many descriptors as it is allowed to, and says once, instead of a
    hundred times a second with a traceback each, that connections wait for want of them."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.get_running_loop().set_exception_handler(_handle)


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if isinstance(error, OSError) and is_short(error) and "socket" in context:  # asyncio/selector_events.py, _accept_connection
        complain(error)
    else:
        loop.default_exception_handler(context)
