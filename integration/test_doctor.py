"""weenv doctor and the daemon's probe on filesystems that the kernel cannot mount EROFS from."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from weenv.core.errors import MountError
from weenv.plugin.snapshotter.mounts import filesystem_at, mount, unmount
from weenv.plugin.snapshotter.planes.erofs import probe_kernel
from weenv_testkit import tools
from weenv_testkit.node import Node


@pytest.fixture(params=["tmpfs", "overlay"])
def unfit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A filesystem's type and where one is mounted."""
    kind: str = request.param
    for name in ("lower", "upper", "work", "m"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work" if kind == "overlay" else ""
    mount(kind, f"{tmp_path}/m", kind, 0, options)
    try:
        yield kind, f"{tmp_path}/m"
    finally:
        unmount(f"{tmp_path}/m")


def doctor(directory: Path, root: str, plane: str = "auto") -> dict[str, dict[str, str]]:
    config = directory / "c.toml"
    config.write_text(f'[snapshotter]\nroot = "{root}"\nplane = "{plane}"\n')
    argv = [*tools.weenv(), "doctor", "--config", str(config), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return {row["name"]: row for row in json.loads(done.stdout)}


def test_a_root_that_erofs_cannot_be_mounted_from_is_named(unfit: tuple[str, str], tmp_path: Path) -> None:
    kind, place = unfit
    assert filesystem_at(place) == filesystem_at(f"{place}/not/yet") == kind
    found = doctor(tmp_path, f"{place}/not/yet", plane="erofs")["plane"]
    assert found["state"] == "fail" and f"on {kind}, which {place} is on" in found["seen"]
    assert "[snapshotter] root" in found["remedy"]
    assert os.listdir(place) == [], "doctor changes nothing"
    with pytest.raises(MountError, match=f"on {kind}"):
        probe_kernel(place)
    found = doctor(tmp_path, place)["plane"]
    assert found["state"] == "warn" and found["seen"].startswith("fuse: ") and f"on {kind}" in found["seen"]
    assert "[snapshotter] root" in found["remedy"]


def test_the_plane_that_is_asked_for_is_the_one_used(tmp_path: Path, workdir: str) -> None:
    for plane, seen in (("auto", "erofs: the kernel mounts"), ("erofs", "erofs: [snapshotter] plane"), ("fuse", "fuse: [sna")):
        found = doctor(tmp_path, workdir, plane)["plane"]
        assert found["state"] == "ok" and found["seen"].startswith(seen)


def test_the_probe_is_of_the_root_and_not_of_the_temporary_directory(tmp_path: Path, workdir: str) -> None:
    (tmp_path / "t").mkdir()
    mount("tmpfs", f"{tmp_path}/t", "tmpfs", 0, "")
    try:
        environment = {**os.environ, "TMPDIR": f"{tmp_path}/t"}
        config = tmp_path / "c.toml"
        config.write_text(f'[snapshotter]\nroot = "{workdir}/r"\n')
        argv = [*tools.weenv(), "doctor", "--config", str(config), "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
        found = {row["name"]: row["state"] for row in json.loads(done.stdout)}
        assert found["plane"] == "ok", done.stdout
    finally:
        unmount(f"{tmp_path}/t")


def test_a_node_that_works_has_nothing_to_mend(node: Node, tmp_path: Path) -> None:
    """And what is taken away from it is named: a daemon, the configuration, a registry."""

    def ask(*more: str) -> tuple[int, dict[str, dict[str, str]]]:
        argv = [*tools.weenv(), "doctor", "--config", node.run_config(), "--docker-config", f"{tmp_path}/daemon.json"]
        argv += ["--containerd-config", f"{node.containerd.home}/config.toml", "--json", *more]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        return done.returncode, {row["name"]: row for row in json.loads(done.stdout)}

    code, found = ask()
    states = {name: row["state"] for name, row in found.items()}
    assert code == 0, [row for row in found.values() if row["state"] == "fail"]
    well = "plane", "blobfs", "cache", "snapshotter", "containerd", "plugin", "proxy plugin", "disk abilities", "cgroups"
    for name in well:
        assert states[name] == "ok", found[name]
    assert all(row["remedy"] for row in found.values() if row["state"] in ("warn", "fail"))
    assert states[f"registry {node.containerd.registry}"] == "ok", "it is configured"
    code, found = ask("--registry", "127.0.0.1:1")
    assert (code, found["registry 127.0.0.1:1"]["state"]) == (1, "fail")
    (tmp_path / "daemon.json").write_text('{"storage-driver": "weenv"}')
    code, found = ask()
    assert (code, found["docker"]["state"]) == (1, "fail")
    (tmp_path / "daemon.json").unlink()
    node.blobfs.kill()
    try:
        code, found = ask()
        assert (code, found["blobfs"]["state"]) == (1, "fail") and "weenv serve" in found["blobfs"]["remedy"]
    finally:
        node.start_blobfs()
    assert ask()[0] == 0
