"""From what a caller names (a plan, a plan's file, an image) to an image that containerd can start.

An image that containerd has, under exactly this name, is taken as it is, unless the node's policy wants its repository's
signature (or nothing of it). Everything else is a plan, if only of one group:
resolved through the node's mapping cache, composed and registered, which costs no registry request and no layer byte
where the groups are known.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Any

from weenv.core.digest import chain_id, is_digest, verify
from weenv.core.errors import ConfigError, FormatError, WeenvError
from weenv.core.regular import given
from weenv.environment import recall, used
from weenv.environment.model import GroupUse, Plan
from weenv.environment.node import Node
from weenv.environment.notlazy import LABEL, line, said, to_label
from weenv.environment.recall import Ready
from weenv.plugin.containerd.client import ContainerdError

if TYPE_CHECKING:  # its libraries are needed where there is a policy only
    from weenv.registry.groupref.policy import Policy

_DOCUMENT = 4 << 20
"""Bytes of a manifest or config read from containerd."""


def is_plan_file(text: str) -> bool:
    """Whether an argument means a file: it ends as plans do, or is a path."""
    return text.endswith((".yaml", ".yml", ".json")) or (text.startswith(("/", "./", "../")) and os.path.isfile(text))


async def prepare(target: Plan | str, node: Node, *, fresh: bool = False) -> Ready:
    """Make ``target`` startable; ``fresh``: not from memory (see weenv.environment.recall). What is not lazy is said.

    Raises PlanError, BadReference, SourceError, FormatError, NotLazyError, StorageError, ContainerdError.
    """
    ready = await _prepare(target, node, fresh)
    if ready.notice and node.say is not None:
        node.say(ready.notice)
    return ready


async def _prepare(target: Plan | str, node: Node, fresh: bool) -> Ready:
    if isinstance(target, Plan):
        return (await _composed(target, node))[0]
    if is_plan_file(target):
        return await _from_file(target, node, fresh)
    try:
        if await asyncio.to_thread(_as_it_is, target, node):
            return await _known(target, node)
    except ContainerdError as error:
        if error.code != "NOT_FOUND":
            raise
    name = target.rpartition("/")[2].partition("@")[0].partition(":")[0].lower() or "image"
    return (await _composed(Plan(name, (GroupUse(target),)), node))[0]


def _as_it_is(name: str, node: Node) -> bool:
    """Whether an image of containerd's may be started with no question asked: the node's policy asks for none.

    Who pulled it into containerd need not have asked the policy; of what was composed, it has been asked. Blocking.
    """
    from weenv.registry.groupref.resolve import node_policy
    from weenv.registry.reference import parse_location, place_name

    policy = node_policy(node.config.tables)
    if policy is None or name.startswith(f"{used.HOST}/"):
        return True
    return policy.rule(place_name(parse_location(name))).action == "allow"


async def _from_file(path: str, node: Node, fresh: bool) -> Ready:
    try:
        with open(path, "rb", opener=given) as file:  # noqa: ASYNC230 - a local file, read before anything else is going on
            text = file.read(recall.MAX_PLAN + 1)
    except OSError as error:
        from weenv.environment.yamlnodes import PlanError

        raise PlanError(f"cannot be read: {error.strerror}", where=path, hint="name the plan's file, or an image") from error
    directory = os.path.join(node.directory, "plans")
    name = recall.key(text, path, node.config.tables, node.run.namespace, node.run.snapshotter)
    known = recall.recall(directory, name) if name and not fresh else None
    if known is not None:
        return known
    from weenv.environment.plan import parse_plan

    ready, until, sealed = await _composed(parse_plan(text, path), node)
    if name and until is not None and sealed is not None:
        with contextlib.suppress(OSError):  # composed again next time
            recall.remember(directory, name, ready, until, sealed)
    return ready


async def _known(name: str, node: Node) -> Ready:
    """An image of containerd's. Raises ContainerdError NOT_FOUND where it has none of that name, or not unpacked."""
    image = await node.namespace.get_image(name)
    document = await _read(node, image.target.digest)
    if "manifests" in document:
        from weenv.registry.groupref.resolve import this_platform

        wanted = this_platform()
        for item in document["manifests"]:
            platform = item.get("platform") or {}
            if f"{platform.get('os')}/{platform.get('architecture')}" == wanted:
                document = await _read(node, str(item.get("digest")))
                break
        else:
            raise WeenvError(f"{name} has nothing for {wanted}")
    label = image.labels.get(LABEL, "")
    config = await _read(node, str((document.get("config") or {}).get("digest")))
    diff_ids = (config.get("rootfs") or {}).get("diff_ids") or []
    if not diff_ids or not all(isinstance(item, str) and is_digest(item) for item in diff_ids):
        raise FormatError("its config lists no layers", member=name)
    chain = chain_id(diff_ids)
    await node.snapshots.stat(chain)
    return Ready(name, config, chain, not_lazy=label, notice=said(label))


async def _read(node: Node, digest: str) -> dict[str, Any]:
    if not is_digest(digest):
        raise FormatError(f"not a digest: {digest[:80]!r}")
    data = await node.namespace.read_content(digest, limit=_DOCUMENT)
    verify(data, digest, "what containerd holds")
    value = json.loads(data)
    if not isinstance(value, dict):
        raise FormatError("not a JSON object", member=digest)
    return value


def _sealed(tables: dict[str, Any], policy: Policy | None) -> list[list[str]] | None:
    """The files behind the policy in use (see recall.seal); None where they are being changed."""
    if policy is None:
        return []
    from weenv.registry.groupref.policy import files_of, policy_from_tables

    try:
        sealed = recall.seal(files_of(tables, policy))
        again = policy_from_tables(tables)  # what was the same before and after is what was sealed
    except (OSError, ConfigError):
        return None
    return sealed if again is not None and again.fingerprint == policy.fingerprint else None


async def _bound(node: Node, keep: int) -> None:
    """Keep the number of composed images in its bound; what fails is left to who composes the next."""
    from weenv.environment.imagebound import bound

    with contextlib.suppress(WeenvError):
        await bound(node.namespace, node.run.snapshotter, node.directory, keep)


async def _composed(plan: Plan, node: Node) -> tuple[Ready, float | None, list[list[str]] | None]:
    """The plan's image; until when (0: for ever, None: not at all) it would be the same if it were asked for again; and as
    long as which files of the policy do not change (None: not at all)."""
    from weenv.core.errors import StorageError
    from weenv.environment.build import compose
    from weenv.environment.compose import register
    from weenv.environment.composeconfig import compose_config
    from weenv.environment.nodelayers import NodeLayers
    from weenv.plugin.snapshotter.config import registry_config
    from weenv.registry.client import RegistryClient
    from weenv.registry.groupref.cache import MappingCache
    from weenv.registry.groupref.resolve import Resolver, node_policy
    from weenv.registry.reference import parse_location

    policy = node_policy(node.config.tables)
    sealed = _sealed(node.config.tables, policy)
    begin = time.time()
    try:
        cache = MappingCache(os.path.join(node.config.root, "mapping.db"))
    except StorageError:
        cache = MappingCache()
    try:
        async with RegistryClient(registry_config(node.config.tables)) as client:
            resolver = Resolver(client, cache, policy=policy, silent=node.say is not None)
            settings = compose_config(node.config.tables)
            local = NodeLayers(client, node.config.root, settings, show=node.show)
            image = await compose(plan, resolver=resolver, root=node.config.root, local=local, own=True)
            if node.say is not None:
                for away in resolver.away.values():
                    node.say(away.line())
            pinned = all(parse_location(use.ref).digest for use in plan.groups)
            until = None if resolver.stale else 0.0 if pinned else begin + resolver.max_age
            made = await register(image, node.namespace, snapshotter=node.run.snapshotter, local=local)
    finally:
        cache.close()
    await asyncio.to_thread(used.touch, node.directory, node.run.namespace, image.name)
    if made.new:
        node.background(_bound(node, settings.keep_images))
    runs = tuple((item.run, item.directory) for item in plan.mutations if item.run)
    ready = Ready(
        image.name, json.loads(image.config), image.chain, plan.name, plan.resources, runs,
        not_lazy=to_label(made.not_lazy), notice=line(made.not_lazy),
    )  # fmt: skip
    return ready, until, sealed
