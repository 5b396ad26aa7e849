"""``weenv status``: what this node holds of each layer, and who uses it."""

from __future__ import annotations

import calendar
import dataclasses
import math
import time
from collections import Counter
from typing import Any

import click

from weenv.cli import render
from weenv.core.errors import UnavailableError
from weenv.core.settings import DEFAULT_CONFIG, read_tables
from weenv.core.unixsocket import listens

_MODES = {"lazy": "[cyan]lazy[/]", "complete": "[green]complete[/]", "unmounted": "[yellow]unmounted[/]"}


_AWAY = frozenset({"eio", "frame_lost", "notfound", "short", "source", "stall", "unauthorized"})
"""Kinds of errors (docs/metrics.md) that a source makes which is away, and no other."""
_OLD = 600.0
"""Seconds after which such an error is no news: who reads what is missing still has a new one."""
_NAMESPACES = 3
"""Namespaces shown in a table's cell; --json has them all."""


def blobfs_status(path: str) -> dict[str, Any] | None:
    """What the running blobfs says of itself, or None where none runs. Raises :class:`UnavailableError`."""
    from weenv.plugin.snapshotter.blobfs.ask import ask

    return ask(path, {"op": "status"})


def _asked(path: str) -> tuple[dict[str, Any] | None, list[str]]:
    """The same, and what is wrong where one runs and does not answer."""
    try:
        return blobfs_status(path), []
    except UnavailableError as error:
        return None, [error.message]


def _lost(root: str, path: str) -> str:
    """What is wrong where a snapshotter listens although none holds the root's lock; empty where nothing listens."""
    try:
        if not listens(path):
            return ""
    except OSError:
        return ""
    return (
        f"a snapshotter listens at {path}, but the root {root} is not the one it began with: it was deleted or replaced. "
        "Put it back, or restart weenv snapshotter: it begins with nothing, and images have to be pulled again"
    )


def _is_over(layer: dict[str, Any]) -> bool:
    """Whether a layer's errors are of a source that was away and meet nobody now: it is complete, or they are old."""
    if not set(layer["errors"]) <= _AWAY:
        return False
    if layer["local_percent"] >= 100:
        return True
    try:
        last = calendar.timegm(time.strptime(layer["last_error"].partition(" ")[0], "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return False
    return time.time() - last > _OLD


def blobfs_problems(answer: dict[str, Any] | None) -> list[str]:
    """What is wrong in the running blobfs: a line for each layer that had errors which are not over, and registries' servers
    that are ill now. Metrics and the log keep the rest."""
    lines: list[str] = []
    for layer in (answer or {}).get("layers", []):
        if layer.get("errors") and not _is_over(layer):
            kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(layer["errors"].items()))
            where = f"layer {render.short(layer['digest'])} ({layer['local_percent']:g}% local)"
            lines.append(f"{where}: {kinds}; last: {layer['last_error']}")
    for server in (answer or {}).get("registries", []):
        name, seconds = render.plain(server["server"]), math.ceil(server["seconds"])
        if server["state"] == "busy":
            lines.append(f"{name} is asked too often and wants {seconds} s of peace: the others are asked, or readers wait")
        else:
            lines.append(f"{name} failed again and again: it rests for {seconds} s, in which the others are asked before it")
    return lines


def _users(used_by: dict[str, tuple[str, ...]]) -> str:
    """How many containers of which namespaces: ``2 default, 1 k8s.io``."""
    shown = sorted(used_by.items(), key=lambda item: (-len(item[1]), item[0]))
    parts = [f"{len(names)} {render.escape(namespace or '-')}" for namespace, names in shown[:_NAMESPACES]]
    if rest := sum(len(names) for _, names in shown[_NAMESPACES:]):
        parts.append(f"{rest} others")
    return ", ".join(parts) or "-"


def _spread(containers: dict[str, int]) -> str:
    """The same in brackets, where there is more than one namespace."""
    parts = [f"{count} {render.plain(name)}" for name, count in containers.items()]
    return f" ({', '.join(parts)})" if len(parts) > 1 else ""


def _blobfs_line(answer: dict[str, Any] | None) -> str:
    """Whether it runs, and how large the cache is."""
    if answer is None:
        return "not running"
    cache = answer.get("cache") or {}
    line = "running"
    if "data" in cache:
        line += f"; cache {render.size(cache['data'])}"
        line += f" of {render.size(cache['high'])}" if cache.get("high") is not None else ""
        evicted = sum(cache.get("evicted_bytes", {}).values())
        line += f", {render.size(evicted)} evicted since it began" if evicted else ""
        line += ", over its bound and nothing can be evicted" if cache.get("stuck") else ""
    if count := (answer.get("frames") or {}).get("prefetch", 0):
        line += f"; by profiles: {render.counted(count, 'frame')}, {answer.get('prefetch_used', 0)} of them read since"
        line += ", more on their way" if answer.get("prefetching") else ""
    return line


@click.command()
@click.option("--config", "config_path", default=DEFAULT_CONFIG, show_default=True, help="WeEnv's configuration.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def status(config_path: str, as_json: bool) -> None:
    """Show the layers on this node, how much of each is local, and who uses it. Works while the daemons are down, too.

    \b
    Examples:
      weenv status
      weenv status --json | jq '.layers[] | select(.mode == "lazy")'
    """
    from weenv.plugin.snapshotter.blobfs import config as blobfs_config
    from weenv.plugin.snapshotter.config import from_tables
    from weenv.plugin.snapshotter.status import collect

    tables = read_tables(config_path)
    config = from_tables(tables)
    node = collect(config.root)
    lost = "" if node.running else _lost(config.root, config.socket)
    blobfs, mute = _asked(blobfs_config.from_table(tables.get("blobfs", {})).status_socket)
    if as_json:
        problems = [*([lost] if lost else []), *mute, *node.problems]
        render.print_json({**dataclasses.asdict(node), "problems": problems, "blobfs": blobfs})
        return
    rows = [
        (
            render.short(layer.digest),
            _MODES.get(layer.mode, layer.mode),
            render.size(layer.compressed_size),
            render.size(layer.stream_size),
            f"{layer.local_bytes / layer.stream_size:.1%}" if layer.stream_size else "0%",
            render.size(layer.disk_bytes),
            str(layer.snapshots),
            _users(layer.used_by),
            "[yellow]converted here[/]" if layer.converted else render.escape(layer.origins[0]) if layer.origins else "-",
        )
        for layer in node.layers
    ]
    if rows:
        head = ["layer", "served", "blob", "tar", "local", "on disk", "snapshots", "users", "from"]
        render.table(head, rows, right=[2, 3, 4, 5, 6, 7], drop=[3, 6, 5, 2])
    else:
        click.echo("No lazy layer on this node: pull a converted image with the weenv snapshotter (see weenv convert --help).")
    click.echo(
        f"{render.counted(node.active, 'container')}{_spread(node.containers)}, {render.counted(node.views, 'view')}; "
        f"images' snapshots: {node.committed_lazy} lazy, "
        f"{node.committed_ordinary} ordinary ({render.size(node.ordinary_bytes)})"
    )
    if others := Counter(layer.format for layer in node.layers if layer.format != "weenv"):
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(others.items()))
        click.echo(f"in the format of others: {kinds}; each file is verified, the layer as a whole (its diffID) cannot be")
    if node.converted_blobs:
        held = f"{render.counted(node.converted_blobs, 'layer')}, {render.size(node.converted_bytes)}"
        click.echo(f"not in the lazy format, converted on this node: {held}")
    click.echo(f"snapshotter: {f'running (pid {node.pid})' if node.running else 'not running'}, root {node.root}")
    click.echo(f"blobfs: {'does not answer' if mute else _blobfs_line(blobfs)}")
    if lost:
        click.echo(f"problem: {lost}")
    for problem in [*mute, *node.problems, *blobfs_problems(blobfs)]:
        click.echo(f"problem: {problem}")
