"""Long runs, only by ``make soak``: daemons killed at random under readers, and nothing that grows.

``WEENV_SOAK_SECONDS`` (default 300) is how long each takes.
"""

from __future__ import annotations

import os
import random
import time

import pytest

from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import mounts_under, open_fds, wait_until
from weenv_testkit.store import Store

SECONDS = float(os.environ.get("WEENV_SOAK_SECONDS", "300"))

pytestmark = [pytest.mark.soak, pytest.mark.timeout(SECONDS * 3 + 600)]


def resident(pid: int) -> int:
    """Resident memory of a process in bytes."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_kill_anything_at_any_moment(node: Node, store: Store) -> None:
    """A container verifies its files over and over while daemons die at random; it never sees an error."""
    ref = store.lazy("debian")
    namespace = node.pull(ref)
    sums = "cd /; find usr/bin usr/lib opt/weenv -xdev -type f | sort | head -4000 | xargs sha256sum > /tmp/sums"
    script = f"""{sums}
while :; do
  if ! sha256sum --quiet --check /tmp/sums > /tmp/wrong 2>&1; then cp /tmp/wrong /tmp/failed; fi
  echo x >> /tmp/rounds
done"""
    name = node.containerd.run_detached(ref, "sh", "-c", script, snapshotter=SNAPSHOTTER, namespace=namespace)
    root = node.rootfs(name, namespace)
    dice = random.Random(int(time.time()))
    end, kills = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        time.sleep(dice.uniform(0.2, 4))
        if dice.random() < 0.3:  # make the next round ask again for what is in the page cache
            with open("/proc/sys/vm/drop_caches", "w") as file:
                file.write("3\n")
        victim = dice.choice(["blobfs", "blobfs", "snapshotter", "containerd"])
        if victim == "containerd":
            node.containerd.kill()
            node.containerd.start()
        elif victim == "blobfs":
            node.blobfs.kill()
            time.sleep(dice.uniform(0, 1))
            node.start_blobfs()
        else:
            node.snapshotter.kill()
            node.start_snapshotter()
            assert node.shell(ref, "cat /etc/weenv-release", namespace) == "top\n"
        kills += 1
        assert not os.path.exists(f"{root}/tmp/failed"), open(f"{root}/tmp/failed").read()[:2000]  # noqa: SIM115
    assert kills > SECONDS / 10
    rounds = f"{root}/tmp/rounds"
    before = os.path.getsize(rounds) if os.path.exists(rounds) else 0
    wait_until("one more round", lambda: os.path.exists(rounds) and os.path.getsize(rounds) > before, 300)
    assert not os.path.exists(f"{root}/tmp/failed")
    node.containerd.remove_container(name, namespace)


def test_nothing_grows(node: Node, store: Store) -> None:
    """Pull, run, remove, again and again: descriptors, mounts, directories and memory of the daemons come back."""
    ref = store.lazy("small")

    def turn() -> None:
        namespace = node.pull(ref)
        assert node.shell(ref, "find / -xdev -type f | xargs cat | wc -c > /dev/null; echo ok", namespace) == "ok\n"
        node.remove_image(ref, namespace)
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
    before = len(open_fds(node.blobfs.pid))
    node.shell(ref, "for n in 1 2 3 4 5; do cat /opt/weenv/many/* | sha256sum; done", namespace)
    assert len(open_fds(node.blobfs.pid)) <= before + 8
