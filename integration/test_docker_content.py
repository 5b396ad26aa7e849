"""Images that leave docker: save, push, export and load of what was never fetched, compared with dockerd on overlayfs.

The right result or a clear error; where docker itself says nothing (``save``), ``weenv image fetch`` makes it right.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest

from weenv.cli.main import main
from weenv.plugin.containerd.client import Client
from weenv_testkit import corpus, tools
from weenv_testkit.containerd import Containerd
from weenv_testkit.dockerd import NAMESPACE, Dockerd, shell
from weenv_testkit.images import Member, busybox_members, write_tar, xattr
from weenv_testkit.node import Node
from weenv_testkit.notlazy import Publisher, harness
from weenv_testkit.procs import Failed, run, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store

IDLE = ["tail", "-f", "/dev/null"]
CONFIG = {"Env": ["PATH=/bin", "A=b"], "WorkingDir": "/opt", "Cmd": ["cat", "/opt/top"], "Labels": {"x": "y"}}


def odd_layers() -> list[list[Member]]:
    """Layers with what archives of file systems get wrong: links, whiteouts, attributes, devices, odd names."""
    program = next(member.data for member in busybox_members() if member.name == "bin/busybox")
    middle = [
        Member.directory("opt"), Member("opt/data", corpus.noise(3 << 20), mode=0o640, uid=3_000_000, gid=7),
        Member("opt/one", b"linked\n"), Member.hardlink("opt/two", "opt/one"), Member.directory("opt/sub", 0o2775, gid=1000),
        Member.hardlink("opt/sub/three", "opt/one"), Member("opt/suid", program, mode=0o4755),
        Member("opt/marked", b"x\n", pax=xattr("user.colour", "blau")),
        Member("opt/capable", program, mode=0o755, pax=xattr("security.capability", corpus.CAPABILITY)),
        Member("opt/fifo", kind=tarfile.FIFOTYPE), Member("opt/null", kind=tarfile.CHRTYPE, mode=0o666, device=(1, 3)),
        Member("opt/gone", b"x"), Member.directory("opt/opaque"), Member("opt/opaque/below", b"x"),
        Member.symlink("opt/out", "/../../etc"), Member("opt/n\xe4me \n", b"odd\n"), Member("opt/empty"),
    ]  # fmt: skip
    top = [
        Member.directory("opt"), Member("opt/.wh.gone"), Member.directory("opt/opaque", 0o711),
        Member("opt/opaque/.wh..wh..opq"), Member("opt/opaque/above", b"seen\n"), Member("opt/top", b"top\n"),
    ]  # fmt: skip
    return [busybox_members(), middle, top]


@dataclass(frozen=True)
class Pair:
    """One image in the registry: as it was built, and converted."""

    plain: str
    lazy: str


@pytest.fixture(scope="module")
def odd(store: Store, registry: Registry) -> Pair:
    """An image with everything that archives get wrong."""
    os.makedirs(store.directory, exist_ok=True)
    tars = [write_tar(os.path.join(store.directory, f"odd-{n}.tar"), layer) for n, layer in enumerate(odd_layers())]
    store.layout.image([store.layout.layer(tar) for tar in tars], "docker-odd", **CONFIG)
    plain = store.layout.push("docker-odd", registry, "docker/odd", "plain")
    lazy = f"{registry.host}/docker/odd:lazy"
    run(*tools.weenv(), "convert", f"oci:{store.layout.directory}:docker-odd", lazy, timeout=120, env=dict(os.environ))
    return Pair(plain, lazy)


@pytest.fixture(scope="module")
def ordinary(plain: Containerd, home: str) -> Iterator[Dockerd]:
    """dockerd with overlayfs on a containerd without us: the other node, and what is compared against."""
    path = os.path.join(home, f"o{plain.line}")
    os.mkdir(path)
    with Dockerd(path, plain, snapshotter="overlayfs") as running:
        yield running
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def other(home: str) -> Iterator[Registry]:
    """Another registry, which has nothing."""
    path = os.path.join(home, "other")
    os.makedirs(path, exist_ok=True)
    with Registry(path) as running:
        yield running


@pytest.fixture
def lazy(client: docker.DockerClient, node: Node, odd: Pair) -> Iterator[str]:
    """The image, pulled lazily: docker has none of its layers. Gone afterwards."""
    client.images.pull(odd.lazy)
    yield odd.lazy
    for name in json.loads(weenv(node, "ls", "--json")[0]):
        client.images.remove(name["name"], force=True)
    node.containerd.collect()
    wait_until("its content to go", lambda: not node.containerd.content(NAMESPACE))


@pytest.fixture
def one_line(node: Node) -> None:
    """For what is ours alone, and the same on both lines: once is enough."""
    if node.line == "1.7":
        pytest.skip("runs on the other line")


def weenv(node: Node, *arguments: str, check: int = 0) -> tuple[str, str]:
    """``weenv image ...`` in docker's namespace, in this process: what it prints; ``check`` is the code it ends with."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), pytest.raises(SystemExit) as ended:
        main(["image", *arguments, "--config", node.run_config(NAMESPACE)])
    assert ended.value.code == check, (ended.value.code, out.getvalue(), error.getvalue())
    return out.getvalue(), error.getvalue()


def members(path: Path) -> dict[str, Any]:
    """What an archive of a file system says of each name; a file's content by its digest, a hard link as what it links to."""
    found: dict[str, Any] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            data = tar.extractfile(member) if member.isfile() else None
            pax = {key: value for key, value in member.pax_headers.items() if key.startswith("SCHILY")}
            found[member.name] = (
                member.type, oct(member.mode), member.uid, member.gid, member.size, member.linkname,
                (member.devmajor, member.devminor), int(member.mtime), pax,
                hashlib.file_digest(data, "sha256").hexdigest() if data is not None else "",  # type: ignore[arg-type]
            )  # fmt: skip
    return found


def blobs_of(path: Path) -> set[str]:
    """Digests of the blobs in an archive of ``docker save``."""
    with tarfile.open(path) as tar:
        return {"sha256:" + name.rpartition("/")[2] for name in tar.getnames() if name.startswith("blobs/sha256/")}


# -- save --------------------------------------------------------------------------------------------------------------


def test_save_of_what_was_never_fetched_and_of_what_was(
    dockerd: Dockerd, ordinary: Dockerd, lazy: str, node: Node, registry: Registry, tmp_path: Path
) -> None:
    """``docker save`` leaves out what is not there and succeeds: this is docker's doing. After a fetch it has all of it."""
    manifest, digest = registry.manifest("docker/odd", "lazy")
    layers = {layer["digest"] for layer in manifest["layers"]}
    dockerd.cli("save", lazy, "--output", str(tmp_path / "hole.tar"))
    assert not blobs_of(tmp_path / "hole.tar") & layers, "docker got better: docs/docker.md may say so"
    out, error = weenv(node, "fetch", "--check", lazy, check=1)
    assert out == "" and "3 blobs of 4 missing" in error and "weenv image fetch" in error
    if dockerd.version == "28":  # the one form of save that says so
        with pytest.raises(Failed, match="does not provide the specified platform"):
            dockerd.cli("save", "--platform", "linux/amd64", lazy, "--output", str(tmp_path / "none.tar"))
    mark = registry.mark()
    out, _ = weenv(node, "fetch", lazy)
    assert "3 blobs fetched" in out
    had = registry.blob_bytes(mark)
    assert {layer: had[layer] for layer in layers} == {layer["digest"]: layer["size"] for layer in manifest["layers"]}
    assert weenv(node, "fetch", "--check", lazy) == (f"{lazy}: all there\n", "")
    node.containerd.collect()
    assert node.containerd.content(NAMESPACE) == {digest, manifest["config"]["digest"], *layers}
    dockerd.cli("save", lazy, "--output", str(tmp_path / "whole.tar"))
    assert blobs_of(tmp_path / "whole.tar") >= layers
    ordinary.cli("load", "--input", str(tmp_path / "whole.tar"))
    script = "cd /opt; cat top opaque/* one; ls gone 2>&1 | wc -l; stat -c '%a %u %g %h' data one sub suid; echo $A; pwd"
    with dockerd.client() as here, ordinary.client() as there:
        assert there.images.get(lazy).id == digest
        assert shell(there, lazy, script) == shell(here, lazy, script)
        there.images.remove(lazy)
    assert weenv(node, "fetch", lazy)[0] == f"{lazy}: all there\n"


def test_docker_sees_all_of_an_image_that_was_fetched(
    dockerd: Dockerd, client: docker.DockerClient, lazy: str, node: Node
) -> None:
    """What each version does not show before: 26 lists no lazy image, 28 inspects it without its config (docs/docker.md)."""

    def seen() -> tuple[bool, bool]:
        listed = any(lazy in image.tags for image in client.images.list())
        config = client.images.get(lazy).attrs["Config"]
        return listed, config.get("Env") == CONFIG["Env"] and config.get("WorkingDir") == "/opt"

    assert seen() == ((False, True) if dockerd.version == "26" else (True, False))
    assert shell(client, lazy, "echo $A; pwd") == ["b", "/opt"], "the config counts, whatever is shown of it"
    assert client.containers.run(lazy, network_mode="none", remove=True) == b"top\n"
    weenv(node, "fetch", client.images.get(lazy).short_id.removeprefix("sha256:"))
    assert seen() == (True, True)
    assert client.images.get(lazy).attrs["Architecture"] and len(client.images.get(lazy).attrs["RootFS"]["Layers"]) == 3
    assert lazy.rpartition(":")[0] in dockerd.cli("images")


def test_fetching_a_committed_image(
    dockerd: Dockerd, ordinary: Dockerd, client: docker.DockerClient, lazy: str, node: Node, tmp_path: Path
) -> None:
    container = client.containers.create(lazy, IDLE, network_mode="none")
    container.start()
    assert container.exec_run(["sh", "-c", "echo more >> /opt/top; rm /opt/one"]).exit_code == 0
    container.commit("committed", "1")
    container.remove(force=True)
    try:
        listed = {item["name"]: item for item in json.loads(weenv(node, "ls", "--json")[0])}
        assert len(listed["docker.io/library/committed:1"]["missing"]) == 3, "of four layers one is the commit's own"
        weenv(node, "fetch", "committed:1")
        dockerd.cli("save", "committed:1", "--output", str(tmp_path / "c.tar"))
        ordinary.cli("load", "--input", str(tmp_path / "c.tar"))
        with ordinary.client() as there:
            assert shell(there, "committed:1", "cd /opt; cat top two opaque/above; ls one 2>&1 | wc -l") == [
                "top", "more", "linked", "seen", "1",
            ]  # fmt: skip
            there.images.remove("committed:1")
    finally:
        client.images.remove("committed:1", force=True)


def test_fetching_a_composed_image_whose_groups_are_not_all_lazy(
    one_line: None, dockerd: Dockerd, ordinary: Dockerd, client: docker.DockerClient, node: Node, store: Store,
    registry: Registry, tmp_path: Path,
) -> None:  # fmt: skip
    """Its layers are in several repositories, its mutations on the node alone."""
    publish = Publisher(store, registry)
    tool = publish.plain("docker-tool", publish.layer("docker-tool", harness("docker")))
    plan = tmp_path / "plan.yaml"
    groups = json.dumps([store.lazy("small"), tool])
    plan.write_text(
        "apiVersion: weenv.dev/v1\nkind: EnvironmentPlan\nmetadata: {name: saved}\n"
        f"groups: {groups}\nmutations: [{{files: {{/task: 'mend it'}}}}]\n"
    )
    config = node.run_config(NAMESPACE)
    name = run(*tools.weenv(), "plan", "compose", str(plan), "--config", config).strip().splitlines()[-1]
    try:
        assert "3 blobs fetched" in weenv(node, "fetch", name)[0]
        dockerd.cli("save", name, "--output", str(tmp_path / "c.tar"))
        ordinary.cli("load", "--input", str(tmp_path / "c.tar"))
        with ordinary.client() as there:
            script = "/opt/agent/go now; cat /task; echo; ls /testbed/full"
            assert shell(there, name, script) == shell(client, name, script) == ["agent docker now", "mend it", "above"]
            there.images.remove(name)
    finally:
        client.images.remove(name, force=True)
        client.images.prune()


# -- push ---------------------------------------------------------------------------------------------------------------


def test_push_to_where_it_is_from_and_elsewhere(
    dockerd: Dockerd, ordinary: Dockerd, client: docker.DockerClient, lazy: str, node: Node, registry: Registry, other: Registry
) -> None:
    manifest, digest = registry.manifest("docker/odd", "lazy")
    sibling, elsewhere = f"{registry.host}/docker/sibling{node.line}:1", f"{other.host}/odd{node.line}:1"
    for name in (sibling, elsewhere):
        assert client.images.get(lazy).tag(name.rpartition(":")[0], "1")
    dockerd.cli("push", sibling)  # the registry has the layers: docker has them mounted from the other repository
    assert registry.manifest(f"docker/sibling{node.line}", "1") == (manifest, digest)
    with pytest.raises(Failed, match=r"content digest sha256:[0-9a-f]{64}: not found"):
        dockerd.cli("push", elsewhere)
    weenv(node, "fetch", elsewhere)
    dockerd.cli("push", elsewhere)
    assert other.manifest(f"odd{node.line}", "1") == (manifest, digest)
    with ordinary.client() as there:
        there.images.pull(elsewhere)
        assert shell(there, elsewhere, "cat /opt/top /opt/opaque/above") == ["top", "seen"]
        there.images.remove(elsewhere)


# -- export and load ------------------------------------------------------------------------------------------------------


def test_export_of_a_container_is_the_same_as_with_overlayfs(
    dockerd: Dockerd, ordinary: Dockerd, lazy: str, odd: Pair, tmp_path: Path
) -> None:
    seen = {}
    for which, image in ((dockerd, lazy), (ordinary, odd.plain)):
        with which.client() as client:
            client.images.pull(image)
            container = client.containers.create(image, IDLE, network_mode="none", hostname="box")
            container.start()
            change = "cd /opt; rm two; echo more >> top; mkdir new; mv sub/three new; touch -d @1000000000 new/* new . top sub"
            assert container.exec_run(["sh", "-c", change]).exit_code == 0
            container.stop(timeout=1)
            path = tmp_path / f"{which.snapshotter}.tar"
            which.cli("export", container.id, "--output", str(path))
            container.remove()
        seen[which.snapshotter] = members(path)
    ours, theirs = seen["weenv"], seen["overlayfs"]
    assert set(ours) == set(theirs) and len(ours) > 300
    # What docker makes has the time when it did.
    made = {".dockerenv", *(f"dev{name}" for name in ("", "/console", "/pts", "/shm"))}
    made |= {f"etc{name}" for name in ("", "/hosts", "/hostname", "/resolv.conf", "/mtab")}
    assert not {name for name in ours if ours[name] != theirs[name]}.difference(made)
    assert ours["opt/capable"][8] == theirs["opt/capable"][8] != {}
    assert (ours["opt/data"][2], ours["opt/data"][9]) == (3_000_000, hashlib.sha256(corpus.noise(3 << 20)).hexdigest())
    assert "opt/gone" not in ours and "opt/opaque/below" not in ours and "opt/two" not in ours


def test_load_of_a_converted_image_and_of_one_with_holes(
    dockerd: Dockerd, client: docker.DockerClient, lazy: str, node: Node, tmp_path: Path
) -> None:
    """A saved image that is loaded on a node with us is unpacked as any other, for an archive has no registry."""
    weenv(node, "fetch", lazy)
    dockerd.cli("save", lazy, "--output", str(tmp_path / "whole.tar"))
    client.images.remove(lazy)
    node.containerd.collect()
    wait_until("the layers to go", lambda: not node.layers())
    node.expect("not served lazily")
    dockerd.cli("load", "--input", str(tmp_path / "whole.tar"))
    assert shell(client, lazy, "cat /opt/top; stat -c %h /opt/one") == ["top", "3"]


# -- weenv image itself -------------------------------------------------------------------------------------------------------


def test_errors_of_fetching_are_clear_and_leave_nothing_half(
    one_line: None, client: docker.DockerClient, lazy: str, node: Node, store: Store, registry: Registry
) -> None:
    def nothing_half() -> None:
        assert "weenv" not in node.containerd.ctr("leases", "ls", "-q", namespace=NAMESPACE)
        assert node.containerd.ctr("content", "active", namespace=NAMESPACE).count("\n") <= 1

    _, error = weenv(node, "fetch", "no/such:image", check=1)
    assert error.startswith("weenv: containerd's namespace moby has no image no/such:image\n") and lazy in error
    weenv(node, "fetch", check=2)
    weenv(node, "fetch", "--all", lazy, check=2)
    nothing_half()
    manifest, _ = registry.manifest("docker/odd", "lazy")
    victim = os.path.join(registry.root, "docker/registry/v2/blobs/sha256", manifest["layers"][1]["digest"][7:9])
    victim = os.path.join(victim, manifest["layers"][1]["digest"][7:], "data")
    with open(victim, "rb") as file:
        good = file.read()
    try:
        with open(victim, "wb") as file:
            file.write(good[:-1000] + bytes(1000))
        _, error = weenv(node, "fetch", lazy, check=1)
        assert "what came is something else" in error, error
        client.images.pull(store.lazy("solo"))
        out, error = weenv(node, "fetch", "--all", check=1)
        assert out.startswith(f"{store.lazy('solo')}: 1 blob fetched"), "one does not keep another from it"
        assert "what came is something else" in error
        nothing_half()
    finally:
        with open(victim, "wb") as file:
            file.write(good)
    registry.stop()
    try:
        _, error = weenv(node, "fetch", lazy, check=1)
        assert "cannot be had" in error and registry.host in error, error
        nothing_half()
    finally:
        registry.start()
    assert "fetched" in weenv(node, "fetch", "--all")[0]  # those of before that came whole have stayed
    weenv(node, "fetch", "--check", lazy)


def test_what_containerd_holds_is_listed(one_line: None, client: docker.DockerClient, lazy: str, node: Node) -> None:
    out, _ = weenv(node, "ls")
    assert "docker/odd" in out and "in store" in out
    (row,) = json.loads(weenv(node, "ls", "--json")[0])
    assert row["name"] == lazy and row["digest"] == client.images.get(lazy).id
    assert len(row["missing"]) == 3 and row["missing_bytes"] > 3 << 20 and row["blobs"] == 4
    empty, _ = weenv(node, "ls", "--namespace", "nothing")
    assert empty.startswith("No image in this namespace")


def test_content_that_comes_in_pieces_is_stored_or_refused(one_line: None, node: Node, client: docker.DockerClient) -> None:
    """plugin/containerd's streamed writes, against the real store."""
    from weenv.core.digest import sha256
    from weenv.plugin.containerd.client import ContainerdError

    data = os.urandom(2_500_000)

    async def chunks(source: bytes) -> Any:
        reader = io.BytesIO(source)
        while piece := reader.read(70_001):
            yield piece

    async def work() -> None:
        async with Client(node.containerd.socket) as connection:
            await connection.namespace("pieces").create_lease("l")
            space = connection.namespace("pieces", lease="l")
            await space.write_content_stream("a", chunks(data), len(data), sha256(data), labels={"k": "v"})
            await space.write_content_stream("b", chunks(data), len(data), sha256(data), labels={"k": "w"})
            info = await space.content_info(sha256(data))
            assert (info.size, info.labels["k"]) == (len(data), "w")
            assert await space.read_content(sha256(data)) == data
            await space.write_content_stream("e", chunks(b""), 0, sha256(b""))
            assert (await space.content_info(sha256(b""))).size == 0
            with pytest.raises(ContainerdError) as caught:
                await space.write_content_stream("c", chunks(data[::-1]), len(data), sha256(b"other"))
            assert caught.value.code == "FAILED_PRECONDITION"
            await connection.namespace("pieces").delete_lease("l", sync=True)

    asyncio.run(work())
    wait_until("it to be collected", lambda: not node.containerd.content("pieces"))
