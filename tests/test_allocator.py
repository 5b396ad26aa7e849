"""The C library's allocator, by what the kernel counts."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource, sys
from weenv.core.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory() and keep_freed_memory()
def some():
    blocks = [b"x" * (1 << 20) for _ in range(24)]
some()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    some()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    return int(subprocess.run([sys.executable, "-c", SCRIPT, how], check=True, capture_output=True, text=True).stdout)


def test_blocks_are_used_again() -> None:
    usual, kept = faults("usual"), faults("keep")
    assert kept < 24 * 256 < usual  # less than the pages of one of ten rounds
