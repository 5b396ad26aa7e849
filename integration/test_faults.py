"""Kinds of faults that users of other snapshotters have reported, tried on a real node; docs/reliability.md lists all of them.

Here are those of unpacking and of clients that expect layers in containerd's content store.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import os
from collections.abc import Iterator

import pytest

from weenv.plugin.containerd.client import Client, ContainerdError
from weenv.plugin.containerd.types import LABEL_SNAPSHOT_REF, Mount
from weenv.plugin.snapshotter import mounts
from weenv_testkit import tools
from weenv_testkit.corpus import noise
from weenv_testkit.images import Layout, Member, busybox_members, write_tar
from weenv_testkit.kube import KubeNode, layer_digests, lazy_image
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import Failed, run, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store


@pytest.fixture(scope="module")
def module_node(line: str, home: str, registry: Registry, store: Store) -> Iterator[Node]:
    path = os.path.join(home, f"f{line}")
    os.mkdir(path)
    store.pause()
    with KubeNode(line, path, registry=registry.host, settings={"blobfs.fill": "enabled = false"}) as running:
        yield running


def check_mount(described: list[Mount], target: str) -> None:
    """Mount as containerd would, and look in."""
    os.makedirs(target, exist_ok=True)
    (mount,) = described
    flags = mounts.MS_BIND if mount.type == "bind" else 0
    mounts.mount(mount.source, target, mount.type, flags, "" if flags else ",".join(mount.options))
    try:
        with open(f"{target}/data/x", "rb") as file:
            assert file.read() == b"x\n"
    finally:
        mounts.unmount(target)


def test_kind_concurrent_mounts_of_one_layer(node: Node, registry: Registry, home: str) -> None:
    """Twenty Views and Prepares at once, on layers that a reboot has unmounted: each layer is mounted once, all are served."""
    if node.line == "1.7":
        pytest.skip("containerd has no part in it")
    ref = lazy_image(home, registry, f"race{node.line}", Member("data/x", b"x\n"))
    namespace = node.pull(ref)
    node.shell(ref, "cat /data/x", namespace)  # the file is local
    node.snapshotter.kill()
    for point in mounts.mounts_below(f"{node.root}/m"):
        mounts.detach(point)
    node.start_snapshotter()

    async def all_at_once() -> None:
        async with Client(node.socket) as client:
            snapshots = client.namespace("race").snapshots(SNAPSHOTTER)
            (top,) = [info.name for info in await snapshots.list() if info.labels.get(LABEL_SNAPSHOT_REF) == wanted]
            keys = [f"race/{number}" for number in range(20)]
            described = await asyncio.gather(
                *(snapshots.prepare(key, top) if number % 2 else snapshots.view(key, top) for number, key in enumerate(keys))
            )
            again = await asyncio.gather(*(snapshots.prepare("race/one", top) for _ in range(5)), return_exceptions=True)
            refused = [one for one in again if isinstance(one, ContainerdError)]
            assert [one.code for one in refused] == ["ALREADY_EXISTS"] * 4, "one key is one snapshot"
            for number, answer in enumerate(described):
                check_mount(answer, f"{home}/mnt{number}")
            for key in [*keys, "race/one"]:
                await snapshots.remove(key)

    wanted = top_chain(registry, ref)
    asyncio.run(all_at_once())
    with open("/proc/self/mountinfo") as file:
        points = [entry.point for entry in mounts.parse_mountinfo(file.read()) if entry.point.startswith(f"{node.root}/m/")]
    assert len(points) == len(set(points)), "nothing is mounted twice"


def top_chain(registry: Registry, ref: str) -> str:
    """The chainID of an image."""
    repository, _, tag = ref.partition("/")[2].rpartition(":")
    config = registry.manifest(repository, tag)[0]["config"]["digest"]  # type: ignore[index]
    with open(registry.blob_path(config)) as file:
        diff_ids = json.load(file)["rootfs"]["diff_ids"]
    chain: str = diff_ids[0]
    for diff_id in diff_ids[1:]:
        chain = "sha256:" + hashlib.sha256(f"{chain} {diff_id}".encode()).hexdigest()
    return chain


def test_kind_deletions_by_ordinary_layers_on_lazy_ones(node: Node, registry: Registry, home: str) -> None:
    """containerd unpacks the upper layer on top of ours: what it deletes has to be gone, whatever is mounted below."""
    name = f"mixed{node.line}"
    layout = Layout(os.path.join(home, f"l-{name}"))
    below = [
        *busybox_members(),
        *(Member(f"d/{each}", each.encode()) for each in ("kept", "gone", "changed")),
        Member.directory("opaque"),
        Member("opaque/hidden", b"hidden\n"),
        Member.directory("becomes"),
        Member("becomes/file", b"f\n"),
    ]
    above = [
        Member("d/.wh.gone"),
        Member("d/changed", b"new\n"),
        Member.directory("opaque"),
        Member("opaque/.wh..wh..opq"),
        Member("opaque/seen", b"seen\n"),
        Member("becomes", b"a file\n"),
    ]
    tars = [write_tar(f"{layout.directory}.{number}", members) for number, members in enumerate((below, above))]
    layout.image([layout.layer(tar) for tar in tars], name)
    layout.push(name, registry, f"kube/{name}", "plain")
    plain, _ = registry.manifest(f"kube/{name}", "plain")
    run(*tools.weenv(), "convert", f"oci:{layout.directory}:{name}", f"{registry.host}/kube/{name}:lazy", env=dict(os.environ))
    lazy, _ = registry.manifest(f"kube/{name}", "lazy")
    mixed = copy.deepcopy(lazy)
    mixed["layers"] = [lazy["layers"][0], plain["layers"][1]]  # type: ignore[index]
    registry.push_manifest(f"kube/{name}", "mixed", json.dumps(mixed).encode(), str(mixed["mediaType"]))
    ref = f"{registry.host}/kube/{name}:mixed"
    node.expect("image is not served lazily: .* not in the lazy format")
    layers = node.snapshotter.metric("weenv_snapshotter_lazy_layers_total")
    namespace = node.pull(ref)
    assert node.snapshotter.metric("weenv_snapshotter_lazy_layers_total") == layers + 1
    script = "cd /; ls d; cat d/changed; ls -A opaque; cat becomes; touch d/again; rm d/again d/kept; ls d"
    expected = ["changed", "kept", "new", "seen", "a file", "changed"]
    assert node.shell(ref, script, namespace).splitlines() == expected
    node.remove_image(ref, namespace)


def test_kind_content_that_was_discarded_after_another_snapshotter_had_unpacked_it(
    node: Node, registry: Registry, home: str
) -> None:
    """``discard_unpacked_layers`` with overlayfs, then the image with weenv: an error that says so, and a pull heals it."""
    ref = lazy_image(home, registry, f"switch{node.line}", Member("data/x", noise(1 << 20, 810)))
    namespace = "k8s.io" if node.line == "1.7" else "default"
    node.containerd.pull(ref, snapshotter="overlayfs", namespace=namespace)
    node.containerd.run(ref, "true", snapshotter="overlayfs", namespace=namespace)
    for digest in layer_digests(registry, ref):
        node.containerd.ctr("content", "rm", digest, namespace=namespace)
    node.expect("image is not served lazily: the client unpacks by itself and sends no labels .*hint=")
    with pytest.raises(Failed, match=r"content digest sha256:[0-9a-f]{64}: not found"):
        node.shell(ref, "echo ran", namespace)
    assert node.pull(ref) == namespace
    assert node.shell(ref, "wc -c < /data/x", namespace) == f"{1 << 20}\n"
    assert not set(layer_digests(registry, ref)) & node.containerd.content(namespace), "it is served lazily now"
    node.containerd.run(ref, "cat", "/data/x", snapshotter="overlayfs", namespace=namespace)
    node.remove_image(ref, namespace)


def test_kind_clients_that_want_layers_that_were_never_fetched(node: Node, registry: Registry, home: str) -> None:
    """Export, and another snapshotter: an error that names the layer, never an archive or a container with holes."""
    ref = lazy_image(home, registry, f"hole{node.line}", Member("data/x", noise(1 << 20, 820)))
    namespace = node.pull(ref)
    missing = "|".join(layer_digests(registry, ref))
    archive = os.path.join(home, f"hole{node.line}.tar")
    with pytest.raises(Failed, match=f"({missing}).*not found"):
        node.containerd.ctr("images", "export", archive, ref, namespace=namespace)
    with pytest.raises(Failed, match=f"({missing}).*not found"):
        node.containerd.run(ref, "echo", "ran", snapshotter="overlayfs", namespace=namespace)
    assert node.shell(ref, "wc -c < /data/x", namespace) == f"{1 << 20}\n", "neither has done any harm"
    node.remove_image(ref, namespace)
    node.containerd.collect()
    wait_until("the layer to go", lambda: layer_digests(registry, ref)[1] not in node.layers(), 60)
