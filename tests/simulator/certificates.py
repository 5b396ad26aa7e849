"""A CA and certificates signed by it, for servers on 127.0.0.1 and clients: real TLS in tests, valid for a day."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _write(path: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    path.with_suffix(".cert").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    path.with_suffix(".key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )  # fmt: skip


@dataclass
class Authority:
    """``ca.crt`` in ``directory``, and what it signs: ``NAME.cert`` and ``NAME.key``."""

    directory: Path

    def __post_init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._sign("weenv test CA", self.key, authority=True)
        self.path = self.directory / "ca.crt"
        self.path.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def _sign(self, name: str, key: ec.EllipticCurvePrivateKey, *, authority: bool = False) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name("weenv test CA"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        )
        if authority:
            usage = x509.KeyUsage(
                digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
                data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
            )  # fmt: skip
            builder = builder.add_extension(usage, critical=True)
        return builder.sign(self.key, hashes.SHA256())

    def issue(self, name: str) -> Path:
        """Make a certificate and its key; returns their path without the suffix."""
        key = ec.generate_private_key(ec.SECP256R1())
        path = self.directory / name
        _write(path, self._sign(name, key), key)
        return path

    def server(self, *, clients: bool = False) -> ssl.SSLContext:
        """A server's context; ``clients``: only for clients with a certificate of ours."""
        path = self.issue("server")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path.with_suffix(".cert"), path.with_suffix(".key"))
        if clients:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.path)
        return context
