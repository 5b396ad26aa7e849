"""A log that nobody ever waits for.

Serving must go on while the log cannot be written, above all when its file lies on the disk that is full, or on a layer that
this very process serves. So records go through a queue to a thread of their own, and are dropped while that one hangs.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import queue
import sys
from collections.abc import Iterator
from typing import Final

_QUEUE: Final = 10_000
"""Records kept while the log hangs."""


class _Droppable(logging.handlers.QueueHandler):
    """Hands records to the thread that writes them, or drops them."""

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue ``record``, or drop it."""
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


class _Stderr(logging.Handler):
    """Writes to descriptor 2 without any lock of Python's: the end of the process would wait for a lock held by a thread
    that hangs in a write (logging.shutdown and the flush of sys.stderr do). Only the listener's thread uses it.
    """

    def createLock(self) -> None:  # noqa: N802
        """No lock: see above."""
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Filter and write; the base class takes the lock that is not there (from Python 3.13 on without looking)."""
        wanted = bool(self.filter(record))
        if wanted:
            self.emit(record)
        return wanted

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; a log that is gone is no error."""
        with contextlib.suppress(OSError):
            os.write(2, (self.format(record) + "\n").encode("utf-8", "backslashreplace"))


def _writer(handler: logging.Handler) -> logging.Handler:
    if type(handler) is not logging.StreamHandler or handler.stream is not sys.stderr:
        return handler
    writer = _Stderr(handler.level)
    writer.setFormatter(handler.formatter)
    return writer


@contextlib.contextmanager
def detached_log() -> Iterator[None]:
    """Within the block, no thread ever waits for the log to be written."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    records: queue.Queue[logging.LogRecord] = queue.Queue(_QUEUE)
    listener = logging.handlers.QueueListener(records, *map(_writer, handlers))
    listener.start()
    thread = listener._thread
    root.handlers[:] = [_Droppable(records)]
    try:
        yield
    finally:
        root.handlers[:] = handlers
        # A hanging log must not keep the process from ending either: ask its thread to end, and wait for a moment only.
        with contextlib.suppress(queue.Full):
            listener.enqueue_sentinel()
        if thread is not None:
            thread.join(1.0)
