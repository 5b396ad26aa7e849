"""Sockets of mode 0600, whatever the umask, and without touching it."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from pathlib import Path

import pytest

from weenv.core.errors import ConfigError
from weenv.core.unixsocket import bind_private, claim_path, clear_path, connected, listens


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_it_is_private_and_the_umask_stays(tmp_path: Path, umask: int, kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(umask)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", lambda _mask: pytest.fail("the umask is the whole process's"))
            with bind_private(str(tmp_path / "s"), kind) as made:
                assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) == 0o600
                made.listen()
                with socket.socket(socket.AF_UNIX, kind) as client:
                    client.connect(str(tmp_path / "s"))
    finally:
        os.umask(before)


def test_what_is_there_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "s").touch()
    with pytest.raises(OSError, match="in use"):
        bind_private(str(tmp_path / "s"))


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_who_listens(tmp_path: Path, kind: int) -> None:
    path = str(tmp_path / "s")
    assert not listens(path) and not listens(f"{path}/below")
    with bind_private(path, kind) as made:
        made.listen(0)
        for _ in range(3):  # from the second on, the queue is full
            assert listens(path)
    assert not listens(path) and os.path.exists(path)
    (tmp_path / "file").touch()
    assert not listens(str(tmp_path / "file")) and not listens(f"{tmp_path}/file/below")
    with pytest.raises(OSError, match="too long"):
        listens("/" + "x" * 200)


def test_only_a_dead_socket_makes_room(tmp_path: Path) -> None:
    path = str(tmp_path / "run" / "s")
    claim_path(path)
    assert stat.S_IMODE(os.stat(tmp_path / "run").st_mode) == 0o711
    with bind_private(path) as made:
        made.listen()
        with pytest.raises(OSError, match="in use"):
            claim_path(path)
        assert os.path.exists(path)
    claim_path(path)
    assert not os.path.exists(path)
    (tmp_path / "run" / "s").touch()
    with pytest.raises(ConfigError, match="is no socket"):
        claim_path(path)
    with pytest.raises(ConfigError, match="longer than 107 bytes"):
        clear_path(f"{tmp_path}/{'x' * 108}/s")
    assert os.listdir(tmp_path) == ["run"], "and no directory was made for it"


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_a_full_queue_is_waited_for(tmp_path: Path, kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "s")
    with bind_private(path, kind) as listener, contextlib.ExitStack() as stack:
        listener.listen(0)
        stack.enter_context(connected(path, 30, kind))
        with pytest.raises(BlockingIOError):
            connected(path, 0.05, kind)
        accepted: list[socket.socket] = []
        monkeypatch.setattr(time, "sleep", lambda _: accepted.append(stack.enter_context(listener.accept()[0])))
        stack.enter_context(connected(path, 30, kind))
        assert len(accepted) == 1
