"""Profiles by the control socket's requests: what is followed, what is refused, and what is forgotten."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from weenv.core.errors import InvalidRequest
from weenv.layer.profile import encode
from weenv.layer.verify import verify_frame
from weenv.plugin.snapshotter.blobfs.config import CacheConfig, PrefetchConfig
from weenv.plugin.snapshotter.blobfs.control import Control
from weenv.plugin.snapshotter.blobfs.daemon import read_tail
from weenv.plugin.snapshotter.blobfs.evictor import Evictor
from weenv.plugin.snapshotter.blobfs.layers import LayerTable
from weenv.plugin.snapshotter.blobfs.profiles import Profiles
from weenv.plugin.snapshotter.blobfs.server import Server
from weenv.plugin.snapshotter.cache import reads
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher
from weenv.plugin.snapshotter.fetch.prefetch import Prefetcher
from weenv.plugin.snapshotter.layerdir import LayerDirs, LayerSource, Origin
from weenv.registry.source import BlobSource, FileSource
from weenv_testkit.synthetic import make_layer, payload

ONE, TWO = (make_layer([("f", payload(2 << 20, seed))], target=64 << 10) for seed in (1, 2))


class Rig:
    """Two layers on a node, and everything that a request goes through."""

    def __init__(self, path: Path) -> None:
        self.root = str(path)
        self.dirs = LayerDirs(self.root)
        for layer in (ONE, TWO):
            (path / f"{layer.name}.blob").write_bytes(layer.blob)
            layer.install(self.root, Origin("file", path=str(path / f"{layer.name}.blob")))
        self.fetcher = Fetcher(verify_frame)
        self.table = LayerTable(self.dirs, read_tail, self.sources)
        self.prefetcher = Prefetcher(PrefetchConfig(), self.fetcher, lambda: True, self.table.holds)
        self.profiles = Profiles(self.dirs, self.table, self.prefetcher)
        server = Server(-1, self.table, self.fetcher, root=self.root)
        evictor = Evictor(CacheConfig(), self.root, self.table, server, self.fetcher)
        self.control = Control(evictor, dict, self.profiles)

    def sources(self, source: LayerSource, _: object) -> list[BlobSource]:
        """The blob's file."""
        return [FileSource(f"{self.root}/{source.digest[7:]}.blob")]

    async def done(self) -> None:
        """Until nothing is fetched any more."""
        async with asyncio.timeout(30):
            while self.prefetcher.running or any(layer.flights for layer in self.table.open_layers()):
                await asyncio.sleep(0.001)


@asynccontextmanager
async def rig(path: Path) -> AsyncIterator[Rig]:
    made = Rig(path)
    try:
        yield made
    finally:
        await made.prefetcher.close()
        await made.fetcher.close()


async def test_a_start_fetches_what_the_profiles_of_its_layers_say(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.dirs.set_prefetch(ONE.digest, encode([(0, 3), (1, 9), (2, 4)]).value)
        asked = {"op": "start", "layers": [ONE.digest, TWO.digest, "sha256:" + "0" * 64]}
        assert await r.control.answer(asked) == {"layers": 1, "frames": 3}
        await r.done()
        (layer,) = r.table.open_layers()  # nothing of the one without a profile is looked at
        assert [frame for frame in range(len(layer.presence)) if layer.presence.states[frame]] == [3, 4, 9]
        assert r.fetcher.stats.frames == [0, 0, 3, 0]


@pytest.mark.parametrize("value", ["garbage", "2,AAAA", encode([(0, 10**6)]).value, "1," + "A" * 5000, "\0\n"])
async def test_a_hostile_profile_is_told_of_once_and_is_none(
    tmp_path: Path, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with rig(tmp_path) as r:
        r.dirs.set_prefetch(ONE.digest, value)
        for _ in range(3):
            assert await r.control.answer({"op": "start", "layers": [ONE.digest]}) == {"layers": 0, "frames": 0}
        assert not r.prefetcher.running
        (told,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert told.message == "a layer's profile is not used" and "prefetch" in told.error  # type: ignore[attr-defined]


async def test_a_layer_that_cannot_be_opened_keeps_the_others_from_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        for layer in (ONE, TWO):
            r.dirs.set_prefetch(layer.digest, encode([(0, 1)]).value)
        os.unlink(r.dirs.file(ONE.digest, "toc"))
        assert await r.control.answer({"op": "start", "layers": [ONE.digest, TWO.digest]}) == {"layers": 1, "frames": 1}
        await r.done()


async def test_forgetting_reaches_open_layers_and_closed_ones(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        node = r.table.lookup(ONE.name.encode())
        assert node is not None and node.layer is not None
        node.layer.reads.note(0, 3)
        closed = reads.Reads(r.dirs.path(TWO.digest), len(TWO.frames))
        closed.note(5, 6)
        closed.close()
        assert reads.load(r.dirs.path(ONE.digest), len(ONE.frames))
        assert await r.control.answer({"op": "forget", "layers": [ONE.digest, TWO.digest]}) == {"frames": 4}
        for layer in (ONE, TWO):
            assert not reads.load(r.dirs.path(layer.digest), len(layer.frames))
        assert node.layer.reads.note(0, 1) == [0], "and it is recorded again"


async def test_reads_are_not_recorded_where_that_is_turned_off(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.table.record = False
        node = r.table.lookup(ONE.name.encode())
        assert node is not None and node.layer is not None
        assert node.layer.reads.note(0, 3) == [0, 1, 2]
        assert not os.path.exists(r.dirs.file(ONE.digest, reads.NAME))


@pytest.mark.parametrize("layers", [None, "x", [1], ["sha256:x"], ["../../etc"], [ONE.digest] * 2000, {}])
async def test_nonsense_is_refused(tmp_path: Path, layers: object) -> None:
    async with rig(tmp_path) as r:
        for op in ("start", "forget"):
            assert "error" in await r.control.answer({"op": op, "layers": layers})
        with pytest.raises(InvalidRequest):
            await r.profiles.begin(layers)
