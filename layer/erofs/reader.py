"""Read a metadata image that :mod:`weenv.layer.erofs` has written: what the kernel does, for planes without it.

Only what the writer makes is understood (:mod:`~weenv.layer.erofs.format`). The image comes from this node's own writer, which
has refused hostile tables, but it lies on a disk that may lose parts of it: every offset is checked against the image's
length, every loop ends, and what does not fit is a :class:`~weenv.core.errors.FormatError`.

All functions take plain integers and bytes and copy little: a lookup costs some ten microseconds.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator
from typing import NamedTuple

from weenv.core.errors import FormatError
from weenv.layer.erofs import format as fmt

_SUPER = struct.Struct("<IIIBBHQQIIII16s16sIHHH")
_INODE = struct.Struct("<HHHHQIIIIqII")
_DIRENT = struct.Struct("<QHBB")
_CHUNK = struct.Struct("<HHI")
_ENTRY = struct.Struct("<BBH")
_PREFIXES = {number: name + b"." for name, number in fmt.XATTR_NAMESPACES.items()} | {
    number: name for name, number in fmt.XATTR_ACLS.items()
}
_COOKIE_BITS = 6
"""A block of 512 bytes holds fewer than 64 dirents of 12 bytes."""

HOLE = -1
"""Stream offset of a piece that reads as zeros."""


class Inode(NamedTuple):
    """An inode: ``mode`` with file type, ``size`` in bytes, ``rdev`` as stat(2) has it, ``mtime_ns`` since 1970.

    The last four say where the rest is: data layout, ``i_u``, offset of the xattrs, offset behind them.
    """

    nid: int
    mode: int
    size: int
    nlink: int
    uid: int
    gid: int
    mtime_ns: int
    rdev: int
    layout: int
    u: int
    xattrs_at: int
    body_end: int


class Piece(NamedTuple):
    """``length`` bytes of a file, at ``stream`` in the tar stream, or zeros where that is :data:`HOLE`."""

    stream: int
    length: int


class Image:
    """A metadata image in ``data`` (bytes or a mapping of the file). Raises FormatError where it is none of ours."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = data
        self.size = len(data)
        if self.size < fmt.META_START + fmt.INODE_SIZE or self.size % fmt.BLOCK:
            raise FormatError("the metadata image is too short")
        head = _SUPER.unpack_from(data, fmt.SUPER_OFFSET)
        magic, checksum, _, bits, slots, self.root, self.inodes, _, _, blocks, meta, self._shared = head[:12]
        block = bytearray(data[fmt.SUPER_OFFSET : fmt.SUPER_OFFSET + fmt.BLOCK])
        block[4:8] = bytes(4)
        if magic != fmt.SUPER_MAGIC or bits != fmt.BLOCK_BITS or slots or meta or fmt.crc32c(block) != checksum:
            raise FormatError("the metadata image's super block is damaged")
        if blocks << fmt.BLOCK_BITS != self.size:
            raise FormatError("the metadata image has another length than it says")
        self.stream_blocks = struct.unpack_from("<I", data, fmt.DEVICE_SLOT_OFFSET + 64)[0]
        if not stat.S_ISDIR(self.inode(self.root).mode):
            raise FormatError("the metadata image's root is no directory")

    def _slice(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise FormatError(f"the metadata image ends before {offset + length}")
        return bytes(self.data[offset : offset + length])

    def inode(self, nid: int) -> Inode:
        """The inode ``nid``. Raises FormatError."""
        at = nid << fmt.SLOT_BITS
        if not fmt.META_START <= at <= self.size - fmt.INODE_SIZE:
            raise FormatError(f"inode {nid} lies outside the metadata image")
        form, count, mode, _, size, u, _, uid, gid, mtime, nsec, nlink = _INODE.unpack_from(self.data, at)
        layout = form >> 1
        if not form & 1 or layout not in (fmt.LAYOUT_FLAT_PLAIN, fmt.LAYOUT_FLAT_INLINE, fmt.LAYOUT_CHUNK):
            raise FormatError(f"inode {nid} is damaged")
        xattrs_at = at + fmt.INODE_SIZE
        body_end = xattrs_at + (fmt.XATTR_HEADER + 4 * (count - 1) if count else 0)
        rdev = u if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else 0  # new_encode_dev: below 4096:1048576 as in the C library
        return Inode(nid, mode, size, nlink, uid, gid, mtime * 10**9 + nsec, rdev, layout, u, xattrs_at, body_end)

    # directories

    def _block(self, inode: Inode, number: int) -> tuple[int, int]:
        """Offset and length of block ``number`` of a directory or symlink."""
        begin = number << fmt.BLOCK_BITS
        length = min(fmt.BLOCK, inode.size - begin)
        if inode.layout == fmt.LAYOUT_FLAT_INLINE and begin + fmt.BLOCK > inode.size:
            at = inode.body_end
        else:
            at = (inode.u + number) << fmt.BLOCK_BITS
        if length <= 0 or at + length > self.size:
            raise FormatError(f"data of inode {inode.nid} lies outside the metadata image")
        return at, length

    def _count(self, at: int, length: int) -> int:
        """How many dirents begin the block: the first one's name begins where they end."""
        if length < fmt.DIRENT_SIZE:
            raise FormatError("a directory block is too short")
        first = _DIRENT.unpack_from(self.data, at)[1]
        count, rest = divmod(first, fmt.DIRENT_SIZE)
        if not count or rest or first > length:
            raise FormatError("a directory block is damaged")
        return int(count)

    def _name(self, at: int, length: int, count: int, index: int) -> tuple[int, bytes]:
        """The nid and the name of dirent ``index`` of ``count``."""
        nid, begin = _DIRENT.unpack_from(self.data, at + index * fmt.DIRENT_SIZE)[:2]
        last = index + 1 == count
        end = length if last else _DIRENT.unpack_from(self.data, at + (index + 1) * fmt.DIRENT_SIZE)[1]
        if not begin < end <= length:
            raise FormatError("a directory block is damaged")
        name = bytes(self.data[at + begin : at + end])
        return nid, name.partition(b"\0")[0] if last else name

    def lookup(self, directory: Inode, name: bytes) -> int:
        """The nid that ``name`` has in ``directory``, or 0. Raises FormatError."""
        low, high = 0, -(-directory.size >> fmt.BLOCK_BITS)
        while low < high:  # the last block whose first name is not after ``name``
            middle = (low + high) // 2
            at, length = self._block(directory, middle)
            nid, first = self._name(at, length, self._count(at, length), 0)
            if first == name:
                return nid
            if first < name:
                low = middle + 1
            else:
                high = middle
        if not low:
            return 0
        at, length = self._block(directory, low - 1)
        count = self._count(at, length)
        low, high = 1, count
        while low < high:
            middle = (low + high) // 2
            nid, found = self._name(at, length, count, middle)
            if found == name:
                return nid
            if found < name:
                low = middle + 1
            else:
                high = middle
        return 0

    def entries(self, directory: Inode, cookie: int = 0) -> Iterator[tuple[int, int, bytes]]:
        """(cookie, nid, name) of the entries behind ``cookie``, which is 0 or was given before; ``.`` and ``..`` too.

        In the image's order, by name bytes. Raises FormatError.
        """
        number, index = cookie >> _COOKIE_BITS, cookie & (1 << _COOKIE_BITS) - 1
        blocks = -(-directory.size >> fmt.BLOCK_BITS)
        while number < blocks:
            at, length = self._block(directory, number)
            count = self._count(at, length)
            for position in range(index, count):
                nid, name = self._name(at, length, count, position)
                last = position + 1 == count
                yield (number + 1 << _COOKIE_BITS if last else number << _COOKIE_BITS | position + 1), nid, name
            number, index = number + 1, 0

    # what else an inode has

    def target(self, link: Inode) -> bytes:
        """The target of a symlink. Raises FormatError."""
        if link.size > fmt.SYMLINK_MAX:
            raise FormatError(f"the target of symlink {link.nid} is too long")
        parts = []
        for number in range(-(-link.size >> fmt.BLOCK_BITS)):
            at, length = self._block(link, number)
            parts.append(self._slice(at, length))
        return b"".join(parts)

    def xattrs(self, inode: Inode) -> dict[bytes, bytes]:
        """Extended attributes with full names. Raises FormatError."""
        at, end = inode.xattrs_at, inode.body_end
        if at == end:
            return {}
        body = self._slice(at, end - at)
        shared = body[4]
        position = fmt.XATTR_HEADER + 4 * shared
        if position > len(body):
            raise FormatError(f"the extended attributes of inode {inode.nid} are damaged")
        found: dict[bytes, bytes] = {}
        for number in struct.unpack_from(f"<{shared}I", body, fmt.XATTR_HEADER):
            self._xattr((self._shared << fmt.BLOCK_BITS) + 4 * number, found)
        while position < len(body):
            position += self._xattr(at + position, found)
        return found

    def _xattr(self, at: int, found: dict[bytes, bytes]) -> int:
        name_length, index, value_length = _ENTRY.unpack(self._slice(at, _ENTRY.size))
        text = self._slice(at + _ENTRY.size, name_length + value_length)
        prefix = _PREFIXES.get(index)
        if prefix is None:
            raise FormatError("an extended attribute has an unknown prefix")
        found[prefix + text[:name_length]] = text[name_length:]
        return -(-(_ENTRY.size + len(text)) // 4) * 4

    def pieces(self, file: Inode, offset: int, length: int) -> list[Piece]:
        """Where ``length`` bytes from ``offset`` of a regular file are, in order; less at its end. Raises FormatError.

        Pieces that continue each other in the stream, or are holes side by side, are one.
        """
        end = min(offset + length, file.size)
        if file.layout != fmt.LAYOUT_CHUNK:
            return [Piece(HOLE, end - offset)] if offset < end else []
        bits = fmt.BLOCK_BITS + (file.u & 31)
        base = -(-file.body_end // 8) * 8
        found: list[Piece] = []
        while offset < end:
            number = offset >> bits
            at = base + number * _CHUNK.size
            if at + _CHUNK.size > self.size:
                raise FormatError(f"the chunks of inode {file.nid} lie outside the metadata image")
            _, _, block = _CHUNK.unpack_from(self.data, at)
            within = offset - (number << bits)
            step = min((1 << bits) - within, end - offset)
            stream = HOLE if block == fmt.NULL_BLOCK else (block << fmt.BLOCK_BITS) + within
            if stream != HOLE and stream + step > self.stream_blocks << fmt.BLOCK_BITS:
                raise FormatError(f"inode {file.nid} has data beyond the end of the stream")
            before = found[-1] if found else None
            if before is not None and stream == (HOLE if before.stream == HOLE else before.stream + before.length):
                found[-1] = Piece(before.stream, before.length + step)
            else:
                found.append(Piece(stream, step))
            offset += step
        return found
