"""Both planes, each with a blobfs of its own below one directory: what the conformance suite runs on."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from weenv.core import digest as digests
from weenv.layer.encode import encode_layer
from weenv.plugin.snapshotter import mounts
from weenv.plugin.snapshotter.builder import Builder
from weenv.plugin.snapshotter.layerdir import LayerDirs, LayerSource, Origin
from weenv.plugin.snapshotter.planes.base import Attachment, Plane, Variant
from weenv.plugin.snapshotter.planes.erofs import ErofsPlane
from weenv.plugin.snapshotter.planes.fuse import FusePlane, Process, serving
from weenv.plugin.snapshotter.planes.fuseserver import start_time
from weenv_testkit import blobfsproc
from weenv_testkit.blobfsproc import Blobfs
from weenv_testkit.procs import mounts_under, processes_of, wait_until

T = TypeVar("T")
PLANES = tuple(os.environ.get("WEENV_TEST_PLANES", "erofs fuse").split())
"""Those that are tested: in a guest with an older kernel there is one only."""


class Rig:
    """A plane with layers. Use :func:`rigged`."""

    def __init__(self, name: str, blobfs: Blobfs, loop: asyncio.AbstractEventLoop, builder: Builder) -> None:
        self.name = name
        self.blobfs = blobfs
        self.root = blobfs.path
        self.dirs = LayerDirs(self.root)
        self.loop = loop
        self.builder = builder
        self.lost: list[str] = []
        self._numbers = itertools.count()
        self.plane: Plane = self.make_plane()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The outcome of a coroutine, in the plane's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(200)

    def make_plane(self) -> Plane:
        """The plane of a snapshotter that has just begun."""

        async def make() -> Plane:
            mountpoint = self.blobfs.config.mountpoint
            plane: Plane = (
                ErofsPlane(self.dirs, mountpoint, self.builder)
                if self.name == "erofs"
                else FusePlane(self.dirs, mountpoint, f"{self.root}/layers.sock", self.builder)
            )
            plane.on_loss(self.lost.append)
            await plane.probe()
            return plane

        return self.run(make())

    def close_plane(self) -> None:
        """What the end of a snapshotter does."""

        async def close() -> None:
            self.plane.close()

        self.run(close())

    def restart_plane(self) -> None:
        """Another snapshotter's."""
        self.close_plane()
        self.plane = self.make_plane()

    def add(self, tar: str, *, source: str = "", **options: Any) -> str:
        """A layer from an uncompressed tar; its digest. ``source`` is where its blob is kept."""
        blob = source or f"{self.root}/{next(self._numbers)}.blob"
        with open(tar, "rb") as stream, open(blob, "wb") as out:
            encoded = encode_layer(stream, out, **options)
        d = encoded.descriptor()
        tail = Path(blob).read_bytes()[d.toc_offset :]
        self.dirs.create(
            LayerSource(d.digest, d.size, d.toc_offset, d.toc_length, d.toc_digest, [Origin("file", path=blob)]), tail
        )
        return d.digest

    def attach(self, digest: str, target: str = "", *, variant: Variant | None = None, replace: bool = False) -> str:
        """Attach a layer; the directory where it is."""
        target = target or f"{self.root}/m{next(self._numbers)}"
        os.makedirs(target, exist_ok=True)
        self.attachment(digest, target, variant=variant, replace=replace)
        return target

    def attachment(self, digest: str, target: str, *, variant: Variant | None = None, replace: bool = False) -> Attachment:
        """The same; what the plane says of it."""
        return self.run(self.plane.attach(digest, variant or Variant(), target, replace=replace))

    @contextmanager
    def attached(self, digest: str, *, variant: Variant | None = None) -> Iterator[str]:
        """A layer that is attached within the block."""
        target = self.attach(digest, variant=variant)
        try:
            yield target
        finally:
            self.plane.detach(target)
            os.rmdir(target)

    def entry(self, target: str) -> mounts.MountEntry:
        """What the kernel says of a mount."""
        return mounts.mounts_below(self.root)[target]

    def server(self, target: str) -> int:
        """The process that serves a mount of the FUSE plane; 0 where none does any more."""
        pid, start = map(int, self.entry(target).source.split(":")[2:])
        return pid if start_time(pid) == start else serving(f"{self.root}/layers.sock", Process(pid, start)).pid

    def directory(self, digest: str) -> str:
        """A layer's directory."""
        return f"{self.dirs.base}/{digests.hex_of(digest)}"


@contextmanager
def rigged(name: str, path: str, **settings: Any) -> Iterator[Rig]:
    """A rig at ``path``, an empty directory on a disk; nothing of it is left mounted. ``settings`` are blobfs's."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=f"plane {name}")
    thread.start()
    builder = Builder(2)
    rig: Rig | None = None
    try:
        with blobfsproc.running(path, **settings) as blobfs:
            asyncio.run_coroutine_threadsafe(builder.__aenter__(), loop).result(60)
            try:
                rig = Rig(name, blobfs, loop, builder)
                yield rig
            finally:
                for target in mounts_under(path):
                    if target != blobfs.config.mountpoint:
                        mounts.detach(target)
                if rig is not None:
                    rig.close_plane()
                asyncio.run_coroutine_threadsafe(builder.__aexit__(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    if name == "fuse":  # the host ends when nobody needs it
        wait_until("the host to end", lambda: not processes_of(f"{path}/layers.sock"), 60)
