"""Units and their like, made to fit a node's settings."""

from __future__ import annotations

import re
from importlib.resources import files as resources

import pytest

from weenv.core.errors import ConfigError
from weenv.plugin.nri.serveconfig import from_tables
from weenv.plugin.snapshotter.blobfs.config import BlobfsConfig
from weenv.plugin.snapshotter.config import SnapshotterConfig
from weenv.systemd.install import files
from weenv.systemd.install.files import OPTIONAL, Settings

ALL = Settings("/usr/bin/weenv", chosen=frozenset(OPTIONAL))


def texts(settings: Settings) -> dict[str, str]:
    """By name; those for sysusers.d and tmpfiles.d, which have the same, by the directory's."""
    found = {item.path: item.data.decode() for item in files.items(settings)}
    return {path.split("/")[-2 if path.endswith("/weenv.conf") else -1]: text for path, text in found.items()}


def test_the_defaults_are_those_of_the_daemons() -> None:
    lazy, lower, elastic = SnapshotterConfig(), BlobfsConfig(), from_tables({})
    assert (ALL.root, ALL.socket) == (lazy.root, lazy.socket)
    assert (ALL.status_socket, ALL.elastic_socket) == (lower.status_socket, elastic.socket)
    assert (ALL.containerd, ALL.elastic_root) == (elastic.address, elastic.root)
    shipped = {item.name: item.read_text() for item in (resources("weenv.systemd") / "units").iterdir()}
    assert {name: text for name, text in texts(ALL).items() if name in shipped} == {
        name: text for name, text in shipped.items() if name.startswith("weenv-") or name in ("weenv.slice", "weenv.target")
    }, "a package ships the files as they are"


def test_paths_are_the_nodes() -> None:
    found = texts(
        Settings(
            "/opt/w/bin/weenv", "/etc/w.toml", "/data/w", "/run/w/s", "/run/w/b", "/run/w/e", "/data/e/x", "[::1]:80",
            "/run/k3s/containerd/containerd.sock", "auto", frozenset(OPTIONAL),
        )
    )  # fmt: skip
    for name in ("blobfs", "snapshotter", "elastic", "nri", "gateway"):
        assert f"ExecStart=/opt/w/bin/weenv {name} serve --config /etc/w.toml\n" in found[f"weenv-{name}.service"]
    assert "ListenStream=/run/w/s\n" in found["weenv-snapshotter.socket"]
    assert "ListenStream=/run/w/b\n" in found["weenv-blobfs.socket"]
    assert "ListenStream=/run/w/e\n" in found["weenv-elastic.socket"]
    assert "ListenStream=[::1]:80\n" in found["weenv-gateway.socket"]
    assert "ReadWritePaths=/data/e /run/weenv -/run/k3s/containerd -/run/nri\n" in found["weenv-elastic.service"]
    assert "d /data/w 0711 root root -\n" in found["tmpfiles.d"] and "d /data/e 0711 root root -\n" in found["tmpfiles.d"]
    assert "u weenv-gateway" in found["sysusers.d"]
    del found["config.toml"]
    assert not re.search(r"/var/lib/weenv|/usr/bin/weenv|127\.0\.0\.1", "".join(found.values()))


@pytest.mark.parametrize(
    "settings",
    [
        Settings("/tmp/w/bin/weenv", chosen=frozenset(OPTIONAL)),
        Settings("/usr/bin/weenv", chosen=frozenset(OPTIONAL), interpreter="/var/tmp/w/bin/python"),
    ],
)
def test_a_command_in_tmp_is_in_sight_of_its_service(settings: Settings) -> None:
    hidden = [item.path for item in files.items(settings) if b"PrivateTmp=yes" in item.data]
    assert not hidden
    assert any(b"PrivateTmp=yes" in item.data for item in files.items(ALL))


@pytest.mark.parametrize(
    ("address", "listens"), [("localhost:5050", "127.0.0.1:5050"), ("0.0.0.0:1", "0.0.0.0:1"), ("unix:/run/g", "/run/g")]
)
def test_addresses_of_the_gateway(address: str, listens: str) -> None:
    found = texts(Settings("/w", gateway=address, chosen=frozenset({"gateway"})))
    assert f"ListenStream={listens}\n" in found["weenv-gateway.socket"]


def test_what_a_unit_cannot_say_is_refused() -> None:
    with pytest.raises(ConfigError, match="no names"):
        try:
            texts(Settings("/w", gateway="registry.example:80", chosen=frozenset({"gateway"})))
        except ConfigError as error:
            raise ConfigError(error.hint) from error
    for path in ("/a b", "/a%h", "/a\nUser=x", "relative", '/a"', "/a;b"):
        with pytest.raises(ConfigError, match="cannot name the path"):
            Settings("/w", root=path)


def test_only_what_is_chosen() -> None:
    assert not any("elastic" in name or "gateway" in name or "nri" in name for name in texts(Settings("/w")))
    assert {path.rpartition("/")[2] for path in files.links(Settings("/w"))} == {
        "weenv-blobfs.socket", "weenv-snapshotter.socket", "weenv-blobfs.service", "weenv-snapshotter.service", "weenv.target",
    }  # fmt: skip
    wanted = files.links(ALL)["/etc/systemd/system/sockets.target.wants/weenv-gateway.socket"]
    assert wanted == f"{files.UNITS}/weenv-gateway.socket"


def test_no_daemon_that_mounts_gets_a_mount_namespace() -> None:
    """systemd.exec(5): each of these makes one, in which mounts are not seen by containerd."""
    private = (
        "ProtectSystem", "ProtectHome", "PrivateTmp", "PrivateDevices", "PrivateMounts", "PrivateUsers", "PrivateIPC",
        "ProtectKernelTunables", "ProtectKernelModules", "ProtectKernelLogs", "ProtectControlGroups", "ProtectProc",
        "ProtectHostname", "ReadOnlyPaths", "ReadWritePaths", "InaccessiblePaths", "ExecPaths", "NoExecPaths", "MountAPIVFS",
        "TemporaryFileSystem", "BindPaths", "BindReadOnlyPaths", "MountFlags", "RootDirectory", "RootImage", "DynamicUser",
        "LogNamespace", "ProcSubset",
    )  # fmt: skip
    for name in ("blobfs", "snapshotter"):
        text = texts(ALL)[f"weenv-{name}.service"]
        assert not [line for line in text.splitlines() if line.partition("=")[0] in private]
        assert "KillMode=process\n" in text, "the processes that keep mounts alive outlive the daemon"


def test_the_first_configuration_means_the_defaults() -> None:
    import tomllib

    assert tomllib.loads(files.FIRST_CONFIG) == {}
    settings = tomllib.loads(re.sub(r"^#(?=[\[a-z])", "", files.FIRST_CONFIG, flags=re.MULTILINE))
    assert set(settings) == {"registry", "snapshotter", "blobfs"}, "and what it suggests can be had by taking the # away"
