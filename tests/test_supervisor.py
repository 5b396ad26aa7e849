"""The process above the daemons, with small real processes in their place."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weenv.core.unixsocket import listens
from weenv.systemd.lobby import MOST, SETTINGS
from weenv.systemd.supervisor import pause

PARENT = """
import json, sys
from weenv.core.log import configure
from weenv.systemd.lobby import Lobby
from weenv.systemd.supervisor import Child, Supervisor, _listener
configure("info")
place, wanted = json.loads(sys.argv[1])
children = [Child(name, argv, _listener(f"{place}/{name}.sock", ())) for name, argv in wanted]
for child in children:
    if child.name == "greeted":
        child.lobby = Lobby(child.listener)
sys.exit(Supervisor(children, place).run())
"""

DAEMON = """
import os, signal, sys, time
from weenv.systemd import notify
name, place, how = sys.argv[1:]
found = notify.inherited()
with open(f"{place}/log", "a") as log:
    log.write(f"{name} {os.getpid()} {time.monotonic()} {sorted(found)}\\n")
if how == "refuse":
    sys.exit("it cannot work")
if how == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if "kept" not in found:
    memory = os.memfd_create("kept")
    os.write(memory, b"written by the first")
    assert notify.keep(kept=memory)
    assert notify.keep(gone=memory)
    notify.forget("gone")
    assert notify.barrier()
if how == "mute":
    time.sleep(3600)
if how == "slow":
    time.sleep(0.5)
notify.ready()
listener = notify.listening_socket(found[name])
while True:
    client, _ = listener.accept()
    client.sendall(f"{os.getpid()} ".encode() + os.pread(found.get("kept", [0])[0], 100, 0) if "kept" in found else b"first")
    client.close()
"""

Start = Callable[..., subprocess.Popen[bytes]]


class Place:
    """A directory, and the supervisors in it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, **daemons: str) -> subprocess.Popen[bytes]:
        """Supervise daemons, each of which behaves as its value says."""
        children = [(name, [sys.executable, "-c", DAEMON, name, self.path, how]) for name, how in daemons.items()]
        code = [sys.executable, "-c", PARENT, json.dumps([self.path, children])]
        with open(f"{self.path}/stderr", "ab") as log:
            process = subprocess.Popen(code, stderr=log, env={**os.environ, "NOTIFY_SOCKET": f"{self.path}/above"})
        self.processes.append(process)
        return process

    def begun(self) -> list[tuple[str, int, float, str]]:
        """Name, pid, time and passed descriptors of every daemon that was started."""
        try:
            with open(f"{self.path}/log") as file:
                words = [line.split(" ", 3) for line in file.read().splitlines()]
        except FileNotFoundError:
            return []
        return [(name, int(pid), float(when), names) for name, pid, when, names in words]

    def said(self) -> str:
        """What supervisor and daemons have logged."""
        with open(f"{self.path}/stderr") as file:
            return file.read()

    def call(self, name: str) -> str:
        """What the daemon called ``name`` answers."""
        path = f"{self.path}/{name}.sock"
        eventually(lambda: os.path.exists(path))
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(60)
            client.connect(path)
            return client.recv(1000).decode()


def eventually(check: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while not (found := check()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


@pytest.fixture
def place(tmp_path: object) -> Iterator[Place]:
    made = Place(str(tmp_path))
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.terminate()
        process.wait(60)
    pids = [pid for _, pid, _, _ in made.begun()]
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    assert "Traceback" not in made.said()


def test_pauses_grow_and_have_a_bound() -> None:
    assert [pause(failures) for failures in range(9)] == [0, 0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0]
    assert pause(10**9) == 5.0


def test_one_after_the_other_and_ready_when_all_are(place: Place) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as above:
        above.bind(f"{place.path}/above")
        above.settimeout(30)
        parent = place.start(one="slow", two="good")
        assert above.recv(1000) == b"READY=1"
        (one, _, first, passed), (two, _, second, _) = place.begun()
        assert (one, two, passed) == ("one", "two", "['one']")
        assert second - first > 0.5
        parent.terminate()
        assert above.recv(1000) == b"STOPPING=1"
        assert parent.wait(60) == 0
    assert not os.path.exists(f"{place.path}/serve.notify")


def test_who_connects_while_one_is_dead_is_answered_by_the_next_which_has_what_was_kept(place: Place) -> None:
    parent = place.start(one="good")
    assert place.call("one") == "first"
    pids = [place.begun()[0][1]]
    for _ in range(3):
        os.kill(pids[-1], signal.SIGKILL)
        gone = f"/proc/{pids[-1]}"
        eventually(lambda path=gone: not os.path.exists(path))  # one that is dying may still accept, and not answer
        pid, _, kept = place.call("one").partition(" ")
        assert kept == "written by the first"
        pids.append(int(pid))
    assert len(set(pids)) == 4
    assert [names for _, _, _, names in place.begun()] == ["['one']", *["['kept', 'one']"] * 3]
    assert "one was killed by signal 9: starting it again" in place.said()
    parent.send_signal(signal.SIGHUP)
    eventually(lambda: len(place.begun()) == 5)
    assert place.call("one").endswith("written by the first")
    assert "WARNING" not in place.said().partition("starting the daemons anew")[2]


def test_a_daemon_that_cannot_be_started_is_started_when_there_is_room(place: Place) -> None:
    parent = place.start(greeted="mute")
    eventually(place.begun)
    limits = resource.prlimit(parent.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(parent.pid, resource.RLIMIT_NOFILE, (5, limits[1]))  # no fewer than it polls (poll(2), EINVAL)
    os.kill(place.begun()[0][1], signal.SIGKILL)
    eventually(lambda: "greeted cannot be started" in place.said())
    resource.prlimit(parent.pid, resource.RLIMIT_NOFILE, limits)
    eventually(lambda: len(place.begun()) == 2)
    assert parent.poll() is None


def test_a_daemon_that_is_told_to_end_as_soon_as_it_is_there_ends(place: Place) -> None:
    for _ in range(5):
        parent = place.start(one="mute")
        eventually(Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text)
        parent.terminate()
        assert parent.wait(60) == 0
    assert "does not end" not in place.said()


def test_a_crowd_that_has_gone_keeps_nobody_from_being_greeted(place: Place) -> None:
    place.start(greeted="mute")
    eventually(lambda: listens(f"{place.path}/greeted.sock"))
    with contextlib.ExitStack() as crowd:
        for _ in range(MOST):
            client = crowd.enter_context(socket.socket(socket.AF_UNIX))
            client.settimeout(30)
            client.connect(f"{place.path}/greeted.sock")
            assert client.recv(100) == SETTINGS
        crowd.close()
        assert place.call("greeted") == SETTINGS.decode()


def test_nobody_else_can_speak_for_a_daemon(place: Place) -> None:
    place.start(one="slow", two="good")
    eventually(lambda: os.path.exists(f"{place.path}/serve.notify") and place.begun())
    assert os.stat(f"{place.path}/serve.notify").st_mode & 0o777 == 0o600
    for text in (b"READY=1", b"FDSTORE=1\nFDNAME=kept", b"\xff=\xff", b""):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, open("/dev/null") as file:
            sender.connect(f"{place.path}/serve.notify")
            socket.send_fds(sender, [text], [file.fileno()])
    assert place.call("two") == "first"
    (_, _, first, _), (_, _, second, _) = place.begun()
    assert second - first > 0.5  # the other one was begun when the first said that it is ready, not before
    assert place.call("one") == "first"


def test_one_that_says_at_the_first_start_that_it_cannot_work_ends_everything(place: Place) -> None:
    parent = place.start(one="good", two="refuse")
    assert parent.wait(60) == 1
    assert [name for name, *_ in place.begun()] == ["one", "two"]
    assert "it cannot work" in place.said()


def test_one_that_does_not_come_up_is_tried_later_and_later(place: Place) -> None:
    parent = place.start(one="die")
    eventually(lambda: len(place.begun()) >= 6)
    parent.terminate()
    assert parent.wait(60) == 0
    times = [when for _, _, when, _ in place.begun()]
    assert times[5] - times[2] > 1.0  # pauses of 0.2, 0.4 and 0.8 s; a process takes its time to begin, too


def test_daemons_end_with_a_killed_parent_and_the_next_one_has_the_sockets_anew(place: Place) -> None:
    parent = place.start(one="good")
    assert place.call("one") == "first"
    pid = place.begun()[0][1]
    parent.kill()
    parent.wait()
    eventually(lambda: not os.path.exists(f"/proc/{pid}"))
    place.start(one="good")
    eventually(lambda: len(place.begun()) == 2)
    assert place.call("one") == "first"
