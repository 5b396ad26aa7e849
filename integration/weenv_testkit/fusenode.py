"""A node with the FUSE plane, forced where the kernel would not have it by itself, for a module's tests to share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from weenv.plugin.snapshotter.planes.choose import AUTO, FUSE, choose
from weenv_testkit.node import Node
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store


@pytest.fixture(scope="module")
def module_node(request: pytest.FixtureRequest, line: str, home: str, registry: Registry, store: Store) -> Iterator[Node]:
    """To be imported by name into a module of tests; NODE_SETTINGS as in conftest.py."""
    path = os.path.join(home, f"f{line}")
    os.mkdir(path)
    store.pause()
    settings = {"blobfs.fill": "enabled = false", **getattr(request.module, "NODE_SETTINGS", {})}
    if choose(AUTO, path).name != FUSE:
        settings["snapshotter"] = f'plane = "fuse"\n{settings.get("snapshotter", "")}'
    with Node(line, path, registry=registry.host, settings=settings) as running:
        yield running
