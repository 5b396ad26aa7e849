"""Taking frames out of ``data`` again: which ones, and how no reader ever sees a hole.

:func:`choose` decides on plain data. :func:`drop` carries it out for one layer. Its order is what makes it safe
(docs/concurrency/cache.md has the long form):

1. the *lease* (:meth:`DataStore.alone`): no kernel mount and no other object reads or opens ``data`` until the end;
2. the frames are marked missing, in memory and in ``present``; whoever asks for one from now on fetches it;
3. ``present`` is synced where a mark was durable: after a power cut no mark may be there whose frame is not;
4. wait until every read that may have looked at the marks before that is over (``quiet``);
5. with no frame being written: frames that a reader waits for get their mark back, the others are punched out, except
   those that were fetched again meanwhile.

Killed between any two steps, it leaves frames that are there without a mark, which costs a fetch and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from weenv.core.errors import StorageError
from weenv.plugin.snapshotter.cache.present import DURABLE, MISSING, Presence
from weenv.plugin.snapshotter.cache.store import DataStore

OLDEST = 255
"""The greatest age that a frame's byte can hold."""


@dataclass(frozen=True, slots=True)
class Held:
    """What is on disk of one layer, as :func:`choose` sees it.

    ``sizes`` are the frames' content sizes in bytes, ``states`` those of cache/present.py, ``ages`` one byte a frame: how
    many periods ago it was read last. ``unused``: no snapshot has the layer. ``used_at``: seconds, on any clock that all
    share.
    """

    sizes: NDArray[np.uint32]
    states: NDArray[np.uint8]
    ages: NDArray[np.uint8]
    unused: bool = False
    used_at: float = 0.0


@dataclass(slots=True)
class Dropped:
    """What :func:`drop` has done: frames punched out, their content bytes, and why nothing was, where nothing was."""

    frames: int = 0
    size: int = 0
    why: str = ""
    """Empty, ``mounted`` (the kernel or somebody else has ``data`` open), ``busy``, ``disk`` or ``unsupported``."""


def choose(
    layers: Sequence[Held], wanted: int, *, youngest: int = 0, spare: Collection[int] = ()
) -> list[tuple[int, NDArray[np.int64]]]:
    """Which frames to take out so that ``wanted`` bytes go: (index of the layer, frame numbers) in the order to do it.

    Layers that no snapshot has go first and whole, then the frames not read for longest, never one whose age is less than
    ``youngest``. Layers whose index is in ``spare`` are left alone. May come to less than ``wanted`` where that is all.
    """
    found: list[tuple[int, NDArray[np.int64]]] = []
    order = sorted((index for index in range(len(layers)) if index not in spare), key=lambda index: layers[index].used_at)
    rest: list[tuple[int, NDArray[np.int64]]] = []
    total = 0
    for index in order:
        layer = layers[index]
        there = np.flatnonzero((layer.states != MISSING) & (layer.ages >= (0 if layer.unused else youngest)))
        if not len(there):
            continue
        if not layer.unused:
            rest.append((index, there))
        elif total < wanted:
            found.append((index, there))
            total += int(layer.sizes[there].sum(dtype=np.int64))
    if total >= wanted:
        return found
    weight = np.zeros(OLDEST + 1)
    for index, there in rest:
        weight += np.bincount(layers[index].ages[there], layers[index].sizes[there], OLDEST + 1)
    older = np.cumsum(weight[::-1])[::-1]  # older[a]: bytes in frames of age a or more
    enough = np.flatnonzero(older >= wanted - total)
    limit = int(enough[-1]) if len(enough) else 0
    for index, there in rest:
        frames = there[layers[index].ages[there] > limit]
        if len(frames):
            found.append((index, frames))
            total += int(layers[index].sizes[frames].sum(dtype=np.int64))
    for index, there in rest:  # of the age at the edge only as many as are needed
        if total >= wanted:
            break
        frames = there[layers[index].ages[there] == limit]
        sums = np.cumsum(layers[index].sizes[frames], dtype=np.int64)
        count = min(len(frames), int(np.searchsorted(sums, wanted - total)) + 1)
        if count:
            found.append((index, frames[:count]))
            total += int(sums[count - 1])
    return found


def age(ages: NDArray[np.uint8], touched: NDArray[np.uint8], states: NDArray[np.uint8]) -> None:
    """One period is over: what was read in it is of age 0, everything else is older by one. In place; clears ``touched``.

    A read that is noted while this runs may be forgotten: that frame is older than it should be, by one period.
    """
    np.add(ages, 1, out=ages, where=ages < OLDEST)
    ages[(touched != 0) | (states == MISSING)] = 0
    touched[:] = 0


@dataclass(slots=True)
class Guard:
    """What :func:`drop` must know of those who use the layer in this process; the default is that nobody does.

    ``writing`` is held by whoever writes a frame and marks it. ``in_use`` are frames that somebody counts on being in
    ``data``. ``quiet`` waits until no read is under way that began before the call; False where one does not end.
    """

    writing: contextlib.AbstractContextManager[object] = field(default_factory=contextlib.nullcontext)
    in_use: Callable[[], Collection[int]] = frozenset
    quiet: Callable[[], bool] = lambda: True


def drop(
    store: DataStore, presence: Presence, contents: Sequence[int], frames: NDArray[np.int64], guard: Guard | None = None
) -> Dropped:
    """Punch ``frames`` out of ``data``. Blocks on the disk; must not be called by who holds ``guard.writing``.

    ``contents`` are the frames' offsets in the stream, n + 1 of them. Raises nothing for the disk's sake: see ``why``.
    """
    with store.alone() as alone:
        return drop_alone(store, presence, contents, frames, guard or Guard()) if alone else Dropped(why="mounted")


def drop_alone(
    store: DataStore, presence: Presence, contents: Sequence[int], frames: NDArray[np.int64], guard: Guard
) -> Dropped:
    """:func:`drop` for who has the lease already."""
    if not presence.reload():
        return Dropped(why="disk")
    states = presence.states
    busy = guard.in_use()
    marked = [frame for frame in frames.tolist() if states[frame] != MISSING and frame not in busy]
    if not marked:
        return Dropped(why="busy")
    durable = any(states[frame] == DURABLE for frame in marked)
    presence.lose(marked)
    safe = presence.sync() if durable else presence.persistent
    quiet = safe and guard.quiet()
    with guard.writing:
        return _punch(store, presence, contents, marked, guard.in_use(), quiet, safe)


def _punch(
    store: DataStore, presence: Presence, contents: Sequence[int], marked: list[int], busy: Collection[int],
    quiet: bool, safe: bool,
) -> Dropped:  # fmt: skip
    states = presence.states
    gone = [frame for frame in marked if states[frame] == MISSING and frame not in busy] if quiet else []
    done = Dropped(why="" if gone else "busy" if safe else "disk")
    left = {frame for frame in marked if states[frame] == MISSING}
    for begin, end, run in holes(states, contents, gone, busy, store.block_size()):
        if not store.undisturbed():
            done.why = "mounted"
            break
        try:
            if begin < end:
                store.punch(begin, end)
        except StorageError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                done.why = "unsupported"
                break
            done.why = "disk"  # it may have punched a part: the frames are missing then
        else:
            done.frames += len(run)
            done.size += contents[run.stop] - contents[run.start]
        left.difference_update(run)
    for frame in left:
        presence.mark(frame)  # its bytes are there still
    return done


def tidy(store: DataStore, presence: Presence, contents: Sequence[int], guard: Guard | None = None) -> int:
    """Give back what ``data`` holds where no frame is marked; returns how many bytes of disk that were.

    A process that is killed after it has written a frame and before it has marked it leaves such, and a reboot voids marks.
    Raises :class:`StorageError`.
    """
    with store.alone() as alone:
        return tidy_alone(store, presence, contents, guard or Guard()) if alone else 0


def tidy_alone(store: DataStore, presence: Presence, contents: Sequence[int], guard: Guard) -> int:
    """:func:`tidy` for who has the lease already."""
    if not presence.reload() or not guard.quiet():
        return 0
    before = store.allocated()
    with guard.writing:
        busy = guard.in_use()
        gone = [frame for frame, state in enumerate(presence.states) if state == MISSING and frame not in busy]
        for begin, end, _ in holes(presence.states, contents, gone, busy, store.block_size()):
            if not store.undisturbed():
                break
            if begin < end and store.has_data(begin, end):
                store.punch(begin, end)
    return max(0, before - store.allocated())


def holes(
    states: bytes | bytearray, contents: Sequence[int], gone: Sequence[int], busy: Collection[int], block: int
) -> list[tuple[int, int, range]]:
    """What to punch so that the frames ``gone`` (ascending) go: (first byte, end, frames), whole blocks only.

    A frame seldom begins with a disk block. A block at either end of a run goes with it where all the frames that share it
    are missing, and none of them is in ``busy``; else it stays, until its other frame goes. ``end <= first`` where that
    leaves nothing.
    """
    count = len(states)

    def missing(frame: int) -> bool:
        return states[frame] == MISSING and frame not in busy

    found = []
    position = 0
    while position < len(gone):
        first = gone[position]
        stop = first + 1
        position += 1
        while position < len(gone) and gone[position] == stop:
            stop += 1
            position += 1
        begin, end = contents[first], contents[stop]
        low, high = begin // block * block, -(-end // block) * block
        before = first
        while before > 0 and contents[before] > low and missing(before - 1):
            before -= 1
        after = stop
        while after < count and contents[after] < high and missing(after):
            after += 1
        begin = low if contents[before] <= low else low + block
        end = high if contents[after] >= high or after == count else high - block
        found.append((begin, end, range(first, stop)))
    return found
