"""``weenv top`` and ``weenv events``: what elastic provisioning does, now and before."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from weenv.cli import render
from weenv.cli.daemons import CONFIG
from weenv.core.errors import WeenvError
from weenv.core.settings import read_tables

if TYPE_CHECKING:
    from rich.console import RenderableType

_SORTS = {
    "cpu": lambda row: -row["cpu"],
    "memory": lambda row: -row["memory"],
    "quota": lambda row: -row["quota"][0],
    "age": lambda row: -row["age"],
    "name": lambda row: (row["namespace"], row["id"]),
}


@click.command()
@CONFIG
@click.option("--interval", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True, help="Seconds between two views.")
@click.option("--sort", type=click.Choice(list(_SORTS)), default="cpu", show_default=True, help="The largest first.")
@click.option("--once", is_flag=True, help="One view, and end; the default where nobody watches.")
@click.option("--json", "as_json", is_flag=True, help="One view, for machines.")
def top(config_path: str, interval: float, sort: str, once: bool, as_json: bool) -> None:
    """Show managed environments: quota, use, pressure, tier, and the last decision with its reason.

    \b
    Examples:
      weenv top --sort memory
      weenv top --json | jq '.environments[] | select(.throttled > 0.5) | .id'
    """
    from weenv.plugin.nri.ask import Asker
    from weenv.plugin.nri.serveconfig import from_tables

    with Asker(from_tables(read_tables(config_path)).socket) as asker:
        if as_json:
            render.print_json(asker.ask("node"))
            return
        from rich.console import Console
        from rich.live import Live

        console = Console()
        if once or not console.is_terminal:
            if not console.is_terminal:
                console.width = 200
            console.print(_view(asker.ask("node"), sort, 1000))
            return
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                live.update(_view(asker.ask("node"), sort, max(1, console.height - 5)), refresh=True)
                time.sleep(interval)


def _view(answer: dict[str, Any], sort: str, room: int) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    node, rows = answer["node"], sorted(answer["environments"], key=_SORTS[sort])
    promised, reserve = node["promised"], node["reserve"]
    head = (
        f"{render.counted(node['environments'], 'environment')}, {node['waiting']} waiting; promised "
        f"{promised[0]:.4g} of {node['cpu']:g} cores, {render.size(promised[1])} of {render.size(node['memory'])}; "
        f"reserve {reserve[0]:.3g} cores, {render.size(reserve[1])}"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, least in (
        ("environment", 0), ("role", 4), ("cpu", 5), ("quota", 5), ("thr", 4), ("psi", 4), ("memory", 8), ("limit", 8),
        ("tier", 4), ("last decision", 0),
    ):  # fmt: skip
        table.add_column(name, justify="right" if least > 4 else "left", no_wrap=True, min_width=least or None)
    for row in rows[:room]:
        pressed = max(row["cpu_pressure"], row["memory_pressure"])
        why = f"{row['why']} {render.seconds(row['why_age'])} ago" + (", changing" if row["changing"] else "")
        table.add_row(
            render.escape(f"{row['namespace']}/{row['id']}"), row["role"], f"{row['cpu']:.2f}", f"{row['quota'][0]:.4g}",
            _percent(row["throttled"]), _percent(pressed), render.size(row["memory"]), render.size(row["quota"][1]),
            str(row["tier"]), render.escape(why),
        )  # fmt: skip
    more = [Text(f"and {len(rows) - room} more")] if len(rows) > room else []
    return Group(Text(head), table, *more)


def _percent(share: float) -> str:
    return f"[red]{share:.0%}[/]" if share >= 0.5 else f"{share:.0%}" if share >= 0.005 else "-"


_AGO = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)\Z", re.ASCII)


def parse_ago(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> float:
    """An option's ``10m`` as seconds since 1970; nothing: 0."""
    if not text:
        return 0.0
    match = _AGO.match(text)
    if match is None:
        raise click.BadParameter("write how long ago, such as 30s, 10m or 2h")
    return time.time() - float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


@click.command()
@CONFIG
@click.option("--since", callback=parse_ago, metavar="AGO", help="Only what is no older, such as 10m.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now on.")
@click.option("--env", "wanted", metavar="ENV", help="Only of an environment: ID or NAMESPACE/ID, or the beginning of it.")
@click.option("--kind", "kinds", multiple=True, metavar="KIND", help="Only of this kind, such as oom-kill; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for machines.")
def events(config_path: str, since: float, follow: bool, wanted: str | None, kinds: tuple[str, ...], as_json: bool) -> None:
    """Print what happened to environments: quotas moved or refused, memory kills, ends and their causes.

    The cause of an end (kind "ended") is completed, failed, starved, oom-kernel, oom-emergency or unknown.

    \b
    Examples:
      weenv events --since 10m
      weenv events -f --json | jq -c 'select(.kind == "ended" and .cause != "completed")'
    """
    from weenv.plugin.nri import journal
    from weenv.plugin.nri.serveconfig import from_tables

    path = os.path.join(from_tables(read_tables(config_path)).root, journal.EVENTS)
    if not os.path.exists(path) and not follow:
        raise WeenvError(f"no events: {path} does not exist", hint="weenv elastic serve writes it")
    try:
        for record in journal.read(path, since=since, follow=follow):
            if matches(record, wanted) and (not kinds or record.get("kind") in kinds):
                click.echo(json.dumps(record, separators=(",", ":")) if as_json else line(record))
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)


def matches(record: dict[str, Any], wanted: str | None) -> bool:
    """Whether a record is of an environment, named by the beginning of its id or of its namespace and id."""
    name = str(record.get("env", ""))
    return not wanted or name.startswith(wanted) or name.partition("/")[2].startswith(wanted)


def line(record: dict[str, Any]) -> str:
    """A record for people."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["t"]))
    sizes = _SIZES if record.get("kind") != "pids" else frozenset[str]()  # its limit is one of processes
    rest = [f"{key}={_value(key, value, sizes)}" for key, value in record.items() if key not in ("t", "kind", "env")]
    return render.plain(f"{stamp}  {record.get('kind', '?'):<13}  {record.get('env', ''):<32}  {' '.join(rest)}".rstrip())


_SIZES = frozenset({"memory", "limit", "ceiling", "unreclaimable", "peak_memory"})
"""What are bytes where they are numbers."""


def _value(key: str, value: Any, sizes: frozenset[str]) -> str:
    if key in ("before", "quota", "asked", "start", "ceiling") and isinstance(value, list) and len(value) == 2:
        cpu, memory = value
        return f"{cpu if cpu is not None else 'no limit'}/{render.size(memory) if memory is not None else 'no limit'}"
    if key in sizes and isinstance(value, int):
        return render.size(value)
    text = str(value)
    return json.dumps(text) if " " in text else text
