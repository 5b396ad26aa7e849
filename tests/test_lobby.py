"""Those who connect before there is a server: greeted at once, and answered by whoever comes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from weenv.core import accepting
from weenv.plugin.containerd.schema import EMPTY, SNAPSHOTS_SERVICE
from weenv.systemd import notify
from weenv.systemd.lobby import MOST, SETTINGS, Lobby, attended


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "s"))
        made.listen(8)
        yield made


def connect(tmp_path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(30)
    made.connect(str(tmp_path / "s"))
    return made


def test_those_who_wait_and_leave_take_no_place(tmp_path: Path, listener: socket.socket) -> None:
    lobby = Lobby(listener, b"hello")
    for number in range(300):
        with connect(tmp_path) as client:
            if number % 2:  # one half leaves before it is greeted, the other then
                lobby.admit()
                assert client.recv(10) == b"hello"
        if not number % 2:
            lobby.admit()
    assert len(lobby.waiting) < MOST
    with connect(tmp_path) as client:
        lobby.admit()
        assert client.recv(10) == b"hello"
    lobby.hand_over(None)


def test_no_more_are_admitted_than_there_is_room_for_until_some_leave(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "PAUSE", 0.0)
    lobby, poll = Lobby(listener), select.poll()
    lobby.open(poll)
    with contextlib.ExitStack() as crowd:
        clients = []
        for _ in range(MOST):
            assert lobby.timeout() is None
            clients.append(crowd.enter_context(connect(tmp_path)))
            clients[-1].send(b"PRI * HTTP/2.0")
            assert poll.poll(0)
            lobby.admit()
        late = crowd.enter_context(connect(tmp_path))
        assert poll.poll(0)
        lobby.admit()
        for _ in range(2):
            assert not poll.poll(0), "nothing is looked at"
            assert lobby.timeout() is not None
            lobby.tend()
        clients[5].close()
        lobby.tend()
        assert poll.poll(0)
        lobby.admit()
        assert late.recv(100) == SETTINGS and len(lobby.waiting) == MOST
    lobby.shut()
    lobby.hand_over(None)


def test_where_no_descriptor_is_left_nobody_spins(tmp_path: Path, listener: socket.socket) -> None:
    lobby, poll = Lobby(listener), select.poll()
    lobby.open(poll)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connect(tmp_path) as client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            lobby.admit()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert not poll.poll(0)
        wait = lobby.timeout()
        assert wait is not None and wait > 0
        while not poll.poll(lobby.timeout()):
            lobby.tend()
        lobby.admit()
        assert client.recv(100) == SETTINGS
    lobby.shut()
    assert not poll.poll(0)
    lobby.hand_over(None)


def test_who_comes_to_a_crowd_is_greeted_when_it_has_gone(tmp_path: Path, listener: socket.socket) -> None:
    passed = {"snapshotter": [listener.fileno()]}
    with attended(passed, "snapshotter"), contextlib.ExitStack() as others:
        others.callback(os.close, *passed["snapshotter-waiting"])
        for _ in range(MOST):
            other = others.enter_context(connect(tmp_path))
            assert other.recv(100) == SETTINGS
            other.send(b"PRI * HTTP/2.0")
        with connect(tmp_path) as late:
            others.close()
            assert late.recv(100) == SETTINGS


def test_those_who_say_nothing_keep_nobody_out(tmp_path: Path, listener: socket.socket) -> None:
    passed = {"snapshotter": [listener.fileno()]}
    with attended(passed, "snapshotter"), contextlib.ExitStack() as others:
        others.callback(os.close, *passed["snapshotter-waiting"])
        first = others.enter_context(connect(tmp_path))
        first.send(b"PRI * HTTP/2.0")
        assert first.recv(100) == SETTINGS
        silent = []
        for _ in range(2 * MOST):  # one half takes the places of the other
            silent.append(others.enter_context(connect(tmp_path)))
            assert silent[-1].recv(100) == SETTINGS
        assert silent[0].recv(100) == b"", "it may come again"
        first.settimeout(0)
        with pytest.raises(BlockingIOError):
            first.recv(100)


def test_who_waits_is_given_over_once_and_what_is_no_socket_is_left_alone(tmp_path: Path, listener: socket.socket) -> None:
    passed = {"snapshotter": [listener.fileno()], "other": [0]}
    with attended(passed, "snapshotter") as hand_over, connect(tmp_path) as client:
        assert client.recv(100) == SETTINGS
        (waiting,) = passed["snapshotter-waiting"]
        with socket.socket(fileno=waiting) as channel:
            hand_over()
            packet, (fd,), _, _ = socket.recv_fds(channel, 16, 4)
            assert packet == b"c"
            with socket.socket(fileno=fd) as server:
                server.send(b"served")
                assert client.recv(100) == b"served"
            assert "lobby" not in {thread.name for thread in threading.enumerate()}
            with connect(tmp_path) as late:
                late.settimeout(0)
                with pytest.raises(BlockingIOError):
                    late.recv(1)  # it waits for the server
    greeted = {"snapshotter": [listener.fileno()], "snapshotter-waiting": [5]}
    for none in ({}, {"snapshotter": []}, {"snapshotter": [0]}, greeted):
        before = dict(none)
        with attended(none, "snapshotter") as hand_over:
            hand_over()
        assert none == before


def begin(root: str, listener: socket.socket, above: str) -> subprocess.Popen[bytes]:
    """``weenv snapshotter serve`` as systemd starts it, with a socket."""
    code = (
        f"import os; os.environ['LISTEN_PID'] = str(os.getpid()); os.dup2({listener.fileno()}, {notify.FIRST_FD});"
        "import sys; sys.argv[0] = 'weenv'; from weenv.cli.entry import main; main()"
    )
    variables = {"LISTEN_FDS": "1", "LISTEN_FDNAMES": "snapshotter", "NOTIFY_SOCKET": above}
    with open(f"{root}.toml", "w") as file:
        file.write(f'[snapshotter]\nroot = "{root}"\nsocket = "{root}.none"\nlazy = false\n')
    with open(f"{root}.log", "ab") as log:
        argv = [sys.executable, "-c", code, "snapshotter", "serve", "--config", f"{root}.toml"]
        return subprocess.Popen(argv, stderr=log, env=os.environ | variables, pass_fds=[listener.fileno()])


def cleanup(path: str) -> None:
    """A call that containerd makes."""
    with grpc.insecure_channel(f"unix:{path}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        channel.unary_unary(f"/{SNAPSHOTS_SERVICE}/Cleanup", EMPTY.SerializeToString, EMPTY.FromString)(EMPTY(), timeout=60)


def test_a_snapshotter_that_systemd_starts_greets_before_it_can_serve(tmp_path: Path, listener: socket.socket) -> None:
    root = str(tmp_path / "root")
    os.makedirs(root)
    lock = os.open(f"{root}/lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # its predecessor has not quite ended
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as above, ThreadPoolExecutor(1) as threads:
        above.bind(str(tmp_path / "above"))
        above.settimeout(60)
        process = begin(root, listener, str(tmp_path / "above"))
        try:
            called: Future[None] = threads.submit(cleanup, str(tmp_path / "s"))
            with connect(tmp_path) as client:
                assert client.recv(100) == SETTINGS
            assert not select.select([above], [], [], 0)[0], "nobody serves yet"
            assert not called.done()
            os.close(lock)
            assert above.recv(1000) == b"READY=1"
            called.result(60)
            cleanup(str(tmp_path / "s"))
        finally:
            process.terminate()
            assert process.wait(60) == 0, Path(f"{root}.log").read_text()
    assert "WARNING" not in Path(f"{root}.log").read_text()
