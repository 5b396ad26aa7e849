"""What labels and annotations say of an environment's quota. Pure; they are others' input, so nonsense is named and ignored.

``weenv.dev/cpu.start``, ``weenv.dev/cpu.max`` (``2``, ``0.5``, ``500m``), ``weenv.dev/memory.start``,
``weenv.dev/memory.max`` (``512Mi``, ``2G``, bytes), ``weenv.dev/pids.start``, ``weenv.dev/pids.max`` (processes),
``weenv.dev/role`` (``task``, ``evaluation``, ``service``) and
``weenv.dev/elastic`` (``true``, ``false``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weenv.core.units import parse_bytes, parse_cores
from weenv.plugin.nri import labels
from weenv.plugin.nri.config import ElasticConfig
from weenv.plugin.nri.model import Bounds, PidsBounds, Role

MOST_PIDS = 1 << 22
"""The kernel has no more (include/linux/threads.h, PID_MAX_LIMIT)."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is said; 0 and None: nothing. ``complaints``: one line for each thing that makes no sense."""

    start_cpu: float = 0.0
    start_memory: int = 0
    max_cpu: float = 0.0
    max_memory: int = 0
    start_pids: int = 0
    max_pids: int = 0
    role: Role = Role.TASK
    elastic: bool | None = None
    complaints: tuple[str, ...] = ()

    def pids(self, own: int) -> PidsBounds | None:
        """Bounds of the limit of processes of a container whose own limit is ``own`` (0: none), which is a ceiling too."""
        if not (self.start_pids or self.max_pids):
            return None
        ceiling = min(self.max_pids or own or self.start_pids, own or MOST_PIDS)
        return PidsBounds(min(self.start_pids or ceiling, ceiling), ceiling)

    def bounds(self, config: ElasticConfig, *, own_cpu: float = 0.0, own_memory: int = 0) -> Bounds:
        """Start and ceiling of a container whose own limits are ``own_*`` (0: none).

        They are the ceiling, and where no start is said also the start: who wrote only limits gets them. A larger
        ``*.max`` says that they were meant as the start.
        """
        return config.bounds(
            self.start_cpu or own_cpu,
            self.start_memory or own_memory,
            self.max_cpu or own_cpu,
            self.max_memory or own_memory,
        )


def parse(said: Mapping[str, str]) -> Wanted:
    """Read labels or annotations; others than ours are left alone."""
    complaints: list[str] = []

    def complain(name: str, expected: str) -> None:
        complaints.append(f"{name} must be {expected}, not {said[name][:40]!r}; it is ignored")

    def cores(name: str) -> float:
        value = parse_cores(said[name]) if name in said else 0.0
        if value is None:
            complain(name, "a number of CPUs such as 2, 0.5 or 500m")
        return value or 0.0

    def size(name: str) -> int:
        value = parse_bytes(said[name]) if name in said else 0
        if value is None:
            complain(name, "a size such as 512Mi or 2Gi")
        return value or 0

    start_cpu, max_cpu = cores(labels.CPU_START), cores(labels.CPU_MAX)
    start_memory, max_memory = size(labels.MEMORY_START), size(labels.MEMORY_MAX)
    for name, start, top in (("cpu", start_cpu, max_cpu), ("memory", start_memory, max_memory)):
        if top and start > top:
            complaints.append(f"{labels.PREFIX}{name}.start is above {labels.PREFIX}{name}.max; it is cut to that")
    pids = {}
    for name in (labels.PIDS_START, labels.PIDS_MAX):
        text = said.get(name, "0")
        pids[name] = int(text) if len(text) <= 7 and text.isascii() and text.isdigit() else 0
        if name in said and not 1 <= pids[name] <= MOST_PIDS:
            complain(name, f"a number of processes from 1 to {MOST_PIDS}")
            pids[name] = 0
    first, most = pids.values()
    if most and first > most:
        complaints.append(f"{labels.PIDS_START} is above {labels.PIDS_MAX}; it is cut to that")
    role = Role.TASK
    if labels.ROLE in said:
        try:
            role = Role(said[labels.ROLE])
        except ValueError:
            complain(labels.ROLE, " or ".join(Role))
    elastic = {"true": True, "false": False}.get(said.get(labels.ELASTIC, ""))
    if elastic is None and labels.ELASTIC in said:
        complain(labels.ELASTIC, "true or false")
    return Wanted(start_cpu, start_memory, max_cpu, max_memory, first, most, role, elastic, tuple(complaints))


def plan_ceiling(label: str) -> tuple[float, int]:
    """The label of a plan's ceiling as (cores, bytes); 0 for what it does not limit or cannot be read."""
    cores, _, size = label.partition(",")
    return parse_cores(cores) or 0.0, parse_bytes(size) or 0

_WORD = 1 << 61
"""What a specification says from here on is no limit: a page counter's "none" is below 2**63 (mm/page_counter.c)."""


def own_pids(spec: Mapping[str, Any]) -> int:
    """Processes that a container's OCI specification limits it to; 0: no limit. Anything malformed is no limit."""
    pids = _resources(spec).get("pids")
    limit = pids.get("limit") if isinstance(pids, Mapping) else None
    return limit if isinstance(limit, int) and 0 < limit <= MOST_PIDS else 0


def _resources(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Any = spec
    for name in ("linux", "resources"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def own_limits(spec: Mapping[str, Any]) -> tuple[float, int]:
    """(cores, bytes) that a container's OCI specification limits it to; 0: no limit. Anything malformed is no limit."""
    found = _resources(spec)
    cpu, memory = found.get("cpu"), found.get("memory")
    cores, size = 0.0, 0
    if isinstance(cpu, Mapping):
        quota, period = cpu.get("quota"), cpu.get("period", 100_000)
        if all(isinstance(value, int) and 0 < value < _WORD for value in (quota, period)):
            cores = quota / period
    if isinstance(memory, Mapping) and isinstance(memory.get("limit"), int) and 0 < memory["limit"] < _WORD:
        size = memory["limit"]
    return cores, size
