"""What the C library does with memory that is freed: mallopt(3), a setting of the whole process, so only for commands."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


def keep_freed_memory(kept: int = 128 << 20, block: int = 8 << 20) -> bool:
    """Use freed blocks of less than ``block`` bytes again; up to ``kept`` bytes do not go back to the kernel.

    glibc gives the kernel what lies free at the end of a heap beyond two of the largest blocks. What handles megabytes
    in many threads, as a conversion does, then has the kernel clear every page again and again: a tenth of its CPU time.
    False where the C library has no such setting; nothing is different then.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # mallopt takes ints and gives 1 for done.
    return bool(mallopt(_M_MMAP_THRESHOLD, block) == 1 and mallopt(_M_TRIM_THRESHOLD, kept) == 1)
