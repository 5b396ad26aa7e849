"""What the fuzz targets of tests/fuzz share: how they are run, by atheris or without it."""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

TARGETS = Path(__file__).parent.parent.parent / "tests" / "fuzz"


def load(name: str) -> ModuleType:
    """The fuzz target ``tests/fuzz/<name>.py``, which is no part of a package, as a module."""
    spec = importlib.util.spec_from_file_location(name, TARGETS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(
    doc: str | None,
    one_input: Callable[[bytes], object],
    run: Callable[[int, int], object],
    mutator: Callable[[Any, bytes, int, int], bytes] | None = None,
) -> None:
    """Entry point of a fuzz target.

    ``--runs N [--seed S]`` makes the same N mutations each time (``run(count, seed)``), ``--seconds T`` others until the time
    is over. Otherwise atheris is used where it can be imported, with libFuzzer's own options and corpus directories;
    ``mutator(atheris, data, max_size, seed)`` then makes the mutations.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, help="so many mutations, the same ones each time")
    parser.add_argument("--seed", type=int, help="which (default: 1; with --seconds: another one each time)")
    parser.add_argument("--seconds", type=float, help="mutations until the time is over")
    options, rest = parser.parse_known_args()
    if options.seconds is not None:
        _until(time.monotonic() + options.seconds, run, options.seed)
        return
    try:
        import atheris  # type: ignore[import-untyped]
    except ImportError:
        atheris = None
    if options.runs is not None or atheris is None:
        runs = options.runs or 20_000
        print(f"{runs} inputs: {run(runs, options.seed or 1) or 'no failure'}")
        return
    atheris.instrument_all()
    if mutator is None:
        atheris.Setup([sys.argv[0], *rest], one_input)
    else:
        chosen = mutator
        atheris.Setup([sys.argv[0], *rest], one_input, custom_mutator=lambda *args: chosen(atheris, *args))
    atheris.Fuzz()


def _until(end: float, run: Callable[[int, int], object], seed: int | None) -> None:
    number = random.SystemRandom().randrange(1 << 30) if seed is None else seed
    count = 0
    while time.monotonic() < end:
        try:
            run(1000, number)
        except BaseException:
            print(f"to see it again: {sys.argv[0]} --runs 1000 --seed {number}", file=sys.stderr)
            raise
        number, count = number + 1, count + 1000
    print(f"{count} inputs up to seed {number - 1}: no failure")
