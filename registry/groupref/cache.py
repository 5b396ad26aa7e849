"""The mapping cache: which manifest a tag meant when it was last asked about, and what each manifest says.

::

    tags        name      'host/repository:tag' (or the digest of an index) and platform
                digest    what it meant
                checked   seconds since 1970 when the registry said so
    groups      digest    manifest digest (of one platform's image)   summary   layers, kind, version as JSON
                config    the image config, as text                   used      seconds since 1970 of the last use
    admitted    policy, name, digest    a signature was found that this policy accepts

What a digest means never changes, so rows of ``groups`` are only ever dropped for space. A damaged or foreign file is
moved aside and begun anew: everything in it can be asked for again. One process writes at a time (SQLite's own lock).
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
import weakref
from collections import OrderedDict

from weenv.core.database import MEMORY, open_renewable
from weenv.core.errors import FormatError, StorageError
from weenv.core.rights import remedy
from weenv.registry.groupref.model import LayerRef, ResolvedGroup

SCHEMA = 1
KEEP = 20_000
"""Manifests remembered on disk."""
KEEP_PARSED = 8_192
"""Manifests kept parsed in memory."""

_TABLES = """
CREATE TABLE IF NOT EXISTS tags (name TEXT PRIMARY KEY, digest TEXT NOT NULL, checked REAL NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS groups (
    digest TEXT PRIMARY KEY, summary TEXT NOT NULL, config TEXT NOT NULL, used REAL NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS admitted (
    policy TEXT NOT NULL, name TEXT NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (policy, name, digest)
) STRICT, WITHOUT ROWID;
"""


class MappingCache:
    """``path`` is the database, or ``:memory:``. Raises :class:`StorageError` where the disk does not take it."""

    def __init__(self, path: str = MEMORY) -> None:
        self.path = path
        self._parsed: OrderedDict[str, ResolvedGroup] = OrderedDict()
        try:
            self._db = open_renewable(path, SCHEMA, _TABLES)
        except (OSError, sqlite3.Error) as error:
            raise StorageError(
                f"the mapping cache {path} cannot be used: {error}", hint=remedy(error, "remove it, or name another")
            ) from error
        # For the cache of a resolver that nobody closes; it may be collected in any thread.
        weakref.finalize(self, self._db.close)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def tag(self, name: str) -> tuple[str, float] | None:
        """What a name meant, and when that was last confirmed (seconds since 1970)."""
        row = self._db.execute("SELECT digest, checked FROM tags WHERE name = ?", (name,)).fetchone()
        return (str(row[0]), float(row[1])) if row else None

    def confirm(self, name: str, digest: str, now: float | None = None) -> None:
        """The registry has just said that ``name`` means ``digest``."""
        self._write(
            "INSERT OR REPLACE INTO tags VALUES (?, ?, ?)",
            (name, digest, time.time() if now is None else now),
        )

    def forget(self, name: str) -> None:
        """The registry no longer knows ``name``."""
        self._write("DELETE FROM tags WHERE name = ?", (name,))

    def group(self, digest: str, reference: str, host: str, repository: str) -> ResolvedGroup | None:
        """What a manifest says, as seen from a reference."""
        found = self._parsed.get(digest)
        if found is None:
            row = self._db.execute("SELECT summary, config FROM groups WHERE digest = ?", (digest,)).fetchone()
            if row is None:
                return None
            try:
                found = _parse(digest, row[0], row[1])
            except FormatError:
                self._write("DELETE FROM groups WHERE digest = ?", (digest,))
                return None
            self._keep(found)
        if (found.reference, found.host, found.repository) == (reference, host, repository):
            return found
        return ResolvedGroup(
            reference, host, repository, digest, found.layers, found.config_text, found.annotations, found.kind, found.version
        )

    def store(self, group: ResolvedGroup) -> None:
        """Remember what a verified manifest says."""
        layers = [[layer.digest, layer.size, layer.media_type, layer.diff_id, layer.annotations] for layer in group.layers]
        summary = json.dumps({"layers": layers, "annotations": group.annotations, "kind": group.kind, "version": group.version})
        self._write(
            "INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?)", (group.digest, summary, group.config_text, time.time())
        )
        self._keep(group)

    def admitted(self, policy: str, name: str, digest: str) -> bool:
        """True where a manifest was accepted from there under a policy (its fingerprint)."""
        row = self._db.execute(
            "SELECT 1 FROM admitted WHERE policy = ? AND name = ? AND digest = ?", (policy, name, digest)
        ).fetchone()
        return row is not None

    def admit(self, policy: str, name: str, digest: str) -> None:
        """A manifest has been accepted; what other policies accepted is forgotten."""
        self._write("DELETE FROM admitted WHERE policy != ?", (policy,))
        self._write("INSERT OR IGNORE INTO admitted VALUES (?, ?, ?)", (policy, name, digest))

    def trim(self, keep: int = KEEP) -> None:
        """Drop the manifests that were stored longest ago beyond ``keep``."""
        self._write(
            "DELETE FROM groups WHERE digest IN (SELECT digest FROM groups ORDER BY used DESC LIMIT -1 OFFSET ?)", (keep,)
        )

    def _keep(self, group: ResolvedGroup) -> None:
        self._parsed[group.digest] = group
        while len(self._parsed) > KEEP_PARSED:
            self._parsed.popitem(last=False)

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        # A full disk or another process's long transaction costs a question to the registry later, nothing else.
        with contextlib.suppress(sqlite3.OperationalError):
            self._db.execute(statement, values)


def _parse(digest: str, summary: str, config: str) -> ResolvedGroup:
    try:
        raw = json.loads(summary)
        layers = tuple(LayerRef(str(d), int(s), str(m), str(f), dict(a)) for d, s, m, f, a in raw["layers"])
        return ResolvedGroup(
            digest, "", "", digest, layers, config, dict(raw["annotations"]), str(raw["kind"]), str(raw["version"])
        )
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(f"a row of the mapping cache cannot be read: {error}") from error
