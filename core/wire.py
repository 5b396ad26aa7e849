"""Protobuf's wire form by the tables of :mod:`weenv.core.proto`, without protobuf: dictionaries in, bytes out, and back.

For the one command whose start-up time counts; everything else uses the real library. Encoding: protobuf.dev,
"Encoding"; covered are varints (int32, int64, uint32, uint64, bool, in two's complement), strings, bytes, messages,
``repeated`` of these (unpacked) and ``map`` with string keys. Unknown fields are skipped, absent ones left out. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

WELL_KNOWN: dict[str, Mapping[str, tuple[int, str]]] = {
    ".google.protobuf.Any": {"type_url": (1, "string"), "value": (2, "bytes")},
    ".google.protobuf.Empty": {},
    ".google.protobuf.FieldMask": {"paths": (1, "repeated string")},
    ".google.protobuf.Timestamp": {"seconds": (1, "int64"), "nanos": (2, "int32")},
}

_VARINTS = frozenset({"int32", "int64", "uint32", "uint64", "bool"})
_DEPTH = 32


class WireError(ValueError):
    """Bytes that are no such message."""


Tables = Mapping[str, Mapping[str, tuple[int, str]]]


def varint(value: int) -> bytes:
    """A number in groups of seven bits, the least first; a negative one is taken as of 64 bits."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _sized(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def _field(tables: Tables, number: int, kind: str, value: Any) -> bytes:
    if kind in _VARINTS:
        return varint(number << 3) + varint(int(value))
    if kind == "string":
        return _sized(number, value.encode("utf-8"))
    if kind == "bytes":
        return _sized(number, value)
    return _sized(number, encode(tables, kind, value))


def encode(tables: Tables, name: str, values: Mapping[str, Any]) -> bytes:
    """A message. Raises KeyError for a field or message that the tables do not have."""
    table = WELL_KNOWN[name] if name.startswith(".") else tables[name]
    out = bytearray()
    for field, value in values.items():
        number, kind = table[field]
        if kind.startswith("repeated "):
            for item in value:
                out += _field(tables, number, kind[9:], item)
        elif kind.startswith("map<"):
            inner = kind[4:-1].partition(",")[2]
            for key, item in value.items():
                out += _sized(number, _field(tables, 1, "string", key) + _field(tables, 2, inner, item))
        elif value or not isinstance(value, int | str | bytes):
            out += _field(tables, number, kind, value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise WireError("a number goes on beyond its end")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, at
        shift += 7


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        number, form = tag >> 3, tag & 7
        if form == 0:
            value, at = _read_varint(data, at)
            yield number, value
            continue
        if form == 2:
            length, at = _read_varint(data, at)
        elif form in (1, 5):
            length = 8 if form == 1 else 4
        else:
            raise WireError("a group, which nobody sends")
        if length > len(data) - at:
            raise WireError("a field goes on beyond the message")
        yield number, data[at : at + length]
        at += length


def decode(tables: Tables, name: str, data: bytes, *, depth: int = 0) -> dict[str, Any]:
    """The fields that are there; a ``repeated`` one is a list, a ``map`` a dict. Raises WireError."""
    if depth > _DEPTH:
        raise WireError("messages within messages within messages")
    table = WELL_KNOWN[name] if name.startswith(".") else tables[name]
    known = {number: (field, kind) for field, (number, kind) in table.items()}
    found: dict[str, Any] = {}
    for number, raw in _fields(data):
        if number not in known:
            continue
        field, kind = known[number]
        if kind.startswith("repeated "):
            found.setdefault(field, []).append(_value(tables, kind[9:], raw, depth))
        elif kind.startswith("map<"):
            inner = kind[4:-1].partition(",")[2]
            entry = dict(_fields(raw)) if isinstance(raw, bytes) else {}
            empty: Any = b"" if inner not in _VARINTS else 0
            key = _value(tables, "string", entry.get(1, b""), depth)
            found.setdefault(field, {})[key] = _value(tables, inner, entry.get(2, empty), depth)
        else:
            found[field] = _value(tables, kind, raw, depth)
    return found


def _value(tables: Tables, kind: str, raw: int | bytes, depth: int) -> Any:
    if kind in _VARINTS:
        if not isinstance(raw, int):
            raise WireError("a number was expected")
        if kind == "bool":
            return raw != 0
        if kind.startswith("int") and raw >> 63:
            return raw - (1 << 64)
        return raw & 0xFFFFFFFF if kind.endswith("32") and not kind.startswith("int") else raw
    if not isinstance(raw, bytes):
        raise WireError("bytes were expected")
    if kind == "bytes":
        return raw
    if kind == "string":
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise WireError("text that is not UTF-8") from error
    return decode(tables, kind, raw, depth=depth + 1)
