"""What the gateway has answered: composed images, so that they can be had by digest after a tag has moved.

::

    images   digest            of the manifest
             manifest, config  the documents; config_digest the latter's
             size              bytes of both
             used              seconds since 1970 when it was last asked for (by the minute)
    layers   image, digest     a layer of the image; size in bytes, origin (kind, host, repository, path) as JSON
    names    name, tag, digest what was asked for, and what it meant; meant: when that was last so (seconds since 1970)
             rules             fingerprint of the policy and configuration that let it through under this name

Bounded: the images that were not asked for the longest go, with all that hangs on them. A damaged file is begun anew:
everything in it can be composed again.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from weenv.core.database import open_renewable
from weenv.core.errors import StorageError
from weenv.core.rights import remedy
from weenv.plugin.snapshotter.layerdir import Origin

SCHEMA = 2
_NAMES_EACH = 4
"""Names with tags kept for each image kept: some images have several."""
_MINUTE = 60.0

_TABLES = """
CREATE TABLE IF NOT EXISTS images (
    digest TEXT PRIMARY KEY, manifest BLOB NOT NULL, config_digest TEXT NOT NULL, config BLOB NOT NULL,
    size INTEGER NOT NULL, used REAL NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS layers (
    image TEXT NOT NULL REFERENCES images(digest) ON DELETE CASCADE, digest TEXT NOT NULL, size INTEGER NOT NULL,
    origin TEXT NOT NULL, PRIMARY KEY (image, digest)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS names (
    name TEXT NOT NULL, digest TEXT NOT NULL REFERENCES images(digest) ON DELETE CASCADE, tag TEXT NOT NULL,
    meant REAL NOT NULL, used REAL NOT NULL, rules TEXT NOT NULL, PRIMARY KEY (name, digest, tag)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS images_used ON images (used);
CREATE INDEX IF NOT EXISTS layers_digest ON layers (digest);
CREATE INDEX IF NOT EXISTS names_digest ON names (digest);
CREATE INDEX IF NOT EXISTS names_used ON names (used);
"""


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """A layer blob: its size in bytes, and what holds it."""

    digest: str
    size: int
    origin: Origin


@dataclass(frozen=True, slots=True)
class StoredImage:
    """A composed image as it is answered. ``rules``: the fingerprint of what it passed under the name that was asked for."""

    digest: str
    manifest: bytes
    config_digest: str
    config: bytes
    layers: tuple[LayerPlace, ...]
    rules: str = ""


@dataclass(frozen=True, slots=True)
class FoundBlob:
    """A blob of an image: its config (``data``), or a layer."""

    image: str
    rules: str
    data: bytes | None = None
    layer: LayerPlace | None = None


class Store:
    """``path`` is the database, or ``:memory:``. Raises StorageError where the disk does not take it."""

    def __init__(self, path: str, *, keep_images: int, keep_bytes: int) -> None:
        self.path = path
        self._keep = keep_images
        self._bytes = keep_bytes
        try:
            self._db = open_renewable(path, SCHEMA, _TABLES)
        except (OSError, sqlite3.Error) as error:
            hint = remedy(error, "remove it, or name another root")
            raise StorageError(f"the gateway's store {path} cannot be used: {error}", hint=hint) from error

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def put(self, name: str, tag: str, image: StoredImage) -> None:
        """Remember that ``name:tag`` was answered with an image. Raises StorageError."""
        now = time.time()
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._put(name, tag, image, now)
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise StorageError(f"cannot write {self.path}: {error}", hint="make room on the disk") from error

    def _put(self, name: str, tag: str, image: StoredImage, now: float) -> None:
        size = len(image.manifest) + len(image.config)
        fresh = self._db.execute("SELECT 1 FROM images WHERE digest = ?", (image.digest,)).fetchone() is None
        self._db.execute(
            "INSERT INTO images VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (digest) DO UPDATE SET used = ?",
            (image.digest, image.manifest, image.config_digest, image.config, size, now, now),
        )
        # A layer may have moved: its group was copied elsewhere and the plan names it there now.
        self._db.executemany(
            "INSERT OR REPLACE INTO layers VALUES (?, ?, ?, ?)",
            [(image.digest, place.digest, place.size, json.dumps(asdict(place.origin))) for place in image.layers],
        )
        # Another name may have the same image and be let through by nothing that lets this one through.
        self._db.execute(
            "INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?, ?, ?)", (name, image.digest, tag, now, now, image.rules)
        )
        self._db.execute(
            "DELETE FROM names WHERE (name, digest, tag) IN"
            " (SELECT name, digest, tag FROM names ORDER BY used DESC LIMIT -1 OFFSET ?)",
            (self._keep * _NAMES_EACH,),
        )
        if fresh:
            self._trim()

    def _trim(self) -> None:
        count, size = self._db.execute("SELECT count(*), coalesce(sum(size), 0) FROM images").fetchone()
        while count > 1 and (count > self._keep or size > self._bytes):
            digest, freed = self._db.execute("SELECT digest, size FROM images ORDER BY used, rowid LIMIT 1").fetchone()
            self._db.execute("DELETE FROM images WHERE digest = ?", (digest,))
            count, size = count - 1, size - freed

    def get(self, name: str, digest: str) -> tuple[StoredImage, str] | None:
        """An image that was answered under a name, and the last tag that meant it."""
        row = self._db.execute(
            "SELECT manifest, config_digest, config, rules, images.used, tag FROM images JOIN names USING (digest)"
            " WHERE name = ? AND digest = ? ORDER BY meant DESC LIMIT 1",
            (name, digest),
        ).fetchone()
        if row is None:
            return None
        manifest, config_digest, config, rules, used, tag = row
        layers = tuple(
            LayerPlace(layer, size, Origin(**json.loads(origin)))
            for layer, size, origin in self._db.execute("SELECT digest, size, origin FROM layers WHERE image = ?", (digest,))
        )
        self._touch(digest, name, used)
        return StoredImage(digest, manifest, config_digest, config, layers, rules), tag

    def last(self, name: str, tag: str) -> str:
        """The digest that ``name:tag`` meant last, or empty."""
        row = self._db.execute(
            "SELECT digest FROM names WHERE name = ? AND tag = ? ORDER BY meant DESC LIMIT 1", (name, tag)
        ).fetchone()
        return str(row[0]) if row else ""

    def blob(self, name: str, digest: str) -> FoundBlob | None:
        """A config or layer of an image that was answered under a name."""
        row = self._db.execute(
            "SELECT images.digest, rules, config, images.used FROM images JOIN names USING (digest)"
            " WHERE name = ? AND config_digest = ? ORDER BY images.used DESC, meant DESC LIMIT 1",
            (name, digest),
        ).fetchone()
        if row is not None:
            self._touch(row[0], name, row[3])
            return FoundBlob(row[0], row[1], data=row[2])
        row = self._db.execute(
            "SELECT image, rules, layers.size, origin, images.used FROM layers JOIN images ON images.digest = image"
            " JOIN names ON names.digest = image WHERE name = ? AND layers.digest = ?"
            " ORDER BY images.used DESC, meant DESC LIMIT 1",
            (name, digest),
        ).fetchone()
        if row is None:
            return None
        image, rules, size, origin, used = row
        self._touch(image, name, used)
        return FoundBlob(image, rules, layer=LayerPlace(digest, size, Origin(**json.loads(origin))))

    def _touch(self, digest: str, name: str, used: float) -> None:
        now = time.time()
        if abs(now - used) < _MINUTE:
            return
        try:
            self._db.execute("UPDATE images SET used = ? WHERE digest = ?", (now, digest))
            self._db.execute("UPDATE names SET used = ? WHERE name = ? AND digest = ?", (now, name, digest))
        except sqlite3.OperationalError:  # a full disk: it is forgotten sooner, that is all
            return

    def count(self) -> tuple[int, int]:
        """Images kept, and bytes of their documents."""
        row: Sequence[int] = self._db.execute("SELECT count(*), coalesce(sum(size), 0) FROM images").fetchone()
        return row[0], row[1]
