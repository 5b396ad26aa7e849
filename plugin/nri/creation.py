"""What a container of CRI starts with and how far it may go: annotations, labels and its own limits into bounds. Pure.

Annotations (names and values: :mod:`weenv.plugin.nri.annotations`) are looked for on the container, then on its pod, then among
the container's labels, where containerd puts those of its image, so that a composed plan's own resources are found as well.
All of them are somebody else's text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from weenv.core.units import size
from weenv.plugin.nri import labels
from weenv.plugin.nri.annotations import parse, plan_ceiling
from weenv.plugin.nri.config import ElasticConfig
from weenv.plugin.nri.model import Bounds, Role

RECORD = labels.PREFIX + "ceiling"
"""Annotation ``<cores>,<bytes>``, set by us on what we start small: the specification holds our quota afterwards, and the
container's own limits would be forgotten with the process that saw them."""

MIN_CPU = 0.01
"""Cores; the kernel's smallest quota in its default period."""
MIN_MEMORY = 6 << 20
"""Bytes; with less, runc has no room to start a process (docker asks for as much)."""

_SIZES = (labels.CPU_START, labels.CPU_MAX, labels.MEMORY_START, labels.MEMORY_MAX, labels.PIDS_START, labels.PIDS_MAX)


@dataclass(frozen=True, slots=True)
class Asked:
    """What was found. ``managed``: it is ours to give a quota. ``complaints``: a line for each thing that is ignored or cut."""

    bounds: Bounds
    role: Role
    managed: bool
    complaints: tuple[str, ...] = ()


def said_by(*sources: Mapping[str, str]) -> dict[str, str]:
    """Our keys, each from the first of ``sources`` that has it."""
    found: dict[str, str] = {}
    for source in reversed(sources):
        found.update((key, value) for key, value in source.items() if key.startswith(labels.PREFIX))
    return found


def asked(
    said: Mapping[str, str],
    own_cpu: float,
    own_memory: int,
    config: ElasticConfig,
    *,
    own_pids: int = 0,
    always: bool = False,
    record: str = "",
) -> Asked:
    """Bounds from what is said (:func:`said_by`) and the container's own limits (cores, bytes, processes; 0: it has none).

    Own limits are ceilings that nothing said can raise; the configured ceilings hold besides. Where no start is said, the
    configured one holds. ``record`` is the value of :data:`RECORD` where the container has one: its limits are then ours, and
    what is recorded counts as its own. ``always``: managed although nothing is said, unless ``weenv.dev/elastic`` is false.
    """
    wanted = parse(said)
    complaints = list(wanted.complaints)
    if record:
        own_cpu, own_memory = plan_ceiling(record)
        if not (own_cpu and own_memory):
            complaints.append(f"{RECORD} {record[:40]!r} is no ceiling of ours; the configured one holds")
    for name, own, least, show in (("cpu", own_cpu, MIN_CPU, _cores), ("memory", own_memory, MIN_MEMORY, size)):
        key = labels.PREFIX + name
        for kind in ("start", "max"):
            value = getattr(wanted, f"{kind}_{name}")
            if 0 < value < least:
                complaints.append(f"{key}.{kind} is less than anything can start with, {show(least)}; it is ignored")
                wanted = replace(wanted, **{f"{kind}_{name}": type(value)(0)})
        start, top = getattr(wanted, f"start_{name}"), getattr(wanted, f"max_{name}")
        limit = min(own or math.inf, getattr(config, f"ceiling_{name}"))
        if top > limit and not record:
            whose = "the container's own limit" if own == limit else "the ceiling of this node"
            complaints.append(f"{key}.max is above {whose}, {show(limit)}; it is cut to that")
        if start > limit and (not top or start <= top):
            complaints.append(f"{key}.start is above the ceiling, {show(limit)}; it is cut to that")
    bounds = config.bounds(
        wanted.start_cpu,
        wanted.start_memory,
        min(wanted.max_cpu or own_cpu, own_cpu or wanted.max_cpu),
        min(wanted.max_memory or own_memory, own_memory or wanted.max_memory),
    )
    if own_pids and wanted.max_pids > own_pids:
        complaints.append(f"{labels.PIDS_MAX} is above the container's own limit, {own_pids}; it is cut to that")
    bounds = replace(bounds, pids=wanted.pids(own_pids))
    managed = always or any(name in said for name in _SIZES)
    if wanted.elastic is not None:
        managed = wanted.elastic
    return Asked(bounds, wanted.role, managed, tuple(complaints))


def _cores(value: float) -> str:
    return f"{value:g} CPUs"


def recorded(found: Asked) -> dict[str, str]:
    """Annotations of a managed container: it is then known for what it is without its pod, which only NRI shows."""
    start, pids = found.bounds.start, found.bounds.pids
    of_pids = {labels.PIDS_START: str(pids.start), labels.PIDS_MAX: str(pids.ceiling)} if pids else {}
    return of_pids | {
        RECORD: record_of(found.bounds),
        labels.ELASTIC: "true",
        labels.ROLE: found.role.value,
        labels.CPU_START: f"{start.cpu:.6f}",
        labels.MEMORY_START: str(start.memory),
    }


def record_of(bounds: Bounds) -> str:
    """The value of :data:`RECORD`; :func:`weenv.plugin.nri.annotations.plan_ceiling` reads it."""
    return f"{bounds.ceiling.cpu:.6f},{bounds.ceiling.memory}"
