"""containerd's configuration: a drop-in of our own, and as little as can be in the files of others.

How containerd reads it (cmd/containerd/server/config/config.go, and tried with 1.7.24 and 2.1.9 by ``config dump``): the main
file, then what its ``imports`` name, in order. Of a proxy plugin the last file's table is all there is. In 1.7 it is so with
the table of a plugin (``plugins."io.containerd..."``), too; from 2.0 on those are merged, but lists in them replaced (pull
request 9982 of containerd). A drop-in may therefore not touch a plugin that another file configures; that file has to be
edited. No file should have a higher ``version`` than the main one: 2.3 does not start then, older ones do not migrate the main
file. 1.7 knows no version 3.
"""

from __future__ import annotations

import fnmatch
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from weenv.core.errors import ConfigError
from weenv.systemd.install.edits import Append, Change, Put, at, parse_toml

MAIN = "/etc/containerd/config.toml"
DROP_IN = "conf.d/weenv.toml"
"""Beside the main file."""
TRANSFER = "io.containerd.transfer.v1.local"
_CRI_IMAGES = "io.containerd.cri.v1.images"
_CRI = "io.containerd.grpc.v1.cri"
_NEWEST_OF_1 = 2
"""The newest ``version`` that 1.7 reads."""
_MOST = 100
"""Configuration files looked at."""
_MOST_TEXT = 1 << 20
"""Characters of configuration in all."""
_MOST_IMPORTS = 1000


@dataclass(frozen=True, slots=True)
class Wanted:
    """What containerd is to know. ``line``: 1 or 2, its major version; ``remap``: user namespaces get id-mapped mounts."""

    socket: str
    root: str
    line: int
    cri: bool = False
    remap: bool = True
    name: str = "weenv"


@dataclass(slots=True)
class Configuration:
    """``drop_in`` and its text; ``main`` is its text where there is no main file yet; ``edits`` of the files of others."""

    path: str
    text: str
    main: str | None = None
    edits: dict[str, list[Change]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reader:
    """The system's files: ``read`` gives the text or None, ``matches`` what a pattern names."""

    read: Callable[[str], str | None]
    matches: Callable[[str], list[str]]


def configure(reader: Reader, main: str, wanted: Wanted) -> Configuration:
    """What has to be there, whatever of it is there already. Raises ConfigError."""
    drop_in = os.path.join(os.path.dirname(main), DROP_IN)
    text = reader.read(main)
    if text is None:
        version = 2 if wanted.line == 1 else 3
        made = f'version = {version}\nimports = ["{drop_in}"]\n'
        transfer = _unpack(wanted, with_default=True)
        found = Configuration(drop_in, _drop_in(wanted, version, transfer), made)
        if wanted.cri:
            found.edits[main] = _cri(wanted, version)
        return found
    files = chain(reader, main, drop_in)
    version = files[main].get("version", 1)
    if type(version) is not int or version < 1:
        raise ConfigError(f"{main}: version {version!r} is no version of a configuration", hint="mend it first")
    for path, tree in files.items():
        if wanted.line == 1 and type(number := tree.get("version")) is int and number > _NEWEST_OF_1:
            hint = "have it in version 2, as containerd config default of 1.7 writes it; or name another --containerd-version"
            raise ConfigError(f"{path}: containerd 1.7 cannot read version {number}", hint=hint)
    edits: dict[str, list[Change]] = {}
    if not any(_covers(pattern, drop_in) for pattern in files[main].get("imports", ())):
        edits[main] = [Append(("imports",), drop_in)]
    transfer = []
    if version > 1:  # version 1 has short names; who still has it runs 1.7, which pulls through CRI or docker
        owner = _owner(files, TRANSFER)
        listed = at(files[owner], ("plugins", TRANSFER, "unpack_config")) if owner else None
        if not isinstance(listed, list | None):
            raise ConfigError(f"{owner}: unpack_config is no list", hint="mend it first")
        transfer = _unpack(wanted, with_default=not listed)
        if owner:
            if not any(isinstance(one, dict) and one.get("snapshotter") == wanted.name for one in listed or ()):
                edits.setdefault(owner, []).extend(Append(("plugins", TRANSFER, "unpack_config"), one) for one in transfer)
            transfer = []
    if wanted.cri:
        for path, tree in files.items():
            disabled = tree.get("disabled_plugins", [])
            if not isinstance(disabled, list):
                raise ConfigError(f"{path}: disabled_plugins is no list", hint="mend it first")
            if {"cri", _CRI} & set(map(str, disabled)):
                raise ConfigError(f"CRI is disabled in {path}", hint="take it out of disabled_plugins, or leave --cri out")
        for change in _cri(wanted, version):
            edits.setdefault(_owner(files, change.path[1]) or main, []).append(change)
    return Configuration(drop_in, _drop_in(wanted, version, transfer), edits=edits)


def _covers(pattern: str, path: str) -> bool:
    """Whether an import, an absolute one, brings in ``path``: 1.7 looks for relative patterns in its working directory."""
    folder, name = os.path.split(path)
    where, what = os.path.split(pattern)
    return where == folder and fnmatch.fnmatchcase(name, what)


def _imports(tree: dict[str, Any], path: str) -> list[str]:
    """Patterns, absolute."""
    listed = tree.get("imports", [])
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise ConfigError(f"{path}: imports is no list of files", hint="mend it first")
    return [os.path.normpath(os.path.join(os.path.dirname(path), one)) for one in listed]


def chain(reader: Reader, main: str, drop_in: str = "") -> dict[str, dict[str, Any]]:
    """The files that containerd reads, in its order, parsed; ``drop_in`` left out. Raises ConfigError, OSError.

    What is more than anybody has is refused: with part of it, what containerd makes of all would only be guessed.
    """
    files: dict[str, dict[str, Any]] = {}
    pending, room, imports = deque([main]), _MOST_TEXT, _MOST_IMPORTS
    while pending:
        path = pending.popleft()
        if path in files or path == drop_in:
            continue
        text = reader.read(path)
        if text is None:
            hint = "mend it first; containerd does not start like this"
            raise ConfigError(f"{main} imports {path}, which is not there", hint=hint)
        room -= len(text)
        if room < 0 or len(files) == _MOST:
            raise ConfigError(f"{main} imports too much: more than {_MOST} files, or 1 MiB", hint="import less there")
        files[path] = parse_toml(text, path)
        patterns = _imports(files[path], path)
        imports -= len(patterns)
        if imports < 0:
            raise ConfigError(f"{main}: more than {_MOST_IMPORTS} imports", hint="import less there")
        for pattern in patterns:
            pending += reader.matches(pattern) if "*" in pattern else [pattern]
    return files


def effective(files: dict[str, dict[str, Any]], *, tables: bool = False) -> dict[str, Any]:
    """What containerd makes of a :func:`chain`: the version, the proxy plugins and the plugins' tables. Raises ConfigError.

    ``tables``: those of one plugin in several files are merged, as from 2.0 on; before, the last one is all there is.
    """
    found: dict[str, Any] = {"proxy_plugins": {}, "plugins": {}}
    for path, tree in files.items():
        if "version" in tree:
            found.setdefault("version", tree["version"])
        for section in ("proxy_plugins", "plugins"):
            table = tree.get(section, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{path}: {section} is no table", hint="mend it first")
            if tables and section == "plugins":
                _merge(found[section], table)
            else:
                found[section].update(table)
    return found


def newer(files: dict[str, dict[str, Any]]) -> str:
    """The first file of a :func:`chain` that has a higher version than the main one; empty where none has."""
    versions = {path: number for path, tree in files.items() if type(number := tree.get("version", 1)) is int}
    main = next(iter(files))
    return next((path for path, number in versions.items() if number > versions.get(main, number)), "")


def _merge(into: dict[str, Any], table: dict[str, Any]) -> None:
    """Tables are merged, anything else in them replaced. No recursion: how deep they are is for others to say."""
    pending = [(into, table)]
    while pending:
        to, new = pending.pop()
        for name, value in new.items():
            if isinstance(value, dict) and isinstance(to.get(name), dict):
                pending.append((to[name], value))
            else:
                to[name] = value


def _owner(files: dict[str, dict[str, Any]], plugin: str) -> str:
    """The last file with a table of the plugin's; empty where there is none."""
    return next((path for path in reversed(files) if at(files[path], ("plugins", plugin)) is not None), "")


def _unpack(wanted: Wanted, *, with_default: bool) -> list[dict[str, str]]:
    """Entries of ``unpack_config``; a list replaces the default, which is overlayfs. "linux" is the node's architecture."""
    names = ["overlayfs", wanted.name] if with_default else [wanted.name]
    return [{"platform": "linux", "snapshotter": name, "differ": "walking"} for name in names]


def _cri(wanted: Wanted, version: int) -> list[Change]:
    """Settings of CRI. 1.7 passes annotations to snapshotters only where it is told to, newer ones by the transfer service.

    2.x takes over an old table only where it lists runtimes, and then rather than its own, so both say it.
    """
    changes: list[Change] = []
    if version < 3:
        table = ("plugins", _CRI if version == 2 else "cri", "containerd")
        changes.append(Put((*table, "snapshotter"), wanted.name))
        if wanted.line == 1:
            changes.append(Put((*table, "disable_snapshot_annotations"), False))
    if wanted.line > 1:
        changes.append(Put(("plugins", _CRI_IMAGES, "snapshotter"), wanted.name))
    return changes


def _drop_in(wanted: Wanted, version: int, transfer: list[dict[str, str]]) -> str:
    lines = ['# Written by "weenv install"; "weenv uninstall" takes it away.']
    if version > 1:
        lines.append(f"version = {version}")
    lines += [
        "",
        f"[proxy_plugins.{wanted.name}]",
        'type = "snapshot"',
        f'address = "{wanted.socket}"',
        *(['capabilities = ["remap-ids"]  # never "rebase"'] if wanted.remap else []),
        "",
        f"[proxy_plugins.{wanted.name}.exports]",
        f'root = "{wanted.root}"',
        'enable_remote_snapshot_annotations = "true"  # a string',
    ]
    if transfer:
        lines += ["", "# ctr and nerdctl pull through this service; its list replaces the default, overlayfs."]
    for entry in transfer:
        lines += ["", f"[[plugins.'{TRANSFER}'.unpack_config]]", *(f'{name} = "{value}"' for name, value in entry.items())]
    return "\n".join(lines) + "\n"
