"""What the next server of a FUSE mount asks of the kernel: what the last one had read, and not answered."""

from __future__ import annotations

import errno
import os

from weenv.core.errors import MountError
from weenv.plugin.snapshotter import mounts
from weenv.plugin.snapshotter.blobfs import wire


def resend(fuse: int) -> bool:
    """Have the kernel deliver again what an earlier server read and did not answer; False before Linux 6.9.

    Must come before the first read from ``fuse``. Raises OSError where the mount is gone.
    """
    try:
        os.write(fuse, wire.notify(wire.NOTIFY_RESEND))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def control() -> mounts.DetachedMount:
    """The kernel's directory of FUSE connections, wherever that is mounted or not. Raises MountError."""
    return mounts.open_filesystem("fusectl")


def under_way(connections: mounts.DetachedMount, device: str) -> int:
    """Requests of the mount with this MAJOR:MINOR that the kernel has had no answer to (fs/fuse/control.c, "waiting").

    ``connections`` are of :func:`control`. Raises OSError, ValueError.
    """
    path = f"{device.partition(':')[2]}/waiting"  # opened each time: a descriptor gives what it first did
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=connections.fd), "rb") as file:
        return int(file.read(32))


def readers_wait(mountpoint: str) -> bool:
    """Whether anybody may wait for an answer from what is mounted there; also where that cannot be told."""
    try:
        device = mounts.mounts_below(os.path.dirname(mountpoint))[mountpoint].device
        with control() as connections:
            return under_way(connections, device) > 0
    except (MountError, OSError, ValueError, KeyError):
        return True
