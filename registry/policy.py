"""When to try again, and how long to wait: decisions on plain data, shared by the async and the oras transport."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from weenv.core.errors import (
    NotFoundInSource,
    SourceError,
    UnauthorizedError,
    UnavailableError,
)
from weenv.registry.config import RegistryConfig

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which the same request may succeed (RFC 9110; 425: RFC 8470; 429: RFC 6585)."""
REFUSED = frozenset({401, 403})
STALE_TARGET = frozenset({400, 401, 403, 404, 410})
"""Answers of a redirect target that may only mean that its signed URL has expired."""
REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_HOPS = 10


def parse_retry_after(value: str | None, now: float | None = None) -> float | None:
    """Seconds from a Retry-After header (RFC 9110, 10.2.3: seconds or a date), or None where it says nothing usable."""
    if not value:
        return None
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        when = parsedate_to_datetime(value).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return max(0.0, when - (time.time() if now is None else now))


@dataclass(slots=True)
class Pace:
    """Whether an answer comes too slowly to go on with: less than an eighth of ``min_rate`` over ``slow_after`` seconds.

    Only the time counts that was spent waiting for the server. An answer that is left is gone on with by a new request, so
    on a line that is slow for all this costs a round trip now and then.
    """

    config: RegistryConfig
    _bytes: int = 0
    _seconds: float = 0.0

    def add(self, count: int, seconds: float) -> bool:
        """``count`` bytes took ``seconds``. True: leave this answer."""
        self._bytes += count
        self._seconds += seconds
        if self._seconds < self.config.slow_after:
            return False
        slow = self._bytes < self._seconds * self.config.min_rate / 8
        self._bytes, self._seconds = 0, 0.0
        return slow


def answer_time(config: RegistryConfig) -> float:
    """Seconds within which a request must be sent and all of its answer's header be here, whatever drips in."""
    return config.connect_timeout + config.stall_timeout


def retry_delay(config: RegistryConfig, failures: int, retry_after: float | None = None) -> float | None:
    """Seconds to wait after the ``failures``-th failure in a row (1 is the first), or None: give up.

    A connection that the server closed while idle is the usual first failure, so the first retry is immediate.
    """
    if failures >= config.attempts:
        return None
    if retry_after is not None:
        if retry_after > config.max_retry_after:
            return None
        return retry_after + random.uniform(0, 0.1 * retry_after + 0.05)  # noqa: S311 - spreads retries, no secret
    if failures <= 1:
        return 0.0
    ceiling = min(config.max_retry_delay, config.retry_delay * 2.0 ** (failures - 2))
    return random.uniform(0.5, 1.0) * ceiling  # noqa: S311


def unavailable(host: str, what: str, reason: str, retry_after: float | None = None) -> UnavailableError:
    """The error for a registry that gives no usable answer, however it was asked."""
    hint = "is it running, and is its name right? where it speaks plain HTTP: --plain-http, or [registry] plain_http"
    if "TLS" in reason:
        hint = "name its CA: hosts.toml, or [registry] ca_file (docs/registries.md); if it speaks plain HTTP: --plain-http"
    return UnavailableError(f"{host} cannot serve {what}: {reason}", retry_after=retry_after, hint=hint)


def status_error(status: int, what: str, host: str, retry_after: float | None = None) -> SourceError:
    """The error of the project's tree that an HTTP status means. ``what`` names what was asked for."""
    if status == 404:
        return NotFoundInSource(f"{host} does not hold {what}")
    if status in REFUSED:
        return UnauthorizedError(
            f"{host} refused access to {what} ({status})",
            hint=f"check the name, and log in (again, where a login is there already): docker login {host}",
        )
    if status in TRANSIENT:
        return unavailable(host, what, f"status {status}", retry_after)
    return SourceError(f"{host} answered {status} for {what}")
