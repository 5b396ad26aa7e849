"""Elastic provisioning as a process: ``await serve(...)``.

Start: lock, journals, controller, its socket, then containerd and NRI are watched; what runs already is managed from the limits
that it has. Stop (SIGTERM, SIGINT), and ``kill -9`` alike: limits stay as they are, and the next start goes on from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

from weenv.core.aio import expect_many
from weenv.core.endpoint import MetricsEndpoint
from weenv.core.errors import ConfigError
from weenv.core.process import only_instance, stop_signals
from weenv.plugin.containerd.client import Client
from weenv.plugin.nri.actuate import Actuator, TaskUpdates
from weenv.plugin.nri.actuators.chosen import ByNamespace, NriWhereSafe
from weenv.plugin.nri.actuators.cri import CriUpdates
from weenv.plugin.nri.actuators.own import OwnUpdates
from weenv.plugin.nri.admission import Ledger
from weenv.plugin.nri.config import ElasticConfig
from weenv.plugin.nri.control import Control
from weenv.plugin.nri.controller import Controller
from weenv.plugin.nri.criquotas import CriQuotas
from weenv.plugin.nri.journal import DECISIONS, EVENTS, Journal, Kind
from weenv.plugin.nri.metrics import Metrics
from weenv.plugin.nri.model import Resources
from weenv.plugin.nri.nriconfig import NriConfig
from weenv.plugin.nri.nriplugin import NriPlugin
from weenv.plugin.nri.record import Record
from weenv.plugin.nri.serveconfig import ServeConfig
from weenv.plugin.nri.watch import Watcher
from weenv.systemd import notify

log = logging.getLogger(__name__)

_WHAT = "daemon of elastic provisioning"


def capacity() -> Resources:
    """CPUs that this process may use, and the machine's memory (proc(5), MemTotal)."""
    with open("/proc/meminfo") as file:
        total = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemTotal:"))
    return Resources(float(len(os.sched_getaffinity(0))), total)


async def serve(
    elastic: ElasticConfig, config: ServeConfig, nri: NriConfig, *, ready: Callable[[], None] | None = None
) -> None:
    """Serve until SIGTERM, SIGINT or cancellation. ``ready`` is called once environments are managed.

    A listening socket ``elastic`` that a service manager passed (:mod:`weenv.systemd.notify`) is served instead of one of our
    own. Raises ConfigError, StorageError, and OSError where the journals cannot be written.
    """
    if os.geteuid() != 0:
        raise ConfigError("only root can change limits of containers", hint="start it as root")
    if config.cri_updates == "nri" and not nri.enabled:
        raise ConfigError('elastic.serve.cri_updates = "nri" needs nri.enabled', hint="enable it, or say tasks or cri")
    inherited = notify.take_socket("elastic")
    expect_many()  # a dozen descriptors an environment
    async with contextlib.AsyncExitStack() as exits:
        # One for each containerd, not one for each root: two would undo each other's decisions, whatever files they keep.
        place, name = os.path.split(os.path.realpath(config.address))
        patience = notify.patience()
        stop = exits.enter_context(stop_signals())
        exits.enter_context(only_instance(place, _WHAT, f"{name}.weenv-elastic", patience=patience))
        exits.enter_context(only_instance(config.root, _WHAT, patience=patience))
        metrics = Metrics()
        client = await exits.enter_async_context(Client(config.address))
        events = Journal(os.path.join(config.root, EVENTS), config.log_bytes)
        decisions = Journal(os.path.join(config.root, DECISIONS), config.log_bytes)
        record = Record(events, decisions, metrics, client)
        exits.push_async_callback(record.close)
        own = OwnUpdates()
        tasks = TaskUpdates(client)
        by_nri = NriWhereSafe(tasks)
        ways: dict[str, Actuator] = {"tasks": tasks, "cri": CriUpdates(client, own=own), "nri": by_nri}
        actuator = ByNamespace(ways[config.cri_updates], tasks)
        ledger = Ledger(capacity(), elastic.admission)
        controller = Controller(elastic, ledger, actuator, record, metrics, end=tasks.end, processes=tasks.pids)
        exits.push_async_callback(controller.close)
        control = Control(controller)
        await control.start(config.socket, inherited)
        exits.push_async_callback(control.close)
        if config.metrics_address:
            exits.callback(MetricsEndpoint(metrics, config.metrics_address).close)
        watcher = Watcher(client, controller, elastic, namespaces=config.namespaces, only=config.only, every=config.list_every)
        listed = asyncio.Event()
        watcher.on_listed = listed.set
        work = [controller.run(), watcher.run()]
        if nri.enabled:
            plugin = NriPlugin(CriQuotas(controller), nri, elastic, own_updates=own)
            by_nri.use(plugin)
            work.append(plugin.run())
        running: list[asyncio.Future[Any]] = [asyncio.ensure_future(item) for item in work]
        exits.push_async_callback(_end, running)
        signs = asyncio.ensure_future(notify.watchdog())
        running.append(signs)
        notify.ready()  # asked and answered from here on; a containerd that is not there yet is waited for
        record.event(Kind.SERVING)
        log.info("serving", extra={"socket": config.socket, "containerd": config.address, "nri": nri.enabled})
        stopped = asyncio.ensure_future(stop.wait())
        running.append(stopped)
        first = asyncio.ensure_future(listed.wait())
        running.append(first)
        await asyncio.wait([first, *running[: len(work)], stopped], return_when=asyncio.FIRST_COMPLETED)
        if first.done() and ready is not None:
            ready()
        done, _ = await asyncio.wait([*running[: len(work)], stopped], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # none of them ends by itself but by a fault
        notify.stopping()
        log.info("stopping; limits stay as they are")


async def _end(tasks: list[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
