"""Whatever of ours accepts connections goes on where it has no descriptor left: real processes, and real descriptors."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from weenv.plugin.snapshotter.blobfs import wire
from weenv_testkit.procs import clean_environment, wait_until

_ABOVE = 4
"""Descriptors that a process may have beyond those that it has."""
_HOLDER = """
import os, socket, sys
from weenv.plugin.snapshotter.blobfs.holder import Holder
fuse, other = os.pipe()
attached, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
Holder(fuse, other, "/nowhere", sys.argv[1], attached).run()
"""
_PEERS = """
import asyncio, os, sys
from weenv.plugin.snapshotter.blobfs.layers import LayerTable
from weenv.plugin.snapshotter.blobfs.peers import PeerServer
from weenv.plugin.snapshotter.blobfs.server import Server, ServeStats
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher
from weenv.plugin.snapshotter.layerdir import LayerDirs
async def main():
    root = os.path.dirname(sys.argv[1])
    table = LayerTable(LayerDirs(root), lambda *_: b"", lambda *_: [])
    server = PeerServer(Server(-1, table, Fetcher(lambda *_: b""), root=root), sys.argv[1])
    await asyncio.gather(*(asyncio.to_thread(server.run, ServeStats()) for _ in range(3)))
asyncio.run(main())
"""
_METRICS = """
import sys
from weenv.core.endpoint import MetricsEndpoint
from weenv.plugin.snapshotter.metrics import Metrics
MetricsEndpoint(Metrics(), "unix:" + sys.argv[1])._thread.join()
"""


class Door(NamedTuple):
    """Something that accepts: how it is started with the path to listen at, and what it answers to what."""

    argv: Callable[[str], list[str]]
    says: bytes
    answers: bytes
    kind: int = socket.SOCK_STREAM


def _json(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


def _configured(name: str, text: str) -> Callable[[str], list[str]]:
    def argv(path: str) -> list[str]:
        config = Path(f"{path}.toml")
        config.write_text(text.replace("ROOT", os.path.dirname(path)).replace("PATH", path))
        return ["-m", "weenv.cli.entry", name, "serve", "--config", str(config)]

    return argv


_GET = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_LOOKUP = wire.IN_HEADER.pack(wire.IN_HEADER.size + 65, wire.LOOKUP, 7, wire.ROOT_ID, 0, 0, 0, 0, 0) + b"0" * 64 + b"\0"
DOORS = {
    "holder": Door(lambda path: ["-c", _HOLDER, path], _json({"op": "status"}), b'{"pid":', socket.SOCK_SEQPACKET),
    "host": Door(
        lambda path: ["-m", "weenv.plugin.snapshotter.planes.fusehost", "--socket", path],
        _json({"op": "hold"}), b'{"held":true}', socket.SOCK_SEQPACKET,
    ),
    "peers": Door(lambda path: ["-c", _PEERS, path], _LOOKUP, struct.pack("=I", 16), socket.SOCK_SEQPACKET),
    "metrics": Door(lambda path: ["-c", _METRICS, path], _GET, b"HTTP/1.0 200 OK"),
    "gateway": Door(
        _configured("gateway", '[snapshotter]\nroot = "ROOT"\n[gateway]\naddress = "unix:PATH"\n'), _GET, b"HTTP/1.1 404"
    ),
    "snapshotter": Door(
        _configured("snapshotter", '[snapshotter]\nroot = "ROOT"\nsocket = "PATH"\nlazy = false\n'), b"", b"\0\0"
    ),
}  # fmt: skip


@contextlib.contextmanager
def begun(door: Door, path: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that accepts at ``path``; its log is beside that."""
    with open(f"{path}.log", "wb") as log:
        argv = [sys.executable, *door.argv(path)]
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=clean_environment(), cwd="/")
    try:
        wait_until("it to listen", lambda: connects_as(door, path) or process.poll() is not None, 60)
        assert process.poll() is None, Path(f"{path}.log").read_text()
        yield process
    finally:
        process.kill()
        process.wait()


def connects_as(door: Door, path: str) -> bool:
    """Whether somebody listens there."""
    with contextlib.suppress(OSError), connect(door, path):
        return True
    return False


def connect(door: Door, path: str) -> socket.socket:
    """Somebody who comes, and has not said anything yet."""
    made = socket.socket(socket.AF_UNIX, door.kind)
    try:
        made.settimeout(60)
        made.connect(path)
    except BaseException:
        made.close()
        raise
    return made


def descriptors(pid: int) -> set[int]:
    """Those that a process has open."""
    return set(map(int, os.listdir(f"/proc/{pid}/fd")))


def asleep(pid: int) -> bool:
    """Whether none of a process's threads runs, or would if it could, whenever it is looked at."""
    for _ in range(50):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if Path(f"/proc/{pid}/task/{task}/stat").read_text().rpartition(")")[2].split()[0] != "S":
                    return False
    return True


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.soak] * (name == "gateway")) for name in DOORS])
def test_nobody_dies_or_spins_for_want_of_descriptors(name: str, tmp_path: Path) -> None:
    door, path = DOORS[name], str(tmp_path / "door")
    with begun(door, path) as process, contextlib.ExitStack() as crowd:
        wait_until("it to have begun", lambda: asleep(process.pid))
        limit = max(descriptors(process.pid)) + _ABOVE
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        for _ in range(limit - len(descriptors(process.pid)) + 2):
            crowd.enter_context(connect(door, path))
        wait_until("no descriptor to be left", lambda: descriptors(process.pid) >= set(range(limit)))
        wait_until("it to look away", lambda: asleep(process.pid))
        with connect(door, path) as late:
            crowd.close()
            if door.says:
                late.sendall(door.says)
            assert late.recv(1 << 16).startswith(door.answers)
        assert process.poll() is None
    said = [line for line in Path(f"{path}.log").read_text().splitlines() if "accept" in line]
    if name != "holder":
        assert len(said) == 1 and "no more connections can be accepted" in said[0], said
