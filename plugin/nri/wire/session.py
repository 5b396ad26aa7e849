"""The plugin's end of one connection to the runtime: bytes in, calls and replies out. Pure, holds no clock.

The plugin is the server of connection 1 (the runtime calls it) and the client of connection 2 (it calls the runtime)::

    trunk bytes -> Demultiplexer -> Assembler per connection -> Call (to be answered) | Reply (to a request of ours)

An unanswered call or request is a stream; the peer's streams must be odd and grow, as ttrpc's server asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

from weenv.core.errors import FormatError
from weenv.plugin.nri.wire import mux, ttrpc
from weenv.plugin.nri.wire.ttrpc import Code, Kind

MAX_STREAMS = 64
"""Unanswered calls, and unanswered requests of ours. A runtime calls one plugin at a time, a few with its own bugs."""
_LAST_STREAM = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Call:
    """The runtime asks. ``timeout`` is what it is going to wait, in seconds; 0: it does not say."""

    stream: int
    service: str
    method: str
    payload: bytes
    timeout: float


@dataclass(frozen=True, slots=True)
class Reply:
    """The runtime's answer to request ``stream`` of ours; ``code`` is 0 or an error's."""

    stream: int
    code: int
    message: str
    payload: bytes


class Session:
    """One connection's state. What :meth:`take` returns is to be sent, what :meth:`feed` returns to be acted on."""

    def __init__(self) -> None:
        self._trunk = mux.Demultiplexer()
        self._streams = {mux.PLUGIN: ttrpc.Assembler(), mux.RUNTIME: ttrpc.Assembler()}
        self._out = bytearray()
        self._calls: set[int] = set()
        self._requests: set[int] = set()
        self._last_call = 0
        self._next_request = 1

    @property
    def calls(self) -> int:
        """Calls that are not answered yet."""
        return len(self._calls)

    def take(self) -> bytes:
        """What is to be sent now."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def feed(self, data: bytes) -> list[Call | Reply]:
        """What the peer's bytes ask or answer. Raises FormatError (and LimitError): the connection is of no use then.

        What is wrong with one call only is answered here, as ttrpc's own server does.
        """
        events: list[Call | Reply] = []
        for connection, piece in self._trunk.feed(data):
            for message in self._streams[connection].feed(piece):
                event = self._called(message) if connection == mux.PLUGIN else self._replied(message)
                if event is not None:
                    events.append(event)
        return events

    def _called(self, message: ttrpc.Message) -> Call | None:
        stream = message.stream
        if message.kind == Kind.DATA:
            return self._refuse(stream, Code.INVALID_ARGUMENT, "no stream is open")
        if message.kind != Kind.REQUEST:
            raise FormatError("a response on the connection that only carries requests")
        if stream % 2 != 1 or stream <= self._last_call:
            return self._refuse(stream, Code.INVALID_ARGUMENT, "stream ids must be odd and grow")
        self._last_call = stream
        if message.flags:
            return self._refuse(stream, Code.UNIMPLEMENTED, "only unary calls are served")
        if len(self._calls) >= MAX_STREAMS:
            return self._refuse(stream, Code.RESOURCE_EXHAUSTED, f"{MAX_STREAMS} calls are unanswered")
        try:
            fields = ttrpc.read("Request", message.data)
        except FormatError as error:
            return self._refuse(stream, Code.INVALID_ARGUMENT, str(error))
        self._calls.add(stream)
        timeout = max(0, fields.get("timeout_nano", 0)) / 1e9
        return Call(stream, fields.get("service", ""), fields.get("method", ""), fields.get("payload", b""), timeout)

    def _refuse(self, stream: int, code: Code, text: str) -> Call | None:
        """Answer with an error here; no call to pass on."""
        self._out += ttrpc.encode(mux.PLUGIN, stream, Kind.RESPONSE, ttrpc.response(b"", code, text))
        return None

    def _replied(self, message: ttrpc.Message) -> Reply | None:
        if message.kind != Kind.RESPONSE:
            raise FormatError("a request on the connection that only carries responses")
        if message.stream not in self._requests:
            return None  # given up meanwhile, or never made
        self._requests.discard(message.stream)
        fields = ttrpc.read("Response", message.data)
        status = fields.get("status", {})
        return Reply(message.stream, status.get("code", 0), status.get("message", ""), fields.get("payload", b""))

    def answer(self, call: Call, payload: bytes) -> None:
        """Answer a call. Raises LimitError where the payload is too large; the call is unanswered then."""
        self._answer(call, ttrpc.response(payload))

    def fail(self, call: Call, code: Code, text: str) -> None:
        """Answer a call with an error; ``text`` is cut at 1000 characters."""
        self._answer(call, ttrpc.response(b"", code, text[:1000]))

    def _answer(self, call: Call, data: bytes) -> None:
        if call.stream in self._calls:
            self._out += ttrpc.encode(mux.PLUGIN, call.stream, Kind.RESPONSE, data)
            self._calls.discard(call.stream)

    def request(self, service: str, method: str, payload: bytes, timeout: float = 0.0) -> int:
        """Ask the runtime; the stream that its Reply will have. Raises LimitError; FormatError where too many are open."""
        if len(self._requests) >= MAX_STREAMS or self._next_request > _LAST_STREAM:
            raise FormatError(f"{len(self._requests)} requests are unanswered by the runtime")
        stream = self._next_request
        self._out += ttrpc.encode(mux.RUNTIME, stream, Kind.REQUEST, ttrpc.request(service, method, payload, timeout))
        self._next_request += 2
        self._requests.add(stream)
        return stream

    def forget(self, stream: int) -> None:
        """Nobody waits for this request's reply any more."""
        self._requests.discard(stream)
