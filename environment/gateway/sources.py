"""Where the gateway's plans are: directories of the node, and registries.

A directory's plans are the operator's own and may stack anything; ``plan/NAME:TAG`` is ``NAME@TAG.yaml`` in it, or, for
the tag ``latest``, ``NAME.yaml`` (or ``.yml``; NAME may have several components). A registry's are artifacts that
``weenv plan push`` made, ``PREFIX/NAME:TAG``; what they may stack is limited by ``gateway.groups``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from weenv.core.errors import BadReference, NotFoundInSource, SourceError
from weenv.core.regular import regular
from weenv.environment.gateway.config import GatewayConfig
from weenv.environment.model import Plan
from weenv.environment.plan import parse_plan
from weenv.environment.planref import MAX_PLAN, pull_plan
from weenv.registry.client import RegistryClient
from weenv.registry.groupref.policy import Policy, matches
from weenv.registry.groupref.publish import tags
from weenv.registry.reference import (
    DEFAULT_TAG,
    LayoutLocation,
    Reference,
    check_tag,
    parse_location,
    parse_reference,
    place_name,
)

T = TypeVar("T")

_SUFFIXES = (".yaml", ".yml")
_KEEP = 128
"""Plans from registries kept parsed, and tags of them."""
_KEEP_TEXT = 1 << 20
"""Bytes of the text of a plan that is kept."""


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """A plan; ``own``: it is the operator's, and may stack anything."""

    plan: Plan
    own: bool


def allowed(patterns: Iterable[str], reference: str) -> bool:
    """Whether a repository is one of ``gateway.groups``; a layout of the node is where a pattern says ``oci:``, and not for
    ``**`` alone. Raises BadReference."""
    location = parse_location(reference)
    name, layout = place_name(location), isinstance(location, LayoutLocation)
    able = (pattern for pattern in patterns if pattern.startswith("oci:") == layout)
    return any(matches(pattern if "/" in pattern else f"{pattern}/**", name) for pattern in able)


class PlanSources:
    """Finds plans by name and tag. Belongs to one event loop."""

    def __init__(self, config: GatewayConfig, client: RegistryClient, policy: Policy | None) -> None:
        self._config = config
        self._client = client
        self._policy = policy
        self._parsed: OrderedDict[str, Plan] = OrderedDict()
        self._tags: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._parsing = asyncio.Semaphore(1)  # of the CPU, somebody else's plans get one thread

    async def find(self, name: str, tag: str) -> FoundPlan:
        """The plan ``name:tag`` of the first source that has it.

        Raises NotFoundInSource where none has, and what reading one does: PlanError, SourceError, VerificationError.
        """
        for source in self._config.plans:
            try:
                if source.startswith("/"):
                    return FoundPlan(await asyncio.to_thread(_read, source, name, tag), True)
                return FoundPlan(await self._pull(parse_reference(f"{source}/{name}:{tag}")), False)
            except NotFoundInSource:
                continue
        raise NotFoundInSource(f"no plan {name}:{tag}", hint="see gateway.plans in the node's configuration")

    async def _pull(self, reference: Reference) -> Plan:
        text = str(reference)
        known = self._tags.get(text)
        if known is not None and 0 <= time.monotonic() - known[1] < self._config.max_age and known[0] in self._parsed:
            return self._parsed[known[0]]
        body, digest = await pull_plan(self._client, reference, limit=self._config.max_plan, policy=self._policy)
        plan = self._parsed.get(digest)
        if plan is None:
            async with self._parsing:
                plan = await asyncio.to_thread(parse_plan, body, text, files=False)
        if len(body) <= _KEEP_TEXT:
            _keep(self._parsed, digest, plan)
            _keep(self._tags, text, (digest, time.monotonic()))
        return plan

    async def tags(self, name: str) -> list[str]:
        """All tags of a plan, sorted. Raises NotFoundInSource where there is none, SourceError."""
        found: set[str] = set()
        for source in self._config.plans:
            if source.startswith("/"):
                found.update(await asyncio.to_thread(_tags, source, name))
                continue
            reference = parse_reference(f"{source}/{name}")
            try:
                listed = await tags(self._client, reference.api_host, reference.repository)
            except NotFoundInSource:
                continue
            for tag in listed:  # whatever a registry says
                with contextlib.suppress(BadReference):
                    found.add(check_tag(tag))
        if not found:
            raise NotFoundInSource(f"no plan {name}")
        return sorted(found)


def _keep(table: OrderedDict[str, T], key: str, value: T) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > _KEEP:
        table.popitem(last=False)


def _read(directory: str, name: str, tag: str) -> Plan:
    """``name`` and ``tag`` are checked: their components lead nowhere but down."""
    bases = [f"{name}@{tag}", *([name] if tag == DEFAULT_TAG else [])]
    for path in (os.path.join(directory, base + suffix) for base in bases for suffix in _SUFFIXES):
        try:
            with open(path, "rb", opener=regular) as file:
                text = file.read(MAX_PLAN + 1)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise SourceError(f"cannot read the plan {name}:{tag}: {error.strerror}") from error
        return parse_plan(text, path)
    raise NotFoundInSource(f"no plan {name}:{tag}")


def _tags(directory: str, name: str) -> set[str]:
    found: set[str] = set()
    folder, _, base = os.path.join(directory, name).rpartition("/")
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                stem, suffix = os.path.splitext(entry.name)
                own, at, tag = stem.partition("@")
                if suffix in _SUFFIXES and own == base:
                    with contextlib.suppress(BadReference):
                        found.add(check_tag(tag) if at else DEFAULT_TAG)
    except (FileNotFoundError, NotADirectoryError):
        pass
    return found
