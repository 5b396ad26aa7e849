"""A private containerd of either line, and ``ctr`` to talk to it.

Everything it has lies under one directory of ours: root, state, sockets, runc's state, CNI and registry configuration.
NRI is off unless asked for, AppArmor too. The directory's path must be
short, because unix socket paths end at 107 bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import quote

import grpc

from weenv_testkit import tools
from weenv_testkit.procs import (
    Failed,
    Process,
    children_of,
    connects,
    end_processes,
    processes_of,
    run,
    text_of,
    unmount_under,
    wait_until,
)

PAUSE = "pause:1"
"""Repository and tag of the sandbox image, in the test registry (see images.pause)."""

_LISTENER = """#!/bin/sh
# What a shim starts for `--log-uri binary:///this?PREFIX`: a process's stdout (on 3) and stderr (on 4) go into files. That 5
# is closed says that we are ready. TERM comes once the process has ended, when there may be something to read yet.
trap '' TERM
cat <&3 >"$1.out" 3<&- 4<&- 5>&- &
cat <&4 >"$1.err" 3<&- 4<&- 5>&- &
exec 3<&- 4<&- 5>&-
wait
"""

_DISABLED = (
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.erofs",
    "io.containerd.snapshotter.v1.zfs",
    "io.containerd.internal.v1.tracing",
    "io.containerd.tracing.processor.v1.otlp",
)


@dataclass(frozen=True)
class Proxy:
    """A proxy snapshotter: its name in containerd, its socket and the root directory it reports."""

    name: str
    address: str
    root: str


class Containerd:
    """A running containerd; a context manager. ``line`` is ``1.7`` or ``2.1``; ``home`` a directory of its own.

    ``registry`` (``host:port``, plain HTTP) is configured for CRI and the transfer service; ``snapshotter`` is what CRI
    uses; ``nri`` turns NRI on, with a socket and directories of its own. ``close`` ends every container, shim and mount
    that it left.
    """

    def __init__(
        self,
        line: str,
        home: str,
        *,
        registry: str,
        proxies: Sequence[Proxy] = (),
        snapshotter: str = "overlayfs",
        nri: bool = False,
    ) -> None:
        self.line = line
        self.home = home
        self.registry = registry
        self.proxies = tuple(proxies)
        self.snapshotter = snapshotter
        self.nri = nri
        self.nri_socket = os.path.join(home, "nri.sock")
        self.nri_plugins = os.path.join(home, "nri", "plugins")
        self.nri_config = os.path.join(home, "nri", "conf.d")
        self.root = os.path.join(home, "root")
        self.state = os.path.join(home, "state")
        self.socket = os.path.join(home, "c.sock")
        self.log = os.path.join(home, "containerd.log")
        self.runc_root = os.path.join(home, "runc")
        self._said = os.path.join(home, "said")
        self.hosts = os.path.join(home, "hosts")
        self.cgroup = f"weenv-test-{secrets.token_hex(4)}"
        self.bin = tools.containerd_bin(line)
        self.runc = tools.runc()
        self._ids = itertools.count(1)
        self._process: Process | None = None

    # -- life -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Containerd:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Write the configuration, start the daemon, wait until it answers. Raises Failed."""
        for folder in ("", "root", "state", "runc", "cni/bin", "cni/conf", "opt", "said", f"hosts/{self.registry}"):
            os.makedirs(os.path.join(self.home, folder), exist_ok=True)
        listener = os.path.join(self.home, "listener")
        if not os.path.exists(listener):
            with open(os.open(listener, os.O_WRONLY | os.O_CREAT, 0o755), "w") as file:
                file.write(_LISTENER)
        os.makedirs(self.nri_plugins, exist_ok=True)
        os.makedirs(self.nri_config, exist_ok=True)
        with open(os.path.join(self.hosts, self.registry, "hosts.toml"), "w") as file:
            url = f"http://{self.registry}"
            file.write(f'server = "{url}"\n[host."{url}"]\ncapabilities = ["pull", "resolve"]\n')
        path = os.path.join(self.home, "config.toml")
        with open(path, "w") as file:
            file.write(self.config())
        argv = [os.path.join(self.bin, "containerd"), "--config", path]
        self._process = Process(f"containerd {self.line}", argv, self.log, self.environment())
        self._process.wait_ready(lambda: connects(self.socket) and self._serves())

    def _serves(self) -> bool:
        """True once CRI answers, which is the last service to come up; an empty StatusRequest needs no schema."""
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            status = channel.unary_unary("/runtime.v1.RuntimeService/Status", bytes, bytes)
            try:
                status(b"", timeout=5)
            except grpc.RpcError:
                return False
        return True

    def stop(self) -> None:
        """Stop the daemon only: containers go on, as in a real restart."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def kill(self) -> None:
        """``kill -9`` of the daemon only."""
        assert self._process is not None
        self._process.kill()
        self._process = None

    def restart(self) -> None:
        """Stop and start the daemon under its containers."""
        self.stop()
        self.start()

    @property
    def running(self) -> bool:
        """True while the daemon runs."""
        return self._process is not None and self._process.alive()

    @property
    def pid(self) -> int:
        """Process id of the daemon."""
        assert self._process is not None
        return self._process.pid

    def log_text(self) -> str:
        """The daemon's log since the first start."""
        return text_of(self.log)

    def close(self) -> None:
        """End containers, daemon, shims and mounts, whatever state they are in. The directory stays."""
        if self.running:
            for namespace in self._quietly_namespaces():
                with contextlib.suppress(Failed):
                    for container in self.ctr("tasks", "ls", "-q", namespace=namespace).split():
                        self.remove_container(container, namespace)
        self.stop()
        shims = processes_of(self.home)
        end_processes({*shims, *children_of(shims), *cgroup_processes(self.cgroup)})
        unmount_under(self.home)
        remove_cgroup(self.cgroup)

    def _quietly_namespaces(self) -> list[str]:
        try:
            return self.namespaces()
        except Failed:
            return []

    # -- configuration ----------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """Environment variables of the daemon and of ctr."""
        # containerd looks for its shim and for runc in PATH.
        runc = os.path.dirname(self.runc)
        return {"PATH": f"{self.bin}:{runc}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": self.home, "TMPDIR": self.home}

    def config(self) -> str:
        """The text of config.toml."""
        q = json.dumps  # a JSON string is a TOML basic string
        options = f"BinaryName = {q(self.runc)}\nRoot = {q(self.runc_root)}\nSystemdCgroup = false\n"
        text = f"version = {2 if self.line == '1.7' else 3}\nroot = {q(self.root)}\nstate = {q(self.state)}\n"
        text += f"disabled_plugins = {q(list(_DISABLED))}\n"
        text += f"[grpc]\naddress = {q(self.socket)}\n[ttrpc]\naddress = {q(self.socket + '.ttrpc')}\n"
        text += f"[debug]\naddress = {q(os.path.join(self.home, 'd.sock'))}\nlevel = 'info'\n"
        for proxy in self.proxies:
            text += f"[proxy_plugins.{proxy.name}]\ntype = 'snapshot'\naddress = {q(proxy.address)}\n"
            text += f"[proxy_plugins.{proxy.name}.exports]\nroot = {q(proxy.root)}\n"
            text += "enable_remote_snapshot_annotations = 'true'\n"
        text += f"[plugins.'io.containerd.internal.v1.opt']\npath = {q(os.path.join(self.home, 'opt'))}\n"
        text += f"[plugins.'io.containerd.nri.v1.nri']\ndisable = {q(not self.nri)}\nsocket_path = {q(self.nri_socket)}\n"
        text += f"plugin_path = {q(self.nri_plugins)}\nplugin_config_path = {q(self.nri_config)}\n"
        sandbox = q(f"{self.registry}/{PAUSE}")
        plugins = q(os.path.join(self.home, "cni/bin"))
        cni = f"bin_dir = {plugins}\n" if self.line == "1.7" else f"bin_dirs = [{plugins}]\n"
        cni += f"conf_dir = {q(os.path.join(self.home, 'cni/conf'))}\n"
        hosts = f"config_path = {q(self.hosts)}\n"
        if self.line == "1.7":
            cri = "plugins.'io.containerd.grpc.v1.cri'"
            text += f"[{cri}]\nsandbox_image = {sandbox}\nrestrict_oom_score_adj = true\ndisable_apparmor = true\n"
            text += "stats_collect_period = 1\n"
            text += f"[{cri}.cni]\n{cni}[{cri}.registry]\n{hosts}"
            text += f"[{cri}.containerd]\nsnapshotter = {q(self.snapshotter)}\ndisable_snapshot_annotations = false\n"
            text += "default_runtime_name = 'runc'\n"
            text += f"[{cri}.containerd.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n"
            text += f"[{cri}.containerd.runtimes.runc.options]\n{options}"
            return text
        images, runtime = "plugins.'io.containerd.cri.v1.images'", "plugins.'io.containerd.cri.v1.runtime'"
        text += f"[{images}]\nsnapshotter = {q(self.snapshotter)}\nstats_collect_period = 1\n"
        text += f"[{images}.pinned_images]\nsandbox = {sandbox}\n"
        text += f"[{images}.registry]\n{hosts}"
        text += f"[{runtime}]\nrestrict_oom_score_adj = true\ndisable_apparmor = true\n[{runtime}.cni]\n{cni}"
        text += f"[{runtime}.containerd]\ndefault_runtime_name = 'runc'\n"
        text += f"[{runtime}.containerd.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n"
        text += f"[{runtime}.containerd.runtimes.runc.options]\n{options}"
        transfer = "plugins.'io.containerd.transfer.v1.local'"
        text += f"[{transfer}]\n{hosts}"
        machine = "arm64" if os.uname().machine == "aarch64" else "amd64"
        for name in ("overlayfs", *(proxy.name for proxy in self.proxies)):
            text += f"[[{transfer}.unpack_config]]\nplatform = 'linux/{machine}'\nsnapshotter = {q(name)}\ndiffer = 'walking'\n"
        return text

    # -- ctr ----------------------------------------------------------------------------------------------------------

    def ctr(self, *arguments: str, namespace: str = "default", check: bool = True, timeout: float = 180) -> str:
        """Run ctr of the same line; its standard output. Raises Failed with its standard error."""
        return run(*self._ctr_argv(namespace, *arguments), check=check, timeout=timeout, env=self.environment())

    def _ctr_argv(self, namespace: str, *arguments: str) -> list[str]:
        return [os.path.join(self.bin, "ctr"), "--address", self.socket, "--namespace", namespace, *arguments]

    def namespaces(self) -> list[str]:
        """All namespaces."""
        return self.ctr("namespaces", "ls", "-q").split()

    def pull(self, ref: str, *, snapshotter: str, namespace: str = "default", local: bool = False) -> float:
        """``ctr images pull``; seconds it took. ``local`` asks 2.x for the client-side pull, the only one of 1.7's ctr."""
        arguments = ["images", "pull", "--plain-http", "--snapshotter", snapshotter]
        if local and self.line != "1.7":
            arguments.append("--local")
        begin = time.monotonic()
        self.ctr(*arguments, ref, namespace=namespace)
        return time.monotonic() - begin

    def new_id(self, prefix: str = "t") -> str:
        """A container id that no other daemon of this machine has: they share /run/containerd."""
        return f"weenv-{prefix}{next(self._ids)}-{secrets.token_hex(4)}"

    def run(
        self,
        image: str,
        *command: str,
        snapshotter: str,
        namespace: str = "default",
        check: bool = True,
        flags: Sequence[str] = (),
        timeout: float = 180,
    ) -> str:
        """``ctr run --rm`` of a command with host networking off; its output. Raises Failed where it exits non-zero."""
        name = self.new_id()

        def argv(*log: str) -> list[str]:
            return self.run_argv(
                image, name, command, snapshotter=snapshotter, namespace=namespace, flags=["--rm", *flags, *log]
            )

        return self._heard(name, argv, check, timeout)

    def run_detached(
        self, image: str, *command: str, snapshotter: str, namespace: str = "default", flags: Sequence[str] = ()
    ) -> str:
        """``ctr run -d``; the container's id. Use :meth:`exec` and :meth:`remove_container`."""
        name = self.new_id("d")
        flags = ["--detach", "--null-io", *flags]
        argv = self.run_argv(image, name, command, snapshotter=snapshotter, namespace=namespace, flags=flags)
        run(*argv, timeout=180, env=self.environment())
        return name

    def _heard(self, name: str, argv: Callable[..., list[str]], check: bool, timeout: float) -> str:
        """The output of a process that a command of ctr runs to its end; ``argv`` makes it from more flags.

        By way of the shim and files: ctr itself stops listening when the process has ended, whether it has opened the pipes
        by then or not, and with two cores and eight busy processes it loses the whole output of one `echo` in fifty.
        """
        said = os.path.join(self._said, name)
        log = f"binary://{self.home}/listener?{quote(said, safe='')}"
        done = subprocess.run(
            argv("--log-uri", log), capture_output=True, timeout=timeout, env=self.environment(), stdin=subprocess.DEVNULL
        )
        texts = []
        for end in (".out", ".err"):
            texts.append(text_of(said + end, "surrogateescape"))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(said + end)
        out, err = texts
        if check and done.returncode:
            why = (err + done.stderr.decode(errors="replace")).strip() or out.strip()
            raise Failed(f"{' '.join(argv())} ended with {done.returncode}: {why[-3000:]}")
        return out

    def run_argv(
        self,
        image: str,
        name: str,
        command: Sequence[str],
        *,
        snapshotter: str,
        namespace: str = "default",
        flags: Sequence[str] = ("--rm",),
    ) -> list[str]:
        """The argv of ``ctr run``, for who measures it; to be run with :meth:`environment`."""
        runtime = ["--runc-binary", self.runc, "--runc-root", os.path.join(self.runc_root, "ctr")]
        where = ["--cgroup", f"/{self.cgroup}/{name}", "--snapshotter", snapshotter]
        return self._ctr_argv(namespace, "run", *runtime, *where, *flags, image, name, *command)

    def exec(self, container: str, *command: str, namespace: str = "default", check: bool = True) -> str:
        """``ctr tasks exec`` in a running container; its output."""
        name = self.new_id("e")

        def argv(*log: str) -> list[str]:
            return self._ctr_argv(namespace, "tasks", "exec", "--exec-id", name, *log, container, *command)

        return self._heard(name, argv, check, 180)

    def remove_container(self, container: str, namespace: str = "default") -> None:
        """Kill a container's task and delete both; what is not there is no error."""
        self.ctr("tasks", "kill", "--signal", "KILL", container, namespace=namespace, check=False)
        self.ctr("tasks", "delete", "--force", container, namespace=namespace, check=False)
        self.ctr("containers", "delete", container, namespace=namespace, check=False)

    def content(self, namespace: str = "default") -> set[str]:
        """Digests of everything in the content store."""
        return set(self.ctr("content", "ls", "-q", namespace=namespace).split())

    def snapshots(self, snapshotter: str, namespace: str = "default") -> set[str]:
        """Keys of all snapshots of a snapshotter, as the namespace sees them."""
        table = self.ctr("snapshots", "--snapshotter", snapshotter, "ls", namespace=namespace).splitlines()[1:]
        return {line.split()[0] for line in table if line.strip()}

    def remove_image(self, ref: str, namespace: str = "default") -> None:
        """Remove an image and wait for containerd's garbage collection."""
        self.ctr("images", "rm", "--sync", ref, namespace=namespace)

    def collect(self) -> None:
        """Run containerd's garbage collection now: by itself it rests fifty times as long as its last run took."""
        lease = f"collect-{secrets.token_hex(8)}"
        self.ctr("leases", "create", "--id", lease)
        self.ctr("leases", "delete", "--sync", lease)

    def purge(self, namespace: str, snapshotter: str) -> None:
        """Remove everything of a namespace: containers, images, then (by collection) content and snapshots."""
        for container in self.ctr("containers", "ls", "-q", namespace=namespace).split():
            self.remove_container(container, namespace)
        for image in self.ctr("images", "ls", "-q", namespace=namespace).split():
            self.remove_image(image, namespace)
        self.collect()
        wait_until(f"snapshots of {namespace} to be collected", lambda: not self.snapshots(snapshotter, namespace), 30)


def _hierarchies() -> list[str]:
    with os.scandir("/sys/fs/cgroup") as entries:
        return ["/sys/fs/cgroup", *(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))]


def cgroup_processes(name: str) -> set[int]:
    """Processes in a cgroup of ours, such as a ``runc init`` whose starter was killed: no command line tells whose it is."""
    found: set[int] = set()
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(os.path.join(hierarchy, name)):
            with contextlib.suppress(OSError), open(os.path.join(folder, "cgroup.procs")) as file:
                found.update(int(line) for line in file)
    return found


def remove_cgroup(name: str) -> None:
    """Remove a cgroup of ours and those within it from every hierarchy; their processes have ended."""
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(os.path.join(hierarchy, name), topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def remove_tree(path: str) -> None:
    """Remove a directory of ours in which nothing is mounted any more. Raises Failed where something still is."""
    left = unmount_under(path)
    if left:
        raise Failed(f"mounts were left behind: {left}")
    shutil.rmtree(path, ignore_errors=True)
