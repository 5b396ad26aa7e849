"""The registry client: HTTP session, servers, authorisation, retries; manifests; the door to ranged reads and transfers.

One client per event loop and process. All its state lives on the loop: the aiohttp session (made at first use), the
authorizer's headers, the servers' health, the counters. Redirects are followed here, not by aiohttp, so that an
Authorization header goes to the server that it is for and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import ssl
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urljoin, urlsplit

import aiohttp
import yarl

from weenv.core import digest as digests
from weenv.core.errors import (
    ConfigError,
    SourceError,
    UnauthorizedError,
    UnavailableError,
    VerificationError,
    WeenvError,
)
from weenv.registry.auth import Authorizer, scope_of
from weenv.registry.challenge import MAX_TOKEN_ANSWER, TokenRequest, choose, parse_challenges
from weenv.registry.config import USER_AGENT, RegistryConfig, proxy_for
from weenv.registry.credentials import CredentialStore
from weenv.registry.health import Health
from weenv.registry.hosts import DEFAULT_TRUST, PULL, PUSH, Endpoint, Hosts, Trust, needs
from weenv.registry.internal import refuse_inside
from weenv.registry.policy import (
    MAX_HOPS,
    REDIRECTS,
    REFUSED,
    TRANSIENT,
    answer_time,
    parse_retry_after,
    retry_delay,
    status_error,
    unavailable,
)

if TYPE_CHECKING:
    from weenv.registry.manifest import Descriptor
    from weenv.registry.reference import Reference
    from weenv.registry.transfer import Transfer

log = logging.getLogger(__name__)

TRANSPORT_ERRORS = (aiohttp.ClientError, TimeoutError, ConnectionError, asyncio.IncompleteReadError)
"""What a broken or slow connection raises."""


@dataclass(slots=True)
class Counters:
    """What a client has done so far, but for whole blobs and manifests (:attr:`RegistryClient.transfer`, which no daemon uses).

    Written on the event loop, read by anyone: the metric families ``weenv_*_registry_total`` have a row for each.
    """

    requests: int = 0
    bytes: int = 0
    retries: int = 0
    redirects: int = 0
    renewals: int = 0
    range_ignored: int = 0
    raced: int = 0
    """Times that a server did not begin to answer in time and the next was asked as well."""
    rests: int = 0
    """Times that a server failed so often that the others go before it for a while."""
    throttled: int = 0
    """Answers with status 429: asked too often."""

    def rows(self) -> dict[str, int]:
        """By name, for metrics."""
        return asdict(self)


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of a URL: the unit that an Authorization header may be sent to (RFC 6454)."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "BAD_RECORD_TYPE")
"""OpenSSL's reasons when the other side does not speak TLS."""
_FOREIGN = 256
"""Servers that redirects led to and that wanted credentials of their own: so many are remembered."""
_PULL_SCOPE = re.compile(r"repository:[a-z0-9][a-z0-9._/-]{0,254}:pull\Z")


def speaks_plain(error: BaseException) -> bool:
    """True where a TLS handshake failed because the other side answered in plain text."""
    seen: BaseException | None = error
    for _ in range(8):
        reason = getattr(seen, "reason", None)  # of an SSLError: OpenSSL's; of urllib3's errors: another error
        if isinstance(seen, ssl.SSLError) and str(reason or "").upper().replace(" ", "_") in _NOT_TLS:
            return True
        inner = next((one for one in getattr(seen, "args", ()) if isinstance(one, BaseException)), None)
        cause = reason if isinstance(reason, BaseException) else inner or getattr(seen, "__cause__", None)
        seen = getattr(seen, "os_error", None) or cause
        if not isinstance(seen, BaseException):
            return False
    return False


_ERRNO = re.compile(r"\A(\d+)\Z|\[Errno (\d+)\]")
"""An errno (names that do not resolve have negative ones), or the first of those that a host's several addresses gave."""


def describe(error: BaseException) -> str:
    """A transport error in a few words, without URLs (signed URLs are secrets)."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its TLS certificate is not trusted"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return "TLS failed; perhaps it speaks plain HTTP"
    if isinstance(error, OSError) and (found := _ERRNO.search(str(error.errno or error))):
        return os.strerror(int(found[1] or found[2]))  # asyncio says "Connect call failed" and to where
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__


Item = TypeVar("Item")
Result = TypeVar("Result")
_Answer = tuple[int, dict[str, str], bytes]


class _Again(Exception):
    """This server's answer is not usable; another one's, or its next, may be."""

    def __init__(self, failure: WeenvError, retry_after: float | None = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.retry_after = retry_after


async def in_turn(
    items: Sequence[Item], start: Callable[[Item], Coroutine[Any, Any, Result]], patience: float, on_race: Callable[[], None],
    discard: Callable[[Result], None] = lambda _: None,
) -> AsyncGenerator[tuple[Item, Result | Exception, list[Item]], None]:  # fmt: skip
    """Start work on ``items`` one after the other; each outcome as it comes, with those that are still at work.

    The next begins when one has ended, or has not after ``patience`` seconds (``on_race`` is called then). Whoever stops asking
    for more has the rest called off; ``discard`` gets results that had come all the same.
    """
    rest = deque(items)
    running: dict[asyncio.Task[Result], Item] = {}
    try:
        while rest or running:
            if rest:
                item = rest.popleft()
                running[asyncio.get_running_loop().create_task(start(item))] = item
            done, _ = await asyncio.wait(running, timeout=patience if rest else None, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                on_race()
            for task in done:
                item = running.pop(task)
                error = task.exception()
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield item, task.result() if error is None else error, list(running.values())
    finally:
        for task in running:
            task.cancel()
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            if not isinstance(outcome, BaseException):
                discard(outcome)


def merge_headers(configured: Sequence[tuple[str, str]], headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """``headers`` and those that are configured for a server; ours win where both name one."""
    ours = {name.lower() for name in headers}
    return [*((name, value) for name, value in configured if name.lower() not in ours), *headers.items()]


@dataclass(eq=False)
class RegistryClient:
    """Talks to any number of registries. Use as ``async with RegistryClient() as client``."""

    config: RegistryConfig = field(default_factory=RegistryConfig)
    credentials: CredentialStore | None = None
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        config = self.config
        self.auth = Authorizer(self.credentials or CredentialStore(config.docker_config), self._fetch_token)
        self.hosts = Hosts(config)
        self.health = Health(config.mirror_rest, config.max_retry_after)
        self.ranged: set[str] = set()
        """Origins of servers that have honoured Range."""
        self._plain: set[str] = set()  # origins that were configured with TLS and do not speak it
        self._contexts: dict[Trust, ssl.SSLContext] = {}
        self._foreign: dict[tuple[tuple[str, str, int], str], tuple[Endpoint, str]] = {}
        self._kept: set[aiohttp.ClientResponse] = set()
        self._session: aiohttp.ClientSession | None = None
        self._transfer: Transfer | None = None

    async def __aenter__(self) -> RegistryClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None
        for answer in list(self._kept):
            self.drop(answer)
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The HTTP session of the running loop."""
        if self._session is None:
            config = self.config
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,
                    limit_per_host=config.connections_per_host,
                    keepalive_timeout=60.0,
                    ttl_dns_cache=60,
                    ssl=self.context(DEFAULT_TRUST),
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout,
                                              sock_read=config.stall_timeout),
                auto_decompress=False,
                read_bufsize=config.read_buffer,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": USER_AGENT, "Accept-Encoding": "identity"},
                skip_auto_headers=("Accept",),
            )  # fmt: skip
        return self._session

    def context(self, trust: Trust) -> ssl.SSLContext:
        """The TLS context for a server. Raises ConfigError where its certificates cannot be used."""
        context = self._contexts.get(trust)
        if context is None:
            if len(self._contexts) > 100:  # files that are replaced again and again
                self._contexts.clear()
            context = self._contexts[trust] = self.config.ssl_context(trust.ca, trust.client, bool(trust.skip_verify))
        return context

    def endpoints(self, host: str, capability: str = PULL) -> list[Endpoint]:
        """The servers that may be asked, in their configured order. Raises SourceError where there are none."""
        try:
            found = [self.settled(one) for one in self.hosts.endpoints(host, capability)]
        except ConfigError as error:
            raise SourceError(error.message, hint=error.hint) from error
        return found[:1] if capability == PUSH else found

    def settled(self, endpoint: Endpoint) -> Endpoint:
        """The server over plain HTTP, where it is known to speak no TLS although that is configured."""
        return endpoint.plain() if endpoint.fallback and endpoint.origin in self._plain else endpoint

    def turn_plain(self, endpoint: Endpoint, error: BaseException) -> Endpoint | None:
        """After a failed connection: the server over plain HTTP, where that is to be tried; else None."""
        if not endpoint.fallback or not speaks_plain(error):
            return None
        self._plain.add(endpoint.origin)
        log.info("server speaks plain HTTP, its TLS settings are not used", extra={"host": endpoint.host})
        return endpoint.plain()

    def failed(self, endpoint: Endpoint, reason: str, retry_after: float | None = None) -> None:
        """A server gave no usable answer."""
        now = asyncio.get_running_loop().time()
        if retry_after is not None:
            self.health.throttled(endpoint, retry_after, now)
        elif self.health.failed(endpoint, now):
            self.counters.rests += 1
            with contextlib.suppress(ConfigError):
                if len(self.hosts.endpoints(endpoint.namespace, PULL)) > 1:
                    fields = {"host": endpoint.host, "reason": reason}
                    log.warning("a mirror rests: the others are asked before it", extra=fields)

    def keep(self, answer: aiohttp.ClientResponse) -> None:
        """Have an answer closed with the client, if nobody does so before."""
        self._kept.add(answer)

    def unkeep(self, answer: aiohttp.ClientResponse) -> None:
        """Somebody else closes it now."""
        self._kept.discard(answer)

    def drop(self, answer: aiohttp.ClientResponse) -> None:
        """Close an answer that was kept."""
        self._kept.discard(answer)
        answer.close()

    async def send(
        self, method: str, url: str, headers: Mapping[str, str], endpoint: Endpoint, **extra: Any
    ) -> aiohttp.ClientResponse:
        """One request, no redirect followed, through the environment's proxy; to ``endpoint`` or where it led.

        The answer's header is here in bounded time, whatever drips in. Raises TRANSPORT_ERRORS, ConfigError.
        """
        self.counters.requests += 1
        given: Mapping[str, str] | list[tuple[str, str]] = headers
        if endpoint.headers and origin(url) == origin(endpoint.origin):
            given = merge_headers(endpoint.headers, headers)
        if endpoint.trust is not DEFAULT_TRUST:
            extra["ssl"] = self.context(endpoint.trust)
        if endpoint.dial_timeout is not None:
            extra["timeout"] = aiohttp.ClientTimeout(
                total=None, sock_connect=endpoint.dial_timeout, sock_read=self.config.stall_timeout
            )
        # Signed URLs are sent as they came: yarl's own normalisation would decode parts of what was signed.
        target = yarl.URL(url, encoded=url.isascii() and url.isprintable() and " " not in url)
        async with asyncio.timeout(answer_time(self.config)):
            answer = await self.session.request(
                method, target, headers=given, allow_redirects=False, proxy=proxy_for(url), **extra
            )
        self.counters.throttled += answer.status == 429
        return answer

    async def follow(
        self, method: str, endpoint: Endpoint, url: str, headers: dict[str, str], scope: str, what: str
    ) -> tuple[aiohttp.ClientResponse, str]:
        """A request with authorisation and redirects: the first answer that is neither, to be released, and its URL.

        ``url`` is one of ``endpoint``'s or where it led before. The Authorization header for ``endpoint`` goes to its own
        origin only; a server that a redirect led to and that asks for credentials gets those for its own host.
        """
        hops, renewed = 0, set[tuple[str, str, int]]()
        while True:
            here = origin(url)
            server, its_scope = (endpoint, scope)
            if here != origin(endpoint.origin):
                known = None if endpoint.trust.skip_verify else self._foreign.get((here, scope))
                server, its_scope = known or (endpoint, "")
            header = await self.auth.header(server, its_scope) if here == origin(server.origin) else None
            try:
                answer = await self.send(method, url, headers | ({"Authorization": header} if header else {}), endpoint)
            except aiohttp.ClientError as error:
                plain = self.turn_plain(endpoint, error) if here == origin(endpoint.origin) else None
                if plain is None:
                    raise
                endpoint, url = plain, "http" + url.removeprefix("https")
                continue
            try:
                if answer.status in REDIRECTS:
                    hops += 1
                    url = await self.next_hop(url, answer, endpoint.name, hops)
                elif answer.status not in REFUSED or here in renewed:
                    return answer, url
                else:
                    renewed.add(here)
                    challenges = answer.headers.getall("WWW-Authenticate", [])
                    if here != origin(server.origin):
                        foreign = self.meet(endpoint, url, scope, challenges)
                        if foreign is None:
                            return answer, url
                        server, its_scope = foreign
                    if not await self.renew(server, its_scope, header, challenges, what):
                        return answer, url
            except BaseException:
                answer.release()
                raise
            answer.release()

    def meet(self, endpoint: Endpoint, url: str, scope: str, challenges: list[str]) -> tuple[Endpoint, str] | None:
        """Another server, which a redirect of ``endpoint``'s led to and which asks for credentials: who it is, and the scope
        that it names.

        None where its answer is no challenge that can be answered (a storage server's refusal), and where anybody may be
        answering in its name: over plain HTTP that is not configured, or because ``endpoint``'s ``skip_verify`` holds for
        where it leads as well.
        """
        plain = urlsplit(url).scheme == "http" and not self.config.is_plain(urlsplit(url).netloc.rpartition("@")[2])
        if plain or endpoint.trust.skip_verify:
            return None
        challenge = choose(parse_challenges(challenges))
        asked = challenge.params.get("scope", "") if challenge is not None else ""
        if challenge is None or (asked and _PULL_SCOPE.match(asked) is None):
            return None
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        if len(self._foreign) >= _FOREIGN:
            del self._foreign[next(iter(self._foreign))]
        found = self._foreign[origin(url), scope] = (Endpoint(host, host, parts.scheme), asked)
        return found

    async def next_hop(self, url: str, answer: aiohttp.ClientResponse, host: str, hops: int) -> str:
        """The URL that a redirect leads to. Raises SourceError for one that is not to be followed."""
        location = answer.headers.get("Location", "")
        try:
            target = urljoin(url, location)
            parts = urlsplit(target)
            usable = bool(location) and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # no address within the brackets, no such port
            usable = False
        if not usable:
            raise SourceError(f"{host} redirects to nowhere")
        if hops > MAX_HOPS:
            raise SourceError(f"{host} redirects more than {MAX_HOPS} times")
        plain = self.config.is_plain(parts.netloc) and self.config.is_configured(parts.netloc)  # loopback is not by itself
        if parts.scheme == "http" and urlsplit(url).scheme == "https" and not plain:
            raise SourceError(
                f"{host} redirects from TLS to plain HTTP at {parts.hostname}",
                hint="list that host as plain HTTP if this is meant",
            )
        await asyncio.to_thread(refuse_inside, url, target, self.config, f"{host} redirects to {parts.hostname}")
        self.counters.redirects += 1
        return target

    async def request(
        self, method: str, host: str, path: str, *, what: str, scope: str, headers: dict[str, str] | None = None,
        limit: int = 4 << 20, accept: frozenset[int] = frozenset({200}),
    ) -> tuple[int, dict[str, str], bytes]:  # fmt: skip
        """A small idempotent request to a registry's API with everything around it: mirrors, auth, redirects, retries.

        Returns (status, headers with lower-case names, body of at most ``limit`` bytes). ``accept`` are the statuses
        handed back; others raise the matching SourceError. ``what`` names the thing asked for in errors. A body asked for
        by digest is verified, and asked for again where it is wrong.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + self.config.deadline
        final: dict[str, _Answer | WeenvError] = {}  # by origin: what will not change
        failures = 0
        while True:
            failure: WeenvError | None = None
            retry_after: float | None = None
            endpoints = self.endpoints(host, needs(method, path))
            order = [one for one in self.health.order(endpoints, now()) if one.origin not in final]
            ask = partial(self._ask, method, path=path, what=what, scope=scope, headers=headers or {}, limit=limit,
                          deadline=deadline)  # fmt: skip
            async with aclosing(in_turn(order, ask, self.config.race_after, self._count_race)) as outcomes:
                async for endpoint, outcome, _ in outcomes:
                    if isinstance(outcome, _Again):
                        failure, said = outcome.failure, outcome.retry_after
                        if said is not None:
                            retry_after = said if retry_after is None else min(said, retry_after)
                    elif isinstance(outcome, SourceError | ConfigError):
                        final[endpoint.origin] = outcome
                    elif isinstance(outcome, Exception):
                        raise outcome
                    elif outcome[0] in accept and outcome[0] != 404:
                        return outcome
                    else:
                        error = status_error(outcome[0], what, endpoint.name)
                        final[endpoint.origin] = outcome if outcome[0] in accept else error
            if failure is None:
                verdict = final[endpoints[-1].origin]  # the registry's own word counts
                if isinstance(verdict, WeenvError):
                    raise verdict
                return verdict
            failures += 1
            delay = retry_delay(self.config, failures, retry_after)
            if delay is None or now() + delay > deadline:
                raise failure
            self.counters.retries += 1
            await asyncio.sleep(delay)

    def _count_race(self) -> None:
        self.counters.raced += 1

    async def _ask(
        self, method: str, endpoint: Endpoint, *, path: str, what: str, scope: str, headers: dict[str, str], limit: int,
        deadline: float,
    ) -> _Answer:  # fmt: skip
        """One server's answer. Raises _Again, or SourceError or ConfigError where asking it again brings nothing else."""
        now = asyncio.get_running_loop().time()
        if (pause := self.health.wait(endpoint, now)) > 0:
            raise _Again(unavailable(endpoint.name, what, "asked too often", pause), pause)
        try:
            async with asyncio.timeout_at(min(deadline, now + answer_time(self.config) + limit / self.config.min_rate)):
                answer, _ = await self.follow(method, endpoint, endpoint.url(path), headers, scope, what)
                async with answer:
                    body = b"" if method == "HEAD" else await read_bounded(answer, limit, f"{endpoint.name}: {what}")
        except TRANSPORT_ERRORS as error:
            self.failed(endpoint, describe(error))
            raise _Again(unavailable(endpoint.name, what, describe(error))) from error
        except UnavailableError as error:  # its token could not be had
            self.failed(endpoint, error.message)
            raise _Again(error, error.retry_after) from error
        self.counters.bytes += len(body)
        if answer.status in TRANSIENT:
            reason, retry_after = f"status {answer.status}", parse_retry_after(answer.headers.get("Retry-After"))
            self.failed(endpoint, reason, retry_after)
            raise _Again(unavailable(endpoint.name, what, reason, retry_after), retry_after)
        wanted = path.rpartition("/")[2]
        if method == "GET" and answer.status == 200 and digests.is_digest(wanted):
            try:
                digests.verify(body, wanted, what)
            except VerificationError as error:
                self.failed(endpoint, "wrong bytes")
                raise _Again(error) from error
        self.health.worked(endpoint)
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}, body

    async def renew(self, server: Endpoint, scope: str, refused: str | None, challenges: list[str], what: str) -> bool:
        """True where a refused request is worth another try with a new Authorization header."""
        self.counters.renewals += 1
        try:
            return await self.auth.renew(server, scope, refused, challenges) is not None
        except UnauthorizedError as error:
            raise UnauthorizedError(f"cannot read {what}: {error.message}", hint=error.hint) from error

    async def _fetch_token(self, request: TokenRequest, authorization: str, server: Endpoint) -> bytes:
        host = urlsplit(request.url).netloc
        what = f"{server.name} wants a token fetched from {host}"
        await asyncio.to_thread(refuse_inside, server.origin, request.url, self.config, what)
        headers = {"Accept": "application/json"}
        if authorization:
            headers["Authorization"] = authorization
        if request.body:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        failures = 0
        while True:
            retry_after: float | None = None
            try:
                # A redirect is not followed: the password would go where nobody asked for it.
                answer = await self.send(request.method, request.url, headers, server, data=request.body or None)
                async with answer, asyncio.timeout(answer_time(self.config)):
                    body = await read_bounded(answer, MAX_TOKEN_ANSWER, f"the token of {host}")
                    if answer.status == 200:
                        return body
                    retry_after = parse_retry_after(answer.headers.get("Retry-After"))
                    if answer.status not in TRANSIENT:
                        if answer.status in (400, 401, 403):
                            raise UnauthorizedError(f"{host} gives no token ({answer.status})")
                        raise status_error(answer.status, "a token", host)
                    last = f"status {answer.status}"
            except TRANSPORT_ERRORS as error:
                last = describe(error)
            failures += 1
            delay = retry_delay(self.config, failures, retry_after)
            if delay is None:
                raise unavailable(host, "a token", last, retry_after)
            await asyncio.sleep(delay)

    @property
    def transfer(self) -> Transfer:
        """Whole manifests and blobs, in both directions, through the oras library."""
        if self._transfer is None:
            # Imported when first needed: oras and requests take longer to import than a daemon that only reads
            # ranges takes to start.
            from weenv.registry.transfer import Transfer

            self._transfer = Transfer(self)
        return self._transfer

    async def get_manifest(self, reference: Reference) -> tuple[bytes, Descriptor]:
        """A manifest or index, verified against the reference's digest (or the registry's own, for a tag).

        Raises SourceError, VerificationError, FormatError.
        """
        return await self.transfer.pull_manifest(reference)

    async def has_blob(self, host: str, repository: str, digest: str) -> int | None:
        """The size of a blob that the repository holds, or None where it does not (a HEAD request)."""
        status, headers, _ = await self.request(
            "HEAD", host, f"/v2/{repository}/blobs/{digest}", what=f"blob {digest}", scope=scope_of(repository),
            accept=frozenset({200, 404}),
        )  # fmt: skip
        if status == 404:
            return None
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdigit()):
            raise SourceError(f"{host} does not say how large {digest} is")
        return int(length)


async def read_bounded(answer: aiohttp.ClientResponse, limit: int, what: str) -> bytes:
    """The whole body, if it has at most ``limit`` bytes. Raises SourceError."""
    parts: list[bytes] = []
    size = 0
    async for chunk in answer.content.iter_any():
        size += len(chunk)
        if size > limit:
            answer.close()
            raise SourceError(f"{what} is larger than {limit} bytes")
        parts.append(chunk)
    return b"".join(parts)
