"""NRI's UpdateContainers, for runtimes whose NRI is free of the deadlock; the plugin itself refuses all others."""

from __future__ import annotations

from weenv.plugin.nri.actuate import Refused
from weenv.plugin.nri.model import EnvKey
from weenv.plugin.nri.nrihandler import CRI_NAMESPACE
from weenv.plugin.nri.nriplugin import NriPlugin, NriUnavailable
from weenv.plugin.nri.wire.messages import Update


class NriUpdates:
    """An :class:`weenv.plugin.nri.actuate.Actuator` over a connected plugin."""

    name = "nri"

    def __init__(self, plugin: NriPlugin) -> None:
        self._plugin = plugin

    async def apply(self, key: EnvKey, cpu: float | None, memory: int | None, swap: int | None) -> None:
        """Set what is not None; ``swap`` is not sent, the runtime lets it follow. Raises Refused.

        A container that has ended is no error to the runtime: reading the cgroup back tells.
        """
        if key.namespace != CRI_NAMESPACE:
            raise Refused(f"{key} is no container of CRI", hint="use the actuator tasks")
        try:
            failed = await self._plugin.update([Update(key.container_id, cpu, memory)])
        except NriUnavailable as error:
            raise Refused(f"{key}: {error.message}", again=True, hint=error.hint) from error
        if failed:
            raise Refused(f"{key}: the runtime refused the update")
