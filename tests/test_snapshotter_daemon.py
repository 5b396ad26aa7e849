"""The snapshotter as a process of its own: what was answered is there after ``kill -9`` at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from conformance.snapshots import Service, committed, upper_of

from weenv.core.unixsocket import listens
from weenv.plugin.containerd.client import Client, ContainerdError
from weenv.plugin.containerd.types import Kind


@contextlib.contextmanager
def daemon(root: str) -> Iterator[subprocess.Popen[bytes]]:
    """A snapshotter without lazy layers that serves ``root``; killed at the end."""
    os.makedirs(root, exist_ok=True)
    with open(f"{root}.toml", "w") as file:
        file.write(f'[snapshotter]\nroot = "{root}"\nsocket = "{root}.sock"\nlazy = false\ncleanup_delay = 0.0\n')
    code = "import sys; from weenv.cli.main import main; sys.argv[0] = 'weenv'; main()"
    with open(f"{root}.log", "ab") as log:
        argv = [sys.executable, "-c", code, "snapshotter", "serve", "--config", f"{root}.toml"]
        process = subprocess.Popen(argv, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def answers(client: Client) -> None:
    """Until the daemon answers."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(ContainerdError):
                await client.namespace("test").snapshots("weenv").list("name==nothing")
                return
            await asyncio.sleep(0.02)


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("d") / "r")


async def caller(service: Service, told: dict[str, str], name: str, end: int, child: subprocess.Popen[bytes]) -> None:
    """Prepare again and again, noting what was answered; kill the daemon once ``end`` answers are noted."""
    with contextlib.suppress(ContainerdError):  # it is dead
        for number in range(100):
            told[f"{name}-{number}"] = upper_of(await service.prepare(f"{name}-{number}", "base"))
            if len(told) >= end:
                child.send_signal(signal.SIGKILL)


async def test_kill_nine_among_many_prepares_loses_and_doubles_nothing(root: str) -> None:
    chance = random.Random(1)
    told: dict[str, str] = {}
    for life in range(4):
        with daemon(root) as process:
            async with Client(f"{root}.sock") as client:
                await answers(client)
                service = client.namespace("test").snapshots("weenv")
                if not life:
                    await committed(service, "base")
                after = len(told) + chance.randrange(20, 150)

                callers = (caller(service, told, f"{life}-{number}", after, process) for number in range(50))
                await asyncio.gather(*callers)
                assert process.wait() == -signal.SIGKILL and len(told) >= after
        assert len(set(told.values())) == len(told), "one directory was given to two"
        assert all(os.path.isdir(upper) and not os.listdir(upper) for upper in told.values())
        for upper in told.values():
            with open(f"{upper}/used", "xb"):
                pass
        with daemon(root):
            async with Client(f"{root}.sock") as client:
                await answers(client)
                service = client.namespace("test").snapshots("weenv")
                await service.cleanup()
                there = {info.name: info for info in await service.list("kind==active")}
                assert told.keys() <= there.keys()
                assert len(there) - len(told) <= 50, "at most one that was not answered for each caller"
                for key, info in there.items():
                    assert (info.parent, info.kind) == ("base", Kind.ACTIVE)
                    upper = upper_of(await service.mounts(key))
                    assert os.path.isdir(upper) and told.get(key, upper) == upper
                    await service.remove(key)
                await service.cleanup()
                assert not any(os.path.exists(upper) for upper in told.values())
        told.clear()


def test_who_is_told_to_end_as_soon_as_he_listens_ends_well(root: str) -> None:
    for _ in range(3):
        with daemon(root) as child:
            while child.poll() is None and not listens(f"{root}.sock"):
                time.sleep(0.001)
            child.send_signal(signal.SIGTERM)
            assert child.wait(60) == 0
