"""plugin/nri/config.py: settings as they are read, what is refused, the bounds that follow from them."""

from __future__ import annotations

import pytest

from weenv.core.errors import ConfigError
from weenv.plugin.nri.config import GIB, MIB, CpuRules, ElasticConfig, MemoryRules, from_tables
from weenv.plugin.nri.model import (
    Bounds,
    Quota,
)

CONFIG = ElasticConfig()

BOUNDS = CONFIG.bounds()


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"cpu": {"step": 0.99}}, "elastic.cpu.step"),
        ({"cpu": {"calm_use": 0.8}}, "elastic.cpu.calm_use"),
        ({"cpu": {"severe_throttled": 0.1}}, "elastic.cpu.severe_throttled"),
        ({"memory": {"severe_use": 0.5}}, "elastic.memory.severe_use"),
        ({"memory": {"margin": float("nan")}}, "elastic.memory.margin"),
        ({"admission": {"reserve_cpu": 1.5}}, "elastic.admission.reserve_cpu"),
        ({"interval": 0}, "elastic.interval"),
        ({"interval": 20.0}, "elastic.idle_interval"),
        ({"start_cpu": 128.0}, "elastic.ceiling_cpu"),
        ({"ceiling_memory": "32G"}, "elastic.ceiling_memory"),
        ({"cpu": {"nonsense": 1}}, "elastic.cpu.nonsense"),
        ({"cpu": 3}, "elastic.cpu"),
    ],
)
def test_nonsense_is_named(table: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_tables({"elastic": table})
    assert named in str(error.value)


def test_settings_are_read() -> None:
    config = from_tables({"elastic": {"serve": {"root": "/x"}, "start_cpu": 1, "cpu": {"hold": 3}, "memory": {"brake": 0}}})
    assert (config.start_cpu, config.cpu.hold, config.memory.brake) == (1.0, 3.0, 0.0)
    assert config.cpu == CpuRules(hold=3.0)
    assert config.memory == MemoryRules(brake=0.0)


def test_bounds_follow_annotations_limits_and_defaults() -> None:
    start = Quota(0.5, 512 * MIB)
    assert Bounds(start, Quota(64, 32 * GIB), start) == BOUNDS
    assert CONFIG.bounds(start_cpu=4, ceiling_cpu=2).start.cpu == 2
    assert CONFIG.bounds(ceiling_cpu=1000, ceiling_memory=1 << 50).ceiling == BOUNDS.ceiling
    assert CONFIG.bounds(start_memory=GIB).floor.memory == GIB
