"""The composing registry under clients that can only name an image: containerd lazily and plainly, CRI, skopeo."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest

from weenv.core.digest import sha256
from weenv.environment.build import compose
from weenv.environment.compose import Composed
from weenv.environment.gateway.names import spell
from weenv.environment.plan import load_plan, parse_plan
from weenv.registry.client import RegistryClient
from weenv.registry.groupref.resolve import Resolver
from weenv_testkit import tools
from weenv_testkit.containerd import Containerd
from weenv_testkit.corpus import noise
from weenv_testkit.images import Member, write_tar
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import Failed, Process, clean_environment, run
from weenv_testkit.registry import Registry, free_port
from weenv_testkit.skopeo import skopeo
from weenv_testkit.store import Store

_LOUD = re.compile(r"^\S+ (WARNING|ERROR|CRITICAL) |^Traceback ")


class Gateway:
    """``weenv gateway serve`` as users start it; a context manager."""

    def __init__(self, home: str, config: str, *flags: str) -> None:
        self.port = free_port()
        self.host = f"127.0.0.1:{self.port}"
        self.log = os.path.join(home, f"gateway-{self.port}.log")
        self._argv = [
            *tools.weenv(), "gateway", "serve", "--config", config, "--address", self.host, "--log-level", "debug", *flags,
        ]  # fmt: skip
        self._process: Process | None = None

    def start(self) -> None:
        self._process = Process("weenv gateway", self._argv, self.log, clean_environment())
        self._process.wait_ready(self._answers)

    def _answers(self) -> bool:
        try:
            return self.ask("/v2/")[0] == 200
        except OSError:
            return False

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process = None

    def stop(self) -> None:
        if self._process is not None:
            code = self._process.stop()
            self._process = None
            assert code == 0, self.text()

    def text(self) -> str:
        return Path(self.log).read_text(errors="replace")

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def code(self, path: str) -> tuple[int, str]:
        status, _, body = self.ask(path)
        return status, json.loads(body)["errors"][0]["code"]

    def __enter__(self) -> Gateway:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        if kind is None:
            loud = [line for line in self.text().splitlines() if _LOUD.match(line)]
            assert not loud, self.text()[-6000:]


class Groups:
    """A base, a repository and a tool in the registry, in the lazy format; ``plain`` is an ordinary image."""

    def __init__(self, store: Store, registry: Registry) -> None:
        self.base, self.plain = store.lazy("small"), store.plain("pair")
        repository = [
            Member.directory("testbed"), Member("testbed/code", b"one\ntwo\nthree\n"), Member("testbed/large", noise(3 << 20)),
        ]  # fmt: skip
        tool = [Member.directory("opt/tool"), Member("opt/tool/run", b"#!/bin/sh\necho tool $@\n", mode=0o755)]
        self.repository = self._publish(store, registry, "repo", repository, WorkingDir="/testbed")
        self.tool = self._publish(store, registry, "tool", tool, Env=["PATH=/opt/tool:/bin"])

    @staticmethod
    def _publish(store: Store, registry: Registry, name: str, members: list[Member], **config: object) -> str:
        tar = write_tar(os.path.join(store.directory, f"gateway-{name}.tar"), members)
        store.layout.image([store.layout.layer(tar)], f"gateway-{name}", **config)
        target = f"{registry.host}/gateway/{name}:1"
        run(
            *tools.weenv(), "convert", f"oci:{store.layout.directory}:gateway-{name}", target, timeout=120, env=dict(os.environ)
        )
        return target

    @property
    def all(self) -> tuple[str, str, str]:
        return self.base, self.repository, self.tool


@pytest.fixture(scope="module")
def groups(store: Store, registry: Registry) -> Groups:
    os.makedirs(store.directory, exist_ok=True)
    return Groups(store, registry)


def plan_text(*refs: str, more: str = "") -> str:
    listed = "".join(f"  - {ref}\n" for ref in refs)
    return f"apiVersion: weenv.dev/v1\nkind: EnvironmentPlan\ngroups:\n{listed}{more}"


PATCH = """--- a/code
+++ b/code
@@ -1,3 +1,3 @@
 one
-two
+TWO
 three
"""


@pytest.fixture(scope="module")
def plans(home: str, groups: Groups) -> str:
    """A directory with plans; ``task`` patches a file."""
    path = os.path.join(home, "plans")
    os.makedirs(path, exist_ok=True)
    Path(path, "bug.patch").write_text(PATCH)
    more = "mutations:\n  - patch: {file: bug.patch}\n    directory: /testbed\n"
    Path(path, "task.yaml").write_text(plan_text(*groups.all, more=more))
    Path(path, "task@bare.yaml").write_text(plan_text(*groups.all))
    Path(path, "mixed.yaml").write_text(plan_text(groups.plain, groups.tool))
    change = 'mutations:\n  - files: {/etc/weenv-release: "changed\\n"}\n'
    Path(path, "changed.yaml").write_text(plan_text(groups.plain, groups.tool, more=change))
    return path


@pytest.fixture(scope="module")
def gateway(module_node: Node, registry: Registry, plans: str) -> Iterator[Gateway]:
    """One for the module, on the node's own root; its only plans are files, names may stack what is in the registry."""
    flags = ("--plans", plans, "--plans", f"{registry.host}/plans", "--allow", registry.host)
    with Gateway(module_node.home, module_node.config, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def lone(home: str, registry: Registry, plans: str) -> Iterator[Gateway]:
    """One on a node without containerd."""
    config = os.path.join(home, "lone.toml")
    Path(config).write_text(
        f'[snapshotter]\nroot = "{home}/lone"\n[gateway]\nplans = ["{plans}", "{registry.host}/plans"]\n'
        f'groups = ["{registry.host}/**"]\n'
    )
    with Gateway(home, config) as running:
        yield running


def composed(text: str, root: str, source: str = "plan") -> Composed:
    """What ``weenv plan compose`` would register, made apart from the gateway."""

    async def go() -> Composed:
        async with RegistryClient() as client:
            return await compose(parse_plan(text, source), resolver=Resolver(client), root=root)

    return asyncio.run(go())


def tails(image: Composed) -> int:
    """Bytes of the tails of an image's lazy layers."""
    return sum(
        int(layer.ref.annotations["containerd.io/snapshot/weenv.toc"].split(",")[1]) for layer in image.layers if layer.lazy
    )


def test_a_stack_is_pulled_lazily_by_its_name(
    node: Node, gateway: Gateway, groups: Groups, registry: Registry, tmp_path: Path
) -> None:
    ref = f"{gateway.host}/{spell(groups.all)}:latest"
    wanted = composed(plan_text(*groups.all), str(tmp_path))
    mark = registry.mark()
    namespace = node.pull(ref)
    try:
        fetched = sum(registry.blob_bytes(mark).values())
        assert fetched <= tails(wanted) + sum(1 for _ in wanted.layers) + 64 * 1024, "configs and tails, no layer"
        assert node.containerd.content(namespace) >= {wanted.digest, wanted.config_digest}
        assert not node.containerd.content(namespace) & {layer.ref.digest for layer in wanted.layers}
        assert node.shell(ref, "run $PWD; cat code; wc -c < large", namespace) == "tool /testbed\none\ntwo\nthree\n3145728\n"
    finally:
        node.remove_image(ref, namespace)


def test_the_issues_spelling_works_where_the_client_does_not_check(node: Node, gateway: Gateway, groups: Groups) -> None:
    if node.line == "1.7":
        return  # its ctr does not pull lazily, and CRI checks names
    ref = f"{gateway.host}/{spell(groups.all).replace('/and/', '/_/')}:latest"
    node.pull(ref)
    try:
        assert node.shell(ref, "run there", "default") == "tool there\n"
    finally:
        node.remove_image(ref, "default")


def test_a_plan_with_a_patch_is_one_layer_more(
    node: Node, gateway: Gateway, groups: Groups, plans: str, tmp_path: Path
) -> None:
    wanted = composed(Path(plans, "task.yaml").read_text(), str(tmp_path), f"{plans}/task.yaml")
    ref = f"{gateway.host}/plan/task:latest"
    namespace = node.pull(ref)
    try:
        assert node.shell(ref, "cat code; run mutated", namespace) == "one\nTWO\nthree\ntool mutated\n"
    finally:
        node.remove_image(ref, namespace)
    top = wanted.layers[-1].ref
    status, headers, manifest = gateway.ask("/v2/plan/task/manifests/latest")
    assert (status, manifest, headers["docker-content-digest"]) == (200, wanted.manifest, wanted.digest)
    status, _, blob = gateway.ask(f"/v2/plan/task/blobs/{top.digest}")
    assert (status, sha256(blob)) == (200, top.digest), "the node's own layer is served from the node"
    assert json.loads(gateway.ask("/v2/plan/task/tags/list")[2])["tags"] == ["bare", "latest"]


def test_a_layer_that_another_node_made_is_read_from_its_gateway(node: Node, lone: Gateway, groups: Groups, plans: str) -> None:
    """The gateway's node is not the one that starts the image: the mutation's layer is in no registry but this one."""
    more = f"mutations:\n  - files: {{/testbed/far: 'from afar to {node.line}'}}\n"
    Path(plans, f"far-{node.line}.yaml").write_text(plan_text(groups.base, groups.repository, more=more))
    ref = f"{lone.host}/plan/far-{node.line}:latest"
    namespace = node.pull(ref)
    try:
        assert node.shell(ref, "cat far", namespace) == f"from afar to {node.line}"
    finally:
        node.remove_image(ref, namespace)


def test_cri_pulls_and_starts_it(node: Node, gateway: Gateway, plans: str, tmp_path: Path) -> None:
    wanted = composed(Path(plans, "task@bare.yaml").read_text(), str(tmp_path))
    ref = f"{gateway.host}/plan/task:bare"
    with node.cri() as cri:
        node.expect("not.*lazy|unpacked")  # the pause image is an ordinary one
        assert cri.pull(ref) == wanted.config_digest
        assert not node.containerd.content("k8s.io") & {layer.ref.digest for layer in wanted.layers}
        pod = cri.run_pod("gateway")
        try:
            container = cri.start_container(pod, ref, "sleep", "1000")
            assert cri.exec(container, ["run", "cri"]) == "tool cri\n"
            cri.remove_container(container)
        finally:
            cri.remove_pod(pod)
        # By digest, as manifests of Kubernetes are to name images.
        assert cri.pull(f"{gateway.host}/plan/task@{wanted.digest}") == wanted.config_digest
        cri.remove_image(ref)


def test_an_ordinary_client_unpacks_it(plain: Containerd, gateway: Gateway, plans: str) -> None:
    """containerd without us, on overlayfs: an ordinary pull of everything, an ordinary start."""
    for ref, script, said in (
        (
            f"{gateway.host}/plan/task:latest",
            "cat code; wc -c < large; run plainly",
            "one\nTWO\nthree\n3145728\ntool plainly\n",
        ),
        (f"{gateway.host}/plan/mixed:latest", "cat /etc/weenv-release; run mixed", "pair\ntool mixed\n"),
        (f"{gateway.host}/plan/changed:latest", "cat /etc/weenv-release", "changed\n"),
    ):
        plain.pull(ref, snapshotter="overlayfs")
        try:
            assert plain.run(ref, "sh", "-c", script, snapshotter="overlayfs") == said
        finally:
            plain.remove_image(ref)


def test_what_is_not_lazy_falls_back_and_is_said(node: Node, gateway: Gateway) -> None:
    ref = f"{gateway.host}/plan/mixed:latest"
    node.expect("not.*lazy|unpacked")
    namespace = node.pull(ref)
    try:
        assert node.shell(ref, "cat /etc/weenv-release; run mixed", namespace) == "pair\ntool mixed\n"
    finally:
        node.remove_image(ref, namespace)


def test_skopeo_copies_it_with_the_same_digest(lone: Gateway, groups: Groups, policy: str, plans: str, tmp_path: Path) -> None:
    """containers/image checks names, media types, and every digest; podman and CRI-O pull with it."""
    for name, text in (
        ("plan/task", Path(plans, "task.yaml").read_text()),
        (spell(groups.all), plan_text(*groups.all)),
        ("plan/mixed", Path(plans, "mixed.yaml").read_text()),
    ):
        wanted = composed(text, str(tmp_path / "root"), f"{plans}/task.yaml")
        target = str(tmp_path / "copy")
        skopeo(policy, "copy", "--src-tls-verify=false", f"docker://{lone.host}/{name}:latest", f"oci:{target}:x")
        (entry,) = json.loads(Path(target, "index.json").read_text())["manifests"]
        assert entry["digest"] == wanted.digest, name
        blobs = {f"sha256:{blob}" for blob in os.listdir(Path(target, "blobs/sha256"))}
        assert blobs == {wanted.digest, wanted.config_digest, *(layer.ref.digest for layer in wanted.layers)}
        shutil.rmtree(target)
        digest = skopeo(policy, "inspect", "--tls-verify=false", "--format", "{{.Digest}}", f"docker://{lone.host}/{name}")
        assert digest.strip() == wanted.digest


def test_a_plan_out_of_a_registry(lone: Gateway, registry: Registry, policy: str, plans: str, tmp_path: Path) -> None:
    target = f"{registry.host}/plans/team/pushed:1"
    said = json.loads(run(*tools.weenv(), "plan", "push", f"{plans}/task.yaml", target, "--json"))
    assert said["descriptor"]["digest"] == registry.manifest("plans/team/pushed", "1")[1]
    wanted = composed(Path(plans, "task.yaml").read_text(), str(tmp_path), f"{plans}/task.yaml")
    image = f"docker://{lone.host}/plan/team/pushed:1"
    assert skopeo(policy, "inspect", "--tls-verify=false", "--format", "{{.Digest}}", image).strip() == wanted.digest
    assert json.loads(lone.ask("/v2/plan/team/pushed/tags/list")[2])["tags"] == ["1"]
    run(*tools.weenv(), "plan", "pull", target, "-o", str(tmp_path / "back.yaml"))
    assert load_plan(str(tmp_path / "back.yaml")).mutations[0].patch == PATCH


def test_what_is_refused_leaves_nothing(node: Node, gateway: Gateway, registry: Registry, groups: Groups, policy: str) -> None:
    before = node.containerd.content(), node.containerd.ctr("images", "ls", "-q")
    host = registry.host.replace(":", "__")
    for name, wanted in {
        "plan/none": (404, "MANIFEST_UNKNOWN"),
        f"compose/{host}/gateway/none": (404, "MANIFEST_UNKNOWN"),
        f"compose/{host}/gateway/repo__none": (404, "MANIFEST_UNKNOWN"),
        "compose/other.example/x__1": (403, "DENIED"),
        "compose/and/and": (400, "NAME_INVALID"),
        f"{host}/gateway/repo": (400, "NAME_INVALID"),
    }.items():
        assert gateway.code(f"/v2/{name}/manifests/latest") == wanted, name
        with pytest.raises(Failed):
            node.containerd.pull(f"{gateway.host}/{name}:latest", snapshotter=SNAPSHOTTER)
        with pytest.raises(Failed):
            skopeo(policy, "inspect", "--tls-verify=false", f"docker://{gateway.host}/{name}:latest")
    assert (node.containerd.content(), node.containerd.ctr("images", "ls", "-q")) == before


def test_the_gateway_may_be_gone_once_an_image_is_pulled(
    node: Node, registry: Registry, store: Store, groups: Groups, plans: str
) -> None:
    """What was not read yet comes from the registry that the layer's annotation names."""
    data = noise(3 << 20, 17 if node.line == "1.7" else 21)  # of its own: no other test has read it
    late = Groups._publish(store, registry, f"late-{node.line}", [Member("late", data)])
    Path(plans, "late.yaml").write_text(plan_text(groups.base, late))
    with Gateway(node.home, node.config, "--plans", plans) as running:
        ref = f"{running.host}/plan/late:latest"
        namespace = node.pull(ref)
    mark = registry.mark()
    try:
        node.expect("origin|unavailable|retry|source")
        assert node.shell(ref, "sha256sum < late", namespace).split()[0] == sha256(data)[7:]
        assert sum(registry.blob_bytes(mark).values()) > len(data) / 2, "it was read now"
    finally:
        node.remove_image(ref, namespace)


def test_killed_and_started_again_it_goes_on(home: str, registry: Registry, plans: str, groups: Groups) -> None:
    config = os.path.join(home, "killed.toml")
    Path(config).write_text(f'[snapshotter]\nroot = "{home}/killed"\n')
    running = Gateway(home, config, "--plans", plans, "--allow", registry.host, "--blobs", "proxy")
    with running:
        name = spell([groups.repository])
        _, headers, manifest = running.ask(f"/v2/{name}/manifests/latest")
        running.kill()
        running.start()
        assert running.ask(f"/v2/{name}/manifests/{headers['docker-content-digest']}")[2] == manifest
        (layer,) = json.loads(manifest)["layers"]
        status, _, blob = running.ask(f"/v2/{name}/blobs/{layer['digest']}")
        assert (status, sha256(blob)) == (200, layer["digest"])
        status, headers, part = running.ask(f"/v2/{name}/blobs/{layer['digest']}", Range="bytes=100-199")
        assert (status, part, headers["content-range"]) == (206, blob[100:200], f"bytes 100-199/{layer['size']}")


def test_connections_that_ask_nothing_keep_nobody_out(home: str) -> None:
    """Three times as many as it has descriptors, silent and in the middle of a header: whoever asks is answered."""
    config = os.path.join(home, "idle.toml")
    Path(config).write_text(f'[snapshotter]\nroot = "{home}/idle"\n')
    running = Gateway(home, config)
    running._argv = ["prlimit", "--nofile=512:512", *running._argv]
    running.start()
    silent: list[socket.socket] = []
    try:
        for number in range(1500):
            silent.append(socket.create_connection(("127.0.0.1", running.port), timeout=60))
            if number % 2:
                silent[-1].send(b"GET /v2/ HTTP/1.1\r\nHost: x\r\nX: ")
            if not number % 250:
                assert running.ask("/v2/")[0] == 200
        assert running.ask("/v2/")[0] == 200
        kept = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
        for _ in range(3):
            kept.request("GET", "/v2/")
            assert kept.getresponse().read() is not None
        kept.close()
    finally:
        for one in silent:
            one.close()
        running.stop()
    assert running.text().count("no more connections can be accepted") <= 1
    assert "Traceback" not in running.text()


def test_unsigned_groups_are_refused_where_the_policy_asks_for_signatures(
    home: str, registry: Registry, groups: Groups, policy: str, tmp_path: Path
) -> None:
    run(*tools.weenv(), "group", "keygen", str(tmp_path / "team"))
    config = tmp_path / "weenv.toml"
    config.write_text(
        f'[snapshotter]\nroot = "{tmp_path}/root"\n[policy]\ndefault = "deny"\n[[policy.rules]]\n'
        f'match = ["{registry.host}/**"]\nkeys = ["{tmp_path}/team.pub"]\n[gateway]\ngroups = ["{registry.host}"]\n'
        f'plans = ["{registry.host}/plans"]\n'
    )
    run(*tools.weenv(), "group", "copy", groups.tool, f"{registry.host}/gateway/signed:1")
    name, other = spell([f"{registry.host}/gateway/signed:1"]), spell([groups.repository])
    Path(tmp_path, "p.yaml").write_text(plan_text(f"{registry.host}/gateway/signed:1"))
    run(*tools.weenv(), "plan", "push", str(tmp_path / "p.yaml"), f"{registry.host}/plans/signed:1")
    with Gateway(str(tmp_path), str(config)) as running:
        assert running.code(f"/v2/{name}/manifests/latest") == (403, "DENIED")
        with pytest.raises(Failed, match=r"denied|not signed"):
            skopeo(policy, "inspect", "--tls-verify=false", f"docker://{running.host}/{name}:latest")
        run(*tools.weenv(), "group", "sign", "--key", str(tmp_path / "team.key"), f"{registry.host}/gateway/signed:1")
        assert running.ask(f"/v2/{name}/manifests/latest")[0] == 200
        assert running.code(f"/v2/{other}/manifests/latest") == (403, "DENIED"), "signed by nobody"
        assert running.code("/v2/plan/signed/manifests/1") == (403, "DENIED"), "the plan itself is not signed"
        run(*tools.weenv(), "group", "sign", "--key", str(tmp_path / "team.key"), f"{registry.host}/plans/signed:1")
        assert running.ask("/v2/plan/signed/manifests/1")[0] == 200
