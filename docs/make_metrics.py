"""Write docs/metrics.md from the code: ``.venv/bin/python docs/make_metrics.py``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from weenv.core.endpoint import Elsewhere
from weenv.environment.gateway.metrics import Metrics as GatewayMetrics
from weenv.plugin.nri.metrics import Metrics as ElasticMetrics
from weenv.plugin.snapshotter.blobfs.metrics import FAMILIES
from weenv.plugin.snapshotter.metrics import Metrics as SnapshotterMetrics
from weenv.plugin.snapshotter.resolve import REASONS

HEAD = """# Metrics

Every daemon serves Prometheus metrics where its `metrics_address` says: a loopback `HOST:PORT`, or `unix:/path` (mode 0600),
below `/metrics`; by default nowhere. Who asks for OpenMetrics (`Accept: application/openmetrics-text`, as Prometheus does) gets
it, others the older text format. Counters are shown with `_total`, histograms as `_bucket`, `_sum` and `_count`; times are in
seconds, sizes in bytes. All counters begin at 0 with the process. This page is written by `docs/make_metrics.py` from the code.

| daemon | setting | usual value |
|---|---|---|
| `weenv snapshotter serve` | `[snapshotter] metrics_address` | `127.0.0.1:9440` |
| `weenv blobfs serve` | `[blobfs] metrics_address` | `127.0.0.1:9441` |
| `weenv elastic serve` | `[elastic.serve] metrics_address` | `127.0.0.1:9442` |
| `weenv gateway serve` | `[gateway] metrics_address` | `127.0.0.1:9443` |

They are for something on the node itself: a Prometheus agent, or any collector, that scrapes these addresses and sends on what
it finds. In Kubernetes that is a DaemonSet with `hostNetwork: true`, which the daemons' pods have as well; with `unix:/path`
also a pod that mounts the directory. There is no login, so no other address is taken.

**How many series there are is bounded.** The label `layer` is the first 12 digits of a layer's digest, for at most 100 layers,
and `other` for the rest: a layer that is opened takes the place of the one that was opened longest ago and is closed, whose
counts go to `other`. All other labels have the values that this page names.

Questions, and what answers them:

| question | expression |
|---|---|
| is anything not lazy, and why? | `increase(weenv_snapshotter_fallbacks_total[1h]) > 0`, by `reason` |
| do readers wait long? | `histogram_quantile(0.99, rate(weenv_blobfs_wait_seconds_bucket[5m]))` |
| do readers get errors? | `rate(weenv_blobfs_errors_total{kind="eio"}[5m]) > 0` |
| how much of what the page cache does not answer is local? | `rate(weenv_blobfs_read_hits_total[5m])`, against `reads` |
| is the cache too small? | `rate(weenv_blobfs_evicted_bytes_total{reason="size"}[1h])`, against the same of `stored_bytes` |
| is a registry slow? | `histogram_quantile(0.9, rate(weenv_blobfs_range_seconds_bucket[5m]))` |
| does a registry throttle us? | `increase(weenv_blobfs_registry_total{what="throttled"}[5m]) > 0`; a mirror fails: `"rests"` |
"""

KINDS = {
    "data": "`data` could not be read where a frame was marked; it is fetched again",
    "damage": "marks or data were damaged and are fetched again (by layer only)",
    "diffid": "a complete stream did not have its diffID (by layer only)",
    "digest": "a source sent a frame with another digest; the next source is asked",
    "eio": "a reader got EIO: the frame could not be had from any source in time",
    "enospc": "the disk took no data; the frame is served from memory",
    "frame_lost": "frames that could not be had (each may have several readers)",
    "internal": "an unexpected error, with a traceback in the log",
    "layer": "a layer could not be opened",
    "notfound": "a source does not hold the blob",
    "protocol": "a request of the kernel could not be understood",
    "short": "a source sent less than was asked for",
    "source": "a source failed otherwise",
    "stall": "a source sent nothing for too long",
    "storage": "the disk failed",
    "unauthorized": "a source refused the credentials",
}
"""Values of the label ``kind`` of weenv_blobfs_errors and weenv_blobfs_layer_errors."""

ASKED = {
    "requests": "requests sent, to registries, mirrors, token servers and where redirects led",
    "bytes": "bytes of their answers' bodies",
    "retries": "rounds begun again after a pause, since no server had answered as it should",
    "redirects": "redirects followed",
    "renewals": "new tokens or credentials had, since a server had refused the old ones",
    "range_ignored": "servers found to ignore Range, once a blob",
    "raced": "servers that did not begin to answer within `race_after`, so that the next was asked as well",
    "rests": "servers that failed twice in a row, so that the others are asked before them",
    "throttled": "answers with status 429",
}
"""Values of the label ``what`` of weenv_*_registry."""


def families(registry: CollectorRegistry) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Name, type, text and labels of all metrics of a registry."""
    for collector in list(registry._collector_to_names):
        assert isinstance(collector, MetricWrapperBase | Elsewhere)
        labels = (collector.label,) if isinstance(collector, Elsewhere) else tuple(collector._labelnames)
        for metric in collector.describe():
            yield metric.name, metric.type, metric.documentation, labels


def table(rows: Iterator[tuple[str, str, str, tuple[str, ...]]] | list[tuple[str, str, str, tuple[str, ...]]]) -> list[str]:
    """As Markdown."""
    lines = ["| metric | type | labels | what it is |", "|---|---|---|---|"]
    for name, kind, text, labels in rows:
        shown = f"{name}_total" if kind == "counter" else name
        lines.append(f"| `{shown}` | {kind} | {', '.join(f'`{label}`' for label in labels) or '-'} | {text} |")
    return lines


def page() -> str:
    """The whole page."""
    classes: list[tuple[str, Any]] = [
        ("`weenv snapshotter serve`", SnapshotterMetrics), ("`weenv elastic serve`", ElasticMetrics),
        ("`weenv gateway serve`", GatewayMetrics),
    ]  # fmt: skip
    lines = [HEAD, "## `weenv blobfs serve`", ""]
    lines += table([(family.full_name, family.kind, family.text, family.labels) for family in FAMILIES.values()])
    lines += ["", "Kinds of errors:", "", "| `kind` | what happened |", "|---|---|"]
    lines += [f"| `{kind}` | {text} |" for kind, text in KINDS.items()]
    lines += ["", "Of registries, also in the snapshotter and the gateway:", "", "| `what` | what is counted |", "|---|---|"]
    lines += [f"| `{what}` | {text} |" for what, text in ASKED.items()]
    for title, made in classes:
        lines += ["", f"## {title}", "", *table(families(made().registry))]
        if made is SnapshotterMetrics:
            lines += ["", "Each fallback is one line of the log, `image is not served lazily`, and one count:", ""]
            lines += ["| `reason` | what it means |", "|---|---|", *(f"| `{key}` | {text} |" for key, text in REASONS.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "metrics.md"), "w", encoding="utf-8") as file:
        file.write(page())
