"""core/process.py: children, where there may be no room for them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

_FORK = """
import os, resource, signal
from weenv.core.process import fork

def room(count):
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + count, hard))

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
room(1)
pid, handle = fork()
if pid == 0:
    os.close(os.dup(0))  # what was kept free for the handle is not there twice
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
os.close(handle)
room(0)
try:
    fork()
except OSError as error:
    print(error.strerror)
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("no child")
"""


def test_a_child_has_a_descriptor_or_there_is_none() -> None:
    done = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == (f"{os.strerror(errno.EMFILE)}\nno child\n", "")
