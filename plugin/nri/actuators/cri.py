"""CRI's UpdateContainerResources: limits that the container's own status shows, and its next start by CRI has.

Slower than Tasks.Update (CRI rewrites the specification as well), and only for containers of CRI. It asks all NRI plugins
first, ours included: see :mod:`weenv.plugin.nri.actuators.own`. Field numbers: kubernetes/cri-api v0.34.0,
pkg/apis/runtime/v1/api.proto.
"""

from __future__ import annotations

from weenv.core.proto import Schema
from weenv.plugin.containerd.client import Client, ContainerdError
from weenv.plugin.nri.actuate import DEADLINE, PERIOD, EnvGone, Refused
from weenv.plugin.nri.actuators.own import OwnUpdates
from weenv.plugin.nri.model import EnvKey
from weenv.plugin.nri.nrihandler import CRI_NAMESPACE
from weenv.plugin.nri.wire.messages import MIN_QUOTA

_METHOD = "/runtime.v1.RuntimeService/UpdateContainerResources"
_SCHEMA = Schema(
    "weenv.cri",
    {
        "LinuxContainerResources": {
            "cpu_period": (1, "int64"),
            "cpu_quota": (2, "int64"),
            "memory_limit_in_bytes": (4, "int64"),
        },
        "UpdateContainerResourcesRequest": {"container_id": (1, "string"), "linux": (2, "LinuxContainerResources")},
    },
)
_AGAIN = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED"})


class CriUpdates:
    """An :class:`weenv.plugin.nri.actuate.Actuator`. ``own`` is shared with the NRI plugin of this process."""

    name = "cri"

    def __init__(self, client: Client, *, own: OwnUpdates | None = None, deadline: float = DEADLINE) -> None:
        self._client = client
        self._own = own or OwnUpdates()
        self._deadline = deadline

    async def apply(self, key: EnvKey, cpu: float | None, memory: int | None, swap: int | None) -> None:
        """Set what is not None; CRI itself lets the limit of memory and swap follow that of memory, so ``swap`` is not sent.

        Raises EnvGone, Refused.
        """
        if key.namespace != CRI_NAMESPACE:
            raise Refused(f"{key} is no container of CRI", hint="use the actuator tasks")
        request = _SCHEMA["UpdateContainerResourcesRequest"](container_id=key.container_id)
        if cpu is not None:
            request.linux.cpu_period = PERIOD
            request.linux.cpu_quota = max(MIN_QUOTA, round(cpu * PERIOD))
        if memory is not None:
            request.linux.memory_limit_in_bytes = memory
        with self._own.expect(key.container_id, cpu, memory):
            try:
                await self._client.call(_METHOD, request, ".google.protobuf.Empty", deadline=self._deadline)
            except ContainerdError as error:
                # CRI answers UNKNOWN where a container ends while its update is under way.
                if error.code == "NOT_FOUND" or "not found" in error.message:
                    raise EnvGone(f"{key} has ended") from error
                raise Refused(f"{key}: {error.message}", again=error.code in _AGAIN) from error
