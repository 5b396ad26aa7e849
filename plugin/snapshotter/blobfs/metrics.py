"""What blobfs counts, for Prometheus and for ``weenv status``.

The hot path adds to plain integers, one set per thread; they are summed when somebody asks. Labels are bounded: ``layer`` is
the first 12 digits of the digest of one of a hundred layers, or ``other`` (cache/tally.py); all others have fixed values.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from weenv.plugin.snapshotter.blobfs.complete import Completion
from weenv.plugin.snapshotter.blobfs.evictor import Evictor
from weenv.plugin.snapshotter.blobfs.layers import Layer, LayerTable
from weenv.plugin.snapshotter.blobfs.repair import TailRepair
from weenv.plugin.snapshotter.blobfs.server import LATENCY_BOUNDS, Server, ServeStats
from weenv.plugin.snapshotter.cache.present import MISSING
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher
from weenv.plugin.snapshotter.fetch.fill import Filler
from weenv.plugin.snapshotter.fetch.flight import PRIORITIES
from weenv.plugin.snapshotter.fetch.prefetch import Prefetcher
from weenv.registry.client import RegistryClient

_PREFIX: Final = "weenv_blobfs_"


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: its name without prefix, its type, what it is, and its labels. docs/metrics.md is made of these."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """As Prometheus has it."""
        return _PREFIX + self.name


FAMILIES: Final = {
    family.name: family
    for family in (
        Family("requests", "counter", "FUSE requests read"),
        Family("reads", "counter", "READ requests"),
        Family("read_hits", "counter", "READ requests whose data was present"),
        Family("served_bytes", "counter", "Bytes of tar streams given to the kernel"),
        Family("fetched_bytes", "counter", "Compressed bytes that arrived from sources"),
        Family("stored_bytes", "counter", "Content bytes of frames that passed the checks"),
        Family("filled_bytes", "counter", "Compressed bytes that the background fill fetched"),
        Family("ranges", "counter", "Ranged reads begun"),
        Family("layers_checked", "counter", "Complete layers found to have their diffID"),
        Family("layers_unproven", "counter", "Complete layers of other formats whose chunks are good; their diffID is unknown"),
        Family("diffid_mismatches", "counter", "Complete layers found not to have it"),
        Family("tails_replaced", "counter", "Stored tails found damaged and fetched again"),
        Family("tails_lost", "counter", "Attempts at that which failed"),
        Family("frames", "counter", "Frames fetched, by what for: demand (a reader waits), ahead, prefetch (a profile), fill",
               ("priority",)),
        Family("prefetch_used", "counter", "Frames that profiles brought which have been read since"),
        Family("prefetches", "counter", "Starts of images with a profile"),
        Family("errors", "counter", "Errors, by kind (see below)", ("kind",)),
        Family("registry", "counter", "What was asked of registries, and what came of it (see below)", ("what",)),
        Family("evicted_frames", "counter", "Frames punched out: size, disk (the bounds), unused, prune", ("reason",)),
        Family("evicted_bytes", "counter", "Their content bytes", ("reason",)),
        Family("layer_bytes", "counter",
               "Bytes of a layer: hit (given at once), waited (given after a fetch), fetched (compressed), stored, evicted",
               ("layer", "operation")),
        Family("layer_reads", "counter", "READ requests for a layer: hit (answered at once), waited", ("layer", "result")),
        Family("layer_errors", "counter", "Errors of a layer, by kind (see below)", ("layer", "kind")),
        Family("wait_seconds", "histogram", "How long readers waited for missing data"),
        Family("range_seconds", "histogram", "How long ranged reads took that brought all that was asked for"),
        Family("layers_known", "gauge", "Layers that the kernel has asked for"),
        Family("layers_open", "gauge", "Layers open"),
        Family("layers_memory_bytes", "gauge", "Memory that open layers take, about"),
        Family("layers_bad", "gauge", "Layers not served: their content does not have its diffID"),
        Family("waiting", "gauge", "READ requests waiting for data"),
        Family("ranges_running", "gauge", "Ranged reads in flight"),
        Family("cache_bytes", "gauge", "Bytes of disk that layers' data takes"),
        Family("cache_high_bytes", "gauge", "Bytes from which on frames are evicted; +Inf: no bound"),
        Family("cache_low_bytes", "gauge", "Bytes down to which they are"),
        Family("cache_stuck", "gauge", "1 while the cache is over its bound and nothing can be evicted"),
    )
}  # fmt: skip


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
        evictor: Evictor,
        prefetcher: Prefetcher,
        client: RegistryClient,
    ) -> None:
        self._server = server
        self._fetcher = fetcher
        self._table = table
        self._filler = filler
        self._repair = repair
        self._completion = completion
        self._evictor = evictor
        self._prefetcher = prefetcher
        self._client = client
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def _sum(self) -> ServeStats:
        total = ServeStats()
        for stats in list(self._server.stats):
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
        cache = self._evictor.status()
        numbers = {
            "requests": total.requests,
            "reads": total.reads,
            "read_hits": total.hits,
            "served_bytes": total.served_bytes,
            "fetched_bytes": fetch.fetched_bytes,
            "stored_bytes": fetch.stored_bytes,
            "filled_bytes": self._filler.filled_bytes if self._filler is not None else 0,
            "ranges": fetch.ranges,
            "prefetch_used": fetch.prefetch_used,
            "prefetches": self._prefetcher.begun,
            "layers_checked": self._completion.checked,
            "layers_unproven": self._completion.unproven,
            "diffid_mismatches": self._completion.mismatches,
            "tails_replaced": self._repair.mended,
            "tails_lost": self._repair.failed,
            "layers_known": len(self._table.nodes),
            "layers_open": len(self._table.open_layers()),
            "layers_memory_bytes": self._table.memory(),
            "layers_bad": len(self._table.bad),
            "waiting": len(self._server.waiting),
            "ranges_running": self._fetcher.running,
            "cache_bytes": cache["data"],
            "cache_high_bytes": float("inf") if cache["high"] is None else cache["high"],
            "cache_low_bytes": float("inf") if cache["low"] is None else cache["low"],
            "cache_stuck": int(cache["stuck"]),
        }
        for name, value in numbers.items():
            yield _single(FAMILIES[name], value)
        kinds = dict(total.errors)
        for kind, count in list(fetch.errors.items()):
            # Both count readers' EIO; the server counts requests, the fetcher frames.
            kinds["frame_lost" if kind == "eio" else kind] = count
        layers = self._table.tallies.rows()
        rows: dict[str, Iterable[tuple[tuple[str, ...], float]]] = {
            "frames": (((label,), count) for label, count in zip(PRIORITIES, fetch.frames, strict=True)),
            "errors": (((kind,), kinds[kind]) for kind in sorted(kinds)),
            "registry": (((what,), count) for what, count in self._client.counters.rows().items()),
            "evicted_frames": (((reason,), count) for reason, count in cache["evicted_frames"].items()),
            "evicted_bytes": (((reason,), count) for reason, count in cache["evicted_bytes"].items()),
            "layer_bytes": (
                ((layer, operation), count)
                for layer, tally in layers
                for operation, count in (
                    ("hit", sum(size for _, size in list(tally.hits.values()))), ("waited", tally.waited),
                    ("fetched", tally.fetched), ("stored", tally.stored), ("evicted", tally.evicted),
                )
            ),
            "layer_reads": (
                ((layer, result), count)
                for layer, tally in layers
                for result, count in (("hit", sum(reads for reads, _ in list(tally.hits.values()))), ("waited", tally.waits))
            ),
            "layer_errors": (
                ((layer, kind), count) for layer, tally in layers for kind, count in sorted(tally.errors.copy().items())
            ),
        }  # fmt: skip
        for name, values in rows.items():
            family = FAMILIES[name]
            metric = CounterMetricFamily(family.full_name, family.text, labels=list(family.labels))
            for labels, value in values:
                metric.add_metric(list(labels), value)
            yield metric
        yield _histogram(FAMILIES["wait_seconds"], LATENCY_BOUNDS, total.waits, total.wait_seconds)
        ranges = fetch.range_seconds
        yield _histogram(FAMILIES["range_seconds"], ranges.bounds, ranges.counts, ranges.total)

    def status(self) -> dict[str, Any]:
        """The same for people, and the open layers: what ``weenv status`` shows."""
        total, fetch = self._sum(), self._fetcher.stats
        return {
            "requests": total.requests,
            "reads": total.reads,
            "hits": total.hits,
            "served_bytes": total.served_bytes,
            "fetched_bytes": fetch.fetched_bytes,
            "frames": dict(zip(PRIORITIES, fetch.frames, strict=True)),
            "ranges": fetch.ranges,
            "errors": {**fetch.errors, **total.errors},
            "waiting": len(self._server.waiting) + len(self._server.parked),
            "wait_seconds": round(total.wait_seconds, 3),
            "prefetching": self._prefetcher.running,
            "prefetch_used": fetch.prefetch_used,
            "fill": self._filler.state if self._filler is not None else "off",
            "filled_bytes": self._filler.filled_bytes if self._filler is not None else 0,
            "checking": self._completion.checking,
            "checked": self._completion.checked,
            "unproven": self._completion.unproven,
            "diffid_mismatches": self._completion.mismatches,
            "tails_replaced": self._repair.mended,
            "cache": self._evictor.status(),
            "registries": [
                {"server": server, "state": state, "seconds": round(seconds, 1)}
                for server, state, seconds in self._client.health.ill(time.monotonic())
            ],
            "layers_memory": self._table.memory(),
            "bad_layers": [{"digest": digest, "reason": reason} for digest, reason in list(self._table.bad.items())],
            "layers": [_layer(layer) for layer in self._table.open_layers()],
        }


def _single(family: Family, value: float) -> Metric:
    made = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    return made(family.full_name, family.text, value)


def _histogram(family: Family, bounds: tuple[float, ...], counts: list[int], total: float) -> Metric:
    running, buckets = 0, []
    for bound, count in zip((*map(str, bounds), "+Inf"), list(counts), strict=True):
        running += count
        buckets.append((bound, running))
    return HistogramMetricFamily(family.full_name, family.text, buckets=buckets, sum_value=total)


def _diffid(layer: Layer) -> str:
    """What is known of the stream as a whole; of a layer in another format its chunks are, and nothing else can be."""
    if layer.source.foreign is not None:
        return "unknown"
    return ("unchecked", "good", "bad", "fetched again")[layer.presence.verdict & 3]


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
        "diffid": _diffid(layer),
        "format": "weenv" if layer.source.foreign is None else layer.source.foreign.format,
        "cached": presence.persistent,
        "memory": layer.memory,
        "errors": layer.tally.errors.copy(),
        "last_error": layer.last_error,
        "sources": [str(source) for source in layer.sources],
    }
