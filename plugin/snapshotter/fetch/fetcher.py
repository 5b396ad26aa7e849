"""Gets missing frames: from whoever asks to the ranged reads, the checks, the disk and back.

Threads and state (docs/concurrency/blobfs.md has the long form)
    Anyone may call :meth:`Fetcher.request`: FUSE threads, decoder threads, the event loop. One lock guards the queues, every
    layer's ``flights`` and every :class:`Waiter`'s counters; it is held for table look-ups only, never over I/O.
    The event loop's thread runs the ranged reads. Decoder threads check, decompress, store and answer.

A frame that is asked for while it is missing has exactly one :class:`Flight`, whoever asks and however often. A flight
ends in one place (:meth:`Fetcher._land` or :meth:`Fetcher._fail`), which removes it and tells its waiters.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import aclosing
from enum import Enum
from functools import partial

from weenv.core.errors import (
    FormatError,
    NotFoundInSource,
    StorageError,
    UnauthorizedError,
    UnavailableError,
    WeenvError,
)
from weenv.plugin.snapshotter.fetch.flight import (
    ACTIVE,
    AHEAD,
    DEMAND,
    FILL,
    PAUSED,
    PREFETCH,
    PRIORITIES,
    QUEUED,
    FetchLayer,
    FetchSettings,
    FetchStats,
    Flight,
    Verify,
    Waiter,
)
from weenv.plugin.snapshotter.fetch.planner import span
from weenv.plugin.snapshotter.fetch.shelf import Shelf
from weenv.plugin.snapshotter.fetch.twoqueues import TwoQueues
from weenv.plugin.snapshotter.fetch.whole import Cutter, WholeLayers
from weenv.registry.ranged import RangesIgnored

log = logging.getLogger(__name__)

_PREFETCHED = 1 << 14
"""Frames of a layer at most of which it is known that a profile brought them and nobody has read them: for a metric only."""


class _Flush(Enum):
    """What decoders may be told to do besides decoding."""

    MEMORY = 1


class Fetcher:
    """See the module's text. Create it in the event loop that is to run the ranged reads; end it with :meth:`close`.

    ``refresh`` is called when all of a layer's sources have failed; it may append to ``layer.sources``.
    """

    def __init__(
        self, verify: Verify, settings: FetchSettings | None = None, refresh: Callable[[FetchLayer], None] = lambda _: None
    ) -> None:
        self.settings = settings or FetchSettings()
        self.stats = FetchStats()
        self.last_demand = 0.0
        """``time.monotonic()`` of the last frame that a reader had to wait for."""
        self._verify = verify
        self._refresh = refresh
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._queues: tuple[deque[Flight], ...] = tuple(deque() for _ in PRIORITIES)
        self._running = [0] * len(PRIORITIES)  # ranged reads, by the priority they were begun for
        self._demanded = 0  # flights that a reader waits for
        self._woken = False
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused: dict[Flight, asyncio.TimerHandle] = {}
        self._coming = 0  # bytes of ranged reads in flight
        self._backlog = 0
        self._drained = asyncio.Event()
        self._drained.set()
        self.shelf = Shelf(self._lock, self.stats, self.settings.memory)
        self._work: TwoQueues[tuple[Flight, bytes, int] | _Flush | None] = TwoQueues()
        self._decoders = [
            threading.Thread(target=self._decode, name=f"decoder-{number}", daemon=True)
            for number in range(self.settings.decoders)
        ]
        for thread in self._decoders:
            thread.start()
        self._whole = WholeLayers(
            self._lock, self._queue_decode, lambda flights: self._hold(flights, FILL), self._retry, self._arrived
        )
        self._watchdog = self._loop.create_task(self._watch())

    @property
    def demanded(self) -> int:
        """The number of missing frames that readers wait for right now."""
        return self._demanded

    @property
    def running(self) -> int:
        """The number of ranged reads in flight."""
        return sum(self._running)

    # -- asking ---------------------------------------------------------------------------------------------------

    def request(self, layer: FetchLayer, frames: Iterable[int], waiter: Waiter, ahead: Iterable[int] = ()) -> None:
        """Have ``waiter`` told when all ``frames`` are there; fetch ``ahead`` too, at the lower priority. Any thread."""
        states, flights = layer.presence.states, layer.flights
        refused = flush = False
        with self._lock:
            if self._closed:
                return  # not an answer either: the kernel asks the next server
            for frame in frames:
                if refused or states[frame]:
                    waiter.pieces[frame] = None
                    continue
                if (held := self.shelf.held(layer, frame)) is not None:
                    waiter.pieces[frame] = held
                    flush = flush or self.shelf.due()
                    continue
                if layer.refused and (until := layer.refused.get(frame)) is not None:
                    if time.monotonic() < until:
                        refused = True
                        continue
                    del layer.refused[frame]
                flight = self._demand(layer, flights, frame)
                if flight.content is not None:
                    waiter.pieces[frame] = flight.content
                    continue
                flight.waiters.append(waiter)
                waiter.left += 1
            left = -1 if refused else waiter.left
            if refused:
                waiter.left = -1
            self._plan(layer, ahead, AHEAD)
            wake = not self._woken
            self._woken = True
        if wake:
            self._wake()
        if flush:
            self._work.put(_Flush.MEMORY)
        if left == 0:
            waiter.complete()
        elif left < 0:
            waiter.fail(errno.EIO)

    def _plan(self, layer: FetchLayer, frames: Iterable[int], priority: int) -> None:
        """Queue what nobody waits for and is not under way. Locked.

        Of read-ahead the latest guess goes first, whoever made it: it is about what is read now, the others about what was.
        The fill goes in turn.
        """
        states, flights, fresh = layer.presence.states, layer.flights, []
        for frame in frames:
            if frame not in flights and not states[frame]:
                flights[frame] = flight = Flight(layer, frame, priority)
                fresh.append(flight)
        if priority == AHEAD:
            self._queues[AHEAD].extendleft(reversed(fresh))
        else:
            self._queues[priority].extend(fresh)

    def want(self, layer: FetchLayer, frames: Iterable[int], priority: int, waiter: Waiter | None = None) -> None:
        """Fetch ``frames`` at ``priority`` AHEAD or FILL; failures are dropped silently, unless a ``waiter`` is told."""
        frames = list(frames)
        flights = layer.flights
        with self._lock:
            self._plan(layer, frames, priority)
            if waiter is not None:
                for frame in frames:
                    if (flight := flights.get(frame)) is None:
                        continue  # it is there
                    if flight.content is not None:
                        waiter.pieces[frame] = flight.content
                    else:
                        flight.waiters.append(waiter)
                        waiter.left += 1
            left = -1 if waiter is None else waiter.left
            wake = not self._woken
            self._woken = True
        if wake:
            self._wake()
        if left == 0 and waiter is not None:
            waiter.complete()

    def abandon(self, waiter: Waiter) -> bool:
        """The waiter's owner no longer waits; True where it has not been told yet and now never will be. Any thread."""
        with self._lock:
            if waiter.left <= 0:
                return False
            waiter.left = -1
            return True

    def used(self, layer: FetchLayer, frames: Iterable[int]) -> None:
        """These are read for the first time: count those that a profile brought. Any thread."""
        with self._lock:
            for frame in frames:
                if frame in layer.prefetched:
                    layer.prefetched.discard(frame)
                    self.stats.prefetch_used += 1

    def _demand(self, layer: FetchLayer, flights: dict[int, Flight], frame: int) -> Flight:
        flight = flights.get(frame)
        if flight is None:
            flights[frame] = flight = Flight(layer, frame, DEMAND)
            self._queues[DEMAND].append(flight)
        elif flight.priority != DEMAND:
            flight.priority = DEMAND
            if flight.state == QUEUED:
                self._queues[DEMAND].append(flight)  # its entry in the other queue is skipped there
        else:
            return flight
        self.last_demand = now = time.monotonic()
        flight.deadline = now + self.settings.deadline
        self._demanded += 1
        return flight

    # -- dispatching (event loop) -----------------------------------------------------------------------------------

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._dispatch)
        except RuntimeError:  # the loop is closed: the process is ending, the next server gets the request again
            return

    def _dispatch(self) -> None:
        while True:
            with self._lock:
                self._woken = False
                if self._closed:
                    return
                flights, priority = self._next()
                if not flights:
                    return
                self._running[priority] += 1
                self._coming += _length(flights)
                self.stats.ranges += 1
            task = self._loop.create_task(self._run(flights, priority))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _next(self) -> tuple[list[Flight], int]:
        """The flights of the next ranged read, now active, and its priority; none where nothing may start. Locked."""
        settings, running = self.settings, self._running
        total = sum(running)
        if self._coming >= settings.coming:
            return [], 0
        for priority, pending in enumerate(self._queues):
            if priority == DEMAND:
                allowed = total < settings.parallelism
            elif priority == AHEAD:
                allowed = total - running[PREFETCH] < max(1, settings.parallelism // 2) and total < settings.parallelism
            elif priority == PREFETCH:
                allowed = running[PREFETCH] < settings.prefetches and total < max(1, settings.parallelism - 2)
            else:
                allowed = total == 0 and not self._demanded
            if not allowed:
                break
            while pending:
                flight = pending.popleft()
                if flight.state != QUEUED or flight.priority != priority:
                    continue
                layer = flight.layer
                flights = layer.flights
                reach = max(priority, AHEAD)

                def joins(frame: int, reach: int, flights: dict[int, Flight] = flights, seed: Flight = flight) -> bool:
                    other = flights.get(frame)
                    return (
                        other is not None
                        and other.state == QUEUED
                        and other.priority <= reach
                        and other.tried == seed.tried
                        and other.useless == seed.useless
                    )

                limit = min(settings.range_max, settings.range_limits[priority])
                first, end = span(
                    flight.frame, layer.starts, partial(joins, reach=reach), partial(joins, reach=priority), limit
                )
                chosen = [flights[frame] for frame in range(first, end)]
                for one in chosen:
                    one.state = ACTIVE
                return chosen, priority
        return [], 0

    async def _run(self, flights: list[Flight], priority: int) -> None:
        """One ranged read: hands every frame to the decoders as soon as its last byte is here."""
        layer, seed = flights[0].layer, flights[0]
        done = 0
        number = -1
        failure: WeenvError = UnavailableError("the fetch was cancelled")
        begun = time.monotonic()
        try:
            number = self._choose(layer, seed)
            source = layer.sources[number]
            starts = layer.starts
            begin = starts[seed.frame]
            length = starts[flights[-1].frame + 1] - begin
            cutter = Cutter(starts, seed.frame, flights[-1].frame + 1)
            remaining = self._remaining(flights)
            patience = min(self.settings.stall, remaining)
            async with (
                asyncio.timeout(patience) as stall,
                aclosing(source.stream(begin, length, deadline=remaining)) as chunks,
            ):
                async for chunk in chunks:
                    stall.reschedule(self._loop.time() + patience)
                    self.stats.fetched_bytes += len(chunk)
                    layer.tally.fetched += len(chunk)
                    for _, data in cutter.feed(chunk):
                        done += 1
                        self._queue_decode(flights[done - 1], data, number)
                    if not self._drained.is_set() or (priority == FILL and self._demanded):
                        stall.reschedule(None)
                        await self._hold(flights[done:], priority)
                        stall.reschedule(self._loop.time() + patience)
            if not cutter.done:
                failure = UnavailableError(
                    f"{layer.name}: the source sent {cutter.have} of {cutter.need} bytes of frame {cutter.frame}"
                )
                self.stats.error("short")
        except RangesIgnored as error:
            self._whole.join(layer, number, error.source, flights[done:])
            done = len(flights)
        except TimeoutError:
            failure = UnavailableError(f"{layer.name}: the source sent nothing for {self.settings.stall:g} s")
            self.stats.error("stall")
        except WeenvError as error:
            failure = error
            self.stats.error(_kind(error))
        except OSError as error:
            failure = UnavailableError(f"{layer.name}: {error}")
            self.stats.error("source")
        except Exception as error:
            failure = UnavailableError(f"{layer.name}: unexpected {type(error).__name__}: {error}")
            self.stats.error("source")
            log.exception("a source failed in an unexpected way", extra={"layer": layer.name})
        finally:
            with self._lock:
                self._running[priority] -= 1
                self._coming -= _length(flights)
                closed = self._closed
            if done == len(flights):
                layer.preferred = number
                if self._paused:
                    self._wake_paused(layer)
                self.stats.range_seconds.observe(time.monotonic() - begun)
            elif not closed:
                layer.went_wrong("source", failure)
                for flight in flights[done:]:
                    self._retry(flight, number, failure, useless=isinstance(failure, NotFoundInSource | UnauthorizedError))
            self._dispatch()

    async def _hold(self, flights: Collection[Flight], priority: int) -> None:
        """Pause a ranged read: while decoders are behind, and for a fill while readers wait for something else."""
        await self._drained.wait()
        # Polled: the condition changes in other threads, thousands of times a second while readers read.
        while priority == FILL and self._demanded and not self._wanted(flights):  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    def _wanted(self, flights: Collection[Flight]) -> bool:
        """Whether a reader waits for any of them."""
        return any(flight.priority == DEMAND for flight in list(flights))

    def _arrived(self, layer: FetchLayer, count: int) -> None:
        self.stats.fetched_bytes += count
        layer.tally.fetched += count

    def _remaining(self, flights: list[Flight]) -> float:
        """Seconds that a source may take for its own retries: until the first reader gives up."""
        now = time.monotonic()
        waits = [flight.deadline - now for flight in flights if flight.priority == DEMAND]
        return max(1.0, min(waits, default=self.settings.deadline))

    def _choose(self, layer: FetchLayer, flight: Flight) -> int:
        count = len(layer.sources)
        for step in range(count):
            number = (layer.preferred + step) % count
            if number not in flight.tried and number not in flight.useless:
                return number
        raise NotFoundInSource(
            f"{layer.name}: no source has frame {flight.frame}", hint="see source.json in the layer directory"
        )

    def _queue_decode(self, flight: Flight, data: bytes, source: int) -> None:
        with self._lock:
            self._backlog += _weight(flight)
            if self._backlog > self.settings.backlog:
                self._drained.clear()
        self._work.put((flight, data, source), urgent=flight.priority == DEMAND)

    # -- ending a flight ----------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """A decoder thread: check, decompress, store, answer."""
        while (item := self._work.get()) is not None:
            if isinstance(item, _Flush):
                self.shelf.flush()
            else:
                self._decode_one(*item)
            del item  # with its layer, and perhaps 128 MiB, for as long as nothing else is to be done

    def _decode_one(self, flight: Flight, data: bytes, source: int) -> None:
        layer, frame = flight.layer, flight.frame
        try:
            content = self._verify(layer.frames, frame, data)
            self._answer(flight, content)  # before the disk gets it: the reader goes on meanwhile
            self._land(flight, content, self.shelf.save(layer, frame, content))
        except FormatError as error:
            with self._lock:
                self.stats.error("digest")
            fields = {"layer": layer.name, "frame": frame, "source": str(layer.sources[source]), "error": str(error)}
            layer.went_wrong("digest", error)
            log.warning("a source sent a bad frame", extra=fields)
            self._loop_call(partial(self._wrong, flight, source, error))
        except Exception as error:
            log.exception("a decoder failed", extra={"layer": layer.name, "frame": frame})
            self._loop_call(partial(self._fail, flight, f"unexpected {error!r}"))
        finally:
            self._settle(_weight(flight))

    def _settle(self, size: int) -> None:
        with self._lock:
            self._backlog -= size
            low = self._backlog <= self.settings.backlog // 2
        if low and not self._drained.is_set():
            self._loop_call(self._drained.set)

    def _loop_call(self, call: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            return

    def _answer(self, flight: Flight, content: bytes) -> None:
        """Give a checked frame to its waiters; who asks from now on gets it at once."""
        layer, frame = flight.layer, flight.frame
        ready: list[Waiter] = []
        with self._lock:
            flight.content = content
            self.stats.frames[flight.priority] += 1  # before any reader goes on: what he has read is counted
            if flight.priority == PREFETCH and len(layer.prefetched) < _PREFETCHED:
                layer.prefetched.add(frame)
            self.stats.stored_bytes += len(content)
            layer.tally.stored += len(content)
            for waiter in flight.waiters:
                if waiter.left > 0:
                    waiter.pieces[frame] = content
                    waiter.left -= 1
                    if waiter.left == 0:
                        ready.append(waiter)
            flight.waiters.clear()
        for waiter in ready:
            waiter.complete()

    def _land(self, flight: Flight, content: bytes, stored: bool) -> None:
        layer, frame = flight.layer, flight.frame
        with self._lock:
            layer.flights.pop(frame, None)
            if flight.priority == DEMAND:
                self._demanded -= 1
            self.shelf.landed(layer, frame, content, stored=stored)
            idle = bool(self._queues[FILL]) and not self._demanded
        if idle:
            self._wake()  # the fill had to wait for this reader, and nothing else may be under way to make it go on

    def _wrong(self, flight: Flight, source: int, error: FormatError) -> None:
        """A frame does not have its digest: the source may have it right from elsewhere, or the next time."""
        starts = flight.layer.starts
        begin, end = starts[flight.frame], starts[flight.frame + 1]
        self._retry(flight, source, error, useless=not flight.layer.sources[source].suspect(begin, end - begin))

    def _retry(self, flight: Flight, source: int, error: WeenvError, *, useless: bool = False) -> None:
        """After a failure: the next source at once, another round after a pause, or the end. Event loop's thread."""
        layer, settings = flight.layer, self.settings
        if source >= 0:
            (flight.useless if useless else flight.tried).add(source)
        tried = flight.tried | flight.useless
        if len(tried) == len(layer.sources):
            self._refresh(layer)  # somebody may have learnt of another place meanwhile
        known = range(len(layer.sources))
        if all(number in flight.useless for number in known):
            self._fail(flight, str(error))
            return
        delay, said = 0.0, None
        if all(number in flight.useless or number in flight.tried for number in known):
            said = error.retry_after if isinstance(error, UnavailableError) else None
            if said is not None:
                delay = said * random.uniform(1.0, 1.1)  # noqa: S311 - spreads retries, no secret
            else:
                delay = min(settings.backoff * 2.0 ** min(flight.rounds, 20), settings.backoff_max)
                delay *= random.uniform(0.5, 1.0)  # noqa: S311
                flight.rounds += 1
            flight.tried.clear()
            if flight.priority != DEMAND or time.monotonic() + delay > flight.deadline:
                self._fail(flight, str(error), again_in=delay)
                return
        self._pause(flight, delay, wakes=said is None)

    def _pause(self, flight: Flight, delay: float, *, wakes: bool = False) -> None:
        """Queue a flight again in ``delay`` seconds; where it ``wakes``, as soon as something of its layer arrives."""
        flight.state = PAUSED
        timer = self._loop.call_later(delay, self._requeue, flight)
        if wakes and delay > 0:
            self._paused[flight] = timer

    def _wake_paused(self, layer: FetchLayer) -> None:
        """The layer's source works: those that failed before need not wait for their time."""
        for flight in [flight for flight in self._paused if flight.layer is layer]:
            self._paused[flight].cancel()
            self._requeue(flight)

    def _requeue(self, flight: Flight) -> None:
        self._paused.pop(flight, None)
        with self._lock:
            if self._closed or flight.state != PAUSED:  # it has come with a stream meanwhile
                return
            flight.state = QUEUED
            self._queues[flight.priority].appendleft(flight)
        self._dispatch()

    def _fail(self, flight: Flight, reason: str, again_in: float = float("inf")) -> None:
        """The end of a flight without its frame. Tried again in ``again_in`` seconds where a reader still has the time."""
        layer, frame = flight.layer, flight.frame
        failed: list[Waiter] = []
        now = time.monotonic()
        with self._lock:
            if flight.priority == DEMAND and now + again_in <= flight.deadline:  # he came when it had been given up already
                self._pause(flight, again_in)
                return
            layer.flights.pop(frame, None)
            if flight.priority == DEMAND:
                self._demanded -= 1
                self.stats.error("eio")
                layer.refuse(frame, now + self.settings.refuse, now)
                layer.went_wrong("eio", f"frame {frame}: {reason}")
            complain = flight.priority == DEMAND and now >= layer.complain_after
            if complain:
                layer.complain_after = now + 10.0
            for waiter in flight.waiters:
                if waiter.left > 0:
                    waiter.left = -1
                    failed.append(waiter)
        if complain:
            log.error("readers get EIO: a frame cannot be had", extra={"layer": layer.name, "frame": frame, "error": reason})
        for waiter in failed:
            waiter.fail(errno.EIO)

    async def _watch(self) -> None:
        """End flights that a reader waited for too long while all ranged reads were taken by sources that hang."""
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            with self._lock:
                late = [flight for flight in self._queues[DEMAND] if flight.state == QUEUED and flight.deadline < now]
                for flight in late:
                    flight.state = ACTIVE  # out of the queue
            late += self._whole.late(now)
            for flight in late:
                self._fail(flight, "every ranged read is taken by a source that does not answer")

    async def close(self) -> None:
        """Stop: no waiter is told any more (the kernel asks the next server again)."""
        with self._lock:
            self._closed = True
        tasks = [*self._tasks, self._watchdog]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._whole.close()
        for _ in self._decoders:
            self._work.put(None)
        for thread in self._decoders:
            await asyncio.to_thread(thread.join)


def _weight(flight: Flight) -> int:
    """Bytes of memory that a frame takes on its way, about."""
    frames, number = flight.layer.frames, flight.frame
    return max(int(frames.content_sizes[number]), int(frames.compressed_sizes[number]))


def _length(flights: list[Flight]) -> int:
    """Bytes of the ranged read that brings these."""
    starts = flights[0].layer.starts
    return starts[flights[-1].frame + 1] - starts[flights[0].frame]


def _kind(error: WeenvError) -> str:
    if isinstance(error, NotFoundInSource):
        return "notfound"
    if isinstance(error, UnauthorizedError):
        return "unauthorized"
    return "storage" if isinstance(error, StorageError) else "source"
