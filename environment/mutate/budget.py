"""What one patch may cost: a few bytes of it can ask for gigabytes, or for hours. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from weenv.core.errors import LimitError

MAX_BYTES = 1 << 30
"""Bytes of file contents that a patch is applied to, and of binary data that it holds or makes, together. A file is
counted once for each diff of it: every one goes through the whole of it."""
MAX_STEPS = 20_000_000
"""Places where hunks are looked for and instructions of deltas, together: about twenty seconds of one CPU."""


@dataclass(slots=True)
class Budget:
    """What is left for one patch, or whatever ``what`` is. It is asked before anything is inflated, copied or searched."""

    bytes: int = MAX_BYTES
    steps: int = MAX_STEPS
    what: str = "the patch"

    def spend(self, size: int) -> None:
        """``size`` bytes. Raises LimitError."""
        self.bytes -= size
        if self.bytes < 0:
            raise LimitError(
                "it changes or makes too many bytes of files (the limit is about a GiB)", member=self.what,
                hint="publish them as a group, or use a run mutation",
            )  # fmt: skip

    def step(self, count: int = 1) -> None:
        """``count`` steps. Raises LimitError."""
        self.steps -= count
        if self.steps < 0:
            raise LimitError(
                "its hunks or instructions lie too far from where they should, or are too many", member=self.what,
                hint="make it anew",
            )  # fmt: skip
