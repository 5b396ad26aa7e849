"""Journals: what is written is read again, over full files and bad lines; why an environment ended."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.plugin.nri.journal import MAX_LINE, Cause, Journal, cause, parse, read


def test_lines_outlive_the_writer_and_full_files(tmp_path: Path) -> None:
    path = str(tmp_path / "events.jsonl")
    journal = Journal(path, 200)
    for number in range(20):
        journal.add({"t": float(number), "n": number})
        journal.flush()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.path.getsize(path) <= 200 and os.path.getsize(path + ".1") <= 200
    kept = [record["n"] for record in read(path)]
    assert kept == list(range(20 - len(kept), 20)) and len(kept) >= 10
    assert [record["n"] for record in read(path, since=18.0)] == [18, 19]
    journal.add({"t": 20.0, "n": 20})
    journal.close()
    again = Journal(path, 1 << 20)
    again.add({"t": 21.0, "n": 21})
    again.close()
    assert [record["n"] for record in read(path)][-3:] == [19, 20, 21]


def test_bad_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        b'{"t": 1}\nnonsense\n[]\n{"t": "x"}\n{"t": true}\n\xff\xfe\n'
        + b"x" * (3 * MAX_LINE)
        + b"\n"
        + b"[" * 60_000
        + b'\n{"t": 2}\n{"t": 3'
    )
    assert [record["t"] for record in read(str(path))] == [1, 2], "the last one is still being written"


def test_a_journal_that_is_not_there_has_nothing(tmp_path: Path) -> None:
    assert list(read(str(tmp_path / "none"))) == []


def test_following_goes_on_into_the_next_file(tmp_path: Path) -> None:
    path = str(tmp_path / "events.jsonl")
    found: list[int] = []
    done = threading.Event()

    def follow() -> None:
        for record in read(path, follow=True):
            found.append(record["n"])
            if record["n"] == 9:
                break
        done.set()

    thread = threading.Thread(target=follow)
    thread.start()
    journal = Journal(path, 100)
    seen = 0
    for number in range(10):
        journal.add({"t": float(number), "n": number})
        journal.flush()
        while len(found) <= number and not done.wait(0.01) and seen < 1000:
            seen += 1
    thread.join(60)
    journal.close()
    assert done.is_set() and found == list(range(10))


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        Journal(str(tmp_path / "events.jsonl"), 1000)


@given(st.binary(max_size=300))
def test_no_line_does_harm(line: bytes) -> None:
    record = parse(line)
    assert record is None or isinstance(record["t"], int | float)


@pytest.mark.parametrize(
    ("status", "emergency", "kills", "starved", "why"),
    [
        (0, False, 0, 0.0, Cause.COMPLETED),
        (0, False, 3, 50.0, Cause.COMPLETED),
        (1, False, 0, 0.0, Cause.FAILED),
        (1, False, 0, 10.0, Cause.FAILED),
        (1, False, 0, 30.0, Cause.STARVED),
        (137, False, 1, 30.0, Cause.KERNEL_OOM),
        (137, True, 1, 30.0, Cause.EMERGENCY),
        (None, True, 0, 0.0, Cause.EMERGENCY),
        (None, False, 1, 0.0, Cause.UNKNOWN),
    ],
)
def test_ends_are_told_apart(status: int | None, emergency: bool, kills: int, starved: float, why: Cause) -> None:
    assert cause(status, emergency=emergency, oom_kills=kills, starved_s=starved, lived_s=100.0) is why
