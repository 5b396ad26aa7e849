"""Progress bars on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


def columns() -> Progress:
    """A progress display of bytes, on standard error, gone when it is done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip


@contextmanager
def bar(label: str, *, quiet: bool = False) -> Iterator[Callable[[int, int | None], None]]:
    """Give a function ``show(done, total)``; bytes, ``total`` None where it is not known. May be called from any thread."""
    if quiet or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.markup import escape

    with columns() as progress:
        task = progress.add_task(escape(label), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
