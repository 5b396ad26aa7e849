"""The registry client: HTTP session, authorisation, retries; manifests; and the door to ranged reads and transfers.

One client per event loop and process. All its state lives on the loop: the aiohttp session (made at first use), the
authorizer's headers, the counters. Redirects are followed here, not by aiohttp, so that an Authorization header goes to
the registry's own origin and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

import aiohttp
import yarl

from weenv.core.errors import SourceError, UnauthorizedError
from weenv.registry.auth import Authorizer, scope_of
from weenv.registry.challenge import MAX_TOKEN_ANSWER, TokenRequest
from weenv.registry.config import USER_AGENT, RegistryConfig, proxy_for
from weenv.registry.credentials import CredentialStore
from weenv.registry.internal import leads_inside
from weenv.registry.policy import (
    MAX_HOPS,
    REDIRECTS,
    REFUSED,
    TRANSIENT,
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
    """What a client has done so far; read by metrics."""

    requests: int = 0
    bytes: int = 0
    retries: int = 0
    redirects: int = 0
    renewals: int = 0
    range_ignored: int = 0


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of a URL: the unit that an Authorization header may be sent to (RFC 6454)."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


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


@dataclass(eq=False)
class RegistryClient:
    """Talks to any number of registries. Use as ``async with RegistryClient() as client``."""

    config: RegistryConfig = field(default_factory=RegistryConfig)
    credentials: CredentialStore | None = None
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        store = self.credentials or CredentialStore(self.config.docker_config)
        self.auth = Authorizer(self.config, store, self._fetch_token)
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
                    ssl=config.ssl_context(),
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

    async def send(self, method: str, url: str, headers: dict[str, str], **extra: Any) -> aiohttp.ClientResponse:
        """One request, no redirect followed, through the environment's proxy. Raises TRANSPORT_ERRORS."""
        self.counters.requests += 1
        # Signed URLs are sent as they came: yarl's own normalisation would decode parts of what was signed.
        target = yarl.URL(url, encoded=url.isascii() and url.isprintable() and " " not in url)
        return await self.session.request(method, target, headers=headers, allow_redirects=False, proxy=proxy_for(url), **extra)

    def next_hop(self, url: str, answer: aiohttp.ClientResponse, host: str, hops: int) -> str:
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
        if leads_inside(url, target, self.config):
            raise SourceError(
                f"{host} redirects to {parts.hostname}, which is this node or its link",
                hint="list that host in [registry] allow_sources if this is meant",
            )
        self.counters.redirects += 1
        return target

    async def request(
        self, method: str, host: str, path: str, *, what: str, scope: str, headers: dict[str, str] | None = None,
        limit: int = 4 << 20, accept: frozenset[int] = frozenset({200}),
    ) -> tuple[int, dict[str, str], bytes]:  # fmt: skip
        """A small idempotent request to a registry's API with everything around it: auth, redirects, retries.

        Returns (status, headers with lower-case names, body of at most ``limit`` bytes). ``accept`` are the statuses
        handed back; others raise the matching SourceError. ``what`` names the thing asked for in errors.
        """
        deadline = asyncio.get_running_loop().time() + self.config.deadline
        failures, retry_after, last = 0, None, ""
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    status, answer, body = await self._attempt(method, host, path, what, scope, headers or {}, limit)
                if status in accept:
                    return status, answer, body
                retry_after = parse_retry_after(answer.get("retry-after"))
                if status not in TRANSIENT:
                    raise status_error(status, what, host)
                last = f"status {status}"
            except TRANSPORT_ERRORS as error:
                last = describe(error)
            failures += 1
            delay = retry_delay(self.config, failures, retry_after)
            if delay is None or asyncio.get_running_loop().time() + delay > deadline:
                raise unavailable(host, what, last, retry_after)
            self.counters.retries += 1
            await asyncio.sleep(delay)

    async def _attempt(
        self, method: str, host: str, path: str, what: str, scope: str, headers: dict[str, str], limit: int
    ) -> tuple[int, dict[str, str], bytes]:
        url = self.config.base_url(host) + path
        home = origin(url)
        renewed, hops = False, 0
        while True:
            header = await self.auth.header(host, scope) if origin(url) == home else None
            answer = await self.send(method, url, headers | ({"Authorization": header} if header else {}))
            async with answer:
                if answer.status in REDIRECTS:
                    hops += 1
                    url = self.next_hop(url, answer, host, hops)
                    continue
                if answer.status in REFUSED and origin(url) == home and not renewed:
                    renewed = True
                    challenges = answer.headers.getall("WWW-Authenticate", [])
                    if await self.renew(host, scope, header, challenges, what):
                        continue
                body = b"" if method == "HEAD" else await read_bounded(answer, limit, f"{host}: {what}")
                self.counters.bytes += len(body)
                return answer.status, {name.lower(): value for name, value in answer.headers.items()}, body

    async def renew(self, host: str, scope: str, refused: str | None, challenges: list[str], what: str) -> bool:
        """True where a refused request is worth another try with a new Authorization header."""
        self.counters.renewals += 1
        try:
            return await self.auth.renew(host, scope, refused, challenges) is not None
        except UnauthorizedError as error:
            raise UnauthorizedError(f"cannot read {what}: {error.message}", hint=error.hint) from error

    async def _fetch_token(self, request: TokenRequest, authorization: str) -> bytes:
        host = urlsplit(request.url).netloc
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
                answer = await self.send(request.method, request.url, headers, data=request.body or None)
                async with answer:
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
