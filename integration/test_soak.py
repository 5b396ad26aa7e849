"""Long runs, only by ``make soak``: daemons killed at random under readers, and nothing that grows.

``WEENV_SOAK_SECONDS`` is how long those take that have no measure of their own; what they found is in docs/reliability.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from weenv.plugin.snapshotter.blobfs import holder
from weenv_testkit.killing import Killing
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import mounts_under, open_fds, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.served import ServedNode
from weenv_testkit.store import Store

SECONDS = float(os.environ.get("WEENV_SOAK_SECONDS", "600"))
TURNS = int(os.environ.get("WEENV_SOAK_TURNS", "10"))
CONTAINERS = 200

pytestmark = [pytest.mark.soak, pytest.mark.timeout(SECONDS * 3 + 3600)]


def resident(pid: int) -> int:
    """Resident memory of a process in bytes."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def served(line: str, home: str, registry: Registry, store: Store) -> Iterator[ServedNode]:
    path = os.path.join(home, f"s{line}")
    os.mkdir(path)
    store.pause()
    with ServedNode(line, path, registry=registry.host, settings={"blobfs.fill": "enabled = false"}) as running:
        yield running


def test_kill_anything_at_any_moment(served: ServedNode, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight containers verify their files over and over while daemons die at random; none ever sees an error."""
    outcome = Killing(served, store, containers=8, files=1500).run(SECONDS)
    with capsys.disabled():
        print(f"\n{served.line}: {outcome}\n{outcome.asked_again.most_common(10)}")
    assert not outcome.wrong
    assert sum(outcome.kills.values()) > SECONDS / 10
    _, _, trace = served.log_text().partition("Traceback")
    assert not trace, trace[:3000]


def test_two_hundred_containers_again_and_again(served: ServedNode, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Started, used and removed; afterwards the daemons have what they had, and so has the disk."""
    ref = store.lazy("debian")
    namespace = served.pull(ref)
    script = "sha256sum /usr/bin/perl /opt/weenv/many/0* > /sums && sleep 1000"
    containerd = served.containerd
    with ThreadPoolExecutor(8) as threads:

        def turn() -> None:
            start = lambda _: containerd.run_detached(ref, "sh", "-c", script, snapshotter=SNAPSHOTTER, namespace=namespace)  # noqa: E731
            names = list(threads.map(start, range(CONTAINERS)))
            roots = [served.rootfs(name, namespace) for name in names]
            wait_until("all to have read", lambda: all(_lines(f"{root}/sums") == 1001 for root in roots), 300, 0.5)
            list(threads.map(lambda name: containerd.remove_container(name, namespace), names))
            containerd.collect()
            wait_until("the snapshots to go", lambda: len(os.listdir(f"{served.root}/s")) <= kept, 120, 0.2)

        def numbers() -> dict[str, int]:
            answer = holder.ask(f"{served.run}/h.sock", {"op": "status"})
            assert answer is not None and served.supervisor is not None
            pids = {name: served.daemon(name) for name in ("blobfs", "snapshotter")}
            pids |= {"holder": answer["pid"], "supervisor": served.supervisor.pid}
            found = {}
            for name, pid in pids.items():
                assert pid is not None
                found[f"{name} fds"] = len(open_fds(pid))
                found[f"{name} threads"] = len(os.listdir(f"/proc/{pid}/task"))
                found[f"{name} KiB"] = resident(pid) >> 10
            found["mounts"] = len(mounts_under(served.home))
            found["disk KiB"] = _disk(served.root) >> 10
            return found

        kept = len(os.listdir(f"{served.root}/s")) + 260  # directories made ahead
        table = []
        for number in range(TURNS):
            turn()
            table.append(numbers())
            with capsys.disabled():
                print(f"\n{served.line}: turn {number + 1}: {table[-1]}", flush=True)
    first, last = table[1], table[-1]
    for name, value in last.items():
        slack = {"KiB": first[name] // 10 + 8192, "fds": 8, "threads": 4}.get(name.rpartition(" ")[2], 0)
        assert value <= first[name] + slack, (name, table)


def _lines(path: str) -> int:
    try:
        with open(path, "rb") as file:
            return file.read().count(b"\n")
    except FileNotFoundError:
        return 0


def _disk(path: str) -> int:
    """Bytes that a tree takes, without what is mounted in it."""
    total, device = 0, os.lstat(path).st_dev
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if os.lstat(os.path.join(folder, name)).st_dev == device]
        total += sum(os.lstat(os.path.join(folder, name)).st_blocks * 512 for name in (*files, *folders))
    return total


def test_nothing_grows(node: Node, store: Store) -> None:
    """Pull, run, remove, again and again: descriptors, mounts, directories and memory of the daemons come back."""
    ref = store.lazy("small")

    def turn() -> None:
        namespace = node.pull(ref)
        assert node.shell(ref, "find / -xdev -type f | xargs cat | wc -c > /dev/null; echo ok", namespace) == "ok\n"
        node.remove_image(ref, namespace)
        node.containerd.collect()
        wait_until("the layer to go", lambda: not node.layers(), 60)

    def numbers() -> tuple[int, int, int, int, int]:
        snapshotter, blobfs = node.snapshotter.pid, node.blobfs.pid
        descriptors = len(open_fds(snapshotter)), len(open_fds(blobfs))
        return (*descriptors, len(mounts_under(node.home)), resident(snapshotter), resident(blobfs))

    node.containerd.purge("k8s.io" if node.line == "1.7" else "default", SNAPSHOTTER)
    for _ in range(10):
        turn()
    before = numbers()
    end, turns = time.monotonic() + SECONDS / 2, 0
    while time.monotonic() < end:
        turn()
        turns += 1
    after = numbers()
    assert turns > 10
    for index in range(3):
        assert after[index] <= before[index] + 2, (before, after)
    for index in (3, 4):
        assert after[index] < before[index] * 1.2 + (10 << 20), (before, after)


def test_ten_thousand_reads_leave_no_descriptor(node: Node, store: Store) -> None:
    """Every file opened and closed many times, cold and warm."""
    ref = store.lazy("debian")
    namespace = node.pull(ref)

    def files() -> list[str]:
        """What blobfs has open but connections, of which there are as many as were of use at once."""
        return sorted(name for name in open_fds(node.blobfs.pid).values() if not name.startswith("socket:"))

    node.shell(ref, "cat /opt/weenv/many/* | sha256sum", namespace)  # every layer is open from here on
    before = files()
    node.shell(ref, "for n in 1 2 3 4 5; do cat /opt/weenv/many/* | sha256sum; done", namespace)
    assert files() == before
    assert len(open_fds(node.blobfs.pid)) < len(before) + 40
