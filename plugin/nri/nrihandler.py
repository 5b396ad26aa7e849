"""What the NRI plugin tells its owner and what it wants to know: containers of CRI, their bounds, answers.

The owner is an object with the methods of :class:`Handler`: the controller, or :class:`StartingQuotas`, which only sets
starting quotas. Every method is bounded in time by the plugin; what a slow or failing one would have answered is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weenv.core.errors import WeenvError
from weenv.plugin.nri.creation import Asked
from weenv.plugin.nri.model import EnvKey, Quota
from weenv.plugin.nri.wire.messages import Container, Limits, Pod, Update

CRI_NAMESPACE = "k8s.io"
"""containerd's namespace for everything of CRI."""
RUNNING = 3
"""api.proto's CONTAINER_RUNNING."""


class CreationRefused(WeenvError):
    """The container must not be created; the text reaches whoever asked for it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A container of CRI: as the runtime describes it, and what ``asked`` makes of that."""

    pod: Pod
    container: Container
    asked: Asked

    @property
    def key(self) -> EnvKey:
        """Its name in containerd."""
        return EnvKey(CRI_NAMESPACE, self.container.id)

    @property
    def managed(self) -> bool:
        """Its quota is ours to set."""
        return self.asked.managed

    @property
    def running(self) -> bool:
        """It has a process."""
        return self.container.state == RUNNING

    def __str__(self) -> str:
        return f"{self.pod.namespace}/{self.pod.name}/{self.container.name}"


@dataclass(frozen=True, slots=True)
class Answer:
    """``quota`` for the container in question (None: as it is), ``updates`` for others."""

    quota: Quota | None = None
    updates: tuple[Update, ...] = ()


class Handler(Protocol):
    """The plugin's owner. A method is called for every container, also for those that are not managed.

    None may take long, nor call the runtime's NRI. A method may raise :class:`CreationRefused` in :meth:`creating`; anything
    else that it raises is logged and counts as no answer.
    """

    async def synchronized(self, containers: Sequence[Seen]) -> Sequence[Update]:
        """All containers that exist, at each (re)connection: whoever is not among them has gone meanwhile."""

    async def creating(self, seen: Seen) -> Answer:
        """A container is being created."""

    async def started(self, seen: Seen) -> None:
        """It runs; ``seen.container.pid`` is its first process."""

    async def updating(self, seen: Seen, wanted: Limits) -> Answer:
        """Its owner sets new limits, which are its own from now on; None in ``wanted`` are left as they are.

        A quota in the answer is what is set instead.
        """

    async def stopped(self, seen: Seen) -> Sequence[Update]:
        """It has ended or is about to."""

    async def removed(self, seen: Seen) -> None:
        """It is gone."""

    def disconnected(self, reason: str) -> None:
        """Nothing is heard of CRI until the next :meth:`synchronized`."""


class StartingQuotas:
    """Gives managed containers the quota they are to start with, and nothing more. A base for handlers that do more."""

    async def synchronized(self, containers: Sequence[Seen]) -> Sequence[Update]:
        """See :class:`Handler`."""
        return ()

    async def creating(self, seen: Seen) -> Answer:
        """See :class:`Handler`."""
        return Answer(seen.asked.bounds.start) if seen.managed else Answer()

    async def started(self, seen: Seen) -> None:
        """See :class:`Handler`."""

    async def updating(self, seen: Seen, wanted: Limits) -> Answer:
        """See :class:`Handler`."""
        return Answer()

    async def stopped(self, seen: Seen) -> Sequence[Update]:
        """See :class:`Handler`."""
        return ()

    async def removed(self, seen: Seen) -> None:
        """See :class:`Handler`."""

    def disconnected(self, reason: str) -> None:
        """See :class:`Handler`."""
