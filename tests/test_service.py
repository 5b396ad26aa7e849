"""The protocol core and its gRPC seam: the conformance suite both ways, and what it does not say."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sqlite3
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import grpc
import grpc.aio
import pytest
from conformance.snapshots import CHECKS, Direct, Service, committed, direct, over_socket, refused, upper_of

from weenv.core import errors
from weenv.plugin.containerd.client import ContainerdError
from weenv.plugin.containerd.schema import SCHEMA, SNAPSHOTS_METHODS
from weenv.plugin.containerd.types import LABEL_SNAPSHOT_REF, Kind, Usage
from weenv.plugin.snapshotter.metastore import Metastore
from weenv.plugin.snapshotter.metrics import Metrics
from weenv.plugin.snapshotter.rpc import listen, make_server, status_of
from weenv.plugin.snapshotter.service import TRANSITIONS, Snapshotter


def over_grpcio(root: str) -> contextlib.AbstractAsyncContextManager[Service]:
    return over_socket(root, transport="grpcio")


def with_spares(root: str) -> contextlib.AbstractAsyncContextManager[Service]:
    return over_socket(root, spares=16)


Factory = Callable[..., contextlib.AbstractAsyncContextManager[Service]]
FACTORIES: list[Factory] = [direct, over_socket, over_grpcio, with_spares]
TRANSPORTS = ("builtin", "grpcio")


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("r"))


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("check", CHECKS)
async def test_conformance(
    check: Callable[[Service], Awaitable[None]],
    factory: Callable[..., contextlib.AbstractAsyncContextManager[Service]],
    root: str,
) -> None:
    async with factory(root) as service:
        await check(service)


class OneLayer:
    """Lazy layers that are nothing but a table: the layers of ``ready`` resolve, anything may be broken."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.ready: dict[str, int] = {}
        self.broken: set[int] = set()
        self.mounted: set[int] = set()
        self.swept = 0
        self.begun: list[frozenset[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    def attached(self, layer_ids: Sequence[int]) -> bool:
        return set(layer_ids) <= self.mounted

    async def ensure(self, layer_ids: Sequence[int]) -> None:
        await self.gate.wait()
        for number in layer_ids:
            if number in self.broken:
                raise errors.UnavailableError("its registry is gone")
            self.mounted.add(number)

    def path(self, layer_id: int) -> str:
        path = f"{self.root}/m/{layer_id}"
        os.makedirs(path, exist_ok=True)
        return path

    def begins(self, layer_ids: frozenset[int]) -> None:
        self.begun.append(layer_ids)

    def usage(self, layer_id: int) -> Usage:
        return Usage(4096, 3)

    @contextlib.asynccontextmanager
    async def resolve(
        self, labels: Mapping[str, str], key: str, parent_ref: str, lowers: Sequence[str]
    ) -> AsyncIterator[int | None]:
        await self.gate.wait()
        yield self.ready.get(labels.get(LABEL_SNAPSHOT_REF, ""))

    async def sweep(self) -> None:
        self.swept += 1


@contextlib.asynccontextmanager
async def lazy(root: str, spares: int = 0) -> AsyncIterator[tuple[Direct, OneLayer]]:
    layers = OneLayer(root)
    async with direct(root, layers, spares=spares) as service:
        store = service.core.store
        for number, ref in enumerate("abc", 1):
            assert store.layer("sha256:" + ref * 64, "").id == number
            layers.ready[f"chain-{ref}"] = number
            layers.mounted.add(number)
        yield service, layers


def ref(name: str) -> dict[str, str]:
    return {LABEL_SNAPSHOT_REF: name}


async def test_a_lazy_layer_is_committed_within_prepare(root: str) -> None:
    async with lazy(root) as (service, _):
        with refused("ALREADY_EXISTS"):
            await service.prepare("ns/1/extract-1 chain-a", "", ref("chain-a"))
        (info,) = await service.list(f'labels."{LABEL_SNAPSHOT_REF}"==chain-a,parent==""')
        assert (info.name, info.kind, info.parent) == ("chain-a", Kind.COMMITTED, "")
        with refused("ALREADY_EXISTS"):
            await service.prepare("ns/2/extract-2 chain-b", "chain-a", ref("chain-b"))
        assert {item.name for item in await service.list()} == {"chain-a", "chain-b"}, "the temporary keys are not there"
        (mount,) = await service.prepare("c", "chain-b")
        assert f"lowerdir={root}/m/2:{root}/m/1" in mount.options
        (view,) = await service.view("v", "chain-a")
        assert (view.type, view.source, view.options) == ("bind", f"{root}/m/1", ("ro", "rbind"))
        assert await service.usage("chain-a") == Usage(4096, 3)
        await service.remove("c")
        await service.remove("v")
        await service.remove("chain-b")
        await service.cleanup()
        assert [item.name for item in await service.list()] == ["chain-a"]


async def test_a_container_that_begins_is_told_of_and_a_pull_or_a_view_is_not(root: str) -> None:
    async with lazy(root, 4) as (service, layers):
        service.core.recover()
        for number, name in enumerate(("chain-a", "chain-b")):
            with refused("ALREADY_EXISTS"):
                await service.prepare(f"ns/{number}/extract {name}", "chain-a" * number, ref(name))
        await service.prepare("ns/3/extract chain-x", "chain-b", ref("chain-x"))  # an ordinary layer is unpacked
        await service.prepare("ns/4/extract sha256:4", "chain-b")  # by a client that does not say so
        await service.view("v", "chain-b")
        await service.prepare("empty", "")
        assert layers.begun == []
        await service.prepare("c", "chain-b")
        assert layers.begun == [frozenset({1, 2})]
        await service.prepare("d", "chain-a")
        assert layers.begun[1:] == [frozenset({1})]
        await ready(service.core, 1)
        assert service.core.prepare_now([("e", "chain-b", {}), ("f", "chain-b", ref("chain-y"))])[0]
        assert layers.begun[2:] == [frozenset({1, 2})]


async def test_a_second_namespace_finds_the_same_snapshot(root: str) -> None:
    async with lazy(root) as (service, layers):
        for attempt in range(3):
            with refused("ALREADY_EXISTS"):
                await service.prepare(f"ns{attempt}/1/extract chain-a", "", ref("chain-a"))
            layers.ready.clear()  # what is there needs no resolving
        assert len(await service.list()) == 1


async def test_the_same_chain_on_another_parent_gets_a_name_of_its_own(root: str) -> None:
    """One namespace unpacked the layer below, another has it lazily: containerd wants the exact parent."""
    async with lazy(root) as (service, _):
        await committed(service, "ns1/3/chain-a")
        for parent, labels in (("", ref("chain-a")), ("chain-a", ref("chain-b")), ("ns1/3/chain-a", ref("chain-b"))):
            with refused("ALREADY_EXISTS"):
                await service.prepare("extract", parent, labels)
        found = await service.list(f'labels."{LABEL_SNAPSHOT_REF}"==chain-b')
        assert {info.parent for info in found} == {"chain-a", "ns1/3/chain-a"}
        assert len({info.name for info in found}) == 2
        (mount,) = await service.prepare("c", next(info.name for info in found if info.parent.startswith("ns1")))
        assert any(f"{root}/m/2:{root}/s/" in option for option in mount.options), "lazy on ordinary"


async def test_an_ordinary_layer_on_lazy_ones(root: str) -> None:
    async with lazy(root) as (service, _):
        with refused("ALREADY_EXISTS"):
            await service.prepare("extract", "", ref("chain-a"))
        described = await service.prepare("ns/2/extract chain-x", "chain-a", ref("chain-x"))
        await service.commit("ns/3/chain-x", "ns/2/extract chain-x", ref("chain-x"))
        (mount,) = await service.prepare("c", "ns/3/chain-x")
        assert f"lowerdir={upper_of(described)}:{root}/m/1" in mount.options


async def test_updates_cannot_make_a_lazy_snapshot_another_one(root: str) -> None:
    async with lazy(root) as (service, _):
        with refused("ALREADY_EXISTS"):
            await service.prepare("extract", "", ref("chain-a"))
        (info,) = await service.list()
        changed = await service.update(
            type(info)(info.name, "", info.kind, 0, 0, {LABEL_SNAPSHOT_REF: "chain-z", "containerd.io/snapshot/x": "1"}),
            "labels",
        )
        assert dict(changed.labels) == {LABEL_SNAPSHOT_REF: "chain-a", "containerd.io/snapshot/x": "1"}
        with refused("ALREADY_EXISTS"):
            await service.prepare("extract", "", ref("chain-a"))


async def test_a_layer_that_is_not_mounted_is_mounted_when_needed_or_refused(root: str) -> None:
    async with lazy(root) as (service, layers):
        with refused("ALREADY_EXISTS"):
            await service.prepare("extract", "", ref("chain-a"))
        await service.prepare("running", "chain-a")
        layers.mounted.clear()
        layers.broken.add(1)
        for request in (service.prepare("c", "chain-a"), service.view("v", "chain-a"), service.mounts("running")):
            with refused("UNAVAILABLE"):
                await request
        assert len(await service.list()) == 2
        assert (await service.stat("running")).kind is Kind.ACTIVE
        await service.remove("running")
        layers.broken.clear()
        await service.prepare("c", "chain-a")


async def test_a_snapshot_removed_while_its_layers_are_mounted_is_not_found(root: str) -> None:
    async with lazy(root) as (service, layers):
        with refused("ALREADY_EXISTS"):
            await service.prepare("extract", "", ref("chain-a"))
        layers.mounted.clear()
        layers.gate.clear()
        waiting = asyncio.ensure_future(service.prepare("c", "chain-a"))
        await asyncio.sleep(0)
        await service.remove("chain-a")
        layers.gate.set()
        with refused("NOT_FOUND"):
            await waiting
        assert await service.list() == []


@pytest.mark.parametrize("steps", range(6))
async def test_cancelled_anywhere_prepare_leaves_all_or_nothing(root: str, steps: int) -> None:
    async with lazy(root) as (service, layers):
        with refused("ALREADY_EXISTS"):
            await service.prepare("extract", "", ref("chain-a"))
        layers.mounted.clear()
        layers.gate.clear()
        tasks = [
            asyncio.ensure_future(service.prepare("c", "chain-a")),
            asyncio.ensure_future(service.prepare("extract", "chain-a", ref("chain-b"))),
            asyncio.ensure_future(service.prepare("ordinary", "", ref("chain-q"))),
        ]
        if steps >= 3:
            layers.gate.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        layers.gate.set()
        rows = {info.name: info.kind for info in await service.list()}
        directories = {int(name) for name in os.listdir(f"{root}/s")}
        assert directories == {
            snapshot.id for page in service.core.store.walk() for snapshot in page if snapshot.kind is Kind.ACTIVE
        }
        assert rows.get("chain-b", Kind.COMMITTED) is Kind.COMMITTED
        for name in ("c", "ordinary"):
            if name in rows:
                await service.remove(name)
            await service.prepare(name, "chain-a" if name == "c" else "")


async def test_a_commit_beside_a_removal_is_refused(root: str) -> None:
    async with direct(root) as service:
        await service.prepare("a", "")
        commit = asyncio.ensure_future(service.commit("c", "a"))
        await asyncio.sleep(0)
        await service.remove("a")
        with refused("NOT_FOUND"):
            await commit
        assert await service.list() == []


@pytest.mark.parametrize("factory", FACTORIES)
async def test_many_long_labels_are_listed_or_refused(
    factory: Callable[..., contextlib.AbstractAsyncContextManager[Service]], root: str
) -> None:
    """What is taken can be listed: a List that fails for one snapshot's labels would stop containerd's collection."""
    async with factory(root) as service:
        long = {"a": "x" * (4_100_000)}
        for name in "abcdef":
            await service.prepare(name, "", long)
        assert [info.name for info in await service.list()] == list("abcdef")
        await service.commit("committed", "a", long)
        many = {f"label{n}": "x" * 40 for n in range(100_000)}
        for labels in ({"a": "x" * 4_200_000}, many, {"a": "\N{EURO SIGN}" * 1_500_000}):
            with refused("INVALID_ARGUMENT"):
                await service.prepare("more", "", labels)
            with refused("INVALID_ARGUMENT"):
                await service.view("more", "", labels)
            with refused("INVALID_ARGUMENT"):
                await service.commit("more", "b", labels)
        assert len(await service.list()) == 6


async def test_recovery_squares_directories_and_rows(root: str, caplog: pytest.LogCaptureFixture) -> None:
    async with direct(root) as service:
        await committed(service, "one")
        kept = upper_of(await service.prepare("a", "one"))
        lost = upper_of(await service.prepare("b", "one"))
        await service.view("v", "one")
    os.makedirs(f"{root}/s/900/fs")
    os.rename(os.path.dirname(lost), f"{root}/s/901")
    async with direct(root) as service:
        service.core.recover()
        await service.cleanup()
        assert os.path.isdir(kept)
        assert sorted(os.listdir(f"{root}/s")) == ["1", "2"]
        assert int(upper_of(await service.prepare("c", "one")).split("/")[-2]) == 902, "ids seen on disk are not used again"
        assert [record.levelname for record in caplog.records if "gone" in record.message] == ["ERROR"]
        await service.remove("b")


async def test_a_crash_between_row_and_directory_leaves_no_rubbish(root: str) -> None:
    async with direct(root) as service:
        upper = upper_of(await service.prepare("a", ""))
        await service.remove("a")
    async with direct(root) as service:  # killed before cleanup
        service.core.recover()
        assert os.path.exists(upper)
        await service.cleanup()
        assert not os.path.exists(upper)
        assert service.core.store.trash() == []


async def test_directories_made_ahead(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Metastore(f"{root}/metastore.db")
    core = Snapshotter(root, store, spares=4)
    core.recover()
    service = Direct(core)
    await asyncio.sleep(0.1)
    made = [int(name) for name in os.listdir(f"{root}/s")]
    assert len(made) == 4
    uppers = [upper_of(await service.prepare(f"k{number}", "")) for number in range(20)]
    assert len(set(uppers)) == 20 and set(made) <= {int(upper.split("/")[-2]) for upper in uppers}
    for upper in uppers:
        work = os.path.join(os.path.dirname(upper), "work")
        assert (stat.S_IMODE(os.stat(upper).st_mode), stat.S_IMODE(os.stat(work).st_mode)) == (0o755, 0o711)
    with refused("ALREADY_EXISTS"):
        await service.prepare("k0", "")
    core.close()
    store.close()
    async with direct(root) as service:  # those that nobody took go at the next start
        service.core.recover()
        await service.cleanup()
        assert {int(name) for name in os.listdir(f"{root}/s")} == service.core.store.ids()


async def test_a_full_disk_is_said_so(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with direct(root) as service:

        def full(*_args: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "mkdir", full)
        with refused("RESOURCE_EXHAUSTED"):
            await service.prepare("a", "")
        monkeypatch.undo()
        await service.prepare("a", "")


def test_every_error_of_the_tree_has_a_status() -> None:
    def tree(kind: type[errors.WeenvError]) -> list[type[errors.WeenvError]]:
        return [kind, *(below for child in kind.__subclasses__() for below in tree(child))]

    for kind in tree(errors.WeenvError):
        if kind.__module__ != "weenv.core.errors":
            continue
        code, text = status_of(kind("two\nlines", hint="do this"))
        assert text == "two lines (do this)"
        assert code is not grpc.StatusCode.UNKNOWN
    assert status_of(sqlite3.OperationalError("database or disk is full"))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert status_of(KeyError("x"))[0] is grpc.StatusCode.INTERNAL


def test_the_table_of_transitions_is_closed() -> None:
    """Every state that can be entered can be left, and nothing but an active snapshot can be committed."""
    entered = {after for after in TRANSITIONS.values() if after is not None}
    assert entered == {before for _, before in TRANSITIONS if before is not None}
    assert [before for request, before in TRANSITIONS if request == "Commit"] == [Kind.ACTIVE]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_the_socket_is_for_root_alone_and_a_dead_one_is_replaced(root: str, transport: str) -> None:
    path = f"{root}/s.sock"
    for _ in range(2):
        async with over_socket(root, transport=transport) as service:
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            assert await service.list() == []
    os.mknod(f"{root}/file", 0o600 | stat.S_IFREG)
    async with direct(root) as service:
        for bad in (f"{root}/file", f"{root}/{'x' * 120}"):
            with pytest.raises(errors.ConfigError):
                listen(make_server(service.core, Metrics()), bad)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_malformed_requests_do_not_bring_the_server_down(root: str, transport: str) -> None:
    async with over_socket(root, transport=transport) as service, grpc.aio.insecure_channel(f"unix:{root}/s.sock") as channel:
        for method in SNAPSHOTS_METHODS:
            if method == "List":
                continue
            call = channel.unary_unary(f"/containerd.services.snapshots.v1.Snapshots/{method}")
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"\xff\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/containerd.services.snapshots.v1.Snapshots/Explode")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await service.prepare("a", "")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_the_namespace_reaches_the_log(root: str, caplog: pytest.LogCaptureFixture, transport: str) -> None:
    async with over_socket(root, transport=transport) as service:
        await committed(service, "one", files={"f": "x"})
        os.rename(f"{root}/s", f"{root}/moved")
        with pytest.raises(ContainerdError):
            await service.prepare("a", "one")
        os.rename(f"{root}/moved", f"{root}/s")
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (record.__dict__["namespace"], record.__dict__["method"]) == ("test", "Prepare")


def test_commit_takes_the_field_of_newer_clients() -> None:
    """containerd 2.2 sends a parent with Commit to snapshotters that can rebase; an unasked-for one is no error."""
    message = SCHEMA["CommitSnapshotRequest"](name="n", key="k", parent="p")
    assert SCHEMA["CommitSnapshotRequest"].FromString(message.SerializeToString()).parent == "p"


async def ready(core: Snapshotter, count: int) -> None:
    """Until just ``count`` directories are made ahead; no more are made then."""
    spares = core._spares
    async with asyncio.timeout(60):
        while spares._filling or len(spares) < count:
            if not spares._filling:
                spares.fill()
            await asyncio.sleep(0.001)
    spares._count = 0


async def test_prepares_that_arrive_together(root: str) -> None:
    async with direct(root, spares=8) as service:
        core = service.core
        core.recover()
        await committed(service, "base")
        await ready(core, 8)
        refusals = [("", "base", {}), ("a", "base", {}), ("x", "", {}), ("x", "none", {}), ("x sha256:1", "base", {})]
        refusals += [("x", "base", {LABEL_SNAPSHOT_REF: "sha256:2"}), ("x", "base", {"n": "v" * (5 << 20)})]
        refusals += [("x", "base", {"containerd.io/snapshot/uidmapping": "0:1000:1"})]
        first, *refused_ = core.prepare_now([("a", "base", {"n": "1"}), *refusals])
        assert first is not None and refused_ == [None] * len(refusals), "left to prepare, which says why"
        assert first == await service.mounts("a")
        assert (await service.stat("a")).labels == {"n": "1"}
        assert sorted(info.name for info in await service.list()) == ["a", "base"]
        assert len(core._spares) == 7, "what was not used is used by others"
        many = core.prepare_now([(f"k{number}", "base", {}) for number in range(9)])
        assert [mounts is None for mounts in many] == [False] * 7 + [True] * 2, "no directory is waited for"
        uppers = [upper_of(mounts) for mounts in many if mounts]
        assert len({*uppers, upper_of(first)}) == 8 and all(os.path.isdir(upper) for upper in uppers)


async def test_a_full_disk_takes_back_all_that_arrived_together(root: str) -> None:
    async with direct(root, spares=8) as service:
        core = service.core
        core.recover()
        await committed(service, "base")
        await ready(core, 8)
        db = core.store._db
        db.execute(f"PRAGMA max_page_count={db.execute('PRAGMA page_count').fetchone()[0]}")
        large = {"n": "v" * 20000}
        assert core.prepare_now([("a", "base", {}), ("b", "base", large), ("c", "base", {})]) == [None] * 3
        assert len(core._spares) == 8 and not db.in_transaction
        assert [info.name for info in await service.list()] == ["base"]
        with refused("RESOURCE_EXHAUSTED", f"{root} is full: make room"):
            await service.prepare("b", "base", large)
        db.execute("PRAGMA max_page_count=1000000")
        assert None not in core.prepare_now([("a", "base", {}), ("b", "base", large)])
        assert (await service.stat("b")).labels == large


async def test_many_callers_at_once_each_get_their_own(root: str) -> None:
    async with over_socket(root, spares=64) as service:
        await committed(service, "base")
        for turn in range(4):
            keys = [f"{turn}-{number}" for number in range(50)]
            found = await asyncio.gather(*(service.prepare(key, "base") for key in (*keys, keys[0])), return_exceptions=True)
            good = [mounts for mounts in found if not isinstance(mounts, BaseException)]
            assert len({upper_of(mounts) for mounts in good}) == len(good) == 50
            (error,) = [error for error in found if isinstance(error, BaseException)]
            assert isinstance(error, ContainerdError) and error.code == "ALREADY_EXISTS"
        infos = await service.list("kind==active")
        assert {info.name for info in infos} == {f"{turn}-{number}" for turn in range(4) for number in range(50)}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_root_that_is_deleted_while_it_is_served(root: str, transport: str) -> None:
    async with over_socket(root, transport=transport, spares=8) as service:
        await committed(service, "base")
        os.rename(root, root + ".away")
        for _ in range(2):
            for work in (service.prepare("a", "base"), service.stat("base"), service.list(), service.cleanup()):
                with pytest.raises(ContainerdError, match=f"root {root} was deleted or replaced while it was served") as caught:
                    await work
                assert caught.value.code == "UNAVAILABLE" and "restart weenv snapshotter" in str(caught.value)
        os.makedirs(f"{root}/s")
        with refused("UNAVAILABLE"):
            await service.prepare("a", "base")
        os.rmdir(f"{root}/s")
        os.rmdir(root)
        os.rename(root + ".away", root)
        assert os.path.isdir(upper_of(await service.prepare("a", "base")))
