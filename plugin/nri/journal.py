"""Two files of JSON lines that outlive the daemon: what happened (``events.jsonl``) and why limits moved (``decisions.jsonl``).

Both are appended to with one write a line, and renamed to ``*.1`` when they are full, so at most twice their size is kept.
A reader that follows one sees the new file as well. Lines are somebody's input when read again: each is bounded, and what is no
object with a number ``t`` is left out.

A line of ``decisions.jsonl`` is one look at an environment::

    {"t": 1764450000.123, "env": "default/task-17", "m": 81.2, "usage_s": 10.4, "nr_periods": 50, "nr_throttled": 12,
     "throttled_s": 0.8, "memory": 210763776, "anon": 180000000, "active_file": 9000000, "unreclaimable": 190000000,
     "oom_kill": 0, "quota": [1.0, 536870912], "reason": "cpu-pressure", "tier": 1, "asked": [2.0, 536870912]}

``t`` is seconds since 1970, ``m`` of the monotonic clock; ``quota`` was in force, ``asked`` is there where it was to change.
The first line of an environment also has ``bounds`` (start, ceiling) and ``role``. Looks at which nothing happened are
left out, but for one every ``LOOK_EVERY`` seconds.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import time
from collections.abc import Iterator
from typing import Any

from weenv.core.regular import regular

LOOK_EVERY = 1.0
"""Seconds between two lines of ``decisions.jsonl`` about an environment to which nothing happens."""
MAX_LINE = 1 << 16
EVENTS = "events.jsonl"
DECISIONS = "decisions.jsonl"
_POLL = 0.2


class Kind(enum.StrEnum):
    """What can happen; the value of ``kind`` in ``events.jsonl``. Stable names."""

    SERVING = "serving"
    """The daemon is up: what happened between its last event and this one was not seen."""
    MANAGED = "managed"
    """An environment is managed from now on; ``quota``, ``start``, ``ceiling``."""
    QUOTA = "quota"
    """Its limits were changed: ``before``, ``quota`` (read back), ``reason``, ``took`` (seconds)."""
    REFUSED = "refused"
    """They could not be changed as asked; ``message``, ``asked``, ``quota`` in force."""
    PIDS = "pids"
    """Its limit of processes was raised: ``before`` (null: none), ``limit`` (read back), ``current``, ``refused`` forks."""
    STARVED = "starved"
    """It wants more than the node can give, told again only after it did not for a while; ``reason``."""
    DRIFT = "drift"
    """Somebody else has changed its limits."""
    OOM_KILL = "oom-kill"
    """The kernel has killed a process of a container for memory; ``kills`` so far, ``memory``, ``limit`` where known."""
    OOM_EMERGENCY = "oom-emergency"
    """We end it: memory at its limit, growing, nothing left to give. ``memory``, ``limit``."""
    ENDED = "ended"
    """It has ended: ``status``, ``cause`` (:class:`Cause`), ``cpu_s``, ``throttled_s``, ``starved_s``, ``oom_kills``."""
    ADMITTED = "admitted"
    """Room was found for one that asked; ``waited`` seconds."""
    DENIED = "denied"
    """No room for one that asked; ``message``."""


class Cause(enum.StrEnum):
    """Why an environment ended, for machines; also the value of the label ``weenv.dev/ended``."""

    COMPLETED = "completed"
    """Exit status 0."""
    FAILED = "failed"
    """Another one, for reasons of its own."""
    KERNEL_OOM = "oom-kernel"
    """The kernel killed a process of it for memory, and it did not end well."""
    EMERGENCY = "oom-emergency"
    """We ended it for memory."""
    STARVED = "starved"
    """It did not end well, and for a good part of its time it wanted more than the node could give."""
    UNKNOWN = "unknown"
    """Nobody saw its exit status."""


STARVED_SHARE = 0.25
"""An environment that failed was starved where it wanted in vain for this share of its time ..."""
STARVED_LEAST = 2.0
"""... and for at least so many seconds."""


def cause(status: int | None, *, emergency: bool, oom_kills: int, starved_s: float, lived_s: float) -> Cause:
    """Why it ended, from what was seen; memory comes before starvation, both before a failure of its own."""
    if emergency:
        return Cause.EMERGENCY
    if status is None:
        return Cause.UNKNOWN
    if status == 0:
        return Cause.COMPLETED
    if oom_kills:
        return Cause.KERNEL_OOM
    if starved_s >= STARVED_LEAST and starved_s >= STARVED_SHARE * lived_s:
        return Cause.STARVED
    return Cause.FAILED


class Journal:
    """Appends to one such file; OSError where that is not possible. Nothing is lost by ``kill -9`` of the writer."""

    def __init__(self, path: str, max_bytes: int) -> None:
        self.path = path
        self._max = max_bytes
        self._fd = self._open()
        self._size = os.fstat(self._fd).st_size
        self._waiting: list[bytes] = []

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def add(self, record: dict[str, Any]) -> None:
        """Keep a line for :meth:`flush`."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        if len(line) <= MAX_LINE:
            self._waiting.append(line)

    def flush(self) -> None:
        """Write what waits. Raises OSError; the lines are lost then, nothing else is."""
        if not self._waiting:
            return
        data, self._waiting = b"".join(self._waiting), []
        if self._size and self._size + len(data) > self._max:
            os.rename(self.path, self.path + ".1")
            os.close(self._fd)
            self._fd = self._open()
            self._size = 0
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            self._size += written
            view = view[written:]

    def close(self) -> None:
        """Write what waits and close the file."""
        with contextlib.suppress(OSError):  # its last lines are lost; the record has said why, if it failed before
            self.flush()
        os.close(self._fd)


def parse(line: bytes) -> dict[str, Any] | None:
    """The object of a line, or None for what is none of ours."""
    if len(line) > MAX_LINE:
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("t")) in (int, float) else None


def read(path: str, *, since: float = 0.0, follow: bool = False) -> Iterator[dict[str, Any]]:
    """The records of a journal from the wall clock time ``since`` on, the older file first; ``follow`` waits for more.

    A file that is not there has none (and is waited for). Raises OSError where one cannot be read.
    """
    with contextlib.suppress(FileNotFoundError), open(path + ".1", "rb", opener=regular) as file:
        yield from _records(file, since)
    file_now = None
    try:
        while True:
            if file_now is None:
                try:
                    file_now = open(path, "rb", opener=regular)  # noqa: SIM115 - closed below
                except FileNotFoundError:
                    if not follow:
                        return
                    time.sleep(_POLL)
                    continue
            yield from _records(file_now, since)
            if not follow:
                return
            time.sleep(_POLL)
            try:
                renewed = os.stat(path).st_ino != os.fstat(file_now.fileno()).st_ino
            except FileNotFoundError:
                continue
            if renewed:
                yield from _records(file_now, since)  # what was written until it was renamed
                file_now.close()
                file_now = None
    finally:
        if file_now is not None:
            file_now.close()


def _records(file: Any, since: float) -> Iterator[dict[str, Any]]:
    """Whole lines from where the file stands; a line that is still being written is left for the next call."""
    while True:
        place = file.tell()
        line = file.readline(MAX_LINE + 1)
        if not line:
            return
        if not line.endswith(b"\n"):
            if len(line) > MAX_LINE:
                continue  # no line of ours: the rest of it is read as others that are none
            file.seek(place)
            return
        record = parse(line)
        if record is not None and record["t"] >= since:
            yield record
