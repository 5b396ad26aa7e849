"""Ranged reads of one registry blob: the data path of lazy layers.

One redirect target per blob is remembered. When it stops working (its signed URL expired), it is resolved once more from
the registry and the read goes on. A stream that breaks is resumed where it stopped, and only tries without any progress
count against the limit.

Shared state: ``_target`` and ``_generation`` change between awaits of the loop only. Many readers may see one expired
target; the lock lets the first resolve it, the others find a newer generation and use that.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

import aiohttp

from weenv.core import digest as digests
from weenv.core.errors import NotFoundInSource, SourceError
from weenv.registry.auth import scope_of
from weenv.registry.client import TRANSPORT_ERRORS, RegistryClient, describe, origin
from weenv.registry.policy import (
    REDIRECTS,
    REFUSED,
    STALE_TARGET,
    TRANSIENT,
    parse_retry_after,
    retry_delay,
    status_error,
    unavailable,
)

log = logging.getLogger(__name__)

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(?:\d{1,18}|\*)\Z")


class _TryAgain(Exception):
    """This attempt failed in a way that another may not."""

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class RegistrySource:
    """A blob of ``size`` bytes in a registry repository; a :class:`weenv.registry.source.BlobSource`.

    What it returns has the right length but is not verified: whoever knows the frame's or the blob's digest does that.
    """

    def __init__(self, client: RegistryClient, host: str, repository: str, digest: str, size: int) -> None:
        self.client = client
        self.host = host
        self.repository = repository
        self.digest = digests.check_digest(digest)
        self.size = size
        self.ranges: bool | None = None
        """Whether the server honours Range: None until it is known."""
        self._scope = scope_of(repository)
        self._url = f"{client.config.base_url(host)}/v2/{repository}/blobs/{digest}"
        self._home = origin(self._url)
        self._target: str | None = None
        self._generation = 0
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"{self.host}/{self.repository}@{self.digest}"

    async def close(self) -> None:
        """Nothing is held open: connections belong to the client."""

    async def read(self, offset: int, length: int, *, deadline: float | None = None) -> bytes:
        """Exactly ``length`` bytes from ``offset``. Raises SourceError (see :meth:`stream`).

        ``deadline`` is in seconds from now, with all retries; the configured one by default.
        """
        async with aclosing(self.stream(offset, length, deadline=deadline)) as chunks:
            return b"".join([chunk async for chunk in chunks])

    async def stream(self, offset: int, length: int, *, deadline: float | None = None) -> AsyncGenerator[bytes, None]:
        """The bytes ``[offset, offset + length)`` in chunks as they arrive; a broken stream is resumed.

        Raises NotFoundInSource, UnauthorizedError, UnavailableError (also where the deadline passed), SourceError.
        Closing the iterator early drops the connection.
        """
        if offset < 0 or length < 0 or offset + length > self.size:
            raise SourceError(f"read of {length} bytes at {offset} beyond the {self.size} bytes of {self.digest}")
        config, now = self.client.config, asyncio.get_running_loop().time
        give_up = now() + (config.deadline if deadline is None else deadline) + length / config.min_rate
        position, end, failures = offset, offset + length, 0
        while position < end:
            before = position
            answer: aiohttp.ClientResponse | None = None
            retry_after: float | None = None
            try:
                answer = await self._open(position, end, give_up)
                skip = self._check(answer, position, end)
                async for chunk in answer.content.iter_any():
                    if skip:
                        if skip >= len(chunk):
                            skip -= len(chunk)
                            chunk = b""
                        else:
                            chunk, skip = chunk[skip:], 0
                    if position + len(chunk) > end:
                        chunk = chunk[: end - position]
                    if chunk:
                        position += len(chunk)
                        self.client.counters.bytes += len(chunk)
                        yield chunk
                    if position >= end or now() > give_up:
                        break
                if position >= end:
                    return
                reason = "the answer ended early" if now() <= give_up else "too slow"
            except _TryAgain as error:
                reason, retry_after = str(error), error.retry_after
            except TRANSPORT_ERRORS as error:
                reason = describe(error)
            finally:
                if answer is not None:
                    answer.release()  # back to the pool where the body was read to its end, closed otherwise
            failures = 1 if position > before else failures + 1
            delay = retry_delay(config, failures, retry_after)
            if delay is None or now() + delay > give_up:
                raise unavailable(self.host, self.digest, reason, retry_after)
            self.client.counters.retries += 1
            log.debug("retrying ranged read", extra={"host": self.host, "reason": reason, "failures": failures})
            await asyncio.sleep(delay)

    async def public_url(self) -> str:
        """Where anybody can have the blob now, without our credentials: the registry, or a signed URL that it gave out.

        Empty where only we can have it. Reads a byte to know. Raises SourceError.
        """
        if not self.size:
            return ""
        give_up = asyncio.get_running_loop().time() + self.client.config.deadline
        try:
            answer = await self._open(0, 1, give_up)
        except TRANSPORT_ERRORS as error:
            raise unavailable(self.host, self.digest, describe(error)) from error
        try:
            if answer.status not in (200, 206):
                raise status_error(answer.status, f"{self.repository}@{self.digest}", self.host)
            if self._target is not None:
                return self._target
            home = answer.url.host, answer.url.port
            return self._url if "Authorization" not in answer.request_info.headers and home == self._home[1:] else ""
        finally:
            answer.close()

    def _check(self, answer: aiohttp.ClientResponse, position: int, end: int) -> int:
        """Check status and headers of an answer; returns how many bytes of its body come before ``position``."""
        encoding = answer.headers.get("Content-Encoding", "identity").lower()
        if answer.status in (200, 206) and encoding not in ("identity", ""):
            raise SourceError(f"{self.host} sends {self.digest} with Content-Encoding {encoding[:40]!r}")
        if answer.status == 206:
            match = _CONTENT_RANGE.match(answer.headers.get("Content-Range", ""))
            if match is None or int(match[1]) != position or int(match[2]) < position:
                raise SourceError(f"{self.host} answered with another range of {self.digest} than asked for")
            self.ranges = True
            return 0
        if answer.status == 200:
            if (position, end) == (0, self.size):
                return 0
            if self.ranges is not False:
                self.ranges = False
                self.client.counters.range_ignored += 1
                log.warning("registry ignores Range", extra={"host": self.host, "blob": self.digest})
            if position > self.client.config.max_skip:
                raise SourceError(
                    f"{self.host} ignores Range: reading {self.digest} at {position} would fetch all before it",
                    hint="this registry cannot serve layers lazily",
                )
            return position
        if answer.status == 416:
            raise NotFoundInSource(f"{self.host} holds fewer bytes of {self.digest} than its descriptor says")
        if answer.status in TRANSIENT:
            raise _TryAgain(f"status {answer.status}", parse_retry_after(answer.headers.get("Retry-After")))
        raise status_error(answer.status, f"{self.repository}@{self.digest}", self.host)

    async def _open(self, start: int, end: int, give_up: float) -> aiohttp.ClientResponse:
        """Send the request for ``[start, end)`` to the remembered target or the registry, and follow to the answer."""
        async with asyncio.timeout_at(give_up):
            if self._target is not None:
                generation = self._generation
                answer = await self._follow(self._target, start, end)
                if answer.status not in STALE_TARGET:
                    return answer
                answer.release()
                async with self._lock:
                    if self._generation == generation:
                        self._target = None
                        answer = await self._follow(self._url, start, end)
                        self._generation += 1
                        return answer
                if self._target is not None:
                    return await self._follow(self._target, start, end)
            return await self._follow(self._url, start, end)

    async def _follow(self, url: str, start: int, end: int) -> aiohttp.ClientResponse:
        client, renewed, hops = self.client, False, 0
        byte_range = f"bytes={start}-{end - 1}"
        while True:
            home = origin(url) == self._home
            header = await client.auth.header(self.host, self._scope) if home else None
            answer = await client.send(
                "GET", url, {"Range": byte_range, "Authorization": header} if header else {"Range": byte_range}
            )
            try:
                if answer.status in REDIRECTS:
                    hops += 1
                    url = client.next_hop(url, answer, self.host, hops)
                elif answer.status in REFUSED and home and not renewed:
                    renewed = True
                    challenges = answer.headers.getall("WWW-Authenticate", [])
                    if not await client.renew(self.host, self._scope, header, challenges, repr(self)):
                        return answer
                else:
                    if answer.status in (200, 206) and hops and not home:
                        self._target = url
                    return answer
            except BaseException:
                answer.release()
                raise
            answer.release()
