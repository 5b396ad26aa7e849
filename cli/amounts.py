"""Sizes and ages on the command line, and the options of whatever makes frames."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from weenv.core.units import parse_bytes, size
from weenv.layer.encode import DEFAULT_LEVEL, DEFAULT_TARGET
from weenv.layer.limits import DEFAULT_LIMITS

if TYPE_CHECKING:
    _Type = click.ParamType[int]
else:
    _Type = click.ParamType  # generic from click 8.2 on

_AGE = re.compile(r"(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?\Z", re.ASCII)
_Command = TypeVar("_Command", bound=Callable[..., Any])


class Size(_Type):
    """Bytes from ``640Ki``, ``20G`` or a number, ``low`` to ``high``, in steps of ``step``; 0 where that is in the range.

    ``unit``: a number alone is refused, for who leaves the unit away means another one than bytes.
    """

    name = "size"

    def __init__(self, low: int = 1, high: int = 1 << 62, *, step: int = 1, unit: bool = False) -> None:
        self.low, self.high, self.step, self.unit = low, high, step, unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The bytes. Raises BadParameter naming what is taken."""
        if isinstance(value, int):
            return value
        found = 0 if value == "0" else parse_bytes(value)
        if found is None:
            self.fail(f"{value!r} is no size: write 512Ki, 500M or 20Gi", param, ctx)
        if self.unit and found and value.replace(".", "").isdigit():
            self.fail(f"{value!r} has no unit: write {value}Gi, {value}Mi or {value}K", param, ctx)
        if not self.low <= found <= self.high:
            top = "" if self.high >= 1 << 62 else f" to {size(self.high)}"
            self.fail(f"{value!r} is out of range: {size(self.low)}{top or ' and more'}", param, ctx)
        if found % self.step:
            self.fail(f"{value!r} is no multiple of {self.step}", param, ctx)
        return found


def age(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    """Seconds from ``90s``, ``15m``, ``24h``, ``7d`` or several of them: an option's callback."""
    if value is None:
        return None
    match = _AGE.match(value)
    if not value or match is None:
        raise click.BadParameter(f"{value!r} is no age: write 90s, 15m, 24h or 7d")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(days * 86400 + hours * 3600 + minutes * 60 + seconds)


def frames(command: _Command) -> _Command:
    """``--target`` and ``--level``. The largest frames, of two and a half targets, are within what readers accept."""
    target = click.option(
        "--target", type=Size(4 << 10, DEFAULT_LIMITS.max_frame_content // 4, step=512), default=DEFAULT_TARGET,
        show_default=True, metavar="SIZE", help="Bytes of tar in a frame.",
    )  # fmt: skip
    level = click.option(
        "--level", type=click.IntRange(1, 22), default=DEFAULT_LEVEL, show_default=True, metavar="1-22", help="zstd level."
    )
    return target(level(command))
