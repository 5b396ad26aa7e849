"""Reading a layer blob: its tar stream at random or whole, verified; and checking every link of a blob's chain at once.

Blobs are read through a function ``read_at(offset, length) -> bytes``; fewer bytes than asked for means the blob ends.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import BinaryIO

from weenv.core.errors import FormatError, VerificationError
from weenv.layer import tail as tails
from weenv.layer.codec import encode_content
from weenv.layer.limits import DEFAULT_LIMITS, Limits
from weenv.layer.tarscan import TarScanner
from weenv.layer.toc import Frames, Toc
from weenv.layer.tree import TreeBuilder
from weenv.layer.verify import LayerDescriptor, verify_frame, verify_tail

ReadAt = Callable[[int, int], bytes]

_READ_SIZE = 4 << 20


def file_reader(file: BinaryIO) -> ReadAt:
    """``read_at`` of an open file; its position is neither used nor changed."""
    fd = file.fileno()

    def read_at(offset: int, length: int) -> bytes:
        parts = []
        while length:
            part = os.pread(fd, length, offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return b"".join(parts)

    return read_at


def find_tail(read_at: ReadAt, size: int, limits: Limits = DEFAULT_LIMITS) -> tuple[int, bytes]:
    """The (offset, bytes) of the tail of a blob of ``size`` bytes, by its seek table. Not verified by any digest.

    Raises :class:`FormatError` where the blob is not of this format.
    """
    wanted = min(size, 65_536)  # the whole seek table of most layers
    while True:
        found = tails.locate_tail(read_at(size - wanted, wanted), size, limits)
        if isinstance(found, tails.TailRange):
            return found.offset, exactly(read_at, found.offset, found.length)
        if found <= wanted:
            raise FormatError("the blob changed while it was read", member="seek table")
        wanted = found


def describe(read_at: ReadAt, size: int, digest: str, limits: Limits = DEFAULT_LIMITS) -> LayerDescriptor:
    """The descriptor of a blob known to have ``digest``, whose tail is found by its seek table."""
    offset, tail = find_tail(read_at, size, limits)
    return LayerDescriptor(digest, size, offset, len(tail), "sha256:" + hashlib.sha256(tail).hexdigest())


def exactly(read_at: ReadAt, offset: int, length: int) -> bytes:
    """``length`` bytes from ``offset``. Raises :class:`VerificationError` where the blob ends before."""
    data = read_at(offset, length)
    if len(data) != length:
        raise VerificationError(f"the blob ends at {offset + len(data)}, within what should be at {offset}")
    return data


class LayerReader:
    """Random access to the tar stream of a blob whose frame table has been verified.

    The last ``keep`` frames are kept decompressed. Not for use by several threads at once.
    """

    def __init__(self, read_at: ReadAt, frames: Frames, *, keep: int = 4) -> None:
        self._read_at = read_at
        self._frames = frames
        self._keep = keep
        self._recent: OrderedDict[int, bytes] = OrderedDict()
        self.size = int(frames.content_offsets[-1])

    def frame(self, number: int) -> bytes:
        """The content of frame ``number``. Raises :class:`FormatError`."""
        content = self._recent.pop(number, None)
        if content is None:
            offset = int(self._frames.compressed_offsets[number])
            compressed = exactly(self._read_at, offset, int(self._frames.compressed_sizes[number]))
            content = verify_frame(self._frames, number, compressed)
            while len(self._recent) >= self._keep:
                self._recent.popitem(last=False)
        self._recent[number] = content
        return content

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes of the stream from ``offset``, fewer at its end. Raises :class:`FormatError`."""
        parts = []
        for number in self._frames.covering(offset, length):
            begin = int(self._frames.content_offsets[number])
            content = self.frame(number)
            parts.append(content[max(0, offset - begin) : offset + length - begin])
        return b"".join(parts)

    def stream(self) -> Iterator[bytes]:
        """The whole stream, frame by frame. Raises :class:`FormatError`."""
        for number in range(len(self._frames)):
            yield self.frame(number)


def open_blob(read_at: ReadAt, descriptor: LayerDescriptor, limits: Limits = DEFAULT_LIMITS) -> tuple[Toc, LayerReader]:
    """The verified TOC of a blob and a reader of its stream. Raises :class:`FormatError`."""
    toc = verify_tail(exactly(read_at, descriptor.toc_offset, descriptor.toc_length), descriptor, limits)
    return toc, LayerReader(read_at, toc.frames)


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """A blob that holds together: what it is, and how much of it there is."""

    descriptor: LayerDescriptor
    toc: Toc


def verify_blob(
    read_at: ReadAt,
    size: int,
    *,
    descriptor: LayerDescriptor | None = None,
    progress: Callable[[int, int | None], None] | None = None,
    threads: int = 0,
    limits: Limits = DEFAULT_LIMITS,
) -> Verified:
    """Check every link: blob digest and size, tail, each frame, diffID, and that the TOC says what the tar stream says.

    Without ``descriptor`` the blob is measured against itself: its tail is found by its seek table. ``progress`` is
    called with the bytes of the blob read so far and ``size``. Raises :class:`FormatError` at the first link that
    does not hold.
    """
    if descriptor is not None and descriptor.size != size:
        raise VerificationError(f"the blob has {size} bytes, expected {descriptor.size}", member=descriptor.digest)
    claimed = descriptor or describe(read_at, size, "sha256:" + "0" * 64, limits)
    tail = exactly(read_at, claimed.toc_offset, claimed.toc_length)
    toc = verify_tail(tail, claimed, limits)
    frames = toc.frames
    tree = TreeBuilder(limits)
    scanner = TarScanner(tree.add, limits)
    blob, stream = hashlib.sha256(), hashlib.sha256()
    workers = threads or len(os.sched_getaffinity(0))
    jobs: deque[tuple[Future[list[bytes]], int]] = deque()

    def finish_one() -> None:
        job, done = jobs.popleft()
        for content in job.result():
            scanner.feed(content)
            stream.update(content)
        scanner.payloads.clear()
        if progress is not None:
            progress(done, size)

    with ThreadPoolExecutor(workers, thread_name_prefix="weenv-verify") as pool:
        try:
            for first, last in _batches(frames):
                begin, end = int(frames.compressed_offsets[first]), int(frames.compressed_offsets[last])
                data = exactly(read_at, begin, end - begin)
                blob.update(data)
                jobs.append((pool.submit(_verify_frames, frames, first, last, data), end))
                while len(jobs) > workers + 1:
                    finish_one()
            while jobs:
                finish_one()
        finally:
            for job, _ in jobs:
                job.cancel()
    blob.update(tail)
    digest = "sha256:" + blob.hexdigest()
    if descriptor is not None and digest != descriptor.digest:
        raise VerificationError(f"the blob has digest {digest}, expected {descriptor.digest}")
    if "sha256:" + stream.hexdigest() != toc.diff_id:
        raise VerificationError(f"the tar stream has digest sha256:{stream.hexdigest()}, the TOC says {toc.diff_id}")
    scanner.close()
    columns = tree.finish()
    scanned = replace(toc, entries=columns.entries, xattrs=columns.xattrs, sparse=columns.sparse, pool=columns.pool)
    if encode_content(scanned, limits) != encode_content(toc, limits):
        raise VerificationError("it is not what the tar stream says", member=_difference(scanned, toc))
    if progress is not None:
        progress(size, size)
    return Verified(replace(claimed, digest=digest), toc)


def _batches(frames: Frames) -> Iterator[tuple[int, int]]:
    """Runs of frames [first, last) of about 4 MiB of content."""
    first = 0
    while first < len(frames):
        last = first + 1
        limit = int(frames.content_offsets[first]) + _READ_SIZE
        while last < len(frames) and int(frames.content_offsets[last + 1]) <= limit:
            last += 1
        yield first, last
        first = last


def _verify_frames(frames: Frames, first: int, last: int, data: bytes) -> list[bytes]:
    view = memoryview(data)
    base = int(frames.compressed_offsets[first])
    offsets = [int(offset) - base for offset in frames.compressed_offsets[first : last + 1]]
    return [verify_frame(frames, n, view[offsets[n - first] : offsets[n - first + 1]]) for n in range(first, last)]


def _difference(scanned: Toc, stored: Toc) -> str:
    """Where two TOCs differ first, for a message."""
    n = min(len(scanned.entries), len(stored.entries))
    for entry in range(n):
        if _row(scanned, entry) != _row(stored, entry):
            return "TOC entry /" + scanned.path(entry).decode("utf-8", "backslashreplace")[:200]
    return f"TOC ({len(stored.entries)} entries, {len(scanned.entries)} in the tar stream)"


def _row(toc: Toc, entry: int) -> tuple[object, ...]:
    e = toc.entries
    fixed = (
        e.parent, e.kind, e.flags, e.mode, e.uid, e.gid, e.mtime, e.mtime_ns, e.size, e.xattr_set,
    )  # fmt: skip
    pooled = toc.target(entry) if int(e.kind[entry]) == 2 else int(e.aux[entry])
    return (toc.name(entry), pooled, tuple(toc.xattr_items(entry)), *(int(column[entry]) for column in fixed))
