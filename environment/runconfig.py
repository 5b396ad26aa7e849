"""The ``[run]`` table of the configuration, and what of the rest running needs; weenv.environment.node describes them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any

from weenv.core import settings
from weenv.core.errors import ConfigError

RUNC = "io.containerd.runc.v2"
"""containerd's own shim for runc and its like."""
_RUNTIME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+\Z")
"""containerd makes the shim's file name of the last two parts (pkg/shim/util.go, BinaryName)."""
DEFAULT_ADDRESS = "/run/containerd/containerd.sock"
DEFAULT_ROOT = "/var/lib/weenv"


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The ``[run]`` table."""

    address: str = DEFAULT_ADDRESS
    """containerd's socket."""
    namespace: str = "default"
    """containerd's namespace: what ``weenv ps`` and its like see."""
    snapshotter: str = "weenv"
    """The name that containerd's configuration gives to WeEnv's proxy plugin."""
    cgroup: str = "weenv"
    """The control group below which each environment has its own."""
    runtime: str = RUNC
    """A containerd runtime, or the path of an OCI runtime for runc's shim."""
    network: str = "none"
    """``none``: loopback only; ``host``: the node's."""

    def __post_init__(self) -> None:
        if not self.cgroup.strip("/") or ".." in self.cgroup.split("/"):
            raise ConfigError(f"run.cgroup is no control group: {self.cgroup!r}")
        if not self.runtime.startswith("/") and _RUNTIME.match(self.runtime) is None:
            hint = f"{RUNC}, or the path of an OCI runtime such as /usr/bin/crun"
            raise ConfigError(f"run.runtime is no runtime of containerd's: {self.runtime[:80]!r}", hint=hint)
        if self.runtime.startswith("/") and not os.access(self.runtime, os.X_OK):
            raise ConfigError(f"run.runtime: there is no program {self.runtime}", hint=f"install it, or use {RUNC}")
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

    @property
    def directory(self) -> str:
        """Where environments have their files."""
        return f"{self.root.rstrip('/')}/environments"

    def home(self, container: str) -> str:
        """The directory of one environment."""
        return f"{self.directory}/{self.run.namespace}/{container}"

    def cgroup(self, container: str) -> str:
        """The control group of one environment, as runtimes take it."""
        return f"/{self.run.cgroup.strip('/')}/{container}"


def load(path: str = settings.DEFAULT_CONFIG, **overrides: Any) -> NodeConfig:
    """Read the configuration file; ``overrides`` of the ``[run]`` table that are not None win. Raises ConfigError."""
    tables = settings.read_tables(path)
    run = settings.build(RunConfig, tables.get("run", {}), "run", **overrides)
    snapshotter = tables.get("snapshotter", {})
    root = snapshotter.get("root", DEFAULT_ROOT) if isinstance(snapshotter, dict) else None
    if not isinstance(root, str) or not root.startswith("/"):
        raise ConfigError("snapshotter.root must be an absolute path")
    return NodeConfig(run, root.rstrip("/") or "/", tables)
