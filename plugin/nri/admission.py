"""Who may start, who may grow, and from whom quota is taken back: the ledger of one node. No clock, no I/O.

::

    |<- promised: max(quota, start) of all that were admitted ->|<- raises live on this ->|<------ reserve ------>|
                                                                                          |<- tasks ->|           |
                                                                                          |<- evaluation starts ->|

Every change of a limit is told twice, since a limit is set by a runtime that may be slow or refuse:
:meth:`Ledger.promise` before the runtime is called (a raise counts at once, a step down not yet) and :meth:`Ledger.settle`
with what is in force once it was read back. So the sum of promises is never below the sum of limits in force.

Environments wait in two lines, evaluation before the others, each in the order they came; nobody overtakes within a line, so
a large one is not starved by small ones. :meth:`Ledger.step` is to be called after anything changed and when
:meth:`Ledger.wake_at` says; it answers who was admitted, who ran out of time, and what is to be taken back for an
evaluation environment that waits: quota above the start, of those environments first whose last pressure is longest ago,
never below what they started with, and only where that makes room enough. What may happen between two calls, and after a
restart, is in docs/concurrency/ledger.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from weenv.core.errors import WeenvError
from weenv.core.units import size
from weenv.plugin.nri.config import AdmissionRules
from weenv.plugin.nri.model import Bounds, NodeView, Quota, Resources, Role

OWN_SHARE = 0.05
"""Share of a node's memory that is not promised where the configuration names no amount: kernel, runtime, our daemons."""
SLACK = 1e-6
"""Cores that sums of decimal fractions may be off by."""
REFUSALS = 3
"""An environment that could not be lowered so often in a row is passed over until a limit of it was set as asked."""
NOTHING = Quota(0.0, 0)


class NotAdmitted(WeenvError):
    """The node has no room for an environment, and will not have any within its deadline, or ever."""


@dataclass(frozen=True, slots=True)
class Request:
    """An environment that wants to start."""

    key: Hashable
    bounds: Bounds
    role: Role = Role.TASK


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Lower an environment to ``quota``, then :meth:`Ledger.settle` what is in force (the same, if it was refused)."""

    key: Hashable
    quota: Quota


@dataclass(frozen=True, slots=True)
class Events:
    """What one step of the ledger came to."""

    admitted: tuple[Hashable, ...] = ()
    expired: tuple[Hashable, ...] = ()
    """Deadline over: they are out of the line."""
    take_back: tuple[TakeBack, ...] = ()


@dataclass(slots=True)
class _Entry:
    """One admitted environment."""

    bounds: Bounds
    role: Role
    promised: Quota
    """At least its start, whatever is in force."""
    lowest: Quota
    """What it may be taken back to."""
    pressed_at: float = -math.inf
    taking: Quota | None = None
    """It was told to go down to this, and has not settled yet."""
    refusals: int = 0
    """How often it could not be lowered in a row."""


@dataclass(slots=True)
class _Waiter:
    request: Request
    since: float
    until: float


class Ledger:
    """The promises of one node. Times are of one monotonic clock, given by the caller."""

    def __init__(self, capacity: Resources, rules: AdmissionRules) -> None:
        cpu = rules.cpu or capacity.cpu
        memory = rules.memory or int(capacity.memory * (1 - OWN_SHARE))
        self.rules = rules
        self.capacity = Resources(cpu, memory)
        self.reserve = Quota(cpu * rules.reserve_cpu, int(memory * rules.reserve_memory))
        self._entries: dict[Hashable, _Entry] = {}
        self._waiting: dict[Hashable, _Waiter] = {}
        self._lines: dict[bool, deque[_Waiter]] = {True: deque(), False: deque()}  # evaluation, others
        self._cpu = 0.0
        self._memory = 0
        self._starts = NOTHING

    # --- what is -----------------------------------------------------------------------------------------------------

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def promised(self) -> Quota:
        """Sum of all promises."""
        return Quota(max(0.0, self._cpu), self._memory)

    @property
    def waiting(self) -> int:
        """Environments that wait."""
        return len(self._waiting)

    def view(self) -> NodeView:
        """The node as the policy sees it. Whoever waits for room comes before raises: its start is kept free as well."""
        reserve = self.reserve
        for line in self._lines.values():
            if line and self._short(line[0].request) != NOTHING:
                start = line[0].request.bounds.start
                reserve = Quota(reserve.cpu + start.cpu, reserve.memory + start.memory)
        return NodeView(self.capacity.cpu, self.capacity.memory, self.promised, reserve)

    # --- environments ------------------------------------------------------------------------------------------------

    def adopt(self, request: Request, quota: Quota, lowest: Quota | None = None) -> None:
        """Take up an environment that runs already, whatever is free: after a restart, or found without having asked."""
        self.remove(request.key)
        self._enter(request, quota, lowest)

    def remove(self, key: Hashable) -> None:
        """Forget an environment, admitted or waiting; unknown ones are forgotten already."""
        waiter = self._waiting.pop(key, None)
        if waiter is not None:
            self._lines[waiter.request.role is Role.EVALUATION].remove(waiter)
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._count(entry.promised, NOTHING)
        if entry.role is not Role.EVALUATION:
            start = entry.bounds.start
            self._starts = Quota(max(0.0, self._starts.cpu - start.cpu), self._starts.memory - start.memory)

    def promise(self, key: Hashable, quota: Quota) -> bool:
        """Count a raise before it is made. False, and nothing is counted, where it would touch the reserve or has no room, or
        the environment has ended or is being taken back.

        Steps down count only once they are settled.
        """
        entry = self._entries.get(key)
        if entry is None or entry.taking is not None:
            return False
        held = entry.promised
        wanted = Quota(max(held.cpu, quota.cpu), max(held.memory, quota.memory))
        view = self.view()
        if wanted.cpu - held.cpu > view.free_cpu + SLACK or wanted.memory - held.memory > view.free_memory:
            return False
        self._set(entry, wanted)
        return True

    def settle(self, key: Hashable, quota: Quota) -> None:
        """The limits that are in force now, read back. Ends a taking back of it, granted or not."""
        entry = self._entries.get(key)
        if entry is None:
            return  # it ended while the runtime was asked
        if entry.taking is not None and (quota.cpu > entry.taking.cpu + SLACK or quota.memory > entry.taking.memory):
            entry.refusals += 1
        else:
            entry.refusals = 0
        entry.taking = None
        start = entry.bounds.start
        self._set(entry, Quota(max(quota.cpu, start.cpu), max(quota.memory, start.memory)))

    def observe(self, key: Hashable, lowest: Quota, pressed_at: float | None) -> None:
        """What a sample said: how low it may be taken back (policy.lowest), and when it was last under pressure."""
        entry = self._entries.get(key)
        if entry is not None:
            start = entry.bounds.start
            entry.lowest = Quota(max(lowest.cpu, start.cpu), max(lowest.memory, start.memory))
            if pressed_at is not None:
                entry.pressed_at = pressed_at

    # --- admission ---------------------------------------------------------------------------------------------------

    def ask(self, request: Request, now: float, deadline: float | None = None) -> bool:
        """Want to start: True, and admitted at its start quota, or False, and it waits for ``deadline`` seconds.

        Raises :class:`NotAdmitted` where it could never be admitted, or too many wait already.
        """
        if request.key in self._entries or request.key in self._waiting:
            raise NotAdmitted(f"{request.key} was admitted, or waits, already")
        evaluation = request.role is Role.EVALUATION
        start, most = request.bounds.start, self._most(evaluation)
        if start.cpu > most.cpu + SLACK or start.memory > most.memory:
            raise NotAdmitted(
                f"the node can never start an environment of {start.cpu:g} cores and {size(start.memory)}: "
                f"it has {most.cpu:.4g} cores and {size(most.memory)} for {request.role} environments",
                hint="lower its start quota, or use a larger node",
            )
        line = self._lines[evaluation]
        if not line and not (not evaluation and self._lines[True]) and self._fits(request):
            self._enter(request, start, start)
            return True
        limit = self.rules.deadline if deadline is None else deadline
        if limit <= 0:
            raise NotAdmitted("the node has no room now", hint="give it time to wait (a deadline), or end something")
        if len(self._waiting) >= self.rules.waiting:
            raise NotAdmitted(
                f"{len(self._waiting)} environments wait for room already", hint="come back later (elastic.admission.waiting)"
            )
        waiter = _Waiter(request, now, now + limit)
        self._waiting[request.key] = waiter
        line.append(waiter)
        return False

    def step(self, now: float) -> Events:
        """Admit whom there is room for, let go whose time is over, say what is to be taken back."""
        expired = [key for key, waiter in self._waiting.items() if waiter.until <= now]
        for key in expired:
            self.remove(key)
        admitted: list[Hashable] = []
        for evaluation in (True, False):
            line = self._lines[evaluation]
            while line and self._fits(line[0].request):
                waiter = line.popleft()
                del self._waiting[waiter.request.key]
                self._enter(waiter.request, waiter.request.bounds.start, waiter.request.bounds.start)
                admitted.append(waiter.request.key)
            if line and evaluation:
                break  # tasks do not take what somebody waits for
        return Events(tuple(admitted), tuple(expired), tuple(self._take_back()))

    def wake_at(self) -> float | None:
        """When the next deadline is over; None: nobody waits."""
        return min((waiter.until for waiter in self._waiting.values()), default=None)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _count(self, old: Quota, new: Quota) -> None:
        self._cpu += new.cpu - old.cpu
        self._memory += new.memory - old.memory
        if not self._entries:
            self._cpu = 0.0  # whatever rounding has left

    def _set(self, entry: _Entry, quota: Quota) -> None:
        self._count(entry.promised, quota)
        entry.promised = quota

    def _enter(self, request: Request, quota: Quota, lowest: Quota | None) -> None:
        start = request.bounds.start
        promised = Quota(max(quota.cpu, start.cpu), max(quota.memory, start.memory))
        self._entries[request.key] = _Entry(request.bounds, request.role, promised, lowest or promised)
        self._count(NOTHING, promised)
        if request.role is not Role.EVALUATION:
            self._starts = Quota(self._starts.cpu + start.cpu, self._starts.memory + start.memory)

    def _most(self, evaluation: bool) -> Quota:
        """All that environments of one kind may be promised together at their start."""
        if evaluation:
            return Quota(self.capacity.cpu, self.capacity.memory)
        share = self.rules.starts_share
        kept = self._kept(False)
        return Quota(
            min(self.capacity.cpu * share, self.capacity.cpu - kept.cpu),
            min(int(self.capacity.memory * share), self.capacity.memory - kept.memory),
        )

    def _kept(self, evaluation: bool) -> Quota:
        """What environments of one kind must leave."""
        share = 0.0 if evaluation else self.rules.evaluation_share
        return Quota(self.reserve.cpu * share, int(self.reserve.memory * share))

    def _fits(self, request: Request) -> bool:
        evaluation = request.role is Role.EVALUATION
        if self._short(request) != NOTHING:
            return False
        if evaluation:
            return True
        start, share = request.bounds.start, self.rules.starts_share
        return (
            self._starts.cpu + start.cpu <= self.capacity.cpu * share + SLACK
            and self._starts.memory + start.memory <= self.capacity.memory * share
        )

    def _short(self, request: Request) -> Quota:
        """What is missing for an environment's start; 0: nothing."""
        start, kept = request.bounds.start, self._kept(request.role is Role.EVALUATION)
        cpu = self._cpu + start.cpu + kept.cpu - self.capacity.cpu
        return Quota(cpu if cpu > SLACK else 0.0, max(0, self._memory + start.memory + kept.memory - self.capacity.memory))

    def _take_back(self) -> list[TakeBack]:
        """From whom to take what for the evaluation environment at the head of its line."""
        line = self._lines[True]
        if not line:
            return []
        short = self._short(line[0].request)
        need_cpu, need_memory = short.cpu, short.memory
        for entry in self._entries.values():  # what is on its way back already
            if entry.taking is not None:
                need_cpu -= max(0.0, entry.promised.cpu - entry.taking.cpu)
                need_memory -= max(0, entry.promised.memory - entry.taking.memory)
        if need_cpu <= SLACK and need_memory <= 0:
            return []
        boosted = sorted(
            (
                (entry.pressed_at, number, key, entry)
                for number, (key, entry) in enumerate(self._entries.items())
                if entry.taking is None
                and entry.refusals < REFUSALS
                and (entry.promised.cpu > entry.lowest.cpu + SLACK or entry.promised.memory > entry.lowest.memory)
            ),
            key=lambda item: item[:2],
        )
        chosen: list[tuple[Hashable, _Entry, Quota]] = []
        for _, _, key, entry in boosted:
            cpu, memory = entry.promised.cpu, entry.promised.memory
            if need_cpu > SLACK and cpu > entry.lowest.cpu + SLACK:
                need_cpu -= cpu - entry.lowest.cpu
                cpu = entry.lowest.cpu
            if need_memory > 0 and memory > entry.lowest.memory:
                need_memory -= memory - entry.lowest.memory
                memory = entry.lowest.memory
            if cpu < entry.promised.cpu or memory < entry.promised.memory:
                chosen.append((key, entry, Quota(cpu, memory)))
            if need_cpu <= SLACK and need_memory <= 0:
                break
        else:
            return []  # all of it would not make room: take nothing
        for _, entry, quota in chosen:
            entry.taking = quota
        return [TakeBack(key, quota) for key, _, quota in chosen]
