"""What is said of groups that are not in the lazy format: as a label, as a line, as JSON.

The label's value (on images, containers; containerd bounds name and value at 4096 bytes, pkg/labels/validate.go)::

    [{"group":"registry.example/harness/agent:2","converted":3,"size":124000000,"local":118000000},
     {"group":"registry.example/tools/x:1","unpacked":1,"size":3000000,"reason":"a POSIX ACL"}]
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weenv.core.units import seconds, size

LABEL = "dev.weenv.not-lazy"
"""Label of composed images and of environments with such groups."""
_ROOM = 4000 - len(LABEL)
_REASON = 200


@dataclass(frozen=True, slots=True)
class NotLazyGroup:
    """How this node serves the layers of one group that are not in the lazy format.

    ``converted`` and ``unpacked`` count layers, ``size`` is their bytes in the registry and ``local`` those of the converted
    ones on this node. ``seconds``: spent on it just now, 0 where it was there. ``reason``: why some were unpacked.
    """

    group: str
    converted: int = 0
    unpacked: int = 0
    size: int = 0
    local: int = 0
    seconds: float = 0.0
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Without what is zero or empty."""
        fields = ("converted", "unpacked", "size", "local", "seconds", "reason")
        rows = {name: value for name in fields if (value := getattr(self, name))}
        return {"group": self.group, **({**rows, "seconds": round(self.seconds, 3)} if self.seconds else rows)}

    def text(self) -> str:
        """Without what the whole line begins with."""
        parts = []
        if self.converted:
            was = "converted on this node" if self.seconds else "served from this node's converted copy"
            parts.append(f"{_layers(self.converted)} {was}, {size(self.local)}")
        if self.unpacked:
            reason = f" ({self.reason})" if self.reason else ""
            parts.append(f"{_layers(self.unpacked)} fetched and unpacked{reason}")
        if self.seconds:
            parts.append(f"took {seconds(self.seconds)}")
        return f"{self.group} ({size(self.size)}): {', '.join(parts)}"


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count != 1)}"


def to_label(groups: Sequence[NotLazyGroup]) -> str:
    """The label's value; empty where all is lazy. Groups that do not fit are left out, all but their number."""
    rows = [{**group.to_json(), "reason": group.reason[:_REASON]} for group in groups]
    for row in rows:
        row.pop("seconds", None)
        if not row["reason"]:
            del row["reason"]
    for kept in range(len(rows), -1, -1):
        rest = [{"group": f"and {len(rows) - kept} more"}] if kept < len(rows) else []
        text = json.dumps([*rows[:kept], *rest], separators=(",", ":"))
        if len(text) <= _ROOM:
            break
    return text if rows else ""


def from_label(text: str) -> list[NotLazyGroup]:
    """The inverse; what cannot be read is left out: labels are anybody's."""
    try:
        rows = json.loads(text) if text else []
        return [
            NotLazyGroup(
                str(row["group"])[:600],
                int(row.get("converted", 0)),
                int(row.get("unpacked", 0)),
                int(row.get("size", 0)),
                int(row.get("local", 0)),
                reason=str(row.get("reason", ""))[:_REASON],
            )
            for row in rows
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def said(label: str) -> str:
    """:func:`line` of a label."""
    return line(from_label(label))


def line(groups: Sequence[NotLazyGroup]) -> str:
    """One line for people, empty where all is lazy."""
    if not groups:
        return ""
    return f"not in the lazy format: {'; '.join(group.text() for group in groups)}. Publish it lazily: weenv convert"


def short(groups: Sequence[NotLazyGroup]) -> str:
    """For a column: ``lazy``, or how many layers are not."""
    converted, unpacked = sum(group.converted for group in groups), sum(group.unpacked for group in groups)
    parts = [f"{count} {what}" for count, what in ((converted, "converted"), (unpacked, "unpacked")) if count]
    return ", ".join(parts) or ("not lazy" if groups else "lazy")
