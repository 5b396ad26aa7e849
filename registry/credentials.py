"""Docker's credentials: ``config.json`` (auths, credsStore, credHelpers) and ``docker-credential-*`` executables.

Formats: docker/cli's documentation of ``config.json`` and docker-credential-helpers' protocol ("get": the server's
address on stdin, a JSON object with Username and Secret on stdout). Files are read anew when they change, and nothing
here is ever logged.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
from dataclasses import dataclass, field
from typing import Any

from weenv.core.errors import ConfigError
from weenv.core.regular import read_whole, regular
from weenv.registry.reference import is_hub

MAX_CONFIG = 4 << 20
HELPER_TIMEOUT = 30.0
"""Seconds a credential helper may take."""
MAX_HELPER_OUTPUT = 1 << 20
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_HUB_KEY = "https://index.docker.io/v1/"
_TOKEN_USER = "<token>"  # noqa: S105 - the helpers' mark of an identity token, as user name


@dataclass(frozen=True, slots=True)
class Credential:
    """What docker knows for a host: user name and password, or an identity token, or a ready bearer token."""

    username: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    registry_token: str = field(default="", repr=False)

    @property
    def has_basic(self) -> bool:
        """True where a Basic header can be made."""
        return bool(self.username or self.password)

    @property
    def basic_header(self) -> str:
        """The Authorization header of user name and password (RFC 7617)."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()

    def __bool__(self) -> bool:
        return self.has_basic or bool(self.identity_token or self.registry_token)


ANONYMOUS = Credential()


def config_paths(explicit: str = "") -> list[str]:
    """Where config.json may be: the given path alone, else $DOCKER_CONFIG's directory, else ``~/.docker``."""
    if explicit:
        return [explicit]
    directory = os.environ.get("DOCKER_CONFIG") or os.path.join(os.path.expanduser("~"), ".docker")
    return [os.path.join(directory, "config.json")]


def _keys(host: str) -> list[str]:
    if is_hub(host):
        return [_HUB_KEY, "index.docker.io", "docker.io", "registry-1.docker.io"]
    return [host]


def _plain_key(key: str) -> str:
    """``https://host/v1/`` -> ``host``, as docker compares keys of older configurations."""
    return key.removeprefix("https://").removeprefix("http://").partition("/")[0]


def _inline(entry: object) -> Credential:
    if not isinstance(entry, dict):
        return ANONYMOUS

    def text(name: str) -> str:
        value = entry.get(name, "")
        return value if isinstance(value, str) else ""

    username, password = text("username"), text("password")
    if encoded := text("auth"):
        try:
            decoded = base64.b64decode(encoded, validate=True).decode()
        except (binascii.Error, ValueError) as error:
            raise ConfigError("docker's config.json holds an auth entry that is not base64") from error
        username, _, password = decoded.partition(":")
        password = password.rstrip("\0")  # some writers pad it
    return Credential(username, password, text("identitytoken"), text("registrytoken"))


@dataclass(frozen=True, slots=True)
class DockerConfig:
    """The parts of ``config.json`` that matter here."""

    auths: dict[str, Any] = field(default_factory=dict, repr=False)
    creds_store: str = ""
    cred_helpers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: bytes) -> DockerConfig:
        """Parse the file's content. Raises :class:`ConfigError`."""
        try:
            raw = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ConfigError("docker's configuration is not JSON") from error
        if not isinstance(raw, dict):
            raise ConfigError("docker's configuration is not an object")
        auths, helpers, store = raw.get("auths"), raw.get("credHelpers"), raw.get("credsStore")
        helpers = helpers if isinstance(helpers, dict) else {}
        return cls(
            auths if isinstance(auths, dict) else {},
            store if isinstance(store, str) else "",
            {k: v for k, v in helpers.items() if isinstance(v, str) and v},
        )

    def helper_for(self, host: str) -> str:
        """The credential helper's suffix for a host, or empty: a host's own before the general store."""
        for key in _keys(host):
            if key in self.cred_helpers:
                return self.cred_helpers[key]
        for key, helper in self.cred_helpers.items():
            if _plain_key(key) in _keys(host):
                return helper
        return self.creds_store

    def inline(self, host: str, repository: str = "") -> Credential:
        """The entry of ``auths`` for a host. podman also writes ``host/namespace`` keys: the longest match wins."""
        if repository:
            parts = repository.split("/")
            for count in range(len(parts), 0, -1):
                entry = self.auths.get("/".join([host, *parts[:count]]))
                if entry is not None and (found := _inline(entry)):
                    return found
        for key in _keys(host):
            if key in self.auths and (found := _inline(self.auths[key])):
                return found
        for key, entry in self.auths.items():
            if _plain_key(key) in _keys(host) and (found := _inline(entry)):
                return found
        return ANONYMOUS


def run_helper(suffix: str, server: str) -> Credential:
    """Ask ``docker-credential-<suffix>`` for a server's credential; ANONYMOUS where it holds none. Blocks.

    Raises :class:`ConfigError` where the helper is missing or broken.
    """
    if _HELPER.match(suffix) is None:
        raise ConfigError(f"not a credential helper's name: {suffix[:64]!r}")
    program = "docker-credential-" + suffix
    try:
        done = subprocess.run([program, "get"], input=server.encode(), capture_output=True, timeout=HELPER_TIMEOUT, check=False)
    except FileNotFoundError as error:
        raise ConfigError(f"{program} is not installed", hint="docker's config.json names it; install it or log in again"
        ) from error  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{program} failed: {type(error).__name__}") from error
    if done.returncode != 0:
        # The helpers' convention: exit 1 and this text on stdout mean "I have nothing for that server".
        if b"not found" in done.stdout.lower() or b"not found" in done.stderr.lower():
            return ANONYMOUS
        raise ConfigError(f"{program} failed with status {done.returncode}")
    try:
        answer = json.loads(done.stdout[:MAX_HELPER_OUTPUT])
        username, secret = answer["Username"], answer["Secret"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{program} gave an answer that cannot be read") from error
    if not isinstance(username, str) or not isinstance(secret, str):
        raise ConfigError(f"{program} gave an answer that cannot be read")
    if username == _TOKEN_USER:
        return Credential(identity_token=secret)
    return Credential(username, secret)


class CredentialStore:
    """Looks credentials up; re-reads the configuration when the file changes. Blocking: call it from a thread."""

    def __init__(self, config_path: str = "") -> None:
        self._paths = config_paths(config_path)
        self._explicit = bool(config_path)
        self._stamp: tuple[object, ...] | None = None
        self._config = DockerConfig()

    def _load(self) -> DockerConfig:
        for path in self._paths:
            try:
                with open(path, "rb", opener=regular) as file:
                    stat = os.fstat(file.fileno())
                    stamp = (path, stat.st_ino, stat.st_size, stat.st_mtime_ns)
                    if stamp != self._stamp:
                        data = read_whole(file, MAX_CONFIG)
                        try:
                            self._config = DockerConfig.parse(data)
                        except ConfigError as error:
                            raise ConfigError(f"{path}: {error.message}", hint="mend it, or docker login anew") from error
                        self._stamp = stamp
                    return self._config
            except FileNotFoundError:
                continue
            except OSError as error:
                raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        if self._explicit:
            raise ConfigError(f"no docker configuration at {self._paths[0]}")
        return DockerConfig()

    def lookup(self, host: str, repository: str = "") -> Credential:
        """The credential for a host, or ANONYMOUS. Raises :class:`ConfigError`."""
        config = self._load()
        helper = config.helper_for(host)
        if helper:
            found = run_helper(helper, _keys(host)[0])
            if found:
                return found
        return config.inline(host, repository)
