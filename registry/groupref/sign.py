"""Signatures beside what they sign: written and found as cosign does.

Where a registry has the referrers API (distribution-spec 1.1, "Listing Referrers"), a signature is a manifest with a
``subject`` and the artifact type of cosign's OCI 1.1 mode. Elsewhere, and in layouts, all signatures of a digest are the
layers of one image under the tag ``sha256-<hex>.sig`` (cosign's SIGNATURE_SPEC.md, "Tag-based Discovery"): a payload blob
each, the signature base64 in the descriptor's annotation. cosign 3 stores a sigstore bundle (bundle.py) instead, as a
referrer, which registries without that API list under the tag ``sha256-<hex>`` (distribution-spec, "Referrers Tag Schema").
All these places are looked at when verifying.

Adding to the tag is read, change, write: two signers at the same moment may lose one signature; both then see it by
verifying.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from weenv.core import digest as digests
from weenv.core.errors import (
    BadReference,
    ConfigError,
    FormatError,
    NotFoundInSource,
    SourceError,
    UnavailableError,
    VerificationError,
)
from weenv.registry.auth import scope_of
from weenv.registry.client import RegistryClient
from weenv.registry.endpoints import LayoutEnd, RegistryEnd
from weenv.registry.groupref import keys as keyring
from weenv.registry.groupref.build import dump
from weenv.registry.groupref.bundle import (
    BUNDLE_TYPE,
    MAX_BUNDLE,
    PREDICATE_ANNOTATION,
    Bundle,
    may_sign,
    parse_bundle,
)
from weenv.registry.groupref.bundle import MEDIA_TYPE as BUNDLE
from weenv.registry.groupref.policy import (
    DENY,
    MAX_PAYLOAD,
    MAX_SIGNATURE,
    REQUIRE,
    Accepted,
    Policy,
    Rejected,
    Signature,
    check_signatures,
    make_payload,
)
from weenv.registry.groupref.publish import next_query, open_end, writable
from weenv.registry.jsonsplice import parse_object
from weenv.registry.manifest import (
    MAX_MANIFEST,
    OCI_CONFIG,
    OCI_INDEX,
    OCI_MANIFEST,
    Descriptor,
    Index,
    Manifest,
    parse_descriptor,
    parse_manifest,
)
from weenv.registry.reference import LayoutLocation, Location, Reference, place_name

PAYLOAD_TYPE = "application/vnd.dev.cosign.simplesigning.v1+json"
SIGNATURE_ANNOTATION = "dev.cosignproject.cosign/signature"
REFERRER_TYPE = "application/vnd.dev.cosign.artifact.sig.v1+json"
_EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
MAX_SIGNATURES = 64
"""Signatures of one digest that are looked at, in each place and of each kind: many of one do not hide another."""
MAX_PAGES = 16
"""Pages of a registry's list of referrers that are read; registries put a few dozen to a thousand on one."""
MAX_ROWS = 4096
"""Rows of such a list that are read."""

TAG, REFERRERS, AUTO = "tag", "referrers", "auto"


@dataclass(frozen=True, slots=True)
class Signed:
    """A signature as stored: for which digest and name, by which key, and where (TAG or REFERRERS)."""

    reference: str
    digest: str
    identity: str
    fingerprint: str
    stored: str


def referrers_tag(digest: str) -> str:
    """The tag under which a registry without the referrers API lists what refers to a digest."""
    return f"sha256-{digests.hex_of(digest)}"


def signature_tag(digest: str) -> str:
    """The tag under which the signatures of a digest are."""
    return referrers_tag(digest) + ".sig"


# -- signing ----------------------------------------------------------------------------------------------------------


async def sign(
    client: RegistryClient, location: Location, key: keyring.PrivateKey, *, identity: str = "", storage: str = AUTO,
    optional: Mapping[str, str] | None = None,
) -> Signed:  # fmt: skip
    """Sign what a name means now: the index where it is one. ``identity`` is the repository that the signature is for.

    Raises SourceError, BadReference for a layout without ``identity``, ConfigError for a ``storage`` that is not there.
    """
    if isinstance(location, LayoutLocation) and not identity:
        raise BadReference(f"{location} is no repository's name", hint="say for which it is: --identity HOST/NAME")
    if not identity:
        assert isinstance(location, Reference)
        identity = location.name
    data, descriptor = await open_end(client, location).root()
    subject = Descriptor(parse_manifest(data, descriptor.media_type, str(location)).media_type, descriptor.digest, len(data))
    payload = make_payload(identity, subject.digest, optional)
    signature = base64.b64encode(keyring.sign(key, payload)).decode()
    layer = Descriptor(PAYLOAD_TYPE, digests.sha256(payload), len(payload), {SIGNATURE_ANNOTATION: signature})
    where = await _storage(client, location, subject.digest, storage)
    async with writable(client, location) as end:
        if not await end.has(layer, mount=False):
            await end.put_bytes(payload, layer)
        if where == REFERRERS:
            await _put(end, [layer], subject, "")
        else:
            tag = signature_tag(subject.digest)
            old = await _tagged(client, location, tag)
            layers = list(old.layers) if isinstance(old, Manifest) else []
            if not any(was.digest == layer.digest and was.annotations == layer.annotations for was in layers):
                layers.append(layer)
            if len(layers) > MAX_SIGNATURES:
                raise FormatError(f"has {MAX_SIGNATURES} signatures already", member=str(location))
            await _put(end, layers, None, tag)
    fingerprint = keyring.load_public(keyring.public_pem(key)).fingerprint
    return Signed(str(location), subject.digest, identity, fingerprint, where)


async def _storage(client: RegistryClient, location: Location, digest: str, storage: str) -> str:
    if storage not in (AUTO, TAG, REFERRERS):
        raise ConfigError(f"unknown storage of signatures {storage!r}", hint=f"known: {AUTO}, {REFERRERS}, {TAG}")
    if isinstance(location, LayoutLocation) or storage == TAG:
        if storage == REFERRERS:
            raise ConfigError("a layout has no referrers API", hint="leave --storage out")
        return TAG
    if await _referrers(client, location, digest, REFERRER_TYPE) is not None:
        return REFERRERS
    if storage == REFERRERS:
        raise ConfigError(f"{location.host} has no referrers API", hint="leave --storage out: a tag is used then")
    return TAG


async def _put(end: LayoutEnd | RegistryEnd, layers: Sequence[Descriptor], subject: Descriptor | None, tag: str) -> None:
    """Store a signature manifest under a tag, or (empty) its digest."""
    config: dict[str, Any] = {
        "architecture": "", "config": {}, "created": "0001-01-01T00:00:00Z", "history": [], "os": "",
        "rootfs": {"diff_ids": [layer.digest for layer in layers], "type": "layers"},
    }  # fmt: skip
    body = dump(config)
    described = Descriptor(REFERRER_TYPE if subject else OCI_CONFIG, digests.sha256(body), len(body))
    manifest: dict[str, Any] = {
        "schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": described.to_json(),
        "layers": [layer.to_json() for layer in layers],
    }  # fmt: skip
    if subject is not None:
        manifest |= {"artifactType": REFERRER_TYPE, "subject": subject.to_json()}
    if not await end.has(described, mount=False):
        await end.put_bytes(body, described)
    data = dump(manifest)
    root = Descriptor(OCI_MANIFEST, digests.sha256(data), len(data))
    if not tag:
        await end.put_manifest(data, root)
    elif isinstance(end, LayoutEnd):
        await end.put_manifest(data, root)
        await asyncio.to_thread(end.layout.set_tag, root, tag)
    else:
        target = Reference(end.reference.host, end.reference.repository, tag)
        await end.client.transfer.push_manifest(target, data, OCI_MANIFEST)


# -- finding ----------------------------------------------------------------------------------------------------------


async def signatures(client: RegistryClient, location: Location, digest: str) -> list[Signature | Rejected]:
    """The signatures of a digest that are stored beside it, at most MAX_SIGNATURES of each kind; none is verified.

    What is malformed is left out, or said to be of no use: it is worth as much as no signature. Raises SourceError where a
    place cannot be asked.
    """
    end = open_end(client, location)
    groups: list[list[Manifest]] = []
    with contextlib.suppress(FormatError):
        tagged = await _tagged(client, location, signature_tag(digest))
        if isinstance(tagged, Manifest):
            groups.append([tagged])
    for rows in await _referring(client, location, digest):
        found = [await _referrer(end, row, digest) for row in rows]
        groups.append([manifest for manifest in found if manifest is not None])
    result: list[Signature | Rejected] = []
    away: UnavailableError | None = None
    subject = b""  # once for all that are over it
    for layer in (layer for group in groups for layer in _layers(group)):
        try:
            if layer.media_type == PAYLOAD_TYPE:
                result += await _simple(end, layer)
                continue
            bundle = await _bundle(end, layer)
            if bundle.statement is None and not subject:
                subject = await _manifest(client, location, digest)
            result.append(bundle.over(subject))
        except (FormatError, SourceError) as error:  # a layer that is shorter than it says must not hide the next one
            away = error if isinstance(error, UnavailableError) else away
            result.append(Rejected(str(error)))
    if away is not None and not any(isinstance(each, Signature) for each in result):
        raise away
    return result


async def _referrer(end: LayoutEnd | RegistryEnd, row: Descriptor, digest: str) -> Manifest | None:
    """The manifest that a row names, where it is one that is about ``digest`` and may hold a signature."""
    try:
        found = parse_manifest(await end.manifest(row), row.media_type, row.digest)
    except UnavailableError:
        raise
    except (FormatError, SourceError):
        return None
    if not isinstance(found, Manifest) or found.subject is None or found.subject.digest != digest:
        return None
    return found if may_sign(found.annotations) else None


def _layers(manifests: Sequence[Manifest]) -> list[Descriptor]:
    """The layers that are looked at: the first of each manifest, then the second, so that one with many hides no other's."""
    found = [
        (number, layer)
        for manifest in manifests
        for number, layer in enumerate(manifest.layers)
        if layer.media_type == PAYLOAD_TYPE or layer.media_type.startswith(BUNDLE)
    ]
    return [layer for _, layer in sorted(found, key=lambda each: each[0])[:MAX_SIGNATURES]]


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


async def _tagged(client: RegistryClient, location: Location, tag: str) -> Manifest | Index | None:
    """What a tag beside ``location`` means; None where there is none. Raises SourceError, FormatError."""
    place = _beside(location, tag)
    try:
        data, descriptor = await open_end(client, place).root()
    except NotFoundInSource:
        return None
    return parse_manifest(data, descriptor.media_type, str(place))


_Row = tuple[str, Descriptor]
"""A signature's manifest as listed: its kind (REFERRER_TYPE, BUNDLE, or empty where the list does not say), descriptor."""


async def _referring(client: RegistryClient, location: Location, digest: str) -> list[list[Descriptor]]:
    """The manifests that say they hold signatures of ``digest``: by the referrers API, or by the tag that stands for it."""
    if isinstance(location, Reference):
        signed = await _referrers(client, location, digest, REFERRER_TYPE)
        if signed is not None:
            return _foremost([*signed, *(await _referrers(client, location, digest, BUNDLE_TYPE) or [])])
    try:
        data, _ = await open_end(client, _beside(location, referrers_tag(digest))).root()
        return _foremost(_rows(data, f"the referrers of {digest}", listing=True))
    except (FormatError, NotFoundInSource):
        return []


def _foremost(rows: Iterable[_Row]) -> list[list[Descriptor]]:
    """Of each kind those that are looked at. First come those that say they hold a signature, as cosign's do."""
    kinds: dict[str, dict[str, Descriptor]] = {}
    for kind, row in rows:
        if may_sign(row.annotations):
            kinds.setdefault(kind, {})[row.digest] = row
    return [
        sorted(found.values(), key=lambda row: PREDICATE_ANNOTATION not in row.annotations)[:MAX_SIGNATURES]
        for found in kinds.values()
    ]


async def _referrers(client: RegistryClient, reference: Reference, digest: str, kind: str) -> list[_Row] | None:
    """The signature manifests that say they are about ``digest``; None where the registry has no referrers API.

    ``kind`` is the artifact type asked for; a registry may ignore that, and tell all. Pages are followed (distribution-spec
    1.1, "Listing Referrers": a Link header, with whatever parameters the registry needs), up to MAX_PAGES and MAX_ROWS.
    """
    what = f"the referrers of {digest}"
    query = urlencode({"artifactType": kind})
    found: list[_Row] | None = None
    seen: set[str] = set()
    while query and query not in seen and len(seen) < MAX_PAGES and len(found or ()) < MAX_ROWS:
        seen.add(query)
        status, headers, body = await client.request(
            "GET", reference.api_host, f"/v2/{reference.repository}/referrers/{digest}?{query}", what=what,
            scope=scope_of(reference.repository), accept=frozenset({200, 400, 404, 405, 406}), limit=MAX_MANIFEST,
            headers={"Accept": OCI_INDEX},
        )  # fmt: skip
        if status != 200 or headers.get("content-type", "").partition(";")[0].strip() != OCI_INDEX:
            break
        try:
            found = [*(found or ()), *_rows(body, what)]
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


# -- verifying --------------------------------------------------------------------------------------------------------


async def verify(
    client: RegistryClient, location: Location, keys: Sequence[keyring.PublicKey], *, identity: Sequence[str] = (),
    also: Sequence[str] = (), digest: str = "",
) -> Accepted:  # fmt: skip
    """Look for a signature by one of ``keys`` over what a name means (or over ``digest``, or one of ``also``).

    ``identity`` are patterns of names that it may be for; empty: the repository's own. Raises VerificationError, SourceError.
    """
    names = tuple(identity) or (_exactly(location),)
    if not digest:
        digest = (await open_end(client, location).root())[1].digest
    wanted = (digest, *also)
    found: list[Signature | Rejected] = []
    for one in wanted:
        found += await signatures(client, location, one)
    return check_signatures(found, wanted, names, keys, str(location))


def _exactly(location: Location) -> str:
    if isinstance(location, LayoutLocation):
        raise BadReference(f"{location} is no repository's name", hint="say for which it was signed: --identity HOST/NAME")
    return location.name


async def admit(
    client: RegistryClient, policy: Policy, location: Location, digest: str, also: Sequence[str] = ()
) -> Accepted | None:
    """Let what a name means through, or raise VerificationError that says why the node's policy does not.

    ``also``: the index that lists ``digest``; a signature over it counts. None where no signature is asked for.
    """
    name = place_name(location)
    rule = policy.rule(name)
    if rule.action == DENY:
        raise VerificationError(
            "the node's policy allows nothing from there", member=name, hint="see [policy] in /etc/weenv/config.toml"
        )
    if rule.action != REQUIRE:
        return None
    return await verify(client, location, rule.keys, identity=rule.identity, also=also, digest=digest)


__all__ = [
    "AUTO", "REFERRERS", "TAG", "Signed", "admit", "referrers_tag", "sign", "signature_tag", "signatures", "verify",
]  # fmt: skip
