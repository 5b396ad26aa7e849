"""Asking this node's elastic daemon for room before an environment is made; what it may start with is its answer.

Only environments whose plan names resources are elastic; where no daemon serves the node, they start with what the plan says
and stay there. Light to import, and blocking: a start by weenv.environment.quick asks as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from weenv.core.errors import WeenvError
from weenv.environment.model import Resources
from weenv.environment.recall import Ready
from weenv.environment.runconfig import NodeConfig
from weenv.environment.spec import Options

if TYPE_CHECKING:
    from weenv.plugin.nri.ask import Asker

WAITING = "this node has no room yet, waiting"
"""What who waits is told, once."""


def is_elastic(ready: Ready, options: Options) -> bool:
    """Whether its limits are to move: the plan names resources, and the command line does not fix both."""
    given = ready.resources
    named = given.cpu.start or given.cpu.ceiling or given.memory.start or given.memory.ceiling
    return bool(ready.plan and named and not (options.limits.cpus and options.limits.memory))


def ceiling(given: Resources, options: Options) -> tuple[float, int]:
    """How far it may grow, (cores, bytes), 0: as far as the node says; what the command line says is not exceeded."""
    asked = options.limits
    return asked.cpus or given.cpu.ceiling, asked.memory or int(given.memory.ceiling)


def admit(
    config: NodeConfig,
    ready: Ready,
    options: Options,
    container: str,
    *,
    say: Callable[[str], object] | None = None,
    opened: Callable[[Asker], object] = lambda _: None,
) -> Options:
    """Wait for room; the options with the limits to start with. Raises WeenvError where there is none.

    ``say`` is told that it has to wait; ``opened`` gets the connection, which another thread may shut down.
    """
    if not is_elastic(ready, options):
        return options
    from weenv.plugin.nri.ask import Asker, NoDaemon
    from weenv.plugin.nri.serveconfig import from_tables

    given, asked = ready.resources, options.limits
    top = ceiling(given, options)
    try:
        with Asker(from_tables(config.tables).socket) as asker:
            opened(asker)
            answer = asker.ask(
                "admit", waiting=lambda: say and say(WAITING), namespace=config.run.namespace, id=container,
                cpu=asked.cpus or given.cpu.start or given.cpu.ceiling,
                memory=asked.memory or int(given.memory.start or given.memory.ceiling),
                cpu_max=top[0], memory_max=top[1], role=options.role or "task",
            )  # fmt: skip
        cpus, memory = answer["start"]
        limits = replace(asked, cpus=float(cpus), memory=int(memory))
    except NoDaemon:
        return options
    except (KeyError, TypeError, ValueError) as error:
        raise WeenvError("the daemon of elastic provisioning is of another version", hint="restart it") from error
    return replace(options, limits=limits)


def give_back(config: NodeConfig, ready: Ready, options: Options, container: str) -> None:
    """It could not be started after all."""
    if not is_elastic(ready, options):
        return
    from weenv.plugin.nri.ask import Asker
    from weenv.plugin.nri.serveconfig import from_tables

    # Where it is not told, the daemon takes the room back by itself, a minute later.
    with contextlib.suppress(WeenvError), Asker(from_tables(config.tables).socket) as asker:
        asker.ask("release", namespace=config.run.namespace, id=container)
