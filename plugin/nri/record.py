"""Writing down what happened where people, machines and the trainer look for it: journals, labels, metrics, the log.

``weenv events`` reads the journal; ``weenv ps`` and ``weenv inspect`` read the labels, which containerd keeps as long as it
keeps the container. A label that cannot be written (the container was removed at once) is no fault: the journal has it.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from weenv.core.aio import Background
from weenv.core.errors import WeenvError
from weenv.plugin.containerd.client import Client
from weenv.plugin.containerd.runtime import Container, Containers
from weenv.plugin.nri import labels
from weenv.plugin.nri.actuate import Outcome
from weenv.plugin.nri.journal import LOOK_EVERY, Cause, Journal, Kind, cause
from weenv.plugin.nri.managed import Env
from weenv.plugin.nri.metrics import Metrics
from weenv.plugin.nri.model import UNLIMITED_MEMORY, Decision, EnvKey, Quota, Sample

log = logging.getLogger(__name__)

_IDLE_EVERY = 10 * LOOK_EVERY
_LATE = 256
_LABEL_WITHIN = 2.0
"""Seconds that a label may take before an emergency goes on without it."""


class Record:
    """Journals, labels and counters of one controller. Nothing here raises for a full disk or a lost containerd."""

    def __init__(self, events: Journal, decisions: Journal, metrics: Metrics, client: Client | None) -> None:
        self._events = events
        self._decisions = decisions
        self._metrics = metrics
        self._client = client
        self._background = Background()
        self._failed: set[str] = set()
        self._kills: dict[EnvKey, int] = {}
        """Kills in containers that are not managed, until they end."""
        self._late: dict[EnvKey, tuple[int, int | None]] = {}
        """(kills, exit status) of those that ended last: containerd may tell a kill after the end."""

    async def close(self) -> None:
        """Wait for labels that are being written, and close the files."""
        await self._background.close()
        self._events.close()
        self._decisions.close()

    def flush(self) -> None:
        """Write what waits for the journals."""
        for journal in (self._events, self._decisions):
            try:
                journal.flush()
                self._failed.discard(journal.path)
            except OSError as error:
                if journal.path not in self._failed:
                    self._failed.add(journal.path)
                    log.error("cannot write %s: %s", journal.path, error.strerror)

    def event(self, kind: Kind, key: EnvKey | None = None, **fields: Any) -> None:
        """One line of events.jsonl, written at once."""
        record: dict[str, Any] = {"t": round(time.time(), 3), "kind": kind.value}
        if key is not None:
            record["env"] = str(key)
        self._events.add({**record, **fields})
        self.flush()

    def look(self, env: Env, now: float, sample: Sample, decision: Decision, before: Quota, *, quiet: bool) -> None:
        """One look at an environment, where it is worth a line."""
        env.peak = max(env.peak, sample.memory.current)
        every = _IDLE_EVERY if env.resting else LOOK_EVERY
        if quiet and decision.quota is None and now - env.noted < every:
            return
        cpu, memory = sample.cpu, sample.memory
        line: dict[str, Any] = {"t": round(time.time(), 3), "env": str(env.key)}
        if env.noted == -math.inf:
            start, ceiling = env.state.bounds.start, env.state.bounds.ceiling
            line |= {
                "name": env.found.name, "role": env.state.role.value,
                "bounds": [[start.cpu, start.memory], [ceiling.cpu, ceiling.memory]],
            }  # fmt: skip
        env.noted = now
        line |= {
            "m": round(sample.when, 4), "usage_s": round(cpu.usage_s, 4), "nr_periods": cpu.nr_periods,
            "nr_throttled": cpu.nr_throttled, "throttled_s": round(cpu.throttled_s, 4), "memory": memory.current,
            "anon": memory.anon, "active_file": memory.active_file, "unreclaimable": memory.unreclaimable,
            "oom_kill": memory.oom_kill, "quota": [before.cpu, before.memory], "reason": decision.reason.value,
            "tier": decision.tier,
        }  # fmt: skip
        if decision.quota is not None:
            line["asked"] = [decision.quota.cpu, decision.quota.memory]
        self._decisions.add(line)

    def refused(self, env: Env, outcome: Outcome, asked: Quota) -> None:
        """Limits that could not be changed as they were to be."""
        log.info("limits of %s: %s", env.key, outcome.refused)
        self.event(
            Kind.REFUSED, env.key, message=outcome.refused, asked=[asked.cpu, asked.memory],
            quota=[outcome.quota.cpu if math.isfinite(outcome.quota.cpu) else None, outcome.quota.memory],
            attempts=outcome.attempts,
        )  # fmt: skip

    # -- memory ---------------------------------------------------------------------------------------------------------

    def oom_kill(self, env: Env | None, key: EnvKey, sample: Sample | None) -> None:
        """The kernel has killed a process, as the counter or containerd says; once for what both say."""
        if env is None and key in self._late:
            kills, status = self._late[key]
            if not kills and status:
                self._late[key] = (1, status)
                self._label(key, {labels.OOM_KILLS: "1", labels.ENDED: Cause.KERNEL_OOM.value}, managed=True)
                self._metrics.oom.labels("kernel").inc()
                self.event(Kind.OOM_KILL, key, kills=1, managed=True, late=True)
            return
        if sample is not None:
            kills = sample.memory.oom_kill
        else:  # the group is gone, or not ours to read: one kill has been told
            kills = max(1, env.oom_kills) if env is not None else self._kills.get(key, 0) + 1
        known = env.oom_kills if env is not None else self._kills.get(key, 0)
        if kills <= known:
            return
        if env is not None:
            env.oom_kills = kills
        else:
            self._kills[key] = kills
        details: dict[str, Any] = {"kills": kills, "managed": env is not None}
        if sample is not None:
            limit = sample.memory.max
            details |= {"memory": sample.memory.current, "limit": limit if limit < UNLIMITED_MEMORY else None}
        if env is not None and env.emergency:
            return  # what the kernel kills on the way is part of it
        self._metrics.oom.labels("kernel").inc(kills - known)
        log.warning("%s: the kernel has killed %d of its processes for memory", key, kills)
        self.event(Kind.OOM_KILL, key, **details)
        self._label(key, {labels.OOM_KILLS: str(kills)}, managed=env is not None)

    async def emergency(self, env: Env, sample: Sample) -> None:
        """We are about to end an environment for memory: the cause is on record before it is gone."""
        memory = sample.memory
        log.warning("%s is ended for memory: it has %d bytes, grows, and none are left", env.key, memory.current)
        self._metrics.oom.labels("emergency").inc()
        self.event(
            Kind.OOM_EMERGENCY, env.key, name=env.found.name, memory=memory.current, unreclaimable=memory.unreclaimable,
            limit=env.state.quota.memory, ceiling=env.state.bounds.ceiling.memory,
        )  # fmt: skip
        await self._set(env.key, {labels.ENDED: Cause.EMERGENCY.value}, managed=True)

    def ended(self, env: Env | None, key: EnvKey, status: int | None, now: float, *, missed: bool = False) -> None:
        """An environment has ended; ``missed``: before it could be looked at. One that was never ours is nobody's business."""
        if env is None:
            kills = self._kills.pop(key, 0)
            if missed:
                why = cause(status, emergency=False, oom_kills=kills, starved_s=0.0, lived_s=0.0)
                self._metrics.ended.labels(why.value).inc()
                self.event(Kind.ENDED, key, status=status, cause=why.value, oom_kills=kills)
                if why is not Cause.UNKNOWN:
                    self._label(key, {labels.ENDED: why.value}, managed=True)
            return
        last = env.state.last
        why = cause(status, emergency=env.emergency, oom_kills=env.oom_kills, starved_s=env.starved_s, lived_s=now - env.began)
        self._late.pop(key, None)
        self._late[key] = (env.oom_kills + int(env.emergency), status)
        if len(self._late) > _LATE:
            del self._late[next(iter(self._late))]
        self._metrics.ended.labels(why.value).inc()
        self.event(
            Kind.ENDED, key, name=env.found.name, status=status, cause=why.value, seconds=round(now - env.began, 3),
            cpu_s=round(last.cpu.usage_s, 3) if last is not None else None,
            throttled_s=round(last.cpu.throttled_s, 3) if last is not None else None,
            peak_memory=env.peak, starved_s=round(env.starved_s, 2), oom_kills=env.oom_kills,
        )  # fmt: skip
        made = {labels.ENDED: why.value} if why is not Cause.UNKNOWN else {}
        if env.oom_kills:  # again: who sees the cause sees this too
            made[labels.OOM_KILLS] = str(env.oom_kills)
        if env.starved_s >= 1:
            made[labels.STARVED] = f"{env.starved_s:.0f}"
        if made:
            self._label(key, made, managed=True)

    def _label(self, key: EnvKey, made: dict[str, str], *, managed: bool) -> None:
        if self._client is not None:
            self._background.spawn(self._set(key, made, managed=managed), f"labels of {key}")

    async def _set(self, key: EnvKey, made: dict[str, str], *, managed: bool) -> None:
        if self._client is None:
            return
        containers = Containers(self._client.namespace(key.namespace))
        try:
            if not managed and labels.ENVIRONMENT not in (await containers.get(key.container_id)).labels:
                return  # nobody's business but its owner's
            record = Container(key.container_id, "", {}, "", "", made)
            await containers.update(record, *(f"labels.{name}" for name in made), deadline=_LABEL_WITHIN)
        except WeenvError as error:
            log.debug("labels of %s: %s", key, error.message)
