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
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from weenv.environment.runconfig import DEFAULT_ROOT, NodeConfig, RunConfig, load
from weenv.plugin.containerd.client import Client
from weenv.plugin.containerd.runtime import Containers, Tasks

__all__ = ["DEFAULT_ROOT", "Node", "NodeConfig", "RunConfig", "load"]

T = TypeVar("T")
Show = Callable[[str], AbstractContextManager[Callable[[int, int | None], None]]]
"""A progress bar with a label, for the block; it is told bytes done and bytes in all, from any thread."""


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
        self.directory = config.directory
        self.say: Callable[[str], None] | None = None
        """Told, in a line, what of a target is not lazy."""
        self.show: Show | None = None
        """Shows the progress of what takes long before a target can be started."""
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
        return self.config.home(container)

    def cgroup(self, container: str) -> str:
        """The control group of one environment, as runtimes take it."""
        return self.config.cgroup(container)
