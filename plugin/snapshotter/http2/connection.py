"""One connection of a gRPC server (RFC 7540; gRPC's PROTOCOL-HTTP2.md): bytes in, requests out, and answers to bytes.

Sans-I/O: :meth:`Connection.feed` takes what arrived and gives events, the other methods answer, :meth:`Connection.take`
gives what is to be sent. Requests have one message; answers any number of messages and a status.

Not spoken: server push, priorities, request compression, TLS. Frames of unknown types are ignored, as the RFC demands.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from urllib.parse import quote

from weenv.plugin.snapshotter.http2.hpack import Decoder, HpackError, literal

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_MESSAGE = 16 << 20
"""Largest request message, bytes (containerd's own limit)."""
MAX_STREAMS = 1024
"""Requests at once on one connection."""
MAX_PARKED = 2 * MAX_MESSAGE
"""Bytes of requests that have begun and not ended, on one connection: containerd's have a few thousand."""
_MAX_FRAME = 1 << 14
"""Largest frame taken, and sent unless the peer allows more: the default (RFC 7540, section 6.5.2)."""
_MAX_BLOCK = 64 << 10
_WINDOW = 1 << 20
"""Bytes that the peer may send on one stream before it is told to go on."""
_CONNECTION_WINDOW = 32 << 20

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
_END_STREAM = 1
_ACK = 1
_END_HEADERS = 4
_PADDED = 8
_HAS_PRIORITY = 0x20

NO_ERROR, PROTOCOL_ERROR, _, FLOW_CONTROL_ERROR, _, STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED, CANCEL, COMPRESSION = range(10)

_HEAD = struct.Struct(">HBBBI")  # length (high 16, low 8 bits), type, flags, stream
_U32 = struct.Struct(">I")
_SETTING = struct.Struct(">HI")
_PREFIX = struct.Struct(">BI")  # gRPC: compressed flag, message length

# :status 200 (static index 8), content-type: application/grpc (name: static index 31, not indexed)
_RESPONSE = b"\x88\x0f\x10\x10application/grpc"
_OK = literal(b"grpc-status", b"0")
_ANSWER = struct.Struct(f">HBBBI{len(_RESPONSE)}sHBBBIBI")  # headers, then the head of a data frame and gRPC's prefix
_END = struct.Struct(f">HBBBI{len(_OK)}s")


@dataclass(frozen=True, slots=True)
class Request:
    """A complete request."""

    stream: int
    path: str
    headers: dict[str, str]
    message: bytes


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client does not want the answer any more."""

    stream: int


class Broken(Exception):
    """The peer broke the protocol; what :meth:`Connection.take` gives tells it so, then the connection is to be closed."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(slots=True)
class _Stream:
    headers: list[tuple[bytes, bytes]]
    window: int
    body: bytearray = field(default_factory=bytearray)
    unannounced: int = 0
    asked: bool = False
    """The request is complete and was handed out."""
    begun: bool = False
    """Response headers were sent."""
    queue: deque[memoryview] = field(default_factory=deque)
    trailers: bytes | None = None


def _frame(kind: int, flags: int, stream: int, payload: bytes | memoryview = b"") -> bytes:
    size = len(payload)
    return _HEAD.pack(size >> 8, size & 255, kind, flags, stream) + payload


class Connection:
    """See the module's text."""

    def __init__(self) -> None:
        self._in = bytearray()
        self._out: list[bytes] = []
        self._greeted = False
        self._decoder = Decoder()
        self._streams: dict[int, _Stream] = {}
        self._last = 0
        self._block: tuple[int, int, bytearray] | None = None
        self._window = 65535
        self._peer_window = 65535
        self._peer_frame = _MAX_FRAME
        self._received = 0
        self._parked = 0
        self._closing = False
        self._decoded: tuple[list[tuple[bytes, bytes]], dict[str, str]] = ([], {})
        settings = _SETTING.pack(3, MAX_STREAMS) + _SETTING.pack(4, _WINDOW)
        self._out.append(_frame(SETTINGS, 0, 0, settings))
        self._out.append(_frame(WINDOW_UPDATE, 0, 0, _U32.pack(_CONNECTION_WINDOW - 65535)))

    def __len__(self) -> int:
        """Requests that are not answered yet."""
        return len(self._streams)

    def take(self) -> bytes:
        """What is to be sent now."""
        data = b"".join(self._out)
        self._out.clear()
        return data

    # reading

    def feed(self, data: bytes) -> list[Request | Cancelled]:
        """Take what arrived. Raises :class:`Broken`."""
        self._in += data
        events: list[Request | Cancelled] = []
        buffer = self._in
        at = 0
        try:
            if not self._greeted:
                if not PREFACE.startswith(bytes(buffer[: len(PREFACE)])):
                    raise Broken(PROTOCOL_ERROR, "this is no HTTP/2 client")
                if len(buffer) < len(PREFACE):
                    return events
                self._greeted, at = True, len(PREFACE)
            while len(buffer) - at >= 9:
                high, low, kind, flags, stream = _HEAD.unpack_from(buffer, at)
                size = high << 8 | low
                if size > _MAX_FRAME:
                    raise Broken(FRAME_SIZE_ERROR, "a frame is larger than allowed")
                end = at + 9 + size
                if len(buffer) < end:
                    break
                self._frame(kind, flags, stream & 0x7FFFFFFF, bytes(buffer[at + 9 : end]), events)
                at = end
            del buffer[:at]
        except HpackError as error:
            self._break(COMPRESSION)
            raise Broken(COMPRESSION, str(error)) from error
        except Broken as error:
            self._break(error.code)
            raise
        return events

    def _break(self, code: int) -> None:
        self._out.append(_frame(GOAWAY, 0, 0, _U32.pack(self._last) + _U32.pack(code)))

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes, events: list[Request | Cancelled]) -> None:
        if self._block is not None and kind != CONTINUATION:
            raise Broken(PROTOCOL_ERROR, "a header block is interrupted")
        if kind == HEADERS:
            self._on_headers(flags, stream, payload, events)
        elif kind == DATA:
            self._on_data(flags, stream, payload, events)
        elif kind == WINDOW_UPDATE:
            self._on_window(stream, payload)
        elif kind == RST_STREAM:
            if len(payload) != 4 or stream == 0 or stream > self._last:
                raise Broken(PROTOCOL_ERROR, "a bad RST_STREAM")
            known = self._drop(stream)
            if known is not None and known.asked:
                events.append(Cancelled(stream))
        elif kind == PING:
            if len(payload) != 8 or stream:
                raise Broken(FRAME_SIZE_ERROR, "a bad PING")
            if not flags & _ACK:
                self._out.append(_frame(PING, _ACK, 0, payload))
        elif kind == SETTINGS:
            self._on_settings(flags, stream, payload)
        elif kind == CONTINUATION:
            if self._block is None or self._block[0] != stream:
                raise Broken(PROTOCOL_ERROR, "a continuation of nothing")
            self._block[2].extend(payload)
            if len(self._block[2]) > _MAX_BLOCK:
                raise Broken(PROTOCOL_ERROR, "a header block is too large")
            if flags & _END_HEADERS:
                _, begun_with, block = self._block
                self._block = None
                self._on_block(stream, bytes(block), bool(begun_with & _END_STREAM), events)
        elif kind == PUSH_PROMISE:
            raise Broken(PROTOCOL_ERROR, "clients do not push")

    @staticmethod
    def _unpadded(flags: int, payload: bytes) -> bytes:
        if not flags & _PADDED:
            return payload
        if not payload or payload[0] >= len(payload):
            raise Broken(PROTOCOL_ERROR, "more padding than frame")
        return payload[1 : len(payload) - payload[0]]

    def _on_headers(self, flags: int, stream: int, payload: bytes, events: list[Request | Cancelled]) -> None:
        payload = self._unpadded(flags, payload)
        if flags & _HAS_PRIORITY:
            payload = payload[5:]
        if flags & _END_HEADERS:
            self._on_block(stream, payload, bool(flags & _END_STREAM), events)
        else:
            self._block = (stream, flags, bytearray(payload))

    def _on_block(self, stream: int, block: bytes, ends: bool, events: list[Request | Cancelled]) -> None:
        headers = self._decoder.decode(block)  # whatever becomes of it: the table has to stay in step
        if stream in self._streams:  # trailers
            if not ends:
                raise Broken(PROTOCOL_ERROR, "headers within a request")
            self._complete(stream, events)
            return
        if not stream & 1 or stream <= self._last:
            if stream and stream & 1:
                return  # of a stream that is done with
            raise Broken(PROTOCOL_ERROR, "a bad stream number")
        self._last = stream
        if self._closing or len(self._streams) >= MAX_STREAMS:
            self._reset(stream, REFUSED)
            return
        self._streams[stream] = _Stream(headers, self._peer_window)
        if ends:
            self._complete(stream, events)

    def _on_data(self, flags: int, stream: int, payload: bytes, events: list[Request | Cancelled]) -> None:
        if stream == 0 or stream > self._last:
            raise Broken(PROTOCOL_ERROR, "data for no stream")
        self._received += len(payload)
        if self._received > _CONNECTION_WINDOW:
            raise Broken(FLOW_CONTROL_ERROR, "more data than allowed")
        if self._received > _CONNECTION_WINDOW // 2:
            self._out.append(_frame(WINDOW_UPDATE, 0, 0, _U32.pack(self._received)))
            self._received = 0
        state = self._streams.get(stream)
        if state is None or state.asked:
            return
        piece = self._unpadded(flags, payload)
        state.body += piece
        self._parked += len(piece)
        if len(state.body) > MAX_MESSAGE + _PREFIX.size:
            self.finish(stream, 8, "the message is too large")
            return
        if self._parked > MAX_PARKED:
            self.finish(stream, 8, "too many requests are sent by halves")
            return
        if flags & _END_STREAM:
            self._complete(stream, events)
            return
        state.unannounced += len(payload)
        if state.unannounced > _WINDOW // 2:
            self._out.append(_frame(WINDOW_UPDATE, 0, stream, _U32.pack(state.unannounced)))
            state.unannounced = 0

    def _complete(self, stream: int, events: list[Request | Cancelled]) -> None:
        state = self._streams[stream]
        if state.asked:
            raise Broken(STREAM_CLOSED, "a request goes on after its end")
        state.asked = True
        self._parked -= len(state.body)
        known, headers = self._decoded
        if state.headers is not known:  # the decoder gives the same list for the same block
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in state.headers}
            self._decoded = (state.headers, headers)
        body = state.body
        if headers.get(":method") != "POST" or not headers.get("content-type", "").startswith("application/grpc"):
            self.finish(stream, 3, "not a gRPC request")
            return
        if len(body) < _PREFIX.size:
            self.finish(stream, 13, "a request without message")
            return
        compressed, size = _PREFIX.unpack_from(body)
        if compressed:
            self.finish(stream, 12, "compressed messages are not taken")
        elif len(body) != _PREFIX.size + size:
            self.finish(stream, 13, "a request has one message")
        else:
            events.append(Request(stream, headers.get(":path", ""), headers, bytes(body[_PREFIX.size :])))
            state.body = bytearray()

    def _on_settings(self, flags: int, stream: int, payload: bytes) -> None:
        if stream or len(payload) % 6 or (flags & _ACK and payload):
            raise Broken(FRAME_SIZE_ERROR, "bad SETTINGS")
        if flags & _ACK:
            return
        for key, value in _SETTING.iter_unpack(payload):
            if key == 4:
                if value > 0x7FFFFFFF:
                    raise Broken(FLOW_CONTROL_ERROR, "a window is too large")
                for state in self._streams.values():
                    state.window += value - self._peer_window
                self._peer_window = value
            elif key == 5:
                if not _MAX_FRAME <= value <= 0xFFFFFF:
                    raise Broken(PROTOCOL_ERROR, "a bad frame size")
                self._peer_frame = min(value, 1 << 20)
        self._out.append(_frame(SETTINGS, _ACK, 0))
        self._flush_all()

    def _on_window(self, stream: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Broken(FRAME_SIZE_ERROR, "a bad WINDOW_UPDATE")
        more = _U32.unpack(payload)[0] & 0x7FFFFFFF
        if stream == 0:
            if not more or self._window + more > 0x7FFFFFFF:
                raise Broken(FLOW_CONTROL_ERROR, "a bad window")
            self._window += more
            self._flush_all()
            return
        state = self._streams.get(stream)
        if state is not None:
            if not more or state.window + more > 0x7FFFFFFF:
                self._reset(stream, FLOW_CONTROL_ERROR)
                return
            state.window += more
            self._flush(stream, state)

    # answering

    def send(self, stream: int, message: bytes) -> None:
        """A message of the answer. Does nothing where the stream is gone."""
        state = self._streams.get(stream)
        if state is None:
            return
        if not state.begun:
            state.begun = True
            self._out.append(_frame(HEADERS, _END_HEADERS, stream, _RESPONSE))
        state.queue.append(memoryview(_PREFIX.pack(0, len(message)) + message))
        self._flush(stream, state)

    def answer(self, stream: int, message: bytes) -> None:
        """:meth:`send` of the only message and :meth:`finish`. Does nothing where the stream is gone."""
        state = self._streams.get(stream)
        if state is None:
            return
        size = len(message) + _PREFIX.size
        if state.begun or not state.asked or size > min(self._window, state.window, self._peer_frame):
            self.send(stream, message)
            self.finish(stream)
            return
        self._window -= size
        self._drop(stream)
        begin = _ANSWER.pack(
            0, len(_RESPONSE), HEADERS, _END_HEADERS, stream, _RESPONSE,
            size >> 8, size & 255, DATA, 0, stream, 0, len(message),
        )  # fmt: skip
        end = _END.pack(0, len(_OK), HEADERS, _END_HEADERS | _END_STREAM, stream, _OK)
        self._out += (begin, message, end)

    def waiting(self, stream: int) -> bool:
        """True where the client has to read on before more is worth making."""
        state = self._streams.get(stream)
        return state is not None and bool(state.queue)

    def finish(self, stream: int, code: int = 0, text: str = "") -> None:
        """The status that ends the answer. Does nothing where the stream is gone."""
        state = self._streams.get(stream)
        if state is None:
            return
        if code == 0:
            trailers = _OK
        else:
            told = quote(text[:2000], safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~").encode()
            trailers = literal(b"grpc-status", str(code).encode()) + literal(b"grpc-message", told)
        state.trailers = trailers if state.begun else _RESPONSE + trailers
        self._flush(stream, state)

    def close(self) -> None:
        """Take no new requests; those that are there may be answered."""
        if not self._closing:
            self._closing = True
            self._break(NO_ERROR)

    def _drop(self, stream: int) -> _Stream | None:
        """Forget a stream; what it was, if there was one."""
        state = self._streams.pop(stream, None)
        if state is not None and not state.asked:
            self._parked -= len(state.body)
        return state

    def _reset(self, stream: int, code: int) -> None:
        self._drop(stream)
        self._out.append(_frame(RST_STREAM, 0, stream, _U32.pack(code)))

    def _flush_all(self) -> None:
        for stream, state in list(self._streams.items()):
            if state.queue:
                self._flush(stream, state)

    def _flush(self, stream: int, state: _Stream) -> None:
        queue = state.queue
        while queue:
            allowed = min(self._window, state.window, self._peer_frame)
            if allowed <= 0:
                return
            piece = queue[0]
            if len(piece) > allowed:
                queue[0] = piece[allowed:]
                piece = piece[:allowed]
            else:
                queue.popleft()
            self._window -= len(piece)
            state.window -= len(piece)
            self._out.append(_frame(DATA, 0, stream, piece))
        if state.trailers is not None:
            ends = _frame(HEADERS, _END_HEADERS | _END_STREAM, stream, state.trailers)
            self._out.append(ends)
            self._drop(stream)
            if not state.asked:  # the answer came before the request had ended: it need not be sent on
                self._out.append(_frame(RST_STREAM, 0, stream, _U32.pack(NO_ERROR)))
