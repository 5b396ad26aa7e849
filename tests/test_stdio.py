"""Streams over FIFOs, with a thread in the shim's place."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from weenv.environment.stdio import Collected, Streams


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


async def ended(streams: Streams) -> None:
    await asyncio.wait_for(asyncio.gather(*(reader.ended for reader in streams.readers)), 10)


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
    held = [os.open(path, os.O_WRONLY) for path in (streams.stdio.stdout, streams.stdio.stderr)]
    os.write(held[0], b"said")
    begin = asyncio.get_running_loop().time()
    assert not await streams.drain(quiet=0.05, at_most=1)
    assert asyncio.get_running_loop().time() - begin < 0.9
    assert out.bytes() == b"said"
    streams.close()
    for fd in held:
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
    await asyncio.wait_for(streams.writer.write(data), 10)
    thread.join()
    assert got == data
    feeding = asyncio.ensure_future(streams.writer.write(data))  # nobody reads any more
    await asyncio.sleep(0.05)
    assert not feeding.done()
    feeding.cancel()
    await asyncio.gather(feeding, return_exceptions=True)
    streams.close()


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
    before = len(os.listdir("/proc/self/fd"))
    first = Streams(str(tmp_path / "s"), stdout=lambda _: None, stderr=lambda _: None)
    os.unlink(first.stdio.stdout)
    with pytest.raises(FileExistsError):
        Streams(str(tmp_path / "s"), stdout=lambda _: None, stderr=lambda _: None)
    first.close()
    assert len(os.listdir("/proc/self/fd")) == before
