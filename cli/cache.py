"""``weenv cache``: what of the layers is kept on this node's disk, and taking some of it out."""

from __future__ import annotations

import os
import time
from typing import Any

import click

from weenv.cli import render
from weenv.cli.amounts import Size, age
from weenv.core.errors import WeenvError
from weenv.core.log import printable
from weenv.core.settings import DEFAULT_CONFIG, read_tables

_PATIENCE = 20.0
"""Seconds for which the running blobfs may say nothing: it gives a sign of life every second."""

CONFIG = click.option("--config", "config_path", default=DEFAULT_CONFIG, show_default=True, help="WeEnv's configuration.")


def _ask(tables: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """The answer of the running blobfs, or the same from the directories where none runs."""
    from weenv.plugin.snapshotter.blobfs import config as blobfs_config
    from weenv.plugin.snapshotter.blobfs.ask import ask

    config = blobfs_config.from_table(tables.get("blobfs", {}))
    if (answer := ask(config.status_socket, request, patience=_PATIENCE)) is not None:
        return answer
    from weenv.plugin.snapshotter.blobfs.control import prune_request
    from weenv.plugin.snapshotter.cache.keeper import Keeper
    from weenv.plugin.snapshotter.cache.prune import prune_unserved

    keeper = Keeper(config.root, config.cache)
    try:
        if request["op"] == "cache":
            os.stat(config.root)  # for a daemon one that is not there yet is empty; here it is rather misspelt
            size = keeper.size()
            bounds = size.bounds
            cache = {"data": size.data, "high": bounds.high if bounds.bounded else None}
            return {"layers": keeper.rows(), "cache": {**cache, "low": bounds.low if bounds.bounded else None}}
        which, to, dry = prune_request(request)
        return prune_unserved(keeper, which, to, dry=dry)
    except OSError as error:
        hint = "run it as root" if isinstance(error, PermissionError) else "is [blobfs] root right?"
        raise WeenvError(f"the layers in {config.root} cannot be looked at: {error.strerror}", hint=hint) from error


@click.group()
def cache() -> None:
    """Show and limit what is kept of the layers on this node's disk.

    What is taken out is fetched again when somebody reads it. [blobfs.cache] in the configuration limits it for good.
    """


@cache.command("ls")
@CONFIG
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def ls(config_path: str, as_json: bool) -> None:
    """List the layers with what each has on disk, the one used last first.

    \b
    Examples:
      weenv cache ls
      weenv cache ls --json | jq '.layers[] | select(.unused)'
    """
    answer = _ask(read_tables(config_path), {"op": "cache"})
    rows = sorted(answer["layers"], key=lambda row: -row["used_at"])
    if as_json:
        render.print_json({**answer, "layers": rows})
        return
    now = time.time()
    if rows:
        render.table(
            ["layer", "on disk", "local", "frames", "used", "state"],
            [
                (
                    render.short(row["digest"]),
                    render.size(row["disk_bytes"]),
                    f"{row['local_bytes'] / row['stream_size']:.1%}" if row["stream_size"] else "100%",
                    f"{row['frames_local']}/{row['frames']}",
                    f"{_ago(now - row['used_at'])} ago",
                    "[yellow]no image has it[/]" if row["unused"] else "" if row["evictable"] else "read by the kernel itself",
                )
                for row in rows
            ],
            right=[1, 2, 3, 4], drop=[3],
        )  # fmt: skip
    else:
        click.echo("Nothing of any layer is on this node's disk.")
    limits = answer["cache"]
    line = f"{render.counted(len(rows), 'layer')}, {render.size(limits['data'])} on disk"
    if limits["high"] is not None:
        line += f"; evicted from {render.size(limits['high'])} on, down to {render.size(limits['low'])}"
    click.echo(line)


def _ago(seconds: float) -> str:
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


@cache.command("prune", short_help="Take layers' data out of the cache.")
@CONFIG
@click.option("--all", "everything", is_flag=True, help="All that can go.")
@click.option("--until", callback=age, metavar="AGE", help="What nobody has read for so long: 90s, 15m, 24h, 7d.")
@click.option("--layer", "layers", multiple=True, metavar="DIGEST", help="Of this layer only, or its first digits; repeatable.")
@click.option("--to", "size", type=Size(0, unit=True), metavar="SIZE", help="No more than makes it that small: 500M, 20Gi.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def prune(
    config_path: str, everything: bool, until: float | None, layers: tuple[str, ...], size: int | None, dry_run: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Take data out of the cache, what was not read for longest first.

    Running containers lose nothing: what they read again is fetched again. Layers that are complete are read by the kernel
    itself; they are taken from it first, which takes a few seconds, and stay where a container that runs has them (or with
    --until, as nobody knows when they were read). What stays is named, with the reason.

    \b
    Examples:
      weenv cache prune --until 24h
      weenv cache prune --to 20Gi --dry-run
      weenv cache prune --layer 4f2a91c0 --all
    """
    if not (everything or until is not None or layers or size is not None):
        raise click.UsageError("say what: --all, --until AGE, --layer DIGEST or --to SIZE")
    prefixes = [layer.removeprefix("sha256:").lower() for layer in layers]
    request: dict[str, Any] = {"op": "prune", "layers": prefixes, "dry_run": dry_run}
    if until is not None:
        request["before"] = time.time() - until
    if size is not None:
        request["to"] = size
    tables = read_tables(config_path)
    answer = _ask(tables, request)
    if as_json:
        render.print_json(answer)
        return
    users = _users(tables) if any(row["why"] == "container" for row in answer["layers"]) else {}
    for row in answer["layers"]:
        if row["why"] and not row["frames"]:
            text = f"layer {render.short(row['digest'])} stays: {_WHY.get(row['why'], row['why'])}"
            names = users.get(row["digest"], []) if row["why"] == "container" else []
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            click.echo(printable(text + (f" (used by {', '.join(names[:_NAMED])}{more})" if names else "")), err=True)
        elif row["why"] == "mounted" and answer["dry_run"]:
            short = render.short(row["digest"])
            click.echo(f"layer {short} goes unless a container that runs has it from the kernel", err=True)
    what = f"{render.counted(answer['frames'], 'frame')}, {render.size(answer['bytes'])}"
    click.echo(f"would take out {what}" if answer["dry_run"] else f"took out {what}; {render.size(answer['data_after'])} left")


def _users(tables: dict[str, Any]) -> dict[str, list[str]]:
    """Who has each layer below itself, as NAMESPACE/NAME, by digest."""
    from weenv.plugin.snapshotter.config import from_tables
    from weenv.plugin.snapshotter.status import collect

    try:
        layers = collect(from_tables(tables).root).layers
    except (WeenvError, OSError):
        return {}
    found: dict[str, list[str]] = {}
    for layer in layers:  # one that is mounted in several variants has several rows
        found.setdefault(layer.digest, []).extend(f"{space}/{name}" for space, names in layer.used_by.items() for name in names)
    return found


_NAMED = 3
"""Containers named for each layer that stays."""
_WHY = {
    "container": "the kernel reads it by itself for what was started before; it can go when that has been removed",
    "unanswered": "the kernel reads it by itself, and weenv snapshotter has not mounted it over blobfs: see weenv status",
    "alone": "the kernel reads it by itself; where weenv blobfs and weenv snapshotter run, it can go",
    "age": "the kernel reads it by itself, and nobody knows when: --all, --to and --layer take it without --until",
    "mounted": "something has its file open that is none of ours",
    "busy": "readers wait for it",
    "disk": "its marks cannot be written; look at the disk",
    "unsupported": "its file system punches no holes",
}
