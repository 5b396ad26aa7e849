"""git's files: pack indexes, pack entries, trees, commits, the index. Bytes in, values out; pure.

Formats: git's Documentation/gitformat-pack.txt (pack-*.idx version 2, pack entries), gitformat-index.txt (versions 2 to 4),
and user-manual.txt ("object storage"). Names are bytes of 20 (SHA-1) or 32 (SHA-256) octets.
"""

from __future__ import annotations

import hashlib
import re
import struct
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weenv.core.errors import FormatError, UnsupportedError

COMMIT, TREE, BLOB, TAG, OFS_DELTA, REF_DELTA = 1, 2, 3, 4, 6, 7
KINDS = {COMMIT: b"commit", TREE: b"tree", BLOB: b"blob", TAG: b"tag"}
ALGORITHMS = {20: "sha1", 32: "sha256"}

_ENTRY = struct.Struct(">10I")
"""ctime s, ns; mtime s, ns; dev; ino; mode; uid; gid; size."""
EXTENDED, SKIP_WORKTREE = 0x4000, 0x4000
"""Bit of an index entry's flags, and of its further flags."""


class PackIndex:
    """A ``.idx`` file, version 2, of ``width``-byte names. Raises FormatError."""

    def __init__(self, data: bytes, width: int, name: str) -> None:
        if data[:8] != b"\xfftOc\0\0\0\2":
            raise UnsupportedError("a pack index that is not version 2", member=name, hint="git repack -ad")
        fan = np.frombuffer(data, ">u4", 256, 8) if len(data) >= 1032 else np.zeros(256, ">u4")
        self.count = int(fan[-1])
        small_at = 1032 + self.count * (width + 4)
        large_at = small_at + 4 * self.count
        large = len(data) - large_at - 2 * width
        if len(data) < 1032 or large < 0 or large % 8 or bool((np.diff(fan.astype(np.int64)) < 0).any()):
            raise FormatError("a damaged pack index", member=name)
        self.width = width
        self._fan = fan
        self._names = data[1032 : 1032 + self.count * width]
        small = np.frombuffer(data, ">u4", self.count, small_at).astype(np.uint64)
        far = np.frombuffer(data, ">u8", large // 8, large_at)
        which = np.flatnonzero(small & 0x8000_0000)
        if len(which):
            at = small[which] & np.uint64(0x7FFF_FFFF)
            if int(at.max()) >= len(far):
                raise FormatError("a damaged pack index", member=name)
            small[which] = far[at.astype(np.int64)]
        self._offsets: NDArray[np.uint64] = small
        self._sorted: NDArray[np.uint64] = np.sort(small)

    def _name(self, row: int) -> bytes:
        return self._names[row * self.width : (row + 1) * self.width]

    def find(self, prefix: bytes, digits: int) -> list[bytes]:
        """Up to two names whose first ``digits`` hex digits are those of ``prefix`` (zero-padded to whole bytes)."""
        first = prefix[0]
        low, high = int(self._fan[first - 1]) if first else 0, int(self._fan[first])
        wanted = prefix.hex()[:digits]
        row = bisect_left(range(high), wanted, low, high, key=lambda row: self._name(row).hex()[:digits])
        return [self._name(row) for row in range(row, min(row + 2, high)) if self._name(row).hex().startswith(wanted)]

    def offset(self, name: bytes) -> int | None:
        """Where an object is in the pack."""
        first = name[0]
        low, high = int(self._fan[first - 1]) if first else 0, int(self._fan[first])
        row = bisect_left(range(high), name, low, high, key=self._name)
        return int(self._offsets[row]) if row < self.count and self._name(row) == name else None

    def end(self, offset: int, pack_size: int) -> int:
        """Where the entry at ``offset`` ends at the latest."""
        row = int(np.searchsorted(self._sorted, np.uint64(offset), side="right"))
        return int(self._sorted[row]) if row < self.count else pack_size - self.width


@dataclass(frozen=True, slots=True)
class PackEntry:
    """The head of a pack entry: what it is, the size of its inflated data, where these begin in ``head``, its base."""

    kind: int
    size: int
    start: int
    base_offset: int = 0
    base_name: bytes = b""


def pack_entry(head: bytes, width: int, name: str) -> PackEntry:
    """Parse the first bytes of a pack entry. Raises FormatError."""
    try:
        byte = head[0]
        kind, size, shift, at = byte >> 4 & 7, byte & 15, 4, 1
        while byte & 0x80:
            byte = head[at]
            size |= (byte & 0x7F) << shift
            shift += 7
            at += 1
            if shift > 60:
                raise FormatError("a pack entry of absurd size", member=name)
        if kind == REF_DELTA:
            if len(head) < at + width:
                raise IndexError
            return PackEntry(kind, size, at + width, base_name=head[at : at + width])
        if kind == OFS_DELTA:
            byte = head[at]
            at += 1
            back = byte & 0x7F
            while byte & 0x80:
                byte = head[at]
                at += 1
                back = (back + 1) << 7 | (byte & 0x7F)
            return PackEntry(kind, size, at, base_offset=back)
    except IndexError as error:
        raise FormatError("a pack entry that ends within its head", member=name) from error
    if kind not in KINDS:
        raise FormatError("a pack entry of unknown type", member=name)
    return PackEntry(kind, size, at)


def tree_entries(data: bytes, width: int, name: str) -> dict[bytes, tuple[int, bytes]]:
    """The entries of a tree object: name -> (mode, object). Raises FormatError; names are checked as git checks them."""
    found: dict[bytes, tuple[int, bytes]] = {}
    at = 0
    while at < len(data):
        match = _TREE.match(data, at)
        if match is None or len(data) < match.end() + width:
            raise FormatError("a damaged tree object", member=name)
        mode, entry = int(match[1], 8), match[2]
        if entry in (b".", b"..") or entry.lower() == b".git" or b"/" in entry or entry in found or len(entry) > 255:
            raise FormatError("a tree with a forbidden name", member=name)
        at = match.end() + width
        found[entry] = mode, data[match.end() : at]
    return found


_TREE = re.compile(rb"([0-7]{1,6}) ([^\0]+)\0")


def header_field(data: bytes, field: bytes, width: int, name: str) -> bytes:
    """The object that a commit (``tree``) or tag (``object``) names first. Raises FormatError."""
    match = re.match(rb"%s ([0-9a-f]{%d})\n" % (field, 2 * width), data)
    if match is None:
        raise FormatError(f"an object without {field.decode()}", member=name)
    return bytes.fromhex(match[1].decode())


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One entry of the index. Times in seconds (the nanoseconds are ``ctime_ns``, ``mtime_ns``); ``flags`` as stored."""

    path: bytes
    mode: int
    name: bytes
    ctime: int = 0
    ctime_ns: int = 0
    mtime: int = 0
    mtime_ns: int = 0
    dev: int = 0
    ino: int = 0
    uid: int = 0
    gid: int = 0
    size: int = 0
    flags: int = 0
    more: int = 0

    def stat(self, *, mtime: int, mtime_ns: int, uid: int, gid: int, size: int) -> IndexEntry:
        """The same with what a container will see of the file: its change time is its modification time there."""
        low = 0xFFFF_FFFF
        return replace(
            self, ctime=mtime & low, ctime_ns=mtime_ns, mtime=mtime & low, mtime_ns=mtime_ns, dev=0, ino=0, uid=uid, gid=gid,
            size=size & low,
        )  # fmt: skip


def read_index(data: bytes, width: int) -> dict[bytes, IndexEntry]:
    """The entries of ``.git/index``. Raises FormatError, UnsupportedError for merges, split and sparse indexes."""
    what = ".git/index"
    if len(data) < 12 + width or data[:4] != b"DIRC":
        raise FormatError("no git index", member=what)
    version, count = struct.unpack_from(">2I", data, 4)
    if version not in (2, 3, 4):
        raise UnsupportedError(f"version {version} of the index", member=what)
    found: dict[bytes, IndexEntry] = {}
    at, previous = 12, b""
    end = len(data) - width
    for _ in range(count):
        start = at
        if at + 40 + width + 2 > end:
            raise FormatError("the index ends within an entry", member=what)
        c, cn, m, mn, dev, ino, mode, uid, gid, size = _ENTRY.unpack_from(data, at)
        name = data[at + 40 : at + 40 + width]
        (flags,) = struct.unpack_from(">H", data, at + 40 + width)
        at += 42 + width
        more = 0
        if flags & EXTENDED:
            more = int.from_bytes(data[at : at + 2], "big")
            at += 2
        if version == 4:
            strip = 0
            byte = data[at]
            at += 1
            strip = byte & 0x7F
            while byte & 0x80 and at < end:
                byte = data[at]
                at += 1
                strip = (strip + 1) << 7 | (byte & 0x7F)
            stop = data.find(b"\0", at, end)
            if stop < 0 or strip > len(previous):
                raise FormatError("the index ends within a name", member=what)
            path = previous[: len(previous) - strip] + data[at:stop]
            at = stop + 1
        else:
            stop = data.find(b"\0", at, end)
            if stop < 0:
                raise FormatError("the index ends within a name", member=what)
            path = data[at:stop]
            at = start + (stop - start + 8) // 8 * 8
        if flags & 0x3000:
            raise UnsupportedError("a merge is under way in the repository", member=what)
        if mode == 0o040000:
            raise UnsupportedError("a sparse index", member=what, hint="git sparse-checkout disable")
        if not path or path in found or any(part in (b"", b".", b"..", b".git") for part in path.split(b"/")):
            raise FormatError("a forbidden name in the index", member=what)
        found[path] = IndexEntry(path, mode, name, c, cn, m, mn, dev, ino, uid, gid, size, flags, more)
        previous = path
    while at + 8 <= end:
        signature, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "big")
        if not 0x41 <= signature[0] <= 0x5A:  # the others may be left out
            raise UnsupportedError(f"index extension {signature!r}", member=what, hint="git update-index --no-split-index")
        at += 8 + length
    return found


def write_index(entries: Iterable[IndexEntry], width: int) -> bytes:
    """An index of version 2 (3 where an entry has further flags), without extensions."""
    rows = sorted(entries, key=lambda entry: entry.path)
    version = 3 if any(entry.more for entry in rows) else 2
    parts = [b"DIRC", struct.pack(">2I", version, len(rows))]
    for e in rows:
        flags = (e.flags & 0x8000) | min(len(e.path), 0xFFF) | (EXTENDED if e.more else 0)
        row = _ENTRY.pack(e.ctime, e.ctime_ns, e.mtime, e.mtime_ns, e.dev, e.ino, e.mode, e.uid, e.gid, e.size)
        row += e.name + struct.pack(">H", flags) + (struct.pack(">H", e.more) if e.more else b"") + e.path
        parts += (row, bytes(8 - len(row) % 8))
    body = b"".join(parts)
    return body + hashlib.new(ALGORITHMS[width], body, usedforsecurity=False).digest()
