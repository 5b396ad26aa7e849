"""Every link of the pages leads somewhere: to a file of this tree, and to a heading where it names one."""

from __future__ import annotations

import re
from pathlib import Path

from test_layout import ROOT, tracked

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading: its text in lower case, without markup and punctuation, with ``-`` for spaces."""
    text = re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """All that a page has."""
    return {slug(found) for found in re.findall(r"^#+ (.*)", _FENCED.sub("", page.read_text()), re.MULTILINE)}


def broken(page: Path) -> list[str]:
    """The links of a page that lead to nothing; those to other sites are not looked at."""
    missing = []
    for link in _LINK.findall(_FENCED.sub("", page.read_text())):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if "://" in link or (target.exists() and (not anchor or anchor in anchors(target))):
            continue
        missing.append(f"{page.name}: {link}")
    return missing


def test_links_lead_somewhere() -> None:
    pages = [Path(ROOT, name) for name in tracked() if name.endswith(".md")]
    assert sum(len(_LINK.findall(page.read_text())) for page in pages) > 100
    assert [line for page in pages for line in broken(page)] == []


def test_what_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `b`, c!\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text("# Here\n[1](other.md) [2](other.md#a-b-c) [3](#here) [4](https://x.example/#y)\n")
    assert broken(page) == []
    page.write_text("[1](none.md) [2](other.md#no-heading) [3](#gone)\n```\n[4](none.md)\n```\n")
    assert broken(page) == ["page.md: none.md", "page.md: other.md#no-heading", "page.md: #gone"]
