"""The layers that blobfs serves: found by name in the layer directories, opened when read, closed when idle.

A node id stands for a layer digest for as long as the mount lives (the holder remembers it), so nothing that the kernel
holds ever goes stale. The open :class:`Layer` behind it comes and goes: descriptors are closed when the last thread that
uses the object drops it, not by anybody's order.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from weenv.core import digest as digests
from weenv.core.errors import FormatError, StorageError, VerificationError, WeenvError
from weenv.layer.profile import Run
from weenv.layer.tail import FrameIndex
from weenv.plugin.snapshotter.blobfs import wire
from weenv.plugin.snapshotter.cache.present import BAD, Presence, lost_frames
from weenv.plugin.snapshotter.cache.reads import Reads
from weenv.plugin.snapshotter.cache.store import DataStore, hold
from weenv.plugin.snapshotter.cache.tables import IN_MEMORY, ON_DISK, MappedFrames, give_back, spool
from weenv.plugin.snapshotter.cache.tally import Tallies, Tally
from weenv.plugin.snapshotter.fetch.flight import FetchLayer
from weenv.plugin.snapshotter.fetch.planner import Extents, ReadAhead
from weenv.plugin.snapshotter.layerdir import LayerDirs, LayerSource, Origin
from weenv.registry.source import BlobSource

log = logging.getLogger(__name__)

FIRST_NODE: Final = 2
"""The root is node 1."""
_BASE: Final = 12 << 10
"""Bytes of memory that an open layer takes whatever its size: objects, sources, two descriptors."""
_ROOM: Final = 10.0
"""Seconds that a layer waits to be opened while all others are busy and take too much memory."""
_QUIET: Final = 10.0
"""Seconds between log lines of the same kind about the same layer."""

ReadTail = Callable[[bytes, LayerSource], FrameIndex]
"""What a layer's tail says of its stream; the tail's digest is checked first (VerificationError). Raises FormatError."""
OpenSources = Callable[[LayerSource, Sequence[Origin]], list[BlobSource]]
"""The sources of a blob at these of its origins, in the order to try them; those that cannot be opened are left out."""
CloseSources = Callable[[list[BlobSource]], None]
"""Called, in any thread, with the sources of a layer that is no longer in use."""


class DamagedTail(StorageError):
    """The stored tail of the layer at ``path`` is not what it was: it must be fetched again from ``source``'s origins."""

    def __init__(self, path: str, source: LayerSource, reason: str, *, errno: int = 0) -> None:
        super().__init__(f"{path}/toc: {reason}", errno=errno)
        self.path = path
        self.source = source


class BadLayer(FormatError):
    """The whole stream of a layer does not have the diffID that its TOC promises, or the disk does not keep it."""


def why_bad(diff_id: str, *, pieces: bool = False) -> str:
    """What a BAD ``present`` file says of a layer; ``pieces``: it is in another format, whose diffID nobody knows."""
    if pieces:
        return "the disk has changed its data twice"
    return f"its content does not have the diffID {diff_id}"


class Layer(FetchLayer):
    """An open layer: what the fetcher needs, and what serving reads needs."""

    def __init__(
        self, source: LayerSource, path: str, index: FrameIndex, presence: Presence, store: DataStore,
        sources: list[BlobSource], identity: tuple[int, int], close_sources: CloseSources = lambda _: None,
        tally: Tally | None = None, reads: Reads | None = None,
    ) -> None:  # fmt: skip
        super().__init__(digests.hex_of(source.digest)[:12], index.frames, presence, store, sources)
        if tally is not None:
            self.tally = tally
        self.source = source
        self.path = path
        self.size = index.stream_size
        self.diff_id = index.diff_id
        self.identity = identity
        """Device and inode of the layer's directory: another directory of the same name is another cache."""
        self.read_ahead = ReadAhead(self.starts, presence.states, self.flights.__contains__)
        self.touched = bytearray(len(presence))
        """A byte for each frame: 1 where it was read since the last period of the cache's clock ended (cache/evict.py)."""
        self.ages = bytearray(len(presence))
        """... and how many periods ago it was read, as of then. Belongs to whoever evicts."""
        self.reads = reads if reads is not None else Reads(None, len(presence))
        """Which frames have ever been read, for who makes a profile."""
        self._followed: tuple[list[int], list[int]] = [], []
        """First frames of the runs of the profile that is followed, ascending, and the frames after their last."""
        self._close_sources = close_sources
        self.last_used = 0.0
        self.first_used = 0.0
        self.extents_asked = False
        self.healed_at = 0.0

    @property
    def digest(self) -> str:
        """The blob's digest."""
        return self.source.digest

    def foresees(self, frame: int, *, absent: bool) -> bool:
        """Whether the layer's profile has brought ``frame``, or is bringing it: then it says what comes next as well, and
        nothing is to be guessed."""
        firsts, ends = self._followed
        place = bisect_right(firsts, frame) - 1
        return place >= 0 and frame < ends[place] and (not absent or frame in self.flights)

    @property
    def profiled(self) -> bool:
        """A profile says what is needed of it, and is followed."""
        return bool(self._followed[0])

    def follow(self, runs: Iterable[Run]) -> None:
        """A profile of these runs, no frame in two of them, says what is needed."""
        ordered = sorted((run.first, run.end) for run in runs)
        self._followed = [first for first, _ in ordered], [end for _, end in ordered]

    def evicted(self, frames: Sequence[int]) -> None:
        """These are missing again: read-ahead takes whoever asks for them for a new reader."""
        self.read_ahead.evicted(frames)
        self.prefetched.difference_update(frames)

    @property
    def memory(self) -> int:
        """About how many bytes of memory it takes to have it open."""
        mapped, pieces = isinstance(self.frames, MappedFrames), self.frames.pieces
        tables = (ON_DISK if mapped else IN_MEMORY) * len(self.presence)
        if pieces is not None and not mapped:
            tables += 52 * len(pieces)
        return _BASE + tables + self.read_ahead.extents.memory

    @property
    def busy(self) -> bool:
        """True while it must stay open: frames are on their way, or are stored and not synced yet."""
        return bool(self.flights) or self.presence.volatile > 0

    def take_back(self, frames: Sequence[int] | range, error: object) -> None:
        """``data`` cannot be read where ``frames`` are, or is too short: what it lacks is missing now. In any thread."""
        count = self.presence.lose(frames)
        if self.store.short():  # all that was cut off, before the file has its length again and reads as zeros there
            count += self.presence.lose(lost_frames(self.store.fd, self.frames.content_sizes, self.presence.states))
            self.store.mend()
        self.went_wrong("damage", error)
        now = time.monotonic()
        if now - self.healed_at > _QUIET:
            self.healed_at = now
            log.error(
                "cached data cannot be read and is fetched again",
                extra={"layer": self.name, "frames": count, "error": str(error), "hint": "look at the disk"},
            )

    @property
    def complete(self) -> bool:
        """True where every frame is in ``data``."""
        return self.presence.missing == 0

    def sync(self) -> int:
        """Make what was fetched survive a power cut; returns how many frames became durable. Blocks on the disk."""
        if self.store.short():
            self.take_back((), "data has been cut")
        if not self.presence.persistent:
            self.presence.persist()
        frames = self.presence.volatile_frames()
        if frames:
            self.store.sync()
            self.presence.make_durable(frames)
        return len(frames)

    def __del__(self) -> None:
        if (ahead := getattr(self, "read_ahead", None)) is not None:  # None: it could not be made
            ahead.forget()
        if (reads := getattr(self, "reads", None)) is not None:
            reads.close()
        self.presence.close()
        self.store.close()
        self._close_sources(self.sources)


class Node:
    """A node id and its layer, open or not."""

    __slots__ = ("attributes", "digest", "layer", "name", "nodeid", "size")

    def __init__(self, nodeid: int, name: str) -> None:
        self.nodeid = nodeid
        self.name = name
        self.digest = "sha256:" + name
        self.layer: Layer | None = None
        self.size = -1
        self.attributes = b""

    def opened(self, layer: Layer) -> None:
        """Take ``layer`` in use."""
        self.size = layer.size
        self.attributes = wire.attributes(self.nodeid, wire.S_IFREG | 0o400, layer.size)
        self.layer = layer


class LayerTable:
    """All nodes. Look-ups of known nodes take no lock; changes take ``lock``, which is held over opening a layer.

    ``remember`` is called with a new node's id and name before anybody learns of it. While open layers take more than
    ``memory_max`` bytes of memory, those that were not read for longest and are not busy are closed; ``over`` is called
    where that does not help, so that somebody syncs them. At twice that no further one is opened. ``record``: note in the
    layers' directories what is read of them (cache/reads.py).
    """

    def __init__(
        self, dirs: LayerDirs, read_tail: ReadTail, open_sources: OpenSources,
        remember: Callable[[int, str], None] = lambda _id, _name: None,
        *, make_read_ahead: Callable[[Layer], ReadAhead] | None = None, close_sources: CloseSources = lambda _: None,
        memory_max: int = 256 << 20, over: Callable[[], None] = lambda: None, record: bool = True,
    ) -> None:  # fmt: skip
        self.memory_max = memory_max
        self.record = record
        self.over = over
        self.bad: dict[str, str] = {}
        """Layers that are not served because of what is in them, and why; by digest."""
        self.dirs = dirs
        self.nodes: dict[int, Node] = {}
        self.remember = remember
        self._names: dict[str, Node] = {}
        self.tallies = Tallies(self._is_open)
        self._lock = threading.Lock()
        self._read_tail = read_tail
        self._open_sources = open_sources
        self._make_read_ahead = make_read_ahead
        self._close_sources = close_sources

    def restore(self, nodes: dict[int, str]) -> None:
        """Take over the nodes of an earlier server."""
        with self._lock:
            for nodeid, name in nodes.items():
                self.nodes[nodeid] = self._names[name] = Node(nodeid, name)

    def lookup(self, name: bytes) -> Node | None:
        """The node of a layer, opened; None for anything that is no layer here. Raises WeenvError where it is broken."""
        try:
            text = name.decode("ascii")
            digests.from_hex(text)
        except (UnicodeDecodeError, WeenvError):
            return None
        with self._lock:
            node = self._names.get(text)
            if node is not None and node.layer is not None and self._current(node.layer):
                return node
            layer = self._open(text)
            if layer is None:
                return None
            if node is None:
                node = Node(max(self.nodes, default=FIRST_NODE - 1) + 1, text)
                self.remember(node.nodeid, text)
            node.opened(layer)
            self._names[text] = node
            self.nodes[node.nodeid] = node
            self.trim(keep=layer)
            return node

    def reopen(self, node: Node, *, fresh: bool) -> Layer | None:
        """The open layer of a known node; None where its directory is gone. Raises WeenvError where it is broken.

        ``fresh``: make sure that it is the directory which is there now (OPEN), not one that was discarded meanwhile.
        """
        layer = node.layer
        if layer is not None and (not fresh or self._current(layer)):
            return layer
        with self._lock:
            layer = node.layer
            if layer is not None and (not fresh or self._current(layer)):
                return layer
            found = self._open(node.name) or (layer if layer is not None else self._open_discarded(node.name))
            if found is not None and found is not layer:
                node.opened(found)
                self.trim(keep=found)
            return found

    def holds(self, layer: Layer) -> bool:
        """Whether ``layer`` is what its digest's readers are served from, and its directory is in its place."""
        node = self._names.get(digests.hex_of(layer.digest))
        return node is not None and node.layer is layer and self._current(layer)

    def open_layers(self) -> list[Layer]:
        """The layers that are open now."""
        return [layer for node in list(self.nodes.values()) if (layer := node.layer) is not None]

    def close_idle(self, before: float) -> int:
        """Close layers that nobody has read since ``before`` (``time.monotonic()``); returns how many."""
        count = 0
        for node in list(self.nodes.values()):
            layer = node.layer
            if layer is not None and layer.last_used < before and not layer.busy:
                node.layer = None
                count += 1
        return count

    def _is_open(self, digest: str) -> bool:
        node = self._names.get(digests.hex_of(digest))
        return node is not None and node.layer is not None

    def memory(self) -> int:
        """About how many bytes of memory the open layers take."""
        return sum(layer.memory for layer in self.open_layers())

    def trim(self, keep: Layer | None = None) -> int:
        """Close the least recently used layers until the rest fit in ``memory_max``; returns how many were closed."""
        found = [(layer.last_used, node, layer) for node in list(self.nodes.values()) if (layer := node.layer) is not None]
        total = sum(layer.memory for _, _, layer in found)
        count = 0
        if total <= self.memory_max:
            return 0
        for _, node, layer in sorted(found, key=lambda item: item[0]):
            if layer is keep or layer.busy or node.layer is not layer:
                continue
            node.layer = None
            count += 1
            total -= layer.memory
            if total <= self.memory_max:
                return count
        self.over()
        return count

    def fit(self, layer: Layer) -> bool:
        """Read-ahead's tables of ``layer`` have just been loaded: where they are too much for ``memory_max``, it does without.

        A TOC of four million files, which nobody made in order to be read, has some 160 MB of them, an image a hundred layers.
        """
        self.trim(keep=layer)
        if self.memory() <= self.memory_max:
            return True
        size = layer.read_ahead.extents.memory
        layer.read_ahead.extents = Extents.none()
        log.warning(
            "no read-ahead for a layer: the tables of open layers take all the memory that they may",
            extra={"layer": layer.name, "bytes": size, "hint": "raise [blobfs] layers_memory, if the image is worth it"},
        )
        return False

    def refuse(self, layer: Layer, reason: str) -> None:
        """Serve ``layer`` no more: its presence file says BAD, so it will not be opened again either."""
        self.bad[layer.source.digest] = reason
        for node in list(self.nodes.values()):
            if node.layer is layer:
                node.layer = None

    def refresh(self, layer: Layer) -> None:
        """Take in origins that have been added to ``source.json`` since the layer was opened."""
        try:
            with open(os.path.join(layer.path, "source.json"), "rb") as file:
                source = LayerSource.from_json(file.read(1 << 20))
        except (OSError, FormatError):
            return
        fresh = [origin for origin in source.origins if origin not in layer.source.origins]
        layer.source = source
        if fresh:
            layer.sources.extend(self._open_sources(source, fresh))

    def _current(self, layer: Layer) -> bool:
        """Is it the directory at the layer's own path that ``layer`` was opened from? One in the trash is not."""
        try:
            found = os.stat(self.dirs.path(layer.source.digest))
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == layer.identity

    def _await_room(self, name: str) -> None:
        """Before another layer is opened: where those that are open take twice what they may, and all of them are busy, wait
        until some are synced and closed. Raises StorageError where that takes too long. Locked, so one waits for all.
        """
        end = time.monotonic() + _ROOM
        while self.memory() > 2 * self.memory_max:
            self.trim()  # says so where it does not help
            if time.monotonic() > end:
                raise StorageError(
                    f"the layer {name[:12]} is not opened: those that are open take {self.memory()} bytes of memory",
                    errno=errno.ENOMEM,
                    hint="raise [blobfs] layers_memory, or remove the image whose layers have millions of frames",
                )
            time.sleep(0.02)

    def _open(self, name: str) -> Layer | None:
        self._await_room(name)
        return self._open_at(self.dirs.path("sha256:" + name), name)

    def _open_discarded(self, name: str) -> Layer | None:
        """A layer that was discarded while in use, after a restart: it is still in the trash, or it is lost."""
        try:
            names = os.listdir(self.dirs.trash)
        except OSError:
            return None
        for candidate in names:
            if candidate.startswith(name + "-") and (layer := self._open_at(os.path.join(self.dirs.trash, candidate), name)):
                return layer
        return None

    def _open_at(self, path: str, name: str) -> Layer | None:
        try:
            found = os.stat(path)
            with open(os.path.join(path, "source.json"), "rb") as file:
                source = LayerSource.from_json(file.read(1 << 20))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}", errno=error.errno or 0) from error
        if source.digest != "sha256:" + name:
            raise FormatError(f"{path}/source.json is about {source.digest}")
        index = self._read_index(path, source)
        if index is None:
            return None
        # The present file is looked at first: creating ``data`` anew must not make an old one look valid.
        with hold(os.path.join(path, "data")):  # nothing is punched out between the two
            presence = Presence.open(path, index.frames.content_sizes, index.stream_size)
            store = self._open_data(path, index, presence, source)
        sources = self._open_sources(source, source.origins)
        identity = (found.st_dev, found.st_ino)
        tally = self.tallies.of(source.digest)
        reads = Reads(path if self.record else None, len(presence))
        layer = Layer(source, path, index, presence, store, sources, identity, self._close_sources, tally, reads)
        if presence.damage:
            log.error("cached data is damaged and is fetched again", extra={"layer": layer.name, "error": presence.damage})
            layer.went_wrong("damage", presence.damage)
        if self._make_read_ahead is not None:
            layer.read_ahead = self._make_read_ahead(layer)
        layer.last_used = time.monotonic()
        if isinstance(layer.frames, MappedFrames):
            give_back()
        return layer

    def _open_data(self, path: str, index: FrameIndex, presence: Presence, source: LayerSource) -> DataStore:
        if presence.verdict == BAD:
            presence.close()
            reason = self.bad[source.digest] = why_bad(index.diff_id, pieces=source.foreign is not None)
            hint = "whoever published it must mend it" if source.foreign is None else "look at the disk, too"
            raise BadLayer(reason, member=source.digest, hint=f"remove the image; {hint}")
        self.bad.pop(source.digest, None)
        return DataStore.open(os.path.join(path, "data"), index.stream_size)

    def _read_index(self, path: str, source: LayerSource) -> FrameIndex | None:
        """The layer's frames from its stored tail; None where the directory is gone. Raises DamagedTail, WeenvError."""
        try:
            with open(os.path.join(path, "toc"), "rb") as file:
                tail = file.read(source.toc_length + 1)
            index = self._read_tail(tail, source)
        except FileNotFoundError:
            if not os.path.exists(os.path.join(path, "source.json")):
                return None  # discarded this moment
            raise DamagedTail(path, source, "it is gone", errno=errno.EIO) from None
        except OSError as error:
            raise DamagedTail(path, source, error.strerror or str(error), errno=errno.EIO) from error
        except VerificationError as error:
            raise DamagedTail(path, source, str(error), errno=errno.EIO) from error
        return FrameIndex(spool(index.frames, path), index.stream_size, index.diff_id)
