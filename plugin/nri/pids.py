"""Limits of processes, for containers that say so: a fuse that is raised before it blows, and never lowered.

Processes are nothing that others lack, so no ledger knows of them: a container names its start and how far it may go
(``weenv.dev/pids.start``, ``weenv.dev/pids.max``), and its limit is doubled when much of it is in use, or the kernel has
refused a fork. A refused fork is an error within the container, which is why use alone raises it. Limits are set through
containerd, the only way that takes them (NRI and CRI do not), and read back. Files: Documentation of Linux,
admin-guide/cgroup-v1/pids.rst; v2 has the same.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
from collections.abc import Awaitable, Callable

from weenv.core.aio import Background
from weenv.core.errors import WeenvError
from weenv.plugin.nri.actuate import EnvGone
from weenv.plugin.nri.cgroups import CgroupGone, CgroupUnreadable
from weenv.plugin.nri.journal import Kind
from weenv.plugin.nri.managed import Env
from weenv.plugin.nri.model import EnvKey, Pids, PidsBounds
from weenv.plugin.nri.record import Record

log = logging.getLogger(__name__)

EVERY = 1.0
"""Seconds between two looks."""
_EARLY = 0.1
"""Seconds by which a look may come before it is due: the next one would be too late."""
_BACK_OFF = 10.0
"""Seconds after which a limit that could not be set is tried again."""


def read(directory: str) -> Pids:
    """A group's processes. Raises CgroupGone, CgroupUnreadable."""
    found = []
    try:
        for name in ("pids.current", "pids.max", "pids.events"):
            with open(os.path.join(directory, name)) as file:
                words = file.read(4096).split() or [""]
            found.append(0 if words == ["max"] else int(words[-1]))
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and (error.errno == errno.ENODEV or not os.path.isdir(directory)):
            raise CgroupGone(f"{directory} is gone") from error
        raise CgroupUnreadable(f"cannot read the number of processes in {directory}: {error}") from error
    return Pids(*found)


def wanted(seen: Pids, before: int, bounds: PidsBounds, use: float) -> int | None:
    """The limit to set, None: leave it; one below the ceiling, whoever set it, is gone on from.

    ``before``: forks refused by the last look; ``use``: share in use that raises it.
    """
    limit = seen.limit or 1 << 62
    if limit > bounds.ceiling:
        return bounds.start
    if limit < bounds.ceiling and (seen.current >= use * limit or seen.refused > before):
        return min(bounds.ceiling, 2 * limit)
    return None


class Keeper:
    """Looks at the processes of environments for the controller; ``apply`` sets a limit (EnvGone, Refused)."""

    def __init__(
        self, apply: Callable[[EnvKey, int], Awaitable[None]], record: Record, background: Background, use: float
    ) -> None:
        self._apply = apply
        self._record = record
        self._background = background
        self._use = use

    def look(self, env: Env, bounds: PidsBounds, now: float) -> None:
        """One look, where it is due. Raises CgroupGone. That a machine does not count them is said once."""
        if now + _EARLY < env.pids_due:
            return
        env.pids_due = now + EVERY
        try:
            before, env.pids = env.pids, read(env.reader.paths.pids)
        except CgroupUnreadable as error:
            env.pids_due = math.inf
            self._record.event(Kind.REFUSED, env.key, message=error.message)
            return
        limit = wanted(env.pids, before.refused if before is not None else env.pids.refused, bounds, self._use)
        if limit is not None:
            env.pids_due = now + _BACK_OFF  # until it is through
            self._background.spawn(self._change(env, env.pids, limit), f"processes of {env.key}")

    @staticmethod
    def told(env: Env, now: float) -> None:
        """The kernel says that a limit was met: the next look is due at once, unless a change is under way or was refused."""
        env.pids_due = now if env.pids_due <= now + EVERY else env.pids_due

    async def _change(self, env: Env, seen: Pids, limit: int) -> None:
        refused = ""
        try:
            await self._apply(env.key, limit)
            found = await asyncio.to_thread(read, env.reader.paths.pids)
            if found.limit != limit:
                refused = f"the cgroup has {found.limit or 'no limit'} instead of {limit} processes"
        except (EnvGone, CgroupGone):
            return  # its end is told by containerd
        except WeenvError as error:
            refused = error.message
        if not env.alive():
            return
        if refused:
            log.info("processes of %s: %s", env.key, refused)
            self._record.event(Kind.REFUSED, env.key, message=refused, pids=limit)
            return
        env.pids_due = 0.0
        self._record.event(
            Kind.PIDS, env.key, before=seen.limit or None, limit=limit, current=seen.current, refused=seen.refused
        )
