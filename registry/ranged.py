"""Ranged reads of one registry blob: the data path of lazy layers.

Every server that stands for the registry (mirrors, then the registry itself) is a *place*. Places are tried in their order;
one that has not begun to answer in time is raced by the next. One redirect target per place is remembered. When it stops
working (its signed URL expired), it is resolved once more and the read goes on. A stream that breaks, or comes too slowly,
is resumed where it stopped, and only rounds over all places without any progress count against the limit.

Where no place honours Range, the answer is the whole blob. It is kept, and what is read next goes on from where it is; see
:class:`RangesIgnored`.

Shared state: a place's ``target`` and ``generation`` change between awaits of the loop only. Many readers may see one
expired target; the lock lets the first resolve it, the others find a newer generation and use that.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from weenv.core import digest as digests
from weenv.core.errors import (
    ConfigError,
    NotFoundInSource,
    SourceError,
    UnavailableError,
    WeenvError,
)
from weenv.registry.auth import scope_of
from weenv.registry.client import TRANSPORT_ERRORS, RegistryClient, describe, in_turn, origin
from weenv.registry.hosts import Endpoint
from weenv.registry.policy import (
    STALE_TARGET,
    TRANSIENT,
    Pace,
    parse_retry_after,
    retry_delay,
    status_error,
    unavailable,
)

log = logging.getLogger(__name__)

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(?:(\d{1,18})|\*)\Z")
_KEEP: Final = 15.0
"""Seconds for which the answer of a server that ignores Range is kept for the next read."""
_PAUSE: Final = 1.0
"""Longer pauses than that are left to a caller who paces itself."""
_SERVED: Final = 256
"""Ranges of which it is remembered where they came from."""
_DOUBTS: Final = 4
"""Wrong bytes at one offset so many times, within _DOUBT seconds: they are wrong everywhere."""
_DOUBT: Final = 60.0


class RangesIgnored(SourceError):
    """The servers ignore Range: :meth:`RegistrySource.whole` of ``source`` reads from the beginning."""

    def __init__(self, source: RegistrySource) -> None:
        super().__init__(f"{source.host} ignores Range", hint="it serves layers whole: the first read fetches all of one")
        self.source = source


class _TryAgain(Exception):
    """This attempt failed in a way that another may not."""

    def __init__(self, reason: str, retry_after: float | None = None, *, blame: bool = True) -> None:
        super().__init__(reason)
        self.retry_after = retry_after
        self.blame = blame
        """Whether it says something about the server, and not about this blob only."""


@dataclass(eq=False)
class _Place:
    """A server, as far as this blob goes."""

    endpoint: Endpoint
    url: str
    target: str | None = None
    generation: int = 0
    ranges: bool | None = None
    """Whether it honours Range: None until it is known."""
    wrong_until: float = 0.0
    """It has sent wrong bytes: the others go before it until then (the loop's time)."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class _Answer:
    """An answer whose body goes on at ``position`` of the blob, and the place that sends it."""

    place: _Place
    response: aiohttp.ClientResponse
    position: int
    rest: bytes = b""
    """Bytes from ``position`` on that have been taken out of the response already."""


@dataclass(slots=True)
class _Round:
    """What became of the places since the last progress."""

    tried: set[_Place] = field(default_factory=set)
    final: dict[_Place, WeenvError] = field(default_factory=dict)
    reason: str = "no server"
    host: str = ""
    retry_after: float | None = None


class RegistrySource:
    """A blob of ``size`` bytes in a registry repository; a :class:`weenv.registry.source.BlobSource`.

    What it returns has the right length but is not verified: whoever knows the frame's or the blob's digest does that, and
    says so with :meth:`suspect` where it is wrong.

    ``paced`` is for callers that try again by themselves: pauses of more than a second are errors with ``retry_after``, and
    so is a server that ignores Range (:class:`RangesIgnored`).
    """

    def __init__(
        self, client: RegistryClient, host: str, repository: str, digest: str, size: int, *, paced: bool = False
    ) -> None:
        self.client = client
        self.host = host
        self.repository = repository
        self.digest = digests.check_digest(digest)
        self.size = size
        self.paced = paced
        self._path = f"/v2/{repository}/blobs/{digest}"
        self._what = f"{repository}@{digest}"
        self._scope = scope_of(repository)
        self._places: dict[Endpoint, _Place] = {}
        self._served: deque[list[int | _Place]] = deque(maxlen=_SERVED)
        self._doubts: dict[int, tuple[int, float]] = {}
        self._probe = asyncio.Lock()
        self._kept: _Answer | None = None
        self._kept_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"{self.host}/{self.repository}@{self.digest}"

    @property
    def ranges(self) -> bool | None:
        """Whether a server honours Range: None until it is known of one."""
        known = [place.ranges for place in self._places.values()]
        return True if True in known else None if None in known or not known else False

    async def close(self) -> None:
        """Close what is kept open; connections belong to the client."""
        self._let_go()

    async def read(self, offset: int, length: int, *, deadline: float | None = None) -> bytes:
        """Exactly ``length`` bytes from ``offset``. Raises SourceError (see :meth:`stream`).

        ``deadline`` is in seconds from now, with all retries; the configured one by default.
        """
        self._check_bounds(offset, length)
        async with aclosing(self._stream(offset, length, deadline, paced=False)) as chunks:
            return b"".join([chunk async for chunk in chunks])

    def stream(self, offset: int, length: int, *, deadline: float | None = None) -> AsyncGenerator[bytes, None]:
        """The bytes ``[offset, offset + length)`` in chunks as they arrive; a broken stream is resumed.

        Raises NotFoundInSource, UnauthorizedError, UnavailableError (also where the deadline passed), SourceError.
        Closing the iterator early drops the connection.
        """
        self._check_bounds(offset, length)
        return self._stream(offset, length, deadline, paced=self.paced)

    def whole(self, length: int, *, deadline: float | None = None) -> AsyncGenerator[bytes, None]:
        """The first ``length`` bytes of the blob, as :meth:`stream`: for after :class:`RangesIgnored`."""
        self._check_bounds(0, length)
        return self._stream(0, length, deadline, paced=False)

    def suspect(self, offset: int, length: int) -> bool:
        """What was read at ``offset`` is wrong. True where another read may bring other bytes: not from where it came, if
        that can be helped."""
        now = asyncio.get_running_loop().time()
        for begin, end, place in reversed(self._served):
            if begin < offset + length and offset < end:  # type: ignore[operator]
                assert isinstance(place, _Place)
                place.target, place.generation = None, place.generation + 1
                place.wrong_until = now + _DOUBT
                self.client.failed(place.endpoint, "wrong bytes")
                break
        count, since = self._doubts.get(offset, (0, now))
        count, since = (count + 1, since) if now - since < _DOUBT else (1, now)
        if len(self._doubts) >= _SERVED:
            self._doubts.clear()
        self._doubts[offset] = count, since
        return count < _DOUBTS

    async def public_url(self) -> str:
        """Where anybody can have the blob now, without our credentials: the registry, or a signed URL that it gave out.

        Empty where only we can have it. Reads a byte to know. Raises SourceError.
        """
        if not self.size:
            return ""
        place = next((one for one in self._order() if not one.endpoint.is_private), None)
        if place is None:
            return ""
        give_up = asyncio.get_running_loop().time() + self.client.config.deadline
        try:
            answer = await self._open(place, 0, 1, give_up)
        except TRANSPORT_ERRORS as error:
            raise unavailable(place.endpoint.name, self.digest, describe(error)) from error
        try:
            if answer.status not in (200, 206):
                raise status_error(answer.status, self._what, place.endpoint.name)
            if place.target is not None:
                return place.target
            anybody = "Authorization" not in answer.request_info.headers
            home = answer.url.host, answer.url.port
            return place.url if anybody and home == origin(place.url)[1:] else ""
        finally:
            answer.close()

    # -- reading ----------------------------------------------------------------------------------------------------

    def _check_bounds(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise SourceError(f"read of {length} bytes at {offset} beyond the {self.size} bytes of {self.digest}")

    async def _stream(self, offset: int, length: int, deadline: float | None, *, paced: bool) -> AsyncGenerator[bytes, None]:
        config, now = self.client.config, asyncio.get_running_loop().time
        give_up = now() + (config.deadline if deadline is None else deadline) + length / config.min_rate
        position, end, failures, state = offset, offset + length, 0, _Round()
        while position < end:
            before, answer = position, self._take(position)
            if answer is None and paced and self._unsure():
                async with self._probe:  # many may begin at once, and each would be sent the whole blob
                    if self._unsure():
                        answer = await self._next(position, end, give_up, state, paced=paced)
            if answer is None:
                answer = await self._next(position, end, give_up, state, paced=paced)
            if answer is None:  # all places have been tried
                failures += 1
                await self._pause(state, failures, give_up, paced=paced)
                continue
            place, response, pace, reason = answer.place, answer.response, Pace(config), ""
            served: list[int | _Place] = [position, position, place]
            self._served.append(served)
            try:
                while position < end:
                    began = now()
                    chunk, answer.rest = answer.rest, b""
                    if not chunk:
                        async with asyncio.timeout(config.slow_after):
                            chunk = await response.content.readany()
                    if not chunk:
                        reason = "the answer ended early"
                        break
                    spent, count = now() - began, len(chunk)
                    before_it, upto = position - answer.position, end - answer.position
                    chunk, answer.rest = chunk[max(0, before_it) : upto], chunk[upto:]
                    answer.position += min(count, upto)
                    if chunk:
                        position += len(chunk)
                        served[1] = position
                        self.client.counters.bytes += len(chunk)
                        yield chunk
                    if position < end and now() > give_up:
                        raise unavailable(place.endpoint.name, self.digest, "too slow")
                    if position < end and pace.add(count, spent):
                        reason = "it is too slow"
                        break
            except TRANSPORT_ERRORS as error:
                reason = describe(error)
            finally:
                if position >= end and not reason and place.ranges is False and answer.position < self.size:
                    self._keep(answer)
                else:
                    response.release()  # back to the pool where the body was read to its end, closed otherwise
            if position > before:
                failures, state = 0, _Round()
            if position >= end:
                self.client.health.worked(place.endpoint)
                return
            self._failed(place, state, _TryAgain(reason))

    def _failed(self, place: _Place, state: _Round, error: _TryAgain) -> None:
        state.tried.add(place)
        state.reason, state.host = str(error), place.endpoint.name
        if error.retry_after is not None:
            known = state.retry_after
            state.retry_after = error.retry_after if known is None else min(known, error.retry_after)
        if error.blame:
            self.client.failed(place.endpoint, state.reason, error.retry_after)
        fields = {"host": place.endpoint.host, "reason": state.reason}
        log.debug("a ranged read failed", extra=fields)

    async def _pause(self, state: _Round, failures: int, give_up: float, *, paced: bool) -> None:
        """Between two rounds. Raises the error where there is to be no other."""
        now = asyncio.get_running_loop().time()
        places = self._order()
        if not places:
            raise SourceError(f"no server of {self.host} may be asked")
        if all(place in state.final for place in places):
            raise state.final[self._own(places)]
        delay = retry_delay(self.client.config, failures, state.retry_after)
        if delay is None or now + delay > give_up or (paced and delay > _PAUSE):
            wait = state.retry_after if delay is None else max(delay, state.retry_after or 0.0) if delay > _PAUSE else None
            raise unavailable(state.host or self.host, self.digest, state.reason, wait)
        state.tried.clear()
        state.retry_after = None
        self.client.counters.retries += 1
        await asyncio.sleep(delay)

    def _own(self, places: Sequence[_Place]) -> _Place:
        """The registry itself among the places: its word counts."""
        last = self.client.endpoints(self.host)[-1]
        return next((place for place in places if place.endpoint == last), places[-1])

    def _order(self) -> list[_Place]:
        """The places, the best first. Raises SourceError where there are none."""
        now = asyncio.get_running_loop().time()
        known = self._places
        endpoints = self.client.endpoints(self.host)
        if len(known) != len(endpoints) or any(one not in known for one in endpoints):
            self._places = known = {one: known.get(one) or _Place(one, one.url(self._path)) for one in endpoints}
        ordered = [known[one] for one in self.client.health.order(endpoints, now)]
        return sorted(ordered, key=lambda place: (place.ranges is False, place.wrong_until > now))

    def _unsure(self) -> bool:
        """True while no place is known to honour Range, neither for this blob nor for others."""
        return self.ranges is None and not any(one.origin in self.client.ranged for one in self._places)

    async def _next(self, start: int, end: int, give_up: float, state: _Round, *, paced: bool) -> _Answer | None:
        """The first usable answer of the places that have not been tried; None: there is none of them."""
        now = asyncio.get_running_loop().time
        rest = deque[_Place]()
        if paced and self.ranges is False:
            raise RangesIgnored(self)
        for place in self._order():
            if place in state.tried or place in state.final:
                continue
            if (wait := self.client.health.wait(place.endpoint, now())) > 0:
                self._failed(place, state, _TryAgain("asked too often", wait, blame=False))
            else:
                rest.append(place)
        if len(rest) == 1:  # awaited here: what a server sent before it cut the connection is lost to who comes later
            place = rest.popleft()
            outcome = await _outcome(self._open(place, start, end, give_up))
            return self._judge(place, outcome, start, end, state, paced=paced)
        return await self._race(rest, start, end, give_up, state, paced=paced)

    async def _race(
        self, rest: deque[_Place], start: int, end: int, give_up: float, state: _Round, *, paced: bool
    ) -> _Answer | None:
        patience = self.client.config.race_after

        async def open_(place: _Place) -> aiohttp.ClientResponse:
            return await self._open(place, start, end, give_up)

        def on_race() -> None:
            self.client.counters.raced += 1

        turns = in_turn(rest, open_, patience, on_race, aiohttp.ClientResponse.close)
        async with aclosing(turns) as outcomes:
            async for place, outcome, slower in outcomes:
                answer = self._judge(place, outcome, start, end, state, paced=paced)
                if answer is not None:
                    for slow in slower if patience > 0 else ():
                        self.client.failed(slow.endpoint, "slower than the next")
                    return answer
        return None

    def _judge(
        self, place: _Place, outcome: aiohttp.ClientResponse | Exception, start: int, end: int, state: _Round, *, paced: bool
    ) -> _Answer | None:
        """An attempt's usable answer, or None: then ``state`` says why. Raises RangesIgnored."""
        answer: _Answer | None = None
        try:
            if isinstance(outcome, Exception):
                raise outcome
            answer = _Answer(place, outcome, self._check(place, outcome, start, end, state))
        except _TryAgain as error:
            self._failed(place, state, error)
        except TRANSPORT_ERRORS as error:
            self._failed(place, state, _TryAgain(describe(error)))
        except UnavailableError as error:  # its token could not be had
            self._failed(place, state, _TryAgain(error.message, error.retry_after))
        except (SourceError, ConfigError) as error:
            state.final[place] = error
        finally:
            if answer is None and isinstance(outcome, aiohttp.ClientResponse):
                outcome.release()
        if answer is not None and place.ranges is False and paced:
            self._keep(answer)
            raise RangesIgnored(self)
        return answer

    def _check(self, place: _Place, answer: aiohttp.ClientResponse, position: int, end: int, state: _Round) -> int:
        """Check status and headers of an answer; returns where in the blob its body begins."""
        name = place.endpoint.name
        encoding = answer.headers.get("Content-Encoding", "identity").lower()
        if answer.status in (200, 206) and encoding not in ("identity", ""):
            raise _TryAgain(f"it sends Content-Encoding {encoding[:40]!r}")
        if answer.status == 206:
            match = _CONTENT_RANGE.match(answer.headers.get("Content-Range", ""))
            if match is None or int(match[1]) != position or int(match[2]) < position:
                raise _TryAgain("it answered with another range than asked for")
            if match[3] is not None and int(match[3]) != self.size:
                raise _TryAgain(f"it has {match[3]} bytes of a blob of {self.size}")
            place.ranges = True
            self.client.ranged.add(place.endpoint.origin)
            return position
        if answer.status == 200:
            if (position, end) == (0, self.size):
                return 0
            if place.ranges is not False:
                place.ranges = False
                self.client.counters.range_ignored += 1
                log.warning("registry ignores Range", extra={"host": place.endpoint.host, "blob": self.digest})
            others = [other for other in self._places.values() if other not in state.tried and other not in state.final]
            if any(other.ranges is not False for other in others):
                raise _TryAgain("it ignores Range", blame=False)
            if position > self.client.config.max_skip and not self.paced:
                raise SourceError(
                    f"{name} ignores Range: reading {self.digest} at {position} would fetch all before it",
                    hint="this registry cannot serve layers lazily",
                )
            return 0
        if answer.status == 416:
            raise NotFoundInSource(f"{name} holds fewer bytes of {self.digest} than its descriptor says")
        if answer.status in TRANSIENT:
            raise _TryAgain(f"status {answer.status}", parse_retry_after(answer.headers.get("Retry-After")))
        raise status_error(answer.status, self._what, name)

    # -- a stream that is kept ------------------------------------------------------------------------------------------

    def _keep(self, answer: _Answer) -> None:
        """Keep the answer of a server that ignores Range: the next read goes on from there."""
        self._let_go()
        self._kept = answer
        self.client.keep(answer.response)
        self._kept_timer = asyncio.get_running_loop().call_later(_KEEP, self._let_go)

    def _take(self, position: int) -> _Answer | None:
        """The kept answer, where it has not passed ``position`` yet."""
        answer = self._kept
        if answer is None or answer.position > position:
            return None
        assert self._kept_timer is not None
        self._kept_timer.cancel()
        self._kept = self._kept_timer = None
        self.client.unkeep(answer.response)
        return answer

    def _let_go(self) -> None:
        if self._kept is not None:
            self.client.drop(self._kept.response)
            self._kept = None
        if self._kept_timer is not None:
            self._kept_timer.cancel()
            self._kept_timer = None

    # -- one place ----------------------------------------------------------------------------------------------------

    async def _open(self, place: _Place, start: int, end: int, give_up: float) -> aiohttp.ClientResponse:
        """Send the request for ``[start, end)`` to the remembered target or the server, and follow to the answer."""
        async with asyncio.timeout_at(give_up):
            if place.target is not None:
                generation = place.generation
                answer = await self._follow(place, place.target, start, end)
                if answer.status not in STALE_TARGET:
                    return answer
                answer.release()
                async with place.lock:
                    if place.generation == generation:
                        place.target = None
                        answer = await self._follow(place, place.url, start, end)
                        place.generation += 1
                        return answer
                if place.target is not None:
                    return await self._follow(place, place.target, start, end)
            return await self._follow(place, place.url, start, end)

    async def _follow(self, place: _Place, url: str, start: int, end: int) -> aiohttp.ClientResponse:
        headers = {"Range": f"bytes={start}-{end - 1}"}
        answer, there = await self.client.follow("GET", place.endpoint, url, headers, self._scope, repr(self))
        if answer.status in (200, 206) and there != url and origin(there)[1:] != origin(place.url)[1:]:
            place.target = there
        return answer


async def _outcome(work: Awaitable[aiohttp.ClientResponse]) -> aiohttp.ClientResponse | Exception:
    try:
        return await work
    except Exception as error:  # noqa: BLE001 - judged by whoever gets it
        return error
