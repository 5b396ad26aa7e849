"""``weenv group build``: a directory, a tar or part of an image as a layer group."""

from __future__ import annotations

import asyncio
import os
import re
from typing import TYPE_CHECKING, Any

import click

from weenv.cli import render
from weenv.cli.amounts import frames
from weenv.cli.reach import Reach, reaching
from weenv.core.errors import ConfigError

if TYPE_CHECKING:
    from weenv.converter.group import BuiltGroup

_OWNER = re.compile(r"([0-9]{1,10}):([0-9]{1,10})\Z", re.ASCII)
_MAX_ID = (1 << 32) - 2


def _owner(text: str) -> tuple[int | None, int | None]:
    if not text:
        return None, None
    match = _OWNER.match(text)
    if match is None or max(int(match[1]), int(match[2])) > _MAX_ID:
        raise ConfigError(f"not an owner: {text[:40]!r}", hint="write numbers, UID:GID")
    return int(match[1]), int(match[2])


def _epoch(text: str) -> int | None:
    """Seconds since 1970, from the option or SOURCE_DATE_EPOCH (reproducible-builds.org's specification of it)."""
    where = "--mtime" if text else "SOURCE_DATE_EPOCH"
    text = text or os.environ.get("SOURCE_DATE_EPOCH", "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise ConfigError(f"{where} must be whole seconds since 1970, not {text[:40]!r}")
    return int(text)


def _pairs(values: tuple[str, ...], what: str) -> dict[str, str]:
    pairs = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals or not name:
            raise ConfigError(f"not a {what}: {value[:100]!r}", hint="write NAME=VALUE")
        pairs[name] = rest
    return pairs


@click.command()
@click.argument("reference", metavar="REF")
@click.option("--from", "sources", multiple=True, metavar="DIR|TAR|-", help="A directory or tar (.gz, .zst); repeat to stack.")
@click.option("--from-image", "image", default="", metavar="IMG", help="Cut it out of an image instead.")
@click.option("--layers", default="", metavar="A..B", help="Which of the image's layers, counted from 1.  [default: all]")
@click.option("--prefix", default="", metavar="DIR", help="Where in the environment the content goes.")
@click.option("--owner", default="", metavar="UID:GID", help="Owner of everything, by number.")
@click.option("--mtime", default="", metavar="SECONDS", help="Times after that become it.  [default: $SOURCE_DATE_EPOCH]")
@click.option("--split", multiple=True, metavar="DIR", help="A layer of its own for DIR; DIR/* for each directory in it.")
@click.option("--squash", is_flag=True, help="Make one layer of all.")
@click.option("--kind", default="", metavar="KIND", help="base, repository, harness, evaluator, tools or mutation.")
@click.option("--version", default="", help="The component's version.")
@click.option("--platform", default="", help="[default: this machine's]")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="Environment variable.")
@click.option("--workdir", default="", metavar="DIR", help="Working directory.")
@click.option("--user", default="", help="User, or UID:GID.")
@click.option("--entrypoint", multiple=True, metavar="WORD", help="Entrypoint; repeat for each word.")
@click.option("--cmd", multiple=True, metavar="WORD", help="Command; repeat for each word.")
@click.option("--label", multiple=True, metavar="NAME=VALUE", help="Label of the config.")
@click.option("--annotation", multiple=True, metavar="NAME=VALUE", help="Annotation of the manifest.")
@click.option("--no-config", is_flag=True, help="With --from-image: leave the image's settings behind.")
@frames
@click.option("--scratch", default="", metavar="DIR", help="For temporary files.  [default: beside a layout, or /var/tmp]")
@reaching
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def build(
    reference: str,
    sources: tuple[str, ...],
    image: str,
    layers: str,
    prefix: str,
    owner: str,
    mtime: str,
    split: tuple[str, ...],
    squash: bool,
    kind: str,
    version: str,
    platform: str,
    env: tuple[str, ...],
    workdir: str,
    user: str,
    entrypoint: tuple[str, ...],
    cmd: tuple[str, ...],
    label: tuple[str, ...],
    annotation: tuple[str, ...],
    no_config: bool,
    target: int,
    level: int,
    scratch: str,
    as_json: bool,
    reach: Reach,
) -> None:
    """Build the group REF: in a registry (HOST/NAME:TAG) or a layout (oci:DIR:TAG), lazily loadable.

    The same input gives the same digest: names are sorted, owners are numbers, and times are the input's own; set
    SOURCE_DATE_EPOCH where the input is made anew each time.

    \b
    Examples:
      weenv group build oci:./groups:claude --from ./claude --prefix /opt/claude --owner 0:0 --kind harness
      weenv group build registry.example/repo/flask:2.0 --from-image registry.example/env:1 --layers 3.. --kind repository
      weenv group build oci:./g:py --from site.tar.gz --split usr/lib --split 'opt/*'
    """
    from weenv.converter.group import TreeOptions, build_group, group_from_image
    from weenv.converter.options import ConvertOptions
    from weenv.converter.tree import Override
    from weenv.registry.groupref.build import GroupSpec
    from weenv.registry.groupref.resolve import this_platform

    if bool(sources) == bool(image):
        raise click.UsageError("say what it is made of: --from DIR|TAR, or --from-image IMG")
    if sources and (layers or no_config):
        raise click.UsageError("--layers and --no-config go with --from-image")
    config: dict[str, Any] = {
        "Env": list(env),
        "WorkingDir": workdir,
        "User": user,
        "Entrypoint": list(entrypoint),
        "Cmd": list(cmd),
        "Labels": _pairs(label, "label"),
    }
    epoch = _epoch(mtime)
    uid, gid = _owner(owner)
    spec = GroupSpec(
        kind,
        version,
        None if mtime or image else epoch,
        platform or this_platform(),
        {name: value for name, value in config.items() if value},
        _pairs(annotation, "annotation"),
    )
    how = TreeOptions(prefix, split, squash, Override(uid, gid, epoch if sources or mtime else None))
    options = ConvertOptions(target=target, level=level, scratch_dir=scratch, registry=reach.registry())
    if image:
        if owner and not (squash or split or prefix):
            raise click.UsageError("--owner changes the content of layers: add --squash")
        work = group_from_image(reference, image, layers, spec, how, options, keep_config=not no_config)
    else:
        work = build_group(reference, sources, spec, how, options)
    _show(asyncio.run(work), as_json)


def _show(built: BuiltGroup, as_json: bool) -> None:
    if as_json:
        render.print_json(
            {
                "reference": built.reference,
                "descriptor": built.descriptor.to_json(),
                "kind": built.kind,
                "version": built.version,
                "lazy": built.lazy,
                "skipped": list(built.skipped),
                "layers": [
                    {
                        **layer.descriptor.to_json(),
                        "diffId": layer.diff_id,
                        "streamSize": layer.stream_size,
                        "reused": layer.reused,
                        "reason": layer.reason,
                    }
                    for layer in built.layers
                ],
            }
        )
        return
    for number, layer in enumerate(built.layers, 1):
        state = f"not lazy: {layer.reason}" if layer.reason else "there already" if layer.reused else "made"
        size = render.size(layer.descriptor.size)
        click.echo(f"layer {number}  {render.short(layer.descriptor.digest)}  {size:>9}  {render.escape(state)}")
    for name in built.skipped:
        click.echo(f"left out: {name} (a socket)", err=True)
    click.echo(f"{built.reference}@{built.descriptor.digest}")
