"""Tar streams written byte by byte: every field can be wrong, which no tar library lets one do."""

from __future__ import annotations

from collections.abc import Mapping

END = bytes(1024)
USTAR = b"ustar\x0000"
GNU = b"ustar  \0"
V7 = bytes(8)


def octal(value: int, width: int) -> bytes:
    """``width`` bytes: octal digits and a NUL, or GNU base-256 where the value is negative or does not fit."""
    if 0 <= value < 8 ** (width - 1):
        return b"%0*o\0" % (width - 1, value)
    return base256(value, width)


def base256(value: int, width: int) -> bytes:
    """GNU's binary form: two's complement, the top bit set."""
    field = bytearray(value.to_bytes(width, "big", signed=True))
    field[0] |= 0x80
    return bytes(field)


def header(
    name: bytes = b"f",
    typeflag: bytes = b"0",
    *,
    mode: int | bytes = 0o644,
    uid: int | bytes = 0,
    gid: int | bytes = 0,
    size: int | bytes = 0,
    mtime: int | bytes = 0,
    link: bytes = b"",
    magic: bytes = USTAR,
    device: tuple[int | bytes, int | bytes] = (0, 0),
    prefix: bytes = b"",
    tail: bytes = b"",
    checksum: bytes | None = None,
    signed_sum: bool = False,
) -> bytes:
    """One header block. Numbers are encoded, bytes taken as they are (padded with NULs); the checksum is right unless given."""

    def number(value: int | bytes, width: int) -> bytes:
        return (octal(value, width) if isinstance(value, int) else value).ljust(width, b"\0")[:width]

    def block(sum_field: bytes) -> bytes:
        fields = name[:100].ljust(100, b"\0") + number(mode, 8) + number(uid, 8) + number(gid, 8) + number(size, 12)
        fields += number(mtime, 12) + sum_field + typeflag + link[:100].ljust(100, b"\0") + magic + bytes(64)
        fields += number(device[0], 8) + number(device[1], 8) + prefix[:155].ljust(155, b"\0") + tail.ljust(12, b"\0")
        return fields

    plain = block(b" " * 8)
    total = sum(plain) - (256 * sum(byte >> 7 for byte in plain) if signed_sum else 0)
    return block(b"%06o\0 " % total if checksum is None else checksum)


def padded(data: bytes) -> bytes:
    """``data`` and NULs up to a multiple of 512."""
    return data + bytes(-len(data) % 512)


def record(key: bytes, value: bytes) -> bytes:
    """One PAX record."""
    size = len(key) + len(value) + 3
    while size != len(key) + len(value) + 3 + len(str(size)):
        size = len(key) + len(value) + 3 + len(str(size))
    return b"%d %s=%s\n" % (size, key, value)


def pax(records: Mapping[bytes, bytes] | bytes, typeflag: bytes = b"x", name: bytes = b"PaxHeaders/x") -> bytes:
    """A PAX extension member; ``records`` as a mapping or as its raw bytes."""
    data = records if isinstance(records, bytes) else b"".join(record(key, value) for key, value in records.items())
    return header(name, typeflag, size=len(data)) + padded(data)


def long_name(text: bytes, typeflag: bytes = b"L") -> bytes:
    """GNU's long name (``L``) or long link target (``K``) member."""
    data = text + b"\0"
    return header(b"././@LongLink", typeflag, size=len(data), magic=GNU) + padded(data)


def file(name: bytes, data: bytes = b"", **fields: object) -> bytes:
    """A regular file with its payload."""
    return header(name, **{"size": len(data), **fields}) + padded(data)  # type: ignore[arg-type]


def directory(name: bytes, mode: int = 0o755, **fields: object) -> bytes:
    """A directory."""
    return header(name, b"5", mode=mode, **fields)  # type: ignore[arg-type]
