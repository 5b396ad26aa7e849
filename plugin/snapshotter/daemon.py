"""The snapshotter as a process: ``await serve(config)``.

Start: lock, metastore, recovery, then the socket. Stop (SIGTERM, SIGINT): no new requests, running ones get a moment,
and that is all: mounts stay, because containers use them, and no data is deleted. ``kill -9`` is a normal stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator

from weenv.core.aio import Background
from weenv.core.errors import ConfigError, WeenvError
from weenv.plugin.snapshotter.config import SnapshotterConfig
from weenv.plugin.snapshotter.metastore import Metastore
from weenv.plugin.snapshotter.metrics import Metrics, MetricsEndpoint
from weenv.plugin.snapshotter.rpc import listen, make_server
from weenv.plugin.snapshotter.service import LazyLayers, NoLazyLayers, Snapshotter

log = logging.getLogger(__name__)

_CHECKPOINT = 30.0
"""Seconds between moves of the metastore's write-ahead log into its database."""
_STOP_GRACE = 5.0
_SPARES = 256
"""Snapshot directories kept ready: a burst of as many containers waits for no mkdir, which on ext4 may take 0.3 ms each."""


@contextlib.contextmanager
def only_instance(root: str) -> Iterator[None]:
    """Hold ``<root>/lock``. Raises :class:`ConfigError` where another process does."""
    os.makedirs(root, mode=0o711, exist_ok=True)
    fd = os.open(os.path.join(root, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            raise ConfigError(
                f"another snapshotter (pid {holder or 'unknown'}) serves {root}", hint="stop it, or choose another root"
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


class _Sweeper:
    """Runs cleanup some time after the last removal, where containerd did not ask for it."""

    def __init__(self, core: Snapshotter, delay: float) -> None:
        self._core = core
        self._delay = delay
        self._wanted = asyncio.Event()
        core.on_remove = self._wanted.set

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            await asyncio.sleep(self._delay)
            self._wanted.clear()
            try:
                await self._core.cleanup()
            except (OSError, WeenvError) as error:
                log.error("cleanup failed, it will be tried again: %s", error)
                self._wanted.set()
                await asyncio.sleep(30)

    def poke(self) -> None:
        self._wanted.set()


async def _checkpoints(store: Metastore) -> None:
    while True:
        await asyncio.sleep(_CHECKPOINT)
        try:
            await asyncio.to_thread(store.checkpoint)
        except Exception as error:  # noqa: BLE001 (a full disk must not end the daemon; the log stays and grows)
            log.error("the metastore cannot be checkpointed: %s", error)


@contextlib.asynccontextmanager
async def _lazy_layers(
    config: SnapshotterConfig, store: Metastore, metrics: Metrics, background: Background
) -> AsyncIterator[LazyLayers]:
    if not config.lazy:
        yield NoLazyLayers()
        return
    from weenv.plugin.snapshotter.lazy import open_layers  # keeps numpy and aiohttp out of a plain overlay snapshotter

    async with open_layers(config, store, metrics, background) as layers:
        yield layers


async def serve(config: SnapshotterConfig, *, ready: Callable[[], None] | None = None) -> None:
    """Serve until SIGTERM, SIGINT or cancellation. ``ready`` is called once requests are answered.

    Raises :class:`ConfigError`, :class:`~weenv.core.errors.StorageError`.
    """
    with only_instance(config.root):
        metrics = Metrics()
        async with contextlib.AsyncExitStack() as stack:
            store = Metastore(os.path.join(config.root, "metastore.db"))
            stack.callback(store.close)
            background = Background()
            stack.push_async_callback(background.close)
            layers = await stack.enter_async_context(_lazy_layers(config, store, metrics, background))
            core = Snapshotter(config.root, store, layers, mount_options=config.mount_options, spares=_SPARES)
            stack.callback(core.close)
            core.recover()
            sweeper = _Sweeper(core, config.cleanup_delay)
            background.spawn(sweeper.run(), "cleanup")
            background.spawn(_checkpoints(store), "checkpoint")
            if config.metrics_address:
                stack.callback(MetricsEndpoint(metrics, config.metrics_address).close)
            server = make_server(core, metrics, config.transport)
            listen(server, config.socket)
            await server.start()
            stack.push_async_callback(server.stop, _STOP_GRACE)
            sweeper.poke()
            log.info("serving", extra={"socket": config.socket, "root": config.root, "lazy": config.lazy})
            if ready is not None:
                ready()
            await until_stopped()
            log.info("stopping; mounts and data stay")


def settle() -> None:
    """Take modules and tables out of garbage collection, which stops everybody each time it goes through them.

    For a process that does nothing but serve; called when it is ready.
    """
    gc.collect()
    gc.freeze()


async def until_stopped() -> None:
    """Wait for SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    installed = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread: tests cancel instead
            loop.add_signal_handler(number, stop.set)
            installed.append(number)
    try:
        await stop.wait()
    finally:
        for number in installed:
            loop.remove_signal_handler(number)
