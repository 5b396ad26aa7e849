"""Which files of an image a series of commands reads, and what fetching just those would cost.

The kernel says it: a fanotify mark on the container's overlay (fanotify(7), FAN_MARK_FILESYSTEM) reports every open of a
regular file. A file that was opened counts as read, and counts whole: reads through mmap (shared objects, git's packs and
its hashing of large files) are not reported one by one. The cost of that set is the sum of the compressed sizes of all frames
that hold a byte of one of these files, each frame once, in the layer that wins the overlay's lookup.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from collections.abc import Iterable
from types import TracebackType

import numpy as np

from weenv.layer import toc as model
from weenv.layer.tail import TailRange, locate_tail, parse_tail
from weenv.layer.toc import Toc

FAN_OPEN = 0x20
FAN_CLOEXEC, FAN_NONBLOCK, FAN_UNLIMITED_QUEUE = 0x1, 0x2, 0x10
FAN_MARK_ADD, FAN_MARK_FILESYSTEM = 0x1, 0x100
AT_FDCWD = -100
_EVENT = struct.Struct("=IBBHQii")


class Watch:
    """Collects what is read below one mounted filesystem. Use as a context manager; then ask :meth:`files`."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._seen: set[str] = set()
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.fanotify_init(FAN_CLOEXEC | FAN_NONBLOCK | FAN_UNLIMITED_QUEUE, os.O_RDONLY | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "fanotify_init")
        mask = ctypes.c_uint64(FAN_OPEN)
        if libc.fanotify_mark(self._fd, FAN_MARK_ADD | FAN_MARK_FILESYSTEM, mask, AT_FDCWD, os.fsencode(root)):
            raise OSError(ctypes.get_errno(), f"fanotify_mark {root}")
        self._stop, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def _loop(self) -> None:
        while True:
            ready, _, _ = select.select((self._fd, self._stop), (), ())
            while self._take():
                pass
            if self._stop in ready:
                return

    def _take(self) -> bool:
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return False
        offset = 0
        while offset < len(data):
            length, _, _, _, _, fd, _ = _EVENT.unpack_from(data, offset)
            offset += length
            if fd >= 0:
                path = os.readlink(f"/proc/self/fd/{fd}")
                os.close(fd)
                self._seen.add(path)
        return True

    def close(self) -> None:
        """Stop watching."""
        os.write(self._wake, b"x")
        self._thread.join()
        for fd in (self._fd, self._stop, self._wake):
            os.close(fd)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def files(self) -> list[str]:
        """Paths within the container, without leading slash, of the files read so far."""
        prefix = self.root + "/"
        found = [path.removeprefix(prefix).lstrip("/").removesuffix(" (deleted)") for path in self._seen]
        return sorted(found)


def read_tail(path: str) -> tuple[bytes, TailRange, int]:
    """(tail, where it lies, size of the blob) of a converted layer in a file."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        wanted: TailRange | int = 9
        while isinstance(wanted, int):
            file.seek(max(0, size - wanted))
            wanted = locate_tail(file.read(), size)
        file.seek(wanted.offset)
        return file.read(wanted.length), wanted, size


def read_toc(path: str) -> Toc:
    """The TOC of a converted layer in a file."""
    tail, where, size = read_tail(path)
    return parse_tail(tail, layer_size=size, toc_offset=where.offset)


def frames_of(files: Iterable[str], layers: list[Toc]) -> tuple[int, int, int]:
    """(compressed bytes of the frames, bytes of the files, files found) for files read of an image, lowest layer first."""
    needed = [np.zeros(len(toc.frames), dtype=bool) for toc in layers]
    size = found = 0
    for name in files:
        encoded = os.fsencode(name)
        for number in range(len(layers) - 1, -1, -1):
            toc = layers[number]
            entry = toc.lookup(encoded)
            if entry is None:
                continue
            if toc.entries.kind[entry] == model.HARDLINK:
                entry = int(toc.entries.aux[entry])
            if toc.entries.kind[entry] != model.FILE:
                break
            length, aux = int(toc.entries.size[entry]), int(toc.entries.aux[entry])
            found += 1
            size += length
            if toc.entries.flags[entry] & model.FLAG_SPARSE:
                pieces = [(stream, piece) for _, stream, piece in toc.sparse_rows(entry)]
            else:
                pieces = [] if aux == model.NO_DATA else [(aux, length)]
            for stream, piece in pieces:
                covering = toc.frames.covering(stream, piece)
                needed[number][covering.start : covering.stop] = True
            break
    compressed = sum(int(toc.frames.compressed_sizes[mask].sum()) for toc, mask in zip(layers, needed, strict=True))
    return compressed, size, found
