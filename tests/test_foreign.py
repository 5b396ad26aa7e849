"""From a blob in another format to a stored tail: what is fetched, the child that reads the JSON, the daemon that serves it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from weenv.cli.main import cli
from weenv.core.digest import sha256
from weenv.core.errors import FormatError, VerificationError
from weenv.layer.foreign.tail import make_tail, verify_foreign
from weenv.layer.tail import FrameIndex
from weenv.layer.toc import Frames
from weenv.layer.verify import verify_frame, verify_frames, verify_tail
from weenv.plugin.snapshotter import builder
from weenv.plugin.snapshotter.blobfs import complete
from weenv.plugin.snapshotter.blobfs.complete import Completion
from weenv.plugin.snapshotter.blobfs.layers import DamagedTail, Layer
from weenv.plugin.snapshotter.blobfs.repair import TailRepair
from weenv.plugin.snapshotter.builder import Builder
from weenv.plugin.snapshotter.cache import tables
from weenv.plugin.snapshotter.cache.present import GOOD, UNCHECKED, Presence, is_complete
from weenv.plugin.snapshotter.cache.store import DataStore
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher
from weenv.plugin.snapshotter.foreign import fetch_toc
from weenv.plugin.snapshotter.foreign import make_tail as fetch_and_make
from weenv.plugin.snapshotter.layerdir import LayerDirs, LayerSource, Origin
from weenv.registry.source import FileSource
from weenv_testkit import corpus, rawcorpus
from weenv_testkit.foreign import Blob, estargz, zstd_chunked
from weenv_testkit.images import Layout

STREAM = b"".join(rawcorpus.file(b"f%d" % n, corpus.noise(300_000, n)) for n in range(4)) + rawcorpus.END
BLOBS = {"estargz": estargz(STREAM), "zstd:chunked": zstd_chunked(STREAM)}


@pytest.fixture(params=sorted(BLOBS))
def blob(request: pytest.FixtureRequest) -> Blob:
    return BLOBS[request.param]


def stored(blob: Blob, root: Path) -> tuple[str, LayerSource]:
    """A layer directory, the blob in a file beside it."""
    (root / "blob").write_bytes(blob.data)
    offset, data = blob.toc_bytes()
    _, descriptor, tail = make_tail(blob.layer, data, offset)
    found = dataclasses.replace(blob.layer, toc_offset=offset, toc_length=len(data))
    source = LayerSource(
        descriptor.digest, blob.layer.size, descriptor.toc_offset, descriptor.toc_length, descriptor.toc_digest,
        [Origin("file", path=str(root / "blob"))], found,
    )  # fmt: skip
    return LayerDirs(str(root)).create(source, tail), source


async def test_a_child_reads_the_json(blob: Blob, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(blob.data)
    source = FileSource(str(tmp_path / "blob"))
    folder = str(tmp_path / "layers")
    try:
        offset, data = await fetch_toc(source, blob.layer)
        assert (offset, data) == blob.toc_bytes()
        async with Builder(1) as build:
            made, tail = await fetch_and_make(blob.layer, offset, data, [], folder, build.translate)
            assert tail == make_tail(blob.layer, data, offset)[2]
            wrong = dataclasses.replace(blob.layer, toc_digest=sha256(b""))
            with pytest.raises(VerificationError, match="has digest"):
                await fetch_and_make(wrong, offset, data, [], folder, build.translate)
        assert os.listdir(folder) == []
        assert made == dataclasses.replace(stored(blob, tmp_path)[1], origins=[])
    finally:
        await source.close()


def test_source_json_keeps_what_the_manifest_said(blob: Blob, tmp_path: Path) -> None:
    directory, source = stored(blob, tmp_path)
    text = Path(directory, "source.json").read_bytes()
    assert LayerSource.from_json(text) == source
    assert verify_tail(Path(directory, "toc").read_bytes(), source.descriptor()).frames.pieces is not None
    builder.build(directory, "", "[]")
    assert Path(directory, "meta.erofs").stat().st_size
    raw = json.loads(text)
    changes = {"format": "x", "digest": sha256(b""), "size": 5, "toc_digest": 7, "toc_offset": "1", "more": 1}
    for key, value in changes.items():
        with pytest.raises(FormatError):
            LayerSource.from_json(json.dumps({**raw, "foreign": {**raw["foreign"], key: value}}).encode())
    with pytest.raises(FormatError):
        LayerSource.from_json(json.dumps({**raw, "toc_offset": source.size + 1}).encode())
    own = {**raw}
    del own["foreign"]
    with pytest.raises(FormatError):
        LayerSource.from_json(json.dumps(own).encode())


async def test_a_damaged_tail_is_made_again(blob: Blob, tmp_path: Path) -> None:
    directory, source = stored(blob, tmp_path)
    toc = Path(directory, "toc")
    good = toc.read_bytes()
    toc.write_bytes(good[:-1] + b"?")
    resumed: list[int] = []
    repair = TailRepair(lambda source, origins: [FileSource(origins[0].path)], resumed.append, 10.0)
    damage = DamagedTail(directory, source, "wrong")
    assert repair.submit(damage, 7)
    await repair.run(damage)
    assert (toc.read_bytes(), resumed, repair.mended) == (good, [7], 1)


async def test_complete_layers_are_checked_by_their_chunks(
    blob: Blob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And counted apart: nobody knows their diffID. What the disk has lost of one is fetched again."""
    monkeypatch.setattr(complete, "_PIECE", 30_000)
    directory, source = stored(blob, tmp_path)
    index = verify_frames(Path(directory, "toc").read_bytes(), source.descriptor())
    size = index.stream_size
    layer = Layer(
        source, directory, FrameIndex(index.frames, size, index.diff_id),
        Presence.open(directory, index.frames.content_sizes, size), DataStore.open(f"{directory}/data", size), [], (0, 0),
    )  # fmt: skip
    stream = blob.content(blob.toc())
    fetcher = Fetcher(verify_frame)
    completion = Completion(fetcher, lambda: [layer], lambda _layer, _reason: pytest.fail("refused"), share=1.0)

    def store(data: bytes) -> None:
        layer.store.write(0, data)
        for frame in range(len(layer.presence)):
            layer.presence.mark(frame)

    at = int(index.frames.content_offsets[-2]) + 600
    store(stream[:at] + bytes([stream[at] ^ 1]) + stream[at + 1 :])
    task = asyncio.create_task(completion.run())
    async with asyncio.timeout(60):
        while not layer.presence.missing:
            await asyncio.sleep(0.02)
        missing = [frame for frame, state in enumerate(layer.presence.states) if not state]
        assert len(missing) == 1 and layer.presence.verdict == UNCHECKED and layer.tally.errors == {"damage": 1}
        store(stream)
        while layer.presence.verdict != GOOD:
            await asyncio.sleep(0.02)
    assert is_complete(directory)
    assert (completion.checked, completion.unproven, completion.mismatches) == (0, 1, 0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await fetcher.close()


def test_large_tables_are_the_same_on_disk(blob: Blob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "LARGE", 2)
    toc = blob.toc()
    mapped = tables.spool(toc.frames, str(tmp_path))
    assert isinstance(mapped, tables.MappedFrames) and mapped.pieces is not None and toc.frames.pieces is not None
    for field in dataclasses.fields(mapped.pieces):
        assert np.array_equal(getattr(mapped.pieces, field.name), getattr(toc.frames.pieces, field.name)), field.name
    assert blob.content(dataclasses.replace(toc, frames=mapped)) == blob.content(toc)
    plain = tables.spool(Frames(toc.frames.compressed_sizes, toc.frames.content_sizes, toc.frames.digests), str(tmp_path))
    assert isinstance(plain, tables.MappedFrames) and plain.pieces is None


def test_a_whole_blob_is_verified(blob: Blob) -> None:
    offset, data = blob.toc_bytes()

    def check(content: bytes) -> None:
        verify_foreign(lambda at, length: content[at : at + length], blob.layer, data, offset)

    check(blob.data)
    for wrong, text in (
        (blob.data[:2000] + b"!" + blob.data[2001:], "frame 0"),
        (blob.data[:-1] + b"!", "the blob has digest"),
        (blob.data[:-10], "the blob ends at"),
        (b"!" + blob.data[1:], "the blob has digest"),
    ):
        with pytest.raises(FormatError, match=text):
            check(wrong)


@pytest.fixture
def image(tmp_path: Path) -> str:
    """Both blobs as an image in a layout."""
    layout = Layout(str(tmp_path / "layout"))
    rows = []
    for one in BLOBS.values():
        digest, size = layout.put(one.data)
        media_type = f"application/vnd.oci.image.layer.v1.tar+{one.compression}"
        rows.append({"mediaType": media_type, "digest": digest, "size": size, "annotations": one.annotations})
    rootfs = {"type": "layers", "diff_ids": [one.diff_id for one in BLOBS.values()]}
    config = {"architecture": "amd64", "os": "linux", "rootfs": rootfs}
    digest, size = layout.put(json.dumps(config).encode())
    described = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest, "size": size}
    media_type = "application/vnd.oci.image.manifest.v1+json"
    manifest = {"schemaVersion": 2, "mediaType": media_type, "config": described, "layers": rows}
    digest, size = layout.put(json.dumps(manifest).encode())
    layout.tag(digest, size, media_type, "1", None)
    return f"oci:{layout.directory}:1"


def test_the_command_names_the_format(image: str, tmp_path: Path) -> None:
    shown = CliRunner().invoke(cli, ["layer", "inspect", image, "--json"], catch_exceptions=False)
    rows = json.loads(shown.output)
    assert [(row["format"], row["trust"], row["diffId"], row["counts"]["file"]) for row in rows] == [
        (name, "manifest", None, 4) for name in BLOBS
    ]
    shown = CliRunner().invoke(cli, ["layer", "inspect", image], catch_exceptions=False)
    assert all(name in shown.output for name in BLOBS)
    shown = CliRunner().invoke(cli, ["layer", "verify", image], catch_exceptions=False)
    assert shown.output.count("good; 5 entries") == 2 and shown.output.count("is not checked") == 2


def test_such_an_image_is_converted_like_any_other(image: str, tmp_path: Path) -> None:
    """They are ordinary layers, too: what is made of them has the diffIDs of the config."""
    target = f"oci:{tmp_path}/converted:1"
    done = CliRunner().invoke(cli, ["convert", image, target, "--json"], catch_exceptions=False)
    assert [row["diffId"] for row in json.loads(done.output)["layers"]] == [one.diff_id for one in BLOBS.values()]
    rows = json.loads(CliRunner().invoke(cli, ["layer", "inspect", target, "--json"], catch_exceptions=False).output)
    assert [row["format"] for row in rows] == ["weenv", "weenv"]
