"""However a registry is asked, that it does not answer is said in the same words, with a remedy."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator

import aiohttp
import pytest
import requests

from weenv.core.errors import UnavailableError
from weenv.registry.client import RegistryClient, describe
from weenv.registry.config import RegistryConfig
from weenv.registry.orasreg import explain
from weenv.registry.policy import unavailable
from weenv.registry.ranged import RegistrySource
from weenv.registry.reference import parse_reference


def ssl_error() -> aiohttp.ClientConnectorCertificateError:
    key = aiohttp.client_reqrep.ConnectionKey("r.example", 443, True, None, None, None, None)
    return aiohttp.ClientConnectorCertificateError(key, ssl.CertificateError("self-signed"))


@pytest.fixture
def port() -> Iterator[int]:
    """A port of 127.0.0.1 that refuses connections: nobody listens, nobody else can have it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.mark.parametrize("way", ["manifest", "range", "pull"])
async def test_nobody_there_is_said_in_the_same_words(way: str, port: int) -> None:
    host, digest = f"127.0.0.1:{port}", "sha256:" + "0" * 64
    async with RegistryClient(RegistryConfig(attempts=2, retry_delay=0.01)) as client:
        with pytest.raises(UnavailableError) as caught:
            if way == "manifest":
                await client.request("GET", host, "/v2/a/manifests/1", what="a:1", scope="")
            elif way == "range":
                await RegistrySource(client, host, "a", digest, 10).read(0, 10)
            else:
                await client.get_manifest(parse_reference(f"{host}/a:1"))
    said = caught.value
    assert said.message.startswith(f"{host} cannot serve ") and said.message.endswith(": Connection refused")
    assert "is it running" in said.hint and "[registry] plain_http" in said.hint


@pytest.mark.parametrize("reason", [describe(ssl_error()), explain(requests.exceptions.SSLError())])
def test_a_certificate_that_is_not_trusted_has_its_remedy(reason: str) -> None:
    said = unavailable("r.example", "a:1", reason)
    assert "[registry] ca_file" in said.hint and "hosts.toml" in said.hint and "--plain-http" in said.hint


async def test_of_several_addresses_the_first_reason_is_told(port: int) -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError) as caught:
            await session.get(f"http://localhost:{port}/")
    assert describe(caught.value) == "Connection refused"
    both = OSError("Multiple exceptions: [Errno 111] Connect call failed ('::1', 1, 0, 0), [Errno 101] Connect call failed")
    assert describe(both) == "Connection refused"
    with pytest.raises(OSError) as unknown:
        await asyncio.get_running_loop().getaddrinfo("no-such-name.invalid", 1)
    assert describe(unknown.value) == unknown.value.strerror
