"""Where an image or a blob is: docker-style references and OCI layout directories.

Grammar of references: the distribution project's ``reference`` package documentation (domain, path components, tag,
digest) and image-spec/distribution-spec for names and tags. Like docker, a first component without a dot, a colon or an
upper-case letter that is not ``localhost`` is part of the name, and the host is then ``docker.io``.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass, replace

from weenv.core import digest as digests
from weenv.core.errors import BadReference

DEFAULT_HOST = "docker.io"
DEFAULT_TAG = "latest"
MAX_NAME = 255
"""Host and repository together, bytes (the distribution project's NameTotalLengthMax)."""

_HOST_PART = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = re.compile(rf"(?P<name>{_HOST_PART}(?:\.{_HOST_PART})*|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{{1,5}}))?\Z")
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*\Z")
_ELSEWHERE = re.compile(r"(?:~|\.{0,2})/|[a-z][a-z-]*:/")
"""How a file's or directory's path begins, or a place as other tools write it (``docker-archive:/...``)."""
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")
# A layout's tag is the annotation org.opencontainers.image.ref.name (image-spec annotations.md, its "refname" grammar).
_REF_NAME = re.compile(r"[A-Za-z0-9]+(?:[-._:@/+][A-Za-z0-9]+|--[A-Za-z0-9]+)*\Z")

# Docker Hub's names: index.docker.io is its old name, and its API answers under another one (docker's own defaults).
_HUB_ALIASES = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
_HUB_API = "registry-1.docker.io"


def check_host(host: str) -> str:
    """Return ``host`` (``name[:port]``, ``[ipv6][:port]``) unchanged, or raise :class:`BadReference`."""
    match = _HOST.match(host)
    if match is None or len(host) > MAX_NAME:
        raise BadReference(f"not a registry host: {host[:100]!r}", hint="write NAME or NAME:PORT, without https://")
    if match["port"] is not None and not 0 < int(match["port"]) < 65536:
        raise BadReference(f"port out of range in registry host {host!r}")
    if host.startswith("["):
        try:
            ipaddress.IPv6Address(match["name"][1:-1])
        except ValueError as error:
            raise BadReference(f"not an IPv6 address in registry host {host!r}") from error
    return host


def check_repository(repository: str) -> str:
    """Return a repository name unchanged, or raise :class:`BadReference`."""
    if not repository or len(repository) > MAX_NAME or _REPOSITORY.match(repository) is None:
        hint = "repository names are lower case" if repository != repository.lower() else ""
        raise BadReference(f"not a repository name: {repository[:100]!r}", hint=hint)
    return repository


def check_tag(tag: str) -> str:
    """Return a registry tag unchanged, or raise :class:`BadReference`."""
    if _TAG.match(tag) is None:
        raise BadReference(f"not a tag: {tag[:140]!r}")
    return tag


@dataclass(frozen=True, slots=True)
class Reference:
    """An image or blob in a registry: ``host/repository[:tag][@digest]``. Where both are given, the digest decides."""

    host: str
    repository: str
    tag: str = ""
    digest: str = ""

    @property
    def target(self) -> str:
        """What follows ``/manifests/`` in the API: the digest, else the tag."""
        return self.digest or self.tag or DEFAULT_TAG

    @property
    def api_host(self) -> str:
        """The host to connect to."""
        return api_host(self.host)

    @property
    def name(self) -> str:
        """``host/repository``."""
        return f"{self.host}/{self.repository}"

    def with_digest(self, digest: str) -> Reference:
        """The same repository at a digest, without a tag."""
        return replace(self, tag="", digest=digests.check_digest(digest))

    def __str__(self) -> str:
        return self.name + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")


@dataclass(frozen=True, slots=True)
class LayoutLocation:
    """An image in an OCI image layout directory: ``oci:DIR[:TAG]`` or ``oci:DIR@DIGEST``."""

    path: str
    tag: str = ""
    digest: str = ""

    def __str__(self) -> str:
        return f"oci:{self.path}" + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")


Location = Reference | LayoutLocation


def place_name(location: Location) -> str:
    """What holds a location, as policies name it: ``host/repository``, or ``oci:/absolute/path``."""
    return f"oci:{os.path.abspath(location.path)}" if isinstance(location, LayoutLocation) else location.name


def is_hub(host: str) -> bool:
    """True for all names of Docker Hub."""
    return host in _HUB_ALIASES


def api_host(host: str) -> str:
    """The host that serves the API of the registry named ``host``: differs for Docker Hub only."""
    return _HUB_API if host in _HUB_ALIASES else host


def parse_reference(text: str, *, default_tag: str = DEFAULT_TAG) -> Reference:
    """Parse ``[host[:port]/]repository[:tag][@digest]``; without tag and digest the tag is ``default_tag``.

    Raises :class:`BadReference` saying which part is wrong.
    """
    if not text:
        raise BadReference("empty image reference")
    if "://" in text:
        raise BadReference(f"not an image reference: {text[:100]!r}", hint="leave out the scheme: HOST/NAME:TAG")
    if len(text) > 2 * MAX_NAME + 256 or not text.isascii() or not text.isprintable() or " " in text:
        raise BadReference(f"not an image reference: {text[:100]!r}")
    rest, at, digest = text.partition("@")
    if at:
        digests.check_digest(digest)
    if len(digest) == 0 and digests.is_digest("sha256:" + rest):
        raise BadReference(f"a bare digest is no image reference: {text!r}", hint="write HOST/NAME@sha256:DIGEST")
    host = DEFAULT_HOST
    first, slash, remainder = rest.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost" or first != first.lower()):
        host, rest = check_host(first), remainder
    path, colon, tag = rest.partition(":")
    if colon:
        check_tag(tag)
    check_repository(path)
    if host in _HUB_ALIASES:
        host = DEFAULT_HOST
        if "/" not in path:
            path = "library/" + path
    if len(host) + 1 + len(path) > MAX_NAME:
        raise BadReference(f"image name longer than {MAX_NAME} bytes: {text[:100]!r}")
    if not tag and not digest:
        tag = default_tag
    return Reference(host, path, tag, digest)


def parse_layout(text: str) -> LayoutLocation:
    """Parse ``oci:DIR[:TAG]`` or ``oci:DIR@sha256:HEX``. A colon after the last slash begins the tag.

    Raises :class:`BadReference`.
    """
    rest = text.removeprefix("oci:")
    digest = tag = ""
    head, at, tail = rest.rpartition("@sha256:")
    if at:
        digest = digests.check_digest("sha256:" + tail)
        rest = head
    else:
        base = rest.rfind("/") + 1
        name, colon, tag = rest[base:].partition(":")
        if colon:
            if len(tag) > 255 or _REF_NAME.match(tag) is None:
                raise BadReference(f"not a tag in {text[:300]!r}: {tag[:100]!r}")
            rest = rest[:base] + name
    if not rest or "\0" in rest:
        raise BadReference(f"no directory in {text!r}", hint="write oci:DIR or oci:DIR:TAG")
    return LayoutLocation(rest, tag, digest)


def parse_location(text: str) -> Location:
    """``oci:...`` is a layout directory, everything else a registry reference. Raises :class:`BadReference`."""
    if text.startswith("oci:"):
        return parse_layout(text)
    try:
        return parse_reference(text)
    except BadReference as error:
        if _ELSEWHERE.match(text) is None:
            raise
        hint = "an image in a registry is HOST/NAME[:TAG], one in an OCI layout directory oci:DIR[:TAG]"
        raise BadReference(f"neither of a registry nor of a layout: {text[:200]!r}", hint=hint) from error
