"""A blocking gRPC client of one local containerd, for the command whose start-up time counts.

Unary calls over HTTP/2 (RFC 9113) on a unix socket, several at once; no TLS, no compression. Importing grpcio and protobuf
takes longer than starting a container; this takes a few milliseconds. Header blocks are sent as literals; the peer is told
to use no dynamic table, and what it says is only looked into where it is not plain success.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping
from typing import Any

from weenv.core.errors import WeenvError
from weenv.core.wire import decode, encode
from weenv.plugin.containerd.fields import TABLES

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM = _ACK = 1
_END_HEADERS, _PADDED, _PRIORITY = 4, 8, 0x20
_HEADER_TABLE_SIZE, _INITIAL_WINDOW = 1, 4
_WINDOW = 1 << 24
_MAX_FRAME = 1 << 14
"""Bytes of a frame's payload, both ways: the protocol's default, which is not changed."""
_LIMIT = 16 << 20
"""Bytes of an answer."""

_OK = tuple(bytes((prefix,)) + bytes.fromhex("889acac8b21234da8f0130") for prefix in (0x40, 0x00, 0x10))
"""``grpc-status: 0`` as HPACK literals (RFC 7541, section 6.2), the name in its Huffman code, with each kind of prefix."""


class QuickError(WeenvError):
    """An answer that is an error; ``code`` is gRPC's number, -1 where the connection broke."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


NOT_FOUND, ALREADY_EXISTS, BROKEN = 5, 6, -1


class _Stream:
    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.body = bytearray()
        self.blocks: list[bytes] = []
        self.ending = False
        self.done = False


class QuickClient:
    """One connection. Raises QuickError where there is none to be had."""

    def __init__(self, address: str, namespace: str) -> None:
        self._namespace = namespace
        self._next = 1
        self._streams: dict[int, _Stream] = {}
        self._in = bytearray()
        self._room = 65535  # what the peer takes of all streams together, at first
        self._stream_room = 65535
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self.socket.connect(address)
            settings = struct.pack(">HIHI", _HEADER_TABLE_SIZE, 0, _INITIAL_WINDOW, _WINDOW)
            self.socket.sendall(
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
                + _frame(_SETTINGS, 0, 0, settings)
                + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW))
            )
        except OSError as error:
            self.socket.close()
            raise QuickError(f"containerd does not answer at {address}: {error.strerror}", BROKEN) from error

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def begin(self, service: str, method: str, request: str, values: Mapping[str, Any], answer: str) -> int:
        """Send a request; a number to ask :meth:`result` with."""
        message = encode(TABLES, request, values)
        body = struct.pack(">BI", 0, len(message)) + message
        number = self._next
        self._next += 2
        self._streams[number] = _Stream(answer)
        # 0x83: :method POST, 0x86: :scheme http (RFC 7541, appendix A)
        block = b"\x83\x86" + b"".join(
            _literal(name, value)
            for name, value in (
                (":path", f"/{service}/{method}"),
                (":authority", "localhost"),
                ("content-type", "application/grpc"),
                ("te", "trailers"),
                ("containerd-namespace", self._namespace),
            )
        )
        if len(block) > _MAX_FRAME:
            raise QuickError("the headers are too long", BROKEN)
        try:
            self.socket.sendall(_frame(_HEADERS, _END_HEADERS, number, block))
            left, room = memoryview(body), self._stream_room
            while True:
                while len(left) and min(room, self._room) <= 0:
                    before = self._room
                    self._receive()
                    room += self._room - before
                part = left[: max(0, min(len(left), _MAX_FRAME, room, self._room))]
                left = left[len(part) :]
                room -= len(part)
                self._room -= len(part)
                self.socket.sendall(_frame(_DATA, 0 if len(left) else _END_STREAM, number, bytes(part)))
                if not len(left):
                    return number
        except OSError as error:
            raise QuickError(f"containerd went away: {error.strerror}", BROKEN) from error

    def result(self, number: int, *, block: bool = True) -> dict[str, Any] | None:
        """The answer; None where ``block`` is false and it has not come yet. Raises QuickError."""
        stream = self._streams[number]
        while not stream.done:
            if not self._receive(block=block):
                return None
        del self._streams[number]
        if not stream.blocks or not any(ok in stream.blocks[-1] for ok in _OK):
            failure = _failure(stream.blocks)
            if failure.code != 0:  # success in other words
                raise failure
        body = bytes(stream.body)
        if len(body) < 5 or body[0] or struct.unpack_from(">I", body, 1)[0] != len(body) - 5:
            raise QuickError("containerd's answer is no message", BROKEN)
        return decode(TABLES, stream.answer, body[5:])

    def call(self, service: str, method: str, request: str, values: Mapping[str, Any], answer: str) -> dict[str, Any]:
        """One request and its answer. Raises QuickError."""
        found = self.result(self.begin(service, method, request, values, answer))
        assert found is not None
        return found

    def _receive(self, *, block: bool = True) -> bool:
        """Take what has come; False where that is nothing."""
        try:
            data = self.socket.recv(1 << 16, 0 if block else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            raise QuickError(f"containerd went away: {os.strerror(error.errno or 0)}", BROKEN) from error
        if not data:
            raise QuickError("containerd went away", BROKEN)
        self._in += data
        while len(self._in) >= 9:
            length = int.from_bytes(self._in[:3], "big")
            if length > _MAX_FRAME:
                raise QuickError("containerd's answer is no HTTP/2", BROKEN)
            if len(self._in) < 9 + length:
                break
            kind, flags = self._in[3], self._in[4]
            number = int.from_bytes(self._in[5:9], "big") & 0x7FFFFFFF
            payload = bytes(self._in[9 : 9 + length])
            del self._in[: 9 + length]
            self._take(kind, flags, number, payload)
        return True

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        stream = self._streams.get(number)
        if kind == _SETTINGS and not flags & _ACK:
            self.socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
            for at in range(0, len(payload) - 5, 6):
                name, value = struct.unpack_from(">HI", payload, at)
                if name == _INITIAL_WINDOW:
                    self._stream_room = value
        elif kind == _PING and not flags & _ACK:
            self.socket.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE and number == 0 and len(payload) == 4:
            self._room += int.from_bytes(payload, "big")
        elif kind == _GOAWAY:
            raise QuickError("containerd ends the connection", BROKEN)
        elif stream is None or stream.done:
            return
        elif kind == _RESET:
            raise QuickError("containerd gave the request up", BROKEN)
        elif kind == _CONTINUATION and stream.blocks:
            stream.blocks[-1] += payload
            stream.done = stream.ending and bool(flags & _END_HEADERS)
        elif kind == _HEADERS:
            stream.blocks.append(_unpadded(kind, flags, payload))
            stream.ending = bool(flags & _END_STREAM)
            stream.done = stream.ending and bool(flags & _END_HEADERS)
        elif kind == _DATA:
            stream.body += _unpadded(kind, flags, payload)
            if len(stream.body) > _LIMIT:
                raise QuickError("containerd's answer is too long", BROKEN)
            stream.done = bool(flags & _END_STREAM)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _literal(name: str, value: str) -> bytes:
    return b"\x00" + b"".join(_length(len(text)) + text for text in (name.encode(), value.encode()))


def _length(value: int) -> bytes:
    if value < 127:
        return bytes((value,))
    out, value = bytearray(b"\x7f"), value - 127
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _unpadded(kind: int, flags: int, payload: bytes) -> bytes:
    if flags & _PADDED:
        payload = payload[1 : max(1, len(payload) - payload[0])] if payload else b""
    return payload[5:] if kind == _HEADERS and flags & _PRIORITY else payload


def _failure(blocks: list[bytes]) -> QuickError:
    """What a stream's header blocks say that is not plain success."""
    from urllib.parse import unquote

    from weenv.plugin.snapshotter.http2.hpack import Decoder, HpackError

    try:
        decoder = Decoder()
        headers = dict(header for block in blocks for header in decoder.decode(block))
    except HpackError as error:
        return QuickError(f"containerd's answer cannot be read: {error}", BROKEN)
    code = headers.get(b"grpc-status", b"").decode("latin-1")
    text = unquote(headers.get(b"grpc-message", b"").decode("latin-1")).splitlines()
    if not code.isdigit():
        return QuickError("containerd's answer has no status", BROKEN)
    return QuickError(f"containerd: {text[0] if text else 'no detail'}", int(code))
