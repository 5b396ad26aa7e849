"""What the gateway answers, apart from how it is asked: names to composed images, digests to what was composed.

An image is composed when its name is asked for, and that costs no registry request while the tags behind it are believed.
What was answered is kept (:mod:`weenv.environment.gateway.store`) and answered by digest from there, under the rules that
hold now: what another policy or configuration let through is composed again first. Where a registry is away, a name means
what it last meant, with a warning.

Every answer is what ``weenv plan compose`` makes of the same plan, byte for byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from dataclasses import dataclass

from weenv.core.aio import SingleFlight
from weenv.core.digest import is_digest, sha256
from weenv.core.errors import NotFoundInSource, UnavailableError
from weenv.environment.build import compose
from weenv.environment.compose import Composed, StackedLayer
from weenv.environment.gateway.config import GatewayConfig
from weenv.environment.gateway.names import PlanName, StackName, parse_name
from weenv.environment.gateway.protocol import Refused
from weenv.environment.gateway.sources import FoundPlan, PlanSources, allowed
from weenv.environment.gateway.store import LayerPlace, Store, StoredImage
from weenv.environment.model import GroupUse, Plan
from weenv.environment.mutate.mutator import Mutator
from weenv.plugin.snapshotter.layerdir import Origin
from weenv.registry.groupref.resolve import Resolver
from weenv.registry.reference import DEFAULT_TAG, LayoutLocation, check_tag, parse_location

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob: its bytes, or its size and what holds it."""

    digest: str
    size: int
    data: bytes | None = None
    origin: Origin | None = None


class Gateway:
    """Belongs to one event loop. ``composed`` counts the images made since the start."""

    def __init__(self, config: GatewayConfig, resolver: Resolver, store: Store, mutator: Mutator, root: str) -> None:
        self.config = config
        self.resolver = resolver
        self.store = store
        self.composed = 0
        self.sources = PlanSources(config, resolver.client, resolver.policy)
        self._root = root
        self._mutator = mutator
        policy = resolver.policy.fingerprint if resolver.policy is not None else ""
        self._rules = sha256(json.dumps([policy, config.groups, config.plans]).encode())
        self._flights: SingleFlight[tuple[str, str], StoredImage] = SingleFlight()

    # -- manifests

    async def manifest(self, name: str, target: str) -> StoredImage:
        """The image that a tag or digest means under a name.

        Raises BadReference, Refused, SourceError (NotFoundInSource among them), FormatError, StorageError.
        """
        if not target.startswith("sha256:"):
            target = self._tag(name, check_tag(target))
            return await self._flights.do((name, target), lambda: self._by_tag(name, target))
        _check_digest(target)
        parse_name(name, DEFAULT_TAG, self.config.default_registry)
        found = self.store.get(name, target)
        if found is not None and found[0].rules == self._rules and await self._served(found[0]):
            return found[0]
        # Unknown here, or to be looked at again: it may be what the name means.
        tag = found[1] if found is not None else DEFAULT_TAG
        image = await self._flights.do((name, tag), lambda: self._by_tag(name, tag))
        if image.digest != target:
            raise NotFoundInSource(f"{name} is not {target}", hint="ask for it by tag")
        return image

    def _tag(self, name: str, tag: str) -> str:
        """The tag, or ``latest`` for a stack whose groups all have their own: then any tag means the same."""
        meant, other = (parse_name(name, one, self.config.default_registry) for one in (tag, f"not-{tag}"[:128]))
        return DEFAULT_TAG if isinstance(meant, StackName) and meant == other else tag

    async def _by_tag(self, name: str, tag: str) -> StoredImage:
        meant = parse_name(name, tag, self.config.default_registry)
        try:
            image = await self._compose(meant, tag)
        except UnavailableError as error:
            found = self.store.get(name, self.store.last(name, tag))
            if found is None or found[0].rules != self._rules or not await self._served(found[0]):
                raise
            log.warning(
                "registry away, answering with what the name meant before",
                extra={"image": f"{name}:{tag}", "digest": found[0].digest, "reason": error.message},
            )
            return found[0]
        made = _stored(image, self._rules, self._mutator.store.path)
        found = self.store.get(name, made.digest)
        if found is not None and found[0].rules == self._rules and self.store.last(name, tag) == made.digest:
            return found[0]  # as before: nothing to write
        if found is None:
            log.info(
                "composed",
                extra={
                    "image": f"{name}:{tag}", "digest": made.digest, "layers": len(image.layers),
                    "lazy": sum(layer.lazy for layer in image.layers),
                },
            )  # fmt: skip
        self.store.put(name, tag, made)
        return made

    async def _compose(self, meant: PlanName | StackName, tag: str) -> Composed:
        if isinstance(meant, PlanName):
            found = await self.sources.find(meant.name, tag)
        else:
            found = FoundPlan(Plan("stack", tuple(GroupUse(text) for text in meant.groups)), False)
        plan = found.plan
        if any(mutation.run for mutation in plan.mutations):
            raise Refused(
                422, "MANIFEST_INVALID", f"plan {plan.name} runs commands, and no image can", hint="start it with: weenv run"
            )
        if not found.own:
            for use in plan.groups:
                if not allowed(self.config.groups, use.ref):
                    raise Refused(
                        403, "DENIED", f"{use.ref} may not be used here", hint="list its repository in gateway.groups"
                    )
        self.composed += 1
        return await compose(plan, resolver=self.resolver, root=self._root, mutator=self._mutator)

    async def _served(self, image: StoredImage) -> bool:
        """Whether the node still has the layers of the image that it made itself; they are used now."""
        own = self._mutator.store.path
        return await asyncio.to_thread(lambda: all(_use(own, place) for place in image.layers if place.origin.path == own))

    # -- blobs

    async def blob(self, name: str, digest: str) -> Blob:
        """A config or layer of an image that was answered under a name.

        Raises Refused (BLOB_UNKNOWN), and what :meth:`manifest` does where the image has to be looked at again.
        """
        _check_digest(digest)
        parse_name(name, DEFAULT_TAG, self.config.default_registry)
        found = self.store.blob(name, digest)
        if found is not None and found.rules != self._rules:
            await self.manifest(name, found.image)
            found = self.store.blob(name, digest)
        if found is None:
            raise Refused(404, "BLOB_UNKNOWN", f"{name} has no blob {digest}", hint="ask for its manifest first")
        if found.data is not None:
            return Blob(digest, len(found.data), data=found.data)
        assert found.layer is not None
        return Blob(digest, found.layer.size, origin=found.layer.origin)

    # -- tags

    async def tags(self, name: str) -> list[str]:
        """The tags of a plan; a stack takes any tag and lists none. Raises BadReference, NotFoundInSource, SourceError."""
        meant = parse_name(name, DEFAULT_TAG, self.config.default_registry)
        try:
            return await self.sources.tags(meant.name) if isinstance(meant, PlanName) else []
        except NotFoundInSource as error:
            raise Refused(404, "NAME_UNKNOWN", error.message) from error


def _check_digest(text: str) -> None:
    if not is_digest(text):
        raise Refused(400, "DIGEST_INVALID", f"not a sha256 digest: {text[:100]!r}")


def _use(own: str, place: LayerPlace) -> bool:
    path = os.path.join(own, "blobs", "sha256", place.digest[7:])
    with contextlib.suppress(OSError):  # it is not there: the caller makes it again
        if os.stat(path).st_size == place.size:
            os.utime(path)  # the store of mutations keeps what was used last
            return True
    return False


def _origin(layer: StackedLayer, own: str) -> Origin:
    if layer.group == "mutations":
        return Origin("layout", path=own)
    location = parse_location(layer.group)
    if isinstance(location, LayoutLocation):
        return Origin("layout", path=os.path.abspath(location.path))
    return Origin("registry", host=location.api_host, repository=location.repository)


def _stored(image: Composed, rules: str, own: str) -> StoredImage:
    places = {layer.ref.digest: LayerPlace(layer.ref.digest, layer.ref.size, _origin(layer, own)) for layer in image.layers}
    return StoredImage(image.digest, image.manifest, image.config_digest, image.config, tuple(places.values()), rules)
