"""Archives into and out of a directory that stands for an environment's root, read and written by GNU tar, too."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from weenv.core.errors import FormatError, LimitError
from weenv.environment.archives import pack, unpack
from weenv.environment.rootfs import FileError

ME = os.geteuid(), os.getegid()
Root = tuple[int, Path]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    """A root, as a descriptor and as a path, beside which there is something to reach."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "root" / "area").mkdir(parents=True)
    fd = os.open(tmp_path / "root", os.O_PATH | os.O_DIRECTORY)
    yield fd, tmp_path / "root"
    os.close(fd)
    assert not os.listdir(tmp_path / "outside")


def put(root: Root, data: bytes, path: str = "/area") -> None:
    unpack(root[0], path, io.BytesIO(data), owner=ME, parents=ME)


def archive(*members: tuple[dict[str, object], bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for fields, data in members:
            info = tarfile.TarInfo()
            info.size = len(data)
            for name, value in fields.items():
                setattr(info, name, value)
            made.addfile(info, io.BytesIO(data))
    return out.getvalue()


def names(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as read:
        return read.getnames()


def listing(path: Path) -> list[tuple[str, int, int, float, object]]:
    found = []
    for top, directories, files in os.walk(path):
        for name in sorted(directories + files):
            entry = Path(top, name)
            status = entry.lstat()
            content: object = os.readlink(entry) if entry.is_symlink() else entry.read_bytes() if entry.is_file() else None
            found.append((str(entry.relative_to(path)), status.st_mode, status.st_uid, status.st_mtime, content))
    return sorted(found, key=lambda row: row[0])


@pytest.mark.parametrize("form", ["gnu", "pax", "ustar"])
def test_gnu_tars_archives_arrive_whole_and_ours_leave_whole(root: Root, tmp_path: Path, form: str) -> None:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / "file").write_bytes(os.urandom(70_000))
    (source / "deep" / ("n" * 90)).write_bytes(b"")
    (source / "script").write_text("#!/bin/sh\n")
    (source / "script").chmod(0o755)
    (source / "link").symlink_to("deep/er/file")
    (source / "dangling").symlink_to("/no/such")
    os.link(source / "script", source / "same")
    os.mkfifo(tmp_path / "fifo")
    for number, (top, _, names) in enumerate(os.walk(source, topdown=False)):
        for path in (*(f"{top}/{name}" for name in names), top):
            os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number), follow_symlinks=False)
    data = subprocess.run(["tar", "-C", source, f"--format={form}", "-cf", "-", "."], check=True, stdout=subprocess.PIPE).stdout
    put(root, data, "/new/place")
    there = root[1] / "new" / "place"
    without = [row for row in listing(source) if row[1] & 0o170000 != 0o120000]  # a link's own time is not set
    assert [row for row in listing(there) if row[1] & 0o170000 != 0o120000] == without
    assert os.readlink(there / "link") == "deep/er/file" and os.path.samefile(there / "script", there / "same")
    (tmp_path / "back").mkdir()
    packed = pack(root[0], "/new/place", limit=1 << 20)
    subprocess.run(["tar", "-C", tmp_path / "back", "-xf", "-"], input=packed, check=True)
    assert listing(tmp_path / "back" / "place") == listing(there)


def test_nothing_leads_out(root: Root, tmp_path: Path) -> None:
    outside = str(tmp_path / "outside")
    up = "../" * 20
    put(root, archive(({"name": "/etc/file"}, b"in"), ({"name": "l", "type": tarfile.SYMTYPE, "linkname": outside}, b"")))
    assert (root[1] / "area" / "etc" / "file").read_bytes() == b"in"
    (root[1] / outside.lstrip("/")).mkdir(parents=True)
    put(root, archive(({"name": "l/made"}, b"inside")))  # -> <outside>/made of the environment
    assert (root[1] / outside.lstrip("/") / "made").read_bytes() == b"inside"
    put(root, archive(({"name": "dots"}, b"x")), f"/{up}area")
    assert (root[1] / "area" / "dots").exists()
    for fields in (
        {"name": f"{up}x"}, {"name": "a/../../x"}, {"name": "h", "type": tarfile.LNKTYPE, "linkname": f"{up}etc/passwd"},
        {"name": "p", "type": tarfile.FIFOTYPE}, {"name": "d", "type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3},
    ):  # fmt: skip
        with pytest.raises(FormatError):
            put(root, archive((fields, b"")))
    with pytest.raises(FileError):
        put(root, archive(({"name": "h", "type": tarfile.LNKTYPE, "linkname": "etc/passwd"}, b"")))
    link = root[1] / "area" / "out"
    link.symlink_to("/../../outside")
    (tmp_path / "outside" / "secret").write_text("secret")
    try:
        with pytest.raises(FileError):
            pack(root[0], "/area/out/secret", limit=1 << 20)
    finally:
        (tmp_path / "outside" / "secret").unlink()


def test_what_is_there_is_replaced_and_not_written_through(root: Root) -> None:
    work = root[1] / "area"
    (work / "kept").write_text("kept")
    (work / "link").symlink_to("kept")
    (work / "twin").write_text("old")
    os.link(work / "twin", work / "other")
    put(root, archive(({"name": "link"}, b"new"), ({"name": "twin"}, b"new")))
    assert (work / "kept").read_text() == "kept" and not (work / "link").is_symlink()
    assert (work / "other").read_text() == "old"
    (work / "folder").mkdir()
    with pytest.raises(FileError, match="/area/folder cannot be written: Is a directory"):
        put(root, archive(({"name": "folder"}, b"")))


@pytest.mark.parametrize("cut", [100, 700, 1500])
def test_damage_is_said(root: Root, cut: int) -> None:
    whole = archive(({"name": "a"}, b"x" * 2000), ({"name": "b"}, b""))
    with pytest.raises(FormatError, match="no tar, or damaged"):
        put(root, whole[:cut])
    with pytest.raises(FormatError, match="no tar, or damaged"):
        put(root, b"this is no archive" * 100)
    with pytest.raises(FormatError, match="no tar, or damaged"):
        put(root, archive(({"name": "a", "mtime": 1e30}, b"")))


def test_what_is_too_large_or_not_there_is_said(root: Root) -> None:
    (root[1] / "area" / "large").write_bytes(bytes(100_000))
    with pytest.raises(LimitError, match="more than 50000 bytes"):
        pack(root[0], "/area", limit=50_000)
    with pytest.raises(FileError, match="/area/none cannot be read"):
        pack(root[0], "/area/none", limit=50_000)
    assert names(pack(root[0], "/area/large", limit=1 << 20)) == ["large"]
    os.mkfifo(root[1] / "area" / "pipe")
    assert names(pack(root[0], "area", limit=1 << 20)) == ["area", "area/large"]


def test_a_file_object_is_read_as_it_comes(root: Root) -> None:
    reader, writer = os.pipe()
    with open(reader, "rb") as source, open(writer, "wb") as sink:
        sink.write(archive(({"name": "a"}, b"piped")))
        sink.close()
        unpack(root[0], "/area", source, owner=ME, parents=ME)
    assert (root[1] / "area" / "a").read_bytes() == b"piped"
