"""Image manifests, indexes and configs: bounded parsing into types, and rewriting that leaves the rest untouched.

Formats: image-spec manifest.md, image-index.md, config.md, descriptor.md; docker's "image manifest v2, schema 2" for the
docker media types. Bounds follow distribution-spec (manifests of 4 MiB must be accepted, larger ones need not be).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from weenv.core import digest as digests
from weenv.core.errors import BadReference, FormatError, UnsupportedError
from weenv.registry.jsonsplice import Edit, apply, elements, members, parse_object, set_members

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER_TAR = "application/vnd.oci.image.layer.v1.tar"
OCI_LAYER_GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
OCI_LAYER_ZSTD = "application/vnd.oci.image.layer.v1.tar+zstd"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
_DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar"
_DOCKER_FOREIGN = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
_OCI_FOREIGN = "application/vnd.oci.image.layer.nondistributable.v1.tar"

MANIFEST_TYPES = frozenset({OCI_MANIFEST, DOCKER_MANIFEST})
INDEX_TYPES = frozenset({OCI_INDEX, DOCKER_LIST})
ACCEPT = ", ".join((OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST))
"""The Accept header for manifests."""

TO_OCI = {
    DOCKER_MANIFEST: OCI_MANIFEST,
    DOCKER_LIST: OCI_INDEX,
    DOCKER_CONFIG: OCI_CONFIG,
    _DOCKER_LAYER: OCI_LAYER_TAR,
    _DOCKER_LAYER + ".gzip": OCI_LAYER_GZIP,
    _DOCKER_LAYER + ".zstd": OCI_LAYER_ZSTD,
    _DOCKER_FOREIGN: _OCI_FOREIGN + "+gzip",
}
"""The OCI media type of the same content."""

MAX_MANIFEST = 4 << 20
MAX_CONFIG = 8 << 20
MAX_LAYERS = 4096
MAX_MANIFESTS = 4096
MAX_BLOB = 1 << 42
MAX_ANNOTATIONS = 1024

REF_NAME = "org.opencontainers.image.ref.name"


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A descriptor (image-spec descriptor.md). ``size`` in bytes."""

    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] = field(default_factory=dict)
    platform: dict[str, Any] = field(default_factory=dict)
    urls: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The JSON object, fields in the specification's order."""
        out: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        if self.urls:
            out["urls"] = list(self.urls)
        if self.annotations:
            out["annotations"] = dict(self.annotations)
        if self.platform:
            out["platform"] = dict(self.platform)
        return out

    @property
    def compression(self) -> str:
        """How a layer of this media type is compressed: ``none``, ``gzip``, ``zstd``; empty where it is no tar layer."""
        kind = TO_OCI.get(self.media_type, self.media_type)
        for base in (OCI_LAYER_TAR, _OCI_FOREIGN):
            if kind == base:
                return "none"
            if kind in (base + "+gzip", base + "+zstd"):
                return kind.rpartition("+")[2]
        return ""

    @property
    def foreign(self) -> bool:
        """True for a layer that is not to be redistributed: its bytes are at ``urls``, maybe not in the registry."""
        return TO_OCI.get(self.media_type, self.media_type).startswith(_OCI_FOREIGN)

    @property
    def platform_name(self) -> str:
        """``os/arch[/variant]``, or empty."""
        parts = [self.platform.get(key) for key in ("os", "architecture", "variant")]
        return "/".join(part for part in parts if isinstance(part, str) and part)


def parse_descriptor(raw: object, what: str) -> Descriptor:
    """Check one descriptor. Raises :class:`FormatError` naming ``what``."""
    if not isinstance(raw, dict):
        raise FormatError("not a descriptor", member=what)
    _no_other_spelling(raw, ("mediaType", "digest", "size", "urls", "annotations", "platform", "data"), what)
    media_type, digest, size = raw.get("mediaType"), raw.get("digest"), raw.get("size")
    if not isinstance(media_type, str) or len(media_type) > 255:
        raise FormatError("a descriptor without a media type", member=what)
    if not isinstance(digest, str):
        raise FormatError("a descriptor without a digest", member=what)
    try:
        digests.check_digest(digest)
    except BadReference as error:
        raise UnsupportedError(error.message, member=what) from error
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_BLOB:
        raise FormatError("a descriptor without a usable size", member=what)
    annotations = _strings(raw.get("annotations"), what)
    platform = raw.get("platform")
    urls = raw.get("urls")
    if platform is not None and not isinstance(platform, dict):
        raise FormatError("a descriptor's platform is not an object", member=what)
    if urls is not None and not (isinstance(urls, list) and all(isinstance(url, str) for url in urls)):
        raise FormatError("a descriptor's urls are not strings", member=what)
    return Descriptor(media_type, digest, size, annotations, platform or {}, tuple(urls or ()))


def _strings(raw: object, what: str) -> dict[str, str]:
    if raw is None:
        return {}
    if not isinstance(raw, dict) or len(raw) > MAX_ANNOTATIONS or not all(isinstance(v, str) for v in raw.values()):
        raise FormatError("annotations are not strings", member=what)
    return raw


def _no_other_spelling(raw: dict[str, Any], names: tuple[str, ...], what: str) -> None:
    # Go's decoder takes "Layers" for "layers": a document with such keys means different things to different readers.
    folded = {name.lower(): name for name in names}
    for key in raw:
        if folded.get(key.lower(), key) != key:
            raise FormatError(f"key {key[:40]!r} is another spelling of a known one", member=what)


@dataclass(frozen=True, eq=False)
class Manifest:
    """An image (or artifact) manifest: ``text`` as received, and what was read from it."""

    media_type: str
    text: str
    config: Descriptor
    layers: tuple[Descriptor, ...]
    artifact_type: str = ""
    annotations: dict[str, str] = field(default_factory=dict)
    subject: Descriptor | None = None

    @property
    def data(self) -> bytes:
        """The document."""
        return self.text.encode()

    @property
    def is_image(self) -> bool:
        """True for a container image: an image config, and layers that are tars (one at least, if there are any).

        An ``artifactType`` does not make it less of one: image-spec manifest.md ("Guidelines for Artifact Usage") lets
        images carry it, and runtimes do not look at it. What carries one without being an image (signatures,
        attestations) says so by its config or its layers; all of them must be tars then, and there must be some.
        """
        if self.config.media_type not in (OCI_CONFIG, DOCKER_CONFIG):
            return False
        tars = [bool(layer.compression) for layer in self.layers]
        return all(tars) and bool(tars) if self.artifact_type else not tars or any(tars)

    def with_layers(self, layers: dict[int, Descriptor]) -> bytes:
        """The document as OCI manifest with some layer descriptors replaced; all else stays byte for byte.

        A replaced descriptor keeps the fields that :class:`Descriptor` does not know. Docker media types become OCI
        ones, because docker's manifest has no annotations and no zstd layers.
        """
        text, top = self.text, members(self.text)
        edits = set_members(text, 0, {"mediaType": OCI_MANIFEST}) if self.media_type != OCI_MANIFEST else []
        edits += _to_oci(text, top["config"][0], self.config)
        for number, (start, _) in enumerate(elements(text, top["layers"][0])):
            new = layers.get(number)
            if new is None:
                edits += _to_oci(text, start, self.layers[number])
                continue
            values: dict[str, Any] = {"mediaType": new.media_type, "digest": new.digest, "size": new.size}
            if new.annotations or self.layers[number].annotations:
                values["annotations"] = dict(new.annotations)
            edits += set_members(text, start, values)
        return apply(text, edits).encode()


@dataclass(frozen=True, eq=False)
class Index:
    """An image index or docker manifest list."""

    media_type: str
    text: str
    manifests: tuple[Descriptor, ...]
    annotations: dict[str, str] = field(default_factory=dict)

    @property
    def data(self) -> bytes:
        """The document."""
        return self.text.encode()

    def with_manifests(self, changed: dict[int, Descriptor]) -> bytes:
        """The document as OCI index with some descriptors' media type, digest, size and annotations replaced."""
        text, top = self.text, members(self.text)
        edits: list[Edit] = []
        if self.media_type != OCI_INDEX:
            edits = set_members(text, 0, {"mediaType": OCI_INDEX})
        for number, (start, _) in enumerate(elements(text, top["manifests"][0])):
            new = changed.get(number)
            if new is None:
                continue
            values: dict[str, Any] = {"mediaType": new.media_type, "digest": new.digest, "size": new.size}
            if new.annotations or self.manifests[number].annotations:
                values["annotations"] = dict(new.annotations)
            edits += set_members(text, start, values)
        return apply(text, edits).encode()


def _to_oci(text: str, start: int, descriptor: Descriptor) -> list[Edit]:
    oci = TO_OCI.get(descriptor.media_type)
    return set_members(text, start, {"mediaType": oci}) if oci else []


def parse_manifest(data: bytes, media_type: str = "", what: str = "manifest") -> Manifest | Index:
    """Parse a manifest or an index. ``media_type`` is what the registry or descriptor says, or empty.

    Raises FormatError where it is malformed or could be read as both (CVE-2021-41190), UnsupportedError for docker's
    schema 1 and unknown kinds.
    """
    text, raw = parse_object(data, what, MAX_MANIFEST)
    _no_other_spelling(
        raw, ("schemaVersion", "mediaType", "config", "layers", "manifests", "annotations", "artifactType", "subject"), what
    )
    inner = raw.get("mediaType")
    if inner is not None and not isinstance(inner, str):
        raise FormatError("mediaType is not a string", member=what)
    if "fsLayers" in raw or raw.get("schemaVersion") == 1:
        raise UnsupportedError("docker's schema 1 manifests are not supported", member=what, hint="push the image anew")
    if raw.get("schemaVersion") != 2:
        raise FormatError("schemaVersion is not 2", member=what)
    if "manifests" in raw and ("layers" in raw or "config" in raw):
        raise FormatError("both a manifest and an index", member=what)
    is_index = "manifests" in raw
    kind = media_type or inner or (OCI_INDEX if is_index else OCI_MANIFEST)
    if inner and kind != inner:
        raise FormatError(f"says it is {inner[:100]!r} where {kind[:100]!r} was promised", member=what)
    if kind not in (INDEX_TYPES if is_index else MANIFEST_TYPES):
        raise UnsupportedError(f"media type {kind[:100]!r} does not fit its content", member=what)
    annotations = _strings(raw.get("annotations"), what)
    if is_index:
        return Index(kind, text, _list(raw["manifests"], "manifests", MAX_MANIFESTS, what), annotations)
    subject, artifact_type = raw.get("subject"), raw.get("artifactType", "")
    if not isinstance(artifact_type, str):
        raise FormatError("artifactType is not a string", member=what)
    return Manifest(
        kind,
        text,
        parse_descriptor(raw.get("config"), f"{what}: config"),
        _list(raw.get("layers"), "layers", MAX_LAYERS, what),
        artifact_type,
        annotations,
        parse_descriptor(subject, f"{what}: subject") if subject is not None else None,
    )


def _list(raw: object, name: str, limit: int, what: str) -> tuple[Descriptor, ...]:
    if not isinstance(raw, list):
        raise FormatError(f"no list of {name}", member=what)
    if len(raw) > limit:
        raise FormatError(f"more than {limit} {name}", member=what)
    return tuple(parse_descriptor(item, f"{what}: {name}[{number}]") for number, item in enumerate(raw))


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What is needed of an image config: the layers' diffIDs (bottom first) and the platform."""

    diff_ids: tuple[str, ...]
    architecture: str = ""
    os: str = ""


def parse_config(data: bytes, what: str = "image config") -> ImageConfig:
    """Parse an image config (image-spec config.md, "rootfs"). Raises :class:`FormatError`."""
    _, raw = parse_object(data, what, MAX_CONFIG)
    rootfs = raw.get("rootfs")
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if diff_ids is None and isinstance(rootfs, dict):
        diff_ids = []
    if not isinstance(diff_ids, list) or len(diff_ids) > MAX_LAYERS:
        raise FormatError("no list of rootfs.diff_ids", member=what)
    for diff_id in diff_ids:
        if not isinstance(diff_id, str) or not digests.is_digest(diff_id):
            raise FormatError("a diffID is not a sha256 digest", member=what)
    architecture, system = raw.get("architecture", ""), raw.get("os", "")
    return ImageConfig(tuple(diff_ids), str(architecture)[:64], str(system)[:64])
