"""Who we are to a registry: Authorization headers, per server and scope, renewed before they expire and on 401 and 403.

A mirror is a server like any other: it gets the credentials that docker's configuration has for *its* host, and never those
of the registry that it mirrors.

Shared state and races: ``_headers`` maps (server's origin, scope) to the header in use. It is only touched on the event
loop and between awaits; renewals of one key run one at a time (:class:`SingleFlight`), and a caller whose header was
already replaced by another's renewal just takes the new one.
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
from weenv.registry.credentials import Credential, CredentialStore
from weenv.registry.hosts import Endpoint

TokenFetch = Callable[[TokenRequest, str, Endpoint], Awaitable[bytes]]
"""(request, Authorization header or empty, for whom) -> body of a 200 answer; raises a SourceError otherwise."""


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
    """Keeps one Authorization header per (server, scope)."""

    def __init__(self, credentials: CredentialStore, fetch: TokenFetch) -> None:
        self._credentials = credentials
        self._fetch = fetch
        self._headers: dict[tuple[str, str], _Header] = {}
        self._challenges: dict[str, Challenge] = {}
        self._flights: SingleFlight[tuple[str, str], str | None] = SingleFlight()

    async def header(self, server: Endpoint, scope: str) -> str | None:
        """The Authorization header for a request, or None where none is known to be needed."""
        known = self._headers.get((server.origin, scope))
        if known is not None and time.monotonic() < known.renew_at:
            return known.value
        if server.origin not in self._challenges:
            return None
        try:
            return await self._renew(server, scope)
        except WeenvError:
            return known.value if known is not None else None  # it may still do; if not, the answer says so

    async def renew(
        self, server: Endpoint, scope: str, refused: str | None, www_authenticate: Sequence[str]
    ) -> str | None:
        """After a 401 or 403: a header other than ``refused``, or None where there is nothing else to try.

        Some registries answer 403 without WWW-Authenticate when a token has expired, so the server's last challenge is
        remembered. Raises SourceError or ConfigError where credentials cannot be had.
        """
        challenge = choose(parse_challenges(www_authenticate))
        if challenge is not None:
            self._challenges[server.origin] = challenge
        known = self._headers.get((server.origin, scope))
        if known is not None and known.value != refused and time.monotonic() < known.renew_at:
            return known.value
        if server.origin not in self._challenges:
            return None
        fresh = await self._renew(server, scope)
        return fresh if fresh != refused else None

    async def _renew(self, server: Endpoint, scope: str) -> str | None:
        return await self._flights.do((server.origin, scope), lambda: self._renew_now(server, scope))

    async def _renew_now(self, server: Endpoint, scope: str) -> str | None:
        key = server.origin, scope
        challenge = self._challenges[server.origin]
        credential = await asyncio.to_thread(self._credentials.lookup, server.name, _repository(scope))
        if challenge.scheme == "basic":
            if not credential.has_basic:
                self._headers.pop(key, None)
                return None
            header = _Header(credential.basic_header, float("inf"))
        elif credential.registry_token:
            header = _Header("Bearer " + credential.registry_token, float("inf"))
        else:
            token = await self._token(server, challenge, scope, credential)
            header = _Header(token.header, token.renew_at)
        self._headers[key] = header
        return header.value

    async def _token(self, server: Endpoint, challenge: Challenge, scope: str, credential: Credential) -> Token:
        asked = challenge.params.get("scope", "").split()
        if any(_repository(one) == _repository(scope) for one in asked):
            # What the server asked for may be more than we thought of; a remembered one of another repository is not.
            scope = merge_scopes([*scope.split(), *asked])
        request = token_request(
            challenge,
            scope,
            allow_plain=server.scheme == "http",
            has_basic=credential.has_basic,
            identity_token=credential.identity_token,
        )
        try:
            body = await self._fetch(request, credential.basic_header if request.basic else "", server)
        except UnauthorizedError as error:
            who = f"user {credential.username!r}" if credential.username else "anonymous access"
            raise UnauthorizedError(f"{server.name} refuses {who}", hint=f"log in: docker login {server.name}") from error
        return parse_token(body, time.monotonic())
