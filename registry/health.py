"""Which of a registry's servers work: decisions on plain data. The caller tells the time (monotonic seconds).

State by :attr:`Endpoint.origin`, shared by all that a client does; touched on the event loop only. A server is asked in its
configured order unless it *rests*: it failed twice in a row, so the others go before it for a while. A server that said
Retry-After is not asked by anybody before that time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from weenv.registry.hosts import Endpoint

_FAILURES: Final = 2
"""Failures in a row that make a server rest."""
_LONGEST: Final = 8
"""A rest doubles with every further failure, up to so many times the first."""
_SERVERS: Final = 1024


@dataclass(slots=True)
class _State:
    failures: int = 0
    rests_until: float = 0.0
    busy_until: float = 0.0


class Health:
    """``rest`` is the length of a first rest, ``longest_wait`` the longest Retry-After that is kept; both in seconds."""

    def __init__(self, rest: float, longest_wait: float) -> None:
        self._rest = rest
        self._longest_wait = longest_wait
        self._states: dict[str, _State] = {}

    def order(self, endpoints: Sequence[Endpoint], now: float) -> list[Endpoint]:
        """``endpoints``, those that rest last: the one whose rest is over soonest before the others."""
        return sorted(endpoints, key=lambda one: max(0.0, self._resting(one) - now))

    def wait(self, endpoint: Endpoint, now: float) -> float:
        """Seconds for which the server does not want to be asked."""
        state = self._states.get(endpoint.origin)
        return max(0.0, state.busy_until - now) if state is not None else 0.0

    def failed(self, endpoint: Endpoint, now: float) -> bool:
        """It gave no usable answer. True where it rests from now on, and did not before."""
        state = self._state(endpoint)
        state.failures += 1
        if state.failures < _FAILURES:
            return False
        rested = state.rests_until > now
        times = min(1 << min(state.failures - _FAILURES, 10), _LONGEST)
        state.rests_until = now + self._rest * times * random.uniform(0.8, 1.2)  # noqa: S311 - spreads, no secret
        return not rested

    def worked(self, endpoint: Endpoint) -> None:
        """It gave a usable answer."""
        state = self._states.get(endpoint.origin)
        if state is not None:
            state.failures, state.rests_until = 0, 0.0

    def throttled(self, endpoint: Endpoint, seconds: float, now: float) -> None:
        """It said Retry-After."""
        state = self._state(endpoint)
        state.busy_until = max(state.busy_until, now + min(seconds, self._longest_wait))

    def ill(self, now: float) -> list[tuple[str, str, float]]:
        """Servers that are asked last (``rests``) or by nobody (``busy``), and for how many seconds more. Any thread."""
        states = [(name, state.rests_until - now, state.busy_until - now) for name, state in self._states.copy().items()]
        found = [(name, "busy", busy) if busy > 0 else (name, "rests", rest) for name, rest, busy in states]
        return sorted(one for one in found if one[2] > 0)

    def _resting(self, endpoint: Endpoint) -> float:
        state = self._states.get(endpoint.origin)
        return state.rests_until if state is not None else 0.0

    def _state(self, endpoint: Endpoint) -> _State:
        if endpoint.origin not in self._states and len(self._states) >= _SERVERS:
            self._states.clear()
        return self._states.setdefault(endpoint.origin, _State())
