"""blobfs where the disk or the publisher is at fault: lost tails, holes, turned bits, lying diffIDs, disks that take nothing.

A real kernel mounts and reads; what is damaged is damaged on the disk, behind the server's back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from weenv.layer.tail import build_tail
from weenv.plugin.snapshotter.blobfs import daemon
from weenv.plugin.snapshotter.cache.present import is_bad, is_complete, progress
from weenv.plugin.snapshotter.layerdir import LayerDirs, Origin
from weenv.plugin.snapshotter.mounts import MNT_DETACH, MS_RDONLY, mount, unmount
from weenv_testkit.blobfsproc import Blobfs, drop_caches, read, read_until_complete, running
from weenv_testkit.synthetic import SyntheticLayer, make_layer, payload

pytestmark = pytest.mark.root

SMALL = make_layer([(f"f{number:03}", payload(3000 + 40 * number, number)) for number in range(200)], target=64 << 10)
LARGE = make_layer([("big", payload(24 << 20, 7))], target=256 << 10)

MS_REMOUNT = 32
SECONDS = float(os.environ.get("WEENV_SOAK_SECONDS", "300"))

STAT = "import os, sys; print('go', flush=True); os.stat(sys.argv[1])"
READ = "import sys; print('go', flush=True); open(sys.argv[1], 'rb').read(1)"


def eventually(what: str, condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def damage(path: Path, at: int = -1) -> None:
    """Turn a bit of a file, without changing its size."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    with path.open("r+b") as file:
        file.write(content)


def lying(layer: SyntheticLayer) -> SyntheticLayer:
    """The same frames under a TOC that says their stream has another diffID."""
    toc = dataclasses.replace(layer.toc, diff_id="sha256:" + "5a" * 32)
    tail = build_tail(toc)
    return SyntheticLayer(layer.blob[: -len(layer.tail)] + tail, layer.stream, layer.frames, tail, toc)


def test_a_damaged_tail_is_fetched_again_while_its_readers_wait(blobfs: Blobfs) -> None:
    path, other = blobfs.add(SMALL), blobfs.add(LARGE)
    toc = Path(f"{blobfs.directory(SMALL)}/toc")
    good = toc.read_bytes()
    with open(path, "rb", buffering=0) as file:  # a READ needs it ...
        blobfs.end(signal.SIGKILL)
        damage(toc)
        bad = toc.read_bytes()
        blobfs.start()
        drop_caches()
        results: list[bytes] = []
        threads = [threading.Thread(target=lambda: results.append(os.pread(file.fileno(), 5000, 777))) for _ in range(8)]
        threads += [threading.Thread(target=lambda: results.append(read(path)[777:5777])) for _ in range(8)]  # and OPEN
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert results == [SMALL.stream[777:5777]] * 16
    assert toc.read_bytes() == good
    assert toc.with_name("toc.damaged").read_bytes() == bad
    assert blobfs.status()["tails_replaced"] == 1
    assert blobfs.log().count("a stored tail is damaged") == 1
    assert read(other) == LARGE.stream


def test_a_tail_that_is_gone_or_short_is_fetched_again(blobfs: Blobfs) -> None:
    path = blobfs.add(SMALL)
    toc = Path(f"{blobfs.directory(SMALL)}/toc")
    good = toc.read_bytes()
    toc.unlink()
    assert os.stat(path).st_size == len(SMALL.stream)  # LOOKUP
    assert toc.read_bytes() == good
    blobfs.end(signal.SIGKILL)
    toc.write_bytes(good[:100])
    blobfs.start()
    drop_caches()
    assert read(path) == SMALL.stream
    assert toc.read_bytes() == good
    assert not [name for name in os.listdir(toc.parent) if name.endswith(".tmp")]


def test_a_damaged_tail_without_a_source_is_an_error_of_that_layer_until_the_source_is_back(blobfs: Blobfs) -> None:
    path = blobfs.add(SMALL)
    blob = Path(f"{blobfs.path}/{SMALL.name}.blob")
    away = blob.rename(blob.with_suffix(".away"))
    toc = Path(f"{blobfs.directory(SMALL)}/toc")
    damage(toc)
    for _ in range(3):
        with pytest.raises(OSError) as caught:
            os.stat(path)
        assert caught.value.errno == errno.EIO
    assert read(blobfs.add(LARGE)) == LARGE.stream
    assert blobfs.log().count("a damaged tail cannot be replaced") == 1
    assert blobfs.log().count("pull it again") == 1
    away.rename(blob)

    def healed() -> bool:
        try:
            return read(path) == SMALL.stream
        except OSError:
            return False

    eventually("the tail to be fetched", healed)
    assert blobfs.status()["tails_replaced"] == 1


@pytest.mark.parametrize("code", [STAT, READ])
def test_a_reader_that_is_killed_while_a_tail_is_fetched_ends(home: str, code: str) -> None:
    path = f"{home}/parked{len(code)}"
    os.mkdir(path)
    with running(path, deadline=300.0) as blobfs, socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(16)  # accepts and never answers
        directory = SMALL.install(path, Origin("registry", host=f"127.0.0.1:{mute.getsockname()[1]}", repository="no/answer"))
        name = f"{blobfs.config.mountpoint}/{SMALL.name}"
        if code == READ:
            os.stat(name)
            blobfs.end(signal.SIGKILL)
        damage(Path(directory, "toc"))
        if code == READ:
            blobfs.start()
        with subprocess.Popen([sys.executable, "-c", code, name], stdout=subprocess.PIPE) as reader:
            assert reader.stdout is not None
            reader.stdout.readline()
            eventually("the request to wait", lambda: blobfs.status()["waiting"] > 0)
            reader.kill()
            reader.wait(60)
        eventually("the request to be let go", lambda: not blobfs.status()["waiting"])


def test_data_that_is_cut_or_punched_under_the_server_is_fetched_again(blobfs: Blobfs) -> None:
    path = blobfs.add(LARGE)
    directory = blobfs.directory(LARGE)
    read_until_complete(path, LARGE.stream, directory)
    fetched = blobfs.status()["fetched_bytes"]
    os.truncate(f"{directory}/data", 10 << 20)
    assert not is_complete(directory)
    drop_caches()
    assert read(path) == LARGE.stream
    status = blobfs.status()
    assert status["fetched_bytes"] > fetched
    assert status["layers"][0]["errors"]["damage"] >= 1
    assert "data is short" in status["layers"][0]["last_error"]
    assert blobfs.log().count("cached data cannot be read") == 1
    read_until_complete(path, LARGE.stream, directory)
    assert Path(f"{directory}/data").read_bytes() == LARGE.stream


def test_holes_that_appeared_while_no_server_ran_are_filled(blobfs: Blobfs) -> None:
    path = blobfs.add(LARGE)
    directory = blobfs.directory(LARGE)
    read_until_complete(path, LARGE.stream, directory)
    blobfs.end()
    subprocess.run(["fallocate", "-p", "-o", str(5 << 20), "-l", str(1 << 20), f"{directory}/data"], check=True)
    assert not is_complete(directory), "the snapshotter must not mount it either"
    blobfs.start()
    drop_caches()
    assert read(path) == LARGE.stream
    assert "cached data is damaged" in blobfs.log()
    assert blobfs.status()["layers"][0]["stream_size"] >= 1 << 20
    assert blobfs.status()["fetched_bytes"] < 3 << 20, "only what was lost is fetched"
    read_until_complete(path, LARGE.stream, directory)


def test_a_turned_bit_in_the_present_file_shows_no_zeros(blobfs: Blobfs) -> None:
    path = blobfs.add(LARGE)
    directory = blobfs.directory(LARGE)
    with open(path, "rb") as file:
        file.seek(20 << 20)
        file.read(4096)
    blobfs.end()
    present = Path(f"{directory}/present")
    before = progress(directory)[0]
    assert 0 < before < len(LARGE.stream)
    damage(present)  # the last frame is missing and has a bit now
    blobfs.start()
    drop_caches()
    assert read(path) == LARGE.stream
    assert "cached data is damaged" in blobfs.log()


def test_rotten_data_is_found_before_the_layer_counts_as_complete(blobfs: Blobfs) -> None:
    path = blobfs.add(LARGE)
    directory = blobfs.directory(LARGE)
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 20):
            pass
    blobfs.end()  # before anybody has looked at the whole
    assert progress(directory)[0] == len(LARGE.stream)
    assert not is_complete(directory)
    with open(f"{directory}/data", "r+b") as data:
        data.seek(11 << 20)
        data.write(b"rotten")
    blobfs.start()
    drop_caches()
    os.stat(path)
    with open(path, "rb"):
        eventually("the check", lambda: blobfs.status()["diffid_mismatches"] == 1)
    assert not is_complete(directory)
    assert not is_bad(directory)
    read_until_complete(path, LARGE.stream, directory)
    assert Path(f"{directory}/data").read_bytes() == LARGE.stream
    status = blobfs.status()
    assert (status["layers"][0]["diffid"], status["bad_layers"]) == ("good", [])
    assert blobfs.log().count("everything of it is fetched again") == 1


def test_a_toc_that_lies_about_the_diffid_never_becomes_complete(blobfs: Blobfs) -> None:
    liar = lying(LARGE)
    path, other = blobfs.add(liar), blobfs.add(SMALL)
    directory = blobfs.directory(liar)

    def bad() -> bool:
        drop_caches()
        try:
            assert read(path) == liar.stream  # every frame is what the TOC says
        except OSError as error:
            assert error.errno == errno.EIO
            return True
        assert not is_complete(directory)
        time.sleep(0.2)
        return False

    eventually("the verdict", bad, 60)
    assert is_bad(directory)
    assert read(other) == SMALL.stream
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            os.close(os.open(path, os.O_RDONLY))
        assert caught.value.errno == errno.EIO
        status = blobfs.status()
        assert [one["digest"] for one in status["bad_layers"]] == [liar.digest]
        assert blobfs.log().count("served no more") == 1
        blobfs.end(signal.SIGKILL)
        blobfs.start()
        drop_caches()
    LayerDirs(blobfs.path).discard(liar.digest)
    blobfs.add(liar)  # removed and pulled again: it is judged anew
    assert read(path) == liar.stream
    assert blobfs.status()["bad_layers"] == []


def test_a_disk_that_goes_read_only_is_read_from_and_written_again_later(home: str) -> None:
    path = f"{home}/readonly"
    os.makedirs(f"{path}/disk")
    mount("tmpfs", f"{path}/disk", "tmpfs", 0, "size=200m")
    try:
        with running(path, root=f"{path}/disk", sync=0.5) as blobfs:
            Path(f"{path}/blob").write_bytes(LARGE.blob)
            directory = LARGE.install(f"{path}/disk", Origin("file", path=f"{path}/blob"))
            name = f"{blobfs.config.mountpoint}/{LARGE.name}"
            with open(name, "rb", buffering=0) as file:
                file.read(8 << 20)
            blobfs.end()
            there = progress(directory)[0]
            assert 4 << 20 < there < len(LARGE.stream)
            mount("tmpfs", f"{path}/disk", "tmpfs", MS_REMOUNT | MS_RDONLY, "size=200m")
            blobfs.start()
            drop_caches()
            assert read(name) == LARGE.stream
            status = blobfs.status()
            assert status["fetched_bytes"] < len(LARGE.blob) - (2 << 20), "what was there is used"
            assert status["errors"].keys() <= {"enospc"}
            assert "Read-only" in blobfs.log()
            mount("tmpfs", f"{path}/disk", "tmpfs", MS_REMOUNT, "size=200m")
            read_until_complete(name, LARGE.stream, directory)
    finally:
        unmount(f"{path}/disk", MNT_DETACH)


def test_a_disk_without_inodes_serves_without_a_cache_and_recovers(home: str) -> None:
    path = f"{home}/inodes"
    os.makedirs(f"{path}/disk")
    mount("tmpfs", f"{path}/disk", "tmpfs", 0, "size=200m,nr_inodes=20")
    try:
        with running(path, root=f"{path}/disk", sync=0.5) as blobfs:
            Path(f"{path}/blob").write_bytes(LARGE.blob)
            directory = LARGE.install(f"{path}/disk", Origin("file", path=f"{path}/blob"))
            fillers: list[str] = []
            with pytest.raises(OSError) as caught:
                for number in range(30):
                    Path(f"{path}/disk/{number}").touch()
                    fillers.append(f"{path}/disk/{number}")
            assert caught.value.errno == errno.ENOSPC
            name = f"{blobfs.config.mountpoint}/{LARGE.name}"
            assert read(name) == LARGE.stream
            assert sorted(os.listdir(directory)) == ["source.json", "toc"]
            assert blobfs.status()["errors"].keys() <= {"enospc"}
            for filler in fillers:
                os.unlink(filler)
            read_until_complete(name, LARGE.stream, directory)
    finally:
        unmount(f"{path}/disk", MNT_DETACH)


def test_a_disk_on_the_brink_gives_every_reader_the_right_bytes(home: str) -> None:
    """Readers at random while the disk is full, then not, then full: nobody sees anything but the stream."""
    path = f"{home}/brink"
    os.makedirs(f"{path}/disk")
    mount("tmpfs", f"{path}/disk", "tmpfs", 0, "size=6m")
    try:
        with running(path, root=f"{path}/disk", sync=0.2) as blobfs:
            Path(f"{path}/blob").write_bytes(LARGE.blob)
            directory = LARGE.install(f"{path}/disk", Origin("file", path=f"{path}/blob"))
            name = f"{blobfs.config.mountpoint}/{LARGE.name}"
            wrong: list[object] = []
            done = threading.Event()

            def reader(seed: int) -> None:
                dice = random.Random(seed)
                with open(name, "rb", buffering=0) as file:
                    while not done.is_set():
                        at, size = dice.randrange(len(LARGE.stream)), dice.choice((1, 4096, 100_000, 1 << 20))
                        try:
                            if os.pread(file.fileno(), size, at) != LARGE.stream[at : at + size]:
                                wrong.append((at, size))
                        except OSError as error:
                            wrong.append(error)
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

            threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(6)]
            for thread in threads:
                thread.start()
            try:
                eventually("a full disk", lambda: blobfs.status()["errors"].get("enospc", 0) > 0)
                for size in (9, 12):
                    mount("tmpfs", f"{path}/disk", "tmpfs", MS_REMOUNT, f"size={size}m")
                    before = blobfs.status()["errors"]["enospc"]
                    eventually(
                        "a full disk again",
                        lambda seen=before: blobfs.status()["errors"]["enospc"] > seen,  # type: ignore[misc]
                    )
                mount("tmpfs", f"{path}/disk", "tmpfs", MS_REMOUNT, "size=200m")
                eventually("everything to be stored", lambda: progress(directory)[0] == len(LARGE.stream))
            finally:
                done.set()
                for thread in threads:
                    thread.join()
            assert not wrong
            read_until_complete(name, LARGE.stream, directory)
            assert Path(f"{directory}/data").read_bytes() == LARGE.stream
            assert blobfs.log().count("serving without a cache") <= 2
    finally:
        unmount(f"{path}/disk", MNT_DETACH)


def test_a_forced_stop_ends_readers_that_wait(home: str) -> None:
    path = f"{home}/forced"
    os.mkdir(path)
    with running(path, deadline=300.0) as blobfs, socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(16)
        SMALL.install(path, Origin("registry", host=f"127.0.0.1:{mute.getsockname()[1]}", repository="no/answer"))
        failed: list[int | None] = []

        def reader() -> None:
            try:
                read(f"{blobfs.config.mountpoint}/{SMALL.name}")
            except OSError as error:
                failed.append(error.errno)

        threads = [threading.Thread(target=reader) for _ in range(4)]
        for thread in threads:
            thread.start()
        eventually("readers to wait", lambda: blobfs.status()["waiting"] > 0)
        assert daemon.stop(blobfs.config, force=True)
        # A detached mount ends with its last file: what waits in it is let go with the connection.
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert len(failed) == 4


def test_the_operator_sees_what_went_wrong_with_which_layer(blobfs: Blobfs) -> None:
    path, other = blobfs.add(LARGE, LARGE.corrupted(50)), blobfs.add(SMALL)
    at = int(LARGE.frames.content_offsets[50]) + 8192
    with open(path, "rb", buffering=0) as file, pytest.raises(OSError):
        os.pread(file.fileno(), 4096, at)
    read(other)

    def settled() -> bool:
        layers = {layer["digest"]: layer for layer in blobfs.status()["layers"]}
        return layers[SMALL.digest]["diffid"] == "good" and layers[LARGE.digest]["local_bytes"] > 0

    eventually("the other layer to be checked", settled)
    layers = {layer["digest"]: layer for layer in blobfs.status()["layers"]}
    bad, good = layers[LARGE.digest], layers[SMALL.digest]
    assert bad["errors"]["digest"] >= 1
    assert bad["errors"]["eio"] >= 1
    assert "frame 50" in bad["last_error"]
    assert bad["last_error"].startswith("20")
    assert 0 < bad["local_percent"] < 100
    assert (good["local_percent"], good["errors"], good["last_error"]) == (100.0, {}, "")


def test_readers_see_no_error_while_servers_end_and_begin(blobfs: Blobfs) -> None:
    """SIGTERM under readers who miss all the time: what an ending server has read and not answered, the next one answers."""
    path = blobfs.add(LARGE)
    directory = blobfs.directory(LARGE)
    os.stat(path)
    wrong: list[object] = []
    reads = [0]
    done = threading.Event()

    def reader(seed: int) -> None:
        dice = random.Random(seed)
        try:
            with open(path, "rb", buffering=0) as file:
                while not done.is_set():
                    at = dice.randrange(len(LARGE.stream))
                    if os.pread(file.fileno(), 4096, at) != LARGE.stream[at : at + 4096]:
                        wrong.append(at)
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    reads[0] += 1
        except OSError as error:
            wrong.append(error)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            before = reads[0]
            eventually("readers to go on", lambda seen=before: reads[0] > seen + 5, 60)  # type: ignore[misc]
            assert blobfs.end(signal.SIGTERM) == 0
            for name in ("data", "present"):  # nothing is there: every read is a miss
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{directory}/{name}")
            blobfs.start()
        before = reads[0]
        eventually("readers to go on", lambda: reads[0] > before + 20, 60)
    finally:
        done.set()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


@pytest.mark.soak
@pytest.mark.timeout(SECONDS * 2 + 300)
def test_killed_and_damaged_at_any_moment(blobfs: Blobfs) -> None:
    """SIGKILL at random, and while nobody serves: holes, cut data, turned bits in map and tail; readers notice nothing."""
    dice = random.Random()
    layers = [make_layer([("big", payload(12 << 20, number))], target=128 << 10) for number in range(3)]
    paths = [blobfs.add(layer) for layer in layers]
    for path in paths:
        os.stat(path)
    wrong: list[object] = []
    reads = [0]
    done = threading.Event()

    def reader() -> None:
        own = random.Random()
        while not done.is_set():
            number = own.randrange(3)
            stream = layers[number].stream
            try:
                with open(paths[number], "rb", buffering=0) as file:
                    for _ in range(own.randrange(1, 20)):
                        at, size = own.randrange(len(stream)), own.choice((1, 4096, 100_000, 1 << 20))
                        if os.pread(file.fileno(), size, at) != stream[at : at + size]:
                            wrong.append((number, at, size))
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                        reads[0] += 1
            except OSError as error:
                wrong.append(error)

    threads = [threading.Thread(target=reader) for _ in range(6)]
    for thread in threads:
        thread.start()
    end, kills = time.monotonic() + SECONDS, 0
    try:
        while time.monotonic() < end and not wrong:
            time.sleep(dice.uniform(0.0, 1.5))
            blobfs.end(dice.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)))
            kills += 1
            directory = Path(blobfs.directory(dice.choice(layers)))
            match dice.randrange(6):
                case 0:
                    damage(directory / "toc", dice.randrange(1000))
                case 1 if (directory / "present").exists():
                    damage(directory / "present", dice.randrange(64))
                case 2 if (directory / "data").exists():
                    os.truncate(directory / "data", dice.randrange(12 << 20))
                case 3 if (directory / "data").exists():
                    at = dice.randrange(11 << 20) >> 12 << 12
                    subprocess.run(["fallocate", "-p", "-o", str(at), "-l", "300000", str(directory / "data")], check=True)
                case 4:
                    drop_caches()
            blobfs.start()
        before = reads[0]
        eventually("readers to go on", lambda: reads[0] > before + 100, 60)
    finally:
        done.set()
        for thread in threads:
            thread.join(60)
    assert not wrong
    assert kills > SECONDS / 10
    assert "Traceback" not in blobfs.log()
