"""Wires the parts of elastic provisioning: looks at every environment when it is due, asks the policy, sees to it that limits
change, keeps the ledger, and writes down what happened.

All state belongs to the event loop; nothing here waits but the changes of limits, which run beside each other, one per
environment at a time (docs/concurrency/elastic.md). Environments are looked at in slots of
``GRAIN`` seconds, so that hundreds of them cost twenty wake-ups a second; those that are looked at seldom, in slots of
``TOGETHER`` seconds, so that they cost one, and find the caches warm that the first of them filled. One that rests costs two or
three small reads a look: only where much CPU was used, some was withheld, or memory moved, is it sampled and decided on, or
where its last sample is old.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from weenv.core.aio import Background
from weenv.core.errors import WeenvError
from weenv.plugin.nri.actuate import Actuator, EnvGone, change, cores_match
from weenv.plugin.nri.admission import Ledger, Request, TakeBack
from weenv.plugin.nri.cgroups import STAT_EVERY, CgroupGone, CgroupUnreadable, Reader, find
from weenv.plugin.nri.config import ElasticConfig, without_brake
from weenv.plugin.nri.door import Door
from weenv.plugin.nri.journal import Kind
from weenv.plugin.nri.managed import Env
from weenv.plugin.nri.metrics import Metrics
from weenv.plugin.nri.model import UNLIMITED_MEMORY, Decision, EnvKey, NodeView, Quota, Reason, Sample
from weenv.plugin.nri.pids import EVERY, Keeper
from weenv.plugin.nri.policy import LEAST_SPAN, applied, begin, decide, lowest, taken_back
from weenv.plugin.nri.record import Record
from weenv.plugin.nri.wake import Triggers
from weenv.plugin.nri.watch import Found

log = logging.getLogger(__name__)

GRAIN = 0.05
"""Seconds of a slot: being woken costs as much as some ten looks."""
TOGETHER = 1.0
"""Seconds of a slot for those that are looked at as seldom as this; nobody is looked at later for it."""
WHOLE = 2.5
"""One that rests is sampled when its last sample is older than ``STAT_EVERY`` and than so many of its pauses, thus at every
third look: what others do to its limits, and kills of a machine without memory, show there alone."""
REST_USE = 0.3
"""Below this share of its quota, unthrottled and at its floor, an environment rests: no rule of the policy says a thing."""
CHECK_LIMITS = 5.0
"""Seconds between two looks at whether somebody else has changed an environment's limits; it takes a sample."""
CHANGES = 8
"""Changes of limits at a time: each has the runtime start a process, and those take CPU from everybody."""
_AGAIN = 0.1
"""Seconds after the kernel's word at which it is looked at again: throttling is counted at the end of a quota period."""
_BACK_OFF = 5.0
"""Seconds after which an environment whose cgroup could not be read is tried again."""
_STARVED_ANEW = 10.0
"""Seconds without wanting in vain after which doing so is told again."""
_QUIET = frozenset({Reason.STEADY, Reason.HELD, Reason.FIRST, Reason.CLOCK})
_STARVING = frozenset({Reason.NODE_FULL, Reason.CUT_SHORT})


class Controller:
    """Everything about the environments of one node. ``end`` kills one, ``processes`` limits its number of
    processes, ``opened`` opens its cgroup, ``clock`` is monotonic."""

    def __init__(
        self,
        config: ElasticConfig,
        ledger: Ledger,
        actuator: Actuator,
        record: Record,
        metrics: Metrics,
        *,
        end: Callable[[EnvKey], Awaitable[None]],
        processes: Callable[[EnvKey, int], Awaitable[None]] | None = None,
        opened: Callable[[Found], Reader] = lambda found: Reader(find(found.pid, inside=found.cgroup)),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.ledger = ledger
        self.metrics = metrics
        self._plain = without_brake(config)
        self._actuator = actuator
        self._record = record
        self._kill = end
        self._open = opened
        self._clock = clock
        self._envs: dict[EnvKey, Env] = {}
        self._missed: set[EnvKey] = set()
        """Those that were over before they could be looked at; their end is still to be told."""
        self._slots: dict[int, list[Env]] = {}
        self._poke = asyncio.Event()
        self._next: float = -math.inf
        """The slot that is slept for."""
        self._changing = asyncio.Semaphore(CHANGES)
        self._background = Background()
        self._pids = Keeper(processes, record, self._background, config.pids_use) if processes is not None else None
        self._triggers = Triggers(self._told)
        self._view: NodeView | None = None
        self._peeks = self._samples = 0
        self._counted = -math.inf
        self.door = Door(
            ledger, record, metrics, clock, manages=self.manages, moved=self._moved, take_back=self._take_back
        )  # fmt: skip
        metrics.capacity.labels("cpu").set(ledger.capacity.cpu)
        metrics.capacity.labels("memory").set(ledger.capacity.memory)

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look at environments when they are due, until cancelled."""
        slot = int(self._clock() / GRAIN)
        while True:
            last = int(self._clock() / GRAIN)
            # Most slots have somebody in them; after a long sleep only those that have are walked.
            numbers = range(slot, last + 1) if 0 <= last - slot < 50 else sorted(self._slots)
            for number in numbers:
                due = self._slots.pop(number, ()) if number <= last else ()
                if due:
                    self.metrics.lag.observe(max(0.0, self._clock() - number * GRAIN))
                for env in due:
                    if env.slot == number:
                        if env.spent:
                            self._triggers.arm(env)
                        self._turn(env, number * GRAIN)
                if due:
                    await asyncio.sleep(0)
            slot = last + 1
            self._record.flush()
            now = self._clock()
            self._count(now)
            self.door.look(now)
            await self._sleep()

    async def _sleep(self) -> None:
        """Until the next slot with somebody in it, a deadline, or :meth:`_plan` brings something earlier."""
        self._next = min(self._slots, default=math.inf)
        until = self._next * GRAIN
        until = min(until, self.door.wake_at())
        self._poke.clear()
        alarm = None
        if math.isfinite(until):
            alarm = asyncio.get_running_loop().call_later(max(0.0, until - self._clock()), self._poke.set)
        try:
            await self._poke.wait()
        finally:
            self._next = -math.inf
            if alarm is not None:
                alarm.cancel()

    async def close(self) -> None:
        """End what goes on and close all files. Limits stay as they are."""
        await self._background.close()
        for env in self._envs.values():
            self._triggers.remove(env)
            env.close()
        self._envs.clear()
        self._triggers.close()
        self.door.close()

    # -- who there is (weenv.plugin.nri.watch.Listener) -----------------------------------------------------------------

    def started(self, found: Found, *, known: bool = False) -> None:
        """Manage a container from now on: its limits as they are, whoever set them, are where it goes on from.

        ``known``: said by who knows it better (NRI) than those who may have told of it before.
        """
        old = self._envs.get(found.key)
        if old is not None and old.found.pid == found.pid:
            if known and (old.state.bounds, old.state.role) != (found.bounds, found.role):
                old.found = found
                old.state = replace(old.state, bounds=found.bounds, role=found.role)
                self._triggers.count(old)
                old.pids, old.pids_due = None, 0.0
                self.ledger.adopt(Request(found.key, found.bounds, found.role), old.state.quota)
                old.resting, self._view = False, None
            return
        try:
            reader, quota = self._opened(found)
        except CgroupGone:
            self._missed.add(found.key)
            return
        except CgroupUnreadable as error:
            log.warning("%s cannot be managed: %s", found.key, error.message)
            self._record.event(Kind.REFUSED, found.key, message=error.message)
            return
        if old is not None:
            self._forget(old)
        now = self._clock()
        bounds = found.bounds
        # Limits above the ceiling, or none at all, are not ours: it starts where it would have with us from the beginning.
        cpu = quota.cpu if quota.cpu <= bounds.ceiling.cpu * 1.01 else bounds.start.cpu
        memory = quota.memory if quota.memory <= bounds.ceiling.memory else bounds.start.memory
        goal = Quota(max(cpu, bounds.start.cpu), max(memory, bounds.start.memory))
        held = Quota(min(quota.cpu, bounds.ceiling.cpu), min(quota.memory, bounds.ceiling.memory))
        env = Env(found, reader, begin(bounds, found.role, held), now)
        self._envs[found.key] = env
        env.state = replace(env.state, triggers=self._triggers.add(env))
        self.door.hold(found.key)
        self.ledger.adopt(Request(found.key, bounds, found.role), held)
        self._view = None
        self._record.event(
            Kind.MANAGED, found.key, name=found.name, role=found.role.value, quota=[held.cpu, held.memory],
            start=[bounds.start.cpu, bounds.start.memory], ceiling=[bounds.ceiling.cpu, bounds.ceiling.memory],
        )  # fmt: skip
        self.metrics.environments.set(len(self._envs))
        if goal != quota:
            self._begin_change(env, goal, None, Reason.FIRST)
        else:
            self._save_up(env)
        self._plan(env, now + (hash(found.key) % 4) * GRAIN)

    def _opened(self, found: Found) -> tuple[Reader, Quota]:
        """Its cgroup, and the limits in force. Raises CgroupGone, CgroupUnreadable."""
        reader = self._open(found)
        try:
            return reader, reader.limits()
        except BaseException:
            reader.close()
            raise

    def ended(self, key: EnvKey, status: int | None) -> None:
        """It is over: say why, give its room to others."""
        env = self._envs.get(key)
        if env is not None:
            # A kill that ended it may be told later than its end; its group mostly still has the counter.
            with contextlib.suppress(CgroupGone, CgroupUnreadable):
                self._record.oom_kill(env, key, env.reader.sample(self._clock(), whole=True))
        self._record.ended(env, key, status, self._clock(), missed=key in self._missed)
        self._missed.discard(key)
        if env is not None:
            self._forget(env)
        else:
            self.door.release(key)

    def killed_for_memory(self, key: EnvKey) -> None:
        """containerd says that the kernel has killed: the counter, where it can still be read, says how often."""
        env = self._envs.get(key)
        sample = None
        if env is not None:
            with contextlib.suppress(CgroupGone, CgroupUnreadable):
                sample = env.reader.sample(self._clock(), whole=True)
        self._record.oom_kill(env, key, sample)

    def _forget(self, env: Env) -> None:
        env.gone = True
        self._triggers.remove(env)
        env.close()
        if self._envs.get(env.key) is env:
            del self._envs[env.key]
        self.door.release(env.key)
        self.metrics.environments.set(len(self._envs))

    # -- looking --------------------------------------------------------------------------------------------------------

    def _plan(self, env: Env, when: float) -> None:
        """Look at it at that time (and not at any other)."""
        slot = math.ceil(when / GRAIN - 1e-6)
        if slot != env.slot:
            env.slot = slot
            self._slots.setdefault(slot, []).append(env)
            if slot < self._next:
                self._poke.set()

    def _told(self, env: Env, met: bool) -> None:
        """The kernel says that it waits for something, or that a limit of it was met.

        Limits may be met without end (page cache does that), and the kernel is asked to tell again with the next planned
        look. That is an interval away, so that telling doubles the looks at most.
        """
        if env.gone:
            return
        env.resting = False
        now = self._clock()
        if met:
            Keeper.told(env, now)
        self._turn(env, now, met=met)
        again = now + (self.config.interval if met else _AGAIN)
        if env.alive() and not env.blind and env.slot * GRAIN > again:
            self._plan(env, again)

    def _turn(self, env: Env, due: float, *, met: bool = False) -> None:
        """One environment's turn; whatever it is, it does not keep the others from theirs."""
        env.slot = -1
        if env.gone:
            return
        now, before = self._clock(), env.pause
        pause = self.config.interval
        try:
            pause = self._look(env, now, met)
        except CgroupGone:
            env.blind = True  # its end is told by containerd
            return
        except CgroupUnreadable as error:
            self.metrics.unreadable.inc()
            if not env.complained:
                env.complained = True
                log.warning("%s: %s", env.key, error.message)
            pause = _BACK_OFF
        except Exception as error:
            log.exception("%s: looking at it failed: %s", env.key, error)
            pause = _BACK_OFF
        # From when it was due, not from now: being late once must not make everything later.
        following = due + pause if due + pause > now else now + pause
        if pause >= TOGETHER:
            # The first pause of its kind may be half as long, so that environments spread over it however they came to rest.
            early = hash(env.key) % 16 / 32 * pause if env.pause != before else 0.0
            together = math.floor((following - early) / TOGETHER + 1e-6) * TOGETHER
            following = together if together > now else following
        self._plan(env, following)

    def _look(self, env: Env, now: float, met: bool) -> float:
        """Seconds until the next look. ``met``: the kernel says that a limit was met."""
        if self._pids is not None and env.state.bounds.pids is not None:
            self._pids.look(env, env.state.bounds.pids, now)
        if met and now - env.sampled < LEAST_SPAN and not env.reader.moved():
            return env.sampled + LEAST_SPAN - now  # a shorter time says little of CPU and of waiting
        config = self._plain if env.reader.paths.memory_v1 else self.config
        if env.resting and now - env.sampled < max(STAT_EVERY, WHOLE * env.pause) and env.state.last is not None:
            since = env.rested[0] if env.rested is not None else env.sampled
            seen = env.reader.peek()
            if seen is not None:
                usage, throttled = seen
                most = REST_USE * env.state.quota.cpu * (now - since)
                if throttled == env.state.last.cpu.nr_throttled and usage - env.usage <= most:
                    env.use = (usage - env.usage) / (now - since) if now > since else 0.0
                    env.rested, env.usage = (now, usage), usage
                    self._peeks += 1
                    return env.pause
        sample = env.reader.sample(now)
        self._samples += 1
        state = env.state_at_rest()
        last = state.last
        if now - env.checked >= CHECK_LIMITS and env.changing is None:
            env.checked = now
            self._check_limits(env)
            state = replace(env.state, last=last)
        if last is not None and sample.memory.oom_kill > last.memory.oom_kill:
            self._record.oom_kill(env, env.key, sample)
        if self._view is None:
            self._view = self.ledger.view()
        before = state.quota
        state, decision = decide(state, sample, self._view, config)
        env.complained = False
        env.sampled, env.rested, env.usage = now, None, sample.cpu.usage_s
        env.pause = decision.wake_after if env.state.bounds.pids is None else min(decision.wake_after, EVERY)
        raising = decision.quota is not None and (decision.quota.cpu > before.cpu or decision.quota.memory > before.memory)
        quota = decision.quota
        if quota is not None and (env.changing is not None or (raising and not self.ledger.promise(env.key, quota))):
            # Decided anew once the change under way is done, or the node has room.
            state, quota = applied(state, before), None
        self._view = None if raising else self._view
        env.previous = last
        env.state = state
        env.resting = decision.reason in _QUIET and state.quota == state.bounds.floor and env.changing is None
        if state.quota != state.bounds.floor:
            self.ledger.observe(env.key, lowest(state, config), state.pressed_at)
        self._note(env, now, sample, decision, before, elapsed=now - last.when if last is not None else 0.0)
        if decision.emergency:
            self._end(env, sample)
        elif quota is not None:
            self._begin_change(env, quota, decision.high, decision.reason)
        elif decision.high != env.high and env.changing is None:
            self._brake(env, decision.high)
        return env.pause

    def _note(self, env: Env, now: float, sample: Sample, decision: Decision, before: Quota, *, elapsed: float) -> None:
        """Keep what ``weenv top`` and the journals are to show."""
        if decision.reason in _STARVING:
            env.starved_s += elapsed
            if now - env.starving > _STARVED_ANEW:
                self._record.event(Kind.STARVED, env.key, reason=decision.reason.value, quota=[before.cpu, before.memory])
            env.starving = now
        quiet = decision.reason in _QUIET
        if not quiet:
            env.why, env.why_at = decision.reason, now
            self.metrics.decisions.labels(decision.reason.value).inc()
        env.tier = decision.tier
        self._record.look(env, now, sample, decision, before, quiet=quiet)

    def _check_limits(self, env: Env) -> None:
        """An owner's own update (docker, the kubelet, ctr) sets limits of its own: they are where we go on from."""
        found = env.reader.limits()
        quota = env.state.quota
        if cores_match(quota.cpu, found.cpu) and abs(found.memory - quota.memory) < 8192:
            return
        ceiling = env.state.bounds.ceiling
        self._record.event(Kind.DRIFT, env.key, before=[quota.cpu, quota.memory], quota=_finite(found))
        if found.cpu > ceiling.cpu * 1.01 or found.memory > ceiling.memory:
            self._begin_change(env, quota, None, Reason.CEILING)
            return
        env.state = applied(env.state, found)
        self.ledger.settle(env.key, found)
        self._view = None

    # -- changing -------------------------------------------------------------------------------------------------------

    def _begin_change(self, env: Env, quota: Quota, high: int | None, why: Reason) -> None:
        env.changing = quota
        self._background.spawn(self._change(env, quota, high, why), f"limits of {env.key}")

    async def _change(self, env: Env, quota: Quota, high: int | None, why: Reason) -> None:
        """Put a quota into force and say what came of it. Whatever happens meanwhile, the ledger gets what is in force."""
        begin_at = self._clock()
        try:
            before = env.reader.limits()
            raising = quota.cpu > before.cpu or quota.memory > before.memory
            async with self._changing if not raising else contextlib.nullcontext():
                if not env.alive():
                    return
                outcome = await change(self._actuator, env.reader, env.key, quota, self._clock(), self.config.memory)
            if env.alive():
                self._brake(env, high)
                self._save_up(env)
        except (EnvGone, CgroupGone):
            return  # its end is told by containerd
        except WeenvError as error:
            if env.alive():
                log.warning("limits of %s cannot be changed: %s", env.key, error.message)
            return
        finally:
            env.changing = None
            env.resting = False
        if not env.alive():
            return
        took = self._clock() - begin_at
        found = outcome.quota
        env.state = applied(env.state, _within(found, env))
        self.ledger.settle(env.key, _within(found, env))
        self._view = None
        direction = "up" if raising else "down"
        self.metrics.changes.labels(direction, "refused" if outcome.refused else "done").inc()
        self.metrics.change_seconds.observe(took)
        if outcome.refused:
            self._record.refused(env, outcome, quota)
        if found != before:
            env.changed_at = self._clock()
            self._record.event(
                Kind.QUOTA, env.key, before=_finite(before), quota=_finite(found), reason=why.value, took=round(took, 4)
            )
        self.door.step()
        self._plan(env, self._clock())

    def _brake(self, env: Env, high: int | None) -> None:
        """``memory.high`` goes with the limit where the kernel has it; otherwise it stays with what was asked for."""
        env.high = high
        env.reader.set_high(UNLIMITED_MEMORY if high is None else high)

    def _save_up(self, env: Env) -> None:
        """Once its quota is its start or more, which it stays: the kernel takes no burst above the quota."""
        share = self.config.cpu.burst
        if share and env.burst is None:
            env.burst = env.reader.set_burst(share * env.state.bounds.start.cpu)

    def _end(self, env: Env, sample: Sample) -> None:
        """End an environment for memory, once."""
        if env.emergency:
            return
        env.emergency = True
        self._background.spawn(self._end_for_memory(env, sample), f"end of {env.key}")

    async def _end_for_memory(self, env: Env, sample: Sample) -> None:
        await self._record.emergency(env, sample)
        while env.alive():
            try:
                await self._kill(env.key)
            except EnvGone:
                return
            except WeenvError as error:
                log.warning("%s cannot be ended, it will be tried again: %s", env.key, error.message)
            await asyncio.sleep(_BACK_OFF)

    # -- admission ------------------------------------------------------------------------------------------------------

    def manages(self, key: EnvKey) -> bool:
        """Whether it runs and is managed."""
        return key in self._envs

    def _moved(self) -> None:
        """Room was promised, or given back: what is known of the node is old, and a deadline may be nearer."""
        self._view = None
        self._poke.set()

    def _take_back(self, item: TakeBack) -> None:
        """Somebody else is to have what it has beyond its start."""
        env = self._envs.get(item.key)  # type: ignore[call-overload]
        if env is None:
            return
        if env.changing is not None:
            self.ledger.settle(item.key, env.state.quota)  # not now; the change under way calls step again
            return
        env.why, env.why_at = Reason.TAKEN_BACK, self._clock()
        env.state = taken_back(env.state, item.quota, self._clock())
        self._begin_change(env, item.quota, None, Reason.TAKEN_BACK)

    def _count(self, now: float) -> None:
        """Once a second, since a counter's own lock costs as much as a look."""
        if 0.0 <= now - self._counted < 1.0:
            return
        self._counted = now
        self.metrics.samples.labels("peek").inc(self._peeks)
        self.metrics.samples.labels("whole").inc(self._samples)
        self._peeks = self._samples = 0
        self.metrics.waiting.set(self.ledger.waiting)
        promised = self.ledger.promised
        self.metrics.promised.labels("cpu").set(promised.cpu)
        self.metrics.promised.labels("memory").set(promised.memory)

    # -- showing --------------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """All environments as ``weenv top`` shows them."""
        now = self._clock()
        return [env.row(now) for env in self._envs.values()]

    def node(self) -> dict[str, Any]:
        """The node: what there is, promised, reserved; who waits."""
        promised, view = self.ledger.promised, self.ledger.view()
        return {
            "cpu": self.ledger.capacity.cpu,
            "memory": self.ledger.capacity.memory,
            "promised": [promised.cpu, promised.memory],
            "reserve": [view.reserve.cpu, view.reserve.memory],
            "environments": len(self._envs),
            "waiting": self.ledger.waiting,
        }


def _within(quota: Quota, env: Env) -> Quota:
    """Limits as the policy and the ledger count them: none at all is the ceiling."""
    ceiling = env.state.bounds.ceiling
    return Quota(min(quota.cpu, ceiling.cpu), min(quota.memory, ceiling.memory))


def _finite(quota: Quota) -> list[float | None]:
    """For JSON: null where there is no limit."""
    return [
        round(quota.cpu, 4) if math.isfinite(quota.cpu) else None,
        quota.memory if quota.memory < UNLIMITED_MEMORY else None,
    ]
