"""Rows of the report: what, target, measured, whether it was reached; as a table, as JSON, as a page for the documentation."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One line: ``target`` and ``measured`` are text for people, ``detail`` holds every number they came from."""

    part: str
    what: str
    target: str
    measured: str
    ok: bool
    detail: dict[str, Any] = field(default_factory=dict)


def at_most(
    part: str,
    what: str,
    value: float,
    limit: float,
    unit: str = "",
    detail: dict[str, Any] | None = None,
    slack: float = 0,
    spread: Sequence[float] = (),
) -> Row:
    """A row whose value must not exceed ``limit`` (plus ``slack``, the noise of the measurement, shown where it is given).

    ``spread``: the single measurements that the value comes from; the middle four fifths of them are shown.
    """
    noise = f" ±{slack:.2f}" if slack else ""
    if spread:
        noise += f" ({number(quantile(spread, 0.1))}–{number(quantile(spread, 0.9))})"
    return Row(part, what, f"≤ {limit:g}{unit}", number(value) + unit + noise, value <= limit + slack, detail or {})


def known(part: str, what: str, value: str, detail: dict[str, Any] | None = None) -> Row:
    """A figure without a limit, for comparison."""
    return Row(part, what, "", value, True, detail or {})


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values lie (the nearest one that was measured)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def at_least(part: str, what: str, value: float, limit: float, unit: str = "", detail: dict[str, Any] | None = None) -> Row:
    """A row whose value must reach ``limit``."""
    return Row(part, what, f"≥ {limit:g}{unit}", number(value) + unit, value >= limit, detail or {})


def machine() -> dict[str, str]:
    """What the figures were taken on."""
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), platform.machine())
    with open("/proc/meminfo") as file:
        memory = int(next(file).split()[1]) / 1024**2
    commit = subprocess.run(
        ["git", "-C", os.path.dirname(__file__), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "cpu": f"{model}, {os.cpu_count()} cores", "memory": f"{memory:.0f} GiB", "kernel": platform.release(),
        "python": platform.python_version(), "commit": commit, "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def print_table(rows: Iterable[Row], console: Console) -> None:
    """The report for a terminal."""
    table = Table(title="How fast, how small: ratios within this run", title_justify="left")
    for name in ("what", "target", "measured", ""):
        table.add_column(name, justify="right" if name in ("target", "measured") else "left", overflow="fold")
    for row in rows:
        table.add_row(row.what, row.target, row.measured, _verdict(row))
    console.print(table)


def _verdict(row: Row) -> str:
    if not row.target:
        return ""
    return "[green]ok[/]" if row.ok else "[red]missed[/]"


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """``new`` over ``old``, tables within tables merged too."""
    both = {**old, **new}
    return {
        key: _merged(old[key], value) if isinstance(value, dict) and isinstance(old.get(key), dict) else value
        for key, value in both.items()
    }


def busy(seconds: float = 2.0) -> float:
    """Share of the machine's CPU time that is in use now, while we do nothing: what disturbs a measurement."""

    def read() -> tuple[int, int]:
        with open("/proc/stat") as file:
            values = [int(value) for value in file.readline().split()[1:]]
        return sum(values), values[3] + values[4]

    total, idle = read()
    time.sleep(seconds)
    total_now, idle_now = read()
    return round(1 - (idle_now - idle) / max(1, total_now - total), 3)


def number(value: float) -> str:
    """Three decimals below ten, fewer above."""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def save(path: str, rows: list[Row], facts: dict[str, Any]) -> None:
    """Write everything as JSON, replacing the rows of parts that were measured again and keeping the others."""
    old: dict[str, Any] = {"rows": [], "facts": {}}
    if os.path.exists(path):
        with open(path) as file:
            old = json.load(file)
    parts = {row.part for row in rows}
    kept = [row for row in old["rows"] if row["part"] not in parts]
    here = machine()
    when = {"date": datetime.datetime.now().isoformat(timespec="seconds"), "commit": here["commit"]}
    new = [{**asdict(row), **when} for row in rows]
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path + ".tmp", "w") as file:
        json.dump({"machine": here, "rows": kept + new, "facts": _merged(old["facts"], facts)}, file, indent=1)
    os.rename(path + ".tmp", path)
