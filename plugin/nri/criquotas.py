"""The controller's ear at the runtime's NRI: CRI's containers start with their quota, and are managed as NRI describes them.

What NRI says of a container (its pod's annotations) goes before what the watcher reads from its record, which has less.
"""

from __future__ import annotations

from collections.abc import Sequence

from weenv.plugin.nri.controller import Controller
from weenv.plugin.nri.nrihandler import Answer, Seen, StartingQuotas
from weenv.plugin.nri.watch import Found
from weenv.plugin.nri.wire.messages import Limits, Update


class CriQuotas(StartingQuotas):
    """The plugin's handler in the daemon."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def synchronized(self, containers: Sequence[Seen]) -> Sequence[Update]:
        """Those that run are managed from now on."""
        for seen in containers:
            self._tell(seen)
        return ()

    async def started(self, seen: Seen) -> None:
        """It runs."""
        self._tell(seen)

    def _tell(self, seen: Seen) -> None:
        if seen.managed and seen.running and seen.container.pid:
            asked = seen.asked
            self._controller.started(Found(seen.key, seen.container.pid, asked.bounds, asked.role, name=str(seen)), known=True)

    async def updating(self, seen: Seen, wanted: Limits) -> Answer:
        """Its owner's limits are let through; the controller finds them at its next look and goes on from there."""
        return Answer()
