"""Images that others made lazy, in their own formats: started as they are, with no conversion, from what is read.

Here zstd:chunked by skopeo (containers/storage); eStargz by BuildKit is in test_foreign_soak.py. The trees are compared with
containerd's own unpack of the ordinary image.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import pytest

from weenv_testkit import corpus, trees
from weenv_testkit.containerd import Containerd
from weenv_testkit.images import Member, busybox_members, write_tar
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.registry import Registry
from weenv_testkit.skopeo import skopeo
from weenv_testkit.store import Store
from weenv_testkit.views import chain_of, unpack_times, view

NODE_SETTINGS = {"snapshotter": "foreign = true"}
SOME = ("base", "links", "times", "xattrs", "whiteouts", "opaque")
"""Which of the kit's odd layers; all of them are in test_foreign_soak.py."""


@dataclass(frozen=True)
class Foreign:
    """An image in the registry, its ordinary one, and the tars of its layers."""

    ref: str
    plain: str
    tars: list[str]
    manifest: dict[str, Any]
    digest: str
    diff_ids: list[str]
    keeps: Callable[[dict[bytes, trees.Entry]], dict[bytes, trees.Entry]]
    """What is left of a tree in the format, as its producer makes it."""


def without_empty(tree: dict[bytes, trees.Entry]) -> dict[bytes, trees.Entry]:
    """Without extended attributes that have no value, which skopeo leaves out."""
    return {path: replace(entry, xattrs=tuple(pair for pair in entry.xattrs if pair[1])) for path, entry in tree.items()}


@pytest.fixture(scope="module")
def tars(store: Store) -> list[str]:
    """busybox with a large file, and some of the kit's odd layers on it."""
    return layers(store, SOME)


def layers(store: Store, names: Collection[str]) -> list[str]:
    """busybox with a large file, and the kit's odd layers of these names."""
    os.makedirs(os.path.join(store.directory, "odd"), exist_ok=True)
    base = [*busybox_members(), Member("etc/word", b"hello\n"), Member("etc/noise", corpus.noise(3 << 20))]
    path = write_tar(os.path.join(store.directory, "foreign-base.tar"), base)
    odd = corpus.odd(os.path.join(store.directory, "odd"))
    return [path, *(tar for tar in odd if os.path.basename(tar).partition("-")[2].removesuffix(".tar") in names)]


@pytest.fixture(scope="module", params=["2.1"])
def line(request: pytest.FixtureRequest) -> str:
    """One line: what differs between containerd's is how images are pulled, which is not the format's affair."""
    return str(request.param)


def by_skopeo(policy: str, plain: str, ref: str, store: Store) -> None:
    """Have skopeo push an image as zstd:chunked."""
    layout = f"oci:{store.directory}/chunked:{ref.rpartition('/')[2].replace(':', '-')}"
    flags = ("--dest-compress", "--dest-compress-format", "zstd:chunked", "--src-tls-verify=false")
    skopeo(policy, "copy", *flags, f"docker://{plain}", layout)
    skopeo(policy, "copy", "--dest-tls-verify=false", layout, f"docker://{ref}")


@pytest.fixture(scope="module")
def chunked(tars: list[str], store: Store, registry: Registry, policy: str) -> Foreign:
    """zstd:chunked, by skopeo."""
    made = store.layout.image([store.layout.layer(path) for path in tars], "foreign")
    plain = store.layout.push("foreign", registry, "foreign/odd", "plain")
    ref = f"{registry.host}/foreign/odd:chunked"
    by_skopeo(policy, plain, ref, store)
    manifest, digest = registry.manifest("foreign/odd", "chunked")
    return Foreign(ref, plain, tars, manifest, digest, [layer.diff_id for layer in made.layers], without_empty)


def test_a_zstd_chunked_image_starts_from_what_it_reads(node: Node, chunked: Foreign, registry: Registry) -> None:
    assert all("zstd-chunked" in " ".join(layer["annotations"]) for layer in chunked.manifest["layers"])
    mark = registry.mark()
    namespace = node.pull(chunked.ref)
    layers = {layer["digest"]: layer["size"] for layer in chunked.manifest["layers"]}
    if node.line == "2.1":
        assert node.containerd.content(namespace) == {chunked.digest, chunked.manifest["config"]["digest"]}
    assert node.layers() >= set(layers)
    assert sum(registry.blob_bytes(mark).values()) < 0.1 * sum(layers.values())
    assert node.shell(chunked.ref, "cat /etc/word", namespace) == "hello\n"
    mark = registry.mark()
    end = hashlib.sha256(corpus.noise(3 << 20)[-10:]).hexdigest()
    assert node.shell(chunked.ref, "tail -c 10 /etc/noise | sha256sum", namespace).split()[0] == end
    assert 0 < sum(registry.blob_bytes(mark).values()) < 2 << 20, "of 3 MiB that do not compress"


def compare(node: Node, image: Foreign, theirs: list[str], namespace: str) -> None:
    """Every layer as mounted against containerd's unpack of the ordinary image, but for what its producer has left out."""
    ours = view(node.containerd, SNAPSHOTTER, chain_of(image.diff_ids), namespace)[1]
    assert len(theirs) == len(ours) == len(image.tars)
    assert all(os.path.ismount(path) for path in ours), "every layer is to be lazy"
    wrong = []
    for tar, here, there in zip(image.tars, theirs, ours, strict=True):
        expected, actual = image.keeps(trees.read_tree(here)), trees.read_tree(there)
        free = unpack_times(expected, corpus.explicit_directories(tar))
        lines = trees.differences(expected, actual, times_free=free)
        wrong += [f"{os.path.basename(tar)}: {line}" for line in lines]
    assert not wrong, "\n".join(wrong[:50])


@pytest.fixture(scope="module")
def unpacked(plain: Containerd, chunked: Foreign) -> list[str]:
    """The directories of containerd's own unpack, the lowest layer first."""
    plain.pull(chunked.plain, snapshotter="overlayfs")
    return view(plain, "overlayfs", chain_of(chunked.diff_ids), "default")[1]


def test_every_layer_is_what_the_unpack_leaves(node: Node, chunked: Foreign, unpacked: list[str]) -> None:
    compare(node, chunked, unpacked, node.pull(chunked.ref))
