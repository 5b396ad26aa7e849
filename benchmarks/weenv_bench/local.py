"""Everything already on the node: ``ctr run`` latency, and commands with the page cache cold and warm, against overlayfs."""

from __future__ import annotations

import os
import statistics
import subprocess
import time

from weenv.plugin.snapshotter.cache.present import is_complete
from weenv_bench.image import ENV, BenchError, Recipe, say
from weenv_bench.node import Node, drop_caches


def complete(node: Node, timeout: float = 120) -> float:
    """Have every layer of a weenv node fetched, by reading it whole through blobfs; seconds it took.

    Background fill would do it too, but it yields to everything else on the machine for as long as that takes.
    """
    base = f"{node.directory}/weenv/layers/sha256"
    begin = time.monotonic()
    names = os.listdir(base)
    for name in names:
        with open(f"{node.directory}/w/blobs/{name}", "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass

    def settled() -> bool:
        # The snapshotter looks for complete layers now and then; from then on they are mounted from plain files.
        anew = node.logs_of("snapshotter").count("mode=complete")
        return anew >= len(names) and all(is_complete(os.path.join(base, name)) for name in names)

    while not settled():
        if time.monotonic() - begin > timeout:
            raise BenchError(f"after {timeout:.0f} s not every layer is complete\n{node.logs()}")
        time.sleep(0.2)
    return time.monotonic() - begin


def run_latency(node: Node, references: dict[str, str], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of ``ctr run --rm IMAGE true``, the contenders taking turns; ``references`` is snapshotter -> reference."""
    times: dict[str, list[float]] = {snapshotter: [] for snapshotter in references}
    for number in range(rounds + 2):
        for snapshotter, reference in references.items():
            argv = node.run(reference, snapshotter, f"run{number}{snapshotter[0]}", "true")
            start = time.perf_counter()
            done = subprocess.run(argv, env=node.environment, capture_output=True, check=False)
            seconds = time.perf_counter() - start
            if done.returncode:
                raise BenchError(f"ctr run: {done.stderr.decode(errors='replace')[-800:]}\n{node.logs()}")
            if number >= 2:  # the first two warm the programs themselves
                times[snapshotter].append(seconds * 1000)
    return times


def commands(recipe: Recipe) -> list[tuple[str, list[str]]]:
    """What is compared, name and argv."""
    return [
        ("find", ["find", "/", "-xdev"]),
        ("find with stat", ["find", "/", "-xdev", "-printf", "%s %m %p\\n"]),
        ("git status", ["git", "-C", "/repo/sympy", "status", "--short"]),
        ("grep -r", ["grep", "-r", "--include=*.py", "def test_", "/repo/sympy"]),
        ("import", ["/opt/venv/bin/python", "-c", "import numpy, pandas, sympy"]),
        ("evaluator", ["/opt/eval/bin/python", "-c", recipe.evaluator_import]),
        ("agent", [recipe.agent, "--version"]),
        ("read the venv", ["sh", "-c", "find /opt/venv -type f -print0 | xargs -0 cat | wc -c"]),
        (
            "tests",
            [
                "sh",
                "-c",
                f"cd /repo/sympy && exec /opt/venv/bin/python -m pytest -q -x -p no:cacheprovider {recipe.short_tests}",
            ],
        ),
    ]


def enter(pid: int, argv: list[str]) -> float:
    """Run a command in a container's namespaces, without the shim and containerd in the way; seconds."""
    command = ["nsenter", "-t", str(pid), "-m", "-u", "-i", "-p", "-r", "-w", "env", "-i", ENV, "HOME=/root", *argv]
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise BenchError(f"{' '.join(argv)[:200]}: {done.stderr.decode(errors='replace')[-500:]}")
    return seconds


def compare(
    node: Node, references: dict[str, str], recipe: Recipe, rounds: int
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """{command: {cold|warm: {snapshotter: seconds of each round}}}; a cold run is the first after dropping all caches."""
    pids = {}
    for snapshotter, reference in references.items():
        node.start(reference, snapshotter, f"local-{snapshotter}")
        pids[snapshotter] = node.task_pid(f"local-{snapshotter}")
        enter(pids[snapshotter], ["git", "-C", "/repo/sympy", "status", "--short"])  # writes the index: once for each
    times: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name, argv in commands(recipe):
        cold: dict[str, list[float]] = {snapshotter: [] for snapshotter in references}
        warm: dict[str, list[float]] = {snapshotter: [] for snapshotter in references}
        for number in range(rounds):
            # Who goes first changes: the host's own programs are cold for the first one.
            order = list(references) if number % 2 == 0 else list(references)[::-1]
            for snapshotter in order:
                drop_caches()
                enter(pids[snapshotter], ["true"])
                cold[snapshotter].append(enter(pids[snapshotter], argv))
                warm[snapshotter].append(min(enter(pids[snapshotter], argv) for _ in range(2 if name == "tests" else 3)))
        times[name] = {"cold": cold, "warm": warm}
        say(f"{name}: " + "; ".join(
            f"{state} " + ", ".join(f"{snapshotter} {statistics.median(took):.3f} s" for snapshotter, took in both.items())
            for state, both in times[name].items()
        ))  # fmt: skip
    return times


def ratio(times: dict[str, list[float]]) -> tuple[float, float]:
    """(median of weenv over median of overlayfs, relative half spread of overlayfs's middle half)."""
    theirs = sorted(times["overlayfs"])
    median = statistics.median(theirs)
    spread = (theirs[(3 * len(theirs)) // 4] - theirs[len(theirs) // 4]) / 2 / median
    return statistics.median(times["weenv"]) / median, spread
