"""HPACK (RFC 7541): header blocks to header lists; and literals for the few headers that a gRPC server sends."""

from __future__ import annotations

from collections import deque

MAX_TABLE = 4096
"""Bytes of dynamic table that the peer may use: the default, which is not changed (RFC 7540, section 6.5.2)."""
MAX_HEADERS = 64 << 10
"""Bytes of one decoded header list, counted as the table counts."""
_MEMO = 64
_OVERHEAD = 32

# RFC 7541, appendix A.
_STATIC = tuple(
    (name.encode(), value.encode())
    for name, value in (
        (":authority", ""), (":method", "GET"), (":method", "POST"), (":path", "/"), (":path", "/index.html"),
        (":scheme", "http"), (":scheme", "https"), (":status", "200"), (":status", "204"), (":status", "206"),
        (":status", "304"), (":status", "400"), (":status", "404"), (":status", "500"), ("accept-charset", ""),
        ("accept-encoding", "gzip, deflate"), ("accept-language", ""), ("accept-ranges", ""), ("accept", ""),
        ("access-control-allow-origin", ""), ("age", ""), ("allow", ""), ("authorization", ""), ("cache-control", ""),
        ("content-disposition", ""), ("content-encoding", ""), ("content-language", ""), ("content-length", ""),
        ("content-location", ""), ("content-range", ""), ("content-type", ""), ("cookie", ""), ("date", ""), ("etag", ""),
        ("expect", ""), ("expires", ""), ("from", ""), ("host", ""), ("if-match", ""), ("if-modified-since", ""),
        ("if-none-match", ""), ("if-range", ""), ("if-unmodified-since", ""), ("last-modified", ""), ("link", ""),
        ("location", ""), ("max-forwards", ""), ("proxy-authenticate", ""), ("proxy-authorization", ""), ("range", ""),
        ("referer", ""), ("refresh", ""), ("retry-after", ""), ("server", ""), ("set-cookie", ""),
        ("strict-transport-security", ""), ("transfer-encoding", ""), ("user-agent", ""), ("vary", ""), ("via", ""),
        ("www-authenticate", ""),
    )
)  # fmt: skip

# RFC 7541, appendix B: how many bits the code of each octet has. The code is canonical: codes of one length are handed out
# in the order of the octets, shorter lengths first, so the lengths are all there is to know.
_LENGTHS = bytes.fromhex(
    "0d171c1c1c1c1c1c1c181e1c1c1e1c1c1c1c1c1c1c1c1e1c1c1c1c1c1c1c1c1c060a0a0c0d06080b0a0a080b08060606"
    "0505050606060606060607080f060c0a0d06070707070707070707070707070707070707070707070807080d130d0e06"
    "0f05060506050606060507070606060506070605050607070707070f0b0e0d1c14161414161616171617171717171817"
    "181816171817171717151617161717181615141616171715171616181516171715151615171617171416161617161617"
    "1a1a1413161716191a1a1a1b1b1a181913151a1b1b1a1b1815151a1a1c1b1b1b14181415161515171616191918181a17"
    "1a1b1a1a1b1b1b1b1b1c1b1b1b1b1b1a"
)


class HpackError(Exception):
    """The header block cannot be decoded: the connection cannot go on (RFC 7540, section 4.3)."""


def _codes() -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    code = length = 0
    for octet in sorted(range(256), key=lambda octet: (_LENGTHS[octet], octet)):
        code <<= _LENGTHS[octet] - length
        length = _LENGTHS[octet]
        found[length, code] = octet
        code += 1
    return found


_CODES = _codes()
_LONGEST = max(_LENGTHS)


def huffman_decode(data: bytes) -> bytes:
    """Raises :class:`HpackError` for codes that do not exist and for padding that is none (section 5.2)."""
    out = bytearray()
    code = length = 0
    for octet in data:
        for shift in range(7, -1, -1):
            code = code << 1 | (octet >> shift & 1)
            length += 1
            found = _CODES.get((length, code))
            if found is not None:
                out.append(found)
                code = length = 0
            elif length > _LONGEST:
                raise HpackError("no such Huffman code")
    if length > 7 or code != (1 << length) - 1:
        raise HpackError("a Huffman string ends within a code")
    return bytes(out)


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """An integer with a prefix of ``bits`` (section 5.1): (value, next position)."""
    limit = (1 << bits) - 1
    value = block[at] & limit
    at += 1
    if value < limit:
        return value, at
    shift = 0
    while True:
        octet = block[at]
        at += 1
        value += (octet & 127) << shift
        shift += 7
        if octet < 128:
            return value, at
        if shift > 28:
            raise HpackError("an integer is too large")


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    huffman = block[at] & 128
    length, at = _integer(block, at, 7)
    end = at + length
    if end > len(block):
        raise HpackError("a string runs beyond the block")
    data = block[at:end]
    return (huffman_decode(data) if huffman else data), end


class Decoder:
    """Decodes the header blocks of one connection, in their order."""

    def __init__(self) -> None:
        self._table: deque[tuple[bytes, bytes]] = deque()
        self._size = 0
        self._limit = MAX_TABLE
        self._memo: dict[bytes, list[tuple[bytes, bytes]]] = {}

    def decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        """The header list of one block. Raises :class:`HpackError`."""
        known = self._memo.get(block)
        if known is not None:  # the same bytes mean the same headers until the table changes
            return known
        try:
            headers, changed = self._decode(block)
        except IndexError as error:
            raise HpackError("the header block ends too early") from error
        if changed:
            self._memo.clear()
        elif len(self._memo) < _MEMO:
            self._memo[block] = headers
        return headers

    def _decode(self, block: bytes) -> tuple[list[tuple[bytes, bytes]], bool]:
        headers: list[tuple[bytes, bytes]] = []
        total = at = 0
        changed = False
        while at < len(block):
            octet = block[at]
            if octet & 0x80:
                index, at = _integer(block, at, 7)
                header = self._entry(index)
            elif octet & 0xE0 == 0x20:
                limit, at = _integer(block, at, 5)
                if limit > MAX_TABLE or headers:
                    raise HpackError("a table size update that is not allowed")
                self._limit, changed = limit, True
                self._evict()
                continue
            else:
                indexed = octet & 0x40
                index, at = _integer(block, at, 6 if indexed else 4)
                if index:
                    name = self._entry(index)[0]
                else:
                    name, at = _string(block, at)
                value, at = _string(block, at)
                header = (name, value)
                if indexed:
                    changed = True
                    self._table.appendleft(header)
                    self._size += len(name) + len(value) + _OVERHEAD
                    self._evict()
            headers.append(header)
            total += len(header[0]) + len(header[1]) + _OVERHEAD
            if total > MAX_HEADERS:
                raise HpackError("too many headers")
        return headers, changed

    def _entry(self, index: int) -> tuple[bytes, bytes]:
        if index == 0:
            raise HpackError("index 0")
        if index <= len(_STATIC):
            return _STATIC[index - 1]
        index -= len(_STATIC) + 1
        if index >= len(self._table):
            raise HpackError("no such table entry")
        return self._table[index]

    def _evict(self) -> None:
        while self._size > self._limit:
            name, value = self._table.pop()
            self._size -= len(name) + len(value) + _OVERHEAD


def literal(name: bytes, value: bytes) -> bytes:
    """A header without indexing, name and value as they are (section 6.2.2)."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(value: int) -> bytes:
    if value < 127:
        return bytes((value,))
    out = bytearray((127,))
    value -= 127
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
