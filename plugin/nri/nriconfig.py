"""Settings of the NRI plugin: the ``[nri]`` table of ``/etc/weenv/config.toml``, or of the file that a runtime hands it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from typing import Any

from weenv.core import settings
from weenv.core.errors import ConfigError
from weenv.plugin.nri.config import ElasticConfig
from weenv.plugin.nri.config import from_tables as elastic_tables

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z", re.ASCII)
_INDEX = re.compile(r"[0-9]{2}\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class NriConfig:
    """The ``[nri]`` table. Times in seconds."""

    enabled: bool = True
    """`weenv elastic serve` registers with the runtime's NRI; without it, containers of CRI start with what they ask for."""
    socket: str = "/var/run/nri/nri.sock"
    """The runtime's socket (`socket_path` of its NRI plugin); it is waited for where it is not there yet."""
    name: str = "weenv"
    """The name to register as."""
    index: str = "10"
    """Two digits: plugins are asked in their order. Two that set the same limit make the runtime refuse the container."""
    namespaces: frozenset[str] = frozenset()
    """Pods of these Kubernetes namespaces are managed although they carry no annotation of ours."""
    strict: bool = False
    """Refuse to create a container whose annotations make no sense, instead of ignoring these."""
    answer_within: float = 1.0
    """The runtime waits 2 s (`plugin_request_timeout`) and then drops the plugin. A container that is not decided on by then
    is let through as it is; never more than half of the runtime's timeout is used."""
    reconnect_after: float = 0.1
    """Before the first attempt to connect again; doubled up to the next."""
    reconnect_at_most: float = 5.0
    """The longest time between two attempts."""

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise ConfigError(f"nri.name must be letters, digits, '.', '_' and '-', not {self.name[:40]!r}")
        if not _INDEX.match(self.index):
            raise ConfigError(f"nri.index must be two digits, not {self.index[:40]!r}")
        if not self.socket.startswith("/") or len(self.socket.encode()) > 107:
            raise ConfigError(f"nri.socket must be an absolute path of at most 107 bytes, not {self.socket[:120]!r}")
        settings.check_ranges(
            self, "nri",
            answer_within=(0.05, 60.0), reconnect_after=(0.01, 60.0), reconnect_at_most=(0.01, 600.0),
        )  # fmt: skip


def from_tables(tables: dict[str, Any], **overrides: Any) -> NriConfig:
    """The ``[nri]`` table of a configuration file; overrides that are not None win. Raises :class:`ConfigError`."""
    return settings.build(NriConfig, tables.get("nri", {}), "nri", **overrides)


def from_text(text: str, nri: NriConfig, elastic: ElasticConfig) -> tuple[NriConfig, ElasticConfig]:
    """The tables ``[nri]`` and ``[elastic]`` of the text that a runtime hands to a plugin; a table that is not there stays.

    Raises :class:`ConfigError`.
    """
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the plugin's configuration is no TOML: {error}") from error
    for name in tables:
        if name not in ("nri", "elastic"):
            raise ConfigError(f"unknown table [{name}] in the plugin's configuration", hint="known: nri, elastic")
    return (
        from_tables(tables) if "nri" in tables else nri,
        elastic_tables(tables) if "elastic" in tables else elastic,
    )
