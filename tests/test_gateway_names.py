"""environment/gateway/: names, paths, ranges, settings and the store. test_gateway.py has the server."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weenv.core.digest import sha256
from weenv.core.errors import BadReference, ConfigError, StorageError
from weenv.environment.gateway.config import GatewayConfig, from_tables, parse_address
from weenv.environment.gateway.http import read_users
from weenv.environment.gateway.names import COMPOSE, MAX_GROUPS, PlanName, StackName, parse_name, spell
from weenv.environment.gateway.protocol import (
    BASE,
    BLOBS,
    MANIFESTS,
    REFERRERS,
    TAGS,
    Question,
    Refused,
    accepts_manifest,
    matches_etag,
    parse_path,
    parse_range,
)
from weenv.environment.gateway.sources import allowed
from weenv.environment.gateway.store import LayerPlace, Store, StoredImage
from weenv.plugin.snapshotter.layerdir import Origin
from weenv.registry.manifest import OCI_MANIFEST
from weenv.registry.reference import parse_reference

HEX = "4f" * 32

# -- names ------------------------------------------------------------------------------------------------------------

# distribution-spec 1.1, "Pulling manifests": what <name> must match. Written down here again, not taken from the code.
SPEC_NAME = re.compile(r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(\/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*\Z")

component = st.from_regex(r"[a-z0-9]{1,4}((\.|_|__|-{1,3})[a-z0-9]{1,3}){0,2}", fullmatch=True)
hosts = st.from_regex(r"([a-z0-9]{1,4}\.[a-z0-9]{1,4}|localhost)(:[1-9][0-9]{0,3})?", fullmatch=True)
references = st.builds(
    lambda host, path, tag, digest: f"{host}/{'/'.join(path)}" + (f":{tag}" if tag or not digest else "") + digest,
    hosts,
    st.lists(component, min_size=1, max_size=3),
    st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,6}", fullmatch=True),
    st.sampled_from(["", f"@sha256:{HEX}"]),
)


@settings(deadline=None)
@given(st.lists(references, min_size=1, max_size=3))
def test_what_is_spelt_is_a_name_and_means_the_same_again(refs: list[str]) -> None:
    try:
        name = spell(refs)
    except BadReference:
        return
    assert SPEC_NAME.match(name)
    assert len(name) <= 255
    meant = parse_name(name, "any", "other.example/prefix")
    assert isinstance(meant, StackName)
    assert [parse_reference(text) for text in meant.groups] == [parse_reference(ref) for ref in refs]


def test_most_references_can_be_spelt() -> None:
    for ref, spelt in {
        "registry.example:5000/base/debian:12": "registry.example__5000/base/debian__12",
        f"registry.example/tool@sha256:{HEX}": f"registry.example/tool__sha256__{HEX}",
        f"localhost:5000/a/b:v1.0-rc_1@sha256:{HEX}": f"localhost__5000/a/b__v1.0-rc_1__sha256__{HEX}",
        "debian": "docker.io/library/debian__latest",
        "127.0.0.1:1/x:sha256": "127.0.0.1__1/x__sha256",
    }.items():
        assert spell([ref]) == f"{COMPOSE}/{spelt}"


@pytest.mark.parametrize(
    "ref", ["registry.example/and/x:1", "registry.example/a__b:1", "registry.example/a:RC", "[::1]:5000/a:1", "oci:/x:1"]
)
def test_what_a_name_cannot_spell_is_said(ref: str) -> None:
    with pytest.raises(BadReference, match=r"spelt|layout"):
        spell([ref])


@settings(deadline=None)
@given(st.lists(references, min_size=1, max_size=2), st.lists(references, min_size=1, max_size=2))
def test_two_stacks_never_have_one_name(one: list[str], two: list[str]) -> None:
    with contextlib.suppress(BadReference):
        if [parse_reference(r) for r in one] != [parse_reference(r) for r in two]:
            assert spell(one) != spell(two)


@settings(deadline=None)
@given(
    st.one_of(st.text(max_size=60), st.from_regex(r"(plan|compose)/[a-z0-9_./-]{0,60}", fullmatch=True)), st.text(max_size=9)
)
def test_any_text_is_a_name_or_a_clear_error(name: str, tag: str) -> None:
    try:
        meant = parse_name(name, tag)
    except BadReference as error:
        assert "\n" not in error.message
        return
    if isinstance(meant, StackName):
        assert all(parse_reference(text) for text in meant.groups)
    else:
        assert ".." not in meant.name.split("/")


def test_names_by_example() -> None:
    assert parse_name("plan/a/b-c", "1") == PlanName("a/b-c")
    assert parse_name("compose/r.example/a/_/r.example/b__2", "1") == StackName(("r.example/a:1", "r.example/b:2"))
    assert parse_name("compose/base__12/and/team/tool", "x", "h.example:5/p") == StackName(
        ("h.example:5/p/base:12", "h.example:5/p/team/tool:x")
    )
    assert parse_name("compose/debian", "12") == StackName(("debian:12",))
    assert parse_name(f"compose/r.example/a__sha256__{HEX}", "1") == StackName((f"r.example/a@sha256:{HEX}",))


@pytest.mark.parametrize(
    "name",
    [
        "", "x", "plan", "plan/", "compose", "compose/", "compose/and", "compose/r.example/a/and", "compose/and/r.example/a",
        "compose/r.example/a/and/and/r.example/b", "plan/UPPER", "plan/..", "plan/a/../b", "compose/r.example/a__b/c",
        "compose/r.example__x/a", "compose/r.example__99999999/a", "compose/r.example/a__1__2", "compose/r.example/__a",
        "plan/" + "a" * 300, "compose/" + "/and/".join("a" for _ in range(MAX_GROUPS + 1)), "plan/a\n", "compose/r.example//a",
        f"compose/r.example/a__sha256__{'g' * 64}", "compose/r.example", "plan/a%2f..",
    ],
)  # fmt: skip
def test_bad_names(name: str) -> None:
    if name == "compose/r.example":  # a repository of the default registry, as docker has it
        assert parse_name(name) == StackName(("r.example:latest",))
        return
    with pytest.raises(BadReference):
        parse_name(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plan/" + "a" * 251, "more than 255 characters"), ("plan/a\n", "strange ones"), ("plan/\u0430", "strange ones"),
        ("compose/r.example__x/a", "not a host and port"), ("compose/r.example__/a", "not a host and port"),
        ("compose/r.example__99999999/a", "not a host and port"),
        ("compose/" + "/and/".join("a" for _ in range(MAX_GROUPS + 1)), f"{MAX_GROUPS + 1} groups, more than {MAX_GROUPS}"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_name_is_said(name: str, message: str) -> None:
    with pytest.raises(BadReference, match=message):
        parse_name(name)


def test_as_many_groups_as_a_name_takes() -> None:
    meant = parse_name("compose/" + "/and/".join("a" for _ in range(MAX_GROUPS)))
    assert isinstance(meant, StackName) and len(meant.groups) == MAX_GROUPS
    for count in (0, MAX_GROUPS + 1):
        with pytest.raises(BadReference, match=f"{count} groups"):
            spell(["a"] * count)


# -- paths, ranges, headers -------------------------------------------------------------------------------------------


def test_paths() -> None:
    assert parse_path("/v2/") == parse_path("/v2") == Question(BASE)
    assert parse_path("/v2/plan/a/manifests/1") == Question(MANIFESTS, "plan/a", "1")
    assert parse_path("/v2/plan/manifests/manifests/1") == Question(MANIFESTS, "plan/manifests", "1")
    assert parse_path(f"/v2/a/blobs/sha256%3A{HEX}") == Question(BLOBS, "a", f"sha256:{HEX}")
    assert parse_path("/v2/a/b/tags/list") == Question(TAGS, "a/b")
    assert parse_path("/v2/a/referrers/x") == Question(REFERRERS, "a", "x")
    for path in ("/", "/v1/", "/v2/_catalog", "/v2/a/blobs/uploads/", "/v2/a/manifests/", "/v2//", "/v2/" + "a" * 2000):
        with pytest.raises(Refused):
            parse_path(path)
    with pytest.raises(Refused, match="invalid name"):
        parse_path("/v2/a%2fb/manifests/1")


@settings(deadline=None)
@given(st.binary(max_size=40), st.one_of(st.text(max_size=20), st.from_regex(r"bytes=[0-9]{0,3}-[0-9]{0,3}", fullmatch=True)))
def test_a_range_is_what_it_says_or_everything(data: bytes, header: str) -> None:
    try:
        part = parse_range(header, len(data))
    except Refused as error:
        assert error.status == 416
        return
    if part is None:
        return
    start, end = part
    assert 0 <= start < end <= len(data)
    first, _, last = header.removeprefix("bytes=").partition("-")
    wanted = data[int(first) : int(last) + 1 if last else None] if first else data[-int(last) :]
    assert data[start:end] == wanted


def test_conditions_and_accept() -> None:
    assert matches_etag('W/"a", "b"', "b")
    assert matches_etag("*", "x")
    assert not matches_etag('"ab"', "b")
    assert not matches_etag(None, "b")
    assert accepts_manifest([])
    assert accepts_manifest(["application/json", f"text/x, {OCI_MANIFEST};q=0.5"])
    assert not accepts_manifest(["application/vnd.docker.distribution.manifest.v2+json"])


@pytest.mark.parametrize(
    "raw",
    [
        {"address": "nonsense"}, {"address": "unix:relative"}, {"address": "h:99999"}, {"blobs": "maybe"},
        {"tls_key": "/k"}, {"plans": ["relative/dir"]}, {"groups": ["https://r.example"]}, {"default_registry": "team"},
        {"platform": "Linux"}, {"requests": 0}, {"keep_images": 0}, {"adress": "x:1"},
    ],
)  # fmt: skip
def test_settings_that_cannot_be_used_are_named(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"gateway\.{next(iter(raw)).removesuffix('key')}"):
        from_tables({"gateway": raw})


def test_settings() -> None:
    config = from_tables({"gateway": {"plans": ["/p", "r.example/plans"], "address": "unix:/run/x.sock"}})
    assert config.loopback
    assert not GatewayConfig(address="0.0.0.0:5").loopback
    assert parse_address("[::1]:7") == ("", "::1", 7)
    assert allowed(["r.example"], "r.example/a/b:1")
    assert allowed(["r.example/t/**"], "r.example/t/b:1")
    assert not allowed(["r.example/t/**"], "r.example/u/b:1")
    assert not allowed(["r.example"], "r.example.evil/a:1")
    assert not allowed(["r.example"], "oci:/etc:1")
    assert allowed(["**"], "r.example/a:1") and allowed(["oci:/srv/**"], "oci:/srv/a:1")
    for pattern, place in (("**", "/srv/a"), ("*", "/srv/a"), ("oci:/srv/**", "/srv/../etc/a"), ("oci:/srv/**", "/etc/a")):
        assert not allowed([pattern], f"oci:{place}:1"), "directories of the node are what is listed as such"


def test_users(tmp_path: Path) -> None:
    path = tmp_path / "users"
    path.write_text("# who\nann:correct horse\n\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        read_users(str(path))
    path.chmod(0o600)
    assert read_users(str(path)) == {"ann": "correct horse"}
    for text in ("ann\n", ":secretsecret\n", "ann:short\n", "# nobody\n"):
        path.write_text(text)
        with pytest.raises(ConfigError):
            read_users(str(path))
    path.write_text("#" * ((1 << 20) - 14) + "\nann:correct horse\n")
    with pytest.raises(ConfigError, match=f"users is larger than {1 << 20} bytes"):
        read_users(str(path))  # not: a secret that was cut


# -- the store --------------------------------------------------------------------------------------------------------


def stored(number: int, layers: int = 1) -> StoredImage:
    manifest = b"m%d" % number
    places = tuple(LayerPlace(sha256(b"l%d-%d" % (number, n)), 5, Origin("registry", "h", "r")) for n in range(layers))
    config = b"c%d" % number
    return StoredImage(sha256(manifest), manifest, sha256(config), config, places)


def test_the_store_keeps_what_a_tag_left_and_is_bounded(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "d" / "g.db"), keep_images=3, keep_bytes=1 << 20)
    for number in range(2):
        store.put("plan/a", "latest", stored(number))
    assert store.last("plan/a", "latest") == stored(1).digest
    assert store.get("plan/a", stored(0).digest) == (stored(0), "latest"), "the tag has moved, the digest has not"
    assert store.get("plan/b", stored(0).digest) is None, "what one name means is not another's"
    found = store.blob("plan/a", stored(0).layers[0].digest)
    assert found is not None
    assert found.layer == stored(0).layers[0]
    assert store.blob("plan/b", stored(0).layers[0].digest) is None
    store.put("plan/a", "other", stored(0))
    assert (store.last("plan/a", "latest"), store.last("plan/a", "other")) == (stored(1).digest, stored(0).digest)
    store.put("plan/a", "latest", stored(0))
    assert store.last("plan/a", "latest") == stored(0).digest, "moved back"
    config = store.blob("plan/a", stored(0).config_digest)
    assert config is not None
    assert config.data == b"c0"
    store.close()
    store = Store(str(tmp_path / "d" / "g.db"), keep_images=3, keep_bytes=1 << 20)
    for number in range(2, 9):
        store.put("plan/a", "latest", stored(number))
    assert store.count()[0] == 3
    assert store.get("plan/a", stored(0).digest) is None
    assert store.blob("plan/a", stored(0).layers[0].digest) is None
    for number in range(40):
        store.put(f"plan/n{number}", "latest", stored(8))
    store.put("plan/z", "latest", stored(9))
    with contextlib.closing(sqlite3.connect(str(tmp_path / "d" / "g.db"))) as db:
        assert db.execute("SELECT count(*) FROM names").fetchone()[0] <= 3 * 4
        assert db.execute("SELECT count(*) FROM layers").fetchone()[0] == 3
    store.close()


def test_a_damaged_store_is_begun_anew_and_an_unusable_one_said(tmp_path: Path) -> None:
    path = tmp_path / "g.db"
    path.write_bytes(b"not a database" * 1000)
    store = Store(str(path), keep_images=3, keep_bytes=1 << 20)
    assert store.count() == (0, 0)
    store.close()
    with pytest.raises(StorageError, match="cannot be used"):
        Store(str(tmp_path / "g.db" / "x"), keep_images=3, keep_bytes=1 << 20)
