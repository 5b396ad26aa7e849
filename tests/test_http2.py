"""The built-in transport: HPACK against the RFC's own examples, the connection against hostile bytes, and against grpcio."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count, repeat

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.plugin.snapshotter.http2 import connection as h2
from weenv.plugin.snapshotter.http2.connection import Broken, Cancelled, Connection, Request
from weenv.plugin.snapshotter.http2.hpack import MAX_HEADERS, Decoder, HpackError, huffman_decode, literal
from weenv.plugin.snapshotter.http2.server import Http2Server, Refused

# -- HPACK: RFC 7541, appendix C


def test_the_examples_of_the_rfc() -> None:
    plain, huffman = Decoder(), Decoder()
    examples = [
        ("828684410f7777772e6578616d706c652e636f6d", "828684418cf1e3c2e5f23a6ba0ab90f4ff", []),
        ("828684be58086e6f2d6361636865", "828684be5886a8eb10649cbf", [(b"cache-control", b"no-cache")]),
        (
            "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
            "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
            [(b"custom-key", b"custom-value")],
        ),
    ]
    for number, (first, second, more) in enumerate(examples):
        scheme, path = (b"https", b"/index.html") if number == 2 else (b"http", b"/")
        wanted = [(b":method", b"GET"), (b":scheme", scheme), (b":path", path), (b":authority", b"www.example.com"), *more]
        assert plain.decode(bytes.fromhex(first)) == wanted  # C.3
        assert huffman.decode(bytes.fromhex(second)) == wanted  # C.4
    assert plain._size == huffman._size == 164


def test_eviction() -> None:
    decoder = Decoder()
    decoder.decode(b"\x3f\xe1\x01")  # table size 256
    for number in range(20):
        decoder.decode(b"\x40\x05name%d\x05value" % (number % 10))
        assert decoder._size <= 256
    with pytest.raises(HpackError):
        decoder.decode(b"\xff\x80\x01")


def test_repeated_blocks_follow_the_table() -> None:
    """The same bytes mean something else once the table has changed."""
    decoder = Decoder()
    decoder.decode(b"\x40\x01a\x011")
    assert decoder.decode(b"\xbe") == [(b"a", b"1")] == decoder.decode(b"\xbe")
    decoder.decode(b"\x40\x01b\x012")
    assert decoder.decode(b"\xbe") == [(b"b", b"2")]


@pytest.mark.parametrize(
    "block",
    ["80", "ff", "ffffffffff7f", "40", "4001", "40016101", "0001617f", "3fe21f", "823f01", "c6", "00" + "8261", "0083ffffff00"],
)
def test_malformed_blocks(block: str) -> None:
    with pytest.raises(HpackError):
        Decoder().decode(bytes.fromhex(block))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (b"\xff" + b"\x80" * 5 + b"\x00", "an integer is too large"),
        (b"\xff" + b"\xff" * 5000, "an integer is too large"),
        (b"\x00\x01a" + bytes((0x80 | 9,)) + b"\xff" * 9, "no such Huffman code"),
        (b"\x82" * (MAX_HEADERS // (len(":method") + len("GET") + 32) + 1), "too many headers"),
        (literal(b"a", b"x" * MAX_HEADERS), "too many headers"),
    ],
)
def test_blocks_are_bounded_while_they_are_read(block: bytes, message: str) -> None:
    with pytest.raises(HpackError, match=message):
        Decoder().decode(block)


@given(st.binary(max_size=200))
def test_any_block_is_decoded_or_refused(block: bytes) -> None:
    decoder = Decoder()
    for _ in range(2):
        try:
            decoder.decode(block)
        except HpackError:
            return


@given(st.binary(max_size=60))
def test_any_huffman_string_is_decoded_or_refused(data: bytes) -> None:
    try:
        huffman_decode(data)
    except HpackError:
        return


@given(st.lists(st.tuples(st.binary(max_size=300), st.binary(max_size=300)), max_size=5))
def test_literals_are_read_back(headers: list[tuple[bytes, bytes]]) -> None:
    assert Decoder().decode(b"".join(literal(name, value) for name, value in headers)) == headers


# -- the connection


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def frames(data: bytes) -> list[tuple[int, int, int, bytes]]:
    found = []
    while data:
        size = int.from_bytes(data[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", data[3:9])
        found.append((kind, flags, stream, data[9 : 9 + size]))
        data = data[9 + size :]
    return found


HEAD = b"".join(
    literal(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/s/M"),
        (b"content-type", b"application/grpc"),
        (b"containerd-namespace", b"k8s.io"),
    )
)
HELLO = h2.PREFACE + frame(h2.SETTINGS, 0, 0)


def call(stream: int, message: bytes = b"hi", head: bytes = HEAD) -> bytes:
    body = struct.pack(">BI", 0, len(message)) + message
    return frame(h2.HEADERS, 4, stream, head) + frame(h2.DATA, 1, stream, body)


def test_a_request_and_its_answer() -> None:
    connection = Connection()
    (request,) = connection.feed(HELLO + call(1))
    assert isinstance(request, Request)
    assert (request.path, request.message, request.headers["containerd-namespace"]) == ("/s/M", b"hi", "k8s.io")
    kinds = [(kind, flags) for kind, flags, _, _ in frames(connection.take())]
    assert kinds == [(h2.SETTINGS, 0), (h2.WINDOW_UPDATE, 0), (h2.SETTINGS, 1)]
    connection.send(1, b"answer")
    connection.finish(1)
    head, data, tail = frames(connection.take())
    assert Decoder().decode(head[3]) == [(b":status", b"200"), (b"content-type", b"application/grpc")]
    assert data[3] == b"\x00\x00\x00\x00\x06answer"
    assert (tail[1], Decoder().decode(tail[3])) == (5, [(b"grpc-status", b"0")])
    assert len(connection) == 0


def test_a_refusal_is_trailers_only() -> None:
    connection = Connection()
    connection.feed(HELLO + call(1))
    connection.take()
    connection.finish(1, 5, "snapshot 'ü%' does\nnot exist")
    ((kind, flags, _, payload),) = frames(connection.take())
    assert (kind, flags) == (h2.HEADERS, 5)
    assert dict(Decoder().decode(payload))[b"grpc-message"] == b"snapshot '%C3%BC%25' does%0Anot exist"


@given(st.lists(st.integers(1, 40), max_size=60))
def test_it_does_not_matter_how_the_bytes_are_cut(cuts: list[int]) -> None:
    padded = frame(h2.HEADERS, 4 | 8 | 0x20, 3, b"\x02" + b"\0\0\0\0\x10" + HEAD + b"\0\0") + frame(
        h2.DATA, 9, 3, b"\x01" + b"\0\0\0\0\x02yo" + b"\0"
    )
    split = (
        frame(h2.HEADERS, 0, 5, HEAD[:20]) + frame(h2.CONTINUATION, 0, 5, HEAD[20:40]) + frame(h2.CONTINUATION, 4, 5, HEAD[40:])
    )
    data = HELLO + call(1) + padded + split + frame(h2.DATA, 0, 5, b"\0\0\0") + frame(h2.DATA, 1, 5, b"\0\0")
    data += (
        frame(77, 255, 9, b"of the future") + frame(h2.PRIORITY, 0, 3, b"\0" * 5) + frame(h2.RST_STREAM, 0, 3, b"\0\0\0\x08")
    )
    connection = Connection()
    events: list[Request | Cancelled] = []
    at = 0
    for cut in [*cuts, len(data)]:
        events += connection.feed(data[at : at + cut])
        at += cut
    assert [(event.stream, getattr(event, "message", None)) for event in events] == [
        (1, b"hi"),
        (3, b"yo"),
        (5, b""),
        (3, None),
    ]


def test_flow_control_is_obeyed() -> None:
    connection = Connection()
    connection.feed(h2.PREFACE + frame(h2.SETTINGS, 0, 0, struct.pack(">HI", 4, 100)) + call(1) + call(3))
    connection.take()
    connection.send(1, b"x" * 500)
    connection.finish(1)
    assert connection.waiting(1)

    def sent() -> tuple[int, bool]:
        out = frames(connection.take())
        return sum(len(payload) for kind, _, _, payload in out if kind == h2.DATA), any(
            kind == h2.HEADERS and flags & 1 for kind, flags, _, _ in out
        )

    assert sent() == (100, False)
    connection.feed(frame(h2.WINDOW_UPDATE, 0, 1, struct.pack(">I", 50)))
    assert sent() == (50, False)
    connection.feed(frame(h2.SETTINGS, 0, 0, struct.pack(">HI", 4, 50)))  # windows may become negative
    assert sent() == (0, False)
    connection.feed(frame(h2.SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 20)))
    assert sent() == (505 - 150, True)
    connection.send(3, b"y" * 70_000)
    assert sent()[0] == 65535 - 505, "the connection has a window, too"
    connection.feed(frame(h2.WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 20)))
    out = frames(connection.take())
    assert sum(len(payload) for _, _, _, payload in out) == 70_005 - (65535 - 505)
    assert max(len(payload) for _, _, _, payload in out) <= 1 << 14


def test_pings_and_large_requests_are_acknowledged() -> None:
    connection = Connection()
    connection.feed(HELLO + frame(h2.PING, 0, 0, b"12345678") + frame(h2.PING, 1, 0, b"87654321"))
    assert (h2.PING, 1, 0, b"12345678") in frames(connection.take())
    size = 3 << 20
    connection.feed(frame(h2.HEADERS, 4, 1, HEAD) + frame(h2.DATA, 0, 1, struct.pack(">BI", 0, size)))
    given_back = 0
    for _ in range(size // 8192 - 1):
        connection.feed(frame(h2.DATA, 0, 1, b"z" * 8192))
        given_back += sum(
            int.from_bytes(p, "big") for k, _, s, p in frames(connection.take()) if (k, s) == (h2.WINDOW_UPDATE, 1)
        )
    (request,) = connection.feed(frame(h2.DATA, 1, 1, b"z" * 8192))
    assert isinstance(request, Request) and len(request.message) == size
    assert given_back > size // 2


@pytest.mark.parametrize(
    ("body", "code"),
    [(b"", 13), (b"\0\0\0\0\x05hi", 13), (b"\x01\0\0\0\x02hi", 12), (b"\0\0\0\0\x02hi\0\0\0\0\0", 13)],
)
def test_requests_that_are_no_messages_are_answered(body: bytes, code: int) -> None:
    connection = Connection()
    assert connection.feed(HELLO + frame(h2.HEADERS, 4, 1, HEAD) + frame(h2.DATA, 1, 1, body)) == []
    *_, (_, _, _, payload) = frames(connection.take())
    assert dict(Decoder().decode(payload))[b"grpc-status"] == str(code).encode()
    assert len(connection) == 0


def test_too_many_and_too_large() -> None:
    connection = Connection()
    connection.feed(HELLO)
    for number in range(h2.MAX_STREAMS + 1):
        connection.feed(call(2 * number + 1))
    assert len(connection) == h2.MAX_STREAMS
    *_, last = frames(connection.take())
    assert (last[0], last[3]) == (h2.RST_STREAM, struct.pack(">I", h2.REFUSED))
    connection = Connection()
    connection.feed(HELLO + frame(h2.HEADERS, 4, 1, HEAD))
    for _ in range(h2.MAX_MESSAGE // 16384 + 1):
        connection.feed(frame(h2.DATA, 0, 1, b"z" * 16384))
    assert len(connection) == 0


def test_requests_sent_by_halves_are_bounded_together() -> None:
    connection = Connection()
    connection.feed(HELLO)
    sent = 0
    for stream in range(1, 400, 2):
        connection.feed(frame(h2.HEADERS, 4, stream, HEAD))
        for _ in range(64):
            connection.feed(frame(h2.DATA, 0, stream, b"z" * 16384))
            sent += 16384
    held = sum(len(state.body) for state in connection._streams.values())
    assert held <= h2.MAX_PARKED < sent // 2 and len(connection) < 200
    refusals = [p for kind, _, _, p in frames(connection.take()) if kind == h2.HEADERS]
    assert dict(Decoder().decode(refusals[0]))[b"grpc-status"] == b"8"
    for stream in range(1, 400, 2):  # what is taken back makes room again
        connection.feed(frame(h2.RST_STREAM, 0, stream, b"\0\0\0\x08"))
    connection.feed(frame(h2.HEADERS, 4, 401, HEAD) + frame(h2.DATA, 0, 401, struct.pack(">BI", 0, 2 * 16384) + b"z" * 16379))
    (request,) = connection.feed(frame(h2.DATA, 0, 401, b"z" * 16384) + frame(h2.DATA, 1, 401, b"z" * 5))
    assert isinstance(request, Request)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        h2.PREFACE + frame(h2.DATA, 0, 0, b"x"),
        HELLO + frame(h2.DATA, 0, 7, b"x"),
        HELLO + frame(h2.HEADERS, 4, 2, HEAD),
        HELLO + frame(h2.HEADERS, 4, 0, HEAD),
        HELLO + frame(h2.HEADERS, 4, 1, b"\x80"),
        HELLO + frame(h2.HEADERS, 12, 1, b"\xff"),
        HELLO + frame(h2.HEADERS, 0, 1, HEAD) + frame(h2.PING, 0, 0, b"12345678"),
        HELLO + frame(h2.HEADERS, 4, 1, HEAD) + frame(h2.HEADERS, 4, 1, HEAD),
        HELLO + frame(h2.HEADERS, 0, 1, b"") + frame(h2.CONTINUATION, 0, 1, b"x" * 16384) * 5,
        HELLO + frame(h2.CONTINUATION, 4, 1, b""),
        HELLO + call(1) + frame(h2.HEADERS, 5, 1, HEAD),
        HELLO + frame(h2.PUSH_PROMISE, 0, 1, b""),
        HELLO + frame(h2.SETTINGS, 0, 0, b"x"),
        HELLO + frame(h2.SETTINGS, 1, 0, b"x" * 6),
        HELLO + frame(h2.SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 31)),
        HELLO + frame(h2.SETTINGS, 0, 0, struct.pack(">HI", 5, 1)),
        HELLO + frame(h2.PING, 0, 0, b"x"),
        HELLO + frame(h2.WINDOW_UPDATE, 0, 0, b"x"),
        HELLO + frame(h2.WINDOW_UPDATE, 0, 0, b"\0\0\0\0"),
        HELLO + frame(h2.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"),
        HELLO + frame(h2.RST_STREAM, 0, 9, b"\0\0\0\0"),
        HELLO + frame(h2.PING, 0, 0, b"x" * 20000),
        HELLO + frame(h2.DATA, 0, 1, b"x" * 20000)[:9],  # at its head, before anything of it is kept
    ],
)
def test_a_broken_peer_is_told_and_left(data: bytes) -> None:
    connection = Connection()
    with pytest.raises(Broken):
        connection.feed(data)
    assert frames(connection.take())[-1][0] == h2.GOAWAY


@given(
    st.lists(
        st.one_of(
            st.builds(frame, st.integers(0, 12), st.integers(0, 255), st.integers(0, 9), st.binary(max_size=40)),
            st.builds(call, st.sampled_from([1, 3, 5, 7]), st.binary(max_size=10)),
            st.binary(max_size=20),
        ),
        max_size=12,
    )
)
def test_hostile_bytes_break_nothing_else(parts: list[bytes]) -> None:
    connection = Connection()
    connection.feed(HELLO)
    try:
        for part in parts:
            for event in connection.feed(part):
                if isinstance(event, Request):
                    connection.send(event.stream, b"answer")
                    connection.finish(event.stream)
    except Broken:
        pass
    connection.take()


# -- the server, with grpcio's client


async def echo(message: bytes, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    yield message


async def many(message: bytes, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    for number in range(int(message)):
        yield b"%d" % number * 3000


async def refuse(message: bytes, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    raise Refused(9, f"no {headers['containerd-namespace']}: ü")
    yield b""


async def fail(message: bytes, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    yield message
    raise ValueError("a fault of ours")


class Hang:
    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(self, message: bytes, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        self.begun.set()
        try:
            await asyncio.sleep(60)
            yield b""
        finally:
            self.ended.set()


@asynccontextmanager
async def serving(
    path: str, **more: Callable[..., AsyncIterator[bytes]]
) -> AsyncIterator[tuple[Http2Server, grpc.aio.Channel]]:
    handlers = {"/s/echo": echo, "/s/many": many, "/s/refuse": refuse, "/s/fail": fail}
    server = Http2Server({**handlers, **{f"/s/{name}": handler for name, handler in more.items()}})
    await server.start(path)
    options = [("grpc.max_receive_message_length", 32 << 20), ("grpc.max_send_message_length", 32 << 20)]
    try:
        async with grpc.aio.insecure_channel("unix:" + path, options=options) as channel:
            yield server, channel
    finally:
        await server.stop(0.1)


async def test_unary_and_streaming_calls(tmp_path: object) -> None:
    async with serving(f"{tmp_path}/s") as (_, channel):
        for size in (0, 1, 70_000, 9 << 20):
            assert await channel.unary_unary("/s/echo")(b"x" * size) == b"x" * size
        answers = [answer async for answer in channel.unary_stream("/s/many")(b"1000")]
        assert answers == [b"%d" % number * 3000 for number in range(1000)]
        together = await asyncio.gather(*(channel.unary_unary("/s/echo")(b"%d" % number) for number in range(500)))
        assert together == [b"%d" % number for number in range(500)]


async def test_requests_that_arrive_together_are_answered_together(tmp_path: object, caplog: pytest.LogCaptureFixture) -> None:
    sizes: list[int] = []

    def quick(batch: Sequence[bytes]) -> list[bytes | None]:
        sizes.append(len(batch))
        if b"fail" in batch:
            raise ValueError("broken")
        return [None if message.startswith(b"slow") else b"quick " + message for message in batch]

    async with serving(f"{tmp_path}/s") as (server, channel):
        server.quick["/s/echo"] = quick
        echoed = channel.unary_unary("/s/echo")
        large = b"x" * (1 << 20)
        for turn in range(3):
            messages = [b"slow %d" % number if number % 3 == turn else b"%d" % number for number in range(100)]
            answers = await asyncio.gather(*(echoed(message) for message in messages))
            assert answers == [message if message.startswith(b"slow") else b"quick " + message for message in messages]
        assert max(sizes) == 8 and sum(sizes) == 300
        assert await echoed(large) == b"quick " + large, "more than a frame, and than the client's window"
        assert await echoed(b"fail") == b"fail", "the handler is asked instead"
    assert [record.message for record in caplog.records] == ["a quick handler failed: broken"]


async def test_errors_reach_the_client(tmp_path: object, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(f"{tmp_path}/s") as (_, channel):
        for path, code, text in (
            ("/s/refuse", grpc.StatusCode.FAILED_PRECONDITION, "no k8s.io: ü"),
            ("/s/nothing", grpc.StatusCode.UNIMPLEMENTED, "unknown method /s/nothing"),
            ("/s/fail", grpc.StatusCode.INTERNAL, "internal error: ValueError"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(path)(b"", metadata=(("containerd-namespace", "k8s.io"),))
            assert (caught.value.code(), caught.value.details()) == (code, text)
        assert await channel.unary_unary("/s/echo")(b"on") == b"on"
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_a_client_that_goes_away_cancels_its_request(tmp_path: object) -> None:
    hang = Hang()
    async with serving(f"{tmp_path}/s", hang=hang) as (_, channel):
        call = channel.unary_unary("/s/hang")(b"")
        await asyncio.wait_for(hang.begun.wait(), 60)
        call.cancel()
        await asyncio.wait_for(hang.ended.wait(), 60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/s/hang")(b"", timeout=0.1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await channel.unary_unary("/s/echo")(b"on") == b"on"


async def test_a_slow_reader_holds_its_stream_only(tmp_path: object) -> None:
    async with serving(f"{tmp_path}/s") as (server, channel):
        call = channel.unary_stream("/s/many")(b"4000")
        first = await call.read()
        await asyncio.sleep(0.2)
        (protocol,) = server.protocols
        assert sum(len(piece) for state in protocol.connection._streams.values() for piece in state.queue) < 4 << 20
        assert await channel.unary_unary("/s/echo")(b"on") == b"on"
        assert first == b"0" * 3000
        rest = 0
        while await call.read() is not grpc.aio.EOF:
            rest += 1
        assert rest == 3999


async def test_stopping_lets_requests_end_and_cancels_those_that_do_not(tmp_path: object) -> None:
    hang = Hang()
    async with serving(f"{tmp_path}/s", hang=hang) as (server, channel):
        call = channel.unary_unary("/s/hang")(b"")
        await asyncio.wait_for(hang.begun.wait(), 60)
        await server.stop(0.05)
        assert hang.ended.is_set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)


async def test_a_client_that_speaks_something_else(tmp_path: object, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(f"{tmp_path}/s") as (server, channel):
        reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/s")
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 60)
        assert frames(answer)[-1][0] == h2.GOAWAY
        writer.close()
        await writer.wait_closed()
        assert await channel.unary_unary("/s/echo")(b"on") == b"on"
        assert len(server.protocols) == 1
    assert "no HTTP/2 client" in caplog.text


def push(path: str, pieces: Iterable[bytes], most: int) -> tuple[socket.socket, int]:
    """A client that never reads: send until nobody takes more, or ``most`` bytes are gone. It, and the bytes sent."""
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(1)
    client.connect(path)
    client.sendall(HELLO)
    sent = 0
    with suppress(TimeoutError):
        for piece in pieces:
            client.sendall(piece)
            sent += len(piece)
            if sent >= most:
                break
    return client, sent


async def test_who_does_not_read_cannot_go_on_asking(tmp_path: object) -> None:
    """Answers to what costs a client nothing (pings, settings, unknown methods) do not pile up."""
    pings = repeat(frame(h2.PING, 0, 0, b"12345678") * 1000)
    settings = repeat(frame(h2.SETTINGS, 0, 0) * 1000)
    unknown = (b"".join(call(stream) for stream in range(first, first + 200, 2)) for first in count(1, 200))
    async with serving(f"{tmp_path}/s") as (server, channel):
        assert await channel.unary_unary("/s/echo")(b"on") == b"on"
        known = set(server.protocols)
        for pieces in (pings, settings, unknown):
            client, sent = await asyncio.to_thread(push, f"{tmp_path}/s", pieces, 64 << 20)
            with client:
                (protocol,) = server.protocols - known
                assert protocol.transport is not None
                assert sent < 8 << 20 and protocol.transport.get_write_buffer_size() < 4 << 20
                assert await channel.unary_unary("/s/echo")(b"on") == b"on"
            while server.protocols != known:
                await asyncio.sleep(0.01)


async def test_requests_taken_back_at_once_make_no_work_in_advance(tmp_path: object) -> None:
    """Rapid reset (CVE-2023-44487), against handlers that take time and against those that answer many together."""
    asked = 0

    def quick(batch: Sequence[bytes]) -> list[bytes | None]:
        nonlocal asked
        asked += len(batch)
        return [b"" for _ in batch]

    hang = Hang()
    async with serving(f"{tmp_path}/s", hang=hang) as (server, channel):
        server.quick["/s/quick"] = quick
        most = 0
        for path in (b"/s/hang", b"/s/quick"):
            head = HEAD.replace(literal(b":path", b"/s/M"), literal(b":path", path))
            reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/s")
            writer.write(HELLO)
            for stream in range(1, 40_000, 2):
                writer.write(call(stream, head=head) + frame(h2.RST_STREAM, 0, stream, b"\0\0\0\x08"))
                if stream % 1000 == 1:
                    await asyncio.wait_for(writer.drain(), 30)
                    most = max(most, *(one.queued + len(one.tasks) for one in server.protocols))
            writer.write(frame(h2.PING, 0, 0, b"the last"))
            answer = b""
            while b"the last" not in answer:
                answer += await asyncio.wait_for(reader.read(1 << 16), 30)
            writer.close()
            await writer.wait_closed()
        assert await channel.unary_unary("/s/echo")(b"on") == b"on"
        while any(one.tasks or one.queued for one in server.protocols):
            await asyncio.sleep(0.01)
    assert asked
    assert most < 8192, "a read of the socket is a thousand requests at most"
