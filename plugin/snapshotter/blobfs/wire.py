"""The part of the FUSE kernel protocol that a read-only, one-directory file system needs. Bytes in, bytes out; no I/O.

Structures, opcodes and flags are those of ``include/uapi/linux/fuse.h`` (Linux; protocol 7.45 is the newest read, 7.31
the oldest spoken). All integers have the machine's own byte order. A request is one ``read`` of ``/dev/fuse``: a
:data:`IN_HEADER` and the opcode's arguments; an answer is one ``write``: an :data:`OUT_HEADER` and the result.

The reader of the hot path (``server.py``) unpacks :data:`READ_REQUEST` itself; everything else goes through
:func:`parse`, which raises :class:`weenv.core.errors.FormatError` for anything malformed and never reads past the end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from weenv.core.errors import FormatError

KERNEL_VERSION: Final = 7
"""FUSE_KERNEL_VERSION: the major version; another one ends the session."""
KERNEL_MINOR_VERSION: Final = 45
"""The newest minor version whose INIT reply is written here; the kernel accepts one below its own."""
MINOR_MIN: Final = 31
"""FUSE_MAX_PAGES is 7.28; 7.31 (Linux 5.4) is the oldest that this code was read against."""

ROOT_ID: Final = 1
"""FUSE_ROOT_ID: the node id of the mount's root."""
UNIQUE_RESEND: Final = 1 << 63
"""FUSE_UNIQUE_RESEND: set in ``unique`` of a request that is delivered again after NOTIFY_RESEND; the answer keeps it."""
MIN_READ_BUFFER: Final = 8192
"""FUSE_MIN_READ_BUFFER: a ``read`` with a smaller buffer is refused with EINVAL."""

# enum fuse_opcode
LOOKUP: Final = 1
FORGET: Final = 2
GETATTR: Final = 3
OPEN: Final = 14
READ: Final = 15
STATFS: Final = 17
RELEASE: Final = 18
INIT: Final = 26
OPENDIR: Final = 27
READDIR: Final = 28
RELEASEDIR: Final = 29
INTERRUPT: Final = 36
DESTROY: Final = 38
BATCH_FORGET: Final = 42

NO_REPLY: Final = frozenset((FORGET, BATCH_FORGET, INTERRUPT))
"""Requests that are not answered."""

# enum fuse_notify_code
NOTIFY_RESEND: Final = 7
"""FUSE_NOTIFY_RESEND (Linux 6.9): put every request that was read but not answered back into the queue."""

# INIT flags (``flags`` holds bits 0-31, ``flags2`` bits 32-63)
ASYNC_READ: Final = 1 << 0
"""FUSE_ASYNC_READ: several reads of one file at a time."""
PARALLEL_DIROPS: Final = 1 << 18
"""FUSE_PARALLEL_DIROPS: concurrent lookups in one directory."""
MAX_PAGES: Final = 1 << 22
"""FUSE_MAX_PAGES: ``max_pages`` of the INIT reply is valid."""
NO_OPENDIR_SUPPORT: Final = 1 << 24
"""FUSE_NO_OPENDIR_SUPPORT: ENOSYS to OPENDIR means that none is needed."""
INIT_EXT: Final = 1 << 30
"""FUSE_INIT_EXT: ``flags2`` is valid."""
HAS_RESEND: Final = 1 << 39
"""FUSE_HAS_RESEND: the kernel knows NOTIFY_RESEND."""

FOPEN_KEEP_CACHE: Final = 1 << 1
"""FOPEN_KEEP_CACHE: do not drop the file's page cache at open."""

FOPEN_NOFLUSH: Final = 1 << 5
"""FOPEN_NOFLUSH (7.35): send no FLUSH at close; close(2), in whatever process, then never waits for the server."""

S_IFDIR: Final = 0o040000
S_IFREG: Final = 0o100000
DT_REG: Final = 8

IN_HEADER: Final = struct.Struct("=IIQQIIIHH")
"""fuse_in_header: len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding."""
OUT_HEADER: Final = struct.Struct("=IiQ")
"""fuse_out_header: len, error (0 or a negative errno; the code of a notification), unique (0: a notification)."""
READ_IN: Final = struct.Struct("=QQIIQII")
"""fuse_read_in: fh, offset, size, read_flags, lock_owner, flags, padding."""
READ_REQUEST: Final = struct.Struct("=IIQQIIIHHQQI")
"""fuse_in_header and the first three fields of fuse_read_in, for the hot path."""
INIT_IN: Final = struct.Struct("=IIII")
"""fuse_init_in up to 7.35: major, minor, max_readahead, flags; 7.36 appends flags2 and 11 unused words."""
INIT_OUT: Final = struct.Struct("=IIIIHHIIHHIIH22x")
"""fuse_init_out: major, minor, max_readahead, flags, max_background, congestion_threshold, max_write, time_gran,
max_pages, map_alignment, flags2, max_stack_depth, request_timeout, unused[11]."""
ATTR: Final = struct.Struct("=QQQQQQIIIIIIIIII")
"""fuse_attr: ino, size, blocks, atime, mtime, ctime, their nanoseconds, mode, nlink, uid, gid, rdev, blksize, flags."""
ENTRY_HEAD: Final = struct.Struct("=QQQQII")
"""fuse_entry_out before its attr: nodeid, generation, entry_valid, attr_valid, and the nanoseconds of both."""
ATTR_HEAD: Final = struct.Struct("=QII")
"""fuse_attr_out before its attr: attr_valid, attr_valid_nsec, dummy."""
OPEN_OUT: Final = struct.Struct("=QIi")
"""fuse_open_out: fh, open_flags, backing_id."""
STATFS_OUT: Final = struct.Struct("=QQQQQIIII24x")
"""fuse_statfs_out: blocks, bfree, bavail, files, ffree, bsize, namelen, frsize, padding, spare[6]."""
DIRENT: Final = struct.Struct("=QQII")
"""fuse_dirent before its name: ino, off, namelen, type; the whole is padded to 8 bytes."""
UNIQUE_IN: Final = struct.Struct("=Q")
"""fuse_interrupt_in: the unique of the request that is interrupted."""

FOREVER: Final = 1 << 30
"""Seconds that the kernel may keep an entry or attributes: a layer's content never changes, so 34 years."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request's header. ``body`` holds the opcode's arguments; it points into the buffer that was parsed."""

    opcode: int
    unique: int
    nodeid: int
    pid: int
    body: memoryview


@dataclass(frozen=True, slots=True)
class InitIn:
    """What the kernel offers: protocol version, read-ahead limit (bytes) and INIT flags (64 bits)."""

    major: int
    minor: int
    max_readahead: int
    flags: int


@dataclass(frozen=True, slots=True)
class InitOut:
    """What was agreed. ``max_pages`` bounds one READ (pages); ``max_readahead`` is in bytes."""

    minor: int
    flags: int
    max_readahead: int
    max_pages: int
    max_background: int


def parse(buffer: memoryview) -> Request:
    """Split a message into its header and body. Raises :class:`FormatError` where the lengths do not fit."""
    if len(buffer) < IN_HEADER.size:
        raise FormatError(f"FUSE request of {len(buffer)} bytes is shorter than its header")
    length, opcode, unique, nodeid, _uid, _gid, pid, extension, _pad = IN_HEADER.unpack_from(buffer)
    if length != len(buffer):
        raise FormatError(f"FUSE request says {length} bytes and has {len(buffer)}")
    # total_extlen counts 8-byte units at the end of the message (7.38: FUSE_CREATE_SUPP_GROUP and the like).
    end = length - extension * 8
    if end < IN_HEADER.size:
        raise FormatError(f"FUSE request of {length} bytes has {extension * 8} bytes of extensions")
    return Request(opcode, unique, nodeid, pid, buffer[IN_HEADER.size : end])


def parse_init(body: memoryview) -> InitIn:
    """The arguments of INIT."""
    if len(body) < INIT_IN.size:
        raise FormatError(f"INIT has {len(body)} bytes of arguments")
    major, minor, max_readahead, flags = INIT_IN.unpack_from(body)
    if flags & INIT_EXT and len(body) >= INIT_IN.size + 4:
        flags |= int.from_bytes(body[INIT_IN.size : INIT_IN.size + 4], _ORDER) << 32
    return InitIn(major, minor, max_readahead, flags)


def parse_name(body: memoryview) -> bytes:
    """The name of LOOKUP: bytes up to a terminating zero."""
    name = bytes(body)
    end = name.find(b"\0")
    if end < 0:
        raise FormatError("LOOKUP has a name without an end")
    return name[:end]


def parse_read(body: memoryview) -> tuple[int, int]:
    """``offset`` and ``size`` of READ or READDIR, in bytes."""
    if len(body) < READ_IN.size:
        raise FormatError(f"READ has {len(body)} bytes of arguments")
    _fh, offset, size, *_rest = READ_IN.unpack_from(body)
    return offset, size


def parse_unique(body: memoryview) -> int:
    """The request that INTERRUPT is about."""
    if len(body) < UNIQUE_IN.size:
        raise FormatError(f"INTERRUPT has {len(body)} bytes of arguments")
    return int(UNIQUE_IN.unpack_from(body)[0])


def negotiate(offer: InitIn, *, max_readahead: int, max_pages: int, max_background: int) -> InitOut:
    """What to agree to of ``offer``. Raises :class:`FormatError` for a protocol that is not spoken here.

    A kernel with a newer *major* version expects an answer with ours and sends INIT again; none exists (7 since 2007).
    """
    if offer.major != KERNEL_VERSION or offer.minor < MINOR_MIN:
        raise FormatError(
            f"the kernel speaks FUSE {offer.major}.{offer.minor}, this program {KERNEL_VERSION}.{MINOR_MIN} or newer"
        )
    wanted = ASYNC_READ | PARALLEL_DIROPS | MAX_PAGES | NO_OPENDIR_SUPPORT | INIT_EXT | HAS_RESEND
    return InitOut(
        minor=min(offer.minor, KERNEL_MINOR_VERSION),
        flags=offer.flags & wanted,
        max_readahead=min(offer.max_readahead, max_readahead),
        max_pages=max_pages if offer.flags & MAX_PAGES else 32,
        max_background=max_background,
    )


def reply_init(unique: int, agreed: InitOut) -> bytes:
    """The answer to INIT. ``max_write`` is the least allowed: nothing is ever written."""
    body = INIT_OUT.pack(
        KERNEL_VERSION, agreed.minor, agreed.max_readahead, agreed.flags & 0xFFFFFFFF, agreed.max_background,
        agreed.max_background * 3 // 4, 4096, 1, agreed.max_pages, 0, agreed.flags >> 32, 0, 0,
    )  # fmt: skip
    return reply(unique, body)


def reply(unique: int, body: bytes | bytearray | memoryview = b"") -> bytes:
    """A successful answer with ``body``."""
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), 0, unique) + body


def reply_error(unique: int, errno: int) -> bytes:
    """An answer that fails with ``errno`` (positive)."""
    return OUT_HEADER.pack(OUT_HEADER.size, -errno, unique)


def notify(code: int, body: bytes = b"") -> bytes:
    """A notification: a message to the kernel that answers nothing."""
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), code, 0) + body


def attributes(nodeid: int, mode: int, size: int) -> bytes:
    """A fuse_attr of root's, with times zero: equal on every machine and after every restart."""
    return ATTR.pack(nodeid, size, (size + 511) // 512, 0, 0, 0, 0, 0, 0, mode, 2 if mode & S_IFDIR else 1, 0, 0, 0, 4096, 0)


def entry_out(nodeid: int, attr: bytes, *, valid: int = FOREVER) -> bytes:
    """The result of LOOKUP. ``valid`` is in seconds."""
    return ENTRY_HEAD.pack(nodeid, 0, valid, valid, 0, 0) + attr


def attr_out(attr: bytes, *, valid: int = FOREVER) -> bytes:
    """The result of GETATTR. ``valid`` is in seconds."""
    return ATTR_HEAD.pack(valid, 0, 0) + attr


def open_out(flags: int) -> bytes:
    """The result of OPEN; file handles carry no meaning here, so that they survive a restart."""
    return OPEN_OUT.pack(0, flags, 0)


def statfs_out(*, blocks: int, free: int, available: int, files: int, block_size: int) -> bytes:
    """The result of STATFS. Block counts are in units of ``block_size`` bytes."""
    return STATFS_OUT.pack(blocks, free, available, files, 0, block_size, 255, block_size, 0)


def directory(entries: Iterable[tuple[int, bytes]], offset: int, size: int) -> bytes:
    """The result of READDIR: as many ``(node id, name)`` from number ``offset`` on as fit into ``size`` bytes."""
    out = bytearray()
    for number, (nodeid, name) in enumerate(entries):
        if number < offset:
            continue
        record = DIRENT.pack(nodeid, number + 1, len(name), DT_REG) + name
        record += bytes(-len(record) % 8)
        if len(out) + len(record) > size:
            break
        out += record
    return bytes(out)


_ORDER: Final = "little" if struct.pack("=H", 1)[0] else "big"
