"""Ranged reads against a registry that misbehaves in every way known from users' reports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest
from simulator import registry as simulated
from simulator.credentials import StaticCredentials
from simulator.registry import SimulatedRegistry

from weenv.core.errors import NotFoundInSource, SourceError, UnauthorizedError, UnavailableError, VerificationError
from weenv.registry.client import RegistryClient
from weenv.registry.config import RegistryConfig
from weenv.registry.policy import Pace, parse_retry_after, retry_delay
from weenv.registry.ranged import RangesIgnored
from weenv.registry.source import FileSource, LayoutSource, RegistrySource, open_source, read_checked

BLOB = random.Random(2).randbytes(300_000)
QUICK = RegistryConfig(
    retry_delay=0.01, max_retry_delay=0.05, stall_timeout=0.5, deadline=20.0, attempts=4, slow_after=0.3, connect_timeout=1.0
)


@dataclass
class Rig:
    sim: SimulatedRegistry
    client: RegistryClient
    blob: RegistrySource


def rig(sim: SimulatedRegistry, config: RegistryConfig = QUICK, data: bytes = BLOB) -> Rig:
    client = RegistryClient(config, StaticCredentials({}))
    return Rig(sim, client, RegistrySource(client, sim.host, "team/env", sim.add_blob(data), len(data)))


async def test_ranges_on_one_connection() -> None:
    async with SimulatedRegistry() as sim:
        r = rig(sim)
        async with r.client:
            assert await r.blob.read(0, len(BLOB)) == BLOB
            for offset, length in ((0, 1), (5, 100_000), (len(BLOB) - 1, 1), (299_000, 1000), (7, 0)):
                assert await r.blob.read(offset, length) == BLOB[offset : offset + length]
            assert r.blob.ranges is True
            assert r.client._session is not None
            pool = r.client._session.connector
            assert pool is not None and sum(len(v) for v in pool._conns.values()) == 1  # type: ignore[attr-defined]
            many = await asyncio.gather(*(r.blob.read(n * 1000, 1000) for n in range(40)))
            assert b"".join(many) == BLOB[:40_000]
        assert r.client.counters.retries == 0


@pytest.mark.parametrize(("offset", "length"), [(-1, 5), (0, len(BLOB) + 1), (len(BLOB), 1), (5, -1)])
async def test_reads_beyond_the_blob_are_refused(offset: int, length: int) -> None:
    async with SimulatedRegistry() as sim:
        r = rig(sim)
        async with r.client:
            with pytest.raises(SourceError, match="beyond"):
                await r.blob.read(offset, length)
        assert not sim.seen


@pytest.mark.parametrize(
    "fault",
    [
        simulated.drop(0), simulated.drop(70_000), simulated.drop_at_once, simulated.short(70_000), simulated.short(1),
        simulated.status(500), simulated.status(503), simulated.status(429, {"Retry-After": "0"}), simulated.stall(3.0),
        simulated.stall(3.0, after=70_000), simulated.wrong_range, simulated.wrong_total, simulated.multipart,
        simulated.drip(0.01), simulated.drip(0.6),
    ],
)  # fmt: skip
async def test_one_failure_is_not_seen_by_the_reader(fault: simulated.Fault) -> None:
    async with SimulatedRegistry() as sim:
        sim.script.append(fault)
        r = rig(sim)
        async with r.client:
            assert await r.blob.read(1000, 150_000) == BLOB[1000:151_000]
        assert len(sim.seen) == 2


@pytest.mark.parametrize("fault", [simulated.chunked, simulated.too_long(5000)])
async def test_odd_and_right_all_the_same(fault: simulated.Fault) -> None:
    """No Content-Length; more bytes than were asked for, which are left alone."""
    async with SimulatedRegistry() as sim:
        r = rig(sim)
        async with r.client:
            for _ in range(3):
                sim.script.append(fault)
                assert await r.blob.read(1000, 150_000) == BLOB[1000:151_000]
        assert len(sim.seen) == 3


async def test_a_broken_stream_is_resumed_where_it_stopped() -> None:
    async with SimulatedRegistry() as sim:
        sim.script.extend([simulated.drop(50_000)] * 5)  # more than ``attempts``, but each makes progress
        r = rig(sim)
        async with r.client, aclosing(r.blob.stream(0, len(BLOB))) as chunks:
            assert b"".join([chunk async for chunk in chunks]) == BLOB
        starts = [int(s.headers["Range"][6:].split("-")[0]) for s in sim.seen]
        assert starts == [0, 50_000, 100_000, 150_000, 200_000, 250_000]


async def test_retries_end() -> None:
    async with SimulatedRegistry() as sim:
        sim.script.extend([simulated.status(503)] * 10)
        r = rig(sim)
        async with r.client:
            with pytest.raises(UnavailableError, match="status 503"):
                await r.blob.read(0, 10)
        assert len(sim.seen) == QUICK.attempts


async def test_a_long_retry_after_is_an_error_that_says_so() -> None:
    async with SimulatedRegistry() as sim:
        sim.script.append(simulated.status(429, {"Retry-After": "3600"}))
        r = rig(sim)
        async with r.client:
            with pytest.raises(UnavailableError) as caught:
                await r.blob.read(0, 10)
        assert caught.value.retry_after == 3600
        assert len(sim.seen) == 1


async def test_retry_after_is_waited_for() -> None:
    async with SimulatedRegistry() as sim:
        sim.script.append(simulated.status(429, {"Retry-After": "1"}))
        r = rig(sim)
        loop = asyncio.get_running_loop()
        async with r.client:
            began = loop.time()
            assert await r.blob.read(0, 10) == BLOB[:10]
            assert loop.time() - began >= 1.0


async def test_the_deadline_holds_against_a_slow_server() -> None:
    async with SimulatedRegistry() as sim:
        sim.script.extend([simulated.stall(0.4, after=10)] * 20)
        r = rig(sim, RegistryConfig(retry_delay=0.01, stall_timeout=0.1, attempts=1000))
        loop = asyncio.get_running_loop()
        async with r.client:
            began = loop.time()
            with pytest.raises(UnavailableError):
                await r.blob.read(0, 1000, deadline=0.5)
            assert loop.time() - began < 2.0


async def test_nobody_listens() -> None:
    async with SimulatedRegistry() as sim:
        r = rig(sim)
        host = sim.host
    async with r.client:
        with pytest.raises(UnavailableError, match=host):
            await r.blob.read(0, 10)


@pytest.mark.parametrize("fault", [simulated.wrong_range, simulated.encoded])
async def test_an_answer_to_another_question_is_asked_again_and_then_an_error(fault: simulated.Fault) -> None:
    async with SimulatedRegistry() as sim:
        r = rig(sim)
        async with r.client:
            sim.script.append(fault)
            assert await r.blob.read(1000, 10) == BLOB[1000:1010]
            assert len(sim.seen) == 2
            sim.script.extend([fault] * QUICK.attempts)
            with pytest.raises(SourceError):
                await r.blob.read(1000, 10)
            assert not sim.script


async def test_no_list_of_ranges_is_ever_asked_for() -> None:
    """Servers may refuse several ranges in one request, or answer with parts: nobody gets to see one."""
    async with SimulatedRegistry(redirect_blobs=True) as sim:
        r = rig(sim)
        async with r.client:
            await asyncio.gather(*(r.blob.read(n * 20_000, 1000) for n in range(15)))
        assert all("," not in seen.headers["Range"] for seen in sim.seen)


async def test_range_ignored_is_read_once_for_all_who_go_forward() -> None:
    """The answer is the whole blob: it is kept, and read on from where it is."""
    async with SimulatedRegistry(ignore_range=True) as sim:
        r = rig(sim)
        async with r.client:
            for start in range(0, 290_000, 10_000):
                assert await r.blob.read(start, 5_000) == BLOB[start : start + 5_000]
            assert len(sim.seen) == 1
            assert r.blob.ranges is False and r.client.counters.range_ignored == 1
            assert await r.blob.read(0, len(BLOB)) == BLOB  # back to the beginning: that takes another
            assert len(sim.seen) == 2
            assert await r.blob.read(50, 10) == BLOB[50:60]
            await r.blob.close()
        r = rig(sim, RegistryConfig(max_skip=1000))
        async with r.client:
            assert await r.blob.read(1000, 10) == BLOB[1000:1010]
            with pytest.raises(SourceError, match="ignores Range"):
                await RegistrySource(r.client, sim.host, "team/env", r.blob.digest, len(BLOB)).read(1001, 10)


async def test_a_kept_answer_goes_with_its_client() -> None:
    async with SimulatedRegistry(ignore_range=True) as sim:
        r = rig(sim)
        async with r.client:
            assert await r.blob.read(1000, 10) == BLOB[1000:1010]
            pool = r.client.session.connector
            assert pool is not None and len(pool._acquired) == 1  # type: ignore[attr-defined]
        assert pool.closed and not pool._acquired  # type: ignore[attr-defined]
        await r.blob.close()


async def test_who_paces_himself_is_told_that_ranges_are_ignored_and_nothing_is_lost() -> None:
    async with SimulatedRegistry(ignore_range=True) as sim:
        client = RegistryClient(QUICK, StaticCredentials({}))
        source = RegistrySource(client, sim.host, "team/env", sim.add_blob(BLOB), len(BLOB), paced=True)
        async with client:
            with pytest.raises(RangesIgnored) as caught:
                async with aclosing(source.stream(100_000, 100)) as chunks:
                    async for _ in chunks:
                        pass
            async with aclosing(caught.value.source.whole(200_000)) as chunks:
                assert b"".join([chunk async for chunk in chunks]) == BLOB[:200_000]
            assert len(sim.seen) == 1, "it went on with the answer that was there"
            assert await source.read(250_000, 10) == BLOB[250_000:250_010]
            assert len(sim.seen) == 1
            await source.close()


async def test_who_paces_himself_waits_himself() -> None:
    async with SimulatedRegistry() as sim:
        client = RegistryClient(QUICK, StaticCredentials({}))
        source = RegistrySource(client, sim.host, "team/env", sim.add_blob(BLOB), len(BLOB), paced=True)
        sim.script.append(simulated.status(429, {"Retry-After": "7"}))
        loop = asyncio.get_running_loop()
        async with client:
            began = loop.time()
            for _ in range(3):  # the second and third do not even ask
                with pytest.raises(UnavailableError) as caught:
                    async with aclosing(source.stream(0, 10)) as chunks:
                        async for _chunk in chunks:
                            pass
                assert caught.value.retry_after is not None and 5 < caught.value.retry_after <= 8
            assert loop.time() - began < 1.0
            assert len(sim.seen) == 1


async def test_wrong_bytes_are_had_anew_and_the_redirect_resolved_again() -> None:
    async with SimulatedRegistry(redirect_blobs=True) as sim:
        sim.storage_script.append(simulated.wrong_bytes)
        r = rig(sim)

        def check(data: bytes) -> None:
            if data != BLOB[100:200]:
                raise VerificationError("wrong bytes")

        async with r.client:
            assert await read_checked(r.blob, 100, 100, check) == BLOB[100:200]
            assert sim.count("registry") == 2
            sim.storage_script.extend([simulated.wrong_bytes] * 10)
            with pytest.raises(VerificationError):
                await read_checked(r.blob, 100, 100, check)
            assert len(sim.storage_script) > 6, "it is not asked for ever"


@pytest.mark.parametrize("what", ["header", "status line", "nothing"])
async def test_a_header_that_drips_is_given_up_in_time(what: str) -> None:
    """A byte now and then keeps every socket timeout from running out; the next try has another server."""
    answers = [b"HTTP/1.1 206 Partial Content\r\nX: ", b"HTTP", b""][["header", "status line", "nothing"].index(what)]
    good = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-9/300000\r\nContent-Length: 10\r\n\r\n" + BLOB[:10]
    count = 0
    tasks: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        tasks.append(asyncio.current_task())  # type: ignore[arg-type]
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(good if count > 1 else answers)
            while count == 1 and not reader.at_eof():
                writer.write(b"x" if answers else b"")
                await writer.drain()
                await asyncio.sleep(0.05)
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        async with RegistryClient(QUICK, StaticCredentials({})) as client:
            host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            source = RegistrySource(client, host, "a", "sha256:" + "0" * 64, 300_000)
            async with asyncio.timeout(60):
                assert await source.read(0, 10) == BLOB[:10]
        await asyncio.gather(*tasks)


async def test_missing_blob_and_short_blob() -> None:
    async with SimulatedRegistry() as sim:
        r = rig(sim)
        missing = RegistrySource(r.client, sim.host, "team/env", "sha256:" + "0" * 64, 10)
        longer = RegistrySource(r.client, sim.host, "team/env", r.blob.digest, len(BLOB) + 100)
        async with r.client:
            with pytest.raises(NotFoundInSource):
                await missing.read(0, 10)
            with pytest.raises(NotFoundInSource, match="fewer bytes"):
                await longer.read(len(BLOB) + 50, 10)
            assert await r.client.has_blob(sim.host, "team/env", missing.digest) is None


# -- redirects ------------------------------------------------------------------------------------------------------


async def test_one_redirect_is_remembered_and_carries_no_credentials() -> None:
    async with SimulatedRegistry(redirect_blobs=True, auth="bearer") as sim:
        r = rig(sim)
        async with r.client:
            for n in range(5):
                assert await r.blob.read(n * 10, 10) == BLOB[n * 10 : n * 10 + 10]
        assert sim.count("registry") == 2  # the refusal and the redirect
        assert sim.count("storage") == 5
        assert all("Authorization" not in s.headers for s in sim.seen if s.server == "storage")
        assert any("Authorization" in s.headers for s in sim.seen if s.server == "registry")


async def test_expired_url_is_resolved_once_more() -> None:
    async with SimulatedRegistry(redirect_blobs=True) as sim:
        r = rig(sim)
        async with r.client:
            await r.blob.read(0, 10)
            sim.expire_urls()
            # Many readers meet the expired URL at once; one of them asks the registry.
            parts = await asyncio.gather(*(r.blob.read(n * 10, 10) for n in range(10)))
            assert b"".join(parts) == BLOB[:100]
        assert sim.count("registry") == 2


async def test_urls_that_work_once_only() -> None:
    async with SimulatedRegistry(redirect_blobs=True, url_uses=1) as sim:
        r = rig(sim)
        async with r.client:
            for n in range(5):
                assert await r.blob.read(n * 10, 10) == BLOB[n * 10 : n * 10 + 10]
        assert sim.count("registry") == 5


async def test_storage_that_always_refuses_ends() -> None:
    async with SimulatedRegistry(redirect_blobs=True, url_uses=0) as sim:
        r = rig(sim)
        async with r.client:
            with pytest.raises(UnauthorizedError):
                await r.blob.read(0, 10)
        assert len(sim.seen) <= 4


async def test_storage_faults_are_retried() -> None:
    async with SimulatedRegistry(redirect_blobs=True) as sim:
        sim.storage_script.extend([simulated.drop(10), simulated.status(503), simulated.status(429, {"Retry-After": "0"})])
        r = rig(sim)
        async with r.client:
            assert await r.blob.read(0, 1000) == BLOB[:1000]


@pytest.mark.parametrize("location", ["", "ftp://h/x", "javascript:0", "http://[x", "http://h:99999/", "https://h:0/"])
async def test_redirect_to_nowhere(location: str) -> None:
    async with SimulatedRegistry() as sim:
        sim.script.append(simulated.redirect(location))
        r = rig(sim)
        async with r.client:
            with pytest.raises(SourceError, match="nowhere"):
                await r.blob.read(0, 10)


async def test_redirect_loop_ends() -> None:
    async with SimulatedRegistry() as sim:
        r = rig(sim)
        sim.script.extend([simulated.redirect(f"/v2/team/env/blobs/{r.blob.digest}")] * 50)
        async with r.client:
            with pytest.raises(SourceError, match="more than 10 times"):
                await r.blob.read(0, 10)
        assert len(sim.seen) == 11


async def test_everything_expires_all_the_time() -> None:
    """Tokens and URLs that live a moment, every fifth answer a 429: no read fails (as some registries are in practice)."""
    async with SimulatedRegistry(redirect_blobs=True, auth="bearer", token_lifetime=0.3, url_uses=7) as sim:
        r = rig(sim)
        loop = asyncio.get_running_loop()
        async with r.client:
            end, reads = loop.time() + 2.0, 0
            while loop.time() < end or reads < 100:
                if reads % 5 == 0:
                    sim.storage_script.append(simulated.status(429, {"Retry-After": "0"}))
                if reads % 13 == 0:
                    sim.expire_urls()
                offset = reads * 1009 % 200_000
                assert await r.blob.read(offset, 3000) == BLOB[offset : offset + 3000]
                reads += 1
        assert sim.count("token") >= 3


# -- cancellation and leaks -----------------------------------------------------------------------------------------


async def test_cancelled_and_abandoned_reads_leave_nothing_behind() -> None:
    async with SimulatedRegistry() as sim:
        sim.script.append(simulated.stall(30.0, after=100))
        r = rig(sim, RegistryConfig(stall_timeout=30.0))
        async with r.client:
            task = asyncio.ensure_future(r.blob.read(0, 1000))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with aclosing(r.blob.stream(0, len(BLOB))) as chunks:
                async for _ in chunks:
                    break
            assert await r.blob.read(0, 10) == BLOB[:10]
            assert r.client._session is not None
            connector = r.client._session.connector
            assert connector is not None and not connector._acquired  # type: ignore[attr-defined]


async def test_no_secrets_in_errors(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with SimulatedRegistry(redirect_blobs=True) as sim:
        sim.storage_script.extend([simulated.status(503)] * 10)
        r = rig(sim)
        async with r.client:
            with pytest.raises(UnavailableError) as caught:
                await r.blob.read(0, 10)
        signed = next(s.path for s in sim.seen if s.server == "storage")
        secret = signed.partition("sig=")[2]
        assert secret and secret not in str(caught.value)
        assert not [record for record in caplog.records if record.name.startswith("weenv") and secret in str(vars(record))]


# -- decisions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), ("", None), ("5", 5.0), ("-5", None), ("soon", None), ("Thu, 01 Jan 1970 00:01:00 GMT", 30.0),
     ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0), ("9" * 400, 999_999_999.0)],
)  # fmt: skip
def test_retry_after(value: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value, now=30.0) == seconds


def test_delays_grow_and_are_bounded() -> None:
    config = RegistryConfig(attempts=10, retry_delay=1.0, max_retry_delay=4.0)
    assert retry_delay(config, 1) == 0.0
    for failures, low, high in ((2, 0.5, 1.0), (3, 1.0, 2.0), (4, 2.0, 4.0), (9, 2.0, 4.0)):
        delay = retry_delay(config, failures)
        assert delay is not None and low <= delay <= high
    assert retry_delay(config, 10) is None
    assert retry_delay(config, 1, retry_after=61.0) is None


def test_an_answer_is_left_when_it_is_too_slow_and_only_then() -> None:
    config = RegistryConfig(min_rate=80_000, slow_after=5.0)  # 10 000 a second are enough
    pace = Pace(config)
    assert not pace.add(10, 4.9) and pace.add(10, 0.2)
    assert not any(pace.add(10_000, 1.0) for _ in range(100))
    assert not pace.add(1, 4.9) and not pace.add(100_000, 0.2), "the whole time counts, not a moment"
    assert [pace.add(1000, 1.0) for _ in range(10)] == [False, False, False, False, True] * 2


# -- local sources --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    kind: str
    host: str = ""
    repository: str = ""
    path: str = ""


async def test_local_sources(tmp_path: Path) -> None:
    digest = "sha256:" + "cd" * 32
    (tmp_path / "blobs/sha256").mkdir(parents=True)
    path = tmp_path / "blobs/sha256" / digest[7:]
    path.write_bytes(BLOB)
    client = RegistryClient(QUICK)
    for place in (Place("layout", path=str(tmp_path)), Place("file", path=str(path))):
        source = open_source(client, place, digest, len(BLOB))
        assert source.size == len(BLOB)
        assert await source.read(10, 20) == BLOB[10:30]
        async with aclosing(source.stream(5, len(BLOB) - 5)) as chunks:
            assert b"".join([chunk async for chunk in chunks]) == BLOB[5:]
        with pytest.raises(SourceError, match="beyond"):
            await source.read(len(BLOB), 1)
        await source.close()
        await source.close()
        with pytest.raises(SourceError, match="bytes"):
            open_source(client, place, digest, len(BLOB) + 1)
    registry = open_source(client, Place("registry", "127.0.0.1:1", "a"), digest, 5)
    assert isinstance(registry, RegistrySource)
    with pytest.raises(SourceError, match="unknown kind"):
        open_source(client, Place("ftp"), digest, 5)
    with pytest.raises(NotFoundInSource):
        LayoutSource(str(tmp_path), "sha256:" + "00" * 32)
    truncated = FileSource(str(path))
    os.truncate(path, 100)
    with pytest.raises(SourceError, match="changed while in use"):
        await truncated.read(0, 200)
    await truncated.close()
