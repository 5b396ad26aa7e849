"""Drawing for people: sizes, durations, tables and progress bars. Machines get ``--json`` instead."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import click

from weenv.core.log import printable
from weenv.core.units import counted, seconds, size

__all__ = ["counted", "escape", "findings", "plain", "print_json", "seconds", "short", "size", "table"]


_WIDE = 10_000
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def short(digest: str) -> str:
    """The first 12 hex digits of a digest."""
    return digest.removeprefix("sha256:")[:12]


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    click.echo(json.dumps(value, indent=2, sort_keys=False))


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    right: Sequence[int] = (),
    drop: Sequence[int] = (),
) -> None:
    """Print a table. Cells may carry rich markup.

    ``right`` lists the numbers of right-aligned columns. On a terminal that is too narrow for a line a row, the frame goes
    first, then the columns of ``drop`` one by one. Where that is not enough lines are longer than the terminal, which wraps
    them: a reference or digest is never torn, so that it can be copied. Into a file or pipe (without COLUMNS) goes all of it.
    """
    from rich.box import HEAVY_HEAD
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDE
    lines = list(rows)
    wide = console.options.update(max_width=_WIDE)

    def draw(numbers: Sequence[int], framed: bool) -> Table:
        box = HEAVY_HEAD if framed else None
        drawn = Table(title=title or None, title_justify="left", header_style="bold", box=box, pad_edge=framed)
        for number in numbers:
            drawn.add_column(columns[number], justify="right" if number in right else "left", no_wrap=True, overflow="ignore")
        for row in lines:
            drawn.add_row(*(row[number] for number in numbers))
        return drawn

    shown = [[n for n in range(len(columns)) if n not in drop[:count]] for count in range(len(drop) + 1)]
    tries = [(numbers, framed) for numbers in shown for framed in (True, False)]
    for numbers, framed in tries:
        drawn = draw(numbers, framed)
        needed = Measurement.get(console, wide, drawn).maximum
        if needed <= console.width:
            break
    else:
        console.width = needed
    console.print(drawn)


def findings(rows: Iterable[tuple[str, str, str, str]]) -> None:
    """Print (state, name, what was seen, what to do), one below the other, wrapped between words to the terminal's width."""
    import shutil
    import textwrap

    width = max(40, shutil.get_terminal_size().columns)
    for state, name, seen, remedy in rows:
        lines = textwrap.wrap(f"{plain(name)}: {plain(seen)}", width - 6, break_on_hyphens=False)
        if remedy:
            remedy = f"-> {plain(remedy)}"
            lines += textwrap.wrap(remedy, width - 6, subsequent_indent="   ", break_on_hyphens=False)
        click.echo(click.style(f"{state:<6}", fg=_COLOURS.get(state)) + "\n      ".join(lines))


def plain(text: str) -> str:
    """Text without control characters: names come from registries, and must not drive the terminal."""
    return printable(text)


def escape(text: str) -> str:
    """Text that is safe as a cell: no control characters, no markup."""
    from rich.markup import escape as markup

    return markup(plain(text))
