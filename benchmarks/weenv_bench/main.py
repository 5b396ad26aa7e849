"""The command: which parts to measure, in what order, and the report."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import cached_property
from typing import Any

from rich.console import Console

from weenv.layer.toc import Toc
from weenv_bench import (
    daemons,
    docs,
    elasticparts,
    local,
    parts,
    planesparts,
    prepare,
    reads,
    replayparts,
    report,
    series,
    taskparts,
)
from weenv_bench.image import BenchError, Image, Recipe, build, recipe, say
from weenv_bench.link import Link
from weenv_bench.node import FarRegistry, Node
from weenv_bench.report import Row, at_least, at_most
from weenv_bench.taskset import Stage
from weenv_testkit import tools
from weenv_testkit.procs import Failed

REPOSITORY = "bench"
MB = 1e6


class Bench:
    """What the parts share: the image, the link, the registry; made when first asked for."""

    def __init__(self, quick: bool, rounds: int) -> None:
        self.quick = quick
        self.rounds = rounds
        self.recipe: Recipe = recipe(quick)
        self.facts: dict[str, Any] = {}
        self._link: Link | None = None
        self._registry: FarRegistry | None = None
        self._tocs: list[Toc] = []
        self._stage: Stage | None = None

    @cached_property
    def image(self) -> Image:
        """The image. Raises BenchError."""
        made = build(self.quick)
        self.facts["image"] = {"name": made.name, "files": made.files, "unpacked": made.unpacked, **made.sizes}
        return made

    @property
    def stage(self) -> Stage:
        """The groups of the tasks, and a node."""
        if self._stage is None:
            self._stage = Stage(self.quick)
        return self._stage

    @property
    def converted(self) -> str:
        """The OCI layout with the converted image, tag ``weenv``; made anew when the converter's own code has changed."""
        path = os.path.join(self.image.base, f"converted-{_sources('layer', 'converter')}")
        if not self._tocs and os.path.exists(os.path.join(path, "index.json")):
            self._read(path)
        elif not self._tocs:
            for old in os.listdir(os.path.dirname(path)):
                if old.startswith("converted"):
                    shutil.rmtree(os.path.join(os.path.dirname(path), old))
            say("converting the image")
            begin = time.perf_counter()
            subprocess.run(
                [*tools.weenv(), "convert", f"oci:{self.image.layout}:zstd", f"oci:{path}:weenv"], check=True, stdout=sys.stderr
            )
            say(f"converted in {time.perf_counter() - begin:.1f} s")
            self._read(path)
        return path

    def _read(self, path: str) -> None:
        self._tocs = [reads.read_toc(blob) for blob in _layers(path)]
        self.facts["image"]["weenv"] = sum(os.path.getsize(blob) for blob in _layers(path))

    @property
    def tocs(self) -> list[Toc]:
        """Tables of contents of the converted layers, lowest first."""
        self.converted  # noqa: B018 - made when first asked for
        return self._tocs

    @property
    def link(self) -> Link:
        """The link, checked."""
        if self._link is None:
            self._link = Link()
            self.facts["link"] = self._link.check()
            say(f"link: {self.facts['link']}")
        return self._link

    @property
    def registry(self) -> FarRegistry:
        """The registry with all three forms of the image, at the far end."""
        if self._registry is None:
            registry = FarRegistry(self.link)
            self._registry = registry
            registry.push(self.image.layout, REPOSITORY)
            registry.push(self.converted, REPOSITORY)
            registry.start()
        return self._registry

    @contextmanager
    def node(self, *, weenv: bool = False, fill: str = "off", plane: str = "auto") -> Iterator[Node]:
        """A fresh node, with the registry up."""
        self.registry  # noqa: B018 - made when first asked for
        with Node(weenv=weenv, fill=fill, plane=plane) as node:
            yield node

    def close(self) -> None:
        """Take everything down."""
        if self._stage is not None:
            self._stage.close()
        if self._registry is not None:
            self._registry.close()
        if self._link is not None:
            self._link.close()


def _sources(*packages: str) -> str:
    """A short name for the present code of some packages."""
    hasher = hashlib.sha256()
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    for package in packages:
        for folder, _, names in sorted(os.walk(os.path.join(root, package))):
            for name in sorted(names):
                if name.endswith(".py"):
                    with open(os.path.join(folder, name), "rb") as file:
                        hasher.update(file.read())
    return hasher.hexdigest()[:12]


def _layers(layout: str) -> list[str]:
    blobs = os.path.join(layout, "blobs", "sha256")
    with open(os.path.join(layout, "index.json")) as file:
        digest = json.load(file)["manifests"][0]["digest"]
    with open(os.path.join(blobs, digest[7:])) as file:
        manifest = json.load(file)
    return [os.path.join(blobs, layer["digest"][7:]) for layer in manifest["layers"]]


# --- parts ------------------------------------------------------------------------------------------------------------


def part_erofs(bench: Bench) -> list[Row]:
    """EROFS metadata."""
    found = parts.erofs_metadata(bench.image, 5)
    return [
        at_most("erofs", f"EROFS metadata of {found['entries']} entries, time / mkfs.erofs", found["ratio"], 0.5, "", found),
        at_most("erofs", "  peak memory of it", found["peak_bytes"] / MB, 300, " MB"),
    ]  # fmt: skip


def part_convert(bench: Bench) -> list[Row]:
    """Conversion."""
    found = parts.conversion(bench.image, 3)
    return [
        at_least("convert", "conversion, throughput / zstd -3 -T0", found["throughput_ratio"], 0.8, "", found),
        at_most("convert", "blob size / zstd -3", found["size_ratio"], 1.05),
    ]  # fmt: skip


def part_convert_memory(bench: Bench) -> list[Row]:
    """Memory of converting a large layer."""
    size = 10**9 if bench.quick else 10**10
    found = parts.conversion_memory(bench.image, size)
    return [
        at_most(
            "convert-memory", f"memory of converting a {size / 1e9:.0f} GB layer", found["peak_bytes"] / MB, 512, " MB", found
        )
    ]


def part_series(bench: Bench) -> list[Row]:
    """First output, the whole series, bytes, background fill."""
    results: dict[str, list[series.Result]] = {}
    plan = [("gzip", False), ("zstd", False), ("weenv", False), ("weenv", True), ("profiled", False)]
    published = ""
    for number in range(bench.rounds):
        for tag, fill in plan if number % 2 == 0 else plan[::-1]:
            with bench.node(weenv=series.SNAPSHOTTER[tag] == "weenv", fill="on" if fill else "off") as node:
                result = series.series(node, bench.link, REPOSITORY, tag, bench.recipe)
                if tag == "weenv" and not published:
                    say(published := series.publish(node, bench.registry.near.host, REPOSITORY))
            name = tag + ("+fill" if fill else "")
            results.setdefault(name, []).append(result)
            say(f"{name}: first output {result.first_output:.2f} s, done {result.done:.2f} s, {result.done_bytes / MB:.0f} MB; "
                + ", ".join(f"{step} {seconds:.2f}" for step, seconds in result.steps.items()))  # fmt: skip

    def median(name: str, field: str) -> float:
        return float(statistics.median(getattr(result, field) for result in results[name]))

    size = bench.facts["image"]["weenv"]
    share = median("weenv+fill", "first_output_bytes") / size * 100
    detail = {name: [asdict(result) for result in found] for name, found in results.items()}
    work = sum(statistics.median(r.steps[step] for r in results["zstd"]) for step in results["zstd"][0].steps)
    return [
        at_least("series", "first output of echo: times sooner than overlayfs, gzip",
                 median("gzip", "first_output") / median("weenv+fill", "first_output"), 40, "x", detail),
        at_most("series", "  image bytes fetched by then", share, 0.5, " %"),
        at_most("series", "pull to end of series / overlayfs, zstd", median("weenv", "done") / median("zstd", "done"), 0.55),
        at_most("series", "  the same / the work alone (overlayfs' own commands)", median("weenv", "done") / work, 1.35),
        at_most("series", "with a profile: pull to end of series / overlayfs, zstd",
                median("profiled", "done") / median("zstd", "done"), 0.55),
        at_most("series", "  with a profile / the work alone", median("profiled", "done") / work, 1.35),
        at_most("series", "background fill on / off", median("weenv+fill", "done") / median("weenv", "done"), 1.05),
    ]  # fmt: skip


def part_bytes(bench: Bench) -> list[Row]:
    """Bytes fetched against what the files read lie in, without and with a profile."""
    rows = []
    for tag, what in (("weenv", "bytes fetched, fill off"), ("profiled", "  the same with a profile")):
        with bench.node(weenv=True) as node:
            reference = f"{REPOSITORY}:{tag}"
            down = bench.link.counters().down
            node.pull(reference, "weenv")
            node.start(reference, "weenv", "series")
            with reads.Watch(node.rootfs("series")) as watch:
                for _, argv in series.commands(bench.recipe):
                    node.execute("series", *argv)
            fetched = bench.link.counters().down - down
            if tag == "weenv":
                say(series.publish(node, bench.registry.near.host, REPOSITORY))
        compressed, size, found = reads.frames_of(watch.files(), bench.tocs)
        detail = {"fetched": fetched, "frames_of_read_files": compressed, "read_files": found, "read_files_bytes": size}
        rows.append(at_most("bytes", f"{what} / frames of the files read", fetched / compressed, 1.3, "", detail))
    return rows


def part_eight(bench: Bench) -> list[Row]:
    """Eight containers at once."""
    times: dict[str, list[float]] = {"zstd": [], "weenv": []}
    fetched: dict[str, list[int]] = {"zstd": [], "weenv": []}
    for _ in range(bench.rounds):
        for tag in times:
            with bench.node(weenv=tag == "weenv", fill="on") as node:
                seconds, down = series.eight(node, bench.link, REPOSITORY, tag)
            times[tag].append(seconds)
            fetched[tag].append(down)
            say(f"eight, {tag}: {seconds:.2f} s, {down / MB:.0f} MB")
    value = statistics.median(times["weenv"]) / statistics.median(times["zstd"])
    return [
        at_most(
            "eight", "eight containers at once, import numpy / overlayfs, zstd", value, 0.10, "", {"s": times, "bytes": fetched}
        )
    ]


def part_local(bench: Bench) -> list[Row]:
    """Everything local."""
    references = {"overlayfs": f"{REPOSITORY}:zstd", "weenv": f"{REPOSITORY}:weenv"}
    with bench.node(weenv=True) as node:
        for snapshotter, reference in references.items():
            node.pull(reference, snapshotter)
        filled = local.complete(node)
        say(f"all layers complete {filled:.1f} s after the pull")
        latency = local.run_latency(node, references, 15 if bench.quick else 40)
        found, noise = local.ratio(latency)
        rows = [at_most("local", "ctr run, all local / overlayfs", found, 1.05, "", {"ms": latency, "fill_s": filled})]
        times = local.compare(node, references, bench.recipe, 3 if bench.quick else 5)
        for name, states in times.items():
            for state, took in states.items():
                found, noise = local.ratio(took)
                rows.append(
                    at_most(
                        "local", f"  {name}, all local, page cache {state} / overlayfs", found, 1.0, "", took, min(noise, 0.05)
                    )
                )
    return rows


def part_planes(bench: Bench) -> list[Row]:
    """The FUSE plane against the EROFS plane."""

    def node(plane: str) -> AbstractContextManager[Node]:
        return bench.node(weenv=True, plane=plane)

    return planesparts.planes(node, f"{REPOSITORY}:weenv", bench.recipe, bench.rounds)


def part_prepare(bench: Bench) -> list[Row]:
    """Prepare."""
    with bench.node(weenv=True) as node:
        node.pull(f"{REPOSITORY}:zstd", "overlayfs")
        node.pull(f"{REPOSITORY}:weenv", "weenv")
        found = daemons.prepare_latency(node)
    own = found["weenv"]
    return [
        at_most("prepare", "Prepare on an existing parent, 50 callers at once, p50", own["together_p50_ms"], 3, " ms", found),
        at_most("prepare", "  p99", own["together_p99_ms"], 15, " ms"),
        at_most("prepare", "  p50 of one caller alone", own["alone_p50_ms"], 3, " ms"),
    ]


def part_memory(bench: Bench) -> list[Row]:
    """Memory of the daemons."""
    with bench.node(weenv=True) as node:
        found = daemons.memory(node, bench.registry)
    return [
        at_most("memory", "memory of the daemons, 100 layers of 50 000 files", found["total_bytes"] / MB, 300, " MB", found)
    ]


PARTS: dict[str, Callable[[Bench], list[Row]]] = {
    "series": part_series, "bytes": part_bytes, "eight": part_eight, "local": part_local, "planes": part_planes,
    "prepare": part_prepare,
    "memory": part_memory, "erofs": part_erofs, "convert": part_convert, "convert-memory": part_convert_memory,
    "strategies": lambda bench: taskparts.strategies(bench.stage),
    "compose": lambda bench: taskparts.compose(bench.stage),
    "mutation": lambda bench: taskparts.mutation(bench.image, bench.converted, bench.tocs),
    "run": lambda bench: taskparts.run(bench.stage, bench.quick),
    "resolve": lambda bench: taskparts.resolve(bench.quick),
    "elastic": lambda bench: elasticparts.elastic(bench.quick),
    "elastic-task": lambda bench: elasticparts.task(bench.quick),
    "replay": lambda bench: replayparts.replay(bench.quick),
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 where everything was measured (whatever the figures), 1 where something could not be, 2 for wrong usage."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["prepare-client"]:
        return prepare.main(given[1:])
    parser = argparse.ArgumentParser(
        prog="benchmarks", description="Measure WeEnv against overlayfs, zstd and mkfs.erofs; needs root."
    )
    parser.add_argument(
        "--only", action="append", choices=list(PARTS), metavar="PART", help=f"measure this part only: {', '.join(PARTS)}"
    )
    parser.add_argument("--quick", action="store_true", help="a third of the image: for work on the benchmark, not for figures")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the series (default 3; medians are reported)")
    parser.add_argument("--json", metavar="FILE", help="where to write all numbers (default OUT/<image>.json)")
    parser.add_argument(
        "--out", metavar="DIR", default="bench-results", help="directory of the results (default bench-results)"
    )
    parser.add_argument("--docs", metavar="FILE", help="write the page for the documentation from the JSON, after measuring")
    parser.add_argument("--no-measure", action="store_true", help="only make the page, from --json or docs/benchmarks.json")
    options = parser.parse_args(given)
    path = options.json or os.path.join(options.out, ("quick" if options.quick else "full") + ".json")
    if options.no_measure and not options.json:
        path = docs.PUBLISHED
    code = 0
    if not options.no_measure:
        if os.geteuid() != 0:
            print("bench: needs root: run it with sudo", file=sys.stderr)
            return 1
        code = _measure(options, path)
    if options.docs:
        try:
            docs.write(path, options.docs)
        except (BenchError, OSError) as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
    return code


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _measure(options: argparse.Namespace, path: str) -> int:
    rows: list[Row] = []
    failed = []
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell's background job inherits it ignored
        signal.signal(number, _interrupted)
    bench = Bench(options.quick, options.rounds)
    try:
        for name in options.only or PARTS:
            bench.facts.setdefault("busy", {})[name] = report.busy()
            say(f"--- {name} (others use {bench.facts['busy'][name]:.0%} of the CPUs)")
            try:
                found = PARTS[name](bench)
            except (BenchError, Failed, OSError, subprocess.CalledProcessError) as error:
                failed.append(name)
                say(f"{name} could not be measured: {error}")
                continue
            rows.extend(found)
            report.save(path, found, bench.facts)
    except KeyboardInterrupt:
        say("interrupted; everything that was started is taken down")
        return 130
    finally:
        bench.close()
    console = Console(width=None if sys.stdout.isatty() else 130)
    report.print_table(rows, console)
    taskparts.show(rows, console)
    print(f"all numbers: {path}")
    for name in failed:
        print(f"bench: {name} could not be measured (see above)", file=sys.stderr)
    return 1 if failed else 0
