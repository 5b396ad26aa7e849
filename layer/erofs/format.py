"""EROFS on disk: the numbers and record shapes that this writer needs, little-endian throughout.

Source of every number: Linux ``fs/erofs/erofs_fs.h`` (and ``include/uapi/linux/magic.h`` for the magic), as of 6.12 to 6.18.
Only what is written here is defined: 512-byte blocks, 64-byte inodes, flat and chunk-based data, one extra device.

An image is laid out as::

    0      boot area, zeros
    1024   super block (128 bytes), then the one device slot (128 bytes)
    1536   inodes: each 64 bytes + xattr body + (chunk indexes | inline tail), at a multiple of 32; the root is first
    ...    shared xattr entries (at a block boundary)
    ...    whole blocks of long directories and long symlink targets

``nid`` of an inode = its byte offset / 32, because ``meta_blkaddr`` is 0. Regular files hold no bytes here: their chunk
indexes name blocks of device 1, the layer's uncompressed tar stream.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK_BITS = 9
BLOCK = 1 << BLOCK_BITS
"""Block size in bytes: the tar record size, so that every payload starts at a block."""

SUPER_OFFSET = 1024
SUPER_MAGIC = 0xE0F5E1E2
SLOT_BITS = 5
"""log2 of the unit in which a nid counts (32 bytes)."""
DEVICE_SLOT_OFFSET = SUPER_OFFSET + 128
DEVICE_SLOT_SIZE = 128
META_START = 1536
"""Byte offset of the first inode, the root's."""
MAX_ROOT_NID = 0xFFFF

COMPAT_SB_CHKSUM = 0x1
COMPAT_MTIME = 0x2
INCOMPAT_CHUNKED_FILE = 0x4
INCOMPAT_DEVICE_TABLE = 0x8

# i_format: bit 0 is the inode version (1: extended, 64 bytes), bits 1..3 the data layout.
LAYOUT_FLAT_PLAIN = 0
LAYOUT_FLAT_INLINE = 2
LAYOUT_CHUNK = 4
INODE_SIZE = 64

CHUNK_INDEXES = 0x20
"""i_u of a chunk-based inode: low five bits are log2(chunk / block), this bit says that 8-byte indexes follow."""
MAX_CHUNK_SHIFT = 31
NULL_BLOCK = 0xFFFFFFFF
"""Block address of a hole."""
TAR_DEVICE = 1

FT_REG, FT_DIR, FT_CHR, FT_BLK, FT_FIFO, FT_SYMLINK = 1, 2, 3, 4, 5, 7
"""Dirent file types (the kernel's generic FT_*)."""
DIRENT_SIZE = 12
NAME_MAX = 255
SYMLINK_MAX = 4095
"""One page less the terminator: the kernel reads a long target from the first page only."""
MAX_FILE_SIZE = (1 << 63) - 1
"""i_size is a signed 64-bit number in the kernel."""

XATTR_HEADER = 12
MAX_SHARED_XATTRS = 255
MAX_XATTR_BODY = XATTR_HEADER + 4 * (0xFFFF - 1)
"""i_xattr_icount is 16 bits: one for the header, then one for each 4 bytes."""
MAX_XATTR_NAME = 255
MAX_XATTR_VALUE = 0xFFFF
XATTR_NAMESPACES = {b"user": 1, b"trusted": 4, b"security": 6}
XATTR_ACLS = {b"system.posix_acl_access": 2, b"system.posix_acl_default": 3}
"""Prefix indexes: of a namespace, the name goes on behind its dot; an ACL's name is nothing but its prefix."""

OPAQUE_NAME, OPAQUE_VALUE = b"trusted.overlay.opaque", b"y"
"""How overlayfs marks a directory that hides the lower ones (Documentation/filesystems/overlayfs.rst)."""

SUPER = np.dtype(
    [
        ("magic", "<u4"),
        ("checksum", "<u4"),
        ("feature_compat", "<u4"),
        ("block_bits", "u1"),
        ("extension_slots", "u1"),
        ("root_nid", "<u2"),
        ("inodes", "<u8"),
        ("epoch", "<u8"),
        ("fixed_nsec", "<u4"),
        ("blocks", "<u4"),
        ("meta_block", "<u4"),
        ("xattr_block", "<u4"),
        ("uuid", "V16"),
        ("volume_name", "V16"),
        ("feature_incompat", "<u4"),
        ("compression", "<u2"),
        ("extra_devices", "<u2"),
        ("device_slot", "<u2"),
        ("dir_block_bits", "u1"),
        ("xattr_prefix_count", "u1"),
        ("xattr_prefix_start", "<u4"),
        ("packed_nid", "<u8"),
        ("reserved", "V24"),
    ]
)

DEVICE_SLOT = np.dtype([("tag", "V64"), ("blocks", "<u4"), ("mapped_block", "<u4"), ("reserved", "V56")])

INODE = np.dtype(
    [
        ("format", "<u2"),
        ("xattr_count", "<u2"),
        ("mode", "<u2"),
        ("reserved", "<u2"),
        ("size", "<u8"),
        ("u", "<u4"),
        ("ino", "<u4"),
        ("uid", "<u4"),
        ("gid", "<u4"),
        ("mtime", "<i8"),
        ("mtime_ns", "<u4"),
        ("nlink", "<u4"),
        ("reserved2", "V16"),
    ]
)

_CASTAGNOLI = 0x82F63B78
"""The CRC-32C polynomial, bits reversed (RFC 3720, appendix B.4)."""


def _table() -> list[int]:
    values: NDArray[np.uint32] = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, (values >> 1) ^ np.uint32(_CASTAGNOLI), values >> 1).astype(np.uint32)
    return [int(value) for value in values]


_CRC_TABLE = _table()


def crc32c(data: bytes | bytearray | memoryview, crc: int = 0xFFFFFFFF) -> int:
    """CRC-32C as the kernel's ``crc32c()`` computes it: seeded with ``crc``, result not inverted."""
    table = _CRC_TABLE
    for byte in bytes(data):
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    return crc
