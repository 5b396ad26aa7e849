"""References and locations: what docker accepts is accepted and means the same, the rest is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.core.errors import BadReference
from weenv.registry.config import RegistryConfig, proxy_for
from weenv.registry.reference import LayoutLocation, Reference, parse_location, parse_reference

HEX = "ab" * 32


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("debian", "docker.io/library/debian:latest"),
        ("debian:12", "docker.io/library/debian:12"),
        ("team/env", "docker.io/team/env:latest"),
        ("index.docker.io/debian", "docker.io/library/debian:latest"),
        ("localhost/env", "localhost/env:latest"),
        ("localhost:5000/env:1", "localhost:5000/env:1"),
        ("127.0.0.1:5000/a/b/c:v1.2-3_x", "127.0.0.1:5000/a/b/c:v1.2-3_x"),
        ("[::1]:5000/env", "[::1]:5000/env:latest"),
        ("registry.example/a__b/c.d-e", "registry.example/a__b/c.d-e:latest"),
        ("Registry/env", "Registry/env:latest"),
        (f"r.example/e@sha256:{HEX}", f"r.example/e@sha256:{HEX}"),
        (f"r.example/e:1@sha256:{HEX}", f"r.example/e:1@sha256:{HEX}"),
    ],
)
def test_accepted(text: str, full: str) -> None:
    reference = parse_reference(text)
    assert str(reference) == full
    assert parse_reference(str(reference)) == reference


@pytest.mark.parametrize(
    "text",
    [
        "", "Debian", "a//b", "/a", "a/", "a:", "a:b:c", "a@", "a@sha256:12", "a@md5:" + "a" * 32, "https://r.example/a",
        "r.example/", "r.example:99999/a", "r.example:/a", "-a/b.c/d", "a b", "a\n", "é", "r.example/A", "a/../b", "a/./b",
        "a:" + "t" * 129, "a:.t", "a" * 256, HEX, "[::z]/a", "[::1/a", "a___b", "user:pw@r.example/a", "r.example/a?x=1",
        "sha256:" + HEX + "@x",
    ],
)  # fmt: skip
def test_refused(text: str) -> None:
    with pytest.raises(BadReference):
        parse_reference(text)


@given(st.text(max_size=80))
def test_anything_parses_or_is_refused(text: str) -> None:
    try:
        reference = parse_reference(text)
    except BadReference:
        return
    assert parse_reference(str(reference)) == reference
    assert ".." not in reference.repository and not reference.repository.startswith("/")


def test_digest_decides_and_hub_has_another_api_host() -> None:
    both = parse_reference(f"debian:12@sha256:{HEX}")
    assert both.target == f"sha256:{HEX}"
    assert both.api_host == "registry-1.docker.io"
    assert parse_reference("r.example/a:1").api_host == "r.example"


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("oci:dir", LayoutLocation("dir")),
        ("oci:dir:v1", LayoutLocation("dir", "v1")),
        ("oci:/a:b/dir", LayoutLocation("/a:b/dir")),
        ("oci:/a:b/dir:t", LayoutLocation("/a:b/dir", "t")),
        (f"oci:./d@sha256:{HEX}", LayoutLocation("./d", "", f"sha256:{HEX}")),
    ],
)
def test_layout_locations(text: str, location: LayoutLocation) -> None:
    assert parse_location(text) == location
    assert str(location) == text


@pytest.mark.parametrize("text", ["oci:", "oci::t", "oci:dir:", "oci:dir:a b", "oci:dir@sha256:1", "oci:a\0b"])
def test_refused_layout_locations(text: str) -> None:
    with pytest.raises(BadReference):
        parse_location(text)


def test_other_location_is_a_reference() -> None:
    assert parse_location("r.example/a") == Reference("r.example", "a", "latest")


@pytest.mark.parametrize(
    ("host", "plain"),
    [
        ("localhost", True), ("localhost:5000", True), ("127.0.0.1:5000", True), ("127.9.9.9", True), ("[::1]:80", True),
        ("localhost:443", False), ("r.example", False), ("10.0.0.1:5000", False), ("plain.example:5000", True),
        ("plain.example", False), ("all.example:1", True), ("tls.localhost", False),
    ],
)  # fmt: skip
def test_plain_http(host: str, plain: bool) -> None:
    config = RegistryConfig(plain_http=frozenset({"plain.example:5000", "all.example"}), tls=frozenset({"tls.localhost"}))
    assert config.is_plain(host) is plain
    assert config.base_url(host) == f"http{'' if plain else 's'}://{host}"


def test_bad_host_in_configuration() -> None:
    with pytest.raises(BadReference):
        RegistryConfig(plain_http=frozenset({"http://x"}))


def test_proxies_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "proxy.example:3128")
    monkeypatch.setenv("no_proxy", "near.example")
    assert proxy_for("https://far.example/v2/") == "http://proxy.example:3128"
    assert proxy_for("https://near.example/v2/") is None
    assert proxy_for("https://127.0.0.1:5000/v2/") is None
