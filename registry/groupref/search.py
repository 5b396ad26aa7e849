"""Signatures beside what they sign: where cosign and we put them, and how those that may count are found.

Where a registry has the referrers API (distribution-spec 1.1, "Listing Referrers"), a signature is a manifest with a
``subject`` and the artifact type of cosign's OCI 1.1 mode. Elsewhere, and in layouts, all signatures of a digest are the
layers of one image under the tag ``sha256-<hex>.sig`` (cosign's SIGNATURE_SPEC.md, "Tag-based Discovery"): a payload blob
each, the signature base64 in the descriptor's annotation. cosign 3 stores a sigstore bundle (bundle.py) instead, as a
referrer, which registries without that API list under the tag ``sha256-<hex>`` (distribution-spec, "Referrers Tag Schema").
All these places are looked at when verifying.

Whoever may push can put any number of others there, and nothing but the key tells them apart. So they are read a few at a
time, the tag's first, then the likeliest of each kind, until one counts; MAX_LOOKED and MAX_TRAFFIC bound what a crowd costs,
and where they are met, that is said: the right one may be among the rest.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from urllib.parse import urlencode

from weenv.core import digest as digests
from weenv.core.aio import gather_all
from weenv.core.errors import FormatError, NotFoundInSource, SourceError, UnavailableError
from weenv.registry.auth import scope_of
from weenv.registry.client import RegistryClient
from weenv.registry.endpoints import LayoutEnd, RegistryEnd, open_end
from weenv.registry.groupref.bundle import BUNDLE_TYPE, MAX_BUNDLE, PREDICATE_ANNOTATION, Bundle, may_sign, parse_bundle
from weenv.registry.groupref.bundle import MEDIA_TYPE as BUNDLE
from weenv.registry.groupref.policy import MAX_PAYLOAD, MAX_SIGNATURE, Rejected, Signature
from weenv.registry.groupref.publish import next_query
from weenv.registry.jsonsplice import parse_object
from weenv.registry.manifest import (
    MAX_MANIFEST,
    OCI_INDEX,
    OCI_MANIFEST,
    Descriptor,
    Index,
    Manifest,
    parse_descriptor,
    parse_manifest,
)
from weenv.registry.reference import LayoutLocation, Location, Reference

PAYLOAD_TYPE = "application/vnd.dev.cosign.simplesigning.v1+json"
SIGNATURE_ANNOTATION = "dev.cosignproject.cosign/signature"
REFERRER_TYPE = "application/vnd.dev.cosign.artifact.sig.v1+json"
_EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
MAX_TAGGED = 64
"""Signatures under one tag: they are one manifest's layers."""
MAX_LOOKED = 1024
"""Signatures of one digest that are looked at, of each kind, if none before them counts: two small requests each."""
MAX_TRAFFIC = 64 << 20
"""Bytes of manifests and bundles that are read for one digest; a bundle of cosign's takes some ten thousand."""
AT_ONCE = 16
"""So many are read side by side."""
MAX_PAGES = 64
"""Pages of a registry's list of referrers that are read; registries put a few dozen to a thousand on one."""
MAX_ROWS = 4096
"""Rows of such a list that are read."""


def referrers_tag(digest: str) -> str:
    """The tag under which a registry without the referrers API lists what refers to a digest."""
    return f"sha256-{digests.hex_of(digest)}"


def signature_tag(digest: str) -> str:
    """The tag under which the signatures of a digest are."""
    return referrers_tag(digest) + ".sig"


@dataclass
class Search:
    """A search for the signatures of one digest. ``looked`` counts those that were read; ``more``: there are others."""

    client: RegistryClient
    location: Location
    digest: str
    looked: int = 0
    more: bool = False
    _traffic: int = 0
    _subject: bytes = b""
    _away: UnavailableError | None = None
    _any: bool = False
    _later: list[Descriptor] = field(default_factory=list)
    """The layers that are no manifest's first, so that one with many hides no other's."""

    def __post_init__(self) -> None:
        self._end = open_end(self.client, self.location)

    async def found(self) -> AsyncGenerator[Signature | Rejected, None]:
        """What is stored as a signature, the likeliest first; none is verified.

        What is malformed is left out, or said to be of no use: it is worth as much as no signature. Raises SourceError where a
        place cannot be asked.
        """
        with contextlib.suppress(FormatError):
            manifest = await tagged(self.client, self.location, signature_tag(self.digest))
            if isinstance(manifest, Manifest):
                layers = _layers(manifest)
                self.more |= len(layers) > MAX_TAGGED
                for some in _batches(layers[:MAX_TAGGED]):
                    for each in await self._read(some):
                        yield each
        rows = await self._rows()
        for batch in _batches(rows):
            for said in await gather_all(*(self._referrer(row) for row in batch)):
                for each in said:
                    yield each
        for batch in _batches(self._later):
            for each in await self._read(batch):
                yield each
        if self._away is not None and not self._any:
            raise self._away

    async def _rows(self) -> list[Descriptor]:
        """The manifests to look at, the kinds in turn, so that many of one do not hide another."""
        kinds, cut = await _referring(self.client, self.location, self.digest)
        self.more |= cut or any(len(rows) > MAX_LOOKED for rows in kinds)
        return [row for rows in zip_longest(*(rows[:MAX_LOOKED] for rows in kinds)) for row in rows if row is not None]

    def _afford(self, what: Descriptor) -> bool:
        """Whether there is traffic left for it."""
        if self._traffic + what.size > MAX_TRAFFIC:
            self.more = True
            return False
        self._traffic += what.size
        return True

    async def _referrer(self, row: Descriptor) -> list[Signature | Rejected]:
        """What a row's manifest says in its first layer, where it is about the digest and may hold a signature."""
        if not self._afford(row):
            return []
        try:
            manifest = parse_manifest(await self._end.manifest(row), row.media_type, row.digest)
        except UnavailableError:
            raise
        except (FormatError, SourceError):
            return []
        if not isinstance(manifest, Manifest) or manifest.subject is None or manifest.subject.digest != self.digest:
            return []
        layers = _layers(manifest) if may_sign(manifest.annotations) else []
        self._later += layers[1 : MAX_TAGGED + 1]
        self.more |= len(layers) > MAX_TAGGED + 1 or len(self._later) > MAX_LOOKED
        del self._later[MAX_LOOKED:]
        return await self._read(layers[:1])

    async def _read(self, layers: Sequence[Descriptor]) -> list[Signature | Rejected]:
        """What some layers say, in their order."""
        found = await gather_all(*(self._one(layer) for layer in layers))
        return [each for some in found for each in some]

    async def _one(self, layer: Descriptor) -> list[Signature | Rejected]:
        most = MAX_PAYLOAD if layer.media_type == PAYLOAD_TYPE else MAX_BUNDLE
        if layer.size <= most and not self._afford(layer):  # what is larger is not read
            return []
        self.looked += 1
        found: list[Signature | Rejected] = []
        try:
            if layer.media_type == PAYLOAD_TYPE:
                found += await _simple(self._end, layer)
            else:
                bundle = await _bundle(self._end, layer)
                if bundle.statement is None and not self._subject:  # once for all that are over it
                    self._subject = await _manifest(self.client, self.location, self.digest)
                found.append(bundle.over(self._subject))
            self._any |= bool(found)
        except (FormatError, SourceError) as error:  # a layer that is shorter than it says must not hide the next one
            self._away = error if isinstance(error, UnavailableError) else self._away
            found.append(Rejected(str(error)))
        return found


def _batches(items: Sequence[Descriptor]) -> Iterable[Sequence[Descriptor]]:
    return (items[at : at + AT_ONCE] for at in range(0, len(items), AT_ONCE))


def _layers(manifest: Manifest) -> list[Descriptor]:
    """Those layers of a manifest that may be signatures."""
    return [layer for layer in manifest.layers if layer.media_type == PAYLOAD_TYPE or layer.media_type.startswith(BUNDLE)]


async def _simple(end: LayoutEnd | RegistryEnd, layer: Descriptor) -> list[Signature]:
    try:
        signature = base64.b64decode(layer.annotations.get(SIGNATURE_ANNOTATION, ""), validate=True)
    except ValueError:
        return []
    if not 0 < len(signature) <= MAX_SIGNATURE or layer.size > MAX_PAYLOAD:
        return []
    return [Signature(await end.small(layer, MAX_PAYLOAD), signature)]


async def _bundle(end: LayoutEnd | RegistryEnd, layer: Descriptor) -> Bundle:
    if layer.size > MAX_BUNDLE:
        raise FormatError(f"larger than {MAX_BUNDLE} bytes", member="sigstore bundle")
    return parse_bundle(await end.small(layer, MAX_BUNDLE))


async def _manifest(client: RegistryClient, location: Location, digest: str) -> bytes:
    itself = LayoutLocation(location.path, "", digest) if isinstance(location, LayoutLocation) else location.with_digest(digest)
    return (await open_end(client, itself).root())[0]


def _beside(location: Location, tag: str) -> Location:
    if isinstance(location, LayoutLocation):
        return LayoutLocation(location.path, tag)
    return Reference(location.host, location.repository, tag)


async def tagged(client: RegistryClient, location: Location, tag: str) -> Manifest | Index | None:
    """What a tag beside ``location`` means; None where there is none. Raises SourceError, FormatError."""
    place = _beside(location, tag)
    try:
        data, descriptor = await open_end(client, place).root()
    except NotFoundInSource:
        return None
    return parse_manifest(data, descriptor.media_type, str(place))


_Row = tuple[str, Descriptor]
"""A signature's manifest as listed: its kind (REFERRER_TYPE, BUNDLE, or empty where the list does not say), descriptor."""


async def _referring(client: RegistryClient, location: Location, digest: str) -> tuple[list[list[Descriptor]], bool]:
    """The manifests that say they hold signatures of ``digest``, by the referrers API, or by the tag that stands for it; for
    each kind the likeliest first. And whether there may be more."""
    if isinstance(location, Reference):
        signed = await referrers(client, location, digest, REFERRER_TYPE)
        if signed is not None:
            bundles = await referrers(client, location, digest, BUNDLE_TYPE) or Listed([])
            return _foremost([*signed.rows, *bundles.rows]), signed.more or bundles.more
    try:
        data, _ = await open_end(client, _beside(location, referrers_tag(digest))).root()
        rows = _rows(data, f"the referrers of {digest}", listing=True)
    except (FormatError, NotFoundInSource):
        return [], False
    return _foremost(rows), len(rows) >= MAX_ROWS


def _foremost(rows: Iterable[_Row]) -> list[list[Descriptor]]:
    """Those of each kind. First come those that say they hold a signature, as cosign's do, and of these the small ones."""
    kinds: dict[str, dict[str, Descriptor]] = {}
    for kind, row in rows:
        if may_sign(row.annotations):
            kinds.setdefault(kind, {})[row.digest] = row
    return [
        sorted(found.values(), key=lambda row: (PREDICATE_ANNOTATION not in row.annotations, row.size))
        for found in kinds.values()
    ]


@dataclass
class Listed:
    """What a registry lists, as far as it was read; ``more``: not to its end."""

    rows: list[_Row]
    more: bool = False


async def referrers(client: RegistryClient, reference: Reference, digest: str, kind: str) -> Listed | None:
    """The signature manifests that say they are about ``digest``; None where the registry has no referrers API.

    ``kind`` is the artifact type asked for; a registry may ignore that, and tell all. Pages are followed (distribution-spec
    1.1, "Listing Referrers": a Link header, with whatever parameters the registry needs), up to MAX_PAGES and MAX_ROWS.
    """
    what = f"the referrers of {digest}"
    query = urlencode({"artifactType": kind})
    found: Listed | None = None
    seen: set[str] = set()
    while query and query not in seen:
        if len(seen) == MAX_PAGES or (found is not None and len(found.rows) >= MAX_ROWS):
            assert found is not None
            found.more = True
            break
        seen.add(query)
        status, headers, body = await client.request(
            "GET", reference.api_host, f"/v2/{reference.repository}/referrers/{digest}?{query}", what=what,
            scope=scope_of(reference.repository), accept=frozenset({200, 400, 404, 405, 406}), limit=MAX_MANIFEST,
            headers={"Accept": OCI_INDEX},
        )  # fmt: skip
        if status != 200 or headers.get("content-type", "").partition(";")[0].strip() != OCI_INDEX:
            break
        try:
            found = found or Listed([])
            found.rows += _rows(body, what)
        except FormatError:
            break
        query = next_query(headers.get("link", ""))
    return found


def _rows(data: bytes, what: str, *, listing: bool = False) -> list[_Row]:
    """Those rows of an index that may be signatures; a malformed one is left out. In the ``listing`` under a tag, which
    clients write, the type may be the config's (cosign 3.0, go-containerregistry before 0.21.6) or left out.
    Raises FormatError."""
    _, raw = parse_object(data, what, MAX_MANIFEST)
    rows = raw.get("manifests")
    kinds = {REFERRER_TYPE: REFERRER_TYPE} | ({_EMPTY_TYPE: "", None: ""} if listing else {})
    found: list[_Row] = []
    for row in rows if isinstance(rows, list) else ():
        said = row.get("artifactType") if isinstance(row, dict) else False
        if not isinstance(said, str | None):
            continue
        kind = BUNDLE if said is not None and said.startswith(BUNDLE) else kinds.get(said)
        if kind is None or len(found) == MAX_ROWS:
            continue
        with contextlib.suppress(FormatError):
            descriptor = parse_descriptor(row, what)
            if descriptor.media_type == OCI_MANIFEST and descriptor.size <= MAX_MANIFEST:
                found.append((kind, descriptor))
    return found
