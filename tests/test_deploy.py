"""What deploy/ ships agrees with the daemons' own defaults, with the services, and with the schemas of Kubernetes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from weenv.cli import checks
from weenv.environment import runconfig
from weenv.environment.gateway import config as gateway_config
from weenv.plugin.nri import config as elastic_config
from weenv.plugin.nri import nriconfig, serveconfig
from weenv.plugin.snapshotter.blobfs.config import from_table as blobfs_config
from weenv.plugin.snapshotter.config import SnapshotterConfig
from weenv.plugin.snapshotter.config import from_tables as snapshotter_config
from weenv.systemd.install import containerd

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
VERSIONS = ("1.30", "1.34")
"""Kubernetes versions of the schemas; image pulls by runtime handler are in all of them."""
FROM_ELSEWHERE = {"ConfigMap/weenv-plans", "Secret/weenv-registry"}
"""What the operator makes, or does without."""


def documents() -> list[tuple[str, dict[str, Any]]]:
    return [(path.name, document) for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]


def workloads() -> list[tuple[str, dict[str, Any]]]:
    return [(name, document) for name, document in documents() if document["kind"] == "DaemonSet"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", [path.name for path in MANIFESTS])
def test_manifests_are_what_kubernetes_takes(name: str, version: str) -> None:
    found = [document for where, document in documents() if where == name]
    assert found
    for document in found:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_refuse_what_kubernetes_would() -> None:
    _, document = workloads()[0]
    document["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0]["mountPropagation"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)


def test_everything_that_is_named_is_there() -> None:
    made = {f"{document['kind']}/{document['metadata']['name']}" for _, document in documents()}
    for name, document in workloads():
        pod = document["spec"]["template"]["spec"]
        assert document["spec"]["selector"]["matchLabels"] == document["spec"]["template"]["metadata"]["labels"]
        assert f"RuntimeClass/{pod['runtimeClassName']}" in made
        assert f"ServiceAccount/{pod['serviceAccountName']}" in made
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == set(volumes), name
        for volume in volumes.values():
            for kind, key in (("configMap", "name"), ("secret", "secretName")):
                if kind in volume:
                    wanted = f"{kind[0].upper()}{kind[1:]}/{volume[kind][key]}"
                    assert wanted in made | FROM_ELSEWHERE
                    assert wanted in made or volume[kind]["optional"]
        handler = next(d["handler"] for _, d in documents() if d["kind"] == "RuntimeClass")
        annotations = document["spec"]["template"]["metadata"]["annotations"]
        assert annotations["io.containerd.cri.runtime-handler"] == handler, "its own image is not to be lazy"


def test_the_configuration_is_one_and_leaves_the_paths_as_they_are(tmp_path: Path) -> None:
    (text,) = (document["data"]["config.toml"] for _, document in documents() if document["kind"] == "ConfigMap")
    tables = tomllib.loads(text)
    ours, defaults = snapshotter_config(tables), SnapshotterConfig()
    assert (ours.root, ours.socket, ours.blobs) == (defaults.root, defaults.socket, defaults.blobs)
    assert blobfs_config(tables["blobfs"]).mountpoint == ours.blobs
    path = tmp_path / "config.toml"
    path.write_text(text)
    assert runconfig.load(str(path)).run.namespace == "k8s.io"
    elastic = serveconfig.from_tables(tables)
    assert elastic_config.from_tables(tables) and nriconfig.from_tables(tables).enabled
    gateway = gateway_config.from_tables(tables)
    addresses = {ours.metrics_address, blobfs_config(tables["blobfs"]).metrics_address, elastic.metrics_address}
    assert len({*addresses, gateway.address}) == 4 and all(each.startswith("127.0.0.1:") for each in addresses)
    for _, document in workloads():
        for container in document["spec"]["template"]["spec"]["containers"]:
            if "readinessProbe" in container:
                probe = container["readinessProbe"]["httpGet"]
                assert f"{probe['host']}:{probe['port']}" in {*addresses, gateway.address}
            seen = {mount["mountPath"] for mount in container["volumeMounts"]}
            if container["name"] == "gateway":
                assert set(gateway.plans) <= seen


def test_paths_are_the_same_in_the_pod_and_on_the_node() -> None:
    """What the snapshotter answers is mounted by containerd, outside of the pod."""
    config = SnapshotterConfig()
    (document,) = (d for _, d in workloads() if d["metadata"]["name"] == "weenv")
    pod = document["spec"]["template"]["spec"]
    places = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    (container,) = pod["containers"]
    seen = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    for path in (config.root, config.socket.rpartition("/")[0]):
        mount = seen[path]
        assert places[mount["name"]] == path
        assert mount["mountPropagation"] == "Bidirectional"
    assert config.blobs.startswith("/run/weenv/")
    assert container["securityContext"]["privileged"], "Kubernetes refuses bidirectional mounts to others"
    assert pod["hostPID"], "the process that keeps the mount outlives the pod"


@pytest.mark.parametrize("name", ["weenv-1.7.toml", "weenv-2.toml"])
def test_drop_ins_name_the_default_paths(name: str) -> None:
    config = SnapshotterConfig()
    text = (DEPLOY / "containerd" / name).read_text()
    parsed = tomllib.loads(text)
    proxy = parsed["proxy_plugins"]["weenv"]
    assert proxy["address"] == config.socket
    assert proxy["exports"]["root"] == config.root
    assert parsed["version"] == (2 if "1.7" in name else 3)
    if "1.7" in name:
        assert "plugins" not in parsed, "there, a plugin's section in a second file replaces the first one's"
        merged = (DEPLOY / "containerd" / "cri-1.7.toml").read_text()
        text += merged
    assert proxy["capabilities"] == ["remap-ids"], "with rebase, 2.2 and newer unpack in parallel and lose lazy layers"
    states = {finding.state for finding in checks.containerd_config(text, config.socket)}
    assert states == {"ok"}


@pytest.mark.parametrize(("name", "line"), [("weenv-1.7.toml", 1), ("weenv-2.toml", 2)])
def test_drop_ins_say_what_weenv_install_writes(name: str, line: int) -> None:
    config = SnapshotterConfig()
    wanted = containerd.Wanted(config.socket, config.root, line, cri=True)
    written = containerd.configure(containerd.Reader(lambda _: None, lambda _: []), containerd.MAIN, wanted)
    ours, theirs = tomllib.loads((DEPLOY / "containerd" / name).read_text()), tomllib.loads(written.text)
    assert ours["proxy_plugins"] == theirs["proxy_plugins"]
    if line > 1:
        listed = [table["plugins"][containerd.TRANSFER]["unpack_config"] for table in (ours, theirs)]
        assert sorted(one["snapshotter"] for one in listed[0]) == sorted(one["snapshotter"] for one in listed[1])


def test_kind_services_that_run_out_of_descriptors() -> None:
    """A descriptor for each layer that is read, and one for each of its connections: the usual 1024 are not enough."""
    units = sorted((DEPLOY.parent / "systemd" / "units").glob("*.service"))
    assert len(units) >= 4
    for unit in units:
        (limit,) = [line for line in unit.read_text().splitlines() if line.startswith("LimitNOFILE=")]
        least = 1 << 20 if unit.stem in ("weenv-blobfs", "weenv-snapshotter") else 1 << 16
        assert int(limit.partition("=")[2]) >= least, unit.name
