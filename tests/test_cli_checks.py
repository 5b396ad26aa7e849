"""cli/checks.py: what `weenv doctor` finds in containerd configurations, on disks and sockets."""

from __future__ import annotations

import os
import socket

import pytest

from weenv.cli import checks

GOOD_3 = """
version = 3
[proxy_plugins.weenv]
  type = "snapshot"
  address = "/run/weenv/snapshotter.sock"
  [proxy_plugins.weenv.exports]
    root = "/var/lib/weenv"
    enable_remote_snapshot_annotations = "true"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'weenv'
[[plugins.'io.containerd.transfer.v1.local'.unpack_config]]
  platform = 'linux/amd64'
  snapshotter = 'weenv'
[[plugins.'io.containerd.transfer.v1.local'.unpack_config]]
  platform = 'linux/amd64'
  snapshotter = 'overlayfs'
"""

GOOD_2 = """
version = 2
[proxy_plugins.weenv]
  type = "snapshot"
  address = "/run/weenv/snapshotter.sock"
  [proxy_plugins.weenv.exports]
    root = "/var/lib/weenv"
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "weenv"
  disable_snapshot_annotations = false
"""


def states(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for finding in checks.containerd_config(text, "/run/weenv/snapshotter.sock"):
        if found.get(finding.name, "ok") in ("ok", "skip"):
            found[finding.name] = finding.state
        assert finding.state in ("ok", "skip") or finding.remedy
    return found


@pytest.mark.parametrize("text", [GOOD_2, GOOD_3])
def test_right_configurations_have_no_complaint(text: str) -> None:
    assert set(states(text).values()) == {"ok"}


@pytest.mark.parametrize(
    ("change", "name", "state"),
    [
        (("/run/weenv/snapshotter.sock", "/run/other.sock"), "proxy plugin", "fail"),
        (("[proxy_plugins.weenv]", "[proxy_plugins.other]"), "proxy plugin", "fail"),
        (('type = "snapshot"', 'type = "snapshot"\n  capabilities = ["rebase"]'), "capabilities", "fail"),
        (('    root = "/var/lib/weenv"\n', ""), "exports.root", "warn"),
        (('"true"', "true"), "remote annotations", "warn"),
        (("snapshotter = 'overlayfs'", "snapshotter = 'native'"), "transfer service", "warn"),
        (("'io.containerd.transfer.v1.local'", "'other'"), "transfer service", "fail"),
        (("snapshotter = 'weenv'", "snapshotter = 'overlayfs'"), "CRI", "skip"),
    ],
)
def test_each_fault_of_a_version_3_file_is_named(change: tuple[str, str], name: str, state: str) -> None:
    assert states(GOOD_3.replace(*change))[name] == state


def test_cri_without_annotations_is_a_fault_on_1_7() -> None:
    assert states(GOOD_2.replace("disable_snapshot_annotations = false", ""))["CRI"] == "fail"


def test_broken_toml_is_one_finding() -> None:
    assert states("version = ") == {"containerd config": "fail"}


def test_sockets(tmp_path: object) -> None:
    path = f"{tmp_path}/s"
    assert checks.unix_socket("x", path, "start it").state == "fail"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        os.chmod(path, 0o755)
        assert checks.unix_socket("x", path, "start it").state == "warn"
        os.chmod(path, 0o600)
        assert checks.unix_socket("x", path, "start it").state == "ok"


def test_disk_looks_at_the_nearest_existing_directory(tmp_path: object) -> None:
    assert checks.disk(f"{tmp_path}/not/yet", low=0.0).state == "ok"
    assert checks.disk(f"{tmp_path}/not/yet", low=1.1).state == "warn"


def test_kernel_reports_what_the_kernel_says() -> None:
    found = {f.name: f for f in checks.kernel()}
    assert os.uname().release in found["kernel"].seen
    assert all(f.state == "ok" or f.remedy for f in found.values())


def test_id_mapping_is_advertised_only_where_it_works() -> None:
    assert checks.id_mapping(["remap-ids"], "erofs").state == "ok"
    assert checks.id_mapping([], "erofs").state == "skip"
    refused = checks.id_mapping(["remap-ids"], "fuse")
    assert refused.state == "warn" and "take it out" in refused.remedy
