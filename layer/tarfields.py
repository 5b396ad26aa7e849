"""The fields of tar headers and PAX records, decoded as Go's ``archive/tar`` does (strconv.go, reader.go)."""

from __future__ import annotations

import re

MAX_MTIME = (1 << 63) - 1
"""The latest time containerd sets, in nanoseconds since 1970 (pkg/archive/time.go); later and negative ones become 0."""

XATTR_PREFIX = b"SCHILY.xattr."
"""The PAX records that are extended attributes."""

_DECIMAL = re.compile(rb"[+-]?[0-9]{1,40}\Z")
_DIGITS = re.compile(rb"[0-9]*\Z")
_NUL_FREE = frozenset((b"path", b"linkpath", b"uname", b"gname"))
_SPARSE_PAIR = (b"GNU.sparse.offset", b"GNU.sparse.numbytes")


def decimal(text: bytes) -> int:
    """A signed 64-bit decimal number (Go's ParseInt). Raises ValueError."""
    if _DECIMAL.match(text) is None or not -(1 << 63) <= (value := int(text)) < 1 << 63:
        raise ValueError(f"not a number: {text[:40]!r}")
    return value


def numeric(field: bytes) -> int:
    """A header's number: octal, or GNU base-256 where the top bit is set. Raises ValueError."""
    if not field[0] & 0x80:
        return octal(field)
    bits = int.from_bytes(field, "big")
    negative = field[0] & 0x40
    if negative:
        bits ^= (1 << 8 * len(field)) - 1
    bits &= (1 << (8 * len(field) - 1)) - 1
    if bits >> 63:
        raise ValueError(f"number too large: {field!r}")
    return ~bits if negative else bits


def octal(field: bytes) -> int:
    """Octal digits between any NULs and spaces; none are zero. Raises ValueError."""
    digits = field.strip(b" \0").partition(b"\0")[0]
    if not digits:
        return 0
    if not digits.isdigit():  # int() would take signs, underscores and prefixes
        raise ValueError(f"not an octal number: {field!r}")
    return int(digits, 8)


def pax_time(text: bytes) -> int:
    """Nanoseconds since 1970 of a PAX time; more than nine decimals are cut off. Raises ValueError."""
    whole, _, fraction = text.partition(b".")
    if _DIGITS.match(fraction) is None:
        raise ValueError(f"not a time: {text[:40]!r}")
    seconds = decimal(whole)
    nanoseconds = int(fraction[:9].ljust(9, b"0"))
    return seconds * 1_000_000_000 + (-nanoseconds if whole.startswith(b"-") else nanoseconds)


def bounded_time(nanoseconds: int) -> tuple[int, int]:
    """(seconds, nanoseconds) as containerd sets them: times it does not set are 1970."""
    return divmod(nanoseconds, 1_000_000_000) if 0 <= nanoseconds <= MAX_MTIME else (0, 0)


def pax_records(data: bytes) -> dict[bytes, bytes]:
    """The records of a PAX header; of several with one key the last counts. Raises ValueError.

    Sparse format 0.0 repeats ``GNU.sparse.offset`` and ``.numbytes``: they become the ``GNU.sparse.map`` of format 0.1.
    """
    records: dict[bytes, bytes] = {}
    sparse_map: list[bytes] = []
    position, end = 0, len(data)
    while position < end:
        space = data.find(b" ", position, position + 21)
        if space < 0:
            raise ValueError("a record has no length")
        stop = position + decimal(data[position:space])
        if stop < position + 5 or stop > end or stop <= space + 1 or data[stop - 1] != 0x0A:
            raise ValueError("a record has a wrong length")
        key, equals, value = data[space + 1 : stop - 1].partition(b"=")
        if not key or not equals or b"\0" in (value if key in _NUL_FREE else key):
            raise ValueError("a record is malformed")
        if key in _SPARSE_PAIR:
            if key != _SPARSE_PAIR[len(sparse_map) % 2] or b"," in value:
                raise ValueError("the sparse map is malformed")
            sparse_map.append(value)
        else:
            records[key] = value
        position = stop
    if sparse_map:
        records[b"GNU.sparse.map"] = b",".join(sparse_map)
    return records


def star_prefix(prefix: bytes) -> bytes:
    """star's shorter name prefix; behind it are access and change time, which have to be numbers. Raises ValueError.

    ``prefix`` is the header's bytes 345 to 500.
    """
    numeric(prefix[131:143])
    numeric(prefix[143:155])
    return prefix[:131]


def mistaken_prefix(prefix: bytes) -> bytes:
    """GNU tar has access and change time where ustar has a prefix; old Go wrote a prefix there nevertheless.

    Those are told apart by whether the fields are numbers (golang issues 12594 and 21005).
    """
    try:
        for field in (prefix[:12], prefix[12:24]):
            if field[0]:
                numeric(field)
    except ValueError:
        text = prefix.partition(b"\0")[0]
        return text if text.isascii() else b""
    return b""
