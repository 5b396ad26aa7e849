"""From a blob in another format to a stored tail: what is fetched, the child that reads the JSON, the daemon that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from click.testing import CliRunner
from simulator.registry import SimulatedRegistry

from weenv.cli.main import cli
from weenv.core.digest import sha256
from weenv.core.errors import FormatError, VerificationError
from weenv.layer.foreign import tail as tails
from weenv.layer.foreign.formats import ESTARGZ, FOOTER
from weenv.layer.foreign.tail import make_tail, verify_foreign
from weenv.layer.tail import FrameIndex
from weenv.layer.toc import Frames
from weenv.layer.verify import verify_frame, verify_frames, verify_tail
from weenv.plugin.snapshotter import builder
from weenv.plugin.snapshotter.blobfs import complete
from weenv.plugin.snapshotter.blobfs.complete import Completion
from weenv.plugin.snapshotter.blobfs.daemon import read_tail
from weenv.plugin.snapshotter.blobfs.layers import BadLayer, DamagedTail, Layer, LayerTable
from weenv.plugin.snapshotter.blobfs.repair import TailRepair
from weenv.plugin.snapshotter.builder import Builder
from weenv.plugin.snapshotter.cache import tables
from weenv.plugin.snapshotter.cache.present import AGAIN, BAD, GOOD, UNCHECKED, Presence, is_bad, is_complete
from weenv.plugin.snapshotter.cache.store import DataStore
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher
from weenv.plugin.snapshotter.foreign import fetch_toc, made_tail
from weenv.plugin.snapshotter.layerdir import LayerDirs, LayerSource, Origin
from weenv.registry.client import RegistryClient
from weenv.registry.config import RegistryConfig
from weenv.registry.source import BlobSource, FileSource, RegistrySource
from weenv_testkit import corpus, rawcorpus
from weenv_testkit.foreign import Blob, estargz, translate, zstd_chunked
from weenv_testkit.images import Layout

FILES = [
    *(corpus.noise(300_000, n) for n in range(4)),
    corpus.noise(30_000, 9) + bytes(20_000) + corpus.noise(30_000, 10),  # a run of zeros that is too short for a hole
]
STREAM = b"".join(rawcorpus.file(b"f%d" % n, data) for n, data in enumerate(FILES)) + rawcorpus.END
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
    source, dirs = FileSource(str(tmp_path / "blob")), LayerDirs(str(tmp_path))
    try:
        offset, data = await fetch_toc(source, blob.layer)
        assert (offset, data) == blob.toc_bytes()
        async with Builder(1) as build:
            async with made_tail(source, blob.layer, [], dirs, build.translate) as (made, directory):
                assert os.listdir(directory) == ["toc"]
                assert Path(directory, "toc").read_bytes() == make_tail(blob.layer, data, offset)[2]
            assert os.listdir(dirs.root) == []
            wrong = dataclasses.replace(blob.layer, toc_digest=sha256(b""))
            with pytest.raises(VerificationError, match="has digest"):
                async with made_tail(source, wrong, [], dirs, build.translate):
                    pytest.fail("it is another TOC")
        assert os.listdir(dirs.root) == []
        assert made == dataclasses.replace(stored(blob, tmp_path)[1], origins=[])
    finally:
        await source.close()


Answer = Callable[[SimulatedRegistry, web.Request, bytes, int, int], Awaitable[web.StreamResponse]]


def lies(low: int, high: int) -> Answer:
    """Other bytes in this part of a blob, and never the same ones."""
    count = 0

    async def answer(sim: SimulatedRegistry, request: web.Request, blob: bytes, start: int, end: int) -> web.Response:
        nonlocal count
        count += 1
        body = bytearray(blob)
        for at in range(low, high):
            body[at] ^= count
        return web.Response(
            status=206, body=bytes(body[start:end]), headers={"Content-Range": f"bytes {start}-{end - 1}/{len(blob)}"}
        )

    return answer


def wrong_parts(blob: Blob) -> dict[str, tuple[int, int]]:
    offset, data = blob.toc_bytes()
    parts = {"toc": (offset + len(data) // 2, offset + len(data) // 2 + 9)}
    if blob.layer.format == ESTARGZ:
        end = blob.layer.size
        parts |= {"footer": (end - FOOTER, end), "where": (end - FOOTER + 30, end - FOOTER + 32), "head": (offset, offset + 10)}
    return parts


@contextlib.asynccontextmanager
async def mirrored(tmp_path: Path, blob: Blob):  # type: ignore[no-untyped-def]
    """A mirror, the registry that it stands for, and the blob as a client has it from the two."""
    async with SimulatedRegistry() as mirror, SimulatedRegistry() as own:
        for sim in (mirror, own):
            sim.add_blob(blob.data)
        hosts = tmp_path / "certs" / "r.example" / "hosts.toml"
        hosts.parent.mkdir(parents=True)
        hosts.write_text(f'server = "http://{own.host}"\n[host."http://{mirror.host}"]\n')
        config = RegistryConfig(config_path=str(tmp_path / "certs"), race_after=30.0, retry_delay=0.01)
        async with RegistryClient(config) as client:
            yield mirror, own, RegistrySource(client, "r.example", "team/env", blob.layer.digest, blob.layer.size)


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, blob in BLOBS.items() for part in wrong_parts(blob)])
async def test_a_mirror_that_sends_another_toc_is_not_asked_again(
    tmp_path: Path, name: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob, dirs = BLOBS[name], LayerDirs(str(tmp_path))
    blamed: list[str] = []
    async with mirrored(tmp_path, blob) as (mirror, own, source):
        before = source.client.failed
        monkeypatch.setattr(
            source.client, "failed", lambda end, why, *more: (blamed.append(f"{end.host} {why}"), before(end, why, *more))
        )
        mirror.script.extend([lies(*wrong_parts(blob)[part])] * 9)
        async with made_tail(source, blob.layer, [], dirs, translate) as (_, directory):
            assert Path(directory, "toc").read_bytes() == make_tail(blob.layer, blob.toc_bytes()[1], blob.toc_bytes()[0])[2]
        assert (len(mirror.seen), len(own.seen)) == (1, 1)
        assert blamed == [f"{mirror.host} wrong bytes"]


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, blob in BLOBS.items() for part in wrong_parts(blob)])
async def test_bytes_that_are_wrong_everywhere_are_not_read_for_ever(tmp_path: Path, name: str, part: str) -> None:
    """Not even where the footer points somewhere else each time."""
    blob, dirs = BLOBS[name], LayerDirs(str(tmp_path))
    async with mirrored(tmp_path, blob) as (mirror, own, source):
        for sim in (mirror, own):
            sim.script.extend([lies(*wrong_parts(blob)[part])] * 60)
        with pytest.raises(FormatError):
            async with made_tail(source, blob.layer, [], dirs, translate):
                pytest.fail("it is another TOC")
        assert len(mirror.seen) + len(own.seen) < 10


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


def local(_source: LayerSource, origins: object) -> list[BlobSource]:
    assert isinstance(origins, list)
    return [FileSource(origin.path) for origin in origins]


async def repaired(directory: str, source: LayerSource, opened: Callable[..., list[BlobSource]] = local) -> TailRepair:
    """After one attempt to mend a layer's tail, for which one request waited."""
    resumed: list[int] = []
    dirs = LayerDirs(str(Path(directory).parents[2]))
    repair = TailRepair(dirs, opened, resumed.append, 60.0)
    damage = DamagedTail(directory, source, "wrong")
    assert repair.submit(damage, 7)
    await repair.run(damage)
    assert resumed == [7]
    assert os.listdir(dirs.root) == ["sha256"]
    return repair


async def test_a_damaged_tail_is_made_again_by_another_process(
    blob: Blob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The TOC is a stranger's: nothing of it is read where all layers are served from."""
    directory, source = stored(blob, tmp_path)
    toc = Path(directory, "toc")
    good = toc.read_bytes()
    toc.write_bytes(bad := good[:-1] + b"?")
    monkeypatch.setattr(tails, "make_toc", lambda *_args, **_more: pytest.fail("read here"))
    repair = await repaired(directory, source)
    assert (toc.read_bytes(), repair.mended, repair.failed) == (good, 1, 0)
    assert Path(directory, "toc.damaged").read_bytes() == bad


async def test_a_mirror_with_another_toc_spoils_no_repair(tmp_path: Path) -> None:
    blob = BLOBS["estargz"]
    directory, source = stored(blob, tmp_path)
    toc = Path(directory, "toc")
    good = toc.read_bytes()
    toc.unlink()
    async with mirrored(tmp_path, blob) as (mirror, own, known):
        mirror.script.extend([lies(*wrong_parts(blob)["toc"])] * 9)
        repair = await repaired(directory, source, lambda *_: [known])
        assert (toc.read_bytes(), repair.mended, len(mirror.seen), len(own.seen)) == (good, 1, 1, 1)


async def test_a_tail_that_another_version_made_is_not_replaced_by_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The mounted metadata points into the stream that the old one describes. It is not tried again every five seconds."""
    directory, source = stored(BLOBS["estargz"], tmp_path)
    toc = Path(directory, "toc")
    toc.write_bytes(b"whatever it was")
    source = dataclasses.replace(source, toc_digest=sha256(b"made by an older version"))
    with caplog.at_level(logging.ERROR):
        repair = await repaired(directory, source)
        damage = DamagedTail(directory, source, "wrong")
        repair.submit(damage, 8)
        await repair.run(damage)
    assert (repair.failed, repair.mended, toc.read_bytes()) == (1, 0, b"whatever it was")
    said = [(record.__dict__["error"], record.__dict__["hint"]) for record in caplog.records][-1]
    assert "by another version of weenv" in said[0] and said[1] == "remove the image and pull it again"


def test_an_older_versions_directory_is_read_as_it_is(blob: Blob, tmp_path: Path) -> None:
    """Whatever this version would make of the TOC: the stored tail is what the metadata was made of, and its digest holds."""
    directory, source = stored(blob, tmp_path)
    toc = blob.toc()
    older = tails.build_tail(dataclasses.replace(toc, frames=merged(toc.frames)))
    assert older != Path(directory, "toc").read_bytes()
    Path(directory, "toc").write_bytes(older)
    source = dataclasses.replace(source, toc_length=len(older), toc_digest=sha256(older))
    Path(directory, "source.json").write_bytes(source.to_json())
    table = LayerTable(LayerDirs(str(tmp_path)), read_tail, local)
    node = table.lookup(os.path.basename(directory).encode())
    assert node is not None and node.layer is not None
    assert len(node.layer.frames) == 1 < len(toc.frames)
    content = verify_frame(node.layer.frames, 0, blob.data[: source.toc_offset])
    assert content == blob.content(toc)


def merged(frames: Frames) -> Frames:
    """All in one frame, as this version does not make them."""
    pieces = frames.pieces
    assert pieces is not None
    counts = np.diff(pieces.first.astype(np.int64))
    begins = np.repeat(frames.compressed_offsets[:-1], counts).astype(np.uint32)
    places = np.repeat(frames.content_offsets[:-1], counts).astype(np.uint32)
    one = dataclasses.replace(
        pieces, first=np.array([0, len(pieces)], np.uint32), unit=pieces.unit + begins, place=pieces.place + places
    )
    sizes = frames.compressed_offsets[-1:].astype(np.uint32), frames.content_offsets[-1:].astype(np.uint32)
    return Frames(*sizes, np.zeros((1, 32), np.uint8), one)


class Case:
    """A layer on a disk, and a check of it that runs."""

    def __init__(self, blob: Blob, root: Path) -> None:
        self.directory, source = stored(blob, root)
        self.index = verify_frames(Path(self.directory, "toc").read_bytes(), source.descriptor())
        size = self.index.stream_size
        self.layer = Layer(
            source, self.directory, FrameIndex(self.index.frames, size, self.index.diff_id),
            Presence.open(self.directory, self.index.frames.content_sizes, size),
            DataStore.open(f"{self.directory}/data", size), [], (0, 0),
        )  # fmt: skip
        self.stream = blob.content(blob.toc())
        self.refused: list[str] = []
        self.fetcher = Fetcher(verify_frame)
        self.completion = Completion(
            self.fetcher, lambda: [self.layer], lambda _layer, reason: self.refused.append(reason), share=1.0
        )

    def store(self, *wrong: int) -> None:
        """All frames, with a bit turned at these places."""
        data = bytearray(self.stream)
        for at in wrong:
            data[at] ^= 1
        self.layer.store.write(0, bytes(data))
        for frame in range(len(self.layer.presence)):
            self.layer.presence.mark(frame)

    def missing(self) -> list[int]:
        return [frame for frame, state in enumerate(self.layer.presence.states) if not state]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def running(self):  # type: ignore[no-untyped-def]
        task = asyncio.create_task(self.completion.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.fetcher.close()


async def test_complete_layers_are_checked_by_their_chunks(blob: Blob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And counted apart: nobody knows their diffID. What the disk has changed of one is fetched again, all of it at once."""
    monkeypatch.setattr(complete, "_PIECE", 30_000)
    case = Case(blob, tmp_path)
    offsets = case.index.frames.content_offsets.tolist()
    case.store(offsets[0] + 600, offsets[-2] + 600)
    async with case.running():
        await case.until(case.missing)
        assert case.missing() == [0, len(offsets) - 2] and case.layer.presence.verdict == AGAIN
        assert case.layer.tally.errors == {"damage": 1}
        case.store()
        await case.until(lambda: case.layer.presence.verdict == GOOD)
    assert is_complete(case.directory)
    assert (case.completion.checked, case.completion.unproven, case.completion.mismatches) == (0, 1, 0)
    assert case.refused == []


async def test_a_disk_that_changes_chunks_twice_is_not_read_any_more(blob: Blob, tmp_path: Path) -> None:
    case = Case(blob, tmp_path)
    at = case.stream.index(bytes(20_000)) + 10_000  # in a file's zeros, of which zstd:chunked has no digest
    case.store(at)
    async with case.running():
        await case.until(case.missing)
        case.store(at)
        await case.until(lambda: case.layer.presence.verdict == BAD)
        await case.until(lambda: case.refused)
    assert case.refused == ["the disk has changed its data twice"]
    assert is_bad(case.directory) and not is_complete(case.directory)
    table = LayerTable(LayerDirs(str(tmp_path)), read_tail, local)
    with pytest.raises(BadLayer, match="the disk has changed its data twice") as caught:
        table.lookup(os.path.basename(case.directory).encode())
    assert caught.value.hint == "remove the image; look at the disk, too"


async def test_a_disk_that_cannot_be_read_is_written_again(blob: Blob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no news of what was stored: however often, the layer is served."""
    monkeypatch.setattr(complete, "_PIECE", 30_000)
    case = Case(blob, tmp_path)
    good = os.dup(case.layer.store.fd)
    blind = os.open(f"{case.directory}/data", os.O_WRONLY)
    try:
        async with case.running():
            for _ in range(2):
                os.dup2(blind, case.layer.store.fd)
                case.store()
                await case.until(case.missing)
                assert case.layer.presence.verdict == UNCHECKED
            os.dup2(good, case.layer.store.fd)
            case.store()
            await case.until(lambda: case.layer.presence.verdict == GOOD)
            case.layer.presence.judge(UNCHECKED)
            os.truncate(f"{case.directory}/data", 100_000)
            await case.until(case.missing)
            assert case.layer.presence.verdict == UNCHECKED
            there = [frame for frame, state in enumerate(case.layer.presence.states) if state]
            assert all(case.layer.contents[frame + 1] <= 100_000 for frame in there)
    finally:
        os.close(good)
        os.close(blind)
    assert case.refused == []


def test_large_tables_are_the_same_on_disk(blob: Blob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "LARGE", 2)
    toc = blob.toc()
    mapped = tables.spool(toc.frames, str(tmp_path))
    assert isinstance(mapped, tables.MappedFrames) and mapped.pieces is not None and toc.frames.pieces is not None
    for field in dataclasses.fields(mapped.pieces):
        assert np.array_equal(getattr(mapped.pieces, field.name), getattr(toc.frames.pieces, field.name)), field.name
    assert blob.content(dataclasses.replace(toc, frames=mapped)) == blob.content(toc)
    few = dataclasses.replace(toc, frames=merged(toc.frames))
    monkeypatch.setattr(tables, "LARGE", len(mapped.pieces))
    assert isinstance(tables.spool(few.frames, str(tmp_path)), tables.MappedFrames), "many pieces in few frames"
    monkeypatch.setattr(tables, "LARGE", 2)
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
        (name, "manifest", None, len(FILES)) for name in BLOBS
    ]
    shown = CliRunner().invoke(cli, ["layer", "inspect", image], catch_exceptions=False)
    assert all(name in shown.output for name in BLOBS)
    shown = CliRunner().invoke(cli, ["layer", "verify", image], catch_exceptions=False)
    assert shown.output.count(f"good; {len(FILES) + 1} entries") == 2 and shown.output.count("is not checked") == 2


def test_such_an_image_is_converted_like_any_other(image: str, tmp_path: Path) -> None:
    """They are ordinary layers, too: what is made of them has the diffIDs of the config."""
    target = f"oci:{tmp_path}/converted:1"
    done = CliRunner().invoke(cli, ["convert", image, target, "--json"], catch_exceptions=False)
    assert [row["diffId"] for row in json.loads(done.output)["layers"]] == [one.diff_id for one in BLOBS.values()]
    rows = json.loads(CliRunner().invoke(cli, ["layer", "inspect", target, "--json"], catch_exceptions=False).output)
    assert [row["format"] for row in rows] == ["weenv", "weenv"]
