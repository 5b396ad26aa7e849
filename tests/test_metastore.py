"""The metastore: rows, ids, and what survives ``kill -9``."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from weenv.core.errors import SnapshotExists, SnapshotInUse, SnapshotNotFound, StorageError
from weenv.plugin.containerd.types import LABEL_SNAPSHOT_REF, Kind
from weenv.plugin.snapshotter.metastore import Metastore


@pytest.fixture
def path(tmp_path: object) -> str:
    return f"{tmp_path}/metastore.db"


@pytest.fixture
def store(path: str) -> Iterator[Metastore]:
    opened = Metastore(path)
    yield opened
    opened.close()


def add(store: Metastore, name: str, parent: int | None = None, kind: Kind = Kind.COMMITTED, **labels: str) -> int:
    return store.add(kind, name, parent, labels)


def test_what_is_written_is_read(store: Metastore) -> None:
    base = store.add(Kind.COMMITTED, "base", None, {LABEL_SNAPSHOT_REF: "sha256:x", "ö": "ü\n'"})
    child = add(store, "child", base, Kind.ACTIVE)
    found = store.get("child")
    assert (found.id, found.parent_id, found.parent, found.kind, found.ref) == (child, base, "base", Kind.ACTIVE, "")
    assert dict(store.get("base").labels) == {LABEL_SNAPSHOT_REF: "sha256:x", "ö": "ü\n'"}
    assert [snapshot.name for snapshot in store.with_ref("sha256:x")] == ["base"]
    assert store.with_ref("") == []
    assert store.find("nobody") is None
    with pytest.raises(SnapshotNotFound):
        store.get("nobody")
    with pytest.raises(SnapshotExists):
        add(store, "child")
    assert store.ids() == {base, child}


def test_a_parent_is_followed_through_its_renaming(store: Metastore) -> None:
    base = add(store, "key", None, Kind.ACTIVE)
    store.commit(store.get("key"), "name", {"a": "b"}, 4096, 2)
    add(store, "child", base)
    assert store.get("child").parent == "name"
    done = store.get("name")
    assert (done.id, done.kind, done.size, done.inodes, dict(done.labels)) == (base, Kind.COMMITTED, 4096, 2, {"a": "b"})


def test_commit_is_refused_where_the_name_is_taken_or_the_snapshot_gone(store: Metastore) -> None:
    add(store, "taken")
    add(store, "key", None, Kind.ACTIVE)
    snapshot = store.get("key")
    with pytest.raises(SnapshotExists):
        store.commit(snapshot, "taken", {}, 0, 0)
    store.remove(snapshot)
    with pytest.raises(SnapshotNotFound):
        store.commit(snapshot, "free", {}, 0, 0)


def test_chains_of_127(store: Metastore) -> None:
    parent: int | None = None
    made = []
    for number in range(127):
        parent = add(store, f"n{number}", parent)
        made.append(parent)
    assert [number for number, _ in store.chain(made[-1])] == made[::-1]
    assert store.children() == dict.fromkeys(made[:-1], 1)
    with pytest.raises(SnapshotInUse):
        store.remove(store.get("n3"))


def test_ids_are_never_used_twice(path: str) -> None:
    store = Metastore(path)
    first = add(store, "a")
    store.remove(store.get("a"))
    assert store.trash() == [first]
    assert add(store, "a") == first + 1
    store.remove(store.get("a"))
    store.forget_trash(store.trash())
    store.close()
    store = Metastore(path)
    assert store.reserve() == first + 2
    store.skip_ids(50)
    store.skip_ids(3)
    assert store.reserve() == 51
    store.close()


def test_layers(store: Metastore) -> None:
    plain, variant = store.layer("sha256:a", ""), store.layer("sha256:a", "v", "[[1,2]]")
    assert store.layer("sha256:a", "v") == variant and plain.id != variant.id
    assert variant.attributes == "[[1,2]]"
    store.set_layer_mode(variant.id, "lazy", 77)
    store.set_layer_durable(variant.id)
    again = store.layer_by_id(variant.id)
    assert again is not None and (again.mode, again.device, again.durable) == ("lazy", 77, 1)
    snapshot = store.add(Kind.COMMITTED, "s", None, {}, layer_id=variant.id)
    assert [layer.id for layer in store.unused_layers()] == [plain.id]
    assert store.layer_used("sha256:a") and not store.layer_used("sha256:b")
    assert not store.forget_layer(variant.id), "a snapshot refers to it"
    assert store.forget_layer(plain.id)
    assert store.chain(snapshot) == [(snapshot, variant.id)]
    store.remove(store.get("s"))
    assert store.trash() == [], "a lazy snapshot has no directory"
    assert store.forget_layer(variant.id)
    assert store.layer("sha256:a", "v").id > variant.id, "mount points are not used twice"


def test_users_of_layers_are_the_containers_above(store: Metastore) -> None:
    layers = [store.layer(f"sha256:{number}", "").id for number in range(2)]
    one = store.add(Kind.COMMITTED, "one", None, {}, layer_id=layers[0])
    two = store.add(Kind.COMMITTED, "two", one, {}, layer_id=layers[1])
    add(store, "c1", one, Kind.ACTIVE)
    add(store, "c2", two, Kind.ACTIVE)
    add(store, "v", two, Kind.VIEW)
    assert store.layer_users() == {layers[0]: ["c1", "c2", "v"], layers[1]: ["c2", "v"]}


def test_walking_while_rows_come_and_go(store: Metastore) -> None:
    for number in range(1200):
        add(store, f"n{number}")
    seen = []
    for page in store.walk():
        seen += [snapshot.name for snapshot in page]
        if len(seen) == 500:
            store.remove(store.get("n10"))
            store.remove(store.get("n900"))
            add(store, "late")
    assert len(seen) == 1200 == len(set(seen))
    assert "late" in seen and "n900" not in seen


def test_a_reader_beside_the_writer(path: str, store: Metastore) -> None:
    add(store, "a")
    reader = Metastore(path, readonly=True)
    assert reader.get("a").name == "a"
    add(store, "b")
    assert reader.get("b").name == "b"
    with pytest.raises(sqlite3.OperationalError):
        reader.set_labels(reader.get("a"), {"x": "y"})
    reader.close()


def test_checkpoints_from_another_thread(path: str, store: Metastore) -> None:
    for number in range(100):
        add(store, f"n{number}")
    assert os.path.getsize(path + "-wal") > 0
    before = os.path.getsize(path)
    thread = threading.Thread(target=store.checkpoint)
    thread.start()
    thread.join()
    assert os.path.getsize(path) > before
    assert len(store.ids()) == 100


def test_what_cannot_be_used_is_said_so(path: str) -> None:
    with open(path, "wb") as file:
        file.write(b"not a database" * 1000)
    with pytest.raises(StorageError, match="cannot be used"):
        Metastore(path)
    os.unlink(path)
    Metastore(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(StorageError, match="schema 99"):
        Metastore(path)
    with pytest.raises(StorageError):
        Metastore(os.path.dirname(path))


_WRITER = """
import sys
from weenv.plugin.containerd.types import Kind
from weenv.plugin.snapshotter.metastore import Metastore
store = Metastore(sys.argv[1])
number = len(store.ids())
parent = max(store.ids(), default=None)
while True:
    store.add(Kind.ACTIVE, f"key{number}", parent, {"n": str(number)})
    store.commit(store.get(f"key{number}"), f"name{number}", {"n": str(number)}, number, 1)
    parent = store.get(f"name{number}").id
    print(number, flush=True)
    number += 1
"""


def test_kill_nine_loses_nothing_that_was_answered(path: str) -> None:
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", _WRITER, path], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        last = int(writer.stdout.readline())
        deadline = time.monotonic() + 0.15
        while time.monotonic() < deadline:
            last = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split(b"\n")
        last = max([last, *(int(line) for line in rest[:-1] if line)])
        writer.stdout.close()
        writer.wait()
        store = Metastore(path)
        names = {snapshot.name: snapshot for page in store.walk() for snapshot in page}
        assert {f"name{number}" for number in range(last + 1)} <= set(names)
        assert len(names) <= last + 2, "at most the one that was being made"
        assert store.get(f"name{last}").size == last
        assert len(store.chain(store.get(f"name{last}").id)) == last + 1
        for name, snapshot in names.items():  # the next writer counts rows
            if name.startswith("key"):
                store.remove(snapshot)
        extra = [name for name in names if name.startswith("name") and int(name[4:]) > last + 1]
        assert not extra
        store.close()
