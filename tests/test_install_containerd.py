"""What containerd's configuration has to say, whatever it says already."""

from __future__ import annotations

import fnmatch
import tomllib

import pytest

from weenv.core.errors import ConfigError
from weenv.systemd.install import containerd, edits
from weenv.systemd.install.containerd import Reader, Wanted

MAIN = "/etc/containerd/config.toml"
DROP_IN = "/etc/containerd/conf.d/weenv.toml"
OLD, IMAGES = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images"
DEBIAN = 'version = 2\n[plugins."io.containerd.grpc.v1.cri".cni]\nbin_dir = "/usr/lib/cni"\n'


def configure(files: dict[str, str], line: int, *, cri: bool = False, remap: bool = True) -> tuple[dict[str, str], list[str]]:
    """The files afterwards, and which of those that were there have changed."""
    reader = Reader(files.get, lambda pattern: sorted(fnmatch.filter(files, pattern)))
    found = containerd.configure(reader, MAIN, Wanted("/run/s", "/data", line, cri=cri, remap=remap))
    after = {**files, found.path: found.text}
    if found.main is not None:
        after[MAIN] = found.main
    changed = []
    for path, changes in found.edits.items():
        text, undo = edits.edit_toml(after[path], changes, path)
        if undo:
            after[path] = text
            changed.append(path)
    return after, changed


def merged(files: dict[str, str]) -> dict[str, object]:
    """Proxy plugins and the tables of plugins as containerd 1.7 sees them: those of later files replace earlier ones."""
    proxies: dict[str, object] = {}
    plugins: dict[str, object] = {}
    pending, seen = [MAIN], set()
    while pending:
        path = pending.pop(0)
        if path in seen:
            continue
        seen.add(path)
        tree = tomllib.loads(files[path])
        proxies.update(tree.get("proxy_plugins", {}))
        plugins.update(tree.get("plugins", {}))
        for pattern in tree.get("imports", ()):
            pending += sorted(fnmatch.filter(files, pattern))
    return {"proxies": proxies, "plugins": plugins}


def check(files: dict[str, str], *, transfer: bool = True) -> dict[str, object]:
    found = merged(files)
    proxies, plugins = found["proxies"], found["plugins"]
    assert isinstance(proxies, dict) and isinstance(plugins, dict)
    assert proxies["weenv"] == {
        "type": "snapshot", "address": "/run/s", "capabilities": ["remap-ids"],
        "exports": {"root": "/data", "enable_remote_snapshot_annotations": "true"},
    }  # fmt: skip
    if transfer:
        names = [entry["snapshotter"] for entry in plugins[containerd.TRANSFER]["unpack_config"]]
        assert names == ["overlayfs", "weenv"]
    return plugins


@pytest.mark.parametrize(("line", "version"), [(1, 2), (2, 3)])
def test_where_there_is_none(line: int, version: int) -> None:
    files, changed = configure({}, line)
    assert tomllib.loads(files[MAIN]) == {"version": version, "imports": [DROP_IN]} and not changed
    assert tomllib.loads(files[DROP_IN])["version"] == version
    check(files)


@pytest.mark.parametrize("line", [1, 2])
def test_debians_is_extended_by_one_line(line: int) -> None:
    files, changed = configure({MAIN: DEBIAN}, line)
    assert changed == [MAIN] and {*files[MAIN].split("\n")} - {*DEBIAN.split("\n")} == {f'imports = ["{DROP_IN}"]'}
    assert tomllib.loads(files[DROP_IN])["version"] == 2, "no version above that of the main file"
    check(files)
    assert configure(files, line) == (files, [])


@pytest.mark.parametrize("pattern", ["/etc/containerd/conf.d/*.toml", "/etc/containerd/conf.d/w*"])
def test_a_directory_that_is_imported_already(pattern: str) -> None:
    main = f'version = 3\nimports = ["{pattern}"]\n'
    files, changed = configure({MAIN: main}, 2)
    assert not changed and files[MAIN] == main
    check(files)


@pytest.mark.parametrize("pattern", ["/etc/containerd/*.toml", "conf.d/*.toml", "/etc/containerd/conf.d/[a-v]*.toml"])
def test_patterns_that_do_not_name_the_drop_in(pattern: str) -> None:
    """A star matches no slash; and 1.7 looks for relative patterns where it was started."""
    files, changed = configure({MAIN: f'version = 2\nimports = ["{pattern}"]\n'}, 1)
    assert changed == [MAIN] and tomllib.loads(files[MAIN])["imports"] == [pattern, DROP_IN]


def test_tables_of_others_are_edited_where_they_are() -> None:
    """A drop-in with a plugin's table would take away the rest of it."""
    extra = "/etc/containerd/conf.d/mine.toml"
    files = {
        MAIN: f'version = 3\nimports = ["/etc/containerd/conf.d/*.toml"]\n[plugins."{containerd.TRANSFER}"]\nx = 1\n',
        extra: f'version = 3\n[plugins."{containerd.TRANSFER}"]\nconfig_path = "/certs"\n[plugins."{IMAGES}"]\ny = 1\n',
    }
    after, changed = configure(files, 2, cri=True)
    assert changed == [extra], "the last one counts"
    plugins = check(after)
    assert plugins[containerd.TRANSFER]["config_path"] == "/certs"  # type: ignore[index]
    assert plugins[IMAGES] == {"y": 1, "snapshotter": "weenv"}
    assert configure(after, 2, cri=True) == (after, [])


def test_a_list_of_unpackers_is_kept() -> None:
    listed = 'snapshotter = "overlayfs"\nplatform = "linux/arm64"\n'
    main = f'version = 3\n[[plugins."{containerd.TRANSFER}".unpack_config]]\n{listed}'
    files, changed = configure({MAIN: main}, 2)
    assert changed == [MAIN]
    entries = check(files)[containerd.TRANSFER]["unpack_config"]  # type: ignore[index]
    assert entries[0] == {"snapshotter": "overlayfs", "platform": "linux/arm64"} and len(entries) == 2


@pytest.mark.parametrize(
    ("main", "line", "expected"),
    [
        (DEBIAN, 1, {OLD: {"snapshotter": "weenv", "disable_snapshot_annotations": False}}),
        # 2.x takes the old table over only where it lists runtimes, so both have to say it
        (DEBIAN, 2, {OLD: {"snapshotter": "weenv"}, IMAGES: {"snapshotter": "weenv"}}),
        ("version = 3\n", 2, {IMAGES: {"snapshotter": "weenv"}}),
        ("", 1, {"cri": {"snapshotter": "weenv", "disable_snapshot_annotations": False}}),
    ],
)
def test_kubernetes(main: str, line: int, expected: dict[str, object]) -> None:
    files, _ = configure({MAIN: main}, line, cri=True)
    plugins = check(files, transfer=bool(main))
    for name, table in expected.items():
        assert isinstance(plugins[name], dict)
        found = plugins[name].get("containerd", plugins[name])
        assert found == table
    if main == DEBIAN:
        assert plugins[OLD]["cni"] == {"bin_dir": "/usr/lib/cni"}  # type: ignore[index]


def test_mapped_ids_only_where_they_work() -> None:
    files, _ = configure({}, 2, remap=False)
    assert "capabilities" not in tomllib.loads(files[DROP_IN])["proxy_plugins"]["weenv"]


@pytest.mark.parametrize(
    ("files", "cri", "said"),
    [
        ({MAIN: "version = "}, False, "not valid TOML"),
        ({MAIN: "version = 'x'\n"}, False, "no version"),
        ({MAIN: "version = 2\nimports = 'x'\n"}, False, "no list of files"),
        ({MAIN: "version = 2\nimports = ['/gone.toml']\n"}, False, "/gone.toml, which is not there"),
        ({MAIN: 'disabled_plugins = ["cri"]\n'}, True, "CRI is disabled"),
        ({MAIN: "version = 2\nplugins = 1\n"}, True, "no table"),
        ({MAIN: "disabled_plugins = 5\n"}, True, "disabled_plugins is no list"),
        ({MAIN: 'version = 2\n[plugins."io.containerd.transfer.v1.local"]\nunpack_config = 5\n'}, False, "no list"),
        ({MAIN: "version = 3\n"}, True, f"{MAIN}: containerd 1.7 cannot read version 3"),
        ({MAIN: "version = 3\n"}, False, f"{MAIN}: containerd 1.7 cannot read version 3"),
        ({MAIN: "version = 2\nimports = ['/x.toml']\n", "/x.toml": "version = 3\n"}, False, "/x.toml: containerd 1.7 cannot"),
    ],
)
def test_what_is_wrong_already_is_said(files: dict[str, str], cri: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        configure(files, 1, cri=cri)
