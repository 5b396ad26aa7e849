"""Drawing for people: sizes, durations, tables and progress bars. Machines get ``--json`` instead."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click

from weenv.core.log import printable
from weenv.core.units import seconds, size

__all__ = ["escape", "plain", "print_json", "seconds", "short", "size", "table"]


def short(digest: str) -> str:
    """The first 12 hex digits of a digest."""
    return digest.removeprefix("sha256:")[:12]


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    click.echo(json.dumps(value, indent=2, sort_keys=False))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", right: Sequence[int] = ()) -> None:
    """Print a table; ``right`` lists the numbers of right-aligned columns. Cells may carry rich markup."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(title=title or None, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    Console().print(drawn)


def plain(text: str) -> str:
    """Text without control characters: names come from registries, and must not drive the terminal."""
    return printable(text)


def escape(text: str) -> str:
    """Text that is safe as a cell: no control characters, no markup."""
    from rich.markup import escape as markup

    return markup(plain(text))
