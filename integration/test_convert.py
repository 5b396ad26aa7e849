"""Converted images in the hands of programs that nobody here wrote: skopeo, containers/storage, containerd's unpack."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from weenv.cli.main import cli
from weenv.converter.image import convert_image
from weenv.converter.options import CONVERTED, COPIED, SKIPPED, ConvertOptions, ConvertResult
from weenv.core.errors import StorageError
from weenv.layer.verify import SOURCE_ANNOTATION, parse_annotations, verify_tail
from weenv.registry.client import RegistryClient
from weenv.registry.layout import Layout
from weenv.registry.reference import parse_reference
from weenv.registry.source import RegistrySource
from weenv_testkit import corpus
from weenv_testkit.containerd import Containerd
from weenv_testkit.images import Image, Member, write_tar
from weenv_testkit.images import Layout as KitLayout
from weenv_testkit.procs import run
from weenv_testkit.registry import Registry
from weenv_testkit.skopeo import skopeo
from weenv_testkit.trees import Entry, differences, read_tree

QUIET = ConvertOptions(cache_dir=None)


def convert(src: str, dst: str, **changes: object) -> ConvertResult:
    return asyncio.run(convert_image(src, dst, options=replace(QUIET, **changes)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def odd(home: str) -> tuple[KitLayout, Image]:
    """An image of hand-made odd layers (links, whiteouts, devices, xattrs, names, ...), packed in all three ways."""
    scratch = os.path.join(home, "odd")
    os.makedirs(scratch)
    layout = KitLayout(os.path.join(home, "layout"))
    kinds = ("gzip", "zstd", "none")
    layers = [layout.layer(tar, kinds[n % 3]) for n, tar in enumerate(corpus.odd(scratch))]
    return layout, layout.image(layers, "odd", Env=["A=B"], Cmd=["/bin/true"])


@pytest.fixture(scope="module")
def converted(home: str, odd: tuple[KitLayout, Image]) -> tuple[str, ConvertResult]:
    """The same image converted into another layout: its directory and the result."""
    target = os.path.join(home, "converted")
    result = convert(f"oci:{odd[0].directory}:odd", f"oci:{target}:odd")
    assert result.lazy, [(layer.status, layer.reason) for layer in result.layers]
    return target, result


def test_layers_are_counted_from_one(converted: tuple[str, ConvertResult], home: str) -> None:
    target, result = converted
    done = CliRunner().invoke(cli, ["convert", f"oci:{target}:odd", f"oci:{home}/counted:odd"], catch_exceptions=False)
    numbers = [int(found[1]) for found in re.finditer(r"^\W*(\d+)\W+[0-9a-f]{12}\b", done.output, re.MULTILINE)]
    assert numbers == list(range(1, len(result.layers) + 1)), done.output


# -- readers that nobody here wrote ---------------------------------------------------------------------------------


def test_skopeo_reads_it(converted: tuple[str, ConvertResult], odd: tuple[KitLayout, Image], policy: str) -> None:
    target, result = converted
    seen = json.loads(skopeo(policy, "inspect", f"oci:{target}:odd"))
    assert seen["Digest"] == result.descriptor.digest
    assert seen["Layers"] == [layer.new.digest for layer in result.layers]
    assert "A=B" in seen["Env"]
    configs = [
        skopeo(policy, "inspect", "--config", "--raw", f"oci:{directory}:odd") for directory in (odd[0].directory, target)
    ]
    assert configs[0] == configs[1]


def unpacked_by_skopeo(policy: str, source: str, storage: str) -> dict[str, dict[bytes, Entry]]:
    """Unpack with containers/storage, the library under podman and CRI-O; it checks every diffID. Layer id -> its tree."""
    skopeo(policy, "copy", source, "containers-storage:x:y", storage=storage)
    layers = json.loads(Path(storage, "overlay-layers", "layers.json").read_text())
    trees = {layer["id"]: read_tree(os.path.join(storage, "overlay", layer["id"], "diff")) for layer in layers}
    run("umount", os.path.join(storage, "overlay"), check=False)  # it bind-mounts its home
    shutil.rmtree(storage)
    return trees


def test_containers_storage_unpacks_the_same(odd: tuple[KitLayout, Image], policy: str, home: str) -> None:
    layout = odd[0]
    tars = sorted(str(path) for path in Path(home, "odd").glob("[0-9]*.tar"))
    # That library refuses a name that is in a layer twice, in whatever format.
    tars = [tar for tar in tars if not tar.endswith(("twice.tar", "prefixes.tar"))]
    layout.image([layout.layer(tar) for tar in tars], "once")
    assert convert(f"oci:{layout.directory}:once", f"oci:{home}/once:once").lazy
    before = unpacked_by_skopeo(policy, f"oci:{layout.directory}:once", os.path.join(home, "cs-before"))
    after = unpacked_by_skopeo(policy, f"oci:{home}/once:once", os.path.join(home, "cs-after"))
    assert before.keys() == after.keys() and len(before) == len(tars)
    for layer, tree in before.items():
        assert differences(tree, after[layer], times_free=made_by_the_unpack(tree)) == []


def test_containerd_unpacks_the_same(
    converted: tuple[str, ConvertResult], odd: tuple[KitLayout, Image], plain: Containerd, registry: Registry, home: str
) -> None:
    """containerd without our snapshotter: the ordinary pull and unpack into overlayfs."""
    trees = []
    for kind in ("before", "after"):
        # A namespace each: in one, the second pull would find the first one's snapshots by their chainIDs.
        reference = f"{registry.host}/convert/odd-{plain.line}:{kind}"
        if kind == "before":
            odd[0].push("odd", registry, f"convert/odd-{plain.line}", kind)
        else:
            pushed = convert(f"oci:{converted[0]}:odd", reference)
            assert pushed.descriptor.digest == converted[1].descriptor.digest
            assert {layer.reason for layer in pushed.layers} == {"already in the format"}
        mark = registry.mark()
        plain.pull(reference, snapshotter="overlayfs", namespace=kind)
        layers = {layer.digest for layer in odd[1].layers} if kind == "before" else {r.new.digest for r in converted[1].layers}
        assert layers <= registry.blob_bytes(mark).keys()
        mounted = os.path.join(home, f"{kind}-{plain.line}")
        os.mkdir(mounted)
        plain.ctr("images", "mount", "--snapshotter", "overlayfs", reference, mounted, namespace=kind)
        try:
            trees.append(read_tree(mounted))
        finally:
            plain.ctr("images", "unmount", "--snapshotter", "overlayfs", "--rm", mounted, namespace=kind)
    assert len(trees[0]) > 3000
    assert differences(trees[0], trees[1], times_free=made_by_the_unpack(trees[0])) == []


def made_by_the_unpack(tree: dict[bytes, Entry]) -> set[bytes]:
    """Directories that no member is: they have the time of the unpack."""
    return {path for path in tree if 0 <= time.time_ns() - tree[path].mtime_ns < 3600 * 10**9}


def test_zstd_reads_every_layer(converted: tuple[str, ConvertResult], odd: tuple[KitLayout, Image]) -> None:
    """The reference implementation's command line gives back the original tar, byte for byte."""
    for layer, original in zip(converted[1].layers, odd[1].layers, strict=True):
        content = subprocess.run(
            ["sh", "-c", 'zstd -q -d -c "$1" | sha256sum', "sh", Layout(converted[0]).blob_path(layer.new.digest)],
            capture_output=True, check=True,
        ).stdout  # fmt: skip
        assert content.split()[0].decode() == original.diff_id.removeprefix("sha256:") == layer.diff_id[7:]


# -- registries -----------------------------------------------------------------------------------------------------


def test_registry_to_registry(odd: tuple[KitLayout, Image], registry: Registry, policy: str, home: str) -> None:
    source = odd[0].push("odd", registry, "convert/source", "v1")
    target = f"{registry.host}/convert/target:lazy"
    cache = os.path.join(home, "cache")
    first = convert(source, target, source_hint=True, cache_dir=cache)
    assert first.lazy and {layer.status for layer in first.layers} == {CONVERTED}
    assert {layer.new.annotations[SOURCE_ANNOTATION] for layer in first.layers} == {f"{registry.host}/convert/target"}
    seen = json.loads(skopeo(policy, "inspect", "--tls-verify=false", f"docker://{target}"))
    assert seen["Digest"] == first.descriptor.digest

    async def tails() -> None:
        async with RegistryClient() as client:
            _, descriptor = await client.get_manifest(parse_reference(target))
            assert descriptor.digest == first.descriptor.digest
            for layer in first.layers:
                claimed = parse_annotations(layer.new.annotations)
                assert claimed is not None
                blob = RegistrySource(client, registry.host, "convert/target", claimed.digest, claimed.size)
                tail = await blob.read(claimed.toc_offset, claimed.toc_length)
                assert verify_tail(tail, claimed).diff_id == layer.diff_id

    asyncio.run(tails())

    # Again: nothing is fetched or sent but questions and the manifest.
    mark = registry.mark()
    again = convert(source, target, source_hint=True, cache_dir=cache)
    assert again.descriptor.digest == first.descriptor.digest
    assert {layer.status for layer in again.layers} == {SKIPPED}
    requests = registry.requests(mark)
    assert not [r for r in requests if r.method in ("POST", "PATCH")]
    assert [r.method for r in requests if r.method == "PUT"] == ["PUT"]
    assert sum(r.size for r in requests if r.blob and r.method == "GET") < 100_000

    # To another repository of the same registry, what is in the format is mounted, not sent.
    mark = registry.mark()
    moved = convert(target, f"{registry.host}/convert/moved:lazy")
    assert moved.descriptor.digest == first.descriptor.digest
    requests = registry.requests(mark)
    assert not [r for r in requests if r.method == "PUT" and "/blobs/uploads/" in r.path]
    assert len([r for r in requests if r.method == "POST" and "mount=" in r.path]) >= len(set(seen["Layers"]))


def test_images_that_share_a_layer_have_it_converted_once(registry: Registry, home: str, tmp_path: Path) -> None:
    """Hundreds of tasks on one base, each a repository of its own: the registry has the layer mounted, nothing is read."""
    layout = KitLayout(os.path.join(home, "shared"))
    layers = [
        layout.layer(write_tar(str(tmp_path / name), [Member(name, corpus.noise(400_000 + number))]), "gzip")
        for number, name in enumerate(("base", "one", "two"))
    ]
    statuses = []
    for number, name in enumerate(("one", "two"), 1):
        layout.image([layers[0], layers[number]], name)
        source = layout.push(name, registry, f"shared/{name}", "1")
        mark = registry.mark()
        result = convert(source, f"{registry.host}/shared/{name}:lazy", cache_dir=str(tmp_path / "cache"))
        statuses.append([(layer.status, layer.reason) for layer in result.layers])
        read = registry.blob_bytes(mark)
        assert (result.layers[0].old.digest in read) is (name == "one") and result.layers[1].old.digest in read
        lazy = convert(f"{registry.host}/shared/{name}:lazy", f"oci:{tmp_path}/out-{name}", cache_dir=None)
        assert lazy.lazy, "all its blobs are there"
    assert statuses == [[(CONVERTED, "")] * 2, [(SKIPPED, "converted before"), (CONVERTED, "")]]


def test_index_through_a_registry(odd: tuple[KitLayout, Image], registry: Registry, home: str) -> None:
    layout = odd[0]
    other = layout.image([layout.layer(write_tar(os.path.join(home, "arm.tar"), [Member("arm", b"64\n")]))])
    layout.index({"linux/amd64": odd[1], "linux/arm64": other}, "both")
    source = layout.push("both", registry, "convert/both", "v1")
    result = convert(source, f"{registry.host}/convert/both:lazy", platforms=("linux/arm64",))
    assert {m.platform: m.reason for m in result.manifests} == {
        "linux/amd64": "platform not asked for", "linux/arm64": "",
    }  # fmt: skip
    index, digest = registry.manifest("convert/both", "lazy")
    assert digest == result.descriptor.digest
    manifests = index["manifests"]
    assert isinstance(manifests, list)
    assert manifests[0]["digest"] == odd[1].digest and manifests[1]["digest"] != other.digest
    assert manifests[1]["platform"] == {"os": "linux", "architecture": "arm64"}


# -- interrupts, full disks, memory ---------------------------------------------------------------------------------

PROGRAM = """
import asyncio, sys
from weenv.cli.main import cli
from weenv.converter.image import convert_image
from weenv.converter.options import ConvertOptions

def show(event):
    print(event.stage, event.done, flush=True)

async def main():
    options = ConvertOptions(cache_dir=sys.argv[3] or None, progress=show, jobs=1)
    result = await convert_image(sys.argv[1], sys.argv[2], options=options)
    print("result", result.descriptor.digest, *(layer.status for layer in result.layers), flush=True)

asyncio.run(main())
with open("/proc/self/status") as status:  # ru_maxrss would count the parent, too
    print("memory", next(line.split()[1] for line in status if line.startswith("VmHWM")), flush=True)
"""


@pytest.fixture(scope="module")
def large(home: str) -> KitLayout:
    """Three layers of 60 MB that compress to half."""
    layout = KitLayout(os.path.join(home, "large"))
    layers = []
    for number in range(3):
        members = [Member(f"f{number}/{n}", corpus.noise(1 << 20, 100 * number + n) + bytes(1 << 20)) for n in range(30)]
        layers.append(layout.layer(write_tar(os.path.join(home, f"large-{number}.tar"), members)))
    layout.image(layers, "v1")
    return layout


def test_interrupted_for_real(large: KitLayout, registry: Registry, home: str, tmp_path: Path) -> None:
    """SIGINT in the middle of the second layer, to a registry: no tag, nothing in the scratch directory; then again."""
    target, cache = f"{registry.host}/convert/interrupted:v1", str(tmp_path / "cache")
    arguments = [sys.executable, "-c", PROGRAM, f"oci:{large.directory}:v1", target, cache]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None and child.stderr is not None
    for line in child.stdout:
        if line.startswith("done"):
            break
    began = time.monotonic()
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert child.returncode != 0 and "KeyboardInterrupt" in errors
    assert list(scratch.iterdir()) == []
    assert registry._call("GET", "/v2/convert/interrupted/manifests/v1")[0] == 404
    done = run(*arguments, env=environment).splitlines()
    (result,) = [line.split() for line in done if line.startswith("result")]
    assert SKIPPED in result[2:] and CONVERTED in result[2:]
    assert registry.manifest("convert/interrupted", "v1")[1] == result[1]
    assert convert(f"oci:{large.directory}:v1", f"oci:{home}/check").descriptor.digest == result[1]


def test_killed_for_real(large: KitLayout, tmp_path: Path) -> None:
    """SIGKILL while converting into a layout: the next run sweeps up and finishes."""
    target = tmp_path / "out"
    arguments = [sys.executable, "-c", PROGRAM, f"oci:{large.directory}:v1", f"oci:{target}:v1", ""]
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("convert"):
            break
    child.kill()
    child.communicate(timeout=60)
    assert [name for name in os.listdir(target) if name.startswith(".weenv-")]
    assert json.loads((target / "index.json").read_text())["manifests"] == []
    run(*arguments)
    assert sorted(os.listdir(target)) == ["blobs", "index.json", "oci-layout"]
    assert all(not name.startswith(".") for name in os.listdir(target / "blobs/sha256"))


def test_full_disk(large: KitLayout, home: str) -> None:
    small = os.path.join(home, "small")
    os.mkdir(small)
    run("mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", small)
    try:
        with pytest.raises(StorageError, match="No space left") as caught:
            convert(f"oci:{large.directory}:v1", f"oci:{small}/out:v1")
        assert caught.value.hint
        assert sorted(os.listdir(f"{small}/out")) == ["blobs", "index.json", "oci-layout"]
        assert Layout(f"{small}/out").index().manifests == ()
    finally:
        run("umount", small)


def test_memory_does_not_grow_with_the_layer(home: str, tmp_path: Path) -> None:
    """600 MB in one layer, against 20 MB: less than 200 MB all in all, less than 100 MB more."""
    used = []
    for size in (10, 300):
        layout = KitLayout(str(tmp_path / f"in-{size}"))
        tar = tmp_path / "layer.tar"
        block = corpus.noise(1 << 20)
        write_tar(str(tar), (Member(f"f{n}", block + bytes(1 << 20)) for n in range(size)))
        layout.image([layout.layer(str(tar), "zstd")], "v1")
        tar.unlink()
        lines = run(sys.executable, "-c", PROGRAM, f"oci:{layout.directory}:v1", f"oci:{tmp_path}/out-{size}:v1", "")
        shutil.rmtree(tmp_path / f"in-{size}")
        shutil.rmtree(tmp_path / f"out-{size}")
        used.append(int(lines.split("memory ")[1]))
    assert used[1] < 200 << 10 and used[1] - used[0] < 100 << 10, used


def test_sparse_members(home: str) -> None:
    """GNU and PAX sparse members are represented, or the layer is copied with the member's name in the reason."""
    scratch = os.path.join(home, "sparse")
    os.mkdir(scratch)
    layout = KitLayout(os.path.join(home, "sparse-layout"))
    for form, tar in corpus.sparse(scratch).items():
        layout.image([layout.layer(tar)], form)
        result = convert(f"oci:{layout.directory}:{form}", f"oci:{home}/sparse-out:{form}")
        (layer,) = result.layers
        assert layer.status == CONVERTED or (layer.status == COPIED and "sparse" in layer.reason), (form, layer)
