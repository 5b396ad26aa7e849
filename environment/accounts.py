"""Who ``USER[:GROUP]`` is in an image, remembered: a chainID never changes what it stands for.

One small JSON file, ``users.json``: ``{"<chainID> <user>": [uid, gid, [groups], home]}``, replaced as a whole. Two writers
at once lose one of their entries, which is looked up again; a damaged file is an empty one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from weenv.environment.users import User

_KEEP = 1000


def _load(path: str) -> dict[str, list[object]]:
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(1 << 20))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def remembered(directory: str, chain: str, user: str) -> User | None:
    """What is known, or None."""
    row = _load(os.path.join(directory, "users.json")).get(f"{chain} {user}")
    try:
        uid, gid, groups, home = row  # type: ignore[misc]
        if not isinstance(uid, int) or not isinstance(gid, int) or not isinstance(groups, Sequence):
            return None
        return User(uid, gid, tuple(int(item) for item in groups), str(home))
    except (TypeError, ValueError):
        return None


def remember(directory: str, chain: str, user: str, found: User) -> None:
    """Keep it; the oldest entries go where there are too many."""
    path = os.path.join(directory, "users.json")
    table = _load(path)
    table[f"{chain} {user}"] = [found.uid, found.gid, list(found.groups), found.home]
    while len(table) > _KEEP:
        del table[next(iter(table))]
    os.makedirs(directory, mode=0o700, exist_ok=True)
    from weenv.core.atomic import write_atomic

    write_atomic(path, json.dumps(table).encode(), durable=False)
