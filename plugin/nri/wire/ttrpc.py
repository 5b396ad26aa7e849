"""ttrpc's messages within one connection of the multiplexer, and how they are cut into frames for NRI's reader.

A message is ``u32be length | u32be stream | u8 type | u8 flags | data``. Sources: containerd/ttrpc, PROTOCOL.md, channel.go and
proto of Request and Response (request.proto); google/rpc/{status,code}.proto. Only unary calls exist in NRI. Pure.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from weenv.core import wire
from weenv.core.errors import FormatError, LimitError
from weenv.plugin.nri.wire import mux

HEADER = struct.Struct(">IIBB")
MAX_DATA = 4 << 20
"""The largest data of a message (channel.go, messageLengthMax)."""


class Kind(IntEnum):
    """Types of messages."""

    REQUEST = 1
    RESPONSE = 2
    DATA = 3


class Code(IntEnum):
    """Those of google/rpc/code.proto that are used here."""

    OK = 0
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12


TABLES: dict[str, dict[str, tuple[int, str]]] = {
    "Request": {
        "service": (1, "string"),
        "method": (2, "string"),
        "payload": (3, "bytes"),
        "timeout_nano": (4, "int64"),
    },
    "Response": {"status": (1, "Status"), "payload": (2, "bytes")},
    "Status": {"code": (1, "int32"), "message": (2, "string")},
}
"""Fields by message, as :mod:`weenv.core.proto` reads them."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message as it came: ``kind`` is one of :class:`Kind`."""

    stream: int
    kind: int
    flags: int
    data: bytes


def encode(connection: int, stream: int, kind: Kind, data: bytes) -> bytes:
    """A message in frames of the multiplexer. Raises LimitError for data that no peer takes.

    The header goes into a frame of its own: the runtime reads through a buffer of 4096 bytes, and refuses a frame that is
    larger than what it reads into. After the header it reads the data into a buffer of just that size.
    """
    if len(data) > MAX_DATA:
        raise LimitError(f"a message of {len(data)} bytes; {MAX_DATA} is the most")
    head = mux.frame(connection, HEADER.pack(len(data), stream, kind, 0))
    return head + mux.frame(connection, data) if data else head


class Assembler:
    """Makes messages of a connection's pieces; holds at most one message and one piece."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> list[Message]:
        """Messages that are now complete. Raises LimitError, and FormatError for what is no ttrpc: the stream is lost then."""
        self._buffer += piece
        found: list[Message] = []
        at = 0
        while len(self._buffer) - at >= HEADER.size:
            length, stream, kind, flags = HEADER.unpack_from(self._buffer, at)
            if length > MAX_DATA:
                raise LimitError(f"a message of {length} bytes; {MAX_DATA} is the most")
            if kind not in (Kind.REQUEST, Kind.RESPONSE, Kind.DATA):
                raise FormatError(f"a message of type {kind}, which ttrpc does not have")
            begin = at + HEADER.size
            if len(self._buffer) - begin < length:
                break
            at = begin + length
            found.append(Message(stream, kind, flags, bytes(self._buffer[begin:at])))
        if at:
            del self._buffer[:at]
        return found


def request(service: str, method: str, payload: bytes, timeout: float = 0.0) -> bytes:
    """A Request's data; ``timeout`` in seconds, 0 for none."""
    nanos = int(timeout * 1e9)
    values: dict[str, Any] = {"service": service, "method": method, "payload": payload, "timeout_nano": nanos}
    return wire.encode(TABLES, "Request", values)


def response(payload: bytes, code: int = Code.OK, message: str = "") -> bytes:
    """A Response's data; a ``code`` other than OK makes it an error."""
    if code != Code.OK:
        return wire.encode(TABLES, "Response", {"status": {"code": int(code), "message": message}})
    return wire.encode(TABLES, "Response", {"payload": payload})


def read(table: str, data: bytes) -> dict[str, Any]:
    """The fields of a ``Request`` or ``Response``. Raises FormatError."""
    try:
        return wire.decode(TABLES, table, data)
    except wire.WireError as error:
        raise FormatError(f"a {table} of ttrpc: {error}") from error
