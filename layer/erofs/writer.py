"""The ``write_*`` passes: fill an image that :mod:`weenv.layer.erofs.layout` has laid out.

Fixed-size records are scattered through typed views of the one buffer; names go by slices, one for each run of names that
is contiguous in the pool and within a block (the encoder writes names in entry order: about one slice a directory).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weenv.core.errors import FormatError
from weenv.layer.erofs import format as fmt
from weenv.layer.erofs.check import member_name
from weenv.layer.erofs.layout import I64, Chunks, Directories, Inodes
from weenv.layer.erofs.xattrs import XattrPlan
from weenv.layer.toc import BLOCK, CHAR, DIRECTORY, FIFO, FILE, HARDLINK, SYMLINK, Toc

_TYPE_BITS = np.zeros(8, dtype=np.uint16)
_TYPE_BITS[[FILE, DIRECTORY, SYMLINK, CHAR, BLOCK, FIFO]] = [0o100000, 0o040000, 0o120000, 0o020000, 0o060000, 0o010000]


@dataclass(frozen=True, slots=True)
class Attributes:
    """What the entries' inodes say of owner, mode and time: the table's columns, with overrides applied."""

    mode: NDArray[np.uint16]
    uid: NDArray[np.uint32]
    gid: NDArray[np.uint32]
    mtime: NDArray[np.int64]
    mtime_ns: NDArray[np.uint32]


class Image:
    """The buffer (512-byte multiple, zeroed) and its views of 4 and 8 bytes."""

    def __init__(self, size: int) -> None:
        self.buffer = bytearray(size)
        self.bytes = memoryview(self.buffer)
        self.words: NDArray[np.uint32] = np.frombuffer(self.buffer, dtype="<u4")
        self.longs: NDArray[np.uint64] = np.frombuffer(self.buffer, dtype="<u8")

    def finish(self) -> bytearray:
        """Give up the views and return the buffer."""
        del self.words, self.longs
        self.bytes.release()
        return self.buffer


def write_inodes(
    image: Image, toc: Toc, attributes: Attributes, xattrs: XattrPlan, directories: Directories, chunks: Chunks, inodes: Inodes
) -> int:
    """Write the fixed part of every inode; returns how many there are."""
    e = toc.entries
    n = len(e)
    nlink = np.ones(n, dtype=np.int64)
    hard = np.flatnonzero(e.kind == HARDLINK)
    if len(hard):
        nlink += np.bincount(e.aux[hard].astype(np.int64), minlength=n)
    nlink[directories.dirs] = 2 + directories.subdirectories

    layout = np.where(inodes.inline, fmt.LAYOUT_FLAT_INLINE, fmt.LAYOUT_FLAT_PLAIN)
    layout[chunks.count > 0] = fmt.LAYOUT_CHUNK
    size = np.where((e.kind == FILE) | (e.kind == SYMLINK), e.size, np.uint64(0))
    size[directories.dirs] = directories.size
    u = inodes.block.astype(np.uint32)
    chunked = np.flatnonzero(chunks.count)
    u[chunked] = chunks.shift[chunked] | fmt.CHUNK_INDEXES
    devices = np.flatnonzero((e.kind == CHAR) | (e.kind == BLOCK))
    u[devices] = _encode_device(e.aux[devices])

    own = np.flatnonzero(e.kind != HARDLINK)
    table = np.zeros(len(own), dtype=fmt.INODE)
    table["format"] = 1 | layout[own] << 1
    if xattrs.bodies:
        body = xattrs.sizes[xattrs.set_of[own]]
        table["xattr_count"] = np.where(body > 0, (body - fmt.XATTR_HEADER) // 4 + 1, 0)
    table["mode"] = attributes.mode[own] | _TYPE_BITS[e.kind[own]]
    table["size"] = size[own]
    table["u"] = u[own]
    table["ino"] = np.arange(1, len(own) + 1)
    table["uid"] = attributes.uid[own]
    table["gid"] = attributes.gid[own]
    table["mtime"] = attributes.mtime[own]
    table["mtime_ns"] = attributes.mtime_ns[own]
    table["nlink"] = nlink[own]
    rows = table.view("<u8").reshape(len(own), fmt.INODE_SIZE // 8)
    at = inodes.position[own] >> 3
    for column in range(6):  # the last two are reserved, zero
        image.longs[at + column] = rows[:, column]
    return len(own)


def _encode_device(number: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """``new_encode_dev`` of ``include/linux/kdev_t.h``: 12 bits of major between 8 low and 12 high bits of minor."""
    major, minor = (number >> np.uint64(32)).astype(np.uint32), number.astype(np.uint32)
    encoded = (minor & 0xFF) | (major << 8) | ((minor & 0xFFF00) << 12)
    return encoded.astype(np.uint32)


def write_chunks(image: Image, chunks: Chunks, body_end: I64) -> None:
    """Write the chunk indexes; ``body_end`` i64[n] is the byte offset behind each inode and its xattrs."""
    at = body_end[chunks.single] + 7 >> 3
    image.longs[at] = chunks.single_block.astype(np.uint64) << np.uint64(32) | np.uint64(fmt.TAR_DEVICE << 16)
    if len(chunks.mapped):
        count = chunks.count[chunks.mapped]
        rank = np.arange(len(chunks.values), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
        at = np.repeat(body_end[chunks.mapped] + 7 >> 3, count) + rank
        device = np.where(chunks.values == fmt.NULL_BLOCK, np.uint64(0), np.uint64(fmt.TAR_DEVICE << 16))
        image.longs[at] = chunks.values.astype(np.uint64) << np.uint64(32) | device


def write_directories(image: Image, toc: Toc, d: Directories, inodes: Inodes, body_end: I64) -> None:
    """Write every directory block: the dirents, then their names."""
    base = (inodes.block[d.dirs][d.of] + d.rank) << fmt.BLOCK_BITS
    tail = (d.tail[d.of] > 0) & (d.rank == d.blocks[d.of])
    base[tail] = body_end[d.dirs][d.of[tail]]

    total = len(d.entry)
    count = np.diff(d.first)
    spent = d.cost[d.first[:-1]]
    header = np.arange(total, dtype=np.int64) * fmt.DIRENT_SIZE
    first_header = d.first[:-1] * fmt.DIRENT_SIZE
    at = header + np.repeat(base - first_header, count)
    name_in_block = d.cost[:-1] - header + np.repeat(fmt.DIRENT_SIZE * count - (spent - first_header), count)
    word = at >> 2
    image.words[word] = inodes.position[d.entry] >> fmt.SLOT_BITS
    image.words[word + 2] = name_in_block.astype(np.uint32) | d.file_type << np.uint32(16)

    name_at = name_in_block + np.repeat(base, count)
    buffer = np.frombuffer(image.buffer, dtype=np.uint8)
    for position, letters in ((d.dot, 1), (d.dotdot, 2)):
        for letter in range(letters):
            buffer[name_at[position] + letter] = ord(".")

    breaks = np.ones(total, dtype=np.bool_)
    breaks[1:] = d.name_off[1:] != d.name_off[:-1] + d.name_len[:-1]
    breaks[d.first[:-1]] = True
    runs = np.flatnonzero(breaks)
    names = d.cost - np.append(header, total * fmt.DIRENT_SIZE)
    length = np.diff(names[np.append(runs, total)])
    kept = d.name_off[runs] >= 0
    target, pool = image.bytes, toc.pool
    starts, lengths = d.name_off[runs][kept], length[kept]
    for to, start, size in zip(name_at[runs][kept].tolist(), starts.tolist(), lengths.tolist(), strict=True):
        piece = pool[start : start + size]
        if b"/" in piece or b"\0" in piece:
            raise _bad_name(toc)
        target[to : to + size] = piece


def _bad_name(toc: Toc) -> FormatError:
    for entry in range(1, len(toc.entries)):
        if {0, ord("/")} & set(toc.name(entry)):
            return FormatError("a name with a slash or a NUL in it", member=member_name(toc, entry))
    return FormatError("a name with a slash or a NUL in it")


def write_symlinks(image: Image, toc: Toc, inodes: Inodes, body_end: I64) -> None:
    """Write every symlink's target, behind its inode or in blocks of its own."""
    e, pool, target = toc.entries, toc.pool, image.bytes
    links = np.flatnonzero(e.kind == SYMLINK)
    at = np.where(inodes.inline[links], body_end[links], inodes.block[links] << fmt.BLOCK_BITS)
    for number, (to, start, size) in enumerate(zip(at.tolist(), e.aux[links].tolist(), e.size[links].tolist(), strict=True)):
        piece = pool[start : start + size]
        if b"\0" in piece:
            raise FormatError("a symlink target with a NUL in it", member=member_name(toc, int(links[number])))
        target[to : to + size] = piece


def write_xattrs(image: Image, xattrs: XattrPlan, inodes: Inodes) -> None:
    """Write the body behind every inode that has attributes, and the shared area."""
    owners = np.flatnonzero(xattrs.set_of)
    order = owners[np.argsort(xattrs.set_of[owners], kind="stable")]
    bounds = np.searchsorted(xattrs.set_of[order], np.arange(1, len(xattrs.bodies) + 2)).tolist()
    at = inodes.position[order] + fmt.INODE_SIZE
    for number, body in enumerate(xattrs.bodies):
        low, high = bounds[number], bounds[number + 1]
        if high - low == 1:
            place = int(at[low])
            image.bytes[place : place + len(body)] = body
        else:
            words = np.frombuffer(body, dtype="<u4")
            places = at[low:high] >> 2
            for index, value in enumerate(words):
                image.words[places + index] = value
    image.bytes[inodes.shared_start : inodes.shared_start + len(xattrs.shared)] = xattrs.shared


def write_super(image: Image, toc: Toc, inodes: Inodes, count: int, variant: bytes) -> None:
    """Write the device slot, then the super block with its checksum. ``variant`` tells images of one layer apart."""
    slot = np.zeros(1, dtype=fmt.DEVICE_SLOT)
    slot["tag"] = np.void(toc.diff_id.rpartition(":")[2].encode()[:64])
    slot["blocks"] = -(-toc.stream_size // fmt.BLOCK)
    image.bytes[fmt.DEVICE_SLOT_OFFSET : fmt.DEVICE_SLOT_OFFSET + fmt.DEVICE_SLOT_SIZE] = slot.tobytes()

    identity = bytearray(hashlib.sha256(b"weenv erofs 1\0" + toc.diff_id.encode() + b"\0" + variant).digest()[:16])
    identity[6] = identity[6] & 0x0F | 0x80  # RFC 9562: version 8, a UUID of the maker's own making
    identity[8] = identity[8] & 0x3F | 0x80
    fields: Mapping[str, int | np.void] = {
        "magic": fmt.SUPER_MAGIC,
        "feature_compat": fmt.COMPAT_SB_CHKSUM | fmt.COMPAT_MTIME,
        "block_bits": fmt.BLOCK_BITS,
        "root_nid": int(inodes.position[0]) >> fmt.SLOT_BITS,
        "inodes": count,
        "blocks": inodes.total >> fmt.BLOCK_BITS,
        "xattr_block": inodes.shared_start >> fmt.BLOCK_BITS,
        "uuid": np.void(bytes(identity)),
        "feature_incompat": fmt.INCOMPAT_CHUNKED_FILE | fmt.INCOMPAT_DEVICE_TABLE,
        "extra_devices": 1,
        "device_slot": fmt.DEVICE_SLOT_OFFSET // fmt.DEVICE_SLOT_SIZE,
    }
    head = np.zeros(1, dtype=fmt.SUPER)
    for name, value in fields.items():
        head[name] = value
    image.bytes[fmt.SUPER_OFFSET : fmt.SUPER_OFFSET + 128] = head.tobytes()
    # erofs_superblock_csum_verify (fs/erofs/super.c): the block that holds the super block, its checksum taken as zero.
    head["checksum"] = fmt.crc32c(image.bytes[fmt.SUPER_OFFSET : fmt.SUPER_OFFSET + fmt.BLOCK])
    image.bytes[fmt.SUPER_OFFSET : fmt.SUPER_OFFSET + 128] = head.tobytes()
