"""A registry that misbehaves on command: real HTTP over a loopback port, no root, no docker-registry.

It serves blobs and manifests out of memory. What it does wrong is either a standing ``mode`` (no ranges, token
authentication, redirects to a storage server with expiring URLs) or a script: a list of faults, each used up by one
blob request. Every request is recorded, with its headers, so that tests can say what was sent where.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import secrets
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType

from aiohttp import web

Fault = Callable[["SimulatedRegistry", web.Request, bytes, int, int], Awaitable[web.StreamResponse]]
"""(registry, request, blob, start, end) -> the answer to a blob request for ``[start, end)``."""


@dataclass(frozen=True)
class Seen:
    """A request as it arrived. ``server`` is ``registry``, ``storage`` or ``token``."""

    server: str
    method: str
    path: str
    headers: dict[str, str]


def status(code: int, headers: dict[str, str] | None = None) -> Fault:
    """Answer with a bare status."""

    async def fault(sim: SimulatedRegistry, request: web.Request, blob: bytes, start: int, end: int) -> web.Response:
        return web.Response(status=code, headers=headers)

    return fault


def drop(after: int) -> Fault:
    """Promise the whole range, send ``after`` bytes of it, cut the connection."""

    async def fault(sim: SimulatedRegistry, request: web.Request, blob: bytes, start: int, end: int) -> web.StreamResponse:
        answer = web.StreamResponse(status=206, headers=_range_headers(blob, start, end))
        answer.content_length = end - start
        await answer.prepare(request)
        await answer.write(blob[start : min(end, start + after)])
        assert request.transport is not None
        request.transport.close()
        return answer

    return fault


def drop_at_once(sim: SimulatedRegistry, request: web.Request, blob: bytes, start: int, end: int) -> Awaitable[web.Response]:
    """Cut the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    raise web.HTTPInternalServerError


def short(length: int) -> Fault:
    """A complete, well-formed answer that holds only the first ``length`` bytes of the range."""

    async def fault(sim: SimulatedRegistry, request: web.Request, blob: bytes, start: int, end: int) -> web.Response:
        end = min(end, start + length)
        return web.Response(status=206, body=blob[start:end], headers=_range_headers(blob, start, end))

    return fault


def stall(seconds: float, after: int = 0) -> Fault:
    """Send ``after`` bytes, then nothing for ``seconds``, then the rest."""

    async def fault(sim: SimulatedRegistry, request: web.Request, blob: bytes, start: int, end: int) -> web.StreamResponse:
        answer = web.StreamResponse(status=206, headers=_range_headers(blob, start, end))
        answer.content_length = end - start
        if not after:
            await asyncio.sleep(seconds)
        await answer.prepare(request)
        if after:
            await answer.write(blob[start : start + after])
            await asyncio.sleep(seconds)
        await answer.write(blob[start + after : end])
        return answer

    return fault


def wrong_bytes(sim: SimulatedRegistry, request: web.Request, blob: bytes, start: int, end: int) -> Awaitable[web.Response]:
    """The right length, other bytes."""

    async def answer() -> web.Response:
        body = bytes(b ^ 0xFF for b in blob[start:end])
        return web.Response(status=206, body=body, headers=_range_headers(blob, start, end))

    return answer()


def wrong_range(sim: SimulatedRegistry, request: web.Request, blob: bytes, start: int, end: int) -> Awaitable[web.Response]:
    """A 206 for a range that nobody asked for."""

    async def answer() -> web.Response:
        return web.Response(status=206, body=blob[: end - start], headers=_range_headers(blob, 0, end - start))

    return answer()


def chunked(sim: SimulatedRegistry, request: web.Request, blob: bytes, start: int, end: int) -> Awaitable[web.StreamResponse]:
    """The right bytes without a Content-Length."""

    async def answer() -> web.StreamResponse:
        response = web.StreamResponse(status=206, headers=_range_headers(blob, start, end))
        response.enable_chunked_encoding()
        await response.prepare(request)
        for begin in range(start, end, 10_000):
            await response.write(blob[begin : min(begin + 10_000, end)])
        await response.write_eof()
        return response

    return answer()


def too_long(extra: int) -> Fault:
    """The range, as its Content-Range says, and ``extra`` bytes that nobody asked for."""

    async def fault(sim: SimulatedRegistry, request: web.Request, blob: bytes, start: int, end: int) -> web.Response:
        return web.Response(status=206, body=blob[start:end] + b"!" * extra, headers=_range_headers(blob, start, end))

    return fault


def wrong_total(sim: SimulatedRegistry, request: web.Request, blob: bytes, start: int, end: int) -> Awaitable[web.Response]:
    """A range of another blob: its total size is not the descriptor's."""

    async def answer() -> web.Response:
        headers = {"Content-Range": f"bytes {start}-{end - 1}/{len(blob) + 1}"}
        return web.Response(status=206, body=b"?" * (end - start), headers=headers)

    return answer()


def multipart(sim: SimulatedRegistry, request: web.Request, blob: bytes, start: int, end: int) -> Awaitable[web.Response]:
    """A 206 as for several ranges (RFC 9110, 14.6), although one was asked for."""

    async def answer() -> web.Response:
        head = f"--x\r\nContent-Range: bytes {start}-{end - 1}/{len(blob)}\r\n\r\n".encode()
        body = head + blob[start:end] + b"\r\n--x--\r\n"
        return web.Response(status=206, body=body, headers={"Content-Type": "multipart/byteranges; boundary=x"})

    return answer()


def drip(pace: float) -> Fault:
    """A byte every ``pace`` seconds."""

    async def fault(sim: SimulatedRegistry, request: web.Request, blob: bytes, start: int, end: int) -> web.StreamResponse:
        answer = web.StreamResponse(status=206, headers=_range_headers(blob, start, end))
        answer.content_length = end - start
        await answer.prepare(request)
        for at in range(start, end):
            await answer.write(blob[at : at + 1])
            await asyncio.sleep(pace)
        return answer

    return fault


def encoded(sim: SimulatedRegistry, request: web.Request, blob: bytes, start: int, end: int) -> Awaitable[web.Response]:
    """A body that claims to be compressed on the way."""

    async def answer() -> web.Response:
        headers = _range_headers(blob, start, end) | {"Content-Encoding": "gzip"}
        return web.Response(status=206, body=blob[start:end], headers=headers)

    return answer()


def redirect(location: str) -> Fault:
    """A redirect to a fixed place."""
    return status(307, {"Location": location})


def _range_headers(blob: bytes, start: int, end: int) -> dict[str, str]:
    return {"Content-Range": f"bytes {start}-{end - 1}/{len(blob)}", "Content-Type": "application/octet-stream"}


@dataclass
class SimulatedRegistry:
    """``async with SimulatedRegistry() as sim``; ``sim.host`` is ``127.0.0.1:port``."""

    ignore_range: bool = False
    refuse_lists: bool = True
    """Answer 416 to a Range header with several ranges."""
    tls: ssl.SSLContext | None = None
    down: bool = False
    """Cut every connection, as a server that is being restarted does."""
    auth: str = ""
    """Empty, ``basic`` or ``bearer``."""
    user: tuple[str, str] | None = None
    """Who may log in; None lets anybody have a token."""
    token_lifetime: float = 60.0
    challenge_on_refusal: bool = True
    """Whether a refused token is answered 401 with a challenge, or 403 without (as some registries do)."""
    identity_token: str = ""
    redirect_blobs: bool = False
    """Send blob readers to a storage server on another port, whose URLs are valid for ``url_uses`` requests."""
    url_uses: int = 1 << 30
    script: deque[Fault] = field(default_factory=deque)
    storage_script: deque[Fault] = field(default_factory=deque)
    seen: list[Seen] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)

    async def __aenter__(self) -> SimulatedRegistry:
        self._tokens: dict[str, float] = {}
        self._urls: dict[str, int] = {}
        self._runners: list[web.AppRunner] = []
        self.host = await self._serve(self._routes(), self.tls)
        self.storage = await self._serve([web.get("/store/{key}/{digest}", self._stored)])
        return self

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v2/{repository:.+}/blobs/{digest}", self._blob),  # HEAD too
            web.get("/v2/{repository:.+}/manifests/{target}", self._manifest),
            web.get("/token", self._token),
            web.post("/token", self._token),
        ]

    @property
    def scheme(self) -> str:
        """``http`` or ``https``."""
        return "http" if self.tls is None else "https"

    async def _serve(self, routes: list[web.RouteDef], tls: ssl.SSLContext | None = None) -> str:
        app = web.Application()
        app.add_routes(routes)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        self._runners.append(runner)
        return f"127.0.0.1:{runner.addresses[0][1]}"

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for runner in self._runners:
            assert runner.server is not None
            held = [handler.transport for handler in runner.server.connections]
            await runner.cleanup()
            for transport in held:
                if transport is not None:
                    transport.abort()  # TLS would wait for the other side's farewell, longer than the loop lives
        await asyncio.sleep(0)

    def add_blob(self, data: bytes) -> str:
        """Hold a blob; returns its digest."""
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return digest

    def add_manifest(self, data: bytes, media_type: str, tag: str = "") -> str:
        """Hold a manifest, by digest and tag; returns its digest."""
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        for key in (digest, tag):
            self.manifests[key] = (media_type, data)
        return digest

    def revoke(self) -> None:
        """All tokens given so far are no longer good."""
        self._tokens.clear()

    def expire_urls(self) -> None:
        """All storage URLs given so far are no longer good."""
        self._urls.clear()

    def count(self, server: str, method: str = "GET", part: str = "") -> int:
        """How many requests a server saw."""
        return sum(1 for s in self.seen if s.server == server and s.method == method and part in s.path)

    def _record(self, server: str, request: web.Request) -> None:
        self.seen.append(Seen(server, request.method, request.path_qs, dict(request.headers)))
        if self.down:
            assert request.transport is not None
            request.transport.abort()
            raise web.HTTPServiceUnavailable

    def _refusal(self, request: web.Request) -> web.Response | None:
        if not self.auth:
            return None
        given = request.headers.get("Authorization", "")
        if self.auth == "basic":
            assert self.user is not None
            if given == "Basic " + base64.b64encode(":".join(self.user).encode()).decode():
                return None
            if given and not self.challenge_on_refusal:
                return web.Response(status=403)
            return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="simulated"'})
        now = asyncio.get_running_loop().time()
        if given.startswith("Bearer ") and self._tokens.get(given[7:], 0.0) > now:
            return None
        if given and not self.challenge_on_refusal:
            return web.Response(status=403)
        scope = f"repository:{request.match_info['repository']}:pull"
        challenge = f'Bearer realm="{self.scheme}://{self.host}/token",service="simulated",scope="{scope}"'
        return web.Response(status=401, headers={"WWW-Authenticate": challenge})

    async def _token(self, request: web.Request) -> web.Response:
        self._record("token", request)
        if request.method == "POST":
            form = await request.post()
            if not self.identity_token or form.get("refresh_token") != self.identity_token:
                return web.Response(status=401)
        elif self.user is not None:
            expected = "Basic " + base64.b64encode(":".join(self.user).encode()).decode()
            if request.headers.get("Authorization") != expected:
                return web.Response(status=401)
        token = secrets.token_urlsafe(12)
        self._tokens[token] = asyncio.get_running_loop().time() + self.token_lifetime
        return web.json_response({"access_token": token, "expires_in": self.token_lifetime})

    async def _manifest(self, request: web.Request) -> web.Response:
        self._record("registry", request)
        if (refusal := self._refusal(request)) is not None:
            return refusal
        found = self.manifests.get(request.match_info["target"])
        if found is None:
            body = json.dumps({"errors": [{"code": "MANIFEST_UNKNOWN", "message": "no such manifest"}]})
            return web.Response(status=404, text=body, content_type="application/json")
        etag = f'"sha256:{hashlib.sha256(found[1]).hexdigest()}"'
        if request.headers.get("If-None-Match") == etag:
            return web.Response(status=304, headers={"ETag": etag})
        return web.Response(body=found[1], content_type=found[0], headers={"ETag": etag})

    async def _blob(self, request: web.Request) -> web.StreamResponse:
        self._record("registry", request)
        if (refusal := self._refusal(request)) is not None:
            return refusal
        digest = request.match_info["digest"]
        if digest not in self.blobs:
            return web.Response(status=404)
        if self.redirect_blobs:
            key = secrets.token_hex(8)
            self._urls[key] = self.url_uses
            return web.Response(status=307, headers={"Location": f"http://{self.storage}/store/{key}/{digest}?sig={key}"})
        return await self._serve_blob(request, self.blobs[digest], self.script)

    async def _stored(self, request: web.Request) -> web.StreamResponse:
        self._record("storage", request)
        key = request.match_info["key"]
        if self._urls.get(key, 0) <= 0:
            return web.Response(status=403, text="<Code>AccessDenied</Code>")
        self._urls[key] -= 1
        return await self._serve_blob(request, self.blobs[request.match_info["digest"]], self.storage_script)

    async def _serve_blob(self, request: web.Request, blob: bytes, script: deque[Fault]) -> web.StreamResponse:
        if self.refuse_lists and "," in request.headers.get("Range", ""):
            return web.Response(status=416)
        wanted = request.http_range
        start = wanted.start or 0
        end = len(blob) if wanted.stop is None else min(wanted.stop, len(blob))
        if script and request.method == "GET":
            return await script.popleft()(self, request, blob, start, end)
        if self.ignore_range or "Range" not in request.headers:
            return web.Response(body=blob, content_type="application/octet-stream")
        if start >= len(blob):
            return web.Response(status=416, headers={"Content-Range": f"bytes */{len(blob)}"})
        return web.Response(status=206, body=blob[start:end], headers=_range_headers(blob, start, end))
