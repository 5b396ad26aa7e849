"""NRI's multiplexer: several connections over one stream of bytes (the trunk).

A frame is ``u32be connection | u32be length | payload``; no handshake, no flow control. Source: containerd/nri,
pkg/net/multiplex/{mux,ttrpc}.go, unchanged from v0.6.1 to v0.12.2. Pure.
"""

from __future__ import annotations

import struct

from weenv.core.errors import LimitError

HEADER = struct.Struct(">II")
MAX_PAYLOAD = 10 + (4 << 20)
"""The largest payload of a frame: a ttrpc header and its largest message (mux.go, maxPayloadSize)."""
PLUGIN = 1
"""The connection on which the runtime calls the plugin."""
RUNTIME = 2
"""The connection on which the plugin calls the runtime."""


def frame(connection: int, payload: bytes) -> bytes:
    """One frame. How much a frame may hold for its reader to take it is the caller's business: see ``ttrpc.encode``."""
    assert len(payload) <= MAX_PAYLOAD
    return HEADER.pack(connection, len(payload)) + payload


class Demultiplexer:
    """Cuts the trunk's bytes, however they arrive, into pieces of each connection's own stream.

    Nothing but an unfinished header is kept, so a frame costs no memory here. Pieces of connections other than
    ``connections`` are skipped, as the runtime does; ``skipped`` counts their bytes.
    """

    def __init__(self, connections: frozenset[int] = frozenset({PLUGIN, RUNTIME})) -> None:
        self.connections = connections
        self.skipped = 0
        self._head = b""
        self._connection = 0
        self._left = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """``(connection, piece)`` in order of arrival. Raises LimitError for a frame that is too long."""
        found: list[tuple[int, bytes]] = []
        at, end = 0, len(data)
        while at < end:
            if not self._left:
                upto = at + HEADER.size - len(self._head)
                self._head += data[at:upto]
                at = min(upto, end)
                if len(self._head) < HEADER.size:
                    break
                self._connection, self._left = HEADER.unpack(self._head)
                self._head = b""
                if self._left > MAX_PAYLOAD:
                    raise LimitError(f"a frame of {self._left} bytes; {MAX_PAYLOAD} is the most")
                continue
            piece = data[at : at + self._left]
            at += len(piece)
            self._left -= len(piece)
            if self._connection in self.connections:
                found.append((self._connection, piece))
            else:
                self.skipped += len(piece)
        return found
