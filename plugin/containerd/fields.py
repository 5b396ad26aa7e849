"""Field numbers of containerd's gRPC API, as far as this project uses it; plain data, for any encoder.

Read from the published files ``api/services/*/v1/*.proto`` and ``api/types/*.proto`` of containerd v2.1.9; they are wire
compatible with v1.7.24 and v2.3.4 (protobuf's own rules, and the tags were compared). ``CommitSnapshotRequest.parent``
(number 5) exists since v2.2 (``api/services/snapshots/v1/snapshots.proto``) and is only sent to snapshotters that
announce the capability ``rebase``, which this one does not.

How a table is read: weenv.core.proto.
"""

from __future__ import annotations

from collections.abc import Mapping

FieldTable = Mapping[str, tuple[int, str]]

_TIMESTAMP = ".google.protobuf.Timestamp"
_ANY = ".google.protobuf.Any"
_MASK = ".google.protobuf.FieldMask"
_LABELS = "map<string,string>"

# api/types/{mount,descriptor,event,platform}.proto
_TYPES: dict[str, FieldTable] = {
    "Mount": {"type": (1, "string"), "source": (2, "string"), "target": (3, "string"), "options": (4, "repeated string")},
    "Descriptor": {
        "media_type": (1, "string"),
        "digest": (2, "string"),
        "size": (3, "int64"),
        "annotations": (5, _LABELS),
    },
    "Envelope": {
        "timestamp": (1, _TIMESTAMP),
        "namespace": (2, "string"),
        "topic": (3, "string"),
        "event": (4, _ANY),
    },
    "Platform": {"os": (1, "string"), "architecture": (2, "string"), "variant": (3, "string")},
}

# api/services/snapshots/v1/snapshots.proto; Kind: 0 unknown, 1 view, 2 active, 3 committed
_SNAPSHOTS: dict[str, FieldTable] = {
    "PrepareSnapshotRequest": {
        "snapshotter": (1, "string"),
        "key": (2, "string"),
        "parent": (3, "string"),
        "labels": (4, _LABELS),
    },
    "PrepareSnapshotResponse": {"mounts": (1, "repeated Mount")},
    "ViewSnapshotRequest": {
        "snapshotter": (1, "string"),
        "key": (2, "string"),
        "parent": (3, "string"),
        "labels": (4, _LABELS),
    },
    "ViewSnapshotResponse": {"mounts": (1, "repeated Mount")},
    "MountsRequest": {"snapshotter": (1, "string"), "key": (2, "string")},
    "MountsResponse": {"mounts": (1, "repeated Mount")},
    "RemoveSnapshotRequest": {"snapshotter": (1, "string"), "key": (2, "string")},
    "CommitSnapshotRequest": {
        "snapshotter": (1, "string"),
        "name": (2, "string"),
        "key": (3, "string"),
        "labels": (4, _LABELS),
        "parent": (5, "string"),
    },
    "StatSnapshotRequest": {"snapshotter": (1, "string"), "key": (2, "string")},
    "SnapshotInfo": {
        "name": (1, "string"),
        "parent": (2, "string"),
        "kind": (3, "int32"),
        "created_at": (4, _TIMESTAMP),
        "updated_at": (5, _TIMESTAMP),
        "labels": (6, _LABELS),
    },
    "StatSnapshotResponse": {"info": (1, "SnapshotInfo")},
    "UpdateSnapshotRequest": {"snapshotter": (1, "string"), "info": (2, "SnapshotInfo"), "update_mask": (3, _MASK)},
    "UpdateSnapshotResponse": {"info": (1, "SnapshotInfo")},
    "ListSnapshotsRequest": {"snapshotter": (1, "string"), "filters": (2, "repeated string")},
    "ListSnapshotsResponse": {"info": (1, "repeated SnapshotInfo")},
    "UsageRequest": {"snapshotter": (1, "string"), "key": (2, "string")},
    "UsageResponse": {"size": (1, "int64"), "inodes": (2, "int64")},
    "CleanupRequest": {"snapshotter": (1, "string")},
}

# api/services/images/v1/images.proto
_IMAGES: dict[str, FieldTable] = {
    "Image": {
        "name": (1, "string"),
        "labels": (2, _LABELS),
        "target": (3, "Descriptor"),
        "created_at": (7, _TIMESTAMP),
        "updated_at": (8, _TIMESTAMP),
    },
    "GetImageRequest": {"name": (1, "string")},
    "GetImageResponse": {"image": (1, "Image")},
    "CreateImageRequest": {"image": (1, "Image")},
    "CreateImageResponse": {"image": (1, "Image")},
    "UpdateImageRequest": {"image": (1, "Image"), "update_mask": (2, _MASK)},
    "UpdateImageResponse": {"image": (1, "Image")},
    "ListImagesRequest": {"filters": (1, "repeated string")},
    "ListImagesResponse": {"images": (1, "repeated Image")},
    "DeleteImageRequest": {"name": (1, "string"), "sync": (2, "bool")},
}

# api/services/content/v1/content.proto; WriteAction: 0 stat, 1 write, 2 commit
_CONTENT: dict[str, FieldTable] = {
    "ContentInfo": {
        "digest": (1, "string"),
        "size": (2, "int64"),
        "created_at": (3, _TIMESTAMP),
        "updated_at": (4, _TIMESTAMP),
        "labels": (5, _LABELS),
    },
    "ContentInfoRequest": {"digest": (1, "string")},
    "ContentInfoResponse": {"info": (1, "ContentInfo")},
    "ContentUpdateRequest": {"info": (1, "ContentInfo"), "update_mask": (2, _MASK)},
    "ContentUpdateResponse": {"info": (1, "ContentInfo")},
    "ReadContentRequest": {"digest": (1, "string"), "offset": (2, "int64"), "size": (3, "int64")},
    "ReadContentResponse": {"offset": (1, "int64"), "data": (2, "bytes")},
    "WriteContentRequest": {
        "action": (1, "int32"),
        "ref": (2, "string"),
        "total": (3, "int64"),
        "expected": (4, "string"),
        "offset": (5, "int64"),
        "data": (6, "bytes"),
        "labels": (7, _LABELS),
    },
    "WriteContentResponse": {
        "action": (1, "int32"),
        "started_at": (2, _TIMESTAMP),
        "updated_at": (3, _TIMESTAMP),
        "offset": (4, "int64"),
        "total": (5, "int64"),
        "digest": (6, "string"),
    },
    "AbortRequest": {"ref": (1, "string")},
}

# api/services/diff/v1/diff.proto
_DIFF: dict[str, FieldTable] = {
    "ApplyRequest": {"diff": (1, "Descriptor"), "mounts": (2, "repeated Mount")},
    "ApplyResponse": {"applied": (1, "Descriptor")},
}

# api/services/leases/v1/leases.proto
_LEASES: dict[str, FieldTable] = {
    "Lease": {"id": (1, "string"), "created_at": (2, _TIMESTAMP), "labels": (3, _LABELS)},
    "CreateLeaseRequest": {"id": (1, "string"), "labels": (3, _LABELS)},
    "CreateLeaseResponse": {"lease": (1, "Lease")},
    "DeleteLeaseRequest": {"id": (1, "string"), "sync": (2, "bool")},
    "ListLeasesRequest": {"filters": (1, "repeated string")},
    "ListLeasesResponse": {"leases": (1, "repeated Lease")},
    "LeaseResource": {"id": (1, "string"), "type": (2, "string")},
    "AddResourceRequest": {"id": (1, "string"), "resource": (2, "LeaseResource")},
    "DeleteResourceRequest": {"id": (1, "string"), "resource": (2, "LeaseResource")},
    "ListResourcesRequest": {"id": (1, "string")},
    "ListResourcesResponse": {"resources": (1, "repeated LeaseResource")},
}

# api/services/{version,namespaces,introspection,events}/v1/*.proto
_SMALL: dict[str, FieldTable] = {
    "VersionResponse": {"version": (1, "string"), "revision": (2, "string")},
    "Namespace": {"name": (1, "string"), "labels": (2, _LABELS)},
    "GetNamespaceRequest": {"name": (1, "string")},
    "GetNamespaceResponse": {"namespace": (1, "Namespace")},
    "ListNamespacesRequest": {"filter": (1, "string")},
    "ListNamespacesResponse": {"namespaces": (1, "repeated Namespace")},
    "CreateNamespaceRequest": {"namespace": (1, "Namespace")},
    "CreateNamespaceResponse": {"namespace": (1, "Namespace")},
    "DeleteNamespaceRequest": {"name": (1, "string")},
    "Plugin": {
        "type": (1, "string"),
        "id": (2, "string"),
        "requires": (3, "repeated string"),
        "platforms": (4, "repeated Platform"),
        "exports": (5, _LABELS),
        "capabilities": (6, "repeated string"),
        "init_err": (7, "RpcStatus"),
    },
    "RpcStatus": {"code": (1, "int32"), "message": (2, "string")},  # google/rpc/status.proto
    "PluginsRequest": {"filters": (1, "repeated string")},
    "PluginsResponse": {"plugins": (1, "repeated Plugin")},
    "ServerResponse": {"uuid": (1, "string"), "pid": (2, "uint64"), "pidns": (3, "uint64")},
    "SubscribeRequest": {"filters": (1, "repeated string")},
}

# api/services/{tasks,containers}/v1/*.proto and api/types/task/task.proto;
# Status: 0 unknown, 1 created, 2 running, 3 stopped, 4 paused, 5 pausing
_RUNTIME: dict[str, FieldTable] = {
    "Process": {
        "container_id": (1, "string"),
        "id": (2, "string"),
        "pid": (3, "uint32"),
        "status": (4, "int32"),
        "stdin": (5, "string"),
        "stdout": (6, "string"),
        "stderr": (7, "string"),
        "terminal": (8, "bool"),
        "exit_status": (9, "uint32"),
        "exited_at": (10, _TIMESTAMP),
    },
    "ProcessInfo": {"pid": (1, "uint32"), "info": (2, _ANY)},
    "CreateTaskRequest": {
        "container_id": (1, "string"),
        "rootfs": (3, "repeated Mount"),
        "stdin": (4, "string"),
        "stdout": (5, "string"),
        "stderr": (6, "string"),
        "terminal": (7, "bool"),
        "checkpoint": (8, "Descriptor"),
        "options": (9, _ANY),
        "runtime_path": (10, "string"),
    },
    "CreateTaskResponse": {"container_id": (1, "string"), "pid": (2, "uint32")},
    "StartRequest": {"container_id": (1, "string"), "exec_id": (2, "string")},
    "StartResponse": {"pid": (1, "uint32")},
    "DeleteTaskRequest": {"container_id": (1, "string")},
    "DeleteProcessRequest": {"container_id": (1, "string"), "exec_id": (2, "string")},
    "DeleteResponse": {"id": (1, "string"), "pid": (2, "uint32"), "exit_status": (3, "uint32"), "exited_at": (4, _TIMESTAMP)},
    "GetTaskRequest": {"container_id": (1, "string"), "exec_id": (2, "string")},
    "GetTaskResponse": {"process": (1, "Process")},
    "ListTasksRequest": {"filter": (1, "string")},
    "ListTasksResponse": {"tasks": (1, "repeated Process")},
    "KillRequest": {"container_id": (1, "string"), "exec_id": (2, "string"), "signal": (3, "uint32"), "all": (4, "bool")},
    "ExecProcessRequest": {
        "container_id": (1, "string"),
        "stdin": (2, "string"),
        "stdout": (3, "string"),
        "stderr": (4, "string"),
        "terminal": (5, "bool"),
        "spec": (6, _ANY),
        "exec_id": (7, "string"),
    },
    "PauseTaskRequest": {"container_id": (1, "string")},
    "ResumeTaskRequest": {"container_id": (1, "string")},
    "ListPidsRequest": {"container_id": (1, "string")},
    "ListPidsResponse": {"processes": (1, "repeated ProcessInfo")},
    "UpdateTaskRequest": {"container_id": (1, "string"), "resources": (2, _ANY), "annotations": (3, _LABELS)},
    "ResizePtyRequest": {
        "container_id": (1, "string"),
        "exec_id": (2, "string"),
        "width": (3, "uint32"),
        "height": (4, "uint32"),
    },
    "CloseIORequest": {"container_id": (1, "string"), "exec_id": (2, "string"), "stdin": (3, "bool")},
    "Metric": {"timestamp": (1, _TIMESTAMP), "id": (2, "string"), "data": (3, _ANY)},  # api/types/metrics.proto
    "MetricsRequest": {"filters": (1, "repeated string")},
    "MetricsResponse": {"metrics": (1, "repeated Metric")},
    "WaitRequest": {"container_id": (1, "string"), "exec_id": (2, "string")},
    "WaitResponse": {"exit_status": (1, "uint32"), "exited_at": (2, _TIMESTAMP)},
    "ContainerRuntime": {"name": (1, "string"), "options": (2, _ANY)},
    "Container": {
        "id": (1, "string"),
        "labels": (2, _LABELS),
        "image": (3, "string"),
        "runtime": (4, "ContainerRuntime"),
        "spec": (5, _ANY),
        "snapshotter": (6, "string"),
        "snapshot_key": (7, "string"),
        "created_at": (8, _TIMESTAMP),
        "updated_at": (9, _TIMESTAMP),
        "extensions": (10, "map<string,.google.protobuf.Any>"),
        "sandbox": (11, "string"),
    },
    "GetContainerRequest": {"id": (1, "string")},
    "GetContainerResponse": {"container": (1, "Container")},
    "ListContainersRequest": {"filters": (1, "repeated string")},
    "ListContainersResponse": {"containers": (1, "repeated Container")},
    "CreateContainerRequest": {"container": (1, "Container")},
    "CreateContainerResponse": {"container": (1, "Container")},
    "UpdateContainerRequest": {"container": (1, "Container"), "update_mask": (2, _MASK)},
    "UpdateContainerResponse": {"container": (1, "Container")},
    "DeleteContainerRequest": {"id": (1, "string")},
}

# api/events/task.proto: what arrives in Envelope.event for the topics /tasks/*
_EVENTS: dict[str, FieldTable] = {
    "TaskCreate": {"container_id": (1, "string"), "bundle": (2, "string"), "pid": (6, "uint32")},
    "TaskStart": {"container_id": (1, "string"), "pid": (2, "uint32")},
    "TaskDelete": {
        "container_id": (1, "string"),
        "pid": (2, "uint32"),
        "exit_status": (3, "uint32"),
        "exited_at": (4, _TIMESTAMP),
        "id": (5, "string"),
    },
    "TaskExit": {
        "container_id": (1, "string"),
        "id": (2, "string"),
        "pid": (3, "uint32"),
        "exit_status": (4, "uint32"),
        "exited_at": (5, _TIMESTAMP),
    },
    "TaskOOM": {"container_id": (1, "string")},
    "TaskExecAdded": {"container_id": (1, "string"), "exec_id": (2, "string")},
    "TaskExecStarted": {"container_id": (1, "string"), "exec_id": (2, "string"), "pid": (3, "uint32")},
    "TaskPaused": {"container_id": (1, "string")},
    "TaskResumed": {"container_id": (1, "string")},
}

# api/types/runc/options/oci.proto, package containerd.runc.v1
_RUNC: dict[str, FieldTable] = {
    "RuncOptions": {"binary_name": (6, "string"), "root": (7, "string"), "systemd_cgroup": (9, "bool")},
}

TABLES: dict[str, FieldTable] = {
    **_TYPES, **_SNAPSHOTS, **_IMAGES, **_CONTENT, **_DIFF, **_LEASES, **_SMALL, **_RUNTIME, **_EVENTS, **_RUNC,
}  # fmt: skip
"""All messages."""
