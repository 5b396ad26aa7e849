"""Images in the formats of others with both lines of containerd, all of the kit's odd layers, and eStargz by BuildKit."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from typing import Any

import pytest

from test_foreign import (  # noqa: F401 (collected here once more)
    Foreign,
    by_skopeo,
    chunked,
    compare,
    layers,
    test_every_layer_is_what_the_unpack_leaves,
    unpacked,
)
from weenv.plugin.snapshotter.status import collect
from weenv_testkit import corpus, tools, trees
from weenv_testkit.containerd import Containerd
from weenv_testkit.dockerd import Dockerd
from weenv_testkit.images import Member, busybox_members, write_tar
from weenv_testkit.node import Node
from weenv_testkit.procs import run, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store

pytestmark = pytest.mark.soak
NODE_SETTINGS = {"snapshotter": "foreign = true", "blobfs.fill": "enabled = false"}
"""What was not read is not there, so blobfs is needed."""


@pytest.fixture(scope="module")
def tars(store: Store) -> list[str]:
    """busybox, and all odd layers but the one whose names JSON cannot hold (test_names_that_are_not_utf8)."""
    return layers(store, {"base", *corpus.odd_layers()} - {"names"})


def in_seconds(tree: dict[bytes, trees.Entry]) -> dict[bytes, trees.Entry]:
    """Times in whole seconds, half of one rounded up (Go's time.Round): eStargz has no more."""
    return {
        path: replace(entry, mtime_ns=(entry.mtime_ns + 500_000_000) // 10**9 * 10**9) for path, entry in tree.items()
    }


def by_buildkit(plain: str, ref: str, home: str, registry: Registry) -> tuple[dict[str, Any], str, list[str]]:
    """Have the BuildKit in docker 26 push an image as eStargz; its manifest, digest and diffIDs.

    docker 28 as Debian builds it cannot: with a newer Go the footer does not come out at its 51 bytes, and BuildKit panics.
    """
    path = os.path.join(home, "buildkit")
    os.makedirs(f"{path}/context")
    with open(f"{path}/context/Dockerfile", "w") as file:
        file.write(f"FROM {plain}\n")
    output = f"type=image,name={ref},push=true,compression=estargz,force-compression=true,oci-mediatypes=true"
    with (
        Containerd("1.7", f"{path}/c", registry=registry.host) as own,
        Dockerd(f"{path}/d", own, snapshotter="overlayfs") as dockerd,
    ):
        dockerd.cli("buildx", "build", "--provenance=false", "--output", output, f"{path}/context")
    shutil.rmtree(path)
    repository, _, tag = ref.partition("/")[2].rpartition(":")
    manifest, digest = registry.manifest(repository, tag)
    config: Any = manifest["config"]
    with open(registry.blob_path(config["digest"]), "rb") as text:
        return manifest, digest, json.load(text)["rootfs"]["diff_ids"]


@pytest.fixture(scope="module")
def estargz(chunked: Foreign, home: str, registry: Registry) -> Foreign:  # noqa: F811
    """The same layers as eStargz."""
    ref = f"{registry.host}/foreign/odd:estargz"
    manifest, digest, diff_ids = by_buildkit(chunked.plain, ref, home, registry)
    return replace(chunked, ref=ref, manifest=manifest, digest=digest, diff_ids=diff_ids, keeps=in_seconds)


def test_estargz_layers_are_what_the_unpack_leaves(
    node: Node, estargz: Foreign, unpacked: list[str], registry: Registry,  # noqa: F811
) -> None:  # fmt: skip
    """But for fractions of seconds, which the format does not have."""
    assert all("containerd.io/snapshot/stargz/toc.digest" in layer["annotations"] for layer in estargz.manifest["layers"])
    mark = registry.mark()
    namespace = node.pull(estargz.ref)
    layers = {layer["digest"]: layer["size"] for layer in estargz.manifest["layers"]}
    assert node.containerd.content(namespace) >= {estargz.digest, estargz.manifest["config"]["digest"]}
    assert not node.containerd.content(namespace) & set(layers)
    assert node.shell(estargz.ref, "cat /etc/word", namespace) == "hello\n"
    assert sum(registry.blob_bytes(mark).values()) < 0.5 * sum(layers.values())
    compare(node, estargz, unpacked, namespace)


def modes(node: Node) -> dict[str, str]:
    """How each layer is served, as ``weenv status`` says it."""
    return {layer.digest: layer.mode for layer in collect(node.root).layers}


def test_a_complete_layer_is_served_from_the_plain_file(
    node: Node, chunked: Foreign, unpacked: list[str],  # noqa: F811
) -> None:  # fmt: skip
    """Everything was read by the comparison: chunks are checked once more, then the kernel reads the disk by itself."""
    namespace = node.pull(chunked.ref)
    compare(node, chunked, unpacked, namespace)
    digests = {layer["digest"] for layer in chunked.manifest["layers"]}
    wait_until("the disk to serve them", lambda: {modes(node)[digest] for digest in digests} == {"complete"}, 120, 0.5)
    assert node.blobfs.metric("weenv_blobfs_layers_unproven_total") >= len(digests)
    assert node.blobfs.metric("weenv_blobfs_diffid_mismatches_total") == 0
    compare(node, chunked, unpacked, namespace)
    said = run(*tools.weenv(), "status", "--config", node.config, env=dict(os.environ))
    assert "in the format of others:" in said and "zstd:chunked" in said


def test_it_survives_a_restart_of_everything(node: Node, chunked: Foreign) -> None:  # noqa: F811
    namespace = node.pull(chunked.ref)
    node.restart()
    expected = hashlib.sha256(corpus.noise(3 << 20)).hexdigest()
    assert node.shell(chunked.ref, "sha256sum /etc/noise", namespace).split()[0] == expected


def test_a_tail_that_the_disk_has_lost_is_made_again(
    node: Node, store: Store, registry: Registry, policy: str, home: str
) -> None:
    """Whoever reads waits for it: the table of contents is fetched and read by a child of the running blobfs."""
    late = corpus.noise(1 << 20, 77)
    tar = write_tar(os.path.join(home, f"tail-{node.line}.tar"), [*busybox_members(), Member("etc/late", late)])
    store.layout.image([store.layout.layer(tar)], f"tail-{node.line}")
    plain = store.layout.push(f"tail-{node.line}", registry, "foreign/tail", f"plain-{node.line}")
    ref = f"{registry.host}/foreign/tail:chunked-{node.line}"
    by_skopeo(policy, plain, ref, store)
    manifest, _ = registry.manifest("foreign/tail", f"chunked-{node.line}")
    (layer,) = manifest["layers"]
    namespace = node.pull(ref)
    toc = os.path.join(node.root, "layers", "sha256", layer["digest"].partition(":")[2], "toc")
    with open(toc, "r+b") as file:
        good = file.read()
        file.seek(len(good) // 2)
        file.write(b"the disk was here")
    node.expect("a stored tail is damaged")
    node.expect("a damaged tail has been replaced")
    node.restart()
    assert node.shell(ref, "sha256sum /etc/late", namespace).split()[0] == hashlib.sha256(late).hexdigest()
    with open(toc, "rb") as file:
        assert file.read() == good
    assert node.blobfs.metric("weenv_blobfs_tails_replaced_total") == 1


def test_names_that_are_not_utf8(node: Node, store: Store, registry: Registry, home: str) -> None:
    """The table of contents has lost them: that layer, and what is above it, is unpacked by containerd, which says why."""
    scratch = os.path.join(home, f"names-{node.line}")
    os.makedirs(scratch)
    members = [busybox_members(), corpus.odd_layers()["names"]]
    paths = [write_tar(f"{scratch}/{number}.tar", layer) for number, layer in enumerate(members)]
    store.layout.image([store.layout.layer(path) for path in paths], "names")
    plain = store.layout.push("names", registry, "foreign/names", "plain")
    ref = f"{registry.host}/foreign/names:estargz-{node.line}"
    by_buildkit(plain, ref, home, registry)
    node.expect("was not UTF-8 once")
    namespace = node.pull(ref)
    assert node.shell(ref, 'cat "/n/ "', namespace) == "n/ "
    assert node.snapshotter.metric("weenv_snapshotter_fallbacks_total", reason="unsupported") == 1
