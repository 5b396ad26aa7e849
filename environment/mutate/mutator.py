"""From a plan's mutations and the stack below them to a layer that the node serves.

Same base, same mutations: same layer, made once per node however many ask at a time. Nothing is started or mounted, and
nothing is left where it fails.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from weenv.core.aio import SingleFlight, gather_all
from weenv.core.digest import chain_id
from weenv.core.errors import FormatError, LimitError
from weenv.environment.compose import NotLazyError, StackedLayer
from weenv.environment.model import Mutation
from weenv.environment.mutate import mutation as kinds
from weenv.environment.mutate.cache import MutationStore
from weenv.environment.mutate.changes import Changes
from weenv.environment.mutate.frames import FrameReader
from weenv.environment.mutate.view import Inode, TreeView, text
from weenv.environment.nodelayers import NodeLayers
from weenv.environment.tocs import TocReader
from weenv.layer.toc import Toc
from weenv.layer.verify import MEDIA_TYPE
from weenv.registry.client import RegistryClient
from weenv.registry.groupref.model import LayerRef

_ENTRIES = 4_000_000
"""Entries of all TOCs kept in memory, which take about 60 bytes each."""
_AT_ONCE = 8
"""Layers made at a time: each may hold as many bytes as a patch may change and a layer may have."""


class Mutator:
    """Makes mutation layers for one node. Belongs to one event loop. ``made`` counts the layers that were not found.

    ``local`` converts what lies below and is not lazy; without it everything has to be.
    """

    def __init__(
        self, client: RegistryClient, root: str, *, limit: int | None = None, local: NodeLayers | None = None
    ) -> None:
        self.store = MutationStore(root) if limit is None else MutationStore(root, limit=limit)
        self.frames = FrameReader(client, root)
        self.made = 0
        self._room = asyncio.Semaphore(_AT_ONCE)
        self.local = local
        self._reader = TocReader(client, root)
        self._tocs: OrderedDict[str, Toc] = OrderedDict()
        self._entries = 0
        self._views: OrderedDict[tuple[str, ...], TreeView] = OrderedDict()
        self._reading: SingleFlight[str, Toc] = SingleFlight()
        self._making: SingleFlight[str, tuple[LayerRef, ...]] = SingleFlight()

    async def mutate(self, mutations: Sequence[Mutation], layers: Sequence[StackedLayer]) -> tuple[LayerRef, ...]:
        """The layer that the mutations (but for ``run``) make on top of ``layers``; none where nothing changes.

        Raises MutationError naming the mutation (and of a patch the hunk and file), NotLazyError, SourceError,
        StorageError.
        """
        wanted = kinds.layered(mutations)
        if not wanted:
            return ()
        if not layers:
            raise FormatError("there is nothing below the mutations")
        key = kinds.key_of(chain_id([layer.ref.diff_id for layer in layers]), wanted)
        return await self._making.do(key, lambda: self._mutate(key, wanted, layers))

    async def _mutate(self, key: str, mutations: Sequence[Mutation], layers: Sequence[StackedLayer]) -> tuple[LayerRef, ...]:
        found = await asyncio.to_thread(self.store.get, key)
        if found is not None:
            return found
        if self.local is not None and not all(layer.lazy for layer in layers):
            layers = await self.local.serve(layers)
            for layer in layers:
                if not layer.lazy and layer.served is None:
                    raise NotLazyError(
                        layer.ref, layer.group, f"has to be converted for the plan's mutations: {layer.reason or 'it is not'}",
                        hint='set compose.not_lazy = "convert"' if not layer.reason else "use a run mutation instead",
                    )  # fmt: skip
        view = await self.view(layers)
        changes = Changes(view)

        async def read(inode: Inode, offset: int = 0, length: int | None = None) -> bytes:
            return await self.read(view, layers, inode, offset, length)

        async with self._room:
            await kinds.apply_mutations(mutations, changes, read)
            await kinds.load(changes, read)
            return await asyncio.to_thread(self._finish, key, changes)

    def _finish(self, key: str, changes: Changes) -> tuple[LayerRef, ...]:
        members = changes.members()
        self.made += 1
        if not members:
            self.store.put(key, None)
            return ()
        blob, encoded = kinds.encode(kinds.tar_of(members))
        layer = LayerRef(encoded.blob_digest, encoded.blob_size, MEDIA_TYPE, encoded.diff_id, encoded.annotations())
        self.store.put(key, layer, blob)
        return (layer,)

    async def view(self, layers: Sequence[StackedLayer]) -> TreeView:
        """The merged tree of a stack; TOCs are kept in memory. Raises NotLazyError, SourceError, FormatError."""
        names = tuple(layer.blob.digest for layer in layers)
        view = self._views.pop(names, None)
        if view is None:
            view = TreeView(await gather_all(*(self._toc(layer) for layer in layers)))
            view.newest()
        self._views[names] = view
        while len(self._views) > 8:
            self._views.popitem(last=False)
        return view

    async def _toc(self, layer: StackedLayer) -> Toc:
        digest = layer.blob.digest
        toc = self._tocs.get(digest)
        if toc is None:
            toc = await self._reading.do(digest, lambda: self._reader.read(layer))
            if digest not in self._tocs:
                self._entries += len(toc.entries)
            self._tocs[digest] = toc
        self._tocs.move_to_end(digest)
        while self._entries > _ENTRIES and len(self._tocs) > 1:
            _, dropped = self._tocs.popitem(last=False)
            self._entries -= len(dropped.entries)
        return toc

    async def read(
        self, view: TreeView, layers: Sequence[StackedLayer], inode: Inode, offset: int = 0, length: int | None = None
    ) -> bytes:
        """Bytes of a FILE of the view (the whole file, or a range clipped to it). Raises SourceError, FormatError."""
        length = inode.size - offset if length is None else max(0, min(length, inode.size - offset))
        if length > kinds.MAX_LAYER:
            raise LimitError(f"{length} bytes, more than {kinds.MAX_LAYER}", member=text(()))
        pieces = view.pieces(inode, offset, length)
        toc = view.tocs[inode.layer]
        parts = await self.frames.read(layers[inode.layer], toc, [(stream, size) for _, stream, size in pieces])
        if len(pieces) == 1 and pieces[0][2] == length:
            return parts[0]
        data = bytearray(length)
        for (logical, _, size), part in zip(pieces, parts, strict=True):
            data[logical - offset : logical - offset + size] = part
        return bytes(data)
