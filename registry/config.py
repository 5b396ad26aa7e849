"""How registries are reached: plain HTTP or TLS, time limits, retries, proxies."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from weenv.core import settings
from weenv.core.errors import ConfigError
from weenv.core.regular import held
from weenv.registry.reference import api_host, check_host

if TYPE_CHECKING:
    import ssl

USER_AGENT = "weenv/0.1"
MAX_CERTIFICATES = 16 << 20
"""Bytes of a file of certificates or keys; a system's whole bundle has a quarter of a MiB."""


@dataclass(frozen=True, slots=True)
class RegistryConfig:
    """Settings of a registry client. Times are in seconds, sizes in bytes."""

    plain_http: frozenset[str] = frozenset()
    """Hosts (``name`` or ``name:port``) spoken to over plain HTTP, besides loopback ones."""
    tls: frozenset[str] = frozenset()
    """Loopback hosts that are to be spoken to over TLS all the same."""
    allow_sources: frozenset[str] = frozenset()
    """Hosts that a layer's source annotation may name although they are this node's loopback, link-local or metadata
    addresses (see `use_source_annotation`); those of `plain_http` and `tls`, and of the groups
    of plans that were composed on the node, may be named anyway."""
    ca_file: str = ""
    """A PEM bundle to trust besides the system's."""
    config_path: str = "/etc/containerd/certs.d:/etc/docker/certs.d"
    """Directories with containerd's ``hosts.toml`` files and docker's certificates, by host (registries.md); the first that
    has the host decides. Empty: none."""
    connect_timeout: float = 10.0
    """Until a connection, TLS included, is there."""
    stall_timeout: float = 20.0
    """No byte for that long on an open response: the attempt has failed."""
    deadline: float = 120.0
    """One small request, or one ranged read, with all its retries; ranged reads get ``length / min_rate`` on top."""
    min_rate: int = 256 << 10
    """Bytes per second below which a transfer is given up."""
    attempts: int = 5
    """Tries without progress before giving up."""
    retry_delay: float = 0.2
    """Before the second retry; doubles with each, with jitter (the first retry is immediate)."""
    max_retry_delay: float = 10.0
    """The longest pause between two retries."""
    max_retry_after: float = 60.0
    """A longer Retry-After than this is an error at once, not a wait."""
    slow_after: float = 5.0
    """An answer that has brought less than an eighth of ``min_rate`` for so long is left for a new one, which goes on where
    it was."""
    race_after: float = 1.0
    """Mirrors are asked in their order; one that has not begun to answer after so long is raced by the next. 0: all are asked
    at once."""
    mirror_rest: float = 30.0
    """A mirror that has failed twice in a row is asked after the others for so long, up to eight times that if it goes on."""
    max_skip: int = 256 << 20
    """How much may be read and thrown away to reach an offset where a server ignores Range."""
    connections_per_host: int = 16
    """Connections to one registry at once."""
    read_buffer: int = 2 << 20
    """Response bytes buffered before the socket is left alone: large, so that few wake-ups are needed per byte."""
    docker_config: str = ""
    """A docker ``config.json``, or empty for the usual places (see credentials.py)."""

    def __post_init__(self) -> None:
        for host in (*self.plain_http, *self.tls, *self.allow_sources):
            check_host(host)
        settings.check_ranges(
            self, "registry",
            connect_timeout=(0.01, 3600), stall_timeout=(0.01, 3600), deadline=(0.01, 86400), min_rate=(1, 1 << 40),
            attempts=(1, 10_000), retry_delay=(0, 3600), max_retry_delay=(0, 3600), max_retry_after=(0, 86400),
            slow_after=(0.01, 3600), race_after=(0, 3600), mirror_rest=(0, 86400), max_skip=(0, 1 << 50),
            connections_per_host=(1, 10_000), read_buffer=(4096, 1 << 30),
        )  # fmt: skip

    def is_configured(self, host: str) -> bool:
        """True where a setting names ``host``, with its port or without: the operator knows it."""
        known = self.plain_http | self.tls | self.allow_sources
        return host in known or split_host(host)[0] in known

    def scheme(self, host: str) -> str:
        """``http`` or ``https`` for a registry host."""
        return "http" if self.is_plain(host) else "https"

    def is_plain(self, host: str) -> bool:
        """True where ``host`` is spoken to over plain HTTP: configured, or loopback and not on port 443.

        Loopback hosts are plain by default, as for docker and containerd, which treat 127.0.0.0/8, ::1 and localhost as
        insecure registries.
        """
        name, port = split_host(host)
        if host in self.tls or name in self.tls:
            return False
        if host in self.plain_http or name in self.plain_http:
            return True
        return is_loopback(name) and port != 443

    def base_url(self, host: str) -> str:
        """``scheme://host`` of the registry's API."""
        return f"{self.scheme(host)}://{api_host(host)}"

    def ssl_context(
        self, ca: Sequence[str] = (), client: Sequence[tuple[str, str]] = (), skip_verify: bool = False
    ) -> ssl.SSLContext:
        """A TLS context that trusts the system's CAs, ``ca_file`` and ``ca``, and shows the ``client`` certificates.

        ``client`` are pairs of a certificate's file and its key's, which is empty where one file holds both. Raises
        :class:`ConfigError` where a file cannot be used.
        """
        import ssl  # here, as urllib.request below, for those who only make settings

        context = ssl.create_default_context()
        for path in (self.ca_file, *ca):
            try:
                if path:
                    with held(path, MAX_CERTIFICATES) as name:
                        context.load_verify_locations(name)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"cannot use the CA bundle {path}: {_why(error)}") from error
        for certificate, key in client:
            try:
                load_pair(context, certificate, key)
            except (OSError, ssl.SSLError, ValueError) as error:
                raise ConfigError(f"cannot use the client certificate {certificate}: {_why(error)}") from error
        if skip_verify:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context


def load_pair(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Have a context show a certificate; ``key`` is empty where one file holds both. Raises ConfigError, OSError (as ssl
    does), ValueError where the key is encrypted."""
    with held(certificate, MAX_CERTIFICATES) as shown, held(key or certificate, MAX_CERTIFICATES) as private:
        context.load_cert_chain(shown, private, password=_no_password)


def _why(error: Exception) -> str:
    """What an error says, without the name of a file, which is ours."""
    return str(getattr(error, "strerror", None) or error)


def _no_password() -> str:
    raise ValueError("its key is encrypted")  # OpenSSL would ask the terminal


def split_host(host: str) -> tuple[str, int | None]:
    """``name:port`` -> (name without brackets, port or None)."""
    parts = urlsplit("//" + host)
    return parts.hostname or "", parts.port


def is_loopback(name: str) -> bool:
    """True for ``localhost``, names under it, and loopback addresses."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def proxy_for(url: str) -> str | None:
    """The proxy that the environment (HTTP_PROXY, HTTPS_PROXY, NO_PROXY) names for ``url``, or None.

    Asked here, not by the HTTP libraries: their "trust the environment" switches also read ``~/.netrc`` and would send
    its passwords to registries.
    """
    import urllib.request

    parts = urlsplit(url)
    if is_loopback(parts.hostname or ""):
        return None
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    return proxy if "://" in proxy else "http://" + proxy
