"""The FUSE plane against the EROFS plane: the same commands in containers of two nodes, every layer complete on both."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from weenv.plugin.snapshotter.cache.present import is_complete
from weenv_bench import local
from weenv_bench.image import Recipe, say
from weenv_bench.node import Node, drop_caches
from weenv_bench.report import Row, known
from weenv_testkit.procs import processes_of, wait_until

PLANES = ("erofs", "fuse")
COMMANDS = ("find with stat", "git status", "import", "grep -r")


def planes(make_node: Callable[[str], AbstractContextManager[Node]], reference: str, recipe: Recipe, rounds: int) -> list[Row]:
    """``make_node`` gives a fresh node with the plane it is asked for."""
    with ExitStack() as stack:
        nodes = {plane: stack.enter_context(make_node(plane)) for plane in PLANES}
        pids = {}
        for plane, node in nodes.items():
            node.pull(reference, "weenv")
            _fetch_all(node)
            node.start(reference, "weenv", plane)
            pids[plane] = node.task_pid(plane)
            local.enter(pids[plane], ["git", "-C", "/repo/sympy", "status", "--short"])  # writes the index: once for each
        rows = []
        for name, argv in local.commands(recipe):
            if name in COMMANDS:
                rows += _compare(name, argv, pids, rounds)
        rows.append(_memory(nodes["fuse"]))
    return rows


def _fetch_all(node: Node) -> None:
    """Read every layer whole through blobfs, and wait until each is found to be right."""
    base = f"{node.directory}/weenv/layers/sha256"
    names = os.listdir(base)
    for name in names:
        with open(f"{node.directory}/w/blobs/{name}", "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
    wait_until("every layer to be complete", lambda: all(is_complete(f"{base}/{name}") for name in names), 300, 0.2)


def _compare(name: str, argv: list[str], pids: dict[str, int], rounds: int) -> list[Row]:
    """Cold: the first run after all caches were dropped; warm: the best of the next ones; planes take turns."""
    times: dict[str, dict[str, list[float]]] = {state: {plane: [] for plane in PLANES} for state in ("cold", "warm")}
    for number in range(rounds):
        for plane in PLANES if number % 2 == 0 else PLANES[::-1]:
            drop_caches()
            local.enter(pids[plane], ["true"])
            times["cold"][plane].append(local.enter(pids[plane], argv))
            times["warm"][plane].append(min(local.enter(pids[plane], argv) for _ in range(3)))
    rows = []
    for state, both in times.items():
        took = {plane: statistics.median(seconds) for plane, seconds in both.items()}
        text = f"{took['fuse'] / took['erofs']:.2f} ({took['fuse']:.2f} s, {took['erofs']:.2f} s)"
        say(f"{name}, {state}: fuse / erofs {text}")
        rows.append(known("planes", f"{name}, page cache {state}: FUSE plane / EROFS plane", text, both))
    return rows


def _memory(node: Node) -> Row:
    """What the processes of the plane take, by proportional set size."""
    sizes = {}
    for pid, line in processes_of(node.directory).items():
        if "fusehost" in line:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                sizes[pid] = next(int(text.split()[1]) for text in file if text.startswith("Pss:"))
    servers = max(1, len(sizes) - 1)
    text = f"{sum(sizes.values()) / 1000 / servers:.1f} MB"
    return known("planes", "FUSE plane, memory of its processes per layer", text, {"kib": list(sizes.values())})
