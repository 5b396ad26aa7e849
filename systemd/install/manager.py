"""systemd, asked through pystemd: over the system's bus, or, where there is none, over systemd's own socket.

Names and states are those of org.freedesktop.systemd1(5). pystemd is of the extra ``systemd``, imported when it is used.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any, Final

from weenv.core import extras
from weenv.core.errors import ConfigError, WeenvError
from weenv.core.rights import remedy

_PRIVATE: Final = "/run/systemd/private"
_JOB: Final = 330.0
"""Seconds for a job, somewhat more than our units' TimeoutStartSec=."""
_PAUSE: Final = 0.05


class UnitFailed(WeenvError):
    """A unit did not do what it was told to."""


def booted() -> bool:
    """Whether systemd is the first process (sd_booted(3))."""
    return os.path.isdir("/run/systemd/system")


class Manager:
    """The system's service manager; a context manager. Raises ConfigError where it cannot be asked."""

    def __init__(self) -> None:
        try:
            from pystemd import systemd1
            from pystemd.dbuslib import DBus, DBusAddress
        except ImportError as error:
            hint = f"{extras.remedy('pystemd')} (which takes gcc, pkg-config, libsystemd-dev and python3-dev)"
            raise ConfigError("asking systemd needs pystemd", hint=hint) from error
        self._unit = systemd1.Unit
        self._bus: Any = None
        problem: OSError | None = None
        for bus in (DBus(), DBusAddress(f"unix:path={_PRIVATE}".encode(), peer_to_peer=True)):
            try:
                bus.open()
                self._manager = systemd1.Manager(bus=bus)
                self._manager.load()
            except Exception as error:  # noqa: BLE001 (pystemd raises classes that it makes as it goes)
                problem = error if isinstance(error, OSError) else OSError(str(error))
                continue
            self._bus = bus
            break
        if self._bus is None:
            hint = remedy(problem, "see: systemctl status") if problem else ""
            raise ConfigError(f"systemd does not answer: {problem}", hint=hint)

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._bus.close()

    def _call(self, what: str, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._manager.Manager, method)(*arguments)
        except Exception as error:
            raise UnitFailed(f"systemd refuses to {what}: {_say(error)}") from error

    def reload(self) -> None:
        """Have it read the unit files again."""
        self._call("reload", "Reload")

    def enable(self, units: Sequence[str]) -> None:
        """Enable units, as their [Install] sections say."""
        self._call("enable units", "EnableUnitFiles", [unit.encode() for unit in units], False, False)

    def disable(self, units: Sequence[str]) -> None:
        """Disable units; those that are not there are no error."""
        with contextlib.suppress(UnitFailed):
            self._call("disable units", "DisableUnitFiles", [unit.encode() for unit in units], False)

    def start(self, unit: str) -> None:
        """Start it, and wait until it is active. Raises UnitFailed."""
        self._job("start", "StartUnit", unit)
        self._expect_active(unit)

    def restart(self, unit: str) -> None:
        """Stop it if it runs, start it, wait until it is active. Raises UnitFailed."""
        self._job("restart", "RestartUnit", unit)
        self._expect_active(unit)

    def stop(self, unit: str) -> None:
        """Stop it, and wait for that; one that is not there is no error."""
        if self.state(unit) in ("active", "activating", "reloading", "deactivating"):
            self._job("stop", "StopUnit", unit)

    def reset(self, unit: str) -> None:
        """Forget that it failed, and what it keeps: descriptors (systemd 254 and newer)."""
        for method, arguments in (("CleanUnit", ([b"fdstore"],)), ("ResetFailedUnit", ())):
            with contextlib.suppress(UnitFailed):
                self._call("clean up", method, unit.encode(), *arguments)

    def state(self, unit: str) -> str:
        """``active``, ``inactive``, ``failed`` and so on; inactive where there is no such unit."""
        return str(self._property(unit, "ActiveState") or b"inactive", "ascii")

    def active_since(self, unit: str) -> float:
        """When it became active: seconds since 1970, 0 where it has not been."""
        return int(self._property(unit, "ActiveEnterTimestamp")) / 1e6

    def depends_on(self, unit: str) -> list[str]:
        """Units that run and are stopped, or started anew, with ``unit``."""
        names = {name.decode() for kind in ("RequiredBy", "BoundBy", "ConsistsOf") for name in self._property(unit, kind) or ()}
        return sorted(name for name in names if name.endswith(".service") and self.state(name) == "active")

    def _property(self, unit: str, name: str) -> Any:
        try:
            found = self._unit(unit.encode(), bus=self._bus)
            found.load()
            return getattr(found.Unit, name)
        except Exception as error:
            raise UnitFailed(f"systemd does not tell about {unit}: {_say(error)}") from error

    def _job(self, what: str, method: str, unit: str) -> None:
        self._call(f"{what} {unit}", method, unit.encode(), b"replace")
        end = time.monotonic() + _JOB
        while self._property(unit, "Job")[0]:
            if time.monotonic() > end:
                raise UnitFailed(f"{unit} takes more than {_JOB:.0f} s to {what}", hint=f"see: systemctl status {unit}")
            time.sleep(_PAUSE)

    def _expect_active(self, unit: str) -> None:
        if self.state(unit) != "active":
            raise UnitFailed(f"{unit} does not start", hint=f"see: journalctl -u {unit}")


def _say(error: Exception) -> str:
    """What systemd said; pystemd has it beside its own words, in bytes."""
    text = getattr(error, "err_message", "") or str(error) or type(error).__name__
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
