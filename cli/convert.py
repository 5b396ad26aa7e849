"""``weenv convert``: a whole image into the lazy format."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from weenv.cli import render
from weenv.cli.amounts import frames
from weenv.cli.reach import Reach, reaching

if TYPE_CHECKING:
    from weenv.converter.options import ConvertResult, Event

_MARKS = {"converted": "[green]converted[/]", "skipped": "[dim]already lazy[/]", "copied": "[yellow]copied[/]"}


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option(
    "--platform", "platforms", multiple=True, metavar="OS/ARCH", help="Convert only these of an index; copy the rest."
)
@reaching
@frames
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, metavar="N", help="Layers converted at once.")
@click.option("--source-hint", is_flag=True, help="Note DST in the layers as a place that holds them.")
@click.option("--force", is_flag=True, help="Convert again what an earlier run has converted.")
@click.option("--scratch", default="", metavar="DIR", help="Where layers are spooled.  [default: beside DST, or /var/tmp]")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def convert(
    source: str,
    destination: str,
    platforms: tuple[str, ...],
    target: int,
    level: int,
    jobs: int,
    source_hint: bool,
    force: bool,
    scratch: str,
    as_json: bool,
    reach: Reach,
) -> None:
    """Convert the image SRC into one that starts lazily, and store it as DST.

    SRC and DST are registry references or OCI layouts, oci:DIR[:TAG]. The result is an ordinary OCI image: other runtimes
    unpack it as before. Config and diffIDs do not change. Interrupt and run again as you like.

    \b
    Examples:
      weenv convert registry.example/env:1 registry.example/env:1-lazy
      weenv convert oci:./image:latest localhost:5000/env:1
    """
    from weenv.converter.image import convert_image
    from weenv.converter.options import ConvertOptions
    from weenv.core.allocator import keep_freed_memory

    keep_freed_memory()
    with _bars(quiet=as_json) as progress:
        options = ConvertOptions(
            target=target,
            level=level,
            jobs=jobs,
            platforms=platforms,
            source_hint=source_hint,
            force=force,
            scratch_dir=scratch,
            registry=reach.registry(),
            progress=progress,
        )
        result = asyncio.run(convert_image(source, destination, options=options))
    if as_json:
        render.print_json(_as_json(result))
    else:
        _show(result)


@contextmanager
def _bars(*, quiet: bool) -> Iterator[Callable[[Event], None] | None]:
    """One bar for each layer under way, on a terminal; nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from weenv.cli.progress import columns

    with columns() as progress:
        tasks: dict[str, Any] = {}

        def show(event: Event) -> None:
            label = f"{event.stage:8} {render.short(event.digest)}"
            task = tasks.get(event.digest)
            if event.stage == "done":
                if task is not None:
                    progress.remove_task(tasks.pop(event.digest))
                return
            if task is None:
                task = tasks[event.digest] = progress.add_task(label, total=event.total or None)
            progress.update(task, description=label, completed=event.done, total=event.total or None)

        yield show


def _show(result: ConvertResult) -> None:
    many = len(result.manifests) > 1
    rows = [
        (
            *((render.escape(row.platform) or "-",) if many else ()),
            str(row.index + 1),  # people count from 1, as "group show" and "plan show" do
            render.short(row.old.digest),
            render.size(row.old.size),
            render.size(row.new.size),
            _MARKS.get(row.status, row.status) + (f" ({render.escape(row.reason)})" if row.reason else ""),
            render.seconds(row.seconds) if row.seconds else "-",
        )
        for row in result.layers
    ]
    head = ["layer", "digest", "before", "after", "", "took"]
    first = 1 if many else 0
    render.table([*(["platform"] if many else []), *head], rows, right=[first, first + 2, first + 3, first + 5])
    for manifest in result.manifests:
        if manifest.reason:
            about = manifest.platform or manifest.old.digest
            click.echo(render.plain(f"{about}: copied as it is: {manifest.reason}"))
    click.echo(f"{render.plain(result.destination)}@{result.descriptor.digest} in {render.seconds(result.seconds)}")
    if not result.lazy:
        click.echo("Not every layer is lazy: containerd fetches those that are not, and all above them.")


def _as_json(result: ConvertResult) -> dict[str, Any]:
    return {
        "source": result.source,
        "destination": result.destination,
        "descriptor": result.descriptor.to_json(),
        "lazy": result.lazy,
        "seconds": result.seconds,
        "manifests": [
            {"platform": m.platform, "old": m.old.digest, "new": m.new.digest, "reason": m.reason} for m in result.manifests
        ],
        "layers": [
            {
                "platform": row.platform,
                "index": row.index,
                "old": row.old.to_json(),
                "new": row.new.to_json(),
                "status": row.status,
                "reason": row.reason,
                "seconds": row.seconds,
                "streamSize": row.stream_size,
                "diffId": row.diff_id,
            }
            for row in result.layers
        ],
    }
