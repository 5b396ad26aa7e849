"""Layers of registries that ignore Range: one stream from the beginning, and every frame that passes by is stored.

Such a server sends the whole blob whatever is asked for. Reading a range of it means reading all before it, so that is done
once: the answer to the first ranged read is kept and read to its end, and who wants a frame waits until it passes by.

Shared state: a stream's ``wanted`` changes under the fetcher's lock; the rest belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from weenv.core.errors import SourceError, UnavailableError, WeenvError
from weenv.plugin.snapshotter.fetch.flight import ACTIVE, DEMAND, FILL, FetchLayer, Flight
from weenv.registry.ranged import RegistrySource

log = logging.getLogger(__name__)

_PASSED: Final = 32 << 20
"""Bytes of frames that are kept for ranged reads under way."""
_STILL: Final = 15.0
"""Seconds without a byte after which a stream keeps nobody waiting beyond his deadline."""


class Cutter:
    """Cuts a stream of bytes that begins with frame ``first`` into frames. Pure."""

    def __init__(self, starts: Sequence[int], first: int, end: int) -> None:
        self.frame = first
        """The frame that comes next."""
        self._starts = starts
        self._end = end
        self._parts: list[bytes | memoryview] = []
        self.have = 0
        """Bytes of it that are here."""

    @property
    def need(self) -> int:
        """Bytes that it has; 0 when all frames have come."""
        return self._starts[self.frame + 1] - self._starts[self.frame] if self.frame < self._end else 0

    @property
    def done(self) -> bool:
        """True when all frames have come."""
        return self.frame >= self._end

    def feed(self, chunk: bytes) -> list[tuple[int, bytes]]:
        """Take bytes; the frames that are complete now, with their numbers. What comes after the last is dropped."""
        found: list[tuple[int, bytes]] = []
        view = memoryview(chunk)
        while self.frame < self._end and self.have + len(view) >= self.need:
            take = self.need - self.have
            data = chunk if not self.have and take == len(chunk) else b"".join([*self._parts, view[:take]])
            self._parts, self.have, view = [], 0, view[take:]
            found.append((self.frame, data))
            self.frame += 1
        if len(view) and self.frame < self._end:
            self._parts.append(view)
            self.have += len(view)
        return found


@dataclass(eq=False)
class _Stream:
    layer: FetchLayer
    number: int
    source: RegistrySource
    wanted: dict[int, Flight] = field(default_factory=dict)
    passed: dict[int, bytes] = field(default_factory=dict)
    """Frames that passed by while a ranged read was under way that may yet turn out to be refused one."""
    passed_bytes: int = 0
    moved: float = 0.0


class WholeLayers:
    """The streams of one fetcher. ``queue``, ``hold`` and ``retry`` are its own methods; ``lock`` is its lock.

    ``queue(flight, data, source)`` hands a frame to the decoders; ``hold(flights)`` waits while they are behind, or while
    readers wait for something else; ``retry(flight, source, error)`` deals with a frame that did not pass by.
    """

    def __init__(
        self,
        lock: threading.Lock,
        queue: Callable[[Flight, bytes, int], None],
        hold: Callable[[Collection[Flight]], Awaitable[None]],
        retry: Callable[[Flight, int, WeenvError], None],
        count: Callable[[FetchLayer, int], None],
    ) -> None:
        self._lock = lock
        self._queue = queue
        self._hold = hold
        self._retry = retry
        self._count = count
        self._streams: dict[RegistrySource, _Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def join(self, layer: FetchLayer, number: int, source: RegistrySource, flights: Sequence[Flight]) -> None:
        """``flights`` are active and come with the stream of ``source``, the layer's source ``number``."""
        stream = self._streams.get(source)
        if stream is None:
            stream = self._streams[source] = _Stream(layer, number, source, moved=time.monotonic())
            task = asyncio.get_running_loop().create_task(self._run(stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        here: list[tuple[Flight, bytes]] = []
        with self._lock:
            for flight in flights:
                data = stream.passed.pop(flight.frame, None)
                if data is None:
                    stream.wanted[flight.frame] = flight
                else:
                    here.append((flight, data))
        for flight, data in here:
            self._queue(flight, data, number)

    def late(self, now: float) -> list[Flight]:
        """Flights that a reader waited for too long while their stream stood still; they are no longer waited for here."""
        found: list[Flight] = []
        with self._lock:
            for stream in self._streams.values():
                if now - stream.moved > _STILL:
                    found += [one for one in stream.wanted.values() if one.priority == DEMAND and one.deadline < now]
                    for flight in found:
                        stream.wanted.pop(flight.frame, None)
        return found

    async def close(self) -> None:
        """Stop all streams; nobody is told."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, stream: _Stream) -> None:
        layer = stream.layer
        cutter = Cutter(layer.starts, 0, len(layer.starts) - 1)
        failure: WeenvError = SourceError(f"{layer.name}: the frame had passed by already")
        log.info("a layer is read whole: its registry ignores Range", extra={"layer": layer.name, "bytes": layer.starts[-1]})
        try:
            async with aclosing(stream.source.whole(layer.starts[-1])) as chunks:
                async for chunk in chunks:
                    stream.moved = time.monotonic()
                    self._count(layer, len(chunk))
                    for frame, data in cutter.feed(chunk):
                        flight = self._claim(stream, frame, data)
                        if flight is not None:
                            self._queue(flight, data, stream.number)
                    await self._hold(stream.wanted.values())
            if not cutter.done:
                failure = UnavailableError(f"{layer.name}: the source sent {cutter.have} of {cutter.need} bytes of a frame")
        except WeenvError as error:
            failure = error
        finally:
            del self._streams[stream.source]
            with self._lock:
                left = list(stream.wanted.values())
                stream.wanted.clear()
        for flight in left:
            self._retry(flight, stream.number, failure)

    def _claim(self, stream: _Stream, frame: int, data: bytes) -> Flight | None:
        """The flight of a frame that passes by, active from now on; None where nobody needs it or another brings it."""
        layer = stream.layer
        with self._lock:
            flight = layer.flights.get(frame)
            if flight is None:
                if layer.presence.states[frame]:
                    return None
                flight = layer.flights[frame] = Flight(layer, frame, FILL)
            elif stream.wanted.pop(frame, None) is not flight and flight.state == ACTIVE:
                if flight.content is None and stream.passed_bytes + len(data) <= _PASSED:
                    stream.passed[frame] = data
                    stream.passed_bytes += len(data)
                return None
            flight.state = ACTIVE
            return flight
