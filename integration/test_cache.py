"""A cache that is smaller than its images, under real containers of both containerd lines: every task finishes, right."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from weenv_testkit import corpus, images, tools
from weenv_testkit.images import Layout, Member, write_tar
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import Failed, run, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store

MIB = 1 << 20
FILES = {
    **{f"data/small{n:03}": corpus.noise(3_000 + 191 * n, 9_000 + n) for n in range(200)},
    **{f"data/large{n}": corpus.noise(5 * MIB + n, 9_300 + n) for n in range(5)},
}
SUMS = "".join(f"{hashlib.sha256(content).hexdigest()}  /{name}\n" for name, content in sorted(FILES.items())).encode()
CHECK = "sha256sum -c /sums > /tmp/out && wc -l < /tmp/out"
REPORT = "sha256sum -c /sums > /tmp/out 2>&1 && wc -l < /tmp/out || grep -v ': OK$' /tmp/out"
"""The same, and else what was wrong."""
ALL = f"{len(FILES)}\n"
STREAM = sum(map(len, FILES.values()))
SECONDS = float(os.environ.get("WEENV_SOAK_SECONDS", "300"))


@pytest.fixture(scope="module")
def image(workdir: str, registry: Registry) -> str:
    """An image of busybox and 30 MB that know their checksums, converted."""
    scratch = tempfile.mkdtemp(prefix="cache", dir=workdir)
    layout = Layout(os.path.join(scratch, "layout"))
    base = write_tar(os.path.join(scratch, "base.tar"), images.busybox_members())
    members = [Member.directory("data"), *(Member(name, content) for name, content in FILES.items()), Member("sums", SUMS)]
    top = write_tar(os.path.join(scratch, "top.tar"), members)
    layout.image([layout.layer(base), layout.layer(top)], "cache")
    target = f"{registry.host}/cache/sums:lazy"
    run(*tools.weenv(), "convert", f"oci:{layout.directory}:cache", target, env=dict(os.environ))
    return target


@pytest.fixture
def small(line: str, home: str, registry: Registry, store: Store) -> Iterator[Node]:
    """A node whose cache holds a tenth of the image, and that fills in what nobody asked for."""
    store.pause()
    path = tempfile.mkdtemp(prefix="s", dir=home)
    bounds = f"high = {STREAM // 10}\ninterval = 0.1"
    settings = {"blobfs.cache": bounds, "snapshotter": "complete_check = 0.3", "blobfs.fill": "quiet = 0.1\ncpu_busy = 1"}
    with Node(line, path, registry=registry.host, settings=settings) as node:
        yield node
        # The kernel may still read ahead what has been evicted; who takes the server away then leaves those reads waiting.
        wait_until("all reads to be answered", lambda: node.blobfs.metric("weenv_blobfs_waiting") == 0, 60)
        assert not node.complaints()


@dataclass
class Held:
    """What the data files of a node take, as often as it was looked at."""

    node: Node
    seen: list[int] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def now(self) -> int:
        """Bytes of disk."""
        return sum(path.stat().st_blocks * 512 for path in Path(self.node.root, "layers/sha256").glob("*/data"))

    def watch(self) -> None:
        """Look until done."""
        while not self.done.wait(0.05):
            self.seen.append(self.now())


def drop_caches() -> None:
    """Have the kernel ask again."""
    Path("/proc/sys/vm/drop_caches").write_text("3")


def said(node: Node, image: str, script: str, namespace: str) -> str:
    """The output of ``script`` in a container, or why there is none."""
    try:
        return node.shell(image, script, namespace)
    except Failed as error:
        return str(error)


def at_once(node: Node, image: str, namespace: str, count: int, script: str) -> list[str]:
    """The output of ``script`` in each of so many containers that run side by side."""
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(said(node, image, script, namespace))) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


def scrape(port: int) -> list[Metric]:
    """A daemon's metrics as Prometheus asks for them and reads them."""
    ask = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(ask, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        return list(text_string_to_metric_families(answer.read().decode()))


def test_every_task_finishes_right_with_a_tenth_of_the_image_cached(small: Node, image: str) -> None:
    namespace = small.pull(image)
    held = Held(small)
    watcher = threading.Thread(target=held.watch)
    watcher.start()
    try:
        for _ in range(2):
            drop_caches()
            assert at_once(small, image, namespace, 3, REPORT) == [ALL] * 3
    finally:
        held.done.set()
        watcher.join()
    high = STREAM // 10
    wait_until("the cache to be within its bounds", lambda: held.now() <= high, 60)
    assert small.blobfs.metric("weenv_blobfs_evicted_bytes_total", reason="size") > STREAM
    # It is looked at ten times a second: in between no more comes than the whole image.
    assert sorted(held.seen)[len(held.seen) // 2] < 3 * high, "most of the time it is about as large as it may be"
    assert small.blobfs.metric("weenv_blobfs_cache_bytes") <= high
    assert small.blobfs.metric("weenv_blobfs_cache_high_bytes") == high
    scraped = {family.name: family for family in scrape(small.blobfs.port)}
    (top,) = [sample for sample in scraped["weenv_blobfs_layer_bytes"].samples
              if sample.labels["operation"] == "evicted" and sample.value > STREAM]  # fmt: skip
    assert any(layer.startswith(f"sha256:{top.labels['layer']}") for layer in small.layers())
    assert {family.name for family in scrape(small.snapshotter.port)} > {"weenv_snapshotter_fallbacks"}


def rebound(node: Node, bounds: str) -> None:
    """Kill blobfs and start it with other bounds of its cache."""
    text = Path(node.config).read_text()
    Path(node.config).write_text(re.sub(r"(?s)\[blobfs\.cache\].*?(?=\n\[|\Z)", f"[blobfs.cache]\n{bounds}\n", text))
    node.blobfs.kill()
    node.start_blobfs()


def modes(node: Node) -> set[str]:
    """How the layers are mounted."""
    shown = subprocess.run([*tools.weenv(), "status", "--config", node.config, "--json"], capture_output=True, check=True)
    return {layer["mode"] for layer in json.loads(shown.stdout)["layers"]}


def pruned(node: Node, *flags: str) -> subprocess.CompletedProcess[str]:
    """``weenv cache prune --all``, as an operator says it."""
    argv = [*tools.weenv(), "cache", "prune", "--config", node.config, "--all", *flags]
    return subprocess.run(argv, capture_output=True, text=True, check=True)


def test_a_complete_layer_goes_once_those_are_gone_that_read_it_without_us(small: Node, image: str) -> None:
    if small.line == "1.7":
        pytest.skip("containerd has no part in it")
    rebound(small, f"high = {1 << 40}\ninterval = 0.1")
    namespace = small.pull(image)
    assert small.shell(image, CHECK, namespace) == ALL
    wait_until("the layers to be complete", lambda: modes(small) == {"complete"}, 60)
    before = json.loads(pruned(small, "--dry-run", "--json").stdout)
    done = json.loads(pruned(small, "--json").stdout)
    assert done["bytes"] == before["bytes"] > STREAM and {row["why"] for row in done["layers"]} == {""}
    drop_caches()
    assert small.shell(image, CHECK, namespace) == ALL, "it is fetched again"
    wait_until("the layers to be complete again", lambda: modes(small) == {"complete"}, 60)
    loop = f"cd /; while {CHECK} >> /tmp/counts; do :; done; touch /tmp/failed"
    name = small.containerd.run_detached(image, "sh", "-c", loop, snapshotter=SNAPSHOTTER, namespace=namespace)
    root = small.rootfs(name, namespace)
    held, high = Held(small), STREAM // 10
    full = held.now()
    assert full > STREAM
    refused = pruned(small)
    assert refused.stdout.startswith("took out 0 frames")
    assert refused.stderr.count("it can go when that has been removed") == 2
    assert f"(used by {namespace}/{name})" in refused.stderr
    wait_until("the kernel to have them again", lambda: modes(small) == {"complete"}, 60)
    small.expect("nothing can be evicted")
    rebound(small, f"high = {high}\ninterval = 0.1")
    wait_until("the layers to be served by us again", lambda: modes(small) == {"lazy"}, 60)
    counts = Path(root, "tmp/counts")

    def rounds() -> int:
        return len(counts.read_text().splitlines()) if counts.exists() else 0

    for _ in range(2):
        drop_caches()
        seen = rounds()
        wait_until("the container to check it all again", lambda seen=seen: rounds() > seen + 1, 60)  # type: ignore[misc]
        assert small.shell(image, CHECK, namespace) == ALL, "a new one reads it through us"
    assert not Path(root, "tmp/failed").exists()
    assert set(counts.read_text().splitlines()) == {str(len(FILES))}
    assert held.now() >= full - MIB, "what the kernel reads by itself stays"
    small.containerd.remove_container(name, namespace)
    wait_until("it to go now", lambda: held.now() <= high, 60)
    drop_caches()
    assert small.shell(image, CHECK, namespace) == ALL


@pytest.mark.soak
@pytest.mark.timeout(SECONDS * 2 + 600)
def test_for_minutes_with_daemons_killed(small: Node, image: str) -> None:
    """Containers come, check everything and go, over a cache of a tenth, while blobfs is killed every few seconds."""
    namespace = small.pull(image)
    held = Held(small)
    wrong: list[str] = []
    rounds = [0]
    end = time.monotonic() + SECONDS

    def worker() -> None:
        while time.monotonic() < end and not wrong:
            out = said(small, image, REPORT, namespace)
            rounds[0] += 1
            if out != ALL:
                wrong.append(out)

    threads = [threading.Thread(target=worker) for _ in range(4)]
    threads.append(threading.Thread(target=held.watch))
    for thread in threads:
        thread.start()
    kills, evicted, fetched = 0, 0.0, 0.0
    while time.monotonic() < end and not wrong:
        time.sleep(2.0)
        drop_caches()
        evicted += small.blobfs.metric("weenv_blobfs_evicted_bytes_total")
        fetched += small.blobfs.metric("weenv_blobfs_fetched_bytes_total")
        small.blobfs.kill()
        small.start_blobfs()
        kills += 1
    for thread in threads[:-1]:
        thread.join(300)
    held.done.set()
    threads[-1].join(60)
    seen = sorted(held.seen)
    print(f"{rounds[0]} containers, {kills} kills; evicted {evicted / 1e6:.0f} MB, fetched {fetched / 1e6:.0f} MB compressed")
    middle, most = seen[len(seen) // 2] / 1e6, seen[-1] / 1e6
    print(f"on disk: bound {STREAM // 10 / 1e6:.1f} MB, median {middle:.1f} MB, most {most:.1f} MB")
    assert not wrong, wrong[0][-2000:]
    assert evicted > 5 * STREAM
