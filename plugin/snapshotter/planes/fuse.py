"""The FUSE plane: for kernels that cannot mount EROFS from a file. A process of its own serves each layer's tree by pyfuse3.

Same layer directory, same metadata image (read here by a program instead of the kernel), same ``data``. What is different:

- Servers belong to no daemon: snapshotter, blobfs and containerd may be killed, restarted and upgraded under them.
- A server that is killed is followed by another (fusehost.py), and users of the layer notice nothing. Where that cannot be
  (fuseserver.py), the mount ends: the containers that use it get ENOTCONN for what their page cache does not hold, and have
  to be started anew; nobody else notices. The snapshotter sees it and mounts the layer again, for whoever comes next.
- A complete layer needs no other mount: its server goes over to the plain file by itself.

The mount's source in mountinfo says who served it first, as ``weenv-layer:<64 hex digits>:<pid>:<start time>``: so the next
snapshotter knows whether it still is served. Where that process is gone, the host knows its successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from weenv.core import digest as digests
from weenv.core.errors import FormatError, MountError
from weenv.core.extras import remedy
from weenv.core.unixsocket import connected
from weenv.plugin.snapshotter import mounts
from weenv.plugin.snapshotter.builder import Builder
from weenv.plugin.snapshotter.cache.present import is_complete
from weenv.plugin.snapshotter.layerdir import LayerDirs
from weenv.plugin.snapshotter.planes.base import COMPLETE, LAZY, Attachment, LayerFacts, Variant
from weenv.plugin.snapshotter.planes.fuseserver import PACKET, pack, start_time
from weenv.plugin.snapshotter.planes.images import Images

log = logging.getLogger(__name__)

FILESYSTEM = "fuse.weenv-layer"
"""The type shown in mountinfo; the kernel takes any subtype of ``fuse``."""
_SOURCE = "weenv-layer"
_MAX_READ = 128 << 10
"""Bytes of one READ, which bounds what a server holds in memory: 256 requests at a time (fusehost.py) are 32 MiB."""
_PATIENCE = 30.0
"""Seconds for a host or a server to answer."""
_START = 120.0
"""Seconds for a host to come up: a third of a second of imports, on a machine that has the time."""
_HOST = "weenv.plugin.snapshotter.planes.fusehost"


class Process(NamedTuple):
    """A process: its id, and when it began (fuseserver.py, start_time)."""

    pid: int
    start: int


class Watched(NamedTuple):
    """Whoever serves a mount today, and who was the first."""

    pidfd: int
    first: Process


class FusePlane:
    """See the module's text. ``blobs`` is where blobfs is mounted; ``socket_path`` where the host listens, or is to."""

    name = "fuse"

    def __init__(self, dirs: LayerDirs, blobs: str, socket_path: str, builder: Builder) -> None:
        self.dirs = dirs
        self.blobs = blobs
        self.socket_path = socket_path
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="mount")
        self._images = Images(dirs, builder, self._threads)
        self._lost: Callable[[str], None] = lambda _: None
        self._servers: dict[str, Watched] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()
        self._hold: socket.socket | None = None

    def close(self) -> None:
        """Stop the threads; mounts and their servers stay."""
        for target in list(self._servers):
            self._forget(target)
        for task in self._tasks:
            task.cancel()
        self._release()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def probe(self) -> None:
        """Has the host started, which imports pyfuse3 and is needed soon anyway."""
        probe_fuse()
        await self._host()

    async def prepare(self, digest: str, variant: Variant) -> LayerFacts:
        """Build what is missing of ``meta.erofs``, ``facts.json`` and the variant's own image."""
        return await self._images.prepare(digest, variant)

    async def attach(self, digest: str, variant: Variant, target: str, *, replace: bool) -> Attachment:
        """Mount at ``target``, with a new server; what was there is taken away first, and its users keep it."""
        await self.prepare(digest, variant)
        await self._host()
        loop = asyncio.get_running_loop()
        try:
            first = await loop.run_in_executor(self._threads, self._mount, digest, variant, target)
        except FormatError as error:
            log.warning("metadata image is damaged, building it again: %s", error, extra={"layer": digest})
            await self._images.rebuild(digest, variant)
            first = await loop.run_in_executor(self._threads, self._mount, digest, variant, target)
        if not self._watch(target, first, first):
            now = await loop.run_in_executor(self._threads, serving, self.socket_path, first)
            if not self._watch(target, first, now):
                self.detach(target)
                raise MountError(f"the server of layer {digest} died at once", hint="see the snapshotter's log")
        return Attachment(COMPLETE if is_complete(self.dirs.path(digest)) else LAZY)

    def _mount(self, digest: str, variant: Variant, target: str) -> Process:
        """Blocking. The server."""
        name = digests.hex_of(digest)
        image = self._images.path(digest, variant)
        wanted = {"directory": self.dirs.path(digest), "image": image, "blobs": self.blobs, "name": name}
        fuse = -1
        try:
            with _connect(self.socket_path) as server:
                server.send(pack({"op": "serve"}))
                who = _answer(server)
                fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
                socket.send_fds(server, [pack(wanted)], [fuse])
                _answer(server)
                mounts.detach(target)
                mounts.mount(
                    f"{_SOURCE}:{name}:{who['pid']}:{who['start']}", target, FILESYSTEM, mounts.MS_RDONLY | mounts.MS_NOATIME,
                    f"fd={fuse},rootmode=40755,user_id={os.geteuid()},group_id={os.getegid()},allow_other,default_permissions"
                    f",max_read={_MAX_READ}",
                )  # fmt: skip
                try:
                    entry = mounts.mounts_below(os.path.dirname(target)).get(target)
                    server.send(pack({"op": "go", "device": entry.device if entry is not None else ""}))
                    _answer(server)
                except BaseException:
                    mounts.detach(target)
                    raise
                return Process(int(who["pid"]), int(who["start"]))
        except (OSError, ValueError, KeyError) as error:
            code = getattr(error, "errno", 0) or 0
            raise MountError(f"no server for layer {digest}: {error}", errno=code, hint="see the snapshotter's log") from error
        finally:
            if fuse >= 0:
                os.close(fuse)

    def usable(self, digest: str, entry: mounts.MountEntry, attachment: Attachment) -> bool:
        """A mount of this layer that is served; it is told when it no longer is."""
        parts = entry.source.split(":")
        if entry.fstype != FILESYSTEM or len(parts) != 4 or parts[:2] != [_SOURCE, digests.hex_of(digest)]:
            return False
        if not (parts[2].isdigit() and parts[3].isdigit()):
            return False
        first = Process(int(parts[2]), int(parts[3]))
        return self._watch(entry.point, first, first) or self._watch(entry.point, first, serving(self.socket_path, first))

    def wanted(self, digest: str, attachment: Attachment) -> bool:
        """Never: a server goes over to the plain file by itself, and to the next blobfs."""
        return False

    def detach(self, target: str) -> None:
        """Unmount lazily; the server lives until the last overlay that was made on it is gone."""
        mounts.detach(target)

    def on_loss(self, lost: Callable[[str], None]) -> None:
        """Call ``lost`` with a target, in the event loop, when nobody serves any more what is mounted there."""
        self._lost = lost

    # servers

    def _watch(self, target: str, first: Process, now: Process) -> bool:
        """Have the end of process ``now`` noticed, which serves what ``first`` did; False where it is no more."""
        try:
            pidfd = os.pidfd_open(now.pid)
        except (OSError, OverflowError):
            return False
        if start_time(now.pid) != now.start:
            os.close(pidfd)
            return False
        self._forget(target)
        self._servers[target] = watched = Watched(pidfd, first)
        asyncio.get_running_loop().add_reader(pidfd, self._died, target, watched)
        return True

    def _died(self, target: str, watched: Watched) -> None:
        asyncio.get_running_loop().remove_reader(watched.pidfd)
        self._spawn(self._follow(target, watched))

    async def _follow(self, target: str, watched: Watched) -> None:
        """The server of a mount has died: watch the next one, or tell that there is none."""
        now = await asyncio.get_running_loop().run_in_executor(self._threads, serving, self.socket_path, watched.first)
        if self._servers.get(target) is not watched or self._watch(target, watched.first, now):
            return
        self._forget(target)
        self._lost(target)

    def _forget(self, target: str) -> None:
        watched = self._servers.pop(target, None)
        if watched is not None:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(watched.pidfd)
            os.close(watched.pidfd)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # the host

    async def _host(self) -> None:
        """See that the host runs, and stays while this process is there. Raises MountError."""
        async with self._starting:
            if self._hold is not None and _ended(self._hold):
                self._release()
            if self._hold is None:
                loop = asyncio.get_running_loop()
                self._hold = await loop.run_in_executor(self._threads, _start_host, self.socket_path)
                loop.add_reader(self._hold, self._host_died)

    def _release(self) -> None:
        """Let the host go, or what is left of it."""
        if self._hold is not None:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(self._hold)
            self._hold.close()
            self._hold = None

    def _host_died(self) -> None:
        self._release()
        self._spawn(self._next_host())

    async def _next_host(self) -> None:
        """Start another, for the servers that there are to be known to it."""
        try:
            await self._host()
        except MountError as error:
            log.error("the FUSE plane's host has ended, and does not start again: %s", error)


def serving(path: str, first: Process) -> Process:
    """Who serves now what ``first`` did, as the host at ``path`` knows; process id 0 for nobody. Blocking."""
    try:
        with _connect(path) as host:
            host.send(pack({"op": "who", **first._asdict()}))
            answer = _answer(host)
        return Process(int(answer["pid"]), int(answer["start"]))
    except (OSError, ValueError, KeyError):
        return Process(0, 0)


def _connect(path: str) -> socket.socket:
    return connected(path, _PATIENCE, socket.SOCK_SEQPACKET)


def _answer(server: socket.socket) -> dict[str, Any]:
    packet = server.recv(PACKET)
    if not packet:
        raise OSError(errno.ECONNRESET, "it ended; see the log")
    answer: dict[str, Any] = json.loads(packet)
    if answer.get("error") == "FormatError":
        raise FormatError(str(answer["message"]))
    if "error" in answer:
        raise OSError(errno.EIO, str(answer["message"]))
    return answer


def _ended(connection: socket.socket) -> bool:
    """True where the other end is gone; it never says anything."""
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _start_host(path: str) -> socket.socket:
    """A connection to the host at ``path`` that keeps it there; it is started where there is none. Blocking."""
    process: subprocess.Popen[bytes] | None = None
    end = time.monotonic() + _START
    while True:
        try:
            hold = _connect(path)
            try:
                hold.send(pack({"op": "hold"}))
                _answer(hold)
                hold.setblocking(False)
            except BaseException:  # it was just ending
                hold.close()
                raise
            if process is not None:
                process.returncode = 0  # it lives on without us; subprocess would complain about it
            return hold
        except OSError as error:
            if process is None:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                theirs = ("NOTIFY_", "LISTEN_", "WATCHDOG_", "FDSTORE")  # between this process and its service manager
                environment = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
                environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # it forks
                process = subprocess.Popen(
                    [sys.executable, "-m", _HOST, "--socket", path],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True, cwd="/", env=environment,
                )  # fmt: skip
            elif process.poll() or time.monotonic() > end:  # one that finds another host ends well
                raise MountError(
                    f"the FUSE plane's host does not start: {error.strerror}", errno=error.errno or 0, hint="see the log"
                ) from error
        time.sleep(0.01)


def probe_fuse() -> None:
    """Raises :class:`MountError` where this machine cannot serve layers by pyfuse3: /dev/fuse, pyfuse3. Starts nothing."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        raise MountError(
            f"cannot open /dev/fuse: {error.strerror}", errno=error.errno or 0,
            hint="run it as root, with the kernel's fuse module (modprobe fuse)",
        ) from error  # fmt: skip
    if importlib.util.find_spec("pyfuse3") is None:
        raise MountError(
            "pyfuse3 is not installed",
            hint=f"{remedy('pyfuse3')} (which takes gcc, pkg-config, libfuse3-dev and python3-dev)",
        )
