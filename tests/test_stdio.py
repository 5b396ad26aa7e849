"""Streams over FIFOs, with a thread in the shim's place."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from weenv.environment.stdio import Collected, Streams, Written


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


async def ended(streams: Streams) -> None:
    await asyncio.wait_for(asyncio.gather(*(reader.ended for reader in streams.readers)), 60)


async def test_everything_arrives_and_the_files_go(tmp_path: Path) -> None:
    out, err = Collected(1 << 30), Collected(1 << 30)
    streams = Streams(str(tmp_path / "s"), stdout=out, stderr=err)
    data = os.urandom(5_000_000)

    def shim() -> None:
        # As a shim does: a writing and a reading end of each.
        for path, content in ((streams.stdio.stdout, data), (streams.stdio.stderr, b"err")):
            with open(path, "wb") as writer, open(path, "rb"):
                writer.write(content)

    thread = in_thread(shim)
    assert not streams.readers[0].ended.done(), "no end before there was a beginning"
    await ended(streams)
    thread.join()
    assert out.bytes() == data and err.bytes() == b"err"
    assert await streams.drain()
    streams.close()
    assert not (tmp_path / "s").exists()


async def test_memory_is_bounded_and_the_writer_never_blocks(tmp_path: Path) -> None:
    out = Collected(100)
    streams = Streams(str(tmp_path / "s"), stdout=out, stderr=out)

    def shim() -> None:
        with open(streams.stdio.stdout, "wb") as writer:
            writer.write(b"a" * 3_000_000)
        open(streams.stdio.stderr, "wb").close()

    thread = in_thread(shim)
    await ended(streams)
    thread.join()
    assert (out.bytes(), out.dropped) == (b"a" * 100, 2_999_900)
    streams.close()


async def test_a_stream_that_a_child_holds_is_not_waited_for(tmp_path: Path) -> None:
    out = Collected(1000)
    streams = Streams(str(tmp_path / "s"), stdout=out, stderr=out)
    ends = [os.open(path, os.O_WRONLY) for path in (streams.stdio.stdout, streams.stdio.stderr)]
    os.write(ends[0], b"said")
    begin = asyncio.get_running_loop().time()

    async def held() -> bool:
        return True

    assert not await streams.drain(held=held, quiet=0.05, at_most=1)
    assert asyncio.get_running_loop().time() - begin < 0.9
    assert out.bytes() == b"said"
    streams.close()
    for fd in ends:
        os.close(fd)


async def test_one_that_never_stops_talking_is_cut_off(tmp_path: Path) -> None:
    out = Collected(10)
    streams = Streams(str(tmp_path / "s"), stdout=out, stderr=out)
    fd = os.open(streams.stdio.stdout, os.O_WRONLY | os.O_NONBLOCK)
    talking = True

    async def talk() -> None:
        while talking:
            os.write(fd, b"x")
            await asyncio.sleep(0.005)

    task = asyncio.ensure_future(talk())
    assert not await streams.drain(quiet=0.05, at_most=0.3)
    talking = False
    await task
    streams.close()
    os.close(fd)


async def test_input_waits_for_its_reader_and_never_breaks(tmp_path: Path) -> None:
    streams = Streams(str(tmp_path / "s"), stdout=lambda _: None, stderr=lambda _: None, stdin=True)
    assert streams.writer is not None
    data = os.urandom(1_000_000)
    got = bytearray()

    def shim() -> None:
        with open(streams.stdio.stdin, "rb", buffering=0) as reader:
            while len(got) < len(data):
                got.extend(reader.read(70_000))

    await asyncio.sleep(0)
    thread = in_thread(shim)
    await asyncio.wait_for(streams.writer.write(data), 60)
    thread.join()
    assert got == data
    await asyncio.wait_for(streams.writer.write(data), 60)  # nobody reads any more
    await streams.writer.end()
    streams.close()


async def test_input_that_ends_before_the_shim_has_come_is_not_lost(tmp_path: Path) -> None:
    streams = Streams(str(tmp_path / "s"), stdout=lambda _: None, stderr=lambda _: None, stdin=True)
    assert streams.writer is not None
    writer = streams.writer

    async def feed() -> None:
        await writer.write(b"early")
        await writer.end()

    feeding = asyncio.ensure_future(feed())
    await asyncio.sleep(0.05)
    assert not feeding.done()

    def shim() -> bytes:
        with open(streams.stdio.stdin, "rb") as reader:
            return reader.read()

    assert await asyncio.wait_for(asyncio.to_thread(shim), 60) == b"early"
    await feeding
    streams.close()


async def test_a_reader_that_takes_nothing_keeps_nobody_waiting(tmp_path: Path) -> None:
    far, near = os.pipe()
    streams = Streams(str(tmp_path / "s"), stdout=Written(near), stderr=lambda _: None)
    data = os.urandom(1_000_000)

    def shim() -> None:
        open(streams.stdio.stderr, "wb").close()
        with open(streams.stdio.stdout, "wb") as writer:
            writer.write(data)

    thread = in_thread(shim)
    await streams.readers[1].ended
    while streams.readers[0].blocked is None:
        await asyncio.sleep(0.001)
    assert not await streams.drain(quiet=0.02, at_most=0.1, patient=lambda: False)
    draining = asyncio.ensure_future(streams.drain(quiet=0.02, at_most=0.1))
    await asyncio.sleep(0.3)
    assert not draining.done(), "what a slow reader has not taken yet is not given up"
    got = bytearray()
    while len(got) < len(data):
        got += await asyncio.to_thread(os.read, far, 1 << 16)
    assert got == data and await draining
    thread.join()
    streams.close()
    os.close(far)
    os.close(near)


async def test_a_reader_that_has_gone_is_told_of_at_once(tmp_path: Path) -> None:
    far, near = os.pipe()
    streams = Streams(str(tmp_path / "s"), stdout=Written(near), stderr=lambda _: None)
    writer = os.open(streams.stdio.stdout, os.O_WRONLY)
    os.set_blocking(writer, False)

    async def forever() -> None:
        await asyncio.get_running_loop().create_future()

    os.write(writer, bytes(65536))
    while streams.readers[0].read < 65536 or (os.write(writer, b"x") and streams.readers[0].blocked is None):
        await asyncio.sleep(0.001)
    os.close(far)
    assert await asyncio.wait_for(streams.unless_failed(forever()), 60) is None
    with pytest.raises(BrokenPipeError):
        streams.raise_error()
    streams.close()
    os.close(writer)
    os.close(near)


async def test_a_sink_that_fails_is_reported_and_the_process_goes_on(tmp_path: Path) -> None:
    def sink(_: bytes) -> None:
        raise BrokenPipeError("nobody listens")

    streams = Streams(str(tmp_path / "s"), stdout=sink, stderr=sink, terminal=True)
    assert streams.stdio.stderr == "" and streams.stdio.terminal

    def shim() -> None:
        with open(streams.stdio.stdout, "wb") as writer:
            writer.write(bytes(1_000_000))

    thread = in_thread(shim)
    await ended(streams)
    thread.join()
    assert isinstance(streams.readers[0].error, BrokenPipeError)
    streams.close()


async def test_a_directory_in_use_leaves_no_descriptor(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    first = Streams(str(tmp_path / "s"), stdout=lambda _: None, stderr=lambda _: None)
    os.unlink(first.stdio.stdout)
    with pytest.raises(FileExistsError):
        Streams(str(tmp_path / "s"), stdout=lambda _: None, stderr=lambda _: None)
    first.close()
    assert set(os.listdir("/proc/self/fd")) <= before
