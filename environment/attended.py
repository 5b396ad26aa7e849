"""Environments that a command line looks after: streams to and from this process, signals, and removal at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weenv.core.errors import WeenvError
from weenv.environment import lifecycle
from weenv.environment.node import Node
from weenv.environment.recall import Ready
from weenv.environment.spec import Options, command
from weenv.environment.stdio import CHUNK, Streams
from weenv.plugin.containerd.client import ContainerdError

TIMED_OUT = 124
"""Exit status of a command that ran out of time, as timeout(1) has it."""

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

GRACE = 10.0
"""Seconds from the first SIGINT or SIGTERM to SIGKILL."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What ``weenv run`` was asked for."""

    target: str
    options: Options
    name: str = ""
    remove: bool = False
    interactive: bool = False
    init: bool = False
    idle: bool = False


def write_out(data: bytes) -> None:
    """To standard output."""
    _write(1, data)


def write_err(data: bytes) -> None:
    """To standard error."""
    _write(2, data)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            import select

            select.select([], [fd], [])


async def detached(node: Node, wanted: Wanted) -> str:
    """Start and leave it; its id."""

    def choose(ready: Ready) -> Options:
        waits = wanted.idle or bool(ready.runs) or not command(ready.config.get("config") or {}, wanted.options)
        return replace(wanted.options, waits=waits)

    how: dict[str, Any] = {"name": wanted.name, "remove_at_end": wanted.remove, "owned": False}
    ready, made = await lifecycle.begin(node, wanted.target, choose, **how)
    if ready.runs:
        from weenv.environment.exec import run_mutations

        await run_mutations(node, made, ready)
    await _sweep(node)
    return made.container.id


async def attached(node: Node, wanted: Wanted) -> int:
    """Start, connect the streams, wait, and remove it where that is asked for; the exit status."""
    async with _Signals(node) as signals:
        try:
            return await _attached(node, wanted, signals)
        except asyncio.CancelledError:
            if not signals.caught:
                raise
            return 128 + signals.caught[0]


async def _attached(node: Node, wanted: Wanted, signals: _Signals) -> int:
    streams: list[Streams] = []

    def connect(home: str) -> Streams:
        made = Streams(
            home, stdout=write_out, stderr=write_err, stdin=wanted.interactive, terminal=wanted.options.terminal, keep=True
        )
        streams.append(made)
        return made

    def choose(ready: Ready) -> Options:
        # With commands of the plan's own to run first, or where it is asked for, the command is added to a waiting process.
        beside = wanted.init or bool(ready.runs)
        return replace(wanted.options, waits=True, terminal=False) if beside else wanted.options

    def where(ready: Ready) -> Callable[[str], Streams] | None:
        return None if wanted.init or ready.runs else connect

    with _terminal(wanted.options.terminal) as size:
        ready, made = await lifecycle.begin(
            node, wanted.target, choose, name=wanted.name, remove_at_end=wanted.remove, streams=where, made=signals.aim
        )
        if not streams:
            return await _beside(node, wanted, ready, made)
        container = made.container.id
        ended = False
        try:
            async with _helpers() as helpers:
                if wanted.interactive:
                    helpers.append(asyncio.ensure_future(_feed(node, container, "", streams[-1])))
                if size is not None:
                    helpers.append(asyncio.ensure_future(_follow_size(node, container, "", size)))
                helpers.append(asyncio.ensure_future(_sweep(node)))
                status = (await lifecycle.wait(node, container)).status
                ended = True
                await streams[-1].drain()
        finally:
            streams[-1].close()
            if wanted.remove:
                await asyncio.shield(lifecycle.remove(node, container, ended=ended))
    for reader in streams[-1].readers:
        if reader.error is not None:
            raise reader.error
    return status


async def _sweep(node: Node) -> None:
    with contextlib.suppress(WeenvError):
        await lifecycle.sweep(node)


async def _beside(node: Node, wanted: Wanted, ready: Ready, made: lifecycle.Started) -> int:
    """The command beside a waiting first process, after the plan's own commands."""
    from weenv.environment.exec import run_mutations

    try:
        args = tuple(command(ready.config.get("config") or {}, wanted.options))
        if not args:
            raise WeenvError("the image has no command of its own", hint="say what to run: -- COMMAND")
        await run_mutations(node, made, ready)
        return await added(node, made.container.id, args, interactive=wanted.interactive, terminal=wanted.options.terminal)
    finally:
        if wanted.remove:
            await asyncio.shield(lifecycle.remove(node, made.container.id))
        else:
            await lifecycle.stop(node, made.container.id, grace=0)


async def executed(node: Node, *arguments: Any, **options: Any) -> int:
    """:func:`added` with signals, which end the command and all it started."""
    async with _Signals(node) as signals:
        try:
            return await added(node, *arguments, **options)
        except asyncio.CancelledError:
            if not signals.caught:
                raise
            return 128 + signals.caught[0]


async def added(
    node: Node,
    environment: str,
    args: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str = "",
    user: str = "",
    timeout: float | None = None,  # noqa: ASYNC109
    interactive: bool = False,
    terminal: bool = False,
) -> int:
    """Run a command in a running environment with this process's streams; the exit status."""
    from weenv.environment.exec import Command, execute

    container = await lifecycle.find(node, environment)
    pid = await lifecycle.running(node, container)
    who = None
    if user:
        from weenv.environment.rootfs import open_process_root, read_account_files
        from weenv.environment.users import resolve_user

        root = open_process_root(pid)
        try:
            who = resolve_user(user, *read_account_files(root))
        finally:
            os.close(root)
    run = Command(tuple(args), dict(env or {}), cwd, who, timeout, terminal=terminal)
    loop = asyncio.get_running_loop()
    began: asyncio.Future[str] = loop.create_future()
    with _terminal(terminal) as size:

        async def sized() -> None:
            assert size is not None
            await _follow_size(node, container.id, await began, size)

        async with _helpers() as helpers:
            if size is not None:
                helpers.append(asyncio.ensure_future(sized()))
            result = await execute(
                node, container, pid, run,
                feed=_copy_input if interactive else None, stdout=write_out, stderr=write_err, started=began.set_result,
            )  # fmt: skip
    if result.stderr:
        write_err(result.stderr)
    return TIMED_OUT if result.timed_out else result.exit_code


@contextlib.asynccontextmanager
async def _helpers() -> AsyncIterator[list[asyncio.Future[None]]]:
    """Tasks that end with the block."""
    tasks: list[asyncio.Future[None]] = []
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Signals:
    """SIGINT, SIGTERM and SIGHUP for the length of a block.

    Before there is an environment the block is cancelled; then they go to it, and the second one, or GRACE seconds, kill it.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.container = ""
        self.caught: list[int] = []
        self._sent: list[asyncio.Task[None]] = []
        self._block: asyncio.Task[object] | None = None

    async def __aenter__(self) -> _Signals:
        self._block = asyncio.current_task()
        for number in _ENDING:
            asyncio.get_running_loop().add_signal_handler(number, self._come, number)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for number in _ENDING:
            asyncio.get_running_loop().remove_signal_handler(number)
        for task in self._sent:
            task.cancel()
        await asyncio.gather(*self._sent, return_exceptions=True)

    def aim(self, container: str) -> None:
        """From now on they go there."""
        self.container = container

    def _come(self, number: int) -> None:
        self.caught.append(number)
        if self.container:
            self._sent.append(asyncio.get_running_loop().create_task(self._end(number, len(self._sent))))
        elif self._block is not None:
            self._block.cancel()

    async def _end(self, number: int, before: int) -> None:
        with contextlib.suppress(ContainerdError):
            if not before:
                await self.node.tasks.kill(self.container, number)
                await asyncio.sleep(GRACE)
            await self.node.tasks.kill(self.container, signal.SIGKILL, everyone=True)


async def _copy_input(write: Callable[[bytes], Awaitable[None]]) -> None:
    """This process's standard input, until its end. A thread reads: it may be a file, which cannot be waited for."""
    import threading

    loop = asyncio.get_running_loop()
    room = asyncio.Semaphore(4)
    parts: asyncio.Queue[bytes] = asyncio.Queue()

    def read() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            while True:
                asyncio.run_coroutine_threadsafe(room.acquire(), loop).result()
                try:
                    data = os.read(0, CHUNK)
                except OSError:
                    data = b""
                loop.call_soon_threadsafe(parts.put_nowait, data)
                if not data:
                    return

    threading.Thread(target=read, name="weenv-stdin", daemon=True).start()
    while data := await parts.get():
        await write(data)
        room.release()


async def _feed(node: Node, container: str, process: str, streams: Streams) -> None:
    assert streams.writer is not None
    await _copy_input(streams.writer.write)
    streams.writer.close()
    with contextlib.suppress(ContainerdError):
        await node.tasks.close_stdin(container, process)


@contextlib.contextmanager
def _terminal(wanted: bool) -> Iterator[asyncio.Event | None]:
    """Our own terminal in raw mode for the block; an event that is set whenever its size changes."""
    if not wanted:
        yield None
        return
    if not sys.stdin.isatty():
        raise WeenvError("this is not a terminal", hint="leave -t out")
    import termios
    import tty

    changed = asyncio.Event()
    changed.set()
    before = termios.tcgetattr(0)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    try:
        tty.setraw(0)
        yield changed
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        termios.tcsetattr(0, termios.TCSADRAIN, before)


async def _follow_size(node: Node, container: str, process: str, changed: asyncio.Event) -> None:
    while True:
        await changed.wait()
        changed.clear()
        width, height = os.get_terminal_size(0)
        with contextlib.suppress(ContainerdError):
            await node.tasks.resize(container, width, height, process=process)
