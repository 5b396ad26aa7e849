"""A node as Kubernetes has it: containerd with the configuration that ``deploy/containerd`` ships, and nothing else of ours.

The shipped files are used as they are, but for the two paths that a test's node has elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from weenv_testkit import tools
from weenv_testkit.containerd import Containerd
from weenv_testkit.images import Layout, Member, busybox_members, write_tar
from weenv_testkit.node import Node
from weenv_testkit.procs import run
from weenv_testkit.registry import Registry

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ROOT = "/var/lib/weenv"
RUN = "/run/weenv"
"""What the shipped files name."""


_CNI = """#!/bin/sh
# The least that containerd takes for a pod's network: it says that there is one.
version=$(sed -n 's/.*"cniVersion": *"\\([0-9.]*\\)".*/\\1/p' | head -1)
case $CNI_COMMAND in
VERSION) echo '{"cniVersion":"1.0.0","supportedVersions":["0.3.1","0.4.0","1.0.0"]}' ;;
ADD) echo "{\\"cniVersion\\":\\"$version\\",\\"interfaces\\":[{\\"name\\":\\"$CNI_IFNAME\\",\\"sandbox\\":\\"$CNI_NETNS\\"}],\\
\\"ips\\":[{\\"version\\":\\"4\\",\\"address\\":\\"192.0.2.7/24\\",\\"interface\\":0}]}" ;;
esac
"""


def pod_network(containerd: Containerd) -> None:
    """Give the node a pod network of nothing but loopback, so that pods may have network namespaces of their own."""
    for name in ("loopback", "weenv-test"):
        path = os.path.join(containerd.home, "cni", "bin", name)
        with open(path, "w") as file:
            file.write(_CNI)
        os.chmod(path, 0o755)
    with open(os.path.join(containerd.home, "cni", "conf", "10-test.conflist"), "w") as file:
        file.write('{"cniVersion":"0.4.0","name":"test","plugins":[{"type":"weenv-test"}]}')


def lazy_image(home: str, registry: Registry, name: str, *files: Member) -> str:
    """A converted image of busybox and some files that nobody else has; its reference."""
    layout = Layout(os.path.join(home, f"l-{name}"))
    tars = [
        write_tar(f"{layout.directory}.{number}", members) for number, members in enumerate((busybox_members(), list(files)))
    ]
    layout.image([layout.layer(tar) for tar in tars], name)
    ref = f"{registry.host}/kube/{name}:lazy"
    run(*tools.weenv(), "convert", f"oci:{layout.directory}:{name}", ref, env=dict(os.environ))
    return ref


def layer_digests(registry: Registry, ref: str) -> list[str]:
    """The layers of an image in the registry."""
    repository, _, tag = ref.partition("/")[2].rpartition(":")
    return [layer["digest"] for layer in registry.manifest(repository, tag)[0]["layers"]]  # type: ignore[attr-defined]


class ShippedContainerd(Containerd):
    """Imports the shipped drop-in; on 1.7 the shipped lines are merged into the CRI section, as the operator is told to.

    ``system`` adds the runtime handler of the DaemonSet; ``without`` is taken out of the drop-in.
    """

    def __init__(
        self, line: str, home: str, *, registry: str, root: str, run: str, system: bool = False, without: str = ""
    ) -> None:
        super().__init__(line, home, registry=registry)
        self._paths = {ROOT: root, f"{RUN}/snapshotter.sock": f"{run}/s.sock"}
        self._system, self._without = system, without

    def shipped(self, name: str) -> str:
        """A shipped file with this node's paths."""
        text = (DEPLOY / "containerd" / name).read_text()
        for theirs, ours in self._paths.items():
            text = text.replace(f'"{theirs}"', f'"{ours}"')
        return text

    def config(self) -> str:
        """The node's own configuration, which imports the drop-in."""
        folder = os.path.join(self.home, "conf.d")
        os.makedirs(folder, exist_ok=True)
        text = self.shipped("weenv-1.7.toml" if self.line == "1.7" else "weenv-2.toml")
        assert self._without in text
        with open(os.path.join(folder, "weenv.toml"), "w") as file:
            file.write(text.replace(self._without, ""))
        own = super().config()
        # Only this containerd's own runc, and no systemd.
        options = f"SystemdCgroup = false\nBinaryName = '{self.runc}'\nRoot = '{self.runc_root}'"
        system = self.shipped(f"weenv-system-{'1.7' if self.line == '1.7' else '2'}.toml")
        assert "SystemdCgroup = true" in system
        system = system.replace("SystemdCgroup = true", options)
        if self.line == "1.7":
            before = 'snapshotter = "overlayfs"\ndisable_snapshot_annotations = false\n'
            table = "[plugins.'io.containerd.grpc.v1.cri'.containerd]\n"
            assert table + before in own
            lines = self.shipped("cri-1.7.toml").partition(".containerd]\n")[2]
            own = own.replace(table + before, table + lines) + (system if self._system else "")
        elif self._system:
            with open(os.path.join(folder, "weenv-system.toml"), "w") as file:
                file.write(system)
        head, newline, rest = own.partition("\n")
        return f'{head}{newline}imports = ["conf.d/*.toml"]\n{rest}'


class KubeNode(Node):
    """A :class:`Node` whose containerd is a :class:`ShippedContainerd`."""

    def __init__(
        self,
        line: str,
        home: str,
        *,
        registry: str,
        settings: Mapping[str, str] | None = None,
        system: bool = False,
        without: str = "",
    ) -> None:
        super().__init__(line, home, registry=registry, settings=settings)
        self.containerd: Containerd = ShippedContainerd(
            line, self.containerd.home, registry=registry, root=self.root, run=self.run, system=system, without=without
        )
