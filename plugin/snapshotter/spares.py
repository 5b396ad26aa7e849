"""Directories for active snapshots, made ahead.

A snapshot's directory is three mkdir(2), which on a busy disk take half a millisecond: more than the rest of a Prepare.
So a thread keeps some ready, under ids that were reserved for them. A directory that no row claims is a stray, which the
next start removes, so a crash needs nothing here.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger(__name__)


def make_directory(home: str) -> None:
    """One snapshot's directory: ``fs`` and ``work`` with the modes that containerd's overlayfs snapshotter gives them."""
    os.mkdir(home, 0o700)
    os.mkdir(home + "/fs", 0o755)
    os.mkdir(home + "/work", 0o711)


class SpareDirectories:
    """Keeps up to ``count`` directories below ``directory`` ready; ``reserve`` gives ids. Belongs to one event loop."""

    def __init__(self, directory: str, reserve: Callable[[], int], count: int) -> None:
        self._directory = directory
        self._reserve = reserve
        self._count = count
        self._ready: deque[int] = deque()
        self._filling = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spares")

    def __len__(self) -> int:
        return len(self._ready)

    def close(self) -> None:
        """Stop making more."""
        self._count = 0
        self._thread.shutdown(wait=True, cancel_futures=True)

    def take(self) -> int | None:
        """The id of a directory that is ready, or None; more are made in the background."""
        number = self._ready.popleft() if self._ready else None
        if not self._filling and len(self._ready) <= self._count // 2:
            self.fill()
        return number

    def fill(self) -> None:
        """Make what is missing, in the thread."""
        ids = [self._reserve() for _ in range(self._count - len(self._ready))]
        if ids:
            self._filling = True
            made = asyncio.get_running_loop().run_in_executor(self._thread, self._make, ids)
            made.add_done_callback(self._made)

    def _make(self, ids: list[int]) -> list[int]:
        done: list[int] = []
        try:
            for number in ids:
                make_directory(f"{self._directory}/{number}")
                done.append(number)
        except OSError as error:  # a full disk: whoever needs a directory now is told so
            log.warning("cannot make directories ahead: %s", error.strerror)
        return done

    def _made(self, future: asyncio.Future[list[int]]) -> None:
        self._filling = False
        if not future.cancelled() and future.exception() is None:
            self._ready.extend(future.result())
