"""What a plan's file became last time, so that starting it again needs neither YAML, nor the registry client, nor numpy.

An entry is found by the file's bytes, its place, the configuration and this version; it holds as long as the tags behind
it would be believed (for ever where all groups are pinned by digest), and as long as the files behind the node's signature
policy (its own, and those of its keys) are what they were: what was composed was accepted by that policy, digest by digest,
so nothing else starts from memory. Plans that read other files are not remembered. Whether containerd still has
the snapshots is not asked: Prepare says so, and then the plan is composed anew. One small JSON file per plan below
``<root>/environments/plans``.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from weenv import __version__
from weenv.core.regular import regular
from weenv.environment.model import Amount, Resources
from weenv.environment.notlazy import said

KEEP = 1000
"""Plans remembered; the oldest go."""
MAX_PLAN = 64 << 20
"""Bytes of a plan's file."""
_MAX = 4 << 20


@dataclass(frozen=True, slots=True)
class Ready:
    """An image that can be started.

    ``name`` in containerd, the image config, the chainID of the top snapshot, and what the plan says besides (``plan`` is
    its name, empty for an image; ``runs`` its commands with the directories they run in). ``recalled``: from memory.
    ``not_lazy`` is the label (notlazy.py) of its groups that are not in the lazy format, ``notice`` the line to be said of
    them.
    """

    name: str
    config: dict[str, Any]
    chain: str
    plan: str = ""
    resources: Resources = field(default_factory=Resources)
    runs: tuple[tuple[tuple[str, ...], str], ...] = ()
    recalled: bool = False
    not_lazy: str = ""
    notice: str = ""


def key(text: bytes, path: str, tables: dict[str, Any], namespace: str, snapshotter: str) -> str:
    """The name of an entry, or empty for a plan that is not remembered."""
    if b"file:" in text or b'file"' in text:
        return ""
    parts: list[object] = [tables, namespace, snapshotter, __version__]
    try:
        parts.append(os.path.abspath(path))
        if "policy" in tables:
            parts.append(os.getcwd())  # relative names of its files begin here
    except OSError:
        return ""
    about = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(about.encode() + b"\0" + text).hexdigest()


def seal(paths: Iterable[str]) -> list[list[str]]:
    """Files, and the SHA-256 of what each holds now (of what lies beyond what a policy or key may be, nothing).

    Raises OSError.
    """
    made = []
    for path in paths:
        with open(path, "rb", opener=regular) as file:
            made.append([os.path.abspath(path), hashlib.sha256(file.read(_MAX)).hexdigest()])
    return made


def recall(directory: str, name: str) -> Ready | None:
    """What is remembered, or None."""
    try:
        with open(os.path.join(directory, name), "rb") as file:
            row = json.loads(file.read(_MAX))
        if row["until"] and not 0 <= row["until"] - time.time() < 3600:
            return None
        sealed = row["policy"]
        if seal(path for path, _ in sealed) != sealed:
            return None
        cpu, memory, pids = row["resources"]
        not_lazy = str(row.get("not_lazy", ""))
        return Ready(
            str(row["name"]),
            dict(row["config"]),
            str(row["chain"]),
            str(row["plan"]),
            Resources(Amount(*cpu), Amount(*memory), int(pids)),
            tuple((tuple(args), str(where)) for args, where in row["runs"]),
            True,
            not_lazy,
            said(not_lazy),
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def remember(directory: str, name: str, ready: Ready, until: float, policy: list[list[str]]) -> None:
    """Keep it until a time (seconds since 1970), 0: for ever, or until a file of ``policy`` (see :func:`seal`) changes.

    Raises OSError.
    """
    given = ready.resources
    row = {
        "until": until,
        "policy": policy,
        "name": ready.name,
        "config": ready.config,
        "chain": ready.chain,
        "plan": ready.plan,
        "resources": [[given.cpu.start, given.cpu.ceiling], [given.memory.start, given.memory.ceiling], given.pids],
        "runs": [[list(args), where] for args, where in ready.runs],
        "not_lazy": ready.not_lazy,
    }
    os.makedirs(directory, mode=0o700, exist_ok=True)
    from weenv.core.atomic import write_atomic

    write_atomic(os.path.join(directory, name), json.dumps(row).encode(), durable=False)
    _trim(directory)


def forget(directory: str, name: str) -> None:
    """It turned out wrong."""
    try:
        os.unlink(os.path.join(directory, name))
    except FileNotFoundError:
        return


def _trim(directory: str) -> None:
    with os.scandir(directory) as entries:
        found = [(entry.stat().st_mtime, entry.path) for entry in entries if len(entry.name) == 64]
    for _, path in sorted(found)[: max(0, len(found) - KEEP)]:
        forget(directory, os.path.basename(path))
