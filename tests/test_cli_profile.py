"""weenv profile: what it shows, publishes, forgets and refuses, without a daemon."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from weenv.cli.main import main
from weenv.layer.verify import PREFETCH_ANNOTATION
from weenv.plugin.snapshotter.cache.reads import NAME, Reads, load
from weenv.plugin.snapshotter.layerdir import LayerDirs, LayerSource
from weenv.plugin.snapshotter.recorded import recorded
from weenv_testkit.images import Layout, Member, write_tar

Captured = pytest.CaptureFixture[str]


def run(*arguments: str) -> int:
    """The exit code of the command."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


class Rig:
    """A converted image in a layout, whose upper layer is on this node."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = str(path / "c.toml")
        root = path / "root"
        text = f'[snapshotter]\nroot = "{root}"\n[blobfs]\nroot = "{root}"\nstatus_socket = "{path}/s"\n'
        Path(self.config).write_text(text)
        made = Layout(str(path / "made"))
        tars = [write_tar(f"{path}/{name}.tar", [Member(f"{name}/x", os.urandom(900_000))]) for name in ("low", "high")]
        made.image([made.layer(tar) for tar in tars], "v")
        assert run("convert", f"oci:{path}/made:v", self.image, "--target", "65536") == 0
        self.layers = self.manifest("img", "v")["layers"]
        self.dirs = LayerDirs(str(root))
        self.place(self.layers[1])

    @property
    def image(self) -> str:
        return f"oci:{self.path}/img:v"

    def manifest(self, layout: str, tag: str) -> dict[str, list[dict[str, object]]]:
        """A manifest of a layout."""
        with open(self.path / layout / "index.json") as file:
            (entry,) = json.load(file)["manifests"]
        assert entry["annotations"]["org.opencontainers.image.ref.name"] == tag
        with open(self.path / layout / "blobs/sha256" / entry["digest"][7:]) as file:
            return dict(json.load(file))

    def place(self, layer: dict[str, object]) -> None:
        """Put a layer onto this node."""
        offset, length, digest = str(layer["annotations"]["containerd.io/snapshot/weenv.toc"]).split(",")  # type: ignore[index]
        name = str(layer["digest"])
        tail = (self.path / "img/blobs/sha256" / name[7:]).read_bytes()[int(offset) :]
        self.dirs.create(LayerSource(name, int(str(layer["size"])), int(offset), int(length), digest), tail)
        self.top = name
        found = recorded(f"{self.path}/root", name)
        assert found is not None and not found.needed
        self.count = len(found.frames)

    def read(self, *frames: int) -> None:
        """A container reads these frames."""
        reads = Reads(self.dirs.path(self.top), self.count)
        for frame in frames:
            reads.note(frame, frame + 1)
        reads.close()

    def call(self, *arguments: str) -> int:
        return run("profile", *arguments, "--config", self.config)


@pytest.fixture
def rig(tmp_path: Path, capsys: Captured) -> Rig:
    made = Rig(tmp_path)
    capsys.readouterr()
    return made


def test_show_publish_show_and_forget(rig: Rig, capsys: Captured) -> None:
    assert rig.call("show", rig.image) == 0
    out = capsys.readouterr().out
    assert "not on this node" in out and "nothing was read" in out
    rig.read(5, 6, 2)
    assert rig.call("show", rig.image, "--json") == 0
    low, high = json.loads(capsys.readouterr().out)
    assert (low["node"], low["manifest"], low["reason"]) == (None, None, "not on this node")
    assert high["node"]["frames"] == 3 and high["frames"] == rig.count and high["manifest"] is None and not high["reason"]
    assert 0 < high["node"]["bytes"] < rig.layers[1]["size"]  # type: ignore[operator]
    assert rig.call("publish", rig.image, f"oci:{rig.path}/out:new") == 0
    out = capsys.readouterr().out
    assert "nothing of it was recorded" in out and out.splitlines()[-1].startswith(f"oci:{rig.path}/out:new@sha256:")
    layers = rig.manifest("out", "new")["layers"]
    assert [PREFETCH_ANNOTATION in layer["annotations"] for layer in layers] == [False, True]  # type: ignore[operator]
    assert rig.call("show", f"oci:{rig.path}/out:new") == 0
    assert f"3/{rig.count}" in (out := capsys.readouterr().out) and "this node and the manifest" in out
    assert rig.call("forget", rig.image) == 0
    assert capsys.readouterr().out == "forgot 3 frames\n"
    assert not load(rig.dirs.path(rig.top), rig.count)
    assert rig.call("show", f"oci:{rig.path}/out:new", "--json") == 0
    low, high = json.loads(capsys.readouterr().out)
    assert high["node"] is None and high["manifest"]["frames"] == 3
    os.rename(rig.dirs.path(rig.top), rig.path / "gone")
    assert rig.call("show", f"oci:{rig.path}/out:new", "--json") == 0
    assert json.loads(capsys.readouterr().out)[1] == high, "the layer's table is read from where the image is"


def test_publish_as_json_says_what_was_cut(rig: Rig, capsys: Captured) -> None:
    rig.read(*range(rig.count))
    assert rig.call("publish", rig.image, f"oci:{rig.path}/out:new", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["layers"][1]["profile"] == {"frames": rig.count, "cut": 0, "length": len("1,AAAN")}
    assert answer["layers"][0]["profile"] is None
    assert answer["descriptor"]["digest"].startswith("sha256:")


def test_faults_are_one_line_that_says_what_to_do(rig: Rig, capsys: Captured) -> None:
    assert rig.call("publish", rig.image, f"oci:{rig.path}/out:new") == 1
    err = capsys.readouterr().err
    assert "nothing of" in err and "run a container of it here first" in err and "Traceback" not in err
    assert not (rig.path / "out").exists()
    assert rig.call("show", f"oci:{rig.path}/nowhere:x") == 1
    assert rig.call("forget", f"oci:{rig.path}/img:none") == 1
    assert rig.call("publish", rig.image) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err and "internal error" not in err


def test_hostile_annotations_and_records_are_told_and_harm_nothing(rig: Rig, capsys: Captured) -> None:
    rig.read(1)
    assert rig.call("publish", rig.image, f"oci:{rig.path}/out:new") == 0
    index = json.loads((rig.path / "out/index.json").read_text())
    manifest = rig.manifest("out", "new")
    manifest["layers"][1]["annotations"][PREFETCH_ANNOTATION] = "1,\x1b[31m!"  # type: ignore[index]
    data = json.dumps(manifest).encode()
    from weenv.core.digest import sha256

    name = sha256(data)
    (rig.path / "out/blobs/sha256" / name[7:]).write_bytes(data)
    index["manifests"][0].update(digest=name, size=len(data))
    (rig.path / "out/index.json").write_text(json.dumps(index))
    Path(rig.dirs.file(rig.top, NAME)).write_bytes(os.urandom(5000))
    capsys.readouterr()
    assert rig.call("show", f"oci:{rig.path}/out:new") == 0
    out = capsys.readouterr().out
    assert "its annotation is not used" in out and "\x1b[31m" not in out
    Path(rig.dirs.file(rig.top, "toc")).write_bytes(b"damaged")
    assert rig.call("publish", rig.image, f"oci:{rig.path}/out2:new") == 1, "a damaged layer has no record"
