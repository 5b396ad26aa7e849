"""Where environments run: the containerd of this machine, a namespace of it, our snapshotter, and our own directory.

::

    [run]
    address = "/run/containerd/containerd.sock"
    namespace = "default"
    snapshotter = "weenv"
    cgroup = "weenv"                    # environments' control groups are /weenv/<id>
    runtime = "io.containerd.runc.v2"   # or an absolute path: an OCI runtime for the runc shim to call
    network = "none"

Below ``<root>/environments`` (the root is the snapshotter's)::

    weenv-init                          the waiting first process (weenv.environment.waiter)
    users.json                          who runs in which image, see weenv.environment.accounts
    <namespace>/<id>/                   one environment; 0700
        0 1 2                           FIFOs while a client is attached
        stdout stderr                   what a detached one wrote
        x-<exec>/                       FIFOs of an added process
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from weenv.core import settings
from weenv.core.errors import ConfigError
from weenv.plugin.containerd.client import DEFAULT_ADDRESS, Client
from weenv.plugin.containerd.runtime import RUNC, Containers, Tasks

T = TypeVar("T")

DEFAULT_ROOT = "/var/lib/weenv"


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The ``[run]`` table."""

    address: str = DEFAULT_ADDRESS
    namespace: str = "default"
    snapshotter: str = "weenv"
    cgroup: str = "weenv"
    runtime: str = RUNC
    network: str = "none"

    def __post_init__(self) -> None:
        if not self.cgroup.strip("/") or ".." in self.cgroup.split("/"):
            raise ConfigError(f"run.cgroup is no control group: {self.cgroup!r}")
        if self.network not in ("none", "host"):
            raise ConfigError(f"run.network must be none or host, not {self.network!r}")

    @property
    def shim(self) -> str:
        """containerd's name of the runtime."""
        return RUNC if self.runtime.startswith("/") else self.runtime

    @property
    def binary(self) -> str:
        """The OCI runtime that the runc shim is to call; empty: its own choice."""
        return self.runtime if self.runtime.startswith("/") else ""


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """All of the configuration file that running needs; ``tables`` are the file's."""

    run: RunConfig = field(default_factory=RunConfig)
    root: str = DEFAULT_ROOT
    tables: dict[str, Any] = field(default_factory=dict)


def load(path: str = settings.DEFAULT_CONFIG, **overrides: Any) -> NodeConfig:
    """Read the configuration file; ``overrides`` of the ``[run]`` table that are not None win. Raises ConfigError."""
    tables = settings.read_tables(path)
    run = settings.build(RunConfig, tables.get("run", {}), "run", **overrides)
    snapshotter = tables.get("snapshotter", {})
    root = snapshotter.get("root", DEFAULT_ROOT) if isinstance(snapshotter, dict) else None
    if not isinstance(root, str) or not root.startswith("/"):
        raise ConfigError("snapshotter.root must be an absolute path")
    return NodeConfig(run, root.rstrip("/") or "/", tables)


class Node:
    """A connection for running environments. Use as ``async with Node(config) as node``."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.run = config.run
        self.client = Client(self.run.address)
        self.namespace = self.client.namespace(self.run.namespace)
        self.containers = Containers(self.namespace)
        self.tasks = Tasks(self.namespace)
        self.snapshots = self.namespace.snapshots(self.run.snapshotter)
        self.directory = os.path.join(config.root, "environments")
        self._threads: ThreadPoolExecutor | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Node:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish what goes on in the background, then close the connection."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    async def in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Run blocking work in a thread of this node's own."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(32, "weenv-node")
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something that handles its own errors; :meth:`close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def home(self, container: str) -> str:
        """The directory of one environment."""
        return os.path.join(self.directory, self.run.namespace, container)

    def cgroup(self, container: str) -> str:
        """The control group of one environment, as runtimes take it."""
        return f"/{self.run.cgroup.strip('/')}/{container}"
