"""One layer: compressed tar in, blob in our format out. Blocking, for worker threads; stops when ``cancel`` is set."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from io import FileIO
from typing import BinaryIO

from weenv.converter.decompress import ReadAhead, TarStream
from weenv.converter.options import ConvertOptions
from weenv.core.atomic import check_replaceable, sync_directory
from weenv.core.errors import NotFoundInSource, SourceError, StorageError
from weenv.core.rights import remedy
from weenv.layer.encode import EncodedLayer, encode_layer

Taken = Callable[[int], None]
"""Called with the bytes of the compressed input taken in so far."""


class Output:
    """An unbuffered file whose write errors are StorageErrors (the encoder hands them on as they are)."""

    def __init__(self, file: FileIO, name: str) -> None:
        self._file = file
        self._name = name

    def write(self, data: bytes) -> int:
        """All of ``data``."""
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise _storage(self._name, error) from error
        return len(data)


def encode_stream(
    source: BinaryIO, out: FileIO, name: str, options: ConvertOptions, cancel: threading.Event, taken: Taken | None
) -> EncodedLayer:
    """Decompress ``source`` (gzip, zstd or a plain tar), encode it into ``out``, the file called ``name``.

    Raises FormatError for a stream that is malformed or cannot be represented, StorageError, and Cancelled
    (:mod:`weenv.registry.threads`).
    """
    stream = TarStream(source)
    output = Output(out, name)

    def report(_done: int, _total: int | None) -> None:
        if taken is not None:
            taken(stream.consumed)

    with ReadAhead(stream.read, cancel) as ahead:
        return encode_layer(
            ahead.read,
            output,  # type: ignore[arg-type]  # only its write is used
            target=options.target,
            level=options.level,
            threads=options.threads,
            progress=report,
            limits=options.limits,
        )


def encode_file(
    in_path: str, out_path: str, options: ConvertOptions, cancel: threading.Event, taken: Taken | None = None
) -> EncodedLayer:
    """:func:`encode_stream` from file to a new file, which is removed where that fails."""
    try:
        with open(in_path, "rb") as source, create_file(out_path) as out:
            return encode_stream(source, out, out_path, options, cancel, taken)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(out_path)
        raise


def convert_layer_file(
    in_path: str,
    out_path: str,
    options: ConvertOptions | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> EncodedLayer:
    """Convert a tar (plain, gzip or zstd; ``-`` is standard input) to a layer blob at ``out_path``, atomically.

    ``progress`` is called with the bytes of the input taken in so far and its size, where that is known. An interrupt
    (KeyboardInterrupt) leaves nothing. Raises FormatError, SourceError, StorageError.
    """
    options = options or ConvertOptions()
    directory = os.path.dirname(out_path) or "."
    try:
        check_replaceable(out_path)
    except OSError as error:
        raise StorageError(f"{out_path} {error.strerror}", errno=error.errno or 0) from error
    temporary = os.path.join(directory, f".{os.path.basename(out_path)}.{os.urandom(4).hex()}.tmp")
    with contextlib.ExitStack() as stack:
        if in_path == "-":
            source: BinaryIO = sys.stdin.buffer
        else:
            try:
                source = stack.enter_context(open(in_path, "rb"))
            except FileNotFoundError as error:
                raise NotFoundInSource(f"no such file: {in_path}") from error
            except OSError as error:
                raise SourceError(f"cannot read {in_path}: {error.strerror}") from error
        size = os.fstat(source.fileno()).st_size or None
        taken = None if progress is None else (lambda done: progress(done, size))
        try:
            with create_file(temporary) as out:
                encoded = encode_stream(source, out, out_path, options, threading.Event(), taken)
                os.fsync(out.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.rename(temporary, out_path)
            sync_directory(directory)
        except IsADirectoryError as error:
            raise StorageError(f"{out_path} is a directory", errno=error.errno or 0) from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    return encoded


def create_file(path: str) -> FileIO:
    """A new unbuffered file of mode 0600. Raises StorageError."""
    try:
        return FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
    except OSError as error:
        raise _storage(path, error) from error


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _storage(path: str, error: OSError) -> StorageError:
    return StorageError(f"cannot write {path}: {error.strerror}", errno=error.errno or 0, hint=remedy(error))
