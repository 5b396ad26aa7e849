"""registry/groupref/: resolving references, remembering what they mean, answering while a registry is away."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import sqlite3
from collections.abc import Callable

import pytest
from simulator.registry import SimulatedRegistry

from weenv.core.digest import sha256
from weenv.core.errors import FormatError, NotFoundInSource, SourceError, UnavailableError, VerificationError
from weenv.registry.client import RegistryClient
from weenv.registry.config import RegistryConfig
from weenv.registry.groupref.cache import MappingCache
from weenv.registry.groupref.model import ARTIFACT_TYPE, KIND, VERSION
from weenv.registry.groupref.resolve import Resolver
from weenv.registry.manifest import OCI_CONFIG, OCI_INDEX, OCI_LAYER_ZSTD, OCI_MANIFEST

QUICK = RegistryConfig(attempts=1, deadline=10.0, retry_delay=0.01)


def image(
    sim: SimulatedRegistry, tag: str, layers: int = 2, *, change: Callable[[dict[str, object]], object] | None = None
) -> str:
    """Put an image of some layers into the registry; its manifest's digest."""
    config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": [
        sha256(f"{tag}{n}".encode()) for n in range(layers)]}}).encode()  # fmt: skip
    manifest: dict[str, object] = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "artifactType": ARTIFACT_TYPE,
        "config": {"mediaType": OCI_CONFIG, "digest": sim.add_blob(config), "size": len(config)},
        "layers": [
            {"mediaType": OCI_LAYER_ZSTD, "digest": sha256(f"blob {tag}{n}".encode()), "size": 10, "annotations": {"n": str(n)}}
            for n in range(layers)
        ],
        "annotations": {KIND: "harness", VERSION: "3"},
    }
    if change is not None:
        change(manifest)
    return sim.add_manifest(json.dumps(manifest).encode(), OCI_MANIFEST, tag)


def asked(sim: SimulatedRegistry) -> int:
    return sim.count("registry")


async def test_a_group_is_its_layers_in_order() -> None:
    async with SimulatedRegistry() as sim, RegistryClient(QUICK) as client:
        digest = image(sim, "v1", 3)
        group = await Resolver(client).resolve(f"{sim.host}/team/tool:v1")
        assert (group.digest, group.host, group.repository) == (digest, sim.host, "team/tool")
        assert (group.kind, group.version) == ("harness", "3")
        assert [layer.annotations["n"] for layer in group.layers] == ["0", "1", "2"]
        assert group.diff_ids == [sha256(f"v1{n}".encode()) for n in range(3)]
        assert group.config["os"] == "linux"


async def test_a_tag_is_asked_about_once_per_age_and_a_digest_once() -> None:
    async with SimulatedRegistry() as sim, RegistryClient(QUICK) as client:
        digest = image(sim, "v1")
        resolver = Resolver(client, max_age=3600)
        for _ in range(3):
            await resolver.resolve(f"{sim.host}/a:v1")
        assert asked(sim) == 2, "manifest and config"
        await resolver.resolve(f"{sim.host}/a@{digest}")
        assert asked(sim) == 2
        resolver.max_age = 0
        await resolver.resolve(f"{sim.host}/a:v1")
        assert asked(sim) == 3, "one conditional request"
        moved = image(sim, "v1", 4)
        assert (await resolver.resolve(f"{sim.host}/a:v1")).digest == moved
        assert (await resolver.resolve(f"{sim.host}/a@{digest}")).digest == digest


async def test_one_request_however_many_ask() -> None:
    async with SimulatedRegistry() as sim, RegistryClient(QUICK) as client:
        image(sim, "v1")
        resolver = Resolver(client)
        groups = await asyncio.gather(*(resolver.resolve(f"{sim.host}/a:v1") for _ in range(50)))
        assert len({group.digest for group in groups}) == 1
        assert asked(sim) == 2


async def test_many_side_by_side_keep_their_order() -> None:
    async with SimulatedRegistry() as sim, RegistryClient(QUICK) as client:
        digests = [image(sim, f"t{n}", 1 + n % 3) for n in range(60)]
        names = [f"{sim.host}/a:t{n}" for n in range(60)]
        resolver = Resolver(client, max_age=3600)
        assert [group.digest for group in await resolver.resolve_all([*names, names[0]])] == [*digests, digests[0]]
        before = asked(sim)
        assert [group.digest for group in await resolver.resolve_all(names)] == digests
        assert asked(sim) == before
        with pytest.raises(NotFoundInSource):
            await resolver.resolve_all([*names, f"{sim.host}/a:none"])


async def test_while_the_registry_is_away_the_old_answer_is_given_loudly(caplog: pytest.LogCaptureFixture) -> None:
    cache = MappingCache()
    async with RegistryClient(QUICK) as client:
        async with SimulatedRegistry() as sim:
            digest = image(sim, "v1")
            name = f"{sim.host}/a:v1"
            resolver = Resolver(client, cache, max_age=0)
            await resolver.resolve(name)
        with caplog.at_level(logging.WARNING):
            group = await resolver.resolve(name)
        assert (group.digest, resolver.stale) == (digest, 1)
        assert "registry away" in caplog.text
        with pytest.raises(UnavailableError):
            await resolver.resolve(name.replace(":v1", ":v2"))


async def test_who_says_himself_that_a_registry_is_away_is_told_once_for_all_of_it(caplog: pytest.LogCaptureFixture) -> None:
    cache = MappingCache()
    async with RegistryClient(QUICK) as client:
        resolver = Resolver(client, cache, max_age=0, silent=True)
        async with SimulatedRegistry() as sim:
            names = [f"{sim.host}/a:v{number}" for number in range(5)]
            for name in names:
                image(sim, name.rpartition(":")[2])
            await resolver.resolve_all(names)
            assert not resolver.away
        with caplog.at_level(logging.WARNING):
            await resolver.resolve_all(names)
    (away,) = resolver.away.values()
    assert sorted(away.references) == names and away.host == sim.host and not caplog.records
    line = away.line()
    assert line.startswith(f"{sim.host} cannot serve {sim.host}/a:v") and line.endswith(" and 2 more")
    assert " seconds ago of " in line
    away.seen -= 7300
    assert " using what was seen 2 hours ago of " in away.line()


async def test_a_name_without_tag_is_named_with_the_one_it_has() -> None:
    async with SimulatedRegistry() as sim, RegistryClient(QUICK) as client:
        with pytest.raises(NotFoundInSource, match=r"/a:latest$"):
            await Resolver(client).resolve(f"{sim.host}/a")


async def test_a_tag_that_is_gone_is_not_served_from_memory() -> None:
    async with SimulatedRegistry() as sim, RegistryClient(QUICK) as client:
        image(sim, "v1")
        resolver = Resolver(client, max_age=0)
        await resolver.resolve(f"{sim.host}/a:v1")
        del sim.manifests["v1"]
        for _ in range(2):
            with pytest.raises(NotFoundInSource):
                await resolver.resolve(f"{sim.host}/a:v1")


async def test_an_index_gives_the_platforms_manifest() -> None:
    async with SimulatedRegistry() as sim, RegistryClient(QUICK) as client:
        digest = image(sim, "amd")
        other = image(sim, "arm", 1)
        entries = [
            {
                "mediaType": OCI_MANIFEST,
                "digest": d,
                "size": len(sim.manifests[d][1]),
                "platform": {"os": "linux", "architecture": a},
            }
            for d, a in ((digest, "amd64"), (other, "arm64"))
        ]
        index = sim.add_manifest(json.dumps({"schemaVersion": 2, "manifests": entries}).encode(), OCI_INDEX, "multi")
        resolver = Resolver(client, platform="linux/amd64", max_age=0)
        assert (await resolver.resolve(f"{sim.host}/a:multi")).digest == digest
        assert (await resolver.resolve(f"{sim.host}/a@{index}")).digest == digest
        before = asked(sim)
        assert (await resolver.resolve(f"{sim.host}/a@{index}")).digest == digest
        assert asked(sim) == before, "what an index digest means does not change"
        assert (await Resolver(client, platform="linux/arm64").resolve(f"{sim.host}/a:multi")).digest == other
        with pytest.raises(NotFoundInSource, match="nothing for linux/s390x") as caught:
            await Resolver(client, platform="linux/s390x").resolve(f"{sim.host}/a:multi")
        assert "linux/amd64, linux/arm64" in caught.value.hint


async def test_a_registry_that_lies_about_a_digest_is_refused() -> None:
    async with SimulatedRegistry() as sim, RegistryClient(QUICK) as client:
        digest = image(sim, "v1")
        other = image(sim, "v2", 3)
        sim.manifests[digest] = sim.manifests[other]
        with pytest.raises(VerificationError, match="has digest"):
            await Resolver(client).resolve(f"{sim.host}/a@{digest}")
        config = next(name for name, data in sim.blobs.items() if b"architecture" in data)
        sim.blobs[config] = sim.blobs[config].replace(b"amd64", b"amd65")
        with pytest.raises((VerificationError, SourceError)):
            await asyncio.gather(*(Resolver(client).resolve(f"{sim.host}/a:{tag}") for tag in ("v1", "v2")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["layers"].pop(), "lists 2 layers, its manifest 1"),
        (lambda m: m["layers"][0].update(mediaType="application/json"), "something else than file system layers"),
        (lambda m: m["annotations"].update({KIND: "nonsense"}), "unknown kind"),
    ],
)
async def test_what_is_no_group_is_refused(change: Callable[[dict[str, object]], object], message: str) -> None:
    async with SimulatedRegistry() as sim, RegistryClient(QUICK) as client:
        image(sim, "v1", change=change)
        with pytest.raises(FormatError, match=message):
            await Resolver(client).resolve(f"{sim.host}/a:v1")


async def test_the_cache_survives_its_process_and_a_damaged_file(tmp_path: object) -> None:
    path = f"{tmp_path}/deep/mapping.db"
    async with SimulatedRegistry() as sim, RegistryClient(QUICK) as client:
        image(sim, "v1")
        name = f"{sim.host}/a:v1"
        cache = MappingCache(path)
        first = await Resolver(client, cache, max_age=3600).resolve(name)
        cache.close()
        assert os.stat(path).st_mode & 0o777 == 0o600
        before = asked(sim)
        cache = MappingCache(path)
        again = await Resolver(client, cache, max_age=3600).resolve(name)
        assert dataclasses.asdict(again) == dataclasses.asdict(first)
        assert asked(sim) == before
        cache.close()
        with sqlite3.connect(path) as db:
            db.execute("UPDATE groups SET summary = '{\"layers\": 3}'")
        db.close()
        cache = MappingCache(path)
        assert (await Resolver(client, cache, max_age=3600).resolve(name)).layers == first.layers, (
            "a broken row is asked for again"
        )
        cache.close()
        for junk in ("-wal", "-shm"):
            if os.path.exists(path + junk):
                os.unlink(path + junk)
        with open(path, "wb") as file:
            file.write(b"not a database" * 1000)
        cache = MappingCache(path)
        assert (await Resolver(client, cache).resolve(name)).digest == first.digest
        cache.close()


def test_the_cache_drops_the_oldest() -> None:
    cache = MappingCache()
    cache.confirm("n", "d", now=5.0)
    assert cache.tag("n") == ("d", 5.0)
    cache.forget("n")
    assert cache.tag("n") is None
    cache.trim(0)
    cache.close()
