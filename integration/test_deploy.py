"""The DaemonSet of deploy/kubernetes, run for real: a few lines do with it through CRI what a kubelet would.

Its pod serves a node's lazy images, is deleted and made anew under a reader, and never needs itself to start.
"""

from __future__ import annotations

import hashlib
import os
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml

from weenv_testkit import tools
from weenv_testkit.corpus import noise
from weenv_testkit.cri import EXITED, NAMESPACE_NODE, NAMESPACE_POD, SCHEMA, Cri, Pod
from weenv_testkit.images import Member
from weenv_testkit.kube import DEPLOY, KubeNode, layer_digests, lazy_image, pod_network
from weenv_testkit.procs import Failed, connects, mounts_under, run, unmount_under, wait_until
from weenv_testkit.registry import Registry, free_port
from weenv_testkit.store import Store

PROPAGATION = {"None": 0, "HostToContainer": 1, "Bidirectional": 2}
"""Kubernetes' words -> CRI's MountPropagation."""


CAPABILITIES = {"DAC_OVERRIDE": 1, "FOWNER": 3, "KILL": 5, "SYS_PTRACE": 19, "SYS_RESOURCE": 24}
"""Those that the manifests name -> their numbers (include/uapi/linux/capability.h)."""


class Kubelet:
    """One DaemonSet's pod on one node. Paths of the manifest become this node's own, inside of the pod and outside."""

    def __init__(self, node: KubeNode, cri: Cri, image: str, manifest: str = "weenv", settings: str = "") -> None:
        self.node, self.cri, self.image = node, cri, image
        places = {"/var/lib/weenv": node.root, "/run/weenv": node.run, "/run/containerd": node.containerd.home}
        texts = {name: (DEPLOY / "kubernetes" / f"{name}.yaml").read_text() for name in ("weenv", manifest)}
        assert "group=$each/weenv\n" in texts["weenv"]
        group = f"$each/{node.containerd.cgroup}/daemons"  # goes with the node
        texts = {name: text.replace("$each/weenv", group) for name, text in texts.items()}
        texts = {name: text.replace("/run/weenv/pod.pid", f"{node.run}/pod.pid") for name, text in texts.items()}
        for theirs, ours in places.items():
            texts = {name: text.replace(f"path: {theirs}", f"path: {ours}") for name, text in texts.items()}
            texts = {name: text.replace(f"mountPath: {theirs}", f"mountPath: {ours}") for name, text in texts.items()}
        shared_documents = {document["kind"]: document for document in yaml.safe_load_all(texts["weenv"])}
        self.handler = shared_documents["RuntimeClass"]["handler"]
        documents = {document["kind"]: document for document in yaml.safe_load_all(texts[manifest])}
        self.template = documents["DaemonSet"]["spec"]["template"]
        self.config = f"{node.home}/etc-{manifest}"
        os.makedirs(f"{self.config}/plans")
        with open(node.config) as source, open(f"{self.config}/config.toml", "w") as file:
            file.write(source.read() + settings)
        self.logs = f"{node.home}/logs-{manifest}"
        os.makedirs(self.logs)
        self.pod: Pod | None = None

    def log(self) -> str:
        """What the pod's container has said."""
        with open(f"{self.logs}/log", errors="replace") as file:
            return file.read()[-3000:]

    def _mounts(self, container: dict[str, Any]) -> list[Any]:
        volumes = {volume["name"]: volume for volume in self.template["spec"]["volumes"]}
        found = []
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if "secret" in volume:
                continue  # optional, and not there
            if "hostPath" in volume:
                path = volume["hostPath"]["path"]
                os.makedirs(path, exist_ok=True)
            else:
                name = "plans" if volume["name"] == "plans" else mount.get("subPath", "")
                path = os.path.join(self.config, name)
            found.append(
                SCHEMA["Mount"](
                    container_path=mount["mountPath"],
                    host_path=path,
                    readonly=mount.get("readOnly", False),
                    propagation=PROPAGATION[mount.get("mountPropagation", "None")],
                )
            )
        return found

    def start(self) -> str:
        """Make the pod; the container's id."""
        spec = self.template["spec"]
        options = SCHEMA["NamespaceOption"](network=NAMESPACE_NODE if spec["hostNetwork"] else 0)
        options.pid = NAMESPACE_NODE if spec.get("hostPID") else 0
        (container,) = spec["containers"]
        asked = container["securityContext"]
        privileged = asked["privileged"]
        capabilities = asked.get("capabilities", {})
        security = {
            "readonly_rootfs": asked.get("readOnlyRootFilesystem", False),
            "no_new_privs": not asked.get("allowPrivilegeEscalation", True),
            "capabilities": SCHEMA["Capability"](
                add_capabilities=[name for name in capabilities.get("add", ()) if grantable(name)],
                drop_capabilities=capabilities.get("drop", ()),
            ),
        }
        annotations = self.template["metadata"]["annotations"]
        self.cri.pull(self.image, annotations=annotations)
        self.pod = self.cri.run_pod(
            "system", annotations, options=options, handler=self.handler, privileged=privileged, logs=self.logs
        )
        here = [SCHEMA["Mount"](container_path=path, host_path=path, readonly=True) for path in of_this_machine()]
        environment = {one["name"]: one["value"] for one in container.get("env", ())}
        environment |= {"PATH": f"{os.path.dirname(sys.executable)}:/usr/sbin:/usr/bin:/sbin:/bin"}
        if "PYTHONPATH" in os.environ:
            environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
        return self.cri.start_container(
            self.pod,
            self.image,
            *container["command"],
            mounts=[*self._mounts(container), *here],
            environment=environment,
            security=security,
        )

    def wait(self, container: str, check: Callable[[], object]) -> None:
        """Wait until the pod does what it is for. Raises Failed with its log."""

        def done() -> bool:
            if self.cri.status(container).state == EXITED:
                raise Failed("the pod's container has ended")
            return bool(check())

        try:
            wait_until("the pod to serve", done, 60, 0.1)
        except Failed as error:
            raise Failed(f"{error}\n{self.log()}") from None

    def delete(self) -> None:
        """As ``kubectl delete pod``."""
        assert self.pod is not None
        self.cri.remove_pod(self.pod)
        self.pod = None


def grantable(name: str) -> bool:
    """Whether this machine's own processes may have a capability; a test machine may lack SYS_RESOURCE."""
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith("CapBnd:")]
    return bool(int(line.split()[1], 16) >> CAPABILITIES[name] & 1)


def of_this_machine() -> list[str]:
    """What the image would hold: the interpreter, its libraries, this clone."""
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    places = {"/usr", "/lib", "/lib64", "/bin", "/sbin", sys.prefix, sys.base_prefix, own}
    kept = sorted(path for path in places if path and os.path.isdir(path))
    return [path for path in kept if not any(path != other and path.startswith(other + "/") for other in kept)]


@contextmanager
def shared(path: str) -> Iterator[None]:
    """A directory whose mounts others see, as every directory is where systemd runs."""
    run("mount", "--bind", path, path)
    run("mount", "--make-rshared", path)
    try:
        yield
    finally:
        unmount_under(path)
        run("umount", "-l", path, check=False)


@pytest.fixture(scope="module")
def kubelet(line: str, home: str, workdir: str, registry: Registry, store: Store) -> Iterator[Kubelet]:
    for path in (workdir, home):
        os.chmod(path, 0o711)  # the root of a pod in a user namespace is nobody here
    path = os.path.join(home, f"d{line}")
    os.mkdir(path)
    store.pause()
    with shared(path):
        node = KubeNode(line, path, registry=registry.host, settings={"blobfs.fill": "enabled = false"}, system=True)
        if line != "1.7":
            node.containerd.runc = tools.new_runc()  # it kills by control group only, and knows id-mapped mounts
        try:
            node.containerd.start()
            with node.cri() as cri:
                yield Kubelet(node, cri, store.plain("small"))
        finally:
            node.close()


def serving(node: KubeNode) -> bool:
    """Seen from the node: the socket answers, and the data's mount has come out of the pod."""
    return connects(node.socket) and node.blobs in mounts_under(node.run)


def again(call: Callable[[], str]) -> str:
    """Nothing where containerd has not found the snapshotter's new socket yet, which takes seconds; a kubelet tries again."""
    try:
        return call()
    except Failed as error:
        if "connection error" not in str(error):
            raise
        return ""


def test_its_pod_serves_the_node_and_is_replaced_under_readers(kubelet: Kubelet, registry: Registry, home: str) -> None:
    node, cri = kubelet.node, kubelet.cri
    content = noise(6 << 20, 800)
    files = [Member(f"data/{number}", content[number:]) for number in range(3)]
    ref = lazy_image(home, registry, f"ds{node.line}", *files)
    container = kubelet.start()

    kubelet.wait(container, lambda: serving(node))
    wait_until("containerd to have found the socket", lambda: again(lambda: cri.pull(ref)), 60, 0.5)
    assert not [each for each in node.containerd.content("k8s.io") if each in layer_digests(registry, ref)], "it is lazy"
    pod = cri.run_pod("task")
    script = "until test -e /go; do sleep 0.05; done; cat /data/1 | sha256sum > /sum; sleep 1000"
    reader = cri.start_container(pod, ref, "sh", "-c", script)
    assert cri.exec(reader, ["sh", "-c", "sha256sum < /data/0"]).split()[0] == hashlib.sha256(content).hexdigest()
    kubelet.delete()
    assert node.blobs in mounts_under(node.run), "what keeps the mount outlives the pod"
    # From outside: with no server, even a program that was read before may have to wait, if the kernel has dropped its pages.
    root = node.rootfs(reader, "k8s.io")
    with open(f"{root}/go", "w"):
        pass
    replaced = kubelet.start()
    kubelet.wait(replaced, lambda: serving(node))
    wait_until("the reader to have read on", lambda: os.path.getsize(f"{root}/sum") if os.path.exists(f"{root}/sum") else 0, 60)
    with open(f"{root}/sum") as file:
        assert file.read().split()[0] == hashlib.sha256(content[1:]).hexdigest()
    other = wait_until("a container to start", lambda: again(lambda: cri.start_container(pod, ref, "sleep", "1000")), 60, 0.5)
    assert cri.exec(other, ["sh", "-c", "sha256sum < /data/2"]).split()[0] == hashlib.sha256(content[2:]).hexdigest()
    cri.remove_pod(pod)
    check_user_namespace(kubelet, ref)
    cri.remove_image(ref)
    kubelet.delete()


def check_user_namespace(kubelet: Kubelet, ref: str) -> None:
    """What the daemons' pod mounts with mapped ids comes out of it with mapped ids."""
    node, cri = kubelet.node, kubelet.cri
    pod_network(node.containerd)
    wait_until("the network to be known", lambda: cri.ready("NetworkReady"), 60, 0.1)
    ids = [SCHEMA["IDMapping"](host_id=300_000, container_id=0, length=65536)]
    options = SCHEMA["NamespaceOption"](network=NAMESPACE_POD, userns_options=SCHEMA["UserNamespace"](uids=ids, gids=ids))
    pod = cri.run_pod("mapped", options=options)
    container = cri.start_container(pod, ref, "sleep", "1000")
    assert cri.exec(container, ["sh", "-c", "stat -c '%u %g' /data/0; echo x > /data/0; cat /data/0"]) == "0 0\nx\n"
    cri.remove_pod(pod)


def test_elastic_daemon_and_gateway_have_all_they_need(kubelet: Kubelet) -> None:
    """They run with the capabilities, the read-only root and the mounts that their manifests give them, and no more."""
    node, cri = kubelet.node, kubelet.cri
    port = free_port()
    settings = f"""
[run]
address = "{node.containerd.socket}"
[elastic.serve]
root = "{node.root}/elastic"
socket = "{node.run}/e.sock"
[nri]
enabled = false
[gateway]
address = "127.0.0.1:{port}"
plans = ["/etc/weenv/plans"]
"""
    elastic = Kubelet(node, cri, kubelet.image, "elastic", settings)
    elastic.wait(elastic.start(), lambda: connects(f"{node.run}/e.sock"))
    gateway = Kubelet(node, cri, kubelet.image, "gateway", settings)

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    gateway.wait(gateway.start(), answers)
    for each in (elastic, gateway):
        assert not [line for line in each.log().splitlines() if '"error"' in line or "Traceback" in line], each.log()
        each.delete()
