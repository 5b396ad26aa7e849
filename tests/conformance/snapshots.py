"""The conformance suite of snapshots.v1: what every snapshotter has to do, whatever it is made of.

A check is a coroutine that is given a :class:`Service` with nothing in it. The service is reached in process or over a
socket, by the same methods; errors are :class:`ContainerdError` with gRPC's status name in both cases. The checks are
the rules of containerd's overlayfs snapshotter, written down from its behaviour (core/snapshots/snapshotter.go describes
them). What needs no mount is in :data:`CHECKS`; what needs root is in :data:`MOUNT_CHECKS`.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol

import pytest
from simulator.containerd import Backend

from weenv.plugin.containerd.client import Client, ContainerdError
from weenv.plugin.containerd.types import Kind, Mount, SnapshotInfo, Usage
from weenv.plugin.snapshotter import mounts
from weenv.plugin.snapshotter.lazylayers import LazyLayers
from weenv.plugin.snapshotter.metastore import Metastore
from weenv.plugin.snapshotter.metrics import Metrics
from weenv.plugin.snapshotter.rpc import listen, make_server, status_of
from weenv.plugin.snapshotter.service import Snapshotter


class Service(Backend, Protocol):
    """The requests, with the client's signatures."""

    async def update(self, info: SnapshotInfo, *fields: str) -> SnapshotInfo: ...
    async def usage(self, key: str) -> Usage: ...


class Direct:
    """A protocol core as a :class:`Service`, without gRPC."""

    def __init__(self, core: Snapshotter) -> None:
        self.core = core

    async def _do(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except Exception as error:
            code, text = status_of(error)
            raise ContainerdError(text, code.name) from error

    async def prepare(self, key: str, parent: str = "", labels: Mapping[str, str] | None = None) -> list[Mount]:
        return await self._do(self.core.prepare(key, parent, dict(labels or {})))  # type: ignore[no-any-return]

    async def view(self, key: str, parent: str = "", labels: Mapping[str, str] | None = None) -> list[Mount]:
        return await self._do(self.core.view(key, parent, dict(labels or {})))  # type: ignore[no-any-return]

    async def mounts(self, key: str) -> list[Mount]:
        return await self._do(self.core.mounts(key))  # type: ignore[no-any-return]

    async def commit(self, name: str, key: str, labels: Mapping[str, str] | None = None) -> None:
        await self._do(self.core.commit(name, key, dict(labels or {})))

    async def remove(self, key: str) -> None:
        await self._do(self.core.remove(key))

    async def stat(self, key: str) -> SnapshotInfo:
        return await self._do(self.core.stat(key))  # type: ignore[no-any-return]

    async def update(self, info: SnapshotInfo, *fields: str) -> SnapshotInfo:
        return await self._do(self.core.update(info.name, info.labels, list(fields)))  # type: ignore[no-any-return]

    async def list(self, *filters: str) -> list[SnapshotInfo]:
        async def gather() -> list[SnapshotInfo]:
            blocks: AsyncIterator[list[SnapshotInfo]] = self.core.list(list(filters))
            return [info async for block in blocks for info in block]

        return await self._do(gather())  # type: ignore[no-any-return]

    async def usage(self, key: str) -> Usage:
        return await self._do(self.core.usage(key))  # type: ignore[no-any-return]

    async def cleanup(self) -> None:
        await self._do(self.core.cleanup())


@asynccontextmanager
async def direct(root: str, layers: LazyLayers | None = None, spares: int = 0) -> AsyncIterator[Direct]:
    """A snapshotter of ours in this process."""
    store = Metastore(f"{root}/metastore.db")
    core = Snapshotter(root, store, layers, spares=spares)
    try:
        yield Direct(core)
    finally:
        core.close()
        store.close()


@asynccontextmanager
async def over_socket(
    root: str, layers: LazyLayers | None = None, transport: str = "builtin", spares: int = 0
) -> AsyncIterator[Service]:
    """The same, by containerd's client over a socket."""
    async with direct(root, layers, spares) as service:
        service.core.recover()
        server = make_server(service.core, Metrics(), transport)
        listen(server, f"{root}/s.sock")
        await server.start()
        try:
            async with Client(f"{root}/s.sock") as client:
                yield client.namespace("test").snapshots("weenv")
        finally:
            await server.stop(None)


@contextmanager
def refused(code: str, words: str = "") -> Iterator[None]:
    """The block has to fail with this status, and these words among others."""
    with pytest.raises(ContainerdError) as caught:
        yield
    assert caught.value.code == code and words in str(caught.value), caught.value


async def committed(service: Service, name: str, parent: str = "", files: Mapping[str, str] | None = None) -> str:
    """Make a committed snapshot with files written straight into its upper directory; returns that directory."""
    described = await service.prepare(f"key of {name}", parent)
    upper = upper_of(described)
    for path, text in (files or {}).items():
        os.makedirs(os.path.dirname(os.path.join(upper, path)), exist_ok=True)
        _write(os.path.join(upper, path), text)
    await service.commit(name, f"key of {name}")
    return upper


def upper_of(described: list[Mount]) -> str:
    """The writable directory of a prepared snapshot."""
    (mount,) = described
    if mount.type == "bind":
        return mount.source
    return next(option[9:] for option in mount.options if option.startswith("upperdir="))


def lowers_of(described: list[Mount]) -> list[str]:
    """The directories of an overlay's lowerdir option."""
    (mount,) = described
    return next(option[9:] for option in mount.options if option.startswith("lowerdir=")).split(":")


async def without_parent_it_is_a_bind_mount(service: Service) -> None:
    (mount,) = await service.prepare("a", "")
    assert (mount.type, mount.options) == ("bind", ("rw", "rbind"))
    assert stat.S_IMODE(os.stat(mount.source).st_mode) == 0o755
    (view,) = await service.view("v", "")
    assert (view.type, view.options) == ("bind", ("ro", "rbind"))
    assert os.listdir(view.source) == []


async def with_parents_it_is_an_overlay(service: Service) -> None:
    first = await committed(service, "one")
    second = await committed(service, "two", "one")
    described = await service.prepare("a", "two")
    (mount,) = described
    assert (mount.type, mount.source) == ("overlay", "overlay")
    assert [option.partition("=")[0] for option in mount.options[:3]] == ["workdir", "upperdir", "lowerdir"]
    assert lowers_of(described) == [second, first], "the topmost comes first"
    work = mount.options[0].partition("=")[2]
    assert os.listdir(work) == [] and os.stat(work).st_dev == os.stat(upper_of(described)).st_dev
    if os.path.exists("/sys/module/overlay/parameters/index"):
        assert "index=off" in mount.options
    assert await service.mounts("a") == described


async def views(service: Service) -> None:
    first = await committed(service, "one")
    second = await committed(service, "two", "one")
    assert await service.view("v1", "one") == [Mount("bind", first, ("ro", "rbind"))]
    described = await service.view("v2", "two")
    assert lowers_of(described) == [second, first]
    assert not any(option.startswith(("upperdir", "workdir")) for option in described[0].options)
    assert await service.mounts("v2") == described
    assert (await service.stat("v2")).kind is Kind.VIEW
    assert await service.usage("v2") == Usage(0, 0)
    with refused("FAILED_PRECONDITION"):
        await service.commit("three", "v2")


async def stat_tells_kind_parent_labels_and_times(service: Service) -> None:
    await service.prepare("a", "", {"containerd.io/snapshot/x": "1"})
    info = await service.stat("a")
    assert (info.name, info.parent, info.kind, dict(info.labels)) == ("a", "", Kind.ACTIVE, {"containerd.io/snapshot/x": "1"})
    assert info.created == info.updated > 1_700_000_000 * 10**9
    await service.commit("c", "a", {"containerd.io/snapshot/y": "2"})
    done = await service.stat("c")
    assert (done.kind, dict(done.labels)) == (Kind.COMMITTED, {"containerd.io/snapshot/y": "2"}), "labels are replaced"
    assert done.created >= info.created
    with refused("NOT_FOUND"):
        await service.stat("a")
    await service.prepare("b", "c")
    assert (await service.stat("b")).parent == "c"


async def names_and_parents_are_checked(service: Service) -> None:
    await committed(service, "one")
    await service.prepare("a", "one")
    with refused("ALREADY_EXISTS"):
        await service.prepare("a", "one")
    with refused("ALREADY_EXISTS"):
        await service.view("a", "one")
    with refused("ALREADY_EXISTS"):
        await service.prepare("one", "")
    with refused("NOT_FOUND"):
        await service.prepare("b", "nowhere")
    with refused("INVALID_ARGUMENT"):
        await service.prepare("b", "a")
    with refused("INVALID_ARGUMENT"):
        await service.prepare("", "one")
    with refused("ALREADY_EXISTS"):
        await service.commit("one", "a")
    with refused("NOT_FOUND"):
        await service.commit("two", "b")
    with refused("INVALID_ARGUMENT"):
        await service.commit("", "a")
    with refused("FAILED_PRECONDITION"):
        await service.commit("two", "one")
    with refused("FAILED_PRECONDITION"):
        await service.mounts("one")
    for request in (service.mounts, service.remove, service.usage, service.stat):
        with refused("NOT_FOUND"):
            await request("b")
    assert {info.name for info in await service.list()} == {"one", "a"}, "refused requests leave nothing behind"


async def removal(service: Service) -> None:
    await committed(service, "one")
    await committed(service, "two", "one")
    upper = upper_of(await service.prepare("a", "two"))
    with refused("FAILED_PRECONDITION"):
        await service.remove("one")
    with refused("FAILED_PRECONDITION"):
        await service.remove("two")
    await service.remove("a")
    with refused("NOT_FOUND"):
        await service.remove("a")
    await service.cleanup()
    assert not os.path.exists(upper)
    await service.remove("two")
    await service.remove("one")
    await service.cleanup()
    assert await service.list() == []
    again = upper_of(await service.prepare("a", ""))
    assert again != upper, "a directory name is never used twice"


async def labels_can_be_updated(service: Service) -> None:
    await service.prepare("a", "", {"containerd.io/snapshot/x": "1", "containerd.io/snapshot/y": "2"})
    info = await service.stat("a")

    def wanted(**labels: str) -> SnapshotInfo:
        named = {f"containerd.io/snapshot/{name}": value for name, value in labels.items()}
        return SnapshotInfo("a", "", Kind.ACTIVE, info.created, info.updated, named)

    changed = await service.update(wanted(x="3", z="4"), "labels.containerd.io/snapshot/x")
    assert dict(changed.labels) == {"containerd.io/snapshot/x": "3", "containerd.io/snapshot/y": "2"}
    assert changed.updated > info.updated and changed.created == info.created
    changed = await service.update(wanted(), "labels.containerd.io/snapshot/x")
    assert dict(changed.labels) == {"containerd.io/snapshot/y": "2"}
    assert dict((await service.update(wanted(z="4"), "labels")).labels) == {"containerd.io/snapshot/z": "4"}
    assert dict((await service.update(wanted(q="5"))).labels) == {"containerd.io/snapshot/q": "5"}
    with refused("INVALID_ARGUMENT"):
        await service.update(wanted(), "parent")
    with refused("NOT_FOUND"):
        await service.update(SnapshotInfo("b", "", Kind.ACTIVE, 0, 0, {}), "labels")
    assert dict((await service.stat("a")).labels) == {"containerd.io/snapshot/q": "5"}


async def listing_and_filters(service: Service) -> None:
    ref = "containerd.io/snapshot.ref"
    await committed(service, "one")
    for number in range(120):
        await service.prepare(f"k{number}", "one", {ref: f"sha256:{number % 3}", "containerd.io/snapshot/n": str(number)})
    everything = await service.list()
    assert len(everything) == 121 and len({info.name for info in everything}) == 121
    by_ref = await service.list(f'labels."{ref}"==sha256:1,parent=="one"')
    assert {info.name for info in by_ref} == {f"k{n}" for n in range(120) if n % 3 == 1}
    assert [info.name for info in await service.list("name==k7")] == ["k7"]
    assert [info.name for info in await service.list("kind==committed")] == ["one"]
    assert {info.name for info in await service.list("name==one", 'labels."containerd.io/snapshot/n"==5')} == {"one", "k5"}
    assert await service.list(f'labels."{ref}"==sha256:1,parent=="two"') == []
    assert len(await service.list("parent==one,kind==active,name~=^k1.$")) == 10
    with refused("INVALID_ARGUMENT"):
        await service.list("name=")


async def usage_counts_the_upper_directory(service: Service) -> None:
    upper = upper_of(await service.prepare("a", ""))
    _write(os.path.join(upper, "f"), "x" * 100_000)
    os.link(os.path.join(upper, "f"), os.path.join(upper, "g"))
    usage = await service.usage("a")
    expected = sum(os.lstat(path).st_blocks * 512 for path in (upper, os.path.join(upper, "f")))
    assert usage == Usage(expected, 2), "hard links count once"
    await service.commit("c", "a")
    assert await service.usage("c") == usage
    await service.prepare("b", "c")
    assert (await service.usage("b")).inodes == 1, "parents are not counted"


async def id_mapped_roots_belong_to_the_mapped_root(service: Service) -> None:
    if os.geteuid() != 0:
        return
    labels = {"containerd.io/snapshot/uidmapping": "0:100000:65536", "containerd.io/snapshot/gidmapping": "0:200000:65536"}
    upper = upper_of(await service.prepare("a", "", labels))
    status = os.stat(upper)
    assert (status.st_uid, status.st_gid) == (100000, 200000)
    await service.commit("c", "a")
    status = os.stat(upper_of(await service.prepare("b", "c")))
    assert (status.st_uid, status.st_gid) == (100000, 200000), "the parent's root decides"
    with refused("INVALID_ARGUMENT"):
        await service.prepare("d", "", {"containerd.io/snapshot/uidmapping": "1:2:3"})


async def many_at_once(service: Service) -> None:
    await committed(service, "one")
    keys = [f"k{number}" for number in range(20)]
    described = await asyncio.gather(
        *(service.prepare(key, "one") for key in keys), *(service.view("v" + key, "one") for key in keys)
    )
    assert len({upper_of(mounts) for mounts in described[:20]}) == 20
    outcomes = await asyncio.gather(*(service.prepare("same", "one") for _ in range(10)), return_exceptions=True)
    failed = [outcome for outcome in outcomes if isinstance(outcome, ContainerdError)]
    assert len(failed) == 9 and {error.code for error in failed} == {"ALREADY_EXISTS"}
    outcomes = await asyncio.gather(*(service.commit("done", "same") for _ in range(5)), return_exceptions=True)
    assert sum(outcome is None for outcome in outcomes) == 1
    await asyncio.gather(*(service.remove(key) for key in keys), service.cleanup(), service.cleanup())
    await service.cleanup()
    assert {info.name for info in await service.list("kind==active")} == set()


async def a_deep_chain_fits_one_page_of_mount_options(service: Service) -> None:
    parent = ""
    for number in range(127):
        name = f"sha256:{number:064x}"
        await committed(service, name, parent)
        parent = name
    described = await service.prepare("a", parent)
    assert len(lowers_of(described)) == 127 == len(set(lowers_of(described)))
    root = os.path.dirname(os.path.dirname(os.path.dirname(upper_of(described))))
    options = ",".join(described[0].options).replace(root, "/var/lib/weenv")
    assert len(options) < 4096


CHECKS: list[Callable[[Service], Awaitable[None]]] = [
    without_parent_it_is_a_bind_mount,
    with_parents_it_is_an_overlay,
    views,
    stat_tells_kind_parent_labels_and_times,
    names_and_parents_are_checked,
    removal,
    labels_can_be_updated,
    listing_and_filters,
    usage_counts_the_upper_directory,
    id_mapped_roots_belong_to_the_mapped_root,
    many_at_once,
    a_deep_chain_fits_one_page_of_mount_options,
]


@contextmanager
def mounted(described: list[Mount], target: str) -> Iterator[str]:
    """Mount as containerd would, at ``target``."""
    os.makedirs(target, exist_ok=True)
    (mount,) = described
    if mount.type == "bind":
        mounts.mount(mount.source, target, "", mounts.MS_BIND | mounts.MS_REC)
        if "ro" in mount.options:
            mounts.mount("", target, "", mounts.MS_BIND | mounts.MS_REMOUNT | mounts.MS_RDONLY)
    else:
        mounts.mount(mount.source, target, mount.type, 0, ",".join(mount.options))
    try:
        yield target
    finally:
        mounts.unmount(target)


def _write(path: str, text: str = "") -> None:
    with open(path, "w") as file:
        file.write(text)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


async def files_show_through_and_deletions_hold(service: Service, scratch: str) -> None:
    with mounted(await service.prepare("a", ""), f"{scratch}/a") as root:
        os.makedirs(f"{root}/d/e")
        for name in ("keep", "gone", "changed", "d/below", "d/e/moved"):
            _write(f"{root}/{name}", name)
    await service.commit("one", "a")
    with mounted(await service.prepare("b", "one"), f"{scratch}/b") as root:
        os.unlink(f"{root}/gone")
        _write(f"{root}/changed", "new")
        os.rename(f"{root}/d/e/moved", f"{root}/moved")
        os.unlink(f"{root}/d/below")
        os.rmdir(f"{root}/d/e")
        os.rmdir(f"{root}/d")
        os.mkdir(f"{root}/d")
        os.chmod(f"{root}/keep", 0o751)
    await service.commit("two", "b")
    for described in (await service.prepare("c", "two"), await service.view("v", "two")):
        with mounted(described, f"{scratch}/c") as root:
            assert sorted(os.listdir(root)) == ["changed", "d", "keep", "moved"]
            assert (_read(f"{root}/changed"), _read(f"{root}/moved"), os.listdir(f"{root}/d")) == ("new", "d/e/moved", [])
            assert stat.S_IMODE(os.stat(f"{root}/keep").st_mode) == 0o751
    with mounted(await service.view("v1", "one"), f"{scratch}/v") as root:
        assert _read(f"{root}/gone") == "gone"
        with pytest.raises(OSError, match="Read-only"):
            _write(f"{root}/new")


async def two_containers_do_not_see_each_other(service: Service, scratch: str) -> None:
    await committed(service, "one", files={"f": "base"})
    first, second = await service.prepare("a", "one"), await service.prepare("b", "one")
    with mounted(first, f"{scratch}/a") as left, mounted(second, f"{scratch}/b") as right:
        _write(f"{left}/f", "left")
        os.unlink(f"{right}/f")
        assert _read(f"{left}/f") == "left" and os.listdir(right) == []
    with mounted(await service.mounts("a"), f"{scratch}/a") as left:
        assert _read(f"{left}/f") == "left", "what was written is there when mounted again"


async def ownership_of_the_root_is_kept(service: Service, scratch: str) -> None:
    upper = upper_of(await service.prepare("a", ""))
    os.chown(upper, 123, 456)
    await service.commit("one", "a")
    with mounted(await service.prepare("b", "one"), f"{scratch}/b") as root:
        status = os.stat(root)
        assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (123, 456, 0o755)


MOUNT_CHECKS: list[Callable[[Service, str], Awaitable[None]]] = [
    files_show_through_and_deletions_hold,
    two_containers_do_not_see_each_other,
    ownership_of_the_root_is_kept,
]
