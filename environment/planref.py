"""Plans in registries: an OCI artifact whose one layer is the plan's YAML.

::

    artifactType   application/vnd.weenv.plan.v1
    config         the empty JSON object (image-spec 1.1 manifest.md, "Guidelines for Artifact Usage")
    layers[0]      application/vnd.weenv.plan.v1+yaml, with the plan's name as org.opencontainers.image.title

What is published holds everything itself: texts that a plan takes from files beside it are written into it (YAML has no
NUL, so files with one are published as a group instead). A plan may be signed like a group (``weenv group sign``), and the
node's policy is asked about it like about a group.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import yaml

from weenv.core.digest import sha256
from weenv.core.errors import FormatError, LimitError, UnsupportedError
from weenv.environment.model import Plan
from weenv.environment.plan import parse_plan
from weenv.environment.yamlnodes import Document, PlanError
from weenv.registry.client import RegistryClient
from weenv.registry.endpoints import open_end
from weenv.registry.groupref.build import dump
from weenv.registry.groupref.publish import writable
from weenv.registry.manifest import OCI_MANIFEST, Descriptor, Index, parse_manifest
from weenv.registry.reference import Location

if TYPE_CHECKING:  # its libraries take longer to import than a plan to read
    from weenv.registry.groupref.policy import Policy

ARTIFACT_TYPE = "application/vnd.weenv.plan.v1"
PLAN_TYPE = "application/vnd.weenv.plan.v1+yaml"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"
TITLE = "org.opencontainers.image.title"
MAX_PLAN = 64 << 20

# What stands in a double-quoted scalar as it is: YAML 1.1's printable characters but its line breaks, quotes and backslash.
_ESCAPED = re.compile(
    "[^\\x20\\x21\\x23-\\x5b\\x5d-\\x7e\\xa0-\\u2027\\u202a-\\ud7ff\\ue000-\\ufefe\\uff00-\\ufffd\\U00010000-\\U0010ffff]"
)


def _quoted(text: str) -> str:
    """A double-quoted scalar (YAML 1.1, "Escape Sequences"); lone surrogates stand for bytes that are not UTF-8."""
    return '"' + _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + '"'


def _without_lines(plan: Plan) -> Plan:
    return dataclasses.replace(
        plan,
        groups=tuple(dataclasses.replace(use, line=0) for use in plan.groups),
        mutations=tuple(dataclasses.replace(mutation, line=0) for mutation in plan.mutations),
    )


def self_contained(text: str, source: str) -> str:
    """A plan's text with the files that it names written into it; the rest stays as it is. Raises PlanError."""
    plan = parse_plan(text, source)
    document = Document(text, source)
    edits: list[tuple[int, int, str]] = []
    for place, content in _files(document, plan):
        fields = document.mapping(place, "file")
        if "\0" in content:
            raise document.error(place, "a file with NUL bytes cannot be written into a plan", "publish it as a group")
        # The end of a block mapping is where the next token begins; its one value ends before that.
        end = place.end_mark if place.flow_style else fields["file"].end_mark
        edits.append((place.start_mark.index, end.index, _quoted(content)))
    made = text
    for start, stop, quoted in sorted(edits, reverse=True):
        made = made[:start] + quoted + made[stop:]
    try:
        same = _without_lines(parse_plan(made, source, files=False)) == _without_lines(plan)
    except PlanError:
        same = False
    if not same:
        raise PlanError("a file cannot be written into it", where=source, hint="leave anchors and aliases out beside file:")
    return made


def _files(document: Document, plan: Plan) -> Iterator[tuple[yaml.MappingNode, str]]:
    """Where the plan names a file, and what that file holds."""
    mutations = document.mapping(document.root, "the plan").get("mutations")
    if not isinstance(mutations, yaml.SequenceNode):
        return
    for node, mutation in zip(mutations.value, plan.mutations, strict=True):
        fields = document.mapping(node, "mutation")
        if isinstance(patch := fields.get("patch"), yaml.MappingNode):
            yield patch, mutation.patch
        if isinstance(files := fields.get("files"), yaml.MappingNode):
            values = document.mapping(files, "files").values()
            if len(values) != len(mutation.files):
                raise document.error(files, "a path stands twice")
            for value, content in zip(values, mutation.files.values(), strict=True):
                if isinstance(value, yaml.MappingNode):
                    yield value, content.decode("utf-8", "surrogateescape")


async def push_plan(client: RegistryClient, location: Location, text: str, source: str) -> Descriptor:
    """Publish a plan's text, read from ``source``, under a name; the descriptor of what that means now.

    Raises PlanError, BadReference, SourceError, StorageError.
    """
    body = self_contained(text, source).encode()
    name = parse_plan(body, source, files=False).name
    layer = Descriptor(PLAN_TYPE, sha256(body), len(body), {TITLE: f"{name}.yaml"})
    config = Descriptor(EMPTY_TYPE, sha256(EMPTY), len(EMPTY))
    data = dump(
        {
            "schemaVersion": 2, "mediaType": OCI_MANIFEST, "artifactType": ARTIFACT_TYPE, "config": config.to_json(),
            "layers": [layer.to_json()],
        }
    )  # fmt: skip
    descriptor = Descriptor(OCI_MANIFEST, sha256(data), len(data))
    async with writable(client, location) as end:
        for blob, content in ((config, EMPTY), (layer, body)):
            if not await end.has(blob, mount=False):
                await end.put_bytes(content, blob)
        await end.publish(data, descriptor)
    return descriptor


async def pull_plan(
    client: RegistryClient, location: Location, *, limit: int = MAX_PLAN, policy: Policy | None = None
) -> tuple[bytes, str]:
    """A plan's text and the digest of its artifact, verified and accepted by ``policy``.

    Raises SourceError, FormatError (VerificationError, UnsupportedError and LimitError among them).
    """
    end = open_end(client, location)
    data, descriptor = await end.root()
    found = parse_manifest(data, descriptor.media_type, str(location))
    if isinstance(found, Index) or found.artifact_type != ARTIFACT_TYPE:
        raise UnsupportedError("holds no plan", member=str(location), hint="publish one with: weenv plan push")
    if policy is not None:
        from weenv.registry.groupref.sign import admit

        await admit(client, policy, location, descriptor.digest)
    if len(found.layers) != 1 or found.layers[0].media_type != PLAN_TYPE:
        raise FormatError("is a plan of an unknown form", member=str(location))
    layer = found.layers[0]
    if layer.size > limit:
        raise LimitError(f"a plan of {layer.size} bytes, more than {limit}", member=str(location))
    return await end.small(layer, limit), descriptor.digest
