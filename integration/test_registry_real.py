"""The registry client against Debian's docker-registry: anonymous, with passwords, with signed tokens, over TLS."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import http.server
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from simulator.credentials import StaticCredentials

from weenv.core.errors import NotFoundInSource, SourceError, UnauthorizedError, UnavailableError
from weenv.registry.client import RegistryClient
from weenv.registry.config import RegistryConfig
from weenv.registry.credentials import Credential
from weenv.registry.manifest import OCI_CONFIG, OCI_INDEX, OCI_LAYER_TAR, OCI_MANIFEST, Descriptor
from weenv.registry.reference import Reference, parse_reference
from weenv.registry.source import RegistrySource
from weenv_testkit import tools
from weenv_testkit.procs import Process, run
from weenv_testkit.registry import Registry, free_port

CHUNK = 5 << 20


@dataclass(frozen=True)
class Blob:
    """A file with random content."""

    path: str
    data: bytes
    descriptor: Descriptor


@pytest.fixture
def blob(tmp_path: Path) -> Blob:
    """12 MB that no other test has."""
    return make_blob(tmp_path, random.randbytes(12 << 20))


def make_blob(directory: Path, data: bytes, media_type: str = OCI_LAYER_TAR) -> Blob:
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    path = directory / digest[7:]
    path.write_bytes(data)
    return Blob(str(path), data, Descriptor(media_type, digest, len(data)))


def anonymous(config: RegistryConfig | None = None) -> RegistryClient:
    return RegistryClient(config or RegistryConfig(), StaticCredentials({}))


@pytest.mark.parametrize("chunk", [0, CHUNK])
async def test_blobs(registry: Registry, tmp_path: Path, blob: Blob, chunk: int) -> None:
    host, repository = registry.host, f"client/blobs-{secrets.token_hex(4)}"
    moved: list[int] = []
    async with anonymous() as client:
        assert await client.has_blob(host, repository, blob.descriptor.digest) is None
        push = client.transfer.push_blob
        assert await push(host, repository, blob.descriptor, blob.path, chunk_size=chunk, progress=moved.append) == "uploaded"
        mark = registry.mark()
        assert await push(host, repository, blob.descriptor, blob.path) == "exists"
        assert [r.method for r in registry.requests(mark)] == ["HEAD"]
        assert await client.has_blob(host, repository, blob.descriptor.digest) == len(blob.data)
        assert sum(moved) in (0, len(blob.data))  # oras' own chunked upload reports nothing

        other = repository + "-mounted"
        assert await client.transfer.mount_blob(host, other, blob.descriptor, "") is False
        assert await push(host, other, blob.descriptor, blob.path, mount_from=repository) == "mounted"
        assert await client.transfer.mount_blob(host, other + "2", blob.descriptor, repository) is True
        missing = Descriptor("x", "sha256:" + "0" * 64, 3)
        assert await client.transfer.mount_blob(host, other, missing, repository) is False

        await client.transfer.pull_blob(host, other, blob.descriptor, str(tmp_path / "out"))
        assert (tmp_path / "out").read_bytes() == blob.data
        source = RegistrySource(client, host, other, blob.descriptor.digest, len(blob.data))
        spots = [(0, 1), (len(blob.data) - 1, 1), (4_000_001, 1_234_567), (0, len(blob.data))]
        assert await asyncio.gather(*(source.read(*spot) for spot in spots)) == [blob.data[a : a + n] for a, n in spots]
        assert source.ranges is True
        with pytest.raises(NotFoundInSource):
            await RegistrySource(client, host, other, missing.digest, 3).read(0, 3)


async def test_small_and_empty_blobs(registry: Registry, tmp_path: Path) -> None:
    async with anonymous() as client:
        for data in (b"", b"x"):
            small = make_blob(tmp_path, data)
            await client.transfer.push_blob(registry.host, "client/small", small.descriptor, small.path)
            assert await client.transfer.pull_bytes(registry.host, "client/small", small.descriptor) == data


async def test_a_file_that_changed_is_not_stored(registry: Registry, blob: Blob) -> None:
    await asyncio.to_thread(Path(blob.path).write_bytes, b"changed" + blob.data[7:])
    async with anonymous() as client:
        with pytest.raises(SourceError, match="DIGEST_INVALID"):
            await client.transfer.push_blob(registry.host, "client/changed", blob.descriptor, blob.path)
        os.truncate(blob.path, 100)
        with pytest.raises(SourceError, match="does not have the"):
            await client.transfer.push_blob(registry.host, "client/changed", blob.descriptor, blob.path)


async def test_manifests(registry: Registry, tmp_path: Path) -> None:
    reference = parse_reference(f"{registry.host}/client/manifests:v1")
    layer = make_blob(tmp_path, b"layer")
    config = make_blob(tmp_path, b'{"rootfs":{"type":"layers","diff_ids":[]}}', OCI_CONFIG)
    manifest = json.dumps(
        {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config.descriptor.to_json(),
         "layers": [layer.descriptor.to_json()]}, indent=3,
    ).encode()  # fmt: skip
    async with anonymous() as client:
        with pytest.raises(SourceError, match="MANIFEST_BLOB_UNKNOWN"):
            await client.transfer.push_manifest(reference, manifest, OCI_MANIFEST)
        for part in (layer, config):
            await client.transfer.push_blob(registry.host, reference.repository, part.descriptor, part.path)
        pushed = await client.transfer.push_manifest(reference, manifest, OCI_MANIFEST)
        assert await client.get_manifest(reference) == (manifest, pushed)
        index = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [pushed.to_json()]}).encode()
        listed = await client.transfer.push_manifest(parse_reference(f"{reference.name}:list"), index, OCI_INDEX)
        assert await client.get_manifest(reference.with_digest(listed.digest)) == (index, listed)
        assert registry.manifest(reference.repository, "list")[1] == listed.digest
        with pytest.raises(NotFoundInSource, match="MANIFEST_UNKNOWN"):
            await client.get_manifest(parse_reference(f"{reference.name}:v2"))


async def test_a_restart_of_the_registry_is_not_seen(home: str, tmp_path: Path) -> None:
    """The reader's next range and an upload wait for the registry to come back."""
    blob = make_blob(tmp_path, random.randbytes(1 << 20))
    with Registry(os.path.join(home, "restarted")) as own:
        async with anonymous(RegistryConfig(attempts=12, retry_delay=0.1)) as client:
            await client.transfer.push_blob(own.host, "a", blob.descriptor, blob.path)
            source = RegistrySource(client, own.host, "a", blob.descriptor.digest, len(blob.data))
            assert await source.read(0, 10) == blob.data[:10]
            own.stop()
            reading = asyncio.ensure_future(source.read(10, 10))
            pushing = asyncio.ensure_future(client.transfer.push_blob(own.host, "b", blob.descriptor, blob.path))
            await asyncio.sleep(0.5)
            assert not reading.done() and not pushing.done()
            await asyncio.to_thread(own.start)
            assert await reading == blob.data[10:20]
            assert await pushing == "uploaded"


# -- authorisation and TLS ------------------------------------------------------------------------------------------

USER, PASSWORD = "weenv", "secret pw"
HASH = "$2b$05$abcdefghijklmnopqrstuumsZc.XhT0ytj9DWn3tazXGoQsX4E3J2"
"""bcrypt of PASSWORD: the only kind of hash that docker-registry takes."""


@contextlib.contextmanager
def special_registry(directory: str, extra: str, tls: str = "") -> Iterator[str]:
    """A docker-registry with more configuration; its ``host:port``."""
    os.makedirs(directory, exist_ok=True)
    host = f"127.0.0.1:{free_port()}"
    path = os.path.join(directory, "config.yml")
    with open(path, "w") as file:
        file.write(
            "version: 0.1\nlog: {level: warn, accesslog: {disabled: true}}\n"
            f"storage:\n  filesystem: {{rootdirectory: {json.dumps(directory + '/data')}}}\n"
            f"http:\n  addr: {json.dumps(host)}\n{tls}{extra}"
        )
    environment = {"PATH": os.environ["PATH"], "OTEL_TRACES_EXPORTER": "none"}
    process = Process("docker-registry", [tools.docker_registry(), "serve", path], directory + "/log", environment)

    def listening() -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", int(host.rpartition(":")[2])), 1).close()
            return True
        return False

    try:
        process.wait_ready(listening)
        yield host
    finally:
        process.stop(timeout=3)


def openssl(*arguments: str) -> None:
    run("openssl", *arguments)


def certificate(directory: str) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1; paths of key and certificate."""
    key, crt = os.path.join(directory, "key.pem"), os.path.join(directory, "crt.pem")
    openssl(
        "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=weenv-test",
        "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", crt,
    )  # fmt: skip
    return key, crt


async def round_trip(client: RegistryClient, host: str, blob: Blob) -> None:
    await client.transfer.push_blob(host, "team/env", blob.descriptor, blob.path)
    source = RegistrySource(client, host, "team/env", blob.descriptor.digest, len(blob.data))
    assert await source.read(5, 1000) == blob.data[5:1005]


async def test_passwords(home: str, blob: Blob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = os.path.join(home, "htpasswd")
    os.mkdir(directory)
    Path(directory, "htpasswd").write_text(f"{USER}:{HASH}\n")
    auth = f"auth:\n  htpasswd: {{realm: test, path: {json.dumps(directory + '/htpasswd')}}}\n"
    with special_registry(directory, auth) as host:
        entry = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": entry}}}))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        async with RegistryClient() as client:
            await round_trip(client, host, blob)
        for wrong in ({}, {host: Credential(USER, "no")}):
            async with RegistryClient(RegistryConfig(), StaticCredentials(wrong)) as client:
                with pytest.raises(UnauthorizedError):
                    await client.transfer.push_blob(host, "team/env", blob.descriptor, blob.path)
                with pytest.raises(UnauthorizedError):
                    await RegistrySource(client, host, "team/env", blob.descriptor.digest, 10).read(0, 1)


class TokenServer(http.server.ThreadingHTTPServer):
    """Signs tokens as distribution's "token authentication" specification says (RS256, x5c)."""

    def __init__(self, directory: str, key: str, crt: str, lifetime: int) -> None:
        self.directory, self.key, self.lifetime = directory, key, lifetime
        der = subprocess.run(["openssl", "x509", "-in", crt, "-outform", "DER"], capture_output=True, check=True).stdout
        self.header = {"typ": "JWT", "alg": "RS256", "x5c": [base64.b64encode(der).decode()]}
        self.asked: list[list[str]] = []
        super().__init__(("127.0.0.1", 0), _TokenHandler)

    def sign(self, service: str, scopes: list[str]) -> str:
        now = int(time.time())
        access = []
        for scope in scopes:
            kind, name, actions = scope.split(":")
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        claims = {"iss": "weenv-test", "sub": USER, "aud": service, "exp": now + self.lifetime, "nbf": now - 1, "iat": now,
                  "jti": secrets.token_hex(4), "access": access}  # fmt: skip

        def part(data: bytes) -> str:
            return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

        signed = part(json.dumps(self.header).encode()) + "." + part(json.dumps(claims).encode())
        sign = ["openssl", "dgst", "-sha256", "-sign", self.key]
        return signed + "." + part(subprocess.run(sign, input=signed.encode(), capture_output=True, check=True).stdout)


class _TokenHandler(http.server.BaseHTTPRequestHandler):
    server: TokenServer

    def do_GET(self) -> None:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        expected = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if self.headers.get("Authorization") != expected:
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.server.asked.append(query.get("scope", []))
        body = json.dumps(
            {"token": self.server.sign(query["service"][0], query.get("scope", [])), "expires_in": self.server.lifetime}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


async def test_tokens(home: str, blob: Blob) -> None:
    """Bearer tokens that a real registry checks: scopes for push, pull and mount, and renewal before they expire."""
    directory = os.path.join(home, "token")
    os.mkdir(directory)
    key, crt = certificate(directory)
    server = TokenServer(directory, key, crt, lifetime=4)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    realm = f"http://127.0.0.1:{server.server_address[1]}/token"
    auth = (
        f"auth:\n  token: {{realm: {json.dumps(realm)}, service: test, issuer: weenv-test, "
        f"rootcertbundle: {json.dumps(crt)}}}\n"
    )
    try:
        with special_registry(directory, auth) as host:
            login = StaticCredentials({host: Credential(USER, PASSWORD)})
            async with RegistryClient(RegistryConfig(), login) as client:
                await round_trip(client, host, blob)
                assert ["repository:team/env:pull,push"] in server.asked
                assert ["repository:team/env:pull"] in server.asked
                assert await client.transfer.mount_blob(host, "team/two", blob.descriptor, "team/env") is True
                assert ["repository:team/two:pull,push", "repository:team/env:pull"] in server.asked
                # For twice the life of a token: no read fails, and none is refused on the way.
                source = RegistrySource(client, host, "team/env", blob.descriptor.digest, len(blob.data))
                renewals = client.counters.renewals
                end = time.monotonic() + 8
                while time.monotonic() < end:
                    assert await source.read(100, 10) == blob.data[100:110]
                    await asyncio.sleep(0.05)
                assert client.counters.renewals == renewals
            async with RegistryClient(RegistryConfig(), StaticCredentials({host: Credential(USER, "no")})) as client:
                with pytest.raises(UnauthorizedError, match="refuses user 'weenv'"):
                    await client.get_manifest(Reference(host, "team/env", "v1"))
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join(60)


async def test_tls(home: str, blob: Blob) -> None:
    directory = os.path.join(home, "tls")
    os.mkdir(directory)
    key, crt = certificate(directory)
    tls = f"  tls: {{certificate: {json.dumps(crt)}, key: {json.dumps(key)}}}\n"
    with special_registry(directory, "", tls) as host:
        over_tls = frozenset({host})
        async with anonymous(RegistryConfig(tls=over_tls, ca_file=crt)) as client:
            await round_trip(client, host, blob)
        quick = RegistryConfig(tls=over_tls, attempts=2)
        async with anonymous(quick) as client:
            with pytest.raises(UnavailableError, match="certificate"):
                await RegistrySource(client, host, "team/env", blob.descriptor.digest, len(blob.data)).read(0, 1)
            with pytest.raises(UnavailableError, match="TLS"):
                await client.get_manifest(Reference(host, "team/env", "v1"))


def test_memory_is_bounded(registry: Registry, tmp_path: Path) -> None:
    """Pushing and pulling 300 MB takes no more than pushing nothing, give or take 64 MB."""
    program = """
import asyncio, hashlib, sys
from weenv.registry.client import RegistryClient
from weenv.registry.manifest import Descriptor

async def main():
    path, host, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with open(path, "rb") as file:
        digest = "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    async with RegistryClient() as client:
        blob = Descriptor("x", digest, size)
        await client.transfer.push_blob(host, "client/large", blob, path)
        await client.transfer.pull_blob(host, "client/large", blob, path + ".out")
    with open("/proc/self/status") as status:  # ru_maxrss would count the parent, too
        print(next(line.split()[1] for line in status if line.startswith("VmHWM")))

asyncio.run(main())
"""
    used = []
    for size in (1000, 300 << 20):
        path = tmp_path / f"{size}"
        with open(path, "wb") as file:
            file.write(secrets.token_bytes(500))
            file.truncate(size)
        used.append(int(run(sys.executable, "-c", program,
                            str(path), registry.host, str(size))))  # fmt: skip
        path.unlink()
        Path(f"{path}.out").unlink()
    assert used[1] - used[0] < 64 << 10  # KiB
