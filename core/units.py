"""Amounts as people read them."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes with a binary unit, three significant digits: ``1.50 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def seconds(value: float) -> str:
    """A duration with a fitting unit."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 layer``, ``2 layers``; ``plural`` where it is not the noun with an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
