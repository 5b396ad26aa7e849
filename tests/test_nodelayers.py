"""environment/nodelayers.py without containerd: conversion once per node, whoever asks; what dead processes leave."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest

from weenv.core.digest import sha256
from weenv.core.errors import LimitError, NotFoundInSource, StorageError, VerificationError
from weenv.environment.compose import NotLazyError, StackedLayer
from weenv.environment.composeconfig import ComposeConfig
from weenv.environment.nodelayers import NodeLayers, key_of
from weenv.environment.tocs import TocReader
from weenv.registry.client import RegistryClient
from weenv.registry.groupref.model import LayerRef
from weenv.registry.manifest import Descriptor

GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"


def tar_of(**files: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def layer_of(directory: Path, tar: bytes, *, group: str = "oci:somewhere") -> StackedLayer:
    """A gzip layer in an OCI layout."""
    blob = gzip.compress(tar, 1, mtime=0)
    blobs = directory / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    (directory / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    digest = sha256(blob)
    (blobs / digest[7:]).write_bytes(blob)
    return StackedLayer(LayerRef(digest, len(blob), GZIP, sha256(tar)), group, False, "", str(directory))


def node(tmp_path: Path, client: RegistryClient, **settings: object) -> NodeLayers:
    return NodeLayers(client, str(tmp_path / "root"), dataclasses.replace(ComposeConfig(), **settings))  # type: ignore[arg-type]


def work(local: NodeLayers) -> list[str]:
    return os.listdir(os.path.join(local.store.path, "work"))


async def test_converted_once_and_found_by_everybody(tmp_path: Path) -> None:
    layer = layer_of(tmp_path / "layout", tar_of(a=b"1" * 5000))
    async with RegistryClient() as client:
        one, other = node(tmp_path, client), node(tmp_path, client)
        assert one.known(layer).served is None
        answers = await asyncio.gather(*(local.serve([layer, layer]) for local in (one, other, one, other)))
        assert all(answer == answers[0] for answer in answers)
        assert len(one.converted) + len(other.converted) == 1
        served = answers[0][0]
        assert served.served is not None
        assert served.served.ref.diff_id == layer.ref.diff_id
        assert served.labels("sha256:x")["containerd.io/snapshot/weenv.layer"].startswith(served.blob.digest)
        assert served.ref == layer.ref, "what the image says of it is not touched"
        toc = await TocReader(client).read(served)
        assert toc.diff_id == layer.ref.diff_id
        assert node(tmp_path, client).known(layer) == served
        assert one.store.usage() == (1, served.blob.size)
        assert work(one) == []


async def test_same_layer_same_blob_on_another_node(tmp_path: Path) -> None:
    layer = layer_of(tmp_path / "layout", tar_of(a=os.urandom(100_000), b=b"2"))
    async with RegistryClient() as client:
        first = await node(tmp_path / "1", client).serve([layer])
        second = await node(tmp_path / "2", client).serve([layer])
    assert first[0].blob == second[0].blob


@pytest.mark.parametrize("tar", [b"x" * 512 * 3, tar_of(a=b"1")[:700]])
async def test_what_cannot_be_converted_is_remembered_with_the_reason(tmp_path: Path, tar: bytes) -> None:
    layer = layer_of(tmp_path / "layout", tar)
    async with RegistryClient() as client:
        local = node(tmp_path, client)
        (answer,) = await local.serve([layer])
        assert answer.served is None
        assert answer.reason
        again = node(tmp_path, client)
        assert await again.serve([layer]) == (answer,)
        assert again.converted == {}
        assert local.store.usage() == (0, 0)
        assert answer.labels("c") == {"containerd.io/snapshot.ref": "c"}


async def test_neither_wrong_digest_nor_wrong_diff_id_nor_missing_nor_too_large(tmp_path: Path) -> None:
    good = layer_of(tmp_path / "layout", tar_of(a=bytes(1 << 20)))
    path = tmp_path / "layout" / "blobs" / "sha256" / good.ref.digest[7:]
    data = path.read_bytes()
    async with RegistryClient() as client:
        local = node(tmp_path, client)
        forged = dataclasses.replace(good, ref=dataclasses.replace(good.ref, diff_id=sha256(b"other")))
        with pytest.raises(VerificationError, match="its image's config says"):
            await local.serve([forged])
        with pytest.raises(LimitError, match="beyond a limit of this node"):
            await node(tmp_path, client, max_layer=len(data) + 1).serve([good])
        with pytest.raises(LimitError, match="beyond a limit of this node"):
            await node(tmp_path, client, max_layer=len(data) - 1).serve([good])
        path.write_bytes(data[:-1] + b"x")
        with pytest.raises(VerificationError):
            await local.serve([good])
        path.unlink()
        with pytest.raises(NotFoundInSource, match=r"of oci:somewhere is not there"):
            await local.serve([good])
        assert local.store.usage() == (0, 0)
        assert work(local) == []
        assert local.known(good).reason == "", "none of that is a reason to unpack it"


async def test_settings_other_than_convert(tmp_path: Path) -> None:
    layer = layer_of(tmp_path / "layout", tar_of(a=b"1"))
    async with RegistryClient() as client:
        assert await node(tmp_path, client, not_lazy="unpack").serve([layer]) == (layer,)
        with pytest.raises(NotLazyError, match="is not in the lazy format") as caught:
            await node(tmp_path, client, not_lazy="refuse").serve([layer])
        assert "compose.not_lazy" in caught.value.hint


async def test_what_a_dead_process_left_goes_and_what_a_living_one_has_stays(tmp_path: Path) -> None:
    layer = layer_of(tmp_path / "layout", tar_of(a=b"1"))
    async with RegistryClient() as client:
        local = node(tmp_path, client)
        folder = Path(local.store.path, "work")
        folder.mkdir(parents=True)
        dead, alive, mine = "d" * 64, "a" * 64, key_of(layer)
        for name in (dead, alive, mine):
            for end in ("in", "out", "lock"):
                (folder / f"{name}.{end}").write_bytes(b"half")
        with open(folder / f"{alive}.lock", "rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            (answer,) = await local.serve([layer])
        assert answer.served is not None
        assert sorted(work(local)) == sorted(f"{alive}.{end}" for end in ("in", "out", "lock"))


async def test_who_finds_the_lock_taken_waits_and_may_be_called_off(tmp_path: Path) -> None:
    layer = layer_of(tmp_path / "layout", tar_of(a=b"1"))
    async with RegistryClient() as client:
        local = node(tmp_path, client)
        other = node(tmp_path, client)
        async with other.locked(key_of(layer)):
            waiting = asyncio.ensure_future(local.serve([layer]))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), 0.3)
            called_off = asyncio.ensure_future(node(tmp_path, client).serve([layer]))
            await asyncio.sleep(0)
            called_off.cancel()
            with pytest.raises(asyncio.CancelledError):
                await called_off
        assert (await waiting)[0].served is not None


async def test_progress_counts_what_is_fetched_and_what_is_converted(tmp_path: Path) -> None:
    import contextlib
    from collections.abc import Iterator

    seen: list[tuple[int, int | None]] = []
    labels: list[str] = []

    @contextlib.contextmanager
    def show(label: str) -> Iterator[object]:
        labels.append(label)
        yield lambda done, total: seen.append((done, total))

    layer = layer_of(tmp_path / "layout", tar_of(a=os.urandom(3 << 20)), group="r.example/tool:1")
    async with RegistryClient() as client:
        local = NodeLayers(client, str(tmp_path / "root"), ComposeConfig(), show=show)  # type: ignore[arg-type]
        await local.serve([layer])
        assert labels == ["converting r.example/tool:1"]
        assert seen
        assert all(0 < done <= total for done, total in seen if total is not None)
        assert seen == sorted(seen)
        await local.serve([layer])
        assert len(labels) == 1, "there is nothing to wait for"


async def test_a_full_disk_is_said_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(tmp_path / "layout", tar_of(a=b"1"))
    monkeypatch.setattr("weenv.environment.nodelayers._SPARE", 1 << 60)
    async with RegistryClient() as client:
        with pytest.raises(StorageError, match=r"free: a layer of .* are to stay free"):
            await node(tmp_path, client).serve([layer])


async def test_what_could_not_be_converted_is_kept_for_being_unpacked_if_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weenv.registry.endpoints import LayoutEnd

    layer = layer_of(tmp_path / "layout", b"x" * 1536)
    blob = tmp_path / "layout" / "blobs" / "sha256" / layer.ref.digest[7:]
    fetched: list[str] = []

    async def fetch(_end: LayoutEnd, descriptor: Descriptor, path: str, _progress: object) -> str:
        Path(path).write_bytes((blob.parent / descriptor.digest[7:]).read_bytes())
        fetched.append(path)
        return path

    monkeypatch.setattr(LayoutEnd, "fetch", fetch)  # as a registry gives it: a new file
    async with RegistryClient() as client:
        local = node(tmp_path, client)
        await local.serve([layer])
        (kept,) = work(local)
        assert kept == f"{key_of(layer)}.keep"
        async with local.locked(key_of(layer)) as place:
            assert Path(await local.fetch(layer, f"{place}.in")).read_bytes() == blob.read_bytes()
        assert len(fetched) == 1
        assert work(local) == []
        Path(local.store.path, "work", kept).write_bytes(b"torn by a power cut")
        async with local.locked(key_of(layer)) as place:
            assert Path(await local.fetch(layer, f"{place}.in")).read_bytes() == blob.read_bytes()
        assert len(fetched) == 2
        Path(local.store.path, "work", kept).write_bytes(b"of a process that died")
        await local.serve([layer_of(tmp_path / "layout", tar_of(a=b"1"))])
        assert work(local) == []
