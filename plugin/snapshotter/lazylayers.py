"""What the protocol core (service.py) needs of lazy layers, and a node without any."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Protocol

from weenv.core.errors import UnavailableError
from weenv.plugin.containerd.types import Usage


class LazyLayers(Protocol):
    """What the core needs of lazy layers; ids are those of table ``layers``."""

    def attached(self, layer_ids: Collection[int]) -> bool:
        """True where all of them are mounted; does not block."""

    async def ensure(self, layer_ids: Collection[int]) -> None:
        """Mount those that are not. Raises UnavailableError or MountError."""

    def path(self, layer_id: int) -> str:
        """Where a layer is, or will be, mounted."""

    def begins(self, layer_ids: frozenset[int]) -> None:
        """A container begins on these; does not block."""

    def usage(self, layer_id: int) -> Usage:
        """Bytes and inodes that the layer takes on this node's disk."""

    def resolve(
        self, labels: Mapping[str, str], key: str, parent_ref: str, lowers: Sequence[str]
    ) -> contextlib.AbstractAsyncContextManager[int | str | None]:
        """Make the layer that ``labels`` describe ready on top of ``lowers`` (directories, top first).

        ``parent_ref`` is the parent's chainID, or empty where there is no parent or its chainID is not known.

        Gives its id, and keeps it from being swept within the block; where the snapshot is to be an ordinary one, which has
        been logged and counted, why (LABEL_NOT_LAZY), or None where nothing lazy was asked for.
        """

    async def sweep(self) -> None:
        """Unmount and delete layers that no snapshot uses."""


class NoLazyLayers:
    """No lazy layers at all: a plain overlay snapshotter."""

    def attached(self, layer_ids: Collection[int]) -> bool:
        """True without layers."""
        return not layer_ids

    async def ensure(self, layer_ids: Collection[int]) -> None:
        """Raises UnavailableError where there are layers."""
        if layer_ids:
            raise UnavailableError("lazy layers are switched off")

    def path(self, layer_id: int) -> str:
        """Never asked for."""
        raise UnavailableError("lazy layers are switched off")

    def begins(self, layer_ids: frozenset[int]) -> None:
        """Nothing to do."""

    def usage(self, layer_id: int) -> Usage:
        """Nothing."""
        return Usage()

    @contextlib.asynccontextmanager
    async def resolve(
        self, labels: Mapping[str, str], key: str, parent_ref: str, lowers: Sequence[str]
    ) -> AsyncIterator[int | str | None]:
        """Everything is ordinary."""
        yield "lazy layers are switched off, or this kernel has none\nsee weenv doctor, and [snapshotter] lazy"

    async def sweep(self) -> None:
        """Nothing to do."""
