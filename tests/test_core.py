"""core/: digests, atomic files, one flight per key, locks, background tasks, logs, protobuf tables."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os

import pytest
from google.protobuf import descriptor_pb2

from weenv.core import digest
from weenv.core.aio import Background, SingleFlight, gather_all
from weenv.core.atomic import write_atomic
from weenv.core.errors import BadReference, FormatError, VerificationError, WeenvError
from weenv.core.log import JsonFormatter, TextFormatter
from weenv.core.proto import Schema


def test_digest_of_known_value() -> None:
    # FIPS 180-2, appendix B.1
    assert digest.sha256(b"abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    "bad", ["", "sha256:", "sha512:" + "0" * 64, "sha256:" + "A" * 64, "sha256:" + "0" * 64 + "\n", "../x"]
)
def test_digest_refuses(bad: str) -> None:
    with pytest.raises(BadReference):
        digest.hex_of(bad)


def test_verify_names_what() -> None:
    digest.verify(b"abc", digest.sha256(b"abc"), "frame 1")
    with pytest.raises(VerificationError, match="frame 1"):
        digest.verify(b"abd", digest.sha256(b"abc"), "frame 1")


def test_chain_id_follows_the_image_spec() -> None:
    first, second = digest.sha256(b"a"), digest.sha256(b"b")
    assert digest.chain_id([first]) == first
    assert digest.chain_id([first, second]) == "sha256:" + hashlib.sha256(f"{first} {second}".encode()).hexdigest()


def test_write_atomic_replaces_and_cleans_up(tmp_path: object) -> None:
    path = f"{tmp_path}/file"
    write_atomic(path, b"one")
    write_atomic(path, b"two", mode=0o644, durable=False)
    with open(path, "rb") as file:
        assert file.read() == b"two"
    assert os.stat(path).st_mode & 0o777 == 0o644
    os.mkdir(f"{tmp_path}/directory")
    with pytest.raises(OSError, match="directory"):
        write_atomic(f"{tmp_path}/directory", b"three")
    assert sorted(os.listdir(str(tmp_path))) == ["directory", "file"]


async def test_single_flight_shares_result_and_error() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    calls = 0

    async def work() -> int:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.01)
        return calls

    assert await asyncio.gather(*(flights.do("k", work) for _ in range(10))) == [1] * 10
    assert await flights.do("k", work) == 2

    async def fail() -> int:
        await asyncio.sleep(0.01)
        raise WeenvError("no")

    results = await asyncio.gather(*(flights.do("k", fail) for _ in range(3)), return_exceptions=True)
    assert [str(r) for r in results] == ["no"] * 3
    assert len(flights) == 0


async def test_single_flight_survives_one_cancelled_waiter_and_ends_with_the_last() -> None:
    flights: SingleFlight[str, str] = SingleFlight()
    cancelled = asyncio.Event()
    release = asyncio.Event()

    async def work() -> str:
        try:
            await release.wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return "done"

    one = asyncio.create_task(flights.do("k", work))
    two = asyncio.create_task(flights.do("k", work))
    await asyncio.sleep(0)
    one.cancel()
    await asyncio.sleep(0)
    release.set()
    assert await two == "done"
    release.clear()
    three = asyncio.create_task(flights.do("k", work))
    await asyncio.sleep(0.01)
    three.cancel()
    await asyncio.sleep(0)
    release.set()  # whoever comes now starts anew instead of inheriting the cancellation
    assert await flights.do("k", work) == "done"
    await asyncio.wait_for(cancelled.wait(), 1)


async def test_background_logs_failures_and_closes(caplog: pytest.LogCaptureFixture) -> None:
    background = Background()

    async def fail() -> None:
        raise ValueError("broken")

    background.spawn(fail(), "bad one")
    endless = background.spawn(asyncio.sleep(100), "endless")
    await asyncio.sleep(0.01)
    await background.close()
    assert endless.cancelled()
    assert len(background) == 0
    assert "bad one failed: broken" in caplog.text


async def test_gather_all_cancels_the_rest() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise WeenvError("first")

    endless = asyncio.ensure_future(asyncio.sleep(100))
    with pytest.raises(WeenvError, match="first"):
        await gather_all(fail(), endless)
    assert endless.cancelled()


def test_logs_are_one_line_and_carry_fields() -> None:
    record = logging.LogRecord("weenv.x", logging.WARNING, "f", 1, "not\nlazy", None, None)
    record.reason = "no annotation"
    line = TextFormatter().format(record)
    assert "\n" not in line
    assert line.endswith('WARNING weenv.x: not\\nlazy reason="no annotation"')
    assert json.loads(JsonFormatter().format(record))["reason"] == "no annotation"
    record.key = "\x1b[2J\x9b1m\u2028ERROR"
    assert TextFormatter().format(record).isprintable()


def test_format_error_names_the_member() -> None:
    assert str(FormatError("truncated", member="usr/bin/x")) == "usr/bin/x: truncated"


def test_schema_matches_protobufs_own_wire_form() -> None:
    # descriptor.proto is a published file: FieldDescriptorProto.name = 1, .number = 3; FileDescriptorProto.dependency = 3
    schema = Schema(
        "t.v1",
        {
            "Field": {"name": (1, "string"), "number": (3, "int32")},
            "Message": {"name": (1, "string"), "field": (2, "repeated Field")},
            "Labels": {"labels": (1, "map<string,string>"), "at": (2, ".google.protobuf.Timestamp")},
        },
    )
    theirs = descriptor_pb2.DescriptorProto(name="m")
    theirs.field.add(name="f", number=7)
    ours = schema["Message"](name="m", field=[schema["Field"](name="f", number=7)])
    assert ours.SerializeToString() == theirs.SerializeToString()
    labels = schema["Labels"](labels={"k": "v"})
    labels.at.seconds = 5
    assert labels.SerializeToString() == b"\n\x06\n\x01k\x12\x01v\x12\x02\x08\x05"
    again = schema["Labels"].FromString(labels.SerializeToString())
    assert dict(again.labels) == {"k": "v"}
