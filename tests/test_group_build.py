"""converter/group.py, tree.py, scandir.py and registry/groupref/build.py: groups out of directories, tars and images."""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from weenv.converter import tree as trees
from weenv.converter.group import BuiltGroup, TreeOptions, build_group, group_from_image
from weenv.converter.options import ConvertOptions
from weenv.converter.scandir import scan_directory
from weenv.converter.tree import Override
from weenv.core.errors import (
    BadReference,
    ConfigError,
    FormatError,
    LimitError,
    NotFoundInSource,
    SourceError,
    UnsupportedError,
)
from weenv.layer.limits import Limits
from weenv.layer.verify import is_annotated
from weenv.registry.groupref.build import GroupSpec, parse_layers, rfc3339
from weenv.registry.groupref.model import ARTIFACT_TYPE, CREATED, KIND, VERSION
from weenv.registry.layout import Layout
from weenv.registry.manifest import Descriptor, Manifest, parse_manifest

QUICK = ConvertOptions(threads=1, cache_dir=None)
SPEC = GroupSpec("harness", "1.2")


def manifest_of(layout: Path, tag: str) -> tuple[Manifest, dict[str, object]]:
    at = Layout(str(layout))
    manifest = parse_manifest(at.read_blob(at.resolve(tag)))
    assert isinstance(manifest, Manifest)
    return manifest, json.loads(at.read_blob(manifest.config))


def content(layout: Path, layer: Descriptor) -> dict[str, tuple[tarfile.TarInfo, bytes]]:
    """A layer's members by name, read by Python's own zstd and tar readers."""
    with open(Layout(str(layout)).blob_path(layer.digest), "rb") as file:
        data = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        found = {}
        for member in archive.getmembers():
            source = archive.extractfile(member) if member.isfile() else None
            found[member.name] = (member, source.read() if source else b"")
        return found


def names(layout: Path, built: BuiltGroup, number: int = 0) -> list[str]:
    return list(content(layout, built.layers[number].descriptor))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory with a bit of everything that needs no root."""
    at = tmp_path / "source"
    (at / "bin").mkdir(parents=True)
    (at / "lib/a").mkdir(parents=True)
    (at / "lib/b").mkdir()
    (at / "bin/tool").write_bytes(b"#!/bin/sh\n")
    (at / "bin/tool").chmod(0o4755)
    (at / "lib/a/one").write_bytes(os.urandom(3 << 20))
    (at / "lib/b/two").write_bytes(b"2" * 1000)
    os.link(at / "lib/a/one", at / "lib/b/same")
    (at / "lib/link").symlink_to("../bin/tool")
    os.mkfifo(at / "pipe")
    for path in sorted(at.rglob("*"), reverse=True):
        os.utime(path, ns=(10**18, 10**18 + 7), follow_symlinks=False)
    os.utime(at, (5, 5))
    return at


async def test_a_directory_becomes_a_group(tmp_path: Path, source: Path) -> None:
    spec = replace(SPEC, config={"Env": ["A=b"], "WorkingDir": "/opt"})
    how = TreeOptions(prefix="/opt/harness", override=Override(0, 0))
    built = await build_group(f"oci:{tmp_path}/out:v1", [str(source)], spec, how, QUICK)
    assert built.lazy and not built.skipped
    manifest, config = manifest_of(tmp_path / "out", "v1")
    assert manifest.is_image and manifest.artifact_type == ARTIFACT_TYPE
    assert (manifest.annotations[KIND], manifest.annotations[VERSION]) == ("harness", "1.2")
    assert manifest.annotations[CREATED] == config["created"] == rfc3339(10**9)
    assert config["config"] == {"Env": ["A=b"], "WorkingDir": "/opt"}
    assert config["rootfs"] == {"type": "layers", "diff_ids": [built.layers[0].diff_id]}
    assert is_annotated(manifest.layers[0].annotations)
    found = content(tmp_path / "out", manifest.layers[0])
    assert list(found) == [
        "opt/harness", "opt/harness/bin", "opt/harness/bin/tool", "opt/harness/lib", "opt/harness/lib/a",
        "opt/harness/lib/a/one", "opt/harness/lib/b", "opt/harness/lib/b/same", "opt/harness/lib/b/two",
        "opt/harness/lib/link", "opt/harness/pipe",
    ]  # fmt: skip
    for name, (member, _) in found.items():
        assert (member.uid, member.gid, member.uname) == (0, 0, "")
        assert member.mtime == pytest.approx(5 if name == "opt/harness" else 10**9)
    assert found["opt/harness/bin/tool"][0].mode == 0o4755
    assert found["opt/harness/lib/a/one"][1] == (source / "lib/a/one").read_bytes()
    assert found["opt/harness/lib/b/same"][0].linkname == "opt/harness/lib/a/one"
    assert found["opt/harness/lib/link"][0].linkname == "../bin/tool"
    assert found["opt/harness/pipe"][0].isfifo()


async def test_the_same_input_gives_the_same_digest(tmp_path: Path, source: Path) -> None:
    """However the directory lists its names, wherever it is, and through a tar of it in any order, too."""
    one = await build_group(f"oci:{tmp_path}/a:1", [str(source)], SPEC, TreeOptions(), QUICK)
    moved = source.rename(tmp_path / "elsewhere")
    (moved / "zzz").write_bytes(b"")
    (moved / "zzz").unlink()
    os.utime(moved, (5, 5))
    two = await build_group(f"oci:{tmp_path}/b:other", [str(moved)], SPEC, TreeOptions(), replace(QUICK, threads=2))
    assert two.descriptor == one.descriptor
    archive = tmp_path / "shuffled.tar.gz"
    with gzip.open(archive, "wb") as out, tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(moved.rglob("*"), key=lambda p: (len(p.parts), p.name[::-1])):
            info = tar.gettarinfo(str(path), path.relative_to(moved).as_posix())
            info.uname = "somebody"
            info.pax_headers = {"mtime": "1000000000.000000007"}
            with open(path, "rb") if info.isreg() else io.BytesIO() as data:
                tar.addfile(info, data)
    three = await build_group(f"oci:{tmp_path}/c:1", [str(archive)], SPEC, TreeOptions(), QUICK)
    assert three.layers[0].diff_id == one.layers[0].diff_id
    assert three.descriptor == one.descriptor


async def test_times_can_be_bounded(tmp_path: Path, source: Path) -> None:
    how = TreeOptions(override=Override(mtime_max=1000))
    one = await build_group(f"oci:{tmp_path}/a:1", [str(source)], SPEC, how, QUICK)
    for path in source.rglob("*"):
        os.utime(path, follow_symlinks=False)
    two = await build_group(f"oci:{tmp_path}/b:1", [str(source)], SPEC, how, QUICK)
    assert two.descriptor == one.descriptor
    assert manifest_of(tmp_path / "a", "1")[1]["created"] == rfc3339(1000)


async def test_split_by_directory(tmp_path: Path, source: Path) -> None:
    layout = tmp_path / "out"
    built = await build_group(f"oci:{layout}:1", [str(source)], SPEC, TreeOptions(split=("lib/*",)), QUICK)
    assert names(layout, built, 0) == ["bin", "bin/tool", "lib", "lib/link", "pipe"]
    assert names(layout, built, 1) == ["lib", "lib/a", "lib/a/one"]
    assert names(layout, built, 2) == ["lib", "lib/b", "lib/b/same", "lib/b/two"]
    assert content(layout, built.layers[2].descriptor)["lib/b/same"][1] == (source / "lib/a/one").read_bytes(), (
        "a hard link across layers is a copy"
    )
    again = await build_group(f"oci:{layout}:2", [str(source)], SPEC, TreeOptions(split=("/bin", "lib")), QUICK)
    assert [names(layout, again, n) for n in range(2)] == [["pipe"], ["bin", "bin/tool"]]
    assert [layer.reused for layer in built.layers] == [False] * 3
    third = await build_group(f"oci:{layout}:3", [str(source)], SPEC, TreeOptions(split=("lib/b",)), QUICK)
    assert third.layers[1].descriptor == built.layers[2].descriptor and third.layers[1].reused
    for rule in ("lib/none", "bin/tool", "lib/../bin", "/"):
        with pytest.raises((NotFoundInSource, BadReference)):
            await build_group(f"oci:{layout}:x", [str(source)], SPEC, TreeOptions(split=(rule,)), QUICK)


def tar(path: Path, *members: tuple[str, str | bytes | None]) -> Path:
    """A tar of (name, content); None is a directory, text a symlink."""
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            if data is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            elif isinstance(data, str):
                info.type, info.linkname = tarfile.SYMTYPE, data
            else:
                info.size = len(data)
            archive.addfile(info, io.BytesIO(data) if isinstance(data, bytes) else None)
    return path


@pytest.fixture
def stacked(tmp_path: Path) -> list[str]:
    """Three tars: what overlayfs makes of them is in ``SHOWN``."""
    one = ("d", None), ("d/gone", b"1"), ("d/kept", b"1"), ("o", None), ("o/hidden", b"1"), ("f", b"1")
    two = ("d/.wh.gone", b""), ("d/new", b"2"), ("o/.wh..wh..opq", b""), ("o/own", b"2"), (".wh.f", b"")
    three = ("d/kept", b"3"), ("f", None), ("f/in", b"3"), ("s", "d")
    return [str(tar(tmp_path / f"{number}.tar", *members)) for number, members in enumerate((one, two, three))]


SHOWN = {"d": b"", "d/kept": b"3", "d/new": b"2", "f": b"", "f/in": b"3", "o": b"", "o/own": b"2", "s": b""}


async def test_stack_then_squash(tmp_path: Path, stacked: list[str]) -> None:
    layout = tmp_path / "out"
    built = await build_group(f"oci:{layout}:1", stacked, SPEC, TreeOptions(), QUICK)
    assert names(layout, built, 1) == ["d/.wh.gone", "d/new", ".wh.f", "o/.wh..wh..opq", "o/own"]
    whole = await group_from_image(f"oci:{layout}:2", f"oci:{layout}:1", "", GroupSpec(), TreeOptions(squash=True), QUICK)
    assert {name: data for name, (_, data) in content(layout, whole.layers[0].descriptor).items()} == SHOWN
    upper = await group_from_image(f"oci:{layout}:3", f"oci:{layout}:1", "2..3", GroupSpec(), TreeOptions(squash=True), QUICK)
    found = names(layout, upper)
    assert "d/.wh.gone" in found and "o/.wh..wh..opq" in found, "what is below goes on to be hidden"
    assert "f/.wh..wh..opq" in found, "a directory where a whiteout was shows nothing from below"


async def test_cut_out_of_an_image_byte_for_byte(tmp_path: Path, stacked: list[str]) -> None:
    layout = tmp_path / "out"
    spec = GroupSpec("base", "7", config={"Env": ["A=1"], "User": "nobody"})
    built = await build_group(f"oci:{layout}:1", stacked, spec, TreeOptions(), QUICK)
    new = GroupSpec("tools", config={"Env": ["B=2"]})
    cut = await group_from_image(f"oci:{tmp_path}/cut:1", f"oci:{layout}:1", "2..3", new, TreeOptions(), QUICK)
    assert [layer.descriptor for layer in cut.layers] == [layer.descriptor for layer in built.layers[1:]]
    manifest, config = manifest_of(tmp_path / "cut", "1")
    assert [layer.digest for layer in manifest.layers] == [layer.descriptor.digest for layer in built.layers[1:]]
    assert config["rootfs"]["diff_ids"] == [layer.diff_id for layer in built.layers[1:]]  # type: ignore[index]
    assert len(config["history"]) == 2  # type: ignore[arg-type]
    assert config["config"] == {"Env": ["B=2"], "User": "nobody"}
    assert (manifest.annotations[KIND], manifest.annotations[VERSION]) == ("tools", "7")
    bare = await group_from_image(
        f"oci:{tmp_path}/cut:2", f"oci:{layout}:1", "1", GroupSpec(), TreeOptions(), QUICK, keep_config=False
    )
    assert bare.lazy and manifest_of(tmp_path / "cut", "2")[1]["config"] == {}


async def test_layers_that_are_not_lazy_are_converted(tmp_path: Path, stacked: list[str]) -> None:
    layout = Layout(str(tmp_path / "plain"))
    layout.create()
    layers, diff_ids = [], []
    for name in stacked:
        data = Path(name).read_bytes()
        layers.append(layout.put(gzip.compress(data), "application/vnd.oci.image.layer.v1.tar+gzip"))
        diff_ids.append(layout.put(data, "x").digest)
    history = [{"created_by": "a"}, {"empty_layer": True}, {"created_by": "b"}, {"created_by": "c"}]
    config = {"os": "linux", "architecture": "amd64", "rootfs": {"type": "layers", "diff_ids": diff_ids}, "history": history}
    described = layout.put(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json")
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = {"schemaVersion": 2, "mediaType": kind, "config": described.to_json(), "layers": [x.to_json() for x in layers]}
    layout.set_tag(layout.put(json.dumps(manifest).encode(), kind), "1")
    built = await group_from_image(f"oci:{tmp_path}/out:1", f"oci:{tmp_path}/plain:1", "2..", SPEC, TreeOptions(), QUICK)
    assert built.lazy
    found, made = manifest_of(tmp_path / "out", "1")
    assert all(is_annotated(layer.annotations) for layer in found.layers) and len(found.layers) == 2
    assert found.artifact_type == ARTIFACT_TYPE and made["history"] == history[2:]
    assert made["rootfs"]["diff_ids"] == diff_ids[1:]  # type: ignore[index]


@pytest.mark.parametrize(("text", "found"), [("1..3", (0, 3)), ("2", (1, 2)), ("..2", (0, 2)), ("3..", (2, 3))])
def test_ranges_of_layers(text: str, found: tuple[int, int]) -> None:
    assert parse_layers(text, 3) == range(*found)


@given(st.text(max_size=12) | st.from_regex(r"[0-9.]{1,6}", fullmatch=True))
def test_other_ranges_are_refused_or_within(text: str) -> None:
    try:
        found = parse_layers(text, 9)
    except BadReference:
        return
    assert 0 <= found.start < found.stop <= 9


async def test_what_cannot_be_built_leaves_nothing(tmp_path: Path, source: Path) -> None:
    out = f"oci:{tmp_path}/out:1"
    with pytest.raises(NotFoundInSource):
        await build_group(out, [str(tmp_path / "none")], SPEC, TreeOptions(), QUICK)
    assert not (tmp_path / "out").exists()
    with pytest.raises(BadReference):
        await build_group(out, [str(source)], SPEC, TreeOptions(prefix="/opt/../etc"), QUICK)
    with pytest.raises(BadReference):
        await build_group(f"oci:{tmp_path}/out@sha256:{'0' * 64}", [str(source)], SPEC, TreeOptions(), QUICK)
    junk = tmp_path / "junk.tar"
    junk.write_bytes(os.urandom(4096))
    with pytest.raises(FormatError):
        await build_group(out, [str(junk)], SPEC, TreeOptions(), QUICK)
    with pytest.raises(LimitError):
        await build_group(out, [str(source)], SPEC, TreeOptions(), replace(QUICK, limits=Limits(max_entries=4)))
    (source / ".wh.x").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"\.wh\."):
        await build_group(out, [str(source)], SPEC, TreeOptions(), QUICK)
    assert not (tmp_path / "out").exists()
    for bad in ({"kind": "x"}, {"version": "a b"}, {"config": {"Env": ["x"]}}, {"created": -1}):
        with pytest.raises(ConfigError):
            replace(SPEC, **bad)


async def test_a_file_that_changes_while_it_is_read(tmp_path: Path, source: Path) -> None:
    root, _ = scan_directory(str(source))
    (source / "bin/tool").write_bytes(b"longer than it was before")
    pieces, _ = trees.tar_stream(root)
    with pytest.raises(SourceError, match="was changed"):
        list(pieces)
    root, _ = scan_directory(str(source))
    (source / "bin/tool").unlink()
    (source / "bin/tool").symlink_to("/etc/passwd")
    with pytest.raises(SourceError):
        list(trees.tar_stream(root)[0])


def test_sockets_are_left_out_and_deep_trees_bounded(tmp_path: Path) -> None:
    at = tmp_path / "s"
    at.mkdir()
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(at / "sock"))
        root, skipped = scan_directory(str(at))
    assert skipped == ["sock"] and not root.children
    deep = at
    for _ in range(60):
        deep = deep / "d"
    deep.mkdir(parents=True)
    with pytest.raises(LimitError):
        scan_directory(str(at), Limits(max_depth=50))


def test_a_member_of_a_tar_never_leaves_the_tree(tmp_path: Path) -> None:
    """``..`` and absolute names, and symlinks out of the root, end within the image."""
    import asyncio

    path = tar(tmp_path / "evil.tar", ("../../up", b"1"), ("/abs", b"2"), ("out", "/etc"), ("out/passwd", b"3"))
    built = asyncio.run(build_group(f"oci:{tmp_path}/out:1", [str(path)], SPEC, TreeOptions(prefix="/p"), QUICK))
    assert names(tmp_path / "out", built) == ["p/abs", "p/etc/passwd", "p/out", "p/up"]
