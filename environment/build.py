"""From a plan to the image that its environments start from: resolve the groups, make the mutations' layer, compose.

The one way that the command line, the gateway and the lifecycle take.
"""

from __future__ import annotations

import logging

from weenv.environment.compose import Composed, compose_image, stack
from weenv.environment.model import Plan
from weenv.environment.mutate.mutator import Mutator
from weenv.environment.nodelayers import NodeLayers
from weenv.registry.groupref.model import LayerRef
from weenv.registry.groupref.resolve import Resolver
from weenv.registry.reference import Reference, parse_location
from weenv.registry.trusted import trust

log = logging.getLogger(__name__)


async def compose(
    plan: Plan, *, resolver: Resolver, root: str, mutator: Mutator | None = None, local: NodeLayers | None = None,
    own: bool = False,
) -> Composed:  # fmt: skip
    """The image of ``plan``, whose mutation layer is on the node with ``root`` when this returns.

    ``mutator``: one that is kept from plan to plan saves reading the same tables of contents again. ``local`` converts layers
    that mutations read and that are not lazy. ``own``: the plan is of this node's operator, so the snapshotter may ask the
    registries that it names also where those are on the node itself (registry/trusted.py). Raises SourceError,
    FormatError (MutationError and ConflictError among them), NotLazyError where a mutation needs a layer that is not lazy,
    StorageError.
    """
    groups = await resolver.resolve_all(use.ref for use in plan.groups)
    if own:
        await _trust_hosts(plan, resolver, root)
    top: tuple[LayerRef, ...] = ()
    if any(not mutation.run for mutation in plan.mutations):
        worker = mutator or Mutator(resolver.client, root, local=local)
        top = await worker.mutate(plan.mutations, stack(groups))
    return compose_image(plan, groups, top, platform=plan.platform or resolver.platform)


async def _trust_hosts(plan: Plan, resolver: Resolver, root: str) -> None:
    named = [parse_location(use.ref) for use in plan.groups]
    try:
        await trust(root, [place.host for place in named if isinstance(place, Reference)], resolver.client.config)
    except OSError as error:  # not root, or no snapshotter has run: what comes of it is said when a layer is refused
        log.debug("the plan's registries are not written down: %s", error)
