"""EROFS images in the hands of others: the kernel mounts them, fsck.erofs and dump.erofs read them, overlayfs stacks them.

Trees are compared with what GNU tar extracts. Every mount is mount(2) of the metadata file itself with the tar as second
device: a loop device anywhere would be a failure of its own.
"""

from __future__ import annotations

import errno
import glob
import mmap
import os
import random
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from weenv.core.errors import MountError
from weenv.layer.erofs import DirAttributes, build
from weenv.layer.toc import CHAR, FLAG_IMPLIED, FLAG_OPAQUE, FLAG_WHITEOUT, NO_DATA, SYMLINK, Frames, Toc
from weenv.layer.tree import scan_tar
from weenv.plugin.snapshotter import mounts
from weenv_testkit import corpus, tools
from weenv_testkit.erofs_reader import Image
from weenv_testkit.procs import run
from weenv_testkit.richtree import extract, make_rich_tree
from weenv_testkit.tocs import Node, directory, golden_tree, make_toc, toc_from_tar
from weenv_testkit.trees import differences, read_tree

pytestmark = pytest.mark.root


@pytest.fixture(scope="module", autouse=True)
def no_loop_devices() -> Iterator[None]:
    """None of these mounts makes one."""
    before = set(glob.glob("/sys/block/loop*/loop/backing_file"))
    yield
    assert set(glob.glob("/sys/block/loop*/loop/backing_file")) <= before


def write(path: str, data: bytes | bytearray) -> str:
    with open(path, "wb") as file:
        file.write(data)
    return path


def load(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


@contextmanager
def mounted(image: str, device: str, options: str = "") -> Iterator[str]:
    target = f"{image}.m"
    os.mkdir(target)
    mounts.mount(image, target, "erofs", mounts.MS_RDONLY, f"device={device}{options}")
    try:
        yield target
    finally:
        mounts.unmount(target)
        os.rmdir(target)


@contextmanager
def overlay(here: str, lowers: list[str]) -> Iterator[str]:
    """Overlayfs over ``lowers`` (top first) with an empty upper directory."""
    for name in ("upper", "work", "merged"):
        os.mkdir(os.path.join(here, name))
    target = os.path.join(here, "merged")
    data = f"lowerdir={':'.join(lowers)},upperdir={here}/upper,workdir={here}/work"
    mounts.mount("overlay", target, "overlay", 0, data)
    try:
        yield target
    finally:
        mounts.unmount(target)


def plain_copy(image: str) -> str:
    """The image without its super block checksum: erofs-utils 1.8.6 (Debian 13) subtracts 1024 from the block size before it
    checks one and crashes with blocks of 512 bytes. The kernel checks it at every mount, and the tests' own reader does."""
    data = bytearray(load(image))
    data[1024 + 4 : 1024 + 9] = bytes(4) + bytes([data[1024 + 8] & ~1])
    return write(f"{image}.plain", data)


def fsck(image: str, device: str, *options: str) -> None:
    """fsck.erofs reads every inode, every directory and every block of data, and finds no fault."""
    copy = plain_copy(image)
    argv = [tools.erofs("fsck.erofs"), *options, f"--device={device}", copy]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    os.unlink(copy)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert not re.search(r"\b(error|corrupt|bogus|<E>)", said, re.IGNORECASE), said


def scanned(tar: str) -> Toc:
    """The Toc that the real scanner makes of a tar."""
    with open(tar, "rb") as file:
        scan = scan_tar(file)
    columns = scan.columns
    frames = Frames(np.zeros(0, np.uint32), np.zeros(0, np.uint32), np.zeros((0, 32), np.uint8))
    parts = (columns.entries, columns.xattrs, columns.sparse, columns.pool)
    return Toc("sha256:" + "0" * 64, scan.stream_size, 0, 0, frames, *parts)


def stream(path: str, size: int) -> str:
    """A device of ``size`` bytes with no two blocks alike."""
    return write(path, b"".join(b"%016x" % (number // 32) for number in range(size // 16)))


@pytest.fixture(scope="module")
def rich(home: str) -> Iterator[tuple[str, str]]:
    """A tree with everything GNU tar can carry, and the tar of it: (directory as extracted again, tar)."""
    source, tar, extracted = (os.path.join(home, name) for name in ("rich-source", "rich.tar", "rich"))
    make_rich_tree(source)
    every = ["--xattrs", "--xattrs-include=*", "--numeric-owner"]
    run("tar", "--create", "--format=posix", "--sort=name", *every, f"--file={tar}", "--directory", source, ".")
    extract(tar, extracted, "--xattrs", "--xattrs-include=*")
    yield extracted, tar
    for path in (source, extracted):
        shutil.rmtree(path)
    os.unlink(tar)


@pytest.mark.parametrize("made_by", ["tarfile", "scanner"])
def test_the_mounted_tree_is_what_gnu_tar_extracts(rich: tuple[str, str], here: str, made_by: str) -> None:
    extracted, tar = rich
    toc = toc_from_tar(tar) if made_by == "tarfile" else scanned(tar)
    image = write(f"{here}/i", build(toc))
    expected = read_tree(extracted)
    if made_by == "scanner":  # as containerd's unpack: no trusted.*, no time before 1970, the root's attributes ignored
        for path, entry in expected.items():
            kept = tuple(pair for pair in entry.xattrs if not pair[0].startswith(b"trusted."))
            expected[path] = replace(entry, xattrs=kept, mtime_ns=entry.mtime_ns if entry.mtime_ns >= 0 else 0)
    with mounted(image, tar) as tree:
        actual = read_tree(tree)
        root = expected.pop(b"."), actual.pop(b".")
        assert root[0].nlink == root[1].nlink
        assert differences(expected, actual) == []
        assert os.statvfs(tree).f_bsize == 512
        for folder, folders, names in os.walk(os.fsencode(tree)):  # lookups: each name found, its neighbours not
            for name in folders + names:
                os.lstat(folder + b"/" + name)
            for name in (b"", *names[:50]):
                with pytest.raises(FileNotFoundError):
                    os.lstat(folder + b"/" + name[:200] + b"\x01")
    Image(load(image)).walk()
    fsck(image, tar)


def test_fsck_extracts_the_same_tree(rich: tuple[str, str], here: str) -> None:
    """erofs-utils' own reader, which shares no code with the kernel's, agrees too."""
    extracted, tar = rich
    image = write(f"{here}/i", build(toc_from_tar(tar)))
    fsck(image, tar, f"--extract={here}/x", "--preserve")
    expected, actual = read_tree(extracted), read_tree(f"{here}/x")
    assert differences(expected, actual, times_free=[path for path, entry in expected.items() if stat.S_ISDIR(entry.mode)],
                       ignore=("xattrs", "nlink", "first")) == []  # fmt: skip
    text = run(tools.erofs("dump.erofs"), "-s", plain_copy(image))
    own = {(entry.first, entry.mode) for entry in expected.values()}
    assert re.search(rf"inode count:\s+{len(own)}\n", text)
    assert re.search(r"features:.*mtime", text)
    shutil.rmtree(f"{here}/x")


def test_real_layers(here: str) -> None:
    """The contents of Debian packages, PyPI and npm archives."""
    tars = [*corpus.debian(), *corpus.pypi(), *corpus.npm()]
    assert len(tars) > 5
    for number, tar in enumerate(tars):
        image = write(f"{here}/{number}", build(scanned(tar)))
        extracted = f"{here}/{number}.x"
        extract(tar, extracted)
        explicit = corpus.explicit_directories(tar)
        implied = [path for path in read_tree(extracted, contents=False) if path not in explicit]
        with mounted(image, tar) as tree:
            expected, actual = read_tree(extracted), read_tree(tree)
            for one in (expected, actual):
                one.pop(b".")
            assert differences(expected, actual, times_free=implied) == [], tar
        fsck(image, tar)
        shutil.rmtree(extracted)


@pytest.mark.parametrize("form", [form for form in corpus.SPARSE_FORMS if form != "gnu-names"])
def test_sparse_members_of_every_form(here: str, form: str) -> None:
    tar = corpus.sparse(here)[form]
    image = write(f"{here}/i", build(scanned(tar)))
    extract(tar, f"{here}/x")
    with mounted(image, tar) as tree:
        assert differences(read_tree(f"{here}/x/sparse"), read_tree(f"{tree}/sparse")) == []
    fsck(image, tar)


def test_the_golden_tree(here: str) -> None:
    """The tree whose image tests/test_erofs_build.py knows by its digest."""
    image = write(f"{here}/i", build(make_toc(golden_tree(), stream_size=4096, diff_id="sha256:" + "ab" * 32)))
    data = stream(f"{here}/d", 4096)
    content = load(data)
    fsck(image, data)
    with mounted(image, data) as tree:
        assert sorted(os.listdir(tree)) == sorted(name.decode() for name in golden_tree() if name and b"/" not in name)
        for name in ("bin/sh", "bin/bash"):
            assert load(f"{tree}/{name}") == content[512:1512]
        assert load(f"{tree}/hole") == bytes(10000)
        assert load(f"{tree}/sparse") == bytes(1024) + content[2048:3072] + bytes(952)
        assert os.stat(f"{tree}/bin/sh").st_nlink == 2
        assert os.stat(f"{tree}/bin/sh").st_ino == os.stat(f"{tree}/bin/bash").st_ino
        assert os.readlink(f"{tree}/lib") == "usr/lib"
        assert os.getxattr(f"{tree}/new", "trusted.overlay.opaque") == b"y"
        assert os.getxattr(f"{tree}/new", "user.a") == b"b"
        with pytest.raises(OSError, match="Read-only"):
            os.mkdir(f"{tree}/new/x")


def test_empty_layers(here: str) -> None:
    for size in (0, 512, 1024):
        image = write(f"{here}/{size}", build(make_toc({}, stream_size=size)))
        data = write(f"{here}/{size}.d", bytes(size))
        with mounted(image, data) as tree:
            assert os.listdir(tree) == []
            assert os.stat(tree).st_nlink == 2
        fsck(image, data)


def test_streams_of_a_terabyte(here: str) -> None:
    """Payloads at the far end of a stream of 1 TiB, files larger than 4 GiB, a hole of 300 GB (a lastlog, say)."""
    size, mib = 1 << 40, 1 << 20
    data = f"{here}/d"
    marks = {512: b"first", (5 << 30) + 512: b"beyond 4 GiB", size - 512: b"last block"}
    with open(data, "wb") as file:
        file.truncate(size)
        for offset, text in marks.items():
            file.seek(offset)
            file.write(text)
    tree = {
        b"all": Node(size=size - 512, offset=512),
        b"six": Node(size=6 << 30, offset=512),
        b"end": Node(size=10, offset=size - 512),
        b"gap": Node(size=300 << 30, offset=NO_DATA),
        b"wide": Node(size=64 << 30, sparse=((32 << 30, 512, mib), ((64 << 30) - 16 * mib, size - 16 * mib, 16 * mib))),
    }
    image = write(f"{here}/i", build(make_toc(tree, stream_size=size)))
    assert os.path.getsize(image) < mib
    with mounted(image, data) as root:

        def read(name: str, offset: int, length: int) -> bytes:
            with open(f"{root}/{name}", "rb") as file:
                file.seek(offset)
                return file.read(length)

        for name, node in tree.items():
            assert os.stat(f"{root}/{name.decode()}").st_size == node.size
        assert read("all", 0, 5) == read("six", 0, 5) == b"first"
        assert read("all", 5 << 30, 12) == read("six", 5 << 30, 12) == b"beyond 4 GiB"
        assert read("all", size - 1024, 10) == b"last block"
        assert read("six", (6 << 30) - 3, 10) == bytes(3)
        assert read("end", 0, 512) == b"last block"
        assert read("gap", (300 << 30) - 5, 10) == bytes(5)
        assert read("wide", 32 << 30, 5) == b"first"
        assert read("wide", (64 << 30) - 512, 10) == b"last block"
        assert read("wide", 31 << 30, 4096) == bytes(4096)


def test_reads_in_any_order_and_by_mmap(here: str) -> None:
    """Unaligned offsets and sizes, page cache of neighbours: nothing of one file shows in another."""
    data = stream(f"{here}/d", 1 << 20)
    content = load(data)
    rng = random.Random(3)
    tree = {}
    for number in range(200):
        offset = rng.randrange(0, 2000) * 512
        tree[b"f%d" % number] = Node(size=rng.randrange(1, min(70_000, (1 << 20) - offset)), offset=offset)
    image = write(f"{here}/i", build(make_toc(tree, stream_size=1 << 20)))
    with mounted(image, data) as root:
        for name in rng.sample(sorted(tree), len(tree)):
            node = tree[name]
            want = content[node.offset : node.offset + node.size]
            with open(f"{root}/{name.decode()}", "rb") as file:
                at = rng.randrange(node.size)
                file.seek(at)
                assert file.read(rng.randrange(1, 9000)) == want[at:][: file.tell() - at]
                with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                    assert mapped[:] == want


def test_whiteouts_and_opaque_directories_hide_lower_entries(here: str) -> None:
    lower = make_toc(
        {
            b"": directory(mode=0o755),
            b"etc": directory(mode=0o700, uid=3),
            b"etc/gone": Node(size=5, offset=0),
            b"etc/stays": Node(size=5, offset=512),
            b"etc/dir": directory(),
            b"etc/dir/inside": Node(size=5, offset=0),
            b"opaque": directory(mode=0o711),
            b"opaque/hidden": Node(size=5, offset=0),
            b"linked": Node(kind=SYMLINK, target=b"etc", mode=0o777),
            b"replaced": directory(),
            b"replaced/x": Node(size=5, offset=0),
        },
        stream_size=1024,
    )
    upper = make_toc(
        {
            b"": directory(mode=0o755),
            b"etc": directory(flags=FLAG_IMPLIED),
            b"etc/gone": Node(kind=CHAR, flags=FLAG_WHITEOUT, mode=0),
            b"etc/dir": Node(kind=CHAR, flags=FLAG_WHITEOUT, mode=0),
            b"opaque": directory(mode=0o750, flags=FLAG_OPAQUE, xattrs={b"user.k": b"v"}),
            b"opaque/shown": Node(size=4, offset=0),
            b"replaced": Node(size=4, offset=0, mode=0o600),
        },
        stream_size=512,
    )
    etc = upper.lookup(b"etc")
    assert etc is not None
    attributes = DirAttributes(0o700, 3, 0, 0, 0)
    images = [
        (write(f"{here}/u", build(upper, implied={etc: attributes})), write(f"{here}/u.d", b"new\n".ljust(512))),
        (write(f"{here}/l", build(lower)), write(f"{here}/l.d", b"gone\n".ljust(512) + b"stay\n".ljust(512))),
    ]
    for pair in images:
        fsck(*pair)
    with mounted(*images[0]) as top, mounted(*images[1]) as bottom, overlay(here, [top, bottom]) as merged:
        found = {path.decode() for path in read_tree(merged, contents=False)} - {"."}
        assert found == {"etc", "etc/stays", "linked", "opaque", "opaque/shown", "replaced"}
        for name in ("etc/gone", "etc/dir", "opaque/hidden", "replaced/x"):
            assert not os.path.lexists(f"{merged}/{name}")
        assert stat.S_IMODE(os.stat(f"{merged}/etc").st_mode) == 0o700
        assert os.stat(f"{merged}/etc").st_uid == 3
        assert stat.S_IMODE(os.stat(f"{merged}/opaque").st_mode) == 0o750
        assert os.listxattr(f"{merged}/opaque") == ["user.k"]
        assert os.getxattr(f"{top}/opaque", "trusted.overlay.opaque") == b"y"
        assert load(f"{merged}/replaced") == b"new\n"
        with open(f"{merged}/linked/stays", "r+b") as file:  # copied up
            file.seek(0, 2)
            file.write(b"more")
        assert load(f"{merged}/etc/stays") == b"stay\nmore"
        assert load(f"{bottom}/etc/stays") == b"stay\n"
        with open(f"{merged}/etc/gone", "w") as fresh:
            fresh.write("back")
        os.unlink(f"{merged}/etc/stays")
        assert os.listdir(f"{merged}/etc") == ["gone"]


def test_an_acl_takes_effect(here: str) -> None:
    """A POSIX ACL of the image is one for the kernel: it lets user 1 read what the mode does not."""
    entries = ["01000600ffffffff", "0200040001000000", "04000000ffffffff", "10000400ffffffff", "20000000ffffffff"]
    acl = bytes.fromhex("02000000" + "".join(entries))  # include/uapi/linux/posix_acl_xattr.h: tag, permissions, id
    tree = {b"secret": Node(size=4, mode=0o640, xattrs={b"system.posix_acl_access": acl})}
    image = write(f"{here}/i", build(make_toc(tree, stream_size=512)))
    data = write(f"{here}/d", b"data".ljust(512))
    for path in (os.path.dirname(here), here):
        os.chmod(path, 0o755)
    with mounted(image, data) as root:
        assert os.getxattr(f"{root}/secret", "system.posix_acl_access") == acl
        code = "import os,sys; os.setgroups([]); os.setgid(9); os.setuid(int(sys.argv[1])); open(sys.argv[2]).close()"
        results = {}
        fd = os.open(f"{root}/secret", os.O_PATH)
        try:
            for uid in (1, 2):
                done = subprocess.run(
                    [sys.executable, "-c", code, str(uid), f"/proc/self/fd/{fd}"],
                    pass_fds=[fd], capture_output=True, check=False,
                )  # fmt: skip
                results[uid] = done.returncode == 0
        finally:
            os.close(fd)
        assert results == {1: True, 2: False}


def test_what_must_not_mount(here: str) -> None:
    """A flipped bit anywhere in the super block's block, a missing device, a file that is no image."""
    good = bytes(build(make_toc(golden_tree(), stream_size=4096)))
    data = stream(f"{here}/d", 4096)
    with mounted(write(f"{here}/good", good), data):
        pass
    for offset in (*range(1024, 1024 + 96, 4), 1152, 1217, 1535):
        bad = bytearray(good)
        bad[offset] ^= 0x10
        path = write(f"{here}/bad", bad)
        with pytest.raises(MountError) as caught, mounted(path, data):
            pass
        assert caught.value.errno in (errno.EINVAL, errno.EBADMSG, errno.EUCLEAN, errno.EOPNOTSUPP, errno.ENOTBLK), offset
        os.rmdir(f"{path}.m")
    for content, device in ((good, f"{here}/nothing"), (b"", data), (bytes(4096), data)):
        path = write(f"{here}/bad", content)
        with pytest.raises(MountError), mounted(path, device):
            pass
        os.rmdir(f"{path}.m")


def test_a_truncated_image_or_stream_is_an_error_not_a_hang(here: str) -> None:
    """Metadata that is not there gives an I/O error; a stream that ends early reads as zeros there (the kernel's choice),
    which is why blobfs must answer with an error and never with a short file."""
    names = {b"f%04d" % number: Node(size=1000, offset=number * 1024) for number in range(500)}
    image = bytes(build(make_toc(names, stream_size=512_000)))
    data = stream(f"{here}/d", 512_000)
    path = write(f"{here}/i", image)
    os.truncate(path, len(image) // 4 // 4096 * 4096)
    with mounted(path, data) as root:
        failed = 0
        try:
            for entry in os.listdir(root):
                os.stat(f"{root}/{entry}")
        except OSError as error:
            failed = error.errno or 0
        assert failed in (errno.EUCLEAN, errno.EIO)
