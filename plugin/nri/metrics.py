"""What elastic provisioning counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0, 10.0)


class Metrics:
    """Counters of one controller; several may live in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.environments = Gauge("weenv_elastic_environments", "Environments managed now", registry=registry)
        self.waiting = Gauge("weenv_elastic_waiting", "Environments that wait for room", registry=registry)
        self.capacity = Gauge("weenv_elastic_capacity", "What may be promised (cores, bytes)", ["resource"], registry=registry)
        self.promised = Gauge("weenv_elastic_promised", "What is promised (cores, bytes)", ["resource"], registry=registry)
        self.samples = Counter("weenv_elastic_samples", "Looks at environments", ["how"], registry=registry)
        self.lag = Histogram(
            "weenv_elastic_lag_seconds", "How late a look was taken", buckets=(0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0),
            registry=registry,
        )  # fmt: skip
        self.decisions = Counter(
            "weenv_elastic_decisions", "Decisions that changed something, or could not", ["reason"], registry=registry
        )
        self.changes = Counter("weenv_elastic_changes", "Changes of limits", ["direction", "result"], registry=registry)
        self.change_seconds = Histogram(
            "weenv_elastic_change_seconds", "From a decision to the limit in force", buckets=_BUCKETS, registry=registry
        )
        self.admissions = Counter("weenv_elastic_admissions", "Environments that asked for room", ["result"], registry=registry)
        self.admission_seconds = Histogram(
            "weenv_elastic_admission_seconds", "How long those waited that were admitted",
            buckets=(0.01, 0.1, 1.0, 10.0, 60.0, 300.0, 1800.0), registry=registry,
        )  # fmt: skip
        self.oom = Counter("weenv_elastic_oom", "Environments ended, processes killed for memory", ["by"], registry=registry)
        self.ended = Counter("weenv_elastic_ended", "Environments that ended", ["cause"], registry=registry)
        self.unreadable = Counter("weenv_elastic_unreadable", "Looks that failed", registry=registry)
