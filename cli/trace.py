"""``weenv elastic trace``: one environment's quota against its use, from the decision log."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import click

from weenv.cli import figure, render
from weenv.cli.daemons import CONFIG
from weenv.cli.top import matches, parse_ago
from weenv.core.errors import WeenvError
from weenv.core.settings import read_tables

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Point:
    """One look: seconds since the first, cores used since the one before, bytes, limits in force, what was decided."""

    at: float
    cpu: float
    memory: int
    unreclaimable: int
    quota_cpu: float
    quota_memory: int
    reason: str
    asked: str = ""


def points(records: list[dict[str, Any]]) -> list[Point]:
    """A log's lines of one environment, in order. A line that lacks something is left out; counters may begin anew."""
    found: list[Point] = []
    first: float | None = None
    last: tuple[float, float] | None = None
    for record in records:
        try:
            at, clock, usage = float(record["t"]), float(record["m"]), float(record["usage_s"])
            quota_cpu, quota_memory = float(record["quota"][0]), int(record["quota"][1])
            memory, unreclaimable, reason = int(record["memory"]), int(record["unreclaimable"]), str(record["reason"])
        except (KeyError, TypeError, ValueError, IndexError, OverflowError):
            continue
        if not all(map(math.isfinite, (at, clock, usage, quota_cpu))):
            continue
        first = at if first is None else first
        cpu = 0.0
        if last is not None and clock > last[0] and usage >= last[1]:
            cpu = (usage - last[1]) / (clock - last[0])
        last = clock, usage
        asked = record.get("asked")
        text = ""
        if isinstance(asked, list) and len(asked) == 2 and all(isinstance(value, int | float) for value in asked):
            text = f"{asked[0]:g} cores, {render.size(asked[1])}"
        found.append(Point(at - first, cpu, memory, unreclaimable, quota_cpu, quota_memory, reason, text))
    return found


@click.command()
@CONFIG
@click.option("--since", callback=parse_ago, metavar="AGO", help="Only what is no older, such as 10m.")
@click.option("--log", "log_path", type=click.Path(exists=True, dir_okay=False), help="Another decision log than this node's.")
@click.option("--plot", metavar="FILE", type=click.Path(dir_okay=False), help="Draw it: .png, .svg or .pdf (needs matplotlib).")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.argument("environment", metavar="ENV")
def trace(config_path: str, since: float, log_path: str | None, plot: str | None, as_json: bool, environment: str) -> None:
    """Show, or draw, an environment's quota against its use over time, also one that has ended.

    ENV is its id, NAMESPACE/ID, or the beginning of either.

    \b
    Examples:
      weenv elastic trace task-17
      weenv elastic trace task-17 --plot out.png
    """
    from weenv.plugin.nri import journal
    from weenv.plugin.nri.serveconfig import from_tables

    path = log_path or os.path.join(from_tables(read_tables(config_path)).root, journal.DECISIONS)
    if not os.path.exists(path):
        raise WeenvError(f"no decisions: {path} does not exist", hint="weenv elastic serve writes it")
    records: dict[str, list[dict[str, Any]]] = {}
    for record in journal.read(path, since=since):
        if matches(record, environment):
            records.setdefault(str(record["env"]), []).append(record)
    if not records:
        raise WeenvError(f"nothing is known of an environment {environment[:80]!r}", hint=f"{path} has none of that name")
    if len(records) > 1:
        raise WeenvError(
            f"{environment[:80]!r} begins the names of {len(records)} environments",
            hint="write more of it: " + ", ".join(list(records)[:5]),
        )
    ((name, lines),) = records.items()
    shown = points(lines)
    if plot:
        draw(name, shown, plot)
        click.echo(plot)
    elif as_json:
        render.print_json([{field: getattr(point, field) for field in Point.__slots__} for point in shown])
    else:
        render.table(
            ["s", "cpu", "quota", "memory", "limit", "decision", "asked for"],
            [
                (f"{p.at:.1f}", f"{p.cpu:.2f}", f"{p.quota_cpu:g}", render.size(p.memory), render.size(p.quota_memory),
                 render.escape(p.reason), render.escape(p.asked))
                for p in shown
            ],
            title=render.escape(name), right=[0, 1, 2, 3, 4],
        )  # fmt: skip


def draw(name: str, shown: list[Point], target: str) -> None:
    """Two panels, CPU and memory: use as an area, the quota as steps above it. Raises WeenvError."""
    drawing = figure.new(render.plain(name), 8, 5)
    cpu, memory = drawing.subplots(2, 1, sharex=True)
    at = [point.at for point in shown]
    cpu.fill_between(at, [point.cpu for point in shown], step="pre", alpha=0.4, label="used")
    cpu.step(at, [point.quota_cpu for point in shown], where="pre", color="tab:red", label="quota")
    cpu.set_ylabel("CPU cores")
    memory.fill_between(at, [point.memory / GIB for point in shown], alpha=0.3, label="charged")
    memory.fill_between(at, [point.unreclaimable / GIB for point in shown], alpha=0.4, label="cannot be freed")
    memory.step(at, [point.quota_memory / GIB for point in shown], where="pre", color="tab:red", label="limit")
    memory.set_ylabel("memory, GiB")
    memory.set_xlabel("seconds")
    for panel in (cpu, memory):
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(loc="upper left", fontsize="small")
    figure.save(drawing, target)
