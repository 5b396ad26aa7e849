"""The oras transport against servers that drip their answer's header, redirect, or show certificates nobody knows."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path

import pytest
from simulator import registry as simulated
from simulator.certificates import Authority
from simulator.credentials import StaticCredentials
from simulator.registry import SimulatedRegistry

from weenv.core.errors import SourceError, UnavailableError
from weenv.registry.client import RegistryClient
from weenv.registry.config import RegistryConfig
from weenv.registry.manifest import Descriptor
from weenv.registry.reference import parse_reference

QUICK = RegistryConfig(retry_delay=0.01, max_retry_delay=0.05, stall_timeout=0.3, connect_timeout=1.0, attempts=2)
BLOB = bytes(range(256)) * 100


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("sent", [b"HTTP/1.1 200 OK\r\nX-A: ", b"HTT", b"HTTP/1.1 200 OK\r\n"])
async def test_a_header_that_drips_is_given_up_in_time(tmp_path: Path, sent: bytes, tls: bool) -> None:
    """A byte now and then keeps every socket timeout from running out: nothing may hold a thread for ever."""
    authority = Authority(tmp_path)
    tasks: list[asyncio.Task[None]] = []

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())  # type: ignore[arg-type]
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(sent)
            while not reader.at_eof():
                writer.write(b"A: b\r\n" if sent.endswith(b"\n") else b"x")
                await writer.drain()
                await asyncio.sleep(0.05)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    config = dataclasses.replace(QUICK, ca_file=str(authority.path))
    server = await asyncio.start_server(drip, "127.0.0.1", 0, ssl=authority.server() if tls else None)
    host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    config = dataclasses.replace(config, tls=frozenset({host} if tls else ()))
    async with server:
        async with RegistryClient(config, StaticCredentials({})) as client:
            began = asyncio.get_running_loop().time()
            async with asyncio.timeout(60):
                with pytest.raises((UnavailableError, SourceError)) as caught:
                    await client.get_manifest(parse_reference(f"{host}/a:1"))
            assert asyncio.get_running_loop().time() - began < 5
            assert "100 headers" in str(caught.value) or "no answer in time" in str(caught.value), caught.value
        await asyncio.gather(*tasks)


async def test_no_other_cas_than_the_systems_and_ours_count(tmp_path: Path) -> None:
    """requests has a bundle of its own: what the node does not trust, it does not get to trust by that."""
    authority = Authority(tmp_path)
    async with SimulatedRegistry(tls=authority.server()) as sim:
        blob = Descriptor("x", sim.add_blob(BLOB), len(BLOB))
        known = dataclasses.replace(QUICK, tls=frozenset({sim.host}))
        async with RegistryClient(known, StaticCredentials({})) as client:
            with pytest.raises(UnavailableError, match="TLS failed"):
                await client.transfer.pull_bytes(sim.host, "a", blob)
            assert sim.seen == []
        async with RegistryClient(dataclasses.replace(known, ca_file=str(authority.path)), StaticCredentials({})) as client:
            assert await client.transfer.pull_bytes(sim.host, "a", blob) == BLOB


async def test_redirects_are_bounded_and_never_lead_from_tls_to_plain_http(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with SimulatedRegistry(tls=authority.server()) as sim, SimulatedRegistry() as plain:
        blob = Descriptor("x", sim.add_blob(BLOB), len(BLOB))
        config = dataclasses.replace(QUICK, tls=frozenset({sim.host}), ca_file=str(authority.path))
        async with RegistryClient(config, StaticCredentials({})) as client:
            sim.script.extend([simulated.redirect(f"/v2/a/blobs/{blob.digest}")] * 50)
            with pytest.raises(SourceError, match="more than 10 times"):
                await client.transfer.pull_bytes(sim.host, "a", blob)
            sim.script.clear()
            sim.script.append(simulated.redirect(f"http://localhost:{plain.host.partition(':')[2]}/x"))
            with pytest.raises(SourceError):
                await client.transfer.pull_bytes(sim.host, "a", blob)
            assert plain.seen == []
