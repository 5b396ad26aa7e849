"""WWW-Authenticate headers and token answers: parsing only, no I/O.

Grammar: RFC 9110, 11.6.1 and 11.2 (challenges, auth-param, token68). Bearer parameters and the token endpoint:
distribution's "token authentication" and "OAuth2" documents.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode, urlsplit

from weenv.core.errors import SourceError

MAX_HEADER = 16_384
MAX_TOKEN = 65_536
MAX_TOKEN_ANSWER = 1 << 20
MIN_LIFETIME = 60.0
"""Seconds a token is taken to live where the server says nothing, or less (distribution's token document)."""
REFRESH_MARGIN = 0.1
"""A token is replaced when this share of its life is left (at most REFRESH_MARGIN_MAX seconds)."""
REFRESH_MARGIN_MAX = 30.0

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # noqa: S105 - a grammar rule
_SCHEME = re.compile(rf"[ \t,]*({_TOKEN})(?:[ \t]+|(?=,)|\Z)")
_PARAM = re.compile(rf'[ \t,]*({_TOKEN})[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|({_TOKEN}))[ \t]*(?=,|\Z)')
_TOKEN68 = re.compile(r"[A-Za-z0-9._~+/-]+=*[ \t]*(?=,|\Z)")


@dataclass(frozen=True, slots=True)
class Challenge:
    """One challenge: ``scheme`` in lower case, parameter names in lower case."""

    scheme: str
    params: dict[str, str] = field(default_factory=dict)


def parse_challenges(headers: Iterable[str]) -> list[Challenge]:
    """The challenges of all WWW-Authenticate headers of an answer, in order; what cannot be parsed ends its header."""
    found: list[Challenge] = []
    for header in headers:
        text, position = header[:MAX_HEADER], 0
        while position < len(text) and (match := _SCHEME.match(text, position)):
            position = match.end()
            params: dict[str, str] = {}
            while param := _PARAM.match(text, position):
                quoted, plain = param[2], param[3]
                value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else plain
                params.setdefault(param[1].lower(), value)
                position = param.end()
            if not params and (blob := _TOKEN68.match(text, position)):
                position = blob.end()
            found.append(Challenge(match[1].lower(), params))
    return found


def choose(challenges: Iterable[Challenge]) -> Challenge | None:
    """The challenge to answer: Bearer before Basic, None where there is neither."""
    usable = [c for c in challenges if c.scheme == "basic" or (c.scheme == "bearer" and c.params.get("realm"))]
    return min(usable, key=lambda c: c.scheme != "bearer", default=None)


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One HTTP request to a token endpoint; ``basic`` says that username and password go with it."""

    method: str
    url: str
    body: bytes = b""
    basic: bool = False


def token_request(
    challenge: Challenge, scope: str, *, allow_plain: bool, has_basic: bool, identity_token: str = ""
) -> TokenRequest:
    """The request that answers a Bearer challenge for ``scope`` (space-separated).

    A realm over plain HTTP is refused unless the registry itself is spoken to that way (``allow_plain``): it would get
    the password. Raises :class:`SourceError`.
    """
    try:
        return _token_request(challenge, scope, allow_plain, has_basic, identity_token)
    except ValueError as error:  # no URL at all, or bytes that are no text
        realm = challenge.params["realm"]
        raise SourceError(f"the registry names an unusable token endpoint: {realm[:200]!r}") from error


def _token_request(challenge: Challenge, scope: str, allow_plain: bool, has_basic: bool, identity_token: str) -> TokenRequest:
    realm = challenge.params["realm"]
    parts = urlsplit(realm)
    if parts.scheme not in ("https", "http") or not parts.hostname or parts.username is not None:
        raise SourceError(f"the registry names an unusable token endpoint: {realm[:200]!r}")
    if parts.scheme == "http" and not allow_plain:
        raise SourceError(f"the registry wants its token fetched over plain HTTP from {parts.netloc}")
    service = challenge.params.get("service", "")
    if identity_token:
        form = {"grant_type": "refresh_token", "service": service, "client_id": "weenv", "scope": scope,
                "refresh_token": identity_token}  # fmt: skip
        return TokenRequest("POST", realm, urlencode(form).encode())
    query = [("service", service)] if service else []
    query += [("scope", one) for one in scope.split()]
    url = realm + (("&" if parts.query else "?") + urlencode(query) if query else "")
    return TokenRequest("GET", url, basic=has_basic)


@dataclass(frozen=True, slots=True)
class Token:
    """A bearer token and the time (monotonic seconds) from which it is to be replaced."""

    value: str = field(repr=False)
    renew_at: float

    @property
    def header(self) -> str:
        """The Authorization header."""
        return "Bearer " + self.value


def parse_token(body: bytes, now: float) -> Token:
    """The token in a token endpoint's answer (``token`` or ``access_token``, ``expires_in``). Raises SourceError."""
    try:
        answer: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SourceError("the token endpoint's answer is not JSON") from error
    value = (answer.get("token") or answer.get("access_token")) if isinstance(answer, dict) else None
    if not isinstance(value, str) or len(value) > MAX_TOKEN or not value.isascii() or not value.isprintable():
        raise SourceError("the token endpoint's answer holds no token")
    lifetime = answer.get("expires_in")
    if not isinstance(lifetime, int | float) or isinstance(lifetime, bool) or not lifetime > 0:
        lifetime = MIN_LIFETIME
    lifetime = float(min(lifetime, 86_400))
    return Token(value, now + lifetime - min(lifetime * REFRESH_MARGIN, REFRESH_MARGIN_MAX))
