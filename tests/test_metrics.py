"""Metrics of all daemons: documented, parsed by Prometheus's own parser, bounded, and had where they are configured."""

from __future__ import annotations

import ast
import http.client
import os
import re
import runpy
import socket
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.openmetrics import exposition
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as old_families

from weenv.core import digest as digests
from weenv.core.endpoint import MetricsEndpoint, check_address
from weenv.core.errors import ConfigError
from weenv.environment.gateway.metrics import Metrics as GatewayMetrics
from weenv.layer.verify import verify_frame
from weenv.plugin.nri.metrics import Metrics as ElasticMetrics
from weenv.plugin.snapshotter.blobfs.complete import Completion
from weenv.plugin.snapshotter.blobfs.config import CacheConfig, PrefetchConfig
from weenv.plugin.snapshotter.blobfs.daemon import read_tail
from weenv.plugin.snapshotter.blobfs.evictor import Evictor
from weenv.plugin.snapshotter.blobfs.layers import LayerTable
from weenv.plugin.snapshotter.blobfs.metrics import FAMILIES, Report
from weenv.plugin.snapshotter.blobfs.repair import TailRepair
from weenv.plugin.snapshotter.blobfs.server import Server
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher
from weenv.plugin.snapshotter.fetch.prefetch import Prefetcher
from weenv.plugin.snapshotter.layerdir import LayerDirs
from weenv.plugin.snapshotter.metrics import Metrics as SnapshotterMetrics
from weenv.registry.client import Counters, RegistryClient

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture
async def report(tmp_path: Path) -> AsyncIterator[Report]:
    """What a blobfs reports that serves nothing, but has errors of every sort."""
    fetcher = Fetcher(verify_frame)
    table = LayerTable(LayerDirs(str(tmp_path)), read_tail, lambda *_: [])
    server = Server(-1, table, fetcher, root=str(tmp_path))
    evictor = Evictor(CacheConfig(high=1000), str(tmp_path), table, server, fetcher)
    await evictor.look()
    repair = TailRepair(table.dirs, lambda *_: [], server.resume, 1.0)
    completion = Completion(fetcher, table.open_layers, table.refuse)
    prefetcher = Prefetcher(PrefetchConfig(), fetcher, evictor.room, table.holds)
    client = RegistryClient()
    yield Report(server, fetcher, table, None, repair, completion, evictor, prefetcher, client)
    await client.close()
    await fetcher.close()


def parsed(registry: CollectorRegistry) -> dict[str, Any]:
    """The registry's metrics as Prometheus's OpenMetrics parser reads them, by name."""
    text = exposition.generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_the_page_is_what_the_code_says() -> None:
    made = runpy.run_path(str(DOCS / "make_metrics.py"))
    assert (DOCS / "metrics.md").read_text() == made["page"](), "run .venv/bin/python docs/make_metrics.py"


def test_every_kind_of_error_is_documented() -> None:
    kinds = set(runpy.run_path(str(DOCS / "make_metrics.py"))["KINDS"])
    used: set[str] = {"frame_lost"}
    for path in (DOCS.parent / "plugin/snapshotter").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            if node.func.attr == "went_wrong" or (node.func.attr == "error" and "stats" in ast.unparse(node.func.value)):
                used |= {n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert len(used) > 8
    assert used <= kinds, "add them to KINDS in docs/make_metrics.py"


def test_everything_that_the_registry_client_counts_is_documented() -> None:
    assert list(runpy.run_path(str(DOCS / "make_metrics.py"))["ASKED"]) == list(Counters().rows())


@pytest.mark.parametrize("made", [SnapshotterMetrics, GatewayMetrics])
def test_what_others_count_is_read_when_somebody_asks(made: Any) -> None:
    metrics, counters = made(), Counters()
    metrics.registries.read = counters.rows
    counters.throttled = 3
    (name,) = [one for one in parsed(metrics.registry) if one.endswith("_registry")]
    assert {s.labels["what"]: s.value for s in parsed(metrics.registry)[name].samples}["throttled"] == 3
    with pytest.raises(ValueError, match="Duplicated"):
        Counter(name, "the same name", registry=metrics.registry)


@pytest.mark.parametrize("made", [SnapshotterMetrics, ElasticMetrics, GatewayMetrics])
def test_the_other_daemons_metrics_are_openmetrics(made: Any) -> None:
    metrics = made()
    found = parsed(metrics.registry)
    assert len(found) > 4
    assert all(re.fullmatch(r"weenv_(snapshotter|elastic|gateway)_[a-z_]+", name) and family.documentation
               for name, family in found.items())  # fmt: skip


async def test_blobfs_reports_each_metric_of_its_table_and_no_other(report: Report) -> None:
    report._fetcher.stats.error("digest")
    report._fetcher.stats.error("eio")
    report._fetcher.stats.range_seconds.observe(0.02)
    report._server.stats[0].error("data")
    tally = report._table.tallies.of("sha256:" + "a" * 64)
    tally.hit(1, 10)
    tally.errors["digest"] = 2
    report._client.counters.rests = 4
    found = parsed(report.registry)
    assert {name: family.type for name, family in found.items()} == {f.full_name: f.kind for f in FAMILIES.values()}
    for family in FAMILIES.values():
        for sample in found[family.full_name].samples:
            assert set(sample.labels) - {"le"} == set(family.labels), sample
    errors = {s.labels["kind"]: s.value for s in found["weenv_blobfs_errors"].samples}
    assert errors == {"digest": 1, "frame_lost": 1, "data": 1}
    assert {s.labels["what"]: s.value for s in found["weenv_blobfs_registry"].samples}["rests"] == 4
    layer = {(s.labels["layer"], s.labels["operation"]): s.value for s in found["weenv_blobfs_layer_bytes"].samples}
    assert layer["aaaaaaaaaaaa", "hit"] == 10 and layer["other", "hit"] == 0
    (buckets,) = [found["weenv_blobfs_range_seconds"].samples]
    assert [s.value for s in buckets if s.labels.get("le") in ("0.01", "0.025", "+Inf")] == [0, 1, 1]
    assert found["weenv_blobfs_cache_high_bytes"].samples[0].value == 1000


async def test_the_number_of_series_is_bounded(report: Report) -> None:
    for number in range(1000):
        report._table.tallies.of(digests.sha256(b"%d" % number)).hit(0, 1)
    samples = [sample for family in parsed(report.registry).values() for sample in family.samples]
    assert len({s.labels["layer"] for s in samples if "layer" in s.labels}) == 101
    assert sum(s.value for s in samples if s.labels.get("operation") == "hit") == 1000, "and nothing is lost"


def test_scrapers_get_the_format_that_they_ask_for() -> None:
    metrics = SnapshotterMetrics()
    metrics.fallbacks.labels(reason="disk").inc()
    endpoint = MetricsEndpoint(metrics, "127.0.0.1:0")
    try:
        ask = urllib.request.Request(
            f"http://127.0.0.1:{endpoint.port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
        )
        with urllib.request.urlopen(ask, timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            new = {family.name for family in text_string_to_metric_families(answer.read().decode())}
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=60) as answer:
            old = {family.name for family in old_families(answer.read().decode())}
        assert "weenv_snapshotter_fallbacks" in new and "weenv_snapshotter_fallbacks" in old
    finally:
        endpoint.close()


class Unix(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=5)
        self.path = path

    def connect(self) -> None:
        """Connect."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(5)
        self.sock.connect(self.path)


def test_metrics_on_a_unix_socket_that_nobody_else_may_use(tmp_path: Path) -> None:
    path = f"{tmp_path}/run/m.sock"
    with socket.socket(socket.AF_UNIX) as dead:  # one that a killed process left
        os.makedirs(f"{tmp_path}/run")
        dead.bind(path)
    endpoint = MetricsEndpoint(SnapshotterMetrics(), f"unix:{path}")
    try:
        assert os.stat(path).st_mode & 0o777 == 0o600
        connection = Unix(path)
        connection.request("GET", "/metrics")
        assert b"weenv_snapshotter_fallbacks" in connection.getresponse().read()
        connection.close()
        with pytest.raises(ConfigError, match="cannot listen"):
            MetricsEndpoint(SnapshotterMetrics(), f"unix:{path}")
        assert os.path.exists(path), "the first goes on"
    finally:
        endpoint.close()
    assert not os.path.exists(path)


@pytest.mark.parametrize("address", ["unix:", "unix:m.sock", "unix:/a\0b", "unix:/" + "x" * 120, "0.0.0.0:1", "m.sock"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_address(address)
    assert caught.value.hint
