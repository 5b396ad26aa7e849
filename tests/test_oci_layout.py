"""OCI layout directories: tags, blobs that appear whole, and what interrupted writers leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weenv.cli.main import main
from weenv.converter.pipeline import Output
from weenv.core.digest import sha256
from weenv.core.errors import BadReference, FormatError, NotFoundInSource, StorageError, VerificationError
from weenv.core.rights import ROOM
from weenv.registry.layout import Layout
from weenv.registry.manifest import OCI_CONFIG, OCI_MANIFEST, REF_NAME, Descriptor
from weenv.registry.transfer import _write


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(str(tmp_path / "image"))
    made.create()
    return made


def put(layout: Layout, content: bytes) -> Descriptor:
    return layout.put(content, OCI_MANIFEST)


def test_tags(layout: Layout) -> None:
    one, two = put(layout, b"one"), put(layout, b"two!")
    layout.set_tag(one, "v1")
    assert layout.resolve() == layout.resolve("v1") == layout.resolve(digest=one.digest)
    layout.set_tag(two, "v2")
    layout.set_tag(two, "v1")
    assert layout.resolve("v1").digest == two.digest
    assert layout.resolve().digest == two.digest  # two tags of one image
    layout.set_tag(one, "")
    assert layout.resolve(digest=one.digest).annotations == {}
    with pytest.raises(BadReference, match="holds 2 images"):
        layout.resolve()
    with pytest.raises(NotFoundInSource) as caught:
        layout.resolve("v3")
    assert "v1, v2" in caught.value.hint
    layout.set_tag(one, "")
    assert len(layout.index().manifests) == 3
    assert layout.read_blob(layout.resolve("v2")) == b"two!"


def test_names_as_other_tools_write_them(layout: Layout) -> None:
    one = put(layout, b"one")
    entry = one.to_json() | {"annotations": {"io.containerd.image.name": "docker.io/team/env:v9"}, "platform": {"os": "linux"}}
    Path(layout.path, "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    assert layout.resolve("v9").digest == one.digest
    layout.set_tag(put(layout, b"two"), "x")
    assert layout.index().manifests[0].platform == {"os": "linux"}


def test_missing_and_broken(tmp_path: Path, layout: Layout) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(NotFoundInSource, match="no OCI image layout"):
            Layout(str(path)).resolve()
    with pytest.raises(NotFoundInSource, match="has no image"):
        layout.resolve()
    Path(layout.path, "oci-layout").write_text('{"imageLayoutVersion": "9"}')
    with pytest.raises(FormatError, match="version"):
        layout.resolve()
    Path(layout.path, "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    config = {"mediaType": OCI_CONFIG, "digest": sha256(b""), "size": 0}
    Path(layout.path, "index.json").write_text(json.dumps({"schemaVersion": 2, "config": config, "layers": []}))
    with pytest.raises(FormatError, match="not an index"):
        layout.resolve()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        Layout(str(tmp_path / "file")).create()
    with pytest.raises(StorageError, match="there is no directory"):
        Layout(str(tmp_path / "no" / "image")).create()
    assert not (tmp_path / "no").exists()


def test_blobs_are_verified(layout: Layout) -> None:
    one = put(layout, b"content")
    assert layout.verify_blob(one) == layout.blob_path(one.digest)
    Path(layout.blob_path(one.digest)).write_bytes(b"CONTENT")
    for check in (layout.read_blob, layout.verify_blob):
        with pytest.raises(VerificationError):
            check(one)
    for content in (b"short", b"content and more"):
        Path(layout.blob_path(one.digest)).write_bytes(content)
        for check in (layout.read_blob, layout.verify_blob):
            with pytest.raises(VerificationError, match="size differs"):
                check(one)
    with pytest.raises(FormatError, match="larger"):
        layout.read_blob(Descriptor("x", one.digest, 1 << 30))
    with pytest.raises(NotFoundInSource):
        layout.read_blob(Descriptor("x", "sha256:" + "0" * 64, 3))
    with pytest.raises(BadReference):
        layout.blob_path("sha256:../../etc/passwd")


def test_scratch_is_removed_and_dead_writers_are_swept(layout: Layout) -> None:
    scratch = layout.scratch
    temporary = os.path.join(scratch, "x")
    Path(temporary).write_bytes(b"blob")
    layout.adopt(temporary, sha256(b"blob"))
    assert layout.has_blob(sha256(b"blob"), 4)
    layout.close()
    assert not os.path.exists(scratch)
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = Path(layout.path, f".weenv-{dead.pid}-abcd")
    left.mkdir()
    living = Path(layout.path, f".weenv-{os.getppid()}-abcd")
    living.mkdir()
    Layout(layout.path).create()
    assert not left.exists() and living.exists()


_TAG_TEN = """
import sys
from weenv.registry.layout import Layout
layout = Layout(sys.argv[1])
for n in range(10):
    name = f"{sys.argv[2]}-{n}"
    layout.set_tag(layout.put(name.encode(), "application/vnd.oci.image.manifest.v1+json"), f"t{name}")
"""


def test_writers_side_by_side_lose_no_tag(layout: Layout) -> None:
    workers = [subprocess.Popen([sys.executable, "-c", _TAG_TEN, layout.path, str(n)]) for n in range(3)]
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    tags = {entry.annotations[REF_NAME] for entry in layout.index().manifests}
    assert len(tags) == 30


def test_a_layout_that_nothing_came_into_goes_again(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        made = Layout(str(tmp_path / name))
        made.create()
        assert os.path.isdir(made.scratch)
        made.close()
    assert os.listdir(tmp_path) == ["there"] and os.listdir(tmp_path / "there") == []
    full = Layout(str(tmp_path / "full"))
    full.create()
    one = put(full, b"one")
    full.close()
    assert full.has_blob(one.digest, 3), "what was converted is not converted again"
    again = Layout(str(tmp_path / "full"))
    again.create()
    again.close()
    first, second = Layout(str(tmp_path / "both")), Layout(str(tmp_path / "both"))
    first.create()
    second.create()
    os.mkdir(tmp_path / "both" / f".weenv-{os.getppid()}-0")
    first.close()
    second.check()
    os.rmdir(tmp_path / "both" / f".weenv-{os.getppid()}-0")


def test_a_conversion_that_fails_leaves_no_empty_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Layout(str(tmp_path / "a"))
    source.create()
    config = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": sha256(b"gone"), "size": 4}
    manifest = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": []}
    source.set_tag(put(source, json.dumps(manifest).encode()), "1")
    with pytest.raises(SystemExit):
        main(["convert", f"oci:{tmp_path}/a:1", f"oci:{tmp_path}/b:1"])
    assert capsys.readouterr().err.startswith("weenv: ")
    assert os.listdir(tmp_path) == ["a"]


def test_what_is_full_is_named() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        with pytest.raises(StorageError, match=r"^cannot write to /x/scratch: No space left on device$") as fetched:
            _write(full.write, b"x", "/x/scratch/in-1")
        with pytest.raises(StorageError, match=r"^cannot write /x/out\.zst: No space left on device$") as converted:
            Output(full, "/x/out.zst").write(b"x")
    assert fetched.value.hint == converted.value.hint == ROOM
