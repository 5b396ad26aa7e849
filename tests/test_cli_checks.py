"""cli/checks.py: what `weenv doctor` finds in containerd configurations, on disks and sockets."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest
from simulator.pushable import PushableRegistry

from weenv.cli import checks, doctor

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


# -- a configuration of several files ----------------------------------------------------------------------------------


def of_files(folder: Path, files: dict[str, str], version: str = "2.1.9") -> tuple[dict[str, str], str]:
    """State by name, and what was seen and is to be done; ``c.toml`` is the main file."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("TMP", str(folder)))
    found, _ = doctor._containerd(str(folder / "c.toml"), "/run/weenv/snapshotter.sock", "weenv", version)
    assert all(each.remedy for each in found if each.state in ("warn", "fail"))
    return {each.name: each.state for each in found}, " ".join(f"{each.seen} {each.remedy}" for each in found)


@pytest.mark.parametrize("pattern", ["TMP/conf.d/weenv.toml", "TMP/conf.d/*.toml", "conf.d/weenv.toml", "./x/../conf.d/w*"])
def test_imports_are_followed(tmp_path: Path, pattern: str) -> None:
    states, said = of_files(tmp_path, {"c.toml": f'version = 3\nimports = ["{pattern}"]\n', "conf.d/weenv.toml": GOOD_3})
    assert set(states.values()) == {"ok"}, said
    assert {"proxy plugin", "transfer service", "CRI"} <= set(states)


def test_what_weenv_install_makes_has_no_complaint(tmp_path: Path) -> None:
    from weenv.systemd.install.containerd import Reader, Wanted, configure

    main = str(tmp_path / "c.toml")
    made = configure(Reader(lambda _: None, lambda _: []), main, Wanted("/run/weenv/snapshotter.sock", "/data", 2))
    states, said = of_files(tmp_path, {"c.toml": made.main or "", made.path: made.text})
    assert set(states.values()) <= {"ok", "skip"} and states["transfer service"] == "ok", said


def test_an_import_of_an_import(tmp_path: Path) -> None:
    files = {"c.toml": 'version = 3\nimports = ["a/b.toml"]\n', "a/b.toml": 'imports = ["c.toml"]\n', "a/c.toml": GOOD_3}
    assert set(of_files(tmp_path, files)[0].values()) == {"ok"}


@pytest.mark.parametrize("version", ["1.7.24", "2.1.9", ""])
def test_a_later_file_replaces_a_proxy_plugin(tmp_path: Path, version: str) -> None:
    other = '[proxy_plugins.weenv]\ntype = "snapshot"\naddress = "/other"\n'
    states, said = of_files(tmp_path, {"c.toml": f'imports = ["z.toml"]\n{GOOD_2}', "z.toml": other}, version)
    assert states["proxy plugin"] == "fail" and "/other" in said
    assert states["exports.root"] == "warn", "those of the first file are gone"


@pytest.mark.parametrize(("version", "state"), [("1.7.24~ds1", "skip"), ("", "skip"), ("2.0.0", "ok"), ("v2.1.9", "ok")])
def test_a_plugins_table_is_replaced_by_1_7_and_merged_from_2_0_on(tmp_path: Path, version: str, state: str) -> None:
    later = "[plugins.'io.containerd.grpc.v1.cri'.cni]\nbin_dir = '/cni'\n"
    files = {"c.toml": f'imports = ["z.toml"]\n{GOOD_2}', "z.toml": later}
    assert of_files(tmp_path, files, version)[0]["CRI"] == state
    files["z.toml"] = "[plugins.'io.containerd.nri.v1.nri']\ndisable = true\n"
    assert of_files(tmp_path, files, version)[0]["CRI"] == "ok", "it is another plugin's"


def test_a_list_of_a_later_file_replaces_the_list(tmp_path: Path) -> None:
    head = "[plugins.'io.containerd.transfer.v1.local']\n"
    files = {"c.toml": f'imports = ["z.toml"]\n{GOOD_3}', "z.toml": f"{head}max_concurrent_downloads = 7\n"}
    for version in ("2.1.9", ""):  # where none answers, the file's version says that it is none of 1.7
        assert of_files(tmp_path, files, version)[0]["transfer service"] == "ok"
    files["z.toml"] = f"{head}unpack_config = [{{snapshotter = 'native'}}]\n"
    assert of_files(tmp_path, files)[0]["transfer service"] == "fail"


def test_a_drop_in_of_a_newer_version_is_warned_of(tmp_path: Path) -> None:
    states, said = of_files(tmp_path, {"c.toml": f'imports = ["z.toml"]\n{GOOD_2}', "z.toml": "version = 3\n"})
    assert states.pop("containerd config") == "warn" and "z.toml has version 3, the main file 2" in said
    assert set(states.values()) == {"ok"}
    states, said = of_files(tmp_path, {"c.toml": 'version = 0\nimports = ["z.toml"]\n', "z.toml": ""})
    assert states["containerd config"] == "warn" and "z.toml has version 1, the main file 0" in said


def test_imports_in_a_circle_end(tmp_path: Path) -> None:
    files = {"c.toml": f'imports = ["b.toml", "c.toml", "*.toml"]\n{GOOD_3}', "b.toml": 'imports = ["c.toml", "./b.toml"]\n'}
    assert set(of_files(tmp_path, files)[0].values()) == {"ok"}
    (tmp_path / "l").symlink_to(".")  # each time by another name
    states, said = of_files(tmp_path, {"c.toml": f'imports = ["l/c.toml"]\n{GOOD_3}'})
    assert states == {"containerd config": "fail"} and "circles" in said


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({"c.toml": 'imports = ["none.toml"]\n'}, "none.toml, which is not there"),
        ({"c.toml": 'imports = ["b.toml"]\n', "b.toml": "x ="}, "b.toml is not valid TOML"),
        ({"c.toml": "imports = 3\n"}, "imports is no list"),
        ({"c.toml": "plugins = 3\n"}, "plugins is no table"),
        ({"c.toml": "proxy_plugins = []\n"}, "proxy_plugins is no table"),
        ({"c.toml": 'version = "3"\n'}, "version is '3'"),
        ({"c.toml": 'imports = ["/dev/zero"]\n'}, "no regular file"),
        ({"c.toml": 'imports = ["/dev/null/x"]\n'}, "not there"),
        ({"c.toml": 'imports = ["a\\u0000b"]\n'}, "null"),
        ({"c.toml": 'imports = ["."]\n'}, "no regular file"),
        ({"c.toml": 'imports = ["b.toml"]\n', "b.toml": "#" * (5 << 20)}, "larger than"),
        ({"c.toml": 'imports = ["b*"]\n', **{f"b{n}": f"# {n}" + "x" * 300_000 for n in range(6)}}, "imports too much"),
        ({"c.toml": 'imports = ["b*"]\n', **{f"b{n}": "" for n in range(120)}}, "imports too much"),
        ({"c.toml": 'imports = [' + '"*.x", ' * 2000 + ']\n'}, "more than 1000 imports"),
        ({"c.toml": 'imports = ["*/*/*"]\n'}, "wildcards"),
    ],
)  # fmt: skip
def test_imports_that_are_wrong_or_without_end_are_one_finding(tmp_path: Path, files: dict[str, str], word: str) -> None:
    began = time.monotonic()
    states, said = of_files(tmp_path, files)
    assert states == {"containerd config": "fail"} and word in said
    assert time.monotonic() - began < 60


def test_a_configuration_that_is_not_utf_8_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(b"\xff")
    assert of_files(tmp_path, {})[0] == {"containerd config": "fail"}
    (tmp_path / "c.toml").unlink()
    states, said = of_files(tmp_path, {})
    assert states == {"containerd config": "fail"} and "--containerd-config" in said


@pytest.mark.parametrize("line", ["exports = 3", "exports = []", "capabilities = 3", 'capabilities = {rebase = 1}'])
def test_values_of_other_kinds_are_no_crash(line: str) -> None:
    text = f'version = 3\n[proxy_plugins.weenv]\ntype = "snapshot"\naddress = "/run/weenv/snapshotter.sock"\n{line}\n'
    assert states(text)["exports.root"] == "warn"


def test_sockets_that_are_not_connected_to(tmp_path: Path) -> None:
    path = f"{tmp_path}/s"
    assert checks.quiet_socket("x", path, "start it").state == "fail"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        assert "nothing listens" in checks.quiet_socket("x", path, "start it").seen
        server.listen()
        server.setblocking(False)
        (tmp_path / "l").symlink_to(tmp_path)
        for name in (path, f"{tmp_path}/l/s", f"{tmp_path}/./s"):
            assert checks.quiet_socket("x", name, "start it").state == "ok"
        with pytest.raises(BlockingIOError):
            server.accept()
        assert checks.quiet_socket("x", path, "start it", f"{tmp_path}/none").state == "ok", "nobody says that nothing listens"
        (tmp_path / "t").write_text(f"Num\n0: 0 0 zz 1 1 9 {path}\n0: 0 0 00010000\n")
        assert checks.quiet_socket("x", path, "start it", f"{tmp_path}/t").state == "fail"
    assert "nothing listens" in checks.quiet_socket("x", path, "start it").seen, "the file stays, the server is gone"
    assert "no socket" in checks.quiet_socket("x", str(tmp_path), "start it").seen
    assert checks.quiet_socket("x", "a\0b", "start it").state == "fail"


async def test_what_keeps_a_registry_from_being_read_is_told(tmp_path: Path) -> None:
    for name, text in (("good.example", 'server = "https://a"\n'), ("bad.example", "server = [\n"), ("none", "")):
        (tmp_path / f"certs.d/{name}").mkdir(parents=True)
        (tmp_path / f"certs.d/{name}/hosts.toml").write_text(text)
    logins = tmp_path / "config.json"
    config = tmp_path / "c.toml"
    config.write_text(f'[registry]\nconfig_path = "{tmp_path}/certs.d:/none"\ndocker_config = "{logins}"\nattempts = 1\n')
    async with PushableRegistry(auth="basic", user=("user", "x")) as sim:
        logins.write_text("{}")
        mirrors, registry = await doctor._registries([sim.host], str(config))
        assert (mirrors.name, mirrors.state) == ("hosts.toml", "warn") and mirrors.remedy
        assert mirrors.seen.startswith(f"{tmp_path}/certs.d/bad.example/hosts.toml: not TOML")
        assert registry.state == "ok" and "no login" in registry.seen
        logins.write_text(json.dumps({"auths": {sim.host: {"username": "user", "password": "x"}}}))
        _, registry = await doctor._registries([sim.host], str(config))
        assert registry.state == "ok" and "no login" not in registry.seen


def test_a_plugin_that_containerd_only_has_to_read_wants_a_restart() -> None:
    absent = checks.Finding("plugin", "fail", "the running containerd has no snapshotter 'weenv'", "declare it")
    (found,) = doctor._to_restart([absent], list(checks.containerd_config(GOOD_3, "/run/weenv/snapshotter.sock")))
    assert found.remedy.startswith("its configuration has it: restart containerd")
    assert doctor._to_restart([absent], list(checks.containerd_config("version = 3", "/s"))) == [absent]


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


def test_a_disk_with_no_room_is_a_failure_and_small_ones_have_small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_frsize, f_blocks, f_bavail, f_bfree = 4096, 76_800, 0, 255

    monkeypatch.setattr(os, "statvfs", lambda _path: Full)
    found = checks.disk("/x")
    assert (found.state, found.seen) == ("fail", "/x: 0 B free of 300 MiB") and "cache prune" in found.remedy
    Full.f_bfree = 256
    assert checks.disk("/x").state == "warn"


def test_kernel_reports_what_the_kernel_says() -> None:
    found = {f.name: f for f in checks.kernel()}
    assert os.uname().release in found["kernel"].seen
    assert all(f.state == "ok" or f.remedy for f in found.values())


def test_id_mapping_is_advertised_only_where_it_works() -> None:
    assert checks.id_mapping(["remap-ids"], "erofs").state == "ok"
    assert checks.id_mapping([], "erofs").state == "skip"
    refused = checks.id_mapping(["remap-ids"], "fuse")
    assert refused.state == "warn" and "take it out" in refused.remedy
