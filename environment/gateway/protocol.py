"""The distribution API on plain data: which question a path is, which bytes a Range asks for, what an error answers.

After distribution-spec 1.1 ("API", "Error Codes") and RFC 9110 (sections 13 and 14: conditional and range requests).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from urllib.parse import unquote

from weenv.core.errors import (
    BadReference,
    FormatError,
    NotFoundInSource,
    SourceError,
    UnauthorizedError,
    UnavailableError,
    VerificationError,
    WeenvError,
)
from weenv.environment.compose import NotLazyError
from weenv.registry.manifest import OCI_MANIFEST

BASE, MANIFESTS, BLOBS, TAGS, REFERRERS = "base", "manifests", "blobs", "tags", "referrers"

MAX_PATH = 1024
_PATH = re.compile(r"/v2/(?P<name>.+)/(?:(?P<kind>manifests|blobs|referrers)/(?P<target>[^/]+)|(?P<tags>tags)/list)\Z")
_RANGE = re.compile(r"bytes=(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})\Z", re.ASCII)
_MAX_HINT = 500


class Refused(WeenvError):
    """A request that this registry does not answer; ``status`` and ``code`` say why (distribution-spec, "Error Codes")."""

    def __init__(self, status: int, code: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: ``kind`` is one of the constants above, ``target`` the tag or digest."""

    kind: str
    name: str = ""
    target: str = ""


def parse_path(path: str) -> Question:
    """The question of a request's path, as it came (percent-encoded). Raises Refused where there is none."""
    if path in ("/v2/", "/v2"):
        return Question(BASE)
    match = _PATH.match(path) if len(path) <= MAX_PATH else None
    if match is None:
        raise Refused(404, "UNSUPPORTED", "this registry has manifests, blobs, tags and referrers to read, and nothing else")
    name = match["name"]
    if "%" in name:  # no character of a name needs it
        raise Refused(400, "NAME_INVALID", f"invalid name {name[:100]!r}")
    return Question(match["kind"] or match["tags"], name, unquote(match["target"] or "", errors="replace"))


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """The bytes ``[start, end)`` that a Range header asks for; None: all of them.

    As RFC 9110 section 14.2 allows, what is malformed or asks for several ranges is not looked at. Raises Refused (416)
    where no byte of the blob is in the range.
    """
    match = _RANGE.match(header or "")
    if match is None or (not match["first"] and not match["last"]):
        return None
    if match["first"]:
        start, end = int(match["first"]), int(match["last"] or size) + 1
        if match["last"] and end <= start:
            return None
    else:
        start, end = max(0, size - int(match["last"])), size
    end = min(end, size)
    if start >= end:
        raise Refused(416, "SIZE_INVALID", f"no such range of {size} bytes")
    return start, end


def matches_etag(header: str | None, digest: str) -> bool:
    """Whether If-None-Match names a digest (RFC 9110 section 13.1.2, weak comparison)."""
    if not header:
        return False
    tags = {tag.strip().removeprefix("W/").strip('"') for tag in header[:4096].split(",")}
    return digest in tags or "*" in tags


def accepts_manifest(headers: list[str]) -> bool:
    """Whether a client takes an OCI image manifest: it says so, says anything goes, or does not say anything."""
    kinds = {part.partition(";")[0].strip().lower() for header in headers for part in header[:8192].split(",")} - {""}
    return not kinds or not kinds.isdisjoint({OCI_MANIFEST, "*/*", "application/*"})


_STATUS: tuple[tuple[type[WeenvError], int, str], ...] = (
    (BadReference, 400, "NAME_INVALID"),
    (NotFoundInSource, 404, "MANIFEST_UNKNOWN"),
    # 403: a 401 would make clients ask their user for credentials, but it is the node's that were refused.
    (UnauthorizedError, 403, "DENIED"),
    (UnavailableError, 503, "UNAVAILABLE"),
    (SourceError, 502, "UNKNOWN"),
    (VerificationError, 403, "DENIED"),
    (FormatError, 422, "MANIFEST_INVALID"),
    (NotLazyError, 422, "MANIFEST_INVALID"),
)
"""What an error is to a client. A VerificationError is the policy's answer, or a registry's lie: nothing is to be had."""


def status_of(error: WeenvError) -> tuple[int, str]:
    """HTTP status and error code."""
    if isinstance(error, Refused):
        return error.status, error.code
    return next(((status, code) for kind, status, code in _STATUS if isinstance(error, kind)), (500, "UNKNOWN"))


def error_body(code: str, message: str, hint: str = "") -> bytes:
    """The JSON of an error."""
    row: dict[str, object] = {"code": code, "message": " ".join(message.split())[:2000]}
    if hint:
        row["detail"] = {"hint": " ".join(hint.split())[:_MAX_HINT]}
    return json.dumps({"errors": [row]}).encode()
