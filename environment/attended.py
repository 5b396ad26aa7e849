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
from weenv.environment.requested import GRACE, PATIENCE, TIMED_OUT, UNREAD, last_words, told, unread
from weenv.environment.spec import Options, command
from weenv.environment.stdio import CHUNK, Streams, Written
from weenv.plugin.containerd.client import ContainerdError
from weenv.plugin.containerd.runtime import Exit

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals to this process that are to end what it runs."""
PASSED = (signal.SIGUSR1, signal.SIGUSR2)
"""Those that are only handed on."""

BROKEN_PIPE = 128 + signal.SIGPIPE
"""Exit status where nobody reads our output any more, as of whoever writes there himself."""


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
    timeout: float | None = None
    """Seconds for which the command may run."""


class _Last(Written):
    """A sink that remembers the end of what it was given."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self.last = b""

    def __call__(self, data: bytes) -> asyncio.Future[None] | None:
        self.last = last_words(self.last, data)
        return super().__call__(data)


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
        waits = wanted.idle or not command(ready.config.get("config") or {}, wanted.options)
        return replace(wanted.options, waits=waits, held=bool(ready.runs))

    async with _Signals(node):
        ready, made = await lifecycle.begin(node, wanted.target, choose, name=wanted.name)
        if ready.runs:
            from weenv.environment.exec import run_mutations

            await run_mutations(node, made, ready)
        await lifecycle.hand_over(node, made, remove_at_end=wanted.remove)
    await lifecycle.tidy(node)
    return made.container.id


async def attached(node: Node, wanted: Wanted) -> int:
    """Start, connect the streams, wait, and remove it where that is asked for; the exit status."""
    async with _Signals(node) as signals:
        status = await _attached(node, wanted, signals)
    if not signals.caught and not signals.swept:
        await lifecycle.tidy(node)
    return status


async def _attached(node: Node, wanted: Wanted, signals: _Signals) -> int:
    streams: list[Streams] = []
    said = _Last(2)

    def connect(home: str) -> Streams:
        made = Streams(
            home, stdout=Written(1), stderr=said, stdin=wanted.interactive, terminal=wanted.options.terminal, keep=True
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
            node, wanted.target, choose, name=wanted.name, streams=where, starting=lambda: signals.hold() if streams else None
        )
        if not streams:
            return await _beside(node, wanted, ready, made, signals)
        container = made.container.id
        signals.aim(container)
        ended = False
        try:
            if not wanted.remove:
                await lifecycle.hand_over(node, made, remove_at_end=False)
            async with _helpers() as helpers:
                if wanted.interactive:
                    helpers.append(asyncio.ensure_future(_feed(node, container, "", streams[-1])))
                if size is not None:
                    helpers.append(asyncio.ensure_future(_follow_size(node, container, "", size)))
                sweep = asyncio.ensure_future(lifecycle.tidy(node))
                helpers.append(sweep)
                status, timed_out = await _until(node, container, streams[-1], wanted.timeout)
                if status is not None:
                    ended = True
                    signals.enough()
                    await streams[-1].drain(patient=lambda: not signals.caught)
                signals.swept = sweep.done()
        finally:
            try:
                if wanted.remove:
                    await lifecycle.to_the_end(lifecycle.remove(node, container, ended=ended))
                elif not ended:
                    await lifecycle.to_the_end(lifecycle.stop(node, container, grace=0))
            finally:
                streams[-1].close()  # not before: what nobody takes holds up the task's removal
    try:
        streams[-1].raise_error()
    except BrokenPipeError:
        return BROKEN_PIPE
    assert status is not None
    if unread(status.status, said.last) and node.say is not None:
        node.say(UNREAD)
    return TIMED_OUT if timed_out else status.status


async def _until(node: Node, container: str, streams: Streams, seconds: float | None) -> tuple[Exit | None, bool]:
    """How it ended (None where the streams failed), and whether its time was up and it was killed."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await streams.unless_failed(lifecycle.wait(node, container)), False
    except TimeoutError:
        if not limit.expired():
            raise
    with contextlib.suppress(ContainerdError):  # it has ended meanwhile
        await lifecycle.patiently(lambda: node.tasks.kill(container, signal.SIGKILL, everyone=True))
    return await streams.unless_failed(lifecycle.wait(node, container)), True


async def _beside(node: Node, wanted: Wanted, ready: Ready, made: lifecycle.Started, signals: _Signals) -> int:
    """The command beside a waiting first process, after the plan's own commands."""
    from weenv.environment.exec import run_mutations

    try:
        args = tuple(command(ready.config.get("config") or {}, wanted.options))
        if not args:
            raise WeenvError("the image has no command of its own", hint="say what to run: -- COMMAND")
        await run_mutations(node, made, ready)
        if not wanted.remove:
            await lifecycle.hand_over(node, made, remove_at_end=False)
        return await added(
            node, made.container.id, args, interactive=wanted.interactive, terminal=wanted.options.terminal,
            timeout=wanted.timeout,
            starting=signals.hold, started=lambda name: signals.aim(made.container.id, name),
        )  # fmt: skip
    finally:
        if wanted.remove:
            await lifecycle.to_the_end(lifecycle.remove(node, made.container.id))
        else:
            await lifecycle.to_the_end(lifecycle.stop(node, made.container.id, grace=0))


async def executed(node: Node, *arguments: Any, **options: Any) -> int:
    """:func:`added` with signals, which end the command and all it started."""
    async with _Signals(node):
        return await added(node, *arguments, **options)


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
    started: Callable[[str], object] = lambda _: None,
    starting: Callable[[], object] = lambda: None,
) -> int:
    """Run a command in a running environment with this process's streams; the exit status. The calls are execute's."""
    from weenv.environment.exec import Command, execute

    container = await lifecycle.find(node, environment)
    pid = await lifecycle.running(node, container)
    who = None
    if user:
        from weenv.environment.rootfs import process_root, read_account_files
        from weenv.environment.users import resolve_user

        with process_root(pid) as root:
            who = resolve_user(user, *read_account_files(root))
    run = Command(tuple(args), dict(env or {}), cwd, who, timeout, terminal=terminal)
    loop = asyncio.get_running_loop()
    began: asyncio.Future[str] = loop.create_future()

    def running(name: str) -> None:
        began.set_result(name)
        started(name)

    with _terminal(terminal) as size:

        async def sized() -> None:
            assert size is not None
            await _follow_size(node, container.id, await began, size)

        async with _helpers() as helpers:
            if size is not None:
                helpers.append(asyncio.ensure_future(sized()))
            try:
                result = await execute(
                    node, container, pid, run,
                    feed=_copy_input if interactive else None, stdout=Written(1), stderr=Written(2), started=running,
                    starting=starting,
                )  # fmt: skip
            except BrokenPipeError:
                return BROKEN_PIPE
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
    """The signals of ENDING and PASSED for the length of a block; those ignored already, as under nohup(1), stay so.

    Until :meth:`hold` the first of ENDING cancels the block, which cleans up and is left with SystemExit(128 + n). From
    :meth:`aim` on they, and those come between, go to the environment, and the second of ENDING, or GRACE seconds, kill it.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.caught: list[int] = []
        self.swept = False
        """What killed programs left has been looked after meanwhile."""
        self._target: tuple[str, str] | None = None
        self._held: list[int] | None = None
        self._cancelled = False
        self._sent: list[asyncio.Task[None]] = []
        self._block: asyncio.Task[object] | None = None
        self._handled: list[int] = []

    async def __aenter__(self) -> _Signals:
        self._block = asyncio.current_task()
        for number in (*ENDING, *PASSED):
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._come, number)
                self._handled.append(number)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        for number in self._handled:
            asyncio.get_running_loop().remove_signal_handler(number)
        for task in self._sent:
            task.cancel()
        await asyncio.gather(*self._sent, return_exceptions=True)
        if kind is asyncio.CancelledError and self.caught:
            raise SystemExit(128 + self.caught[0])

    def aim(self, container: str, process: str = "") -> None:
        """From now on they go there: to the first process, or to the command of an added one."""
        self._target = container, process
        held, self._held = self._held or [], None
        for number in held:
            self._come(number)

    def hold(self) -> None:
        """A program may run from now on, but cannot be signalled yet."""
        self._held = []

    def enough(self) -> None:
        """What was run has ended: one more signal cancels the block, should it still wait for a reader."""
        self._target = None

    def _come(self, number: int) -> None:
        if self._held is not None:
            self._held.append(number)
            return
        if number in PASSED:
            if self._target is not None:
                self._sent.append(asyncio.get_running_loop().create_task(self._send(*self._target, number)))
            return
        self.caught.append(number)
        if self._target is not None:
            self._sent.append(asyncio.get_running_loop().create_task(self._end(*self._target, number, len(self.caught))))
        elif self._block is not None and not self._cancelled:
            self._cancelled = True  # a second one would cancel the cleaning up
            self._block.cancel()

    async def _end(self, container: str, process: str, number: int, count: int) -> None:
        if count == 1:
            await self._send(container, process, number)
            await asyncio.sleep(PATIENCE)
            if self._target is not None and self.node.say is not None:
                self.node.say(told(number))
            await asyncio.sleep(GRACE - PATIENCE)
        with contextlib.suppress(ContainerdError):  # it has ended; what has not is waited for
            await lifecycle.patiently(lambda: self.node.tasks.kill(container, signal.SIGKILL, everyone=True))

    async def _send(self, container: str, process: str, number: int) -> None:
        with contextlib.suppress(ContainerdError, OSError):  # it has ended, or cannot be told: it is killed in the end
            if not process:
                await lifecycle.patiently(lambda: self.node.tasks.kill(container, number))
                return
            from weenv.environment.processes import send_to_command

            reaper = (await lifecycle.patiently(lambda: self.node.tasks.get(container, process))).pid
            await self.node.in_thread(send_to_command, reaper, number)


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
    await streams.writer.end()
    with contextlib.suppress(ContainerdError):  # it has ended
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
        tty.setraw(0, termios.TCSANOW)  # what has been typed already is for the environment
        yield changed
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        termios.tcsetattr(0, termios.TCSANOW, before)


async def _follow_size(node: Node, container: str, process: str, changed: asyncio.Event) -> None:
    while True:
        await changed.wait()
        changed.clear()
        width, height = os.get_terminal_size(0)
        with contextlib.suppress(ContainerdError):  # it has ended, or has no terminal
            await node.tasks.resize(container, width, height, process=process)
