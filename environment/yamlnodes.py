"""Walking a YAML document by its nodes, so that every fault is told with its line and column.

Nothing is constructed from tags: scalars are text, and each reader below says what text it takes. Aliases are allowed,
recursion and expansion beyond :data:`MAX_NODES` are not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import yaml

from weenv.core.errors import FormatError
from weenv.core.units import parse_bytes, parse_cores

T = TypeVar("T")

MAX_BYTES = 64 << 20
"""A plan's text; patches and file contents stand in it."""
MAX_NODES = 200_000
MAX_DEPTH = 32
MAX_FAULTS = 50
"""Faults of one document that are told."""


class PlanError(FormatError):
    """A fault in a plan. ``line`` and ``column`` count from 1; 0 where the fault has no place.

    ``also`` has those that were found with it, in the order of the document, :data:`MAX_FAULTS` at most in all.
    """

    def __init__(self, message: str, *, where: str = "", line: int = 0, column: int = 0, hint: str = "") -> None:
        place = f"{where}:{line}:{column}" if line else where
        super().__init__(message, member=place, hint=hint)
        self.line = line
        self.column = column


class _Enough(Exception):
    """:data:`MAX_FAULTS` are reached."""


class Document:
    """One YAML document. ``where`` is what messages call it."""

    def __init__(self, text: str | bytes, where: str) -> None:
        self.where = where
        self._faults: list[PlanError] | None = None
        if len(text) > MAX_BYTES:
            raise PlanError(f"larger than {MAX_BYTES >> 20} MiB", where=where)
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
            raise PlanError(f"not YAML: {error.problem or error.context}", where=where, line=line, column=column) from error
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise PlanError(f"not YAML: {' '.join(str(error).split())[:200]}", where=where) from error
        if node is None:
            raise PlanError("the document is empty", where=where, hint="see docs/plans.md for an example")
        self._check(node)
        self.root = node

    def _check(self, root: yaml.Node) -> None:
        """Bound the document as it is once every alias is written out."""
        count = 0
        stack: list[tuple[yaml.Node, frozenset[int]]] = [(root, frozenset())]
        while stack:
            node, above = stack.pop()
            count += 1
            if id(node) in above:
                raise self.error(node, "an alias within what it stands for (a cycle)")
            if count > MAX_NODES or len(above) > MAX_DEPTH:
                raise self.error(node, "too large or too deeply nested")
            below = above | {id(node)}
            if isinstance(node, yaml.SequenceNode):
                stack.extend((item, below) for item in node.value)
            elif isinstance(node, yaml.MappingNode):
                stack.extend((item, below) for pair in node.value for item in pair)

    def error(self, node: yaml.Node, message: str, hint: str = "") -> PlanError:
        """A fault at a node."""
        mark = node.start_mark
        return PlanError(message, where=self.where, line=mark.line + 1, column=mark.column + 1, hint=hint)

    def line(self, node: yaml.Node) -> int:
        """The line a node begins in, from 1."""
        return int(node.start_mark.line) + 1

    # -- more than one fault: within every(), readers go on where they can ---------------------------------------------

    def every(self, read: Callable[[], T]) -> T:
        """What ``read`` makes of the document; where it finds faults, PlanError of the first with the others."""
        self._faults = []
        made: list[T] = []
        try:
            made.append(read())
        except PlanError as error:
            self._faults.append(error)
        except _Enough:
            pass
        found, self._faults = self._faults, None
        if not found:
            return made[0]
        found.sort(key=lambda fault: (fault.line, fault.column))
        found[0].also = tuple(found[1:])
        raise found[0]

    def report(self, fault: PlanError) -> None:
        """Note a fault that the reader can go on after; outside :meth:`every`, raise it."""
        if self._faults is None:
            raise fault
        self._faults.append(fault)
        if len(self._faults) >= MAX_FAULTS:
            raise _Enough

    def attempt(self, read: Callable[[], T], default: T) -> T:
        """``read()``; where that is a fault, it is noted, and ``default`` stands for it."""
        try:
            return read()
        except PlanError as error:
            self.report(error)
            return default

    # -- readers: each takes a node and what to call it --------------------------------------------------------------

    def mapping(self, node: yaml.Node, name: str, known: frozenset[str] | None = None) -> dict[str, yaml.Node]:
        """The fields of a mapping; unknown and repeated ones are faults."""
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, f"{name} must be a mapping")
        fields: dict[str, yaml.Node] = {}
        for key, value in node.value:
            text = self.attempt(partial(self.string, key, f"a key of {name}"), None)
            if text is None:
                continue
            if text in fields:
                self.report(self.error(key, f"{text!r} stands twice in {name}"))
            elif known is not None and text not in known:
                self.report(self.error(key, f"unknown field {text!r} in {name}", f"known: {', '.join(sorted(known))}"))
            else:
                fields[text] = value
        return fields

    def sequence(self, node: yaml.Node, name: str, item: Callable[[yaml.Node, str], T]) -> tuple[T, ...]:
        """A list, each item read by ``item``."""
        if not isinstance(node, yaml.SequenceNode):
            raise self.error(node, f"{name} must be a list")
        found: list[T] = []
        for number, value in enumerate(node.value):
            try:
                found.append(item(value, f"{name}[{number}]"))
            except PlanError as error:
                self.report(error)
        return tuple(found)

    def string(self, node: yaml.Node, name: str) -> str:
        """Any scalar but null, as it is written."""
        if not isinstance(node, yaml.ScalarNode) or node.tag == "tag:yaml.org,2002:null":
            raise self.error(node, f"{name} must be a string")
        text = str(node.value)
        if "\0" in text:
            raise self.error(node, f"{name} holds a NUL")
        return text

    def strings(self, node: yaml.Node, name: str) -> tuple[str, ...]:
        """A list of strings."""
        return self.sequence(node, name, self.string)

    def table(self, node: yaml.Node, name: str) -> dict[str, str]:
        """A mapping of strings."""
        fields = self.mapping(node, name)
        return {key: self.attempt(partial(self.string, value, f"{name}.{key}"), "") for key, value in fields.items()}

    def integer(self, node: yaml.Node, name: str, low: int, high: int) -> int:
        """A decimal number in a range."""
        text = self.string(node, name)
        if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
            raise self.error(node, f"{name} must be a number from {low} to {high}, not {text[:40]!r}")
        return int(text)

    def mode(self, node: yaml.Node, name: str) -> int:
        """Permission bits, octal as chmod takes them: ``0755``, ``755`` or ``"0o755"``."""
        text = self.string(node, name).removeprefix("0o")
        if not re.fullmatch(r"[0-7]{3,5}", text) or int(text, 8) > 0o7777:
            raise self.error(node, f"{name} must be an octal mode such as 0755, not {text[:40]!r}")
        return int(text, 8)

    def cores(self, node: yaml.Node, name: str) -> float:
        """CPUs: ``2``, ``0.5`` or ``500m``."""
        text = self.string(node, name)
        value = parse_cores(text)
        if value is None:
            raise self.error(node, f"{name} must be a number of CPUs such as 2, 0.5 or 500m, not {text[:40]!r}")
        return value

    def size(self, node: yaml.Node, name: str) -> float:
        """Bytes: a number, or one with a suffix such as ``512Mi`` or ``2G``."""
        text = self.string(node, name)
        value = parse_bytes(text)
        if value is None:
            raise self.error(node, f"{name} must be a size such as 512Mi or 2Gi, not {text[:40]!r}")
        return float(value)
