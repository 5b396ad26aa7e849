"""blobfs/server.py without a mount: what its threads promise to eviction. A socket of packets is in the place of /dev/fuse."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from weenv.layer.verify import verify_frame
from weenv.plugin.snapshotter.blobfs import wire
from weenv.plugin.snapshotter.blobfs.daemon import read_tail
from weenv.plugin.snapshotter.blobfs.layers import Layer, LayerTable
from weenv.plugin.snapshotter.blobfs.server import Server, ServeStats
from weenv.plugin.snapshotter.cache.evict import Guard, drop
from weenv.plugin.snapshotter.cache.reads import load
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher
from weenv.plugin.snapshotter.layerdir import LayerDirs
from weenv_testkit.synthetic import make_layer, payload

LAYER = make_layer([("f", payload(400_000, 3))], target=64 << 10)


class Kernel:
    """The other end, and a layer of which everything is there."""

    def __init__(self, root: str) -> None:
        LAYER.install(root)
        self.table = LayerTable(LayerDirs(root), read_tail, lambda *_: [])
        node = self.table.lookup(LAYER.name.encode())
        assert node is not None and node.layer is not None
        self.nodeid, self.layer = node.nodeid, node.layer
        self.layer.store.write(0, LAYER.stream)
        for frame in range(len(self.layer.presence)):
            self.layer.presence.mark(frame)
        self.fetcher = Fetcher(verify_frame)
        self.near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._far = far
        self.server = Server(far.fileno(), self.table, self.fetcher, root=root)
        self._unique = 0

    def ask(self, offset: int, length: int) -> int:
        """Send a READ."""
        self._unique += 2
        body = wire.READ_REQUEST.size
        message = bytearray(body + 40)
        wire.READ_REQUEST.pack_into(
            message, 0, len(message), wire.READ, self._unique, self.nodeid, 0, 0, 0, 0, 0, 0, offset, length
        )
        self.near.send(message)
        return self._unique

    def answer(self) -> bytes:
        """What the next answer holds."""
        self.near.settimeout(20)
        packet = self.near.recv(1 << 20)
        _, error, _ = wire.OUT_HEADER.unpack_from(packet)
        assert error == 0
        return packet[wire.OUT_HEADER.size :]

    def evict(self, frames: list[int]) -> int:
        """As the evictor does it."""
        guard = Guard(self.layer.writing, lambda: self.server.in_use(self.layer), lambda: self.server.quiet(self.layer))
        return drop(self.layer.store, self.layer.presence, self.layer.contents, np.array(frames), guard).frames

    def close(self) -> None:
        """End the threads, and only then take the descriptor away that they read from."""
        self.near.close()
        self.server.join()
        self._far.close()


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncIterator[Kernel]:
    """A server that nobody has started yet."""
    made = Kernel(str(tmp_path))
    yield made
    await asyncio.to_thread(made.close)
    await made.fetcher.close()


class Held:
    """os.preadv, held up before it reads; ``entered`` is set when somebody has come so far."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()
        self._real: Callable[..., int] = os.preadv

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        self.entered.set()
        assert self.go.wait(60)
        return self._real(fd, buffers, offset)


async def test_what_a_thread_is_about_to_read_is_not_evicted_before_it_has(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    monkeypatch.setattr(os, "preadv", held)
    kernel.server.start(1)
    kernel.ask(0, 100_000)
    assert held.entered.wait(60)
    done: list[int] = []
    eviction = threading.Thread(target=lambda: done.append(kernel.evict([0, 1, 2])))
    eviction.start()
    eviction.join(0.3)
    assert eviction.is_alive() and not done, "the marks are gone, the frames are not"
    assert not any(kernel.layer.presence.states[:3])
    held.go.set()
    assert kernel.answer() == LAYER.stream[:100_000]
    eviction.join(60)
    assert done == [3]
    assert os.pread(kernel.layer.store.fd, 4096, 4096) == bytes(4096)


async def test_who_asks_for_another_layer_or_later_holds_nothing_up(kernel: Kernel) -> None:
    kernel.server.start(2)
    for offset in (0, 100_000, 200_000):
        kernel.ask(offset, 4096)
        assert kernel.answer() == LAYER.stream[offset : offset + 4096]
    assert kernel.evict([0]) == 1


async def test_a_thread_that_never_ends_keeps_the_frames(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weenv.plugin.snapshotter.blobfs.server._READ_MAX", 0.2)
    held = Held()
    monkeypatch.setattr(os, "preadv", held)
    kernel.server.start(1)
    kernel.ask(0, 4096)
    assert held.entered.wait(60)
    assert kernel.evict([0, 1]) == 0
    assert all(kernel.layer.presence.states)
    held.go.set()
    assert kernel.answer() == LAYER.stream[:4096]


async def test_reads_are_noted_frame_by_frame(kernel: Kernel) -> None:
    kernel.server.start(1)
    contents = kernel.layer.contents
    kernel.ask(contents[1] + 10, 100)
    kernel.answer()
    kernel.ask(contents[3] - 10, 20)
    kernel.answer()
    assert [frame for frame, touched in enumerate(kernel.layer.touched) if touched] == [1, 2, 3]
    assert kernel.layer.tally.hits[kernel.server.stats[1].number] == [2, 120]


async def test_first_reads_are_recorded_whoever_asks_and_those_of_a_profile_counted(kernel: Kernel) -> None:
    layer, contents = kernel.layer, kernel.layer.contents
    layer.prefetched.update((1, 3, 4))
    kernel.server.start(1)
    kernel.ask(contents[3] + 10, 100)  # a mount's
    kernel.answer()
    peer = bytearray(wire.READ_REQUEST.size)
    wire.READ_REQUEST.pack_into(peer, 0, len(peer), wire.READ, 99, kernel.nodeid, 0, 0, 0, 0, 0, 0, contents[0], contents[2])
    kernel.server.carry_out(memoryview(peer), ServeStats())  # the FUSE plane's
    assert kernel.answer() == LAYER.stream[: contents[2]]
    kernel.ask(contents[3], 100)
    kernel.answer()
    assert [frame for _, frame in load(layer.path, len(layer.presence))] == [3, 0, 1]
    assert kernel.fetcher.stats.prefetch_used == 2 and layer.prefetched == {4}


def test_a_layer_that_waits_is_in_use(kernel: Kernel) -> None:
    from weenv.plugin.snapshotter.blobfs.server import PendingRead
    from weenv.plugin.snapshotter.fetch.flight import DEMAND, Flight

    layer: Layer = kernel.layer
    kernel.server.waiting[7] = PendingRead(kernel.server, layer, 7, 0, 0, 10, 2, 4)
    layer.flights[6] = Flight(layer, 6, DEMAND)
    assert kernel.server.in_use(layer) == {2, 3, 6}
    assert kernel.evict([1, 2, 3, 4]) == 2
    layer.flights.clear()
    kernel.server.waiting.clear()
