"""How much of the layers' data may be on disk: watermarks, in bytes and as shares of the disk. Pure."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

_MUCH = 1 << 62


class Rules(Protocol):
    """``[blobfs.cache]``, as far as it is about amounts; see blobfs/config.py."""

    @property
    def high(self) -> int: ...
    @property
    def low(self) -> int: ...
    @property
    def disk_high(self) -> float: ...
    @property
    def disk_low(self) -> float: ...
    @property
    def keep(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Disk:
    """A file system: bytes in use, by whomever, and bytes that can be used in all (what root keeps for itself is not)."""

    used: int
    size: int

    @classmethod
    def of(cls, path: str) -> Disk:
        """The one that ``path`` is on, as df(1) counts it. Raises OSError."""
        found = os.statvfs(path)
        used = (found.f_blocks - found.f_bfree) * found.f_frsize
        return cls(used, used + found.f_bavail * found.f_frsize)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes of data from which on frames are evicted, and down to which; ``disk``: it is the disk that says so."""

    high: int
    low: int
    disk: bool

    @property
    def bounded(self) -> bool:
        """False where there is no bound at all."""
        return self.high < _MUCH


def bounds(rules: Rules, data: int, disk: Disk) -> Bounds:
    """The bounds for ``data`` bytes of layers' data on ``disk``, while others use as much of it as they do now."""
    others = disk.used - data
    high = rules.high or _MUCH
    low = rules.low or high * 9 // 10
    disk_high = max(rules.keep, int(rules.disk_high * disk.size) - others) if rules.disk_high < 1 else _MUCH
    disk_low = max(rules.keep, int(rules.disk_low * disk.size) - others) if rules.disk_high < 1 else _MUCH
    return Bounds(min(high, disk_high), min(low, disk_low), disk_high < high)
