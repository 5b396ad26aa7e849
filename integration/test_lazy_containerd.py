"""Lazy images under real containerd 1.7 and 2.x: what is fetched, that real programs run, that every rule of a file
system holds in the container, and that it all survives restarts, a second namespace and containerd's collection.

Background filling is off (see conftest.py), so what was fetched is what was asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import tarfile
from typing import Any

import pytest

from weenv_testkit.cri import Cri
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import Failed, mounts_under, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.store import DEEP, Store

NOBODY = "65534"


def manifest_of(registry: Registry, name: str) -> tuple[dict[str, Any], str]:
    """Manifest and digest of a converted image."""
    return registry.manifest(f"test/{name}", "lazy")


def digest_of(data: bytes) -> str:
    """What ``sha256sum`` prints first."""
    return hashlib.sha256(data).hexdigest()


def member_digest(store: Store, layer: int, name: str) -> str:
    """sha256 of a file as it is in a layer's tar."""
    with tarfile.open(store.tars("debian")[layer]) as archive:
        member = archive.extractfile(name)
        assert member is not None
        return digest_of(member.read())


@pytest.fixture
def debian(node: Node, store: Store) -> tuple[str, str]:
    """The Debian image, pulled lazily: reference and namespace. Pulling what is there already is cheap."""
    ref = store.lazy("debian")
    return ref, node.pull(ref)


# -- what a pull stores and fetches ----------------------------------------------------------------------------------------


def check_pull_was_lazy(node: Node, registry: Registry, name: str, mark: int, namespace: str) -> None:
    """Content store and request log after the first pull of an image on a node."""
    manifest, digest = manifest_of(registry, name)
    assert node.containerd.content(namespace) == {digest, manifest["config"]["digest"]}
    layers = {layer["digest"]: layer["size"] for layer in manifest["layers"]}
    requests = registry.requests(mark)
    theirs = [request for request in requests if request.agent.startswith("containerd/")]
    assert [(r.method, r.path.split("/")[-2]) for r in theirs] == [
        ("HEAD", "manifests"),
        ("GET", "manifests"),
        ("GET", "blobs"),
    ]
    assert theirs[-1].blob == manifest["config"]["digest"]
    ours = [request for request in requests if request not in theirs]
    assert {request.blob for request in ours if request.blob} == set(layers)
    assert all(request.status in (200, 206) for request in ours)
    fetched = sum(request.size for request in ours if request.method == "GET")
    assert fetched < 0.05 * sum(layers.values()), "a pull is to fetch little more than the tails"


def filesystems_of(cri: Cri) -> dict[str, int]:
    """Where CRI stores images -> bytes used there."""
    return {item.fs_id.mountpoint: item.used_bytes.value for item in cri.image_filesystems()}


def test_cri_pull_stores_manifest_and_config_only(node: Node, registry: Registry, store: Store) -> None:
    ref, mark = store.lazy("debian"), registry.mark()
    with node.cri() as cri:
        identity = cri.pull(ref)
        check_pull_was_lazy(node, registry, "debian", mark, "k8s.io")
        manifest, _ = manifest_of(registry, "debian")
        assert identity == manifest["config"]["digest"] == store.image("debian").config, "converting keeps the config"
        assert node.snapshotter.metric("weenv_snapshotter_lazy_layers_total") == len(manifest["layers"])
        assert node.root in filesystems_of(cri), "kubelet's image collection needs the snapshotter's own root"
        wait_until("kubelet to see what the layers take", lambda: filesystems_of(cri)[node.root] > 0)


def test_cri_runs_a_pod_from_it(node: Node, debian: tuple[str, str], store: Store) -> None:
    ref, _ = debian
    with node.cri() as cri:
        cri.pull(ref)
        node.expect("not.*lazy|unpacked")  # the pause image is an ordinary one
        pod = cri.run_pod("lazy")
        try:
            container = cri.start_container(pod, ref, "sleep", "1000")
            assert cri.exec(container, ["python3", "-c", "import json, decimal; print(json.dumps([6 * 7]))"]) == "[42]\n"
            assert cri.exec(container, ["sha256sum", "/usr/bin/perl"]).split()[0] == member_digest(store, 0, "./usr/bin/perl")
            cri.remove_container(container)
        finally:
            cri.remove_pod(pod)


def test_ctr_pull_stores_manifest_and_config_only(node: Node, registry: Registry, store: Store) -> None:
    if node.line == "1.7":
        pytest.skip("ctr 1.7 fetches every layer itself before it asks any snapshotter; see test_eager_clients")
    ref = store.lazy("small")
    mark = registry.mark()
    node.containerd.pull(ref, snapshotter=SNAPSHOTTER, namespace="pull")
    check_pull_was_lazy(node, registry, "small", mark, "pull")
    assert node.containerd.run(ref, "echo", "hello", snapshotter=SNAPSHOTTER, namespace="pull") == "hello\n"
    node.containerd.purge("pull", SNAPSHOTTER)


def test_eager_clients_run_a_converted_image_too(node: Node, store: Store) -> None:
    """ctr 1.7, and 2.x with --local, unpack every layer: an image is no worse for being converted, and the log says it."""
    ref = store.lazy("small")
    node.expect("")
    fallbacks = node.snapshotter.metric("weenv_snapshotter_fallbacks_total")
    node.containerd.pull(ref, snapshotter=SNAPSHOTTER, namespace="eager", local=True)
    assert node.containerd.run(ref, "echo", "hello", snapshotter=SNAPSHOTTER, namespace="eager") == "hello\n"
    assert node.snapshotter.metric("weenv_snapshotter_fallbacks_total") > fallbacks
    node.containerd.purge("eager", SNAPSHOTTER)


def test_a_command_fetches_little_and_only_verified_frames(node: Node, debian: tuple[str, str], registry: Registry) -> None:
    ref, namespace = debian
    manifest, _ = manifest_of(registry, "debian")
    mark = registry.mark()
    assert node.shell(ref, "echo started", namespace) == "started\n"
    fetched = sum(registry.blob_bytes(mark).values())
    assert fetched < 0.1 * sum(layer["size"] for layer in manifest["layers"])


def test_an_ordinary_image_runs_and_says_loudly_that_it_is_not_lazy(node: Node, store: Store) -> None:
    ref = store.plain("small")
    before = node.snapshotter.metric("weenv_snapshotter_fallbacks_total")
    namespace = node.pull(ref)
    assert node.shell(ref, "echo ran", namespace) == "ran\n"
    said = [line for line in node.snapshotter.new_complaints() if "WARNING" in line]
    assert len(said) == 1, said
    assert "reason=" in said[0] and ref.split("/")[0] not in ("", said[0])
    assert node.snapshotter.metric("weenv_snapshotter_fallbacks_total") == before + 1
    node.remove_image(ref, namespace)


# -- what holds inside -------------------------------------------------------------------------------------------------------


def test_real_programs_work(node: Node, debian: tuple[str, str], store: Store) -> None:
    ref, namespace = debian
    script = """set -e
python3 -c 'import json, sqlite3, ssl, ctypes, asyncio, email; print("imports ok")'
perl -e 'print "perl ok\\n"'
find / -xdev -type f | wc -l
dpkg --verify coreutils && echo verified
dpkg -l | wc -l
"""
    out = node.shell(ref, script, namespace).splitlines()
    assert out[:2] == ["imports ok", "perl ok"]
    assert int(out[2]) > 5000
    assert out[3] == "verified", out


def test_contents_are_those_of_the_image(node: Node, debian: tuple[str, str], store: Store) -> None:
    ref, namespace = debian
    out = node.shell(ref, "sha256sum /opt/weenv/data.bin /usr/bin/perl /opt/weenv/many/1234", namespace).split()
    assert out[0] == member_digest(store, 1, "opt/weenv/data.bin")
    assert out[2] == member_digest(store, 0, "./usr/bin/perl")
    assert out[4] == digest_of(b"1234\n" * 50)


def test_writes_go_to_the_container_alone(node: Node, debian: tuple[str, str]) -> None:
    ref, namespace = debian
    script = """set -e
cd /opt/weenv
echo changed > marked; echo second line >> log; rm two; rm -r opaque; mkdir opaque; mv sub/three moved
truncate -s 5 data.bin; chmod 600 one; chown 7:8 one; echo new > new; rm -rf many
cat marked log; ls opaque | wc -l; cat moved; stat -c '%s %a %u %g %h' data.bin one; test ! -e two -a ! -e gone -a ! -e many
"""
    assert node.shell(ref, script, namespace).splitlines() == [
        "changed", "first line", "second line", "0", "linked", "5 644 0 0 1", "7 600 7 8 1",
    ]  # fmt: skip
    untouched = "cd /opt/weenv; cat marked log; ls opaque; ls many | wc -l; stat -c '%s %a %h' one; test -e new || echo none"
    assert node.shell(ref, untouched, namespace).splitlines() == ["x", "first line", "above", "2000", "7 644 3", "none"]


def test_deleted_files_stay_deleted_when_the_container_starts_again(node: Node, debian: tuple[str, str]) -> None:
    ref, namespace = debian
    name = node.containerd.run_detached(ref, "sleep", "1000", snapshotter=SNAPSHOTTER, namespace=namespace)
    node.containerd.exec(name, "sh", "-c", "rm /opt/weenv/log /usr/bin/perl; echo kept > /kept", namespace=namespace)
    node.containerd.ctr("tasks", "kill", "--signal", "KILL", name, namespace=namespace)
    node.containerd.ctr("tasks", "delete", "--force", name, namespace=namespace)
    node.containerd.ctr("tasks", "start", "--detach", "--null-io", name, namespace=namespace)
    out = node.containerd.exec(name, "sh", "-c", "ls /opt/weenv/log /usr/bin/perl 2>&1; cat /kept; true", namespace=namespace)
    assert out.count("No such file") == 2
    assert out.endswith("kept\n")
    node.containerd.remove_container(name, namespace)


def test_layers_delete_what_lies_below(node: Node, debian: tuple[str, str]) -> None:
    ref, namespace = debian
    out = node.shell(
        ref, "ls -A /opt/weenv/opaque; stat -c %a /opt/weenv/opaque; ls -A /opt/weenv | grep -e gone -e wh; true", namespace
    )
    assert out.splitlines() == ["above", "711"]


def test_hard_links_suid_xattrs_and_devices(node: Node, debian: tuple[str, str]) -> None:
    ref, namespace = debian
    links = node.shell(ref, "cd /opt/weenv; stat -c '%i %h' one two sub/three | sort -u", namespace).splitlines()
    assert len(links) == 1 and links[0].endswith(" 3"), "three names, one inode"
    plain = node.shell(ref, "id -u; /opt/weenv/suid-id -u", namespace, "--user", NOBODY, "--allow-new-privs").split()
    assert plain == [NOBODY, "0"]
    marks = "getfattr --only-values -n user.colour /opt/weenv/marked; echo; "
    marks += "getcap /opt/weenv/capable; ls -l /opt/weenv/null /opt/weenv/fifo"
    colour, capability, *devices = node.shell(ref, marks, namespace).splitlines()
    assert colour == "blau"
    assert capability.split()[-1] == "cap_net_raw=ep"
    assert devices[0].startswith("prw-r--r--") and devices[1].startswith("crw-rw-rw-")
    assert node.shell(ref, "stat -c '%a %g' /opt/weenv/sub", namespace) == "2775 1000\n"


def test_an_image_of_127_layers(node: Node, store: Store) -> None:
    ref = store.lazy("deep")
    namespace = node.pull(ref)
    out = node.shell(
        ref,
        "ls /deep | wc -l; cat /deep/last; cat /deep/001; ls /deep | grep temporary; echo x > /deep/064; cat /deep/064",
        namespace,
    )
    assert out.splitlines() == [str(DEEP + 1), str(DEEP - 1), "1", f"temporary-{DEEP - 1}", "x"]
    # An overlay of all of them must also be mountable from the outside, as dockerd and kubelet do.
    node.remove_image(ref, namespace)


# -- namespaces, collection, restarts --------------------------------------------------------------------------------------


def test_the_same_image_in_two_namespaces(node: Node, store: Store, registry: Registry) -> None:
    ref = store.lazy("pair")
    namespace = node.pull(ref)
    mark = registry.mark()
    if node.line == "1.7":
        node.expect("")  # the second namespace of 1.7 can only be filled by ctr, which unpacks
    node.containerd.pull(ref, snapshotter=SNAPSHOTTER, namespace="second")
    if node.line != "1.7":
        assert sum(registry.blob_bytes(mark).values()) < 20_000, "the second namespace fetches manifest and config, no layer"
    script = "cat /etc/weenv-release; sha256sum /data/7"
    assert node.shell(ref, script, "second") == node.shell(ref, script, namespace)
    if node.line == "2.1":  # and CRI beside them, which has a namespace of its own
        with node.cri() as cri:
            cri.pull(ref)
        assert node.shell(ref, script, "k8s.io") == node.shell(ref, script, namespace)
    node.containerd.purge("second", SNAPSHOTTER)
    assert node.shell(ref, script, namespace).startswith("pair\n"), "collection in one namespace leaves the other alone"


def test_removing_an_image_frees_everything(node: Node, store: Store, registry: Registry) -> None:
    ref = store.lazy("solo")
    before = set(mounts_under(node.root))
    namespace = node.pull(ref)
    digest = manifest_of(registry, "solo")[0]["layers"][0]["digest"]
    assert digest in node.layers()
    name = node.containerd.run_detached(ref, "sleep", "1000", snapshotter=SNAPSHOTTER, namespace=namespace)
    node.remove_image(ref, namespace)
    assert node.containerd.exec(name, "echo", "alive", namespace=namespace) == "alive\n", "a running container keeps its layers"
    node.containerd.remove_container(name, namespace)
    node.containerd.collect()
    wait_until("the snapshots to be collected", lambda: name not in node.containerd.snapshots(SNAPSHOTTER, namespace))
    wait_until(
        "the layer's directory and mount to go",
        lambda: digest not in node.layers() and set(mounts_under(node.root)) <= before,
    )
    namespace = node.pull(ref)
    assert node.shell(ref, "echo again", namespace) == "again\n"
    node.remove_image(ref, namespace)


def test_everything_is_restarted_in_between(node: Node, debian: tuple[str, str]) -> None:
    ref, namespace = debian
    name = node.containerd.run_detached(ref, "sleep", "1000", snapshotter=SNAPSHOTTER, namespace=namespace)
    node.containerd.exec(name, "sh", "-c", "echo kept > /kept", namespace=namespace)
    node.restart()
    assert node.containerd.exec(
        name, "sh", "-c", "cat /kept /opt/weenv/log /opt/weenv/many/0500", namespace=namespace
    ).startswith("kept\nfirst line\n500\n")
    assert node.shell(ref, "cat /etc/weenv-release", namespace) == "top\n", "a new container on the layers of before"
    node.containerd.remove_container(name, namespace)


def test_daemons_are_killed_under_a_reader(node: Node, store: Store, registry: Registry) -> None:
    """A container reads data that is not local while all daemons are dead; it waits, and reads on when they are back."""
    ref, namespace = store.lazy("debian"), ""
    namespace = node.pull(ref)
    read = "cat /opt/weenv/many/1[5-9]* /usr/lib/python3*/*.py /usr/share/perl5/*/*.pm | sha256sum"
    script = f"until test -e /go; do sleep 0.05; done; {read} > /result; sleep 1000"
    name = node.containerd.run_detached(ref, "sh", "-c", script, snapshotter=SNAPSHOTTER, namespace=namespace)
    root = node.rootfs(name, namespace)
    requests = node.blobfs.metric("weenv_blobfs_requests_total")
    assert requests > 0
    node.kill()
    with open(os.path.join(root, "go"), "w"):
        pass
    with pytest.raises(Failed, match="waited"):
        wait_until(
            "a result without daemons", lambda: os.path.exists(f"{root}/result") and os.path.getsize(f"{root}/result"), 2
        )
    node.start()
    wait_until("the reader to finish", lambda: os.path.getsize(f"{root}/result"), 60)
    with open(os.path.join(root, "result")) as file:
        interrupted = file.read()
    assert node.shell(ref, read, namespace) == interrupted
    node.containerd.remove_container(name, namespace)


def test_nothing_is_fetched_twice(node: Node, debian: tuple[str, str], registry: Registry) -> None:
    ref, namespace = debian
    script = "cat /opt/weenv/data.bin /usr/bin/perl | sha256sum"
    first = node.shell(ref, script, namespace)
    mark = registry.mark()
    node.restart()
    assert node.shell(ref, script, namespace) == first
    # 28 MB were read again. Where the page cache was dropped meanwhile, read-ahead may reach a little further than before.
    manifest, _ = manifest_of(registry, "debian")
    assert sum(registry.blob_bytes(mark).values()) < 0.03 * sum(layer["size"] for layer in manifest["layers"])


def test_status_of_the_daemons_is_readable(node: Node, debian: tuple[str, str]) -> None:
    node.shell(debian[0], "cat /usr/lib/*/gconv/*.so | wc -c", debian[1])  # read by no other test
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"{node.run}/b.sock")
        status = json.loads(client.makefile("rb").readline())
    assert status["waiting"] == 0
    assert status["layers"]


def test_sockets_and_data_are_for_root_alone(node: Node, debian: tuple[str, str]) -> None:
    node.shell(debian[0], "cat /opt/weenv/log", debian[1])
    for path in (node.socket, f"{node.run}/b.sock", f"{node.run}/h.sock"):
        assert os.stat(path).st_mode & 0o077 == 0, path
    data = [os.path.join(node.root, "layers", "sha256", digest.removeprefix("sha256:")) for digest in node.layers()]
    assert data
    for path in data:
        listed = subprocess.run(
            ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "ls", path], capture_output=True, check=False
        )
        assert listed.returncode != 0, path
