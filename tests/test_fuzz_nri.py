"""A short, deterministic pass of the fuzz target of NRI's wire."""

from __future__ import annotations

from weenv_testkit.fuzzing import load


def test_a_short_pass() -> None:
    accepted = int(load("fuzz_nri").run(3000, 3).split()[0])
    # Neither "everything is refused at the door" nor "everything is accepted".
    assert 1000 < accepted < 2900
