"""The ``[compose]`` table: what becomes of groups that are not in the lazy format, and of the images that plans leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weenv.core import settings
from weenv.core.errors import ConfigError

CONVERT, UNPACK, REFUSE = "convert", "unpack", "refuse"


@dataclass(frozen=True, slots=True)
class ComposeConfig:
    """The ``[compose]`` table. Sizes are in bytes."""

    not_lazy: str = CONVERT
    """A layer that is not in the lazy format: ``convert`` it on the node, once (what cannot be converted is unpacked);
    have containerd ``unpack`` it; or ``refuse`` the plan."""
    converted_limit: int = 32 << 30
    """Converted layers kept; what no image of the node uses goes first, the least recently used before others."""
    keep_images: int = 300
    """Composed images kept in each namespace, as far as nothing uses them: beyond it, those not used for longest go."""
    max_layer: int = 64 << 30
    """A layer whose tar stream is larger than this is neither converted nor unpacked: it may be a bomb."""

    def __post_init__(self) -> None:
        if self.not_lazy not in (CONVERT, UNPACK, REFUSE):
            raise ConfigError(f"compose.not_lazy must be convert, unpack or refuse, not {self.not_lazy!r}")
        settings.check_ranges(self, "compose", converted_limit=(1, 1 << 40), keep_images=(1, 1_000_000), max_layer=(1, 1 << 40))


def compose_config(tables: dict[str, Any]) -> ComposeConfig:
    """From a configuration file's tables. Raises ConfigError."""
    return settings.build(ComposeConfig, tables.get("compose", {}), "compose")
