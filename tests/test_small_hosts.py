"""The small processes that hold mounts: nothing that is said to them, or left unread, ends them."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weenv.core.errors import ConfigError
from weenv.plugin.snapshotter.blobfs import holder
from weenv.plugin.snapshotter.blobfs.holder import Holder
from weenv.plugin.snapshotter.planes.fusehost import Host
from weenv.plugin.snapshotter.planes.fuseserver import pack

GARBAGE = [
    b"\0", b"[]", b"{}", b"nonsense", b"\xff\xfe", b"5", b"[" * 60_000, b'{"op":[]}', b'{"op":"attach"}',
    b'{"op":"keep"}', b'{"op":"keep","pid":1,"mount":[]}', b'{"op":"who","pid":1e999,"start":0}',
    b'{"op":"attach","pid":1e999}', b'{"op":"attach","pid":"x"}', b'{"op":' + b"1" * 5000 + b"}",
]  # fmt: skip


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("packet", GARBAGE, ids=lambda packet: packet[:30].decode("latin-1"))
def test_garbage_ends_neither_the_holder_nor_the_host(packet: bytes, pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    attached, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with attached, server, contextlib.closing(os.fdopen(os.open("/dev/null", os.O_RDONLY))) as null:
        kept = Holder(null.fileno(), null.fileno(), "/m", "/nowhere", attached)
        kept.clients[ours.fileno()] = ours
        kept.poll.register(ours)
        theirs.send(packet)
        kept._client(ours.fileno())
        assert kept.attached is attached
    again, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with again, other:
        host = Host("/nowhere")
        host.clients[again.fileno()] = again
        host.poll.register(again)
        other.send(packet)
        host._client(again.fileno())
        assert not host.clients and not host.servers


def test_a_client_killed_before_it_is_answered_does_not_end_the_host(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    host = Host("/nowhere")
    host.clients[ours.fileno()] = ours
    host.poll.register(ours)
    theirs.send(pack({"op": "hold"}))
    theirs.close()
    host._client(ours.fileno())
    assert not host.clients


def test_a_host_that_cannot_fork_goes_on(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = pair
    host = Host("/nowhere")
    host.clients[ours.fileno()] = ours
    host.poll.register(ours)

    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    theirs.send(pack({"op": "serve"}))
    host._client(ours.fileno())
    assert theirs.recv(10) == b"" and not host.servers
    assert "cannot be started" in caplog.text


def test_a_holder_that_does_not_answer_is_not_taken_for_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mount would be replaced by another one, below those who read from it."""
    monkeypatch.setattr(holder, "_ANSWER", 0.2)
    path = str(tmp_path / "socket")
    assert holder.attach(path) is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(0)
        for _ in range(2):  # the second finds the one place to wait at taken by the first
            with pytest.raises(ConfigError, match="does not answer"):
                holder.attach(path)
    assert holder.attach(path) is None


def said(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


SCORE = "/proc/self/oom_score_adj"


def test_neither_a_terminal_nor_a_unit_ends_them() -> None:
    code = (
        "import os, signal, sys\nasked = []\n"
        f"sys.addaudithook(lambda event, args: asked.append(args[1]) if event == 'open' and args[0] == '{SCORE}' else None)\n"
        "from weenv.core.process import outlive; outlive()\n"
    )
    code += "".join(f"os.kill(os.getpid(), signal.{name})\n" for name in ("SIGINT", "SIGTERM", "SIGHUP"))
    asked, score = said(f"{code}print(*asked, open('{SCORE}').read())").rsplit(maxsplit=1)
    assert asked == "r+"
    capabilities = int(re.findall(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)[0], 16)
    if capabilities >> 24 & 1:  # CAP_SYS_RESOURCE (capability.h), which root in a container may not have
        assert score == "-900"


def test_how_readily_memory_is_taken_from_a_process_is_set() -> None:
    """More readily than now: everybody may."""
    assert said("from weenv.core.process import oom_score; oom_score('1000'); print(oom_score('1000'))") == "1000\n"
