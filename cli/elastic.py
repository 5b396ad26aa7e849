"""``weenv elastic``: the daemon of live quotas, traces of what it did, replays of what it would do."""

from __future__ import annotations

import click

from weenv.cli.daemons import CONFIG, log_options, start_logging
from weenv.cli.main import LazyGroup

_LAZY = {
    "serve": ("weenv.cli.elastic:serve", "Move the CPU and memory limits of running environments until SIGTERM or SIGINT."),
    "replay": ("weenv.cli.replay:replay", "Run demand through policy and admission, against other ways to set quotas."),
    "trace": ("weenv.cli.trace:trace", "Show, or draw, an environment's quota against its use."),
}


@click.group(cls=LazyGroup, lazy=_LAZY)
def elastic() -> None:
    """Live CPU and memory quotas for running environments (docs/elastic.md)."""


@click.command("serve")
@CONFIG
@click.option("--containerd", "address", metavar="SOCK", help="containerd's socket.  [default: run.address]")
@click.option("--socket", default=None, help="Where commands ask.  [default: /run/weenv/elastic.sock]")
@click.option("--root", default=None, help="Event stream and decision log.  [default: /var/lib/weenv/elastic]")
@click.option("-n", "--namespace", "namespaces", multiple=True, help="Manage every container of it; may be repeated.")
@log_options
@click.pass_context
def serve(
    ctx: click.Context, config_path: str, address: str | None, socket: str | None, root: str | None,
    namespaces: tuple[str, ...], log_level: str, log_format: str,
) -> None:  # fmt: skip
    """Move the CPU and memory limits of running environments until SIGTERM or SIGINT.

    Managed are the environments of weenv run whose plan names resources, containers with a label such as
    weenv.dev/elastic=true or weenv.dev/cpu.start=0.5, pods with such annotations, and all of the namespaces given.
    Stopping leaves limits as they are; the next start goes on from them. One daemon serves one containerd.

    \b
    Examples:
      weenv elastic serve
      weenv elastic serve --namespace moby --log-format json
    """
    import asyncio

    from weenv.core.process import settle
    from weenv.core.settings import read_tables
    from weenv.plugin.nri import config, daemon, nriconfig, serveconfig

    start_logging(ctx, log_level, log_format)
    tables = read_tables(config_path)
    served = serveconfig.from_tables(
        tables, address=address, socket=socket, root=root, namespaces=frozenset(namespaces) or None
    )
    asyncio.run(daemon.serve(config.from_tables(tables), served, nriconfig.from_tables(tables), ready=settle))
