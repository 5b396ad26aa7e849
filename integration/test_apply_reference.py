"""The tree that the scan makes of a layer is the tree that containerd's overlayfs unpack leaves on disk.

Layers go through ``diff.v1.Apply`` of a real containerd with an overlay mount, which is what its unpacker does
for the overlayfs snapshotter: whatever it writes into the upper directory is the reference, down to the last attribute.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from weenv.core.errors import FormatError, UnsupportedError
from weenv.core.proto import Schema
from weenv.layer.toc import FLAG_IMPLIED
from weenv.layer.tree import scan_tar
from weenv.plugin.containerd.client import Client
from weenv.plugin.snapshotter.implied import attributes_below
from weenv.plugin.snapshotter.planes.base import Implied
from weenv_testkit import corpus, rawcorpus
from weenv_testkit.containerd import Containerd
from weenv_testkit.toctree import toc_of, toc_tree
from weenv_testkit.trees import Entry, differences, read_tree

MEDIA_TYPE = "application/vnd.oci.image.layer.v1.tar"

# api/services/diff/v1/diff.proto, api/types/{mount,descriptor}.proto of containerd.
DIFF = Schema(
    "reference.diff",
    {
        "Mount": {"type": (1, "string"), "source": (2, "string"), "target": (3, "string"), "options": (4, "repeated string")},
        "Descriptor": {"media_type": (1, "string"), "digest": (2, "string"), "size": (3, "int64")},
        "ApplyRequest": {"diff": (1, "Descriptor"), "mounts": (2, "repeated Mount")},
        "ApplyResponse": {"applied": (1, "Descriptor")},
    },
)


class Reference:
    """Unpacks layers with a containerd."""

    def __init__(self, daemon: Containerd, scratch: str) -> None:
        self.daemon = daemon
        self.scratch = scratch
        self._number = 0
        self._channel = grpc.insecure_channel(f"unix:{daemon.socket}")
        answer = DIFF["ApplyResponse"]
        self._apply = self._channel.unary_unary(
            "/containerd.services.diff.v1.Diff/Apply", lambda request: request.SerializeToString(), answer.FromString
        )

    def close(self) -> None:
        self._channel.close()

    def unpack(self, stream: bytes, lowers: tuple[str, ...] = ()) -> str:
        """The upper directory that ``stream`` leaves on ``lowers``, the topmost first. Raises grpc.RpcError."""
        self._number += 1
        upper, work = (os.path.join(self.scratch, f"{kind}{self._number}") for kind in ("u", "w"))
        os.mkdir(upper, 0o755)
        os.mkdir(work)
        digest = asyncio.run(self._store(stream))
        options = [f"upperdir={upper}", f"workdir={work}", "lowerdir=" + ":".join(lowers or (work,))]
        request = DIFF["ApplyRequest"](
            diff={"media_type": MEDIA_TYPE, "digest": digest, "size": len(stream)},
            mounts=[{"type": "overlay", "source": "overlay", "options": options}],
        )
        self._apply(request, timeout=120, metadata=[("containerd-namespace", "reference")])
        return upper

    async def _store(self, stream: bytes) -> str:
        digest = "sha256:" + hashlib.sha256(stream).hexdigest()
        async with Client(self.daemon.socket) as client:
            content = client.namespace("reference")
            await content.write_content(f"layer-{self._number}", stream, digest, labels={"containerd.io/gc.root": "1"})
        return digest


@pytest.fixture(scope="module")
def reference(line: str, home: str) -> Iterator[Reference]:
    path = os.path.join(home, f"ref-{line}")
    scratch = os.path.join(path, "trees")
    os.makedirs(scratch)
    with Containerd(line, os.path.join(path, "c"), registry="127.0.0.1:1") as daemon:
        made = Reference(daemon, scratch)
        yield made
        made.close()
    shutil.rmtree(path)


def ours(stream: bytes) -> tuple[dict[bytes, Entry], set[bytes]]:
    """Our tree of a layer, and the names whose time is that of the unpack."""
    scan = scan_tar(io.BytesIO(stream), chunk=65_537)
    return toc_tree(toc_of(scan.columns, scan.stream_size), stream)


def implied(stream: bytes) -> list[Implied]:
    """Directories that the layer's own members do not name."""
    scan = scan_tar(io.BytesIO(stream))
    toc = toc_of(scan.columns, scan.stream_size)
    return [Implied(entry, toc.path(entry)) for entry in np.flatnonzero(toc.entries.flags & FLAG_IMPLIED).tolist()]


def compare(stream: bytes, upper: str) -> list[str]:
    """Differences of our tree and a directory."""
    tree, free = ours(stream)
    return differences(read_tree(upper), tree, times_free=free)


@pytest.mark.parametrize("kind", rawcorpus.sound())
def test_layers_that_containerd_unpacks(reference: Reference, kind: str) -> None:
    stream = rawcorpus.sound()[kind]
    assert compare(stream, reference.unpack(stream)) == []


@pytest.mark.parametrize("kind", rawcorpus.refused())
def test_layers_that_containerd_refuses(reference: Reference, kind: str) -> None:
    stream = rawcorpus.refused()[kind]
    with pytest.raises(grpc.RpcError):
        reference.unpack(stream)
    with pytest.raises(FormatError):
        ours(stream)


def test_random_layers(reference: Reference) -> None:
    """Both unpack a layer, to the same tree, or both refuse it."""
    seen = {"same": 0, "refused": 0}
    for seed in range(250):
        stream = rawcorpus.random_layer(seed)
        try:
            tree, free = ours(stream)
        except UnsupportedError:
            continue
        except FormatError:
            with pytest.raises(grpc.RpcError):
                reference.unpack(stream)
            seen["refused"] += 1
            continue
        assert differences(read_tree(reference.unpack(stream)), tree, times_free=free) == [], f"seed {seed}"
        seen["same"] += 1
    assert min(seen.values()) > 50, seen


def on_lowers(stream: bytes, lowers: tuple[str, ...]) -> tuple[dict[bytes, Entry], set[bytes]]:
    """Our tree of a layer with its implied directories as the snapshotter completes them, and the names whose time is free."""
    tree, free = ours(stream)
    names = implied(stream)
    found = attributes_below(names, lowers)
    for item in names:
        if item.entry in found:
            have = found[item.entry]
            marks = [pair for pair in tree[item.path].xattrs if pair[0].startswith(b"trusted.")]
            tree[item.path] = replace(
                tree[item.path], mode=stat.S_IFDIR | have.mode, uid=have.uid, gid=have.gid, xattrs=(*have.xattrs, *marks)
            )
    return tree, free


def test_implied_directories_take_the_attributes_of_lower_layers(reference: Reference, tmp_path: Path) -> None:
    """The kit's odd layers, each on all before it: a/b, xattrs, opaque have other attributes below."""
    lowers: tuple[str, ...] = ()
    found = 0
    for path in corpus.odd(str(tmp_path)):
        with open(path, "rb") as file:
            stream = file.read()
        upper = reference.unpack(stream, lowers)
        expected, free = on_lowers(stream, lowers)
        found += expected != ours(stream)[0]
        assert differences(read_tree(upper), expected, times_free=free) == [], path
        lowers = (upper, *lowers)
    assert found >= 3


def test_an_opaque_mark_alone_keeps_even_the_time_of_the_lower_directory(reference: Reference) -> None:
    """Nothing is made in the directory after its attributes were copied, so its time is the lower one's."""
    lower = reference.unpack(rawcorpus.directory(b"d", 0o2711, uid=3, gid=4, mtime=77) + rawcorpus.END)
    upper = reference.unpack(rawcorpus.file(b"d/.wh..wh..opq") + rawcorpus.END, (lower,))
    entry = read_tree(upper)[b"d"]
    assert (stat.S_IMODE(entry.mode), entry.uid, entry.gid, entry.mtime_ns) == (0o2711, 3, 4, 77 * 10**9)


def test_set_gid_of_a_lower_directory_reaches_implied_ones_below_it(reference: Reference) -> None:
    """d is copied from below, then d/new is made in it by the kernel, which gives it d's group; d/new/er has none to give."""
    lower = reference.unpack(rawcorpus.directory(b"d", 0o2775, gid=50) + rawcorpus.END)
    stream = rawcorpus.file(b"d/new/er/f") + rawcorpus.END
    upper = reference.unpack(stream, (lower,))
    expected, free = on_lowers(stream, (lower,))
    assert (stat.S_IMODE(expected[b"d/new"].mode), expected[b"d/new"].gid, expected[b"d/new/er"].gid) == (0o755, 50, 0)
    assert differences(read_tree(upper), expected, times_free=free) == []


def test_what_ends_the_search_for_a_lower_directory(reference: Reference) -> None:
    """A file or whiteout in between, a symlink that leads to a directory, and a layer that has nothing there."""
    lowest = reference.unpack(b"".join(rawcorpus.directory(name, 0o700, uid=3) for name in (b"a", b"b", b"t")) + rawcorpus.END)
    middle = reference.unpack(
        rawcorpus.file(b"a") + rawcorpus.file(b".wh.b") + rawcorpus.symlink(b"s", b"t") + rawcorpus.END, (lowest,)
    )
    linked = reference.unpack(rawcorpus.directory(b"u", 0o711, uid=4) + rawcorpus.symlink(b"v", b"/u") + rawcorpus.END)
    nothing = reference.unpack(rawcorpus.END)
    lowers = (nothing, linked, middle, lowest)
    stream = b"".join(rawcorpus.file(name + b"/f") for name in (b"a", b"b", b"s", b"t", b"u", b"v")) + rawcorpus.END
    upper = reference.unpack(stream, lowers)
    expected, free = on_lowers(stream, lowers)
    assert differences(read_tree(upper), expected, times_free=free) == []
    assert [expected[name].uid for name in (b"a", b"b", b"t", b"u", b"v")] == [0, 0, 3, 4, 4]


def test_what_containerd_refuses_but_is_represented(reference: Reference) -> None:
    """Contiguous files and old GNU sparse files: tar makes files of them, containerd fails."""
    for typeflag, magic in ((b"7", rawcorpus.USTAR), (b"S", rawcorpus.GNU)):
        stream = rawcorpus.header(b"f", typeflag, magic=magic) + rawcorpus.END
        with pytest.raises(grpc.RpcError, match="unhandled tar header type"):
            reference.unpack(stream)
        assert set(ours(stream)[0]) == {b".", b"f"}


def test_sparse_files_of_gnu_tar(reference: Reference, tmp_path: Path) -> None:
    """The PAX forms are unpacked, the old one is refused by containerd; its tree is the same as theirs."""
    trees = {}
    for form, path in corpus.sparse(str(tmp_path)).items():
        with open(path, "rb") as file:
            stream = file.read()
        trees[form] = {name: (entry.size, entry.content) for name, entry in ours(stream)[0].items()}
        if form == "gnu":
            with pytest.raises(grpc.RpcError, match="unhandled tar header type"):
                reference.unpack(stream)
        else:
            assert compare(stream, reference.unpack(stream)) == [], form
    assert all(tree == trees["gnu"] for tree in trees.values())


@pytest.mark.parametrize(
    "stream",
    [
        rawcorpus.file(b"f", b"x")[:600],
        rawcorpus.pax({b"GNU.sparse.numblocks": b"1", b"GNU.sparse.size": b"900", b"GNU.sparse.map": b"100,512"})
        + rawcorpus.file(b"f", bytes(512)) + rawcorpus.END,
    ],
    ids=["end within padding", "sparse pieces that are no blocks"],
)  # fmt: skip
def test_what_containerd_unpacks_but_is_not_represented(reference: Reference, stream: bytes) -> None:
    """Such layers are copied as they are, with the reason."""
    assert set(read_tree(reference.unpack(stream))) == {b".", b"f"}
    with pytest.raises(UnsupportedError, match="f: "):
        ours(stream)


@pytest.mark.parametrize("source", ["debian", "pypi", "npm"])
def test_archives_of_other_tools(reference: Reference, source: str) -> None:
    for path in getattr(corpus, source)():
        with open(path, "rb") as file:
            stream = file.read()
        assert compare(stream, reference.unpack(stream)) == [], path
