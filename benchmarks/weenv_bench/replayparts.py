"""Elastic quotas in replay: demand from committed seeds through policy and admission, on simulated nodes of 128 cores."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from weenv.plugin.nri.config import GIB, ElasticConfig
from weenv.plugin.nri.model import Resources
from weenv.plugin.nri.replay import generate, simulate, strategies
from weenv.plugin.nri.replay.report import Curves, Summary, curves, summarise
from weenv.plugin.nri.replay.traces import Trace
from weenv_bench.report import Row, at_least, known, quantile

CORES = 128.0
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
"""Points of the published curve."""
SEEDS = range(8968, 8973)
"""Sets of 100 tasks; the first is the named one."""


def _run(traces: list[Trace], nodes: int, name: str) -> tuple[Summary, Curves]:
    made = strategies.named(ElasticConfig(), CORES)[name]
    results, used = simulate.fleet(traces, nodes, Resources(CORES, 1024 * GIB), [made() for _ in range(nodes)])
    return summarise(name, results, used), curves(results, used)


def replay(quick: bool) -> list[Row]:
    """A mixed set of tasks under the median's fixed quota and under ours, and a fleet."""
    totals: list[float] = []
    slowest: list[float] = []
    detail: dict[str, Any] = {}
    for seed in list(SEEDS)[: 1 if quick else None]:
        traces = generate.mixed(seed, 100)
        found = {name: _run(traces, 1, name) for name in ("fixed-median", "elastic", "oracle")}
        fixed, elastic = found["fixed-median"][0], found["elastic"][0]
        totals.append(fixed.total / elastic.total)
        slowest.append(fixed.slowest / elastic.slowest)
        if not detail:
            detail = {
                "seconds": [fixed.total, elastic.total],
                "curve": {name: [quantile(curve.took, share) for share in SHARES] for name, (_, curve) in found.items()},
                "summaries": [asdict(summary) for summary, _ in found.values()],
            }
    detail |= {"totals": totals, "slowest": slowest}
    before, after = detail["seconds"]
    rows = [
        at_least("replay", "mixed tasks (10 % heavy), total time, fixed median quota / elastic", statistics.median(totals), 1.5,
                 "", detail),
        at_least("replay", "  slowest task", statistics.median(slowest), 4, "x"),
        known("replay", "  total time ratio, least and most of the sets", f"{min(totals):.2f}–{max(totals):.2f}"),
        known("replay", "  total of the first set", f"{before:.0f} s → {after:.0f} s"),
    ]  # fmt: skip
    chosen = generate.SETS["published-small" if quick else "published"]
    traces = chosen.make()
    fleet = [_run(traces, chosen.nodes, name)[0] for name in ("elastic", "elastic-x2", "oracle")]
    lost = ", ".join(f"{summary.throttled_share:.1%} {summary.strategy}" for summary in fleet)
    what = f"fleet of {chosen.nodes} nodes, {len(traces)} environments: time lost to throttling"
    rows.append(known("replay", what, lost, {"fleet": [asdict(summary) for summary in fleet]}))
    rows.append(
        known("replay", "  killed or ended for memory", ", ".join(f"{s.oom_kills + s.ended} {s.strategy}" for s in fleet))
    )
    return rows
