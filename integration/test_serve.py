"""``weenv serve``: a daemon that dies is an error for nobody, whoever else dies with it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import grpc
import pytest

from weenv.plugin.containerd.schema import EMPTY, SNAPSHOTS_SERVICE
from weenv.plugin.snapshotter.blobfs import holder
from weenv_testkit import tools
from weenv_testkit.killing import Killing
from weenv_testkit.node import SNAPSHOTTER
from weenv_testkit.procs import children_of, mounts_under, open_fds, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.served import DAEMONS, ServedNode
from weenv_testkit.store import Store

READ = "cat /opt/weenv/many/1[5-9]* /usr/lib/python3*/*.py /usr/share/perl5/*/*.pm | sha256sum"


@pytest.fixture(scope="module")
def served(home: str, registry: Registry, store: Store) -> Iterator[ServedNode]:
    path = os.path.join(home, "s")
    os.mkdir(path)
    store.pause()
    with ServedNode("2.1", path, registry=registry.host, settings={"blobfs.fill": "enabled = false"}) as running:
        yield running


@pytest.fixture
def node(served: ServedNode) -> Iterator[ServedNode]:
    yield served
    served.expect("starting it again")
    assert not served.complaints()


class Reader:
    """A container that reads data which is not local once it is told to, and writes what it found to a file."""

    def __init__(self, node: ServedNode, ref: str, namespace: str) -> None:
        self.node, self.namespace = node, namespace
        script = f"until test -e /go; do sleep 0.05; done; {READ} > /result 2>&1; mv /result /done; sleep 1000"
        self.name = node.containerd.run_detached(ref, "sh", "-c", script, snapshotter=SNAPSHOTTER, namespace=namespace)
        self.root = node.rootfs(self.name, namespace)

    def go(self) -> None:
        with open(f"{self.root}/go", "w"):
            pass

    def result(self) -> str:
        wait_until("the reader to finish", lambda: os.path.exists(f"{self.root}/done"), 90)
        with open(f"{self.root}/done") as file:
            found = file.read()
        self.node.containerd.remove_container(self.name, self.namespace)
        return found


@pytest.fixture(scope="module")
def expected(served: ServedNode, store: Store) -> str:
    """What a reader is to find: from an ordinary pull of the same image."""
    plain = store.plain("debian")
    served.containerd.pull(plain, snapshotter="overlayfs")
    found = served.containerd.run(plain, "sh", "-c", READ, snapshotter="overlayfs")
    served.containerd.remove_image(plain)  # the lazy one has the same configuration, which would keep its snapshots
    return found


@pytest.fixture
def fresh(node: ServedNode, store: Store, expected: str) -> Iterator[Reader]:
    """A reader of an image of which nothing is local."""
    ref = store.lazy("debian")
    namespace = node.pull(ref)
    yield Reader(node, ref, namespace)
    node.remove_image(ref, namespace)
    node.containerd.collect()
    wait_until("the layers to go", lambda: not node.layers(), 60)


def test_whoever_calls_a_killed_snapshotter_waits_and_none_is_refused(node: ServedNode) -> None:
    failures: list[str] = []
    calls = [0]
    done = threading.Event()

    def caller() -> None:
        while not done.is_set():
            with grpc.insecure_channel(f"unix:{node.socket}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
                cleanup = channel.unary_unary(
                    f"/{SNAPSHOTS_SERVICE}/Cleanup", EMPTY.SerializeToString, EMPTY.FromString, _registered_method=False
                )
                try:
                    cleanup(EMPTY(), timeout=60)
                except grpc.RpcError as error:  # one that was being answered when the process died
                    failures.append(f"{error.code()}: {error.details()}")  # type: ignore[attr-defined]
                calls[0] += 1

    thread = threading.Thread(target=caller)
    thread.start()
    try:
        for _ in range(4):
            before = calls[0]
            wait_until("calls to be answered", lambda seen=before: calls[0] > seen + 3, 60)  # type: ignore[misc]
            pid = node.kill_daemon("snapshotter")
            for _ in range(3):
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(node.socket)
            node.successor("snapshotter", pid)
    finally:
        done.set()
        thread.join(90)
    assert not thread.is_alive()
    assert len(failures) <= 4, failures
    assert not any("refused" in text for text in failures), failures


def test_containerd_waits_for_a_snapshotter_that_takes_long_to_come_back(node: ServedNode, store: Store) -> None:
    """It gives a connection up after a second on which no server has said a word, and fails all requests for another one."""
    ref = store.lazy("solo")
    namespace = node.pull(ref)
    lock = os.open(f"{node.root}/lock", os.O_RDWR)
    try:
        pid = node.kill_daemon("snapshotter")
        fcntl.flock(lock, fcntl.LOCK_EX)  # the next one waits for it, as if its predecessor were still ending
        node.successor("snapshotter", pid)
        with ThreadPoolExecutor(4) as threads:
            asked = [threads.submit(node.shell, ref, "exit 0", namespace) for _ in range(4)]
            assert not wait(asked, 5).done
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert [ran.result(60) for ran in asked] == [""] * 4
    finally:
        os.close(lock)
    node.remove_image(ref, namespace)
    node.containerd.collect()


def test_blobfs_and_its_holder_killed_together_lose_no_read(node: ServedNode, fresh: Reader, expected: str) -> None:
    """The supervisor has the mount's descriptors as well."""
    answer = holder.ask(f"{node.run}/h.sock", {"op": "status"})
    assert answer is not None
    pid = node.daemon("blobfs")
    assert pid is not None
    os.kill(answer["pid"], signal.SIGSTOP)  # it cannot be replaced while the server still lives
    fresh.go()
    node.kill_daemon("blobfs")
    os.kill(answer["pid"], signal.SIGKILL)
    node.successor("blobfs", pid)
    assert fresh.result() == expected
    again = holder.ask(f"{node.run}/h.sock", {"op": "status"})
    assert again is not None and again["pid"] != answer["pid"]
    node.expect("the holder is gone")


def test_a_killed_supervisor_takes_its_daemons_along_and_the_next_one_goes_on(
    node: ServedNode, fresh: Reader, expected: str
) -> None:
    assert node.supervisor is not None
    daemons = [node.daemon(name) for name in DAEMONS]
    node.supervisor.kill()
    wait_until("the daemons to end", lambda: not any(os.path.exists(f"/proc/{pid}") for pid in daemons), 60)
    fresh.go()
    node.start_daemons()
    assert fresh.result() == expected


def test_after_an_upgrade_both_daemons_are_new_and_readers_wait(node: ServedNode, fresh: Reader, expected: str) -> None:
    assert node.supervisor is not None
    before = {name: node.daemon(name) for name in DAEMONS}
    fresh.go()
    os.kill(node.supervisor.pid, signal.SIGHUP)
    for name, pid in before.items():
        assert pid is not None
        node.successor(name, pid)
    assert fresh.result() == expected


def test_stopping_takes_nothing_away_and_the_next_start_goes_on(node: ServedNode, fresh: Reader, expected: str) -> None:
    mounts = mounts_under(node.home)
    node.stop_daemons()
    assert mounts_under(node.home) == mounts
    assert not os.path.exists(node.socket)
    fresh.go()
    node.start_daemons()
    assert fresh.result() == expected


def test_a_forced_stop_ends_those_who_wait_and_the_mount_is_made_anew(node: ServedNode, store: Store) -> None:
    """As long as anybody has the descriptor, the supervisor too, the kernel would have them wait for ever."""
    ref = store.lazy("solo")
    namespace = node.pull(ref)
    (digest,) = node.layers()
    directory = os.open(node.blobs, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.close(os.open(digest.removeprefix("sha256:"), os.O_RDONLY, dir_fd=directory))
        pid = node.daemon("blobfs")
        assert pid is not None
        subprocess.run([*tools.weenv(), "blobfs", "stop", "--force", "--config", node.config], check=True, timeout=60)
        node.successor("blobfs", pid)
        with ThreadPoolExecutor(1) as threads:
            opened = threads.submit(os.open, digest.removeprefix("sha256:"), os.O_RDONLY, dir_fd=directory)
            assert isinstance(opened.exception(60), OSError)
    finally:
        os.close(directory)
    wait_until("the image to run again", lambda: node.shell(ref, "echo again", namespace, check=False) == "again\n", 60)
    node.remove_image(ref, namespace)
    node.containerd.collect()
    node.expect(r" (WARNING|ERROR) ")  # the snapshotter finds its mounts dead, and makes them anew


def test_one_that_cannot_work_says_why_at_the_first_start(home: str) -> None:
    path = f"{home}/bad"
    os.mkdir(path)
    with open(f"{path}/c.toml", "w") as file:
        file.write(
            f'[snapshotter]\nroot = "{path}/w"\nsocket = "{path}/s.sock"\nblobs = "{path}/b"\n'
            f'metrics_address = "127.0.0.1:1x"\n'
            f'[blobfs]\nroot = "{path}/w"\nmountpoint = "{path}/b"\nholder_socket = "{path}/h.sock"\n'
            f'status_socket = "{path}/b.sock"\n'
        )
    done = subprocess.run(
        [*tools.weenv(), "serve", "--config", f"{path}/c.toml"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "weenv: " in done.stderr and "1x" in done.stderr
    assert not os.path.exists(f"{path}/s.sock") and not os.path.exists(f"{path}/b.sock")
    subprocess.run([*tools.weenv(), "blobfs", "stop", "--config", f"{path}/c.toml"], check=True, timeout=60)


def test_it_is_small_and_has_one_thread(node: ServedNode) -> None:
    assert node.supervisor is not None
    pid = node.supervisor.pid
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    assert int(fields["Threads"]) == 1
    assert int(fields["RssAnon"].split()[0]) < 16 << 10
    assert len(open_fds(pid)) < 20
    assert children_of([pid]) >= {node.daemon(name) for name in DAEMONS}


@pytest.mark.timeout(900)
def test_daemons_killed_at_random_under_containers_that_verify(node: ServedNode, store: Store) -> None:
    """The soak test of ten minutes (test_soak.py), for a quarter of one."""
    outcome = Killing(node, store, containers=3, files=200).run(15)
    node.expect(r" (WARNING|ERROR) ")  # of daemons that find others dead; a traceback is still none of them
    assert not outcome.wrong
    assert outcome.kills
