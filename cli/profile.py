"""``weenv profile``: which parts of an image its containers need, recorded here and published for other nodes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from weenv.cli import render
from weenv.cli.reach import Reach, reaching
from weenv.core.errors import FormatError

if TYPE_CHECKING:
    from weenv.layer.profile import Encoded
    from weenv.layer.toc import Frames
    from weenv.plugin.snapshotter.recorded import Recorded
    from weenv.registry.endpoints import Source
    from weenv.registry.manifest import Descriptor


@click.group()
def profile() -> None:
    """Read profiles: what an image's containers read, recorded on one node, fetched ahead on others (docs/profiles.md)."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What is needed of a layer, by one source of that knowledge. Bytes are compressed ones, ``span`` seconds."""

    frames: int
    bytes: int
    span: float

    def as_json(self) -> dict[str, Any]:
        return {"frames": self.frames, "bytes": self.bytes, "seconds": round(self.span, 1)}


@dataclass(frozen=True, slots=True)
class _Row:
    platform: str
    number: int
    layer: Descriptor
    total: int
    node: _Part | None
    manifest: _Part | None
    why: str = ""
    """Why there is nothing, or what is wrong."""


def _root(reach: Reach) -> str:
    from weenv.plugin.snapshotter.config import from_tables

    return from_tables(reach.tables()).root


@profile.command("show", short_help="Show what is recorded here and what the image says.")
@click.argument("image")
@reaching
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def show(image: str, as_json: bool, reach: Reach) -> None:
    """Show for each layer of IMAGE how much of it containers needed: as this node has recorded it, and as the image's manifest
    says.

    IMAGE is a registry reference or an OCI layout, oci:DIR[:TAG].

    \b
    Examples:
      weenv profile show registry.example/env:1-lazy
      weenv profile show --json oci:./image:latest | jq '.[] | select(.node)'
    """
    rows = asyncio.run(_look(image, reach))
    if as_json:
        render.print_json(
            [
                {
                    "platform": row.platform, "index": row.number, "layer": row.layer.digest, "frames": row.total,
                    "node": row.node and row.node.as_json(), "manifest": row.manifest and row.manifest.as_json(),
                    "reason": row.why,
                }
                for row in rows
            ]
        )  # fmt: skip
        return
    many = len({row.platform for row in rows}) > 1
    lines = []
    for row in rows:
        part = row.node or row.manifest
        where = " and ".join(name for name, one in (("this node", row.node), ("the manifest", row.manifest)) if one)
        lines.append(
            (
                *((render.escape(row.platform) or "-",) if many else ()),
                str(row.number),
                render.short(row.layer.digest),
                f"{part.frames}/{row.total}" if part else "-",
                f"{render.size(part.bytes)} of {render.size(row.layer.size)}" if part else "-",
                f"{part.span:.1f} s" if part else "-",
                where if not row.why else f"{where + ': ' if where else ''}[yellow]{render.escape(row.why)}[/]",
            )
        )
    first = 1 if many else 0
    head = ["layer", "digest", "frames", "bytes", "within", "from"]
    render.table([*(["platform"] if many else []), *head], lines, right=[first, first + 2, first + 3, first + 4])


async def _look(image: str, reach: Reach) -> list[_Row]:
    from weenv.converter.profile import images
    from weenv.layer.profile import timeline
    from weenv.plugin.snapshotter.recorded import look, needs
    from weenv.registry.client import RegistryClient
    from weenv.registry.endpoints import open_end
    from weenv.registry.reference import parse_location

    location, root = parse_location(image), _root(reach)
    rows = []
    async with RegistryClient(reach.registry()) as client:
        source = open_end(client, location)
        for platform, manifest in await images(source):
            known = await asyncio.to_thread(look, root, [layer.digest for layer in manifest.layers])
            needed = timeline(needs(known))
            for number, layer in enumerate(manifest.layers, 1):
                here, when = known.get(layer.digest), needed.get(layer.digest, [])
                rows.append(await _row(source, platform, number, layer, here, when))
    return rows


async def _row(
    source: Source, platform: str, number: int, layer: Descriptor, here: Recorded | FormatError | None,
    needed: list[tuple[int, int]],
) -> _Row:  # fmt: skip
    from weenv.layer.profile import UNITS, decode
    from weenv.layer.verify import parse_annotations, verify_frames

    try:
        claimed = parse_annotations(layer.annotations)
        if claimed is None:
            return _Row(platform, number, layer, 0, None, None, "not in the lazy format")
        if isinstance(here, FormatError):
            raise here
        if here is not None:
            frames = here.frames
        else:
            blob = source.blob(layer)
            try:
                tail = await blob.read(claimed.toc_offset, claimed.toc_length)
            finally:
                await blob.close()
            frames = (await asyncio.to_thread(verify_frames, tail, claimed)).frames
        node = manifest = None
        why = ""
        if needed:
            node = _part([frame for _, frame in needed], needed[-1][0] / UNITS, frames)
        elif here is not None and here.complete:
            why = "complete before anything was read"
        elif here is None or not claimed.prefetch:
            why = "" if claimed.prefetch else "not on this node" if here is None else "nothing was read"
        if claimed.prefetch:
            try:
                runs = decode(claimed.prefetch, len(frames))
                listed = [frame for run in runs for frame in range(run.first, run.end)]
                manifest = _part(listed, runs[-1].time / UNITS, frames)
            except FormatError as error:
                why = f"its annotation is not used: {error.message}"
        return _Row(platform, number, layer, len(frames), node, manifest, why)
    except FormatError as error:
        return _Row(platform, number, layer, 0, None, None, error.message)


def _part(needed: list[int], span: float, frames: Frames) -> _Part:
    return _Part(len(needed), int(frames.compressed_sizes[needed].sum(dtype="u8")), span)


@profile.command("publish", short_help="Publish an image with what this node has recorded of it.")
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@reaching
@click.option("--scratch", default="", metavar="DIR", help="Where blobs are spooled.  [default: beside DST, or /var/tmp]")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def publish(source: str, destination: str, scratch: str, as_json: bool, reach: Reach) -> None:
    """Publish the lazy image SRC as DST, with what containers on this node have read of it.

    SRC and DST are registry references or OCI layouts, oci:DIR[:TAG], and may be the same. Only the manifest changes: an
    annotation for each layer that was read. Blobs that are at DST are not moved. Nodes that start DST fetch what is named,
    in that order, before anything asks for it.

    \b
    Examples:
      weenv profile publish registry.example/env:1-lazy registry.example/env:1-lazy
      weenv profile publish oci:./image:latest localhost:5000/env:1
    """
    from weenv.converter.options import ConvertOptions
    from weenv.converter.profile import publish_profile
    from weenv.plugin.snapshotter.recorded import records

    root = _root(reach)
    options = ConvertOptions(cache_dir=None, scratch_dir=scratch, registry=reach.registry())
    done = asyncio.run(
        publish_profile(source, destination, lambda digests: records(root, list(digests)), options=options)
    )  # fmt: skip
    result, profiles = done.result, done.profiles
    if as_json:
        render.print_json(
            {
                "source": source, "destination": destination, "descriptor": result.descriptor.to_json(),
                "layers": [
                    {
                        "platform": row.platform, "index": row.index, "layer": row.new.digest, "reason": row.reason,
                        "profile": _published(profiles.get(row.new.digest)),
                    }
                    for row in result.layers
                ],
            }
        )  # fmt: skip
        return
    many = len(result.manifests) > 1
    lines = []
    for row in result.layers:
        one = profiles.get(row.new.digest)
        lines.append(
            (
                *((render.escape(row.platform) or "-",) if many else ()),
                str(row.index + 1),
                render.short(row.new.digest),
                str(one.frames) if one else "-",
                f"{len(one.value)} B" if one else "-",
                _cut(one) if one else render.escape(row.reason),
            )
        )
    first = 1 if many else 0
    head = ["layer", "digest", "frames", "annotation", ""]
    render.table([*(["platform"] if many else []), *head], lines, right=[first, first + 2, first + 3])
    click.echo(f"{render.plain(destination)}@{result.descriptor.digest}")


def _cut(one: Encoded) -> str:
    return f"[yellow]{render.counted(one.cut, 'frame')} needed last left out: it is full[/]" if one.cut else ""


def _published(one: Encoded | None) -> dict[str, int] | None:
    return {"frames": one.frames, "cut": one.cut, "length": len(one.value)} if one else None


@profile.command("forget", short_help="Drop what this node has recorded of an image.")
@click.argument("image")
@reaching
def forget(image: str, reach: Reach) -> None:
    """Drop what this node has recorded of IMAGE's layers, those that it shares with other images among them.

    What the kernel has in its page cache is not asked for again, and so not recorded again, while the node keeps it: for a
    clean record, remove the image and its containers, and start it anew.

    \b
    Example:
      weenv profile forget registry.example/env:1-lazy
    """
    frames = asyncio.run(_forget(image, reach))
    click.echo(f"forgot {render.counted(frames, 'frame')}")


async def _forget(image: str, reach: Reach) -> int:
    from weenv.converter.profile import images
    from weenv.plugin.snapshotter.blobfs.ask import ask
    from weenv.plugin.snapshotter.blobfs.config import from_table
    from weenv.plugin.snapshotter.cache import reads
    from weenv.plugin.snapshotter.layerdir import LayerDirs
    from weenv.registry.client import RegistryClient
    from weenv.registry.endpoints import open_end
    from weenv.registry.reference import parse_location

    location, root = parse_location(image), _root(reach)
    async with RegistryClient(reach.registry()) as client:
        found = await images(open_end(client, location))
        digests = sorted({layer.digest for _, manifest in found for layer in manifest.layers})
    socket = from_table(reach.tables().get("blobfs", {})).status_socket
    answer = await asyncio.to_thread(ask, socket, {"op": "forget", "layers": digests})
    if answer is not None:
        return int(answer["frames"])
    dirs = LayerDirs(root)
    return sum(reads.forget(dirs.path(digest)) for digest in digests)
