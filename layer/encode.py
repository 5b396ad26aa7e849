"""Tar stream in, layer blob out, in one pass, on all cores, in bounded memory.

The calling thread reads and scans; one thread hashes the stream, one writes the blob and hashes it, and a pool compresses
and hashes frames (zstd and OpenSSL release the GIL). Frames are written in order, so the blob is the same for the same
stream, target and level, however many threads there are and however the stream is read.
"""

from __future__ import annotations

import hashlib
import os
import threading
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO, TypeVar

import numpy as np
import zstandard

from weenv.layer.cuts import Cutter
from weenv.layer.limits import DEFAULT_LIMITS, Limits
from weenv.layer.tail import build_tail
from weenv.layer.tarscan import TarScanner
from weenv.layer.toc import Frames, Toc
from weenv.layer.tree import TreeBuilder
from weenv.layer.verify import LayerDescriptor

DEFAULT_TARGET = 640 << 10
DEFAULT_LEVEL = 3
"""Frame size in bytes and zstd level; docs/adr/0001-frame-size.md has the measurements behind them."""

_WINDOW_LOG = 21
_HASH_LOG = 16
_CHAIN_LOG = 15
"""log2: of the window in bytes, of the entries of the tables for long and for short matches (dfast); see the same page."""

READ_SIZE = 1 << 20
_IN_FLIGHT = 8 << 20
"""Uncompressed bytes per thread that may wait for the pool or for being written."""

Progress = Callable[[int, int | None], None]
"""Called with the bytes of the stream taken in so far, and of how many, where known."""

_Batch = list[tuple[bytes, bytes]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class EncodedLayer:
    """What was written: digests are ``sha256:...``, sizes and offsets bytes."""

    blob_digest: str
    blob_size: int
    diff_id: str
    stream_size: int
    toc_offset: int
    toc_length: int
    toc_digest: str
    toc: Toc

    def descriptor(self) -> LayerDescriptor:
        """The blob as its manifest will describe it."""
        return LayerDescriptor(self.blob_digest, self.blob_size, self.toc_offset, self.toc_length, self.toc_digest)

    def annotations(self) -> dict[str, str]:
        """The annotations of the layer's descriptor."""
        return self.descriptor().annotations()


def parameters(level: int) -> zstandard.ZstdCompressionParameters:
    """How frames of ``level`` are compressed: as zstd does it, but for the default level.

    zstd's level 3 has tables of 2^17 and 2^16 entries, made for longer inputs than frames: with half of that it takes 7 %
    less time and 0.8 % more bytes, which larger frames in large files give back.
    """
    if level != DEFAULT_LEVEL:
        return zstandard.ZstdCompressionParameters.from_level(level, write_checksum=False, write_content_size=True)
    return zstandard.ZstdCompressionParameters(
        window_log=_WINDOW_LOG,
        hash_log=_HASH_LOG,
        chain_log=_CHAIN_LOG,
        search_log=1,
        min_match=5,
        target_length=0,
        strategy=zstandard.STRATEGY_DFAST,
        write_checksum=False,
        write_content_size=True,
    )


class _Compressors(threading.local):
    """One compressor per thread, reused: setting one up costs as much as a small frame."""

    level = 0
    compressor: zstandard.ZstdCompressor | None = None

    def get(self, level: int) -> zstandard.ZstdCompressor:
        if self.compressor is None or self.level != level:
            self.level = level
            self.compressor = zstandard.ZstdCompressor(compression_params=parameters(level))
        return self.compressor


_compressors = _Compressors()


def _compress(pieces: list[bytes | memoryview], level: int) -> _Batch:
    """Each frame and its digest."""
    compressor = _compressors.get(level)
    result = []
    for piece in pieces:
        frame = compressor.compress(piece)
        result.append((frame, hashlib.sha256(frame).digest()))
    return result


class _Serial:
    """Calls made one after the other by one thread of their own, a few of them waiting at most."""

    _WAITING = 8

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._calls: deque[Future[None]] = deque()

    def do(self, call: Callable[[T], object], data: T) -> None:
        """Have ``call(data)`` made. Raises what an earlier call raised."""
        while len(self._calls) >= self._WAITING or (self._calls and self._calls[0].done()):
            self._calls.popleft().result()
        self._calls.append(self._pool.submit(self._run, call, data))

    @staticmethod
    def _run(call: Callable[[T], object], data: T) -> None:
        call(data)

    def finish(self) -> None:
        """Wait for all calls. Raises what one of them raised."""
        while self._calls:
            self._calls.popleft().result()

    def close(self) -> None:
        """Drop the calls that have not begun, wait for the one that has, and end the thread."""
        self._pool.shutdown(cancel_futures=True)


class _Pending:
    """Bytes of the stream that no frame has taken yet."""

    def __init__(self) -> None:
        self._chunks: deque[memoryview] = deque()
        self.start = 0
        self.end = 0

    def add(self, data: bytes) -> None:
        self._chunks.append(memoryview(data))
        self.end += len(data)

    def take(self, size: int) -> bytes | memoryview:
        """The next ``size`` bytes, which are there; copied only where they came in several reads."""
        self.start += size
        first = self._chunks[0]
        if len(first) > size:
            self._chunks[0] = first[size:]
            return first[:size]
        if len(first) == size:
            return self._chunks.popleft()
        parts = []
        while size:
            part = self._chunks.popleft()
            if len(part) > size:
                self._chunks.appendleft(part[size:])
                part = part[:size]
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def encode_layer(
    source: BinaryIO | Callable[[int], bytes],
    out: BinaryIO,
    *,
    target: int = DEFAULT_TARGET,
    level: int = DEFAULT_LEVEL,
    threads: int = 0,
    total: int | None = None,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> EncodedLayer:
    """Write the layer blob for the uncompressed tar stream of ``source`` to ``out``, which need not be seekable.

    ``target`` is in bytes, a multiple of 512; ``threads`` 0 means one for each CPU that may be used; ``total`` is only
    handed on to ``progress``. Raises :class:`FormatError` for a stream that cannot be represented, naming the member, and
    whatever ``source``, ``out`` and ``progress`` raise; what was written by then is of no use.
    """
    if target > limits.max_frame_content // 4:
        raise ValueError("the target must be at most a quarter of the limit of a frame's content")
    workers = threads or len(os.sched_getaffinity(0))
    read = source if callable(source) else source.read
    encoder = _Encoder(out, target, level, workers, limits)
    try:
        while data := read(READ_SIZE):
            encoder.feed(data)
            if progress is not None:
                progress(encoder.taken, total)
        return encoder.finish()
    finally:
        encoder.close()


class _Encoder:
    def __init__(self, out: BinaryIO, target: int, level: int, workers: int, limits: Limits) -> None:
        self._out = out
        self._target = target
        self._level = level
        self._limits = limits
        self._tree = TreeBuilder(limits)
        self._scanner = TarScanner(self._tree.add, limits)
        self._cutter = Cutter(target)
        self._cuts: deque[int] = deque()
        self._pending = _Pending()
        self._pieces: list[bytes | memoryview] = []
        self._pieces_size = 0
        self._batch = max(target, 1 << 20)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="weenv-encode")
        self._hasher = _Serial("weenv-encode-hash")
        self._writer = _Serial("weenv-encode-write")
        self._jobs: deque[tuple[Future[_Batch], int]] = deque()
        self._in_flight = 0
        self._most_in_flight = workers * max(_IN_FLIGHT, 4 * target)
        self._stream = hashlib.sha256()
        self._blob = hashlib.sha256()
        self._written = 0
        self._compressed = array("I")
        self._content = array("I")
        self._digests = bytearray()
        self.taken = 0

    def feed(self, data: bytes) -> None:
        data = bytes(data)  # frames refer to it while the caller may reuse its buffer; no copy where it is bytes already
        self._hasher.do(self._stream.update, data)
        self._scanner.feed(data)
        self._pending.add(data)
        self.taken += len(data)
        self._plan(final=False)
        self._submit()

    def _plan(self, final: bool) -> None:
        # The scanner corrects a payload's offset where the block found there is an extension of an old GNU sparse header:
        # a payload is final once that block has been seen. Waiting for it makes the cuts independent of how the
        # stream is read.
        seen = self.taken // 512 * 512
        payloads = self._scanner.payloads
        ready = len(payloads)
        while not final and ready and payloads[ready - 1][0] >= seen:
            ready -= 1
        for offset, length in payloads[:ready]:
            self._cuts += self._cutter.payload(offset, length)
        del payloads[:ready]
        self._cuts += self._cutter.known(min(seen, payloads[0][0]) if payloads else seen)

    def _submit(self, final: bool = False) -> None:
        pending = self._pending
        while self._cuts and self._cuts[0] <= pending.end:
            size = self._cuts.popleft() - pending.start
            self._pieces.append(pending.take(size))
            self._content.append(size)
            self._pieces_size += size
            if self._pieces_size >= self._batch:
                self._flush()
        if final and self._pieces:
            self._flush()
        while self._jobs and (self._in_flight > self._most_in_flight or self._jobs[0][0].done()):
            self._write()

    def _flush(self) -> None:
        self._jobs.append((self._pool.submit(_compress, self._pieces, self._level), self._pieces_size))
        self._in_flight += self._pieces_size
        self._pieces, self._pieces_size = [], 0

    def _write(self) -> None:
        job, size = self._jobs.popleft()
        batch = job.result()
        self._put([frame for frame, _ in batch])
        for frame, digest in batch:
            self._compressed.append(len(frame))
            self._digests += digest
        self._in_flight -= size

    def _put(self, parts: list[bytes]) -> None:
        self._writer.do(self._write_all, parts)
        self._written += sum(map(len, parts))

    def _write_all(self, parts: list[bytes]) -> None:
        for part in parts:
            view = memoryview(part)
            while view:  # unbuffered files take less than all when they please
                view = view[self._out.write(view) :]
            self._blob.update(part)

    def finish(self) -> EncodedLayer:
        self._scanner.close()
        self._plan(final=True)
        self._cuts += self._cutter.finish(self.taken)
        self._submit(final=True)
        tree = self._tree.finish()  # while the pool works on the last frames
        while self._jobs:
            self._write()
        self._hasher.finish()
        toc = Toc(
            diff_id="sha256:" + self._stream.hexdigest(),
            stream_size=self.taken,
            frame_target=self._target,
            level=self._level,
            frames=Frames(
                np.array(self._compressed, dtype=np.uint32),
                np.array(self._content, dtype=np.uint32),
                np.frombuffer(bytes(self._digests), dtype=np.uint8).reshape(-1, 32),
            ),
            entries=tree.entries,
            xattrs=tree.xattrs,
            sparse=tree.sparse,
            pool=tree.pool,
        )
        toc_offset = self._written
        tail = build_tail(toc, self._limits)
        self._put([tail])
        self._writer.finish()
        return EncodedLayer(
            blob_digest="sha256:" + self._blob.hexdigest(),
            blob_size=self._written,
            diff_id=toc.diff_id,
            stream_size=self.taken,
            toc_offset=toc_offset,
            toc_length=len(tail),
            toc_digest="sha256:" + hashlib.sha256(tail).hexdigest(),
            toc=toc,
        )

    def close(self) -> None:
        """End all threads; what they had not begun is dropped."""
        self._pool.shutdown(cancel_futures=True)
        self._hasher.close()
        self._writer.close()
