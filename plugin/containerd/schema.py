"""containerd's messages as protobuf classes, built from the tables of :mod:`weenv.plugin.containerd.fields`.

All are in one protobuf package of our own: the wire form knows no package names, and a private package cannot collide with
another library's copy of containerd's descriptors. Method paths carry containerd's names.
"""

from __future__ import annotations

from typing import Any

from weenv.core.proto import Schema
from weenv.plugin.containerd.fields import TABLES

SCHEMA = Schema("weenv.containerd", TABLES)

EMPTY: Any = SCHEMA[".google.protobuf.Empty"]
"""``google.protobuf.Empty``."""

SNAPSHOTS_SERVICE = "containerd.services.snapshots.v1.Snapshots"
"""The service that a proxy snapshotter implements."""

# method: (request, response); SCHEMA keys
SNAPSHOTS_METHODS: dict[str, tuple[str, str]] = {
    "Prepare": ("PrepareSnapshotRequest", "PrepareSnapshotResponse"),
    "View": ("ViewSnapshotRequest", "ViewSnapshotResponse"),
    "Mounts": ("MountsRequest", "MountsResponse"),
    "Commit": ("CommitSnapshotRequest", ".google.protobuf.Empty"),
    "Remove": ("RemoveSnapshotRequest", ".google.protobuf.Empty"),
    "Stat": ("StatSnapshotRequest", "StatSnapshotResponse"),
    "Update": ("UpdateSnapshotRequest", "UpdateSnapshotResponse"),
    "List": ("ListSnapshotsRequest", "ListSnapshotsResponse"),
    "Usage": ("UsageRequest", "UsageResponse"),
    "Cleanup": ("CleanupRequest", ".google.protobuf.Empty"),
}
"""All of its methods; List answers with a stream."""
