"""cli/nodechecks.py: what `weenv doctor` finds of disks, docker, NRI and control groups."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from weenv.cli import nodechecks
from weenv.cli.checks import Finding
from weenv.registry.groupref.keys import generate, public_pem


def states(found: Iterable[Finding]) -> dict[str, str]:
    """State by name; what is not well has a remedy."""
    rows = list(found)
    assert all(row.remedy for row in rows if row.state in ("warn", "fail"))
    return {row.name: row.state for row in rows}


def one(found: Iterable[Finding]) -> Finding:
    """The only finding."""
    (row,) = found
    assert row.remedy or row.state in ("ok", "skip")
    return row


# -- the policy --------------------------------------------------------------------------------------------------------


def test_a_policy_that_cannot_be_used_is_found(tmp_path: Path) -> None:
    assert nodechecks.policy({}).state == "ok"
    rule = {"match": ["registry.example/**"], "keys": [f"{tmp_path}/team.pub"]}
    found = nodechecks.policy({"policy": {"default": "deny", "rules": [rule]}})
    assert found.state == "fail" and found.remedy
    assert found.seen == f"policy.rules[0].keys: cannot read the key {tmp_path}/team.pub: No such file or directory"
    (tmp_path / "team.pub").write_bytes(public_pem(generate()))
    assert nodechecks.policy({"policy": {"default": "deny", "rules": [rule]}}).seen == (
        "1 rule, 1 key; what no rule matches: deny"
    )
    (tmp_path / "p.toml").write_text("[policy]\nrulse = []\n")
    found = nodechecks.policy({"policy": {"file": f"{tmp_path}/p.toml"}})
    assert found.state == "fail" and found.seen == "unknown setting p.toml.rulse" and found.remedy


# -- disk --------------------------------------------------------------------------------------------------------------


def test_a_disk_that_can_do_it_all(tmp_path: Path) -> None:
    assert states(nodechecks.disk_abilities(f"{tmp_path}/not/yet"))["disk abilities"] == "ok"
    assert os.listdir(tmp_path) == []


def test_what_a_disk_lacks_is_named_with_its_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(_fd: int) -> bool:
        raise OSError(95, "no")

    abilities = nodechecks._ABILITIES
    monkeypatch.setattr(nodechecks, "_ABILITIES", tuple((w, no if w == "leases" else t, c) for w, t, c in abilities))
    found = one(nodechecks.disk_abilities(str(tmp_path)))
    assert (found.state, found.seen) == ("warn", f"{tmp_path}: no leases")
    assert "the cache cannot be limited" in found.remedy
    monkeypatch.setattr(nodechecks, "_ABILITIES", tuple((w, no if "trusted" in w else t, c) for w, t, c in abilities))
    assert one(nodechecks.disk_abilities(str(tmp_path))).state == "fail"


def test_a_place_without_unnamed_files_is_not_tried() -> None:
    assert one(nodechecks.disk_abilities("/proc/self")).state == "skip"


def test_a_full_disk_is_not_said_to_lack_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> bool:
        raise OSError(28, "No space left on device")

    abilities = nodechecks._ABILITIES
    monkeypatch.setattr(nodechecks, "_ABILITIES", tuple((w, full if "holes" in w else t, c) for w, t, c in abilities))
    found = one(nodechecks.disk_abilities(str(tmp_path)))
    assert (found.state, found.remedy) == ("skip", "make room first") and "No space left" in found.seen


def test_few_inodes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)

    class Few:
        f_files, f_favail = 1000, 10

    assert real.f_files
    monkeypatch.setattr(os, "statvfs", lambda _path: Few)
    assert states(nodechecks.disk_abilities(str(tmp_path)))["inodes"] == "warn"


def test_daemons_with_different_directories() -> None:
    assert not list(nodechecks.settings("/r", "/b", "/r/", "/b"))
    assert "[blobfs] root is /q" in one(nodechecks.settings("/r", "/b", "/q", "/b")).seen
    assert "[blobfs] mountpoint is /c" in one(nodechecks.settings("/r", "/b", "/r", "/c")).seen


def test_the_cache() -> None:
    assert not list(nodechecks.cache(None))
    assert not list(nodechecks.cache({"cache": 5}))
    assert one(nodechecks.cache({"cache": {"data": 1 << 30, "high": 2 << 30}})).seen == "1.00 GiB; evicted from 2.00 GiB on"
    assert one(nodechecks.cache({"cache": {"data": 1, "high": None, "stuck": True}})).state == "warn"


@pytest.mark.parametrize(
    ("release", "warned"), [("6.8.0-x", True), ("6.9", False), ("6.18.44", False), ("5.15", True), ("?", True)]
)
def test_a_kernel_that_does_not_resend(release: str, warned: bool) -> None:
    found = nodechecks.resend(release)
    assert (found is not None) is warned
    assert found is None or found.state == "warn"


# -- docker ------------------------------------------------------------------------------------------------------------

ON = {"features": {"containerd-snapshotter": True}, "storage-driver": "weenv"}


@pytest.mark.parametrize(
    ("config", "state"),
    [
        (ON, "ok"),
        ({}, "skip"),
        ({"storage-driver": "overlay2"}, "skip"),
        ({"storage-driver": "weenv"}, "fail"),
        ({**ON, "features": {"containerd-snapshotter": "yes"}}, "fail"),
        ({**ON, "containerd": "unix:///run/c.sock"}, "ok"),
        ({**ON, "containerd": "/run/other.sock"}, "warn"),
        ({**ON, "features": {"containerd-snapshotter": True, "embedded-containerd": True}}, "fail"),
        ([], "fail"),
    ],
)
def test_docker(tmp_path: Path, config: object, state: str) -> None:
    path = tmp_path / "daemon.json"
    path.write_text(json.dumps(config))
    assert one(nodechecks.docker(str(path), "/run/c.sock")).state == state


def test_docker_that_is_not_there_or_broken(tmp_path: Path) -> None:
    assert not list(nodechecks.docker(f"{tmp_path}/none", "/x"))
    (tmp_path / "d").write_text("{")
    assert one(nodechecks.docker(f"{tmp_path}/d", "/x")).state == "fail"
    (tmp_path / "d").write_text("")
    assert one(nodechecks.docker(f"{tmp_path}/d", "/x")).state == "skip"
    (tmp_path / "d").write_text('{"storage-driver": "weenv"' + " " * (4 << 20) + "}")
    found = one(nodechecks.docker(f"{tmp_path}/d", "/x"))
    assert (found.state, found.seen) == ("warn", f"{tmp_path}/d is larger than {4 << 20} bytes"), "not: it is no JSON"


# -- NRI ---------------------------------------------------------------------------------------------------------------


def config_of(path: str, disable: bool | None = None) -> dict[str, Any]:
    """containerd's NRI table."""
    table = {"socket_path": path} | ({} if disable is None else {"disable": disable})
    return {"plugins": {"io.containerd.nri.v1.nri": table}}


@pytest.mark.parametrize(
    ("version", "disable", "state"),
    [
        ("1.7.24~ds1", None, "skip"), ("v2.1.9", None, "ok"), ("2.1.9", True, "skip"), ("1.7.24", False, "ok"),
        ("", None, "skip"),
    ],
)
def test_nri_is_on_by_version_and_setting(tmp_path: Path, version: str, disable: bool | None, state: str) -> None:
    path = f"{tmp_path}/nri.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        os.chmod(path, 0o600)
        listening.listen()
        found = one(nodechecks.nri(config_of(path, disable), version, path))
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody came: containerd would log it as a plugin that failed
            listening.accept()
    assert found.state == state
    assert ("13733" in found.seen) is (state == "ok"), "no containerd of today is free of the deadlock"


def test_nri_at_another_socket_or_none(tmp_path: Path) -> None:
    path = f"{tmp_path}/nri.sock"
    assert f'set [nri] socket = "{path}"' in one(nodechecks.nri(config_of(path), "2.1.9", "/var/run/nri/nri.sock")).remedy
    gone = one(nodechecks.nri(config_of(path), "2.1.9", path))
    assert (gone.state, "CRI" in gone.remedy) == ("warn", True)
    assert one(nodechecks.nri({}, "2.1.9", path)).state == "warn", "the default is not where the plugin goes"


# -- control groups ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "capabilities", "cgroups", "pressure"),
    [
        (["cg/cgroup.controllers", "psi/cpu"], 1 << 24, "v2", "ok"),
        (["cg/cgroup.controllers", "psi/cpu"], 0, "v2", "warn"),
        (["cg/cgroup.controllers"], 1 << 24, "v2", "warn"),
        (["cg/unified/x", "cg/cpu/x", "psi/cpu"], 1 << 24, "v1, with v2 beside it", "ok"),
        (["cg/cpu/x", "psi/cpu"], 1 << 24, "v1", "warn"),
        (["psi/cpu"], 1 << 24, "", None),
    ],
)
def test_control_groups(tmp_path: Path, made: list[str], capabilities: int, cgroups: str, pressure: str | None) -> None:
    for name in made:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "status").write_text(f"Name:\tx\nCapEff:\t{capabilities:016x}\n")
    found = list(nodechecks.control_groups(f"{tmp_path}/cg", f"{tmp_path}/psi", f"{tmp_path}/status"))
    assert states(found).get("pressure") == pressure
    assert found[0].seen == cgroups or (not cgroups and found[0].state == "warn")
