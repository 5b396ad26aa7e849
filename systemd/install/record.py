"""What an installation has put where, so that it can be brought up to date, and taken away without a trace.

``/etc/weenv/installed.json``, written before anything else is and again at the end::

    {"format": 1, "version": "0.1.0", "options": {"with": ["elastic"], "cri": false, "docker": false, ...},
     "files": {"/usr/local/lib/systemd/system/weenv.slice": ["sha256:..."]},    several while an installation is under way
     "links": {"/etc/systemd/system/...": "/usr/local/lib/..."},
     "edits": {"/etc/containerd/config.toml": {"kind": "toml", "after": "sha256:...", "backup": "<path>", "undo": [...]}},
     "directories": ["/usr/local/lib/sysusers.d"]}
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from weenv.core.digest import sha256
from weenv.core.errors import ConfigError
from weenv.systemd.install.tree import Tree

PATH: Final = "/etc/weenv/installed.json"
BACKUP: Final = ".before-weenv"
"""Added to the name of a file of somebody else's that is changed."""
_FORMAT: Final = 1


@dataclass(slots=True)
class Edit:
    """A file of somebody else's that was changed. ``kind``: toml or json; ``after``: its digest as it was left."""

    kind: str
    after: str
    backup: str
    undo: list[dict[str, Any]]


@dataclass(slots=True)
class Record:
    """See above."""

    version: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    files: dict[str, list[str]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    edits: dict[str, Edit] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)

    def dump(self) -> bytes:
        """As it is written."""
        return (json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n").encode()

    def will_make(self, directories: list[str]) -> None:
        """Remember directories that are going to be made."""
        self.directories += [one for one in directories if one not in self.directories]


def load(tree: Tree) -> Record | None:
    """The record of a system; None where nothing is installed. Raises ConfigError, OSError."""
    data = tree.read(PATH)
    if data is None:
        return None
    try:
        raw = json.loads(data)
        if raw.pop("format") != _FORMAT:
            raise ConfigError(f"{PATH} was written by another version of weenv", hint="use that one")
        found = Record(**raw)
        found.edits = {path: Edit(**edit) for path, edit in raw["edits"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{PATH} is damaged: {error}", hint="remove it, and run: weenv install --force") from error
    return found


def digest(data: bytes) -> str:
    """Of a file's content."""
    return sha256(data)
