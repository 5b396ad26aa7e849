"""What containerd is to keep of an environment: name, labels, limits, specification. Reads the machine, asks nobody."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weenv.core.errors import WeenvError
from weenv.environment import notlazy, owner, waiter
from weenv.environment.admission import ceiling, is_elastic
from weenv.environment.processes import accounts_swap, unified_only
from weenv.environment.recall import Ready
from weenv.environment.requested import check_memory
from weenv.environment.runconfig import NodeConfig
from weenv.environment.spec import Limits, Options, build_spec
from weenv.environment.users import User
from weenv.plugin.nri.labels import CEILING, ROLE
from weenv.plugin.nri.labels import ENVIRONMENT as LABEL

MAX_ID = 76
"""Characters of a container's name, and what it is made of (containerd pkg/identifiers/validate.go)."""
_ID = re.compile(r"[A-Za-z0-9]+([._-][A-Za-z0-9]+)*\Z")

LABEL_RM = "dev.weenv.rm"
"""On those to be removed: the owner's mark, or ``-`` for one without owner, at its end. All that are being made have it."""


def new_id(name: str) -> str:
    """An id that no other daemon of this machine has: they may share the runtime's directory."""
    short = "".join(c for c in name if c.isalnum() or c in "._-").strip("._-")[:40] or "env"
    return f"{short}-{os.urandom(5).hex()}"


def check_id(name: str) -> str:
    """A name that a user gave, or none. Raises WeenvError for one that containerd does not take."""
    if name and (len(name) > MAX_ID or _ID.match(name) is None):
        hint = f"letters and digits, between them single '.', '_' or '-'; at most {MAX_ID}"
        raise WeenvError(f"no name for an environment: {name[:80]!r}", hint=hint)
    return name


def limits_of(ready: Ready, options: Options) -> Limits:
    """What is asked for, else what the plan gives at the start. Raises FormatError."""
    asked = options.limits
    given = ready.resources
    memory = asked.memory or int(given.memory.start or given.memory.ceiling)
    check_memory(memory)
    return Limits(
        asked.cpus or given.cpu.start or given.cpu.ceiling,
        memory,
        asked.pids or given.pids,
        accounts_swap(),
    )


def labels_of(ready: Ready, options: Options) -> dict[str, str]:
    """The container's labels while this process is its owner."""
    made = {LABEL: ready.plan or ready.name, LABEL_RM: owner.mark()}
    if is_elastic(ready, options):
        cores, size = ceiling(ready.resources, options)
        made[CEILING] = f"{cores:g},{size}"
        if options.role:
            made[ROLE] = options.role
    if ready.not_lazy:
        made[notlazy.LABEL] = ready.not_lazy
    return made


def completed(config: NodeConfig, ready: Ready, options: Options, container: str) -> Options:
    """The options with what the node and the plan give. Raises OSError, UnsupportedError, FormatError."""
    return replace(
        options,
        limits=limits_of(ready, options),
        hostname=options.hostname or container[:63],
        init=waiter.install(config.directory),
    )


def user_text(ready: Ready, options: Options) -> str:
    """Who it is to run as, ``USER[:GROUP]``."""
    return options.user or str((ready.config.get("config") or {}).get("User") or "")


def spec_of(config: NodeConfig, ready: Ready, options: Options, user: User, container: str) -> Mapping[str, Any]:
    """The specification. Raises WeenvError."""
    return build_spec(ready.config, options, user, cgroup=config.cgroup(container), unified=unified_only())


__all__ = ["LABEL", "LABEL_RM", "check_id", "completed", "labels_of", "limits_of", "new_id", "spec_of", "user_text"]
