"""One suite for both planes: what a mounted layer is, compared with what GNU tar extracts of the same stream.

A plane is the kernel's EROFS, or a process that serves the tree by pyfuse3; nothing above may notice which.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from weenv.core.errors import FormatError, WeenvError
from weenv.layer.erofs import DirAttributes
from weenv.plugin.snapshotter import mounts
from weenv.plugin.snapshotter.cache.present import is_complete, progress
from weenv.plugin.snapshotter.planes.base import COMPLETE, LAZY, Attachment, variant_of
from weenv.plugin.snapshotter.planes.fuse import Process, serving
from weenv.plugin.snapshotter.planes.fuseserver import start_time
from weenv_testkit import corpus
from weenv_testkit.blobfsproc import drop_caches
from weenv_testkit.images import Member, write_tar, xattr
from weenv_testkit.layers import make_tar
from weenv_testkit.planerig import PLANES, Rig, rigged
from weenv_testkit.procs import end_processes, mounts_under, open_fds, wait_until
from weenv_testkit.richtree import extract, make_rich_tree
from weenv_testkit.trees import differences, read_tree

pytestmark = pytest.mark.root
_counter = itertools.count()
LARGE = 6_000_000


@pytest.fixture(scope="module", params=PLANES)
def rig(request: pytest.FixtureRequest, workdir: str) -> Iterator[Rig]:
    path = tempfile.mkdtemp(prefix="p", dir=workdir)
    with rigged(request.param, path) as made:
        yield made
    assert mounts_under(path) == []
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def rich(home: str) -> Iterator[tuple[str, str]]:
    """(what GNU tar extracts, the tar) of a tree with everything that GNU tar can carry."""
    source, tar, extracted = (os.path.join(home, name) for name in ("rich-source", "rich.tar", "rich"))
    make_rich_tree(source)
    every = ["--xattrs", "--xattrs-include=*", "--numeric-owner"]
    argv = ["tar", "--create", "--format=posix", "--sort=name", *every, f"--file={tar}", "--directory", source, "."]
    subprocess.run(argv, check=True)
    extract(tar, extracted, "--xattrs", "--xattrs-include=*")
    yield extracted, tar
    for path in (source, extracted):
        shutil.rmtree(path)
    os.unlink(tar)


def tar_of(here: str, members: list[dict[str, object]]) -> str:
    path = f"{here}/{next(_counter)}.tar"
    Path(path).write_bytes(make_tar(members))
    return path


@pytest.fixture(scope="module")
def large(home: str) -> tuple[str, bytes]:
    """A tar of one large file and one small one; the large one's content."""
    content = random.Random(5).randbytes(LARGE)
    path = os.path.join(home, "large.tar")
    Path(path).write_bytes(make_tar([{"name": "large", "data": content}, {"name": "small", "data": b"small\n"}]))
    return path, content


# -- the tree


def test_the_tree_is_what_gnu_tar_extracts(rig: Rig, rich: tuple[str, str]) -> None:
    extracted, tar = rich
    expected = read_tree(extracted)
    for path, entry in expected.items():  # as containerd's unpack: no trusted.*, no time before 1970
        kept = tuple(pair for pair in entry.xattrs if not pair[0].startswith(b"trusted."))
        expected[path] = replace(entry, xattrs=kept, mtime_ns=entry.mtime_ns if entry.mtime_ns >= 0 else 0)
    digest = rig.add(tar)
    with rig.attached(digest) as tree:
        actual = read_tree(tree)
        roots = expected.pop(b"."), actual.pop(b".")  # the unpack leaves the root's attributes alone
        assert roots[0].nlink == roots[1].nlink
        assert differences(expected, actual) == []
        for folder, folders, names in os.walk(os.fsencode(tree)):  # lookups: each name found, its neighbours not
            for name in folders + names:
                os.lstat(folder + b"/" + name)
            for name in (b"", *names[:20]):
                for _ in range(2):  # the second time from what the kernel remembers
                    with pytest.raises(FileNotFoundError):
                        os.lstat(folder + b"/" + name[:200] + b"\x01")
        drop_caches()
        again = read_tree(tree)
        del again[b"."]
        assert again == actual
        assert {name for name in os.listdir(os.fsencode(tree) + b"/files") if b"\xff" in name} == {b"\xff\xfe"}


def test_real_layers(rig: Rig, here: str) -> None:
    """The smallest of Debian's packages, PyPI's and npm's archives that the kit has."""
    for tar in sorted([*corpus.debian(), *corpus.pypi(), *corpus.npm()], key=os.path.getsize)[:4]:
        extracted = f"{here}/{next(_counter)}.x"
        extract(tar, extracted)
        explicit = corpus.explicit_directories(tar)
        expected = read_tree(extracted)
        implied = [path for path in expected if path not in explicit]
        with rig.attached(rig.add(tar)) as tree:
            actual = read_tree(tree)
            for one in (expected, actual):
                one.pop(b".")
            assert differences(expected, actual, times_free=implied) == [], tar


@pytest.mark.parametrize("form", [form for form in corpus.SPARSE_FORMS if form != "gnu-names"])
def test_sparse_files(rig: Rig, here: str, form: str) -> None:
    tar = corpus.sparse(here)[form]
    extract(tar, f"{here}/x")
    with rig.attached(rig.add(tar)) as tree:
        assert differences(read_tree(f"{here}/x/sparse"), read_tree(f"{tree}/sparse")) == []


def test_an_empty_layer(rig: Rig, here: str) -> None:
    with rig.attached(rig.add(tar_of(here, []))) as tree:
        assert os.listdir(tree) == []
        assert os.stat(tree).st_nlink == 2
        assert stat.S_IMODE(os.stat(tree).st_mode) == 0o755


def test_links_are_one_inode_however_they_are_reached(rig: Rig, here: str) -> None:
    members = [{"name": "a", "data": b"x" * 700}, *({"name": f"d{n}/b", "type": b"1", "linkname": "a"} for n in range(3))]
    with rig.attached(rig.add(tar_of(here, members))) as tree:
        found = [os.stat(f"{tree}/{name}") for name in ("d1/b", "a", "d0/b", "d2/b")]
        assert {(s.st_ino, s.st_dev, s.st_nlink) for s in found} == {(found[0].st_ino, found[0].st_dev, 4)}
        assert {entry.inode() for entry in os.scandir(f"{tree}/d0")} == {found[0].st_ino}


def test_variants_have_the_attributes_they_were_given(rig: Rig, here: str) -> None:
    digest = rig.add(tar_of(here, [{"name": "a/b/f", "data": b"1"}]))
    facts = rig.run(rig.plane.prepare(digest, variant_of({})))
    entry = next(item.entry for item in facts.implied if item.path == b"a")
    plain = DirAttributes(0o2710, 7, 8, 99, 5)
    marked = replace(plain, xattrs=((b"user.x", b"y"),))
    for wanted in (plain, marked):
        with rig.attached(digest, variant=variant_of({entry: wanted})) as tree:
            found = os.stat(f"{tree}/a")
            assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o2710, 7, 8)
            assert found.st_mtime_ns == 99 * 10**9 + 5
            assert os.listxattr(f"{tree}/a") == (["user.x"] if wanted is marked else [])
            assert Path(tree, "a/b/f").read_text() == "1"


def test_statfs(rig: Rig, large: tuple[str, bytes]) -> None:
    with rig.attached(rig.add(large[0])) as tree:
        found = os.statvfs(tree)
    assert (found.f_bsize, found.f_frsize, found.f_namemax, found.f_bfree, found.f_bavail) == (512, 512, 255, 0, 0)
    assert found.f_blocks * 512 >= os.path.getsize(large[0])
    assert found.f_files == -1  # no limit, as Python shows it
    assert found.f_flag & os.ST_RDONLY
    assert not found.f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)


def test_extended_attributes_one_by_one(rig: Rig, here: str) -> None:
    tar = write_tar(
        f"{here}/x.tar",
        [Member("f", data=b"x", pax=xattr("user.a", "1") | xattr("security.capability", corpus.CAPABILITY)), Member("plain")],
    )
    with rig.attached(rig.add(tar)) as tree:
        assert sorted(os.listxattr(f"{tree}/f")) == ["security.capability", "user.a"]
        assert os.getxattr(f"{tree}/f", "user.a") == b"1"
        assert os.listxattr(f"{tree}/plain") == []
        for name in ("user.b", "trusted.overlay.opaque", "security.capability"):
            with pytest.raises(OSError, match="No data available"):
                os.getxattr(f"{tree}/plain", name)


# -- directories


class _Dirent(ctypes.Structure):
    _fields_ = [
        ("d_ino", ctypes.c_uint64), ("d_off", ctypes.c_int64), ("d_reclen", ctypes.c_ushort), ("d_type", ctypes.c_ubyte),
        ("d_name", ctypes.c_char * 256),
    ]  # fmt: skip


def test_a_directory_of_50_000_names_can_be_read_from_anywhere(rig: Rig, here: str) -> None:
    names = [f"name-{number:05d}-{'x' * (number % 60)}" for number in range(50_000)]
    digest = rig.add(tar_of(here, [{"name": f"many/{name}"} for name in names]))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.opendir.restype = ctypes.c_void_p
    libc.readdir64.restype = ctypes.POINTER(_Dirent)
    libc.telldir.restype = ctypes.c_long
    with rig.attached(digest) as tree:
        begin = sorted(os.listdir(f"{tree}/many"))
        assert begin == sorted(names)
        folder = ctypes.c_void_p(libc.opendir(os.fsencode(f"{tree}/many")))
        try:
            seen: list[tuple[int, bytes, int]] = []
            while True:
                position = libc.telldir(folder)
                entry = libc.readdir64(folder)
                if not entry:
                    break
                seen.append((position, entry.contents.d_name, entry.contents.d_ino))
            assert [name for _, name, _ in seen if name not in (b".", b"..")] == [os.fsencode(name) for name in sorted(names)]
            assert {name for _, name, _ in seen} >= {b".", b".."}
            assert len({position for position, _, _ in seen}) == len(seen)
            for position, name, inode in random.Random(3).sample(seen, 200):
                libc.seekdir(folder, ctypes.c_long(position))
                entry = libc.readdir64(folder)
                assert (entry.contents.d_name, entry.contents.d_ino) == (name, inode)
        finally:
            libc.closedir(folder)
        assert os.stat(f"{tree}/many/{names[77]}").st_ino == next(i for _, n, i in seen if n == os.fsencode(names[77]))


# -- reading


def test_reads_at_and_past_the_end(rig: Rig, large: tuple[str, bytes]) -> None:
    path, content = large
    with rig.attached(rig.add(path)) as tree:
        fd = os.open(f"{tree}/large", os.O_RDONLY)
        try:
            assert os.pread(fd, 100, LARGE) == b""
            assert os.pread(fd, 100, 1 << 40) == b""
            assert os.pread(fd, 100, LARGE - 10) == content[-10:]
            assert os.pread(fd, 5000, 4095) == content[4095:9095]
            assert os.lseek(fd, 0, os.SEEK_END) == LARGE
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
                assert mapped[LARGE - 4097 :] == content[-4097:]
        finally:
            os.close(fd)
        assert Path(tree, "small").read_bytes() == b"small\n"
        for flags in (os.O_WRONLY, os.O_RDWR):
            with pytest.raises(OSError, match="Read-only"):
                os.open(f"{tree}/small", flags)
        with pytest.raises(OSError, match="Read-only"):
            os.unlink(f"{tree}/small")


def test_many_readers_at_once(rig: Rig, here: str) -> None:
    content = random.Random(8).randbytes(LARGE)
    digest = rig.add(tar_of(here, [{"name": "f", "data": content}]), target=64 << 10)
    with rig.attached(digest) as tree:

        def read(seed: int) -> bool:
            rng = random.Random(seed)
            with open(f"{tree}/f", "rb", buffering=0) as file:
                for _ in range(60):
                    offset, length = rng.randrange(LARGE), rng.choice([1, 500, 4096, 70_000, 300_000])
                    if os.pread(file.fileno(), length, offset) != content[offset : offset + length]:
                        return False
            return True

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(read, range(8)))


def test_holes_are_zeros_that_nobody_fetches(rig: Rig, here: str) -> None:
    tar = corpus.sparse(here)["pax-1.0"]
    digest = rig.add(tar)
    extract(tar, f"{here}/x")
    with rig.attached(digest) as tree:
        holed = next(p for p in Path(here, "x").rglob("*") if p.is_file() and p.stat().st_blocks * 512 < p.stat().st_size // 2)
        content = holed.read_bytes()
        fd = os.open(Path(tree, holed.relative_to(f"{here}/x")), os.O_RDONLY)
        try:
            where = content.find(bytes(8192))
            assert where >= 0
            assert os.pread(fd, 4096, -(-where // 4096) * 4096) == bytes(4096)
            assert os.pread(fd, len(content), 0) == content
        finally:
            os.close(fd)


def test_programs_run_from_it(rig: Rig, here: str) -> None:
    members = [{"name": "bin/true", "data": Path("/bin/true").read_bytes(), "mode": 0o755},
               {"name": "bin/script", "data": b"#!/bin/sh\necho ran $1\n", "mode": 0o755},
               {"name": "bin/no", "data": b"#!/bin/sh\n", "mode": 0o644}]  # fmt: skip
    with rig.attached(rig.add(tar_of(here, members))) as tree:
        subprocess.run([f"{tree}/bin/true"], check=True)
        assert subprocess.run([f"{tree}/bin/script", "x"], check=True, capture_output=True).stdout == b"ran x\n"
        with pytest.raises(PermissionError):
            subprocess.run([f"{tree}/bin/no"], check=True)


def test_the_kernel_checks_permissions_for_everybody(rig: Rig, here: str) -> None:
    members = [{"name": "private", "type": b"5", "mode": 0o700}, {"name": "private/f", "data": b"1"},
               {"name": "mine", "data": b"2", "uid": 1234, "mode": 0o400}, {"name": "all", "data": b"3"}]  # fmt: skip
    with rig.attached(rig.add(tar_of(here, members))) as tree:
        os.chmod(rig.root, 0o755)

        def as_other(*argv: str) -> tuple[int, bytes]:
            done = subprocess.run(
                ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all", *argv],
                capture_output=True, check=False, cwd="/",
            )  # fmt: skip
            return done.returncode, done.stdout

        for folder in (rig.root, os.path.dirname(rig.root)):
            os.chmod(folder, 0o755)
        assert as_other("cat", f"{tree}/all") == (0, b"3")
        assert as_other("cat", f"{tree}/mine") == (0, b"2")
        assert as_other("cat", f"{tree}/private/f")[0] == 1
        assert as_other("test", "-w", f"{tree}/mine")[0] == 1


# -- below overlayfs


@contextmanager
def overlay(here: str, lowers: list[str]) -> Iterator[str]:
    for name in ("upper", "work", "merged"):
        os.mkdir(os.path.join(here, name))
    target = os.path.join(here, "merged")
    mounts.mount(
        "overlay", target, "overlay", 0,
        f"lowerdir={':'.join(lowers)},upperdir={here}/upper,workdir={here}/work,index=off",
    )  # fmt: skip
    try:
        yield target
    finally:
        mounts.unmount(target)


def test_whiteouts_and_opaque_directories_hide_what_is_below(rig: Rig, here: str) -> None:
    base = tar_of(here, [{"name": f"{folder}/{name}", "data": name.encode()} for folder in "abc" for name in ("one", "two")])
    top = tar_of(
        here,
        [
            {"name": "a/.wh.one"}, {"name": "b", "type": b"5", "mode": 0o755}, {"name": "b/.wh..wh..opq"},
            {"name": "b/three", "data": b"3"}, {"name": ".wh.c"},
        ],
    )  # fmt: skip
    with rig.attached(rig.add(base)) as lower, rig.attached(rig.add(top)) as upper:
        assert os.stat(f"{upper}/a/one").st_rdev == 0
        assert os.getxattr(f"{upper}/b", "trusted.overlay.opaque") == b"y"
        with overlay(here, [upper, lower]) as merged:
            assert sorted(os.listdir(merged)) == ["a", "b"]
            assert os.listdir(f"{merged}/a") == ["two"]
            assert os.listdir(f"{merged}/b") == ["three"]
            with open(f"{merged}/a/two", "ab") as file:  # copied up
                file.write(b"!")
            assert Path(merged, "a/two").read_bytes() == b"two!"
            assert Path(lower, "a/two").read_bytes() == b"two"
            os.rename(f"{merged}/b/three", f"{merged}/a/four")
            shutil.rmtree(f"{merged}/b")
            os.mkdir(f"{merged}/c")
            assert os.listdir(f"{merged}/c") == []


def test_copying_up_keeps_everything(rig: Rig, here: str, rich: tuple[str, str]) -> None:
    with rig.attached(rig.add(rich[1])) as lower, overlay(here, [lower]) as merged:
        expected = read_tree(f"{lower}/xattrs")
        for folder, _, names in os.walk(f"{merged}/xattrs"):
            for name in names:
                with open(os.path.join(folder, name), "ab"):
                    pass
        assert differences(expected, read_tree(f"{merged}/xattrs"), ignore=("nlink",)) == []


# -- the cache


def test_one_cache_for_both(workdir: str, large: tuple[str, bytes]) -> None:
    """A frame that was fetched for one plane is there for the other, in either order."""
    path, content = large
    for first, second in ((PLANES[0], PLANES[-1]), (PLANES[-1], PLANES[0])):
        root = tempfile.mkdtemp(prefix="o", dir=workdir)
        blob = f"{root}.blob"
        with rigged(first, root) as rig:
            digest = rig.add(path, source=blob)
            with rig.attached(digest) as tree:
                with open(f"{tree}/large", "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                    assert os.pread(file.fileno(), 4096, 3_000_000) == content[3_000_000:3_004_096]
                directory = rig.directory(digest)
                wait_until("the frame to be stored", lambda d=directory: progress(d)[0] > 0)
        had = progress(directory)[0]
        assert 0 < had < LARGE
        os.unlink(blob)
        with rigged(second, root) as rig, rig.attached(digest) as tree:
            fd = os.open(f"{tree}/large", os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            assert os.pread(fd, 4096, 3_000_000) == content[3_000_000:3_004_096]
            os.close(fd)
        assert progress(directory)[0] == had
        shutil.rmtree(root)


def test_a_complete_layer_needs_no_blobfs(workdir: str, large: tuple[str, bytes]) -> None:
    for name in PLANES:
        root = tempfile.mkdtemp(prefix="c", dir=workdir)
        with rigged(name, root, fill={"quiet": 0.0, "cpu_busy": 1.0, "cpu_pressure": 1.0}) as rig:
            digest = rig.add(large[0])
            target = rig.attach(digest)
            assert Path(target, "large").read_bytes() == large[1]
            wait_until("the layer to be checked", lambda r=rig, d=digest: is_complete(r.directory(d)))
            again = f"{root}/again"
            os.mkdir(again)
            assert rig.attachment(digest, again).mode == COMPLETE
            rig.blobfs.end(signal.SIGKILL)
            drop_caches()
            assert Path(again, "large").read_bytes() == large[1]
            if name == "fuse":  # and one that was attached before it was complete
                assert Path(target, "large").read_bytes() == large[1]
            rig.blobfs.start()
            for mounted in (target, again):
                rig.plane.detach(mounted)
        shutil.rmtree(root)


# -- life and death of a mount


def test_replacing_a_mount_keeps_who_uses_the_old_one(rig: Rig, large: tuple[str, bytes]) -> None:
    path, content = large
    digest = rig.add(path)
    target = rig.attach(digest)
    old = os.open(f"{target}/large", os.O_RDONLY)
    rig.attach(digest, target, replace=True)
    assert Path(target, "small").read_bytes() == b"small\n"
    drop_caches()
    assert os.pread(old, 70_000, 5_000_000) == content[5_000_000:5_070_000]
    os.close(old)
    rig.plane.detach(target)
    assert os.listdir(target) == []
    os.rmdir(target)


def test_unmounting_while_it_is_used(rig: Rig, large: tuple[str, bytes]) -> None:
    path, content = large
    target = rig.attach(rig.add(path))
    server = rig.server(target) if rig.name == "fuse" else 0
    fd = os.open(f"{target}/large", os.O_RDONLY)
    rig.plane.detach(target)
    rig.plane.detach(target)  # nothing there is no error
    assert os.listdir(target) == []
    drop_caches()
    assert os.pread(fd, 70_000, 2_000_000) == content[2_000_000:2_070_000]
    os.close(fd)
    if server:
        wait_until("the server to end", lambda: not os.path.exists(f"/proc/{server}"))
    os.rmdir(target)


def test_removing_a_layer_that_is_still_read(rig: Rig, here: str) -> None:
    content = random.Random(9).randbytes(2_000_000)
    digest = rig.add(tar_of(here, [{"name": "f", "data": content}]))
    target = rig.attach(digest)
    fd = os.open(f"{target}/f", os.O_RDONLY)
    assert os.pread(fd, 100, 0) == content[:100]
    rig.plane.detach(target)
    gone = rig.dirs.discard(digest)
    assert gone is not None
    assert os.pread(fd, 2_000_000, 0) == content
    os.close(fd)
    shutil.rmtree(gone)
    os.rmdir(target)


def test_the_next_snapshotter_takes_the_mount_over(rig: Rig, large: tuple[str, bytes]) -> None:
    digest = rig.add(large[0])
    target = f"{rig.root}/taken"
    os.mkdir(target)
    attachment = rig.attachment(digest, target)
    rig.restart_plane()

    async def usable(name: str, found: Attachment) -> bool:
        return rig.plane.usable(name, rig.entry(target), found)

    assert rig.run(usable(digest, attachment))
    assert not rig.run(usable("sha256:" + "0" * 64, attachment))
    other = replace(rig.entry(target), fstype="ext4")
    assert not rig.plane.usable(digest, other, attachment)
    assert Path(target, "small").read_bytes() == b"small\n"
    rig.plane.detach(target)
    os.rmdir(target)


def test_a_damaged_image_is_built_again(rig: Rig, here: str) -> None:
    digest = rig.add(tar_of(here, [{"name": "f", "data": b"1"}]))
    with rig.attached(digest):
        pass
    image = Path(rig.directory(digest), "meta.erofs")
    for damage in (b"", b"x" * 4096, image.read_bytes()[:1024] + bytes(1024), bytes(len(image.read_bytes()))):
        image.unlink()
        image.write_bytes(damage)
        with rig.attached(digest) as tree:
            assert Path(tree, "f").read_text() == "1"


def test_what_cannot_be_represented_is_refused(rig: Rig, here: str) -> None:
    """The checks come before either plane, and nothing is left mounted."""
    before = mounts_under(rig.root)
    digest = rig.add(tar_of(here, [{"name": "f", "data": b"1" * 1000}]))
    toc = Path(rig.directory(digest), "toc")
    good = toc.read_bytes()
    for at in (0, 4, len(good) // 2, len(good) - 1):
        toc.write_bytes(good[:at] + bytes([good[at] ^ 0x40]) + good[at + 1 :])
        with pytest.raises(FormatError):
            rig.attach(digest, f"{here}/m")
    assert mounts_under(rig.root) == before
    assert mounts_under(here) == []


def test_a_layer_without_a_directory_is_an_error(rig: Rig, here: str) -> None:
    with pytest.raises((WeenvError, OSError)):
        rig.attach("sha256:" + "1" * 64, f"{here}/m")
    assert mounts_under(here) == []


# -- the FUSE plane's processes


@pytest.fixture(scope="module")
def processes(workdir: str) -> Iterator[Rig]:
    path = tempfile.mkdtemp(prefix="f", dir=workdir)
    with rigged("fuse", path) as made:
        yield made
    shutil.rmtree(path)


@pytest.fixture
def fuse(processes: Rig) -> Iterator[Rig]:
    """The FUSE plane with nothing mounted."""
    processes.lost.clear()
    yield processes
    for target in mounts_under(processes.root):
        if target != processes.blobfs.config.mountpoint:
            processes.plane.detach(target)


RESENDS = tuple(int(number) for number in os.uname().release.split(".")[:2]) >= (6, 9)
"""The kernel delivers again what a server that was killed had read (FUSE_NOTIFY_RESEND)."""


def killed(fuse: Rig, target: str) -> int:
    """Kill who serves a mount, and wait for the next one; its process id, 0 where there is none."""
    end_processes([fuse.server(target)])
    return fuse.server(target)


def test_another_goes_on_where_a_server_is_killed(fuse: Rig, large: tuple[str, bytes], here: str) -> None:
    content = large[1]
    names = [f"d/{number:03d}" for number in range(300)]
    tar = tar_of(here, [*({"name": name} for name in names), {"name": "f", "data": content}])
    digest = fuse.add(tar)
    target = fuse.attach(digest)
    fd, folder = os.open(f"{target}/f", os.O_RDONLY), os.scandir(f"{target}/d")
    assert os.pread(fd, 100, 0) == content[:100]
    begun = [next(folder) for _ in range(3)]
    seen = {fuse.server(target)}
    for number, entry in enumerate(begun):
        seen.add(killed(fuse, target))
        drop_caches()
        at = 4_000_000 + number * 300_000
        assert os.pread(fd, 100, at) == content[at : at + 100]
        assert os.lstat(entry.path).st_ino == entry.inode()
    assert len(seen) == 4 and 0 not in seen
    assert len(list(folder)) == 297
    folder.close()
    os.close(fd)
    extract(tar, f"{here}/x")
    assert differences(read_tree(f"{here}/x"), read_tree(target), times_free=[b".", b"d"]) == []
    assert target not in fuse.lost
    fuse.restart_plane()  # mountinfo names the first one, which is no more

    async def usable() -> bool:
        return fuse.plane.usable(digest, fuse.entry(target), Attachment(LAZY))

    assert fuse.run(usable())
    last = fuse.server(target)
    fuse.plane.detach(target)
    wait_until("the server to end with its mount", lambda: not start_time(last))


def test_a_server_is_killed_while_it_owes_an_answer(fuse: Rig, large: tuple[str, bytes]) -> None:
    """Where the kernel asks again, whoever waits gets it; else the mount ends, and nobody waits for ever."""
    path, content = large
    digest = fuse.add(path, target=32 << 10)
    target = fuse.attach(digest)
    got: list[object] = []

    def read() -> None:
        try:
            got.append(Path(target, "large").read_bytes())
        except OSError as error:
            got.append(error.errno)

    reader = threading.Thread(target=read)
    blobfs = fuse.blobfs.process.pid if fuse.blobfs.process else 0
    os.kill(blobfs, signal.SIGSTOP)
    try:
        reader.start()
        wait_until("the reader to wait", lambda: _waits(fuse.server(target)))
        killed(fuse, target)
    finally:
        os.kill(blobfs, signal.SIGCONT)
    reader.join(60)
    if RESENDS:
        assert got == [content]
        assert target not in fuse.lost
    else:
        assert got[0] in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
        wait_until("the loss to be told", lambda: target in fuse.lost)
        fuse.attach(digest, target)
        assert Path(target, "large").read_bytes() == content


def test_nobody_goes_on_with_another_image(fuse: Rig, here: str) -> None:
    """Its inode numbers may be others, which the kernel takes for the ones that it knows."""
    digest = fuse.add(tar_of(here, [{"name": "f", "data": b"1"}]))
    target = fuse.attach(digest)
    image = Path(fuse.directory(digest), "meta.erofs")
    content = image.read_bytes()
    image.unlink()
    image.write_bytes(content)
    killed(fuse, target)
    wait_until("the loss to be told", lambda: target in fuse.lost)
    assert not fuse.server(target)


def test_servers_that_die_one_after_another_cost_their_layer_and_no_other(
    fuse: Rig, large: tuple[str, bytes], here: str
) -> None:
    one, two = fuse.add(large[0]), fuse.add(tar_of(here, [{"name": "f", "data": b"2"}]))
    first, second = fuse.attach(one), fuse.attach(two)
    fd = os.open(f"{first}/large", os.O_RDONLY)
    deaths = 0
    while killed(fuse, first):
        deaths += 1
        assert deaths < 20
    wait_until("the loss to be told", lambda: first in fuse.lost)
    assert deaths >= 5
    assert second not in fuse.lost
    drop_caches()
    with pytest.raises(OSError) as told:
        os.pread(fd, 100, 4_000_000)
    assert told.value.errno == errno.ENOTCONN
    with contextlib.suppress(OSError):  # close(2) asks the server, too
        os.close(fd)
    assert Path(second, "f").read_text() == "2"
    attachment = Attachment(LAZY)
    entry = fuse.entry(first)

    async def usable() -> bool:
        return fuse.plane.usable(one, entry, attachment)

    assert not fuse.run(usable())
    fuse.attach(one, first)
    assert Path(first, "large").read_bytes() == large[1]


def test_servers_outlive_their_host(fuse: Rig, large: tuple[str, bytes]) -> None:
    digest = fuse.add(large[0])
    target = fuse.attach(digest)
    with open(f"/proc/{fuse.server(target)}/stat") as file:
        host = int(file.read().rpartition(")")[2].split()[1])
    os.kill(host, signal.SIGKILL)
    wait_until("the host to be gone", lambda: not os.path.exists(f"/proc/{host}") or _is_zombie(host))
    assert Path(target, "large").read_bytes() == large[1]
    other = fuse.attach(digest)  # by another host
    assert Path(other, "small").read_bytes() == b"small\n"
    assert target not in fuse.lost
    first = Process(*map(int, fuse.entry(target).source.split(":")[2:]))
    wait_until("the next host to know the server", lambda: serving(f"{fuse.root}/layers.sock", first).pid)
    assert killed(fuse, target)
    assert Path(target, "small").read_bytes() == b"small\n"
    assert target not in fuse.lost


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_signals_that_stop_daemons_do_not_stop_a_server(fuse: Rig, large: tuple[str, bytes]) -> None:
    target = fuse.attach(fuse.add(large[0]))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(fuse.server(target), number)
    assert Path(target, "small").read_bytes() == b"small\n"
    assert target not in fuse.lost


def test_reads_wait_for_the_next_blobfs(fuse: Rig, large: tuple[str, bytes]) -> None:
    """Killed while it owes answers, and stopped: whoever reads waits, and gets the right bytes."""
    path, content = large
    target = fuse.attach(fuse.add(path, target=64 << 10))
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(Path(target, "large").read_bytes()))
    pid = fuse.blobfs.process.pid if fuse.blobfs.process else 0
    os.kill(pid, signal.SIGSTOP)  # it takes no more requests, and the reader's are in its socket
    reader.start()
    wait_until("the reader to wait", lambda: _waits(fuse.server(target)))
    fuse.blobfs.end(signal.SIGKILL)
    fuse.blobfs.start()
    reader.join(30)
    assert got == [content]


def _waits(pid: int) -> bool:
    """A server with a connection to blobfs has asked it for something; two sockets are its event loop's own."""
    return sum(link.startswith("socket:") for link in open_fds(pid).values()) > 2


def test_a_server_is_small(fuse: Rig, here: str) -> None:
    """Of a layer of 50 000 files, after all of it has been looked at: what is a server's alone is a few megabytes."""
    digest = fuse.add(tar_of(here, [{"name": f"d{number // 500}/f{number}", "data": b"x"} for number in range(50_000)]))
    with fuse.attached(digest) as tree:
        assert sum(len(names) for _, _, names in os.walk(tree)) == 50_000
        private = 0
        with open(f"/proc/{fuse.server(tree)}/smaps_rollup") as file:
            for line in file:
                if line.startswith("Private_"):
                    private += int(line.split()[1])
        assert private < 40_000, f"{private} KiB"


def test_servers_take_no_descriptors_from_the_host(fuse: Rig, large: tuple[str, bytes]) -> None:
    targets = [fuse.attach(fuse.add(large[0])) for _ in range(3)]
    servers = [fuse.server(target) for target in targets]

    def settled() -> bool:  # a server closes the connection it was started by after it has answered
        counts = {len(os.listdir(f"/proc/{server}/fd")) for server in servers}
        return len(counts) == 1 and max(counts) < 12

    wait_until("servers with as few descriptors as the first", settled)


def test_the_host_takes_no_strangers(fuse: Rig) -> None:
    assert stat.S_IMODE(os.stat(f"{fuse.root}/layers.sock").st_mode) == 0o600
    assert stat.S_IMODE(os.stat(f"{fuse.root}/mnt.sock").st_mode) == 0o600


def test_without_pyfuse3_it_says_so(fuse: Rig) -> None:
    code = "import sys; sys.modules['pyfuse3'] = None; from weenv.plugin.snapshotter.planes.fusehost import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--socket", f"{fuse.root}/other.sock"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pyfuse3 cannot be imported" in done.stderr
