"""The service manager's protocol, against a manager's end of it made of the same system calls."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from weenv.systemd import notify


@pytest.fixture
def manager(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket on which a manager listens, and its address in the environment."""
    path = f"{tmp_path}/notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        receiver.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        yield receiver


def receive(manager: socket.socket) -> tuple[str, list[int]]:
    data, fds, _, _ = socket.recv_fds(manager, 4096, 8)
    return data.decode(), fds


def test_states_are_assignments_in_one_datagram(manager: socket.socket) -> None:
    assert notify.ready("serving")
    assert receive(manager) == ("READY=1\nSTATUS=serving", [])
    assert notify.ready()
    assert receive(manager) == ("READY=1", [])
    assert notify.stopping()
    assert receive(manager) == ("STOPPING=1", [])
    notify.forget("fuse")
    assert receive(manager) == ("FDSTOREREMOVE=1\nFDNAME=fuse", [])


def test_an_abstract_address(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"weenv-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        assert notify.ready()
        assert receive(receiver)[0] == "READY=1"


@pytest.mark.parametrize("address", [None, "", "vsock:2:1234", "/nowhere/at/all", "relative"])
def test_no_manager_is_no_error(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if address is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert not notify.ready()
    assert not notify.keep(fuse=0)
    assert not notify.barrier()


def test_descriptors_are_kept_once_the_manager_has_read_the_barrier(manager: socket.socket) -> None:
    ours, theirs = os.pipe()
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(notify.keep(fuse=ours, nodes=theirs)))
    asking.start()
    got = [receive(manager) for _ in range(3)]
    assert [text for text, _ in got] == ["FDSTORE=1\nFDNAME=fuse", "FDSTORE=1\nFDNAME=nodes", "BARRIER=1"]
    assert os.path.sameopenfile(got[0][1][0], ours)
    assert os.path.sameopenfile(got[1][1][0], theirs)
    asking.join(0.05)
    assert asking.is_alive()  # the barrier's descriptor is still open here
    for _, fds in got:
        os.close(fds[0])
    asking.join(60)
    assert answers == [True]
    os.close(ours)
    os.close(theirs)


def test_a_barrier_that_nobody_reads_ends(manager: socket.socket) -> None:
    assert not notify.barrier(0.05)


@pytest.mark.parametrize(
    ("most", "enough"), [("512", True), ("2", True), ("1", False), ("0", False), ("", False), ("x", False)]
)
def test_whether_descriptors_are_kept(most: str, enough: bool, manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDSTORE", most)
    assert notify.keeps_descriptors(2) is enough


CHILD = """
import os, sys
from weenv.systemd import notify
found = notify.inherited()
print(sorted(found.items()), notify.inherited(), [name for name in os.environ if name.startswith("LISTEN_")])
print([os.get_inheritable(fd) for fds in found.values() for fd in fds])
"""


def child(*, pid: str = "$$", count: str = "2", names: str = "snapshotter:fuse") -> list[str]:
    """What a process says of the descriptors 3 and 4 that it was started with; ``sh`` replaces itself, so ``$$`` is its pid."""
    script = f'LISTEN_PID={pid} LISTEN_FDS={count} LISTEN_FDNAMES={names} exec "$@" 3</dev/null 4</dev/zero'
    done = subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-c", CHILD], stdout=subprocess.PIPE, check=True, timeout=30
    )
    return done.stdout.decode().splitlines()


def test_inherited_descriptors_by_name() -> None:
    assert child() == ["[('fuse', [4]), ('snapshotter', [3])] {} []", "[False, False]"]
    assert child(names="") == ["[('unknown', [3, 4])] {} []", "[False, False]"]
    assert child(names="a:a") == ["[('a', [3, 4])] {} []", "[False, False]"]
    assert child(count="3", names="a:b:c") == ["[('a', [3]), ('b', [4])] {} []", "[False, False]"]  # there is no 5


@pytest.mark.parametrize("wrong", [{"pid": "1"}, {"pid": ""}, {"count": "x"}, {"count": "-1"}, {"count": "9999999"}])
def test_descriptors_of_somebody_else_are_left_alone(wrong: dict[str, str]) -> None:
    assert child(**wrong) == ["[] {} []", "[]"]


def test_a_listening_socket_is_chosen_and_the_rest_closed(tmp_path: object) -> None:
    plain = os.open("/dev/null", os.O_RDONLY)
    inet = socket.create_server(("127.0.0.1", 0))
    idle = socket.socket(socket.AF_UNIX)
    with socket.socket(socket.AF_UNIX) as right:
        right.bind(f"{tmp_path}/s")
        right.listen()
        given = [plain, inet.detach(), idle.detach(), os.dup(right.fileno()), os.dup(right.fileno())]
        found = notify.listening_socket(given)
        assert found is not None
        with found:
            assert found.getsockname() == f"{tmp_path}/s"
            assert found.fileno() == given[3]
            for fd in (*given[:3], given[4]):
                with pytest.raises(OSError):
                    os.fstat(fd)
    assert notify.listening_socket([]) is None


@pytest.mark.parametrize(
    ("micros", "pid", "interval"),
    [
        ("30000000", "", 15.0),
        ("3000000", "self", 1.5),
        ("3000000", "1", None),
        ("0", "", None),
        ("x", "", None),
        ("", "", None),
    ],
)
def test_the_watchdog_is_fed_twice_as_often_as_needed(
    micros: str, pid: str, interval: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", micros)
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if pid == "self" else pid)
    assert notify.watchdog_interval() == interval


async def test_signs_of_life(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    feeding = asyncio.create_task(notify.watchdog())
    for _ in range(3):
        assert (await asyncio.to_thread(receive, manager))[0] == "WATCHDOG=1"
    feeding.cancel()
    monkeypatch.delenv("WATCHDOG_USEC")
    await notify.watchdog()
