"""One image config out of the groups' configs and the plan's. Pure; image-spec config.md names the fields.

Going up the stack: variables of ``Env`` override, those that are search paths are joined (the upper group's directories
first); ``WorkingDir``, ``StopSignal`` and ``Shell`` are the topmost that is set; an ``Entrypoint`` also drops the ``Cmd``
below it, as a build does; ``Labels``, ``ExposedPorts`` and ``Volumes`` are united. ``User`` must not be set to different
values by two groups unless the plan says which. The plan comes last; its ``resources`` become labels, which runtimes hand on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from weenv.core.errors import FormatError
from weenv.environment.model import Plan, Resources
from weenv.plugin.nri import labels
from weenv.registry.groupref.model import ResolvedGroup

SEARCH_PATHS = frozenset(
    {
        "PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "PKG_CONFIG_PATH",
        "PYTHONPATH", "NODE_PATH", "PERL5LIB", "RUBYLIB", "GOPATH", "CLASSPATH", "MANPATH", "INFOPATH", "XDG_DATA_DIRS",
        "CMAKE_PREFIX_PATH",
    }
)  # fmt: skip
"""Variables that list directories with colons between them."""

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""What runtimes give a container whose image sets no PATH: so the lowest group has it where it sets none."""

EPOCH = "1970-01-01T00:00:00Z"
_ROOT_USERS = frozenset({"", "0", "root", "0:0", "root:root", "0:root", "root:0"})


class ConflictError(FormatError):
    """Two groups say what cannot both hold."""


def join_paths(upper: str, lower: str) -> str:
    """Both lists of directories, the upper's first, each directory once; ``$NAME`` style text is left alone."""
    seen: dict[str, None] = {}
    for part in (*upper.split(":"), *lower.split(":")):
        if part:
            seen.setdefault(part)
    return ":".join(seen)


def _overlay_env(env: dict[str, str], name: str, value: str) -> None:
    below = env.get(name, "")
    env[name] = join_paths(value, below) if name in SEARCH_PATHS and below else value


def _env(config: dict[str, Any], where: str) -> list[tuple[str, str]]:
    found = config.get("Env") or []
    if not isinstance(found, list) or not all(isinstance(item, str) and "=" in item for item in found):
        raise FormatError("Env is not a list of NAME=VALUE", member=where)
    return [(name, value) for name, _, value in (item.partition("=") for item in found)]


def _words(config: dict[str, Any], name: str, where: str) -> list[str] | None:
    found = config.get(name)
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise FormatError(f"{name} is not a list of strings", member=where)
    return list(found)


def _text(config: dict[str, Any], name: str, where: str) -> str:
    found = config.get(name) or ""
    if not isinstance(found, str):
        raise FormatError(f"{name} is not a string", member=where)
    return found


def _table(config: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    found = config.get(name) or {}
    if not isinstance(found, dict):
        raise FormatError(f"{name} is not an object", member=where)
    return found


def resource_labels(given: Resources) -> dict[str, str]:
    """A plan's resources as labels: CRI and others give them to containers, where elastic provisioning finds them."""
    amounts = {
        labels.CPU_START: given.cpu.start, labels.CPU_MAX: given.cpu.ceiling,
        labels.MEMORY_START: given.memory.start, labels.MEMORY_MAX: given.memory.ceiling,
    }  # fmt: skip
    return {name: f"{value:.6f}".rstrip("0").rstrip(".") for name, value in amounts.items() if value}


def merge_configs(plan: Plan, groups: Sequence[ResolvedGroup]) -> dict[str, Any]:
    """The ``config`` object of the composed image. Raises ConflictError, FormatError naming the group."""
    env: dict[str, str] = {}
    tables: dict[str, dict[str, Any]] = {"Labels": {}, "ExposedPorts": {}, "Volumes": {}}
    single = {"WorkingDir": "", "StopSignal": ""}
    shell: list[str] | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    user, said_by = "", ""
    for number, group in enumerate(groups):
        where = group.reference
        config = _table(group.config, "config", where)
        for name, value in _env(config, where):
            _overlay_env(env, name, value)
        if not number and "PATH" not in env:  # what it has where it runs alone is what others add to
            env = {"PATH": DEFAULT_PATH, **env}
        for field, table in tables.items():
            table.update(_table(config, field, where))
        for field in single:
            single[field] = _text(config, field, where) or single[field]
        shell = _words(config, "Shell", where) or shell
        above = _words(config, "Entrypoint", where)
        if above:
            entrypoint, cmd = above, None
        cmd = _words(config, "Cmd", where) or cmd
        wanted = _text(config, "User", where)
        if wanted in _ROOT_USERS:
            continue
        if user and wanted != user and not plan.config.user:
            raise ConflictError(
                f"runs as user {user!r}, but {where} as {wanted!r}", member=said_by, hint="set config.user in the plan"
            )
        user, said_by = wanted, where
    own = plan.config
    for name, value in own.env.items():
        _overlay_env(env, name, value)
    if own.entrypoint is not None:
        entrypoint, cmd = list(own.entrypoint) or None, None
    if own.cmd is not None:
        cmd = list(own.cmd) or None
    merged: dict[str, Any] = {"Env": [f"{name}={value}" for name, value in env.items()]}
    tables["Labels"].update(resource_labels(plan.resources) | own.labels)
    merged |= {field: dict(sorted(table.items())) for field, table in tables.items() if table}
    single["WorkingDir"] = own.workdir or single["WorkingDir"]
    merged |= {field: value for field, value in single.items() if value}
    for field, words in (("Entrypoint", entrypoint), ("Cmd", cmd), ("Shell", shell)):
        if words:
            merged[field] = words
    if own.user or user:
        merged["User"] = own.user or user
    return merged


def platform_of(plan: Plan, groups: Sequence[ResolvedGroup], default: str) -> tuple[str, str, str]:
    """(os, architecture, variant) that all groups are for. Raises ConflictError where they differ."""
    wanted = plan.platform or default
    system, _, architecture = wanted.partition("/")
    architecture, _, variant = architecture.partition("/")
    for group in groups:
        config = group.config
        have = (config.get("os", ""), config.get("architecture", ""))
        if (have[0] and have[0] != system) or (have[1] and have[1] != architecture):
            raise ConflictError(
                f"is for {have[0]}/{have[1]}, the environment for {system}/{architecture}",
                member=group.reference,
                hint="name a group for this platform, or set platform in the plan",
            )
    return system, architecture, variant


def encode(value: dict[str, Any]) -> bytes:
    """JSON that is the same bytes wherever it is made."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
