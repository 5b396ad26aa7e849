"""Groups and images between registries and layouts: copied, tagged, listed, deleted, compared.

A copy takes manifests as they are, so digests stay. Blobs that the destination has are skipped, those of another
repository of the same registry are mounted from there, and the rest stream through a scratch file. The name is
published last. Everything goes through :mod:`weenv.registry.endpoints`, hence through oras where it is pushed or pulled whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from urllib.parse import parse_qs, quote

from weenv.core import digest as digests
from weenv.core.aio import gather_all
from weenv.core.errors import BadReference, FormatError, NotFoundInSource, SourceError, UnsupportedError
from weenv.registry.auth import scope_of
from weenv.registry.client import RegistryClient
from weenv.registry.endpoints import End, open_end
from weenv.registry.jsonsplice import parse_object
from weenv.registry.layout import Layout
from weenv.registry.manifest import ACCEPT, REF_NAME, Descriptor, Index, parse_manifest
from weenv.registry.reference import LayoutLocation, Location, Reference, check_host, check_repository, check_tag

_DEPTH = 4
_PAGE = 1000
MAX_NAMES = 200_000
"""Repositories or tags of one listing; more are an error, not a loop without end."""
_NEXT = re.compile(r"<([^>]{1,4096})>\s*;\s*rel=\"?next\"?")

EXISTS, MOUNTED, COPIED = "exists", "mounted", "copied"


@dataclass(frozen=True, slots=True)
class CopiedBlob:
    """A blob or manifest of a copy. ``how`` is EXISTS, MOUNTED or COPIED."""

    descriptor: Descriptor
    how: str


@dataclass(frozen=True, slots=True)
class CopyResult:
    """``descriptor`` is of what the destination's name means now; ``blobs`` in no order, each once."""

    source: str
    destination: str
    descriptor: Descriptor
    blobs: tuple[CopiedBlob, ...]

    def count(self, how: str) -> tuple[int, int]:
        """How many blobs, and how many bytes, took that way."""
        chosen = [blob.descriptor.size for blob in self.blobs if blob.how == how]
        return len(chosen), sum(chosen)


@contextlib.asynccontextmanager
async def writable(
    client: RegistryClient, location: Location, *, mount_from: str = "", scratch_root: str = ""
) -> AsyncIterator[End]:
    """An end that is open for writing, and closed afterwards. Raises BadReference, StorageError."""
    root = scratch_root or os.environ.get("TMPDIR") or "/var/tmp"  # noqa: S108 - a private directory is made in it
    end = open_end(client, location, mount_from=mount_from, scratch_root=root)
    try:
        await asyncio.to_thread(end.open)
        yield end
    finally:
        await end.close()


async def copy(
    client: RegistryClient, source: Location, destination: Location, *, mount_from: str = "", at_once: int = 4,
    progress: Callable[[int], None] | None = None,
) -> CopyResult:  # fmt: skip
    """Copy an image, group or index with all it lists. Raises WeenvError; the destination's name is unchanged then.

    ``mount_from`` is a repository of the destination's registry that may have the blobs; where the source is one, it is
    tried by itself. ``progress`` is called with bytes moved, from other threads.
    """
    if destination.digest:
        raise BadReference(f"{destination} cannot be written to", hint="name a tag: HOST/NAME:TAG or oci:DIR:TAG")
    if isinstance(source, Reference) and isinstance(destination, Reference) and source.host == destination.host:
        mount_from = mount_from or (source.repository if source.repository != destination.repository else "")
    start = open_end(client, source)
    data, descriptor = await start.root()  # before anything is made at the destination
    async with writable(client, destination, mount_from=mount_from) as end:
        work = _Copy(start, end, bool(mount_from), at_once, progress)
        new = await work.document(data, descriptor, 0)
        await end.publish(data, new)
    return CopyResult(str(source), str(destination), new, tuple(work.done.values()))


class _Copy:
    """The blobs of one copy; each is moved once, however many manifests list it."""

    def __init__(
        self, source: End, destination: End, mount: bool, at_once: int, progress: Callable[[int], None] | None
    ) -> None:
        self._source = source
        self._destination = destination
        self._mount = mount
        self._slots = asyncio.Semaphore(at_once)
        self._progress = progress
        self._begun: set[str] = set()
        self._listed: set[str] = set()
        self.done: dict[str, CopiedBlob] = {}

    async def document(self, data: bytes, descriptor: Descriptor, depth: int) -> Descriptor:
        """Copy what a manifest or index lists; its descriptor, with the media type it has."""
        parsed = parse_manifest(data, descriptor.media_type, descriptor.digest)
        if isinstance(parsed, Index):
            if depth >= _DEPTH:
                raise FormatError("indexes within indexes within indexes", member=descriptor.digest)
            for child in parsed.manifests:
                if child.digest in self._listed:  # again: indexes of indexes are exponential work otherwise
                    continue
                self._listed.add(child.digest)
                body = await self._source.manifest(child)
                await self._destination.put_manifest(body, await self.document(body, child, depth + 1))
        else:
            wanted = {blob.digest: blob for blob in (parsed.config, *parsed.layers)}
            fresh = [blob for digest, blob in wanted.items() if digest not in self._begun]
            self._begun.update(wanted)
            await gather_all(*(self._blob(blob) for blob in fresh))
        return Descriptor(parsed.media_type, descriptor.digest, len(data))

    async def _blob(self, blob: Descriptor) -> None:
        async with self._slots:
            if await self._destination.has(blob, mount=False):
                how = EXISTS
            elif self._mount and await self._destination.has(blob):
                how = MOUNTED
            else:
                how = await self._move(blob)
        self.done[blob.digest] = CopiedBlob(blob, how)

    async def _move(self, blob: Descriptor) -> str:
        spool = os.path.join(self._destination.scratch, "copy-" + secrets.token_hex(8))
        try:
            try:
                path = await self._source.fetch(blob, spool, None)
            except NotFoundInSource:
                if blob.foreign:  # its bytes are elsewhere, as before
                    return EXISTS
                raise
            await self._destination.put(blob, path, owned=path == spool, progress=self._progress)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(spool)
        return COPIED


# -- names ------------------------------------------------------------------------------------------------------------


async def tags(client: RegistryClient, host: str, repository: str) -> list[str]:
    """The tags of a repository, sorted. Raises SourceError."""
    check_repository(repository)
    path = f"/v2/{repository}/tags/list"
    return sorted(set(await _listing(client, host, path, "tags", scope_of(repository), f"the tags of {repository}")))


async def repositories(client: RegistryClient, host: str) -> list[str]:
    """The repositories of a registry (distribution's ``_catalog``). Raises SourceError where it does not tell."""
    scope = "registry:catalog:*"
    try:
        return await _listing(client, check_host(host), "/v2/_catalog", "repositories", scope, "its repositories")
    except NotFoundInSource as error:
        raise UnsupportedError(f"{host} does not list its repositories", hint="name one: weenv group tags HOST/NAME") from error


def next_query(link: str) -> str:
    """The query of the page that a Link header says is next, or empty. Nothing else of it counts: the endpoint stays ours."""
    match = _NEXT.search(link)
    query = match[1].partition("#")[0].partition("?")[2] if match else ""
    return query.replace("/", "%2F") if query.isascii() and query.isprintable() and " " not in query else ""


async def _listing(client: RegistryClient, host: str, path: str, key: str, scope: str, what: str) -> list[str]:
    """All pages of a listing (distribution-spec, "Listing Tags": the Link header)."""
    found: list[str] = []
    query = f"?n={_PAGE}"
    seen: set[str] = set()
    while True:
        _, headers, body = await client.request("GET", host, path + query, what=what, scope=scope)
        _, raw = parse_object(body, what, 4 << 20)
        names = raw.get(key)
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise FormatError(f"no list of {key}", member=what)
        found += [name for name in names or () if len(name) < 512 and name.isprintable()]
        if len(found) > MAX_NAMES:
            raise SourceError(f"{host} lists more than {MAX_NAMES} {key}")
        values = parse_qs(next_query(headers.get("link", "")))
        if not values:
            return found
        query = "?" + "&".join(f"{name}={quote(values[name][0], safe='')}" for name in ("n", "last") if name in values)
        if query in seen:
            raise SourceError(f"{host} lists {key} in circles")
        seen.add(query)


@dataclass(frozen=True, slots=True)
class Listed:
    """A manifest of a layout: its tag (or empty) and descriptor."""

    tag: str
    descriptor: Descriptor


def list_layout(path: str) -> list[Listed]:
    """What a layout lists. Raises SourceError, FormatError."""
    layout = Layout(path)
    layout.check()
    return [Listed(entry.annotations.get(REF_NAME, ""), entry) for entry in layout.index().manifests]


async def tag(client: RegistryClient, source: Location, new: str) -> Descriptor:
    """Give what ``source`` means another tag in the same place. Raises SourceError, BadReference."""
    if isinstance(source, LayoutLocation):
        layout = Layout(source.path)
        descriptor = layout.resolve(source.tag, source.digest)
        await asyncio.to_thread(layout.set_tag, descriptor, new)
        return descriptor
    check_tag(new)
    data, descriptor = await client.get_manifest(source)
    media_type = parse_manifest(data, descriptor.media_type, str(source)).media_type
    target = Reference(source.host, source.repository, new)
    return await client.transfer.push_manifest(target, data, media_type)


@dataclass(frozen=True, slots=True)
class Deleted:
    """``tags`` no longer lead anywhere; ``manifest``: the manifest itself is gone, too."""

    digest: str
    tags: tuple[str, ...]
    manifest: bool


async def delete(client: RegistryClient, location: Location, *, force: bool = False) -> Deleted:
    """Delete what a name means. Blobs go when the registry collects its garbage; a layout keeps its blobs.

    Where several tags mean the same, only the tag is deleted; registries that cannot do that (most) delete the manifest
    and all its tags with it, for which ``force`` is needed. Raises SourceError, BadReference.
    """
    if isinstance(location, LayoutLocation):
        layout = Layout(location.path)
        descriptor = layout.resolve(location.tag, location.digest)
        gone = await asyncio.to_thread(layout.remove, descriptor.digest, None if location.digest or force else location.tag)
        return Deleted(descriptor.digest, tuple(gone), descriptor.digest not in {d.digest for d in layout.index().manifests})
    digest = location.digest or await _digest(client, location)
    same = await _same(client, location, digest)
    others = [name for name in same if name != location.tag]
    if location.tag and not location.digest and others and not force:
        if await _delete(client, location, location.tag):
            return Deleted(digest, (location.tag,), False)
        means = "means" if len(others) == 1 else "mean"
        raise UnsupportedError(
            f"{location.host} cannot delete a tag alone, and {', '.join(others[:5])} {means} the same", member=str(location),
            hint="--force deletes all of them",
        )  # fmt: skip
    if location.digest and same and not force:
        raise BadReference(f"{location} is still tagged: {', '.join(same[:5])}", hint="--force deletes the tags, too")
    if not await _delete(client, location, digest):
        raise UnsupportedError(f"{location.host} does not delete manifests", hint="its configuration has to allow it")
    return Deleted(digest, tuple(same), True)


async def _digest(client: RegistryClient, reference: Reference) -> str:
    """What a tag means, by a HEAD request where the registry answers it fully."""
    _, headers, _ = await client.request(
        "HEAD", reference.api_host, f"/v2/{reference.repository}/manifests/{reference.target}", what=str(reference),
        scope=scope_of(reference.repository), headers={"Accept": ACCEPT},
    )  # fmt: skip
    digest = headers.get("docker-content-digest", "")
    return digest if digests.is_digest(digest) else (await client.get_manifest(reference))[1].digest


async def _same(client: RegistryClient, reference: Reference, digest: str) -> list[str]:
    """The tags of the repository that mean ``digest``."""
    slots = asyncio.Semaphore(16)

    async def means(name: str) -> str:
        async with slots:
            try:
                return await _digest(client, Reference(reference.host, reference.repository, name))
            except NotFoundInSource:  # deleted meanwhile
                return ""

    try:
        names = await tags(client, reference.api_host, reference.repository)
    except NotFoundInSource:  # no tag is left
        return []
    found = await gather_all(*(means(name) for name in names))
    return [name for name, meant in zip(names, found, strict=True) if meant == digest]


async def _delete(client: RegistryClient, reference: Reference, target: str) -> bool:
    """True where the registry deleted it, False where it does not do that."""
    status, _, _ = await client.request(
        "DELETE", reference.api_host, f"/v2/{reference.repository}/manifests/{target}", what=f"{reference} for deletion",
        scope=scope_of(reference.repository, "pull,delete"), accept=frozenset({200, 202, 400, 405}),
    )  # fmt: skip
    return status in (200, 202)
