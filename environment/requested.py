"""What ``weenv run`` is asked for, from its options: shared by the two ways it is read (weenv.cli.run, quick.py)."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weenv.core.errors import FormatError, WeenvError
from weenv.environment.spec import Bind, Limits, Options, parse_bind

TIMED_OUT = 124
"""Exit status of a command that ran out of time, as timeout(1) has it."""
GRACE = 10.0
"""Seconds from the first signal that is to end what runs to SIGKILL: a first process without a handler does not even get
the signal (pid_namespaces(7))."""
PATIENCE = 1.0
"""Seconds of these after which it is said what is waited for."""
LEAST_MEMORY = 6 << 20
"""Bytes of memory that runtimes need to get a process started at all."""
MOST_CORES = 256
"""Cores that the kernel's shares can tell apart (spec.py, MOST_SHARES); more are taken where the node has them."""
_LAST = 8192
"""Bytes of standard error in which a runtime's last words are looked for."""
_UNREAD = re.compile(rb"(?:\A|\n)exec [^\n]{1,4096}: input/output error\s*\Z")
UNREAD = "bytes of the command that are not on this node could not be had: weenv status names the layer and the reason"


def told(number: int) -> str:
    """What is said to whoever has sent a signal that has not ended anything."""
    name = signal.Signals(number).name
    return f"{name} was handed on, and it has not ended; it is killed in {GRACE - PATIENCE:.0f} s, or by one more signal"


def last_words(before: bytes, data: bytes) -> bytes:
    """The end of standard error, for :func:`unread`, once ``data`` has come."""
    return (before + bytes(data[-_LAST:]))[-_LAST:]


def unread(status: int, last: bytes) -> bool:
    """Whether a first process ended because its program could not be read (EIO), as runtimes say it on its standard error."""
    return status in (1, 126, 255) and _UNREAD.search(last) is not None


def check_limits(limits: Limits) -> Limits:
    """The limits, which a node and its runtime can give. Raises FormatError, which begins with the name of what is wrong."""
    cores = os.cpu_count() or 1
    if not 0 <= limits.cpus <= max(cores, MOST_CORES):  # nor is NaN
        raise FormatError(f"cpus: {limits.cpus:g} cores cannot be given", hint=f"this node has {cores}; 0: what the plan says")
    check_memory(limits.memory)
    if not 0 <= limits.pids <= 1 << 62:
        raise FormatError(f"pids: {limits.pids} processes cannot be given", hint="1 and more; 0: what the plan says")
    return limits


def check_memory(count: int) -> None:
    """Raise FormatError for bytes with which nothing can be started; 0 is no limit."""
    if count and not LEAST_MEMORY <= count <= 1 << 62:
        hint = f"give at least {LEAST_MEMORY >> 20}m; 0: what the plan says"
        raise FormatError(f"memory: nothing can be started with {count} bytes", hint=hint)


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
        limits=check_limits(Limits(o["cpus"], size(o["memory"]), o["pids"])),
        network=o["network"] or network,
        hostname=o["hostname"],
        terminal=o["tty"],
        read_only=o["read_only"],
        new_privileges=not o["no_new_privileges"],
        role=o.get("role") or "",
    )
