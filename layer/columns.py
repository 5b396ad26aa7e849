"""How the TOC's arrays are laid out and coded for storage.

A stored column is a little-endian array under one of four codings, each undone by whole-array operations:

``raw``           the values as they are
``planes``        byte 0 of every value, then byte 1 of every value, ...: high bytes are mostly alike, so
                  numbers that rarely repeat compress better (times do repeat: they are ``raw``)
``delta-planes``  the difference from the value before (modulo 2^bits; the first from 0), then as ``planes``
``constant``      one value, that all have; nothing where there are none

Columns begin at multiples of 8 bytes, padded with zeros, in the order of :data:`FRAME_COLUMNS` and
:data:`ENTRY_COLUMNS`. Which coding a column has is fixed (``constant`` replaces it wherever it can), so that equal TOCs
have equal bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weenv.core.errors import FormatError
from weenv.layer.zframe import Buffer

AnyColumn = NDArray[Any]

ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Column:
    """One stored column: its name, numpy type, coding, the count that gives its length, and values per counted thing."""

    name: str
    dtype: str
    coding: str
    count: str
    width: int = 1


FRAME_COLUMNS = (
    Column("frame.compressed", "<u4", "planes", "frames"),
    Column("frame.content", "<u4", "planes", "frames"),
    Column("frame.digest", "|u1", "raw", "frames", 32),
)
"""What blobfs needs; these are the first part of the TOC's content."""

ENTRY_COLUMNS = (
    Column("parent", "<u4", "delta-planes", "entries"),
    Column("nameLength", "|u1", "raw", "entries"),
    Column("kind", "|u1", "raw", "entries"),
    Column("flags", "|u1", "raw", "entries"),
    Column("mode", "<u2", "planes", "entries"),
    Column("uid", "<u4", "planes", "entries"),
    Column("gid", "<u4", "planes", "entries"),
    Column("mtime", "<i8", "raw", "entries"),
    Column("mtimeNs", "<u4", "raw", "entries"),
    Column("size", "<u8", "planes", "entries"),
    Column("aux", "<u8", "planes", "entries"),
    Column("xattrSet", "<u4", "planes", "entries"),
    Column("xattr.count", "<u4", "raw", "xattrSets"),
    Column("xattr.nameLength", "<u4", "raw", "xattrRows"),
    Column("xattr.valueLength", "<u4", "raw", "xattrRows"),
    Column("sparse.entry", "<u4", "delta-planes", "sparseRows"),
    Column("sparse.logical", "<u8", "delta-planes", "sparseRows"),
    Column("sparse.stream", "<u8", "delta-planes", "sparseRows"),
    Column("sparse.length", "<u8", "planes", "sparseRows"),
    Column("pool", "|u1", "raw", "pool"),
)
"""The second part: the tree. What the columns mean is said in :mod:`weenv.layer.codec`."""

COUNTS = ("frames", "entries", "xattrSets", "xattrRows", "sparseRows", "pool")


def aligned(size: int) -> int:
    """``size`` rounded up to :data:`ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def stored_length(column: Column, coding: str, count: int) -> int:
    """Bytes that a column of ``count`` things takes, without padding."""
    values = count * column.width
    if coding == "constant":
        values = min(values, 1)
    return values * np.dtype(column.dtype).itemsize


def coding_for(column: Column, values: AnyColumn) -> str:
    """The coding under which these values are stored."""
    if column.name == "pool" or column.width > 1 or (len(values) and (values != values[0]).any()):
        return column.coding
    return "constant"


def encode(column: Column, values: AnyColumn, coding: str) -> bytes:
    """The stored bytes of a column."""
    array = np.ascontiguousarray(values, dtype=column.dtype)
    if coding == "constant":
        return array[:1].tobytes()
    if coding == "delta-planes":
        unsigned = array.view(array.dtype.str.replace("i", "u"))
        array = np.diff(unsigned, prepend=unsigned.dtype.type(0))
    if coding == "raw" or array.itemsize == 1:
        return array.tobytes()
    return array.view(np.uint8).reshape(-1, array.itemsize).T.tobytes()


def decode(column: Column, data: Buffer, offset: int, coding: str, count: int) -> AnyColumn:
    """The values of the column at ``data[offset:]``, where :func:`stored_length` bytes are known to be."""
    dtype = np.dtype(column.dtype)
    values = count * column.width
    if coding == "constant":
        if not values:
            return np.zeros(0, dtype=dtype)
        return np.full(values, np.frombuffer(data, dtype=dtype, count=1, offset=offset)[0], dtype=dtype)
    if coding == "raw" or (dtype.itemsize == 1 and coding == "planes"):
        return np.frombuffer(data, dtype=dtype, count=values, offset=offset)
    planes = np.frombuffer(data, dtype=np.uint8, count=values * dtype.itemsize, offset=offset).reshape(dtype.itemsize, values)
    array = np.empty((values, dtype.itemsize), dtype=np.uint8)
    for byte in range(dtype.itemsize):
        array[:, byte] = planes[byte]
    typed = array.reshape(-1).view(dtype)
    if coding == "delta-planes":
        unsigned = typed.view(dtype.str.replace("i", "u"))
        np.cumsum(unsigned, out=unsigned, dtype=unsigned.dtype)
    return typed


def gather(pool: AnyColumn, offsets: AnyColumn, lengths: AnyColumn) -> AnyColumn:
    """``pool[offset : offset + length]`` of every row, one after the other, as u8. The ranges lie within the pool."""
    wide = lengths.astype(np.int64)
    total = int(wide.sum())
    if not total:
        return np.zeros(0, dtype=np.uint8)
    begins = np.cumsum(wide) - wide
    if int(offsets[0]) + total <= len(pool) and bool((offsets.astype(np.int64) - begins == int(offsets[0]))[wide > 0].all()):
        return pool[int(offsets[0]) : int(offsets[0]) + total]  # already in this order: the usual case
    index = np.arange(total, dtype=np.int64) + np.repeat(offsets.astype(np.int64) - begins, wide)
    gathered: AnyColumn = pool[index]
    return gathered


def starts(lengths: AnyColumn, base: int) -> AnyColumn:
    """Where pieces of these lengths begin that follow each other from ``base``, as u64[n]; checked by the caller to fit."""
    result = np.cumsum(lengths, dtype=np.uint64)
    result += np.uint64(base)
    result -= lengths.astype(np.uint64)
    return np.asarray(result)


def total(lengths: AnyColumn, what: str, limit: int) -> int:
    """The sum of ``lengths``; raises :class:`FormatError` where it is beyond ``limit``, which also rules out overflow."""
    if len(lengths) and int(lengths.max()) > limit:
        raise FormatError(f"{what} is longer than the TOC", member="TOC")
    result = int(lengths.sum(dtype=np.uint64))
    if result > limit:
        raise FormatError(f"{what} are longer than the TOC", member="TOC")
    return result
