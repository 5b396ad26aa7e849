"""This process's own standard output and error as places that may be full: written to without ever waiting.

A reader that is slow must not keep signals, time limits and containerd's answers from being looked after; the
descriptor may belong to others too, so it cannot be made non-blocking. Where poll(2) says that a pipe can be written to,
PIPE_BUF bytes fit (pipe(7)); of more, a blocking write(2) may wait.
"""

from __future__ import annotations

import os
import select
import stat

QUIET, AT_MOST = 0.25, 30.0
"""Seconds, after a process has ended: how long nothing may come before it is asked whether something holds its streams
open, and how long their end is waited for. Time in which our own reader takes nothing does not count."""
HURRY = 3.0
"""Seconds that are left to a reader who takes nothing, when this process has been told to end."""
LAST = 4 << 20
"""Bytes that may be on their way when a process ends (two pipes of /proc/sys/fs/pipe-max-size for each stream); what
comes after those was written by others."""

_PIECE = select.PIPE_BUF


class Outlet:
    """A descriptor to write to. Raises BrokenPipeError and other OSErrors as write(2) gives them."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.pending = memoryview(b"")
        """What has not been written yet; :meth:`flush` when the descriptor can be written to."""
        self._poll: select.poll | None = None
        try:
            plain = stat.S_ISREG(os.fstat(fd).st_mode)
        except OSError:
            plain = True  # closed: the write says so
        if not plain:
            self._poll = select.poll()
            self._poll.register(fd, select.POLLOUT)

    def write(self, data: bytes) -> bool:
        """Write what fits now; True where that was all. Not while something is pending."""
        self.pending = memoryview(data)
        return self.flush()

    def flush(self) -> bool:
        """Write more of what is pending; True where nothing is left."""
        while self.pending:
            if self._poll is None:
                piece = self.pending
            elif self._poll.poll(0):
                piece = self.pending[:_PIECE]
            else:
                return False
            try:
                self.pending = self.pending[os.write(self.fd, piece) :]
            except BlockingIOError:  # somebody has made it non-blocking
                return False
        return True
