"""Unix sockets that nobody else may connect to."""

from __future__ import annotations

import os
import socket


def bind_private(path: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A socket bound to ``path``, which does not exist yet, with mode 0600 from the first moment. Raises OSError.

    The mode is set on the socket before it is bound, from where the new name takes it (net/unix/af_unix.c, unix_bind_bsd).
    Changing the umask meanwhile would do it for the whole process: other threads' files and directories would get it, too.
    """
    made = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    try:
        os.fchmod(made.fileno(), 0o600)
        made.bind(path)
    except BaseException:
        made.close()
        raise
    return made
