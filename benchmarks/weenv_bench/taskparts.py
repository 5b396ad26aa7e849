"""The rows about tasks, groups and plans: each function measures one part and says how it went."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from weenv.layer.toc import Toc
from weenv_bench import planned
from weenv_bench import strategies as three
from weenv_bench.image import Image
from weenv_bench.node import state_directory
from weenv_bench.report import Row, at_least, at_most, known, quantile
from weenv_bench.taskset import Stage

MB = 1e6


def strategies(stage: Stage) -> list[Row]:
    """Artifacts and bytes of three strategies; an update of a harness."""
    found = three.measure(stage)
    ours, update = found["strategies"][-1], found["update"]
    top, cached, exact, per_repository = found["strategies"][:4]
    what = f"{found['tasks']} tasks x {found['harnesses']} harnesses"
    part = "strategies"
    return [
        at_most(part, f"artifacts for {what}: groups", ours["artifacts"], found["limit"], "", found),
        at_most(part, "  bytes / an image per task and harness, each by itself", share(ours, top, "whole"), 1, " %"),
        known(part, "  bytes / what a registry stores of them: harness on top", f"{share(ours, top, 'stored'):.2f} %"),
        known(part, "  … task on top, from a build cache", f"{share(ours, cached, 'stored'):.0f} %"),
        known(part, "  … every layer reproducible", f"{share(ours, exact, 'stored'):.0f} %"),
        known(
            part, "  bytes / an image per repository and harness, as stored", f"{share(ours, per_repository, 'stored'):.0f} %"
        ),
        at_most(part, "update of a harness: groups pushed", update["groups"], 1),
        at_least(part, "  plans that run it at their next start", update["updated"] / update["plans"] * 100, 100, " %"),
        at_most(part, "  bytes / rebuilt images per task, harness on top", share(ours, top, "update_bytes"), 100, " %"),
        at_most(part, "  bytes / task on top, from a build cache", share(ours, cached, "update_bytes"), 100, " %"),
        at_most(part, "  bytes / images per repository", share(ours, per_repository, "update_bytes"), 100, " %"),
        at_most(part, "  time / rebuilt images per task, harness on top", share(ours, top, "update_s"), 100, " %"),
        at_most(part, "  time / task on top, from a build cache", share(ours, cached, "update_s"), 100, " %"),
        at_most(part, "  time / images per repository", share(ours, per_repository, "update_s"), 100, " %"),
    ]


def share(ours: dict[str, Any], theirs: dict[str, Any], field: str) -> float:
    """A figure of ours in per cent of theirs."""
    return float(ours[field]) / float(theirs[field]) * 100


COLUMNS = ("strategy", "artifacts", "each by itself", "registry stores", "update: artifacts", "pushed", "time")


def cells(row: dict[str, Any]) -> list[str]:
    """One strategy as text, by :data:`COLUMNS`."""
    mark = "*" if row["extrapolated"] else ""
    return [
        row["name"] + mark, str(row["artifacts"]), size(row["whole"]), size(row["stored"]), str(row["update_artifacts"]),
        size(row["update_bytes"]), f"{row['update_s']:.1f} s",
    ]  # fmt: skip


def size(value: float) -> str:
    """Bytes for people."""
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / MB:.1f} MB"


def show(rows: list[Row], console: Console) -> None:
    """Print the strategies' table where they were measured."""
    for row in rows:
        if row.part != "strategies" or not row.detail:
            continue
        found = row.detail["strategies"]
        table = Table(title=f"{row.detail['tasks']} tasks x {row.detail['harnesses']} harnesses", title_justify="left")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == COLUMNS[0] else "right", overflow="fold")
        for line in found:
            table.add_row(*cells(line))
        console.print(table)
        console.print("\n".join(f"* {line['extrapolated']}" for line in found if line["extrapolated"]))


def compose(stage: Stage) -> list[Row]:
    """Composing plans whose groups are known."""
    found = planned.compose_latency(stage)
    plain, task, new, again = (found["ms"][kind] for kind in ("plain", "task", "new", "again"))
    return [
        at_most("compose", "compose a plan of known groups, p50", quantile(plain, 0.5), 30, " ms", found, spread=plain),
        at_most("compose", "  p99", quantile(plain, 0.99), 100, " ms"),
        at_most("compose", "  with a mutation layer that is there, p50", quantile(task, 0.5), 30, " ms", spread=task),
        at_most("compose", "  p99", quantile(task, 0.99), 100, " ms"),
        at_most("compose", "  layer bytes fetched for all of these", found["bytes"], 0),
        known("compose", "  a task never seen, its mutation made on the way, p50", f"{quantile(new, 0.5):.1f} ms"),
        known("compose", "  one that is composed already, p50", f"{quantile(again, 0.5):.1f} ms"),
        known(
            "compose", "  a task's layer on the node, mean", f"{found['layer_bytes'] / max(1, found['layers']) / 1000:.1f} KB"
        ),
    ]


@contextmanager
def scratch() -> Iterator[str]:
    """A directory that is gone afterwards."""
    path = state_directory("wk-")
    try:
        yield path
    finally:
        shutil.rmtree(path)


def mutation(image: Image, layout: str, tocs: list[Toc]) -> list[Row]:
    """A mutation layer for a patch in a large image."""
    with scratch() as directory:
        found = planned.mutation_latency(image, layout, tocs, directory, 40)
    warm, first = found["ms"]["warm"], found["ms"]["first"]
    what = f"layer of a 10-line patch in an image of {image.unpacked / 1e9:.1f} GB"
    extra = found["fetched"]["first"] / found["frames"]
    return [
        at_most("mutation", f"{what}, warm, p50", quantile(warm, 0.5), 50, " ms", found, spread=warm),
        at_most("mutation", "  a file touched for the first time, p50", quantile(first, 0.5), 50, " ms", spread=first),
        at_most("mutation", "  bytes fetched / frames of the touched files", extra, 1),
        at_most("mutation", "  bytes fetched when touched again", found["fetched"]["warm"], 0),
        known("mutation", "  the layer, mean", f"{found['layer_bytes'] / 1000:.1f} KB"),
        known("mutation", "  tables of contents read, once per node and image", f"{found['open_s'] * 1000:.0f} ms"),
    ]


def run(stage: Stage, quick: bool) -> list[Row]:
    """``weenv run`` of a plan against ``ctr run`` of an image."""
    found = planned.run_latency(stage, 10 if quick else 40)
    ratios = [ours / theirs for ours, theirs in zip(found["weenv"], found["ctr"], strict=True)]
    value = statistics.median(found["weenv"]) / statistics.median(found["ctr"])
    return [
        at_most("run", "weenv run --rm PLAN -- true, warm / ctr run of a plain local image", value, 1.15, "", {"ms": found},
                spread=ratios)
    ]  # fmt: skip


def resolve(quick: bool) -> list[Row]:
    """A thousand references."""
    with scratch() as directory:
        found = planned.resolve_latency(directory, 1000, 2 if quick else 5)
    rows = [
        ("cached", "resolving 1 000 references, cached", 50.0),
        ("restarted", "  by a new process, from the node's mapping cache", 50.0),
        ("cold", "  cold, from a local registry", 5000.0),
        ("asked", "  every tag asked about again", 5000.0),
    ]
    return [
        at_most("resolve", what, statistics.median(found[kind]), limit, " ms", {"ms": found} if kind == "cached" else None,
                spread=found[kind])
        for kind, what, limit in rows
    ]  # fmt: skip
