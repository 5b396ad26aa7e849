"""The NRI plugin against a runtime that behaves, is slow, disappears, or sends nonsense."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from simulator.nriruntime import SCHEMA, NriRuntime, Peer, container

from weenv.core.errors import WeenvError
from weenv.plugin.nri.config import ElasticConfig
from weenv.plugin.nri.model import Quota, Role
from weenv.plugin.nri.nriconfig import NriConfig
from weenv.plugin.nri.nrihandler import Answer, CreationRefused, Seen, StartingQuotas
from weenv.plugin.nri.nriplugin import NriPlugin, NriUnavailable, launched_descriptor
from weenv.plugin.nri.wire.messages import Limits, Update

GIB = 1 << 30
Logged = pytest.LogCaptureFixture


class Handler(StartingQuotas):
    """Notes what it is told; ``act`` may be put in the way of any answer."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.seen: list[Seen] = []
        self.updates: tuple[Update, ...] = ()
        self.instead: Quota | None = None
        self.quota: Quota | None = None
        self.wanted: list[Limits] = []
        self.act: Callable[[], Awaitable[None]] | None = None
        self.heard = asyncio.Event()

    async def _note(self, what: str, seen: Seen) -> None:
        self.told.append((what, seen.container.id))
        self.heard.set()
        if self.act is not None:
            await self.act()

    async def synchronized(self, containers: Sequence[Seen]) -> Sequence[Update]:
        self.seen = list(containers)
        if self.act is not None:
            await self.act()
        return self.updates

    async def creating(self, seen: Seen) -> Answer:
        await self._note("creating", seen)
        answer = await super().creating(seen)
        return Answer(self.quota or answer.quota, self.updates)

    async def started(self, seen: Seen) -> None:
        await self._note("started", seen)

    async def updating(self, seen: Seen, wanted: Limits) -> Answer:
        self.wanted.append(wanted)
        await self._note("updating", seen)
        return Answer(self.instead, self.updates)

    async def stopped(self, seen: Seen) -> Sequence[Update]:
        await self._note("stopped", seen)
        return self.updates

    async def removed(self, seen: Seen) -> None:
        await self._note("removed", seen)

    def disconnected(self, reason: str) -> None:
        self.told.append(("disconnected", reason))


class Case:
    """A plugin that runs against a runtime of the simulator."""

    def __init__(self, runtime: NriRuntime, plugin: NriPlugin, handler: Handler) -> None:
        self.runtime = runtime
        self.plugin = plugin
        self.handler = handler


@asynccontextmanager
async def case(path: Path, **settings: Any) -> AsyncIterator[Case]:
    handler = Handler()
    config = NriConfig(socket=str(path / "nri.sock"), reconnect_after=0.01, **{"answer_within": 0.1, **settings})
    plugin = NriPlugin(handler, config, ElasticConfig())
    async with NriRuntime(config.socket) as runtime:
        task = asyncio.ensure_future(plugin.run())
        try:
            yield Case(runtime, plugin, handler)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def about(made: Any, kind: str = "CreateContainerRequest", **more: Any) -> Any:
    pod = SCHEMA["PodSandbox"](id="p1", name="pod", namespace=more.pop("namespace", "default"))
    return SCHEMA[kind](pod=pod, container=made, **more)


async def create(peer: Peer, made: Any, **more: Any) -> Any:
    return await peer.ask("CreateContainer", about(made, **more), "CreateContainerResponse")


@pytest.mark.parametrize("early", [False, True])
async def test_it_registers_and_is_synchronized(tmp_path: Path, early: bool) -> None:
    async with case(tmp_path) as it:
        peer = await it.runtime.peer()
        it.handler.updates = (Update("c1", 2.0, GIB),)
        answer = await peer.start(container("c1", cpu_start="1"), container("c2"), early=early)
        assert (peer.registered.plugin_name, peer.registered.plugin_idx) == ("weenv", "10")
        assert peer.events == 0b110_1100_1000
        assert [item.container_id for item in answer.update] == ["c1"] and not answer.more
        assert [(seen.container.id, seen.managed, seen.running) for seen in it.handler.seen] == [
            ("c1", True, True),
            ("c2", False, True),
        ]
        assert it.plugin.synchronized.is_set() and it.plugin.counts.connections == 1
        assert it.handler.seen[0].pod.namespace == "default" and str(it.handler.seen[0].key) == "k8s.io/c1"


async def test_a_synchronization_in_parts_and_in_small_frames(tmp_path: Path) -> None:
    async with case(tmp_path) as it:
        peer = await it.runtime.peer()
        stream, _, _ = await peer.take()
        peer.reply(stream)
        await peer.ask("Configure", SCHEMA["ConfigureRequest"](), "ConfigureResponse")
        for number in range(3):
            request = SCHEMA["SynchronizeRequest"](containers=[container(f"c{number}")], more=number < 2)
            if number == 0:
                request.pods.add(id="p1", namespace="default")
            response = await peer.call("Synchronize", request, chunk=7)
            answer = SCHEMA["SynchronizeResponse"].FromString(response.payload)
            assert answer.more == (number < 2) and not answer.update
        assert [seen.container.id for seen in it.handler.seen] == ["c0", "c1", "c2"]
        assert {seen.pod.namespace for seen in it.handler.seen} == {"default"}


async def test_a_container_starts_with_its_quota_and_is_remembered(tmp_path: Path) -> None:
    async with case(tmp_path) as it:
        peer = await it.runtime.peer()
        await peer.start()
        made = container("new", cpu=4.0, memory=2 * GIB, swap=2 * GIB, cpu_start="500m", memory_start="256Mi", role="service")
        it.handler.updates = (Update("new", 1.0, 1), Update("old", 1.0, None))
        answer = await create(peer, made)
        found = answer.adjust.linux.resources
        assert (found.cpu.quota.value, found.memory.limit.value, found.memory.swap.value) == (50_000, 256 << 20, 256 << 20)
        assert dict(answer.adjust.annotations) == {
            "weenv.dev/ceiling": f"4.000000,{2 * GIB}", "weenv.dev/elastic": "true", "weenv.dev/role": "service",
            "weenv.dev/cpu.start": "0.500000", "weenv.dev/memory.start": str(256 << 20),
        }  # fmt: skip
        assert [item.container_id for item in answer.update] == ["old"]  # not itself: the runtime would refuse to create it
        (counts,) = [it.plugin.counts]
        assert (counts.created, counts.adjusted, counts.late, counts.failed) == (1, 1, 0, 0)

        # As the runtime describes it afterwards: our quota as its limits, our record of its own.
        later = container("new", cpu=0.5, memory=256 << 20)
        later.annotations.update(answer.adjust.annotations)
        peer.close()
        again = await it.runtime.peer()
        await again.start(later)
        (seen,) = it.handler.seen
        assert seen.asked.bounds.ceiling == Quota(4.0, 2 * GIB) and seen.asked.bounds.start == Quota(0.5, 256 << 20)
        assert seen.managed and seen.asked.role is Role.SERVICE and not seen.asked.complaints
        assert it.plugin.counts.connections == 2


async def test_an_answer_beyond_the_bounds_is_cut(tmp_path: Path) -> None:
    async with case(tmp_path) as it:
        peer = await it.runtime.peer()
        await peer.start()
        for quota, cpu, memory in ((Quota(99.0, 99 * GIB), 200_000, GIB), (Quota(0.0, 0), 1000, 6 << 20)):
            it.handler.quota = quota
            found = (await create(peer, container("a", cpu=2.0, memory=GIB))).adjust.linux.resources
            assert (found.cpu.quota.value, found.memory.limit.value) == (cpu, memory)


async def test_only_what_is_asked_for_is_changed(tmp_path: Path) -> None:
    async with case(tmp_path, namespaces=frozenset({"rl"})) as it:
        peer = await it.runtime.peer()
        await peer.start()
        untouched = await create(peer, container("a", cpu=1.0))
        assert not untouched.HasField("adjust") and it.plugin.counts.adjusted == 0
        listed = await create(peer, container("b"), namespace="rl")
        assert listed.adjust.linux.resources.cpu.quota.value == 50_000


async def test_nonsense_in_annotations_is_said_and_ignored_or_refused(tmp_path: Path, caplog: Logged) -> None:
    made = container("a", cpu_start="lots", memory_start="64Mi")
    async with case(tmp_path) as it:
        peer = await it.runtime.peer()
        await peer.start()
        answer = await create(peer, made)
        assert answer.adjust.linux.resources.memory.limit.value == 64 << 20
        assert answer.adjust.linux.resources.cpu.quota.value == 50_000  # the default
        assert "default/pod/main: weenv.dev/cpu.start must be" in caplog.text and it.plugin.counts.complaints == 1
    (tmp_path / "nri.sock").unlink(missing_ok=True)
    async with case(tmp_path, strict=True) as it:
        peer = await it.runtime.peer()
        await peer.start()
        response = await peer.call("CreateContainer", about(made))
        assert response.status.code == 3 and "weenv.dev/cpu.start must be" in response.status.message
        assert it.plugin.counts.refused == 1
        assert (await create(peer, container("b", cpu_start="1"))).adjust.linux.resources.cpu.quota.value == 100_000


async def test_events_reach_the_handler_by_the_old_and_the_new_names(tmp_path: Path) -> None:
    async with case(tmp_path) as it:
        peer = await it.runtime.peer()
        await peer.start()
        for event in range(16):
            await peer.ask("StateChange", about(container("a"), "StateChangeEvent", event=event), "Empty")
        await peer.ask("PostStartContainer", about(container("b"), "ContainerEvent"), "Empty")
        await peer.ask("RemoveContainer", about(container("b"), "ContainerEvent"), "Empty")
        it.handler.updates = (Update("c", 1.0, None),)
        answer = await peer.ask("StopContainer", about(container("b"), "StopContainerRequest"), "StopContainerResponse")
        assert [item.container_id for item in answer.update] == ["c"]
        assert it.handler.told == [
            ("started", "a"), ("removed", "a"), ("started", "b"), ("removed", "b"), ("stopped", "b"),
        ]  # fmt: skip
        for silent in ("RunPodSandbox", "PostUpdateContainer", "ValidateContainerAdjustment", "Shutdown"):
            await peer.ask(silent, SCHEMA["Empty"](), "Empty")
        for service, method in ((None, "Frobnicate"), ("other.Service", "Configure")):
            extra = {"service": service} if service else {}
            assert (await peer.call(method, SCHEMA["Empty"](), **extra)).status.code == 12


async def test_an_update_by_its_owner(tmp_path: Path) -> None:
    async with case(tmp_path) as it:
        peer = await it.runtime.peer()
        await peer.start()
        request = about(container("a", cpu=1.0, cpu_start="1"), "UpdateContainerRequest")
        request.linux_resources.cpu.quota.value, request.linux_resources.cpu.period.value = 300_000, 100_000
        request.linux_resources.memory.limit.value = GIB

        async def ask() -> list[Any]:
            return list((await peer.ask("UpdateContainer", request, "UpdateContainerResponse")).update)

        assert await ask() == []
        assert it.handler.wanted == [Limits(3.0, GIB)]
        it.handler.instead = Quota(2.0, 4 * GIB)
        (update,) = await ask()
        assert update.linux.resources.cpu.quota.value == 200_000
        assert update.linux.resources.memory.limit.value == GIB  # never more than what the owner asks for
        with it.plugin.own_updates.expect("a", 3.0, GIB):
            assert await ask() == []
        assert len(it.handler.wanted) == 2


async def wait_for(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not check():
            await asyncio.sleep(0.005)


async def test_a_slow_handler_lets_the_container_through_and_the_connection_stays(tmp_path: Path, caplog: Logged) -> None:
    cancelled = asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async with case(tmp_path) as it:
        peer = await it.runtime.peer()
        await peer.start()
        it.handler.act = stubborn
        begun = asyncio.get_running_loop().time()
        answer = await create(peer, container("a", cpu_start="1"))
        assert not answer.HasField("adjust")
        assert asyncio.get_running_loop().time() - begun < 1.5
        assert it.plugin.counts.late == 1 and "was not decided within 0.1 s, and is let through" in caplog.text
        await asyncio.wait_for(cancelled.wait(), 60)
        it.handler.act = None
        assert (await create(peer, container("b", cpu_start="1"))).HasField("adjust")
        assert it.plugin.synchronized.is_set()


async def test_a_handler_that_does_not_let_go_keeps_nobody_waiting(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def deaf() -> None:
        while not release.is_set():
            try:
                await asyncio.wait_for(release.wait(), 60)
            except asyncio.CancelledError:
                continue

    async with case(tmp_path) as it:
        peer = await it.runtime.peer()
        await peer.start()
        it.handler.act = deaf
        for number in range(3):
            assert not (await create(peer, container(f"c{number}", cpu_start="1"))).HasField("adjust")
        assert it.plugin.counts.late == 3
        release.set()


async def test_a_handler_that_fails_lets_the_container_through(tmp_path: Path, caplog: Logged) -> None:
    async def fail() -> None:
        raise RuntimeError("a fault of ours")

    async def give_up() -> None:
        raise asyncio.CancelledError

    async def refuse() -> None:
        raise CreationRefused("there is no room")

    async with case(tmp_path) as it:
        peer = await it.runtime.peer()
        await peer.start()
        for number, act in enumerate((fail, give_up), 1):
            it.handler.act = act
            assert not (await create(peer, container("a", cpu_start="1"))).HasField("adjust")
            assert it.plugin.counts.failed == number
        assert "a fault of ours" in caplog.text
        it.handler.act = refuse
        refused = await peer.call("CreateContainer", about(container("a")))
        assert refused.status.message == "weenv: there is no room"
        await peer.ask("StopContainer", about(container("a"), "StopContainerRequest"), "Empty")  # nothing to refuse here
        assert it.plugin.counts.failed == 3


async def test_messages_that_cannot_be_read_are_let_through(tmp_path: Path, caplog: Logged) -> None:
    async with case(tmp_path) as it:
        peer = await it.runtime.peer()
        await peer.start()
        for method in ("CreateContainer", "UpdateContainer", "StopContainer", "StateChange", "PostStartContainer"):
            response = await peer.call(method, b"\x0a\xff")
            assert response.status.code == 0 and response.payload == b""
            assert (await peer.call(method, b"")).status.code == 0
        assert it.plugin.counts.unreadable == 5 and it.handler.told == []
        assert (await create(peer, container("b", cpu_start="1"))).HasField("adjust")


@pytest.mark.parametrize("data", [b"\0\0\0\1\xff\xff\xff\xff", b"\0\0\0\1\0\0\0\x0a\0\0\0\0\0\0\0\1\x09\0"])
async def test_nonsense_on_the_wire_ends_the_connection_and_another_is_made(
    tmp_path: Path, data: bytes, caplog: Logged
) -> None:
    async with case(tmp_path) as it:
        peer = await it.runtime.peer()
        await peer.start()
        peer.writer.write(data)
        again = await it.runtime.peer()
        await again.start()
        assert "the runtime sent what cannot be read" in caplog.text
        ((what, reason),) = it.handler.told
        assert what == "disconnected" and "cannot be read" in reason


async def test_it_waits_for_a_runtime_and_comes_back_to_one_that_restarts(tmp_path: Path, caplog: Logged) -> None:
    caplog.set_level(logging.DEBUG, logger="weenv.plugin.nri.nriplugin")
    path = str(tmp_path / "nri.sock")
    handler = Handler()
    plugin = NriPlugin(handler, NriConfig(socket=path, reconnect_after=0.01, reconnect_at_most=0.02), ElasticConfig())
    task = asyncio.ensure_future(plugin.run())
    await wait_for(lambda: sum("No such file" in item.message for item in caplog.records) >= 3)
    levels = [item.levelname for item in caplog.records if "No such file" in item.message]
    assert levels[0] == "WARNING" and set(levels[1:]) == {"DEBUG"}  # said once
    for _ in range(3):
        async with NriRuntime(path) as runtime:
            peer = await runtime.peer()
            await peer.start(container("x"))
            assert plugin.synchronized.is_set()
        await wait_for(lambda: not plugin.synchronized.is_set())
        (tmp_path / "nri.sock").unlink(missing_ok=True)
    assert plugin.counts.connections == 3
    assert [what for what, _ in handler.told] == ["disconnected"] * 3
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_runtime_that_drops_us_for_being_slow_is_named(tmp_path: Path) -> None:
    async with case(tmp_path, answer_within=50.0) as it:
        peer = await it.runtime.peer()
        await peer.start()
        it.plugin.runtime = type(it.plugin.runtime)(request_timeout=100.0)
        it.handler.act = lambda: asyncio.sleep(60)
        asked = asyncio.ensure_future(peer.call("CreateContainer", about(container("a")).SerializeToString()))
        await it.handler.heard.wait()
        peer.writer.transport.abort()
        await wait_for(lambda: ("disconnected" in [what for what, _ in it.handler.told]))
        assert it.handler.told[-1][1] == "the runtime closed the connection while CreateContainer was being answered"
        peer.close()
        with pytest.raises(ConnectionError):
            await asked


async def test_registration_that_is_refused_or_leads_nowhere(tmp_path: Path, caplog: Logged, monkeypatch: Any) -> None:
    monkeypatch.setattr("weenv.plugin.nri.nriconnection.REGISTRATION", 0.2)
    async with case(tmp_path) as it:
        peer = await it.runtime.peer()
        stream, _, _ = await peer.take()
        peer.reply(stream, code=2, text="invalid plugin index")
        again = await it.runtime.peer()
        assert "the runtime refused to register us: invalid plugin index (code 2)" in caplog.text
        stream, _, _ = await again.take()
        again.reply(stream)
        await it.runtime.peer()
        assert "did not configure us within 0.2 s" in caplog.text


async def test_updates_at_any_time_only_where_nri_is_free_of_its_deadlock(tmp_path: Path) -> None:
    async with case(tmp_path) as it:
        with pytest.raises(NriUnavailable, match="not connected"):
            await it.plugin.update([Update("a", 1.0)])
        peer = await it.runtime.peer()
        await peer.start()
        with pytest.raises(NriUnavailable, match=r"containerd 2\.1\.9: its NRI can stop CRI"):
            await it.plugin.update([Update("a", 1.0)])
        peer.close()
        peer = await it.runtime.peer()
        await peer.start(version="2.4.0", nri="v0.12.2")
        many = [Update(f"container-{number:064}", 1.0, GIB) for number in range(2000)]
        asked = asyncio.ensure_future(it.plugin.update(many))
        got: list[str] = []
        while len(got) < len(many):
            stream, method, payload = await peer.take()
            assert method == "UpdateContainers"
            request = SCHEMA["UpdateContainersRequest"].FromString(payload)
            got += [item.container_id for item in request.update]
            peer.reply(stream, SCHEMA["UpdateContainersResponse"](failed=request.update[:1]))
        assert got == [item.container_id for item in many]
        assert len(await asked) == 7

        asked = asyncio.ensure_future(it.plugin.update([Update("a", 1.0)]))
        stream, _, _ = await peer.take()
        peer.reply(stream, code=2, text="NRI update of some containers failed")
        with pytest.raises(NriUnavailable, match="some containers failed"):
            await asked

        async def from_within() -> None:
            with pytest.raises(NriUnavailable, match="from within a handler"):
                await it.plugin.update([Update("a", 1.0)])
            it.handler.told.append(("tried", ""))

        it.handler.act = from_within
        await create(peer, container("b", cpu_start="1"))
        assert it.handler.told[-1] == ("tried", "")
        later: list[asyncio.Task[list[str]]] = []
        release = asyncio.Event()

        async def afterwards() -> list[str]:
            await release.wait()
            return await it.plugin.update([Update("a", 1.0)])

        async def start_something() -> None:
            later.append(asyncio.ensure_future(afterwards()))

        it.handler.act = start_something  # what a handler starts may ask once the handler has answered
        await create(peer, container("c", cpu_start="1"))
        release.set()
        stream, _, _ = await peer.take()
        peer.reply(stream)
        assert await later[0] == []
        it.handler.act = None
        asked = asyncio.ensure_future(it.plugin.update([Update("a", 1.0)]))
        await peer.take()
        peer.close()
        with pytest.raises(NriUnavailable):
            await asked


@pytest.mark.parametrize("count", [300, 2000])
async def test_many_updates_in_an_answer_are_framed_for_the_runtimes_reader(tmp_path: Path, count: int) -> None:
    async with case(tmp_path) as it:
        peer = await it.runtime.peer()
        it.handler.updates = tuple(Update(f"container-{number:064}", 1.0, GIB) for number in range(count))
        assert len((await peer.start()).update) == count
        assert len((await create(peer, container("new", cpu_start="1"))).update) == count


async def test_an_answer_that_no_runtime_takes_is_left_out(tmp_path: Path, caplog: Logged) -> None:
    async with case(tmp_path, answer_within=5.0) as it:
        peer = await it.runtime.peer()
        await peer.start()
        it.handler.updates = tuple(Update(f"{number:0200}", 1.0, GIB) for number in range(20_000))
        assert not (await create(peer, container("new", cpu_start="1"))).HasField("adjust")
        assert "the answer to CreateContainer is too large" in caplog.text


async def launched(handler: Handler, version: str, config: str = "") -> tuple[str, NriPlugin, int]:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=theirs)
    plugin = NriPlugin(handler, NriConfig(), ElasticConfig())
    task = asyncio.ensure_future(plugin.run_launched(ours.detach()))
    peer = Peer(reader, writer)
    if version.startswith("1.7.24"):
        stream, _, _ = await peer.take()
        peer.reply(stream)
        configure = SCHEMA["ConfigureRequest"](runtime_name="containerd", runtime_version=version, config=config)
        response = await peer.call("Configure", configure)
        if response.status.code:
            peer.close()
    else:
        await peer.start(container("x"), version=version, config=config)
    connections = plugin.counts.connections
    await peer.finish()
    return await asyncio.wait_for(task, 60), plugin, connections


async def test_launched_by_the_runtime() -> None:
    handler = Handler()
    reason, plugin, connections = await launched(handler, "2.1.9", "[nri]\nname = 'other'\n[elastic]\nstart_cpu = 2\n")
    assert reason == "the runtime closed the connection" and connections == 1
    assert plugin.config.name == "other" and plugin.elastic.start_cpu == 2.0 and handler.seen[0].container.id == "x"
    # This one never synchronizes what it launches.
    reason, plugin, connections = await launched(Handler(), "1.7.24")
    assert connections == 1 and not plugin.synchronized.is_set()
    reason, plugin, connections = await launched(Handler(), "1.7.24", "[nri]\nindex = 'x'\n")
    assert "nri.index must be two digits" in reason and connections == 0


async def test_descriptors_that_are_none() -> None:
    assert launched_descriptor("3") == 3
    for text in ("", "x", "-1", "0", "2", "9" * 30):
        with pytest.raises(WeenvError, match="NRI_PLUGIN_SOCKET must be the number"):
            launched_descriptor(text)
    plugin = NriPlugin(Handler(), NriConfig(), ElasticConfig())
    with pytest.raises(WeenvError, match="is no socket"):
        await plugin.run_launched(987)
    with open("/dev/null", "rb") as null, pytest.raises(WeenvError, match="is no socket"):
        await plugin.run_launched(null.fileno())
