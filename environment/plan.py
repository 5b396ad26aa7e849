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
    config: {env: {TASK: "17"}, workdir: /testbed, cmd: [bash]}
    resources: {cpu: {start: 1, max: 8}, memory: {start: 512Mi, max: 8Gi}, pids: 4096}
"""

from __future__ import annotations

import os
import posixpath
import re

import yaml

from weenv.core.errors import BadReference
from weenv.core.regular import regular
from weenv.environment.model import API_VERSION, KIND, Amount, GroupUse, Mutation, Plan, PlanConfig, Resources
from weenv.environment.yamlnodes import Document, PlanError
from weenv.registry.reference import parse_location

MAX_GROUPS = 500
MAX_FILE = 16 << 20
"""A file of the plan's directory that the plan names (bytes)."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?\Z")
_VARIABLE = re.compile(r"[^=\0]+\Z")
_PLATFORM = re.compile(r"[a-z0-9]+/[a-z0-9]+(/[a-z0-9]+)?\Z")

_TOP = frozenset({"apiVersion", "kind", "metadata", "platform", "groups", "mutations", "config", "resources"})
_CHANGES = ("patch", "files", "delete", "chmod", "symlink", "run", "git")
_MUTATION = frozenset({*_CHANGES, "directory", "strip", "owner", "mode"})


def load_plan(path: str) -> Plan:
    """Read a plan file. Raises PlanError, BadReference, OSError."""
    with open(path, "rb") as file:
        return parse_plan(file.read((64 << 20) + 1), path)


def parse_plan(text: str | bytes, source: str = "plan", *, files: bool = True) -> Plan:
    """Read a plan. Relative file names in it are taken from the directory of ``source``. Raises PlanError.

    ``files=False``: no file is opened, one that is named is an error. For plans that come from elsewhere.
    """
    return _Reader(Document(text, source), source, files).plan()


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
                raise doc.error(doc.root, f"{name} is missing", f"write {name}: {expected}")
            if (found := doc.string(top[name], name)) != expected:
                raise doc.error(top[name], f"{name} is {found[:60]!r}", f"this version reads {expected}")
        name, metadata = self._metadata(top.get("metadata"))
        groups = doc.sequence(top["groups"], "groups", self._group) if "groups" in top else ()
        if not groups:
            raise doc.error(top.get("groups", doc.root), "the plan has no groups", "name at least a base image under groups:")
        if len(groups) > MAX_GROUPS:
            raise doc.error(top["groups"], f"{len(groups)} groups, more than {MAX_GROUPS}")
        platform = doc.string(top["platform"], "platform") if "platform" in top else ""
        if platform and _PLATFORM.match(platform) is None:
            raise doc.error(top["platform"], f"platform must be OS/ARCH, not {platform[:40]!r}")
        return Plan(
            name,
            groups,
            doc.sequence(top["mutations"], "mutations", self._mutation) if "mutations" in top else (),
            self._config(top["config"]) if "config" in top else PlanConfig(),
            self._resources(top["resources"]) if "resources" in top else Resources(),
            metadata,
            platform,
            self.source,
        )

    def _metadata(self, node: yaml.Node | None) -> tuple[str, dict[str, str]]:
        doc = self.doc
        stem = re.sub(r"[^a-z0-9._-]+", "-", posixpath.basename(self.source).rsplit(".", 1)[0].lower()).strip("-._") or "plan"
        if node is None:
            return stem[:63].strip("-._"), {}
        fields = doc.mapping(node, "metadata")
        table = {key: doc.string(value, f"metadata.{key}") for key, value in fields.items() if key != "name"}
        if "name" not in fields:
            return stem[:63].strip("-._"), table
        name = doc.string(fields["name"], "metadata.name")
        if _NAME.match(name) is None:
            raise doc.error(
                fields["name"],
                f"metadata.name {name[:80]!r} is no name",
                "lower-case letters, digits, '.', '_', '-'; at most 63",
            )
        return name, table

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
            raise doc.error(node, f"{name} must have exactly one of {', '.join(_CHANGES)}")
        kind = kinds[0]
        value = fields[kind]
        made = dict[str, object]()
        if kind == "patch":
            made["patch"] = self._text(value, f"{name}.patch").decode("utf-8", "surrogateescape")
        elif kind == "files":
            made["files"] = {
                self._path(value, path, f"{name}.files"): self._text(item, f"{name}.files[{path}]")
                for path, item in doc.mapping(value, f"{name}.files").items()
            }
        elif kind == "delete":
            made["delete"] = tuple(self._path(value, path, f"{name}.delete") for path in doc.strings(value, f"{name}.delete"))
        elif kind == "chmod":
            table = doc.mapping(value, f"{name}.chmod")
            made["chmod"] = {self._path(value, p, f"{name}.chmod"): doc.mode(m, f"{name}.chmod[{p}]") for p, m in table.items()}
        elif kind == "symlink":
            made["symlink"] = {
                self._path(value, p, f"{name}.symlink"): target for p, target in doc.table(value, f"{name}.symlink").items()
            }
        elif kind == "run":
            command = (doc.string(value, name),) if isinstance(value, yaml.ScalarNode) else doc.strings(value, f"{name}.run")
            made["run"] = ("/bin/sh", "-c", *command) if isinstance(value, yaml.ScalarNode) else command
            if not command or not command[0]:
                raise doc.error(value, f"{name}.run is empty")
        else:
            git = doc.mapping(value, f"{name}.git", frozenset({"commit"}))
            commit = doc.string(git["commit"], f"{name}.git.commit") if "commit" in git else ""
            if re.fullmatch(r"[0-9a-f]{7,64}", commit) is None:
                raise doc.error(value, f"{name}.git.commit must be a commit's hex name, not {commit[:70]!r}")
            made["git_commit"] = commit
        if "directory" in fields:
            made["directory"] = self._path(fields["directory"], doc.string(fields["directory"], "directory"), "directory")
        if "strip" in fields:
            made["strip"] = doc.integer(fields["strip"], f"{name}.strip", 0, 64)
        if "owner" in fields:
            made["owner"] = self._owner(fields["owner"], f"{name}.owner")
        if "mode" in fields:
            made["mode"] = doc.mode(fields["mode"], f"{name}.mode")
        return Mutation(**made, line=doc.line(node))  # type: ignore[arg-type]

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

    def _config(self, node: yaml.Node) -> PlanConfig:
        doc = self.doc
        fields = doc.mapping(node, "config", frozenset({"env", "workdir", "user", "entrypoint", "cmd", "labels"}))
        env = doc.table(fields["env"], "config.env") if "env" in fields else {}
        for key in env:
            if _VARIABLE.match(key) is None:
                raise doc.error(fields["env"], f"config.env: not a variable's name: {key[:60]!r}")
        workdir = doc.string(fields["workdir"], "config.workdir") if "workdir" in fields else ""
        if workdir and not workdir.startswith("/"):
            raise doc.error(fields["workdir"], f"config.workdir must be absolute, not {workdir[:200]!r}")
        user = doc.string(fields["user"], "config.user") if "user" in fields else ""
        if re.fullmatch(r"[A-Za-z0-9_.-]*(:[A-Za-z0-9_.-]+)?", user) is None:
            raise doc.error(fields["user"], f"config.user must be USER[:GROUP], not {user[:60]!r}")
        return PlanConfig(
            env,
            workdir,
            user,
            doc.strings(fields["entrypoint"], "config.entrypoint") if "entrypoint" in fields else None,
            doc.strings(fields["cmd"], "config.cmd") if "cmd" in fields else None,
            doc.table(fields["labels"], "config.labels") if "labels" in fields else {},
        )

    def _resources(self, node: yaml.Node) -> Resources:
        doc = self.doc
        fields = doc.mapping(node, "resources", frozenset({"cpu", "memory", "pids"}))
        amounts = []
        for name, read in (("cpu", doc.cores), ("memory", doc.size)):
            if name not in fields:
                amounts.append(Amount())
                continue
            value = fields[name]
            if isinstance(value, yaml.MappingNode):
                parts = doc.mapping(value, f"resources.{name}", frozenset({"start", "max"}))
                start = read(parts["start"], f"resources.{name}.start") if "start" in parts else 0.0
                ceiling = read(parts["max"], f"resources.{name}.max") if "max" in parts else 0.0
            else:
                start = ceiling = read(value, f"resources.{name}")
            if ceiling and start > ceiling:
                raise doc.error(value, f"resources.{name}.start is above its max")
            amounts.append(Amount(start, ceiling))
        pids = doc.integer(fields["pids"], "resources.pids", 1, 1 << 22) if "pids" in fields else 0
        return Resources(amounts[0], amounts[1], pids)


__all__ = ["PlanError", "load_plan", "parse_plan"]
