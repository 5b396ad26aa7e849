"""Whole conversions between layout directories: what changes, what does not, and what an interrupted one leaves."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import random
import stat
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from weenv.converter.image import REFERENCE_DIGEST, convert_image
from weenv.converter.options import CONVERTED, COPIED, SKIPPED, ConvertOptions, ConvertResult, Event, LayerResult
from weenv.converter.pipeline import convert_layer_file
from weenv.core.errors import BadReference, FormatError, NotFoundInSource, StorageError, VerificationError
from weenv.layer.verify import LAYER_ANNOTATION, MEDIA_TYPE, SOURCE_ANNOTATION, TOC_ANNOTATION, parse_annotations, verify_tail
from weenv.registry.layout import Layout
from weenv.registry.manifest import (
    DOCKER_CONFIG,
    DOCKER_LIST,
    DOCKER_MANIFEST,
    OCI_CONFIG,
    OCI_INDEX,
    OCI_LAYER_GZIP,
    OCI_LAYER_TAR,
    OCI_MANIFEST,
    Descriptor,
    Index,
    Manifest,
    parse_manifest,
)
from weenv_testkit.layers import sample_tar

DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
TARS = [sample_tar(seed, 200_000) for seed in (1, 2, 3)]
PACK = {"gzip": lambda data: gzip.compress(data, 1, mtime=0), "zstd": zstandard.compress, "none": bytes}


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@dataclass
class Builder:
    """Puts images together in a layout."""

    layout: Layout
    diff_ids: dict[str, str] = field(default_factory=dict)

    def blob(self, data: bytes, media_type: str) -> Descriptor:
        return self.layout.put(data, media_type)

    def layer(self, tar: bytes, compression: str = "gzip", media_type: str = "") -> Descriptor:
        suffix = "" if compression == "none" else "+" + compression
        made = self.blob(PACK[compression](tar), media_type or OCI_LAYER_TAR + suffix)
        self.diff_ids[made.digest] = digest_of(tar)
        return made

    def image(self, layers: list[Descriptor], tag: str = "", *, docker: bool = False, **extra: Any) -> Descriptor:
        diff_ids = [self.diff_ids[layer.digest] for layer in layers]
        config = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": diff_ids}, "x": 1.50}
        text = json.dumps(config, indent=3).encode()  # not how we would write it
        made = self.blob(text, DOCKER_CONFIG if docker else OCI_CONFIG)
        kind = DOCKER_MANIFEST if docker else OCI_MANIFEST
        manifest = {"schemaVersion": 2, "mediaType": kind, "config": made.to_json(), "layers": [d.to_json() for d in layers]}
        found = self.blob(json.dumps(manifest | extra, indent=1).encode(), kind)
        if tag:
            self.layout.set_tag(found, tag)
        return found

    def index(self, manifests: list[Descriptor], tag: str, kind: str = OCI_INDEX, **extra: Any) -> Descriptor:
        body = {"schemaVersion": 2, "mediaType": kind, "manifests": [d.to_json() for d in manifests]} | extra
        found = self.blob(json.dumps(body).encode(), kind)
        self.layout.set_tag(found, tag)
        return found


@dataclass
class Rig:
    """A source to fill, a destination, and what is left behind."""

    path: Path
    source: Builder
    options: ConvertOptions

    @property
    def src(self) -> str:
        return f"oci:{self.path}/src:v1"

    @property
    def dst(self) -> str:
        return f"oci:{self.path}/dst:v1"

    @property
    def out(self) -> Layout:
        return Layout(str(self.path / "dst"))

    async def convert(self, **changes: Any) -> ConvertResult:
        return await convert_image(self.src, self.dst, options=replace(self.options, **changes))

    def leftovers(self) -> list[str]:
        return [str(p) for p in self.path.rglob("*") if "weenv-" in p.name or p.name.startswith((".", "in-", "out-"))]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    layout = Layout(str(tmp_path / "src"))
    layout.create()
    return Rig(tmp_path, Builder(layout), ConvertOptions(target=32 << 10, cache_dir=str(tmp_path / "cache"), threads=2))


def load(layout: Layout, descriptor: Descriptor) -> Manifest | Index:
    return parse_manifest(layout.read_blob(descriptor), descriptor.media_type)


def check_layer(layout: Layout, layer: Descriptor, tar: bytes) -> None:
    """The whole chain: descriptor, annotations, tail, and that a plain zstd reader gets the original tar."""
    claimed = parse_annotations(layer.annotations)
    assert claimed is not None and layer.media_type == MEDIA_TYPE
    assert (claimed.digest, claimed.size) == (layer.digest, layer.size)
    blob = Path(layout.verify_blob(layer)).read_bytes()
    toc = verify_tail(blob[claimed.toc_offset :], claimed)
    assert toc.diff_id == digest_of(tar)
    reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(blob), read_across_frames=True)
    assert reader.read() == tar


@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
async def test_one_image(rig: Rig, compression: str) -> None:
    layers = [rig.source.layer(tar, compression) for tar in TARS]
    old = rig.source.image(layers, "v1", annotations={"keep": "me"}, unknown=[1, 2])
    result = await rig.convert()
    assert result.lazy and [layer.status for layer in result.layers] == [CONVERTED] * 3
    new = rig.out.resolve("v1")
    assert new.digest == result.descriptor.digest != old.digest
    before, after = load(rig.source.layout, old), load(rig.out, new)
    assert isinstance(before, Manifest) and isinstance(after, Manifest)
    assert after.config == before.config
    assert rig.out.read_blob(after.config) == rig.source.layout.read_blob(before.config)
    left, right = json.loads(before.text), json.loads(after.text)
    assert {k: v for k, v in left.items() if k != "layers"} == {k: v for k, v in right.items() if k != "layers"}
    for layer, tar in zip(after.layers, TARS, strict=True):
        check_layer(rig.out, layer, tar)
    for layer, tar in zip(result.layers, TARS, strict=True):
        assert layer.stream_size == len(tar) and layer.diff_id == digest_of(tar) and layer.seconds > 0
    assert not rig.leftovers()


async def test_the_same_input_gives_the_same_manifest(rig: Rig) -> None:
    rig.source.image([rig.source.layer(tar) for tar in TARS], "v1")
    first = await rig.convert(threads=1, jobs=1)
    second = await convert_image(rig.src, f"oci:{rig.path}/other", options=replace(rig.options, threads=4, cache_dir=None))
    assert first.descriptor.digest == second.descriptor.digest
    assert Layout(f"{rig.path}/other").resolve().digest == first.descriptor.digest
    # Once more: everything is found, nothing is read.
    for layer in first.layers:
        os.truncate(rig.source.layout.blob_path(layer.old.digest), 0)
    again = await rig.convert()
    assert again.descriptor.digest == first.descriptor.digest
    assert {(layer.status, layer.reason) for layer in again.layers} == {(SKIPPED, "converted before")}
    with pytest.raises(VerificationError):
        await rig.convert(force=True)
    # What is in the format is left alone.
    third = await convert_image(rig.dst, f"oci:{rig.path}/third:x", options=rig.options)
    assert third.descriptor.digest == first.descriptor.digest
    assert {(layer.status, layer.reason) for layer in third.layers} == {(SKIPPED, "already in the format")}
    assert third.lazy
    # In place, too.
    fourth = await convert_image(rig.dst, rig.dst, options=rig.options)
    assert fourth.descriptor.digest == first.descriptor.digest


async def test_a_wrong_memory_costs_a_conversion_only(rig: Rig) -> None:
    rig.source.image([rig.source.layer(TARS[0])], "v1")
    first = await rig.convert()
    (entry,) = (rig.path / "cache").iterdir()
    known = json.loads(entry.read_text())
    for change in ({"diff_id": digest_of(b"")}, {"layer": known["layer"] | {"size": 1}}, {"layer": {}}, {"stream_size": "x"}):
        entry.write_text(json.dumps(known | change))
        again = await rig.convert()
        assert again.descriptor.digest == first.descriptor.digest
        assert [layer.status for layer in again.layers] == [CONVERTED]
    entry.write_text("{")
    assert (await rig.convert()).descriptor.digest == first.descriptor.digest


async def test_index_with_attestation(rig: Rig) -> None:
    shared = rig.source.layer(TARS[0])
    amd = rig.source.image([shared, rig.source.layer(TARS[1])])
    arm = rig.source.image([shared, rig.source.layer(TARS[2], "zstd")], annotations={"a": "b"})
    statement = rig.source.blob(b'{"_type": "https://in-toto.io/Statement/v0.1"}', "application/vnd.in-toto+json")
    proof = rig.source.blob(
        json.dumps({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": rig.source.blob(b"{}", OCI_CONFIG).to_json(),
                    "layers": [statement.to_json()]}).encode(), OCI_MANIFEST,
    )  # fmt: skip
    entries = [
        replace(amd, platform={"os": "linux", "architecture": "amd64"}),
        replace(arm, platform={"os": "linux", "architecture": "arm64", "variant": "v8"}),
        replace(proof, platform={"os": "unknown", "architecture": "unknown"},
                annotations={REFERENCE_DIGEST: amd.digest, "vnd.docker.reference.type": "attestation-manifest"}),
    ]  # fmt: skip
    old = rig.source.index(entries, "v1", annotations={"top": "level"}, unknown={"x": 1})
    result = await rig.convert()
    before, after = load(rig.source.layout, old), load(rig.out, rig.out.resolve("v1"))
    assert isinstance(after, Index) and isinstance(before, Index)
    assert [m.platform for m in after.manifests] == [m.platform for m in before.manifests]
    assert json.loads(after.text)["unknown"] == {"x": 1} and after.annotations == {"top": "level"}
    # The attestation is what it was, and is tied to the image that took the place of the one it speaks of.
    assert after.manifests[2].digest == proof.digest
    assert after.manifests[2].annotations == entries[2].annotations | {REFERENCE_DIGEST: after.manifests[0].digest}
    rig.out.verify_blob(statement)
    for number, tars in ((0, [TARS[0], TARS[1]]), (1, [TARS[0], TARS[2]])):
        image = load(rig.out, after.manifests[number])
        assert isinstance(image, Manifest)
        for layer, tar in zip(image.layers, tars, strict=True):
            check_layer(rig.out, layer, tar)
    assert [m.reason for m in result.manifests if m.new.digest == proof.digest] == ["not a container image"]
    assert {layer.platform for layer in result.layers} == {"linux/amd64", "linux/arm64/v8"}
    assert result.lazy
    assert sum(1 for layer in result.layers if layer.old.digest == shared.digest and layer.seconds > 0) <= 1

    one = await convert_image(
        rig.src, f"oci:{rig.path}/one:v1", options=replace(rig.options, platforms=("linux/amd64",), cache_dir=None)
    )
    listed = load(Layout(f"{rig.path}/one"), one.descriptor)
    assert isinstance(listed, Index)
    assert listed.manifests[0].digest == after.manifests[0].digest and listed.manifests[1].digest == arm.digest


async def test_docker_media_types(rig: Rig) -> None:
    layers = [rig.source.layer(tar, "gzip", DOCKER_LAYER) for tar in TARS[:2]]
    broken = rig.source.blob(gzip.compress(b"no tar" * 200), DOCKER_LAYER)
    rig.source.diff_ids[broken.digest] = digest_of(b"no tar" * 200)
    image = rig.source.image([*layers, broken], docker=True)
    rig.source.index([replace(image, platform={"os": "linux", "architecture": "amd64"})], "v1", DOCKER_LIST)
    result = await rig.convert()
    index = load(rig.out, rig.out.resolve("v1"))
    assert isinstance(index, Index) and index.media_type == OCI_INDEX
    manifest = load(rig.out, index.manifests[0])
    assert isinstance(manifest, Manifest) and manifest.media_type == OCI_MANIFEST
    assert manifest.config.media_type == OCI_CONFIG
    assert [layer.media_type for layer in manifest.layers] == [MEDIA_TYPE, MEDIA_TYPE, OCI_LAYER_GZIP]
    assert [layer.new for layer in result.layers] == list(manifest.layers)
    assert not result.lazy


def bad_layers(source: Builder) -> dict[str, Descriptor]:
    """Layers that cannot be represented, by what the reason must say."""
    tar = TARS[0]
    wrong = source.layer(TARS[1])
    source.diff_ids[wrong.digest] = digest_of(b"something else")
    bad: dict[str, tuple[bytes, bytes]] = {
        "truncated": (gzip.compress(tar)[:-5], tar),
        "broken": (gzip.compress(tar) + b"garbage" * 9, tar),
        "xz": (b"\xfd7zXZ\0" + bytes(100), tar),
        "zstd": (zstandard.compress(tar)[:-5], tar),
        "": (b"this is no tar archive at all" * 100, b"this is no tar archive at all" * 100),
    }
    found = {"diffID": wrong}
    for reason, (data, content) in bad.items():
        found[reason] = source.blob(data, OCI_LAYER_GZIP)
        source.diff_ids[found[reason].digest] = digest_of(content)
    return found


async def test_what_cannot_be_represented_is_copied_with_the_reason(rig: Rig) -> None:
    bad = bad_layers(rig.source)
    good = rig.source.layer(TARS[2])
    old = rig.source.image([good, *bad.values()], "v1")
    result = await rig.convert()
    assert not result.lazy
    assert result.layers[0].status == CONVERTED
    for layer, (reason, was) in zip(result.layers[1:], bad.items(), strict=True):
        assert layer.status == COPIED and reason in layer.reason and layer.reason
        assert layer.new == was
        rig.out.verify_blob(was)
    before, after = json.loads(rig.source.layout.read_blob(old)), json.loads(rig.out.read_blob(result.descriptor))
    assert before["layers"][1:] == after["layers"][1:]
    assert not rig.leftovers()


async def test_an_image_that_stays_as_it_is_keeps_its_digest(rig: Rig) -> None:
    bad = list(bad_layers(rig.source).values())
    for docker in (False, True):
        old = rig.source.image(bad, "v1", docker=docker)
        result = await rig.convert()
        assert result.descriptor.digest == old.digest
        assert rig.out.read_blob(rig.out.resolve("v1")) == rig.source.layout.read_blob(old)


async def test_layers_that_are_no_tars_are_copied(rig: Rig) -> None:
    sealed = rig.source.blob(b"sealed", "application/vnd.oci.image.layer.v1.tar+gzip+encrypted")
    rig.source.diff_ids[sealed.digest] = digest_of(b"")
    rig.source.image([rig.source.layer(TARS[0]), sealed], "v1")
    result = await rig.convert()
    assert [layer.status for layer in result.layers] == [CONVERTED, COPIED]
    assert result.layers[1].reason.startswith("not a tar layer: application/vnd.oci") and result.layers[1].new == sealed
    rig.out.verify_blob(sealed)


async def test_images_for_other_systems_are_copied(rig: Rig) -> None:
    old = rig.source.image([rig.source.layer(TARS[0])])
    manifest = load(rig.source.layout, old)
    assert isinstance(manifest, Manifest)
    config = json.loads(rig.source.layout.read_blob(manifest.config)) | {"os": "windows"}
    other = rig.source.blob(json.dumps(config).encode(), OCI_CONFIG)
    body = json.loads(manifest.text) | {"config": other.to_json()}
    rig.source.layout.set_tag(rig.source.blob(json.dumps(body).encode(), OCI_MANIFEST), "v1")
    result = await rig.convert()
    assert [m.reason for m in result.manifests] == ["an image for windows"] and result.layers == ()
    assert result.descriptor.digest == rig.source.layout.resolve("v1").digest


async def test_layers_elsewhere_are_left_there(rig: Rig) -> None:
    foreign = Descriptor(
        "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip", digest_of(b"far"), 3, urls=("https://far.example/x",)
    )
    rig.source.diff_ids[foreign.digest] = digest_of(b"")
    rig.source.image([foreign, rig.source.layer(TARS[0])], "v1")
    result = await rig.convert()
    assert result.layers[0].status == COPIED and "redistributed" in result.layers[0].reason
    assert result.layers[0].new == foreign
    assert not rig.out.has_blob(foreign.digest, 3)


async def test_annotations_of_other_formats_go(rig: Rig) -> None:
    layer = replace(
        rig.source.layer(TARS[0]),
        annotations={
            "containerd.io/snapshot/stargz/toc.digest": digest_of(b""),
            "io.containers.estargz.uncompressed-size": "1",
            "io.github.containers.zstd-chunked.manifest-position": "1:2:3:4",
            "org.example": "kept",
            TOC_ANNOTATION: "nonsense",
        },
    )
    rig.source.image([layer], "v1")
    result = await rig.convert(source_hint=True)
    assert set(result.layers[0].new.annotations) == {"org.example", TOC_ANNOTATION, LAYER_ANNOTATION}
    assert SOURCE_ANNOTATION not in result.layers[0].new.annotations  # a directory is no registry
    assert result.layers[0].status == CONVERTED


async def test_annotations_that_lie_are_not_believed(rig: Rig) -> None:
    rig.source.image([rig.source.layer(TARS[0])], "v1")
    good = (await rig.convert()).layers[0].new
    other = rig.source.layer(TARS[1], "zstd")
    offset, length, digest = good.annotations[TOC_ANNOTATION].split(",")
    blob = Path(rig.out.blob_path(good.digest)).read_bytes()
    rig.source.blob(blob, MEDIA_TYPE)
    rig.source.diff_ids[good.digest] = digest_of(TARS[0])
    lies = [
        replace(good, annotations={**good.annotations, TOC_ANNOTATION: f"{offset},{length},{digest_of(b'')}"}),
        replace(good, annotations={**good.annotations, TOC_ANNOTATION: f"{int(offset) + 1},{int(length) - 1},{digest}"}),
        replace(good, annotations={**good.annotations, LAYER_ANNOTATION: f"{other.digest},{other.size}"}),
        replace(other, annotations=dict(good.annotations)),
    ]
    for lie in lies:
        rig.source.image([lie], "v1")
        result = await convert_image(rig.src, f"oci:{rig.path}/again:v1", options=replace(rig.options, force=True))
        assert result.layers[0].status == CONVERTED
        new = result.layers[0].new
        check_layer(Layout(f"{rig.path}/again"), new, TARS[0] if lie.digest == good.digest else TARS[1])


# -- failures -------------------------------------------------------------------------------------------------------


async def test_tampered_source_is_an_error_and_nothing_is_published(rig: Rig) -> None:
    layers = [rig.source.layer(tar) for tar in TARS]
    image = rig.source.image(layers, "v1")
    manifest = load(rig.source.layout, image)
    assert isinstance(manifest, Manifest)
    for victim in (layers[1], manifest.config, image):
        path = Path(rig.source.layout.blob_path(victim.digest))
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(VerificationError):
            await rig.convert(cache_dir=None)
        path.unlink()
        with pytest.raises(NotFoundInSource):
            await rig.convert(cache_dir=None)
        path.write_bytes(whole)
        assert rig.out.index().manifests == () and not rig.leftovers()
    await rig.convert()


async def test_config_that_does_not_fit(rig: Rig) -> None:
    layer = rig.source.layer(TARS[0])
    image = rig.source.image([layer])
    body = json.loads(rig.source.layout.read_blob(image))
    body["layers"] *= 2
    rig.source.layout.set_tag(rig.source.blob(json.dumps(body).encode(), OCI_MANIFEST), "v1")
    with pytest.raises(FormatError, match="1 diffIDs for 2 layers"):
        await rig.convert()


async def test_index_that_never_ends(rig: Rig) -> None:
    inner = rig.source.image([rig.source.layer(TARS[0])])
    for _ in range(6):
        inner = rig.source.index([inner], "v1")
    with pytest.raises(FormatError, match="nested"):
        await rig.convert()


async def test_indexes_that_list_one_another_many_times(rig: Rig) -> None:
    """Each document is converted once, though there are 12 ** 3 ways to it."""
    inner = rig.source.image([rig.source.layer(TARS[0])])
    for _ in range(3):
        inner = rig.source.index([inner] * 12, "v1")
    result = await rig.convert()
    assert len(result.manifests) == 1
    top = load(rig.out, rig.out.resolve("v1"))
    assert isinstance(top, Index)
    assert len(top.manifests) == 12


async def test_destination_cannot_be_a_digest(rig: Rig) -> None:
    rig.source.image([rig.source.layer(TARS[0])], "v1")
    for bad in (f"oci:{rig.path}/d@sha256:{'0' * 64}", f"r.example/a@sha256:{'0' * 64}"):
        with pytest.raises(BadReference, match="cannot be written"):
            await convert_image(rig.src, bad, options=rig.options)


@pytest.mark.parametrize("moment", range(0, 26, 2))
async def test_interrupted_at_any_moment(rig: Rig, moment: int) -> None:
    """Cancelled at the n-th event of progress: no tag, no temporary file, no thread; and the next run finishes."""
    rig.source.image([rig.source.layer(tar, c) for tar, c in zip(TARS, ("gzip", "none", "zstd"), strict=True)], "v1")
    loop, seen, threads = asyncio.get_running_loop(), 0, threading.active_count()

    def progress(event: Event) -> None:
        nonlocal seen
        seen += 1
        if seen > moment:
            loop.call_soon_threadsafe(task.cancel)

    task = asyncio.ensure_future(rig.convert(progress=progress, jobs=1 + moment % 2))
    try:
        result = await task
    except asyncio.CancelledError:
        assert rig.out.index().manifests == ()
    else:
        assert rig.out.resolve("v1").digest == result.descriptor.digest
    assert not rig.leftovers()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("weenv-encode", "weenv-decompress"))], (names, threads)
    finished = await rig.convert()
    assert finished.lazy
    fresh = await convert_image(rig.src, f"oci:{rig.path}/fresh:v1", options=replace(rig.options, cache_dir=None))
    assert finished.descriptor.digest == fresh.descriptor.digest


async def test_progress(rig: Rig) -> None:
    tars = [random.Random(9).randbytes(0) + sample_tar(7, 3_000_000), *TARS[:2]]
    rig.source.image([rig.source.layer(tar) for tar in tars], "v1")
    events: list[Event] = []
    result = await rig.convert(progress=events.append)
    for layer in result.layers:
        mine = [event for event in events if event.digest == layer.old.digest]
        assert mine[-1] == Event("done", layer.old.digest, layer.old.size, layer.old.size, CONVERTED)
        converting = [event.done for event in mine if event.stage == "convert"]
        assert converting == sorted(converting) and converting[-1] == layer.old.size


# -- single layers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
def test_layer_file(tmp_path: Path, compression: str) -> None:
    tar = TARS[0]
    (tmp_path / "in").write_bytes(PACK[compression](tar))
    moved: list[tuple[int, int | None]] = []
    encoded = convert_layer_file(
        str(tmp_path / "in"), str(tmp_path / "out"), progress=lambda done, total: moved.append((done, total))
    )
    assert encoded.diff_id == digest_of(tar)
    blob = (tmp_path / "out").read_bytes()
    assert digest_of(blob) == encoded.blob_digest
    assert verify_tail(blob[encoded.toc_offset :], encoded.descriptor()).diff_id == encoded.diff_id
    assert moved[-1] == (len(PACK[compression](tar)), len(PACK[compression](tar)))
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_layer_file_failures_leave_the_old_output(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(gzip.compress(TARS[0])[:-4])
    (tmp_path / "out").write_bytes(b"before")
    with pytest.raises(FormatError, match="truncated"):
        convert_layer_file(str(tmp_path / "in"), str(tmp_path / "out"))
    with pytest.raises(NotFoundInSource):
        convert_layer_file(str(tmp_path / "none"), str(tmp_path / "out"))
    (tmp_path / "in").write_bytes(TARS[0])

    def interrupt(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_layer_file(str(tmp_path / "in"), str(tmp_path / "out"), progress=interrupt)
    with pytest.raises(StorageError):
        convert_layer_file(str(tmp_path / "in"), str(tmp_path / "no" / "out"))
    with pytest.raises(StorageError, match="directory"):
        convert_layer_file(str(tmp_path / "in"), str(tmp_path))
    assert (tmp_path / "out").read_bytes() == b"before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")  # as /dev/stdout is one
    for special in ("pipe", "link"):  # a rename would take /dev/null away from the whole machine
        with pytest.raises(StorageError, match="no regular file"):
            convert_layer_file(str(tmp_path / "in"), str(tmp_path / special))
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert (tmp_path / "link").is_symlink()


def test_results_say_what_is_lazy() -> None:
    some = Descriptor("x", digest_of(b""), 0)
    layers = tuple(LayerResult("", n, some, some, status) for n, status in enumerate((CONVERTED, SKIPPED)))
    result = ConvertResult("a", "b", some, (), layers, 0.0)
    assert result.lazy
    assert not replace(result, layers=(*layers, LayerResult("", 2, some, some, COPIED))).lazy
    assert not replace(result, layers=()).lazy
