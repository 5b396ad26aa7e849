"""A short, deterministic pass of the fuzz target of foreign tables of contents."""

from __future__ import annotations

from weenv_testkit.fuzzing import load


def test_a_short_pass() -> None:
    fuzz = load("fuzz_foreign")
    assert all(map(fuzz.one_input, fuzz.SEEDS))
    # Neither "everything is refused at the door" nor "everything is accepted": the mutations reach the checks.
    assert 80 < fuzz.accepted(400, 1) < 320
