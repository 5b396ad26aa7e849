"""An OCI image layout directory as source and destination (image-spec image-layout.md, version 1.0.0).

::

    DIR/oci-layout                  {"imageLayoutVersion": "1.0.0"}
    DIR/index.json                  an image index; a manifest's tag is its annotation org.opencontainers.image.ref.name
    DIR/blobs/sha256/<64 hex>       the blobs
    DIR/.weenv-<pid>-<random>/      files not yet complete; gone when their writer ends

Blobs appear by rename, ``index.json`` is replaced by rename under a lock on ``oci-layout``, last: whoever is interrupted
leaves unreferenced blobs at most. Everything blocks; async callers use threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from typing import BinaryIO

from weenv.core import digest as digests
from weenv.core.atomic import sync_directory, write_atomic
from weenv.core.errors import (
    BadReference,
    FormatError,
    NotFoundInSource,
    SourceError,
    StorageError,
    VerificationError,
)
from weenv.core.regular import regular
from weenv.core.rights import remedy
from weenv.registry.jsonsplice import parse_object
from weenv.registry.manifest import MAX_MANIFEST, OCI_INDEX, REF_NAME, Descriptor, Index, parse_manifest

_VERSION = "1.0.0"
_TEMPORARY = re.compile(r"\.weenv-(\d+)-[0-9a-f]+\Z")
_EMPTY_INDEX = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}
# Other tools put the whole image name here (containerd's and docker's exports).
_NAME_ANNOTATIONS = (REF_NAME, "io.containerd.image.name")


class Layout:
    """One layout directory."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._scratch = ""
        self._made = self._made_directory = self._made_index = False

    # -- reading ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise NotFoundInSource or FormatError unless the directory is a layout of a known version."""
        try:
            with open(os.path.join(self.path, "oci-layout"), "rb", opener=regular) as file:
                _, raw = parse_object(file.read(4097), f"{self.path}/oci-layout", 4096)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFoundInSource(
                f"{self.path} is no OCI image layout", hint="it needs a file oci-layout and an index.json"
            ) from error
        except OSError as error:
            raise SourceError(f"cannot read {self.path}: {error.strerror}") from error
        if raw.get("imageLayoutVersion") != _VERSION:
            raise FormatError(f"unknown layout version {raw.get('imageLayoutVersion')!r}", member=self.path)

    def index(self) -> Index:
        """The parsed ``index.json``. Raises SourceError or FormatError."""
        name = os.path.join(self.path, "index.json")
        try:
            with open(name, "rb", opener=regular) as file:
                data = file.read(MAX_MANIFEST + 1)
        except FileNotFoundError as error:
            raise NotFoundInSource(f"{self.path} has no index.json") from error
        except OSError as error:
            raise SourceError(f"cannot read {name}: {error.strerror}") from error
        index = parse_manifest(data, what=name)
        if not isinstance(index, Index):
            raise FormatError("not an index", member=name)
        return index

    def resolve(self, tag: str = "", digest: str = "") -> Descriptor:
        """The descriptor that a tag or digest names; neither: the only one there is. Raises SourceError."""
        self.check()
        entries = self.index().manifests
        if digest:
            for entry in entries:
                if entry.digest == digest:
                    return entry
            raise NotFoundInSource(f"{self.path} lists no manifest {digest}")
        named = [e for e in entries if tag and any(_names(e.annotations.get(key), tag) for key in _NAME_ANNOTATIONS)]
        found = {e.digest: e for e in (named if tag else entries)}
        if len(found) == 1:
            return next(iter(found.values()))
        tags = sorted({e.annotations[REF_NAME] for e in entries if REF_NAME in e.annotations})
        hint = f"it has: {', '.join(tags[:10])}" if tags else ""
        if not found:
            what = f"tag {tag!r}" if tag else "image"
            raise NotFoundInSource(f"{self.path} has no {what}", hint=hint)
        if not tag:
            raise BadReference(f"{self.path} holds {len(found)} images: name one", hint=hint)
        raise BadReference(f"{self.path} has tag {tag!r} more than once", hint=f"use oci:{self.path}@sha256:DIGEST")

    def blob_path(self, digest: str) -> str:
        """Where a blob is, or would be."""
        return os.path.join(self.path, "blobs", "sha256", digests.hex_of(digest))

    def has_blob(self, digest: str, size: int) -> bool:
        """True where a blob of that size is there. (It was verified when it was put there.)"""
        try:
            return os.stat(self.blob_path(digest)).st_size == size
        except OSError:
            return False

    def read_blob(self, descriptor: Descriptor, limit: int = MAX_MANIFEST) -> bytes:
        """A small blob, verified. Raises SourceError, VerificationError, FormatError where it is above ``limit``."""
        if descriptor.size > limit:
            raise FormatError(f"larger than {limit} bytes", member=descriptor.digest)
        try:
            with open(self.blob_path(descriptor.digest), "rb", opener=regular) as file:
                data = file.read(descriptor.size + 1)
        except FileNotFoundError as error:
            raise NotFoundInSource(f"{self.path} does not hold {descriptor.digest}") from error
        except OSError as error:
            raise SourceError(f"cannot read {descriptor.digest} in {self.path}: {error.strerror}") from error
        if len(data) != descriptor.size:
            raise VerificationError("size differs from its descriptor", member=descriptor.digest)
        digests.verify(data, descriptor.digest, f"{self.path}: blob")
        return data

    def verify_blob(self, descriptor: Descriptor) -> str:
        """Read a whole blob, check size and digest, return its path. Raises SourceError, VerificationError."""
        path = self.blob_path(descriptor.digest)
        try:
            with open(path, "rb", opener=regular) as file:
                if os.fstat(file.fileno()).st_size != descriptor.size:
                    raise VerificationError("size differs from its descriptor", member=descriptor.digest)
                have = "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError as error:
            raise NotFoundInSource(f"{self.path} does not hold {descriptor.digest}") from error
        except OSError as error:
            raise SourceError(f"cannot read {path}: {error.strerror}") from error
        if have != descriptor.digest:
            raise VerificationError(f"has digest {have}", member=path)
        return path

    # -- writing ------------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Make the directory, but not those above it, a layout unless it is one.

        Raises StorageError, FormatError for a foreign directory.
        """
        parent = os.path.dirname(os.path.abspath(self.path))
        if not os.path.isdir(parent):
            raise StorageError(f"cannot make {self.path}: there is no directory {parent}", hint=f"mkdir -p {parent}")
        marker = os.path.join(self.path, "oci-layout")
        self._made, self._made_directory = not os.path.exists(marker), not os.path.exists(self.path)
        self._made_index = not os.path.exists(os.path.join(self.path, "index.json"))
        try:
            os.makedirs(os.path.join(self.path, "blobs", "sha256"), exist_ok=True)
            if self._made:
                write_atomic(marker, json.dumps({"imageLayoutVersion": _VERSION}).encode(), mode=0o644)
            index = os.path.join(self.path, "index.json")
            if not os.path.exists(index):
                write_atomic(index, json.dumps(_EMPTY_INDEX).encode(), mode=0o644)
        except OSError as error:
            raise _storage(self.path, error) from error
        self.check()
        self._sweep()

    def _sweep(self) -> None:
        """Remove what writers that are dead left half made."""
        for name in os.listdir(self.path):
            match = _TEMPORARY.match(name)
            if match and int(match[1]) != os.getpid() and not os.path.exists(f"/proc/{match[1]}"):
                shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)

    @property
    def scratch(self) -> str:
        """A private directory on the same filesystem, for files that will become blobs; made at first use."""
        if not self._scratch:
            path = os.path.join(self.path, f".weenv-{os.getpid()}-{secrets.token_hex(4)}")
            try:
                os.mkdir(path, 0o700)
            except OSError as error:
                raise _storage(self.path, error) from error
            self._scratch = path
        return self._scratch

    def close(self) -> None:
        """Remove the scratch directory, and the layout where it was made here and nothing came into it."""
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = ""
        if self._made:
            self._made = False
            with contextlib.suppress(OSError):  # others' blobs, or scratch directories
                self._unmake()

    def _unmake(self) -> None:
        if any(_TEMPORARY.match(name) for name in os.listdir(self.path)):
            return
        os.rmdir(os.path.join(self.path, "blobs", "sha256"))
        os.rmdir(os.path.join(self.path, "blobs"))
        for name in (*(("index.json",) if self._made_index else ()), "oci-layout"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, name))
        if self._made_directory:
            os.rmdir(self.path)

    def adopt(self, temporary: str, digest: str) -> None:
        """Turn a complete file of :attr:`scratch` into a blob. Its content was verified by the caller."""
        final = self.blob_path(digest)
        try:
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.rename(temporary, final)
        except OSError as error:
            raise _storage(self.path, error) from error

    def put(self, data: bytes, media_type: str) -> Descriptor:
        """Store a small blob; returns its descriptor."""
        descriptor = Descriptor(media_type, digests.sha256(data), len(data))
        if not self.has_blob(descriptor.digest, descriptor.size):
            try:
                write_atomic(self.blob_path(descriptor.digest), data, mode=0o644)
            except OSError as error:
                raise _storage(self.path, error) from error
        return descriptor

    @contextlib.contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        with open(os.path.join(self.path, "oci-layout"), "rb", opener=regular) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def set_tag(self, descriptor: Descriptor, tag: str) -> None:
        """List a manifest under a tag (empty: untagged) in place of what had it; makes all of it durable first."""
        try:
            sync_directory(os.path.join(self.path, "blobs", "sha256"))
            with self._locked():
                _, raw = parse_object(self.index().data, self._index, MAX_MANIFEST)
                kept = [
                    entry
                    for entry in raw["manifests"]
                    if (entry.get("annotations") or {}).get(REF_NAME, "") != tag
                    or (not tag and entry["digest"] != descriptor.digest)
                ]
                new = descriptor.to_json()
                annotations = {k: v for k, v in descriptor.annotations.items() if k not in _NAME_ANNOTATIONS}
                if tag:
                    annotations[REF_NAME] = tag
                new.pop("annotations", None)
                if annotations:
                    new["annotations"] = annotations
                raw["manifests"] = [*kept, new]
                write_atomic(self._index, json.dumps(raw, indent=2).encode(), mode=0o644)
        except OSError as error:
            raise _storage(self.path, error) from error

    def remove(self, digest: str, tag: str | None = None) -> list[str]:
        """No longer list a manifest under a tag, or (None) at all; the tags that led to it. Its blobs stay."""
        try:
            with self._locked():
                _, raw = parse_object(self.index().data, self._index, MAX_MANIFEST)
                kept, gone = [], []
                for entry in raw["manifests"]:
                    name = (entry.get("annotations") or {}).get(REF_NAME, "")
                    if entry["digest"] == digest and (not tag or name == tag):
                        gone.append(name)
                    else:
                        kept.append(entry)
                raw["manifests"] = kept
                write_atomic(self._index, json.dumps(raw, indent=2).encode(), mode=0o644)
        except OSError as error:
            raise _storage(self.path, error) from error
        return [name for name in gone if name]

    @property
    def _index(self) -> str:
        return os.path.join(self.path, "index.json")


def _names(annotation: str | None, tag: str) -> bool:
    if annotation is None:
        return False
    return annotation == tag or annotation.rpartition("/")[2].partition(":")[2] == tag


def _storage(path: str, error: OSError) -> StorageError:
    return StorageError(f"cannot write {path}: {error.strerror}", errno=error.errno or 0, hint=remedy(error))
