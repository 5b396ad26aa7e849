"""Unix sockets that nobody else may connect to."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import time

from weenv.core.accepting import Entrance
from weenv.core.errors import ConfigError

_CREDENTIALS = struct.Struct("iII")
"""struct ucred: pid, uid, gid."""
NOBODY = (FileNotFoundError, NotADirectoryError, ConnectionRefusedError)
"""What connecting raises where nobody listens: there is no such name, or what has it is a dead process's, or no socket."""
_AGAIN = 0.01
"""Seconds between attempts where a queue is full."""


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


def connected(path: str, patience: float, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A connection to the socket at ``path``; ``patience`` is its timeout in seconds, now and later. Raises OSError.

    That is BlockingIOError where as many wait to be accepted as may, and still do after ``patience``.
    """
    made = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    made.settimeout(patience)
    end = time.monotonic() + patience
    try:
        while True:
            try:
                made.connect(path)
                break
            except BlockingIOError:  # a full queue: the timeout is Python's, and to the kernel the socket never waits
                if time.monotonic() >= end:
                    raise
                time.sleep(_AGAIN)
    except BaseException:
        made.close()
        raise
    return made


def listens(path: str) -> bool:
    """Whether somebody listens at ``path``, also one who is too busy to accept, or takes connections of another kind.

    Never waits. Raises OSError where that cannot be told, such as PermissionError.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except NOBODY:
            return False
        except BlockingIOError:  # as many wait to be accepted as may (unix(7))
            return True
        except OSError as error:
            if error.errno != errno.EPROTOTYPE:
                raise
    return True


def is_trusted(peer: socket.socket) -> bool:
    """Whether who connected (unix(7), SO_PEERCRED) is root or the user that this process is."""
    uid: int = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return uid in (0, os.geteuid())


def accept_trusted(entrance: Entrance) -> socket.socket | None:
    """The connection of one who may talk to us; None where nobody waits, or one did who may not and is turned away."""
    peer = entrance.accept()
    if peer is not None and not is_trusted(peer):
        peer.close()
        return None
    return peer


def claim_path(path: str) -> None:
    """As :func:`clear_path`, where nobody knows whether the socket is dead. Raises OSError (EADDRINUSE) where it is not."""
    if listens(path):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), path)
    clear_path(path)


def clear_path(path: str) -> None:
    """Make room for a socket at ``path``: its directory is made, a dead socket there is removed.

    The caller has made sure that it is dead. Raises :class:`ConfigError` for a path that cannot be a socket's, OSError.
    """
    if len(os.fsencode(path)) > 107:
        raise ConfigError(f"socket path is longer than 107 bytes: {path}", hint="use a shorter run directory")
    os.makedirs(os.path.dirname(path), mode=0o711, exist_ok=True)  # as weenv.tmpfiles has it
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{path} exists and is no socket", hint="remove it, or choose another path")
        os.unlink(path)
    except FileNotFoundError:
        pass
