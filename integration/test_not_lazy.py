"""Groups that are not in the lazy format, from a real registry, under real containerd: converted once, or unpacked."""

from __future__ import annotations

import json
import subprocess

import pytest

from weenv.environment.notlazy import LABEL
from weenv_testkit.corpus import noise
from weenv_testkit.images import Member, xattr
from weenv_testkit.node import Node
from weenv_testkit.notlazy import ACL, SCRIPT, Bench, Publisher, expected, harness
from weenv_testkit.registry import Registry


@pytest.fixture
def bench(plain_groups: Bench, node: Node) -> Bench:
    return plain_groups


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


def test_what_is_there_lazily_from_another_image_is_said_so(bench: Bench, publish: Publisher, repository: str) -> None:
    layer = publish.layer("twin", harness("twin"))
    lazily, plainly = publish.lazy("twin-lazy", layer), publish.plain("twin-plain", layer)
    plan = bench.plan("twin", plainly)
    assert "will be converted on this node" in bench.ok("plan", "show", plan)[0]
    bench.ok("plan", "compose", bench.plan("twin-lazy", lazily))
    (shown,) = json.loads(bench.ok("plan", "show", "--json", plan)[0])["layers"]
    assert (shown["lazy"], shown["served"]) == (False, "present")
    assert "on this node lazily already" in bench.ok("plan", "show", plan)[0]
    before = bench.blobs()
    assert bench.ok("plan", "compose", plan)[1] == "", "nothing was converted"
    assert bench.blobs() == before


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


def test_what_cannot_be_converted_is_unpacked_and_the_rest_stays_lazy(
    bench: Bench, publish: Publisher, repository: str, registry: Registry
) -> None:
    value = xattr("system.posix_acl_access", ACL.decode(errors="surrogateescape"))
    acl = Member("opt/agent/acl", b"acl\n", pax=value)
    odd = publish.layer("acl", [*harness("acl"), acl])
    middle = publish.plain("acl", odd)
    top = publish.lazy("above", publish.layer("above", [Member("testbed/.wh.code"), Member("opt/agent/last", b"last\n")]))
    plan = bench.plan("acl", publish.base, repository, middle, top)
    bench.node.expect("image is not served lazily")
    mark = registry.mark()
    out, err = bench.ok("run", "--rm", plan, "--", "sh", "-c", "go x; ls /testbed; cat /opt/agent/acl /opt/agent/last")
    assert out.splitlines() == ["agent acl x", "changed", "full", "acl", "last"]
    assert f"{middle} (" in err
    assert "1 layer fetched and unpacked (" in err
    assert "POSIX ACL" in err
    fetched = [r for r in registry.requests(mark) if r.blob == odd.digest and r.method == "GET"]
    assert len(fetched) == 1, "what was fetched to be converted is what is unpacked"
    assert not bench.working()
    name = json.loads(bench.ok("plan", "compose", "--json", plan)[0])["name"]
    assert bench.lazy(name) == [True, True, False, True]
    mark = registry.mark()
    again = bench.plan("acl2", publish.base, repository, middle)
    assert "unpacked" in bench.ok("run", "--rm", again, "--", "true")[1]
    assert not [r for r in registry.requests(mark) if r.blob and r.method == "GET" and r.status == 200], "no second fetch"
    shown = json.loads(bench.ok("plan", "show", "--json", again)[0])
    assert shown["layers"][2]["served"] == "unpacked"
    assert "POSIX ACL" in shown["layers"][2]["reason"]
    mutated = bench.plan("acl3", publish.base, middle, more="mutations: [{files: {/x: y}}]\n")
    assert "has to be converted for the plan's mutations" in bench.fails("run", "--rm", mutated, "--", "true")
