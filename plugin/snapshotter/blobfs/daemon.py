"""``weenv blobfs serve``: wires holder, FUSE session, fetcher, fill, metrics and status together."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from weenv.core.aio import KEEP_NAME, Background, expect_many
from weenv.core.endpoint import MetricsEndpoint
from weenv.core.errors import ConfigError, LimitError, MountError, StorageError, WeenvError
from weenv.core.rights import AS_ROOT, remedy
from weenv.core.unixsocket import bind_private, clear_path
from weenv.layer.tail import FrameIndex, content_size
from weenv.layer.verify import verify_frame, verify_frames, verify_tail
from weenv.plugin.snapshotter.blobfs import holder, wire
from weenv.plugin.snapshotter.blobfs.complete import Completion
from weenv.plugin.snapshotter.blobfs.config import BlobfsConfig
from weenv.plugin.snapshotter.blobfs.control import LINE_MAX, Control
from weenv.plugin.snapshotter.blobfs.detachedlog import detached_log
from weenv.plugin.snapshotter.blobfs.evictor import Evictor
from weenv.plugin.snapshotter.blobfs.layers import DamagedTail, Layer, LayerTable
from weenv.plugin.snapshotter.blobfs.metrics import Report
from weenv.plugin.snapshotter.blobfs.mountstate import MountState
from weenv.plugin.snapshotter.blobfs.peers import open_peers
from weenv.plugin.snapshotter.blobfs.profiles import Profiles
from weenv.plugin.snapshotter.blobfs.repair import TailRepair
from weenv.plugin.snapshotter.blobfs.resend import readers_wait, resend
from weenv.plugin.snapshotter.blobfs.server import Server
from weenv.plugin.snapshotter.cache.tables import give_back
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher
from weenv.plugin.snapshotter.fetch.fill import Filler
from weenv.plugin.snapshotter.fetch.flight import FetchLayer, FetchSettings
from weenv.plugin.snapshotter.fetch.planner import Budget, Extents, ReadAhead
from weenv.plugin.snapshotter.fetch.prefetch import Prefetcher
from weenv.plugin.snapshotter.layerdir import LayerDirs, LayerSource, Origin
from weenv.plugin.snapshotter.mounts import MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_RDONLY, detach, mount, mounts_below
from weenv.registry.client import RegistryClient
from weenv.registry.config import RegistryConfig
from weenv.registry.source import BlobSource, open_source
from weenv.systemd import notify

log = logging.getLogger(__name__)

_LARGE_TAIL = 4 << 20
"""Bytes of a tail from which on it is worth returning the memory that looking at it took."""
FILESYSTEM = "fuse.weenv-blobs"
"""The type shown in mountinfo; the kernel takes any subtype of ``fuse``."""
_KEPT = ("fuse", "nodes")
"""What a service manager keeps for us."""


def read_tail(tail: bytes, source: LayerSource) -> FrameIndex:
    """What a tail says of its layer's stream; the tail's digest is checked first. Raises FormatError."""
    return verify_frames(tail, source.descriptor())


def read_extents(tail: bytes, source: LayerSource, most: int) -> Extents:
    """Where the large files lie. Raises FormatError; LimitError where the table of contents has more than ``most`` bytes.

    Looking at one takes four to eight times as much memory as it has bytes, in the process that serves all layers.
    """
    if (size := content_size(tail)) > most:
        raise LimitError(f"it has {size} bytes", hint="raise [blobfs] layers_memory, if the image is worth it")
    return Extents.of(verify_tail(tail, source.descriptor()))


@dataclass(slots=True)
class Connection:
    """The FUSE connection that a server serves."""

    holder: holder.HolderClient
    fuse: int
    """The ``/dev/fuse`` descriptor."""
    state: MountState
    old: bool
    """Whether an earlier server has served it."""


def connect(config: BlobfsConfig, kept: dict[str, list[int]] | None = None, *, patience: float = 0.0) -> Connection:
    """From the holder; or, without one, from ``kept``, what a service manager passed; or of a new mount.

    In the end a holder has the descriptors, and the manager as well, if it keeps any. ``patience``: seconds for which a
    predecessor that is ending is waited for. Raises ConfigError (another server is attached), MountError, OSError.
    """
    kept = kept or {}
    for path in (os.path.dirname(config.holder_socket), os.path.dirname(config.status_socket)):
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot create {path}: {error.strerror}", hint="run it as root") from error
    _check_rights(config.holder_socket)
    try:
        found = _attach(config, patience) or _resume(config, kept) or _begin(config)
    finally:
        notify.close_all(kept)
    if notify.keeps_descriptors(2):
        notify.forget(*_KEPT)  # of a mount that has been replaced meanwhile
        if not notify.keep(fuse=found.fuse, nodes=found.state.fd):
            log.warning("the service manager does not keep the mount's descriptor; the holder alone does")
    return found


def _attach(config: BlobfsConfig, patience: float) -> Connection | None:
    """Ask the holder; None where there is none."""
    end = time.monotonic() + patience
    while True:
        try:
            found = holder.attach(config.holder_socket)
        except holder.Busy:
            if time.monotonic() >= end:
                raise
            time.sleep(0.05)
        else:
            return None if found is None else Connection(*found, old=True)


def _resume(config: BlobfsConfig, kept: dict[str, list[int]]) -> Connection | None:
    """From the manager's fd store, if that is the mount which is there; what is taken is removed from ``kept``."""
    if not all(kept.get(name) for name in _KEPT):
        return None
    fuse, nodes = kept["fuse"][0], kept["nodes"][0]
    ended = select.poll()
    ended.register(fuse, 0)  # POLLERR: the mount is gone (fs/fuse/dev.c, fuse_dev_poll)
    entry = mounts_below(os.path.dirname(config.mountpoint)).get(config.mountpoint)
    if ended.poll(0) or entry is None or entry.fstype != FILESYSTEM:
        return None
    state = MountState.load(nodes)
    log.warning("the holder is gone: starting another one", extra={"mountpoint": config.mountpoint})
    client = holder.start(config.holder_socket, config.mountpoint, fuse, state)
    kept["fuse"].remove(fuse)
    kept["nodes"].remove(nodes)
    return Connection(client, fuse, state, old=True)


def _begin(config: BlobfsConfig) -> Connection:
    """Mount."""
    try:
        os.makedirs(config.mountpoint, mode=0o700, exist_ok=True)
    except OSError as error:
        if error.errno not in (errno.ENOTCONN, errno.EEXIST):
            raise ConfigError(f"cannot create {config.mountpoint}: {error.strerror}", hint="run it as root") from error
    if os.path.ismount(config.mountpoint) or not _alive(config.mountpoint):
        # Everybody who had it died together: what uses the mount has lost it, new mounts must not hang on it.
        log.error("a dead blobfs mount is replaced", extra={"mountpoint": config.mountpoint})
        detach(config.mountpoint)
    try:
        fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise MountError(
            f"cannot open /dev/fuse: {error.strerror}",
            errno=error.errno or 0,
            hint="run it as root, with the kernel's fuse module",
        ) from error
    state = MountState.create()
    try:
        mount(
            "weenv-blobs", config.mountpoint, FILESYSTEM, MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC,
            f"fd={fuse},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()},allow_other",
        )  # fmt: skip
        return Connection(holder.start(config.holder_socket, config.mountpoint, fuse, state), fuse, state, old=False)
    except BaseException:
        os.close(fuse)
        state.close()
        raise


def _alive(path: str) -> bool:
    try:
        os.stat(path)
    except OSError as error:
        return error.errno != errno.ENOTCONN
    return True


class Daemon:
    """One ``serve``: everything between getting the descriptor and giving it up."""

    def __init__(
        self, config: BlobfsConfig, client: RegistryClient, connection: Connection, listener: socket.socket | None = None
    ) -> None:
        self.config = config
        self.client = client
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._background = Background()
        settings = FetchSettings(
            parallelism=config.parallelism, range_max=config.range_max, deadline=config.deadline, decoders=config.decoders,
            prefetches=config.prefetch.ranges,
        )  # fmt: skip
        self._budget = Budget(config.neighbours)
        self.fetcher = Fetcher(verify_frame, settings, self._refresh)
        self.table = LayerTable(
            LayerDirs(config.root),
            read_tail,
            self._open_sources,
            self._remember,
            make_read_ahead=self._make_read_ahead,
            close_sources=self._close_sources,
            memory_max=config.layers_memory,
            over=self._over,
            record=config.prefetch.record,
        )
        self.holder, self.fuse, self.state = connection.holder, connection.fuse, connection.state
        self._listener = listener
        if connection.old:
            self.table.restore(self.state.nodes)
            if not resend(self.fuse) and readers_wait(config.mountpoint):
                log.error(
                    "this kernel cannot resend requests: readers that wait now wait forever",
                    extra={"hint": "use Linux 6.9 or newer"},
                )
        self.server = Server(
            self.fuse, self.table, self.fetcher, root=config.root,
            on_init=self._on_init, on_miss=self._on_miss, on_end=self._on_end, on_damage=self._on_damage,
        )  # fmt: skip
        self.peers = open_peers(self.server, config.mountpoint)
        self.repair = TailRepair(self.table.dirs, self._open_sources, self._resume, config.deadline)
        self.completion = Completion(self.fetcher, self.table.open_layers, self.table.refuse, config.fill.cpu_share)
        self._crowded = asyncio.Event()
        self._extents = asyncio.Semaphore(1)  # a hostile TOC takes gigabytes while it is looked at
        self.evictor = Evictor(config.cache, config.root, self.table, self.server, self.fetcher)
        filler = Filler(config.fill, self.fetcher, self.table.open_layers, self.evictor.room)
        self.filler = filler if config.fill.enabled else None
        self.prefetcher = Prefetcher(config.prefetch, self.fetcher, self.evictor.room, self.table.holds)
        self.report = Report(
            self.server, self.fetcher, self.table, self.filler, self.repair, self.completion, self.evictor, self.prefetcher,
            client,
        )  # fmt: skip
        self.control = Control(
            self.evictor, self.report.status, Profiles(self.table.dirs, self.table, self.prefetcher)
        )  # fmt: skip
        known = {"resumed": connection.old, "layers": len(self.table.nodes)}
        log.info("serving layers", extra={"mountpoint": config.mountpoint, **known})

    def _open_sources(self, source: LayerSource, origins: Sequence[Origin]) -> list[BlobSource]:
        found: list[BlobSource] = []
        for origin in origins:
            try:
                found.append(open_source(self.client, origin, source.digest, source.size, paced=True))
            except WeenvError as error:
                log.warning("an origin of a layer cannot be used", extra={"layer": source.digest, "error": str(error)})
        return found

    def _close_sources(self, sources: list[BlobSource]) -> None:
        """In any thread, perhaps after the loop has ended."""

        def close() -> None:
            for source in sources:
                self._background.spawn(source.close(), "close a source")

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(close)

    def _refresh(self, layer: FetchLayer) -> None:
        if isinstance(layer, Layer):
            self.table.refresh(layer)

    def _make_read_ahead(self, layer: Layer) -> ReadAhead:
        return ReadAhead(
            layer.starts, layer.presence.states, layer.flights.__contains__,
            contents=layer.contents, window_max=self.config.window_max, budget=self._budget,
        )  # fmt: skip

    def _remember(self, nodeid: int, name: str) -> None:
        try:
            self.state.remember_node(nodeid, name)
        except OSError as error:
            raise StorageError(f"no memory for a node id: {error.strerror}", errno=error.errno or 0) from error

    def _on_init(self, agreed: wire.InitOut) -> None:
        if not agreed.flags & wire.HAS_RESEND:
            log.info("this kernel does not offer FUSE_HAS_RESEND", extra={"hint": "use Linux 6.9 or newer, or plane fuse"})
        self.state.remember_init(
            {
                "minor": agreed.minor,
                "flags": agreed.flags,
                "max_pages": agreed.max_pages,
                "max_background": agreed.max_background,
            }
        )

    def _on_miss(self, layer: Layer) -> None:
        """In a FUSE thread, once per layer: have its large files looked up, so that read-ahead knows them."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: self._background.spawn(self._load_extents(layer), f"extents {layer.name}"))

    async def _load_extents(self, layer: Layer) -> None:
        def load() -> None:
            with open(os.path.join(layer.path, "toc"), "rb") as file:
                tail = file.read(layer.source.toc_length + 1)
            extents = read_extents(tail, layer.source, self.config.layers_memory // 4)
            layer.read_ahead.extents = extents
            if layer.source.toc_length > _LARGE_TAIL:
                give_back()

        try:
            async with self._extents:
                await asyncio.to_thread(load)
            self.table.fit(layer)
        except (OSError, WeenvError) as error:
            log.warning(
                "no read-ahead for a layer: its table of contents cannot be read",
                extra={"layer": layer.name, "error": str(error), "hint": getattr(error, "hint", "")},
            )

    def _on_damage(self, damage: DamagedTail, unique: int) -> None:
        """In a FUSE thread: request ``unique`` waits in ``server.parked`` for a layer's tail."""

        def begin() -> None:
            if self.repair.submit(damage, unique):
                self._background.spawn(self.repair.run(damage), "fetch a tail again")

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(begin)

    def _resume(self, unique: int) -> None:
        """A request's tail was seen to: whoever has it parked carries it out."""
        self.server.resume(unique)
        if self.peers is not None:
            self.peers.resume(unique)

    def _over(self) -> None:
        """In any thread: the open layers take too much memory, and those that could be closed must be synced first."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._crowded.set)

    def _on_end(self) -> None:
        """In any thread: the mount is gone."""
        notify.forget(*_KEPT)
        notify.barrier()  # the kernel ends the connection, and everybody's waiting, with the last copy of the descriptor
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.ended.set)

    # -- the tasks --------------------------------------------------------------------------------------------------

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until the mount is gone or :attr:`ended` is set. ``ready`` is called once requests are answered."""
        config = self.config
        sys.setswitchinterval(0.001)  # readers' threads wait for no more than 1 ms for the interpreter
        self.server.start(config.threads)
        if self.peers is not None:
            self.peers.start(config.threads)
        self._set_read_ahead()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._background.close)
            self._watch_holder()
            stack.callback(lambda: self._loop.remove_reader(self.holder.connection.fileno()))
            await stack.enter_async_context(self._status_server())
            if config.metrics_address:
                stack.callback(MetricsEndpoint(self.report, config.metrics_address).close)
            self._background.spawn(notify.watchdog(), "watchdog")
            self._background.spawn(self._maintain(), "maintenance")
            self._background.spawn(self._look_for_killed(), "killed readers")
            self._background.spawn(self.completion.run(), "check complete layers")
            self._background.spawn(self.evictor.run(), "evict")
            if self.filler is not None:
                self._background.spawn(self.filler.run(), "fill")
            ready()
            notify.ready()
            await self.ended.wait()

    async def close(self) -> None:
        """Stop fetching, make what is there durable; mount and holder stay. The process must end now.

        The holder must not take this server for dead before that: its threads read requests until the end, and one that
        they take after the next server has asked for a resend would never be answered.
        """
        if self.peers is not None:
            self.peers.close()
        await self.prefetcher.close()
        await self.fetcher.close()
        for layer in self.table.open_layers():
            await asyncio.to_thread(self._sync, layer)
            for source in layer.sources:
                await source.close()
        self.holder.hold()

    def _set_read_ahead(self) -> None:
        if not self.config.read_ahead_kb:
            return

        def write() -> None:
            try:
                device = os.stat(self.config.mountpoint).st_dev  # GETATTR: answered by the threads started above
                with open(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb", "w", encoding="ascii") as file:
                    file.write(str(self.config.read_ahead_kb))
            except OSError as error:
                log.warning("the mount's read-ahead cannot be set", extra={"error": str(error)})

        self._background.spawn(asyncio.to_thread(write), "read-ahead")

    def _watch_holder(self) -> None:
        """The holder may be killed as well: as long as this process has the descriptor, another one can take over."""
        self._loop.add_reader(self.holder.connection.fileno(), self._holder_gone)

    def _holder_gone(self) -> None:
        lost = self.holder
        self._loop.remove_reader(lost.connection.fileno())
        if lost.told_to_stop():
            self._on_end()
            return
        lost.close()
        if lost.process is not None:
            lost.process.poll()
        if self.ended.is_set():
            return
        self._background.spawn(self._replace_holder(lost), "holder")

    async def _replace_holder(self, lost: holder.HolderClient) -> None:
        await asyncio.sleep(0.2)  # a holder that ended because the mount is gone: the readers' threads notice as well
        if self.ended.is_set():
            return
        log.warning("the holder is gone: starting another one")
        config = self.config
        self.holder = await asyncio.to_thread(holder.start, config.holder_socket, config.mountpoint, self.fuse, self.state)
        self._watch_holder()

    def _sync(self, layer: Layer) -> None:
        try:
            layer.sync()
        except (OSError, WeenvError) as error:
            log.error("fetched data cannot be made durable", extra={"layer": layer.name, "error": str(error)})

    async def _maintain(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.sync):
                    await self._crowded.wait()
            for layer in self.table.open_layers():
                if layer.presence.volatile or not layer.presence.persistent:
                    await asyncio.to_thread(self._sync, layer)
            self.table.close_idle(time.monotonic() - self.config.idle)
            crowded = self._crowded.is_set()
            self._crowded.clear()
            if crowded:
                self.table.trim()  # sets it again where layers are busy still
                await asyncio.sleep(1.0)

    async def _look_for_killed(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if self.server.waiting or self.server.parked:
                await asyncio.to_thread(self.server.release_killed)

    @contextlib.asynccontextmanager
    async def _status_server(self) -> AsyncIterator[None]:
        path = self.config.status_socket
        inherited = self._listener is not None
        try:
            if self._listener is None:
                clear_path(path)
                self._listener = bind_private(path)
            keep = KEEP_NAME if inherited else {}
            server = await asyncio.start_unix_server(self.control.converse, sock=self._listener, limit=LINE_MAX, **keep)
        except OSError as error:
            raise ConfigError(f"cannot listen at {path}: {error.strerror}") from error
        try:
            yield
        finally:
            server.close()
            if not inherited:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


async def serve(
    config: BlobfsConfig, registry: RegistryConfig | None = None, *, ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGTERM or SIGINT, which leave the mount up (``weenv blobfs stop`` takes it down), or until it is gone.

    ``ready`` is called once requests are answered. Of a service manager (:mod:`weenv.systemd.notify`) it takes the listening
    socket ``blobfs`` for the status, and the descriptors of the mount that it keeps. Raises ConfigError, MountError, OSError.
    """
    loop = asyncio.get_running_loop()
    passed = notify.inherited()
    listener = notify.listening_socket(passed.pop("blobfs", ()))
    expect_many()  # two or three descriptors a layer
    with detached_log():
        async with RegistryClient(registry or RegistryConfig()) as client:
            daemon = Daemon(config, client, connect(config, passed, patience=notify.patience()), listener)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, daemon.ended.set)
            try:
                await daemon.run(ready)
                notify.stopping()
            finally:
                await daemon.close()


def _check_rights(path: str) -> None:
    """Raise ConfigError where it is this process's rights that keep it from asking whoever listens at ``path``."""
    try:
        os.stat(path)
    except PermissionError as error:
        raise ConfigError(f"cannot ask at {path}: {error.strerror}", hint=remedy(error)) from error
    except OSError:
        return
    if not os.access(path, os.W_OK, effective_ids=True):
        raise ConfigError(f"cannot ask at {path}: {os.strerror(errno.EACCES)}", hint=AS_ROOT)


def stop(config: BlobfsConfig, *, force: bool = False) -> bool:
    """``weenv blobfs stop``: unmount and end holder and server; False where nothing was running.

    Raises ConfigError where only root may ask, :class:`MountError` where mounts depend on it; ``force`` detaches it, which
    costs their readers the data.
    """
    answer = holder.ask(config.holder_socket, {"op": "stop", "force": force})
    if answer is None:
        _check_rights(config.holder_socket)
        if os.path.ismount(config.mountpoint) or not _alive(config.mountpoint):
            return detach(config.mountpoint)
        return False
    if "error" in answer:
        busy = answer.get("errno") == errno.EBUSY
        raise MountError(
            f"{config.mountpoint} is in use by mounts or processes" if busy else str(answer["error"]),
            errno=int(answer.get("errno", 0)),
            hint="remove the containers that use it, or use --force" if busy else "",
        )
    return True
