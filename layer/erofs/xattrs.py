"""Extended attributes: which set each inode has, and the bytes that stand behind the inode and in the shared area.

Inodes with equal sets have equal bytes behind them, so they are encoded once per *set*. An attribute (name and value) that
two inodes or more carry is written once, in the shared area, and referred to by its offset / 4; others stand inline.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from weenv.core.errors import LimitError, UnsupportedError
from weenv.layer.erofs import format as fmt
from weenv.layer.erofs.check import check_xattr_rows, member_name
from weenv.layer.toc import FLAG_OPAQUE, Toc

MAX_XATTR_BYTES = 256 << 20
"""Names and values of one layer together; rows may overlap in the pool, so a small table could ask for far more."""

Pair = tuple[bytes, bytes]


@dataclass(slots=True)
class XattrPlan:
    """``set_of`` i64[n]: per entry, 0 for none, else 1 + index into ``bodies``; ``sizes`` i64[sets + 1], bytes, sizes[0] = 0.

    ``bodies`` are the bytes that follow an inode (header, shared ids, inline entries); ``shared`` is the shared area.
    """

    set_of: NDArray[np.int64]
    bodies: list[bytes]
    sizes: NDArray[np.int64]
    shared: bytes


@dataclass(slots=True)
class _Items:
    """Distinct attributes, numbered in order of appearance."""

    pairs: list[Pair] = field(default_factory=list)
    numbers: dict[Pair, int] = field(default_factory=dict)
    total: int = 0

    def number(self, name: bytes, value: bytes) -> int:
        pair = (name, value)
        known = self.numbers.get(pair)
        if known is None:
            known = self.numbers[pair] = len(self.pairs)
            self.pairs.append(pair)
        return known


def compute_xattrs(toc: Toc, inode: NDArray[np.bool_], replaced: Mapping[int, Sequence[Pair]]) -> XattrPlan:
    """Plan the attributes of all inodes.

    ``inode`` bool[n] tells entries that have an inode of their own; ``replaced`` gives the whole set of some entries.
    FLAG_OPAQUE adds overlayfs's mark. Raises FormatError, LimitError or UnsupportedError.
    """
    e = toc.entries
    set_of: NDArray[np.int64] = np.where(inode, e.xattr_set, 0).astype(np.int64)
    opaque = np.flatnonzero(inode & (e.flags & FLAG_OPAQUE != 0))
    if not set_of.any() and not len(opaque) and not replaced:
        return XattrPlan(set_of, [], np.zeros(1, dtype=np.int64), b"")
    check_xattr_rows(toc)
    items = _Items()
    sets: list[list[int]] = [[]]  # set number -> item numbers; grows beyond the table's own sets
    sets.extend([] for _ in range(len(toc.xattrs)))
    for entry, pairs in sorted(replaced.items()):
        set_of[entry] = len(sets) if pairs else 0
        if pairs:
            sets.append([items.number(bytes(name), bytes(value)) for name, value in sorted(dict(pairs).items())])
    own = len(toc.xattrs) + 1
    _decode(toc, np.unique(set_of[(set_of > 0) & (set_of < own)]), items, sets)
    if len(opaque):
        mark = items.number(fmt.OPAQUE_NAME, fmt.OPAQUE_VALUE)
        bases, which = np.unique(set_of[opaque], return_inverse=True)
        set_of[opaque] = len(sets) + which
        for base in bases.tolist():
            kept = [item for item in sets[base] if items.pairs[item][0] != fmt.OPAQUE_NAME]
            sets.append([*kept, mark])

    used, compact = np.unique(set_of, return_inverse=True)
    uses = np.bincount(compact, minlength=len(used))
    if used[0] != 0:  # every inode has a set: keep number 0 for "none"
        used, compact, uses = np.append(0, used), compact + 1, np.append(0, uses)
    chosen = [sets[number] for number in used[1:].tolist()]
    bodies, shared = _encode(toc, chosen, uses[1:].tolist(), items, compact)
    sizes = np.array([0, *map(len, bodies)], dtype=np.int64)
    return XattrPlan(compact.astype(np.int64), bodies, sizes, shared)


def _decode(toc: Toc, wanted: NDArray[np.int64], items: _Items, sets: list[list[int]]) -> None:
    """Fill ``sets`` for the numbers ``wanted`` of the table."""
    x, pool = toc.xattrs, toc.pool
    first = x.first.tolist()
    places = list(
        zip(x.name_off.tolist(), x.name_len.tolist(), x.value_off.tolist(), x.value_len.tolist(), strict=True),
    )
    known: dict[tuple[int, int, int, int], int] = {}
    total = 0
    for number in wanted.tolist():
        members = sets[number]
        for row in range(first[number - 1], first[number]):
            place = places[row]
            item = known.get(place)
            if item is None:
                name_off, name_len, value_off, value_len = place
                total += name_len + value_len
                if total > MAX_XATTR_BYTES:
                    raise LimitError(f"extended attributes of more than {MAX_XATTR_BYTES} bytes")
                name, value = pool[name_off : name_off + name_len], pool[value_off : value_off + value_len]
                item = known[place] = items.number(name, value)
            members.append(item)


def encode_entry(name: bytes, value: bytes) -> bytes:
    """One xattr entry: name length, prefix index, value size, rest of the name, value, padded to 4 bytes.

    Raises UnsupportedError for a namespace, name or value that EROFS has no way to write.
    """
    index = fmt.XATTR_ACLS.get(name, 0)
    rest = b""
    if not index:
        space, _, rest = name.partition(b".")
        index = fmt.XATTR_NAMESPACES.get(space, 0) if rest else 0
    if not index:
        raise UnsupportedError(f"extended attribute {name!r} is in no namespace that EROFS has")
    if len(rest) > fmt.MAX_XATTR_NAME or b"\0" in name:
        raise UnsupportedError(f"extended attribute name of {len(name)} bytes, or with a NUL in it")
    if len(value) > fmt.MAX_XATTR_VALUE:
        raise UnsupportedError(f"extended attribute {name!r} of {len(value)} bytes, EROFS holds {fmt.MAX_XATTR_VALUE}")
    entry = struct.pack("<BBH", len(rest), index, len(value)) + rest + value
    return entry + bytes(-len(entry) % 4)


def _encode(
    toc: Toc, sets: list[list[int]], uses: list[int], items: _Items, set_of: NDArray[np.intp]
) -> tuple[list[bytes], bytes]:
    """The bodies of ``sets`` and the shared area; ``uses`` counts the inodes of each set."""
    count = [0] * len(items.pairs)
    for members, inodes in zip(sets, uses, strict=True):
        for item in members:
            count[item] += inodes
    encoded: dict[int, bytes] = {}
    shared_at: dict[int, int] = {}
    shared = bytearray()
    bodies: list[bytes] = []
    for number, members in enumerate(sets, start=1):
        try:
            for item in members:
                if item not in encoded:
                    encoded[item] = encode_entry(*items.pairs[item])
            ids: list[int] = []
            inline: list[bytes] = []
            for item in members:
                if count[item] > 1 and len(ids) < fmt.MAX_SHARED_XATTRS:
                    if item not in shared_at:
                        shared_at[item] = len(shared) // 4
                        shared += encoded[item]
                    ids.append(shared_at[item])
                else:
                    inline.append(encoded[item])
            body = b"".join([struct.pack("<IB7x", 0, len(ids)), struct.pack(f"<{len(ids)}I", *ids), *inline])
            if len(body) > fmt.MAX_XATTR_BODY:
                raise UnsupportedError(f"extended attributes of {len(body)} bytes, an inode holds {fmt.MAX_XATTR_BODY}")
        except UnsupportedError as error:
            owner = int(np.flatnonzero(set_of == number)[0])
            raise UnsupportedError(error.message, member=member_name(toc, owner), hint=error.hint) from None
        bodies.append(body)
    return bodies, bytes(shared)
