"""The mounted tree of a lazy layer is what containerd's own overlayfs unpack leaves on disk, layer by layer.

Some thirty layers (Debian packages, PyPI and npm archives, hand-made odd ones) are stacked into one image. A containerd
without us unpacks the ordinary image; the converted one is pulled lazily; then each pair of directories is compared, down
to xattrs, nanoseconds and link counts (see trees.py). The merged roots are compared too.
"""

from __future__ import annotations

import os
import stat
import subprocess

import pytest

from weenv_testkit import corpus, images, tools, trees
from weenv_testkit.containerd import Containerd
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import run, unmount_under
from weenv_testkit.store import Store
from weenv_testkit.views import chain_of, unpack_times, view


@pytest.fixture(scope="module")
def views(plain: Containerd, module_node: Node, store: Store) -> tuple[list[str], list[str]]:
    """Directories of containerd's unpack, and of ours, the lowest layer first."""
    plain.pull(store.plain("corpus"), snapshotter="overlayfs")
    namespace = module_node.pull(store.lazy("corpus"))
    chain = chain_of(layer.diff_id for layer in store.image("corpus").layers)
    theirs = view(plain, "overlayfs", chain, "default")[1]
    ours = view(module_node.containerd, SNAPSHOTTER, chain, namespace)[1]
    assert len(theirs) == len(ours) == len(store.tars("corpus"))
    return theirs, ours


def test_every_layer_is_what_the_unpack_leaves(node: Node, views: tuple[list[str], list[str]], store: Store) -> None:
    wrong = []
    names = 0
    for tar, theirs, ours in zip(store.tars("corpus"), *views, strict=True):
        expected, actual = trees.read_tree(theirs), trees.read_tree(ours)
        names += len(expected)
        free = unpack_times(expected, corpus.explicit_directories(tar))
        wrong += [f"{os.path.basename(tar)}: {line}" for line in trees.differences(expected, actual, times_free=free)]
    assert names > 5000
    assert not wrong, "\n".join(wrong[:100])


def test_a_second_reading_needs_no_daemon(node: Node, views: tuple[list[str], list[str]]) -> None:
    """What was read once is on this node: names and attributes never need Python, data only once."""
    before = node.blobfs.metric("weenv_blobfs_fetched_bytes_total")
    for ours in views[1]:
        trees.read_tree(ours)
    assert node.blobfs.metric("weenv_blobfs_fetched_bytes_total") == before


def test_the_merged_root_is_the_same(node: Node, views: tuple[list[str], list[str]], home: str) -> None:
    """Both stacks mounted by the kernel's overlayfs: whiteouts and opaque directories act alike."""
    merged = []
    for name, layers in zip(("theirs", "ours"), views, strict=True):
        point = os.path.join(home, f"merged-{name}-{node.line}")
        links = os.path.join(home, f"links-{name}-{node.line}")
        os.mkdir(point)
        os.mkdir(links)
        for number, layer in enumerate(layers):
            os.symlink(layer, os.path.join(links, str(number)))
        lower = ":".join(map(str, range(len(layers) - 1, -1, -1)))
        run("mount", "-t", "overlay", "overlay", point, "-o", f"lowerdir={lower},index=off", cwd=links)
        merged.append(trees.read_tree(point, contents=False))
        unmount_under(point)
    expected, actual = merged
    free = {path for path, entry in expected.items() if stat.S_ISDIR(entry.mode)}
    assert not trees.differences(expected, actual, times_free=free)


@pytest.mark.parametrize("form", sorted(corpus.SPARSE_FORMS))
def test_sparse_members_are_what_gnu_tar_extracts(form: str, home: str) -> None:
    """containerd refuses sparse members, so the reference for them is the program that writes them."""
    scratch = os.path.join(home, f"sparse-{form}")
    os.makedirs(scratch)
    tar = corpus.sparse(scratch)[form]
    blob, point, extracted = (os.path.join(scratch, name) for name in ("blob", "point", "extracted"))
    os.mkdir(point)
    os.mkdir(extracted)
    run("tar", "--extract", "--numeric-owner", "--same-permissions", f"--file={tar}", "--directory", extracted)
    run(*tools.weenv(), "layer", "convert", tar, blob, env=dict(os.environ))
    run("zstd", "-q", "-d", blob, "-o", f"{blob}.tar", "--no-check")
    assert images.file_digest(f"{blob}.tar") == images.file_digest(tar), "any zstd decompressor gives the tar back"
    mounted = subprocess.run([*tools.weenv(), "layer", "mount", blob, point], capture_output=True, text=True, check=False)
    try:
        assert mounted.returncode == 0, mounted.stderr
        free = {b"."}
        assert not trees.differences(trees.read_tree(extracted), trees.read_tree(point), times_free=free)
    finally:
        subprocess.run([*tools.weenv(), "layer", "umount", point], capture_output=True, check=False)
        unmount_under(point)
