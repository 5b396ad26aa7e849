"""The snapshotter's metrics, in a registry of their own, and an optional HTTP endpoint on loopback."""

from __future__ import annotations

import ipaddress
import threading
from typing import Protocol
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from weenv.core.errors import ConfigError

_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.015, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Metrics:
    """Counters of one snapshotter; several may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.request_seconds = Histogram(
            "weenv_snapshotter_request_seconds", "Time per request", ["method"], buckets=_BUCKETS, registry=self.registry
        )
        self.request_errors = Counter(
            "weenv_snapshotter_request_errors", "Requests answered with an error", ["method", "code"], registry=self.registry
        )
        self.fallbacks = Counter(
            "weenv_snapshotter_fallbacks", "Images that are not served lazily", ["reason"], registry=self.registry
        )
        self.ordinary_layers = Counter(
            "weenv_snapshotter_ordinary_layers", "Layers that are not served lazily", ["reason"], registry=self.registry
        )
        self.resolved = Counter("weenv_snapshotter_lazy_layers", "Layers committed lazily", registry=self.registry)
        self.resolve_seconds = Histogram(
            "weenv_snapshotter_resolve_seconds",
            "Time per layer and stage of making it lazily mountable",
            ["stage"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.tail_bytes = Counter("weenv_snapshotter_tail_bytes", "Bytes of tails fetched", registry=self.registry)
        self.layers = Gauge("weenv_snapshotter_layers", "Layers by state", ["state"], registry=self.registry)
        self.repairs = Counter("weenv_snapshotter_repairs", "What start-up repaired", ["what"], registry=self.registry)


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
