"""docs/reliability.md names tests: each of them is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_NAMED = re.compile(r"`((?:tests|integration)/\w+\.py)::(\w+)`")


def test_every_test_that_the_page_names_exists() -> None:
    named = _NAMED.findall((ROOT / "docs" / "reliability.md").read_text())
    assert len(named) > 40
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).is_file() or not re.search(rf"^(?:async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
    ]
    assert missing == []


def test_every_kind_has_one() -> None:
    """A row of the tables of faults ends with a test."""
    section = (ROOT / "docs" / "reliability.md").read_text().partition("## Faults reported elsewhere")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| kind ")]
    assert len(rows) >= 25
    assert [row for row in rows if not _NAMED.search(row.rpartition("|")[0].rpartition("|")[2])] == []
