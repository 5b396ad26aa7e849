"""Containers in user namespaces of their own on lazy and on ordinary layers: ids are mapped by mounts, nothing is copied.

containerd has the configuration that deploy/ ships, whose proxy plugin advertises ``remap-ids``; without it containerd
changes the owner of every file itself, and that has to come out right too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from weenv.plugin.snapshotter import mounts
from weenv_testkit import tools
from weenv_testkit.cri import NAMESPACE_POD, SCHEMA
from weenv_testkit.kube import KubeNode, pod_network
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import Failed, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store

MAP = 200_000
"""Where the node's ids of the container begin."""
CAPABILITY = 'capabilities = ["remap-ids"]'


def mapped(first: int = MAP) -> list[str]:
    """Flags of ``ctr run``."""
    return ["--uidmap", f"0:{first}:65536", "--gidmap", f"0:{first}:65536", "--remap-labels"]


@pytest.fixture(scope="module")
def module_node(line: str, home: str, workdir: str, registry: Registry, store: Store) -> Iterator[Node]:
    for path in (workdir, home):
        os.chmod(path, 0o711)  # the container's root is nobody on the node, and has to reach its own root directory
    path = os.path.join(home, f"u{line}")
    os.mkdir(path)
    store.pause()
    made = KubeNode(line, path, registry=registry.host, settings={"blobfs.fill": "enabled = false"})
    if line != "1.7":
        made.containerd.runc = tools.new_runc()  # without id-mapped mounts in runc, 2.x starts no pod in a user namespace
    with made as running:
        yield running


def id_mounts(node: Node) -> list[str]:
    """Where lower directories are mounted with mapped ids."""
    return sorted(mounts.mounts_below(f"{node.root}/i"))


def gone(node: Node) -> None:
    """Wait until no mount is left: containerd removes from the snapshotter when it collects."""
    node.containerd.collect()
    wait_until("the mounts to go", lambda: not id_mounts(node), 60)


def test_a_container_owns_its_files_and_nothing_is_copied_or_fetched_for_it(
    node: Node, store: Store, registry: Registry
) -> None:
    ref = store.lazy("debian")
    namespace = node.pull(ref)
    layers = registry.manifest("test/debian", "lazy")[0]["layers"]
    mark = registry.mark()
    script = """set -e
cat /proc/self/uid_map | tr -s ' '
stat -c '%n %u %g %a' / /etc/passwd /opt/weenv/sub /opt/weenv/suid-id
cd /opt/weenv
echo second line >> log; cat log
rm two; mv sub/three moved; cat moved
chown 7:8 marked; stat -c '%u %g' marked
mkdir -p new/deep; echo x > new/deep/file; stat -c '%u %g' new/deep/file
touch /root/ok /etc/ok; rm -r opaque; echo done
"""
    name = node.containerd.run_detached(
        ref, "sleep", "1000", snapshotter=SNAPSHOTTER, namespace=namespace, flags=mapped()
    )  # fmt: skip
    out = node.containerd.exec(name, "sh", "-c", script, namespace=namespace).splitlines()
    assert out[0].split() == ["0", str(MAP), "65536"]
    assert out[1:5] == ["/ 0 0 755", "/etc/passwd 0 0 644", "/opt/weenv/sub 0 1000 2775", "/opt/weenv/suid-id 0 0 4755"]
    assert out[5:] == ["first line", "second line", "linked", "7 8", "0 0", "done"]
    assert len(id_mounts(node)) == len(layers)  # type: ignore[arg-type]
    fetched = sum(registry.blob_bytes(mark).values())
    assert fetched < 0.2 * sum(layer["size"] for layer in layers)  # type: ignore[attr-defined]
    upper = os.path.join(node.rootfs(name, namespace), "opt/weenv/new/deep/file")
    assert os.stat(upper).st_uid == MAP, "on the node it is the container's own range"
    node.containerd.remove_container(name, namespace)
    gone(node)


def test_privileges_of_files_are_those_of_the_namespace(node: Node, store: Store) -> None:
    """suid and file capabilities give the namespace's root, and so nothing on the node."""
    ref = store.lazy("debian")
    namespace = node.pull(ref)
    flags = [*mapped(), "--user", "65534", "--allow-new-privs"]
    out = node.shell(ref, "id -u; /opt/weenv/suid-id -u; getcap /opt/weenv/capable", namespace, *flags).splitlines()
    assert out[:2] == ["65534", "0"]
    assert out[2].endswith("cap_net_raw=ep")


def test_pods_with_ranges_of_their_own_share_the_layers(node: Node, store: Store, registry: Registry) -> None:
    ref = store.lazy("pair")
    namespace = node.pull(ref)
    names = [
        node.containerd.run_detached(
            ref, "sleep", "1000", snapshotter=SNAPSHOTTER, namespace=namespace, flags=mapped(MAP + 65536 * n)
        )
        for n in range(3)
    ]
    mark = registry.mark()
    for number, name in enumerate(names):
        assert node.containerd.exec(name, "sh", "-c", "stat -c '%u %g' /data/7", namespace=namespace) == "0 0\n"
        node.containerd.exec(name, "sh", "-c", f"echo {number} > /mine; cat /data/* | wc -c", namespace=namespace)
        assert os.stat(os.path.join(node.rootfs(name, namespace), "mine")).st_uid == MAP + 65536 * number
    fetched = registry.blob_bytes(mark)
    sizes = {layer["digest"]: layer["size"] for layer in registry.manifest("test/pair", "lazy")[0]["layers"]}  # type: ignore[attr-defined]
    assert all(size <= sizes[digest] for digest, size in fetched.items()), "read three times, fetched once"
    plain = node.shell(ref, "stat -c '%u' /data/7; cat /mine 2>&- || echo none", namespace)
    assert plain.splitlines() == ["0", "none"], "whoever has no mapping sees the same layers as ever"
    for name in names:
        node.containerd.remove_container(name, namespace)


def test_ordinary_layers_are_mapped_alike(node: Node, store: Store) -> None:
    ref = store.plain("pair")
    node.expect("image is not served lazily")
    namespace = node.pull(ref)
    script = "stat -c '%u %g' /bin/busybox /data/3; echo x > /data/3; rm /data/4; cat /data/3; ls /data | wc -l"
    assert node.shell(ref, script, namespace, *mapped()).splitlines() == ["0 0", "0 0", "x", "19"]
    assert node.shell(ref, "ls /data | wc -l", namespace) == "20\n"
    node.remove_image(ref, namespace)


def test_mounts_are_there_again_after_a_restart_and_a_reboot(node: Node, store: Store) -> None:
    ref = store.lazy("pair")
    namespace = node.pull(ref)
    gone(node)
    name = node.containerd.run_detached(
        ref, "sleep", "1000", snapshotter=SNAPSHOTTER, namespace=namespace, flags=mapped()
    )  # fmt: skip
    node.containerd.exec(name, "sh", "-c", "echo kept > /kept", namespace=namespace)
    node.snapshotter.kill()
    node.start_snapshotter()
    assert len(id_mounts(node)) == 2
    assert node.containerd.exec(name, "sh", "-c", "cat /kept", namespace=namespace) == "kept\n"
    node.containerd.ctr("tasks", "kill", "--signal", "KILL", name, namespace=namespace)
    node.containerd.ctr("tasks", "delete", "--force", name, namespace=namespace)
    for point in id_mounts(node):
        mounts.detach(point)  # what a reboot does to them
    node.containerd.ctr("tasks", "start", "--detach", "--null-io", name, namespace=namespace)
    out = node.containerd.exec(name, "sh", "-c", "cat /kept; stat -c '%u %g' /kept /data/7", namespace=namespace)
    assert out.splitlines() == ["kept", "0 0", "0 0"]
    node.containerd.remove_container(name, namespace)
    gone(node)


def test_a_containerd_that_maps_ids_itself_is_left_to_it(
    line: str, home: str, registry: Registry, store: Store
) -> None:
    """Without ``remap-ids`` in its configuration it changes owners in a copy, and what we are given is not mapped again."""
    path = os.path.join(home, f"n{line}")
    os.mkdir(path)
    ref = store.lazy("pair")
    with KubeNode(line, path, registry=registry.host, without=f"  {CAPABILITY}\n") as node:
        namespace = node.pull(ref)
        script = "stat -c '%u %g' / /bin/busybox /data/7; echo x > /mine; stat -c '%u' /mine"
        assert node.shell(ref, script, namespace, *mapped()).splitlines() == ["0 0", "0 0", "0 0", "0"]
        assert not id_mounts(node)
        assert not node.complaints()
    shutil.rmtree(path, ignore_errors=True)


def test_where_layers_cannot_be_mapped_the_error_says_what_to_do(
    line: str, home: str, registry: Registry, store: Store
) -> None:
    """The fuse plane's file systems: the kernel maps none of them. What has no mapping runs, what has one is refused."""
    if line == "1.7":
        pytest.skip("containerd has no part in it")
    path = os.path.join(home, f"f{line}")
    os.mkdir(path)
    ref = store.lazy("pair")
    with KubeNode(line, path, registry=registry.host, settings={"snapshotter": 'plane = "fuse"'}) as node:
        namespace = node.pull(ref)
        assert node.shell(ref, "cat /etc/weenv-release", namespace) == "pair\n"
        node.expect("request failed: ids cannot be mapped on fuse")
        with pytest.raises(Failed, match=r"ids cannot be mapped on fuse.*remap-ids"):
            node.shell(ref, "true", namespace, *mapped())
        assert not id_mounts(node) and not node.complaints()
    shutil.rmtree(path, ignore_errors=True)


def test_a_pod_in_a_user_namespace(node: Node, store: Store, registry: Registry) -> None:
    """``hostUsers: false`` as kubelet asks for it: a range of ids for the pod, shared by all of its containers."""
    pod_network(node.containerd)
    gone(node)
    ref = store.lazy("pair")
    node.expect("image is not served lazily")  # the pause image is an ordinary one
    ids = [SCHEMA["IDMapping"](host_id=MAP + 7 * 65536, container_id=0, length=65536)]
    options = SCHEMA["NamespaceOption"](network=NAMESPACE_POD, userns_options=SCHEMA["UserNamespace"](uids=ids, gids=ids))
    with node.cri() as cri:
        cri.pull(ref)
        wait_until("the network to be known", lambda: cri.ready("NetworkReady"), 20, 0.1)
        pod = cri.run_pod("userns", options=options)
        try:
            for _ in range(2):
                container = cri.start_container(pod, ref, "sleep", "1000")
                script = "cat /proc/self/uid_map; stat -c '%u %g' / /data/7; echo x > /data/7; rm /data/8; ls /data | wc -l"
                out = cri.exec(container, ["sh", "-c", script]).splitlines()
                assert out[0].split() == ["0", str(MAP + 7 * 65536), "65536"]
                assert out[1:] == ["0 0", "0 0", "19"]
            assert len(id_mounts(node)) == 1 + 2 * 2, "pause has one layer"
        finally:
            cri.remove_pod(pod)
    gone(node)
