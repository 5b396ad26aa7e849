"""Settings of ``weenv snapshotter serve``: the ``[snapshotter]`` and ``[registry]`` tables of ``/etc/weenv/config.toml``.

::

    [snapshotter]
    root = "/var/lib/weenv"
    socket = "/run/weenv/snapshotter.sock"
    blobs = "/run/weenv/blobs"
    metrics_address = "127.0.0.1:9440"

    [registry]                          # see weenv.registry.config.RegistryConfig
    plain_http = ["registry.internal:5000"]
"""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass, field
from typing import Any

from weenv.core.errors import ConfigError
from weenv.registry.config import RegistryConfig

DEFAULT_CONFIG = "/etc/weenv/config.toml"


@dataclass(frozen=True, slots=True)
class SnapshotterConfig:
    """All settings, with their defaults. Times are in seconds."""

    root: str = "/var/lib/weenv"
    """Metastore, snapshots, mount points and layer directories; also the ``exports.root`` of containerd's proxy plugin."""
    socket: str = "/run/weenv/snapshotter.sock"
    """Where containerd connects to; mode 0600."""
    blobs: str = "/run/weenv/blobs"
    """Where ``weenv blobfs serve`` is mounted."""
    lazy: bool = True
    """False: an ordinary overlay snapshotter, every image is unpacked."""
    use_source_annotation: bool = True
    """Whether the registry that a layer's own annotation names may be asked, besides the one the image came from."""
    resolve_timeout: float = 60.0
    """A layer whose tail cannot be had, checked and mounted in so long is unpacked the ordinary way."""
    builders: int = 2
    """EROFS metadata images built at once."""
    layer_grace: float = 600.0
    """How long a layer resolved ahead is kept although no snapshot uses it."""
    complete_check: float = 3.0
    """Interval at which layers are looked at that may have become complete."""
    cleanup_delay: float = 5.0
    """Pause after a removal before its files go, where containerd does not ask for it sooner."""
    mount_options: tuple[str, ...] = ()
    """Further options for every overlay mount, such as ``volatile``."""
    metrics_address: str = ""
    """Loopback ``HOST:PORT`` for Prometheus; empty: none."""
    registry: RegistryConfig = field(default_factory=RegistryConfig)

    def __post_init__(self) -> None:
        for name in ("root", "socket", "blobs"):
            value = getattr(self, name)
            if not value.startswith("/") or set(value) & set("\0\n:,"):
                raise ConfigError(
                    f"snapshotter.{name} must be an absolute path without colon and comma, not {value!r}",
                    hint="overlay mount options cannot hold such a path",
                )
            object.__setattr__(self, name, value.rstrip("/") or "/")
        for name, low, high in (
            ("resolve_timeout", 0.1, 3600.0),
            ("builders", 1, 64),
            ("layer_grace", 0.0, 1e9),
            ("complete_check", 0.05, 1e6),
            ("cleanup_delay", 0.0, 3600.0),
        ):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"snapshotter.{name} must be between {low:g} and {high:g}, not {getattr(self, name)!r}")
        for option in self.mount_options:
            if "," in option or option.startswith(("lowerdir", "upperdir", "workdir")):
                raise ConfigError(f"snapshotter.mount_options cannot hold {option!r}")


def _convert(where: str, value: object, default: object) -> Any:
    """``value`` as the type of ``default``; lists become what the default is."""
    if isinstance(default, (tuple, frozenset)):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{where} must be a list of strings")
        return type(default)(value)
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        raise ConfigError(f"{where} must be a {type(default).__name__}, not {value!r}")
    return value


def _fields(where: str, cls: type[Any], raw: object, skip: frozenset[str] = frozenset()) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ConfigError(f"[{where}] must be a table")
    defaults = cls()
    known = {item.name: getattr(defaults, item.name) for item in dataclasses.fields(cls) if item.name not in skip}
    out: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in known:
            raise ConfigError(f"unknown setting {where}.{name}", hint=f"known: {', '.join(sorted(known))}")
        out[name] = _convert(f"{where}.{name}", value, known[name])
    return out


def from_tables(tables: dict[str, Any], **overrides: Any) -> SnapshotterConfig:
    """From a parsed configuration file; other tables than ours are left alone. Raises :class:`ConfigError`."""
    registry = RegistryConfig(**_fields("registry", RegistryConfig, tables.get("registry", {}), frozenset({"mirrors"})))
    values = _fields("snapshotter", SnapshotterConfig, tables.get("snapshotter", {}), frozenset({"registry"}))
    values.update({name: value for name, value in overrides.items() if value is not None})
    return SnapshotterConfig(registry=registry, **values)


def load(path: str = DEFAULT_CONFIG, **overrides: Any) -> SnapshotterConfig:
    """Read ``path``; the defaults where the default file does not exist. ``overrides`` that are not None win.

    Raises :class:`ConfigError`.
    """
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except FileNotFoundError as error:
        if path != DEFAULT_CONFIG:
            raise ConfigError(f"no such file: {path}") from error
        tables = {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return from_tables(tables, **overrides)
