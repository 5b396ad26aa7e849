"""The layer directory: the only thing that the snapshotter and blobfs share.

::

    <root>/layers/sha256/<64 hex digits of the layer digest>/
        toc            the blob's tail, byte for byte (TOC frame and seek table); verified before it is written. Of a layer
                       in another format (layer/foreign/) a tail that was made on this node from the blob's own TOC
        toc.damaged    a toc that blobfs found damaged and replaced, for whoever wants to look at it
        source.json    what the blob is and where its bytes come from (:class:`LayerSource`)
        facts.json     diffID and implied directories, from ``toc`` (planes/base.py)
        prefetch       the layer's read profile as its image's manifest says it (layer/profile.py), unchecked; where it has one
        reads          which frames have been read here, for who makes a profile (blobfs writes it; see cache/reads.py)
        evict          empty; ``data`` is to be evicted: the kernel is not to read it by itself (cache/keeper.py)
        meta.erofs     EROFS metadata built from ``toc`` by this node; its one extra device is the tar stream
        meta-<v>.erofs the same with other attributes for implied directories (variant <v>, see the resolver)
        data           the tar stream, sparse: holes where frames are missing (blobfs writes it)
        present        which frames of ``data`` are there (blobfs writes it; see cache/present.py)

Who writes: the snapshotter creates the directory under a temporary name with ``toc`` and ``source.json`` in it and
renames it into place, so a directory that exists has both; it adds ``meta*.erofs`` and ``prefetch`` by rename. blobfs alone
creates and changes ``data``, ``present``, ``reads`` and ``evict`` (so do commands where no blobfs runs). Removal: the
snapshotter renames the directory to ``<root>/layers/.trash/<name>`` first; blobfs keeps serving from the descriptors that it
holds open.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from weenv.core import digest as digests
from weenv.core.atomic import write_atomic
from weenv.core.errors import BadReference, FormatError
from weenv.layer.foreign.formats import ForeignLayer
from weenv.layer.verify import MAX_LABEL, LayerDescriptor

EVICT = "evict"
"""A complete layer that has this file in its directory is mounted over blobfs all the same."""
PREFETCH_MAX = MAX_LABEL
"""Bytes of a ``prefetch`` file at most."""
MUTATIONS = "mutations"
"""``<root>/mutations``: an OCI layout of layers that this node made itself (environment/mutate/cache.py)."""
CONVERTED = "converted"
"""``<root>/converted``: the same for layers that this node converted (environment/nodelayers.py)."""


@dataclass(frozen=True, slots=True)
class Origin:
    """One place that holds a blob: ``kind`` ``registry`` with ``host`` and ``repository``, or ``layout`` with ``path``.

    ``layout`` is an OCI image layout directory; ``file`` a blob file at ``path``.
    """

    kind: str
    host: str = ""
    repository: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True)
class LayerSource:
    """A layer blob's descriptor, its tail, and its origins in the order to try them.

    ``toc_offset`` and ``toc_length`` delimit the tail within the blob (bytes); ``toc_digest`` is the sha256 of it. Of a
    layer in another format, ``foreign`` is what its manifest says and where its own TOC lies; the tail is then the one that was
    made from that, and is in no blob: it would begin where the range of the last frame ends, at ``toc_offset``.
    """

    digest: str
    size: int
    toc_offset: int
    toc_length: int
    toc_digest: str
    origins: list[Origin] = field(default_factory=list)
    foreign: ForeignLayer | None = None

    def descriptor(self) -> LayerDescriptor:
        """What the stored tail is verified with."""
        size = self.size if self.foreign is None else self.toc_offset + self.toc_length
        return LayerDescriptor(
            self.digest, size, self.toc_offset, self.toc_length, self.toc_digest, foreign=self.foreign is not None
        )

    def to_json(self) -> bytes:
        """The content of ``source.json``."""
        raw = {"version": 1, **asdict(self)}
        if self.foreign is None:
            del raw["foreign"]
        return json.dumps(raw, sort_keys=True, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> LayerSource:
        """Parse ``source.json``. Raises :class:`FormatError`."""
        try:
            raw: dict[str, Any] = json.loads(data)
            if raw.pop("version") != 1:
                raise ValueError("unknown version")
            origins = [Origin(**item) for item in raw.pop("origins")]
            foreign = raw.pop("foreign", None)
            source = cls(origins=origins, foreign=None if foreign is None else ForeignLayer(**foreign), **raw)
            digests.check_digest(source.digest)
            digests.check_digest(source.toc_digest)
            sizes = source.size, source.toc_offset, source.toc_length
            if any(type(size) is not int or size < 0 for size in sizes):
                raise ValueError("sizes that are none")
            if source.foreign is None:
                fits = sum(sizes[1:]) == source.size
            else:
                source.foreign.check()
                fits = (source.foreign.digest, source.foreign.size) == (source.digest, source.size)
                fits = fits and source.toc_offset <= source.size
            if not fits:
                raise ValueError("sizes that do not fit each other")
            if any(type(text) is not str or "\0" in text for origin in source.origins for text in asdict(origin).values()):
                raise ValueError("an origin that is no text")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, BadReference) as error:
            raise FormatError(f"source.json cannot be read: {str(error)[:300]!r}") from error
        return source


class LayerDirs:
    """Paths and life cycle of the layer directories under ``root`` (the snapshotter's root directory)."""

    def __init__(self, root: str) -> None:
        self.root = os.path.join(root, "layers")
        self.base = os.path.join(self.root, "sha256")
        self.trash = os.path.join(self.root, ".trash")

    def path(self, digest: str) -> str:
        """The directory of a layer, whether it exists or not. Raises BadReference for anything but a sha256 digest."""
        return os.path.join(self.base, digests.hex_of(digest))

    def file(self, digest: str, name: str) -> str:
        """A file within it."""
        return os.path.join(self.path(digest), name)

    def known(self) -> list[str]:
        """The digests of all layers that have a directory."""
        try:
            names = os.listdir(self.base)
        except FileNotFoundError:
            return []
        return sorted("sha256:" + name for name in names if digests.is_digest("sha256:" + name))

    def exists(self, digest: str) -> bool:
        """True where the layer has a complete directory."""
        return os.path.exists(self.file(digest, "source.json"))

    def create(self, source: LayerSource, tail: bytes | memoryview) -> str:
        """Make a layer's directory with ``toc`` and ``source.json``; the caller has verified ``tail``. Returns its path.

        Does nothing where the directory exists already. Raises OSError.
        """
        if self.exists(source.digest):
            return self.path(source.digest)
        with self.beginning(source.digest) as temporary:
            write_atomic(os.path.join(temporary, "toc"), tail, durable=False)
            return self.adopt(source, temporary)

    @contextlib.contextmanager
    def beginning(self, digest: str) -> Iterator[str]:
        """A directory in which a layer's is prepared; it is removed in the end unless it was adopted. Raises OSError."""
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        temporary = os.path.join(self.root, f".new-{digests.hex_of(digest)[:12]}-{secrets.token_hex(4)}")
        os.mkdir(temporary, 0o700)
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def adopt(self, source: LayerSource, directory: str) -> str:
        """Make the layer's directory of one of :meth:`beginning` that has ``toc`` and nothing else. Returns its path.

        Does nothing where another exists already. Raises OSError.
        """
        final = self.path(source.digest)
        os.makedirs(self.base, mode=0o700, exist_ok=True)
        write_atomic(os.path.join(directory, "source.json"), source.to_json(), durable=False)
        try:
            os.rename(directory, final)
        except OSError:
            if not self.exists(source.digest):  # nobody else was first
                raise
        return final

    def source(self, digest: str) -> LayerSource:
        """Read ``source.json``. Raises OSError or FormatError."""
        with open(self.file(digest, "source.json"), "rb") as file:
            return LayerSource.from_json(file.read(1 << 20))

    def add_origins(self, digest: str, origins: list[Origin]) -> None:
        """Remember further places that hold the blob; known ones keep their rank, new ones come first."""
        source = self.source(digest)
        fresh = [origin for origin in origins if origin not in source.origins]
        if fresh:
            merged = replace(source, origins=[*fresh, *source.origins][:16])
            write_atomic(self.file(digest, "source.json"), merged.to_json(), durable=False)

    def prefetch(self, digest: str) -> str:
        """The layer's read profile, whatever it says; empty where it has none."""
        try:
            with open(self.file(digest, "prefetch"), "rb") as file:
                return file.read(PREFETCH_MAX + 1).decode("utf-8", "replace")
        except OSError:
            return ""

    def set_prefetch(self, digest: str, value: str) -> None:
        """Remember the layer's read profile; the latest counts. Raises OSError."""
        if value and value != self.prefetch(digest):
            write_atomic(self.file(digest, "prefetch"), value.encode("utf-8", "replace"), durable=False)

    def discard(self, digest: str) -> str | None:
        """Move a layer's directory to the trash and return its new path, or None where there is none."""
        os.makedirs(self.trash, mode=0o700, exist_ok=True)
        target = os.path.join(self.trash, f"{digests.hex_of(digest)}-{secrets.token_hex(4)}")
        try:
            os.rename(self.path(digest), target)
        except FileNotFoundError:
            return None
        return target

    def empty_trash(self) -> None:
        """Delete what was discarded and what a dead process left half made."""
        for folder, prefix in ((self.trash, ""), (self.root, ".new-")):
            try:
                names = os.listdir(folder)
            except FileNotFoundError:
                continue
            for name in names:
                if name.startswith(prefix) and name not in ("sha256", ".trash"):
                    shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
