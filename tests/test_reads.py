"""The record of a layer's reads: in order, once each, whatever kills the process, the disk or the file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from weenv.plugin.snapshotter.cache.reads import NAME, Reads, forget, load, parse


def recorded(path: Path, frames: int = 100) -> list[int]:
    """The frames that the file names."""
    return [frame for _, frame in load(str(path), frames)]


def test_each_frame_once_in_the_order_of_its_first_read(tmp_path: Path) -> None:
    reads = Reads(str(tmp_path), 100)
    assert not (tmp_path / NAME).exists(), "nothing was read"
    assert reads.note(7, 9) == [7, 8]
    assert reads.note(8, 10) == [9]
    assert reads.note(7, 10) == []
    assert reads.note(0, 1) == [0]
    assert recorded(tmp_path) == [7, 8, 9, 0]
    assert (tmp_path / NAME).stat().st_size == 24 + 4 * 8
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    reads.close()
    assert reads.note(50, 51) == [50]
    assert recorded(tmp_path) == [7, 8, 9, 0], "closed: in memory only"
    again = Reads(str(tmp_path), 100)
    assert again.note(7, 12) == [10, 11]
    assert recorded(tmp_path) == [7, 8, 9, 0, 10, 11]
    times = [time for time, _ in load(str(tmp_path), 100)]
    assert times == sorted(times)
    again.close()


def test_a_torn_tail_is_cut_off(tmp_path: Path) -> None:
    reads = Reads(str(tmp_path), 100)
    reads.note(3, 6)
    reads.close()
    data = (tmp_path / NAME).read_bytes()
    for length in range(len(data)):
        (tmp_path / NAME).write_bytes(data[:length])
        whole = [3, 4, 5][: max(0, length - 24) // 8]
        assert recorded(tmp_path) == whole
        again = Reads(str(tmp_path), 100)
        assert [frame for frame in range(100) if again.seen[frame]] == whole
        again.note(60, 61)
        again.close()
        assert recorded(tmp_path) == [*whole, 60], length


@pytest.mark.parametrize("found", [b"", b"x" * 200, b"WEENVRD1" + b"\xff" * 200, b"WEENVRD2" + bytes(200)])
def test_what_is_no_record_of_this_layer_is_begun_anew(tmp_path: Path, found: bytes) -> None:
    (tmp_path / NAME).write_bytes(found)
    reads = Reads(str(tmp_path), 100)
    assert not any(reads.seen)
    reads.note(1, 2)
    reads.close()
    assert recorded(tmp_path) == [1]


def test_a_record_of_other_frames_is_none(tmp_path: Path) -> None:
    reads = Reads(str(tmp_path), 100)
    reads.note(90, 95)
    reads.close()
    assert recorded(tmp_path, 50) == []
    data = (tmp_path / NAME).read_bytes()
    assert parse(data[:8] + (92).to_bytes(4, "little") + data[12:], 92) == parse(data, 100)[:2], "frames out of range"


def test_a_disk_that_takes_nothing_is_nobodys_error(tmp_path: Path) -> None:
    reads = Reads(str(tmp_path / "gone"), 100)
    assert reads.note(1, 3) == [1, 2]
    assert reads.note(1, 4) == [3]
    os.symlink("/dev/full", tmp_path / NAME)
    full = Reads(str(tmp_path), 100)
    assert full.note(1, 3) == [1, 2]
    full.close()


def test_forgetting_begins_anew(tmp_path: Path) -> None:
    reads = Reads(str(tmp_path), 100)
    reads.note(1, 4)
    assert reads.forget() == 3
    assert not (tmp_path / NAME).exists()
    assert reads.forget() == 0
    assert reads.note(2, 3) == [2]
    assert recorded(tmp_path) == [2]
    reads.close()
    assert forget(str(tmp_path)) == 1
    assert forget(str(tmp_path)) == 0
    assert forget(str(tmp_path / "nowhere")) == 0


def test_threads_record_each_frame_once(tmp_path: Path) -> None:
    reads = Reads(str(tmp_path), 2000)
    threads = [
        threading.Thread(target=lambda step=step: [reads.note(f, f + 3) for f in range(0, 1997, step)]) for step in (1, 2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reads.close()
    frames = recorded(tmp_path, 2000)
    assert len(frames) == len(set(frames)) and sorted(frames) == [f for f in range(2000) if reads.seen[f]]


def test_killed_at_any_moment_it_has_what_was_noted_before(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom weenv.plugin.snapshotter.cache.reads import Reads\nreads = Reads(sys.argv[1], 1000000)\n"
        "for frame in range(1000000):\n    reads.note(frame, frame + 1)\n    if frame >= 100: print(frame, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    last = [int(child.stdout.readline()) for _ in range(50)][-1]
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    frames = recorded(tmp_path, 1000000)
    assert frames == list(range(len(frames))) and len(frames) > last
