"""The JSON of a foreign TOC -> our TOC, with the same tree that containerd's unpack of the layer would leave.

Both formats list the members of the tar in its order, in the same shape (CRFS's), each file's further chunks behind it:
``type`` (reg, dir, symlink, hardlink, char, block, fifo, chunk), ``name``, ``linkName``, ``mode``, ``size``, ``uid``,
``gid``, ``modtime`` (RFC 3339), ``devMajor``, ``devMinor``, ``xattrs`` (name to base64), ``digest``, ``offset``,
``chunkOffset``, ``chunkSize``, ``chunkDigest``; eStargz has ``innerOffset``, zstd:chunked ``chunkType`` ("zeros") and
``endOffset``. So members go through the same tree builder as those of a tar.

What such a TOC does not say: names that are not UTF-8 (Go's JSON puts U+FFFD in their place: refused), and in eStargz
fractions of seconds. Hidden: what eStargz adds to the layer's root for itself, as stargz-snapshotter hides it.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from datetime import UTC, datetime
from typing import Any

from weenv.core.digest import is_digest
from weenv.core.errors import FormatError, LimitError, UnsupportedError
from weenv.layer.check import check_toc
from weenv.layer.foreign.formats import ESTARGZ, TOC_NAME, ForeignLayer, read_toc
from weenv.layer.foreign.stream import Chunk, StreamLayout
from weenv.layer.limits import DEFAULT_LIMITS, Limits
from weenv.layer.pieces import GZIP, UNKNOWN_DIFF_ID, ZSTD
from weenv.layer.resolve import clean
from weenv.layer.tarfields import bounded_time
from weenv.layer.tarscan import Member, show
from weenv.layer.toc import BLOCK, CHAR, DIRECTORY, FIFO, FILE, HARDLINK, NO_DATA, SYMLINK, Toc
from weenv.layer.tree import TreeBuilder
from weenv.layer.zframe import SKIPPABLE_HEADER, Buffer

HIDDEN = frozenset((b".prefetch.landmark", b".no.prefetch.landmark", TOC_NAME))
"""Members of an eStargz layer's root that its own tools see and nobody else."""

_KINDS = {
    "reg": FILE, "dir": DIRECTORY, "symlink": SYMLINK, "hardlink": HARDLINK, "char": CHAR, "block": BLOCK, "fifo": FIFO,
}  # fmt: skip
_WHAT = "TOC"
_MOST = (1 << 63) - 1
_TIME = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9})[0-9]*)?(Z|[+-][0-9]{2}:[0-9]{2})\Z", re.ASCII
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def make_toc(layer: ForeignLayer, data: Buffer, offset: int, limits: Limits = DEFAULT_LIMITS) -> Toc:
    """Our TOC of a layer from its own, which is at ``offset``; ``data`` as ``read_toc`` takes it.

    Its frames have pieces, its diffID is UNKNOWN_DIFF_ID. Raises :class:`FormatError` where the TOC is not the promised one
    (:class:`VerificationError`), is malformed, or says what no unpack would take.
    """
    text = read_toc(layer, data)
    reader = _Reader(hidden=HIDDEN if layer.format == ESTARGZ else frozenset(), limits=limits)
    try:
        raw = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError("it is not JSON", member=_WHAT) from error
    del text
    if isinstance(raw, dict) and raw.get("entries", "") is None:  # Go's empty list
        raw["entries"] = []
    if not isinstance(raw, dict) or not isinstance(entries := raw.get("entries"), list):
        raise FormatError("it has no entries", member=_WHAT)
    if type(raw.get("version")) is not int or raw["version"] != 1:
        raise UnsupportedError("a version other than 1", member=_WHAT)
    if len(entries) > limits.max_entries + limits.max_frames:
        raise LimitError(f"{len(entries)} entries", member=_WHAT)
    del raw
    entries.reverse()
    while entries:  # from the end, so that what was read is not kept
        reader.entry(entries.pop())
    reader.flush()
    columns = reader.tree.finish()
    end = offset if layer.format == ESTARGZ else offset - SKIPPABLE_HEADER
    frames, stream_size = reader.layout.finish(GZIP if layer.format == ESTARGZ else ZSTD, end)
    toc = Toc(
        UNKNOWN_DIFF_ID, stream_size, 0, 0, frames, columns.entries, columns.xattrs, columns.sparse, columns.pool
    )
    check_toc(toc, limits)
    return toc


class _Reader:
    """Entry by entry into tree and layout. A file waits until all of its chunks are there."""

    def __init__(self, *, hidden: frozenset[bytes], limits: Limits) -> None:
        self.tree = TreeBuilder(limits)
        self.layout = StreamLayout(limits)
        self._hidden = hidden
        self._limits = limits
        self._file: Member | None = None
        self._digest: object = None
        self._chunks: list[Chunk] = []
        self._covered = 0
        self._times: dict[str, tuple[int, int]] = {}

    def entry(self, raw: object) -> None:
        """Take the next one."""
        if not isinstance(raw, dict):
            raise FormatError("an entry is not an object", member=_WHAT)
        kind_name = raw.get("type")
        if kind_name == "chunk":
            if self._file is None:
                raise FormatError("a chunk of no file", member=_WHAT)
            self._chunk(raw, self._file)
            return
        self.flush()
        name = _text(raw, "name", "an entry")
        kind = _KINDS.get(kind_name) if isinstance(kind_name, str) else None
        if kind is None:
            raise UnsupportedError(f"a member of type {str(kind_name)[:40]!r}", member=show(name))
        size = _number(raw, "size", name) if kind == FILE else 0
        link = _text(raw, "linkName", show(name)) if kind in (SYMLINK, HARDLINK) else b""
        member = Member(
            name, kind, _signed(raw, "mode", name) & 0o7777, _signed(raw, "uid", name) & 0xFFFF_FFFF,
            _signed(raw, "gid", name) & 0xFFFF_FFFF, *self._time(raw.get("modtime"), name), size, link,
            (_number(raw, "devMajor", name) & 0xFFF) << 32 | _number(raw, "devMinor", name) & 0xF_FFFF
            if kind in (CHAR, BLOCK) else 0,
            _xattrs(raw.get("xattrs"), name), NO_DATA, None,
        )  # fmt: skip
        if size:
            self._file = member
            self._chunk(raw, member)
        else:
            self._add(member)

    def _add(self, member: Member) -> None:
        if self._hidden and clean(member.name) in ([name] for name in self._hidden):
            return
        self.tree.add(member)

    def _chunk(self, raw: dict[str, Any], file: Member) -> None:
        name = file.name
        at = _number(raw, "chunkOffset", name)
        size = _number(raw, "chunkSize", name) or file.size - at
        if at != self._covered or size <= 0 or at + size > file.size:
            raise FormatError("its chunks do not add up", member=show(name))
        self._covered = at + size
        if raw.get("chunkType") == "zeros":
            self._chunks.append(Chunk(at, size))
            return
        if raw.get("chunkType", "") != "":
            raise UnsupportedError(f"a chunk of type {str(raw['chunkType'])[:40]!r}", member=show(name))
        if size > self._limits.max_frame_content:
            raise LimitError(f"a chunk of {size} bytes", member=show(name))
        digest = raw.get("chunkDigest") or (raw.get("digest") if size == file.size else None)
        if not isinstance(digest, str) or not is_digest(digest):
            raise FormatError("a chunk without a sha256 digest", member=show(name))
        self._chunks.append(
            Chunk(at, size, _number(raw, "offset", name), _number(raw, "innerOffset", name), bytes.fromhex(digest[7:]))
        )

    def flush(self) -> None:
        """The file that waits is complete."""
        file = self._file
        if file is None:
            return
        if self._covered != file.size:
            raise FormatError("its chunks do not add up", member=show(file.name))
        offset, sparse = self.layout.add(file.name, file.size, self._chunks)
        self._add(file._replace(offset=offset, sparse=sparse))
        self._file, self._chunks, self._covered = None, [], 0

    def _time(self, text: object, name: bytes) -> tuple[int, int]:
        if text is None or text == "":
            return 0, 0
        if not isinstance(text, str):
            raise FormatError("a time that is no text", member=show(name))
        found = self._times.get(text)
        if found is None:
            match = _TIME.match(text)
            try:
                if match is None:
                    raise ValueError
                moment = datetime.fromisoformat(match[1] + match[3]) - _EPOCH
            except (ValueError, OverflowError):
                raise FormatError(f"not a time: {text[:40]!r}", member=show(name)) from None
            seconds = moment.days * 86_400 + moment.seconds
            found = bounded_time(seconds * 1_000_000_000 + int((match[2] or "").ljust(9, "0")))
            if len(self._times) < 1 << 16:
                self._times[text] = found
        return found


def _text(raw: dict[str, Any], key: str, whose: str) -> bytes:
    value = raw.get(key, "")
    if not isinstance(value, str) or "\0" in value:
        raise FormatError(f"{key} is not text", member=whose)
    if "\ufffd" in value:
        raise UnsupportedError(
            f"{key} {value[:80]!r} was not UTF-8 once, and its TOC has lost what it was", member=whose
        )
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate
        raise FormatError(f"{key} is not text", member=whose) from None


def _number(raw: dict[str, Any], key: str, name: bytes) -> int:
    value = _signed(raw, key, name)
    if value < 0:
        raise FormatError(f"{key} is negative", member=show(name))
    return value


def _signed(raw: dict[str, Any], key: str, name: bytes) -> int:
    value = raw.get(key, 0)
    if type(value) is not int or not -_MOST <= value <= _MOST:
        raise FormatError(f"{key} is not a number", member=show(name))
    return value


def _xattrs(raw: object, name: bytes) -> dict[bytes, bytes] | None:
    if raw is None or raw == {}:
        return None
    if not isinstance(raw, dict):
        raise FormatError("its extended attributes are not an object", member=show(name))
    found: dict[bytes, bytes] = {}
    for key, value in raw.items():
        try:
            found[_text({"xattr": key}, "xattr", show(name))] = base64.b64decode(value, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise FormatError(f"extended attribute {key[:80]!r} is not base64", member=show(name)) from None
    return found
