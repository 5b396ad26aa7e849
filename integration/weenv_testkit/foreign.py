"""Blobs in the formats of others, made of a tar by a small writer of our own: what skopeo and BuildKit would not make, too.

Members are read with the project's own tar scanner, which is compared with containerd elsewhere; the blobs of real
producers are in integration/test_foreign.py.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import zstandard

from weenv.layer.foreign.entries import make_toc
from weenv.layer.foreign.formats import ESTARGZ, FOOTER, ForeignLayer, parse_footer, parse_foreign
from weenv.layer.tarscan import Member, TarScanner
from weenv.layer.toc import BLOCK, CHAR, DIRECTORY, FIFO, FILE, HARDLINK, NO_DATA, SYMLINK, Toc
from weenv.layer.verify import verify_frame
from weenv.plugin.snapshotter import builder

_TYPES = {
    FILE: "reg", DIRECTORY: "dir", SYMLINK: "symlink", HARDLINK: "hardlink", CHAR: "char", BLOCK: "block", FIFO: "fifo",
}  # fmt: skip
PREFIX = "io.github.containers.zstd-chunked."


@dataclass
class Blob:
    """A layer blob and what a manifest says of it; ``entries`` is what its TOC was made of."""

    data: bytes
    annotations: dict[str, str]
    compression: str
    diff_id: str
    entries: list[dict[str, Any]] = field(default_factory=list)

    @property
    def layer(self) -> ForeignLayer:
        """As the snapshotter sees it."""
        digest = "sha256:" + hashlib.sha256(self.data).hexdigest()
        found = parse_foreign(self.annotations, digest, len(self.data), self.compression)
        assert found is not None
        return found

    def toc_bytes(self) -> tuple[int, bytes]:
        """Offset and bytes of the compressed TOC."""
        layer = self.layer
        if layer.format != ESTARGZ:
            return layer.toc_offset, self.data[layer.toc_offset : layer.toc_offset + layer.toc_length]
        offset = parse_footer(self.data[-FOOTER:], len(self.data))
        return offset, self.data[offset:-FOOTER]

    def toc(self, **more: Any) -> Toc:
        """Our TOC of it."""
        offset, data = self.toc_bytes()
        return make_toc(self.layer, data, offset, **more)

    def content(self, toc: Toc) -> bytes:
        """The whole content stream, every frame verified."""
        bounds = toc.frames.compressed_offsets.tolist()
        view = memoryview(self.data)
        return b"".join(
            verify_frame(toc.frames, n, view[bounds[n] : bounds[n + 1]]) for n in range(len(toc.frames))
        )


async def translate(directory: str, layer: ForeignLayer, offset: int, content: int) -> builder.Place:
    """What Builder.translate does, without a process."""
    return await asyncio.to_thread(builder.translate, directory, layer, offset)


def _zstd(data: bytes) -> bytes:
    """A frame as a stream writer makes it: without its content's size, with a checksum."""
    writer = zstandard.ZstdCompressor(level=3, write_content_size=False, write_checksum=True).compressobj()
    return writer.compress(data) + writer.flush()


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, 1, mtime=0)


def time_text(member: Member) -> str:
    """RFC 3339, fractions as Go prints them."""
    text = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=member.mtime)).strftime("%Y-%m-%dT%H:%M:%S")
    return text + (f".{member.mtime_ns:09}".rstrip("0") if member.mtime_ns else "") + "Z"


def entry_of(member: Member) -> dict[str, Any]:
    """A member's entry, without chunks. Raises UnicodeDecodeError for what JSON cannot hold."""
    entry: dict[str, Any] = {"type": _TYPES[member.kind], "name": member.name.decode(), "mode": member.mode}
    entry |= {"uid": member.uid, "gid": member.gid, "modtime": time_text(member), "size": member.size}
    if member.link:
        entry["linkName"] = member.link.decode()
    if member.rdev:
        entry |= {"devMajor": member.rdev >> 32, "devMinor": member.rdev & 0xFFFFFFFF}
    if member.xattrs:
        entry["xattrs"] = {name.decode(): base64.b64encode(value).decode() for name, value in member.xattrs.items()}
    return {key: value for key, value in entry.items() if value not in (0, "")}


def _pack(
    stream: bytes, pack: Callable[[bytes], bytes], chunk: int, share: int, zeros: int
) -> tuple[bytearray, list[dict[str, Any]]]:
    """The compressed tar and its entries. ``share``: chunks in one unit of so many bytes; ``zeros``: runs that are no data."""
    members: list[Member] = []
    scanner = TarScanner(members.append)
    scanner.feed(stream)
    scanner.close()
    out, entries = bytearray(), []
    begin, base = 0, 0  # the open unit's content begins at stream[begin], its bytes at out[base]

    def cut(at: int) -> None:
        nonlocal begin, base
        if at > begin:
            out.extend(pack(stream[begin:at]))
            begin, base = at, len(out)

    for member in members:
        entry = entry_of(member)
        entries.append(entry)
        if member.kind != FILE or not member.size:
            continue
        assert member.sparse is None and member.offset != NO_DATA, "sparse members are not for this writer"
        data = stream[member.offset : member.offset + member.size]
        entry["digest"] = "sha256:" + hashlib.sha256(data).hexdigest()
        at, rows = 0, []
        while at < member.size:
            size = min(chunk, member.size - at)
            run = len(data[at:]) - len(data[at:].lstrip(b"\0")) if zeros else 0
            if zeros and run >= zeros:
                size = run
            elif zeros and (hole := data.find(bytes(zeros), at, at + size)) > at:
                size = hole - at
            place = member.offset + at
            if place - begin >= share or begin == 0:
                cut(place)
            row: dict[str, Any] = {"offset": base, "chunkOffset": at, "chunkSize": size}
            row["chunkDigest"] = "sha256:" + hashlib.sha256(data[at : at + size]).hexdigest()
            if place > begin:
                row["innerOffset"] = place - begin
            if zeros and run >= zeros:
                row["chunkType"] = "zeros"
            rows.append(row)
            at += size
        entry |= rows[0]
        entries += [{"type": "chunk", "name": entry["name"], **row} for row in rows[1:]]
    cut(len(stream))
    return out, entries


def _without_end(stream: bytes) -> bytes:
    """Without the zero blocks that end a tar, and what follows them."""
    scanner = TarScanner(lambda _: None)
    for position in range(0, len(stream), 512):
        scanner.feed(stream[position : position + 512])
        if scanner.ended:
            return stream[: position - 512]
    return stream


def estargz(stream: bytes, *, chunk: int = 4 << 20, share: int = 0, edit: Callable[[list[Any]], object] | None = None) -> Blob:
    """An eStargz blob of a tar stream, its end cut off and written again behind the index. ``edit`` changes the entries."""
    stream = _without_end(stream)
    out, entries = _pack(stream, _gzip, chunk, share, 0)
    if edit is not None:
        edit(entries)
    text = json.dumps({"version": 1, "entries": entries}).encode()
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        info = tarfile.TarInfo("stargz.index.json")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text))
    offset = len(out)
    out += _gzip(tar.getvalue())
    extra = b"SG\x16\x00" + b"%016xSTARGZ" % offset
    out += b"\x1f\x8b\x08\x04" + bytes(5) + b"\xff\x1a\x00" + extra + b"\x01\x00\x00\xff\xff" + bytes(8)
    annotations = {"containerd.io/snapshot/stargz/toc.digest": "sha256:" + hashlib.sha256(text).hexdigest()}
    plain = hashlib.sha256(stream + tar.getvalue()).hexdigest()
    return Blob(bytes(out), annotations, "gzip", "sha256:" + plain, entries)


def zstd_chunked(
    stream: bytes, *, chunk: int = 64 << 10, zeros: int = 1024, edit: Callable[[list[Any]], object] | None = None
) -> Blob:
    """A zstd:chunked blob of a tar stream, without tar-split."""
    out, entries = _pack(stream, _zstd, chunk, 0, zeros)
    if edit is not None:
        edit(entries)
    text = json.dumps({"version": 1, "entries": entries}).encode()
    toc = _zstd(text)
    offset = len(out) + 8
    for payload in (toc, bytes(56) + b"GNUlInUx"):
        out += b"\x50\x2a\x4d\x18" + len(payload).to_bytes(4, "little") + payload
    annotations = {
        PREFIX + "manifest-checksum": "sha256:" + hashlib.sha256(toc).hexdigest(),
        PREFIX + "manifest-position": f"{offset}:{len(toc)}:{len(text)}:1",
    }
    return Blob(bytes(out), annotations, "zstd", "sha256:" + hashlib.sha256(stream).hexdigest(), entries)
