"""One connection between the NRI plugin and a runtime: calls are answered in time, whatever the handler does.

States: registering -> configured -> synchronized -> over. A call is served by a task of its own, since Configure may come
before the reply to our registration; the runtime itself asks one thing at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from weenv.core.errors import ConfigError, FormatError, LimitError, WeenvError
from weenv.plugin.nri.creation import MIN_MEMORY, recorded
from weenv.plugin.nri.model import Quota
from weenv.plugin.nri.nrihandler import Answer, CreationRefused, Seen
from weenv.plugin.nri.wire import messages
from weenv.plugin.nri.wire.messages import PLUGIN_SERVICE, RUNTIME_SERVICE, Container, Limits, Pod, Update, container_of, pod_of
from weenv.plugin.nri.wire.session import MAX_STREAMS, Call, Reply, Session
from weenv.plugin.nri.wire.ttrpc import Code
from weenv.plugin.nri.wire.versions import Runtime

if TYPE_CHECKING:
    from weenv.plugin.nri.nriplugin import NriPlugin

T = TypeVar("T")

log = logging.getLogger(__name__)

REGISTRATION = 10.0
"""Seconds from connecting to Configure; the runtime itself gives up after 5."""
_MAX_OBJECTS = 200_000
"""Pods and containers of one synchronization."""
_READ = 1 << 18
_DRAIN = 10.0
"""Seconds for a runtime that does not read what we answer."""


class _Question:
    """A question that the handler is asked; tasks that it starts may outlive it."""

    def __init__(self) -> None:
        self.open = True


_asked: contextvars.ContextVar[_Question | None] = contextvars.ContextVar("weenv_nri_question", default=None)
"""What the handler is being asked: while that is open, a request to the runtime from there would wait for itself."""

_SILENT = frozenset(
    {
        "Shutdown", "RunPodSandbox", "StopPodSandbox", "RemovePodSandbox", "UpdatePodSandbox", "PostUpdatePodSandbox",
        "PostCreateContainer", "StartContainer", "PostUpdateContainer", "ValidateContainerAdjustment",
    }
)  # fmt: skip
"""Calls that need no more than an empty answer; they come only from runtimes that ignore the subscription."""


class Lost(WeenvError):
    """The connection is over."""


class RuntimeRefused(WeenvError):
    """The runtime answered a request with an error."""


class Connection:
    """Serves one connection until it ends. ``launched``: the runtime has started this process."""

    def __init__(
        self, plugin: NriPlugin, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, launched: bool
    ) -> None:
        self._plugin = plugin
        self._reader = reader
        self._writer = writer
        self._launched = launched
        self._session = Session()
        self._requests: dict[int, asyncio.Future[bytes]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._late: set[asyncio.Task[Any]] = set()
        self._asked: dict[asyncio.Task[Any], str] = {}
        self._pods: list[Pod] = []
        self._containers: list[Container] = []
        self._configured = asyncio.Event()
        self._reason = ""
        self._answers: dict[str, Callable[[Call], Awaitable[bytes]]] = {
            "Configure": self._configure,
            "Synchronize": self._synchronize,
            "CreateContainer": self._create,
            "UpdateContainer": self._update,
            "StopContainer": self._stop,
            "StateChange": self._state,
            "PostStartContainer": self._started,
            "RemoveContainer": self._removed,
        }

    # -- the stream ---------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Until the connection ends; why it did."""
        self._spawn(self._register(), "registration")
        try:
            while data := await self._reader.read(_READ):
                for event in self._session.feed(data):
                    if isinstance(event, Call):
                        self._spawn(self._serve(event), event.method)
                    else:
                        self._deliver(event)
                self._flush()
                while len(self._tasks) > 2 * MAX_STREAMS:
                    await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            self._over("the runtime closed the connection" + self._while_asked())
        except FormatError as error:
            self._over(f"the runtime sent what cannot be read: {error}")
        except OSError as error:
            self._over(f"the connection to the runtime broke: {error.strerror or error}")
        finally:
            await self._close()
        return self._reason

    def _while_asked(self) -> str:
        waiting = sorted(set(self._asked.values()))
        return f" while {', '.join(waiting)} was being answered" if waiting else ""

    def _over(self, reason: str) -> None:
        """The first reason is the one that counts."""
        self._reason = self._reason or reason
        self._writer.transport.abort()

    async def _close(self) -> None:
        self._writer.transport.abort()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for future in self._requests.values():
            if not future.done():
                future.set_exception(Lost(self._reason or "stopped"))
                future.exception()  # nobody may be waiting for it any more
        if tasks:
            await asyncio.wait(tasks, timeout=_DRAIN)
        with contextlib.suppress(OSError):  # how it ended is in the reason
            await self._writer.wait_closed()

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=f"nri {name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._asked.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("NRI: %s failed: %s", task.get_name(), error, exc_info=error)
            self._over(f"{task.get_name()} failed")

    def _flush(self) -> None:
        if data := self._session.take():
            self._writer.write(data)

    async def _drain(self) -> None:
        self._flush()
        try:
            async with asyncio.timeout(_DRAIN):
                await self._writer.drain()
        except TimeoutError:
            self._over(f"the runtime has not read our answers for {_DRAIN:g} s")
        except OSError:
            pass  # the reader sees it, too

    # -- what we ask ----------------------------------------------------------------------------------------------------

    async def request(self, method: str, payload: bytes, patience: float) -> bytes:
        """Call the runtime. Raises Lost, RuntimeRefused (also after ``patience`` seconds)."""
        question = _asked.get()
        if question is not None and question.open:
            raise RuntimeRefused(f"{method} from within a handler, for whose answer the runtime waits")
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        try:
            stream = self._session.request(RUNTIME_SERVICE, method, payload, patience)
        except FormatError as error:
            raise RuntimeRefused(str(error)) from error
        self._requests[stream] = future
        try:
            await self._drain()
            async with asyncio.timeout(patience):
                return await future
        except TimeoutError:
            raise RuntimeRefused(f"{method} was not answered within {patience:g} s") from None
        finally:
            self._requests.pop(stream, None)
            self._session.forget(stream)

    def _deliver(self, reply: Reply) -> None:
        future = self._requests.get(reply.stream)
        if future is None or future.done():
            return
        if reply.code:
            future.set_exception(RuntimeRefused(f"{' '.join(reply.message.split())[:300]} (code {reply.code})"))
        else:
            future.set_result(reply.payload)

    async def _register(self) -> None:
        config = self._plugin.config
        try:
            async with asyncio.timeout(REGISTRATION):
                await self.request("RegisterPlugin", messages.register(config.name, config.index), REGISTRATION)
                await self._configured.wait()
        except RuntimeRefused as error:
            self._over(f"the runtime refused to register us: {error}")
        except TimeoutError:
            self._over(f"the runtime did not configure us within {REGISTRATION:g} s")
        except Lost:
            pass  # told already

    # -- what we are asked ----------------------------------------------------------------------------------------------

    async def _serve(self, call: Call) -> None:
        answer = self._answers.get(call.method) if call.service == PLUGIN_SERVICE else None
        task = asyncio.current_task()
        assert task is not None
        self._asked[task] = call.method
        payload = b""
        try:
            if answer is not None:
                payload = await answer(call)
            elif call.service != PLUGIN_SERVICE or call.method not in _SILENT:
                self._session.fail(call, Code.UNIMPLEMENTED, "unknown method")
        except CreationRefused as error:
            self._plugin.counts.refused += 1
            self._session.fail(call, Code.INVALID_ARGUMENT, f"weenv: {error}")
        except ConfigError as error:
            log.error("NRI: %s", error)
            self._session.fail(call, Code.INVALID_ARGUMENT, f"weenv: {error}")
        except FormatError as error:
            self._plugin.counts.unreadable += 1
            log.warning("NRI: %s cannot be read, and is let through: %s", call.method, error)
        try:
            self._session.answer(call, payload)  # nothing where it has been failed above
        except LimitError as error:
            log.error("NRI: the answer to %s is too large and left out: %s", call.method, error)
            self._session.answer(call, b"")
        await self._drain()

    async def _ask(self, call: Call, about: str, work: Coroutine[Any, Any, T]) -> T | None:
        """What the handler says; None where it is late or fails. Raises CreationRefused.

        A late handler is cancelled and not waited for: it may take as long as it likes to notice.
        """
        plugin = self._plugin
        limit = min(plugin.config.answer_within, plugin.runtime.request_timeout / 2)
        if call.timeout:
            limit = min(limit, call.timeout / 2)
        question = _Question()
        context = contextvars.copy_context()
        context.run(_asked.set, question)
        task = asyncio.get_running_loop().create_task(work, name=f"nri handler of {call.method}", context=context)
        try:
            await asyncio.wait({task}, timeout=limit)
            if task.done() and not task.cancelled():
                return task.result()
        except Exception as error:  # a handler must not keep a container from starting
            if isinstance(error, CreationRefused) and call.method == "CreateContainer":
                raise
            plugin.counts.failed += 1
            log.error("NRI: %s of %s failed, and is let through: %s", call.method, about, error, exc_info=error)
            return None
        finally:
            question.open = False
            if not task.done():
                self._late.add(task)
                task.add_done_callback(self._given_up)
                task.cancel()
        if task.done():
            plugin.counts.failed += 1
            log.error("NRI: %s of %s was cancelled by its handler, and is let through", call.method, about)
            return None
        plugin.counts.late += 1
        log.warning("NRI: %s of %s was not decided within %g s, and is let through", call.method, about, limit)
        return None

    def _given_up(self, task: asyncio.Task[Any]) -> None:
        self._late.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("NRI: %s failed after it was given up: %s", task.get_name(), error)

    async def _configure(self, call: Call) -> bytes:
        fields = messages.decode("ConfigureRequest", call.payload)
        told = {
            name: fields[name] / 1000
            for name in ("registration_timeout", "request_timeout")
            if 0 < fields.get(name, 0) < 3_600_000
        }
        names = [fields.get(name, "")[:100] for name in ("runtime_name", "runtime_version", "NRI_version")]
        runtime = Runtime(*names, **told)
        try:
            events = self._plugin.configured(runtime, fields.get("config", ""))
        except ConfigError as error:
            self._reason = f"the configuration that the runtime handed us cannot be used: {error}"
            raise
        self._configured.set()
        if self._launched and not runtime.synchronizes_launched:
            # This runtime tells a plugin that it launched of new containers only.
            self._plugin.connected()
        return messages.encode("ConfigureResponse", {"events": events})

    async def _synchronize(self, call: Call) -> bytes:
        fields = messages.decode("SynchronizeRequest", call.payload)
        self._pods += map(pod_of, fields.get("pods", []))
        self._containers += map(container_of, fields.get("containers", []))
        if len(self._pods) + len(self._containers) > _MAX_OBJECTS:
            self._over(f"more than {_MAX_OBJECTS} pods and containers in one synchronization")
            return b""
        if fields.get("more", False):
            return messages.encode("SynchronizeResponse", {"more": True})
        pods = {pod.id: pod for pod in self._pods}
        seen = [self._plugin.seen(pods.get(item.pod_id, Pod(item.pod_id)), item) for item in self._containers if item.id]
        self._pods, self._containers = [], []
        updates = await self._ask(call, f"{len(seen)} containers", self._plugin.handler.synchronized(seen))
        self._plugin.connected()
        return messages.encode("SynchronizeResponse", {"update": messages.updates(updates or ())})

    def _seen(self, fields: dict[str, Any], *, new: bool = False) -> Seen | None:
        container = container_of(fields.get("container", {}))
        return self._plugin.seen(pod_of(fields.get("pod", {})), container, new=new) if container.id else None

    async def _create(self, call: Call) -> bytes:
        plugin = self._plugin
        plugin.counts.created += 1
        seen = self._seen(messages.decode("CreateContainerRequest", call.payload), new=True)
        if seen is None:
            return b""
        if plugin.config.strict and seen.asked.complaints:
            raise CreationRefused(seen.asked.complaints[0])
        answer = await self._ask(call, str(seen), plugin.handler.creating(seen)) or Answer()
        # A runtime fails the creation of a container that is to be updated before it exists.
        others = [item for item in answer.updates if item.container_id != seen.container.id]
        if answer.quota is None:
            return messages.created(None, {}, others, seen.container.limits)
        plugin.counts.adjusted += 1
        top = seen.asked.bounds.ceiling
        # 0 would be no limit at all.
        memory = max(min(answer.quota.memory, top.memory), min(MIN_MEMORY, top.memory))
        quota = Quota(min(answer.quota.cpu, top.cpu), memory)
        log.info("NRI: %s starts with %g CPUs and %d bytes of memory", seen, quota.cpu, quota.memory)
        return messages.created(
            (quota.cpu, quota.memory), recorded(seen.asked), others, seen.container.limits, swap=plugin.limits_swap
        )

    async def _update(self, call: Call) -> bytes:
        fields = messages.decode("UpdateContainerRequest", call.payload)
        seen = self._seen(fields)
        wanted = messages.limits_of(fields.get("linux_resources", {}))
        if seen is None or self._plugin.own_updates.includes(seen.container.id, wanted.cpu, wanted.memory):
            return b""
        answer = await self._ask(call, str(seen), self._plugin.handler.updating(seen, wanted)) or Answer()
        items = list(answer.updates)
        if answer.quota is not None:
            items = [item for item in items if item.container_id != seen.container.id]
            items.append(_instead(seen, wanted, answer.quota))
        return messages.encode("UpdateContainerResponse", {"update": messages.updates(items)})

    async def _stop(self, call: Call) -> bytes:
        seen = self._seen(messages.decode("StopContainerRequest", call.payload))
        if seen is None:
            return b""
        updates: Sequence[Update] = await self._ask(call, str(seen), self._plugin.handler.stopped(seen)) or ()
        return messages.encode("StopContainerResponse", {"update": messages.updates(updates)})

    async def _state(self, call: Call) -> bytes:
        fields = messages.decode("StateChangeEvent", call.payload)
        work = {
            messages.POST_START_CONTAINER: self._plugin.handler.started,
            messages.REMOVE_CONTAINER: self._plugin.handler.removed,
        }.get(fields.get("event", 0))
        return await self._told(call, fields, work) if work else b""

    async def _started(self, call: Call) -> bytes:
        fields = messages.decode("ContainerEvent", call.payload)
        return await self._told(call, fields, self._plugin.handler.started)

    async def _removed(self, call: Call) -> bytes:
        fields = messages.decode("ContainerEvent", call.payload)
        return await self._told(call, fields, self._plugin.handler.removed)

    async def _told(self, call: Call, fields: dict[str, Any], work: Callable[[Seen], Coroutine[Any, Any, None]]) -> bytes:
        seen = self._seen(fields)
        if seen is not None:
            await self._ask(call, str(seen), work(seen))
        return b""


def _instead(seen: Seen, wanted: Limits, quota: Quota) -> Update:
    """What is set instead of what a container's owner wants: never more than that."""
    cpu = min(quota.cpu, wanted.cpu) if wanted.cpu is not None else quota.cpu
    memory = min(quota.memory, wanted.memory) if wanted.memory is not None else quota.memory
    return Update(seen.container.id, cpu, memory)
