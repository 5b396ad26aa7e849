"""The images that plans were composed to, and which of them nothing uses any more.

Each plan that was ever run or composed leaves one in containerd, under ``weenv.local``: a manifest and a config of some
kilobytes, the snapshots of its layers, and what these keep on the node (mounts, the mutations' layer in its store).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from weenv.core.digest import is_digest
from weenv.environment import used
from weenv.plugin.containerd.client import ContainerdError, Namespaced
from weenv.plugin.containerd.runtime import Containers
from weenv.plugin.containerd.types import Image, Kind

_CONFIG = "containerd.io/gc.ref.content.config"
_SNAPSHOT = "containerd.io/gc.ref.snapshot."


async def composed(space: Namespaced) -> list[Image]:
    """The images that plans were composed to in a namespace. Raises ContainerdError."""
    return [image for image in await space.list_images() if image.name.startswith(f"{used.HOST}/")]


async def unused(
    space: Namespaced, snapshotter: str, before: float | None = None, directory: str = ""
) -> tuple[list[Image], int]:  # fmt: skip
    """The composed images of a namespace that nothing stands on, those not used for longest first; how many others there are.

    A container's record counts, running or not, and so does a lease, and a snapshot that is written to or viewed, such as that
    of a docker container that is stopped. ``before`` (seconds since 1970): only those composed before, and not used since
    as far as the node's ``directory`` (NodeConfig.directory) tells. Raises ContainerdError.
    """
    images = await composed(space)
    # Before the containers are listed: who starts one notes the use first.
    times = await asyncio.to_thread(lambda: {image.name: last_use(image, directory, space.name) for image in images})
    named = {container.image for container in await Containers(space).find()}
    infos = await space.snapshots(snapshotter).list()
    layers = {info.name: info.parent for info in infos if info.kind is Kind.COMMITTED}
    standing = {_stood_on(info.parent, layers) for info in infos if info.kind is not Kind.COMMITTED}
    leased = await _leased(space)
    found = []
    for image in images:
        free = image.name not in named and not {image.name, image.target.digest} & leased
        if free and (before is None or times[image.name] < before) and await _chain(space, image, snapshotter) not in standing:
            found.append(image)
    return sorted(found, key=lambda image: times[image.name]), len(images) - len(found)


def last_use(image: Image, directory: str, namespace: str) -> float:
    """When it was used last, or composed, in seconds since 1970."""
    return max(image.created / 1e9, used.last(directory, namespace, image.name))


def _stood_on(parent: str, layers: Mapping[str, str]) -> str:
    """The layer of an image that a snapshot stands on: docker has one of its own between them, ``<container>-init``."""
    while parent in layers and not is_digest(parent):
        parent = layers[parent]
    return parent


async def _leased(space: Namespaced) -> set[str]:
    """The names of all that leases keep."""
    found: set[str] = set()
    for lease in await space.list_leases():
        try:
            found.update(await space.list_lease_resources(lease.id))
        except ContainerdError as error:
            if error.code != "NOT_FOUND":
                raise
    return found


async def _chain(space: Namespaced, image: Image, snapshotter: str) -> str:
    """The snapshot that the image keeps; empty where it has none, so that nothing can stand on it."""
    config = (await _labels(space, image.target.digest)).get(_CONFIG, "")
    return (await _labels(space, config)).get(_SNAPSHOT + snapshotter, "") if config else ""


async def _labels(space: Namespaced, digest: str) -> Mapping[str, str]:
    try:
        return (await space.content_info(digest)).labels
    except ContainerdError as error:
        if error.code not in ("NOT_FOUND", "INVALID_ARGUMENT"):
            raise
        return {}


async def remove(space: Namespaced, images: list[Image]) -> int:
    """Remove images; how many were still there. containerd has collected what only they kept when this ends."""
    return sum([await remove_one(space, image, sync=image is images[-1]) for image in images])


async def remove_one(space: Namespaced, image: Image, *, sync: bool = False) -> bool:
    """Remove an image; whether it was still there. ``sync``: containerd has collected what only it kept when this ends."""
    try:
        await space.delete_image(image.name, sync=sync)
    except ContainerdError as error:
        if error.code != "NOT_FOUND":
            raise
        return False
    return True
