"""What kubelet does with a node, through CRI, with the configuration that deploy/ ships for both containerd lines.

Pods, statistics, the image file system, garbage collection and private registries. test_lazy_containerd.py and
test_userns.py hold what is asked of images and of user namespaces.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from weenv.plugin.containerd.client import Client
from weenv_testkit.corpus import noise
from weenv_testkit.cri import EXITED, Cri
from weenv_testkit.images import Member
from weenv_testkit.kube import KubeNode, layer_digests, lazy_image
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import Failed, mounts_under, run, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store

NO_FILL = {"blobfs.fill": "enabled = false"}
NAMESPACE = "k8s.io"
USER, PASSWORD = "weenv", "secret pw"
HASH = "$2b$05$abcdefghijklmnopqrstuumsZc.XhT0ytj9DWn3tazXGoQsX4E3J2"
"""bcrypt of PASSWORD."""


def one_line_will_do(node_line: str) -> None:
    """For what does not depend on containerd."""
    if node_line == "1.7":
        pytest.skip("the same on 2.1")


@pytest.fixture(scope="module")
def module_node(line: str, home: str, registry: Registry, store: Store) -> Iterator[Node]:
    path = os.path.join(home, f"k{line}")
    os.mkdir(path)
    store.pause()
    with KubeNode(line, path, registry=registry.host, settings=NO_FILL) as running:
        yield running


@pytest.fixture
def cri(node: Node) -> Iterator[Cri]:
    with node.cri() as client:
        yield client


# -- the files that are shipped -------------------------------------------------------------------------------------------


def effective(node: Node, text: str) -> dict[str, object]:
    """What containerd makes of a main configuration that imports the node's drop-in."""
    path = os.path.join(node.containerd.home, "main.toml")
    with open(path, "w") as file:
        file.write(text)
    containerd = os.path.join(node.containerd.bin, "containerd")
    return tomllib.loads(run(containerd, "--config", path, "config", "dump", env=node.containerd.environment()))


def test_the_drop_in_leaves_what_the_operator_has_said_of_cri(node: Node) -> None:
    """kubeadm's SystemdCgroup is in the main file; a drop-in that said anything of CRI on 1.7 would undo it."""
    if node.line == "1.7":
        runtime = "plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc"
        section, images = "io.containerd.grpc.v1.cri", {}
    else:
        runtime = "plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc"
        section, images = "io.containerd.cri.v1.runtime", {"max_concurrent_downloads": 7}
    text = f'version = {2 if node.line == "1.7" else 3}\nimports = ["conf.d/*.toml"]\n'
    text += f"[{runtime}]\nruntime_type = 'io.containerd.runc.v2'\n[{runtime}.options]\nSystemdCgroup = true\n"
    if images:
        text += "[plugins.'io.containerd.cri.v1.images']\nmax_concurrent_downloads = 7\n"
    config = effective(node, text)
    proxy = config["proxy_plugins"][SNAPSHOTTER]  # type: ignore[index]
    assert proxy["exports"]["root"] == node.root
    assert proxy["capabilities"] == ["remap-ids"]
    plugins = config["plugins"]
    assert plugins[section]["containerd"]["runtimes"]["runc"]["options"]["SystemdCgroup"] is True  # type: ignore[index]
    if node.line != "1.7":
        said = plugins["io.containerd.cri.v1.images"]  # type: ignore[index]
        assert (said["snapshotter"], said["max_concurrent_downloads"]) == (SNAPSHOTTER, 7)


def test_doctor_finds_nothing_wrong_with_the_shipped_files(node: Node) -> None:
    from weenv.cli import checks

    config = node.containerd.config()
    drop_in = os.path.join(node.containerd.home, "conf.d", "weenv.toml")
    with open(drop_in) as file:
        text = file.read()
    findings = list(checks.containerd_config(text, node.socket, SNAPSHOTTER))
    if node.line == "1.7":  # CRI's lines are in the main file there
        lines = config.partition("[plugins.'io.containerd.grpc.v1.cri'.containerd]\n")[2].partition("[")[0]
        text += f"[plugins.'io.containerd.grpc.v1.cri'.containerd]\n{lines}"
        findings = list(checks.containerd_config(text, node.socket, SNAPSHOTTER))
    assert {finding.state for finding in findings} == {"ok"}, findings


# -- a pod's life -----------------------------------------------------------------------------------------------------------


def test_a_pod_lives_as_under_kubelet(node: Node, cri: Cri, store: Store) -> None:
    ref = store.lazy("debian")
    cri.pull(ref)
    status = cri.image(ref)
    assert status.id == store.image("debian").config and status.size > 0
    node.expect("image is not served lazily")  # the pause image is an ordinary one
    pod = cri.run_pod("life")
    container = cri.start_container(pod, ref, "sh", "-c", "trap 'exit 7' TERM; while :; do sleep 0.05; done")
    assert cri.exec(container, ["python3", "-c", "print(6 * 7)"]) == "42\n"
    with pytest.raises(Failed, match="ended with 3"):
        cri.exec(container, ["sh", "-c", "exit 3"])
    cri.stop_container(container, 30)
    status = cri.status(container)
    assert (status.state, status.exit_code) == (EXITED, 7), "it was asked to end before it was killed"
    second = cri.start_container(pod, ref, "sleep", "1000")
    assert cri.exec(second, ["cat", "/etc/weenv-release"]) == "top\n", "kubelet starts a new container for each attempt"
    cri.remove_container(second)
    cri.remove_container(container)
    cri.remove_pod(pod)
    wait_until("the snapshots of the pod to go", lambda: not active(node), 60)


def active(node: Node) -> list[str]:
    """Keys of active snapshots."""
    table = node.containerd.ctr("snapshots", "--snapshotter", SNAPSHOTTER, "ls", namespace=NAMESPACE).splitlines()
    return [line.split()[0] for line in table if line.split()[-1:] == ["Active"]]


def test_statistics_show_what_a_container_wrote(node: Node, cri: Cri, store: Store) -> None:
    ref = store.lazy("debian")
    cri.pull(ref)
    node.expect("image is not served lazily")
    pod = cri.run_pod("stats")
    container = cri.start_container(pod, ref, "sleep", "1000")
    cri.exec(container, ["sh", "-c", "head -c 8000000 /dev/urandom > /written; cat /usr/bin/perl > /dev/null"])

    def writable() -> int:
        return int(cri.stats(container).writable_layer.used_bytes.value)

    wait_until("the writable layer to be measured", lambda: writable() >= 8_000_000, 60)
    assert writable() < 9_000_000, "what lies below does not count"
    stats = cri.stats(container)
    assert stats.writable_layer.fs_id.mountpoint == node.root
    assert stats.writable_layer.inodes_used.value >= 2
    (listed,) = cri.list_stats(pod)
    assert listed.attributes.id == container
    assert listed.writable_layer.used_bytes.value == stats.writable_layer.used_bytes.value
    assert listed.memory.working_set_bytes.value > 0
    cri.remove_container(container)
    cri.remove_pod(pod)


# -- the image file system --------------------------------------------------------------------------------------------------


def filesystem(cri: Cri, node: Node) -> int:
    """Used bytes that kubelet sees at the snapshotter's root, which has to be the first it is told of."""
    first = cri.image_filesystems()[0]
    assert first.fs_id.mountpoint == node.root
    return int(first.used_bytes.value)


def test_the_image_file_system_is_the_snapshotters(node: Node, cri: Cri, home: str, registry: Registry) -> None:
    ref = lazy_image(home, registry, f"fs{node.line}", Member("data/x", noise(9 << 20, 700)))
    node.containerd.collect()  # what others left would go meanwhile
    asked = time.time_ns()
    wait_until("statistics that are new", lambda: cri.image_filesystems()[0].timestamp > asked)
    before = filesystem(cri, node)
    cri.pull(ref)
    wait_until("its layers to be measured", lambda: filesystem(cri, node) > before, 60)
    layers = sum(os.path.getsize(registry.blob_path(digest)) for digest in layer_digests(registry, ref))
    assert filesystem(cri, node) - before < layers / 4, "what was not fetched takes no room"
    # kubelet measures capacity and free space at that mount point by itself.
    assert os.path.ismount(node.root) or os.statvfs(node.root).f_blocks > 0
    cri.remove_image(ref)
    node.containerd.collect()
    wait_until("its layers to be forgotten", lambda: filesystem(cri, node) <= before, 60)


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has taken."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_measuring_reads_nothing_and_takes_no_time(node: Node, cri: Cri, store: Store, registry: Registry) -> None:
    """CRI asks for every active snapshot each ten seconds, and kubelet's eviction waits for the answer."""
    one_line_will_do(node.line)
    ref = store.lazy("debian")
    cri.pull(ref)
    node.expect("image is not served lazily")
    pod = cri.run_pod("usage")
    container = cri.start_container(pod, ref, "sleep", "1000")
    cri.exec(container, ["true"])
    mark = registry.mark()
    rounds = 20

    async def ask() -> tuple[int, int]:
        async with Client(node.socket) as client:
            snapshots = client.namespace(NAMESPACE).snapshots(SNAPSHOTTER)
            names = [info.name for info in await snapshots.list()]
            usages = [await snapshots.usage(name) for _ in range(rounds) for name in names]
            return len(usages), max(usage.size for usage in usages)

    before = cpu_seconds(node.snapshotter.pid)
    asked, largest = asyncio.run(ask())
    assert asked > 4 * rounds
    assert (cpu_seconds(node.snapshotter.pid) - before) / asked < 0.01, "CPU seconds for each answer"
    assert 0 < largest < 60 << 20, "what was fetched, not what the layers hold"
    assert not [request for request in registry.requests(mark) if request.blob]
    cri.remove_container(container)
    cri.remove_pod(pod)


# -- garbage collection, as kubelet does it --------------------------------------------------------------------------------


def collect_images(cri: Cri, used: set[str], enough: Callable[[], bool]) -> list[str]:
    """kubelet's image garbage collection: remove images that no container uses and that are not pinned, until ``enough``.

    pkg/kubelet/images/image_gc_manager.go (v1.34): images in use are those that containers name, sorted by last use.
    Gives the ids of those removed.
    """
    removed = []
    for found in cri.images():
        if enough():
            break
        if found.id in used or found.pinned:
            continue
        cri.remove_image(found.id)
        removed.append(found.id)
    return removed


def blocks(node: Node) -> int:
    """Bytes that the snapshotter's root takes on its disk."""
    return int(run("du", "-sxB1", node.root, check=False).split()[0])  # what goes meanwhile is no error


def test_kubelets_garbage_collection_frees_the_disk_and_spares_what_is_used(
    node: Node, cri: Cri, home: str, registry: Registry
) -> None:
    files = [Member("data/x", noise(6 << 20, 710 + number)) for number in range(3)]
    refs = [lazy_image(home, registry, f"gc{number}-{node.line}", file) for number, file in enumerate(files)]
    ids = [cri.pull(ref) for ref in refs]
    node.expect("image is not served lazily")
    pod = cri.run_pod("gc")
    kept = cri.start_container(pod, refs[0], "sleep", "1000")
    for ref in refs:
        container = cri.start_container(pod, ref, "sleep", "1000")
        assert cri.exec(container, ["sh", "-c", "cat /data/x | wc -c"]).strip() == str(6 << 20)
        cri.remove_container(container)
    full = blocks(node)
    mounted = len(mounts_under(f"{node.root}/m"))
    removed = collect_images(cri, {ids[0]}, lambda: False)
    assert set(ids[1:]) <= set(removed) and ids[0] not in removed
    node.containerd.collect()
    wait_until("the disk to be freed", lambda: full - blocks(node) > 2 * (6 << 20), 60)
    wait_until("the mounts to go", lambda: len(mounts_under(f"{node.root}/m")) <= mounted - 2, 60)
    gone = {digest for ref in refs[1:] for digest in layer_digests(registry, ref)} - set(layer_digests(registry, refs[0]))
    assert not gone & node.layers()
    assert cri.exec(kept, ["sh", "-c", "sha256sum /data/x | cut -c1-8"]), "the image in use is untouched"
    assert cri.image(refs[1]) is None and cri.image(refs[0]) is not None
    cri.pull(refs[1])
    again = cri.start_container(pod, refs[1], "sleep", "1000")
    assert cri.exec(again, ["sh", "-c", "cat /data/x | wc -c"]).strip() == str(6 << 20)
    cri.remove_pod(pod)
    for ref in refs[:2]:
        cri.remove_image(ref)


def test_a_removed_image_lives_as_long_as_its_container(node: Node, cri: Cri, home: str, registry: Registry) -> None:
    """kubelet never does that, but an operator with crictl does."""
    one_line_will_do(node.line)
    ref = lazy_image(home, registry, f"rm{node.line}", Member("data/x", noise(2 << 20, 720)), Member("data/y", b"y\n"))
    cri.pull(ref)
    node.expect("image is not served lazily")
    pod = cri.run_pod("rm")
    container = cri.start_container(pod, ref, "sleep", "1000")
    cri.remove_image(ref)
    node.containerd.collect()
    assert cri.exec(container, ["sh", "-c", "cat /data/x | wc -c; cat /data/y"]).split() == [str(2 << 20), "y"]
    cri.remove_pod(pod)
    node.containerd.collect()
    digest = layer_digests(registry, ref)[1]
    wait_until("the layer to go", lambda: digest not in node.layers(), 60)


# -- private registries ------------------------------------------------------------------------------------------------------


@contextmanager
def private(home: str, registry: Registry, node: Node) -> Iterator[Registry]:
    """A registry that serves what the other was pushed, to USER alone; containerd speaks plain HTTP to it."""
    with Registry(os.path.join(home, f"private{node.line}"), root=registry.root, login=(USER, HASH)) as own:
        folder = os.path.join(node.containerd.hosts, own.host)
        os.makedirs(folder)
        with open(os.path.join(folder, "hosts.toml"), "w") as file:
            file.write(f'server = "http://{own.host}"\n[host."http://{own.host}"]\ncapabilities = ["pull", "resolve"]\n')
        yield own


def test_an_image_of_a_private_registry(line: str, home: str, registry: Registry, store: Store) -> None:
    """What kubelet sends with a pull reaches containerd alone; the snapshotter has credentials of the node's, or says so."""
    one_line_will_do(line)
    path = os.path.join(home, f"p{line}")
    os.mkdir(path)
    logins = os.path.join(path, "docker.json")
    files = [Member(f"data/{number}", noise(3 << 20, 730 + number)) for number in range(3)]
    lazy_image(home, registry, f"own{line}", *files)
    settings = {**NO_FILL, "registry": f'docker_config = "{logins}"', "blobfs": "deadline = 3"}
    store.pause()

    def log_in(host: str) -> None:
        token = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        with open(logins + ".new", "w") as file:
            json.dump({"auths": {host: {"auth": token}}}, file)
        os.rename(logins + ".new", logins)  # as kubelet swaps a mounted secret

    with open(logins, "w") as file:
        file.write("{}")
    with KubeNode(line, path, registry=registry.host, settings=settings) as node, private(home, registry, node) as own:
        ref = f"{own.host}/kube/own{line}:lazy"
        with node.cri() as cri:
            with pytest.raises(Failed, match=r"(?i)401|authoriz"):
                cri.pull(ref)
            cri.pull(ref, (USER, PASSWORD))
            (said,) = [text for text in node.snapshotter.new_complaints() if "image is not served lazily" in text]
            assert "reason=unauthorized" in said and "docker_config" in said, said
            pod = cri.run_pod("private")
            container = cri.start_container(pod, ref, "sleep", "1000")
            assert cri.exec(container, ["sh", "-c", "cat /data/1 | wc -c"]).strip() == str(3 << 20), "unpacked, so it runs"
            cri.remove_container(container)
            cri.remove_image(ref)
            node.containerd.collect()

            log_in(own.host)
            lazily = node.snapshotter.metric("weenv_snapshotter_lazy_layers_total")
            cri.pull(ref, (USER, PASSWORD))
            assert node.snapshotter.metric("weenv_snapshotter_lazy_layers_total") == lazily + 2
            container = cri.start_container(pod, ref, "sleep", "1000")
            assert cri.exec(container, ["sh", "-c", "cat /data/0 | wc -c"]).strip() == str(3 << 20)

            # The node forgets them, and everything starts again: what is local is served, what is not is an error in time
            # that says why, and heals by itself.
            with open(logins, "w") as file:
                file.write("{}")
            node.expect("")
            node.restart()
            assert cri.exec(container, ["sh", "-c", "cat /data/0 | wc -c"]).strip() == str(3 << 20)
            begin = time.monotonic()
            with pytest.raises(Failed, match="Input/output error"):
                cri.exec(container, ["sh", "-c", "cat /data/2 | wc -c; cat /data/2 > /dev/null"])
            assert time.monotonic() - begin < 60
            assert "refused access" in node.blobfs.log_text()
            log_in(own.host)

            def healed() -> bool:
                try:
                    return cri.exec(container, ["sh", "-c", "cat /data/2 | wc -c"]).strip() == str(3 << 20)
                except Failed:
                    return False

            wait_until("reads to work again", healed, 60, 0.5)
            cri.remove_pod(pod)
            cri.remove_image(ref)
