"""What composing a plan would find on this node, told without making, converting or registering anything.

Best effort: where containerd does not answer, or the stores cannot be read, nothing is known.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from weenv.core.digest import chain_id
from weenv.environment.compose import StackedLayer
from weenv.environment.model import Mutation
from weenv.environment.mutate.cache import MutationStore
from weenv.environment.mutate.mutation import key_of, layered
from weenv.environment.runconfig import RunConfig
from weenv.layer.verify import TOC_ANNOTATION
from weenv.plugin.containerd.client import Client, ContainerdError
from weenv.registry.groupref.model import LayerRef

_PATIENCE = 3.0
"""Seconds for all of containerd's answers."""


def mutation_layers(root: str, mutations: Sequence[Mutation], layers: Sequence[StackedLayer]) -> tuple[LayerRef, ...] | None:
    """The layers of the mutations where the node has made them before, or there are none to make; else None.

    Blocking. Raises MutationError where the mutations are in a wrong order.
    """
    wanted = layered(mutations)
    if not wanted:
        return ()
    return MutationStore(root).get(key_of(chain_id([layer.ref.diff_id for layer in layers]), wanted))


async def snapshots(chains: Sequence[str], run: RunConfig) -> dict[str, bool]:
    """Of these chains, those that containerd has a snapshot of; True where the snapshotter serves its layer lazily."""
    found: dict[str, bool] = {}
    if not os.path.exists(run.address):
        return found
    try:
        async with asyncio.timeout(_PATIENCE), Client(run.address) as client:
            known = client.namespace(run.namespace).snapshots(run.snapshotter)
            for chain in chains:
                try:
                    found[chain] = TOC_ANNOTATION in (await known.stat(chain)).labels
                except ContainerdError as error:
                    if error.code != "NOT_FOUND":
                        break
    except TimeoutError:
        pass
    return found
