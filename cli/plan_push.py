"""``weenv plan push`` and ``pull``: plans in registries and layouts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from weenv.cli import render

if TYPE_CHECKING:
    from weenv.registry.groupref.resolve import Resolver
    from weenv.registry.manifest import Descriptor

_plain_http = click.option("--plain-http", multiple=True, metavar="HOST", help="Speak HTTP to this registry.")
_json = click.option("--json", "as_json", is_flag=True, help="For machines.")
_config = click.option(
    "--config", "config_path", default="/etc/weenv/config.toml", show_default=True, help="WeEnv's configuration."
)


@click.command("push", short_help="Publish a plan as an OCI artifact.")
@click.argument("path", metavar="PLAN")
@click.argument("reference", metavar="REF")
@_config
@_plain_http
@_json
def push(path: str, reference: str, config_path: str, plain_http: tuple[str, ...], as_json: bool) -> None:
    """Publish a plan as an OCI artifact, with the files that it names written into it.

    REF is HOST/NAME[:TAG] or oci:DIR[:TAG]. A gateway (weenv gateway serve) answers it as an image; sign it like a group.

    \b
    Examples:
      weenv plan push task.yaml registry.example/plans/task-17:1
      weenv plan push task.yaml oci:./plans:task-17
    """
    from weenv.cli.plan import with_resolver
    from weenv.environment.plan import as_text, parse_plan, read_plan
    from weenv.environment.planref import push_plan
    from weenv.registry.reference import parse_location

    location = parse_location(reference)
    data = read_plan(path)
    parse_plan(data, path)
    text = as_text(data, path)

    async def work(resolver: Resolver) -> Descriptor:
        return await push_plan(resolver.client, location, text, path)

    descriptor = with_resolver(config_path, plain_http, work)
    if as_json:
        render.print_json({"reference": reference, "descriptor": descriptor.to_json()})
    else:
        click.echo(f"{reference}@{descriptor.digest}")


@click.command("pull", short_help="Get a plan out of a registry.")
@click.argument("reference", metavar="REF")
@click.option("-o", "--output", default="", help="Write there.  [default: standard output]")
@_config
@_plain_http
def pull(reference: str, output: str, config_path: str, plain_http: tuple[str, ...]) -> None:
    """Get a plan out of a registry or layout, where the node's policy accepts it.

    \b
    Examples:
      weenv plan pull registry.example/plans/task-17:1
      weenv plan pull registry.example/plans/task-17:1 -o task.yaml
    """
    from weenv.cli.plan import with_resolver
    from weenv.core.atomic import write_atomic
    from weenv.environment.planref import pull_plan
    from weenv.registry.reference import parse_location

    location = parse_location(reference)

    async def work(resolver: Resolver) -> bytes:
        return (await pull_plan(resolver.client, location, policy=resolver.policy))[0]

    text = with_resolver(config_path, plain_http, work)
    if output:
        write_atomic(output, text, mode=0o644)
    else:
        sys.stdout.buffer.write(text)
