"""``weenv run`` and what goes with it, on a node under test: the commands users have, and all that may be left of them."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import weenv
from weenv.environment.node import NodeConfig, load
from weenv_testkit import tools
from weenv_testkit.containerd import cgroup_processes
from weenv_testkit.images import Member, write_tar
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import run
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store

NAMESPACE = f"run-{os.getpid()}"
"""One of its own: /run/containerd is shared with other sessions."""
RUNTIME_ROOT = "/run/containerd/runc"
"""Where the runc shim has runc keep its containers, below it a directory for each namespace."""


def listed(directory: str) -> list[str]:
    """What is in a directory; nothing where there is none."""
    return os.listdir(directory) if os.path.isdir(directory) else []


class Bench:
    """A node, a plan on it, and the commands that users have."""

    def __init__(self, node: Node, plan: str) -> None:
        self.node = node
        self.plan = plan
        self.cgroup = node.containerd.cgroup
        with open(node.config) as file:
            text = file.read()
        self.config = os.path.join(node.home, "run.toml")
        with open(self.config, "w") as file:
            file.write(text + f'[run]\naddress = "{node.containerd.socket}"\nnamespace = "{NAMESPACE}"\n')
            file.write(f'cgroup = "{self.cgroup}"\nruntime = "{tools.runc()}"\n')

    @property
    def loaded(self) -> NodeConfig:
        return load(self.config)

    def argv(self, verb: str, *arguments: str) -> list[str]:
        return [*tools.weenv(), verb, "--config", self.config, *arguments]

    def call(self, verb: str, *arguments: str, stdin: bytes = b"", timeout: float = 120) -> subprocess.CompletedProcess[bytes]:
        env = {key: value for key, value in os.environ.items() if not key.startswith("WEENV_")}
        return subprocess.run(
            self.argv(verb, *arguments), input=stdin, capture_output=True, timeout=timeout, env=env, check=False
        )

    def ok(self, verb: str, *arguments: str, **more: Any) -> str:
        done = self.call(verb, *arguments, **more)
        assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
        return done.stdout.decode()

    def popen(self, verb: str, *arguments: str, **more: Any) -> subprocess.Popen[bytes]:
        """The command going on, its output piped."""
        return subprocess.Popen(self.argv(verb, *arguments), **{"stdout": subprocess.PIPE, **more})

    def start(self, **options: Any) -> weenv.Environment:
        return weenv.Environment.start(self.plan, config=self.loaded, **options)

    def left(self) -> dict[str, Any]:
        """Everything that environments leave while they live."""
        ctr = self.node.containerd.ctr
        directory = os.path.join(self.node.root, "environments", NAMESPACE)
        active = [key for key in self.node.containerd.snapshots(SNAPSHOTTER, NAMESPACE) if not key.startswith("sha256:")]
        groups = [
            os.path.join(parent, name)
            for parent, names, _ in os.walk("/sys/fs/cgroup")
            if os.path.basename(parent) == self.cgroup
            for name in names
        ]
        found = {
            "containers": ctr("containers", "ls", "-q", namespace=NAMESPACE).split(),
            "tasks": ctr("tasks", "ls", "-q", namespace=NAMESPACE).split(),
            "leases": ctr("leases", "ls", "-q", namespace=NAMESPACE).split(),
            "snapshots": active,
            "directories": listed(directory),
            "cgroups": groups,
            "runtime": listed(os.path.join(RUNTIME_ROOT, NAMESPACE)),
            "bundles": listed(os.path.join(self.node.containerd.state, "io.containerd.runtime.v2.task", NAMESPACE)),
            "processes": sorted(cgroup_processes(self.cgroup)),
        }
        return {key: value for key, value in found.items() if value}


def make_plan(store: Store, registry: Registry, workdir: str) -> str:
    """A plan of two lazy groups: busybox, and users, files and links that lead nowhere good. Its path."""
    os.makedirs(store.directory, exist_ok=True)
    base = store.lazy("small")
    members = [
        Member.directory("etc"),
        Member("etc/passwd", b"root:x:0:0::/root:/bin/sh\nann:x:1000:1001::/home/ann:/bin/sh\n"),
        Member("etc/group", b"root:x:0:\nstaff:x:50:ann\nann:x:1001:\n"),
        Member.directory("testbed"), Member("testbed/code", b"code\n"),
        Member.symlink("testbed/out", "/../../../../tmp/escape"), Member.symlink("testbed/up", "../../../../etc"),
        Member.directory("tmp", 0o1777), Member.directory("work", 0o777),
    ]  # fmt: skip
    tar = write_tar(os.path.join(store.directory, "run-group.tar"), members)
    store.layout.image([store.layout.layer(tar)], "run-group", WorkingDir="/testbed")
    target = f"{registry.host}/run/group:1"
    run(*tools.weenv(), "convert", f"oci:{store.layout.directory}:run-group", target, timeout=120, env=dict(os.environ))
    path = os.path.join(workdir, "plan.yaml")
    with open(path, "w") as file:
        file.write(
            "apiVersion: weenv.dev/v1\nkind: EnvironmentPlan\nmetadata: {name: trial}\n"
            f"groups: [{json.dumps(base)}, {json.dumps(target)}]\n"
            "config: {env: {TASK: '17'}, cmd: [sh, -c, 'echo default $TASK']}\nresources: {pids: 400}\n"
        )
    return path
