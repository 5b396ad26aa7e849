"""environment/gateway/ over real HTTP, before registries that misbehave on command."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from simulator.gateway import Groups, directory, plan_of, serving
from simulator.pushable import PushableRegistry, Repository
from simulator.registry import SimulatedRegistry, redirect, stall, status

from weenv.core.digest import sha256
from weenv.environment.build import compose
from weenv.environment.gateway.names import spell
from weenv.environment.plan import parse_plan
from weenv.registry.client import RegistryClient
from weenv.registry.groupref.resolve import Resolver
from weenv.registry.manifest import OCI_INDEX, OCI_MANIFEST

HEX = "4f" * 32


async def test_a_plan_is_answered_as_it_is_composed(tmp_path: Path) -> None:
    async with SimulatedRegistry() as sim, RegistryClient() as client:
        groups = Groups(sim)
        refs = [groups.add("base", {"a": b"1" * 100_000}, "b"), groups.add("tool", {"b": b"2"}, "t", Env=["X=1"])]
        plans = directory(tmp_path)
        (plans / "x.yaml").write_text(plan_of(*refs))
        (plans / "x@v2.yaml").write_text(plan_of(refs[0]))
        (plans / "y@RC.yml").write_text(plan_of(refs[1]))
        wanted = await compose(parse_plan(plan_of(*refs)), resolver=Resolver(client), root=str(tmp_path / "elsewhere"))
        async with serving(tmp_path / "root", plans=(str(plans),)) as gw:
            code, headers, body = await gw.ask("plan/x/manifests/latest")
            assert (code, body) == (200, wanted.manifest)
            assert headers["docker-content-digest"] == wanted.digest == headers["etag"].strip('"')
            assert headers["content-type"] == OCI_MANIFEST
            code, headers, body = await gw.ask("plan/x/manifests/latest", "HEAD")
            assert (code, int(headers["content-length"]), body) == (200, len(wanted.manifest), b"")
            assert (await gw.ask("plan/x/manifests/latest", If_None_Match=f'"{wanted.digest}"'))[0] == 304
            assert (await gw.ask(f"plan/x/manifests/{wanted.digest}"))[2] == wanted.manifest
            assert (await gw.ask(f"plan/x/blobs/{wanted.config_digest}"))[2] == wanted.config
            assert (await gw.ask(f"plan/x/blobs/{wanted.config_digest}", Range="bytes=2-5"))[2] == wanted.config[2:6]
            assert (await gw.ask("plan/x/manifests/v2"))[0] == 200
            assert (await gw.ask("plan/y/manifests/RC"))[0] == 200
            assert json.loads((await gw.ask("plan/x/tags/list"))[2]) == {"name": "plan/x", "tags": ["latest", "v2"]}
            code, headers, body = await gw.ask("plan/x/tags/list?n=1")
            assert json.loads(body)["tags"] == ["latest"]
            assert headers["link"] == '</v2/plan/x/tags/list?n=1&last=latest>; rel="next"'
            assert json.loads((await gw.ask("plan/x/tags/list?n=1&last=latest"))[2])["tags"] == ["v2"]
            code, headers, body = await gw.ask(f"plan/x/referrers/{wanted.digest}?artifactType=x")
            assert (json.loads(body)["manifests"], headers["oci-filters-applied"]) == ([], "artifactType")
            assert headers["content-type"] == OCI_INDEX
            assert (await gw.ask(""))[0] == 200


async def test_a_stack_is_answered_by_its_name_alone(tmp_path: Path) -> None:
    async with SimulatedRegistry() as sim, RegistryClient() as client:
        groups = Groups(sim)
        refs = [groups.add("base", {"a": b"1"}, "b"), groups.add("tool", {"b": b"2"}, "t")]
        wanted = await compose(parse_plan(plan_of(*refs)), resolver=Resolver(client), root=str(tmp_path / "elsewhere"))
        async with serving(tmp_path / "root", groups=(sim.host,), default_registry=sim.host) as gw:
            name = spell(refs)
            assert (await gw.ask(f"{name}/manifests/latest"))[2] == wanted.manifest
            assert (await gw.ask(f"{name.replace('/and/', '/_/')}/manifests/any"))[2] == wanted.manifest
            assert (await gw.ask("compose/base__b/and/tool/manifests/t"))[2] == wanted.manifest
            assert json.loads((await gw.ask(f"{name}/tags/list"))[2])["tags"] == []


async def test_a_digest_of_another_nodes_gateway_is_found_by_composing(tmp_path: Path) -> None:
    """Manifests of Kubernetes name digests; each node has a gateway of its own."""
    async with SimulatedRegistry() as sim, RegistryClient() as client:
        ref = Groups(sim).add("base", {"a": b"1"})
        (directory(tmp_path) / "x.yaml").write_text(plan_of(ref))
        wanted = await compose(parse_plan(plan_of(ref)), resolver=Resolver(client), root=str(tmp_path / "elsewhere"))
        async with serving(tmp_path / "root", plans=(str(directory(tmp_path)),)) as gw:
            assert (await gw.ask(f"plan/x/manifests/{wanted.digest}"))[2] == wanted.manifest
            assert await gw.code(f"plan/x/manifests/sha256:{HEX}") == (404, "MANIFEST_UNKNOWN")


async def test_digests_go_on_after_tag_and_process_have_moved_on(tmp_path: Path) -> None:
    async with SimulatedRegistry() as sim:
        groups = Groups(sim)
        ref = groups.add("base", {"a": b"1"})
        name = spell([ref])
        async with serving(tmp_path / "root", groups=(sim.host,), max_age=0.0) as gw:
            _, headers, first = await gw.ask(f"{name}/manifests/latest")
            old_layer = groups.layers["base"]
            groups.add("base", {"a": b"2"})
            _, new_headers, second = await gw.ask(f"{name}/manifests/latest")
            assert first != second
        async with serving(tmp_path / "root", groups=(sim.host,), blobs="proxy") as gw:
            assert (await gw.ask(f"{name}/manifests/{headers['docker-content-digest']}"))[2] == first
            assert (await gw.ask(f"{name}/manifests/{new_headers['docker-content-digest']}"))[2] == second
            assert (await gw.ask(f"{name}/blobs/{old_layer[0]}"))[2] == old_layer[1]
            config = json.loads(first)["config"]
            assert len((await gw.ask(f"{name}/blobs/{config['digest']}"))[2]) == config["size"]


async def test_a_registry_that_is_away_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plans = directory(tmp_path)
    async with SimulatedRegistry() as sim, RegistryClient() as client:
        groups = Groups(sim)
        ref = groups.add("base", {"a": b"1"})
        name = spell([ref])
        sim_host = sim.host
        (plans / "x.yaml").write_text(plan_of(ref))
        async with serving(tmp_path / "root", groups=(sim.host,), plans=(str(plans),), max_age=0.0) as gw:
            _, _, body = await gw.ask(f"{name}/manifests/latest")
            assert (await gw.ask("plan/x/manifests/latest"))[2] == body
        assert client
    async with serving(tmp_path / "root", groups=(sim_host,), plans=(str(plans),), max_age=0.0) as gw:
        with caplog.at_level(logging.WARNING):
            assert (await gw.ask(f"{name}/manifests/latest"))[2] == body
            assert (await gw.ask("plan/x/manifests/latest"))[2] == body
        assert "registry away" in caplog.text
        other = spell([ref.replace("base", "other")])
        assert await gw.code(f"{other}/manifests/latest") == (503, "UNAVAILABLE")
        layer = json.loads(body)["layers"][0]["digest"]
        assert (await gw.code(f"{name}/blobs/{layer}"))[0] == 503


@pytest.mark.parametrize("mode", ["auto", "redirect", "proxy"])
async def test_layers_by_redirect_or_proxy(tmp_path: Path, mode: str) -> None:
    async with SimulatedRegistry() as sim:
        groups = Groups(sim)
        name = spell([groups.add("base", {"a": os.urandom(300_000)})])
        digest, blob = groups.layers["base"]
        async with serving(tmp_path / "root", groups=(sim.host,), blobs=mode) as gw:
            await gw.ask(f"{name}/manifests/latest")
            code, headers, body = await gw.ask(f"{name}/blobs/{digest}")
            if mode == "proxy":
                assert (code, body) == (200, blob)
                code, headers, body = await gw.ask(f"{name}/blobs/{digest}", Range="bytes=1000-1999")
                assert (code, body) == (206, blob[1000:2000])
                assert headers["content-range"] == f"bytes 1000-1999/{len(blob)}"
                assert (await gw.ask(f"{name}/blobs/{digest}", Range="bytes=-7"))[2] == blob[-7:]
                stale = await gw.ask(f"{name}/blobs/{digest}", Range="bytes=0-1", If_Range='"other"')
                assert (stale[0], stale[2]) == (200, blob)
                code, headers, _ = await gw.ask(f"{name}/blobs/{digest}", Range=f"bytes={len(blob)}-")
                assert (code, headers["content-range"]) == (416, f"bytes */{len(blob)}")
            else:
                assert code == 307
                async with gw.session.get(headers["location"]) as answer:
                    assert await answer.read() == blob
            code, headers, _ = await gw.ask(f"{name}/blobs/{digest}", "HEAD")
            assert (code, int(headers["content-length"]), headers["accept-ranges"]) == (200, len(blob), "bytes")
            assert (await gw.ask(f"{name}/blobs/{digest}", If_None_Match=f'"{digest}"'))[0] == 304
            assert await gw.code(f"{name}/blobs/sha256:{HEX}") == (404, "BLOB_UNKNOWN")
            assert await gw.code(f"{name}/blobs/md5:00") == (400, "DIGEST_INVALID")


def docker_config(tmp_path: Path, host: str) -> str:
    path = tmp_path / "docker.json"
    path.write_text(json.dumps({"auths": {host: {"auth": base64.b64encode(b"node:secret").decode()}}}))
    return str(path)


@pytest.mark.parametrize("auth", ["basic", "bearer"])
async def test_the_nodes_credentials_stay_on_the_node(tmp_path: Path, auth: str) -> None:
    """A client could not follow a redirect to a registry that asks for a token; it may follow one to a signed URL."""
    async with SimulatedRegistry(auth=auth, user=("node", "secret")) as sim:
        groups = Groups(sim)
        name = spell([groups.add("base", {"a": b"1" * 50_000})])
        digest, blob = groups.layers["base"]
        tables = {"registry": {"docker_config": docker_config(tmp_path, sim.host), "attempts": 1}}
        async with serving(tmp_path / "root", tables, groups=(sim.host,)) as gw:
            await gw.ask(f"{name}/manifests/latest")
            code, headers, body = await gw.ask(f"{name}/blobs/{digest}")
            assert (code, body) == (200, blob)
            sim.redirect_blobs = True
            code, headers, _ = await gw.ask(f"{name}/blobs/{digest}")
            assert code == 307
            assert headers["location"].startswith(f"http://{sim.storage}/")
            assert "secret" not in str(headers)
            assert not any("Authorization" in seen.headers for seen in sim.seen if seen.server == "storage")
            sim.expire_urls()
            async with gw.session.get((await gw.ask(f"{name}/blobs/{digest}"))[1]["location"]) as answer:
                assert await answer.read() == blob, "a URL that has expired is not given out"


async def test_what_upstream_does_wrong(tmp_path: Path) -> None:
    async with SimulatedRegistry() as sim:
        groups = Groups(sim)
        name = spell([groups.add("base", {"a": os.urandom(200_000)})])
        digest, blob = groups.layers["base"]
        async with serving(tmp_path / "root", groups=(sim.host,)) as gw:
            await gw.ask(f"{name}/manifests/latest")
            sim.script.extend([status(500), status(200)])
            assert (await gw.ask(f"{name}/blobs/{digest}"))[0] in (200, 502, 503)
            sim.script.clear()
            sim.script.extend([redirect("ftp://nowhere/"), redirect("ftp://nowhere/")])
            assert await gw.code(f"{name}/blobs/{digest}") == (502, "UNKNOWN")
            del sim.blobs[digest]
            assert await gw.code(f"{name}/blobs/{digest}") == (404, "BLOB_UNKNOWN")
        sim.blobs[digest] = blob
        async with serving(tmp_path / "root", groups=(sim.host,), blobs="proxy") as gw:
            sim.script.append(stall(30, 1000))
            tables_deadline = time.monotonic()
            with pytest.raises((aiohttp.ClientError, TimeoutError)):
                async with asyncio.timeout(1):
                    await gw.ask(f"{name}/blobs/{digest}")
            assert time.monotonic() - tables_deadline < 25


async def test_no_open_proxy(tmp_path: Path) -> None:
    async with SimulatedRegistry() as sim:
        groups = Groups(sim)
        ref = groups.add("team/base", {"a": b"1"})
        name = spell([ref])
        async with serving(tmp_path / "root") as gw:
            assert await gw.code(f"{name}/manifests/latest") == (403, "DENIED")
        async with serving(tmp_path / "root", groups=(f"{sim.host}/other/**",)) as gw:
            assert await gw.code(f"{name}/manifests/latest") == (403, "DENIED")
            assert await gw.code("compose/debian/manifests/12") == (403, "DENIED")
        assert not sim.seen, "nobody was asked"
        async with serving(tmp_path / "root", groups=(f"{sim.host}/team/*",)) as gw:
            assert (await gw.ask(f"{name}/manifests/latest"))[0] == 200


async def test_what_is_no_longer_allowed_is_not_answered_by_digest_either(tmp_path: Path) -> None:
    async with SimulatedRegistry() as sim:
        groups = Groups(sim)
        name = spell([groups.add("team/base", {"a": b"1"})])
        digest, _ = groups.layers["team/base"]
        async with serving(tmp_path / "root", groups=(sim.host,)) as gw:
            _, headers, _ = await gw.ask(f"{name}/manifests/latest")
        async with serving(tmp_path / "root", groups=(f"{sim.host}/other/**",)) as gw:
            for path in (f"manifests/{headers['docker-content-digest']}", f"blobs/{digest}"):
                assert await gw.code(f"{name}/{path}") == (403, "DENIED")
        async with serving(tmp_path / "root", groups=(f"{sim.host}/team/**",)) as gw:
            assert (await gw.ask(f"{name}/blobs/{digest}"))[0] == 307


async def test_what_one_name_may_another_may_not_though_the_image_is_the_same(tmp_path: Path) -> None:
    async with SimulatedRegistry() as sim:
        groups = Groups(sim)
        ref = groups.add("team/base", {"a": b"1"})
        stack = spell([ref])
        digest, _ = groups.layers["team/base"]
        plans = directory(tmp_path)
        (plans / "x.yaml").write_text(plan_of(ref))
        async with serving(tmp_path / "root", groups=(sim.host,), plans=(str(plans),)) as gw:
            _, headers, _ = await gw.ask(f"{stack}/manifests/latest")
        async with serving(tmp_path / "root", plans=(str(plans),)) as gw:
            status_, same, _ = await gw.ask("plan/x/manifests/latest")
            assert (status_, same["docker-content-digest"]) == (200, headers["docker-content-digest"])
            config = json.loads((await gw.ask("plan/x/manifests/latest"))[2])["config"]["digest"]
            for path in (f"manifests/{headers['docker-content-digest']}", f"blobs/{digest}", f"blobs/{config}"):
                assert await gw.code(f"{stack}/{path}") == (403, "DENIED")
                assert (await gw.ask(f"plan/x/{path}"))[0] in (200, 307)


async def test_plans_from_a_registry_stack_what_is_allowed_and_read_no_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    async with SimulatedRegistry() as sim:
        groups = Groups(sim)
        ref = groups.add("team/base", {"a": b"1"}, "b")

        def publish(text: str) -> None:
            body = text.encode()
            layer = {"mediaType": "application/vnd.weenv.plan.v1+yaml", "digest": sim.add_blob(body), "size": len(body)}
            manifest = {
                "schemaVersion": 2, "mediaType": OCI_MANIFEST, "artifactType": "application/vnd.weenv.plan.v1",
                "config": {"mediaType": "application/vnd.oci.empty.v1+json", "digest": sim.add_blob(b"{}"), "size": 2},
                "layers": [layer],
            }  # fmt: skip
            sim.add_manifest(json.dumps(manifest).encode(), OCI_MANIFEST, "p")

        team = f"{sim.host}/team/**"
        async with serving(tmp_path / "root", plans=(f"{sim.host}/plans",), groups=(team,), max_age=0.0) as gw:
            publish(plan_of(ref))
            assert (await gw.ask("plan/x/manifests/p"))[0] == 200
            publish(plan_of(ref.replace("team", "other")))
            assert await gw.code("plan/x/manifests/p") == (403, "DENIED")
            publish(plan_of(f"oci:{tmp_path}"))
            assert await gw.code("plan/x/manifests/p") == (403, "DENIED")
            publish(plan_of(ref, more="mutations:\n  - files: {/x: {file: secret}}\n"))
            assert await gw.code("plan/x/manifests/p") == (422, "MANIFEST_INVALID")
            publish(plan_of(ref, more="nonsense: 1\n"))
            assert await gw.code("plan/x/manifests/p") == (422, "MANIFEST_INVALID")
            publish(plan_of(ref, more="mutations:\n  - run: make\n"))
            assert await gw.code("plan/x/manifests/p") == (422, "MANIFEST_INVALID")
            assert await gw.code("plan/x/manifests/b") == (422, "MANIFEST_INVALID"), "an image is no plan"
            assert await gw.code("plan/x/manifests/none") == (404, "MANIFEST_UNKNOWN")


async def test_tags_that_are_none_are_not_handed_on(tmp_path: Path) -> None:
    async with PushableRegistry() as sim:
        bad = ['b"c', "<script>", "x" * 200, "a/b", "", "v>; rel=next"]
        held = {f"sha256:{HEX}": (OCI_MANIFEST, b"{}")}
        sim.repositories["plans/x"] = Repository(manifests=held, tags=dict.fromkeys(["v2", *bad, "v1"], f"sha256:{HEX}"))
        async with serving(tmp_path / "root", plans=(f"{sim.host}/plans",)) as gw:
            _, headers, body = await gw.ask("plan/x/tags/list?n=1")
            assert json.loads(body)["tags"] == ["v1"]
            assert headers["link"] == '</v2/plan/x/tags/list?n=1&last=v1>; rel="next"'
            assert json.loads((await gw.ask("plan/x/tags/list"))[2])["tags"] == ["v1", "v2"]


async def test_what_is_not_there_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """docker and ctr ask by HEAD, which has no body: they show a status, and nothing else says why."""
    caplog.set_level(logging.INFO)
    async with serving(tmp_path / "root", plans=(str(directory(tmp_path)),)) as gw:
        assert (await gw.ask("plan/tpyo/manifests/latest", "HEAD"))[0] == 404
    assert "refused: no plan tpyo:latest" in caplog.text


async def test_what_is_refused(tmp_path: Path) -> None:
    async with SimulatedRegistry() as sim:
        groups = Groups(sim)
        ref = groups.add("base", {"a": b"1"})
        plans = directory(tmp_path)
        (plans / "x.yaml").write_text(plan_of(ref))
        (plans / "broken.yaml").write_text("a: [")
        (plans / "gone.yaml").write_text(plan_of(ref.replace(":1", ":none")))
        (plans / "directory.yaml").mkdir()
        os.mkfifo(plans / "fifo.yaml")
        async with serving(tmp_path / "root", plans=(str(plans),), groups=(sim.host,)) as gw:
            for path, wanted in {
                "plan/none/manifests/latest": (404, "MANIFEST_UNKNOWN"),
                "plan/none/tags/list": (404, "NAME_UNKNOWN"),
                "plan/x/manifests/none": (404, "MANIFEST_UNKNOWN"),
                "plan/gone/manifests/latest": (404, "MANIFEST_UNKNOWN"),
                "plan/broken/manifests/latest": (422, "MANIFEST_INVALID"),
                "plan/directory/manifests/latest": (502, "UNKNOWN"),
                "plan/fifo/manifests/latest": (502, "UNKNOWN"),
                "other/x/manifests/latest": (400, "NAME_INVALID"),
                "plan/..%2fetc/manifests/latest": (400, "NAME_INVALID"),
                "plan/X/manifests/latest": (400, "NAME_INVALID"),
                "plan/x/manifests/-bad": (400, "NAME_INVALID"),
                "plan/x/manifests/sha256:12": (400, "DIGEST_INVALID"),
                "compose/and/manifests/latest": (400, "NAME_INVALID"),
                f"{spell([ref.replace(':1', ':none')])}/manifests/latest": (404, "MANIFEST_UNKNOWN"),
                "_catalog": (404, "UNSUPPORTED"),
            }.items():
                assert await gw.code(path) == wanted, path
            for method in ("POST", "PUT", "PATCH", "DELETE"):
                assert await gw.code("plan/x/blobs/uploads/", method) == (405, "UNSUPPORTED")
            docker_only = "application/vnd.docker.distribution.manifest.v2+json"
            assert await gw.code("plan/x/manifests/latest", Accept=docker_only) == (404, "MANIFEST_UNKNOWN")
            url = f"http://{gw.address}/v2/plan/x/manifests/latest"
            async with gw.session.get(url, data=b"x" * 10) as answer:
                assert answer.status == 413
        with contextlib.closing(sqlite3.connect(str(tmp_path / "root" / "gateway.db"))) as db:
            assert db.execute("SELECT count(*) FROM images").fetchone()[0] == 0, "nothing is left of what was refused"


async def test_a_mutation_made_here_is_served_from_here_and_made_again(tmp_path: Path) -> None:
    async with SimulatedRegistry() as sim:
        groups = Groups(sim)
        ref = groups.add("base", {"etc/a": b"1\n"})
        plans = directory(tmp_path)
        (plans / "x.yaml").write_text(plan_of(ref, more='mutations:\n  - files: {/etc/b: "2"}\n'))
        async with serving(tmp_path / "root", plans=(str(plans),)) as gw:
            _, headers, body = await gw.ask("plan/x/manifests/latest")
            layers = json.loads(body)["layers"]
            assert len(layers) == 2
            code, _, blob = await gw.ask(f"plan/x/blobs/{layers[1]['digest']}")
            assert (code, sha256(blob)) == (200, layers[1]["digest"])
            part = await gw.ask(f"plan/x/blobs/{layers[1]['digest']}", Range="bytes=3-9")
            assert (part[0], part[2]) == (206, blob[3:10])
            (tmp_path / "root/mutations/blobs/sha256" / layers[1]["digest"][7:]).unlink()
            assert (await gw.ask(f"plan/x/manifests/{headers['docker-content-digest']}"))[2] == body
            assert (await gw.ask(f"plan/x/blobs/{layers[1]['digest']}"))[2] == blob


def deny(host: str) -> dict[str, Any]:
    return {"policy": {"rules": [{"match": [f"{host}/**"], "action": "deny"}]}}


async def test_the_policy_is_asked_before_anything_is_answered(tmp_path: Path) -> None:
    async with SimulatedRegistry() as sim:
        groups = Groups(sim)
        name = spell([groups.add("base", {"a": b"1"})])
        digest, _ = groups.layers["base"]
        async with serving(tmp_path / "root", groups=(sim.host,)) as gw:
            _, headers, body = await gw.ask(f"{name}/manifests/latest")
        async with serving(tmp_path / "root", deny(sim.host), groups=(sim.host,)) as gw:
            for path in (
                f"manifests/{headers['docker-content-digest']}", "manifests/latest", f"blobs/{digest}",
                f"blobs/{json.loads(body)['config']['digest']}",
            ):  # fmt: skip
                assert await gw.code(f"{name}/{path}") == (403, "DENIED"), path
        async with serving(tmp_path / "root", groups=(sim.host,)) as gw:
            assert (await gw.ask(f"{name}/manifests/{headers['docker-content-digest']}"))[2] == body


async def test_many_ask_for_one_name_and_it_is_composed_once(tmp_path: Path) -> None:
    async with SimulatedRegistry() as sim:
        groups = Groups(sim)
        name = spell([groups.add("base", {"a": b"1"})])
        async with serving(tmp_path / "root", groups=(sim.host,)) as gw:
            answers = await asyncio.gather(*(gw.ask(f"{name}/manifests/latest") for _ in range(50)))
            assert {(code, body) for code, _, body in answers} == {(200, answers[0][2])}
            assert sim.count("registry", part="/manifests/") == 1


async def test_what_a_client_gives_up_goes_on_for_others(tmp_path: Path) -> None:
    async with SimulatedRegistry() as sim:
        groups = Groups(sim)
        name = spell([groups.add("base", {"a": os.urandom(100_000)})])
        digest, blob = groups.layers["base"]
        async with serving(tmp_path / "root", groups=(sim.host,), blobs="proxy") as gw:
            await gw.ask(f"{name}/manifests/latest")
            sim.script.append(stall(0.2, 100))
            leaving = asyncio.ensure_future(gw.ask(f"{name}/blobs/{digest}"))
            staying = asyncio.ensure_future(gw.ask(f"{name}/blobs/{digest}"))
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            assert (await staying)[2] == blob
