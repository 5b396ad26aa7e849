"""The elastic daemon's socket over a controller on a simulated node, and who asks there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from simulator.elasticnode import Node, until

from weenv.cli.main import cli
from weenv.core.errors import ConfigError
from weenv.plugin.nri import control as control_module
from weenv.plugin.nri.ask import Asker, Denied, NoDaemon
from weenv.plugin.nri.config import MIB
from weenv.plugin.nri.control import Control
from weenv.plugin.nri.model import Bounds, Quota


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(tmp_path / "root", version=2)
    async with made.running():
        yield made


@pytest.fixture
async def served(node: Node) -> AsyncIterator[str]:
    control = Control(node.controller)
    path = str(node.root / "s.sock")
    await control.start(path)
    yield path
    await control.close()
    assert not os.path.exists(path)


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def asked(path: str, work: Callable[[Asker], Any]) -> Any:
    def run() -> Any:
        with Asker(path) as asker:
            return work(asker)

    return await asyncio.to_thread(run)


async def test_the_socket_shows_environments_and_is_roots_alone(node: Node, served: str) -> None:
    node.add("a")
    assert stat.S_IMODE(os.stat(served).st_mode) == 0o600
    answer = await asked(served, lambda asker: asker.ask("node"))
    assert answer["node"]["environments"] == 1 and answer["environments"][0]["id"] == "a"
    json.dumps(answer, allow_nan=False)


async def test_a_second_daemon_does_not_take_the_socket(node: Node, served: str) -> None:
    with pytest.raises(ConfigError, match="another daemon answers"):
        await Control(node.controller).start(served)
    plain = node.root / "file"
    plain.write_text("")
    with pytest.raises(ConfigError, match="is no socket"):
        await Control(node.controller).start(str(plain))


async def test_room_is_asked_for_waited_for_and_given_back(node: Node, served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "_PATIENCE", 0.05)
    wanted: dict[str, Any] = {"namespace": "default", "cpu": 4.0, "memory": 256 * MIB, "cpu_max": 5.0}
    told: list[int] = []
    inside = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold(asker: Asker) -> Any:
        answer = asker.ask("admit", id="a", hold=True, **wanted)
        loop.call_soon_threadsafe(inside.set)
        while not told:
            asker.ask("node")
        return answer

    holder = asyncio.ensure_future(asked(served, hold))
    await inside.wait()
    with pytest.raises(Denied, match="no room"):
        await asked(served, lambda asker: asker.ask("admit", id="b", deadline=0, **wanted))
    answer = await asked(
        served, lambda asker: asker.ask("admit", id="b", deadline=20, waiting=lambda: told.append(1), **wanted)
    )
    assert told == [1] and answer["start"] == [4.0, 256 * MIB], "the holder has left, and his room is free"
    assert (await holder)["waited"] == pytest.approx(0, abs=0.1)
    await asked(served, lambda asker: asker.ask("release", namespace="default", id="b"))
    assert node.ledger.promised == Quota(0.0, 0)


async def test_what_admit_was_granted_is_said_to_machines(node: Node, served: str) -> None:
    (node.root / "c.toml").write_text(f'[elastic.serve]\nsocket = "{served}"\n')
    argv = ["admit", "--config", f"{node.root}/c.toml", "--cpu", "2", "--memory", "16Mi", "--for", "default/x", "--json"]
    done = await asyncio.to_thread(CliRunner().invoke, cli, argv)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert (answer["environment"], answer["start"]) == ("default/x", [2.0, 16 * MIB]) and answer["waited"] >= 0


async def test_a_start_above_the_ceiling_is_named(node: Node, served: str) -> None:
    wanted: dict[str, Any] = {"namespace": "default", "id": "a", "deadline": 0}
    above = r"100 cores is above elastic\.ceiling_cpu \(64\)"
    with pytest.raises(Denied, match=f"^{above}$"):
        await asked(served, lambda asker: asker.ask("admit", cpu=100, exact=True, **wanted))
    with pytest.raises(Denied, match=r"^64 GiB is above elastic\.ceiling_memory \(32 GiB\)$"):
        await asked(served, lambda asker: asker.ask("admit", memory=64 << 30, exact=True, **wanted))
    with pytest.raises(Denied, match=rf"never start an environment of 64 cores.* \({above}, and was cut to it\)$"):
        await asked(served, lambda asker: asker.ask("admit", cpu=100, **wanted))
    with pytest.raises(Denied, match=r"for task environments$"):
        await asked(served, lambda asker: asker.ask("admit", cpu=64, exact=True, **wanted))


async def test_who_leaves_while_waiting_is_forgotten(node: Node, served: str) -> None:
    node.add("a", bounds=Bounds(Quota(5.0, 256 * MIB), Quota(5.0, 256 * MIB), Quota(5.0, 256 * MIB)))
    reader, writer = await asyncio.open_unix_connection(served)
    writer.write(b'{"op":"admit","namespace":"default","id":"b","cpu":5,"deadline":100}\n')
    await until(lambda: node.ledger.waiting == 1)
    await closed(writer)
    await until(lambda: node.ledger.waiting == 0)
    del reader


BAD = [
    b"\n", b"nonsense\n", b"[]\n", b"{}\n", b'{"op":"burn"}\n', b"[" * 50_000 + b"\n", b"\xff\xfe\n",
    b'{"op":"admit","namespace":"a","id":"b","cpu":' + b"9" * 400 + b"}\n",
    b'{"op":"admit"}\n', b'{"op":"admit","namespace":"a/b","id":"c"}\n', b'{"op":"admit","namespace":"a","id":"../c"}\n',
    b'{"op":"admit","namespace":"a","id":"c","cpu":NaN}\n', b'{"op":"admit","namespace":"a","id":"c","cpu":-1}\n',
    b'{"op":"admit","namespace":"a","id":"c","cpu":true}\n', b'{"op":"admit","namespace":"a","id":"c","memory":1e300}\n',
    b'{"op":"admit","namespace":"a","id":"c","role":"king"}\n', b'{"op":"admit","namespace":"a","id":"c","deadline":"x"}\n',
    b'{"op":"release","namespace":1,"id":"c"}\n',
]  # fmt: skip


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:40].decode("latin-1"))
async def test_bad_requests_are_answered_with_an_error(node: Node, served: str, line: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(served)
    writer.write(line + b'{"op":"node"}\n')
    answers = [json.loads(await reader.readline()) for _ in range(2)]
    assert answers[0]["error"] and "environments" in answers[1]
    await closed(writer)


async def test_a_line_without_end_is_cut_off(node: Node, served: str) -> None:
    reader, writer = await asyncio.open_unix_connection(served)
    with contextlib.suppress(ConnectionError):
        writer.write(b"x" * (1 << 20))
        await writer.drain()
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    await closed(writer)
    assert (await asked(served, lambda asker: asker.ask("node")))["environments"] == []


def _answering(path: str, answer: bytes) -> Awaitable[None]:
    def serve() -> None:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
            server.settimeout(10)
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

    return asyncio.to_thread(serve)


@pytest.mark.parametrize("answer", [b"nonsense\n", b"[]\n", b"", b"{", b'"x"\n'])
async def test_who_asks_believes_no_stranger(tmp_path: Path, answer: bytes) -> None:
    path = str(tmp_path / "s.sock")
    serving = asyncio.ensure_future(_answering(path, answer))
    while not os.path.exists(path):
        await asyncio.sleep(0.01)
    with pytest.raises(NoDaemon):
        await asked(path, lambda asker: asker.ask("node"))
    await serving
    with pytest.raises(NoDaemon, match="nobody serves"):
        await asked(str(tmp_path / "none"), lambda asker: asker.ask("node"))
