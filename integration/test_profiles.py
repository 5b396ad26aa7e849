"""Read profiles: recorded on one node, published to a real registry, fetched ahead on another that never saw the image."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from weenv_testkit import corpus, images, tools
from weenv_testkit.images import Layout, Member, write_tar
from weenv_testkit.node import Node, close_all
from weenv_testkit.procs import run, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.skopeo import skopeo
from weenv_testkit.store import Store

ANNOTATION = "containerd.io/snapshot/weenv.prefetch"
NO_FILL = {"blobfs.fill": "enabled = false"}
FILES = {f"data/{name}": corpus.noise(3 << 20, 80 + number) for number, name in enumerate("abcdef")}
SCRIPT = "sha256sum /data/e /data/b | cut -c 1-16"
EXPECTED = "".join(f"{images.hashlib.sha256(FILES[name]).hexdigest()[:16]}\n" for name in ("data/e", "data/b"))

MakeNode = Callable[..., Node]


@pytest.fixture(scope="module", params=["2.1", pytest.param("1.7", marks=pytest.mark.soak)])
def line(request: pytest.FixtureRequest) -> str:
    """The daemons under test are the same for both lines; the older one is for the soak run."""
    return str(request.param)


@pytest.fixture(scope="module")
def image(workdir: str, registry: Registry) -> str:
    """Repository of a converted image that no other test has: busybox and six files of noise."""
    scratch = tempfile.mkdtemp(prefix="pr", dir=workdir)
    layout = Layout(os.path.join(scratch, "layout"))
    base = write_tar(os.path.join(scratch, "base.tar"), images.busybox_members())
    members = [Member.directory("data"), *(Member(name, data) for name, data in FILES.items())]
    top = write_tar(os.path.join(scratch, "top.tar"), members)
    layout.image([layout.layer(base), layout.layer(top)], "profiled")
    run(*tools.weenv(), "convert", f"oci:{layout.directory}:profiled", f"{registry.host}/own/profiled:lazy")
    shutil.rmtree(scratch)
    return "own/profiled"


@pytest.fixture
def make_node(home: str, line: str, registry: Registry, store: Store) -> Iterator[MakeNode]:
    """Start a node; it is gone at the end, and has complained of nothing."""
    nodes: list[Node] = []
    store.pause()

    def make() -> Node:
        node = Node(line, tempfile.mkdtemp(prefix="n", dir=home), registry=registry.host, settings=NO_FILL)
        nodes.append(node)
        node.start()
        return node

    yield make
    close_all(nodes)


def weenv(node: Node, *arguments: str) -> str:
    """Output of ``weenv profile`` on a node."""
    return run(*tools.weenv(), "profile", *arguments, "--config", node.config)


def frames(node: Node, priority: str) -> int:
    """Frames that a node has fetched for a purpose."""
    return int(node.blobfs.metric("weenv_blobfs_frames_total", priority=priority))


def test_what_one_node_reads_another_fetches_before_it_is_read(
    make_node: MakeNode, image: str, registry: Registry, policy: str
) -> None:
    lazy, profiled = (f"{registry.host}/{image}:{tag}" for tag in ("lazy", "profiled"))
    first = make_node()
    assert first.shell(lazy, SCRIPT, first.pull(lazy)) == EXPECTED
    rows: list[dict[str, Any]] = json.loads(weenv(first, "show", lazy, "--json"))
    assert all(row["node"] and not row["manifest"] for row in rows)
    mark = registry.mark()
    weenv(first, "publish", lazy, profiled)
    assert not [one for one in registry.requests(mark) if one.method in ("POST", "PATCH")], "no blob is pushed"
    before, after = (registry.manifest(image, tag)[0] for tag in ("lazy", "profiled"))
    plain = json.loads(json.dumps(after))
    for layer in plain["layers"]:
        assert len(layer["annotations"].pop(ANNOTATION)) < 200
    assert before == plain, "nothing else of the manifest has changed"

    # Of busybox it says as much rubbish as containerd takes for a label.
    after["layers"][0]["annotations"][ANNOTATION] = "1," + "A" * (4096 - len(ANNOTATION) - 2)  # type: ignore[index]
    registry.push_manifest(image, "profiled", json.dumps(after).encode(), str(after["mediaType"]))
    assert json.loads(skopeo(policy, "inspect", "--raw", "--tls-verify=false", f"docker://{profiled}")) == after
    second = make_node()
    second.expect("a layer's profile is not used")
    namespace = second.pull(profiled)
    assert frames(second, "prefetch") == 0, "a pull stays metadata only"
    assert second.shell(profiled, "echo started", namespace) == "started\n"
    wait_until("the profile to be fetched", lambda: "profile names was fetched" in second.blobfs.log_text(), 60)
    assert frames(second, "prefetch") == rows[1]["node"]["frames"], "nothing else has read of that layer yet"
    mark = registry.mark()
    assert second.shell(profiled, SCRIPT, namespace) == EXPECTED
    top = after["layers"][1]["digest"]  # type: ignore[index]
    assert top not in registry.blob_bytes(mark), "all that the commands read of it was there"
    assert 0 < second.blobfs.metric("weenv_blobfs_prefetch_used_total") <= frames(second, "prefetch")
    again = json.loads(weenv(second, "show", profiled, "--json"))
    assert all(row["node"] for row in again) and again[1]["manifest"], "it has recorded what it used"
    assert "not used" in again[0]["reason"]
    assert second.snapshotter.metric("weenv_snapshotter_fallbacks_total") == 0
    second.containerd.pull(profiled, snapshotter="overlayfs", namespace="others")
    assert second.containerd.run(profiled, "sh", "-c", SCRIPT, snapshotter="overlayfs", namespace="others") == EXPECTED
    second.containerd.purge("others", "overlayfs")


@pytest.mark.soak
def test_an_environment_composed_of_a_profiled_group_prefetches(
    make_node: MakeNode, image: str, registry: Registry, store: Store
) -> None:
    base, group, profiled = store.lazy("small"), f"{registry.host}/{image}:group", f"{registry.host}/{image}:group-profiled"
    cli = [*tools.weenv(), "group"]
    run(*cli, "build", group, "--kind", "tools", "--from-image", f"{registry.host}/{image}:lazy", "--layers", "2..2")

    def environment(node: Node, ref: str, script: str) -> str:
        path = os.path.join(node.home, "plan.yaml")
        with open(path, "w") as file:
            plan = {"apiVersion": "weenv.dev/v1", "kind": "EnvironmentPlan", "metadata": {"name": "profiled"}}
            json.dump({**plan, "groups": [base, ref]}, file)
        config = node.run_config()
        return run(*tools.weenv(), "run", "--config", config, "--rm", path, "--", "sh", "-c", script)

    first = make_node()
    assert environment(first, group, SCRIPT) == EXPECTED
    weenv(first, "publish", group, profiled)
    copied = f"{registry.host}/{image}-copy:1"
    run(*cli, "copy", profiled, copied)
    second = make_node()
    assert environment(second, copied, "echo started") == "started\n"
    wait_until("the profile to be fetched", lambda: "profile names was fetched" in second.blobfs.log_text(), 60)
    mark = registry.mark()
    assert environment(second, copied, SCRIPT) == EXPECTED
    manifest, _ = registry.manifest(f"{image}-copy", "1")
    assert manifest["layers"][0]["digest"] not in registry.blob_bytes(mark)  # type: ignore[index]
