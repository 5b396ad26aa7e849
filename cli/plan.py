"""``weenv plan``: check, pin, draw and compose environment plans."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click

from weenv.cli import render
from weenv.cli.plan_push import pull, push
from weenv.core.settings import DEFAULT_CONFIG, read_tables
from weenv.environment.model import Plan

if TYPE_CHECKING:
    from weenv.environment.compose import Composed
    from weenv.registry.groupref.model import ResolvedGroup
    from weenv.registry.groupref.resolve import Resolver

T = TypeVar("T")
Found = tuple[bytes, list[int], str]
"""A conflict: path, numbers of the layers that have it, what happened."""

_config = click.option("--config", "config_path", default=DEFAULT_CONFIG, show_default=True, help="WeEnv's configuration.")
_plain_http = click.option("--plain-http", multiple=True, metavar="HOST", help="Speak HTTP to this registry.")
_json = click.option("--json", "as_json", is_flag=True, help="For machines.")
_file = click.argument("path", metavar="PLAN", type=click.Path(exists=True, dir_okay=False))


@click.group()
def plan() -> None:
    """Check, pin, draw, publish and compose environment plans (docs/plans.md)."""


plan.add_command(push)
plan.add_command(pull)


def with_resolver(
    config_path: str, plain_http: tuple[str, ...], use: Callable[[Resolver], Awaitable[T]], max_age: float = 60.0
) -> T:
    """Run ``use(resolver)`` with the node's registry settings and, where it may be written, the node's mapping cache."""

    async def run() -> T:
        import dataclasses

        from weenv.core.errors import StorageError
        from weenv.plugin.snapshotter.config import from_tables
        from weenv.registry.client import RegistryClient
        from weenv.registry.groupref.cache import MappingCache
        from weenv.registry.groupref.resolve import Resolver, node_policy

        tables = read_tables(config_path)
        config, policy = from_tables(tables), node_policy(tables)
        registry = dataclasses.replace(config.registry, plain_http=config.registry.plain_http | frozenset(plain_http))
        try:
            cache = MappingCache(os.path.join(config.root, "mapping.db")) if os.path.isdir(config.root) else MappingCache()
        except StorageError:
            cache = MappingCache()
        try:
            async with RegistryClient(registry) as client:
                return await use(Resolver(client, cache, max_age=max_age, policy=policy))
        finally:
            cache.close()

    return asyncio.run(run())


def _load(path: str) -> Plan:
    from weenv.environment.plan import load_plan

    return load_plan(path)


@plan.command("check", short_help="Say whether a plan is well formed.")
@_file
@_json
def check(path: str, as_json: bool) -> None:
    """Say whether a plan is well formed; every fault with its line and column. Asks no registry.

    \b
    Example:
      weenv plan check task.yaml
    """
    loaded = _load(path)
    if as_json:
        render.print_json(
            {"name": loaded.name, "groups": [use.ref for use in loaded.groups], "mutations": len(loaded.mutations)}
        )
    else:
        click.echo(f"{path}: {len(loaded.groups)} groups, {len(loaded.mutations)} mutations")


@plan.command("lock", short_help="Pin every group of a plan by digest.")
@_file
@click.option("-o", "--output", default="", help="Write there.  [default: standard output]")
@click.option("-i", "--in-place", is_flag=True, help="Write the plan itself.")
@click.option("--check", "only_check", is_flag=True, help="Write nothing; exit 1 where a tag has moved since.")
@_config
@_plain_http
def lock(path: str, output: str, in_place: bool, only_check: bool, config_path: str, plain_http: tuple[str, ...]) -> None:
    """Pin every group of a plan by digest; comments and layout of the file stay.

    \b
    Examples:
      weenv plan lock task.yaml -o task.locked.yaml
      weenv plan lock task.yaml --in-place
      weenv plan lock task.locked.yaml --check
    """
    from weenv.core.atomic import write_atomic
    from weenv.environment.lock import lock_text, pin, tag_of

    loaded = _load(path)
    if only_check:
        asked = [(use.ref, tag_of(use.ref)) for use in loaded.groups]
        tags = [tag for _, tag in asked if tag]
        groups = with_resolver(config_path, plain_http, lambda r: r.resolve_all(tags), max_age=0.0)
        now = dict(zip(tags, groups, strict=True))
        moved = [pin(ref, now[tag].digest) for ref, tag in asked if tag and pin(ref, now[tag].digest).moved]
        for item in moved:
            click.echo(f"moved: {item.reference} is {item.digest} now")
        loose = [ref for ref, tag in asked if tag == ref]
        for ref in loose:
            click.echo(f"not pinned: {ref}")
        if moved or loose:
            raise click.exceptions.Exit(1)
        click.echo(f"{path}: every group is pinned and no tag has moved")
        return
    refs = [use.ref for use in loaded.groups]
    groups = with_resolver(config_path, plain_http, lambda r: r.resolve_all(refs), max_age=0.0)
    with open(path, encoding="utf-8") as file:
        text = lock_text(file.read(), path, groups)
    target = path if in_place else output
    if target:
        write_atomic(target, text.encode(), mode=0o644)
    else:
        sys.stdout.write(text)


@plan.command("show", short_help="Draw a plan's stack, top first, with sizes.")
@_file
@click.option("--conflicts", is_flag=True, help="List the files that several groups have, and where each is won.")
@_config
@_plain_http
@_json
def show(path: str, conflicts: bool, config_path: str, plain_http: tuple[str, ...], as_json: bool) -> None:
    """Draw a plan's stack, top first, with sizes; with --conflicts also where each file conflict is won.

    \b
    Examples:
      weenv plan show task.yaml
      weenv plan show task.yaml --conflicts --json
    """
    from weenv.environment.compose import compose_image
    from weenv.environment.conflicts import find_conflicts
    from weenv.environment.tocs import TocReader
    from weenv.plugin.snapshotter.config import from_tables

    loaded = _load(path)
    root = from_tables(read_tables(config_path)).root

    async def work(resolver: Resolver) -> tuple[list[ResolvedGroup], Composed, list[Found]]:
        groups = await resolver.resolve_all(use.ref for use in loaded.groups)
        image = compose_image(loaded, groups)
        found: list[Found] = []
        if conflicts:
            lazy = [(number, layer) for number, layer in enumerate(image.layers) if layer.lazy]
            tocs = await TocReader(resolver.client, root).read_all([layer for _, layer in lazy])
            numbers = [number for number, _ in lazy]
            found = [(c.path, [numbers[n] for n in c.layers], c.what) for c in await asyncio.to_thread(find_conflicts, tocs)]
        return groups, image, found

    groups, image, found = with_resolver(config_path, plain_http, work)
    _draw(loaded, groups, image, found, conflicts, as_json)


def _draw(
    loaded: Plan, groups: list[ResolvedGroup], image: Composed, found: list[Found], conflicts: bool, as_json: bool
) -> None:
    layers = image.layers
    if as_json:
        render.print_json(
            {
                "name": image.name,
                "digest": image.digest,
                "lazy": image.lazy,
                "layers": [
                    {"group": layer.group, "digest": layer.ref.digest, "size": layer.ref.size, "lazy": layer.lazy}
                    for layer in layers
                ],
                "conflicts": [
                    {"path": "/" + where.decode("utf-8", "backslashreplace"), "layers": which, "what": what}
                    for where, which, what in found
                ],
            }
        )
        return
    rows = []
    if loaded.mutations:
        rows.append(("mutation", f"{len(loaded.mutations)} of this plan", "", "", "", "[green]lazy[/]"))
    for group in reversed(groups):
        own = [layer for layer in layers if layer.group == group.reference]
        lazy = all(layer.lazy for layer in own)
        rows.append(
            (
                group.kind or "image",
                render.escape(group.reference),
                group.version,
                str(len(group.layers)),
                render.size(sum(layer.size for layer in group.layers)),
                "[green]lazy[/]" if lazy else "[yellow]not lazy: weenv convert it[/]",
            )
        )
    render.table(["kind", "group (top first)", "version", "layers", "size", ""], rows, right=[3, 4])
    click.echo(f"{image.name}: {len(layers)} layers, {render.size(sum(layer.ref.size for layer in layers))}")
    if conflicts:
        if not found:
            click.echo("No file is in more than one layer.")
        for where, which, what in found:
            shown = render.plain("/" + where.decode("utf-8", "backslashreplace"))
            click.echo(f"{what:8} {shown}  by {layers[which[-1]].group}  (of {', '.join(layers[n].group for n in which[:-1])})")


@plan.command("compose", short_help="Register a plan's image with containerd.")
@_file
@click.option("--namespace", default="default", show_default=True, help="containerd's namespace.")
@click.option("--containerd", "socket", default="/run/containerd/containerd.sock", show_default=True, help="Its socket.")
@click.option("--snapshotter", default="weenv", show_default=True, help="Our name among its proxy plugins.")
@_config
@_plain_http
@_json
def compose_plan(
    path: str, namespace: str, socket: str, snapshotter: str, config_path: str, plain_http: tuple[str, ...], as_json: bool
) -> None:
    """Make a plan's mutation layer and register its image with containerd; prints the name that can be run.

    No layer is downloaded. Composing the same plan again changes nothing.

    \b
    Examples:
      weenv plan compose task.yaml
      ctr run --rm --snapshotter weenv $(weenv plan compose task.yaml) t1 sh
      weenv plan compose task.yaml --namespace moby
    """
    from weenv.environment.build import compose
    from weenv.environment.compose import register
    from weenv.plugin.containerd.client import Client
    from weenv.plugin.snapshotter.config import from_tables

    loaded = _load(path)
    root = from_tables(read_tables(config_path)).root

    async def work(resolver: Resolver) -> tuple[Composed, bool]:
        image = await compose(loaded, resolver=resolver, root=root)
        async with Client(socket) as client:
            return image, await register(image, client.namespace(namespace), snapshotter=snapshotter)

    image, fresh = with_resolver(config_path, plain_http, work)
    if as_json:
        render.print_json({"name": image.name, "digest": image.digest, "layers": len(image.layers), "new": fresh})
    else:
        click.echo(image.name)
