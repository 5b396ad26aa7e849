"""What a runtime's NRI can and must not be asked for, by what it says of itself. Pure.

containerd vendors NRI as follows (its go.mod): 1.7.24 v0.6.1; 1.7.27 to 2.1.x v0.8.0; 2.2.0 v0.10.0; 2.2.1 and later
v0.11.0; 2.3 v0.12.0. Only v0.12 and later say their own version.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from weenv.plugin.nri.wire.messages import EVENTS_0_6, EVENTS_0_10

_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", re.ASCII)
_FREE_OF_DEADLOCK = (0, 12, 2)
"""NRI up to v0.12.1 may stop CRI for good where UpdateContainers meets a CRI call (containerd issue 13733)."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """As Configure tells it; timeouts in seconds, with NRI's defaults where it tells none."""

    name: str = ""
    version: str = ""
    nri_version: str = ""
    registration_timeout: float = 5.0
    request_timeout: float = 2.0

    @property
    def events(self) -> int:
        """All events that may be subscribed to; one bit more and the plugin is thrown out."""
        nri, own = parse(self.nri_version), parse(self.version)
        if nri is not None:
            return EVENTS_0_10 if nri >= (0, 10, 0) else EVENTS_0_6
        newer = self.name == "containerd" and own is not None and own >= (2, 2, 0)
        return EVENTS_0_10 if newer else EVENTS_0_6

    @property
    def takes_updates(self) -> bool:
        """UpdateContainers may be called at any time; where the version is not told, it may not."""
        nri = parse(self.nri_version)
        return nri is not None and nri >= _FREE_OF_DEADLOCK

    @property
    def synchronizes_launched(self) -> bool:
        """A plugin that the runtime launched is told of containers that exist (v0.6.1 never does)."""
        own = parse(self.version)
        return bool(self.nri_version) or self.name != "containerd" or own is None or own >= (1, 7, 27)


def parse(text: str) -> tuple[int, int, int] | None:
    """The three numbers that a version begins with (``v2.1.9+ds1``), or None."""
    match = _VERSION.match(text)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None
