"""Keys for signing: ECDSA on P-256 with SHA-256 (cosign's default scheme) and Ed25519, as PEM files.

Private keys are PKCS #8 (RFC 5958), encrypted where there is a password; public keys SubjectPublicKeyInfo (RFC 5280), as
cosign's ``cosign.pub``. An ECDSA signature is ASN.1 DER over SHA-256 of the payload, an Ed25519 one RFC 8032 over the payload.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from weenv.core.errors import ConfigError
from weenv.core.regular import Opener, read_file, regular

PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
ALGORITHMS = ("ecdsa-p256", "ed25519")
MAX_KEY_FILE = 64 << 10


@dataclass(frozen=True, eq=False)
class PublicKey:
    """A key to verify with. ``fingerprint`` is sha256 over its SubjectPublicKeyInfo, in hex; ``name`` is for messages."""

    key: ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey
    fingerprint: str
    name: str

    @property
    def algorithm(self) -> str:
        """One of ALGORITHMS."""
        return ALGORITHMS[isinstance(self.key, ed25519.Ed25519PublicKey)]

    def verify(self, payload: bytes, signature: bytes) -> bool:
        """True where ``signature`` is this key's over ``payload``."""
        try:
            if isinstance(self.key, ed25519.Ed25519PublicKey):
                self.key.verify(signature, payload)
            else:
                self.key.verify(signature, payload, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return False
        return True


def generate(algorithm: str = ALGORITHMS[0]) -> PrivateKey:
    """A new key of one of ALGORITHMS. Raises ConfigError for another."""
    if algorithm == "ecdsa-p256":
        return ec.generate_private_key(ec.SECP256R1())
    if algorithm == "ed25519":
        return ed25519.Ed25519PrivateKey.generate()
    raise ConfigError(f"unknown algorithm {algorithm!r}", hint=f"known: {', '.join(ALGORITHMS)}")


def private_pem(key: PrivateKey, password: bytes = b"") -> bytes:
    """The key as PKCS #8 PEM, encrypted where there is a password."""
    scheme: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        scheme = serialization.BestAvailableEncryption(password)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, scheme)


def public_pem(key: PrivateKey) -> bytes:
    """Its public part as PEM."""
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def load_private(pem: bytes, password: bytes = b"", *, name: str = "the key") -> PrivateKey:
    """Parse a private key. Raises ConfigError, with no part of the key in it."""
    if b"ENCRYPTED SIGSTORE PRIVATE KEY" in pem or b"ENCRYPTED COSIGN PRIVATE KEY" in pem:
        raise ConfigError(f"{name} is in cosign's own encrypted form", hint="make one: weenv group keygen, or use PKCS #8")
    encrypted = b"ENCRYPTED" in pem
    if encrypted and not password:
        raise ConfigError(f"{name} needs a password", hint="set WEENV_KEY_PASSWORD or name --password-file")
    try:
        key = serialization.load_pem_private_key(pem, password if encrypted else None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{name} cannot be read: the wrong password, or no PEM private key") from error
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key
    if isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    raise ConfigError(f"{name} is of another kind than {' or '.join(ALGORITHMS)}")


def load_public(pem: bytes, *, name: str = "the key") -> PublicKey:
    """Parse a public key. Raises ConfigError."""
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{name} is no PEM public key") from error
    if not isinstance(key, ed25519.Ed25519PublicKey) and not (
        isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)
    ):
        raise ConfigError(f"{name} is of another kind than {' or '.join(ALGORITHMS)}")
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return PublicKey(key, hashlib.sha256(der).hexdigest(), name)


def sign(key: PrivateKey, payload: bytes) -> bytes:
    """A signature over ``payload``."""
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.sign(payload)
    return key.sign(payload, ec.ECDSA(hashes.SHA256()))


def read_key_file(path: str, opener: Opener = regular) -> bytes:
    """A key file's bytes. Raises ConfigError."""
    try:
        return read_file(path, MAX_KEY_FILE, opener)
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}") from error


def write_key_pair(prefix: str, key: PrivateKey, password: bytes = b"") -> tuple[str, str]:
    """Write ``PREFIX.key`` (0600) and ``PREFIX.pub``, neither of which may exist. Raises ConfigError."""
    paths = prefix + ".key", prefix + ".pub"
    for path, data, mode in zip(paths, (private_pem(key, password), public_pem(key)), (0o600, 0o644), strict=True):
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}", hint="keys are never overwritten") from error
        with os.fdopen(fd, "wb") as file:
            file.write(data)
    return paths
