"""A daemon's metrics over HTTP, on loopback only."""

from __future__ import annotations

import ipaddress
import threading
from typing import Protocol
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from weenv.core.errors import ConfigError


class HasRegistry(Protocol):
    """Any daemon's metrics."""

    registry: CollectorRegistry


class MetricsEndpoint:
    """An HTTP server for Prometheus on a loopback address."""

    def __init__(self, metrics: HasRegistry, address: str) -> None:
        host, port = parse_loopback(address)
        try:
            self._server: WSGIServer
            self._thread: threading.Thread
            self._server, self._thread = start_http_server(port, host, registry=metrics.registry)
        except OSError as error:
            raise ConfigError(f"metrics: cannot listen on {address}: {error.strerror}") from error

    @property
    def port(self) -> int:
        """The port, chosen by the kernel where 0 was asked for."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def parse_loopback(address: str) -> tuple[str, int]:
    """``HOST:PORT`` with a loopback IP address. Raises :class:`ConfigError`."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        if not colon or not port.isdigit() or int(port) > 65535 or not ipaddress.ip_address(host).is_loopback:
            raise ValueError
    except ValueError as error:
        raise ConfigError(
            f"metrics address {address!r} is no loopback address with port", hint="write 127.0.0.1:9180"
        ) from error
    return host, int(port)
