"""What to say to somebody who may not do it, or has no room for it."""

from __future__ import annotations

import errno
import os

AS_ROOT = "run it as root"
ROOM = "make room on that disk"


def remedy(error: BaseException, otherwise: str = "") -> str:
    """A hint for ``error``: to be root or to make room, where that is what is missing, or ``otherwise``."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ROOM
    return AS_ROOT if isinstance(error, PermissionError) and os.geteuid() != 0 else otherwise
