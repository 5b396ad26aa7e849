"""environment/gateway/daemon.py: who may ask, over what, how often; clients that stand still, a gateway that is stopped."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import os
import socket
import ssl
from pathlib import Path

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from simulator.gateway import Groups, serving
from simulator.registry import SimulatedRegistry, stall

from weenv.core.errors import ConfigError
from weenv.environment.gateway.names import spell


async def test_who_may_ask(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text("ann:correct horse\n")
    users.chmod(0o600)
    basic = "Basic " + base64.b64encode(b"ann:correct horse").decode()
    async with serving(tmp_path / "root", users_file=str(users)) as gw:
        code, headers, _ = await gw.ask("")
        assert code == 401
        assert headers["www-authenticate"].startswith("Basic ")
        assert (await gw.ask("", Authorization=basic))[0] == 200
        assert (await gw.ask("", Authorization="Bearer correct horse"))[0] == 200
        for wrong in ("Basic " + base64.b64encode(b"ann:x").decode(), "Bearer ann", "Basic !", "Digest x", basic[:-3]):
            assert (await gw.ask("", Authorization=wrong))[0] == 401
        for scheme in (b"Bearer", b"Basic"):  # no UTF-8, which no decent client sends
            reader, writer = await asyncio.open_connection(*gw.address.split(":"))
            lines = b"GET /v2/ HTTP/1.1", b"Host: x", b"Connection: close", b"Authorization: " + scheme + b" \xff\xfe", b"", b""
            writer.write(b"\r\n".join(lines))
            assert (await reader.read()).startswith(b"HTTP/1.1 401")
            writer.close()
            await writer.wait_closed()


async def test_too_many_at_a_time_are_told_to_come_back(tmp_path: Path) -> None:
    async with SimulatedRegistry() as sim:
        groups = Groups(sim)
        name = spell([groups.add("base", {"a": os.urandom(200_000)})])
        digest, _ = groups.layers["base"]
        async with serving(tmp_path / "root", groups=(sim.host,), blobs="proxy", requests=1) as gw:
            await gw.ask(f"{name}/manifests/latest")
            sim.script.append(stall(30, 1000))
            url = f"http://{gw.address}/v2/{name}/blobs/{digest}"
            async with gw.session.get(url) as held:
                assert held.status == 200, "the first bytes have come, the rest has not"
                code, headers, _ = await gw.ask("")
                assert (code, headers["retry-after"]) == (429, "1")


async def test_a_client_that_stands_still_is_dropped(tmp_path: Path) -> None:
    async with SimulatedRegistry() as sim:
        groups = Groups(sim)
        name = spell([groups.add("base", {"a": os.urandom(30 << 20)})])
        digest, blob = groups.layers["base"]
        async with serving(tmp_path / "root", groups=(sim.host,), blobs="proxy", client_stall=0.2) as gw:
            await gw.ask(f"{name}/manifests/latest")
            host, _, port = gw.address.partition(":")
            reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
            writer.write(f"GET /v2/{name}/blobs/{digest} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            got = len(await reader.read(10))
            await asyncio.sleep(0.5)  # standing still is what is tried
            with contextlib.suppress(ConnectionError):
                while chunk := await reader.read(1 << 20):
                    got += len(chunk)
            assert got < len(blob)
            writer.close()


async def test_a_unix_socket_is_ours_alone(tmp_path: Path) -> None:
    path = tmp_path / "run" / "g.sock"
    async with serving(tmp_path / "root", address=f"unix:{path}"):
        assert path.stat().st_mode & 0o777 == 0o600
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
            session.get("http://gateway/v2/") as answer,
        ):
            assert answer.status == 200
    path.unlink(missing_ok=True)
    path.write_text("")
    with pytest.raises(ConfigError, match="in the way"):
        async with serving(tmp_path / "root", address=f"unix:{path}"):
            pass


async def test_an_address_in_use_is_said(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen"):
            async with serving(tmp_path / "root", address=f"127.0.0.1:{taken.getsockname()[1]}"):
                pass


async def test_an_answer_under_way_ends_well_when_the_gateway_is_stopped(tmp_path: Path) -> None:
    async with SimulatedRegistry() as sim, aiohttp.ClientSession() as session:
        groups = Groups(sim)
        name = spell([groups.add("base", {"a": os.urandom(100_000)})])
        digest, blob = groups.layers["base"]
        async with serving(tmp_path / "root", groups=(sim.host,), blobs="proxy") as gw:
            await gw.ask(f"{name}/manifests/latest")
            sim.script.append(stall(0.5, 100))
            answer = await session.get(f"http://{gw.address}/v2/{name}/blobs/{digest}")
        async with answer:
            assert await answer.read() == blob
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"http://{gw.address}/v2/")


async def test_tls_and_metrics(tmp_path: Path) -> None:
    """Clients of a TLS registry do not follow redirects to plain HTTP, so such layers go through the gateway."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False).sign(key, hashes.SHA256())
    )  # fmt: skip
    pem, keyfile = tmp_path / "c.pem", tmp_path / "k.pem"
    pem.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    keyfile.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        metrics = f"127.0.0.1:{probe.getsockname()[1]}"
    context = ssl.create_default_context(cafile=str(pem))
    secure = {"tls_certificate": str(pem), "tls_key": str(keyfile), "metrics_address": metrics}
    async with SimulatedRegistry() as sim:
        groups = Groups(sim)
        stack = spell([groups.add("base", {"a": b"1"})])
        digest, blob = groups.layers["base"]
        async with serving(tmp_path / "root", groups=(sim.host,), **secure) as gw:
            url = f"https://localhost:{gw.address.rpartition(':')[2]}/v2/{stack}"
            async with gw.session.get(f"{url}/manifests/latest", ssl=context) as answer:
                assert answer.status == 200
            async with gw.session.get(f"{url}/blobs/{digest}", ssl=context, allow_redirects=False) as answer:
                assert (answer.status, await answer.read()) == (200, blob)
            async with gw.session.get(f"http://{metrics}/metrics") as answer:
                text = await answer.text()
            assert 'weenv_gateway_requests_total{kind="manifests",status="200"} 1.0' in text
            assert f"weenv_gateway_proxied_bytes_total {float(len(blob))}" in text
    with pytest.raises(ConfigError, match="cannot use"):
        async with serving(tmp_path / "root", tls_certificate=str(keyfile), tls_key=str(keyfile)):
            pass
