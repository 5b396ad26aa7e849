"""Layers that are not in the lazy format, converted on the node: each once, whoever asks, and kept for the next plan.

::

    <root>/converted/                   a LayerStore (layerstore.py); blobfs serves its blobs
        work/<key>.lock                 held (flock) by the process that converts the layer, or has it unpacked
        work/<key>.in, <key>.out        the layer as fetched, the blob as it grows; gone when the lock is
        work/<key>.keep                 the layer as fetched, which could not be converted and is to be unpacked

The key is of source layer, diffID and format. Who finds the lock taken waits, and then finds the result. A process that
dies lets the lock go; the next one to work here removes what it left, so nothing half made is ever read. The fetched blob
has its digest before it is decompressed; what comes out must have the diffID that the image's config gives, and stay below
the limits of layer/limits.py and ``compose.max_layer``, before it is used.

What cannot be converted (``UnsupportedError``: a POSIX ACL, say) is remembered with the reason, and unpacked (unpack.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from weenv.core.aio import SingleFlight, gather_all
from weenv.core.errors import FormatError, LimitError, NotFoundInSource, StorageError, VerificationError
from weenv.core.process import try_lock
from weenv.core.rights import remedy
from weenv.core.units import size as shown
from weenv.environment.compose import LocalLayer, NotLazyError, StackedLayer
from weenv.environment.composeconfig import CONVERT, REFUSE, ComposeConfig
from weenv.environment.layerstore import Entry, LayerStore
from weenv.environment.node import Show
from weenv.layer.limits import DEFAULT_LIMITS, Limits
from weenv.layer.verify import MEDIA_TYPE
from weenv.plugin.snapshotter.layerdir import CONVERTED
from weenv.registry.client import RegistryClient
from weenv.registry.groupref.model import LayerRef

log = logging.getLogger(__name__)

VERSION = 1
"""Part of every key: to be raised when layers that were converted before must not be used any more."""
_JOBS = 2
"""Layers converted side by side; each uses all cores while it is encoded."""
_SPARE = 256 << 20
"""Bytes that are to stay free on the disk."""
_POLL = 0.05

Report = Callable[[int, int | None], None]


@contextlib.contextmanager
def _silent(_label: str) -> Iterator[Report]:
    yield lambda _done, _total: None


@dataclass
class Meter:
    """Bytes done of one or several layers, for one bar."""

    report: Report
    total: int
    done: int = 0

    def step(self, count: int) -> None:
        """So many more."""
        self.done += count
        self.report(self.done, self.total)


class NodeLayers:
    """Makes layers servable on the node with this ``root``. Belongs to one event loop.

    ``converted`` has the seconds that each layer converted by this object took, by its digest.
    """

    def __init__(self, client: RegistryClient, root: str, config: ComposeConfig, *, show: Show | None = None) -> None:
        self.client = client
        self.config = config
        self.store = LayerStore(root, CONVERTED, limit=config.converted_limit)
        self.converted: dict[str, float] = {}
        self.show: Show = show or _silent
        self._work = os.path.join(self.store.path, "work")
        self._flights: SingleFlight[str, Entry] = SingleFlight()
        self._slots = asyncio.Semaphore(_JOBS)

    # -- asking

    def known(self, layer: StackedLayer) -> StackedLayer:
        """The layer with what the node has of it already. Blocking, some 50 us."""
        if layer.lazy or layer.served is not None or self.config.not_lazy != CONVERT:
            return layer
        entry = self.store.find(key_of(layer))
        return layer if entry is None else self._with(layer, entry)

    def refuse(self, layers: Sequence[StackedLayer]) -> None:
        """Raise NotLazyError where one of them is not lazy and the node refuses such plans."""
        for layer in layers:
            if not layer.lazy and self.config.not_lazy == REFUSE:
                hint = 'publish it lazily (weenv convert), or set compose.not_lazy = "convert"'
                raise NotLazyError(layer.ref, layer.group, hint=hint)

    async def serve(self, layers: Sequence[StackedLayer]) -> tuple[StackedLayer, ...]:
        """The layers, those that are not lazy converted where that is wanted and possible, side by side.

        One that is neither lazy nor ``served`` in the answer is to be unpacked. Raises NotLazyError where the node refuses
        such plans, SourceError, FormatError (VerificationError, LimitError), StorageError.
        """
        self.refuse(layers)
        found = [self.known(layer) for layer in layers]
        waiting = [layer for layer in found if not layer.lazy and layer.served is None]
        todo = {key_of(layer): layer for layer in waiting if self.config.not_lazy == CONVERT and not layer.reason}
        if not todo:
            return tuple(found)
        groups = sorted({layer.group for layer in todo.values()})
        label = f"converting {groups[0]}" + (f" and {len(groups) - 1} more" if len(groups) > 1 else "")
        with self.show(label) as report:
            meter = Meter(report, 2 * sum(layer.ref.size for layer in todo.values()))
            made = await gather_all(*(self._convert(key, layer, meter) for key, layer in todo.items()))
        entries = dict(zip(todo, made, strict=True))
        return tuple(self._with(layer, entries[key_of(layer)]) if key_of(layer) in entries else layer for layer in found)

    def _with(self, layer: StackedLayer, entry: Entry) -> StackedLayer:
        if entry.layer is None:
            return replace(layer, reason=entry.reason or "it cannot be converted")
        return replace(layer, served=LocalLayer(entry.layer, self.store.path))

    # -- converting

    async def _convert(self, key: str, layer: StackedLayer, meter: Meter) -> Entry:
        return await self._flights.do(key, lambda: self._once(key, layer, meter))

    async def _once(self, key: str, layer: StackedLayer, meter: Meter) -> Entry:
        async with self._slots, self.locked(key) as place:
            entry = await asyncio.to_thread(self.store.find, key)
            if entry is None:
                await asyncio.to_thread(_clear_dead, self._work)
                begin = time.monotonic()
                entry = await self._work_on(key, layer, place, meter)
                took = time.monotonic() - begin
                self.converted[layer.ref.digest] = took
                what = "converted" if entry.layer is not None else "cannot be converted, is unpacked"
                log.info(
                    "a layer that is not in the lazy format was %s", what,
                    extra={"group": layer.group, "layer": layer.ref.digest, "size": layer.ref.size, "seconds": round(took, 3),
                           "reason": entry.reason},
                )  # fmt: skip
            return entry

    async def _work_on(self, key: str, layer: StackedLayer, place: str, meter: Meter) -> Entry:
        from weenv.converter.options import ConvertOptions
        from weenv.converter.pipeline import encode_file
        from weenv.registry.threads import in_thread

        out = f"{place}.out"
        taken = 0

        def report(done: int) -> None:
            nonlocal taken
            meter.step(done - taken)
            taken = done

        path = await self.fetch(layer, f"{place}.in", meter.step)
        options = ConvertOptions(limits=self.limits)
        try:
            encoded = await in_thread(None, lambda cancel: encode_file(path, out, options, cancel, report))
        except LimitError as error:
            raise self.too_much(layer, error) from error
        except FormatError as error:  # not tampered with, for it has its digest: something we cannot represent
            entry = Entry(None, " ".join(str(error).split())[:500])
            await asyncio.to_thread(self.store.put, key, None, reason=entry.reason)
            if path == f"{place}.in":
                os.rename(path, f"{place}.keep")
            return entry
        if encoded.diff_id != layer.ref.diff_id:
            raise wrong_content(layer, encoded.diff_id)
        ref = LayerRef(encoded.blob_digest, encoded.blob_size, MEDIA_TYPE, encoded.diff_id, encoded.annotations())
        await asyncio.to_thread(self.store.adopt, key, ref, out)
        return Entry(ref)

    @property
    def limits(self) -> Limits:
        """The format's limits with the node's own of the tar stream."""
        return replace(DEFAULT_LIMITS, max_stream=min(self.config.max_layer, DEFAULT_LIMITS.max_stream))

    def too_much(self, layer: StackedLayer, error: LimitError) -> LimitError:
        """The error for a layer beyond a limit."""
        return LimitError(
            f"layer {layer.ref.digest} of {layer.group} is beyond a limit of this node: {error}",
            hint="if it is to be trusted, raise compose.max_layer" if "stream" in str(error) else "",
        )

    async def fetch(self, layer: StackedLayer, path: str, progress: Callable[[int], None] | None = None) -> str:
        """The layer's blob as a file, its digest checked: a new one at ``path``, or a layout's own.

        Raises SourceError, VerificationError, StorageError, LimitError.
        """
        from weenv.registry.endpoints import LayoutEnd, RegistryEnd
        from weenv.registry.manifest import Descriptor
        from weenv.registry.reference import LayoutLocation, Reference

        size = layer.ref.size
        if size > self.config.max_layer:
            raise self.too_much(layer, LimitError(f"a stream of {size} bytes"))
        self._check_room(size)
        if await asyncio.to_thread(_take_kept, layer, path):
            return path
        place = LayoutEnd(LayoutLocation(layer.repository)) if not layer.host else None
        source = place or RegistryEnd(self.client, Reference(layer.host, layer.repository))
        try:
            return await source.fetch(Descriptor(layer.ref.media_type, layer.ref.digest, size), path, progress)
        except NotFoundInSource as error:
            raise NotFoundInSource(
                f"layer {layer.ref.digest} of {layer.group} is not there: {error.message}", hint="push the image again"
            ) from error

    def _check_room(self, size: int) -> None:
        """A layer takes its size as fetched, and about as much converted or stored."""
        status = os.statvfs(self._work)
        free = status.f_bavail * status.f_frsize
        if free < 2 * size + _SPARE:
            raise StorageError(
                f"{self._work} has {shown(free)} free: a layer of {shown(size)} takes up to {shown(2 * size)}, "
                f"and {shown(_SPARE)} are to stay free",
                hint="make room on the disk",
            )

    # -- one at a time, over processes

    @contextlib.asynccontextmanager
    async def locked(self, key: str) -> AsyncIterator[str]:
        """Hold ``key`` (64 hex digits) against everybody; gives the beginning of names for files that go with the lock."""
        place = os.path.join(self._work, key)
        try:
            self.store.make()
            os.makedirs(self._work, mode=0o700, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot write {self._work}: {error.strerror}", errno=error.errno or 0, hint=remedy(error)
            ) from error
        while (fd := try_lock(f"{place}.lock")) is None:  # noqa: ASYNC110 - another process's: nobody wakes us
            await asyncio.sleep(_POLL)
        try:
            _unlink(f"{place}.in", f"{place}.out")
            yield place
        finally:
            _unlink(f"{place}.in", f"{place}.out", f"{place}.lock")
            os.close(fd)


def key_of(layer: StackedLayer) -> str:
    """Where a layer's conversion is stored, and what is locked for it (64 hex digits)."""
    return hashlib.sha256(f"{VERSION} {layer.ref.digest} {layer.ref.diff_id}".encode()).hexdigest()


def wrong_content(layer: StackedLayer, diff_id: str) -> VerificationError:
    """The error for a layer that holds something else than its image's config says."""
    return VerificationError(
        f"layer {layer.ref.digest} of {layer.group} has diffID {diff_id}, its image's config says {layer.ref.diff_id}",
        hint="the image was built wrongly or is forged",
    )


def _take_kept(layer: StackedLayer, path: str) -> bool:
    """Make what an attempt at converting the layer has fetched the file at ``path``, where it is there and whole."""
    kept = path.removesuffix(".in") + ".keep"
    try:
        with open(kept, "rb") as file:
            whole = "sha256:" + hashlib.file_digest(file, "sha256").hexdigest() == layer.ref.digest
    except OSError:
        return False
    if whole:
        os.rename(kept, path)
    _unlink(kept)
    return whole


def _clear_dead(work: str) -> None:
    """Remove the files of processes that died."""
    for name in sorted({name.partition(".")[0] for name in os.listdir(work)}):
        place = os.path.join(work, name)
        fd = try_lock(f"{place}.lock")
        if fd is not None:
            _unlink(f"{place}.in", f"{place}.out", f"{place}.keep", f"{place}.lock")
            os.close(fd)


def _unlink(*paths: str) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
