"""The FUSE wire structures: sizes against the kernel's header, parsing of anything, round trips."""

from __future__ import annotations

import errno
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.core.errors import FormatError
from weenv.plugin.snapshotter.blobfs import wire


def request(opcode: int, body: bytes = b"", *, unique: int = 2, nodeid: int = 1, extension: int = 0) -> memoryview:
    length = wire.IN_HEADER.size + len(body)
    return memoryview(wire.IN_HEADER.pack(length, opcode, unique, nodeid, 0, 0, 7, extension, 0) + body)


HEADER = Path("/usr/include/linux/fuse.h")
STRUCTS = {
    "fuse_in_header": wire.IN_HEADER.size,
    "fuse_out_header": wire.OUT_HEADER.size,
    "fuse_read_in": wire.READ_IN.size,
    "fuse_init_out": wire.INIT_OUT.size,
    "fuse_attr": wire.ATTR.size,
    "fuse_entry_out": wire.ENTRY_HEAD.size + wire.ATTR.size,
    "fuse_attr_out": wire.ATTR_HEAD.size + wire.ATTR.size,
    "fuse_open_out": wire.OPEN_OUT.size,
    "fuse_statfs_out": wire.STATFS_OUT.size,
    "fuse_interrupt_in": wire.UNIQUE_IN.size,
}


@pytest.mark.skipif(not HEADER.exists() or shutil.which("gcc") is None, reason="needs the kernel's header and a compiler")
def test_structures_have_the_sizes_of_the_kernels_header(tmp_path: Path) -> None:
    source = tmp_path / "sizes.c"
    lines = "".join(f'printf("{name} %zu\\n", sizeof(struct {name}));' for name in STRUCTS)
    source.write_text(f"#include <stdio.h>\n#include <linux/fuse.h>\nint main(void) {{ {lines} return 0; }}\n")
    subprocess.run(["gcc", "-o", tmp_path / "sizes", source], check=True)
    output = subprocess.run([tmp_path / "sizes"], check=True, capture_output=True, text=True).stdout
    assert {name: int(size) for name, size in (line.split() for line in output.splitlines())} == STRUCTS


@pytest.mark.skipif(not HEADER.exists(), reason="needs the kernel's header")
def test_opcodes_and_flags_are_those_of_the_kernels_header() -> None:
    text = HEADER.read_text()
    opcodes = {name: int(value) for name, value in re.findall(r"\bFUSE_(\w+)\s*=\s*(\d+)", text)}
    for name in (
        "LOOKUP", "FORGET", "GETATTR", "OPEN", "READ", "STATFS", "RELEASE", "INIT", "OPENDIR", "READDIR", "RELEASEDIR",
        "INTERRUPT", "DESTROY", "BATCH_FORGET",
    ):  # fmt: skip
        assert getattr(wire, name) == opcodes[name], name
    flags = {name: 1 << int(bit) for name, bit in re.findall(r"#define FUSE_(\w+)\s+\(1(?:U?L*)? << (\d+)\)", text)}
    for name in ("ASYNC_READ", "PARALLEL_DIROPS", "MAX_PAGES", "NO_OPENDIR_SUPPORT", "INIT_EXT"):
        assert getattr(wire, name) == flags[name], name


def test_read_request_is_the_header_and_the_read_arguments() -> None:
    message = request(wire.READ, wire.READ_IN.pack(9, 1 << 40, 131072, 0, 0, 0, 0), unique=6, nodeid=3)
    length, opcode, unique, nodeid, _, _, pid, _, _, fh, offset, size = wire.READ_REQUEST.unpack_from(message)
    assert (length, opcode, unique, nodeid, pid, fh, offset, size) == (80, wire.READ, 6, 3, 7, 9, 1 << 40, 131072)
    assert wire.parse_read(wire.parse(message).body) == (1 << 40, 131072)


@given(st.binary(max_size=200))
def test_parsing_anything_gives_a_request_or_a_format_error(data: bytes) -> None:
    try:
        parsed = wire.parse(memoryview(data))
    except FormatError:
        return
    assert len(parsed.body) <= len(data) - wire.IN_HEADER.size


@given(st.binary(max_size=100))
def test_parsing_any_arguments_gives_a_result_or_a_format_error(data: bytes) -> None:
    for parse in (wire.parse_init, wire.parse_name, wire.parse_read, wire.parse_unique):
        try:
            parse(memoryview(data))
        except FormatError:
            continue


@given(
    opcode=st.integers(0, 2**32 - 1), unique=st.integers(0, 2**64 - 1), nodeid=st.integers(0, 2**64 - 1),
    body=st.binary(max_size=64), units=st.integers(0, 10),
)  # fmt: skip
def test_extensions_at_the_end_are_not_part_of_the_body(opcode: int, unique: int, nodeid: int, body: bytes, units: int) -> None:
    parsed = wire.parse(request(opcode, body + bytes(8 * units), unique=unique, nodeid=nodeid, extension=units))
    assert (parsed.opcode, parsed.unique, parsed.nodeid, bytes(parsed.body)) == (opcode, unique, nodeid, body)


def test_extensions_larger_than_the_message_are_refused() -> None:
    with pytest.raises(FormatError):
        wire.parse(request(wire.READ, bytes(8), extension=2))


@pytest.mark.parametrize("minor", [31, 38, 45, 60])
def test_negotiation_takes_what_is_offered_and_no_more(minor: int) -> None:
    offered = wire.ASYNC_READ | wire.MAX_PAGES | wire.INIT_EXT | wire.HAS_RESEND | 1 << 16 | 1 << 37
    body = wire.INIT_IN.pack(7, minor, 131072, offered & 0xFFFFFFFF) + struct.pack("=I", offered >> 32) + bytes(44)
    offer = wire.parse_init(memoryview(body))
    assert offer == wire.InitIn(7, minor, 131072, offered)
    agreed = wire.negotiate(offer, max_readahead=1 << 20, max_pages=256, max_background=64)
    assert agreed.flags == wire.ASYNC_READ | wire.MAX_PAGES | wire.INIT_EXT | wire.HAS_RESEND
    assert (agreed.minor, agreed.max_readahead, agreed.max_pages) == (min(minor, 45), 131072, 256)
    answer = wire.reply_init(4, agreed)
    assert wire.OUT_HEADER.unpack_from(answer) == (80, 0, 4)
    fields = wire.INIT_OUT.unpack_from(answer, 16)
    assert fields[:4] == (7, agreed.minor, 131072, agreed.flags & 0xFFFFFFFF)
    assert (fields[4], fields[8], fields[10]) == (64, 256, agreed.flags >> 32)


@pytest.mark.parametrize("version", [(7, 30), (6, 40), (8, 1)])
def test_protocols_that_are_not_spoken_are_refused(version: tuple[int, int]) -> None:
    with pytest.raises(FormatError):
        wire.negotiate(wire.InitIn(*version, 0, 0), max_readahead=0, max_pages=256, max_background=64)


def test_answers_and_notifications() -> None:
    assert wire.reply(8, b"abc") == struct.pack("=IiQ", 19, 0, 8) + b"abc"
    assert wire.reply_error(8, errno.EIO) == struct.pack("=IiQ", 16, -5, 8)
    assert wire.notify(wire.NOTIFY_RESEND) == struct.pack("=IiQ", 16, 7, 0)
    attributes = wire.attributes(5, wire.S_IFREG | 0o400, 1025)
    fields = wire.ATTR.unpack(attributes)
    assert (fields[0], fields[1], fields[2], fields[9], fields[10]) == (5, 1025, 3, 0o100400, 1)
    assert len(wire.entry_out(5, attributes)) == 128
    assert len(wire.attr_out(attributes)) == 104


@given(st.lists(st.binary(min_size=1, max_size=70).filter(lambda name: b"\0" not in name), max_size=30), st.integers(0, 600))
def test_a_directory_is_read_whole_in_pieces_of_any_size(names: list[bytes], size: int) -> None:
    entries = [(number + 2, name) for number, name in enumerate(names)]
    found: list[tuple[int, bytes]] = []
    offset = 0
    while piece := wire.directory(entries, offset, size):
        assert len(piece) <= size
        position = 0
        while position < len(piece):
            ino, offset, length, kind = wire.DIRENT.unpack_from(piece, position)
            assert kind == wire.DT_REG
            found.append((ino, piece[position + 24 : position + 24 + length]))
            position += (24 + length + 7) // 8 * 8
    largest = max((24 + len(name) + 7) // 8 * 8 for name in names) if names else 0
    assert found == entries if size >= largest else found == entries[: len(found)]


def test_names_end_at_their_terminator() -> None:
    assert wire.parse_name(memoryview(b"abc\0")) == b"abc"
    assert wire.parse_name(memoryview(b"abc\0def\0")) == b"abc"
    with pytest.raises(FormatError):
        wire.parse_name(memoryview(b"abc"))
