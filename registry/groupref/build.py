"""The documents of a group: its image config and manifest, made anew or cut out of an image's. No I/O.

Both are JSON with sorted keys and no spaces, and hold no time but the one they are given: the same layers and settings
give the same digest.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weenv.core import digest as digests
from weenv.core.errors import BadReference, ConfigError, FormatError
from weenv.registry.groupref.model import ARTIFACT_TYPE, CREATED, KIND, KINDS, MAX_STACK, VERSION
from weenv.registry.jsonsplice import parse_object
from weenv.registry.manifest import MAX_CONFIG, OCI_CONFIG, OCI_MANIFEST, Descriptor, Manifest

_VERSION = re.compile(r"[\x21-\x7e]{1,128}\Z")
_RANGE = re.compile(r"(?P<first>[0-9]{1,4})?(?P<dots>\.\.)?(?P<last>[0-9]{1,4})?\Z", re.ASCII)
_ENVIRONMENT = re.compile(r"[^=\0\s]+=[^\0]*\Z")
_MAX_SECONDS = 253_402_300_799
"""The last second that RFC 3339 can write."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What a group is to say of itself. Empty fields are left out, or left as the image has them.

    ``created`` is in seconds since 1970; None: from what the group is made of. ``config`` holds the execution parameters of
    image-spec config.md (``Env``, ``WorkingDir``, ``User``, ``Entrypoint``, ``Cmd``, ``Labels``).
    """

    kind: str = ""
    version: str = ""
    created: int | None = None
    platform: str = "linux/amd64"
    config: Mapping[str, Any] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind and self.kind not in KINDS:
            raise ConfigError(f"unknown kind of group {self.kind!r}", hint=f"known: {', '.join(KINDS)}")
        if self.version and _VERSION.match(self.version) is None:
            raise ConfigError(f"not a version: {self.version[:140]!r}", hint="up to 128 printable characters, no spaces")
        for name in self.config.get("Env", ()):
            if _ENVIRONMENT.match(name) is None:
                raise ConfigError(f"not an environment variable: {name[:100]!r}", hint="write NAME=VALUE")
        if self.created is not None and not 0 <= self.created <= _MAX_SECONDS:
            raise ConfigError(f"a time of creation out of range: {self.created}")


@dataclass(frozen=True, slots=True)
class Documents:
    """A config and a manifest, ready to be stored; ``descriptor`` is the manifest's."""

    config: bytes
    config_descriptor: Descriptor
    manifest: bytes
    descriptor: Descriptor


def rfc3339(seconds: int) -> str:
    """A time in UTC with whole seconds (RFC 3339)."""
    return datetime.datetime.fromtimestamp(min(max(seconds, 0), _MAX_SECONDS), datetime.UTC).strftime(
        "%Y-%m-%dT%H:%M:%SZ"
    )


def dump(value: object) -> bytes:
    """JSON, the same bytes for the same value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def parse_layers(text: str, count: int) -> range:
    """``A..B``, ``A..``, ``..B`` or ``A``, counted from 1, both ends in: indexes from 0. Raises BadReference."""
    match = _RANGE.match(text)
    if match is None or not text or not (match["first"] or match["dots"]) or (match["last"] and not match["dots"]):
        raise BadReference(f"not a range of layers: {text[:40]!r}", hint="write A..B, A.. or ..B, counted from 1 at the bottom")
    first = int(match["first"] or 1)
    last = int(match["last"] or count) if match["dots"] else first
    if not 1 <= first <= last <= count:
        raise BadReference(f"the image has no layers {text}", hint=f"it has {count}, counted from 1 at the bottom")
    return range(first - 1, last)


def new_group(spec: GroupSpec, layers: Sequence[tuple[Descriptor, str]], created: int) -> Documents:
    """A group of new layers: (descriptor, diffID), bottom first. Raises FormatError for too many."""
    when = rfc3339(spec.created if spec.created is not None else created)
    system, _, rest = spec.platform.partition("/")
    architecture, _, variant = rest.partition("/")
    config: dict[str, Any] = {
        "architecture": architecture,
        "config": dict(spec.config),
        "created": when,
        "history": [{"created": when, "created_by": "weenv group build"} for _ in layers],
        "os": system,
        "rootfs": {"diff_ids": [diff_id for _, diff_id in layers], "type": "layers"},
    }
    if variant:
        config["variant"] = variant
    return _documents(spec, dump(config), [layer for layer, _ in layers], when, {})


def cut_group(spec: GroupSpec, manifest: Manifest, config: bytes, chosen: range, *, keep_config: bool = True) -> Documents:
    """Some layers of an image as a group: layers and their order, and the image's own settings below ``spec``'s."""
    _, raw = parse_object(config, "image config", MAX_CONFIG)
    diff_ids = raw.get("rootfs", {}).get("diff_ids", []) if isinstance(raw.get("rootfs"), dict) else []
    if len(diff_ids) != len(manifest.layers):
        raise FormatError(f"its config lists {len(diff_ids)} diffIDs for {len(manifest.layers)} layers", member="image")
    raw["rootfs"] = {"type": "layers", "diff_ids": [diff_ids[number] for number in chosen]}
    history = raw.pop("history", None)
    if kept := _history(history, chosen, len(manifest.layers)):
        raw["history"] = kept
    own = raw.get("config") if keep_config else None
    raw["config"] = {**(own if isinstance(own, dict) else {}), **spec.config}
    for key in ("container", "container_config", "docker_version", "parent", "id"):  # docker's own; they name other images
        raw.pop(key, None)
    if spec.created is not None:
        raw["created"] = rfc3339(spec.created)
    created = raw.get("created")
    when = created if isinstance(created, str) and len(created) < 64 else rfc3339(0)
    raw["created"] = when
    layers = [manifest.layers[number] for number in chosen]
    inherited = {key: value for key, value in manifest.annotations.items() if key in (KIND, VERSION)}
    return _documents(spec, dump(raw), layers, when, inherited)


def _history(history: object, chosen: range, count: int) -> list[Any] | None:
    """The entries of the chosen layers; None where the history does not fit the layers (image-spec: it is optional)."""
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        return None
    made = [entry for entry in history if not entry.get("empty_layer")]
    return [made[number] for number in chosen] if len(made) == count else None


def _documents(
    spec: GroupSpec, config: bytes, layers: Sequence[Descriptor], when: str, inherited: Mapping[str, str]
) -> Documents:
    if len(layers) > MAX_STACK:
        raise FormatError(f"{len(layers)} layers, at most {MAX_STACK} can be stacked", member="group", hint="--squash them")
    annotations = {**inherited, **spec.annotations, CREATED: when}
    if spec.kind:
        annotations[KIND] = spec.kind
    if spec.version:
        annotations[VERSION] = spec.version
    config_descriptor = Descriptor(OCI_CONFIG, digests.sha256(config), len(config))
    manifest = dump(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "artifactType": ARTIFACT_TYPE,
            "config": config_descriptor.to_json(),
            "layers": [layer.to_json() for layer in layers],
            "annotations": annotations,
        }
    )
    return Documents(config, config_descriptor, manifest, Descriptor(OCI_MANIFEST, digests.sha256(manifest), len(manifest)))
