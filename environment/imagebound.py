"""A bound for the images that plans leave: whoever composes a new one takes away those that have not been used for longest.

What nothing uses is found as ``weenv image prune`` finds it (composed.py). Besides, an image stays that a lease keeps, or that
was used within the last minute (used.py): somebody may be about to start it. One that is started all the same just when it
goes is composed again (lifecycle.begin). Any number of processes may do this at once, and die doing it: each removal is one
record's, and containerd's collector takes what hung on it in its own time.
"""

from __future__ import annotations

import asyncio
import time

from weenv.environment import used
from weenv.environment.composed import unused
from weenv.plugin.containerd.client import ContainerdError, Namespaced

YOUNG = 60.0
"""Seconds after its last use for which an image stays in any case."""


async def bound(space: Namespaced, snapshotter: str, directory: str, keep: int) -> int:
    """Where a namespace has more than ``keep`` composed images, remove some, with a tenth to spare; how many went.

    ``directory`` is the node's own (NodeConfig.directory). Raises ContainerdError.
    """
    names = {item.name for item in await space.list_images() if item.name.startswith(f"{used.HOST}/")}
    if len(names) <= keep:
        return 0
    now = time.time()
    free, _ = await unused(space, snapshotter, now - YOUNG)
    leased = await _leased(space)
    times = await asyncio.to_thread(lambda: {item.name: used.last(directory, space.name, item.name) for item in free})
    going = sorted(
        (max(times[item.name], item.created / 1e9), item.name)
        for item in free
        if times[item.name] < now - YOUNG and not leased & {item.name, item.target.digest}
    )
    gone = 0
    for when, name in going[: len(names) - keep + keep // 10]:
        if await asyncio.to_thread(used.last, directory, space.name, name) > when:
            continue  # it is being started
        try:
            await space.delete_image(name)
        except ContainerdError as error:
            if error.code != "NOT_FOUND":
                raise
        else:
            gone += 1
    await asyncio.to_thread(used.forget, directory, space.name, names, now - YOUNG)
    return gone


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
