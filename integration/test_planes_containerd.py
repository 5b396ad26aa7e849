"""Lazy images in real containers with the FUSE plane: tests of the kernel's plane, on nodes whose configuration forces it.

The rest of those tests run on such nodes in test_planes_soak.py.
"""

from __future__ import annotations

import os
import re
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
from weenv.plugin.snapshotter.planes.fuse import Process, serving
from weenv_testkit.fusenode import module_node  # noqa: F401
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import Failed, end_processes, processes_of, wait_until


def firsts(node: Node) -> dict[str, Process]:
    """The processes that were the first to serve the layers' mounts, by mount point."""
    found = mounts_below(f"{node.root}/m").items()
    assert {entry.fstype for _, entry in found} <= {"fuse.weenv-layer"}
    return {point: Process(*map(int, entry.source.split(":")[2:])) for point, entry in found}


def servers(node: Node) -> dict[str, int]:
    """The processes that serve them now; 0 for none."""
    return {point: serving(f"{node.run}/layers.sock", first).pid for point, first in firsts(node).items()}


def lost(node: Node) -> float:
    """Mounts that the snapshotter has lost to the death of their servers."""
    return node.snapshotter.metric("weenv_snapshotter_repairs_total", what="lost mount")


def test_layers_are_mounted_by_processes_of_their_own(node: Node, debian: tuple[str, str]) -> None:  # noqa: F811
    before = servers(node)
    assert len(set(before.values())) == len(before) >= 3
    node.restart()
    assert servers(node) == before, "no daemon's restart touches them"
    with open(node.config) as file:
        forced = "plane =" in file.read()
    why = "plane says so" if forced else "this kernel mounts EROFS from block devices only"
    assert re.search(f"layers are mounted by plane fuse .*{re.escape(why)}", node.snapshotter.log_text())


def test_a_server_that_is_killed_is_followed_by_another(node: Node, debian: tuple[str, str]) -> None:  # noqa: F811
    ref, namespace = debian
    name = node.containerd.run_detached(ref, "sleep", "1000", snapshotter=SNAPSHOTTER, namespace=namespace)
    node.expect("was ended by signal 9")
    killed, had = servers(node), lost(node)
    for pid in killed.values():
        os.kill(pid, signal.SIGKILL)
    wait_until("all to be followed", lambda: not {0, *killed.values()} & set(servers(node).values()))
    assert node.containerd.exec(name, "cat", "/opt/weenv/many/0776", namespace=namespace) == "776\n" * 50
    assert node.shell(ref, "cat /etc/weenv-release", namespace) == "top\n"
    assert lost(node) == had
    node.containerd.remove_container(name, namespace)


def test_servers_that_die_again_and_again_cost_running_containers_and_no_new_one(
    node: Node,
    debian: tuple[str, str],  # noqa: F811
) -> None:
    ref, namespace = debian
    name = node.containerd.run_detached(ref, "sleep", "1000", snapshotter=SNAPSHOTTER, namespace=namespace)
    for text in ("the process that serves a layer has died", "was ended by signal 9", "die one after another"):
        node.expect(text)
    had, first = lost(node), firsts(node).values()
    while alive := {serving(f"{node.run}/layers.sock", each).pid for each in first} - {0}:
        end_processes(alive)
    wait_until("all losses to be seen", lambda: lost(node) >= had + len(first))
    assert node.shell(ref, "cat /etc/weenv-release", namespace) == "top\n"
    with pytest.raises(Failed):  # ENOTCONN; or its process had a page fault meanwhile, and is gone
        node.containerd.exec(name, "cat", "/opt/weenv/many/0777", namespace=namespace)
    node.containerd.remove_container(name, namespace)


def test_servers_end_with_their_layers(node: Node, debian: tuple[str, str]) -> None:  # noqa: F811
    ref, namespace = debian
    had = set(servers(node).values())
    node.remove_image(ref, namespace)
    node.containerd.collect()
    wait_until("the layers to go", lambda: not servers(node), 60)
    wait_until("their servers to end", lambda: not had & set(processes_of(node.home)))
