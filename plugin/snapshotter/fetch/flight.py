"""The pieces that the fetcher works with: settings, counters, a layer, a frame on its way, and who waits for it.

All of it is guarded by the fetcher's lock, except where a member says otherwise.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from weenv.layer.toc import Frames
from weenv.plugin.snapshotter.cache.present import Presence
from weenv.plugin.snapshotter.cache.store import DataStore
from weenv.plugin.snapshotter.cache.tables import MappedFrames
from weenv.plugin.snapshotter.cache.tally import Latencies, Tally
from weenv.plugin.snapshotter.fetch.planner import offsets
from weenv.registry.source import BlobSource

DEMAND: Final = 0
"""A reader waits for the frame."""
AHEAD: Final = 1
"""A reader is expected to ask for it soon."""
PREFETCH: Final = 2
"""The layer's profile says that a container will need it (prefetch.py)."""
FILL: Final = 3
"""Nobody asked; the rest of a layer."""
PRIORITIES: Final = ("demand", "ahead", "prefetch", "fill")
"""Their names, by number."""

QUEUED: Final = 0
"""State of a flight: it waits in a queue."""
ACTIVE: Final = 1
"""It is part of a ranged read, or with a decoder."""
PAUSED: Final = 2
"""It failed, and is queued again in a moment."""


RANGE_BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histogram of ranged reads, in seconds."""
_REFUSED: Final = 1024
"""So many frames may be refused before those whose time is over are forgotten."""

Verify = Callable[[Frames, int, bytes], bytes]
"""``verify_frame(frames, number, compressed) -> content``: checks the digest, then decompresses. Raises FormatError."""


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """Bounds of the fetcher. Sizes are in bytes, times in seconds."""

    parallelism: int = 8
    """Ranged reads in flight, all layers together."""
    range_max: int = 2 << 20
    """Largest ranged read for demand and read-ahead (a single larger frame is still one read)."""
    prefetches: int = 3
    """Ranged reads in flight for profiles, all layers together."""
    range_limits: tuple[int, int, int, int] = (2 << 20, 1 << 20, 1 << 20, 512 << 10)
    """The same by priority: what a reader waits for shares the line with what is under way, so that is kept short."""
    deadline: float = 90.0
    """How long a reader waits for a source that does not answer before it gets EIO."""
    stall: float = 45.0
    """A ranged read that brings nothing for so long is given up and tried again. Sources of registries find out sooner, and go
    on elsewhere; this is for those that do not."""
    backoff: float = 0.2
    """Pause after the first failed round over all sources; doubles each round, up to ``backoff_max``."""
    backoff_max: float = 5.0
    refuse: float = 1.0
    """After an EIO, how long further readers of that frame get EIO without another attempt."""
    decoders: int = 2
    backlog: int = 32 << 20
    """Bytes that may wait for a decoder before ranged reads pause; of a frame its content's or its own, whichever are more."""
    coming: int = 256 << 20
    """Bytes of ranged reads in flight from which on no other is begun. The usual ones have a tenth of it together; a range of
    eStargz or zstd:chunked may have 128 MiB, whatever content comes of it."""
    memory: int = 32 << 20
    """Content bytes kept in memory while the disk is full."""


class Waiter:
    """Somebody who needs several frames: told once, when the last is there or the first has failed.

    ``complete`` and ``fail`` run in a decoder's or the event loop's thread, or in that of the caller of
    :meth:`Fetcher.request`; they must not block for long.
    """

    __slots__ = ("left", "pieces")

    def __init__(self) -> None:
        self.left = 0
        self.pieces: dict[int, bytes | None] = {}
        """Frame number to content; None: the frame is in the layer's ``data`` file."""

    def complete(self) -> None:
        """All frames are there, in ``pieces``."""
        raise NotImplementedError

    def fail(self, code: int) -> None:
        """A frame could not be had; ``code`` is an errno."""
        raise NotImplementedError


class FutureWaiter(Waiter):
    """A waiter for coroutines: ``future`` becomes ``pieces``, or an OSError."""

    __slots__ = ("_loop", "future")

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[dict[int, bytes | None]] = self._loop.create_future()

    def complete(self) -> None:
        """Resolve the future."""
        self._loop.call_soon_threadsafe(self._set, None)

    def fail(self, code: int) -> None:
        """Fail the future."""
        self._loop.call_soon_threadsafe(self._set, OSError(code, "frame could not be fetched"))

    def _set(self, error: OSError | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(self.pieces)
        else:
            self.future.set_exception(error)


class Flight:
    """One frame on its way."""

    __slots__ = ("content", "deadline", "frame", "layer", "priority", "rounds", "state", "tried", "useless", "waiters")

    def __init__(self, layer: FetchLayer, frame: int, priority: int) -> None:
        self.layer = layer
        self.frame = frame
        self.priority = priority
        self.state = QUEUED
        self.content: bytes | None = None  # checked, and being written to the disk
        self.waiters: list[Waiter] = []
        self.deadline = 0.0
        self.rounds = 0
        self.tried: set[int] = set()
        self.useless: set[int] = set()  # sources that answered with wrong bytes or do not hold the blob


@dataclass(eq=False)
class FetchLayer:
    """What the fetcher needs to know of a layer. ``sources`` are in the order to try them."""

    name: str
    frames: Frames
    presence: Presence
    store: DataStore
    sources: list[BlobSource]
    starts: Sequence[int] = field(init=False)
    """Compressed offsets, n + 1 of them."""
    contents: Sequence[int] = field(init=False)
    """Content offsets (in the tar stream), n + 1 of them."""
    flights: dict[int, Flight] = field(init=False, default_factory=dict)
    prefetched: set[int] = field(init=False, default_factory=set)
    """Frames that a profile brought and that nobody has read yet."""
    refused: dict[int, float] = field(init=False, default_factory=dict)
    preferred: int = field(init=False, default=0)
    complain_after: float = field(init=False, default=0.0)

    last_error: str = field(init=False, default="")
    """What went wrong last, for whoever asks the operator's questions; empty where nothing has."""
    tally: Tally = field(init=False, default_factory=Tally)
    """What is counted of this layer, errors among it."""
    writing: threading.Lock = field(init=False, default_factory=threading.Lock)
    """Held while a frame is written and marked, and while frames are punched out: never both at once."""

    def __post_init__(self) -> None:
        compressed, content = self.frames.compressed_offsets, self.frames.content_offsets
        mapped = isinstance(self.frames, MappedFrames)  # then no copy in memory
        self.starts = compressed.data if mapped else offsets(compressed)
        self.contents = content.data if mapped else offsets(content)

    def refuse(self, frame: int, until: float, now: float) -> None:
        """Readers of ``frame`` get EIO without another attempt ``until`` then (``time.monotonic()``)."""
        if len(self.refused) >= _REFUSED:
            self.refused = {key: when for key, when in self.refused.items() if when > now}
        self.refused[frame] = until

    def went_wrong(self, kind: str, error: object) -> None:
        """Remember an error of this layer."""
        errors = self.tally.errors
        errors[kind] = errors.get(kind, 0) + 1
        self.last_error = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {error}"[:500]


@dataclass
class FetchStats:
    """Counters; written under the fetcher's lock, read by anyone. Bytes and counts since the process began."""

    fetched_bytes: int = 0
    """Compressed bytes that arrived, whatever became of them."""
    stored_bytes: int = 0
    """Content bytes of frames that passed the checks."""
    frames: list[int] = field(default_factory=lambda: [0] * len(PRIORITIES))
    """Frames that passed the checks, by priority."""
    prefetch_used: int = 0
    """Frames of those that profiles brought which have been read since."""
    ranges: int = 0
    """Ranged reads begun."""
    errors: dict[str, int] = field(default_factory=dict)
    """By kind: digest, source, notfound, unauthorized, short, stall, enospc, storage, eio."""
    range_seconds: Latencies = field(default_factory=lambda: Latencies(RANGE_BOUNDS))
    """How long ranged reads took that brought all that was asked for."""

    def error(self, kind: str) -> None:
        """Count an error."""
        self.errors[kind] = self.errors.get(kind, 0) + 1
