"""Which actuator a container's limits go through: CRI's own where the configuration says so, Tasks.Update for all others."""

from __future__ import annotations

import logging

from weenv.plugin.nri.actuate import Actuator
from weenv.plugin.nri.actuators.nri import NriUpdates
from weenv.plugin.nri.model import EnvKey
from weenv.plugin.nri.nrihandler import CRI_NAMESPACE
from weenv.plugin.nri.nriplugin import NriPlugin

log = logging.getLogger(__name__)


class ByNamespace:
    """CRI's containers through one actuator, all others through another. See :class:`weenv.plugin.nri.actuate.Actuator`."""

    def __init__(self, cri: Actuator, others: Actuator) -> None:
        self.name = cri.name
        self._cri = cri
        self._others = others

    async def apply(self, key: EnvKey, cpu: float | None, memory: int | None, swap: int | None) -> None:
        """Raises EnvGone, Refused."""
        chosen = self._cri if key.namespace == CRI_NAMESPACE else self._others
        await chosen.apply(key, cpu, memory, swap)


class NriWhereSafe:
    """NRI's UpdateContainers while a plugin is connected to a runtime that it cannot stop, ``others`` otherwise.

    The plugin is made after its owner, which needs an actuator: :meth:`use` tells of it.
    """

    name = "nri"

    def __init__(self, others: Actuator) -> None:
        self._others = others
        self._plugin: NriPlugin | None = None
        self._nri: Actuator = others
        self._told = ""

    def use(self, plugin: NriPlugin) -> None:
        """Ask this plugin from now on."""
        self._plugin, self._nri = plugin, NriUpdates(plugin)

    async def apply(self, key: EnvKey, cpu: float | None, memory: int | None, swap: int | None) -> None:
        """Raises EnvGone, Refused. A connection that ends on the way is a refusal to be tried again, by then elsewhere."""
        safe = self._plugin is not None and self._plugin.may_update
        if self._plugin is not None:
            runtime = self._plugin.runtime
            whose = f"{runtime.name} {runtime.version}".strip() or "no runtime is connected"
            told = f"limits of CRI's containers are changed by {'NRI' if safe else self._others.name} ({whose})"
            if told != self._told:
                self._told = told
                log.info("%s", told)
        await (self._nri if safe else self._others).apply(key, cpu, memory, swap)
