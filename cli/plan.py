"""``weenv plan``: check, pin, draw and compose environment plans."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import click

from weenv.cli import render
from weenv.cli.plan_push import pull, push
from weenv.core.errors import UnavailableError, WeenvError
from weenv.core.settings import DEFAULT_CONFIG, read_tables
from weenv.environment.model import Plan

if TYPE_CHECKING:
    from weenv.environment.compose import Composed, Registered, StackedLayer
    from weenv.registry.groupref.model import ResolvedGroup
    from weenv.registry.groupref.resolve import Resolver

T = TypeVar("T")
Found = tuple[bytes, list[int], str]
"""A conflict: path, numbers of the layers that have it, what happened."""

_config = click.option("--config", "config_path", default=DEFAULT_CONFIG, show_default=True, help="WeEnv's configuration.")
_plain_http = click.option("--plain-http", multiple=True, metavar="HOST", help="Speak HTTP to this registry.")
_json = click.option("--json", "as_json", is_flag=True, help="For machines.")
_file = click.argument("path", metavar="PLAN")


@click.group()
def plan() -> None:
    """Check, pin, draw, publish and compose environment plans (docs/plans.md)."""


plan.add_command(push)
plan.add_command(pull)


def with_resolver(
    config_path: str, plain_http: tuple[str, ...], use: Callable[[Resolver], Awaitable[T]], max_age: float = 60.0
) -> T:
    """Run ``use(resolver)`` with the node's registry settings and, where it may be written, the node's mapping cache."""

    from weenv.cli.run import say

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
                resolver = Resolver(client, cache, max_age=max_age, policy=policy, silent=True)
                made = await use(resolver)
                for away in resolver.away.values():
                    say(away.line())
                return made
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
    """Say whether a plan is well formed; every fault with its line and column (the first 50). Asks no registry.

    \b
    Examples:
      weenv plan check task.yaml
      weenv plan check --json task.yaml | jq '.faults[]'
    """
    from weenv.environment.yamlnodes import PlanError

    try:
        loaded = _load(path)
    except PlanError as error:
        if as_json:
            render.print_json({"faults": [_fault(item) for item in (error, *error.also)]})
        raise
    if as_json:
        render.print_json(
            {
                "name": loaded.name,
                "groups": [use.ref for use in loaded.groups],
                "mutations": len(loaded.mutations),
                "faults": [],
            }
        )
    else:
        counts = render.counted(len(loaded.groups), "group"), render.counted(len(loaded.mutations), "mutation")
        click.echo(f"{path}: {', '.join(counts)}")


def _fault(error: WeenvError) -> dict[str, object]:
    place = {"line": getattr(error, "line", 0), "column": getattr(error, "column", 0)}
    return {**place, "message": error.message, "hint": error.hint}


def _not_run(loaded: Plan) -> list[dict[str, object]]:
    """The plan's ``run`` mutations, which no image has."""
    return [
        {"line": mutation.line, "command": list(mutation.run), "directory": mutation.directory}
        for mutation in loaded.mutations
        if mutation.run
    ]


@plan.command("lock", short_help="Pin every group of a plan by digest.")
@_file
@click.option("-o", "--output", default="", help="Write there.  [default: standard output]")
@click.option("-i", "--in-place", is_flag=True, help="Write the plan itself.")
@click.option("--check", "only_check", is_flag=True, help="Write nothing; exit 1 where a tag has moved since.")
@click.option("--stale-ok", is_flag=True, help="Where a registry is away, take what its tags meant when it was seen last.")
@click.option("--json", "as_json", is_flag=True, help="With --check, for machines.")
@_config
@_plain_http
def lock(
    path: str, output: str, in_place: bool, only_check: bool, stale_ok: bool, as_json: bool, config_path: str,
    plain_http: tuple[str, ...],
) -> None:  # fmt: skip
    """Pin every group of a plan by digest; comments and layout of the file stay.

    Groups that are not in the lazy format are named on standard error. What a tag means is asked of its registry: one that
    gives no answer is an error, unless --stale-ok.

    \b
    Examples:
      weenv plan lock task.yaml -o task.locked.yaml
      weenv plan lock task.yaml --in-place
      weenv plan lock task.locked.yaml --check
    """
    from weenv.core.atomic import write_atomic
    from weenv.environment.lock import lock_text, pin, tag_of
    from weenv.environment.plan import as_text, parse_plan, read_plan

    if in_place + bool(output) + only_check > 1:
        raise click.UsageError("one of --output, --in-place and --check")
    if as_json and not only_check:
        raise click.UsageError("--json goes with --check")
    data = read_plan(path)
    loaded = parse_plan(data, path)

    async def ask(resolver: Resolver, references: list[str]) -> list[ResolvedGroup]:
        found = await resolver.resolve_all(references)
        for away in resolver.away.values():
            if not stale_ok:
                raise UnavailableError(away.reason, hint="--stale-ok takes what its tags meant when it was seen last")
        return found

    if only_check:
        asked = [(use.ref, tag_of(use.ref)) for use in loaded.groups]
        tags = [tag for _, tag in asked if tag]
        groups = with_resolver(config_path, plain_http, lambda resolver: ask(resolver, tags), max_age=0.0)
        now = dict(zip(tags, groups, strict=True))
        moved = [pin(ref, now[tag].digest) for ref, tag in asked if tag and pin(ref, now[tag].digest).moved]
        loose = [ref for ref, tag in asked if tag == ref]
        if as_json:
            rows = [{"reference": item.reference, "digest": item.digest} for item in moved]
            render.print_json({"moved": rows, "not_pinned": loose})
        else:
            for item in moved:
                click.echo(f"moved: {item.reference} is {item.digest} now")
            for ref in loose:
                click.echo(f"not pinned: {ref}")
        if moved or loose:
            raise click.exceptions.Exit(1)
        if not as_json:
            click.echo(f"{path}: every group is pinned and no tag has moved")
        return
    refs = [use.ref for use in loaded.groups]
    groups = with_resolver(config_path, plain_http, lambda resolver: ask(resolver, refs), max_age=0.0)
    for text in _not_lazy_groups(groups):
        click.echo(f"weenv: note: {render.plain(text)}", err=True)
    text = lock_text(as_text(data, path), path, groups)
    target = path if in_place else output
    if target:
        write_atomic(target, text.encode(), mode=0o644)
    else:
        sys.stdout.write(text)


def _not_lazy_groups(groups: list[ResolvedGroup]) -> list[str]:
    """A line for each group that has layers which are not lazy."""
    from weenv.environment.compose import stack

    lines = []
    for group in groups:
        ordinary = [layer.ref.size for layer in stack([group]) if not layer.lazy] if group.layers else []
        if ordinary:
            lines.append(
                f"{group.reference} is not in the lazy format: {len(ordinary)} of {len(group.layers)} layers, "
                f"{render.size(sum(ordinary))}. Publish it lazily: weenv convert"
            )
    return lines


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
    from weenv.environment import foretell
    from weenv.environment.compose import compose_image
    from weenv.environment.composeconfig import compose_config
    from weenv.environment.conflicts import find_conflicts
    from weenv.environment.nodelayers import NodeLayers
    from weenv.environment.runconfig import load
    from weenv.environment.tocs import TocReader
    from weenv.plugin.snapshotter.config import from_tables

    loaded = _load(path)
    tables = read_tables(config_path)
    root, settings = from_tables(tables).root, compose_config(tables)

    async def work(resolver: Resolver) -> Drawn:
        groups = await resolver.resolve_all(use.ref for use in loaded.groups)
        platform = loaded.platform or resolver.platform
        image = compose_image(loaded, groups, platform=platform)
        local = NodeLayers(resolver.client, root, settings)
        chains = image.chains
        wanting = [chain for chain, layer in zip(chains, image.layers, strict=True) if not layer.lazy]
        there = await foretell.snapshots(wanting, load(config_path).run) if wanting else {}
        layers = tuple(local.known(layer) for layer in image.layers)
        fates = [_fate(layer, settings.not_lazy, there.get(chain)) for chain, layer in zip(chains, layers, strict=True)]
        found: list[Found] = []
        if conflicts:
            readable = enumerate(layers)
            lazy = [(number, layer) for number, layer in readable if layer.lazy or layer.served is not None]
            tocs = await TocReader(resolver.client, root).read_all([layer for _, layer in lazy])
            numbers = [number for number, _ in lazy]
            found = [(c.path, [numbers[n] for n in c.layers], c.what) for c in await asyncio.to_thread(find_conflicts, tocs)]
        top = await asyncio.to_thread(foretell.mutation_layers, root, loaded.mutations, layers)
        made = None if top is None else compose_image(loaded, groups, top, platform=platform)
        return Drawn(groups, layers, fates, made, found)

    _draw(loaded, with_resolver(config_path, plain_http, work), conflicts, as_json)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A plan's groups and their layers, bottom first, with what becomes of each (:func:`_fate`).

    ``image``: what composing makes; None where the mutations' layer, and so its name, is not made yet.
    """

    groups: list[ResolvedGroup]
    layers: tuple[StackedLayer, ...]
    fates: list[str]
    image: Composed | None
    found: list[Found]


def _fate(layer: StackedLayer, setting: str, there: bool | None) -> str:
    """What this node makes of a layer: ``lazy``, ``converted``, or what it will do: ``convert``, ``unpack``, ``refuse``.

    ``there``: whether it serves the same content lazily already, from an image that was published so (``present``), or has
    it unpacked (``unpacked``); None: neither.
    """
    if layer.lazy:
        return "lazy"
    if setting == "refuse":
        return setting
    if layer.served is not None:
        return "converted"
    if there is not None:
        return "present" if there else "unpacked"
    return "unpack" if layer.reason and setting == "convert" else setting


_FATES = {
    "converted": "converted on this node already",
    "present": "on this node lazily already, from another image",
    "unpacked": "unpacked on this node already",
    "convert": "will be converted on this node",
    "unpack": "will be fetched and unpacked",
    "refuse": "is refused here: weenv convert it",
}


def _draw(loaded: Plan, drawn: Drawn, conflicts: bool, as_json: bool) -> None:
    groups, layers, fates, image, found = drawn.groups, drawn.layers, drawn.fates, drawn.image, drawn.found
    if as_json:
        render.print_json(
            {
                "name": None if image is None else image.name,
                "digest": None if image is None else image.digest,
                "lazy": all(layer.lazy for layer in layers),
                "layers": [
                    {
                        "group": layer.group,
                        "digest": layer.ref.digest,
                        "size": layer.ref.size,
                        "lazy": layer.lazy,
                        "served": fate,
                        **({"local_size": layer.served.ref.size} if layer.served is not None else {}),
                        **({"reason": layer.reason} if layer.reason else {}),
                    }
                    for layer, fate in zip(layers, fates, strict=True)
                ],
                "not_run": _not_run(loaded),
                "conflicts": [
                    {"path": "/" + where.decode("utf-8", "backslashreplace"), "layers": which, "what": what}
                    for where, which, what in found
                ],
            }
        )
        return
    rows, told = [], list[str]()
    if loaded.mutations:
        rows.append(("mutation", f"{len(loaded.mutations)} of this plan", "", "", "", "[green]lazy[/]"))
    for group in reversed(groups):
        own = [(layer, fate) for layer, fate in zip(layers, fates, strict=True) if layer.group == group.reference]
        ordinary = [layer for layer, _ in own if not layer.lazy]
        if ordinary:
            becomes = sorted({_FATES[fate] for layer, fate in own if not layer.lazy})
            reasons = "".join(sorted({f" ({layer.reason})" for layer in ordinary if layer.reason}))
            total = render.size(sum(layer.ref.size for layer in ordinary))
            told.append(
                f"not lazy: {group.reference}: {len(ordinary)} of {len(own)} layers, {total}: {', '.join(becomes)}{reasons}"
            )
        rows.append(
            (
                group.kind or "image",
                render.escape(group.reference),
                group.version,
                str(len(group.layers)),
                render.size(sum(layer.size for layer in group.layers)),
                "[yellow]not lazy[/]" if ordinary else "[green]lazy[/]",
            )
        )
    render.table(["kind", "group (top first)", "version", "layers", "size", ""], rows, right=[3, 4])
    for text in told:
        click.echo(render.plain(text))
    stacked = layers if image is None else image.layers
    total = f"{render.counted(len(stacked), 'layer')}, {render.size(sum(layer.ref.size for layer in stacked))}"
    if image is None:
        click.echo(f"{total}, and that of the mutations, which weenv plan compose or run makes: only then it has its name")
    else:
        click.echo(f"{image.name}: {total}")
    if conflicts:
        if not found:
            click.echo("No file is in more than one group.")
        for where, which, what in found:
            shown = render.plain("/" + where.decode("utf-8", "backslashreplace"))
            click.echo(f"{what:8} {shown}  by {layers[which[-1]].group}  (of {', '.join(layers[n].group for n in which[:-1])})")


@plan.command("compose", short_help="Register a plan's image with containerd.")
@_file
@click.option("-n", "--namespace", help="containerd's namespace.  [default: run.namespace]")
@click.option("--containerd", "socket", metavar="SOCK", help="containerd's socket.  [default: run.address]")
@click.option("--snapshotter", help="Our name among its proxy plugins.  [default: run.snapshotter]")
@_config
@_plain_http
@_json
def compose_plan(
    path: str, namespace: str | None, socket: str | None, snapshotter: str | None, config_path: str,
    plain_http: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Make a plan's mutation layer and register its image with containerd; prints the name that can be run.

    No layer is downloaded, but those of groups that are not in the lazy format: they are converted on the node, once,
    or unpacked (compose.not_lazy), and named on standard error, as are the plan's run mutations: no image has those, weenv
    run does them when the environment has started. Composing the same plan again changes nothing.

    \b
    Examples:
      weenv plan compose task.yaml
      ctr run --rm --snapshotter weenv $(weenv plan compose task.yaml) t1 sh
      weenv plan compose task.yaml --namespace moby
    """
    from weenv.cli.progress import bar
    from weenv.cli.run import say
    from weenv.environment import used
    from weenv.environment.build import compose
    from weenv.environment.compose import register
    from weenv.environment.composeconfig import compose_config
    from weenv.environment.imagebound import bound
    from weenv.environment.nodelayers import NodeLayers
    from weenv.environment.notlazy import line
    from weenv.environment.runconfig import load
    from weenv.plugin.containerd.client import Client

    loaded = _load(path)
    node = load(config_path, address=socket, namespace=namespace, snapshotter=snapshotter)
    settings = compose_config(node.tables)

    async def work(resolver: Resolver) -> tuple[Composed, Registered]:
        local = NodeLayers(resolver.client, node.root, settings, show=bar)
        image = await compose(loaded, resolver=resolver, root=node.root, local=local, own=True)
        async with Client(node.run.address) as client:
            where = client.namespace(node.run.namespace)
            made = await register(image, where, snapshotter=node.run.snapshotter, local=local)
            used.touch(node.directory, where.name, image.name)
            if made.new:
                await bound(where, node.run.snapshotter, node.directory, settings.keep_images)
            return image, made

    image, made = with_resolver(config_path, plain_http, work)
    if made.not_lazy:
        say(line(made.not_lazy))
    not_run = _not_run(loaded)
    if not_run:
        commands = "; ".join(f"line {item.line}: {' '.join(item.run)[:100]}" for item in loaded.mutations if item.run)
        say(f"not in the image: {render.counted(len(not_run), 'run mutation')}, which weenv run does at start ({commands})")
    if as_json:
        render.print_json(
            {
                "name": image.name,
                "digest": image.digest,
                "layers": len(image.layers),
                "new": made.new,
                "lazy": image.lazy,
                "not_lazy": [group.to_json() for group in made.not_lazy],
                "not_run": not_run,
            }
        )
    else:
        click.echo(image.name)
