"""The node's store of mutation layers (weenv.environment.layerstore): ``<root>/mutations``.

A key: sha256 of the base's chainID and the mutations' canonical form (mutation.key_of); "no layer" where nothing changes.
"""

from __future__ import annotations

from weenv.environment.layerstore import LayerStore
from weenv.plugin.snapshotter.layerdir import MUTATIONS

LIMIT = 2 << 30
"""Bytes of blobs kept."""


class MutationStore(LayerStore):
    """The store below the snapshotter's ``root``."""

    def __init__(self, root: str, *, limit: int = LIMIT) -> None:
        super().__init__(root, MUTATIONS, limit=limit)
