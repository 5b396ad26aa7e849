"""Where gRPC clients wait while there is no server yet: accepted, greeted, and given to the server once it is there.

A listening socket that somebody holds is not enough for containerd: grpc-go gives up a connection on which the server has not
said anything within a second, and then fails every request for another one. A daemon takes about that long to start. So
whoever holds its socket meanwhile accepts, says what an HTTP/2 server begins with, and reads nothing. That is ``weenv serve``
(:mod:`weenv.systemd.supervisor`), or, where systemd holds the socket, the new daemon itself as the first thing that it does
(:func:`attended`).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Final

from weenv.core.accepting import Entrance

SETTINGS: Final = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""An empty SETTINGS frame, with which an HTTP/2 server begins (RFC 9113, 3.4); more of them may follow at any time."""
MOST: Final = 128
"""Connections greeted and not given to a server yet; further ones take the place of silent ones, or wait to be accepted."""


class Lobby(Entrance):
    """Those who wait at ``listener``; each is told ``greeting``. :meth:`admit` is to be called in the place of ``accept``."""

    def __init__(self, listener: socket.socket, greeting: bytes = SETTINGS) -> None:
        super().__init__(listener)
        self.waiting: list[socket.socket] = []
        self._greeting = greeting

    def has_room(self) -> bool:
        """Whether another one may come; those who have left are no hindrance, nor are those who do not say anything."""
        if len(self.waiting) >= MOST:
            self._make_room()
        return len(self.waiting) < MOST

    def admit(self) -> None:
        """Accept one, if there is one, and greet it."""
        if not self.has_room():
            self.rest()
            return
        connection = self.accept()
        if connection is None:
            return
        connection.setblocking(False)
        try:
            connection.send(self._greeting)
        except OSError:
            connection.close()  # it is gone again
            return
        self.waiting.append(connection)

    def _make_room(self) -> None:
        """Close those whose other end is closed: who waits gives up after a while, and comes again.

        Where there are none, the one that has been silent for longest: a gRPC client begins with some bytes of its own
        (RFC 9113, 3.4), whatever the server says.
        """
        poll = select.poll()
        for connection in self.waiting:
            poll.register(connection, select.POLLIN)
        found = dict(poll.poll(0))
        ended = select.POLLHUP | select.POLLERR
        leaving = [one for one in self.waiting if found.get(one.fileno(), 0) & ended]
        leaving = leaving or [one for one in self.waiting if one.fileno() not in found][:1]
        for connection in leaving:
            self.waiting.remove(connection)
            connection.close()

    def hand_over(self, channel: socket.socket | None) -> None:
        """Send those who wait over ``channel`` (SOCK_SEQPACKET, one descriptor a packet), to be had from its other end."""
        for connection in self.waiting:
            if channel is not None:
                with contextlib.suppress(OSError):  # it is dead again: the caller is told so, as of any connection
                    socket.send_fds(channel, [b"c"], [connection.fileno()])
            connection.close()
        self.waiting.clear()


def make_channel() -> tuple[socket.socket, socket.socket]:
    """Our end of a channel as :meth:`Lobby.hand_over` has it, and the server's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)


@contextlib.contextmanager
def attended(passed: dict[str, list[int]], name: str) -> Iterator[Callable[[], None]]:
    """Within the block a thread greets whoever connects to the inherited listening socket ``name``.

    ``passed`` is what :func:`weenv.systemd.notify.inherited` gave; it gets a ``<name>-waiting`` descriptor for the server of
    this process. Yields what to call once that server accepts: who waits is given to it then. Nothing is done where no socket
    was passed, or where somebody else greets.
    """
    listener = _listener(passed, name)
    if listener is None:
        yield lambda: None
        return
    ours, theirs = make_channel()
    passed[f"{name}-waiting"] = [theirs.detach()]
    with listener, ours:
        lobby = Lobby(listener)
        woken, wake = os.pipe2(os.O_CLOEXEC)
        thread = threading.Thread(target=_attend, args=(lobby, woken), name="lobby", daemon=True)
        thread.start()

        def hand_over() -> None:
            nonlocal wake
            if wake >= 0:
                os.close(wake)
                wake = -1
                thread.join()
                os.close(woken)
                lobby.hand_over(ours)

        try:
            yield hand_over
        finally:
            hand_over()


def _listener(passed: dict[str, list[int]], name: str) -> socket.socket | None:
    if f"{name}-waiting" in passed or len(passed.get(name, ())) != 1:
        return None
    try:
        found = socket.socket(fileno=os.dup(passed[name][0]))
    except OSError:  # no socket at all
        return None
    if found.type == socket.SOCK_STREAM and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return found
    found.close()
    return None


def _attend(lobby: Lobby, woken: int) -> None:
    poll = select.poll()
    lobby.open(poll)
    poll.register(woken, 0)  # POLLHUP
    while True:
        lobby.tend()
        for fd, _ in poll.poll(lobby.timeout()):
            if fd == woken:
                return
            lobby.admit()
