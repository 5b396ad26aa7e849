"""Manifests: bounded and strict parsing, and rewriting that changes nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.core.errors import FormatError, UnsupportedError
from weenv.registry import jsonsplice
from weenv.registry.manifest import (
    DOCKER_CONFIG,
    DOCKER_LIST,
    DOCKER_MANIFEST,
    MAX_LAYERS,
    MAX_MANIFEST,
    MAX_MANIFESTS,
    OCI_CONFIG,
    OCI_INDEX,
    OCI_LAYER_GZIP,
    OCI_LAYER_ZSTD,
    OCI_MANIFEST,
    Descriptor,
    Index,
    Manifest,
    parse_config,
    parse_manifest,
)

A, B, C, D = ("sha256:" + c * 64 for c in "abcd")

# As some tools write it: odd white space, unknown fields, escapes, numbers with more than one spelling.
IMAGE = f"""{{
   "schemaVersion": 2,
   "mediaType" : "{OCI_MANIFEST}",
   "config": {{"mediaType": "{OCI_CONFIG}", "digest": "{A}", "size": 7, "x-config": [1.50, 1e2]}},
   "layers": [
      {{"mediaType": "{OCI_LAYER_GZIP}", "size": 10, "digest": "{B}", "annotations": {{"k": "\\u00e9"}}, "extra": 1.0}},
      {{"size":11,"digest":"{C}","mediaType":"{OCI_LAYER_GZIP}"}}
   ],
   "x-unknown": {{"deep": [1.10, "\\u0041"]}}
}}
""".encode()


def manifest(data: bytes, kind: str = "") -> Manifest:
    parsed = parse_manifest(data, kind)
    assert isinstance(parsed, Manifest)
    return parsed


def test_parse() -> None:
    image = manifest(IMAGE, OCI_MANIFEST)
    assert image.data == IMAGE
    assert image.config == Descriptor(OCI_CONFIG, A, 7)
    assert image.layers[0] == Descriptor(OCI_LAYER_GZIP, B, 10, {"k": "é"})
    assert image.is_image
    assert [layer.compression for layer in image.layers] == ["gzip", "gzip"]


def test_rewriting_touches_only_what_changes() -> None:
    image = manifest(IMAGE)
    assert image.with_layers({}) == IMAGE
    new = Descriptor(OCI_LAYER_ZSTD, D, 5, {"k": "é", "new": "v"})
    out = image.with_layers({0: new}).decode()
    head, tail = IMAGE.decode().split('"layers": [', 1)
    assert out.startswith(head)
    assert out.endswith(tail[tail.index("1.0}") :])  # all after the first layer, byte for byte
    again = manifest(out.encode())
    assert again.layers == (new, image.layers[1])
    assert json.loads(out)["layers"][0]["extra"] == 1.0
    # A layer without annotations gets them.
    second = manifest(image.with_layers({1: new}))
    assert second.layers[1] == new and second.layers[0] == image.layers[0]


def test_docker_manifest_becomes_oci() -> None:
    docker = {
        "schemaVersion": 2,
        "mediaType": DOCKER_MANIFEST,
        "config": {"mediaType": DOCKER_CONFIG, "size": 7, "digest": A},
        "layers": [
            {"mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip", "size": 1, "digest": B},
            {"mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "size": 1, "digest": C,
             "urls": ["https://x"]},
        ],
    }  # fmt: skip
    parsed = manifest(json.dumps(docker).encode(), DOCKER_MANIFEST)
    assert parsed.is_image and parsed.layers[1].foreign and parsed.layers[1].urls == ("https://x",)
    new = manifest(parsed.with_layers({0: Descriptor(OCI_LAYER_ZSTD, D, 5, {"a": "b"})}), OCI_MANIFEST)
    assert new.config.media_type == OCI_CONFIG
    assert new.layers[0].media_type == OCI_LAYER_ZSTD
    assert new.layers[1].media_type == "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"
    assert new.layers[1].urls == ("https://x",)


def test_index() -> None:
    listed = {
        "schemaVersion": 2,
        "mediaType": DOCKER_LIST,
        "manifests": [
            {"mediaType": DOCKER_MANIFEST, "size": 1, "digest": A, "platform": {"os": "linux", "architecture": "arm64",
                                                                              "variant": "v8", "os.features": ["x"]}},
            {"mediaType": OCI_MANIFEST, "size": 2, "digest": B, "annotations": {"vnd.docker.reference.digest": A}},
        ],
    }  # fmt: skip
    index = parse_manifest(json.dumps(listed).encode(), DOCKER_LIST)
    assert isinstance(index, Index)
    assert index.manifests[0].platform_name == "linux/arm64/v8"
    new = json.loads(index.with_manifests({0: Descriptor(OCI_MANIFEST, D, 9)}))
    assert new["mediaType"] == OCI_INDEX
    assert new["manifests"][0] == listed["manifests"][0] | {"mediaType": OCI_MANIFEST, "digest": D, "size": 9}  # type: ignore[index]
    assert new["manifests"][1] == listed["manifests"][1]  # type: ignore[index]


def change(**top: Any) -> bytes:
    return json.dumps({k: v for k, v in (json.loads(IMAGE) | top).items() if v is not ...}).encode()


@pytest.mark.parametrize(
    ("data", "kind", "error"),
    [
        (b"", "", FormatError), (b"[]", "", FormatError), (b"\xff", "", FormatError), (IMAGE + b"x", "", FormatError),
        (b"[" * 200_000, "", FormatError), (b'{"a":' * 200_000, "", FormatError), (b" " * (MAX_MANIFEST + 1), "", FormatError),
        (b'{"schemaVersion":2,"schemaVersion":2}', "", FormatError), (b'{"schemaVersion":NaN}', "", FormatError),
        (change(schemaVersion=1), "", UnsupportedError), (change(schemaVersion=...), "", FormatError),
        (change(fsLayers=[]), "", UnsupportedError),
        (change(manifests=[]), "", FormatError), (change(Layers=[]), "", FormatError), (change(mediaType=3), "", FormatError),
        (change(mediaType="application/json"), "", UnsupportedError), (IMAGE, OCI_INDEX, FormatError),
        (change(mediaType=...), OCI_INDEX, UnsupportedError), (IMAGE, DOCKER_MANIFEST, FormatError),
        (change(layers=...), "", FormatError), (change(layers={}), "", FormatError), (change(layers=[None]), "", FormatError),
        (change(layers=[{}] * 5000), "", FormatError), (change(config=...), "", FormatError),
        (change(config={"mediaType": OCI_CONFIG, "digest": "sha512:" + "a" * 128, "size": 1}), "", UnsupportedError),
        (change(config={"mediaType": OCI_CONFIG, "digest": A, "size": -1}), "", FormatError),
        (change(config={"mediaType": OCI_CONFIG, "digest": A, "size": 1.5}), "", FormatError),
        (change(config={"mediaType": OCI_CONFIG, "digest": A, "size": True}), "", FormatError),
        (change(config={"mediaType": OCI_CONFIG, "digest": A, "size": 10**30}), "", FormatError),
        (change(config={"mediaType": OCI_CONFIG, "digest": A, "size": 1, "Digest": B}), "", FormatError),
        (change(config={"mediaType": OCI_CONFIG, "digest": A, "size": 1, "annotations": {"a": 1}}), "", FormatError),
        (change(annotations=[]), "", FormatError), (change(artifactType=5), "", FormatError),
        (change(subject=5), "", FormatError),
    ],
)  # fmt: skip
def test_refused(data: bytes, kind: str, error: type[FormatError]) -> None:
    with pytest.raises(error):
        parse_manifest(data, kind, "m")


def test_what_could_be_read_in_two_ways() -> None:
    """Content of both sorts, and no media type that would decide (CVE-2021-41190)."""
    entry = {"mediaType": OCI_MANIFEST, "digest": A, "size": 1}
    for without in ("", "config", "layers"):
        data = change(mediaType=..., manifests=[entry], **({without: ...} if without else {}))
        for kind in ("", OCI_INDEX, OCI_MANIFEST):
            with pytest.raises(FormatError, match="both a manifest and an index"):
                parse_manifest(data, kind, "m")


def test_lists_are_bounded() -> None:
    entry = {"mediaType": OCI_LAYER_GZIP, "digest": A, "size": 1}
    assert len(manifest(change(layers=[entry] * MAX_LAYERS)).layers) == MAX_LAYERS
    with pytest.raises(FormatError, match=f"more than {MAX_LAYERS} layers"):
        parse_manifest(change(layers=[entry] * (MAX_LAYERS + 1)))
    index = {"schemaVersion": 2, "manifests": [entry] * (MAX_MANIFESTS + 1)}
    with pytest.raises(FormatError, match=f"more than {MAX_MANIFESTS} manifests"):
        parse_manifest(json.dumps(index).encode())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"mediaType": ...}, "without a media type"), ({"mediaType": 3}, "without a media type"),
        ({"mediaType": "a/" + "x" * 254}, "without a media type"), ({"digest": ...}, "without a digest"),
        ({"digest": 5}, "without a digest"), ({"digest": [A]}, "without a digest"),
        ({"platform": []}, "platform is not an object"), ({"platform": "linux"}, "platform is not an object"),
        ({"urls": "https://x"}, "urls are not strings"), ({"urls": [1]}, "urls are not strings"),
        ({"urls": {"x": "y"}}, "urls are not strings"),
    ],
)  # fmt: skip
def test_descriptors_that_are_none(other: dict[str, Any], message: str) -> None:
    descriptor = {k: v for k, v in ({"mediaType": OCI_LAYER_GZIP, "digest": A, "size": 1} | other).items() if v is not ...}
    for data in (change(layers=[descriptor]), change(config=descriptor), change(subject=descriptor)):
        with pytest.raises(FormatError, match=message):
            parse_manifest(data, "", "m")


def test_what_is_no_image() -> None:
    assert manifest(change(artifactType="application/vnd.weenv.group.v1")).is_image, "a layer group is an image"
    assert not manifest(change(artifactType="application/x", layers=[])).is_image
    tar = {"mediaType": OCI_LAYER_ZSTD, "digest": A, "size": 1}
    other = {"mediaType": "application/x", "digest": A, "size": 1}
    assert not manifest(change(artifactType="application/x", layers=[tar, other])).is_image
    assert not manifest(change(config={"mediaType": "application/x", "digest": A, "size": 1})).is_image
    layer = {"mediaType": "application/vnd.in-toto+json", "digest": A, "size": 1}
    assert not manifest(change(layers=[layer])).is_image


def test_config() -> None:
    config = parse_config(json.dumps({"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": [A, B]}}).encode())
    assert config.diff_ids == (A, B)
    for bad in (b"{}", b'{"rootfs":{"diff_ids":["x"]}}', b'{"rootfs":{"diff_ids":{}}}', b'{"rootfs":[]}'):
        with pytest.raises(FormatError):
            parse_config(bad)


# -- splicing -------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)
objects = st.dictionaries(st.text(max_size=4), json_values, max_size=5)


@given(objects, objects, st.sampled_from([None, 0, 3]), st.booleans())
def test_splicing_equals_changing_the_value(
    document: dict[str, Any], values: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only)
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return  # a lone surrogate cannot be sent unescaped
    text, value = jsonsplice.parse_object(data, "x", 1 << 20)
    assert value == document
    assert {key: json.loads(text[a:b]) for key, (a, b) in jsonsplice.members(text).items()} == document
    spliced = jsonsplice.apply(text, jsonsplice.set_members(text, 0, values))
    assert json.loads(spliced) == document | values


@given(st.lists(json_values, max_size=5), st.sampled_from([None, 0, 3]))
def test_elements(items: list[Any], indent: int | None) -> None:
    text = json.dumps(items, indent=indent)
    assert [json.loads(text[a:b]) for a, b in jsonsplice.elements(text, 0)] == items


@given(st.binary(max_size=60) | st.text('{}[]":,\\ 0e.-tfnu', max_size=60).map(str.encode))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    for parse in (parse_manifest, parse_config):
        with pytest.raises(FormatError):
            parse(data)  # type: ignore[operator]
