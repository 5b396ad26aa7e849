"""Accepting connections where the machine may have no room for another one: nobody dies of it, and nobody spins.

accept(2) fails then and leaves the connection in its queue, so whoever polls is told at once that somebody waits. What is to be
done is to look away for a moment. :class:`Entrance` is for loops of our own; asyncio's servers do that by themselves, and
complain of it as often as they can, which :func:`weenv.core.aio.expect_many` bounds.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import time
from typing import Final

log = logging.getLogger(__name__)

PAUSE: Final = 0.2
"""Seconds until it is looked again whether there is room: grpc-go gives a server that says nothing one second."""
_SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""What accept(2) says where the process or the machine has no room, and the connection stays in the queue."""
_COMPLAIN: Final = 300.0
"""Seconds between log lines of one process."""

_told: float = -_COMPLAIN


def is_short(error: object) -> bool:
    """Whether that is an error of accept(2) that goes away, and comes back at once where it is tried again at once."""
    return isinstance(error, OSError) and error.errno in _SHORT


def complain(error: BaseException) -> None:
    """Say, unless that was said a moment ago, that connections have to wait for want of ``error``."""
    global _told
    now = time.monotonic()
    if now >= _told + _COMPLAIN:
        _told = now
        text = (error.strerror if isinstance(error, OSError) else None) or str(error)
        hint = "they wait; raise LimitNOFILE= of the unit" if getattr(error, "errno", 0) == errno.EMFILE else "they wait"
        log.error("no more connections can be accepted: %s", text, extra={"hint": hint})


class Entrance:
    """``listener``, which is made non-blocking, in somebody's poll loop.

    Whoever has one calls :meth:`open` with what it polls by, then, again and again, :meth:`tend`, polls for no longer than
    :meth:`timeout`, and calls :meth:`accept` where the listener has something; :meth:`shut` in the end.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self._poll: select.poll | select.epoll | None = None
        self._due: float | None = None
        listener.setblocking(False)

    def open(self, poll: select.poll | select.epoll) -> None:
        """Have the listener polled for by ``poll``, unless it is."""
        if self._poll is None:
            self._poll = poll
            poll.register(self.listener, select.POLLIN)

    def shut(self) -> None:
        """No longer."""
        if self._poll is not None and self._due is None:
            self._poll.unregister(self.listener)
        self._poll = self._due = None

    def rest(self) -> None:
        """There is no room: whoever comes waits to be accepted, and the listener would have us look all the time."""
        if self._poll is not None and self._due is None:
            self._poll.unregister(self.listener)
            self._due = time.monotonic() + PAUSE

    def has_room(self) -> bool:
        """Asked after a rest, which goes on where there is none."""
        return True

    def tend(self) -> None:
        """Look, where that is due, whether there is room again."""
        if self._poll is None or self._due is None or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + PAUSE
        if self.has_room():
            self._due = None
            self._poll.register(self.listener, select.POLLIN)

    def timeout(self) -> float | None:
        """Milliseconds until :meth:`tend` has something to do; None where it has not."""
        return None if self._due is None else max(0.0, self._due - time.monotonic()) * 1000 + 1

    def accept(self) -> socket.socket | None:
        """Who has come; None where nobody has, or there is no room."""
        try:
            return self.listener.accept()[0]
        except OSError as error:
            if is_short(error):
                complain(error)
                self.rest()
            return None  # or another process took it
