"""``weenv gateway``: the composing registry of a node."""

from __future__ import annotations

import asyncio
import logging
import os

import click

from weenv.cli import render
from weenv.cli.daemons import CONFIG, log_options, start_logging
from weenv.core.errors import ConfigError
from weenv.core.settings import read_tables


@click.group()
def gateway() -> None:
    """A registry on the node whose images are plans and stacks of groups (docs/gateway.md).

    Any client that can only name an image gets composition by its name: docker, podman, skopeo, Kubernetes.
    """


@gateway.command("serve", short_help="Answer image pulls with composed images until SIGTERM or SIGINT.")
@CONFIG
@click.option("--address", default=None, help="HOST:PORT or unix:/PATH.  [default: 127.0.0.1:5050]")
@click.option("--plans", multiple=True, metavar="SOURCE", help="A directory or registry with plans; may be repeated.")
@click.option("--allow", multiple=True, metavar="PATTERN", help="Repositories that names may stack; may be repeated.")
@click.option("--blobs", type=click.Choice(["auto", "redirect", "proxy"]), default=None, help="How layers are answered.")
@log_options
@click.pass_context
def serve(
    ctx: click.Context, config_path: str, address: str | None, plans: tuple[str, ...], allow: tuple[str, ...],
    blobs: str | None, log_level: str, log_format: str,
) -> None:  # fmt: skip
    """Answer image pulls with composed images until SIGTERM or SIGINT. Read-only; nothing is pushed to it.

    \b
    Examples:
      weenv gateway serve --plans /etc/weenv/plans --allow 'registry.example/team/**'
      docker run --rm 127.0.0.1:5050/plan/task-17
      ctr images pull --plain-http --snapshotter weenv 127.0.0.1:5050/plan/task-17:latest
    """
    from weenv.environment.gateway import daemon
    from weenv.environment.gateway.config import from_tables

    start_logging(ctx, log_level, log_format)
    # At debug level it tells each client that tries TLS first with a traceback.
    logging.getLogger("aiohttp.server").setLevel(logging.WARNING)
    tables = read_tables(config_path)
    sources = tuple(os.path.abspath(source) if source.startswith((".", "/")) else source for source in plans)
    for source in sources:
        if source.startswith("/") and not os.path.isdir(source):
            raise ConfigError(f"--plans: there is no directory {source}", hint="make it, or name a registry: HOST[/PREFIX]")
    config = from_tables(tables, address=address, plans=sources or None, groups=allow or None, blobs=blobs)
    asyncio.run(daemon.serve(config, tables))


@gateway.command("name", short_help="Spell a stack of groups as an image name.")
@click.argument("references", metavar="REF...", nargs=-1, required=True)
@CONFIG
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def name(references: tuple[str, ...], config_path: str, as_json: bool) -> None:
    """Spell a stack of groups, bottom first, as an image name that the gateway answers.

    \b
    Example:
      weenv gateway name registry.example/base/debian:12 registry.example/harness/agent:2
    """
    from weenv.environment.gateway.config import from_tables
    from weenv.environment.gateway.names import spell

    config = from_tables(read_tables(config_path))
    spelt = spell(references)
    host = "" if config.address.startswith("unix:") else f"{config.address}/"
    if as_json:
        render.print_json({"image": f"{host}{spelt}", "name": spelt, "groups": list(references)})
    else:
        click.echo(f"{host}{spelt}")
