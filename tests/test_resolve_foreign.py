"""Layers in the formats of others: from labels to mounted layers, turned on and off, and every way it can fail."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from aiohttp import web
from conformance.snapshots import lowers_of
from simulator import pulling
from simulator.pulling import Images, node
from simulator.registry import SimulatedRegistry, wrong_bytes

from weenv.core import digest as digests
from weenv.plugin.snapshotter.layerdir import LayerDirs
from weenv_testkit.foreign import Blob, estargz, zstd_chunked
from weenv_testkit.images import Member

root, registry, images = pulling.root, pulling.registry, pulling.images


async def test_layers_that_others_made_lazy(
    root: str, registry: SimulatedRegistry, images: Images, caplog: pytest.LogCaptureFixture
) -> None:
    """Both formats and our own in one image, up to the first layer that is in none."""
    layers = [
        images.foreign(zstd_chunked, Member("a", b"a" * 3000)),
        images.foreign(estargz, Member("b", b"b" * 3000), Member(".no.prefetch.landmark", b"\x0f")),
        images.file("c"),
        images.foreign(zstd_chunked, Member(".wh.a")),
        images.file("d", plain=True),
        images.foreign(estargz, Member("e")),
    ]
    image = images.image(layers)
    async with node(root, registry) as n:
        ns = n.containerd.namespace("default")
        assert await ns.pull(image) == [layer.digest for layer in layers[4:]]
        paths = lowers_of(await ns.run("c", image.chain()[3]))
        assert [sorted(os.listdir(path)) for path in paths] == [["a"], ["c"], ["b"], ["a"]]
        assert n.fallbacks() == {"not-converted": 1}
        assert registry.count("registry", part="/manifests/") == 1
        assert registry.count("registry", part="/blobs/") == 4
        stored = n.dirs.source(layers[1].digest).foreign
        assert stored is not None and (stored.format, stored.digest) == ("estargz", layers[1].digest)
        assert [name for name in os.listdir(n.dirs.root) if name.startswith(".new-")] == []
        again = LayerDirs(root).source(layers[0].digest)
        assert again.foreign is not None and again.descriptor().size != again.size == len(images.blobs[layers[0].digest])
    assert [record.levelname for record in caplog.records if record.levelname != "INFO"] == ["WARNING"]


async def test_a_toc_that_is_longer_than_was_guessed(root: str, registry: SimulatedRegistry, images: Images) -> None:
    layer = images.foreign(estargz, *(Member(f"d/{n:05}-{digests.sha256(b'%d' % n)}") for n in range(2000)))
    async with node(root, registry) as n:
        assert await n.containerd.namespace("default").pull(images.image([layer])) == []
        assert registry.count("registry", part="/blobs/") == 2


async def test_the_formats_of_others_can_be_turned_off(root: str, registry: SimulatedRegistry, images: Images) -> None:
    layer = images.foreign(zstd_chunked, Member("a"))
    async with node(root, registry, foreign=False) as n:
        assert await n.containerd.namespace("default").pull(images.image([layer])) == [layer.digest]
        assert registry.count("registry") == 0 and n.fallbacks() == {"not-converted": 1}


@pytest.mark.parametrize("make", [zstd_chunked, estargz])
async def test_turning_them_off_and_on_leaves_what_is_there(
    root: str, registry: SimulatedRegistry, images: Images, make: Callable[[bytes], Blob]
) -> None:
    """What was pulled while it was on goes on, and is shared; other chains with the layer are unpacked until it is on again."""
    layer = images.foreign(make, Member("a", b"a" * 3000))
    image, second, third = (images.image([*below, layer]) for below in ([], [images.file("b")], [images.file("c")]))
    async with node(root, registry) as n:
        assert await n.containerd.namespace("on").pull(image) == []
        names = n.containerd.names
    asked = registry.count("registry", part=layer.digest)
    async with node(root, registry, foreign=False) as n:
        n.containerd.names = names
        await n.layers.tend_once()
        (path,) = lowers_of(await n.containerd.namespace("on").run("c", image.chain()[0]))
        assert os.listdir(path) == ["a"]
        assert await n.containerd.namespace("off").pull(image) == []
        assert await n.containerd.namespace("off").pull(second) == [layer.digest]
        assert n.fallbacks() == {"not-converted": 1}
    async with node(root, registry) as n:
        n.containerd.names = names
        await n.layers.tend_once()
        assert await n.containerd.namespace("again").pull(third) == []
    assert registry.count("registry", part=layer.digest) == asked, "of the layer nothing is fetched again"


async def test_a_client_that_does_not_name_the_image(root: str, registry: SimulatedRegistry, images: Images) -> None:
    layer = images.foreign(estargz, Member("a"))
    async with node(root, registry) as n:
        assert await n.containerd.namespace("default").pull(images.image([layer], cri=False)) == [layer.digest]
        assert registry.count("registry") == 0


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("digest", "bad-tail"), ("annotation", "bad-labels"), ("blob", "bad-toc"), ("names", "unsupported"),
        ("gone", "not-found"),
    ],
)  # fmt: skip
async def test_foreign_layers_that_are_bad(
    root: str, registry: SimulatedRegistry, images: Images, what: str, reason: str
) -> None:
    """They are unpacked by containerd, and the layers above them; nothing of them is left."""
    lost = lambda entries: entries.append({"type": "reg", "name": "\ufffd"})  # noqa: E731
    make: Callable[[bytes], Blob] = (lambda tar: zstd_chunked(tar, edit=lost)) if what == "names" else zstd_chunked
    if what == "blob":
        make = estargz
    layer = images.foreign(make, Member("a", b"a" * 5000))
    annotations = dict(layer.annotations)
    checksum = next((key for key in annotations if key.endswith("checksum")), "")
    if what == "digest":
        annotations[checksum] = digests.sha256(b"other")
    elif what == "annotation":
        annotations[checksum] = "nonsense"
    elif what == "blob":
        data = images.blobs[layer.digest][:-1] + b"!"  # the footer is no footer
        data = data.replace(b"STARGZ", b"STARGX")
        layer = replace(layer, digest=registry.add_blob(data))
        images.blobs[layer.digest], images.types[layer.digest] = data, "application/vnd.oci.image.layer.v1.tar+gzip"
    elif what == "gone":
        del registry.blobs[layer.digest]
    layer = replace(layer, annotations=annotations)
    image = images.image([images.file("low"), layer, images.file("up")])
    async with node(root, registry) as n:
        assert await n.containerd.namespace("default").pull(image) == [row.digest for row in image.layers[1:]]
        assert n.fallbacks() == {reason: 1}
        assert layer.digest not in n.dirs.known()
        assert [name for name in os.listdir(n.dirs.root) if name.startswith(".new-")] == []


@pytest.mark.parametrize("make", [zstd_chunked, estargz])
async def test_a_foreign_toc_that_comes_wrong_is_fetched_again(
    root: str, registry: SimulatedRegistry, images: Images, make: Callable[[bytes], Blob]
) -> None:
    layer = images.foreign(make, Member("a"))
    registry.script.append(wrong_bytes)
    async with node(root, registry) as n:
        assert await n.containerd.namespace("default").pull(images.image([layer])) == []
        assert registry.count("registry", part="/blobs/") == 2
        assert [name for name in os.listdir(n.dirs.root) if name.startswith(".new-")] == []


@pytest.mark.parametrize("differs", ["digest", "position", "format", "repository"])
async def test_who_describes_a_blob_otherwise_gets_no_answer_that_was_meant_for_another(
    root: str, registry: SimulatedRegistry, images: Images, differs: str
) -> None:
    """Both at once: the one that is wrong is asked for first, and the other waits for no answer to that."""
    layer = images.foreign(zstd_chunked, Member("a", b"a" * 3000))
    (position,) = [key for key in layer.annotations if key.endswith("position")]
    (checksum,) = [key for key in layer.annotations if key.endswith("checksum")]
    other, name = dict(layer.annotations), "team/other"
    if differs == "digest":
        other[checksum] = digests.sha256(b"x")
    elif differs == "position":
        offset, _, rest = other[position].partition(":")
        other[position] = f"{int(offset) - 1}:{rest}"
    elif differs == "format":
        other = {"containerd.io/snapshot/stargz/toc.digest": digests.sha256(b"x")}
    else:
        name = "nobody/has-it"
    gate, begun = asyncio.Event(), asyncio.Event()

    async def held(sim: SimulatedRegistry, request: web.Request, blob: bytes, start: int, end: int) -> web.StreamResponse:
        begun.set()
        await gate.wait()
        if differs == "repository":
            return web.Response(status=404)
        headers = {"Content-Range": f"bytes {start}-{end - 1}/{len(blob)}"}
        return web.Response(status=206, body=blob[start:end], headers=headers)

    registry.script.append(held)
    forged = images.image([replace(layer, annotations=other)], name=name)
    if differs == "format":
        images.types[layer.digest] = images.types[layer.digest].replace("zstd", "gzip")
        forged = images.image([replace(layer, annotations=other)], name=name)
        images.types[layer.digest] = images.types[layer.digest].replace("gzip", "zstd")
    async with node(root, registry) as n:
        first = asyncio.create_task(n.containerd.namespace("one").pull(forged))
        await begun.wait()
        assert await n.containerd.namespace("two").pull(images.image([layer])) == []
        gate.set()
        assert await first == [layer.digest]
        known = n.dirs.source(layer.digest).foreign
        assert known is not None and known.toc_digest == layer.annotations[checksum]


async def test_one_blob_under_two_formats_is_refused(root: str, registry: SimulatedRegistry, images: Images) -> None:
    """Who came first has fixed how a digest is read; an annotation of another image does not change it."""
    layer = images.foreign(zstd_chunked, Member("a", b"a" * 3000))
    forged = replace(layer, annotations=images.foreign(zstd_chunked, Member("b", b"b")).annotations)
    async with node(root, registry) as n:
        first, second = n.containerd.namespace("one"), n.containerd.namespace("two")
        assert await first.pull(images.image([layer])) == []
        other = replace(forged, diff_id=digests.sha256(b"x"))
        assert await second.pull(images.image([other], name="team/other")) == [layer.digest]
        assert n.fallbacks() == {"bad-tail": 1}
