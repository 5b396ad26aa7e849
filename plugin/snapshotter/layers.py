"""The lazy layers of a node: which are mounted, who keeps them, when they go.

A layer (a row of table ``layers``: digest and variant) is mounted at ``<root>/m/<id>`` from its first use until no
snapshot refers to it. Mounts outlive the daemon: the next one finds them in mountinfo and takes those that serve as they
are; others are mounted anew *beneath*, so that nobody ever sees an empty directory. A layer that cannot be mounted
keeps nobody else waiting: it is tried again when asked for, and now and then.

Everything that decides is synchronous; see docs/concurrency/metastore.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

from weenv.core.errors import FormatError, MountError, UnavailableError, WeenvError
from weenv.plugin.containerd.types import Usage
from weenv.plugin.snapshotter import disk, mounts
from weenv.plugin.snapshotter.layerdir import LayerDirs
from weenv.plugin.snapshotter.metastore import Layer, Metastore
from weenv.plugin.snapshotter.metrics import Metrics
from weenv.plugin.snapshotter.planes.base import COMPLETE, Attachment, Plane, Variant

log = logging.getLogger(__name__)

_AT_ONCE = 4
"""Layers mounted at once when many are to be."""
_REST = 2.0
"""Seconds in which nobody was told of a layer, before a complete one gets its better mount: runtimes mount at once."""
_LONGEST = 10.0
"""Seconds that are waited for such a rest."""
_FILES = ("data", "toc", "meta.erofs", "present")


class Layers:
    """See the module's text. Belongs to one event loop."""

    def __init__(self, root: str, store: Metastore, dirs: LayerDirs, plane: Plane, metrics: Metrics, *, grace: float) -> None:
        self.store = store
        self.dirs = dirs
        self.plane = plane
        self.points = os.path.join(root, "m")
        self._metrics = metrics
        self._grace = grace
        self._attached: dict[int, Attachment] = {}
        self._attaching: dict[int, asyncio.Task[None]] = {}
        self._broken: dict[int, str] = {}
        self._pins: Counter[str] = Counter()
        self._fresh: dict[str, float] = {}
        self._handed: dict[int, float] = {}
        """Layer -> when a runtime was last told where it is mounted (monotonic)."""
        self._waits: dict[int, float] = {}
        """Layer -> since when a better mount waits for a moment in which nobody was told."""
        self._strays = False
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="sweep")
        os.makedirs(self.points, mode=0o711, exist_ok=True)
        plane.on_loss(self._lost)

    def close(self) -> None:
        """Stop the threads; mounts stay."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # what the protocol core asks

    def attached(self, layer_ids: Collection[int]) -> bool:
        """True where all of them are mounted; asked for whoever is told where."""
        self._handed.update(dict.fromkeys(layer_ids, time.monotonic()))
        return all(map(self._attached.__contains__, layer_ids))

    def path(self, layer_id: int) -> str:
        """Where a layer is, or will be, mounted."""
        return f"{self.points}/{layer_id}"

    async def ensure(self, layer_ids: Collection[int]) -> None:
        """Mount what is not mounted. Raises UnavailableError with the reason of the first that cannot be."""
        await asyncio.gather(*(self._ensure(number) for number in layer_ids if number not in self._attached))

    def usage(self, layer_id: int) -> Usage:
        """Blocks and inodes of the layer directory's files: what is cached, not what the layer holds."""
        layer = self.store.layer_by_id(layer_id)
        if layer is None:
            return Usage()
        size = inodes = 0
        directory = self.dirs.path(layer.digest)
        for name in _FILES:
            try:
                size += os.stat(f"{directory}/{name}").st_blocks * 512
            except OSError:
                continue  # it is not there (yet)
            inodes += 1
        return Usage(size, inodes)

    # keeping layers that no snapshot refers to yet

    @contextlib.contextmanager
    def pin(self, digest: str) -> Iterator[None]:
        """Within the block the layer is not swept."""
        self._pins[digest] += 1
        try:
            yield
        finally:
            self._pins[digest] -= 1
            if not self._pins[digest]:
                del self._pins[digest]

    def keep_awhile(self, digest: str) -> None:
        """A layer that was made ready ahead of its snapshot: not swept for the grace time."""
        if not self.store.layer_used(digest):
            self._fresh[digest] = time.monotonic() + self._grace

    def adopted(self, digest: str) -> None:
        """A snapshot refers to the layer now, and decides how long it stays."""
        self._fresh.pop(digest, None)

    def _kept(self, digest: str) -> bool:
        if self._pins[digest] > 0:
            return True
        until = self._fresh.get(digest)
        if until is None:
            return False
        if until > time.monotonic():
            return True
        del self._fresh[digest]
        return False

    # mounting

    async def attach(self, digest: str, variant: Variant) -> int:
        """Mount a layer and return its id. Raises what the plane raises."""
        layer = self.store.layer(digest, variant.name, variant.attributes)
        if layer.id not in self._attached:
            await self._join(layer.id)
        return layer.id

    async def _ensure(self, layer_id: int) -> None:
        try:
            await self._join(layer_id)
        except (WeenvError, OSError) as error:
            hint = error.hint if isinstance(error, WeenvError) else ""
            raise UnavailableError(f"a layer below cannot be mounted: {error}", hint=hint) from error

    async def _join(self, layer_id: int) -> None:
        """Mount once, whoever asks; a caller that goes away leaves the mounting to itself."""
        task = self._attaching.get(layer_id)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._attach(layer_id), name=f"attach {layer_id}")
            self._attaching[layer_id] = task
            task.add_done_callback(lambda done: self._landed(layer_id, done))
        await asyncio.shield(task)

    def _landed(self, layer_id: int, task: asyncio.Task[None]) -> None:
        self._attaching.pop(layer_id, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._broken.pop(layer_id, None)
        else:
            self._broken[layer_id] = " ".join(str(error).split())

    async def _attach(self, layer_id: int, *, replace: bool = False) -> None:
        layer = self.store.layer_by_id(layer_id)
        if layer is None:
            raise UnavailableError(f"layer {layer_id} is not known any more", hint="remove the image and pull it again")
        with self.pin(layer.digest):
            async with self._slots:
                os.makedirs(self.path(layer_id), mode=0o711, exist_ok=True)
                variant = Variant(layer.variant, layer.attributes)
                begin = time.perf_counter()
                attachment = await self.plane.attach(layer.digest, variant, self.path(layer_id), replace=replace)
                self._metrics.resolve_seconds.labels(stage="mount").observe(time.perf_counter() - begin)
            self.store.set_layer_mode(layer_id, attachment.mode, attachment.device)
            self._attached[layer_id] = attachment

    def _lost(self, target: str) -> None:
        """A mount that does not work any more: whoever uses it has lost it, whoever comes next gets another."""
        layer_id = int(os.path.basename(target))
        if self._attached.pop(layer_id, None) is None:
            return  # it was swept
        layer = self.store.layer_by_id(layer_id)
        self._metrics.repairs.labels(what="lost mount").inc()
        log.error(
            "the process that serves a layer has died; the layer is mounted anew",
            extra={"layer": layer.digest if layer else "", "hint": "containers that were running have to be started again"},
        )

    # life of the daemon

    def recover(self) -> None:
        """Take over the mounts of a former process; synchronous, called before the first request.

        What is not taken over is mounted by :meth:`tend`, or by the first request that needs it.
        """
        self.dirs.empty_trash()
        rows = {layer.id: layer for layer in self.store.layers()}
        mounted = mounts.mounts_below(self.points)
        for name in os.listdir(self.points):
            layer = rows.get(int(name)) if name.isdigit() else None
            path = f"{self.points}/{name}"
            if layer is None:
                self._drop_point(path)
                continue
            entry = mounted.get(path)
            attachment = Attachment(layer.mode, layer.device)
            if entry is not None and layer.mode and self.plane.usable(layer.digest, entry, attachment):
                self._attached[layer.id] = attachment
        known = {layer.digest for layer in rows.values()}
        for digest in self.dirs.known():
            if digest not in known:
                self._strays = True
                log.info("dropping a layer that no snapshot knows", extra={"layer": digest})
                self.dirs.discard(digest)
                self._metrics.repairs.labels(what="stray layer").inc()
        for layer in rows.values():
            if layer.id not in self._attached and not layer.durable:
                self._distrust(layer)
        log.info("layers recovered", extra={"known": len(rows), "mounted": len(self._attached)})

    def _distrust(self, layer: Layer) -> None:
        """The machine may have stopped before these files were on disk: have them made anew from the checked tail."""
        directory = self.dirs.path(layer.digest)
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(directory):
                if name.startswith("meta") or name == "facts.json":
                    os.unlink(f"{directory}/{name}")

    def _drop_point(self, path: str) -> None:
        try:
            self.plane.detach(path)
            os.rmdir(path)
        except (OSError, MountError) as error:
            log.warning("cannot clear a mount point: %s", error, extra={"path": path})

    async def tend(self, interval: float) -> None:
        """For ever: mount what is not mounted, mount complete layers from the plain file, follow a new blobfs."""
        while True:
            await self.tend_once(_REST)
            await asyncio.sleep(interval)

    def _rests(self, layer_id: int, rest: float) -> bool:
        """Whether nobody was told of the layer for ``rest`` seconds, or that was waited for long enough.

        A runtime that has found the old mount, and not yet stacked an overlay on it when it is taken away, is refused (EINVAL,
        fs/namespace.c, clone_private_mount).
        """
        now = time.monotonic()
        since = self._waits.setdefault(layer_id, now)
        if now - self._handed.get(layer_id, 0.0) < rest and now - since < _LONGEST:
            return False
        del self._waits[layer_id]
        return True

    async def tend_once(self, rest: float = 0.0) -> None:
        """One round of :meth:`tend`. What goes wrong is logged once per reason. ``rest``: see :meth:`_rests`."""
        loop = asyncio.get_running_loop()
        for layer in self.store.layers():
            if self.store.layer_by_id(layer.id) is None:
                continue  # swept since the round began
            attachment = self._attached.get(layer.id)
            reason = self._broken.get(layer.id)
            try:
                if attachment is None:
                    await self._join(layer.id)
                    if reason is not None:
                        log.info("layer is mounted again", extra={"layer": layer.digest})
                elif await loop.run_in_executor(self._threads, self.plane.wanted, layer.digest, attachment) and (
                    attachment.mode == COMPLETE or self._rests(layer.id, rest)
                ):
                    await self._replace(layer.id)
                if not layer.durable:
                    await loop.run_in_executor(self._threads, _sync, self.dirs.path(layer.digest))
                    self.store.set_layer_durable(layer.id)
            except (WeenvError, OSError) as error:
                text = " ".join(str(error).split())
                if self.store.layer_by_id(layer.id) is None:
                    self._broken.pop(layer.id, None)  # swept while it was being looked at
                elif text != reason:
                    self._broken[layer.id] = text
                    log.error("layer cannot be mounted: %s", text, extra={"layer": layer.digest})
        modes = Counter("complete" if a.mode == COMPLETE else "lazy" for a in self._attached.values())
        for state, number in (*modes.items(), ("broken", len(self._broken))):
            self._metrics.layers.labels(state=state).set(number)

    async def _replace(self, layer_id: int) -> None:
        """Put a better mount in the place of the present one."""
        if layer_id in self._attaching or layer_id not in self._attached:
            return
        task = asyncio.get_running_loop().create_task(self._attach(layer_id, replace=True), name=f"replace {layer_id}")
        self._attaching[layer_id] = task
        task.add_done_callback(lambda done: self._landed(layer_id, done))
        await asyncio.shield(task)
        log.info("layer mounted anew", extra={"layer_id": layer_id, "mode": self._attached[layer_id].mode})

    async def sweep(self) -> None:
        """Unmount and delete what no snapshot refers to and nobody keeps."""
        gone: list[str] = []
        for layer in self.store.unused_layers():
            if self._kept(layer.digest) or layer.id in self._attaching or not self.store.forget_layer(layer.id):
                continue
            for table in (self._attached, self._broken, self._handed, self._waits):
                table.pop(layer.id, None)
            gone.append(self.path(layer.id))
        known = {layer.digest for layer in self.store.layers()}
        discarded = [digest for digest in self.dirs.known() if digest not in known and not self._kept(digest)]
        for digest in discarded:
            self.dirs.discard(digest)
        if gone or discarded:
            log.info("layers removed", extra={"mounts": len(gone), "layers": len(discarded)})
        if gone or discarded or self._strays:
            self._strays = False
            await asyncio.get_running_loop().run_in_executor(self._threads, self._clear, gone)

    def _clear(self, points: list[str]) -> None:
        for path in points:
            self._drop_point(path)
        with contextlib.suppress(FileNotFoundError):
            disk.delete_trees([os.path.join(self.dirs.trash, name) for name in os.listdir(self.dirs.trash)])


def _sync(directory: str) -> None:
    """Have the files that the snapshotter wrote on disk."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError as error:
        raise FormatError("the layer directory is gone", hint="remove the image and pull it again") from error
    for name in names:
        if name in ("toc", "source.json", "facts.json") or name.startswith("meta"):
            fd = os.open(f"{directory}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)
    for path in (directory, os.path.dirname(directory)):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
