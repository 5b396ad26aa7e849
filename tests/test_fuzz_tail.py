"""A short, deterministic pass of the tail's fuzz target."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def target() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_tail", Path(__file__).parent / "fuzz" / "fuzz_tail.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_short_pass() -> None:
    fuzz = target()
    accepted, _ = fuzz.run(2500)
    # Neither "everything is refused at the door" nor "everything is accepted": the mutations reach the checks.
    assert 50 < accepted < 1500


def test_the_seed_itself_is_accepted() -> None:
    fuzz = target()
    offset, tail = fuzz.seed_blob()
    assert fuzz.one_input(offset.to_bytes(6, "little") + tail)
