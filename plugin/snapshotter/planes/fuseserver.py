"""A server of the FUSE plane: a process that the host (fusehost.py) forks, and that serves one mount until nobody uses it.

**How one server goes on where another was killed.** The kernel says INIT once in the life of a connection, and libfuse answers
nothing before it has seen one. So INIT is read here, and kept by the host with the connection. libfuse is given a socket in
the place of ``/dev/fuse`` (as mount point ``/dev/fd/N``: lib/mount_util.c, fuse_mnt_parse_fuse_fd), where it finds that INIT;
as soon as it has read it, the number is made the connection's own (dup2), to which its answer goes. The first server's is
what the kernel waits for; to any other's it says that it knows no such request (ENOENT), which libfuse takes for an interrupt.
What servers know of each other is nothing: inode numbers and file handles come from the image, which has to be the same file.

What a dead server had read and not answered is delivered again (FUSE_NOTIFY_RESEND, Linux 6.9). Before that, it never is, and
whoever waits for it would wait for ever: so where anything was owed, the next server gives up, the connection ends as it does
with its last process, and users see ENOTCONN. Whether anything was, the kernel's own count of requests shows (fusectl).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import mmap
import os
import select
import socket
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from weenv.core import procfs
from weenv.core.errors import FormatError, MountError
from weenv.core.unixsocket import connected
from weenv.layer.erofs.reader import Image
from weenv.plugin.snapshotter.blobfs.resend import control, resend, under_way

log = logging.getLogger(__name__)

PACKET: Final = 64 << 10
GAVE_UP: Final = 3
"""Exit status of a server that says: end the connection."""
_IN_MEMORY: Final = 16 << 20
"""Bytes of an image up to which it is read into memory: a mapping of a file on a broken disk ends the process (SIGBUS)."""
_TASKS: Final = 256
"""Requests of one layer at a time; each has a buffer of a megabyte of address space, of which a page is touched."""
_REQUEST: Final = 64 << 10
"""Bytes to read INIT into: the kernel wants room for 8 KiB at least (FUSE_MIN_READ_BUFFER)."""
_PATIENCE: Final = 30.0
"""Seconds for the kernel to say INIT, and for a host to answer."""
_AGAIN: Final = 1.0
"""Seconds between attempts to find the next host."""
_LOOKS: Final = 10
"""Times that more requests must be under way than anybody has in hand until one counts as lost: one that was answered
counts until its caller has run."""
_LOOK: Final = 0.2
"""Seconds between them."""


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


@dataclass(frozen=True, slots=True)
class Mounted:
    """A mount, to whoever serves it. ``pid`` and ``start`` are of its first server, by which mountinfo names it for good;
    ``device`` is its MAJOR:MINOR there; ``init`` the kernel's INIT, in hex; ``file`` says which file the image was; the rest as
    the client said it."""

    pid: int
    start: int
    directory: str
    image: str
    blobs: str
    name: str
    device: str = ""
    init: str = ""
    file: str = ""

    @classmethod
    def of(cls, raw: dict[str, Any]) -> Mounted:
        """From a packet. Raises LookupError, TypeError, ValueError."""
        texts = [str(raw[key]) for key in ("directory", "image", "blobs", "name", "device", "init", "file")]
        return cls(int(raw["pid"]), int(raw["start"]), *texts)


def serve_new(client: socket.socket, host: str) -> int:
    """Serve what ``client`` says until nothing uses the mount any more; ``host`` is the host's socket. The exit status."""
    pid, start = os.getpid(), start_time(os.getpid())
    client.send(pack({"pid": pid, "start": start}))
    packet, descriptors, _, _ = socket.recv_fds(client, PACKET, 1)
    if not packet or not descriptors:
        return 0
    try:
        mount = Mounted.of({"device": "", "init": "", "file": "", **json.loads(packet), "pid": pid, "start": start})
        return asyncio.run(_Server(mount, descriptors[0], host).serve_new(client))
    except FormatError as error:
        client.send(pack({"error": "FormatError", "message": error.message}))
    except OSError as error:
        with contextlib.suppress(OSError):  # who asked is gone
            client.send(pack({"error": "MountError", "message": str(error)}))
    return 0


def go_on(mount: Mounted, fuse: int, host: str) -> int:
    """Serve what a server that died served, through its connection. The exit status."""
    try:
        return asyncio.run(_Server(mount, fuse, host).go_on())
    except (FormatError, FileNotFoundError) as error:
        log.error("a layer cannot be served any more: %s", error)
        return GAVE_UP


def _load(path: str) -> tuple[memoryview, str]:
    """A file's content, and what tells it from any other that ever is at ``path``: images are written anew, never changed."""
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        which = f"{found.st_ino}:{found.st_mtime_ns}:{found.st_size}"
        if found.st_size <= _IN_MEMORY:
            return memoryview(file.read()), which
        return memoryview(mmap.mmap(file.fileno(), found.st_size, prot=mmap.PROT_READ)), which


class _Server:
    """Serves ``mount`` through ``fuse``, the connection to the kernel, once. Raises FormatError, OSError."""

    def __init__(self, mount: Mounted, fuse: int, host: str) -> None:
        import pyfuse3

        from weenv.plugin.snapshotter.planes.layerfs import LayerFs
        from weenv.plugin.snapshotter.planes.stream import Stream

        image, which = _load(mount.image)
        if mount.file not in ("", which):
            raise FormatError(f"{mount.image} is another file than the one that the kernel knows numbers of")
        self.mount = replace(mount, file=which)
        self.fuse = fuse
        self.host = host
        self.stream = Stream(mount.directory, mount.blobs, mount.name)
        self.files = LayerFs(Image(image), self.stream, self._begun)
        self._client: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._feed, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._number = theirs.detach()
        pyfuse3.init(self.files, f"/dev/fd/{self._number}", set())

    def _begun(self) -> None:
        """libfuse has read INIT, and is about to answer it."""
        os.dup2(self.fuse, self._number, inheritable=False)
        self._feed.close()
        if self._client is not None:
            asyncio.get_running_loop().call_soon(self._answered, self._client)

    def _answered(self, client: socket.socket) -> None:
        """The kernel has its answer to INIT: another server could go on from here."""
        self._tasks.append(asyncio.create_task(self._stay_kept(self._keep())))
        with client, contextlib.suppress(OSError):  # it may have died; whoever follows it finds the mount
            client.send(pack({"serving": True}))

    async def serve_new(self, client: socket.socket) -> int:
        """As the first. The exit status."""
        client.send(pack({"ready": True}))
        packet = client.recv(PACKET)
        if not packet:
            return 0
        poll = select.poll()
        poll.register(self.fuse, select.POLLIN)
        if not poll.poll(_PATIENCE * 1000):
            raise TimeoutError("the kernel does not begin")
        init = os.read(self.fuse, _REQUEST)
        self.mount = replace(self.mount, device=str(json.loads(packet)["device"]), init=init.hex())
        self._client = client
        return await self._serve(init)

    async def go_on(self) -> int:
        """As the next. The exit status."""
        self._tasks.append(asyncio.create_task(self._stay_kept(self._keep())))
        if not resend(self.fuse):
            self._tasks.append(asyncio.create_task(self._settle_debts()))
        return await self._serve(bytes.fromhex(self.mount.init))

    async def _serve(self, init: bytes) -> int:
        import pyfuse3

        self._feed.send(init)
        ended = asyncio.Event()
        with select.epoll() as connection:
            connection.register(self.fuse, 0)  # EPOLLERR alone: nothing uses the mount any more (fs/fuse/dev.c, fuse_dev_poll)
            asyncio.get_running_loop().add_reader(connection.fileno(), ended.set)
            self._tasks.append(asyncio.create_task(self.stream.tend()))
            main = asyncio.create_task(pyfuse3.main(min_tasks=4, max_tasks=_TASKS))
            main.add_done_callback(lambda _: ended.set())
            await ended.wait()
            if main.done() and (error := main.exception()) is not None:
                log.error("a layer's server failed: %s", error)
            os._exit(0)  # readers of pages that nobody wants any more may still wait for blobfs

    # the host

    def _keep(self) -> int:
        """Have the host keep the connection; a pidfd of the host, -1 where there is none now."""
        known = OSError, ValueError, LookupError
        with contextlib.suppress(*known), connected(self.host, _PATIENCE, socket.SOCK_SEQPACKET) as host:
            who = {"op": "keep", "pid": os.getpid(), "start": start_time(os.getpid()), "mount": asdict(self.mount)}
            socket.send_fds(host, [pack(who)], [self.fuse])
            return os.pidfd_open(int(json.loads(host.recv(PACKET))["kept"]))
        return -1

    async def _stay_kept(self, host: int) -> None:
        """For ever: whenever the host ends, look for the next one."""
        loop = asyncio.get_running_loop()
        while True:
            if host >= 0:
                ended = asyncio.Event()
                loop.add_reader(host, ended.set)
                await ended.wait()
                loop.remove_reader(host)
                os.close(host)
            await asyncio.sleep(_AGAIN)
            host = await asyncio.to_thread(self._keep)

    # what the last server owed

    async def _settle_debts(self) -> None:
        """Where this kernel delivers nothing again: end the connection if something is lost."""
        seen = 0
        poll = select.poll()
        poll.register(self.fuse, select.POLLIN)
        try:
            with control() as connections:
                while seen < _LOOKS:
                    await asyncio.sleep(_LOOK)
                    if poll.poll(0):
                        continue  # what nobody has read yet counts, too
                    if under_way(connections, self.mount.device) <= self.files.in_hand:
                        return
                    seen += 1
            log.error("what a layer's server owed when it died is lost: this kernel cannot send it again")
        except (MountError, OSError, ValueError) as error:
            log.error("what a layer's server owed when it died cannot be told: %s", error)
        os._exit(GAVE_UP)
