"""Credentials that are in no file."""

from __future__ import annotations

from weenv.registry.credentials import ANONYMOUS, Credential, CredentialStore


class StaticCredentials(CredentialStore):
    """Credentials given in memory, by host."""

    def __init__(self, by_host: dict[str, Credential]) -> None:
        self._by_host = dict(by_host)

    def lookup(self, host: str, repository: str = "") -> Credential:
        """The credential for a host, or ANONYMOUS."""
        return self._by_host.get(host, ANONYMOUS)
