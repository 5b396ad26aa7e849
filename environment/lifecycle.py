"""Environments from start to removal, over containerd's API.

Nothing is left behind, whoever dies when. The container record comes first: its snapshot key keeps the snapshot from
containerd's collector from the moment that is made, so no lease has to be renewed, and whatever comes after hangs on a
record that carries our labels. Removal takes the record last; each step may find its work done. While an environment is
being made, and afterwards where it is to be removed at its end, it has the label ``dev.weenv.rm`` with the mark of its
owner (owner.py); :func:`sweep`, which ``weenv run``, ``ps``, ``rm`` and the API call, removes those whose owner is gone and
those without owner that have ended, and the leases of those who were killed while they composed. :func:`hand_over` makes
one outlive its maker.

::

    record -> snapshot -> (spec with the user) -> directory -> task made -> task runs -> handed over
    ended -> task -> snapshot -> directory -> record
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from weenv.core.errors import WeenvError
from weenv.core.process import try_lock
from weenv.environment import accounts, admission, orphans, owner, used
from weenv.environment.images import prepare
from weenv.environment.model import Plan
from weenv.environment.node import Node
from weenv.environment.recall import Ready
from weenv.environment.record import LABEL, LABEL_RM, check_id, completed, labels_of, new_id, spec_of, user_text
from weenv.environment.requested import UNREAD
from weenv.environment.spec import Options
from weenv.environment.stdio import Streams, drained
from weenv.environment.users import User
from weenv.plugin.containerd.client import ContainerdError
from weenv.plugin.containerd.runtime import Container, Exit, Status, Stdio
from weenv.plugin.containerd.types import Mount

log = logging.getLogger(__name__)

T = TypeVar("T")

SWEEPING = 10.0
"""Seconds that a command which has something else to do gives to what others have left."""
SWEPT_ANEW = 60.0
"""Seconds after which a program that goes on starting environments looks at what others have left again."""
_ANEW = 3
"""Times that an image is composed anew whose snapshots are gone, or a task made anew whose layers' mounts have moved."""
_LOST = frozenset({"UNAVAILABLE"})
_GONE = frozenset({"NOT_FOUND"})
_CLEARED = 15.0
"""Seconds for containerd to clear away a task that it has given up (core/runtime/v2, v2.1.9: 5 to delete it, 5 more for its
shim's end, 3 for asking for that)."""
_TAKEN = "container with given ID already exists"
"""runc's words where it keeps something of that name (libcontainer/factory_linux.go, v1.1; error.go, v1.2)."""
_UNREAD = 0.25
"""Seconds that an ended task's deletion takes at most, unless what its process wrote is not taken by anybody."""


class StartError(WeenvError):
    """A command cannot be started. ``exit_code`` is what a shell would give: 127 not found, 126 not executable."""

    def __init__(self, message: str, code: int, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.exit_code = code


class NoSuchEnvironment(WeenvError):
    """There is no environment of that name, or it does not run."""


@dataclass(frozen=True, slots=True)
class Started:
    """A running environment as its starter knows it."""

    container: Container
    pid: int


_SAID = re.compile(r'exec: \\?"([^"\\\n]+)\\?": ([^"\n]*)')
"""What runc says of a command, somewhere in what the shim and containerd say of runc."""


def start_error(error: ContainerdError, spec: Mapping[str, Any] | None = None) -> WeenvError:
    """What a runtime says of a command that cannot be executed, as a shell would number it; else the error itself.

    ``spec`` of the container, where it is known, tells where the command was looked for.
    """
    text = error.message
    for words, code in (
        ("executable file not found", 127), ("no such file or directory", 127), ("permission denied", 126),
        ("exec format error", 126), ("is a directory", 126), ("input/output error", 126),
    ):  # fmt: skip
        if words in text.lower() and ("exec" in text or "runc" in text or "OCI runtime" in text):
            hint = UNREAD if code == 126 and words.startswith("input") else ""
            found = _SAID.search(text)
            if found is None:
                what = text.rpartition("exec failed: ")[2][-300:]
            elif found[2].startswith("executable file"):
                what = f"{found[1][:200]!r} is not in {_path(spec)}"
            else:
                what = f"{found[1][:200]!r}: {found[2].removesuffix(': unknown')[:300]}"
            return StartError(f"the command cannot be executed: {what}", code, hint=hint)
    return error


def _path(spec: Mapping[str, Any] | None) -> str:
    process = (spec or {}).get("process")
    env = process.get("env") if isinstance(process, dict) else None
    names = dict(str(item).partition("=")[::2] for item in env) if isinstance(env, list) else {}
    return str(names.get("PATH", "$PATH"))[:300]


async def patiently(work: Callable[[], Awaitable[T]], seconds: float = 60.0) -> T:
    """Do it again while containerd is away, as in a restart; environments go on meanwhile. Raises ContainerdError."""
    end = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            return await work()
        except ContainerdError as error:
            if error.code not in _LOST or asyncio.get_running_loop().time() > end:
                raise
        await asyncio.sleep(0.2)


async def to_the_end(work: Awaitable[T]) -> T:
    """Wait for what must not be left half done, however often the caller is cancelled meanwhile; that is raised then."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except BaseException:  # noqa: BLE001 - the task's own, given below
            break
    if cancelled is not None and not task.cancelled():
        task.exception()
        raise cancelled
    return task.result()


async def _unless(codes: frozenset[str], work: Awaitable[T]) -> T | None:
    """The result, or None where it fails in one of these ways."""
    try:
        return await work
    except ContainerdError as error:
        if error.code not in codes:
            raise
        return None


async def begin(
    node: Node,
    target: Plan | str,
    choose: Callable[[Ready], Options],
    **how: Any,
) -> tuple[Ready, Started]:
    """Make ``target`` startable and start it with ``choose(ready)``; the rest is :func:`start`'s. Raises WeenvError."""
    ready = await prepare(target, node)
    for _ in range(_ANEW):  # its image may be removed before its snapshot is made
        try:
            return ready, await start(node, ready, choose(ready), **how)
        except ContainerdError as error:
            if error.code != "NOT_FOUND":
                raise
        ready = await prepare(target, node, fresh=True)
    return ready, await start(node, ready, choose(ready), **how)


async def start(
    node: Node,
    ready: Ready,
    options: Options,
    *,
    name: str = "",
    streams: Callable[[Ready], Callable[[str], Streams] | None] | None = None,
    starting: Callable[[], object] = lambda: None,
) -> Started:
    """Make and start an environment. What it writes goes to the ``streams`` made in its directory, or
    into two files where there are none. From the call of ``starting`` on, its program may run.

    This process owns it: removes it, or hands it over. Whatever fails, nothing is left. Raises WeenvError.
    """
    container = check_id(name) or new_id(ready.plan or ready.name.rpartition("/")[2].partition(":")[0])
    labels = labels_of(ready, options)
    asked = options
    options = await _admitted(node, ready, asked, container)
    options = completed(node.config, ready, options, container)
    text = user_text(ready, options)
    user = accounts.remembered(node.directory, ready.chain, text)

    def record(who: User) -> Container:
        spec = spec_of(node.config, ready, options, who, container)
        return Container(container, ready.name, spec, node.run.snapshotter, container, labels, node.run.shim, node.run.binary)

    entry = record(user or User())
    await asyncio.to_thread(used.touch, node.directory, node.run.namespace, ready.name)
    try:
        await _enter(node, entry)
    except BaseException:
        await to_the_end(asyncio.to_thread(admission.give_back, node.config, ready, asked, container))
        raise
    opened: Streams | None = None
    try:
        mounts = await to_the_end(node.snapshots.prepare(container, ready.chain))
        if user is None:
            user = await asyncio.to_thread(_look_up, node, ready, text, mounts)
            entry = record(user)
            await node.containers.update(entry, "spec")
        home = node.home(container)
        os.makedirs(home, mode=0o700, exist_ok=True)
        connect = streams(ready) if streams is not None else None
        if connect is not None:
            opened = connect(home)
            stdio = opened.stdio
        else:
            stdio = _log_files(home)
        try:
            # Given up half-way, containerd ends the shim, which ends the runtime, whose first process may be left.
            pid = await to_the_end(_make_task(node, container, mounts, stdio))
            starting()
            await node.tasks.start(container)
        except ContainerdError as error:
            raise start_error(error, entry.spec) from error
    except BaseException:
        if opened is not None:
            opened.close()
        await to_the_end(remove(node, container))
        await to_the_end(asyncio.to_thread(admission.give_back, node.config, ready, asked, container))
        raise
    return Started(entry, pid)


async def _make_task(node: Node, container: str, mounts: list[Mount], stdio: Stdio) -> int:
    """The task's pid; made again where a layer was mounted in another way, being complete, just when it was looked for, and
    when containerd has done with one of that name whose maker was killed a moment ago."""
    moved, until = 0, time.monotonic() + _CLEARED
    while True:
        try:
            return await node.tasks.create(container, mounts, stdio, binary=node.run.binary)
        except ContainerdError as error:
            moved += mount_moved(error.message)
            if is_cleared_away(error.message, container):
                await node.in_thread(orphans.end, *_place(node, container))  # not ours, which has been refused
                if time.monotonic() > until:
                    raise WeenvError(
                        f"containerd has not cleared away what an earlier {container!r} ran in: {error.message[-200:]}",
                        hint="take another name, or restart containerd",
                    ) from error
                await asyncio.sleep(0.05)
            elif not mount_moved(error.message) or moved > _ANEW:
                raise


def is_cleared_away(message: str, container: str) -> bool:
    """Whether a task was not made because there is yet something of one of that name whose making was given up: the bundle of
    containerd, or what runc keeps."""
    text = message.rstrip()
    return ("mkdir " in text and text.endswith(f"/{container}: file exists")) or _TAKEN in text


def mount_moved(message: str) -> bool:
    """Whether a task was not made because overlayfs found a layer's mount just taken away for another (EINVAL)."""
    return "failed to mount rootfs" in message and message.rstrip().endswith("invalid argument")


async def _enter(node: Node, entry: Container, *, again: bool = True) -> None:
    """Make the record; one of that name that a killed program has left gives way. Raises WeenvError."""
    making = asyncio.ensure_future(node.containers.create(entry))
    try:
        await to_the_end(making)
    except BaseException as error:
        if making.exception() is None:  # cancelled, but made: of another's with that name nothing may be removed
            await to_the_end(remove(node, entry.id))
        if not isinstance(error, ContainerdError) or error.code != "ALREADY_EXISTS":
            raise
        if not again or not await _removed(node, entry.id):
            raise WeenvError(f"there is an environment {entry.id!r} already", hint=f"weenv rm {entry.id}") from error
        await _enter(node, entry, again=False)


async def _removed(node: Node, container: str) -> bool:
    """Whether nothing of that name is there any more; what was left is removed. Raises WeenvError.

    By one process of the node at a time: the second would remove what has been started since under the same name.
    """
    os.makedirs(node.directory, mode=0o700, exist_ok=True)
    while (lock := try_lock(os.path.join(node.directory, "left.lock"))) is None:  # noqa: ASYNC110 - another process has it
        await asyncio.sleep(0.02)
    try:
        there = await _unless(_GONE, node.containers.get(container))
        if there is None:
            return True
        if LABEL not in there.labels or not await _is_left(node, there):
            return False
        await to_the_end(remove(node, container))
        return True
    finally:
        os.close(lock)


async def _is_left(node: Node, item: Container) -> bool:
    """Whether an environment was to be removed and has nobody left to do it."""
    mark = item.labels.get(LABEL_RM)
    if mark == "-":  # it has run: without a task it has ended, and its removal, or the machine, too soon
        process = await _unless(_GONE, node.tasks.get(item.id))
        return process is None or process.status is Status.STOPPED
    return mark is not None and await asyncio.to_thread(owner.is_gone, mark)


async def _admitted(node: Node, ready: Ready, options: Options, container: str) -> Options:
    """Wait for room on the node, in a thread; where that is cancelled, the place in its line is given up."""
    if not admission.is_elastic(ready, options):
        return options
    connections: list[Any] = []
    work = asyncio.ensure_future(
        asyncio.to_thread(
            admission.admit, node.config, ready, options, container, say=node.say, opened=connections.append
        )
    )
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            for connection in connections:
                connection.shut()
            await asyncio.wait([work], timeout=0.05)
        work.exception()
        raise


async def hand_over(node: Node, made: Started, *, remove_at_end: bool) -> None:
    """It is no longer this process's: nobody's to be removed at its end, or to be kept. Where that fails it is removed.

    Raises WeenvError.
    """
    labels = {name: value for name, value in made.container.labels.items() if name != LABEL_RM}
    if remove_at_end:
        labels[LABEL_RM] = "-"
    try:
        await patiently(lambda: node.containers.update(replace(made.container, labels=labels), "labels"))
    except BaseException:
        await to_the_end(remove(node, made.container.id))
        raise


def _look_up(node: Node, ready: Ready, text: str, mounts: list[Mount]) -> User:
    from weenv.environment.rootfs import open_snapshot, read_account_files
    from weenv.environment.users import resolve_user

    root = open_snapshot(mounts)
    try:
        passwd, group = read_account_files(root)
    finally:
        os.close(root)
    found = resolve_user(text, passwd, group)
    accounts.remember(node.directory, ready.chain, text, found)
    return found


def _log_files(home: str) -> Stdio:
    """Files that the shim appends to: it takes any path that is no FIFO so (see weenv.environment.stdio)."""
    paths = [os.path.join(home, name) for name in ("stdout", "stderr")]
    for path in paths:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return Stdio("", paths[0], paths[1])


async def find(node: Node, name: str) -> Container:
    """The record of an environment, by its id or the beginning of it. Raises NoSuchEnvironment."""
    found = await _unless(_GONE, node.containers.get(name))
    if found is not None and LABEL in found.labels:
        return found
    several = [item for item in await node.containers.find(f'labels."{LABEL}"') if item.id.startswith(name)]
    if len(several) == 1 and name:
        return several[0]
    if several and name:
        raise NoSuchEnvironment(f"{name!r} begins the names of {len(several)} environments", hint="write more of it")
    raise NoSuchEnvironment(f"no environment {name[:80]!r}", hint="weenv ps --all lists them")


async def running(node: Node, container: Container) -> int:
    """The pid of an environment's first process. Raises NoSuchEnvironment, saying how it ended."""
    process = await _unless(_GONE, node.tasks.get(container.id))
    if process is None:
        raise NoSuchEnvironment(f"{container.id} does not run", hint="weenv ps --all shows how it ended")
    if process.status is Status.STOPPED:
        raise NoSuchEnvironment(
            f"{container.id} has exited ({process.exit_status}): its command ended",
            hint="start it with a command that stays, e.g. -- sleep infinity, or with: weenv run -d --idle",
        )
    return process.pid


async def wait(node: Node, container: str) -> Exit:
    """Wait for the end of an environment's first process, over restarts of containerd."""
    return await patiently(lambda: node.tasks.wait(container))


async def stop(node: Node, container: str, *, grace: float = 10.0, number: int = signal.SIGTERM) -> Exit | None:
    """Ask the first process to end, and after ``grace`` seconds kill everything; None where nothing ran."""
    process = await _unless(_GONE, node.tasks.get(container))
    if process is None:
        return None
    if process.status is Status.STOPPED:
        return Exit(process.exit_status, process.exited, process.pid)
    if process.status is Status.PAUSED:
        await node.tasks.resume(container)
    ended = asyncio.ensure_future(wait(node, container))
    try:
        if grace > 0:
            await _ignore(node.tasks.kill(container, number))
            await asyncio.wait([ended], timeout=grace)
        if not ended.done():
            await _ignore(node.tasks.kill(container, signal.SIGKILL, everyone=True))
            await asyncio.wait([ended], timeout=30)
        if not ended.done():
            raise WeenvError(f"{container} does not end", hint="is a process of it in uninterruptible sleep?")
        return await ended
    finally:
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)


async def _ignore(work: Awaitable[object]) -> None:
    """What says that there is nothing to do any more is no fault; and whoever does not end is told of anyway."""
    try:
        await work
    except ContainerdError as error:
        log.debug("containerd does not do it: %s", error)


async def remove(node: Node, container: str, *, ended: bool = False) -> None:
    """Take an environment away, whatever state it is in; ``ended``: its task is known to have. Raises WeenvError.

    Where something of it cannot be ended its record stays, by which the next who sweeps finds it.
    """
    if not ended:
        await _unless(_GONE, stop(node, container, grace=0))
    for attempt in range(50):
        try:
            await _delete_task(node, container)
        except ContainerdError as error:
            if error.code in _GONE:
                if ended or not await _in_the_making(node, container):
                    break
                continue
            # Between its end and the shim's word of it, or while it is being made.
            if attempt == 49:
                raise
            await asyncio.sleep(0.05)
            await _unless(_GONE, stop(node, container, grace=0))
        else:
            break
    await patiently(lambda: _unless(_GONE, node.snapshots.remove(container)))
    shutil.rmtree(node.home(container), ignore_errors=True)
    await patiently(lambda: _unless(_GONE, node.containers.delete(container)))


async def _delete_task(node: Node, container: str) -> None:
    """Delete an ended task. The shim waits 10 s for what the process wrote to be read; where nobody does, it is dropped."""
    deleting = asyncio.ensure_future(patiently(lambda: node.tasks.delete(container)))
    try:
        await asyncio.wait([deleting], timeout=_UNREAD)
        with drained(node.home(container)) if not deleting.done() else contextlib.nullcontext():
            await deleting
    finally:
        deleting.cancel()
        await asyncio.gather(deleting, return_exceptions=True)


def _place(node: Node, container: str) -> tuple[str, str, str, str]:
    return node.run.address, node.run.namespace, container, node.cgroup(container)


async def _in_the_making(node: Node, container: str) -> bool:
    """True where containerd has the task after all; else what its making or its deletion, given up by containerd, has left is
    ended. Raises WeenvError where something of that is still there.
    """
    record = await patiently(lambda: _unless(_GONE, node.containers.get(container)))
    if record is None:
        return False  # somebody else has removed it: of that name may be another
    mark = record.labels.get(LABEL_RM, "-")
    if mark != "-" and not await asyncio.to_thread(owner.is_gone, mark):  # who makes it lives
        for _ in range(100):
            if not await node.in_thread(orphans.makers, node.run.namespace, container):
                break
            await asyncio.sleep(0.05)
            if await patiently(lambda: _unless(_GONE, node.tasks.get(container))) is not None:
                return True
    if not await node.in_thread(orphans.end, *_place(node, container)):
        raise WeenvError(f"{container} does not end", hint="is a process of it in uninterruptible sleep?")
    return False


async def sweep(node: Node) -> list[str]:
    """Remove the environments that were to be removed and have nobody left to do it; their names. Leases without owner end."""
    removed = []
    for item in await node.containers.find(f'labels."{LABEL_RM}"'):
        if not await _is_left(node, item):
            continue
        try:
            gone = await _removed(node, item.id)
        except WeenvError:
            continue  # containerd is in trouble: the next command tries again
        if gone:
            removed.append(item.id)
    for lease in await node.namespace.list_leases(f'labels."{owner.LEASE_LABEL}"'):
        if await asyncio.to_thread(owner.is_orphan, lease.id, lease.labels):
            await _unless(_GONE, node.namespace.delete_lease(lease.id))  # what it kept is collected then
    return removed


async def tidy(node: Node) -> None:
    """:func:`sweep` for SWEEPING seconds at most; what fails, or takes longer, is left to the next command."""
    try:
        async with asyncio.timeout(SWEEPING):
            await sweep(node)
    except (WeenvError, TimeoutError) as error:
        log.debug("what others left is not all gone yet: %s", str(error) or f"it takes more than {SWEEPING:g} s")


_swept: dict[tuple[str, str], float] = {}
"""When this process has begun to tidy last, by containerd and namespace."""


def tidy_beside(node: Node) -> None:
    """:func:`tidy` in the node's background, at a program's first start and then once a SWEPT_ANEW: a program that starts
    hundreds of environments at once lists them once, not hundreds of times."""
    now, place = time.monotonic(), (node.run.address, node.run.namespace)
    if now - _swept.get(place, -math.inf) >= SWEPT_ANEW:
        _swept[place] = now
        node.background(tidy(node))


def base_process(container: Container) -> Mapping[str, object]:
    """The first process's ``process`` object. Raises WeenvError where the record has none."""
    found = container.spec.get("process")
    if not isinstance(found, dict):
        raise WeenvError(f"{container.id} has no process", hint="it was not made by weenv run")
    return found
