"""What a missing package's remedy says."""

from __future__ import annotations

import sys

import pytest

from weenv.core import extras


def test_the_remedy_is_a_command_for_this_programs_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert extras.remedy("one") == f"install one into weenv's environment: {sys.executable} -m pip install one"
    monkeypatch.setattr(sys, "executable", "/with blank/python")
    assert extras.remedy("one", "two").endswith("environment: '/with blank/python' -m pip install one two")
