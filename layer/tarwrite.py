"""Members -> tar stream bytes, the same bytes for the same members, whoever writes them and whenever.

POSIX.1-2001 ustar headers, with a pax extended header ("x") only where a field does not hold its value, and then only for
those fields, in the order of their names. User and group names are left empty: numbers are what an image means.
Everything that :class:`~weenv.layer.tarscan.TarScanner` reads back as it went in; Go's and GNU's tar do, too.
"""

from __future__ import annotations

import struct

from weenv.core.errors import FormatError
from weenv.layer.tarscan import BLOCK_SIZE, Member, show
from weenv.layer.toc import BLOCK, CHAR, DIRECTORY, FIFO, FILE, HARDLINK, SYMLINK

TYPEFLAGS = {FILE: b"0", HARDLINK: b"1", SYMLINK: b"2", CHAR: b"3", BLOCK: b"4", DIRECTORY: b"5", FIFO: b"6"}
END = bytes(2 * BLOCK_SIZE)
"""What ends an archive."""

# ustar: name, mode, uid, gid, size, mtime, chksum, typeflag, linkname, magic and version, uname, gname, devmajor, devminor,
# prefix, padding (POSIX.1-2001, pax, "ustar Interchange Format").
_HEADER = struct.Struct("100s8s8s8s12s12s8sc100s8s32s32s8s8s155s12s")
_MAGIC = b"ustar\x0000"
_PAX_NAME = b"././@PaxHeader"
_NAME = 100
_ID_MAX = 0o7777777
_LONG_MAX = 0o77777777777


def _octal(value: int, digits: int) -> bytes:
    return b"%0*o\0" % (digits, value)


def _record(key: bytes, value: bytes) -> bytes:
    """One pax record; its length counts itself."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    if len(str(length)) + rest != length:
        length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)


def _block(
    name: bytes, mode: int, uid: int, gid: int, size: int, mtime: int, typeflag: bytes, link: bytes, major: int, minor: int
) -> bytes:
    fields = [
        name, _octal(mode, 7), _octal(uid, 7), _octal(gid, 7), _octal(size, 11), _octal(mtime, 11), b" " * 8, typeflag, link,
        _MAGIC, b"", b"", _octal(major, 7), _octal(minor, 7), b"", b"",
    ]  # fmt: skip
    fields[6] = b"%06o\0 " % sum(_HEADER.pack(*fields))
    return _HEADER.pack(*fields)


def padding(size: int) -> bytes:
    """What follows a payload of ``size`` bytes."""
    return bytes(-size % BLOCK_SIZE)


def header(member: Member) -> bytes:
    """The header blocks of a member; a FILE's payload of ``member.size`` bytes and its :func:`padding` are to follow.

    A directory's name gets a slash at its end. Raises :class:`FormatError` for what no tar can hold.
    """
    name, link = member.name, member.link
    if member.kind == DIRECTORY and not name.endswith(b"/"):
        name += b"/"
    if not name or b"\0" in name or b"\0" in link:
        raise FormatError("a name that no tar can hold", member=show(member.name))
    size = member.size if member.kind == FILE else 0
    records: list[tuple[bytes, bytes]] = []
    for key, value in (member.xattrs or {}).items():
        if not key or b"=" in key or b"\0" in key:
            raise FormatError("an extended attribute with a name that no tar can hold", member=show(member.name))
        records.append((b"SCHILY.xattr." + key, value))
    if len(name) > _NAME:
        records.append((b"path", name))
    if len(link) > _NAME:
        records.append((b"linkpath", link))
    uid, gid, mtime = member.uid, member.gid, member.mtime
    if uid > _ID_MAX:
        records.append((b"uid", b"%d" % uid))
        uid = 0
    if gid > _ID_MAX:
        records.append((b"gid", b"%d" % gid))
        gid = 0
    in_field = size
    if size > _LONG_MAX:
        records.append((b"size", b"%d" % size))
        in_field = 0
    if member.mtime_ns or not 0 <= mtime <= _LONG_MAX:
        fraction = b".%09d" % member.mtime_ns if member.mtime_ns else b""
        records.append((b"mtime", b"%d%s" % (mtime, fraction.rstrip(b"0"))))
        mtime = min(max(mtime, 0), _LONG_MAX)
    extended = b""
    if records:
        body = b"".join(_record(key, value) for key, value in sorted(records))
        extended = _block(_PAX_NAME, 0o644, 0, 0, len(body), 0, b"x", b"", 0, 0) + body + padding(len(body))
    device = member.kind in (CHAR, BLOCK)
    major, minor = (member.rdev >> 32, member.rdev & 0xFFFFFFFF) if device else (0, 0)
    if major > _ID_MAX or minor > _ID_MAX:
        raise FormatError("a device number that no tar can hold", member=show(member.name))
    return extended + _block(
        name[:_NAME], member.mode & 0o7777, uid, gid, in_field, mtime, TYPEFLAGS[member.kind], link[:_NAME], major, minor
    )
