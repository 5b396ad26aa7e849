"""What a layer group is: an ordinary image manifest whose annotations say which part of an environment it holds.

A group's config carries ``rootfs.diff_ids``, so every tool that knows images can pull, copy, scan and sign it. Any plain
image can stand in for a group; its kind is then empty.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from weenv.core.digest import chain_id
from weenv.core.errors import FormatError, UnsupportedError
from weenv.registry.manifest import Manifest, parse_config

ARTIFACT_TYPE = "application/vnd.weenv.group.v1"
"""``artifactType`` of a group's manifest (image-spec manifest.md)."""

KIND = "dev.weenv.group.kind"
VERSION = "dev.weenv.group.version"
CREATED = "org.opencontainers.image.created"
"""Annotations of a group's manifest; the last is the image specification's own (annotations.md), RFC 3339."""

KINDS = ("base", "repository", "harness", "evaluator", "tools", "mutation")

MAX_STACK = 500
"""Layers of one environment: overlayfs refuses more (fs/overlayfs/params.h, OVL_MAX_STACK)."""


@dataclass(frozen=True, slots=True)
class LayerRef:
    """One layer: its descriptor (``size`` in bytes) and its place in the config (``diff_id``)."""

    digest: str
    size: int
    media_type: str
    diff_id: str
    annotations: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ResolvedGroup:
    """What a reference means: the manifest's digest and the layers, bottom first, with the place that holds them.

    ``host`` and ``repository`` are where the blobs can be had (``host`` as one connects to it); ``config_text`` is the
    image config as it is in the registry; ``kind`` is empty for a plain image.
    """

    reference: str
    host: str
    repository: str
    digest: str
    layers: tuple[LayerRef, ...]
    config_text: str
    annotations: dict[str, str] = field(default_factory=dict)
    kind: str = ""
    version: str = ""

    @property
    def config(self) -> dict[str, Any]:
        """The image config, parsed (image-spec config.md)."""
        value: dict[str, Any] = json.loads(self.config_text)
        return value

    @property
    def diff_ids(self) -> list[str]:
        """The layers' diffIDs, bottom first."""
        return [layer.diff_id for layer in self.layers]

    @property
    def chain(self) -> str:
        """chainID of the group by itself, or empty where it has no layer."""
        return chain_id(self.diff_ids) if self.layers else ""


def read_group(reference: str, host: str, repository: str, digest: str, manifest: Manifest, config: bytes) -> ResolvedGroup:
    """Put a verified manifest and its verified config together.

    Raises FormatError where they do not belong together, UnsupportedError where it is no image.
    """
    if not all(layer.compression for layer in manifest.layers):
        raise UnsupportedError(
            "holds something else than file system layers", member=reference, hint="name an image or a group"
        )
    parsed = parse_config(config, f"{reference}: config")
    if len(parsed.diff_ids) != len(manifest.layers):
        raise FormatError(
            f"its config lists {len(parsed.diff_ids)} layers, its manifest {len(manifest.layers)}", member=reference
        )
    layers = tuple(
        LayerRef(layer.digest, layer.size, layer.media_type, diff_id, dict(layer.annotations))
        for layer, diff_id in zip(manifest.layers, parsed.diff_ids, strict=True)
    )
    kind = manifest.annotations.get(KIND, "")
    if kind and kind not in KINDS:
        raise UnsupportedError(f"unknown kind of group {kind[:60]!r}", member=reference, hint=f"known: {', '.join(KINDS)}")
    return ResolvedGroup(
        reference,
        host,
        repository,
        digest,
        layers,
        config.decode(),
        dict(manifest.annotations),
        kind,
        manifest.annotations.get(VERSION, ""),
    )
