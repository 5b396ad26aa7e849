"""``docs/benchmarks.md`` from the JSON of a run: no figure on that page comes from anywhere else."""

from __future__ import annotations

import json
import statistics
from typing import Any

from weenv_bench.image import BenchError
from weenv_bench.replayparts import SHARES
from weenv_bench.taskparts import COLUMNS, cells

_HOW = """\
## How it is measured

`sudo make bench` (about {minutes} minutes; `BENCH_ARGS="--only series"` for one part, `--quick` for a small image)
builds the image once from Debian, PyPI and npm packages, keeps it in
`${{WEENV_TOOLS:-/var/cache/weenv-tools}}/bench`, and prints this table. Every row compares two things that were
measured in the same run on the same machine.

"""

_BULLETS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((), """\
- **Image**: {files} members, {unpacked} unpacked, six layers: Debian, build tools, a scientific Python venv, a git
  checkout with history, an agent CLI whose binary is about 240 MB, an evaluator. {gzip} as gzip layers, {zstd} as
  zstd -3, {weenv} converted."""),
    (("series", "bytes", "eight", "local", "planes"), """\
- **Link**: a small process joins two TUN devices, one in the registry's network namespace, and delays and paces what
  passes. Its self-check in this run: {mbit:.0f} Mbit/s, {rtt:.2f} ms round trip, {cpu:.0%} of one CPU at full speed.
  Bytes fetched are its counters."""),
    (("series", "bytes", "eight", "local", "planes"), """\
- **Registry**: Debian's docker-registry at the far end, data on tmpfs, redirecting to nginx for blobs."""),
    ((), """\
- **Peers**: overlayfs of containerd 2.1 (`ctr images pull`, transfer service), `zstd -3 -T0`, `mkfs.erofs --tar=i`."""),
    (("series",), """\
- **Series**: pull, `echo` in a new container, then by `ctr tasks exec` the commands below; caches dropped before, the
  node new for every run, median of the rounds. Contenders take turns."""),
    (("bytes",), """\
- **Bytes of the files read**: fanotify on the container's overlay names every file opened; the frames (compressed)
  that hold any byte of these files are added up, each once."""),
    (("local",), """\
- **All local**: both snapshotters on one node, every layer complete; commands run inside the containers' namespaces
  by nsenter, cold after `drop_caches`, warm the best of the next ones; the order alternates. The noise beside a
  figure is half the spread of the middle half of overlayfs' own runs."""),
    (("strategies", "compose", "run"), """\
- **Tasks**: {tasks} tasks that swesmith's generators make of three PyPI source archives (boltons, sqlparse, tinydb), each a
  patch after which a test of the repository fails; two harnesses (claude-code from npm, mini-swe-agent from PyPI), pytest
  as evaluator, Debian with Python below. Built by script, in the registry by `weenv group build`; registry and node share
  the machine."""),
    (("strategies",), """\
- **Strategies**: real images with gzip -6 layers, pushed to a registry of their own, which is then weighed; blobs are
  stored once there however many images name them. "Each by itself" adds up every image's layers, config and manifest, as a
  node without any of them pulls it. A layer that a build step installs has the time of its build in it, so it is another
  one at each build, unless the build cache has that step below an unchanged image; of a build we do no more than copying,
  packing and pushing, on all cores, so its times are the least that a rebuild takes. Plans ({tasks} x 2 small files) are
  counted with none of them: the patch has to be somewhere in the second and third strategy."""),
    (("strategies",), """\
- **Update of a harness**: the next release of claude-code. Plans of all repositories are started before and, once the
  node's minute of believing a tag is over, after it: what runs must be the new version, down to the program's digest."""),
    (("compose",), """\
- **Compose**: plan to an image that containerd has, within one process, one after the other, every plan another one. In
  brackets the middle four fifths of the single measurements, here and elsewhere."""),
    (("mutation",), """\
- **Mutation**: patches of ten lines in 40 files over the benchmark image's repository, each file once (frames fetched),
  then once more with another patch. Bytes as the registry counts them."""),
    (("run",), """\
- **weenv run / ctr run**: turns, the same containerd, runc and layers (unpacked for overlayfs on ctr's side)."""),
    (("replay",), """\
- **Elastic quotas, replay**: no container; demand from committed seeds and the published quantiles (docs/elastic.md) runs
  through policy and admission on simulated nodes of 128 cores. Ratios are medians of five sets of 100 tasks; the
  published set that they reproduce in kind went from 8 968 s to 5 988 s."""),
    (("resolve",), """\
- **Resolving**: tags of 1 000 manifests and configs of their own in docker-registry, which needs most of the time."""),
    (("memory", "erofs", "convert-memory"), """\
- **Memory**: proportional set size (`smaps_rollup`) of every process of both daemons; for the converter the peak of
  the process tree."""),
)  # fmt: skip
"""What is said of the method: the parts that it is of (any of them measured is enough; none named: always), and the text."""

_COLD = "In the rounds of [ADR 2](adr/0002-erofs-mount-options.md) it was {}: runs differ by more than rounds of one run do"

_FIRST_READS = (
    "Every byte is read for the first time and over the link, which {fetched:.0f} MB alone occupy for {link:.1f} s. A "
    "command asks for the next file when it has read the last, so round trips follow one another. Fetching further ahead "
    "would save some of them, at the expense of the bytes fetched, which have a limit as well; reading a program's parts "
    "ahead by its ELF header, and fewer or more guesses at a time, were tried and changed nothing beyond the noise"
)
_WHY = {
    "pull to end of series / overlayfs, zstd":
        "Near the limit either way: 0.51 to 0.58 in six runs. " + _FIRST_READS,
    "the same / the work alone (overlayfs' own commands)": _FIRST_READS,
    "agent, all local, page cache cold / overlayfs":
        "One mapped program of 240 MB, read by page faults. A complete layer's mount has its disk's read-ahead, 1 MiB at most, "
        "against 8 MiB of overlayfs on this disk; with more, half of the starts took twice as long, and why is not known. "
        + _COLD.format("0.86 and 0.97"),
    "tests, all local, page cache cold / overlayfs":
        "Small files and libraries by page faults, near 1 either way. " + _COLD.format("0.93 and 1.07"),
    "weenv run --rm PLAN -- true, warm / ctr run of a plain local image":
        "At the limit: 1.03, 1.11, 1.16, 1.16 and 1.20 in five runs; rounds of one run differ by more than that. 60 of its "
        "130 ms are Python's start and imports, which programs that use the Python API pay once.",
}  # fmt: skip
"""Why a row is missed, by its name; a row without a reason says so."""


PUBLISHED = "docs/benchmarks.json"
"""The numbers behind the page: of the last run of each part, with what was measured in it."""
_ORDER = (
    "series", "bytes", "eight", "local", "planes", "prepare", "memory", "erofs", "convert", "convert-memory", "strategies",
    "compose", "mutation", "run", "resolve", "elastic", "elastic, idle", "elastic-task", "replay",
)  # fmt: skip
"""Parts as the page has them, whenever they were measured."""


def _mb(value: float) -> str:
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"


def write(source: str, target: str) -> None:
    """Make the page."""
    with open(source) as file:
        data = json.load(file)
    data["rows"].sort(key=lambda row: _ORDER.index(row["part"]))
    machine, facts = data["machine"], data["facts"]
    if "image" not in facts:
        raise BenchError(f"{source} has nothing of the image: measure all parts before making the page")
    image, link = facts["image"], facts.get("link", {})
    lines = [
        "# Benchmarks", "",
        "Ratios within one run of one machine. No figure here is typed in:",
        "`python -m benchmarks --no-measure --docs docs/benchmarks.md` makes it from [benchmarks.json](benchmarks.json), and",
        "`--json docs/benchmarks.json --docs docs/benchmarks.md --only PART` measures a part of it anew.", "",
        f"Machine: {machine['cpu']}, {machine['memory']}, Linux {machine['kernel']}, Python {machine['python']},",
        *_when(data), "",
        "| what | to reach | measured | |", "|---|---:|---:|---|",
    ]  # fmt: skip
    for row in data["rows"]:
        what = row["what"].strip() if not row["what"].startswith("  ") else "… " + row["what"].strip()
        lines.append(f"| {what} | {row['target']} | {row['measured']} | {_verdict(row)} |")
    lines += ["", *_missed(data), *_strategies(data["rows"]), *_series(data["rows"]), *_replay(data["rows"]), *_parts(data)]
    fields = {
        "minutes": 50, "files": image["files"], "tasks": _detail(data["rows"], "strategies").get("tasks", 0),
        **{name: _mb(image.get(name, 0)) for name in ("unpacked", "gzip", "zstd", "weenv")},
        "mbit": link.get("mbit_per_s", 0), "rtt": link.get("round_trip_ms", 0), "cpu": link.get("cpu_share", 0),
    }  # fmt: skip
    measured = {row["part"] for row in data["rows"]}
    lines += _HOW.format(**fields).splitlines()
    for of, text in _BULLETS:
        if not of or measured.intersection(of):
            lines += text.format(**fields).splitlines()
    with open(target, "w") as file:
        file.write("\n".join(lines) + "\n")


def _verdict(row: dict[str, Any]) -> str:
    if not row["target"]:
        return ""
    return "ok" if row["ok"] else "**missed**"


def _missed(data: dict[str, Any]) -> list[str]:
    """The rows that are missed, and why."""
    rows = [row for row in data["rows"] if row["target"] and not row["ok"]]
    if not rows:
        return []
    weenv = _detail(data["rows"], "series").get("weenv", [])
    fetched = statistics.median(result["done_bytes"] for result in weenv) if weenv else 0
    mbit = data["facts"].get("link", {}).get("mbit_per_s") or 1000
    lines = ["## What was missed, and why", ""]
    for row in rows:
        why = _WHY.get(row["what"].strip(), "no reason was found yet")
        lines.append(f"- **{row['what'].strip()}** ({row['part']}; {row['measured']} against {row['target']}): "
                     f"{why.format(fetched=fetched / 1e6, link=fetched * 8 / mbit / 1e6)}.")  # fmt: skip
    return [*lines, ""]


def _moments(data: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """For each part when (to the minute) and at what commit it was measured, the earliest first; "": the JSON does not say."""
    found = {row["part"]: (row.get("date", "")[:16].replace("T", " "), row.get("commit", "")) for row in data["rows"]}
    return dict(sorted(found.items(), key=lambda item: item[1][0]))


def _when(data: dict[str, Any]) -> list[str]:
    """When, and at what commit: of the run, or of parts that were measured in several."""
    moments = list(_moments(data).values())
    if len({commit for _, commit in moments}) == 1 and moments[0][1] and moments[0][0][:10] == moments[-1][0][:10]:
        return [f"{moments[0][0][:10]}, commit `{moments[0][1]}`."]
    several = "([when, and at what commit](#when-each-part-was-measured))."
    return [f"parts measured between {moments[0][0]} and {moments[-1][0]}", several]


def _parts(data: dict[str, Any]) -> list[str]:
    """When each part was measured, and what else ran then."""
    busy = data["facts"].get("busy", {})
    lines = ["## When each part was measured", ""]
    lines += ["| part | when | commit | CPUs used by others as it began |", "|---|---|---|---:|"]
    for part, (when, commit) in _moments(data).items():
        others = f"{busy[part]:.0%}" if part in busy else ""
        lines.append(f"| {part} | {when} | {f'`{commit}`' if commit else 'not noted'} | {others} |")
    return [*lines, ""]


def _detail(rows: list[dict[str, Any]], part: str) -> dict[str, Any]:
    return next((row["detail"] for row in rows if row["part"] == part and row["detail"]), {})


def _strategies(rows: list[dict[str, Any]]) -> list[str]:
    detail = _detail(rows, "strategies")
    if not detail:
        return []
    lines = [f"## {detail['tasks']} tasks x {detail['harnesses']} harnesses", "", f"| {' | '.join(COLUMNS)} |"]
    lines.append("|---|" + "---:|" * (len(COLUMNS) - 1))
    lines += [f"| {' | '.join(cells(line))} |".replace("*", "\\*") for line in detail["strategies"]]
    lines += ["", *(f"\\* {line['extrapolated']}." for line in detail["strategies"] if line["extrapolated"]), ""]
    return lines


def _replay(rows: list[dict[str, Any]]) -> list[str]:
    detail = _detail(rows, "replay")
    if not detail:
        return []
    lines = ["## Tasks under fixed and elastic quotas, seconds by share of the tasks", ""]
    lines += ["| | " + " | ".join(f"{share:.0%}" for share in SHARES) + " |", "|---|" + "---:|" * len(SHARES)]
    lines += [f"| {name} | " + " | ".join(f"{took:.0f}" for took in curve) + " |" for name, curve in detail["curve"].items()]
    return [*lines, ""]


def _series(rows: list[dict[str, Any]]) -> list[str]:
    detail = _detail(rows, "series")
    if not detail:
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
