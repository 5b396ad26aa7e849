"""Which groups a node accepts: what a signature says, whether it counts, and what the node asks for. No network.

The payload is cosign's (its SIGNATURE_SPEC.md, "Simple Signing")::

    {"critical": {"identity": {"docker-reference": "registry.example/team/tool"},
                  "image": {"docker-manifest-digest": "sha256:..."},
                  "type": "cosign container image signature"},
     "optional": {...} or null}

cosign ignores ``docker-reference``. Here it must name the repository that was asked for (or one that the rule allows):
otherwise a signed group could be passed off under another name. What cosign 3 signs by default names no repository
(bundle.py): that counts only where the rule says that any name will do, ``identity = ["**"]``.

The policy is TOML (the ``[policy]`` table of ``/etc/weenv/config.toml``, or a file that it names) or YAML::

    [policy]
    default = "deny"                                # or "allow": what no rule matches
    # file = "/etc/weenv/policy.yaml"               # instead of the rest

    [[policy.rules]]
    match = ["registry.example/team/**"]            # repositories; the first rule that matches decides
    keys = ["/etc/weenv/keys/team.pub"]             # one signature by one of these is needed
    # action = "allow" | "deny"                     # instead of keys
    # identity = ["hub.example/team/**"]            # names that signatures may be for: a mirror, or a layout; "**": any or none

Patterns: ``*`` is any part of one path component, ``**`` anything. A layout's name is ``oci:`` and its absolute path.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weenv.core import digest as digests
from weenv.core.errors import BadReference, ConfigError, FormatError, VerificationError
from weenv.core.regular import Opener, read_file, regular
from weenv.core.rights import remedy
from weenv.registry.groupref.keys import PublicKey, load_public, read_key_file
from weenv.registry.jsonsplice import parse_object
from weenv.registry.reference import parse_reference

SIGNATURE_TYPE = "cosign container image signature"
MAX_PAYLOAD = 64 << 10
MAX_POLICY = 1 << 20
MAX_SIGNATURE = 512
"""Bytes of a decoded signature; P-256 in DER takes 72 at most, Ed25519 64."""

STRANGER = "signed by another key, or altered"
_PREHASHED = "cosign 3.1 signs by Ed25519ph and verifies Ed25519: its Ed25519 signatures count nowhere; use an ECDSA key"

_REASONS = 4
"""Reasons why nothing counts that are told."""
ALLOW, DENY, REQUIRE = "allow", "deny", "require"
ANY_NAME = "**"
"""The pattern of names under which a signature that is for no repository counts, too."""


@dataclass(frozen=True, slots=True)
class Payload:
    """What is signed: that ``digest`` is what the repository ``reference`` (without tag; empty: any) holds."""

    reference: str
    digest: str
    optional: Mapping[str, Any]


def repository_name(text: str) -> str:
    """``host/repository`` of a docker reference, in one spelling. Raises BadReference."""
    return parse_reference(text).name


def make_payload(reference: str, digest: str, optional: Mapping[str, Any] | None = None) -> bytes:
    """The bytes to sign, as cosign writes them: keys sorted, no spaces."""
    value = {
        "critical": {
            "identity": {"docker-reference": repository_name(reference)},
            "image": {"docker-manifest-digest": digests.check_digest(digest)},
            "type": SIGNATURE_TYPE,
        },
        "optional": dict(optional) if optional else None,
    }
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def parse_payload(data: bytes) -> Payload:
    """Read a payload. Raises FormatError; whether anybody signed it is another question."""
    what = "signature payload"
    _, raw = parse_object(data, what, MAX_PAYLOAD)
    critical = _object(raw.get("critical"), "critical")
    if critical.get("type") != SIGNATURE_TYPE:
        raise FormatError("is of an unknown type", member=what)
    reference = _object(critical.get("identity"), "critical.identity").get("docker-reference")
    digest = _object(critical.get("image"), "critical.image").get("docker-manifest-digest")
    optional = raw.get("optional")
    if not isinstance(reference, str) or not isinstance(digest, str) or not digests.is_digest(digest):
        raise FormatError("names no image", member=what)
    try:
        name = repository_name(reference)
    except BadReference as error:
        raise FormatError(f"names no image: {error.message}", member=what) from error
    return Payload(name, digest, optional if isinstance(optional, dict) else {})


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"has no {what}", member="signature payload")
    return value


@dataclass(frozen=True, slots=True)
class Signature:
    """A payload and a signature over it, as found; nothing is verified yet.

    ``signed`` are the bytes that the signature is over, where those are not the payload; ``read`` understands the payload
    once they are known to be signed (raises FormatError); ``stranger`` says what it is to those who have no key for it;
    ``hint`` is the fingerprint of the key that it claims to be by, or empty.
    """

    payload: bytes
    signature: bytes
    signed: bytes | None = None
    read: Callable[[bytes], Payload] = parse_payload
    stranger: str = STRANGER
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Rejected:
    """Something that was found where signatures are and cannot be one, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """A signature that counts: by which key, and what else it says."""

    key: PublicKey
    payload: Payload


class Judge:
    """Looks at signatures, one after the other, for one by one of ``keys``, for one of the digests ``wanted``, under a name of
    ``names`` (patterns)."""

    def __init__(self, wanted: Sequence[str], names: Sequence[str], keys: Sequence[PublicKey]) -> None:
        self._wanted, self._names, self._keys = wanted, names, keys
        self._reasons: dict[str, None] = {}
        self._hint = "see [policy] in the node's configuration"

    def accepted(self, found: Signature | Rejected) -> Accepted | None:
        """What it says, where it counts."""
        judged = self._judged(found)
        if isinstance(judged, Accepted):
            return judged
        if len(self._reasons) < _REASONS:
            self._reasons[judged] = None
        return None

    def _judged(self, found: Signature | Rejected) -> Accepted | str:
        """Or why it does not count. A signature is verified before its payload is read."""
        if isinstance(found, Rejected):
            return found.reason
        signed = found.payload if found.signed is None else found.signed
        key = next((key for key in self._keys if key.verify(signed, found.signature)), None)
        if key is None:
            return _why_not(found, self._keys)
        try:
            payload = found.read(found.payload)
        except FormatError as error:
            return str(error)
        if payload.digest not in self._wanted:
            return f"signed for another digest, {payload.digest}"
        if not payload.reference and ANY_NAME not in self._names:
            self._hint = f"sign with: cosign sign -a docker-reference=HOST/NAME, or let any name count: identity '{ANY_NAME}'"
            return "signed for no repository"
        if payload.reference and not any(matches(name, payload.reference) for name in self._names):
            return f"signed for another repository, {payload.reference}"
        return Accepted(key, payload)

    def refuse(self, what: str, *, looked: int = 0, more: bool = False) -> VerificationError:
        """Why none counted. ``more``: there are others, and only ``looked`` were looked at."""
        if more:
            hint = "sign it under the tag that is looked at first: weenv group sign --storage tag; or delete the others"
            rest = f": {', '.join(self._reasons)}" if self._reasons else ""
            return VerificationError(
                f"none of the first {looked} signatures counts, and more exist, which were not looked at{rest}", member=what,
                hint=hint,
            )  # fmt: skip
        if not self._reasons:
            return VerificationError(
                "is not signed", member=what, hint="sign it: weenv group sign, or change the node's policy"
            )
        return VerificationError(f"no signature counts: {', '.join(self._reasons)}", member=what, hint=self._hint)


def check_signatures(
    signatures: Iterable[Signature | Rejected], wanted: Sequence[str], names: Sequence[str], keys: Sequence[PublicKey],
    what: str,
) -> Accepted:  # fmt: skip
    """The first of the signatures that counts (:class:`Judge`). Raises VerificationError that says why none does."""
    judge = Judge(wanted, names, keys)
    for found in signatures:
        accepted = judge.accepted(found)
        if accepted is not None:
            return accepted
    raise judge.refuse(what)


def _why_not(found: Signature, keys: Sequence[PublicKey]) -> str:
    """Why none of ``keys`` verifies a signature."""
    for key in keys:
        if key.fingerprint == found.hint and key.algorithm == "ed25519":
            return f"not signed by {key.name} in a way that it could be verified ({_PREHASHED})"
    return found.stranger


# -- rules ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*)", pattern)
    return re.compile("".join({"*": "[^/]*", "**": ".*"}.get(part) or re.escape(part) for part in parts) + r"\Z", re.DOTALL)


_PORT = re.compile(r":0*(?:443|80)\Z")


def _plainly(name: str) -> str:
    """A name or pattern with its host in one spelling: hosts have no case, and a default port need not be written."""
    host, slash, rest = name.partition("/")
    return name if not slash or host == "oci:" else _PORT.sub("", host.lower()) + slash + rest


def matches(pattern: str, name: str) -> bool:
    """True where a pattern covers a repository's name, however its host is spelt."""
    return _compiled(_plainly(pattern)).match(_plainly(name)) is not None


@dataclass(frozen=True, eq=False)
class Rule:
    """What is asked of repositories that ``match``. ``identity`` empty: a signature must name the repository itself."""

    match: tuple[str, ...]
    action: str
    keys: tuple[PublicKey, ...] = ()
    identity: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Policy:
    """The rules of a node, in order, and what holds where none matches."""

    rules: tuple[Rule, ...] = ()
    default: str = ALLOW

    def rule(self, name: str) -> Rule:
        """The rule for a repository ``host/name`` or layout ``oci:/path``."""
        for rule in self.rules:
            if any(matches(pattern, name) for pattern in rule.match):
                return rule
        return Rule((), self.default)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes where the policy does: what was accepted under another one is looked at again."""
        rows = [[r.match, r.action, [k.fingerprint for k in r.keys], r.identity] for r in self.rules]
        return hashlib.sha256(json.dumps([rows, self.default]).encode()).hexdigest()


def parse_policy(raw: object, where: str = "policy", directory: str = "") -> Policy:
    """From a parsed table; key files are read. ``directory`` is what relative paths of keys begin at. Raises ConfigError."""
    if not isinstance(raw, dict):
        raise ConfigError(f"[{where}] must be a table")
    _known(raw, ("default", "rules"), where)
    default = raw.get("default", ALLOW)
    if default not in (ALLOW, DENY):
        raise ConfigError(f"{where}.default must be allow or deny, not {default!r}")
    rules = raw.get("rules", [])
    if not isinstance(rules, list):
        raise ConfigError(f"{where}.rules must be a list of tables")
    return Policy(tuple(_rule(rule, f"{where}.rules[{number}]", directory) for number, rule in enumerate(rules)), default)


def _rule(raw: object, where: str, directory: str) -> Rule:
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} must be a table")
    _known(raw, ("match", "action", "keys", "identity"), where)
    match, keys, identity = (_strings(raw.get(key, []), f"{where}.{key}") for key in ("match", "keys", "identity"))
    if not match:
        raise ConfigError(f"{where} matches nothing", hint='match = ["registry.example/team/**"]')
    action = raw.get("action", REQUIRE if keys else "")
    if action not in (ALLOW, DENY, REQUIRE) or (action == REQUIRE) != bool(keys):
        raise ConfigError(f"{where} needs either keys, or action allow or deny")
    loaded = []
    for name in keys:
        path = os.path.join(directory, name)
        try:
            loaded.append(load_public(read_key_file(path), name=path))
        except ConfigError as error:
            hint = remedy(error.__cause__ or error, "put the key there, or mend the policy: nothing is accepted until then")
            raise ConfigError(f"{where}.keys: {error.message}", hint=hint) from error
    return Rule(match, action, tuple(loaded), identity)


def _known(raw: dict[str, Any], names: Sequence[str], where: str) -> None:
    for name in raw:
        if name not in names:
            raise ConfigError(f"unknown setting {where}.{name}", hint=f"known: {', '.join(names)}")


def _strings(value: object, where: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise ConfigError(f"{where} must be a list of strings")
    return tuple(value)


def policy_from_tables(tables: Mapping[str, Any]) -> Policy | None:
    """The policy of a configuration file's tables; None where it has none. Raises ConfigError."""
    raw = tables.get("policy")
    if raw is None:
        return None
    if isinstance(raw, dict) and "file" in raw:
        _known(raw, ("file",), "policy")
        if not isinstance(raw["file"], str):
            raise ConfigError("policy.file must be a str")
        return load_policy(raw["file"])
    return parse_policy(raw)


def files_of(tables: Mapping[str, Any], policy: Policy) -> list[str]:
    """The files that a node's policy was read from: beside the tables it depends on nothing but what they hold."""
    raw = tables.get("policy")
    own = [str(raw["file"])] if isinstance(raw, dict) and "file" in raw else []
    return own + sorted({key.name for rule in policy.rules for key in rule.keys})  # a rule's key is named by its path


def load_policy(path: str, opener: Opener = regular) -> Policy:
    """A policy from a file of its own: ``.yaml``, ``.yml`` or TOML, with or without a ``policy`` table. Raises ConfigError."""
    import tomllib

    import yaml

    try:
        data = read_file(path, MAX_POLICY, opener)
    except OSError as error:
        raise ConfigError(f"cannot read the policy {path}: {error.strerror}") from error
    try:
        text = data.decode()
        raw = yaml.safe_load(text) if path.endswith((".yaml", ".yml")) else tomllib.loads(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"cannot read the policy {path}: {' '.join(str(error).split())}") from error
    if isinstance(raw, dict) and set(raw) == {"policy"}:
        raw = raw["policy"]
    if raw is None:
        raise ConfigError(f"the policy {path} is empty")
    return parse_policy(raw, os.path.basename(path), os.path.dirname(os.path.abspath(path)))
