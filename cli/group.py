"""``weenv group``: layer groups, from a directory to a registry and back."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from weenv.cli import render
from weenv.cli.group_build import build
from weenv.cli.group_keys import keygen, sign, verify
from weenv.cli.reach import Reach, reaching
from weenv.core.errors import BadReference

if TYPE_CHECKING:
    from weenv.registry.client import RegistryClient
    from weenv.registry.groupref.model import LayerRef, ResolvedGroup
    from weenv.registry.groupref.publish import CopyResult

T = TypeVar("T")

_platform = click.option("--platform", default="", help="Of an index, such as linux/arm64.  [default: this machine's]")
_json = click.option("--json", "as_json", is_flag=True, help="For machines.")


@click.group()
def group() -> None:
    """Build, publish, compare and sign layer groups.

    A group is an ordinary OCI image that holds one component of an environment. REF is HOST/NAME[:TAG][@DIGEST] or a
    layout directory, oci:DIR[:TAG].
    """


for _command in (build, keygen, sign, verify):
    group.add_command(_command)


def _run(reach: Reach, use: Callable[[RegistryClient], Awaitable[T]]) -> T:
    """Run ``use`` with a registry client."""

    async def run() -> T:
        from weenv.registry.client import RegistryClient

        async with RegistryClient(reach.registry()) as client:
            return await use(client)

    return asyncio.run(run())


# -- moving -------------------------------------------------------------------------------------------------------------


def _copy(source: str, destination: str, reach: Reach, mount_from: str, as_json: bool) -> None:
    from weenv.registry.groupref.publish import COPIED, EXISTS, MOUNTED, copy
    from weenv.registry.reference import parse_location

    start, end = parse_location(source), parse_location(destination)
    result: CopyResult = _run(reach, lambda client: copy(client, start, end, mount_from=mount_from))
    counts = {how: result.count(how) for how in (COPIED, MOUNTED, EXISTS)}
    if as_json:
        render.print_json(
            {
                "source": source,
                "destination": destination,
                "descriptor": result.descriptor.to_json(),
                "blobs": {how: {"count": count, "bytes": size} for how, (count, size) in counts.items()},
            }
        )
        return
    parts = [f"{count} {how} ({render.size(size)})" for how, (count, size) in counts.items() if count]
    click.echo(f"{destination}@{result.descriptor.digest}: {', '.join(parts) or 'no blobs'}")


@group.command()
@click.argument("source", metavar="oci:DIR[:TAG]")
@click.argument("destination", metavar="REF")
@click.option("--mount-from", default="", metavar="NAME", help="A repository of the same registry that has the blobs.")
@reaching
@_json
def push(source: str, destination: str, mount_from: str, as_json: bool, reach: Reach) -> None:
    """Push a group from a layout directory to a registry. Blobs that are there are not sent again.

    \b
    Example:
      weenv group push oci:./groups:claude registry.example/harness/claude:1.0
    """
    if not source.startswith("oci:") or destination.startswith("oci:"):
        raise BadReference("push goes from a layout to a registry", hint="write: weenv group push oci:DIR:TAG HOST/NAME:TAG")
    _copy(source, destination, reach, mount_from, as_json)


@group.command()
@click.argument("source", metavar="REF")
@click.argument("destination", metavar="oci:DIR[:TAG]")
@reaching
@_json
def pull(source: str, destination: str, as_json: bool, reach: Reach) -> None:
    """Pull a group, whole, into a layout directory.

    \b
    Example:
      weenv group pull registry.example/harness/claude:1.0 oci:./groups:claude
    """
    if source.startswith("oci:") or not destination.startswith("oci:"):
        raise BadReference("pull goes from a registry to a layout", hint="write: weenv group pull HOST/NAME:TAG oci:DIR:TAG")
    _copy(source, destination, reach, "", as_json)


@group.command("copy")
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option("--mount-from", default="", metavar="NAME", help="A repository of DST's registry that has the blobs.")
@reaching
@_json
def copy_command(source: str, destination: str, mount_from: str, as_json: bool, reach: Reach) -> None:
    """Copy a group between registries and layouts; its digest stays. Within a registry, blobs are mounted.

    Signatures are not copied, and would not count: they are for the old name. Sign the copy (weenv group sign).

    \b
    Examples:
      weenv group copy registry.example/dev/tool:1 registry.example/prod/tool:1
      weenv group copy oci:./a:1 oci:./b:1
    """
    _copy(source, destination, reach, mount_from, as_json)


@group.command("tag")
@click.argument("reference", metavar="REF")
@click.argument("new", metavar="TAG")
@reaching
@_json
def tag_command(reference: str, new: str, as_json: bool, reach: Reach) -> None:
    """Give what REF means another tag in the same place.

    \b
    Example:
      weenv group tag registry.example/harness/claude:1.0.3 stable
    """
    from weenv.registry.groupref.publish import tag
    from weenv.registry.reference import parse_location

    location = parse_location(reference)
    descriptor = _run(reach, lambda client: tag(client, location, new))
    if as_json:
        render.print_json({"reference": reference, "tag": new, "descriptor": descriptor.to_json()})
    else:
        click.echo(f"{new} is {descriptor.digest} now")


@group.command("delete")
@click.argument("reference", metavar="REF")
@click.option("--force", is_flag=True, help="Also where other tags mean the same: they go, too.")
@reaching
@_json
def delete_command(reference: str, force: bool, as_json: bool, reach: Reach) -> None:
    """Delete what REF means. A registry frees the space when it collects its garbage; a layout keeps the blobs.

    \b
    Example:
      weenv group delete registry.example/harness/claude:0.9
    """
    from weenv.registry.groupref.publish import delete
    from weenv.registry.reference import parse_location

    location = parse_location(reference)
    gone = _run(reach, lambda client: delete(client, location, force=force))
    if as_json:
        render.print_json({"digest": gone.digest, "tags": list(gone.tags), "manifest": gone.manifest})
        return
    click.echo(f"deleted {'manifest ' + gone.digest if gone.manifest else 'tag'} {', '.join(gone.tags)}".rstrip())


# -- looking ------------------------------------------------------------------------------------------------------------


@group.command("ls")
@click.argument("place", metavar="HOST|oci:DIR")
@reaching
@_json
def ls(place: str, as_json: bool, reach: Reach) -> None:
    """List the repositories of a registry (where it tells), or the groups in a layout directory.

    \b
    Examples:
      weenv group ls registry.example:5000
      weenv group ls oci:./groups
    """
    from weenv.registry.groupref.publish import list_layout, repositories

    if place.startswith("oci:"):
        found = list_layout(place.removeprefix("oci:"))
        if as_json:
            render.print_json([{"tag": item.tag, "descriptor": item.descriptor.to_json()} for item in found])
        else:
            rows = [(render.escape(item.tag or "-"), render.short(item.descriptor.digest)) for item in found]
            render.table(["tag", "digest"], rows)
        return
    names = _run(reach, lambda client: repositories(client, place))
    if as_json:
        render.print_json(names)
    else:
        click.echo("".join(f"{place}/{name}\n" for name in names), nl=False)


@group.command("tags")
@click.argument("repository", metavar="HOST/NAME")
@reaching
@_json
def tags_command(repository: str, as_json: bool, reach: Reach) -> None:
    """List the tags of a repository.

    \b
    Example:
      weenv group tags registry.example/harness/claude
    """
    from weenv.registry.groupref.publish import tags
    from weenv.registry.reference import parse_reference

    reference = parse_reference(repository)
    names = _run(reach, lambda client: tags(client, reference.api_host, reference.repository))
    if as_json:
        render.print_json(names)
    else:
        click.echo("".join(f"{name}\n" for name in names), nl=False)


def layer_row(layer: LayerRef) -> dict[str, Any]:
    """A layer for ``--json``."""
    from weenv.layer.verify import is_annotated

    return {
        "digest": layer.digest,
        "size": layer.size,
        "mediaType": layer.media_type,
        "diffId": layer.diff_id,
        "lazy": is_annotated(layer.annotations),
    }


def _group_json(found: ResolvedGroup, *, config: bool = False) -> dict[str, Any]:
    value: dict[str, Any] = {
        "reference": found.reference,
        "digest": found.digest,
        "kind": found.kind,
        "version": found.version,
        "host": found.host,
        "repository": found.repository,
        "layers": [layer_row(layer) for layer in found.layers],
        "annotations": found.annotations,
    }
    return value | ({"config": found.config} if config else {})


@group.command("show")
@click.argument("reference", metavar="REF")
@_platform
@reaching
@_json
def show(reference: str, platform: str, as_json: bool, reach: Reach) -> None:
    """Show what a group says of itself, and its layers, bottom first.

    \b
    Example:
      weenv group show registry.example/harness/claude:1.0
    """
    from weenv.registry.groupref.resolve import Resolver

    found = _run(reach, lambda client: Resolver(client, platform=platform).resolve(reference))
    if as_json:
        render.print_json(_group_json(found, config=True))
        return
    config = found.config
    lines = {
        "digest": found.digest,
        "kind": found.kind or "plain image",
        "version": found.version,
        "created": str(config.get("created", "")),
        "platform": f"{config.get('os', '')}/{config.get('architecture', '')}",
    }
    for name, value in lines.items():
        if value:
            click.echo(f"{name:9} {render.escape(value)}")
    for name, value in sorted((config.get("config") or {}).items()):
        for line in _plainly(name, value):
            click.echo(f"{name:9} {render.plain(line)}")
    rows = [
        (str(number), render.short(row["digest"]), render.size(row["size"]), "[cyan]lazy[/]" if row["lazy"] else "plain")
        for number, row in enumerate((layer_row(layer) for layer in found.layers), 1)
    ]
    render.table(["layer", "digest", "size", ""], rows, right=[0, 2])


def _plainly(name: str, value: Any) -> list[str]:
    """A setting of an image's config as people read it: texts as they are, Env a line each, the rest as JSON; or nothing."""
    if not value:
        return []
    if isinstance(value, str):
        return [value]
    if name == "Env" and isinstance(value, list):
        return [str(variable) for variable in value]
    return [json.dumps(value, ensure_ascii=False)]


@group.command("diff")
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
@click.option("--files", is_flag=True, help="Compare files, too, by the layers' tables of contents.")
@_platform
@reaching
@_json
def diff(old: str, new: str, files: bool, platform: str, as_json: bool, reach: Reach) -> None:
    """Show which layers, and with --files which files, two groups do not share.

    \b
    Example:
      weenv group diff --files registry.example/harness/claude:1.0 registry.example/harness/claude:1.1
    """
    from weenv.registry.groupref.diff import FileDiff, LayerDiff, diff_files, diff_layers
    from weenv.registry.groupref.resolve import Resolver

    async def work(client: RegistryClient) -> tuple[LayerDiff, FileDiff | None]:
        before, after = await Resolver(client, platform=platform).resolve_all([old, new])
        return diff_layers(before, after), await diff_files(client, before, after) if files else None

    layers, changed = _run(reach, work)
    names = {"removed": "-", "added": "+", "shared": "="}
    if as_json:
        value: dict[str, Any] = {name: [layer_row(layer) for layer in getattr(layers, name)] for name in names}
        if changed is not None:
            value["files"] = {
                name: [os.fsdecode(path) for path in getattr(changed, name)] for name in ("added", "removed", "changed")
            }
        render.print_json(value)
        return
    for name, mark in names.items():
        for layer in getattr(layers, name):
            click.echo(f"{mark} layer {render.short(layer.digest)} {render.size(layer.size)}")
    if changed is not None:
        for mark, paths in (("-", changed.removed), ("+", changed.added), ("~", changed.changed)):
            for path in paths:
                click.echo(f"{mark} {_text(path)}")


def _text(path: bytes) -> str:
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in path.decode("utf-8", "backslashreplace"))


@group.command("resolve")
@click.argument("references", metavar="REF...", nargs=-1, required=True)
@click.option("--cache", "cache_path", default="", metavar="FILE", help="The mapping cache.  [default: in $XDG_CACHE_HOME]")
@click.option("--max-age", default=60.0, show_default=True, metavar="SECONDS", help="Ask again about tags older than that.")
@_platform
@reaching
@_json
def resolve(
    references: tuple[str, ...],
    cache_path: str,
    max_age: float,
    platform: str,
    as_json: bool,
    reach: Reach,
) -> None:
    """Say which manifest and layers references mean, as this node would use them: cached, and by its policy.

    \b
    Examples:
      weenv group resolve registry.example/repo/flask:abc123
      weenv group resolve --json --max-age 0 registry.example/harness/claude:stable
    """
    from weenv.registry.groupref.cache import MappingCache
    from weenv.registry.groupref.resolve import Resolver, node_policy

    policy = node_policy(reach.tables())
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    cache = MappingCache(cache_path or os.path.join(base, "weenv", "mapping.db"))
    try:
        found = _run(
            reach,
            lambda client: Resolver(client, cache, platform=platform, max_age=max_age, policy=policy).resolve_all(references),
        )
    finally:
        cache.close()
    if as_json:
        render.print_json([_group_json(item) for item in found])
        return
    for item in found:
        click.echo(f"{item.reference} {item.digest}")
        for layer in item.layers:
            click.echo(f"  {layer.digest} {render.size(layer.size)}")
