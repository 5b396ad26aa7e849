"""A private dockerd, with the containerd image store, on a containerd of the kit; the ``docker`` command and docker-py for it.

Everything it has lies under one directory of ours: data-root, exec-root, socket, pidfile, the command's configuration. It
makes no bridge, no firewall rule and no AppArmor profile, so containers have ``--network none`` or ``host``. Debian ships
docker 26 with containerd 1.7 and docker 28 with 2.x, and so it goes with the containerd's line.
"""

from __future__ import annotations

import contextlib
import json
import os
from types import TracebackType
from typing import Any

import docker  # type: ignore[import-untyped]

from weenv_testkit import tools
from weenv_testkit.containerd import Containerd
from weenv_testkit.procs import Failed, Process, connects, end_processes, processes_of, run, text_of, unmount_under

NAMESPACE = "moby"
"""containerd's namespace of docker's images and containers."""
_RUN = "/run/docker"
"""dockerd makes this directory, and ``plugins`` in it, whatever its configuration says."""


class Dockerd:
    """A running dockerd; a context manager. ``home`` is a short directory of its own, ``snapshotter`` a name of containerd's.

    ``live_restore`` leaves containers running while dockerd is away. ``close`` removes every container and all that
    dockerd mounted; images are the containerd's.
    """

    def __init__(self, home: str, containerd: Containerd, *, snapshotter: str, live_restore: bool = False) -> None:
        self.home = home
        self.containerd = containerd
        self.snapshotter = snapshotter
        self.live_restore = live_restore
        self.version = tools.DOCKER[containerd.line].removeprefix("docker-")
        self.socket = os.path.join(home, "d.sock")
        self.log = os.path.join(home, "dockerd.log")
        self.settings = os.path.join(home, "cli")
        self._process: Process | None = None
        self._made_run = not os.path.lexists(_RUN)

    # -- life -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Dockerd:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def config(self) -> dict[str, Any]:
        """The content of daemon.json."""
        return {
            "features": {"containerd-snapshotter": True},
            "storage-driver": self.snapshotter,
            "containerd": self.containerd.socket,
            "containerd-namespace": NAMESPACE,
            "containerd-plugins-namespace": f"{NAMESPACE}-plugins",
            "data-root": os.path.join(self.home, "data"),
            "exec-root": os.path.join(self.home, "exec"),
            "pidfile": os.path.join(self.home, "dockerd.pid"),
            "hosts": [f"unix://{self.socket}"],
            "bridge": "none",
            "iptables": False,
            "ip6tables": False,
            "ip-forward": False,
            "ip-masq": False,
            "userland-proxy": False,
            "cgroup-parent": f"/{self.containerd.cgroup}",
            "exec-opts": ["native.cgroupdriver=cgroupfs"],
            "init-path": tools.docker_init(),
            "runtimes": {"test": {"path": tools.runc()}},
            "default-runtime": "test",
            "insecure-registries": [self.containerd.registry],
            "live-restore": self.live_restore,
            "shutdown-timeout": 2,
        }

    def start(self) -> None:
        """Start it and wait until it answers. Raises Failed."""
        os.makedirs(self.settings, exist_ok=True)
        plugins = os.path.join(self.settings, "cli-plugins")
        if not os.path.lexists(plugins):
            os.symlink(tools.docker_plugins(self.containerd.line), plugins)
        path = os.path.join(self.home, "daemon.json")
        with open(path, "w") as file:
            json.dump(self.config(), file, indent=1)
        argv = [tools.docker(self.containerd.line, "dockerd"), "--config-file", path]
        # dockerd loads AppArmor profiles into the kernel unless it believes itself in a container.
        environment = {**self.containerd.environment(), "container": "weenv-test"}
        self._process = Process(f"dockerd {self.version}", argv, self.log, environment)
        self._process.wait_ready(self._serves, 60)

    def _serves(self) -> bool:
        if not connects(self.socket):
            return False
        with contextlib.closing(docker.APIClient(f"unix://{self.socket}", version="1.40", timeout=30)) as api:
            try:
                return bool(api.ping())
            except (OSError, docker.errors.APIError):
                return False

    def stop(self) -> None:
        """Stop the daemon as an init system does: its containers go too, unless ``live_restore``. Raises Failed."""
        if self._process is not None:
            code = self._process.stop()
            self._process = None
            if code != 0:
                raise Failed(f"dockerd ended with {code} on SIGTERM:\n{self.log_text()[-3000:]}")

    def kill(self) -> None:
        """``kill -9`` of the daemon only."""
        assert self._process is not None
        self._process.kill()
        self._process = None

    def log_text(self) -> str:
        """The daemon's log since the first start."""
        return text_of(self.log)

    def close(self) -> None:
        """End containers and daemon and unmount what it mounted, whatever state they are in. The directory stays."""
        if self._process is not None and self._process.alive():
            with contextlib.suppress(Failed, OSError, docker.errors.APIError), self.client() as client:
                for container in client.containers.list(all=True, ignore_removed=True):
                    with contextlib.suppress(docker.errors.APIError):
                        container.remove(force=True, v=True)
        if self._process is not None:
            self._process.stop()
            self._process = None
        end_processes(processes_of(self.home))
        unmount_under(self.home)
        if self._made_run and os.path.isdir(_RUN) and set(os.listdir(_RUN)) <= {"plugins"}:
            for path in (f"{_RUN}/plugins", _RUN):
                with contextlib.suppress(OSError):
                    os.rmdir(path)

    # -- clients ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def client(self, timeout: float = 120) -> Any:
        """docker-py's client, as ``docker.from_env`` makes it with ``DOCKER_HOST`` set."""
        found = docker.DockerClient(base_url=f"unix://{self.socket}", version="auto", timeout=timeout)
        try:
            yield found
        finally:
            found.close()

    def environment(self, **more: str) -> dict[str, str]:
        """Environment variables of the ``docker`` command."""
        path = f"{os.path.dirname(tools.docker(self.containerd.line, 'docker'))}:/usr/sbin:/usr/bin:/sbin:/bin"
        own = {"PATH": path, "HOME": self.home, "DOCKER_HOST": f"unix://{self.socket}", "DOCKER_CONFIG": self.settings}
        return {**own, **more}

    def cli(self, *arguments: str, check: bool = True, timeout: float = 120, **environment: str) -> str:
        """Run the ``docker`` command; its standard output. Raises Failed with its standard error."""
        argv = [tools.docker(self.containerd.line, "docker"), *arguments]
        return run(*argv, check=check, timeout=timeout, env=self.environment(**environment))


def shell(client: docker.DockerClient, image: str, script: str, **options: Any) -> list[str]:
    """Lines that ``sh -c SCRIPT`` prints in a new container of the image, without a network unless one is asked for."""
    options.setdefault("network_mode", "none")
    out: bytes = client.containers.run(image, ["sh", "-c", script], remove=True, **options)
    return out.decode().splitlines()
