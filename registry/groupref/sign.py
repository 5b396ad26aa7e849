"""Signatures beside what they sign: written and found as cosign does.

Where they are is told in search.py. Adding to the tag is read, change, write: two signers at the same moment may lose one
signature; both then see it by verifying.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from weenv.core import digest as digests
from weenv.core.errors import (
    BadReference,
    ConfigError,
    FormatError,
    VerificationError,
)
from weenv.registry.client import RegistryClient
from weenv.registry.endpoints import LayoutEnd, RegistryEnd, open_end
from weenv.registry.groupref import keys as keyring
from weenv.registry.groupref.build import dump
from weenv.registry.groupref.policy import (
    DENY,
    REQUIRE,
    Accepted,
    Judge,
    Policy,
    make_payload,
)
from weenv.registry.groupref.publish import writable
from weenv.registry.groupref.search import (
    MAX_TAGGED,
    PAYLOAD_TYPE,
    REFERRER_TYPE,
    SIGNATURE_ANNOTATION,
    Search,
    referrers,
    signature_tag,
    tagged,
)
from weenv.registry.manifest import (
    OCI_CONFIG,
    OCI_MANIFEST,
    Descriptor,
    Manifest,
    parse_manifest,
)
from weenv.registry.reference import LayoutLocation, Location, Reference, place_name

TAG, REFERRERS, AUTO = "tag", "referrers", "auto"


@dataclass(frozen=True, slots=True)
class Signed:
    """A signature as stored: for which digest and name, by which key, and where (TAG or REFERRERS)."""

    reference: str
    digest: str
    identity: str
    fingerprint: str
    stored: str


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
            old = await tagged(client, location, tag)
            layers = list(old.layers) if isinstance(old, Manifest) else []
            if not any(was.digest == layer.digest and was.annotations == layer.annotations for was in layers):
                layers.append(layer)
            if len(layers) > MAX_TAGGED:
                raise FormatError(f"has {MAX_TAGGED} signatures already", member=str(location))
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
    if await referrers(client, location, digest, REFERRER_TYPE) is not None:
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
    judge = Judge(wanted, names, keys)
    searches = [Search(client, location, one) for one in wanted]
    for search in searches:
        async with aclosing(search.found()) as candidates:
            async for candidate in candidates:
                accepted = judge.accepted(candidate)
                if accepted is not None:
                    return accepted
    looked, more = sum(search.looked for search in searches), any(search.more for search in searches)
    raise judge.refuse(str(location), looked=looked, more=more)


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


__all__ = ["AUTO", "REFERRERS", "TAG", "Signed", "admit", "sign", "verify"]
