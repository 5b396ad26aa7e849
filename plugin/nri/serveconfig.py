"""Settings of the daemon ``weenv elastic serve``: the ``[elastic.serve]`` table, and what of other tables it needs.

Kept free of heavy imports: ``weenv run`` reads it to find the daemon's socket.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from weenv.core import settings
from weenv.core.errors import ConfigError

DEFAULT_ADDRESS = "/run/containerd/containerd.sock"


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """The ``[elastic.serve]`` table. Times in seconds."""

    address: str = ""
    """containerd's socket; empty: `run.address`."""
    root: str = "/var/lib/weenv/elastic"
    """Lock, event stream and decision log."""
    socket: str = "/run/weenv/elastic.sock"
    """Where `weenv top`, `weenv admit` and `weenv run` ask; mode 0600."""
    namespaces: frozenset[str] = frozenset()
    """containerd namespaces in which every container is managed. Elsewhere those are that say so, by a label
    `weenv.dev/elastic=true` or any other of ours, and those of `weenv run` whose plan names resources."""
    only: frozenset[str] = frozenset()
    """containerd namespaces that are looked at; empty: all."""
    list_every: float = 30.0
    """Between two listings of containerd's tasks, which repair what a missed event has left wrong."""
    cri_updates: str = "tasks"
    """How limits of CRI's containers are changed: `tasks` (containerd's Tasks.Update, fast), `cri` (UpdateContainerResources,
    slower; the kubelet's view of the container then has them too) or `nri` (UpdateContainers where the runtime's NRI is
    v0.12.2 or newer, which older ones may stop CRI for good on; there it is `tasks`)."""
    metrics_address: str = ""
    """Loopback `HOST:PORT` or `unix:/path` for Prometheus; empty: none."""
    log_bytes: int = 64 << 20
    """Size at which the event stream and the decision log are each begun anew; one older file of each is kept."""

    def __post_init__(self) -> None:
        for name in ("root", "socket"):
            if not getattr(self, name).startswith("/"):
                raise ConfigError(f"elastic.serve.{name} must be an absolute path, not {getattr(self, name)!r}")
        if self.address and not self.address.startswith("/"):
            raise ConfigError(f"elastic.serve.address must be an absolute path, not {self.address!r}")
        if len(os.fsencode(self.socket)) > 107:
            raise ConfigError("elastic.serve.socket must have at most 107 bytes", hint="the kernel takes no longer path")
        if self.cri_updates not in ("tasks", "cri", "nri"):
            raise ConfigError(f"elastic.serve.cri_updates must be tasks, cri or nri, not {self.cri_updates!r}")
        settings.check_ranges(self, "elastic.serve", list_every=(0.1, 86400.0), log_bytes=(1 << 16, 1 << 40))


def from_tables(tables: dict[str, Any], **overrides: Any) -> ServeConfig:
    """From a parsed configuration file; ``overrides`` that are not None win. Raises :class:`ConfigError`."""
    elastic = tables.get("elastic", {})
    raw = elastic.get("serve", {}) if isinstance(elastic, dict) else {}
    run = tables.get("run", {})
    config = settings.build(ServeConfig, raw, "elastic.serve", **overrides)
    if config.address or not isinstance(run, dict):
        return config
    return replace(config, address=run.get("address") or DEFAULT_ADDRESS)
