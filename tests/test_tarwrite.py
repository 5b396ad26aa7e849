"""layer/tarwrite.py: what is written is read back the same, by our scanner, Python's tarfile and GNU tar."""

from __future__ import annotations

import io
import subprocess
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.core.errors import FormatError
from weenv.layer.tarscan import Member, TarScanner
from weenv.layer.tarwrite import END, header, padding
from weenv.layer.toc import BLOCK, CHAR, DIRECTORY, FIFO, FILE, HARDLINK, NO_DATA, SYMLINK

names = st.binary(min_size=1, max_size=300).filter(lambda b: b"\0" not in b and not b.endswith(b"/"))
ids = st.one_of(st.integers(0, 0o7777777), st.integers(0, (1 << 32) - 2))


@st.composite
def members(draw: st.DrawFn) -> tuple[Member, bytes]:
    kind = draw(st.sampled_from([FILE, DIRECTORY, SYMLINK, HARDLINK, CHAR, BLOCK, FIFO]))
    content = draw(st.binary(max_size=1500)) if kind == FILE else b""
    link = draw(names) if kind in (SYMLINK, HARDLINK) else b""
    rdev = draw(st.integers(0, 0xFFF)) << 32 | draw(st.integers(0, 0xFFFFF)) if kind in (CHAR, BLOCK) else 0
    xattrs = draw(
        st.dictionaries(
            st.binary(min_size=1, max_size=20).filter(lambda b: not set(b) & set(b"=\0\n")).map(lambda b: b"user." + b),
            st.binary(max_size=80), max_size=3,
        )
    )  # fmt: skip
    return Member(
        draw(names), kind, draw(st.integers(0, 0o7777)), draw(ids), draw(ids), draw(st.integers(0, 9_000_000_000)),
        draw(st.one_of(st.just(0), st.integers(0, 999_999_999))), len(content), link, rdev, xattrs or None, NO_DATA, None,
    ), content  # fmt: skip


@given(st.lists(members(), max_size=5))
def test_the_scanner_reads_what_was_written(wanted: list[tuple[Member, bytes]]) -> None:
    stream = b"".join(header(m) + (content + padding(m.size) if m.kind == FILE else b"") for m, content in wanted) + END
    assert len(stream) % 512 == 0
    found: list[Member] = []
    scanner = TarScanner(found.append)
    scanner.feed(stream)
    scanner.close()
    assert len(found) == len(wanted)
    for (member, content), read in zip(wanted, found, strict=True):
        name = member.name + b"/" if member.kind == DIRECTORY else member.name
        assert read._replace(offset=NO_DATA) == member._replace(name=name)
        if content:
            assert stream[read.offset : read.offset + read.size] == content


def test_tarfile_and_gnu_tar_read_it() -> None:
    wide = "ü" * 70
    member = Member(f"d/{wide}".encode(), FILE, 0o640, 3_000_000, 7, 1_700_000_000, 5, 3, b"", 0, {b"user.k": b"v=\0"}, 0, None)
    link = Member(b"l", SYMLINK, 0o777, 0, 0, 1, 0, 0, b"x" * 150, 0, None, 0, None)
    stream = header(member) + b"abc" + padding(3) + header(link) + END
    with tarfile.open(fileobj=io.BytesIO(stream)) as archive:
        one, two = archive.getmembers()
        assert (one.name, one.uid, one.gid, one.mode) == (f"d/{wide}", 3_000_000, 7, 0o640)
        assert abs(one.mtime - 1_700_000_000) < 1e-6
        assert archive.extractfile(one).read() == b"abc"  # type: ignore[union-attr]
        assert two.linkname == "x" * 150
    listed = subprocess.run(["tar", "tvf", "-", "--numeric-owner"], input=stream, capture_output=True, check=True)
    assert not listed.stderr
    assert b"3000000/7" in listed.stdout and b"l -> " + b"x" * 150 in listed.stdout


@pytest.mark.parametrize(
    "change",
    [{"name": b""}, {"name": b"a\0b"}, {"link": b"a\0"}, {"xattrs": {b"user.a=b": b""}}, {"rdev": 1 << 60, "kind": CHAR}],
)
def test_what_no_tar_can_hold_is_refused(change: dict[str, object]) -> None:
    member = Member(b"a", FILE, 0o644, 0, 0, 0, 0, 0, b"", 0, None, NO_DATA, None)
    with pytest.raises(FormatError):
        header(member._replace(**change))
