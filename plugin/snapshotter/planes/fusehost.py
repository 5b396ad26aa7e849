"""The FUSE plane's processes: the host, and one server for each mounted layer.

pyfuse3 serves one mount in a process, and a mount ends with its server: libfuse takes over no connection whose INIT it did not
see, so nothing can be restarted under it. Hence a process for each layer that does nothing but serve it: it depends on no
other process of ours while its layer is complete, waits for the next blobfs while it is not, and a fault in one costs one
layer. The *host* is a small process with everything imported that forks them, in milliseconds and with most of their memory
in common. Neither is a child of a daemon's: the host is started by whoever needs it, in a session of its own, and when it
ends its children live on. It ends by itself when nobody is connected and no layer is served.

Protocol on the host's 0600 socket (SOCK_SEQPACKET; one JSON object a packet):

===========================================  ==========================================================================
client says                                  answer
===========================================  ==========================================================================
``{"op": "hold"}``                           ``{"held": true}``; the host stays for as long as the connection does
``{"op": "serve"}``                          ``{"pid": p, "start": s}`` from the new server, which the connection then is to;
                                             s is its start time as proc_pid_stat(5) has it (field 22)
then: ``{"directory", "image", "blobs",      ``{"ready": true}`` when the image was read and checked, or ``{"error": kind,
"name"}`` with a ``/dev/fuse`` descriptor    "message": text}`` and its end
then, mounted: ``{"op": "go"}``              ``{"serving": true}`` once the kernel was answered; the server lives on until
                                             nothing uses the mount any more
===========================================  ==========================================================================

A connection that closes before ``go`` ends the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import gc
import json
import logging
import mmap
import os
import select
import socket
import sys
import time
from typing import Any, Final

from weenv.core import log as logs
from weenv.core import procfs
from weenv.core.errors import FormatError
from weenv.core.process import outlive
from weenv.core.unixsocket import bind_private, is_trusted

log = logging.getLogger(__name__)

PACKET: Final = 64 << 10
_IN_MEMORY: Final = 16 << 20
"""Bytes of an image up to which it is read into memory: a mapping of a file on a broken disk ends the process (SIGBUS)."""
_LINGER: Final = 1.0
"""Seconds for which a host that nobody needs stays."""
_TASKS: Final = 256
"""Requests of one layer at a time; each has a buffer of a megabyte of address space, of which a page is touched."""


def pack(message: dict[str, Any]) -> bytes:
    """A packet."""
    return json.dumps(message, separators=(",", ":")).encode()


def start_time(pid: int) -> int:
    """When a process began, in ticks since boot; with its id it names a process for good. 0 where there is none."""
    try:
        found = procfs.stat(pid)
    except OSError:
        return 0
    return 0 if found.dead else found.start


# the host


class Host:
    """The host's loop, on a socket bound to ``path``. It has one thread, because it forks."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.poll = select.poll()
        self.clients: dict[int, socket.socket] = {}
        self.servers: dict[int, int] = {}  # pidfd -> pid

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
            self.poll.register(listener, select.POLLIN)
            self._kept = [lock, listener.fileno()]
            needed = time.monotonic()
            while self.clients or self.servers or time.monotonic() < needed + _LINGER:
                if self.clients or self.servers:
                    needed = time.monotonic()
                for fd, _ in self.poll.poll(200 if not (self.clients or self.servers) else None):
                    if fd == listener.fileno():
                        self._accept(listener)
                    elif fd in self.servers:
                        self._reap(fd)
                    elif fd in self.clients:
                        self._client(fd)
            os.unlink(self.path)

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        if not is_trusted(client):
            client.close()
            return
        client.settimeout(30.0)
        self.clients[client.fileno()] = client
        self.poll.register(client, select.POLLIN)

    def _reap(self, fd: int) -> None:
        self.poll.unregister(fd)
        _, status = os.waitpid(self.servers.pop(fd), 0)
        os.close(fd)
        if os.WIFSIGNALED(status):
            log.error("a layer's server was ended by signal %d", os.WTERMSIG(status))

    def _client(self, fd: int) -> None:
        client = self.clients[fd]
        try:
            packet = client.recv(PACKET)
            operation = json.loads(packet)["op"] if packet else ""
            if operation == "hold":
                client.send(pack({"held": True}))
                return
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            operation = ""  # it is gone, or no client of ours
        self.poll.unregister(fd)
        del self.clients[fd]
        if operation == "serve":
            self._serve(client)
        client.close()

    def _serve(self, client: socket.socket) -> None:
        try:
            pid = os.fork()
        except OSError as error:  # the client sees the connection end
            log.error("a layer's server cannot be started: %s", error)
            return
        if pid == 0:
            self._become_server(client)
        pidfd = os.pidfd_open(pid)
        self.servers[pidfd] = pid
        self.poll.register(pidfd, select.POLLIN)

    def _become_server(self, client: socket.socket) -> None:
        """In the child: serve one layer, and never return."""
        code = 1
        try:
            for fd in (*self._kept, *self.clients, *self.servers):
                os.close(fd)
            with client:
                serve_layer(client)
            code = 0
        except Exception:
            log.exception("a layer's server failed")
        finally:
            os._exit(code)  # no clean-up that was the host's


# a layer's server


def serve_layer(client: socket.socket) -> None:
    """Serve what ``client`` says until nothing uses the mount any more."""
    client.send(pack({"pid": os.getpid(), "start": start_time(os.getpid())}))
    packet, descriptors, _, _ = socket.recv_fds(client, PACKET, 1)
    if not packet or not descriptors:
        return
    wanted = json.loads(packet)
    try:
        data = _load(str(wanted["image"]))
        asyncio.run(_serve(client, descriptors[0], data, wanted))
    except FormatError as error:
        client.send(pack({"error": "FormatError", "message": error.message}))
    except OSError as error:
        with contextlib.suppress(OSError):
            client.send(pack({"error": "MountError", "message": str(error)}))


def _load(path: str) -> memoryview:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _IN_MEMORY:
            return memoryview(file.read())
        return memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ))


async def _serve(client: socket.socket, fuse: int, data: memoryview, wanted: dict[str, Any]) -> None:
    import pyfuse3

    from weenv.layer.erofs.reader import Image
    from weenv.plugin.snapshotter.planes.layerfs import LayerFs
    from weenv.plugin.snapshotter.planes.stream import Stream

    def begun() -> None:
        client.send(pack({"serving": True}))
        client.close()

    image = Image(data)
    stream = Stream(str(wanted["directory"]), str(wanted["blobs"]), str(wanted["name"]))
    # libfuse takes a connection that was made before: "/dev/fd/N" as mount point (lib/mount_util.c, fuse_mnt_parse_fuse_fd)
    pyfuse3.init(LayerFs(image, stream, begun), f"/dev/fd/{fuse}", set())
    client.send(pack({"ready": True}))
    if not client.recv(PACKET):
        return
    ended = asyncio.Event()
    with select.epoll() as connection:
        connection.register(fuse, 0)  # EPOLLERR alone: nothing uses the mount any more (fs/fuse/dev.c, fuse_dev_poll)
        asyncio.get_running_loop().add_reader(connection.fileno(), ended.set)
        tasks = asyncio.create_task(pyfuse3.main(min_tasks=4, max_tasks=_TASKS)), asyncio.create_task(stream.tend())
        tasks[0].add_done_callback(lambda _: ended.set())
        await ended.wait()
        if tasks[0].done() and (error := tasks[0].exception()) is not None:
            log.error("a layer's server failed: %s", error)
        os._exit(0)  # readers of pages that nobody wants any more may still wait for blobfs


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
    gc.collect()
    gc.freeze()
    try:
        Host(options.socket).run()
    except FileExistsError:
        return  # whoever started this one finds the other


if __name__ == "__main__":
    main()
