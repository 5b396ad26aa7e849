"""What was counted of each layer, for metrics: bounded, and kept while layers are closed and opened again."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

OTHER: Final = "other"
"""Label of the layers that have no line of their own."""


class Tally:
    """One layer's counters since the process began; summed by whoever reports them.

    ``hits`` has ``[reads, bytes]`` by the number of the thread that counts, so that none loses another's; each other member
    has one writer, or is written under the lock that its writers share anyway.
    """

    __slots__ = ("errors", "evicted", "fetched", "hits", "stored", "waited", "waits")

    def __init__(self) -> None:
        self.hits: dict[int, list[int]] = {}
        self.waits = 0
        self.waited = 0
        """Bytes that readers got after they had waited."""
        self.fetched = 0
        """Compressed bytes that arrived."""
        self.stored = 0
        """Content bytes that passed the checks."""
        self.evicted = 0
        """Content bytes punched out."""
        self.errors: dict[str, int] = {}

    def hit(self, thread: int, size: int) -> None:
        """A read was answered at once, by this thread."""
        found = self.hits.get(thread)
        if found is None:
            self.hits[thread] = [1, size]
        else:
            found[0] += 1
            found[1] += size

    def add(self, other: Tally) -> None:
        """Count all of ``other``, which nobody counts with any more."""
        for reads, size in list(other.hits.values()):
            mine = self.hits.setdefault(-1, [0, 0])
            mine[0] += reads
            mine[1] += size
        self.waits += other.waits
        self.waited += other.waited
        self.fetched += other.fetched
        self.stored += other.stored
        self.evicted += other.evicted
        for kind, count in list(other.errors.items()):
            self.errors[kind] = self.errors.get(kind, 0) + count


class Tallies:
    """The tallies of at most ``most`` layers, and one under :data:`OTHER` for all others. Any thread.

    A new layer takes the place of one that is not open (``in_use`` says so of a digest), the one opened longest ago; what
    that had counted is the others' from then on. Where all are open it is counted with the others itself.
    """

    def __init__(self, in_use: Callable[[str], bool] = lambda _: False, most: int = 100) -> None:
        self.rest = Tally()
        self._most = most
        self._in_use = in_use
        self._known: OrderedDict[str, Tally] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, digest: str) -> Tally:
        """The tally of a layer that is being opened."""
        with self._lock:
            found = self._known.get(digest)
            if found is None:
                if len(self._known) >= self._most:
                    old = next((each for each in self._known if not self._in_use(each)), None)
                    if old is None:
                        return self.rest
                    self.rest.add(self._known.pop(old))
                found = self._known[digest] = Tally()
            self._known.move_to_end(digest)
            return found

    def rows(self) -> list[tuple[str, Tally]]:
        """Label and tally of each: the first 12 digits of its digest, or :data:`OTHER`."""
        with self._lock:
            known = list(self._known.items())
        rows: dict[str, Tally] = {}
        for digest, tally in known:
            label = digest.partition(":")[2][:12]
            if label in rows:  # somebody took the trouble: two series of one name would spoil all of a scrape
                both = Tally()
                both.add(rows[label])
                both.add(tally)
                tally = both
            rows[label] = tally
        return [*rows.items(), (OTHER, self.rest)]


class Latencies:
    """A histogram in plain numbers. ``bounds`` are upper bounds in seconds; one writer at a time."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds
