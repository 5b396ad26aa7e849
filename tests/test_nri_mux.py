"""NRI's multiplexer: frames however they are cut, bounds before anything is kept."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.core.errors import LimitError
from weenv.plugin.nri.wire import mux

frames = st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 1 << 31]), st.binary(max_size=300)), max_size=8)


def joined(pieces: list[tuple[int, bytes]]) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for connection, piece in pieces:
        found[connection] = found.get(connection, b"") + piece
    return found


@given(sent=frames, cuts=st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_each_connection_has_its_own_stream_however_bytes_arrive(sent: list[tuple[int, bytes]], cuts: list[int]) -> None:
    trunk = b"".join(struct.pack(">II", connection, len(data)) + data for connection, data in sent)
    demultiplexer = mux.Demultiplexer()
    pieces = []
    at = number = 0
    while at < len(trunk):
        step = cuts[number % len(cuts)]
        pieces += demultiplexer.feed(trunk[at : at + step])
        at, number = at + step, number + 1
    wanted = joined([item for item in sent if item[0] in (1, 2)])
    assert joined(pieces) == {connection: data for connection, data in wanted.items() if data}
    assert demultiplexer.skipped == sum(len(data) for connection, data in sent if connection not in (1, 2))


def test_a_frame_is_what_it_is_made_of() -> None:
    assert mux.frame(2, b"abc") == b"\0\0\0\2\0\0\0\3abc"
    assert mux.Demultiplexer().feed(mux.frame(1, b"abc") + mux.frame(1, b"") + mux.frame(2, b"d")) == [(1, b"abc"), (2, b"d")]


@pytest.mark.parametrize("connection", [1, 9])
def test_a_frame_that_is_too_long_is_refused_at_its_header(connection: int) -> None:
    demultiplexer = mux.Demultiplexer()
    assert demultiplexer.feed(struct.pack(">II", connection, mux.MAX_PAYLOAD)) == []
    with pytest.raises(LimitError, match="4194315"):
        mux.Demultiplexer().feed(struct.pack(">II", connection, mux.MAX_PAYLOAD + 1))
