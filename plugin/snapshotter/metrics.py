"""The snapshotter's metrics, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from weenv.core.endpoint import Elsewhere

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
        self.repairs = Counter("weenv_snapshotter_repairs", "What was repaired, at any time", ["what"], registry=self.registry)
        self.registries = Elsewhere(
            "weenv_snapshotter_registry", "What was asked of registries, and what came of it (see below)", "what", self.registry
        )
