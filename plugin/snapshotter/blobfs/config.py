"""Settings of ``weenv blobfs serve``: the ``[blobfs]`` table of ``/etc/weenv/config.toml``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from weenv.core import settings
from weenv.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FillConfig:
    """``[blobfs.fill]``: fetching the rest of a layer when nobody needs the machine. Sizes in bytes, times in seconds."""

    enabled: bool = True
    """False: only what is read is fetched."""
    quiet: float = 3.0
    """Nothing is filled until no reader has waited for a frame for so long."""
    rate: int = 0
    """Bytes per second of compressed data at most; 0: no limit but the pauses."""
    cpu_busy: float = 0.75
    """Nothing is filled while the other processes of the node use more than this share of its CPUs; 1: no bound. Nodes are
    meant to be busy: what matters is that a core is free, and whether anybody waits for one is said by `cpu_pressure`."""
    cpu_pressure: float = 0.05
    """... or while tasks waited for a CPU for more of the time than this (``/proc/pressure/cpu``, "some"); 1: no bound."""
    cpu_share: float = 0.5
    """Filling itself takes at most this share of one CPU."""


@dataclass(frozen=True, slots=True)
class PrefetchConfig:
    """``[blobfs.prefetch]``: what profiles of images say is needed. Sizes in bytes."""

    enabled: bool = True
    """Fetch, when the first container of an image starts, what the image's profile says; False: only what is read."""
    record: bool = True
    """Note which parts of layers are read, for ``weenv profile publish``: 8 bytes of disk for each frame that ever is."""
    image_max: int = 1 << 30
    """Bytes of compressed data fetched ahead for one start; 0: no bound. A profile is what somebody has published: this is
    some ten seconds of a fast link, several times what the work it was made for needs."""
    rate: int = 0
    """Bytes per second of it at most; 0: no limit. It is what readers would ask for a moment later, so the limit of the
    background fill does not count."""
    ranges: int = 3
    """Ranged reads in flight for it; more leave less of the link to readers who wait for something else."""

    def __post_init__(self) -> None:
        settings.check_ranges(
            self, "blobfs.prefetch", image_max=(0, 1 << 50), rate=(0, 1 << 40), ranges=(1, 64)
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """``[blobfs.cache]``: how much of the layers' data is kept on disk. Sizes in bytes, times in seconds."""

    high: int = 0
    """Bytes of layers' data on disk from which on frames are evicted, those not read for longest first; 0: only the disk's own
    bounds below count."""
    low: int = 0
    """Eviction goes down to this, so that it comes seldom and takes much at a time; 0: nine tenths of ``high``."""
    disk_high: float = 0.8
    """The same as a share of the file system in use, whoever uses it; 1: no such bound. What is evicted can be fetched again,
    so it goes before kubelet begins to remove images, at 0.85."""
    disk_low: float = 0.75
    """Eviction for the disk's sake goes down to this."""
    keep: int = 1 << 30
    """The disk's bounds leave so many bytes of data in any case: a disk that others fill does not turn the cache off."""
    interval: float = 0.5
    """Interval at which the bounds are looked at."""

    def __post_init__(self) -> None:
        settings.check_ranges(
            self, "blobfs.cache",
            high=(0, 1 << 60), low=(0, 1 << 60), disk_high=(0.01, 1), disk_low=(0.01, 1), keep=(0, 1 << 60),
            interval=(0.01, 3600),
        )  # fmt: skip
        if self.low > self.high or self.disk_low > self.disk_high:
            name = "low" if self.low > self.high else "disk_low"
            raise ConfigError(f"blobfs.cache.{name} must not be greater than {name.replace('low', 'high')}")


@dataclass(frozen=True, slots=True)
class BlobfsConfig:
    """``[blobfs]``. Sizes in bytes, times in seconds."""

    root: str = "/var/lib/weenv"
    """Holds ``layers/``; the same as the snapshotter's root."""
    mountpoint: str = "/run/weenv/blobs"
    """Where the layers' data appears; the snapshotter's ``blobs``."""
    holder_socket: str = "/run/weenv/blobfs-holder.sock"
    """Where the process is reached that keeps the mount while no server runs; mode 0600."""
    status_socket: str = "/run/weenv/blobfs.sock"
    """Where ``weenv status`` and ``weenv doctor`` ask; mode 0600."""
    metrics_address: str = ""
    """Loopback ``HOST:PORT`` or ``unix:/path`` for Prometheus; empty: none."""
    threads: int = 2
    """Threads that read requests."""
    decoders: int = 2
    """Threads that check and decompress frames."""
    parallelism: int = 8
    """Ranged reads in flight."""
    range_max: int = 2 << 20
    """Largest ranged read."""
    deadline: float = 90.0
    """How long a reader waits for sources that do not answer before it gets EIO."""
    window_max: int = 8 << 20
    """Compressed bytes fetched ahead of a reader that goes forward through a large file."""
    neighbours: float = 0.25
    """Small files: compressed bytes fetched on a guess and not used yet, as a share of those demanded."""
    read_ahead_kb: int = 0
    """Read-ahead of the mount's backing device in KiB; 0 leaves the kernel's own (128)."""
    idle: float = 600.0
    """A layer that nobody reads for so long is closed (it is opened again when read)."""
    layers_memory: int = 256 << 20
    """Memory that the tables of open layers may take; beyond it the layers not read for longest are closed. An ordinary
    layer takes some 100 KiB, one of 32 GiB 5 MiB; tables that are larger than that are on disk."""
    sync: float = 30.0
    """Interval between syncs of fetched data, which make it survive a power cut."""
    fill: FillConfig = field(default_factory=FillConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)

    def __post_init__(self) -> None:
        for name in ("root", "mountpoint", "holder_socket", "status_socket"):
            value = getattr(self, name)
            if not value.startswith("/") or "\0" in value:
                raise ConfigError(f"blobfs.{name} must be an absolute path, not {value!r}")
        settings.check_ranges(
            self, "blobfs",
            threads=(1, 64), decoders=(1, 64), parallelism=(1, 256), range_max=(4096, 1 << 30), deadline=(0.1, 86400),
            window_max=(0, 1 << 30), neighbours=(0, 10), read_ahead_kb=(0, 1 << 20), idle=(1, 1e9), sync=(0.1, 1e9),
            layers_memory=(1 << 20, 1 << 40),
        )  # fmt: skip


def from_table(raw: object) -> BlobfsConfig:
    """Make a configuration from the parsed ``[blobfs]`` table. Raises :class:`ConfigError` naming the setting."""
    return settings.build(BlobfsConfig, raw, "blobfs")


def load(path: str = settings.DEFAULT_CONFIG, **overrides: Any) -> BlobfsConfig:
    """Read ``path``; the defaults where the default file does not exist. ``overrides`` that are not None win.

    Raises :class:`ConfigError`.
    """
    return settings.build(BlobfsConfig, settings.read_tables(path).get("blobfs", {}), "blobfs", **overrides)
