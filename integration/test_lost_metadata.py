"""containerd and the snapshotter disagree about what there is, because one of them has lost its memory."""

from __future__ import annotations

import os
import shutil

import pytest

from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import Failed, unmount_under, wait_until
from weenv_testkit.store import Store

RELEASE = "cat /etc/weenv-release"


def test_containerd_lost_its_memory(node: Node, store: Store) -> None:
    """The same images are pulled and run again, lazy and ordinary, and what nobody knows any more is collected."""
    lazy, ordinary = store.lazy("solo"), store.plain("small")
    namespace = node.pull(lazy)
    node.containerd.pull(ordinary, snapshotter=SNAPSHOTTER, namespace=namespace)
    assert node.shell(lazy, RELEASE, namespace) == "solo\n"
    node.containerd.stop()
    unmount_under(node.containerd.home)
    for folder in (node.containerd.root, node.containerd.state):
        shutil.rmtree(folder)
    node.containerd.start()
    assert node.pull(lazy) == namespace
    node.containerd.pull(ordinary, snapshotter=SNAPSHOTTER, namespace=namespace)
    assert node.shell(lazy, RELEASE, namespace) == "solo\n"
    assert node.shell(ordinary, "echo ran", namespace) == "ran\n"
    node.expect("reason=")  # the ordinary image is not lazy
    node.containerd.purge(namespace, SNAPSHOTTER)
    wait_until("the layers to go", lambda: not node.layers(), 60)


def test_the_snapshotter_lost_its_memory(node: Node, store: Store) -> None:
    """What is gone is said to be gone; removing and pulling the image again heals it. Nothing else has to be done."""
    ref = store.lazy("solo")
    namespace = node.pull(ref)
    assert node.shell(ref, RELEASE, namespace) == "solo\n"
    node.containerd.stop()
    node.snapshotter.stop()
    unmount_under(f"{node.root}/m")
    for name in ("metastore.db", "metastore.db-wal", "metastore.db-shm"):
        if os.path.exists(f"{node.root}/{name}"):
            os.unlink(f"{node.root}/{name}")
    shutil.rmtree(f"{node.root}/s")
    node.start_snapshotter()
    node.containerd.start()
    node.expect("reason=")  # containerd tries to unpack what it never downloaded
    with pytest.raises(Failed, match=r"not found|does not exist"):
        node.shell(ref, RELEASE, namespace)
    node.remove_image(ref, namespace)
    assert node.pull(ref) == namespace
    assert node.shell(ref, RELEASE, namespace) == "solo\n"
    node.remove_image(ref, namespace)
    node.containerd.collect()
    wait_until("the layers to go", lambda: not node.layers(), 60)
