"""A minimal CRI client: what kubelet asks of containerd, over its own socket.

Field numbers are those of kubernetes/cri-api v0.34.0, pkg/apis/runtime/v1/api.proto; Debian packages no crictl.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc

from weenv.core.proto import Schema
from weenv_testkit.containerd import Containerd
from weenv_testkit.procs import Failed

NAMESPACE_POD = 0
NAMESPACE_NODE = 2
"""NamespaceMode NODE: the pod shares the host's namespace, so no CNI is needed for the network."""
EXITED = 2
"""ContainerState CONTAINER_EXITED."""

SCHEMA = Schema(
    "runtime.v1",
    {
        "ImageSpec": {"image": (1, "string"), "annotations": (2, "map<string,string>"), "user_specified_image": (18, "string")},
        "AuthConfig": {"username": (1, "string"), "password": (2, "string")},
        "PullImageRequest": {"image": (1, "ImageSpec"), "auth": (2, "AuthConfig"), "sandbox_config": (3, "PodSandboxConfig")},
        "PullImageResponse": {"image_ref": (1, "string")},
        "ImageStatusRequest": {"image": (1, "ImageSpec"), "verbose": (2, "bool")},
        "Image": {
            "id": (1, "string"),
            "repo_tags": (2, "repeated string"),
            "repo_digests": (3, "repeated string"),
            "size": (4, "uint64"),
            "pinned": (8, "bool"),
        },
        "ImageStatusResponse": {"image": (1, "Image")},
        "RuntimeCondition": {"type": (1, "string"), "status": (2, "bool")},
        "RuntimeStatus": {"conditions": (1, "repeated RuntimeCondition")},
        "StatusResponse": {"status": (1, "RuntimeStatus")},
        "ListImagesRequest": {},
        "ListImagesResponse": {"images": (1, "repeated Image")},
        "RemoveImageRequest": {"image": (1, "ImageSpec")},
        "Empty": {},
        "UInt64Value": {"value": (1, "uint64")},
        "FilesystemIdentifier": {"mountpoint": (1, "string")},
        "FilesystemUsage": {
            "timestamp": (1, "int64"),
            "fs_id": (2, "FilesystemIdentifier"),
            "used_bytes": (3, "UInt64Value"),
            "inodes_used": (4, "UInt64Value"),
        },
        "ImageFsInfoResponse": {
            "image_filesystems": (1, "repeated FilesystemUsage"),
            "container_filesystems": (2, "repeated FilesystemUsage"),
        },
        "PodSandboxMetadata": {"name": (1, "string"), "uid": (2, "string"), "namespace": (3, "string")},
        "IDMapping": {"host_id": (1, "uint32"), "container_id": (2, "uint32"), "length": (3, "uint32")},
        "UserNamespace": {"mode": (1, "int32"), "uids": (2, "repeated IDMapping"), "gids": (3, "repeated IDMapping")},
        "NamespaceOption": {
            "network": (1, "int32"),
            "pid": (2, "int32"),
            "ipc": (3, "int32"),
            "userns_options": (5, "UserNamespace"),
        },
        "LinuxSandboxSecurityContext": {"namespace_options": (1, "NamespaceOption"), "privileged": (6, "bool")},
        "LinuxPodSandboxConfig": {"cgroup_parent": (1, "string"), "security_context": (2, "LinuxSandboxSecurityContext")},
        "PodSandboxConfig": {
            "metadata": (1, "PodSandboxMetadata"),
            "hostname": (2, "string"),
            "log_directory": (3, "string"),
            "annotations": (7, "map<string,string>"),
            "linux": (8, "LinuxPodSandboxConfig"),
        },
        "RunPodSandboxRequest": {"config": (1, "PodSandboxConfig"), "runtime_handler": (2, "string")},
        "PodSandboxId": {"pod_sandbox_id": (1, "string")},
        "ContainerMetadata": {"name": (1, "string"), "attempt": (2, "uint32")},
        "Capability": {"add_capabilities": (1, "repeated string"), "drop_capabilities": (2, "repeated string")},
        "LinuxContainerSecurityContext": {
            "capabilities": (1, "Capability"),
            "privileged": (2, "bool"),
            "namespace_options": (3, "NamespaceOption"),
            "readonly_rootfs": (7, "bool"),
            "no_new_privs": (11, "bool"),
        },
        "KeyValue": {"key": (1, "string"), "value": (2, "string")},
        "Mount": {
            "container_path": (1, "string"),
            "host_path": (2, "string"),
            "readonly": (3, "bool"),
            "propagation": (5, "int32"),
        },
        "LinuxContainerResources": {
            "cpu_period": (1, "int64"),
            "cpu_quota": (2, "int64"),
            "memory_limit_in_bytes": (4, "int64"),
        },
        "LinuxContainerConfig": {
            "resources": (1, "LinuxContainerResources"),
            "security_context": (2, "LinuxContainerSecurityContext"),
        },
        "UpdateContainerResourcesRequest": {"container_id": (1, "string"), "linux": (2, "LinuxContainerResources")},
        "ContainerConfig": {
            "metadata": (1, "ContainerMetadata"),
            "image": (2, "ImageSpec"),
            "command": (3, "repeated string"),
            "args": (4, "repeated string"),
            "envs": (6, "repeated KeyValue"),
            "mounts": (7, "repeated Mount"),
            "log_path": (11, "string"),
            "linux": (15, "LinuxContainerConfig"),
        },
        "CreateContainerRequest": {
            "pod_sandbox_id": (1, "string"),
            "config": (2, "ContainerConfig"),
            "sandbox_config": (3, "PodSandboxConfig"),
        },
        "ContainerId": {"container_id": (1, "string")},
        "ExecSyncRequest": {"container_id": (1, "string"), "cmd": (2, "repeated string"), "timeout": (3, "int64")},
        "ExecSyncResponse": {"stdout": (1, "bytes"), "stderr": (2, "bytes"), "exit_code": (3, "int32")},
        "StopContainerRequest": {"container_id": (1, "string"), "timeout": (2, "int64")},
        "ContainerStatus": {"id": (1, "string"), "state": (3, "int32"), "exit_code": (7, "int32")},
        "ContainerStatusResponse": {"status": (1, "ContainerStatus")},
        "ContainerAttributes": {"id": (1, "string")},
        "MemoryUsage": {"timestamp": (1, "int64"), "working_set_bytes": (2, "UInt64Value")},
        "ContainerStats": {
            "attributes": (1, "ContainerAttributes"),
            "memory": (3, "MemoryUsage"),
            "writable_layer": (4, "FilesystemUsage"),
        },
        "ContainerStatsResponse": {"stats": (1, "ContainerStats")},
        "ContainerStatsFilter": {"pod_sandbox_id": (2, "string")},
        "ListContainerStatsRequest": {"filter": (1, "ContainerStatsFilter")},
        "ListContainerStatsResponse": {"stats": (1, "repeated ContainerStats")},
    },
)


def resources(cpu: float, memory: int) -> Any:
    """LinuxContainerResources; what is 0 is left out."""
    made = SCHEMA["LinuxContainerResources"](memory_limit_in_bytes=memory)
    if cpu:
        made.cpu_period, made.cpu_quota = 100_000, round(cpu * 100_000)
    return made


class Pod:
    """A running sandbox and the configuration that CRI wants to see again for each container."""

    def __init__(self, identity: str, config: Any) -> None:
        self.id = identity
        self.config = config


class Cri:
    """CRI of one containerd; a context manager. Errors are Failed, with the daemon's own words."""

    def __init__(self, containerd: Containerd) -> None:
        self._cgroup = containerd.cgroup
        self._channel = grpc.insecure_channel(f"unix:{containerd.socket}")

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> Cri:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _call(self, service: str, method: str, request: Any, answer: str = "Empty", timeout: float = 120) -> Any:
        call = self._channel.unary_unary(
            f"/runtime.v1.{service}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=SCHEMA[answer].FromString,
        )
        try:
            # A channel that saw the daemon away fails for a while after it is back, unless it is asked to wait.
            return call(request, timeout=timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            raise Failed(f"CRI {method}: {error.code().name}: {error.details()}") from None

    def ready(self, condition: str) -> bool:
        """Whether Status calls a condition (``RuntimeReady``, ``NetworkReady``) true."""
        status = self._call("RuntimeService", "Status", SCHEMA["Empty"](), "StatusResponse").status
        return any(one.type == condition and one.status for one in status.conditions)

    # -- images -------------------------------------------------------------------------------------------------

    def pull(
        self, ref: str, login: tuple[str, str] | None = None, *, annotations: Mapping[str, str] | None = None
    ) -> str:
        """PullImage, with user name and password and a pod's annotations as kubelet sends them; the image's id."""
        request = SCHEMA["PullImageRequest"](image=SCHEMA["ImageSpec"](image=ref))
        if annotations:
            metadata = SCHEMA["PodSandboxMetadata"](name="pull", uid="pull", namespace="weenv-test")
            request.sandbox_config.MergeFrom(SCHEMA["PodSandboxConfig"](metadata=metadata, annotations=dict(annotations)))
        if login is not None:
            request.auth.username, request.auth.password = login
        return str(self._call("ImageService", "PullImage", request, "PullImageResponse").image_ref)

    def image(self, ref: str) -> Any:
        """ImageStatus: an Image, or None where there is none."""
        request = SCHEMA["ImageStatusRequest"](image=SCHEMA["ImageSpec"](image=ref))
        answer = self._call("ImageService", "ImageStatus", request, "ImageStatusResponse")
        return answer.image if answer.HasField("image") else None

    def images(self) -> list[Any]:
        """ListImages."""
        return list(self._call("ImageService", "ListImages", SCHEMA["ListImagesRequest"](), "ListImagesResponse").images)

    def image_filesystems(self) -> list[Any]:
        """ImageFsInfo: FilesystemUsage of where images are stored."""
        return list(self._call("ImageService", "ImageFsInfo", SCHEMA["Empty"](), "ImageFsInfoResponse").image_filesystems)

    def remove_image(self, ref: str) -> None:
        """RemoveImage; containerd collects what it held some time later."""
        self._call("ImageService", "RemoveImage", SCHEMA["RemoveImageRequest"](image=SCHEMA["ImageSpec"](image=ref)))

    # -- pods ---------------------------------------------------------------------------------------------------

    def run_pod(
        self,
        name: str,
        annotations: Mapping[str, str] | None = None,
        *,
        options: Any = None,
        handler: str = "",
        privileged: bool = False,
        logs: str = "",
    ) -> Pod:
        """RunPodSandbox, with the node's network where ``options`` (NamespaceOption) do not say otherwise.

        ``logs``: a directory where its containers log to file ``log``.
        """
        unique = f"weenv-{name}-{secrets.token_hex(4)}"
        options = options or SCHEMA["NamespaceOption"](network=NAMESPACE_NODE)
        config = SCHEMA["PodSandboxConfig"](
            metadata=SCHEMA["PodSandboxMetadata"](name=unique, uid=unique, namespace="weenv-test"),
            annotations=dict(annotations or {}),
            log_directory=logs,
            linux=SCHEMA["LinuxPodSandboxConfig"](
                cgroup_parent=f"/{self._cgroup}/{unique}",  # kubelet would make and remove it
                security_context=SCHEMA["LinuxSandboxSecurityContext"](namespace_options=options, privileged=privileged),
            ),
        )
        request = SCHEMA["RunPodSandboxRequest"](config=config, runtime_handler=handler)
        return Pod(self._call("RuntimeService", "RunPodSandbox", request, "PodSandboxId").pod_sandbox_id, config)

    def start_container(
        self,
        pod: Pod,
        ref: str,
        *command: str,
        cpu: float = 0.0,
        memory: int = 0,
        mounts: Sequence[Any] = (),
        environment: Mapping[str, str] | None = None,
        security: Mapping[str, Any] | None = None,
    ) -> str:
        """CreateContainer and StartContainer; the container's id. ``cpu`` (cores) and ``memory`` (bytes): limits; 0: none.

        ``security``: further fields of its LinuxContainerSecurityContext.
        """
        sandbox = pod.config.linux.security_context
        config = SCHEMA["ContainerConfig"](
            metadata=SCHEMA["ContainerMetadata"](name=f"c-{secrets.token_hex(4)}"),
            image=SCHEMA["ImageSpec"](image=ref),
            command=command,
            log_path="log" if pod.config.log_directory else "",
            mounts=mounts,
            envs=[SCHEMA["KeyValue"](key=key, value=value) for key, value in (environment or {}).items()],
            linux=SCHEMA["LinuxContainerConfig"](
                security_context=SCHEMA["LinuxContainerSecurityContext"](
                    namespace_options=sandbox.namespace_options, privileged=sandbox.privileged, **(security or {})
                )
            ),
        )
        config.linux.resources.MergeFrom(resources(cpu, memory))
        request = SCHEMA["CreateContainerRequest"](pod_sandbox_id=pod.id, config=config, sandbox_config=pod.config)
        identity = str(self._call("RuntimeService", "CreateContainer", request, "ContainerId").container_id)
        self._call("RuntimeService", "StartContainer", SCHEMA["ContainerId"](container_id=identity))
        return identity

    def update(self, container: str, *, cpu: float = 0.0, memory: int = 0) -> None:
        """UpdateContainerResources; 0 leaves a limit as it is."""
        request = SCHEMA["UpdateContainerResourcesRequest"](container_id=container, linux=resources(cpu, memory))
        self._call("RuntimeService", "UpdateContainerResources", request)

    def exec(self, container: str, command: Sequence[str], timeout: int = 60) -> str:
        """ExecSync; its standard output. Raises Failed where it exits non-zero."""
        request = SCHEMA["ExecSyncRequest"](container_id=container, cmd=command, timeout=timeout)
        answer = self._call("RuntimeService", "ExecSync", request, "ExecSyncResponse")
        if answer.exit_code:
            raise Failed(f"{command} ended with {answer.exit_code}: {answer.stderr.decode(errors='replace')}")
        return str(answer.stdout.decode(errors="surrogateescape"))

    def status(self, container: str) -> Any:
        """ContainerStatus."""
        request = SCHEMA["ContainerId"](container_id=container)
        return self._call("RuntimeService", "ContainerStatus", request, "ContainerStatusResponse").status

    def stats(self, container: str) -> Any:
        """ContainerStats."""
        request = SCHEMA["ContainerId"](container_id=container)
        return self._call("RuntimeService", "ContainerStats", request, "ContainerStatsResponse").stats

    def list_stats(self, pod: Pod) -> list[Any]:
        """ListContainerStats of one pod."""
        request = SCHEMA["ListContainerStatsRequest"](filter=SCHEMA["ContainerStatsFilter"](pod_sandbox_id=pod.id))
        return list(self._call("RuntimeService", "ListContainerStats", request, "ListContainerStatsResponse").stats)

    def stop_container(self, container: str, timeout: int = 0) -> None:
        """StopContainer."""
        self._call("RuntimeService", "StopContainer", SCHEMA["StopContainerRequest"](container_id=container, timeout=timeout))

    def remove_container(self, container: str) -> None:
        """StopContainer without grace, then RemoveContainer."""
        self.stop_container(container)
        self._call("RuntimeService", "RemoveContainer", SCHEMA["ContainerId"](container_id=container))

    def remove_pod(self, pod: Pod) -> None:
        """StopPodSandbox and RemovePodSandbox, with everything in it."""
        self._call("RuntimeService", "StopPodSandbox", SCHEMA["PodSandboxId"](pod_sandbox_id=pod.id))
        self._call("RuntimeService", "RemovePodSandbox", SCHEMA["PodSandboxId"](pod_sandbox_id=pod.id))
