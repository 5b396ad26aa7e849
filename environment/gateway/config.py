"""Settings of ``weenv gateway serve``: the ``[gateway]`` table of ``/etc/weenv/config.toml``.

::

    [gateway]
    address = "127.0.0.1:5050"
    plans = ["/etc/weenv/plans", "registry.example/plans"]
    groups = ["registry.example/team/**"]
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from weenv.core import settings
from weenv.core.errors import BadReference, ConfigError
from weenv.registry.config import is_loopback, split_host
from weenv.registry.reference import check_host, check_repository

AUTO, REDIRECT, PROXY = "auto", "redirect", "proxy"


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """All settings, with their defaults. Times are in seconds, sizes in bytes."""

    address: str = "127.0.0.1:5050"
    """``HOST:PORT``, or ``unix:/path`` (mode 0600). Docker and containerd speak plain HTTP to loopback registries."""
    plans: tuple[str, ...] = ()
    """Where ``plan/NAME:TAG`` is looked for, in order: directories (``/etc/weenv/plans``) and registries
    (``registry.example/plans``)."""
    groups: tuple[str, ...] = ()
    """Repositories that names and plans from registries may stack: a host, or a pattern such as
    ``registry.example/team/**``. Plans in directories may stack anything."""
    default_registry: str = ""
    """``HOST`` or ``HOST/PREFIX`` of groups that are named without a host; empty: Docker Hub."""
    platform: str = ""
    """Of the images, such as ``linux/arm64``; empty: this machine's."""
    blobs: str = AUTO
    """How layers are answered: ``redirect`` to their registry, ``proxy``, or ``auto``: redirect where that needs no
    credentials and no certificate of the node's."""
    max_age: float = 60.0
    """How long a tag of a group or plan is believed before its registry is asked again."""
    keep_images: int = 10_000
    """Composed images that can still be had by digest; those not asked for the longest go."""
    keep_bytes: int = 256 << 20
    """Bytes of all their manifests and configs."""
    max_plan: int = 4 << 20
    """Largest plan taken from a registry."""
    requests: int = 256
    """Requests answered at a time; more are told to come back."""
    client_stall: float = 120.0
    """A client that takes no byte for so long is dropped."""
    users_file: str = ""
    """``NAME:SECRET`` a line, mode 0600: who may ask, by basic authentication or the secret as bearer token; empty: anybody
    who can connect."""
    tls_certificate: str = ""
    """PEM file with the certificate chain; empty: plain HTTP."""
    tls_key: str = ""
    """PEM file with its key."""
    metrics_address: str = ""
    """Loopback ``HOST:PORT`` or ``unix:/path`` for Prometheus; empty: none."""

    def __post_init__(self) -> None:
        parse_address(self.address)
        if self.blobs not in (AUTO, REDIRECT, PROXY):
            raise ConfigError(f"gateway.blobs must be auto, redirect or proxy, not {self.blobs!r}")
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ConfigError("gateway.tls_certificate and gateway.tls_key go together")
        settings.check_ranges(
            self, "gateway",
            max_age=(0.0, 1e9), keep_images=(1, 1_000_000), keep_bytes=(1 << 20, 1 << 40), max_plan=(1 << 10, 64 << 20),
            requests=(1, 100_000), client_stall=(0.1, 1e6),
        )  # fmt: skip
        for source in self.plans:
            if not source.startswith("/"):
                _check_place("plans", source, 'name a directory ("/etc/weenv/plans") or a registry ("registry.example/plans")')
        for pattern in self.groups:
            if not pattern or pattern.strip() != pattern or "://" in pattern:
                raise ConfigError(f"gateway.groups cannot hold {pattern!r}", hint='write "registry.example/team/**"')
        if self.default_registry:
            _check_place("default_registry", self.default_registry, "write HOST or HOST/PREFIX")
        if self.platform and re.fullmatch(r"[a-z0-9]+/[a-z0-9]+(/[a-z0-9]+)?", self.platform) is None:
            raise ConfigError(f"gateway.platform must be OS/ARCH, not {self.platform!r}")

    @property
    def loopback(self) -> bool:
        """True where only this machine can connect."""
        path, host, _ = parse_address(self.address)
        return bool(path) or is_loopback(host)


def _check_place(name: str, text: str, hint: str) -> None:
    host, slash, prefix = text.partition("/")
    try:
        if not ("." in host or ":" in host or host == "localhost"):
            raise BadReference(f"no host in {text!r}")
        check_host(host)
        if slash:
            check_repository(prefix)
    except BadReference as error:
        raise ConfigError(f"gateway.{name}: {error.message}", hint=hint) from error


def parse_address(address: str) -> tuple[str, str, int]:
    """``unix:/path`` or ``HOST:PORT`` as (path, host, port); port 0: any. Raises ConfigError."""
    path = address.removeprefix("unix:")
    if path != address:
        if not path.startswith("/") or "\0" in path or len(path.encode()) > 107:
            raise ConfigError(f"gateway.address: not an absolute path of at most 107 bytes: {path[:120]!r}")
        return path, "", 0
    try:
        host, port = split_host(address)
    except ValueError:
        host, port = "", None
    if not host or port is None or "/" in address or "@" in address:
        raise ConfigError(f"gateway.address must be HOST:PORT or unix:/path, not {address[:100]!r}")
    return "", host, port


def from_tables(tables: dict[str, Any], **overrides: Any) -> GatewayConfig:
    """From a parsed configuration file; ``overrides`` that are not None win. Raises ConfigError."""
    return settings.build(GatewayConfig, tables.get("gateway", {}), "gateway", **overrides)
