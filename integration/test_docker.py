"""dockerd 26 and 28 with the containerd image store and ``"storage-driver": "weenv"``, as rollout pipelines drive it.

Background filling is off (see conftest.py), so what was fetched is what was asked for.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import socket
import tarfile
from collections.abc import Iterator
from typing import Any

import docker
import pytest

from weenv_testkit import tools
from weenv_testkit.dockerd import NAMESPACE, Dockerd, shell
from weenv_testkit.images import Member, busybox_members, write_tar
from weenv_testkit.node import Node
from weenv_testkit.procs import Failed, Process, run, wait_until
from weenv_testkit.registry import Registry, free_port
from weenv_testkit.store import Store

IDLE = ["tail", "-f", "/dev/null"]
WRITES = "set -e; cd /opt/weenv; echo two >> log; rm -r opaque; rm two; chmod 600 one; echo new > /new; ln -s /new /link"
SEEN = "cd /opt/weenv; cat log /new; readlink /link; stat -c '%a %h' one; ls -d opaque two 2>/dev/null | wc -l"
AFTER = ["first line", "two", "new", "/new", "600 1", "0"]


@pytest.fixture
def debian(client: docker.DockerClient, store: Store) -> str:
    """The Debian image, pulled lazily; pulling what is there already is cheap."""
    ref = store.lazy("debian")
    client.images.pull(ref)
    return ref


@pytest.fixture
def idle(client: docker.DockerClient, debian: str) -> Iterator[Any]:
    """A container that waits for commands, as rollouts have it."""
    container = client.containers.create(debian, IDLE, network_mode="none", init=True)
    container.start()
    yield container
    container.remove(force=True)


def archive(*members: Member) -> bytes:
    """A tar as ``put_archive`` takes it."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.type, info.mode, info.uid, info.gid = member.kind, member.mode, member.uid, member.gid
            info.size, info.linkname, info.mtime = len(member.data), member.link, member.mtime
            tar.addfile(info, io.BytesIO(member.data))
    return target.getvalue()


def fetched_of(registry: Registry, mark: int, name: str, tag: str = "lazy") -> float:
    """What was fetched of an image's layers since a mark, as a share of their size."""
    manifest, _ = registry.manifest(f"test/{name}", tag)
    sizes = {layer["digest"]: layer["size"] for layer in manifest["layers"]}
    had = registry.blob_bytes(mark)
    return sum(had.get(digest, 0) for digest in sizes) / sum(sizes.values())


# -- pulling -------------------------------------------------------------------------------------------------------------


def test_a_pull_downloads_no_layer(
    dockerd: Dockerd, client: docker.DockerClient, node: Node, registry: Registry, store: Store
) -> None:
    ref, mark = store.lazy("debian"), registry.mark()
    lazy = node.snapshotter.metric("weenv_snapshotter_lazy_layers_total")
    image = client.images.pull(ref)
    manifest, digest = registry.manifest("test/debian", "lazy")
    assert image.id == digest
    assert node.containerd.content(NAMESPACE) == {digest, manifest["config"]["digest"]}, "docker holds manifest and config only"
    theirs = [request for request in registry.requests(mark) if request.agent.startswith("docker/")]
    layers = {layer["digest"] for layer in manifest["layers"]}
    assert theirs and not layers & {request.blob for request in theirs}
    assert fetched_of(registry, mark, "debian") < 0.05
    assert node.snapshotter.metric("weenv_snapshotter_lazy_layers_total") == lazy + len(layers)
    assert node.snapshotter.metric("weenv_snapshotter_fallbacks_total") == 0
    assert shell(client, ref, "echo started; cat /etc/weenv-release") == ["started", "top"]
    assert fetched_of(registry, mark, "debian") < 0.1
    assert dockerd.cli("info", "--format", "{{.Driver}}") == "weenv\n"


def test_an_image_that_is_pulled_again_or_removed(
    client: docker.DockerClient, node: Node, registry: Registry, store: Store
) -> None:
    ref = store.lazy("solo")
    client.images.pull(ref)
    assert client.images.get(ref).id == registry.manifest("test/solo", "lazy")[1]
    mark = registry.mark()
    client.images.pull(ref)
    assert fetched_of(registry, mark, "solo") == 0
    layer = registry.manifest("test/solo", "lazy")[0]["layers"][0]["digest"]
    assert layer in node.layers()
    client.images.remove(ref)
    with pytest.raises(docker.errors.ImageNotFound):
        client.images.get(ref)
    node.containerd.collect()
    wait_until("the layer to go", lambda: layer not in node.layers())


def test_an_ordinary_image_works_too_and_is_said_to_be_none(client: docker.DockerClient, node: Node, store: Store) -> None:
    ref = store.plain("solo")
    client.images.pull(ref)
    assert shell(client, ref, "cat /etc/weenv-release") == ["solo"]
    said = [line for line in node.snapshotter.new_complaints() if "WARNING" in line]
    assert len(said) == 1 and "not served lazily" in said[0], said
    client.images.remove(ref)


# -- a rollout -----------------------------------------------------------------------------------------------------------


def test_a_rollout(client: docker.DockerClient, debian: str, registry: Registry) -> None:
    """create, start, exec, put_archive, get_archive, kill, wait, remove: what agents' harnesses call."""
    mark = registry.mark()
    container = client.containers.create(
        debian, IDLE, name="rollout", network_mode="none", working_dir="/opt/weenv", environment={"TASK": "17"}
    )
    container.start()
    container.reload()
    assert container.status == "running"
    api = client.api
    made = api.exec_create(container.id, ["sh", "-c", "echo out; echo err >&2; exit 7"], user="nobody")["Id"]
    assert api.exec_start(made, demux=True) == (b"out\n", b"err\n")
    assert api.exec_inspect(made)["ExitCode"] == 7 and not api.exec_inspect(made)["Running"]
    assert container.exec_run("cat log").output == b"first line\n"
    told = container.exec_run(["sh", "-c", "echo $TASK $PWD $MORE; id -un"], environment={"MORE": "x"}, user="daemon")
    assert told.output == b"17 /opt/weenv x\ndaemon\n"
    streamed = container.exec_run(["sh", "-c", "echo one; echo two"], stream=True).output
    assert b"".join(streamed) == b"one\ntwo\n"
    sent = archive(
        Member.directory("job", 0o750, uid=1000, gid=1001), Member("job/run.sh", b"#!/bin/sh\necho hi $1\n", mode=0o755),
        Member("job/data", b"x" * 100_000, uid=5), Member.symlink("job/link", "data"),
    )  # fmt: skip
    assert container.put_archive("/", sent)
    assert container.exec_run("/job/run.sh there").output == b"hi there\n"
    assert container.exec_run("stat -c '%a %u %g' /job /job/data").output == b"750 1000 1001\n644 5 0\n"
    assert container.put_archive("/opt/weenv", archive(Member("log", b"replaced\n"))), "over a file of a lazy layer"
    assert container.exec_run("cat /opt/weenv/log").output == b"replaced\n"
    chunks, info = container.get_archive("/opt/weenv/many")
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
        files = {member.name: tar.extractfile(member) for member in tar if member.isfile()}
        assert len(files) == 2000 and info["name"] == "many"
        assert all(file is not None and file.read() == b"%d\n" % int(name[-4:]) * 50 for name, file in files.items())
    chunks, _ = container.get_archive("/job/link")
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
        assert [(member.issym(), member.linkname) for member in tar] == [(True, "data")]
    with pytest.raises(docker.errors.NotFound):
        container.get_archive("/opt/weenv/gone")
    assert {item["Path"] for item in container.diff()} >= {"/job", "/job/data", "/opt/weenv/log"}
    container.kill()
    assert container.wait()["StatusCode"] == 137
    chunks, _ = container.get_archive("/opt/weenv/log")  # of one that is not running
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
        file = tar.extractfile("log")
        assert file is not None and file.read() == b"replaced\n"
    container.start()
    assert container.exec_run("cat /opt/weenv/log /job/run.sh").output.startswith(b"replaced\n#!/bin/sh\n"), "writes stay"
    container.remove(force=True)
    assert fetched_of(registry, mark, "debian") < 0.2


def test_real_programs_read_what_the_image_has(client: docker.DockerClient, debian: str, store: Store) -> None:
    out = shell(
        client, debian,
        "python3 -c 'import json, sqlite3, ssl, ctypes; print(\"imports ok\")'; dpkg --verify coreutils && echo verified; "
        "sha256sum /opt/weenv/data.bin | cut -d' ' -f1; ls -A /opt/weenv/opaque; cd /opt/weenv; stat -c '%h' one two",
    )  # fmt: skip
    with tarfile.open(store.tars("debian")[1]) as tar:
        data = tar.extractfile("opt/weenv/data.bin")
        assert data is not None
        digest = hashlib.file_digest(data, "sha256").hexdigest()  # type: ignore[arg-type]
    assert out == ["imports ok", "verified", digest, "above", "3", "3"]


def test_stop_start_restart_rename_and_pause(client: docker.DockerClient, idle: Any) -> None:
    idle.exec_run(["sh", "-c", WRITES])
    idle.pause()
    idle.unpause()
    idle.stop(timeout=5)
    idle.start()
    assert idle.exec_run(["sh", "-c", SEEN]).output.decode().splitlines() == AFTER
    idle.restart(timeout=5)
    idle.rename("other")
    assert client.containers.get("other").exec_run(["sh", "-c", SEEN]).output.decode().splitlines() == AFTER
    stats = idle.stats(stream=False)
    assert stats["memory_stats"]["usage"] > 0


@pytest.mark.soak
def test_many_at_once(client: docker.DockerClient, debian: str) -> None:
    """As a batch of rollouts starts: forty containers of one image."""
    containers = [client.containers.create(debian, IDLE, network_mode="none") for _ in range(40)]
    for container in containers:
        container.start()
    for number, container in enumerate(containers):
        container.exec_run(["sh", "-c", f"echo {number} > /opt/weenv/log"])
    seen = [container.exec_run("cat /opt/weenv/log").output for container in containers]
    for container in containers:
        container.remove(force=True)
    assert seen == [b"%d\n" % number for number in range(40)]


# -- docker run's options ------------------------------------------------------------------------------------------------


def test_options_of_run(dockerd: Dockerd, debian: str, tmp_path: Any) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "in").write_text("from the host\n")
    script = """cd /sys/fs/cgroup
cat memory/memory.limit_in_bytes memory.max 2>/dev/null
cat cpu/cpu.cfs_quota_us cpu.max 2>/dev/null | cut -d' ' -f1
cat pids/pids.max pids.max 2>/dev/null
ls /sys/class/net
echo x 2>/dev/null > /opt/weenv/log || echo read-only
echo y > /tmp/y && cat /tmp/y
cat /shared/in; echo back > /shared/out
id -u; pwd; echo $A; cat /proc/1/comm; hostname; mount | grep -c ' / '"""
    out = dockerd.cli(
        "run", "--rm", "--cpus", "0.5", "--memory", "64m", "--pids-limit", "77", "--network", "none", "--read-only",
        "--tmpfs", "/tmp", "--init", "-v", f"{tmp_path}/shared:/shared", "-w", "/opt", "-e", "A=b", "--hostname", "box",
        "--entrypoint", "sh", debian, "-c", script,
    )  # fmt: skip
    head = ["67108864", "50000", "77", "lo", "read-only", "y", "from the host"]
    assert out.splitlines() == [*head, "0", "/sys/fs/cgroup", "b", "docker-init", "box", "1"]
    assert (tmp_path / "shared" / "out").read_text() == "back\n"
    with pytest.raises(Failed, match="ended with 3"):
        dockerd.cli("run", "--rm", "--network", "none", debian, "sh", "-c", "exit 3")
    with pytest.raises(Failed, match=r"ended with 127.*no-such-program"):
        dockerd.cli("run", "--rm", "--network", "none", debian, "no-such-program")


def test_platforms_users_privileges_and_volumes(client: docker.DockerClient, debian: str) -> None:
    machine = "linux/arm64" if os.uname().machine == "aarch64" else "linux/amd64"
    client.images.pull(debian, platform=machine)
    assert shell(client, debian, "echo here", platform=machine) == ["here"]
    with pytest.raises(docker.errors.NotFound):
        shell(client, debian, "echo here", platform="linux/s390x")
    suid = ["/opt/weenv/suid-id", "-u"]
    plain = {"network_mode": "none", "remove": True, "user": "65534"}
    assert client.containers.run(debian, suid, **plain) == b"0\n"
    assert client.containers.run(debian, suid, security_opt=["no-new-privileges"], **plain) == b"65534\n"
    assert client.containers.run(debian, ["getcap", "/opt/weenv/capable"], network_mode="none", remove=True).endswith(
        b"cap_net_raw=ep\n"
    )
    volume = client.volumes.create()
    try:
        binds = {volume.name: {"bind": "/opt/weenv/many", "mode": "rw"}}
        assert shell(client, debian, "ls /opt/weenv/many | wc -l; echo v > /opt/weenv/many/v", volumes=binds) == ["2000"]
        assert shell(client, debian, "cat /opt/weenv/many/v /opt/weenv/many/0007 | head -2", volumes=binds) == ["v", "7"]
    finally:
        volume.remove()


def test_copying_both_ways(dockerd: Dockerd, idle: Any, tmp_path: Any) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "file").write_bytes(b"\0\1" * 50_000)
    dockerd.cli("cp", f"{tmp_path}/in", f"{idle.name}:/opt/weenv/sub/")
    assert idle.exec_run("sha256sum /opt/weenv/sub/in/deep/file").output.split()[0].decode() in run(
        "sha256sum", str(tmp_path / "in" / "deep" / "file")
    )
    dockerd.cli("cp", f"{idle.name}:/opt/weenv/sub", str(tmp_path / "out"))
    assert (tmp_path / "out" / "in" / "deep" / "file").read_bytes() == b"\0\1" * 50_000
    assert (tmp_path / "out" / "three").read_bytes() == b"linked\n"
    assert dockerd.cli("cp", f"{idle.name}:/opt/weenv/log", "-")
    with pytest.raises(Failed, match="Could not find"):
        dockerd.cli("cp", f"{idle.name}:/opt/weenv/gone", str(tmp_path / "none"))


# -- images from containers ----------------------------------------------------------------------------------------------


def test_commit_and_run_what_was_committed(client: docker.DockerClient, idle: Any, registry: Registry) -> None:
    mark = registry.mark()
    idle.exec_run(["sh", "-c", WRITES])
    changes = {item["Path"]: item["Kind"] for item in idle.diff()}
    assert {path: changes[path] for path in ("/new", "/opt/weenv/log", "/opt/weenv/two", "/opt/weenv/opaque")} == {
        "/new": 1, "/opt/weenv/log": 0, "/opt/weenv/two": 2, "/opt/weenv/opaque": 2,
    }  # fmt: skip
    image = idle.commit("committed", "1", changes=["ENV STAGE=2", 'CMD ["sh", "-c", "echo $STAGE"]'])
    assert client.containers.run("committed:1", network_mode="none", remove=True) == b"2\n"
    assert shell(client, "committed:1", SEEN) == AFTER
    second = client.containers.create("committed:1", IDLE, network_mode="none")
    second.start()
    second.exec_run(["sh", "-c", "echo three >> /opt/weenv/log; rm /new"])
    second.commit("committed", "2")
    second.remove(force=True)
    assert shell(client, "committed:2", "cat /opt/weenv/log; ls /new 2>/dev/null; ls -A /opt/weenv/many | wc -l") == [
        "first line", "two", "three", "2000",
    ]  # fmt: skip
    assert fetched_of(registry, mark, "debian") < 0.2, "a commit reads what was written, not the image"
    assert image.id
    client.images.remove("committed:2")
    client.images.remove("committed:1")


DOCKERFILE = """FROM {base}
ENV STAGE=built
WORKDIR /opt/weenv
COPY context.txt /copied/
RUN cat log > /seen && rm two && echo more >> log && mkdir /made && python3 -c 'print(6 * 7)' > /made/answer
CMD ["sh", "-c", "cat /seen /made/answer /copied/context.txt; echo $STAGE $PWD"]
"""
BUILT = b"first line\n42\ncontext\nbuilt /opt/weenv\n"


def test_a_legacy_build_on_a_lazy_base(
    client: docker.DockerClient, node: Node, debian: str, registry: Registry, tmp_path: Any
) -> None:
    node.expect("not served lazily")  # what COPY makes is a layer of docker's own
    (tmp_path / "Dockerfile").write_text(DOCKERFILE.format(base=debian))
    (tmp_path / "context.txt").write_text("context\n")
    mark = registry.mark()
    image, log = client.images.build(path=str(tmp_path), tag="built:legacy", network_mode="none", rm=True)
    assert any("Successfully built" in item.get("stream", "") for item in log)
    assert client.containers.run(image.id, network_mode="none", remove=True) == BUILT
    assert shell(client, "built:legacy", "cat log; ls two 2>/dev/null; true") == ["first line", "more"]
    assert fetched_of(registry, mark, "debian") < 0.2, "the base stays lazy"
    client.images.remove("built:legacy")


def test_a_build_by_buildkit_on_a_lazy_base(
    dockerd: Dockerd, client: docker.DockerClient, node: Node, debian: str, registry: Registry, tmp_path: Any
) -> None:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE.format(base=debian))
    (tmp_path / "context.txt").write_text("context\n")
    mark = registry.mark()
    node.expect("not served lazily")  # the layers that it made
    dockerd.cli("build", "--network", "none", "-t", "built:kit", str(tmp_path), DOCKER_BUILDKIT="1")
    assert client.containers.run("built:kit", network_mode="none", remove=True) == BUILT
    assert fetched_of(registry, mark, "debian") >= 1, "buildkit stores the base's layers: docs/docker.md says so"
    client.images.remove("built:kit")
    dockerd.cli("builder", "prune", "--all", "--force")


def test_compose_up_exec_down(dockerd: Dockerd, debian: str, tmp_path: Any) -> None:
    service = {"image": debian, "command": IDLE, "network_mode": "none", "init": True, "volumes": ["shared:/shared"]}
    again = {**service, "depends_on": ["one"], "environment": {"A": "b"}, "mem_limit": "64m"}
    (tmp_path / "compose.yaml").write_text(json.dumps({"services": {"one": service, "two": again}, "volumes": {"shared": {}}}))
    compose = ["compose", "--project-name", "trial", "--file", str(tmp_path / "compose.yaml")]
    dockerd.cli(*compose, "up", "--detach")
    try:
        dockerd.cli(*compose, "exec", "-T", "one", "cp", "/opt/weenv/log", "/shared/")
        assert dockerd.cli(*compose, "exec", "-T", "two", "sh", "-c", "cat /shared/log; echo $A") == "first line\nb\n"
        assert set(dockerd.cli(*compose, "ps", "--services").split()) == {"one", "two"}
        dockerd.cli(*compose, "restart", "--timeout", "2")
        assert dockerd.cli(*compose, "exec", "-T", "one", "cat", "/shared/log") == "first line\n"
    finally:
        dockerd.cli(*compose, "down", "--volumes", "--timeout", "2")
    assert "trial" not in dockerd.cli("volume", "ls")


def test_system_df_and_prune(dockerd: Dockerd, client: docker.DockerClient, debian: str, idle: Any) -> None:
    idle.exec_run(["sh", "-c", "dd if=/dev/zero of=/big bs=1M count=8 2>/dev/null"])
    usage = client.df()
    (mine,) = [item for item in usage["Containers"] if item["Id"] == idle.id]
    assert 8 << 20 <= mine["SizeRw"] < 9 << 20
    assert usage["LayersSize"] >= 0
    assert "Containers" in dockerd.cli("system", "df")
    extra = client.containers.create("sha256:" + idle.image.id.removeprefix("sha256:"), IDLE, network_mode="none")
    assert client.containers.prune()["ContainersDeleted"] == [extra.id]
    client.images.prune()
    assert client.images.get(debian).id == idle.image.id, "the image has a name"


# -- plans and the gateway's names ---------------------------------------------------------------------------------------


def test_a_composed_plan_in_dockers_namespace(
    client: docker.DockerClient, node: Node, plan_file: str, registry: Registry
) -> None:
    config, mark = node.run_config(NAMESPACE), registry.mark()
    name = run(*tools.weenv(), "plan", "compose", plan_file, "--config", config).strip()
    assert client.containers.run(name, network_mode="none", remove=True) == b"default 17\n"
    assert shell(client, name, "cat code; pwd; readlink out; id -u ann") == [
        "code", "/testbed", "/../../../../tmp/escape", "1000",
    ]  # fmt: skip
    container = client.containers.create(name, IDLE, network_mode="none")
    container.start()
    container.exec_run(["sh", "-c", "echo solved > code"])
    container.commit("solved", "1")
    container.remove(force=True)
    assert shell(client, "solved:1", "cat code") == ["solved"]
    assert all(size < 2 << 20 for size in registry.blob_bytes(mark).values())
    client.images.remove("solved:1")
    client.images.remove(name)


def test_names_of_the_gateway(client: docker.DockerClient, dockerd: Dockerd, node: Node, plan_file: str) -> None:
    """Docker that can only name an image: ``docker run HOST/plan/NAME`` pulls and starts it lazily."""
    port = free_port()
    plans = os.path.join(node.home, "plans")
    os.makedirs(plans, exist_ok=True)
    shutil.copyfile(plan_file, os.path.join(plans, "trial.yaml"))
    argv = [*tools.weenv(), "gateway", "serve", "--config", node.config, "--address", f"127.0.0.1:{port}", "--plans", plans]
    argv += ["--allow", "127.0.0.1:*/**"]
    gateway = Process("weenv gateway", argv, os.path.join(node.home, "gateway.log"))
    try:

        def answers() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        gateway.wait_ready(answers)
        name = f"127.0.0.1:{port}/plan/trial:latest"
        lazy = node.snapshotter.metric("weenv_snapshotter_fallbacks_total")
        assert dockerd.cli("run", "--rm", "--network", "none", name) == "default 17\n"
        assert node.snapshotter.metric("weenv_snapshotter_fallbacks_total") == lazy
        client.images.pull(name)
        assert shell(client, name, "cat /testbed/code") == ["code"]
        client.images.remove(name)
    finally:
        assert gateway.stop() == 0


def test_an_imported_file_system(client: docker.DockerClient, dockerd: Dockerd, node: Node, tmp_path: Any) -> None:
    """For images that never were lazy, the snapshotter is an ordinary one."""
    node.expect("not served lazily")
    tar = write_tar(str(tmp_path / "rootfs.tar"), [Member("hello", b"hello\n"), *busybox_members()])
    dockerd.cli("import", tar, "imported:1")
    assert shell(client, "imported:1", "cat /hello") == ["hello"]
    client.images.remove("imported:1")
