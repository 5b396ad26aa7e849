"""What a repository name of the gateway means. Pure: text in, references out.

::

    plan/<name>                        a plan, from the gateway's sources of plans
    compose/<group>/and/<group>/...    a stack of groups, bottom first

Clients check names before they ask anybody: a component is lower-case letters and digits with ``.``, ``_``, ``__`` or
dashes between them (distribution-spec 1.1, "Pulling manifests", ``<name>``), and all of it is 255 characters at most. So
a group's reference is spelt in such components::

    registry.example:5000/base/debian:12        registry.example__5000/base/debian__12
    registry.example/tool@sha256:4f..           registry.example/tool__sha256__4f..
    registry.example/tool:2@sha256:4f..         registry.example/tool__2__sha256__4f..

that is, ``:`` and ``@`` are ``__``. As in docker's references, a first component with a dot, a port, or ``localhost`` is
a host; a group without one is the default registry's. A group without tag and digest takes the tag of the image that is
asked for. ``_`` between groups means the same as ``and``, for clients that do not check (containerd's ``ctr`` does not).

What this cannot spell (a component ``and``, ``__`` in a repository's name, a tag with capitals) a plan can.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from weenv.core.digest import is_digest
from weenv.core.errors import BadReference
from weenv.registry.reference import MAX_NAME, check_repository, check_tag, parse_reference

PLAN, COMPOSE = "plan", "compose"
SEPARATORS = ("and", "_")
"""Components between groups; the first is the one that is written."""
MAX_GROUPS = 32

_COLON = "__"
_PORT = re.compile(r"[0-9]{1,5}\Z")


@dataclass(frozen=True, slots=True)
class PlanName:
    """A plan by name."""

    name: str


@dataclass(frozen=True, slots=True)
class StackName:
    """A stack by its groups, bottom first: references as plans write them."""

    groups: tuple[str, ...]


def parse_name(name: str, tag: str = "latest", default_registry: str = "") -> PlanName | StackName:
    """What the image ``name:tag`` is. Raises BadReference that says which part is wrong.

    ``default_registry`` (``HOST`` or ``HOST/PREFIX``) is where groups without a host are; empty: Docker Hub.
    """
    if len(name) > MAX_NAME or not name.isascii() or not name.isprintable():
        raise BadReference(f"image name of more than {MAX_NAME} characters, or with strange ones: {name[:60]!r}")
    check_tag(tag)
    first, _, rest = name.partition("/")
    if first == PLAN and rest:
        return PlanName(check_repository(rest))
    if first == COMPOSE and rest:
        return StackName(_groups(rest.split("/"), tag, default_registry))
    raise BadReference(f"no image of this registry: {name[:100]!r}", hint=f"it has {PLAN}/NAME and {COMPOSE}/GROUP/and/GROUP")


def _groups(components: Sequence[str], tag: str, default_registry: str) -> tuple[str, ...]:
    stack: list[list[str]] = [[]]
    for component in components:
        if component in SEPARATORS:
            stack.append([])
        else:
            stack[-1].append(component)
    if not all(stack):
        raise BadReference("a group is missing", hint=f"write {COMPOSE}/GROUP/{SEPARATORS[0]}/GROUP")
    if len(stack) > MAX_GROUPS:
        raise BadReference(f"{len(stack)} groups, more than {MAX_GROUPS} in a name", hint="write a plan")
    return tuple(_group(group, tag, default_registry) for group in stack)


def _is_host(component: str) -> bool:
    return "." in component or _COLON in component or component == "localhost"


def _group(components: list[str], tag: str, default_registry: str) -> str:
    spelt = "/".join(components)
    host = ""
    if len(components) > 1 and _is_host(components[0]):
        host, colon, port = components[0].partition(_COLON)
        if colon:
            if _PORT.match(port) is None:
                raise BadReference(f"not a host and port: {components[0][:100]!r}", hint="write NAME__PORT")
            host = f"{host}:{port}"
        components = components[1:]
    base, *suffix = components[-1].split(_COLON)
    if any(_COLON in part for part in components[:-1]):
        raise BadReference(f"'__' stands before a port, a tag or a digest only: {spelt[:100]!r}", hint="write a plan")
    repository = "/".join([*components[:-1], base])
    own_tag, digest = "", ""
    if len(suffix) >= 2 and is_digest(f"{suffix[-2]}:{suffix[-1]}"):
        digest = f"{suffix[-2]}:{suffix[-1]}"
        suffix = suffix[:-2]
    if len(suffix) > 1:
        raise BadReference(f"not NAME__TAG or NAME__sha256__DIGEST: {spelt[:100]!r}")
    if suffix:
        own_tag = suffix[0]
    elif not digest:
        own_tag = tag
    place = host or default_registry
    text = (f"{place}/" if place else "") + repository + (f":{own_tag}" if own_tag else "") + (f"@{digest}" if digest else "")
    parse_reference(text)
    return text


def spell(references: Sequence[str]) -> str:
    """The repository name of a stack of groups, bottom first, with their hosts, tags and digests.

    Raises BadReference for what cannot be spelt, and where the whole is too long.
    """
    if not 0 < len(references) <= MAX_GROUPS:
        raise BadReference(f"{len(references)} groups; a name takes 1 to {MAX_GROUPS}", hint="write a plan")
    name = f"/{SEPARATORS[0]}/".join(_spelt(text) for text in references)
    name = f"{COMPOSE}/{name}"
    try:
        check_repository(name)
    except BadReference as error:
        raise BadReference(f"{len(name)} characters, more than the {MAX_NAME} of a name", hint="write a plan") from error
    return name


def _spelt(text: str) -> str:
    if text.startswith("oci:"):
        raise BadReference(f"a layout directory has no name here: {text[:100]!r}", hint="write a plan")
    reference = parse_reference(text)
    if _COLON in reference.repository or not set(reference.repository.split("/")).isdisjoint(SEPARATORS):
        raise BadReference(f"cannot be spelt in a name: {text[:100]!r}", hint="write a plan")
    parts = [reference.tag] if reference.tag else []
    if reference.digest:
        parts += reference.digest.split(":")
    spelt = f"{reference.host.replace(':', _COLON)}/" + _COLON.join([reference.repository, *parts])
    try:
        check_repository(spelt)
        meant = parse_reference(_group(spelt.split("/"), "", ""))
    except BadReference:
        meant = None
    if meant != reference:
        raise BadReference(f"cannot be spelt in a name: {text[:100]!r}", hint="name it by digest, or write a plan")
    return spelt
