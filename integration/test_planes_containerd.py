"""Lazy images in real containers with the FUSE plane: tests of the kernel's plane, on nodes whose configuration forces it.

The rest of those tests run on such nodes in test_planes_soak.py.
"""

from __future__ import annotations

import os
import signal

import pytest

from test_lazy_containerd import (  # noqa: F401 (collected here once more)
    debian,
    test_contents_are_those_of_the_image,
    test_daemons_are_killed_under_a_reader,
    test_hard_links_suid_xattrs_and_devices,
    test_layers_delete_what_lies_below,
)
from weenv.plugin.snapshotter.mounts import mounts_below
from weenv_testkit.fusenode import module_node  # noqa: F401
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import Failed, processes_of, wait_until


def servers(node: Node) -> dict[str, int]:
    """The processes that serve the layers' mounts, by mount point."""
    found = mounts_below(f"{node.root}/m").items()
    assert {entry.fstype for _, entry in found} <= {"fuse.weenv-layer"}
    return {point: int(entry.source.split(":")[2]) for point, entry in found}


def lost(node: Node) -> float:
    """Mounts that the snapshotter has lost to the death of their servers."""
    return node.snapshotter.metric("weenv_snapshotter_repairs_total", what="lost mount")


def test_layers_are_mounted_by_processes_of_their_own(node: Node, debian: tuple[str, str]) -> None:  # noqa: F811
    before = servers(node)
    assert len(set(before.values())) == len(before) >= 3
    node.restart()
    assert servers(node) == before, "no daemon's restart touches them"
    assert "layers are mounted by plane fuse" in node.snapshotter.log_text()


def test_a_server_that_is_killed_costs_running_containers_and_no_new_one(node: Node, debian: tuple[str, str]) -> None:  # noqa: F811
    ref, namespace = debian
    name = node.containerd.run_detached(ref, "sleep", "1000", snapshotter=SNAPSHOTTER, namespace=namespace)
    node.expect("the process that serves a layer has died")
    node.expect("was ended by signal 9")
    killed = servers(node)
    for pid in killed.values():
        os.kill(pid, signal.SIGKILL)
    wait_until("all losses to be seen", lambda: lost(node) == len(killed))
    assert node.shell(ref, "cat /etc/weenv-release", namespace) == "top\n"
    assert not set(servers(node).values()) & set(killed.values())
    with pytest.raises(Failed):  # ENOTCONN; or its process had a page fault meanwhile, and is gone
        node.containerd.exec(name, "cat", "/opt/weenv/many/0777", namespace=namespace)
    node.containerd.remove_container(name, namespace)


def test_servers_end_with_their_layers(node: Node, debian: tuple[str, str]) -> None:  # noqa: F811
    ref, namespace = debian
    had = set(servers(node).values())
    node.remove_image(ref, namespace)
    node.containerd.collect()
    wait_until("the layers to go", lambda: not servers(node), 40)
    wait_until("their servers to end", lambda: not had & set(processes_of(node.home)))
