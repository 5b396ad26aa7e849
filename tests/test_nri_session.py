"""The plugin's end of a connection: which calls are passed on, which are refused, what is fatal."""

from __future__ import annotations

import struct

import pytest
from simulator.nriruntime import SCHEMA

from weenv.core.errors import FormatError, LimitError
from weenv.plugin.nri.wire import mux
from weenv.plugin.nri.wire.session import MAX_STREAMS, Call, Reply, Session
from weenv.plugin.nri.wire.ttrpc import MAX_DATA, Assembler, Code, Message


def message(connection: int, stream: int, kind: int, data: bytes = b"", flags: int = 0) -> bytes:
    return mux.frame(connection, struct.pack(">IIBB", len(data), stream, kind, flags) + data)


def call(stream: int, method: str = "Configure", payload: bytes = b"", **more: int) -> bytes:
    request = SCHEMA["Request"](service="s", method=method, payload=payload, **more)
    return message(mux.PLUGIN, stream, 1, request.SerializeToString())


def sent(session: Session, connection: int) -> list[Message]:
    pieces = mux.Demultiplexer().feed(session.take())
    return Assembler().feed(b"".join(piece for number, piece in pieces if number == connection))


def status(found: Message) -> int:
    assert found.kind == 2
    return int(SCHEMA["Response"].FromString(found.data).status.code)


def test_a_call_and_its_answer() -> None:
    session = Session()
    data = call(1, "Configure", b"abc", timeout_nano=2 * 10**9)
    assert session.feed(data[:20]) == []
    (found,) = session.feed(data[20:])
    assert found == Call(1, "s", "Configure", b"abc", 2.0)
    assert session.calls == 1
    session.answer(found, b"xyz")
    session.answer(found, b"again")
    session.fail(found, Code.UNKNOWN, "late")
    (answer,) = sent(session, mux.PLUGIN)
    assert answer.stream == 1 and SCHEMA["Response"].FromString(answer.data).payload == b"xyz"
    assert session.calls == 0 and session.take() == b""


def test_an_answer_that_is_too_large_leaves_the_call_to_be_answered() -> None:
    session = Session()
    (found,) = session.feed(call(1))
    assert isinstance(found, Call)
    with pytest.raises(LimitError):
        session.answer(found, bytes(MAX_DATA))
    session.fail(found, Code.UNKNOWN, "x" * 5000)
    (answer,) = sent(session, mux.PLUGIN)
    assert len(SCHEMA["Response"].FromString(answer.data).status.message) == 1000


def test_calls_that_are_refused_one_by_one() -> None:
    session = Session()
    assert session.feed(call(2)) == []  # even
    assert session.feed(message(mux.PLUGIN, 3, 1, b"\xff")) == []  # no Request
    assert session.feed(call(3)) == []  # used
    assert session.feed(message(mux.PLUGIN, 5, 1, b"", flags=2)) == []  # a stream
    assert session.feed(message(mux.PLUGIN, 5, 3, b"x")) == []  # its data
    assert [(item.stream, status(item)) for item in sent(session, mux.PLUGIN)] == [(2, 3), (3, 3), (3, 3), (5, 12), (5, 3)]
    assert len(session.feed(call(7))) == 1


def test_unanswered_calls_are_bounded() -> None:
    session = Session()
    found = session.feed(b"".join(call(2 * number + 1) for number in range(MAX_STREAMS + 1)))
    assert len(found) == session.calls == MAX_STREAMS
    assert [status(item) for item in sent(session, mux.PLUGIN)] == [8]


def test_requests_of_ours() -> None:
    session = Session()
    first, second = session.request("r", "A", b"1"), session.request("r", "B", b"2", 3.0)
    assert [item.stream for item in sent(session, mux.RUNTIME)] == [first, second] == [1, 3]
    response = SCHEMA["Response"](payload=b"two").SerializeToString()
    assert session.feed(message(mux.RUNTIME, second, 2, response)) == [Reply(3, 0, "", b"two")]
    assert session.feed(message(mux.RUNTIME, second, 2, response)) == []  # answered already
    session.forget(first)
    assert session.feed(message(mux.RUNTIME, first, 2, response)) == []
    failed = SCHEMA["Response"](status=SCHEMA["Status"](code=2, message="no")).SerializeToString()
    third = session.request("r", "C", b"")
    assert session.feed(message(mux.RUNTIME, third, 2, failed)) == [Reply(5, 2, "no", b"")]
    for _ in range(MAX_STREAMS):
        session.request("r", "D", b"")
    with pytest.raises(FormatError, match="64 requests"):
        session.request("r", "D", b"")


@pytest.mark.parametrize(
    "data",
    [
        message(mux.PLUGIN, 1, 2),  # a response where requests arrive
        message(mux.RUNTIME, 1, 1),  # a request where responses arrive
        message(mux.RUNTIME, 1, 3),
        message(mux.PLUGIN, 1, 9),
        struct.pack(">II", 1, 1 << 30),
        mux.frame(1, struct.pack(">IIBB", MAX_DATA + 1, 1, 1, 0)),
    ],
)
def test_what_ends_the_connection(data: bytes) -> None:
    with pytest.raises(FormatError):
        Session().feed(data)


def test_a_reply_that_cannot_be_read_ends_it_too() -> None:
    session = Session()
    stream = session.request("r", "A", b"")
    with pytest.raises(FormatError):
        session.feed(message(mux.RUNTIME, stream, 2, b"\xff"))
