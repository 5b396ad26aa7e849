"""The snapshotter's memory: one SQLite database, ``<root>/metastore.db``.

::

    snapshots   one row per snapshot
        id          short integer, never used twice; names the directory <root>/s/<id>
        name        key of an active snapshot or view, name of a committed one; unique over all kinds
        parent_id   the committed snapshot below, or NULL
        kind        1 view, 2 active, 3 committed (containerd's numbers)
        created, updated    nanoseconds since 1970
        labels      JSON object
        ref         label containerd.io/snapshot.ref (the chainID), or ''; indexed, because List is asked for it
        layer_id    the lazy layer that is the snapshot's content, or NULL: then <root>/s/<id>/fs is
        size, inodes        usage of an ordinary committed snapshot: bytes, inodes
    layers      one row per lazily mounted layer
        id          short integer, never used twice; names the mount point <root>/m/<id>
        digest, variant     which layer directory, which meta[-<variant>].erofs; unique together
        attributes  JSON: what the variant gives to implied directories (planes/base.py), so that it can be built again
        durable     1 once the layer directory is known to be on disk; after a power cut others are checked and rebuilt
        mode        '' never mounted, 'lazy' (device is the blobfs file), 'complete' (device is the plain file)
        device      st_dev of the blobfs mount that a lazy mount reads from; 0 otherwise
    trash       ids of removed snapshots whose directory may still be there

Write-ahead log, ``synchronous=NORMAL``: a commit is a write to the page cache (tens of microseconds), a crash of the
process loses nothing, a power cut may lose the last seconds but leaves a consistent state, which recovery then squares
with what is on disk. Checkpoints, which do sync, are made by :meth:`Metastore.checkpoint` in a thread of the caller's.

Every method is synchronous and short; one process writes (the daemon holds a lock file), from one thread. Concurrency
is described in docs/concurrency/metastore.md.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weenv.core.errors import SnapshotExists, SnapshotInUse, SnapshotNotFound, StorageError
from weenv.plugin.containerd.types import LABEL_SNAPSHOT_REF, Kind, SnapshotInfo, now

SCHEMA_VERSION = 1
_PAGE = 500
_ROOM = "make room, or weenv cache prune --to SIZE"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS layers (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    digest TEXT NOT NULL,
    variant TEXT NOT NULL,
    attributes TEXT NOT NULL DEFAULT '[]',
    durable INTEGER NOT NULL DEFAULT 0,
    mode TEXT NOT NULL DEFAULT '',
    device INTEGER NOT NULL DEFAULT 0,
    UNIQUE (digest, variant)
) STRICT;
CREATE TABLE IF NOT EXISTS snapshots (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    parent_id INTEGER REFERENCES snapshots (id),
    kind INTEGER NOT NULL CHECK (kind IN (1, 2, 3)),
    created INTEGER NOT NULL,
    updated INTEGER NOT NULL,
    labels TEXT NOT NULL,
    ref TEXT NOT NULL DEFAULT '',
    layer_id INTEGER REFERENCES layers (id),
    size INTEGER NOT NULL DEFAULT 0,
    inodes INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX IF NOT EXISTS snapshots_parent ON snapshots (parent_id);
CREATE INDEX IF NOT EXISTS snapshots_ref ON snapshots (ref) WHERE ref <> '';
CREATE INDEX IF NOT EXISTS snapshots_layer ON snapshots (layer_id) WHERE layer_id IS NOT NULL;
CREATE TABLE IF NOT EXISTS trash (id INTEGER PRIMARY KEY) STRICT;
"""

_COLUMNS = (
    "s.id, s.name, s.parent_id, coalesce(p.name, ''), s.kind, s.created, s.updated,"
    " s.labels, s.ref, s.layer_id, s.size, s.inodes"
)
_SELECT_LAYER = "SELECT id, digest, variant, attributes, durable, mode, device FROM layers"
_UNUSED_LAYERS = (
    "SELECT id, digest, variant, attributes, durable, mode, device FROM layers l"
    " WHERE NOT EXISTS (SELECT 1 FROM snapshots s WHERE s.layer_id = l.id)"
)
_FROM = "FROM snapshots s LEFT JOIN snapshots p ON p.id = s.parent_id"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A row of table ``snapshots``, with its parent's name (empty without parent)."""

    id: int
    name: str
    parent_id: int | None
    parent: str
    kind: Kind
    created: int
    updated: int
    labels: Mapping[str, str]
    ref: str
    layer_id: int | None
    size: int
    inodes: int

    def info(self) -> SnapshotInfo:
        """As containerd sees it."""
        return SnapshotInfo(self.name, self.parent, self.kind, self.created, self.updated, self.labels)


@dataclass(frozen=True, slots=True)
class Layer:
    """A row of table ``layers``."""

    id: int
    digest: str
    variant: str
    attributes: str
    durable: int
    mode: str
    device: int


_KINDS = {int(kind): kind for kind in Kind}


def _snapshot(row: tuple[int, str, int | None, str, int, int, int, str, str, int | None, int, int]) -> Snapshot:
    id_, name, parent_id, parent, kind, created, updated, labels, ref, layer_id, size, inodes = row
    decoded = json.loads(labels) if labels != "{}" else {}
    return Snapshot(id_, name, parent_id, parent, _KINDS[kind], created, updated, decoded, ref, layer_id, size, inodes)


def _labels(labels: Mapping[str, str]) -> str:
    return json.dumps(dict(labels)) if labels else "{}"


def _is_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL


class _Connection(sqlite3.Connection):
    """Says of a full disk which one it is, and what to do: whoever asked containerd sees nothing else of it."""

    place = ""

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        """As of any connection."""
        try:
            return super().execute(*arguments)
        except sqlite3.OperationalError as error:
            if _is_full(error):
                raise sqlite3.OperationalError(f"{self.place} is full: {_ROOM}") from error  # which rpc.py knows by "full"
            raise


class Metastore:
    """See the module's text. Raises :class:`StorageError` where the database cannot be used."""

    def __init__(self, path: str, *, readonly: bool = False) -> None:
        self.path = path
        try:
            if readonly:
                self._db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None, timeout=5.0)
            else:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                os.close(fd)
                self._db = sqlite3.connect(
                    path, isolation_level=None, cached_statements=256, timeout=5.0, factory=_Connection
                )
                self._db.place = os.path.dirname(path)
                self._prepare()
        except (sqlite3.Error, OSError) as error:
            anew = "move it away to start anew; containerd then has to pull its images again"
            raise StorageError(
                f"metastore {path} cannot be used: {error}", hint=_ROOM if _is_full(error.__cause__ or error) else anew
            ) from error

    def _prepare(self) -> None:
        db = self._db
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute("PRAGMA foreign_keys=ON")
            db.execute("PRAGMA wal_autocheckpoint=16384")  # pages; only where nobody calls checkpoint()
            version = int(db.execute("PRAGMA user_version").fetchone()[0])
            if version not in (0, SCHEMA_VERSION):
                raise StorageError(
                    f"metastore {self.path} has schema {version}, this version knows {SCHEMA_VERSION}",
                    hint="use the version of weenv that wrote it",
                )
            db.executescript(_SCHEMA)
            db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        except BaseException:
            db.close()
            raise
        self._next = 1 + max(
            int(db.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'snapshots'").fetchone()[0]),
            int(db.execute("SELECT coalesce(max(id), 0) FROM trash").fetchone()[0]),
        )

    def close(self) -> None:
        """Close the database; may be called twice."""
        self._db.close()

    def checkpoint(self) -> None:
        """Move the write-ahead log into the database, through a connection of its own: callable from any thread."""
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None, timeout=5.0)) as db:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite ends it itself where the disk is full or broken
                self._db.execute("ROLLBACK")
            raise

    def together(self) -> contextlib.AbstractContextManager[None]:
        """One transaction for what is added within the block: one write to the log instead of one for each row.

        Whoever is told of a row before the block has ended well was told too soon. Raises sqlite3.Error where nothing of
        the block was kept.
        """
        return self._transaction()

    # snapshots

    def reserve(self) -> int:
        """A snapshot id that nobody had before; for the directory that is made before the row is."""
        self._next += 1
        return self._next - 1

    def skip_ids(self, used: int) -> None:
        """Never hand out ``used`` or less: a directory of that name was found on disk."""
        self._next = max(self._next, used + 1)

    def find(self, name: str) -> Snapshot | None:
        """The snapshot called ``name``, or None."""
        row = self._db.execute(f"SELECT {_COLUMNS} {_FROM} WHERE s.name = ?", (name,)).fetchone()
        return _snapshot(row) if row else None

    def get(self, name: str) -> Snapshot:
        """The snapshot called ``name``. Raises :class:`SnapshotNotFound`."""
        found = self.find(name)
        if found is None:
            raise SnapshotNotFound(f"snapshot {name!r} does not exist")
        return found

    def find_ref(self, ref: str, parent: str) -> Snapshot | None:
        """The lazy snapshot that is chainID ``ref`` on top of the snapshot called ``parent``, or None."""
        query = f"SELECT {_COLUMNS} {_FROM} WHERE s.ref = ? AND coalesce(p.name, '') = ? AND s.layer_id IS NOT NULL"
        row = self._db.execute(query, (ref, parent)).fetchone()
        return _snapshot(row) if row else None

    def with_ref(self, ref: str) -> list[Snapshot]:
        """All snapshots of any kind with label ``containerd.io/snapshot.ref`` equal to ``ref``, which is not empty."""
        rows = self._db.execute(f"SELECT {_COLUMNS} {_FROM} WHERE s.ref = ? AND s.ref <> ''", (ref,))
        return [_snapshot(row) for row in rows]

    def chain(self, snapshot_id: int) -> list[tuple[int, int | None]]:
        """(id, layer_id) of a snapshot and of all below it, top first."""
        rows = self._db.execute(
            "WITH RECURSIVE chain (id, parent_id, layer_id, depth) AS ("
            " SELECT id, parent_id, layer_id, 0 FROM snapshots WHERE id = ?"
            " UNION ALL"
            " SELECT s.id, s.parent_id, s.layer_id, chain.depth + 1 FROM snapshots s JOIN chain ON s.id = chain.parent_id"
            ") SELECT id, layer_id FROM chain ORDER BY depth",
            (snapshot_id,),
        )
        return rows.fetchall()

    def add(
        self,
        kind: Kind,
        name: str,
        parent_id: int | None,
        labels: Mapping[str, str],
        *,
        snapshot_id: int | None = None,
        layer_id: int | None = None,
    ) -> int:
        """Insert a snapshot and return its id. Raises :class:`SnapshotExists` where the name is taken."""
        stamp = now()
        number = self.reserve() if snapshot_id is None else snapshot_id
        try:
            self._db.execute(
                "INSERT INTO snapshots (id, name, parent_id, kind, created, updated, labels, ref, layer_id)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    number,
                    name,
                    parent_id,
                    int(kind),
                    stamp,
                    stamp,
                    _labels(labels),
                    labels.get(LABEL_SNAPSHOT_REF, ""),
                    layer_id,
                ),
            )
        except sqlite3.IntegrityError as error:
            if "snapshots.name" in str(error):
                raise SnapshotExists(f"snapshot {name!r} exists already") from error
            raise StorageError(f"metastore refuses snapshot {name!r}: {error}") from error
        return number

    def commit(self, snapshot: Snapshot, name: str, labels: Mapping[str, str], size: int, inodes: int) -> None:
        """Turn an active snapshot into the committed one called ``name``; labels are replaced, not inherited.

        Raises :class:`SnapshotExists` where the name is taken, :class:`SnapshotNotFound` where the snapshot is gone.
        """
        stamp = now()
        try:
            done = self._db.execute(
                "UPDATE snapshots SET name = ?, kind = 3, created = ?, updated = ?, labels = ?, ref = ?, size = ?, inodes = ?"
                " WHERE id = ? AND kind = 2",
                (name, stamp, stamp, _labels(labels), labels.get(LABEL_SNAPSHOT_REF, ""), size, inodes, snapshot.id),
            )
        except sqlite3.IntegrityError as error:
            raise SnapshotExists(f"snapshot {name!r} exists already") from error
        if done.rowcount != 1:
            raise SnapshotNotFound(f"snapshot {snapshot.name!r} does not exist any more")

    def set_labels(self, snapshot: Snapshot, labels: Mapping[str, str]) -> Snapshot:
        """Replace the labels of a snapshot; returns it as it is now."""
        self._db.execute(
            "UPDATE snapshots SET labels = ?, ref = ?, updated = ? WHERE id = ?",
            (_labels(labels), labels.get(LABEL_SNAPSHOT_REF, ""), now(), snapshot.id),
        )
        return self.get(snapshot.name)

    def remove(self, snapshot: Snapshot) -> None:
        """Delete a snapshot; its id goes to the trash. Raises :class:`SnapshotInUse` where it has children."""
        if self._db.execute("SELECT 1 FROM snapshots WHERE parent_id = ? LIMIT 1", (snapshot.id,)).fetchone():
            raise SnapshotInUse(f"cannot remove snapshot {snapshot.name!r}: it has children")
        with self._transaction():
            self._db.execute("DELETE FROM snapshots WHERE id = ?", (snapshot.id,))
            if snapshot.layer_id is None:
                self._db.execute("INSERT OR IGNORE INTO trash (id) VALUES (?)", (snapshot.id,))

    def walk(self) -> Iterator[list[Snapshot]]:
        """All snapshots in pages, by id; rows may come and go between two pages."""
        last = 0
        query = f"SELECT {_COLUMNS} {_FROM} WHERE s.id > ? ORDER BY s.id LIMIT {_PAGE}"
        while rows := self._db.execute(query, (last,)).fetchall():
            page = [_snapshot(row) for row in rows]
            last = page[-1].id
            yield page

    def ids(self) -> set[int]:
        """The ids of all snapshots."""
        return {row[0] for row in self._db.execute("SELECT id FROM snapshots")}

    def children(self) -> dict[int, int]:
        """How many snapshots sit directly on each snapshot that has any."""
        rows = self._db.execute("SELECT parent_id, count(*) FROM snapshots WHERE parent_id IS NOT NULL GROUP BY parent_id")
        return dict(rows.fetchall())

    # trash

    def trash(self) -> list[int]:
        """Ids of removed snapshots whose directories may still be there."""
        return [row[0] for row in self._db.execute("SELECT id FROM trash ORDER BY id")]

    def add_trash(self, ids: list[int]) -> None:
        """Note directories that belong to nobody."""
        self._db.executemany("INSERT OR IGNORE INTO trash (id) VALUES (?)", [(number,) for number in ids])

    def forget_trash(self, ids: list[int]) -> None:
        """The directories are gone."""
        with self._transaction():
            self._db.executemany("DELETE FROM trash WHERE id = ?", [(number,) for number in ids])

    # layers

    def layers(self) -> list[Layer]:
        """All lazy layers."""
        return [Layer(*row) for row in self._db.execute(_SELECT_LAYER + " ORDER BY id")]

    def layer(self, digest: str, variant: str, attributes: str = "[]") -> Layer:
        """The row of a layer's variant, made where there is none."""
        query = _SELECT_LAYER + " WHERE digest = ? AND variant = ?"
        row = self._db.execute(query, (digest, variant)).fetchone()
        if row is None:
            self._db.execute("INSERT INTO layers (digest, variant, attributes) VALUES (?, ?, ?)", (digest, variant, attributes))
            row = self._db.execute(query, (digest, variant)).fetchone()
        return Layer(*row)

    def layer_by_id(self, layer_id: int) -> Layer | None:
        """The layer with that id, or None."""
        row = self._db.execute(_SELECT_LAYER + " WHERE id = ?", (layer_id,)).fetchone()
        return Layer(*row) if row else None

    def set_layer_mode(self, layer_id: int, mode: str, device: int) -> None:
        """Remember how a layer is mounted."""
        self._db.execute("UPDATE layers SET mode = ?, device = ? WHERE id = ?", (mode, device, layer_id))

    def set_layer_durable(self, layer_id: int) -> None:
        """The layer's files are on disk."""
        self._db.execute("UPDATE layers SET durable = 1 WHERE id = ?", (layer_id,))

    def unused_layers(self) -> list[Layer]:
        """Layers that no snapshot refers to."""
        rows = self._db.execute(_UNUSED_LAYERS)
        return [Layer(*row) for row in rows]

    def layer_used(self, digest: str) -> bool:
        """True where a snapshot is that layer, in any variant."""
        query = "SELECT 1 FROM snapshots s JOIN layers l ON l.id = s.layer_id WHERE l.digest = ? LIMIT 1"
        return self._db.execute(query, (digest,)).fetchone() is not None

    def forget_layer(self, layer_id: int) -> bool:
        """Delete a layer's row; False where a snapshot refers to it."""
        try:
            self._db.execute("DELETE FROM layers WHERE id = ?", (layer_id,))
        except sqlite3.IntegrityError:
            return False
        return True

    def layer_users(self) -> dict[int, list[str]]:
        """For each layer, the names of the active snapshots and views that have it somewhere below them."""
        rows = self._db.execute(
            "WITH RECURSIVE up (leaf, id) AS ("
            " SELECT id, id FROM snapshots WHERE kind <> 3"
            " UNION ALL SELECT up.leaf, s.parent_id FROM up JOIN snapshots s ON s.id = up.id WHERE s.parent_id IS NOT NULL"
            ") SELECT s.layer_id, leaf.name FROM up JOIN snapshots s ON s.id = up.id JOIN snapshots leaf ON leaf.id = up.leaf"
            " WHERE s.layer_id IS NOT NULL ORDER BY leaf.name"
        )
        found: dict[int, list[str]] = {}
        for layer_id, name in rows:
            found.setdefault(layer_id, []).append(name)
        return found
