"""Where the bytes of a blob come from: a registry, an OCI layout directory, or a plain file, behind one protocol."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from weenv.core import digest as digests
from weenv.core.errors import NotFoundInSource, SourceError, VerificationError
from weenv.core.regular import regular
from weenv.registry.client import RegistryClient
from weenv.registry.ranged import RegistrySource

__all__ = ["BlobSource", "FileSource", "LayoutSource", "OriginLike", "RegistrySource", "open_source", "read_checked"]

CHUNK = 1 << 20
"""Bytes per chunk of a local stream."""


class BlobSource(Protocol):
    """Random access to one blob. Bytes are not verified here; lengths are exact."""

    @property
    def size(self) -> int:
        """Length of the blob in bytes."""

    async def read(self, offset: int, length: int, *, deadline: float | None = None) -> bytes:
        """Exactly ``length`` bytes from ``offset``; ``deadline`` in seconds from now. Raises SourceError."""

    def stream(self, offset: int, length: int, *, deadline: float | None = None) -> AsyncGenerator[bytes, None]:
        """The same in chunks as they arrive. Close the iterator (``aclosing``) when leaving early."""

    def suspect(self, offset: int, length: int) -> bool:
        """What was read there is wrong. True where another read may bring other bytes, False where that is no use."""

    async def close(self) -> None:
        """Give back what is held open."""


class OriginLike(Protocol):
    """What describes an origin: ``kind`` is ``registry`` (host, repository), ``layout`` or ``file`` (path)."""

    @property
    def kind(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def repository(self) -> str: ...
    @property
    def path(self) -> str: ...


class FileSource:
    """A blob that is a local file. Opened at once: raises NotFoundInSource or SourceError."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = regular(path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFoundInSource(f"no such file: {path}") from error
        except OSError as error:
            raise SourceError(f"cannot open {path}: {error.strerror}") from error
        self.size = os.fstat(self._fd).st_size

    def __repr__(self) -> str:
        return self.path

    def _read(self, offset: int, length: int) -> bytes:
        parts: list[bytes] = []
        while length > 0:
            try:
                part = os.pread(self._fd, length, offset)
            except OSError as error:
                raise SourceError(f"cannot read {self.path}: {error.strerror}") from error
            if not part:
                raise SourceError(f"{self.path} ends before {offset}, it was changed while in use")
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def read(self, offset: int, length: int, *, deadline: float | None = None) -> bytes:
        """Exactly ``length`` bytes from ``offset``. Raises SourceError; ``deadline`` is not looked at."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise SourceError(f"read of {length} bytes at {offset} beyond the {self.size} bytes of {self.path}")
        return await asyncio.to_thread(self._read, offset, length)

    async def stream(self, offset: int, length: int, *, deadline: float | None = None) -> AsyncGenerator[bytes, None]:
        """The same in chunks of at most CHUNK bytes."""
        end = offset + length
        while offset < end:
            chunk = await self.read(offset, min(CHUNK, end - offset))
            offset += len(chunk)
            yield chunk

    def suspect(self, offset: int, length: int) -> bool:
        """False: a file that is wrong stays so."""
        return False

    async def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LayoutSource(FileSource):
    """A blob in an OCI image layout directory (image-spec image-layout.md: ``blobs/<algorithm>/<encoded>``)."""

    def __init__(self, directory: str, digest: str, size: int | None = None) -> None:
        super().__init__(os.path.join(directory, "blobs", "sha256", digests.hex_of(digest)))
        if size is not None and self.size != size:
            os.close(self._fd)
            self._fd = -1
            raise SourceError(f"{self.path} has {self.size} bytes, its descriptor says {size}")


def open_source(
    client: RegistryClient, origin: OriginLike, digest: str, size: int, *, paced: bool = False
) -> BlobSource:
    """Open one origin of a blob. Raises SourceError or BadReference; a registry is not contacted before the first read.

    ``paced``: see :class:`RegistrySource`.
    """
    if origin.kind == "registry":
        return RegistrySource(client, origin.host, origin.repository, digest, size, paced=paced)
    if origin.kind == "layout":
        return LayoutSource(origin.path, digest, size)
    if origin.kind == "file":
        source = FileSource(origin.path)
        if source.size != size:
            os.close(source._fd)
            source._fd = -1
            raise SourceError(f"{origin.path} has {source.size} bytes, {size} were expected")
        return source
    raise SourceError(f"unknown kind of origin: {origin.kind!r}")


async def read_checked(
    source: BlobSource, offset: int, length: int, check: Callable[[bytes], Any], *,
    deadline: float | None = None, inline: int = 0,
) -> bytes:  # fmt: skip
    """Exactly ``length`` bytes from ``offset`` that ``check`` takes, which raises VerificationError.

    It runs in a thread where there are more than ``inline`` bytes.

    Wrong bytes are read again as long as the source may have others. Raises SourceError, VerificationError.
    """
    while True:
        data = await source.read(offset, length, deadline=deadline)
        try:
            if length > inline:
                await asyncio.to_thread(check, data)
            else:
                check(data)
        except VerificationError:
            if not source.suspect(offset, length):
                raise
        else:
            return data
