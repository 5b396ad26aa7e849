"""NRI's messages: the fields that are read or written here, and plain values for them. Pure.

Source: containerd/nri, pkg/api/api.proto (package ``nri.pkg.api.v1alpha1``) at v0.12.2, compared with v0.6.1 (containerd
1.7.24) and v0.8.0 (2.1.9): all numbers below are the same where they exist. Fields that are not listed are skipped, so that
a peer's long messages cost little.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weenv.core import wire
from weenv.core.errors import FormatError

RUNTIME_SERVICE = "nri.pkg.api.v1alpha1.Runtime"
"""What a plugin may call: RegisterPlugin, UpdateContainers."""
PLUGIN_SERVICE = "nri.pkg.api.v1alpha1.Plugin"
"""What a runtime calls."""

_LABELS = "map<string,string>"
_ABOUT = {"pod": (1, "PodSandbox"), "container": (2, "Container")}

TABLES: dict[str, Mapping[str, tuple[int, str]]] = {
    "Empty": {},
    "RegisterPluginRequest": {"plugin_name": (1, "string"), "plugin_idx": (2, "string"), "NRI_version": (3, "string")},
    "UpdateContainersRequest": {"update": (1, "repeated ContainerUpdate")},
    "UpdateContainersResponse": {"failed": (1, "repeated ContainerUpdate")},
    "ConfigureRequest": {
        "config": (1, "string"),
        "runtime_name": (2, "string"),
        "runtime_version": (3, "string"),
        "registration_timeout": (4, "int64"),
        "request_timeout": (5, "int64"),
        "NRI_version": (6, "string"),
    },
    "ConfigureResponse": {"events": (2, "int32")},
    "SynchronizeRequest": {
        "pods": (1, "repeated PodSandbox"),
        "containers": (2, "repeated Container"),
        "more": (3, "bool"),
    },
    "SynchronizeResponse": {"update": (1, "repeated ContainerUpdate"), "more": (2, "bool")},
    "CreateContainerRequest": _ABOUT,
    "CreateContainerResponse": {"adjust": (1, "ContainerAdjustment"), "update": (2, "repeated ContainerUpdate")},
    "UpdateContainerRequest": {**_ABOUT, "linux_resources": (3, "LinuxResources")},
    "UpdateContainerResponse": {"update": (1, "repeated ContainerUpdate")},
    "StopContainerRequest": _ABOUT,
    "StopContainerResponse": {"update": (1, "repeated ContainerUpdate")},
    # PostStartContainer, RemoveContainer and their like of NRI 0.12
    "ContainerEvent": _ABOUT,
    "StateChangeEvent": {"event": (1, "int32"), "pod": (2, "PodSandbox"), "container": (3, "Container")},
    "PodSandbox": {
        "id": (1, "string"),
        "name": (2, "string"),
        "uid": (3, "string"),
        "namespace": (4, "string"),
        "labels": (5, _LABELS),
        "annotations": (6, _LABELS),
    },
    "Container": {
        "id": (1, "string"),
        "pod_sandbox_id": (2, "string"),
        "name": (3, "string"),
        "state": (4, "int32"),
        "labels": (5, _LABELS),
        "annotations": (6, _LABELS),
        "linux": (11, "LinuxContainer"),
        "pid": (12, "uint32"),
    },
    "LinuxContainer": {"resources": (3, "LinuxResources"), "cgroups_path": (5, "string")},
    "LinuxResources": {"memory": (1, "LinuxMemory"), "cpu": (2, "LinuxCPU")},
    "LinuxMemory": {"limit": (1, "OptionalInt64"), "swap": (3, "OptionalInt64")},
    "LinuxCPU": {"quota": (2, "OptionalInt64"), "period": (3, "OptionalUInt64")},
    "OptionalInt64": {"value": (1, "int64")},
    "OptionalUInt64": {"value": (1, "uint64")},
    "ContainerAdjustment": {"annotations": (2, _LABELS), "linux": (6, "LinuxContainerAdjustment")},
    "LinuxContainerAdjustment": {"resources": (2, "LinuxResources")},
    "ContainerUpdate": {
        "container_id": (1, "string"),
        "linux": (2, "LinuxContainerUpdate"),
        "ignore_failure": (3, "bool"),
    },
    "LinuxContainerUpdate": {"resources": (1, "LinuxResources")},
}
"""Fields by message, as :mod:`weenv.core.proto` reads them."""

CREATE_CONTAINER = 4
POST_START_CONTAINER = 7
UPDATE_CONTAINER = 8
STOP_CONTAINER = 10
REMOVE_CONTAINER = 11
EVENTS_0_6 = (1 << 11) - 1
"""All events that NRI before 0.10 knows; one bit more and the plugin is thrown out."""
EVENTS_0_10 = (1 << 14) - 1
"""All events since 0.10."""

PERIOD = 100_000
"""The CFS period used where the container names none, microseconds: the kernel's and CRI's default."""
MIN_QUOTA = 1_000
"""The kernel's smallest CFS quota, microseconds (kernel/sched/core.c, min_cfs_quota_period)."""


def events_mask(*events: int) -> int:
    """The bits of some events."""
    return sum(1 << (event - 1) for event in set(events))


@dataclass(frozen=True, slots=True)
class Limits:
    """A container's limits; None: it has none. ``period`` is the CFS period in us, ``memory_swap`` memory and swap."""

    cpu: float | None = None
    memory: int | None = None
    period: int = PERIOD
    memory_swap: int | None = None


@dataclass(frozen=True, slots=True)
class Pod:
    """What is used of a PodSandbox."""

    id: str = ""
    name: str = ""
    uid: str = ""
    namespace: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Container:
    """What is used of a Container. ``pid`` is 0 where no process runs; ``state`` api.proto's ContainerState (3: running)."""

    id: str
    pod_id: str = ""
    name: str = ""
    state: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = Limits()
    cgroups_path: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """New limits of a container; None leaves one as it is."""

    container_id: str
    cpu: float | None = None
    memory: int | None = None


def decode(table: str, data: bytes) -> dict[str, Any]:
    """The fields of a message. Raises FormatError."""
    try:
        return wire.decode(TABLES, table, data)
    except wire.WireError as error:
        raise FormatError(f"NRI's {table}: {error}") from error


def encode(table: str, values: Mapping[str, Any]) -> bytes:
    """A message's bytes."""
    return wire.encode(TABLES, table, values)


def limits_of(resources: Mapping[str, Any]) -> Limits:
    """From a decoded LinuxResources. What is 0, negative or absurd counts as no limit, as runtimes take it."""
    cpu, memory = resources.get("cpu", {}), resources.get("memory", {})
    quota = _value(cpu, "quota")
    period = _value(cpu, "period") or PERIOD
    limit, swap = _value(memory, "limit"), _value(memory, "swap")
    return Limits(
        quota / period if quota > 0 and 0 < period <= 1_000_000 else None,
        limit if 0 < limit < 1 << 62 else None,
        period if 0 < period <= 1_000_000 else PERIOD,
        swap if 0 < swap < 1 << 62 else None,
    )


def _value(table: Mapping[str, Any], name: str) -> int:
    return int(table.get(name, {}).get("value", 0))


def pod_of(fields: Mapping[str, Any]) -> Pod:
    """From a decoded PodSandbox."""
    text = {name: fields.get(name, "") for name in ("id", "name", "uid", "namespace")}
    return Pod(**text, annotations=fields.get("annotations", {}))


def container_of(fields: Mapping[str, Any]) -> Container:
    """From a decoded Container."""
    linux = fields.get("linux", {})
    return Container(
        fields.get("id", ""),
        fields.get("pod_sandbox_id", ""),
        fields.get("name", ""),
        fields.get("state", 0),
        fields.get("labels", {}),
        fields.get("annotations", {}),
        limits_of(linux.get("resources", {})),
        linux.get("cgroups_path", ""),
        fields.get("pid", 0),
    )


def resources(
    cpu: float | None, memory: int | None, *, period: int = PERIOD, memory_swap: int | None = None
) -> dict[str, Any]:
    """A LinuxResources with these limits; what is None is left out."""
    made: dict[str, Any] = {}
    if cpu is not None:
        quota = max(MIN_QUOTA, round(cpu * period))
        made["cpu"] = {"quota": {"value": quota}, "period": {"value": period}}
    if memory is not None:
        made["memory"] = {"limit": {"value": memory}}
        if memory_swap is not None:
            made["memory"]["swap"] = {"value": memory_swap}
    return made


def updates(items: Iterable[Update]) -> list[dict[str, Any]]:
    """A list of ContainerUpdate. Their failure is ignored: it must not fail the creation of another container."""
    return [
        {"container_id": item.container_id, "linux": {"resources": resources(item.cpu, item.memory)}, "ignore_failure": True}
        for item in items
    ]


def register(name: str, index: str) -> bytes:
    """A RegisterPluginRequest."""
    return encode("RegisterPluginRequest", {"plugin_name": name, "plugin_idx": index})


def created(
    quota: tuple[float, int] | None,
    annotations: Mapping[str, str],
    others: Iterable[Update],
    limits: Limits,
    *,
    swap: bool = False,
) -> bytes:
    """A CreateContainerResponse: ``quota`` (cores, bytes) for the container, whose own limits are ``limits``.

    Where the container limits memory and swap together, or the machine can (``swap``), that limit is the new one too: it
    would otherwise swap what it is not given. CRI does the same with limits of its own.
    """
    values: dict[str, Any] = {"update": updates(others)}
    if quota is not None:
        both = quota[1] if swap or limits.memory_swap is not None else None
        made = resources(quota[0], quota[1], period=limits.period, memory_swap=both)
        values["adjust"] = {"annotations": dict(annotations), "linux": {"resources": made}}
    return encode("CreateContainerResponse", values)
