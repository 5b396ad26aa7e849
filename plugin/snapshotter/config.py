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

from dataclasses import dataclass, field
from typing import Any

from weenv.core import settings
from weenv.core.errors import ConfigError
from weenv.registry.config import RegistryConfig


@dataclass(frozen=True, slots=True)
class SnapshotterConfig:
    """All settings, with their defaults. Times are in seconds."""

    root: str = "/var/lib/weenv"
    """Metastore, snapshots, mount points and layer directories; also the ``exports.root`` of containerd's proxy plugin."""
    socket: str = "/run/weenv/snapshotter.sock"
    """Where containerd connects to; mode 0600."""
    blobs: str = "/run/weenv/blobs"
    """Where ``weenv blobfs serve`` is mounted."""
    transport: str = "builtin"
    """``builtin``: our own small gRPC server, a quarter of the CPU per call; ``grpcio``: grpcio's."""
    lazy: bool = True
    """False: an ordinary overlay snapshotter, every image is unpacked."""
    foreign: bool = False
    """Whether eStargz and zstd:chunked layers that others made are served lazily too. Their files are verified, chunk by
    chunk; that together they are the layer which the image's config names cannot be, so turn it on where everybody who can
    have images pulled here is trusted not to pass one image's layers off as another's: see docs/foreign.md."""
    plane: str = "auto"
    """How layers are mounted. ``erofs``: by the kernel, from Linux 6.12 on; ``fuse``: by a process for each layer (needs
    pyfuse3), slower, on any kernel; ``auto``: erofs where the kernel can. ``weenv doctor`` says which and why."""
    use_source_annotation: bool = True
    """Whether the registry that a layer's own annotation names may be asked, besides the one the image came
    from. Not where it is this node's loopback, its link, or a metadata service: see `[registry] allow_sources`."""
    resolve_timeout: float = 30.0
    """A layer whose tail cannot be had, checked and mounted in so long is unpacked the ordinary way."""
    builders: int = 2
    """EROFS metadata images built at once."""
    builder_memory: int = 0
    """Bytes of memory that those may take together, others wait; a layer of a million files takes some 450 MB, one that
    takes more than all is not lazy. 0: a quarter of the machine's memory, at least 512 MiB."""
    layer_grace: float = 600.0
    """How long a layer resolved ahead is kept although no snapshot uses it."""
    complete_check: float = 3.0
    """Interval at which layers are looked at that may have become complete."""
    cleanup_delay: float = 5.0
    """Pause after a removal before its files go, where containerd does not ask for it sooner."""
    mount_options: tuple[str, ...] = ()
    """Further options for every overlay mount, such as ``volatile``."""
    metrics_address: str = ""
    """Loopback ``HOST:PORT`` or ``unix:/path`` for Prometheus; empty: none."""
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    blobfs_socket: str = "/run/weenv/blobfs.sock"
    """Where blobfs is told that a container begins: `[blobfs] status_socket`."""

    def __post_init__(self) -> None:
        for name in ("root", "socket", "blobs"):
            value = getattr(self, name)
            if not value.startswith("/") or set(value) & set("\0\n:,"):
                raise ConfigError(
                    f"snapshotter.{name} must be an absolute path without colon and comma, not {value!r}",
                    hint="overlay mount options cannot hold such a path",
                )
            object.__setattr__(self, name, value.rstrip("/") or "/")
        settings.check_ranges(
            self, "snapshotter",
            resolve_timeout=(0.1, 3600.0), builders=(1, 64), builder_memory=(0, 1 << 50), layer_grace=(0.0, 1e9),
            complete_check=(0.05, 1e6), cleanup_delay=(0.0, 3600.0),
        )  # fmt: skip
        if 0 < self.builder_memory < 256 << 20:
            raise ConfigError(f"snapshotter.builder_memory must be 0 or at least {256 << 20}, not {self.builder_memory}")
        if self.transport not in ("builtin", "grpcio"):
            raise ConfigError(f"snapshotter.transport must be builtin or grpcio, not {self.transport!r}")
        if self.plane not in ("auto", "erofs", "fuse"):
            raise ConfigError(f"snapshotter.plane must be auto, erofs or fuse, not {self.plane!r}")
        for option in self.mount_options:
            if "," in option or option.startswith(("lowerdir", "upperdir", "workdir")):
                raise ConfigError(f"snapshotter.mount_options cannot hold {option!r}")


def from_tables(tables: dict[str, Any], **overrides: Any) -> SnapshotterConfig:
    """From a parsed configuration file; other tables than ours are left alone. Raises :class:`ConfigError`."""
    registry = registry_config(tables)
    return settings.build(
        SnapshotterConfig,
        tables.get("snapshotter", {}),
        "snapshotter",
        skip=frozenset({"registry", "blobfs_socket"}),
        registry=registry,
        **{"blobfs_socket": _text(tables, "blobfs", "status_socket"), **overrides},
    )


def _text(tables: dict[str, Any], table: str, name: str) -> str | None:
    """Another table's setting, where it is there and a text: whoever that table belongs to complains of any other."""
    found = tables.get(table)
    value = found.get(name) if isinstance(found, dict) else None
    return value if isinstance(value, str) else None


def registry_config(tables: dict[str, Any]) -> RegistryConfig:
    """The ``[registry]`` table, which both daemons read. Raises :class:`ConfigError`."""
    return settings.build(RegistryConfig, tables.get("registry", {}), "registry")


def load(path: str = settings.DEFAULT_CONFIG, **overrides: Any) -> SnapshotterConfig:
    """Read ``path``; the defaults where the default file does not exist. ``overrides`` that are not None win.

    Raises :class:`ConfigError`.
    """
    return from_tables(settings.read_tables(path), **overrides)
