"""From labels to mounted layers: the decision per image, what is fetched, every way it can fail, and who is told."""

from __future__ import annotations

import asyncio
import json
import os
import tarfile
from dataclasses import replace

import pytest
from aiohttp import web
from conformance.snapshots import lowers_of
from simulator import pulling
from simulator.containerd import Layer
from simulator.pulling import REPOSITORY, Images, node
from simulator.registry import SimulatedRegistry, drop_at_once, status, wrong_bytes

from weenv.core import digest as digests
from weenv.core.errors import MountError, SnapshotExists
from weenv.core.log import JsonFormatter
from weenv.plugin.containerd.types import LABEL_NOT_LAZY, LABEL_SNAPSHOT_REF, Kind
from weenv.plugin.snapshotter import resolve
from weenv.plugin.snapshotter.layerdir import LayerDirs
from weenv.plugin.snapshotter.resolve import REASONS, reason_of
from weenv.registry.trusted import add_hosts
from weenv_testkit.images import Member, write_tar

root, registry, images = pulling.root, pulling.registry, pulling.images


async def test_a_lazy_image_is_pulled_without_its_layers(root: str, registry: SimulatedRegistry, images: Images) -> None:
    layers = [images.file(name) for name in "abcd"]
    image = images.image(layers)
    async with node(root, registry) as n:
        ns = n.containerd.namespace("default")
        assert await ns.pull(image) == []
        described = await ns.run("c", image.chain()[-1])
        assert [sorted(os.listdir(path)) for path in lowers_of(described)] == [["d"], ["c"], ["b"], ["a"]]
        assert registry.count("registry", part="/manifests/") == 1
        assert registry.count("registry", part="/blobs/") == 4, "one ranged read per tail"
        assert n.fallbacks() == {}
        for layer in layers:
            assert n.plane.calls["attach", layer.digest] == 1
        assert await n.containerd.collect() == set()


async def test_all_layers_are_worked_on_at_the_first_prepare(root: str, registry: SimulatedRegistry, images: Images) -> None:
    layers = [images.file(name) for name in "abcdef"]
    async with node(root, registry) as n:
        n.plane.gate.clear()
        pull = asyncio.ensure_future(n.containerd.namespace("default").pull(images.image(layers)))
        while sum(count for (what, _), count in n.plane.calls.items() if what == "prepare") < 6:
            await asyncio.sleep(0.01)
        n.plane.gate.set()
        assert await pull == []


async def test_a_layers_profile_is_put_beside_it_and_the_latest_counts(
    root: str, registry: SimulatedRegistry, images: Images
) -> None:
    layer = images.file("a")

    def profiled(value: str) -> Layer:
        return replace(layer, annotations={**layer.annotations, "containerd.io/snapshot/weenv.prefetch": value})

    async with node(root, registry) as n:
        for number, (value, expected) in enumerate([("1,AAAA", "1,AAAA"), ("whatever", "whatever"), ("", "whatever")]):
            ns = n.containerd.namespace(f"n{number}")
            assert await ns.pull(images.image([profiled(value)])) == [], "lazy whatever it says"
            assert n.dirs.prefetch(layer.digest) == expected
            (snapshot,) = [info async for block in n.core.list([]) for info in block]
            await n.core.remove(snapshot.name)
        assert await n.containerd.namespace("long").pull(images.image([profiled("1," + "A" * 5000)])) == []
        assert n.dirs.prefetch(layer.digest) == "whatever", "what no label holds is none"


async def test_without_cri_labels_layers_need_a_source_annotation(
    root: str, registry: SimulatedRegistry, images: Images
) -> None:
    bare = images.file("a")
    source = {"containerd.io/snapshot/weenv.source": f"{registry.host}/{REPOSITORY}"}
    sourced = [replace(images.file(name), annotations={**images.file(name).annotations, **source}) for name in "xy"]
    async with node(root, registry, allow=[registry.host]) as n:
        ns = n.containerd.namespace("default")
        assert await ns.pull(images.image(sourced, cri=False)) == []
        assert registry.count("registry", part="/manifests/") == 0
        assert await ns.pull(images.image([bare], cri=False)) == [bare.digest]
        assert n.fallbacks() == {"no-origin": 1}
    async with node(root + "2", registry, allow=[registry.host], use_source_annotation=False) as n:
        assert len(await n.containerd.namespace("default").pull(images.image(sourced, cri=False))) == 2


async def test_an_annotation_cannot_send_the_node_to_itself(
    root: str, registry: SimulatedRegistry, images: Images, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[object] = []

    def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(writer.get_extra_info("peername"))
        writer.close()

    asked = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = asked.sockets[0].getsockname()[1]
    async with asked, node(root, registry) as n:
        for number, host in enumerate((f"127.0.0.1:{port}", f"localhost:{port}", f"127.1:{port}", f"0.0.0.0:{port}")):
            layer = images.file(f"f{number}")
            annotations = {**layer.annotations, "containerd.io/snapshot/weenv.source": f"{host}/{REPOSITORY}"}
            layer = replace(layer, annotations=annotations)
            caplog.clear()
            assert await n.containerd.namespace("default").pull(images.image([layer], cri=False)) == [layer.digest]
            (told,) = [record for record in caplog.records if "image is not served lazily" in record.message]
            assert host in told.detail and f'allow_sources = ["{host}"]' in told.hint  # type: ignore[attr-defined]
            n.resolver._told.clear()
        assert n.fallbacks() == {"source-refused": 4} and not seen
        own = images.file("own")
        source = {"containerd.io/snapshot/weenv.source": f"{registry.host}/{REPOSITORY}"}
        own = replace(own, annotations={**own.annotations, **source})
        assert await n.containerd.namespace("default").pull(images.image([own])) == [], "the image's own registry"


async def test_a_registry_of_the_operators_may_be_on_the_node(
    root: str, registry: SimulatedRegistry, images: Images, caplog: pytest.LogCaptureFixture
) -> None:
    source = {"containerd.io/snapshot/weenv.source": f"{registry.host}/{REPOSITORY}"}
    layer = images.file("own")
    layer = replace(layer, annotations={**layer.annotations, **source})
    chain = {LABEL_SNAPSHOT_REF: layer.diff_id}
    async with node(root, registry) as n:
        await n.core.prepare(f"default/1/extract-1 {layer.diff_id}", "", {**layer.annotations, **chain})
        told = (await n.core.stat(f"default/1/extract-1 {layer.diff_id}")).labels[LABEL_NOT_LAZY]
        assert registry.host in told and f'allow_sources = ["{registry.host}"]' in told.splitlines()[1]
        (logged,) = [record for record in caplog.records if "image is not served lazily" in record.message]
        assert logged.layer == layer.digest and not hasattr(logged, "chain")  # type: ignore[attr-defined]
        add_hosts(root, [registry.host])
        with pytest.raises(SnapshotExists, match="lazily"):
            await n.core.prepare(f"default/2/extract-2 {layer.diff_id}", "", {**layer.annotations, **chain})


async def test_what_is_logged_has_no_empty_fields(
    root: str, registry: SimulatedRegistry, images: Images, caplog: pytest.LogCaptureFixture
) -> None:
    async with node(root, registry) as n:
        layer = images.file("c", plain=True)
        assert await n.containerd.namespace("default").pull(images.image([layer])) == [layer.digest]
    (told,) = [record for record in caplog.records if "image is not served lazily" in record.message]
    fields = {name: getattr(told, name, None) for name in ("reason", "image", "layer", "detail", "hint")}
    assert fields["reason"] == "not-converted" and "weenv convert" in str(fields["hint"])
    assert fields["detail"] is None and "" not in fields.values()


async def test_lazy_from_the_bottom_to_the_first_that_is_not(
    root: str, registry: SimulatedRegistry, images: Images, caplog: pytest.LogCaptureFixture
) -> None:
    layers = [images.file("a"), images.file("b"), images.file("c", plain=True), images.file("d")]
    image = images.image(layers)
    async with node(root, registry) as n:
        ns = n.containerd.namespace("default")
        assert await ns.pull(image) == [layers[2].digest, layers[3].digest]
        assert n.fallbacks() == {"not-converted": 1}
        (family,) = n.metrics.ordinary_layers.collect()
        told = {s.labels["reason"]: s.value for s in family.samples if s.name.endswith("_total")}
        assert told == {"not-converted": 1, "below-not-lazy": 1}
        warnings = [record for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == 1, "one line per image"
        assert warnings[0].__dict__["reason"] == "not-converted" and warnings[0].__dict__["image"] == image.ref
        paths = lowers_of(await ns.run("c", image.chain()[-1]))
        assert [os.path.basename(os.path.dirname(path)) for path in paths] == [
            paths[0].split("/")[-2],
            paths[1].split("/")[-2],
            "m",
            "m",
        ]
        assert n.plane.calls["prepare", layers[3].digest] == 0 or registry.count("registry", part=layers[3].digest) == 0


async def test_an_image_that_is_not_converted(
    root: str, registry: SimulatedRegistry, images: Images, caplog: pytest.LogCaptureFixture
) -> None:
    layers = [images.file("a", plain=True), images.file("b", plain=True)]
    async with node(root, registry) as n:
        assert len(await n.containerd.namespace("default").pull(images.image(layers))) == 2
        assert n.fallbacks() == {"not-converted": 1}
        assert registry.count("registry", part="/blobs/") == 0
        # A client that unpacks by itself gives no label at all (image.Unpack of containerd 1.7's ctr).
        await n.core.prepare(f"default/9/extract-1-x {digests.sha256(b'')}", "", {})
        assert n.fallbacks()["no-labels"] == 1
        await n.core.prepare("default/10/container", "", {})
        assert n.fallbacks()["no-labels"] == 1, "a container is not an unpacking"
    assert [record.__dict__["reason"] for record in caplog.records if record.levelname == "WARNING"] == [
        "not-converted",
        "no-labels",
    ]


async def _bad(images: Images, what: str) -> Layer:
    good = images.file("bad")
    annotations = dict(good.annotations)
    offset, length, _ = annotations["containerd.io/snapshot/weenv.toc"].split(",")
    if what == "digest":
        annotations["containerd.io/snapshot/weenv.toc"] = f"{offset},{length},{digests.sha256(b'other')}"
    elif what == "labels":
        annotations["containerd.io/snapshot/weenv.toc"] = "1,2"
    elif what == "toc":  # well signed rubbish: the tail's digest is right, its content is not
        data = bytearray(images.blobs[good.digest])
        data[int(offset) + 40] ^= 0xFF
        digest = images.registry.add_blob(bytes(data))
        images.blobs[digest] = bytes(data)
        annotations["containerd.io/snapshot/weenv.layer"] = f"{digest},{len(data)}"
        annotations["containerd.io/snapshot/weenv.toc"] = f"{offset},{length},{digests.sha256(data[int(offset) :])}"
        return Layer(digest, good.diff_id, annotations)
    elif what == "chain":
        return replace(good, diff_id=digests.sha256(b"another layer's stream"))
    elif what == "gone":
        del images.registry.blobs[good.digest]
    return replace(good, annotations=annotations)


@pytest.mark.parametrize(
    ("what", "reason"),
    [("digest", "bad-tail"), ("labels", "bad-labels"), ("toc", "bad-toc"), ("chain", "wrong-layer"), ("gone", "not-found")],
)
async def test_a_bad_layer_is_unpacked_and_said_so(
    root: str, registry: SimulatedRegistry, images: Images, what: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    layers = [images.file("a"), await _bad(images, what), images.file("c")]
    image = images.image(layers)
    async with node(root, registry) as n:
        ns = n.containerd.namespace("default")
        assert await ns.pull(image) == [layers[1].digest, layers[2].digest], "the layer below is lazy all the same"
        assert n.fallbacks() == {reason: 1}
        lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
        said = [line for line in lines if line["event"] == "image-is-not-served-lazily"]
        assert [line["reason"] for line in said] == [reason], "one line, with the metric's reason"
        await ns.run("c", image.chain()[-1])


async def test_a_registry_that_is_away_delays_nothing_for_ever(root: str, registry: SimulatedRegistry, images: Images) -> None:
    layers = [images.file("a")]
    image = images.image(layers)
    registry.script.extend([drop_at_once] * 4)
    async with node(root, registry) as n:
        assert await n.containerd.namespace("a").pull(image) == [layers[0].digest]
        assert n.fallbacks() == {"unavailable": 1}
    registry.script.clear()
    registry.script.extend([status(403)] * 4)
    async with node(root + "2", registry) as n:
        assert await n.containerd.namespace("a").pull(image) == [layers[0].digest]
        assert n.fallbacks() == {"unauthorized": 1}


async def test_a_tail_that_comes_wrong_is_fetched_again(root: str, registry: SimulatedRegistry, images: Images) -> None:
    """Bytes that were corrupted on the way make no image ordinary."""
    layers = [images.file("a")]
    image = images.image(layers)
    registry.script.extend([wrong_bytes] * 2)
    async with node(root, registry) as n:
        assert await n.containerd.namespace("a").pull(image) == []
        assert n.fallbacks() == {} and not registry.script


async def test_a_layer_that_takes_too_long_is_unpacked(root: str, registry: SimulatedRegistry, images: Images) -> None:
    layers = [images.file("a")]
    async with node(root, registry, resolve_timeout=0.2) as n:
        n.plane.gate.clear()
        assert await n.containerd.namespace("a").pull(images.image(layers)) == [layers[0].digest]
        assert n.fallbacks() == {"timeout": 1}
        n.plane.gate.set()


async def test_a_refused_mount_is_a_fallback(root: str, registry: SimulatedRegistry, images: Images) -> None:
    layers = [images.file("a"), images.file("b")]
    async with node(root, registry) as n:
        n.plane.fail[layers[1].digest] = MountError("no", errno=22)
        assert await n.containerd.namespace("a").pull(images.image(layers)) == [layers[1].digest]
        assert n.fallbacks() == {"mount": 1}


async def test_a_manifest_that_cannot_be_had_leaves_layers_to_themselves(
    root: str, registry: SimulatedRegistry, images: Images
) -> None:
    layers = [images.file("a"), images.file("b")]
    image = replace(images.image(layers), manifest_digest=digests.sha256(b"unknown"))
    async with node(root, registry) as n:
        assert await n.containerd.namespace("a").pull(image) == []
        assert n.fallbacks() == {}


async def test_kind_a_layer_without_its_parent_is_not_the_one_that_was_asked_for(
    root: str, registry: SimulatedRegistry, images: Images
) -> None:
    """A containerd that unpacks in parallel asks for upper layers on nothing (from 2.2 on, where ``rebase`` is advertised)."""
    layers = [images.file(name) for name in "ab"]
    image = images.image(layers)
    async with node(root, registry) as n:
        labels = {**layers[1].annotations, LABEL_SNAPSHOT_REF: image.chain()[1], resolve.LABEL_IMAGE: image.ref}
        key = f"default/1/extract-1 {image.chain()[1]}"
        (mount,) = await n.core.prepare(key, "", labels)
        assert mount.type == "bind", "an ordinary snapshot: what is unpacked there has no parent to lose"
        assert n.fallbacks() == {"wrong-layer": 1}
        assert [info.kind async for block in n.core.list([]) for info in block] == [Kind.ACTIVE]


async def test_two_namespaces_and_collection(root: str, registry: SimulatedRegistry, images: Images) -> None:
    layers = [images.file(name) for name in "ab"]
    image = images.image(layers)
    async with node(root, registry) as n:
        one, two = n.containerd.namespace("one"), n.containerd.namespace("two")
        assert await one.pull(image) == [] == await two.pull(image)
        assert one.names == two.names, "the same backend snapshots"
        assert registry.count("registry", part="/blobs/") == 2
        one.names.clear()
        assert await n.containerd.collect() == set()
        await two.run("c", image.chain()[-1])
        two.remove(image.chain()[0])
        two.remove(image.chain()[1])
        assert await n.containerd.collect() == set(), "a container keeps what is below it"
        two.remove("c")
        assert len(await n.containerd.collect()) == 3
        assert n.dirs.known() == [] and os.listdir(f"{root}/m") == [] == os.listdir(f"{root}/s")
        assert n.store.layers() == []
        assert await two.pull(image) == []


async def test_collection_beside_pulls_and_runs(root: str, registry: SimulatedRegistry, images: Images) -> None:
    shared = [images.file(name) for name in "ab"]
    pulled = [images.image([*shared, images.file(f"top{number}")]) for number in range(6)]
    async with node(root, registry) as n:

        async def life(number: int) -> None:
            ns = n.containerd.namespace(f"n{number % 3}")
            for attempt in range(3):
                image = pulled[(number + attempt) % len(pulled)]
                assert await ns.pull(image) == []
                await ns.run(f"c{number}", image.chain()[-1])
                ns.remove(f"c{number}")
                await asyncio.sleep(0)

        async def collect() -> None:
            for _ in range(10):
                await n.containerd.collect()
                await asyncio.sleep(0.01)

        await asyncio.gather(*(life(number) for number in range(6)), collect())
        for names in n.containerd.names.values():
            names.clear()
        await n.containerd.collect()
        n.layers._fresh.clear()
        await n.core.cleanup()
        assert n.dirs.known() == [] and os.listdir(f"{root}/m") == []


async def test_layers_resolved_ahead_go_where_nobody_comes_for_them(
    root: str, registry: SimulatedRegistry, images: Images
) -> None:
    layers = [images.file(name) for name in "abc"]
    image = images.image(layers)
    async with node(root, registry, layer_grace=0.2) as n:
        ns = n.containerd.namespace("a")
        await ns.pull(replace(image, layers=image.layers[:1]))
        for _ in range(200):
            if len(n.dirs.known()) == 3:
                break
            await asyncio.sleep(0.01)
        await n.core.cleanup()
        assert len(n.dirs.known()) == 3, "kept for a while"
        await asyncio.sleep(0.3)
        await n.core.cleanup()
        assert n.dirs.known() == [layers[0].digest]


async def test_implied_directories_take_what_lies_below(root: str, registry: SimulatedRegistry, images: Images) -> None:
    base = images.layer(Member.directory("opt", 0o700), Member.directory("opt/deep", 0o2750))
    middle = images.layer(Member("opt/deep/f", b"x"), Member("new/dir/g", b"y"))
    image, other = images.image([base, middle]), images.image([images.file("z"), middle], name="team/other")
    async with node(root, registry) as n:
        ns = n.containerd.namespace("a")
        assert await ns.pull(image) == [] == await ns.pull(other)
        top, alone = [lowers_of(await ns.run(f"c{i}", each.chain()[-1]))[0] for i, each in enumerate((image, other))]
        modes = {name: os.stat(f"{top}/{name}").st_mode & 0o7777 for name in ("opt", "opt/deep", "new", "new/dir")}
        assert modes == {"opt": 0o700, "opt/deep": 0o2750, "new": 0o755, "new/dir": 0o755}
        assert os.stat(f"{alone}/opt").st_mode & 0o7777 == 0o755, "the same layer on another base has other attributes"
        assert len([layer for layer in n.store.layers() if layer.digest == middle.digest]) == 2
        assert n.plane.calls["prepare", middle.digest] >= 1


async def test_a_forged_tail_does_not_replace_a_known_layers(root: str, registry: SimulatedRegistry, images: Images) -> None:
    """The blob's digest is not checked while it is read piecemeal, so who names it must not decide what its tail is."""
    good = images.file("good")
    evil = images.file("evil")
    forged = {
        **evil.annotations,
        "containerd.io/snapshot/weenv.layer": f"{good.digest},{len(images.blobs[evil.digest])}",
    }
    attack = images.image([Layer(good.digest, evil.diff_id, forged)], name="team/evil")
    async with node(root, registry) as n:
        ns = n.containerd.namespace("a")
        assert await ns.pull(images.image([good])) == []
        assert await ns.pull(attack) == [good.digest]
        assert n.fallbacks() == {"bad-tail": 1}
        assert n.dirs.source(good.digest).toc_digest in good.annotations["containerd.io/snapshot/weenv.toc"]


async def test_a_pull_cancelled_and_repeated(root: str, registry: SimulatedRegistry, images: Images) -> None:
    layers = [images.file(name) for name in "abc"]
    image = images.image(layers)
    async with node(root, registry) as n:
        ns = n.containerd.namespace("a")
        for delay in (0.0, 0.002, 0.005, 0.01, 0.02, 0.03):
            pull = asyncio.ensure_future(ns.pull(image))
            await asyncio.sleep(delay)
            pull.cancel()
            await asyncio.gather(pull, return_exceptions=True)
            await n.containerd.collect()
        assert await ns.pull(image) == []
        assert not n.layers._pins


async def test_restart_mounts_what_the_metastore_knows(
    root: str, registry: SimulatedRegistry, images: Images, caplog: pytest.LogCaptureFixture
) -> None:
    layers = [images.file(name) for name in "abc"]
    image = images.image(layers)
    async with node(root, registry) as n:
        ns = n.containerd.namespace("a")
        await ns.pull(image)
        names = n.containerd.names
    stray = LayerDirs(root)
    os.makedirs(f"{root}/layers/sha256/{'0' * 64}")
    os.makedirs(f"{root}/m/999")
    os.makedirs(f"{root}/layers/.new-half-made")
    os.makedirs(f"{root}/layers/.trash/was-removed")
    async with node(root, registry) as n:
        n.containerd.names = names
        assert digests.from_hex("0" * 64) not in stray.known()
        assert "999" not in os.listdir(f"{root}/m")
        assert not any(name.startswith(".new-") for name in os.listdir(f"{root}/layers"))
        assert "was-removed" not in os.listdir(f"{root}/layers/.trash")
        n.plane.fail[layers[1].digest] = MountError("its blobs are gone", errno=2)
        await n.layers.tend_once()
        await n.layers.tend_once()
        assert {layer.digest for layer in layers if n.plane.calls["attach", layer.digest]} == {each.digest for each in layers}
        assert [record.levelname for record in caplog.records if "cannot be mounted" in record.message] == ["ERROR"], (
            "told once"
        )
        ns = n.containerd.namespace("a")
        await ns.run("c0", image.chain()[0])
        with pytest.raises(Exception, match="its blobs are gone"):
            await ns.run("c1", image.chain()[2])
        ns.remove("c0")
        del n.plane.fail[layers[1].digest]
        await n.layers.tend_once()
        await ns.run("c2", image.chain()[2])


async def test_a_complete_layer_takes_the_place_of_the_lazy_one(root: str, registry: SimulatedRegistry, images: Images) -> None:
    from weenv.plugin.snapshotter.planes.base import COMPLETE, Attachment

    layer = images.file("a")
    async with node(root, registry) as n:
        await n.containerd.namespace("a").pull(images.image([layer]))
        await n.layers.tend_once()
        assert n.plane.calls["replace", layer.digest] == 0
        n.plane.better[layer.digest] = Attachment(COMPLETE)
        (row,) = n.store.layers()
        assert n.layers.attached([row.id])  # somebody is told of it just now, and mounts it a moment later
        await n.layers.tend_once(rest=60)
        assert n.plane.calls["replace", layer.digest] == 0
        await n.layers.tend_once()
        await n.layers.tend_once(rest=60)
        assert n.plane.calls["replace", layer.digest] == 1
        assert [row.mode for row in n.store.layers()] == [COMPLETE]


def test_every_error_has_a_reason_and_every_reason_a_text() -> None:
    from weenv.core import errors

    for kind in (errors.FormatError, errors.LimitError, errors.UnsupportedError, errors.NotFoundInSource, errors.MountError):
        assert reason_of(kind("x")) in REASONS
    assert reason_of(ValueError()) == "internal"
    assert reason_of(TimeoutError()) == "timeout"


def test_the_images_of_these_tests_are_tar_files(tmp_path: object) -> None:
    path = write_tar(f"{tmp_path}/x.tar", [Member("f", b"x")])
    assert tarfile.is_tarfile(path)


@pytest.mark.parametrize(("large", "together"), [(16 << 20, 6), (0, 1)])
async def test_large_tails_are_held_one_at_a_time(
    root: str, registry: SimulatedRegistry, images: Images, monkeypatch: pytest.MonkeyPatch, large: int, together: int
) -> None:
    """An image of a hundred layers that each claim half a gigabyte of tail must not take fifty of memory."""
    monkeypatch.setattr(resolve, "_LARGE_TAIL", large)
    now, most = 0, 0

    async def counted(sim: SimulatedRegistry, request: web.Request, blob: bytes, start: int, end: int) -> web.StreamResponse:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.2)
        now -= 1
        headers = {"Content-Range": f"bytes {start}-{end - 1}/{len(blob)}"}
        return web.Response(status=206, body=blob[start:end], headers=headers)

    registry.script.extend([counted] * 6)
    async with node(root, registry) as n:
        assert await n.containerd.namespace("default").pull(images.image([images.file(name) for name in "abcdef"])) == []
    assert most == together


async def test_a_manifest_that_cannot_be_had_is_asked_for_once(
    root: str, registry: SimulatedRegistry, images: Images, caplog: pytest.LogCaptureFixture
) -> None:
    """An ordinary image of a registry that does not let us in costs one request, not one for each of its layers."""
    image = images.image([images.file(name, plain=True) for name in "abcd"])
    registry.manifests.clear()
    async with node(root, registry) as n:
        assert len(await n.containerd.namespace("default").pull(image)) == 4
        assert registry.count("registry", part="/manifests/") == 1
        assert n.fallbacks() == {"not-converted": 1}
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
