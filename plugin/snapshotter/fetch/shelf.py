"""Where frames go when they are here: to the disk, and into memory while it takes none.

Every further frame tries the disk again, and so does a reader who is given one from memory, now and then; once it takes
one, those in memory are stored too. The log says once that it began and once that it is over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from typing import Final

from weenv.core.errors import StorageError
from weenv.plugin.snapshotter.cache.store import is_full
from weenv.plugin.snapshotter.fetch.flight import FetchLayer, FetchStats

log = logging.getLogger(__name__)

_FLUSH: Final = 1.0
"""Seconds after which a disk that was full is tried again on behalf of frames that are in memory already."""
_QUIET: Final = 30.0
"""Seconds between log lines that say the disk is full."""


class Shelf:
    """See the module's text. ``lock`` is the fetcher's, which guards all of it; ``most`` bytes are kept in memory."""

    def __init__(self, lock: threading.Lock, stats: FetchStats, most: int) -> None:
        self._lock = lock
        self._stats = stats
        self._most = most
        self._memory: OrderedDict[tuple[int, int], tuple[FetchLayer, bytes]] = OrderedDict()
        self._bytes = 0
        self._full_since = 0.0
        self._told = False
        self._tell_after = 0.0

    @property
    def full(self) -> bool:
        """True while the disk takes no data."""
        return self._full_since > 0

    @property
    def kept(self) -> int:
        """Frames in memory."""
        return len(self._memory)

    def held(self, layer: FetchLayer, frame: int) -> bytes | None:
        """A frame that is in memory. Locked."""
        if not self._memory or (found := self._memory.get((id(layer), frame))) is None:
            return None
        return found[1]

    def due(self) -> bool:
        """Whether the disk is to be tried again by :meth:`flush`; asking counts as the attempt. Locked."""
        now = time.monotonic()
        if now - self._full_since <= _FLUSH:
            return False
        self._full_since = now
        return True

    def save(self, layer: FetchLayer, frame: int, content: bytes) -> bool:
        """Write a frame and mark it; False where the disk would not take it."""
        try:
            with layer.writing:
                layer.store.write(layer.contents[frame], content)
                layer.presence.mark(frame)
        except StorageError as error:
            full = is_full(error)
            layer.went_wrong("enospc" if full else "storage", error)
            with self._lock:
                self._stats.error("enospc" if full else "storage")
                self._full_since = now = time.monotonic()
                tell = not self._told and now >= self._tell_after  # a disk on the brink goes back and forth
                if tell:
                    self._told, self._tell_after = True, now + _QUIET
            if tell:
                fields = {"error": str(error), "hint": "free space under the root directory"}
                log.error("serving without a cache: the disk takes no data", extra=fields)
            return False
        with self._lock:
            recovered = self._full_since > 0
            self._full_since = 0.0
            tell = recovered and self._told
            if tell:
                self._told = False
        if tell:
            log.warning("the disk takes data again: caching goes on")
        if recovered:
            self.flush()
        return True

    def flush(self) -> None:
        """Store what is kept in memory, as far as the disk takes it."""
        with self._lock:
            held = list(self._memory.items())
        for key, (layer, content) in held:
            if not self.save(layer, key[1], content):
                return
            with self._lock:
                if self._memory.pop(key, None) is not None:
                    self._bytes -= len(content)

    def landed(self, layer: FetchLayer, frame: int, content: bytes, *, stored: bool) -> None:
        """A frame's flight ends: keep what could not be stored, the oldest go where that is too much. Locked."""
        if stored:
            if self._memory and (old := self._memory.pop((id(layer), frame), None)) is not None:
                self._bytes -= len(old[1])
            return
        self._memory[id(layer), frame] = (layer, content)  # holding the layer keeps its id from being used again
        self._bytes += len(content)
        while self._bytes > self._most and len(self._memory) > 1:
            _, (_, old_content) = self._memory.popitem(last=False)
            self._bytes -= len(old_content)
