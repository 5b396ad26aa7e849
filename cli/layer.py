"""``weenv layer``: single layers, without containerd."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from weenv.cli import render
from weenv.cli.reach import Reach, reaching
from weenv.core.errors import BadReference, FormatError, VerificationError, named

if TYPE_CHECKING:  # a conversion is too short to import what talks to registries
    from weenv.cli.locate import FoundLayer
    from weenv.layer.toc import Toc
    from weenv.layer.verify import LayerDescriptor

T = TypeVar("T")

_KINDS = ("file", "directory", "symlink", "hardlink", "char", "block", "fifo")
_PLURALS = {"directory": "directories", "char": "char", "block": "block"}

_platform = click.option("--platform", default="", help="Of an index, such as linux/arm64.  [default: this machine's]")
_json = click.option("--json", "as_json", is_flag=True, help="For machines.")


@click.group()
def layer() -> None:
    """Convert, inspect, verify or mount a single layer.

    FILE|REF is a layer file, an image (all its layers), or one layer: REGISTRY/NAME@sha256:DIGEST, oci:DIR@sha256:DIGEST.
    """


def _each(text: str, platform: str, reach: Reach, use: Callable[[FoundLayer], Awaitable[T]]) -> list[T]:
    """Run ``use`` on every layer that ``text`` means."""
    import asyncio

    async def run() -> list[T]:
        from weenv.cli.locate import find_layers
        from weenv.registry.client import RegistryClient

        async with RegistryClient(reach.registry()) as client:
            found = await find_layers(client, text, platform)
            try:
                done = []
                for item in found:
                    with named(item.name):
                        done.append(await use(item))
                return done
            finally:
                for item in found:
                    await item.source.close()

    return asyncio.run(run())


@layer.command("convert")
@click.argument("source", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.argument("out", type=click.Path(dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print the descriptor with its annotations as JSON.")
def convert(source: str, out: str, as_json: bool) -> None:
    """Turn a tar (plain, .gz or .zst) into a layer of the format.

    \b
    Example:
      weenv layer convert rootfs.tar.gz rootfs.tar.zst
    """
    from weenv.cli.progress import bar
    from weenv.converter.pipeline import convert_layer_file
    from weenv.core.allocator import keep_freed_memory

    keep_freed_memory()

    with named("standard input" if source == "-" else source), bar(f"converting {source}", quiet=as_json) as show:
        made = convert_layer_file(source, out, progress=show)
    if as_json:
        render.print_json(_encoded(made))
        return
    share = f"{made.blob_size / max(made.stream_size, 1):.0%} of the tar"
    click.echo(f"{render.plain(out)}: {render.size(made.blob_size)} ({share})")
    click.echo(f"  digest {made.blob_digest}\n  diffID {made.diff_id}")


def _encoded(made: Any) -> dict[str, Any]:
    from weenv.layer.verify import MEDIA_TYPE

    return {
        "mediaType": MEDIA_TYPE,
        "digest": made.blob_digest,
        "size": made.blob_size,
        "diffId": made.diff_id,
        "streamSize": made.stream_size,
        "annotations": made.annotations(),
    }


@layer.command("inspect", short_help="Show what a layer's table of contents says.")
@click.argument("what", metavar="FILE|REF")
@_platform
@reaching
@_json
@click.option("--entries", is_flag=True, help="List every entry of the layer, too.")
def inspect(what: str, platform: str, as_json: bool, entries: bool, reach: Reach) -> None:
    """Show what a layer's table of contents says, reading only the blob's tail.

    Of eStargz and zstd:chunked layers too, where a manifest has their annotations.

    \b
    Examples:
      weenv layer inspect rootfs.tar.zst
      weenv layer inspect registry.example/env:1-lazy --json
    """
    described = _each(what, platform, reach, lambda item: _describe(item, entries))
    if as_json:
        render.print_json(described[0] if len(described) == 1 else described)
        return
    rows = [
        (
            render.short(d["digest"]) or "-",
            render.size(d["size"]),
            render.size(d["streamSize"]) if d["lazy"] else "-",
            str(d["frames"]["count"]) if d["lazy"] else "-",
            render.size(d["toc"]["length"]) if d["lazy"] else "-",
            _counts(d["counts"]) if d["lazy"] else render.escape(d["reason"]),
            d.get("format", "-"),
            d["trust"],
        )
        for d in described
    ]
    render.table(["layer", "blob", "tar", "frames", "TOC", "holds", "format", "trust"], rows, right=[1, 2, 3, 4])
    if entries:
        for d in described:
            for row in d.get("entries", ()):
                click.echo(f"{row['mode']} {row['uid']:>6} {row['gid']:>6} {row['size']:>12} {row['shown']}")


async def _describe(item: FoundLayer, entries: bool) -> dict[str, Any]:
    import asyncio

    from weenv.cli.locate import reader
    from weenv.layer.decode import describe
    from weenv.layer.foreign.entries import make_toc
    from weenv.layer.verify import verify_tail
    from weenv.plugin.snapshotter.foreign import fetch_toc

    loop = asyncio.get_running_loop()
    read_at = reader(item.source, loop)
    own = (0, b"") if item.foreign is None else await fetch_toc(item.source, item.foreign)

    def work() -> dict[str, Any]:
        if item.foreign is not None:
            toc = make_toc(item.foreign, own[1], own[0])
            where = {"offset": own[0], "length": len(own[1]), "digest": item.foreign.toc_digest}
        else:
            claimed = item.promised or describe(read_at, item.source.size, item.digest or "sha256:" + "0" * 64)
            toc = verify_tail(read_at(claimed.toc_offset, claimed.toc_length), claimed)
            where = {"offset": claimed.toc_offset, "length": claimed.toc_length, "digest": claimed.toc_digest}
        kinds = Counter(toc.entries.kind.tolist())
        out: dict[str, Any] = {
            "name": item.name,
            "digest": item.digest,
            "size": item.source.size,
            "lazy": True,
            "format": "weenv" if item.foreign is None else item.foreign.format,
            "trust": "manifest" if item.promised or item.foreign else "none: the blob's own footer",
            "version": 1,
            "diffId": toc.diff_id if item.foreign is None else None,
            "streamSize": toc.stream_size,
            "toc": where,
            "frames": {"count": len(toc.frames), "target": toc.frame_target, "level": toc.level},
            "counts": {name: kinds.get(number, 0) for number, name in enumerate(_KINDS)},
        }
        if entries:
            out["entries"] = [_entry(toc, number) for number in range(len(toc.entries))]
        return out

    try:
        return await asyncio.to_thread(work)
    except FormatError as error:
        if item.digest == "" or item.promised is not None or item.foreign is not None:
            raise
        return {
            "name": item.name,
            "digest": item.digest,
            "size": item.source.size,
            "lazy": False,
            "reason": str(error),
            "trust": "-",
        }


def _entry(toc: Any, number: int) -> dict[str, Any]:
    e = toc.entries
    kind = int(e.kind[number])
    path = "/" + toc.path(number).decode("utf-8", "backslashreplace")
    row: dict[str, Any] = {
        "path": path,
        "kind": _KINDS[kind],
        "mode": f"{int(e.mode[number]):04o}",
        "uid": int(e.uid[number]),
        "gid": int(e.gid[number]),
        "mtime": int(e.mtime[number]) + int(e.mtime_ns[number]) / 1e9,
        "size": int(e.size[number]),
        "flags": int(e.flags[number]),
    }
    if kind == 2:
        row["target"] = toc.target(number).decode("utf-8", "backslashreplace")
    elif kind == 3:
        row["link"] = "/" + toc.path(int(e.aux[number])).decode("utf-8", "backslashreplace")
    elif kind in (4, 5):
        row["device"] = [int(e.aux[number]) >> 32, int(e.aux[number]) & 0xFFFFFFFF]
    if attributes := toc.xattr_items(number):
        row["xattrs"] = {name.decode("utf-8", "backslashreplace"): value.hex() for name, value in attributes}
    row["shown"] = render.plain(path + (f" -> {row.get('target') or row.get('link')}" if kind in (2, 3) else ""))
    return row


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(render.counted(number, kind, _PLURALS.get(kind, "")) for kind, number in counts.items() if number)


@layer.command("verify", short_help="Read whole layers and check every digest.")
@click.argument("what", metavar="FILE|REF")
@_platform
@reaching
@_json
def verify(what: str, platform: str, as_json: bool, reach: Reach) -> None:
    """Read whole layers and check every link of the chain of trust, and the TOC against the tar itself.

    Of eStargz and zstd:chunked layers the blob, its TOC and every chunk are checked, but not the TOC against the tar.

    \b
    Example:
      weenv layer verify registry.example/env:1-lazy
    """
    results = _each(what, platform, reach, lambda item: _verify(item, as_json))
    if as_json:
        render.print_json(results)
        return
    for row in results:
        parts = (render.counted(row["entries"], "entry", "entries"), render.counted(row["frames"], "frame"))
        holds = ", ".join((*parts, render.size(row["size"])))
        click.echo(f"{render.plain(row['name'])}: good; {holds}")
        if row["format"] != "weenv":
            click.echo(f"  {row['format']}: whether its TOC says what its tar does is not checked")
        if not row["trusted"]:
            click.echo("  measured against itself only: no manifest says what it should be")


async def _verify(item: FoundLayer, quiet: bool) -> dict[str, Any]:
    import asyncio

    from weenv.cli.locate import reader
    from weenv.cli.progress import bar
    from weenv.layer.decode import verify_blob
    from weenv.layer.foreign.tail import verify_foreign
    from weenv.plugin.snapshotter.foreign import fetch_toc

    read_at = reader(item.source, asyncio.get_running_loop())
    if item.foreign is not None:
        offset, data = await fetch_toc(item.source, item.foreign)
        toc = await asyncio.to_thread(verify_foreign, read_at, item.foreign, data, offset)
        return _verified(item, item.digest, toc, item.foreign.format)
    with bar(f"verifying {render.short(item.digest) or os.path.basename(item.name)}", quiet=quiet) as show:
        done = await asyncio.to_thread(verify_blob, read_at, item.source.size, descriptor=item.promised, progress=show)
    if item.digest and done.descriptor.digest != item.digest:
        raise VerificationError(f"the blob has digest {done.descriptor.digest}", member=item.name)
    return _verified(item, done.descriptor.digest, done.toc, "weenv")


def _verified(item: FoundLayer, digest: str, toc: Toc, layer_format: str) -> dict[str, Any]:
    return {
        "name": item.name,
        "digest": digest,
        "format": layer_format,
        "diffId": toc.diff_id if layer_format == "weenv" else None,
        "size": item.source.size,
        "entries": len(toc.entries),
        "frames": len(toc.frames),
        "trusted": item.promised is not None or item.foreign is not None,
    }


@dataclass(frozen=True, slots=True)
class _Single:
    descriptor: LayerDescriptor
    tail: bytes
    found: FoundLayer


@layer.command("mount")
@click.argument("what", metavar="FILE|REF@DIGEST")
@click.argument("directory", type=click.Path(exists=True, file_okay=False))
@_platform
@reaching
@click.option("-f", "--foreground", is_flag=True, help="Stay; unmount on Ctrl-C.")
def mount(what: str, directory: str, platform: str, foreground: bool, reach: Reach) -> None:
    """Mount one layer read-only, fetching bytes when they are read. Needs root.

    \b
    Examples:
      weenv layer mount rootfs.tar.zst /mnt
      weenv layer mount registry.example/env@sha256:... /mnt
      weenv layer umount /mnt
    """
    import asyncio

    from weenv.cli.locate import reader
    from weenv.layer.decode import describe
    from weenv.layer.foreign.tail import make_tail
    from weenv.plugin.snapshotter.foreign import fetch_toc
    from weenv.plugin.snapshotter.single import mount_layer, umount_layer

    async def look(item: FoundLayer) -> _Single:
        if item.foreign is not None:
            offset, data = await fetch_toc(item.source, item.foreign)
            _, descriptor, tail = await asyncio.to_thread(make_tail, item.foreign, data, offset)
            return _Single(descriptor, tail, item)
        read_at = reader(item.source, asyncio.get_running_loop())

        def work() -> _Single:
            claimed = item.promised or describe(read_at, item.source.size, item.digest or "sha256:" + "0" * 64)
            return _Single(claimed, read_at(claimed.toc_offset, claimed.toc_length), item)

        return await asyncio.to_thread(work)

    found = _each(what, platform, reach, look)
    if len(found) != 1:
        names = "\n  ".join(item.found.name for item in found)
        raise BadReference(f"{what} is an image of {len(found)} layers; name one of them", hint=names)
    place = os.path.realpath(directory)
    one = found[0]
    mount_layer(one.descriptor, one.tail, one.found.origin, place, registry=reach.registry(), foreign=one.found.foreign)
    if not foreground:
        return
    click.echo(f"mounted at {place}; Ctrl-C unmounts it", err=True)
    try:
        while True:
            signal.pause()
    except KeyboardInterrupt:
        umount_layer(place)


@layer.command("umount")
@click.argument("directory", type=click.Path(file_okay=False))
def umount(directory: str) -> None:
    """Unmount what weenv layer mount mounted.

    \b
    Example:
      weenv layer umount /mnt
    """
    from weenv.plugin.snapshotter.single import umount_layer

    umount_layer(os.path.realpath(directory))
