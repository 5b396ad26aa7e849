"""One more process in a running environment: its streams, its end, and the end of all it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import resource
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from weenv.core import procfs
from weenv.core.errors import WeenvError
from weenv.environment.lifecycle import (
    NoSuchEnvironment,
    Started,
    StartError,
    base_process,
    patiently,
    remove,
    running,
    start_error,
    to_the_end,
)
from weenv.environment.node import Node
from weenv.environment.processes import MARKER, end_family, holds_pipe
from weenv.environment.recall import Ready
from weenv.environment.rootfs import FileError, find_program, process_root
from weenv.environment.spec import (
    DEFAULT_PATH,
    INIT,
    MOST_ARGUMENTS,
    MOST_TEXT,
    TooLong,
    added_process,
    check_length,
    held_command,
)
from weenv.environment.stdio import Collected, Sink, Streams
from weenv.environment.users import User
from weenv.environment.waiter import RELEASE
from weenv.plugin.containerd.client import ContainerdError
from weenv.plugin.containerd.runtime import Container, Exit

_SHIM_GONE = "ttrpc: closed"
"""containerd's words where the process that looks after a container ends while it is asked (github.com/containerd/ttrpc)."""
LIMIT = 64 << 20
"""Bytes kept of each output stream, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended and what it wrote.

    ``exit_code``: its status, 128 + n where signal n ended it, 127 or 126 where it could not be started (``stderr`` says
    why). ``dropped``: bytes beyond the limit that were read and not kept. ``seconds``: from start to end.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    dropped: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True for exit status 0."""
        return self.exit_code == 0

    @property
    def text(self) -> str:
        """Standard output as text; what is not UTF-8 is replaced."""
        return self.stdout.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Command:
    """What to run and how. ``timeout`` in seconds, None: none. ``limit``: bytes kept of each stream."""

    args: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str = ""
    user: User | None = None
    timeout: float | None = None
    limit: int = LIMIT
    terminal: bool = False


Feed = Callable[[Callable[[bytes], Awaitable[None]]], Awaitable[None]]
"""Gets a function that writes to the command's input; the input ends when it returns. What it raises ends the command."""


async def execute(
    node: Node,
    container: Container,
    first: int,
    command: Command,
    *,
    feed: Feed | None = None,
    stdout: Sink | None = None,
    stderr: Sink | None = None,
    started: Callable[[str], None] | None = None,
    starting: Callable[[], object] = lambda: None,
) -> ExecResult:
    """Run a command beside the first process (pid ``first``). Given sinks get the output instead of the result.

    From the call of ``starting`` on the command may run; ``started`` gets its id when it does.

    When time is up, the caller is cancelled, or the feed or a given sink fails, everything that the command started is
    killed. Raises WeenvError, and what the feed or the sink raised.
    """
    if not command.args or not command.args[0]:
        raise WeenvError("there is no command to run", hint="name a program")  # INIT without one would wait for ever
    loop = asyncio.get_running_loop()
    name = "x" + secrets.token_hex(8)
    kept = Collected(command.limit), Collected(command.limit)
    args = command.args
    if any(isinstance(mount, dict) and mount.get("destination") == INIT for mount in container.spec.get("mounts") or ()):
        try:
            args = (INIT, await node.in_thread(_program, first, container, command), *args)
        except StartError as error:
            return ExecResult(error.exit_code, b"", f"weenv: {error.message}\n".encode())
    spec = added_process(
        base_process(container),
        args,
        env={**command.env, MARKER: name},
        cwd=command.cwd,
        user=command.user,
        terminal=command.terminal,
    )
    try:
        check_length(spec["args"], spec["env"], _room(first))
    except TooLong as error:
        return ExecResult(126, b"", f"weenv: the command cannot be executed: {error.message}\n".encode())
    streams = Streams(
        os.path.join(node.home(container.id), "x-" + name),
        stdout=stdout or kept[0],
        stderr=stderr or kept[1],
        stdin=feed is not None,
        terminal=command.terminal,
    )
    begin = loop.time()
    try:
        try:
            await node.tasks.exec(container.id, name, spec, streams.stdio)
        except ContainerdError as error:
            if error.code in ("NOT_FOUND", "FAILED_PRECONDITION"):
                raise NoSuchEnvironment(f"{container.id} does not run", hint="weenv ps --all shows how it ended") from error
            await _still_there(node, container, first, error)
            raise
        process = _Added(node, container, first, name)
        try:
            timed_out, ended = await process.run(command, streams, feed, started, starting)
            seconds = loop.time() - begin
            streams.raise_error()
        except StartError as error:
            return ExecResult(error.exit_code, b"", f"weenv: {error.message}\n".encode(), seconds=loop.time() - begin)
        finally:
            # A child that lives on holds the streams, and the shim waits two seconds for them: nobody else has to.
            node.background(process.delete())
        await streams.drain(held=process.held)
    finally:
        streams.close()
    streams.raise_error()
    dropped = kept[0].dropped + kept[1].dropped
    return ExecResult(ended.status, kept[0].bytes(), kept[1].bytes(), timed_out, dropped, seconds)


def _room(first: int) -> int:
    """Bytes that a command's arguments and variables may have: what is added gets the first process's limit of the stack."""
    try:
        soft = resource.prlimit(first, resource.RLIMIT_STACK)[0]
    except (OSError, ValueError):
        return MOST_ARGUMENTS
    return MOST_ARGUMENTS if soft == resource.RLIM_INFINITY else max(MOST_TEXT, soft // 4)


def _program(first: int, container: Container, command: Command) -> str:
    """Where the command's program is. Raises StartError where nowhere, NoSuchEnvironment."""
    name = command.args[0] if command.args else ""
    if not name or "/" in name:
        return name  # nothing to look up; what is wrong with it is said by the runtime
    base = base_process(container)
    env = base.get("env")
    variables = dict(str(item).partition("=")[::2] for item in env) if isinstance(env, list) else {}
    path = command.env.get("PATH", variables.get("PATH", DEFAULT_PATH))
    try:
        with process_root(first) as root:
            found = find_program(root, name, path)
    except FileError as error:
        raise NoSuchEnvironment(f"{container.id} does not run", hint="weenv ps --all shows how it ended") from error
    if not found:
        raise StartError(f"the command cannot be executed: {name[:200]!r} is not in {path[:300]}", 127)
    return found


async def _still_there(node: Node, container: Container, first: int, error: ContainerdError) -> None:
    """Raise why nothing can be added to an environment at all, where that is so; ``error`` is what containerd said."""
    if "paused" in error.message:
        hint = f"ctr -n {node.run.namespace} tasks resume {container.id}"
        raise WeenvError(f"{container.id} is paused", hint=hint) from error
    with contextlib.suppress(ContainerdError):  # that of a shim that has ended
        await running(node, container)
    try:
        ended = procfs.stat(first).ending  # before its shim has said so
    except OSError:
        ended = True
    if ended or _SHIM_GONE in error.message:
        raise NoSuchEnvironment(f"{container.id} has ended meanwhile", hint="weenv ps --all shows how") from error


class _Added:
    def __init__(self, node: Node, record: Container, first: int, name: str) -> None:
        self.node = node
        self.record = record
        self.container = record.id
        self.first = first
        self.name = name
        self.leader = 0

    async def run(
        self,
        command: Command,
        streams: Streams,
        feed: Feed | None,
        started: Callable[[str], None] | None,
        starting: Callable[[], object],
    ) -> tuple[bool, Exit]:
        """Start, feed, wait; (timed out, how it ended). The process is taken away again. Raises WeenvError."""
        helpers: list[asyncio.Task[None]] = []
        ended: Exit | None = None
        try:
            starting()
            begun = asyncio.ensure_future(self.node.tasks.start(self.container, self.name))
            try:
                self.leader = await to_the_end(begun)
            except asyncio.CancelledError:
                if begun.done() and begun.exception() is None:
                    await to_the_end(self.node.in_thread(end_family, begun.result(), self.first, self.name))
                raise
            except ContainerdError as error:
                await _still_there(self.node, self.record, self.first, error)
                raise start_error(error) from error
            if started is not None:
                started(self.name)
            feeding = asyncio.ensure_future(self._feed(streams, feed))
            helpers.append(feeding)
            timed_out = False
            try:
                async with asyncio.timeout(command.timeout):
                    ended = await streams.unless_failed(self._while_fed(feeding))
            except TimeoutError:
                timed_out = True
            finally:
                if ended is None:
                    await to_the_end(self.node.in_thread(end_family, self.leader, self.first, self.name))
            if ended is None:
                async with asyncio.timeout(30):
                    ended = await self._wait()
            return timed_out, ended
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    async def _while_fed(self, feeding: asyncio.Task[None]) -> Exit:
        """How it ended. Raises what the feeding failed with, where that comes first: the input would never end."""
        ending = asyncio.ensure_future(self._wait())
        try:
            await asyncio.wait((ending, feeding), return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                feeding.result()
            return await ending
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

    async def _wait(self) -> Exit:
        return await patiently(lambda: self.node.tasks.wait(self.container, self.name))

    async def _feed(self, streams: Streams, feed: Feed | None) -> None:
        if feed is None or streams.writer is None:
            return
        await feed(streams.writer.write)
        await streams.writer.end()
        with contextlib.suppress(ContainerdError):  # it has ended
            await self.node.tasks.close_stdin(self.container, self.name)

    async def held(self) -> bool:
        """Whether something that the process has left running may hold its streams."""
        return await self.node.in_thread(holds_pipe, self.leader, self.first, self.name)

    async def delete(self) -> None:
        """Take the ended process away; what fails then goes with the environment."""
        with contextlib.suppress(WeenvError):
            await patiently(lambda: self.node.tasks.delete_process(self.container, self.name), 10)


def feed_bytes(data: bytes) -> Feed:
    """A feed of these bytes."""

    async def feed(write: Callable[[bytes], Awaitable[None]]) -> None:
        await write(data)

    return feed


async def run_mutations(node: Node, made: Started, ready: Ready) -> None:
    """The commands that a plan has for its environment, and then the one that was held back until they were done, if any.

    Where one fails the environment is removed, and WeenvError raised.
    """
    try:
        for args, directory in ready.runs:
            result = await execute(node, made.container, made.pid, Command(args, {}, directory))
            if result.exit_code:
                text = (result.stderr or result.stdout).decode("utf-8", "replace").strip().splitlines()
                last = f": {text[-1][:300]}" if text else " and wrote nothing"
                raise WeenvError(f"the plan's command {' '.join(args)[:100]!r} ended with {result.exit_code}{last}")
        await _release(node, made)
    except BaseException:
        await to_the_end(remove(node, made.container.id))
        raise


async def _release(node: Node, made: Started) -> None:
    """Let the first process become the command that it holds back, if it does. Raises StartError, ContainerdError.

    The program has to be there now: nobody would be told later.
    """
    process = base_process(made.container)
    given, cwd = process.get("args"), str(process.get("cwd") or "/")
    args = [str(word) for word in given] if isinstance(given, list) else []
    behind = held_command(args)
    if behind is None:
        return
    candidates, command = behind
    if not await node.in_thread(_executable, made.pid, [posixpath.join(cwd, name) for name in candidates]):
        searched = ":".join(posixpath.dirname(path) for path in candidates)[:300]
        what = "is not there" if "/" in command[0] else f"is not in {searched}"
        raise StartError(f"the command cannot be executed: {command[0][:200]!r} {what}", 127)
    while not await node.in_thread(_holds, made.pid, args[0], RELEASE):
        await running(node, made.container)
        await asyncio.sleep(0.001)
    await patiently(lambda: node.tasks.kill(made.container.id, RELEASE))


def _executable(first: int, candidates: list[str]) -> bool:
    """Whether one of the absolute paths is a file that may be executed, as process ``first`` finds it."""
    try:
        with process_root(first) as root:
            return any(find_program(root, posixpath.basename(path), posixpath.dirname(path)) for path in candidates)
    except FileError:
        return True  # it does not run: said by the next who asks


def _holds(pid: int, program: str, number: int) -> bool:
    """Whether a process is ``program``, and no longer the runtime that becomes it, and has a handler for a signal (proc(5),
    SigCgt): to a first process without one it would be lost."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if file.read(4096).partition(b"\0")[0] != os.fsencode(program):
                return False
        with open(f"/proc/{pid}/status") as file:
            mask = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
    except OSError:
        return False
    return bool(int(mask, 16) >> (number - 1) & 1)
