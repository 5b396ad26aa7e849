"""``weenv image``: what containerd's content store has of images, fetching what it lacks, removing what plans left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from weenv.cli import render
from weenv.cli.amounts import age
from weenv.core.errors import WeenvError
from weenv.core.settings import DEFAULT_CONFIG

if TYPE_CHECKING:
    from weenv.environment.imagecontent import ImageContent
    from weenv.environment.runconfig import NodeConfig
    from weenv.plugin.containerd.client import Namespaced

S = TypeVar("S")
T = TypeVar("T")


def _common(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("-n", "--namespace", help="containerd's namespace; docker's is moby.  [default: run.namespace]"),
        click.option("--containerd", "socket", metavar="SOCK", help="containerd's socket.  [default: run.address]"),
        click.option("--config", "config_path", default=DEFAULT_CONFIG, show_default=True, help="WeEnv's configuration."),
        click.option("--json", "as_json", is_flag=True, help="For machines."),
    ):
        command = option(command)
    return command


@click.group()
def image() -> None:
    """What containerd's content store has of images: lazily pulled ones have no layer in it (docs/docker.md).

    Each plan that was run leaves an image, too: prune removes those that nothing uses (docs/plans.md).
    """


def _with(
    config_path: str, socket: str | None, namespace: str | None, use: Callable[[Namespaced, NodeConfig], Awaitable[T]]
) -> T:
    from weenv.environment.runconfig import load
    from weenv.plugin.containerd.client import Client

    node = load(config_path, address=socket, namespace=namespace)

    async def run() -> T:
        async with Client(node.run.address) as client:
            return await use(client.namespace(node.run.namespace), node)

    return asyncio.run(run())


async def _each(
    items: Iterable[S], work: Callable[[S], Awaitable[T]], failures: list[WeenvError]
) -> AsyncIterator[T]:  # fmt: skip
    """What ``work`` makes of each item; one that fails does not keep the others from it, and is added to ``failures``."""
    for item in items:
        try:
            yield await work(item)
        except WeenvError as error:
            failures.append(error)


def _json(content: ImageContent) -> dict[str, Any]:
    return {
        "name": content.name,
        "digest": content.digest,
        "blobs": len(content.blobs),
        "missing": [blob.descriptor.digest for blob in content.missing],
        "missing_bytes": content.missing_bytes,
        "manifests_left_out": list(content.left_out),
    }


@image.command("ls", short_help="List images and how much of each is in the content store.")
@_common
def list_images(namespace: str | None, socket: str | None, config_path: str, as_json: bool) -> None:
    """List the images of a namespace, lazy ones included, with how much of each is in containerd's content store.

    \b
    Examples:
      weenv image ls --namespace moby
      weenv image ls --json | jq -r '.[] | select(.missing_bytes > 0) | .name'
    """
    from weenv.environment.imagecontent import look

    async def work(space: Namespaced, _node: NodeConfig) -> list[tuple[ImageContent | None, str, str]]:
        found: list[tuple[ImageContent | None, str, str]] = []
        for item in sorted(await space.list_images(), key=lambda item: item.name):
            try:
                found.append((await look(space, item), item.name, ""))
            except WeenvError as error:
                found.append((None, item.name, error.message))
        return found

    images = _with(config_path, socket, namespace, work)
    if as_json:
        rows = [_json(content) if content else {"name": name, "error": error} for content, name, error in images]
        render.print_json(rows)
        return
    if not images:
        click.echo("No image in this namespace; docker's is moby (--namespace).")
        return
    render.table(
        ["image", "digest", "size", "in store"],
        [
            (render.escape(name), "-", "-", f"[yellow]{render.escape(error)}[/]")
            if content is None
            else (
                render.escape(name),
                render.short(content.digest),
                render.size(total := sum(blob.descriptor.size for blob in content.blobs)),
                "all" if not content.missing else f"[cyan]{render.size(total - content.missing_bytes)}[/]",
            )
            for content, name, error in images
        ],
        right=[2, 3],
        drop=[1],
    )


@image.command("fetch", short_help="Fetch an image's layers into the content store, for docker save and push.")
@click.argument("images", nargs=-1, metavar="[IMAGE]...")
@click.option("--all", "everything", is_flag=True, help="Every image of the namespace.")
@click.option("--check", is_flag=True, help="Fetch nothing; exit 1 where something is missing.")
@click.option("--plain-http", multiple=True, metavar="HOST", help="Speak HTTP to this registry.")
@_common
def fetch(
    images: tuple[str, ...], everything: bool, check: bool, plain_http: tuple[str, ...], namespace: str | None,
    socket: str | None, config_path: str, as_json: bool,
) -> None:  # fmt: skip
    """Fetch the layers of images into containerd's content store, as they are in the registry.

    A lazily pulled image runs without them, but what copies images out of the store needs them: docker save, docker push to
    another registry, ctr images export, nerdctl save. They stay until the image is removed. IMAGE is a name or ID, as
    docker takes it. What is there already is not fetched again.

    \b
    Examples:
      weenv image fetch --namespace moby team/env:1 && docker save team/env:1 -o env.tar
      weenv image fetch --namespace moby --check team/env:1
      weenv image fetch --namespace moby --all
    """
    import dataclasses

    from weenv.cli.progress import bar
    from weenv.environment.imagecontent import Fetcher, find, look
    from weenv.plugin.snapshotter.config import registry_config
    from weenv.registry.client import RegistryClient

    if bool(images) == everything:
        raise click.UsageError("name images, or all of them with --all")

    failures: list[WeenvError] = []

    async def work(space: Namespaced, node: NodeConfig) -> list[tuple[ImageContent, int]]:
        named = await space.list_images() if everything else [await find(space, text) for text in images]
        contents = [found async for found in _each(named, lambda item: look(space, item), failures)]
        if check:
            return [(content, 0) for content in contents]
        config = registry_config(node.tables)
        config = dataclasses.replace(config, plain_http=config.plain_http | frozenset(plain_http))
        total = sum(content.missing_bytes for content in contents)
        done = 0
        with bar("fetching layers") as show:

            def report(count: int) -> None:
                nonlocal done
                done += count
                show(done, total)

            async with RegistryClient(config) as client:
                fetcher = Fetcher(space, client, node.root, report)

                async def one(content: ImageContent) -> tuple[ImageContent, int]:
                    return content, await fetcher.fetch(content)

                return [result async for result in _each(contents, one, failures)]

    results = _with(config_path, socket, namespace, work)
    if as_json:
        render.print_json([{**_json(content), "fetched_bytes": count} for content, count in results])
    for content, count in results:
        name, missing = render.plain(content.name), render.counted(len(content.missing), "blob")
        if check and content.missing:
            text = f"{name}: {missing} of {len(content.blobs)} missing, {render.size(content.missing_bytes)}"
            click.echo(f"weenv: {text}\n  weenv image fetch brings them", err=True)
        elif not as_json:
            click.echo(f"{name}: " + (f"{missing} fetched, {render.size(count)}" if content.missing else "all there"))
    if failures:
        failures[0].also = tuple(failures[1:])
        raise failures[0]
    if check and any(content.missing for content, _ in results):
        raise click.exceptions.Exit(1)


@image.command("prune", short_help="Remove the images of plans that nothing uses.")
@click.option("--all", "everything", is_flag=True, help="All that nothing uses.")
@click.option("--until", callback=age, metavar="AGE", help="Those not used for so long: 90s, 15m, 24h, 7d.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@_common
def prune(
    everything: bool, until: float | None, dry_run: bool, namespace: str | None, socket: str | None, config_path: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Remove the images that plans were composed to (weenv.local/...) and that no container uses, running or not.

    Beyond compose.keep_images of them this goes by itself, those not used for longest first, when a plan is composed.

    With them go their snapshots and mounts. No layer's bytes do, for other plans read them (weenv cache prune), and a plan that
    is run again is composed again, which downloads nothing. Images that were pulled stay.

    \b
    Examples:
      weenv image prune --until 24h
      weenv image prune --all --namespace moby --dry-run
    """
    from weenv.environment.composed import remove, unused

    if everything == (until is not None):
        raise click.UsageError("say what: --all, or --until AGE")

    async def work(space: Namespaced, node: NodeConfig) -> tuple[list[str], int]:
        before = None if until is None else time.time() - until
        found, others = await unused(space, node.run.snapshotter, before, node.directory)
        if not dry_run:
            await remove(space, found)
        return [item.name for item in found], others

    names, kept = _with(config_path, socket, namespace, work)
    if as_json:
        render.print_json({"removed": names, "kept": kept, "dry_run": dry_run})
        return
    for name in names:
        click.echo(render.plain(name))
    verb = "would remove" if dry_run else "removed"
    click.echo(f"{verb} {render.counted(len(names), 'image')} of plans; {kept} stay", err=True)
