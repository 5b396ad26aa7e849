"""Challenges, docker's credentials, and the life of tokens against a simulated registry."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from simulator.credentials import StaticCredentials
from simulator.registry import SimulatedRegistry, redirect

from weenv.core.errors import ConfigError, SourceError, UnauthorizedError
from weenv.registry.auth import merge_scopes, scope_of
from weenv.registry.challenge import Challenge, choose, parse_challenges, parse_token, token_request
from weenv.registry.client import RegistryClient
from weenv.registry.config import RegistryConfig
from weenv.registry.credentials import ANONYMOUS, Credential, CredentialStore, DockerConfig
from weenv.registry.hosts import Endpoint, Trust
from weenv.registry.manifest import Descriptor
from weenv.registry.source import RegistrySource

BLOB = os.urandom(5000)


# -- challenges -----------------------------------------------------------------------------------------------------


def test_challenges_of_real_registries() -> None:
    hub = 'Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull,push"'
    assert parse_challenges([hub]) == [
        Challenge(
            "bearer",
            {
                "realm": "https://auth.docker.io/token",
                "service": "registry.docker.io",
                "scope": "repository:a/b:pull,push",
            },
        )
    ]
    two = 'Negotiate dG9rZW4=, Basic realm="a \\"b\\", c", charset=UTF-8, Bearer realm=x'
    assert parse_challenges([two]) == [
        Challenge("negotiate"),
        Challenge("basic", {"realm": 'a "b", c', "charset": "UTF-8"}),
        Challenge("bearer", {"realm": "x"}),
    ]
    assert choose(parse_challenges(['Basic realm="x"', 'BEARER Realm = "https://t"'])) == Challenge(
        "bearer", {"realm": "https://t"}
    )
    assert choose(parse_challenges(["Negotiate", "Bearer"])) is None


@given(st.lists(st.text(max_size=200), max_size=3))
def test_any_header_is_parsed_without_error(headers: list[str]) -> None:
    for challenge in parse_challenges(headers):
        assert challenge.scheme == challenge.scheme.lower()


@given(st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.text('abc \\",=', max_size=12), max_size=4))
def test_quoted_parameters_come_back(params: dict[str, str]) -> None:
    def quote(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    header = "Bearer " + ", ".join(f"{name}={quote(value)}" for name, value in params.items())
    assert parse_challenges([header]) == [Challenge("bearer", params)]


def test_a_hostile_header_takes_no_time() -> None:
    began = time.process_time()
    parse_challenges(["Bearer " + 'a="' * 200_000, "B " * 100_000, '\\"' * 100_000])
    assert time.process_time() - began < 10, "each piece is looked at once"


def test_token_request_is_careful_with_passwords() -> None:
    plain = Challenge("bearer", {"realm": "http://t.example/token", "service": "s"})
    with pytest.raises(SourceError, match="plain HTTP"):
        token_request(plain, "repository:a:pull", allow_plain=False, has_basic=True)
    request = token_request(plain, "repository:a:pull repository:b:pull", allow_plain=True, has_basic=True)
    assert request.url == "http://t.example/token?service=s&scope=repository%3Aa%3Apull&scope=repository%3Ab%3Apull"
    for realm in ("file:///etc/passwd", "https://", "https://u:p@h/x", "/token", "https://[x", "https://h/\udc80"):
        with pytest.raises(SourceError, match="unusable"):
            token_request(Challenge("bearer", {"realm": realm, "service": realm}), "x", allow_plain=True, has_basic=False)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"token": 5}', b'{"token": "a\\nb"}', b'{"token": "' + b"x" * 70_000 + b'"}', b"[" * 100_000],
)
def test_bad_token_answers(body: bytes) -> None:
    with pytest.raises(SourceError):
        parse_token(body, 0.0)


@pytest.mark.parametrize(
    ("answer", "renew"),
    [
        ({}, 54.0),
        ({"expires_in": 3600}, 3570.0),
        ({"expires_in": 10}, 9.0),
        ({"expires_in": "x"}, 54.0),
        ({"expires_in": 10**400}, 86_370.0),
    ],
)
def test_tokens_are_renewed_before_they_expire(answer: dict[str, object], renew: float) -> None:
    token = parse_token(json.dumps({"token": "t", **answer}).encode(), 0.0)
    assert token.renew_at == pytest.approx(renew)
    assert "t" not in repr(token).replace("Token", "").replace("renew_at", "")


def test_scopes_are_merged() -> None:
    assert merge_scopes(["repository:a:pull,push", "repository:b:pull", "repository:a:pull,delete", "registry:catalog:*"]) == (
        "repository:a:pull,push,delete repository:b:pull registry:catalog:*"
    )


# -- credentials ----------------------------------------------------------------------------------------------------


def auth_entry(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def test_inline_credentials() -> None:
    config = DockerConfig.parse(
        json.dumps(
            {
                "auths": {
                    "https://index.docker.io/v1/": auth_entry("hub", "pw:with:colons"),
                    "r.example:5000": auth_entry("me", "secret"),
                    "https://old.example/v2/": {"username": "u", "password": "p"},
                    "pod.example/team": auth_entry("team", "t"),
                    "pod.example": auth_entry("all", "a"),
                    "id.example": {"identitytoken": "idt"},
                    "empty.example": {},
                }
            }
        ).encode()
    )
    for name in ("docker.io", "registry-1.docker.io", "index.docker.io"):
        assert config.inline(name) == Credential("hub", "pw:with:colons")
    assert config.inline("r.example:5000") == Credential("me", "secret")
    assert config.inline("r.example") is ANONYMOUS
    assert config.inline("old.example") == Credential("u", "p")
    assert config.inline("pod.example", "team/env").username == "team"
    assert config.inline("pod.example", "other/env").username == "all"
    assert config.inline("id.example").identity_token == "idt"
    assert not config.inline("empty.example")
    assert "secret" not in repr(config) + repr(config.inline("r.example:5000"))


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"[" * 100_000])
def test_bad_config(data: bytes) -> None:
    with pytest.raises(ConfigError):
        DockerConfig.parse(data)


def test_bad_auth_entry() -> None:
    with pytest.raises(ConfigError, match="base64"):
        DockerConfig({"r.example": {"auth": "!"}}).inline("r.example")


@pytest.fixture
def helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on PATH with credential helpers: real executables, as docker would call them."""
    bodies = {
        "good": 'read -r server; printf \'{"ServerURL":"%s","Username":"user-of-%s","Secret":"pw"}\' "$server" "$server"',
        "token": 'printf \'{"Username":"<token>","Secret":"identity"}\'',
        "none": 'echo "credentials not found in native keychain"; exit 1',
        "broken": "echo boom >&2; exit 1",
        "garbage": "echo nonsense",
    }
    for name, body in bodies.items():
        path = tmp_path / f"docker-credential-{name}"
        path.write_text("#!/bin/sh\n" + body + "\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    yield tmp_path


def store(directory: Path, content: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> CredentialStore:
    (directory / "config.json").write_text(json.dumps(content))
    monkeypatch.setenv("DOCKER_CONFIG", str(directory))
    return CredentialStore()


def test_credential_helpers(helpers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = store(
        helpers,
        {
            "credsStore": "good",
            "credHelpers": {"id.example": "token", "none.example": "none", "b.example": "broken", "g.example": "garbage",
                            "m.example": "missing", "evil.example": "../../bin/sh"},
            "auths": {"none.example": auth_entry("inline", "x"), "r.example": {}},
        },
        monkeypatch,
    )  # fmt: skip
    assert found.lookup("r.example") == Credential("user-of-r.example", "pw")
    assert found.lookup("docker.io").username == "user-of-https://index.docker.io/v1/"
    assert found.lookup("id.example") == Credential(identity_token="identity")
    assert found.lookup("none.example").username == "inline"
    for host in ("b.example", "g.example", "m.example", "evil.example"):
        with pytest.raises(ConfigError):
            found.lookup(host)


def test_configuration_is_read_anew_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = store(tmp_path, {"auths": {"r.example": auth_entry("a", "1")}}, monkeypatch)
    assert found.lookup("r.example").username == "a"
    (tmp_path / "config.json").write_text(json.dumps({"auths": {"r.example": auth_entry("other", "1")}}))
    assert found.lookup("r.example").username == "other"
    (tmp_path / "config.json").unlink()
    assert found.lookup("r.example") is ANONYMOUS
    with pytest.raises(ConfigError, match="no docker configuration"):
        CredentialStore(str(tmp_path / "config.json")).lookup("r.example")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_configuration_that_is_none_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"^{path}: docker's configuration is not") as caught:
        CredentialStore(str(path)).lookup("r.example")
    assert "docker login" in caught.value.hint


def test_a_configuration_that_is_too_large_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"auths": {"r.example": auth_entry("a", "1")}}) + " " * (4 << 20))
    with pytest.raises(ConfigError) as caught:
        CredentialStore(str(path)).lookup("r.example")
    assert str(caught.value) == f"{path} is larger than {4 << 20} bytes"


def test_a_configuration_that_is_a_pipe_is_named_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError) as caught:
        CredentialStore(str(tmp_path / "config.json")).lookup("r.example")
    assert str(caught.value) == f"cannot read {tmp_path}/config.json: it is a pipe, not a file"


# -- against a registry ---------------------------------------------------------------------------------------------


def client(sim: SimulatedRegistry, credential: Credential = ANONYMOUS) -> RegistryClient:
    return RegistryClient(RegistryConfig(retry_delay=0.01), StaticCredentials({sim.host: credential}))


async def test_basic() -> None:
    async with SimulatedRegistry(auth="basic", user=("u", "p")) as sim:
        digest = sim.add_blob(BLOB)
        async with client(sim, Credential("u", "p")) as c:
            blob = RegistrySource(c, sim.host, "a/b", digest, len(BLOB))
            assert await blob.read(0, 100) == BLOB[:100]
            assert await blob.read(100, 100) == BLOB[100:200]
            assert sim.count("registry") == 3  # one refusal, then the header is known
        async with client(sim, Credential("u", "wrong")) as c:
            with pytest.raises(UnauthorizedError, match="401"):
                await RegistrySource(c, sim.host, "a/b", digest, len(BLOB)).read(0, 100)
        async with client(sim) as c:
            with pytest.raises(UnauthorizedError):
                await RegistrySource(c, sim.host, "a/b", digest, len(BLOB)).read(0, 100)


async def test_bearer_with_password_and_scope() -> None:
    async with SimulatedRegistry(auth="bearer", user=("u", "p")) as sim:
        digest = sim.add_blob(BLOB)
        async with client(sim, Credential("u", "p")) as c:
            assert await RegistrySource(c, sim.host, "a/b", digest, len(BLOB)).read(7, 100) == BLOB[7:107]
            assert await c.has_blob(sim.host, "a/b", digest) == len(BLOB)
            assert sim.count("token") == 1
            assert next(s.path for s in sim.seen if s.server == "token").endswith("&scope=repository%3Aa%2Fb%3Apull")
            # Another repository is another scope.
            assert await c.has_blob(sim.host, "c", digest) == len(BLOB)
            assert sim.count("token") == 2
        async with client(sim, Credential("u", "wr0ng-pass")) as c:
            with pytest.raises(UnauthorizedError, match="refuses user 'u'") as caught:
                await c.has_blob(sim.host, "a/b", digest)
            assert "docker login" in caught.value.hint and "wr0ng-pass" not in str(caught.value)


async def test_identity_token() -> None:
    async with SimulatedRegistry(auth="bearer", user=("u", "p"), identity_token="idt") as sim:
        digest = sim.add_blob(BLOB)
        async with client(sim, Credential(identity_token="idt")) as c:
            assert await c.has_blob(sim.host, "a", digest) == len(BLOB)
        assert sim.count("token", "POST") == 1


@pytest.mark.parametrize("challenge", [True, False])
async def test_refused_token_is_renewed_once(challenge: bool) -> None:
    """401 with a challenge, and 403 without one (registries that answer an expired token like that)."""
    async with SimulatedRegistry(auth="bearer", challenge_on_refusal=challenge) as sim:
        digest = sim.add_blob(BLOB)
        async with client(sim) as c:
            blob = RegistrySource(c, sim.host, "a", digest, len(BLOB))
            await blob.read(0, 10)
            sim.revoke()
            assert await blob.read(10, 10) == BLOB[10:20]
            assert sim.count("token") == 2
            sim._tokens = {}
            sim.user = ("nobody", "else")  # the token server now refuses
            with pytest.raises(UnauthorizedError):
                await blob.read(20, 10)


async def test_token_is_renewed_before_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    async with SimulatedRegistry(auth="bearer", token_lifetime=3.0) as sim:  # refused only if a request takes 0.3 s
        digest = sim.add_blob(BLOB)
        async with client(sim) as c:
            blob = RegistrySource(c, sim.host, "a", digest, len(BLOB))
            await blob.read(0, 10)
            key = (f"http://{sim.host}", scope_of("a"))
            old = c.auth._headers[key].value
            refusals = sim.count("registry")
            while c.auth._headers[key].value == old:
                await blob.read(10, 10)
            reads = sum(1 for s in sim.seen if s.server == "registry")
            assert sim.count("token") == 2 and reads > refusals
            # No read after the first was refused on the way: every one carried a token that was good.
            assert c.counters.renewals == 1


# -- what changes while a client runs ---------------------------------------------------------------------------------


def login(directory: Path, host: str, user: str, password: str) -> None:
    (directory / "config.json").write_text(json.dumps({"auths": {host: auth_entry(user, password)}}))


@pytest.mark.parametrize("auth", ["basic", "bearer"])
async def test_a_login_that_changes_mid_run_counts_at_once(tmp_path: Path, auth: str) -> None:
    """The old password is refused, the docker configuration has a new one by then: no read fails."""
    async with SimulatedRegistry(auth=auth, user=("u", "old")) as sim:
        digest = sim.add_blob(BLOB)
        login(tmp_path, sim.host, "u", "old")
        config = RegistryConfig(docker_config=str(tmp_path / "config.json"), retry_delay=0.01)
        async with RegistryClient(config) as c:
            blob = RegistrySource(c, sim.host, "a", digest, len(BLOB))
            assert await blob.read(0, 10) == BLOB[:10]
            sim.user = ("u", "new")
            sim.revoke()
            login(tmp_path, sim.host, "u", "new")
            assert await blob.read(10, 10) == BLOB[10:20]
            sim.user = ("u", "newer")
            sim.revoke()
            with pytest.raises(UnauthorizedError):
                await blob.read(20, 10)
            login(tmp_path, sim.host, "u", "newer")
            assert await blob.read(20, 10) == BLOB[20:30]
            assert (await c.request("GET", sim.host, f"/v2/a/blobs/{digest}", what="x", scope=scope_of("a")))[2] == BLOB


async def test_a_helper_is_asked_again_when_what_it_gave_has_expired(
    helpers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of cloud registries: a password of twelve hours, and 403 without WWW-Authenticate when it is over."""
    secret = helpers / "secret"
    helper = helpers / "docker-credential-cloud"
    helper.write_text(f'#!/bin/sh\nprintf \'{{"Username":"u","Secret":"%s"}}\' "$(cat {secret})"\n')
    helper.chmod(0o755)
    async with SimulatedRegistry(auth="basic", user=("u", "one"), challenge_on_refusal=False) as sim:
        digest = sim.add_blob(BLOB)
        (helpers / "config.json").write_text(json.dumps({"credHelpers": {sim.host: "cloud"}}))
        secret.write_text("one")
        config = RegistryConfig(docker_config=str(helpers / "config.json"), retry_delay=0.01)
        async with RegistryClient(config) as c:
            blob = RegistrySource(c, sim.host, "a", digest, len(BLOB))
            assert await blob.read(0, 10) == BLOB[:10]
            secret.write_text("two")
            sim.user = ("u", "two")
            assert await blob.read(10, 10) == BLOB[10:20]
            refused = [seen for seen in sim.seen if "Authorization" in seen.headers]
            assert len(refused) == 3


async def test_a_redirect_to_another_registry_gets_the_credentials_for_that_one() -> None:
    """A registry may redirect to another one, with a token service of its own; ours for the first are not for it."""
    second = SimulatedRegistry(auth="bearer", user=("two", "2"))
    async with SimulatedRegistry(auth="bearer", user=("one", "1")) as first, second:
        digest = second.add_blob(BLOB)
        first.add_blob(BLOB)
        first.script.extend([redirect(f"http://{second.host}/v2/other/blobs/{digest}")] * 10)
        store = StaticCredentials({first.host: Credential("one", "1"), second.host: Credential("two", "2")})
        async with RegistryClient(RegistryConfig(retry_delay=0.01), store) as c:
            blob = RegistrySource(c, first.host, "a", digest, len(BLOB))
            for start in range(0, 1000, 100):
                assert await blob.read(start, 100) == BLOB[start : start + 100]
            assert first.count("registry") == 2 and first.count("token") == 1
            assert second.count("token") == 1
            assert next(s.path for s in second.seen if s.server == "token").endswith("scope=repository%3Aother%3Apull")
            tokens = set(first._tokens)
            assert not any(s.headers.get("Authorization", "")[7:] in tokens for s in second.seen)
            second.revoke()
            assert await blob.read(0, 100) == BLOB[:100]
            assert second.count("token") == 2
            await c.transfer.pull_bytes(first.host, "a", Descriptor("x", digest, len(BLOB)))
        async with RegistryClient(RegistryConfig(attempts=2), StaticCredentials({first.host: Credential("one", "1")})) as c:
            with pytest.raises(UnauthorizedError):
                await RegistrySource(c, first.host, "a", digest, len(BLOB)).read(0, 10)


def test_who_may_be_anybody_gets_no_credentials_for_the_host_whose_name_it_bears() -> None:
    """Over plain HTTP, or where a mirror with ``skip_verify`` led, nobody has shown that he is who the address names."""
    challenges = ['Basic realm="x"']
    mirror = Endpoint("r.example", "mirror.example")
    unverified = replace(mirror, trust=Trust(skip_verify=True))
    client = RegistryClient(RegistryConfig(plain_http=frozenset({"plain.example:5000"})))
    assert client.meet(mirror, "https://b.example/v2/a", "s", challenges) is not None
    assert client.meet(mirror, "http://plain.example:5000/v2/a", "s", challenges) is not None
    assert client.meet(mirror, "http://127.0.0.1:5000/v2/a", "s", challenges) is not None
    assert client.meet(mirror, "http://b.example/v2/a", "s", challenges) is None
    assert client.meet(unverified, "https://b.example/v2/a", "s", challenges) is None
    assert client.meet(unverified, "http://127.0.0.1:5000/v2/a", "s", challenges) is None


async def test_nothing_tells_a_storage_server_where_we_came_from() -> None:
    """Storage that checks the Referer, or refuses a second kind of authorisation, is not given any."""
    async with SimulatedRegistry(auth="bearer", redirect_blobs=True) as sim:
        digest = sim.add_blob(BLOB)
        async with client(sim) as c:
            await RegistrySource(c, sim.host, "a", digest, len(BLOB)).read(0, 10)
            await c.transfer.pull_bytes(sim.host, "a", Descriptor("x", digest, len(BLOB)))
        stored = [seen for seen in sim.seen if seen.server == "storage"]
        assert len(stored) == 2
        assert not any({"referer", "authorization", "cookie"} & {name.lower() for name in seen.headers} for seen in stored)


async def test_a_challenge_with_an_empty_scope_is_answered_with_ours() -> None:
    class Empty(SimulatedRegistry):
        def _refusal(self, request: web.Request) -> web.Response | None:
            refusal = super()._refusal(request)
            if refusal is not None:
                refusal.headers["WWW-Authenticate"] = f'Bearer realm="http://{self.host}/token",service="s",scope=""'
            return refusal

    async with Empty(auth="bearer") as sim:
        digest = sim.add_blob(BLOB)
        async with client(sim) as c:
            assert await RegistrySource(c, sim.host, "a", digest, len(BLOB)).read(0, 10) == BLOB[:10]
        assert sim.count("token", part="scope=repository%3Aa%3Apull") == 1


@pytest.mark.parametrize("trouble", ["down", "dripping"])
async def test_a_token_service_in_trouble_is_waited_for_and_not_for_ever(trouble: str) -> None:
    """It fails or drips twice; the read goes on when it is well again."""
    class Sick(SimulatedRegistry):
        async def _token(self, request: web.Request) -> web.StreamResponse:  # type: ignore[override]
            if self.count("token") < 2:
                if trouble == "down":
                    self._record("token", request)
                    return web.Response(status=503)
                self._record("token", request)
                answer = web.StreamResponse()
                answer.content_length = 1000
                await answer.prepare(request)
                with contextlib.suppress(ConnectionError):
                    for _ in range(200):
                        await answer.write(b" ")
                        await asyncio.sleep(0.05)
                return answer
            return await super()._token(request)

    async with Sick(auth="bearer") as sim:
        digest = sim.add_blob(BLOB)
        quick = RegistryConfig(retry_delay=0.01, stall_timeout=0.3, connect_timeout=0.2, deadline=15.0)
        async with RegistryClient(quick, StaticCredentials({})) as c:
            async with asyncio.timeout(60):
                assert await RegistrySource(c, sim.host, "a", digest, len(BLOB)).read(0, 10) == BLOB[:10]
        assert sim.count("token") == 3
