"""Updates of our own that are under way through CRI, so that NRI's report of one is not taken for its owner's new limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_CPU_ERROR = 0.005
"""Cores; quotas are whole microseconds of a period."""


class OwnUpdates:
    """Container id -> updates under way. Belongs to one event loop."""

    def __init__(self) -> None:
        self._under_way: dict[str, list[tuple[float | None, int | None]]] = {}

    @contextmanager
    def expect(self, container_id: str, cpu: float | None, memory: int | None) -> Iterator[None]:
        """For the length of the block, such an update of this container is ours."""
        item = (cpu, memory)
        items = self._under_way.setdefault(container_id, [])
        items.append(item)
        try:
            yield
        finally:
            items.remove(item)
            if not items:
                self._under_way.pop(container_id, None)

    def includes(self, container_id: str, cpu: float | None, memory: int | None) -> bool:
        """True for an update that is expected; None stands for a limit that it leaves as it is."""
        for own_cpu, own_memory in self._under_way.get(container_id, ()):
            same_cpu = own_cpu is cpu is None or (own_cpu is not None and cpu is not None and abs(own_cpu - cpu) < _CPU_ERROR)
            if same_cpu and own_memory == memory:
                return True
        return False
