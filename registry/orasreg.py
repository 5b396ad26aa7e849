"""The oras library's registry provider with this project's authorisation, retries and TLS underneath.

Every request of ``oras.provider.Registry`` goes through its ``do_request``; that method is replaced here. The library's
own would retry wrong passwords for two minutes, read ``~/.netrc``, and hold a whole blob in memory to upload it.

Everything in this module blocks and runs in worker threads; the authorizer lives on the event loop and is asked through
``run_coroutine_threadsafe``. requests' sessions and urllib3's pools may be shared by threads as long as nobody changes
them after they are made.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urljoin, urlsplit

import oras.container
import oras.provider
import requests
import urllib3.exceptions

from weenv.core.errors import SourceError, UnauthorizedError, UnavailableError, WeenvError
from weenv.registry.client import merge_headers, origin
from weenv.registry.config import proxy_for
from weenv.registry.hosts import Endpoint
from weenv.registry.policy import MAX_HOPS, REFUSED, TRANSIENT, parse_retry_after, retry_delay, unavailable
from weenv.registry.sessions import BLOCK, Session
from weenv.registry.threads import Cancelled

if TYPE_CHECKING:
    from weenv.registry.client import RegistryClient

AUTH_TIMEOUT = 90.0
"""Seconds to wait for the event loop to come up with an Authorization header."""

Progress = Callable[[int], None]
"""Called with the number of bytes moved since the last call, from a worker thread."""


class Body:
    """A file part that requests sends in blocks: has a length, can be rewound, reports progress, can be cancelled."""

    def __init__(self, file: BinaryIO, size: int, cancel: threading.Event, progress: Progress | None) -> None:
        self._file = file
        self._size = size
        self._cancel = cancel
        self._progress = progress
        self._sent = self._reported = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        while block := self.read():
            yield block

    def tell(self) -> int:
        """The position."""
        return self._file.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move; requests rewinds with it when a redirect wants the body again."""
        self._sent = offset
        return self._file.seek(offset, whence)

    def read(self, size: int = -1) -> bytes:
        """The next block. Raises :class:`Cancelled`."""
        if self._cancel.is_set():
            raise Cancelled
        data = self._file.read(BLOCK if size < 0 else size)
        self._sent += len(data)
        if self._progress is not None and self._sent > self._reported:
            self._progress(self._sent - self._reported)  # a second try does not count twice
            self._reported = self._sent
        return data


class _Container(oras.container.Container):  # type: ignore[misc]
    """oras' own kind of reference, made without its parser, which guesses the host differently than docker does.

    Its URLs are those of the server, wherever its API begins. ``target`` is a tag or digest.
    """

    def __init__(self, endpoint: Endpoint, repository: str, target: str) -> None:
        super().__init__("x", registry=endpoint.host)
        namespace, _, name = repository.rpartition("/")
        self.namespace, self.repository = namespace or None, name
        by_digest = target.startswith("sha256:")
        self.tag: str | None = None if by_digest else target
        self.digest: str | None = target if by_digest else None
        self._endpoint = endpoint

    def _url(self, rest: str) -> str:
        return self._endpoint.url(f"/v2/{self.api_prefix}/{rest}").partition("://")[2]

    def get_blob_url(self, digest: str) -> str:
        """Without the scheme, as oras has it; the others too."""
        return self._url(f"blobs/{digest}")

    def upload_blob_url(self) -> str:
        """Where uploads begin."""
        return self._url("blobs/uploads/")

    def manifest_url(self, tag: str | None = None) -> str:
        """The manifest of a tag or digest, by default the container's own."""
        return self._url(f"manifests/{tag or self.digest or self.tag}")


class OrasRegistry(oras.provider.Registry):  # type: ignore[misc]
    """An oras provider for one server and one token scope. ``attempts`` bounds its tries of one request."""

    def __init__(
        self, endpoint: Endpoint, scope: str, client: RegistryClient, loop: asyncio.AbstractEventLoop, attempts: int
    ) -> None:
        super().__init__(hostname=endpoint.host, insecure=endpoint.scheme == "http", tls_verify=True)
        self.host = endpoint.name
        self.scope = scope
        self.config = replace(client.config, attempts=attempts)
        self.client = client
        self.loop = loop
        self.session = Session(client.config, endpoint, client.context(endpoint.trust))
        self._local = threading.local()
        self._stand_for(endpoint)

    def _stand_for(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.prefix = endpoint.scheme
        self.home = origin(endpoint.origin)

    @property
    def cancel(self) -> threading.Event:
        """What calls off the transfer of this thread (see :meth:`begin`)."""
        event: threading.Event | None = getattr(self._local, "cancel", None)
        return event if event is not None else self.begin(threading.Event())

    def begin(self, cancel: threading.Event) -> threading.Event:
        """Make ``cancel`` the event that calls off what this thread does from now on."""
        self._local.cancel = cancel
        return cancel

    def url(self, path: str) -> str:
        """The URL of an API path (``/v2/...``) here."""
        return self.endpoint.url(path)

    def container(self, repository: str, target: str = "") -> oras.container.Container:
        """oras' own kind of reference for a repository of this host; ``target`` is a tag or digest."""
        return _Container(self.endpoint, repository, target)

    def _get_location(self, r: requests.Response, container: oras.container.Container) -> str:
        """Where an upload goes on; oras' own makes less of relative ones."""
        location = r.headers.get("Location", "")
        return urljoin(str(r.url), location) if location else ""

    def _ask(self, work: Any) -> str | None:
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            header: str | None = future.result(AUTH_TIMEOUT)
        except TimeoutError as error:
            future.cancel()
            raise UnavailableError(f"{self.host}: no credentials in time") from error
        return header

    def do_request(
        self, url: str, method: str = "GET", data: Any = None, headers: dict[str, str] | None = None,
        json: Any = None, stream: bool = False,
    ) -> requests.Response:  # fmt: skip
        """One request of the oras library, with authorisation and bounded retries. Returns any final answer.

        A :class:`Body` is not sent again after a failure: its upload session may be spoiled, so the caller starts over.
        Raises WeenvError or :class:`Cancelled`.
        """
        base = dict(headers or {})
        base.pop("Authorization", None)
        renewed, failures = False, 0
        at_home = origin(url) == self.home
        if url.startswith("http:") and self.home[0] == "https" and not self.config.is_plain(urlsplit(url).netloc):
            raise SourceError(f"{self.host} wants an upload over plain HTTP at {urlsplit(url).netloc}")
        if at_home and self.endpoint.headers:
            joined: dict[str, str] = {}
            for name, value in merge_headers(self.endpoint.headers, base):
                joined[name] = f"{joined[name]}, {value}" if name in joined else value
            base = joined
        dial = self.endpoint.dial_timeout
        while True:
            if self.cancel.is_set():
                raise Cancelled
            if isinstance(data, Body):
                data.seek(0)
            header = self._ask(self.client.auth.header(self.endpoint, self.scope)) if at_home else None
            retry_after = None
            try:
                answer = self.session.request(
                    method, url, data=data, json=json, stream=stream,
                    headers=base | ({"Authorization": header} if header else {}),
                    timeout=(self.config.connect_timeout if dial is None else dial, self.config.stall_timeout),
                    proxies=_proxies(url),
                )  # fmt: skip
            except Cancelled:
                raise
            except requests.TooManyRedirects as error:
                raise SourceError(f"{self.host} redirects more than {MAX_HOPS} times") from error
            except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
                if isinstance(error.__context__, WeenvError):
                    raise error.__context__ from None
                plain = self.client.turn_plain(self.endpoint, error) if at_home else None
                if plain is not None:
                    self._stand_for(plain)
                    url = "http" + url.removeprefix("https")
                    continue
                reason = explain(error)
            else:
                if answer.status_code in REFUSED and not renewed:
                    renewed = True
                    challenges = [answer.headers["WWW-Authenticate"]] if "WWW-Authenticate" in answer.headers else []
                    answer.close()
                    if origin(str(answer.url)) != self.home:
                        answer = self._elsewhere(method, str(answer.url), base, challenges, stream) or answer
                        if answer.status_code not in REFUSED | TRANSIENT:
                            return answer
                    if at_home and self._ask(self.client.auth.renew(self.endpoint, self.scope, header, challenges)) is not None:
                        continue
                    raise UnauthorizedError(
                        f"{self.host} refused access ({answer.status_code})",
                        hint=f"check the name, and log in (again, where a login is there already): docker login {self.host}",
                    )
                if answer.status_code not in TRANSIENT:
                    return answer
                retry_after = parse_retry_after(answer.headers.get("Retry-After"))
                reason = f"status {answer.status_code}"
                answer.close()
            failures += 1
            delay = None if isinstance(data, Body) else retry_delay(self.config, failures, retry_after)
            if delay is None:
                raise unavailable(self.host, "requests", reason, retry_after)
            if self.cancel.wait(delay):
                raise Cancelled

    def _elsewhere(
        self, method: str, url: str, headers: dict[str, str], challenges: list[str], stream: bool
    ) -> requests.Response | None:
        """The answer of another server that a redirect led to and that asks for credentials: those for its own host."""
        if method not in ("GET", "HEAD"):
            return None

        async def ask() -> str | None:
            met = self.client.meet(self.endpoint, url, self.scope, challenges)
            return await self.client.auth.renew(*met, None, challenges) if met is not None else None

        header = self._ask(ask())
        if header is None:
            return None
        private = {name for name, _ in self.endpoint.headers}
        kept = {name: value for name, value in headers.items() if name not in private}
        return self.session.request(
            method, url, stream=stream, headers=kept | {"Authorization": header},
            timeout=(self.config.connect_timeout, self.config.stall_timeout), proxies=_proxies(url),
        )  # fmt: skip

    def open_stream(self, repository: str, digest: str, offset: int = 0) -> requests.Response:
        """A blob's bytes from ``offset`` as a streaming answer."""
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        return self.do_request(self.url(f"/v2/{repository}/blobs/{digest}"), "GET", headers=headers, stream=True)

    def put_upload(self, blob: Any, container: Any, layer: dict[str, Any]) -> requests.Response:
        """oras' monolithic upload, streaming: ``blob`` is a :class:`Body` (or a path, as in the library)."""
        if not isinstance(blob, Body):
            with open(blob, "rb") as file:
                return self.put_upload(Body(file, layer["size"], self.cancel, None), container, layer)
        started = self.do_request(
            f"{self.prefix}://{container.upload_blob_url()}", "POST",
            headers={"Content-Type": "application/octet-stream", "Content-Length": "0"},
        )  # fmt: skip
        session = self._get_location(started, container)
        if started.status_code != 202 or not session:
            return started
        return self.finish_upload(session, blob, layer)

    def finish_upload(self, session: str, blob: Body, layer: dict[str, Any]) -> requests.Response:
        """Send all of a blob to an upload session and close it (distribution-spec, "POST then PUT")."""
        separator = "&" if "?" in session else "?"
        return self.do_request(
            f"{session}{separator}digest={layer['digest']}", "PUT", data=blob if layer["size"] else b"",
            headers={"Content-Type": "application/octet-stream", "Content-Length": str(layer["size"])},
        )  # fmt: skip


def _proxies(url: str) -> dict[str, str]:
    proxy = proxy_for(url)
    return {"http": proxy, "https": proxy} if proxy else {}


def explain(error: BaseException) -> str:
    """A transport error of requests or urllib3 in a few words, without URLs."""
    if isinstance(error, requests.exceptions.SSLError):
        return "TLS failed (certificate not trusted, or the registry speaks plain HTTP)"
    if isinstance(error, requests.exceptions.Timeout | urllib3.exceptions.TimeoutError):
        return "no answer in time"
    cause: BaseException | None = error
    for _ in range(8):  # requests' error holds urllib3's, which holds the socket's
        if isinstance(cause, OSError) and cause.errno and cause.strerror:
            return cause.strerror
        inner = getattr(cause, "reason", None) or next(
            (a for a in getattr(cause, "args", ()) if isinstance(a, Exception)), None
        )
        cause = (
            inner
            if isinstance(inner, BaseException)
            else getattr(cause, "__cause__", None) or getattr(cause, "__context__", None)
        )
    return "no connection" if isinstance(error, requests.exceptions.ConnectionError) else type(error).__name__
