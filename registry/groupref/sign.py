"""Signatures beside what they sign: written and found as cosign does.

Where a registry has the referrers API (distribution-spec 1.1, "Listing Referrers"), a signature is a manifest with a
``subject`` and the artifact type of cosign's OCI 1.1 mode. Elsewhere, and in layouts, all signatures of a digest are the
layers of one image under the tag ``sha256-<hex>.sig`` (cosign's SIGNATURE_SPEC.md, "Tag-based Discovery"): a payload blob
each, the signature base64 in the descriptor's annotation. Both places are looked at when verifying.

Adding to the tag is read, change, write: two signers at the same moment may lose one signature; both then see it by
verifying.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weenv.core import digest as digests
from weenv.core.errors import BadReference, ConfigError, FormatError, NotFoundInSource, VerificationError
from weenv.registry.auth import scope_of
from weenv.registry.client import RegistryClient
from weenv.registry.endpoints import LayoutEnd, RegistryEnd
from weenv.registry.groupref import keys as keyring
from weenv.registry.groupref.build import dump
from weenv.registry.groupref.policy import (
    DENY,
    MAX_PAYLOAD,
    MAX_SIGNATURE,
    REQUIRE,
    Accepted,
    Policy,
    Signature,
    check_signatures,
    make_payload,
)
from weenv.registry.groupref.publish import open_end, writable
from weenv.registry.jsonsplice import parse_object
from weenv.registry.manifest import (
    MAX_MANIFEST,
    OCI_CONFIG,
    OCI_INDEX,
    OCI_MANIFEST,
    Descriptor,
    Manifest,
    parse_descriptor,
    parse_manifest,
)
from weenv.registry.reference import LayoutLocation, Location, Reference, place_name

PAYLOAD_TYPE = "application/vnd.dev.cosign.simplesigning.v1+json"
SIGNATURE_ANNOTATION = "dev.cosignproject.cosign/signature"
REFERRER_TYPE = "application/vnd.dev.cosign.artifact.sig.v1+json"
MAX_SIGNATURES = 64
"""Signatures of one digest that are looked at."""

TAG, REFERRERS, AUTO = "tag", "referrers", "auto"


@dataclass(frozen=True, slots=True)
class Signed:
    """A signature as stored: for which digest and name, by which key, and where (TAG or REFERRERS)."""

    reference: str
    digest: str
    identity: str
    fingerprint: str
    stored: str


def signature_tag(digest: str) -> str:
    """The tag under which the signatures of a digest are."""
    return f"sha256-{digests.hex_of(digest)}.sig"


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
            layers = list(old.layers) if old is not None else []
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
    if await _referrers(client, location, digest) is not None:
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


async def signatures(client: RegistryClient, location: Location, digest: str) -> list[Signature]:
    """All signatures of a digest that are stored beside it, at most MAX_SIGNATURES; none is verified.

    What is malformed is left out: it is worth as much as no signature. Raises SourceError where a place cannot be asked.
    """
    manifests: list[Manifest] = []
    tagged = await _tagged(client, location, signature_tag(digest))
    if tagged is not None:
        manifests.append(tagged)
    if isinstance(location, Reference):
        for child in (await _referrers(client, location, digest) or [])[:MAX_SIGNATURES]:
            try:
                found = await _manifest(client, location.with_digest(child.digest))
            except (FormatError, NotFoundInSource):
                continue
            if found.subject is not None and found.subject.digest == digest:
                manifests.append(found)
    layers = [layer for manifest in manifests for layer in manifest.layers if layer.media_type == PAYLOAD_TYPE]
    end = open_end(client, location)
    result: list[Signature] = []
    for layer in layers[:MAX_SIGNATURES]:
        try:
            signature = base64.b64decode(layer.annotations.get(SIGNATURE_ANNOTATION, ""), validate=True)
            if 0 < len(signature) <= MAX_SIGNATURE and layer.size <= MAX_PAYLOAD:
                result.append(Signature(await end.small(layer, MAX_PAYLOAD), signature))
        except (binascii.Error, ValueError, FormatError, NotFoundInSource):
            continue
    return result


async def _tagged(client: RegistryClient, location: Location, tag: str) -> Manifest | None:
    try:
        if isinstance(location, LayoutLocation):
            data, descriptor = await LayoutEnd(LayoutLocation(location.path, tag)).root()
            found = parse_manifest(data, descriptor.media_type, tag)
            return found if isinstance(found, Manifest) else None
        return await _manifest(client, Reference(location.host, location.repository, tag))
    except NotFoundInSource:
        return None


async def _manifest(client: RegistryClient, reference: Reference) -> Manifest:
    data, descriptor = await client.get_manifest(reference)
    found = parse_manifest(data, descriptor.media_type, str(reference))
    if not isinstance(found, Manifest):
        raise FormatError("is an index", member=str(reference))
    return found


async def _referrers(client: RegistryClient, reference: Reference, digest: str) -> list[Descriptor] | None:
    """The signature manifests that say they are about ``digest``; None where the registry has no referrers API.

    Only the first page is read: registries list the newest few dozen there, and MAX_SIGNATURES are looked at.
    """
    what = f"the referrers of {digest}"
    status, headers, body = await client.request(
        "GET", reference.api_host, f"/v2/{reference.repository}/referrers/{digest}?artifactType={REFERRER_TYPE}", what=what,
        scope=scope_of(reference.repository), accept=frozenset({200, 400, 404, 405}), limit=MAX_MANIFEST,
        headers={"Accept": OCI_INDEX},
    )  # fmt: skip
    if status != 200 or headers.get("content-type", "").partition(";")[0].strip() != OCI_INDEX:
        return None
    _, raw = parse_object(body, what, MAX_MANIFEST)
    rows = raw.get("manifests")
    if not isinstance(rows, list):
        return None
    # A registry may ignore the filter. An empty list is an answer, too.
    return [parse_descriptor(row, what) for row in rows if isinstance(row, dict) and row.get("artifactType") == REFERRER_TYPE]


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
    found: list[Signature] = []
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
    "AUTO", "REFERRERS", "TAG", "Signed", "admit", "sign", "signature_tag", "signatures", "verify",
]  # fmt: skip
