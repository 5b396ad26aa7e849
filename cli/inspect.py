"""``weenv inspect``: all that is known of one environment, for machines."""

from __future__ import annotations

from typing import Any

import click

from weenv.cli import render
from weenv.cli.run import node_options, on_node
from weenv.environment.node import Node


@click.command()
@node_options
@click.argument("environment")
def inspect(environment: str, **o: Any) -> None:
    """Print one environment as JSON: what weenv ps says of it, its limits, and what elastic provisioning makes of it.

    "reason" says why it has ended: completed, failed, or, where the elastic daemon has seen it, oom-kernel,
    oom-emergency (ended by the daemon for memory) or starved. "start" and "ceiling" are cores and bytes, null for no limit.

    \b
    Example:
      weenv inspect task-17 | jq -r .reason
    """

    async def work(node: Node) -> dict[str, Any]:
        from weenv.environment import lifecycle, listing
        from weenv.plugin.nri import labels
        from weenv.plugin.nri.annotations import own_limits, plan_ceiling

        container = await lifecycle.find(node, environment)
        (row,) = [row for row in await listing.rows(node, everything=True) if row["name"] == container.id]
        made = container.labels
        row["start"] = limits(own_limits(container.spec))
        row["ceiling"] = limits(plan_ceiling(made[labels.CEILING])) if labels.CEILING in made else None
        row["oom_kills"] = int(made[labels.OOM_KILLS]) if made.get(labels.OOM_KILLS, "").isdecimal() else 0
        row["elastic"] = _live(node, container.id)
        return row

    render.print_json(on_node(o, work))


def limits(found: tuple[float, int]) -> list[float | None]:
    """Cores and bytes; None for 0, which is no limit."""
    return [value or None for value in found]


def _live(node: Node, name: str) -> dict[str, Any] | None:
    """The daemon's row of it; None where it is not managed, or nobody serves."""
    from weenv.core.errors import WeenvError
    from weenv.plugin.nri.ask import Asker
    from weenv.plugin.nri.serveconfig import from_tables

    try:
        with Asker(from_tables(node.config.tables).socket) as asker:
            rows = asker.ask("node").get("environments")
    except WeenvError:
        return None
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict) and (row.get("namespace"), row.get("id")) == (node.run.namespace, name):
            return row
    return None
