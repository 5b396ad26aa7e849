"""Ways to change limits through CRI and NRI: which updates are ours, what is refused where, what a runtime's answer means."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from simulator.nriruntime import SCHEMA, NriRuntime, Peer

from weenv.core.proto import Schema
from weenv.plugin.containerd.client import Client
from weenv.plugin.nri.actuate import EnvGone, Refused
from weenv.plugin.nri.actuators.chosen import ByNamespace, NriWhereSafe
from weenv.plugin.nri.actuators.cri import CriUpdates
from weenv.plugin.nri.actuators.nri import NriUpdates
from weenv.plugin.nri.actuators.own import OwnUpdates
from weenv.plugin.nri.config import ElasticConfig
from weenv.plugin.nri.model import EnvKey
from weenv.plugin.nri.nriconfig import NriConfig
from weenv.plugin.nri.nrihandler import StartingQuotas
from weenv.plugin.nri.nriplugin import NriPlugin

GIB = 1 << 30
KEY = EnvKey("k8s.io", "c1")
CRI = Schema(
    "cri.test",
    {
        "Resources": {
            "cpu_period": (1, "int64"), "cpu_quota": (2, "int64"), "memory": (4, "int64"), "swap": (10, "int64"),
        },
        "Update": {"container_id": (1, "string"), "linux": (2, "Resources")},
    },
)  # fmt: skip


def test_updates_of_our_own_are_known_while_they_are_under_way() -> None:
    own = OwnUpdates()
    with own.expect("a", 1.0, None), own.expect("a", 1.0, None), own.expect("a", None, GIB):
        assert own.includes("a", 1.000001, None) and own.includes("a", None, GIB)
        assert not own.includes("a", 1.0, GIB) and not own.includes("a", 1.1, None) and not own.includes("b", 1.0, None)
        assert not own.includes("a", None, None)
    assert not own.includes("a", 1.0, None) and not own._under_way
    with pytest.raises(RuntimeError), own.expect("a", 1.0, None):
        raise RuntimeError
    assert not own._under_way


class Servicer:
    """CRI's UpdateContainerResources; ``fail`` is what it answers."""

    def __init__(self, own: OwnUpdates) -> None:
        self.own = own
        self.got: list[tuple[Any, bool]] = []
        self.fail: tuple[grpc.StatusCode, str] | None = None

    async def update(self, request: bytes, context: Any) -> bytes:
        """One call."""
        message = CRI["Update"].FromString(request)
        linux = message.linux
        cpu = linux.cpu_quota / linux.cpu_period if linux.cpu_quota else None
        self.got.append((message, self.own.includes(message.container_id, cpu, linux.memory or None)))
        if self.fail is not None:
            await context.abort(*self.fail)
        return b""


@asynccontextmanager
async def cri(path: Path) -> AsyncIterator[tuple[CriUpdates, Servicer]]:
    own = OwnUpdates()
    servicer = Servicer(own)
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(servicer.update)
    service = "runtime.v1.RuntimeService"
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {"UpdateContainerResources": handler})])
    address = str(path / "c.sock")
    server.add_insecure_port(f"unix:{address}")
    await server.start()
    try:
        async with Client(address) as client:
            yield CriUpdates(client, own=own), servicer
    finally:
        await server.stop(None)


async def test_cri_is_asked_for_what_changes_and_it_is_known_as_ours(tmp_path: Path) -> None:
    async with cri(tmp_path) as (actuator, servicer):
        await actuator.apply(KEY, 1.5, None, None)
        await actuator.apply(KEY, None, GIB, 2 * GIB)
        await actuator.apply(KEY, 0.001, GIB, None)
        found = [(m.container_id, m.linux.cpu_quota, m.linux.cpu_period, m.linux.memory, m.linux.swap) for m, _ in servicer.got]
        assert found == [("c1", 150_000, 100_000, 0, 0), ("c1", 0, 0, GIB, 0), ("c1", 1000, 100_000, GIB, 0)]
        assert [ours for _, ours in servicer.got[:2]] == [True, True]


@pytest.mark.parametrize(
    ("code", "text", "error", "again"),
    [
        (grpc.StatusCode.NOT_FOUND, "x", EnvGone, None),
        (grpc.StatusCode.UNKNOWN, "failed to find container: not found", EnvGone, None),
        (grpc.StatusCode.UNKNOWN, "unable to set memory limit", Refused, False),
        (grpc.StatusCode.UNAVAILABLE, "restarting", Refused, True),
    ],
)
async def test_what_cri_answers(tmp_path: Path, code: grpc.StatusCode, text: str, error: type[Exception], again: Any) -> None:
    async with cri(tmp_path) as (actuator, servicer):
        servicer.fail = (code, text)
        with pytest.raises(error) as caught:
            await actuator.apply(KEY, 1.0, None, None)
        assert getattr(caught.value, "again", None) is again
        with pytest.raises(Refused, match="default/x is no container of CRI"):
            await actuator.apply(EnvKey("default", "x"), 1.0, None, None)
        assert len(servicer.got) == 1


async def test_nri_only_where_it_is_safe(tmp_path: Path) -> None:
    config = NriConfig(socket=str(tmp_path / "nri.sock"))
    plugin = NriPlugin(StartingQuotas(), config, ElasticConfig())
    actuator = NriUpdates(plugin)
    with pytest.raises(Refused, match="no container of CRI"):
        await actuator.apply(EnvKey("default", "x"), 1.0, None, None)
    with pytest.raises(Refused, match="not connected"):
        await actuator.apply(KEY, 1.0, None, None)
    async with NriRuntime(config.socket) as runtime:
        task = asyncio.ensure_future(plugin.run())
        peer = await runtime.peer()
        await peer.start(version="2.4.0", nri="v0.12.2")
        for failed in (False, True):
            asked = asyncio.ensure_future(actuator.apply(KEY, 1.5, GIB, None))
            stream, _, payload = await peer.take()
            request = SCHEMA["UpdateContainersRequest"].FromString(payload)
            (update,) = request.update
            found = update.linux.resources
            assert (update.container_id, found.cpu.quota.value, found.memory.limit.value) == ("c1", 150_000, GIB)
            peer.reply(stream, SCHEMA["UpdateContainersResponse"](failed=request.update if failed else []))
            if failed:
                with pytest.raises(Refused, match="the runtime refused"):
                    await asked
            else:
                await asked
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Others:
    """An actuator that remembers what it was asked."""

    name = "tasks"

    def __init__(self) -> None:
        self.asked: list[EnvKey] = []

    async def apply(self, key: EnvKey, cpu: float | None, memory: int | None, swap: int | None) -> None:
        self.asked.append(key)


async def test_nri_is_chosen_by_what_the_runtime_is_and_tasks_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "weenv")
    others = Others()
    chosen = NriWhereSafe(others)
    config = NriConfig(socket=str(tmp_path / "nri.sock"), reconnect_after=0.05)
    plugin = NriPlugin(StartingQuotas(), config, ElasticConfig())
    actuator = ByNamespace(chosen, others)
    await actuator.apply(KEY, 1.0, None, None)  # before there is a plugin
    chosen.use(plugin)
    await actuator.apply(KEY, 1.0, None, None)  # before it is connected
    async with NriRuntime(config.socket) as runtime:
        task = asyncio.ensure_future(plugin.run())
        peer = await runtime.peer()
        await peer.start(version="2.1.9")
        await actuator.apply(KEY, 1.0, None, None)
        assert others.asked == 3 * [KEY] and "changed by tasks (containerd 2.1.9)" in caplog.text
        peer.close()
        peer = await runtime.peer()
        await peer.start(version="2.4.0", nri="v0.12.2")
        asked = asyncio.ensure_future(actuator.apply(KEY, 1.0, None, None))
        stream, method, _ = await peer.take()
        peer.reply(stream)
        await asked
        assert method == "UpdateContainers" and "changed by NRI (containerd 2.4.0)" in caplog.text
        await actuator.apply(EnvKey("default", "x"), 1.0, None, None)
        assert others.asked == [*3 * [KEY], EnvKey("default", "x")]
        asked = asyncio.ensure_future(actuator.apply(KEY, 1.0, None, None))
        await peer.take()
        peer.close()
        with pytest.raises(Refused) as caught:
            await asked
        assert caught.value.again
        await actuator.apply(KEY, 1.0, None, None)  # as the retry does
        assert others.asked[-1] == KEY and len(others.asked) == 5
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_nri_over_the_connection_of_a_launched_plugin() -> None:
    ours, theirs = socket.socketpair()
    peer = Peer(*await asyncio.open_unix_connection(sock=theirs))
    plugin = NriPlugin(StartingQuotas(), NriConfig(), ElasticConfig())
    chosen = NriWhereSafe(Others())
    chosen.use(plugin)
    task = asyncio.ensure_future(plugin.run_launched(ours.detach()))
    await peer.start(version="2.4.0", nri="v0.12.2")
    asked = asyncio.ensure_future(chosen.apply(KEY, None, GIB, None))
    stream, method, payload = await peer.take()
    (update,) = SCHEMA["UpdateContainersRequest"].FromString(payload).update
    assert (method, update.linux.resources.memory.limit.value) == ("UpdateContainers", GIB)
    peer.reply(stream)
    await asked
    await peer.finish()
    assert await asyncio.wait_for(task, 60) == "the runtime closed the connection"
