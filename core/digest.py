"""Content digests as OCI writes them: ``sha256:<64 lower-case hex digits>`` (image-spec descriptor.md, "Digests").

Only sha256 is accepted: it is the one algorithm that every registry and containerd itself must support.
"""

from __future__ import annotations

import hashlib
import re

from weenv.core.errors import BadReference, VerificationError

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_HEX = re.compile(r"[0-9a-f]{64}\Z")


def is_digest(text: str) -> bool:
    """True where ``text`` is a well-formed sha256 digest."""
    return _DIGEST.match(text) is not None


def check_digest(text: str) -> str:
    """Return ``text`` unchanged, or raise :class:`BadReference` where it is no sha256 digest."""
    if not is_digest(text):
        raise BadReference(f"not a sha256 digest: {text[:100]!r}")
    return text


def hex_of(digest: str) -> str:
    """The 64 hex digits of a digest; safe to use as a file name. Raises :class:`BadReference`."""
    return check_digest(digest)[7:]


def from_hex(hexdigits: str) -> str:
    """``sha256:`` before 64 hex digits. Raises :class:`BadReference`."""
    if _HEX.match(hexdigits) is None:
        raise BadReference(f"not 64 hex digits: {hexdigits[:100]!r}")
    return "sha256:" + hexdigits


def sha256(data: bytes | bytearray | memoryview) -> str:
    """The digest of ``data``."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def verify(data: bytes | bytearray | memoryview, digest: str, what: str) -> None:
    """Raise :class:`VerificationError` naming ``what`` unless ``data`` has ``digest``."""
    have = sha256(data)
    if have != check_digest(digest):
        raise VerificationError(f"{what} has digest {have}, expected {digest}")


def chain_id(diff_ids: list[str]) -> str:
    """The chainID of a layer stack, bottom first (image-spec config.md, "Layer ChainID"). ``diff_ids`` is not empty."""
    chain = check_digest(diff_ids[0])
    for diff_id in diff_ids[1:]:
        chain = sha256(f"{chain} {check_digest(diff_id)}".encode())
    return chain
