"""containerd's certs.d: what its files mean, without any server. (With servers: test_mirrors.py; with containerd's own reader:
integration/test_mirrors_containerd.py.)"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.core.errors import ConfigError
from weenv.registry.config import RegistryConfig
from weenv.registry.hosts import CAPABILITIES, PULL, PUSH, REFERRERS, RESOLVE, Endpoint, Hosts, directories, needs, parse

# Made after the example of containerd's documentation (docs/hosts.md), with all that its reader takes.
EVERYTHING = """
server = "https://registry.example/v2"
ca = "root.pem"

[host."https://pull.example"]
  capabilities = ["pull"]
  ca = ["a.pem", "/etc/b.pem"]
  skip_verify = false
  [host."https://pull.example".header]
    x-custom-2 = ["value1", "value2"]
    X-One = "1"

[host."https://bak.example/us"]
  capabilities = ["Pull", "RESOLVE"]
  skip_verify = true
  dial_timeout = "1m0.5s"

[host."http://plain.example"]

[host."https://test.example/v2/upstream"]
  override_path = true
  client = [["c.cert", "c.key"], ["/etc/d.pem", ""]]

[host."bare.example:5000"]
  client = "e.pem"

[host."http://mixed.example:5000"]
  client = ["f.pem", "g.pem"]
"""


def made(text: str, host: str = "docker.io") -> list[Endpoint]:
    return list(parse(text.encode(), "/base", host, RegistryConfig()))


def test_everything_that_a_file_may_say() -> None:
    found = made(EVERYTHING)
    assert [one.host for one in found] == [
        "pull.example", "bak.example", "plain.example", "test.example", "bare.example:5000", "mixed.example:5000",
        "registry.example",
    ]  # fmt: skip
    pull, bak, plain, test, bare, mixed, server = found
    assert pull.capabilities == {PULL} and pull.trust.ca == ("/base/a.pem", "/etc/b.pem") and pull.trust.skip_verify is False
    assert pull.headers == (("x-custom-2", "value1"), ("x-custom-2", "value2"), ("X-One", "1"))
    assert bak.path == "/us/v2" and bak.capabilities == {PULL, RESOLVE} and bak.trust.skip_verify and bak.dial_timeout == 60.5
    assert (plain.scheme, plain.fallback, plain.capabilities) == ("http", False, CAPABILITIES)
    assert test.path == "/v2/upstream"
    assert test.trust.client == (("/base/c.cert", "/base/c.key"), ("/etc/d.pem", ""))
    assert bare.scheme == "https" and bare.trust.client == (("/base/e.pem", ""),)
    # An http address with TLS settings: TLS is tried first.
    assert (mixed.scheme, mixed.fallback) == ("https", True) and mixed.plain().origin == "http://mixed.example:5000"
    assert (server.path, server.trust.ca) == ("/v2", ("/base/root.pem",))


def test_urls_and_the_namespace() -> None:
    mirror, own = made('[host."https://mirror.example/sub"]', "r.example:5000")
    assert mirror.url("/v2/a/blobs/x") == "https://mirror.example/sub/v2/a/blobs/x?ns=r.example%3A5000"
    assert mirror.url("/v2/a/tags/list?n=5") == "https://mirror.example/sub/v2/a/tags/list?n=5&ns=r.example%3A5000"
    assert own.url("/v2/a/blobs/x") == "https://r.example:5000/v2/a/blobs/x"
    _, hub = made('[host."https://mirror.example"]')
    assert hub.url("/v2/library/a/manifests/1") == "https://registry-1.docker.io/v2/library/a/manifests/1"
    assert hub.name == "docker.io"
    other = made('server = "https://other.example"')[0]
    assert other.url("/v2/a").endswith("?ns=docker.io")
    override = made('[host."https://m.example/api"]\noverride_path = true')[0]
    assert override.url("/v2/a/blobs/x") == "https://m.example/api/a/blobs/x?ns=docker.io"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = ", "not TOML"), pytest.param("x = " + 5000 * "1", "not TOML", id="number"),
        ('server = 5', "server must be"), ('host = 5', "host must hold"),
        ('[host."https://m"]\ncapabilities = ["fly"]', "unknown capability 'fly'"),
        ('[host."https://m"]\ncapabilities = "pull"', "list of strings"), ('[host."https://m"]\nca = 5', "ca must be"),
        ('[host."https://m"]\nclient = [["a", "b", "c"]]', "client must be"),
        ('[host."https://m"]\nclient = 5', "client must be"), ('[host."https://m"]\nheader = 5', "header must be"),
        ('[host."https://m"]\nskip_verify = "yes"', "skip_verify must be"),
        ('[host."https://m".header]\nx = 5', "header 'x'"), ('[host."https://m".header]\nx = "a\\nb"', "header 'x'"),
        ('[host."https://m"]\ndial_timeout = "soon"', "duration"), ('[host."ftp://m"]', "not a server's address"),
        ('[host."https://"]', "not a server's address"), ('[host."https://u:p@m"]', "not a server's address"),
        ('[host."https://m:0"]', "not a server's address"), ('[host."https://[x"]', "not a server's address"),
        ('[host]\n"https://m" = 5', "must be a table"),
    ],
)  # fmt: skip
def test_faults_are_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(text)


def test_a_duration_without_end_has_one() -> None:
    assert made(f'[host."https://m"]\ndial_timeout = "{400 * "9"}h"')[0].dial_timeout == 86400


@given(st.binary(max_size=300))
def test_any_file_is_taken_or_refused(text: bytes) -> None:
    try:
        parse(text, "/base", "r.example", RegistryConfig())
    except ConfigError:
        return


def test_what_a_request_needs() -> None:
    digest = "sha256:" + "0" * 64
    assert needs("GET", f"/v2/a/b/blobs/{digest}") == needs("HEAD", f"/v2/a/manifests/{digest}") == PULL
    assert needs("GET", "/v2/a/manifests/latest") == needs("GET", "/v2/a/tags/list?n=2") == needs("GET", "/v2/") == RESOLVE
    assert needs("GET", f"/v2/a/referrers/{digest}?artifactType=x") == REFERRERS
    assert needs("DELETE", f"/v2/a/manifests/{digest}") == needs("PUT", "/v2/a/manifests/x") == PUSH


def test_the_directories_of_a_host() -> None:
    assert directories("/c", "r.example:5000") == ["/c/r.example_5000_", "/c/r.example:5000", "/c/_default"]
    assert directories("/c", "docker.io") == ["/c/docker.io", "/c/_default"]
    for hostile in ("../../etc", "..", "/etc", "", "a\0b"):
        assert directories("/c", hostile) == []


def hosts(root: Path) -> Hosts:
    return Hosts(RegistryConfig(config_path=f"{root}/first:{root}/second"))


def put(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def names(found: Hosts, host: str = "docker.io") -> list[str]:
    found._known.clear()  # as if the files had not been looked at for a while
    return [one.host for one in found.endpoints(host, PULL)]


def test_the_first_directory_that_has_the_host_decides(tmp_path: Path) -> None:
    found = hosts(tmp_path)
    assert names(found) == ["registry-1.docker.io"]
    put(tmp_path / "second/_default/hosts.toml", '[host."https://second-default"]')
    assert names(found) == ["second-default", "registry-1.docker.io"]
    assert names(found, "r.example:5000") == ["second-default", "r.example:5000"]
    put(tmp_path / "first/_default/hosts.toml", '[host."https://first-default"]')
    assert names(found) == ["first-default", "registry-1.docker.io"]
    put(tmp_path / "first/docker.io/hosts.toml", 'server = "https://only"')
    assert names(found) == names(found, "index.docker.io") == names(found, "registry-1.docker.io") == ["only"]
    put(tmp_path / "first/r.example:5000/hosts.toml", '[host."https://colon"]')
    assert names(found, "r.example:5000")[0] == "colon"
    put(tmp_path / "first/r.example_5000_/hosts.toml", '[host."https://underscore"]')
    assert names(found, "r.example:5000")[0] == "underscore"


def test_changed_files_are_read_again(tmp_path: Path) -> None:
    found, path = hosts(tmp_path), tmp_path / "first/docker.io/hosts.toml"
    put(path, 'server = "https://one"\nca = "ca.pem"')
    put(path.parent / "ca.pem", "a")
    before = found.endpoints("docker.io", PULL)
    put(path.parent / "ca.pem", "another")
    found._known.clear()
    after = found.endpoints("docker.io", PULL)
    assert before != after, "a certificate that was replaced is another one"
    path.unlink()
    assert names(found) == ["registry-1.docker.io"]


def test_a_file_that_cannot_be_used_is_said_once_and_the_certificates_beside_it_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found, path = hosts(tmp_path), tmp_path / "first/r.example/hosts.toml"
    put(path, "server = nonsense")
    put(path.parent / "ca.crt")
    for _ in range(3):
        assert names(found, "r.example") == ["r.example"]
    assert found.endpoints("r.example", PULL)[0].trust.ca == (str(path.parent / "ca.crt"),)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert str(path) in caplog.text


def test_a_file_that_is_too_large_is_named_and_not_read_half(tmp_path: Path) -> None:
    """Half of a TOML file is often one, too: of the mirrors behind the bound nobody would hear."""
    path = tmp_path / "first/r.example/hosts.toml"
    mirror = '\n[host."https://mirror.example"]\n'
    put(path, mirror + "#" * ((1 << 20) - len(mirror)))
    assert names(hosts(tmp_path), "r.example") == ["mirror.example", "r.example"]
    put(path, "#" * (1 << 20) + mirror)
    with pytest.raises(ConfigError) as caught:
        hosts(tmp_path).endpoints("r.example", PULL)
    assert str(caught.value) == f"{path} is larger than {1 << 20} bytes"


def test_a_pipe_is_named_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "first/r.example/hosts.toml"
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with pytest.raises(ConfigError) as caught:
        hosts(tmp_path).endpoints("r.example", PULL)
    assert str(caught.value) == f"cannot read {path}: it is a pipe, not a file"


def test_dockers_own_layout(tmp_path: Path) -> None:
    found, base = hosts(tmp_path), tmp_path / "second/r.example_5000_"
    for name in ("b.crt", "a.crt", "client.cert", "client.key", "other.cert", "README", "sub/x.crt"):
        put(base / name)
    endpoint = found.endpoints("r.example:5000", PULL)[0]
    assert endpoint.trust.ca == (f"{base}/a.crt", f"{base}/b.crt")
    assert endpoint.trust.client == ((f"{base}/client.cert", f"{base}/client.key"), (f"{base}/other.cert", ""))
    assert (endpoint.scheme, endpoint.fallback, endpoint.trust.skip_verify) == ("https", False, None)
    put(tmp_path / "second/127.0.0.1_5000_/ca.crt")
    local = found.endpoints("127.0.0.1:5000", PULL)[0]
    assert (local.scheme, local.fallback) == ("https", True), "TLS is configured, so it is tried before plain HTTP"


def test_nobody_who_may_be_asked(tmp_path: Path) -> None:
    put(tmp_path / "first/r.example/hosts.toml", 'server = "https://r.example"\ncapabilities = ["push"]')
    with pytest.raises(ConfigError, match=r"no server of r\.example may be asked to pull") as caught:
        hosts(tmp_path).endpoints("r.example", PULL)
    assert "hosts.toml" in caught.value.hint


def test_a_directory_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "first/r.example/hosts.toml").mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot read"):
        hosts(tmp_path).endpoints("r.example", PULL)
