"""Amounts as people read and write them."""

from __future__ import annotations

import re

_SUFFIXES = {
    "": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKMGT]i?|)\Z", re.ASCII)
_CORES = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m?)\Z", re.ASCII)


def parse_cores(text: str) -> float | None:
    """CPUs from ``2``, ``0.5`` or ``500m``; None for what is none, or no sensible number of them."""
    match = _CORES.match(text)
    value = float(match[1]) / (1000 if match[2] else 1) if match else 0.0
    return value if 0 < value <= 1024 else None


def parse_bytes(text: str) -> int | None:
    """Bytes from a number, or one with a suffix such as ``512Mi`` or ``2G``; None for what is no size."""
    match = _QUANTITY.match(text)
    value = float(match[1]) * _SUFFIXES[match[2]] if match and match[2] in _SUFFIXES else 0.0
    return int(value) if 1 <= value < 2**63 else None


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
