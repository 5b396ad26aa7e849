"""Groups that are not in the lazy format: published, and asked for by the commands that users have."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
from typing import Any

from weenv.core.digest import chain_id
from weenv.layer.verify import LAYER_ANNOTATION
from weenv.plugin.containerd.client import Client
from weenv_testkit import tools
from weenv_testkit.images import Layer, Member, write_tar
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import run, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store

ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, may, who) for tag, may, who in ((1, 6, 2**32 - 1), (2, 4, 1000), (4, 4, 2**32 - 1),
                                                             (16, 4, 2**32 - 1), (32, 4, 2**32 - 1))
)  # fmt: skip
"""system.posix_acl_access with one named user (include/uapi/linux/posix_acl_xattr.h): what no converted layer can hold."""


class Publisher:
    """Groups in the registry, as tar layers (gzip) or converted by ``weenv convert``."""

    def __init__(self, store: Store, registry: Registry) -> None:
        os.makedirs(store.directory, exist_ok=True)
        self.store = store
        self.registry = registry
        self.base = store.plain("small")

    def tar(self, name: str, members: list[Member]) -> str:
        return write_tar(os.path.join(self.store.directory, f"nl-{name}.tar"), members)

    def layer(self, name: str, members: list[Member]) -> Layer:
        return self.store.layout.layer(self.tar(name, members))

    def plain(self, name: str, *layers: Layer, **config: Any) -> str:
        self.store.layout.image(list(layers), f"nl-{name}", **config)
        return self.store.layout.push(f"nl-{name}", self.registry, f"nl/{name}", "1")

    def lazy(self, name: str, *layers: Layer, **config: Any) -> str:
        self.store.layout.image(list(layers), f"nl-{name}", **config)
        target = f"{self.registry.host}/nl/{name}:1"
        source = f"oci:{self.store.layout.directory}:nl-{name}"
        run(*tools.weenv(), "convert", source, target, timeout=120, env=dict(os.environ))
        return target


REPOSITORY = [
    Member.directory("testbed"), Member("testbed/code", b"code\n"), Member("testbed/gone", b"x"),
    Member("testbed/changed", b"old\n"), Member.directory("testbed/full"), Member("testbed/full/below", b"x"),
    Member("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nrepo:x:7:7::/:/bin/sh\n"),
]  # fmt: skip


def harness(marker: str) -> list[Member]:
    """Members of a harness that overrides and deletes what a lazy group below has."""
    return [
        Member.directory("opt"), Member.directory("opt/agent"),
        Member("opt/agent/go", f"#!/bin/sh\necho agent {marker} $@\n".encode(), mode=0o755),
        Member.directory("testbed"), Member("testbed/.wh.gone"), Member("testbed/changed", b"new\n"),
        Member.directory("testbed/full"), Member("testbed/full/.wh..wh..opq"), Member("testbed/full/above", b"y"),
    ]  # fmt: skip


SCRIPT = "go now; ls /testbed; ls /testbed/full; cat /testbed/changed; tail -n 1 /etc/passwd"


def expected(marker: str) -> list[str]:
    return [f"agent {marker} now", "changed", "code", "full", "above", "new", "repo:x:7:7::/:/bin/sh"]


class Bench:
    """A node and the commands that users have; ``work`` is a directory for plans and configurations."""

    def __init__(self, node: Node, work: str) -> None:
        self.node = node
        self.work = work
        with open(node.config) as file:
            self._text = file.read()
        self.config = self.configured("convert", "")

    def configured(self, name: str, compose: str, namespace: str = "nl") -> str:
        """A configuration with that ``[compose]`` table."""
        path = os.path.join(self.node.home, f"{name}.toml")
        with open(path, "w") as file:
            file.write(self._text + f'[run]\naddress = "{self.node.containerd.socket}"\nnamespace = "{namespace}"\n')
            file.write(f'cgroup = "{self.node.containerd.cgroup}"\nruntime = "{tools.runc()}"\n[compose]\n{compose}\n')
        return path

    def plan(self, name: str, *refs: str, more: str = "") -> str:
        path = os.path.join(self.work, f"{name}.yaml")
        with open(path, "w") as file:
            file.write(f"apiVersion: weenv.dev/v1\nkind: EnvironmentPlan\nmetadata: {{name: {name}}}\n")
            file.write(f"groups: {json.dumps(refs)}\nconfig: {{env: {{PATH: '/opt/agent:/bin'}}}}\n{more}")
        return path

    def argv(self, *words: str, config: str = "") -> list[str]:
        """``words`` with ``--config`` after the sub-command, which is one word, or two for ``plan``."""
        count = 2 if words[0] == "plan" else 1
        return [*tools.weenv(), *words[:count], "--config", config or self.config, *words[count:]]

    def call(self, *words: str, config: str = "") -> subprocess.CompletedProcess[str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith("WEENV_")} | {"COLUMNS": "250"}
        return subprocess.run(
            self.argv(*words, config=config), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180, env=env,
            check=False,
        )  # fmt: skip

    def ok(self, *words: str, config: str = "") -> tuple[str, str]:
        done = self.call(*words, config=config)
        assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
        return done.stdout, done.stderr

    def fails(self, *words: str, config: str = "") -> str:
        """Its one error, which is no internal one; nothing may be left of the attempt."""
        done = self.call(*words, config=config)
        assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
        assert not done.stdout
        assert "internal error" not in done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    @property
    def store(self) -> str:
        return os.path.join(self.node.root, "converted")

    def blobs(self) -> set[str]:
        folder = os.path.join(self.store, "blobs", "sha256")
        return set(os.listdir(folder)) if os.path.isdir(folder) else set()

    def working(self) -> list[str]:
        folder = os.path.join(self.store, "work")
        return os.listdir(folder) if os.path.isdir(folder) else []

    def image(self, name: str, namespace: str = "nl") -> tuple[dict[str, str], list[dict[str, str]]]:
        """An image's labels, and those of its snapshots, bottom first."""

        async def go() -> tuple[dict[str, str], list[dict[str, str]]]:
            async with Client(self.node.containerd.socket) as client:
                where = client.namespace(namespace)
                image = await where.get_image(name)
                manifest = json.loads(await where.read_content(image.target.digest))
                config = json.loads(await where.read_content(manifest["config"]["digest"]))
                ids = config["rootfs"]["diff_ids"]
                chains = [chain_id(ids[: n + 1]) for n in range(len(ids))]
                snapshots = where.snapshots(SNAPSHOTTER)
                return dict(image.labels), [dict((await snapshots.stat(chain)).labels) for chain in chains]

        return asyncio.run(go())

    def lazy(self, name: str, namespace: str = "nl") -> list[bool]:
        """Which of an image's snapshots are served lazily, bottom first."""
        return [LAYER_ANNOTATION in labels for labels in self.image(name, namespace)[1]]

    def nothing_left(self, namespace: str) -> None:
        containerd = self.node.containerd
        containerd.collect()
        wait_until("the collection", lambda: not containerd.snapshots(SNAPSHOTTER, namespace))
        wait_until("the collection of content", lambda: not containerd.content(namespace))
        assert not containerd.ctr("leases", "ls", "-q", namespace=namespace).split()
        assert not self.working()
