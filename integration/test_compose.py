"""Groups meet only when an environment starts: plans composed under real containerd, run, collected, composed again."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from weenv.environment.compose import Composed, NotLazyError, compose_image, is_registered, register
from weenv.environment.composed import remove, unused
from weenv.environment.model import GroupUse, Plan, PlanConfig
from weenv.plugin.containerd.client import Client, ContainerdError
from weenv.registry.client import RegistryClient
from weenv.registry.groupref.resolve import Resolver
from weenv_testkit import tools
from weenv_testkit.images import Member, write_tar
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import run, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store


class Groups:
    """Three groups in the registry, in the lazy format, and one that is not."""

    def __init__(self, store: Store, registry: Registry) -> None:
        self.base = store.lazy("small")
        self.plain = store.plain("small")
        tool = [
            Member.directory("opt"),
            Member.directory("opt/tool"),
            Member("opt/tool/run", b"#!/bin/sh\necho tool $@\n", mode=0o755),
        ]
        repository = [
            Member.directory("testbed"), Member("testbed/code", b"code\n"), Member("testbed/gone", b"x"),
            Member.directory("testbed/full"), Member("testbed/full/below", b"x"),
        ]  # fmt: skip
        over = [
            Member.directory("testbed"), Member("testbed/.wh.gone"), Member.directory("testbed/full"),
            Member("testbed/full/.wh..wh..opq"), Member("testbed/full/above", b"y"), Member("opt/tool/extra", b"z"),
        ]  # fmt: skip
        self.tool = self._publish(store, registry, "tool", tool, Env=["PATH=/opt/tool:/bin", "TOOL=1"], Cmd=["run", "default"])
        self.repository = self._publish(store, registry, "repo", repository, WorkingDir="/testbed")
        self.over = self._publish(store, registry, "over", over)

    @staticmethod
    def _publish(store: Store, registry: Registry, name: str, members: list[Member], **config: Any) -> str:
        tar = write_tar(os.path.join(store.directory, f"group-{name}.tar"), members)
        store.layout.image([store.layout.layer(tar)], f"group-{name}", **config)
        target = f"{registry.host}/groups/{name}:1"
        run(*tools.weenv(), "convert", f"oci:{store.layout.directory}:group-{name}", target, timeout=120, env=dict(os.environ))
        return target


@pytest.fixture(scope="module")
def groups(store: Store, registry: Registry) -> Groups:
    os.makedirs(store.directory, exist_ok=True)
    return Groups(store, registry)


def plan(*refs: str, **more: Any) -> Plan:
    return Plan("test", tuple(GroupUse(ref) for ref in refs), **more)


async def compose(plan: Plan) -> Composed:
    async with RegistryClient() as client:
        resolver = Resolver(client)
        return compose_image(plan, await resolver.resolve_all(use.ref for use in plan.groups))


def on(node: Node, work: Any, namespace: str = "default") -> Any:
    """Run ``work(namespace client)`` against the node's containerd."""

    async def go() -> Any:
        async with Client(node.containerd.socket) as client:
            result = work(client.namespace(namespace))
            return await result if isinstance(result, Coroutine) else result

    return asyncio.run(go())


def test_a_plan_starts_and_nothing_was_downloaded(node: Node, groups: Groups, registry: Registry) -> None:
    image = asyncio.run(compose(plan(groups.base, groups.repository, groups.tool, groups.over)))
    mark = registry.mark()
    assert on(node, lambda ns: register(image, ns)).new
    assert not on(node, lambda ns: register(image, ns)).new, "composing twice is free"
    assert node.containerd.content() == {image.digest, image.config_digest}
    assert all(request.status == 206 for request in registry.requests(mark) if request.method == "GET"), "tails only"
    out = node.shell(
        image.name, "pwd; run hello; ls; ls full; cat code; echo $TOOL; cat /opt/tool/extra", "default"
    ).splitlines()
    assert out == ["/testbed", "tool hello", "code", "full", "above", "code", "1", "z"]


def test_the_same_plan_is_the_same_image_everywhere(groups: Groups) -> None:
    wanted = plan(groups.base, groups.tool, config=PlanConfig(env={"A": "1"}, labels={"x": "y"}))
    first, second = asyncio.run(compose(wanted)), asyncio.run(compose(wanted))
    assert (first.name, first.digest, first.manifest, first.config) == (
        second.name,
        second.digest,
        second.manifest,
        second.config,
    )
    other = asyncio.run(compose(plan(groups.tool, groups.base)))
    assert other.digest != first.digest


def test_every_namespace_and_cri_start_it(node: Node, groups: Groups) -> None:
    image = asyncio.run(compose(plan(groups.base, groups.tool)))
    for namespace in ("moby", "k8s.io"):
        assert on(node, lambda ns: register(image, ns), namespace).new
        assert node.shell(image.name, "run there", namespace) == "tool there\n"
    with node.cri() as cri:
        node.expect("not.*lazy|unpacked")  # the pause image is an ordinary one
        pod = cri.run_pod("composed")
        try:
            container = cri.start_container(pod, image.name, "sleep", "1000")
            assert cri.exec(container, ["run", "cri"]) == "tool cri\n"
            cri.remove_container(container)
        finally:
            cri.remove_pod(pod)
    node.containerd.purge("moby", SNAPSHOTTER)


def test_a_restart_keeps_it_and_removal_lets_containerd_collect_it(node: Node, groups: Groups) -> None:
    image = asyncio.run(compose(plan(groups.base, groups.over)))
    on(node, lambda ns: register(image, ns), "keep")
    node.containerd.restart()
    assert on(node, lambda ns: is_registered(image, ns, SNAPSHOTTER), "keep")
    assert node.shell(image.name, "cat /testbed/full/above", "keep") == "y"
    node.containerd.remove_image(image.name, "keep")
    node.containerd.collect()
    wait_until("the collection", lambda: not node.containerd.snapshots(SNAPSHOTTER, "keep"), 60)
    assert not node.containerd.content("keep")


ROOT = {"containerd.io/gc.root": "1"}


def test_what_plans_left_goes_where_nothing_stands_on_it(node: Node, groups: Groups) -> None:
    """A container's record keeps its image, and so does a snapshot alone: docker has no record of what is stopped."""
    idle, recorded, stood_on = (
        asyncio.run(compose(plan(*refs))) for refs in ([groups.base], [groups.base, groups.tool], [groups.base, groups.over])
    )
    for image in (idle, recorded, stood_on):
        on(node, lambda ns, image=image: register(image, ns), "left")  # type: ignore[misc]
    node.containerd.ctr("containers", "create", "--snapshotter", SNAPSHOTTER, recorded.name, "one", namespace="left")
    on(node, lambda ns: ns.snapshots(SNAPSHOTTER).prepare("two", stood_on.chain, ROOT), "left")

    def found(before: float | None = None) -> tuple[set[str], int]:
        images, others = on(node, lambda ns: unused(ns, SNAPSHOTTER, before), "left")
        return {image.name for image in images}, others

    assert found(time.time() - 3600) == (set(), 3)
    assert found() == ({idle.name}, 2)
    argv = [*tools.weenv(), "image", "prune", "--all", "--config", node.run_config("left"), "--json"]
    assert json.loads(run(*argv, timeout=120)) == {"removed": [idle.name], "kept": 2, "dry_run": False}
    assert node.containerd.content("left") == {blob for i in (recorded, stood_on) for blob in (i.digest, i.config_digest)}
    node.containerd.remove_container("one", "left")
    on(node, lambda ns: ns.snapshots(SNAPSHOTTER).remove("two"), "left")
    images, others = on(node, lambda ns: unused(ns, SNAPSHOTTER, time.time() + 3600), "left")
    assert ({image.name for image in images}, others) == ({recorded.name, stood_on.name}, 0)
    assert on(node, lambda ns: remove(ns, [*images, images[0]]), "left") == 2
    wait_until("the collection", lambda: not node.containerd.snapshots(SNAPSHOTTER, "left"), 60)
    assert on(node, lambda ns: register(recorded, ns), "left").new, "what is run again is composed again"
    assert node.shell(recorded.name, "run again", "left") == "tool again\n"
    node.containerd.purge("left", SNAPSHOTTER)


def test_a_layer_that_is_not_lazy_is_said_and_leaves_nothing(node: Node, groups: Groups) -> None:
    image = asyncio.run(compose(plan(groups.base, groups.plain)))
    assert not image.lazy
    node.expect("not.*lazy|unpacked")
    with pytest.raises(NotLazyError, match="not in the lazy format"):
        on(node, lambda ns: register(image, ns), "none")
    node.containerd.collect()
    wait_until("the collection", lambda: not node.containerd.snapshots(SNAPSHOTTER, "none"), 60)
    assert not node.containerd.content("none")


def test_a_registry_on_the_node_is_trusted_once_the_operator_names_it(
    line: str, home: str, registry: Registry, groups: Groups, tmp_path: Path
) -> None:
    """Nothing in the configuration names it: the first thing that anybody tries."""
    path = os.path.join(home, f"own{line}")
    os.mkdir(path)
    with Node(line, path, registry="registry.invalid") as own:
        own.expect("not.*lazy|which is this node")
        image = asyncio.run(compose(plan(groups.base, groups.tool)))
        with pytest.raises(NotLazyError, match=f"its source annotation names {registry.host}") as refused:
            on(own, lambda ns: register(image, ns))
        assert f'allow_sources = ["{registry.host}"]' in refused.value.hint
        wanted = tmp_path / "plan.yaml"
        wanted.write_text(
            "apiVersion: weenv.dev/v1\nkind: EnvironmentPlan\nmetadata: {name: own}\n"
            f"groups:\n  - {groups.base}\n  - {groups.tool}\n"
        )
        made = run(*tools.weenv(), "plan", "compose", str(wanted), "--config", own.run_config(), timeout=60).strip()
        assert own.shell(made, "run it", "default") == "tool it\n"
        assert os.stat(os.path.join(own.root, "trusted-hosts")).st_mode & 0o777 == 0o600
        assert _doctor(own.run_config())["plugin"]["state"] == "ok"
        other = tmp_path / "other.toml"
        other.write_text(Path(own.run_config()).read_text() + 'snapshotter = "absent"\n')
        found = _doctor(str(other))
        assert found["containerd"]["state"] == "ok" and own.containerd.socket in found["containerd"]["seen"]
        assert found["plugin"]["state"] == "fail" and "[proxy_plugins.absent]" in found["plugin"]["remedy"]
        with pytest.raises(ContainerdError, match="has no snapshotter 'absent'") as absent:
            on(own, lambda ns: register(image, ns, snapshotter="absent"))
        assert "[proxy_plugins.absent]" in absent.value.hint


def _doctor(config: str) -> dict[str, dict[str, str]]:
    argv = [*tools.weenv(), "doctor", "--config", config, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    return {row["name"]: row for row in json.loads(done.stdout)}
