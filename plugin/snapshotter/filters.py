"""containerd's filter language, for List.

A filter is ``selector ("," selector)*``; all selectors have to match, and of several filters any one. A selector is
``fieldpath [operator value]``: ``name==x``, ``labels."containerd.io/snapshot.ref"!=y``, ``parent~=^sha256``,
``labels.foo`` (present). Field paths are names or quoted strings joined by dots; a value is a quoted string or runs to
the next comma or white space. Quotes are ``"``; a regular expression may also stand between ``/`` or ``|``. The grammar
is the one of containerd's ``pkg/filters/parser.go`` (v2.1.9); the regular expressions are Python's, bounded in length.

Go's regular expressions take linear time, Python's may take for ever, and nothing else runs in the process meanwhile. So
:meth:`Filter.decide` has them matched by a short-lived process that a timer ends.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from weenv.core.errors import InvalidRequest
from weenv.plugin.containerd.types import Kind, SnapshotInfo

MAX_FILTER = 16 << 10
"""Characters in one filter; labels end at 4096."""
MAX_FILTERS = 64
MAX_PATTERN = 1024

REGEX_SECONDS = 3
"""How long the regular expressions of one request may take for a page of snapshots."""

_MATCH = """import signal
signal.alarm({seconds})
import json, re, sys
json.dump([re.search(pattern, text) is not None for pattern, text in json.load(sys.stdin)], sys.stdout)
"""
"""Source of the process that matches; an alarm ends it even within a match, and even if nobody waits for it any more."""

_FIELD = re.compile(r"[A-Za-z0-9_]+")
_VALUE = re.compile(r"[^\s,]+")
_SPACE = re.compile(r"\s*")
_OPERATOR = re.compile(r"[=!~]+")
_ESCAPE = re.compile(r"\\(?:([abfnrtv\\\"/|])|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([0-7]{3}))")
_SIMPLE = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}

_KIND_NAMES = {Kind.ACTIVE: "active", Kind.VIEW: "view", Kind.COMMITTED: "committed"}


@dataclass(frozen=True, slots=True)
class Selector:
    """``operator`` is ``""`` (present), ``==``, ``!=`` or ``~=``."""

    path: tuple[str, ...]
    operator: str = ""
    value: str = ""

    def matcher(self, decided: dict[tuple[str, str], bool]) -> Callable[[SnapshotInfo], bool]:
        """A predicate. ``decided`` holds what (regular expression, text) gives, as :meth:`Filter.decide` fills it in.

        Raises :class:`InvalidRequest` for a broken regular expression.
        """
        path, value = self.path, self.value
        if self.operator == "":
            return lambda info: _field(info, path)[1]
        if self.operator == "==":
            return lambda info: _field(info, path) == (value, True)
        if self.operator == "!=":
            return lambda info: _field(info, path)[0] != value
        if len(value) > MAX_PATTERN:
            raise InvalidRequest(f"filter: regular expression longer than {MAX_PATTERN} characters")
        try:
            re.compile(value)
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidRequest(f"filter: regular expression {value!r} cannot be used: {error}") from error
        return lambda info: decided[value, _field(info, path)[0]]


def _field(info: SnapshotInfo, path: Sequence[str]) -> tuple[str, bool]:
    match path[0]:
        case "name":
            return info.name, True
        case "parent":
            return info.parent, True
        case "kind":
            name = _KIND_NAMES.get(info.kind)
            return name or "", name is not None
        case "labels":
            value = info.labels.get(".".join(path[1:]))
            return value or "", value is not None
    return "", False


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, expected: str) -> InvalidRequest:
        return InvalidRequest(f"filter {self.text[:200]!r}: expected {expected} at character {self.at}")

    def space(self) -> None:
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def take(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match[0]

    def quoted(self, quotes: str) -> str | None:
        quote = self.text[self.at : self.at + 1]
        if not quote or quote not in quotes:
            return None
        self.at += 1
        out: list[str] = []
        while True:
            char = self.text[self.at : self.at + 1]
            if not char or char == "\n":
                raise self.fail(f"a closing {quote}")
            if char == quote:
                self.at += 1
                return "".join(out)
            if char != "\\":
                out.append(char)
                self.at += 1
                continue
            match = _ESCAPE.match(self.text, self.at)
            if match is None:
                if quote == '"':
                    raise self.fail("an escape sequence")
                out.append(char)  # within /.../ a backslash belongs to the regular expression
                self.at += 1
                continue
            self.at = match.end()
            simple, *numbers = match.groups()
            if simple is not None:
                keep = quote != '"' and simple not in quotes
                out.append("\\" + simple if keep else _SIMPLE.get(simple, simple))
            else:
                base = 8 if numbers[3] is not None else 16
                try:
                    out.append(chr(int(next(n for n in numbers if n is not None), base)))
                except (ValueError, OverflowError) as error:
                    raise self.fail("a valid character number") from error

    def field(self) -> str:
        self.space()
        found = self.quoted('"')
        if found is None:
            found = self.take(_FIELD)
        if found is None:
            raise self.fail("a field name")
        return found

    def selector(self) -> Selector:
        path = [self.field()]
        while self.text[self.at : self.at + 1] == ".":
            self.at += 1
            path.append(self.field())
        self.space()
        if self.at == len(self.text) or self.text[self.at] == ",":
            return Selector(tuple(path))
        operator = self.take(_OPERATOR)
        if operator not in ("==", "!=", "~="):
            raise self.fail("one of == != ~=")
        self.space()
        value = self.quoted('"/|' if operator == "~=" else '"')
        if value is None and self.text[self.at : self.at + 1] not in ("/", "|"):
            value = self.take(_VALUE)
        if value is None:
            raise self.fail("a value")
        return Selector(tuple(path), operator, value)

    def selectors(self) -> list[Selector]:
        found = [self.selector()]
        self.space()
        while self.at < len(self.text):
            if self.text[self.at] != ",":
                raise self.fail("a comma")
            self.at += 1
            found.append(self.selector())
            self.space()
        return found


def parse(text: str) -> list[Selector]:
    """The selectors of one filter; the empty filter has none and matches all. Raises :class:`InvalidRequest`."""
    if len(text) > MAX_FILTER:
        raise InvalidRequest(f"filter is longer than {MAX_FILTER} characters")
    return _Parser(text).selectors() if text else []


@dataclass(frozen=True, slots=True)
class Filter:
    """Compiled filters; ``alternatives`` are the parsed ones, for callers that can use an index.

    :meth:`decide` must have seen what is then asked about.
    """

    alternatives: list[list[Selector]]
    _tests: list[list[Callable[[SnapshotInfo], bool]]]
    _decided: dict[tuple[str, str], bool] = field(default_factory=dict)

    def __call__(self, info: SnapshotInfo) -> bool:
        return not self._tests or any(all(test(info) for test in tests) for tests in self._tests)

    async def decide(self, infos: Iterable[SnapshotInfo]) -> None:
        """Match the regular expressions, if there are any. Raises :class:`InvalidRequest` where they take too long."""
        wanted = [s for selectors in self.alternatives for s in selectors if s.operator == "~="]
        pairs = list({(s.value, _field(info, s.path)[0]) for s in wanted for info in infos})
        if not pairs:
            return
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", _MATCH.format(seconds=REGEX_SECONDS),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        out, _ = await child.communicate(json.dumps(pairs).encode())
        if child.returncode:
            raise InvalidRequest("filter: the regular expressions take too long")
        self._decided.clear()
        self._decided.update(zip(pairs, json.loads(out), strict=True))

    def required(self, path: tuple[str, ...]) -> str | None:
        """The value that ``path`` must be equal to in whatever matches, or None where there is no single one."""
        if len(self.alternatives) != 1:
            return None
        for selector in self.alternatives[0]:
            if selector.path == path and selector.operator == "==":
                return selector.value
        return None


def compile_filters(texts: Sequence[str]) -> Filter:
    """Any of ``texts`` has to match; no text matches everything. Raises :class:`InvalidRequest`."""
    if len(texts) > MAX_FILTERS:
        raise InvalidRequest(f"more than {MAX_FILTERS} filters")
    alternatives = [parse(text) for text in texts]
    decided: dict[tuple[str, str], bool] = {}
    tests = [[selector.matcher(decided) for selector in selectors] for selectors in alternatives]
    return Filter(alternatives, tests, decided)
