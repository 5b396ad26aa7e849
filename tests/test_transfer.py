"""Whole blobs and manifests through oras, against a registry that misbehaves. (Pushing: integration, with a real one.)"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from pathlib import Path

import pytest
from simulator import registry as simulated
from simulator.credentials import StaticCredentials
from simulator.registry import SimulatedRegistry

from weenv.core.errors import (
    NotFoundInSource,
    SourceError,
    StorageError,
    UnauthorizedError,
    UnavailableError,
    VerificationError,
)
from weenv.registry.client import RegistryClient
from weenv.registry.config import RegistryConfig
from weenv.registry.credentials import Credential
from weenv.registry.manifest import OCI_INDEX, Descriptor
from weenv.registry.reference import parse_reference

BLOB = random.Random(3).randbytes(3_000_000)
QUICK = RegistryConfig(retry_delay=0.01, max_retry_delay=0.05, stall_timeout=1.0, deadline=20.0, attempts=4,
                       slow_after=0.3)  # fmt: skip
INDEX = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}).encode()


def client(sim: SimulatedRegistry, credential: Credential | None = None) -> RegistryClient:
    return RegistryClient(QUICK, StaticCredentials({sim.host: credential} if credential else {}))


def descriptor(sim: SimulatedRegistry, data: bytes = BLOB) -> Descriptor:
    return Descriptor("application/octet-stream", sim.add_blob(data), len(data))


@pytest.mark.parametrize(
    "faults",
    [
        [], [simulated.drop(1_000_000)] * 2, [simulated.status(503), simulated.status(429, {"Retry-After": "0"})],
        [simulated.short(2_000_000)], [simulated.stall(5.0, after=100_000)], [simulated.drip(0.01)],
    ],
)  # fmt: skip
async def test_pull(tmp_path: Path, faults: list[simulated.Fault]) -> None:
    async with SimulatedRegistry() as sim:
        sim.script.extend(faults)
        moved: list[int] = []
        async with client(sim) as c:
            target = descriptor(sim)
            await c.transfer.pull_blob(sim.host, "a/b", target, str(tmp_path / "out"), moved.append)
        assert (tmp_path / "out").read_bytes() == BLOB
        assert sum(moved) == len(BLOB)
        assert len(sim.seen) == len(faults) + 1


async def test_pull_resumes_where_ranges_are_ignored(tmp_path: Path) -> None:
    async with SimulatedRegistry(ignore_range=True) as sim:
        sim.script.append(simulated.drop(1_000_000))
        async with client(sim) as c:
            await c.transfer.pull_blob(sim.host, "a/b", descriptor(sim), str(tmp_path / "out"))
        assert (tmp_path / "out").read_bytes() == BLOB


async def test_wrong_bytes_leave_no_file(tmp_path: Path) -> None:
    async with SimulatedRegistry() as sim:
        sim.script.extend([simulated.wrong_bytes] * 2)
        target = descriptor(sim)
        longer = Descriptor("x", target.digest, len(BLOB) - 1)
        async with client(sim) as c:
            for wanted in (target, longer):
                with pytest.raises(VerificationError):
                    await c.transfer.pull_blob(sim.host, "a/b", wanted, str(tmp_path / "out"))
                assert not (tmp_path / "out").exists()
            with pytest.raises(NotFoundInSource):
                missing = Descriptor("x", "sha256:" + "0" * 64, 5)
                await c.transfer.pull_blob(sim.host, "a/b", missing, str(tmp_path / "out"))
            with pytest.raises(StorageError):
                await c.transfer.pull_blob(sim.host, "a/b", target, str(tmp_path / "no" / "out"))
            assert await c.transfer.pull_bytes(sim.host, "a/b", descriptor(sim, b"{}")) == b"{}"
            with pytest.raises(SourceError, match="larger"):
                await c.transfer.pull_bytes(sim.host, "a/b", target, limit=100)


async def test_pull_gives_up(tmp_path: Path) -> None:
    async with SimulatedRegistry() as sim:
        sim.script.extend([simulated.status(503)] * 10)
        async with client(sim) as c:
            with pytest.raises(UnavailableError, match="503"):
                await c.transfer.pull_blob(sim.host, "a/b", descriptor(sim), str(tmp_path / "out"))
        assert len(sim.seen) == QUICK.attempts


async def test_cancelled_pull_leaves_no_file(tmp_path: Path) -> None:
    async with SimulatedRegistry() as sim:
        sim.script.append(simulated.stall(0.3, after=2_000_000))
        async with client(sim) as c:
            work = asyncio.ensure_future(c.transfer.pull_blob(sim.host, "a/b", descriptor(sim), str(tmp_path / "out")))
            await asyncio.sleep(0.1)
            began = time.monotonic()
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            assert time.monotonic() - began < 20
        assert list(tmp_path.iterdir()) == []


async def test_manifest() -> None:
    async with SimulatedRegistry() as sim:
        digest = sim.add_manifest(INDEX, OCI_INDEX, "v1")
        async with client(sim) as c:
            reference = parse_reference(f"{sim.host}/team/env:v1")
            assert await c.get_manifest(reference) == (INDEX, Descriptor(OCI_INDEX, digest, len(INDEX)))
            assert (await c.get_manifest(reference.with_digest(digest)))[0] == INDEX
            assert "application/vnd.docker.distribution.manifest.list.v2+json" in sim.seen[0].headers["Accept"]
            with pytest.raises(NotFoundInSource, match="MANIFEST_UNKNOWN: no such manifest"):
                await c.get_manifest(parse_reference(f"{sim.host}/team/env:v2"))
            sim.manifests[digest] = (OCI_INDEX, INDEX + b" ")
            with pytest.raises(VerificationError):
                await c.get_manifest(reference.with_digest(digest))
            sim.manifests["v1"] = (OCI_INDEX, b" " * (5 << 20))
            with pytest.raises(SourceError, match="larger"):
                await c.get_manifest(reference)


async def test_authorisation_is_shared_with_ranged_reads(tmp_path: Path) -> None:
    async with SimulatedRegistry(auth="bearer", user=("u", "p"), redirect_blobs=True) as sim:
        target = descriptor(sim)
        sim.add_manifest(INDEX, OCI_INDEX, "v1")
        async with client(sim, Credential("u", "p")) as c:
            await c.get_manifest(parse_reference(f"{sim.host}/a/b:v1"))
            await c.transfer.pull_blob(sim.host, "a/b", target, str(tmp_path / "out"))
            assert await c.has_blob(sim.host, "a/b", target.digest) == len(BLOB)
            assert sim.count("token") == 1
            sim.revoke()
            await c.transfer.pull_blob(sim.host, "a/b", target, str(tmp_path / "again"))
            assert sim.count("token") == 2
        assert all("Authorization" not in s.headers for s in sim.seen if s.server == "storage")
        began = time.monotonic()
        async with client(sim, Credential("u", "bad")) as c:
            with pytest.raises(UnauthorizedError):
                await c.get_manifest(parse_reference(f"{sim.host}/a/b:v1"))
        assert time.monotonic() - began < 60  # oras itself would go on asking for two minutes


async def test_netrc_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login u password p\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    async with SimulatedRegistry() as sim:
        target = descriptor(sim)
        async with client(sim) as c:
            await c.transfer.pull_blob(sim.host, "a/b", target, str(tmp_path / "out"))
            await c.has_blob(sim.host, "a/b", target.digest)
        assert all("Authorization" not in s.headers for s in sim.seen)


@pytest.mark.parametrize("what", ["blob", "manifest"])
@pytest.mark.parametrize("ending", ["deadline", "cancelled"])
async def test_who_drips_bytes_holds_nobody(tmp_path: Path, what: str, ending: str) -> None:
    """A byte now and then keeps every socket timeout from running out."""
    begun, gone = asyncio.Event(), asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n")
        begun.set()
        try:
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        except ConnectionError:
            writer.close()
            gone.set()

    patient = 0.5 if ending == "deadline" else 600.0
    config = dataclasses.replace(QUICK, deadline=patient, min_rate=100_000_000, slow_after=600.0)
    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    async with server, RegistryClient(config, StaticCredentials({})) as c:
        host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        if what == "blob":
            wanted = Descriptor("x", "sha256:" + "0" * 64, 900_000)
            work = asyncio.ensure_future(c.transfer.pull_blob(host, "a/b", wanted, str(tmp_path / "out")))
        else:
            work = asyncio.ensure_future(c.transfer.pull_manifest(parse_reference(f"{host}/a/b:1")))  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            if ending == "deadline":
                with pytest.raises(UnavailableError, match="too slow"):
                    await work
            else:
                await begun.wait()
                work.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await work
            await c.close()
            await gone.wait()
    assert list(tmp_path.iterdir()) == []
