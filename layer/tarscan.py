"""Tar stream -> members, without I/O: bytes are fed in, one :class:`Member` per entry comes out.

What a header means follows Go's ``archive/tar`` reader (src/archive/tar/reader.go, strconv.go, format.go), because that is
what containerd unpacks with; where POSIX, GNU tar and Go disagree, Go wins. The formats: POSIX.1-2001 pax ("ustar",
"x" and "g" headers), the GNU manual's "Basic Tar Format", "Storing Sparse Files", star's variant of ustar, V7.

What follows from that:

- PAX *global* records ("g") change no later member: Go hands them out as a member of their own, and containerd's unpack
  only makes its parents and removes what has its name (:data:`GLOBAL`). Records pending from an "x", "L" or "K" header
  before a "g" are lost.
- Only ``SCHILY.xattr.*`` records are extended attributes; ``LIBARCHIVE.xattr.*`` and ``SCHILY.acl.*`` are ignored.
- Links, devices, directories and fifos have no payload, whatever their size field says.
- The archive ends at two zero blocks, or at the end of the stream where a header would begin (also after one zero block).
  What follows the two zero blocks is part of the stream and means nothing. Go also takes an end within the padding of the
  last payload; that is an :class:`UnsupportedError` here, because EROFS reads whole blocks of 512 bytes.
- Types that Go's reader passes on but containerd cannot unpack: contiguous files ("7") and old GNU sparse files ("S") are
  handed out as files, as tar does; every other type is an :class:`UnsupportedError`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple, TypeVar
from zlib import adler32

from weenv.core.errors import FormatError, LimitError, UnsupportedError
from weenv.layer.limits import DEFAULT_LIMITS, Limits
from weenv.layer.tarfields import (
    XATTR_PREFIX,
    bounded_time,
    decimal,
    mistaken_prefix,
    numeric,
    octal,
    pax_records,
    pax_time,
    star_prefix,
)
from weenv.layer.toc import BLOCK, CHAR, DIRECTORY, FIFO, FILE, HARDLINK, NO_DATA, SYMLINK

T = TypeVar("T")

BLOCK_SIZE = 512
GLOBAL = 7
"""Member kind of a PAX global header; the others are the entry kinds of :mod:`weenv.layer.toc`."""

UNCHANGED_ID = 0xFFFF_FFFF
"""A uid or gid that chown(2) takes as "leave it": -1 modulo 2^32."""


class Member(NamedTuple):
    """One member, as the archive gives it; the meaning of its path is the tree's business.

    =========  ======================================================================================
    name       bytes as stored: not normalised, may begin with ``/`` or ``./``, end with ``/``
    kind       FILE ... FIFO of :mod:`weenv.layer.toc`, or :data:`GLOBAL`
    mode       07777 bits
    uid, gid   modulo 2^32, as chown(2) takes them; :data:`UNCHANGED_ID` leaves the id as it is
    mtime      seconds, 0 where the archive has a time before 1970 or after 2262 (:data:`~weenv.layer.tarfields.MAX_MTIME`)
    mtime_ns   0 ... 999 999 999
    size       FILE: bytes of content, holes included; else 0
    link       SYMLINK: its target; HARDLINK: the member it links to, as stored
    rdev       CHAR, BLOCK: major << 32 | minor, cut to 12 and 20 bits as mknod(2) cuts them; else 0
    xattrs     full names to values, in no order, as stored; None where there are none
    offset     FILE: stream offset of the payload, NO_DATA where it has none; of no use where ``sparse``
    sparse     None, or the (logical, stream, length) pieces of a sparse FILE with data, all in bytes: in order, not
               touching, 512-aligned but for the length of a piece that ends the file
    =========  ======================================================================================
    """

    name: bytes
    kind: int
    mode: int
    uid: int
    gid: int
    mtime: int
    mtime_ns: int
    size: int
    link: bytes
    rdev: int
    xattrs: dict[bytes, bytes] | None
    offset: int
    sparse: tuple[tuple[int, int, int], ...] | None


def show(name: bytes) -> str:
    """A member's name for messages: one line, no control characters, 200 characters at most."""
    text = name[:400].decode("utf-8", "backslashreplace")
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return text if len(text) <= 200 else text[:197] + "..."


# Offsets of POSIX ustar's fields: name 0, mode 100, uid 108 and gid 116 (taken as one), size 124, mtime 136, chksum 148,
# typeflag 156, linkname 157, magic 257 and version 263 (one), devmajor 329 and devminor 337 (one), prefix 345, 12 of padding.
_HEADER = struct.Struct("100s24s12s12s8sB100s8s64x16s155s12s")
_ZERO = bytes(BLOCK_SIZE)
_GNU = b"ustar  \0"
_KINDS = {0x30: FILE, 0x31: HARDLINK, 0x32: SYMLINK, 0x33: CHAR, 0x34: BLOCK, 0x35: DIRECTORY, 0x36: FIFO, 0x37: FILE}
_OLD_SPARSE = 0x53
_SPECIAL = frozenset(b"xgLK")
_CACHE = 1 << 16
"""Entries of each cache of decoded fields: they make the usual header cheap and must not grow with the archive."""

# What the scanner is collecting bytes for.
_AT_HEADER, _AT_SPECIAL, _AT_SPARSE_EXTENSION, _AT_SPARSE_MAP = range(4)


class _Header:
    """A header that needs more than the fast path: its fields while extension records are merged in."""

    __slots__ = ("gid", "link", "mode", "mtime", "mtime_ns", "name", "rdev", "size", "typeflag", "uid", "xattrs")

    name: bytes
    typeflag: int
    mode: int
    uid: int
    gid: int
    mtime: int
    mtime_ns: int
    size: int
    link: bytes
    rdev: int
    xattrs: dict[bytes, bytes] | None


class TarScanner:
    """Feeds on a tar stream and hands every member to ``sink`` as soon as its header is complete.

    ``payloads`` grows with the scan: one (stream offset, length) per file payload of at least ``min_payload`` bytes, in
    stream order, whole with its sparse map where it has one in band. A payload is listed before :meth:`feed` returns
    from the call that brought the last byte of its header, hence before any byte after it need be framed. The offset of
    the last one moves on while extension blocks of an old GNU sparse header follow. The consumer may delete from the front.

    ``offset`` is the number of bytes fed so far; ``ended`` is true behind the two zero blocks. The cost is per header:
    payloads are skipped by length and never copied. Errors name the member at fault; the scanner is of no use
    after one. What ``sink`` raises passes through.
    """

    def __init__(self, sink: Callable[[Member], None], limits: Limits = DEFAULT_LIMITS, *, min_payload: int = 1) -> None:
        self.payloads: list[tuple[int, int]] = []
        self.offset = 0
        self.ended = False
        self._sink = sink
        self._limits = limits
        self._most = limits.max_stream
        self._min_payload = min_payload
        self._members = 0
        self._skip = 0  # bytes of payload and padding before the next header
        self._padding = 0  # how many of them, at the end, are padding
        self._name = b""  # the member that _skip belongs to
        self._held = bytearray()  # the part of what is being collected that came with earlier calls
        self._state = _AT_HEADER
        self._want = BLOCK_SIZE
        self._zero_seen = False
        # Extension headers that wait for their member: PAX records, GNU long name and long link.
        self._pending = False
        self._pax: dict[bytes, bytes] = {}
        self._long_name = b""
        self._long_link = b""
        # The header whose special payload or sparse map is being collected.
        self._header = _Header()
        self._stored = 0
        self._map: list[tuple[int, int]] = []
        self._map_text = bytearray()
        self._map_lines = 0
        self._map_count = -1
        self._owners: dict[bytes, tuple[int, int, int]] = {}
        self._times: dict[bytes, tuple[int, int]] = {}
        self._sums: dict[bytes, int] = {}
        self._devices: dict[bytes, tuple[int, int]] = {}

    # -- the stream

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes of the stream; pieces of 64 KiB and more cost least. Raises :class:`FormatError`."""
        size, start, position = len(data), self.offset, 0
        if start + size > self._most:
            raise LimitError(f"the tar stream is longer than {self._most} bytes", member=show(self._name))
        skip = self._skip
        while position < size:
            if skip:
                if skip >= size - position:
                    skip -= size - position
                    break
                position += skip
                skip = 0
            if self.ended:
                break
            if self._state or self._held or size - position < BLOCK_SIZE:
                take = min(self._want - len(self._held), size - position)
                self._held += data[position : position + take]
                position += take
                if len(self._held) < self._want:
                    break
                collected = bytes(self._held)
                self._held.clear()
                if self._state == _AT_HEADER:
                    skip = self._block(collected, 0, start + position)
                else:
                    skip = self._collected(collected, start + position)
            else:
                position += BLOCK_SIZE
                skip = self._block(data, position - BLOCK_SIZE, start + position)
        self._skip = skip
        self.offset = start + size

    def close(self) -> None:
        """The stream is over. Raises :class:`FormatError` where it ends within a header, a payload or its padding."""
        if self.ended:
            return
        if self._skip > self._padding:
            missing = self._skip - self._padding
            raise FormatError(f"the tar stream ends {missing} bytes before the end of this member", member=show(self._name))
        if self._skip:
            raise UnsupportedError("the tar stream ends within the padding of this member", member=show(self._name))
        if self._state != _AT_HEADER:
            raise FormatError("the tar stream ends within this member's extension header", member=show(self._name))
        if self._held:
            what = "the tar stream ends within a header" if self._name else "is no tar: it ends within a header"
            raise FormatError(what + self._after())
        self.ended = True

    def _after(self) -> str:
        return f" (after {show(self._name)})" if self._name else ""

    # -- one header block

    def _block(self, data: bytes | bytearray | memoryview, at: int, end: int) -> int:
        """Interpret the header block at ``data[at:]``, which ends at stream offset ``end``: bytes to skip after it."""
        name, owner_f, size_f, mtime_f, sum_f, typeflag, link, magic, device_f, prefix, tail = _HEADER.unpack_from(data, at)
        if name[0] == 0 and bytes(data[at : at + BLOCK_SIZE]) == _ZERO:
            self.ended = self._zero_seen
            self._zero_seen = True
            return 0
        # adler32's low half is 1 + the sum of the bytes, modulo 65521, which 256 bytes cannot reach.
        half = at + 256
        total = (adler32(data[at:half]) & 0xFFFF) + (adler32(data[half : half + 256]) & 0xFFFF)
        if self._zero_seen or self._sums.get(sum_f) != total:
            self._check_sum(bytes(data[at : at + BLOCK_SIZE]), sum_f, total)
        name = name.partition(b"\0")[0]
        try:
            digits = size_f[:11]
            size = int(digits, 8) if digits.isdigit() and size_f[11] in b"\0 " else numeric(size_f)
            owner = self._owners.get(owner_f)
            if owner is None:
                uid, gid = numeric(owner_f[8:16]) & 0xFFFF_FFFF, numeric(owner_f[16:]) & 0xFFFF_FFFF
                owner = _remember(self._owners, owner_f, (numeric(owner_f[:8]) & 0o7777, uid, gid))
            mtime = self._times.get(mtime_f)
            if mtime is None:
                mtime = _remember(self._times, mtime_f, bounded_time(numeric(mtime_f) * 1_000_000_000))
            if magic[:6] == b"ustar\0":
                if device_f not in self._devices:
                    _remember(self._devices, device_f, (numeric(device_f[:8]), numeric(device_f[8:])))
                if tail[8:] == b"tar\0":  # star: the last 24 bytes of the prefix are access and change time
                    prefix = star_prefix(prefix)
                if prefix[0]:
                    name = prefix.partition(b"\0")[0] + b"/" + name
            elif magic == _GNU:
                if device_f not in self._devices:
                    _remember(self._devices, device_f, (numeric(device_f[:8]), numeric(device_f[8:])))
                if (prefix[0] or prefix[12]) and (text := mistaken_prefix(prefix)):
                    name = text + b"/" + name
            else:
                device_f = b""  # V7 has none
        except ValueError as error:
            raise FormatError(f"malformed tar header: {error}", member=show(name)) from error

        if size < 0 and not 0x31 <= typeflag <= 0x36:
            raise FormatError("malformed tar header: negative size", member=show(name))
        if typeflag == 0x30 and not self._pending:
            self._count(name)
            if size:
                if size > self._most:
                    raise self._too_long(name, size)
                member = Member(name, FILE, *owner, *mtime, size, b"", 0, None, end, None)
                if size >= self._min_payload:
                    self.payloads.append((end, size))
            else:
                member = Member(name, FILE, *owner, *mtime, 0, b"", 0, None, NO_DATA, None)
            self._name = name
            self._padding = padding = -size % BLOCK_SIZE
            self._sink(member)
            return size + padding

        header = _Header()
        header.name, header.typeflag = name, typeflag
        header.mode, header.uid, header.gid = owner
        header.mtime, header.mtime_ns = mtime
        header.size = size
        header.link = link.partition(b"\0")[0]
        header.xattrs = None
        header.rdev = 0
        if 0x33 <= typeflag <= 0x36 and typeflag != 0x35:
            major, minor = self._devices.get(device_f, (0, 0))
            if not (0 <= major < 1 << 32 and 0 <= minor < 1 << 32):
                raise FormatError(f"device number {major}:{minor} is out of range", member=show(name))
            if typeflag != 0x36:
                header.rdev = (major & 0xFFF) << 32 | minor & 0xF_FFFF
        if typeflag in _SPECIAL:
            return self._begin_special(header, end)
        if self._pending:
            self._merge(header)
        if typeflag == 0:  # V7: a directory is told by its trailing slash
            header.typeflag = 0x35 if header.name.endswith(b"/") else 0x30
        return self._begin_member(header, bytes(data[at : at + BLOCK_SIZE]) if typeflag == _OLD_SPARSE else b"", end)

    def _check_sum(self, block: bytes, sum_f: bytes, total: int) -> None:
        """Compare the checksum field with the block, its own bytes counted as spaces; Sun's tar summed signed bytes."""
        if self._zero_seen:
            raise FormatError("malformed tar stream: one zero block and then another header" + self._after())
        try:
            expected = octal(sum_f)
        except ValueError:
            expected = -1
        counted = block[:148] + b"        " + block[156:]
        unsigned = sum(counted)
        if expected == unsigned:
            _remember(self._sums, sum_f, total)
        elif expected < 0 or expected != unsigned - 256 * sum(byte >> 7 for byte in counted):
            raise FormatError(
                "malformed tar header: wrong checksum" + self._after(), hint="this is not a tar stream, or it is damaged"
            )

    def _count(self, name: bytes) -> None:
        self._members += 1
        if self._members > self._limits.max_entries:
            raise LimitError(f"the tar stream has more than {self._limits.max_entries} members", member=show(name))

    # -- extension headers

    def _begin_special(self, header: _Header, end: int) -> int:
        size = header.size
        self._name = header.name
        if size > self._limits.max_pax_header:
            raise LimitError(f"an extension header of {size} bytes", member=show(header.name))
        self._count(header.name)
        self._header = header
        self._state, self._want = _AT_SPECIAL, size
        return 0 if size else self._collected(b"", end)

    def _collected(self, data: bytes, end: int) -> int:
        """All ``_want`` bytes of an extension header, sparse extension block or sparse map block are there."""
        if self._state == _AT_SPARSE_EXTENSION:
            return self._old_sparse_extension(data, end)
        if self._state == _AT_SPARSE_MAP:
            return self._sparse_map_block(data, end)
        self._state, self._want = _AT_HEADER, BLOCK_SIZE
        self._padding = padding = -len(data) % BLOCK_SIZE
        header = self._header
        typeflag = header.typeflag
        if typeflag == 0x4C:
            self._long_name = data.partition(b"\0")[0]
        elif typeflag == 0x4B:
            self._long_link = data.partition(b"\0")[0]
        else:
            try:
                self._pax = pax_records(data)
            except ValueError as error:
                raise FormatError(f"malformed PAX header: {error}", member=show(header.name)) from error
            if typeflag == 0x67:
                name = self._pax.get(b"path") or header.name
                self._forget()
                self._sink(Member(name, GLOBAL, 0, 0, 0, 0, 0, 0, b"", 0, None, NO_DATA, None))
                return padding
        self._pending = True
        return padding

    def _forget(self) -> None:
        self._pending = False
        self._pax, self._long_name, self._long_link = {}, b"", b""

    def _merge(self, header: _Header) -> None:
        """Apply the pending extension records; an empty PAX value keeps the header's."""
        pax = self._pax
        try:
            for key, value in pax.items():
                if key.startswith(XATTR_PREFIX):  # containerd sets empty ones too
                    if header.xattrs is None:
                        header.xattrs = {}
                    header.xattrs[key[len(XATTR_PREFIX) :]] = value
                elif not value:
                    continue
                elif key == b"path":
                    header.name = value
                elif key == b"linkpath":
                    header.link = value
                elif key == b"size":
                    header.size = decimal(value)
                elif key == b"uid":
                    header.uid = decimal(value) & 0xFFFF_FFFF
                elif key == b"gid":
                    header.gid = decimal(value) & 0xFFFF_FFFF
                elif key == b"mtime":
                    header.mtime, header.mtime_ns = bounded_time(pax_time(value))
                elif key in (b"atime", b"ctime"):
                    pax_time(value)  # not kept, but Go refuses a malformed one
        except ValueError as error:
            raise FormatError(f"malformed PAX header: {error}", member=show(header.name)) from error
        if header.xattrs is not None and len(header.xattrs) > self._limits.max_xattrs_per_entry:
            raise LimitError(f"{len(header.xattrs)} extended attributes", member=show(header.name))
        if self._long_name:
            header.name = self._long_name
        if self._long_link:
            header.link = self._long_link

    # -- members off the fast path

    def _begin_member(self, header: _Header, block: bytes, end: int) -> int:
        pax = self._pax
        self._forget()
        self._name = header.name
        typeflag = header.typeflag
        has_payload = not 0x31 <= typeflag <= 0x36
        stored = header.size if has_payload else 0
        if stored < 0:
            raise FormatError("malformed tar header: negative size", member=show(header.name))
        if typeflag not in _KINDS and typeflag != _OLD_SPARSE:
            raise UnsupportedError(
                f"tar member type {chr(typeflag)!r} is none that a container runtime unpacks", member=show(header.name)
            )
        self._count(header.name)
        if stored > self._most:
            raise self._too_long(header.name, stored)
        self._header, self._stored, self._map = header, stored, []
        if stored and stored >= self._min_payload:
            self.payloads.append((end, stored))
        if typeflag == _OLD_SPARSE:
            return self._old_sparse(header, block, end)
        if pax and (in_band := self._pax_sparse(header, pax)) is not None:
            if not has_payload:
                raise FormatError("malformed tar header: a sparse member without payload", member=show(header.name))
            self._name = header.name
            if in_band:
                self._map_lines, self._map_count = 0, -1
                self._state, self._want = _AT_SPARSE_MAP, BLOCK_SIZE
                return self._sparse_map_needs()
            return self._sparse_member(end)
        self._padding = -stored % BLOCK_SIZE
        self._emit(end if stored else NO_DATA, None)
        return stored + self._padding

    def _too_long(self, name: bytes, size: int) -> LimitError:
        """Said at the header: what a consumer does for a payload may depend on its stated length."""
        return LimitError(f"a member of {size} bytes; a tar stream may have {self._most}", member=show(name))

    def _emit(self, offset: int, sparse: tuple[tuple[int, int, int], ...] | None) -> None:
        header = self._header
        kind = _KINDS.get(header.typeflag, FILE)
        self._sink(
            Member(
                header.name, kind, header.mode, header.uid, header.gid, header.mtime, header.mtime_ns,
                header.size if kind == FILE else 0, header.link if kind in (SYMLINK, HARDLINK) else b"",
                header.rdev, header.xattrs, offset, sparse,
            )
        )  # fmt: skip

    # -- sparse files

    def _old_sparse(self, header: _Header, block: bytes, end: int) -> int:
        """GNU "S": four map entries at 386, "more" at 482, the real size at 483."""
        if block[257:265] != _GNU:
            raise FormatError("malformed tar header: a sparse member that is not GNU tar's", member=show(header.name))
        try:
            header.size = numeric(block[483:495])
        except ValueError as error:
            raise FormatError(f"malformed tar header: {error}", member=show(header.name)) from error
        self._old_sparse_entries(block[386:482])
        return self._old_sparse_next(block[482], end)

    def _old_sparse_extension(self, data: bytes, end: int) -> int:
        """21 more entries, "more" at 504; these blocks are not counted in the header's size."""
        self._old_sparse_entries(data[:504])
        return self._old_sparse_next(data[504], end)

    def _old_sparse_entries(self, table: bytes) -> None:
        try:
            for at in range(0, len(table), 24):
                if table[at] == 0:
                    break
                self._map.append((numeric(table[at : at + 12]), numeric(table[at + 12 : at + 24])))
        except ValueError as error:
            raise FormatError(f"malformed sparse map: {error}", member=show(self._name)) from error
        self._check_map_size(len(self._map))

    def _old_sparse_next(self, more: int, end: int) -> int:
        if more:
            self._state, self._want = _AT_SPARSE_EXTENSION, BLOCK_SIZE
            if self.payloads and self.payloads[-1][0] == end:  # the payload begins behind the extension blocks
                self.payloads[-1] = (end + BLOCK_SIZE, self.payloads[-1][1])
            return 0
        self._state = _AT_HEADER
        return self._sparse_member(end)

    def _pax_sparse(self, header: _Header, pax: dict[bytes, bytes]) -> bool | None:
        """None: not sparse. False: the map is in the records (0.0, 0.1). True: it begins the payload (1.0)."""
        version = (pax.get(b"GNU.sparse.major", b""), pax.get(b"GNU.sparse.minor", b""))
        if version == (b"1", b"0"):
            in_band = True
        elif version in ((b"0", b"0"), (b"0", b"1")) or (version == (b"", b"") and pax.get(b"GNU.sparse.map")):
            in_band = False
        else:
            return None
        try:
            if name := pax.get(b"GNU.sparse.name"):
                header.name = name
            if real := pax.get(b"GNU.sparse.size") or pax.get(b"GNU.sparse.realsize"):
                header.size = decimal(real)
            if not in_band:
                count = decimal(pax.get(b"GNU.sparse.numblocks", b""))
                text = pax.get(b"GNU.sparse.map", b"")
                numbers = [decimal(part) for part in text.split(b",")] if text else []
                if count < 0 or len(numbers) != 2 * count:
                    raise ValueError("its length is not what it says")
                self._check_map_size(count)
                self._map = list(zip(numbers[::2], numbers[1::2], strict=True))
        except ValueError as error:
            raise FormatError(f"malformed sparse map: {error}", member=show(header.name)) from error
        return in_band

    def _sparse_map_needs(self) -> int:
        """Collect one more block of a format 1.0 map: the payload must have it."""
        if self._stored < BLOCK_SIZE:
            raise FormatError("malformed sparse map: longer than the member", member=show(self._name))
        self._stored -= BLOCK_SIZE
        return 0

    def _sparse_map_block(self, data: bytes, end: int) -> int:
        """Format 1.0: the number of pieces, then offset and length of each, a decimal number a line, padded to a block."""
        text = self._map_text
        text += data
        if len(text) > self._limits.max_pax_header:
            raise LimitError(f"a sparse map of more than {self._limits.max_pax_header} bytes", member=show(self._name))
        lines = data.count(b"\n")
        self._map_lines += lines
        try:
            if self._map_count < 0 and lines:
                self._map_count = decimal(bytes(text[: text.find(b"\n")]))
                if self._map_count < 0:
                    raise ValueError("negative length")
                self._check_map_size(self._map_count)
            count = self._map_count
            if count < 0 or self._map_lines < 2 * count + 1:
                return self._sparse_map_needs()
            numbers = [decimal(part) for part in bytes(text).split(b"\n", 2 * count + 1)[1:-1]]
        except ValueError as error:
            raise FormatError(f"malformed sparse map: {error}", member=show(self._name)) from error
        self._map = list(zip(numbers[::2], numbers[1::2], strict=True))
        self._map_text = bytearray()
        self._state = _AT_HEADER
        return self._sparse_member(end)

    def _check_map_size(self, count: int) -> None:
        if count > self._limits.max_sparse_chunks:
            raise LimitError(f"a sparse map of {count} pieces", member=show(self._name))

    def _sparse_member(self, end: int) -> int:
        """The map is complete; the data of all pieces lies at ``end``, one behind the other."""
        header, stored = self._header, self._stored
        self._padding = -stored % BLOCK_SIZE
        pieces: list[tuple[int, int, int]] = []
        reached, stream = 0, end
        for logical, length in self._map:
            if logical < reached or length < 0 or logical + length > header.size:
                raise FormatError("malformed sparse map: pieces overlap or leave the file", member=show(header.name))
            reached = logical + length
            if length:
                if pieces and pieces[-1][0] + pieces[-1][2] == logical:
                    pieces[-1] = (pieces[-1][0], pieces[-1][1], pieces[-1][2] + length)
                else:
                    pieces.append((logical, stream, length))
                stream += length
        self._map = []
        if header.size < 0 or stream - end != stored:
            raise FormatError("malformed sparse map: it does not add up to the data stored", member=show(header.name))
        for logical, at, length in pieces:
            if logical % BLOCK_SIZE or at % BLOCK_SIZE or (length % BLOCK_SIZE and logical + length != header.size):
                raise UnsupportedError("a sparse member whose pieces are not multiples of 512 bytes", member=show(header.name))
        if not pieces:
            self._emit(NO_DATA, None)
        elif len(pieces) == 1 and pieces[0][2] == header.size:
            self._emit(end, None)
        else:
            self._emit(NO_DATA, tuple(pieces))
        return stored + self._padding


def _remember(cache: dict[bytes, T], key: bytes, value: T) -> T:
    """Put a decoded field into its cache, which is emptied when it is full."""
    if len(cache) >= _CACHE:
        cache.clear()
    cache[key] = value
    return value
