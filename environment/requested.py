"""What ``weenv run`` is asked for, from its options: shared by the two ways it is read (weenv.cli.run, quick.py)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weenv.core.errors import FormatError, WeenvError
from weenv.environment.spec import Bind, Limits, Options, parse_bind


def variables(words: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE``, or ``NAME`` for what this process has."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            found[name] = value
        elif name in os.environ:
            found[name] = os.environ[name]
    return found


def size(text: str | None) -> int:
    """Bytes: ``512m``, ``2GiB``, ``1048576``; 0 for None. Raises FormatError."""
    if not text:
        return 0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", text.strip().lower())
    if match is None:
        raise FormatError(f"not a size: {text[:40]!r}", hint="write 512m or 2g")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " "))


def sources(binds: Iterable[Bind]) -> tuple[Bind, ...]:
    """Bind mounts whose sources are on this machine: a runtime's word of one that is not reads as if the command were not.

    Raises WeenvError.
    """
    found = tuple(binds)
    for bind in found:
        if not os.path.exists(bind.source):
            raise WeenvError(f"{bind.source} does not exist", hint="what a bind mount shows must be on this machine")
    return found


def options_of(o: Mapping[str, Any], command: Sequence[str], network: str) -> Options:
    """The options of ``weenv run`` by their names; ``network`` is the default. Raises WeenvError."""
    words = tuple(command)
    if words[:1] == ("--",):
        words = words[1:]
    return Options(
        args=words,
        entrypoint=(o["entrypoint"],) if o["entrypoint"] is not None else None,
        env=variables(o["env"]),
        cwd=o["workdir"],
        user=o["user"],
        binds=sources(parse_bind(text) for text in o["volume"]),
        limits=Limits(o["cpus"], size(o["memory"]), o["pids"]),
        network=o["network"] or network,
        hostname=o["hostname"],
        terminal=o["tty"],
        read_only=o["read_only"],
        new_privileges=not o["no_new_privileges"],
        role=o.get("role") or "",
    )
