"""What ``weenv ps``, ``logs`` and ``rm`` ask of a node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weenv.core.errors import WeenvError
from weenv.environment import lifecycle
from weenv.environment.attended import write_err, write_out
from weenv.environment.node import Node
from weenv.environment.notlazy import LABEL as NOT_LAZY
from weenv.environment.notlazy import from_label
from weenv.environment.record import LABEL
from weenv.environment.spec import held_command
from weenv.plugin.containerd.runtime import Status
from weenv.plugin.nri.labels import ENDED, OOM_KILLS

_CHUNK = 1 << 18


async def rows(node: Node, *, everything: bool) -> list[dict[str, Any]]:
    """Environments, the newest first: name, plan, image, status, pid, exit_status, reason, age (seconds), command,
    not_lazy (groups, see notlazy.py; empty where all is lazy), labels."""
    containers = await node.containers.find(f'labels."{LABEL}"')
    tasks = {process.container or process.id: process for process in await node.tasks.list_all()}
    found = []
    for item in sorted(containers, key=lambda container: -container.created):
        process = tasks.get(item.id)
        status = process.status if process is not None else Status.UNKNOWN
        if not everything and status not in (Status.RUNNING, Status.PAUSED, Status.PAUSING):
            continue
        spec = item.spec.get("process")
        found.append(
            {
                "name": item.id,
                "plan": item.labels.get(LABEL, ""),
                "image": item.image,
                "status": status.name.lower() if process is not None else "no task",
                "pid": process.pid if process is not None and status is not Status.STOPPED else 0,
                "exit_status": process.exit_status if process is not None and status is Status.STOPPED else None,
                "reason": reason(status, process.exit_status if process is not None else 0, item.labels),
                "age": max(0.0, time.time() - item.created / 1e9),
                "command": _command(spec),
                "not_lazy": [group.to_json() for group in from_label(item.labels.get(NOT_LAZY, ""))],
                "labels": dict(item.labels),
            }
        )
    return found


def _command(process: object) -> list[str]:
    """A first process's arguments, of one that was held back its own; empty where the record has none."""
    args = process.get("args") if isinstance(process, dict) else None
    words = [str(word) for word in args] if isinstance(args, list) else []
    behind = held_command(words)
    return words if behind is None else behind[1]


def reason(status: Status, exit_status: int, labels: Mapping[str, str]) -> str:
    """Why an environment ended: ``completed``, ``failed``, ``oom-kernel``, ``oom-emergency`` or ``starved`` (journal.Cause).

    Empty while it runs. The last three are known where the node's elastic daemon has seen them.
    """
    if status is not Status.STOPPED:
        return ""
    if labels.get(ENDED):
        return labels[ENDED]
    if exit_status and labels.get(OOM_KILLS):
        return "oom-kernel"
    return "failed" if exit_status else "completed"


async def logs(node: Node, environment: str, *, follow: bool) -> None:
    """Copy what an environment has written to this process's standard output and error."""
    container = await lifecycle.find(node, environment)
    home = node.home(container.id)
    files = []
    with contextlib.ExitStack() as stack:
        for name, sink in (("stdout", write_out), ("stderr", write_err)):
            with contextlib.suppress(FileNotFoundError):
                files.append((stack.enter_context(open(os.path.join(home, name), "rb", buffering=0)), sink))  # noqa: ASYNC230
        if not files:
            raise WeenvError(f"{container.id} has no log", hint="only environments started with -d have one")
        while True:
            running = follow and await _runs(node, container.id)
            more = False
            for file, sink in files:
                while data := file.read(_CHUNK):
                    sink(data)
                    more = True
            if not running:
                return
            if not more:
                await asyncio.sleep(0.1)


async def _runs(node: Node, container: str) -> bool:
    try:
        return (await lifecycle.patiently(lambda: node.tasks.get(container))).status is not Status.STOPPED
    except WeenvError:
        return False


async def remove(
    node: Node, names: Sequence[str], *, force: bool, everything: bool, said: Callable[[str], object],
    refused: Callable[[str], object],
) -> int:  # fmt: skip
    """Remove environments, saying the name of each, or why it is not removed; 1 where one is not, else 0."""
    if everything:
        chosen = await node.containers.find(f'labels."{LABEL}"')
    else:
        chosen = [await lifecycle.find(node, name) for name in names]
    failed = 0
    for item in chosen:
        if not force and await _runs(node, item.id):
            refused(f"{item.id} runs: stop it first, or use --force")
            failed = 1
            continue
        await lifecycle.remove(node, item.id)
        said(item.id)
    return failed
