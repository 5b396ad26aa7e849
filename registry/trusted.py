"""Registries on this node's own addresses that its operator has used by name: a small file below the snapshotter's root.

An image's annotation may not send a node to its own loopback or link (:mod:`weenv.registry.internal`). A registry there that
the operator names in a plan is meant all the same: who composes the plan on the node writes its host down here, and the
snapshotter, which only sees the layers' annotations, looks it up.

The file is ``<root>/trusted-hosts``: a host (``name`` or ``name:port``) a line, the last named last; mode 0600.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable

from weenv.core.atomic import write_atomic
from weenv.core.errors import BadReference
from weenv.core.regular import regular
from weenv.registry.config import RegistryConfig
from weenv.registry.internal import is_internal
from weenv.registry.reference import check_host

NAME = "trusted-hosts"
MAX_HOSTS = 64
"""Hosts kept; the one that was added first goes first."""
_MAX_FILE = 64 << 10


def read_hosts(path: str) -> tuple[str, ...]:
    """The hosts in the file at ``path``; none where it is not there, too large, or others than its owner, who has to be
    this process's user, may write it. Blocking."""
    try:
        with open(path, "rb", opener=regular) as file:
            about = os.fstat(file.fileno())
            if about.st_uid != os.geteuid() or about.st_mode & 0o022 or about.st_size > _MAX_FILE:
                return ()
            lines = file.read(_MAX_FILE).decode("utf-8", "replace").splitlines()
    except OSError:
        return ()
    hosts = []
    for line in lines:
        with contextlib.suppress(BadReference):
            check_host(line)
            hosts.append(line)
    return tuple(hosts[-MAX_HOSTS:])


def add_hosts(root: str, hosts: Iterable[str]) -> None:
    """Add hosts to the file below ``root``, which has to exist. Blocking. Raises OSError."""
    path = os.path.join(root, NAME)
    wanted = list(dict.fromkeys(hosts))
    if set(wanted) <= set(read_hosts(path)):
        return
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = read_hosts(path)
        merged = [*known, *(host for host in wanted if host not in known)][-MAX_HOSTS:]
        write_atomic(path, "".join(f"{host}\n" for host in merged).encode())
    finally:
        os.close(lock)


async def trust(root: str, hosts: Iterable[str], config: RegistryConfig) -> None:
    """Write down those of ``hosts`` that no annotation could name without that. Raises OSError."""
    wanted = [host for host in dict.fromkeys(hosts) if not config.is_configured(host) and await is_internal(host)]
    if wanted:
        add_hosts(root, wanted)


class TrustedHosts:
    """The file as it is now: read again when it changes."""

    def __init__(self, root: str) -> None:
        self._path = os.path.join(root, NAME)
        self._seen: tuple[int, int, int] | None = None
        self._hosts: frozenset[str] = frozenset()

    def __contains__(self, host: str) -> bool:
        try:
            about = os.stat(self._path)
        except OSError:
            self._seen, self._hosts = None, frozenset()
            return False
        seen = (about.st_ino, about.st_mtime_ns, about.st_size)
        if seen != self._seen:
            self._hosts, self._seen = frozenset(read_hosts(self._path)), seen
        return host in self._hosts
