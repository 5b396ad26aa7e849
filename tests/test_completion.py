"""Complete layers are checked against their diffID once; the first mismatch is the disk's, the second the publisher's."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

import pytest

from weenv.layer.tail import FrameIndex
from weenv.layer.verify import verify_frame
from weenv.plugin.snapshotter.blobfs import complete
from weenv.plugin.snapshotter.blobfs.complete import Completion
from weenv.plugin.snapshotter.blobfs.layers import Layer
from weenv.plugin.snapshotter.cache.present import AGAIN, BAD, GOOD, UNCHECKED, Presence, is_bad, is_complete
from weenv.plugin.snapshotter.cache.store import DataStore
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher
from weenv_testkit.synthetic import make_layer, payload

MADE = make_layer([("f", payload(5 << 20))], target=64 << 10)


class Case:
    """A layer on disk, and a check that runs."""

    def __init__(self, path: Path, diff_id: str = MADE.toc.diff_id) -> None:
        size = len(MADE.stream)
        self.path = str(path)
        self.layer = Layer(
            MADE.source(), self.path, FrameIndex(MADE.frames, size, diff_id),
            Presence.open(self.path, MADE.frames.content_sizes, size), DataStore.open(str(path / "data"), size), [], (0, 0),
        )  # fmt: skip
        self.refused: list[str] = []
        self.fetcher = Fetcher(verify_frame)
        self.completion = Completion(
            self.fetcher, lambda: [self.layer], lambda _, reason: self.refused.append(reason), share=1.0
        )

    def store(self, stream: bytes = MADE.stream) -> None:
        self.layer.store.write(0, stream)
        for frame in range(len(self.layer.presence)):
            self.layer.presence.mark(frame)

    async def until(self, verdict: int) -> None:
        """... and, where it is AGAIN, until all frames are missing, which comes after it in another thread."""
        count = len(self.layer.presence)
        async with asyncio.timeout(60):
            while self.layer.presence.verdict != verdict or (verdict == AGAIN and self.layer.presence.missing < count):
                await asyncio.sleep(0.02)


async def finish(case: Case, task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await case.fetcher.close()


async def test_a_layer_counts_as_complete_once_it_has_its_diffid(tmp_path: Path) -> None:
    case = Case(tmp_path)
    task = asyncio.create_task(case.completion.run())
    case.store(MADE.stream)
    assert not is_complete(case.path)
    await case.until(GOOD)
    assert is_complete(case.path)
    assert (case.completion.checked, case.completion.mismatches, case.refused) == (1, 0, [])
    await finish(case, task)


async def test_the_check_waits_for_readers_and_for_the_last_frame(tmp_path: Path) -> None:
    case = Case(tmp_path)
    task = asyncio.create_task(case.completion.run())
    case.store()
    case.layer.presence.lose([3])
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        case.fetcher.last_demand = time.monotonic()  # readers wait all the time
        if case.layer.presence.missing and end - time.monotonic() < 0.7:
            case.layer.presence.mark(3)
        await asyncio.sleep(0.05)
    assert case.layer.presence.verdict == UNCHECKED
    await case.until(GOOD)
    await finish(case, task)


async def test_wrong_data_is_fetched_again_and_wrong_twice_is_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(tmp_path)
    task = asyncio.create_task(case.completion.run())
    wrong = bytearray(MADE.stream)
    wrong[3_000_000] ^= 1
    with caplog.at_level(logging.ERROR):
        case.store(bytes(wrong))
        await case.until(AGAIN)
        assert case.layer.presence.missing == len(case.layer.presence)
        assert not is_complete(case.path)
        assert not is_bad(case.path)
        case.store(bytes(wrong))
        await case.until(BAD)
        await asyncio.sleep(0)
    assert is_bad(case.path)
    assert not is_complete(case.path)
    assert case.refused == [f"its content does not have the diffID {MADE.toc.diff_id}"]
    assert [record.getMessage()[:12] for record in caplog.records] == ["a complete l", "a layer does"]
    assert case.layer.tally.errors == {"diffid": 2}
    await finish(case, task)


async def test_a_disk_that_was_wrong_once_is_forgiven(tmp_path: Path) -> None:
    case = Case(tmp_path)
    task = asyncio.create_task(case.completion.run())
    case.store(bytes(len(MADE.stream)))
    await case.until(AGAIN)
    case.store()
    await case.until(GOOD)
    assert is_complete(case.path)
    assert case.refused == []
    await finish(case, task)


async def test_data_that_is_cut_while_it_is_hashed_is_missing_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complete, "_PIECE", 64 << 10)
    case = Case(tmp_path)
    case.store()
    os.truncate(tmp_path / "data", 1 << 20)
    task = asyncio.create_task(case.completion.run())
    async with asyncio.timeout(60):
        while not case.layer.presence.missing:
            await asyncio.sleep(0.02)
    assert case.layer.presence.verdict == UNCHECKED
    present = [frame for frame, state in enumerate(case.layer.presence.states) if state]
    assert all(case.layer.contents[frame + 1] <= 1 << 20 for frame in present)
    case.store()
    await case.until(GOOD)
    await finish(case, task)
