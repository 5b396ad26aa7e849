"""Id-mapped directories of the protocol core on the running kernel: what is mounted, for how long, and what is refused."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance.snapshots import committed, direct, refused, upper_of

from weenv.core.errors import MountError
from weenv.plugin.snapshotter import idmap, mounts
from weenv.plugin.snapshotter.idmap import LABEL_GID_MAPPING, LABEL_UID_MAPPING, IdMapping
from weenv_testkit.procs import unmount_under

LABELS = {LABEL_UID_MAPPING: "0:100000:65536", LABEL_GID_MAPPING: "0:200000:65536"}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[str]:
    """The snapshotter's; nothing may stay mounted in it, also where a test fails."""
    path = str(tmp_path)
    yield path
    left = unmount_under(path)
    assert not left


def points(root: str) -> list[str]:
    return sorted(mounts.mounts_below(f"{root}/i"))


async def test_a_snapshot_stands_on_mapped_directories(root: str) -> None:
    async with direct(root) as service:
        await committed(service, "one", files={"f": "base"})
        await committed(service, "two", "one", files={"g": "top"})
        (mount,) = await service.prepare("a", "two", LABELS)
        home = f"{root}/i/{service.core.store.get('a').id}"
        assert f"lowerdir={home}/0:{home}/1" in mount.options
        assert points(root) == [f"{home}/0", f"{home}/1"]
        status = os.stat(f"{home}/1/f")
        assert (status.st_uid, status.st_gid) == (100000, 200000)
        with pytest.raises(OSError, match="Read-only"):
            os.unlink(f"{home}/1/f")
        (view,) = await service.view("v", "one", LABELS)
        assert (view.type, view.options) == ("bind", ("ro", "rbind")) and os.stat(f"{view.source}/f").st_uid == 100000
        again = await asyncio.gather(*(service.mounts("a") for _ in range(5)))
        assert all(found == [mount] for found in again) and len(points(root)) == 3
        mounts.detach(f"{home}/0")  # as after a reboot
        assert await service.mounts("a") == [mount] and len(points(root)) == 3
        service.core.recover()
        assert len(points(root)) == 3, "those of known snapshots stay"
        await service.remove("a")
        await service.remove("v")
        await service.cleanup()
        assert points(root) == [] == os.listdir(f"{root}/i")


async def test_what_containerd_has_changed_already_is_not_mapped_again(root: str) -> None:
    async with direct(root) as service:
        await committed(service, "plain")
        upper = upper_of(await service.prepare("remap", "plain"))
        os.chown(upper, 100000, 200000)
        await service.commit("remapped", "remap")
        (mount,) = await service.prepare("a", "remapped", LABELS)
        assert f"lowerdir={upper}:" in next(option for option in mount.options if option.startswith("lowerdir="))
        assert points(root) == []


async def test_who_is_refused_or_goes_away_leaves_no_mount(root: str) -> None:
    async with direct(root) as service:
        await committed(service, "one")
        await service.prepare("a", "one", LABELS)
        with refused("ALREADY_EXISTS"):
            await service.prepare("a", "one", LABELS)
        for steps in range(12):
            asking = asyncio.ensure_future(service.core.prepare(f"b{steps}", "one", LABELS))
            for _ in range(steps):
                await asyncio.sleep(0.0005)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        kept = [info.name for info in await service.list("kind==active")]
        for name in kept:
            await service.remove(name)
        async with asyncio.timeout(60):
            # A thread that mounts for somebody who has gone goes on for a while; its snapshot is trash until then.
            while service.core.store.trash() or points(root):
                await service.cleanup()
                await asyncio.sleep(0.02)
        assert "a" in kept and os.listdir(f"{root}/i") == []


async def test_what_a_former_process_left_is_taken_away(root: str) -> None:
    os.makedirs(f"{root}/lower")
    idmap.MappedLowers(root).attach(77, [f"{root}/lower"], IdMapping.parse("0:1:1", "0:1:1"))
    assert points(root) == [f"{root}/i/77/0"]
    async with direct(root) as service:
        service.core.recover()
        assert points(root) == []


def test_a_file_system_that_cannot_be_mapped_is_said_so(root: str) -> None:
    lowers = idmap.MappedLowers(root)
    with pytest.raises(MountError, match="ids cannot be mapped on proc") as caught:
        lowers.attach(1, ["/proc"], IdMapping.parse("0:1:1", "0:1:1"))
    assert "remap-ids" in caught.value.hint
    lowers.detach([1])
    assert os.listdir(lowers.directory) == []


def test_the_kernel_takes_the_mapping() -> None:
    before = set(os.listdir("/proc/self/fd"))
    mapping = IdMapping.parse("0:100000:1000,1000:0:1", "0:200000:65536")
    with idmap.user_namespace(mapping) as namespace:
        assert os.readlink(f"/proc/self/fd/{namespace}").startswith("user:[")
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_mapping_that_the_kernel_refuses_is_said_so() -> None:
    overlapping = IdMapping.parse("0:100000:10,5:200000:10", "0:1:1")
    with pytest.raises(MountError, match="refuses the id mapping"), idmap.user_namespace(overlapping):
        pass
