"""Groups that are not in the lazy format, from a real registry, under real containerd: converted once, or unpacked."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import struct
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from weenv.environment.notlazy import LABEL
from weenv.layer.verify import LAYER_ANNOTATION
from weenv.plugin.containerd.client import Client
from weenv_testkit import tools
from weenv_testkit.corpus import noise
from weenv_testkit.images import Layer, Member, write_tar, xattr
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import run, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store

ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, may, who) for tag, may, who in ((1, 6, 2**32 - 1), (2, 4, 1000), (4, 4, 2**32 - 1),
                                                             (16, 4, 2**32 - 1), (32, 4, 2**32 - 1))
)  # fmt: skip
"""system.posix_acl_access with one named user (include/uapi/linux/posix_acl_xattr.h): what no converted layer can hold."""


class Publisher:
    """Groups in the registry, as tar layers (gzip) or converted by ``weenv convert``."""

    def __init__(self, store: Store, registry: Registry) -> None:
        os.makedirs(store.directory, exist_ok=True)
        self.store = store
        self.registry = registry
        self.base = store.plain("small")

    def tar(self, name: str, members: list[Member]) -> str:
        return write_tar(os.path.join(self.store.directory, f"nl-{name}.tar"), members)

    def layer(self, name: str, members: list[Member]) -> Layer:
        return self.store.layout.layer(self.tar(name, members))

    def plain(self, name: str, *layers: Layer, **config: Any) -> str:
        self.store.layout.image(list(layers), f"nl-{name}", **config)
        return self.store.layout.push(f"nl-{name}", self.registry, f"nl/{name}", "1")

    def lazy(self, name: str, *layers: Layer, **config: Any) -> str:
        self.store.layout.image(list(layers), f"nl-{name}", **config)
        target = f"{self.registry.host}/nl/{name}:1"
        source = f"oci:{self.store.layout.directory}:nl-{name}"
        run(*tools.weenv(), "convert", source, target, timeout=120, env=dict(os.environ))
        return target


REPOSITORY = [
    Member.directory("testbed"), Member("testbed/code", b"code\n"), Member("testbed/gone", b"x"),
    Member("testbed/changed", b"old\n"), Member.directory("testbed/full"), Member("testbed/full/below", b"x"),
    Member("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nrepo:x:7:7::/:/bin/sh\n"),
]  # fmt: skip


def harness(marker: str) -> list[Member]:
    """Members of a harness that overrides and deletes what a lazy group below has."""
    return [
        Member.directory("opt"), Member.directory("opt/agent"),
        Member("opt/agent/go", f"#!/bin/sh\necho agent {marker} $@\n".encode(), mode=0o755),
        Member.directory("testbed"), Member("testbed/.wh.gone"), Member("testbed/changed", b"new\n"),
        Member.directory("testbed/full"), Member("testbed/full/.wh..wh..opq"), Member("testbed/full/above", b"y"),
    ]  # fmt: skip


SCRIPT = "go now; ls /testbed; ls /testbed/full; cat /testbed/changed; tail -n 1 /etc/passwd"


def expected(marker: str) -> list[str]:
    return [f"agent {marker} now", "changed", "code", "full", "above", "new", "repo:x:7:7::/:/bin/sh"]


class Bench:
    """A node and the commands that users have; ``work`` is a directory for plans and configurations."""

    def __init__(self, node: Node, work: str) -> None:
        self.node = node
        self.work = work
        with open(node.config) as file:
            self._text = file.read()
        self.config = self.configured("convert", "")

    def configured(self, name: str, compose: str, namespace: str = "nl") -> str:
        """A configuration with that ``[compose]`` table."""
        path = os.path.join(self.node.home, f"{name}.toml")
        with open(path, "w") as file:
            file.write(self._text + f'[run]\naddress = "{self.node.containerd.socket}"\nnamespace = "{namespace}"\n')
            file.write(f'cgroup = "{self.node.containerd.cgroup}"\nruntime = "{tools.runc()}"\n[compose]\n{compose}\n')
        return path

    def plan(self, name: str, *refs: str, more: str = "") -> str:
        path = os.path.join(self.work, f"{name}.yaml")
        with open(path, "w") as file:
            file.write(f"apiVersion: weenv.dev/v1\nkind: EnvironmentPlan\nmetadata: {{name: {name}}}\n")
            file.write(f"groups: {json.dumps(refs)}\nconfig: {{env: {{PATH: '/opt/agent:/bin'}}}}\n{more}")
        return path

    def argv(self, *words: str, config: str = "") -> list[str]:
        """``words`` with ``--config`` after the sub-command, which is one word, or two for ``plan``."""
        count = 2 if words[0] == "plan" else 1
        return [*tools.weenv(), *words[:count], "--config", config or self.config, *words[count:]]

    def call(self, *words: str, config: str = "") -> subprocess.CompletedProcess[str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith("WEENV_")} | {"COLUMNS": "250"}
        return subprocess.run(
            self.argv(*words, config=config), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180, env=env,
            check=False,
        )  # fmt: skip

    def ok(self, *words: str, config: str = "") -> tuple[str, str]:
        done = self.call(*words, config=config)
        assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
        return done.stdout, done.stderr

    def fails(self, *words: str, config: str = "") -> str:
        """Its one error, which is no internal one; nothing may be left of the attempt."""
        done = self.call(*words, config=config)
        assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
        assert not done.stdout
        assert "internal error" not in done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    @property
    def store(self) -> str:
        return os.path.join(self.node.root, "converted")

    def blobs(self) -> set[str]:
        folder = os.path.join(self.store, "blobs", "sha256")
        return set(os.listdir(folder)) if os.path.isdir(folder) else set()

    def working(self) -> list[str]:
        folder = os.path.join(self.store, "work")
        return os.listdir(folder) if os.path.isdir(folder) else []

    def image(self, name: str, namespace: str = "nl") -> tuple[dict[str, str], list[dict[str, str]]]:
        """An image's labels, and those of its snapshots, bottom first."""

        async def go() -> tuple[dict[str, str], list[dict[str, str]]]:
            async with Client(self.node.containerd.socket) as client:
                where = client.namespace(namespace)
                image = await where.get_image(name)
                manifest = json.loads(await where.read_content(image.target.digest))
                config = json.loads(await where.read_content(manifest["config"]["digest"]))
                from weenv.core.digest import chain_id

                ids = config["rootfs"]["diff_ids"]
                chains = [chain_id(ids[: n + 1]) for n in range(len(ids))]
                snapshots = where.snapshots(SNAPSHOTTER)
                return dict(image.labels), [dict((await snapshots.stat(chain)).labels) for chain in chains]

        return asyncio.run(go())

    def lazy(self, name: str, namespace: str = "nl") -> list[bool]:
        """Which of an image's snapshots are served lazily, bottom first."""
        return [LAYER_ANNOTATION in labels for labels in self.image(name, namespace)[1]]

    def nothing_left(self, namespace: str) -> None:
        containerd = self.node.containerd
        wait_until("the collection", lambda: not containerd.snapshots(SNAPSHOTTER, namespace), 20)
        wait_until("the collection of content", lambda: not containerd.content(namespace), 20)
        assert not containerd.ctr("leases", "ls", "-q", namespace=namespace).split()
        assert not self.working()


@pytest.fixture(scope="module")
def publish(store: Store, registry: Registry) -> Publisher:
    return Publisher(store, registry)


@pytest.fixture(scope="module")
def repository(publish: Publisher) -> str:
    return publish.lazy("repository", publish.layer("repository", REPOSITORY))


@pytest.fixture(scope="module")
def module_bench(module_node: Node, home: str) -> Iterator[Bench]:
    bench = Bench(module_node, home)
    yield bench
    bench.call("rm", "--all", "--force")


@pytest.fixture
def bench(module_bench: Bench, node: Node) -> Bench:
    return module_bench


def test_it_is_converted_once_and_everything_says_so(
    bench: Bench, publish: Publisher, repository: str, registry: Registry
) -> None:
    tool = publish.plain("one", publish.layer("one", harness("one")), publish.layer("two", [Member("opt/agent/two", b"2")]))
    plan = bench.plan("one", publish.base, repository, tool)
    shown = json.loads(bench.ok("plan", "show", "--json", plan)[0])
    assert [layer["served"] for layer in shown["layers"]] == ["convert", "lazy", "convert", "convert"]
    assert f"not lazy: {tool}: 2 of 2 layers, " in (text := bench.ok("plan", "show", plan)[0])
    assert "will be converted on this node" in text
    assert f"{tool} is not in the lazy format: 2 of 2 layers" in bench.ok("plan", "lock", plan)[1]

    out, err = bench.ok("run", "--rm", plan, "--", "sh", "-c", SCRIPT)
    assert out.splitlines() == expected("one")
    assert err.count("\n") == 1
    assert err.startswith("weenv: not in the lazy format: ")
    assert f"{tool} (" in err
    assert "2 layers converted on this node, " in err
    assert "took" in err
    assert len(bench.blobs()) == 3
    assert not bench.working()

    mark = registry.mark()
    for _ in range(2):  # the second is the quick way
        out, err = bench.ok("run", "--rm", plan, "--", "sh", "-c", SCRIPT)
        assert out.splitlines() == expected("one")
        assert err.count("\n") == 1
        assert "served from this node's converted copy" in err
    assert not [request for request in registry.requests(mark) if request.blob], "nothing is fetched again"

    name, err = bench.ok("plan", "compose", plan)
    made = json.loads(bench.ok("plan", "compose", "--json", plan)[0])
    assert (made["name"], made["new"], made["lazy"]) == (name.strip(), False, False)
    assert [group["group"] for group in made["not_lazy"]] == [publish.base, tool]
    assert made["not_lazy"][1]["converted"] == 2
    assert "not in the lazy format" in err
    labels, _ = bench.image(made["name"])
    assert json.loads(labels[LABEL])[1]["group"] == tool
    assert bench.lazy(made["name"]) == [True, True, True, True]

    started = bench.ok("run", "-d", "--name", "nl-ps", plan, "--", "sleep", "1000")[0].strip()
    row = next(row for row in json.loads(bench.ok("ps", "--json")[0]) if row["name"] == started)
    assert row["not_lazy"] == json.loads(labels[LABEL])
    assert "3 converted" in bench.ok("ps")[0]
    status = json.loads(bench.ok("status", "--json")[0])
    assert sum(layer["converted"] for layer in status["layers"]) == 3 == status["converted_blobs"]
    assert "converted on this node: 3 layers" in bench.ok("status")[0]
    bench.ok("rm", "-f", started)


def test_the_image_is_the_same_on_every_node_whatever_it_does(bench: Bench, publish: Publisher, repository: str) -> None:
    tool = publish.plain("same", publish.layer("same", harness("same")))
    plan = bench.plan("same", publish.base, repository, tool)
    converted = json.loads(bench.ok("plan", "compose", "--json", plan)[0])
    bench.node.expect("image is not served lazily")
    unpacking = bench.configured("same", 'not_lazy = "unpack"', "nl-same")
    unpacked = json.loads(bench.ok("plan", "compose", "--json", plan, config=unpacking)[0])
    assert (converted["name"], converted["digest"]) == (unpacked["name"], unpacked["digest"])
    shown = json.loads(bench.ok("plan", "show", "--json", plan)[0])
    assert shown["digest"] == converted["digest"]
    manifest = bench.node.containerd.ctr("content", "get", converted["digest"], namespace="nl")
    digests = [layer["digest"] for layer in json.loads(manifest)["layers"]]
    assert digests == [layer["digest"] for layer in shown["layers"]], "the layers as the groups name them"


def test_every_namespace_ctr_and_removal(bench: Bench, publish: Publisher, repository: str) -> None:
    tool = publish.plain("spaces", publish.layer("spaces", harness("spaces")))
    plan = bench.plan("spaces", publish.base, repository, tool)
    containerd = bench.node.containerd
    for namespace in ("default", "k8s.io"):
        name = bench.ok("plan", "compose", "-n", namespace, plan)[0].strip()
        assert bench.node.shell(name, f"export PATH=/opt/agent:/bin; {SCRIPT}", namespace).splitlines() == expected("spaces")
        assert len(containerd.content(namespace)) == 2, "manifest and config: no layer was stored"
    containerd.remove_image(name)
    with bench.node.cri() as cri:
        cri.remove_image(name)  # under the name that CRI has given it as well
    for namespace in ("default", "k8s.io"):
        bench.nothing_left(namespace)


def test_two_who_start_at_once_convert_once(bench: Bench, publish: Publisher, repository: str, registry: Registry) -> None:
    big = publish.layer("race", [*harness("race"), Member("opt/agent/big", noise(24 << 20, 7))])
    plan = bench.plan("race", publish.base, repository, publish.plain("race", big))
    mark = registry.mark()
    argv = bench.argv("run", "--rm", plan, "--", "sh", "-c", SCRIPT)
    both = [
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = []
    for process in both:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out.splitlines()) == (0, expected("race")), err
        said.append(err)
    assert all("not in the lazy format" in err for err in said)
    fetched = [r for r in registry.requests(mark) if r.blob == big.digest and r.method == "GET"]
    assert len(fetched) == 1
    assert not bench.working()


def test_killed_in_the_middle_of_a_conversion(bench: Bench, publish: Publisher, repository: str) -> None:
    big = publish.layer("killed", [*harness("killed"), Member("opt/agent/big", noise(96 << 20, 8))])
    plan = bench.plan("killed", publish.base, repository, publish.plain("killed", big))
    before = bench.blobs()
    argv = bench.argv("run", "--rm", plan, "--", "sh", "-c", SCRIPT)
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until("the conversion", lambda: any(name.endswith(".out") for name in bench.working()), 60, 0.001)
    finally:
        process.kill()
        process.wait()
    assert any(name.endswith(".out") for name in bench.working()), "it was in the middle of it"
    assert bench.blobs() <= before | bench.blobs()
    out, err = bench.ok("run", "--rm", plan, "--", "sh", "-c", SCRIPT)
    assert out.splitlines() == expected("killed")
    assert "1 layer converted on this node" in err
    assert not bench.working()
    assert len(bench.blobs() - before) == 1


def test_what_cannot_be_converted_is_unpacked_and_the_rest_stays_lazy(
    bench: Bench, publish: Publisher, repository: str, registry: Registry
) -> None:
    value = xattr("system.posix_acl_access", ACL.decode(errors="surrogateescape"))
    acl = Member("opt/agent/acl", b"acl\n", pax=value)
    middle = publish.plain("acl", publish.layer("acl", [*harness("acl"), acl]))
    top = publish.lazy("above", publish.layer("above", [Member("testbed/.wh.code"), Member("opt/agent/last", b"last\n")]))
    plan = bench.plan("acl", publish.base, repository, middle, top)
    bench.node.expect("image is not served lazily")
    out, err = bench.ok("run", "--rm", plan, "--", "sh", "-c", "go x; ls /testbed; cat /opt/agent/acl /opt/agent/last")
    assert out.splitlines() == ["agent acl x", "changed", "full", "acl", "last"]
    assert f"{middle} (" in err
    assert "1 layer fetched and unpacked (" in err
    assert "POSIX ACL" in err
    name = json.loads(bench.ok("plan", "compose", "--json", plan)[0])["name"]
    assert bench.lazy(name) == [True, True, False, True]
    mark = registry.mark()
    again = bench.plan("acl2", publish.base, repository, middle)
    assert "unpacked" in bench.ok("run", "--rm", again, "--", "true")[1]
    assert not [r for r in registry.requests(mark) if r.blob and r.method == "GET" and r.status == 200], "no second fetch"
    shown = json.loads(bench.ok("plan", "show", "--json", again)[0])
    assert shown["layers"][2]["served"] == "unpack"
    assert "POSIX ACL" in shown["layers"][2]["reason"]
    mutated = bench.plan("acl3", publish.base, middle, more="mutations: [{files: {/x: y}}]\n")
    assert "has to be converted for the plan's mutations" in bench.fails("run", "--rm", mutated, "--", "true")


def test_a_mutation_over_what_was_converted(bench: Bench, publish: Publisher, repository: str) -> None:
    tool = publish.plain("mutated", publish.layer("mutated", harness("mutated")))
    patch = "--- a/changed\n+++ b/changed\n@@ -1 +1 @@\n-new\n+newest\n"
    more = f"mutations: [{{patch: {json.dumps(patch)}, directory: /testbed}}, {{delete: [/opt/agent/go]}}]\n"
    plan = bench.plan("mutated", publish.base, repository, tool, more=more)
    out, err = bench.ok("run", "--rm", plan, "--", "sh", "-c", "cat /testbed/changed; ls /opt/agent /testbed/full")
    assert out.split() == ["newest", "/opt/agent:", "/testbed/full:", "above"]
    assert "1 layer converted on this node" in err


def test_it_may_be_unpacked_or_refused_instead(bench: Bench, publish: Publisher, repository: str) -> None:
    tool = publish.plain("modes", publish.layer("modes", harness("modes")))
    plan = bench.plan("modes", publish.base, repository, tool)
    before = bench.blobs()
    refusing = bench.configured("refuse", 'not_lazy = "refuse"', "nl-refuse")
    assert "is not in the lazy format" in bench.fails("run", "--rm", plan, "--", "true", config=refusing)
    assert "compose.not_lazy" in bench.fails("plan", "compose", plan, config=refusing)
    bench.nothing_left("nl-refuse")
    bench.node.expect("image is not served lazily")
    unpacking = bench.configured("unpack", 'not_lazy = "unpack"', "nl-unpack")
    out, err = bench.ok("run", "--rm", plan, "--", "sh", "-c", SCRIPT, config=unpacking)
    assert out.splitlines() == expected("modes")
    assert "1 layer fetched and unpacked, took" in err
    name = json.loads(bench.ok("plan", "compose", "--json", plan, config=unpacking)[0])["name"]
    assert bench.lazy(name, "nl-unpack")[1:] == [True, False]
    assert bench.blobs() == before
    bench.node.containerd.remove_image(name, "nl-unpack")
    bench.nothing_left("nl-unpack")


@pytest.mark.parametrize("mode", ["convert", "unpack"])
def test_a_registry_that_lies(bench: Bench, publish: Publisher, repository: str, registry: Registry, mode: str) -> None:
    namespace = f"nl-lie-{mode}"
    config = bench.configured(f"lie-{mode}", f'not_lazy = "{mode}"', namespace)
    layer = publish.layer(f"lie-{mode}", harness(f"lie-{mode}"))
    other = publish.layer(f"other-{mode}", harness(f"other-{mode}"))
    plan = bench.plan(f"lie-{mode}", repository, publish.plain(f"lie-{mode}", layer))
    path, before = registry.blob_path(layer.digest), bench.blobs()
    with open(path, "rb") as file:
        right = file.read()
    bench.node.expect("image is not served lazily")
    try:
        with open(path, "wb") as file:
            file.write(right[:40] + bytes([right[40] ^ 1]) + right[41:])
        assert "content does not have its digest" in bench.fails("run", "--rm", plan, "--", "true", config=config)
    finally:
        with open(path, "wb") as file:
            file.write(right)
    bench.nothing_left(namespace)
    forged = publish.plain(f"forged-{mode}", dataclasses.replace(layer, diff_id=other.diff_id))
    plan = bench.plan(f"forged-{mode}", repository, forged)
    assert f"its image's config says {other.diff_id}" in bench.fails("run", "--rm", plan, "--", "true", config=config)
    bench.nothing_left(namespace)
    assert bench.blobs() == before


@pytest.mark.parametrize("mode", ["convert", "unpack"])
def test_a_bomb(bench: Bench, publish: Publisher, repository: str, mode: str) -> None:
    bomb = publish.plain(f"bomb-{mode}", publish.layer(f"bomb-{mode}", [Member("bomb", bytes(128 << 20))]))
    plan = bench.plan(f"bomb-{mode}", repository, bomb)
    config = bench.configured(f"bomb-{mode}", f'not_lazy = "{mode}"\nmax_layer = 67108864', f"nl-bomb-{mode}")
    before = bench.blobs()
    bench.node.expect("image is not served lazily")
    assert "is beyond a limit of this node" in bench.fails("plan", "compose", plan, config=config)
    bench.nothing_left(f"nl-bomb-{mode}")
    assert bench.blobs() == before
