"""Fixtures of the tests with real parts, and the checks that nothing is left behind and nothing complained.

One session has one registry and one set of pushed images (``store``); each module that asks for ``node`` gets its own
nodes, one for each containerd line, and they are gone when the module ends.
"""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import docker
import pytest

from weenv_testkit import notlazy, procs
from weenv_testkit.blobfsproc import Blobfs, running
from weenv_testkit.containerd import Containerd
from weenv_testkit.dockerd import NAMESPACE, Dockerd
from weenv_testkit.elastic import Elastic
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.notlazy import REPOSITORY, Publisher
from weenv_testkit.procs import Failed, discard, mounts_under, processes_of, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.running import Bench, make_plan
from weenv_testkit.store import Store

LINES = ("1.7", "2.1")
_COUNTER = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without root nothing here can run; tests that need it say so with the marker ``root``."""
    if os.geteuid() != 0:
        skip = pytest.mark.skip(reason="needs root; run: sudo make test")
        for item in items:
            if "integration" in item.path.parts or item.get_closest_marker("root"):
                item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def ordinary_signals() -> None:
    """Commands under test begin with no signal ignored, though the tests may have been started in the background (a shell
    without job control ignores SIGINT and SIGQUIT there) or by nohup: what is handled here is exec's default there."""
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def workdir() -> Iterator[str]:
    """A short directory on a disk (not a tmpfs) for everything of this session; nothing may be left in it at the end."""
    path = tempfile.mkdtemp(prefix="wt.", dir="/var/tmp")
    gone = os.path.join(path, "gone")
    os.mkdir(gone)
    procs.trash = procs.Trash(gone)
    yield path
    procs.trash.wait()
    procs.trash = None
    left = {"mounts": mounts_under(path), "processes": processes_of(path)}
    assert not any(left.values()), left
    if not os.environ.get("WEENV_TEST_KEEP"):
        shutil.rmtree(path)


@pytest.fixture(scope="session")
def registry(workdir: str) -> Iterator[Registry]:
    """Debian's docker-registry, for the whole session."""
    home = os.path.join(workdir, "registry")
    os.mkdir(home)
    with Registry(home) as running:
        yield running


@pytest.fixture(scope="session")
def store(workdir: str, registry: Registry) -> Store:
    """Images, built and pushed when first asked for."""
    return Store(os.path.join(workdir, "store"), registry)


@pytest.fixture(scope="module", params=LINES)
def line(request: pytest.FixtureRequest) -> str:
    """Both containerd lines, one after the other."""
    return str(request.param)


@pytest.fixture(scope="module")
def home(workdir: str) -> Iterator[str]:
    """A short directory of the module."""
    path = tempfile.mkdtemp(prefix="m", dir=workdir)
    yield path
    left = {"mounts": mounts_under(path), "processes": processes_of(path)}
    assert not any(left.values()), f"left behind: {left}"


def _descriptors(path: str) -> set[str]:
    """What this process has open below ``path``."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(path):
            found.add(target)
    return found


@pytest.fixture(scope="module", autouse=True)
def no_leaks(workdir: str) -> Iterator[None]:
    """After each module: no mount, process or open file below the session's directory that was not there before."""
    mounts, files = set(mounts_under(workdir)), _descriptors(workdir)
    yield
    gc.collect()
    processes = {pid: text for pid, text in processes_of(workdir).items() if "docker-registry" not in text}
    left = [*(set(mounts_under(workdir)) - mounts), *(_descriptors(workdir) - files), *processes.values()]
    assert not left, f"left behind: {left}"


@pytest.fixture(scope="module")
def plain(line: str, home: str, registry: Registry, store: Store) -> Iterator[Containerd]:
    """containerd without us: what is compared against."""
    path = os.path.join(home, f"plain-{line}")
    os.mkdir(path)
    store.pause()
    with Containerd(line, path, registry=registry.host) as running:
        yield running
    discard(path)


@pytest.fixture(scope="module")
def module_node(request: pytest.FixtureRequest, line: str, home: str, registry: Registry, store: Store) -> Iterator[Node]:
    """A node for the module; tests ask for ``node``. A module's NODE_SETTINGS are added to its configuration."""
    path = os.path.join(home, f"n{line}")
    os.mkdir(path)
    store.pause()
    # Without background filling, what is fetched is what was asked for, so it can be counted.
    settings = {"blobfs.fill": "enabled = false", **getattr(request.module, "NODE_SETTINGS", {})}
    with Node(line, path, registry=registry.host, settings=settings) as running:
        yield running


@pytest.fixture
def here(home: str) -> Iterator[str]:
    """A directory of the test's own, gone afterwards."""
    path = os.path.join(home, f"h{next(_COUNTER)}")
    os.mkdir(path)
    yield path
    discard(path)


@pytest.fixture
def node(module_node: Node) -> Iterator[Node]:
    """The module's node; an unexpected warning, error or traceback in our daemons' logs fails the test."""
    yield module_node
    assert not module_node.complaints()


@pytest.fixture(scope="module")
def plan_file(store: Store, registry: Registry, workdir: str) -> str:
    """A plan for ``weenv run``."""
    return make_plan(store, registry, workdir)


@pytest.fixture(scope="module")
def module_bench(module_node: Node, plan_file: str) -> Iterator[Bench]:
    """The commands that run environments, on the module's node; tests ask for ``bench``."""
    bench = Bench(module_node, plan_file)
    yield bench
    bench.call("rm", "--all", "--force")


@pytest.fixture(scope="module")
def module_elastic(module_bench: Bench) -> Iterator[Elastic]:
    """The elastic daemon on the module's node; tests ask for their module's ``elastic``."""
    with Elastic(module_bench) as running:
        yield running


@pytest.fixture(scope="module")
def publish(store: Store, registry: Registry) -> Publisher:
    """Groups that are in the lazy format, or not."""
    return Publisher(store, registry)


@pytest.fixture(scope="module")
def repository(publish: Publisher) -> str:
    """A group in the lazy format, to stack others on."""
    return publish.lazy("repository", publish.layer("repository", REPOSITORY))


@pytest.fixture(scope="module")
def plain_groups(module_node: Node, home: str) -> Iterator[notlazy.Bench]:
    """The commands that meet groups not in the lazy format, on the module's node; tests ask for their module's ``bench``."""
    bench = notlazy.Bench(module_node, home)
    yield bench
    bench.call("rm", "--all", "--force")


@pytest.fixture
def bench(module_bench: Bench, node: Node) -> Iterator[Bench]:
    """Nothing may be left by any test."""
    yield module_bench
    try:
        wait_until("nothing to be left", lambda: not module_bench.left(), 60, 0.1)
    except Failed:
        assert module_bench.left() == {}


@pytest.fixture(scope="module")
def module_docker(module_node: Node, home: str) -> Iterator[Dockerd]:
    """A dockerd on the module's node; tests ask for ``client`` or ``dockerd``."""
    path = os.path.join(home, f"d{module_node.line}")
    os.mkdir(path)
    with Dockerd(path, module_node.containerd, snapshotter=SNAPSHOTTER) as running:
        yield running
    discard(path)


@pytest.fixture
def dockerd(module_docker: Dockerd, node: Node) -> Iterator[Dockerd]:
    """No container may be left by any test, and nothing of one."""
    yield module_docker
    with module_docker.client() as client:
        assert client.containers.list(all=True) == []
    node.containerd.collect()

    def left() -> list[str]:
        return [name for name in node.containerd.snapshots(SNAPSHOTTER, NAMESPACE) if not name.startswith("sha256:")]

    wait_until("the containers' snapshots to go", lambda: not left())


@pytest.fixture
def client(dockerd: Dockerd) -> Iterator[docker.DockerClient]:
    """docker-py, as ``from_env`` makes it."""
    with dockerd.client() as found:
        yield found


@pytest.fixture
def blobfs(home: str, request: pytest.FixtureRequest) -> Iterator[Blobfs]:
    """A blobfs of its own, without a snapshotter."""
    path = f"{home}/{abs(hash(request.node.name)) % 10**8}"
    os.mkdir(path)
    with running(path) as made:
        yield made


@pytest.fixture(scope="module")
def policy(home: str) -> str:
    """A signature policy for skopeo that asks for nothing."""
    path = os.path.join(home, "policy.json")
    with open(path, "w", encoding="ascii") as file:
        file.write('{"default":[{"type":"insecureAcceptAnything"}]}')
    return path
