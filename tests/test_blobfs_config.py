"""The [blobfs] table: defaults, overrides, and errors that name the setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from weenv.core.errors import ConfigError
from weenv.plugin.snapshotter.blobfs.config import BlobfsConfig, FillConfig, from_table


def test_an_empty_table_is_the_defaults() -> None:
    assert from_table({}) == BlobfsConfig()


def test_settings_and_sub_tables_are_taken() -> None:
    config = from_table({"root": "/x", "deadline": 5, "fill": {"enabled": False, "rate": 1000}})
    assert (config.root, config.deadline, config.fill) == ("/x", 5.0, FillConfig(enabled=False, rate=1000))


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"rot": "/x"}, "blobfs.rot"),
        ({"root": "relative"}, "blobfs.root"),
        ({"root": 3}, "blobfs.root"),
        ({"threads": 0}, "blobfs.threads"),
        ({"threads": True}, "blobfs.threads"),
        ({"parallelism": 1.5}, "blobfs.parallelism"),
        ({"deadline": "soon"}, "blobfs.deadline"),
        ({"fill": {"enabled": 1}}, "blobfs.fill.enabled"),
        ({"fill": {"on": True}}, "blobfs.fill.on"),
        ({"fill": 1}, "blobfs.fill"),
        ([], "blobfs"),
    ],
)
def test_a_wrong_setting_is_named(table: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        from_table(table)


def test_the_documented_settings_are_the_real_ones() -> None:
    page = Path(__file__).parent.parent.joinpath("docs/configuration.md").read_text()
    for name in BlobfsConfig.__dataclass_fields__:
        assert f"`{name}`" in page or name in ("fill", "cache", "prefetch"), name
