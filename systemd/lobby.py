"""Where gRPC clients wait while there is no server yet: accepted, greeted, and given to the server once it is there.

A listening socket that somebody holds is not enough for containerd: grpc-go gives up a connection on which the server has not
said anything within a second, and then fails every request for another one. A daemon takes about that long to start. So
whoever holds its socket meanwhile accepts, says what an HTTP/2 server begins with, and reads nothing. That is ``weenv serve``
(:mod:`weenv.systemd.supervisor`), or, where systemd holds the socket, the new daemon itself as the first thing that it does
(:func:`attended`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

SETTINGS: Final = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""An empty SETTINGS frame, with which an HTTP/2 server begins (RFC 9113, 3.4); more of them may follow at any time."""
MOST: Final = 128
"""Connections greeted and not given to a server yet; further ones wait to be accepted."""
_PAUSE: Final = 0.2
"""Seconds until it is looked again whether there is room: grpc-go waits for a second."""
_SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""What accept(2) says where the machine has no room, and the connection stays in the queue."""


class Lobby:
    """Those who wait at ``listener``, which is made non-blocking; each is told ``greeting``.

    Whoever has one calls :meth:`open` with what it polls by, then, again and again, :meth:`tend`, polls for no longer than
    :meth:`timeout`, and calls :meth:`admit` where the listener has something; :meth:`shut` in the end.
    """

    def __init__(self, listener: socket.socket, greeting: bytes = SETTINGS) -> None:
        self.listener = listener
        self.waiting: list[socket.socket] = []
        self._greeting = greeting
        self._poll: select.poll | None = None
        self._due: float | None = None
        listener.setblocking(False)

    def open(self, poll: select.poll) -> None:
        """Have the listener polled for by ``poll``, unless it is."""
        if self._poll is None:
            self._poll = poll
            poll.register(self.listener, select.POLLIN)

    def shut(self) -> None:
        """No longer."""
        if self._poll is not None and self._due is None:
            self._poll.unregister(self.listener)
        self._poll = self._due = None

    def _pause(self) -> None:
        """There is no room: whoever comes waits to be accepted, and the listener would have us look all the time."""
        if self._poll is not None and self._due is None:
            self._poll.unregister(self.listener)
            self._due = time.monotonic() + _PAUSE

    def tend(self) -> None:
        """Look, where that is due, whether there is room again."""
        if self._poll is None or self._due is None or time.monotonic() < self._due:
            return
        self._drop_gone()
        self._due = time.monotonic() + _PAUSE
        if len(self.waiting) < MOST:
            self._due = None
            self._poll.register(self.listener, select.POLLIN)

    def timeout(self) -> float | None:
        """Milliseconds until :meth:`tend` has something to do; None where it has not."""
        return None if self._due is None else max(0.0, self._due - time.monotonic()) * 1000 + 1

    def admit(self) -> None:
        """Accept one, if there is one, and greet it."""
        try:
            connection, _ = self.listener.accept()
        except OSError as error:
            if error.errno in _SHORT:
                self._pause()
            return  # or a server took it
        connection.setblocking(False)
        try:
            connection.send(self._greeting)
        except OSError:
            connection.close()  # it is gone again
            return
        self.waiting.append(connection)
        if len(self.waiting) >= MOST:
            self._drop_gone()
            if len(self.waiting) >= MOST:
                self._pause()

    def _drop_gone(self) -> None:
        """Close those whose other end is closed: who waits gives up after a while, and comes again."""
        poll = select.poll()
        for connection in self.waiting:
            poll.register(connection, 0)
        gone = {fd for fd, _ in poll.poll(0)}
        for connection in [one for one in self.waiting if one.fileno() in gone]:
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
