"""Layers that the node made itself: each made once, then found by what it was made of.

::

    <root>/<name>/                      an OCI image layout, so that everything that reads layouts serves its blobs
        oci-layout, index.json          (lists nothing)
        blobs/sha256/<64 hex>           layer blobs; the time of the file is that of its last use
        keys/<2 hex>/<62 hex>           what it was made of -> the layer, as JSON ("layer": null where there is none)

Files appear by rename, a blob and its name before the key, synced; there is nothing to repair after a crash, and a key
whose blob is damaged or gone is as good as none. Any number of processes may work in it at once: two that make the same
layer write the same bytes.

Bounded: the least recently used blobs are removed until the rest is below the limit, but none that was used within the
last hour or that a layer directory of this node refers to (blobfs reads it).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from weenv.core import digest as digests
from weenv.core.atomic import sync_directory, write_atomic
from weenv.core.errors import StorageError
from weenv.core.rights import remedy
from weenv.plugin.snapshotter.layerdir import LayerDirs
from weenv.registry.groupref.model import LayerRef

_YOUNG = 3600.0
"""Seconds for which a blob is kept after its last use, whatever the limit says."""
_VERIFIED = 8 << 20
"""Blobs up to this size are checked at each use."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is stored under a key: a layer, or None with the reason why there is none (which may be empty)."""

    layer: LayerRef | None
    reason: str = ""


class LayerStore:
    """The store called ``name`` below the snapshotter's ``root``; ``limit`` in bytes of blobs.

    Everything blocks. Raises StorageError where the disk does not take it.
    """

    def __init__(self, root: str, name: str, *, limit: int) -> None:
        self.path = os.path.join(root, name)
        self.limit = limit
        self._dirs = LayerDirs(root)
        self._blobs = os.path.join(self.path, "blobs", "sha256")
        self._keys = os.path.join(self.path, "keys")
        self._made = False

    def make(self) -> None:
        """Have the layout there. Raises OSError."""
        if self._made:
            return
        os.makedirs(self._blobs, mode=0o700, exist_ok=True)
        os.makedirs(self._keys, mode=0o700, exist_ok=True)
        for name, content in (
            ("oci-layout", {"imageLayoutVersion": "1.0.0"}),
            ("index.json", {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": []}),
        ):
            path = os.path.join(self.path, name)
            if not os.path.exists(path):
                write_atomic(path, json.dumps(content).encode())
        self._made = True

    def _key(self, key: str) -> str:
        return os.path.join(self._keys, key[:2], key[2:])

    def blob(self, digest: str) -> str:
        """Where a blob is, or would be."""
        return os.path.join(self._blobs, digests.hex_of(digest))

    def find(self, key: str) -> Entry | None:
        """What was put under a key, or None."""
        try:
            with open(self._key(key), "rb") as file:
                raw: dict[str, Any] = json.loads(file.read(1 << 16))
            if raw["layer"] is None:
                return Entry(None, str(raw.get("reason", "")))
            layer = LayerRef(**raw["layer"])
            path = self.blob(layer.digest)
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size != layer.size:
                    return None
                if layer.size <= _VERIFIED and digests.sha256(file.read()) != layer.digest:
                    return None
            os.utime(path)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return Entry(layer)

    def get(self, key: str) -> tuple[LayerRef, ...] | None:
        """What was put under a key (an empty tuple: no layer), or None."""
        entry = self.find(key)
        if entry is None:
            return None
        return () if entry.layer is None else (entry.layer,)

    def put(self, key: str, layer: LayerRef | None, blob: bytes = b"", *, reason: str = "") -> None:
        """Store a layer, or that there is none, under a key; it is durable when this returns. Raises StorageError."""
        with self._writing():
            if layer is not None:
                write_atomic(self.blob(layer.digest), blob)
            self._name(key, layer, reason)
            if layer is not None and int(layer.digest[-2:], 16) % 64 == 0:
                self.trim()

    def adopt(self, key: str, layer: LayerRef, path: str) -> None:
        """The same with a file of the store's own file system, which is moved. Raises StorageError."""
        with self._writing():
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(path, self.blob(layer.digest))
            sync_directory(self._blobs)
            self._name(key, layer, "")
            self.trim()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            self.make()
            yield
        except OSError as error:
            text = f"cannot write {self.path}: {error.strerror}"
            raise StorageError(text, errno=error.errno or 0, hint=remedy(error)) from error

    def _name(self, key: str, layer: LayerRef | None, reason: str) -> None:
        fields = None
        if layer is not None:
            fields = {name: getattr(layer, name) for name in ("digest", "size", "media_type", "diff_id", "annotations")}
        path = self._key(key)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        row = {"layer": fields, **({"reason": reason} if reason else {})}
        write_atomic(path, json.dumps(row, sort_keys=True).encode(), durable=False)

    def usage(self) -> tuple[int, int]:
        """Blobs and their bytes."""
        sizes = [size for _, size, _ in self._scan()]
        return len(sizes), sum(sizes)

    def _scan(self) -> list[tuple[float, int, str]]:
        """(last use, size, name) of every blob; what a dead process left half written is removed."""
        now = time.time()
        found: list[tuple[float, int, str]] = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self._blobs) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    if entry.name.endswith(".tmp"):
                        if now - status.st_mtime > _YOUNG:
                            os.unlink(entry.path)
                    elif digests.is_digest("sha256:" + entry.name):
                        found.append((status.st_mtime, status.st_size, entry.name))
        return found

    def trim(self) -> int:
        """Remove the least recently used blobs beyond the limit, and keys that lead to none. Returns bytes removed."""
        now = time.time()
        found = self._scan()
        excess = sum(size for _, size, _ in found) - self.limit
        removed = 0
        for used, size, name in sorted(found):
            if removed >= excess or now - used < _YOUNG:
                break
            if os.path.exists(self._dirs.path("sha256:" + name)):
                continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._blobs, name))
                removed += size
        if removed:
            self._drop_keys()
        return removed

    def _drop_keys(self) -> None:
        for folder in os.listdir(self._keys):
            for name in os.listdir(os.path.join(self._keys, folder)):
                path = os.path.join(self._keys, folder, name)
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # gone meanwhile, or no key
                    with open(path, "rb") as file:
                        layer = json.loads(file.read(1 << 16))["layer"]
                    if layer is not None and not os.path.exists(self.blob(layer["digest"])):
                        os.unlink(path)
