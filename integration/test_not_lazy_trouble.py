"""Groups that are not in the lazy format: kill -9, registries that lie, bombs, nodes that refuse, mutations above them.

None of it depends on containerd's line, so one will do.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import signal
import subprocess

import pytest

import weenv
from weenv.environment.node import load
from weenv_testkit.corpus import noise
from weenv_testkit.images import Member
from weenv_testkit.node import Node
from weenv_testkit.notlazy import SCRIPT, Bench, Publisher, expected, harness
from weenv_testkit.procs import wait_until
from weenv_testkit.registry import Registry


@pytest.fixture(scope="module", params=["2.1"])
def line(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bench(plain_groups: Bench, node: Node) -> Bench:
    return plain_groups


def test_ended_and_killed_in_the_middle_of_a_conversion(bench: Bench, publish: Publisher, repository: str) -> None:
    slow = noise(32 << 20, 8).hex().encode()  # takes zstd longer than noise
    big = publish.layer("killed", [*harness("killed"), Member("opt/agent/big", slow)])
    plan = bench.plan("killed", publish.base, repository, publish.plain("killed", big))
    bench.ok("plan", "compose", bench.plan("warm", publish.base))
    before = bench.blobs()
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen(
            ["nice", "-n", "19", *bench.argv("run", "--rm", plan, "--", "sh", "-c", SCRIPT)], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            wait_until("the conversion", lambda: any(name.endswith(".out") for name in bench.working()), 60, 0.001)
            process.send_signal(number)
        except BaseException:
            process.kill()
            raise
        finally:
            status = process.wait()
        assert status == {signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGKILL: -signal.SIGKILL}[number]
        assert bench.blobs() == before
        assert bool(bench.working()) == (number == signal.SIGKILL), "only who is killed leaves something"
    out, err = bench.ok("run", "--rm", plan, "--", "sh", "-c", SCRIPT)
    assert out.splitlines() == expected("killed")
    assert "1 layer converted on this node" in err
    assert not bench.working()
    assert len(bench.blobs() - before) == 1


def test_a_layer_that_is_no_tar(bench: Bench, publish: Publisher, repository: str) -> None:
    path = publish.tar("no-tar", [])
    with open(path, "wb") as file:
        file.write(noise(100_000, 11))
    broken = publish.plain("no-tar", publish.store.layout.layer(path))
    plan = bench.plan("no-tar", repository, broken)
    config = bench.configured("no-tar", "", "nl-no-tar")
    bench.node.expect("image is not served lazily")
    for _ in range(2):  # the second time it is known that it cannot be converted
        assert "cannot be unpacked" in bench.fails("run", "--rm", plan, "--", "true", config=config)
        bench.nothing_left("nl-no-tar")


def test_on_a_terminal_progress_is_shown(bench: Bench, publish: Publisher, repository: str) -> None:
    big = publish.layer("shown", [*harness("shown"), Member("opt/agent/big", noise(24 << 20, 9))])
    tool = publish.plain("shown", big)
    plan = bench.plan("shown", publish.base, repository, tool)
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            bench.argv("run", "--rm", plan, "--", "sh", "-c", SCRIPT), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=theirs, text=True, env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
        )  # fmt: skip
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # nobody has the other end any more (tty_ioctl(4): EIO)
                break
        out, _ = process.communicate(timeout=60)
    finally:
        os.close(ours)
    assert out.splitlines() == expected("shown")
    text = shown.decode()
    assert f"converting {tool}" in text
    assert text.rstrip().splitlines()[-1].endswith("Publish it lazily: weenv convert")


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
    refusing = bench.configured("refuse-known", 'not_lazy = "refuse"', "nl-unpack")
    assert "is not in the lazy format" in bench.fails("run", "--rm", plan, "--", "true", config=refusing)
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


def test_a_mutation_over_what_was_converted(bench: Bench, publish: Publisher, repository: str) -> None:
    tool = publish.plain("mutated", publish.layer("mutated", harness("mutated")))
    patch = "--- a/changed\n+++ b/changed\n@@ -1 +1 @@\n-new\n+newest\n"
    more = f"mutations: [{{patch: {json.dumps(patch)}, directory: /testbed}}, {{delete: [/opt/agent/go]}}]\n"
    plan = bench.plan("mutated", publish.base, repository, tool, more=more)
    out, err = bench.ok("run", "--rm", plan, "--", "sh", "-c", "cat /testbed/changed; ls /opt/agent /testbed/full")
    assert out.split() == ["newest", "/opt/agent:", "/testbed/full:", "above"]
    assert "1 layer converted on this node" in err
    with weenv.Environment.start(plan, config=load(bench.config)) as env:
        assert [(group.group, group.converted) for group in env.not_lazy] == [(publish.base, 1), (tool, 1)]
        assert env.read_file("/testbed/changed") == b"newest\n"
