"""containerd's containers.v1, tasks.v1 and events.v1 services, typed.

Methods and field numbers: ``api/services/{containers,tasks,events}/v1/*.proto``, ``api/types/task/task.proto`` and
``api/events/task.proto`` of containerd v2.1.9 (compared with v1.7.24 and v2.3.4). A spec travels as JSON in an ``Any``
whose ``type_url`` names the OCI runtime specification's type (``pkg/oci/spec.go`` registers the names with typeurl).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from weenv.plugin.containerd.client import Client, Namespaced
from weenv.plugin.containerd.schema import SCHEMA
from weenv.plugin.containerd.types import Mount, nanoseconds

_CONTAINERS = "containerd.services.containers.v1.Containers"
_TASKS = "containerd.services.tasks.v1.Tasks"
_EVENTS = "containerd.services.events.v1.Events"
_EMPTY = ".google.protobuf.Empty"

_SPECS = "types.containerd.io/opencontainers/runtime-spec/1/"
SPEC_URL = _SPECS + "Spec"
PROCESS_URL = _SPECS + "Process"
RESOURCES_URL = _SPECS + "LinuxResources"
RUNC_OPTIONS_URL = "containerd.runc.v1.Options"

RUNC = "io.containerd.runc.v2"
"""containerd's own shim for runc and its like."""


class Status(IntEnum):
    """States of a process, with containerd's numbers (api/types/task/task.proto)."""

    UNKNOWN = 0
    CREATED = 1
    RUNNING = 2
    STOPPED = 3
    PAUSED = 4
    PAUSING = 5


@dataclass(frozen=True, slots=True)
class Container:
    """A container record: what a task is made from. ``created`` is in nanoseconds since 1970."""

    id: str
    image: str
    spec: Mapping[str, Any]
    snapshotter: str
    snapshot_key: str
    labels: Mapping[str, str] = field(default_factory=dict)
    runtime: str = RUNC
    binary: str = ""
    """The OCI runtime the runc shim is to call; empty: runc of its PATH."""
    created: int = 0

    def to_proto(self) -> Any:
        """The message (times are the server's business)."""
        message = SCHEMA["Container"](
            id=self.id, image=self.image, snapshotter=self.snapshotter, snapshot_key=self.snapshot_key, labels=dict(self.labels)
        )
        message.runtime.name = self.runtime
        if self.binary:
            _pack_options(message.runtime.options, self.binary)
        _pack_json(message.spec, SPEC_URL, self.spec)
        return message

    @classmethod
    def from_proto(cls, message: Any) -> Container:
        """From the message; a spec that is no JSON object becomes an empty one."""
        binary = ""
        if message.runtime.options.type_url.endswith(RUNC_OPTIONS_URL):
            binary = SCHEMA["RuncOptions"].FromString(message.runtime.options.value).binary_name
        try:
            spec = json.loads(message.spec.value or b"{}")
        except ValueError:
            spec = {}
        return cls(
            message.id,
            message.image,
            spec if isinstance(spec, dict) else {},
            message.snapshotter,
            message.snapshot_key,
            dict(message.labels),
            message.runtime.name,
            binary,
            nanoseconds(message.created_at),
        )


@dataclass(frozen=True, slots=True)
class Process:
    """A task's first process (``id`` as containerd gives it) or one that was added. Times: nanoseconds since 1970."""

    container: str
    id: str
    pid: int
    status: Status
    exit_status: int = 0
    exited: int = 0
    stdin: str = ""
    stdout: str = ""
    stderr: str = ""
    terminal: bool = False

    @classmethod
    def from_proto(cls, message: Any) -> Process:
        """From the message; an unknown state becomes ``UNKNOWN``."""
        status = Status(message.status) if 0 <= message.status <= max(Status) else Status.UNKNOWN
        return cls(
            message.container_id, message.id, message.pid, status, message.exit_status, nanoseconds(message.exited_at),
            message.stdin, message.stdout, message.stderr, message.terminal,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: 0-127 its own status, 128 + n by signal n; ``at`` in nanoseconds since 1970."""

    status: int
    at: int
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """One event. ``body`` holds the fields of the task events this module knows, None for others."""

    topic: str
    namespace: str
    at: int
    body: Any = None


@dataclass(frozen=True, slots=True)
class Stdio:
    """Where the shim connects a process: FIFOs, plain files, or ``binary://`` URIs; empty: nothing."""

    stdin: str = ""
    stdout: str = ""
    stderr: str = ""
    terminal: bool = False


class Containers:
    """The containers.v1 service within a namespace. All methods raise ContainerdError."""

    def __init__(self, namespace: Namespaced) -> None:
        self._namespace = namespace

    async def _call(self, method: str, request: Any, answer: str, deadline: float | None = None) -> Any:
        return await self._namespace.call(f"/{_CONTAINERS}/{method}", request, answer, deadline=deadline)

    async def get(self, container: str) -> Container:
        """One record."""
        answer = await self._call("Get", SCHEMA["GetContainerRequest"](id=container), "GetContainerResponse")
        return Container.from_proto(answer.container)

    async def find(self, *filters: str) -> list[Container]:
        """All records that match any of ``filters`` (``labels."k"==v``), or all."""
        answer = await self._call("List", SCHEMA["ListContainersRequest"](filters=filters), "ListContainersResponse")
        return [Container.from_proto(item) for item in answer.containers]

    async def create(self, container: Container) -> Container:
        """Add a record; its snapshot key keeps that snapshot from collection, even one that is not there yet."""
        request = SCHEMA["CreateContainerRequest"](container=container.to_proto())
        return Container.from_proto((await self._call("Create", request, "CreateContainerResponse")).container)

    async def update(self, container: Container, *fields: str, deadline: float | None = None) -> Container:
        """Change a record; ``fields`` are field-mask paths such as ``spec`` and ``labels.NAME``. ``deadline`` in seconds."""
        request = SCHEMA["UpdateContainerRequest"](container=container.to_proto())
        request.update_mask.paths.extend(fields)
        answer = await self._call("Update", request, "UpdateContainerResponse", deadline)
        return Container.from_proto(answer.container)

    async def delete(self, container: str) -> None:
        """Remove a record; its task must be gone."""
        await self._call("Delete", SCHEMA["DeleteContainerRequest"](id=container), _EMPTY)


class Tasks:
    """The tasks.v1 service within a namespace. ``process`` is an added process's id, empty for the first.

    All methods raise ContainerdError.
    """

    def __init__(self, namespace: Namespaced) -> None:
        self._namespace = namespace

    async def _call(self, method: str, request: Any, answer: str = _EMPTY, deadline: float | None = None) -> Any:
        return await self._namespace.call(f"/{_TASKS}/{method}", request, answer, deadline=deadline)

    async def create(self, container: str, rootfs: Sequence[Mount], stdio: Stdio, *, binary: str = "") -> int:
        """Make the task, its process waiting to be started; the pid."""
        request = SCHEMA["CreateTaskRequest"](
            container_id=container,
            rootfs=[mount.to_proto() for mount in rootfs],
            stdin=stdio.stdin,
            stdout=stdio.stdout,
            stderr=stdio.stderr,
            terminal=stdio.terminal,
        )
        if binary:
            _pack_options(request.options, binary)
        return int((await self._call("Create", request, "CreateTaskResponse")).pid)

    async def start(self, container: str, process: str = "") -> int:
        """Let the process go; the pid."""
        request = SCHEMA["StartRequest"](container_id=container, exec_id=process)
        return int((await self._call("Start", request, "StartResponse")).pid)

    async def delete(self, container: str) -> Exit:
        """Take away a stopped task."""
        return _exit(await self._call("Delete", SCHEMA["DeleteTaskRequest"](container_id=container), "DeleteResponse"))

    async def delete_process(self, container: str, process: str) -> Exit:
        """Take away an added process that has ended."""
        request = SCHEMA["DeleteProcessRequest"](container_id=container, exec_id=process)
        return _exit(await self._call("DeleteProcess", request, "DeleteResponse"))

    async def get(self, container: str, process: str = "") -> Process:
        """The state of a process."""
        request = SCHEMA["GetTaskRequest"](container_id=container, exec_id=process)
        return Process.from_proto((await self._call("Get", request, "GetTaskResponse")).process)

    async def list_all(self) -> list[Process]:
        """The first process of every task."""
        answer = await self._call("List", SCHEMA["ListTasksRequest"](), "ListTasksResponse")
        return [Process.from_proto(item) for item in answer.tasks]

    async def exec(self, container: str, process: str, spec: Mapping[str, Any], stdio: Stdio) -> None:
        """Add a process (an OCI ``process`` object) under the id ``process``; :meth:`start` lets it go."""
        request = SCHEMA["ExecProcessRequest"](
            container_id=container,
            exec_id=process,
            stdin=stdio.stdin,
            stdout=stdio.stdout,
            stderr=stdio.stderr,
            terminal=stdio.terminal,
        )
        _pack_json(request.spec, PROCESS_URL, spec)
        await self._call("Exec", request)

    async def kill(self, container: str, signal: int, *, process: str = "", everyone: bool = False) -> None:
        """Send a signal to one process, or to all of the container."""
        request = SCHEMA["KillRequest"](container_id=container, exec_id=process, signal=signal, all=everyone)
        await self._call("Kill", request)

    async def wait(self, container: str, process: str = "") -> Exit:
        """Wait for the end of a process."""
        request = SCHEMA["WaitRequest"](container_id=container, exec_id=process)
        return _exit(await self._call("Wait", request, "WaitResponse"))

    async def pause(self, container: str) -> None:
        """Freeze all processes."""
        await self._call("Pause", SCHEMA["PauseTaskRequest"](container_id=container))

    async def resume(self, container: str) -> None:
        """Thaw them."""
        await self._call("Resume", SCHEMA["ResumeTaskRequest"](container_id=container))

    async def close_stdin(self, container: str, process: str = "") -> None:
        """Let the process see the end of its input, once what was written has been read."""
        await self._call("CloseIO", SCHEMA["CloseIORequest"](container_id=container, exec_id=process, stdin=True))

    async def resize(self, container: str, width: int, height: int, *, process: str = "") -> None:
        """Tell a terminal's size in characters."""
        request = SCHEMA["ResizePtyRequest"](container_id=container, exec_id=process, width=width, height=height)
        await self._call("ResizePty", request)

    async def update(self, container: str, resources: Mapping[str, Any], *, deadline: float | None = None) -> None:
        """Set limits of a running task: an OCI ``linux.resources`` object. ``deadline`` in seconds."""
        request = SCHEMA["UpdateTaskRequest"](container_id=container)
        _pack_json(request.resources, RESOURCES_URL, resources)
        await self._call("Update", request, deadline=deadline)

    async def metrics(self, *filters: str) -> list[tuple[str, str, bytes]]:
        """(task, type, encoded message) of what tasks use; ``filters`` such as ``id==NAME``."""
        answer = await self._call("Metrics", SCHEMA["MetricsRequest"](filters=filters), "MetricsResponse")
        return [(item.id, item.data.type_url, item.data.value) for item in answer.metrics]

    async def pids(self, container: str) -> list[int]:
        """All processes in the container, as this machine numbers them."""
        answer = await self._call("ListPids", SCHEMA["ListPidsRequest"](container_id=container), "ListPidsResponse")
        return [int(item.pid) for item in answer.processes]


_TOPICS = {
    "/tasks/create": "TaskCreate",
    "/tasks/start": "TaskStart",
    "/tasks/delete": "TaskDelete",
    "/tasks/exit": "TaskExit",
    "/tasks/oom": "TaskOOM",
    "/tasks/exec-added": "TaskExecAdded",
    "/tasks/exec-started": "TaskExecStarted",
    "/tasks/paused": "TaskPaused",
    "/tasks/resumed": "TaskResumed",
}
"""Topics (core/runtime/events.go) and the message each carries."""


async def subscribe(namespace: Namespaced, *filters: str) -> AsyncIterator[Event]:
    """Events as they happen, of this namespace; ``filters`` such as ``topic=="/tasks/exit"`` are or-ed."""
    scoped = [f"namespace=={namespace.name},{text}" for text in filters] or [f"namespace=={namespace.name}"]
    async for event in _events(namespace.client, scoped, namespace.headers):
        yield event


async def subscribe_everywhere(client: Client, *filters: str) -> AsyncIterator[Event]:
    """The same of all namespaces: the service needs none to be named (plugins/services/events/service.go, v2.1.9)."""
    async for event in _events(client, list(filters), ()):
        yield event


async def _events(client: Client, filters: list[str], headers: Sequence[tuple[str, str]]) -> AsyncIterator[Event]:
    request = SCHEMA["SubscribeRequest"](filters=filters)
    async for envelope in client.stream(f"/{_EVENTS}/Subscribe", request, "Envelope", headers=headers):
        kind = _TOPICS.get(envelope.topic)
        body = SCHEMA[kind].FromString(envelope.event.value) if kind else None
        yield Event(envelope.topic, envelope.namespace, nanoseconds(envelope.timestamp), body)


def _exit(message: Any) -> Exit:
    return Exit(int(message.exit_status), nanoseconds(message.exited_at), int(getattr(message, "pid", 0)))


def _pack_json(target: Any, url: str, value: Mapping[str, Any]) -> None:
    target.type_url = url
    target.value = json.dumps(value, separators=(",", ":")).encode("utf-8", "surrogateescape")


def _pack_options(target: Any, binary: str) -> None:
    target.type_url = RUNC_OPTIONS_URL
    target.value = SCHEMA["RuncOptions"](binary_name=binary).SerializeToString()
