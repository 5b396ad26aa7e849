"""SQLite files that only remember: what is damaged, or another version's, is moved aside and begun anew."""

from __future__ import annotations

import contextlib
import os
import sqlite3

MEMORY = ":memory:"


def open_renewable(path: str, version: int, tables: str) -> sqlite3.Connection:
    """The database at ``path`` (or MEMORY) with these tables; its directory is made. ``user_version`` is ``version``.

    In autocommit mode, with a write-ahead log; may be used by any one thread at a time. Raises OSError, sqlite3.Error.
    """
    if path == MEMORY:
        return _open(path, version, tables)
    os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
    try:
        _touch(path)
        return _open(path, version, tables)
    except sqlite3.OperationalError:
        raise  # locked, or the disk is full: it is not the file's fault
    except sqlite3.DatabaseError:
        os.replace(path, path + ".damaged")
        for log in ("-wal", "-shm"):  # of the old one: it would be applied to the new
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + log)
        _touch(path)
        return _open(path, version, tables)


def _touch(path: str) -> None:
    """Made here, because SQLite would make it for all to read."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _open(path: str, version: int, tables: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, timeout=10.0, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("PRAGMA foreign_keys=ON")
        if int(db.execute("PRAGMA user_version").fetchone()[0]) not in (0, version):
            raise sqlite3.DatabaseError("another version's file")
        db.executescript(tables)
        db.execute(f"PRAGMA user_version={version}")
    except BaseException:
        db.close()
        raise
    return db
