"""Large frame tables on disk: the same as in memory, and nothing left in the directory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from weenv.core.errors import StorageError
from weenv.layer.toc import Frames
from weenv.plugin.snapshotter.cache import tables
from weenv.plugin.snapshotter.cache.tables import MappedFrames, spool


def frames(count: int) -> Frames:
    random = np.random.default_rng(count)
    return Frames(
        random.integers(1, 1000, count).astype("<u4"),
        random.integers(1, 1000, count).astype("<u4"),
        random.integers(0, 256, (count, 32)).astype("u1"),
    )


@pytest.mark.parametrize("count", [tables.LARGE, tables.LARGE + 1])
def test_a_large_table_is_the_same_on_disk(tmp_path: Path, count: int) -> None:
    table = frames(count)
    found = spool(table, str(tmp_path))
    assert isinstance(found, MappedFrames)
    for name in ("compressed_sizes", "content_sizes", "digests", "compressed_offsets", "content_offsets"):
        assert np.array_equal(getattr(found, name), getattr(table, name)), name
        assert getattr(found, name).dtype == getattr(table, name).dtype, name
        with pytest.raises(ValueError, match="read-only"):
            getattr(found, name)[0] = 0
    assert len(found) == count
    assert found.covering(500, 2000) == table.covering(500, 2000)
    assert os.listdir(tmp_path) == []


def test_a_small_table_stays_in_memory(tmp_path: Path) -> None:
    table = frames(tables.LARGE - 1)
    assert spool(table, str(tmp_path)) is table


def test_a_disk_that_does_not_take_it_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be kept"):
        spool(frames(tables.LARGE), str(tmp_path / "missing"))


def anonymous() -> int:
    """This process's anonymous memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def test_large_tables_take_no_memory(tmp_path: Path) -> None:
    kept = [spool(frames(1 << 18), str(tmp_path))]
    tables.give_back()
    before = anonymous()
    kept += [spool(frames(1 << 18), str(tmp_path)) for _ in range(6)]
    tables.give_back()
    assert anonymous() - before < 20 << 20  # 6 times 18 MB in memory
    assert len({table.digests.tobytes()[:32] for table in kept}) == 1
