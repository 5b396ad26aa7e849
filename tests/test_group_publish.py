"""registry/groupref/publish.py and diff.py: copies, tags, listings, deletion and comparison, over real HTTP."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from simulator.pushable import PushableRegistry

from weenv.converter.group import BuiltGroup, TreeOptions, build_group
from weenv.converter.options import ConvertOptions
from weenv.core.errors import BadReference, NotFoundInSource, SourceError, UnsupportedError, VerificationError
from weenv.registry.client import RegistryClient
from weenv.registry.config import RegistryConfig
from weenv.registry.groupref.build import GroupSpec
from weenv.registry.groupref.diff import diff_files, diff_layers
from weenv.registry.groupref.publish import (
    COPIED,
    EXISTS,
    MOUNTED,
    CopyResult,
    copy,
    delete,
    list_layout,
    next_query,
    repositories,
    tag,
    tags,
)
from weenv.registry.groupref.resolve import Resolver
from weenv.registry.layout import Layout
from weenv.registry.manifest import OCI_INDEX, Descriptor
from weenv.registry.reference import parse_location, parse_reference

QUICK = RegistryConfig(attempts=1, deadline=5.0, retry_delay=0.01)


async def group(tmp_path: Path, tag: str, client: RegistryClient | None = None, place: str = "", **files: str) -> BuiltGroup:
    """A group of one file for each keyword, in the layout ``l`` or at ``place``; ``base`` is a layer of its own."""
    at = tmp_path / f"tree-{tag}"
    for name, text in {"base_file": "always the same", **files}.items():
        path = at / name.replace("_", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in [at, *at.rglob("*")]:
        os.utime(path, (7, 7))
    options = ConvertOptions(threads=1, cache_dir=None, client=client)
    spec = GroupSpec("tools", tag)
    return await build_group(place or f"oci:{tmp_path}/l:{tag}", [str(at)], spec, TreeOptions(split=("base",)), options)


async def move(client: RegistryClient, source: str, destination: str) -> CopyResult:
    return await copy(client, parse_location(source), parse_location(destination))


async def test_push_again_and_elsewhere(tmp_path: Path) -> None:
    one = await group(tmp_path, "1", a="x")
    await group(tmp_path, "2", a="other")
    async with PushableRegistry() as sim, RegistryClient(QUICK) as client:
        first = await move(client, f"oci:{tmp_path}/l:1", f"{sim.host}/dev/tool:1")
        assert first.descriptor.digest == one.descriptor.digest and first.count(COPIED)[0] == 3
        held = sim.repositories["dev/tool"]
        assert held.tags == {"1": one.descriptor.digest}
        again = await move(client, f"oci:{tmp_path}/l:1", f"{sim.host}/dev/tool:again")
        assert again.count(EXISTS)[0] == 3 and again.count(COPIED) == (0, 0)
        second = await move(client, f"oci:{tmp_path}/l:2", f"{sim.host}/dev/tool:2")
        assert (second.count(EXISTS)[0], second.count(COPIED)[0]) == (1, 2), "the shared layer is not sent again"
        before = sim.count("registry", "PUT", "/blobs/")
        other = await move(client, f"{sim.host}/dev/tool:1", f"{sim.host}/prod/tool:1")
        assert other.count(MOUNTED)[0] == 3 and sim.count("registry", "PUT", "/blobs/") == before
        sim.mounts = False
        third = await move(client, f"{sim.host}/dev/tool:2", f"{sim.host}/third/tool:2")
        assert third.count(COPIED)[0] == 3, "a registry that does not mount gets the bytes"
        async with PushableRegistry() as far:
            across = await move(client, f"{sim.host}/dev/tool:1", f"{far.host}/a/b:1")
            assert across.count(COPIED)[0] == 3 and far.repositories["a/b"].tags == {"1": one.descriptor.digest}
        back = await move(client, f"{sim.host}/prod/tool:1", f"oci:{tmp_path}/back:x")
        assert back.descriptor.digest == one.descriptor.digest
        with pytest.raises(BadReference):
            await move(client, f"oci:{tmp_path}/l:1", f"{sim.host}/a/b@{one.descriptor.digest}")


async def test_straight_to_a_registry(tmp_path: Path) -> None:
    local = await group(tmp_path, "1", a="x")
    async with PushableRegistry() as sim, RegistryClient(QUICK) as client:
        built = await group(tmp_path, "1", client, f"{sim.host}/team/tool:1", a="x")
        assert built.descriptor == local.descriptor
        found = await Resolver(client).resolve(f"{sim.host}/team/tool:1")
        assert (found.digest, found.kind, found.version) == (built.descriptor.digest, "tools", "1")
        assert [layer.digest for layer in found.layers] == [layer.descriptor.digest for layer in built.layers]


async def test_an_index_is_copied_whole(tmp_path: Path) -> None:
    one, two = await group(tmp_path, "1", a="x"), await group(tmp_path, "2", a="y")
    layout = Layout(str(tmp_path / "l"))
    children = [
        {**made.descriptor.to_json(), "platform": {"os": "linux", "architecture": name}}
        for made, name in ((one, "amd64"), (two, "arm64"))
    ]
    index = layout.put(json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": children}).encode(), OCI_INDEX)
    layout.set_tag(index, "multi")
    async with PushableRegistry() as sim, RegistryClient(QUICK) as client:
        result = await move(client, f"oci:{tmp_path}/l:multi", f"{sim.host}/a:multi")
        held = sim.repositories["a"]
        assert held.tags == {"multi": index.digest} and len(held.manifests) == 3
        assert result.count(COPIED)[0] == 5, "what both list is moved once"
        await move(client, f"{sim.host}/a:multi", f"oci:{tmp_path}/back:multi")
        assert Layout(str(tmp_path / "back")).resolve("multi").digest == index.digest


async def test_indexes_that_list_one_another_many_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each document is moved once, though there are 40 ** 2 ways to it."""
    inner = (await group(tmp_path, "1", a="x")).descriptor
    layout = Layout(str(tmp_path / "l"))
    for _ in range(2):
        body = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [inner.to_json()] * 40}
        inner = layout.put(json.dumps(body).encode(), OCI_INDEX)
    layout.set_tag(inner, "bomb")
    puts: list[str] = []
    whole = Layout.put

    def counted(self: Layout, data: bytes, media_type: str, *args: Any, **more: Any) -> Descriptor:
        puts.append(media_type)
        return whole(self, data, media_type, *args, **more)

    monkeypatch.setattr(Layout, "put", counted)
    async with RegistryClient(QUICK) as client:
        await move(client, f"oci:{tmp_path}/l:bomb", f"oci:{tmp_path}/m:bomb")
    assert Layout(str(tmp_path / "m")).resolve("bomb").digest == inner.digest
    assert len(puts) == 3


async def test_damaged_blobs_are_not_spread(tmp_path: Path) -> None:
    one = await group(tmp_path, "1", a="x" * 100)
    async with PushableRegistry() as sim, RegistryClient(QUICK) as client:
        await move(client, f"oci:{tmp_path}/l:1", f"{sim.host}/a:1")
        digest = one.layers[0].descriptor.digest
        held = sim.repositories["a"].blobs
        held[digest] = held[digest][:-1] + b"?"
        with pytest.raises(VerificationError):
            await move(client, f"{sim.host}/a:1", f"oci:{tmp_path}/back:1")
        if (tmp_path / "back").exists():  # others of its blobs may have been quicker
            back = Layout(str(tmp_path / "back"))
            assert not back.index().manifests and not os.path.exists(back.blob_path(digest))
        path = Path(Layout(str(tmp_path / "l")).blob_path(digest))
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        with pytest.raises(VerificationError):
            await move(client, f"oci:{tmp_path}/l:1", f"{sim.host}/b:1")
        assert not sim.repositories["b"].tags
        with pytest.raises(NotFoundInSource):
            await move(client, f"{sim.host}/a:none", f"oci:{tmp_path}/never:1")
        assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("link", "query"),
    [
        ('</v2/x/tags/list?last=b&n=2>; rel="next"', "last=b&n=2"),
        ("<https://other.example/y?token=a/b#z>; rel=next", "token=a%2Fb"),
        ("<http://[?a=1>; rel=next", "a=1"), ("</v2/x>; rel=next", ""), ("</x?a=\u00e9>; rel=next", ""),
        ("</x?a b>; rel=next", ""), ("</x?a>; rel=prev", ""), ("", ""),
    ],
)  # fmt: skip
def test_only_the_query_of_a_link_counts(link: str, query: str) -> None:
    assert next_query(link) == query


async def test_listings_have_pages(tmp_path: Path) -> None:
    await group(tmp_path, "1")
    async with PushableRegistry(page=3) as sim, RegistryClient(QUICK) as client:
        wanted = [f"t{n:02}" for n in range(10)]
        for name in wanted:
            await move(client, f"oci:{tmp_path}/l:1", f"{sim.host}/r/{name}:{name}")
            await tag(client, parse_location(f"{sim.host}/r/{name}:{name}"), "stable")
            await move(client, f"oci:{tmp_path}/l:1", f"{sim.host}/one:{name}")
        assert await repositories(client, sim.host) == ["one", *(f"r/{name}" for name in wanted)]
        assert await tags(client, sim.host, "one") == wanted
        assert await tags(client, sim.host, "r/t00") == ["stable", "t00"]
        sim.catalog = False
        with pytest.raises(UnsupportedError):
            await repositories(client, sim.host)
        with pytest.raises(NotFoundInSource):
            await tags(client, sim.host, "none")
    assert [(item.tag, item.descriptor.size > 0) for item in list_layout(f"{tmp_path}/l")] == [("1", True)]


async def test_deleting(tmp_path: Path) -> None:
    one = await group(tmp_path, "1")
    async with PushableRegistry() as sim, RegistryClient(QUICK) as client:
        for name in ("1", "2"):
            await move(client, f"oci:{tmp_path}/l:1", f"{sim.host}/a:{name}")
        held, location = sim.repositories["a"], parse_location(f"{sim.host}/a:1")
        with pytest.raises(UnsupportedError, match="2 means the same"):
            await delete(client, location)
        with pytest.raises(BadReference, match="still tagged"):
            await delete(client, parse_reference(f"{sim.host}/a@{one.descriptor.digest}"))
        assert set(held.tags) == {"1", "2"}
        sim.delete_tags = True
        assert (await delete(client, location)).tags == ("1",)
        assert set(held.tags) == {"2"}
        gone = await delete(client, parse_location(f"{sim.host}/a:2"))
        assert gone.manifest and not held.manifests
        with pytest.raises(SourceError):
            await delete(client, location)
        layout = Layout(f"{tmp_path}/l")
        layout.set_tag(layout.resolve("1"), "also")
        gone = await delete(client, parse_location(f"oci:{tmp_path}/l:1"))
        assert gone.tags == ("1",) and not gone.manifest
        gone = await delete(client, parse_location(f"oci:{tmp_path}/l@{one.descriptor.digest}"))
        assert gone.tags == ("also",) and gone.manifest and not layout.index().manifests


async def test_differences(tmp_path: Path) -> None:
    await group(tmp_path, "1", a="x", b="gone", d_same="same")
    await group(tmp_path, "2", a="xy", c="new", d_same="same", d_more="m")
    async with PushableRegistry() as sim, RegistryClient(QUICK) as client:
        await move(client, f"oci:{tmp_path}/l:2", f"{sim.host}/a:2")
        old, new = await Resolver(client).resolve_all([f"oci:{tmp_path}/l:1", f"{sim.host}/a:2"])
        layers = diff_layers(old, new)
        assert [len(x) for x in (layers.removed, layers.added, layers.shared)] == [1, 1, 1]
        before = sim.count("registry", "GET", "/blobs/")
        files = await diff_files(client, old, new)
        assert (files.added, files.removed, files.changed) == ((b"c", b"d/more"), (b"b",), (b"a",))
        assert sim.count("registry", "GET", "/blobs/") - before == len(new.layers), "tables of contents, nothing else"
        assert diff_layers(new, new).removed == () and (await diff_files(client, new, new)).changed == ()
