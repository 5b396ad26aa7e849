"""References to layers: which manifest a reference means now, and what that manifest says, verified and remembered.

A digest means the same for ever. A tag is believed for ``max_age`` seconds, then the registry is asked with a conditional
request (``If-None-Match``, RFC 9110 section 13.1.2, which registries answer 304 to); while it is away the old answer is
given, with a warning. However many ask for one reference at a time, the registry is asked once.

With a policy nothing is handed out that it does not accept (:mod:`weenv.registry.groupref.policy`). What it accepted is
remembered, under the policy's fingerprint, so a registry that is away does not keep anything from starting again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform as machine
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weenv.core import digest as digests
from weenv.core.aio import SingleFlight, gather_all
from weenv.core.errors import FormatError, NotFoundInSource, UnavailableError
from weenv.registry.auth import scope_of
from weenv.registry.client import RegistryClient
from weenv.registry.groupref.cache import MappingCache
from weenv.registry.groupref.model import ResolvedGroup, read_group
from weenv.registry.layout import Layout
from weenv.registry.manifest import ACCEPT, MAX_CONFIG, MAX_MANIFEST, Descriptor, Index, Manifest, parse_manifest
from weenv.registry.reference import LayoutLocation, Location, Reference, parse_location, place_name

if TYPE_CHECKING:  # signing needs libraries that resolving does not
    from weenv.registry.groupref.policy import Policy

log = logging.getLogger(__name__)

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""``uname -m`` to the names that image-spec config.md takes from Go's GOARCH."""

_DEPTH = 4
"""Indexes within indexes."""


def this_platform() -> str:
    """This machine, as ``os/arch``."""
    name = machine.machine()
    return f"linux/{ARCHITECTURES.get(name, name)}"


def node_policy(tables: Mapping[str, Any]) -> Policy | None:
    """The policy of a configuration file's tables (weenv.registry.groupref.policy); None where it has none.

    Raises ConfigError.
    """
    if "policy" not in tables:
        return None
    from weenv.registry.groupref.policy import policy_from_tables  # its libraries take longer to import than we to resolve

    return policy_from_tables(tables)


def choose(index: Index, platform: str, what: str) -> Descriptor:
    """The manifest of an index for a platform such as ``linux/amd64``. Raises NotFoundInSource naming what there is."""
    names = [descriptor.platform_name for descriptor in index.manifests]
    for name, descriptor in zip(names, index.manifests, strict=True):
        if name == platform or name.startswith(platform + "/"):
            return descriptor
    known = ", ".join(sorted({name for name in names if name and name != "unknown/unknown"})) or "no platform at all"
    raise NotFoundInSource(f"{what} has nothing for {platform}", hint=f"it has {known}")


@dataclass
class Away:
    """A registry that gave no answer: which references got an old one, the oldest seen when (seconds since 1970), and why."""

    host: str
    references: list[str]
    seen: float
    reason: str

    def line(self) -> str:
        """A line that says so."""
        names = ", ".join(self.references[:3]) + (f" and {len(self.references) - 3} more" if len(self.references) > 3 else "")
        return f"{self.reason}; using what was seen {_ago(time.time() - self.seen)} ago of {names}"


def _ago(seconds: float) -> str:
    for length, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} seconds"


@dataclass
class Resolver:
    """Resolves any number of references side by side. ``max_age`` in seconds; ``at_once`` bounds requests in flight."""

    client: RegistryClient
    cache: MappingCache = field(default_factory=MappingCache)
    platform: str = ""
    max_age: float = 60.0
    at_once: int = 32
    policy: Policy | None = None
    """What the node accepts; None accepts everything."""
    stale: int = 0
    """How often an old answer was given because a registry was away."""
    silent: bool = False
    """Whoever asks says that himself, from ``away``; nothing is logged of it."""
    away: dict[str, Away] = field(default_factory=dict)
    """The registries that were, by host; kept where it is ``silent``."""

    def __post_init__(self) -> None:
        self.platform = self.platform or this_platform()
        self._flights: SingleFlight[str, ResolvedGroup] = SingleFlight()
        self._slots = asyncio.Semaphore(self.at_once)

    async def resolve(self, text: str) -> ResolvedGroup:
        """What a reference (or ``oci:DIR[:TAG]``) means.

        Raises BadReference, SourceError, FormatError, and VerificationError for what the policy does not accept.
        """
        location = parse_location(text)
        if isinstance(location, LayoutLocation):
            group = await asyncio.to_thread(self._from_layout, location, text)
        else:
            group = self._known(location, text) or await self._flights.do(text, lambda: self._ask(location, text))
        if self.policy is not None and not self._admitted(self.policy, location, group):
            await self._admit(self.policy, location, group)
        return group

    def _admitted(self, policy: Policy, location: Location, group: ResolvedGroup) -> bool:
        """True where the policy asks for nothing, or has accepted the group before."""
        name = place_name(location)
        return policy.rule(name).action == "allow" or self.cache.admitted(policy.fingerprint, name, group.digest)

    async def _admit(self, policy: Policy, location: Location, group: ResolvedGroup) -> None:
        from weenv.registry.groupref.sign import admit

        also = await self._indexes(location, group) if isinstance(location, Reference) else ()
        await admit(self.client, policy, location, group.digest, also)
        self.cache.admit(policy.fingerprint, place_name(location), group.digest)

    async def _indexes(self, reference: Reference, group: ResolvedGroup) -> tuple[str, ...]:
        """The digests of the indexes that lead from a reference to its group now: they may be what is signed."""
        if reference.target == group.digest:
            return ()
        passed: list[str] = []
        _, data, media_type = await self._manifest(reference, reference.target, group.reference)
        if reference.digest:
            digests.verify(data, reference.digest, f"the manifest of {group.reference}")
        for _ in range(_DEPTH):
            digest = digests.sha256(data)
            if digest == group.digest:
                return tuple(passed)
            parsed = parse_manifest(data, media_type, group.reference)
            if isinstance(parsed, Manifest):
                return ()
            passed.append(digest)
            target = choose(parsed, self.platform, group.reference).digest
            _, data, media_type = await self._manifest(reference, target, group.reference)
            digests.verify(data, target, f"the manifest of {group.reference}")
        return ()

    async def resolve_all(self, texts: Iterable[str]) -> list[ResolvedGroup]:
        """Many at once, in order; the first failure ends the others."""
        wanted = list(texts)
        found: list[ResolvedGroup | None] = [self._at_once(text) for text in wanted]
        rest = sorted({text for text, group in zip(wanted, found, strict=True) if group is None})
        asked = dict(zip(rest, await gather_all(*(self.resolve(text) for text in rest)), strict=True)) if rest else {}
        return [group or asked[text] for text, group in zip(wanted, found, strict=True)]

    def _at_once(self, text: str) -> ResolvedGroup | None:
        location = parse_location(text)
        group = None if isinstance(location, LayoutLocation) else self._known(location, text)
        if group is not None and self.policy is not None and not self._admitted(self.policy, location, group):
            return None
        return group

    def _name(self, reference: Reference) -> str:
        what = reference.digest or f"{reference.name}:{reference.tag}"
        return f"{what} {self.platform}"

    def _known(self, reference: Reference, text: str, *, any_age: bool = False) -> ResolvedGroup | None:
        """The answer that needs no question, or None."""
        if reference.digest and (group := self._group(reference.digest, text, reference)) is not None:
            return group
        row = self.cache.tag(self._name(reference))
        if row is None or not (any_age or reference.digest or 0 <= time.time() - row[1] < self.max_age):
            return None
        return self._group(row[0], text, reference)

    def _group(self, digest: str, text: str, reference: Reference) -> ResolvedGroup | None:
        return self.cache.group(digest, text, reference.api_host, reference.repository)

    async def _ask(self, reference: Reference, text: str) -> ResolvedGroup:
        old = self._known(reference, text, any_age=True)
        try:
            async with self._slots:
                group = await self._fetch(reference, text, old)
        except UnavailableError as error:
            if old is None:
                raise
            self.stale += 1
            if self.silent:
                self._note(reference, text, error)
            else:
                log.warning(
                    "registry away, using what the tag meant before",
                    extra={"reference": text, "digest": old.digest, "reason": error.message},
                )
            return old
        except NotFoundInSource:
            if not reference.digest:
                self.cache.forget(self._name(reference))
            raise
        if group.digest != reference.digest:
            self.cache.confirm(self._name(reference), group.digest)
        return group

    def _note(self, reference: Reference, text: str, error: UnavailableError) -> None:
        row = self.cache.tag(self._name(reference))
        seen = row[1] if row is not None else 0.0
        away = self.away.setdefault(reference.host, Away(reference.host, [], seen, error.message))
        away.references.append(text)
        away.seen = min(away.seen, seen)

    async def _fetch(self, reference: Reference, text: str, old: ResolvedGroup | None) -> ResolvedGroup:
        status, data, media_type = await self._manifest(reference, reference.target, text, old.digest if old else "")
        if status == 304 and old is not None:
            return old
        digest = digests.sha256(data)
        if reference.digest and digest != reference.digest:
            digests.verify(data, reference.digest, f"the manifest of {text}")
        for _ in range(_DEPTH):
            known = self._group(digest, text, reference)
            if known is not None:
                return known
            parsed = parse_manifest(data, media_type, text)
            if isinstance(parsed, Manifest):
                return await self._finish(reference, text, digest, parsed)
            digest = choose(parsed, self.platform, text).digest
            _, data, media_type = await self._manifest(reference, digest, text)
            digests.verify(data, digest, f"the manifest of {text}")
        raise FormatError("indexes within indexes within indexes", member=text)

    async def _manifest(self, reference: Reference, target: str, text: str, known: str = "") -> tuple[int, bytes, str]:
        headers = {"Accept": ACCEPT}
        if known:
            headers["If-None-Match"] = f'"{known}"'
        status, answer, body = await self.client.request(
            "GET", reference.api_host, f"/v2/{reference.repository}/manifests/{target}",
            what=text if reference.digest or text.endswith(f":{reference.tag}") else f"{text}:{reference.tag}",
            scope=scope_of(reference.repository), headers=headers, limit=MAX_MANIFEST,
            accept=frozenset({200, 304}) if known else frozenset({200}),
        )  # fmt: skip
        kind = answer.get("content-type", "").partition(";")[0].strip().lower()
        return status, body, "" if kind == "application/json" else kind

    async def _finish(self, reference: Reference, text: str, digest: str, manifest: Manifest) -> ResolvedGroup:
        config = manifest.config
        if config.size > MAX_CONFIG:
            raise FormatError(f"its config has {config.size} bytes", member=text)
        _, _, body = await self.client.request(
            "GET", reference.api_host, f"/v2/{reference.repository}/blobs/{config.digest}", what=f"the config of {text}",
            scope=scope_of(reference.repository), limit=config.size,
        )  # fmt: skip
        digests.verify(body, config.digest, f"the config of {text}")
        group = read_group(text, reference.api_host, reference.repository, digest, manifest, body)
        self.cache.store(group)
        return group

    def _from_layout(self, location: LayoutLocation, text: str) -> ResolvedGroup:
        layout = Layout(location.path)
        layout.check()
        descriptor = layout.resolve(location.tag, location.digest)
        for _ in range(_DEPTH):
            parsed = parse_manifest(layout.read_blob(descriptor), descriptor.media_type, text)
            if isinstance(parsed, Manifest):
                config = layout.read_blob(parsed.config, MAX_CONFIG)
                return read_group(text, "", os.path.abspath(location.path), descriptor.digest, parsed, config)
            descriptor = choose(parsed, self.platform, text)
        raise FormatError("indexes within indexes within indexes", member=text)
