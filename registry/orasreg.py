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
from http.cookiejar import DefaultCookiePolicy
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import oras.container
import oras.provider
import requests
import urllib3.exceptions
from requests.adapters import HTTPAdapter

from weenv.core.errors import SourceError, UnauthorizedError, UnavailableError, WeenvError
from weenv.registry.auth import Authorizer
from weenv.registry.client import origin
from weenv.registry.config import USER_AGENT, RegistryConfig, proxy_for
from weenv.registry.internal import leads_inside
from weenv.registry.policy import MAX_HOPS, REFUSED, TRANSIENT, parse_retry_after, retry_delay, unavailable
from weenv.registry.reference import api_host
from weenv.registry.threads import Cancelled

BLOCK = 1 << 20
"""Bytes handed to the socket at a time."""
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


class _Adapter(HTTPAdapter):
    def __init__(self, config: RegistryConfig) -> None:
        self._context = config.ssl_context()
        super().__init__(pool_connections=8, pool_maxsize=config.connections_per_host, max_retries=0)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs, ssl_context=self._context, blocksize=BLOCK)

    def proxy_manager_for(self, proxy: Any, **kwargs: Any) -> Any:
        return super().proxy_manager_for(proxy, **kwargs, ssl_context=self._context, blocksize=BLOCK)


class _Session(requests.Session):
    """Follows redirects like requests (which drops Authorization for another host), but never from TLS to plain HTTP."""

    def __init__(self, config: RegistryConfig) -> None:
        super().__init__()
        self.trust_env = False  # ~/.netrc; proxies are given per request instead
        self.max_redirects = MAX_HOPS
        # Some registries take a cookie for a browser and then want CSRF tokens.
        self.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        self.headers.clear()
        self.headers.update({"User-Agent": USER_AGENT, "Accept-Encoding": "identity", "Accept": "*/*"})
        self._config = config
        adapter = _Adapter(config)
        self.mount("https://", adapter)
        self.mount("http://", adapter)

    def get_redirect_target(self, resp: Any) -> str | None:
        target: str | None = super().get_redirect_target(resp)
        if target is None:
            return None
        parts = urlsplit(target)
        if parts.scheme == "http" and str(resp.url).startswith("https:") and not self._config.is_plain(parts.netloc):
            raise SourceError(f"redirect from TLS to plain HTTP at {parts.hostname}")
        if parts.hostname and leads_inside(str(resp.url), target, self._config):
            raise SourceError(f"redirect to {parts.hostname}, which is this node or its link")
        return target


class OrasRegistry(oras.provider.Registry):  # type: ignore[misc]
    """An oras provider for one registry host and one token scope."""

    def __init__(
        self, host: str, scope: str, config: RegistryConfig, authorizer: Authorizer, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(hostname=api_host(host), insecure=config.is_plain(host), tls_verify=True)
        self.host = host
        self.scope = scope
        self.config = config
        self.authorizer = authorizer
        self.loop = loop
        self.session = _Session(config)
        self.home = origin(config.base_url(host))
        self._local = threading.local()

    @property
    def cancel(self) -> threading.Event:
        """What calls off the transfer of this thread (see :meth:`begin`)."""
        event: threading.Event | None = getattr(self._local, "cancel", None)
        return event if event is not None else self.begin(threading.Event())

    def begin(self, cancel: threading.Event) -> threading.Event:
        """Make ``cancel`` the event that calls off what this thread does from now on."""
        self._local.cancel = cancel
        return cancel

    def container(self, repository: str, target: str = "") -> oras.container.Container:
        """oras' own kind of reference for a repository of this host; ``target`` is a tag or digest.

        Made without its parser, which guesses the host differently than docker does.
        """
        container = oras.container.Container("x", registry=self.hostname)
        namespace, _, name = repository.rpartition("/")
        container.namespace, container.repository = namespace or None, name
        container.tag, container.digest = (None, target) if target.startswith("sha256:") else (target, None)
        return container

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
        while True:
            if self.cancel.is_set():
                raise Cancelled
            if isinstance(data, Body):
                data.seek(0)
            header = self._ask(self.authorizer.header(self.host, self.scope)) if at_home else None
            retry_after = None
            try:
                answer = self.session.request(
                    method, url, data=data, json=json, stream=stream,
                    headers=base | ({"Authorization": header} if header else {}),
                    timeout=(self.config.connect_timeout, self.config.stall_timeout),
                    proxies=_proxies(url),
                )  # fmt: skip
            except Cancelled:
                raise
            except requests.TooManyRedirects as error:
                raise SourceError(f"{self.host} redirects more than {MAX_HOPS} times") from error
            except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
                if isinstance(error.__context__, WeenvError):
                    raise error.__context__ from None
                reason = explain(error)
            else:
                if answer.status_code in REFUSED and at_home and not renewed:
                    renewed = True
                    challenges = [answer.headers["WWW-Authenticate"]] if "WWW-Authenticate" in answer.headers else []
                    answer.close()
                    if self._ask(self.authorizer.renew(self.host, self.scope, header, challenges)) is not None:
                        continue
                    raise UnauthorizedError(
                        f"{self.host} refused access ({answer.status_code})",
                        hint=f"check the name, and log in: docker login {self.host}",
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

    def open_stream(self, repository: str, digest: str, offset: int = 0) -> requests.Response:
        """A blob's bytes from ``offset`` as a streaming answer, through oras' own ``get_blob`` where it starts at 0."""
        container = self.container(repository, digest)
        if offset == 0:
            answer: requests.Response = self.get_blob(container, digest, stream=True)
            return answer
        url = f"{self.prefix}://{container.get_blob_url(digest)}"
        return self.do_request(url, "GET", headers={"Range": f"bytes={offset}-"}, stream=True)

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
