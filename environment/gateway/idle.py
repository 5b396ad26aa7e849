"""Connections that nobody uses give way to those that somebody does: whoever opens many and asks nothing keeps nobody out."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Set
from typing import TYPE_CHECKING, Final

from aiohttp import web

if TYPE_CHECKING:
    from aiohttp.web_protocol import RequestHandler

TICK: Final = 0.2
"""Seconds between looks: few descriptors are taken in that time, as asyncio accepts 128 connections at a time at most."""


def most_connections() -> int:
    """Connections that are kept while they ask nothing: half of the descriptors that this process may have, and no more
    than some 200 MB of memory, of which each takes 13 KB."""
    return min(1 << 14, max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))


class Idle:
    """The connections of ``server``, of which ``most`` are kept but for those in ``busy``, which are being answered."""

    def __init__(self, server: web.Server, busy: Set[RequestHandler], most: int) -> None:
        self._server = server
        self._busy = busy
        self._most = most

    def look(self) -> int:
        """Close those that were opened longest ago and are not being answered, as many as are too many; how many."""
        connections = self._server.connections
        surplus = len(connections) - self._most
        if surplus <= 0:
            return 0
        gone = [one for one in connections if one not in self._busy][:surplus]
        for one in gone:
            one.force_close()
        return len(gone)

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(TICK)
