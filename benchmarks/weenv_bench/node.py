"""One node and one registry: containerd 2.1 with both snapshotters, WeEnv's two daemons, docker-registry behind the link.

Programs come from the test kit's private cache; all state is in one directory that :meth:`Node.close` removes. Every
contender starts from a node of its own with nothing on it, so "never seen" is true by construction.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "integration"))

from weenv_bench.image import BenchError
from weenv_bench.link import FAR, Link
from weenv_testkit import tools
from weenv_testkit.procs import Process, connects, end_processes, processes_of, unmount_under, wait_until
from weenv_testkit.registry import Registry

PORT = 5000
HOST = f"{FAR}:{PORT}"
BLOB_PORT = 5001

_REDIRECT = """middleware:
  storage:
    - name: redirect
      options:
        baseurl: http://{far}:{port}/
"""
_NGINX = """daemon off;
user root;
worker_processes 1;
pid {dir}/nginx.pid;
error_log {dir}/nginx.log warn;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  sendfile on;
  tcp_nopush on;
  keepalive_requests 100000;
  default_type application/octet-stream;
  client_body_temp_path {dir}/nginx-tmp;
  proxy_temp_path {dir}/nginx-tmp;
  fastcgi_temp_path {dir}/nginx-tmp;
  uwsgi_temp_path {dir}/nginx-tmp;
  scgi_temp_path {dir}/nginx-tmp;
  server {{ listen {far}:{port}; root {storage}; }}
}}
"""

_CONTAINERD = """version = 3
root = "{dir}/root"
state = "{dir}/state"
disabled_plugins = [
  "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.nri.v1.nri",
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.blockfile",
  "io.containerd.snapshotter.v1.devmapper",
]
[grpc]
  address = "{dir}/c.sock"
[ttrpc]
  address = "{dir}/c.ttrpc"
[proxy_plugins.weenv]
  type = "snapshot"
  address = "{dir}/w/snapshotter.sock"
  [proxy_plugins.weenv.exports]
    root = "{dir}/weenv"
    enable_remote_snapshot_annotations = "true"
[[plugins.'io.containerd.transfer.v1.local'.unpack_config]]
  platform = "linux/amd64"
  snapshotter = "weenv"
  differ = "walking"
[[plugins.'io.containerd.transfer.v1.local'.unpack_config]]
  platform = "linux/amd64"
  snapshotter = "overlayfs"
  differ = "walking"
"""


def drop_caches() -> None:
    """Write back and forget the page cache, dentries and inodes: the next read comes from the disk."""
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("3\n")


def state_directory(prefix: str) -> str:
    """A fresh directory on the machine's disk (never tmpfs: the page cache must be droppable)."""
    base = os.environ.get("WEENV_BENCH_DIR", "/var/tmp")
    return tempfile.mkdtemp(prefix=prefix, dir=base)


class FarRegistry:
    """docker-registry at the other end of the link, its data on a tmpfs of its own, filled before the link's clock runs.

    It redirects to nginx for blobs, as large registries redirect to an object store. docker-registry itself reads 4 MiB
    into a new buffer for each request, 3.5 to 5 ms of CPU; here it shares two CPUs with the node, and would be measured.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.directory = tempfile.mkdtemp(prefix="weenv-bench-registry-")
        self.storage = os.path.join(self.directory, "storage")
        os.mkdir(self.storage)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=90%", "tmpfs", self.storage], check=True)
        self._near = Registry(self.directory, root=self.storage)
        self._near.start()
        self._far: Process | None = None
        self._blobs: Process | None = None

    @property
    def near(self) -> Registry:
        """The same storage on the loopback interface, for pushing and converting without the link."""
        return self._near

    def push(self, layout: str, repository: str) -> list[str]:
        """Copy an OCI layout's images into the registry; returns the tags."""
        blobs = os.path.join(layout, "blobs", "sha256")
        with open(os.path.join(layout, "index.json")) as file:
            index = json.load(file)
        tags = []
        for entry in index["manifests"]:
            with open(os.path.join(blobs, entry["digest"][7:]), "rb") as file:
                data = file.read()
            manifest = json.loads(data)
            for blob in (manifest["config"], *manifest["layers"]):
                self._near.push_blob(repository, blob["digest"], os.path.join(blobs, blob["digest"][7:]))
            tag = entry.get("annotations", {}).get("org.opencontainers.image.ref.name", "latest")
            self._near.push_manifest(repository, tag, data, entry["mediaType"])
            tags.append(tag)
        return tags

    def start(self) -> None:
        """Serve at the far end."""
        path = os.path.join(self.directory, "far.yml")
        with open(os.path.join(self.directory, "registry.yml")) as near, open(path, "w") as file:
            text = near.read().replace(self._near.host, HOST).replace("disable: true", "disable: false")
            file.write(text + _REDIRECT.format(far=FAR, port=BLOB_PORT))
        config = os.path.join(self.directory, "nginx.conf")
        with open(config, "w") as file:
            file.write(_NGINX.format(dir=self.directory, far=FAR, port=BLOB_PORT, storage=self.storage))
        log = os.path.join(self.directory, "nginx.out")
        argv = self.link.far(tools.nginx(), "-c", config, "-e", log)
        self._blobs = Process("nginx", argv, log, {"PATH": os.environ["PATH"]})
        argv = self.link.far(tools.docker_registry(), "serve", path)
        self._far = Process(
            "docker-registry",
            argv,
            os.path.join(self.directory, "far.log"),
            {"PATH": os.environ["PATH"], "OTEL_TRACES_EXPORTER": "none"},
        )

        def answers() -> bool:
            import http.client

            try:
                connection = http.client.HTTPConnection(FAR, PORT, timeout=2)
                connection.request("GET", "/v2/")
                return connection.getresponse().status == 200
            except OSError:
                return False

        self._far.wait_ready(answers)

    def close(self) -> None:
        """Stop both and free the storage."""
        for process in (self._far, self._blobs):
            if process is not None:
                process.stop()
        self._near.stop()
        subprocess.run(["umount", self.storage], check=False)
        shutil.rmtree(self.directory, ignore_errors=True)


class Node:
    """A node with nothing on it. ``weenv`` starts WeEnv's daemons too, which mount by ``plane``; ``fill`` is a key of
    :data:`_FILL`."""

    def __init__(self, *, weenv: bool = False, fill: str = "on", plane: str = "auto") -> None:
        self.directory = state_directory("wb-")  # short: a hundred of its paths must fit into one page of mount options
        self.weenv = weenv
        self.fill = fill
        self.plane = plane
        self.id = secrets.token_hex(3)
        self._processes: list[Process] = []
        self._clients: list[subprocess.Popen[bytes]] = []
        self._bin = tools.containerd_bin("2.1")
        path = f"{os.path.dirname(tools.runc())}:{self._bin}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path}
        try:
            if weenv:
                self._start_weenv()
            config = os.path.join(self.directory, "containerd.toml")
            with open(config, "w") as file:
                file.write(_CONTAINERD.format(dir=self.directory))
            daemon = self._start("containerd", [os.path.join(self._bin, "containerd"), "-c", config, "-l", "warn"])
            daemon.wait_ready(lambda: connects(f"{self.directory}/c.sock"), 30)
            self.ctr("version")
        except BaseException:
            self.close()
            raise

    def _start(self, name: str, argv: list[str]) -> Process:
        process = Process(name, argv, os.path.join(self.directory, name + ".log"), self.environment)
        self._processes.append(process)
        return process

    def _start_weenv(self) -> None:
        os.makedirs(f"{self.directory}/w/blobs", mode=0o700)
        os.makedirs(f"{self.directory}/weenv", mode=0o700)
        config = os.path.join(self.directory, "weenv.toml")
        with open(config, "w") as file:
            file.write(weenv_config(self.directory, self.fill, self.plane))
        weenv = tools.weenv()
        blobfs = self._start("blobfs", [*weenv, "blobfs", "serve", "--config", config])
        blobfs.wait_ready(lambda: os.path.ismount(f"{self.directory}/w/blobs"), 20)
        snapshotter = self._start("snapshotter", [*weenv, "snapshotter", "serve", "--config", config])
        snapshotter.wait_ready(lambda: connects(f"{self.directory}/w/snapshotter.sock"), 20)

    def daemons(self) -> dict[str, int]:
        """Process ids by name."""
        return {process.name: process.pid for process in self._processes}

    def blobfs_status(self) -> dict[str, Any]:
        """What blobfs says of itself."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"{self.directory}/w/blobfs.sock")
            data = b""
            while block := connection.recv(1 << 16):
                data += block
        return dict(json.loads(data))

    def weenv_pids(self) -> list[int]:
        """Every process of the two daemons, helpers included."""
        return [pid for pid, line in processes_of(self.directory).items() if "weenv.toml" in line or "/w/" in line]

    def logs_of(self, name: str) -> str:
        """The whole log of one daemon."""
        return next(process.log_text() for process in self._processes if process.name == name)

    def logs(self) -> str:
        """The ends of all logs, for an error's text."""
        return "\n".join(f"--- {process.name}\n{process.log_text()[-2000:]}" for process in self._processes)

    # --- ctr -------------------------------------------------------------------------------------------------------

    def command(self, *arguments: str) -> list[str]:
        """The argv of a ctr call against this node."""
        return [os.path.join(self._bin, "ctr"), "-a", f"{self.directory}/c.sock", *arguments]

    def ctr(self, *arguments: str, timeout: float = 600) -> str:
        """Run ctr; its output. Raises BenchError with the daemons' logs."""
        done = subprocess.run(
            self.command(*arguments), capture_output=True, text=True, timeout=timeout, env=self.environment, check=False
        )
        if done.returncode:
            raise BenchError(f"ctr {' '.join(arguments)}: {done.stderr.strip()[-1500:]}\n{self.logs()}")
        return done.stdout

    def pull(self, reference: str, snapshotter: str) -> None:
        """``ctr images pull`` through the transfer service."""
        self.ctr("images", "pull", "--plain-http", "--snapshotter", snapshotter, f"{HOST}/{reference}")

    def name(self, text: str) -> str:
        """A container id that no other containerd on this machine has."""
        return f"wb-{self.id}-{text}"

    def start(self, reference: str, snapshotter: str, name: str) -> float:
        """``ctr run`` a container that says one line and then sleeps; returns when (perf_counter) the line arrived."""
        argv = self.command(
            "run",
            "--snapshotter",
            snapshotter,
            f"{HOST}/{reference}",
            self.name(name),
            "sh",
            "-c",
            "echo ready; exec sleep 100000",
        )
        with open(os.path.join(self.directory, f"{name}.err"), "wb") as errors:
            client = subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, env=self.environment
            )
        self._clients.append(client)
        assert client.stdout is not None
        line = client.stdout.readline()
        when = time.perf_counter()
        if line != b"ready\n":
            with open(os.path.join(self.directory, f"{name}.err")) as text:
                raise BenchError(f"ctr run: {text.read()[-1500:]}\n{self.logs()}")
        return when

    def task_pid(self, name: str) -> int:
        """The process id of a running container's first process."""
        for line in self.ctr("tasks", "ls").splitlines():
            if line.split()[0] == self.name(name):
                return int(line.split()[1])
        raise BenchError(f"{name} is not running")

    def rootfs(self, name: str) -> str:
        """Where the container's root is mounted, as this machine sees it."""
        return f"{self.directory}/state/io.containerd.runtime.v2.task/default/{self.name(name)}/rootfs"

    def execute(self, name: str, *argv: str, timeout: float = 900) -> str:
        """``ctr tasks exec`` in a running container; its output."""
        return self.ctr("tasks", "exec", "--exec-id", secrets.token_hex(6), self.name(name), *argv, timeout=timeout)

    def run(self, reference: str, snapshotter: str, name: str, *argv: str) -> list[str]:
        """The argv of ``ctr run --rm`` of a command."""
        return self.command("run", "--rm", "--snapshotter", snapshotter, f"{HOST}/{reference}", self.name(name), *argv)

    def remove(self, name: str) -> None:
        """Kill and delete a container."""
        with contextlib.suppress(BenchError):
            self.ctr("tasks", "kill", "-s", "SIGKILL", self.name(name))
        wait_until(
            "the task to end", lambda: self.name(name) not in self.ctr("tasks", "ls") or "STOPPED" in self.ctr("tasks", "ls")
        )
        with contextlib.suppress(BenchError):
            self.ctr("tasks", "rm", "-f", self.name(name))
        with contextlib.suppress(BenchError):
            self.ctr("containers", "rm", self.name(name))

    def close(self) -> None:
        """Stop everything that this node started and remove its state."""
        for client in self._clients:
            client.kill()
            client.wait()
            if client.stdout:
                client.stdout.close()
        with contextlib.suppress(Exception):
            for line in self.ctr("tasks", "ls", "-q", timeout=20).split():
                self.ctr("tasks", "rm", "-f", line, timeout=20)
        for process in reversed(self._processes):
            process.stop()
        end_processes(processes_of(self.directory))
        unmount_under(self.directory)
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


_FILL = {
    "off": "enabled = false",
    "on": "enabled = true",
}
"""Background fill: off, or as it is by default."""


def weenv_config(directory: str, fill: str, plane: str = "auto") -> str:
    """The daemons' configuration for a node in ``directory``: defaults but for paths, the registry and filling."""
    return f"""[snapshotter]
root = "{directory}/weenv"
socket = "{directory}/w/snapshotter.sock"
blobs = "{directory}/w/blobs"
plane = "{plane}"
[blobfs]
root = "{directory}/weenv"
mountpoint = "{directory}/w/blobs"
holder_socket = "{directory}/w/holder.sock"
status_socket = "{directory}/w/blobfs.sock"
[blobfs.fill]
{_FILL[fill]}
[registry]
plain_http = ["{HOST}"]
"""
