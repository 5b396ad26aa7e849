"""Frame tables that are too large to keep in memory: on disk, looked at through a mapping.

A frame costs 74 bytes in memory (32 of digest, 8 of sizes, two offset tables twice, ages). Layers seen in practice have some
thousands; a hostile one has two million, and an image may have a hundred of those. So from :data:`LARGE` frames on the
columns lie in a file without a name in the layer directory. What is not in use there costs page cache, which the kernel
takes back when it needs it, and what is in use is read a page at a time.

A small table stays in memory: a mapping of a file on a broken disk ends the process (SIGBUS), which is no risk to take for
layers that nobody made in order to do harm.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from dataclasses import replace
from typing import Any, Final

import numpy as np

from weenv.core.errors import StorageError
from weenv.layer.toc import Frames

LARGE: Final = 1 << 16
"""Frames: 32 GiB of tar stream at the default size of a frame, and some 5 MB of memory."""
IN_MEMORY: Final = 79
"""Bytes of memory for each frame of a small table: the columns, offsets, states, ages, reads, and what read-ahead knows."""
ON_DISK: Final = 6
"""The same for a large one: states, ages, reads, and what read-ahead knows."""


class MappedFrames(Frames):
    """A frame table whose columns are views of a mapped file."""

    __slots__ = ()


def give_back() -> None:
    """Return what was freed to the kernel: malloc keeps pieces of up to 32 MiB, several for each large table decoded."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def spool(frames: Frames, directory: str) -> Frames:
    """``frames``, its columns backed by a nameless file in ``directory`` where it has at least :data:`LARGE` frames or pieces.

    Raises :class:`StorageError`: a table of that size is not kept in memory because a disk is full.
    """
    pieces = frames.pieces
    if max(len(frames), 0 if pieces is None else len(pieces)) < LARGE:
        return frames
    columns: list[tuple[object, str, str]] = [
        (frames, "compressed_offsets", "u8"), (frames, "content_offsets", "u8"), (frames, "compressed_sizes", "u4"),
        (frames, "content_sizes", "u4"), (frames, "digests", "u1"),
    ]  # fmt: skip
    if pieces is not None:
        columns += [(pieces, name, "u4") for name in ("first", "unit", "skip", "size", "place")]
        columns.append((pieces, "digests", "u1"))
    parts = [np.ascontiguousarray(getattr(table, name), dtype=kind) for table, name, kind in columns]
    length = sum(part.nbytes for part in parts)
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, length)  # a mapping of a file with holes on a full disk is a SIGBUS
            for part in parts:
                view = part.reshape(-1).view(np.uint8).data
                while view:
                    view = view[file.write(view) :]
            mapping = mmap.mmap(file.fileno(), length, prot=mmap.PROT_READ)
    except OSError as error:
        raise StorageError(
            f"a frame table of {length} bytes cannot be kept in {directory}: {error.strerror}", errno=error.errno or 0
        ) from error
    mapping.madvise(mmap.MADV_RANDOM)
    found = object.__new__(MappedFrames)
    mapped: dict[str, Any] = {}
    position = 0
    for (table, name, kind), part in zip(columns, parts, strict=True):
        column = np.frombuffer(mapping, kind, part.size, position).reshape(part.shape)
        if table is frames:
            object.__setattr__(found, name, column)
        else:
            mapped[name] = column
        position += part.nbytes
    object.__setattr__(found, "pieces", None if pieces is None else replace(pieces, **mapped))
    return found
