"""environment/imagecontent.py without containerd: where a blob is looked for. The rest: integration/test_docker_content.py."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from weenv.core.digest import sha256
from weenv.environment.compose import ORIGIN_LABEL
from weenv.environment.imagecontent import Blob, Fetcher, ImageContent, look
from weenv.plugin.snapshotter.layerdir import LayerDirs, LayerSource, Origin
from weenv.registry.manifest import OCI_INDEX, OCI_LAYER_ZSTD, OCI_MANIFEST, Descriptor

LAYER, MANIFEST = sha256(b"layer"), sha256(b"manifest")
SOURCE = "containerd.io/distribution.source."


def origins(root: Path, name: str, labels: dict[str, str]) -> list[Origin]:
    blob = Blob(Descriptor(OCI_LAYER_ZSTD, LAYER, 100), MANIFEST, 3, False)
    content = ImageContent(name, MANIFEST, (blob,), labels={MANIFEST: labels})
    unused: Any = None
    return Fetcher(unused, unused, str(root)).origins(content, blob)


def test_where_the_node_reads_the_layer_comes_first_then_labels_then_the_name(tmp_path: Path) -> None:
    here = [Origin("layout", path="/l"), Origin("registry", "r.example:5000", "team/env")]
    LayerDirs(str(tmp_path)).create(LayerSource(LAYER, 100, 60, 40, sha256(b"toc"), here), b"tail")
    labels = {
        f"{ORIGIN_LABEL}3": "other.example/group", f"{ORIGIN_LABEL}1": "wrong.example/group",
        f"{SOURCE}r.example": "team/env,team/more",
    }  # fmt: skip
    assert origins(tmp_path, "r.example:5000/team/env:1", labels) == [
        *here, Origin("registry", "other.example", "group"), Origin("registry", "r.example", "team/env"),
        Origin("registry", "r.example", "team/more"),
    ]  # fmt: skip


def test_names_that_are_in_no_registry_are_not_asked_for(tmp_path: Path) -> None:
    for name in ("weenv.local/plan/task:abc", "moby-dangling@" + LAYER, "Not A Name"):
        assert origins(tmp_path, name, {}) == [], name
    hub = [Origin("registry", "registry-1.docker.io", "library/debian")]
    assert origins(tmp_path, "docker.io/library/debian:12", {}) == hub


def test_labels_that_anybody_may_have_set_are_looked_at(tmp_path: Path) -> None:
    labels = {f"{ORIGIN_LABEL}3": "http://evil/../x", f"{SOURCE}a b": "x", f"{SOURCE}good.example": "UPPER,,fine"}
    assert origins(tmp_path, "weenv.local/plan/x:1", labels) == [Origin("registry", "good.example", "fine")]


def test_what_is_missing() -> None:
    blobs = [Blob(Descriptor(OCI_LAYER_ZSTD, sha256(b"%d" % n), 10 + n), MANIFEST, n, n != 1) for n in range(3)]
    content = ImageContent("x", MANIFEST, tuple(blobs))
    assert content.missing == (blobs[1],) and content.missing_bytes == 11


async def test_indexes_that_name_each_other_many_times_over_are_read_once_each() -> None:
    contents = {}
    manifest = {
        "schemaVersion": 2, "mediaType": OCI_MANIFEST, "layers": [],
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": sha256(b"c"), "size": 1},
    }  # fmt: skip
    data, media_type = json.dumps(manifest).encode(), OCI_MANIFEST
    for _ in range(40):
        contents[sha256(data)] = data
        item = {"mediaType": media_type, "digest": sha256(data), "size": len(data)}
        media_type = OCI_INDEX
        data = json.dumps({"schemaVersion": 2, "mediaType": media_type, "manifests": [item, item]}).encode()
    contents[sha256(data)] = data
    asked: list[str] = []

    class Space:
        async def read_content(self, digest: str, limit: int) -> bytes:
            asked.append(digest)
            assert len(asked) < 100
            return contents[digest]

        async def content_info(self, digest: str) -> Any:
            return SimpleNamespace(labels={})

    space: Any = Space()
    image: Any = SimpleNamespace(name="x", target=SimpleNamespace(digest=sha256(data), media_type=OCI_INDEX))
    found = await look(space, image)
    assert len(asked) == 41 and [blob.descriptor.digest for blob in found.blobs] == [sha256(b"c")]
