"""Reading plans: YAML to :class:`~weenv.environment.model.Plan`, every fault with its line and column.

::

    apiVersion: weenv.dev/v1
    kind: EnvironmentPlan
    metadata: {name: task-17}
    groups:                         # bottom to top
      - registry.example/base/debian:12
      - registry.example/repo/sympy:1.13
      - registry.example/harness/agent:2
    mutations:
      - patch: |
          --- a/sympy/core/basic.py
          ...
        directory: /testbed
    config: {env: {TASK: "17"}, workdir: /testbed, cmd: [pytest, -q]}
    resources: {cpu: {start: 1, max: 8}, memory: {start: 512Mi, max: 8Gi}, pids: 4096}
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import yaml

from weenv.core.errors import BadReference
from weenv.core.regular import given, regular
from weenv.environment.model import API_VERSION, KIND, Amount, GroupUse, Mutation, Plan, PlanConfig, Resources
from weenv.environment.yamlnodes import MAX_BYTES, Document, PlanError
from weenv.registry.reference import parse_location

T = TypeVar("T")

MAX_GROUPS = 500
MAX_FILE = 16 << 20
"""A file of the plan's directory that the plan names (bytes)."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?\Z")
_VARIABLE = re.compile(r"[^=\0]+\Z")
_DIFF = re.compile(rb"^(?:diff --git |@@ -\d)", re.MULTILINE)
"""How what patch.py reads begins: a file of a git diff, which may have no hunk, or a hunk."""
_PLATFORM = re.compile(r"[a-z0-9]+/[a-z0-9]+(/[a-z0-9]+)?\Z")

_TOP = frozenset({"apiVersion", "kind", "metadata", "platform", "groups", "mutations", "config", "resources"})
_CHANGES = ("patch", "files", "delete", "chmod", "symlink", "run", "git")
_MUTATION = frozenset({*_CHANGES, "directory", "strip", "owner", "mode"})


def read_plan(path: str) -> bytes:
    """A plan file's text, one byte more than MAX_BYTES of it at most. Raises PlanError."""
    try:
        with open(path, "rb", opener=given) as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PlanError(f"cannot be read: {error.strerror}", where=path, hint="name the plan's file") from error


def as_text(data: bytes, source: str) -> str:
    """A plan's text where it is to be written again; YAML may be UTF-16, too. Raises PlanError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise PlanError("not UTF-8", where=source) from error


def load_plan(path: str) -> Plan:
    """Read a plan file. Raises PlanError, also where it cannot be read."""
    return parse_plan(read_plan(path), path)


def parse_plan(text: str | bytes, source: str = "plan", *, files: bool = True) -> Plan:
    """Read a plan. Relative file names in it are taken from the directory of ``source``.

    Raises PlanError for its first fault, with the others in ``also``.

    ``files=False``: no file is opened, one that is named is an error. For plans that come from elsewhere.
    """
    document = Document(text, source)
    return document.every(_Reader(document, source, files).plan)


class _Reader:
    def __init__(self, document: Document, source: str, files: bool = True) -> None:
        self.doc = document
        self.source = source
        self.files = files

    def plan(self) -> Plan:
        doc = self.doc
        top = doc.mapping(doc.root, "the plan", _TOP)
        for name, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
            if name not in top:
                doc.report(doc.error(doc.root, f"{name} is missing", f"write {name}: {expected}"))
            elif (found := self._field(top, name, doc.string, name, expected)) != expected:
                doc.report(doc.error(top[name], f"{name} is {found[:60]!r}", f"this version reads {expected}"))
        stem = re.sub(r"[^a-z0-9._-]+", "-", posixpath.basename(self.source).rsplit(".", 1)[0].lower()).strip("-._") or "plan"
        metadata = self._field(top, "metadata", self._metadata, "metadata", dict[str, str]())
        name = metadata.pop("name", stem[:63].strip("-._"))
        groups = self._field(top, "groups", self._groups, "groups", tuple[GroupUse, ...]())
        if "groups" not in top:
            doc.report(self._no_groups(doc.root))
        platform = self._field(top, "platform", doc.string, "platform", "")
        if platform and _PLATFORM.match(platform) is None:
            doc.report(doc.error(top["platform"], f"platform must be OS/ARCH, not {platform[:40]!r}"))
        return Plan(
            name,
            groups,
            self._field(top, "mutations", lambda node, name: doc.sequence(node, name, self._mutation), "mutations", ()),
            self._field(top, "config", self._config, "config", PlanConfig()),
            self._field(top, "resources", self._resources, "resources", Resources()),
            metadata,
            platform,
            self.source,
        )

    def _field(
        self, fields: dict[str, yaml.Node], key: str, read: Callable[[yaml.Node, str], T], name: str, default: T
    ) -> T:
        """What ``read`` makes of a field; ``default`` where there is none, or where it has a fault, which is noted."""
        return self.doc.attempt(partial(read, fields[key], name), default) if key in fields else default

    def _metadata(self, node: yaml.Node, name: str) -> dict[str, str]:
        doc = self.doc
        table = doc.table(node, name)
        if "name" in table and _NAME.match(table["name"]) is None:
            place = doc.mapping(node, name)["name"]
            hint = "lower-case letters, digits, '.', '_', '-'; at most 63"
            if isinstance(place, yaml.ScalarNode):  # else that is a fault already
                doc.report(doc.error(place, f"metadata.name {table['name'][:80]!r} is no name", hint))
        return table

    def _no_groups(self, node: yaml.Node) -> PlanError:
        return self.doc.error(node, "the plan has no groups", "name at least a base image under groups:")

    def _groups(self, node: yaml.Node, name: str) -> tuple[GroupUse, ...]:
        if isinstance(node, yaml.SequenceNode) and not node.value:
            raise self._no_groups(node)
        if isinstance(node, yaml.SequenceNode) and len(node.value) > MAX_GROUPS:
            raise self.doc.error(node, f"{len(node.value)} groups, more than {MAX_GROUPS}")
        return self.doc.sequence(node, name, self._group)

    def _group(self, node: yaml.Node, name: str) -> GroupUse:
        doc = self.doc
        if isinstance(node, yaml.MappingNode):
            fields = doc.mapping(node, name, frozenset({"ref"}))
            if "ref" not in fields:
                raise doc.error(node, f"{name} has no ref")
            node = fields["ref"]
        text = doc.string(node, name)
        try:
            parse_location(text)
        except BadReference as error:
            raise doc.error(node, f"{name}: {error.message}", error.hint) from error
        return GroupUse(text, doc.line(node))

    def _mutation(self, node: yaml.Node, name: str) -> Mutation:
        doc = self.doc
        fields = doc.mapping(node, name, _MUTATION)
        kinds = [kind for kind in _CHANGES if kind in fields]
        if len(kinds) != 1:
            doc.report(doc.error(node, f"{name} must have exactly one of {', '.join(_CHANGES)}"))
        made = dict[str, object]()
        for kind in kinds:
            made |= self._field(fields, kind, partial(self._change, kind), f"{name}.{kind}", dict[str, object]())
        made["directory"] = self._field(
            fields, "directory", lambda place, name: self._path(place, doc.string(place, name), name), "directory", "/"
        )
        made["strip"] = self._field(fields, "strip", partial(doc.integer, low=0, high=64), f"{name}.strip", 1)
        made["owner"] = self._field(fields, "owner", self._owner, f"{name}.owner", None)
        made["mode"] = self._field(fields, "mode", doc.mode, f"{name}.mode", None)
        return Mutation(**made, line=doc.line(node))  # type: ignore[arg-type]

    def _change(self, kind: str, value: yaml.Node, name: str) -> dict[str, object]:
        """The one field of a Mutation that a change of this kind sets."""
        doc = self.doc
        if kind == "patch":
            return {"patch": self._patch(value, name).decode("utf-8", "surrogateescape")}
        if kind == "files":
            return {"files": self._paths(value, name, self._text)}
        if kind == "delete":
            return {"delete": doc.sequence(value, name, lambda item, _: self._path(value, doc.string(item, name), name))}
        if kind == "chmod":
            return {"chmod": self._paths(value, name, doc.mode)}
        if kind == "symlink":
            return {"symlink": self._paths(value, name, doc.string)}
        if kind == "run":
            command = (doc.string(value, name),) if isinstance(value, yaml.ScalarNode) else doc.strings(value, name)
            if not command or not command[0]:
                raise doc.error(value, f"{name} is empty")
            return {"run": ("/bin/sh", "-c", *command) if isinstance(value, yaml.ScalarNode) else command}
        git = doc.mapping(value, name, frozenset({"commit"}))
        commit = doc.string(git["commit"], f"{name}.commit") if "commit" in git else ""
        if re.fullmatch(r"[0-9a-f]{7,64}", commit) is None:
            raise doc.error(value, f"{name}.commit must be a commit's hex name, not {commit[:70]!r}")
        return {"git_commit": commit}

    def _patch(self, node: yaml.Node, name: str) -> bytes:
        """A text that holds a diff, or the file's."""
        text = self._text(node, name)
        if _DIFF.search(text) is None:
            hint = "unified ('diff -u') and git diffs are understood"
            if isinstance(node, yaml.ScalarNode) and text.strip() and b"\n" not in text.strip():
                shown = text.strip()[:200].decode("utf-8", "replace")
                hint = f"a file is named so: patch: {{file: {shown}}}"
            raise self.doc.error(node, f"{name} holds no diff", hint)
        return text

    def _paths(self, node: yaml.Node, name: str, read: Callable[[yaml.Node, str], T]) -> dict[str, T]:
        """A mapping of paths, each value read by ``read``."""
        found: dict[str, T] = {}
        for key, value in self.doc.mapping(node, name).items():
            path = self.doc.attempt(partial(self._path, node, key, name), None)
            item = self.doc.attempt(partial(read, value, f"{name}[{key}]"), None)
            if path is not None and item is not None:
                found[path] = item
        return found

    def _text(self, node: yaml.Node, name: str) -> bytes:
        """A string, or ``{file: PATH}`` below the plan's own directory."""
        doc = self.doc
        if not isinstance(node, yaml.MappingNode):
            return doc.string(node, name).encode("utf-8", "surrogateescape")
        fields = doc.mapping(node, name, frozenset({"file"}))
        if "file" not in fields:
            raise doc.error(node, f"{name} has no file")
        if not self.files:
            raise doc.error(node, f"{name} names a file of another machine", "publish the plan with: weenv plan push")
        wanted = doc.string(fields["file"], f"{name}.file")
        base = os.path.realpath(os.path.dirname(self.source) or ".")
        path = os.path.realpath(os.path.join(base, wanted))
        if os.path.commonpath((base, path)) != base:
            raise doc.error(node, f"{name}.file lies outside the plan's directory: {wanted[:200]!r}")
        try:
            with open(path, "rb", opener=regular) as file:
                data = file.read(MAX_FILE + 1)
        except OSError as error:
            raise doc.error(node, f"{name}.file cannot be read: {wanted[:200]}: {error.strerror}") from error
        if len(data) > MAX_FILE:
            raise doc.error(node, f"{name}.file is larger than {MAX_FILE >> 20} MiB", "publish it as a group")
        return data

    def _path(self, node: yaml.Node, path: str, name: str) -> str:
        """An absolute path without ``..``, normalised."""
        if not path.startswith("/") or ".." in path.split("/") or len(path) > 4096 or "\0" in path:
            raise self.doc.error(node, f"{name}: not an absolute path without '..': {path[:200]!r}")
        return posixpath.normpath("/" + path.lstrip("/"))

    def _owner(self, node: yaml.Node, name: str) -> tuple[int, int]:
        text = self.doc.string(node, name)
        match = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", text)
        if match is None or max(int(match[1]), int(match[2])) >= 2**32 - 1:
            raise self.doc.error(node, f"{name} must be UID:GID, not {text[:40]!r}")
        return int(match[1]), int(match[2])

    def _config(self, node: yaml.Node, name: str) -> PlanConfig:
        doc = self.doc
        fields = doc.mapping(node, name, frozenset({"env", "workdir", "user", "entrypoint", "cmd", "labels"}))
        env = self._field(fields, "env", doc.table, "config.env", dict[str, str]())
        for key in env:
            if _VARIABLE.match(key) is None:
                doc.report(doc.error(fields["env"], f"config.env: not a variable's name: {key[:60]!r}"))
        workdir = self._field(fields, "workdir", doc.string, "config.workdir", "")
        if workdir and not workdir.startswith("/"):
            doc.report(doc.error(fields["workdir"], f"config.workdir must be absolute, not {workdir[:200]!r}"))
        user = self._field(fields, "user", doc.string, "config.user", "")
        if re.fullmatch(r"[A-Za-z0-9_.-]*(:[A-Za-z0-9_.-]+)?", user) is None:
            doc.report(doc.error(fields["user"], f"config.user must be USER[:GROUP], not {user[:60]!r}"))
        return PlanConfig(
            env,
            workdir,
            user,
            self._field(fields, "entrypoint", doc.strings, "config.entrypoint", None),
            self._field(fields, "cmd", doc.strings, "config.cmd", None),
            self._field(fields, "labels", doc.table, "config.labels", {}),
        )

    def _resources(self, node: yaml.Node, name: str) -> Resources:
        doc = self.doc
        fields = doc.mapping(node, name, frozenset({"cpu", "memory", "pids"}))
        return Resources(
            self._field(fields, "cpu", partial(self._amount, doc.cores), "resources.cpu", Amount()),
            self._field(fields, "memory", partial(self._amount, doc.size), "resources.memory", Amount()),
            self._field(fields, "pids", partial(doc.integer, low=1, high=1 << 22), "resources.pids", 0),
        )

    def _amount(self, read: Callable[[yaml.Node, str], float], node: yaml.Node, name: str) -> Amount:
        """One amount, or ``{start: ..., max: ...}``."""
        if not isinstance(node, yaml.MappingNode):
            amount = read(node, name)
            return Amount(amount, amount)
        parts = self.doc.mapping(node, name, frozenset({"start", "max"}))
        start = self._field(parts, "start", read, f"{name}.start", 0.0)
        ceiling = self._field(parts, "max", read, f"{name}.max", 0.0)
        if ceiling and start > ceiling:
            raise self.doc.error(node, f"{name}.start is above its max")
        return Amount(start, ceiling)


__all__ = ["PlanError", "as_text", "load_plan", "parse_plan", "read_plan"]
