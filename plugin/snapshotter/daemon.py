"""The snapshotter as a process: ``await serve(config)``.

Start: lock, metastore, recovery, then the socket. Stop (SIGTERM, SIGINT): no new requests, running ones get a moment,
and that is all: mounts stay, because containers use them, and no data is deleted. ``kill -9`` is a normal stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable

from weenv.core.aio import Background, expect_many
from weenv.core.endpoint import MetricsEndpoint
from weenv.core.errors import WeenvError
from weenv.core.process import only_instance, stop_signals
from weenv.plugin.snapshotter.config import SnapshotterConfig
from weenv.plugin.snapshotter.lazylayers import LazyLayers, NoLazyLayers
from weenv.plugin.snapshotter.metastore import Metastore
from weenv.plugin.snapshotter.metrics import Metrics
from weenv.plugin.snapshotter.rpc import listen, make_server
from weenv.plugin.snapshotter.service import Snapshotter
from weenv.systemd import notify

log = logging.getLogger(__name__)

_CHECKPOINT = 30.0
"""Seconds between moves of the metastore's write-ahead log into its database."""
_STOP_GRACE = 5.0
_SPARES = 256
"""Snapshot directories kept ready: a burst of as many containers waits for no mkdir, which on ext4 may take 0.3 ms each."""


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


async def serve(
    config: SnapshotterConfig, *, ready: Callable[[], None] | None = None, passed: dict[str, list[int]] | None = None
) -> None:
    """Serve until SIGTERM, SIGINT or cancellation. ``ready`` is called once requests are answered.

    A listening socket called ``snapshotter`` that a service manager passed (:mod:`weenv.systemd.notify`) is served instead of
    one of our own: then nobody's connection is refused, whatever happens to this process. ``passed`` is for who has asked
    for the inherited descriptors already.

    Raises :class:`~weenv.core.errors.ConfigError`, :class:`~weenv.core.errors.StorageError`.
    """
    expect_many()
    passed = notify.inherited() if passed is None else passed
    inherited = notify.listening_socket(passed.pop("snapshotter", ()))
    waiting = next(iter(passed.pop("snapshotter-waiting", ())), None)
    notify.close_all(passed)
    with only_instance(config.root, "snapshotter", patience=notify.patience()):
        metrics = Metrics()
        async with contextlib.AsyncExitStack() as stack:
            stop = stack.enter_context(stop_signals())
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
            listen(server, config.socket, inherited, waiting)
            await server.start()
            stack.push_async_callback(server.stop, _STOP_GRACE)
            sweeper.poke()
            log.info("serving", extra={"socket": config.socket, "root": config.root, "lazy": config.lazy})
            if ready is not None:
                ready()
            notify.ready()
            background.spawn(notify.watchdog(), "watchdog")
            await stop.wait()
            notify.stopping()
            log.info("stopping; mounts and data stay")
