"""Directories for active snapshots, made ahead.

A snapshot's directory is three mkdir(2), which on a busy disk take half a millisecond: more than the rest of a Prepare.
So a thread keeps some ready, under ids that were reserved for them. It makes more in a pause between bursts: beside
one it would take turns at the interpreter's lock with every answer. A directory that no row claims is a stray, which the
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

_PAUSE = 0.005
"""Seconds without a call after which more are made, while there still are some."""


def make_directory(home: str) -> None:
    """One snapshot's directory: ``fs`` and ``work`` with the modes that containerd's overlayfs snapshotter gives them.

    The modes are set, not left to mkdir(2): the umask is the process's, and another thread may have it changed for a moment
    while it binds a socket.
    """
    for path, mode in ((home, 0o700), (home + "/fs", 0o755), (home + "/work", 0o711)):
        os.mkdir(path, mode)
        os.chmod(path, mode)


class SpareDirectories:
    """Keeps up to ``count`` directories below ``directory`` ready; ``reserve`` gives ids. Belongs to one event loop."""

    def __init__(self, directory: str, reserve: Callable[[], int], count: int) -> None:
        self._directory = directory
        self._reserve = reserve
        self._count = count
        self._ready: deque[int] = deque()
        self._filling = False
        self._taken = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spares")

    def __len__(self) -> int:
        return len(self._ready)

    def close(self) -> None:
        """Stop making more."""
        self._count = 0
        if self._timer is not None:
            self._timer.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def take(self) -> int | None:
        """The id of a directory that is ready, or None; more are made in the background."""
        number = self._ready.popleft() if self._ready else None
        if not self._filling and len(self._ready) <= self._count * 3 // 4:
            loop = asyncio.get_running_loop()
            self._taken = loop.time()
            if len(self._ready) <= self._count // 4:
                self.fill()
            elif self._timer is None:
                self._timer = loop.call_later(_PAUSE, self._paused)
        return number

    def give_back(self, number: int) -> None:
        """A directory that was taken and is as it was."""
        self._ready.append(number)

    def _paused(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        if self._filling or not self._count:
            return
        if loop.time() - self._taken < _PAUSE:
            self._timer = loop.call_later(_PAUSE, self._paused)
        else:
            self.fill()

    def fill(self) -> None:
        """Make what is missing, in the thread."""
        ids = [self._reserve() for _ in range(self._count - len(self._ready))]
        if ids:
            self._filling = True
            made = asyncio.get_running_loop().run_in_executor(self._thread, self._make, ids)
            made.add_done_callback(self._made)

    def _make(self, ids: list[int]) -> None:
        try:
            for number in ids:
                if not self._count:
                    return
                make_directory(f"{self._directory}/{number}")
                self._ready.append(number)  # at once: a burst may be waiting for it
        except OSError as error:  # a full disk: whoever needs a directory now is told so
            log.warning("cannot make directories ahead: %s", error.strerror)

    def _made(self, _future: asyncio.Future[None]) -> None:
        self._filling = False
