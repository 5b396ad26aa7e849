"""A daemon's metrics over HTTP: on a loopback address, or on a unix socket that only its owner may connect to.

:class:`Elsewhere` is for what other parts of a daemon count, which know nothing of metrics.

Scrapers that ask for OpenMetrics get it, others the older text format (prometheus_client decides by their Accept header).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from weenv.core.accepting import PAUSE, complain, is_short
from weenv.core.errors import ConfigError
from weenv.core.unixsocket import bind_private, claim_path

UNIX = "unix:"


class HasRegistry(Protocol):
    """Any daemon's metrics."""

    registry: CollectorRegistry


class Elsewhere(Collector):
    """A family of counters that somebody else has, by the values of one label. ``read`` is called in the server's threads."""

    def __init__(self, name: str, text: str, label: str, registry: CollectorRegistry) -> None:
        self.name, self.text, self.label = name, text, label
        self.read: Callable[[], Mapping[str, float]] = dict
        registry.register(self)

    def describe(self) -> list[Metric]:
        """The family without values: so that no other has its name."""
        return [CounterMetricFamily(self.name, self.text, labels=[self.label])]

    def collect(self) -> Iterator[Metric]:
        """The family."""
        family = CounterMetricFamily(self.name, self.text, labels=[self.label])
        for value, count in self.read().items():
            family.add_metric([value], count)
        yield family


class _Quiet(WSGIRequestHandler):
    """Logs no request; a peer on a unix socket has no address."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class's name)
        """Not logged."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def get_request(self) -> tuple[socket.socket, Any]:
        """A connection, and its address. Raises OSError, after a pause where the loop would come back at once."""
        try:
            return super().get_request()
        except OSError as error:
            if is_short(error):
                complain(error)
                time.sleep(PAUSE)
            raise


class _Server6(_Server):
    address_family = socket.AF_INET6


class _UnixServer(_Server):
    address_family = socket.AF_UNIX

    def __init__(self, path: str) -> None:
        socketserver.BaseServer.__init__(self, path, _Quiet)
        self.socket = bind_private(path)
        self.server_name, self.server_port = "localhost", 0
        self.setup_environ()
        self.server_activate()

    def get_request(self) -> tuple[socket.socket, Any]:
        """As above; the address is made up."""
        return super().get_request()[0], ("local", 0)


class MetricsEndpoint:
    """An HTTP server for Prometheus at ``address``: a loopback ``HOST:PORT``, or ``unix:/path``.

    Raises :class:`ConfigError`.
    """

    def __init__(self, metrics: HasRegistry, address: str) -> None:
        check_address(address)
        self._path = address.removeprefix(UNIX) if address.startswith(UNIX) else ""
        self._server: WSGIServer
        try:
            if self._path:
                claim_path(self._path)
                self._server = _UnixServer(self._path)
            else:
                host, port = parse_loopback(address)
                self._server = (_Server6 if ":" in host else _Server)((host, port), _Quiet)
        except OSError as error:
            raise ConfigError(f"metrics: cannot listen on {address}: {error.strerror}") from error
        self._server.set_app(make_wsgi_app(metrics.registry))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port, chosen by the kernel where 0 was asked for."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
        if self._path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


def check_address(address: str) -> None:
    """Raises :class:`ConfigError` for what is neither a loopback ``HOST:PORT`` nor ``unix:/path``."""
    if address.startswith(UNIX):
        path = address.removeprefix(UNIX)
        if not path.startswith("/") or "\0" in path or len(os.fsencode(path)) > 107:
            raise ConfigError(f"metrics address {address!r} has no usable path", hint="write unix:/run/weenv/metrics.sock")
        return
    parse_loopback(address)


def parse_loopback(address: str) -> tuple[str, int]:
    """``HOST:PORT`` with a loopback IP address. Raises :class:`ConfigError`."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        if not colon or not port.isdigit() or int(port) > 65535 or not ipaddress.ip_address(host).is_loopback:
            raise ValueError
    except ValueError as error:
        raise ConfigError(
            f"metrics address {address!r} is no loopback address with port",
            hint="write 127.0.0.1:9180, or unix:/run/weenv/metrics.sock",
        ) from error
    return host, int(port)
