"""dockerd, containerd and our daemons restarted and killed under docker's containers: nothing is lost, nobody has to help."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import docker
import pytest

from weenv_testkit.dockerd import Dockerd, shell
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import wait_until
from weenv_testkit.store import Store

IDLE = ["tail", "-f", "/dev/null"]


@pytest.fixture
def dockerd(module_node: Node, home: str, request: pytest.FixtureRequest) -> Iterator[Dockerd]:
    """A dockerd of the test's own, whose containers stay up while it is away."""
    path = os.path.join(home, f"r{module_node.line}{request.node.name[5:9]}")
    os.mkdir(path)
    with Dockerd(path, module_node.containerd, snapshotter=SNAPSHOTTER, live_restore=True) as running:
        yield running
    shutil.rmtree(path)


def start(client: docker.DockerClient, ref: str, name: str) -> Any:
    """A container in which something was written."""
    container = client.containers.create(ref, IDLE, name=name, network_mode="none", init=True)
    container.start()
    assert container.exec_run(["sh", "-c", "echo kept > /kept; echo more >> /etc/weenv-release; rm /data/3"]).exit_code == 0
    return container


KEPT = ["sh", "-c", "cat /kept /etc/weenv-release; ls /data | wc -l; sha256sum /data/7 | cut -c 1-8"]


def test_dockerd_is_restarted_and_killed_under_containers(dockerd: Dockerd, node: Node, store: Store) -> None:
    ref = store.lazy("pair")
    with dockerd.client() as client:
        client.images.pull(ref)
        container = start(client, ref, "one")
        before = container.exec_run(KEPT).output
        assert before.decode().splitlines()[:4] == ["kept", "pair", "more", "19"]
        pid = container.attrs["State"]["Pid"] or client.api.inspect_container("one")["State"]["Pid"]
    dockerd.stop()
    dockerd.start()
    with dockerd.client() as client:
        assert client.api.inspect_container("one")["State"]["Pid"] == pid, "the very same process"
        assert client.containers.get("one").exec_run(KEPT).output == before
    dockerd.kill()
    dockerd.start()
    with dockerd.client() as client:
        container = client.containers.get("one")
        assert client.api.inspect_container("one")["State"]["Pid"] == pid
        assert container.exec_run(KEPT).output == before
        container.restart(timeout=1)
        assert container.exec_run(KEPT).output == before, "stopped and started by another dockerd than made it"
        assert shell(client, ref, "cat /etc/weenv-release") == ["pair"]
    dockerd.live_restore = False
    for _ in range(2):
        dockerd.stop()
        dockerd.start()
    with dockerd.client() as client:
        container = client.containers.get("one")
        assert container.status == "exited", "without live-restore, dockerd takes its containers along"
        container.start()
        assert container.exec_run(KEPT).output == before
        container.remove(force=True)


def test_everything_is_killed_at_once_under_containers(dockerd: Dockerd, node: Node, store: Store) -> None:
    """A read that has to wait goes on; containers made before and after work."""
    ref = store.lazy("debian")
    with dockerd.client() as client:
        client.images.pull(ref)
        container = client.containers.create(ref, IDLE, name="two", network_mode="none")
        container.start()
        container.exec_run(["sh", "-c", "echo kept > /kept"])
        read = "until test -e /go; do sleep 0.05; done; cat /opt/weenv/data.bin /usr/lib/python3*/*.py | sha256sum > /result"
        container.exec_run(["sh", "-c", read], detach=True)
        root = f"/proc/{client.api.inspect_container('two')['State']['Pid']}/root"
    dockerd.kill()
    node.kill()
    with open(f"{root}/go", "w"):
        wait_until("the reader to begin", lambda: os.path.exists(f"{root}/result"))
    assert os.path.getsize(f"{root}/result") == 0, "there is nobody who could give it the data"
    node.start()
    dockerd.start()
    with dockerd.client() as client:
        container = client.containers.get("two")
        wait_until("the reader to finish", lambda: container.exec_run(["test", "-s", "/result"]).exit_code == 0, 60, 0.2)
        again = "cat /opt/weenv/data.bin /usr/lib/python3*/*.py | sha256sum"
        assert container.exec_run(["cat", "/kept", "/result"]).output.decode().splitlines() == [
            "kept", *shell(client, ref, again),
        ]  # fmt: skip
        container.remove(force=True)


@pytest.mark.soak
def test_our_daemons_come_back_under_a_running_dockerd(dockerd: Dockerd, node: Node, store: Store) -> None:
    """An upgrade of ours: dockerd and containerd are told nothing."""
    ref = store.lazy("pair")
    with dockerd.client() as client:
        client.images.pull(ref)
        container = start(client, ref, "three")
        before = container.exec_run(KEPT).output
        node.snapshotter.stop()
        node.blobfs.stop()
        assert container.exec_run(["cat", "/kept"]).output == b"kept\n", "nothing of ours is in the path of what is there"
        node.start_blobfs()
        node.start_snapshotter()
        assert container.exec_run(KEPT).output == before
        node.snapshotter.kill()
        node.start_snapshotter()
        other = start(client, ref, "four")
        assert other.exec_run(KEPT).output == before
        for one in (container, other):
            one.remove(force=True)
