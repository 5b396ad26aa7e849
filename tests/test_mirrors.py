"""Mirrors, certificates and headers of containerd's certs.d, against real servers: every way in which a registry is asked.

The registry is called ``r.example`` throughout; its files say which servers on loopback stand for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from simulator import registry as simulated
from simulator.certificates import Authority
from simulator.credentials import StaticCredentials
from simulator.pushable import PushableRegistry
from simulator.registry import SimulatedRegistry

from weenv.core.errors import NotFoundInSource, SourceError, UnauthorizedError, UnavailableError, VerificationError
from weenv.registry.auth import scope_of
from weenv.registry.client import RegistryClient
from weenv.registry.config import RegistryConfig
from weenv.registry.credentials import Credential
from weenv.registry.manifest import OCI_INDEX, Descriptor
from weenv.registry.reference import Reference
from weenv.registry.source import RegistrySource, read_checked

NAME = "r.example"
BLOB = random.Random(5).randbytes(200_000)
DIGEST = "sha256:" + hashlib.sha256(BLOB).hexdigest()
INDEX = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}).encode()
INDEX_DIGEST = "sha256:" + hashlib.sha256(INDEX).hexdigest()
WAYS = ["range", "request", "manifest", "pull"]


def config(path: Path, **settings: float) -> RegistryConfig:
    # Nothing is raced where a test does not ask for it: this machine may be slow.
    values = {"retry_delay": 0.01, "max_retry_delay": 0.05, "stall_timeout": 5.0, "connect_timeout": 5.0, "attempts": 3,
              "deadline": 30.0, "race_after": 30.0, **settings}  # fmt: skip
    return RegistryConfig(config_path=str(path), **values)  # type: ignore[arg-type]


@dataclass
class Bench:
    """A mirror and a registry behind one name, and a client."""

    path: Path
    mirror: SimulatedRegistry
    own: SimulatedRegistry
    client: RegistryClient

    def write(self, text: str = "", more: str = "", host: str = NAME) -> None:
        """The hosts.toml: the mirror with ``text`` in its table, the registry, ``more``."""
        mirror = f'[host."{self.mirror.scheme}://{self.mirror.host}"]\n{text}\n'
        path = self.path / host / "hosts.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'server = "{self.own.scheme}://{self.own.host}"\n{mirror}{more}')
        self.client.hosts._known.clear()

    async def get(self, way: str) -> None:
        """Have the blob or the index in one of the ways in which a registry is asked, and check it."""
        if way == "range":
            source = RegistrySource(self.client, NAME, "team/env", DIGEST, len(BLOB))
            assert await read_checked(source, 1000, 5000, right) == BLOB[1000:6000]
        elif way == "request":
            _, _, body = await self.client.request(
                "GET", NAME, f"/v2/team/env/blobs/{DIGEST}", what="the blob", scope=scope_of("team/env")
            )
            assert body == BLOB
        elif way == "manifest":
            data, _ = await self.client.get_manifest(Reference(NAME, "team/env", digest=INDEX_DIGEST))
            assert data == INDEX
        else:
            target = self.path / "pulled"
            target.unlink(missing_ok=True)
            await self.client.transfer.pull_blob(NAME, "team/env", Descriptor("x", DIGEST, len(BLOB)), str(target))
            assert target.read_bytes() == BLOB

    def asked(self) -> tuple[int, int]:
        """Requests that mirror and registry have seen; forgets them."""
        counts = len(self.mirror.seen), len(self.own.seen)
        self.mirror.seen.clear()
        self.own.seen.clear()
        return counts


def right(data: bytes) -> None:
    if data != BLOB[1000:6000]:
        raise VerificationError("wrong bytes")


MakeBench = Callable[..., "AsyncIterator[Bench]"]


@asynccontextmanager
async def bench(
    path: Path, mirror: SimulatedRegistry | None = None, own: SimulatedRegistry | None = None,
    credentials: dict[str, Credential] | None = None, **settings: float,
) -> AsyncIterator[Bench]:  # fmt: skip
    async with AsyncExitStack() as stack:
        one, two = mirror or SimulatedRegistry(), own or SimulatedRegistry()
        for sim in (one, two):
            await stack.enter_async_context(sim)
            sim.add_blob(BLOB)
            sim.add_manifest(INDEX, OCI_INDEX, "v1")
        client = RegistryClient(config(path, **settings), StaticCredentials(credentials or {}))
        await stack.enter_async_context(client)
        made = Bench(path, one, two, client)
        made.write()
        yield made


@pytest.mark.parametrize("way", WAYS)
async def test_the_mirror_is_asked_for_the_namespace_and_the_registry_is_not(tmp_path: Path, way: str) -> None:
    async with bench(tmp_path) as b:
        await b.get(way)
        assert all(seen.path.endswith(f"?ns={NAME}") for seen in b.mirror.seen)
        assert b.asked() == (1, 0)


def lacks(b: Bench) -> None:
    b.mirror.blobs.clear()
    b.mirror.manifests.clear()


def is_down(b: Bench) -> None:
    b.mirror.down = True


def refuses(b: Bench) -> None:
    b.mirror.auth, b.mirror.user = "basic", ("nobody", "knows")


def lies(b: Bench) -> None:
    b.mirror.blobs = {digest: bytes(len(data)) for digest, data in b.mirror.blobs.items()}
    b.mirror.manifests = {key: (kind, b" " + data) for key, (kind, data) in b.mirror.manifests.items()}


def holds_less(b: Bench) -> None:
    b.mirror.blobs = {digest: data[:500] for digest, data in b.mirror.blobs.items()}
    b.mirror.manifests = {key: (kind, data[:5]) for key, (kind, data) in b.mirror.manifests.items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("trouble", [lacks, is_down, refuses, lies, holds_less])
async def test_a_mirror_that_is_of_no_use_costs_nothing_but_time(
    tmp_path: Path, trouble: Callable[[Bench], None], way: str
) -> None:
    async with bench(tmp_path) as b:
        trouble(b)
        await b.get(way)
        mirror, own = b.asked()
        assert mirror >= 1 and own >= 1
        b.own.down = True
        with pytest.raises((SourceError, VerificationError)) as caught:
            await b.get(way)
        assert caught.value.message


async def test_the_registrys_own_word_counts_where_nobody_has_it(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        lacks(b)
        b.own.auth, b.own.user = "basic", ("u", "p")
        for way in WAYS:
            with pytest.raises(UnauthorizedError):
                await b.get(way)
        b.own.auth = ""
        b.own.blobs.clear()
        b.own.manifests.clear()
        refuses(b)
        for way in WAYS:
            with pytest.raises(NotFoundInSource):
                await b.get(way)
        assert await b.client.has_blob(NAME, "team/env", DIGEST) is None
        b.mirror.down = True  # it might have it: that is no reason to say that it does not exist
        with pytest.raises(UnavailableError):
            await b.get("range")


async def test_a_mirror_without_the_capability_is_not_asked_for_names(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        b.write('capabilities = ["pull"]')
        await b.client.get_manifest(Reference(NAME, "team/env", "v1"))
        assert b.asked() == (0, 1)
        await b.client.get_manifest(Reference(NAME, "team/env", digest=INDEX_DIGEST))
        assert b.asked() == (1, 0)
        with pytest.raises(SourceError):
            await b.client.request("GET", NAME, "/v2/team/env/tags/list", what="tags", scope=scope_of("team/env"))
        assert b.mirror.seen == []


async def test_what_is_pushed_goes_to_the_first_that_takes_it(tmp_path: Path) -> None:
    own = PushableRegistry()
    async with bench(tmp_path, own=own) as b:
        b.write('capabilities = ["pull", "resolve"]')
        (tmp_path / "blob").write_bytes(b"pushed")
        blob = Descriptor("x", "sha256:" + hashlib.sha256(b"pushed").hexdigest(), 6)
        assert await b.client.transfer.push_blob(NAME, "team/env", blob, str(tmp_path / "blob")) == "uploaded"
        assert own.repositories["team/env"].blobs[blob.digest] == b"pushed"
        await b.client.transfer.push_manifest(Reference(NAME, "team/env", "new"), INDEX, OCI_INDEX)
        assert own.repositories["team/env"].tags == {"new": INDEX_DIGEST}
        assert b.mirror.seen == []
        b.write(more="")
        (tmp_path / NAME / "hosts.toml").write_text(f'server = "http://{own.host}"\ncapabilities = ["pull"]')
        b.client.hosts._known.clear()
        with pytest.raises(SourceError, match="may be asked to push"):
            await b.client.transfer.push_blob(NAME, "team/env", blob, str(tmp_path / "blob"))


@pytest.mark.parametrize("way", WAYS)
async def test_another_root_of_the_api(tmp_path: Path, way: str) -> None:
    """Without ``/v2`` (override_path), as some mirrors have it: nothing is there for who asks at the usual place."""
    async with bench(tmp_path) as b:
        text = f'server = "http://{b.own.host}"\n[host."http://{b.mirror.host}/v2/team"]\noverride_path = true\n'
        (tmp_path / NAME / "hosts.toml").write_text(text)
        b.client.hosts._known.clear()
        await b.get(way)
        assert b.mirror.seen[0].path.startswith("/v2/team/team/env/")
        assert b.asked() == (1, 0)


@pytest.mark.parametrize("way", WAYS)
async def test_headers_go_to_their_server_and_nowhere_else(tmp_path: Path, way: str) -> None:
    async with bench(tmp_path, SimulatedRegistry(redirect_blobs=True)) as b:
        b.write(f'[host."http://{b.mirror.host}".header]\nx-key = ["one", "two"]\nX-Other = "3"')
        await b.get(way)
        seen = {name.lower(): value for name, value in b.mirror.seen[0].headers.items()}
        assert "x-other" in seen and "x-key" in seen
        for request in b.mirror.seen:
            if request.server == "storage":
                assert not {"x-key", "x-other"} & {name.lower() for name in request.headers}
        b.mirror.down = True
        await b.get(way)
        assert all("x-other" not in {name.lower() for name in request.headers} for request in b.own.seen)


async def test_credentials_are_those_of_the_server_that_is_asked(tmp_path: Path) -> None:
    mirror = SimulatedRegistry(auth="bearer", user=("m", "mirrors"))
    own = SimulatedRegistry(auth="basic", user=("o", "own"))
    async with bench(tmp_path, mirror, own) as b:
        b.client.auth._credentials = StaticCredentials({
            mirror.host: Credential("m", "mirrors"), own.host: Credential("o", "own"), NAME: Credential("n", "namespace"),
        })  # fmt: skip
        for way in WAYS:
            await b.get(way)
            assert not own.seen
        mirror.blobs.clear()
        mirror.manifests.clear()
        for way in WAYS:
            await b.get(way)
        assert not any("Basic" in seen.headers.get("Authorization", "") for seen in mirror.seen if seen.server != "token")
        assert not any("Bearer" in seen.headers.get("Authorization", "") for seen in own.seen)


# -- TLS ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_a_ca_of_its_own(tmp_path: Path, way: str) -> None:
    authority = Authority(tmp_path)
    async with bench(tmp_path / "certs", SimulatedRegistry(tls=authority.server())) as b:
        await b.get(way)
        assert b.asked()[0] == 0, "its certificate is not trusted"
        b.client.health.worked(b.client.endpoints(NAME)[0])
        b.write(f'ca = "{authority.path}"')
        await b.get(way)
        assert b.asked() == (1, 0)
        b.write("skip_verify = true")
        await b.get(way)
        assert b.asked() == (1, 0)
        b.write('ca = "no-such-file.pem"')
        await b.get(way)
        assert b.asked() == (0, 1), "a mirror that cannot be used is passed over"


@pytest.mark.parametrize("way", WAYS)
async def test_client_certificates(tmp_path: Path, way: str) -> None:
    authority = Authority(tmp_path)
    client = authority.issue("client")
    async with bench(tmp_path / "certs", SimulatedRegistry(tls=authority.server(clients=True))) as b:
        b.write(f'ca = "{authority.path}"')
        await b.get(way)
        assert b.asked()[0] == 0, "it wants a certificate"
        b.client.health.worked(b.client.endpoints(NAME)[0])
        b.write(f'ca = "{authority.path}"\nclient = [["{client}.cert", "{client}.key"]]')
        await b.get(way)
        assert b.asked() == (1, 0)
        both = tmp_path / "both.pem"
        both.write_bytes(client.with_suffix(".cert").read_bytes() + client.with_suffix(".key").read_bytes())
        b.write(f'ca = "{authority.path}"\nclient = "{both}"')
        await b.get(way)
        assert b.asked() == (1, 0)
        b.write(f'ca = "{authority.path}"\nclient = "{client}.cert"')
        await b.get(way)
        assert b.asked() == (0, 1), "its key is missing"


async def test_dockers_certificates_and_their_replacement(tmp_path: Path) -> None:
    """``certs.d/HOST/*.crt``, ``*.cert`` and ``*.key`` without a hosts.toml; a CA that is replaced counts at once."""
    (tmp_path / "ca").mkdir()
    authority = Authority(tmp_path / "ca")
    client = authority.issue("client")
    async with SimulatedRegistry(tls=authority.server(clients=True)) as sim:
        sim.add_blob(BLOB)
        base = tmp_path / "certs" / f"127.0.0.1_{sim.host.partition(':')[2]}_"
        base.mkdir(parents=True)
        for suffix in (".cert", ".key"):
            (base / f"me{suffix}").write_bytes(client.with_suffix(suffix).read_bytes())
        (tmp_path / "wrong").mkdir()
        (base / "ca.crt").write_bytes(Authority(tmp_path / "wrong").path.read_bytes())
        async with RegistryClient(config(tmp_path / "certs"), StaticCredentials({})) as c:
            source = RegistrySource(c, sim.host, "a", DIGEST, len(BLOB))
            with pytest.raises(UnavailableError, match="certificate"):
                await source.read(0, 10)
            (base / "ca.crt").write_bytes(authority.path.read_bytes())
            c.hosts._known.clear()
            assert await source.read(0, 10) == BLOB[:10]


@pytest.mark.parametrize("way", WAYS)
async def test_tls_first_and_then_plain_http(tmp_path: Path, way: str) -> None:
    """An http address with TLS settings, as in containerd's own example of skip_verify."""
    async with bench(tmp_path) as b:
        b.write("skip_verify = true")
        await b.get(way)
        assert b.asked() == (1, 0)
        await b.get(way)
        assert b.asked() == (1, 0)
        assert b.client.endpoints(NAME)[0].scheme == "http", "it is not asked over TLS again"


# -- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_a_mirror_that_does_not_connect_costs_its_dial_timeout(tmp_path: Path, way: str) -> None:
    with socket.socket() as silent:  # takes connections, and never speaks TLS
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        async with bench(tmp_path, connect_timeout=300.0, stall_timeout=300.0, race_after=600.0) as b:
            text = f'server = "http://{b.own.host}"\n[host."https://127.0.0.1:{silent.getsockname()[1]}"]\n'
            (tmp_path / NAME / "hosts.toml").write_text(text + 'dial_timeout = "300ms"\n')
            b.client.hosts._known.clear()
            async with asyncio.timeout(60):
                await b.get(way)
            assert b.asked() == (0, 1)


async def test_a_slow_mirror_is_raced_by_the_next_and_rests_in_the_end(tmp_path: Path) -> None:
    async with bench(tmp_path, stall_timeout=20.0, race_after=0.1, mirror_rest=60.0) as b:
        b.mirror.script.extend([simulated.stall(15.0)] * 2)
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        await b.get("range")
        await b.get("range")
        assert loop.time() - began < 12.0
        assert b.asked() == (2, 2) and b.client.counters.raced == 2 and b.client.counters.rests == 1
        await b.get("range")
        assert b.asked() == (0, 1)
        pool = b.client.session.connector
        assert pool is not None and not pool._acquired  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", ["request", "manifest"])
async def test_a_mirror_that_hangs_holds_up_no_manifest(tmp_path: Path, way: str) -> None:
    """It takes connections and says nothing: raced where requests are ours, given one try where they are oras'."""
    tasks: set[asyncio.Task[None]] = set()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        await reader.read()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    patience = 20.0 if way == "request" else 1.0
    async with server, bench(tmp_path, stall_timeout=patience, race_after=0.1) as b:
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        (tmp_path / NAME / "hosts.toml").write_text(f'server = "http://{b.own.host}"\n[host."{address}"]\n')
        b.client.hosts._known.clear()
        began = asyncio.get_running_loop().time()
        await b.get(way)
        assert asyncio.get_running_loop().time() - began < 10.0
        await b.client.close()
        await asyncio.gather(*tasks)


async def test_all_at_once(tmp_path: Path) -> None:
    async with bench(tmp_path, race_after=0.0) as b:
        b.mirror.script.append(simulated.stall(15.0))
        await b.get("range")
        assert b.asked() == (1, 1)


async def test_in_order_only(tmp_path: Path) -> None:
    async with bench(tmp_path, race_after=60.0) as b:
        b.mirror.script.append(simulated.stall(0.5))
        await b.get("range")
        assert b.asked() == (1, 0)


async def test_a_sick_mirror_rests_and_is_asked_again_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with bench(tmp_path, mirror_rest=0.5) as b:
        b.mirror.down = True
        began = time.monotonic()
        for _ in range(10):
            await b.get("range")
        mirror, own = b.asked()
        assert own == 10 and 2 <= mirror <= 4 * (1 + (time.monotonic() - began) // 0.5)
        assert sum("rests" in record.message for record in caplog.records) >= 1
        b.mirror.down = False
        async with asyncio.timeout(60):
            while not b.mirror.seen:
                await asyncio.sleep(0.05)
                await b.get("range")
        b.asked()
        await b.get("range")
        assert b.asked() == (1, 0)


async def test_a_changed_file_counts_without_a_restart(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        source = RegistrySource(b.client, NAME, "team/env", DIGEST, len(BLOB))
        assert await source.read(0, 10) == BLOB[:10] and b.asked() == (1, 0)
        (tmp_path / NAME / "hosts.toml").write_text(f'server = "http://{b.own.host}"')
        deadline = asyncio.get_running_loop().time() + 10
        while asyncio.get_running_loop().time() < deadline:
            assert await source.read(0, 10) == BLOB[:10]
            if b.own.seen:
                break
            await asyncio.sleep(0.1)
        assert b.own.seen


async def test_a_mirror_that_ignores_range_is_the_last_to_be_asked(tmp_path: Path) -> None:
    async with bench(tmp_path, SimulatedRegistry(ignore_range=True)) as b:
        source = RegistrySource(b.client, NAME, "team/env", DIGEST, len(BLOB))
        for _ in range(3):
            assert await source.read(1000, 10) == BLOB[1000:1010]
        assert b.asked() == (1, 3)
        b.own.down = True
        assert await source.read(1000, 10) == BLOB[1000:1010]


async def test_a_429_turns_to_the_next_and_nobody_asks_before_its_time(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        b.mirror.script.append(simulated.status(429, {"Retry-After": "30"}))
        for way in ("range", "request", "range"):
            await b.get(way)
        assert b.asked() == (1, 3) and b.client.counters.throttled == 1
