"""A short, deterministic pass of the tail's fuzz target."""

from __future__ import annotations

from weenv_testkit.fuzzing import load


def test_a_short_pass() -> None:
    fuzz = load("fuzz_tail")
    accepted, _ = fuzz.run(2500)
    # Neither "everything is refused at the door" nor "everything is accepted": the mutations reach the checks.
    assert 50 < accepted < 1500


def test_the_seed_itself_is_accepted() -> None:
    fuzz = load("fuzz_tail")
    offset, tail = fuzz.seed_blob()
    assert fuzz.one_input(offset.to_bytes(6, "little") + tail)
