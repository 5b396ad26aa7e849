"""Drawing with matplotlib, which only commands with ``--plot`` need."""

from __future__ import annotations

from typing import Any

from weenv.core.errors import WeenvError
from weenv.core.extras import remedy


def new(title: str, width: float, height: float) -> Any:
    """An empty matplotlib Figure of so many inches, for no display. Raises :class:`WeenvError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise WeenvError("drawing needs matplotlib", hint=f"{remedy('matplotlib')}; or leave --plot out") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, parse_math=False)  # a name is no formula
    return figure


def save(figure: Any, target: str) -> None:
    """Write it in the format of the file's name. Raises :class:`WeenvError`, OSError."""
    try:
        figure.savefig(target, dpi=120)
    except ValueError as error:
        raise WeenvError(f"cannot draw {target}: {error}", hint="name a file that ends in .png, .svg or .pdf") from error
