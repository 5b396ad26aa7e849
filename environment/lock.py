"""Pinning a plan: every reference gets the digest it means now, everything else in the file stays as it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from weenv.environment.yamlnodes import Document, PlanError
from weenv.registry.groupref.model import ResolvedGroup
from weenv.registry.reference import LayoutLocation, parse_location


@dataclass(frozen=True, slots=True)
class Pin:
    """One reference of a plan: what it says, what it means now, and whether that is what its own digest says."""

    reference: str
    digest: str
    pinned: str
    moved: bool


def pin(reference: str, digest: str) -> Pin:
    """``reference`` with ``digest``; a digest that it has already is kept, and ``moved`` tells whether the tag left it."""
    location = parse_location(reference)
    if isinstance(location, LayoutLocation):
        have, base = location.digest, f"oci:{location.path}"
    else:
        have, base = location.digest, reference.partition("@")[0]
    return Pin(reference, digest, f"{base}@{have or digest}", bool(have) and have != digest)


def tag_of(reference: str) -> str:
    """The reference without its digest: what is asked to see whether a tag has moved; empty where it has no tag."""
    location = parse_location(reference)
    if not location.digest:
        return reference
    return reference.partition("@")[0] if location.tag and not isinstance(location, LayoutLocation) else ""


def lock_text(text: str, source: str, groups: Sequence[ResolvedGroup]) -> str:
    """The plan's text with each group's reference pinned; comments and layout stay. Raises PlanError."""
    document = Document(text, source)
    nodes = _reference_nodes(document)
    if len(nodes) != len(groups):
        raise PlanError(f"{len(groups)} groups for {len(nodes)} references", where=source)
    for node, group in sorted(zip(nodes, groups, strict=True), key=lambda item: -item[0].start_mark.index):
        pinned = pin(str(node.value), group.digest).pinned
        text = text[: node.start_mark.index] + pinned + text[node.end_mark.index :]
    return text


def _reference_nodes(document: Document) -> list[yaml.ScalarNode]:
    top = document.mapping(document.root, "the plan")
    found: list[yaml.ScalarNode] = []
    groups = top.get("groups")
    if not isinstance(groups, yaml.SequenceNode):
        raise document.error(document.root, "the plan has no groups")
    for item in groups.value:
        node = document.mapping(item, "group").get("ref", item) if isinstance(item, yaml.MappingNode) else item
        if not isinstance(node, yaml.ScalarNode) or any(node is other for other in found):
            raise document.error(item, "an alias cannot be pinned", "write the reference out")
        found.append(node)
    return found
