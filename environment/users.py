"""Who a process runs as: ``USER[:GROUP]`` looked up in an image's own passwd and group files. Pure.

Formats: passwd(5) and group(5). Rules as users of images know them: a number needs no entry; a user's own group and the
groups that list it come from the files, unless a group is named.
"""

from __future__ import annotations

from dataclasses import dataclass

from weenv.core.errors import WeenvError

MAX_FILE = 4 << 20
"""Bytes read of a passwd or group file."""

_MAX_ID = 2**32 - 2


class UnknownUser(WeenvError):
    """The image has no such user or group."""


@dataclass(frozen=True, slots=True)
class User:
    """Numeric ids, supplementary groups, and the home directory (``/`` where the image names none)."""

    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    home: str = "/"


def _rows(data: bytes, fields: int) -> list[list[str]]:
    rows = []
    for line in data[:MAX_FILE].decode("utf-8", "surrogateescape").splitlines():
        parts = line.strip().split(":")
        if len(parts) >= fields and not line.startswith("#"):
            rows.append(parts)
    return rows


def _number(text: str) -> int | None:
    if not text.isascii() or not text.isdigit() or len(text) > 10:
        return None
    value = int(text)
    return value if value <= _MAX_ID else None


def resolve_user(text: str, passwd: bytes, group: bytes) -> User:
    """The ids of ``USER[:GROUP]`` (names or numbers; empty: root). Raises UnknownUser."""
    name, colon, group_name = text.partition(":")
    name = name or "0"
    number = _number(name)
    uid, gid, home, login = number, 0, "/", ""
    for row in _rows(passwd, 4):
        found = _number(row[2])
        if found is None or (row[0] != name and found != number):
            continue
        uid, gid, login = found, _number(row[3]) or 0, row[0]
        home = row[5] if len(row) > 5 and row[5].startswith("/") else "/"
        break
    if uid is None:
        raise UnknownUser(f"the image has no user {name[:80]!r}", hint="name one of its /etc/passwd, or a number")
    if uid == 0 and not login:
        home = "/root"
    rows = _rows(group, 3)
    if colon and group_name:
        chosen = _number(group_name)
        by_name = next((_number(row[2]) for row in rows if row[0] == group_name), None)
        if by_name is None and chosen is None:
            raise UnknownUser(f"the image has no group {group_name[:80]!r}", hint="name one of its /etc/group, or a number")
        return User(uid, by_name if by_name is not None else chosen or 0, (), home)
    extra = {
        found
        for row in rows
        if login and len(row) > 3 and login in row[3].split(",") and (found := _number(row[2])) is not None
    }
    return User(uid, gid, tuple(sorted(extra | {gid})), home)
