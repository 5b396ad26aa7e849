"""cache/bounds.py: how much may be on disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.core.errors import ConfigError
from weenv.plugin.snapshotter.blobfs.config import CacheConfig, from_table
from weenv.plugin.snapshotter.cache.bounds import Disk, bounds

GIB = 1 << 30


@dataclass(frozen=True)
class Rules:
    """Settings."""

    high: int = 0
    low: int = 0
    disk_high: float = 1.0
    disk_low: float = 1.0
    keep: int = 0


def test_a_size_is_a_bound_whatever_the_disk_is() -> None:
    found = bounds(Rules(high=1000), 500, Disk(10**9, 10**9))
    assert (found.high, found.low, found.disk, found.bounded) == (1000, 900, False, True)
    assert bounds(Rules(high=1000, low=300), 0, Disk(0, 1)).low == 300


def test_no_bound_is_none() -> None:
    assert not bounds(Rules(), 1 << 40, Disk(100, 100)).bounded


def test_the_disk_leaves_what_others_leave() -> None:
    rules = Rules(disk_high=0.8, disk_low=0.75)
    found = bounds(rules, 30 * GIB, Disk(90 * GIB, 100 * GIB))  # others have 60
    assert (found.high, found.low, found.disk) == (20 * GIB, 15 * GIB, True)
    found = bounds(rules, 30 * GIB, Disk(40 * GIB, 100 * GIB))
    assert (found.high, found.low) == (70 * GIB, 65 * GIB)
    assert bounds(Rules(5 * GIB, 0, 0.8, 0.75), 30 * GIB, Disk(40 * GIB, 100 * GIB)).high == 5 * GIB, "the smaller one counts"


def test_a_disk_that_others_fill_leaves_something() -> None:
    found = bounds(Rules(disk_high=0.8, disk_low=0.75, keep=GIB), 3 * GIB, Disk(99 * GIB, 100 * GIB))
    assert (found.high, found.low) == (GIB, GIB)


@given(
    st.integers(0, 1 << 44), st.integers(0, 1 << 44), st.integers(0, 1 << 44), st.integers(0, 1 << 40),
    st.floats(0.01, 1), st.floats(0, 1), st.integers(0, 1 << 40),
)  # fmt: skip
def test_low_is_never_above_high(data: int, others: int, free: int, high: int, share: float, part: float, keep: int) -> None:
    found = bounds(Rules(high, 0, share, share * part, keep), data, Disk(data + others, data + others + free))
    assert 0 <= found.low <= found.high


def test_a_disk_is_counted_as_df_does(tmp_path: Path) -> None:
    disk = Disk.of(str(tmp_path))
    stat = os.statvfs(tmp_path)
    assert 0 < disk.used < disk.size <= stat.f_blocks * stat.f_frsize


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"high": -1}, "high must be between"), ({"disk_high": 1.5}, "disk_high"), ({"interval": 0}, "interval"),
        ({"high": 10, "low": 11}, "low must not be greater than high"), ({"disk_high": 0.5}, "disk_low must not be greater"),
        ({"low": 5}, "low must not be greater"), ({"hgih": 1}, "unknown setting"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_named(table: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_table({"cache": table})


def test_settings() -> None:
    assert from_table({"cache": {"high": 5, "disk_high": 1}}).cache == CacheConfig(high=5, disk_high=1.0)
