"""Whether an event loop has turns for others while something is at work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass
class Turns:
    """How many there were so far."""

    count: int = 0


@asynccontextmanager
async def turns(every: float) -> AsyncIterator[Turns]:
    """Within the block, ask for a turn ``every`` so many seconds."""
    found = Turns()

    async def ask() -> None:
        while True:
            await asyncio.sleep(every)
            found.count += 1

    asking = asyncio.create_task(ask())
    try:
        yield found
    finally:
        asking.cancel()
