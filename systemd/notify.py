"""The daemon's side of the service manager's protocol: readiness, watchdog, inherited sockets, kept descriptors.

No library, because this is a datagram to ``$NOTIFY_SOCKET`` and five variables: sd_notify(3), sd_listen_fds(3),
sd_watchdog_enabled(3), and "File Descriptor Store" of systemd's documentation. ``weenv serve`` speaks the same protocol to
the daemons that it starts, so they do not know who started them. Without the variables everything here does nothing.

What our daemons look for among the inherited descriptors (``FileDescriptorName=`` of a socket unit; names of the fd store):

=======================  ======================================================================================
name                     what
=======================  ======================================================================================
``snapshotter``          listening stream socket on which ``weenv snapshotter serve`` answers containerd
``snapshotter-waiting``  brings connections that were accepted while there was no snapshotter (:mod:`weenv.systemd.lobby`)
``blobfs``               listening stream socket on which ``weenv blobfs serve`` tells its status
``elastic``              listening stream socket on which ``weenv elastic serve`` is asked for room
``gateway``              listening stream socket, TCP or unix, of ``weenv gateway serve``
``fuse``                 (fd store) the ``/dev/fuse`` descriptor of blobfs's mount
``nodes``                (fd store) a memfd with what else the next blobfs has to know of that mount
=======================  ======================================================================================
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Collection, Sequence
from typing import Final

FIRST_FD: Final = 3
"""SD_LISTEN_FDS_START."""
_MOST: Final = 1024
"""Descriptors looked at, at most; more is no honest LISTEN_FDS."""
UNIX: Final = (socket.AF_UNIX,)
"""What only root can connect to."""
NETWORK: Final = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
_BARRIER: Final = 5.0
_PREDECESSOR: Final = 15.0
"""Longer than a daemon takes to end."""


def notify(*lines: str, fds: Sequence[int] = ()) -> bool:
    """Send assignments such as ``READY=1``; False where nobody listens. Never raises: no daemon fails for want of a manager."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):  # AF_VSOCK is for virtual machines as a whole
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(_BARRIER)
            sender.connect("\0" + address[1:] if address[0] == "@" else address)
            socket.send_fds(sender, ["\n".join(lines).encode()], list(fds))
    except OSError:
        return False
    return True


def ready(status: str = "") -> bool:
    """Requests are answered from now on."""
    return notify("READY=1", *([f"STATUS={status}"] if status else ()))


def stopping() -> bool:
    """The daemon is ending by its own will."""
    return notify("STOPPING=1")


def keeps_descriptors(count: int) -> bool:
    """True where the manager keeps at least ``count`` descriptors for us (``$FDSTORE``: systemd 254 and newer)."""
    most = os.environ.get("FDSTORE", "")
    return bool(os.environ.get("NOTIFY_SOCKET")) and most.isascii() and most.isdigit() and int(most) >= count


def keep(**fds: int) -> bool:
    """Have the manager keep descriptors under these names for the next start; True once it certainly has them.

    Waits, because a message whose sender is dead before it is read may belong to nobody. Blocks for at most a few seconds.
    """
    return all(notify("FDSTORE=1", f"FDNAME={name}", fds=[fd]) for name, fd in fds.items()) and barrier()


def forget(*names: str) -> None:
    """Have the manager close what it keeps under these names."""
    for name in names:
        notify("FDSTOREREMOVE=1", f"FDNAME={name}")


def barrier(timeout: float = _BARRIER) -> bool:
    """Wait until the manager has dealt with everything sent before (sd_notify_barrier(3)); False after ``timeout`` seconds."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            if not notify("BARRIER=1", fds=[theirs]):
                return False
        finally:
            os.close(theirs)
        waiting = select.poll()
        waiting.register(ours, 0)  # POLLHUP: the last copy of the other end is closed
        return bool(waiting.poll(timeout * 1000))
    finally:
        os.close(ours)


def inherited() -> dict[str, list[int]]:
    """The descriptors that were passed to this very process, by name; empty where there are none.

    They are close-on-exec afterwards, and the variables are gone from the environment, so children do not take them for
    theirs and a second call gives nothing.
    """
    pid, count, names = (os.environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if pid != str(os.getpid()) or not (count.isascii() and count.isdigit() and int(count) <= _MOST):
        return {}
    called = names.split(":") if names else []
    found: dict[str, list[int]] = {}
    for place in range(int(count)):
        fd = FIRST_FD + place
        try:
            os.set_inheritable(fd, False)
        except OSError:  # said to be there, and is not
            continue
        found.setdefault(called[place] if place < len(called) else "unknown", []).append(fd)
    return found


def listening_socket(fds: Sequence[int], families: Collection[int] = UNIX) -> socket.socket | None:
    """The first of ``fds`` that is a listening stream socket of these families; the others are closed."""
    chosen: socket.socket | None = None
    for fd in fds:
        try:
            candidate = socket.socket(fileno=fd)
        except OSError:  # no socket at all
            os.close(fd)
            continue
        fits = candidate.family in families and candidate.type == socket.SOCK_STREAM
        if chosen is None and fits and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            chosen = candidate
        else:
            candidate.close()
    return chosen


def take_socket(name: str, families: Collection[int] = UNIX) -> socket.socket | None:
    """The listening socket that was passed under ``name``, for a daemon that is passed nothing else; the rest is closed."""
    passed = inherited()
    mine = listening_socket(passed.pop(name, ()), families)
    close_all(passed)
    return mine


def close_all(passed: dict[str, list[int]]) -> None:
    """Close inherited descriptors that nobody wants."""
    for fds in passed.values():
        for fd in fds:
            os.close(fd)


def patience() -> float:
    """Seconds to wait for a predecessor that is ending; 0 for who was started by hand, and wants to be told at once."""
    return _PREDECESSOR if os.environ.get("NOTIFY_SOCKET") else 0.0


def watchdog_interval() -> float | None:
    """Seconds between two signs of life, half of what the manager allows; None where it does not look."""
    micros, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not (micros.isascii() and micros.isdigit()) or int(micros) == 0 or pid not in ("", str(os.getpid())):
        return None
    return int(micros) / 2e6


async def watchdog() -> None:
    """Give signs of life for as long as the event loop turns; returns at once where nobody looks."""
    import asyncio  # which the small process of weenv serve does without

    interval = watchdog_interval()
    while interval is not None:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval)
