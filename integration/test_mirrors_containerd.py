"""containerd and WeEnv read one ``hosts.toml``: an image of a registry that does not exist comes from its mirror."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store

NAME = "mirrored.example:7000"

# The first mirror is not there, the second has everything, and the registry itself is not there either.
HOSTS = """
server = "http://127.0.0.1:1"

[host."http://127.0.0.1:2"]
  capabilities = ["pull", "resolve"]

[host."http://{mirror}"]
  capabilities = ["pull", "resolve"]
  [host."http://{mirror}".header]
    x-weenv-test = "yes"
"""


@pytest.fixture
def mirrored(home: str, registry: Registry) -> Iterator[Node]:
    """A node whose containerd and daemons are told of a mirror by the same directory."""
    path = tempfile.mkdtemp(prefix="m", dir=home)
    settings = {"blobfs.fill": "enabled = false", "registry": f'config_path = "{path}/c/hosts"'}
    node = Node("2.1", path, registry=registry.host, settings=settings)
    assert node.containerd.hosts == f"{path}/c/hosts"
    folder = os.path.join(node.containerd.hosts, NAME.replace(":", "_") + "_")
    os.makedirs(folder)
    with open(os.path.join(folder, "hosts.toml"), "w") as file:
        file.write(HOSTS.format(mirror=registry.host))
    node.start()
    yield node
    node.close()


def test_one_file_for_both(mirrored: Node, store: Store, registry: Registry) -> None:
    ref = store.lazy("small").replace(registry.host, NAME)
    before = registry.mark()
    pull = "images", "pull", "--hosts-dir", mirrored.containerd.hosts, "--snapshotter", SNAPSHOTTER
    mirrored.containerd.ctr(*pull, ref)
    assert int(mirrored.shell(ref, "find / -xdev -type f | xargs cat | wc -c", "default")) > 100_000
    assert mirrored.layers(), "it is lazy"
    asked = registry.requests(before)
    for agent in ("containerd/", "weenv/"):
        theirs = [request for request in asked if request.agent.startswith(agent)]
        assert theirs and all(request.path.endswith("?ns=mirrored.example%3A7000") for request in theirs), agent
    assert any(request.status == 206 for request in asked), "layers are read in pieces, from the mirror"
    mirrored.expect("a mirror rests|source annotation names")
    assert not mirrored.complaints()
