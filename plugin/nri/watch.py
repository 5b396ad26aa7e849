"""Which containers there are to manage: containerd's task events, and a listing at the start and every so often.

NRI shows only CRI's containers; those of ctr, nerdctl, docker and ``weenv run`` are found here, in all namespaces or the
configured ones. Events can be missed (containerd restarted, a full queue), so the listing is what is believed in the end; it
also finds who ended meanwhile. :class:`Watcher` tells a :class:`Listener`, in order, and never the same twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from weenv.core.errors import WeenvError
from weenv.plugin.containerd.client import Client, ContainerdError
from weenv.plugin.containerd.runtime import Container, Containers, Event, Process, Status, Tasks, subscribe_everywhere
from weenv.plugin.nri import labels
from weenv.plugin.nri.annotations import own_limits, own_pids, parse, plan_ceiling
from weenv.plugin.nri.config import ElasticConfig
from weenv.plugin.nri.creation import RECORD, Asked, asked, said_by
from weenv.plugin.nri.model import Bounds, EnvKey, Role

log = logging.getLogger(__name__)

_TOPICS = ("/tasks/start", "/tasks/exit", "/tasks/oom", "/tasks/delete")
_SANDBOX = ("io.cri-containerd.kind", "sandbox")
"""The label of a pod's own container, which only holds its namespaces (internal/cri/labels/labels.go, v2.1.9)."""
_RECONNECT = 1.0
"""Seconds after which a lost containerd is asked again."""
_LIVE = frozenset({Status.RUNNING, Status.PAUSED, Status.PAUSING})


@dataclass(frozen=True, slots=True)
class Found:
    """A running container that is ours to manage. ``pid`` is its first process, ``cgroup`` its OCI ``cgroupsPath``."""

    key: EnvKey
    pid: int
    bounds: Bounds
    role: Role = Role.TASK
    cgroup: str = ""
    name: str = ""
    """What its maker calls it: the plan's or image's name."""
    labels: Mapping[str, str] = field(default_factory=dict)


class Listener(Protocol):
    """Who is told. None of these may raise or wait."""

    def started(self, found: Found) -> None:
        """A container to manage runs; the same again where only its pid is new."""

    def ended(self, key: EnvKey, status: int | None) -> None:
        """It has ended; ``status`` is None where nobody saw it. Also for containers that were never ours."""

    def killed_for_memory(self, key: EnvKey) -> None:
        """The kernel killed a process of it. Also for containers that were never ours."""


def wanted(container: Container, namespace: str, namespaces: frozenset[str], config: ElasticConfig) -> Asked | None:
    """What a container asks for, or None where it is not ours to manage.

    It is where a label or annotation says so, where a plan let it grow, and in the namespaces that are managed as a whole.
    """
    if container.labels.get(_SANDBOX[0]) == _SANDBOX[1]:
        return None
    notes: Any = container.spec.get("annotations")
    notes = {str(k): str(v) for k, v in notes.items()} if isinstance(notes, Mapping) else {}
    (cpu, memory), processes = own_limits(container.spec), own_pids(container.spec)
    if labels.CEILING in container.labels:  # of weenv run: its limits are what it starts with
        said = parse(said_by(container.labels))
        top_cpu, top_memory = plan_ceiling(container.labels[labels.CEILING])
        bounds = replace(config.bounds(cpu, memory, top_cpu, top_memory), pids=said.pids(processes))
        found = Asked(bounds, said.role, said.elastic is not False, said.complaints)
    else:
        # What nobody said anything about stays out of a whole namespace's rule only by weenv.dev/elastic=false.
        said_all = said_by(notes, container.labels)
        always = namespace in namespaces or said_all.get(labels.ELASTIC) == "true"
        found = asked(said_all, cpu, memory, config, own_pids=processes, always=always, record=notes.get(RECORD, ""))
    return found if found.managed else None


class Watcher:
    """Watches one containerd. ``namespaces``: managed as a whole; ``only``: looked at, empty: all."""

    def __init__(
        self,
        client: Client,
        listener: Listener,
        config: ElasticConfig,
        *,
        namespaces: frozenset[str] = frozenset(),
        only: frozenset[str] = frozenset(),
        every: float = 30.0,
    ) -> None:
        self._client = client
        self._listener = listener
        self._config = config
        self._namespaces = namespaces
        self._only = only
        self._every = every
        self._known: dict[EnvKey, int] = {}
        self._complained: set[EnvKey] = set()
        self._over: set[tuple[EnvKey, int]] = set()
        """(container, first process) of what has ended since the present listing was asked for, which may still have it."""
        self.on_listed: Callable[[], None] = lambda: None
        """Called after each listing."""

    async def run(self) -> None:
        """Watch until cancelled. A containerd that is away is waited for, said once."""
        away = False
        while True:
            events = asyncio.ensure_future(self._follow())
            try:
                # The stream is opened first: who starts between it and the listing is seen by both.
                while not events.done():
                    await self.list_all()
                    if away:
                        log.info("containerd is back")
                        away = False
                    await asyncio.wait([events], timeout=self._every)
                await events
            except WeenvError as error:
                if not away:
                    log.warning("containerd cannot be watched, it will be tried again: %s", error)
                    away = True
            finally:
                events.cancel()
                await asyncio.gather(events, return_exceptions=True)
            await asyncio.sleep(_RECONNECT)

    async def _follow(self) -> None:
        async for event in subscribe_everywhere(self._client, *(f'topic=="{topic}"' for topic in _TOPICS)):
            try:
                await self._see(event)
            except ContainerdError as error:
                if error.code != "NOT_FOUND":  # it has ended already
                    log.debug("%s of %s: %s", event.topic, event.namespace, error)

    def _looked_at(self, namespace: str) -> bool:
        return not self._only or namespace in self._only

    async def _see(self, event: Event) -> None:
        if event.body is None or not self._looked_at(event.namespace):
            return
        key = EnvKey(event.namespace, str(event.body.container_id))
        if event.topic == "/tasks/start":
            await self._look(key, int(event.body.pid))
        elif event.topic == "/tasks/oom":
            self._listener.killed_for_memory(key)
        elif event.body.id in ("", key.container_id):  # an exit or a delete, of the first process
            self._gone(key, int(event.body.exit_status))

    def _gone(self, key: EnvKey, status: int | None) -> None:
        pid = self._known.pop(key, None)
        if pid is not None:
            self._over.add((key, pid))
            self._complained.discard(key)
            self._listener.ended(key, status)

    async def _look(self, key: EnvKey, pid: int) -> None:
        if self._known.get(key) == pid:
            return
        record = await Containers(self._client.namespace(key.namespace)).get(key.container_id)
        self._offer(key, pid, record)

    def _offer(self, key: EnvKey, pid: int, record: Container) -> None:
        if self._known.get(key) == pid or (key, pid) in self._over:
            return  # the listing and an event saw the same start, or an event its end as well
        self._known[key] = pid
        try:
            said = wanted(record, key.namespace, self._namespaces, self._config)
        except Exception:  # one container that nobody can make sense of must not end the watching of all others
            log.exception("%s: not managed, its record cannot be understood", key)
            return
        if said is None:
            return
        if key not in self._complained:
            self._complained.add(key)
            for line in said.complaints:
                log.warning("%s: %s", key, line)
        linux = record.spec.get("linux")
        group = linux.get("cgroupsPath") if isinstance(linux, Mapping) else ""
        name = record.labels.get(labels.ENVIRONMENT) or record.image
        self._listener.started(Found(key, pid, said.bounds, said.role, str(group or ""), name, dict(record.labels)))

    async def list_all(self) -> None:
        """Compare with what containerd has now. Raises ContainerdError."""
        before, seen = set(self._known), set()
        self._over.clear()
        for namespace in await self._client.namespaces():
            if not self._looked_at(namespace):
                continue
            view = self._client.namespace(namespace)
            tasks = await Tasks(view).list_all()
            running = {EnvKey(namespace, _container(task)): task for task in tasks if task.status in _LIVE}
            seen |= set(running)
            fresh = [key for key, task in running.items() if self._known.get(key) != task.pid]
            if len(fresh) > 8:
                records = {item.id: item for item in await Containers(view).find()}
                for key in fresh:
                    if key.container_id in records:
                        self._offer(key, running[key].pid, records[key.container_id])
            else:
                for key in fresh:
                    try:
                        await self._look(key, running[key].pid)
                    except ContainerdError as error:
                        if error.code != "NOT_FOUND":
                            raise
            for task in tasks:
                if task.status is Status.STOPPED:
                    self._gone(EnvKey(namespace, _container(task)), task.exit_status)
        for key in before - seen:  # who came while this was asked for is not missing
            self._gone(key, None)
        self.on_listed()


def _container(task: Process) -> str:
    return task.container or task.id
