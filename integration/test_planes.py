"""One suite for both planes: what a mounted layer is, compared with what GNU tar extracts of the same stream.

A plane is the kernel's EROFS, or a process that serves the tree by pyfuse3; nothing above may notice which.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
import shutil
import signal
import stat
import subprocess
import tempfile
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
from weenv.plugin.snapshotter.planes.base import COMPLETE, Attachment, variant_of
from weenv_testkit import corpus
from weenv_testkit.blobfsproc import drop_caches
from weenv_testkit.images import Member, write_tar, xattr
from weenv_testkit.layers import make_tar
from weenv_testkit.planerig import PLANES, Rig, rigged
from weenv_testkit.procs import mounts_under, wait_until
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
