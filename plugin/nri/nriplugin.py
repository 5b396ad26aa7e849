"""The NRI plugin: registers with a runtime, learns of CRI's containers, sets starting quotas; asyncio around ``wire``.

::

    plugin = NriPlugin(handler, config, elastic)
    task = asyncio.create_task(plugin.run())        # external: connects, and again whenever the connection ends
    await plugin.synchronized.wait()

What the runtime asks goes to the handler (:class:`weenv.plugin.nri.nrihandler.Handler`) and its answer back, within a time
that is well below the runtime's own patience. Whatever goes wrong on the way - a handler that is late or fails, a message
that cannot be read - lets the container through as it is, is logged, and counted in :attr:`NriPlugin.counts`.

Registering stops CRI's calls for as long as one of them is under way, such as a graceful stop (containerd issue 14083), and
is therefore not repeated faster than the configuration says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weenv.core.errors import WeenvError
from weenv.plugin.nri import nriconfig
from weenv.plugin.nri.actuators.own import OwnUpdates
from weenv.plugin.nri.config import ElasticConfig
from weenv.plugin.nri.creation import RECORD, Asked, asked, said_by
from weenv.plugin.nri.nriconfig import NriConfig
from weenv.plugin.nri.nriconnection import Connection, Lost, RuntimeRefused
from weenv.plugin.nri.nrihandler import Handler, Seen
from weenv.plugin.nri.wire import messages
from weenv.plugin.nri.wire.messages import Container, Pod, Update
from weenv.plugin.nri.wire.versions import Runtime

log = logging.getLogger(__name__)

SOCKET_VARIABLE = "NRI_PLUGIN_SOCKET"
"""Set by a runtime for a plugin that it launches: the number of a connected descriptor (nri, pkg/api/plugin.go)."""
_UPDATE_TIMEOUT = 10.0
"""Seconds for UpdateContainers: each container takes the runtime some 30 ms."""
_UPDATES_PER_CALL = 300
_SWAP_LIMITED = ("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes", "/sys/fs/cgroup/cgroup.controllers")
"""One of them exists where memory and swap can be limited together: v1 with accounting of swap, v2."""


class NriUnavailable(WeenvError):
    """Updates cannot be sent: the plugin is not connected, or the runtime's NRI is one that they would stop for good."""


@dataclass(slots=True)
class Counts:
    """What happened since the start, for metrics; every number only grows."""

    connections: int = 0
    """Times that the plugin was synchronized with a runtime."""
    created: int = 0
    """Containers whose creation the runtime asked about."""
    adjusted: int = 0
    """Of these, those that got a quota."""
    refused: int = 0
    """Of these, those that were refused (``strict``)."""
    late: int = 0
    """Questions that the handler did not answer in time: let through."""
    failed: int = 0
    """Questions on which the handler failed: let through."""
    unreadable: int = 0
    """Messages of the runtime that could not be read: let through."""
    complaints: int = 0
    """Annotations that made no sense."""


class NriPlugin:
    """One plugin. Belongs to one event loop, which must not be blocked for long: the runtime counts its seconds."""

    def __init__(
        self, handler: Handler, config: NriConfig, elastic: ElasticConfig, *, own_updates: OwnUpdates | None = None
    ) -> None:
        self.handler = handler
        self.config = config
        self.elastic = elastic
        self.own_updates = own_updates or OwnUpdates()
        self.counts = Counts()
        self.limits_swap = any(map(os.path.exists, _SWAP_LIMITED))
        self.runtime = Runtime()
        """What it said of itself when it last configured us."""
        self.synchronized = asyncio.Event()
        """Set while containers are known and events arrive."""
        self._connection: Connection | None = None
        self._told = ""

    # -- life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Connect to the runtime's socket, and again whenever that ends, until cancelled."""
        loop = asyncio.get_running_loop()
        pause = self.config.reconnect_after
        while True:
            begun = loop.time()
            try:
                reader, writer = await asyncio.open_unix_connection(self.config.socket)
            except OSError as error:
                reason = f"{self.config.socket}: {error.strerror or error}"
            else:
                reason = await self._serve(reader, writer)
            if loop.time() - begun > self.config.reconnect_at_most:
                pause = self.config.reconnect_after
            self._say_once(f"NRI: {reason}; trying again, at most {self.config.reconnect_at_most:g} s apart")
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))  # noqa: S311 - nodes must not act in step
            pause = min(2 * pause, self.config.reconnect_at_most)

    async def run_launched(self, descriptor: int) -> str:
        """Serve the runtime that launched this process over the descriptor it left open; why that ended.

        Raises WeenvError where the descriptor is no connected unix socket.
        """
        try:
            connected = socket.socket(fileno=descriptor)
        except OSError as error:
            raise WeenvError(f"descriptor {descriptor} of {SOCKET_VARIABLE} is no socket: {error.strerror}") from error
        try:
            reader, writer = await asyncio.open_unix_connection(sock=connected)
        except (OSError, ValueError) as error:
            connected.close()
            raise WeenvError(f"descriptor {descriptor} of {SOCKET_VARIABLE} cannot be used: {error}") from error
        return await self._serve(reader, writer, launched=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, launched: bool = False) -> str:
        connection = Connection(self, reader, writer, launched=launched)
        self._connection = connection
        reason = "stopped"
        try:
            reason = await connection.run()
        finally:
            self._connection = None
            was = self.synchronized.is_set()
            self.synchronized.clear()
            if was:
                try:
                    self.handler.disconnected(reason)
                except Exception:
                    log.exception("NRI: the handler failed to take note of a lost connection")
        return reason

    def _say_once(self, text: str) -> None:
        """A warning where it is news: a runtime that is not there is asked for every few seconds."""
        log.log(logging.DEBUG if text == self._told else logging.WARNING, "%s", text)
        self._told = text

    # -- what the connection calls ----------------------------------------------------------------------------------

    def configured(self, runtime: Runtime, text: str) -> int:
        """The runtime has told what it is; the events to subscribe to. Raises ConfigError for nonsense in ``text``."""
        if text.strip():
            self.config, self.elastic = nriconfig.from_text(text, self.config, self.elastic)
        self.runtime = runtime
        wanted = messages.events_mask(
            messages.CREATE_CONTAINER,
            messages.POST_START_CONTAINER,
            messages.UPDATE_CONTAINER,
            messages.STOP_CONTAINER,
            messages.REMOVE_CONTAINER,
        )
        return wanted & runtime.events

    def connected(self) -> None:
        """Events arrive from now on."""
        self.counts.connections += 1
        self._told = ""
        self.synchronized.set()
        told = f" (NRI {self.runtime.nri_version})" if self.runtime.nri_version else ""
        log.info("NRI: registered with %s %s%s as %s-%s", self.runtime.name, self.runtime.version, told,
                 self.config.index, self.config.name)  # fmt: skip

    def seen(self, pod: Pod, container: Container, *, new: bool = False) -> Seen:
        """A container with its bounds. One that is ``new`` carries no record of ours yet; its complaints are logged."""
        said = said_by(container.annotations, pod.annotations, container.labels)
        own = container.limits
        result = asked(
            said,
            own.cpu or 0.0,
            own.memory or 0,
            self.elastic,
            always=pod.namespace in self.config.namespaces,
            record="" if new else container.annotations.get(RECORD, ""),
        )
        found = Seen(pod, container, result)
        if new:
            self._complain(found, result)
        return found

    def _complain(self, seen: Seen, result: Asked) -> None:
        self.counts.complaints += len(result.complaints)
        for text in result.complaints:
            log.warning("NRI: %s: %s", seen, text)

    # -- updates at any time ----------------------------------------------------------------------------------------

    @property
    def may_update(self) -> bool:
        """Whether :meth:`update` is possible now."""
        return self._connection is not None and self.synchronized.is_set() and self.runtime.takes_updates

    async def update(self, updates: Sequence[Update]) -> list[str]:
        """Change running containers by NRI's UpdateContainers; ids of those that the runtime failed to change.

        Ids that the runtime does not know are no failure to it. Raises NriUnavailable, also where the runtime's NRI may
        stop CRI for good when asked this (before v0.12.2), and from within a handler, whose call it would wait for.
        """
        connection = self._connection
        if connection is None or not self.synchronized.is_set():
            raise NriUnavailable("the NRI plugin is not connected", hint="wait for it, or use another actuator")
        if not self.runtime.takes_updates:
            raise NriUnavailable(
                f"{self.runtime.name} {self.runtime.version}: its NRI can stop CRI for good when it is asked for updates",
                hint="use the actuator tasks or cri; NRI is safe from v0.12.2",
            )
        failed: list[str] = []
        for batch in _batches(updates):
            payload = messages.encode("UpdateContainersRequest", {"update": messages.updates(batch)})
            try:
                reply = await connection.request("UpdateContainers", payload, _UPDATE_TIMEOUT)
            except (Lost, RuntimeRefused) as error:
                raise NriUnavailable(f"NRI UpdateContainers: {error}") from error
            answer = messages.decode("UpdateContainersResponse", reply)
            failed += [item.get("container_id", "") for item in answer.get("failed", [])]
        return failed


def _batches(updates: Sequence[Update]) -> Iterable[Sequence[Update]]:
    return (updates[at : at + _UPDATES_PER_CALL] for at in range(0, len(updates), _UPDATES_PER_CALL))


def launched_descriptor(environment: str) -> int:
    """The number in :data:`SOCKET_VARIABLE`. Raises WeenvError."""
    with contextlib.suppress(ValueError):
        number = int(environment)
        if 2 < number < 1 << 20:
            return number
    raise WeenvError(f"{SOCKET_VARIABLE} must be the number of a descriptor, not {environment[:40]!r}")


__all__ = ["SOCKET_VARIABLE", "Counts", "NriPlugin", "NriUnavailable", "launched_descriptor"]
