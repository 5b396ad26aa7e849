"""What a conversion is told, what it reports while it runs, and what it answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weenv.layer.encode import DEFAULT_LEVEL, DEFAULT_TARGET
from weenv.layer.limits import DEFAULT_LIMITS, Limits

if TYPE_CHECKING:  # a layer's conversion is too short to import what talks to registries
    from weenv.registry.client import RegistryClient
    from weenv.registry.config import RegistryConfig
    from weenv.registry.manifest import Descriptor

CONVERTED = "converted"
SKIPPED = "skipped"
COPIED = "copied"
FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Event:
    """A step of one layer, for progress bars. ``stage`` is ``fetch``, ``convert``, ``push`` or ``done``.

    ``digest`` is the source layer's. ``done`` and ``total`` are bytes (of the compressed source while fetching and
    converting, of the new blob while pushing). ``done`` events carry the layer's status in ``text``.
    Events come from several threads, those of one layer in order.
    """

    stage: str
    digest: str
    done: int
    total: int
    text: str = ""


Progress = Callable[[Event], None]


def _usual_registry() -> RegistryConfig:
    from weenv.registry.config import RegistryConfig

    return RegistryConfig()


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Sizes are in bytes."""

    target: int = DEFAULT_TARGET
    level: int = DEFAULT_LEVEL
    threads: int = 0
    """Compressing threads of one layer; 0: one for each CPU."""
    jobs: int = 2
    """Layers that are encoded at once."""
    platforms: tuple[str, ...] = ()
    """Where not empty: convert these platforms (``linux/amd64``) of an index only and copy the others."""
    source_hint: bool = False
    """Write the annotation that says where the blob is, where the destination is a registry. It goes stale when the
    image is copied elsewhere."""
    force: bool = False
    """Convert again what was converted before."""
    cache_dir: str | None = ""
    """Where results are remembered for the next run; empty: ``$XDG_CACHE_HOME/weenv/converted``; None: nowhere."""
    scratch_dir: str = ""
    """Where layers are spooled; empty: beside a layout destination, else $TMPDIR or /var/tmp (/tmp may be memory)."""
    chunk_size: int = 0
    """Upload in requests of that size; 0: one request for each blob."""
    registry: RegistryConfig = field(default_factory=_usual_registry)
    client: RegistryClient | None = None
    """A client to use instead of making one from ``registry``."""
    limits: Limits = DEFAULT_LIMITS
    progress: Progress | None = None

    def scratch_root(self) -> str:
        """The directory for spooled layers."""
        return self.scratch_dir or os.environ.get("TMPDIR") or "/var/tmp"  # noqa: S108 - a private directory is made in it


@dataclass(frozen=True, slots=True)
class LayerResult:
    """One layer of one manifest. ``seconds`` is what it took here; 0 for a layer that another manifest shares."""

    platform: str
    index: int
    old: Descriptor
    new: Descriptor
    status: str
    reason: str = ""
    seconds: float = 0.0
    stream_size: int = 0
    diff_id: str = ""

    @property
    def lazy(self) -> bool:
        """True where the layer is in our format in the result."""
        return self.status in (CONVERTED, SKIPPED)


@dataclass(frozen=True, slots=True)
class ManifestResult:
    """One manifest of the result. ``reason`` says why it was copied as it is, where it was."""

    platform: str
    old: Descriptor
    new: Descriptor
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """``descriptor`` is of the manifest or index that the destination's tag names now."""

    source: str
    destination: str
    descriptor: Descriptor
    manifests: tuple[ManifestResult, ...]
    layers: tuple[LayerResult, ...]
    seconds: float

    @property
    def lazy(self) -> bool:
        """True where every layer of every image is in our format: only then is an image served lazily."""
        return bool(self.layers) and all(layer.lazy for layer in self.layers)
