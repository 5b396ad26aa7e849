"""Putting a decided quota into force: through the runtime, verified in the cgroup, memory shrunk by the safe rule only.

:func:`change` is what the controller calls. An :class:`Actuator` only carries a request to somebody who owns the container's
limits; :class:`TaskUpdates` is the default one and works for every container that containerd runs. What each of them says is
not believed: the cgroup is read back.

The safe rule: a limit of memory goes down only in an update of its own (a refusal must not undo a raise of CPU), only to what
the use that no reclaim frees fits under with a margin, read at that moment, and on cgroup v2, where a limit below use kills,
only after the kernel has freed what is above it. cgroup v1 refuses such a limit (EBUSY) and the old one stays.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from typing import Any, Protocol

from weenv.core.errors import WeenvError
from weenv.plugin.containerd.client import Client, ContainerdError
from weenv.plugin.containerd.runtime import Tasks
from weenv.plugin.nri.cgroups import Reader
from weenv.plugin.nri.config import MemoryRules
from weenv.plugin.nri.model import UNLIMITED_MEMORY, EnvKey, Quota
from weenv.plugin.nri.policy import least_memory

PERIOD = 100_000
"""Microseconds of a quota period, the kernel's default (Documentation/scheduler/sched-bwc.rst)."""
_LEAST_QUOTA = 1000
"""The kernel takes no less than a millisecond (kernel/sched/core.c, min_cfs_quota_period)."""
_CPU_ERROR = 0.009
"""Cores by which a quota read back may differ: systemd rounds up to 10 ms of a second. Less than the policy's grain of a
hundredth, which is a change: whoever takes 0.06 for 0.05 never brings it back to its start."""
_PAGE = 4096
ATTEMPTS = 3
"""Tries of one change; the next decision is a new one."""
PAUSES = (0.05, 0.2)
"""Seconds between them."""
DEADLINE = 5.0
"""Seconds for one call: runc takes some 30 ms, on a machine that is out of CPU a second."""
_RETRY = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED"})


class EnvGone(WeenvError):
    """The environment ended before or while its limits were changed."""


class Refused(WeenvError):
    """Limits cannot be changed to what was asked; what is in force stays. ``again``: it may be different in a moment."""

    def __init__(self, message: str, *, again: bool = False, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.again = again


class Actuator(Protocol):
    """Carries limits to the runtime."""

    name: str

    async def apply(self, key: EnvKey, cpu: float | None, memory: int | None, swap: int | None) -> None:
        """Set what is not None: cores, bytes, bytes of memory and swap together. Raises EnvGone, Refused."""


class TaskUpdates:
    """containerd's Tasks.Update: for containers of CRI, ctr, nerdctl, docker and ``weenv run`` alike.

    Their owners' own records (``docker inspect``, CRI status) keep what they were created with, and an update by an owner
    sets that again; the controller notices at its next look and corrects it.
    """

    name = "tasks"

    def __init__(self, client: Client, *, deadline: float = DEADLINE) -> None:
        self._client = client
        self._deadline = deadline

    async def apply(self, key: EnvKey, cpu: float | None, memory: int | None, swap: int | None) -> None:
        """See :class:`Actuator`."""
        await self._update(key, resources(cpu, memory, swap))

    async def pids(self, key: EnvKey, limit: int) -> None:
        """Limit the processes of a container. Raises EnvGone, Refused."""
        await self._update(key, {"pids": {"limit": limit}})

    async def _update(self, key: EnvKey, made: dict[str, Any]) -> None:
        tasks = Tasks(self._client.namespace(key.namespace))
        try:
            await tasks.update(key.container_id, made, deadline=self._deadline)
        except ContainerdError as error:
            if error.code == "NOT_FOUND":
                raise EnvGone(f"{key} has ended") from error
            raise Refused(f"{key}: {error.message}", again=error.code in _RETRY) from error

    async def end(self, key: EnvKey) -> None:
        """Kill all processes of a container. Raises EnvGone, Refused."""
        try:
            await Tasks(self._client.namespace(key.namespace)).kill(key.container_id, signal.SIGKILL, everyone=True)
        except ContainerdError as error:
            if error.code == "NOT_FOUND":
                raise EnvGone(f"{key} has ended") from error
            raise Refused(f"{key}: {error.message}", again=error.code in _RETRY) from error


def resources(cpu: float | None, memory: int | None, swap: int | None) -> dict[str, Any]:
    """The OCI ``linux.resources`` object (runtime-spec config-linux.md) of limits; what is left out stays."""
    made: dict[str, Any] = {}
    if cpu is not None:
        made["cpu"] = {"quota": max(_LEAST_QUOTA, round(cpu * PERIOD)), "period": PERIOD}
    if memory is not None:
        made["memory"] = {"limit": memory}
        if swap is not None:
            made["memory"]["swap"] = swap
    return made


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a change. ``quota`` is in force, as the cgroup says; ``refused`` is empty or why it is not as asked."""

    quota: Quota
    attempts: int
    refused: str = ""


def cores_match(asked: float, found: float) -> bool:
    """Whether a CPU quota (cores) read back is the one that was asked for."""
    return abs(asked - found) <= max(_CPU_ERROR, 0.01 * asked)


async def change(actuator: Actuator, reader: Reader, key: EnvKey, quota: Quota, now: float, rules: MemoryRules) -> Outcome:
    """Put ``quota`` into force as far as it is safe; ``now`` is the monotonic clock.

    Raises EnvGone and CgroupGone where the environment has ended, CgroupUnreadable. A refusal is told in the outcome.
    """
    before = reader.limits()
    cpu = None if cores_match(quota.cpu, before.cpu) else quota.cpu
    raised = quota.memory if quota.memory > before.memory else None
    lowered = quota.memory if quota.memory < before.memory - _PAGE else None
    attempts = 0
    reasons: list[str] = []
    if cpu is not None or raised is not None:
        tried, refused = await _apply(actuator, reader, key, cpu, raised, before)
        attempts += tried
        reasons += [refused] if refused else []
    if lowered is not None:
        least = least_memory(reader.sample(now, whole=True).memory.unreclaimable, rules)
        target = max(lowered, least)
        if target >= before.memory:
            reasons.append("memory: what is in use does not fit under a lower limit")
        elif not await _make_room(reader, target, now):
            reasons.append("memory: the kernel could not free what is above a lower limit")
        else:
            tried, refused = await _apply(actuator, reader, key, None, target, before)
            attempts += tried
            reasons += [refused] if refused else []
    return Outcome(reader.limits(), attempts, "; ".join(reasons))


async def _make_room(reader: Reader, target: int, now: float) -> bool:
    """Free what is above a lower limit, where the kernel would otherwise kill for it."""
    if reader.paths.memory_v1:
        return True
    room = target - (target >> 4)  # the limit itself is no place to stop at: it goes on growing meanwhile
    above = reader.sample(now).memory.current - room
    if above > 0:
        await asyncio.to_thread(reader.reclaim, above)
    return reader.sample(now).memory.current <= target - (target >> 5)


async def _apply(
    actuator: Actuator, reader: Reader, key: EnvKey, cpu: float | None, memory: int | None, before: Quota
) -> tuple[int, str]:
    """(tries, empty or the refusal) of one update and its verification."""
    swap = None
    if memory is not None and (both := reader.swap_limit()) < UNLIMITED_MEMORY:
        # v1: the limit of memory and swap together is never below that of memory; what it leaves for swap stays.
        swap = memory + max(0, both - before.memory)
    refused = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(PAUSES[min(attempt, len(PAUSES)) - 1])
        again = True
        try:
            await actuator.apply(key, cpu, memory, swap)
            refused = ""
        except Refused as error:
            refused, again = error.message, error.again
        found = reader.limits()
        wrong = []
        if cpu is not None and not cores_match(cpu, found.cpu):
            wrong.append(f"{found.cpu:g} cores instead of {cpu:g}")
        if memory is not None and abs(found.memory - memory) > _PAGE:
            wrong.append(f"{found.memory} bytes instead of {memory}")
        if not wrong:
            return attempt + 1, ""
        if not again:
            break
    return attempt + 1, refused or f"{key}: the cgroup has {' and '.join(wrong)}"
