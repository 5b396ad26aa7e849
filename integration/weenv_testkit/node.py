"""A whole node under test: containerd of one line, ``weenv snapshotter serve`` and ``weenv blobfs serve``.

The daemons are started with the command that users have, from one configuration file, each with a metrics endpoint.
What they log is watched: :meth:`Node.complaints` gives warnings, errors and tracebacks that no test has said it expects.
"""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from weenv_testkit import tools
from weenv_testkit.containerd import Containerd, Proxy
from weenv_testkit.cri import Cri
from weenv_testkit.procs import (
    Failed,
    Process,
    clean_environment,
    connects,
    discard,
    end_processes,
    mounts_under,
    processes_of,
    text_of,
    unmount_under,
    wait_until,
)
from weenv_testkit.registry import free_port

SNAPSHOTTER = "weenv"

LOUD = re.compile(r"^\S+ (WARNING|ERROR|CRITICAL) |^Traceback |^[A-Za-z_.]+(Error|Exception)\b|Task exception was never")


def keep_first(first: BaseException, end: Callable[[], object]) -> None:
    """Call ``end`` while ``first`` is under way: what fails then is noted on ``first``, which it must not take the place of."""
    try:
        end()
    except Failed as error:
        first.add_note(f"and while it was taken away: {error}")


class Daemon:
    """One of our two daemons: start, stop, kill, its log and its metrics."""

    def __init__(self, name: str, config: str, log: str, port: int) -> None:
        self.name = name
        self.config = config
        self.log = log
        self.port = port
        self._process: Process | None = None
        self._seen = 0

    def spawn(self) -> Process:
        """Start it, not waiting for anything."""
        argv = [*tools.weenv(), self.name, "serve", "--config", self.config]
        self._process = Process(f"weenv {self.name}", argv, self.log, clean_environment())
        return self._process

    @property
    def pid(self) -> int:
        """Process id of the running daemon."""
        assert self._process is not None
        return self._process.pid

    def running(self) -> bool:
        """True while it runs."""
        return self._process is not None and self._process.alive()

    def stop(self) -> None:
        """SIGTERM and wait. Raises Failed where it does not end well by itself."""
        if self._process is not None:
            code = self._process.stop(90)  # it syncs what it fetched, and the disk may be busy with others' writes
            self._process = None
            if code != 0:
                raise Failed(f"weenv {self.name} ended with {code} on SIGTERM:\n{self.log_text()[-3000:]}")

    def kill(self) -> None:
        """``kill -9``."""
        assert self._process is not None
        self._process.kill()
        self._process = None

    def log_text(self) -> str:
        """Everything that it logged."""
        return text_of(self.log)

    def new_complaints(self) -> list[str]:
        """Loud lines since the last call."""
        text = self.log_text()
        new, self._seen = text[self._seen :], len(text)
        return [f"{self.name}: {line}" for line in new.splitlines() if LOUD.search(line)]

    def metrics(self) -> dict[str, float]:
        """All samples: ``name{label="value"}`` -> value."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of that name which have these labels; 0 where there are none."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            value
            for sample, value in self.metrics().items()
            if sample.partition("{")[0] == name and all(label in sample for label in wanted)
        )


class Node:
    """A context manager. ``home`` is a short path of its own; ``settings`` are extra lines per table of the config."""

    def __init__(self, line: str, home: str, *, registry: str, settings: Mapping[str, str] | None = None) -> None:
        self.home = home
        self.root = os.path.join(home, "w")
        self.run = os.path.join(home, "r")
        self.blobs = os.path.join(self.run, "blobs")
        self.socket = os.path.join(self.run, "s.sock")
        for folder in (self.root, self.blobs):
            os.makedirs(folder, exist_ok=True)
        self.config = os.path.join(home, "weenv.toml")
        ports = free_port(), free_port()
        extra = dict(settings or {})
        with open(self.config, "w") as file:
            file.write(
                f'[snapshotter]\nroot = "{self.root}"\nsocket = "{self.socket}"\nblobs = "{self.blobs}"\n'
                f'metrics_address = "127.0.0.1:{ports[0]}"\ncleanup_delay = 0.5\n{extra.pop("snapshotter", "")}\n'
                f'[blobfs]\nroot = "{self.root}"\nmountpoint = "{self.blobs}"\n'
                f'holder_socket = "{self.run}/h.sock"\nstatus_socket = "{self.run}/b.sock"\n'
                f'metrics_address = "127.0.0.1:{ports[1]}"\n{extra.pop("blobfs", "")}\n'
                f'[registry]\nplain_http = ["{registry}"]\n{extra.pop("registry", "")}\n'
            )
            for table, text in extra.items():
                file.write(f"[{table}]\n{text}\n")
        self.snapshotter = Daemon("snapshotter", self.config, os.path.join(home, "snapshotter.log"), ports[0])
        self.blobfs = Daemon("blobfs", self.config, os.path.join(home, "blobfs.log"), ports[1])
        proxy = Proxy(SNAPSHOTTER, self.socket, self.root)
        self.containerd = Containerd(line, os.path.join(home, "c"), registry=registry, proxies=[proxy], snapshotter=SNAPSHOTTER)
        self._expected: list[re.Pattern[str]] = []

    def run_config(self, namespace: str = "default") -> str:
        """Write a configuration for ``weenv run`` and the like on this node; its path."""
        path = os.path.join(self.home, "run.toml")
        with open(self.config) as source, open(path, "w") as file:
            file.write(f'{source.read()}[run]\naddress = "{self.containerd.socket}"\nnamespace = "{namespace}"\n')
            file.write(f'cgroup = "{self.containerd.cgroup}"\nruntime = "{tools.runc()}"\n')
        return path

    @property
    def line(self) -> str:
        """``1.7`` or ``2.1``."""
        return self.containerd.line

    def start_blobfs(self) -> None:
        """Start it and wait until its file system answers."""
        self.blobfs.spawn().wait_ready(lambda: self.blobs in mounts_under(self.run) and connects(f"{self.run}/b.sock"))

    def start_snapshotter(self) -> None:
        """Start it and wait until it listens, and until a containerd that runs has its connection back.

        A containerd that found nobody there fails every call until it dials again, up to seconds later.
        """
        self.snapshotter.spawn().wait_ready(lambda: connects(self.socket))
        if self.containerd.running:
            wait_until("containerd to reach the snapshotter", self._reached, 60, 0.2)

    def _reached(self) -> bool:
        """Whether a call through containerd comes to the snapshotter.

        A listing is answered from containerd's own store where the namespace has no snapshot; a new one is always asked for.
        """
        try:
            if not any(self.containerd.snapshots(SNAPSHOTTER, name) for name in self.containerd.namespaces()):
                self.containerd.ctr("snapshots", "--snapshotter", SNAPSHOTTER, "prepare", "kit-reached")
                self.containerd.ctr("snapshots", "--snapshotter", SNAPSHOTTER, "rm", "kit-reached")
        except Failed:
            return False
        return True

    def start(self) -> None:
        """Start everything. Raises Failed."""
        self.start_blobfs()
        self.start_snapshotter()
        self.containerd.start()

    def restart(self) -> None:
        """Stop and start all three daemons under the containers."""
        self.containerd.stop()
        self.snapshotter.stop()
        self.blobfs.stop()
        self.start()

    def kill(self) -> None:
        """``kill -9`` of all three daemons."""
        self.containerd.kill()
        self.snapshotter.kill()
        self.blobfs.kill()

    def cri(self) -> Cri:
        """A CRI client of the containerd."""
        return Cri(self.containerd)

    def pull(self, ref: str) -> str:
        """Pull as this line can pull lazily: 2.x by ``ctr``, 1.7 (whose ctr always unpacks) by CRI. The namespace."""
        if self.line == "1.7":
            with self.cri() as cri:
                cri.pull(ref)
            return "k8s.io"
        self.containerd.pull(ref, snapshotter=SNAPSHOTTER)
        return "default"

    def remove_image(self, ref: str, namespace: str) -> None:
        """Remove what :meth:`pull` pulled, under all names that CRI gave it, and wait for containerd's collection."""
        if self.line == "1.7":
            with self.cri() as cri:
                cri.remove_image(ref)
        else:
            self.containerd.remove_image(ref, namespace)

    def shell(self, ref: str, script: str, namespace: str, *flags: str, check: bool = True) -> str:
        """Output of ``sh -c SCRIPT`` in a new container of the image."""
        return self.containerd.run(
            ref, "sh", "-c", script, snapshotter=SNAPSHOTTER, namespace=namespace, flags=flags, check=check
        )

    def rootfs(self, container: str, namespace: str) -> str:
        """Where the root of a running container is mounted, seen from outside."""
        return os.path.join(self.containerd.state, "io.containerd.runtime.v2.task", namespace, container, "rootfs")

    def layers(self) -> set[str]:
        """Digests of the layers that have a directory on this node."""
        folder = os.path.join(self.root, "layers", "sha256")
        return {"sha256:" + name for name in os.listdir(folder)} if os.path.isdir(folder) else set()

    # -- what went wrong ------------------------------------------------------------------------------------------

    def expect(self, pattern: str) -> None:
        """Loud log lines that match ``pattern`` are meant, until :meth:`complaints` is next asked."""
        self._expected.append(re.compile(pattern))

    def complaints(self) -> list[str]:
        """Loud lines in our daemons' logs since the last call which nobody expected."""
        return self.unexpected([*self.snapshotter.new_complaints(), *self.blobfs.new_complaints()])

    def unexpected(self, lines: list[str]) -> list[str]:
        """Those of ``lines`` that nobody expected; from now on nothing is expected any more."""
        expected, self._expected = self._expected, []
        return [line for line in lines if not any(pattern.search(line) for pattern in expected)]

    # -- end ----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Node:
        try:
            self.start()
        except BaseException as error:
            keep_first(error, self._clear)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if value is not None:
            keep_first(value, self.close)
        else:
            self.close()

    def close(self) -> None:
        """Stop everything, unmount everything, remove the directory. Raises Failed where something cannot be had away."""
        errors = []
        self.containerd.close()
        for daemon in (self.snapshotter, self.blobfs):
            try:
                daemon.stop()
            except Failed as error:
                errors.append(str(error))
        try:
            self._clear()
        except Failed as error:
            errors.append(str(error))
        if errors:
            raise Failed("\n".join(errors))

    def _clear(self) -> None:
        for daemon in (self.snapshotter, self.blobfs):
            if daemon.running():
                daemon.kill()
        self.containerd.close()
        unmount_under(self.home)
        # What holds the FUSE descriptor ends by itself once its mount is gone.
        try:
            wait_until("the holder to end", lambda: not processes_of(self.home), 60)
        except Failed as error:
            left = processes_of(self.home)
            end_processes(left)
            raise Failed(f"processes were left behind: {left}") from error
        finally:
            unmount_under(self.home)
        if not os.environ.get("WEENV_TEST_KEEP"):
            discard(self.home)


def close_all(nodes: Sequence[Node]) -> None:
    """Close the nodes of a test, none of which may have complained of anything."""
    complaints = [line for node in nodes for line in node.complaints()]
    for node in nodes:
        node.close()
    assert not complaints
