"""Which hosts an image's annotation must not make a node contact."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from weenv.core.errors import BadReference, SourceError
from weenv.registry.challenge import TokenRequest
from weenv.registry.client import RegistryClient
from weenv.registry.config import RegistryConfig
from weenv.registry.hosts import Endpoint
from weenv.registry.internal import is_internal, is_internal_address, leads_inside


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.200.3.4", "0.0.0.0", "0.1.2.3", "169.254.169.254", "169.254.0.1", "224.0.0.1", "168.63.129.16",
        "100.100.100.200", "192.0.0.192", "::1", "::", "fe80::1", "fe80::1%eth0", "fd00:ec2::254", "ff02::1",
        "::ffff:127.0.0.1", "::ffff:169.254.169.254", "2002:7f00:1::", "64:ff9b::a9fe:a9fe",
    ],
)  # fmt: skip
def test_internal(address: str) -> None:
    assert is_internal_address(address)


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "192.168.1.1", "172.16.0.1", "8.8.8.8", "100.64.0.1", "fd00::1", "2606:4700::1", "64:ff9b::808:808"]
)
def test_not_internal(address: str) -> None:
    assert not is_internal_address(address)


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:5000", "x.localhost", "127.0.0.1:5000", "[::1]:5000", "127.1", "2130706433", "169.254.169.254"],
)
async def test_hosts_by_what_they_resolve_to(host: str) -> None:
    assert await is_internal(host), "also in the forms that only the resolver understands"


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.1", "2130706433", "0x7f.1", "0177.0.0.1", "0", "169.254.43518", "localhost.", "[::1]",
        "\u2460\u2461\u2466.1",
    ],
)  # fmt: skip
def test_redirects_lead_inside_in_whatever_notation(host: str) -> None:
    config = RegistryConfig()
    assert leads_inside("https://registry.example/x", f"https://{host}:5000/y", config)
    assert not leads_inside("https://registry.example/x", "https://8.8/y", config)
    assert not leads_inside("http://127.0.0.1:5000/x", "http://127.1:5001/y", config)


def test_names_lead_where_their_addresses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A public name may have a private address, in whoever's zone it is."""
    names = {
        "inside.example": "127.0.0.1", "cloud.example": "169.254.169.254", "registry.example": "198.51.100.1",
        "s3.example": "10.1.2.3",
    }  # fmt: skip
    real = socket.getaddrinfo

    def resolver(name: str, *more: Any, **flags: Any) -> Any:
        return real(name if flags.get("flags") else names.get(name, name), *more, **flags)

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    config = RegistryConfig()
    assert leads_inside("https://registry.example/x", "https://inside.example/y", config)
    assert leads_inside("https://registry.example/x", "https://cloud.example:80/y", config)
    assert leads_inside("http://127.0.0.1:5000/x", "https://cloud.example/y", config)
    assert not leads_inside("https://registry.example/x", "https://s3.example/y", config)
    assert not leads_inside("https://inside.example/x", "http://127.0.0.1:5001/y", config), "as it is on loopback itself"
    config = RegistryConfig(allow_sources=frozenset({"inside.example"}))
    assert not leads_inside("https://registry.example/x", "https://inside.example/y", config)


async def test_nobody_is_sent_inside_for_a_token() -> None:
    """The answer goes to whoever named the place, and the question may hold a password."""
    server = Endpoint("10.0.0.5:5000", "10.0.0.5:5000", "http")
    async with RegistryClient(RegistryConfig(plain_http=frozenset({"10.0.0.5:5000"}))) as client:
        for host in ("127.0.0.1:1", "169.254.169.254", "[::1]:1", "2130706433:1"):
            request = TokenRequest("GET", f"http://{host}/latest/x?a=b", basic=True)
            with pytest.raises(SourceError, match="which is this node or its link"):
                await client._fetch_token(request, "Basic eDp5", server)


async def test_hosts_elsewhere() -> None:
    assert not await is_internal("10.1.2.3:5000")
    assert not await is_internal("no-such-name.invalid")


def test_what_is_configured() -> None:
    config = RegistryConfig(plain_http=frozenset({"a"}), tls=frozenset({"b:1"}), allow_sources=frozenset({"127.0.0.1"}))
    assert all(config.is_configured(host) for host in ("a", "a:5", "b:1", "127.0.0.1", "127.0.0.1:5000"))
    assert not any(config.is_configured(host) for host in ("b", "b:2", "127.0.0.2", "aa"))
    with pytest.raises(BadReference):
        RegistryConfig(allow_sources=frozenset({"https://x"}))


async def test_a_redirect_from_tls_does_not_lead_to_this_node() -> None:
    async def hop(client: RegistryClient, target: str) -> str:
        answer: Any = SimpleNamespace(headers={"Location": target})
        return await client.next_hop("https://registry.example/v2/x/blobs/sha256:0", answer, "registry.example", 1)

    async with RegistryClient(RegistryConfig()) as client:
        for target in ("http://127.0.0.1:8080/x", "http://localhost/x", "http://169.254.169.254/latest/meta-data"):
            with pytest.raises(SourceError, match="from TLS to plain HTTP"):
                await hop(client, target)
        assert await hop(client, "https://storage.example/x") == "https://storage.example/x"
    async with RegistryClient(RegistryConfig(plain_http=frozenset({"127.0.0.1:8080"}))) as client:
        assert await hop(client, "http://127.0.0.1:8080/x") == "http://127.0.0.1:8080/x"


async def test_a_redirect_in_plain_http_does_not_lead_to_this_node_either() -> None:
    async def hop(client: RegistryClient, source: str, target: str) -> str:
        answer: Any = SimpleNamespace(headers={"Location": target})
        return await client.next_hop(f"http://{source}/v2/x/blobs/sha256:0", answer, source, 1)

    async with RegistryClient(RegistryConfig(plain_http=frozenset({"10.0.0.5:5000"}))) as client:
        for address in ("169.254.169.254", "u:p@127.0.0.1", "[::1]:80", "[::127.0.0.1]", "[64:ff9b:1::a9fe:a9fe]"):
            target = f"http://{address}/x"
            with pytest.raises(SourceError, match="which is this node or its link") as caught:
                await hop(client, "10.0.0.5:5000", target)
            assert "u:p" not in str(caught.value)
        assert await hop(client, "10.0.0.5:5000", "http://10.0.0.6/x") == "http://10.0.0.6/x"
        assert await hop(client, "127.0.0.1:5000", "http://127.0.0.1:5001/x") == "http://127.0.0.1:5001/x"
    async with RegistryClient(RegistryConfig(allow_sources=frozenset({"127.0.0.1:9"}))) as client:
        assert await hop(client, "10.0.0.5:5000", "http://127.0.0.1:9/x") == "http://127.0.0.1:9/x"
