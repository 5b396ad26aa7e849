"""Which servers go first: decisions over time, without any."""

from __future__ import annotations

from weenv.registry.health import Health
from weenv.registry.hosts import Endpoint

A, B, C = (Endpoint("r.example", host) for host in ("a", "b", "c"))


def test_two_failures_in_a_row_make_a_server_rest() -> None:
    health = Health(30.0, 60.0)
    assert health.order([A, B, C], 0.0) == [A, B, C]
    assert not health.failed(A, 0.0)
    assert health.order([A, B, C], 0.0) == [A, B, C]
    health.worked(A)
    assert not health.failed(A, 1.0)
    assert health.failed(A, 1.0) and not health.failed(A, 1.0), "said once"
    assert health.order([A, B, C], 2.0) == [B, C, A]
    health.failed(B, 2.0)
    health.failed(B, 2.0)
    assert health.order([A, B, C], 3.0) == [C, B, A], "the one whose rest is over first"
    assert health.order([A, B, C], 1000.0) == [A, B, C]
    assert health.failed(A, 1000.0), "it rests again at once: it has not worked since"
    assert health.order([A, B], 1001.0) == [B, A]
    health.worked(A)
    assert health.order([A, B], 1001.0) == [A, B]


def test_rests_double_and_are_bounded() -> None:
    health, lengths = Health(10.0, 60.0), []
    for _ in range(12):
        health.failed(A, 0.0)
        lengths.append(health._states[A.origin].rests_until)
    assert lengths[0] == 0.0 and 8.0 <= lengths[1] <= 12.0 and 16.0 <= lengths[2] <= 24.0
    assert all(64.0 <= each <= 96.0 for each in lengths[5:])


def test_retry_after_holds_for_everybody_and_is_bounded() -> None:
    health = Health(30.0, 60.0)
    health.throttled(A, 5.0, 100.0)
    assert health.wait(A, 101.0) == 4.0 and health.wait(B, 101.0) == 0.0 and health.wait(A, 106.0) == 0.0
    health.throttled(A, 1.0, 100.0)
    assert health.wait(A, 101.0) == 4.0, "the longest counts"
    health.throttled(A, 1e9, 100.0)
    assert health.wait(A, 100.0) == 60.0


def test_who_is_ill_can_be_asked() -> None:
    health = Health(30.0, 60.0)
    for _ in range(2):
        health.failed(B, 0.0)
    health.throttled(A, 5.0, 0.0)
    health.failed(C, 0.0)
    busy, (name, state, seconds) = health.ill(1.0)
    assert busy == (A.origin, "busy", 4.0)
    assert (name, state) == (B.origin, "rests") and 23.0 <= seconds <= 35.0
    assert [name for name, _, _ in health.ill(6.0)] == [B.origin]
    health.worked(B)
    assert health.ill(6.0) == []


def test_state_is_bounded() -> None:
    health = Health(30.0, 60.0)
    for number in range(5000):
        health.failed(Endpoint("r.example", f"h{number}"), 0.0)
    assert len(health._states) <= 1024
