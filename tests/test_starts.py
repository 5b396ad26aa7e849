"""Telling blobfs that a container begins: once for each layer that has a profile, again where it could not be told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from weenv.core.aio import Background
from weenv.core.errors import ConfigError
from weenv.plugin.snapshotter.blobfs.config import BlobfsConfig
from weenv.plugin.snapshotter.config import from_tables
from weenv.plugin.snapshotter.layerdir import LayerDirs, LayerSource
from weenv.plugin.snapshotter.metastore import Metastore
from weenv.plugin.snapshotter.starts import Starts

DIGESTS = [f"sha256:{letter * 64}" for letter in "abc"]


class Rig:
    """Three layers, of which the first two have profiles, and a socket that notes what it is asked."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "b.sock")
        self.store = Metastore(str(path / "db"))
        self.dirs = LayerDirs(str(path))
        self.background = Background()
        self.asked: list[object] = []
        for number, digest in enumerate(DIGESTS, 1):
            assert self.store.layer(digest, "").id == number
            self.dirs.create(LayerSource(digest, 10, 5, 5, digest), b"")
        for digest in DIGESTS[:2]:
            self.dirs.set_prefetch(digest, "1,AAAA")
        self.starts = Starts(self.store, self.dirs, self.path, self.background)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """As blobfs does."""
        self.asked.append(json.loads(await reader.readline()))
        writer.write(b'{"layers": 1}\n')
        await writer.drain()
        writer.close()

    async def begin(self, *layers: int) -> None:
        """A container begins, and all that comes of it is done."""
        self.starts.begin(frozenset(layers))
        async with asyncio.timeout(30):
            while len(self.background):
                await asyncio.sleep(0.001)


@asynccontextmanager
async def rig(path: Path, *, served: bool = True) -> AsyncIterator[Rig]:
    made = Rig(path)
    server = await asyncio.start_unix_server(made.answer, made.path) if served else None
    try:
        yield made
    finally:
        if server is not None:
            server.close()
            await server.wait_closed()
        await made.background.close()
        made.store.close()


async def test_once_for_each_layer_with_a_profile(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.begin(1, 3)
        assert r.asked == [{"op": "start", "layers": DIGESTS[:1]}]
        await r.begin(1, 3)
        await r.begin(3)
        await r.begin()
        assert len(r.asked) == 1
        await r.begin(3, 2, 1)
        assert r.asked[1:] == [{"op": "start", "layers": DIGESTS[1:2]}]


async def test_layers_without_profile_and_unknown_ones_ask_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.begin(3, 99)
        assert r.asked == []


async def test_where_no_blobfs_runs_the_next_start_tells(tmp_path: Path) -> None:
    async with rig(tmp_path, served=False) as r:
        await r.begin(1)
        server = await asyncio.start_unix_server(r.answer, r.path)
        async with server:
            await r.begin(1)
            assert len(r.asked) == 1
            await r.begin(1)
            assert len(r.asked) == 1


def test_where_blobfs_is_told_is_what_blobfs_is_configured_to() -> None:
    assert from_tables({}).blobfs_socket == BlobfsConfig().status_socket
    assert from_tables({"blobfs": {"status_socket": "/x/y"}}).blobfs_socket == "/x/y"
    for wrong in ({"status_socket": 7}, 7):  # whoever reads that table complains of it
        assert from_tables({"blobfs": wrong}).blobfs_socket == BlobfsConfig().status_socket
    with pytest.raises(ConfigError, match="unknown setting"):
        from_tables({"snapshotter": {"blobfs_socket": "/x"}})
