"""The FUSE plane's host: it forks a server for each mounted layer, and keeps each mount's connection to the kernel.

A server (fuseserver.py) does nothing but serve one mount: it depends on no other process of ours while its layer is complete,
waits for the next blobfs while it is not, and a fault in one costs one layer. The *host* is a small process with everything
imported that forks them, in milliseconds and with most of their memory in common. It has each connection too, so that one
whose server is killed does not end with it: the host forks another, which goes on where the last one was. Neither is a
child of a daemon's: the host is started by whoever needs it, in a session of its own, and when it ends its children live on
and look for the next one. It ends by itself when nobody is connected and no layer is served.

Protocol on the host's 0600 socket (SOCK_SEQPACKET; one JSON object a packet):

===========================================  ==========================================================================
somebody says                                answer
===========================================  ==========================================================================
``{"op": "hold"}``                           ``{"held": true}``; the host stays for as long as the connection does
``{"op": "who", "pid", "start"}``            ``{"pid": p, "start": s}`` of the process that serves now what the named one
                                             was the first to serve; p is 0 where none does
``{"op": "keep", "pid", "start", "mount"}``  ``{"kept": h}``, to a server: another is started when it dies. h is the host's
with a ``/dev/fuse`` descriptor              process id; when that has ended, the next host is to be told the same
``{"op": "serve"}``                          ``{"pid": p, "start": s}`` from the new server, which the connection then is to;
                                             s is its start time as proc_pid_stat(5) has it (field 22)
then: ``{"directory", "image", "blobs",      ``{"ready": true}`` when the image was read and checked, or ``{"error": kind,
"name"}`` with a ``/dev/fuse`` descriptor    "message": text}`` and its end
then, mounted: ``{"op": "go", "device":      ``{"serving": true}`` once the kernel was answered; the server lives on until
"MAJOR:MINOR"}``                             nothing uses the mount any more
===========================================  ==========================================================================

A connection that closes before ``go`` ends the server.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import logging
import os
import resource
import select
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from weenv.core import log as logs
from weenv.core.accepting import Entrance
from weenv.core.process import fork, outlive
from weenv.core.unixsocket import accept_trusted, bind_private
from weenv.plugin.snapshotter.planes.fuseserver import GAVE_UP, PACKET, Mounted, go_on, pack, serve_new, start_time

log = logging.getLogger(__name__)

_LINGER: Final = 1.0
"""Seconds for which a host that nobody needs stays."""
_AGAIN: Final = 200
"""Milliseconds between attempts to start servers, where the machine has no room for them."""
_YOUNG: Final = 2.0
"""Seconds."""
_DEATHS: Final = 5
"""Servers of one mount that may die young, one after another: whatever they die of would go on."""


@dataclass(slots=True)
class Kept:
    """A mount that is served, and its connection to the kernel; since when (time.monotonic) by process ``pid``, which began
    at ``start`` (0: not known), and how many before that died young."""

    mount: Mounted
    fuse: int
    pid: int
    start: int
    since: float = field(default_factory=time.monotonic)
    young: int = 0

    def used(self) -> bool:
        """Whether anybody has it mounted still: else the kernel has ended the connection (fs/fuse/dev.c, fuse_dev_poll)."""
        return not _ready(self.fuse, 0)

    def hopeless(self) -> bool:
        """Count a death; whether there were too many."""
        now = time.monotonic()
        self.young = self.young + 1 if now < self.since + _YOUNG else 0
        self.since = now
        return self.young > _DEATHS


class Host:
    """The host's loop, on a socket bound to ``path``. It has one thread, because it forks."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.poll = select.poll()
        self.clients: dict[int, socket.socket] = {}
        self.servers: dict[int, int] = {}  # pidfd -> pid
        self.kept: dict[int, Kept] = {}  # by the process that serves it
        self.orphans: list[Kept] = []
        """Those for which no process could be started."""
        self._own: list[int] = []
        self._said = ""

    def run(self) -> None:
        """Serve until nobody needs it. Raises OSError, and FileExistsError where another host serves the socket."""
        lock = os.open(self.path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FileExistsError(f"another host serves {self.path}") from error
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        with bind_private(self.path, socket.SOCK_SEQPACKET) as listener:
            listener.listen(64)
            listener.setblocking(False)
            entrance = Entrance(listener)
            entrance.open(self.poll)
            self._own = [lock, listener.fileno()]
            needed = time.monotonic()
            while (busy := self.clients or self.servers or self.orphans) or time.monotonic() < needed + _LINGER:
                if busy:
                    needed = time.monotonic()
                entrance.tend()
                self._adopt()
                waits = (entrance.timeout(), _AGAIN if self.orphans or not busy else None)
                for fd, _ in self.poll.poll(min((wait for wait in waits if wait is not None), default=None)):
                    if fd == listener.fileno():
                        self._accept(entrance)
                    elif fd in self.servers:
                        self._reap(fd)
                    elif fd in self.clients:
                        self._client(fd)
            os.unlink(self.path)

    def _accept(self, entrance: Entrance) -> None:
        client = accept_trusted(entrance)
        if client is None:
            return
        client.settimeout(30.0)
        self.clients[client.fileno()] = client
        self.poll.register(client, select.POLLIN)

    def _client(self, fd: int) -> None:
        client = self.clients[fd]
        descriptors: list[int] = []
        operation = ""
        try:
            packet, descriptors, _, _ = socket.recv_fds(client, PACKET, 1)
            message: dict[str, Any] = json.loads(packet) if packet else {"op": ""}
            operation = str(message["op"])
            if operation == "keep":
                process = int(message["pid"]), int(message.get("start", 0))
                self._keep(*process, Mounted.of(message["mount"]), descriptors.pop())
                client.send(pack({"kept": os.getpid()}))
            if operation == "hold":
                client.send(pack({"held": True}))
                return
            if operation == "who":
                client.send(pack(self._serving(int(message["pid"]), int(message["start"]))))
        except (OSError, ValueError, LookupError, TypeError, RecursionError, OverflowError):
            operation = ""  # it is gone, or no client of ours
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self.poll.unregister(fd)
        del self.clients[fd]
        if operation == "serve":
            self._start(lambda: serve_new(client, self.path))
        client.close()

    def _keep(self, pid: int, start: int, mount: Mounted, fuse: int) -> None:
        """Keep the connection that process ``pid`` serves. It may be no child of ours, but of the host before."""
        known = self.kept.get(pid)
        if known is not None:
            known.start = known.start or start
            os.close(fuse)
            return
        try:
            if pid not in self.servers.values():
                self._watch(pid, os.pidfd_open(pid))  # which may have ended, or there is no descriptor left
        except BaseException:
            os.close(fuse)
            raise
        self.kept[pid] = Kept(mount, fuse, pid, start)

    def _serving(self, pid: int, start: int) -> dict[str, Any]:
        for pidfd in list(self.servers):  # who asks may have seen a death before we did
            self._reap(pidfd)
        self._adopt()
        for kept in self.kept.values():
            if (kept.mount.pid, kept.mount.start) == (pid, start):
                return {"pid": kept.pid, "start": kept.start or start_time(kept.pid)}
        return {"pid": 0, "start": 0}

    # servers

    def _watch(self, pid: int, pidfd: int) -> None:
        self.servers[pidfd] = pid
        self.poll.register(pidfd, select.POLLIN)

    def _reap(self, fd: int) -> None:
        if not _ready(fd, select.POLLIN):  # another one's, whose descriptor has the number of one that is gone
            return
        self.poll.unregister(fd)
        pid = self.servers.pop(fd)
        os.close(fd)
        status = -1
        with contextlib.suppress(ChildProcessError):  # it was the last host's
            _, status = os.waitpid(pid, 0)
        kept = self.kept.pop(pid, None)
        if status >= 0 and os.WIFSIGNALED(status):
            log.error("a layer's server was ended by signal %d", os.WTERMSIG(status))
        if kept is None:
            return
        gave_up = status >= 0 and os.WIFEXITED(status) and os.WEXITSTATUS(status) == GAVE_UP
        if not gave_up:
            if not kept.hopeless():
                self.orphans.append(kept)
                self._adopt()
                return
            log.error("a layer's servers die one after another; whoever uses its mount has to be started anew")
        os.close(kept.fuse)

    def _adopt(self) -> None:
        """Have other processes serve what the last ones did; where none can be started, later."""
        while self.orphans:
            kept = self.orphans.pop(0)
            if not kept.used():
                os.close(kept.fuse)
            elif pid := self._start(partial(go_on, kept.mount, kept.fuse, self.path)):
                kept.pid, kept.start = pid, start_time(pid)
                self.kept[pid] = kept
            else:
                self.orphans.insert(0, kept)
                return

    def _start(self, work: Callable[[], int]) -> int:
        """Fork a server that does ``work``; its process id, 0 for none."""
        try:
            pid, pidfd = fork()
        except OSError as error:  # the client sees the connection end
            if str(error) != self._said:
                log.error("a layer's server cannot be started: %s", error)
            self._said = str(error)
            return 0
        if pid == 0:
            self._become_server(work)
        self._said = ""
        self._watch(pid, pidfd)
        return pid

    def _become_server(self, work: Callable[[], int]) -> None:
        """In the child: serve one layer, and never return. What is another's is closed: a mount ends with the last copy."""
        code = 1
        try:
            for fd in (*self._own, *self.clients, *self.servers, *(each.fuse for each in (*self.kept.values(), *self.orphans))):
                os.close(fd)
            code = work()
        except Exception as error:
            log.exception("a layer's server failed: %s", error)
        finally:
            os._exit(code)  # no clean-up that was the host's


def _ready(fd: int, events: int) -> bool:
    poll = select.poll()
    poll.register(fd, events)
    return bool(poll.poll(0))


def main() -> None:
    """Entry point of the host's process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    options = parser.parse_args()
    logs.configure()
    try:
        import pyfuse3.asyncio

        import weenv.layer.erofs.reader
        import weenv.plugin.snapshotter.planes.layerfs  # noqa: F401 (for the children)
    except ImportError as error:
        sys.exit(f"pyfuse3 cannot be imported: {error}")
    pyfuse3.asyncio.enable()
    outlive()
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two descriptors a layer
    gc.collect()
    gc.freeze()
    try:
        Host(options.socket).run()
    except FileExistsError:
        return  # whoever started this one finds the other


if __name__ == "__main__":
    main()
