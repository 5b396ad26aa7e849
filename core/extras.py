"""Packages that only some commands need, and that may not be installed."""

from __future__ import annotations

import shlex
import sys


def remedy(*packages: str) -> str:
    """How to install packages where this program finds them: weenv itself may be in any virtual environment."""
    words = (sys.executable, "-m", "pip", "install", *packages)
    return f"install {' and '.join(packages)} into weenv's environment: {shlex.join(words)}"
