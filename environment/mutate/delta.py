"""git's binary formats that patches and repositories share: deltas, base85 lines, bounded inflation, object names. Pure.

Formats: git's Documentation/gitformat-pack.txt ("Deltified representation"); the base85 lines of binary patches have git's
alphabet, which is RFC 1924's.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib

from weenv.core.errors import FormatError, LimitError
from weenv.environment.mutate.budget import Budget

MAX_OBJECT = 1 << 30
"""Bytes of one object or binary file."""


def object_name(kind: bytes, data: bytes, algorithm: str = "sha1") -> str:
    """The hex name of an object (``kind`` is ``blob``, ``tree``, ``commit`` or ``tag``)."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    digest.update(b"%s %d\0" % (kind, len(data)))
    digest.update(data)
    return digest.hexdigest()


def inflate(data: bytes | memoryview, size: int, what: str) -> bytes:
    """``data`` inflated, which must give exactly ``size`` bytes and end there. Raises FormatError."""
    if size > MAX_OBJECT:
        raise LimitError(f"{size} bytes, more than {MAX_OBJECT}", member=what)
    stream = zlib.decompressobj()
    try:
        result = stream.decompress(data, size + 1)
    except zlib.error as error:
        raise FormatError("its compressed data is damaged", member=what) from error
    if len(result) != size or not stream.eof:
        raise FormatError(f"its compressed data does not hold {size} bytes", member=what)
    return result


def _size(data: bytes, at: int, what: str) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 63:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
        shift += 7
    raise FormatError("a delta ends within a size", member=what)


def apply_delta(base: bytes, delta: bytes, what: str, budget: Budget | None = None) -> bytes:
    """The object that ``delta`` makes of ``base``, from the ``budget`` of its patch. Raises FormatError, LimitError."""
    budget = budget or Budget()
    expected, at = _size(delta, 0, what)
    if expected != len(base):
        raise FormatError(f"its delta is for {expected} bytes, there are {len(base)}", member=what)
    size, at = _size(delta, at, what)
    if size > MAX_OBJECT:
        raise LimitError(f"{size} bytes, more than {MAX_OBJECT}", member=what)
    budget.spend(size)
    out = bytearray()
    end = len(delta)
    while at < end:
        budget.step()
        op = delta[at]
        at += 1
        if op & 0x80:
            offset = length = 0
            try:
                for bit in range(4):
                    if op & (1 << bit):
                        offset |= delta[at] << (8 * bit)
                        at += 1
                for bit in range(3):
                    if op & (0x10 << bit):
                        length |= delta[at] << (8 * bit)
                        at += 1
            except IndexError as error:
                raise FormatError("a delta ends within a copy", member=what) from error
            length = length or 0x10000
            if offset + length > len(base):
                raise FormatError("a delta copies from beyond its base", member=what)
            out += base[offset : offset + length]
        elif op:
            if at + op > end:
                raise FormatError("a delta ends within an insertion", member=what)
            out += delta[at : at + op]
            at += op
        else:
            raise FormatError("a delta has a reserved instruction", member=what)
        if len(out) > size:
            raise FormatError("a delta makes more than it says", member=what)
    if len(out) != size:
        raise FormatError("a delta makes less than it says", member=what)
    return bytes(out)


def decode_line(line: bytes, what: str) -> bytes:
    """One line of a binary patch: a letter for its length (A-Z: 1-26, a-z: 27-52), then base85."""
    first = line[:1]
    if b"A" <= first <= b"Z":
        length = first[0] - 64
    elif b"a" <= first <= b"z":
        length = first[0] - 96 + 26
    else:
        raise FormatError("a line of binary data has no length", member=what)
    if len(line) != 1 + -(-length // 4) * 5:
        raise FormatError("a line of binary data has the wrong length", member=what)
    try:
        return base64.b85decode(line[1:])[:length]
    except (ValueError, binascii.Error) as error:
        raise FormatError("a line of binary data is damaged", member=what) from error
