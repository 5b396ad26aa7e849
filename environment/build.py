"""From a plan to the image that its environments start from: resolve the groups, make the mutations' layer, compose.

The one way that the command line, the gateway and the lifecycle take.
"""

from __future__ import annotations

from weenv.environment.compose import Composed, compose_image, stack
from weenv.environment.model import Plan
from weenv.environment.mutate.mutator import Mutator
from weenv.environment.nodelayers import NodeLayers
from weenv.registry.groupref.model import LayerRef
from weenv.registry.groupref.resolve import Resolver


async def compose(
    plan: Plan, *, resolver: Resolver, root: str, mutator: Mutator | None = None, local: NodeLayers | None = None
) -> Composed:
    """The image of ``plan``, whose mutation layer is on the node with ``root`` when this returns.

    ``mutator``: one that is kept from plan to plan saves reading the same tables of contents again. ``local`` converts layers
    that mutations read and that are not lazy. Raises SourceError,
    FormatError (MutationError and ConflictError among them), NotLazyError where a mutation needs a layer that is not lazy,
    StorageError.
    """
    groups = await resolver.resolve_all(use.ref for use in plan.groups)
    top: tuple[LayerRef, ...] = ()
    if any(not mutation.run for mutation in plan.mutations):
        worker = mutator or Mutator(resolver.client, root, local=local)
        top = await worker.mutate(plan.mutations, stack(groups))
    return compose_image(plan, groups, top, platform=plan.platform or resolver.platform)
