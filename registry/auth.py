"""Who we are to a registry: Authorization headers, per host and scope, renewed before they expire and on 401 and 403.

Shared state and races: ``_headers`` maps (host, scope) to the header in use. It is only touched on the event loop and
between awaits; renewals of one key run one at a time (:class:`SingleFlight`), and a caller whose header was already
replaced by another's renewal just takes the new one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from weenv.core.aio import SingleFlight
from weenv.core.errors import UnauthorizedError, WeenvError
from weenv.registry.challenge import (
    Challenge,
    Token,
    TokenRequest,
    choose,
    parse_challenges,
    parse_token,
    token_request,
)
from weenv.registry.config import RegistryConfig
from weenv.registry.credentials import Credential, CredentialStore

TokenFetch = Callable[[TokenRequest, str], Awaitable[bytes]]
"""(request, Authorization header or empty) -> body of a 200 answer; raises a SourceError otherwise."""


@dataclass(frozen=True, slots=True)
class _Header:
    value: str
    renew_at: float


def scope_of(repository: str, actions: str = "pull", *, also_pull: str = "") -> str:
    """The token scope of a repository (distribution's "token scope" document): ``repository:NAME:pull,push``.

    ``also_pull`` adds a second repository to read from (cross-repository mounts).
    """
    scope = f"repository:{repository}:{actions}"
    return scope + (f" repository:{also_pull}:pull" if also_pull and also_pull != repository else "")


def merge_scopes(scopes: list[str]) -> str:
    """One scope for each resource, with all the actions asked for, in order."""
    merged: dict[str, dict[str, None]] = {}
    for scope in scopes:
        resource, _, actions = scope.rpartition(":")
        merged.setdefault(resource, {}).update(dict.fromkeys(actions.split(",")))
    return " ".join(f"{resource}:{','.join(actions)}" for resource, actions in merged.items())


def _repository(scope: str) -> str:
    parts = scope.partition(" ")[0].split(":")
    return parts[1] if len(parts) >= 3 else ""


class Authorizer:
    """Keeps one Authorization header per (host, scope)."""

    def __init__(self, config: RegistryConfig, credentials: CredentialStore, fetch: TokenFetch) -> None:
        self._config = config
        self._credentials = credentials
        self._fetch = fetch
        self._headers: dict[tuple[str, str], _Header] = {}
        self._challenges: dict[str, Challenge] = {}
        self._flights: SingleFlight[tuple[str, str], str | None] = SingleFlight()

    async def header(self, host: str, scope: str) -> str | None:
        """The Authorization header for a request, or None where none is known to be needed."""
        known = self._headers.get((host, scope))
        if known is not None and time.monotonic() < known.renew_at:
            return known.value
        if host not in self._challenges:
            return None
        try:
            return await self._renew(host, scope)
        except WeenvError:
            return known.value if known is not None else None  # it may still do; if not, the answer says so

    async def renew(self, host: str, scope: str, refused: str | None, www_authenticate: Sequence[str]) -> str | None:
        """After a 401 or 403: a header other than ``refused``, or None where there is nothing else to try.

        Some registries answer 403 without WWW-Authenticate when a token has expired, so the host's last challenge is
        remembered. Raises SourceError or ConfigError where credentials cannot be had.
        """
        challenge = choose(parse_challenges(www_authenticate))
        if challenge is not None:
            self._challenges[host] = challenge
        known = self._headers.get((host, scope))
        if known is not None and known.value != refused and time.monotonic() < known.renew_at:
            return known.value
        if host not in self._challenges:
            return None
        fresh = await self._renew(host, scope)
        return fresh if fresh != refused else None

    def forget(self, host: str) -> None:
        """Drop what is remembered of a host (its credentials changed)."""
        self._challenges.pop(host, None)
        for key in [key for key in self._headers if key[0] == host]:
            del self._headers[key]

    async def _renew(self, host: str, scope: str) -> str | None:
        return await self._flights.do((host, scope), lambda: self._renew_now(host, scope))

    async def _renew_now(self, host: str, scope: str) -> str | None:
        challenge = self._challenges[host]
        credential = await asyncio.to_thread(self._credentials.lookup, host, _repository(scope))
        if challenge.scheme == "basic":
            if not credential.has_basic:
                self._headers.pop((host, scope), None)
                return None
            header = _Header(credential.basic_header, float("inf"))
        elif credential.registry_token:
            header = _Header("Bearer " + credential.registry_token, float("inf"))
        else:
            token = await self._token(host, challenge, scope, credential)
            header = _Header(token.header, token.renew_at)
        self._headers[(host, scope)] = header
        return header.value

    async def _token(self, host: str, challenge: Challenge, scope: str, credential: Credential) -> Token:
        asked = challenge.params.get("scope", "").split()
        if any(_repository(one) == _repository(scope) for one in asked):
            # What the server asked for may be more than we thought of; a remembered one of another repository is not.
            scope = merge_scopes([*scope.split(), *asked])
        request = token_request(
            challenge,
            scope,
            allow_plain=self._config.is_plain(host),
            has_basic=credential.has_basic,
            identity_token=credential.identity_token,
        )
        try:
            body = await self._fetch(request, credential.basic_header if request.basic else "")
        except UnauthorizedError as error:
            who = f"user {credential.username!r}" if credential.username else "anonymous access"
            raise UnauthorizedError(f"{host} refuses {who}", hint=f"log in: docker login {host}") from error
        return parse_token(body, time.monotonic())
