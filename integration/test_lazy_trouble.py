"""What goes wrong around a lazy node, and that it stays one file's, one layer's or one moment's trouble.

Each test has a node of its own, with containerd 2.x: the daemons under test are the same for both lines.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import pytest

from weenv_testkit import corpus, images, tools
from weenv_testkit.images import Layout, Member, write_tar
from weenv_testkit.node import SNAPSHOTTER, Node, close_all
from weenv_testkit.procs import Failed, mounts_under, run, unmount_under, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store

MakeNode = Callable[..., Node]
NO_FILL = {"blobfs.fill": "enabled = false"}


@pytest.fixture
def make_node(home: str, registry: Registry, store: Store) -> Iterator[MakeNode]:
    """Start a node with settings; it is gone at the end, and has complained of nothing that was not expected."""
    nodes: list[Node] = []
    store.pause()

    def make(settings: Mapping[str, str] = NO_FILL, prepare: Callable[[str], object] | None = None) -> Node:
        path = tempfile.mkdtemp(prefix="t", dir=home)
        if prepare is not None:
            prepare(path)
        node = Node("2.1", path, registry=registry.host, settings=settings)
        nodes.append(node)
        node.start()
        return node

    yield make
    close_all(nodes)


class Own:
    """An image of one test: busybox and some files, pushed, converted; its blobs are nobody else's."""

    def __init__(self, home: str, registry: Registry, name: str, files: list[Member]) -> None:
        self.registry = registry
        self.repository = f"own/{name}"
        self.ref = f"{registry.host}/{self.repository}:lazy"
        scratch = tempfile.mkdtemp(prefix="own", dir=home)
        layout = Layout(os.path.join(scratch, "layout"))
        base = write_tar(os.path.join(scratch, "base.tar"), images.busybox_members())
        top = write_tar(os.path.join(scratch, "top.tar"), [Member.directory("data"), *files])
        layout.image([layout.layer(base), layout.layer(top)], name)
        run(*tools.weenv(), "convert", f"oci:{layout.directory}:{name}", self.ref, env=dict(os.environ))
        manifest, _ = registry.manifest(self.repository, "lazy")
        self.manifest = manifest
        self.layer = manifest["layers"][1]  # type: ignore[index]
        shutil.rmtree(scratch)

    def damage(self, offset: int, length: int = 64) -> None:
        """Overwrite bytes of the upper layer's blob behind the registry's back."""
        with open(self.registry.blob_path(self.layer["digest"]), "r+b") as file:
            file.seek(offset)
            file.write(b"\xa5" * length)


def test_a_damaged_frame_is_an_error_for_its_file_alone(make_node: MakeNode, home: str, registry: Registry) -> None:
    files = [
        Member("data/good", corpus.noise(1 << 20, 71)),
        Member("data/bad", corpus.noise(8 << 20, 72)),
        Member("data/after", b"after\n"),
    ]
    own = Own(home, registry, "damaged", files)
    own.damage(5 << 20)
    node = make_node()
    node.expect("")  # what exactly is said is asserted below
    namespace = node.pull(own.ref)
    script = "cat /data/bad > /dev/null; echo $?; sha256sum < /data/good | head -c 8; echo; cat /data/after; "
    script += "cat /data/bad 2>&1 >/dev/null | tail -1"
    out = node.shell(own.ref, script, namespace).splitlines()
    assert out[0] == "1" and "Input/output error" in out[-1], out
    assert out[1] == images.hashlib.sha256(corpus.noise(1 << 20, 71)).hexdigest()[:8]
    assert out[2] == "after"
    said = [line for line in node.blobfs.log_text().splitlines() if " ERROR " in line or " WARNING " in line]
    assert any("digest" in line for line in said), said
    assert sum(value for name, value in node.blobfs.metrics().items() if name.startswith("weenv_blobfs_errors_total")) > 0
    assert node.shell(own.ref, "cat /data/after", namespace) == "after\n", "the daemon serves on"


def test_a_lying_annotation_makes_the_image_ordinary_and_loud(make_node: MakeNode, home: str, registry: Registry) -> None:
    own = Own(home, registry, "lying", [Member("data/x", corpus.noise(300_000, 73))])
    key = "containerd.io/snapshot/weenv.toc"
    offset, length, digest = own.layer["annotations"][key].split(",")
    node = make_node()
    lies = {
        "digest": f"{offset},{length},sha256:{'0' * 64}",
        "offset": f"{int(offset) - 8},{length},{digest}",
        "beyond": f"{own.layer['size']},{length},{digest}",
        "huge": f"{offset},{1 << 50},{digest}",
        "garbage": "no,thing,here",
    }
    for number, (name, value) in enumerate(lies.items(), 1):
        manifest = json.loads(json.dumps(own.manifest))
        manifest["layers"][1]["annotations"][key] = value
        registry.push_manifest(own.repository, name, json.dumps(manifest).encode(), manifest["mediaType"])
        ref = f"{registry.host}/{own.repository}:{name}"
        namespace = f"lie-{name}"
        node.containerd.pull(ref, snapshotter=SNAPSHOTTER, namespace=namespace)
        assert node.shell(ref, "wc -c < /data/x", namespace) == "300000\n"
        said = [line for line in node.snapshotter.new_complaints() if "reason=" in line]
        assert said, f"{name} fell back in silence"
        assert node.snapshotter.metric("weenv_snapshotter_fallbacks_total") >= number
        node.containerd.purge(namespace, SNAPSHOTTER)


def test_an_unreachable_registry_is_an_error_in_time_and_heals(make_node: MakeNode, home: str, registry: Registry) -> None:
    own = Own(home, registry, "gone", [Member(f"data/{n}", corpus.noise(2 << 20, 80 + n)) for n in range(3)])
    settings = {**NO_FILL, "blobfs": "deadline = 3", "registry": "connect_timeout = 1\nstall_timeout = 1\nattempts = 2"}
    node = make_node(settings)
    node.expect("")
    namespace = node.pull(own.ref)
    name = node.containerd.run_detached(own.ref, "sleep", "1000", snapshotter=SNAPSHOTTER, namespace=namespace)
    node.containerd.exec(name, "sha256sum", "/bin/busybox", namespace=namespace)  # the programs themselves are local now
    registry.stop()
    try:
        begin = time.monotonic()
        with pytest.raises(Failed):
            node.containerd.exec(name, "sha256sum", "/data/1", namespace=namespace)
        assert time.monotonic() - begin < 60, "EIO after the deadline, not a hang"
        assert node.containerd.exec(name, "echo", "alive", namespace=namespace) == "alive\n"
    finally:
        registry.start()
    expected = images.hashlib.sha256(corpus.noise(2 << 20, 81)).hexdigest()

    def healed() -> bool:
        out = node.containerd.exec(name, "sha256sum", "/data/1", namespace=namespace, check=False)
        return out.startswith(expected)

    wait_until("reads to work again", healed, 60, 0.5)
    node.containerd.remove_container(name, namespace)


def test_a_full_disk_serves_uncached_and_recovers(make_node: MakeNode, home: str, registry: Registry) -> None:
    own = Own(home, registry, "full", [Member(f"data/{n}", corpus.noise(6 << 20, 90 + n)) for n in range(4)])

    def small(path: str) -> None:
        os.mkdir(f"{path}/w")
        with open(f"{path}/disk", "wb") as file:
            file.truncate(32 << 20)
        run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", f"{path}/disk")
        run("mount", "-o", "loop", f"{path}/disk", f"{path}/w")

    node = make_node(prepare=small)
    node.expect("")
    namespace = node.pull(own.ref)
    filler = os.path.join(node.root, "filler")
    room = os.statvfs(node.root)
    with open(filler, "wb") as file:
        file.write(bytes(room.f_bavail * room.f_frsize - (5 << 20)))
    expected = [images.hashlib.sha256(corpus.noise(6 << 20, 90 + n)).hexdigest() for n in range(4)]
    name = node.containerd.run_detached(own.ref, "sleep", "1000", snapshotter=SNAPSHOTTER, namespace=namespace)
    out = node.containerd.exec(name, "sha256sum", "/data/0", "/data/1", "/data/2", "/data/3", namespace=namespace)
    assert [line.split()[0] for line in out.splitlines()] == expected, "24 MB were read with 5 MB of disk"
    assert any(
        "space" in line or "full" in line
        for line in node.blobfs.log_text().splitlines()
        if " WARNING " in line or " ERROR " in line
    )
    os.unlink(filler)
    node.containerd.remove_container(name, namespace)
    node.restart()
    again = node.shell(own.ref, "sha256sum /data/0", namespace).split()[0]
    assert again == expected[0]


def test_a_complete_layer_needs_no_daemon(make_node: MakeNode, home: str, registry: Registry) -> None:
    """Background filling fetches the rest; from then on new containers read the plain file, blobfs or not."""
    payload = corpus.noise(5 << 20, 101)
    own = Own(home, registry, "filled", [Member("data/x", payload), Member("data/y", b"y\n")])
    node = make_node(
        {
            "blobfs.fill": "quiet = 0.1\ncpu_busy = 1.0\ncpu_pressure = 1.0\ncpu_share = 1.0",
            "snapshotter": "complete_check = 0.2",
        }
    )
    namespace = node.pull(own.ref)
    assert node.shell(own.ref, "cat /data/y", namespace) == "y\n"

    def complete() -> bool:
        return node.snapshotter.metric("weenv_snapshotter_layers", state="complete") >= 2

    wait_until("both layers to be complete", complete, 60, 0.3)
    node.blobfs.kill()
    name = node.containerd.run_detached(own.ref, "sleep", "1000", snapshotter=SNAPSHOTTER, namespace=namespace)
    out = node.containerd.exec(name, "sha256sum", "/data/x", namespace=namespace)
    assert out.split()[0] == images.hashlib.sha256(payload).hexdigest()
    node.containerd.remove_container(name, namespace)


def test_a_reboot(make_node: MakeNode, store: Store, registry: Registry) -> None:
    """All processes dead, all mounts gone, data on disk: images run again without a pull, nothing known is fetched again."""
    ref = store.lazy("debian")
    node = make_node()
    namespace = node.pull(ref)
    script = "sha256sum /usr/bin/perl /opt/weenv/many/0123"
    first = node.shell(ref, script, namespace)
    node.kill()
    unmount_under(node.home)
    assert not mounts_under(node.home)
    mark = registry.mark()
    node.start()
    assert node.shell(ref, script, namespace) == first
    # Nothing that is local is fetched again; with an empty page cache the kernel's read-ahead may reach a little further.
    manifest, _ = registry.manifest("test/debian", "lazy")
    size = sum(layer["size"] for layer in manifest["layers"])  # type: ignore[attr-defined]
    assert sum(registry.blob_bytes(mark).values()) < 0.03 * size


def test_a_start_without_registry(make_node: MakeNode, home: str, registry: Registry) -> None:
    """The daemons start, what is local is served, images can be removed; nothing waits for a registry that is away."""
    own = Own(
        home, registry, "away", [Member("data/x", corpus.noise(100_000, 111)), Member("data/y", corpus.noise(4 << 20, 112))]
    )
    node = make_node()
    namespace = node.pull(own.ref)
    name = node.containerd.run_detached(own.ref, "sleep", "1000", snapshotter=SNAPSHOTTER, namespace=namespace)
    known = node.containerd.exec(name, "sha256sum", "/data/x", namespace=namespace)
    registry.stop()
    try:
        begin = time.monotonic()
        node.kill()
        unmount_under(f"{node.root}/m")  # half a reboot: the layers' mounts are gone, the container's own is not
        node.start()
        assert node.shell(own.ref, "sha256sum /data/x", namespace).split()[0] == known.split()[0]
        assert time.monotonic() - begin < 60
        node.containerd.remove_container(name, namespace)
        node.containerd.purge(namespace, SNAPSHOTTER)
        wait_until("the layers to go", lambda: not node.layers())
    finally:
        registry.start()


def test_the_snapshotter_lost_everything(make_node: MakeNode, home: str, registry: Registry) -> None:
    """Its root is wiped behind containerd's back: a clear error, and removing and pulling the image again heals it."""
    own = Own(home, registry, "lost", [Member("data/x", b"x\n")])
    node = make_node()
    node.expect("reason=")  # containerd tries to unpack what it never downloaded
    namespace = node.pull(own.ref)
    assert node.shell(own.ref, "cat /data/x", namespace) == "x\n"
    node.containerd.stop()
    node.snapshotter.stop()
    node.blobfs.stop()
    unmount_under(node.home)
    shutil.rmtree(node.root)
    os.mkdir(node.root)
    node.start()
    with pytest.raises(Failed):
        node.shell(own.ref, "cat /data/x", namespace)
    node.containerd.remove_image(own.ref, namespace)
    node.pull(own.ref)
    assert node.shell(own.ref, "cat /data/x", namespace) == "x\n"


def test_pulled_five_times_at_once_after_a_removal(make_node: MakeNode, home: str, registry: Registry) -> None:
    own = Own(home, registry, "five", [Member("data/x", b"x\n")])
    node = make_node()
    for _ in range(3):
        failures: list[Failed] = []

        def pull(namespace: str, failures: list[Failed] = failures) -> None:
            try:
                node.containerd.pull(own.ref, snapshotter=SNAPSHOTTER, namespace=namespace)
            except Failed as error:
                failures.append(error)

        threads = [threading.Thread(target=pull, args=(name,)) for name in ("default", "default", "one", "two", "default")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        for namespace in ("default", "one", "two"):
            assert node.shell(own.ref, "cat /data/x", namespace) == "x\n"
            node.containerd.remove_image(own.ref, namespace)


def test_an_ordinary_image_survives_a_stop_by_sigint(make_node: MakeNode, store: Store) -> None:
    """Stopping deletes nothing and unmounts nothing: an unpacked image has no copy elsewhere."""
    ref = store.plain("small")
    node = make_node()
    node.expect("reason=")
    namespace = node.pull(ref)
    os.kill(node.snapshotter.pid, signal.SIGINT)
    wait_until("the snapshotter to end", lambda: not node.snapshotter.running())
    node.start_snapshotter()
    assert node.shell(ref, "echo ran", namespace) == "ran\n"


def test_eight_containers_at_once(make_node: MakeNode, store: Store, registry: Registry) -> None:
    """Cold, side by side: every frame is fetched once, whoever asks."""
    ref = store.lazy("debian")
    node = make_node()
    namespace = node.pull(ref)
    mark = registry.mark()
    results: list[str] = []

    def one() -> None:
        results.append(node.shell(ref, "sha256sum /opt/weenv/data.bin; python3 -c 'import decimal; print(1)'", namespace))

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert len(set(results)) == 1
    manifest, _ = registry.manifest("test/debian", "lazy")
    sizes = {layer["digest"]: layer["size"] for layer in manifest["layers"]}  # type: ignore[attr-defined]
    for digest, fetched in registry.blob_bytes(mark).items():
        assert fetched <= sizes[digest], "no byte of a blob is fetched twice"


def test_an_index_of_several_platforms(make_node: MakeNode, home: str, registry: Registry) -> None:
    scratch = tempfile.mkdtemp(prefix="index", dir=home)
    layout = Layout(os.path.join(scratch, "layout"))
    built = {}
    for machine in ("amd64", "arm64"):
        tar = write_tar(
            os.path.join(scratch, f"{machine}.tar"), [*images.busybox_members(), Member("machine", machine.encode())]
        )
        built[f"linux/{machine}"] = layout.image([layout.layer(tar)], machine)
    layout.index(built, "multi")
    target = f"{registry.host}/own/multi:lazy"
    run(*tools.weenv(), "convert", f"oci:{layout.directory}:multi", target, env=dict(os.environ))
    node = make_node()
    namespace = node.pull(target)
    here = "arm64" if os.uname().machine == "aarch64" else "amd64"
    assert node.shell(target, "cat /machine", namespace) == here
    assert node.snapshotter.metric("weenv_snapshotter_lazy_layers_total") == 1


def test_a_converted_image_is_an_ordinary_one_elsewhere(home: str, registry: Registry, store: Store) -> None:
    """skopeo-like client of plain HTTP: every layer, decompressed by zstd, has the diffID of the untouched config."""
    manifest, _ = registry.manifest("test/debian", "lazy") if store.lazy("debian") else ({}, "")
    scratch = tempfile.mkdtemp(prefix="plain", dir=home)
    for layer, original in zip(manifest["layers"], store.image("debian").layers, strict=True):  # type: ignore[call-overload]
        out = os.path.join(scratch, "layer.tar")
        with open(out, "wb") as sink:
            subprocess.run(["zstd", "-q", "-d", "-c", registry.blob_path(layer["digest"])], stdout=sink, check=True)
        assert "sha256:" + images.file_digest(out) == original.diff_id
        assert layer["mediaType"] == "application/vnd.oci.image.layer.v1.tar+zstd"
