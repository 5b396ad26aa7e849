"""The protocol core: what each request of snapshots.v1 does, without gRPC.

Snapshots go through these states; a request that finds another state is refused (:data:`TRANSITIONS`):

=========  ==========  ===========  ================================================================
request    from        to           what happens
=========  ==========  ===========  ================================================================
Prepare    -           active       directory <root>/s/<id> with ``fs`` and ``work``
Prepare    -           committed    label snapshot.ref, and the layer is lazy: mounted, committed, ALREADY_EXISTS
View       -           view         nothing but a row (an empty ``fs`` without parent)
Commit     active      committed    new name, new labels, usage measured
Remove     any         -            a row less; directory or mount go in Cleanup
=========  ==========  ===========  ================================================================

Whatever decides is synchronous: between the look-up and the write of a row there is no ``await``, so two requests cannot
come between each other, and a request cancelled at any ``await`` has changed nothing, or has made a row that containerd
finds with List and collects. Semantics and error kinds are those of containerd's overlayfs snapshotter.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sqlite3
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from weenv.core.aio import SingleFlight
from weenv.core.errors import InvalidRequest, SnapshotExists, SnapshotInUse, SnapshotNotFound, StorageError, UnavailableError
from weenv.plugin.containerd.types import LABEL_NOT_LAZY, LABEL_SNAPSHOT_REF, Kind, Mount, SnapshotInfo, Usage
from weenv.plugin.snapshotter import disk
from weenv.plugin.snapshotter.filters import compile_filters
from weenv.plugin.snapshotter.idmap import LABEL_GID_MAPPING, LABEL_UID_MAPPING, IdMapping, MappedLowers, mapping_of
from weenv.plugin.snapshotter.lazylayers import LazyLayers, NoLazyLayers
from weenv.plugin.snapshotter.metastore import Metastore, Snapshot
from weenv.plugin.snapshotter.mounts import bind_mount, overlay_mount, overlay_options
from weenv.plugin.snapshotter.spares import SpareDirectories, make_directory

log = logging.getLogger(__name__)

TRANSITIONS: dict[tuple[str, Kind | None], Kind | None] = {
    ("Prepare", None): Kind.ACTIVE,
    ("Resolve", None): Kind.COMMITTED,
    ("View", None): Kind.VIEW,
    ("Commit", Kind.ACTIVE): Kind.COMMITTED,
    ("Remove", Kind.ACTIVE): None,
    ("Remove", Kind.VIEW): None,
    ("Remove", Kind.COMMITTED): None,
}
"""(request, state) -> state; None is "no such snapshot". ``Resolve`` is a Prepare that is answered lazily."""

_SNAPSHOT_MAX = 4 << 20
"""UTF-8 bytes that the key and the labels of one snapshot may have together: with more, List could not tell of it."""
_BLOCK_MAX = 8 << 20
"""UTF-8 bytes of keys and labels in one block of List; a message ends at 16 MiB."""
_CHAINS = 1024
"""Lower chains kept ready; one of 127 layers takes about 5 kB."""
_USAGE_TTL = 5.0
"""Seconds for which the measured usage of an active snapshot is repeated; CRI asks every 10 s for each."""


@dataclass(frozen=True, slots=True)
class _Lower:
    """The directories below a snapshot that sits on some committed one: paths (top first), joined, lazy layer ids.

    ``owners`` is empty, or holds the owner of the topmost root once it was looked up: what is committed does not change.
    """

    paths: tuple[str, ...]
    joined: str
    layers: frozenset[int]
    owners: list[tuple[int, int]]


class Snapshotter:
    """The ten requests, for one root directory. All methods belong to one event loop."""

    def __init__(
        self,
        root: str,
        store: Metastore,
        layers: LazyLayers | None = None,
        *,
        mount_options: Sequence[str] = (),
        spares: int = 0,
    ) -> None:
        self.root = root
        self.store = store
        self.layers: LazyLayers = NoLazyLayers() if layers is None else layers
        self.directory = os.path.join(root, "s")
        self._options = (*overlay_options(), *mount_options)
        self._chains: OrderedDict[int, _Lower] = OrderedDict()
        self._bases: OrderedDict[str, Snapshot] = OrderedDict()
        self._usages: dict[int, tuple[float, Usage]] = {}
        self._measuring: SingleFlight[int, Usage] = SingleFlight()
        self._walkers = ThreadPoolExecutor(2, thread_name_prefix="walk")
        self._mapped = MappedLowers(root)
        self._mapper = ThreadPoolExecutor(1, thread_name_prefix="idmap")  # one: who asks twice for a snapshot waits for himself
        self._mapping_now: Counter[int] = Counter()
        self._cleaning = asyncio.Lock()
        self.on_remove: Callable[[], None] = lambda: None
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        self._spares = SpareDirectories(self.directory, store.reserve, spares)
        self._identity = _identity(self.directory)

    def close(self) -> None:
        """Stop the helper threads. Nothing is unmounted and nothing deleted."""
        self._spares.close()
        self._walkers.shutdown(wait=False, cancel_futures=True)
        self._mapper.shutdown(wait=True, cancel_futures=True)

    def check_root(self) -> None:
        """Raises UnavailableError where the root directory is not the one that this process began with.

        SQLite would go on writing into a file that has no name any more, and everything that was answered would be gone with
        the process.
        """
        if _identity(self.directory) != self._identity:
            raise UnavailableError(
                f"the snapshotter's root {self.root} was deleted or replaced while it was served",
                hint="put it back, or restart weenv snapshotter: it begins with nothing, and images have to be pulled again",
            )

    # paths

    def _path(self, number: int, part: str) -> str:
        return f"{self.directory}/{number}/{part}"

    def _lower(self, base: Snapshot) -> _Lower:
        """The chain below a snapshot on top of ``base``; committed chains never change, so it is kept."""
        known = self._chains.get(base.id)
        if known is not None:
            self._chains.move_to_end(base.id)
            return known
        paths: list[str] = []
        layers: set[int] = set()
        for number, layer_id in self.store.chain(base.id):
            if layer_id is None:
                paths.append(self._path(number, "fs"))
            else:
                paths.append(self.layers.path(layer_id))
                layers.add(layer_id)
        lower = _Lower(tuple(paths), ":".join(paths), frozenset(layers), [])
        self._chains[base.id] = lower
        if len(self._chains) > _CHAINS:
            self._chains.popitem(last=False)
        return lower

    def _base(self, parent: str) -> Snapshot | None:
        """The committed snapshot called ``parent``; None where there is no parent."""
        if not parent:
            return None
        base = self._bases.get(parent)  # a committed row changes by update and remove only, which drop it here
        if base is not None:
            return base
        base = self.store.find(parent)
        if base is None:
            raise SnapshotNotFound(f"parent snapshot {parent!r} does not exist")
        if base.kind is not Kind.COMMITTED:
            raise InvalidRequest(f"parent snapshot {parent!r} is not committed")
        self._bases[parent] = base
        if len(self._bases) > _CHAINS:
            self._bases.popitem(last=False)
        return base

    async def _ready(self, parent: str) -> tuple[Snapshot | None, _Lower | None]:
        """Parent and chain with everything mounted; both read after the last ``await``."""
        for _ in range(3):
            base = self._base(parent)
            if base is None:
                return None, None
            lower = self._lower(base)
            if self.layers.attached(lower.layers):
                return base, lower
            await self.layers.ensure(lower.layers)
        raise UnavailableError(f"the layers below {parent!r} do not stay mounted")

    def _describe(self, kind: Kind, number: int, lower: _Lower | None, *, mapped: bool = False) -> list[Mount]:
        if lower is None:
            return [bind_mount(self._path(number, "fs"), writable=kind is Kind.ACTIVE)]
        paths: Sequence[str] = self._mapped.paths(number, len(lower.paths)) if mapped else lower.paths
        joined = ":".join(paths) if mapped else lower.joined
        if kind is Kind.ACTIVE:
            upper, work = self._path(number, "fs"), self._path(number, "work")
            return [overlay_mount(joined, self._options, upper=upper, work=work)]
        if len(paths) == 1:
            return [bind_mount(paths[0], writable=False)]
        return [overlay_mount(joined, self._options)]

    # user namespaces

    def _mapping(self, lower: _Lower | None, labels: Mapping[str, str]) -> IdMapping | None:
        """How the ids of the directories below have to be mapped, or None.

        Not where the topmost root belongs to the container's root already: a containerd that was not told that we map ids
        ("remap-ids") changes the owner of every file in a snapshot of its own first, and sends the labels all the same.
        """
        mapping = mapping_of(labels)
        if mapping is None or lower is None or self._parent_owner(lower) == mapping.root:
            return None
        return mapping

    async def _map(self, number: int, lower: _Lower, mapping: IdMapping) -> None:
        """Have the directories below a snapshot mounted with mapped ids. Raises MountError, UnavailableError."""
        loop = asyncio.get_running_loop()
        mounting = loop.run_in_executor(self._mapper, self._mapped.attach, number, lower.paths, mapping)
        self._mapping_now[number] += 1
        mounting.add_done_callback(lambda _: self._mapping_now.subtract((number,)))
        try:
            await asyncio.shield(mounting)  # a thread goes on anyhow; what it mounts for nobody is trash
        except OSError as error:
            raise UnavailableError(f"ids of the layers below cannot be mapped: {error}") from error

    async def _make(self, kind: Kind, key: str, parent: str, labels: Mapping[str, str]) -> list[Mount]:
        """A snapshot on top of ``parent``; its ids are mapped first where the labels ask for it."""
        base, lower = await self._ready(parent)
        mapping = self._mapping(lower, labels)
        if mapping is None or lower is None:
            return self._create(kind, key, base, lower, labels)
        number = self.store.reserve()
        try:
            await self._map(number, lower, mapping)
            base, lower = await self._ready(parent)
            return self._create(kind, key, base, lower, labels, mapped=number)
        except BaseException:
            self.store.add_trash([number])  # what was, or still is being mounted goes in the next cleanup
            self.on_remove()
            raise

    # requests

    async def prepare(self, key: str, parent: str, labels: Mapping[str, str]) -> list[Mount]:
        """A writable snapshot; or the lazy layer that ``labels`` ask for, then :class:`SnapshotExists` is raised."""
        _check_size(key, parent, labels)
        target = labels.get(LABEL_SNAPSHOT_REF, "")
        base, lower = await self._ready(parent)
        if target:
            if self.store.find_ref(target, parent) is not None:
                raise SnapshotExists(f"target snapshot {target!r} is there already")
            async with self.layers.resolve(labels, key, base.ref if base else "", lower.paths if lower else ()) as layer_id:
                if isinstance(layer_id, int):
                    self._commit_lazy(target, parent, labels, layer_id)
                    raise SnapshotExists(f"target snapshot {target!r} is mounted lazily")
                if layer_id is not None and _size(key, parent, told := {**labels, LABEL_NOT_LAZY: layer_id}) <= _SNAPSHOT_MAX:
                    labels = told
        elif not labels and " sha256:" in key:
            async with self.layers.resolve(labels, key, "", lower.paths if lower else ()):
                pass  # only to be told of: a client that unpacks without saying what
        elif lower is not None:
            self.layers.begins(lower.layers)
        return await self._make(Kind.ACTIVE, key, parent, labels)

    def prepare_now(self, asked: Sequence[tuple[str, str, Mapping[str, str]]]) -> list[list[Mount] | None]:
        """:meth:`prepare` for many (key, parent, labels), in one transaction, without waiting for anything.

        None for each that has to wait or is to be refused: nothing of it was done, and :meth:`prepare` does it or says why
        not. That is so for all of them where the transaction fails.
        """
        answers: list[list[Mount] | None] = [None] * len(asked)
        taken: list[int] = []
        try:
            with self.store.together():
                for place, (key, parent, labels) in enumerate(asked):
                    answers[place] = self._prepare_now(key, parent, labels, taken)
        except (sqlite3.Error, StorageError):
            for number in taken:
                self._spares.give_back(number)
            return [None] * len(asked)
        return answers

    def _prepare_now(self, key: str, parent: str, labels: Mapping[str, str], taken: list[int]) -> list[Mount] | None:
        """One of them; the id of the spare directory that it has is added to ``taken``."""
        if not key or not parent or LABEL_SNAPSHOT_REF in labels or (not labels and " sha256:" in key):
            return None
        if LABEL_UID_MAPPING in labels or LABEL_GID_MAPPING in labels:
            return None
        try:
            _check_size(key, parent, labels)
            base = self._base(parent)
            if base is None:
                return None
            lower = self._lower(base)
            if not self.layers.attached(lower.layers) or self._owner(lower, labels) != (0, 0):
                return None
            number = self._spares.take()
            if number is None:
                return None
            taken.append(number)
            try:
                self.store.add(Kind.ACTIVE, key, base.id, labels, snapshot_id=number)
            except SnapshotExists:
                self._spares.give_back(taken.pop())
                return None
        except (InvalidRequest, SnapshotNotFound, UnavailableError):
            return None
        self.layers.begins(lower.layers)
        return self._describe(Kind.ACTIVE, number, lower)

    def _commit_lazy(self, target: str, parent: str, labels: Mapping[str, str], layer_id: int) -> None:
        """Add the committed snapshot of a lazy layer, unless somebody did meanwhile. No ``await`` in here.

        It is called by its chainID, which is what another namespace asks for; the same chainID on another parent (one
        namespace unpacked the layers below, another has them lazily) gets a name of its own.
        """
        if self.store.find_ref(target, parent) is not None:
            return
        base = self._base(parent)
        number = self.store.reserve()
        name = target if self.store.find(target) is None else f"{target}@{number}"
        kept = dict(labels)
        kept[LABEL_SNAPSHOT_REF] = target
        self.store.add(Kind.COMMITTED, name, None if base is None else base.id, kept, snapshot_id=number, layer_id=layer_id)

    async def view(self, key: str, parent: str, labels: Mapping[str, str]) -> list[Mount]:
        """A read-only snapshot of ``parent``."""
        _check_size(key, parent, labels)
        return await self._make(Kind.VIEW, key, parent, labels)

    def _create(
        self,
        kind: Kind,
        key: str,
        base: Snapshot | None,
        lower: _Lower | None,
        labels: Mapping[str, str],
        *,
        mapped: int | None = None,
    ) -> list[Mount]:
        """Add it, with a directory where it needs one. ``mapped``: its id, for which the directories below are mounted."""
        if not key:
            raise InvalidRequest("a snapshot needs a key")
        made = kind is Kind.ACTIVE or lower is None
        spare = self._spares.take() if kind is Kind.ACTIVE and mapped is None else None
        number = mapped if mapped is not None else self.store.reserve() if spare is None else spare
        try:
            if made:
                self._make_directory(number, lower, labels, ready=spare is not None)
            self.store.add(kind, key, None if base is None else base.id, labels, snapshot_id=number)
        except BaseException:
            if made:
                shutil.rmtree(f"{self.directory}/{number}", ignore_errors=True)
            raise
        return self._describe(kind, number, lower, mapped=mapped is not None)

    def _make_directory(self, number: int, lower: _Lower | None, labels: Mapping[str, str], *, ready: bool) -> None:
        home = f"{self.directory}/{number}"
        try:
            owner = self._owner(lower, labels)
            if not ready:
                make_directory(home)
            if owner not in (None, (0, 0)):
                os.chown(home + "/fs", *owner, follow_symlinks=False)
        except OSError as error:
            raise StorageError(f"cannot make {home}: {error.strerror}", errno=error.errno or 0) from error

    def _owner(self, lower: _Lower | None, labels: Mapping[str, str]) -> tuple[int, int] | None:
        """Who owns the new root: the container's root where ids are mapped, else who owns the parent's."""
        mapping = mapping_of(labels)
        if mapping is not None:
            return mapping.root
        return None if lower is None else self._parent_owner(lower)

    @staticmethod
    def _parent_owner(lower: _Lower) -> tuple[int, int]:
        if not lower.owners:
            try:
                status = os.stat(lower.paths[0])
            except OSError as error:
                raise UnavailableError(
                    f"the parent's files are gone: {error.strerror}", hint="remove the image and pull it again"
                ) from error
            lower.owners.append((status.st_uid, status.st_gid))
        return lower.owners[0]

    async def mounts(self, key: str) -> list[Mount]:
        """How to mount an active snapshot or view."""
        snapshot = self.store.get(key)
        if snapshot.kind is Kind.COMMITTED:
            raise SnapshotInUse(f"snapshot {key!r} is committed, not active")
        _, lower = await self._ready(snapshot.parent)
        mapping = self._mapping(lower, snapshot.labels)
        if mapping is not None and lower is not None:
            await self._map(snapshot.id, lower, mapping)
            self.store.get(key)
        return self._describe(snapshot.kind, snapshot.id, lower, mapped=mapping is not None)

    async def commit(self, name: str, key: str, labels: Mapping[str, str]) -> None:
        """Turn the active snapshot ``key`` into the committed one called ``name``."""
        _check_size(name, key, labels)
        if not name:
            raise InvalidRequest("a committed snapshot needs a name")
        if self.store.find(name) is not None:
            raise SnapshotExists(f"snapshot {name!r} exists already")
        snapshot = self.store.get(key)
        if ("Commit", snapshot.kind) not in TRANSITIONS:
            raise SnapshotInUse(f"snapshot {key!r} is not active")
        usage = await self._walk(snapshot.id)
        self.store.commit(snapshot, name, labels, usage.size, usage.inodes)
        self._usages.pop(snapshot.id, None)

    async def remove(self, key: str) -> None:
        """Forget a snapshot; what it leaves behind goes in :meth:`cleanup`."""
        snapshot = self.store.get(key)
        self.store.remove(snapshot)
        self._bases.pop(key, None)
        self._usages.pop(snapshot.id, None)
        self._chains.pop(snapshot.id, None)
        self.on_remove()

    async def stat(self, key: str) -> SnapshotInfo:
        """What is known of a snapshot."""
        return self.store.get(key).info()

    async def update(self, name: str, labels: Mapping[str, str], fields: Sequence[str]) -> SnapshotInfo:
        """Change labels: all of them, or those that ``fields`` (``labels``, ``labels.<name>``) select."""
        snapshot = self.store.get(name)
        wanted = dict(snapshot.labels)
        for field in fields or ("labels",):
            if field == "labels":
                wanted = dict(labels)
            elif field.startswith("labels."):
                wanted[field[7:]] = labels.get(field[7:], "")
            else:
                raise InvalidRequest(f"cannot update field {field!r} of a snapshot")
        kept = {label: value for label, value in wanted.items() if value}
        if snapshot.layer_id is not None:
            kept[LABEL_SNAPSHOT_REF] = snapshot.ref  # what the snapshot is does not change
        _check_size(name, snapshot.parent, kept)
        self._bases.pop(name, None)
        return self.store.set_labels(snapshot, kept).info()

    async def list(self, filters: Sequence[str]) -> AsyncIterator[list[SnapshotInfo]]:
        """The snapshots that match any of ``filters``, in blocks of at most 100."""
        matches = compile_filters(filters)
        name, ref = matches.required(("name",)), matches.required(("labels", LABEL_SNAPSHOT_REF))
        ref = ref or matches.required(("labels", *LABEL_SNAPSHOT_REF.split(".")))
        if name is not None:
            found = self.store.find(name)
            pages = iter([[found] if found else []])
        elif ref:
            pages = iter([self.store.with_ref(ref)])
        else:
            pages = self.store.walk()
        for page in pages:
            infos = [snapshot.info() for snapshot in page]
            await matches.decide(infos)
            block: list[SnapshotInfo] = []
            room = _BLOCK_MAX
            for info in infos:
                if not matches(info):
                    continue
                size = _size(info.name, info.parent, info.labels)
                if block and (len(block) == 100 or size > room):
                    yield block
                    block, room = [], _BLOCK_MAX
                block.append(info)
                room -= size
            if block:
                yield block

    async def usage(self, key: str) -> Usage:
        """Disk used by a snapshot itself, without its parents."""
        snapshot = self.store.get(key)
        if snapshot.kind is Kind.VIEW:
            return Usage()
        if snapshot.kind is Kind.COMMITTED:
            if snapshot.layer_id is not None:
                return self.layers.usage(snapshot.layer_id)
            return Usage(snapshot.size, snapshot.inodes)
        at, usage = self._usages.get(snapshot.id, (0.0, Usage()))
        if time.monotonic() - at > _USAGE_TTL or not at:
            usage = await self._measure(snapshot.id)
            if self.store.find(key) is not None:
                self._usages[snapshot.id] = (time.monotonic(), usage)
        return usage

    async def _walk(self, number: int) -> Usage:
        """Measure an upper directory in a thread."""
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._walkers, disk.usage, self._path(number, "fs"))
        except OSError as error:
            raise StorageError(f"cannot measure snapshot: {error.strerror}", errno=error.errno or 0) from error

    async def _measure(self, number: int) -> Usage:
        """The same, once for all who ask meanwhile."""
        return await self._measuring.do(number, lambda: self._walk(number))

    async def cleanup(self) -> None:
        """Delete what removed snapshots left: directories, then layers that nobody uses."""
        async with self._cleaning:
            self._mapping_now = +self._mapping_now
            ids = [number for number in self.store.trash() if number not in self._mapping_now]
            if ids:
                paths = [f"{self.directory}/{number}" for number in ids]
                await asyncio.get_running_loop().run_in_executor(self._walkers, self._mapped.detach, ids)
                await asyncio.get_running_loop().run_in_executor(self._walkers, disk.delete_trees, paths)
                self.store.forget_trash(ids)
            await self.layers.sweep()

    # start

    def recover(self) -> None:
        """Square the metastore with the directories; called once, before the first request, on the event loop."""
        known = self.store.ids()
        self._mapped.recover(known)
        strays: list[int] = []
        for name in os.listdir(self.directory):
            if not name.isdigit():
                log.warning("unexpected entry in the snapshot directory", extra={"path": f"{self.directory}/{name}"})
                continue
            self.store.skip_ids(int(name))
            if int(name) not in known:
                strays.append(int(name))
        if strays:
            log.debug("removing directories of snapshots that were never made", extra={"count": len(strays)})
            self.store.add_trash(strays)
        self._spares.fill()
        missing = 0
        for page in self.store.walk():
            for snapshot in page:
                needs = snapshot.layer_id is None and (snapshot.kind is not Kind.VIEW or snapshot.parent_id is None)
                if needs and not os.path.isdir(self._path(snapshot.id, "fs")):
                    missing += 1
                    log.error("the files of a snapshot are gone", extra={"snapshot": snapshot.name, "id": snapshot.id})
        if missing:
            log.error("remove and pull the images of these snapshots again", extra={"count": missing})


def _identity(path: str) -> tuple[int, int]:
    """Device and inode of a directory; zeros where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino


def _size(key: str, parent: str, labels: Mapping[str, str]) -> int:
    """UTF-8 bytes of a snapshot's texts, and some for their framing."""
    texts = "".join((key, parent, *labels, *labels.values()))
    return len(texts if texts.isascii() else texts.encode("utf-8", "replace")) + 16 * (len(labels) + 2)


def _check_size(key: str, parent: str, labels: Mapping[str, str]) -> None:
    size = _size(key, parent, labels)
    if size > _SNAPSHOT_MAX:
        raise InvalidRequest(f"key and labels of {size} bytes; a snapshot may have {_SNAPSHOT_MAX}")
