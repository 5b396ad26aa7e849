"""Who wants to start: those that wait for room, those that were given it and have not started yet.

The ledger (weenv.plugin.nri.admission) decides; here is who waits for what it says. State of the event loop alone.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from weenv.plugin.nri.admission import Ledger, NotAdmitted, Request, TakeBack
from weenv.plugin.nri.journal import Kind
from weenv.plugin.nri.metrics import Metrics
from weenv.plugin.nri.model import EnvKey
from weenv.plugin.nri.record import Record

log = logging.getLogger(__name__)

CLAIM = 60.0
"""Seconds within which an admitted environment has to start; its room is given away then."""


class Door:
    """Lets environments in. ``manages`` says whether one runs; ``moved`` is called when room was promised or given back, and
    ``take_back`` for each that is to give up what it has beyond its start."""

    def __init__(
        self, ledger: Ledger, record: Record, metrics: Metrics, clock: Callable[[], float], *,
        manages: Callable[[EnvKey], bool], moved: Callable[[], None], take_back: Callable[[TakeBack], None],
    ) -> None:  # fmt: skip
        self._ledger = ledger
        self._record = record
        self._metrics = metrics
        self._clock = clock
        self._manages = manages
        self._moved = moved
        self._take_back = take_back
        self._waiting: dict[EnvKey, asyncio.Future[None]] = {}
        self._claims: dict[EnvKey, float] = {}

    async def admit(self, request: Request, deadline: float | None = None) -> float:
        """Wait for room for an environment that is to start; seconds waited. Raises NotAdmitted.

        Cancelled, it is out of the line. An admitted one has ``CLAIM`` seconds to start, or for :meth:`hold`.
        """
        key = request.key
        assert isinstance(key, EnvKey)
        begin_at = self._clock()
        try:
            if not self._ledger.ask(request, begin_at, deadline):
                waiting = self._waiting[key] = asyncio.get_running_loop().create_future()
                self.step()
                self._moved()
                try:
                    await waiting
                except BaseException:
                    self.release(key)
                    raise
                finally:
                    self._waiting.pop(key, None)
        except NotAdmitted as error:
            self._metrics.admissions.labels("denied").inc()
            self._record.event(Kind.DENIED, key, message=error.message)
            raise
        waited = self._clock() - begin_at
        if not self._manages(key):
            self._claims[key] = self._clock() + CLAIM
        self._moved()
        self._metrics.admissions.labels("admitted").inc()
        self._metrics.admission_seconds.observe(waited)
        self._record.event(Kind.ADMITTED, key, waited=round(waited, 3))
        return waited

    def hold(self, key: EnvKey) -> None:
        """What was admitted has started, or is held by its asker until :meth:`let_go`; no container has to start."""
        self._claims.pop(key, None)

    def let_go(self, key: EnvKey) -> None:
        """Give back the room of what was admitted and has not become an environment."""
        if not self._manages(key):
            self.release(key)

    def release(self, key: EnvKey) -> None:
        """It has no room from now on: others may have it."""
        self._claims.pop(key, None)
        self._ledger.remove(key)
        self._moved()
        self.step()

    def wake_at(self) -> float:
        """When there is something to look at at the latest."""
        at = self._ledger.wake_at()
        return min(math.inf if at is None else at, *self._claims.values(), math.inf)

    def look(self, now: float) -> None:
        """Give away what nobody has come for, and see whose deadline is over."""
        for key in [key for key, until in self._claims.items() if until <= now]:
            log.warning("%s was admitted and has not started within %.0f s: its room is given away", key, CLAIM)
            self.release(key)
        wake = self._ledger.wake_at()
        if wake is not None and wake <= now:
            self.step()

    def step(self) -> None:
        """Let the ledger see who can be admitted, and take back what it says."""
        if not self._ledger.waiting:
            return
        came = self._ledger.step(self._clock())
        self._moved()
        for key in came.admitted:
            waiting = self._waiting.get(key)  # type: ignore[call-overload]
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        for key in came.expired:
            waiting = self._waiting.get(key)  # type: ignore[call-overload]
            if waiting is not None and not waiting.done():
                waiting.set_exception(
                    NotAdmitted("the node had no room within the deadline", hint="wait longer, or end something")
                )
        for item in came.take_back:
            self._take_back(item)

    def close(self) -> None:
        """Nobody waits any longer."""
        for waiting in self._waiting.values():
            waiting.cancel()
