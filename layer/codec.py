"""The TOC as bytes: the payload of the TOC frame.

::

    payload  = b"weenvTOC" | zstd frame | zstd frame
    content of the two frames, one after the other = head | tree
    head     = u32 length of the JSON header | JSON header | zeros to a multiple of 8 | frame columns
    tree     = entry columns

The JSON header is an object with sorted keys and no spaces: ``version`` 1, ``diffId``, ``streamSize``, ``frameTarget``,
``level``, ``counts`` (see :data:`weenv.layer.columns.COUNTS`), ``treeOffset`` and ``columns``: name, numpy type, coding,
offset and length of each, offsets counted from the content's first byte. Whoever needs frames only (blobfs) decompresses
the head only.

The columns are those of :mod:`weenv.layer.toc`, less what follows from the others:

- ``pool`` holds the names in entry order, then the targets of symlinks in entry order, then the names of xattr rows, then
  their values, all without gaps: offsets are running sums of the lengths.
- ``aux`` of a FILE with data in one piece: how far, in 512-byte blocks modulo 2^64, its payload begins behind where it
  would if it were the next member after that of the previous such entry (one header block between them), the first
  counting from offset 0. NO_DATA of a FILE that is all hole is stored as it is; for an empty FILE and a SYMLINK 0 is stored.
- ``xattr.count`` is the number of rows of each set.

Two equal TOCs have equal contents, whatever their pools look like.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import zstandard

from weenv.core.digest import is_digest
from weenv.core.errors import FormatError, LimitError, UnsupportedError
from weenv.layer import columns, zframe
from weenv.layer.check import check_frames, check_toc
from weenv.layer.columns import ENTRY_COLUMNS, FRAME_COLUMNS, AnyColumn
from weenv.layer.limits import DEFAULT_LIMITS, Limits
from weenv.layer.pieces import Pieces
from weenv.layer.toc import (
    FILE,
    FLAG_SPARSE,
    NO_DATA,
    SYMLINK,
    Entries,
    Frames,
    SparseRows,
    Toc,
    XattrSets,
)
from weenv.layer.zframe import Buffer

MAGIC = b"weenvTOC"
VERSION = 1
TREE_LEVEL = 12
"""zstd level of the tree; see docs/adr/0001-frame-size.md for the measurement."""

_BLOCK = np.uint64(512)
_WHAT = "TOC"


# -- writing


def encode_content(toc: Toc, limits: Limits = DEFAULT_LIMITS) -> tuple[bytes, bytes]:
    """The (head, tree) of a TOC, uncompressed. Raises :class:`FormatError` for a TOC that no reader would accept."""
    check_toc(toc, limits)
    frames = toc.frames
    head_columns: list[AnyColumn] = [frames.compressed_sizes, frames.content_sizes, frames.digests.reshape(-1)]
    stored = list(zip((*FRAME_COLUMNS, *ENTRY_COLUMNS), head_columns + _tree_columns(toc), strict=True))
    counts = _counts(toc, len(stored[-1][1]))
    pieces = [columns.encode(column, values, columns.coding_for(column, values)) for column, values in stored]
    codings = [columns.coding_for(column, values) for column, values in stored]
    # The header states offsets that depend on its own length: it is padded with spaces to a length that holds them.
    base = 0
    while True:
        table, tree_offset, _ = _table(base, codings, counts)
        header = _header(toc, counts, table, tree_offset)
        needed = columns.aligned(4 + len(header))
        if needed <= base:
            break
        base = needed
    header = header.ljust(base - 4)
    head = bytearray(len(header).to_bytes(4, "little") + header)
    tree = bytearray()
    for number, piece in enumerate(pieces):
        part = head if number < len(FRAME_COLUMNS) else tree
        part += piece
        part += bytes(-len(part) % columns.ALIGNMENT)
    return bytes(head), bytes(tree)


def encode_toc(toc: Toc, limits: Limits = DEFAULT_LIMITS, *, level: int = TREE_LEVEL) -> bytes:
    """The payload of the TOC frame. Raises :class:`FormatError` for a TOC that no reader would accept."""
    head, tree = encode_content(toc, limits)
    return b"".join((MAGIC, _compress(head, 3), _compress(tree, level)))


def _compress(data: bytes, level: int) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_checksum=False, write_content_size=True).compress(data)


def _counts(toc: Toc, pool: int) -> dict[str, int]:
    return {
        "frames": len(toc.frames),
        "entries": len(toc.entries),
        "xattrSets": len(toc.xattrs),
        "xattrRows": len(toc.xattrs.name_off),
        "sparseRows": len(toc.sparse),
        "pool": pool,
    }


def _table(
    base: int, codings: Sequence[str], counts: Mapping[str, int]
) -> tuple[list[tuple[str, str, str, int, int]], int, int]:
    """The column table for columns that begin at ``base``, the offset of the tree, and the content's end."""
    table = []
    position, tree_offset = base, base
    for number, (column, coding) in enumerate(zip((*FRAME_COLUMNS, *ENTRY_COLUMNS), codings, strict=True)):
        if number == len(FRAME_COLUMNS):
            tree_offset = position
        length = columns.stored_length(column, coding, counts[column.count])
        table.append((column.name, column.dtype, coding, position, length))
        position += columns.aligned(length)
    return table, tree_offset, position


def _header(toc: Toc, counts: Mapping[str, int], table: Sequence[Sequence[Any]], tree_offset: int) -> bytes:
    header = {
        "version": VERSION,
        "diffId": toc.diff_id,
        "streamSize": toc.stream_size,
        "frameTarget": toc.frame_target,
        "level": toc.level,
        "counts": counts,
        "treeOffset": tree_offset,
        "columns": table,
    }
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def _tree_columns(toc: Toc) -> list[AnyColumn]:
    """The stored form of everything but the frames, in the order of ENTRY_COLUMNS."""
    e, x, s = toc.entries, toc.xattrs, toc.sparse
    source = np.frombuffer(toc.pool, dtype=np.uint8)
    symlinks = np.flatnonzero(e.kind == SYMLINK)
    pool = np.concatenate(
        (
            columns.gather(source, e.name_off, e.name_len),
            columns.gather(source, e.aux[symlinks], e.size[symlinks]),
            columns.gather(source, x.name_off, x.name_len),
            columns.gather(source, x.value_off, x.value_len),
        )
    )
    aux = e.aux.copy()
    aux[symlinks] = 0
    aux[(e.kind == FILE) & (e.size == 0)] = 0
    rows = _contiguous(e.kind, e.flags, e.size, aux)
    begins = e.aux[rows]
    expected = np.zeros(len(rows), dtype=np.uint64)
    expected[1:] = (_blocks(begins + e.size[rows]) * _BLOCK + _BLOCK)[:-1]
    aux[rows] = ((begins - expected).view(np.int64) // 512).view(np.uint64)
    return [
        e.parent, e.name_len, e.kind, e.flags, e.mode, e.uid, e.gid, e.mtime, e.mtime_ns, e.size, aux, e.xattr_set,
        np.diff(x.first), x.name_len, x.value_len,
        s.entry, s.logical, s.stream, s.length,
        pool,
    ]  # fmt: skip


def _contiguous(kind: AnyColumn, flags: AnyColumn, size: AnyColumn, aux: AnyColumn) -> AnyColumn:
    """The entries whose ``aux`` is the offset of a payload in one piece."""
    chosen = (kind == FILE) & (size > 0)
    chosen &= (flags & FLAG_SPARSE) == 0
    chosen &= aux != np.uint64(NO_DATA)
    return np.flatnonzero(chosen)


def _blocks(size: AnyColumn) -> AnyColumn:
    return (size + np.uint64(511)) // _BLOCK


# -- reading


class _Header:
    """The checked JSON header of a TOC."""

    def __init__(self, raw: Mapping[str, Any], base: int, limits: Limits) -> None:
        if raw.get("version") != VERSION:
            raise UnsupportedError(f"unknown TOC version {str(raw.get('version'))[:20]}", member=_WHAT)
        if raw.keys() != {"version", "diffId", "streamSize", "frameTarget", "level", "counts", "treeOffset", "columns"}:
            raise FormatError("its header has missing or unknown fields", member=_WHAT)
        diff_id, counts, table = raw["diffId"], raw["counts"], raw["columns"]
        if not isinstance(diff_id, str) or not is_digest(diff_id):
            raise FormatError("its diffId is not a digest", member=_WHAT)
        self.diff_id = diff_id
        self.stream_size = _integer(raw["streamSize"], limits.max_stream, "streamSize")
        self.frame_target = _integer(raw["frameTarget"], 1 << 40, "frameTarget")
        level = raw["level"]
        self.level = -_integer(-level, 1 << 20, "level") if type(level) is int and level < 0 else _integer(level, 100, "level")
        if not isinstance(counts, dict) or counts.keys() != set(columns.COUNTS):
            raise FormatError("its counts are not the known ones", member=_WHAT)
        allowed = {
            "frames": limits.max_frames,
            "entries": limits.max_entries,
            "xattrSets": limits.max_entries,
            "xattrRows": limits.max_entries,
            "sparseRows": limits.max_sparse_chunks,
            "pool": min(limits.max_toc_content, (1 << 32) - 1),
        }
        self.counts = {name: _integer(counts[name], allowed[name], name) for name in columns.COUNTS}
        known = (*FRAME_COLUMNS, *ENTRY_COLUMNS)
        if not isinstance(table, list) or len(table) != len(known):
            raise FormatError("its column table is not the known one", member=_WHAT)
        self.codings: list[str] = []
        for row, column in zip(table, known, strict=True):
            coding = row[2] if isinstance(row, list) and len(row) == 5 else None
            if coding != column.coding and coding != "constant":
                raise FormatError(f"column {column.name} is missing or has an unknown coding", member=_WHAT)
            self.codings.append(coding)
        self.table, self.tree_offset, self.end = _table(base, self.codings, self.counts)
        if [list(row) for row in self.table] != table or raw["treeOffset"] != self.tree_offset:
            raise FormatError("its column table does not follow from its counts", member=_WHAT)
        if self.end > limits.max_toc_content:
            raise LimitError(f"a TOC of {self.end} bytes", member=_WHAT)


def _integer(value: object, limit: int, what: str) -> int:
    if type(value) is not int or value < 0:
        raise FormatError(f"{what} is not a number", member=_WHAT)
    if value > limit:
        raise LimitError(f"{what} is beyond the limit of {limit}", member=_WHAT)
    return value


def _split(payload: Buffer, limits: Limits) -> tuple[memoryview, memoryview]:
    """The two compressed parts of a payload."""
    view = memoryview(payload)
    if len(view) > limits.max_toc_compressed:
        raise LimitError(f"a TOC of {len(view)} bytes compressed", member=_WHAT)
    if view[:8] != MAGIC:
        raise FormatError("no weenv TOC", member=_WHAT)
    end = 8 + zframe.length(view[8:], _WHAT)
    return view[8:end], view[end:]


def _decode_head(part: memoryview, limits: Limits, pieces: Pieces | None = None) -> tuple[_Header, Frames]:
    """The header and the frame table, from the first compressed part."""
    size = zframe.content_size(part, _WHAT)
    if size > limits.max_toc_header + 64 + 40 * limits.max_frames or size > limits.max_toc_content:
        raise LimitError(f"a frame table of {size} bytes", member=_WHAT)
    head = zframe.decompress(part, size, _WHAT)
    length = int.from_bytes(head[:4], "little")
    if size < 4 or length > limits.max_toc_header or (4 + length) % columns.ALIGNMENT or 4 + length > size:
        raise FormatError("its header's length is wrong", member=_WHAT)
    try:
        raw = json.loads(head[4 : 4 + length].decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise FormatError("its header is not JSON", member=_WHAT) from error
    if not isinstance(raw, dict):
        raise FormatError("its header is not a JSON object", member=_WHAT)
    header = _Header(raw, 4 + length, limits)
    if header.tree_offset != size:
        raise FormatError(f"its frame table is {size} bytes long, its header says {header.tree_offset}", member=_WHAT)
    compressed, content, digests = _decode_columns(header, head, 0, len(FRAME_COLUMNS), 0)
    return header, Frames(compressed, content, digests.reshape(-1, 32), pieces)


def _decode_columns(header: _Header, data: bytes, low: int, high: int, base: int) -> list[AnyColumn]:
    known = (*FRAME_COLUMNS, *ENTRY_COLUMNS)
    return [
        columns.decode(known[i], data, header.table[i][3] - base, header.codings[i], header.counts[known[i].count])
        for i in range(low, high)
    ]


def content_size(payload: Buffer, limits: Limits = DEFAULT_LIMITS) -> int:
    """What a payload's two parts take decompressed, in bytes, as they state it; decoding takes them at their word.

    Raises :class:`FormatError`.
    """
    return sum(zframe.content_size(part, _WHAT) for part in _split(payload, limits))


def decode_frames(
    payload: Buffer, limits: Limits = DEFAULT_LIMITS, pieces: Pieces | None = None
) -> tuple[Frames, int, str]:
    """The frame table, the stream's size and its diffID, from a TOC frame's payload; the tree is not looked at.

    The caller has verified the payload's digest. Raises :class:`FormatError`.
    """
    header, frames = _decode_head(_split(payload, limits)[0], limits, pieces)
    check_frames(frames, header.stream_size, limits)
    return frames, header.stream_size, header.diff_id


def decode_toc(payload: Buffer, limits: Limits = DEFAULT_LIMITS, pieces: Pieces | None = None) -> Toc:
    """Decode and check a TOC frame's payload, whose digest the caller has verified. Raises :class:`FormatError`."""
    first, second = _split(payload, limits)
    header, frames = _decode_head(first, limits, pieces)
    tree = zframe.decompress(second, header.end - header.tree_offset, _WHAT)
    known = len(FRAME_COLUMNS)
    (
        parent, name_len, kind, flags, mode, uid, gid, mtime, mtime_ns, size, aux, xattr_set,
        xattr_count, xattr_name_len, xattr_value_len,
        sparse_entry, sparse_logical, sparse_stream, sparse_length,
        pool,
    ) = _decode_columns(header, tree, known, known + len(ENTRY_COLUMNS), header.tree_offset)  # fmt: skip
    if not len(kind):
        raise FormatError("it has no root", member=_WHAT)
    symlinks = np.flatnonzero(kind == SYMLINK)
    targets = size[symlinks]
    room = len(pool)
    names_end = columns.total(name_len, "names", room)
    targets_end = names_end + columns.total(targets, "symlink targets", room)
    xattr_names_end = targets_end + columns.total(xattr_name_len, "xattr names", room)
    if xattr_names_end + columns.total(xattr_value_len, "xattr values", room) != room:
        raise FormatError("its names and values do not fill the pool", member=_WHAT)
    if columns.total(xattr_count, "xattr sets", len(xattr_name_len)) != len(xattr_name_len):
        raise FormatError("its xattr sets do not add up", member=_WHAT)

    rows = _contiguous(kind, flags, size, aux)
    absolute = aux if aux.flags.writeable else aux.copy()
    absolute[(kind == FILE) & (size == 0)] = NO_DATA
    absolute[symlinks] = columns.starts(targets, names_end)
    if len(rows):
        # Payload i begins at i - 1's end, rounded up, and one block, and the stored difference: a running sum of these,
        # modulo 2^64, is valid where the rounded-up sizes are what was added; check_toc sees to the result's bounds.
        steps = absolute[rows]
        steps[1:] += _blocks(size[rows[:-1]]) + np.uint64(1)
        absolute[rows] = np.cumsum(steps, dtype=np.uint64) * _BLOCK
    first_row = np.zeros(len(xattr_count) + 1, dtype=np.uint32)
    np.cumsum(xattr_count, out=first_row[1:], dtype=np.uint32)
    toc = Toc(
        diff_id=header.diff_id,
        stream_size=header.stream_size,
        frame_target=header.frame_target,
        level=header.level,
        frames=frames,
        entries=Entries(
            parent=parent,
            name_off=columns.starts(name_len, 0).astype(np.uint32),
            name_len=name_len.astype(np.uint16),
            kind=kind,
            flags=flags,
            mode=mode,
            uid=uid,
            gid=gid,
            mtime=mtime,
            mtime_ns=mtime_ns,
            size=size,
            aux=absolute,
            xattr_set=xattr_set,
        ),
        xattrs=XattrSets(
            first=first_row,
            name_off=columns.starts(xattr_name_len, targets_end).astype(np.uint32),
            name_len=xattr_name_len,
            value_off=columns.starts(xattr_value_len, xattr_names_end).astype(np.uint32),
            value_len=xattr_value_len,
        ),
        sparse=SparseRows(sparse_entry, sparse_logical, sparse_stream, sparse_length),
        pool=pool.tobytes(),
    )
    check_toc(toc, limits)
    return toc
