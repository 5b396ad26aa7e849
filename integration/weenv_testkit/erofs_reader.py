"""A small EROFS reader for tests, written from the format alone (Linux fs/erofs: super.c, inode.c, data.c, dir.c, namei.c,
xattr.c). It shares no constant with the writer, checks what the kernel and fsck.erofs check, and reads one byte at a time
rather than fast."""

from __future__ import annotations

import itertools
import stat
import struct
from dataclasses import dataclass, field

HOLE = 0xFFFFFFFF
_PREFIX = {
    1: b"user.", 2: b"system.posix_acl_access", 3: b"system.posix_acl_default", 4: b"trusted.", 6: b"security.",
}  # fmt: skip


class Corrupt(Exception):
    """The image breaks a rule of the format."""


def need(condition: object, message: str) -> None:
    """Raise Corrupt unless ``condition``."""
    if not condition:
        raise Corrupt(message)


@dataclass
class Inode:
    """One inode. ``extents`` of a regular file: (logical, device block or None for a hole, length), in bytes and blocks."""

    nid: int
    mode: int
    uid: int
    gid: int
    mtime: int
    mtime_ns: int
    nlink: int
    size: int
    rdev: int
    xattrs: dict[bytes, bytes]
    data: bytes | None = None
    extents: list[tuple[int, int | None, int]] = field(default_factory=list)


class Image:
    """A parsed super block, and methods that follow nids."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        need(len(data) % 512 == 0 and len(data) >= 2048, "size of the image")
        head = struct.unpack_from("<IIIBBHQQIIII16s16sIHHHBBIQB", data, 1024)
        (magic, checksum, self.compat, bits, slots, self.root_nid, self.inos, self.epoch, _, self.blocks, self.meta, self.xattr,
         self.uuid, _, self.incompat, _, self.devices, slot, dir_bits, prefixes, _, packed, _) = head  # fmt: skip
        need(magic == 0xE0F5E1E2, "magic")
        need(bits == 9 and slots == 0 and dir_bits == 0 and prefixes == 0 and packed == 0, "super block fields")
        need(self.incompat == 0x4 | 0x8 and self.compat & 3 == 3, "feature bits")
        need(self.blocks * 512 == len(data), "block count")
        block = bytearray(data[1024:1536])
        block[4:8] = bytes(4)
        need(_crc32c(block) == checksum, "super block checksum")
        need(self.devices == 1, "one extra device")
        self.tag, self.device_blocks, uniaddr = struct.unpack_from("<64sII", data, slot * 128)
        need(uniaddr == 0, "mapped address")

    def offset(self, nid: int) -> int:
        """The byte offset of an inode."""
        return int(self.meta) * 512 + nid * 32

    def inode(self, nid: int) -> Inode:
        """Read an inode with its data or extents."""
        at = self.offset(nid)
        need(at > 0 and at + 64 <= len(self.data), f"nid {nid} outside the image")
        fields = struct.unpack_from("<HHHHQIIIIqII", self.data, at)
        form, icount, mode, _, size, u, _, uid, gid, mtime, nsec, nlink = fields
        need(form & 1 == 1 and form >> 4 == 0, "extended inode")
        layout = form >> 1 & 7
        need(nsec < 10**9, "nanoseconds")
        body = 12 + 4 * (icount - 1) if icount else 0
        xattrs = self._xattrs(at + 64, body)
        kind = stat.S_IFMT(mode)
        inode = Inode(nid, mode, uid, gid, mtime, nsec, nlink, size, 0, xattrs)
        after = at + 64 + body
        if kind in (stat.S_IFCHR, stat.S_IFBLK):
            inode.rdev = (u >> 8 & 0xFFF) << 32 | (u & 0xFF) | (u >> 12 & 0xFFF00)
            need(size == 0 and layout == 0, "device inode")
        elif kind == stat.S_IFIFO:
            need(size == 0 and layout == 0 and u == 0, "fifo inode")
        elif kind == stat.S_IFREG and size:
            need(layout == 4 and u & ~0x3F == 0 and u & 0x20, "chunk format")
            self._chunks(inode, after, 9 + (u & 31))
        elif kind == stat.S_IFREG:
            need(layout == 0 and u == 0, "empty file")
        else:
            need(kind in (stat.S_IFDIR, stat.S_IFLNK), f"type {kind:o}")
            inode.data = self._flat(layout, size, u, after, kind == stat.S_IFLNK, at + 64)
        return inode

    def _flat(self, layout: int, size: int, block: int, after: int, link: bool, inode_end: int) -> bytes:
        need(layout in (0, 2), "flat layout")
        whole = size // 512 * 512 if layout == 2 else -(-size // 512) * 512
        need(block * 512 + whole <= len(self.data), "data outside the image")
        data = self.data[block * 512 : block * 512 + whole]
        if layout == 2:
            rest = size - whole
            need(rest > 0 and after // 512 == (after + rest - 1) // 512, "inline data across blocks")
            if link:  # older kernels insist that the target lies in the block where the inode ends
                need((inode_end - 1) // 512 == (after + rest - 1) // 512, "symlink target across blocks")
            data += self.data[after : after + rest]
        else:
            need(not any(data[size:]), "padding of the last block")
        return data[:size]

    def _chunks(self, inode: Inode, after: int, bits: int) -> None:
        at = (after + 7) // 8 * 8
        for number in range(-(-inode.size >> bits)):
            high, device, block = struct.unpack_from("<HHI", self.data, at + 8 * number)
            length = min(1 << bits, inode.size - (number << bits))
            need(high == 0, "upper bits of a block address")
            if block == HOLE:
                inode.extents.append((number << bits, None, length))
                continue
            need(device == 1 and block + -(-length // 512) <= self.device_blocks, "chunk outside the device")
            inode.extents.append((number << bits, block, length))

    def _xattrs(self, at: int, size: int) -> dict[bytes, bytes]:
        if not size:
            return {}
        need(size > 12 and at % 512 + 12 <= 512, "xattr header")
        need(at + size <= len(self.data), "xattrs outside the image")
        shared, end = self.data[at + 4], at + size
        found: list[tuple[bytes, bytes]] = []
        at += 12
        for _ in range(shared):
            (number,) = struct.unpack_from("<I", self.data, at)
            found.append(self._entry(self.xattr * 512 + 4 * number)[:2])
            at += 4
        while at < end:
            name, value, length = self._entry(at)
            found.append((name, value))
            at += length
        need(at == end and len(dict(found)) == len(found), "xattr body")
        return dict(found)

    def _entry(self, at: int) -> tuple[bytes, bytes, int]:
        need(at % 4 == 0, "xattr alignment")
        name_len, index, value_len = struct.unpack_from("<BBH", self.data, at)
        name = _PREFIX[index] + self.data[at + 4 : at + 4 + name_len]
        value = self.data[at + 4 + name_len : at + 4 + name_len + value_len]
        need(len(value) == value_len, "xattr value")
        return name, value, (4 + name_len + value_len + 3) // 4 * 4

    def entries(self, directory: Inode) -> list[tuple[bytes, int, int]]:
        """(name, nid, file type) of a directory, in order, with '.' and '..'; checks order, padding and searchability."""
        data, found = directory.data or b"", []
        for start in range(0, len(data), 512):
            block = data[start : start + 512]
            (first,) = struct.unpack_from("<H", block, 8)
            need(first % 12 == 0 and 12 <= first < len(block), "first name offset")
            count = first // 12
            heads = [struct.unpack_from("<QHBB", block, 12 * index) for index in range(count)]
            need(all(head[3] == 0 for head in heads), "reserved byte")
            bounds = [head[1] for head in heads]
            end = len(block)
            if start + 512 < len(data) or len(block) == 512:
                end = bounds[-1] + len(block[bounds[-1] :].split(b"\0", 1)[0])
                need(not any(block[end:]), "slack of a directory block")
            for (nid, offset, kind, _), until in zip(heads, [*bounds[1:], end], strict=True):
                name = block[offset:until]
                need(0 < len(name) <= 255 and b"/" not in name and b"\0" not in name, f"name {name!r}")
                found.append((name, nid, kind))
        names = [name for name, _, _ in found]
        need(names == sorted(set(names)), "order of names")
        need(b"." in names and b".." in names, "dots")
        return found

    def walk(self) -> dict[bytes, Inode]:
        """Every path and its inode; checks dots, types, link counts and the number of inodes."""
        inodes: dict[int, Inode] = {}
        types = {1: stat.S_IFREG, 2: stat.S_IFDIR, 3: stat.S_IFCHR, 4: stat.S_IFBLK, 5: stat.S_IFIFO, 7: stat.S_IFLNK}
        tree = {b"": self.inode(self.root_nid)}
        inodes[self.root_nid] = tree[b""]
        links: dict[int, int] = {}
        stack = [(b"", self.root_nid)]
        while stack:
            path, parent = stack.pop()
            subdirectories = 0
            for name, nid, kind in self.entries(tree[path]):
                if name in (b".", b".."):
                    want = tree[path].nid if name == b"." else parent
                    need(nid == want and kind == 2, f"{path!r}: {name!r} leads to {nid}")
                    continue
                inode = inodes.setdefault(nid, self.inode(nid))
                need(types[kind] == stat.S_IFMT(inode.mode), f"type of {name!r}")
                child = path + b"/" + name if path else name
                tree[child] = inode
                links[nid] = links.get(nid, 0) + 1
                if kind == 2:
                    subdirectories += 1
                    need(links[nid] == 1, "a directory with two names")
                    stack.append((child, tree[path].nid))
            need(tree[path].nlink == 2 + subdirectories, f"link count of {path!r}")
        for nid, count in links.items():
            need(stat.S_ISDIR(inodes[nid].mode) or inodes[nid].nlink == count, f"link count of nid {nid}")
        need(len(inodes) == self.inos, "number of inodes")
        self._disjoint(inodes)
        return tree

    def _disjoint(self, inodes: dict[int, Inode]) -> None:
        places = sorted(self.offset(nid) for nid in inodes)
        need(all(b - a >= 64 for a, b in itertools.pairwise(places)), "inodes overlap")


def _crc32c(data: bytes | bytearray) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


def coalesce(extents: list[tuple[int, int | None, int]]) -> list[tuple[int, int | None, int]]:
    """Join (logical, block, length) extents that continue each other, so that different chunkings compare equal."""
    joined: list[tuple[int, int | None, int]] = []
    for logical, block, length in extents:
        if joined:
            at, first, size = joined[-1]
            if at + size == logical and (block is None) == (first is None) and (
                block is None or first is None or first + size // 512 == block
            ):  # fmt: skip
                joined[-1] = (at, first, size + length)
                continue
        joined.append((logical, block, length))
    return joined
