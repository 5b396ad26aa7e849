"""The cache of a node, over all layers: how large it is, what goes when it is too large, what ``weenv cache`` shows.

Used by blobfs, which knows the layers that are open and who reads them, and by ``weenv cache`` itself where no blobfs runs:
then no layer is open, and the lease of cache/evict.py keeps a blobfs that starts meanwhile out of the layer at hand.

Layers that are not open are known by their directory only: when they were used last is then what their files' times say.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from weenv.core import digest as digests
from weenv.core.errors import StorageError, WeenvError
from weenv.plugin.snapshotter.cache import evict
from weenv.plugin.snapshotter.cache.bounds import Bounds, Disk, Rules, bounds
from weenv.plugin.snapshotter.cache.evict import OLDEST, Dropped, Guard, Held
from weenv.plugin.snapshotter.cache.present import MISSING, Presence, frame_states, is_complete, table
from weenv.plugin.snapshotter.cache.store import DataStore
from weenv.plugin.snapshotter.cache.tally import Tally
from weenv.plugin.snapshotter.layerdir import EVICT, LayerDirs
from weenv.plugin.snapshotter.metastore import Metastore

log = logging.getLogger(__name__)

_BATCH_FRAMES: Final = 256
_BATCH_BYTES: Final = 64 << 20
"""What is punched out at a time: who opens the layer meanwhile waits for so much."""
_SLACK: Final = 256 << 10
"""Bytes that a layer may have on disk without marks before somebody looks which."""
_PERIOD_BYTES: Final = 4 << 20
_PERIOD_SHARE: Final = 16
_PERIOD: Final = 60.0
"""A period of the clock that frames' ages are counted by ends when a sixteenth of the cache, and no less than 4 MiB, has been
fetched, or after a minute: with a cache that is turned over in seconds, minutes would tell nothing."""


class OpenLayer(Protocol):
    """A layer that the server has open (blobfs/layers.py)."""

    path: str
    presence: Presence
    store: DataStore
    contents: Sequence[int]
    touched: bytearray
    ages: bytearray
    last_used: float
    identity: tuple[int, int]
    tally: Tally

    @property
    def digest(self) -> str: ...
    def evicted(self, frames: Sequence[int]) -> None: ...


@dataclass(slots=True)
class Entry:
    """A layer on disk. ``used_at`` is the time (``time.time()``) of its last known use; ``opened`` None where it is closed.

    ``discarded``: its directory is in the trash already, it lives until those who use it are gone.
    """

    digest: str
    path: str
    allocated: int
    used_at: float
    opened: OpenLayer | None = None
    discarded: bool = False


@dataclass(frozen=True, slots=True)
class Size:
    """How large the cache is (bytes of disk that ``data`` files take), the disk, and the bounds that follow."""

    data: int
    disk: Disk
    bounds: Bounds

    @property
    def over(self) -> bool:
        """True where frames must go."""
        return self.data > self.bounds.high

    @property
    def room(self) -> bool:
        """True while what nobody asked for may be fetched."""
        return self.data < self.bounds.low


@dataclass(slots=True)
class Evicted:
    """What an eviction has done: by layer, and altogether. Before it the layers that were looked at, ``entries``, had ``data``
    bytes on disk."""

    layers: dict[str, Dropped] = field(default_factory=dict)
    data: int = 0
    entries: list[Entry] = field(default_factory=list)
    refused: dict[str, Dropped] = field(default_factory=dict)
    """Of a dry run: what would go of layers that the kernel reads by itself, if it did not."""

    @property
    def frames(self) -> int:
        """Frames punched out."""
        return sum(each.frames for each in self.layers.values())

    @property
    def size(self) -> int:
        """Their bytes."""
        return sum(each.size for each in self.layers.values())

    def add(self, digest: str, done: Dropped) -> None:
        """Count what was done of one layer."""
        _count(self.layers, digest, done)

    def add_later(self, later: Evicted) -> None:
        """Count what was done at another attempt at some of the layers, which may have gone better."""
        for digest, done in later.layers.items():
            self.add(digest, done)
            self.layers[digest].why = done.why


def _count(layers: dict[str, Dropped], digest: str, done: Dropped) -> None:
    known = layers.setdefault(digest, Dropped())
    known.frames += done.frames
    known.size += done.size
    known.why = done.why or known.why


@dataclass(frozen=True, slots=True)
class Which:
    """What may go: of layers whose digest (hex) begins with one of ``prefixes`` (all where there are none), what was not used
    since ``before`` (``time.time()``; 0: whenever it was used)."""

    prefixes: tuple[str, ...] = ()
    before: float = 0.0

    def has(self, digest: str) -> bool:
        """Whether it is one of these layers."""
        return not self.prefixes or digests.hex_of(digest).startswith(self.prefixes)


ALL: Final = Which()


class Keeper:
    """See the module's text. Blocking; may be called from any thread, one call that evicts at a time.

    ``opened`` gives the layers that are open, ``guard`` what is to be known of those who use one.
    """

    def __init__(
        self, root: str, rules: Rules, opened: Callable[[], Sequence[OpenLayer]] = list,
        guard: Callable[[Any], Guard] = lambda _: Guard(),
    ) -> None:  # fmt: skip
        self.root = root
        self.rules = rules
        self.dirs = LayerDirs(root)
        self.evicted_frames: dict[str, int] = {}
        """Frames punched out since the process began, by reason: size, disk, unused, prune."""
        self.evicted_bytes: dict[str, int] = {}
        self._opened = opened
        self._guard = guard
        self._lock = threading.Lock()
        self._ticks: deque[float] = deque(maxlen=OLDEST)
        self._ticked = time.time()
        self._ticked_at = 0
        self._used: dict[str, float] = {}  # when layers that are closed by now were read last, by digest

    # -- what there is ------------------------------------------------------------------------------------------------

    def digests(self) -> set[str]:
        """All layers, with data on disk or without."""
        return {*self.dirs.known(), *(layer.digest for layer in self._opened())}

    def entries(self, which: Which = ALL) -> list[Entry]:
        """All layers that have data on disk, or those of ``which``."""
        found: dict[str, Entry] = {}
        lost: list[Entry] = []
        offset = time.time() - time.monotonic()
        for layer in self._opened():
            used = layer.last_used + offset
            self._used[layer.digest] = used
            if not which.has(layer.digest):
                continue
            entry = Entry(layer.digest, layer.path, layer.store.allocated(), used, layer)
            entry.discarded = not _is(self.dirs.path(layer.digest), layer.identity)
            if entry.discarded:
                lost.append(entry)
            else:
                found[layer.digest] = entry
        known = self.dirs.known()
        for digest in known:
            if digest in found or not which.has(digest):
                continue
            path = self.dirs.path(digest)
            with contextlib.suppress(OSError):  # the layer has just been removed
                data = os.stat(f"{path}/data")
                used = self._used.get(digest) or max(data.st_atime, data.st_mtime)
                found[digest] = Entry(digest, path, data.st_blocks * 512, used)
        for digest in self._used.keys() - set(known):
            del self._used[digest]
        return [*(found[digest] for digest in known if digest in found), *lost]

    def size(self, entries: Sequence[Entry] | None = None) -> Size:
        """How large the cache is; without a root, which the snapshotter makes, it is empty. Raises OSError."""
        data = sum(entry.allocated for entry in (self.entries() if entries is None else entries))
        disk = _disk(self.root)
        return Size(data, disk, bounds(self.rules, data, disk))

    def unused(self) -> Callable[[str], bool]:
        """Whether no snapshot has a layer, as of now; nothing is unused where there is no metastore to ask."""
        if not os.path.exists(os.path.join(self.root, "metastore.db")):
            return lambda _: False
        try:
            with contextlib.closing(self._metastore()) as store:
                idle = {layer.id for layer in store.unused_layers()}
                used = {layer.digest for layer in store.layers() if layer.id not in idle}
        except (StorageError, sqlite3.Error):
            return lambda _: False
        return lambda digest: digest not in used

    def rows(self) -> list[dict[str, Any]]:
        """A row for each layer, for ``weenv cache ls``; sizes in bytes, times as seconds since 1970."""
        found = []
        unused = self.unused()
        for entry in self.entries():
            held = self._held(entry, 0.0)
            if held is None:
                continue
            there = held.states != MISSING
            try:
                with self._store(entry) as store, store.alone() as alone:
                    free = alone
            except (OSError, WeenvError):  # the layer has been removed meanwhile
                continue
            found.append(
                {
                    "digest": entry.digest,
                    "disk_bytes": entry.allocated,
                    "local_bytes": int(held.sizes[there].sum(dtype=np.int64)),
                    "stream_size": int(held.sizes.sum(dtype=np.int64)),
                    "frames": len(held.sizes),
                    "frames_local": int(there.sum()),
                    "used_at": round(entry.used_at, 3),
                    "open": entry.opened is not None,
                    "unused": entry.discarded or unused(entry.digest),
                    "evictable": free,
                }
            )
        return found

    # -- the clock ----------------------------------------------------------------------------------------------------

    def tick(self, stored: int, data: int) -> bool:
        """To be called now and then with how many bytes have been stored since the process began; True where a period ended."""
        now = time.time()
        enough = stored - self._ticked_at >= max(_PERIOD_BYTES, data // _PERIOD_SHARE)
        if not enough and now - self._ticked < _PERIOD:
            return False
        with self._lock:
            self._ticked, self._ticked_at = now, stored
            self._ticks.append(now)
            for layer in self._opened():
                evict.age(_bytes(layer.ages), _bytes(layer.touched), np.frombuffer(bytes(layer.presence.states), np.uint8))
        return True

    def _age(self, used_at: float) -> int:
        """The age of what was read last at ``used_at``."""
        return len(self._ticks) - bisect.bisect_right(self._ticks, used_at)

    # -- eviction -----------------------------------------------------------------------------------------------------

    def evict(
        self, wanted: int, reason: str, which: Which = ALL, *, to: int = 0, look: Which = ALL, dry: bool = False
    ) -> Evicted:
        """Punch out frames that make up ``wanted`` bytes, or all that may go; with ``dry`` only say which.

        None beyond where the cache has ``to`` bytes: others may have evicted since ``wanted`` was worked out. Without it no
        layers but those of ``look`` need to be looked at.
        """
        done = Evicted()
        with self._lock:
            done.entries = self.entries(look)
            done.data = sum(entry.allocated for entry in done.entries)
            if to:
                wanted = min(wanted, done.data - to)
            entries = [entry for entry in done.entries if which.has(entry.digest)]
            unused = self.unused()
            helds: list[Held] = []
            kept: list[Entry] = []
            for entry in entries:
                held = self._held(entry, which.before)
                if held is not None:
                    held = Held(held.sizes, held.states, held.ages, entry.discarded or unused(entry.digest), entry.used_at)
                    helds.append(held)
                    kept.append(entry)
            if not dry:
                for entry, held in zip(kept, helds, strict=True):
                    self._tidy(entry, held)
            youngest = OLDEST if which.before else 0
            spare: set[int] = set()
            times = 1
            while (missing := wanted - done.size) > 0:
                victims = evict.choose(helds, missing * times, youngest=youngest, spare=spare)
                if not victims:
                    break
                for index, frames in victims:
                    if (still := wanted - done.size) > 0:
                        if times > 1 and not helds[index].unused:  # more were chosen than are needed
                            sums = np.cumsum(helds[index].sizes[frames], dtype=np.int64)
                            frames = frames[: int(np.searchsorted(sums, still)) + 1]
                        self._drop(kept[index], helds[index], frames, done, reason, dry=dry)
                        spare.add(index)  # what could not go of it now is not asked for again
                # Where nothing can go, as the kernel reads it all by itself, choosing layer by layer would take minutes.
                times = times * 2 if wanted - done.size == missing else 1
        return done

    def _tidy(self, entry: Entry, held: Held) -> None:
        """Give back what is on disk without a mark, where there is much of it."""
        marked = int(held.sizes[held.states != MISSING].sum(dtype=np.int64))
        if entry.allocated <= marked + marked // 16 + _SLACK:
            return
        try:
            with self._store(entry) as store, contextlib.ExitStack() as stack:
                if entry.opened is not None:
                    evict.tidy(store, entry.opened.presence, entry.opened.contents, self._guard(entry.opened))
                elif stack.enter_context(store.alone()):
                    presence = Presence.open(entry.path, held.sizes, int(held.sizes.sum(dtype=np.int64)), look=False)
                    stack.callback(presence.close)
                    evict.tidy_alone(store, presence, [0, *np.cumsum(held.sizes, dtype=np.int64).tolist()], Guard())
        except (OSError, WeenvError) as error:
            log.warning("cached data cannot be given back", extra={"layer": entry.digest, "error": str(error)})

    def _held(self, entry: Entry, before: float) -> Held | None:
        """What there is of a layer. With ``before`` every frame is as old as can be, or, used since then, of age 0."""
        layer = entry.opened
        if layer is None:
            found = table(entry.path)
            states = None if found is None else frame_states(entry.path, *found)
            if found is None or states is None:
                return None
            sizes, marks = found[0], np.frombuffer(bytes(states), np.uint8)
            ages = np.full(len(sizes), self._age(entry.used_at), np.uint8)
        else:
            sizes = np.diff(np.asarray(layer.contents, dtype=np.int64)).astype(np.uint32)
            marks = np.frombuffer(bytes(layer.presence.states), np.uint8)
            touched = np.frombuffer(bytes(layer.touched), np.uint8)
            ages = np.frombuffer(bytes(layer.ages), np.uint8)
            ages = np.where(touched != 0, 0, np.minimum(ages, OLDEST - 1) + 1).astype(np.uint8)
        if before:
            old = entry.used_at < before or ages > self._age(before)
            ages = np.where(np.broadcast_to(old, len(sizes)), OLDEST, 0).astype(np.uint8)
        return Held(sizes, marks, ages)

    @contextlib.contextmanager
    def _store(self, entry: Entry) -> Iterator[DataStore]:
        if entry.opened is not None:
            yield entry.opened.store
            return
        store = DataStore.open(f"{entry.path}/data", os.stat(f"{entry.path}/data").st_size)
        try:
            yield store
        finally:
            store.close()

    def _drop(self, entry: Entry, held: Held, frames: NDArray[np.int64], done: Evicted, reason: str, *, dry: bool) -> None:
        if dry:
            found = Dropped(len(frames), int(held.sizes[frames].sum(dtype=np.int64)))
            try:
                with self._store(entry) as store, store.alone() as alone:
                    if alone:
                        done.add(entry.digest, found)
                    else:
                        done.add(entry.digest, Dropped(why="mounted"))
                        _count(done.refused, entry.digest, found)
            except (OSError, WeenvError) as error:
                log.debug("cached data cannot be looked at", extra={"layer": entry.digest, "error": str(error)})
            return
        reason = "unused" if held.unused and reason in ("size", "disk") else reason
        try:
            with self._store(entry) as store:
                drop = self._drop_open if entry.opened is not None else self._drop_closed
                for one in drop(entry, store, held, list(_batches(frames, held.sizes))):
                    self._count(entry, one, reason, done)
                    if one.why and not one.frames:
                        break
        except (OSError, WeenvError) as error:
            log.warning("cached data cannot be evicted", extra={"layer": entry.digest, "error": str(error)})
            return
        if os.path.exists(f"{entry.path}/{EVICT}") and not is_complete(entry.path):
            with contextlib.suppress(OSError):  # the wish is looked at again with the next eviction
                os.unlink(f"{entry.path}/{EVICT}")

    def _drop_open(
        self, entry: Entry, store: DataStore, _held: Held, batches: Sequence[NDArray[np.int64]]
    ) -> Iterator[Dropped]:
        layer = entry.opened
        assert layer is not None
        guard = self._guard(layer)
        for batch in batches:
            done = evict.drop(store, layer.presence, layer.contents, batch, guard)
            if done.frames:
                layer.evicted([frame for frame in batch.tolist() if layer.presence.states[frame] == MISSING])
            yield done

    def _drop_closed(
        self, entry: Entry, store: DataStore, held: Held, batches: Sequence[NDArray[np.int64]]
    ) -> Iterator[Dropped]:
        contents = [0, *np.cumsum(held.sizes, dtype=np.int64).tolist()]
        with contextlib.ExitStack() as stack:
            presence: Presence | None = None
            for batch in batches:
                with store.alone() as alone:
                    if not alone:
                        yield Dropped(why="mounted")
                        return
                    if presence is None:  # only now: nobody else has the layer open, and the file may be written anew
                        presence = Presence.open(entry.path, held.sizes, contents[-1], look=False)
                        stack.callback(presence.close)
                    done = evict.drop_alone(store, presence, contents, batch, Guard())
                yield done

    def _count(self, entry: Entry, one: Dropped, reason: str, done: Evicted) -> None:
        done.add(entry.digest, one)
        if one.frames:
            self.evicted_frames[reason] = self.evicted_frames.get(reason, 0) + one.frames
            self.evicted_bytes[reason] = self.evicted_bytes.get(reason, 0) + one.size
            if entry.opened is not None:
                entry.opened.tally.evicted += one.size

    # -- layers that the kernel reads by itself ---------------------------------------------------------------------------

    def ask(self, evicted: Evicted, wanted: int, among: Sequence[Entry] | None = None) -> list[str]:
        """Have the snapshotter mount complete layers over blobfs: they can be evicted once their present users are gone.

        Those that an eviction was refused because something else has ``data`` open, the least recently used first, until
        they hold ``wanted`` bytes. Returns which were asked for now. ``among`` is what :meth:`entries` gave a moment ago.
        """
        asked = []
        for entry in sorted(self.entries() if among is None else among, key=lambda entry: entry.used_at):
            if wanted <= 0:
                break
            refused = evicted.layers.get(entry.digest)
            if refused is None or refused.why != "mounted" or entry.discarded or not is_complete(entry.path):
                continue
            wanted -= entry.allocated
            if not os.path.exists(f"{entry.path}/{EVICT}"):
                with contextlib.suppress(OSError), open(f"{entry.path}/{EVICT}", "w"):  # asked again in the next round
                    asked.append(entry.digest)
        return asked

    def withdraw(self) -> int:
        """There is room again: complete layers may be read by the kernel itself. Returns how many had been asked for."""
        count = 0
        for digest in self.dirs.known():
            with contextlib.suppress(OSError):  # there is none
                os.unlink(self.dirs.file(digest, EVICT))
                count += 1
        return count

    # -- what the snapshotter knows ---------------------------------------------------------------------------------------

    def modes(self) -> dict[str, dict[int, str]]:
        """How the snapshotter has the layers mounted that it knows, by digest and, as a layer may be mounted in several
        variants, by the name of the mount point below ``<root>/m``."""
        found: dict[str, dict[int, str]] = {}
        with contextlib.suppress(StorageError, sqlite3.Error), contextlib.closing(self._metastore()) as store:
            for layer in store.layers():
                found.setdefault(layer.digest, {})[layer.id] = layer.mode
        return found

    def _metastore(self) -> Metastore:
        return Metastore(os.path.join(self.root, "metastore.db"), readonly=True)


def _disk(path: str) -> Disk:
    """The one that ``path`` is on, or would be. Raises OSError."""
    while True:
        try:
            return Disk.of(path)
        except FileNotFoundError:
            above = os.path.dirname(path)
            if above in ("", path):
                raise
            path = above


def _bytes(array: bytearray) -> NDArray[np.uint8]:
    return np.frombuffer(array, np.uint8)


def _is(path: str, identity: tuple[int, int]) -> bool:
    try:
        found = os.stat(path)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == identity


def _batches(frames: NDArray[np.int64], sizes: NDArray[np.uint32]) -> Iterator[NDArray[np.int64]]:
    """``frames`` ascending, in pieces of no more than a batch."""
    frames = np.sort(frames)
    group = np.cumsum(sizes[frames], dtype=np.int64) // _BATCH_BYTES
    edges = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(frames)]
    for low, high in itertools.pairwise(edges):
        for start in range(low, high, _BATCH_FRAMES):
            yield frames[start : min(start + _BATCH_FRAMES, high)]


def unmatched(prefixes: Collection[str], known: Collection[str]) -> list[str]:
    """Those of ``prefixes`` that none of the digests ``known`` begins with."""
    return [prefix for prefix in prefixes if not any(digests.hex_of(digest).startswith(prefix) for digest in known)]
