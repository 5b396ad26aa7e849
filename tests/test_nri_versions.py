"""What a runtime's NRI may be asked for, by its version."""

from __future__ import annotations

import pytest

from weenv.plugin.nri.wire.versions import Runtime, parse


@pytest.mark.parametrize(
    ("name", "version", "nri", "events", "updates", "launched"),
    [
        ("containerd", "1.7.24~ds1", "", 0x7FF, False, False),
        ("containerd", "v1.7.27", "", 0x7FF, False, True),
        ("containerd", "2.1.9", "", 0x7FF, False, True),
        ("containerd", "v2.2.0", "", 0x3FFF, False, True),
        ("containerd", "v2.3.1", "v0.12.0", 0x3FFF, False, True),
        ("containerd", "v2.4.0", "v0.12.1", 0x3FFF, False, True),
        ("containerd", "v2.4.0", "v0.12.2", 0x3FFF, True, True),
        ("containerd", "v2.4.0", "v1.0.0-rc.1", 0x3FFF, True, True),
        ("cri-o", "1.99.0", "", 0x7FF, False, True),
        ("cri-o", "1.99.0", "v0.9.0", 0x7FF, False, True),
        ("", "", "", 0x7FF, False, True),
        ("containerd", "unknown", "unknown", 0x7FF, False, True),
    ],
)
def test_rules(name: str, version: str, nri: str, events: int, updates: bool, launched: bool) -> None:
    runtime = Runtime(name, version, nri)
    assert (runtime.events, runtime.takes_updates, runtime.synchronizes_launched) == (events, updates, launched)


def test_versions() -> None:
    assert parse("v2.1.9+ds1-1") == (2, 1, 9) and parse("1.7") == (1, 7, 0)
    assert parse("") is parse("v") is parse("x1.2.3") is parse("9" * 4000) is None
