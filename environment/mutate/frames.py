"""Bytes of a stack's tar streams, frame by frame: from the node's own cache where it has them, else one ranged read, verified.

Only the frames that hold what is asked for are fetched; frames beside each other come with one request. What was fetched
last is kept in memory, decompressed.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from weenv.core.aio import SingleFlight, gather_all
from weenv.core.errors import FormatError
from weenv.environment.compose import StackedLayer
from weenv.environment.tocs import descriptor_of, origin_of
from weenv.layer.toc import Toc
from weenv.layer.verify import verify_frame
from weenv.plugin.snapshotter.cache.present import frame_states
from weenv.plugin.snapshotter.layerdir import LayerDirs
from weenv.registry.client import RegistryClient
from weenv.registry.source import open_source

KEEP = 64 << 20
"""Bytes of decompressed frames kept in memory."""
_RUN = 8 << 20
"""Compressed bytes of one request."""

Piece = tuple[int, int]
"""Offset and length in a layer's tar stream."""


class FrameReader:
    """Belongs to one event loop. ``fetched`` counts (frames, compressed bytes) that were asked of origins."""

    def __init__(self, client: RegistryClient, root: str = "", *, keep: int = KEEP) -> None:
        self.client = client
        self.dirs = LayerDirs(root) if root else None
        self.fetched = [0, 0]
        self._keep = keep
        self._kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._size = 0
        self._flights: SingleFlight[tuple[str, int, int], list[bytes]] = SingleFlight()
        self._flying: dict[tuple[str, int], tuple[int, int]] = {}
        """The run that a frame is being fetched with."""

    async def read(self, layer: StackedLayer, toc: Toc, pieces: Sequence[Piece]) -> list[bytes]:
        """The pieces' bytes, in order. Raises SourceError, FormatError."""
        digest = layer.blob.digest
        wanted = sorted({number for offset, length in pieces for number in toc.frames.covering(offset, length)})
        have = self._in_memory(digest, wanted)
        missing = [number for number in wanted if number not in have]
        if missing and self.dirs is not None:
            have.update(await asyncio.to_thread(self._local, digest, toc, missing))
            have.update(self._in_memory(digest, missing))
            missing = [number for number in missing if number not in have]
        if missing:
            with self._runs_for(digest, toc, missing) as runs:
                await gather_all(*(self._fetch(layer, toc, first, end, have) for first, end in runs))
        return [_cut(toc, have, offset, length) for offset, length in pieces]

    def _in_memory(self, digest: str, numbers: Sequence[int]) -> dict[int, bytes]:
        have = {number: self._kept[digest, number] for number in numbers if (digest, number) in self._kept}
        for number in have:
            self._kept.move_to_end((digest, number))
        return have

    def _local(self, digest: str, toc: Toc, numbers: list[int]) -> dict[int, bytes]:
        """Those frames that blobfs has written to the layer's ``data`` file."""
        assert self.dirs is not None
        directory = self.dirs.path(digest)
        sizes = toc.frames.content_sizes
        states = frame_states(directory, sizes, toc.stream_size)
        if states is None or not any(states[number] for number in numbers):
            return {}
        found = {}
        try:
            fd = os.open(os.path.join(directory, "data"), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return {}
        try:
            for number in numbers:
                if states[number]:
                    data = os.pread(fd, int(sizes[number]), int(toc.frames.content_offsets[number]))
                    if len(data) == int(sizes[number]):
                        found[number] = data
        except OSError:
            return {}
        finally:
            os.close(fd)
        # A frame that was dropped from the cache meanwhile may have been read as zeros: it is no longer marked then.
        after = frame_states(directory, sizes, toc.stream_size)
        return {number: data for number, data in found.items() if after is not None and after[number]}

    @contextmanager
    def _runs_for(self, digest: str, toc: Toc, missing: list[int]) -> Iterator[set[tuple[int, int]]]:
        """The runs that bring what is missing; those that others wait for already, with whatever neighbours, among them."""
        runs = {self._flying[digest, number] for number in missing if (digest, number) in self._flying}
        runs.update(_runs(toc, [number for number in missing if (digest, number) not in self._flying]))
        for first, end in runs:
            self._flying.update(dict.fromkeys(((digest, number) for number in range(first, end)), (first, end)))
        try:
            yield runs
        finally:
            for first, end in runs:
                if (digest, first, end) not in self._flights:
                    for number in range(first, end):
                        self._flying.pop((digest, number), None)

    async def _fetch(self, layer: StackedLayer, toc: Toc, first: int, end: int, have: dict[int, bytes]) -> None:
        key = (layer.blob.digest, first, end)
        contents = await self._flights.do(key, lambda: self._fetch_now(layer, toc, first, end))
        have.update(zip(range(first, end), contents, strict=True))

    async def _fetch_now(self, layer: StackedLayer, toc: Toc, first: int, end: int) -> list[bytes]:
        descriptor = descriptor_of(layer)
        frames = toc.frames
        begin, stop = int(frames.compressed_offsets[first]), int(frames.compressed_offsets[end])
        source = open_source(self.client, origin_of(descriptor, layer), descriptor.digest, descriptor.size)
        try:
            data = memoryview(await source.read(begin, stop - begin))
        finally:
            await source.close()
        self.fetched[0] += end - first
        self.fetched[1] += len(data)

        def verified() -> list[bytes]:
            cuts = [int(offset) - begin for offset in frames.compressed_offsets[first : end + 1]]
            return [verify_frame(frames, n, data[cuts[n - first] : cuts[n - first + 1]]) for n in range(first, end)]

        contents = await asyncio.to_thread(verified)
        for number, content in zip(range(first, end), contents, strict=True):
            self._store((descriptor.digest, number), content)
        return contents

    def _store(self, key: tuple[str, int], content: bytes) -> None:
        old = self._kept.pop(key, None)
        self._size += len(content) - (len(old) if old is not None else 0)
        self._kept[key] = content
        while self._size > self._keep:
            _, dropped = self._kept.popitem(last=False)
            self._size -= len(dropped)


def _runs(toc: Toc, numbers: list[int]) -> list[tuple[int, int]]:
    """Sorted frame numbers as runs [first, end) of one request each."""
    runs: list[tuple[int, int]] = []
    offsets = toc.frames.compressed_offsets
    for number in numbers:
        if runs and runs[-1][1] == number and int(offsets[number + 1]) - int(offsets[runs[-1][0]]) <= _RUN:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def _cut(toc: Toc, have: dict[int, bytes], offset: int, length: int) -> bytes:
    parts = []
    for number in toc.frames.covering(offset, length):
        begin = int(toc.frames.content_offsets[number])
        parts.append(have[number][max(0, offset - begin) : offset + length - begin])
    data = b"".join(parts)
    if len(data) != length:
        raise FormatError("a file's data lies beyond its layer's stream", member=toc.diff_id)
    return data
