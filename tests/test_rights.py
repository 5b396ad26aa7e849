"""Who is not root is told to be; who finds nobody listening is told where."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from weenv.cli.checks import unix_socket
from weenv.cli.nodechecks import policy
from weenv.core.errors import StorageError
from weenv.core.rights import AS_ROOT
from weenv.environment.gateway.store import Store
from weenv.environment.layerstore import LayerStore
from weenv.plugin.containerd.client import Client, ContainerdError
from weenv.plugin.nri.ask import Asker, NoDaemon

NOBODY = 65534
_IMPORT = "from weenv.systemd import supervisor; import weenv.cli.daemons"


@contextmanager
def unprivileged() -> Iterator[None]:
    """Without root's rights for the block."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def place() -> Iterator[str]:
    """A directory that all may read, with ``r`` and ``w`` in it that nobody may, and a configuration."""
    path = tempfile.mkdtemp()
    try:
        os.chmod(path, 0o755)
        with open(f"{path}/c.toml", "w") as file:
            file.write(f'[snapshotter]\nroot = "{path}/w"\nsocket = "{path}/r/p.sock"\n')
            file.write(f'[blobfs]\nroot = "{path}/w"\nmountpoint = "{path}/r/b"\n')
            file.write(f'holder_socket = "{path}/r/h.sock"\nstatus_socket = "{path}/r/s.sock"\n')
            file.write(f'[run]\naddress = "{path}/r/c.sock"\n')
        for name in ("r", "w"):
            os.mkdir(f"{path}/{name}", 0)
        yield path
    finally:
        for name in ("r", "w"):
            os.chmod(f"{path}/{name}", 0o700)
        shutil.rmtree(path)


_SCRIPT = """
import builtins, os, sys
import weenv.cli.daemons, weenv.cli.run, weenv.environment.attended, weenv.environment.listing, weenv.environment.node
from weenv.cli.main import main

def as_root(*names, **more):
    before = os.geteuid()
    os.seteuid(0)
    try:
        return load(*names, **more)
    finally:
        os.seteuid(before)

if os.geteuid() == 0:
    load, builtins.__import__ = builtins.__import__, as_root
    os.seteuid(65534)
main(sys.argv[1:])
"""
"""The command line without root's rights, but for reading modules: Python itself may be where only root can read."""


_SUPERVISOR = _SCRIPT.replace("main(sys.argv[1:])", "supervisor.main()").replace("import weenv.cli.daemons", _IMPORT)
"""What ``weenv serve`` becomes, which is no command of ours."""


def said(*argv: str, script: str = _SCRIPT) -> str:
    done = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done
    return done.stderr


@pytest.mark.parametrize("command", ["blobfs stop", "blobfs serve", "snapshotter serve", "ps", "rm --all", "run x.invalid/y"])
def test_who_is_not_root_is_told_to_be(command: str, place: str) -> None:
    verb, *rest = command.split()
    inner = [rest.pop(0)] if verb in ("blobfs", "snapshotter") else []
    text = said(verb, *inner, "--config", f"{place}/c.toml", *rest)
    assert len(text.splitlines()) == 2, text
    first, second = text.splitlines()
    assert place in first and "Permission denied" in first and second == f"  {AS_ROOT}"


def test_weenv_serve_wants_root(place: str) -> None:
    text = said(f"{place}/c.toml", "info", "text", f"blobfs={place}/r/s.sock", script=_SUPERVISOR)
    first, second = text.splitlines()
    assert place in first and "Permission denied" in first and second == f"  {AS_ROOT}"


def test_what_composing_writes_wants_root(place: str) -> None:
    with unprivileged(), pytest.raises(StorageError, match=r"cannot write .*: Permission denied") as refused:
        LayerStore(f"{place}/w", "mutations", limit=1 << 20).put("0" * 64, None)
    assert refused.value.hint == AS_ROOT


def test_a_daemon_that_may_not_be_asked_may_well_be_there(place: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{place}/r/elastic.sock")
        server.listen()
        with unprivileged(), pytest.raises(NoDaemon) as refused:
            Asker(f"{place}/r/elastic.sock")
        assert "Permission denied" in str(refused.value) and "nobody" not in str(refused.value)
        assert refused.value.hint == AS_ROOT
        with unprivileged():
            assert unix_socket("blobfs", f"{place}/r/elastic.sock", "start it").state == "skip"


def test_a_policy_whose_key_may_not_be_read_says_so(place: str) -> None:
    tables = {"policy": {"rules": [{"match": "a/**", "keys": [f"{place}/w/team.pub"]}]}}
    with unprivileged():
        found = policy(tables)
    assert (found.state, found.remedy) == ("fail", AS_ROOT)
    assert found.seen == f"policy.rules[0].keys: cannot read the key {place}/w/team.pub: Permission denied"


def test_a_store_that_may_not_be_opened_is_not_to_be_removed(place: str) -> None:
    with unprivileged(), pytest.raises(StorageError, match="Permission denied") as refused:
        Store(f"{place}/w/gateway.db", keep_images=1, keep_bytes=1)
    assert refused.value.hint == AS_ROOT


async def test_nobody_listening_is_said_with_the_socket(place: str) -> None:
    path = f"{place}/nobody.sock"
    async with Client(path) as client:
        with pytest.raises(ContainerdError) as absent:
            await client.version()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    async with Client(path) as client:
        with pytest.raises(ContainerdError) as dead:
            await client.version()
    for caught in (absent.value, dead.value):
        assert caught.message == f"nothing listens at {path}" and caught.code == "UNAVAILABLE" and "--containerd" in caught.hint
