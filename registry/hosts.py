"""Which servers stand for a registry: mirrors and the registry itself, by containerd's own ``certs.d`` convention.

::

    <config_path>/<host>[_<port>_]/hosts.toml     first found of host_port_, host:port, _default
    <config_path>/<host>/*.crt, *.cert, *.key     without a hosts.toml: CAs and client certificates (docker's layout)

Format and meaning are those of containerd 2.x: docs/hosts.md and core/remotes/docker/config/hosts.go there. ``server`` and
the root table are the registry itself, tried after the ``[host."URL"]`` tables, which are tried in their order. A file that
cannot be parsed is logged and the certificates beside it are used, as containerd does, so that both go to the same place.
Files are looked at again when they may have changed; nothing has to be restarted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import re
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import quote, urlsplit

from weenv.core.errors import ConfigError
from weenv.core.regular import read_whole, regular
from weenv.registry.config import RegistryConfig, split_host
from weenv.registry.reference import DEFAULT_HOST, api_host, is_hub

log = logging.getLogger(__name__)

PULL: Final = "pull"
"""Capability: manifests and blobs by digest."""
RESOLVE: Final = "resolve"
"""Capability: what a name means now. Takes more trust than PULL, whose answers are checked against a digest."""
PUSH: Final = "push"
"""Capability: taking uploads, and deleting."""
REFERRERS: Final = "referrers"
"""Capability: listing what refers to a manifest (containerd 2.x)."""
CAPABILITIES: Final = frozenset({PULL, RESOLVE, PUSH, REFERRERS})
"""What a table without ``capabilities`` has."""

_MAX_FILE: Final = 1 << 20
_FRESH: Final = 2.0
"""Seconds for which the files are not looked at again."""
_LONGEST: Final = 86400.0
"""Seconds of a duration at most: what is longer has no end."""
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Trust:
    """TLS settings of one server: CA files, client certificates (certificate, key or empty), whether nothing is verified.

    ``stamp`` tells apart files that were replaced: (inode, mtime in ns, size) of each, or None for one that is not there.
    """

    ca: tuple[str, ...] = ()
    client: tuple[tuple[str, str], ...] = ()
    skip_verify: bool | None = None
    stamp: tuple[tuple[int, int, int] | None, ...] = ()

    @property
    def explicit(self) -> bool:
        """True where anything is set."""
        return bool(self.ca or self.client) or self.skip_verify is not None


DEFAULT_TRUST: Final = Trust()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server that stands for the registry ``namespace``. ``host`` is ``name[:port]`` as in its URLs."""

    namespace: str
    host: str
    scheme: str = "https"
    path: str = "/v2"
    """Root of the API (``override_path``)."""
    capabilities: frozenset[str] = CAPABILITIES
    trust: Trust = DEFAULT_TRUST
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Sent with every request to this server, and to no other."""
    dial_timeout: float | None = None
    """Seconds until a connection is there; None: the configured time."""
    fallback: bool = False
    """TLS is tried first, then plain HTTP: the address says http, and TLS is configured."""

    @property
    def name(self) -> str:
        """What people call it: its host, ``docker.io`` for Docker Hub's."""
        return DEFAULT_HOST if is_hub(self.host) else self.host

    @property
    def origin(self) -> str:
        """``scheme://host``: what credentials, headers and health belong to."""
        return f"{self.scheme}://{self.host}"

    @property
    def is_proxy(self) -> bool:
        """True where it serves another registry's namespace, which then goes along as ``?ns=``."""
        return self.host != self.namespace and (self.namespace, self.host) != (DEFAULT_HOST, api_host(DEFAULT_HOST))

    @property
    def is_private(self) -> bool:
        """True where nobody else may be sent there: it takes certificates, headers or trust that only this node has."""
        return self.trust.explicit or bool(self.headers)

    def url(self, path: str) -> str:
        """The URL of an API path, ``/v2/...`` (with its query, if any)."""
        url = f"{self.origin}{self.path}{path.removeprefix('/v2')}"
        if not self.is_proxy:
            return url
        return f"{url}{'&' if '?' in path else '?'}ns={quote(self.namespace, safe='')}"

    def plain(self) -> Endpoint:
        """The same over plain HTTP."""
        return replace(self, scheme="http", fallback=False)


def needs(method: str, path: str) -> str:
    """The capability that a request takes. ``path`` is that of the API, ``/v2/...``."""
    if method not in ("GET", "HEAD"):
        return PUSH
    path = path.partition("?")[0]
    if "/referrers/" in path:
        return REFERRERS
    kind, _, target = path.rpartition("/")
    by_digest = ":" in target  # tags have none
    return PULL if kind.endswith(("/blobs", "/manifests")) and by_digest else RESOLVE


def directories(root: str, host: str) -> list[str]:
    """Where the files of ``host`` may be, in the order to look: ``host_port_``, ``host:port``, ``_default``."""
    if not host or "/" in host or "\0" in host or host.startswith("."):
        return []
    name, colon, port = host.rpartition(":")
    names = [f"{name}_{port}_"] if colon and name else []
    return [os.path.join(root, one) for one in (*names, host, "_default")]


def default_endpoint(host: str, config: RegistryConfig) -> Endpoint:
    """The registry itself, where no file says anything."""
    namespace = DEFAULT_HOST if is_hub(host) else host
    return Endpoint(namespace, api_host(host), config.scheme(host))


def unusable(config: RegistryConfig) -> list[tuple[str, str]]:
    """The ``hosts.toml`` files below ``config_path`` that cannot be used, each with the reason."""
    found = []
    for root in filter(None, config.config_path.split(":")):
        with contextlib.suppress(OSError), os.scandir(root) as entries:  # neither directory need be there
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = os.path.join(entry.path, "hosts.toml")
                try:
                    with open(path, "rb", opener=regular) as file:
                        parse(read_whole(file, _MAX_FILE), entry.path, "registry.invalid", config)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except ConfigError as error:
                    found.append((path, error.message))
                except OSError as error:
                    found.append((path, error.strerror or str(error)))
    return found


def parse(text: bytes, base: str, host: str, config: RegistryConfig) -> tuple[Endpoint, ...]:
    """The servers that a ``hosts.toml`` names for registry ``host``; relative paths in it begin at ``base``.

    Raises :class:`ConfigError`. Looks at the certificate files' stamps, nothing else.
    """
    try:
        table = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not TOML: {error}") from error
    hosts = table.get("host", {})
    if not isinstance(hosts, dict):
        raise ConfigError("host must hold tables: [host.\"https://mirror.example\"]")
    upstream = default_endpoint(host, config)
    found = [_endpoint(url, _table(url, raw), base, upstream) for url, raw in hosts.items()]
    server = table.get("server", "")
    if not isinstance(server, str):
        raise ConfigError(f"server must be a string, not {server!r}")
    found.append(_endpoint(server, table, base, upstream))
    return tuple(found)


def _table(name: str, raw: object) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise ConfigError(f'[host."{name}"] must be a table')
    return raw


def _endpoint(server: str, table: Mapping[str, Any], base: str, upstream: Endpoint) -> Endpoint:
    override = _boolean(table, "override_path") or False
    endpoint = upstream
    if server:
        endpoint = _address(server, upstream.namespace, override)
    capabilities = table.get("capabilities") or []
    if not isinstance(capabilities, list) or not all(isinstance(one, str) for one in capabilities):
        raise ConfigError(f"capabilities must be a list of strings, not {capabilities!r}")
    named = frozenset(one.lower() for one in capabilities)
    if unknown := named - CAPABILITIES:
        raise ConfigError(f"unknown capability {min(unknown)!r}", hint=f"known: {', '.join(sorted(CAPABILITIES))}")
    trust = _trust(_certificates(table, base), _pairs(table, base), _boolean(table, "skip_verify"))
    dial = table.get("dial_timeout", "")
    endpoint = replace(
        endpoint,
        capabilities=named if named and server else CAPABILITIES,
        trust=trust,
        headers=_headers(table.get("header", {})),
        dial_timeout=_duration(dial) if dial else None,
    )
    return _with_fallback(endpoint)


def _with_fallback(endpoint: Endpoint) -> Endpoint:
    if endpoint.scheme == "http" and endpoint.trust.explicit and split_host(endpoint.host)[1] != 80:
        return replace(endpoint, scheme="https", fallback=True)
    return endpoint


def _address(server: str, namespace: str, override: bool) -> Endpoint:
    try:
        parts = urlsplit(server if "://" in server else "https://" + server)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"not a server's address: {server[:200]!r}", hint="write https://HOST[:PORT][/PATH]")
    path = posixpath.normpath("/" + parts.path.lstrip("/")).rstrip("/")
    if not override and not path.endswith("/v2"):
        path += "/v2"
    return Endpoint(namespace, parts.netloc, parts.scheme, path)


def _boolean(table: Mapping[str, Any], name: str) -> bool | None:
    value = table.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {value!r}")
    return value


def _certificates(table: Mapping[str, Any], base: str) -> tuple[str, ...]:
    value = table.get("ca", [])
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise ConfigError(f"ca must be a path or a list of paths, not {value!r}")
    return tuple(os.path.join(base, one) for one in names)


def _pairs(table: Mapping[str, Any], base: str) -> tuple[tuple[str, str], ...]:
    value = table.get("client", [])
    found = []
    for one in [value] if isinstance(value, str) else value if isinstance(value, list) else [None]:
        pair = [one, ""] if isinstance(one, str) else one
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair) or not pair[0]:
            raise ConfigError(f"client must be a path, a list of paths, or a list of pairs of paths, not {value!r}")
        found.append((os.path.join(base, pair[0]), os.path.join(base, pair[1]) if pair[1] else ""))
    return tuple(found)


def _headers(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise ConfigError("header must be a table")
    found = []
    for name, given in value.items():
        for one in given if isinstance(given, list) else [given]:
            if not isinstance(one, str) or _HEADER.match(name) is None or not one.isprintable():
                raise ConfigError(f"header {name[:64]!r} must be a string or a list of strings")
            found.append((name, one))
    return tuple(found)


def _duration(value: object) -> float:
    """Seconds of a Go duration such as ``1m30s`` or ``500ms``."""
    if isinstance(value, str) and (parts := _DURATION.findall(value)) and "".join(a + b for a, b in parts) == value:
        return min(sum(float(number) * _UNITS[unit] for number, unit in parts), _LONGEST)
    raise ConfigError(f"not a duration: {value!r}", hint="write 500ms, 10s or 1m")


def _trust(ca: tuple[str, ...], client: tuple[tuple[str, str], ...], skip_verify: bool | None) -> Trust:
    files = [*ca, *(path for pair in client for path in pair if path)]
    return Trust(ca, client, skip_verify, tuple(_stamp(path) for path in files))


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        about = os.stat(path)
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns, about.st_size


def certificates(directory: str, host: str, config: RegistryConfig) -> tuple[Endpoint, ...]:
    """The registry itself with the certificates that lie in ``directory`` by docker's pattern. Raises OSError.

    ``*.crt`` are CAs; ``*.cert`` are client certificates, with their key in a ``.key`` of the same name or in themselves.
    """
    names = sorted(entry.name for entry in os.scandir(directory) if not entry.is_dir())
    ca = tuple(os.path.join(directory, name) for name in names if name.endswith(".crt"))
    client = []
    for name in names:
        if name.endswith(".cert"):
            key = name.removesuffix(".cert") + ".key"
            client.append((os.path.join(directory, name), os.path.join(directory, key) if key in names else ""))
    return (_with_fallback(replace(default_endpoint(host, config), trust=_trust(ca, tuple(client), None))),)


class Hosts:
    """The servers of every registry, as the files under the configured directories say now. Blocks on the disk, briefly."""

    def __init__(self, config: RegistryConfig) -> None:
        self._config = config
        self._roots = [root for root in config.config_path.split(":") if root]
        self._known: dict[str, tuple[float, tuple[Endpoint, ...]]] = {}
        self._told: dict[str, str] = {}

    def endpoints(self, host: str, capability: str) -> tuple[Endpoint, ...]:
        """The servers to ask for what takes ``capability``, in their order.

        Raises :class:`ConfigError` where there is none, or where the files cannot be read.
        """
        namespace = DEFAULT_HOST if is_hub(host) else host
        now = time.monotonic()
        known = self._known.get(namespace)
        if known is None or now - known[0] > _FRESH:
            if len(self._known) > 1000:
                self._known.clear()
            known = self._known[namespace] = (now, self._read(namespace))
        found = tuple(one for one in known[1] if capability in one.capabilities)
        if not found:
            raise ConfigError(
                f"no server of {namespace} may be asked to {capability}",
                hint=f"see capabilities in hosts.toml under {self._config.config_path}",
            )
        return found

    def _read(self, host: str) -> tuple[Endpoint, ...]:
        directory = next((path for root in self._roots for path in directories(root, host) if os.path.exists(path)), None)
        if directory is None:
            return (default_endpoint(host, self._config),)
        path = os.path.join(directory, "hosts.toml")
        try:
            try:
                with open(path, "rb", opener=regular) as file:
                    text = read_whole(file, _MAX_FILE)
            except FileNotFoundError:
                text = b""
            if text:
                try:
                    return parse(text, directory, host, self._config)
                except ConfigError as error:
                    self._complain(path, error)
            return certificates(directory, host, self._config)
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename or directory}: {error.strerror}") from error

    def _complain(self, path: str, error: ConfigError) -> None:
        if self._told.get(path) == error.message:
            return
        self._told[path] = error.message
        hint = error.hint or "see docs/registries.md; until then its mirrors are not used"
        log.error("%s cannot be used: %s", path, error.message, extra={"hint": hint})

