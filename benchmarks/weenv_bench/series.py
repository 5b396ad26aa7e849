"""The series of real commands that an agent's environment runs first, timed from the start of the pull."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field

from weenv_bench.image import BenchError, Recipe
from weenv_bench.link import Link
from weenv_bench.node import Node, drop_caches
from weenv_testkit import tools

_NUMPY = "import numpy; print(numpy.arange(3).sum())"

SNAPSHOTTER = {"gzip": "overlayfs", "zstd": "overlayfs", "weenv": "weenv", "profiled": "weenv"}
"""Which snapshotter runs which tag of the image; ``profiled`` is ``weenv`` with what a node recorded (:func:`publish`)."""


def commands(recipe: Recipe) -> list[tuple[str, list[str]]]:
    """(name, argv) of what follows the first output; each must succeed."""
    python = ["/opt/venv/bin/python", "-c"]
    pytest = "/opt/venv/bin/python -m pytest -q -x -p no:cacheprovider"
    return [
        ("agent", [recipe.agent, "--version"]),
        ("git status", ["git", "-C", "/repo/sympy", "status", "--short"]),
        ("git log", ["sh", "-c", "git -C /repo/sympy log --stat -3 | tail -1"]),
        ("import", [*python, "import numpy, pandas, sympy"]),
        ("grep", ["sh", "-c", "grep -r --include=*.py 'def test_' /repo/sympy | wc -l"]),
        ("tests", ["sh", "-c", f"cd /repo/sympy && {pytest} {recipe.tests} | tail -3"]),
        ("evaluator", ["/opt/eval/bin/python", "-c", recipe.evaluator_import]),
        *([("compile", ["sh", "-c", recipe.compile])] if recipe.compile else []),
        ("find", ["sh", "-c", "find / -xdev | wc -l"]),
    ]  # fmt: skip


@dataclass
class Result:
    """One contender's series: seconds per command, seconds from pull start, bytes that crossed the link."""

    tag: str
    pull: float = 0.0
    first_output: float = 0.0
    first_output_bytes: int = 0
    steps: dict[str, float] = field(default_factory=dict)
    done: float = 0.0
    done_bytes: int = 0
    link_cpu: float = 0.0


def series(node: Node, link: Link, repository: str, tag: str, recipe: Recipe) -> Result:
    """Pull, first output, then every command by ``ctr tasks exec``, on a node that has never seen the image."""
    result = Result(tag)
    snapshotter = SNAPSHOTTER[tag]
    reference = f"{repository}:{tag}"
    drop_caches()
    down, cpu = link.counters().down, link.cpu_seconds()
    begin = time.perf_counter()
    node.pull(reference, snapshotter)
    result.pull = time.perf_counter() - begin
    result.first_output = node.start(reference, snapshotter, "series") - begin
    result.first_output_bytes = link.counters().down - down
    for name, argv in commands(recipe):
        start = time.perf_counter()
        output = node.execute("series", *argv)
        result.steps[name] = time.perf_counter() - start
        if name == "tests" and "passed" not in output:
            raise BenchError(f"the tests in the image failed: {output[-500:]}")
    result.done = time.perf_counter() - begin
    result.done_bytes = link.counters().down - down
    result.link_cpu = link.cpu_seconds() - cpu
    return result


def publish(node: Node, near: str, repository: str) -> str:
    """Publish what ``node`` recorded of tag ``weenv`` as tag ``profiled``, by the registry's ``near`` end; what was said."""
    config = f"{node.directory}/weenv.toml"
    argv = [*tools.weenv(), "profile", "publish", f"{near}/{repository}:weenv", f"{near}/{repository}:profiled"]
    done = subprocess.run([*argv, "--config", config], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"weenv profile publish: {done.stderr.strip()}")
    return done.stdout


def eight(node: Node, link: Link, repository: str, tag: str, count: int = 8) -> tuple[float, int]:
    """Pull, then ``count`` containers at once that import numpy; (seconds until the last is done, bytes)."""
    snapshotter = SNAPSHOTTER[tag]
    reference = f"{repository}:{tag}"
    drop_caches()
    down = link.counters().down
    begin = time.perf_counter()
    node.pull(reference, snapshotter)
    children = [
        subprocess.Popen(
            node.run(reference, snapshotter, f"eight{number}", "/opt/venv/bin/python", "-c", _NUMPY),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=node.environment,
        )
        for number in range(count)
    ]
    outputs = [child.communicate()[0] for child in children]
    seconds = time.perf_counter() - begin
    for child, output in zip(children, outputs, strict=True):
        if child.returncode or output.strip() != b"3":
            raise BenchError(f"one of {count} containers failed: {output[-800:]!r}\n{node.logs()}")
    return seconds, link.counters().down - down
