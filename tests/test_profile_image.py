"""Publishing a profile: the manifest's annotations change, everything else stays byte for byte."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from weenv.converter.image import convert_image
from weenv.converter.options import ConvertOptions
from weenv.converter.profile import Published, images, publish_profile
from weenv.core.errors import FormatError, InvalidRequest, NotFoundInSource
from weenv.layer.profile import Run, decode
from weenv.layer.verify import PREFETCH_ANNOTATION, parse_annotations
from weenv.registry.endpoints import LayoutEnd
from weenv.registry.layout import Layout
from weenv.registry.manifest import OCI_INDEX, OCI_LAYER_GZIP, OCI_MANIFEST, Descriptor, Manifest, parse_manifest
from weenv.registry.reference import LayoutLocation
from weenv_testkit.images import Layout as Made
from weenv_testkit.images import Member, write_tar

Records = Mapping[str, Sequence[tuple[int, int]]]


class Rig:
    """A layout with converted images; results are written beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        made = Made(str(path / "made"))
        tars = [
            write_tar(str(path / f"{name}.tar"), [Member(f"{name}/{part}", os.urandom(200_000)) for part in "abc"])
            for name in ("low", "high", "arm")
        ]
        layers = [made.layer(tar) for tar in tars]
        made.image(layers[:2], "two")
        made.image(layers[2:], "arm")
        self.plain = layers[0]
        self.options = ConvertOptions(target=64 << 10, cache_dir=None, threads=2)
        self.layout = Layout(str(path / "src"))

    async def make(self) -> None:
        """Convert."""
        for tag in ("two", "arm"):
            await convert_image(f"oci:{self.path}/made:{tag}", f"oci:{self.path}/src:{tag}", options=self.options)

    def manifest(self, place: str = "src", tag: str = "two", digest: str = "") -> Manifest:
        """A manifest that was written."""
        layout = Layout(str(self.path / place))
        descriptor = Descriptor(OCI_MANIFEST, digest, 0) if digest else layout.resolve(tag)
        data = Path(layout.blob_path(descriptor.digest)).read_bytes()
        parsed = parse_manifest(data)
        assert isinstance(parsed, Manifest)
        return parsed

    async def publish(self, records: Records, tag: str = "two", to: str = "dst:x") -> Published:
        """Publish what ``records`` says."""
        return await publish_profile(
            f"oci:{self.path}/src:{tag}", f"oci:{self.path}/{to}",
            lambda digests: {digest: records[digest] for digest in digests if digest in records}, options=self.options,
        )  # fmt: skip


@pytest.fixture
async def rig(tmp_path: Path) -> Rig:
    made = Rig(tmp_path)
    await made.make()
    return made


async def test_annotations_are_all_that_changes(rig: Rig) -> None:
    before = rig.manifest()
    low, high = before.layers
    done = await rig.publish({low.digest: [(1000, 3), (1001, 4)], high.digest: [(1002, 0), (1002, 1)]})
    after = rig.manifest("dst", "x")
    assert done.result.descriptor.digest == Layout(str(rig.path / "dst")).resolve("x").digest
    assert {digest: (one.frames, one.cut) for digest, one in done.profiles.items()} == {low.digest: (2, 0), high.digest: (2, 0)}
    found = [layer.annotations.pop(PREFETCH_ANNOTATION) for layer in after.layers]
    assert decode(found[0], 100) == [Run(0, 3, 1), Run(1, 4, 1)]
    assert decode(found[1], 100) == [Run(2, 0, 2)], "times are the image's, not the layer's"
    assert (after.config, after.layers) == (before.config, before.layers)
    for blob in (after.config, *after.layers):
        name = blob.digest[7:]
        assert (rig.path / "dst/blobs/sha256" / name).read_bytes() == (rig.path / "src/blobs/sha256" / name).read_bytes()


async def test_a_layer_without_a_record_keeps_the_profile_that_it_has(rig: Rig) -> None:
    low, high = rig.manifest().layers
    await rig.publish({low.digest: [(5, 1)]}, to="src:two")
    await rig.publish({high.digest: [(9, 2)]}, to="src:two")
    found = [parse_annotations(layer.annotations) for layer in rig.manifest().layers]
    assert all(one is not None and one.prefetch for one in found)
    again = await rig.publish({low.digest: [(5, 1)], high.digest: [(9, 2)]}, to="src:two")
    assert [row.reason for row in again.result.layers] == ["", ""]
    await rig.publish({low.digest: [(0, 7)]}, to="src:two")
    refined = parse_annotations(rig.manifest().layers[0].annotations)
    assert refined is not None and decode(refined.prefetch, 100) == [Run(0, 7, 1)], "a record replaces what was published"


async def test_converting_again_keeps_it(rig: Rig) -> None:
    low, _ = rig.manifest().layers
    done = await rig.publish({low.digest: [(5, 1)]})
    again = await convert_image(f"oci:{rig.path}/dst:x", f"oci:{rig.path}/again:y", options=rig.options)
    assert again.descriptor.digest == done.result.descriptor.digest


async def test_of_an_index_only_the_platforms_that_were_read_change(rig: Rig) -> None:
    children = []
    for tag, architecture in (("two", "amd64"), ("arm", "arm64")):
        child = rig.layout.resolve(tag)
        children.append({**child.to_json(), "platform": {"os": "linux", "architecture": architecture}})
        children[-1].pop("annotations", None)
    index = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": children, "x": 1.50}).encode()
    rig.layout.set_tag(rig.layout.put(index, OCI_INDEX), "all")
    low, _ = rig.manifest().layers
    done = await rig.publish({low.digest: [(5, 1)]}, tag="all")
    out = Layout(str(rig.path / "dst"))
    new = json.loads(out.read_blob(out.resolve("x")))
    assert new["manifests"][1] == children[1] and new["x"] == 1.5
    assert new["manifests"][0]["digest"] != children[0]["digest"]
    assert [bool(row.reason) for row in done.result.manifests].count(True) == 1
    assert PREFETCH_ANNOTATION in rig.manifest("dst", digest=new["manifests"][0]["digest"]).layers[0].annotations
    found = await images(LayoutEnd(LayoutLocation(str(rig.path / "dst"), "x")))
    assert [platform for platform, _ in found] == ["linux/amd64", "linux/arm64"]


async def test_nothing_recorded_is_said_and_nothing_is_written(rig: Rig) -> None:
    with pytest.raises(InvalidRequest, match="was recorded on this node") as error:
        await rig.publish({})
    assert "complete before anything was read" in error.value.hint
    assert not (rig.path / "dst").exists()
    with pytest.raises(NotFoundInSource):
        await rig.publish({}, tag="nowhere")


async def test_an_ordinary_layer_stays_one(rig: Rig) -> None:
    low, high = rig.manifest().layers
    old = rig.manifest()
    plain = Descriptor(OCI_LAYER_GZIP, rig.plain.digest, rig.plain.size)
    blob = (rig.path / "made/blobs/sha256" / plain.digest[7:]).read_bytes()
    rig.layout.put(blob, OCI_LAYER_GZIP)
    data = old.with_layers({0: replace(plain, annotations={})})
    rig.layout.set_tag(rig.layout.put(data, OCI_MANIFEST), "mixed")
    done = await rig.publish({high.digest: [(5, 1)], low.digest: [(5, 1)], plain.digest: [(5, 1)]}, tag="mixed")
    assert [row.reason for row in done.result.layers] == ["not in the lazy format", ""]
    assert not rig.manifest("dst", "x").layers[0].annotations


async def test_an_index_in_an_index_is_refused_with_what_to_do(rig: Rig) -> None:
    child = rig.layout.resolve("two").to_json()
    inner = rig.layout.put(json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [child]}).encode(), OCI_INDEX)
    outer = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [inner.to_json()]}
    rig.layout.set_tag(rig.layout.put(json.dumps(outer).encode(), OCI_INDEX), "nested")
    with pytest.raises(FormatError, match="an index within an index"):
        await images(LayoutEnd(LayoutLocation(str(rig.path / "src"), "nested")))
