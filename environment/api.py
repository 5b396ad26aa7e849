"""Environments in Python, synchronous and asynchronous.

::

    import weenv

    with weenv.Environment.start("task.yaml") as env:
        env.write_file("/testbed/fix.py", b"...")
        result = env.exec(["pytest", "-q"], cwd="/testbed", timeout=600)
        print(result.exit_code, result.timed_out, result.text)

    async with await weenv.AsyncEnvironment.start(plan) as env:
        await env.exec(["true"])

What is started is a process that only waits, in any image; commands run beside it. The environment is removed when the
block ends; should this process be killed, by the next that starts one here, or the next ``weenv run``, ``ps`` or ``rm`` on the
machine.
:class:`Environment` may be used from any number of threads; each call blocks its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from types import TracebackType
from typing import IO, Any, TypeVar

from weenv.core.errors import ForkedError
from weenv.environment import archives, arguments, lifecycle
from weenv.environment.exec import LIMIT, Command, ExecResult, execute, feed_bytes, run_mutations
from weenv.environment.model import Plan
from weenv.environment.node import Node, NodeConfig, load
from weenv.environment.notlazy import LABEL as NOT_LAZY
from weenv.environment.notlazy import NotLazyGroup, from_label
from weenv.environment.rootfs import process_root, read_account_files, read_file, write_file
from weenv.environment.spec import Options
from weenv.environment.users import User, resolve_user
from weenv.plugin.containerd.runtime import Container, Status

T = TypeVar("T")


def _settings(config: NodeConfig | str | os.PathLike[str] | None) -> NodeConfig:
    """The node's configuration, from the file that is named or from the machine's. Raises ConfigError."""
    if isinstance(config, NodeConfig):
        return config
    return load() if config is None else load(arguments.path("config", config))


def _check_process(made_by: int, what: str) -> None:
    """Raise ForkedError where another process has made it."""
    if made_by != os.getpid():
        raise ForkedError(
            f"{what} was started by process {made_by}, from which this one was forked",
            hint="attach to it by name in a process that was spawned",
        )


class AsyncEnvironment:
    """A running environment. Make one by :meth:`start` or :meth:`attach`; use as ``async with``."""

    def __init__(self, node: Node, container: Container, pid: int, *, keep: bool) -> None:
        self._node = node
        self._container = container
        self._keep = keep
        self._closed = False
        self._home = os.getpid(), asyncio.get_running_loop()
        self.pid = pid
        """Process id of the first process, as this machine numbers it."""

    @classmethod
    async def start(
        cls,
        plan: Plan | str | os.PathLike[str],
        *,
        command: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        binds: Sequence[str] = (),
        cpus: float = 0.0,
        memory: int | str = 0,
        pids: int = 0,
        network: str | None = None,
        name: str = "",
        keep: bool = False,
        config: NodeConfig | str | os.PathLike[str] | None = None,
    ) -> AsyncEnvironment:
        """Start a plan (or the path of one, or an image).

        ``command`` replaces the process that waits; ``binds`` are ``SOURCE:TARGET[:ro]``; ``memory`` is in bytes, or a text
        such as ``512m``; ``cpus`` in cores, 0 for what the plan says. ``keep``: it outlives the block and this process.
        ``config``: the path of a configuration file, or what :func:`weenv.load_config` gives; by default the machine's.
        Raises WeenvError.
        """
        settings = _settings(config)
        target = plan if isinstance(plan, Plan) else arguments.path("plan", plan)
        if isinstance(target, str) and isinstance(plan, os.PathLike):  # a path is a file; a text may be an image's name
            target = os.path.abspath(target)
        name = arguments.text("name", name)
        args = arguments.words("command", () if command is None else command)
        options = Options(
            args=args,
            env=arguments.variables("env", env),
            cwd=arguments.text("cwd", cwd),
            user=arguments.text("user", user),
            binds=arguments.binds("binds", binds),
            limits=arguments.limits(cpus, memory, pids),
            network=arguments.network("network", network) or settings.run.network,
            waits=not args,
        )
        node = Node(settings)
        try:
            ready, made = await lifecycle.begin(node, target, lambda ready: replace(options, held=bool(ready.runs)), name=name)
            await run_mutations(node, made, ready)
            if keep:
                await lifecycle.hand_over(node, made, remove_at_end=False)
            lifecycle.tidy_beside(node)
        except BaseException:
            await node.close()
            raise
        return cls(node, made.container, made.pid, keep=keep)

    @classmethod
    async def attach(cls, name: str, *, config: NodeConfig | str | os.PathLike[str] | None = None) -> AsyncEnvironment:
        """A handle of an environment that runs already; closing it leaves it running. Raises NoSuchEnvironment."""
        node = Node(_settings(config))
        try:
            container = await lifecycle.find(node, arguments.text("name", name))
            process = await node.tasks.get(container.id)
            if process.status is not Status.RUNNING:
                raise lifecycle.NoSuchEnvironment(f"{container.id} does not run", hint="weenv ps --all shows how it ended")
        except BaseException:
            await node.close()
            raise
        return cls(node, container, process.pid, keep=True)

    @property
    def id(self) -> str:
        """Its name, for ``weenv exec`` and the others."""
        return self._container.id

    @property
    def not_lazy(self) -> list[NotLazyGroup]:
        """The groups that are not in the lazy format, and what this node made of them; empty where all are lazy."""
        return from_label(self._container.labels.get(NOT_LAZY, ""))

    async def __aenter__(self) -> AsyncEnvironment:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _usable(self) -> None:
        """Raises ForkedError, NoSuchEnvironment, ArgumentError where it cannot be used from here, or any more."""
        process, loop = self._home
        _check_process(process, self.id)
        if self._closed:
            raise lifecycle.NoSuchEnvironment(f"{self.id} is closed")
        if loop is not asyncio.get_running_loop():
            raise arguments.ArgumentError(
                f"{self.id} belongs to another event loop", hint="use weenv.Environment, or attach to it by name in this loop"
            )

    async def close(self) -> None:
        """Remove it (unless it is kept) and close the connection. Calling it again does nothing.

        Nor does it in a forked child, whose parent has it. Raises ArgumentError in another event loop.
        """
        if self._closed or self._home[0] != os.getpid():
            return
        self._usable()
        self._closed = True
        try:
            if not self._keep:
                await lifecycle.to_the_end(lifecycle.remove(self._node, self.id))
        finally:
            await lifecycle.to_the_end(self._node.close())

    async def exec(
        self,
        args: Sequence[str],
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - kills the process tree, which asyncio.timeout would do as well
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        input: bytes | str | None = None,  # noqa: A002 - as subprocess.run has it
        limit: int = LIMIT,
    ) -> ExecResult:
        """Run a command and wait for it.

        After ``timeout`` seconds everything that it started is killed, and ``timed_out`` says so; the same happens where
        the caller is cancelled. ``input`` that is a text is UTF-8. ``limit`` bounds what is kept of each stream (bytes).
        Raises WeenvError.
        """
        self._usable()
        command = Command(
            arguments.arguments("args", args),
            arguments.variables("env", env),
            arguments.text("cwd", cwd),
            timeout=None if timeout is None else arguments.number("timeout", timeout),
            limit=arguments.whole("limit", limit),
        )
        feed = feed_bytes(arguments.data("input", input)) if input is not None else None
        if name := arguments.text("user", user):
            command = replace(command, user=await asyncio.to_thread(self._user, name))
        return await execute(self._node, self._container, self.pid, command, feed=feed)

    def _user(self, text: str) -> User:
        with process_root(self.pid) as root:
            return resolve_user(text, *read_account_files(root))

    async def read_file(self, path: str, *, limit: int = LIMIT) -> bytes:
        """The bytes of a regular file, at most ``limit``. Raises FileError, LimitError."""
        self._usable()
        path, limit = arguments.path("path", path), arguments.whole("limit", limit)

        def read() -> bytes:
            with process_root(self.pid) as root:
                return read_file(root, path, limit=limit)

        return await self._node.in_thread(read)

    async def write_file(
        self, path: str, data: bytes | str, *, mode: int | None = None, owner: tuple[int, int] | None = None
    ) -> None:
        """Write a file and the directories above it. A new one belongs to ``owner``, by default the environment's user.

        ``data`` that is a text is UTF-8. Symbolic links are followed as within the environment, never out of it. Raises
        FileError.
        """
        self._usable()
        path, content, mode = arguments.path("path", path), arguments.data("data", data), arguments.mode("mode", mode)
        whose = arguments.owner("owner", owner) or self._ids()

        def write() -> None:
            with process_root(self.pid) as root:
                write_file(root, path, content, mode=mode, owner=whose)

        await self._node.in_thread(write)

    async def put_archive(self, path: str, data: bytes | IO[bytes], *, owner: tuple[int, int] | None = None) -> None:
        """Unpack an uncompressed tar archive, its bytes or a binary file, below a directory, which is made if need be.

        Files belong to whom the archive says, by number, or all to ``owner``; one that is there is replaced. Links are followed
        as within the environment, never out of it; ``..``, devices and pipes in the archive are refused. Raises FileError,
        FormatError, and what the file raises.
        """
        self._usable()
        path, source = arguments.path("path", path), arguments.archive("data", data)
        whose = arguments.owner("owner", owner)

        def write() -> None:
            with process_root(self.pid) as root:
                archives.unpack(root, path, source, owner=whose, parents=self._ids())

        await self._node.in_thread(write)

    async def get_archive(self, path: str, *, limit: int = LIMIT) -> bytes:
        """A file or a directory with all below it as a tar archive, whose names begin with the last part of ``path``.

        Pipes, sockets, devices and the kernel's own files are left out. Raises FileError, LimitError beyond ``limit`` bytes.
        """
        self._usable()
        path, limit = arguments.path("path", path), arguments.whole("limit", limit)

        def read() -> bytes:
            with process_root(self.pid) as root:
                return archives.pack(root, path, limit=limit)

        return await self._node.in_thread(read)

    def _ids(self) -> tuple[int, int]:
        """The environment's user and group."""
        user = lifecycle.base_process(self._container).get("user")
        ids = user if isinstance(user, dict) else {}
        return int(ids.get("uid", 0)), int(ids.get("gid", 0))

    async def stop(self, *, grace: float = 10.0) -> int:
        """End the first process by SIGTERM, after ``grace`` seconds by SIGKILL; its exit status."""
        self._usable()
        ended = await lifecycle.stop(self._node, self.id, grace=arguments.number("grace", grace, 0), number=signal.SIGTERM)
        return ended.status if ended is not None else 0

    async def wait(self) -> int:
        """Wait until the first process ends; its exit status."""
        self._usable()
        return (await lifecycle.wait(self._node, self.id)).status


class _Portal:
    """One event loop in a thread, for all synchronous environments of the process."""

    _lock = threading.Lock()
    _shared: _Portal | None = None

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="weenv", daemon=True).start()

    @classmethod
    def shared(cls) -> _Portal:
        """The process's own; a forked child gets another."""
        with cls._lock:
            if cls._shared is None or cls._shared.pid != os.getpid():
                cls._shared = cls()
            return cls._shared

    def run(self, work: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, None]] | None = None) -> T:
        """Run it there and wait. A KeyboardInterrupt here cancels it there and waits for what that cleans up; where it
        came too late for that, ``undo`` gets the result."""
        result: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []
        try:
            _check_process(self.pid, "this environment")
        except ForkedError:
            work.close()
            raise

        def begin() -> None:
            tasks.append(self.loop.create_task(work))
            tasks[0].add_done_callback(end)

        def end(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                result.set_exception(CancelledError())
            elif (error := task.exception()) is not None:
                result.set_exception(error)
            else:
                result.set_result(task.result())

        self.loop.call_soon_threadsafe(begin)
        try:
            return result.result()
        except BaseException:
            if not result.done():
                self.loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            if result.exception() is None and undo is not None:
                self.run(undo(result.result()))
            raise


def _unlock() -> None:
    """In a forked child: the thread that held it does not exist."""
    _Portal._lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


class Environment:
    """:class:`AsyncEnvironment` for callers without an event loop; the same methods, each waiting for its result."""

    def __init__(self, inner: AsyncEnvironment, portal: _Portal) -> None:
        self._inner = inner
        self._portal = portal

    @classmethod
    def start(cls, plan: Plan | str | os.PathLike[str], **options: Any) -> Environment:
        """Start a plan; the options are those of :meth:`AsyncEnvironment.start`."""
        portal = _Portal.shared()
        return cls(portal.run(AsyncEnvironment.start(plan, **options), AsyncEnvironment.close), portal)

    @classmethod
    def attach(cls, name: str, *, config: NodeConfig | str | os.PathLike[str] | None = None) -> Environment:
        """See :meth:`AsyncEnvironment.attach`."""
        portal = _Portal.shared()
        return cls(portal.run(AsyncEnvironment.attach(name, config=config)), portal)

    @property
    def id(self) -> str:
        """Its name, for ``weenv exec`` and the others."""
        return self._inner.id

    @property
    def pid(self) -> int:
        """Process id of the first process, as this machine numbers it."""
        return self._inner.pid

    @property
    def not_lazy(self) -> list[NotLazyGroup]:
        """See :attr:`AsyncEnvironment.not_lazy`."""
        return self._inner.not_lazy

    def __enter__(self) -> Environment:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """See :meth:`AsyncEnvironment.close`."""
        if self._portal.pid == os.getpid():
            self._portal.run(self._inner.close())

    def exec(
        self,
        args: Sequence[str],
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        input: bytes | str | None = None,  # noqa: A002 - as subprocess.run has it
        limit: int = LIMIT,
    ) -> ExecResult:
        """See :meth:`AsyncEnvironment.exec`."""
        return self._portal.run(self._inner.exec(args, timeout=timeout, env=env, cwd=cwd, user=user, input=input, limit=limit))

    def read_file(self, path: str, *, limit: int = LIMIT) -> bytes:
        """See :meth:`AsyncEnvironment.read_file`."""
        return self._portal.run(self._inner.read_file(path, limit=limit))

    def write_file(
        self, path: str, data: bytes | str, *, mode: int | None = None, owner: tuple[int, int] | None = None
    ) -> None:
        """See :meth:`AsyncEnvironment.write_file`."""
        self._portal.run(self._inner.write_file(path, data, mode=mode, owner=owner))

    def put_archive(self, path: str, data: bytes | IO[bytes], *, owner: tuple[int, int] | None = None) -> None:
        """See :meth:`AsyncEnvironment.put_archive`."""
        self._portal.run(self._inner.put_archive(path, data, owner=owner))

    def get_archive(self, path: str, *, limit: int = LIMIT) -> bytes:
        """See :meth:`AsyncEnvironment.get_archive`."""
        return self._portal.run(self._inner.get_archive(path, limit=limit))

    def stop(self, *, grace: float = 10.0) -> int:
        """See :meth:`AsyncEnvironment.stop`."""
        return self._portal.run(self._inner.stop(grace=grace))

    def wait(self) -> int:
        """See :meth:`AsyncEnvironment.wait`."""
        return self._portal.run(self._inner.wait())
