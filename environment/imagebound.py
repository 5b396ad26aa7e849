"""A bound for the images that plans leave: whoever composes a new one takes away those that have not been used for longest.

What nothing uses is found as ``weenv image prune`` finds it (composed.py); and what was used within the last minute stays, for
somebody may be about to start it. One that is started all the same just when it goes is composed again (lifecycle.begin). Any
number of processes may do this at once, and die doing it: each removal is one record's, and containerd's collector takes what
hung on it in its own time.
"""

from __future__ import annotations

import asyncio
import time

from weenv.environment import used
from weenv.environment.composed import composed, last_use, remove_one, unused
from weenv.plugin.containerd.client import Namespaced

YOUNG = 60.0
"""Seconds after its last use for which an image stays in any case."""


async def bound(space: Namespaced, snapshotter: str, directory: str, keep: int) -> int:
    """Where a namespace has more than ``keep`` composed images, remove some, with a tenth to spare; how many went.

    ``directory`` is the node's own (NodeConfig.directory). Raises ContainerdError.
    """
    names = {item.name for item in await composed(space)}
    if len(names) <= keep:
        return 0
    before = time.time() - YOUNG
    found, _ = await unused(space, snapshotter, before, directory)
    gone = 0
    for image in found[: len(names) - keep + keep // 10]:
        if await asyncio.to_thread(last_use, image, directory, space.name) >= before:
            continue  # it is being started
        gone += await remove_one(space, image)
    await asyncio.to_thread(used.forget, directory, space.name, names, before)
    return gone
