"""What blobfs counts, for Prometheus and for ``weenv status``.

The hot path adds to plain integers, one set per thread; they are summed when somebody asks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from weenv.plugin.snapshotter.blobfs.complete import Completion
from weenv.plugin.snapshotter.blobfs.layers import Layer, LayerTable
from weenv.plugin.snapshotter.blobfs.repair import TailRepair
from weenv.plugin.snapshotter.blobfs.server import LATENCY_BOUNDS, Server, ServeStats
from weenv.plugin.snapshotter.cache.present import MISSING
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher
from weenv.plugin.snapshotter.fetch.fill import Filler

_PRIORITIES = ("demand", "ahead", "fill")


class Report(Collector):
    """Gathers the numbers of one server. A :class:`prometheus_client.registry.Collector`."""

    def __init__(
        self,
        server: Server,
        fetcher: Fetcher,
        table: LayerTable,
        filler: Filler | None,
        repair: TailRepair,
        completion: Completion,
    ) -> None:
        self._server = server
        self._fetcher = fetcher
        self._table = table
        self._filler = filler
        self._repair = repair
        self._completion = completion

    def _sum(self) -> ServeStats:
        total = ServeStats()
        for stats in self._server.stats:
            total.requests += stats.requests
            total.reads += stats.reads
            total.hits += stats.hits
            total.served_bytes += stats.served_bytes
            total.wait_seconds += stats.wait_seconds
            total.waits = [a + b for a, b in zip(total.waits, stats.waits, strict=True)]
            for kind, count in list(stats.errors.items()):
                total.errors[kind] = total.errors.get(kind, 0) + count
        return total

    def collect(self) -> Iterator[Metric]:
        """The metrics, as Prometheus families."""
        total, fetch = self._sum(), self._fetcher.stats
        for name, text, value in (
            ("weenv_blobfs_requests", "FUSE requests read", total.requests),
            ("weenv_blobfs_reads", "FUSE READ requests", total.reads),
            ("weenv_blobfs_read_hits", "READ requests whose data was present", total.hits),
            ("weenv_blobfs_served_bytes", "Bytes of tar streams given to the kernel", total.served_bytes),
            ("weenv_blobfs_fetched_bytes", "Compressed bytes that arrived from sources", fetch.fetched_bytes),
            ("weenv_blobfs_stored_bytes", "Content bytes of frames that passed the checks", fetch.stored_bytes),
            ("weenv_blobfs_ranges", "Ranged reads begun", fetch.ranges),
            ("weenv_blobfs_layers_checked", "Complete layers found to have their diffID", self._completion.checked),
            ("weenv_blobfs_diffid_mismatches", "Complete layers found not to have it", self._completion.mismatches),
            ("weenv_blobfs_tails_replaced", "Stored tails found damaged and fetched again", self._repair.mended),
            ("weenv_blobfs_tails_lost", "Attempts at that which failed", self._repair.failed),
        ):
            yield CounterMetricFamily(name, text, value)
        frames = CounterMetricFamily("weenv_blobfs_frames", "Frames fetched, by what for", labels=["priority"])
        for label, count in zip(_PRIORITIES, fetch.frames, strict=True):
            frames.add_metric([label], count)
        yield frames
        errors = CounterMetricFamily("weenv_blobfs_errors", "Errors, by kind", labels=["kind"])
        kinds = dict(total.errors)
        for kind, count in list(fetch.errors.items()):
            # Both count readers' EIO; the server counts requests, the fetcher frames.
            kinds["frame_lost" if kind == "eio" else kind] = count
        for kind in sorted(kinds):
            errors.add_metric([kind], kinds[kind])
        yield errors
        running, buckets = 0, []
        for bound, count in zip((*map(str, LATENCY_BOUNDS), "+Inf"), total.waits, strict=True):
            running += count
            buckets.append((bound, running))
        yield HistogramMetricFamily(
            "weenv_blobfs_wait_seconds",
            "How long readers waited for missing data",
            buckets=buckets,
            sum_value=total.wait_seconds,
        )
        for name, text, value in (
            ("weenv_blobfs_layers_known", "Layers that the kernel has asked for", len(self._table.nodes)),
            ("weenv_blobfs_layers_open", "Layers open", len(self._table.open_layers())),
            ("weenv_blobfs_layers_memory_bytes", "Memory that open layers take, about", self._table.memory()),
            ("weenv_blobfs_layers_bad", "Layers not served: their content does not have its diffID", len(self._table.bad)),
            ("weenv_blobfs_waiting", "READ requests waiting for data", len(self._server.waiting)),
            ("weenv_blobfs_ranges_running", "Ranged reads in flight", self._fetcher.running),
        ):
            yield GaugeMetricFamily(name, text, value)

    def status(self) -> dict[str, Any]:
        """The same for people, and the open layers: what ``weenv status`` shows."""
        total, fetch = self._sum(), self._fetcher.stats
        return {
            "requests": total.requests,
            "reads": total.reads,
            "hits": total.hits,
            "served_bytes": total.served_bytes,
            "fetched_bytes": fetch.fetched_bytes,
            "frames": dict(zip(_PRIORITIES, fetch.frames, strict=True)),
            "ranges": fetch.ranges,
            "errors": {**fetch.errors, **total.errors},
            "waiting": len(self._server.waiting) + len(self._server.parked),
            "wait_seconds": round(total.wait_seconds, 3),
            "fill": self._filler.state if self._filler is not None else "off",
            "filled_bytes": self._filler.filled_bytes if self._filler is not None else 0,
            "checking": self._completion.checking,
            "checked": self._completion.checked,
            "diffid_mismatches": self._completion.mismatches,
            "tails_replaced": self._repair.mended,
            "layers_memory": self._table.memory(),
            "bad_layers": [{"digest": digest, "reason": reason} for digest, reason in list(self._table.bad.items())],
            "layers": [_layer(layer) for layer in self._table.open_layers()],
        }

    def status_json(self) -> bytes:
        """:meth:`status` as one line of JSON."""
        return json.dumps(self.status()).encode() + b"\n"


def _layer(layer: Layer) -> dict[str, Any]:
    frames, presence = layer.frames, layer.presence
    there = np.frombuffer(bytes(presence.states), np.uint8) != MISSING
    local = int(frames.content_sizes[there].sum(dtype=np.uint64))
    return {
        "digest": layer.source.digest,
        "frames": len(presence),
        "missing": presence.missing,
        "stream_size": layer.size,
        "local_bytes": local,
        "local_percent": round(100.0 * local / layer.size, 2) if layer.size else 100.0,
        "diffid": ("unchecked", "good", "bad", "fetched again")[presence.verdict & 3],
        "cached": presence.persistent,
        "memory": layer.memory,
        "errors": dict(layer.errors),
        "last_error": layer.last_error,
        "sources": [str(source) for source in layer.sources],
    }
