"""``docs/benchmarks.md`` from the JSON of a run: no figure on that page comes from anywhere else."""

from __future__ import annotations

import json
import statistics
from typing import Any

_HOW = """
## How it is measured

`sudo make bench` (about {minutes} minutes; `BENCH_ARGS="--only series"` for one part, `--quick` for a small image)
builds the image once from Debian, PyPI and npm packages, keeps it in
`${{WEENV_TOOLS:-/var/cache/weenv-tools}}/bench`, and prints this table. Every row compares two things that were
measured in the same run on the same machine.

- **Image**: {files} members, {unpacked} unpacked, six layers: Debian, build tools, a scientific Python venv, a git
  checkout with history, an agent CLI whose binary is about 240 MB, an evaluator. {gzip} as gzip layers, {zstd} as
  zstd -3, {weenv} converted.
- **Link**: a small process joins two TUN devices, one in the registry's network namespace, and delays and paces what
  passes. Its self-check in this run: {mbit:.0f} Mbit/s, {rtt:.2f} ms round trip, {cpu:.0%} of one CPU at full speed.
  Bytes fetched are its counters.
- **Registry**: Debian's docker-registry at the far end, data on tmpfs.
- **Peers**: overlayfs of containerd 2.1 (`ctr images pull`, transfer service), `zstd -3 -T0`, `mkfs.erofs --tar=i`.
- **Series**: pull, `echo` in a new container, then by `ctr tasks exec` the commands below; caches dropped before, the
  node new for every run, median of the rounds. Contenders take turns.
- **Bytes of the files read**: fanotify on the container's overlay names every file opened; the frames (compressed)
  that hold any byte of these files are added up, each once.
- **All local**: both snapshotters on one node, every layer complete; commands run inside the containers' namespaces
  by nsenter, cold after `drop_caches`, warm the best of the next ones; the order alternates. The noise beside a
  figure is half the spread of the middle half of overlayfs' own runs.
- **Memory**: proportional set size (`smaps_rollup`) of every process of both daemons; for the converter the peak of
  the process tree.
"""


def _mb(value: float) -> str:
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"


def write(source: str, target: str) -> None:
    """Make the page."""
    with open(source) as file:
        data = json.load(file)
    machine, facts = data["machine"], data["facts"]
    image, link = facts["image"], facts.get("link", {})
    busy = facts.get("busy", {})
    lines = [
        "# Benchmarks", "",
        "Ratios within one run of one machine. The benchmark makes this page from its own JSON:",
        "`python -m benchmarks --no-measure --docs docs/benchmarks.md`.", "",
        f"Machine: {machine['cpu']}, {machine['memory']}, Linux {machine['kernel']}, Python {machine['python']},",
        f"{machine['date']}, commit `{machine['commit']}`.", "",
        *([f"Other processes used up to {max(busy.values()):.0%} of the CPUs when a part began.", ""] if busy else []),
        "| what | to reach | measured | |", "|---|---:|---:|---|",
    ]  # fmt: skip
    for row in data["rows"]:
        what = row["what"].strip() if not row["what"].startswith("  ") else "… " + row["what"].strip()
        lines.append(f"| {what} | {row['target']} | {row['measured']} | {'ok' if row['ok'] else '**missed**'} |")
    lines += ["", *_series(data["rows"])]
    lines += _HOW.format(
        minutes=40, files=image["files"], unpacked=_mb(image["unpacked"]), gzip=_mb(image["gzip"]), zstd=_mb(image["zstd"]),
        weenv=_mb(image.get("weenv", 0)),
        mbit=link.get("mbit_per_s", 0), rtt=link.get("round_trip_ms", 0), cpu=link.get("cpu_share", 0),
    ).splitlines()  # fmt: skip
    with open(target, "w") as file:
        file.write("\n".join(lines) + "\n")


def _series(rows: list[dict[str, Any]]) -> list[str]:
    detail = next((row["detail"] for row in rows if row["part"] == "series" and row["detail"]), None)
    if detail is None:
        return []
    names = list(detail)
    steps = list(detail[names[0]][0]["steps"])

    def cell(name: str, value: Any) -> str:
        return f"{statistics.median(value(result) for result in detail[name]):.2f}"

    rounds = len(detail[names[0]])
    how = "one round" if rounds == 1 else f"median of {rounds} rounds"
    lines = [f"## The series, seconds ({how})", "", "| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    lines.append("| first output | " + " | ".join(cell(name, lambda r: r["first_output"]) for name in names) + " |")
    for step in steps:
        lines.append(f"| {step} | " + " | ".join(cell(name, lambda r, s=step: r["steps"][s]) for name in names) + " |")
    lines.append("| **pull start to the end** | " + " | ".join(cell(name, lambda r: r["done"]) for name in names) + " |")
    lines.append(
        "| MB fetched at first output | "
        + " | ".join(cell(name, lambda r: r["first_output_bytes"] / 1e6) for name in names)
        + " |"
    )
    lines.append(
        "| MB fetched at the end | " + " | ".join(cell(name, lambda r: r["done_bytes"] / 1e6) for name in names) + " |"
    )
    return [*lines, ""]
