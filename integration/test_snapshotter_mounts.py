"""The snapshotter on the real kernel: overlay mounts by the conformance suite, and the EROFS plane's mounts.

blobfs is not needed here: its mount point is played by a plain directory that holds each layer's stream under its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest
from conformance.snapshots import MOUNT_CHECKS, Service, direct, mounted, over_socket

from weenv.core import digest as digests
from weenv.core.errors import MountError
from weenv.layer.encode import encode_layer
from weenv.layer.toc import Frames
from weenv.plugin.containerd.types import Kind
from weenv.plugin.snapshotter import mounts
from weenv.plugin.snapshotter.builder import Builder
from weenv.plugin.snapshotter.cache.present import GOOD, Presence
from weenv.plugin.snapshotter.cache.store import DataStore
from weenv.plugin.snapshotter.implied import attributes_below
from weenv.plugin.snapshotter.layerdir import LayerDirs, LayerSource
from weenv.plugin.snapshotter.layers import Layers
from weenv.plugin.snapshotter.lazylayers import NoLazyLayers
from weenv.plugin.snapshotter.metastore import Metastore
from weenv.plugin.snapshotter.metrics import Metrics
from weenv.plugin.snapshotter.planes.base import COMPLETE, LAZY, Variant, variant_of
from weenv.plugin.snapshotter.planes.erofs import ErofsPlane
from weenv_testkit.images import Member, write_tar, xattr
from weenv_testkit.procs import unmount_under

# Metadata of an image mounted from a file: a mount takes a few milliseconds, so these tests are quick.


@pytest.fixture
def root() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="ws", dir="/var/tmp")
    yield path
    assert unmount_under(path) == []
    shutil.rmtree(path)


@pytest.mark.parametrize("factory", [direct, over_socket])
@pytest.mark.parametrize("check", MOUNT_CHECKS)
async def test_conformance(
    check: Callable[[Service, str], Awaitable[None]],
    factory: Callable[[str], contextlib.AbstractAsyncContextManager[Service]],
    root: str,
) -> None:
    async with factory(root) as service:
        await check(service, f"{root}/scratch")


# -- the EROFS plane


@dataclass
class Stack:
    """The plane with its layers, and how to make more of them."""

    root: str
    dirs: LayerDirs
    plane: ErofsPlane
    layers: Layers
    store: Metastore
    frames: dict[str, tuple[Frames, int]]

    @property
    def blobs(self) -> str:
        return f"{self.root}/blobs"

    def add(self, *members: Member) -> str:
        """A layer directory whose stream "blobfs" serves; its digest."""
        tar = write_tar(f"{self.root}/layer.tar", members)
        with open(tar, "rb") as source, open(tar + ".blob", "wb") as out:
            encoded = encode_layer(source, out)
        with open(tar + ".blob", "rb") as blob:
            blob.seek(encoded.toc_offset)
            tail = blob.read()
        self.dirs.create(
            LayerSource(encoded.blob_digest, encoded.blob_size, encoded.toc_offset, encoded.toc_length, encoded.toc_digest),
            tail,
        )
        os.rename(tar, f"{self.blobs}/{digests.hex_of(encoded.blob_digest)}")
        self.frames[encoded.blob_digest] = (encoded.toc.frames, encoded.stream_size)
        return encoded.blob_digest

    def complete(self, digest: str) -> None:
        """What blobfs does once every frame is there."""
        directory = self.dirs.path(digest)
        shutil.copyfile(f"{self.blobs}/{digests.hex_of(digest)}", f"{directory}/data")
        frames, size = self.frames[digest]
        presence = Presence.open(directory, frames.content_sizes, size)
        for frame in range(len(frames)):
            presence.mark(frame)
        assert presence.judge(GOOD)
        presence.close()


@contextlib.asynccontextmanager
async def stack(root: str) -> AsyncIterator[Stack]:
    os.makedirs(f"{root}/blobs", exist_ok=True)
    store, dirs = Metastore(f"{root}/metastore.db"), LayerDirs(root)
    async with Builder(2) as builder:
        plane = ErofsPlane(dirs, f"{root}/blobs", builder)
        layers = Layers(root, store, dirs, plane, Metrics(), grace=0.0)
        try:
            yield Stack(root, dirs, plane, layers, store, {})
        finally:
            layers.close()
            plane.close()
            store.close()


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


@contextlib.contextmanager
def overlay(root: str, name: str, lowers: list[str]) -> Iterator[str]:
    """A container's root on these layers."""
    for part in ("up", "work"):
        os.makedirs(f"{root}/{name}/{part}")
    described = [mounts.overlay_mount(":".join(lowers), upper=f"{root}/{name}/up", work=f"{root}/{name}/work")]
    with mounted(described, f"{root}/{name}/merged") as merged:
        yield merged


async def test_a_layer_is_mounted_without_a_loop_device(root: str) -> None:
    loops = subprocess.run(["losetup", "-a"], capture_output=True, text=True).stdout
    async with stack(root) as s:
        await s.plane.probe()
        members = [
            Member.directory("d", 0o1777),
            Member("d/f", b"hello\n", mode=0o4755),
            Member.hardlink("g", "d/f", mode=0o4755),
        ]
        digest = s.add(*members, Member.symlink("l", "d/f"), Member("x", b"y", pax=xattr("user.a", "b")))
        number = await s.layers.attach(digest, Variant())
        path = s.layers.path(number)
        assert read(f"{path}/d/f") == "hello\n" == read(f"{path}/l")
        assert os.stat(f"{path}/g").st_ino == os.stat(f"{path}/d/f").st_ino and os.stat(f"{path}/g").st_nlink == 2
        assert stat.S_IMODE(os.stat(f"{path}/d/f").st_mode) == 0o4755 and os.getxattr(f"{path}/x", "user.a") == b"b"
        entry = mounts.mounts_below(f"{root}/m")[path]
        assert entry.fstype == "erofs" and entry.source.endswith("/meta.erofs") and "ro" in entry.options.split(",")
        assert s.store.layers()[0].mode == LAZY
        assert subprocess.run(["losetup", "-a"], capture_output=True, text=True).stdout == loops
        s.plane.detach(path)


async def test_a_complete_layer_replaces_the_lazy_one_under_running_containers(root: str) -> None:
    async with stack(root) as s:
        digest = s.add(Member("f", b"first\n"), *(Member(f"n/{number}", b"%d" % number * 5000) for number in range(40)))
        number = await s.layers.attach(digest, Variant())
        path = s.layers.path(number)
        with overlay(root, "running", [path]) as running:
            held = os.open(f"{running}/f", os.O_RDONLY)
            s.complete(digest)
            await s.layers.tend_once()
            assert s.store.layers()[0].mode == COMPLETE
            data = DataStore.open(f"{s.dirs.path(digest)}/data", os.path.getsize(f"{s.dirs.path(digest)}/data"))
            with contextlib.closing(data), data.alone() as alone:
                assert not alone, "the kernel has the file open, so nothing is punched out of it"
            here = [e for e in mounts.parse_mountinfo(read("/proc/self/mountinfo")) if e.point == path]
            assert len(here) == 1, "the old mount is gone from the path"
            os.unlink(f"{s.blobs}/{digests.hex_of(digest)}")  # new readers need no blobfs
            with overlay(root, "new", [path]) as new:
                assert read(f"{new}/n/7") == "7" * 5000
            assert os.read(held, 100) == b"first\n"
            assert all(read(f"{running}/n/{number}") == str(number) * 5000 for number in range(40))
            os.close(held)
            await s.layers.sweep()
            assert s.dirs.known() == [] and os.listdir(f"{root}/m") == []
            assert read(f"{running}/n/30") == "30" * 5000, "a running container keeps what was removed"


def read_aheads() -> dict[str, int]:
    bdi = "/sys/class/bdi"
    return {name: int(read(f"{bdi}/{name}/read_ahead_kb")) for name in os.listdir(bdi) if name.startswith("erofs-")}


async def test_a_complete_layer_is_read_ahead_as_its_disk_is_and_a_lazy_one_is_not(root: str) -> None:
    disk = os.stat(root).st_dev
    try:
        wanted = min(int(read(f"/sys/class/bdi/{os.major(disk)}:{os.minor(disk)}/read_ahead_kb")), 1024)
    except OSError:
        wanted = 128
    async with stack(root) as s:
        others = set(read_aheads())
        digest = s.add(Member("f", b"x"))
        number = await s.layers.attach(digest, Variant())
        assert [kb for name, kb in read_aheads().items() if name not in others] == [128]
        s.complete(digest)
        await s.layers.tend_once()
        assert s.store.layers()[0].mode == COMPLETE
        assert [kb for name, kb in read_aheads().items() if name not in others] == [max(wanted, 128)]
        s.plane.detach(s.layers.path(number))


async def test_a_mount_that_others_were_made_beside_is_made_again(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack(root) as s:
        digest = s.add(Member("f", b"x"))
        s.complete(digest)
        own, beside = mounts.open_erofs, []

        def crowded(image: str, device: str) -> mounts.DetachedMount:
            if len(beside) < 2:
                beside.append(own(image, device))
            return own(image, device)

        monkeypatch.setattr(mounts, "open_erofs", crowded)
        before = set(read_aheads())
        number = await s.layers.attach(digest, Variant())
        found = sorted(kb for name, kb in read_aheads().items() if name not in before)
        for mount in beside:
            os.close(mount.fd)
        assert len(beside) == 2
        disk = os.stat(root).st_dev
        own_disk = f"/sys/class/bdi/{os.major(disk)}:{os.minor(disk)}/read_ahead_kb"
        if os.path.exists(own_disk):
            assert found == [128, 128, max(128, min(int(read(own_disk)), 1024))]
        s.plane.detach(s.layers.path(number))


async def test_nobody_sees_an_empty_directory_while_mounts_change(root: str) -> None:
    async with stack(root) as s:
        digest = s.add(Member("f", b"x"))
        number = await s.layers.attach(digest, Variant())
        path, stop, misses = s.layers.path(number), asyncio.Event(), []

        def look() -> int:
            rounds = 0
            while not stop.is_set():
                rounds += 1
                if not os.path.exists(f"{path}/f"):
                    misses.append(rounds)
            return rounds

        looking = asyncio.ensure_future(asyncio.to_thread(look))
        for _ in range(50):
            await s.layers._replace(number)
        stop.set()
        assert await looking > 50 and not misses
        s.plane.detach(path)


async def test_replacing_works_where_mounts_are_shared(root: str) -> None:
    """systemd makes every mount shared: the new one has to appear in the other namespaces too."""
    mounts.mount(root, root, "", mounts.MS_BIND)
    mounts.mount("", root, "", 1 << 20)  # MS_SHARED
    try:
        async with stack(root) as s:
            digest = s.add(Member("f", b"x"))
            number = await s.layers.attach(digest, Variant())
            path = s.layers.path(number)
            other = subprocess.Popen(
                ["unshare", "-m", "--propagation", "slave", "sh", "-c", "echo ready; read line; exec cat /proc/self/mountinfo"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert other.stdout is not None and other.stdout.readline() == "ready\n"
            s.complete(digest)
            await s.layers.tend_once()
            assert s.store.layers()[0].mode == COMPLETE
            assert read(f"{path}/f") == "x"
            seen, _ = other.communicate("go\n")
            assert len([e for e in mounts.parse_mountinfo(seen) if e.point == path]) == 1
            s.plane.detach(path)
    finally:
        mounts.detach(root)


async def test_mounts_outlive_the_daemon_and_are_taken_over(root: str) -> None:
    async with stack(root) as s:
        kept = s.add(Member("f", b"kept"))
        lost = s.add(Member("f", b"lost"))
        ids = [await s.layers.attach(digest, Variant()) for digest in (kept, lost)]
        for number, name in zip(ids, ("kept", "lost"), strict=True):
            s.store.add(Kind.COMMITTED, name, None, {}, layer_id=number)
        before = {e.point: e.mount_id for e in mounts.mounts_below(f"{root}/m").values()}
        frames = s.frames
    mounts.unmount(f"{root}/m/{ids[1]}")
    os.makedirs(f"{root}/m/77")
    mounts.mount("none", f"{root}/m/77", "tmpfs")
    async with stack(root) as s:
        s.frames.update(frames)
        s.layers.recover()
        assert s.layers.attached([ids[0]]) and not s.layers.attached([ids[1]])
        assert not os.path.exists(f"{root}/m/77")
        after = {e.point: e.mount_id for e in mounts.mounts_below(f"{root}/m").values()}
        assert after == {f"{root}/m/{ids[0]}": before[f"{root}/m/{ids[0]}"]}, "untouched"
        await s.layers.tend_once()
        assert read(f"{root}/m/{ids[1]}/f") == "lost"
        # A new blobfs mount, as after the death of whoever held the old one: layers are mounted anew, on it.
        shutil.copytree(s.blobs, f"{root}/streams")
        mounts.mount("none", s.blobs, "tmpfs")
        shutil.copytree(f"{root}/streams", s.blobs, dirs_exist_ok=True)
        devices = [os.stat(f"{root}/m/{number}").st_dev for number in ids]
        await s.layers.tend_once()
        assert {row.device for row in s.store.layers()} == {os.stat(s.blobs).st_dev}
        assert [os.stat(f"{root}/m/{number}").st_dev for number in ids] != devices, "other mounts than before"
        assert [read(f"{root}/m/{number}/f") for number in ids] == ["kept", "lost"]
        for number in ids:
            s.plane.detach(f"{root}/m/{number}")
        mounts.detach(s.blobs)


async def test_a_layer_without_its_bytes_keeps_no_other_from_starting(root: str) -> None:
    async with stack(root) as s:
        good, bad = s.add(Member("f", b"good")), s.add(Member("f", b"bad"))
        ids = [await s.layers.attach(digest, Variant()) for digest in (bad, good)]
        for number in ids:
            s.store.add(Kind.COMMITTED, f"s{number}", None, {}, layer_id=number)
            mounts.unmount(f"{root}/m/{number}")
        os.unlink(f"{s.blobs}/{digests.hex_of(bad)}")
    async with stack(root) as s:
        s.layers.recover()
        await s.layers.tend_once()
        assert s.layers.attached([ids[1]]) and not s.layers.attached([ids[0]])
        with pytest.raises(MountError, match="blobfs does not serve"):
            await s.layers.attach(bad, Variant())
        for number in ids:
            s.plane.detach(f"{root}/m/{number}")


async def test_a_damaged_metadata_file_is_built_again(root: str) -> None:
    async with stack(root) as s:
        digest = s.add(Member("f", b"x"))
        await s.plane.prepare(digest, Variant())
        path = s.dirs.file(digest, "meta.erofs")
        with open(path, "r+b") as file:
            file.truncate(0)
            file.truncate(8192)  # what a power cut can leave
        number = await s.layers.attach(digest, Variant())
        assert read(f"{s.layers.path(number)}/f") == "x"
        s.plane.detach(s.layers.path(number))


async def test_files_not_known_to_be_on_disk_are_made_anew_after_a_reboot(root: str) -> None:
    async with stack(root) as s:
        digest = s.add(Member("f", b"x"))
        number = await s.layers.attach(digest, Variant())
        s.store.add(Kind.COMMITTED, "s", None, {}, layer_id=number)
        mounts.unmount(s.layers.path(number))  # as a reboot does
        made = os.stat(s.dirs.file(digest, "meta.erofs")).st_mtime_ns
    async with stack(root) as s:
        s.layers.recover()
        assert not os.path.exists(s.dirs.file(digest, "meta.erofs"))
        await s.layers.tend_once()
        assert s.store.layers()[0].durable == 1
        assert os.stat(s.dirs.file(digest, "meta.erofs")).st_mtime_ns > made
        mounts.unmount(s.layers.path(number))
    async with stack(root) as s:
        s.layers.recover()
        assert os.path.exists(s.dirs.file(digest, "meta.erofs")), "what was synced is kept"
        await s.layers.tend_once()
        s.plane.detach(s.layers.path(number))


async def test_implied_directories_on_real_layers(root: str) -> None:
    async with stack(root) as s:
        base = s.add(
            Member.directory("opt", 0o2711, uid=3, gid=4),
            Member.directory("acl", 0o755, pax=xattr("user.mark", "v")),
            Member.directory("usr/lib", 0o755),
            Member.symlink("lib", "usr/lib"),
        )
        upper = s.add(Member("opt/deep/f", b"1"), Member("acl/g", b"2"), Member("lib/h", b"3"), Member("other/i", b"4"))
        bottom = s.layers.path(await s.layers.attach(base, Variant()))
        facts = await s.plane.prepare(upper, Variant())
        variants = [
            variant_of(attributes_below([item for item in facts.implied if item.path != b"acl"], [bottom])),
            variant_of(attributes_below(facts.implied, [bottom])),
        ]
        for variant in variants:  # stamped into a copy, and built because of the xattr
            top = s.layers.path(await s.layers.attach(upper, variant))
            found = os.stat(f"{top}/opt")
            assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o2711, 3, 4)
            assert found.st_mtime_ns == os.stat(f"{bottom}/opt").st_mtime_ns
            assert [stat.S_IMODE(os.stat(f"{top}/{name}").st_mode) for name in ("opt/deep", "lib", "other")] == [0o755] * 3
            assert read(f"{top}/opt/deep/f") == "1" and read(f"{top}/lib/h") == "3"
        assert os.getxattr(f"{top}/acl", "user.mark") == b"v"
        assert len(s.store.layers()) == 3
        for layer in s.store.layers():
            s.plane.detach(s.layers.path(layer.id))


async def test_twenty_at_once_mount_once(root: str) -> None:
    async with stack(root) as s:
        found = [s.add(Member("f", b"%d" % number)) for number in range(5)]
        numbers = await asyncio.gather(*(s.layers.attach(found[index % 5], Variant()) for index in range(20)))
        assert len(set(numbers)) == 5
        points = [e.point for e in mounts.parse_mountinfo(read("/proc/self/mountinfo")) if e.point.startswith(f"{root}/m/")]
        assert len(points) == 5
        for point in points:
            s.plane.detach(point)


async def test_long_root_directories(root: str) -> None:
    """fsconfig takes 255 bytes of a path; the images of a longer root are opened first."""
    deep = os.path.join(root, "d" * 120, "e" * 100)
    os.makedirs(deep)
    async with stack(deep) as s:
        number = await s.layers.attach(s.add(Member("f", b"x")), Variant())
        assert read(f"{s.layers.path(number)}/f") == "x"
        s.plane.detach(s.layers.path(number))


async def test_a_daemon_without_lazy_layers_refuses_their_snapshots(root: str) -> None:
    assert NoLazyLayers().attached([]) and not NoLazyLayers().attached([1])
