"""What the parts about tasks share: the groups of 210 tasks in a registry, and a node that runs them.

Groups and tasks are the test kit's (:mod:`weenv_testkit.tasks`): three PyPI source archives with their tests, two agents
(npm, pip), pytest as evaluator, a Debian with Python below, published by ``weenv group build``. Registry and node share the
machine, the node's daemons are started by the commands that users have.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from weenv_bench.image import (
    MEDIA_CONFIG,
    MEDIA_LAYER,
    MEDIA_MANIFEST,
    Layer,
    cache_root,
    compress,
    file_digest,
    put_blob,
    say,
)
from weenv_bench.node import state_directory
from weenv_testkit import tasks, tools
from weenv_testkit.node import Node
from weenv_testkit.procs import run
from weenv_testkit.registry import Registry
from weenv_testkit.tasks import Task, Tasks

HARNESSES = ("npm", "pip")
OLDER = "@anthropic-ai/claude-code@1.0.127"
"""What is updated to the kit's release."""


def _older() -> str:
    path = os.path.join(cache_root(), f"harness-{OLDER.rpartition('@')[2]}.tar")
    if not os.path.exists(path):
        os.makedirs(cache_root(), exist_ok=True)
        tasks.npm_harness(OLDER, Path(path + ".tmp"))
        os.rename(path + ".tmp", path)
    return path


@dataclass(frozen=True)
class Stored:
    """What a registry holds: bytes of all blobs (manifests and configs are blobs, too), each once, and how many."""

    size: int
    blobs: int


def stored(registry: Registry) -> Stored:
    """Count a registry's blobs on its disk."""
    sizes = []
    for folder, _, names in os.walk(os.path.join(registry.root, "docker/registry/v2/blobs")):
        sizes += [os.path.getsize(os.path.join(folder, name)) for name in names if name == "data"]
    return Stored(sum(sizes), len(sizes))


def tagged(registry: Registry) -> int:
    """How many tags a registry holds, over all repositories: its artifacts, as all are tagged once here."""
    base = os.path.join(registry.root, "docker/registry/v2/repositories")
    return sum(len(names) for folder, names, _ in os.walk(base) if folder.endswith("/_manifests/tags"))


@dataclass(frozen=True)
class Blob:
    """A compressed layer in a folder of blobs."""

    digest: str
    size: int
    diff_id: str


def compressed(path: str, blobs: str) -> Blob:
    """A tar as the layer that ``docker push`` sends (gzip -6), in a folder of blobs."""
    diff_id = file_digest(path)
    return Blob(*compress(Layer(path, diff_id, os.path.getsize(path)), blobs, "gzip"), diff_id)


def push_image(registry: Registry, blobs: str, repository: str, tag: str, layers: Sequence[Blob], **settings: Any) -> int:
    """Make and push config and manifest of layers that are pushed; bytes of both. ``settings`` is the run configuration."""
    config = put_blob(blobs, json.dumps({
        "architecture": "amd64", "os": "linux", "config": {"Cmd": ["/bin/sh"], **settings},
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]}, "history": [{"created_by": tag}],
    }).encode())  # fmt: skip
    manifest = json.dumps({
        "schemaVersion": 2, "mediaType": MEDIA_MANIFEST, "config": {"mediaType": MEDIA_CONFIG, **config},
        "layers": [{"mediaType": f"{MEDIA_LAYER}+gzip", "digest": b.digest, "size": b.size} for b in layers],
    }).encode()  # fmt: skip
    digest, size = config["digest"], config["size"]
    assert isinstance(digest, str) and isinstance(size, int)
    registry.push_blob(repository, digest, f"{blobs}/{digest[7:]}")
    registry.push_manifest(repository, tag, manifest, MEDIA_MANIFEST)
    return size + len(manifest)


class Stage:
    """The published groups and, when first asked for, a node. Use as a context manager."""

    def __init__(self, quick: bool) -> None:
        self.made: Tasks = tasks.load(dict.fromkeys(tasks.ALL, 12) if quick else tasks.ALL)
        self.directory = state_directory("wk-")
        self._node: Node | None = None
        self.blobs = f"{self.directory}/blobs"
        self._plain: dict[str, Blob] = {}
        self.config = ""
        os.mkdir(self.blobs)
        os.mkdir(f"{self.directory}/registry")
        self.registry = Registry(f"{self.directory}/registry")
        self.tars = {"base": tasks.base(), **self.made.groups}
        # An update is from the release before to the one that the kit has.
        self.tars["harness-npm-new"] = self.tars["harness-npm"]
        self.tars["harness-npm"] = _older()
        try:
            self.registry.start()
            begin = time.perf_counter()
            self.groups = {
                name: tasks.publish_one(self.registry, name, tar, OLDER.rpartition("@")[2] if name == "harness-npm" else "")
                for name, tar in self.tars.items() if not name.endswith("-new")
            }  # fmt: skip
            self.published = time.perf_counter() - begin
            say(f"{len(self.groups)} groups published in {self.published:.1f} s")
            self.artifacts = tagged(self.registry)
            self.stored = stored(self.registry)
        except BaseException:
            self.close()
            raise

    @property
    def node(self) -> Node:
        """The node, its daemons running; environments are run with :attr:`config`."""
        if self._node is None:
            os.mkdir(f"{self.directory}/n")
            self._node = Node("2.1", f"{self.directory}/n", registry=self.registry.host)
            self._node.start()
            self.config = self._node.run_config()
        return self._node

    def plain(self, name: str) -> Blob:
        """A group's tar, compressed as it is."""
        if name not in self._plain:
            self._plain[name] = compressed(self.tars[name], self.blobs)
        return self._plain[name]

    def plan(self, task: Task, harness: str, *patches: str, name: str = "") -> str:
        """Path of a new plan's file, with the task's patch where none is given."""
        path = f"{self.directory}/{name or task.id}-{harness}.yaml"
        groups = [self.groups[name] for name in tasks.stack(task, harness)]
        with open(path, "w") as file:
            file.write(tasks.plan_text(f"{task.id}-{harness}", groups, *(patches or (task.patch,))))
        return path

    def environment(self) -> dict[str, str]:
        """For commands: as here, without settings of this machine's own node."""
        return {key: value for key, value in os.environ.items() if not key.startswith("WEENV_")}

    def weenv(self, *arguments: str, check: bool = True) -> str:
        """Run a ``weenv`` command; its output. Raises Failed."""
        return run(*tools.weenv(), *arguments, env=self.environment(), check=check)

    def run_argv(self, plan: str, *command: str) -> list[str]:
        """The argv of ``weenv run --rm``."""
        self.node  # noqa: B018 - made when first asked for
        return [*tools.weenv(), "run", "--config", self.config, "--rm", plan, "--", *command]

    def close(self) -> None:
        """Take everything down."""
        if self._node is not None:
            self._node.close()
            self._node = None
        self.registry.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
