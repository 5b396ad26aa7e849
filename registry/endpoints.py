"""The two ends of a copy or conversion behind one interface each: registries and OCI layout directories."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from typing import Protocol

from weenv.core import digest as digests
from weenv.core.atomic import write_atomic
from weenv.core.errors import BadReference, SourceError, StorageError
from weenv.registry.client import RegistryClient
from weenv.registry.layout import Layout
from weenv.registry.manifest import MAX_MANIFEST, Descriptor
from weenv.registry.orasreg import Progress
from weenv.registry.reference import LayoutLocation, Location, Reference, check_repository
from weenv.registry.source import BlobSource, LayoutSource, RegistrySource


class Source(Protocol):
    """Where an image comes from."""

    async def root(self) -> tuple[bytes, Descriptor]:
        """The manifest or index that the location names, verified."""

    async def manifest(self, descriptor: Descriptor) -> bytes:
        """A manifest listed by an index, verified."""

    async def small(self, descriptor: Descriptor, limit: int) -> bytes:
        """A small blob, verified."""

    async def fetch(self, descriptor: Descriptor, path: str, progress: Progress | None) -> str:
        """A whole verified blob as a file: a new one at ``path``, or one that is there already and is not to be touched."""

    def blob(self, descriptor: Descriptor) -> BlobSource:
        """Random access to a blob, unverified."""


class Destination(Protocol):
    """Where an image goes. Blobs and manifests that are put are complete and verified."""

    @property
    def scratch(self) -> str:
        """A directory for files that are handed to :meth:`put`; the destination removes it."""

    @property
    def place(self) -> str:
        """``HOST/REPOSITORY``, from which others on that host may have blobs mounted; empty where nothing can be."""

    def open(self) -> None:
        """Make it ready to be written to. Raises StorageError, FormatError."""

    async def has(self, descriptor: Descriptor, *, mount: bool = True, places: Sequence[str] = ()) -> bool:
        """True where the blob is there, or (``mount``) could be brought there without its bytes passing through here.

        So it may be from one of ``places`` that held it once; where that is refused, the answer is no.
        """

    async def put(self, descriptor: Descriptor, path: str, *, owned: bool, progress: Progress | None) -> None:
        """Store a blob; an ``owned`` file in :attr:`scratch` may be consumed."""

    async def put_bytes(self, data: bytes, descriptor: Descriptor) -> None:
        """Store a small blob."""

    async def put_manifest(self, data: bytes, descriptor: Descriptor) -> None:
        """Store a manifest under its digest."""

    async def publish(self, data: bytes, descriptor: Descriptor) -> None:
        """Store the root and give it the location's name. The last step."""

    async def close(self) -> None:
        """Remove what is temporary."""


# -- layouts --------------------------------------------------------------------------------------------------------


class LayoutEnd:
    """An OCI layout directory, as source or destination."""

    def __init__(self, location: LayoutLocation, scratch_dir: str = "") -> None:
        self.location = location
        self.layout = Layout(location.path)
        self._scratch_dir = scratch_dir

    async def root(self) -> tuple[bytes, Descriptor]:
        """See :class:`Source`."""

        def work() -> tuple[bytes, Descriptor]:
            descriptor = self.layout.resolve(self.location.tag, self.location.digest)
            return self.layout.read_blob(descriptor), descriptor

        return await asyncio.to_thread(work)

    async def manifest(self, descriptor: Descriptor) -> bytes:
        """See :class:`Source`."""
        return await asyncio.to_thread(self.layout.read_blob, descriptor, MAX_MANIFEST)

    async def small(self, descriptor: Descriptor, limit: int) -> bytes:
        """See :class:`Source`."""
        return await asyncio.to_thread(self.layout.read_blob, descriptor, limit)

    async def fetch(self, descriptor: Descriptor, path: str, progress: Progress | None) -> str:
        """See :class:`Source`: the layout's own file, once its digest is known to be right."""
        return await asyncio.to_thread(self.layout.verify_blob, descriptor)

    def blob(self, descriptor: Descriptor) -> BlobSource:
        """See :class:`Source`."""
        return LayoutSource(self.location.path, descriptor.digest, descriptor.size)

    # as destination

    def open(self) -> None:
        """See :class:`Destination`."""
        self.layout.create()

    @property
    def scratch(self) -> str:
        """See :class:`Destination`: on the same filesystem, so that blobs appear by rename."""
        return self.layout.scratch

    @property
    def place(self) -> str:
        """See :class:`Destination`."""
        return ""

    async def has(self, descriptor: Descriptor, *, mount: bool = True, places: Sequence[str] = ()) -> bool:
        """See :class:`Destination`."""
        return self.layout.has_blob(descriptor.digest, descriptor.size)

    async def put(self, descriptor: Descriptor, path: str, *, owned: bool, progress: Progress | None) -> None:
        """See :class:`Destination`."""

        def work() -> None:
            mine = path
            if not owned:
                mine = os.path.join(self.scratch, "copy-" + digests.hex_of(descriptor.digest))
                try:
                    shutil.copyfile(path, mine)
                except OSError as error:
                    raise StorageError(f"cannot write {mine}: {error.strerror}", errno=error.errno or 0) from error
            self.layout.adopt(mine, descriptor.digest)

        await asyncio.to_thread(work)

    async def put_bytes(self, data: bytes, descriptor: Descriptor) -> None:
        """See :class:`Destination`."""
        await asyncio.to_thread(self.layout.put, data, descriptor.media_type)

    async def put_manifest(self, data: bytes, descriptor: Descriptor) -> None:
        """See :class:`Destination`."""
        await asyncio.to_thread(self.layout.put, data, descriptor.media_type)

    async def publish(self, data: bytes, descriptor: Descriptor) -> None:
        """See :class:`Destination`."""
        await asyncio.to_thread(self.layout.put, data, descriptor.media_type)
        await asyncio.to_thread(self.layout.set_tag, descriptor, self.location.tag)

    async def close(self) -> None:
        """See :class:`Destination`."""
        await asyncio.to_thread(self.layout.close)


# -- registries -----------------------------------------------------------------------------------------------------


class RegistryEnd:
    """A registry repository, as source or destination. ``mount_from`` is a repository of the same host to mount from."""

    def __init__(
        self, client: RegistryClient, reference: Reference, *, mount_from: str = "", scratch_root: str = "",
        chunk_size: int = 0,
    ) -> None:  # fmt: skip
        self.client = client
        self.reference = reference
        self.mount_from = mount_from
        self.scratch = ""
        self._scratch_root = scratch_root
        self._chunk_size = chunk_size

    @property
    def _place(self) -> tuple[str, str]:
        return self.reference.host, self.reference.repository

    async def root(self) -> tuple[bytes, Descriptor]:
        """See :class:`Source`."""
        return await self.client.get_manifest(self.reference)

    async def manifest(self, descriptor: Descriptor) -> bytes:
        """See :class:`Source`."""
        data, _ = await self.client.get_manifest(self.reference.with_digest(descriptor.digest))
        return data

    async def small(self, descriptor: Descriptor, limit: int) -> bytes:
        """See :class:`Source`."""
        return await self.client.transfer.pull_bytes(*self._place, descriptor, limit)

    async def fetch(self, descriptor: Descriptor, path: str, progress: Progress | None) -> str:
        """See :class:`Source`."""
        await self.client.transfer.pull_blob(*self._place, descriptor, path, progress)
        return path

    def blob(self, descriptor: Descriptor) -> BlobSource:
        """See :class:`Source`."""
        return RegistrySource(self.client, *self._place, descriptor.digest, descriptor.size)

    # as destination

    def open(self) -> None:
        """See :class:`Destination`."""
        try:
            self.scratch = tempfile.mkdtemp(prefix="weenv-convert-", dir=self._scratch_root or None)
        except OSError as error:
            raise StorageError(
                f"no scratch directory in {self._scratch_root or tempfile.gettempdir()}: {error.strerror}",
                errno=error.errno or 0,
                hint="name one with room for the largest layers: --scratch DIR, or TMPDIR",
            ) from error  # fmt: skip

    @property
    def place(self) -> str:
        """See :class:`Destination`."""
        return "/".join(self._place)

    async def has(self, descriptor: Descriptor, *, mount: bool = True, places: Sequence[str] = ()) -> bool:
        """See :class:`Destination`."""
        if await self.client.transfer.mount_blob(*self._place, descriptor, self.mount_from if mount else ""):
            return True
        host = self.reference.host + "/"
        for other in dict.fromkeys(place.removeprefix(host) for place in reversed(places) if place.startswith(host)):
            with contextlib.suppress(SourceError, BadReference):  # not ours to read any more, or gone
                if await self.client.transfer.mount_blob(*self._place, descriptor, check_repository(other)):
                    return True
        return False

    async def put(self, descriptor: Descriptor, path: str, *, owned: bool, progress: Progress | None) -> None:
        """See :class:`Destination`."""
        await self.client.transfer.push_blob(*self._place, descriptor, path, chunk_size=self._chunk_size, progress=progress)

    async def put_bytes(self, data: bytes, descriptor: Descriptor) -> None:
        """See :class:`Destination`."""
        path = os.path.join(self.scratch, "small-" + digests.hex_of(descriptor.digest))
        try:
            await asyncio.to_thread(write_atomic, path, data, durable=False)
            await self.put(descriptor, path, owned=True, progress=None)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}", errno=error.errno or 0) from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    async def put_manifest(self, data: bytes, descriptor: Descriptor) -> None:
        """See :class:`Destination`."""
        reference = self.reference.with_digest(descriptor.digest)
        await self.client.transfer.push_manifest(reference, data, descriptor.media_type)

    async def publish(self, data: bytes, descriptor: Descriptor) -> None:
        """See :class:`Destination`."""
        await self.client.transfer.push_manifest(self.reference, data, descriptor.media_type)

    async def close(self) -> None:
        """See :class:`Destination`."""
        if self.scratch:
            await asyncio.to_thread(shutil.rmtree, self.scratch, True)


End = LayoutEnd | RegistryEnd


def open_end(
    client: RegistryClient, location: Location, *, mount_from: str = "", scratch_root: str = "", chunk_size: int = 0
) -> End:
    """A location as one end of a copy."""
    if isinstance(location, LayoutLocation):
        return LayoutEnd(location)
    return RegistryEnd(client, location, mount_from=mount_from, scratch_root=scratch_root, chunk_size=chunk_size)


def open_ends(client: RegistryClient, src: Location, dst: Location, *, scratch_root: str, chunk_size: int) -> tuple[End, End]:
    """Source and destination. The caller opens the latter when it knows what to put there, and closes it.

    Raises :class:`BadReference` for a destination that names a digest.
    """
    if dst.digest:
        raise BadReference(f"{dst} cannot be written to", hint="name a tag: HOST/NAME:TAG or oci:DIR:TAG")
    mount_from = ""
    if isinstance(src, Reference) and isinstance(dst, Reference) and src.host == dst.host and src.repository != dst.repository:
        mount_from = src.repository
    return open_end(client, src), open_end(
        client, dst, mount_from=mount_from, scratch_root=scratch_root, chunk_size=chunk_size
    )
