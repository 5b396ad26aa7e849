"""What to say to somebody who may not do it."""

from __future__ import annotations

import os

AS_ROOT = "run it as root"


def remedy(error: BaseException, otherwise: str = "") -> str:
    """A hint for ``error``: to be root, where that is what is missing, or ``otherwise``."""
    return AS_ROOT if isinstance(error, PermissionError) and os.geteuid() != 0 else otherwise
