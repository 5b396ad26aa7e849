"""layer/tarscan.py against archives of others: Python's tarfile, GNU tar, bsdtar, dpkg."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tarscan import scan

from weenv.layer.toc import DIRECTORY, FILE, HARDLINK, NO_DATA, SYMLINK


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_what_tarfile_writes_is_what_tarfile_wrote(form: int, data: st.DataObject) -> None:
    wide = form != tarfile.USTAR_FORMAT
    count = data.draw(st.integers(0, 8))
    infos: list[tuple[tarfile.TarInfo, bytes]] = []
    for _ in range(count):
        name = data.draw(st.text("abcü. ", min_size=1, max_size=300 if wide else 80))
        info = tarfile.TarInfo(name)
        info.type = data.draw(
            st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])
        )
        info.mode = data.draw(st.integers(0, 0o7777))
        info.uid = data.draw(st.integers(0, 2**32 - 2 if wide else 0o7777777))
        info.gid = data.draw(st.integers(0, 2**32 - 2 if wide else 0o7777777))
        info.mtime = data.draw(st.integers(0, 2**33 - 1))
        if info.type in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            info.linkname = data.draw(st.text("abcü/.", min_size=1, max_size=300 if wide else 45))
        if info.type == tarfile.CHRTYPE:
            info.devmajor, info.devminor = data.draw(st.integers(0, 4095)), data.draw(st.integers(0, 2**20 - 1))
        content = data.draw(st.binary(max_size=1500)) if info.type == tarfile.REGTYPE else b""
        info.size = len(content)
        infos.append((info, content))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for info, content in infos:
            archive.addfile(info, io.BytesIO(content))
    stream = buffer.getvalue()
    members = scan(stream)
    assert len(members) == count
    for member, (info, content) in zip(members, infos, strict=True):
        assert member.name.rstrip(b"/") == info.name.encode().rstrip(b"/")
        assert (member.mode, member.uid, member.gid) == (info.mode, info.uid, info.gid)
        assert (member.mtime, member.mtime_ns) == (info.mtime, 0)
        assert member.link == info.linkname.encode()
        assert member.rdev == (info.devmajor << 32 | info.devminor)
        assert member.size == len(content)
        assert (stream[member.offset :][: member.size] if content else b"") == content


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one of everything that a user without root can make."""
    root = tmp_path_factory.mktemp("source")
    (root / "dir/sub").mkdir(parents=True)
    (root / "dir/file").write_bytes(b"content\n" * 300)
    (root / "dir/empty").write_bytes(b"")
    (root / ("n" * 200)).write_bytes(b"long name")
    (root / "dir/link").symlink_to("file")
    (root / "dir/longlink").symlink_to("t" * 200)
    os.link(root / "dir/file", root / "dir/sub/hard")
    os.mkfifo(root / "dir/fifo")
    os.chmod(root / "dir/empty", 0o6751)
    os.chmod(root / "dir/sub", 0o1777)
    os.utime(root / "dir/file", ns=(0, 1_600_000_000_123_456_789))
    with open(root / "sparse", "wb") as file:
        for piece in range(0, 8 << 20, 1 << 20):
            file.seek(piece)
            file.write(b"%8d" % piece * 1000)
        file.truncate(9 << 20)
    with open(root / "hole", "wb") as file:
        file.truncate(1 << 20)
    return root


TARS = [
    ["--format=ustar", "--exclude=" + "n" * 200, "--exclude=longlink"],
    ["--format=v7", "--exclude=" + "n" * 200, "--exclude=longlink", "--exclude=fifo"],
    ["--format=gnu"],
    ["--format=oldgnu"],
    ["--format=gnu", "--sparse"],
    ["--format=oldgnu", "--sparse"],
    ["--format=posix"],
    *(["--format=posix", "--sparse", f"--sparse-version={version}"] for version in ("0.0", "0.1", "1.0")),
]


@pytest.mark.parametrize("options", TARS, ids=" ".join)
def test_what_gnu_tar_writes(source: Path, options: list[str]) -> None:
    made = subprocess.run(
        ["tar", *options, "--sort=name", "-b1", "-cf", "-", "-C", str(source), "."], check=True, capture_output=True
    )
    compare_with_disk(made.stdout, source, nanoseconds="posix" in options[0], sparse="--sparse" in options)


def compare_with_disk(stream: bytes, source: Path, *, nanoseconds: bool, sparse: bool = False) -> None:
    """Every member is what the directory has, contents too."""
    seen = set()
    for member in scan(stream, chunk=70_001):
        path = source / os.fsdecode(member.name)
        status = path.lstat()
        seen.add(str(path))
        assert member.mode == (status.st_mode & 0o7777)
        assert (member.uid, member.gid) == (status.st_uid, status.st_gid)
        if nanoseconds:
            assert member.mtime * 10**9 + member.mtime_ns == status.st_mtime_ns
        else:
            assert member.mtime == status.st_mtime_ns // 10**9
        if member.kind == FILE:
            content = path.read_bytes()
            assert member.size == len(content)
            data = bytearray(member.size)
            pieces = member.sparse or ([(0, member.offset, member.size)] if member.offset != NO_DATA else [])
            for at, start, length in pieces:
                data[at : at + length] = stream[start : start + length]
            assert data == content
            if sparse and path.name == "sparse":
                assert member.sparse is not None
                assert len(member.sparse) > 5
        elif member.kind == SYMLINK:
            assert member.link == os.fsencode(path.readlink())
        elif member.kind == HARDLINK:
            assert (source / os.fsdecode(member.link)).samefile(path)
        else:
            assert path.is_dir() if member.kind == DIRECTORY else path.is_fifo()
    assert len(seen) > 8


@pytest.mark.skipif(shutil.which("bsdtar") is None, reason="needs bsdtar")
@pytest.mark.parametrize("form", ["ustar", "pax", "gnutar"])
def test_what_bsdtar_writes(source: Path, form: str) -> None:
    options = ["--exclude", "n" * 200, "--exclude", "longlink"] if form == "ustar" else []
    made = subprocess.run(
        ["bsdtar", f"--format={form}", *options, "-cf", "-", "-C", str(source), "."], check=True, capture_output=True
    )
    compare_with_disk(made.stdout, source, nanoseconds=form == "pax")


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_what_dpkg_writes(source: Path, tmp_path: Path) -> None:
    tree = tmp_path / "package"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(
        "Package: x\nVersion: 1\nArchitecture: all\nMaintainer: nobody <n@example.org>\nDescription: x\n"
    )
    (tree / "usr/share/x").mkdir(parents=True)
    (tree / "usr/share/x/file").write_bytes(b"data")
    (tree / "usr/share/x/link").symlink_to("file")
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-b", str(tree), str(tmp_path / "x.deb")], check=True, capture_output=True
    )
    stream = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(tmp_path / "x.deb")], check=True, capture_output=True).stdout
    names = {member.name: member for member in scan(stream)}
    assert set(names) == {b"./", b"./usr/", b"./usr/share/", b"./usr/share/x/", b"./usr/share/x/file", b"./usr/share/x/link"}
    found = names[b"./usr/share/x/file"]
    assert stream[found.offset : found.offset + found.size] == b"data"
    assert names[b"./usr/share/x/link"].link == b"file"
