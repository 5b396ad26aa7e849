"""What the gateway counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from weenv.core.endpoint import Elsewhere

_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 120.0)


class Metrics:
    """Counters of one gateway; several may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "weenv_gateway_requests", "Requests by what was asked for and status", ["kind", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "weenv_gateway_request_seconds", "Time until an answer has ended", ["kind"], buckets=_BUCKETS,
            registry=self.registry,
        )  # fmt: skip
        self.active = Gauge("weenv_gateway_active_requests", "Requests being answered", registry=self.registry)
        self.redirects = Counter("weenv_gateway_redirects", "Layers answered with a redirect", registry=self.registry)
        self.proxied = Counter("weenv_gateway_proxied_bytes", "Bytes of layers sent", registry=self.registry)
        self.images = Gauge("weenv_gateway_images", "Composed images kept", registry=self.registry)
        self.registries = Elsewhere(
            "weenv_gateway_registry", "What was asked of registries, and what came of it (see below)", "what", self.registry
        )
