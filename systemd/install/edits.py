"""Changes to configuration that belongs to somebody else: only what is asked for changes, and it can be taken back.

A change is carried out on a tree of tables, which is a parsed TOML document with its comments and spelling (tomlkit) or plain
dictionaries (JSON). What comes out is parsed again by another parser (tomllib), and is nothing if it does not mean exactly what
was meant to come out. What undoes a change is plain data, for a file::

    {"path": ["imports"], "append": "/etc/containerd/conf.d/weenv.toml", "made": 1}
    {"path": ["storage-driver"], "put": "weenv", "old": "overlay2", "made": 0}

``made`` counts what had to be made on the way: tables, and the list; ``old`` is not there where nothing was.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from weenv.core.errors import ConfigError
from weenv.core.extras import remedy

Table = MutableMapping[str, Any]
Undo = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Put:
    """The setting at ``path`` is to be ``value``."""

    path: tuple[str, ...]
    value: Any


@dataclass(frozen=True, slots=True)
class Append:
    """The list at ``path`` is to hold ``item``."""

    path: tuple[str, ...]
    item: Any


Change = Put | Append


def at(tree: Any, path: Sequence[str]) -> Any:
    """What is at ``path``; None where nothing is."""
    for name in path:
        if not isinstance(tree, MutableMapping) or name not in tree:
            return None
        tree = tree[name]
    return tree


def perform(tree: Table, changes: Sequence[Change]) -> list[Undo]:
    """Carry out what is not so already; what undoes it. Raises ConfigError where something else than a table is in the way."""
    undo: list[Undo] = []
    for change in changes:
        node, made = tree, 0
        for name in change.path[:-1]:
            if name not in node:
                node[name] = {}
                made += 1
            node = node[name]
            if not isinstance(node, MutableMapping):
                raise ConfigError(f"{'.'.join(change.path[:-1])} is no table")
        name = change.path[-1]
        done: Undo = {"path": list(change.path)}
        if isinstance(change, Put):
            if name in node:
                if _plain(node[name]) == change.value:
                    continue
                done["old"] = _plain(node[name])
            done["put"] = node[name] = change.value
        else:
            if name not in node:
                node[name] = [copy.deepcopy(change.item)]
                made += 1
            elif not isinstance(node[name], list):
                raise ConfigError(f"{'.'.join(change.path)} is no list")
            elif change.item in _plain(node[name]):
                continue
            else:
                node[name].append(copy.deepcopy(change.item))
            done["append"] = change.item
        undo.append({**done, "made": made})
    return undo


def revert(tree: Table, undo: Sequence[Undo]) -> None:
    """Take back what is still as it was left; what somebody has changed since stays."""
    for done in reversed(undo):
        path = done["path"]
        node = at(tree, path[:-1])
        if not isinstance(node, MutableMapping) or path[-1] not in node:
            continue
        made = done["made"]
        here = _plain(node[path[-1]])
        if "append" in done:
            if not isinstance(here, list) or done["append"] not in here:
                continue
            if made and len(here) == 1:
                del node[path[-1]]
                made -= 1
            else:
                del node[path[-1]][here.index(done["append"])]
                made = 0
        elif here != done["put"]:
            continue
        elif "old" in done:
            node[path[-1]] = done["old"]
        else:
            del node[path[-1]]
        for depth in range(len(path) - 1, 0, -1):
            if made and not at(tree, path[:depth]):
                del at(tree, path[: depth - 1])[path[depth - 1]]
                made -= 1


def _plain(value: Any) -> Any:
    """Without tomlkit's types."""
    return value.unwrap() if hasattr(value, "unwrap") else value


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """``where`` is what the file is called in messages. Raises ConfigError."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not UTF-8, or a number too long, too
        raise ConfigError(f"{where} is not valid TOML: {error}", hint="mend it first") from error


def edit_toml(text: str, changes: Sequence[Change], where: str) -> tuple[str, list[Undo]]:
    """The text with the changes made, and what undoes them. Raises ConfigError."""
    meant = parse_toml(text, where)
    undo = perform(meant, changes)
    if not undo:
        return text, []
    return _through_tomlkit(text, lambda tree: perform(tree, changes), meant, where), undo


def revert_toml(text: str, undo: Sequence[Undo], where: str) -> str:
    """The text without the changes. Raises ConfigError."""
    meant = parse_toml(text, where)
    revert(meant, undo)
    return _through_tomlkit(text, lambda tree: revert(tree, undo), meant, where)


def _through_tomlkit(text: str, work: Any, meant: dict[str, Any], where: str) -> str:
    try:
        import tomlkit
    except ImportError as error:
        raise ConfigError(f"changing {where} needs tomlkit", hint=remedy("tomlkit")) from error
    try:
        document = tomlkit.parse(text)
        work(document)
        result = tomlkit.dumps(document)
        right = tomllib.loads(result) == meant
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, tomlkit.exceptions.TOMLKitError):
        right = False
    if not right:
        hint = "change it by hand; see docs/install.md"
        raise ConfigError(f"{where} is written in a way that cannot be changed safely", hint=hint)
    return result


def parse_json(text: str, where: str) -> dict[str, Any]:
    """A JSON object; an empty file is an empty one. Raises ConfigError."""
    try:
        tree = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {error}", hint="mend it first") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{where} is no JSON object")
    return tree


def edit_json(text: str, changes: Sequence[Change], where: str) -> tuple[str, list[Undo]]:
    """The text with the changes made, in its order and indentation, and what undoes them. Raises ConfigError."""
    tree = parse_json(text, where)
    undo = perform(tree, changes)
    return (_dump(tree, text) if undo else text), undo


def revert_json(text: str, undo: Sequence[Undo], where: str) -> str:
    """The text without the changes. Raises ConfigError."""
    tree = parse_json(text, where)
    revert(tree, undo)
    return _dump(tree, text)


def _dump(tree: dict[str, Any], like: str) -> str:
    indent = re.search(r"\n([ \t]+)\S", like)
    return json.dumps(tree, indent=indent[1] if indent else 2, ensure_ascii=False) + "\n"
