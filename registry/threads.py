"""Blocking work in threads that can be called off."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


class Cancelled(Exception):
    """The work was called off: raised inside the thread by whoever looks at the event."""


async def in_thread(executor: Executor | None, work: Callable[[threading.Event], T]) -> T:
    """Run ``work`` in ``executor`` (None: the loop's own). It gets an event that is set when this call is cancelled.

    A cancelled call ends when the thread has: it may be using files that the caller is about to remove.
    """
    import asyncio  # here, for those who need Cancelled only

    cancel = threading.Event()
    future = asyncio.get_running_loop().run_in_executor(executor, work, cancel)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        cancel.set()
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):  # cancelled again: there is nothing to do but wait
                await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # seen; the caller's cancellation is what counts
        raise
