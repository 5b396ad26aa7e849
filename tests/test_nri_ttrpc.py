"""ttrpc: messages from pieces, and frames that the runtime's reader takes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator.nriruntime import SCHEMA

from weenv.core.errors import FormatError, LimitError
from weenv.plugin.nri.wire import mux, ttrpc
from weenv.plugin.nri.wire.ttrpc import Assembler, Code, Kind, Message

messages = st.lists(
    st.builds(Message, st.integers(0, 2**32 - 1), st.sampled_from(list(Kind)), st.integers(0, 255), st.binary(max_size=100)),
    max_size=5,
)


@given(sent=messages, step=st.integers(1, 60))
def test_messages_however_they_are_cut(sent: list[Message], step: int) -> None:
    data = b"".join(struct.pack(">IIBB", len(m.data), m.stream, m.kind, m.flags) + m.data for m in sent)
    assembler = Assembler()
    found = [message for at in range(0, len(data), step) for message in assembler.feed(data[at : at + step])]
    assert found == sent


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 70_000])
def test_the_header_has_a_frame_of_its_own_and_nothing_is_empty(size: int) -> None:
    data = bytes(size)
    pieces = mux.Demultiplexer().feed(ttrpc.encode(mux.RUNTIME, 5, Kind.REQUEST, data))
    assert [len(piece) for _, piece in pieces] == ([10, size] if size else [10])
    encoded = ttrpc.encode(mux.RUNTIME, 5, Kind.REQUEST, data)
    assert len(encoded) == 18 + (8 + size if size else 0)  # no frame without payload
    assert Assembler().feed(b"".join(piece for _, piece in pieces)) == [Message(5, 1, 0, data)]


def test_the_largest_message_and_the_next() -> None:
    largest = bytes(ttrpc.MAX_DATA)
    pieces = mux.Demultiplexer().feed(ttrpc.encode(mux.PLUGIN, 1, Kind.RESPONSE, largest))
    assert Assembler().feed(b"".join(piece for _, piece in pieces))[0].data == largest
    with pytest.raises(LimitError):
        ttrpc.encode(mux.PLUGIN, 1, Kind.RESPONSE, largest + b"x")
    with pytest.raises(LimitError):
        Assembler().feed(struct.pack(">IIBB", ttrpc.MAX_DATA + 1, 1, 1, 0))


@pytest.mark.parametrize("kind", [0, 4, 255])
def test_other_types_are_no_ttrpc(kind: int) -> None:
    with pytest.raises(FormatError, match=f"type {kind}"):
        Assembler().feed(struct.pack(">IIBB", 0, 1, kind, 0))


def test_requests_and_responses_as_protobuf_has_them() -> None:
    request = SCHEMA["Request"].FromString(ttrpc.request("a.B", "C", b"\1\2", 1.5))
    assert (request.service, request.method, request.payload, request.timeout_nano) == ("a.B", "C", b"\1\2", 1_500_000_000)
    failed = SCHEMA["Response"].FromString(ttrpc.response(b"", Code.UNIMPLEMENTED, "no"))
    assert (failed.status.code, failed.status.message) == (12, "no")
    done = SCHEMA["Response"].FromString(ttrpc.response(b"x"))
    assert done.payload == b"x" and not done.HasField("status")
    assert ttrpc.read("Response", failed.SerializeToString()) == {"status": {"code": 12, "message": "no"}}
    with pytest.raises(FormatError):
        ttrpc.read("Response", b"\x0a\xff")
