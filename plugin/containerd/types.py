"""Plain values of containerd's API: what the rest of the project handles instead of protobuf messages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from weenv.plugin.containerd.schema import SCHEMA

NAMESPACE_HEADER = "containerd-namespace"
LEASE_HEADER = "containerd-lease"

LABEL_SNAPSHOT_REF = "containerd.io/snapshot.ref"
"""On Prepare: the chainID that the unpacker wants; on a committed snapshot: the chainID that it is."""
LABEL_NOT_LAZY = "containerd.io/snapshot/weenv.not-lazy"
"""On an active snapshot that was asked for as a lazy layer: why it is not one, and in a second line what to do."""
LABEL_PREFIX = "containerd.io/snapshot/"
"""Labels (and layer annotations) with this prefix reach the snapshotter (core/snapshots/snapshotter.go, v2.1.9)."""


class Kind(IntEnum):
    """Kinds of snapshots, with containerd's numbers."""

    UNKNOWN = 0
    VIEW = 1
    ACTIVE = 2
    COMMITTED = 3


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount as containerd describes it: filesystem type, source, fstab-style options."""

    type: str
    source: str
    options: tuple[str, ...] = ()
    target: str = ""

    def to_proto(self) -> Any:
        """The message."""
        return SCHEMA["Mount"](type=self.type, source=self.source, target=self.target, options=self.options)

    @classmethod
    def from_proto(cls, message: Any) -> Mount:
        """From the message."""
        return cls(message.type, message.source, tuple(message.options), message.target)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """An OCI descriptor."""

    media_type: str
    digest: str
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict)

    def to_proto(self) -> Any:
        """The message."""
        return SCHEMA["Descriptor"](
            media_type=self.media_type, digest=self.digest, size=self.size, annotations=dict(self.annotations)
        )

    @classmethod
    def from_proto(cls, message: Any) -> Descriptor:
        """From the message."""
        return cls(message.media_type, message.digest, message.size, dict(message.annotations))


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """What Stat and List say of a snapshot. ``created`` and ``updated`` are nanoseconds since 1970."""

    name: str
    parent: str
    kind: Kind
    created: int
    updated: int
    labels: Mapping[str, str] = field(default_factory=dict)

    def to_proto(self) -> Any:
        """The message."""
        message = SCHEMA["SnapshotInfo"](name=self.name, parent=self.parent, kind=int(self.kind), labels=dict(self.labels))
        set_timestamp(message.created_at, self.created)
        set_timestamp(message.updated_at, self.updated)
        return message

    @classmethod
    def from_proto(cls, message: Any) -> SnapshotInfo:
        """From the message; an unknown kind becomes ``UNKNOWN``."""
        kind = Kind(message.kind) if message.kind in (1, 2, 3) else Kind.UNKNOWN
        return cls(
            message.name,
            message.parent,
            kind,
            nanoseconds(message.created_at),
            nanoseconds(message.updated_at),
            dict(message.labels),
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Disk used by a snapshot: bytes and inodes."""

    size: int = 0
    inodes: int = 0


@dataclass(frozen=True, slots=True)
class Image:
    """An image record: a name and what it points to. ``created`` is in nanoseconds since 1970, the server's business."""

    name: str
    target: Descriptor
    labels: Mapping[str, str] = field(default_factory=dict)
    created: int = 0

    def to_proto(self) -> Any:
        """The message (times are the server's business)."""
        return SCHEMA["Image"](name=self.name, target=self.target.to_proto(), labels=dict(self.labels))

    @classmethod
    def from_proto(cls, message: Any) -> Image:
        """From the message."""
        return cls(
            message.name, Descriptor.from_proto(message.target), dict(message.labels), nanoseconds(message.created_at)
        )


@dataclass(frozen=True, slots=True)
class ContentInfo:
    """A blob in containerd's content store."""

    digest: str
    size: int
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_proto(cls, message: Any) -> ContentInfo:
        """From the message."""
        return cls(message.digest, message.size, dict(message.labels))


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease: keeps resources from containerd's garbage collector."""

    id: str
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_proto(cls, message: Any) -> Lease:
        """From the message."""
        return cls(message.id, dict(message.labels))


def set_timestamp(message: Any, nanos: int) -> None:
    """Fill a ``google.protobuf.Timestamp``."""
    message.seconds, message.nanos = divmod(nanos, 1_000_000_000)


def nanoseconds(message: Any) -> int:
    """A ``google.protobuf.Timestamp`` in nanoseconds since 1970."""
    return int(message.seconds) * 1_000_000_000 + int(message.nanos)


def now() -> int:
    """The present in nanoseconds since 1970."""
    return time.time_ns()
