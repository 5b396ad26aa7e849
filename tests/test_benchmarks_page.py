"""The page of benchmarks is what its JSON says: no figure on it is typed in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_page_is_made_from_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    from weenv_bench import docs

    docs.write(str(ROOT / docs.PUBLISHED), str(tmp_path / "page.md"))
    hint = "make it again: python -m benchmarks --no-measure --docs docs/benchmarks.md"
    assert (tmp_path / "page.md").read_text() == (ROOT / "docs/benchmarks.md").read_text(), hint
