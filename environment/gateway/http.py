"""The gateway over HTTP: one handler between :mod:`weenv.environment.gateway.protocol` and the service.

Read-only: GET and HEAD, no body. Everything that is refused is a JSON error as the distribution specification has them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import json
import logging
import os
import stat
import time
from collections.abc import Mapping
from urllib.parse import quote

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from weenv.core.errors import ConfigError, NotFoundInSource, UnavailableError, WeenvError
from weenv.core.log import printable
from weenv.core.regular import read_whole, regular
from weenv.environment.gateway.blobs import Blobs
from weenv.environment.gateway.metrics import Metrics
from weenv.environment.gateway.protocol import (
    BASE,
    BLOBS,
    MANIFESTS,
    REFERRERS,
    TAGS,
    Question,
    Refused,
    accepts_manifest,
    error_body,
    matches_etag,
    parse_path,
    parse_range,
    status_of,
)
from weenv.environment.gateway.service import Blob, Gateway
from weenv.registry.manifest import OCI_INDEX, OCI_MANIFEST

log = logging.getLogger(__name__)

_VERSION = {"Docker-Distribution-API-Version": "registry/2.0"}
_MAX_TAGS = 10_000
_SEND = 1 << 20
"""Bytes handed to a connection at a time."""


def read_users(path: str) -> dict[str, str]:
    """``NAME:SECRET`` a line; empty lines and ``#`` lines do not count. Raises ConfigError, also where others may read it."""
    try:
        with open(path, "rb", opener=regular) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode) or mode & 0o077:
                raise ConfigError(f"{path} can be read by others", hint=f"chmod 600 {path}")
            lines = read_whole(file, 1 << 20).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not text'}") from error
    users: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, secret = line.partition(":")
        if not colon or not name or len(secret) < 8:
            raise ConfigError(f"{path}:{number}: not NAME:SECRET with a secret of at least 8 characters")
        users[name] = secret
    if not users:
        raise ConfigError(f"{path} names nobody", hint="leave gateway.users_file out to let anybody in")
    return users


def _known(users: Mapping[str, str], authorization: str) -> bool:
    """Whether an Authorization header (RFC 7617, RFC 6750) is one of the users'."""
    scheme, _, value = authorization[:4096].partition(" ")
    given = value.strip()
    if scheme.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).decode()
        except (binascii.Error, ValueError):
            return False
    elif scheme.lower() != "bearer":
        return False
    found = False
    for name, secret in users.items():
        wanted = f"{name}:{secret}" if scheme.lower() == "basic" else secret
        # All of them: the time tells nothing. What is no UTF-8 in a header comes as surrogates.
        found |= hmac.compare_digest(given.encode(errors="surrogateescape"), wanted.encode())
    return found


class Server:
    """Answers requests; :attr:`app` is served by the daemon."""

    def __init__(self, gateway: Gateway, blobs: Blobs, metrics: Metrics) -> None:
        self._gateway = gateway
        self._blobs = blobs
        self._metrics = metrics
        self._config = gateway.config
        self._users = read_users(self._config.users_file) if self._config.users_file else None
        self.busy: set[RequestHandler] = set()
        """Connections that a request is being answered on."""
        self.app = web.Application(client_max_size=1)
        self.app.router.add_route("*", "/{path:.*}", self.handle)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One request."""
        begin = time.monotonic()
        kind, status = "other", 499
        self.busy.add(request.protocol)
        self._metrics.active.set(len(self.busy))
        try:
            try:
                question = self._admit(request)
                kind = question.kind
                answer = await self._answer(request, question)
            except WeenvError as error:
                answer = self._refuse(request, error)
            except (asyncio.CancelledError, ConnectionError):
                raise  # the client has gone
            except Exception as error:  # a client gets an answer whatever is wrong
                log.error("internal error: %s", error, exc_info=error, extra={"path": printable(request.raw_path[:300])})
                answer = _json_error(500, "UNKNOWN", "internal error; the gateway's log says more")
            status = answer.status
            return answer
        finally:
            self.busy.discard(request.protocol)
            self._metrics.active.set(len(self.busy))
            self._metrics.requests.labels(kind=kind, status=str(status)).inc()
            self._metrics.seconds.labels(kind=kind).observe(time.monotonic() - begin)
            log.debug(
                "answered",
                extra={
                    "method": request.method, "path": printable(request.raw_path[:300]), "status": status,
                    "ms": round((time.monotonic() - begin) * 1000),
                },
            )  # fmt: skip

    def _admit(self, request: web.Request) -> Question:
        """What is asked, by somebody who may. Raises Refused."""
        if len(self.busy) > self._config.requests:
            raise Refused(429, "TOOMANYREQUESTS", "too many requests at a time")
        if self._users is not None and not _known(self._users, request.headers.get("Authorization", "")):
            raise Refused(401, "UNAUTHORIZED", "authentication required")
        if request.method not in ("GET", "HEAD"):
            raise Refused(405, "UNSUPPORTED", "this registry is read-only")
        if request.body_exists:
            raise Refused(413, "SIZE_INVALID", "a request with a body")
        return parse_path(request.rel_url.raw_path)

    def _refuse(self, request: web.Request, error: WeenvError) -> web.Response:
        status, code = status_of(error)
        level = logging.WARNING if status >= 500 else logging.INFO
        log.log(  # also of what is not there: who asks by HEAD, as docker does, is told a status and no more
            level, "refused: %s", printable(error.message[:500]),
            extra={"method": request.method, "path": printable(request.raw_path[:300]), "status": status, "code": code},
        )  # fmt: skip
        answer = _json_error(status, code, str(error) or error.message, error.hint)
        if status == 401:
            answer.headers["WWW-Authenticate"] = 'Basic realm="weenv gateway", charset="UTF-8"'
        elif status == 405:
            answer.headers["Allow"] = "GET, HEAD"
        elif status == 429:
            answer.headers["Retry-After"] = "1"
        elif isinstance(error, UnavailableError):
            answer.headers["Retry-After"] = str(int(min(max(error.retry_after or 1.0, 1.0), 3600.0)))
        if status in (405, 413):
            answer.force_close()
        return answer

    async def _answer(self, request: web.Request, question: Question) -> web.StreamResponse:
        if question.kind == BASE:
            return web.json_response({}, headers=_VERSION)
        if question.kind == MANIFESTS:
            return await self._manifest(request, question)
        if question.kind == BLOBS:
            try:
                return await self._blob(request, await self._gateway.blob(question.name, question.target))
            except NotFoundInSource as error:
                raise Refused(404, "BLOB_UNKNOWN", error.message, hint=error.hint) from error
        if question.kind == TAGS:
            return await self._tags(request, question.name)
        assert question.kind == REFERRERS
        return _referrers(request, question.target)

    async def _manifest(self, request: web.Request, question: Question) -> web.Response:
        if not accepts_manifest(request.headers.getall("Accept", [])):
            # Docker's own manifests have neither annotations nor zstd layers; distribution answers 404, too.
            raise Refused(404, "MANIFEST_UNKNOWN", "its manifest is an OCI image manifest, which the client does not accept")
        image = await self._gateway.manifest(question.name, question.target)
        self._metrics.images.set(self._gateway.store.count()[0])
        headers = _headers(image.digest)
        headers["Content-Type"] = OCI_MANIFEST
        headers["Vary"] = "Accept"
        if matches_etag(request.headers.get("If-None-Match"), image.digest):
            return web.Response(status=304, headers=headers)
        return web.Response(body=image.manifest, headers=headers)

    async def _blob(self, request: web.Request, blob: Blob) -> web.StreamResponse:
        headers = _headers(blob.digest)
        headers |= {
            "Content-Type": "application/octet-stream", "Accept-Ranges": "bytes",
            "Cache-Control": "max-age=31536000, immutable", "X-Content-Type-Options": "nosniff",
        }  # fmt: skip
        if matches_etag(request.headers.get("If-None-Match"), blob.digest):
            return web.Response(status=304, headers=headers)
        if request.method == "HEAD":
            head = web.StreamResponse(headers=headers)
            head.content_length = blob.size
            return head
        if blob.origin is not None:
            url = await self._blobs.redirect(blob.origin, blob.digest, blob.size)
            if url:
                self._metrics.redirects.inc()
                log.debug("redirected", extra={"blob": blob.digest, "host": blob.origin.host})
                return web.Response(
                    status=307, headers={"Location": url, "Docker-Content-Digest": blob.digest, "Cache-Control": "no-store"}
                )
        wanted = request.headers.get("Range")
        if (unless := request.headers.get("If-Range")) is not None and unless.strip() != f'"{blob.digest}"':
            wanted = None
        try:
            part = parse_range(wanted, blob.size)
        except Refused as error:
            refusal = self._refuse(request, error)
            refusal.headers["Content-Range"] = f"bytes */{blob.size}"
            return refusal
        start, end = part or (0, blob.size)
        if part is not None:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{blob.size}"
        status = 200 if part is None else 206
        if blob.data is not None:
            return web.Response(status=status, body=blob.data[start:end], headers=headers)
        return await self._stream(request, blob, web.StreamResponse(status=status, headers=headers), start, end)

    async def _stream(
        self, request: web.Request, blob: Blob, answer: web.StreamResponse, start: int, end: int
    ) -> web.StreamResponse:
        assert blob.origin is not None
        answer.content_length = end - start
        sent = 0
        async with contextlib.aclosing(self._blobs.stream(blob.origin, blob.digest, blob.size, start, end)) as chunks:
            try:
                async for chunk in chunks:
                    if not answer.prepared:  # an error of the first byte can still be told
                        await answer.prepare(request)
                    for at in range(0, len(chunk), _SEND):
                        async with asyncio.timeout(self._config.client_stall):
                            await answer.write(chunk[at : at + _SEND])
                    sent += len(chunk)
                    self._metrics.proxied.inc(len(chunk))
            except (WeenvError, TimeoutError) as error:
                if not answer.prepared:
                    raise
                text = str(error) or f"the client takes no byte for {self._config.client_stall:g} s"
                log.warning("a layer ended early: %s", text, extra={"blob": blob.digest, "sent": sent, "of": end - start})
                if request.transport is not None:
                    request.transport.abort()  # the length that was promised is what tells the client
                return answer
        if not answer.prepared:
            await answer.prepare(request)
        await answer.write_eof()
        return answer

    async def _tags(self, request: web.Request, name: str) -> web.Response:
        """Pages as distribution-spec has them ("Listing Tags"): ``n`` tags after ``last``."""
        found = await self._gateway.tags(name)
        last, count = request.query.get("last", ""), request.query.get("n", "")
        rest = [tag for tag in found if tag > last]
        size = min(int(count), _MAX_TAGS) if count.isascii() and count.isdigit() and len(count) < 9 else _MAX_TAGS
        page = rest[:size]
        headers = {}
        if page and len(rest) > size:
            headers["Link"] = f'</v2/{name}/tags/list?n={size}&last={quote(page[-1], safe="")}>; rel="next"'
        return web.json_response({"name": name, "tags": page}, headers=headers)


def _referrers(request: web.Request, digest: str) -> web.Response:
    """Nothing refers to a composed image here; what signs its groups is beside them."""
    headers = {"Content-Type": OCI_INDEX}
    if "artifactType" in request.query:
        headers["OCI-Filters-Applied"] = "artifactType"
    if not digest.startswith("sha256:"):
        raise Refused(400, "DIGEST_INVALID", "not a sha256 digest")
    return web.Response(body=json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}), headers=headers)


def _headers(digest: str) -> dict[str, str]:
    return {**_VERSION, "Docker-Content-Digest": digest, "ETag": f'"{digest}"'}


def _json_error(status: int, code: str, message: str, hint: str = "") -> web.Response:
    return web.Response(
        status=status, body=error_body(code, message, hint), headers={**_VERSION, "Content-Type": "application/json"}
    )
