"""JSON documents that are changed in places and kept byte for byte elsewhere.

A manifest that is parsed and dumped again loses its white space, its number spelling and its escapes; one that is spliced
differs from the original only where it was meant to. Parsing is strict where readers disagree: duplicate keys are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from weenv.core.errors import FormatError

_SPACE = re.compile(r"[ \t\n\r]*")

Span = tuple[int, int]
Edit = tuple[int, int, str]


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("an object has the same key twice")
    return out


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)


def parse_object(data: bytes, what: str, limit: int) -> tuple[str, dict[str, Any]]:
    """Decode a JSON object of at most ``limit`` bytes. Returns (its text, its value). Raises :class:`FormatError`."""
    if len(data) > limit:
        raise FormatError(f"larger than {limit} bytes", member=what)
    try:
        text = data.decode("utf-8")
        start = _after_space(text, 0)
        value, end = _DECODER.raw_decode(text, start)
        if _after_space(text, end) != len(text):
            raise ValueError("something follows its end")
    except RecursionError as error:  # json's own bound on nesting
        raise FormatError("not usable JSON: nested too deeply", member=what) from error
    except ValueError as error:
        raise FormatError(f"not valid JSON: {error}", member=what) from error
    if not isinstance(value, dict):
        raise FormatError("not a JSON object", member=what)
    return text, value


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def members(text: str, start: int = 0) -> dict[str, Span]:
    """Where the values of the object at ``start`` are in ``text``, by key. ``text`` has passed :func:`parse_object`."""
    position = _after_space(text, _after_space(text, start) + 1)
    spans: dict[str, Span] = {}
    while text[position] != "}":
        key, position = _DECODER.raw_decode(text, position)
        position = _after_space(text, _after_space(text, position) + 1)  # past the colon
        _, end = _DECODER.raw_decode(text, position)
        spans[key] = (position, end)
        position = _after_space(text, end)
        if text[position] == ",":
            position = _after_space(text, position + 1)
    return spans


def elements(text: str, start: int) -> list[Span]:
    """Where the elements of the array at ``start`` are in ``text``."""
    position = _after_space(text, _after_space(text, start) + 1)
    spans: list[Span] = []
    while text[position] != "]":
        _, end = _DECODER.raw_decode(text, position)
        spans.append((position, end))
        position = _after_space(text, end)
        if text[position] == ",":
            position = _after_space(text, position + 1)
    return spans


def set_members(text: str, start: int, values: dict[str, Any]) -> list[Edit]:
    """Edits that give the object at ``start`` these values: in place where the key is there, else before its end.

    A value of None for a key that is there removes nothing; callers replace whole values.
    """
    spans = members(text, start)
    edits: list[Edit] = []
    added: list[str] = []
    for key, value in values.items():
        dumped = json.dumps(value, separators=(",", ":"))
        if key in spans:
            edits.append((*spans[key], dumped))
        else:
            added.append(f"{json.dumps(key)}:{dumped}")
    if added:
        if spans:
            at = max(end for _, end in spans.values())
            edits.append((at, at, "," + ",".join(added)))
        else:
            at = _after_space(text, start) + 1
            edits.append((at, at, ",".join(added)))
    return edits


def apply(text: str, edits: Iterable[Edit]) -> str:
    """``text`` with all edits made; they do not overlap."""
    parts: list[str] = []
    position = 0
    for start, end, replacement in sorted(edits):
        assert start >= position, "edits overlap"
        parts += (text[position:start], replacement)
        position = end
    parts.append(text[position:])
    return "".join(parts)
