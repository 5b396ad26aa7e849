"""Sigstore bundles, cosign 3's own way to store a signature, as far as a public key can judge them. No I/O.

A bundle is JSON (sigstore's protobuf-specs, sigstore_bundle.proto, in protobuf's JSON mapping)::

    {"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
     "verificationMaterial": {"publicKey": {"hint": ...}, ...},       # or certificate, x509CertificateChain: keyless
     "dsseEnvelope": {"payload": base64, "payloadType": "application/vnd.in-toto+json", "signatures": [{"sig": base64}]}}

or, instead of the envelope, ``"messageSignature": {"signature": base64, ...}`` over the manifest itself. The envelope's
signature is over its "pre-authentication encoding" (DSSE protocol.md). Its payload is an in-toto statement (attestation
spec, v1 statement) of cosign's predicate type for signatures, about one subject::

    {"_type": "https://in-toto.io/Statement/v1", "predicateType": "https://sigstore.dev/cosign/sign/v1", "predicate": {},
     "subject": [{"digest": {"sha256": hex}, "annotations": {...}}]}

cosign writes no repository's name into it, unless told to: ``cosign sign -a docker-reference=HOST/NAME`` puts one into the
subject's annotations, where it is signed along. Transparency log entries and timestamps are
not looked at, hints for messages only: the key decides.

An Ed25519 signature is pure Ed25519 over these bytes, as sigstore has it for envelopes; cosign 3.1 makes Ed25519ph ones
(RFC 8032), which nobody verifies, itself included (its pull request 5074).
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from typing import Any

from weenv.core import digest as digests
from weenv.core.errors import BadReference, FormatError
from weenv.registry.groupref.policy import MAX_PAYLOAD, MAX_SIGNATURE, STRANGER, Payload, Signature, repository_name
from weenv.registry.jsonsplice import parse_object

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle"
"""What the media types of all versions begin with."""
BUNDLE_TYPE = f"{MEDIA_TYPE}.v0.3+json"
"""Of today's: a manifest's ``artifactType``, and its one layer's type."""
PREDICATE_ANNOTATION = "dev.sigstore.bundle.predicateType"
"""On a bundle's manifest (cosign's BUNDLE_SPEC.md, "Annotations"): what the statement in it is about. Not signed."""
SIGN_PREDICATE = "https://sigstore.dev/cosign/sign/v1"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
REFERENCE = "docker-reference"
"""The subject's annotation that names the repository, called as in the simple signing payload."""
MAX_BUNDLE = 256 << 10
"""Bytes of a bundle: the statement in base64, a certificate and some log entries."""

_VERSION = re.compile(r"application/vnd\.dev\.sigstore\.bundle(?:\.v0\.3\+json|\+json;version=0\.[123])\Z")
_KEYLESS = "signed without a key, by a certificate, which is not supported (use: cosign sign --key)"
_WHAT = "sigstore bundle"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle, read but not verified. ``statement`` is what its envelope holds, None where the subject itself is signed;
    ``hint`` is the key that it says it is by, sha256 in hex over its SubjectPublicKeyInfo, or empty."""

    statement: bytes | None
    signature: bytes
    keyless: bool
    hint: str = ""

    def over(self, subject: bytes) -> Signature:
        """The signature, to be checked; ``subject`` is the manifest, which counts where there is no statement."""
        stranger = _KEYLESS if self.keyless else STRANGER
        if self.statement is None:
            return Signature(subject, self.signature, subject, _about_itself, stranger, self.hint)
        signed = encode(PAYLOAD_TYPE, self.statement)
        return Signature(self.statement, self.signature, signed, parse_statement, stranger, self.hint)


def encode(kind: str, body: bytes) -> bytes:
    """DSSE's pre-authentication encoding: the bytes that an envelope's signature is over."""
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(body), body)


def parse_bundle(data: bytes) -> Bundle:
    """Read a bundle. Raises FormatError; whether anybody signed it is another question."""
    _, raw = parse_object(data, _WHAT, MAX_BUNDLE)
    version = raw.get("mediaType")
    if not isinstance(version, str) or _VERSION.match(version) is None:
        raise FormatError(f"of an unknown version {str(version)[:80]!r}", member=_WHAT)
    material = _object(raw, "verificationMaterial")
    keyless = "publicKey" not in material
    if keyless and "certificate" not in material and "x509CertificateChain" not in material:
        raise FormatError("says neither key nor certificate", member=_WHAT)
    hint = _hint(material.get("publicKey"))
    if ("dsseEnvelope" in raw) == ("messageSignature" in raw):
        raise FormatError("needs either dsseEnvelope or messageSignature", member=_WHAT)
    if "messageSignature" in raw:
        return Bundle(None, _bytes(_object(raw, "messageSignature"), "signature", MAX_SIGNATURE), keyless, hint)
    envelope = _object(raw, "dsseEnvelope")
    if envelope.get("payloadType") != PAYLOAD_TYPE:
        raise FormatError(f"holds no in-toto statement but {str(envelope.get('payloadType'))[:80]!r}", member=_WHAT)
    signatures = envelope.get("signatures")
    if not isinstance(signatures, list) or len(signatures) != 1 or not isinstance(signatures[0], dict):
        raise FormatError("needs exactly one signature", member=_WHAT)
    return Bundle(_bytes(envelope, "payload", MAX_PAYLOAD), _bytes(signatures[0], "sig", MAX_SIGNATURE), keyless, hint)


def _hint(key: object) -> str:
    """A key's fingerprint out of the hint in a bundle, which is anybody's to write: for messages only."""
    text = key.get("hint") if isinstance(key, dict) else None
    try:
        return base64.b64decode(text, validate=True).hex() if isinstance(text, str) and len(text) == 44 else ""
    except ValueError:
        return ""


def _object(raw: dict[str, Any], name: str) -> dict[str, Any]:
    value = raw.get(name)
    if not isinstance(value, dict):
        raise FormatError(f"has no {name}", member=_WHAT)
    return value


def _bytes(raw: dict[str, Any], name: str, limit: int) -> bytes:
    value = raw.get(name)
    try:
        decoded = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    except ValueError as error:
        raise FormatError(f"{name} is not base64", member=_WHAT) from error
    if not 0 < len(decoded) <= limit:
        raise FormatError(f"has no {name} of 1 to {limit} bytes", member=_WHAT)
    return decoded


def parse_statement(data: bytes) -> Payload:
    """What a statement says, once its signature is known to be good: ``reference`` is empty where it names no repository.

    Raises FormatError where it is another kind of statement (an attestation is no signature), or about anything but one image.
    """
    what = "signed statement"
    _, raw = parse_object(data, what, MAX_PAYLOAD)
    if raw.get("_type") != STATEMENT_TYPE:
        raise FormatError("is of an unknown type", member=what)
    if raw.get("predicateType") != SIGN_PREDICATE:
        raise FormatError(f"is an attestation, {str(raw.get('predicateType'))[:80]!r}, no signature", member=what)
    subjects = raw.get("subject")
    if not isinstance(subjects, list) or len(subjects) != 1 or not isinstance(subjects[0], dict):
        raise FormatError("is not about one image", member=what)
    (subject,) = subjects
    digest = subject.get("digest")
    found = f"sha256:{digest.get('sha256')}" if isinstance(digest, dict) else ""
    annotations = subject.get("annotations")
    if annotations is None:
        annotations = {}
    if not digests.is_digest(found) or not isinstance(annotations, dict):
        raise FormatError("names no image", member=what)
    references: set[str] = set()
    for name in (subject.get("name"), annotations.get(REFERENCE)):
        if name not in (None, ""):
            references.add(_repository(name, what))
    if len(references) > 1:
        raise FormatError("names two repositories", member=what)
    return Payload(references.pop() if references else "", found, annotations)


def _repository(name: object, what: str) -> str:
    if not isinstance(name, str):
        raise FormatError("names no repository", member=what)
    try:
        return repository_name(name)
    except BadReference as error:
        raise FormatError(f"names no repository: {error.message}", member=what) from error


def _about_itself(data: bytes) -> Payload:
    """What a signature over a manifest says: that it is this one, under whatever name."""
    return Payload("", digests.sha256(data), {})


def may_sign(annotations: dict[str, str]) -> bool:
    """False where a bundle's annotations say that it holds something else than a signature: it need not be fetched."""
    return annotations.get(PREDICATE_ANNOTATION, SIGN_PREDICATE) == SIGN_PREDICATE
