"""What an environment wants over its life, and two file formats to read it from.

A **trace file** is JSON lines, one environment each::

    {"name": "t1", "arrive": 0.0, "phases": [[2.0, 0.02, 52428800], [4.5, 16.0, 1073741824]],
     "role": "task", "after": null, "start": [0.5, 536870912], "ceiling": [64.0, 34359738368]}

A phase is seconds (at full speed), cores wanted, and bytes of memory at its end, to which memory moves in a straight line;
``after`` names an environment at whose end this one arrives. ``role``, ``after``, ``start`` and ``ceiling`` may be left out.

A **decision log** of ``weenv elastic serve`` (weenv.plugin.nri.journal) is read as well: what was wanted between two looks is
what was used and what throttling withheld. It can be no more than what the kernel counted: a process that was never let
run does not show how many more it would have started.

Both are somebody's input: sizes and numbers are bounded, and a line at fault is named.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from weenv.core.atomic import write_atomic
from weenv.core.errors import FormatError, LimitError
from weenv.core.regular import regular
from weenv.plugin.nri import journal
from weenv.plugin.nri.model import Quota, Role

MAX_LINE = 16 << 20
"""Bytes of one line of a trace file: a day of one environment at five phases a second is about as large."""
MAX_TRACES = 200_000
MAX_PHASES = 5_000_000
"""Of all environments of a file together."""
MAX_CORES = 1e5
MAX_BYTES = 1 << 50
MAX_SECONDS = 1e8


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of one demand."""

    seconds: float
    """How long it takes when nothing holds it back."""
    cpu: float
    """Cores it uses then."""
    memory: int
    """Bytes, not reclaimable, at its end; in between a straight line from the phase before."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One environment."""

    name: str
    arrive: float
    """When it asks to be admitted (seconds); with ``after``, so long after the end of that one."""
    phases: tuple[Phase, ...]
    role: Role = Role.TASK
    after: str = ""
    start: Quota | None = None
    ceiling: Quota | None = None

    @property
    def seconds(self) -> float:
        """Its life when nothing holds it back."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def work(self) -> float:
        """CPU seconds."""
        return sum(phase.seconds * phase.cpu for phase in self.phases)

    @property
    def peak(self) -> Quota:
        """The most it ever wants, of each."""
        return Quota(max(phase.cpu for phase in self.phases), max(phase.memory for phase in self.phases))


def read(path: str) -> list[Trace]:
    """Traces of a file, of either format. Raises :class:`FormatError` with the line at fault, OSError."""
    with open(path, "rb", opener=regular) as file:
        head = file.readline(MAX_LINE + 1)
    if (record := journal.parse(head)) is not None and "env" in record:
        return from_decisions(journal.read(path), path)
    traces = list(_read_lines(path))
    if not traces:
        raise FormatError("no environment in it", member=path, hint="one JSON object a line; see docs/elastic.md")
    known = {trace.name for trace in traces}
    for trace in traces:
        if trace.after and trace.after not in known:
            raise FormatError(f"{trace.name} comes after {trace.after}, which is not there", member=path)
    if len(known) != len(traces):
        raise FormatError("two environments have one name", member=path)
    return traces


def _read_lines(path: str) -> Iterator[Trace]:
    phases = 0
    with open(path, "rb", opener=regular) as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            where = f"{path}:{number}"
            if len(line) > MAX_LINE:
                raise LimitError(f"a line of more than {MAX_LINE} bytes", member=where)
            if not line.strip():
                continue
            if number > MAX_TRACES:
                raise LimitError(f"more than {MAX_TRACES} environments", member=where)
            try:
                trace = from_json(json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise FormatError(f"no trace of an environment: {error}", member=where) from error
            phases += len(trace.phases)
            if phases > MAX_PHASES:
                raise LimitError(f"more than {MAX_PHASES} phases", member=where)
            yield trace


def _number(value: object, low: float, high: float, what: str) -> float:
    """A finite number within bounds. Raises ValueError."""
    if type(value) not in (int, float) or not low <= value <= high:  # type: ignore[operator]
        raise ValueError(f"{what} must be a number from {low:g} to {high:g}")
    return float(value)  # type: ignore[arg-type]


def _quota(value: object, what: str) -> Quota | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{what} must be [cores, bytes]")
    return Quota(_number(value[0], 0.01, MAX_CORES, what), int(_number(value[1], 4096, MAX_BYTES, what)))


def from_json(value: Any) -> Trace:
    """One line of a trace file. Raises ValueError, TypeError, KeyError."""
    if not isinstance(value, dict):
        raise ValueError("not an object")
    name, after = value["name"], value.get("after") or ""
    if not isinstance(name, str) or not isinstance(after, str) or not 0 < len(name) <= 256:
        raise ValueError("name and after must be strings of at most 256 characters")
    if not isinstance(value["phases"], list) or not value["phases"]:
        raise ValueError("phases must be a list with at least one phase")
    phases = []
    for item in value["phases"]:
        if not isinstance(item, list) or len(item) != 3:
            raise ValueError("a phase must be [seconds, cores, bytes]")
        phases.append(
            Phase(
                _number(item[0], 0.0, MAX_SECONDS, "seconds"),
                _number(item[1], 0.0, MAX_CORES, "cores"),
                int(_number(item[2], 0, MAX_BYTES, "bytes")),
            )
        )
    return Trace(
        name, _number(value.get("arrive", 0.0), 0.0, MAX_SECONDS, "arrive"), tuple(phases),
        Role(value.get("role", "task")), after,
        _quota(value.get("start"), "start"), _quota(value.get("ceiling"), "ceiling"),
    )  # fmt: skip


def to_json(trace: Trace) -> dict[str, Any]:
    """What :func:`from_json` reads."""
    out: dict[str, Any] = {
        "name": trace.name,
        "arrive": round(trace.arrive, 4),
        "phases": [[round(phase.seconds, 4), round(phase.cpu, 4), phase.memory] for phase in trace.phases],
    }
    if trace.role is not Role.TASK:
        out["role"] = trace.role.value
    if trace.after:
        out["after"] = trace.after
    for name, quota in (("start", trace.start), ("ceiling", trace.ceiling)):
        if quota is not None:
            out[name] = [quota.cpu, quota.memory]
    return out


def write(path: str, traces: Iterable[Trace]) -> None:
    """Write a trace file. Raises OSError."""
    lines = (json.dumps(to_json(trace), separators=(",", ":")) + "\n" for trace in traces)
    write_atomic(path, "".join(lines).encode("ascii"), mode=0o644)


# --- decision logs ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    """What a decision log said of one environment so far."""

    first: float
    last: tuple[float, float, float]
    """Monotonic time, CPU seconds, throttled seconds."""
    phases: list[Phase]
    role: Role
    start: Quota | None
    ceiling: Quota | None


def from_decisions(records: Iterable[dict[str, Any]], where: str) -> list[Trace]:
    """Traces from the records of a decision log. Raises :class:`FormatError` where nothing in it can be used."""
    seen: dict[str, _Seen] = {}
    begin = math.inf
    count = 0
    for record in records:
        try:
            name = record["env"]
            wall = _number(record["t"], 0.0, 1e12, "t")
            at = _number(record["m"], 0.0, 1e12, "m")
            usage = _number(record["usage_s"], 0.0, 1e12, "usage_s")
            lost = _number(record.get("throttled_s", 0.0), 0.0, 1e12, "throttled_s")
            fixed = max(_number(record.get(key, 0), 0, MAX_BYTES, key) for key in ("anon", "unreclaimable"))
            memory = int(min(MAX_BYTES, fixed + _number(record.get("active_file", 0), 0, MAX_BYTES, "active_file")))
            if not isinstance(name, str):
                continue
            known = seen.get(name)
            if known is None:
                if len(seen) >= MAX_TRACES:
                    raise LimitError(f"more than {MAX_TRACES} environments", member=where)
                start, _, ceiling = _bounds(record.get("bounds"))
                role = Role(record.get("role", "task"))
                seen[name] = _Seen(wall, (at, usage, lost), [Phase(0.0, 0.0, memory)], role, start, ceiling)
                begin = min(begin, wall)
                continue
        except (KeyError, ValueError, TypeError):
            continue  # a line of another version, or cut short: the others can still be used
        before, used, withheld = known.last
        known.last = (at, usage, lost)
        if at <= before or usage < used or lost < withheld:
            continue  # the cgroup, or the clock, is another one
        count += 1
        if count > MAX_PHASES:
            raise LimitError(f"more than {MAX_PHASES} looks", member=where)
        elapsed = at - before
        wanted = (usage - used + lost - withheld) / elapsed
        # What was withheld would have been done at once: the same work, in less time.
        known.phases.append(Phase((usage - used) / wanted if usage > used else elapsed, min(wanted, MAX_CORES), memory))
    traces = [
        Trace(name, item.first - begin, tuple(item.phases), item.role, "", item.start, item.ceiling)
        for name, item in seen.items()
        if len(item.phases) > 1
    ]
    if not traces:
        raise FormatError("no environment in it was looked at twice", member=where)
    return traces


def _bounds(value: object) -> tuple[Quota | None, Quota | None, Quota | None]:
    """Start, floor, ceiling as far as they are there."""
    if isinstance(value, dict):
        return tuple(_quota(value.get(name), name) for name in ("start", "floor", "ceiling"))  # type: ignore[return-value]
    if isinstance(value, list) and len(value) == 2:
        return _quota(value[0], "start"), None, _quota(value[1], "ceiling")
    return None, None, None
