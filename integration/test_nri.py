"""The NRI plugin with real containerd: starting quotas in the cgroup's own files, restarts, slowness, and no deadlock."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from weenv.plugin.containerd.client import Client
from weenv.plugin.nri.actuate import Actuator, EnvGone, TaskUpdates
from weenv.plugin.nri.actuators.cri import CriUpdates
from weenv.plugin.nri.config import ElasticConfig
from weenv.plugin.nri.model import EnvKey, Quota, Role
from weenv.plugin.nri.nriconfig import NriConfig
from weenv.plugin.nri.nrihandler import Answer, Seen, StartingQuotas
from weenv.plugin.nri.nriplugin import NriPlugin, NriUnavailable
from weenv.plugin.nri.wire import messages
from weenv.plugin.nri.wire.messages import Limits, Update
from weenv_testkit import tools
from weenv_testkit.containerd import Containerd
from weenv_testkit.cri import Cri, Pod
from weenv_testkit.procs import Failed, Process, clean_environment, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store

MIB = 1 << 20
GIB = 1 << 30
SMALL = {"weenv.dev/cpu.start": "500m", "weenv.dev/memory.start": "256Mi", "weenv.dev/role": "service"}
SLEEP = ("sleep", "1000")


class Node:
    """A containerd with NRI, its CRI, and an image to start."""

    def __init__(self, containerd: Containerd, cri: Cri, image: str) -> None:
        self.containerd = containerd
        self.cri = cri
        self.image = image

    @contextmanager
    def pod(self, annotations: Mapping[str, str] | None = None) -> Iterator[Pod]:
        """A pod, removed with all that is in it."""
        made = self.cri.run_pod("nri", annotations)
        try:
            yield made
        finally:
            self.cri.remove_pod(made)

    def start(self, pod: Pod, *, cpu: float = 0.0, memory: int = 0) -> str:
        """A container that sleeps."""
        return self.cri.start_container(pod, self.image, *SLEEP, cpu=cpu, memory=memory)

    def limits(self, container: str) -> tuple[float | None, int | None]:
        """Cores and bytes, as the cgroup's files have them; None: no limit."""
        cpu = memory = None
        root = "/sys/fs/cgroup"
        for folder in glob.glob(f"{root}/{self.containerd.cgroup}/*/{container}"):  # v2
            quota, period = _read(folder, "cpu.max").split()
            cpu = None if quota == "max" else int(quota) / int(period)
            limit = _read(folder, "memory.max")
            memory = None if limit == "max" else int(limit)
        for folder in glob.glob(f"{root}/cpu/{self.containerd.cgroup}/*/{container}"):
            quota = _read(folder, "cpu.cfs_quota_us")
            cpu = None if quota == "-1" else int(quota) / int(_read(folder, "cpu.cfs_period_us"))
        for folder in glob.glob(f"{root}/memory/{self.containerd.cgroup}/*/{container}"):
            limit = _read(folder, "memory.limit_in_bytes")
            memory = int(limit) if int(limit) < 1 << 60 else None
        return cpu, memory


def _read(folder: str, name: str) -> str:
    with open(os.path.join(folder, name)) as file:
        return file.read().strip()


@pytest.fixture(scope="module")
def node(line: str, home: str, registry: Registry, store: Store) -> Iterator[Node]:
    """One for the module and line."""
    path = os.path.join(home, f"nri-{line}")
    os.mkdir(path)
    store.pause()
    with Containerd(line, path, registry=registry.host, nri=True) as containerd, Cri(containerd) as cri:
        image = store.plain("small")
        cri.pull(image)
        yield Node(containerd, cri, image)
    shutil.rmtree(path, ignore_errors=True)


class Handler(StartingQuotas):
    """Starting quotas, and notes of what was told."""

    def __init__(self) -> None:
        self.present: list[Seen] = []
        self.told: list[tuple[str, Seen]] = []
        self.wanted: list[Limits] = []
        self.updates: tuple[Update, ...] = ()
        self.slow = False
        self.reasons: list[str] = []

    async def synchronized(self, containers: Sequence[Seen]) -> Sequence[Update]:
        self.present = list(containers)
        return self.updates

    async def creating(self, seen: Seen) -> Answer:
        if self.slow:
            await asyncio.sleep(60)
        return Answer((await super().creating(seen)).quota, self.updates)

    async def started(self, seen: Seen) -> None:
        self.told.append(("started", seen))

    async def updating(self, seen: Seen, wanted: Limits) -> Answer:
        self.wanted.append(wanted)
        return Answer()

    async def stopped(self, seen: Seen) -> Sequence[Update]:
        self.told.append(("stopped", seen))
        return ()

    async def removed(self, seen: Seen) -> None:
        self.told.append(("removed", seen))

    def disconnected(self, reason: str) -> None:
        self.reasons.append(reason)

    def heard(self, what: str, container: str) -> bool:
        """Whether this was told of that container."""
        return any(kind == what and seen.container.id == container for kind, seen in self.told)


@asynccontextmanager
async def connected(node: Node, handler: Handler, **settings: Any) -> AsyncIterator[NriPlugin]:
    """A plugin of this process, synchronized."""
    plugin = NriPlugin(handler, NriConfig(socket=node.containerd.nri_socket, **settings), ElasticConfig())
    task = asyncio.ensure_future(plugin.run())
    try:
        await asyncio.wait_for(plugin.synchronized.wait(), 60)
        yield plugin
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(what: str, check: Any) -> None:
    """Wait for ``check`` without standing in the way of the plugin."""
    await asyncio.to_thread(wait_until, what, check, 60)


@contextmanager
def serving(node: Node, *command: str, settings: str = "", ends: int = 0) -> Iterator[Process]:
    """``weenv nri serve``, or another command that has the plugin; ``ends``: its exit status."""
    config, log = (os.path.join(node.containerd.home, name) for name in ("weenv.toml", "weenv-nri.log"))
    with open(config, "w") as file:
        file.write(f'[nri]\nsocket = "{node.containerd.nri_socket}"\nnamespaces = ["managed"]\n{settings}')
    with contextlib.suppress(FileNotFoundError):
        os.unlink(log)
    argv = [*tools.weenv(), *(command or ("nri", "serve")), "--config", config]
    process = Process("weenv nri", argv, log, clean_environment())
    try:
        process.wait_ready(lambda: "registered with containerd" in process.log_text(), 30)
        yield process
    finally:
        assert process.stop() == ends, process.log_text()


def test_a_container_starts_with_its_quota_and_its_own_limits_are_the_ceiling(node: Node) -> None:
    with serving(node) as process, node.pod(SMALL) as pod:
        container = node.start(pod, cpu=2.0, memory=GIB)
        assert node.limits(container) == (0.5, 256 * MIB)
        unlimited = node.start(pod)
        assert node.limits(unlimited) == (0.5, 256 * MIB)
        with node.pod() as other:
            assert node.limits(node.start(other, cpu=2.0, memory=GIB)) == (2.0, GIB)
            assert node.limits(node.start(other)) == (None, None)
        assert "WARNING" not in process.log_text()


def test_nonsense_in_annotations_is_named_and_the_default_holds(node: Node) -> None:
    words = {"weenv.dev/cpu.start": "plenty", "weenv.dev/memory.start": "128Mi", "weenv.dev/role": "king"}
    with serving(node) as process, node.pod(words) as pod:
        container = node.start(pod, cpu=0.25, memory=GIB)
        assert node.limits(container) == (0.25, 128 * MIB)  # the default of 0.5 is cut to its own limit
        log = process.log_text()
        assert "weenv.dev/cpu.start must be a number of CPUs such as 2, 0.5 or 500m, not 'plenty'" in log
        assert "weenv.dev/role must be task or evaluation or service, not 'king'" in log


@pytest.mark.parametrize("way", ["tasks", "cri", "nri"])
def test_the_daemon_raises_the_quota_of_a_busy_pod(node: Node, way: str) -> None:
    home = node.containerd.home
    settings = f'[elastic.serve]\naddress = "{node.containerd.socket}"\nroot = "{home}/el"\nsocket = "{home}/e.sock"\n'
    os.makedirs(os.path.join(home, "el"), exist_ok=True)
    settings += f'cri_updates = "{way}"\n'
    tiny = SMALL | {"weenv.dev/cpu.start": "20m"}  # so little that it is short of it on the busiest machine
    with serving(node, "elastic", "serve", settings=settings) as process, node.pod(tiny) as pod, node.pod() as other:
        idle = node.start(other, cpu=0.25, memory=GIB)
        busy = node.cri.start_container(pod, node.image, "sh", "-c", "while :; do :; done", cpu=1.5, memory=GIB)
        process.wait_ready(lambda: (node.limits(busy)[0] or 9.0) > 0.02, 60)
        cpu, memory = node.limits(busy)
        assert cpu is not None and cpu <= 1.5 and memory == 256 * MIB
        assert node.limits(idle) == (0.25, GIB)  # nobody asked for it
        # Neither line has an NRI that takes updates at any time.
        assert (f"changed by tasks (containerd {node.containerd.line}" in process.log_text()) == (way == "nri")
        assert "WARNING" not in process.log_text() and "ERROR" not in process.log_text()


def test_nobody_waits_for_a_plugin_that_is_killed(node: Node) -> None:
    with node.pod(SMALL) as pod:
        with serving(node, ends=-9) as process:
            process.kill()
        begun = time.monotonic()
        assert node.limits(node.start(pod, cpu=2.0, memory=GIB)) == (2.0, GIB)
        assert time.monotonic() - begun < 30


async def test_what_exists_is_synchronized_and_what_happens_is_told(node: Node) -> None:
    def begin() -> tuple[Pod, str]:
        pod = node.cri.run_pod("nri", SMALL)
        return pod, node.start(pod, cpu=2.0, memory=GIB)

    pod, before = await asyncio.to_thread(begin)
    try:
        handler = Handler()
        async with connected(node, handler) as plugin:
            seen = {item.container.id: item for item in handler.present}[before]
            assert seen.managed and seen.running and seen.asked.role is Role.SERVICE and seen.pod.namespace == "weenv-test"
            assert seen.asked.bounds.ceiling == Quota(2.0, GIB) and seen.container.limits.cpu == 2.0
            assert os.path.exists(f"/proc/{seen.container.pid}")
            created = await asyncio.to_thread(node.start, pod, cpu=1.0, memory=GIB)
            await until("the start to be told", lambda: handler.heard("started", created))
            started = next(item for kind, item in handler.told if kind == "started")
            assert started.running and started.container.pid > 0 and started.asked.bounds.ceiling == Quota(1.0, GIB)
            await asyncio.to_thread(node.cri.remove_container, created)
            await until("the removal to be told", lambda: handler.heard("removed", created))
            assert handler.heard("stopped", created)
            assert (plugin.counts.created, plugin.counts.adjusted, plugin.counts.connections) == (1, 1, 1)
    finally:
        await asyncio.to_thread(node.cri.remove_pod, pod)


async def test_it_comes_back_to_a_containerd_that_restarts(node: Node) -> None:
    handler = Handler()
    async with connected(node, handler) as plugin:
        pod = await asyncio.to_thread(node.cri.run_pod, "nri", SMALL)
        try:
            container = await asyncio.to_thread(node.start, pod, cpu=2.0, memory=GIB)
            node.containerd.restart()  # here, not in a thread: it ends with the thread that started it (pdeathsig)
            await until("the plugin to be back", lambda: plugin.counts.connections == 2)
            assert handler.reasons == ["the runtime closed the connection"]
            seen = {item.container.id: item for item in handler.present}[container]
            # Its limits are ours now; its own, the ceiling, are what we recorded at its creation.
            assert (seen.container.limits.cpu, seen.container.limits.memory) == (0.5, 256 * MIB)
            assert seen.asked.bounds.ceiling == Quota(2.0, GIB) and seen.asked.role is Role.SERVICE
            again = await asyncio.to_thread(node.start, pod, cpu=2.0, memory=GIB)
            assert node.limits(again) == (0.5, 256 * MIB)
        finally:
            await asyncio.to_thread(node.cri.remove_pod, pod)


async def test_a_slow_handler_lets_containers_through(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    handler = Handler()
    async with connected(node, handler, answer_within=0.3) as plugin:
        pod = await asyncio.to_thread(node.cri.run_pod, "nri", SMALL)
        try:
            handler.slow = True
            container = await asyncio.to_thread(node.start, pod, cpu=2.0, memory=GIB)
            assert node.limits(container) == (2.0, GIB)
            assert plugin.counts.late == 1 and "CreateContainer of weenv-test/" in caplog.text
            handler.slow = False
            container = await asyncio.to_thread(node.start, pod, cpu=2.0, memory=GIB)
            assert node.limits(container) == (0.5, 256 * MIB)
            assert plugin.counts.connections == 1 and plugin.synchronized.is_set()  # the runtime never lost patience
        finally:
            await asyncio.to_thread(node.cri.remove_pod, pod)


async def test_strict_refuses_what_makes_no_sense(node: Node) -> None:
    async with connected(node, Handler(), strict=True) as plugin:
        pod = await asyncio.to_thread(node.cri.run_pod, "nri", {"weenv.dev/memory.max": "lots"})
        try:
            with pytest.raises(Failed, match=r"weenv: weenv.dev/memory.max must be a size such as 512Mi or 2Gi, not 'lots'"):
                await asyncio.to_thread(node.start, pod)
            assert plugin.counts.refused == 1 and plugin.synchronized.is_set()
        finally:
            await asyncio.to_thread(node.cri.remove_pod, pod)


async def test_limits_set_by_the_owner_and_by_us(node: Node) -> None:
    handler = Handler()
    async with connected(node, handler) as plugin, Client(node.containerd.socket) as client:
        pod = await asyncio.to_thread(node.cri.run_pod, "nri", SMALL)
        try:
            container = await asyncio.to_thread(node.start, pod, cpu=2.0, memory=GIB)
            key = EnvKey("k8s.io", container)
            await CriUpdates(client, own=plugin.own_updates).apply(key, 0.75, 300 * MIB, None)
            assert node.limits(container) == (0.75, 300 * MIB) and handler.wanted == []
            await TaskUpdates(client).apply(key, 1.25, None, None)
            assert node.limits(container) == (1.25, 300 * MIB) and handler.wanted == []
            await asyncio.to_thread(lambda: node.cri.update(container, cpu=1.5, memory=400 * MIB))
            assert node.limits(container) == (1.5, 400 * MIB)
            ((cpu, memory),) = [(item.cpu, item.memory) for item in handler.wanted]
            assert (cpu, memory) == (1.5, 400 * MIB)
            with pytest.raises(NriUnavailable, match="its NRI can stop CRI"):
                await plugin.update([Update(container, 1.0)])
            await asyncio.to_thread(node.cri.remove_container, container)
            with pytest.raises(EnvGone):
                await CriUpdates(client, own=plugin.own_updates).apply(key, 1.0, None, None)
        finally:
            await asyncio.to_thread(node.cri.remove_pod, pod)


async def test_large_answers_and_requests_are_framed_for_the_runtimes_reader(node: Node) -> None:
    handler = Handler()
    async with connected(node, handler) as plugin:
        pod = await asyncio.to_thread(node.cri.run_pod, "nri", SMALL)
        try:
            first = await asyncio.to_thread(node.start, pod, cpu=2.0, memory=GIB)
            unknown = tuple(Update(f"{number:064x}", 1.0, GIB) for number in range(2000))
            handler.updates = (*unknown[:300], Update(first, 1.75, 512 * MIB))
            second = await asyncio.to_thread(node.start, pod, cpu=2.0, memory=GIB)
            assert node.limits(second) == (0.5, 256 * MIB) and node.limits(first) == (1.75, 512 * MIB)
            handler.updates = ()
            connection = plugin._connection
            assert connection is not None
            # Nothing else happens here now, so that what deadlocks these runtimes cannot.
            for count in (1, 300, 2000):
                payload = messages.encode("UpdateContainersRequest", {"update": messages.updates(unknown[:count])})
                assert await connection.request("UpdateContainers", payload, 20) == b""
            third = await asyncio.to_thread(node.start, pod, cpu=2.0, memory=GIB)
            assert node.limits(third) == (0.5, 256 * MIB) and plugin.counts.connections == 1
        finally:
            await asyncio.to_thread(node.cri.remove_pod, pod)


def test_launched_by_the_runtime(node: Node) -> None:
    containerd = node.containerd
    program, config = os.path.join(containerd.nri_plugins, "10-weenv"), os.path.join(containerd.nri_config, "10-weenv.conf")
    log = os.path.join(containerd.home, "launched.log")
    with node.pod() as pod:
        existing = node.start(pod)
        try:
            with open(config, "w") as file:
                file.write('[nri]\nnamespaces = ["weenv-test"]\n[elastic]\nstart_cpu = 0.75\nstart_memory = 134217728\n')
            with open(program, "w") as file:
                (weenv,) = tools.weenv()
                file.write(f"#!/bin/sh\nexec {weenv} nri serve --log-level debug 2>>{log}\n")
            os.chmod(program, 0o755)
            containerd.restart()
            with node.pod() as other:
                assert node.limits(node.start(other)) == (0.75, 128 * MIB)
                assert node.limits(node.start(other, cpu=0.5, memory=64 * MIB)) == (0.5, 64 * MIB)
            assert node.limits(existing) == (None, None)
            with open(log) as text:
                assert "registered with containerd" in text.read()
        finally:
            os.unlink(program)
            os.unlink(config)
            containerd.restart()
    with open(log) as text:
        assert "Traceback" not in text.read()


async def side_by_side(node: Node, updates: int, creations: int, patience: float) -> None:
    """Live updates of running containers, by both safe ways, beside creations and removals through CRI."""
    handler = Handler()
    async with (
        asyncio.timeout(patience),
        connected(node, handler) as plugin,
        Client(node.containerd.socket) as client,
    ):
        pod = await asyncio.to_thread(node.cri.run_pod, "nri", SMALL)
        try:
            targets = [await asyncio.to_thread(node.start, pod, cpu=2.0, memory=GIB) for _ in range(2)]
            ways: list[Actuator] = [TaskUpdates(client), CriUpdates(client, own=plugin.own_updates)]
            left = iter(range(creations))

            async def change(way: Actuator, target: str) -> None:
                for number in range(updates // 2):
                    memory = (256 + number % 2) * MIB
                    swap = memory if plugin.limits_swap else None
                    await way.apply(EnvKey("k8s.io", target), 0.5 + number % 3 * 0.25, memory, swap)

            async def create() -> None:
                for _ in left:
                    container = await asyncio.to_thread(node.start, pod, cpu=2.0, memory=GIB)
                    assert node.limits(container) == (0.5, 256 * MIB)
                    await asyncio.to_thread(node.cri.remove_container, container)

            work = [*map(change, ways, targets), *(create() for _ in range(4))]
            # To the end of each, also where one fails: their threads would go on.
            for result in await asyncio.gather(*work, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
            last = updates // 2 - 1
            for target in targets:
                assert node.limits(target) == (0.5 + last % 3 * 0.25, (256 + last % 2) * MIB)
            assert plugin.counts.created == plugin.counts.adjusted == creations + 2
            assert (plugin.counts.connections, plugin.counts.late, plugin.counts.failed) == (1, 0, 0)
            assert handler.wanted == []
        finally:
            await asyncio.to_thread(node.cri.remove_pod, pod)


async def test_live_updates_beside_creations(node: Node) -> None:
    await side_by_side(node, 60, 12, 120)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_many_live_updates_beside_many_creations(node: Node) -> None:
    await side_by_side(node, 2000, 500, 3000)
