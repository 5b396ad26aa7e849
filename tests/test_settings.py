"""core/settings.py and the daemons' configuration: right types, every fault named, the documentation complete."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from weenv.core import settings
from weenv.core.errors import ConfigError
from weenv.plugin.snapshotter import config as snapshotter_config
from weenv.plugin.snapshotter.blobfs import config as blobfs_config
from weenv.plugin.snapshotter.config import SnapshotterConfig

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True)
class Inner:
    rate: float = 1.5


@dataclass(frozen=True)
class Outer:
    name: str = "x"
    count: int = 1
    on: bool = True
    hosts: frozenset[str] = frozenset()
    inner: Inner = field(default_factory=Inner)


def test_build_takes_every_type() -> None:
    made = settings.build(Outer, {"count": 2, "on": False, "hosts": ["a", "b"], "inner": {"rate": 2}}, "t", name="y")
    assert made == Outer("y", 2, False, frozenset({"a", "b"}), Inner(2.0))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"nmae": "x"}, "unknown setting t.nmae"),
        ({"count": "2"}, "t.count must be a int"),
        ({"count": True}, "t.count must be a int"),
        ({"on": 1}, "t.on must be a bool"),
        ({"hosts": "a"}, "t.hosts must be a list of strings"),
        ({"inner": 3}, r"\[t.inner\] must be a table"),
        ({"inner": {"rat": 3}}, "unknown setting t.inner.rat"),
        ([], r"\[t\] must be a table"),
    ],
)
def test_build_names_the_setting_at_fault(raw: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings.build(Outer, raw, "t")


def test_a_setting_that_nobody_knows_is_named_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[snapshotter]\nnmae = 'x'\n[blobfs.fill]\nenable = true\n")
    tables = settings.read_tables(str(path))
    with pytest.raises(ConfigError, match=f"^unknown setting t.nmae in {path}$"):
        settings.build(Outer, tables["snapshotter"], "t")
    with pytest.raises(ConfigError, match=f"^unknown setting t.enable in {path}$"):
        settings.build(Outer, tables["blobfs"]["fill"], "t")


def test_files(tmp_path: object) -> None:
    path = f"{tmp_path}/c.toml"
    with pytest.raises(ConfigError, match="no such file"):
        settings.read_tables(path)
    with open(path, "w") as file:
        file.write(
            '[snapshotter]\nroot = "/r/"\nmount_options = ["volatile"]\n[registry]\nplain_http = ["h:1"]\n'
            "[blobfs]\nthreads = 3\n[blobfs.fill]\nenabled = false\n"
        )
    loaded = snapshotter_config.load(path, socket="/s")
    assert (loaded.root, loaded.socket, loaded.mount_options) == ("/r", "/s", ("volatile",))
    assert loaded.registry.is_plain("h:1")
    blobs = blobfs_config.load(path, mountpoint="/m")
    assert (blobs.threads, blobs.fill.enabled, blobs.mountpoint) == (3, False, "/m")
    with open(path, "w") as file:
        file.write("[polcy]\n")
    with pytest.raises(ConfigError, match=r"unknown table \[polcy\]"):
        settings.read_tables(path)
    with open(path, "w") as file:
        file.write('colour = "red"\n')
    with pytest.raises(ConfigError, match=r"the setting colour in .* is in no table"):
        settings.read_tables(path)
    for text in (b"[snapshotter\n", b"# caf\xe9\n", b"x = " + 5000 * b"1", b"x = " + 5000 * b"["):
        with open(path, "wb") as binary:
            binary.write(text)
        with pytest.raises(ConfigError, match="cannot read"):
            snapshotter_config.load(path)


def test_a_configuration_that_is_no_file_or_has_no_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(b"# " + (1 << 20) * b"x")
    for path, message in (
        (f"{tmp_path}/pipe", "it is a pipe, not a file"),
        ("/dev/zero", "it is a device, not a file"),
        (str(tmp_path), "it is a directory, not a file"),
        (f"{tmp_path}/long", "is larger than 1048576 bytes"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            settings.read_tables(path)
        assert caught.value.message.count(path) == 1


@pytest.mark.parametrize(
    "change", [{"root": "relative"}, {"root": "/a:b"}, {"builders": 0}, {"mount_options": ("lowerdir=/x",)}]
)
def test_values_out_of_range_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="snapshotter"):
        SnapshotterConfig(**change)  # type: ignore[arg-type]


def test_the_configuration_page_is_the_one_the_code_makes() -> None:
    made = subprocess.run(
        [sys.executable, "-c", "import runpy; print(runpy.run_path('docs/make_configuration.py')['page'](), end='')"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    with open(os.path.join(ROOT, "docs/configuration.md"), encoding="utf-8") as file:
        assert file.read() == made.stdout, "run .venv/bin/python docs/make_configuration.py"
    assert "|  |" not in made.stdout, "every setting says what it is"
    assert "## `[run]`" in made.stdout and "builder_memory" in made.stdout and "allow_sources" in made.stdout


def test_the_first_value_out_of_its_range_is_named() -> None:
    config = SnapshotterConfig()
    settings.check_ranges(config, "snapshotter", builders=(1, 2), layer_grace=(0.0, 1e9))
    with pytest.raises(ConfigError, match=r"^snapshotter\.builders must be between 3 and 1048576, not 2$"):
        settings.check_ranges(config, "snapshotter", layer_grace=(0.0, 600.0), builders=(3, 1 << 20), builder_memory=(1, 2))
    with pytest.raises(ConfigError, match=r"^x\.rate must be between 0\.5 and 1e\+06, not nan$"):
        settings.check_ranges(SimpleNamespace(rate=math.nan), "x", rate=(0.5, 1e6))
