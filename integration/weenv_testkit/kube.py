"""A node as Kubernetes has it: containerd with the configuration that ``deploy/containerd`` ships, and nothing else of ours.

The shipped files are used as they are, but for the two paths that a test's node has elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from weenv_testkit.containerd import Containerd
from weenv_testkit.node import Node

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ROOT = "/var/lib/weenv"
RUN = "/run/weenv"
"""What the shipped files name."""


class ShippedContainerd(Containerd):
    """Imports the shipped drop-in; on 1.7 the shipped lines are merged into the CRI section, as the operator is told to.

    ``more`` is appended to the drop-in, and ``without`` taken out of it.
    """

    def __init__(self, line: str, home: str, *, registry: str, root: str, run: str, without: str = "", more: str = "") -> None:
        super().__init__(line, home, registry=registry)
        self._paths = {ROOT: root, f"{RUN}/snapshotter.sock": f"{run}/s.sock"}
        self._without, self._more = without, more

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
            file.write(text.replace(self._without, "") + self._more)
        own = super().config()
        if self.line == "1.7":
            before = 'snapshotter = "overlayfs"\ndisable_snapshot_annotations = false\n'
            table = "[plugins.'io.containerd.grpc.v1.cri'.containerd]\n"
            assert table + before in own
            lines = self.shipped("cri-1.7.toml").partition(".containerd]\n")[2]
            own = own.replace(table + before, table + lines)
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
        without: str = "",
        more: str = "",
    ) -> None:
        super().__init__(line, home, registry=registry, settings=settings)
        self.containerd: Containerd = ShippedContainerd(
            line, self.containerd.home, registry=registry, root=self.root, run=self.run, without=without, more=more
        )
