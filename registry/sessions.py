"""requests' sessions as the oras transport needs them: one server's TLS settings, and headers that come in bounded time.

Socket timeouts hold between two bytes only. A server that drips its answer's header would keep a thread for ever, and
nothing above ``http.client`` gets to look meanwhile; so the socket is shut down under it when the time is over.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from http.cookiejar import DefaultCookiePolicy
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from weenv.core.errors import SourceError
from weenv.registry.config import USER_AGENT, RegistryConfig
from weenv.registry.hosts import Endpoint
from weenv.registry.internal import leads_inside
from weenv.registry.policy import MAX_HOPS

BLOCK = 1 << 20
"""Bytes handed to the socket at a time."""


class _Bounded:
    """Mixed into urllib3's connections: all of an answer's header within twice the time allowed between two bytes."""

    sock: Any
    timeout: Any

    def getresponse(self) -> Any:
        late = threading.Event()
        held = self.sock

        def cut() -> None:
            late.set()
            with contextlib.suppress(OSError):  # below TLS: its own shutdown would pull the session from under the reader
                socket.socket.shutdown(held, socket.SHUT_RDWR)

        timer = threading.Timer(2 * self.timeout if isinstance(self.timeout, int | float) else 60.0, cut)
        timer.daemon = True
        timer.start()
        try:
            answer = super().getresponse()  # type: ignore[misc]
        except Exception as error:
            if late.is_set():
                raise TimeoutError("the answer's header did not come in time") from error
            raise
        finally:
            timer.cancel()
        if late.is_set():  # http.client takes the end of a connection for the end of a header
            answer.close()
            raise TimeoutError("the answer's header did not come in time")
        return answer


class _Http(_Bounded, HTTPConnection):
    pass


class _Https(_Bounded, HTTPSConnection):
    pass


class _HttpPool(HTTPConnectionPool):
    ConnectionCls = _Http


class _HttpsPool(HTTPSConnectionPool):
    ConnectionCls = _Https

    def _validate_conn(self, conn: Any) -> None:
        HTTPConnectionPool._validate_conn(self, conn)
        if conn.is_closed:
            conn.connect()  # no warning with each request about what the operator has configured


class _Adapter(HTTPAdapter):
    def __init__(self, config: RegistryConfig, context: ssl.SSLContext) -> None:
        self._context = context
        super().__init__(pool_connections=8, pool_maxsize=config.connections_per_host, max_retries=0)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs, ssl_context=self._context, blocksize=BLOCK)
        self.poolmanager.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}

    def proxy_manager_for(self, proxy: Any, **kwargs: Any) -> Any:
        manager = super().proxy_manager_for(proxy, **kwargs, ssl_context=self._context, blocksize=BLOCK)
        manager.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}
        return manager

    def cert_verify(self, conn: Any, url: str, verify: Any, cert: Any) -> None:
        """The context decides, and it alone: requests' own bundle of CAs is not the system's."""
        conn.cert_reqs = self._context.verify_mode
        conn.ca_certs = conn.ca_cert_dir = None


class Session(requests.Session):
    """Follows redirects like requests (which drops Authorization for another host), but never from TLS to plain HTTP."""

    def __init__(self, config: RegistryConfig, endpoint: Endpoint, context: ssl.SSLContext) -> None:
        super().__init__()
        self.trust_env = False  # ~/.netrc; proxies are given per request instead
        self.verify = not endpoint.trust.skip_verify
        self.max_redirects = MAX_HOPS
        # Some registries take a cookie for a browser and then want CSRF tokens.
        self.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        self.headers.clear()
        self.headers.update({"User-Agent": USER_AGENT, "Accept-Encoding": "identity", "Accept": "*/*"})
        self._config = config
        self._private = tuple(name for name, _ in endpoint.headers)
        adapter = _Adapter(config, context)
        self.mount("https://", adapter)
        self.mount("http://", adapter)

    def rebuild_auth(self, prepared_request: Any, response: Any) -> None:
        """What is for the server alone does not go where it redirects to."""
        if self.should_strip_auth(response.request.url, prepared_request.url):
            for name in self._private:
                prepared_request.headers.pop(name, None)
        super().rebuild_auth(prepared_request, response)

    def get_redirect_target(self, resp: Any) -> str | None:
        """Where a redirect leads, or None. Raises SourceError for where nobody is to be sent."""
        target: str | None = super().get_redirect_target(resp)
        if target is None:
            return None
        parts = urlsplit(target)
        refusal = ""
        if parts.scheme == "http" and str(resp.url).startswith("https:") and not self._config.is_plain(parts.netloc):
            refusal = f"redirect from TLS to plain HTTP at {parts.hostname}"
        elif parts.hostname and leads_inside(str(resp.url), target, self._config):
            refusal = f"redirect to {parts.hostname}, which is this node or its link"
        if refusal:
            resp.close()
            raise SourceError(refusal)
        return target
